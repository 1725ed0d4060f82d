"""A real vLLM on a second GPU receives weights over NCCL. Needs two GPUs and a vLLM: `make test-vllm`.

POLICYGRAD_VLLM names a virtual environment of its own with vLLM 0.32.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from measure_engines import START, serving
from policygrad.models.loading import load_model
from policygrad.models.tokenizer import load_tokenizer
from policygrad.samplers.base import Request, SamplingParams
from policygrad.samplers.config import SamplerConfig
from policygrad.samplers.engines.vllm import VllmSampler
from policygrad.utils.async_runner import AsyncRunner
from policygrad.weight_sync.base import PublishedWeights

VENV = os.environ.get("POLICYGRAD_VLLM", "")
GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.skipif(
        GPUS < 2, reason=f"NCCL needs a GPU for the learner and one for the server, and here are {GPUS}"
    ),
    pytest.mark.skipif(not VENV, reason="POLICYGRAD_VLLM names no environment with vLLM"),
]


@pytest.fixture(scope="module")
def model() -> Any:
    """Load it on the first GPU, before the environment hides it from the server."""
    return load_model("tiny", dtype="fp32", device="cuda:0")


@pytest.fixture
def url(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with serving(VENV, tmp_path, weight_transport="nccl") as result:
        yield result


def test_vllm_receives_weights_over_nccl(url: str, model: Any, tmp_path: Path) -> None:
    """The embedded model's head is tied. A tensor that was not loaded changes log-probabilities by more than the probe allows."""
    config = SamplerConfig(
        engine="vllm", urls=(url,), recovery_timeout=START, weight_transport="nccl", logprob_tolerance=1e-2
    )
    sampler = VllmSampler(model, load_tokenizer("tiny", model), config, tmp_path / "weights")
    with AsyncRunner() as wait:
        for version in range(4):
            with torch.no_grad():
                for parameter in model.parameters():
                    waves = torch.sin(torch.arange(parameter.numel(), device=parameter.device).float() + version)
                    parameter.mul_(1 + 0.2 * waves.view_as(parameter))
            if version == 2:
                assert sampler.transfer is not None
                wait(sampler.transfer.close(sampler.http))
            wait(sampler.update(PublishedWeights(version, dict(model.named_parameters()))))
        requests = [Request(torch.tensor([5, 70, 300]), (1, i), SamplingParams(max_tokens=8), 8) for i in range(40)]
        generations = wait(sampler.generate(requests))
        assert {g.version for g in generations} == {3}
        wait(sampler.close())
    assert not (tmp_path / "weights").exists()
