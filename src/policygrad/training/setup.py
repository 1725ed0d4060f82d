"""What a run or an evaluation stands on: task, model, tokenizer, rewards, sampler, each refused with the way out."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import nn

from policygrad.errors import RunError
from policygrad.models.loading import load_model
from policygrad.models.tokenizer import Tokenizer, load_tokenizer, padding_id
from policygrad.rewards import Reward, RewardPool, resolve
from policygrad.rewards.process_rewards import StepEnd
from policygrad.rollout.source import Source
from policygrad.samplers.base import Sampling
from policygrad.samplers.local import LocalSampler
from policygrad.tasks import load_task
from policygrad.tasks.types import Task
from policygrad.training.evaluate import Outcome, evaluate


@dataclass(frozen=True, eq=False)
class Ground:
    """Everything loaded."""

    task: Task
    rewards: tuple[str, ...]
    model: nn.Module
    tokenizer: Tokenizer
    source: Source
    sampler: LocalSampler


def prepare(
    stack: ExitStack,
    *,
    model: str,
    task: str,
    reward: tuple[str, ...],
    needs: frozenset[str] | None = None,
    step_end: str | None = None,
    held_out: str | None,
    seed: int,
    dtype: str,
    device: str,
    workers: int,
    budget: float,
    max_tokens: int,
) -> Ground:
    """Loads what the names say; the reward workers live as long as `stack`.

    needs: the Batch fields an algorithm reads, None = an evaluation; step_end: a pattern that ends a step.

    Raises:
        RunError, ModelError, ValueError: what does not exist or does not fit, with the way out.
    """
    questions = load_task(task, seed=seed, held_out=held_out)
    chosen = choose_rewards(questions, reward, needs, step_end)
    pool = stack.enter_context(RewardPool(chosen, workers=workers, budget=budget))  # its workers import meanwhile
    network = load_model(model, dtype=dtype, device=pick_device(device))
    tokenizer = load_tokenizer(model, network)
    for example in questions.rows:  # a prompt too long for the model is better found now than in a week
        tokenizer.encode(example.prompt, max_tokens, example.source or "a prompt")
    steps = pool.steps if any(reward.process_reward for reward in chosen) else None
    source = Source(questions.train, tokenizer, pool.score, seed, steps)
    names = tuple(_in_words(reward, needs) for reward in chosen)
    return Ground(
        questions, names, network, tokenizer, source, LocalSampler(network, tokenizer.end, padding_id(tokenizer))
    )


def pick_device(name: str) -> str:
    """auto: cuda where there is one.

    Raises:
        RunError: a device this machine does not have.
    """
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError) as error:
        raise RunError(f"learner.device {name!r} cannot be used here: {str(error).splitlines()[0]}") from error
    return name


def reward_names(task: Task, chosen: tuple[str, ...]) -> tuple[str, ...]:
    """The rewards asked for, or the task's own.

    Raises:
        RunError: a task without rewards of its own, and none chosen.
    """
    names = chosen or task.rewards
    if not names:
        raise RunError(
            f"task {task.name!r} has no reward of its own: choose one, e.g. --reward exact_match or --reward math"
        )
    return tuple(names)


def choose_rewards(
    task: Task, chosen: tuple[str, ...], needs: frozenset[str] | None, step_end: str | None
) -> tuple[Reward, ...]:
    """The rewards of the outcome, then those of the steps where there are any: asked for, by a pattern, or the task's own.

    Raises:
        RunError: nothing to score the outcome, or nothing to say where steps end for an algorithm that asks; and what would
            be ignored.
    """
    named = tuple(resolve(name) for name in chosen)
    steps = tuple(reward for reward in named if reward.process_reward)
    outcome = tuple(reward for reward in named if not reward.process_reward)
    if steps and needs is None:
        raise RunError(f"reward {steps[0].name!r} scores steps, and an evaluation is of outcomes: leave it away")
    if steps and step_end is not None:
        raise RunError(f"reward {steps[0].name!r} and step_end {step_end!r} both say where steps end: leave one away")
    if not outcome and steps and not task.rewards:
        raise RunError(
            f"reward {steps[0].name!r} scores steps, and task {task.name!r} has no reward of its own for the outcome: name "
            f"one too, e.g. --reward exact_match {steps[0].name}"
        )
    if step_end is not None:
        steps = (Reward("step_end", StepEnd(step_end), process_reward=True),)
    elif needs is not None and "step_end" in needs and not steps:
        steps = tuple(resolve(name) for name in task.steps)
        if not steps:
            raise RunError(_no_steps(task, needs))
    return (*(outcome or tuple(resolve(name) for name in reward_names(task, ()))), *steps)


def _no_steps(task: Task, needs: frozenset[str]) -> str:
    """The way out of a task without steps."""
    pattern = "" if "token_reward" in needs else "; or --step-end '\\n' to end one at every line"
    return (
        f"the algorithm looks at an answer's steps, and task {task.name!r} does not say where they end: take --task "
        "embedded_steps, or name a process reward, --reward exact_match mine.py:f with @reward(process=True)" + pattern
    )


def _in_words(reward: Reward, needs: frozenset[str] | None) -> str:
    """A reward for people, with what is read of it."""
    name = reward.name if reward.weight == 1 else f"{reward.name}*{reward.weight:g}"
    if not reward.process_reward:
        return name
    if isinstance(reward.function, StepEnd):
        return f"steps by {reward.function.pattern!r}"
    only_ends = needs is not None and "step_end" in needs and "token_reward" not in needs
    return f"{name} (only where steps end)" if only_ends else f"{name} (of steps)"


def measure_model(
    model: str,
    task: str = "embedded",
    *,
    reward: tuple[str, ...] = (),
    held_out: str | None = None,
    problems: int = 256,
    samples: int = 8,
    sampling: Sampling | None = None,
    seed: int = 0,
    device: str = "auto",
    dtype: str = "fp32",
    budget: float = 10.0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Outcome:
    """Scores of a model on a task's held-out problems."""
    sampling = sampling or Sampling()
    with ExitStack() as stack:
        ground = prepare(
            stack,
            model=model,
            task=task,
            reward=reward,
            held_out=held_out,
            seed=seed,
            dtype=dtype,
            device=device,
            workers=2,
            budget=budget,
            max_tokens=sampling.max_tokens,
        )
        return evaluate(ground.source, ground.sampler, ground.task.held_out(problems), samples, sampling, progress)
