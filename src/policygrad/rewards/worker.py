"""The worker process: loads reward functions, then answers one list of judgements per call until its input ends.

It is started by `subprocess.py` as a fresh interpreter, not by multiprocessing, whose children import the user's
`__main__` again. Functions run in the main thread, because verifiers use SIGALRM for limits of their own.
"""

import os
import pickle
import signal
import sys
from typing import Any, BinaryIO

from policygrad.rewards.calls import Caller, Judgement, describe, tell
from policygrad.rewards.wire import HEAD, Chunk, Started, WorkerStart, frame

_PR_SET_PDEATHSIG = 1


def main(parent: int) -> None:
    """Serve the process with id `parent` over standard input and output, and end with it."""
    _die_with(parent)
    source, sink = _take_pipes()
    start: WorkerStart = _receive(source)
    callers: list[Caller | None] = []
    for name, function, of_steps in start.functions:
        try:
            callers.append(_load(name, function, of_steps) if function is not None else None)
        except BaseException as error:
            _send(sink, Started(f"reward {name!r} cannot be loaded in a worker process: it {describe(error)}"))
            return
    _send(sink, Started())
    while (chunk := _receive(source)) is not None:
        _serve(chunk, callers, sink)


def _load(name: str, pickled: bytes, of_steps: bool) -> Caller:
    function = pickle.loads(pickled)
    prepare = getattr(function, "reward_prepare", None)
    if prepare is not None:
        prepare()
    return Caller(name, function, of_steps)


def _serve(chunk: Chunk, callers: list[Caller | None], sink: int) -> None:
    samples: Any = None
    said = ""
    try:
        samples = pickle.loads(chunk.samples)
    except BaseException as error:
        said = f"could not be given its samples, unpickling them {describe(error)}"
    for number, places in chunk.calls:
        caller = callers[number]
        assert caller is not None  # a chunk goes to a worker that has all of its functions
        if said:
            message = tell(caller.name, said, ["?"] * len(places))
            _send(sink, [Judgement(None, "raised", message)] * len(places))
        else:
            prompts, completions, columns = samples
            chosen = {name: [values[i] for i in places] for name, values in columns.items()}
            _send(sink, caller([prompts[i] for i in places], [completions[i] for i in places], chosen))


def _take_pipes() -> tuple[BinaryIO, int]:
    """Keep the pipes for the messages; the user's prints go to standard error, the user's reads find the end."""
    source, sink = os.fdopen(os.dup(0), "rb"), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    return source, sink


def _receive(source: BinaryIO) -> Any:
    head = source.read(HEAD.size)
    if len(head) < HEAD.size:
        return None
    return pickle.loads(source.read(HEAD.unpack(head)[0]))


def _send(sink: int, message: Any) -> None:
    data = memoryview(frame(message))
    while data:
        data = data[os.write(sink, data) :]


def _die_with(parent: int) -> None:
    """On Linux a parent that is killed takes a busy worker along; elsewhere it ends at the next message."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)
