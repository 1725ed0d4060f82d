"""Rewards that are computed while answers are still drawn, against all of them at the end."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import policygrad as pg
from bench.timing import Table, cpu_seconds
from policygrad.models.loading import load_model
from policygrad.models.tokenizer import load_tokenizer
from policygrad.rewards.base import Reward
from policygrad.rewards.workers.pool import RewardPool
from policygrad.rollout.rollouter import Rollout, Rollouter
from policygrad.rollout.trajectory import RolloutConfig

TAKES = (0.0, 1.0, 5.0, 20.0)
"""Milliseconds."""


class Always(RewardPool):
    """Begins while answers are drawn, whether it pays or not."""

    def is_overlap_worthwhile(self, count: int) -> bool:
        return True


def slow(milliseconds: float, prompts: Any, completions: list[str], **_: Any) -> list[float]:
    """1 for an answer of even length, after a while."""
    time.sleep(milliseconds / 1000)
    return [float(len(completions[0]) % 2 == 0)]


def overlap(small: bool, repeats: int) -> Table:
    """Wall seconds of a rollout; both make the same."""
    model, task = load_model("tiny"), pg.load_task("embedded")
    tokenizer, prompts = load_tokenizer("tiny", model), 4 if small else 64
    rows = list[tuple[str | float, ...]]()
    for milliseconds in TAKES:
        reward = Reward("slow", partial(slow, milliseconds))
        with Always([reward]) as pool:
            rollouter = Rollouter(
                task.train_example, tokenizer, pg.LocalSampler.from_tokenizer(model, tokenizer), pool.score
            )
            made = dict[str, Rollout]()
            works = {
                "at the end": _collect(rollouter, prompts, made, "at the end"),
                "meanwhile": _collect(replace(rollouter, pool=pool), prompts, made, "meanwhile"),
            }
            took = cpu_seconds(works, repeats, time.perf_counter)
            at_the_end, meanwhile = made.values()
            if at_the_end.completions != meanwhile.completions or not at_the_end.batch.reward.equal(
                meanwhile.batch.reward
            ):
                raise AssertionError("the two rollouts differ")
            rule = "yes" if RewardPool.is_overlap_worthwhile(pool, prompts * 8) else "no"
        ratio = took["at the end"] / took["meanwhile"]
        rows.append((f"{milliseconds:g} ms", took["at the end"], took["meanwhile"], ratio, rule))
    note = (
        f"Wall seconds of a rollout of {prompts * 8} answers to the embedded task, with a reward that waits so long for each, in "
        "two workers; the answers and rewards are equal. The last column says whether a run would do it."
    )
    return Table(
        "Rewards beside sampling", note, ("reward", "at the end", "meanwhile", "ratio", "does it pay"), tuple(rows)
    )


def _collect(rollouter: Rollouter, prompts: int, made: dict[str, Rollout], name: str) -> Callable[[], None]:
    def work() -> None:
        made[name] = rollouter.collect(pg.DR_GRPO, RolloutConfig(pg.SamplingParams(), prompts, 8))

    return work
