"""What a run refuses of its options, alone and together, each with the way out."""

from __future__ import annotations

import math
import os
from dataclasses import fields
from typing import TYPE_CHECKING

from policygrad.core.algorithm import Algorithm
from policygrad.core.roles import not_frozen
from policygrad.core.run_checks import check_rollout, check_sampling
from policygrad.core.trust_region import TrustRegion
from policygrad.errors import ConfigError
from policygrad.learners.config import OptimizerConfig
from policygrad.learners.fsdp.supported import check_ranks
from policygrad.rewards.process_rewards import check_pattern
from policygrad.samplers.config import LOCAL
from policygrad.trackers.services import check_services

if TYPE_CHECKING:
    from policygrad.training.config.run import Run

LARGEST_LR = 1e6
"""Beyond what any optimiser here makes of a gradient; float32 overflows above 3e38, which no message of torch explains."""
MOST_ANSWERS = 2**24
"""Of one rollout or measurement: hundreds of times what anybody draws, and what a machine's memory still lists."""
EVALUATED = {"logp_old", "logp_ref", "entropy", "values", "bootstrap", "score_norm", "implicit_reward"}
"""Batch fields that a learner fills."""


def check_timeout(seconds: float) -> None:
    """Raises ConfigError for what is no limit of an environment's calls."""
    if not 0 < seconds < math.inf:
        raise ConfigError(
            f"environment.timeout must be above 0 seconds and finite, not {seconds:g}; a long limit is 86400, a day"
        )


def check(run: Run) -> None:
    """Raises ConfigError for the first thing that is wrong."""
    _types(run)
    for name in ("steps", "prompts_per_step"):
        if getattr(run, name) < 1:
            raise ConfigError(f"{name} must be at least 1, not {getattr(run, name)}")
    if run.decontaminate < 0:
        raise ConfigError(
            f"task.decontaminate is a number of words, at least 0 (0 = equal prompts only), not {run.decontaminate}"
        )
    if run.tokens is not None and run.tokens < 1:
        raise ConfigError(f"tokens must be at least 1, or left out for no budget, not {run.tokens}")
    check_timeout(run.environment_timeout)
    _staleness(run)
    if run.learner.routing_replay and run.sampler.engine != LOCAL:
        raise ConfigError(
            f"learner.routing_replay replays the experts that sampled, which {run.sampler.engine} does not tell: set it to "
            "false, or take --sampler.engine local"
        )
    check_ranks(run.learner, run.algorithm)
    check_lr(run.lr)
    check_seed(run.seed)
    check_folders(run.output, run.directory)
    check_services(run.track)
    check_sampling(run.algorithm, run.group_size, run.sampling.temperature)
    check_rollout(run.algorithm)
    if run.group_size < 1:
        raise ConfigError(f"samples_per_prompt must be at least 1, not {run.group_size}")
    check_answers("prompts_per_step", run.prompts_per_step, "samples_per_prompt", run.group_size)
    check_answers("evaluation.problems", run.evaluation.problems, "evaluation.samples", run.evaluation.samples)
    if run.sampling.temperature == 0:
        raise ConfigError(
            "temperature 0 leaves nothing to learn from, all samples are equal: set --temperature above 0"
        )
    if run.sampling.cuts_off:
        raise ConfigError(
            "training with top_p < 1 or top_k > 0 would sample from another distribution than the one that learns: the "
            "ratio of an unchanged policy would not be 1. Leave top_p = 1 and top_k = 0 (eval takes both)"
        )
    if run.learner.score_parameters and "score_norm" not in run.algorithm.needs:
        raise ConfigError(
            f"learner.score_parameters is {run.learner.score_parameters!r}, and no part of {run.algorithm.name} reads score "
            "norms: put OptimalBaseline(norm='exact') into psi, or leave it empty"
        )
    _rate(run)
    _steps(run)
    _stall(run)
    if run.few_prompts and "minibatches" not in {f.name for f in fields(run.algorithm.step)}:  # type: ignore[arg-type]
        raise ConfigError(
            f"{run.algorithm.step.minibatches} minibatches of whole groups need as many prompts per step, not "
            f"{run.prompts_per_step}"
        )


def check_lr(lr: float | None) -> None:
    """Raises ConfigError for what is no learning rate; one beyond `LARGEST_LR` only overflows in the optimiser."""
    if lr is None:
        return
    if not 0 <= lr < math.inf:
        raise ConfigError(f"lr must be at least 0 and finite, not {lr}")
    if lr > LARGEST_LR:
        raise ConfigError(f"lr must be at most {LARGEST_LR:g}, not {lr:g}")


def check_answers(prompts: str, count: int, samples: str, each: int) -> None:
    """Raises ConfigError for more completions at once than `MOST_ANSWERS`; the options' names are given."""
    if count * each > MOST_ANSWERS:
        raise ConfigError(
            f"{prompts} {count} times {samples} {each} must be at most {MOST_ANSWERS:,} completions: lower one of them"
        )


def check_folders(output: str | None, directory: str | None = None) -> None:
    """Raises ConfigError for an output that is empty, as of a variable that was not set: it would be the current folder. And for
    what no file system takes as a name."""
    if output is not None and not str(output).strip():
        raise ConfigError(
            f"output must name a folder, not {output!r}: leave it out for the next free one, or say . for this one"
        )
    for option, name in (("output", output), ("directory", directory)):
        if name is not None and not _is_name(str(name)):
            raise ConfigError(f"{option} must name a folder, not {name!r}, which no file system takes")


def _is_name(text: str) -> bool:
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeError:  # half a surrogate pair
        return False


def check_seed(seed: int) -> None:
    """Raises ConfigError for a seed that torch or a counter-based generator does not take."""
    if not 0 <= seed < 2**63:
        raise ConfigError(f"seed must be at least 0 and below 2**63, not {seed}")


def _staleness(run: Run) -> None:
    """A rollout drawn during an update cannot ask the weights that are being updated."""
    if run.staleness < 0:
        raise ConfigError(f"staleness must be at least 0, not {run.staleness}")
    asked = run.algorithm.filter_needs & EVALUATED
    if run.staleness and asked:
        raise ConfigError(
            f"a filter of {run.algorithm.name} reads {min(asked)}, for which the learner is asked in the midst of a rollout, and "
            f"with staleness {run.staleness} it is updating then: set staleness to 0, or drop the filter"
        )


def _stall(run: Run) -> None:
    """A reference that waits for held-out scores which nobody takes."""
    reference, measured = run.algorithm.reference, run.evaluation.every and run.evaluation.problems
    if reference is not None and reference.stall and not measured:
        raise ConfigError(
            f"Reference.stall = {reference.stall} counts periodic held-out evaluations without improvement, and this run "
            "makes none: set evaluation.every (and evaluation.problems) above 0, or stall to 0"
        )


def _rate(run: Run) -> None:
    """Options of a gradient step, where the algorithm's takes none."""
    step, critic = run.algorithm.step, run.algorithm.critic
    if step.uses_lr:
        return
    if run.guard.action == "rollback":
        raise ConfigError(
            f"guard.action rollback lowers the learning rate, and {type(step).__name__} has none: take skip, stop or warn"
        )
    way_out = (
        "algorithm.step.delta, in nats a token, sets how far it goes"
        if isinstance(step, TrustRegion)
        else "it has none"
    )
    if run.lr is not None:
        own = "; the critic's own rate is algorithm.critic.lr" if critic is not None else ""
        raise ConfigError(
            f"lr is {run.lr:g}, and {type(step).__name__} has no learning rate: {way_out}{own}. Leave lr out (--lr None)"
        )
    if critic is None and run.optimizer != OptimizerConfig():
        raise ConfigError(
            f"optimizer.* shapes AdamW's steps, {type(step).__name__} takes none and there is no critic: {way_out}. "
            "Leave the optimizer's options out"
        )


def _steps(run: Run) -> None:
    """`step_end` says where steps end, not what they are worth."""
    if run.step_end is None:
        return
    check_pattern(run.step_end)
    name, read = run.algorithm.name, run.algorithm.declared
    if "step_end" not in read:
        raise ConfigError(f"step_end is {run.step_end!r}, and no part of {name} looks at steps: leave it away")
    if "token_reward" in read:
        raise ConfigError(
            f"step_end {run.step_end!r} says where steps end, and {name} needs to know what they are worth: name a process "
            "reward instead, --reward exact_match mine.py:f with @reward(process=True)"
        )


def _types(run: Run) -> None:
    """From Python it is easy to give a name where an object or several names belong."""
    if not isinstance(run.algorithm, Algorithm):
        way_out = f"pg.algorithm({run.algorithm!r})" if isinstance(run.algorithm, str) else "pg.GRPO"
        raise ConfigError(f"algorithm must be an Algorithm, such as {way_out}, not {run.algorithm!r}")
    for place, part in run.algorithm.parts():
        if problem := not_frozen(type(part), place):
            raise ConfigError(problem)
    if isinstance(run.reward, str):
        raise ConfigError(f"reward must be a tuple of names, reward=({run.reward!r},), not the text {run.reward!r}")
