"""`policygrad compare`: algorithms against each other, every run an ordinary `policygrad train`."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from policygrad.commands import STOPPED
from policygrad.commands import describe as words
from policygrad.commands.compare_rows import check_plan, permission, rows_of
from policygrad.commands.describe import paragraphs
from policygrad.commands.options import write
from policygrad.commands.words import refuse_cluster, refuse_empty
from policygrad.compare.counts import counted
from policygrad.compare.ladders import LADDERS
from policygrad.compare.plan import TUNING, Plan, next_folder, open_folder, read
from policygrad.errors import ConfigError
from policygrad.models.trust import FLAG
from policygrad.training.config.allowed import Allowed
from policygrad.training.config.run import optional

if TYPE_CHECKING:
    from policygrad.compare.report import Report

TOKENS = 250_000
HELP = (
    "Compare algorithms: learning curves with bootstrap bands, area under them, what it takes to reach a score, and which is above "
    "which, at equal tokens, updates and seconds.",
    "ROW is an algorithm that `policygrad train` takes, or, in quotes, LABEL=ALGORITHM with options of train: "
    "'tight=grpo --algorithm.gate.high 0.1'. What follows a -- is given to every run: -- --task embedded_steps --max-tokens 24",
    "Every run is a process of its own and lies in the comparison's folder with its log; Ctrl-C ends runs after the step at hand, "
    "and --resume goes on. comparison.html, comparison.json and plan.json are beside them.",
)


PLANNED = ("tokens", "seeds", "lr_grid", "delta_grid", "tuning_seeds", "options", "no_overrides")
"""Options that the plan holds: what is run."""


@dataclass(frozen=True)
class CompareOptions:
    """Options of `policygrad compare`."""

    rows: Annotated[
        tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="[ROW ...]", help_behavior_hint="")
    ] = ()
    """What is compared."""
    ladder: Annotated[str | None, optional("|".join(LADDERS), "none")] = None
    """A method taken apart: its parts as rows, added one at a time in its paper's order, on a task where they matter."""
    tokens: Annotated[int, tyro.conf.arg(aliases=["--budget-tokens"])] = TOKENS
    """Sampled tokens of every run."""
    seeds: int = 5
    """How many are reported, from 0."""
    lr_grid: Annotated[str, optional("FLOAT,FLOAT,…", "none: the default rate")] = ""
    """Learning rates: each row runs all of them on tuning seeds and is reported at its best one."""
    delta_grid: Annotated[str, optional("FLOAT,FLOAT,…", "none")] = ""
    """The same for rows that have no learning rate but a trust region: step lengths δ, nats a token."""
    tuning_seeds: int = 2
    """How many seeds the grids are compared on; never those that are reported."""
    options: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], optional("LABEL='--…'", "none")] = ()
    """Options of train for one row; may be given again for others."""
    no_overrides: bool = False
    """Leave named algorithms as they are on the embedded task too; without it vapo, say, gets an α for short answers."""
    jobs: int = 1
    """Runs at a time."""
    threads: Annotated[int | None, optional("INT", "the cores, shared by the jobs")] = None
    """Threads of each run."""
    threshold: float = 0.8
    """What is to be reached, as a share of the way from the score before training to the best row's final one."""
    output: Annotated[str | None, optional("DIR", "the next free comparisons/NAME-N")] = None
    """The comparison's folder; one that holds the same comparison is gone on with."""
    resume: Annotated[str | None, optional("DIR", "none")] = None
    """Go on with the comparison in this folder; runs that failed are tried again."""
    allow: Annotated[tuple[str, ...], optional("MODULE|FILE", "what is in the current folder")] = ()
    """With --resume: code that plan.json and the runs in the folder may name and have imported."""
    trust_remote_code: bool = False
    """With --resume: let Python code in a model's folder run, where plan.json asks for it."""
    json: bool = False
    """Print the report as one JSON object in place of the table; comparison.json in the folder holds it too."""
    dry_run: bool = False
    """Print every run's command; run nothing."""

    def __post_init__(self) -> None:
        for name in ("tokens", "seeds", "jobs", "tuning_seeds"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(self, name)}")
        if self.threads is not None and self.threads < 1:
            raise ConfigError(f"--threads must be at least 1, not {self.threads}")
        if self.seeds > TUNING:
            raise ConfigError(f"--seeds must be at most {TUNING}: learning rates are chosen on those from {TUNING} on")
        if not 0 < self.threshold <= 1:
            raise ConfigError(f"--threshold is a share of the way, above 0 and at most 1, not {self.threshold:g}")
        if self.ladder is not None and self.ladder not in LADDERS:
            raise ConfigError(f"unknown ladder {self.ladder!r}: there is {', '.join(LADDERS)}")
        if self.resume is None and (self.allow or self.trust_remote_code):
            flag = "--allow" if self.allow else FLAG
            raise ConfigError(
                f"{flag} is for what --resume reads from plan.json: for the runs write it behind a --, -- {flag} …"
            )


def compare(args: list[str]) -> int:
    """`policygrad compare ROW … [options] [-- options of train]`; 1 = a run failed."""
    refuse_cluster(args, "compare", "has runs side by side on this machine, --jobs N")
    mine, common = _split(args)
    refuse_empty(mine, "--allow")
    options = tyro.cli(
        CompareOptions,
        args=mine,
        prog="policygrad compare",
        description=paragraphs(*HELP),
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    plan, folder = _planned(options, common, shlex.join(["policygrad", "compare", *args]))
    if options.dry_run:
        print(dry_run(plan))
        return 0
    return run(plan, folder, options)


def run(plan: Plan, folder: Path, options: CompareOptions) -> int:
    """Runs what is missing, and reports."""
    from policygrad.checkpoint.lock import locked
    from policygrad.compare.page.page import page
    from policygrad.compare.report import report
    from policygrad.compare.runner import Processes
    from policygrad.compare.statements import too_few_seeds
    from policygrad.compare.work import Work

    plan = open_folder(folder, plan)
    threads = options.threads or max(1, _cores() // options.jobs)
    with locked(folder / "lock"):
        print(
            f"{folder}: {counted(options.jobs, 'runs')} at a time, {counted(threads, 'threads')} each", file=sys.stderr
        )
        if few := too_few_seeds(plan):
            _say(few)
        results = Work(plan, folder, Processes(threads, allow=options.allow), options.jobs, _say).do()
        found = report(plan, results, options.threshold)
        text = json.dumps(found.to_dict(), ensure_ascii=False) + "\n"
        write(folder / "comparison.json", text, "--output")
        write(folder / "comparison.html", page(found), "--output")
    _show(found, options.json, text)
    _say(f"{folder / 'comparison.html'}")
    for job, error in results.failures.items():
        _say(f"failed: {job}: {error.splitlines()[-1]}")
    if results.stopped:
        _say(
            f"stopped; go on with: {shlex.join(['policygrad', 'compare', '--resume', str(folder), *permission(plan, folder)])}"
        )
        return STOPPED
    return 1 if results.failures else 0


def dry_run(plan: Plan) -> str:
    """Every run's command; those that are reported at what the tuning runs choose have the grid in the rate's place."""
    from policygrad.compare.statements import too_few_seeds

    lines = (
        [f"# {len(plan.tuning())} runs to choose by, {len(plan.rows) * len(plan.seeds)} to report"]
        if plan.tuning()
        else []
    )
    lines += [f"# {few}"] if (few := too_few_seeds(plan)) else []
    lines += [shlex.join(["policygrad", *plan.train_words(job)]) for job in plan.tuning()]
    for job in plan.reported({row.label: row.grid[0] if row.grid else None for row in plan.rows}):
        row = plan.row(job.row)
        line = shlex.join(["policygrad", *plan.train_words(job)])
        lines.append(
            f"{line}  # {row.knob}: the best of {', '.join(f'{x:g}' for x in row.grid)}" if row.tuned else line
        )
    return "\n".join(lines)


def _planned(options: CompareOptions, common: Sequence[str], command: str) -> tuple[Plan, Path]:
    """The plan, and where it is carried out."""
    if options.resume is not None:
        if options.rows or options.ladder or common or options.output:
            raise ConfigError(
                "--resume goes on with what plan.json in the folder says: give no rows, no --output and no options of train"
            )
        usual = CompareOptions()
        if said := [name for name in PLANNED if getattr(options, name) != getattr(usual, name)]:
            flags = " and ".join(f"--{name.replace('_', '-')}" for name in said)
            raise ConfigError(
                f"--resume goes on with what plan.json in the folder says, and {flags} would change it: leave that out, or "
                "begin another comparison, in a folder of its own"
            )
        plan, folder = read(Path(options.resume)), Path(options.resume)
        check_plan(plan, folder, Allowed(options.allow, options.trust_remote_code))
        return plan, folder
    ladder = LADDERS[options.ladder] if options.ladder else None
    if not options.rows and ladder is None:
        raise ConfigError(
            "nothing to compare: name algorithms, as in `policygrad compare grpo dr_grpo dapo`, or --ladder dapo"
        )
    from policygrad import __version__

    plan = Plan(
        rows=rows_of(
            options.rows,
            ladder,
            common,
            options.options,
            lr_grid=_grid(options.lr_grid, "--lr-grid"),
            delta_grid=_grid(options.delta_grid, "--delta-grid"),
            tokens=options.tokens,
            overrides=not options.no_overrides,
        ),
        tokens=options.tokens,
        seeds=tuple(range(options.seeds)),
        tuning_seeds=tuple(range(TUNING, TUNING + options.tuning_seeds)),
        command=command,
        version=__version__,
        ladder=ladder.to_dict() if ladder else {},
    )
    from policygrad.training.config.checks import check_folders

    check_folders(options.output)
    named = None if options.output is None else Path(options.output)
    return plan, named or next_folder([row.label for row in plan.rows], options.ladder)


def _split(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """(our words, those after `--`)."""
    at = args.index("--") if "--" in args else len(args)
    return list(args[:at]), list(args[at + 1 :])


def _grid(text: str, option: str) -> tuple[float, ...]:
    try:
        values = sorted({float(word) for word in text.split(",") if word.strip()})
    except ValueError as error:
        raise ConfigError(
            f"{option} takes numbers with commas between them, as in 1e-4,3e-4,1e-3, not {text!r}"
        ) from error
    if any(not 0 < value < float("inf") for value in values):
        raise ConfigError(f"{option}: every value must be above 0 and finite, not {text!r}")
    return tuple(values)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _show(found: Report, as_json: bool, text: str) -> None:
    """On standard output the table, or the JSON where it was asked for."""
    from policygrad.commands.compare_table import table

    if as_json:
        print(text, end="")
        return
    words.emit(table(found, shutil.get_terminal_size((100, 24)).columns))


if __name__ == "__main__":
    sys.exit(compare(sys.argv[1:]))
