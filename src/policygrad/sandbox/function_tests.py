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
from typing import IO, Any

_MAX_MESSAGE_CHARS = 300  # of the verdict's messages
_USES_ARRAYS = re.compile(r"\bnumpy\b|\.(?:tolist|shape|dtype|ndim|all|any|astype)\b")


def run_examiner(examination: dict[str, Any], questions: int, answers: int, verdict: int) -> None:
    """Run the tests, and write [points, first failure, why no program can pass] to `verdict`: one point, 1 or 0, per test.

    examination: `setup`, run first; `tests`; `entry`, the name that the candidate has to define; `to_end`, whether tests after
    one that fails are run.
    """
    sys.set_int_max_str_digits(0)
    examiner = _Examiner(os.fdopen(answers, "rb"), os.fdopen(questions, "wb"))
    tests, setup = examination["tests"], examination["setup"]
    points: list[int] = []
    message = examiner.start(arrays=bool(_USES_ARRAYS.search("\n".join((setup, *tests)))))
    if not message:
        space: dict[str, Any] = {"__name__": "tests"}
        try:
            _bind_names(space, examiner, setup, exclude_defined=True)
            exec(compile(setup, "setup.py", "exec"), space)
            entry = examination["entry"] or find_builtin_entry(setup, tests)
            bound = _bind_names(space, examiner, "\n".join(tests), entry)
        except Exception as error:
            message = f"the tests' setup raised {type(error).__name__}: {error}"
            if not examiner.num_requests and not isinstance(error, NameError):
                examiner.unfit = message
        else:
            for test in tests:
                try:
                    # fetch the program's data again, which it may have changed, unless a test has assigned the name
                    for name, value in bound.items():
                        if not isinstance(value, (_RemoteObject, type)):
                            space[name] = examiner.fetch(name)
                    for name in _find_definitions(ast.walk(ast.parse(test))):
                        bound.pop(name, None)
                    exec(compile(test, "tests.py", "exec"), space)
                    points.append(int(not examiner.failed))
                except (Exception, SystemExit) as error:
                    points.append(0)
                    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
                    message = message or f"{text} in {test.strip()[:_MAX_MESSAGE_CHARS]}"
                    if isinstance(error, ImportError) and not any(error is raised for raised in examiner.raised):
                        missing = error.name or "what they need"
                        examiner.unfit = examiner.unfit or f"the tests cannot import {missing}: {error}"
                    if not examination["to_end"]:
                        break
    points += [0] * (len(tests) - len(points))
    unfit = "" if all(points) else examiner.unfit
    os.write(verdict, json.dumps([points, message[:_MAX_MESSAGE_CHARS], unfit[:_MAX_MESSAGE_CHARS]]).encode())
    os._exit(0)


def _bind_names(
    space: dict[str, Any], examiner: "_Examiner", code: str, entry: str | None = None, *, exclude_defined: bool = False
) -> dict[str, Any]:
    """Bind the candidate's functions and constants that the code uses, and return them.

    `len` or `math` in tests is Python's, and what their setup defines is theirs: a program cannot replace it.
    exclude_defined: skip the names that this code defines itself.
    """
    nodes = list(ast.walk(ast.parse(code)))
    defined = _find_definitions(nodes) if exclude_defined else set()
    used = dict.fromkeys(node.id for node in nodes if isinstance(node, ast.Name) and node.id not in defined)
    free = [name for name in used if name != entry and name not in space and not hasattr(builtins, name)]
    space |= {name: __import__(name) for name in free if name in sys.stdlib_module_names}
    if entry and entry not in examiner.names:
        raise NameError(f"the program defines no {entry!r}")
    wanted = [name for name in free if name in examiner.names and name not in space]
    bound = {name: examiner.fetch(name) for name in ([entry] if entry else []) + wanted}
    space |= bound
    return bound


def _find_definitions(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the names that code defines, at its top level or within."""
    defined = set[str]()
    for node in nodes:
        match node:
            case (
                ast.Name(id=name, ctx=ast.Store() | ast.Del())
                | ast.arg(arg=name)
                | ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.ClassDef(name=name)
                | ast.ExceptHandler(name=str() as name)
            ):
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
    calls = [node for tree in trees for node in sorted(ast.walk(tree), key=_get_end) if isinstance(node, ast.Call)]
    candidates = [call.func.id for call in calls if isinstance(call.func, ast.Name) and call.func.id in shared]
    return next((name for name in candidates if name not in _DATA_TYPES), candidates[0] if candidates else None)


def _get_end(node: ast.AST) -> tuple[int, int]:
    """Return where code ends: arguments before the call that they are for."""
    return getattr(node, "end_lineno", 0), getattr(node, "end_col_offset", 0)


def serve_candidate(source: str, questions: int, answers: int) -> None:
    """Run the program when the examiner is there, then answer calls until the examiner ends."""
    sys.set_int_max_str_digits(0)
    with contextlib.suppress(PeerClosedError):
        _Candidate(os.fdopen(questions, "rb"), os.fdopen(answers, "wb"), source).serve()


# Messages between the two processes: each has the other call a function. Plain data goes by value, other objects by number.
#
# What a candidate returns is plain data when it arrives: no class of its own comes along whose `==` could be true for everything.
# What it raises arrives as an exception that ends only the call: a StopIteration would end a `map` of the tests as if it were
# complete.

MAX_MESSAGE_BYTES = 64 << 20
MAX_ERROR_CHARS = 10_000
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
        self._objects: dict[int, Any] = {}  # by number; of this side, and proxies of the other side's. They stay alive
        self._numbers: dict[int, int] = {}  # of these, by id

    def request(self, function: Any, /, *arguments: Any, **keywords: Any) -> Any:
        """Have the other side call a function. Raises what it raises, or PeerClosedError."""
        has_raised, result = self._exchange(
            self._refer_to(function), self.encode(list(arguments)), self.encode(keywords)
        )
        if has_raised:
            raise result
        return result

    def _exchange(self, *call: Any) -> tuple[bool, Any]:
        """Return whether the other side's function has raised something, and what it has raised or returned."""
        self.send("call", *call)
        return self.serve()

    def serve(self) -> tuple[bool, Any]:
        """Answer the other side's calls until it answers this side's."""
        while True:
            match self.receive():
                case ["call", function, arguments, keywords]:
                    self._answer(function, arguments, keywords)
                case ["value", packed]:
                    return False, self.decode(packed)
                case ["raised", packed]:
                    return True, self.decode_error(packed)
                case _:
                    raise PeerClosedError("malformed message")

    def _answer(self, function: Any, arguments: Any, keywords: Any) -> None:
        try:
            result = self._get_object(function)(*self.decode(arguments), **self.decode(keywords))
            self.send("value", self.encode(result))
        except BaseException as error:
            self.send("raised", self.encode_error(error))

    def send(self, *message: Any) -> None:
        """Send a message. Raises ValueError where it is too long."""
        line = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        if len(line) > MAX_MESSAGE_BYTES:
            raise ValueError(f"a value of more than {MAX_MESSAGE_BYTES >> 20} MiB")
        self._sink.write(line)
        self._sink.flush()

    def receive(self) -> Any:
        """Return the next message. Raises PeerClosedError."""
        line = self._source.readline(MAX_MESSAGE_BYTES)
        if line[-1:] != b"\n":
            is_long = len(line) == MAX_MESSAGE_BYTES
            raise PeerClosedError("a message is too long" if is_long else "the candidate's process has ended")
        try:
            return json.loads(line)
        except (ValueError, RecursionError) as error:
            raise PeerClosedError("a message is not JSON") from error

    def encode(self, value: Any) -> Any:
        return encode_value(value, self._refer_to, arrays=self._arrays)

    def decode(self, packed: Any) -> Any:
        return decode_value(packed, self._get_object)

    def encode_error(self, error: BaseException) -> list[Any]:
        """Encode an exception as JSON: its classes, text, and [arguments, attributes]."""
        text, details = "", self.encode([[], {}])
        with contextlib.suppress(Exception):  # its own `__str__` may raise, and not all can be sent
            text = str(error)[:MAX_ERROR_CHARS]
            details = self.encode([[text], {}])
            attributes = {name: value for name, value in vars(error).items() if name[:2] != "__"}
            details = encode_value([list(error.args), attributes], self._refer_to)
        return [self._encode_classes(type(error)), text, details]

    def decode_error(self, packed: Any) -> Exception:
        """Return the exception for what `encode_error` made. Raises PeerClosedError."""
        match packed:
            case [[[_, str() as name], *_] as classes, str() as text, [_, _] as details]:
                kind = self._decode_classes(classes)
                arguments, attributes = self.decode(details)
                if kind is not RuntimeError or name == "RuntimeError":
                    with contextlib.suppress(Exception):
                        error = kind.__new__(kind, *arguments)
                        with contextlib.suppress(Exception):  # its constructor may take other arguments
                            error.__init__(*arguments)  # type: ignore[misc]
                        error.__dict__ |= {key: value for key, value in attributes.items() if isinstance(key, str)}
                        error.__dict__[_FOREIGN_TEXT] = text
                        return error
                return RuntimeError(f"{name}: {text}")
        raise PeerClosedError("malformed exception")

    def _refer_to(self, value: Any) -> Any:
        """Return the reference to an object that is not plain data."""
        if isinstance(value, type) and issubclass(value, BaseException):
            return {"classes": self._encode_classes(value)}
        return self._number(value)

    def _get_object(self, reference: Any) -> Any:
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
            self._add(next(self._next_numbers), value)
        return self._numbers[id(value)]

    def _add(self, number: int, value: Any) -> None:
        self._objects[number], self._numbers[id(value)] = value, number

    def _encode_classes(self, kind: type[BaseException]) -> list[list[Any]]:
        """Encode the classes of an exception, nearest first: [module, name] in the standard library, else [number, name]."""
        return [
            [str(each.__module__) if _is_stdlib(str(each.__module__)) else self._number(each), str(each.__name__)]
            for each in kind.__mro__
            if each is not BaseException and each is not object
        ]

    def _decode_classes(self, classes: Any) -> type[Exception]:
        """Return the class for what `_encode_classes` made; RuntimeError for one that affects the control flow."""
        kind: Any = None
        match classes:
            case [[str() as module, str() as name], *bases]:
                if module not in sys.modules:
                    return self._decode_classes(bases)
                if _is_stdlib(module) and module.partition(".")[0] not in _TEST_RUNNERS:
                    kind = getattr(sys.modules[module], name, None)
                    kind = kind if getattr(kind, "__module__", None) == module else None
            case [[int() as number, str() as name], *bases]:
                if number not in self._objects:
                    namespace = {"__module__": "solution", "__str__": _get_foreign_text}
                    self._add(number, type(name, (self._decode_classes(bases),), namespace))
                kind = self._objects[number]
            case [_, *_]:
                raise PeerClosedError("malformed exception")
        is_safe = isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, _CONTROL_FLOW)
        return kind if is_safe else RuntimeError


def _get_foreign_text(error: BaseException) -> str:
    return str(error.__dict__.get(_FOREIGN_TEXT, BaseException.__str__(error)))


def _is_stdlib(module: str) -> bool:
    return module.partition(".")[0] in sys.stdlib_module_names


# The examiner's side.

_SINGLE_ELEMENTS = 64  # elements of an iterator that are fetched one by one; after them many at once
_ELEMENTS_AT_ONCE = 1000


class UnfitTestError(TypeError):
    """A test needs something that cannot be sent between the two processes, whatever the program is."""


class _RemoteObject:
    """An object of the candidate's, in the examiner's process. It equals only itself."""

    def __init__(self, examiner: "_Examiner") -> None:
        self.__dict__["_examiner"] = examiner

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._examiner.request(self, *arguments, **keywords)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._examiner.request(getattr, self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._examiner.request(setattr, self, name, value)

    def __instancecheck__(self, instance: Any) -> bool:
        return self._examiner.request(isinstance, instance, self) is True

    def __iter__(self) -> Iterator[Any]:
        iterator = self._examiner.request(iter, self)
        for count in itertools.chain([1] * _SINGLE_ELEMENTS, itertools.repeat(_ELEMENTS_AT_ONCE)):
            has_more, elements = self._examiner.take(iterator, count)
            yield from elements
            if not has_more:
                return

    def __next__(self) -> Any:
        _, elements = self._examiner.take(self, 1)
        if not elements:
            raise StopIteration
        return elements[0]


class _Examiner(Connection):
    """The examiner's end."""

    def __init__(self, source: IO[bytes], sink: IO[bytes]) -> None:
        super().__init__(source, sink, itertools.count(-1, -1), arrays=True)
        self._callback_depth = 0  # calls of the tests' functions by the program
        self.num_requests = 0  # since the program has run
        self.raised: list[BaseException] = []  # by the program
        self.unfit = ""  # why no program can pass
        self.names = frozenset[str]()  # that the program defines
        self.failed = False  # the connection; from then on no test can pass, whatever it catches

    def start(self, *, arrays: bool) -> str:
        """Have the program run. Returns how it failed, or "". arrays: the tests use NumPy."""
        try:
            match self.request(self._get_object(0), arrays):
                case [list() as names, _RemoteObject() as module, _RemoteObject() as take]:
                    self.names = frozenset(name for name in names if isinstance(name, str))
                    self._module, self._take, self.num_requests = module, take, 0
                    return ""
                case str() as failure if failure:
                    return failure
        except Exception as error:
            return str(error) or type(error).__name__
        return "malformed message"

    def fetch(self, name: str) -> Any:
        """Return what the program's name is bound to now."""
        return self.request(getattr, self._module, name)

    def take(self, iterator: Any, count: int) -> tuple[bool, list[Any]]:
        """Return whether an iterator of the program's may have more elements, and at most `count` of them."""
        match self.request(self._take, iterator, count):
            case [bool() as has_more, list() as elements]:
                return has_more, elements
        raise PeerClosedError("not a list of elements")

    def receive(self) -> Any:
        *message, printed = super().receive()
        if printed:
            with contextlib.suppress(Exception):  # the tests may have replaced or closed it
                sys.stdout.write(str(printed))
        return message

    def _exchange(self, *call: Any) -> tuple[bool, Any]:
        self.num_requests += 1
        try:
            has_raised, result = super()._exchange(*call)
        except BaseException as error:  # only the program can be the cause
            self.failed = True
            raise PeerClosedError(str(error)) from error
        if has_raised:
            self.raised.append(result)
        return has_raised, result

    def _answer(self, function: Any, arguments: Any, keywords: Any) -> None:
        self._callback_depth += 1
        super()._answer(function, arguments, keywords)
        self._callback_depth -= 1

    def _get_object(self, reference: Any) -> Any:
        if isinstance(reference, int) and reference >= 0 and reference not in self._objects:
            self._add(reference, _RemoteObject(self))
        return super()._get_object(reference)

    def _refer_to(self, value: Any) -> Any:
        if isinstance(value, _RemoteObject) or (isinstance(value, type) and issubclass(value, BaseException)):
            return super()._refer_to(value)
        if name := _find_stdlib_name(value):
            return name  # so that `eval` is the program's, in its own process
        if isinstance(value, Iterator):
            take = self._refer_to(lambda: list(itertools.islice(value, 1)))
            return {"iterator": self._number(value), "take": take}
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
    """The candidate's end, with the program. The examiner's first call is of number 0, which runs it."""

    def __init__(self, source: IO[bytes], sink: IO[bytes], program: str) -> None:
        super().__init__(source, sink, itertools.count())
        self._late: dict[int, BaseException] = {}  # what iterators raised after elements that had to go first
        self._printed = _PrintedText()
        sys.stdout = io.TextIOWrapper(io.BufferedWriter(self._printed), "utf-8", "replace", write_through=True)
        self._number(functools.partial(self._run, program))

    def _run(self, program: str, arrays: bool) -> Any:
        """Run the program. Returns how it failed, or [the names that it defines, its module, `_take`]."""
        self._arrays = arrays
        module = sys.modules["solution"] = types.ModuleType("solution")
        try:
            exec(compile(program, "solution.py", "exec"), module.__dict__)
        except BaseException as error:
            return f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS]
        return [[name for name in module.__dict__ if not name.startswith("__")], module, self._take]

    def _take(self, iterator: Iterator[Any], count: int) -> list[Any]:
        """Return [whether there may be more, at most `count` elements]."""
        if id(iterator) in self._late:
            raise self._late.pop(id(iterator))
        elements: list[Any] = []
        try:
            while len(elements) < count:
                elements.append(next(iterator))
        except StopIteration:
            return [False, elements]
        except BaseException as error:
            if not elements:
                raise
            self._late[id(iterator)] = error
        return [True, elements]

    def send(self, *message: Any) -> None:
        """Send a message, and with it what has been printed."""
        with contextlib.suppress(Exception):  # the program may have replaced or closed it
            sys.stdout.flush()
        super().send(*message, self._printed.data.decode("utf-8", "replace"))
        self._printed.data.clear()

    def _get_object(self, reference: Any) -> Any:
        match reference:
            case [str() as module, str() as name]:  # of the standard library
                return operator.attrgetter(name)(importlib.import_module(module))
            case {"function": int() as number, "name": str() as name} if number not in self._objects:

                def function(*arguments: Any, **keywords: Any) -> Any:
                    return self.request(function, *arguments, **keywords)

                function.__name__ = function.__qualname__ = name
                self._add(number, function)
            case {"iterator": int() as number, "take": take} if number not in self._objects:
                self._add(number, _iterate(self._get_object(take)))
            case {"function": number} | {"iterator": number}:
                pass
            case _:
                return super()._get_object(reference)
        return self._objects[number]


def _iterate(take: Callable[[], list[Any]]) -> Iterator[Any]:
    while elements := take():
        yield from elements


class _PrintedText(io.RawIOBase):
    """Text that the program prints, for tests that look at it; only the beginning of very long text."""

    def __init__(self) -> None:
        self.data, self._left = bytearray(), _MAX_PRINTED

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        self.data += bytes(data[: self._left])
        self._left -= min(len(data), self._left)
        return len(data)


# Values as JSON: None, bools, numbers, text and lists as themselves, all else as {class: arguments of its constructor}.

_ARRAY_TYPES = re.compile(r"[<>|=][biufcSUMm]\d+(\[\d*\w+\])?")  # dtypes whose elements are data, as numpy spells them
_BUILTIN_TYPES = {
    kind.__name__: kind
    for kind in (bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict, type(None))
}
_DATA_TYPES = {*_BUILTIN_TYPES, "bytearray", "range", "slice"}
_BASES = (int, tuple, set, frozenset, dict, bytes, complex)  # what an object of a derived class arrives as
_MAX_NUMBER_BITS = 64  # of an integer in decimal digits; for long ones they take long


def encode_value(value: Any, refer_to: Callable[[Any], Any], *, arrays: bool = False) -> Any:
    """Encode a value as JSON.

    Args:
        refer_to: Returns the reference to an object that is not plain data, and stays with its owner.
        arrays: Encode NumPy arrays and numbers as such, instead of as lists and Python numbers.
    """

    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        dtype = value.dtype.str
        if arrays and _ARRAY_TYPES.fullmatch(dtype):
            shape = list(value.shape) if type(value).__name__ == "ndarray" else None
            return {"array": [dtype, shape, value.tobytes().hex()]}
        value = value.tolist()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int) and value.bit_length() <= _MAX_NUMBER_BITS:
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        return str(value)

    encode = functools.partial(encode_value, refer_to=refer_to, arrays=arrays)
    if isinstance(value, list):
        return list(map(encode, value))
    if isinstance(value, bytearray):
        value = bytes(value)
    kind = type(value)
    if isinstance(value, tuple) and isinstance(fields := getattr(kind, "_fields", None), tuple):
        return {"namedtuple": [kind.__name__, list(map(str, fields)), list(map(encode, value))]}
    if isinstance(value, type) and value.__module__ == "builtins" and value.__name__ in _BUILTIN_TYPES:
        return {"type": value.__name__}
    name = f"{kind.__module__}.{kind.__qualname__}"
    if name not in _ARGUMENTS:
        name = next((f"builtins.{base.__name__}" for base in _BASES if isinstance(value, base)), "")
    return {name: list(map(encode, _ARGUMENTS[name](value)))} if name else {"object": refer_to(value)}


# Constructor arguments that recreate a value, by its class in the standard library.
_ARGUMENTS: dict[str, Callable[[Any], Iterable[Any]]] = {
    "builtins.bytes": lambda value: (value.decode("latin-1"), "latin-1"),
    "builtins.complex": lambda value: (value.real, value.imag),
    "builtins.dict": lambda value: (list(map(list, value.items())),),
    "builtins.int": lambda value: (hex(value), 16),
    **dict.fromkeys(("builtins.tuple", "builtins.set", "builtins.frozenset"), lambda value: (list(value),)),
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
    if packed is None or isinstance(packed, (bool, int, float, str)):
        return packed
    decode = functools.partial(decode_value, get_object=get_object)
    try:
        match packed:
            case list():
                return list(map(decode, packed))
            case dict() if len(packed) == 1 and (name := next(iter(packed))) in _ARGUMENTS:
                module, _, kind = name.rpartition(".")
                return getattr(importlib.import_module(module), kind)(*map(decode, packed[name]))
            case {"object": reference}:
                return get_object(reference)
            case {"type": str() as name}:
                return _BUILTIN_TYPES[name]
            case {"namedtuple": [str() as name, list() as fields, list() as values]}:
                return namedtuple(name, fields, rename=True)(*map(decode, values))
            case {"array": [str() as dtype, None | list() as shape, str() as text]} if _ARRAY_TYPES.fullmatch(dtype):
                array = importlib.import_module("numpy").frombuffer(bytes.fromhex(text), dtype)
                return array[0] if shape is None else array.reshape(shape).copy()
    except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RecursionError, ImportError) as error:
        raise PeerClosedError("malformed value") from error
    raise PeerClosedError("malformed value")
