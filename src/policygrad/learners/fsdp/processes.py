"""The processes that learn together, started by rank 0 or by torchrun, and how they communicate.

Rank 0 controls: it alone runs the training and tells the other ranks what to do. Its messages go through a gloo group with a
timeout of 30 days, since the others wait as long as a rollout takes; tensors go through torch's default group. Messages are
pickles, and gloo asks nobody who connects for a password, so every one is signed with a key that only the ranks have.
"""

from __future__ import annotations

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

from policygrad.errors import ConfigError, RunError
from policygrad.learners.fsdp.message_key import (
    make_key,
    read_local_key,
    read_shared_key,
    remove_local_key,
    send_key,
    sign,
    verify,
    write_local_key,
)
from policygrad.learners.fsdp.torchrun import is_on_one_machine, torchrun_rank
from policygrad.learners.fsdp.watchdog import ControlStore, Watchdog
from policygrad.utils.processes import python_command
from policygrad.utils.rendezvous import (
    LOCALHOST,
    connect_to_store,
    find_address,
    is_loopback_address,
    resolve,
    resolves_to_loopback,
    serve_store,
    use_loopback_for_gloo,
)
from policygrad.utils.user_code import FILE_MODULE

CONTROL_TIMEOUT = timedelta(days=30)
"""How long a rank waits for the next message: a rollout or an evaluation may take any time."""
START_TIMEOUT = timedelta(minutes=5)  # torch's default: how long a process waits for the others to connect
EXIT_TIMEOUT = 10.0  # seconds that workers have to exit by themselves
MAX_LOCAL_PROCESSES = 16  # processes that any machine may start; more need as many processors
POLL_SECONDS = 0.05  # seconds between checks on workers that are starting
_WORKER_SCRIPT = "from policygrad.learners.fsdp.worker import main; main(*map(int, sys.argv[1:]))"


class WorkerProcess(Protocol):
    """A process started by this one, with the interface of `subprocess.Popen`."""

    def poll(self) -> int | None:
        """Return the exit code; None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code. Raises subprocess.TimeoutExpired."""

    def kill(self) -> None:
        """End it at once."""


class LocalWorker(subprocess.Popen[bytes]):
    """A fresh interpreter on this machine with this one's import path.

    Its standard input is a pipe that is sent the key, and then nothing: see `exit_with_parent`.
    """

    def __init__(self, host: str, port: int, rank: int, size: int, key: bytes) -> None:
        command = python_command(_WORKER_SCRIPT, *map(str, (port, rank, size)))
        # a rank is this program, and inherits its environment whole (processes of other code: utils/child_environment.py)
        super().__init__(command, stdin=subprocess.PIPE, start_new_session=True)  # a terminal's Ctrl-C is rank 0's
        assert self.stdin is not None
        send_key(self.stdin.fileno(), key)

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code, and close the pipe."""
        code = super().wait(timeout)
        if self.stdin is not None:
            self.stdin.close()
        return code


@dataclass(frozen=True)
class WorkerLauncher:
    """Starts the ranks above 0, by default on this machine."""

    start: Callable[[str, int, int, int, bytes], WorkerProcess] = LocalWorker
    """(host, port, rank, size, key) → a process that calls `WorkerGroup.join` with these."""
    host: str = LOCALHOST  # the address of this machine for those processes


def exit_with_parent() -> None:
    """In a `LocalWorker`: exit as soon as the parent does, also before the two are connected.

    The pipe on standard input ends however the parent ends, on any system, whichever thread started this process.
    """

    def watch() -> None:
        while os.read(0, 1):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="exit with parent").start()


def describe_exit(processes: Sequence[WorkerProcess]) -> str:
    """Return which rank has exited first, with its code; empty if all run. `processes` are those of rank 1 and above."""
    codes = [(rank, process.poll()) for rank, process in enumerate(processes, 1)]
    return next((f"rank {rank} has exited (exit code {code})" for rank, code in codes if code is not None), "")


def kill_workers(processes: Sequence[WorkerProcess]) -> None:
    """Kill the processes and wait for them."""
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()


class WorkerGroup:
    """This process as a member of the group of processes that learn together."""

    def __init__(
        self, rank: int, size: int, key: bytes, processes: Sequence[WorkerProcess] = (), host: str = LOCALHOST
    ) -> None:
        """Wrap torch's default process group, with the `processes` that this one has started and rank 0's name or address."""
        self.rank, self.size, self._key, self._processes = rank, size, key, processes
        self._control = dist.new_group(backend="gloo", timeout=CONTROL_TIMEOUT)
        self._count = 0  # of messages: one that was recorded is not accepted again
        address = find_address(host, self.all_gather(resolve(host)))
        self.machine = "" if is_loopback_address(address) else host
        """Rank 0's machine, if others reach it."""
        self.store = ControlStore.connect(rank, self._control, address, key)
        self.watchdog = Watchdog(self.store, size, processes)  # started by rank 0

    @classmethod
    def start(cls, size: int, launcher: WorkerLauncher | None = None) -> WorkerGroup:
        """Start the other ranks, or join torchrun's, and return the group as rank 0.

        Args:
            launcher: Starts the ranks; None = on this machine.

        Raises:
            ConfigError: torch.distributed is missing or already in use in this process.
            RunError: A rank exits while it starts.
        """
        if not dist.is_available():
            raise ConfigError(
                "learner.world_size above 1 needs torch.distributed, which this torch is built without: set it to 1"
            )
        if dist.is_initialized():
            raise ConfigError(
                "torch.distributed is already initialised in this process: set learner.world_size to 1, or use another process"
            )
        if torchrun_rank() is not None:
            return cls.from_torchrun()
        launcher = launcher or WorkerLauncher()
        if resolves_to_loopback(launcher.host):
            use_loopback_for_gloo()
        store, key = serve_store(launcher.host, START_TIMEOUT), make_key()
        processes = list[WorkerProcess]()
        try:
            for rank in range(1, size):  # appended one by one, so that an interruption kills those already started
                processes.append(launcher.start(launcher.host, store.port, rank, size, key))
            ready_keys = [f"rank {rank} is ready" for rank in range(1, size)]
            while processes and not store.check(ready_keys):
                if exit_message := describe_exit(processes):
                    raise RunError(f"{exit_message} before the run began: its output is above")
                time.sleep(POLL_SECONDS)
            dist.init_process_group(_backend(), store=store, rank=0, world_size=size)
            return cls(0, size, key, processes, launcher.host)
        except BaseException:
            kill_workers(processes)
            _destroy_process_group()
            raise

    @classmethod
    def join(
        cls, port: int, rank: int, size: int, key: bytes, host: str = LOCALHOST, device: int | None = None
    ) -> WorkerGroup:
        """Join the group as one of the ranks that rank 0, listening at `port` of `host`, has started; `device` is the index
        of this rank's GPU on its own machine (None = its rank)."""
        os.environ["LOCAL_RANK"] = str(rank if device is None else device)
        if resolves_to_loopback(host):
            use_loopback_for_gloo()
        store = connect_to_store(host, port, START_TIMEOUT)
        store.set(f"rank {rank} is ready", "")
        dist.init_process_group(_backend(), store=store, rank=rank, world_size=size)
        return cls(rank, size, key, host=host)

    @classmethod
    def from_torchrun(cls) -> WorkerGroup:
        """Join the group that torchrun has set up. Raises ConfigError if it is on several machines that share no key."""
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if not is_on_one_machine():
            key = read_shared_key(os.environ)
            dist.init_process_group(_backend())
            return cls(rank, size, key, host=os.environ["MASTER_ADDR"])
        use_loopback_for_gloo()
        if rank == 0:
            write_local_key(make_key())
        try:
            dist.init_process_group(_backend())  # which waits for rank 0
            return cls(rank, size, read_local_key())
        finally:
            if rank == 0:
                remove_local_key()

    def broadcast_object(self, message: object) -> None:
        """Send an object from rank 0 to all ranks in `receive_object`. Raises ConfigError if it cannot be pickled."""
        for name, module in list(sys.modules.items()):
            if name.startswith(FILE_MODULE):  # the other ranks cannot import it by its name
                cloudpickle.register_pickle_by_value(module)
        try:
            payload = cloudpickle.dumps(message)
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            raise ConfigError(
                f"the model or a part of the algorithm cannot be sent to the other processes ({error}): make it picklable, or set "
                "learner.world_size to 1"
            ) from error
        message = sign(self._key, self._next_place(), payload)
        dist.broadcast(torch.tensor([len(message)]), src=0, group=self._control)
        dist.broadcast(_to_tensor(message), src=0, group=self._control)

    def receive_object(self) -> Any:
        """Wait for rank 0's next object and return it. Raises RunError if rank 0 has not sent it."""
        size = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(size, src=0, group=self._control)
        message = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(message, src=0, group=self._control)
        return pickle.loads(verify(self._key, self._next_place(), _to_bytes(message)))

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum over the ranks of a CPU tensor, which is overwritten."""
        dist.all_reduce(x, group=self._control)
        return x

    def all_gather(self, x: object) -> list[Any]:
        """Return every rank's object, in the order of the ranks. Raises RunError if one of them has not sent its own."""
        place = self._next_place()
        message = _to_tensor(sign(self._key, f"{place} of {self.rank}", pickle.dumps(x)))
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(message)]), group=self._control)
        longest = max(map(int, sizes))
        padded = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(padded, torch.nn.functional.pad(message, (0, longest - len(message))), group=self._control)
        messages = [_to_bytes(x[: int(size)]) for x, size in zip(padded, sizes, strict=True)]
        return [pickle.loads(verify(self._key, f"{place} of {rank}", one)) for rank, one in enumerate(messages)]

    def _next_place(self) -> str:
        """Name the next message, which all ranks count."""
        self._count += 1
        return f"message {self._count}"

    def broadcast_tensor(self, x: Tensor | None, like: Tensor, device: torch.device) -> Tensor:
        """Return rank 0's `x` on every rank; `like` gives its shape and dtype to the others, where `x` is None."""
        if x is None:
            received = torch.empty(like.shape, dtype=like.dtype, device=device)
        else:
            received = x.detach().to(device, like.dtype).contiguous()
        dist.broadcast(received, src=0)
        return received

    def wait_for_exit(self) -> str:
        """Wait some seconds for a rank to exit; return which has, with its code, or an empty string."""
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(EXIT_TIMEOUT / len(self._processes))
        return self.exit_message

    @property
    def exit_message(self) -> str:
        """Which rank has exited first, with its code; empty if all run or if this process has not started them."""
        return describe_exit(self._processes)

    def close(self, in_sync: bool = True) -> None:
        """End the other ranks and wait for them. If `in_sync` they are waiting for a message, and exit by
        themselves; otherwise they are in an operation and are killed."""
        self.watchdog.close()
        if not in_sync:
            kill_workers(self._processes)
            _destroy_process_group()
            return
        if self.rank == 0:
            self.broadcast_object(None)
        for process in self._processes:
            try:
                process.wait(EXIT_TIMEOUT)
            except subprocess.TimeoutExpired:
                kill_workers([process])
        dist.destroy_process_group()


def check_devices(kind: str, size: int) -> None:
    """Raise ConfigError if ranks on this machine would share a GPU, which NCCL refuses, or far outnumber its processors."""
    if torchrun_rank() is not None:
        return
    if kind == "cuda" and size > (gpus := torch.cuda.device_count()):
        raise ConfigError(
            f"learner.world_size={size} needs {size} GPUs; this machine has {gpus}. Lower it, or set learner.device=cpu"
        )
    processors = os.cpu_count() or 1
    if kind != "cuda" and size > max(MAX_LOCAL_PROCESSES, processors):
        raise ConfigError(
            f"learner.world_size={size} starts {size} processes; this machine has {processors} processors. Set it to at most "
            f"{max(MAX_LOCAL_PROCESSES, processors)}"
        )


def _destroy_process_group() -> None:
    """Leave the group without telling the others; operations pending in NCCL cannot be waited for and end with the process."""
    if dist.is_initialized() and not torch.cuda.is_available():
        dist.destroy_process_group()


def _to_tensor(message: bytes) -> Tensor:
    return torch.frombuffer(bytearray(message), dtype=torch.uint8)


def _to_bytes(message: Tensor) -> bytes:
    return message.numpy().tobytes()


def _backend() -> str:
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
