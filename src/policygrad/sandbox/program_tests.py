"""Tests of what a program prints for an input, or what its functions return. The verdict is made outside of its process."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass, replace
from decimal import Decimal

from policygrad.sandbox.backends import Limits, SandboxBackend, find_backend
from policygrad.sandbox.process import SandboxedProcess, run_program, wait_for_exit

_MAX_VERDICT = 1 << 20  # bytes


@dataclass(frozen=True)
class ProgramVerdict:
    """Points per test, 1.0 or 0.0, and the first failure."""

    points: tuple[float, ...]
    message: str = ""
    unfit: str = ""  # why no program can pass the tests, where that became apparent


@dataclass(frozen=True)
class FunctionTests:
    """Python statements that call a program's functions, such as `assert`."""

    tests: tuple[str, ...]  # each earns a point when it raises nothing
    setup: str = ""  # run before the tests, in their process; a program cannot replace what it defines
    entry: str | None = None
    """Name that the program has to define; the tests use the program's, whatever else has this name."""
    imports: bool = False
    """The program may use standard library names without importing them (added by rewards/code.py)."""


@dataclass(frozen=True)
class StdioTests:
    """Pairs of what a script reads from standard input, and what it has to print.

    Output is compared line by line, ignoring blanks at the ends, and numbers as numbers. imports: as in FunctionTests.
    """

    pairs: tuple[tuple[str, str], ...] = ()
    imports: bool = False


def run_function_tests(
    source: str,
    tests: FunctionTests,
    limits: Limits | None = None,
    backend: SandboxBackend | str = "auto",
    *,
    to_end: bool = True,
) -> ProgramVerdict:
    """Run the tests in one sandboxed process and the program in another, connected by pipes.

    Arguments and results are plain data: None, bool, numbers, text, bytes, lists, tuples, sets, dicts, the standard library's
    kinds of them (deque, Counter, Fraction, Decimal, dates), NumPy arrays. Functions of the tests are called in their process.
    Other objects stay with the program; tests can hand them back, read their attributes and iterate over them, and they equal
    only themselves.

    Args:
        to_end: Also run the tests after one that fails.

    Raises:
        ConfigError: No sandbox works here.
        SandboxError: A sandbox failed.
    """
    limits = limits or Limits()
    chosen = find_backend(backend) if isinstance(backend, str) else backend
    question_in, question_out, answer_in, answer_out = (*os.pipe(), *os.pipe())
    with contextlib.ExitStack() as ends:
        for end in (question_in, question_out, answer_in, answer_out):
            ends.callback(os.close, end)
        task = {"role": "candidate", "source": source, "pipes": [question_in, answer_out]}
        with SandboxedProcess(chosen, limits, task, {}, shared=(question_in, answer_out)) as candidate:
            examination = {"setup": tests.setup, "tests": list(tests.tests), "entry": tests.entry, "to_end": to_end}
            examine = {"role": "examiner", "examination": examination, "pipes": [question_out, answer_in]}
            outputs = {"verdict": _MAX_VERDICT}
            with SandboxedProcess(chosen, limits, examine, outputs, shared=(question_out, answer_in)) as examiner:
                ends.close()
                exceeded = wait_for_exit([candidate, examiner], limits.timeout)
    count = len(tests.tests)
    if exceeded:
        return ProgramVerdict((0.0,) * count, f"exceeded the {exceeded} limit")
    with contextlib.suppress(ValueError):
        match json.loads(examiner.pipes["verdict"].data):
            case [list() as points, str() as message, str() as unfit]:
                if len(points) == count and all(point in (0, 1) for point in points):
                    return ProgramVerdict(tuple(float(point) for point in points), message, unfit)
    return ProgramVerdict((0.0,) * count, "the tests ended without a verdict")


def run_stdio_tests(
    source: str,
    tests: StdioTests,
    limits: Limits | None = None,
    backend: SandboxBackend | str = "auto",
    *,
    to_end: bool = True,
) -> ProgramVerdict:
    """Run the script once for every input, within one timeout, and compare what it prints.

    The start of sandboxes and interpreters does not count. Arguments and errors as `run_function_tests`.
    """
    limits = limits or Limits()
    points, message, left = list[float](), "", limits.timeout
    for number, (given, expected) in enumerate(tests.pairs):
        if left <= 0:
            message = message or "exceeded the time limit"
            break
        max_output = max(limits.output, 2 * len(expected.encode()))  # the expected output is always allowed
        result = run_program(source, given, replace(limits, timeout=left, output=max_output), backend)
        left -= result.seconds
        correct = result.succeeded and compare_output(result.stdout, expected)
        points.append(float(correct))
        if not correct:
            failure = "it printed something else" if result.succeeded else result.summary
            message = message or f"input {number + 1}: {failure}"
            if not to_end:
                break
    return ProgramVerdict(tuple(points + [0.0] * (len(tests.pairs) - len(points))), message)


def compare_output(printed: str, expected: str) -> bool:
    """Return whether output is equal line by line, ignoring blanks at the ends of lines and empty lines at the end.

    A line of numbers is compared by their exact values: 2.50 is 2.5 (as in LiveCodeBench's checker,
    lcb_runner/evaluation/testing_util.py).
    """
    pairs = [[x.rstrip() for x in text.replace("\r\n", "\n").rstrip().split("\n")] for text in (printed, expected)]
    return len(pairs[0]) == len(pairs[1]) and all(
        a == b or ((numbers := _parse_numbers(b)) is not None and _parse_numbers(a) == numbers)
        for a, b in zip(*pairs, strict=True)
    )


def _parse_numbers(line: str) -> list[Decimal] | None:
    """Parse a line of numbers with one blank between them; None = something else, such as a NaN, which equals nothing."""
    try:
        values = [Decimal(word) for word in line.split(" ")]
    except ArithmeticError:
        return None
    return None if any(value.is_nan() for value in values) else values
