"""What a run or an evaluation stands on: task, model, tokenizer, rewards, sampler, each refused with the way out."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import nn

from policygrad.rewards import RewardPool
from policygrad.rollout.local import LocalSampler
from policygrad.rollout.model import Codec, load_codec, load_model, padding_id
from policygrad.rollout.source import Source
from policygrad.rollout.types import Sampling
from policygrad.tasks import load_task
from policygrad.tasks.types import Task
from policygrad.training.evaluate import Outcome, evaluate


class RunError(RuntimeError):
    """A run that cannot start or go on, with the way out."""


@dataclass(frozen=True, eq=False)
class Ground:
    """Everything loaded."""

    task: Task
    rewards: tuple[str, ...]
    model: nn.Module
    codec: Codec
    source: Source
    sampler: LocalSampler


def prepare(
    stack: ExitStack,
    *,
    model: str,
    task: str,
    reward: tuple[str, ...],
    held_out: str | None,
    seed: int,
    dtype: str,
    device: str,
    workers: int,
    budget: float,
    max_tokens: int,
) -> Ground:
    """Loads what the names say; the reward workers live as long as `stack`.

    Raises:
        RunError, ModelError, ValueError: what does not exist or does not fit, with the way out.
    """
    questions = load_task(task, seed=seed, held_out=held_out)
    names = reward_names(questions, reward)
    pool = stack.enter_context(RewardPool(names, workers=workers, budget=budget))  # its workers import meanwhile
    network = load_model(model, dtype=dtype, device=pick_device(device))
    codec = load_codec(model, network)
    for example in questions.rows:  # a prompt too long for the model is better found now than in a week
        codec.encode(example.prompt, max_tokens, example.source or "a prompt")
    source = Source(questions.train, codec, pool.score, seed)
    return Ground(questions, names, network, codec, source, LocalSampler(network, codec.end, padding_id(codec)))


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
