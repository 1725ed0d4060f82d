"""Write forty small bugs to repair, forty others to be measured with, and conversations that show an agent at work.

    python make_tasks.py [FOLDER]

FOLDER (`repair-tasks`) gets

repository/           eighty small functions, all right, each in a file of its own; `./check` runs their tests, `./submit` ends
train.jsonl           forty bugs: the file, its text with one faulty line, and as the prompt that text and the test that fails
held-out.jsonl        forty bugs in the other forty functions
demonstrations.jsonl  repairs of further functions as the agent makes them, of which about one in three succeeds

Every run writes the same. A bug is a wrong operator, number, name or function, exchanged operands, or a missing return. The comment
below a function's name says what it should do.
"""

import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

TASKS, DEMONSTRATIONS = 40, 9000
"""Bugs of each of the two sets; conversations."""
NAMES = """
toll fare rent wage bill loan cash fund fee fine bond sale deal offer quote price crop bean seed farm barn mill herd flock ship
boat sail port dock pier crew cargo cask keg jar bowl plate spoon fork knife oven stove shelf rack hook nail screw bolt gear belt
chain wheel axle brake pedal lever knob dial gauge meter scale ruler chart graph map route road lane track trail bridge gate fence
wall roof floor stair door room hall attic lawn pond creek river lake shore dune cliff hill ridge slope field
"""
"""Of functions."""
PARAMETERS = {
    "numbers": "cost size rate paid left width depth count goal level speed load",
    "texts": "word text title label prefix suffix street city",
    "lists": "items values parts marks names cards coins days steps prices",
}
CALLS = 4  # of each function in its tests


@dataclass(frozen=True)
class Function:
    """A right function: its name, what it should do, its lines, and calls that test it."""

    name: str
    lines: tuple[str, ...]
    calls: tuple[tuple[Any, ...], ...]

    @property
    def file(self) -> str:
        return f"{self.name}.py"

    @property
    def text(self) -> str:
        return "\n".join(self.lines) + "\n"

    @property
    def body(self) -> str:
        """What makes it another function than one of another name."""
        return "\n".join(self.lines[1:])


@dataclass(frozen=True)
class Fault:
    """A function's line that is wrong in one way."""

    kind: str
    line: int
    text: str

    def put_in(self, function: Function) -> Function:
        lines = list(function.lines)
        lines[self.line] = self.text
        return replace(function, lines=tuple(lines))


# --- Functions --------------------------------------------------------------


def write_function(name: str, draw: Random) -> Function:
    """Return a function of one of the forms, with names and numbers that are drawn."""
    parameters, comment, body, calls = draw.choice(FORMS)(draw)
    lines = (f"def {name}({', '.join(parameters)}):", f"    # {comment}", *(f"    {line}" for line in body))
    return Function(name, lines, tuple(calls() for _ in range(CALLS)))


Form = tuple[list[str], str, list[str], Callable[[], tuple[Any, ...]]]
SIGNS = {"plus": "+", "minus": "-", "times": "*"}
COMPARISONS = {"above": ">", "below": "<", "at least": ">=", "at most": "<="}
ENDS = {"larger": "max", "smaller": "min"}
PLACES = {"first": "0", "second": "1", "last": "-1"}


def draw_names(kind: str, count: int, draw: Random) -> list[str]:
    """Return names of parameters."""
    return draw.sample(PARAMETERS[kind].split(), count)


def combine_two(draw: Random) -> Form:
    (a, b), (word, sign) = draw_names("numbers", 2, draw), draw.choice(list(SIGNS.items()))
    return [a, b], f"{a} {word} {b}", [f"return {a} {sign} {b}"], lambda: (draw.randrange(2, 10), draw.randrange(2, 10))


def combine_with_number(draw: Random) -> Form:
    (a, b), (word, sign), k = draw_names("numbers", 2, draw), draw.choice(list(SIGNS.items())), draw.randrange(2, 10)
    body = [f"return {a} {sign} {k}"]
    return [a, b], f"{a} {word} {k}", body, lambda: (draw.randrange(2, 10), draw.randrange(2, 10))


def combine_in_two_lines(draw: Random) -> Form:
    (a, b), (word, sign), k = draw_names("numbers", 2, draw), draw.choice(list(SIGNS.items())), draw.randrange(2, 10)
    body = [f"total = {a} * {k}", f"return total {sign} {b}"]
    return [a, b], f"{a} times {k}, {word} {b}", body, lambda: (draw.randrange(2, 10), draw.randrange(2, 10))


def compare(draw: Random) -> Form:
    (a, b), (word, sign) = draw_names("numbers", 2, draw), draw.choice(list(COMPARISONS.items()))
    pairs = iter([(3, 3), (2, 5), (6, 4), (7, 8)])
    return [a, b], f"is {a} {word} {b}", [f"return {a} {sign} {b}"], lambda: next(pairs)


def choose_end(draw: Random) -> Form:
    (a, b), (word, function) = draw_names("numbers", 2, draw), draw.choice(list(ENDS.items()))
    body = [f"return {function}({a}, {b})"]
    return [a, b], f"the {word} of {a} and {b}", body, lambda: tuple(draw.sample(range(10), 2))


def take_item(draw: Random) -> Form:
    (a,), (word, place) = draw_names("lists", 1, draw), draw.choice(list(PLACES.items()))
    return [a], f"the {word} of {a}", [f"return {a}[{place}]"], lambda: (draw.sample(range(10), 3),)


def list_numbers(draw: Random) -> Form:
    (a,), k = draw_names("numbers", 1, draw), draw.randrange(2, 10)
    return [a], f"numbers from {k} up to {a}", [f"return list(range({k}, {a} + 1))"], lambda: (k + draw.randrange(4),)


def join_texts(draw: Random) -> Form:
    a, b = draw_names("texts", 2, draw)
    return [a, b], f"{a} before {b}", [f"return {a} + {b}"], lambda: tuple(draw.sample("abcdefgh", 2))


FORMS = (
    combine_two,
    combine_with_number,
    combine_in_two_lines,
    compare,
    choose_end,
    take_item,
    list_numbers,
    join_texts,
)


# --- Faults -----------------------------------------------------------------


def find_faults(function: Function) -> list[Fault]:
    """Return every fault that can be put into a function's body, whether a test finds it or not."""
    parameters = function.lines[0].partition("(")[2].rstrip("):").split(", ")
    faults = [
        Fault(kind, number, text)
        for number, line in enumerate(function.lines)
        if number > 1
        for kind, text in change_line(line, parameters)
    ]
    return sorted(
        {fault.text: fault for fault in faults if fault.text != function.lines[fault.line]}.values(), key=repr
    )


def change_line(line: str, parameters: list[str]) -> Iterator[tuple[str, str]]:
    """Yield (kind, text) of what may be wrong with a line."""
    for signs in (SIGNS, COMPARISONS):
        for sign in signs.values():
            if f" {sign} " in line:
                yield from (("operator", line.replace(f" {sign} ", f" {other} ")) for other in signs.values())
    for match in re.finditer(r"-?\b\d\b", line):
        for other in (int(match[0]) - 1, int(match[0]) + 1):
            yield "number", f"{line[: match.start()]}{other}{line[match.end() :]}"
    if " + 1)" in line:
        yield "number", line.replace(" + 1)", ")")
    for match in re.finditer(r"\b[a-z]{4,}\b", line):
        if match[0] in parameters:
            yield from (("name", f"{line[: match.start()]}{other}{line[match.end() :]}") for other in parameters)
    if match := re.search(r"\b([a-z]+)( [-+*] | [<>]=? |, )([a-z]+)\b(?!\()", line):
        yield "order", f"{line[: match.start()]}{match[3]}{match[2]}{match[1]}{line[match.end() :]}"
    for function, other in (("max(", "min("), ("min(", "max(")):
        if function in line:
            yield "function", line.replace(function, other)
    if line.startswith("    return "):
        yield "missing return", line.replace("return ", "")


def run_calls(function: Function) -> list[str]:
    """Return what its calls give, as text; an exception by its name."""
    names, given = dict[str, Any](), list[str]()
    exec(function.text, names)
    for call in function.calls:
        try:
            given.append(repr(names[function.name](*call)))
        except Exception as error:
            given.append(type(error).__name__)
    return given


def find_failure(right: Function, faulty: Function) -> str:
    """Return what ./check says of a faulty function; "" if no test finds the fault."""
    for call, expected, given in zip(right.calls, run_calls(right), run_calls(faulty), strict=True):
        if expected != given:
            return f"{right.name}({', '.join(map(repr, call))}) gives {given}, not {expected}"
    return ""


def break_function(function: Function, draw: Random) -> tuple[Fault, Function] | None:
    """Return one of its faults that a test finds, each kind as often as another, with the faulty function; None = there is none."""
    found = [fault for fault in find_faults(function) if find_failure(function, fault.put_in(function))]
    if not found:
        return None
    kind = draw.choice(sorted({fault.kind for fault in found}))
    fault = draw.choice([fault for fault in found if fault.kind == kind])
    return fault, fault.put_in(function)


def describe(right: Function, faulty: Function) -> str:
    """Return the prompt: the faulty text with the numbers of its lines, and the test that fails."""
    lines = [f"{number} {line}" for number, line in enumerate(faulty.lines, start=1)]
    return "\n".join([*lines, find_failure(right, faulty)])


# --- Demonstrations ---------------------------------------------------------


SYSTEM, CHECK, SUBMIT, DONE, PASSED = "bash", "./check", "./submit", "done", "all tests pass"
RIGHT, CHECKS, GOES_ON, ATTEMPTS = 0.2, 0.4, 0.5, 3
"""Shares of attempts that are right, of those that are checked, and of failures after which it goes on; attempts at most."""


def write_repair(fault_line: int, text: str, file: str) -> str:
    """Return the command that replaces a line."""
    return f"sed -i '{fault_line + 1}c\\{text}' {file}"


def demonstrate(right: Function, fault: Fault, faulty: Function, draw: Random) -> list[dict[str, str]]:
    """Return the conversation of somebody who repairs a function without much care."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": describe(right, faulty)}]

    def say(command: str, answer: str = "") -> None:
        messages.append({"role": "assistant", "content": command})
        if answer:
            messages.append({"role": "user", "content": answer})

    others = [other for other in find_faults(right) if other.line == fault.line and other.text != fault.text]
    wrong = [other for other in others if find_failure(right, other.put_in(right))]
    for attempt in range(ATTEMPTS):
        is_right = draw.random() < RIGHT or not wrong
        text = right.lines[fault.line] if is_right else draw.choice(wrong).text
        say(write_repair(fault.line, text, right.file), DONE)
        if draw.random() >= CHECKS:
            break
        failure = find_failure(right, Fault("", fault.line, text).put_in(right))
        say(CHECK, failure or PASSED)
        if not failure or attempt == ATTEMPTS - 1 or draw.random() >= GOES_ON:
            break
    say(SUBMIT)
    return messages


# --- Files ------------------------------------------------------------------


CHECK_TEXT = "#!/bin/sh\nexec python3 -I -S tests/run.py\n"
SUBMIT_TEXT = "#!/bin/sh\necho COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n"


def make_bugs(names: list[str], known: set[str], draw: Random) -> list[tuple[Function, Fault, Function]]:
    """Return a bug for each name, in functions whose texts below the name are none of those that are known."""
    bugs = []
    for name in names:
        while True:
            function = write_function(name, draw)
            if function.body not in known and (broken := break_function(function, draw)):
                bugs.append((function, *broken))
                break
    return bugs


def write_repository(folder: Path, functions: list[Function]) -> None:
    """Write the functions, their tests, and the two programs."""
    (folder / "tests").mkdir(parents=True, exist_ok=True)
    for function in functions:
        (folder / function.file).write_text(function.text)
    cases = {f.name: list(zip(map(list, f.calls), run_calls(f), strict=True)) for f in functions}
    (folder / "tests" / "cases.json").write_text(json.dumps(cases, indent=0))
    (folder / "tests" / "run.py").write_text(Path(__file__).with_name("run_tests.py").read_text())
    for name, text in (("check", CHECK_TEXT), ("submit", SUBMIT_TEXT)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)


def write_rows(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main(folder: Path) -> None:
    """Write everything."""
    draw, known, bugs = Random(0), set[str](), []
    for name in draw.sample(NAMES.split(), 2 * TASKS):
        bugs += make_bugs([name], known, draw)
        known.add(bugs[-1][0].body)
    write_repository(folder / "repository", [right for right, _, _ in bugs])
    rows = [
        {"prompt": describe(right, faulty), "kind": fault.kind, "file": right.file, "text": faulty.text}
        for right, fault, faulty in bugs
    ]
    write_rows(folder / "train.jsonl", rows[:TASKS])
    write_rows(folder / "held-out.jsonl", rows[TASKS:])
    shown = make_bugs(draw.choices(NAMES.split(), k=DEMONSTRATIONS), known, draw)
    write_rows(folder / "demonstrations.jsonl", [{"messages": demonstrate(*bug, draw)} for bug in shown])


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "repair-tasks"))
