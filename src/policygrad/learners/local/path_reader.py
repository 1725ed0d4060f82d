"""Reading passes behind a path of segments: each segment once without a graph, and again when its last pass is done.

What a segment leaves is described in `segments`. Here is how it is read, kept and differentiated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from policygrad.learners.local.prefix_attention import KeyBuffers, attend_after
from policygrad.learners.local.segments import PathSegment
from policygrad.learners.local.tree_attention import AttentionTree
from policygrad.models.loading import at_least_float32

if TYPE_CHECKING:
    from policygrad.learners.local.forward import Network
    from policygrad.learners.local.packing import Pack

_UNKNOWN_OPTIONS = ("softcap", "position_bias", "head_mask")  # of attention, which change its scores


@dataclass(frozen=True, eq=False)
class PathReaders:
    """The readers of packs that come in an order in which each path is read once: one for every network."""

    capacity: int
    """Tokens of the longest path."""
    by_backbone: dict[int, PathReader] = field(default_factory=dict)

    def read(self, network: Network, backbone: nn.Module, part: Pack) -> Tensor:
        """Return [u, H] the backbone's states at `part.predicting_nodes`."""
        reader = self.by_backbone.get(id(backbone))
        if reader is None:
            reader = self.by_backbone[id(backbone)] = PathReader(
                network, backbone, self.capacity, torch.is_grad_enabled()
            )
        return reader.read(part)

    def finish(self) -> None:
        """Compute what is left of the gradients."""
        for reader in self.by_backbone.values():
            reader.return_to(0)
        self.by_backbone.clear()


@dataclass(eq=False)
class _Step:
    """A segment that has been read."""

    segment: PathSegment
    part: Pack
    states: Tensor | None  # [p, H] at its predicting nodes; None once no pass will read them
    num_readers: int
    """Passes that will."""
    gradient: Tensor | None = None
    """[p, H] of the states, so far."""

    def find_rows(self, nodes: Tensor) -> tuple[slice, Tensor]:
        """Return which of these nodes of a path, in ascending order, are this segment's, and [k] their rows of the states."""
        bounds = torch.tensor([self.segment.begin, self.segment.end], device=nodes.device)
        first, end = torch.searchsorted(nodes, bounds).tolist()
        places = torch.from_numpy(np.flatnonzero(self.segment.predicting)).to(nodes.device)
        return slice(first, end), torch.searchsorted(places, nodes[first:end] - self.segment.begin)


class _Collect(torch.autograd.Function):
    """The states of a path at some nodes, before those of a pass. Their gradients stay with the path."""

    @staticmethod
    def forward(ctx: Any, read: Tensor, steps: Sequence[_Step], nodes: Tensor) -> Tensor:
        ctx.parts = [(step, *step.find_rows(nodes)) for step in steps]
        out = read.new_empty(len(nodes) + len(read), read.shape[1])
        for step, which, rows in ctx.parts:
            if len(rows) and step.states is not None:
                torch.index_select(step.states, 0, rows, out=out[which])
        out[len(nodes) :] = read
        ctx.count = len(nodes)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        for step, which, rows in ctx.parts:
            if len(rows) and step.states is not None:
                if step.gradient is None:
                    step.gradient = at_least_float32(torch.zeros_like(step.states))
                step.gradient.index_add_(0, rows, grad[which].to(step.gradient.dtype))
                step.num_readers -= 1
                if not step.num_readers:
                    step.states = None
        return grad[ctx.count :], None, None


class PathReader:
    """Reads packs behind their paths with one network, and keeps what the segments of the current path have left."""

    def __init__(self, network: Network, backbone: nn.Module, capacity: int, learns: bool) -> None:
        self.network, self.backbone, self.capacity, self.learns = network, backbone, capacity, learns
        self.steps, self.layers = list[_Step](), dict[nn.Module, KeyBuffers]()
        self.depth = 0
        """Tokens of the path that what is being read follows."""
        self.is_storing = False
        self.recomputes: bool = network.model.training  # transformers recompute activations in training mode only
        self.computed: list[tuple[KeyBuffers, Tensor, Tensor]] | None = None
        """The keys and values of the segment that is being read again."""

    def read(self, part: Pack) -> Tensor:
        """Return [u, H] the states at the part's predicting nodes, of the path and its own."""
        common = 0
        while common < min(len(self.steps), len(part.path)) and self.steps[common].segment is part.path[common]:
            common += 1
        self.return_to(common)
        for segment in part.path[common:]:
            self._enter(segment, part)
        self.depth = part.path[-1].end
        nodes = part.predicting_nodes
        inner = nodes[nodes < self.depth]
        states = self._read_tree(cut_part(part, self.depth, len(part.ids)))
        return _Collect.apply(states, self.steps[:], inner) if len(inner) else states  # type: ignore[no-untyped-call]

    def return_to(self, count: int) -> None:
        """Leave all but the first `count` segments of the path."""
        if not self.learns:
            del self.steps[count:]
            return
        model = self.network.model
        was_training = model.training
        try:
            while len(self.steps) > count:
                model.train(self.recomputes)
                self._differentiate(self.steps.pop())
        finally:
            if model.training != was_training:
                model.train(was_training)

    def _enter(self, segment: PathSegment, part: Pack) -> None:
        self.depth, self.is_storing = segment.begin, True
        piece = cut_part(part, segment.begin, segment.end, segment.predicting)
        try:
            with torch.no_grad(), self.network.uncounted():
                states = self._read_tree(piece)
        finally:
            self.is_storing = False
        self.steps.append(_Step(segment, piece, states, segment.num_readers))

    def _differentiate(self, step: _Step) -> None:
        """Read a segment again, with a graph, and pass on the gradients that its states, keys and values have received."""
        self.depth, self.computed = step.segment.begin, []
        try:
            with torch.enable_grad():
                states, computed = self._read_tree(step.part), self.computed
        finally:
            self.computed = None
        pairs = [] if step.gradient is None else [(states, step.gradient.to(states.dtype))]
        for buffers, key, value in computed:
            pairs += zip((key, value), buffers.pop_gradients(step.segment.begin, step.segment.end), strict=True)
        if pairs := [(x, gradient) for x, gradient in pairs if x.requires_grad]:
            torch.autograd.backward([x for x, _ in pairs], [gradient for _, gradient in pairs])

    def _read_tree(self, part: Pack) -> Tensor:
        tree = replace(part.tree, attend=self.attend)
        return self.network.read_states(replace(part, tree=tree, path=(), path_readers=None), self.backbone)

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
        unknown = [name for name in _UNKNOWN_OPTIONS if options.get(name) is not None]
        if unknown:
            raise NotImplementedError(f"segments do not know attention with {', '.join(unknown)}")
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


def cut_part(part: Pack, begin: int, end: int, predicting: NDArray[np.bool_] | None = None) -> Pack:
    """Return the nodes `begin` to `end` of a pack as one of their own. All of its texts have the first `begin` in common, and
    the first `end` if that is not the last.

    Args:
        predicting: [end − begin] the nodes whose states are wanted; None = those from `begin` on that predict something here.
    """
    tree = part.tree
    if end == len(part.ids):
        cut = replace(
            tree,
            paths=tree.paths[:, begin:] - begin,
            lengths=tree.lengths - begin,
            shared=np.maximum(tree.shared - begin, 0),
        )
    else:
        cut = replace(tree, paths=np.arange(end - begin)[None], lengths=np.array([end - begin]), shared=np.array([0]))
    if predicting is None:
        nodes = part.predicting_nodes[part.predicting_nodes >= begin] - begin
    else:
        nodes = torch.from_numpy(np.flatnonzero(predicting)).to(part.ids.device)
    return replace(
        part,
        ids=part.ids[begin:end],
        positions=part.positions[begin:end],
        predicting_nodes=nodes,
        tree=cut,
        routes=None if part.routes is None else part.routes[begin:end],
        reads=part.reads[begin:end],
        reference=None,
    )
