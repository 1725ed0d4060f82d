"""Concurrency limits of servers, and the order of requests."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policygrad.errors import EngineError
from policygrad.samplers.engines.http import ServerUnavailableError
from policygrad.samplers.engines.server_pool import (
    HIGH_CACHE_USE,
    MAX_CONCURRENCY,
    EngineServer,
    LoadMonitor,
    PrometheusGauges,
    ServerLoad,
    ServerPool,
    adjust_concurrency,
    parse_gauge,
)
from policygrad.samplers.engines.vllm import VllmSampler

SAID = """# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="a} b"} 3.0
vllm:num_requests_waiting{engine="1",model_name="a} b"} 2.0
vllm:num_requests_waiting_by_reason{reason="capacity"} 7.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:kv_cache_usage_perc{engine="1"} 0.5 1700000000
plain 4e-1
"""


def test_load_is_parsed_from_prometheus_text() -> None:
    assert parse_gauge(SAID, "vllm:num_requests_waiting") == [3.0, 2.0]
    assert parse_gauge(SAID, "plain") == [0.4]
    assert parse_gauge(SAID, "vllm:num_requests") == []
    assert VllmSampler.gauges is not None
    assert VllmSampler.gauges(SAID) == ServerLoad(5.0, 0.5)
    assert PrometheusGauges("plain", "not there")(SAID) is None
    assert PrometheusGauges("plain", "plain")({"json": 1}) is None


@pytest.mark.parametrize(
    ("limit", "requests", "load", "becomes"),
    [
        (16, 16, ServerLoad(0, 0.5), 20),  # all slots are used, and the cache has room
        (16, 7, ServerLoad(0, 0.5), 16),  # not all slots are used
        (16, 16, ServerLoad(0, 0.9), 16),
        (16, 16, ServerLoad(3, 0.5), 13),  # three requests are in its queue
        (2, 2, ServerLoad(9, 0.5), 1),
        (16, 16, ServerLoad(0, 0.96), 15),
        (200, 200, ServerLoad(0, 0.96), 180),
        (1, 1, ServerLoad(0, 1.0), 1),
        (1, 1, ServerLoad(0, 0.0), 2),
        (MAX_CONCURRENCY, MAX_CONCURRENCY, ServerLoad(0, 0.0), MAX_CONCURRENCY),
    ],
)
def test_limit_follows_queue_and_cache_use(limit: int, requests: int, load: ServerLoad, becomes: int) -> None:
    assert adjust_concurrency(limit, requests, load) == becomes


@given(st.integers(1, 3000), st.integers(1, 200))
def test_limit_converges_to_server_capacity(most: int, first: int) -> None:
    """A server whose cache is full at `most` requests, and which queues the rest."""
    limit, seen = first, list[int]()
    for _ in range(120):
        limit = adjust_concurrency(limit, limit, ServerLoad(max(0, limit - most), min(1.0, limit / most)))
        seen.append(limit)
    assert all(0.7 * most - 1 <= x <= 1.3 * most + 1 for x in seen[60:])
    assert HIGH_CACHE_USE < 1


def test_adaptive_concurrency_needs_reported_load() -> None:
    async def refuses(url: str) -> Any:
        raise EngineError("404")

    for ask in (refuses, lambda url: asyncio.sleep(0, "nothing of use 1")):
        with pytest.raises(EngineError, match=r"http://a/metrics does not report .* a number"):
            asyncio.run(LoadMonitor(ask, PrometheusGauges("x", "y")).read("http://a"))


def test_limits_of_reachable_servers_are_adjusted() -> None:
    async def ask(url: str) -> str:
        if url.startswith("http://b"):
            raise ServerUnavailableError("no connection")
        return "x 2\ny 0.5"

    async def resized_servers() -> list[int]:
        servers = ServerPool(("http://a", "http://b", "http://c"), ready, 8, 1.0)
        await servers.ready()
        servers.all[2].ready = False
        await servers.adjust_limits(LoadMonitor(ask, PrometheusGauges("x", "y")).read)
        return [server.limit for server in servers.all]

    assert asyncio.run(resized_servers()) == [6, 8, 8]


async def ready(server: EngineServer) -> None:
    pass


def test_continuations_go_before_new_requests() -> None:
    async def order() -> list[str]:
        servers, message, release = ServerPool(("http://a",), ready, 1, 1.0), list[str](), asyncio.Event()
        await servers.ready()

        async def ask(name: str) -> None:
            message.append(name)
            if name == "first":
                await release.wait()

        async def call(name: str, started: bool) -> None:
            await servers.call(lambda server: ask(name), started)

        names = {"first": False, "new 1": False, "new 2": False, "begun 1": True, "begun 2": True, "new 3": False}
        tasks = [asyncio.ensure_future(call(name, started)) for name, started in names.items()]
        while not message or servers._waiting_continuations < 2:
            await asyncio.sleep(0)
        release.set()
        await asyncio.gather(*tasks)
        return message

    assert asyncio.run(order()) == ["first", "begun 1", "begun 2", "new 1", "new 2", "new 3"]


def test_all_slots_of_all_servers_are_used() -> None:
    async def most() -> int:
        servers, now, seen = ServerPool(("http://a", "http://b"), ready, 2, 1.0), 0, list[int]()
        await servers.ready()

        async def ask(server: EngineServer) -> None:
            nonlocal now
            now += 1
            seen.append(now)
            for _ in range(3):
                await asyncio.sleep(0)
            now -= 1

        await asyncio.gather(*(servers.call(ask, i % 3 == 0) for i in range(40)))
        return max(seen)

    assert asyncio.run(most()) == 4


def test_slots_freed_together_are_all_taken() -> None:
    """Four requests finish at once while one continuation and ten new requests wait: the new ones get the other three slots."""

    async def asked_after() -> int:
        servers, requests, gates = ServerPool(("http://a",), ready, 4, 1.0), 0, (asyncio.Event(), asyncio.Event())
        await servers.ready()

        async def ask(gate: asyncio.Event) -> None:
            nonlocal requests
            requests += 1
            await gate.wait()

        async def call(gate: asyncio.Event, started: bool = False) -> None:
            await servers.call(lambda server: ask(gate), started)

        tasks = [asyncio.ensure_future(call(gates[0])) for _ in range(4)]
        while requests < 4:
            await asyncio.sleep(0)
        tasks += [asyncio.ensure_future(call(gates[1], started=i == 0)) for i in range(11)]
        while not servers._waiting_continuations:
            await asyncio.sleep(0)
        gates[0].set()
        for _ in range(100):
            await asyncio.sleep(0)
        result = requests
        gates[1].set()
        await asyncio.gather(*tasks)
        return result

    assert asyncio.run(asked_after()) == 8
