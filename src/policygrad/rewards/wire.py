"""Messages over a pipe: the length as 8 bytes, then a pickle."""

import pickle
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import cloudpickle

HEAD = struct.Struct(">Q")


@dataclass(frozen=True)
class WorkerStart:
    """First message to a worker: (name, function, whether it is a process reward); each function is pickled on its own so
    that a bad one can be named. Without a function: another worker has it."""

    functions: tuple[tuple[str, bytes | None, bool], ...]


@dataclass(frozen=True)
class Started:
    """The worker's answer; `error` says which function could not be loaded, None = ready."""

    error: str | None = None


@dataclass(frozen=True)
class Chunk:
    """Samples, and the calls to make on them in order: (number of the function, places of the samples)."""

    samples: bytes  # pickled (prompts, completions, columns)
    calls: tuple[tuple[int, tuple[int, ...]], ...]


def frame(message: Any) -> bytes:
    """One message as bytes."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return HEAD.pack(len(body)) + body


def by_value(thing: Any) -> bytes:
    """Pickle functions and objects of the user's own; what is defined in `__main__` travels along by value."""
    return bytes(cloudpickle.dumps(thing, protocol=pickle.HIGHEST_PROTOCOL))


class Inbox:
    """Turns bytes, in whatever pieces they arrive, into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        self._buffer += data
        while len(self._buffer) >= HEAD.size:
            (length,) = HEAD.unpack_from(self._buffer)
            end = HEAD.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[HEAD.size : end])
            del self._buffer[:end]
            yield pickle.loads(body)
