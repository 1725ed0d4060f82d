"""What segments leave for a network that reads texts as a tree: its layers' keys and values, which attention reads in place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from policygrad.learners.local.prefix_attention import KeyBuffers, attend_after, check_options
from policygrad.learners.local.tree_attention import AttentionTree

if TYPE_CHECKING:
    from policygrad.learners.local.packing import Pack


class KeyMemory:
    """Keys and values of a path, one buffer for each layer (see `path_reader.PathMemory`)."""

    def __init__(self, read_whole: Callable[[Pack], Tensor], capacity: int, learns: bool) -> None:
        """
        Args:
            read_whole: Reads a pack as a tree; [u, H].
            capacity: Tokens of the longest path.
        """
        self.read_whole, self.capacity, self.learns = read_whole, capacity, learns
        self.layers = dict[nn.Module, KeyBuffers]()
        self.depth = 0
        """Tokens of the path that what is being read follows."""
        self.is_storing = False
        self.computed: list[tuple[KeyBuffers, Tensor, Tensor]] | None = None
        """The keys and values of the segment that is being read again."""

    def enter(self, part: Pack, begin: int) -> Tensor:
        self.is_storing = True
        try:
            return self.follow(part, begin)
        finally:
            self.is_storing = False

    def follow(self, part: Pack, depth: int) -> Tensor:
        self.depth = depth
        return self.read_whole(replace(part, tree=replace(part.tree, attend=self.attend)))

    def recompute(self, part: Pack, begin: int) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        self.computed = []
        try:
            states, computed = self.follow(part, begin), self.computed
        finally:
            self.computed = None
        left = list[tuple[Tensor, Tensor]]()
        for buffers, key, value in computed:
            left += zip((key, value), buffers.pop_gradients(begin, begin + len(part.ids)), strict=True)
        return states, left

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        tree: AttentionTree,
        scaling: float | None = None,
        sliding_window: int | None = None,
        s_aux: Tensor | None = None,
        **options: Any,
    ) -> Tensor | None:
        """Return [1, H, N, D], or None for nodes that follow nothing; keep what is asked for."""
        check_options(options, "segments")
        buffers = self.layers.get(module)
        if buffers is None:
            buffers = self.layers[module] = KeyBuffers.allocate(key, value, self.capacity, self.learns)
        if self.is_storing:
            buffers.store(key, value, self.depth)
        if self.computed is not None:
            self.computed.append((buffers, key, value))
        if self.depth == 0:
            return None
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return attend_after(
            query, key, value, buffers, self.depth, tree, scale=scale, window=sliding_window, sinks=s_aux
        )
