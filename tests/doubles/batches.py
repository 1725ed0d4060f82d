"""Ragged rollouts of random tokens, and their log-probabilities by the definition."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

import policygrad as pg

VOCABULARY = 40


def make_batch(seed: int, groups: int = 3, size: int = 4, width: int = 6, *, holes: bool = True) -> pg.Batch:
    """Ragged completions with tool tokens in their midst, equal completions, an empty one, prompts of several lengths."""
    g = torch.Generator().manual_seed(seed)
    rows = groups * size
    lengths = torch.randint(1, width + 1, (rows,), generator=g)
    mask = torch.arange(width) < lengths[:, None]
    tokens = torch.randint(VOCABULARY, (rows, width), generator=g)
    reward = torch.randint(0, 2, (rows,), generator=g).double()
    for row in range(0, rows - 1, size):  # each group's first two are the same
        mask[row + 1], tokens[row + 1], reward[row + 1] = mask[row], tokens[row], reward[row]
    if holes:
        mask = mask & ((torch.rand(rows, width, generator=g) > 0.2) | (torch.arange(rows) % size < 2)[:, None])
    mask[-1] = False
    prompts = tuple(
        torch.randint(VOCABULARY, (int(n),), generator=g) for n in torch.randint(1, 7, (groups,), generator=g)
    )
    return pg.Batch(
        mask=mask, group=torch.arange(groups).repeat_interleave(size), reward=reward, tokens=tokens, prompts=prompts
    )


def with_reference_prompts(batch: pg.Batch, seed: int = 0) -> pg.Batch:
    """A prompt of its own for most completions, equal for a group's first two, and none for every fifth."""
    g, prompts = torch.Generator().manual_seed(seed), list[Tensor]()
    assert batch.prompts is not None
    has_reference = torch.arange(len(batch.mask)) % 5 != 4
    for row, group in enumerate(batch.group.tolist()):
        own = torch.randint(VOCABULARY, (int(torch.randint(1, 4, (), generator=g)),), generator=g)
        given = batch.prompts[group]
        same = row > 0 and group == int(batch.group[row - 1]) and bool(has_reference[row - 1]) and row % 4 == 1
        prompts.append(prompts[-1] if same else torch.cat([own, given]) if has_reference[row] else given)
    return replace(batch, reference_prompts=tuple(prompts), has_reference=has_reference)


def as_read(batch: pg.Batch) -> pg.Batch:
    """The same completions after those prompts."""
    rows = torch.arange(len(batch.mask))
    return replace(batch, group=rows, prompts=batch.reference_prompts, reference_prompts=())


def branching(batch: pg.Batch, seed: int = 0) -> pg.Batch:
    """The same tokens, of texts that fall back now and then, also into their prompt; equal completions fall back alike."""
    g = torch.Generator().manual_seed(seed)
    assert batch.tokens is not None
    assert batch.prompts is not None
    depth = torch.zeros_like(batch.tokens)
    for row, group in enumerate(batch.group.tolist()):
        at = len(batch.prompts[group])
        for t in range(depth.shape[1]):
            if t and float(torch.rand((), generator=g)) < 0.35:
                at = int(torch.randint(1, at + 1, (), generator=g))
            depth[row, t], at = at, at + 1
        same = row > 0 and torch.equal(batch.tokens[row], batch.tokens[row - 1])
        depth[row] = depth[row - 1] if same and group == int(batch.group[row - 1]) else depth[row]
    return replace(batch, positions=depth)


def written(batch: pg.Batch, row: int) -> Iterator[tuple[int, int, Tensor]]:
    """(first, end, ids) of each text that a completion is: which of its tokens it ends with, and all of it."""
    assert batch.tokens is not None
    assert batch.prompts is not None
    ids, tokens = batch.prompts[int(batch.group[row])], batch.tokens[row]
    depth = len(ids) + torch.arange(len(tokens)) if batch.positions is None else batch.positions[row]
    starts = [0, *(t for t in range(1, len(tokens)) if int(depth[t]) != int(depth[t - 1]) + 1)]
    for first, end in zip(starts, [*starts[1:], len(tokens)], strict=True):
        ids = torch.cat([ids[: int(depth[first])], tokens[first:end]])
        yield first, end, ids


def naive_logp(model: nn.Module, batch: pg.Batch, temperature: float) -> Tensor:
    """One completion at a time, with nothing shared: the definition."""
    assert batch.tokens is not None
    every = _distributions(model, batch, temperature)
    return torch.stack([x.gather(-1, t[:, None]).squeeze(1) for x, t in zip(every, batch.tokens, strict=True)])


def naive_entropy(model: nn.Module, batch: pg.Batch, temperature: float) -> Tensor:
    """The same of the entropy before each token."""
    return torch.stack([-(x.exp() * x).sum(-1) for x in _distributions(model, batch, temperature)])


def _distributions(model: nn.Module, batch: pg.Batch, temperature: float) -> Iterator[Tensor]:
    """[T, V] log-probabilities of each completion."""
    for i in range(len(batch.mask)):
        texts = list(written(batch, i))
        logits = [model(input_ids=ids[None]).logits[0, len(ids) - (end - first) - 1 : -1] for first, end, ids in texts]
        yield (torch.cat(logits) / temperature).log_softmax(-1)


def float_batch(seed: int = 0) -> pg.Batch:
    batch = make_batch(seed, holes=False)
    return replace(batch, reward=batch.reward.float())
