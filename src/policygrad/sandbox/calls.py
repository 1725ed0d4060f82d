"""A candidate and its examiner, each in a process of its own behind a wall: tests call functions that they cannot see into.

The candidate's process runs the program and answers calls; the examiner's runs the tests, on values that come as plain data
(`values.py`), and alone can reach the pipe on which the verdict goes to the parent. So a program finds neither the tests nor the
verdict: it can return what is right, or not. Standard library only.
"""

import ast
import builtins
import json
import os
import sys
import types
from collections.abc import Iterator
from typing import Any

from policygrad.sandbox.values import Gone, exception_of, pack, receive, send, unpack

_LONGEST = 100_000  # elements of an iterator that tests may go through
_TEXT = 300  # characters of a message


def serve(source: str, asks: int, answers: int) -> None:
    """The candidate's side: run the program, then do what is asked until nobody asks."""
    sys.set_int_max_str_digits(0)
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    kept: list[Any] = []

    def keep(value: Any) -> int:
        kept.append(value)
        return len(kept) - 1

    try:
        receive(asks)  # the examiner is there, and the clock runs
        exec(compile(source, "solution.py", "exec"), module.__dict__)
        names = [name for name in module.__dict__ if not name.startswith("__")]
        send(answers, ["names", names])
    except BaseException as error:
        send(answers, ["raised", type(error).__name__, str(error)[:_TEXT]])
        return
    while True:
        try:
            what, *rest = receive(asks)
        except Gone:
            return
        try:
            result = _do(what, rest, module, kept.__getitem__)
            message = ["value", pack(result, keep)]
        except BaseException as error:
            message = ["raised", type(error).__name__, str(error)[:_TEXT]]
        send(answers, message)


def _do(what: str, rest: list[Any], module: types.ModuleType, object_of: Any) -> Any:
    if what == "name":
        return _Held(getattr(module, rest[0]))
    target = object_of(rest[0])
    target = target.held if isinstance(target, _Held) else target
    if what == "attribute":
        return getattr(target, rest[1])
    if what == "elements":
        found = []
        for element in target:
            found.append(element)
            if len(found) > _LONGEST:
                raise OverflowError(f"more than {_LONGEST:,} elements")
        return found
    arguments = unpack(rest[1], lambda number: _bare(object_of(number)))
    named = unpack(rest[2], lambda number: _bare(object_of(number)))
    return target(*arguments, **named)


class _Held:
    """Something that goes by number even where it is plain data."""

    def __init__(self, held: Any) -> None:
        self.held = held


def _bare(value: Any) -> Any:
    return value.held if isinstance(value, _Held) else value


class _Remote:
    """Something of the candidate's, in the examiner's process. It equals only itself."""

    def __init__(self, link: "_Link", number: int) -> None:
        self.__dict__.update(_link=link, _number=number)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        values = [pack(value, self._link.number_of) for value in (list(arguments), named)]
        return self._link.ask("call", self._number, *values)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._link.ask("attribute", self._number, name)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._link.ask("elements", self._number))


class _Link:
    """The examiner's end of the two pipes."""

    def __init__(self, asks: int, answers: int) -> None:
        self._asks, self._answers = asks, answers
        self.names = frozenset[str]()
        self.gone = False  # and no test can be passed any more, whatever it catches

    def start(self) -> str | None:
        """Wait for the program to have run; what it raised, or None."""
        send(self._asks, ["start"])
        match receive(self._answers):
            case ["names", list() as names] if all(isinstance(name, str) for name in names):
                self.names = frozenset(names)
                return None
            case ["raised", str() as name, str() as text]:
                return f"{name}: {text}"
        raise Gone("it is no message")

    def ask(self, *what: Any) -> Any:
        try:
            send(self._asks, list(what))
            match receive(self._answers):
                case ["value", packed]:
                    return unpack(packed, lambda number: _Remote(self, number))
                case ["raised", str() as name, str() as text]:
                    raised = exception_of(name, text[:_TEXT])
                case _:
                    raise Gone("it is no message")
        except (Gone, OSError) as error:
            self.gone = True
            raise Gone(str(error)) from error
        raise raised

    def number_of(self, value: Any) -> int:
        if isinstance(value, _Remote):
            return int(value._number)
        raise TypeError(f"tests can give a candidate plain data, not {type(value).__name__}")


def examine(examination: dict[str, Any], asks: int, answers: int, verdict: int) -> None:
    """The examiner's side. examination: `setup`, run first; `tests`, each worth a point; `check`: of HumanEval, the function whose
    argument is the candidate's `entry`. The verdict is one point, 1 or 0, per test, and what went wrong first."""
    sys.set_int_max_str_digits(0)
    link = _Link(asks, answers)
    points, said = [], ""
    try:
        said = link.start() or ""
    except (Gone, OSError) as error:
        said = str(error)
    if not said:
        space: dict[str, Any] = {"__name__": "tests"}
        try:
            exec(examination["setup"], space)
            _bind(space, link, "\n".join(examination["tests"]), examination["entry"])
        except Exception as error:
            said = f"the tests' setup raised {type(error).__name__}: {error}"
        else:
            for test in examination["tests"]:
                try:
                    exec(compile(test, "tests.py", "exec"), space)
                    points.append(int(not link.gone))
                except (Exception, SystemExit) as error:
                    points.append(0)
                    said = said or _told(error, test)
    points += [0] * (len(examination["tests"]) - len(points))
    os.write(verdict, json.dumps([points, said[:_TEXT]]).encode())
    os._exit(0)


def _told(error: BaseException, test: str) -> str:
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return f"{text} in {test.strip()[:_TEXT]}"


def _bind(space: dict[str, Any], link: _Link, tests: str, entry: str | None) -> None:
    """Give the tests the candidate's functions by name.

    What tests mean by `len` or `math` is Python's, and what their setup defines theirs: a program cannot put its own in the place.
    Only where nothing else of the program's is called is a function of a built-in's name the program's (MBPP has such a `sum`).
    """
    used = [node.id for node in ast.walk(ast.parse(tests)) if isinstance(node, ast.Name)]
    wanted = dict.fromkeys([*([entry] if entry else []), *used])
    theirs = [name for name in wanted if name in link.names and (name == entry or name not in space)]
    own = [name for name in theirs if name == entry or not (hasattr(builtins, name) or name in sys.stdlib_module_names)]
    for name in wanted:
        if name in sys.stdlib_module_names and name not in space and name not in own:
            space[name] = __import__(name)
    for name in own or [name for name in theirs if hasattr(builtins, name)]:
        space[name] = link.ask("name", name)
    if entry and entry not in link.names:
        raise NameError(f"the program defines no {entry!r}")
