"""A real vLLM samples from the policy, before and after its weights are replaced. Needs a vLLM: `make test-vllm`.

POLICYGRAD_VLLM names a virtual environment of its own with vLLM 0.32, on a GPU or a CPU; it is started as `policygrad engine` says.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import policygrad as pg
from measure_engines import START, serving
from policygrad.errors import EngineError
from policygrad.models.loading import load_model
from policygrad.models.tokenizer import load_tokenizer
from policygrad.samplers.base import Request, SamplingParams
from policygrad.samplers.config import SamplerConfig, TeacherServerConfig
from policygrad.samplers.engines.teachers import TeacherServer
from policygrad.samplers.engines.vllm import VllmSampler
from policygrad.training.base_trainer import Callback
from policygrad.utils.async_runner import AsyncRunner
from policygrad.weight_sync.base import PublishedWeights
from policygrad.weight_sync.folder import make_safetensors_writer

VENV = os.environ.get("POLICYGRAD_VLLM", "")
pytestmark = pytest.mark.skipif(not VENV, reason="POLICYGRAD_VLLM names no environment with vLLM")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(VENV, tmp_path_factory.mktemp("vllm")) as result:
        yield result


@pytest.fixture
def wait() -> Iterator[AsyncRunner]:
    with AsyncRunner() as waiter:
        yield waiter


def made(url: str, folder: Path) -> VllmSampler:
    model = load_model("tiny", dtype="fp32", device="cpu")
    config = SamplerConfig(engine="vllm", urls=(url,), recovery_timeout=START)
    return VllmSampler(model, load_tokenizer("tiny", model), config, folder / "weights")


def changed(model: Any, version: int, change: float) -> PublishedWeights:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + change * torch.sin(torch.arange(parameter.numel()).float()).view_as(parameter))
    return PublishedWeights(version, dict(model.named_parameters()))


def test_vllm_reloads_weights_and_agrees_to_1e_4_nats(url: str, tmp_path: Path, wait: AsyncRunner) -> None:
    sampler = made(url, tmp_path)
    for version in range(3):
        metrics = wait(sampler.update(changed(sampler.model, version, 0.02)))
        assert metrics["publication/probe_max"].value < 1e-4
    requests = [Request(torch.tensor([5, 70, 300]), (1, i), SamplingParams(max_tokens=8), 8) for i in range(40)]
    generations = wait(sampler.generate(requests))
    assert {g.version for g in generations} == {2}
    assert len({tuple(g.tokens.tolist()) for g in generations}) > 10
    wait(sampler.close())


def test_route_that_returns_masks_answers_in_its_form(
    tmp_path: Path, wait: AsyncRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU without the masks themselves."""
    monkeypatch.setenv("VLLM_ARGS", "--enable-scale-out")
    with serving(VENV, tmp_path) as url:
        sampler = made(url, tmp_path)
        wait(sampler.update(changed(sampler.model, 0, 0.0)))
        request = Request(torch.tensor([5, 70, 300]), (1, 2), SamplingParams(top_k=3, max_tokens=4), 4, needs_mask=True)
        with pytest.raises(EngineError, match="does not return the tokens that top-k and top-p left"):
            wait(sampler.generate([request]))
        completion = wait(sampler.complete(url, request, 7))
        assert 1 <= len(completion.tokens) == len(completion.logp) <= 4
        wait(sampler.close())


def test_stale_tied_head_is_detected(url: str, tmp_path: Path, wait: AsyncRunner) -> None:
    """Writing the head twice works around this fault of vLLM 0.32."""
    sampler = made(url, tmp_path)
    wait(sampler.update(changed(sampler.model, 0, 0.0)))
    sampler.versions.write = make_safetensors_writer(sampler.model, sampler.tokenizer.hf)
    with pytest.raises(EngineError, match="other weights, an older version"):
        wait(sampler.update(changed(sampler.model, 1, 0.02)))
    wait(sampler.close())


def test_run_with_vllm_learns(url: str, tmp_path: Path) -> None:
    run = pg.Run(
        sampler=SamplerConfig(engine="vllm", urls=(url,), recovery_timeout=START),
        steps=5,
        prompts_per_step=32,
        evaluation=pg.EvaluationConfig(problems=48, samples_per_prompt=2),
        output=str(tmp_path / "run"),
    )
    result = pg.train(run, display=False)
    assert result.before is not None
    assert result.after is not None
    assert result.after - result.before > 0.3


class Killing(Callback):
    """Kills every process of the server, but the guard, after each of the first steps."""

    def __init__(self, kills: int) -> None:
        self.left, self.killed = kills, list[int]()

    def step(self, trainer: Any, step: int, metrics: Any) -> None:
        if self.left:
            [process] = trainer.resources.rollouter.sampler.processes.values()
            self.left -= 1
            self.killed += list_descendants(process.guard.pid)
            for pid in list_descendants(process.guard.pid):
                os.kill(pid, signal.SIGKILL)
            process.guard.wait()


def list_descendants(pid: int) -> list[int]:
    try:
        children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:  # it has ended
        return []
    return [*children, *(below for child in children for below in list_descendants(child))]


def test_server_of_the_run_is_killed_five_times_and_nothing_is_lost(tmp_path: Path) -> None:
    killing = Killing(5)
    run = pg.Run(
        sampler=SamplerConfig(engine="vllm", python=VENV),
        steps=7,
        prompts_per_step=32,
        evaluation=pg.EvaluationConfig(problems=48, samples_per_prompt=2),
        output=str(tmp_path / "run"),
    )
    result = pg.train(run, display=False, callbacks=[killing])
    assert result.before is not None
    assert result.after is not None
    assert result.after - result.before > 0.3
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "reward" in row] == [*range(1, 8)]
    assert max(row["publication/probe_max"] for row in rows if "publication/probe_max" in row) < 1e-4
    assert len(killing.killed) >= 10  # the server and its engine's process, five times
    assert not [pid for pid in killing.killed if Path(f"/proc/{pid}").exists()]


def test_nothing_is_left_of_a_run_that_is_killed(tmp_path: Path) -> None:
    engine = ("--sampler.engine", "vllm", "--sampler.python", VENV, "--output", str(tmp_path / "run"), "--plain")
    options = ("--prompts-per-step", "4", "--evaluation.problems", "0", *engine)
    command = [sys.executable, "-m", "policygrad", "train", "grpo", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        assert run.stdout is not None
        printed: list[str] = []
        while not (printed and printed[-1].startswith("step ")):
            printed.append(run.stdout.readline())
            assert printed[-1], "".join(printed)
        left = list_descendants(run.pid)
        run.kill()
    for pid in left:
        subprocess.run(["tail", f"--pid={pid}", "-f", "/dev/null"], timeout=60, check=True)
    assert len(left) >= 3  # the guard, the server, its engine


@pytest.mark.parametrize(
    ("option", "message"), [("--logprobs-mode", "before the temperature"), ("--dtype", "lower precision")]
)
def test_missing_vllm_options_are_detected(option: str, message: str, tmp_path: Path, wait: AsyncRunner) -> None:
    with serving(VENV, tmp_path, (option,)) as url:
        sampler = made(url, tmp_path)
        with pytest.raises(EngineError, match=message):
            wait(sampler.update(changed(sampler.model, 0, 0.0)))
        wait(sampler.close())


def test_a_teacher_behind_vllm_agrees_with_the_model_to_1e_4_nats(url: str, wait: AsyncRunner) -> None:
    """Log-probabilities of given tokens are those at temperature 1, whatever --logprobs-mode is."""
    model = load_model("tiny", dtype="fp32", device="cpu")
    tokenizer = load_tokenizer("tiny", model)
    teacher = TeacherServer(f"{url}/v1", tokenizer, TeacherServerConfig(recovery_timeout=START))
    wait(teacher.connect(64))
    ids = torch.randint(0, len(tokenizer.hf), (60,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
    assert (wait(teacher.score(ids.tolist(), 1)) - expected).abs().max() < 1e-4
    wait(teacher.close())
