"""Turns of a conversation read only what is new, prompts that begin alike read their beginning once, and all are otherwise as if
everything had been read."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from policygrad.models.loading import load_model
from policygrad.samplers.base import Generation, Request, SamplingParams
from policygrad.samplers.local import shared_prefix, text_cache
from policygrad.samplers.local.sampler import LocalSampler
from policygrad.weight_sync.base import PublishedWeights

SAMPLING = SamplingParams(max_tokens=12, decode_rows=5)


@contextmanager
def counted(model: nn.Module) -> Iterator[list[int]]:
    """Tokens that the model reads, forward pass by forward pass."""
    seen: list[int] = []
    embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
    handle = embedding.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].numel()))
    try:
        yield seen
    finally:
        handle.remove()


def converse(sampler: LocalSampler, turns: int, *, continues: bool = True) -> list[list[Generation]]:
    """Eight conversations from two prompts: some say little, some a lot, some are over before the others."""
    generator = torch.Generator().manual_seed(0)
    opening = [torch.randint(3, 40, (n,), generator=generator) for n in (40, 57)]
    contexts, result = {i: opening[i // 4] for i in range(8)}, list[list[Generation]]()
    for turn in range(turns):
        requests = [Request(c, (turn, i), SAMPLING, 3 + (i + turn) % 10, continues) for i, c in contexts.items()]
        drawn = asyncio.run(sampler.generate(requests))
        result.append(drawn)
        answers = {i: torch.randint(3, 40, (4 + i,), generator=generator) for i in range(8)}
        contexts = {
            i: torch.cat([c, x.tokens, answers[i]])
            for (i, c), x in zip(contexts.items(), drawn, strict=True)
            if (i, turn) not in {(3, 0), (6, 2)}
        }
    return result


def tokens(result: list[list[Generation]]) -> list[Tensor]:
    return [x.tokens for turn in result for x in turn]


@pytest.mark.parametrize("ahead", [False, True])
def test_turns_are_the_same_and_read_what_is_new(random_model: Path, ahead: bool) -> None:
    model, results, read = load_model(str(random_model)), [], []
    for continues in (False, True):
        sampler = LocalSampler(model, frozenset({7}), 0)
        sampler.decodes_ahead = ahead
        converse(sampler, 1)  # the tests of the model
        asyncio.run(sampler.update(PublishedWeights(1, {})))
        with counted(model) as seen:
            results.append(converse(sampler, 5, continues=continues))
        read.append(sum(seen))
    for whole, continued in zip(*results, strict=True):
        for a, b in zip(whole, continued, strict=True):
            assert torch.equal(a.tokens, b.tokens)
            assert torch.allclose(a.logp, b.logp, atol=1e-4)
    assert read[1] < 0.6 * read[0]


def test_nothing_is_kept_of_other_weights(random_model: Path) -> None:
    """Neither after an update nor where somebody has changed the model in place and told nobody."""
    for told in (True, False):
        model: Any = load_model(str(random_model))
        sampler = LocalSampler(model, frozenset({7}), 0)
        (first,) = converse(sampler, 1)
        assert sampler._texts is not None
        assert len(sampler._texts) > 0
        with torch.no_grad():
            model.model.layers[0].mlp.down_proj.weight.mul_(1.5)
        if told:
            asyncio.run(sampler.update(PublishedWeights(1, {})))
        prompt = torch.cat([torch.randint(3, 40, (40,), generator=torch.Generator().manual_seed(0)), first[0].tokens])
        request = Request(torch.cat([prompt, torch.tensor([5, 6])]), (1, 0), SAMPLING, 12)
        (after,) = asyncio.run(sampler.generate([request]))
        (fresh,) = asyncio.run(LocalSampler(model, frozenset({7}), 0).generate([request]))
        assert torch.equal(after.tokens, fresh.tokens)
        assert torch.equal(after.logp, fresh.logp)


def test_only_texts_that_may_be_continued_are_kept_as_far_as_memory_allows(
    random_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = LocalSampler(load_model(str(random_model)), frozenset({7}), 0)
    converse(sampler, 2, continues=False)
    assert sampler._texts is None
    expected = tokens(converse(sampler, 3))
    assert sampler._texts is not None
    assert len(sampler._texts) == 8
    asyncio.run(sampler.update(PublishedWeights(1, {})))
    monkeypatch.setattr(text_cache, "MAX_BYTES_CPU", 60_000)
    result = tokens(converse(sampler, 3))
    assert isinstance(sampler._texts, text_cache.TextCache)
    assert 0 < len(sampler._texts) < 8
    assert sampler._texts.size <= 60_000
    sampler.clear_texts()
    assert sampler._texts is None
    assert all(torch.equal(a, b) for a, b in zip(expected, result, strict=True))


def test_a_model_that_cannot_continue_what_is_kept_reads_everything(
    random_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test on a few made-up tokens fails: what a cache returns is not what it was given."""
    model = load_model(str(random_model))
    expected = tokens(converse(LocalSampler(model, frozenset({7}), 0), 3))
    keep = shared_prefix.SharedPrefixCache.copy_text

    def wrong(cache: Any, row: int, count: int, start: int = 0) -> list[tuple[Tensor, Tensor]]:
        return [(keys * 1.1, values) for keys, values in keep(cache, row, count, start)]

    monkeypatch.setattr(shared_prefix.SharedPrefixCache, "copy_text", wrong)
    sampler = LocalSampler(model, frozenset({7}), 0)
    result = tokens(converse(sampler, 3))
    assert sampler._texts is None
    assert all(torch.equal(a, b) for a, b in zip(expected, result, strict=True))
