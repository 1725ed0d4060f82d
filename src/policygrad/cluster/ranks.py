"""Processes of rank 1 and above as actors: Ray places and starts them, torch.distributed is between them as ever."""

from __future__ import annotations

import os
import subprocess
import traceback
from typing import Any

from policygrad.cluster.crew import Site
from policygrad.cluster.needs import LEARNERS
from policygrad.learners.fsdp.others import Places

FAILED = 1
"""The exit code of one that has ended before its time."""


class Learner:
    """The actor. It has a share of the weights, and is worth nothing without the others: Ray starts rank 0 again, which starts the
    others."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name

    def follow(self, host: str, port: int, rank: int, size: int) -> int:
        """Does what rank 0 says, until that is over; the exit code."""
        from policygrad.learners.fsdp.follower import follow
        from policygrad.learners.fsdp.ranks import Ranks

        try:
            return follow(Ranks.at(port, rank, size, host, device=0))
        except BaseException:  # at once, so that nobody waits for what this one holds
            traceback.print_exc()
            os._exit(FAILED)


class _Following:
    """An actor that follows, as a process."""

    def __init__(self, actor: Any, done: Any) -> None:
        self._actor, self._done = actor, done
        self._code: int | None = None
        self.lost = False
        """Whether it has ended without being asked to."""

    def poll(self) -> int | None:
        return self._ended(0.0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._ended(timeout)
        if code is None:
            raise subprocess.TimeoutExpired("follow", timeout or 0.0)
        return code

    def kill(self) -> None:
        import ray

        if self._code is None:
            self._ended(0.0)
        ray.kill(self._actor)
        self._code = FAILED if self._code is None else self._code

    def _ended(self, timeout: float | None) -> int | None:
        import ray
        from ray.exceptions import RayError

        if self._code is None and ray.wait([self._done], timeout=timeout)[0]:
            try:
                self._code = int(ray.get(self._done))
            except RayError:
                self._code = FAILED
            self.lost = self._code != 0
        return self._code


class Followers:
    """Those that rank 0 has started."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._all: list[_Following] = []

    @property
    def places(self) -> Places:
        """Where `Ranks` starts them."""
        from ray.util import get_node_ip_address

        return Places(self._start, get_node_ip_address())

    @property
    def lost(self) -> bool:
        """Whether one has died."""
        return any(one.lost for one in self._all)

    def _start(self, host: str, port: int, rank: int, size: int) -> _Following:
        actor = self._site.actor(Learner, LEARNERS, rank)
        self._all.append(_Following(actor, actor.follow.remote(host, port, rank, size)))
        return self._all[-1]
