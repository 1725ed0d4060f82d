"""The processes that learn together: those that this one starts, or that torchrun has started; and what they tell each other.

Rank 0 is in command: it alone runs a training, and tells the others what to do. What it says goes over a group of its own, on the
CPU, where they may wait as long as a rollout takes; tensors go over torch's default group.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import cloudpickle
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store, TCPStore

from policygrad.errors import ConfigError, RunError
from policygrad.learners.fsdp.torchrun import launched
from policygrad.learners.fsdp.watchdog import Line, Watchdog
from policygrad.utils.user_code import FILE_MODULE

# The processes of rank 1 and above, as rank 0 starts and ends them; they end with it, however it ends.

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from policygrad.learners.fsdp.worker import main; "
    "main(*map(int, sys.argv[2:]))"
)


HERE = "127.0.0.1"
"""This machine, to itself."""


class Other(Protocol):
    """A process that this one has started, as `subprocess.Popen` says it."""

    def poll(self) -> int | None:
        """Its exit code; None while it lives."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code. Raises subprocess.TimeoutExpired."""
        ...

    def kill(self) -> None:
        """Ends it at once."""
        ...


@dataclass(frozen=True)
class Places:
    """Where the processes of rank 1 and above are: on this machine, unless something else starts them."""

    start: Callable[[str, int, int, int], Other]
    """(host, port, rank, size): starts the process that `Ranks.at` is to be called in, with these."""
    host: str = HERE
    """This machine, to those processes."""


class Follower(subprocess.Popen[bytes]):
    """A fresh interpreter with this one's import path, to which -P adds no folder. Nobody writes to its standard input, a pipe: see
    `end_with_rank_0`."""

    def __init__(self, port: int, rank: int, size: int) -> None:
        words = [sys.executable, "-P", "-c", _BOOT, json.dumps(sys.path), *map(str, (port, rank, size))]
        super().__init__(words, stdin=subprocess.PIPE, start_new_session=True)  # a terminal's Ctrl-C is rank 0's

    def wait(self, timeout: float | None = None) -> int:
        """As `Popen.wait`; the pipe is closed then."""
        code = super().wait(timeout)
        if self.stdin is not None:
            self.stdin.close()
        return code


def started(host: str, port: int, rank: int, size: int) -> Other:
    """A process on this machine."""
    return Follower(port, rank, size)


def end_with_rank_0() -> None:
    """In a `Follower`: it ends at once when the process that started it does, which nothing else says before they are connected.
    A pipe's end comes whatever killed that process, on any system, and whichever thread had started this one."""

    def watch() -> None:
        while os.read(0, 1):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="ends with rank 0").start()


def ended(others: Sequence[Other]) -> str:
    """In words, the first of them to have ended; empty where none has."""
    codes = [(rank, other.poll()) for rank, other in enumerate(others, 1)]
    return next((f"rank {rank} has ended (exit code {code})" for rank, code in codes if code is not None), "")


def kill(others: Sequence[Other]) -> None:
    """Ends them, and waits until they have."""
    for other in others:
        other.kill()
    for other in others:
        other.wait()


PATIENCE = timedelta(days=30)
"""How long a process waits to be told something: a rollout or an evaluation may take any time."""
END = 10.0
"""Seconds for processes to end by themselves."""
MANY = 16
"""Processes that any machine is trusted with; more need as many processors."""
LOOK = 0.05
"""Seconds between looks at processes that are starting."""


class Ranks:
    """This process among those that learn together."""

    def __init__(self, rank: int, size: int, others: Sequence[Other] = (), host: str = HERE) -> None:
        """Of a process in torch's default group. others: those that this one has started. host: rank 0's machine."""
        self.rank, self.size, self._others = rank, size, others
        self._control = dist.new_group(backend="gloo", timeout=PATIENCE)
        self.line = Line.between(rank, size, self._control, host)
        self.watchdog = Watchdog(self.line, size, self._killed)  # which rank 0 starts

    @classmethod
    def start(cls, size: int, places: Places | None = None) -> Ranks:
        """Rank 0, with the others: torchrun's, or processes that are started now. places: where; None = on this machine.

        Raises:
            ConfigError: a torch without `torch.distributed`, or one whose processes are somebody else's.
            RunError: processes that do not come.
        """
        if not dist.is_available():
            raise ConfigError(
                "learner.ranks above 1 needs torch.distributed, which this torch is built without: set it to 1"
            )
        if dist.is_initialized():
            raise ConfigError(
                "torch.distributed is at work in this process already: set learner.ranks to 1, or start another process"
            )
        if launched() is not None:
            return cls.joined()
        places = places or Places(started)
        store = TCPStore(places.host, 0, size, is_master=True, wait_for_workers=False)
        others = list[Other]()
        try:
            for rank in range(1, size):  # one by one: those that are there end where this is broken off
                others.append(places.start(places.host, store.port, rank, size))
            _come(store, others)
            dist.init_process_group(_backend(), store=store, rank=0, world_size=size)
            return cls(0, size, others, places.host)
        except BaseException:
            kill(others)
            _leave()
            raise

    @classmethod
    def at(cls, port: int, rank: int, size: int, host: str = HERE, device: int | None = None) -> Ranks:
        """One of the processes that another has started. host: rank 0's machine. device: its GPU's number on its own machine;
        None = its rank."""
        os.environ["LOCAL_RANK"] = str(rank if device is None else device)
        store = TCPStore(host, port, size, is_master=False, wait_for_workers=False)
        store.set(_here(rank), "")
        dist.init_process_group(_backend(), store=store, rank=rank, world_size=size)
        return cls(rank, size, host=host)

    @classmethod
    def joined(cls) -> Ranks:
        """One of torchrun's."""
        dist.init_process_group(_backend())
        return cls(dist.get_rank(), dist.get_world_size())

    def tell(self, message: object) -> None:
        """From rank 0 to all others, each of which is listening (`heard`).

        Raises:
            ConfigError: what no pickle holds.
        """
        for name, module in list(sys.modules.items()):
            if name.startswith(FILE_MODULE):  # which the others cannot import by its name
                cloudpickle.register_pickle_by_value(module)
        try:
            said = cloudpickle.dumps(message)
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            raise ConfigError(
                f"the model or a part of the algorithm cannot be sent to the other processes ({error}): let it hold what pickle "
                "can, or set learner.ranks to 1"
            ) from error
        dist.broadcast_object_list([said], src=0, group=self._control)

    def heard(self) -> Any:
        """What rank 0 says next."""
        box: list[bytes] = [b""]
        dist.broadcast_object_list(box, src=0, group=self._control)
        return pickle.loads(box[0])

    def summed(self, x: Tensor) -> Tensor:
        """Σ over the processes of x, on the CPU; x is written over."""
        dist.all_reduce(x, group=self._control)
        return x

    def gathered(self, x: object) -> list[Any]:
        """What each process has, in their order."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, x, group=self._control)
        return found

    def given(self, x: Tensor | None, like: Tensor, device: torch.device) -> Tensor:
        """Rank 0's x on every process; `like` says its shape and type."""
        found = (
            torch.empty(like.shape, dtype=like.dtype, device=device) if x is None else x.detach().to(device, like.dtype)
        )
        found = found.contiguous()
        dist.broadcast(found, src=0)
        return found

    def lost(self) -> str:
        """In words, the first of the others to have ended, which is waited for; empty where all are there, or nobody knows."""
        for other in self._others:
            with suppress(subprocess.TimeoutExpired):
                other.wait(END / len(self._others))
        return ended(self._others)

    def _killed(self, rank: int) -> bool:
        """Ends another at once, where this process has started it; whether it has."""
        if self._others:
            self._others[rank - 1].kill()
        return bool(self._others)

    @property
    def ended(self) -> str:
        """In words, the first of the others to have ended; empty where none has, or nobody knows."""
        return ended(self._others)

    def close(self, whole: bool = True) -> None:
        """The others end, and are waited for. whole: they are listening; otherwise they are in the midst of something."""
        self.watchdog.close()
        if not whole:
            kill(self._others)
            _leave()
            return
        if self.rank == 0:
            self.tell(None)
        for other in self._others:
            try:
                other.wait(END)
            except subprocess.TimeoutExpired:
                other.kill()
                other.wait()
        dist.destroy_process_group()


def check_devices(kind: str, size: int) -> None:
    """Raises ConfigError where processes that are started here would have to share a GPU, which NCCL refuses; or are many more than
    the machine has processors."""
    if kind == "cuda" and launched() is None and size > (there := torch.cuda.device_count()):
        raise ConfigError(
            f"learner.ranks is {size}, and this machine has {there} GPU{'s' * (there != 1)}: each process needs one of its own. "
            "Lower it, or set learner.device to cpu"
        )
    most = max(MANY, os.cpu_count() or 1)
    if kind != "cuda" and launched() is None and size > most:
        raise ConfigError(
            f"learner.ranks is {size}, each of them a process, and this machine has {os.cpu_count() or 1} processors: "
            f"give at most {most}"
        )


def _leave() -> None:
    """Without a word to the others. What NCCL still has under way nobody can wait for: it ends with the process."""
    if dist.is_initialized() and not torch.cuda.is_available():
        dist.destroy_process_group()


def _backend() -> str:
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def _here(rank: int) -> str:
    return f"rank {rank} is here"


def _come(store: Store, others: Sequence[Other]) -> None:
    """Returns when all are there. Raises RunError where one has ended instead."""
    while others and not store.check([_here(rank) for rank in range(1, len(others) + 1)]):
        if said := ended(others):
            raise RunError(f"{said} before the run began: what it said stands above")
        time.sleep(LOOK)
