"""Networks and data that the tests of the server share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer, OPTConfig, OPTForCausalLM

from policygrad.learners.config import LearnerConfig
from policygrad.learners.local.forward import build_evaluator
from policygrad.models.loading import resolve_model
from policygrad.serve.adapters import AdapterSpec
from policygrad.serve.losses import Datum
from policygrad.serve.models import ClientModel, ServedNetwork, load_network

tinker = pytest.importorskip("tinker", reason="the extra `serve`")


@pytest.fixture(autouse=True)
def ended_sessions(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """End the signs of life of the SDK's sessions with their test: a thread sends them, and complains, until the process ends."""
    holder = tinker.lib.internal_client_holder.InternalClientHolder
    initialise, made = holder.__init__, []

    def remember(self: Any, *args: Any, **options: Any) -> None:
        made.append(self)
        initialise(self, *args, **options)

    monkeypatch.setattr(holder, "__init__", remember)
    yield
    for connection in made:
        if (task := connection._session_heartbeat_task) is not None:
            connection.get_loop().call_soon_threadsafe(task.cancel)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def network() -> ServedNetwork:
    return load_network("tiny", "tiny", LearnerConfig(), adaptable=True)


@pytest.fixture(scope="session")
def exact_network(tmp_path_factory: pytest.TempPathFactory) -> ServedNetwork:
    """A random model in float64, of an architecture that computes in float64 everywhere: Llama's norms are in float32."""
    folder = tmp_path_factory.mktemp("opt")
    config = OPTConfig(
        vocab_size=487,
        hidden_size=32,
        word_embed_proj_dim=32,
        ffn_dim=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    OPTForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(resolve_model("tiny")).save_pretrained(folder)
    network = load_network("opt", str(folder), LearnerConfig(), adaptable=True)
    network.model.double()
    return replace(network, evaluator=build_evaluator(network.model, 1.0))


def trained_adapter(network: ServedNetwork, seed: int = 1, rank: int = 4) -> ClientModel:
    """Return a model whose adapter is no longer the identity."""
    model = ClientModel.with_adapter(network, AdapterSpec(rank, seed=seed))
    assert model.adapter is not None
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for a, b in model.adapter.pairs.values():
            b.copy_(torch.randn(b.shape, generator=generator, dtype=b.dtype) * 0.05 * a.abs().mean())
    return model


def completions(seed: int = 0, groups: int = 3, size: int = 3) -> list[tuple[Tensor, int, Tensor]]:
    """Return (tokens of prompt and completion, length of the prompt, group) of completions of several lengths."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for group in range(groups):
        prompt = torch.randint(3, 400, (3 + group,), generator=generator)
        for i in range(size):
            completion = torch.randint(3, 400, (2 + (group + 2 * i) % 5,), generator=generator)
            found.append((torch.cat([prompt, completion]), len(prompt), torch.tensor([group])))
    return found


def policy_data(seed: int = 0) -> list[Datum]:
    """Return data for a loss of the API, with prompts masked by advantages of 0, as the SDK's users write it."""
    generator = torch.Generator().manual_seed(seed + 100)
    data = []
    for ids, prompt, _ in completions(seed):
        length = len(ids) - 1
        mask = (torch.arange(length) >= prompt - 1).float()
        inputs = {
            "target_tokens": torch.where(mask > 0, ids[1:], 0),
            "logprobs": -6 * torch.rand(length, generator=generator) * mask,
            "advantages": torch.randn((), generator=generator) * mask,
        }
        data.append(Datum(ids[:-1], inputs))
    return data
