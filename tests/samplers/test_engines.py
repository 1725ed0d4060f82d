"""Every engine: replies are checked, servers are compared with the learner, and an unavailable server is prepared again. The
servers here are tables in this process, with faults; real ones are in the files named after them."""

from __future__ import annotations

import asyncio
import copy
import gc
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

import policygrad as pg
from doubles.engine import Bigram, Fault, Standins, refused, whole
from policygrad.errors import ConfigError, EngineError
from policygrad.models.loading import load_model
from policygrad.models.tokenizer import Tokenizer, load_tokenizer
from policygrad.samplers.base import Request, SamplingParams, SupportsStreaming
from policygrad.samplers.config import SamplerConfig
from policygrad.samplers.engines import probe, server_pool
from policygrad.samplers.engines.base import EngineCompletion
from policygrad.samplers.engines.http import HttpClient, ServerStartingError, ServerUnavailableError
from policygrad.samplers.engines.polling import SharedPoll, repeat_during
from policygrad.utils.async_runner import AsyncRunner, gather_or_cancel
from policygrad.weight_sync.base import PublishedWeights
from policygrad.weight_sync.folder import VersionFolder

pytestmark = pytest.mark.usefixtures("short_probes")

ONE, TWO = "http://one", "http://two"
Make = Callable[..., Standins]


@pytest.fixture
def wait() -> Iterator[AsyncRunner]:
    with AsyncRunner() as waiter:
        yield waiter


@pytest.fixture(scope="module")
def tokenizer(random_model: Path) -> Tokenizer:
    return load_tokenizer(str(random_model), load_model(str(random_model), dtype="fp32", device="cpu"))


@pytest.fixture
def make(tokenizer: Tokenizer, tmp_path: Path) -> Make:
    def made(*urls: str, **options: Any) -> Standins:
        config = SamplerConfig(engine="llama_cpp", urls=urls or (ONE,), **{"recovery_timeout": 0.2, **options})
        return Standins(Bigram(len(tokenizer.hf)), tokenizer, config, tmp_path / "weights")

    return made


def weights(sampler: Standins, version: int, change: float = 0.0) -> PublishedWeights:
    """Return the model's own tensors, each changed by `change`."""
    with torch.no_grad():
        for parameter in sampler.model.parameters():
            parameter.add_(change * torch.sin(torch.arange(parameter.numel()).float()).view_as(parameter))
    return PublishedWeights(version, dict(sampler.model.named_parameters()))


def request(i: int = 0, max_tokens: int = 8) -> Request:
    return Request(torch.tensor([5, 70, 300]), (1, i), SamplingParams(max_tokens=max_tokens), max_tokens)


def test_completions_come_from_the_policy_and_have_its_version(make: Make, wait: AsyncRunner) -> None:
    sampler = make()
    metrics = wait(sampler.update(weights(sampler, 3)))
    generations = wait(sampler.generate([request(i) for i in range(5)]))
    assert [g.version for g in generations] == [3] * 5
    assert all(g.finish_reason == "stop" or len(g.tokens) == 8 for g in generations)
    assert metrics["publication/bytes"].value > 4 * sum(p.numel() for p in sampler.model.parameters())
    assert metrics["publication/seconds"].value > 0
    assert metrics["publication/probe_max"].value < 1e-5


def test_completions_depend_on_the_key(make: Make, wait: AsyncRunner) -> None:
    sampler = make()
    wait(sampler.update(weights(sampler, 0)))
    requests = [request(i, 16) for i in range(4)]
    first, second = wait(sampler.generate(requests)), wait(sampler.generate(requests[::-1]))[::-1]
    assert [g.tokens.tolist() for g in first] == [g.tokens.tolist() for g in second]
    assert len({tuple(g.tokens.tolist()) for g in first}) == 4


def raw(server: Any, request: Request, completion: EngineCompletion) -> EngineCompletion:
    return whole(server, request, completion, temperature=1.0)


def noisy(server: Any, request: Request, completion: EngineCompletion) -> EngineCompletion:
    return replace(completion, logp=[x - 0.025 * (i % 2) for i, x in enumerate(completion.logp)])


@pytest.mark.parametrize(
    ("fault", "top_k", "message"),
    [
        (raw, 0, "before the temperature"),
        (None, 40, "and all are larger: it truncates the distribution"),
        (whole, 40, "truncates the distribution (top-k, top-p, min-p) without reporting it"),
        (noisy, 0, "up to 0.025 nats"),
        (refused, 0, "does not answer as stand-in does: 400: token id out of vocabulary"),
    ],
)
def test_server_with_another_distribution_is_refused(
    make: Make, wait: AsyncRunner, fault: Fault | None, top_k: int, message: str
) -> None:
    sampler = make()
    server = sampler.standins[ONE]
    server.top_k, server.fault = top_k, fault or server.fault
    with pytest.raises(EngineError) as error:
        wait(sampler.update(weights(sampler, 0)))
    assert message in str(error.value)
    assert "Start it as it should be" in str(error.value)


def test_server_with_old_weights_is_left_out_until_it_loads_new_ones(make: Make, wait: AsyncRunner) -> None:
    sampler = make(ONE, TWO)
    wait(sampler.update(weights(sampler, 0)))
    two = sampler.standins[TWO]
    two.stale = True
    assert wait(sampler.update(weights(sampler, 1, 1e-3)))["publication/servers"].value == 2
    assert sampler.must_reload == {TWO}
    assert not any(server.ready for server in sampler.servers.all if server.url == TWO)
    assert "an older version" in sampler.servers.all[1].last_error
    two.stale = False
    assert wait(sampler.update(weights(sampler, 2, 1e-3)))["publication/servers"].value == 1
    assert all(server.ready for server in sampler.servers.all)
    assert not sampler.must_reload


def test_run_ends_if_all_servers_keep_old_weights(make: Make, wait: AsyncRunner) -> None:
    sampler = make()
    wait(sampler.update(weights(sampler, 0)))
    sampler.standins[ONE].stale = True
    with pytest.raises(
        EngineError, match=r"rejected 10 times .http://one: .*log-probabilities differ .* an older version"
    ):
        wait(sampler.update(weights(sampler, 1, 1e-3)))


def test_old_weights_at_first_contact_are_refused_at_once(make: Make, wait: AsyncRunner) -> None:
    sampler = make(ONE, TWO, recovery_timeout=60.0)
    with torch.no_grad():
        sampler.standins[TWO].model.table.mul_(0.5)
    sampler.standins[TWO].stale = True
    with pytest.raises(EngineError, match=r"at http://two: its log-probabilities differ"):
        wait(sampler.update(weights(sampler, 0)))


def garbled(share: int) -> Fault:
    """Every `share`-th reply is invalid."""
    count = iter(range(10**6))
    return lambda s, r, d: replace(d, tokens=[-1] * len(d.tokens)) if next(count) % share == 0 else d


def test_server_with_invalid_replies_is_probed_before_further_requests(make: Make, wait: AsyncRunner) -> None:
    sampler = make(ONE, TWO, recovery_timeout=60.0)
    wait(sampler.update(weights(sampler, 4)))
    requests = [request(i) for i in range(24)]
    baseline = wait(sampler.generate(requests))
    one = sampler.standins[ONE]
    one.fault, loaded = garbled(60), one.loaded
    generations = wait(sampler.generate(requests))
    assert [g.tokens.tolist() for g in generations] == [g.tokens.tolist() for g in baseline]
    assert sampler.servers.num_retries == 1
    assert one.loaded > loaded


def test_reply_sampled_with_old_weights_is_retried(make: Make, wait: AsyncRunner) -> None:
    """The server restarted between two requests, which no connection error shows."""
    sampler = make()
    wait(sampler.update(weights(sampler, 0)))
    one = sampler.standins[ONE]
    assert sampler.published is not None
    name, loaded = sampler.published.name, one.loaded
    one.fault = lambda s, r, d: replace(d, weight_version="v00000000-older" if s.loaded == loaded else name)
    assert len(wait(sampler.generate([request(i) for i in range(8)]))) == 8
    assert one.loaded > loaded
    one.fault = lambda s, r, d: replace(d, weight_version="v00000000-older")
    with pytest.raises(EngineError, match=r"failed 10 times.*samples with the weights v00000000-older"):
        wait(sampler.generate([request()]))
    wait(sampler.close())


def test_waiting_for_servers_is_reported_and_ended(
    make: Make, wait: AsyncRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_pool, "WAIT_REPORT_SECONDS", 0.0)
    message: list[str] = []
    sampler = make(ONE, TWO, recovery_timeout=60.0)
    sampler.on_progress = lambda text, done, total: message.append(text)
    for server in sampler.standins.values():
        server.away = 2
    wait(sampler.update(weights(sampler, 0)))
    assert message[0] == "waiting for a server, each for up to 60 s (http://one: not there)"
    assert "http://two: not there" in message[1]
    assert message[-1] == ""
    assert message.count("") == 1


def test_a_server_that_starts_is_waited_for_longer_than_one_that_is_away(make: Make, wait: AsyncRunner) -> None:
    """Until it is no longer starting, even if the time to recover is shorter than that between two attempts."""
    sampler = make(recovery_timeout=1e-6)
    load_weights, attempts = sampler.load_weights, list[str]()

    async def starts(url: str, version: Any) -> None:
        attempts.append(url)
        if len(attempts) < 4:
            raise ServerStartingError("starting", 1.0, 600.0)
        await load_weights(url, version)

    sampler.load_weights = starts  # type: ignore[method-assign]
    wait(sampler.update(weights(sampler, 0)))
    assert len(attempts) == 4


def test_chunks_continue_with_the_remaining_tokens(make: Make, wait: AsyncRunner) -> None:
    sampler = make(chunk_tokens=3)
    wait(sampler.update(weights(sampler, 5)))
    requests: list[tuple[list[int], int]] = []

    def noted(server: Any, request: Request, completion: EngineCompletion) -> EngineCompletion:
        requests.append((request.prompt_ids.tolist(), request.max_tokens))
        return completion

    sampler.standins[ONE].fault = noted
    [generation] = wait(sampler.generate([request(4, 8)]))
    tokens, begin = generation.tokens.tolist(), [5, 70, 300]
    assert (len(tokens), generation.finish_reason, generation.version) == (8, "length", 5)
    assert requests == [(begin, 3), (begin + tokens[:3], 3), (begin + tokens[:6], 2)]
    expected = sampler.model(torch.tensor([begin + tokens])).logits[0, 2:-1].log_softmax(-1)
    assert torch.allclose(generation.logp, expected.gather(-1, generation.tokens[:, None])[:, 0], atol=1e-5)
    [second] = wait(sampler.generate([request(4, 8)]))
    assert second.tokens.tolist() == tokens
    ended = [g for g in wait(sampler.generate([request(i, 400) for i in range(4)])) if g.finish_reason == "stop"]
    assert ended
    assert all((g.tokens == 1).nonzero().tolist() == [[len(g.tokens) - 1]] for g in ended)


def test_tokens_have_their_own_version_when_weights_change_between_chunks(make: Make, wait: AsyncRunner) -> None:
    sampler = make(ONE, TWO, chunk_tokens=2, max_concurrency=2)
    wait(sampler.update(weights(sampler, 0)))
    tables = {0: sampler.model.table.detach().clone()}
    started = asyncio.Event()

    def starts(server: Any, request: Request, completion: EngineCompletion) -> EngineCompletion:
        if len(request.prompt_ids) == 7:  # two chunks are finished
            started.set()
        return completion

    for server in sampler.standins.values():
        server.fault = starts

    async def both() -> list[Any]:
        drawing = asyncio.ensure_future(sampler.generate([request(i, 40) for i in range(6)]))
        await started.wait()
        await sampler.update(weights(sampler, 3, 0.1))
        tables[3] = sampler.model.table.detach().clone()
        assert not drawing.done()
        return list(await drawing)

    generations = wait(both())
    changed = [g for g in generations if isinstance(g.version, torch.Tensor)]
    assert changed
    for generation in generations:
        versions = generation.version
        if isinstance(versions, int):
            versions = torch.full_like(generation.tokens, versions)
        assert versions.tolist() == sorted(versions.tolist())
        assert set(versions.tolist()) <= {0, 3}
        before = torch.cat([torch.tensor([300]), generation.tokens[:-1]])
        rows = torch.stack([tables[int(v)][token] for v, token in zip(versions, before, strict=True)])
        expected = rows.log_softmax(-1).gather(-1, generation.tokens[:, None])[:, 0]
        assert torch.allclose(generation.logp, expected, atol=1e-5)


def test_open_requests_finish_before_new_weights_load(make: Make, wait: AsyncRunner) -> None:
    sampler = make(chunk_tokens=0)
    wait(sampler.update(weights(sampler, 0)))
    before = sampler.model.table.detach().clone()
    holding, blocked = asyncio.Event(), asyncio.Event()
    complete, load_weights = sampler.complete, sampler.load_weights
    order: list[str] = []

    async def holds(url: str, request: Request, seed: int) -> EngineCompletion:
        if len(request.prompt_ids) == 3:
            blocked.set()
            await holding.wait()
            order.append("answered")
        return await complete(url, request, seed)

    async def loads(url: str, version: Any) -> None:
        order.append("loaded")
        await load_weights(url, version)

    sampler.complete, sampler.load_weights = holds, loads  # type: ignore[method-assign]

    async def both() -> Any:
        generating = asyncio.ensure_future(sampler.generate([request()]))
        await blocked.wait()
        asyncio.get_running_loop().call_later(0, lambda: asyncio.get_running_loop().call_soon(holding.set))
        await sampler.update(weights(sampler, 1, 0.1))
        return await generating

    [generation] = wait(both())
    assert order == ["answered", "loaded"]
    assert generation.version == 0
    rows = torch.cat([torch.tensor([300]), generation.tokens[:-1]])
    expected = before[rows].log_softmax(-1).gather(-1, generation.tokens[:, None])[:, 0]
    assert torch.allclose(generation.logp, expected, atol=1e-5)


def test_completions_are_reported_while_others_are_sampled(make: Make, wait: AsyncRunner) -> None:
    sampler = make(max_concurrency=2)
    assert isinstance(sampler, SupportsStreaming)
    wait(sampler.update(weights(sampler, 0)))
    requests = [request(i) for i in range(6)]
    seen: list[tuple[Request, list[int]]] = []
    completion: list[int] = []

    def watch(over: Any) -> None:
        seen.extend((request, tokens.tolist()) for request, tokens in over)
        completion.append(sampler.standins[ONE].drawn)

    with sampler.on_completion(watch):
        generations = wait(sampler.generate(requests))
    assert {r.key: tokens for r, tokens in seen} == {
        r.key: g.tokens.tolist() for r, g in zip(requests, generations, strict=True)
    }
    assert len(seen) == 6
    assert completion[0] < completion[-1]
    wait(sampler.generate(requests))
    assert len(seen) == 6

    def stops(over: Any) -> None:
        raise ZeroDivisionError

    with sampler.on_completion(stops), pytest.raises(ZeroDivisionError):
        wait(sampler.generate(requests))


def test_request_ends_when_the_heartbeat_fails(wait: AsyncRunner) -> None:
    requests, ended = list[int](), list[bool]()

    async def never() -> str:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)
        return "said"

    async def pulse() -> None:
        requests.append(len(requests))
        if len(requests) == 3:
            raise ServerUnavailableError("no answer within 30 seconds")

    with pytest.raises(ServerUnavailableError, match="no answer within 30 seconds"):
        wait(repeat_during(never(), pulse, 1e-4))
    assert (requests, ended) == ([0, 1, 2], [True])
    for seconds in (0.0, 60.0):
        assert wait(repeat_during(asyncio.sleep(0, "said"), pulse, seconds)) == "said"
        with pytest.raises(ZeroDivisionError):
            wait(repeat_during(broken(), pulse, seconds))
    assert len(requests) == 3


def test_whatever_waits_shares_one_poll_which_ends_with_the_last_and_fails_for_all(wait: AsyncRunner) -> None:
    async def run() -> None:
        looks, done = list[int](), [asyncio.Event() for _ in range(64)]

        async def look() -> None:
            looks.append(len(asyncio.all_tasks()))
            if len(looks) == 3:
                raise ServerUnavailableError("gone")
            done[len(looks) - 1].set()
            if len(looks) == 1:  # or it might look again before the 64 have ended
                await asyncio.Event().wait()

        poll = SharedPoll(look, 1e-4)
        first = await asyncio.gather(*(poll.during(done[0].wait()) for _ in range(64)))
        assert first == [True] * 64
        assert len(looks) == 1  # not one for each
        assert len(asyncio.all_tasks()) == 1  # nothing looks any more
        later = [asyncio.ensure_future(poll.during(done[i].wait())) for i in (1, 5, 6)]
        results = await asyncio.gather(*later, return_exceptions=True)
        assert results[0] is True
        assert [type(x) for x in results[1:]] == [ServerUnavailableError] * 2
        assert await poll.during(asyncio.sleep(0, "again")) == "again"
        assert len(asyncio.all_tasks()) == 1

    wait(run())


def test_what_begins_while_a_poll_is_ending_has_one_of_its_own(wait: AsyncRunner) -> None:
    """At each moment of the end of what waited before it."""

    async def never() -> None:
        raise AssertionError("an interval has passed")

    async def some() -> str:
        for _ in range(8):
            await asyncio.sleep(0)
        return "second"

    async def run() -> None:
        for moment in range(8):
            poll = SharedPoll(never, 60.0)
            first = asyncio.ensure_future(poll.during(asyncio.sleep(0, "first")))
            for _ in range(moment):
                await asyncio.sleep(0)
            assert await poll.during(some()) == "second"
            assert await first == "first"
            assert len(asyncio.all_tasks()) == 1

    wait(run())


def test_calls_at_the_same_time_read_the_load_of_a_server_once(
    tokenizer: Tokenizer, tmp_path: Path, wait: AsyncRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the programs of an agent's episodes do, each in a call of its own."""
    monkeypatch.setattr(server_pool, "LOAD_POLL_SECONDS", 1e-3)
    reading, seen, is_read = list[str](), list[int](), asyncio.Event()

    async def get(url: str) -> str:
        reading.append(url)
        seen.append(len(reading))
        await asyncio.sleep(0)
        reading.remove(url)
        is_read.set()
        return "waiting 0\nuse 0.5"

    class Busy(Standins):
        async def complete(self, url: str, request: Request, seed: int) -> EngineCompletion:
            await is_read.wait()
            return await super().complete(url, request, seed)

    sampler = Busy(
        Bigram(len(tokenizer.hf)),
        tokenizer,
        SamplerConfig("vllm", (ONE,), max_concurrency=0),
        tmp_path / "weights",
    )
    sampler.load_monitor = server_pool.LoadMonitor(get, server_pool.PrometheusGauges("waiting", "use"))
    wait(sampler.update(weights(sampler, 1)))
    request = Request(torch.tensor([1, 2]), (0,), SamplingParams(), 4)

    async def call_often() -> None:
        is_read.clear()
        await asyncio.gather(*(sampler.generate([request]) for _ in range(16)))

    wait(call_often())
    assert set(seen) == {1}


def test_consecutive_failures_raise_one_error_and_log_nothing(wait: AsyncRunner) -> None:
    """All requests fail at one server: the first error is raised, and asyncio logs nothing about the rest."""
    message = list[str]()

    async def asked() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: message.append(context["message"]))

        async def question(after: int) -> None:
            for _ in range(after):
                await asyncio.sleep(0)
            raise ZeroDivisionError

        async def pulse() -> None:
            raise AssertionError("nobody waits that long")

        with pytest.raises(ZeroDivisionError):
            await gather_or_cancel([repeat_during(question(after), pulse, 60.0) for after in range(20)])

    wait(asked())
    gc.collect()
    assert message == []


async def broken() -> None:
    raise ZeroDivisionError


def test_logprob_tolerance_allows_small_differences(make: Make, wait: AsyncRunner) -> None:
    sampler = make(logprob_tolerance=1.0)
    wait(sampler.update(weights(sampler, 0)))
    sampler.standins[ONE].stale = True
    metrics = wait(sampler.update(weights(sampler, 1, 1e-3)))  # stale, within the tolerance
    largest = max(verdict.difference for verdict in sampler.probe_results.values())
    assert 1e-4 < largest < 1.0
    assert metrics["publication/probe_max"].value == largest


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda s, r, d: replace(d, logp=d.logp[:-1]), "7 log-probabilities for 8 tokens"),
        (lambda s, r, d: replace(d, logp=[-9999.0, *d.logp[1:]]), "a placeholder"),
        (lambda s, r, d: replace(d, logp=[float("-inf"), *d.logp[1:]]), "-inf as a log-probability"),
        (lambda s, r, d: replace(d, logp=[float("nan"), *d.logp[1:]]), "nan as a log-probability"),
        (lambda s, r, d: replace(d, logp=[None, *d.logp[1:]]), "None as a log-probability"),
        (lambda s, r, d: replace(d, logp=[0.3, *d.logp[1:]]), "0.3 as a log-probability"),
        (lambda s, r, d: EngineCompletion(d.tokens[:3], d.logp[:3]), "ends after 3 of 8 tokens"),
        (lambda s, r, d: replace(d, tokens=[487, *d.tokens[1:]]), "487 as a token"),
        (lambda s, r, d: replace(d, tokens=["7", *d.tokens[1:]]), "'7' as a token"),
        (lambda s, r, d: EngineCompletion([*d.tokens, 1], [*d.logp, -1.0]), "9 tokens, and was asked for 8"),
    ],
)
def test_invalid_completions_are_refused(make: Make, wait: AsyncRunner, fault: Fault, message: str) -> None:
    sampler = make()
    wait(sampler.update(weights(sampler, 0)))
    probed = lambda s, r, d: d if len(r.prompt_ids) > 3 else fault(s, r, EngineCompletion([7] * 8, [-1.0] * 8))  # noqa: E731
    sampler.standins[ONE].fault = probed
    with pytest.raises(EngineError) as error:
        wait(sampler.generate([request()]))
    assert message in str(error.value)


def test_tokens_after_an_end_token_are_cut_off(make: Make, wait: AsyncRunner) -> None:
    sampler = make()
    wait(sampler.update(weights(sampler, 0)))
    sampler.standins[ONE].fault = lambda s, r, d: EngineCompletion([7, 1, 8, 1], [-1.0, -2.0, -3.0, -4.0])
    [generation] = wait(sampler.generate([request()]))
    assert (generation.tokens.tolist(), generation.logp.tolist(), generation.finish_reason) == (
        [7, 1],
        [-1.0, -2.0],
        "stop",
    )


def test_requests_go_to_the_least_busy_server(make: Make, wait: AsyncRunner) -> None:
    sampler = make(ONE, TWO, max_concurrency=3)
    wait(sampler.update(weights(sampler, 0)))
    before = [s.drawn for s in sampler.standins.values()]
    wait(sampler.generate([request(i) for i in range(40)]))
    requests = [s.drawn - n for s, n in zip(sampler.standins.values(), before, strict=True)]
    assert sum(requests) == 40
    assert min(requests) >= 15


def test_requests_of_an_unavailable_server_move_and_it_loads_the_weights_again(make: Make, wait: AsyncRunner) -> None:
    sampler = make(ONE, TWO, recovery_timeout=5.0)
    wait(sampler.update(weights(sampler, 0)))
    baseline = wait(sampler.generate([request(i) for i in range(12)]))
    first = sampler.standins[ONE]
    first.away, loaded, num_sampled = 3, first.loaded, first.drawn
    generations = wait(sampler.generate([request(i) for i in range(12)]))
    assert [g.tokens.tolist() for g in generations] == [g.tokens.tolist() for g in baseline]
    assert sampler.servers.num_retries >= 1
    for i in range(200):  # it comes back during these requests
        wait(sampler.generate([request(i)]))
        if sampler.servers.all[0].ready:
            break
    assert first.loaded == loaded + 1
    assert first.drawn >= num_sampled + 3 * probe.NUM_PROMPTS  # it was probed
    metrics = wait(sampler.update(weights(sampler, 1)))
    assert metrics["publication/retries"].value >= 1
    assert wait(sampler.update(weights(sampler, 2)))["publication/retries"].value == 0


def test_without_servers_the_error_has_each_reason(make: Make, wait: AsyncRunner) -> None:
    sampler = make(ONE, TWO)
    for server in sampler.standins.values():
        server.away = 10**6
    with pytest.raises(EngineError, match=r"for 0.2 seconds .http://one: not there; http://two: not there.*--resume"):
        wait(sampler.update(weights(sampler, 0)))


def test_bug_while_preparing_a_server_is_raised_at_once(make: Make, wait: AsyncRunner) -> None:
    sampler = make()
    sampler.standins.clear()
    with pytest.raises(KeyError, match="http://one"):
        wait(sampler.update(weights(sampler, 0)))


def test_unavailable_server_does_not_block_the_others(make: Make, wait: AsyncRunner) -> None:
    sampler = make(ONE, TWO)
    sampler.standins[TWO].away = 10**6
    for version in range(3):
        wait(sampler.update(weights(sampler, version, 1e-3)))
        assert [g.version for g in wait(sampler.generate([request(i) for i in range(4)]))] == [version] * 4
    sampler.standins[TWO].away = 0
    wait(sampler.update(weights(sampler, 3, 1e-3)))
    assert all(server.ready for server in sampler.servers.all)


def test_failing_request_is_not_retried_forever(make: Make, wait: AsyncRunner) -> None:
    sampler = make(recovery_timeout=10.0)
    wait(sampler.update(weights(sampler, 0)))

    def fails(server: Any, requests: Request, completion: EngineCompletion) -> EngineCompletion:
        if len(requests.prompt_ids) == 3:  # not a probe
            raise ServerUnavailableError("500 it cannot")
        return completion

    sampler.standins[ONE].fault = fails
    with pytest.raises(EngineError, match=r"failed 10 times, the last time at http://one: 500 it cannot"):
        wait(sampler.generate([request()]))


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (lambda r: httpx.Response(503, text="loading"), ServerUnavailableError, "503 loading"),
        (lambda r: httpx.Response(429), ServerUnavailableError, "429"),
        (lambda r: httpx.Response(404, text="Not Found"), EngineError, "http://one/x answers 404: Not Found"),
        (lambda r: httpx.Response(302), EngineError, "answers 302"),
    ],
)
def test_http_status_means_retry_or_refusal(
    answer: Any, error: type[Exception], message: str, wait: AsyncRunner
) -> None:
    http = HttpClient(1.0, httpx.MockTransport(answer))
    with pytest.raises(error, match=message):
        wait(http.post(f"{ONE}/x", {}))


def test_broken_connection_means_retry(wait: AsyncRunner) -> None:
    def broken(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadTimeout("timed out", request=request)

    with pytest.raises(ServerUnavailableError, match="ReadTimeout timed out"):
        wait(HttpClient(1.0, httpx.MockTransport(broken)).get(ONE))


def test_interrupted_call_is_cancelled(wait: AsyncRunner) -> None:
    """It would continue during the next call, with the old weights."""
    ended: list[str] = []

    async def asks() -> None:
        asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGINT)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    with pytest.raises(KeyboardInterrupt):
        wait(asks())
    assert ended == ["cancelled"]
    assert wait(asyncio.sleep(0, "goes on")) == "goes on"


def test_engine_needs_weights_before_sampling(make: Make, wait: AsyncRunner) -> None:
    with pytest.raises(EngineError, match="no weights"):
        wait(make().generate([request()]))


def test_versions_are_complete_and_old_ones_removed(tmp_path: Path) -> None:
    folder = VersionFolder(
        tmp_path / "w", lambda tensors, path: (path / "file").write_text(str(sorted(tensors))) and None
    )
    first = folder.publish(PublishedWeights(0, {"a": torch.zeros(1)}))
    second = folder.publish(PublishedWeights(1, {"b": torch.zeros(1)}))
    (tmp_path / "w" / ".tmp-v00000009-0123abcd").mkdir()  # left by a killed process
    (tmp_path / "w" / "vacation").mkdir()  # another file
    assert first.path != second.path
    assert (first.path / "file").exists()  # a server may still read it
    folder.remove_old_versions(second)
    assert sorted(p.name for p in (tmp_path / "w").iterdir()) == ["current.json", second.name, "vacation"]
    assert (second.version, second.bytes) == (1, len("['b']"))
    folder.remove()
    assert [p.name for p in (tmp_path / "w").iterdir()] == ["vacation"]
    (tmp_path / "w" / "vacation").rmdir()
    folder.remove()
    assert not (tmp_path / "w").exists()


def test_version_may_contain_subfolders(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """A tokenizer with several chat templates writes one for them."""
    plural = copy.deepcopy(tokenizer.hf)
    plural.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}

    def write(tensors: Any, path: Path) -> None:
        plural.save_pretrained(path)

    result = VersionFolder(tmp_path / "w", write).publish(PublishedWeights(0, {}))
    files = [path for path in result.path.rglob("*") if path.is_file()]
    assert any(path.parent != result.path for path in files)
    assert result.bytes == sum(path.stat().st_size for path in files)


def test_published_files_have_default_permissions(tmp_path: Path) -> None:
    """safetensors makes its files 0600, which a server of another user could not read."""

    def write(tensors: Any, folder: Path) -> None:
        (folder / "weights").touch(0o600)

    published = VersionFolder(tmp_path / "weights", write).publish(PublishedWeights(1, {}))
    (tmp_path / "any").touch()
    modes = {path.stat().st_mode for path in (tmp_path / "any", published.path / "weights")}
    assert len(modes) == 1
    assert [path.name for path in published.path.iterdir()] == ["weights"]


def test_weights_are_published_on_a_mount_without_chmod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(tensors: Any, folder: Path) -> None:
        (folder / "weights").write_bytes(b"four")
        os.chmod(folder / "weights", 0o400 | 0o200)

    def refused(path: Path, mode: int) -> None:
        raise PermissionError("not permitted")

    monkeypatch.setattr(Path, "chmod", refused)
    published = VersionFolder(tmp_path / "weights", write).publish(PublishedWeights(1, {}))
    assert (published.bytes, published.path.is_dir()) == (4, True)


def test_failed_write_leaves_the_previous_version(tmp_path: Path) -> None:
    def write(tensors: Any, path: Path) -> None:
        (path / "part").write_text("half")
        if "bad" in tensors:
            raise OSError(28, "No space left on device")

    folder = VersionFolder(tmp_path, write)
    retained = folder.publish(PublishedWeights(0, {}))
    with pytest.raises(EngineError, match=r"No space left on device.*--sampler.folder"):
        folder.publish(PublishedWeights(1, {"bad": torch.zeros(1)}))
    assert retained.name in (tmp_path / "current.json").read_text()
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["current.json", retained.name])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": "llama"}, "one of local, llama_cpp"),
        ({"urls": ("http://a",)}, "sampler.engine is local"),
        ({"engine": "llama_cpp", "urls": ("a:80",)}, "addresses such as"),
        ({"engine": "llama_cpp", "urls": ("http://a", "http://a")}, "twice"),
        ({"engine": "llama_cpp", "max_concurrency": -1}, r"sampler\.max_concurrency.*must be at least 0"),
        ({"engine": "llama_cpp", "max_concurrency": 0}, "llama_cpp reports none. Give it a number"),
        ({"engine": "llama_cpp", "timeout": float("inf")}, "finite"),
        ({"engine": "llama_cpp", "heartbeat": float("nan")}, "sampler.heartbeat at least 0"),
    ],
)
def test_invalid_sampler_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SamplerConfig(**options)


def test_engine_and_python_sampler_conflict(small: pg.Run, tmp_path: Path) -> None:
    run = replace(small, sampler=SamplerConfig(engine="llama_cpp"), output=str(tmp_path / "run"))
    with pytest.raises(ConfigError, match=r"sampler= is given and sampler.engine is llama_cpp"):
        pg.train(run, sampler=lambda model, tokenizer: pg.LocalSampler.from_tokenizer(model, tokenizer), display=False)


def test_context_length_of_a_started_server() -> None:
    config = SamplerConfig(engine="llama_cpp")
    assert (
        config.resolve_context_length(None),
        config.resolve_context_length(256),
        config.resolve_context_length(32768),
    ) == (4096, 256, 4096)
    assert (
        config.resolve_context_length(32768, 8192),
        config.resolve_context_length(10000, 8192),
        config.resolve_context_length(None, 8192),
    ) == (16384, 10000, 16384)
    assert replace(config, context_length=77).resolve_context_length(256, 8192) == 77
