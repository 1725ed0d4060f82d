"""Values between a candidate's process and its examiner's: plain data by value, all else by a number. Standard library only.

What a candidate returns is data when it arrives: no class of its own comes along whose `==` could say yes to everything. What it
raises arrives as an exception that ends nothing but the call: a StopIteration would end a `map` of the tests as if all were well.
"""

import contextlib
import importlib
import json
import os
import re
import struct
import sys
from collections.abc import Callable, Iterable
from typing import Any

MOST = 64 << 20  # bytes of a message
TEXT = 10_000  # characters of an exception's text
_HEAD = struct.Struct(">I")
_NUMBERS = re.compile(r"[<>|=][biufcSUMm]\d+(\[\d*\w+\])?")  # dtypes whose elements are data, as numpy spells them
_PLAIN = ("bool", "int", "float", "complex", "str", "bytes", "list", "tuple", "set", "frozenset", "dict", "NoneType")


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


def pack(value: Any, keep: Callable[[Any], Any], *, arrays: bool = False) -> list[Any]:
    """Turn a value into JSON; what is no plain data is kept by its owner, and goes as what `keep` gives for it.

    arrays: NumPy's arrays and numbers stay what they are; else they go as lists and as Python's numbers.
    """
    if value is None or isinstance(value, bool):
        return ["=", value]
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        kind = value.dtype.str
        if arrays and _NUMBERS.fullmatch(kind):
            return ["a", kind, list(value.shape) if type(value).__name__ == "ndarray" else None, value.tobytes().hex()]
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

    def inner(values: Iterable[Any]) -> list[Any]:
        return [pack(each, keep, arrays=arrays) for each in values]

    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if name in _PARTS:
        return ["v", name, inner(_PARTS[name](value))]
    if isinstance(value, tuple) and isinstance(fields := getattr(kind, "_fields", None), tuple):
        return ["n", kind.__name__, list(map(str, fields)), inner(value)]
    for letter, plain in (("l", list), ("t", tuple), ("s", set), ("z", frozenset)):
        if isinstance(value, plain):
            return [letter, inner(value)]
    if isinstance(value, dict):
        return ["d", [inner(pair) for pair in value.items()]]
    if isinstance(value, type) and value.__module__ == "builtins" and value.__name__ in _PLAIN:
        return ["k", value.__name__]
    return ["r", keep(value)]


_PARTS: dict[str, Callable[[Any], Iterable[Any]]] = {
    "builtins.range": lambda value: (value.start, value.stop, value.step),
    "builtins.slice": lambda value: (value.start, value.stop, value.step),
    "collections.Counter": lambda value: (dict(value),),
    "collections.OrderedDict": lambda value: (list(value.items()),),
    "collections.defaultdict": lambda value: (
        value.default_factory if getattr(value.default_factory, "__name__", "") in _PLAIN else None,
        dict(value),
    ),
    "collections.deque": lambda value: (list(value), value.maxlen),
    "datetime.date": lambda value: (value.year, value.month, value.day),
    "datetime.datetime": lambda value: (*value.timetuple()[:6], value.microsecond, _zone(value)),
    "datetime.time": lambda value: (value.hour, value.minute, value.second, value.microsecond, _zone(value)),
    "datetime.timedelta": lambda value: (value.days, value.seconds, value.microseconds),
    "datetime.timezone": lambda value: (value.utcoffset(None),),
    "decimal.Decimal": lambda value: (str(value),),
    "fractions.Fraction": lambda value: (value.numerator, value.denominator),
    "uuid.UUID": lambda value: (value.hex,),
}
"""Of the standard library's classes of data: what each is made from again."""


def _zone(value: Any) -> Any:
    """The offset from UTC of a date's or a time's zone: of a zone by name, too."""
    offset = value.utcoffset()
    return None if offset is None else importlib.import_module("datetime").timezone(offset)


def unpack(packed: Any, object_of: Callable[[Any], Any]) -> Any:
    """The value again; `object_of` gives the object for what `keep` gave. Raises Gone for what `pack` does not make."""
    try:
        return _unpacked(packed, object_of)
    except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RecursionError, ImportError) as error:
        raise Gone("a value is none") from error


def _unpacked(packed: Any, object_of: Callable[[Any], Any]) -> Any:
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
        case ["v", str() as name, list() as parts] if name in _PARTS:
            module, _, kind_name = name.rpartition(".")
            return getattr(importlib.import_module(module), kind_name)(*(_unpacked(part, object_of) for part in parts))
        case ["n", str() as name, list() as fields, list() as values] if len(fields) == len(values):
            namedtuple = importlib.import_module("collections").namedtuple
            return namedtuple(name, fields, rename=True)(*(_unpacked(value, object_of) for value in values))
        case ["k", str() as name] if name in _PLAIN:
            return type(None) if name == "NoneType" else getattr(importlib.import_module("builtins"), name)
        case ["a", str() as kind_name, None | list() as shape, str() as text] if _NUMBERS.fullmatch(kind_name):
            array = importlib.import_module("numpy").frombuffer(bytes.fromhex(text), kind_name)
            return array[0] if shape is None else array.reshape(shape).copy()
        case ["r", number]:
            return object_of(number)
    raise Gone("a value is none")


def classes_of(kind: type[BaseException], number_of: Callable[[type], int]) -> list[list[Any]]:
    """The classes of an exception as JSON, the nearest first: [module, name] of Python's, [number, name] of the sender's own."""
    found = []
    for each in kind.__mro__:
        if each is not BaseException and each is not object:
            module = str(each.__module__)
            found.append([module if _is_standard(module) else number_of(each), str(each.__name__)])
    return found


def pack_error(error: BaseException, keep: Callable[[Any], Any], number_of: Callable[[type], int]) -> dict[str, Any]:
    """An exception as JSON: its classes, arguments, attributes and text."""
    try:
        text = str(error)[:TEXT]
    except Exception:
        text = ""
    found: dict[str, Any] = {"classes": classes_of(type(error), number_of), "text": text}
    with contextlib.suppress(Exception):
        found["arguments"] = pack(list(error.args), keep)
        found["attributes"] = pack({name: value for name, value in vars(error).items() if name[:2] != "__"}, keep)
    return found


class Errors:
    """Exceptions of the other side, as classes of this one: `except ValueError` takes what is one there.

    What would mean something to the code between, and not to who catches it, is a RuntimeError, as PEP 479 has it for generators:
    StopIteration ends a `map` or an `all`, and what is no Exception (SystemExit, GeneratorExit) ends more. own: the class of this
    side's that has a number, or None.
    """

    def __init__(self, own: Callable[[int], type[Exception] | None]) -> None:
        self._own = own
        self._known: dict[int, type[Exception]] = {}  # that stand for the other side's, by their number there

    def number_of(self, kind: Any) -> int | None:
        """The other side's number of a class that stands for one of its own."""
        return next((number for number, known in self._known.items() if known is kind), None)

    def kind(self, classes: Any) -> type[Exception]:
        """The class for what `classes_of` gave. Raises Gone."""
        match classes:
            case []:
                return RuntimeError
            case [[str() as module, str() as name], *rest]:
                return _standard(module, name) if module in sys.modules else self.kind(rest)
            case [[int() as number, str() as name], *rest]:
                if own := self._own(number):
                    return RuntimeError if issubclass(own, _STEERS) else own
                if number not in self._known:
                    self._known[number] = type(name, (self.kind(rest),), {"__module__": "solution", "__str__": _text})
                return self._known[number]
        raise Gone("an exception is none")

    def error(self, packed: Any, object_of: Callable[[Any], Any]) -> Exception:
        """The exception for what `pack_error` gave. Raises Gone."""
        match packed:
            case {"classes": [[_, str() as name], *_] as classes, "text": str() as text}:
                kind = self.kind(classes)
                arguments = unpack(packed.get("arguments", ["l", [["=", text]]]), object_of)
                attributes = unpack(packed.get("attributes", ["d", []]), object_of)
                if not isinstance(arguments, list) or not isinstance(attributes, dict):
                    raise Gone("an exception is none")
                if kind is RuntimeError and name != "RuntimeError":
                    return RuntimeError(f"{name}: {text}")
                try:
                    error = kind.__new__(kind, *arguments)
                    with contextlib.suppress(Exception):  # one that wants other arguments
                        error.__init__(*arguments)  # type: ignore[misc]
                except Exception:
                    return RuntimeError(f"{name}: {text}")
                error.__dict__ |= {key: value for key, value in attributes.items() if isinstance(key, str)}
                error.__dict__[_TOLD] = text
                return error
        raise Gone("an exception is none")


_TOLD = "text of the other side"
_STEERS = (StopIteration, StopAsyncIteration)
_RUNNERS = ("unittest", "doctest")  # whose exceptions skip a test


def _text(error: BaseException) -> str:
    return str(error.__dict__.get(_TOLD, BaseException.__str__(error)))


def _is_standard(module: str) -> bool:
    return module.partition(".")[0] in sys.stdlib_module_names


def _standard(module: str, name: str) -> type[Exception]:
    """An exception of Python's by its name; RuntimeError for what is none, or steers the code that it goes through."""
    kind = getattr(sys.modules[module], name, None) if _is_standard(module) else None
    if not isinstance(kind, type) or not issubclass(kind, Exception) or kind.__module__ != module:
        return RuntimeError
    return RuntimeError if issubclass(kind, _STEERS) or module.partition(".")[0] in _RUNNERS else kind
