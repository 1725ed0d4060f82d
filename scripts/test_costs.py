"""What each test costs in CPU seconds, its processes included: a pytest plugin, and the table of rooms and dearest tests.

    make suite ARGS='--costs FILE'             # the fast tier; writes FILE
    python -m pytest --costs FILE tests/core   # writes FILE
    python scripts/test_costs.py FILE          # prints it

CPU seconds and not seconds, since the machine may be busy. A process counts for the test during which it is waited for, so one that
a module's tests share counts for the last of them, and what it does when it is never waited for counts for none.
"""

from __future__ import annotations

import json
import resource
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

DEAREST = 20  # tests that the table lists
TOLERANCE = 1.5  # times the budget before the suite fails
_PROPERTY = "cpu_seconds"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("costs")
    group.addoption("--costs", type=Path, metavar="FILE", help="write the CPU seconds of each test to FILE (JSON)")
    group.addoption(
        "--budget",
        type=float,
        metavar="SECONDS",
        help=f"CPU seconds that all tests together should take; more than {TOLERANCE:g} times as many is a failure",
    )


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # the process that gathers xdist's reports, or the only one
        config.pluginmanager.register(_Costs(config), "costs of tests")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Remember what this process and those it has waited for had used when the test began."""
    item.stash[_BEGIN] = _cpu_seconds()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Add what was used since to each of a test's three reports: its setup, call and teardown."""
    report = yield
    now = _cpu_seconds()
    report.user_properties = [*report.user_properties, (_PROPERTY, now - item.stash[_BEGIN])]
    item.stash[_BEGIN] = now
    return report


_BEGIN = pytest.StashKey[float]()


class _Costs:
    """Gathers the costs of a session's tests, writes them, and fails a session that is far too dear."""

    def __init__(self, config: pytest.Config) -> None:
        self._costs: Counter[str] = Counter()
        self._path: Path | None = config.getoption("costs")
        self._budget: float | None = config.getoption("budget")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._costs[report.nodeid] += dict(report.user_properties).get(_PROPERTY, 0.0)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._path is not None:
            self._path.write_text(json.dumps(self._costs, indent=0))
        if self._is_exceeded() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self._budget is None:
            return
        total = self._costs.total()
        terminalreporter.write_line(f"{total / 60:.1f} CPU minutes of {self._budget / 60:.0f}")
        if self._is_exceeded():
            terminalreporter.write_line(
                f"--budget {self._budget:g}: the tests took {total:.0f} CPU seconds, more than {TOLERANCE:g} times as many. "
                "The dearest are below: make them cheaper, or mark them for the full tier (@pytest.mark.full).",
                red=True,
            )
            terminalreporter.write_line(format_costs(self._costs))

    def _is_exceeded(self) -> bool:
        return self._budget is not None and self._costs.total() > TOLERANCE * self._budget


def format_costs(costs: Mapping[str, float]) -> str:
    """Return the table: CPU seconds by room (a folder of `tests`), by file and by test, the dearest first."""
    rooms, files = Counter[str](), Counter[str]()
    for test, seconds in costs.items():
        file = test.split("::")[0]
        room, _, inner = file.removeprefix("tests/").partition("/")
        rooms[room if inner else "tests"] += seconds
        files[file] += seconds
    lines = [f"{sum(costs.values()):8.0f}  CPU seconds of {len(costs)} tests"]
    for title, counter, count in (("room", rooms, None), ("file", files, DEAREST), ("test", Counter(costs), DEAREST)):
        lines += [
            "",
            f"{'':8}  by {title}",
            *(f"{seconds:8.1f}  {name}" for name, seconds in counter.most_common(count)),
        ]
    return "\n".join(lines)


def _cpu_seconds() -> float:
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: test_costs.py FILE, which pytest --costs FILE has written")
    print(format_costs(json.loads(Path(sys.argv[1]).read_text())))
