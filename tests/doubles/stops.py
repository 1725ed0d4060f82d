"""Runs that are sent a signal in a phase that a test chooses, by what is handed to them."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import Any

from torch import nn

from doubles.trackers import Record
from policygrad.learners.local.learner import LocalLearner
from policygrad.models.tokenizer import Tokenizer, pad_token_id
from policygrad.samplers.base import Generation, Request
from policygrad.samplers.local.sampler import LocalSampler
from policygrad.training.base_trainer import Callback
from policygrad.training.config.run import Run
from policygrad.training.trainer import make_local_learner


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


class AtPhase(Record):
    """Sends a signal the first time a phase of this name makes progress."""

    def __init__(self, phase: str, number: signal.Signals) -> None:
        super().__init__()
        self.wanted, self.number, self.sent = phase, number, False

    def phase(self, text: str, done: int = 0, total: int = 0) -> None:
        if text == self.wanted and done and not self.sent:
            self.sent = True
            send(self.number)


class AtUpdate(Callback):
    """Sends a signal in the midst of a step of the optimiser, of fine-tuning or of a reward model."""

    def __init__(self, at: int, number: signal.Signals) -> None:
        self.at, self.number = at, number

    def step(self, trainer: Any, step: int, metrics: Any) -> None:
        if step == self.at - 1:
            optimizer = trainer.learner.optimizer

            def sends() -> Any:
                del optimizer.step  # the class's own is back
                send(self.number)
                return optimizer.step()

            optimizer.step = sends


class AtDecoding(LocalSampler):
    """Sends a signal at its `at`-th call's second forward pass, and counts what passes there are after it."""

    def __init__(self, model: nn.Module, tokenizer: Tokenizer, at: int, number: signal.Signals) -> None:
        super().__init__(model, tokenizer.end_ids, pad_token_id(tokenizer))
        self.left, self.number, self.passes = at, number, 0
        self.over = False

    async def generate(self, requests: Sequence[Request]) -> list[Generation]:
        self.left -= 1
        hook = self.model.register_forward_hook(self._seen)
        try:
            return await super().generate(requests)
        finally:
            hook.remove()

    def _seen(self, *args: Any) -> None:
        if self.left == 0:
            self.passes += 1
            if self.passes == 2:
                send(self.number)


def learner_that_sends(model: nn.Module, run: Run, where: str, at: int, number: signal.Signals) -> LocalLearner:
    """Sends a signal at the `at`-th call of the learner's `update` or `state`."""
    learner = make_local_learner(model, run)
    inner, left = getattr(learner, where), [at]

    def call(*args: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            send(number)
        return inner(*args)

    setattr(learner, where, call)
    return learner
