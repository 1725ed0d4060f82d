"""A candidate and its examiner, each in a process of its own behind a wall: tests call functions that they cannot see into.

The candidate's process runs the program and answers calls; the examiner's runs the tests, on values that come as plain data
(`values.py`), and alone can reach the pipe on which the verdict goes to the parent. So a program finds neither the tests nor the
verdict: it can return what is right, or not. A function that a test hands over is called where it is, in the examiner's process;
of it the program gets what it returns. Standard library only.
"""

import ast
import builtins
import contextlib
import functools
import importlib
import io
import json
import operator
import os
import re
import struct
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

# Values between a candidate's process and its examiner's: plain data by value, all else by a number. Standard library only.
#
# What a candidate returns is data when it arrives: no class of its own comes along whose `==` could say yes to everything. What it
# raises arrives as an exception that ends nothing but the call: a StopIteration would end a `map` of the tests as if all were well.

MAX_MESSAGE_BYTES = 64 << 20  # bytes of a message
MAX_ERROR_CHARS = 10_000  # characters of an exception's text
_HEAD = struct.Struct(">I")
_NUMBERS = re.compile(r"[<>|=][biufcSUMm]\d+(\[\d*\w+\])?")  # dtypes whose elements are data, as numpy spells them
_PLAIN = ("bool", "int", "float", "complex", "str", "bytes", "list", "tuple", "set", "frozenset", "dict", "NoneType")


class PeerClosedError(Exception):
    """The other side has ended, or says what is no message."""


def send(descriptor: int, message: Any) -> None:
    data = json.dumps(message, separators=(",", ":")).encode()
    if len(data) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a value of more than {MAX_MESSAGE_BYTES >> 20} MiB")
    data = _HEAD.pack(len(data)) + data
    while data:
        data = data[os.write(descriptor, data) :]


def receive(descriptor: int) -> Any:
    """The next message. Raises Gone."""
    (length,) = _HEAD.unpack(_exactly(descriptor, _HEAD.size))
    if length > MAX_MESSAGE_BYTES:
        raise PeerClosedError("a message is too long")
    try:
        return json.loads(_exactly(descriptor, length))
    except (ValueError, RecursionError) as error:
        raise PeerClosedError("a message is no JSON") from error


def _exactly(descriptor: int, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        piece = os.read(descriptor, min(count - len(data), 1 << 20))
        if not piece:
            raise PeerClosedError("the candidate's process has ended")
        data += piece
    return bytes(data)


def encode_value(value: Any, keep: Callable[[Any], Any], *, arrays: bool = False) -> list[Any]:
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
        return [encode_value(each, keep, arrays=arrays) for each in values]

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


def decode_value(packed: Any, object_of: Callable[[Any], Any]) -> Any:
    """The value again; `object_of` gives the object for what `keep` gave. Raises Gone for what `pack` does not make."""
    try:
        return _unpacked(packed, object_of)
    except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RecursionError, ImportError) as error:
        raise PeerClosedError("a value is none") from error


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
    raise PeerClosedError("a value is none")


def encode_classes(kind: type[BaseException], number_of: Callable[[type], int]) -> list[list[Any]]:
    """The classes of an exception as JSON, the nearest first: [module, name] of Python's, [number, name] of the sender's own."""
    found = []
    for each in kind.__mro__:
        if each is not BaseException and each is not object:
            module = str(each.__module__)
            found.append([module if _is_standard(module) else number_of(each), str(each.__name__)])
    return found


def encode_error(error: BaseException, keep: Callable[[Any], Any], number_of: Callable[[type], int]) -> dict[str, Any]:
    """An exception as JSON: its classes, arguments, attributes and text."""
    try:
        text = str(error)[:MAX_ERROR_CHARS]
    except Exception:
        text = ""
    found: dict[str, Any] = {"classes": encode_classes(type(error), number_of), "text": text}
    with contextlib.suppress(Exception):
        found["arguments"] = encode_value(list(error.args), keep)
        found["attributes"] = encode_value(
            {name: value for name, value in vars(error).items() if name[:2] != "__"}, keep
        )
    return found


class ForeignErrors:
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
        """The class for what `encode_classes` gave. Raises Gone."""
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
        raise PeerClosedError("an exception is none")

    def error(self, packed: Any, object_of: Callable[[Any], Any]) -> Exception:
        """The exception for what `encode_error` gave. Raises Gone."""
        match packed:
            case {"classes": [[_, str() as name], *_] as classes, "text": str() as text}:
                kind = self.kind(classes)
                arguments = decode_value(packed.get("arguments", ["l", [["=", text]]]), object_of)
                attributes = decode_value(packed.get("attributes", ["d", []]), object_of)
                if not isinstance(arguments, list) or not isinstance(attributes, dict):
                    raise PeerClosedError("an exception is none")
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
        raise PeerClosedError("an exception is none")


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


_TEXT = 300  # characters of a message
_PRINTED = 1 << 20  # characters that tests may see printed
_SINGLY = 64  # elements of an iterator that are taken one at a time; more of them at once
_AT_ONCE = 1000
_ARRAYS = re.compile(r"\bnumpy\b|\.(?:tolist|shape|dtype|ndim|all|any|astype)\b")


class _Kept:
    """Objects of one side, by number: what the other side can name."""

    def __init__(self, step: int) -> None:
        self._step = step  # 1 or -1: the program's have numbers from 0 on, the tests' from -1 down
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}

    def number_of(self, value: Any) -> int:
        place = self._numbers.setdefault(id(value), len(self._objects))
        if place == len(self._objects):
            self._objects.append(value)
        return place if self._step > 0 else -1 - place

    def __getitem__(self, number: int) -> Any:
        place = number if self._step > 0 else -1 - number
        if not 0 <= place < len(self._objects):
            raise LookupError("there is no such object")
        return self._objects[place]

    def exception(self, number: int) -> type[Exception] | None:
        """The exception of this number, if it is one."""
        with contextlib.suppress(LookupError):
            kind = self[number]
            return kind if isinstance(kind, type) and issubclass(kind, Exception) else None
        return None


class _Candidate:
    """The candidate's end of the two pipes: the program, and what the tests have had of it."""

    def __init__(self, asks: int, answers: int) -> None:
        self._asks, self._answers = asks, answers
        self._kept = _Kept(1)
        self._errors = ForeignErrors(self._kept.exception)
        self._late: dict[int, BaseException] = {}  # what iterators raised after elements that had to go first
        self._stands: dict[int, Any] = {}  # what stands here for functions of the tests', by their numbers
        self._theirs: dict[int, int] = {}  # and the numbers by the id of what stands for each
        self._arrays = False
        self._printed = _Printed()
        sys.stdout = io.TextIOWrapper(io.BufferedWriter(self._printed), "utf-8", "replace", write_through=True)
        self.module = types.ModuleType("solution")
        sys.modules["solution"] = self.module

    def serve(self, source: str) -> None:
        """Run the program, then do what is asked until nobody asks."""
        try:
            _, self._arrays = receive(self._asks)  # the examiner is there, and the clock runs
            exec(compile(source, "solution.py", "exec"), self.module.__dict__)
            names = [name for name in self.module.__dict__ if not name.startswith("__")]
            self._say("names", names)
        except BaseException as error:
            self._say("raised", self._packed_error(error))
            return
        with contextlib.suppress(PeerClosedError):
            while True:
                self._answer(receive(self._asks))

    def _answer(self, message: list[Any]) -> None:
        try:
            packed = self._packed(self._do(*message))
        except BaseException as error:
            self._say("raised", self._packed_error(error))
        else:
            self._say("value", packed)

    def _do(self, what: str, number: Any, *rest: Any) -> Any:
        if what == "name":
            return getattr(self.module, number)
        target = self._kept[number]
        match what, rest:
            case "attribute", [name]:
                return getattr(target, name)
            case "set", [name, value]:
                return setattr(target, name, decode_value(value, self._object))
            case "is", [value]:
                return isinstance(decode_value(value, self._object), target)
            case "through", []:
                return _Iterator(iter(target))
            case "take", [count]:
                return self._take(number, target, count)
            case "call", [arguments, named]:
                return target(*decode_value(arguments, self._object), **decode_value(named, self._object))
        raise ValueError(what)

    def _take(self, number: int, target: Any, count: int) -> list[Any]:
        """At most so many elements; fewer = there are no more."""
        if number in self._late:
            raise self._late.pop(number)
        target = target.iterator if isinstance(target, _Iterator) else target
        found: list[Any] = []
        try:
            while len(found) < count:
                found.append(next(target))
        except StopIteration:
            pass
        except BaseException as error:
            if not found:
                raise
            self._late[number] = error
            return [True, found]
        return [len(found) == count, found]

    def _ask(self, *message: Any) -> Any:
        """Have the tests' process do something with what is its own."""
        self._say(*message)
        while True:
            match receive(self._asks):
                case ["value", packed]:
                    return decode_value(packed, self._object)
                case ["raised", packed]:
                    raise self._errors.error(packed, self._object)
                case message:
                    self._answer(message)

    def _object(self, named: Any) -> Any:
        match named:
            case int():
                return self._kept[named]
            case [str() as module, str() as name]:  # something of Python's own
                return operator.attrgetter(name)(importlib.import_module(module))
            case {"classes": classes}:
                return self._errors.kind(classes)
            case {"function": int() as number, "name": str() as name}:
                stand: Any = _function(name, lambda *a, **k: self._call(number, a, k))
            case {"iterator": int() as number}:
                stand = self._iterate(number)
            case _:
                raise PeerClosedError("it is no object")
        stand = self._stands.setdefault(number, stand)
        self._theirs[id(stand)] = number
        return stand

    def _call(self, number: int, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        return self._ask("call", number, self._packed(list(arguments)), self._packed(named))

    def _iterate(self, number: int) -> Iterator[Any]:
        while found := self._ask("take", number):
            yield from found

    def _packed(self, value: Any) -> list[Any]:
        return encode_value(value, self._keep, arrays=self._arrays)

    def _packed_error(self, error: BaseException) -> dict[str, Any]:
        return encode_error(error, self._keep, self._number_of)

    def _keep(self, value: Any) -> Any:
        if (number := self._theirs.get(id(value))) is not None:
            return number
        if isinstance(value, type) and issubclass(value, BaseException):
            return {"classes": encode_classes(value, self._number_of)}
        return self._kept.number_of(value)

    def _number_of(self, kind: type) -> int:
        number = self._errors.number_of(kind)
        return self._kept.number_of(kind) if number is None else number

    def _say(self, *message: Any) -> None:
        """Send a message, and with it what has been printed."""
        with contextlib.suppress(Exception):  # it may be another one by now, or closed
            sys.stdout.flush()
        printed = self._printed.taken()
        try:
            send(self._answers, [*message, printed])
        except ValueError as error:
            send(self._answers, ["raised", self._packed_error(error), printed])


class _Printed(io.RawIOBase):
    """What the program prints, for tests that look; of very much, the beginning."""

    def __init__(self) -> None:
        self._data, self._left = bytearray(), _PRINTED

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        self._data += bytes(data[: self._left])
        self._left -= min(len(data), self._left)
        return len(data)

    def taken(self) -> str:
        text = self._data.decode("utf-8", "replace")
        self._data.clear()
        return text


class _Iterator:
    """What goes through something once, and is nothing else."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self.iterator = iterator


def _function(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def function(*arguments: Any, **named: Any) -> Any:
        return call(*arguments, **named)

    function.__name__ = function.__qualname__ = name
    return function


def serve_candidate(source: str, asks: int, answers: int) -> None:
    """The candidate's side: run the program, then do what is asked until nobody asks."""
    sys.set_int_max_str_digits(0)
    _Candidate(asks, answers).serve(source)


class _Remote:
    """Something of the candidate's, in the examiner's process. It equals only itself."""

    def __init__(self, link: "_Link", number: int) -> None:
        self.__dict__.update(_link=link, _number=number)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._link.ask("call", self._number, self._link.packed(list(arguments)), self._link.packed(named))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._link.ask("attribute", self._number, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._link.ask("set", self._number, name, self._link.packed(value))

    def __instancecheck__(self, instance: Any) -> bool:
        return self._link.ask("is", self._number, self._link.packed(instance)) is True

    def __iter__(self) -> Iterator[Any]:
        through = self._link.ask("through", self._number)
        if not isinstance(through, _Remote):
            raise PeerClosedError("it is no iterator")
        taken, more = 0, True
        while more:
            more, found = through._take(1 if taken < _SINGLY else _AT_ONCE)
            taken += len(found)
            yield from found

    def __next__(self) -> Any:
        _, found = self._take(1)
        if not found:
            raise StopIteration
        return found[0]

    def _take(self, count: int) -> tuple[bool, list[Any]]:
        match self._link.ask("take", self._number, count):
            case [bool() as more, list() as found] if len(found) <= count:
                return more, found
        raise PeerClosedError("these are no elements")


class UnfitTestError(TypeError):
    """A test asks for what cannot go between the two processes, whatever the program is."""


class _Link:
    """The examiner's end of the two pipes."""

    def __init__(self, asks: int, answers: int) -> None:
        self._asks, self._answers = asks, answers
        self._kept = _Kept(-1)
        self._errors = ForeignErrors(self._kept.exception)
        self._remotes: dict[int, _Remote] = {}
        self._inside = 0  # calls of the tests' functions by the program that are going on
        self.asked = 0
        self.raised: list[BaseException] = []  # by the program
        self.unfit = ""
        self.names = frozenset[str]()
        self.gone = False  # and no test can be passed any more, whatever it catches

    def start(self, arrays: bool) -> str | None:
        """Wait for the program to have run; what it raised, or None. arrays: the tests know NumPy."""
        send(self._asks, ["start", arrays])
        match receive(self._answers):
            case ["names", list() as names, str()] if all(isinstance(name, str) for name in names):
                self.names = frozenset(names)
                return None
            case ["raised", {"classes": [[_, str() as name], *_], "text": str() as text}, str()]:
                return f"{name}: {text}"
        raise PeerClosedError("it is no message")

    def ask(self, *what: Any) -> Any:
        """Have the program's process do something; meanwhile it may call what the tests have handed over."""
        self.asked += 1
        try:
            send(self._asks, list(what))
            while True:
                *message, printed = receive(self._answers)
                if printed:
                    with contextlib.suppress(Exception):  # of the tests' making, or closed
                        sys.stdout.write(str(printed))
                match message:
                    case ["value", packed]:
                        return decode_value(packed, self._object)
                    case ["raised", packed]:
                        raised = self._errors.error(packed, self._object)
                        break
                    case ["call", int() as number, arguments, named]:
                        given, words = decode_value(arguments, self._object), decode_value(named, self._object)
                        self._answer(functools.partial(self._called, number, given, words))
                    case ["take", int() as number]:
                        self._answer(functools.partial(self._taken, number))
                    case _:
                        raise PeerClosedError("it is no message")
        except BaseException as error:  # between a question and its answer nothing can go wrong but the program
            self.gone = True
            raise PeerClosedError(str(error)) from error
        self.raised.append(raised)
        raise raised

    def _answer(self, do: Callable[[], Any]) -> None:
        self._inside += 1
        try:
            answer: list[Any] = ["value", self.packed(do())]
        except Exception as error:
            answer = ["raised", encode_error(error, self._keep, self._number_of)]
        finally:
            self._inside -= 1
        send(self._asks, answer)

    def _called(self, number: int, arguments: list[Any], named: dict[str, Any]) -> Any:
        return self._kept[number](*arguments, **named)

    def _taken(self, number: int) -> list[Any]:
        """The next element of an iterator, if there is one."""
        try:
            return [next(self._kept[number])]
        except StopIteration:
            return []

    def packed(self, value: Any) -> list[Any]:
        return encode_value(value, self._keep, arrays=True)

    def _object(self, named: Any) -> Any:
        match named:
            case int() if named < 0:
                return self._kept[named]
            case int():
                return self._remotes.setdefault(named, _Remote(self, named))
            case {"classes": classes}:
                return self._errors.kind(classes)
        raise PeerClosedError("it is no object")

    def _keep(self, value: Any) -> Any:
        if isinstance(value, _Remote):
            return value._number
        if isinstance(value, type) and issubclass(value, BaseException):
            return {"classes": encode_classes(value, self._number_of)}
        if named := _of_python(value):
            return named  # so that `eval` is the program's, in its own process
        if isinstance(value, Iterator):
            return {"iterator": self._kept.number_of(value)}
        hidden = isinstance(value, functools.partial) and _of_python(value.func)
        if callable(value) and not isinstance(value, type) and not hidden:
            return {"function": self._kept.number_of(value), "name": getattr(value, "__name__", type(value).__name__)}
        said = f"tests can give a candidate plain data and functions, not {type(value).__name__}"
        if not self._inside:
            self.unfit = said
        raise UnfitTestError(said)

    def _number_of(self, kind: type) -> int:
        number = self._errors.number_of(kind)
        return self._kept.number_of(kind) if number is None else number


def _of_python(value: Any) -> list[str] | None:
    """[module, name] of a function or a class of the standard library's, which the other process has too."""
    owner = getattr(value, "__objclass__", None)  # of `str.upper`
    module, name = getattr(owner or value, "__module__", None), getattr(value, "__qualname__", None)
    if not (isinstance(module, str) and isinstance(name, str) and module.partition(".")[0] in sys.stdlib_module_names):
        return None
    with contextlib.suppress(AttributeError, KeyError):
        return [module, name] if operator.attrgetter(name)(sys.modules[module]) is value else None
    return None


def run_examiner(examination: dict[str, Any], asks: int, answers: int, verdict: int) -> None:
    """The examiner's side. examination: `setup`, run first; `tests`, each worth a point; `entry`: the name that has to be the
    candidate's; `to_end`: whether tests behind one that fails are run. The verdict is one point, 1 or 0, per test, what went wrong
    first, and why no program can pass, if that shows."""
    sys.set_int_max_str_digits(0)
    link = _Link(asks, answers)
    tests, setup, entry = examination["tests"], examination["setup"], examination["entry"]
    points, said = [], ""
    try:
        said = link.start(bool(_ARRAYS.search("\n".join((setup, *tests))))) or ""
    except (PeerClosedError, OSError) as error:
        said = str(error)
    if not said:
        space: dict[str, Any] = {"__name__": "tests"}
        try:
            _bind(space, link, setup, None, defined=True)
            exec(compile(setup, "setup.py", "exec"), space)
            bound = _bind(space, link, "\n".join(tests), entry)
        except Exception as error:
            said = f"the tests' setup raised {type(error).__name__}: {error}"
            if not link.asked and not isinstance(error, NameError):
                link.unfit = said
        else:
            for test in tests:
                try:
                    _renew(space, link, bound)
                    exec(compile(test, "tests.py", "exec"), space)
                    points.append(int(not link.gone))
                except (Exception, SystemExit) as error:
                    points.append(0)
                    said = said or _told(error, test)
                    if isinstance(error, ImportError) and not any(error is one for one in link.raised):
                        link.unfit = link.unfit or f"the tests cannot import {error.name or 'what they need'}: {error}"
                    if not examination["to_end"]:
                        break
    points += [0] * (len(tests) - len(points))
    unfit = "" if all(points) else link.unfit
    os.write(verdict, json.dumps([points, said[:_TEXT], unfit[:_TEXT]]).encode())
    os._exit(0)


def _told(error: BaseException, test: str) -> str:
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return f"{text} in {test.strip()[:_TEXT]}"


def _bind(
    space: dict[str, Any], link: _Link, tests: str, entry: str | None, *, defined: bool = False
) -> dict[str, Any]:
    """Give the tests the candidate's functions and constants by name; returns what they got.

    What tests mean by `len` or `math` is Python's, and what their setup defines theirs: a program cannot put its own in the place.
    Only where nothing else of the program's is called is a function of a built-in's name the program's (MBPP has such a `sum`).
    defined: leave out what this code defines itself.
    """
    tree = ast.parse(tests)
    used = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)]
    made = _made(tree) if defined else frozenset[str]()
    wanted = dict.fromkeys(name for name in [*([entry] if entry else []), *used] if name not in made)
    theirs = [name for name in wanted if name in link.names and (name == entry or name not in space)]
    own = [name for name in theirs if name == entry or not (hasattr(builtins, name) or name in sys.stdlib_module_names)]
    for name in wanted:
        if name in sys.stdlib_module_names and name not in space and name not in own:
            space[name] = __import__(name)
    for name in own or [name for name in theirs if hasattr(builtins, name) and not defined]:
        space[name] = link.ask("name", name)
    if entry and entry not in link.names:
        raise NameError(f"the program defines no {entry!r}")
    return {name: space[name] for name in own}


def _renew(space: dict[str, Any], link: _Link, bound: dict[str, Any]) -> None:
    """Take the program's data anew, which it may have changed, where no test has put another thing in the place."""
    for name, value in bound.items():
        if not isinstance(value, (_Remote, type)) and space.get(name) is value:
            space[name] = bound[name] = link.ask("name", name)


def _made(tree: ast.AST) -> frozenset[str]:
    """The names that code gives a meaning to itself."""
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).partition(".")[0])
    return frozenset(names)
