"""Completions of up to 140 tokens after prompts of up to 150, and models of every family, for learners that read them in passes of
a few dozen tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import transformers as tf

import policygrad as pg
from doubles.architectures import families
from policygrad.models.loading import load_model

FAMILIES = {f.type: f for f in families() if f.learning in ("tree", "cache") and not f.refused and f.type != "xglm"}
"""Of XGLM, transformers' own attention fails in float64."""


def built(kind: str) -> Any:
    torch.manual_seed(0)
    config = FAMILIES[kind].config()
    config.max_position_embeddings = 256
    config._experts_implementation = "eager"  # the grouped product has no float64
    return load_model(tf.AutoModelForCausalLM.from_config(config).double().eval())


def make_batch() -> pg.Batch:
    """A group after a long prompt, of which two begin alike and two are equal; one after a short one; a very long completion."""
    g = torch.Generator().manual_seed(2)
    lengths = torch.tensor([9, 30, 9, 2, 17, 30, 140, 12])
    mask, tokens = torch.arange(140) < lengths[:, None], torch.randint(3, 40, (8, 140), generator=g)
    tokens[2], tokens[4, :8] = tokens[0], tokens[1, :8]
    mask[6, 20:50] = False  # an answer of a tool
    return pg.Batch(
        mask=mask,
        group=torch.tensor([0, 0, 0, 0, 0, 1, 2, 2]),
        reward=torch.tensor([1.0, 0.0, 1.0, 0.0, 0.5, 1.0, 1.0, 0.0]),
        tokens=tokens,
        prompts=tuple(torch.randint(3, 40, (n,), generator=g) for n in (150, 11, 5)),
    )


def make_branching_batch() -> pg.Batch:
    """The same batch, two completions of which go on from their middle, or from the middle of their prompt, up to three times."""
    batch = make_batch()
    assert batch.prompts is not None
    positions = torch.arange(140) + torch.tensor([len(batch.prompts[g]) for g in batch.group.tolist()])[:, None]
    for row, first, depth in ((1, 10, 80), (6, 60, 10), (6, 100, 30), (7, 4, 3)):
        positions[row, first:] += depth - positions[row, first].item()
    return replace(batch, positions=positions)
