"""What is noticed of a machine of a cluster that falls silent, without Ray."""

from __future__ import annotations

import asyncio
import atexit
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from policygrad.cluster import watch
from policygrad.cluster.config import ClusterConfig
from policygrad.cluster.watch import HeadWatch, await_unless_silent
from policygrad.errors import HangError
from policygrad.samplers.engines.http import ServerUnavailableError


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CONNECT_EVERY", "ASK_EVERY", "POLL_SECONDS"):
        monkeypatch.setattr(watch, name, 0.001)


async def reply_of(listens: bool, reply: Callable[[asyncio.Event], Awaitable[str]]) -> str:
    """Await a reply from a place where somebody listens, or nobody; the event is set when a connection comes."""
    connected = asyncio.Event()
    server = await asyncio.start_server(lambda reader, writer: (connected.set(), writer.close()), "127.0.0.1", 0)
    place = server.sockets[0].getsockname()
    if not listens:
        server.close()
        await server.wait_closed()
    try:
        return str(await await_unless_silent(reply(connected), place, 0.05 if not listens else 600.0))
    finally:
        server.close()


def test_a_reply_is_waited_for_as_long_as_its_machine_answers() -> None:
    async def late(connected: asyncio.Event) -> str:
        await connected.wait()
        return "here"

    assert asyncio.run(reply_of(True, late)) == "here"


def test_a_machine_that_accepts_no_connection_is_named_and_not_waited_for() -> None:
    async def never(connected: asyncio.Event) -> str:
        await connected.wait()
        return "here"

    with pytest.raises(ServerUnavailableError, match=r"127\.0\.0\.1 has not answered for 0\.05 s"):
        asyncio.run(reply_of(False, never))


def test_what_a_reply_raises_is_raised() -> None:
    async def fails(connected: asyncio.Event) -> str:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        asyncio.run(reply_of(True, fails))


@contextmanager
def head_that(tells: Callable[[], str], monkeypatch: pytest.MonkeyPatch, timeout: float) -> Iterator[HeadWatch]:
    """A watch over a stand-in for Ray's head, which tells the state of the learner's place."""
    util = SimpleNamespace(placement_group_table=lambda group: {"state": tells()})
    ray: Any = SimpleNamespace(
        util=util, get_runtime_context=lambda: SimpleNamespace(gcs_address="10.0.0.1:6379"), shutdown=lambda: None
    )
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.util", util)  # type: ignore[arg-type]
    head = HeadWatch(ClusterConfig("auto", timeout=timeout))
    head.start(object(), "10.0.0.2")
    try:
        yield head
    finally:
        head._left = True


def comes(true: Callable[[], Any]) -> Any:
    waiting = threading.Event()
    for _ in range(60_000):
        if found := true():
            return found
        waiting.wait(0.001)
    raise AssertionError("it did not come")


def test_a_head_that_answers_nothing_is_named_and_calls_that_need_it_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    left, answers = list[Callable[[], None]](), threading.Event()
    monkeypatch.setattr(atexit, "register", left.append)
    with head_that(lambda: str(answers.wait()), monkeypatch, 0.05) as head:
        said = comes(head.describe_loss)
        assert "Ray's head at 10.0.0.1:6379 has not answered for 0.05 s (--cluster.timeout)" in said
        called = list[str]()
        head.call(answers.wait)
        head.call(called.append, "a second one")
        head.disconnect(sys.modules["ray"])
        assert not called
        answers.set()
    monkeypatch.setattr("os._exit", called.append)
    (leave,) = left
    leave()
    assert called == [HangError.code]  # type: ignore[comparison-overlap]


def test_a_learner_whose_machine_is_gone_is_waited_for_until_another_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    with head_that(lambda: "RESCHEDULING", monkeypatch, 0.05) as head:
        said = comes(head.describe_loss)
    assert "the machine of learner 0, 10.0.0.2, is gone, and no other has had room for it" in said


def test_nothing_is_said_while_all_are_there_and_nobody_is_asked_after_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[str]()
    with head_that(lambda: asked.append("?") or "CREATED", monkeypatch, 600.0) as head:  # type: ignore[func-returns-value]
        comes(lambda: len(asked) > 2)
        assert head.describe_loss() == ""
        head.disconnect(sys.modules["ray"])
        number = len(asked)
        threading.Event().wait(0.01)
        assert len(asked) == number
        with pytest.raises(ValueError, match="mine"):
            head.call(int, "mine")
