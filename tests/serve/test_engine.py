"""Sampling by servers of an engine: each client's own weights are published before its requests, and probed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from serve.running import running

from doubles.engine_environment import make_environment
from policygrad.errors import ConfigError
from policygrad.samplers.config import SamplerConfig
from policygrad.serve.config import ServeConfig
from policygrad.serve.sampling import EngineAnswers

tinker = pytest.importorskip("tinker", reason="the extra `serve`")
types = tinker.types
IDS = [5, 17, 40, 33, 8, 61, 22, 9]


def datum(ids: list[int]) -> Any:
    inputs = {"target_tokens": ids[1:], "weights": [1.0] * (len(ids) - 1)}
    return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)


@pytest.mark.usefixtures("short_probes")
def test_each_clients_weights_are_sampled_from(tmp_path: Path) -> None:
    """Two adapters, all weights and the base model in turns, by one server: log-probabilities are forward's. With a real vLLM where
    POLICYGRAD_VLLM names one."""
    python = os.environ.get("POLICYGRAD_VLLM") or str(make_environment(tmp_path / "venv"))
    sampler = SamplerConfig(engine="vllm", python=python)
    with running(tmp_path / "served", sampler=sampler) as server:
        client = tinker.ServiceClient(base_url=server.url, api_key="tml-local")
        trained = [
            client.create_lora_training_client("tiny", rank=2, seed=s, train_unembed=False).result() for s in (1, 2)
        ]
        trained.append(client.create_lora_training_client("tiny", rank=0).result())
        for i, training in enumerate(trained):
            training.forward_backward([datum(IDS)], "cross_entropy").result()
            training.optim_step(types.AdamParams(learning_rate=1e-2 if i < 2 else 1e-4)).result()
        samplings = [t.save_weights_and_get_sampling_client().result() for t in trained]
        answers = server.service.queue.samplers["tiny"]
        assert isinstance(answers, EngineAnswers)
        assert answers.probe_difference is not None
        assert answers.probe_difference < 1e-4
        found = []
        for _ in range(2):
            for training, sampling in zip(trained, samplings, strict=True):
                params = types.SamplingParams(max_tokens=4, seed=5)
                result = sampling.sample(
                    types.ModelInput.from_ints(IDS[:4]), 3, params, include_prompt_logprobs=True
                ).result()
                for sequence in result.sequences:
                    ids = IDS[:4] + sequence.tokens
                    logp = (
                        training.forward([datum(ids)], "cross_entropy")
                        .result()
                        .loss_fn_outputs[0]["logprobs"]
                        .to_torch()
                    )
                    assert torch.allclose(logp[3:], torch.tensor(sequence.logprobs), atol=2e-4)
                    assert torch.allclose(logp[:3], torch.tensor(result.prompt_logprobs[1:]), atol=2e-4)
                found.append([s.tokens for s in result.sequences])
        assert found[:3] == found[3:]
        with_head = client.create_lora_training_client("tiny", rank=2).result()
        with pytest.raises(tinker.RequestFailedError, match="train_unembed=False"):
            with_head.save_weights_for_sampler("head").result()


def test_an_engine_has_one_model() -> None:
    with pytest.raises(ConfigError, match="start a server for each"):
        ServeConfig(model=("tiny", "other=tiny"), sampler=SamplerConfig(engine="vllm"))
