"""What is to happen in the course of a run, and cannot before its end."""

from __future__ import annotations

from collections.abc import Iterator

from policygrad.learners.config import LearnerConfig
from policygrad.training.config.run import Run


def idle(run: Run) -> tuple[str, ...]:
    """For people: each schedule of the algorithm, and the watch over processes, that never acts in this run, with the way out.

    A token budget may end a run earlier still; when is not known before.
    """
    return (*_reference(run), *_critic(run), *_watch(run))


def _reference(run: Run) -> Iterator[str]:
    """What is taken anew after the last step is never compared with."""
    reference, steps, evaluated = run.algorithm.reference, run.steps, run.evaluation.every
    if reference is None:
        return
    if reference.every is not None and reference.every >= steps:
        less = f", or --algorithm.reference.every at {max(1, steps // 4)}, say" if steps > 1 else ""
        yield (
            f"Reference.every = {reference.every} never acts in this run of {_steps(steps)}: π_ref stays the initial policy. Set "
            f"--steps above {reference.every}{less}"
        )
    first = evaluated * ((reference.stall or 0) + 1) + 1  # the best score, `stall` that do not exceed it, and a rollout
    if reference.stall is not None and first >= steps:
        less = ", or a smaller --evaluation.every" if evaluated > 1 else ""
        yield (
            f"Reference.stall = {reference.stall} never acts in this run of {_steps(steps)}: with an evaluation every "
            f"{_steps(evaluated)} π_ref is taken anew after step {first} at the earliest. Set --steps above {first}{less}"
        )


def _critic(run: Run) -> Iterator[str]:
    critic = run.algorithm.critic
    if critic is not None and critic.pretrain >= run.steps:
        yield (
            f"Critic.pretrain = {critic.pretrain} may take the whole of this run of {_steps(run.steps)}: until the values explain "
            f"{critic.explained:.0%} of the returns' variance the policy stands still. Set --steps above {critic.pretrain}, or a "
            "smaller --algorithm.critic.pretrain"
        )


def _watch(run: Run) -> Iterator[str]:
    if run.learner.ranks == 1 and run.learner.patience != LearnerConfig().patience:
        yield "learner.patience is for several processes, and one process learns: leave it out, or set --learner.ranks"


def _steps(n: int) -> str:
    return f"{n} step{'s' * (n > 1)}"
