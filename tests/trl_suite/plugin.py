"""Run TRL's own tests against `policygrad.trl`: `import trl` is ours, the hub is a folder, and a table says what became of each.

    cd FOLDER && python -m pytest -p trl_suite.plugin CHECKOUT/tests/test_grpo_trainer.py [--trl-real] [--trl-table FILE]

FOLDER is what fixtures.py has made; `make test-trl TRL=CHECKOUT` does all of it. With `--trl-real`, `import trl` is TRL: how
many of its tests these fixtures let pass at all. The table, Markdown in FILE.md and JSON in FILE.json, has a row for each test
function: what its cases came to, and why those that do not pass do not. Tests that are declared out of scope in reasons.toml run
as well, and do not fail the run.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

REAL, TABLE = "--trl-real", "--trl-table"
REASONS = Path(__file__).with_name("reasons.toml")
OURS = "policygrad.trl"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("trl", "TRL's tests against policygrad.trl")
    group.addoption(REAL, action="store_true", help="test TRL itself: the fixtures' yardstick")
    group.addoption(TABLE, default="trl-tests", metavar="FILE", help="where the table goes, without .md and .json")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Keep transformers and `datasets`, which a conftest imports, from asking a hub; what they keep lies beside the fixtures."""
    os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TRANSFORMERS_OFFLINE="1", WANDB_MODE="disabled")
    os.environ.setdefault("HF_HOME", str(Path.cwd() / ".cache"))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption(REAL):
        replace_trl()
    if not hasattr(config, "workerinput"):  # xdist's workers report to one
        config.pluginmanager.register(Recorder(config), "trl-recorder")


# `import trl`


class Alias(ModuleType):
    """A module of TRL's whose names are those of one of ours, looked up when they are asked for."""

    def __init__(self, name: str, source: str = OURS) -> None:
        super().__init__(name)
        self._source = source

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return getattr(importlib.import_module(self._source), name)
        except AttributeError:
            raise ImportError(f"{self._source} has no {name!r}, which TRL has as {self.__name__}.{name}") from None


TRAINERS = ("grpo_config", "grpo_trainer", "rloo_config", "rloo_trainer")
INSTALLED = ("harbor", "jmespath", "joblib", "math_verify", "mergekit", "openreward")
ABSENT = ("liger_kernel", "vllm")
"""What ours never uses in a trainer's process, installed or not: tests that need it are those of TRL's use of it."""


def replace_trl() -> None:
    """Put aliases where TRL's modules would be."""
    modules = {name: Alias(name) for name in ("trl", "trl.trainer", *(f"trl.trainer.{name}" for name in TRAINERS))}
    modules["trl.trainer.base_config"] = Alias("trl.trainer.base_config", f"{OURS}.config")
    modules["trl.import_utils"] = availability = ModuleType("trl.import_utils")
    for package in INSTALLED:
        setattr(availability, f"is_{package}_available", lambda package=package: find_spec(package) is not None)
    for package in ABSENT:
        setattr(availability, f"is_{package}_available", lambda min_version=None: False)
    for name, module in modules.items():
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
    sys.modules.update(modules)


# What becomes of each test

NEEDS = {
    "test requires liger-kernel": "needs Liger",
    "test requires vllm": "needs vLLM",
    "test requires accelerator": "needs a GPU",
    "test requires bitsandbytes": "needs bitsandbytes",
}
PRIVATE = re.compile(r"Trainer\b.*(?:does not have the attribute|has no attribute) '(_[a-z]\w*)'")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let tests that are declared out of scope run without failing the run."""
    declared = {} if config.getoption(REAL) else read_reasons("out_of_scope")
    for item in items:
        reason = find_reason(name_function(item.nodeid)[1], declared)
        if reason:
            item.add_marker(pytest.mark.xfail(reason=reason, strict=False))


@dataclass
class Function:
    """A test function: what its cases came to, and why those that did not pass did not."""

    file: str
    name: str
    cases: dict[str, str] = field(default_factory=dict)  # by the parameters' text, which is empty without any
    reasons: dict[str, str] = field(default_factory=dict)
    line: int = 0
    note: str = ""
    seconds: float = 0.0

    def outcome(self) -> str:
        """Return failed if a case did, passed if one did and none failed, else declared (out of scope) or skipped."""
        return next((o for o in ("failed", "passed", "declared") if o in self.cases.values()), "skipped")


class Recorder:
    """Collects reports, and writes the table at the end."""

    def __init__(self, config: pytest.Config) -> None:
        self.functions: dict[tuple[str, str], Function] = {}
        self.table = Path(config.getoption(TABLE)).absolute()
        self.declared = {} if config.getoption(REAL) else read_reasons("out_of_scope")
        self.of_others = read_reasons("of_others")
        self.version = read_version(config)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file, name, case = name_function(report.nodeid)
        function = self.functions.setdefault((file, name), Function(file, name, line=report.location[1] or 0))
        function.note = find_reason(name, self.of_others)
        function.seconds = round(function.seconds + report.duration, 2)
        if report.when == "teardown":  # a run of an hour that is ended early leaves what it has seen
            self.write_table()
        if report.when != "call" and report.outcome == "passed":
            return
        function.cases[case] = report.outcome
        if report.outcome != "passed":
            function.reasons[case] = explain(report)
        if report.skipped and find_reason(name, self.declared) and hasattr(report, "wasxfail"):
            function.cases[case] = "declared"

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note a file that cannot be imported, none of whose tests is known."""
        if report.failed:
            file = name_function(report.nodeid)[0]
            reason = f"fails: {str(report.longrepr).strip().splitlines()[-1].removeprefix('E').strip()[:300]}"
            self.functions[file, "import"] = Function(file, "import", {"": "failed"}, {"": reason})

    def pytest_sessionfinish(self) -> None:
        self.write_table()

    def write_table(self) -> None:
        functions = sorted(self.functions.values(), key=lambda function: (function.file, function.line))
        rows = [{**asdict(function), "outcome": function.outcome()} for function in functions]
        found = {"version": self.version, "date": f"{date.today()}", "functions": rows}
        Path(f"{self.table}.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        Path(f"{self.table}.md").write_text("\n".join(list_rows(functions)) + "\n", encoding="utf-8")

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.write_line(summarise(self.functions.values()))
        terminalreporter.write_line(f"{self.table}.md says which, and why the others do not")


def read_version(config: pytest.Config) -> str:
    """Return the version of the checkout whose tests are run."""
    for argument in config.args:
        file = Path(argument.partition("::")[0]).absolute().parents[1] / "VERSION"
        if file.is_file():
            return file.read_text(encoding="utf-8").strip()
    return "of an unknown version"


def name_function(nodeid: str) -> tuple[str, str, str]:
    """Return file, Class.function and case of a test."""
    file, _, rest = nodeid.partition("::")
    name, _, case = rest.partition("[")
    return Path(file).name, name.replace("::", "."), case.removesuffix("]")


def read_reasons(kind: str) -> dict[str, str]:
    return tomllib.loads(REASONS.read_text(encoding="utf-8")).get(kind, {})


def find_reason(name: str, reasons: Mapping[str, str]) -> str:
    """Return the reason that is declared for a function or its class; "" without one."""
    return reasons.get(name) or reasons.get(name.partition(".")[0], "")


def explain(report: pytest.TestReport) -> str:
    """Say in some words why a case did not pass."""
    if hasattr(report, "wasxfail"):
        return report.wasxfail or "expected to fail by TRL"
    if report.skipped:
        reason = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr).removeprefix(
            "Skipped: "
        )
        return NEEDS.get(reason, f"skipped by TRL itself: {reason}")
    crash = getattr(report.longrepr, "reprcrash", None)
    message = str(crash.message if crash is not None else report.longrepr)
    private = PRIVATE.search(message)
    if private is not None:
        return f"uses a private name of TRL's ({private[1]})"
    return f"fails: {message.splitlines()[0][:300] if message else 'no message'}"


def list_rows(functions: Iterable[Function]) -> Iterator[str]:
    functions = list(functions)
    yield from [
        summarise(functions),
        "",
        "| file | test | cases | outcome | seconds | why |",
        "| --- | --- | --- | --- | ---: | --- |",
    ]
    for function in functions:
        counts = Counter(function.cases.values())
        cases = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
        why = [function.note] if function.note else []
        for reason, count in Counter(function.reasons.values()).items():
            why.append(reason if count == len(function.cases) else f"{reason} ({count})")
        text = "; ".join(why).replace("|", "\\|")
        yield f"| {function.file} | {function.name} | {cases} | {function.outcome()} | {function.seconds:.1f} | {text} |"


def summarise(functions: Iterable[Function]) -> str:
    counts = Counter(function.outcome() for function in functions)
    parts = [f"{counts[outcome]} {text}" for outcome, text in OUTCOMES.items() if counts[outcome]]
    return f"Of {sum(counts.values())} test functions {', '.join(parts) or 'none ran'}."


OUTCOMES = {
    "passed": "pass in every case that runs here",
    "failed": "fail",
    "declared": "are out of scope (reasons.toml)",
    "skipped": "need what is not here",
}
