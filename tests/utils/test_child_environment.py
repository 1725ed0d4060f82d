"""Which environment variables reach which child process: one rule, shown for every kind of them."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

import policygrad as pg
from doubles.engine_environment import make_environment
from policygrad.commands import engine as engine_command
from policygrad.compare.runner import SubprocessRunner
from policygrad.environments.agent_program import AgentProgram
from policygrad.errors import ConfigError, EngineError, RunError
from policygrad.learners.fsdp.processes import LocalWorker
from policygrad.rewards.math.formulas import _Comparer
from policygrad.rewards.workers.pool import RewardPool
from policygrad.samplers.config import SamplerConfig
from policygrad.samplers.engines.installation import find_version
from policygrad.samplers.engines.registry import ENGINES, load_engine_class
from policygrad.samplers.engines.server_process import ServerProcess
from policygrad.utils.child_environment import (
    DEVICE_VARIABLES,
    ENGINE_VARIABLES,
    PASSED_VARIABLES,
    explain_missing_variable,
    filter_environment,
    parse_names,
)

linux = pytest.mark.skipif(sys.platform != "linux", reason="variables of a process are read from /proc")
PROGRAM = f"""#!{sys.executable}
import json, os
text = json.dumps(dict(os.environ))
if "POLICYGRAD_RESULT" in os.environ:
    open(os.environ["POLICYGRAD_RESULT"], "w").write(json.dumps({{"answer": text}}))
else:
    open(__file__ + ".json", "w").write(text)
"""
"""Writes its variables beside itself, or as an agent's result."""
Environment = Mapping[str, str]


def make_program(folder: Path) -> Path:
    program = folder / "program"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    return program


def read_written(program: Path) -> Environment:
    written: Environment = json.loads(Path(f"{program}.json").read_text())
    return written


def read_from_proc(pid: int) -> Environment:
    while not (data := Path(f"/proc/{pid}/environ").read_bytes()):  # its program is just being loaded
        time.sleep(0.01)
    return dict(entry.split("=", 1) for entry in data.decode().split("\0") if entry)


def observe_reward_worker(folder: Path) -> Environment:
    def writes(prompts: list[str], completions: list[str], **_: object) -> list[float]:
        Path(completions[0]).write_text(json.dumps(dict(os.environ)))
        return [1.0]

    with RewardPool([writes], environment=("NAMED_TOKEN",)) as pool:
        assert pool.score(["p"], [str(folder / "program.json")], {}).total == [1.0]
    return read_written(folder / "program")


def observe_comparison_of_formulas(folder: Path) -> Environment:
    comparer = _Comparer()
    assert comparer("1", "1")
    assert comparer._process is not None
    try:
        return read_from_proc(comparer._process.pid)
    finally:
        comparer._process.kill()
        comparer._process.communicate()


def observe_mcp_program(folder: Path) -> Environment:
    program = make_program(folder)
    server = pg.McpTools([str(program)], variables={"NAMED_TOKEN": os.environ["NAMED_TOKEN"]})
    with pytest.raises(EngineError), server:  # it ends without a message
        pass
    return read_written(program)


def observe_agent(folder: Path) -> Environment:
    with AgentProgram([str(make_program(folder))], environment=("NAMED_TOKEN",)) as agent:
        running = agent.start(pg.Example("x"), "key-of-the-episode", {"OPENAI_API_KEY": "key-of-the-episode"})
        while running.poll() is None:
            time.sleep(0.01)
        written: Environment = json.loads(running.read_result()["answer"])
        running.close()
        return written


def observe_version_query(folder: Path) -> Environment:
    program = make_program(folder)
    find_version(str(program), "vllm")
    return read_written(program)


def observe_server(engine: str) -> Callable[[Path], Environment]:
    def observe(folder: Path) -> Environment:
        program, variables = make_program(folder), (*load_engine_class(engine).variables, "NAMED_TOKEN")
        process = ServerProcess(folder / "log", lambda: ({}, [str(program)]), variables)
        process.ensure_running()
        assert process.guard is not None
        process.guard.wait()
        process.stop()
        return read_written(program)

    return observe


def observe_engine_command(folder: Path) -> Environment:
    environment, started = make_environment(folder / "venv"), list[Environment]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.execvpe", lambda name, argv, variables: started.append(variables))
        engine_command.engine(["vllm", "--python", str(environment), "--env", "NAMED_TOKEN"])
    return started[0]


def observe_rank(folder: Path) -> Environment:
    worker = LocalWorker("127.0.0.1", 1, 1, 2, b"k" * 32)  # it finds no rank 0 at this port
    try:
        return read_from_proc(worker.pid)
    finally:
        worker.kill()
        worker.wait()


def observe_run_of_a_comparison(folder: Path) -> Environment:
    program = make_program(folder)
    with pytest.raises(RunError):  # it leaves no result
        SubprocessRunner(1, [str(program)])(["train"], folder / "run")
    return read_written(program)


# Variables of this process, by who gets them.
DEFAULT = {"HF_HUB_OFFLINE", "CONDA_PREFIX", "CUDA_HOME", "LD_LIBRARY_PATH", "LC_TIME"}
NAMED = {"NAMED_TOKEN"}  # where it is named
DEVICE = {"NCCL_DEBUG", "CC", "CUBLAS_WORKSPACE_CONFIG"}
HUB = {"HF_TOKEN", "https_proxy", "TORCH_LOGS_OUT", "HF_XET_CACHE_SIZE"}
OF_ENGINES = {"vllm": {"VLLM_LOGGING_LEVEL"}, "sglang": {"SGLANG_LOGGING"}, "llama_cpp": {"GGML_VK_DISABLE_F16"}}
SECRETS = {
    *("OPENAI_API_KEY", "WANDB_API_KEY", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "GITHUB_TOKEN", "MY_PORT"),
    *("NVIDIA_API_KEY", "HF_HUB_TOKEN", "VLLM_API_KEY", "SGLANG_API_KEY", "LLAMA_API_KEY", "RAY_AUTH_TOKEN"),
    "TORCHELASTIC_USE_AGENT_STORE",
}
EVERYTHING = DEFAULT | NAMED | DEVICE | HUB | SECRETS | set[str]().union(*OF_ENGINES.values())
KINDS: dict[str, tuple[Callable[[Path], Environment], set[str]]] = {
    "reward worker": (observe_reward_worker, DEFAULT | NAMED),
    "comparison of formulas": (observe_comparison_of_formulas, DEFAULT),
    "program of an MCP server": (observe_mcp_program, DEFAULT | NAMED),
    "agent": (observe_agent, DEFAULT | NAMED),
    "question for an engine's version": (observe_version_query, DEFAULT),
    "vLLM": (observe_server("vllm"), DEFAULT | NAMED | DEVICE | HUB | OF_ENGINES["vllm"]),
    "SGLang": (observe_server("sglang"), DEFAULT | NAMED | DEVICE | HUB | OF_ENGINES["sglang"]),
    "llama.cpp": (observe_server("llama_cpp"), DEFAULT | NAMED | DEVICE | OF_ENGINES["llama_cpp"]),
    "policygrad engine": (observe_engine_command, DEFAULT | NAMED | DEVICE | HUB | OF_ENGINES["vllm"]),
    "rank": (observe_rank, EVERYTHING),
    "run of a comparison": (observe_run_of_a_comparison, EVERYTHING),
}


@linux
@pytest.mark.parametrize("kind", KINDS)
def test_a_child_gets_the_default_variables_and_others_by_name(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    observe, expected = KINDS[kind]
    set_variables(monkeypatch)
    check_variables(observe(tmp_path), expected)


@linux
def test_the_server_of_a_run_gets_those_that_the_run_names(
    small: pg.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = make_program(tmp_path)
    environment = make_environment(tmp_path / "venv", program=f"exec {program}")
    sampler = SamplerConfig(engine="vllm", python=str(environment), env=("NAMED_TOKEN",))
    set_variables(monkeypatch)
    with pytest.raises(EngineError, match="before it answered"):
        pg.train(replace(small, sampler=sampler, output=str(tmp_path / "run")), display=False)
    check_variables(read_written(program), DEFAULT | NAMED | DEVICE | HUB | OF_ENGINES["vllm"])


def set_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in EVERYTHING:
        monkeypatch.setenv(name, f"/of/the/user/{name}")


def check_variables(environment: Environment, expected: set[str]) -> None:
    assert {name for name in EVERYTHING if environment.get(name) == os.environ[name]} == expected
    assert not [name for name in SECRETS - expected if os.environ[name] in environment.values()]
    assert environment["PATH"] == os.environ["PATH"]


def test_a_pattern_passes_no_secret() -> None:
    given = {"PATH": "/bin", "LC_ALL": "C"}
    others = {"AWS_SECRET_ACCESS_KEY": "x", "http_proxy": "x", "HF_HUB_TOKEN": "x"}
    assert filter_environment(given | others, ()) == given
    assert filter_environment(given | others, ("http_proxy", "AWS_*", "*")) == given | {"http_proxy": "x"}
    assert filter_environment(given | others, ("HF_HUB_TOKEN",)) == given | {"HF_HUB_TOKEN": "x"}


def test_variable_names_are_checked() -> None:
    assert parse_names("A, B_C,") == ("A", "B_C")
    assert parse_names("none") == ()
    assert explain_missing_variable("raised KeyError: 'NO_SUCH_VARIABLE_IS_SET'", (), "workers", "--option") == ""
    for wrong in ("A=1", "", "1A", "HF_*"):
        with pytest.raises(ConfigError, match="not the name of an environment variable"):
            RewardPool(["format"], environment=(wrong,))
        with pytest.raises(ConfigError, match=r"sampler\.env: .* is not the name of an environment variable"):
            SamplerConfig(engine="vllm", env=(wrong,))
    with pytest.raises(ConfigError, match=r"write \('A',\)"):
        RewardPool(["format"], environment="A")
    for refused in ({}, {"engine": "vllm", "urls": ("http://a:1",)}):
        with pytest.raises(
            ConfigError, match=r"sampler\.env is (an option of servers|for servers that the run starts)"
        ):
            SamplerConfig(env=("A",), **refused)
    with pytest.raises(ConfigError, match="leave it out with check, install and --print"):
        engine_command.EngineOptions("vllm", env=("A",), print=True)


def test_a_server_that_misses_a_variable_says_which_option_passes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("S3_ACCESS_KEY_ID", "secret")
    program = "import os; os.environ['S3_ACCESS_KEY_ID']"
    process = ServerProcess(tmp_path / "log", lambda: ({}, [sys.executable, "-c", program]))
    process.ensure_running()
    assert process.guard is not None
    process.guard.wait()
    failure = process.ensure_running()
    assert (
        "do not get the environment variable S3_ACCESS_KEY_ID: add --sampler.env S3_ACCESS_KEY_ID. The end" in failure
    )
    assert "secret" not in failure


def test_docs_list_the_variables() -> None:
    page = (Path(__file__).parents[2] / "docs" / "isolation.md").read_text(encoding="utf-8")

    def read_list(begin: str, end: str) -> list[str]:
        return re.findall(r"`(.+?)`", page.partition(begin)[2].partition(end)[0])

    assert read_list("<!-- given: begin -->", "<!-- given: end -->") == list(PASSED_VARIABLES)
    assert read_list("<!-- devices: begin -->", "<!-- devices: end -->") == list(DEVICE_VARIABLES)
    shared = read_list("<!-- hub: begin -->", "<!-- hub: end -->")
    assert [*DEVICE_VARIABLES, *shared] == list(ENGINE_VARIABLES)
    for engine in map(load_engine_class, ENGINES):
        own = [pattern for pattern in engine.variables if pattern not in ENGINE_VARIABLES]
        assert read_list(f"| {engine.name} |", "|\n") == own
