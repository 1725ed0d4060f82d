"""What `policygrad compare` was asked for, as rows: each one's words layered, tried by a dry run, and its facts noted."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from policygrad.commands.words import refuse_cluster
from policygrad.compare.ladders import Ladder
from policygrad.compare.overrides import OVERRIDES
from policygrad.compare.plan import FILE, KNOBS, LABEL, Plan, Row
from policygrad.compare.words import layered, names, values
from policygrad.core.trust_region import TrustRegion
from policygrad.errors import ConfigError
from policygrad.models.trust import FLAG
from policygrad.samplers.base import Sampling
from policygrad.training.config.allowed import Allowed, check_missing, from_words, need_permission, outside
from policygrad.training.config.run import Options, Run

OURS = ("--seed", "--output", "--resume", "--tokens", "--stop-after", "--dry-run", "--plain")
"""Options of train that a comparison sets itself."""
PROBLEMS, SAMPLES = 256, 2
EVALUATED = 0.25
"""Completions drawn for the curve, as a share of those that are trained on at least: some tenth of a run's seconds, for evaluating
samples and does not train."""
USUAL = (
    "--evaluation.problems",
    f"{PROBLEMS}",
    "--evaluation.samples",
    f"{SAMPLES}",
    "--checkpoint.every",
    "10",
    "--checkpoint.keep",
    "1",
)
STEPS = 1000
ALLOW, SENT_TO = "--allow", "--sampler.folder"


@dataclass(frozen=True)
class Asked:
    """A row as it was spelled."""

    label: str
    words: tuple[str, ...]
    change: str = ""


def rows_of(
    specs: Sequence[str],
    ladder: Ladder | None,
    common: Sequence[str],
    options: Sequence[str],
    *,
    lr_grid: tuple[float, ...],
    delta_grid: tuple[float, ...],
    tokens: int,
    overrides: bool,
) -> tuple[Row, ...]:
    """The rows of a plan. Later layers win: the ladder's setting, an override, what all rows are given, the row, its options.

    Raises:
        ConfigError: what train would refuse, with the row's name; a label twice; options for a row that there is not.
    """
    asked = [Asked(*rung) for rung in ladder.rows()] if ladder else []
    asked += [_asked(spec) for spec in specs]
    labels = [row.label for row in asked]
    if twice := sorted({label for label in labels if labels.count(label) > 1}):
        raise ConfigError(f"two rows are called {twice[0]!r}: give one another name, 'LABEL={twice[0]} …'")
    own = _own(options, labels)
    setting = ladder.setting if ladder else ()
    if "--lr" in names(common) and lr_grid:
        raise ConfigError("--lr for all rows leaves nothing to choose from --lr-grid: leave one of the two out")
    rows = []
    for row in asked:
        override = (
            OVERRIDES.get(row.words[0])
            if overrides and not {"--task", "--model"} & names([*common, *setting])
            else None
        )
        layers = (setting, override.options if override else (), common, row.words[1:], own.get(row.label, ()))
        for layer in layers:
            if layer and not layer[0].startswith("--"):
                raise ConfigError(
                    f"the row {row.label}: {layer[0]!r} is no option; another row is another word of its own"
                )
        words = layered(row.words[:1], *layers)
        _check(row.label, words)
        rows.append(_row(row, words, override.reason if override else "", lr_grid, delta_grid, tokens))
    return tuple(rows)


def _row(
    asked: Asked,
    words: tuple[str, ...],
    reason: str,
    lr_grid: tuple[float, ...],
    delta_grid: tuple[float, ...],
    tokens: int,
) -> Row:
    """The row with its knob, how often it is evaluated, and its facts."""
    words = layered(words[:1], USUAL, words[1:])
    run = resolved(asked.label, words)
    if not run.evaluation.problems:
        raise ConfigError(
            f"the row {asked.label} has no held-out problems to be compared on: --evaluation.problems above 0"
        )
    answers = run.prompts_per_step * run.group_size
    every = math.ceil(run.evaluation.problems * run.evaluation.samples / (EVALUATED * answers))
    steps = max(STEPS, tokens // answers + 1)  # the tokens end a run, not its steps
    words = layered(words[:1], ("--evaluation.every", str(every), "--steps", str(steps)), words[1:])
    knob, grid = _knob(run, words, lr_grid, delta_grid)
    tried = resolved(asked.label, (*words, knob, f"{grid[0]:g}") if grid else words)
    return Row(
        label=asked.label,
        words=words,
        algorithm=run.algorithm.name,
        knob=knob,
        grid=grid,
        measure=measure(tried),
        settings={name: value for name, value in settings(tried).items() if f"--{name}" != knob},
        change=asked.change,
        reason=reason,
    )


def _knob(
    run: Run, words: Sequence[str], lr_grid: tuple[float, ...], delta_grid: tuple[float, ...]
) -> tuple[str, tuple[float, ...]]:
    """What is tuned of a row: its learning rate, or how far its trust region reaches; nothing that its words set."""
    step, set_, (lr, delta) = run.algorithm.step, names(words), KNOBS
    if step.uses_lr:
        return (lr, lr_grid) if lr not in set_ else ("", ())
    return (delta, delta_grid) if isinstance(step, TrustRegion) and delta not in set_ else ("", ())


def resolved(label: str, words: Sequence[str]) -> Run:
    """The run that `policygrad train WORDS` would be.

    Raises:
        ConfigError: it is refused; with the row's name.
    """
    from policygrad.commands.train import asked

    try:
        run, _ = asked([*words])
    except ConfigError as error:
        raise ConfigError(f"the row {label}: {error}") from error
    return run.resolved()


def measure(run: Run) -> dict[str, Any]:
    """What a held-out score of the run is of."""
    return {
        "model": run.model,
        "task": run.task,
        "held_out": run.held_out or "",
        "reward": ", ".join(run.reward),
        "max_tokens": run.sampling.max_tokens,
        "temperature": run.sampling.temperature,
        "problems": run.evaluation.problems,
        "samples": run.evaluation.samples,
    }


def settings(run: Run) -> dict[str, Any]:
    """What a reader has to know of the run besides its equation."""
    return {
        "updates_per_rollout": run.algorithm.step.updates,
        "samples_per_prompt": run.group_size,
        "prompts_per_step": run.prompts_per_step,
        "evaluated_every": run.evaluation.every,
        "lr": run.lr,
    }


def check_plan(plan: Plan, folder: Path, allowed: Allowed) -> None:
    """Refuse a plan read from `folder` whose rows have options that no row may have, or run code without permission.

    What a row says was typed on a command line once, but by whom a file cannot tell.

    Raises:
        ConfigError: with what permits it.
    """
    for row in plan.rows:
        _check(row.label, row.words)
        refuse_cluster(row.words, "compare", "has runs side by side on this machine")
        if unknown := {name for name in names(row.words) if name.partition(".")[0][2:] not in _options()}:
            raise ConfigError(
                f"{folder / FILE}: the row {row.label} has {min(unknown)}, which train has not: take it out"
            )
    for job in plan.jobs():
        if not (folder / job.folder).resolve().is_relative_to(folder.resolve()):
            raise ConfigError(f"{folder / job.folder} is a link that leads out of {folder}: remove the link")
    words = [word for row in plan.rows for word in row.words]
    check_missing(_missing(plan, folder, allowed), FLAG in names(words), folder / FILE, allowed)


def permission(plan: Plan, folder: Path) -> list[str]:
    """The words that let `policygrad compare --resume` run what a plan in `folder` names; none where it needs no permission."""
    missing = _missing(plan, folder, Allowed(), elsewhere=True)
    asks = any(FLAG in names(row.words) for row in plan.rows)
    return [*([ALLOW, *missing] if missing else []), *([FLAG] if asks else [])]


def _missing(plan: Plan, folder: Path, allowed: Allowed, *, elsewhere: bool = False) -> list[str]:
    """What the rows name and may not have, row by row, as a row's `--directory` is its own. A row's --allow allows nothing by
    itself."""
    found = set[str]()
    for row in plan.rows:
        found |= set(values(row.words, ALLOW)) - set(allowed.names)
        found |= set(need_permission(from_words(row.words), folder / FILE, allowed, elsewhere=elsewhere))
        for place in values(row.words, SENT_TO):
            found |= set(outside({"sampler": {"folder": place}}, folder / FILE, allowed))
    return sorted(found)


def _options() -> set[str]:
    """The first words of train's options."""
    from policygrad.commands.train import TrainOptions

    return {f.name.replace("_", "-") for kind in (Options, Sampling, TrainOptions) for f in fields(kind)}


def _asked(spec: str) -> Asked:
    """`grpo`, `LABEL=grpo`, `LABEL=grpo --options`, `mine.py:ALGORITHM`."""
    words = _split(spec, f"the row {spec!r}")
    if not words or words[0].startswith("-"):
        raise ConfigError(f"a row is an algorithm's name or 'LABEL=ALGORITHM --options', not {spec!r}")
    label, equals, first = words[0].partition("=")
    if not equals:
        label, first = words[0].rpartition(":")[2], words[0]
    if not LABEL.fullmatch(label):
        raise ConfigError(
            f"the label {label!r} of the row {spec!r} names a folder: letters, digits and . _ + - make one"
        )
    return Asked(label, (first, *words[1:]))


def _split(text: str, what: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(
            f"{what}: {error}: close the quotation, or write \\ before a quote that stands alone"
        ) from error


def _own(options: Sequence[str], labels: Sequence[str]) -> Mapping[str, tuple[str, ...]]:
    """Options of single rows, by label."""
    found: dict[str, tuple[str, ...]] = {}
    for spec in options:
        label, equals, text = spec.partition("=")
        if not equals or label not in labels:
            raise ConfigError(
                f"--options {spec!r}: write LABEL='--option value', with a label among {', '.join(labels)}"
            )
        found[label] = layered(found.get(label, ()), _split(text, f"--options {spec!r}"))
    return found


def _check(label: str, words: Sequence[str]) -> None:
    if taken := [option for option in OURS if option in names(words)]:
        ways = {"--seed": "--seeds", "--tokens": "--tokens of compare", "--output": "--output of compare"}
        raise ConfigError(
            f"the row {label} has {taken[0]}, which the comparison sets for every run: {ways.get(taken[0], 'leave it out')}"
        )
