"""A run starts its engine's servers: from an environment that is named, on the GPUs that are free, and ends with all of them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import policygrad as pg
import policygrad.weight_sync.folder as folder_module
from doubles.cases import keep_fast
from doubles.engine_environment import make_environment
from doubles.forked import Forked
from policygrad import cli
from policygrad.errors import ConfigError, EngineError
from policygrad.samplers.config import SamplerConfig
from policygrad.samplers.engines.factory import assign_gpus
from policygrad.training.base_trainer import Callback
from policygrad.training.engine_setup import list_learner_gpus
from policygrad.weight_sync.folder import SHARED_MEMORY, choose_folder

VLLM = SamplerConfig(engine="vllm", max_concurrency=4)
linux = pytest.mark.skipif(sys.platform != "linux", reason="looks for child processes in /proc")


def make_run(small: pg.Run, folder: Path, environment: Path, **sampler: Any) -> pg.Run:
    engine = replace(VLLM, python=str(environment), **sampler)
    return replace(small, sampler=engine, steps=2, samples_per_prompt=2, output=str(folder))


def find_processes(word: str) -> list[int]:
    """Return the processes whose command line has this word, guards and servers alike."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            command = (path / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if word in command and int(path.name) != os.getpid():
            found.append(int(path.name))
    return found


def find_children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class Killing(Callback):
    """Kills a server after every step, in turn."""

    def __init__(self) -> None:
        self.killed: list[str] = []
        self.folder: Path | None = None

    def step(self, trainer: Any, step: int, metrics: Any) -> None:
        self.folder = trainer.resources.rollouter.sampler.versions.root
        processes = trainer.resources.rollouter.sampler.processes
        url = list(processes)[step % len(processes)]
        for pid in find_processes(url.rpartition(":")[2]):
            if pid != processes[url].guard.pid:
                os.kill(pid, signal.SIGKILL)
        processes[url].guard.wait()
        self.killed.append(url)


@linux
@pytest.mark.usefixtures("short_probes")
@pytest.mark.parametrize("servers", keep_fast((1, 2), 2))
def test_servers_that_are_killed_are_started_again_and_nothing_is_lost(
    servers: int, small: pg.Run, tmp_path: Path
) -> None:
    environment, killing = make_environment(tmp_path / "venv"), Killing()
    run = make_run(small, tmp_path / "run", environment, servers=servers)
    result = pg.train(run, display=False, callbacks=[killing])
    assert result.steps == 2
    assert len(killing.killed) == 2
    assert len(set(killing.killed)) == servers
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "reward" in row] == [1, 2]
    assert all(row["publication/probe_max"] < 1e-4 for row in rows if "publication/probe_max" in row)
    logs = [(tmp_path / "run" / f"server-{i}.log").read_text() for i in range(servers)]
    assert sum(log.count("http://127.0.0.1:") for log in logs) > servers  # each start is in them
    assert not (tmp_path / "run" / "weights").exists()
    assert killing.folder is not None
    assert killing.folder.parent == SHARED_MEMORY
    assert not killing.folder.exists()
    assert not find_processes(str(killing.folder))  # it is in the command of every guard
    assert not find_processes(str(environment))


@linux
@pytest.mark.usefixtures("short_probes")
def test_no_server_is_left_when_the_run_is_killed(random_model: Path, forked: Forked, tmp_path: Path) -> None:
    environment = make_environment(tmp_path / "venv")
    options = ("--model", str(random_model), "--steps", "500", "--prompts-per-step", "2", "--samples-per-prompt", "4")
    engine = ("--sampler.engine", "vllm", "--sampler.python", str(environment), "--output", str(tmp_path / "run"))
    command = ["train", "grpo", *options, *engine, "--max-tokens", "4", "--evaluation.problems", "0", "--plain"]
    reading, writing = os.pipe()
    run = forked.start(cli.main, command, stdout=writing)
    os.close(writing)
    with open(reading, encoding="utf-8") as output:
        printed = []
        for line in output:
            printed.append(line)
            if line.startswith("step "):
                break
        else:
            pytest.fail("".join(printed))
        [guard] = find_processes(str(environment / "bin" / "vllm"))
        [server] = find_children(guard)
        words = Path(f"/proc/{guard}/cmdline").read_bytes().decode().split("\0")
        [folder] = [Path(word) for word in words if Path(word).parent == SHARED_MEMORY]
        assert list(folder.iterdir())
        run.kill()
        run.join()
    for pid in (guard, server):
        subprocess.run(["tail", f"--pid={pid}", "-f", "/dev/null"], timeout=60, check=True)
    assert not folder.exists()


def test_weights_go_through_memory_where_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, other = tmp_path / "shm", tmp_path / "run" / "weights"
    monkeypatch.setattr(folder_module, "SHARED_MEMORY", memory)
    assert choose_folder(other, 1000) == other  # this machine has none
    memory.mkdir()
    first, second = choose_folder(other, 1000), choose_folder(other, 1000)
    assert first.parent == second.parent == memory
    assert first != second
    free = shutil.disk_usage(memory).free
    assert choose_folder(other, free) == other  # one version, and no room for the next


def test_server_that_cannot_start_ends_the_run_with_the_end_of_its_log(small: pg.Run, tmp_path: Path) -> None:
    program = "echo loading; echo 'CUDA out of memory' >&2; exit 7"
    environment = make_environment(tmp_path / "venv", program=program)
    with pytest.raises(
        EngineError, match=r"(?s)ended with exit code 7 .*server-0\.log:\n  loading\n  CUDA out of memory"
    ):
        pg.train(make_run(small, tmp_path / "run", environment), display=False)
    assert "CUDA out of memory" in (tmp_path / "run" / "server-0.log").read_text()


def test_server_that_never_answers_is_given_up_after_its_time_to_start(small: pg.Run, tmp_path: Path) -> None:
    environment = make_environment(tmp_path / "venv", program="echo loading; exec sleep 600")
    run = make_run(small, tmp_path / "run", environment, start_timeout=0.5, recovery_timeout=0.5)
    with pytest.raises(EngineError, match=r"(?s)no server has answered for 0\.5 seconds .*loading"):
        pg.train(run, display=False)
    assert not find_processes(str(environment))


def test_missing_engine_is_refused_before_the_model_is_loaded(small: pg.Run, tmp_path: Path) -> None:
    environment = make_environment(tmp_path / "venv", package="sglang")
    with pytest.raises(ConfigError, match=r"vLLM is not in .*venv. `policygrad engine install vllm --into DIR`"):
        pg.train(replace(make_run(small, tmp_path / "run", environment), model="no-such/model"), display=False)


@pytest.mark.parametrize(
    ("servers", "named", "learner", "count", "gpus", "memory"),
    [
        (1, (), (), 0, (), 0.0),  # no GPU
        (2, (), (0,), 4, (1, 2, 3), 0.0),  # the learner keeps its own
        (3, (), (0, 1), 8, (2, 3, 4, 5, 6, 7), 0.0),
        (1, (), (0,), 1, (0,), 0.4),  # they share the only one
        (2, (), (0,), 1, (0,), 0.2),
        (4, (), (0,), 3, (1, 2), 0.45),  # two on each
        (1, (0,), (0,), 2, (0,), 0.4),  # as it was told
        (1, (3,), (), 4, (3,), 0.0),
    ],
)
def test_servers_get_the_gpus_that_the_learner_leaves(
    servers: int, named: tuple[int, ...], learner: tuple[int, ...], count: int, gpus: tuple[int, ...], memory: float
) -> None:
    resolved = assign_gpus(replace(VLLM, servers=servers, gpus=named), learner, count)
    assert (resolved.gpus, resolved.gpu_memory) == (gpus, memory)
    assert assign_gpus(replace(VLLM, servers=servers, gpu_memory=0.7), learner, max(count, 1)).gpu_memory == 0.7


def test_missing_gpus_are_named() -> None:
    with pytest.raises(ConfigError, match="names GPU 3, and this machine has 2, numbered from 0"):
        assign_gpus(replace(VLLM, gpus=(0, 3)), (), 2)
    assert [*list_learner_gpus("cuda", 2)] == [0, 1]
    assert [*list_learner_gpus("cuda:1", 1)] == [1]
    assert [*list_learner_gpus("cpu", 2)] == []


def test_each_server_sees_its_gpu_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from policygrad.models.loading import load_model
    from policygrad.models.tokenizer import load_tokenizer
    from policygrad.samplers.engines.installation import Installation
    from policygrad.samplers.engines.vllm import VllmSampler
    from policygrad.weight_sync.folder import WeightVersion

    model = load_model("tiny", dtype="fp32", device="cpu")
    config = replace(VLLM, gpus=(1, 2), gpu_memory=0.4, urls=())
    sampler = VllmSampler(model, load_tokenizer("tiny", model), config, tmp_path / "weights")
    sampler.published = WeightVersion("v00000000-0", 0, tmp_path / "weights" / "v00000000-0", 0)
    installation = Installation("/venv/bin/python", "0.32.0")
    for visible, seen in (("", ["1", "2"]), ("4,5,6", ["5", "6"])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        for number in range(2):
            environment, argv = sampler._make_launch_command(installation, number, "http://127.0.0.1:77")
            assert environment["CUDA_VISIBLE_DEVICES"] == seen[number]
            assert [*argv][:2] == ["/venv/bin/vllm", "serve"]
            assert argv[argv.index("--gpu-memory-utilization") + 1] == "0.4"  # type: ignore[attr-defined]
            assert argv[argv.index("--port") + 1] == "77"  # type: ignore[attr-defined]
            assert argv[2] == model.config._name_or_path  # its published folder is not there


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"servers": 0}, "sampler.servers must be at least 1, not 0"),
        ({"servers": 2, "urls": ("http://a:1",)}, "sampler.servers is for servers that the run starts"),
        ({"python": "venv", "urls": ("http://a:1",)}, "sampler.python is for servers that the run starts"),
        ({"gpu_memory": 1.0}, "sampler.gpu_memory must be at least 0 and below 1"),
        ({"gpus": (0, -1)}, "must be numbers of GPUs, from 0, not -1"),
        ({"engine": "local", "servers": 2}, "sampler.servers is an option of servers, and sampler.engine is local"),
        ({"engine": "local", "python": "venv"}, "sampler.python is an option of servers"),
        ({"start_timeout": 0.0}, "sampler.start_timeout must be above 0"),
    ],
)
def test_contradicting_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SamplerConfig(**{"engine": "vllm", **options})
