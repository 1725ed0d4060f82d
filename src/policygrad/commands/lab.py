"""`policygrad lab`: every algorithm's gradient estimator measured against the true gradient, and the field's claims as numbers."""

from __future__ import annotations

import inspect
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from policygrad.algorithms import ALGORITHMS
from policygrad.commands import describe as words
from policygrad.commands.describe import HEAD, NAME, QUIET, Line
from policygrad.commands.lab_parts import Trial, named, tried, with_part
from policygrad.commands.options import gathered, writable, write
from policygrad.core.algorithm import Algorithm
from policygrad.core.update_rules import FirstOrder
from policygrad.errors import ConfigError
from policygrad.training.config.checks import check_seed
from policygrad.training.config.parts import find_algorithm
from policygrad.training.config.run import optional

if TYPE_CHECKING:
    from policygrad.lab.measurement import Figures, Measured
    from policygrad.lab.report import LabReport

COLUMNS = ("scale", "bias", "cosine", "variance", "MSE", "SNR", "best")
LEGEND = (
    "bias ‖E g − ∇J‖, variance and MSE are relative to ∇J; scale is how long E g is along ∇J, which a learning rate absorbs; "
    "SNR ‖E g‖²/tr Cov g; best the MSE at the best length (1 = g says nothing). One step is one group of one prompt, "
    "J the expected reward less the algorithm's own KL penalty (maxrl and passk aim at another J: part of their bias)."
)
DETAIL = (
    "p=…: the scale on the prompt that is solved with this probability (alike in a row: no difficulty is favoured). right n, "
    "wrong n: the mean factor of ∇log π at a token of a right, or a wrong, completion of n tokens."
)


@dataclass(frozen=True)
class LabOptions:
    """Measures gradient estimators exactly, on problems small enough to enumerate."""

    algorithm: Annotated[tuple[str, ...], optional("NAME", "all of them")] = ()
    """Which algorithms; several are allowed, your own too: mine.py:NAME, mine:NAME."""
    part: Annotated[tuple[str, ...], optional("[FIELD=]PART[,PART]", "none")] = ()
    """A part, or a chain of them, psi=GroupMean,mine:Asym, measured in `base` and compared with it.
    Yours, mine:MyGate or mine.py:MyGate, or ours; with settings, 'mine:MyGate(eps=1)'. Several are allowed, each measured alone."""
    base: str = "dr_grpo"
    """The algorithm that a part is put into."""
    all: bool = False
    """With `part`: measure all algorithms and run all experiments beside it, as without one."""
    group_size: int = 4
    """G, completions per group."""
    kl: float = 0.05
    """Nats a completion between the policy that sampled and the one that learns, off-policy."""
    experiment: Annotated[
        tuple[str, ...], optional("NAME", "all of them, with a part none; none = only the table")
    ] = ()
    """Which experiments; several are allowed."""
    list_experiments: bool = False
    """Print the experiments' names and what each measures, and end."""
    seed: int = 0
    """Of the worlds and of what is sampled."""
    json: bool = False
    """Print one JSON object with everything in place of the table."""
    output: Annotated[Path | None, optional("FILE.html", "a table in the terminal")] = None
    """Write one page with interactive plots that needs no network."""

    def __post_init__(self) -> None:
        if self.group_size < 1:
            raise ConfigError(f"--group-size must be at least 1, not {self.group_size}")
        check_seed(self.seed)
        if not 0 < self.kl < 100:
            raise ConfigError(f"--kl must be above 0 nats and below 100, not {self.kl:g}")
        if self.all and self.algorithm:
            raise ConfigError(
                f"--all measures every algorithm, and --algorithm names {', '.join(self.algorithm)}: leave one out"
            )
        if self.base != "dr_grpo" and not self.part:
            raise ConfigError(
                f"--base {self.base} is what a part of your own is put into: name one, --part MODULE:CLASS"
            )


def lab(args: list[str]) -> int:
    """`policygrad lab`, and `policygrad lab control`."""
    if args[:1] == ["control"]:
        from policygrad.commands.control import control

        return control(args[1:])
    args = gathered(args, "--algorithm", "--part", "--experiment")
    options = tyro.cli(LabOptions, args=args, prog="policygrad lab", config=(tyro.conf.FlagCreatePairsOff,))
    if options.list_experiments:
        words.emit(_experiments(shutil.get_terminal_size((100, 24)).columns))
        return 0
    if options.output is not None:
        writable(options.output, "--output")
    alone = bool(options.part) and not options.all
    chosen = named(options.algorithm) if options.algorithm or alone else _all(options.group_size)
    trials = dict[str, Trial]()
    for spec in options.part:
        trial = with_part(find_algorithm(options.base), spec)
        tried(trial, spec, options.group_size)
        trials[spec if trial.label in {*chosen, *trials, *ALGORITHMS} else trial.label] = trial
    base = ""
    if trials:
        ((base, algorithm),) = named([options.base]).items()
        base = next((name for name, row in chosen.items() if row == algorithm), base)
        chosen = {**chosen, base: algorithm, **{name: trial.algorithm for name, trial in trials.items()}}
    from policygrad.lab.report import report

    names = () if options.experiment == ("none",) or (alone and not options.experiment) else options.experiment or None
    found = report(chosen, options.group_size, options.kl, options.seed, names)
    found = replace(found, parts=tuple(trial.sentence for trial in trials.values()))
    if options.output is not None:
        write(options.output, html(found, chosen), "--output")
        print(options.output, file=sys.stderr if options.json else sys.stdout)
    if options.json:
        print(json.dumps(found.to_dict(), ensure_ascii=False))
    elif options.output is None:
        pairs = [((base, chosen[base]), (name, trial.algorithm)) for name, trial in trials.items()]
        words.emit(page(found, shutil.get_terminal_size((100, 24)).columns, pairs, brief=alone))
    return 0


def _experiments(width: int) -> list[Line]:
    """Each experiment's name, and what it measures."""
    from policygrad.lab.experiments import EXPERIMENTS

    longest = max(map(len, EXPERIMENTS))
    return [
        line
        for name, experiment in EXPERIMENTS.items()
        for line in words.wrapped(
            ((name.ljust(longest + 2), NAME),), (inspect.getdoc(experiment) or "").split("\n\n")[0], width
        )
    ]


def _all(group_size: int) -> dict[str, Algorithm]:
    """Every row; one that needs a larger group, or has no step here, is left out, which is said. Groups of one are refused, as
    most rows are."""
    from policygrad.lab.setting import measurable, unmeasurable

    for row in ALGORITHMS.values():
        if why := unmeasurable(row, group_size):
            print(f"{row.name} is left out: {why}", file=sys.stderr)
    return measurable(ALGORITHMS, group_size)


def html(found: LabReport, algorithms: Mapping[str, Algorithm]) -> str:
    """The report as one page."""
    from policygrad.lab.page.page import page

    return page(found, algorithms, {name: _parts(a) for name, a in algorithms.items()})


def _parts(a: Algorithm) -> dict[str, tuple[str, ...]]:
    """A row of the matrix, its last columns in one."""
    row = words.matrix_row(a, changed=True)
    del row["also"]
    step = () if a.step == FirstOrder() else (words.part_name(a.step, changed=True),)
    return row | {"and more": row.pop("shaping") + row.pop("filters") + step}


Row = tuple[str, Algorithm]
"""The name of a row, and what it measures."""


def page(found: LabReport, width: int, pairs: Sequence[tuple[Row, Row]] = (), brief: bool = False) -> list[Line]:
    """The table and the findings.

    pairs: (base, the same with a part in it), whose differences are listed. brief: without the table by difficulty and length.
    """
    text = max(40, min(width, 110))
    lines: list[Line] = [((f"Gradient estimators, groups of {found.group_size}", HEAD),)]
    lines += words.wrapped((("  ", ""),), found.world + ".", text, QUIET)
    for sentence in found.parts:
        lines += words.wrapped((("  ", ""),), sentence + " (--base NAME takes another algorithm).", text)
    lines += [(), *_table(found, width), *words.wrapped((("  ", ""),), LEGEND, text, QUIET)]
    for base, own in pairs:
        lines += [(), *_differences(found, base, own, text)]
    if not brief:
        lines += [(), (("By difficulty and length, on-policy", HEAD),), *_detail(found, width)]
    if pairs or not brief:
        lines += words.wrapped((("  ", ""),), DETAIL, text, QUIET)
    if found.findings:
        lines += [(), (("Findings", HEAD),)]
    for finding in found.findings:
        mark = "✓ " if finding.holds else "✗ "
        lines += [(), *words.wrapped(((mark, HEAD),), finding.claim, text, NAME)]
        error = "" if finding.error is None else f" (standard error {finding.error:.2g})"
        lines += words.wrapped((("  ", ""),), finding.sentence + error, text)
    return lines


def _table(found: LabReport, width: int) -> list[Line]:
    """On- and off-policy side by side where there is room, else one after the other."""
    name = max(len(on.name) for on, _ in found.rows) + 2
    heads = ("on-policy", f"off-policy, {found.kl:g} nats away")
    sides = [
        [[*_cells(m.figures, m.exact), "" if m.exact else "~"] for m in side] for side in zip(*found.rows, strict=True)
    ]
    cell = 9
    block = cell * len(COLUMNS) + 1
    names = [on.name for on, _ in found.rows]
    groups = [(0, 1)] if width >= name + 2 * block + 2 else [(0,), (1,)]
    lines: list[Line] = []
    for group in groups:
        lines.append(((" " * name + "  ".join(heads[i].center(block) for i in group), HEAD),))
        lines.append(((" " * name + "   ".join(_row(COLUMNS, cell) for _ in group), HEAD),))
        for row, label in enumerate(names):
            cells = "  ".join(_row(sides[i][row][:-1], cell) + (sides[i][row][-1] or " ") for i in group)
            lines.append(((label.ljust(name), NAME), (cells, "")))
        lines.append(())
    if not all(m.exact for pair in found.rows for m in pair):
        lines += words.wrapped(
            (("  ", ""),), f"~ sampled: {_sampled(found)} steps; standard errors are in the JSON.", 100, QUIET
        )
    return lines


def _detail(found: LabReport, width: int) -> list[Line]:
    """On-policy: how long E g is along ∇J on each prompt, and what a token's ∇log π is multiplied by, by length."""
    first = found.rows[0][0]
    ps = [f"p={row['p']:.2f}" for row in first.difficulty]
    lengths = [(key, row["length"]) for key in ("right", "wrong") for row in first.length if key in row]
    name = max(len(on.name) for on, _ in found.rows) + 2
    heads = [*ps, *(f"{key} {n:g}" for key, n in lengths)]
    room = max(1, (width - name) // 9)
    lines = list[Line]()
    for part in (slice(start, start + room) for start in range(0, len(heads), room)):
        lines.append(((" " * name + _row(heads[part], 9), HEAD),))
        for on, _ in found.rows:
            weight = {(key, row["length"]): row[key] for row in on.length for key in ("right", "wrong") if key in row}
            values = [row["scale"] for row in on.difficulty] + [weight[key] for key in lengths]
            lines.append(((on.name.ljust(name), NAME), (_row([_figure(x) for x in values[part]], 9), "")))
    return lines


_KEPT = "\u00a0"
"""A space that no line is broken at."""


def _differences(found: LabReport, base: Row, own: Row, width: int) -> list[Line]:
    """Where a part makes an algorithm another: in the equation, and in each figure that reads otherwise."""
    (before, old), (after, new) = base, own
    lines: list[Line] = [((f"Where {after} differs from {before}", HEAD),)]
    symbols = dict.fromkeys([*old.equation(), *new.equation()])
    told = [(name, old.equation().get(name, "–"), new.equation().get(name, "–")) for name in symbols]
    rows = {on.name: (on, off) for on, off in found.rows}
    sides = [
        (side, _told(rows[before][i]), _told(rows[after][i])) for i, side in enumerate(("on-policy", "off-policy"))
    ]
    for name, was, now in told:
        if was != now:
            lines += words.wrapped(((f"  {name:<11}", NAME),), f"{was}  →  {now}", width)
    for side, was_of, now_of in sides:
        changed = [f"{k} {was_of.get(k, '–')} → {v}" for k, v in now_of.items() if v != was_of.get(k)]
        text = ", ".join(item.replace(" ", _KEPT) for item in changed) or "nowhere, in the decimals shown"
        for line in words.wrapped(((f"  {side:<11}", NAME),), text, width):
            lines.append(tuple((piece.replace(_KEPT, " "), style) for piece, style in line))
    return lines


def _told(m: Measured) -> dict[str, str]:
    """Each figure by its column, as it is shown."""
    by_length = {f"{key} {row['length']:g}": row[key] for key in ("right", "wrong") for row in m.length if key in row}
    details = {f"p={row['p']:.2f}": row["scale"] for row in m.difficulty} | by_length
    return dict(zip(COLUMNS, _cells(m.figures, m.exact), strict=True)) | {k: _figure(v) for k, v in details.items()}


def _sampled(found: LabReport) -> int:
    return next(m.steps for pair in found.rows for m in pair if not m.exact)


def _cells(f: Figures, exact: bool) -> list[str]:
    """A sampled bias is never said to be exactly 0, though what its sample's size adds is taken off and may leave that."""
    values = (f.scale, f.bias, f.cosine, f.variance, f.mse, f.snr, f.best_mse)
    return [
        "exact 0" if name == "bias" and exact and x < 1e-9 else _figure(x)
        for name, x in zip(COLUMNS, values, strict=True)
    ]


def _figure(x: float) -> str:
    return f"{x:.3f}" if abs(x) < 100 else f"{x:.3g}"


def _row(cells: Sequence[str], width: int) -> str:
    return "".join(c.rjust(width) for c in cells)


if __name__ == "__main__":
    sys.exit(lab(sys.argv[1:]))
