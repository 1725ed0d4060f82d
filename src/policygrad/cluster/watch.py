"""Notices that a machine of a Ray cluster has fallen silent. Ray itself waits minutes for one that is cut off, and for ever for one
that only some of the others no longer hear."""

from __future__ import annotations

import asyncio
import atexit
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from policygrad.cluster.config import CLIENT, ClusterConfig
from policygrad.errors import HangError
from policygrad.samplers.engines.http import ServerUnavailableError

CONNECT_SECONDS, CONNECT_EVERY = 5.0, 2.0
"""Seconds that a connection to an actor's machine may take, and between two of them."""
ASK_EVERY, POLL_SECONDS = 2.0, 0.25
"""Seconds between questions to Ray's head, and between looks at a call that needs it."""
Place = tuple[str, int]
"""Address of a machine, and the port at which Ray listens there."""


async def await_unless_silent(reply: Awaitable[Any], place: Place, silence: float) -> Any:
    """Return a reply from another machine. Ray itself would wait for minutes, or for ever, where the network between the two
    is gone and its head still hears both.

    Raises:
        ServerUnavailableError: The machine accepts no connection for so many seconds.
    """
    waiting, listening = asyncio.ensure_future(reply), asyncio.create_task(_listen_until_silent(place, silence))
    try:
        await asyncio.wait({waiting, listening}, return_when=asyncio.FIRST_COMPLETED)
        if waiting.done():
            return waiting.result()
        raise ServerUnavailableError(f"{place[0]} has not answered for {silence:g} s")
    finally:
        waiting.cancel()
        listening.cancel()


async def _listen_until_silent(place: Place, silence: float) -> None:
    last_answer = time.monotonic()
    while time.monotonic() - last_answer < silence:
        with suppress(OSError):  # a TimeoutError is one
            async with asyncio.timeout(CONNECT_SECONDS):
                _, writer = await asyncio.open_connection(*place)
            last_answer = time.monotonic()
            writer.close()
        await asyncio.sleep(CONNECT_EVERY)


class HeadWatch:
    """Asks Ray's head, in a thread, where the learner's place is, and notices that the head is silent or that there is none.

    Ray itself waits minutes for a head that is cut off, and for ever for a machine to put a lost one's actors on. Until `start`,
    and once the head is silent, nothing is known: calls that need the head are then left out, since they would not return.
    """

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config
        self._last_answer: float | None = None  # monotonic time of the head's last answer
        self._placed = 0.0  # monotonic time at which the learner last had a place
        self._address, self._learner = config.address, ""
        self._left = False  # a call that needs the head was left out
        self._asking, self._stopped = threading.Lock(), False
        self.exit_code = HangError.code
        """Of the process, if it cannot end as usual."""

    @property
    def is_silent(self) -> bool:
        """Whether Ray's head has not answered for as long as `--cluster.timeout`."""
        return self._last_answer is not None and time.monotonic() - self._last_answer > self._config.timeout

    def start(self, group: Any, learner: str) -> None:
        """Watch from now on. `group`: the learners' placement group; `learner`: the address of learner 0's machine."""
        import ray
        from ray.util import placement_group_table

        if not self._address.startswith(CLIENT):
            self._address = str(ray.get_runtime_context().gcs_address)
        self._learner = learner

        def ask() -> None:
            while not self._left:
                with self._asking:
                    if self._stopped:
                        return
                    with suppress(Exception):  # no answer
                        state = placement_group_table(group).get("state")
                        self._last_answer = time.monotonic()
                        if state == "CREATED":
                            self._placed = self._last_answer
                time.sleep(ASK_EVERY)

        self._last_answer = self._placed = time.monotonic()
        threading.Thread(target=ask, name="Ray's head", daemon=True).start()

    def describe_loss(self) -> str:
        """Return who is gone; nothing if all are there."""
        seconds = self._config.timeout
        if self.is_silent:
            return (
                f"Ray's head at {self._address} has not answered for {seconds:g} s (--cluster.timeout): its machine, or the "
                "network between it and this command, is gone"
            )
        if self._last_answer is not None and self._last_answer - self._placed > seconds:
            return (
                f"the machine of learner 0, {self._learner}, is gone, and no other has had room for it for {seconds:g} s "
                "(--cluster.timeout)"
            )
        return ""

    def call(self, function: Callable[..., object], *args: Any) -> None:
        """Call a function of Ray that needs the head, unless that is silent, or falls silent meanwhile."""
        if self._left:
            return
        errors = list[BaseException]()

        def do() -> None:
            try:
                function(*args)
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=do, daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(POLL_SECONDS)
            if self.is_silent and thread.is_alive():
                self._left = True
                atexit.register(self._exit_process)
                return
        for error in errors:
            raise error

    def disconnect(self, ray: Any) -> None:
        """Stop asking, since a question would connect again, and disconnect."""

        def stop() -> None:
            with self._asking:
                self._stopped = True

        self.call(stop)
        self.call(ray.shutdown)

    def _exit_process(self) -> None:
        """End the process at once: Ray's own end would wait for its head, and crashes while another of its calls waits."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(self.exit_code)
