"""Attention over a tree of texts that share prefixes, so that each shared token is computed once.

A model reads the tree's N tokens as one row: embeddings, projections and head see each token once. Attention gathers the keys of a
text along its path and uses its own tokens as queries; texts of equal shape are one call of the model's original attention. A token
attends to exactly what it would attend to if its text stood alone, in the same order, so log-probabilities do not change.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from policygrad.errors import ConfigError
from policygrad.models.attention import (
    FUSED_NAMES,
    SINKS_NAME,
    attend,
    depends_on_attention_name,
    register_attention,
    restore_fused_attention,
    set_attention,
)
from policygrad.models.replica import PlainAttention
from policygrad.utils.out_of_memory import is_out_of_memory

ATTENTION_NAME = "policygrad"  # name of this attention in transformers' registry
_MAX_SCORES = 2**24  # attention scores in a call whose texts are padded to a common length
_SMALL_CALL = 2**15  # scores below which padding costs less than another call
_PART_SCORES = 2**20  # the same where some of a text's tokens attend alone: smaller parts hide less behind their masks
_LEAST_PART = 128  # queries of a text in one call, where a window is shorter
_MAX_PADDING = 1.25  # padded scores per needed score that a larger call may have
FLEX_BLOCK = 128  # queries and keys of a block of FlexAttention's mask
FLEX_DEVICES = ("cuda",)
FLEX_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FLEX_SCORES = 2**22
"""Scores under a mask from which on FlexAttention is used."""
Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class AttentionBlock:
    """Parts of texts that attend in one call."""

    queries: Tensor  # [s, q] nodes, padded with the last one
    keys: Tensor  # [s, k] nodes, likewise
    mask: Tensor | None  # [s, 1, q, k] True = visible; None = causal, with queries and keys the same nodes


@dataclass(frozen=True, eq=False)
class AttentionTree:
    """Which nodes attend to which, among N nodes of S texts. What a kernel reads is made when it is first needed."""

    paths: Ints  # [S, L] node of every token, padded with the last one
    lengths: Ints  # [S] tokens of each text
    shared: Ints  # [S] how many of them, from the first, belong to an earlier text; never all
    convert: Callable[[Tensor], Tensor] = lambda x: x  # moves what is made to the device
    attend: Callable[..., Tensor | None] | None = None
    """Attends to what the texts follow too, or to nodes that other processes have: takes the arguments of an attention function and
    this tree; returns [1, H, N, width], or None where there is nothing more. None = there never is."""
    queries: Ints | None = None
    """[n] the nodes that attend here, ascending, to keys of all; None = all of them."""

    def map(self, function: Callable[[Tensor], Tensor]) -> AttentionTree:
        """Return the tree with every tensor replaced."""
        convert = self.convert
        return replace(self, convert=lambda x: function(convert(x)))

    @property
    def masked_scores(self) -> int:
        """Number of scores that scaled-dot-product attention computes with a mask."""
        if self.queries is not None:
            _, starts, ends, _ = self._divide_queries(None).T
            return int(((ends - starts) * ends)[starts > 0].sum())
        return int(((self.lengths - self.shared) * self.lengths)[self.shared > 0].sum())

    def blocks(self, window: int | None = None) -> tuple[tuple[AttentionBlock, ...], Tensor]:
        """Return the texts in parts of similar shape, for one call of scaled-dot-product attention each, and [N] the index of the
        output of each node that attends in their concatenated outputs.

        Args:
            window: A token sees itself and the `window` − 1 tokens before it; None = all before it.
        """
        window = self._find_effective_window(window)
        if window not in self._blocks:
            self._blocks[window] = self._make_blocks(window)
        return self._blocks[window]

    def flex_mask(self, window: int | None = None) -> Any:
        """Return the `BlockMask` of FlexAttention: a node is visible from itself on to the end of its subtree, as nodes are in the
        order of a depth-first search, and within the window."""
        window = self._find_effective_window(window)
        if window not in self._flex_masks:
            self._flex_masks[window] = self._make_flex_mask(window)
        return self._flex_masks[window]

    def _find_effective_window(self, window: int | None) -> int | None:
        return None if window is None or window >= self.lengths.max() else window

    # By window; all layers of a kind share one.

    @cached_property
    def _blocks(self) -> dict[int | None, tuple[tuple[AttentionBlock, ...], Tensor]]:
        return {}

    @cached_property
    def _flex_masks(self) -> dict[int | None, Any]:
        return {}

    def _make_blocks(self, window: int | None) -> tuple[tuple[AttentionBlock, ...], Tensor]:
        own = self.queries
        parts = self._divide_texts(window) if own is None else self._divide_queries(window)
        output_index = np.zeros(int((self.lengths - self.shared).sum()) if own is None else len(own), dtype=np.int64)
        blocks, offset = list[AttentionBlock](), 0
        for chosen in _group_parts(parts, _MAX_SCORES if own is None else _PART_SCORES):
            rows, starts, ends, first_keys = parts[chosen].T
            shared, last = self.shared[rows, None], ends[:, None] - 1
            depth = starts[:, None] + np.arange((ends - starts).max())
            is_new = (depth >= shared) & (depth <= last)
            depth = np.minimum(depth, last)
            queries = np.take_along_axis(self.paths[rows], depth, 1)
            queries = queries if own is None else np.searchsorted(own, queries)
            output_index[queries[is_new]] = offset + np.flatnonzero(is_new)
            offset += queries.size
            key_depth = first_keys[:, None] + np.arange((ends - first_keys).max())
            keys = np.take_along_axis(self.paths[rows], np.minimum(key_depth, last), 1)
            mask: Tensor | None = None
            if starts.any() or (window is not None and ends.max() > window):
                visible = key_depth[:, None] <= depth[:, :, None]
                if window is not None:
                    visible &= key_depth[:, None] > depth[:, :, None] - window
                mask = self.convert(torch.from_numpy(visible)[:, None])
            blocks.append(
                AttentionBlock(self.convert(torch.from_numpy(queries)), self.convert(torch.from_numpy(keys)), mask)
            )
        return tuple(blocks), self.convert(torch.from_numpy(output_index))

    def _divide_texts(self, window: int | None) -> Ints:
        """Return [n, 4] parts of texts: the text, its first query and their end, and its first key, all but the text as depths.

        Texts of which a mask would save little query all of their tokens again without one. Those longer than a window need a mask,
        and are cut so that few keys outside of the windows are read.
        """
        rows, shared = np.arange(len(self.lengths)), self.shared
        starts = np.where(_needs_mask(self.lengths, self.lengths - shared), shared, 0)
        uncut = np.stack([rows, starts, self.lengths, 0 * rows], 1)
        if window is None:
            return uncut
        is_long, size = self.lengths > window, max(window, _LEAST_PART)
        cut = [
            (row, start, min(start + size, int(self.lengths[row])), max(0, start - window + 1))
            for row in rows[is_long].tolist()
            for start in range(int(shared[row]), int(self.lengths[row]), size)
        ]
        return np.concatenate([uncut[~is_long], np.array(cut, dtype=np.int64)])

    def _divide_queries(self, window: int | None) -> Ints:
        """Return the same parts [n, 4] of those nodes alone that attend here: runs of a text, cut where a mask would be large."""
        assert self.queries is not None
        depth = self.depths()[self.queries]
        text = np.searchsorted(np.cumsum(self.lengths - self.shared), self.queries, side="right")
        begins = np.flatnonzero((np.diff(self.queries, prepend=-2) != 1) | (np.diff(text, prepend=-1) != 0))
        parts = list[tuple[int, int, int, int]]()
        for begin, stop in zip(begins.tolist(), [*begins[1:].tolist(), len(depth)], strict=True):
            row, first, end = int(text[begin]), int(depth[begin]), int(depth[stop - 1]) + 1
            if window is None and first == 0:  # without a mask
                parts.append((row, 0, end, 0))
                continue
            size = max(_LEAST_PART, _PART_SCORES // end if window is None else window)
            for start in range(first, end, size):
                first_key = 0 if window is None else max(0, start - window + 1)
                parts.append((row, start, min(start + size, end), first_key))
        return np.array(parts, dtype=np.int64)

    def _make_flex_mask(self, window: int | None) -> Any:
        from torch.nn.attention.flex_attention import BlockMask

        end = self.subtree_ends()
        nodes, size = len(end), FLEX_BLOCK
        padded, depth = np.zeros((2, -(-nodes // size) * size), dtype=np.int64)
        padded[:nodes], depth[:nodes] = end, self.depths()
        depth[nodes:] = depth[nodes - 1]
        own = np.arange(nodes) if self.queries is None else self.queries
        asking = np.full(-(-len(own) // size) * size, own[-1])  # the node of each row
        asking[: len(own)] = own
        first, last = (getattr(asking.reshape(-1, size), bound)(1)[:, None] for bound in ("min", "max"))
        column_ends, column = padded.reshape(-1, size), np.arange(0, len(padded), size)
        is_whole = np.arange(size, len(asking) + 1, size)[:, None] <= len(own)
        is_full = is_whole & (column + size <= first) & (column_ends.min(1) > last)
        is_partial = (column <= last) & (column_ends.max(1) > first) & ~is_full
        if window is not None:
            rows, columns = depth[asking].reshape(-1, size), depth.reshape(-1, size)
            is_within = rows.max(1)[:, None] - columns.min(1) < window
            is_partial = (is_partial | (is_full & ~is_within)) & (rows.min(1)[:, None] - columns.max(1) < window)
            is_full &= is_within

        def lists(chosen: NDArray[np.bool_]) -> tuple[Tensor, Tensor]:
            """Return how many column blocks each row block has, and which, [1, 1, rows] and [1, 1, rows, columns]."""
            order = np.argsort(~chosen, 1, kind="stable").astype(np.int32)
            counts = chosen.sum(1).astype(np.int32)
            return self.convert(torch.from_numpy(counts)[None, None]), self.convert(torch.from_numpy(order)[None, None])

        ends, depths = self.convert(torch.from_numpy(padded)), self.convert(torch.from_numpy(depth))
        nodes_of_rows = None if self.queries is None else self.convert(torch.from_numpy(asking))

        def is_visible(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
            query = row if nodes_of_rows is None else nodes_of_rows[row]
            visible = (key <= query) & (query < ends[key])
            return visible if window is None else visible & (depths[query] - depths[key] < window)

        return BlockMask.from_kv_blocks(
            *lists(is_partial), *lists(is_full), BLOCK_SIZE=size, mask_mod=is_visible, seq_lengths=(len(own), nodes)
        )

    def depths(self) -> Ints:
        """Return [N] the number of tokens before each node in its texts."""
        depth = np.arange(self.paths.shape[1])
        is_new = (depth >= self.shared[:, None]) & (depth < self.lengths[:, None])
        return np.nonzero(is_new)[1]

    def subtree_ends(self) -> Ints:
        """Return [N] the first node after each node's subtree."""
        first_nodes = np.cumsum(self.lengths - self.shared)  # of the text after each
        ends = np.full(int(first_nodes[-1]), first_nodes[-1], dtype=np.int64)
        for text, first in enumerate(first_nodes[:-1]):  # what the next text does not share ends where that begins
            ends[self.paths[text, self.shared[text + 1] : self.lengths[text]]] = first
        return ends


def _needs_mask(lengths: Ints, new_tokens: Ints) -> NDArray[np.bool_]:
    """Return which texts query their new tokens alone, with a mask; the others query all of their tokens again, without."""
    return (new_tokens < lengths) & (new_tokens * lengths <= _MAX_SCORES)


def _group_parts(parts: Ints, limit: int) -> Iterator[Ints]:
    """Group parts of texts (`AttentionTree._divide_texts`) of similar shape, of at most `limit` scores, most queries first."""
    _, starts, ends, first_keys = parts.T
    queries, keys, masked = ends - starts, ends - first_keys, starts > 0
    order = np.lexsort((-keys, -queries, masked))
    start, needed, longest = 0, 0, 0
    for i, part in enumerate(order):
        first = order[start]
        area = int(queries[part] * keys[part])
        padded = (i - start + 1) * int(queries[first]) * max(longest, int(keys[part]))
        wasteful = padded > _SMALL_CALL and padded > _MAX_PADDING * (needed + area)
        if i > start and (masked[part] != masked[first] or wasteful or padded > limit):
            yield order[start:i]
            start, needed, longest = i, 0, 0
        needed, longest = needed + area, max(longest, int(keys[part]))
    yield order[start:]


def tree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    tree: AttentionTree | None = None,
    use_flex: bool = True,
    **options: Any,
) -> tuple[Tensor, None]:
    """Apply attention along a tree's paths, or the model's own scaled-dot-product attention if there is no tree.

    Args:
        query, key, value: [1, heads, N, width], or without a tree [B, heads, L, width]; queries of `tree.queries` alone.
        use_flex: Use FlexAttention where it is faster: on a GPU, where many texts share prefixes.
    """
    if tree is None:
        return attend(module, query, key, value, attention_mask, **options)
    if tree.attend is not None:
        followed = tree.attend(module, query, key, value, tree, use_flex=use_flex, **options)
        if followed is not None:
            return followed.transpose(1, 2), None
    out = attend_by_flex(query, key, value, tree, **options) if use_flex else None
    if out is not None:
        return out.transpose(1, 2), None
    blocks, output_index = tree.blocks(options.get("sliding_window"))
    outputs = []
    for b in blocks:
        q, k, v = gather_nodes(query, b.queries), gather_nodes(key, b.keys), gather_nodes(value, b.keys)
        outputs.append(attend(module, q, k, v, b.mask, **options)[0].flatten(0, 1))
    merged = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    heads, width = merged.shape[1:]
    return merged.flatten(1).index_select(0, output_index).view(1, -1, heads, width), None


def attend_by_flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tree: AttentionTree,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> Tensor | None:
    """Return [1, heads, N, width] by FlexAttention; None where it is not possible or not faster."""
    if s_aux is not None or tree.masked_scores < FLEX_SCORES or not is_flex_possible(query):
        return None
    return flex_attention(query, key, value, tree, scaling, sliding_window)


def is_flex_possible(query: Tensor) -> bool:
    """Return True for plain tensors (not divided over processes) on a GPU, in a precision that FlexAttention has, outside blocks
    whose derivatives it lacks."""
    if PlainAttention.is_active():
        return False
    return type(query) is Tensor and query.device.type in FLEX_DEVICES and query.dtype in FLEX_DTYPES


def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, tree: AttentionTree, scale: float | None, window: int | None = None
) -> Tensor | None:
    """Return [1, heads, N, width] by FlexAttention; None, with a warning the first time, if it cannot be compiled here."""
    global _is_flex_broken, _has_flex_worked
    if _is_flex_broken:
        return None
    shares_keys = query.shape[1] != key.shape[1]
    mask = tree.flex_mask(window)
    try:
        out = compiled_flex_attention()(query, key, value, block_mask=mask, scale=scale, enable_gqa=shares_keys)
    except Exception as error:  # the compiler, Triton and the driver raise all kinds
        if _has_flex_worked or is_out_of_memory(error):
            raise
        _is_flex_broken = True
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
        warnings.warn(
            f"FlexAttention cannot be compiled here ({reason}): attention uses scaled_dot_product_attention, which is slower "
            "where texts share long prefixes. --learner.attention sdpa silences this.",
            stacklevel=2,
        )
        return None
    _has_flex_worked = True
    return out


_is_flex_broken = _has_flex_worked = False  # in this process


@cache
def compiled_flex_attention() -> Callable[..., Tensor]:
    """Return FlexAttention as one kernel for all lengths; without compilation it would write out all scores."""
    from torch.nn.attention import flex_attention as flex

    return torch.compile(flex.flex_attention, dynamic=True)


def gather_nodes(x: Tensor, nodes: Tensor) -> Tensor:
    """Return [s, heads, l, width] of x [1, heads, N, width] at nodes [s, l].

    The backward pass of `index_select` adds in a fixed order, that of indexing in the threads' order.
    """
    _, heads, _, width = x.shape
    rows = x[0].transpose(0, 1).flatten(1).index_select(0, nodes.flatten())
    return rows.view(*nodes.shape, heads, width).transpose(1, 2)


def enable_tree_attention(model: Any, *, is_checked: bool = False) -> bool:
    """Make the model's attention follow trees.

    Returns False, and changes nothing, unless the model uses scaled-dot-product attention by transformers' interface, and computes
    the same whatever that is called.

    Args:
        is_checked: The second is known already, as of a model whose weights are not here.
    """
    config = getattr(model, "config", None)
    if config is not None and config.get_text_config()._attn_implementation == ATTENTION_NAME:
        return True
    can_set = getattr(model, "_can_set_attn_implementation", None)  # before setting, which warns if it is not possible
    if getattr(config, "_attn_implementation", None) not in FUSED_NAMES or can_set is None or not can_set():
        return False
    register_attention(ATTENTION_NAME, tree_attention)
    if not is_checked and depends_on_attention_name(model, ATTENTION_NAME):
        return False
    set_attention(model, ATTENTION_NAME)
    return bool(model.config.get_text_config()._attn_implementation == ATTENTION_NAME)


def exclude_attention_from_compilation(model: Any) -> None:
    """Keep `torch.compile` out of the attention of this process's models: its blocks have other shapes in every micro-batch."""
    from transformers import AttentionInterface

    name = model.config.get_text_config()._attn_implementation
    interface: Any = AttentionInterface
    if name not in interface():
        raise ConfigError(
            f"learner.compile leaves attention as it is, and {type(model).__name__} has {name!r} attention, which is part of its "
            "blocks: leave learner.compile out"
        )
    attention = interface()[name]
    if not getattr(attention, "_torchdynamo_disable", False):
        interface.register(name, torch.compiler.disable(attention))  # type: ignore[no-untyped-call]


def disable_tree_attention(model: Any) -> None:
    """Restore the model's own attention, also in a process that did not load it."""
    config = getattr(model, "config", None)
    if config is not None and config.get_text_config()._attn_implementation in (ATTENTION_NAME, SINKS_NAME):
        restore_fused_attention(model)
