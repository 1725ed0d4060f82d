"""Attention over a tree of texts that share prefixes, so that each shared token is computed once.

A model reads the tree's N tokens as one row: embeddings, projections and head see each token once. Attention gathers the keys of a
text along its path and uses its own tokens as queries; texts of equal shape are one call of the model's original attention. A token
attends to exactly what it would attend to if its text stood alone, in the same order, so log-probabilities do not change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

ATTENTION_NAME = "policygrad"  # name of this attention in transformers' registry
_MAX_SCORES = 2**24  # attention scores in a call whose texts are padded to a common length
_SMALL_CALL = 2**15  # scores below which padding costs less than another call
_MAX_PADDING = 1.25  # padded scores per needed score that a larger call may have
Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class AttentionBlock:
    """Texts that attend in one call."""

    queries: Tensor  # [s, q] nodes, padded with the last one
    keys: Tensor  # [s, k] nodes, likewise
    mask: Tensor | None  # [s, 1, q, k] True = visible; None = causal, with queries and keys the same nodes


@dataclass(frozen=True, eq=False)
class AttentionTree:
    """Which nodes attend to which, among N."""

    blocks: tuple[AttentionBlock, ...]
    output_index: Tensor  # [N] index of each node's output in the concatenated outputs of the blocks

    def map(self, function: Callable[[Tensor], Tensor]) -> AttentionTree:
        """Return the tree with every tensor replaced."""
        blocks = (
            AttentionBlock(function(b.queries), function(b.keys), None if b.mask is None else function(b.mask))
            for b in self.blocks
        )
        return AttentionTree(tuple(blocks), function(self.output_index))

    @classmethod
    def of(cls, paths: Ints, lengths: Ints, shared: Ints) -> AttentionTree:
        """Make the tree of S texts.

        Args:
            paths: [S, L] node of every token, padded with the last one.
            lengths: [S] tokens of each text.
            shared: [S] how many of them, from the first, belong to an earlier text; never all.
        """
        output_index = np.zeros(int((lengths - shared).sum()), dtype=np.int64)
        blocks, offset = list[AttentionBlock](), 0
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
    """Return which texts query their new tokens alone, with a mask; the others query all of their tokens again, without."""
    return (new_tokens < lengths) & (new_tokens * lengths <= _MAX_SCORES)


def _group_blocks(lengths: Ints, new_tokens: Ints) -> Iterator[Ints]:
    """Group texts of similar shape, most queries first."""
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
    """Apply transformers' scaled-dot-product attention, along a tree's paths if one is given. `query`: [1, heads, N,
    width], or without a tree [B, heads, L, width]; likewise key and value."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward as sdpa

    if tree is None:
        return sdpa(module, query, key, value, attention_mask, **options)
    outputs = []
    for b in tree.blocks:
        q, k, v = _gather_nodes(query, b.queries), _gather_nodes(key, b.keys), _gather_nodes(value, b.keys)
        outputs.append(sdpa(module, q, k, v, b.mask, **options)[0].flatten(0, 1))
    merged = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    heads, width = merged.shape[1:]
    return merged.flatten(1).index_select(0, tree.output_index).view(1, -1, heads, width), None


def _gather_nodes(x: Tensor, nodes: Tensor) -> Tensor:
    """Return [s, heads, l, width] of x [1, heads, N, width] at nodes [s, l].

    The backward pass of `index_select` adds in a fixed order, that of indexing in the threads' order.
    """
    _, heads, _, width = x.shape
    rows = x[0].transpose(0, 1).flatten(1).index_select(0, nodes.flatten())
    return rows.view(*nodes.shape, heads, width).transpose(1, 2)


def enable_tree_attention(model: Any) -> bool:
    """Make the model's attention follow trees.

    Returns False, and changes nothing, unless the model uses transformers' scaled-dot-product attention by its common interface.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    config = getattr(model, "config", None)
    if getattr(config, "_attn_implementation", None) == ATTENTION_NAME:
        return True
    can_set = getattr(model, "_can_set_attn_implementation", None)  # before setting, which warns if it is not possible
    if getattr(config, "_attn_implementation", None) != "sdpa" or can_set is None or not can_set():
        return False
    AttentionInterface.register(ATTENTION_NAME, tree_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)
    model.set_attn_implementation(ATTENTION_NAME)
    return bool(model.config._attn_implementation == ATTENTION_NAME)


def disable_tree_attention(model: Any) -> None:
    """Restore the model's own attention."""
    if getattr(getattr(model, "config", None), "_attn_implementation", None) == ATTENTION_NAME:
        model.set_attn_implementation("sdpa")
