"""`policygrad eval`: mean@k and the unbiased pass@k of a model on held-out problems."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from policygrad.commands.words import refuse_empty
from policygrad.errors import ConfigError, RewardError
from policygrad.models.lora import holds_model
from policygrad.rewards.config import Isolation
from policygrad.samplers.base import Sampling
from policygrad.samplers.config import SamplerConfig
from policygrad.training.config.checks import check_seed
from policygrad.training.config.run import optional

if TYPE_CHECKING:
    from policygrad.rollout.evaluation import EvaluationResult

FLAG = "trust_remote_code"
_CONFIG = (tyro.conf.FlagCreatePairsOff, tyro.conf.AvoidSubcommands)


@dataclass(frozen=True)
class EvalOptions:
    """Held-out accuracy of a model: mean@k and the unbiased pass@k."""

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """Directory or hub id; tiny = the base model inside the package; a run's folder = the model it trained."""
    trust_remote_code: bool = False
    """Let Python code in the model's folder or repository run; without it such a model is refused."""
    task: Annotated[str, tyro.conf.arg(metavar="NAME|FILE")] = "embedded"
    """Where problems come from: embedded, a reasoning-gym name (gcd+2*chain_sum:max_terms=3), or data.
    Data is a .jsonl, .jsonl.gz, .parquet or .arrow file, a folder of `datasets`, or hf:REPOSITORY[:CONFIG[:SPLIT]]."""
    map: Annotated[str | None, optional("FILE:NAME", "none")] = None
    """A function that is given each row of the data, a dict, and returns the row to use, or None to leave it out: mine.py:f."""
    skip_bad_rows: Annotated[bool, tyro.conf.arg(name="task.skip-bad-rows")] = False
    """Leave out rows that cannot be used, and say how many; without it the first is refused, with file and line."""
    reward: Annotated[tuple[str, ...], optional("NAME", "the task's own")] = ()
    """Reward functions by name or dotted path, each with an optional weight (format*0.5)."""
    held_out: Annotated[str | None, optional("FILE", "a sixteenth of the task")] = None
    """Data of held-out problems, for a task that is data."""
    problems: int = 256
    """How many held-out problems."""
    samples: int = 8
    """k, completions per problem."""
    threshold: float = 1.0
    """A completion with at least this score is correct, for pass@k."""
    sampling: Annotated[Sampling, tyro.conf.arg(name="")] = field(default_factory=Sampling)
    """The distribution completions are drawn from."""
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    """What draws them: this process, or an engine's servers."""
    seed: int = 0
    """Of the samples."""
    device: str = "auto"
    """cpu, cuda, cuda:1, …; auto = cuda where there is one."""
    dtype: str = "fp32"
    """fp32 or bf16."""
    budget: float = 10.0
    """Seconds per sample for a reward."""
    rewards: Isolation = field(default_factory=Isolation)
    """The reward workers."""
    show: int = 3
    """How many problems to print with a completion."""
    json: bool = False
    """Print one JSON object instead."""

    def __post_init__(self) -> None:
        for name in ("problems", "samples"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name} must be at least 1, not {getattr(self, name)}")
        if not 0 < self.budget < math.inf:
            raise ConfigError(f"--budget must be above 0 seconds and finite, not {self.budget}")
        check_seed(self.seed)
        if self.dtype not in ("fp32", "bf16"):
            raise ConfigError(f"--dtype must be fp32 or bf16, not {self.dtype!r}")


def evaluate(args: list[str]) -> int:
    """`policygrad eval MODEL --task …`."""
    refuse_empty(args, "--reward")
    options = tyro.cli(EvalOptions, args=args, prog="policygrad eval", config=_CONFIG)
    folder = Path(options.model)
    if (folder / "run.toml").is_file() and not holds_model(folder / "model"):
        raise ConfigError(f"the run in {folder} has no model yet: finish it first, policygrad train --resume {folder}")
    from policygrad.training.evaluation import evaluate as measure

    names = (
        "reward",
        "held_out",
        "problems",
        "samples",
        "sampling",
        "seed",
        "device",
        "dtype",
        "budget",
        FLAG,
        "map",
        "skip_bad_rows",
    )
    outcome = measure(
        options.model,
        options.task,
        **{name: getattr(options, name) for name in names},
        engine=options.sampler,
        memory=options.rewards.memory,
        sandbox=options.rewards.sandbox,
        reward_environment=options.rewards.environment,
        progress=_count,
        phase=_waits(),
    )
    if not outcome.scored:
        said = outcome.messages[0] if outcome.messages else "no reward function applies to any of them"
        raise RewardError(
            f"none of the {outcome.failed} completions has a reward, so there is nothing to report: {said}"
        )
    ks = [k for k in (1, 2, 4, 8, 16, 32, 64, 128, 256) if k < options.samples] + [options.samples]
    passes = {k: outcome.pass_at(k, options.threshold) for k in ks}
    if options.json:
        print(json.dumps(_row(options, outcome, passes), ensure_ascii=False))
    else:
        _print(options, outcome, passes)
    return 0


def _row(options: EvalOptions, outcome: EvaluationResult, passes: dict[int, float]) -> dict[str, Any]:
    return {
        "model": options.model,
        "task": options.task,
        "problems": len(outcome.scores),
        "samples": options.samples,
        "mean": outcome.mean,
        "stderr": outcome.standard_error(),
        "pass": {str(k): v for k, v in passes.items()},
        "failed": outcome.failed,
        "truncated": outcome.truncated,
        "tokens": outcome.tokens,
    }


def _print(options: EvalOptions, outcome: EvaluationResult, passes: dict[int, float]) -> None:
    from policygrad.trackers.words import number, one_line

    print(f"{options.model} on {options.task}: {len(outcome.scores)} problems × {options.samples} samples")
    print()
    error = f"± {outcome.standard_error():.4f} (standard error over problems)"
    print(f"  mean@{options.samples:<4} {outcome.mean:.4f} {error}")
    for k, value in passes.items():
        print(f"  pass@{k:<4} {value:.4f}")
    total = sum(len(row) for row in outcome.scores)
    cut, failed = outcome.truncated, outcome.failed
    print(f"  cut off by the budget {cut}, without a reward {failed}, of {total} completions")
    if options.show > 0:
        print()
    for texts, scores in list(zip(outcome.texts, outcome.scores, strict=True))[: max(0, options.show)]:
        print(f"  {number(scores[0]):>5}  {one_line(texts[0], 70)}")
    for message in outcome.messages:
        print(f"note: {message}", file=sys.stderr)


def _waits() -> Callable[[str, int, int], None]:
    """Says on standard error what rewards are waited for, once each."""
    said = {""}

    def tell(text: str, done: int, total: int) -> None:
        if text not in said:
            said.add(text)
            print(f"{text}: {done} of {total} answers so far", file=sys.stderr, flush=True)

    return tell


def _count(done: int, total: int) -> None:
    if sys.stderr.isatty():
        print(f"\r  {done}/{total} problems", end="\n" if done == total else "", file=sys.stderr, flush=True)
