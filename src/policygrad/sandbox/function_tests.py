"""Runs function tests in two sandboxed processes: the candidate holds the program, the examiner runs tests that call its functions.

The program finds neither the tests nor the verdict: the examiner gets values as plain data, and only its process has the pipe on
which the verdict goes to the parent. A function that a test passes to the program is called in the examiner's process; the
program gets what it returns. Standard library only.
"""

import ast
import builtins
import contextlib
import functools
import importlib
import io
import itertools
import json
import operator
import os
import re
import sys
import types
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import IO, Any, TypeGuard

_MAX_MESSAGE_CHARS = 300  # of the verdict's messages
_USES_ARRAYS = re.compile(r"\bnumpy\b|\.(?:tolist|shape|dtype|ndim|all|any|astype)\b")


def run_examiner(examination: dict[str, Any], questions: int, answers: int, verdict: int) -> None:
    """Run the tests, and write [points, first failure, why no program can pass] to `verdict`: one point, 1 or 0, per test.

    examination: `setup`, run first; `tests`; `entry`, the name that the candidate has to define; `to_end`, whether tests after
    one that fails are run.
    """
    sys.set_int_max_str_digits(0)
    channel = _Channel(os.fdopen(answers, "rb"), os.fdopen(questions, "wb"))
    tests, setup = examination["tests"], examination["setup"]
    points: list[int] = []
    message = channel.start(arrays=bool(_USES_ARRAYS.search("\n".join((setup, *tests)))))
    if not message:
        space: dict[str, Any] = {"__name__": "tests"}
        try:
            _bind_names(space, channel, setup, exclude_defined=True)
            exec(compile(setup, "setup.py", "exec"), space)
            entry = examination["entry"] or find_builtin_entry(setup, tests)
            bound = _bind_names(space, channel, "\n".join(tests), entry)
        except Exception as error:
            message = f"the tests' setup raised {type(error).__name__}: {error}"
            if not channel.num_requests and not isinstance(error, NameError):
                channel.unfit = message
        else:
            for test in tests:
                try:
                    # fetch the program's data again, which it may have changed, unless a test has assigned the name
                    for name, value in bound.items():
                        if not isinstance(value, (_RemoteObject, type)) and space.get(name) is value:
                            space[name] = bound[name] = channel.request("name", name)
                    exec(compile(test, "tests.py", "exec"), space)
                    points.append(int(not channel.failed))
                except (Exception, SystemExit) as error:
                    points.append(0)
                    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
                    message = message or f"{text} in {test.strip()[:_MAX_MESSAGE_CHARS]}"
                    if isinstance(error, ImportError) and not any(error is raised for raised in channel.raised):
                        missing = error.name or "what they need"
                        channel.unfit = channel.unfit or f"the tests cannot import {missing}: {error}"
                    if not examination["to_end"]:
                        break
    points += [0] * (len(tests) - len(points))
    unfit = "" if all(points) else channel.unfit
    os.write(verdict, json.dumps([points, message[:_MAX_MESSAGE_CHARS], unfit[:_MAX_MESSAGE_CHARS]]).encode())
    os._exit(0)


def _bind_names(
    space: dict[str, Any], channel: "_Channel", code: str, entry: str | None = None, *, exclude_defined: bool = False
) -> dict[str, Any]:
    """Bind the candidate's functions and constants that the code uses, and return them.

    `len` or `math` in tests is Python's, and what their setup defines is theirs: a program cannot replace it.
    exclude_defined: skip the names that this code defines itself.
    """
    nodes = list(ast.walk(ast.parse(code)))
    defined = _find_definitions(nodes) if exclude_defined else set()
    used = [entry, *(node.id for node in nodes if isinstance(node, ast.Name))]
    names = dict.fromkeys(name for name in used if name and name not in defined)
    available = [name for name in names if name in channel.names and (name == entry or name not in space)]
    bound = [
        name for name in available if name == entry or not (hasattr(builtins, name) or name in sys.stdlib_module_names)
    ]
    for name in names:
        if name in sys.stdlib_module_names and name not in space and name not in bound:
            space[name] = __import__(name)
    for name in bound:
        space[name] = channel.request("name", name)
    if entry and entry not in channel.names:
        raise NameError(f"the program defines no {entry!r}")
    return {name: space[name] for name in bound}


def _find_definitions(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the names that code defines, at its top level or within."""
    defined = set[str]()
    for node in nodes:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                defined.add(name)
            case ast.Name(id=name, ctx=ast.Store() | ast.Del()) | ast.arg(arg=name):
                defined.add(name)
            case ast.ExceptHandler(name=str() as name):
                defined.add(name)
            case ast.alias():
                defined.add((node.asname or node.name).partition(".")[0])
    return defined


def find_builtin_entry(setup: str, tests: Sequence[str]) -> str | None:
    """Return the function that tests are about, where it has a built-in's name (MBPP has a `sum`); None = it has another.

    The tests alone decide, as a program may define `all` or `abs` as well, by which they compare. It is what all of them use, and
    of several the first to be called, which is an argument of the others, unless it only makes data (`set`).
    """
    trees = [ast.parse(test) for test in tests]
    nodes = list(ast.walk(ast.parse("\n".join((setup, *tests)))))
    own = _find_definitions(nodes)
    free = {node.id for node in nodes if isinstance(node, ast.Name)} - own - sys.stdlib_module_names
    if not trees or not all(hasattr(builtins, name) for name in free):
        return None  # they use something else of the program's
    used = ({node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} for tree in trees)
    shared = {name for name in free.intersection(*used) if callable(getattr(builtins, name))}
    calls = [call.func.id for tree in trees for call in _list_calls(tree) if isinstance(call.func, ast.Name)]
    candidates = [name for name in calls if name in shared]
    return next((name for name in candidates if name not in _DATA_TYPES), candidates[0] if candidates else None)


def _list_calls(node: ast.AST) -> Iterator[ast.Call]:
    """Yield calls in the order in which they return: arguments before the call that they are for."""
    for child in ast.iter_child_nodes(node):
        yield from _list_calls(child)
    if isinstance(node, ast.Call):
        yield node


def serve_candidate(source: str, questions: int, answers: int) -> None:
    """Run the program, then serve requests until the examiner ends."""
    sys.set_int_max_str_digits(0)
    _Candidate(os.fdopen(questions, "rb"), os.fdopen(answers, "wb")).serve(source)


# Messages between the two processes: plain data by value, other objects by number.
#
# What a candidate returns is plain data when it arrives: no class of its own comes along whose `==` could be true for everything.
# What it raises arrives as an exception that ends only the call: a StopIteration would end a `map` of the tests as if it were
# complete.

MAX_MESSAGE_BYTES = 64 << 20
MAX_ERROR_CHARS = 10_000
_HEAD_BYTES = 4  # before a message: its length
_FOREIGN_TEXT = "text of the other side"
_CONTROL_FLOW = (StopIteration, StopAsyncIteration)
_TEST_RUNNERS = ("unittest", "doctest")  # whose exceptions skip a test


class PeerClosedError(Exception):
    """The other side has ended, or sent an invalid message."""


class Connection:
    """One side's end of the two pipes.

    Exceptions of the other side become classes of this one, so that `except ValueError` catches a ValueError of the other side.
    Those that would affect the code in between, rather than who catches them, become RuntimeError, as PEP 479 does for generators:
    StopIteration ends a `map` or an `all`, and what is not an Exception (SystemExit, GeneratorExit) ends more.

    Args:
        numbers: Of this side's objects that the other side knows: 0, 1, … for the program's, -1, -2, … for the tests'.
        arrays: Send NumPy arrays as such, not as lists.
    """

    def __init__(self, source: IO[bytes], sink: IO[bytes], numbers: Iterator[int], *, arrays: bool = False) -> None:
        self._source, self._sink, self._arrays = source, sink, arrays
        self._next_numbers = numbers
        self._objects: dict[int, Any] = {}  # of this side, which stay alive
        self._classes: dict[int, type[Exception]] = {}  # that represent the other side's
        self._numbers: dict[int, int] = {}  # of all these and other proxies, by id

    def send(self, *message: Any) -> None:
        """Send a message. Raises ValueError where it is too long."""
        data = json.dumps(message, separators=(",", ":")).encode()
        if len(data) > MAX_MESSAGE_BYTES:
            raise ValueError(f"a value of more than {MAX_MESSAGE_BYTES >> 20} MiB")
        self._sink.write(len(data).to_bytes(_HEAD_BYTES, "big") + data)
        self._sink.flush()

    def receive(self) -> Any:
        """Return the next message. Raises PeerClosedError."""
        head = self._source.read(_HEAD_BYTES)
        length = int.from_bytes(head, "big")
        if length > MAX_MESSAGE_BYTES:
            raise PeerClosedError("a message is too long")
        data = self._source.read(length)
        if len(head) + len(data) < _HEAD_BYTES + length:
            raise PeerClosedError("the candidate's process has ended")
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            raise PeerClosedError("a message is not JSON") from error

    def encode(self, value: Any) -> list[Any]:
        return encode_value(value, self._encode_reference, arrays=self._arrays)

    def decode(self, packed: Any) -> Any:
        return decode_value(packed, self._decode_reference)

    def encode_error(self, error: BaseException) -> dict[str, Any]:
        """Encode an exception as JSON: its classes, arguments, attributes and text."""
        try:
            text = str(error)[:MAX_ERROR_CHARS]
        except Exception:
            text = ""
        packed: dict[str, Any] = {"classes": self._encode_classes(type(error)), "text": text}
        with contextlib.suppress(Exception):
            packed["arguments"] = encode_value(list(error.args), self._encode_reference)
            attributes = {name: value for name, value in vars(error).items() if name[:2] != "__"}
            packed["attributes"] = encode_value(attributes, self._encode_reference)
        return packed

    def decode_error(self, packed: Any) -> Exception:
        """Return the exception for what `encode_error` made. Raises PeerClosedError."""
        match packed:
            case {"classes": [[_, str() as name], *_] as classes, "text": str() as text}:
                kind = self._decode_classes(classes)
                arguments = self.decode(packed.get("arguments", ["l", [["=", text]]]))
                attributes = self.decode(packed.get("attributes", ["d", []]))
                if not isinstance(arguments, list) or not isinstance(attributes, dict):
                    raise PeerClosedError("malformed exception")
                if kind is RuntimeError and name != "RuntimeError":
                    return RuntimeError(f"{name}: {text}")
                try:
                    error = kind.__new__(kind, *arguments)
                    with contextlib.suppress(Exception):  # its constructor may take other arguments
                        error.__init__(*arguments)  # type: ignore[misc]
                except Exception:
                    return RuntimeError(f"{name}: {text}")
                error.__dict__ |= {key: value for key, value in attributes.items() if isinstance(key, str)}
                error.__dict__[_FOREIGN_TEXT] = text
                return error
        raise PeerClosedError("malformed exception")

    def _encode_reference(self, value: Any) -> Any:
        """Return the reference to an object that is not plain data."""
        if isinstance(value, type) and issubclass(value, BaseException):
            return {"classes": self._encode_classes(value)}
        return self._number(value)

    def _decode_reference(self, reference: Any) -> Any:
        """Return an object of this side, or what represents one of the other side."""
        match reference:
            case int() if reference in self._objects:
                return self._objects[reference]
            case {"classes": classes}:
                return self._decode_classes(classes)
        raise PeerClosedError("malformed object")

    def _number(self, value: Any) -> int:
        """Return the number of an object, which stays alive from now on."""
        if id(value) not in self._numbers:
            number = self._numbers[id(value)] = next(self._next_numbers)
            self._objects[number] = value
        return self._numbers[id(value)]

    def _encode_classes(self, kind: type[BaseException]) -> list[list[Any]]:
        """Encode the classes of an exception, nearest first: [module, name] in the standard library, else [number, name]."""
        return [
            [str(each.__module__) if _is_stdlib(str(each.__module__)) else self._number(each), str(each.__name__)]
            for each in kind.__mro__
            if each is not BaseException and each is not object
        ]

    def _decode_classes(self, classes: Any) -> type[Exception]:
        """Return the class for what `_encode_classes` made; RuntimeError for one that affects the control flow."""
        match classes:
            case []:
                return RuntimeError
            case [[str() as module, str() as name], *bases]:
                if module not in sys.modules:
                    return self._decode_classes(bases)
                kind = getattr(sys.modules[module], name, None) if _is_stdlib(module) else None
                if not _is_exception(kind) or kind.__module__ != module or module.partition(".")[0] in _TEST_RUNNERS:
                    return RuntimeError
                return RuntimeError if issubclass(kind, _CONTROL_FLOW) else kind
            case [[int() as number, str() as name], *bases]:
                if _is_exception(local := self._objects.get(number)):
                    return RuntimeError if issubclass(local, _CONTROL_FLOW) else local
                if number not in self._classes:
                    namespace = {"__module__": "solution", "__str__": _get_foreign_text}
                    kind = self._classes[number] = type(name, (self._decode_classes(bases),), namespace)
                    self._numbers[id(kind)] = number
                return self._classes[number]
        raise PeerClosedError("malformed exception")


def _get_foreign_text(error: BaseException) -> str:
    return str(error.__dict__.get(_FOREIGN_TEXT, BaseException.__str__(error)))


def _is_exception(value: Any) -> TypeGuard[type[Exception]]:
    return isinstance(value, type) and issubclass(value, Exception)


def _is_stdlib(module: str) -> bool:
    return module.partition(".")[0] in sys.stdlib_module_names


# The examiner's side.

_SINGLE_ELEMENTS = 64  # elements of an iterator that are fetched one by one; after them many at once
_ELEMENTS_AT_ONCE = 1000


class UnfitTestError(TypeError):
    """A test needs something that cannot be sent between the two processes, whatever the program is."""


class _RemoteObject:
    """An object of the candidate's, in the examiner's process. It equals only itself."""

    def __init__(self, channel: "_Channel", number: int) -> None:
        self.__dict__.update(_channel=channel, _number=number)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        encode = self._channel.encode
        return self._channel.request("call", self._number, encode(list(arguments)), encode(keywords))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._channel.request("attribute", self._number, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._channel.request("set", self._number, name, self._channel.encode(value))

    def __instancecheck__(self, instance: Any) -> bool:
        return self._channel.request("is", self._number, self._channel.encode(instance)) is True

    def __iter__(self) -> Iterator[Any]:
        number = self._channel.request("iterate", self._number)
        count, more = 0, True
        while more:
            more, elements = self._channel.take(number, 1 if count < _SINGLE_ELEMENTS else _ELEMENTS_AT_ONCE)
            count += len(elements)
            yield from elements

    def __next__(self) -> Any:
        _, elements = self._channel.take(self._number, 1)
        if not elements:
            raise StopIteration
        return elements[0]


class _Channel(Connection):
    """The examiner's end."""

    def __init__(self, source: IO[bytes], sink: IO[bytes]) -> None:
        super().__init__(source, sink, itertools.count(-1, -1), arrays=True)
        self._remotes: dict[int, _RemoteObject] = {}
        self._callback_depth = 0  # calls of the tests' functions by the program
        self.num_requests = 0
        self.raised: list[BaseException] = []  # by the program
        self.unfit = ""  # why no program can pass
        self.names = frozenset[str]()  # that the program defines
        self.failed = False  # the connection; from then on no test can pass, whatever it catches

    def start(self, *, arrays: bool) -> str:
        """Wait until the program has run. Returns how it failed, or "". arrays: the tests use NumPy."""
        try:
            self.send("start", arrays)
            match self.receive():
                case ["names", list() as names, str()] if all(isinstance(name, str) for name in names):
                    self.names = frozenset(names)
                    return ""
                case ["raised", {"classes": [[_, str() as name], *_], "text": str() as text}, str()]:
                    return f"{name}: {text}"
        except (PeerClosedError, OSError) as error:
            return str(error)
        return "malformed message"

    def request(self, *message: Any) -> Any:
        """Have the program's process do something, and serve its calls of the tests' functions meanwhile."""
        self.num_requests += 1
        try:
            self.send(*message)
            while True:
                *reply, printed = self.receive()
                if printed:
                    with contextlib.suppress(Exception):  # the tests may have replaced or closed it
                        sys.stdout.write(str(printed))
                match reply:
                    case ["value", packed]:
                        return self.decode(packed)
                    case ["raised", packed]:
                        raised = self.decode_error(packed)
                        break
                    case ["call", int() as number, arguments, keywords]:
                        self._serve("call", number, self.decode(arguments), self.decode(keywords))
                    case ["take", int() as number]:
                        self._serve("take", number)
                    case _:
                        raise PeerClosedError("malformed message")
        except BaseException as error:  # only the program can be the cause
            self.failed = True
            raise PeerClosedError(str(error)) from error
        self.raised.append(raised)
        raise raised

    def take(self, number: int, count: int) -> tuple[bool, list[Any]]:
        """Return whether an iterator of the program's may have more elements, and at most `count` of them."""
        match self.request("take", number, count):
            case [bool() as more, list() as elements] if len(elements) <= count:
                return more, elements
        raise PeerClosedError("not a list of elements")

    def _serve(self, what: str, number: int, *arguments: Any) -> None:
        """Call a function of the tests for the program, or take the next element, if there is one, of an iterator."""
        self._callback_depth += 1
        try:
            target = self._objects[number]
            result = target(*arguments[0], **arguments[1]) if what == "call" else list(itertools.islice(target, 1))
            answer: list[Any] = ["value", self.encode(result)]
        except Exception as error:
            answer = ["raised", self.encode_error(error)]
        finally:
            self._callback_depth -= 1
        self.send(*answer)

    def _decode_reference(self, reference: Any) -> Any:
        if isinstance(reference, int) and reference >= 0:
            return self._remotes.setdefault(reference, _RemoteObject(self, reference))
        return super()._decode_reference(reference)

    def _encode_reference(self, value: Any) -> Any:
        if isinstance(value, _RemoteObject):
            return value._number
        if isinstance(value, type) and issubclass(value, BaseException):
            return super()._encode_reference(value)
        if name := _find_stdlib_name(value):
            return name  # so that `eval` is the program's, in its own process
        if isinstance(value, Iterator):
            return {"iterator": self._number(value)}
        hides_stdlib = isinstance(value, functools.partial) and _find_stdlib_name(value.func)
        if callable(value) and not isinstance(value, type) and not hides_stdlib:
            return {"function": self._number(value), "name": getattr(value, "__name__", type(value).__name__)}
        message = f"tests can pass plain data and functions to a program, not {type(value).__name__}"
        if not self._callback_depth:
            self.unfit = message
        raise UnfitTestError(message)


def _find_stdlib_name(value: Any) -> list[str] | None:
    """Return [module, name] of a standard library function or class, which the other process has too."""
    owner = getattr(value, "__objclass__", None)  # of `str.upper`
    module, name = getattr(owner or value, "__module__", None), getattr(value, "__qualname__", None)
    if isinstance(module, str) and isinstance(name, str) and _is_stdlib(module):
        with contextlib.suppress(AttributeError, KeyError):
            return [module, name] if operator.attrgetter(name)(sys.modules[module]) is value else None
    return None


# The candidate's side.

_MAX_PRINTED = 1 << 20  # characters that tests can see printed


class _Candidate(Connection):
    """The candidate's end, with the program."""

    def __init__(self, source: IO[bytes], sink: IO[bytes]) -> None:
        super().__init__(source, sink, itertools.count())
        self._late: dict[int, BaseException] = {}  # what iterators raised after elements that had to go first
        self._proxies: dict[int, Any] = {}  # for functions and iterators of the tests
        self._printed = _PrintedText()
        sys.stdout = io.TextIOWrapper(io.BufferedWriter(self._printed), "utf-8", "replace", write_through=True)
        self.module = types.ModuleType("solution")
        sys.modules["solution"] = self.module

    def serve(self, program: str) -> None:
        try:
            _, self._arrays = self.receive()  # the examiner is there, and the time runs
            exec(compile(program, "solution.py", "exec"), self.module.__dict__)
            names = [name for name in self.module.__dict__ if not name.startswith("__")]
            self._reply("names", names)
        except BaseException as error:
            self._reply("raised", self.encode_error(error))
            return
        with contextlib.suppress(PeerClosedError):
            while True:
                self._answer(self.receive())

    def _answer(self, request: list[Any]) -> None:
        try:
            match request:
                case ["name", name]:
                    result = getattr(self.module, name)
                case ["attribute", number, name]:
                    result = getattr(self._objects[number], name)
                case ["set", number, name, value]:
                    setattr(self._objects[number], name, self.decode(value))
                    result = None
                case ["is", number, value]:
                    result = isinstance(self.decode(value), self._objects[number])
                case ["iterate", number]:
                    result = self._number(iter(self._objects[number]))
                case ["take", number, count]:
                    result = self._take(number, count)
                case ["call", number, arguments, keywords]:
                    result = self._objects[number](*self.decode(arguments), **self.decode(keywords))
                case _:
                    raise ValueError(request)
            packed = self.encode(result)
        except BaseException as error:
            self._reply("raised", self.encode_error(error))
        else:
            self._reply("value", packed)

    def _take(self, number: int, count: int) -> list[Any]:
        """Return [whether there may be more, at most `count` elements]."""
        if number in self._late:
            raise self._late.pop(number)
        elements: list[Any] = []
        try:
            while len(elements) < count:
                elements.append(next(self._objects[number]))
        except StopIteration:
            pass
        except BaseException as error:
            if not elements:
                raise
            self._late[number] = error
            return [True, elements]
        return [len(elements) == count, elements]

    def _request(self, *message: Any) -> Any:
        """Have the tests' process do something with an object of its own."""
        self._reply(*message)
        while True:
            match self.receive():
                case ["value", packed]:
                    return self.decode(packed)
                case ["raised", packed]:
                    raise self.decode_error(packed)
                case request:
                    self._answer(request)

    def _decode_reference(self, reference: Any) -> Any:
        match reference:
            case [str() as module, str() as name]:  # of the standard library
                return operator.attrgetter(name)(importlib.import_module(module))
            case {"function": int() as number, "name": str() as name}:

                def function(*arguments: Any, **keywords: Any) -> Any:
                    return self._request("call", number, self.encode(list(arguments)), self.encode(keywords))

                function.__name__ = function.__qualname__ = name
                proxy: Any = function
            case {"iterator": int() as number}:
                proxy = self._iterate(number)
            case _:
                return super()._decode_reference(reference)
        proxy = self._proxies.setdefault(number, proxy)
        self._numbers[id(proxy)] = number
        return proxy

    def _iterate(self, number: int) -> Iterator[Any]:
        while elements := self._request("take", number):
            yield from elements

    def _reply(self, *message: Any) -> None:
        """Send a message, and with it what has been printed."""
        with contextlib.suppress(Exception):  # the program may have replaced or closed it
            sys.stdout.flush()
        printed = self._printed.take()
        try:
            self.send(*message, printed)
        except ValueError as error:
            self.send("raised", self.encode_error(error), printed)


class _PrintedText(io.RawIOBase):
    """Text that the program prints, for tests that look at it; only the beginning of very long text."""

    def __init__(self) -> None:
        self._data, self._left = bytearray(), _MAX_PRINTED

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        self._data += bytes(data[: self._left])
        self._left -= min(len(data), self._left)
        return len(data)

    def take(self) -> str:
        text = self._data.decode("utf-8", "replace")
        self._data.clear()
        return text


# Values as JSON.

_ARRAY_TYPES = re.compile(r"[<>|=][biufcSUMm]\d+(\[\d*\w+\])?")  # dtypes whose elements are data, as numpy spells them
_BUILTIN_TYPES = {
    kind.__name__: kind
    for kind in (bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict, type(None))
}
_DATA_TYPES = {*_BUILTIN_TYPES, "bytearray", "range", "slice"}
_COLLECTIONS: dict[str, Any] = {"l": list, "t": tuple, "s": set, "z": frozenset}


def encode_value(value: Any, register: Callable[[Any], Any], *, arrays: bool = False) -> list[Any]:
    """Encode a value as JSON.

    Args:
        register: Returns the reference to an object that is not plain data, and stays with its owner.
        arrays: Encode NumPy arrays and numbers as such, instead of as lists and Python numbers.
    """

    def encode_all(values: Iterable[Any]) -> list[Any]:
        return [encode_value(each, register, arrays=arrays) for each in values]

    if value is None or isinstance(value, bool):
        return ["=", value]
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        kind = value.dtype.str
        if arrays and _ARRAY_TYPES.fullmatch(kind):
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

    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if name in _ARGUMENTS:
        return ["v", name, encode_all(_ARGUMENTS[name](value))]
    if isinstance(value, tuple) and isinstance(fields := getattr(kind, "_fields", None), tuple):
        return ["n", kind.__name__, list(map(str, fields)), encode_all(value)]
    for letter, collection in _COLLECTIONS.items():
        if isinstance(value, collection):
            return [letter, encode_all(value)]
    if isinstance(value, dict):
        return ["d", [encode_all(pair) for pair in value.items()]]
    if isinstance(value, type) and value.__module__ == "builtins" and value.__name__ in _BUILTIN_TYPES:
        return ["k", value.__name__]
    return ["r", register(value)]


# Constructor arguments that recreate a value, by its class in the standard library.
_ARGUMENTS: dict[str, Callable[[Any], Iterable[Any]]] = {
    "builtins.range": lambda value: (value.start, value.stop, value.step),
    "builtins.slice": lambda value: (value.start, value.stop, value.step),
    "collections.Counter": lambda value: (dict(value),),
    "collections.OrderedDict": lambda value: (list(value.items()),),
    "collections.defaultdict": lambda value: (
        value.default_factory if getattr(value.default_factory, "__name__", "") in _BUILTIN_TYPES else None,
        dict(value),
    ),
    "collections.deque": lambda value: (list(value), value.maxlen),
    "datetime.date": lambda value: (value.year, value.month, value.day),
    "datetime.datetime": lambda value: (*value.timetuple()[:6], value.microsecond, _get_fixed_zone(value)),
    "datetime.time": lambda value: (value.hour, value.minute, value.second, value.microsecond, _get_fixed_zone(value)),
    "datetime.timedelta": lambda value: (value.days, value.seconds, value.microseconds),
    "datetime.timezone": lambda value: (value.utcoffset(None),),
    "decimal.Decimal": lambda value: (str(value),),
    "fractions.Fraction": lambda value: (value.numerator, value.denominator),
    "uuid.UUID": lambda value: (value.hex,),
}


def _get_fixed_zone(value: Any) -> Any:
    """Return the zone of a date or time, also a named one, as its offset from UTC."""
    offset = value.utcoffset()
    return None if offset is None else importlib.import_module("datetime").timezone(offset)


def decode_value(packed: Any, get_object: Callable[[Any], Any]) -> Any:
    """Decode a value; `get_object` returns the object of a reference. Raises PeerClosedError for a malformed value."""
    decode = functools.partial(decode_value, get_object=get_object)
    try:
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
            case ["l" | "t" | "s" | "z" as letter, list() as values]:
                return _COLLECTIONS[letter](map(decode, values))
            case ["d", list() as pairs]:
                return {decode(key): decode(value) for key, value in pairs}
            case ["v", str() as name, list() as arguments] if name in _ARGUMENTS:
                module, _, kind = name.rpartition(".")
                return getattr(importlib.import_module(module), kind)(*map(decode, arguments))
            case ["n", str() as name, list() as fields, list() as values] if len(fields) == len(values):
                return namedtuple(name, fields, rename=True)(*map(decode, values))
            case ["k", str() as name]:
                return _BUILTIN_TYPES[name]
            case ["a", str() as dtype, None | list() as shape, str() as text] if _ARRAY_TYPES.fullmatch(dtype):
                array = importlib.import_module("numpy").frombuffer(bytes.fromhex(text), dtype)
                return array[0] if shape is None else array.reshape(shape).copy()
            case ["r", reference]:
                return get_object(reference)
    except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RecursionError, ImportError) as error:
        raise PeerClosedError("malformed value") from error
    raise PeerClosedError("malformed value")
