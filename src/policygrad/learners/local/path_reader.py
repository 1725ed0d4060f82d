"""Reading passes behind a path of segments: each segment once without a graph, and again when its last pass is done.

What a segment leaves is described in `segments`. Here is how it is read, kept and differentiated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from policygrad.learners.local.segments import PathSegment
from policygrad.models.loading import at_least_float32

if TYPE_CHECKING:
    from policygrad.learners.local.forward import Network
    from policygrad.learners.local.packing import Pack


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
            reader = self.by_backbone[id(backbone)] = self._open(network, backbone)
        return reader.read(part)

    def _open(self, network: Network, backbone: nn.Module) -> PathReader:
        """Return a reader that keeps what this network needs."""
        learns = torch.is_grad_enabled()
        memory: PathMemory
        if network.use_tree:
            from policygrad.learners.local.kept_keys import KeptKeys

            memory = KeptKeys(lambda part: network.read_states(part, backbone), self.capacity, learns)
        else:
            from policygrad.learners.local.kept_caches import KeptCaches

            memory = KeptCaches(backbone, learns, None if network.load is None else network.load.weigh)
        return PathReader(network, backbone, memory, learns)

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


class PathMemory(Protocol):
    """Reads segments and what follows them with one backbone, and keeps what they leave and its gradients."""

    def enter(self, part: Pack, begin: int) -> Tensor:
        """Read a segment, the path's tokens from `begin` on, without a graph, and keep what it leaves; [p, H] its states."""

    def follow(self, part: Pack, depth: int) -> Tensor:
        """Read texts after the path's first `depth` tokens; [u, H] their states."""

    def recompute(self, part: Pack, begin: int) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Read a segment again; [p, H] its states, and what it leaves, each with the gradient that it has received and that is
        forgotten here."""


class PathReader:
    """Reads packs behind their paths with one network, and keeps the states of the current path's segments."""

    def __init__(self, network: Network, backbone: nn.Module, memory: PathMemory, learns: bool) -> None:
        self.network, self.backbone, self.memory, self.learns = network, backbone, memory, learns
        self.steps = list[_Step]()
        self.recomputes = backbone.training  # transformers recompute activations in training mode only

    def read(self, part: Pack) -> Tensor:
        """Return [u, H] the states at the part's predicting nodes, of the path and its own."""
        common = 0
        while common < min(len(self.steps), len(part.path)) and self.steps[common].segment is part.path[common]:
            common += 1
        self.return_to(common)
        for segment in part.path[common:]:
            self._enter(segment, part)
        depth, nodes = part.path[-1].end, part.predicting_nodes
        inner = nodes[nodes < depth]
        states = self.memory.follow(cut_part(part, depth, len(part.ids)), depth)
        return _Collect.apply(states, self.steps[:], inner) if len(inner) else states  # type: ignore[no-untyped-call]

    def return_to(self, count: int) -> None:
        """Leave all but the first `count` segments of the path."""
        if not self.learns:
            del self.steps[count:]
            return
        was_training = self.backbone.training
        try:
            while len(self.steps) > count:
                self.backbone.train(self.recomputes)
                self._differentiate(self.steps.pop())
        finally:
            self.backbone.train(was_training)

    def _enter(self, segment: PathSegment, part: Pack) -> None:
        piece = cut_part(part, segment.begin, segment.end, segment.predicting)
        with torch.no_grad(), self.network.uncounted():
            states = self.memory.enter(piece, segment.begin)
        self.steps.append(_Step(segment, piece, states, segment.num_readers))

    def _differentiate(self, step: _Step) -> None:
        """Read a segment again, with a graph, and pass on the gradients that its states and what it leaves have received."""
        with torch.enable_grad():
            states, pairs = self.memory.recompute(step.part, step.segment.begin)
        if step.gradient is not None:
            pairs = [(states, step.gradient.to(states.dtype)), *pairs]
        if pairs := [(x, gradient) for x, gradient in pairs if x.requires_grad]:
            torch.autograd.backward([x for x, _ in pairs], [gradient for _, gradient in pairs])


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
        path=(),
        path_readers=None,
    )
