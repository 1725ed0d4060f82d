"""docs/reference/reliability.md: the promises of tests/faults.toml, each with its tests, and what the stress scripts counted."""

from __future__ import annotations

import ast
import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from pages.markdown import Data, block, load, page, table

COUNTED = {
    "kills": ("SIGKILL before and after each call of a save", "the previous checkpoint or this one is complete"),
    "errors": ("a disk error at each call of a save", "the same, and one error that says what is intact"),
    "flips": ("one flipped bit in a checkpoint", "the file is named and not loaded"),
    "supervised": (
        "SIGKILL of `sft` and `reward-model`",
        "weights, optimizer, metrics and files of a run never killed",
    ),
}
"""Fault and promise of each kind, as in tests/faults.toml."""


def counted_section(report: Data | None) -> str:
    """Write how often each fault was injected, and which promises broke."""
    head = "## Counted\n\nOn checkpoints of a PPO run of the embedded model, and on complete runs:"
    command = block("python scripts/stress_checkpoints.py", "sh")
    if report is None:
        return f"{head}\n\n{command}\n\nNot measured yet."
    rows = []
    for kind, (fault, promise) in COUNTED.items():
        if counts := report.get(kind):
            details = counts.get("kinds") or [f"{name} {n}" for name, n in counts.get("phases", {}).items()]
            suffix = f" ({', '.join(details)})" if details else ""
            rows.append((fault + suffix, promise, str(counts["count"]), str(len(counts["wrong"]))))
    wrong = [f"- **Broken:** {text}." for kind in COUNTED for text in report.get(kind, {}).get("wrong", ())]
    lines = [head, command, table(("fault", "promise", "times", "broken"), rows)]
    commands = dict.fromkeys(f"`{seen['made_by']}` ({seen['machine']})" for seen in report.values())
    source = f"Measured by {', '.join(commands)}. Kills of `policygrad train` are in the soak test below."
    return "\n\n".join([*lines, *(["\n".join(wrong)] if wrong else []), source])


def soak_section(report: Data | None, shorter: Data | None = None) -> str:
    """Write the results of the soak test, and below them those of a shorter one."""
    command = block("python scripts/stress_soak.py", "sh")
    head = (
        "## The soak test\n\nOne run that is never killed, the same run again with SIGKILL at random moments of every "
        "phase, and a "
        "comparison of all they wrote, bit for bit:"
    )
    command += (
        "\n\nIt can be split: with `--minutes 50` it ends with exit code 75 while work is left, and the same command "
        "continues it if "
        "the code is unchanged. With `--only watched` and `--only killed` in two terminals both runs proceed at once; "
        "the command "
        "without `--only` compares them."
    )
    if report is None:
        return f"{head}\n\n{command}\n\nNot measured yet."
    more = []
    if shorter is not None:
        second = f"python scripts/stress_soak.py --steps {shorter['steps']} --watch {shorter['looks_every']}"
        more = ["A shorter one:", block(second, "sh"), *_soak_results(shorter)]
    return "\n\n".join([head, command, *_soak_results(report), *_resource_table(report), *more])


def _soak_results(report: Data) -> list[str]:
    """Write how long the runs were, which phases the kills hit, and what differs between the runs."""
    lines = [
        f"{report['steps']:,} steps of `{report['command']}` (torch {report['versions']['torch']}; {report['machine']})."
    ]
    if "kills" in report:
        phases = ", ".join(f"{name} {count}" for name, count in report["phases"].items())
        lines.append(
            f"{report['kills']} kills ({phases}); the processes that a killed run had started were gone after at most "
            f"{report['slowest_to_be_gone']:.2f} s."
        )
    wrong = [f"- **Broken:** {text}." for text in report["broken"]]
    lines.append(
        "\n".join(wrong) or "Weights, optimizer, metrics, completions and files equal those of the run never killed."
    )
    return [*lines, *([report["remarks"]] if report.get("remarks") else [])]


def _resource_table(report: Data) -> list[str]:
    """Write the resources of the run never killed, from its first to its last fifth."""
    names = {"trainer_mib": "trainer, resident [MiB]", "workers_mib": "reward workers, resident [MiB]"}
    rows = [
        (
            names.get(name, name),
            *(f"{row[key]:.1f}".removesuffix(".0") for key in ("first", "last", "least", "largest")),
            f"{100 * row['apart']:.2f}",
        )
        for name, row in report.get("held", {}).items()
    ]
    few = "" if report.get("judged") else " (too few samples to judge a leak)"
    intro = (
        "Resources of the run never killed, without its first tenth: medians of the first and the last fifth, extremes, "
        "and the "
        f"spread of the medians of its fifths{few}:"
    )
    columns = ("", "first fifth", "last fifth", "minimum", "maximum", "spread [%]")
    return [intro, table(columns, rows)] if rows else []


def hosts_section(report: Data | None) -> str:
    """Write what a fault between two hosts does to a run, and what listens where."""
    head = (
        "## Several hosts\n\nHosts are network namespaces of one machine, on links that can be slow, lose packets or be cut "
        "(`scripts/hosts.py`). Two or three train together, and at the third step of five the fault strikes:"
    )
    command = block("sudo python scripts/measure_hosts.py", "sh")
    if report is None:
        return f"{head}\n\n{command}\n\nNot measured yet."
    wrong = [
        f"- **Broken:** {row.get('program', row.get('fault'))} ({row.get('kind', row.get('listens'))}): {text}."
        for part in ("faults", "listening")
        for row in report.get(part, ())
        for text in row["broken"]
    ]
    promise = (
        "A run that goes on, and one that has ended and was resumed, has the completions and the weights of a run without a fault, "
        "bit for bit: nothing was lost, nothing was sampled or trained with other weights. The hosts share a file system, by which "
        "weights reach an engine; names are those of `/etc/hosts`; a clock is shifted by a library in front of libc. Taken beside "
        "other work, which the times include. Which file meets a full disk first, and whether a sampler is cut off while it "
        "samples or while it is given weights, differs from run to run, and time and last words with it."
    )
    parts = [
        head + "\n\n" + command,
        promise + f" Measured on {report['machine']}, torch {report['versions']['torch']}.",
    ]
    if wrong:
        parts.append("\n".join(wrong))
    for kind in dict.fromkeys(row["kind"] for row in report.get("faults", ())):
        rows = [row for row in report["faults"] if row["kind"] == kind]
        parts.append(f"### {rows[0]['what'][0].upper()}{rows[0]['what'][1:]}")
        parts.append(table(("fault", "the run", "last words", "options"), [_describe_fault(row) for row in rows]))
    if rows := report.get("listening"):
        parts.append(
            "### What listens where\n\nBy `ss` on the host; another host, which has no key, tries every port. *Refused* is the "
            "connection; *closed* and *silent* are what it is answered to HTTP; *store*: it can write values into a store of "
            "torch, which the processes do not believe without their signature. **Ray without a token executes what a stranger "
            "sends** ([what to do](../scaling.md#what-the-processes-listen-at))."
        )
        columns = ("program", "listens at", "another host is answered")
        parts.append(table(columns, [(row["program"], row["listens"], row["answers"]) for row in rows]))
    return "\n\n".join(parts)


def _describe_fault(row: Data) -> tuple[str, ...]:
    end = "goes on" if row["went_on"] else f"ended after {row['seconds']:.0f} s; `--resume` went on"
    said = re.split(r"\. |: resume with |: see `|, during '", row["said"].replace("|", "/"))[0].removeprefix("error: ")
    return (
        row["fault"],
        end,
        f"`{said}`" if said and not row["went_on"] else "",
        f"`{row['options']}`" if row["options"] else "",
    )


TESTS = Path(__file__).resolve().parents[2] / "tests"

PROMISE = """A run that was stopped, was killed or has failed can be resumed, and nothing it had saved is lost. What cannot work is
refused before it costs anything, with a remedy. Faults during a run are reported and counted, or end the run in a state that can
be resumed. Files of other people (models, run folders, data, completions given to a reward) are read but never executed.

This is a register: a row has a fault, what is promised when it happens, and the tests that check it, without their `test_`. The
rows are in `tests/faults.toml`; `make lint` fails if such a test is renamed, removed or skipped, or loses the case that the row
is about."""

NOT = """## What is not promised

- **Networks.** The tests use namespaces of one machine, and no real network: models from the hub are downloaded by their own
  libraries. Locks on a network file system are as good as its server's.
- **GPUs.** These tests run on a CPU, also those of checks for GPUs. Resuming bit for bit holds on a CPU in fp32 only, with the same
  number of threads and the same torch.
- **Crafted files outside `checkpoints/`.** Logs and configuration in someone else's folder are parsed, and code they name needs
  permission (`--allow-code`); their other content is trusted.
- **Virtual machines.** Reward workers are processes: [what that isolates and what not](../isolation.md). A program that
  exploits the kernel also escapes [the sandbox](../isolation.md#programs-of-a-model)."""


class MissingTestError(SystemExit):
    """A row of tests/faults.toml has no test that checks it."""


@cache
def _module(file: Path) -> tuple[str, dict[str, ast.stmt]]:
    """Read a test module: (its text, its definitions by name)."""
    if not file.is_file():
        raise MissingTestError(f"tests/faults.toml: there is no {file.relative_to(TESTS.parent)}")
    text = file.read_text(encoding="utf-8")
    defined: dict[str, ast.stmt] = {}
    for node in ast.parse(text).body:
        names = [node.name] if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) else []
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]
        defined |= dict.fromkeys(names, node)
    return text, defined


def _source(text: str, node: ast.stmt) -> str:
    """The source of a definition, with its decorators, which contain the cases."""
    first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
    return "\n".join(text.split("\n")[first - 1 : node.end_lineno])


def _find_used(defined: dict[str, ast.stmt], name: str) -> set[str]:
    """Return a test and all definitions of its module that it uses, fixtures included."""
    used, new = set[str](), {name}
    while new:
        used |= new
        nodes = [node for name in new for node in ast.walk(defined[name])]
        inside = {node.id for node in nodes if isinstance(node, ast.Name)}
        new = ((inside | {node.arg for node in nodes if isinstance(node, ast.arg)}) & defined.keys()) - used
    return used


def find_test(test: str) -> tuple[Path, str]:
    """Return the file and name of `FILE::NAME` or `FILE::NAME[text]`.

    Raises:
        MissingTestError: there is no such test, it is skipped, or it does not contain the text.
    """
    path, _, selector = test.partition("::")
    name, _, case = selector.removesuffix("]").partition("[") if selector.endswith("]") else (selector, "", "")
    file = TESTS / path
    text, defined = _module(file)
    node = defined.get(name)
    if not name.startswith("test_") or not file.name.startswith("test_") or not isinstance(node, ast.FunctionDef):
        raise MissingTestError(f"tests/faults.toml: {path} has no test {name}")
    marks = {
        part.attr
        for decorator in node.decorator_list
        for part in ast.walk(decorator)
        if isinstance(part, ast.Attribute)
    }
    if marks & {"skip", "xfail"}:
        raise MissingTestError(
            f"tests/faults.toml: {path}::{name} is not run: {', '.join(sorted(marks & {'skip', 'xfail'}))}"
        )
    if case and not any(case in _source(text, defined[used]) for used in _find_used(defined, name)):
        raise MissingTestError(f"tests/faults.toml: {path}::{name} has no case with {case}")
    return file, name


def load_faults() -> list[dict[str, Any]]:
    """Read the items of tests/faults.toml, each {"title", "fault": [[fault, promise, test, …], …]}."""
    return list(tomllib.loads((TESTS / "faults.toml").read_text(encoding="utf-8"))["item"])


def _link(test: str) -> str:
    """Link the test's file, with its name."""
    file, name = find_test(test)
    return f"[`{name.removeprefix('test_')}`](../../tests/{file.relative_to(TESTS).as_posix()})"


def _fault_table(item: dict[str, Any]) -> str:
    rows = []
    for fault, promise, *tests in item["fault"]:
        if not tests:
            raise MissingTestError(f"tests/faults.toml: {fault!r} has no test")
        rows.append((fault, promise, ", ".join(map(_link, tests))))
    return table(("fault", "promise", "test"), rows)


def reliability_page(soak: Data | None = None, counts: Data | None = None) -> str:
    """Write the page, from the committed reports unless others are given."""
    sections = [f"## {number}. {item['title']}\n\n{_fault_table(item)}" for number, item in enumerate(load_faults(), 1)]
    measured = counted_section(counts or load("faults")), soak_section(soak or load("soak"), load("soak_short"))
    hosts = hosts_section(load("hosts"))
    return page("# What a run survives, and what it refuses", PROMISE, *sections, *measured, hosts, NOT)
