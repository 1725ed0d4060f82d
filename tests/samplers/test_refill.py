"""Prompts are read while other rows are active, on every kind of layer: completions stay those of each prompt alone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
import transformers as tf

from doubles.architectures import families
from policygrad.models.loading import load_model
from policygrad.samplers.base import Generation, Request, SamplingParams
from policygrad.samplers.local.sampler import LocalSampler

RECURRENT = {f.type: f for f in families() if f.sampling != "once" and not f.refused and "sparse" not in f.layers}
"""Not those whose indexer chooses by scores that tie."""
FAST = (
    "qwen3_5",
    "lfm2",
    "falcon_h1",
    "mamba2",
)  # delta rules, convolutions, Mamba beside attention, no attention at all
WAITING = (
    "deepseek_v4",
    "gemma2",
    "llama4",
    "minimax",
)  # compressed keys, windows with a cap, chunks, states of its own


def requests_of_uneven_lengths() -> list[Request]:
    """Groups of two after prompts of 2 to 19 tokens, with 3 to 7 tokens to sample; but one, of the shortest prompt, with 40."""
    g, requests = torch.Generator().manual_seed(5), list[Request]()
    for group, length in enumerate((2, 3, 19, 4, 11, 7)):
        prompt = torch.randint(3, 40, (length,), generator=g)
        for row in range(2):
            most = 40 if (group, row) == (0, 0) else int(torch.randint(3, 8, (1,), generator=g))
            requests.append(Request(prompt, (group, row), SamplingParams(max_tokens=40, decode_rows=4), most))
    return requests


def drawn(model: Any, requests: list[Request]) -> list[Generation]:
    return asyncio.run(LocalSampler(model, frozenset(), 0).generate(requests))


@pytest.mark.parametrize("kind", [pytest.param(k, marks=() if k in FAST else pytest.mark.full) for k in RECURRENT])
def test_completions_do_not_depend_on_rows_that_were_read_earlier(kind: str) -> None:
    torch.manual_seed(0)
    model = load_model(tf.AutoModelForCausalLM.from_config(RECURRENT[kind].config()).eval())
    widths = list[tuple[int, ...]]()
    model.get_input_embeddings().register_forward_hook(lambda module, args, out: widths.append(tuple(args[0].shape)))
    requests = requests_of_uneven_lengths()
    together = drawn(model, requests)
    steps = sum(1 for shape in widths if shape[-1] == 1)
    for request, result in zip(requests, together, strict=True):
        (alone,) = drawn(model, [request])
        assert torch.equal(result.tokens, alone.tokens)
        torch.testing.assert_close(result.logp, alone.logp, rtol=1e-4, atol=1e-4)
    if kind not in WAITING:
        assert steps < 50  # all others while the longest is sampled, not in three waves; and a few of the checks before
