"""What a step's note says where sampler and learner differ: padding, where shorter prompts alone are affected."""

from __future__ import annotations

import torch

import policygrad as pg
from policygrad.training.step_log import explain_mismatch


def compared(gaps: list[float], lengths: list[int]) -> pg.Batch:
    logp = torch.zeros(len(gaps), 2)
    return pg.Batch(
        mask=torch.ones(len(gaps), 2, dtype=torch.bool),
        group=torch.arange(len(gaps)),
        reward=torch.zeros(len(gaps)),
        tokens=torch.zeros(len(gaps), 2, dtype=torch.int64),
        prompts=tuple(torch.ones(n, dtype=torch.int64) for n in lengths),
        logp_sampler=logp,
        logp_old=logp + torch.tensor(gaps)[:, None],
    )


def test_differences_after_shorter_prompts_alone_are_padding() -> None:
    assert "after shorter prompts alone, which are padded" in explain_mismatch(compared([0.0, 2.0], [9, 4]), 1.0)


def test_differences_after_the_longest_prompts_too_are_rounding_or_other_weights() -> None:
    for gaps, lengths in (([2.0, 2.0], [9, 4]), ([2.0, 0.0], [9, 4]), ([2.0, 2.0], [4, 4])):
        text = explain_mismatch(compared(gaps, lengths), 1.0)
        assert "--learner.dtype fp32; in fp32 it is no rounding" in text
