"""Runs on a table of logits, in which some prompts are always solved."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

import policygrad as pg
from doubles.tabular_learner import TabularLearner
from doubles.tabular_sampler import TabularSampler, TabularTokenizer
from policygrad.checkpoint.manifest import decode_json, encode_json
from policygrad.rewards.base import RewardScores
from policygrad.rollout import serialization
from policygrad.rollout.rollouter import Rollouter
from policygrad.tasks.base import Example
from policygrad.training.loop import Progress, StepOutcome, StepResult, run_loop

PROMPTS = 8  # 0 and 1 are always solved in `sampler`


def solved(prompts: Sequence[str], texts: Sequence[str], columns: Mapping[str, Sequence[Any]]) -> RewardScores:
    """1 when the first token is 1."""
    return RewardScores([float(text.split()[:1] == ["1"]) for text in texts], {})


def sampler(flat: int = 2) -> TabularSampler:
    made = TabularSampler(PROMPTS, 3, 4)
    made.table[:flat, 0, 1] = 50.0
    return made


def rollouter(of: TabularSampler) -> Rollouter:
    return Rollouter(lambda i: Example(str(i % PROMPTS)), TabularTokenizer(), of, solved)  # type: ignore[arg-type]


class Seen:
    """A watcher that keeps every step and stops after `steps`; what outlives a step goes through a checkpoint's text and back."""

    def __init__(self, steps: int) -> None:
        self.steps, self.done = steps, list[StepResult]()
        self.progress: Progress | None = None

    def on_step(self, result: StepResult) -> StepOutcome:
        self.done.append(result)
        return StepOutcome()

    def should_continue(self, progress: Progress) -> bool:
        self.progress = progress
        return progress.step < self.steps


def run(algorithm: pg.Algorithm, steps: int, pieces: bool = False) -> list[StepResult]:
    """Steps on a table; in pieces, what is carried is written and read between any two."""
    settings = pg.Run(
        algorithm=algorithm, prompts_per_step=PROMPTS, samples_per_prompt=16, sampling=pg.SamplingParams(max_tokens=3)
    )
    player, learner, done = rollouter(sampler()), TabularLearner(PROMPTS, 3, 4, lr=20.0), list[StepResult]()
    with torch.no_grad():
        learner.table.copy_(sampler().table)
    player.update_weights(learner.publish())
    progress = Progress(algorithm.init_state(), position=2)
    for _ in range(steps if pieces else 1):
        watcher = Seen(progress.step + 1 if pieces else steps)
        progress = run_loop(settings, player, learner, progress, watcher)
        done += watcher.done
        if pieces:
            tensors, values = serialization.pack_rollouts(progress.leftover_groups, progress.queued_rollouts)
            values = decode_json(json.loads(json.dumps(encode_json(values, "leftover_groups"))))
            groups, ahead = serialization.unpack_rollouts(tensors, values, player.examples)
            progress = replace(progress, leftover_groups=groups, queued_rollouts=ahead)
    return done
