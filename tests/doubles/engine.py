"""Engines without a network: servers that sample from a table in this process, each with its own fault."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from policygrad.errors import EngineError
from policygrad.models.tokenizer import Tokenizer
from policygrad.samplers.base import Request
from policygrad.samplers.config import SamplerConfig
from policygrad.samplers.engines.base import EngineCompletion, EngineSampler
from policygrad.samplers.engines.http import ServerUnavailableError
from policygrad.samplers.local.sampling import log_probabilities
from policygrad.weight_sync.folder import WeightVersion, WeightWriter

Fault = Callable[["Standin", Request, EngineCompletion], EngineCompletion]


class Bigram(nn.Module):
    """A language model that depends on one token: logits [V, V]."""

    def __init__(self, vocabulary: int, spread: float = 3.0) -> None:
        super().__init__()
        made = torch.randn(vocabulary, vocabulary, generator=torch.Generator().manual_seed(0))
        self.table = nn.Parameter(spread * made)
        self.config = SimpleNamespace(save_pretrained=lambda folder: (folder / "config.json").write_text("{}"))

    def get_input_embeddings(self) -> None: ...

    def get_output_embeddings(self) -> None: ...

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> SimpleNamespace:
        return SimpleNamespace(logits=self.table[input_ids])


@dataclass
class Standin:
    """A server with its own weights and faults."""

    model: Bigram
    fault: Fault = lambda server, request, drawn: drawn
    top_k: int = 0
    """Truncation that it applies to every request."""
    stale: bool = False
    """True: it never loads weights."""
    away: int = 0
    """Number of further requests that it does not answer."""
    drawn: int = 0
    loaded: int = 0


class Standins(EngineSampler):
    """A sampler with these servers."""

    name, launch_hint = "stand-in", "Start it as it should be"

    def __init__(
        self, model: nn.Module, tokenizer: Tokenizer, config: SamplerConfig, folder: Path, **more: Any
    ) -> None:
        super().__init__(model, tokenizer, config, folder, **more)
        self.standins: dict[str, Standin] = {}
        for url in config.urls:
            self.standins[url] = Standin(copy.deepcopy(model))

    def weight_writer(self) -> WeightWriter:
        def write(tensors: Mapping[str, Tensor], folder: Path) -> None:
            torch.save({name: tensor.detach() for name, tensor in tensors.items()}, folder / "weights.pt")

        return write

    async def load_weights(self, url: str, publication: WeightVersion) -> None:
        server = self._there(url)
        server.loaded += 1
        if not server.stale:
            server.model.load_state_dict(self.model.state_dict())

    async def complete(self, url: str, request: Request, seed: int) -> EngineCompletion:
        server = self._there(url)
        server.drawn += 1
        await asyncio.sleep(0)  # lets other requests run
        asked = replace(request, sampling=replace(request.sampling, top_k=server.top_k))
        return server.fault(server, request, walk(server.model.table, asked, seed, self.tokenizer.end_ids))

    def _there(self, url: str) -> Standin:
        server = self.standins[url]
        if server.away > 0:
            server.away -= 1
            raise ServerUnavailableError("not there")
        return server


def walk(table: Tensor, request: Request, seed: int, end: frozenset[int]) -> EngineCompletion:
    """Sample a completion token by token from the logits [V, V]."""
    rng, token, tokens, logps = np.random.default_rng(seed), int(request.prompt_ids[-1]), [], []
    while len(tokens) < request.max_tokens and not (tokens and token in end):
        logp = log_probabilities(table[None, token].detach(), request.sampling)[0]
        token = int((logp.double().exp().cumsum(0) < rng.random()).sum().clamp(max=len(logp) - 1))
        tokens, logps = [*tokens, token], [*logps, float(logp[token])]
    return EngineCompletion(tokens, logps)


def whole(
    server: Standin, request: Request, drawn: EngineCompletion, temperature: float | None = None
) -> EngineCompletion:
    """Return the same tokens with the log-probabilities of the full distribution, at the requested temperature or another."""
    ids = torch.cat([request.prompt_ids, torch.tensor(drawn.tokens)])
    heat = request.sampling.temperature if temperature is None else temperature
    with torch.no_grad():
        logits = server.model(input_ids=ids[None]).logits[0, len(request.prompt_ids) - 1 : -1]
    logp = (logits / heat).log_softmax(-1)
    return EngineCompletion(drawn.tokens, logp.gather(-1, torch.tensor(drawn.tokens)[:, None])[:, 0].tolist())


def refused(server: Standin, request: Request, drawn: EngineCompletion) -> EngineCompletion:
    """Refuse the request's ids."""
    raise EngineError("400: token id out of vocabulary")
