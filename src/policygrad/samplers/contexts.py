"""Contexts that are read once and kept once, whatever number of completions goes on from each; and whether a model allows it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer

from policygrad.errors import ModelError
from policygrad.samplers import cache
from policygrad.samplers.memory import KEEP, Plain, prefill
from policygrad.samplers.shared import Layout, SharedLayer, UnsupportedError

_AHEAD = 32
"""Columns that what rows may see is written down for at a time, a multiple of those that layers compute with (`shared`)."""

_FAR = 0.2
"""Of the difference between two texts, and of the spread of logits: an error beyond both is no rounding."""


class Shared:
    """One copy of each context for all its rows; for models all of whose layers keep all keys, and whose attention is sdpa."""

    refills = True

    def __init__(self, model: nn.Module, pad: int) -> None:
        self.model, self.pad = model, pad
        self.device = next(model.parameters()).device
        self.rows = torch.empty(0, dtype=torch.int64, device=self.device)
        self.cache: Any = None
        self.layers: list[SharedLayer] = []
        self.owner, self.start = self.rows, self.rows  # of each row: its context, and its first own column
        self.seen = torch.empty(0, 0, dtype=torch.int64, device=self.device)  # [C, L], 1 where a context has a token
        self.layout = Layout(None, 0, 0, torch.empty(0), 0)

    def read(self, contexts: Sequence[Tensor], repeats: Tensor, room: int) -> tuple[Tensor, int]:
        out, seen = prefill(self.model, contexts, self.pad)
        _, held = cache.cache_of(out, self.model)
        if any(type(layer) is not DynamicLayer for layer in held.layers):
            raise UnsupportedError("layers that do not keep all keys, or not keys")
        gap = (seen == 0)[:, None, :, None]
        pairs = [[x.masked_fill(gap, 0) for x in (layer.keys, layer.values)] for layer in held.layers]
        before, new = len(self.owner), int(repeats.sum())
        if before == 0:
            self.layout.used, self.cache = 0, held
            self.layers = [SharedLayer(k, v, new, self.layout) for k, v in pairs]
            held.layers = list(self.layers)
            self.seen = seen
        else:
            for layer, (k, v) in zip(self.layers, pairs, strict=True):
                layer.join(k, v, slice(before, before + new))
            width = max(self.seen.shape[1], seen.shape[1])
            both = [nn.functional.pad(x, (width - x.shape[1], 0)) for x in (self.seen, seen)]
            self.seen = torch.cat(both)
        ids = torch.arange(len(repeats), device=self.device) + len(self.seen) - len(seen)
        self.owner = torch.cat([self.owner, ids.repeat_interleave(repeats)])
        self.start = torch.cat([self.start, self.start.new_full((new,), self.layout.used)])
        self._arrange()
        return out.logits[:, -1].repeat_interleave(repeats, 0), seen.shape[1]

    def step(self, token: Tensor, position: Tensor) -> Tensor:
        column = self.layout.length + self.layout.used
        if column == self.layout.hidden.shape[-1]:
            more = self.layout.hidden.new_full((len(self.rows), 1, 1, _AHEAD), -torch.inf)
            self.layout.hidden = torch.cat([self.layout.hidden, more], -1)
        self.layout.hidden[..., column] = 0
        out = self.model(
            input_ids=token[:, None],
            attention_mask=torch.ones(len(token), 1, 1, 1, dtype=torch.bool, device=self.device),
            position_ids=position[:, None],
            past_key_values=self.cache,
            use_cache=True,
            return_dict=True,
        )
        self.layout.used += 1
        return out.logits[:, -1]  # type: ignore[no-any-return]

    def keep(self, rows: Tensor) -> Tensor:
        """The last rows take the places of those that leave, so that no others are copied."""
        n = len(rows)
        stays = torch.zeros(len(self.owner), dtype=torch.bool, device=self.device)
        stays[rows] = True
        target = (~stays[:n]).nonzero().squeeze(1)
        order = torch.arange(n, device=self.device)
        if len(target):
            source = stays[n:].nonzero().squeeze(1) + n
            for layer in self.layers:
                layer.move(target, source)
            order[target] = source
        self.owner, self.start = self.owner[order], self.start[order]
        kept, owner = torch.unique(self.owner, return_inverse=True)
        if len(kept) < KEEP * len(self.seen):
            self.seen, self.owner = self.seen[kept], owner
            for layer in self.layers:
                layer.keep_contexts(kept)
        if n and (unseen := int(self.start.min())) > self.layout.used // 4:
            for layer in self.layers:
                layer.shift(unseen)
            self.layout.used -= unseen
            self.start = self.start - unseen
        if n:
            self._arrange()
        return order

    def _arrange(self) -> None:
        """The layout of the rows as they are now."""
        rows, contexts, width = len(self.owner), len(self.seen), self.seen.shape[1]
        self.rows = torch.arange(rows, device=self.device)
        counts = self.owner.bincount(minlength=contexts)
        most = int(counts.max())
        order = self.owner.argsort(stable=True)
        nth = self.rows - (counts.cumsum(0) - counts)[self.owner[order]]
        place = torch.empty_like(self.rows)
        place[order] = self.owner[order] * most + nth
        full = rows == contexts * most and bool((place == self.rows).all())
        columns = torch.arange((self.layout.used // _AHEAD + 1) * _AHEAD, device=self.device)
        own = (columns < self.start[:, None]) | (columns >= self.layout.used)
        blind = torch.cat([self.seen[self.owner] == 0, own], 1)[:, None, None]
        dtype = torch.promote_types(self.layers[0].dtype, torch.float32)
        self.layout.hidden = torch.zeros(blind.shape, dtype=dtype, device=self.device).masked_fill_(blind, -torch.inf)
        self.layout.place, self.layout.contexts, self.layout.most = None if full else place, contexts, most
        self.layout.length = width


@torch.no_grad()
def allows_sharing(model: nn.Module, pad: int) -> bool:
    """Tries it on a few made-up tokens: contexts of two lengths, rows that leave, a context that comes later.

    What counts is whether the logits are those of whole sequences, measured against how much a sequence matters to this model.
    """
    shared = Shared(model, pad)
    tokens = torch.arange(18, device=shared.device).view(3, 6) * 5 % 7 + 1
    contexts = [tokens[0, :5], tokens[1, :3], tokens[2, :4]]

    def whole(*ids: Tensor) -> Tensor:
        return torch.stack([model(input_ids=row[None], use_cache=False, return_dict=True).logits[0, -1] for row in ids])

    follow = [torch.cat([contexts[i], tokens[j, :2]]) for i, j in ((0, 1), (0, 2), (1, 0))]
    truth = whole(follow[2], follow[1], torch.cat([contexts[2], tokens[0, :1]])).float()
    effect = float((truth[0] - truth[1]).abs().max())
    try:
        shared.read(contexts[:2], torch.tensor([2, 1], device=shared.device), 4)
        shared.step(tokens[[1, 2, 0], 0], torch.tensor([5, 5, 3], device=shared.device))
        order = shared.keep(torch.tensor([1, 2], device=shared.device))
        if order.tolist() != [2, 1]:
            return False
        shared.read(contexts[2:], torch.tensor([1], device=shared.device), 4)
        position = torch.tensor([4, 6, 4], device=shared.device)
        got = shared.step(torch.stack([tokens[0, 1], tokens[2, 1], tokens[0, 0]]), position).float()
    except Exception:  # whatever an architecture says to a call it does not take: the plain memory remains
        return False
    half = next(model.parameters()).dtype in (torch.bfloat16, torch.float16)
    return float((got - truth).abs().max()) <= (0.05 if half else 1e-4) * effect


@torch.no_grad()
def check_decodes(model: nn.Module, pad: int) -> None:
    """Tries the plain memory on a few made-up tokens: contexts of two lengths, two rows of one of them, a row that leaves.

    Raises:
        ModelError: an architecture whose cache cannot be repeated and reordered row by row, or continues other texts.
    """
    plain = Plain(model, pad)
    tokens = torch.arange(12, device=plain.device).view(2, 6) * 5 % 7 + 1
    contexts, new = [tokens[0, :5], tokens[1, :3]], torch.arange(1, 4, device=plain.device)
    texts = [torch.cat([contexts[0], new[1:2], new[:1]]), torch.cat([contexts[1], new[2:], new[1:2]])]
    truth = torch.stack([model(input_ids=x[None], use_cache=False, return_dict=True).logits[0, -1] for x in texts])
    try:
        plain.read(contexts, torch.tensor([2, 1], device=plain.device), 4)
        plain.step(new, torch.tensor([5, 5, 3], device=plain.device))
        plain.keep(torch.tensor([1, 2], device=plain.device))
        got = plain.step(new[:2], torch.tensor([6, 4], device=plain.device))
    except ModelError:
        raise
    except (AttributeError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
        raise ModelError(_cannot_decode(model, why)) from error
    effect, gap = float((truth[0] - truth[1]).abs().max()), float((got - truth).abs().max())
    if gap > _FAR * effect and gap > _FAR * float(truth.std()):
        raise ModelError(
            _cannot_decode(model, f"logits differ by up to {gap:.2g} from those of the same text in one pass")
        )


def _cannot_decode(model: nn.Module, why: str) -> str:
    return (
        f"{type(model).__name__} cannot decode several completions at once from its cache ({why}): sample with an engine that "
        "has this architecture (--sampler.engine vllm), or choose another model"
    )
