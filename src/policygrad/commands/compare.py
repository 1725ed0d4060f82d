"""`policygrad compare`: algorithms against each other, every run an ordinary `policygrad train`."""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from policygrad.commands import STOPPED
from policygrad.commands import render as words
from policygrad.commands.options import reject_cluster_flags, reject_empty_values, write_text_file
from policygrad.commands.render import HEAD, NAME, QUIET, StyledLine, wrap_paragraphs, wrap_styled
from policygrad.compare.plan import (
    FIRST_TUNING_SEED,
    LABEL_PATTERN,
    LADDERS,
    OVERRIDES,
    PLAN_FILE,
    TUNABLE_OPTIONS,
    ComparisonPlan,
    ComparisonRow,
    Ladder,
    merge_argv,
    next_comparison_folder,
    open_comparison,
    option_names,
    option_values,
    read_plan,
)
from policygrad.compare.report import ComparisonReport, Kind, RowReport, format_learning_rate, pluralise
from policygrad.compare.runner import AXES
from policygrad.compare.statistics import Estimate
from policygrad.core.trust_region import TrustRegion
from policygrad.errors import ConfigError
from policygrad.models.loading import TRUST_FLAG
from policygrad.samplers.base import SamplingParams
from policygrad.training.config.run import Run, RunOptions, optional_arg
from policygrad.training.config.trust import (
    CodePermissions,
    code_in_argv,
    filter_unpermitted,
    find_remote_targets,
    require_permissions,
)

if TYPE_CHECKING:
    from policygrad.compare.report import ComparisonReport


# What `policygrad compare` was asked for, as rows: each one's words layered, tried by a dry run, and its facts noted.

RESERVED_OPTIONS = ("--seed", "--output", "--resume", "--tokens", "--stop-after", "--dry-run", "--plain")
"""Options of train that a comparison sets itself."""
PROBLEMS, SAMPLES = 256, 2
EVAL_FRACTION = 0.25
"""Completions drawn for the curve, as a share of those that are trained on at least: some tenth of a run's seconds, for evaluating
samples and does not train."""
DEFAULT_OPTIONS = (
    "--evaluation.problems",
    f"{PROBLEMS}",
    "--evaluation.samples-per-prompt",
    f"{SAMPLES}",
    "--checkpoint.every",
    "10",
    "--checkpoint.keep",
    "1",
)
MIN_STEPS = 1000
ALLOW, SENT_TO = "--allow-code", "--sampler.folder"


@dataclass(frozen=True)
class RowRequest:
    """A row as it was spelled."""

    label: str
    argv: tuple[str, ...]
    change: str = ""


def build_rows(
    specs: Sequence[str],
    ladder: Ladder | None,
    common: Sequence[str],
    options: Sequence[str],
    *,
    lr_grid: tuple[float, ...],
    delta_grid: tuple[float, ...],
    tokens: int,
    overrides: bool,
) -> tuple[ComparisonRow, ...]:
    """The rows of a plan. Later layers win: the ladder's setting, an override, what all rows are given, the row, its options.

    Raises:
        ConfigError: what train would refuse, with the row's name; a label twice; options for a row that there is not.
    """
    asked = [RowRequest(*rung) for rung in ladder.rows()] if ladder else []
    asked += [_asked(spec) for spec in specs]
    labels = [row.label for row in asked]
    if twice := sorted({label for label in labels if labels.count(label) > 1}):
        raise ConfigError(f"two rows are called {twice[0]!r}: give one another name, 'LABEL={twice[0]} …'")
    own = _own(options, labels)
    setting = ladder.setting if ladder else ()
    if "--lr" in option_names(common) and lr_grid:
        raise ConfigError("--lr for all rows leaves nothing to choose from --lr-grid: leave one of the two out")
    rows = []
    for row in asked:
        override = (
            OVERRIDES.get(row.argv[0])
            if overrides and not {"--task", "--model"} & option_names([*common, *setting])
            else None
        )
        layers = (setting, override.options if override else (), common, row.argv[1:], own.get(row.label, ()))
        for layer in layers:
            if layer and not layer[0].startswith("--"):
                raise ConfigError(
                    f"the row {row.label}: {layer[0]!r} is no option; another row is another word of its own"
                )
        words = merge_argv(row.argv[:1], *layers)
        _check(row.label, words)
        rows.append(_row(row, words, override.reason if override else "", lr_grid, delta_grid, tokens))
    return tuple(rows)


def _row(
    asked: RowRequest,
    words: tuple[str, ...],
    reason: str,
    lr_grid: tuple[float, ...],
    delta_grid: tuple[float, ...],
    tokens: int,
) -> ComparisonRow:
    """The row with its knob, how often it is evaluated, and its facts."""
    words = merge_argv(words[:1], DEFAULT_OPTIONS, words[1:])
    run = resolve_row(asked.label, words)
    if not run.evaluation.problems:
        raise ConfigError(
            f"the row {asked.label} has no held-out problems to be compared on: --evaluation.problems above 0"
        )
    answers = run.prompts_per_step * run.effective_samples_per_prompt
    every = math.ceil(run.evaluation.problems * run.evaluation.samples_per_prompt / (EVAL_FRACTION * answers))
    steps = max(MIN_STEPS, tokens // answers + 1)  # the tokens end a run, not its steps
    words = merge_argv(words[:1], ("--evaluation.every", str(every), "--steps", str(steps)), words[1:])
    knob, grid = _knob(run, words, lr_grid, delta_grid)
    tried = resolve_row(asked.label, (*words, knob, f"{grid[0]:g}") if grid else words)
    return ComparisonRow(
        label=asked.label,
        argv=words,
        algorithm=run.algorithm.name,
        tuned_option=knob,
        grid=grid,
        measure=describe_measurement(tried),
        settings={name: value for name, value in describe_settings(tried).items() if f"--{name}" != knob},
        change=asked.change,
        reason=reason,
    )


def _knob(
    run: Run, words: Sequence[str], lr_grid: tuple[float, ...], delta_grid: tuple[float, ...]
) -> tuple[str, tuple[float, ...]]:
    """What is tuned of a row: its learning rate, or how far its trust region reaches; nothing that its words set."""
    step, set_, (lr, delta) = run.algorithm.update_rule, option_names(words), TUNABLE_OPTIONS
    if step.uses_lr:
        return (lr, lr_grid) if lr not in set_ else ("", ())
    return (delta, delta_grid) if isinstance(step, TrustRegion) and delta not in set_ else ("", ())


def resolve_row(label: str, words: Sequence[str]) -> Run:
    """The run that `policygrad train WORDS` would be.

    Raises:
        ConfigError: it is refused; with the row's name.
    """
    from policygrad.commands.train import parse_run

    try:
        run, _ = parse_run([*words])
    except ConfigError as error:
        raise ConfigError(f"the row {label}: {error}") from error
    return run.resolve()


def describe_measurement(run: Run) -> dict[str, Any]:
    """What a held-out score of the run is of."""
    return {
        "model": run.model,
        "task": run.task,
        "eval/reward": run.eval_data or "",
        "reward": ", ".join(run.reward),
        "max_tokens": run.sampling.max_tokens,
        "temperature": run.sampling.temperature,
        "problems": run.evaluation.problems,
        "samples": run.evaluation.samples_per_prompt,
    }


def describe_settings(run: Run) -> dict[str, Any]:
    """What a reader has to know of the run besides its equation."""
    return {
        "updates_per_rollout": run.algorithm.update_rule.updates,
        "samples_per_prompt": run.effective_samples_per_prompt,
        "prompts_per_step": run.prompts_per_step,
        "evaluated_every": run.evaluation.every,
        "lr": run.lr,
    }


def check_plan(plan: ComparisonPlan, folder: Path, allowed: CodePermissions) -> None:
    """Refuse a plan read from `folder` whose rows have options that no row may have, or run code without permission.

    What a row says was typed on a command line once, but by whom a file cannot tell.

    Raises:
        ConfigError: with what permits it.
    """
    for row in plan.rows:
        _check(row.label, row.argv)
        reject_cluster_flags(row.argv, "compare", "has runs side by side on this machine")
        if unknown := {name for name in option_names(row.argv) if name.partition(".")[0][2:] not in _options()}:
            raise ConfigError(
                f"{folder / PLAN_FILE}: the row {row.label} has {min(unknown)}, which train has not: take it out"
            )
    for job in plan.all_jobs():
        if not (folder / job.folder).resolve().is_relative_to(folder.resolve()):
            raise ConfigError(f"{folder / job.folder} is a link that leads out of {folder}: remove the link")
    words = [word for row in plan.rows for word in row.argv]
    require_permissions(_missing(plan, folder, allowed), TRUST_FLAG in option_names(words), folder / PLAN_FILE, allowed)


def list_permission_flags(plan: ComparisonPlan, folder: Path) -> list[str]:
    """The words that let `policygrad compare --resume` run what a plan in `folder` names; none where it needs no permission."""
    missing = _missing(plan, folder, CodePermissions(), new_process=True)
    asks = any(TRUST_FLAG in option_names(row.argv) for row in plan.rows)
    return [*([ALLOW, *missing] if missing else []), *([TRUST_FLAG] if asks else [])]


def _missing(plan: ComparisonPlan, folder: Path, allowed: CodePermissions, *, new_process: bool = False) -> list[str]:
    """What the rows name and may not have, row by row, as a row's `--directory` is its own. A row's --allow-code allows nothing by
    itself."""
    found = set[str]()
    for row in plan.rows:
        found |= set(option_values(row.argv, ALLOW)) - set(allowed.names)
        found |= set(filter_unpermitted(code_in_argv(row.argv), folder / PLAN_FILE, allowed, new_process=new_process))
        for place in option_values(row.argv, SENT_TO):
            found |= set(find_remote_targets({"sampler": {"folder": place}}, folder / PLAN_FILE, allowed))
    return sorted(found)


def _options() -> set[str]:
    """The first words of train's options."""
    from policygrad.commands.train import TrainOptions

    return {f.name.replace("_", "-") for kind in (RunOptions, SamplingParams, TrainOptions) for f in fields(kind)}


def _asked(spec: str) -> RowRequest:
    """`grpo`, `LABEL=grpo`, `LABEL=grpo --options`, `mine.py:ALGORITHM`."""
    words = _split_words(spec, f"the row {spec!r}")
    if not words or words[0].startswith("-"):
        raise ConfigError(f"a row is an algorithm's name or 'LABEL=ALGORITHM --options', not {spec!r}")
    label, equals, first = words[0].partition("=")
    if not equals:
        label, first = words[0].rpartition(":")[2], words[0]
    if not LABEL_PATTERN.fullmatch(label):
        raise ConfigError(
            f"the label {label!r} of the row {spec!r} names a folder: letters, digits and . _ + - make one"
        )
    return RowRequest(label, (first, *words[1:]))


def _split_words(text: str, what: str) -> list[str]:
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
        found[label] = merge_argv(found.get(label, ()), _split_words(text, f"--options {spec!r}"))
    return found


def _check(label: str, words: Sequence[str]) -> None:
    if taken := [option for option in RESERVED_OPTIONS if option in option_names(words)]:
        ways = {"--seed": "--seeds", "--tokens": "--tokens of compare", "--output": "--output of compare"}
        raise ConfigError(
            f"the row {label} has {taken[0]}, which the comparison sets for every run: {ways.get(taken[0], 'leave it out')}"
        )


TOKENS = 250_000
HELP = (
    "Compare algorithms: learning curves with bootstrap bands, area under them, what it takes to reach a score, and which is above "
    "which, at equal tokens, updates and seconds.",
    "ROW is an algorithm that `policygrad train` takes, or, in quotes, LABEL=ALGORITHM with options of train: "
    "'tight=grpo --algorithm.gate.high 0.1'. What follows a -- is given to every run: -- --task embedded_steps --max-tokens 24",
    "Every run is a process of its own and lies in the comparison's folder with its log; Ctrl-C ends runs after the step at hand, "
    "and --resume goes on. comparison.html, comparison.json and plan.json are beside them.",
)


PLAN_OPTIONS = ("tokens", "seeds", "lr_grid", "delta_grid", "tuning_seeds", "options", "no_overrides")
"""Options that the plan holds: what is run."""


@dataclass(frozen=True)
class CompareOptions:
    """Options of `policygrad compare`."""

    rows: Annotated[
        tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="[ROW ...]", help_behavior_hint="")
    ] = ()
    """What is compared."""
    ladder: Annotated[str | None, optional_arg("|".join(LADDERS), "none")] = None
    """A method taken apart: its parts as rows, added one at a time in its paper's order, on a task where they matter."""
    tokens: Annotated[int, tyro.conf.arg(aliases=["--budget-tokens"])] = TOKENS
    """Sampled tokens of every run."""
    seeds: int = 5
    """How many are reported, from 0."""
    lr_grid: Annotated[str, optional_arg("FLOAT,FLOAT,…", "none: the default rate")] = ""
    """Learning rates: each row runs all of them on tuning seeds and is reported at its best one."""
    delta_grid: Annotated[str, optional_arg("FLOAT,FLOAT,…", "none")] = ""
    """The same for rows that have no learning rate but a trust region: step lengths δ, nats a token."""
    tuning_seeds: int = 2
    """How many seeds the grids are compared on; never those that are reported."""
    options: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], optional_arg("LABEL='--…'", "none")] = ()
    """Options of train for one row; may be given again for others."""
    no_overrides: bool = False
    """Leave named algorithms as they are on the embedded task too; without it vapo, say, gets an α for short answers."""
    jobs: int = 1
    """Runs at a time."""
    threads: Annotated[int | None, optional_arg("INT", "the cores, shared by the jobs")] = None
    """Threads of each run."""
    threshold: float = 0.8
    """What is to be reached, as a share of the way from the score before training to the best row's final one."""
    output: Annotated[str | None, optional_arg("DIR", "the next free comparisons/NAME-N")] = None
    """The comparison's folder; one that holds the same comparison is gone on with."""
    resume: Annotated[str | None, optional_arg("DIR", "none")] = None
    """Go on with the comparison in this folder; runs that failed are tried again."""
    allow_code: Annotated[tuple[str, ...], optional_arg("MODULE|FILE", "what is in the current folder")] = ()
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
        if self.seeds > FIRST_TUNING_SEED:
            raise ConfigError(
                f"--seeds must be at most {FIRST_TUNING_SEED}: learning rates are chosen on those from {FIRST_TUNING_SEED} on"
            )
        if not 0 < self.threshold <= 1:
            raise ConfigError(f"--threshold is a share of the way, above 0 and at most 1, not {self.threshold:g}")
        if self.ladder is not None and self.ladder not in LADDERS:
            raise ConfigError(f"unknown ladder {self.ladder!r}: there is {', '.join(LADDERS)}")
        if self.resume is None and (self.allow_code or self.trust_remote_code):
            flag = "--allow-code" if self.allow_code else TRUST_FLAG
            raise ConfigError(
                f"{flag} is for what --resume reads from plan.json: for the runs write it behind a --, -- {flag} …"
            )


def compare(args: list[str]) -> int:
    """`policygrad compare ROW … [options] [-- options of train]`; 1 = a run failed."""
    reject_cluster_flags(args, "compare", "has runs side by side on this machine, --jobs N")
    mine, common = _split(args)
    reject_empty_values(mine, "--allow-code")
    options = tyro.cli(
        CompareOptions,
        args=mine,
        prog="policygrad compare",
        description=wrap_paragraphs(*HELP),
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    plan, folder = _planned(options, common, shlex.join(["policygrad", "compare", *args]))
    if options.dry_run:
        print(format_commands(plan))
        return 0
    return run_comparison(plan, folder, options)


def run_comparison(plan: ComparisonPlan, folder: Path, options: CompareOptions) -> int:
    """Runs what is missing, and reports."""
    from policygrad.compare.page import render_comparison
    from policygrad.compare.report import build_report, too_few_seeds
    from policygrad.compare.runner import ComparisonRun, SubprocessRunner
    from policygrad.utils.filesystem import hold_lock

    plan = open_comparison(folder, plan)
    threads = options.threads or max(1, _cores() // options.jobs)
    with hold_lock(folder / "lock"):
        print(
            f"{folder}: {pluralise(options.jobs, 'runs')} at a time, {pluralise(threads, 'threads')} each",
            file=sys.stderr,
        )
        if few := too_few_seeds(plan):
            _say(few)
        results = ComparisonRun(
            plan, folder, SubprocessRunner(threads, allow=options.allow_code), options.jobs, _say
        ).run()
        found = build_report(plan, results, options.threshold)
        text = json.dumps(found.to_dict(), ensure_ascii=False) + "\n"
        write_text_file(folder / "comparison.json", text, "--output")
        write_text_file(folder / "comparison.html", render_comparison(found), "--output")
    _show(found, options.json, text)
    _say(f"{folder / 'comparison.html'}")
    for job, error in results.failures.items():
        _say(f"failed: {job}: {error.splitlines()[-1]}")
    if results.stopped:
        _say(
            f"stopped; go on with: {shlex.join(['policygrad', 'compare', '--resume', str(folder), *list_permission_flags(plan, folder)])}"
        )
        return STOPPED
    return 1 if results.failures else 0


def format_commands(plan: ComparisonPlan) -> str:
    """Every run's command; those that are reported at what the tuning runs choose have the grid in the rate's place."""
    from policygrad.compare.report import too_few_seeds

    lines = (
        [f"# {len(plan.tuning_jobs())} runs to choose by, {len(plan.rows) * len(plan.seeds)} to report"]
        if plan.tuning_jobs()
        else []
    )
    lines += [f"# {few}"] if (few := too_few_seeds(plan)) else []
    lines += [shlex.join(["policygrad", *plan.train_argv(job)]) for job in plan.tuning_jobs()]
    for job in plan.reported_jobs({row.label: row.grid[0] if row.grid else None for row in plan.rows}):
        row = plan.row(job.row)
        line = shlex.join(["policygrad", *plan.train_argv(job)])
        lines.append(
            f"{line}  # {row.tuned_option}: the best of {', '.join(f'{x:g}' for x in row.grid)}"
            if row.is_tuned
            else line
        )
    return "\n".join(lines)


def _planned(options: CompareOptions, common: Sequence[str], command: str) -> tuple[ComparisonPlan, Path]:
    """The plan, and where it is carried out."""
    if options.resume is not None:
        if options.rows or options.ladder or common or options.output:
            raise ConfigError(
                "--resume goes on with what plan.json in the folder says: give no rows, no --output and no options of train"
            )
        usual = CompareOptions()
        if said := [name for name in PLAN_OPTIONS if getattr(options, name) != getattr(usual, name)]:
            flags = " and ".join(f"--{name.replace('_', '-')}" for name in said)
            raise ConfigError(
                f"--resume goes on with what plan.json in the folder says, and {flags} would change it: leave that out, or "
                "begin another comparison, in a folder of its own"
            )
        plan, folder = read_plan(Path(options.resume)), Path(options.resume)
        check_plan(plan, folder, CodePermissions(options.allow_code, options.trust_remote_code))
        return plan, folder
    ladder = LADDERS[options.ladder] if options.ladder else None
    if not options.rows and ladder is None:
        raise ConfigError(
            "nothing to compare: name algorithms, as in `policygrad compare grpo dr_grpo dapo`, or --ladder dapo"
        )
    from policygrad import __version__

    plan = ComparisonPlan(
        rows=build_rows(
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
        tuning_seeds=tuple(range(FIRST_TUNING_SEED, FIRST_TUNING_SEED + options.tuning_seeds)),
        command=command,
        version=__version__,
        ladder=ladder.to_dict() if ladder else {},
    )
    from policygrad.training.config.run import check_folders

    check_folders(options.output)
    named = None if options.output is None else Path(options.output)
    return plan, named or next_comparison_folder([row.label for row in plan.rows], options.ladder)


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


def _show(found: ComparisonReport, as_json: bool, text: str) -> None:
    """On standard output the table, or the JSON where it was asked for."""

    if as_json:
        print(text, end="")
        return
    words.print_lines(format_comparison(found, shutil.get_terminal_size((100, 24)).columns))


if __name__ == "__main__":
    sys.exit(compare(sys.argv[1:]))


# A comparison in the terminal: one row per algorithm, then what it is about, then what cannot be concluded.

Column = tuple[str, Callable[[RowReport], str]]
MISSING = "–"


def format_comparison(found: ComparisonReport, width: int) -> list[StyledLine]:
    """The whole report, no line longer than `width` where its columns allow."""
    text = max(40, min(width, 110))
    lines: list[StyledLine] = []
    for number, kind in enumerate(found.kinds):
        rows = [row for row in found.rows if row.kind == number]
        lines += [*_heading(found, kind, width), *_columns(rows, _figures(found, rows), width), ()]
        lines += [*_reach(found, kind, rows, width), *_above(found, rows, width)]
    lines += _tuning(found, width)
    for title, sentences in (
        ("What it says", found.ranking),
        ("What differs besides the algorithm", found.differences),
        ("What cannot be concluded", found.caveats),
    ):
        if not sentences:
            continue
        lines.append(((title, HEAD),))
        for sentence in sentences:
            lines += wrap_styled((("  · ", QUIET),), sentence, text)
        lines.append(())
    for row in found.rows:
        for failure in row.failed:
            at = "" if failure["value"] is None else f" at {failure['value']:g}"
            lines += wrap_styled(
                (("failed  ", HEAD),),
                f"{row.label}{at}, seed {failure['seed']}: {failure['error'].splitlines()[-1]}",
                text,
            )
    return lines


def _heading(found: ComparisonReport, kind: Kind, width: int) -> list[StyledLine]:
    task, model = kind.measure.get("task", ""), kind.measure.get("model", "")
    head = f"{task}, {model}: {found.tokens:,} tokens a run, {pluralise(len(found.seeds), 'seeds')}"
    says = (
        "interquartile mean of held-out scores [95 % bootstrap interval over seeds]; * = at the edge of its grid; entropy, KL to "
        "the reference (nats a token), length and share cut off: means over the last fifth of the steps"
    )
    return [*wrap_styled((), head, width, HEAD), *wrap_styled((), says, width, QUIET)]


def _figures(found: ComparisonReport, rows: Sequence[RowReport]) -> list[Column]:
    """Columns of the table; a value, its interval and what it cost."""

    def equal(axis: str) -> Callable[[RowReport], str]:
        return lambda row: _estimate(row.summary.equal[axis]) if row.summary else MISSING

    columns: list[Column] = [("", lambda row: row.label)]
    columns.append(
        ("lr", lambda row: format_learning_rate(row) + "*" * (bool(row.edge) and row.tuned_option == "--lr"))
    )
    if any(row.option_value is not None and row.tuned_option != "--lr" for row in rows):
        columns.append(
            (
                "tuned",
                lambda row: MISSING if row.option_value is None else f"{row.option_value:g}" + "*" * bool(row.edge),
            )
        )
    columns += [(f"equal {axis}", equal(axis)) for axis in AXES]
    columns += [("area", lambda row: _estimate(row.summary.area) if row.summary else MISSING)]
    columns += [("entropy", _mean("entropy", _fine)), ("KL", _mean("kl", _fine))]
    columns += [("length", _mean("length")), ("cut off", _percent("truncated"))]
    columns += [(name, _mean(name)) for name in ("updates", "tokens", "seconds")]
    columns.append(("seeds", lambda row: str(len(row.runs))))
    return columns


def _mean(name: str, told: Callable[[float], str] | None = None) -> Callable[[RowReport], str]:
    told = told or _short
    return lambda row: told(row.summary.means[name]) if row.summary and name in row.summary.means else MISSING


def _percent(name: str) -> Callable[[RowReport], str]:
    return lambda row: f"{row.summary.means[name]:.0%}" if row.summary and name in row.summary.means else MISSING


def _reach(found: ComparisonReport, kind: Kind, rows: Sequence[RowReport], width: int) -> list[StyledLine]:
    """Tokens, updates and seconds to the threshold."""
    if not any(row.summary for row in rows):
        return []
    if kind.threshold is None:
        return [*wrap_styled((), "No row's score rose: there is no threshold to reach.", width), ()]

    def cell(axis: str) -> Callable[[RowReport], str]:
        def told(row: RowReport) -> str:
            reach = row.summary.reach[axis] if row.summary else None
            if reach is None:
                return MISSING
            return "not reached" if reach.median is None else _short(reach.median)

        return told

    columns: list[Column] = [("", lambda row: row.label), *((axis, cell(axis)) for axis in AXES)]
    columns.append(("runs that reach it", lambda row: _share(row)))
    head = f"To a score of {kind.threshold:.3f}, {found.share:.0%} of the way: median over seeds"
    return [*wrap_styled((), head, width, HEAD), *_columns(rows, columns, width), ()]


def _share(row: RowReport) -> str:
    if row.summary is None:
        return MISSING
    reach = row.summary.reach["tokens"]
    return f"{reach.num_reached} of {len(reach.each)}"


def _above(found: ComparisonReport, rows: Sequence[RowReport], width: int) -> list[StyledLine]:
    """P(row above column) at equal tokens; a star where the interval leaves ½ out."""
    labels = [row.label for row in rows if row.summary]
    if len(labels) < 2:
        return []
    cells: dict[tuple[str, str], str] = {}
    for pair in found.pairs:
        p = pair.probability["tokens"]
        star = "*" * pair.separated["tokens"]
        cells[pair.first, pair.second] = f"{p.value:.2f}{star}"
        cells[pair.second, pair.first] = f"{1 - p.value:.2f}{star}"
    columns: list[Column] = [("", lambda row: row.label)]
    columns += [(label, lambda row, label=label: cells.get((row.label, label), MISSING)) for label in labels]  # type: ignore[misc]
    head = "P(row above column) at equal tokens; * = told apart, the 95 % interval leaves ½ out"
    return [*wrap_styled((), head, width, HEAD), *_columns([row for row in rows if row.summary], columns, width), ()]


def _tuning(found: ComparisonReport, width: int) -> list[StyledLine]:
    """Mean final score of every value on the tuning seeds."""
    rows = [row for row in found.rows if row.tuning]
    if not rows:
        return []
    values = sorted({tried.value for row in rows for tried in row.tuning})

    def cell(value: float) -> Callable[[RowReport], str]:
        def told(row: RowReport) -> str:
            mean = next((tried.mean for tried in row.tuning if tried.value == value), None)
            return MISSING if mean is None else f"{mean:.3f}{'*' * (value == row.option_value)}"

        return told

    columns: list[Column] = [("", lambda row: row.label), *((f"{value:g}", cell(value)) for value in values)]
    head = f"Mean final score by value, seeds {', '.join(map(str, found.tuning_seeds))}; * = chosen"
    return [*wrap_styled((), head, width, HEAD), *_columns(rows, columns, width), ()]


def _columns(rows: Sequence[RowReport], columns: Sequence[Column], width: int) -> list[StyledLine]:
    """Rows in aligned columns; those that do not fit come below, each block with the labels."""
    cells = [[cell(row) for row in rows] for _, cell in columns]
    widths = [max(map(len, [head, *column])) for (head, _), column in zip(columns, cells, strict=True)]
    lines: list[StyledLine] = []
    rest = list(range(1, len(columns)))
    while rest:
        block = [rest.pop(0)]
        while rest and widths[0] + sum(widths[i] + 2 for i in [*block, rest[0]]) <= width:
            block.append(rest.pop(0))
        head = " " * widths[0] + "".join("  " + columns[i][0].rjust(widths[i]) for i in block)
        lines.append(((head, HEAD),))
        for number in range(len(rows)):
            told = "".join("  " + cells[i][number].rjust(widths[i]) for i in block)
            lines.append(((cells[0][number].ljust(widths[0]), NAME), (told, "")))
    return lines


def _estimate(x: Estimate) -> str:
    return f"{x.value:.3f} [{x.low:.3f} {x.high:.3f}]"


def _fine(x: float) -> str:
    """0.56, 0.0031: nats a token."""
    return f"{x:.2g}"


def _short(x: float) -> str:
    """38, 1.2k, 250k."""
    if x < 1000:
        return f"{x:.0f}" if x >= 10 else f"{x:.1f}"
    return f"{x / 1000:.3g}k" if x < 1e6 else f"{x / 1e6:.3g}M"
