"""Runs in which something goes wrong at a moment that a test chooses, given to the trainer as any sampler or learner is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from policygrad.learners.local.learner import LocalLearner
from policygrad.models.tokenizer import Tokenizer, pad_token_id
from policygrad.samplers.base import Generation, Request
from policygrad.samplers.local.sampler import LocalSampler
from policygrad.training.config.run import Run
from policygrad.training.trainer import make_local_learner


class FailingSampler(LocalSampler):
    """Its `at`-th call raises."""

    def __init__(self, model: nn.Module, tokenizer: Tokenizer, at: int, error: BaseException) -> None:
        super().__init__(model, tokenizer.end_ids, pad_token_id(tokenizer))
        self.left, self.error = at, error

    async def generate(self, requests: Sequence[Request]) -> list[Generation]:
        self.left -= 1
        if self.left == 0:
            raise self.error
        return await super().generate(requests)


def learner_with_a_bad_gradient(model: nn.Module, run: Run, at: int) -> LocalLearner:
    """Its `at`-th update finds a gradient of NaN."""
    learner = make_local_learner(model, run)
    step, left = learner.optimizer.step, [at]

    def bad(*arguments: Any) -> tuple[float | None, float]:
        left[0] -= 1
        if left[0] == 0:
            master = next(iter(learner.optimizer.masters.values()))
            master.grad = torch.full_like(master, float("nan"))
        return step(*arguments)

    learner.optimizer.step = bad  # type: ignore[method-assign]
    return learner


def learner_cut_short(model: nn.Module, run: Run, at: int) -> LocalLearner:
    """Its `at`-th update is cut short in its midst."""
    learner = make_local_learner(model, run)
    step, left = learner.optimizer.rules[0].step, [at]

    def broken() -> None:
        left[0] -= 1
        if left[0] == 0:
            raise RuntimeError("out of memory")
        step()

    learner.optimizer.rules[0].step = broken  # type: ignore[method-assign, assignment]
    return learner


def learner_with_a_spike(model: nn.Module, run: Run, at: int) -> LocalLearner:
    """Its `at`-th update has a gradient ten thousand times too large."""
    learner = make_local_learner(model, run)
    step, left = learner.optimizer.step, [at]

    def spiking(*arguments: Any) -> tuple[float | None, float]:
        left[0] -= 1
        if left[0] == 0:
            for master in learner.optimizer.masters.values():
                if master.grad is not None:
                    master.grad.mul_(1e4)
        return step(*arguments)

    learner.optimizer.step = spiking  # type: ignore[method-assign]
    return learner
