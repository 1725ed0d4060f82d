"""Which rewards a run computes: of outcomes, and of reasoning steps."""

from __future__ import annotations

from typing import Any

from policygrad.errors import RunError
from policygrad.rewards.base import Reward
from policygrad.rewards.builtin import StepEnd
from policygrad.rewards.resolve import resolve_reward
from policygrad.tasks.base import Task


def choose_rewards(
    task: Task, names: tuple[Any, ...], needs: frozenset[str] | None, step_end: str | None
) -> tuple[Reward, ...]:
    """Return the rewards of the outcome, then those of reasoning steps: the requested ones, those of a pattern, or the task's own.

    Args:
        needs: Batch fields that the algorithm reads; None = an evaluation.
        step_end: Pattern that ends a reasoning step.

    Raises:
        RunError: Nothing scores the outcome, nothing marks the steps that the algorithm needs, or a reward would be ignored.
    """
    requested = tuple(resolve_reward(name) for name in names)
    steps = tuple(reward for reward in requested if reward.process_reward)
    outcome = tuple(reward for reward in requested if not reward.process_reward)
    if steps and needs is None:
        raise RunError(f"reward {steps[0].name!r} scores steps, and an evaluation scores outcomes: leave it out")
    if steps and step_end is not None:
        raise RunError(f"reward {steps[0].name!r} and step_end={step_end!r} both mark where steps end: leave one out")
    if steps and not outcome and not task.rewards:
        raise RunError(
            f"reward {steps[0].name!r} scores steps, and task {task.name!r} has no reward of its own for the outcome: name one "
            f"too, e.g. --reward exact_match {steps[0].name}"
        )
    if step_end is not None:
        steps = (Reward("step_end", StepEnd(step_end), process_reward=True),)
    elif needs is not None and "step_end" in needs and not steps:
        steps = tuple(resolve_reward(name) for name in task.steps)
        if not steps:
            pattern = "" if "token_reward" in needs else "; or --step-end '\\n' to end one at every line"
            raise RunError(
                f"the algorithm uses a completion's reasoning steps, and task {task.name!r} does not mark where they end: use "
                "--task embedded_steps, or name a process reward, --reward exact_match mine.py:f with "
                f"@reward(process=True){pattern}"
            )
    if not outcome:
        if not task.rewards:
            raise RunError(
                f"task {task.name!r} has no reward of its own: choose one, e.g. --reward exact_match or --reward math"
            )
        outcome = tuple(resolve_reward(name) for name in task.rewards)
    return (*outcome, *steps)


def describe_reward(reward: Reward, needs: frozenset[str] | None) -> str:
    """Return a reward's name, with what is read of it."""
    name = reward.name if reward.weight == 1 else f"{reward.name}*{reward.weight:g}"
    if not reward.process_reward:
        return name
    if isinstance(reward.function, StepEnd):
        return f"steps by {reward.function.pattern!r}"
    only_ends = needs is not None and "step_end" in needs and "token_reward" not in needs
    return f"{name} (only where steps end)" if only_ends else f"{name} (of steps)"
