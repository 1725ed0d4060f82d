"""`policygrad eval`: mean@k, the unbiased pass@k and maj@k of one model or several on the same held-out problems."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any

import tyro

from policygrad.commands.options import list_help_flags, reject_cluster_flags, reject_empty_values
from policygrad.commands.render import wrap_paragraphs
from policygrad.compare.statistics import LEVEL, Estimate, paired_difference
from policygrad.environments.base import DEFAULT_TIMEOUT
from policygrad.errors import ConfigError, RewardError
from policygrad.learners.config import LearnerConfig
from policygrad.models.loading import TRUST_FLAG
from policygrad.models.lora_config import is_model_folder
from policygrad.rewards import resolve_reward
from policygrad.rewards.config import Isolation, RewardConfig
from policygrad.rollout.evaluation import EvaluationResult
from policygrad.samplers.base import SamplingParams
from policygrad.samplers.config import SamplerConfig
from policygrad.trackers.console import format_number, to_one_line
from policygrad.trackers.jsonl import convert_write_errors
from policygrad.training.config.run import (
    EvaluationConfig,
    RunOptions,
    UncheckedRun,
    check_completion_count,
    check_environment_timeout,
    check_seed,
    optional_arg,
)
from policygrad.training.config.serialization import EVAL_OPTIONS, load_eval_options
from policygrad.training.config.trust import RUN_FILE, CodePermissions, code_in_argv

HELP = (
    "Held-out accuracy of a model: mean@k, the unbiased pass@k, and maj@k, what the most frequent answer is worth.",
    "The folder of a run brings its own task, reward and lengths, which the options below change. Of several models the first "
    "such folder's count for all: they get the same problems and random numbers, and the table says how far apart they are.",
)
_CONFIG = (tyro.conf.FlagCreatePairsOff, tyro.conf.AvoidSubcommands)
_OWN = "the run's, or "


def _short(name: str, flag: str) -> object:
    """The option as `train` calls it, and a shorter word for it."""
    return tyro.conf.arg(name=name, aliases=[flag])


@dataclass(frozen=True)
class EvalOptions:
    """Options of `policygrad eval`."""

    model: Annotated[tyro.conf.Positional[tuple[str, ...]], optional_arg("MODEL", "none")] = ()
    """Directories or hub ids; tiny = the base model inside the package; a run's folder = the model it trained."""
    trust_remote_code: bool = False
    """Let Python code in the model's folder or repository run; without it such a model is refused."""
    allow_code: Annotated[tuple[str, ...], optional_arg("MODULE|FILE", "what is in the current folder")] = ()
    """Code that the run's own run.toml may name and have imported; what the command names itself needs no leave."""
    task: Annotated[str, optional_arg("NAME|FILE", f"{_OWN}embedded")] = ""
    """Where problems come from: embedded, a reasoning-gym name (gcd+2*chain_sum:max_terms=3), or data.
    Data is a .jsonl, .jsonl.gz, .parquet or .arrow file, a folder of `datasets`, or hf:REPOSITORY[:CONFIG[:SPLIT]]."""
    row_map: Annotated[str | None, optional_arg("FILE:NAME", f"{_OWN}none")] = None
    """A function that is given each row of the data, a dict, and returns the row to use, or None to leave it out: mine.py:f."""
    skip_bad_rows: Annotated[bool, tyro.conf.arg(name="task.skip-bad-rows")] = False
    """Leave out rows that cannot be used, and say how many; without it the first is refused, with file and line."""
    reward: Annotated[tuple[str, ...], optional_arg("NAME", f"{_OWN}the task's own")] = ()
    """Reward functions: names, dotted paths, path/to/file.py:function, or model:DIR for a reward model.
    Each may have a weight, bounds and gates (0.5*math within 0..1 if format)."""
    environment: Annotated[str | None, optional_arg("FILE:NAME", f"{_OWN}the prompt and one answer")] = None
    """What episodes take place in: calculator, or a class or ToolUse of your own, mine.py:NAME.
    Others': gymnasium:ID, textarena:GAME, openenv:http://host:port, verifiers:ID."""
    environment_timeout: Annotated[float, tyro.conf.arg(name="environment.timeout")] = DEFAULT_TIMEOUT
    """Seconds that one reset, step or close of the environment may take; what takes longer costs its episode."""
    eval_data: Annotated[str | None, optional_arg("FILE", f"{_OWN}a sixteenth of the task")] = None
    """Data of held-out problems, for a task that is data."""
    problems: Annotated[int, _short("evaluation.problems", "--problems")] = 256
    """How many held-out problems."""
    samples: Annotated[int, _short("evaluation.samples_per_prompt", "--samples")] = 8
    """k, completions per problem."""
    threshold: float = 1.0
    """A completion with at least this score is correct, for pass@k."""
    sampling: Annotated[SamplingParams, tyro.conf.arg(name="")] = field(default_factory=SamplingParams)
    """The distribution completions are drawn from."""
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    """What draws them: this process, or an engine's servers."""
    seed: int = 0
    """Of the samples."""
    device: Annotated[str, _short("learner.device", "--device")] = "auto"
    """cpu, cuda, cuda:1, …; auto = cuda where there is one."""
    dtype: Annotated[str, _short("learner.dtype", "--dtype")] = "fp32"
    """fp32 or bf16."""
    reward_timeout: Annotated[float, _short("rewards.timeout", "--budget")] = 10.0
    """Seconds per sample for a reward."""
    rewards: Isolation = field(default_factory=Isolation)
    """The reward workers."""
    show: int = 3
    """How many problems to print with a completion."""
    json: bool = False
    """Print one JSON object instead."""
    output: Annotated[str | None, optional_arg("DIR", "not written")] = None
    """A new folder for eval.json, what --json prints, and samples.jsonl, a line for every completion."""

    def __post_init__(self) -> None:
        for name in ("problems", "samples"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name} must be at least 1, not {getattr(self, name)}")
        check_completion_count("--problems", self.problems, "--samples", self.samples)
        if not 0 < self.reward_timeout < math.inf:
            raise ConfigError(f"--budget must be above 0 seconds and finite, not {self.reward_timeout}")
        if not math.isfinite(self.threshold):
            raise ConfigError(f"--threshold must be finite, not {self.threshold}")
        check_seed(self.seed)
        check_environment_timeout(self.environment_timeout)
        if self.dtype not in ("fp32", "bf16"):
            raise ConfigError(f"--dtype must be fp32 or bf16, not {self.dtype!r}")


def evaluate(args: list[str]) -> int:
    """`policygrad eval MODEL [MODEL …] --task …`."""
    options = parse_options(args)
    from policygrad.training.evaluation import evaluate as measure

    folder = None if options.output is None else make_output_folder(options.output)
    found = {}
    for model in options.model:
        found[model] = outcome = measure(
            _to_run_options(options, model),
            progress=_count(model if len(options.model) > 1 else ""),
            phase=_waits(),
        )
        if not outcome.has_scores:
            said = outcome.messages[0] if outcome.messages else "no reward function applies to any of them"
            raise RewardError(
                f"none of the {outcome.num_failed} completions has a reward, so there is nothing to report: {said}"
            )
    told = build_report(options.task, options.eval_data, options.samples, options.threshold, found)
    if folder is not None:
        save_results(folder, told, found)
    print_table(told, found, options.show, as_json=options.json)
    return 0


def _to_run_options(options: EvalOptions, model: str) -> RunOptions:
    same = {name: getattr(options, name) for name in (*EVAL_OPTIONS, "sampler")}
    isolation = {f.name: getattr(options.rewards, f.name) for f in fields(Isolation)}
    return RunOptions(
        **same,
        model=model,
        learner=LearnerConfig(device=options.device, dtype=options.dtype),
        rewards=RewardConfig(**isolation, timeout=options.reward_timeout),
        evaluation=EvaluationConfig(problems=options.problems, samples_per_prompt=options.samples),
    )


def parse_options(args: list[str]) -> EvalOptions:
    """What `policygrad eval ARGS` would measure: the defaults < the run's own < the flags.

    Raises:
        ConfigError: what cannot be.
    """
    reject_empty_values(args, "--reward", "--allow-code")
    reject_cluster_flags(
        args, "eval", "measures on this machine, or with what servers draw: --sampler.engine vllm --sampler.urls URL …"
    )
    plain = _parse(EvalOptions(), [word for word in args if word not in ("-h", "--help")])
    run = next((Path(model) for model in plain.model if (Path(model) / RUN_FILE).is_file()), None)
    if run is None:
        options = _parse(EvalOptions(), args)
    else:
        own, objects = load_eval_options(run / RUN_FILE, _allowed(plain, args))
        options = _of_another_task(_parse(options_from_run(own), args), plain)
        _check_named(run, objects, plain)
        options = options if plain.reward else replace(options, reward=_of_outcomes(options.reward))
    if not options.model:
        raise ConfigError("name a MODEL, or several: policygrad eval tiny, policygrad eval runs/dapo-1 tiny")
    if twice := [model for model in options.model if options.model.count(model) > 1]:
        raise ConfigError(f"{twice[0]} is named twice: its samples would be the same ones")
    for folder in map(Path, options.model):
        if (folder / RUN_FILE).is_file() and not is_model_folder(folder / "model"):
            raise ConfigError(
                f"the run in {folder} has no model yet: finish it first, policygrad train --resume {folder}, or name the folder "
                f"that policygrad export {folder} makes of its last checkpoint"
            )
    return replace(options, task=options.task or "embedded")


def options_from_run(run: UncheckedRun) -> EvalOptions:
    """The options that measure as the run itself did before and after."""
    asked = run.evaluation if run.evaluation.problems else UncheckedRun().evaluation
    isolated = {name: getattr(run.rewards, name) for name in ("memory", "environment", "sandbox", "show_output")}
    return EvalOptions(
        **{name: getattr(run, name) for name in EVAL_OPTIONS},
        problems=asked.problems,
        samples=asked.samples_per_prompt,
        device=run.learner.device,
        dtype=run.learner.resolve().dtype,
        reward_timeout=run.rewards.timeout,
        rewards=Isolation(**isolated),
    )


def _of_another_task(options: EvalOptions, plain: EvalOptions) -> EvalOptions:
    """What belongs to the run's own task is left out where another one is named. plain: what the flags alone say."""
    if not plain.task:
        return options
    return replace(options, eval_data=plain.eval_data, row_map=plain.row_map, skip_bad_rows=plain.skip_bad_rows)


def _of_outcomes(rewards: tuple[str, ...]) -> tuple[str, ...]:
    """A run's rewards without those of steps, which it was not measured by either."""
    return tuple(name for name in rewards if not resolve_reward(name).process_reward)


def _check_named(run: Path, objects: tuple[str, ...], plain: EvalOptions) -> None:
    """Raises ConfigError for what only Python has and the flags do not name."""
    for name in objects:
        if not getattr(plain, name) and (name in ("task", "reward") or not plain.task):
            raise ConfigError(
                f"the {name.replace('_', ' ')} of the run in {run} was an object given in Python, which no file holds: name one, "
                f"--{name.replace('_', '-')}, or measure from Python, pg.evaluate"
            )


def _parse(default: EvalOptions, args: list[str]) -> EvalOptions:
    args = [word for word in args if word != TRUST_FLAG] if default.trust_remote_code else args
    return tyro.cli(
        EvalOptions,
        args=args,
        default=default,
        prog="policygrad eval",
        description=wrap_paragraphs(*HELP),
        config=_CONFIG,
    )


def _allowed(plain: EvalOptions, args: list[str]) -> CodePermissions:
    return CodePermissions((*plain.allow_code, *code_in_argv(args)), plain.trust_remote_code)


def list_eval_flags() -> list[str]:
    """Every flag of `policygrad eval`, for tab completion."""
    return list_help_flags(lambda: _parse(EvalOptions(), ["--help"]))


def _waits() -> Callable[[str, int, int], None]:
    """Says on standard error what rewards are waited for, once each."""
    said = {""}

    def tell(text: str, done: int, total: int) -> None:
        if text not in said:
            said.add(text)
            print(f"{text}: {done} of {total} answers so far", file=sys.stderr, flush=True)

    return tell


def _count(model: str) -> Callable[[int, int], None]:
    def tell(done: int, total: int) -> None:
        if sys.stderr.isatty():
            end = "\n" if done == total else ""
            print(f"\r  {model} {done}/{total} problems", end=end, file=sys.stderr, flush=True)

    return tell


# What `policygrad eval` has measured: as one JSON object, as a table, and every completion as a line of a file.

SAMPLES_FILE, REPORT_FILE = "samples.jsonl", "eval.json"
_KS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
Outcomes = Mapping[str, EvaluationResult]
"""By the model's name, in the order of the command; all of the same problems."""


def build_report(task: str, held_out: str | None, samples: int, threshold: float, found: Outcomes) -> dict[str, Any]:
    """What --json prints: of one model its numbers; of several a list of those, and the first model less each other.

    held_out: the file whose problems were measured; None = a part of the task itself."""
    data = {"task": task, "eval/reward": held_out}
    rows = [_row(model, data, samples, threshold, outcome) for model, outcome in found.items()]
    if note := _unreachable_threshold(threshold, found):
        rows[0]["notes"].append(note)
    if len(rows) == 1:
        return rows[0]
    first, *others = found
    differences = [_difference(first, other, samples, threshold, found) for other in others]
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
        "pass": {str(k): outcome.pass_at(k, threshold) for k in _ks(samples)},
        "majority": outcome.majority,
        "failed": outcome.num_failed,
        "truncated": outcome.num_truncated,
        "tokens": outcome.num_tokens,
        "notes": list(outcome.messages),
    }


def _unreachable_threshold(threshold: float, found: Outcomes) -> str:
    """A note where scores are positive but none reaches the threshold, as with a reward whose maximum lies below it; else ""."""
    scores = [
        s.score for outcome in found.values() for problem in outcome.problems for s in problem if s.score is not None
    ]
    highest = max(scores, default=0.0)
    if not 0 < highest < threshold:
        return ""
    return (
        f"pass@k counts scores of at least {format_number(threshold)}, and the highest score was {format_number(highest)}: if the reward "
        "cannot give more, pass@k is always 0. Set --threshold to the lowest score that counts as correct"
    )


def _difference(first: str, other: str, samples: int, threshold: float, found: Outcomes) -> dict[str, Any]:
    a, b = found[first], found[other]
    passes = {
        str(k): _plain(paired_difference(a.pass_at_per_problem(k, threshold), b.pass_at_per_problem(k, threshold)))
        for k in _ks(samples)
    }
    mean, majority = (
        paired_difference(a.mean_per_problem, b.mean_per_problem),
        paired_difference(a.majority_per_problem, b.majority_per_problem),
    )
    return {"model": first, "less": other, "mean": _plain(mean), "pass": passes, "majority": _plain(majority)}


def _plain(found: Estimate) -> dict[str, float]:
    return {"value": found.value, "low": found.low, "high": found.high}


def _ks(samples: int) -> list[int]:
    return [k for k in _KS if k < samples] + [samples]


def print_table(told: Mapping[str, Any], found: Outcomes, show: int, *, as_json: bool) -> None:
    """The report on standard output, and what went wrong with rewards on standard error."""
    if as_json:
        print(json.dumps(told, ensure_ascii=False))
        return
    rows = told.get("models", [told])
    first = rows[0]
    names = ", ".join(row["model"] for row in rows)
    data = first["eval/reward"] or first["task"]
    print(f"{names} on {data}: {first['problems']} problems × {first['samples']} samples\n")
    if len(rows) == 1:
        _print_one(first, found[first["model"]], show)
    else:
        _print_several(told, found, show)
    for message in dict.fromkeys(note for row in rows for note in row["notes"]):
        print(f"note: {message}", file=sys.stderr)


def _print_one(row: Mapping[str, Any], outcome: EvaluationResult, show: int) -> None:
    print(f"  mean@{row['samples']:<4} {row['mean']:.4f} ± {row['stderr']:.4f} (standard error over problems)")
    for k, value in row["pass"].items():
        print(f"  pass@{k:<4} {value:.4f}")
    print(f"  maj@{row['samples']:<5} {row['majority']:.4f}")
    print(f"  {_lost(row)}")
    if show > 0:
        print()
    for problem in outcome.problems[: max(0, show)]:
        print(f"  {format_number(problem[0].score):>5}  {to_one_line(problem[0].text, 70)}")


def _print_several(told: Mapping[str, Any], found: Outcomes, show: int) -> None:
    rows, differences = told["models"], told["differences"]
    k, ks = rows[0]["samples"], list(rows[0]["pass"])
    lines = [["", f"mean@{k}", *(f"pass@{each}" for each in ks), f"maj@{k}"]]
    lines += [
        [row["model"], *(f"{x:.4f}" for x in (row["mean"], *row["pass"].values(), row["majority"]))] for row in rows
    ]
    _print_columns(lines)
    for said in differences:
        print(f"\n{said['model']} − {said['less']}, {told['level']:.0%} bootstrap intervals over the same problems:")
        named = {
            f"mean@{k}": said["mean"],
            **{f"pass@{each}": said["pass"][each] for each in ks},
            f"maj@{k}": said["majority"],
        }
        for name, x in named.items():
            apart = "" if x["low"] <= 0 <= x["high"] else "  apart from 0"
            print(f"  {name:<9} {x['value']:+.4f} [{x['low']:+.4f}, {x['high']:+.4f}]{apart}")
    print()
    for row in rows:
        print(f"  {row['model']}: {_lost(row)}")
    for i in range(max(0, show)):
        for model, outcome in found.items():
            for sample in outcome.problems[i][:1] if i < len(outcome.problems) else ():
                print(f"  {format_number(sample.score):>5}  {to_one_line(model, 24)}: {to_one_line(sample.text, 60)}")


def _print_columns(lines: list[list[str]]) -> None:
    widths = [max(map(len, column)) for column in zip_longest(*lines, fillvalue="")]
    for line in lines:
        name, *cells = (
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        print("  " + "  ".join([name, *cells]).rstrip())


def _lost(row: Mapping[str, Any]) -> str:
    total = row["problems"] * row["samples"]
    return f"cut off by the budget {row['truncated']}, without a reward {row['failed']}, of {total} completions"


def make_output_folder(output: str) -> Path:
    """The folder, made now so that it is said before the work and not after it. Raises ConfigError for one with files in it."""
    folder = Path(output)
    with convert_write_errors(folder, folder):
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigError(f"{folder} is not empty: choose another --output")
    return folder


def save_results(folder: Path, told: Mapping[str, Any], found: Outcomes) -> None:
    """The report, and one JSON line for every completion: model, problem, prompt, what it was worth by which reward.

    Raises:
        RunError: what cannot be written.
    """
    with convert_write_errors(folder / REPORT_FILE, folder):
        (folder / REPORT_FILE).write_text(json.dumps(told, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        with (folder / SAMPLES_FILE).open("w", encoding="utf-8", errors="backslashreplace") as file:
            for model, outcome in found.items():
                file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in _lines(model, outcome))


def _lines(model: str, outcome: EvaluationResult) -> list[dict[str, Any]]:
    return [
        {
            "model": model,
            "problem": i,
            "sample": j,
            "prompt": prompt,
            "completion": sample.text,
            "reward": sample.reward,
            "rewards": dict(sample.rewards),
            "answer": sample.answer,
            "tokens": sample.tokens,
            "truncated": sample.truncated,
        }
        for i, (prompt, row) in enumerate(zip(outcome.prompts, outcome.problems, strict=True))
        for j, sample in enumerate(row)
    ]
