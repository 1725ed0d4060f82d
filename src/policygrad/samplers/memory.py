"""What a model remembers of the rows that are being decoded, for any kind of cache: contexts are read, rows go on, rows leave."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from policygrad.samplers import cache

KEEP = 0.8
"""Rows that are over wait in a plain cache until fewer than this share of it goes on: dropping them copies the rest."""


class Memory(Protocol):
    """Rows stand in the order in which they came, but for `keep`."""

    model: nn.Module
    refills: bool
    """Whether more contexts can be read while rows go on."""
    rows: Tensor
    """[N] int64: where the rows stood among those of the last forward pass."""

    def read(self, contexts: Sequence[Tensor], repeats: Tensor, room: int) -> tuple[Tensor, int]:
        """Reads each context once: logits [N, V] after it, for `repeats[i]` new rows behind all others, of which each will draw at
        most `room` tokens; and the width that contexts were padded to, on the left."""
        ...

    def step(self, token: Tensor, position: Tensor) -> Tensor:
        """Logits [N, V] after one more token [N] of each row, at `position` [N] of its sequence."""
        ...

    def keep(self, rows: Tensor) -> Tensor:
        """Drops all but `rows` [n]; returns these in the order in which they now stand."""
        ...


class Plain:
    """The model's own kinds of layers, one row a completion, contexts left-padded."""

    refills = False

    def __init__(self, model: nn.Module, pad: int) -> None:
        self.model, self.pad = model, pad
        self.device = next(model.parameters()).device
        self.rows, self.cache, self.attention, self.used = torch.empty(0), dict[str, Any](), torch.empty(0), 0

    def read(self, contexts: Sequence[Tensor], repeats: Tensor, room: int) -> tuple[Tensor, int]:
        out, seen = prefill(self.model, contexts, self.pad)
        name, held = cache.cache_of(out, self.model)
        cache.expand(held, repeats, room)
        self.cache, self.used = {name: held}, seen.shape[1]
        ahead = seen.new_ones(len(seen), room)
        self.attention = torch.cat([seen, ahead], 1).repeat_interleave(repeats, 0)
        self.rows = torch.arange(len(self.attention), device=self.device)
        return out.logits[:, -1].repeat_interleave(repeats, 0), self.used

    def step(self, token: Tensor, position: Tensor) -> Tensor:
        for held in self.cache.values():
            cache.count(held, self.used)
        self.used += 1
        place = self.rows.new_zeros(2, len(self.attention))  # which waits reads any token, within the model's context
        place[:, self.rows] = torch.stack([token, position])
        out = self.model(
            input_ids=place[0, :, None],
            attention_mask=self.attention[:, : self.used] if "past_key_values" in self.cache else None,
            position_ids=place[1, :, None],
            **self.cache,
            use_cache=True,
            return_dict=True,
        )
        return out.logits[:, -1].index_select(0, self.rows)  # type: ignore[no-any-return]

    def keep(self, rows: Tensor) -> Tensor:
        self.rows = self.rows[rows]
        if not len(rows):
            self.cache = {}
        elif len(rows) < KEEP * len(self.attention):
            for held in self.cache.values():
                cache.select(held, self.rows)
            self.attention = self.attention[self.rows]
            self.rows = torch.arange(len(rows), device=self.device)
        return rows


def prefill(model: nn.Module, contexts: Sequence[Tensor], pad: int) -> tuple[Any, Tensor]:
    """(the model's output after each context, which of the tokens [C, L] it read are the context's own, as 1 and 0)."""
    width = max(map(len, contexts))
    ids = torch.full((len(contexts), width), pad)
    seen = torch.zeros(len(contexts), width, dtype=torch.int64)
    for i, tokens in enumerate(contexts):
        ids[i, width - len(tokens) :] = tokens
        seen[i, width - len(tokens) :] = 1
    device = next(model.parameters()).device
    ids, seen = ids.to(device), seen.to(device)
    out = model(
        input_ids=ids,
        attention_mask=seen,
        position_ids=(seen.cumsum(1) - 1).clamp(min=0),
        use_cache=True,
        logits_to_keep=1,
        return_dict=True,
        **cache.new_cache(model),
    )
    return out, seen
