"""`policygrad compare`: compare algorithms, each run being an ordinary `policygrad train`."""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, TypedDict

import tyro

from policygrad.commands import STOPPED
from policygrad.commands.json_output import print_json, prints
from policygrad.commands.options import (
    check_at_least_1,
    check_export_folder,
    reject_cluster_flags,
    reject_empty_values,
    write_figures,
    write_text_file,
)
from policygrad.commands.parsing import parse_arguments
from policygrad.commands.styled import (
    HEAD,
    QUIET,
    Column,
    StyledLine,
    align_columns,
    get_terminal_width,
    print_lines,
    wrap_styled,
)
from policygrad.compare.page import format_short, render_comparison
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
    next_comparison_folder,
    open_comparison,
    read_plan,
)
from policygrad.compare.preregistration import (
    PREREGISTRATION_FILE,
    check_unstarted,
    list_deviations,
    note_preregistration,
    preregister,
    read_preregistration,
    record_deviations,
    write_preregistration,
)
from policygrad.compare.report import (
    DEFAULT_METRIC,
    METRICS,
    ComparisonReport,
    RowReport,
    build_report,
    describe_claims,
    describe_preregistration,
    format_learning_rate,
    pluralise,
    too_few_seeds,
)
from policygrad.compare.runner import AXES, ComparisonRun, SubprocessRunner
from policygrad.compare.variations import vary_row
from policygrad.errors import ConfigError, RunError
from policygrad.models.loading import TRUST_FLAG
from policygrad.samplers.base import SamplingParams
from policygrad.training.config.option_checks import check_folders
from policygrad.training.config.optional_arg import optional_arg
from policygrad.training.config.run import Run, RunOptions, find_idle_settings
from policygrad.training.config.trust import (
    CodePermissions,
    code_in_argv,
    filter_unpermitted,
    find_remote_targets,
    require_permissions,
)
from policygrad.utils.argv import merge_argv, option_names, option_values
from policygrad.utils.filesystem import hold_lock, write_atomically

# Rows: merge the arguments of each, check them by a dry run, and note its settings.

RESERVED_OPTIONS = ("--seed", "--output", "--resume", "--tokens", "--stop-after", "--dry-run", "--plain", "--json")
"""Options of train that only the comparison may set."""
PROBLEMS, SAMPLES = 256, 2
EVAL_FRACTION = 0.25
"""Maximum number of completions for evaluation, as a fraction of those for training: about a tenth of a run's time."""
DEFAULT_OPTIONS = shlex.split(
    f"--evaluation.problems {PROBLEMS} --evaluation.samples-per-prompt {SAMPLES} --checkpoint.every 10 --checkpoint.keep 1"
)
MIN_STEPS = 1000
ALLOW = "--allow-code"


@dataclass(frozen=True)
class RowRequest:
    """A row as given on the command line."""

    label: str
    argv: tuple[str, ...]
    change: str = ""


def vary_rows(specs: Sequence[str], vary: Sequence[str], lr_grid: str) -> list[str]:
    """Return the only row once for each combination of the values that --vary names, labelled by what differs."""
    from policygrad.commands.train import get_switches

    if len(specs) != 1:
        raise ConfigError(
            f"--vary changes options of one row, and there are {len(specs)}: name one algorithm, 'policygrad compare grpo --vary …'"
        )
    label, first, *words = _parse_spec(specs[0])
    rows = vary_row((first, *words), vary, get_switches())
    if lr_grid and any("--lr" in option_names(row.argv) for row in rows):
        raise ConfigError("--vary lr leaves nothing for --lr-grid to choose: give only one of them")
    prefix = "" if label == first.rpartition(":")[2] else f"{label}+"
    return [shlex.join((f"{prefix}{row.label}={row.argv[0]}", *row.argv[1:])) for row in rows]


def _parse_spec(spec: str) -> list[str]:
    """Return label, algorithm and options of `grpo`, `LABEL=grpo`, `LABEL=grpo --options` or `mine.py:ALGORITHM`."""
    words = _split_words(spec, f"the row {spec!r}")
    if not words or words[0].startswith("-"):
        raise ConfigError(f"a row must be an algorithm's name or 'LABEL=ALGORITHM --options', not {spec!r}")
    label, equals, first = words[0].partition("=")
    if not equals:
        label, first = words[0].rpartition(":")[2], words[0]
    if not LABEL_PATTERN.fullmatch(label):
        raise ConfigError(f"the label {label!r} of the row {spec!r} names a folder: use letters, digits and . _ + -")
    return [label, first, *words[1:]]


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
    """Build the rows of a plan. Precedence: ladder setting < override < common options < the row < options of the row."""
    request = [RowRequest(*rung) for rung in ladder.rows()] if ladder else []
    for spec in specs:
        label, *argv_of_row = _parse_spec(spec)
        request.append(RowRequest(label, tuple(argv_of_row)))
    labels = [row.label for row in request]
    if twice := sorted({label for label in labels if labels.count(label) > 1}):
        raise ConfigError(f"two rows are called {twice[0]!r}: give one another name, 'LABEL={twice[0]} …'")
    row_options: dict[str, tuple[str, ...]] = {}
    for spec in options:
        label, equals, text = spec.partition("=")
        if not equals or label not in labels:
            raise ConfigError(f"--options {spec!r}: write LABEL='--option value', where LABEL is {' or '.join(labels)}")
        row_options[label] = merge_argv(row_options.get(label, ()), _split_words(text, f"--options {spec!r}"))
    setting = ladder.setting if ladder else ()
    if "--lr" in option_names(common) and lr_grid:
        raise ConfigError("--lr for all rows leaves nothing for --lr-grid to choose; give only one of them")
    rows, grids = [], dict(zip(TUNABLE_OPTIONS, (lr_grid, delta_grid), strict=True))
    for row in request:
        adapts = overrides and not {"--task", "--model"} & option_names([*common, *setting])
        override = OVERRIDES.get(row.argv[0]) if adapts else None
        layers = (setting, override.options if override else (), common, row.argv[1:], row_options.get(row.label, ()))
        for layer in layers:
            if layer and not layer[0].startswith("--"):
                raise ConfigError(f"the row {row.label}: {layer[0]!r} is no option; give each row as an argument")
        argv = merge_argv(row.argv[:1], *layers)
        _check(row.label, argv)
        rows.append(_row(row, argv, override.reason if override else "", grids, tokens))
    return tuple(rows)


def _row(
    request: RowRequest, argv: tuple[str, ...], reason: str, grids: Mapping[str, tuple[float, ...]], tokens: int
) -> ComparisonRow:
    """Return the row with its tuned option, its evaluation interval and its settings."""
    argv = merge_argv(argv[:1], DEFAULT_OPTIONS, argv[1:])
    run = resolve_row(request.label, argv)
    if not run.evaluation.problems:
        raise ConfigError(f"the row {request.label} has no evaluation problems. Set --evaluation.problems above 0.")
    answers = run.prompts_per_step * run.effective_samples_per_prompt
    every = math.ceil(run.evaluation.problems * run.evaluation.samples_per_prompt / (EVAL_FRACTION * answers))
    steps = max(MIN_STEPS, tokens // answers + 1)  # tokens end a run, not steps
    argv = merge_argv(argv[:1], ("--evaluation.every", str(every), "--steps", str(steps)), argv[1:])
    # Tune the learning rate, or the radius of a trust region, unless the row sets it.
    rule = run.algorithm.update_rule
    setting, _ = rule.step_size or ("", "")
    size = "--lr" if rule.uses_lr else f"--algorithm.update-rule.{setting}"
    knob = size if size in grids and size not in option_names(argv) else ""
    grid = grids.get(knob, ())
    tried = resolve_row(request.label, (*argv, knob, f"{grid[0]:g}") if grid else argv)
    measure = {
        "model": tried.model,
        "task": tried.task,
        "eval_data": tried.eval_data or "",
        "reward": ", ".join(tried.reward),
        "max_tokens": tried.sampling.max_tokens,
        "temperature": tried.sampling.temperature,
        "problems": tried.evaluation.problems,
        "samples": tried.evaluation.samples_per_prompt,
    }
    settings = {
        "updates_per_rollout": tried.algorithm.update_rule.updates,
        "samples_per_prompt": tried.effective_samples_per_prompt,
        "prompts_per_step": tried.prompts_per_step,
        "evaluated_every": tried.evaluation.every,
    }
    return ComparisonRow(
        label=request.label,
        argv=argv,
        algorithm=run.algorithm.name,
        tuned_option=knob,
        grid=grid,
        measure=measure,
        settings=settings if grid and rule.uses_lr else {**settings, "lr": tried.lr},
        change=request.change,
        reason=reason,
    )


def resolve_row(label: str, argv: Sequence[str]) -> Run:
    """Return the resolved run of `policygrad train ARGV`; errors name the row."""
    from policygrad.commands.train import parse_run

    try:
        run, _ = parse_run([*argv])
    except ConfigError as error:
        raise ConfigError(f"the row {label}: {error}") from error
    except SystemExit as end:  # the parser has said what is wrong
        if not end.code:
            raise
        raise ConfigError(f"the row {label}: train does not take these options: {shlex.join(argv[1:])}") from end
    return run.resolve()


def describe_idle_rows(plan: ComparisonPlan) -> list[str]:
    """Return which settings of rows can have no effect, with the rows that have them."""
    rows = dict[str, list[str]]()
    for row, run in zip(plan.rows, resolve_rows(plan), strict=True):
        for text in find_idle_settings(run):
            if " no effect: " in text:
                rows.setdefault(text, []).append(row.label)
    return [f"{', '.join(labels)}: {text}" for text, labels in rows.items()]


def resolve_rows(plan: ComparisonPlan) -> list[Run]:
    """Return the resolved run of each row."""
    return [resolve_row(row.label, row.argv) for row in plan.rows]


def check_plan(plan: ComparisonPlan, folder: Path, path: Path, allowed: CodePermissions) -> None:
    """Check a plan read from a file, to be run in `folder`: its rows may only have options of rows, and run code with permission.

    The file does not show who wrote it.
    """
    from policygrad.commands.train import TrainOptions

    known = {f.name.replace("_", "-") for kind in (RunOptions, SamplingParams, TrainOptions) for f in fields(kind)}
    for row in plan.rows:
        _check(row.label, row.argv)
        reject_cluster_flags(row.argv, "compare", "runs on this machine")
        if unknown := {name for name in option_names(row.argv) if name.partition(".")[0][2:] not in known}:
            raise ConfigError(f"{path}: the row {row.label} has {min(unknown)}, which is no option of train; remove it")
    for job in plan.all_jobs():
        if not (folder / job.folder).resolve().is_relative_to(folder.resolve()):
            raise ConfigError(f"{folder / job.folder} is a link that leads out of {folder}; remove it")
    argv = [word for row in plan.rows for word in row.argv]
    require_permissions(_missing(plan, path, allowed), TRUST_FLAG in option_names(argv), path, allowed)


def _missing(plan: ComparisonPlan, path: Path, allowed: CodePermissions, *, new_process: bool = False) -> list[str]:
    """Return what the rows name without permission, row by row because each has its own `--directory`.

    A row's own --allow-code grants nothing.
    """
    missing = set[str]()
    for row in plan.rows:
        missing |= set(option_values(row.argv, ALLOW)) - set(allowed.names)
        missing |= set(filter_unpermitted(code_in_argv(row.argv), path, allowed, new_process=new_process))
        for place in option_values(row.argv, "--sampler.folder"):
            missing |= set(find_remote_targets({"sampler": {"folder": place}}, path, allowed))
    return sorted(missing)


def _split_words(text: str, what: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"{what}: {error}. Close the quotation, or write \\ before a single quote.") from error


def _check(label: str, argv: Sequence[str]) -> None:
    if reserved := [option for option in RESERVED_OPTIONS if option in option_names(argv)]:
        ways = {"--seed": "use --seeds", "--tokens": "use --tokens of compare", "--output": "use --output of compare"}
        raise ConfigError(
            f"the row {label} has {reserved[0]}, which the comparison sets for every run; {ways.get(reserved[0], 'omit it')}"
        )


TOKENS = 250_000
HELP = (
    "Compare algorithms: learning curves with bootstrap bands, area under them, effort to reach a score, and rankings at equal "
    "tokens, updates and seconds.",
    "ROW is an algorithm that `policygrad train` takes, or, in quotes, LABEL=ALGORITHM with options of train: "
    "'tight=grpo --algorithm.gate.high 0.1'. Options after a -- apply to every run: -- --task embedded_steps --max-tokens 24",
    "--vary lr=1e-6,1e-5 --vary algorithm.gate.high=0.2,0.28 makes a row of each combination, for one ROW.",
    "Every run is a process with its own log in the comparison's folder, next to comparison.html, comparison.json and plan.json. "
    "Ctrl-C ends runs after the current step; --resume continues.",
)


PLAN_OPTIONS = ("ladder", "tokens", "seeds", "lr_grid", "delta_grid", "tuning_seeds", "vary", "options", "no_overrides")
"""Options that are part of the plan."""


@dataclass(frozen=True)
class CompareOptions:
    """Options of `policygrad compare`."""

    rows: Annotated[
        tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="[ROW ...]", help_behavior_hint="")
    ] = ()
    """Rows to compare."""
    ladder: Annotated[str | None, optional_arg("|".join(LADDERS), "none")] = None
    """An ablation of a method: its parts added one at a time, in its paper's order, on a suitable task."""
    tokens: Annotated[int, tyro.conf.arg(aliases=["--budget-tokens"])] = TOKENS
    """Sampled tokens per run."""
    seeds: int = 5
    """Number of seeds to report, starting at 0."""
    lr_grid: Annotated[str, optional_arg("FLOAT,FLOAT,…", "none: the default rate")] = ""
    """Learning rates to try on tuning seeds; each row is reported with its best one."""
    delta_grid: Annotated[str, optional_arg("FLOAT,FLOAT,…", "none")] = ""
    """The same for rows with a trust region instead of a learning rate: radii δ in nats per token."""
    tuning_seeds: int = 2
    """Number of seeds for the grids, which are never reported."""
    vary: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], optional_arg("OPTION=VALUE,…", "none")] = ()
    """A grid over an option of train, of one ROW: lr=1e-6,1e-5; can be repeated, and each combination of values is a row."""
    options: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], optional_arg("LABEL='--…'", "none")] = ()
    """Options of train for one row; can be repeated."""
    no_overrides: bool = False
    """Do not adapt named algorithms to the embedded task; by default vapo, for example, gets an α for short answers."""
    jobs: int = 1
    """Concurrent runs."""
    threads: Annotated[int | None, optional_arg("INT", "cores divided by jobs")] = None
    """Threads per run."""
    threshold: float = 0.8
    """Score to reach, as a fraction of the way from the score before training to the best row's final score."""
    metric: Annotated[str, tyro.conf.arg(metavar="|".join(METRICS))] = DEFAULT_METRIC
    """What sentences about two rows are about: scores at equal tokens, updates or seconds, or the area under curves."""
    preregister: Annotated[Path | None, optional_arg("FILE", "none")] = None
    """Write the plan, the rules and hashes of code and data to this new file, and run nothing."""
    preregistered: Annotated[Path | None, optional_arg("FILE", "none")] = None
    """Carry out the comparison in a file that --preregister wrote; deviations are refused by name."""
    deviate: bool = False
    """Carry out a preregistered comparison in spite of deviations, which the report then lists."""
    output: Annotated[str | None, optional_arg("DIR", "the next free comparisons/NAME-N")] = None
    """Folder of the comparison; if it holds the same comparison, that is continued."""
    resume: Annotated[str | None, optional_arg("DIR", "none")] = None
    """Continue the comparison in this folder; failed runs are retried."""
    allow_code: Annotated[tuple[str, ...], optional_arg("MODULE|FILE", "what is in the current folder")] = ()
    """With --resume or --preregistered: code that the file and the runs in the folder may import."""
    trust_remote_code: bool = False
    """With --resume or --preregistered: allow Python code in a model's folder to run if the file requests it."""
    export: Annotated[Path | None, optional_arg("FOLDER", "not written")] = None
    """Also write figures (SVG, CSV), LaTeX tables with intervals, and the sentences that the data allow into this folder."""
    json: bool = False
    """Print the report as one JSON object instead of a table; comparison.json holds it, too."""
    dry_run: bool = False
    """Print every run's command without running it."""

    def __post_init__(self) -> None:
        check_at_least_1(self, "tokens", "seeds", "jobs", "tuning_seeds", "threads")
        if self.seeds > FIRST_TUNING_SEED:
            raise ConfigError(f"--seeds must be at most {FIRST_TUNING_SEED}; higher seeds are for tuning")
        if not 0 < self.threshold <= 1:
            raise ConfigError(f"--threshold must be above 0 and at most 1, not {self.threshold:g}")
        if self.ladder is not None and self.ladder not in LADDERS:
            raise ConfigError(f"unknown ladder {self.ladder!r}; available: {', '.join(LADDERS)}")
        if self.metric not in METRICS:
            raise ConfigError(f"--metric must be one of {', '.join(METRICS)}, not {self.metric!r}")
        if self.resume is None and self.preregistered is None and (self.allow_code or self.trust_remote_code):
            flag = "--allow-code" if self.allow_code else TRUST_FLAG
            raise ConfigError(f"{flag} applies to --resume; for the runs write it after --: -- {flag} …")
        if self.preregister is not None and (self.resume or self.preregistered or self.output or self.dry_run):
            raise ConfigError(
                "--preregister writes a plan and runs nothing: omit --output, --resume, --preregistered and --dry-run"
            )
        if self.export is not None and (self.preregister is not None or self.dry_run):
            raise ConfigError(
                "--export writes figures of results, and --preregister and --dry-run run nothing: omit it"
            )
        if self.resume is not None and self.preregistered is not None:
            raise ConfigError("--resume continues a preregistered comparison as it began it; omit --preregistered")


class PlannedCommand(TypedDict):
    """A run of a comparison."""

    row: str
    seed: int
    tuned_option: str
    """Option that is tuned; empty if none is."""
    best_of: list[float]
    """A reported run of a tuned row takes the best of these values; `argv` has the first."""
    argv: list[str]


class PlannedCommands(TypedDict):
    """--dry-run: every run's command."""

    commands: list[PlannedCommand]


class Preregistered(TypedDict):
    """--preregister: the file that was written."""

    preregistration: str
    sha256: str
    date: str


@prints(ComparisonReport, PlannedCommands, Preregistered)
def compare(args: list[str]) -> int:
    """Run `policygrad compare ROW … [options] [-- options of train]`; 1 = a run failed."""
    reject_cluster_flags(args, "compare", "runs on this machine, several at a time with --jobs N")
    at = args.index("--") if "--" in args else len(args)
    mine, common = args[:at], args[at + 1 :]
    reject_empty_values(mine, "--allow-code")
    options = parse_arguments(CompareOptions, mine, "compare", *HELP)
    permissions = CodePermissions(options.allow_code, options.trust_remote_code)
    usual = CompareOptions()
    if options.resume is not None:
        if options.rows or options.ladder or common or options.output:
            raise ConfigError("--resume continues plan.json in the folder; omit rows, --output and options of train")
        if changed := [name for name in PLAN_OPTIONS if getattr(options, name) != getattr(usual, name)]:
            flags = " and ".join(f"--{name.replace('_', '-')}" for name in changed)
            raise ConfigError(
                f"--resume continues plan.json in the folder, and {flags} would change it. Omit that, or start another "
                "comparison in its own folder."
            )
        plan, folder = read_plan(Path(options.resume)), Path(options.resume)
        check_plan(plan, folder, folder / PLAN_FILE, permissions)
    elif options.preregistered is not None:
        registered = read_preregistration(options.preregistered)
        names = (*PLAN_OPTIONS, "metric", "threshold")
        changed = [f"--{n.replace('_', '-')}" for n in names if getattr(options, n) != getattr(usual, n)]
        if changed := ["rows"] * bool(options.rows) + ["options of train"] * bool(common) + changed:
            raise ConfigError(
                f"--preregistered {options.preregistered} sets the rows and everything about them, and {' and '.join(changed)} "
                "would change it. Omit that, or start a comparison of its own without --preregistered."
            )
        plan, labels = registered.plan, [row.label for row in registered.plan.rows]
        folder = Path(options.output) if options.output else next_comparison_folder(labels, None)
        check_plan(plan, folder, options.preregistered, permissions)
        check_folders(options.output)
        check_unstarted(folder, options.preregistered.read_bytes())
    else:
        plan, folder = plan_comparison(options, common, args)
    if options.preregister is not None:
        written = preregister(plan, resolve_rows(plan), options.metric, options.threshold)
        sha256 = write_preregistration(written, options.preregister)
        if options.json:
            print_json({"preregistration": options.preregister, "sha256": sha256, "date": written.date})
        else:
            print(f"{options.preregister}\nsha256 {sha256}\ndate   {written.date}")
        return 0
    for text in describe_idle_rows(plan):
        _say(f"note: {text}")
    if options.dry_run:
        if options.json:
            print_json({"commands": list_commands(plan)})
        else:
            print(format_commands(plan))
        return 0
    return run_comparison(plan, folder, options)


def plan_comparison(options: CompareOptions, common: Sequence[str], args: Sequence[str]) -> tuple[ComparisonPlan, Path]:
    """Plan a new comparison; return it with its folder.

    Args:
        common: Options of train for every row.
        args: The command's arguments, which the report names.

    Raises:
        ConfigError: There is nothing to compare, or options that exclude each other.
    """
    from policygrad import __version__

    ladder = LADDERS[options.ladder] if options.ladder else None
    if not options.rows and ladder is None:
        raise ConfigError(
            "nothing to compare. Name algorithms, as in `policygrad compare grpo dr_grpo dapo`, or use --ladder dapo."
        )
    if options.vary and ladder is not None:
        raise ConfigError("--vary changes options of one row, and --ladder names its own: give only one of them")
    specs = vary_rows(options.rows, options.vary, options.lr_grid) if options.vary else options.rows
    plan = ComparisonPlan(
        rows=build_rows(
            specs,
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
        command=shlex.join(["policygrad", "compare", *args]),
        version=__version__,
        ladder=ladder.to_dict() if ladder else {},
    )
    check_folders(options.output)
    labels = [row.label for row in plan.rows]
    labels = [f"{plan.rows[0].argv[0].rpartition(':')[2]}-grid"] if options.vary else labels
    folder = Path(options.output) if options.output else next_comparison_folder(labels, options.ladder)
    return plan, folder


def run_comparison(plan: ComparisonPlan, folder: Path, options: CompareOptions) -> int:
    """Run the missing jobs, and report. Raises RunError for deviations from a preregistration."""
    copy, note, metric, threshold = folder / PREREGISTRATION_FILE, None, options.metric, options.threshold
    source = copy if options.preregistered is None else options.preregistered
    if source.is_file():
        registered, usual = read_preregistration(source), CompareOptions()
        metric = registered.metric if metric == usual.metric else metric
        threshold = registered.threshold if threshold == usual.threshold else threshold
        deviations = list_deviations(registered, preregister(plan, resolve_rows(plan), metric, threshold))
        if deviations and not options.deviate:
            raise RunError(
                f"the comparison deviates from {source}: {'; '.join(deviations)}. Restore that, or add --deviate, with which the "
                "report lists it."
            )
        content = source.read_bytes()
        plan = open_comparison(folder, plan)
        write_atomically(copy, content)
        note = note_preregistration(folder, registered, record_deviations(folder, deviations))
    else:
        plan = open_comparison(folder, plan)
    if options.export is not None:
        check_export_folder(options.export)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = options.threads or max(1, cores // options.jobs)
    with hold_lock(folder / "lock"):
        _say(f"{folder}: {pluralise(options.jobs, 'runs')} at a time, {pluralise(threads, 'threads')} each")
        if few := too_few_seeds(plan):
            _say(few)
        runner = SubprocessRunner(threads, allow=options.allow_code)
        results = ComparisonRun(plan, folder, runner, options.jobs, _say).run()
        report = build_report(plan, results, threshold, metric, note)
        text = json.dumps(report.to_dict(), ensure_ascii=False) + "\n"
        write_text_file(folder / "comparison.json", text, "--output")
        write_text_file(folder / "comparison.html", render_comparison(report), "--output")
    if options.json:
        print_json(report.to_dict())
    else:
        print_lines(format_comparison(report, get_terminal_width()))
    _say(f"{folder / 'comparison.html'}")
    if options.export is not None:
        from policygrad.compare.figures import build_export

        write_figures(options.export, build_export(report))
    for job, error in results.failures.items():
        _say(f"failed: {job}: {error.splitlines()[-1]}")
    if results.stopped:
        missing = _missing(plan, folder / PLAN_FILE, CodePermissions(), new_process=True)
        resume = ["policygrad", "compare", "--resume", str(folder), *([ALLOW, *missing] if missing else [])]
        resume += [TRUST_FLAG] if any(TRUST_FLAG in option_names(row.argv) for row in plan.rows) else []
        _say(f"stopped; continue with: {shlex.join(resume)}")
        return STOPPED
    return 1 if results.failures else 0


def format_commands(plan: ComparisonPlan) -> str:
    """Return every run's command; reported runs of tuned rows show the grid instead of the chosen value."""
    lines, tuning = list[str](), plan.tuning_jobs()
    if tuning:
        lines.append(f"# {pluralise(len(tuning), 'runs')} for tuning, {len(plan.rows) * len(plan.seeds)} to report")
    if few := too_few_seeds(plan):
        lines.append(f"# {few}")
    for planned in list_commands(plan):
        values = ", ".join(f"{x:g}" for x in planned["best_of"])
        best = f"  # {planned['tuned_option']}: the best of {values}" if values else ""
        lines.append(shlex.join(planned["argv"]) + best)
    return "\n".join(lines)


def list_commands(plan: ComparisonPlan) -> list[PlannedCommand]:
    """Return every run's command; those of a tuned row's reported runs have the first value of its grid."""
    chosen = {row.label: row.grid[0] if row.grid else None for row in plan.rows}
    return [
        {
            "row": job.row,
            "seed": job.seed,
            "tuned_option": row.tuned_option,
            "best_of": list(row.grid) if row.is_tuned and not job.is_tuning else [],
            "argv": ["policygrad", *plan.train_argv(job)],
        }
        for job in (*plan.tuning_jobs(), *plan.reported_jobs(chosen))
        for row in (plan.row(job.row),)
    ]


def _grid(text: str, option: str) -> tuple[float, ...]:
    try:
        values = sorted({float(word) for word in text.split(",") if word.strip()})
    except ValueError as error:
        message = f"{option} must be numbers separated by commas, as in 1e-4,3e-4,1e-3, not {text!r}"
        raise ConfigError(message) from error
    if any(not 0 < value < float("inf") for value in values):
        raise ConfigError(f"{option}: every value must be above 0 and finite, not {text!r}")
    return tuple(values)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


MISSING = "–"
LEGEND = (
    "interquartile mean of evaluation scores [95 % bootstrap interval over seeds]; * = at the edge of its grid; entropy and KL to "
    "the reference (nats per token), length and fraction truncated: means over the last fifth of the steps"
)


def format_comparison(report: ComparisonReport, width: int) -> list[StyledLine]:
    """Format the report for a terminal, within `width` if its columns allow."""
    text = max(40, min(width, 110))
    lines: list[StyledLine] = []
    for number, kind in enumerate(report.kinds):
        rows = [row for row in report.rows if row.kind == number]
        head = f"{kind.measure.get('task', '')}, {kind.measure.get('model', '')}: {report.tokens:,} tokens a run, "
        lines += wrap_styled((), head + pluralise(len(report.seeds), "seeds"), width, HEAD)
        lines += wrap_styled((), LEGEND, width, QUIET)
        lines += [*align_columns(_list_scores(rows), width), ()]
        # Tokens, updates and seconds to the threshold.
        summaries = [row.summary for row in rows]
        if any(summaries) and kind.threshold is None:
            lines += [*wrap_styled((), "No row's score rose, so there is no threshold to reach.", width), ()]
        elif any(summaries):
            columns: list[Column] = [("", [row.label for row in rows])]
            for axis in AXES:
                reach = [s.reach[axis] if s else None for s in summaries]
                medians = [
                    MISSING if r is None else format_short(r.median) if r.median is not None else "not reached"
                    for r in reach
                ]
                columns.append((axis, medians))
            reach = [s.reach["tokens"] if s else None for s in summaries]
            counts = [MISSING if r is None else f"{r.num_reached} of {len(r.each)}" for r in reach]
            head = f"To a score of {kind.threshold:.3f}, {report.share:.0%} of the way: median over seeds"
            lines += wrap_styled((), head, width, HEAD)
            lines += [*align_columns([*columns, ("runs that reach it", counts)], width), ()]
        # P(row above column), with a star if the interval excludes ½.
        labels = [row.label for row in rows if row.summary]
        if len(labels) > 1:
            above: dict[tuple[str, str], str] = {}
            for pair in report.pairs:
                p, star = pair.probability["tokens"], "*" * pair.separated["tokens"]
                above[pair.first, pair.second] = f"{p.value:.2f}{star}"
                above[pair.second, pair.first] = f"{1 - p.value:.2f}{star}"
            columns = [(label, [above.get((row, label), MISSING) for row in labels]) for label in labels]
            head = (
                "P(row above column) at equal tokens; * = separated, the 95 % intervals exclude ½ and a difference of 0"
            )
            lines += [*wrap_styled((), head, width, HEAD), *align_columns([("", labels), *columns], width), ()]
    # The mean final score of every value on the tuning seeds.
    if tuned := [row for row in report.rows if row.tuning]:
        columns = [("", [row.label for row in tuned])]
        for value in sorted({trial.value for row in tuned for trial in row.tuning}):
            means = [next((trial.mean for trial in row.tuning if trial.value == value), None) for row in tuned]
            marks = ["*" * (value == row.option_value) for row in tuned]
            cells = [MISSING if m is None else f"{m:.3f}{mark}" for m, mark in zip(means, marks, strict=True)]
            columns.append((f"{value:g}", cells))
        head = f"Mean final score by value, seeds {', '.join(map(str, report.tuning_seeds))}; * = chosen"
        lines += [*wrap_styled((), head, width, HEAD), *align_columns(columns, width), ()]
    if preregistration := describe_preregistration(report):
        lines += [*wrap_styled((), preregistration, text), ()]
    for title, sentences in (
        ("What it says", report.ranking),
        ("Sentences that the intervals allow", list(describe_claims(report))),
        ("What differs besides the algorithm", report.differences),
        ("What cannot be concluded", report.caveats),
    ):
        if sentences:
            lines.append(((title, HEAD),))
            lines += [line for s in sentences for line in wrap_styled((("  · ", QUIET),), s, text)]
            lines.append(())
    for row in report.rows:
        for failure in row.failed:
            at = "" if failure["value"] is None else f" at {failure['value']:g}"
            message = f"{row.label}{at}, seed {failure['seed']}: {failure['error'].splitlines()[-1]}"
            lines += wrap_styled((("failed  ", HEAD),), message, text)
    return lines


def _list_scores(rows: Sequence[RowReport]) -> list[Column]:
    """Return the columns of the table: tuned options, scores at equal effort, and means over the last steps."""
    summaries = [row.summary for row in rows]
    edges = ["*" * bool(row.edge) for row in rows]
    rates = [format_learning_rate(r) + edge * (r.tuned_option == "--lr") for r, edge in zip(rows, edges, strict=True)]
    columns: list[Column] = [("", [row.label for row in rows]), ("lr", rates)]
    if any(row.option_value is not None and row.tuned_option != "--lr" for row in rows):
        values = [
            MISSING if r.option_value is None else f"{r.option_value:g}" + e for r, e in zip(rows, edges, strict=True)
        ]
        columns.append(("tuned", values))
    columns += [(f"equal {axis}", [str(s.equal[axis]) if s else MISSING for s in summaries]) for axis in AXES]
    columns.append(("area", [str(s.area) if s else MISSING for s in summaries]))
    formats = {"entropy": "{:.2g}".format, "kl": "{:.2g}".format, "length": format_short, "truncated": "{:.0%}".format}
    for name in (*formats, "updates", "tokens", "seconds"):
        cell = formats.get(name, format_short)
        means = [cell(s.means[name]) if s and name in s.means else MISSING for s in summaries]
        columns.append(("KL" if name == "kl" else name, means))
    return [*columns, ("seeds", [str(len(row.runs)) for row in rows])]
