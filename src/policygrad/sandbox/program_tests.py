"""Tests of a program: what it prints for an input, or what its functions return. The verdict is made where the program is not."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal

from policygrad.sandbox.backends import Limits, SandboxBackend, find_backend
from policygrad.sandbox.process import SandboxedProcess, run_program, wait_for_exit

_VERDICT = 1 << 20  # bytes


@dataclass(frozen=True)
class ProgramVerdict:
    """One point per test, 1.0 or 0.0, and what went wrong first. unfit: why no program can pass the tests, where that showed."""

    points: tuple[float, ...]
    message: str = ""
    unfit: str = ""


@dataclass(frozen=True)
class FunctionTests:
    """Python statements that call a program's functions, `assert` among them.

    tests: each is worth a point, which it has when it raises nothing. setup: run before them, in the tests' process; what it
    defines, a program cannot replace. entry: the name that has to be defined, and that is the program's whatever else has it.
    imports: the program need not import the standard library's names itself; who runs it sees to that (rewards/code.py).
    """

    tests: tuple[str, ...]
    setup: str = ""
    entry: str | None = None
    imports: bool = False


@dataclass(frozen=True)
class StdioTests:
    """What a script is given on its standard input, and what it is to print: equal line by line, but for blanks at the ends, and
    numbers as numbers. imports: as of an Examination."""

    pairs: tuple[tuple[str, str], ...] = field(default=())
    imports: bool = False


def run_function_tests(
    source: str,
    tests: FunctionTests,
    limits: Limits | None = None,
    backend: SandboxBackend | str = "auto",
    *,
    to_end: bool = True,
) -> ProgramVerdict:
    """Run the tests in one confined process and the program in another; they speak through pipes, in plain data.

    What a test gives and gets is plain data: None, bool, numbers, text, bytes, lists, tuples, sets, dicts, the standard library's
    kinds of them (deque, Counter, Fraction, Decimal, dates), NumPy's arrays. Functions that it gives are called where it is. Other
    objects stay with the program, can be given back to it, asked for attributes and gone through, and equal only themselves.
    to_end: run the tests behind one that fails, too. Raises ConfigError where no wall stands, SandboxError where one falls.
    """
    limits = limits or Limits()
    chosen = find_backend(backend) if isinstance(backend, str) else backend
    (asked, ask), (answer, answered) = os.pipe(), os.pipe()
    try:
        task = {"role": "candidate", "source": source, "pipes": [asked, answered]}
        with SandboxedProcess(chosen, limits, task, {}, shared=(asked, answered)) as candidate:
            questions = {"setup": tests.setup, "tests": list(tests.tests), "entry": tests.entry, "to_end": to_end}
            examiner = {"role": "examiner", "examination": questions, "pipes": [ask, answer]}
            with SandboxedProcess(chosen, limits, examiner, {"verdict": _VERDICT}, shared=(ask, answer)) as process:
                for descriptor in (asked, answered, ask, answer):
                    os.close(descriptor)
                asked = -1
                broken = wait_for_exit([candidate, process], limits.timeout)
                process.end()
                return _verdict(bytes(process.pipes["verdict"].data), len(tests.tests), broken)
    finally:
        if asked >= 0:
            for descriptor in (asked, answered, ask, answer):
                os.close(descriptor)


def run_stdio_tests(
    source: str,
    tests: StdioTests,
    limits: Limits | None = None,
    backend: SandboxBackend | str = "auto",
    *,
    to_end: bool = True,
) -> ProgramVerdict:
    """Run the script once for every input, with what is left of the time, and compare what it prints here, where it is not.

    What walls and interpreters need to stand is none of its time. to_end: run it for the inputs behind one that fails, too. Raises
    as `examine`.
    """
    limits = limits or Limits()
    points, said = list[float](), ""
    left = limits.timeout
    for number, (given, wanted) in enumerate(tests.pairs):
        if left <= 0:
            said = said or "more time than it may take"
            break
        most = max(limits.output, 2 * len(wanted.encode()))  # what it is to print, it may
        outcome = run_program(source, given, replace(limits, timeout=left, output=most), backend)
        left -= outcome.seconds
        right = outcome.succeeded and compare_output(outcome.stdout, wanted)
        points.append(float(right))
        if not right:
            why = "it printed something else" if outcome.succeeded else outcome.summary
            said = said or f"input {number + 1}: {why}"
            if not to_end:
                break
    return ProgramVerdict(tuple(points + [0.0] * (len(tests.pairs) - len(points))), said)


def compare_output(printed: str, wanted: str) -> bool:
    """Equal line by line, without blanks at the ends of lines and empty lines at the end. A line of numbers is equal by what they
    are, exactly: 2.50 is 2.5 (as LiveCodeBench's checker has it, lcb_runner/evaluation/testing_util.py)."""
    pairs = _lines(printed), _lines(wanted)
    return len(pairs[0]) == len(pairs[1]) and all(
        a == b or ((numbers := _numbers(b)) is not None and _numbers(a) == numbers) for a, b in zip(*pairs, strict=True)
    )


def _numbers(line: str) -> list[Decimal] | None:
    """The numbers that a line consists of, with one blank between them; None = it does not."""
    try:
        return [Decimal(word) for word in line.split(" ")]
    except ArithmeticError:
        return None


def _lines(text: str) -> Sequence[str]:
    lines = [line.rstrip() for line in text.replace("\r\n", "\n").split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _verdict(data: bytes, count: int, broken: str | None) -> ProgramVerdict:
    nothing = (0.0,) * count
    if broken:
        return ProgramVerdict(nothing, f"more {broken} than it may take")
    try:
        match json.loads(data):
            case [list() as points, str() as said, str() as unfit]:
                if len(points) == count and all(point in (0, 1) for point in points):
                    return ProgramVerdict(tuple(float(point) for point in points), said, unfit)
    except ValueError:
        pass
    return ProgramVerdict(nothing, "the tests ended without a verdict")
