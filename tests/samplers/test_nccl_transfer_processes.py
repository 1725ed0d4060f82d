"""Weights broadcast to another process: a real group of two, over gloo instead of NCCL.

The other process forms its side of the group, and receives, as an engine's does (doubles/receiver.py); HTTP is in this process.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from torch import Tensor, nn

from doubles.engine import Bigram
from doubles.gloo import GlooGroup, GlooIdGroup
from doubles.wires import SglangTaking, Taking, VllmTaking, WireGroup, Wires, with_groups
from policygrad.models.loading import load_model
from policygrad.models.tokenizer import Tokenizer, load_tokenizer
from policygrad.samplers.config import SamplerConfig
from policygrad.samplers.engines.base import EngineSampler
from policygrad.samplers.engines.http import HttpClient
from policygrad.samplers.engines.sglang import SglangSampler
from policygrad.samplers.engines.vllm import VllmSampler
from policygrad.utils.async_runner import AsyncRunner
from policygrad.weight_sync.base import PublishedWeights

URL = "http://127.0.0.1:9000"
TESTS = Path(__file__).parents[1]


class Process:
    """The receiving process, with one request per line."""

    def __init__(self) -> None:
        paths = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH", "")])])
        self.process = subprocess.Popen(
            [sys.executable, str(TESTS / "doubles" / "receiver.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            text=True,
        )

    async def ask(self, **told: Any) -> list[bytes]:
        return await asyncio.to_thread(self._ask, json.dumps(told))

    def _ask(self, line: str) -> list[bytes]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return [base64.b64decode(output) for output in json.loads(self.process.stdout.readline())]

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def over(form: type[Taking]) -> type[Taking]:
    """Return a server double whose process in the group is `process`. If `kills` is set, `process` dies when it is to receive, and
    `kills` replaces it at once."""
    engine = "vllm" if form is VllmTaking else "sglang"

    class Over(form):  # type: ignore[valid-type, misc]
        process: Process
        kills: Process | None = None
        joined: asyncio.Future[list[bytes]] | None = None

        def join(self, init_request: Mapping[str, Any]) -> None:
            self.groups[init_request.get("group_name", "one")] = WireGroup(0, 2, "")
            self.joined = asyncio.ensure_future(self.process.ask(engine=engine, init_request=dict(init_request)))

        async def transferred(self, path: str, body: Any) -> tuple[int, Any]:
            reply: tuple[int, Any] = await super().transferred(path, body)
            if self.joined is not None:
                await self.joined
                self.joined = None
            return reply

        async def take(self, wire: WireGroup, names: list[str], dtypes: list[str], shapes: list[list[int]]) -> None:
            if self.kills is not None:
                self.process.end()
                self.process, self.kills = self.kills, None
                self.begin()
                raise httpx.ReadError("the connection is gone")
            raw = await self.process.ask(names=names, dtypes=dtypes, shapes=shapes)
            for name, dtype, shape, message in zip(names, dtypes, shapes, raw, strict=True):
                self.got[name] = torch.frombuffer(bytearray(message), dtype=getattr(torch, dtype)).reshape(shape)

    return Over


@pytest.fixture
def process() -> Iterator[Process]:
    result = Process()
    yield result
    result.end()


@pytest.fixture(scope="module")
def tokenizer(random_model: Path) -> Tokenizer:
    return load_tokenizer(str(random_model), load_model(str(random_model), dtype="fp32", device="cpu"))


def same(result: Tensor, expected: Tensor) -> bool:
    bits = (result.dtype, result.shape) == (expected.dtype, expected.shape)
    return bits and torch.equal(result.reshape(-1).view(torch.uint8), expected.detach().reshape(-1).view(torch.uint8))


@pytest.mark.full
@pytest.mark.parametrize(
    ("sampler_class", "form", "group"),
    [(SglangSampler, SglangTaking, GlooGroup), (VllmSampler, VllmTaking, GlooIdGroup)],
)
def test_weights_arrive_byte_for_byte_in_another_process(
    sampler_class: type[EngineSampler],
    form: type[Taking],
    group: type[GlooGroup],
    process: Process,
    tokenizer: Tokenizer,
    tmp_path: Path,
) -> None:
    model: Any = Bigram(len(tokenizer.hf))
    model.narrow = nn.Parameter(torch.randn(7, 3).to(torch.bfloat16))
    model.across = nn.Parameter(torch.arange(12.0).view(3, 4).t())  # not contiguous
    config = SamplerConfig(
        engine=sampler_class.__name__.lower().removesuffix("sampler"),
        urls=(URL,),
        recovery_timeout=60.0,
        weight_transport="nccl",
        max_concurrency=4,
    )
    sampler = with_groups(sampler_class, group)(model, tokenizer, config, tmp_path / "weights")
    sampler.transfer._bucket_bytes = 64
    server: Any = over(form)(model.table, tokenizer.end_ids, Wires())
    server.process = process
    sampler.http = HttpClient(60.0, server.transport)
    with AsyncRunner() as wait:
        for version in range(2):
            with torch.no_grad():
                model.table.mul_(0.9)
                model.narrow.add_(1)
            metrics = wait(sampler.update(PublishedWeights(version, dict(model.named_parameters()))))
            assert metrics["publication/probe_max"].value < 1e-5
            assert {name: same(server.got[name], p) for name, p in model.named_parameters()} == {
                "table": True,
                "narrow": True,
                "across": True,
            }
        wait(sampler.close())


@pytest.mark.full
@pytest.mark.parametrize(
    ("sampler_class", "form", "group"),
    [
        (SglangSampler, SglangTaking, GlooGroup),
        pytest.param(VllmSampler, VllmTaking, GlooIdGroup, marks=pytest.mark.full),
    ],
)
def test_successor_of_a_killed_process_joins_and_the_learner_survives(
    sampler_class: type[EngineSampler],
    form: type[Taking],
    group: type[GlooGroup],
    process: Process,
    tokenizer: Tokenizer,
    tmp_path: Path,
) -> None:
    model: Any = Bigram(len(tokenizer.hf))
    config = SamplerConfig(
        engine=sampler_class.__name__.lower().removesuffix("sampler"),
        urls=(URL,),
        recovery_timeout=60.0,
        weight_transport="nccl",
        max_concurrency=4,
    )
    sampler = with_groups(sampler_class, group)(model, tokenizer, config, tmp_path / "weights")
    server: Any = over(form)(model.table, tokenizer.end_ids, Wires())
    server.process, successor = process, Process()
    sampler.http = HttpClient(60.0, server.transport)
    try:
        with AsyncRunner() as wait:
            wait(sampler.update(PublishedWeights(0, dict(model.named_parameters()))))
            server.kills = successor
            with torch.no_grad():
                model.table.mul_(0.9)
            wait(sampler.update(PublishedWeights(1, dict(model.named_parameters()))))
            assert server.process is successor
            assert same(server.got["table"], model.table)
            wait(sampler.close())
    finally:
        successor.end()
