"""In bfloat16 several processes learn as one does, as far as its 8 bits go."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

import policygrad as pg
from doubles.ranked import BATCH, learned, model, pair, started

COARSE = 0.05
"""Of an update, relative: a micro-batch's gradient is rounded to 8 bits, and micro-batches are others in several processes."""
SINGLE = replace(BATCH, reward=BATCH.reward.float())


def test_an_update_equals_one_process_up_to_rounding() -> None:
    """With AdamW's ε at 1 a step is about linear in the gradient."""
    with started(2) as ranks:
        for algorithm in (pg.DR_GRPO, pg.GRPO):  # the second reads a reference
            chosen = algorithm.with_max_tokens(6)
            local, ranked, _ = pair(ranks, chosen, make=partial(model, torch.bfloat16))
            before = {name: x.clone() for name, x in local.state()[0].items() if name.startswith("weights/")}
            for learner in (local, ranked):
                learned(learner, chosen, SINGLE)
            (expected, _), (result, _) = local.state(), ranked.state()
            moved = sum(float((expected[name] - x).square().sum()) for name, x in before.items())
            apart = sum(float((expected[name] - result[name]).square().sum()) for name in before)
            assert moved > 0
            assert apart <= COARSE**2 * moved, algorithm.name
            assert all(result[name].dtype == expected[name].dtype == torch.float32 for name in before)
