"""Attention along the branches of a tree: texts that begin alike share every token of their common beginning.

A model reads the tree's N tokens as one row, so that embeddings, projections and the head see each token once. Only attention
has to know which tokens came before: the keys of a text are gathered along its path, the queries are its own tokens alone,
and equally shaped texts are one call of the attention that the model had before. What a token attends to is what it would
attend to were its text alone, in the same order, so that every log-probability stays as it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

ATTENTION_NAME = "policygrad"
"""Of this attention among those of transformers."""
_MAX_SCORES = 2**24
"""Scores of one call in which texts are padded to each other's length, in elements."""
_SMALL_CALL = 2**15
"""Below so many scores padding costs less than another call."""
_MAX_PADDING = 1.25
"""Padded scores per needed one that are borne in a larger call."""
Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class AttentionBlock:
    """Texts that attend in one call."""

    queries: Tensor
    """[s, q] nodes; the last is repeated where a text has fewer."""
    keys: Tensor
    """[s, k] nodes, likewise."""
    mask: Tensor | None
    """[s, 1, q, k] what is seen; None = causal, with queries and keys the same nodes."""


@dataclass(frozen=True, eq=False)
class AttentionTree:
    """Who attends to whom among N nodes."""

    blocks: tuple[AttentionBlock, ...]
    output_index: Tensor
    """[N] where each node's answer stands in the blocks' answers, one after another."""

    def to(self, device: torch.device | str) -> AttentionTree:
        blocks = (
            AttentionBlock(b.queries.to(device), b.keys.to(device), None if b.mask is None else b.mask.to(device))
            for b in self.blocks
        )
        return AttentionTree(tuple(blocks), self.output_index.to(device))

    @classmethod
    def of(cls, paths: Ints, lengths: Ints, shared: Ints) -> AttentionTree:
        """paths [S, L]: the node of every token of S texts of `lengths` tokens, the last repeated behind them; of each the first
        `shared` belong to a text before it. No text is all shared."""
        output_index, blocks, offset = (
            np.zeros(int((lengths - shared).sum()), dtype=np.int64),
            list[AttentionBlock](),
            0,
        )
        for rows in _group_blocks(lengths, lengths - shared):
            skip = np.where(_needs_mask(lengths[rows], lengths[rows] - shared[rows]), shared[rows], 0)
            q, k = int((lengths[rows] - skip).max()), int(lengths[rows].max())
            depth = skip[:, None] + np.arange(q)
            is_new = (depth >= shared[rows, None]) & (depth < lengths[rows, None])
            depth = np.minimum(depth, lengths[rows, None] - 1)
            queries = np.take_along_axis(paths[rows], depth, 1)
            output_index[queries[is_new]] = offset + np.flatnonzero(is_new)
            offset += queries.size
            mask = torch.from_numpy(np.arange(k) <= depth[:, :, None])[:, None] if skip.any() else None
            blocks.append(AttentionBlock(torch.from_numpy(queries), torch.from_numpy(paths[rows, :k].copy()), mask))
        return cls(tuple(blocks), torch.from_numpy(output_index))


def _needs_mask(lengths: Ints, new_tokens: Ints) -> NDArray[np.bool_]:
    """Where a text's queries are its own tokens alone, which takes a mask; otherwise all of its tokens, again, and none."""
    return (new_tokens < lengths) & (new_tokens * lengths <= _MAX_SCORES)


def _group_blocks(lengths: Ints, new_tokens: Ints) -> Iterator[Ints]:
    """Texts of about equal shape together, most queries first."""
    masked = _needs_mask(lengths, new_tokens)
    queries = np.where(masked, new_tokens, lengths)
    order = np.lexsort((-lengths, -queries, masked))
    start, needed, longest = 0, 0, 0
    for i, row in enumerate(order):
        first = order[start]
        area = int(queries[row] * lengths[row])
        padded = (i - start + 1) * int(queries[first]) * max(longest, int(lengths[row]))
        wasteful = padded > _SMALL_CALL and padded > _MAX_PADDING * (needed + area)
        if i > start and (masked[row] != masked[first] or wasteful or padded > _MAX_SCORES):
            yield order[start:i]
            start, needed, longest = i, 0, 0
        needed, longest = needed + area, max(longest, int(lengths[row]))
    yield order[start:]


def tree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    tree: AttentionTree | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' scaled-dot-product attention, along a tree's branches where one is given. query, key and value: [1, heads, N,
    width], or without a tree [B, heads, L, width]."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward as plain

    if tree is None:
        return plain(module, query, key, value, attention_mask, **options)
    outputs = [
        plain(
            module,
            _gather_nodes(query, b.queries),
            _gather_nodes(key, b.keys),
            _gather_nodes(value, b.keys),
            b.mask,
            **options,
        )[0].flatten(0, 1)
        for b in tree.blocks
    ]
    merged = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    heads, width = merged.shape[1:]
    return merged.flatten(1).index_select(0, tree.output_index).view(1, -1, heads, width), None


def _gather_nodes(x: Tensor, nodes: Tensor) -> Tensor:
    """[s, heads, l, width] of x [1, heads, N, width] at nodes [s, l]. The way back of `index_select` adds in one order, that of
    indexing in the threads'."""
    _, heads, _, width = x.shape
    rows = x[0].transpose(0, 1).flatten(1).index_select(0, nodes.flatten())
    return rows.view(*nodes.shape, heads, width).transpose(1, 2)


def enable_tree_attention(model: Any) -> bool:
    """Lets the model's attention follow trees; False, and nothing is changed, where it is not transformers' scaled-dot-product
    attention behind its common interface."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    config = getattr(model, "config", None)
    if getattr(config, "_attn_implementation", None) == ATTENTION_NAME:
        return True
    settable = getattr(
        model, "_can_set_attn_implementation", None
    )  # asked first, since the setter warns where it is not
    if getattr(config, "_attn_implementation", None) != "sdpa" or settable is None or not settable():
        return False
    AttentionInterface.register(ATTENTION_NAME, tree_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)
    model.set_attn_implementation(ATTENTION_NAME)
    return bool(model.config._attn_implementation == ATTENTION_NAME)


def disable_tree_attention(model: Any) -> None:
    """Takes `enable_tree_attention` back."""
    if getattr(getattr(model, "config", None), "_attn_implementation", None) == ATTENTION_NAME:
        model.set_attn_implementation("sdpa")
