"""AsyncRunner: one loop for the calls of many threads, which run concurrently."""

from __future__ import annotations

import asyncio
import threading

import pytest

from policygrad.utils.async_runner import AsyncRunner


def test_work_of_another_thread_runs_concurrently() -> None:
    """Each waits for the other, so that neither can finish first."""
    started, order = threading.Event(), list[str]()

    async def first(one: asyncio.Event) -> str:
        started.set()
        await one.wait()
        order.append("first")
        return "of the first"

    async def second(one: asyncio.Event) -> str:
        order.append("second")
        one.set()
        return "of the second"

    with AsyncRunner() as wait:
        one, message = asyncio.Event(), list[str]()
        thread = threading.Thread(target=lambda: message.append(wait(first(one))))
        thread.start()
        started.wait()
        assert wait(second(one)) == "of the second"
        thread.join()
        assert message == ["of the first"]
        assert order == ["second", "first"]
        assert wait(asyncio.sleep(0, "later")) == "later"


def test_finished_thread_does_not_wait_for_others() -> None:
    """The loop continues in the thread whose call is not finished."""
    started, order = threading.Event(), list[str]()

    with AsyncRunner() as wait:
        brought, released = asyncio.Event(), threading.Event()

        async def first() -> None:
            started.set()
            await brought.wait()

        async def second() -> None:
            brought.set()
            while not released.is_set():
                await asyncio.sleep(0)

        def shorter() -> None:
            wait(first())
            order.append("first")
            released.set()

        thread = threading.Thread(target=shorter)
        thread.start()
        started.wait()
        wait(second())
        order.append("second")
        thread.join()
        assert order == ["first", "second"]


def test_all_work_can_be_cancelled() -> None:
    started, ended = threading.Event(), list[BaseException]()

    async def endless() -> None:
        started.set()
        await asyncio.Event().wait()

    def waits() -> None:
        try:
            wait(endless())
        except BaseException as error:
            ended.append(error)

    with AsyncRunner() as wait:
        thread = threading.Thread(target=waits)
        thread.start()
        started.wait()
        wait.cancel()
        thread.join()
        assert [type(error) for error in ended] == [asyncio.CancelledError]
        wait.cancel()  # nothing runs
        assert wait(asyncio.sleep(0, "later")) == "later"


def test_waiting_thread_takes_over_the_loop_and_gets_its_own_error() -> None:
    started, brought = threading.Event(), threading.Event()

    async def ends_first() -> None:
        started.set()
        while not brought.is_set():
            await asyncio.sleep(0)

    async def fails() -> None:
        brought.set()
        for _ in range(50):  # continues after the other call has finished
            await asyncio.sleep(0)
        raise ZeroDivisionError

    with AsyncRunner() as wait:
        thread = threading.Thread(target=lambda: wait(ends_first()))
        thread.start()
        started.wait()
        with pytest.raises(ZeroDivisionError):
            wait(fails())
        thread.join()
        assert wait(asyncio.sleep(0, "later")) == "later"


def test_runner_closes_inside_a_running_loop() -> None:
    """Like a notebook's cells, which run inside the kernel's loop."""

    async def cell() -> str:
        with AsyncRunner() as wait:
            return wait(asyncio.sleep(0, "said"))

    assert asyncio.run(cell()) == "said"
