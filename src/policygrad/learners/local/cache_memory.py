"""What segments leave for a network without attention over a tree: the model's own cache.

Convolutions, delta rules and state-space layers keep a state of fixed size for all that they have read, windows their last
keys, attention all of them. Whoever follows a segment takes a copy of its cache whose tensors are leaves, and their gradients are
added up here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from policygrad.learners.local.cached_prefixes import (
    PrefixCache,
    StateName,
    find_cache_argument,
    group_by_length,
    replace_states,
)
from policygrad.models.loading import at_least_float32

if TYPE_CHECKING:
    from policygrad.learners.local.packing import Pack


@dataclass(eq=False)
class _Entry:
    """The cache after a path's first tokens, and the gradients of its states so far, in float32 or better."""

    cache: PrefixCache
    gradients: dict[StateName, Tensor] = field(default_factory=dict)

    def add_gradient(self, name: StateName, gradient: Tensor) -> None:
        if name in self.gradients:
            self.gradients[name] += gradient
        else:
            self.gradients[name] = at_least_float32(gradient).clone()


class CacheMemory:
    """The caches at the segments' ends of the current path (see `path_reader.PathMemory`)."""

    def __init__(self, network: nn.Module, learns: bool, weigh: Callable[[Tensor], None] | None) -> None:
        """
        Args:
            network: A backbone.
            weigh: Told before each call which of its tokens [n] are read for the first time, and are no padding.
        """
        self.network, self.learns, self.weigh = network, learns, weigh
        self.argument, config = find_cache_argument(network)
        self.entries = {0: _Entry(PrefixCache(config=config))}
        """By the number of tokens that the cache has read."""

    def enter(self, part: Pack, begin: int) -> Tensor:
        end = begin + len(part.ids)
        self.entries = {depth: entry for depth, entry in self.entries.items() if depth <= begin}
        cache = self._open(begin)
        states = self._read_segment(part, begin, cache)
        self.entries[end] = _Entry(cache)
        # attention's keys are kept once: those of before are the first of these
        longer, before = cache.states(), self.entries[begin]
        before.cache = replace_states(
            before.cache, lambda name, x: longer[name][..., :begin, :] if _grows(x, longer[name], begin, end) else x
        )
        return states

    def follow(self, part: Pack, depth: int) -> Tensor:
        device, tree, cache = part.ids.device, part.tree, self._open(depth)
        places, offset, outputs = np.zeros(len(part.ids), dtype=np.int64), 0, list[Tensor]()
        is_read = np.zeros(len(part.ids), dtype=bool)
        for texts in group_by_length(tree.lengths):
            width = max(2, int(tree.lengths[texts].max()))  # one token would be a step of decoding, in place
            column = np.arange(width)
            is_own = column < tree.lengths[texts, None]
            nodes = np.take_along_axis(tree.paths[texts], np.minimum(column, tree.lengths[texts, None] - 1), 1)
            is_new = is_own & ~is_read[nodes]
            first = np.zeros(nodes.size, dtype=bool)
            first[np.unique(np.where(is_new, nodes, -1), return_index=True)[1]] = True
            is_new &= first.reshape(nodes.shape)
            is_read[nodes[is_own]] = True
            places[nodes[is_new]] = offset + np.flatnonzero(is_new)
            offset += nodes.size
            rows = torch.zeros(len(texts), dtype=torch.int64, device=device)
            ids = part.ids[torch.from_numpy(nodes).to(device)]
            repeated = cache.repeat(rows)
            outputs.append(self._call(ids, depth, repeated, torch.from_numpy(is_new.ravel())).flatten(0, 1))
        read = torch.cat(outputs)
        return read.index_select(0, torch.from_numpy(places).to(device)[part.predicting_nodes])

    def recompute(self, part: Pack, begin: int) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        end = begin + len(part.ids)
        entry, before, cache = self.entries.pop(end), self.entries[begin], self._open(begin)
        earlier = before.cache.states()
        states, left = self._read_segment(part, begin, cache), list[tuple[Tensor, Tensor]]()
        for name, state in cache.states().items():
            gradient = entry.gradients.pop(name, None)
            if gradient is None:
                continue
            if name in earlier and _grows(earlier[name], state, begin, end):
                before.add_gradient(name, gradient[..., :begin, :])
                state, gradient = state[..., begin:, :], gradient[..., begin:, :]
            left.append((state, gradient.to(state.dtype)))
        return states, left

    def _open(self, depth: int) -> PrefixCache:
        """Return a copy of a cache; in a graph its states are leaves, whose gradients are added up."""
        entry = self.entries[depth]
        if not (self.learns and torch.is_grad_enabled()):
            return replace_states(entry.cache, lambda name, x: x)

        def collect(name: StateName, leaf: Tensor) -> None:
            assert leaf.grad is not None
            entry.add_gradient(name, leaf.grad)
            leaf.grad = None

        def detach(name: StateName, x: Tensor) -> Tensor:
            leaf: Any = x.detach().requires_grad_()
            leaf.register_post_accumulate_grad_hook(partial(collect, name))
            return leaf  # type: ignore[no-any-return]

        return replace_states(entry.cache, detach)

    def _read_segment(self, part: Pack, begin: int, cache: PrefixCache) -> Tensor:
        states = self._call(part.ids[None], begin, cache, torch.ones(len(part.ids), dtype=torch.bool))
        return states[0].index_select(0, part.predicting_nodes)

    def _call(self, ids: Tensor, depth: int, cache: PrefixCache, is_new: Tensor) -> Tensor:
        """Return [S, L, H] the last hidden states of texts ids [S, L] after `depth` tokens."""
        if self.weigh is not None:
            self.weigh(is_new.to(ids.device))
        positions = depth + torch.arange(ids.shape[1], device=ids.device)
        mask = torch.ones(len(ids), depth + ids.shape[1], dtype=torch.int64, device=ids.device)
        inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions.expand_as(ids)}
        states: Tensor = self.network(**inputs, **{self.argument: cache}, use_cache=True).last_hidden_state
        return states


def _grows(before: Tensor, after: Tensor, begin: int, end: int) -> bool:
    """Return whether a state has an entry [.., n, ·] for each token that was read."""
    return before.dim() == after.dim() == 4 and before.shape[2] == begin and after.shape[2] == end
