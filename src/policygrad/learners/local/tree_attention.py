"""Attention over a tree of texts that share prefixes, so that each shared token is computed once.

A model reads the tree's N tokens as one row: embeddings, projections and head see each token once. Attention gathers the keys of a
text along its path and uses its own tokens as queries; texts of equal shape are one call of the model's original attention. A token
attends to exactly what it would attend to if its text stood alone, in the same order, so log-probabilities do not change.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from policygrad.errors import ConfigError
from policygrad.models.replica import PlainAttention

ATTENTION_NAME = "policygrad"  # name of this attention in transformers' registry
_MAX_SCORES = 2**24  # attention scores in a call whose texts are padded to a common length
_SMALL_CALL = 2**15  # scores below which padding costs less than another call
_MAX_PADDING = 1.25  # padded scores per needed score that a larger call may have
FLEX_BLOCK = 128  # queries and keys of a block of FlexAttention's mask
FLEX_DEVICES = ("cuda",)
FLEX_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FLEX_SCORES = 2**22
"""Scores under a mask from which on FlexAttention is used."""
Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class AttentionBlock:
    """Texts that attend in one call."""

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

    def map(self, function: Callable[[Tensor], Tensor]) -> AttentionTree:
        """Return the tree with every tensor replaced."""
        convert = self.convert
        return AttentionTree(self.paths, self.lengths, self.shared, lambda x: function(convert(x)))

    @property
    def masked_scores(self) -> int:
        """Number of scores that scaled-dot-product attention computes with a mask."""
        return int(((self.lengths - self.shared) * self.lengths)[self.shared > 0].sum())

    @cached_property
    def blocks(self) -> tuple[tuple[AttentionBlock, ...], Tensor]:
        """The texts in groups of similar shape, for one call of scaled-dot-product attention each, and [N] the index of each node's
        output in their concatenated outputs."""
        paths, lengths, shared = self.paths, self.lengths, self.shared
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
            mask: Tensor | None = None
            if skip.any():
                mask = self.convert(torch.from_numpy(np.arange(k) <= depth[:, :, None])[:, None])
            keys = torch.from_numpy(paths[rows, :k].copy())
            blocks.append(AttentionBlock(self.convert(torch.from_numpy(queries)), self.convert(keys), mask))
        return tuple(blocks), self.convert(torch.from_numpy(output_index))

    @cached_property
    def flex_mask(self) -> Any:
        """The `BlockMask` of FlexAttention: a node is visible from itself on to the end of its subtree, as nodes are in the order
        of a depth-first search."""
        from torch.nn.attention.flex_attention import BlockMask

        end = self.subtree_ends()
        nodes, size = len(end), FLEX_BLOCK
        padded = np.full(-(-nodes // size) * size, 0, dtype=np.int64)
        padded[:nodes] = end
        column_ends = padded.reshape(-1, size)
        row, column = np.indices((len(column_ends),) * 2)
        is_full = (row > column) & (column_ends.min(1)[None] >= (row + 1) * size)
        is_partial = (row == column) | ((row > column) & (column_ends.max(1)[None] > row * size) & ~is_full)

        def lists(chosen: NDArray[np.bool_]) -> tuple[Tensor, Tensor]:
            """Return how many column blocks each row block has, and which, [1, 1, rows] and [1, 1, rows, columns]."""
            order = np.argsort(~chosen, 1, kind="stable").astype(np.int32)
            counts = chosen.sum(1).astype(np.int32)
            return self.convert(torch.from_numpy(counts)[None, None]), self.convert(torch.from_numpy(order)[None, None])

        ends = self.convert(torch.from_numpy(padded))

        def is_visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key <= query) & (query < ends[key])

        return BlockMask.from_kv_blocks(
            *lists(is_partial), *lists(is_full), BLOCK_SIZE=size, mask_mod=is_visible, seq_lengths=(nodes, nodes)
        )

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
    use_flex: bool = True,
    **options: Any,
) -> tuple[Tensor, None]:
    """Apply attention along a tree's paths, or transformers' scaled-dot-product attention if there is no tree.

    Args:
        query, key, value: [1, heads, N, width], or without a tree [B, heads, L, width].
        use_flex: Use FlexAttention where it is faster: on a GPU, where many texts share prefixes.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward as sdpa

    if tree is None:
        return sdpa(module, query, key, value, attention_mask, **options)
    if use_flex and tree.masked_scores >= FLEX_SCORES and is_flex_possible(query):
        out = flex_attention(query, key, value, tree, options.get("scaling"))
        if out is not None:
            return out.transpose(1, 2), None
    blocks, output_index = tree.blocks
    outputs = []
    for b in blocks:
        q, k, v = _gather_nodes(query, b.queries), _gather_nodes(key, b.keys), _gather_nodes(value, b.keys)
        outputs.append(sdpa(module, q, k, v, b.mask, **options)[0].flatten(0, 1))
    merged = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    heads, width = merged.shape[1:]
    return merged.flatten(1).index_select(0, output_index).view(1, -1, heads, width), None


def is_flex_possible(query: Tensor) -> bool:
    """Return True for plain tensors (not divided over processes) on a GPU, in a precision that FlexAttention has, outside blocks
    whose derivatives it lacks."""
    if PlainAttention.is_active():
        return False
    return type(query) is Tensor and query.device.type in FLEX_DEVICES and query.dtype in FLEX_DTYPES


def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, tree: AttentionTree, scale: float | None
) -> Tensor | None:
    """Return [1, heads, N, width] by FlexAttention; None, with a warning the first time, if it cannot be compiled here."""
    global _is_flex_broken, _has_flex_worked
    if _is_flex_broken:
        return None
    shares_keys = query.shape[1] != key.shape[1]
    mask = tree.flex_mask
    try:
        out = compiled_flex_attention()(query, key, value, block_mask=mask, scale=scale, enable_gqa=shares_keys)
    except Exception as error:  # the compiler, Triton and the driver raise all kinds
        if _has_flex_worked or isinstance(error, torch.OutOfMemoryError):
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


def _gather_nodes(x: Tensor, nodes: Tensor) -> Tensor:
    """Return [s, heads, l, width] of x [1, heads, N, width] at nodes [s, l].

    The backward pass of `index_select` adds in a fixed order, that of indexing in the threads' order.
    """
    _, heads, _, width = x.shape
    rows = x[0].transpose(0, 1).flatten(1).index_select(0, nodes.flatten())
    return rows.view(*nodes.shape, heads, width).transpose(1, 2)


def enable_tree_attention(model: Any, *, is_checked: bool = False) -> bool:
    """Make the model's attention follow trees.

    Returns False, and changes nothing, unless the model uses the scaled-dot-product attention of transformers by its interface, and
    computes the same whatever that is called.

    Args:
        is_checked: The second is known already, as of a model whose weights are not here.
    """
    config = getattr(model, "config", None)
    if config is not None and config.get_text_config()._attn_implementation == ATTENTION_NAME:
        return True
    can_set = getattr(model, "_can_set_attn_implementation", None)  # before setting, which warns if it is not possible
    if getattr(config, "_attn_implementation", None) != "sdpa" or can_set is None or not can_set():
        return False
    if not is_checked and depends_on_attention_name(model):
        return False
    _register()
    _set_attention(model, ATTENTION_NAME)
    return bool(model.config.get_text_config()._attn_implementation == ATTENTION_NAME)


class _AttentionName(str):
    """A name of the attention that counts how often code of the model's own looks whether it is `sdpa`."""

    modules: frozenset[str]  # of the model's classes; transformers' registry compares names too
    num_looks: int

    def _observe(self, other: object) -> None:
        if other == "sdpa" and sys._getframe(2).f_globals.get("__name__") in self.modules:
            self.num_looks += 1

    def __eq__(self, other: object) -> bool:
        self._observe(other)
        return str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        self._observe(other)
        return str.__ne__(self, other)

    def __hash__(self) -> int:  # a set or dict of names
        self._observe("sdpa")
        return str.__hash__(self)


@torch.no_grad()
def depends_on_attention_name(model: nn.Module) -> bool:
    """Return True if the model computes something else where its attention is not called `sdpa`.

    Sparse attention does: GLM 5 and DeepSeek V3.2 apply the mask of their indexer under the names that they know, so under
    another one they attend to everything, which shows in texts longer than the indexer's top-k alone.
    """
    import transformers

    _register()
    configs = {
        id(config): config
        for module in model.modules()
        if isinstance(config := getattr(module, "config", None), transformers.PreTrainedConfig)
        and config._attn_implementation == "sdpa"
    }
    if not configs:
        return False
    name = _AttentionName(ATTENTION_NAME)
    name.modules, name.num_looks = frozenset(type(module).__module__ for module in model.modules()), 0
    ids = torch.zeros(1, 8, dtype=torch.int64, device=next(model.parameters()).device)
    for config in configs.values():
        config._attn_implementation_internal = name
    try:
        model(input_ids=ids, use_cache=False)
    except Exception:  # architectures raise all kinds of errors under a name that they do not know
        return True
    finally:
        for config in configs.values():
            config._attn_implementation_internal = "sdpa"
    return name.num_looks > 0


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(ATTENTION_NAME, tree_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)


def _set_attention(model: Any, name: str) -> None:
    """Set the attention of the text part: a vision tower's reads no tree."""
    config = model.config
    parts = [key for key in config.sub_configs if getattr(config, key, None) is config.get_text_config()]
    model.set_attn_implementation({parts[0]: name} if parts else name)


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
    """Restore the model's own attention."""
    config = getattr(model, "config", None)
    if config is not None and config.get_text_config()._attn_implementation == ATTENTION_NAME:
        _set_attention(model, "sdpa")
