"""One loop for calls of many threads: what another brings while one is going on is run beside it."""

from __future__ import annotations

import asyncio
import threading

import pytest

from policygrad.waiting import Waiter


def test_what_another_thread_brings_runs_beside_what_is_going_on() -> None:
    """Each waits for the other, so that neither could end before it."""
    begun, order = threading.Event(), list[str]()

    async def first(one: asyncio.Event) -> str:
        begun.set()
        await one.wait()
        order.append("first")
        return "of the first"

    async def second(one: asyncio.Event) -> str:
        order.append("second")
        one.set()
        return "of the second"

    with Waiter() as wait:
        one, said = asyncio.Event(), list[str]()
        thread = threading.Thread(target=lambda: said.append(wait(first(one))))
        thread.start()
        begun.wait()
        assert wait(second(one)) == "of the second"
        thread.join()
        assert said == ["of the first"]
        assert order == ["second", "first"]
        assert wait(asyncio.sleep(0, "later")) == "later"


def test_a_guest_is_seen_off_and_its_error_is_its_own() -> None:
    begun, brought = threading.Event(), threading.Event()

    async def ends_first() -> None:
        begun.set()
        while not brought.is_set():
            await asyncio.sleep(0)

    async def fails() -> None:
        brought.set()
        for _ in range(50):  # goes on when the one beside which it runs is over
            await asyncio.sleep(0)
        raise ZeroDivisionError

    with Waiter() as wait:
        thread = threading.Thread(target=lambda: wait(ends_first()))
        thread.start()
        begun.wait()
        with pytest.raises(ZeroDivisionError):
            wait(fails())
        thread.join()
        assert wait(asyncio.sleep(0, "later")) == "later"


def test_it_is_closed_below_somebody_elses_loop() -> None:
    """As a notebook's cells are, which run inside the kernel's."""

    async def cell() -> str:
        with Waiter() as wait:
            return wait(asyncio.sleep(0, "said"))

    assert asyncio.run(cell()) == "said"
