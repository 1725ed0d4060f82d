"""`policygrad eval`: mean@k, unbiased pass@k and maj@k of models on the same evaluation problems, or on known benchmarks."""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

import tyro

from policygrad.commands.eval_page import render_eval_page
from policygrad.commands.json_output import print_json, prints
from policygrad.commands.options import (
    check_at_least_1,
    drop_trust_flag,
    reject_cluster_flags,
    reject_empty_values,
    write_text_file,
)
from policygrad.commands.parsing import parse_arguments
from policygrad.compare.statistics import LEVEL, paired_difference
from policygrad.errors import ConfigError, RewardError
from policygrad.learners.config import LearnerConfig
from policygrad.models.lora_config import is_model_folder
from policygrad.rewards.config import VARIABLE_NAMES, Isolation, RewardConfig
from policygrad.rewards.resolve import resolve_reward
from policygrad.rollout.environment import DEFAULT_TIMEOUT
from policygrad.rollout.evaluation import EvalSample, EvaluationResult
from policygrad.samplers.base import SamplingParams
from policygrad.samplers.config import SamplerConfig
from policygrad.tasks.benchmarks import (
    Benchmark,
    BenchmarkData,
    find_reported,
    load_benchmark_data,
    load_benchmarks,
    parse_benchmarks,
)
from policygrad.trackers.console import format_number, name_state, strip_control_chars, to_one_line
from policygrad.trackers.jsonl import convert_write_errors
from policygrad.training.best_model import BEST
from policygrad.training.config.evaluation import EvaluationConfig
from policygrad.training.config.option_checks import check_completion_count, check_environment_timeout, check_seed
from policygrad.training.config.optional_arg import optional_arg
from policygrad.training.config.run import RunOptions, UncheckedRun
from policygrad.training.config.serialization import EVAL_OPTIONS, load_eval_options
from policygrad.training.config.trust import RUN_FILE, CodePermissions, code_in_argv
from policygrad.utils.child_environment import check_variable_names
from policygrad.utils.message_parts import content_text

if TYPE_CHECKING:
    from policygrad.training.benchmarks import BenchmarkResult

HELP = (
    "Measure models on evaluation problems: mean@k, unbiased pass@k, and maj@k, the score of the most frequent answer.",
    "For a run's folder, its own task, reward and lengths are the defaults. Several models use those of the first run, the same "
    "problems and the same random numbers, and the table shows their differences.",
    "--benchmark gsm8k,aime24 measures known benchmarks instead, with their own prompts, sampling and graders; --benchmark list "
    "shows all.",
)
_RUN_DEFAULT = "the run's, or "
LIST = "list"  # the name that shows all benchmarks
ALL_PROBLEMS = 0  # of a benchmark


def _short(name: str, flag: str) -> object:
    """Name an option as in `train`, with a shorter alias."""
    return tyro.conf.arg(name=name, aliases=[flag])


@dataclass(frozen=True)
class EvalOptions:
    """Options of `policygrad eval`."""

    model: Annotated[tyro.conf.Positional[tuple[str, ...]], optional_arg("MODEL", "none")] = ()
    """Folders or hub ids; tiny = the base model inside the package; a run's folder = the model it trained."""
    trust_remote_code: bool = False
    """Allow Python code in the model's folder or repository to run; otherwise such a model is refused."""
    allow_code: Annotated[tuple[str, ...], optional_arg("MODULE|FILE", "what is in the current folder")] = ()
    """Code that the run's own run.toml may import; code named on the command line needs no permission."""
    template_options: Annotated[
        tuple[str, ...],
        tyro.conf.arg(name="tokenizer.template-options"),
        optional_arg("NAME=VALUE", f"{_RUN_DEFAULT}the template's own"),
    ] = ()
    """Variables of the chat template: enable_thinking=false. One that the template does not read is refused."""
    task: Annotated[str, optional_arg("NAME|FILE", f"{_RUN_DEFAULT}embedded")] = ""
    """Source of problems: embedded, a reasoning-gym name (gcd+2*chain_sum:max_terms=3), or data.
    Data is a .jsonl, .json, .csv, .parquet or .arrow file, a folder, or hf:REPOSITORY[:CONFIG[:SPLIT]]."""
    row_map: Annotated[str | None, optional_arg("FILE:NAME", f"{_RUN_DEFAULT}none")] = None
    """A function that maps each row, a dict, to the row to use, or to None to skip it: mine.py:f."""
    fetch_images: Annotated[bool, tyro.conf.arg(name="task.fetch")] = False
    """Download pictures that rows give by URL, each once; without it a row with a URL is refused."""
    skip_bad_rows: Annotated[bool, tyro.conf.arg(name="task.skip-bad-rows")] = False
    """Skip invalid rows and report their number; otherwise the first one is an error, with file and line."""
    reward: Annotated[tuple[str, ...], optional_arg("NAME", f"{_RUN_DEFAULT}the task's own")] = ()
    """Reward functions: names, dotted paths, path/to/file.py:function, or model:DIR for a reward model.
    Each may have a weight, bounds and gates (0.5*math within 0..1 if format)."""
    environment: Annotated[str | None, optional_arg("FILE:NAME", f"{_RUN_DEFAULT}the prompt and one answer")] = None
    """One of calculator, mine.py:NAME, gymnasium:ID, textarena:GAME, openenv:URL, verifiers:ID, mcp:COMMAND|URL, rows:NAME+NAME."""
    environment_timeout: Annotated[float, tyro.conf.arg(name="environment.timeout")] = DEFAULT_TIMEOUT
    """Seconds allowed for one reset, step or close of the environment; a slower one fails its episode."""
    environment_env: Annotated[tuple[str, ...], VARIABLE_NAMES, tyro.conf.arg(name="environment.env")] = ()
    """Environment variables that an agent's program gets besides the default ones (docs/isolation.md), such as a key."""
    eval_data: Annotated[str | None, optional_arg("FILE", f"{_RUN_DEFAULT}a sixteenth of the task")] = None
    """Data with the evaluation problems, for a task that is data."""
    benchmark: Annotated[tuple[str, ...], optional_arg("NAME", "none")] = ()
    """Known benchmarks in place of a task: gsm8k,aime24; list = show all of them.
    livecodebench:v5:2024-08-01..2025-01-31 chooses a release and days."""
    benchmark_data: Annotated[
        str | None, tyro.conf.arg(aliases=["--evaluation.benchmark-data"]), optional_arg("DIR", "the hub")
    ] = None
    """Folder with the benchmarks' data, NAME.jsonl or .parquet."""
    problems: Annotated[int, _short("evaluation.problems", "--problems")] = 256
    """Number of evaluation problems; of a benchmark all, unless given."""
    samples: Annotated[int, _short("evaluation.samples-per-prompt", "--samples")] = 8
    """k, completions per problem."""
    threshold: float = 1.0
    """A completion with at least this score is correct, for pass@k."""
    sampling: Annotated[SamplingParams, tyro.conf.arg(name="")] = field(default_factory=SamplingParams)
    """Sampling distribution."""
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    """Sampler: this process, or an engine's servers."""
    seed: int = 0
    """Seed of the samples."""
    device: Annotated[str, _short("learner.device", "--device")] = "auto"
    """cpu, cuda, cuda:1, xpu, mps; auto = cuda or xpu if available, else cpu."""
    dtype: Annotated[str, _short("learner.dtype", "--dtype")] = "fp32"
    """fp32 or bf16."""
    reward_timeout: Annotated[float, _short("rewards.timeout", "--timeout")] = 10.0
    """Seconds allowed per sample for a reward."""
    rewards: Isolation = field(default_factory=Isolation)
    """The reward workers."""
    show: int = 3
    """Number of completions to print."""
    full: bool = False
    """Print them in full, with their prompts and rewards, instead of one line of each."""
    json: bool = False
    """Print one JSON object instead of a table."""
    output: Annotated[str | None, optional_arg("DIR", "none")] = None
    """A new folder: eval.html, a page with every answer; eval.json, the object of --json; samples.jsonl, a line per completion."""

    def __post_init__(self) -> None:
        if not (self.benchmark and self.problems == ALL_PROBLEMS):
            check_at_least_1(self, "problems")
        check_at_least_1(self, "samples")
        check_completion_count("--problems", self.problems, "--samples", self.samples)
        if not 0 < self.reward_timeout < math.inf:
            raise ConfigError(f"--timeout must be above 0 seconds and finite, not {self.reward_timeout}")
        if not math.isfinite(self.threshold):
            raise ConfigError(f"--threshold must be finite, not {self.threshold}")
        check_seed(self.seed)
        check_environment_timeout(self.environment_timeout)
        check_variable_names(self.environment_env, "environment.env")
        if self.dtype not in ("fp32", "bf16"):
            raise ConfigError(f"--dtype must be fp32 or bf16, not {self.dtype!r}")


class Estimate(TypedDict):
    """A value and its 95 % bootstrap interval."""

    value: float
    low: float
    high: float


_EvalPass = TypedDict("_EvalPass", {"pass": Mapping[str, float]})  # a keyword, so that a class cannot have it


class EvalRow(_EvalPass):
    """One model: mean@k, `pass` (k -> pass@k) and maj@k."""

    model: str
    task: str
    eval_data: str | None
    problems: int
    samples: int
    """Completions per problem, k."""
    mean: float
    """mean@k."""
    stderr: float
    """Its standard error over problems."""
    majority: float
    """maj@k."""
    failed: int
    """Completions without a reward."""
    truncated: int
    """Completions cut off."""
    tokens: int
    notes: list[str]


class EvalBenchmarks(TypedDict):
    """With --benchmark: an object for each, or with `list` what is known of each."""

    benchmarks: list[Mapping[str, Any]]
    """docs/evaluation.md lists the fields."""


_DifferencePass = TypedDict("_DifferencePass", {"pass": Mapping[str, Estimate]})


class EvalDifference(_DifferencePass):
    """The first model less another one, over the same problems."""

    model: str
    less: str
    mean: Estimate
    majority: Estimate


class EvalModels(TypedDict):
    """Several models."""

    models: list[EvalRow]
    differences: list[EvalDifference]
    level: float
    """Of the intervals."""


@prints(EvalRow, EvalModels, EvalBenchmarks)
def evaluate(args: list[str]) -> int:
    """Run `policygrad eval MODEL [MODEL …] [options]`."""
    options = parse_options(args)
    if options.benchmark == (LIST,):
        print_benchmarks(as_json=options.json)
        return 0
    from policygrad.training.evaluation import evaluate as measure

    folder = _make_folder(options)
    if options.benchmark:
        return evaluate_known(options, args, folder)
    outcomes = {}
    for model in options.model:
        display = ProgressLines(model if len(options.model) > 1 else "")
        outcomes[model] = outcome = measure(
            make_run_options(options, model), progress=display.count, phase=display.wait
        )
        if not outcome.has_scores:
            reason = outcome.messages[0] if outcome.messages else "no reward function applies to any of them"
            raise RewardError(
                f"none of the {outcome.num_failed} completions has a reward, so there is nothing to report: {reason}"
            )
    report = build_report(options.task, options.eval_data, options.samples, options.threshold, outcomes)
    if folder is not None:
        save_results(folder, report, outcomes)
        page = render_eval_page(report, outcomes, shlex.join(["policygrad", "eval", *args]))
        write_text_file(folder / PAGE_FILE, page, "--output")
    print_table(report, outcomes, options.show, as_json=options.json, full=options.full)
    return 0


def _make_folder(options: EvalOptions) -> Path | None:
    """Make the folder of --output, before any work is done."""
    if options.output is None:
        return None
    folder = Path(options.output)
    with convert_write_errors(folder, folder):
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigError(f"{folder} is not empty; choose another --output")
    return folder


def make_run_options(options: EvalOptions, model: str) -> RunOptions:
    """Return the options with which a model is loaded, sampled and scored."""
    return RunOptions(
        **{name: getattr(options, name) for name in (*EVAL_OPTIONS, "sampler")},
        model=model,
        learner=LearnerConfig(device=options.device, dtype=options.dtype),
        rewards=RewardConfig(**asdict(options.rewards), timeout=options.reward_timeout),
        evaluation=EvaluationConfig(problems=max(1, options.problems), samples_per_prompt=options.samples),
    )


def parse_options(args: list[str]) -> EvalOptions:
    """Parse the arguments of `policygrad eval`. Precedence: defaults < the run's own options < flags."""
    reject_empty_values(args, "--reward", "--allow-code")
    reject_cluster_flags(
        args, "eval", "runs on this machine, or with an engine's servers: --sampler.engine vllm --sampler.urls URL …"
    )
    plain = _parse(EvalOptions(), [word for word in args if word not in ("-h", "--help")])
    run = next(filter(None, map(_find_run, plain.model)), None)
    if plain.benchmark:
        _check_benchmark_options(plain)
        options = _parse(_benchmark_defaults(plain), args)
        if plain.benchmark == (LIST,):
            return options
    elif run is None:
        options = _parse(EvalOptions(), args)
    else:
        allowed = CodePermissions((*plain.allow_code, *code_in_argv(args)), plain.trust_remote_code)
        own, objects = load_eval_options(run / RUN_FILE, allowed)
        options = _parse(options_from_run(own), args)
        if plain.task:  # the data options of the run's own task do not apply to another one
            names = ("eval_data", "row_map", "skip_bad_rows", "fetch_images")
            options = replace(options, **{name: getattr(plain, name) for name in names})
        for name in objects:
            if not getattr(plain, name) and (name in ("task", "reward") or not plain.task):
                raise ConfigError(
                    f"the {name.replace('_', ' ')} of the run in {run} was a Python object, which no file holds. Give one with "
                    f"--{name.replace('_', '-')}, or evaluate from Python with pg.evaluate."
                )
        if not plain.reward:  # a run's own evaluations do not use process rewards either
            outcomes = tuple(name for name in options.reward if not resolve_reward(name).process_reward)
            options = replace(options, reward=outcomes)
    if not options.model:
        raise ConfigError("give one MODEL or several: policygrad eval tiny, policygrad eval runs/dapo-1 tiny")
    if twice := [model for model in options.model if options.model.count(model) > 1]:
        raise ConfigError(f"{twice[0]} is given twice; its samples would be the same")
    for folder in map(Path, options.model):
        if (folder / RUN_FILE).is_file() and not is_model_folder(folder / "model"):
            raise ConfigError(
                f"the run in {folder} has no model so far. Finish it with policygrad train --resume {folder}, or evaluate the "
                f"folder that policygrad export {folder} writes from its last checkpoint."
            )
    return replace(options, task=options.task or "embedded")


def _find_run(model: str) -> Path | None:
    """Return the folder of the run that trained a model, if the model is a run's folder or its RUN/best."""
    folder = Path(model)
    if (folder / RUN_FILE).is_file():
        return folder
    return folder.parent if folder.name == BEST and (folder.parent / RUN_FILE).is_file() else None


def _check_benchmark_options(plain: EvalOptions) -> None:
    """Raise ConfigError for an unknown benchmark, or an option that a benchmark decides."""
    if plain.benchmark != (LIST,):
        parse_benchmarks(plain.benchmark)
    for name in ("task", "reward", "environment", "eval_data", "row_map"):
        if getattr(plain, name):
            raise ConfigError(
                f"--{name.replace('_', '-')} and --benchmark exclude each other: a benchmark has its own data, prompts and grader"
            )


def _benchmark_defaults(options: EvalOptions) -> EvalOptions:
    """Return the options of benchmarks before the command line's: of a run its seed, precision and reward workers."""
    run = next(filter(None, map(_find_run, options.model)), None)
    if run is None:
        return EvalOptions(benchmark=options.benchmark, problems=ALL_PROBLEMS)
    allowed = CodePermissions(options.allow_code, options.trust_remote_code)
    own, _ = load_eval_options(run / RUN_FILE, allowed, ("seed", "trust_remote_code", "template_options"))
    return replace(options_from_run(own), benchmark=options.benchmark, problems=ALL_PROBLEMS)


def options_from_run(run: UncheckedRun) -> EvalOptions:
    """Return the options with which the run evaluated itself."""
    asked = run.evaluation if run.evaluation.problems else UncheckedRun().evaluation
    isolated = {name: getattr(run.rewards, name) for name in ("memory", "environment", "sandbox", "show_output")}
    own = {name: getattr(run, name) for name in EVAL_OPTIONS if name != "sampling"}
    return EvalOptions(
        **own,
        sampling=run.evaluation.resolve_sampling(run.sampling),
        problems=asked.problems,
        samples=asked.samples_per_prompt,
        device=run.learner.device,
        dtype=run.learner.resolve().dtype,
        reward_timeout=run.rewards.timeout,
        rewards=Isolation(**isolated),
    )


def _parse(default: EvalOptions, args: list[str]) -> EvalOptions:
    return parse_arguments(EvalOptions, drop_trust_flag(default, args), "eval", *HELP, default=default)


# Known benchmarks.


def evaluate_known(options: EvalOptions, args: list[str], folder: Path | None) -> int:
    """Measure the models on the benchmarks, and print a table of each."""
    from policygrad.training.benchmarks import BenchmarkResult, check_benchmark_rewards, evaluate_benchmarks

    benchmarks = parse_benchmarks(options.benchmark)
    check_benchmark_rewards(benchmarks)
    defaults, prepared = _benchmark_defaults(options), list[tuple[BenchmarkData, SamplingParams, int]]()
    for benchmark in benchmarks:  # the command line changes what it names of a benchmark's own settings
        settings = benchmark.sampling
        sampling = SamplingParams(settings.temperature, settings.top_p, max_tokens=settings.max_tokens)
        chosen = _parse(replace(defaults, samples=settings.samples, sampling=sampling), args)
        data = load_benchmark_data(benchmark, options.benchmark_data, chosen.problems)
        check_completion_count("the problems of", len(data.rows), "--samples", chosen.samples)
        prepared.append((data, chosen.sampling, chosen.samples))
    by_model = dict[str, list[BenchmarkResult]]()
    for model in options.model:
        display = ProgressLines(model if len(options.model) > 1 else "")
        by_model[model] = evaluate_benchmarks(
            make_run_options(options, model), prepared, progress=display.count_benchmark, phase=display.wait
        )
    reports = []
    for i, benchmark in enumerate(benchmarks):
        results = {model: each[i] for model, each in by_model.items()}
        outcomes = {model: result.result for model, result in results.items()}
        if all(not outcome.has_scores for outcome in outcomes.values()):
            reason = next((text for outcome in outcomes.values() for text in outcome.messages), "no reward applies")
            raise RewardError(f"benchmark {benchmark.key}: no completion could be scored: {reason}")
        reports.append(build_benchmark_report(results, options.threshold))
        if folder is not None:
            save_results(folder / benchmark.metric_name, reports[-1], outcomes)
        if not options.json:
            print_benchmark(reports[-1], outcomes, options.show, full=options.full)
    if options.json:
        print_json({"benchmarks": reports})
    elif len(reports) > 1:
        print_summary(reports)
    return 0


def build_benchmark_report(results: Mapping[str, BenchmarkResult], threshold: float) -> dict[str, Any]:
    """Return the object that --json prints of one benchmark: what `build_report` returns, with the benchmark's settings, intervals
    of all figures, and what model cards report."""
    first = next(iter(results.values()))
    benchmark, samples = first.benchmark, first.settings.samples
    outcomes = {model: result.result for model, result in results.items()}
    report = build_report(benchmark.key, None, samples, threshold, outcomes)
    for row, (model, result) in zip(report.get("models", [report]), results.items(), strict=True):
        outcome = result.result
        row["settings"] = asdict(result.settings)
        row["interval"] = _interval(outcome.mean_per_problem)
        row["pass_interval"] = {str(k): _interval(outcome.pass_at_per_problem(k, threshold)) for k in _list_ks(samples)}
        row["majority_interval"] = _interval(outcome.majority_per_problem)
        row["figures"] = {name: {"value": value, "stderr": error} for name, (value, error) in result.figures.items()}
        row["reported"] = [
            {
                **asdict(each),
                "difference": row["mean"] - each.value,
                "settings_differ": [*result.settings.list_differences(each.settings), *filter(None, [each.note])]
                + [f"{row['problems']} of {benchmark.problems} problems"] * (row["problems"] < benchmark.problems),
            }
            for each in find_reported(model, benchmark)
        ]
        row["notes"] = [*result.messages, *row["notes"]]
    about = {name: getattr(benchmark, name) for name in ("title", "repository", "revision", "licence", "differs")}
    return {"benchmark": benchmark.key, **about, "level": LEVEL, **report}


def _interval(values: Sequence[float]) -> list[float]:
    """Return the bootstrap interval of a mean over problems."""
    estimate = paired_difference(values, [0.0] * len(values))
    return [estimate.low, estimate.high]


def print_benchmark(report: Mapping[str, Any], outcomes: Outcomes, show: int, *, full: bool = False) -> None:
    """Print a benchmark's table on standard output, and problems on standard error."""
    print_table(report, outcomes, show, as_json=False, full=full)
    for row in report.get("models", [report]):
        name = row["model"]
        low, high = row["interval"]
        print(f"  {name}: mean {row['mean']:.4f} [{low:.4f}, {high:.4f}], {report['level']:.0%} bootstrap interval")
        for figure, x in row["figures"].items():
            print(f"  {name}: {figure} {x['value']:.4f} ± {x['stderr']:.4f}")
        for each in row["reported"]:
            differ = "; ".join(each["settings_differ"]) or "same settings"
            print(
                f"  {name}: its card reports {each['value']:.3f} ({row['mean'] - each['value']:+.3f} here; {differ}): "
                f"{each['source']}"
            )
    print()


def print_summary(reports: Sequence[Mapping[str, Any]]) -> None:
    """Print the mean of every model on every benchmark, with its standard error over problems."""
    models = [row["model"] for row in reports[0].get("models", [reports[0]])]
    lines = [["mean ± standard error", *models]]
    for report in reports:
        rows = report.get("models", [report])
        lines.append([report["benchmark"], *(f"{row['mean']:.4f} ± {row['stderr']:.4f}" for row in rows)])
    _print_columns(lines)


def _print_columns(lines: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip())


def print_benchmarks(*, as_json: bool) -> None:
    """Print all benchmarks: their size, data, grader and sampling."""
    known = load_benchmarks()
    if as_json:
        print_json({"benchmarks": [asdict(benchmark) for benchmark in known.values()]})
        return
    rows = [("benchmark", "problems", "data", "grader", "samples", "temperature", "tokens")]
    for benchmark in known.values():
        s = benchmark.sampling
        grader = benchmark.reward.partition(":")[0]
        numbers = (f"{s.samples}", f"{s.temperature:g}", f"{s.max_tokens}")
        rows.append((benchmark.name, f"{benchmark.problems}", benchmark.repository, grader, *numbers))
    _print_columns(rows)
    print("\npolicygrad show NAME tells the prompt, the settings and where each comes from.")


class ProgressLines:
    """Show on standard error how many problems of a model are done, and once each what rewards are waiting for."""

    def __init__(self, model: str) -> None:
        self.model, self.waits = model, {""}

    def count(self, done: int, total: int) -> None:
        if sys.stderr.isatty():
            end = "\n" if done == total else ""
            print(f"\r  {self.model} {done}/{total} problems", end=end, file=sys.stderr, flush=True)

    def count_benchmark(self, benchmark: Benchmark, done: int, total: int) -> None:
        if sys.stderr.isatty():
            end = "\n" if done == total else ""
            print(f"\r  {self.model} {benchmark.key} {done}/{total} problems", end=end, file=sys.stderr, flush=True)

    def wait(self, text: str, done: int, total: int) -> None:
        if (state := name_state(text)) not in self.waits:
            self.waits.add(state)
            print(f"{text}: {done} of {total} results so far", file=sys.stderr, flush=True)


SAMPLES_FILE, REPORT_FILE, PAGE_FILE = "samples.jsonl", "eval.json", "eval.html"
_KS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
Outcomes = Mapping[str, EvaluationResult]  # results by model, in the order of the command, on the same problems


def build_report(
    task: str, eval_data: str | None, samples: int, threshold: float, outcomes: Outcomes
) -> dict[str, Any]:
    """Return the object that --json prints: one model's figures, or those of several with their differences from the first.

    eval_data: file with the problems; None = a part of the task itself.
    """
    data = {"task": task, "eval_data": eval_data}
    rows = [_row(model, data, samples, threshold, outcome) for model, outcome in outcomes.items()]
    completions = (s for outcome in outcomes.values() for problem in outcome.problems for s in problem)
    highest = max((s.score for s in completions if s.score is not None), default=0.0)
    if 0 < highest < threshold:
        rows[0]["notes"].append(
            f"pass@k counts scores of at least {format_number(threshold)}, but the highest score was {format_number(highest)}. "
            "Set --threshold to the lowest score that counts as correct."
        )
    if len(rows) == 1:
        return rows[0]
    (first, a), *others = outcomes.items()
    differences = [
        {
            "model": first,
            "less": other,
            "mean": asdict(paired_difference(a.mean_per_problem, b.mean_per_problem)),
            "pass": {
                str(k): asdict(
                    paired_difference(a.pass_at_per_problem(k, threshold), b.pass_at_per_problem(k, threshold))
                )
                for k in _list_ks(samples)
            },
            "majority": asdict(paired_difference(a.majority_per_problem, b.majority_per_problem)),
        }
        for other, b in others
    ]
    return {"models": rows, "differences": differences, "level": LEVEL}


def _row(
    model: str, data: Mapping[str, str | None], samples: int, threshold: float, outcome: EvaluationResult
) -> dict[str, Any]:
    return {
        "model": model,
        **data,
        "problems": len(outcome.problems),
        "samples": samples,
        "mean": outcome.mean,
        "stderr": outcome.standard_error(),
        "pass": {str(k): outcome.pass_at(k, threshold) for k in _list_ks(samples)},
        "majority": outcome.majority,
        "failed": outcome.num_failed,
        "truncated": outcome.num_truncated,
        "tokens": outcome.num_tokens,
        "notes": list(outcome.messages),
    }


def _list_ks(samples: int) -> list[int]:
    return [k for k in _KS if k < samples] + [samples]


def print_table(report: Mapping[str, Any], outcomes: Outcomes, show: int, *, as_json: bool, full: bool = False) -> None:
    """Print the report on standard output, and problems with rewards on standard error."""
    if as_json:
        print_json(report)
        return
    rows = report.get("models", [report])
    first, names = rows[0], ", ".join(row["model"] for row in rows)
    k, ks = first["samples"], list(first["pass"])
    print(f"{names} on {first['eval_data'] or first['task']}: {first['problems']} problems × {k} samples\n")
    if len(rows) == 1:
        print(f"  mean@{k:<4} {first['mean']:.4f} ± {first['stderr']:.4f} (standard error over problems)")
        for each, value in first["pass"].items():
            print(f"  pass@{each:<4} {value:.4f}")
        print(f"  maj@{k:<5} {first['majority']:.4f}")
        print(f"  {_format_failures(first)}")
        if show > 0:
            print()
    else:
        lines = [["", f"mean@{k}", *(f"pass@{each}" for each in ks), f"maj@{k}"]]
        for row in rows:
            lines.append([row["model"], *(f"{x:.4f}" for x in (row["mean"], *row["pass"].values(), row["majority"]))])
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        for name, *cells in lines:
            numbers = (f"  {cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True))
            print(f"  {name:<{widths[0]}}{''.join(numbers)}".rstrip())
        for pair in report["differences"]:
            head = f"{report['level']:.0%} bootstrap intervals over the same problems:"
            print(f"\n{pair['model']} − {pair['less']}, {head}")
            passes = {f"pass@{each}": pair["pass"][each] for each in ks}
            for name, x in {f"mean@{k}": pair["mean"], **passes, f"maj@{k}": pair["majority"]}.items():
                separated = "" if x["low"] <= 0 <= x["high"] else "  excludes 0"
                print(f"  {name:<9} {x['value']:+.4f} [{x['low']:+.4f}, {x['high']:+.4f}]{separated}")
        print()
        for row in rows:
            print(f"  {row['model']}: {_format_failures(row)}")
    # The first sample of the first problems, of each model.
    for i in range(max(0, show)):
        for model, outcome in outcomes.items():
            for sample in outcome.problems[i][:1] if i < len(outcome.problems) else ():
                if full:
                    print(_format_sample(model if len(rows) > 1 else "", i, outcome.prompts[i], sample))
                    continue
                text = f"{to_one_line(model, 24)}: {to_one_line(sample.text, 60)}"
                print(f"  {format_number(sample.score):>5}  {to_one_line(sample.text, 70) if len(rows) == 1 else text}")
    for message in dict.fromkeys(note for row in rows for note in row["notes"]):
        print(f"note: {message}", file=sys.stderr)


def _format_sample(model: str, problem: int, prompt: Any, sample: EvalSample) -> str:
    """Return a completion in full, after its prompt: text, or messages with their roles."""
    messages = [("prompt", prompt)] if isinstance(prompt, str) else [(m["role"], m.get("content")) for m in prompt]
    reward = "none, it failed" if sample.reward is None else format_number(sample.reward)
    parts = ", ".join(f"{name} {'none' if x is None else format_number(x)}" for name, x in sample.rewards)
    head = f"problem {problem + 1}" + (f", {model}" if model else "") + f": reward {reward}"
    head += f" ({parts})" if len(sample.rewards) > 1 else ""
    head += f", {sample.tokens} tokens" + (", cut off" if sample.truncated else "")
    shown = [f"[{role}]\n{content_text(content or '').rstrip()}" for role, content in messages]
    text = "\n".join([f"--- {head}", *shown, "[completion]", sample.text.rstrip()])
    return strip_control_chars(text)


def _format_failures(row: Mapping[str, Any]) -> str:
    total = row["problems"] * row["samples"]
    return f"{row['truncated']} truncated, {row['failed']} without a reward, of {total} completions"


def save_results(folder: Path, report: Mapping[str, Any], outcomes: Outcomes) -> None:
    """Write the report, and one JSON line per completion with its reward."""
    folder.mkdir(parents=True, exist_ok=True)
    with convert_write_errors(folder / REPORT_FILE, folder):
        (folder / REPORT_FILE).write_text(json.dumps(report, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        with (folder / SAMPLES_FILE).open("w", encoding="utf-8", errors="backslashreplace") as file:
            for model, outcome in outcomes.items():
                for i, (prompt, samples) in enumerate(zip(outcome.prompts, outcome.problems, strict=True)):
                    for j, sample in enumerate(samples):
                        line = {"model": model, "problem": i, "sample": j, "prompt": prompt, "completion": sample.text}
                        line |= {"reward": sample.reward, "rewards": dict(sample.rewards), "answer": sample.answer}
                        line |= {"tokens": sample.tokens, "truncated": sample.truncated}
                        file.write(json.dumps(line, ensure_ascii=False) + "\n")
