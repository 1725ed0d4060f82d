"""Values between a candidate's process and its examiner's: plain data by value, all else by a number. Standard library only.

What a candidate returns is data when it arrives: no class of its own comes along whose `==` could say yes to everything.
"""

import builtins
import json
import os
import struct
from collections.abc import Callable
from typing import Any

MOST = 64 << 20  # bytes of a message
_HEAD = struct.Struct(">I")


class Gone(Exception):
    """The other side has ended, or says what is no message."""


def send(descriptor: int, message: Any) -> None:
    data = json.dumps(message, separators=(",", ":")).encode()
    if len(data) > MOST:
        raise ValueError(f"a value of more than {MOST >> 20} MiB")
    data = _HEAD.pack(len(data)) + data
    while data:
        data = data[os.write(descriptor, data) :]


def receive(descriptor: int) -> Any:
    """The next message. Raises Gone."""
    (length,) = _HEAD.unpack(_exactly(descriptor, _HEAD.size))
    if length > MOST:
        raise Gone("a message is too long")
    try:
        return json.loads(_exactly(descriptor, length))
    except (ValueError, RecursionError) as error:
        raise Gone("a message is no JSON") from error


def _exactly(descriptor: int, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        piece = os.read(descriptor, min(count - len(data), 1 << 20))
        if not piece:
            raise Gone("the candidate's process has ended")
        data += piece
    return bytes(data)


def pack(value: Any, keep: Callable[[Any], int]) -> list[Any]:
    """A value as JSON; what is no plain data is kept by its owner, and goes as the number that `keep` gives it."""
    if value is None or isinstance(value, bool):
        return ["=", value]
    if hasattr(value, "tolist") and type(value).__module__ == "numpy":
        value = value.tolist()
    if isinstance(value, int):
        return ["i", hex(int(value))]
    if isinstance(value, float):
        return ["f", float(value).hex()]
    if isinstance(value, complex):
        return ["c", value.real.hex(), value.imag.hex()]
    if isinstance(value, str):
        return ["=", str(value)]
    if isinstance(value, (bytes, bytearray)):
        return ["b", bytes(value).hex()]
    for name, kind in (("l", list), ("t", tuple), ("s", set), ("z", frozenset)):
        if isinstance(value, kind):
            return [name, [pack(each, keep) for each in value]]
    if isinstance(value, dict):
        return ["d", [[pack(key, keep), pack(each, keep)] for key, each in value.items()]]
    return ["r", keep(value)]


def unpack(packed: Any, object_of: Callable[[int], Any]) -> Any:
    """The value again. Raises Gone for what `pack` does not make."""
    try:
        return _unpacked(packed, object_of)
    except (ValueError, TypeError, LookupError, RecursionError, OverflowError) as error:
        raise Gone("a value is none") from error


def _unpacked(packed: Any, object_of: Callable[[int], Any]) -> Any:
    match packed:
        case ["=", None | bool() | str() as value]:
            return value
        case ["i", str() as text]:
            return int(text, 16)
        case ["f", str() as text]:
            return float.fromhex(text)
        case ["c", str() as real, str() as imaginary]:
            return complex(float.fromhex(real), float.fromhex(imaginary))
        case ["b", str() as text]:
            return bytes.fromhex(text)
        case ["l" | "t" | "s" | "z" as name, list() as values]:
            kind = {"l": list, "t": tuple, "s": set, "z": frozenset}[name]
            return kind(_unpacked(value, object_of) for value in values)
        case ["d", list() as pairs]:
            return {_unpacked(key, object_of): _unpacked(value, object_of) for key, value in pairs}
        case ["r", int() as number]:
            return object_of(number)
    raise Gone("a value is none")


def exception_of(name: str, text: str) -> Exception:
    """What the candidate raised, for `except ValueError` in a test; an exception of its own is a RuntimeError."""
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind(text)
        except Exception:  # one that wants other arguments, as UnicodeDecodeError does
            pass
    return RuntimeError(f"{name}: {text}")
