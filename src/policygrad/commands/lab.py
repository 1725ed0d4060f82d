"""`policygrad lab`: measure gradient estimators against the true gradient, and run experiments on the field's claims."""

from __future__ import annotations

import ast
import inspect
import json
import re
import shlex
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

from policygrad.algorithms import ALGORITHMS
from policygrad.commands.json_output import print_json, prints
from policygrad.commands.options import (
    check_at_least_1,
    check_export_folder,
    check_writable,
    merge_repeated_flags,
    write_figures,
    write_text_file,
)
from policygrad.commands.parsing import parse_arguments
from policygrad.commands.render import build_matrix_row, format_part
from policygrad.commands.styled import (
    HEAD,
    NAME,
    QUIET,
    StyledLine,
    align_columns,
    get_terminal_width,
    print_lines,
    wrap_styled,
)
from policygrad.core.algorithm import Algorithm
from policygrad.core.updates import GradientSteps
from policygrad.core.validation import ROLES
from policygrad.errors import ConfigError, PolicygradError
from policygrad.lab.control.train import find_preset, with_gamma
from policygrad.trackers.console import to_one_line
from policygrad.training.config.option_checks import check_seed
from policygrad.training.config.optional_arg import optional_arg
from policygrad.training.config.run_name import name_run
from policygrad.training.config.serialization import check_part_field, load_algorithm, load_part_class, parse_part
from policygrad.utils.argv import split_outside_brackets

if TYPE_CHECKING:
    from policygrad.lab.control.train import Update
    from policygrad.lab.measurement import MeasuredClaim, Measurement
    from policygrad.lab.report import LabReport


PART_FIELDS = ("gate", "advantage", "ratio", "aggregation", "terms", "shaping", "filters", "corrections")
"""Fields whose parts can be measured: those that make one gradient."""


def select_algorithms(names: Sequence[str]) -> dict[str, Algorithm]:
    """Return algorithms by name; user-defined ones by their composition, or as given if two are alike."""
    algorithms: dict[str, Algorithm] = {}
    for name in names:
        a = load_algorithm(name)
        label = name_run(a).name
        algorithms[name if label in algorithms else label] = a
    return algorithms


def insert_part(base: Algorithm, spec: str) -> tuple[Algorithm, str]:
    """Insert a part, `mine:Gate(width=0.3)`, or a chain of parts, `advantage=GroupMean,mine:Asym`, into an algorithm.

    Returns the algorithm, named after the parts with the given settings, and a sentence that says what they replaced.
    """
    place, items = _split_spec(spec)
    path = ",".join(name for name, _ in items)
    dotted = f"algorithm.{place or 'gate'}" if ":" in path else "part"
    kinds = [load_part_class(name, "command line", dotted) for name, _ in items]
    if not place:  # the field of the class's base, or else of its methods
        called = any("__call__" in base.__dict__ for base in kinds[0].__mro__)
        by_method = "gate" if callable(getattr(kinds[0], "weight", None)) else "advantage" if called else ""
        place = next((field for field in PART_FIELDS if issubclass(kinds[0], ROLES[field].bases)), by_method)
    if not place:
        raise ConfigError(
            f"--part {spec}: {kinds[0].__name__} is no gate (weight and value) and no advantage (it is not called): name "
            f"its field, FIELD={path}"
        )
    if place not in PART_FIELDS:
        raise ConfigError(
            f"--part {spec}: no field {place!r} takes a part here: advantage, ratio, gate, aggregation, terms, shaping, …"
        )
    before = getattr(base, place)
    several = isinstance(before, tuple)
    if len(kinds) > 1 and not several:
        raise ConfigError(f"--part {spec}: {place} holds one part, not {len(kinds)}; for several rows repeat --part")
    for kind in kinds:
        check_part_field(kind, "command line", f"algorithm.{place}")
    parts, labels = list[Any](), list[str]()
    for kind, (name, source) in zip(kinds, items, strict=True):
        settings = _settings(kind, source, spec)
        values = {k: "none" if v is None else list(v) if isinstance(v, tuple) else v for k, v in settings.items()}
        parts.append(parse_part(None, {"part": name, **values}, f"--part {spec}", f"algorithm.{place}"))
        given = ", ".join(f"{k}={v!r}" for k, v in settings.items())
        labels.append(f"{kind.__name__}({given})" if given else kind.__name__)
    changes: dict[str, Any] = {place: tuple(parts) if several else parts[0]}
    if place == "gate" and getattr(parts[0], "on_policy", False):  # before the role is known
        changes["ratio"] = None
    label = "+".join(labels)
    replaced = tuple(type(part).__name__ for part in (before if several else (before,)) if part is not None)
    instead = f"in place of {' and '.join(replaced)}" if replaced else "which was empty"
    sentence = f"{label} is {name_run(base).name} with {place} = {label}, {instead}"
    return replace(base, name=label, **changes), sentence


def _split_spec(spec: str) -> tuple[str, list[tuple[str, str]]]:
    """(the field, "" where none is named; each part's name and the text of its settings)."""
    place, path = match.groups() if (match := re.fullmatch(r"(?:(\w+)=)?(.*)", spec, re.DOTALL)) else ("", spec)
    items = split_outside_brackets(path)
    matches = [re.fullmatch(r"(.*?\w)\s*(?:\((.*)\))?", item, re.DOTALL) for item in items]
    if not all(matches):
        raise ConfigError(
            f"--part {spec!r} is invalid. Write [FIELD=]PART[,PART], with settings in parentheses: mine:Gate(width=0.3)"
        )
    return place or "", [(item[1], item[2] or "") for item in matches if item]


def _settings(kind: type, source: str, spec: str) -> dict[str, Any]:
    """Parse settings such as `eps=1, mode='all'`. Only literals are accepted, so nothing in the text is executed."""
    names = [f.name for f in fields(kind) if f.init]
    try:
        call = ast.parse(f"part({source})", mode="eval").body
        if not isinstance(call, ast.Call) or any(word.arg is None for word in call.keywords):
            raise ValueError(source)
        by_place = [ast.literal_eval(value) for value in call.args]
        by_name = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise ConfigError(
            f"--part {spec}: {kind.__name__}({source}) has settings that are not literals. Write numbers, quoted text, True, "
            f"False or None, as in {kind.__name__}({names[0] if names else 'name'}=1)"
        ) from error
    if len(by_place) > len(names):
        raise ConfigError(f"--part {spec}: {kind.__name__} takes {len(names)} settings, not {len(by_place)}")
    given = dict(zip(names, by_place, strict=False))
    if twice := given.keys() & by_name.keys():
        raise ConfigError(f"--part {spec}: {kind.__name__} has {', '.join(sorted(twice))} twice")
    given |= by_name
    needed = [p.name for p in inspect.signature(kind).parameters.values() if p.default is p.empty]
    if missing := [name for name in needed if name not in given]:
        raise ConfigError(
            f"--part {spec}: {kind.__name__} needs {', '.join(missing)}. Write {kind.__name__}({missing[0]}=…), or give its "
            "fields defaults."
        )
    return given


def try_part(algorithm: Algorithm, spec: str, size: int) -> None:
    """Measure the part in a world of seven completions; its errors become a ConfigError with file and line."""
    from policygrad.lab.estimators import enumerate_steps
    from policygrad.lab.measurement import measure_algorithm
    from policygrad.lab.worlds import one_prompt

    setting = one_prompt(2)
    try:
        measure_algorithm(algorithm, replace(setting, old=setting.theta), enumerate_steps(setting, min(size, 4)))
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)
        kinds = [type(part) for part in algorithm.parts()]
        files = {inspect.getfile(kind) for kind in kinds if not kind.__module__.startswith("policygrad.")}
        custom = [frame for frame in at if frame.filename in files]
        if isinstance(error, PolicygradError) and not custom:
            raise  # the library's own error message
        where = (custom or at)[-1]
        raise ConfigError(
            f"--part {spec}: {type(error).__name__}: {error} ({where.filename}, line {where.lineno}, in {where.name})"
        ) from error


FEW_RESULTS = 12  # which are there so soon that, outside of a terminal, nothing is said of each
PROGRESS_SECONDS = 10.0  # between lines of progress where standard error is no terminal
COLUMNS = ("scale", "bias", "cosine", "variance", "MSE", "SNR", "best")
CELL = 9
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
    """Measure gradient estimators exactly, on problems small enough to enumerate."""

    algorithm: Annotated[tuple[str, ...], optional_arg("NAME", "all of them")] = ()
    """Algorithms to measure, including your own: mine.py:NAME, mine:NAME."""
    part: Annotated[tuple[str, ...], optional_arg("[FIELD=]PART[,PART]", "none")] = ()
    """A part, or a chain of them, advantage=GroupMean,mine:Asym, measured in `base` and compared with it.
    Yours, mine:MyGate or mine.py:MyGate, or ours; with settings, 'mine:MyGate(eps=1)'. Several are allowed, each measured alone."""
    base: str = "dr_grpo"
    """Algorithm to insert a part into."""
    all: bool = False
    """With `part`: also measure all algorithms and run all experiments."""
    group_size: int = 4
    """G, completions per group."""
    kl: float = 0.05
    """Off-policy distance between sampling and learning policy, in nats per completion."""
    experiment: Annotated[
        tuple[str, ...], optional_arg("NAME", "all, or none with --part or --algorithm; none = only the table")
    ] = ()
    """Experiments to run."""
    list_experiments: bool = False
    """List the experiments and exit."""
    seed: int = 0
    """Seed of worlds and samples."""
    json: bool = False
    """Print one JSON object instead of the table."""
    output: Annotated[Path | None, optional_arg("FILE.html", "a table in the terminal")] = None
    """Write one self-contained page with interactive plots."""
    export: Annotated[Path | None, optional_arg("FOLDER", "not written")] = None
    """Write figures (SVG, CSV), LaTeX tables with intervals, and the sentences that the data allow into this folder."""

    def __post_init__(self) -> None:
        check_at_least_1(self, "group_size")
        check_seed(self.seed)
        if not 0 < self.kl < 100:
            raise ConfigError(f"--kl must be above 0 nats and below 100, not {self.kl:g}")
        if self.all and self.algorithm:
            raise ConfigError(
                f"--all measures every algorithm, but --algorithm names {', '.join(self.algorithm)}; give only one of them"
            )
        if self.base != "dr_grpo" and not self.part:
            raise ConfigError(f"--base {self.base} needs a part to insert: --part MODULE:CLASS")


class LabRow(TypedDict):
    """An algorithm's estimator against the true gradient."""

    name: str
    on_policy: Mapping[str, Any]
    off_policy: Mapping[str, Any]


class LabFinding(TypedDict):
    """A claim from the literature, measured."""

    name: str
    claim: str
    holds: bool
    sentence: str
    numbers: Mapping[str, float | None]
    error: float | None
    """Standard error of the decisive number; null = exact."""
    curves: Mapping[str, list[float | None]]


class LabOutput(TypedDict):
    """The measurements."""

    world: str
    parts: list[str]
    group_size: int
    off_policy_kl: float
    seed: int
    algorithms: list[LabRow]
    findings: list[LabFinding]


class LabExperiments(TypedDict):
    """--list-experiments: name -> what it measures."""

    experiments: Mapping[str, str]


class ControlOutput(TypedDict):
    """Training on a Gymnasium environment."""

    env: str
    algorithm: str
    equation: Mapping[str, str]
    settings: Mapping[str, Any]
    seed: int
    steps: int
    """Environment steps."""
    curve: list[Mapping[str, Any]]
    evaluation: Mapping[str, Any]
    """returns, mean, standard_error, greedy."""


@prints(LabOutput, LabExperiments, ControlOutput)
def lab(args: list[str]) -> int:
    """Run `policygrad lab` or `policygrad lab control`."""
    if args[:1] == ["control"]:
        return control(args[1:])
    command = shlex.join(["policygrad", "lab", *args])
    args = merge_repeated_flags(args, "--algorithm", "--part", "--experiment")
    options = parse_arguments(LabOptions, args, "lab")
    from policygrad.lab.report import EXPERIMENTS, build_lab_report, select_experiments

    width = get_terminal_width()
    if options.list_experiments:
        longest = max(map(len, EXPERIMENTS))
        summaries = {name: (inspect.getdoc(f) or "").split("\n\n")[0] for name, f in EXPERIMENTS.items()}
        if options.json:
            print_json({"experiments": summaries})
            return 0
        for name, summary in summaries.items():
            print_lines([*wrap_styled(((name.ljust(longest + 2), NAME),), summary, width)])
        return 0
    if options.output is not None:
        check_writable(options.output, "--output")
    if options.export is not None:
        check_export_folder(options.export)
    alone = bool(options.part or options.algorithm) and not options.all
    omitted = list[str]()
    if alone:
        chosen = select_algorithms(options.algorithm)
    else:  # all that can be measured
        from policygrad.lab.setting import supported_algorithms, unsupported_reason

        omitted += [row.name for row in ALGORITHMS.values() if unsupported_reason(row, options.group_size)]
        chosen = supported_algorithms(ALGORITHMS, options.group_size)
    trials, sentences = dict[str, Algorithm](), list[str]()
    for spec in options.part:
        trial, sentence = insert_part(load_algorithm(options.base), spec)
        try_part(trial, spec, options.group_size)
        trials[spec if trial.name in {*chosen, *trials, *ALGORITHMS} else trial.name] = trial
        sentences.append(sentence)
    base = ""
    if trials:
        ((base, algorithm),) = select_algorithms([options.base]).items()
        base = next((name for name, row in chosen.items() if row == algorithm), base)
        chosen = {**chosen, base: algorithm, **trials}
    names = () if options.experiment == ("none",) or (alone and not options.experiment) else options.experiment or None
    progress = LabProgress(len(chosen) + len(select_experiments(names)))
    result = build_lab_report(chosen, options.group_size, options.kl, options.seed, names, progress.show)
    progress.clear()
    result = replace(result, parts=tuple(sentences))
    if options.output is not None:
        write_text_file(options.output, build_lab_page(result, chosen, command), "--output")
        print(options.output, file=sys.stderr if options.json else sys.stdout)
    if options.export is not None:
        from policygrad.lab.figures import build_export

        write_figures(options.export, build_export(result, chosen, command))
    if options.json:
        print_json(result.to_dict())
    elif options.output is None and options.export is None:
        pairs = [((base, chosen[base]), trial) for trial in trials.items()]
        print_lines(format_lab_report(result, width, pairs, brief=bool(options.part) and not options.all))
    if omitted:
        names_of = ", ".join(omitted)
        print(
            f"omitted, as the lab's worlds lack what they need: {names_of}. policygrad lab --algorithm {omitted[0]} says why.",
            file=sys.stderr,
        )
    return 0


@dataclass
class LabProgress:
    """Shows on standard error what has just been measured: in a terminal as one line, elsewhere every ten seconds."""

    total: int
    count: int = 0
    next_time: float = 0.0
    width: int = 0

    def show(self, result: Measurement | MeasuredClaim) -> None:
        """Show one algorithm's figures, or a claim."""
        from policygrad.lab.measurement import Measurement

        self.count += 1
        if isinstance(result, Measurement):
            bias, variance = _cells(result)[1], _cells(result)[3]
            text = f"{result.name}: bias {bias}, variance {variance}"
        else:
            text = result.claim
        line = to_one_line(f"{self.count}/{self.total} {text}")[: get_terminal_width() - 1]
        if sys.stderr.isatty():
            print(f"\r{line:<{self.width}}", end="", file=sys.stderr, flush=True)
            self.width = len(line)
        elif self.total > FEW_RESULTS and time.monotonic() >= self.next_time:
            self.next_time = time.monotonic() + PROGRESS_SECONDS
            print(line, file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Leave an empty line in a terminal."""
        if self.width:
            print(f"\r{'':<{self.width}}\r", end="", file=sys.stderr, flush=True)


def build_lab_page(report: LabReport, algorithms: Mapping[str, Algorithm], command: str = "policygrad lab") -> str:
    """Render the report as one HTML page."""
    from policygrad.lab.page import render_lab_page

    return render_lab_page(report, algorithms, {name: _parts(a) for name, a in algorithms.items()}, command)


def _parts(a: Algorithm) -> dict[str, tuple[str, ...]]:
    """Return a row of the matrix with its last columns merged."""
    row = build_matrix_row(a, changed=True)
    del row["also"]
    step = () if a.update_rule == GradientSteps() else (format_part(a.update_rule, changed=True),)
    return row | {"and more": row.pop("shaping") + row.pop("filters") + step}


Row = tuple[str, Algorithm]  # name and algorithm of a row


def format_lab_report(
    report: LabReport, width: int, pairs: Sequence[tuple[Row, Row]] = (), brief: bool = False
) -> list[StyledLine]:
    """Format the table and the findings for a terminal.

    Args:
        pairs: (base, the same with a part inserted), whose differences are listed.
        brief: omit the table by difficulty and length.
    """
    text = max(40, min(width, 110))
    lines: list[StyledLine] = [((f"Gradient estimators, groups of {report.group_size}", HEAD),)]
    lines += wrap_styled((("  ", ""),), report.world + ".", text, QUIET)
    for sentence in report.parts:
        lines += wrap_styled((("  ", ""),), sentence + " (--base NAME takes another algorithm).", text)
    lines += [(), *_table(report, width), *wrap_styled((("  ", ""),), LEGEND, text, QUIET)]
    for base, changed in pairs:
        lines += [(), *_list_differences(report, base, changed, text)]
    if not brief:
        # the length of E g along ∇J per prompt, and the factor of a token's ∇log π per length
        lines += [(), (("By difficulty and length, on-policy", HEAD),)]
        figures = [_detail_figures(on) for on, _ in report.rows]
        columns = [(row[0][0], [text for _, text in row]) for row in zip(*figures, strict=True)]
        lines += align_columns([("", [on.name for on, _ in report.rows]), *columns], width)
    if pairs or not brief:
        lines += wrap_styled((("  ", ""),), DETAIL, text, QUIET)
    if report.findings:
        lines += [(), (("Findings", HEAD),)]
    for measured in report.findings:
        mark = "✓ " if measured.holds else "✗ "
        lines += [(), *wrap_styled(((mark, HEAD),), measured.claim, text, NAME)]
        error = "" if measured.error is None else f" (standard error {measured.error:.2g})"
        lines += wrap_styled((("  ", ""),), measured.sentence + error, text)
    return lines


def _table(report: LabReport, width: int) -> list[StyledLine]:
    """Format on- and off-policy figures side by side if there is room, else one below the other."""
    names = [on.name for on, _ in report.rows]
    name_width, block = max(map(len, names)) + 2, CELL * len(COLUMNS) + 1
    heads = ("on-policy", f"off-policy, {report.kl:g} nats away")
    lines: list[StyledLine] = []
    for group in [(0, 1)] if width >= name_width + 2 * block + 2 else [(0,), (1,)]:
        lines.append(((" " * name_width + "  ".join(heads[i].center(block) for i in group), HEAD),))
        lines.append(((" " * name_width + "   ".join(_row(COLUMNS) for _ in group), HEAD),))
        for label, pair in zip(names, report.rows, strict=True):
            cells = "  ".join(_row(_cells(pair[i])) + (" " if pair[i].exact else "~") for i in group)
            lines.append(((label.ljust(name_width), NAME), (cells, "")))
        lines.append(())
    if steps := next((m.steps for pair in report.rows for m in pair if not m.exact), 0):
        lines += wrap_styled((("  ", ""),), f"~ sampled: {steps} steps; standard errors are in the JSON.", 100, QUIET)
    return lines


_NO_BREAK = "\u00a0"  # A space at which lines are not broken


def _list_differences(report: LabReport, base: Row, changed: Row, width: int) -> list[StyledLine]:
    """List where a part changes an algorithm: in the equation, and in the displayed figures."""
    (before, old), (after, new) = base, changed
    lines: list[StyledLine] = [((f"Where {after} differs from {before}", HEAD),)]
    for name in dict.fromkeys([*old.equation(), *new.equation()]):
        was, now = (a.equation().get(name, "–") for a in (old, new))
        if was != now:
            lines += wrap_styled(((f"  {name:<11}", NAME),), f"{was}  →  {now}", width)
    rows = {pair[0].name: pair for pair in report.rows}
    for i, side in enumerate(("on-policy", "off-policy")):
        was_of, now_of = (
            dict([*zip(COLUMNS, _cells(rows[name][i]), strict=True), *_detail_figures(rows[name][i])])
            for name in (before, after)
        )
        changes = [f"{k} {was_of.get(k, '–')} → {v}" for k, v in now_of.items() if v != was_of.get(k)]
        text = ", ".join(item.replace(" ", _NO_BREAK) for item in changes) or "nowhere, in the decimals shown"
        for line in wrap_styled(((f"  {side:<11}", NAME),), text, width):
            lines.append(tuple((piece.replace(_NO_BREAK, " "), style) for piece, style in line))
    return lines


def _detail_figures(m: Measurement) -> list[tuple[str, str]]:
    """Return (heading, figure) for the scale of each prompt and the weight of each length."""
    by_length = [(f"{key} {row['length']:g}", row[key]) for key in ("right", "wrong") for row in m.length if key in row]
    details = [(f"p={row['p']:.2f}", row["scale"]) for row in m.difficulty] + by_length
    return [(heading, _figure(x)) for heading, x in details]


def _cells(m: Measurement) -> list[str]:
    """Format the figures; only an exact bias is shown as 0, even if the estimate of a sampled one is 0."""
    f = m.figures
    cells = [_figure(x) for x in (f.scale, f.bias, f.cosine, f.variance, f.mse, f.snr, f.best_mse)]
    cells[1] = "exact 0" if m.exact and f.bias < 1e-9 else cells[1]
    return cells


def _figure(x: float) -> str:
    return f"{x:.3f}" if abs(x) < 100 else f"{x:.3g}"


def _row(cells: Sequence[str]) -> str:
    return "".join(c.rjust(CELL) for c in cells)


LINES = 150  # maximum number of progress lines


@dataclass(frozen=True)
class ControlOptions:
    """Train a small policy on a Gymnasium environment with the library's own gates, advantages, critic and update rules."""

    env: str = "CartPole-v1"
    """Environment in Gymnasium's registry; MODULE:NAME imports the module first."""
    algorithm: str = "ppo"
    """ppo, trpo, a2c or reinforce; also ppo_penalty and natural."""
    steps: int = 150_000
    """Environment steps in total."""
    seed: int = 0
    """Seed of weights, actions and environments."""
    num_envs: Annotated[int | None, optional_arg("N", "the algorithm's own: 8")] = None
    """Number of parallel environments."""
    rollout: Annotated[int | None, optional_arg("STEPS", "the algorithm's own")] = None
    """Steps per environment and rollout."""
    lr: Annotated[float | None, optional_arg("RATE", "the algorithm's own")] = None
    """Initial learning rate of the policy; it decays linearly to 0."""
    gamma: Annotated[float | None, optional_arg("GAMMA", "the algorithm's own: 0.99")] = None
    """Discount γ of advantages and critic targets."""
    normalise: bool = False
    """Normalise observations by their running mean and standard deviation."""
    max_episode_steps: Annotated[int | None, optional_arg("STEPS", "the environment's own")] = None
    """Time limit of an episode."""
    episodes: int = 100
    """Episodes of the final evaluation."""
    greedy: bool = False
    """Evaluate the most probable actions instead of sampled ones."""
    json: bool = False
    """Print one JSON object instead of lines: settings, curve, evaluation."""
    output: Annotated[Path | None, optional_arg("FILE", "not written")] = None
    """Write the JSON object to a file."""

    def __post_init__(self) -> None:
        check_seed(self.seed)
        check_at_least_1(self, "steps", "episodes", "num_envs", "rollout", "max_episode_steps")


def control(args: list[str]) -> int:
    """Run `policygrad lab control`."""
    options = parse_arguments(ControlOptions, args, "lab control")
    preset = find_preset(options.algorithm)
    algorithm = preset.algorithm if options.gamma is None else with_gamma(preset.algorithm, options.gamma)
    if options.lr is not None and not algorithm.update_rule.uses_lr:
        raise ConfigError(f"--lr: {algorithm.name} sets its step length by a KL, not by a learning rate; omit it")
    changes: dict[str, Any] = {"environments": options.num_envs, "rollout": options.rollout, "lr": options.lr}
    changes = {name: value for name, value in changes.items() if value is not None}
    settings = replace(preset.settings, normalise=options.normalise, **changes)
    if options.output is not None:
        check_writable(options.output, "--output")
    from policygrad.lab.control.environments import GymEnvironments
    from policygrad.lab.control.train import evaluate_control, train_control

    environments = GymEnvironments(options.env, settings.environments, options.max_episode_steps)
    title = f"{algorithm.name} on {options.env}: {options.steps} steps in {settings.environments} environments"
    if not options.json:
        equation = [f"  {symbol:6} {formula}" for symbol, formula in algorithm.equation().items()]
        print("\n".join([title, *equation]), flush=True)
    show = None if options.json else ControlLines(options.steps)
    trained = train_control(environments, algorithm, settings, steps=options.steps, seed=options.seed, on_update=show)
    fresh = GymEnvironments(options.env, min(10, options.episodes), options.max_episode_steps)
    episodes = evaluate_control(
        trained.learner, fresh, options.episodes, seed=options.seed + 1_000_003, greedy=options.greedy
    )
    if not options.json:
        error = "" if episodes.error is None else f" ± {episodes.error:.2f} (standard error)"
        policy = "the most probable actions" if episodes.greedy else "sampled actions"
        print(f"mean return of {len(episodes.returns)} fresh episodes: {episodes.mean:.2f}{error}, {policy}")
    record: dict[str, Any] = {
        "env": options.env,
        "algorithm": algorithm.name,
        "equation": dict(algorithm.equation()),
        "settings": asdict(settings),
        "seed": options.seed,
        "steps": options.steps,
        "curve": [asdict(update) for update in trained.curve],
        "evaluation": episodes.to_dict(),
    }
    if options.json:
        print_json(record)
    if options.output is not None:
        write_text_file(options.output, json.dumps(record, ensure_ascii=False) + "\n", "--output")
    return 0


@dataclass
class ControlLines:
    """Print at most `LINES` of a training's updates, one line each."""

    steps: int  # environment steps in total
    next_line: float = 0.0

    def __call__(self, u: Update) -> None:
        if u.steps < min(self.next_line, self.steps):
            return
        self.next_line = u.steps + self.steps / LINES * 0.99
        score = "no episode yet" if u.mean_return is None else f"return {u.mean_return:8.2f}"
        line = f"{u.steps:8d}  {score}  entropy {u.entropy:6.3f}  kl {u.kl:.5f}"
        if u.explained_variance is not None:
            line += f"  explained {u.explained_variance:6.3f}"
        refused = "  no step taken" if u.accepted is False else ""
        print(f"{line}  {u.steps / max(u.seconds, 1e-9):6.0f} steps/s{refused}", flush=True)
