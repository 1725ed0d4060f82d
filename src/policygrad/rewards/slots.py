"""Where a worker stands, and what it works on."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from policygrad.errors import ConfigError
from policygrad.rewards.answers import Asked
from policygrad.rewards.subprocess import WorkerProcess
from policygrad.rewards.walled import NONE
from policygrad.rewards.wire import Chunk, WorkerStart

START_LIMIT = 120.0  # seconds for a worker to import what its functions need; not part of any sample's budget
FALSE_STARTS = 3  # workers in a row that may end while they load what another has loaded before
ALONE_LIMIT = 3600.0  # for one that loads, or first downloads, a model
MANY, EACH = 64, 16  # workers that any machine is trusted with, and those of each processor where it has more
Starter = Callable[[WorkerStart, Sequence[str]], WorkerProcess]
"""Starts a worker with these variables of the environment."""


@dataclass(frozen=True)
class Work:
    """A chunk with the places of its samples in the rollout."""

    chunk: Chunk
    places: tuple[int, ...]
    lengths: tuple[int, ...]  # characters of their completions

    def call(self, number: int) -> tuple[int, tuple[int, ...]]:
        function, local = self.chunk.calls[number]
        return function, tuple(self.places[i] for i in local)

    def after(self, number: int) -> "Work | None":
        """What is left when so many calls are done."""
        calls = self.chunk.calls[number:]
        return replace(self, chunk=replace(self.chunk, calls=calls)) if calls else None


@dataclass
class Slot:
    """One place for a worker: the functions it runs, its worker, and the chunk that is at it."""

    start: WorkerStart
    variables: Sequence[str] = ()  # of the environment, by name
    limit: float = START_LIMIT  # seconds for its start
    starter: Starter = WorkerProcess
    worker: WorkerProcess | None = None
    ready: bool = False
    started: bool = False  # a worker has been ready here
    false_starts: int = 0  # since then, in a row
    answered: int = 0  # calls of this worker
    work: Work | None = None
    done: int = 0  # calls of the chunk that are answered
    began: float = 0.0  # when the deadline was set
    deadline: float = 0.0  # of the start while not ready, else of the call after `done`
    last_lines: str = ""  # that the worker printed which was killed last

    def takes(self, work: Work) -> bool:
        """Whether its worker has the functions that the chunk calls."""
        return all(self.start.functions[function][1] is not None for function, _ in work.chunk.calls)

    @property
    def called(self) -> int | None:
        """The function that is being called; None while the worker loads."""
        return self.work.chunk.calls[self.done][0] if self.work and self.ready else None

    @property
    def asked(self) -> Asked:
        """The call that is next to be answered."""
        assert self.work
        function, local = self.work.chunk.calls[self.done]
        lengths = tuple(self.work.lengths[i] for i in local)
        return Asked(self.answered, lengths, self.start.functions[function][2])

    def launch(self) -> None:
        self.worker, self.ready, self.answered = self.starter(self.start, self.variables), False, 0
        self.wind(self.limit)

    def wind(self, seconds: float) -> None:
        """Set the deadline, from now."""
        self.began = time.monotonic()
        self.deadline = self.began + seconds

    def printed(self) -> str:
        """Return the last lines that its worker has printed; "" where they are not captured, or there are none."""
        return self.worker.printed.last_lines() if self.worker and self.worker.printed else ""

    def kill(self) -> str:
        how = self.worker.kill() if self.worker else ""
        self.last_lines = self.printed()
        self.worker, self.ready = None, False
        return how


def check_workers(count: int) -> None:
    """Raises ConfigError for more worker processes than this machine could start in any useful time."""
    processors = os.cpu_count() or 1
    if count > (most := max(MANY, EACH * processors)):
        raise ConfigError(
            f"rewards.workers is {count}, each of them a process, and this machine has {processors} processors: give at most {most}"
        )


def slots_for(
    functions: Sequence[tuple[str, bytes, bool]],
    alone: Sequence[int],
    count: int,
    memory: int | None,
    variables: Sequence[str],
    starter: Starter,
    sandbox: str = NONE,
    show_output: bool = False,
) -> list[Slot]:
    """One for every function that wants to be `alone`, by number, and `count` that each load all the others, behind a wall."""
    others = set(range(len(functions))).difference(alone)

    def start(share: set[int], memory: int | None, sandbox: str = NONE) -> WorkerStart:
        each = ((name, code if f in share else None, p) for f, (name, code, p) in enumerate(functions))
        return WorkerStart(tuple(each), memory, sandbox=sandbox, show_output=show_output)

    own = [Slot(start({f}, None), variables, ALONE_LIMIT, starter) for f in alone]
    shared = start(others, memory, sandbox)
    return own + [Slot(shared, variables, starter=starter) for _ in range(count if others else 0)]
