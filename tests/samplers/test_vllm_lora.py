"""A real vLLM loads adapters alone, under the name of their version. Needs a vLLM: `make test-vllm`.

POLICYGRAD_VLLM names a virtual environment of its own with vLLM 0.32, as for tests/samplers/test_vllm.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

import policygrad as pg
from measure_engines import START, serving
from policygrad.errors import EngineError
from policygrad.models.loading import load_model
from policygrad.models.lora_config import Lora
from policygrad.models.tokenizer import load_tokenizer
from policygrad.samplers.base import Request, SamplingParams
from policygrad.samplers.config import SamplerConfig
from policygrad.samplers.engines.vllm import VllmSampler
from policygrad.utils.async_runner import AsyncRunner
from policygrad.weight_sync.base import PublishedWeights

pytest.importorskip("peft")
VENV = os.environ.get("POLICYGRAD_VLLM", "")
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not VENV, reason="POLICYGRAD_VLLM names no environment with vLLM"),
]
RANK = 6
"""The server supports up to 8."""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(VENV, tmp_path_factory.mktemp("vllm"), lora=f"rank={RANK}") as result:
        yield result


@pytest.fixture
def wait() -> Iterator[AsyncRunner]:
    with AsyncRunner() as waiter:
        yield waiter


def made(url: str, folder: Path, rank: int = RANK) -> VllmSampler:
    model = load_model("tiny", dtype="fp32", device="cpu", lora=Lora(rank=rank, alpha=12.0))
    config = SamplerConfig(engine="vllm", urls=(url,), recovery_timeout=START)
    return VllmSampler(model, load_tokenizer("tiny", model), config, folder / "weights")


def learnt(sampler: VllmSampler, version: int, spread: float) -> PublishedWeights:
    generator, expected = torch.Generator().manual_seed(version), dict(sampler.model.named_parameters())
    with torch.no_grad():
        for name, parameter in expected.items():
            if "lora_B" in name:
                parameter.copy_(spread * torch.randn(parameter.shape, generator=generator))
    return PublishedWeights(version, expected)


def adapters(url: str) -> list[str]:
    cards = httpx.get(f"{url}/v1/models", trust_env=False).json()["data"]
    return [card["id"] for card in cards if card.get("parent")]


def test_vllm_loads_adapters_and_agrees_to_1e_4_nats(url: str, tmp_path: Path, wait: AsyncRunner) -> None:
    """The first adapter adds nothing, so the server's own weights are the learner's. Later ones change the completions."""
    sampler, completion = made(url, tmp_path), list[Any]()
    requests = [Request(torch.tensor([5, 70, 300]), (1, i), SamplingParams(max_tokens=8), 8) for i in range(40)]
    for version, spread in enumerate((0.0, 0.05, 0.2, 0.05)):
        metrics = wait(sampler.update(learnt(sampler, version, spread)))
        assert metrics["publication/probe_max"].value < 1e-4
        assert metrics["publication/bytes"].value < 200_000
        assert sampler.published is not None
        assert adapters(url) == [sampler.published.name]
        generations = wait(sampler.generate(requests))
        assert {g.version for g in generations} == {version}
        completion.append([g.tokens.tolist() for g in generations])
    assert all(one != other for one, other in pairwise(completion))
    wait(sampler.close())
    assert adapters(url) == []


def test_greedy_completions_match_the_adapted_model(url: str, tmp_path: Path, wait: AsyncRunner) -> None:
    sampler = made(url, tmp_path)
    greedy, answers = SamplingParams(temperature=0.0, max_tokens=12), list[list[list[int]]]()
    requests = [Request(torch.tensor([5, 70 + i, 300, 40]), (1, i), greedy, 12) for i in range(8)]
    for version, spread in ((0, 0.0), (1, 0.3)):
        wait(sampler.update(learnt(sampler, version, spread)))
        generations = wait(sampler.generate(requests))
        for request, generation in zip(requests, generations, strict=True):
            ids = torch.cat([request.prompt_ids, generation.tokens])[None]
            with torch.no_grad():
                best = sampler.model(input_ids=ids).logits[0, len(request.prompt_ids) - 1 : -1].argmax(-1)
            assert generation.tokens.tolist() == best.tolist()
        answers.append([generation.tokens.tolist() for generation in generations])
    assert answers[0] != answers[1]
    wait(sampler.close())


def test_too_large_rank_is_refused_with_the_option(url: str, tmp_path: Path, wait: AsyncRunner) -> None:
    sampler = made(url, tmp_path, rank=16)
    with pytest.raises(EngineError, match=r"does not load the adapter: .*--max-lora-rank.*--sampler.lora-sync merged"):
        wait(sampler.update(learnt(sampler, 0, 0.1)))
    wait(sampler.close())


def test_unloaded_adapter_is_loaded_again(url: str, tmp_path: Path, wait: AsyncRunner) -> None:
    sampler = made(url, tmp_path)
    wait(sampler.update(learnt(sampler, 5, 0.2)))
    assert sampler.published is not None
    body = {"lora_name": sampler.published.name}
    assert httpx.post(f"{url}/v1/unload_lora_adapter", json=body, trust_env=False).status_code == 200
    [generation] = wait(sampler.generate([Request(torch.tensor([5, 70]), (1,), SamplingParams(max_tokens=8), 8)]))
    assert generation.version == 5
    assert adapters(url) == [sampler.published.name]
    wait(sampler.close())


def test_run_with_vllm_adapter_learns(url: str, tmp_path: Path) -> None:
    run = pg.Run(
        sampler=SamplerConfig(engine="vllm", urls=(url,), recovery_timeout=START),
        learner=pg.LearnerConfig(lora=f"rank={RANK}"),
        steps=5,
        prompts_per_step=32,
        evaluation=pg.EvaluationConfig(problems=48, samples_per_prompt=2),
        output=str(tmp_path / "run"),
    )
    result = pg.train(run, display=False)
    assert result.before is not None
    assert result.after is not None
    assert result.after - result.before > 0.1


@pytest.mark.parametrize(
    ("lora", "without", "message"),
    [
        ("", (), "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
        (f"rank={RANK}", ("--enable-lora",), "--enable-lora"),
    ],
)
def test_missing_vllm_lora_options_are_named(
    lora: str, without: tuple[str, ...], message: str, tmp_path: Path, wait: AsyncRunner
) -> None:
    with serving(VENV, tmp_path, without, lora=lora) as url:
        sampler = made(url, tmp_path)
        with pytest.raises(EngineError, match=message):
            wait(sampler.update(learnt(sampler, 0, 0.0)))
        wait(sampler.close())
