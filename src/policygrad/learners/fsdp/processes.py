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
from policygrad.learners.fsdp.torchrun import torchrun_rank
from policygrad.learners.fsdp.watchdog import ControlStore, Watchdog
from policygrad.utils.user_code import FILE_MODULE

# The processes of rank 1 and above, as rank 0 starts and ends them; they end with it, however it ends.

_WORKER_SCRIPT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from policygrad.learners.fsdp.worker import main; "
    "main(*map(int, sys.argv[2:]))"
)


LOCALHOST = "127.0.0.1"
"""This machine, to itself."""


class WorkerProcess(Protocol):
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
class WorkerLauncher:
    """Where the processes of rank 1 and above are: on this machine, unless something else starts them."""

    start: Callable[[str, int, int, int], WorkerProcess]
    """(host, port, rank, size): starts the process that `Ranks.join` is to be called in, with these."""
    host: str = LOCALHOST
    """This machine, to those processes."""


class LocalWorker(subprocess.Popen[bytes]):
    """A fresh interpreter with this one's import path, to which -P adds no folder. Nobody writes to its standard input, a pipe: see
    `exit_with_parent`."""

    def __init__(self, port: int, rank: int, size: int) -> None:
        command = [sys.executable, "-P", "-c", _WORKER_SCRIPT, json.dumps(sys.path), *map(str, (port, rank, size))]
        super().__init__(command, stdin=subprocess.PIPE, start_new_session=True)  # a terminal's Ctrl-C is rank 0's

    def wait(self, timeout: float | None = None) -> int:
        """As `Popen.wait`; the pipe is closed then."""
        code = super().wait(timeout)
        if self.stdin is not None:
            self.stdin.close()
        return code


def launch_worker(host: str, port: int, rank: int, size: int) -> WorkerProcess:
    """A process on this machine."""
    return LocalWorker(port, rank, size)


def exit_with_parent() -> None:
    """In a `LocalWorker`: it ends at once when the process that started it does, which nothing else says before they are connected.
    A pipe's end comes whatever killed that process, on any system, and whichever thread had started this one."""

    def watch() -> None:
        while os.read(0, 1):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="ends with rank 0").start()


def describe_exit(processes: Sequence[WorkerProcess]) -> str:
    """In words, the first of them to have ended; empty where none has."""
    codes = [(rank, other.poll()) for rank, other in enumerate(processes, 1)]
    return next((f"rank {rank} has ended (exit code {code})" for rank, code in codes if code is not None), "")


def kill_workers(processes: Sequence[WorkerProcess]) -> None:
    """Ends them, and waits until they have."""
    for other in processes:
        other.kill()
    for other in processes:
        other.wait()


CONTROL_TIMEOUT = timedelta(days=30)
"""How long a process waits to be told something: a rollout or an evaluation may take any time."""
EXIT_TIMEOUT = 10.0
"""Seconds for processes to end by themselves."""
MAX_LOCAL_PROCESSES = 16
"""Processes that any machine is trusted with; more need as many processors."""
POLL_SECONDS = 0.05
"""Seconds between looks at processes that are starting."""


class WorkerGroup:
    """This process among those that learn together."""

    def __init__(self, rank: int, size: int, processes: Sequence[WorkerProcess] = (), host: str = LOCALHOST) -> None:
        """Of a process in torch's default group. others: those that this one has started. host: rank 0's machine."""
        self.rank, self.size, self._processes = rank, size, processes
        self._control = dist.new_group(backend="gloo", timeout=CONTROL_TIMEOUT)
        self.store = ControlStore.connect(rank, size, self._control, host)
        self.watchdog = Watchdog(self.store, size, self._kill_worker)  # which rank 0 starts

    @classmethod
    def start(cls, size: int, launcher: WorkerLauncher | None = None) -> WorkerGroup:
        """Rank 0, with the others: torchrun's, or processes that are started now. places: where; None = on this machine.

        Raises:
            ConfigError: a torch without `torch.distributed`, or one whose processes are somebody else's.
            RunError: processes that do not come.
        """
        if not dist.is_available():
            raise ConfigError(
                "learner.world_size above 1 needs torch.distributed, which this torch is built without: set it to 1"
            )
        if dist.is_initialized():
            raise ConfigError(
                "torch.distributed is at work in this process already: set learner.world_size to 1, or start another process"
            )
        if torchrun_rank() is not None:
            return cls.from_torchrun()
        launcher = launcher or WorkerLauncher(launch_worker)
        store = TCPStore(launcher.host, 0, size, is_master=True, wait_for_workers=False)
        processes = list[WorkerProcess]()
        try:
            for rank in range(1, size):  # one by one: those that are there end where this is broken off
                processes.append(launcher.start(launcher.host, store.port, rank, size))
            _wait_for_workers(store, processes)
            dist.init_process_group(_backend(), store=store, rank=0, world_size=size)
            return cls(0, size, processes, launcher.host)
        except BaseException:
            kill_workers(processes)
            _destroy_process_group()
            raise

    @classmethod
    def join(cls, port: int, rank: int, size: int, host: str = LOCALHOST, device: int | None = None) -> WorkerGroup:
        """One of the processes that another has started. host: rank 0's machine. device: its GPU's number on its own machine;
        None = its rank."""
        os.environ["LOCAL_RANK"] = str(rank if device is None else device)
        store = TCPStore(host, port, size, is_master=False, wait_for_workers=False)
        store.set(_ready_key(rank), "")
        dist.init_process_group(_backend(), store=store, rank=rank, world_size=size)
        return cls(rank, size, host=host)

    @classmethod
    def from_torchrun(cls) -> WorkerGroup:
        """One of torchrun's."""
        dist.init_process_group(_backend())
        return cls(dist.get_rank(), dist.get_world_size())

    def broadcast_object(self, message: object) -> None:
        """From rank 0 to all others, each of which is listening (`heard`).

        Raises:
            ConfigError: what no pickle holds.
        """
        for name, module in list(sys.modules.items()):
            if name.startswith(FILE_MODULE):  # which the others cannot import by its name
                cloudpickle.register_pickle_by_value(module)
        try:
            payload = cloudpickle.dumps(message)
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            raise ConfigError(
                f"the model or a part of the algorithm cannot be sent to the other processes ({error}): let it hold what pickle "
                "can, or set learner.world_size to 1"
            ) from error
        dist.broadcast_object_list([payload], src=0, group=self._control)

    def receive_object(self) -> Any:
        """What rank 0 says next."""
        box: list[bytes] = [b""]
        dist.broadcast_object_list(box, src=0, group=self._control)
        return pickle.loads(box[0])

    def all_reduce(self, x: Tensor) -> Tensor:
        """Σ over the processes of x, on the CPU; x is written over."""
        dist.all_reduce(x, group=self._control)
        return x

    def all_gather(self, x: object) -> list[Any]:
        """What each process has, in their order."""
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, x, group=self._control)
        return gathered

    def broadcast_tensor(self, x: Tensor | None, like: Tensor, device: torch.device) -> Tensor:
        """Rank 0's x on every process; `like` says its shape and type."""
        received = (
            torch.empty(like.shape, dtype=like.dtype, device=device) if x is None else x.detach().to(device, like.dtype)
        )
        received = received.contiguous()
        dist.broadcast(received, src=0)
        return received

    def wait_for_exit(self) -> str:
        """In words, the first of the others to have ended, which is waited for; empty where all are there, or nobody knows."""
        for other in self._processes:
            with suppress(subprocess.TimeoutExpired):
                other.wait(EXIT_TIMEOUT / len(self._processes))
        return describe_exit(self._processes)

    def _kill_worker(self, rank: int) -> bool:
        """Ends another at once, where this process has started it; whether it has."""
        if self._processes:
            self._processes[rank - 1].kill()
        return bool(self._processes)

    @property
    def exit_message(self) -> str:
        """In words, the first of the others to have ended; empty where none has, or nobody knows."""
        return describe_exit(self._processes)

    def close(self, in_sync: bool = True) -> None:
        """The others end, and are waited for. whole: they are listening; otherwise they are in the midst of something."""
        self.watchdog.close()
        if not in_sync:
            kill_workers(self._processes)
            _destroy_process_group()
            return
        if self.rank == 0:
            self.broadcast_object(None)
        for other in self._processes:
            try:
                other.wait(EXIT_TIMEOUT)
            except subprocess.TimeoutExpired:
                other.kill()
                other.wait()
        dist.destroy_process_group()


def check_devices(kind: str, size: int) -> None:
    """Raises ConfigError where processes that are started here would have to share a GPU, which NCCL refuses; or are many more than
    the machine has processors."""
    if kind == "cuda" and torchrun_rank() is None and size > (gpus := torch.cuda.device_count()):
        raise ConfigError(
            f"learner.world_size is {size}, and this machine has {gpus} GPU{'s' * (gpus != 1)}: each process needs one of its own. "
            "Lower it, or set learner.device to cpu"
        )
    most = max(MAX_LOCAL_PROCESSES, os.cpu_count() or 1)
    if kind != "cuda" and torchrun_rank() is None and size > most:
        raise ConfigError(
            f"learner.world_size is {size}, each of them a process, and this machine has {os.cpu_count() or 1} processors: "
            f"give at most {most}"
        )


def _destroy_process_group() -> None:
    """Without a word to the others. What NCCL still has under way nobody can wait for: it ends with the process."""
    if dist.is_initialized() and not torch.cuda.is_available():
        dist.destroy_process_group()


def _backend() -> str:
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def _ready_key(rank: int) -> str:
    return f"rank {rank} is here"


def _wait_for_workers(store: Store, processes: Sequence[WorkerProcess]) -> None:
    """Returns when all are there. Raises RunError where one has ended instead."""
    while processes and not store.check([_ready_key(rank) for rank in range(1, len(processes) + 1)]):
        if exit_message := describe_exit(processes):
            raise RunError(f"{exit_message} before the run began: what it said stands above")
        time.sleep(POLL_SECONDS)
