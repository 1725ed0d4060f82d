"""`policygrad eval`: mean@k, the unbiased pass@k and maj@k of one model or several on the same held-out problems."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import tyro

from policygrad.commands.describe import paragraphs
from policygrad.commands.options import printed_flags
from policygrad.commands.words import refuse_cluster, refuse_empty
from policygrad.environments.base import TIMEOUT
from policygrad.errors import ConfigError, RewardError
from policygrad.models.lora import holds_model
from policygrad.models.trust import FLAG
from policygrad.rewards import resolve
from policygrad.rewards.config import Isolation
from policygrad.samplers.base import Sampling
from policygrad.samplers.config import SamplerConfig
from policygrad.training.config.allowed import RUN, Allowed, from_words
from policygrad.training.config.checks import check_answers, check_seed, check_timeout
from policygrad.training.config.measured import SAME, measured
from policygrad.training.config.run import Draft, optional

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

    model: Annotated[tyro.conf.Positional[tuple[str, ...]], optional("MODEL", "none")] = ()
    """Directories or hub ids; tiny = the base model inside the package; a run's folder = the model it trained."""
    trust_remote_code: bool = False
    """Let Python code in the model's folder or repository run; without it such a model is refused."""
    allow: Annotated[tuple[str, ...], optional("MODULE|FILE", "what is in the current folder")] = ()
    """Code that the run's own run.toml may name and have imported; what the command names itself needs no leave."""
    task: Annotated[str, optional("NAME|FILE", f"{_OWN}embedded")] = ""
    """Where problems come from: embedded, a reasoning-gym name (gcd+2*chain_sum:max_terms=3), or data.
    Data is a .jsonl, .jsonl.gz, .parquet or .arrow file, a folder of `datasets`, or hf:REPOSITORY[:CONFIG[:SPLIT]]."""
    map: Annotated[str | None, optional("FILE:NAME", f"{_OWN}none")] = None
    """A function that is given each row of the data, a dict, and returns the row to use, or None to leave it out: mine.py:f."""
    skip_bad_rows: Annotated[bool, tyro.conf.arg(name="task.skip-bad-rows")] = False
    """Leave out rows that cannot be used, and say how many; without it the first is refused, with file and line."""
    reward: Annotated[tuple[str, ...], optional("NAME", f"{_OWN}the task's own")] = ()
    """Reward functions: names, dotted paths, path/to/file.py:function, or model:DIR for a reward model.
    Each may have a weight, bounds and gates (0.5*math within 0..1 if format)."""
    environment: Annotated[str | None, optional("FILE:NAME", f"{_OWN}the prompt and one answer")] = None
    """What episodes take place in: calculator, or a class or ToolUse of your own, mine.py:NAME.
    Others': gymnasium:ID, textarena:GAME, openenv:http://host:port, verifiers:ID."""
    environment_timeout: Annotated[float, tyro.conf.arg(name="environment.timeout")] = TIMEOUT
    """Seconds that one reset, step or close of the environment may take; what takes longer costs its episode."""
    held_out: Annotated[str | None, optional("FILE", f"{_OWN}a sixteenth of the task")] = None
    """Data of held-out problems, for a task that is data."""
    problems: Annotated[int, _short("evaluation.problems", "--problems")] = 256
    """How many held-out problems."""
    samples: Annotated[int, _short("evaluation.samples", "--samples")] = 8
    """k, completions per problem."""
    threshold: float = 1.0
    """A completion with at least this score is correct, for pass@k."""
    sampling: Annotated[Sampling, tyro.conf.arg(name="")] = field(default_factory=Sampling)
    """The distribution completions are drawn from."""
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    """What draws them: this process, or an engine's servers."""
    seed: int = 0
    """Of the samples."""
    device: Annotated[str, _short("learner.device", "--device")] = "auto"
    """cpu, cuda, cuda:1, …; auto = cuda where there is one."""
    dtype: Annotated[str, _short("learner.dtype", "--dtype")] = "fp32"
    """fp32 or bf16."""
    budget: Annotated[float, _short("rewards.budget", "--budget")] = 10.0
    """Seconds per sample for a reward."""
    rewards: Isolation = field(default_factory=Isolation)
    """The reward workers."""
    show: int = 3
    """How many problems to print with a completion."""
    json: bool = False
    """Print one JSON object instead."""
    output: Annotated[str | None, optional("DIR", "not written")] = None
    """A new folder for eval.json, what --json prints, and samples.jsonl, a line for every completion."""

    def __post_init__(self) -> None:
        for name in ("problems", "samples"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name} must be at least 1, not {getattr(self, name)}")
        check_answers("--problems", self.problems, "--samples", self.samples)
        if not 0 < self.budget < math.inf:
            raise ConfigError(f"--budget must be above 0 seconds and finite, not {self.budget}")
        if not math.isfinite(self.threshold):
            raise ConfigError(f"--threshold must be finite, not {self.threshold}")
        check_seed(self.seed)
        check_timeout(self.environment_timeout)
        if self.dtype not in ("fp32", "bf16"):
            raise ConfigError(f"--dtype must be fp32 or bf16, not {self.dtype!r}")


def evaluate(args: list[str]) -> int:
    """`policygrad eval MODEL [MODEL …] --task …`."""
    options = asked(args)
    from policygrad.commands.evaluated import print_table, report, save, writable_folder
    from policygrad.training.evaluation import evaluate as measure

    folder = None if options.output is None else writable_folder(options.output)
    sampled = ("problems", "samples", "sampling", "seed", "device", "dtype")
    data = (
        "reward",
        "environment",
        "environment_timeout",
        "held_out",
        "budget",
        "map",
        "skip_bad_rows",
        "trust_remote_code",
    )
    given = {name: getattr(options, name) for name in (*sampled, *data)}
    isolated = {name: getattr(options.rewards, name) for name in ("memory", "sandbox", "show_output")}
    found = {}
    for model in options.model:
        found[model] = outcome = measure(
            model,
            options.task,
            **given,
            **isolated,
            engine=options.sampler,
            reward_environment=options.rewards.environment,
            progress=_count(model if len(options.model) > 1 else ""),
            phase=_waits(),
        )
        if not outcome.scored:
            said = outcome.messages[0] if outcome.messages else "no reward function applies to any of them"
            raise RewardError(
                f"none of the {outcome.failed} completions has a reward, so there is nothing to report: {said}"
            )
    told = report(options.task, options.held_out, options.samples, options.threshold, found)
    if folder is not None:
        save(folder, told, found)
    print_table(told, found, options.show, as_json=options.json)
    return 0


def asked(args: list[str]) -> EvalOptions:
    """What `policygrad eval ARGS` would measure: the defaults < the run's own < the flags.

    Raises:
        ConfigError: what cannot be.
    """
    refuse_empty(args, "--reward", "--allow")
    refuse_cluster(
        args, "eval", "measures on this machine, or with what servers draw: --sampler.engine vllm --sampler.urls URL …"
    )
    plain = _parse(EvalOptions(), [word for word in args if word not in ("-h", "--help")])
    run = next((Path(model) for model in plain.model if (Path(model) / RUN).is_file()), None)
    if run is None:
        options = _parse(EvalOptions(), args)
    else:
        own, objects = measured(run / RUN, _allowed(plain, args))
        options = _of_another_task(_parse(of_run(own), args), plain)
        _check_named(run, objects, plain)
        options = options if plain.reward else replace(options, reward=_of_outcomes(options.reward))
    if not options.model:
        raise ConfigError("name a MODEL, or several: policygrad eval tiny, policygrad eval runs/dapo-1 tiny")
    if twice := [model for model in options.model if options.model.count(model) > 1]:
        raise ConfigError(f"{twice[0]} is named twice: its samples would be the same ones")
    for folder in map(Path, options.model):
        if (folder / RUN).is_file() and not holds_model(folder / "model"):
            raise ConfigError(
                f"the run in {folder} has no model yet: finish it first, policygrad train --resume {folder}, or name the folder "
                f"that policygrad export {folder} makes of its last checkpoint"
            )
    return replace(options, task=options.task or "embedded")


def of_run(run: Draft) -> EvalOptions:
    """The options that measure as the run itself did before and after."""
    asked = run.evaluation if run.evaluation.problems else Draft().evaluation
    isolated = {name: getattr(run.rewards, name) for name in ("memory", "environment", "sandbox", "show_output")}
    return EvalOptions(
        **{name: getattr(run, name) for name in SAME},
        problems=asked.problems,
        samples=asked.samples,
        device=run.learner.device,
        dtype=run.learner.resolved().dtype,
        budget=run.rewards.budget,
        rewards=Isolation(**isolated),
    )


def _of_another_task(options: EvalOptions, plain: EvalOptions) -> EvalOptions:
    """What belongs to the run's own task is left out where another one is named. plain: what the flags alone say."""
    if not plain.task:
        return options
    return replace(options, held_out=plain.held_out, map=plain.map, skip_bad_rows=plain.skip_bad_rows)


def _of_outcomes(rewards: tuple[str, ...]) -> tuple[str, ...]:
    """A run's rewards without those of steps, which it was not measured by either."""
    return tuple(name for name in rewards if not resolve(name).process_reward)


def _check_named(run: Path, objects: tuple[str, ...], plain: EvalOptions) -> None:
    """Raises ConfigError for what only Python has and the flags do not name."""
    for name in objects:
        if not getattr(plain, name) and (name in ("task", "reward") or not plain.task):
            raise ConfigError(
                f"the {name.replace('_', ' ')} of the run in {run} was an object given in Python, which no file holds: name one, "
                f"--{name.replace('_', '-')}, or measure from Python, pg.evaluate"
            )


def _parse(default: EvalOptions, args: list[str]) -> EvalOptions:
    args = [word for word in args if word != FLAG] if default.trust_remote_code else args
    return tyro.cli(
        EvalOptions, args=args, default=default, prog="policygrad eval", description=paragraphs(*HELP), config=_CONFIG
    )


def _allowed(plain: EvalOptions, args: list[str]) -> Allowed:
    return Allowed((*plain.allow, *from_words(args)), plain.trust_remote_code)


def flags() -> list[str]:
    """Every flag of `policygrad eval`, for tab completion."""
    return printed_flags(lambda: _parse(EvalOptions(), ["--help"]))


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
