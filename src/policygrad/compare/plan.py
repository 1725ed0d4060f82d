"""What is compared: rows, seeds, learning rates, the runs that follow from them, and the folder that holds it all."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from policygrad.errors import RunError
from policygrad.utils.filesystem import read_json, write_atomically

PLAN_FILE = "plan.json"
FIRST_TUNING_SEED = 1000
"""The first of the seeds that learning rates are chosen on; the reported ones begin at 0."""
LABEL_PATTERN = re.compile(r"[A-Za-z0-9_][\w.+-]*")
"""Of a row: it names a folder in the comparison's."""
TUNABLE_OPTIONS = ("--lr", "--algorithm.update-rule.delta")
"""Options of train that a grid may be of: the learning rate, or how far a trust region reaches."""


@dataclass(frozen=True)
class ComparisonRow:
    """One of those that are compared: words of `policygrad train`, and what they come to."""

    label: str
    argv: tuple[str, ...]
    """The algorithm and its options, without what differs from run to run."""
    algorithm: str
    """Its name, as the run calls it."""
    tuned_option: str = ""
    """The option that is tuned; empty where there is none, or the words set it."""
    grid: tuple[float, ...] = ()
    """The knob's values; of one there is nothing to choose."""
    measure: Mapping[str, Any] = field(default_factory=dict)
    """What its held-out score is of: rows that differ here are never compared by score."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What a reader of a comparison has to know besides: updates per rollout, samples per prompt, …"""
    change: str = ""
    """What it adds to the row before, on a ladder."""
    reason: str = ""
    """Why its options are not the algorithm's own, where they were chosen for it."""

    @property
    def is_tuned(self) -> bool:
        return len(self.grid) > 1


@dataclass(frozen=True)
class Job:
    """One run."""

    row: str
    option_value: float | None
    """Of the row's knob; None = the default."""
    seed: int

    @property
    def is_tuning(self) -> bool:
        """Whether it serves the choice of a value alone."""
        return self.seed >= FIRST_TUNING_SEED

    @property
    def folder(self) -> str:
        """Where it lies in the comparison's folder."""
        return (
            f"runs/{self.row}/{'default' if self.option_value is None else f'{self.option_value:g}'}/seed-{self.seed}"
        )

    def __str__(self) -> str:
        value = "" if self.option_value is None else f" at {self.option_value:g}"
        return f"{self.row}{value}, seed {self.seed}{' (tuning)' if self.is_tuning else ''}"


@dataclass(frozen=True)
class ComparisonPlan:
    """A comparison, before anything has run."""

    rows: tuple[ComparisonRow, ...]
    tokens: int
    """Sampled tokens of every run, its budget."""
    seeds: tuple[int, ...]
    """Reported."""
    tuning_seeds: tuple[int, ...]
    """On which values of the grid are compared; never reported."""
    command: str
    """What was typed."""
    version: str
    ladder: Mapping[str, Any] = field(default_factory=dict)
    """Of which method, and why so, where the rows are a ladder's."""

    def row(self, label: str) -> ComparisonRow:
        return next(row for row in self.rows if row.label == label)

    def tuning_jobs(self) -> list[Job]:
        """Every value of every grid on the tuning seeds; seed by seed, so that all rows get on alike."""
        return [
            Job(row.label, value, seed)
            for seed in self.tuning_seeds
            for row in self.rows
            if row.is_tuned
            for value in row.grid
        ]

    def reported_jobs(self, chosen: Mapping[str, float | None]) -> list[Job]:
        """The runs that are reported, at the value chosen for each row; rows without one are left out."""
        return [
            Job(row.label, chosen[row.label], seed) for seed in self.seeds for row in self.rows if row.label in chosen
        ]

    def all_jobs(self) -> Iterator[Job]:
        """Every run there may be: at each value of each grid, on each seed."""
        for row in self.rows:
            for value in row.grid or (None,):
                yield from (Job(row.label, value, seed) for seed in (*self.seeds, *self.tuning_seeds))

    def train_argv(self, job: Job) -> tuple[str, ...]:
        """What follows `policygrad`."""
        row = self.row(job.row)
        tuned = () if job.option_value is None else (row.tuned_option, f"{job.option_value:g}")
        return ("train", *row.argv, *tuned, "--tokens", str(self.tokens), "--seed", str(job.seed))

    def to_dict(self) -> dict[str, Any]:
        return json.loads(json.dumps(asdict(self)))  # type: ignore[no-any-return]  # tuples as lists, as a file gives them

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ComparisonPlan:
        """Raises KeyError, TypeError, ValueError or AttributeError for what is no plan."""
        each: list[dict[str, Any]] = [
            {k: tuple(v) if k in ("argv", "grid") else v for k, v in row.items()} for row in data["rows"]
        ]
        rows = tuple(ComparisonRow(**row) for row in each)
        fields_: dict[str, Any] = {k: tuple(v) if k.endswith("seeds") else v for k, v in data.items() if k != "rows"}
        plan = cls(rows=rows, **fields_)
        _check_values(plan)
        return plan


def read_plan(folder: Path) -> ComparisonPlan:
    """The plan in a comparison's folder. Raises RunError where there is none."""
    path = folder / PLAN_FILE
    try:
        return ComparisonPlan.from_dict(read_json(path))
    except OSError as error:
        raise RunError(
            f"{folder} holds no comparison, {path} cannot be read ({error.strerror}): a comparison's folder is what --output named"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{path} is no plan of a comparison ({error}): take another folder, --output DIR") from error


def _check_values(plan: ComparisonPlan) -> None:
    """Raises ValueError for values of a plan.json that would name another folder, or become other words of a command line."""
    for row in plan.rows:
        if not (isinstance(row.label, str) and LABEL_PATTERN.fullmatch(row.label)):
            raise ValueError(f"the label {row.label!r} of a row: letters, digits and . _ + - make one")
        if not (row.argv and all(isinstance(word, str) for word in row.argv)):
            raise ValueError(f"the row {row.label}: words must be an algorithm and its options, not {row.argv!r}")
        if row.tuned_option not in ("", *TUNABLE_OPTIONS):
            raise ValueError(
                f"the row {row.label}: knob must be {' or '.join(TUNABLE_OPTIONS)}, or empty, not {row.tuned_option!r}"
            )
        if not all(_is_number(value) for value in row.grid):
            raise ValueError(f"the row {row.label}: grid must be numbers, not {row.grid!r}")
    if len({row.label for row in plan.rows}) < len(plan.rows):
        raise ValueError("two rows have the same label")
    if not all(type(number) is int and number >= 0 for number in (plan.tokens, *plan.seeds, *plan.tuning_seeds)):
        raise ValueError("tokens, seeds and tuning_seeds must be whole numbers of at least 0")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def open_comparison(folder: Path, plan: ComparisonPlan) -> ComparisonPlan:
    """Begins a comparison in a new folder, or goes on with the one there, if it is the same or asks for more: further rows, values
    of a grid, or seeds, for which the runs that are there count. Returns the plan that counts.

    Raises:
        RunError: another comparison is in it, with what differs, or something else is.
    """
    if (folder / PLAN_FILE).exists():
        existing = read_plan(folder)
        if (differ := _differ(existing, plan)) and _requests_more(existing, plan):
            write_atomically(folder / PLAN_FILE, json.dumps(plan.to_dict(), indent=1, ensure_ascii=False) + "\n")
            return plan
        if differ:
            raise RunError(
                f"{folder} holds another comparison, they differ in {', '.join(differ)}: go on with it by --resume {folder}, or "
                "take another folder, --output DIR"
            )
        return existing
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RunError(f"{folder} is not empty and holds no comparison: take another folder, --output DIR")
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / PLAN_FILE, json.dumps(plan.to_dict(), indent=1, ensure_ascii=False) + "\n")
    return plan


def next_comparison_folder(labels: Sequence[str], ladder: str | None) -> Path:
    """comparisons/NAME-N, the next free one."""
    name = f"{ladder}-ladder" if ladder else "-".join(labels) if len(labels) <= 4 else f"{len(labels)}-rows"
    number = 1
    while (folder := Path("comparisons") / f"{name}-{number}").exists():
        number += 1
    return folder


def _differ(existing: ComparisonPlan, plan: ComparisonPlan) -> list[str]:
    """Names of the fields in which two plans differ, the words of the command and the version aside."""
    names = [f.name for f in fields(ComparisonPlan) if f.name not in ("command", "version", "rows")]
    old, new = existing.to_dict(), plan.to_dict()
    differing = [name.replace("_", " ") for name in names if old[name] != new[name]]
    if [row.label for row in existing.rows] != [row.label for row in plan.rows]:
        return ["the rows", *differing]
    return [*(f"the row {a.label}" for a, b in _pairs(existing.rows, plan.rows) if asdict(a) != asdict(b)), *differing]


def _requests_more(existing: ComparisonPlan, plan: ComparisonPlan) -> bool:
    """Whether a run of either plan is the same run in both, and `plan` has all of those of `there`."""
    rows = {row.label: row for row in plan.rows}
    common = [replace(row, grid=rows[row.label].grid) for row in existing.rows if row.label in rows]
    more = all({*row.grid} <= {*rows[row.label].grid} for row in existing.rows if row.label in rows)
    seeds = all({*getattr(existing, name)} <= {*getattr(plan, name)} for name in ("seeds", "tuning_seeds"))
    same = existing.tokens == plan.tokens and existing.ladder == plan.ladder and len(common) == len(existing.rows)
    return more and seeds and same and all(asdict(row) == asdict(rows[row.label]) for row in common)


def _pairs(old: Iterable[ComparisonRow], new: Iterable[ComparisonRow]) -> Iterable[tuple[ComparisonRow, ComparisonRow]]:
    return zip(old, new, strict=True)


# Command-line words as layers: what a later layer says of an option replaces what an earlier one said.


def iter_options(argv: Sequence[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(option, its words with the option first) of words that begin with an option; "" for words before the first one."""
    current: list[str] = []
    for word in argv:
        if word.startswith("--") and current:
            yield option_name(current[0]), tuple(current)
            current = []
        current.append(word)
    if current:
        yield option_name(current[0]), tuple(current)


def option_name(word: str) -> str:
    """`--max_tokens=5` -> `--max-tokens`; "" for a word that is no option."""
    return word.partition("=")[0].replace("_", "-") if word.startswith("--") else ""


def option_names(argv: Sequence[str]) -> set[str]:
    """Every option that the words set."""
    return {option for option, _ in iter_options(argv) if option}


def option_values(argv: Sequence[str], option: str) -> list[str]:
    """All that the words give an option, wherever they do."""
    given = [held for name_, held in iter_options(argv) if name_ == option]
    return [word for held in given for word in (held[0].partition("=")[2], *held[1:]) if word]


def merge_argv(*layers: Sequence[str]) -> tuple[str, ...]:
    """All layers as one; an option stands where it was first named, with the last one's words."""
    merged: dict[str, tuple[str, ...]] = {}
    for layer in layers:
        for option, argv in iter_options(layer):
            merged[option] = argv
    return tuple(word for argv in merged.values() for word in argv)


# Ladders: a method taken apart, its parts added one at a time in the order in which its paper did.


@dataclass(frozen=True)
class Rung:
    """A row of a ladder."""

    label: str
    change: tuple[str, ...]
    """Options of `policygrad train` that it adds to the rung below, or sets anew."""
    description: str
    """What it adds, in words."""
    published: str = ""
    """The figure that the paper gives for it."""


@dataclass(frozen=True)
class Ladder:
    """A method's parts in order."""

    title: str
    source: str
    setting: tuple[str, ...]
    """Options that all rungs share: a task on which the parts matter."""
    why: str
    """Why this setting, and in what it differs from the paper's."""
    base: str
    """The algorithm that the ladder stands on."""
    rungs: tuple[Rung, ...]

    def rows(self) -> list[tuple[str, tuple[str, ...], str]]:
        """(label, words of `policygrad train`, what is added) of every rung, each with all that is below it."""
        argv: tuple[str, ...] = ()
        rows = []
        for rung in self.rungs:
            argv = merge_argv(argv, rung.change)
            figure = f"; published: {rung.published}" if rung.published else ""
            rows.append((rung.label, (self.base, *argv), rung.description + figure))
        return rows

    def to_dict(self) -> dict[str, Any]:
        return {"title": self.title, "source": self.source, "why": self.why}


LADDERS: dict[str, Ladder] = {
    "dapo": Ladder(
        title="DAPO, part by part",
        source="Yu et al. 2025 (DAPO, arXiv:2503.14476), table 1: AIME 2024, avg@32, Qwen2.5-32B",
        setting=("--task", "embedded_steps", "--max-tokens", "20"),
        why="Answers that the base model works out take 15 to 24 tokens here, and the budget is 20: the more it works "
        "out, the more is cut off, so that how cut-off answers count, and how lengths weigh, matters. The paper's "
        "model is some 45,000 times as large, its budget a thousand times as long. As there (sec. 4.1), a rollout "
        "feeds 16 updates; an update sees 32 answers of 4 prompts here, 512 answers of 32 prompts there. Naive "
        "GRPO is without its KL penalty, which DAPO drops before its ladder begins (sec. 2.3).",
        base="grpo",
        rungs=(
            Rung(
                "naive_grpo",
                ("--algorithm.terms", "none", "--algorithm.update-rule.minibatches", "16"),
                "GRPO, symmetric clip, mean per answer, no KL, 16 updates per rollout",
                "30",
            ),
            Rung(
                "overlong_mask",
                ("--algorithm.filters", "MaskTruncated"),
                "answers that were cut off do not move the policy",
                "36",
            ),
            Rung("clip_higher", ("--algorithm.gate.high", "0.28"), "the upper clip bound 0.28 for 0.2", "38"),
            Rung(
                "soft_penalty",
                ("--algorithm.shaping", "SoftOverlong"),
                "a penalty over the last fifth of the budget",
                "41",
            ),
            Rung("token_mean", ("--algorithm.aggregation", "TokenMean"), "the mean over all tokens of an update", "42"),
            Rung(
                "dynamic_sampling",
                ("--algorithm.filters", "DropZeroVariance,MaskTruncated"),
                "all-right and all-wrong groups are replaced: DAPO",
                "50",
            ),
        ),
    )
}


# What a named algorithm needs on the embedded task, whose answers are some ten tokens long, and why.


@dataclass(frozen=True)
class Override:
    """Options of `policygrad train`, and why the row's own do not suit."""

    options: tuple[str, ...]
    reason: str


OVERRIDES: dict[str, Override] = {
    "distill": Override(
        ("--teacher", "runs/distill/teacher"),
        "it needs a teacher: the one that scripts/measure_distill.py makes, the base model with twice its layers, trained by grpo.",
    ),
    "vapo": Override(
        ("--algorithm.advantage.length-adaptive-gae.alpha", "0.5"),
        "λ = max(0, 1 − 1/(α·l)) is 0 up to 20 tokens at the paper's α = 0.05; at 0.5 an answer of 10 tokens has λ = 0.8.",
    ),
    "iterative_grpo": Override(
        ("--algorithm.reference.refresh-every", "20"),
        "a run here has fewer rollouts than the default's 100, so that the reference would never be taken anew.",
    ),
    "prorl": Override(
        ("--algorithm.reference.refresh-every", "20"),
        "a run here has fewer rollouts than the default's 200, so that reference and optimiser would never be reset.",
    ),
    "grpo_process": Override(
        ("--task", "embedded_steps"),
        "a reward for every step says more only where an answer has several: this task is what of the embedded one does.",
    ),
    "vineppo": Override(
        (
            *("--task", "embedded_steps", "--prompts-per-step", "16", "--samples-per-prompt", "4"),
            *("--evaluation.every", "4"),
        ),
        "a value per step needs answers of several steps, as above; fresh completions of every step's prefix are most of the "
        "tokens, so that fewer answers a step leave as many steps as the others take (and evaluations as often).",
    ),
}
