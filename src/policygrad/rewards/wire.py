"""What the parent sends to a worker: the length as 8 bytes, then a pickle. What comes back is in `answers.py`, and no pickle."""

import pickle
import struct
from dataclasses import dataclass
from typing import Any

import cloudpickle

HEAD = struct.Struct(">Q")


@dataclass(frozen=True)
class WorkerStart:
    """First message to a worker: (name, function, whether it is a process reward); each function is pickled on its own so
    that a bad one can be named. Without a function: another worker has it."""

    functions: tuple[tuple[str, bytes | None, bool], ...]
    memory: int | None = None  # bytes that it may take beyond what it has when everything is loaded; None = no limit
    nonce: bytes = b""  # begins every answer; the worker's own
    sandbox: str = "none"  # the wall that it is started behind
    show_output: bool = False  # what it prints goes to the parent's standard error, and is not captured

    @property
    def names(self) -> str:
        """The functions that it loads."""
        return ", ".join(name for name, function, _ in self.functions if function is not None)


@dataclass(frozen=True)
class Chunk:
    """Samples, and the calls to make on them in order: (number of the function, places of the samples)."""

    samples: bytes  # pickled (prompts, completions, columns)
    calls: tuple[tuple[int, tuple[int, ...]], ...]


def frame(message: WorkerStart | Chunk) -> bytes:
    """One message as bytes."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return HEAD.pack(len(body)) + body


def by_value(thing: Any) -> bytes:
    """Pickle functions and objects of the user's own; what is defined in `__main__` travels along by value."""
    return bytes(cloudpickle.dumps(thing, protocol=pickle.HIGHEST_PROTOCOL))
