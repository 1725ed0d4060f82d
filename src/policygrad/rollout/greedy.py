"""The greedy completion of each prompt: what the policy does best, as a baseline for what it draws."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from policygrad.core.batch import Batch
from policygrad.core.metrics import Mean, Metrics, Sum, merge
from policygrad.rollout.judging import Judged
from policygrad.rollout.trajectory import GREEDY, Group, Start


def with_baseline(
    batch: Batch, groups: Sequence[Group], greedy: Callable[[list[Start]], tuple[list[Group], Judged]]
) -> tuple[Batch, Judged]:
    """(the batch with `baseline`, what it cost and what went wrong): one greedy episode for each prompt that takes part (ReMax).

    It is judged as the others are, stands in no batch, and its tokens are counted. NaN where its reward failed: nothing is
    learnt from that prompt. `greedy` makes one episode of each start.
    """
    baseline = torch.full_like(batch.reward, torch.nan)
    taking = [g for g in range(len(groups)) if bool(batch.mask[batch.group == g].any())]
    if not taking:  # a reward is not asked about nothing
        return replace(batch, baseline=baseline), Judged()
    found, judged = greedy([_start(groups[g].start) for g in taking])
    known = []
    for g, group in zip(taking, found, strict=True):
        reward = group.trajectories[0].reward
        if reward is not None:
            known.append(reward)
            baseline[batch.group == g] = reward
    tokens, failed = sum(group.trajectories[0].sampled for group in found), len(taking) - len(known)
    metrics: Metrics = {name: Sum(float(tokens)) for name in ("tokens/greedy", "tokens/sampled")}
    if known:
        metrics |= {"reward/greedy": Mean(sum(known), float(len(known)))}
    failures = {name: metric for name, metric in judged.metrics.items() if name.startswith("rewards/failed_")}
    note = "a greedy completion has no reward; nothing is learnt from its prompt"
    return replace(batch, baseline=baseline), Judged(
        merge(metrics, failures), (*judged.messages, *((note,) if failed else ()))
    )


def _start(start: Start) -> Start:
    """The same, from random numbers of its own: in an environment it may be the world that draws."""
    seed, _, step, index = start.key
    return replace(start, key=(seed, GREEDY, step, index))
