"""The plan of a comparison: rows, seeds, tuned values, the resulting runs, and the comparison's folder."""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

from policygrad.errors import RunError
from policygrad.utils.argv import merge_argv
from policygrad.utils.filesystem import read_json, write_atomically

PLAN_FILE = "plan.json"
FIRST_TUNING_SEED = 1000  # first seed of tuning runs; reported seeds begin at 0
LABEL_PATTERN = re.compile(r"[A-Za-z0-9_][\w.+-]*")  # valid labels of rows, which are names of folders
TUNABLE_OPTIONS = ("--lr", "--algorithm.update-rule.delta")
"""Options of train that can be tuned: the learning rate, or the size of a trust region."""


@dataclass(frozen=True, kw_only=True)
class RowDescription:
    """The name of a row and what a reader needs to know of it."""

    label: str
    algorithm: str  # name of the algorithm in the run
    tuned_option: str = ""  # the option tuned over a grid; empty if there is none, or the row's arguments set it
    settings: Mapping[str, Any] = field(default_factory=dict)  # updates per rollout, samples per prompt, …
    change: str = ""  # what it adds to the row before, in a ladder
    reason: str = ""  # reason for options that differ from the algorithm's defaults


@dataclass(frozen=True, kw_only=True)
class ComparisonRow(RowDescription):
    """One row of a comparison: arguments of `policygrad train` and their meaning."""

    argv: tuple[str, ...]  # the algorithm and its options, without what differs between runs
    grid: tuple[float, ...] = ()
    measure: Mapping[str, Any] = field(default_factory=dict)
    """What the evaluation score measures: rows that differ here are never compared by score."""

    @property
    def is_tuned(self) -> bool:
        return len(self.grid) > 1


@dataclass(frozen=True)
class Job:
    """One run."""

    row: str
    option_value: float | None  # value of the tuned option; None = the default
    seed: int

    @property
    def is_tuning(self) -> bool:
        """True if the run only serves to choose a value."""
        return self.seed >= FIRST_TUNING_SEED

    @property
    def folder(self) -> str:
        """Path in the comparison's folder."""
        value = "default" if self.option_value is None else f"{self.option_value:g}"
        return f"runs/{self.row}/{value}/seed-{self.seed}"

    def __str__(self) -> str:
        value = "" if self.option_value is None else f" at {self.option_value:g}"
        return f"{self.row}{value}, seed {self.seed}{' (tuning)' if self.is_tuning else ''}"


@dataclass(frozen=True)
class ComparisonPlan:
    """A comparison before any run."""

    rows: tuple[ComparisonRow, ...]
    tokens: int  # token budget of every run
    seeds: tuple[int, ...]
    tuning_seeds: tuple[int, ...]  # seeds of tuning runs, which are never reported
    command: str
    version: str
    ladder: Mapping[str, Any] = field(default_factory=dict)
    """Title, source and reason of the ladder, if the rows are one."""

    def row(self, label: str) -> ComparisonRow:
        return next(row for row in self.rows if row.label == label)

    def tuning_jobs(self) -> list[Job]:
        """List all tuning runs, ordered by seed so that all rows progress equally."""
        return [
            Job(row.label, value, seed)
            for seed in self.tuning_seeds
            for row in self.rows
            if row.is_tuned
            for value in row.grid
        ]

    def reported_jobs(self, chosen: Mapping[str, float | None]) -> list[Job]:
        """List the reported runs at the value chosen for each row, without rows that have none."""
        return [
            Job(row.label, chosen[row.label], seed) for seed in self.seeds for row in self.rows if row.label in chosen
        ]

    def all_jobs(self) -> Iterator[Job]:
        """Yield every possible run: each value of each grid on each seed."""
        for row in self.rows:
            for value in row.grid or (None,):
                yield from (Job(row.label, value, seed) for seed in (*self.seeds, *self.tuning_seeds))

    def train_argv(self, job: Job) -> tuple[str, ...]:
        """Return the arguments after `policygrad`."""
        row = self.row(job.row)
        tuned = () if job.option_value is None else (row.tuned_option, f"{job.option_value:g}")
        return ("train", *row.argv, *tuned, "--tokens", str(self.tokens), "--seed", str(job.seed))

    def to_dict(self) -> dict[str, Any]:
        return json.loads(json.dumps(asdict(self)))  # type: ignore[no-any-return]  # tuples as lists, as in a file

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ComparisonPlan:
        """Restore a plan, checking values that would otherwise change folders or command lines.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: The data is not a plan.
        """
        tuples = ("argv", "grid")
        each: list[dict[str, Any]] = [
            {k: tuple(v) if k in tuples else v for k, v in row.items()} for row in data["rows"]
        ]
        options: dict[str, Any] = {k: tuple(v) if k.endswith("seeds") else v for k, v in data.items() if k != "rows"}
        plan = cls(rows=tuple(ComparisonRow(**row) for row in each), **options)
        for row in plan.rows:
            if not (isinstance(row.label, str) and LABEL_PATTERN.fullmatch(row.label)):
                raise ValueError(f"the label {row.label!r} of a row must consist of letters, digits and . _ + -")
            if not (row.argv and all(isinstance(word, str) for word in row.argv)):
                raise ValueError(f"the row {row.label}: argv must be an algorithm and its options, not {row.argv!r}")
            if row.tuned_option not in ("", *TUNABLE_OPTIONS):
                names = " or ".join(TUNABLE_OPTIONS)
                raise ValueError(
                    f"the row {row.label}: tuned_option must be {names} or empty, not {row.tuned_option!r}"
                )
            if not all(type(x) in (int, float) and 0 < x < math.inf for x in row.grid):
                raise ValueError(f"the row {row.label}: grid must be numbers, not {row.grid!r}")
        if len({row.label for row in plan.rows}) < len(plan.rows):
            raise ValueError("two rows have the same label")
        if not all(type(number) is int and number >= 0 for number in (plan.tokens, *plan.seeds, *plan.tuning_seeds)):
            raise ValueError("tokens, seeds and tuning_seeds must be whole numbers of at least 0")
        return plan


def read_plan(folder: Path) -> ComparisonPlan:
    """Read the plan in a comparison's folder. Raises RunError without one."""
    path = folder / PLAN_FILE
    try:
        return ComparisonPlan.from_dict(read_json(path))
    except OSError as error:
        raise RunError(
            f"{folder} holds no comparison: {path} cannot be read ({error.strerror}); give the --output folder of a comparison"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{path} is not a plan of a comparison ({error}): use another folder, --output DIR") from error


def open_comparison(folder: Path, plan: ComparisonPlan) -> ComparisonPlan:
    """Start a comparison in a new folder, or continue the one in it, and return the plan to carry out.

    A plan may request more than the existing one: further rows, values or seeds. Finished runs are then reused.

    Raises:
        RunError: The folder holds another comparison (the message has the difference), or something else.
    """
    path = folder / PLAN_FILE
    if path.exists():
        existing, rows = read_plan(folder), {row.label: row for row in plan.rows}
        if [row.label for row in existing.rows] == [*rows]:
            differing = [f"the row {row.label}" for row in existing.rows if row != rows[row.label]]
        else:
            differing = ["the rows"]
        old, new = existing.to_dict(), plan.to_dict()
        differing += [n.replace("_", " ") for n in ("tokens", "seeds", "tuning_seeds", "ladder") if old[n] != new[n]]
        if not differing:
            return existing
        requests_more = (
            (existing.tokens, existing.ladder) == (plan.tokens, plan.ladder)
            and {*existing.seeds} <= {*plan.seeds}
            and {*existing.tuning_seeds} <= {*plan.tuning_seeds}
            and all(
                row.label in rows
                and {*row.grid} <= {*rows[row.label].grid}
                and replace(row, grid=rows[row.label].grid) == rows[row.label]
                for row in existing.rows
            )
        )
        if not requests_more:
            raise RunError(
                f"{folder} holds another comparison, which differs in {', '.join(differing)}: continue it with --resume {folder}, "
                "or use another folder, --output DIR"
            )
    elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RunError(f"{folder} is not empty and holds no comparison: use another folder, --output DIR")
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(plan.to_dict(), indent=1, ensure_ascii=False) + "\n")
    return plan


def next_comparison_folder(labels: Sequence[str], ladder: str | None) -> Path:
    """Return the next free folder comparisons/NAME-N."""
    name = f"{ladder}-ladder" if ladder else "-".join(labels) if len(labels) <= 4 else f"{len(labels)}-rows"
    folders = (Path("comparisons") / f"{name}-{number}" for number in count(1))
    return next(folder for folder in folders if not folder.exists())


@dataclass(frozen=True)
class Rung:
    """One row of a ladder."""

    label: str
    change: Sequence[str]  # options of `policygrad train` that it adds to the rung below, or changes
    description: str
    published: str = ""


@dataclass(frozen=True)
class Ladder:
    """An ablation: a method's parts, added one at a time in the order of its paper."""

    title: str
    source: str
    setting: Sequence[str]  # options shared by all rungs: a task on which the parts matter
    why: str  # reason for this setting, and its differences from the paper's
    base: str  # the algorithm of the first rung
    rungs: Sequence[Rung]

    def rows(self) -> list[tuple[str, tuple[str, ...], str]]:
        """Return (label, arguments of `policygrad train`, description) of every rung, including those below it."""
        argv: tuple[str, ...] = ()
        rows = []
        for rung in self.rungs:
            argv = merge_argv(argv, rung.change)
            figure = f"; published: {rung.published}" if rung.published else ""
            rows.append((rung.label, (self.base, *argv), rung.description + figure))
        return rows

    def to_dict(self) -> dict[str, Any]:
        return {"title": self.title, "source": self.source, "why": self.why}


@dataclass(frozen=True)
class Override:
    """Options of `policygrad train` that an algorithm needs on the embedded task, whose answers have about ten tokens."""

    options: Sequence[str]
    reason: str


_PRESETS = tomllib.loads(Path(__file__).with_name("presets.toml").read_text(encoding="utf-8"))
LADDERS: dict[str, Ladder] = {
    name: Ladder(**entry | {"rungs": [Rung(**rung) for rung in entry["rungs"]]})
    for name, entry in _PRESETS["ladders"].items()
}
OVERRIDES: dict[str, Override] = {name: Override(**entry) for name, entry in _PRESETS["overrides"].items()}
