"""The worker process: loads reward functions, then answers one list of judgements per call until its input ends.

It is started by `subprocess.py` as a fresh interpreter, not by multiprocessing, whose children import the user's
`__main__` again. Functions run in the main thread, because verifiers use SIGALRM for limits of their own.
"""

import fcntl
import os
import pickle
import resource
import sys
from dataclasses import dataclass
from typing import Any, BinaryIO

from policygrad.rewards.workers import process
from policygrad.rewards.workers.limits import MemoryLimit, raise_oom_score
from policygrad.rewards.workers.messages import (
    HEAD,
    Chunk,
    PendingCall,
    RewardCaller,
    SampleResult,
    WorkerStart,
    describe_error,
    encode_ready,
    encode_reply,
    format_failure,
)

_HIGHEST = 4096  # of the numbers that the pipes may get: the table of open files is as long


def main(parent: int) -> None:
    """Serve the process with id `parent` over standard input and output, and end with it."""
    process.adopt_descendants(parent)
    raise_oom_score()
    source, sink = _take_pipes()
    start: WorkerStart = _receive(source)
    callers: list[RewardCaller | None] = []
    for name, function, of_steps in start.functions:
        try:
            callers.append(_load(name, function, of_steps) if function is not None else None)
        except BaseException as error:
            said = f"reward {name!r} cannot be loaded in a worker process: it {describe_error(error)}"
            _send(sink, encode_ready(start.nonce, said))
            return
    service = _Service(callers, sink, start.nonce, MemoryLimit(start.memory))
    _send(sink, encode_ready(start.nonce))
    while not service.over and (chunk := _receive(source)) is not None:
        service.serve(chunk)


def _load(name: str, pickled: bytes, of_steps: bool) -> RewardCaller:
    function = pickle.loads(pickled)
    prepare = getattr(function, "reward_prepare", None)
    if prepare is not None:
        prepare()
    return RewardCaller(name, function, of_steps)


@dataclass
class _Service:
    """Answers calls; `over` when it has grown too large to go on."""

    callers: list[RewardCaller | None]
    sink: int
    nonce: bytes
    limit: MemoryLimit
    calls: int = 0  # answered
    over: bool = False

    def __post_init__(self) -> None:
        for caller in self.callers:
            if caller is not None:
                caller.hint = self.limit.hint

    def serve(self, chunk: Chunk) -> None:
        """The calls of a chunk, in order."""
        samples: Any = None
        said = ""
        try:
            samples = pickle.loads(chunk.samples)
        except BaseException as error:
            said = f"could not be given its samples, unpickling them {describe_error(error)}{self.limit.hint(error)}"
        for number, places in chunk.calls:
            caller = self.callers[number]
            assert caller is not None  # a chunk goes to a worker that has all of its functions
            if said:
                message = format_failure(caller.name, said, ["?"] * len(places))
                self._say(
                    PendingCall(self.calls, (0,) * len(places)), [SampleResult(None, "raised", message)] * len(places)
                )
            else:
                prompts, completions, columns = samples
                chosen = {name: [values[i] for i in places] for name, values in columns.items()}
                texts = [completions[i] for i in places]
                judgements = caller([prompts[i] for i in places], texts, chosen)
                self._say(PendingCall(self.calls, tuple(map(len, texts)), caller.process_reward), judgements)
            if self.over:
                return

    def _say(self, asked: PendingCall, judgements: list[SampleResult]) -> None:
        self.over = self.limit.half_used or process.has_too_many_zombies()
        self.calls += 1
        _send(self.sink, encode_reply(self.nonce, asked, judgements, self.over))


def _take_pipes() -> tuple[BinaryIO, int]:
    """Keep the pipes for the messages, under numbers that nobody comes upon and that no program started here gets; the user's
    prints go to standard error, the user's reads find the end."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    first = max(min(most if most > 0 else _HIGHEST, _HIGHEST) - 16, 3)
    input_, sink = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, first) for fd in (0, 1))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    return os.fdopen(input_, "rb"), sink


def _receive(source: BinaryIO) -> Any:
    head = source.read(HEAD.size)
    if len(head) < HEAD.size:
        return None
    return pickle.loads(source.read(HEAD.unpack(head)[0]))


def _send(sink: int, frame: bytes) -> None:
    data = memoryview(frame)
    while data:
        data = data[os.write(sink, data) :]
