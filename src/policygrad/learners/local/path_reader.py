"""Reading passes behind a path of segments: each segment once without a graph, and again when its last pass is done.

What a segment leaves is described in `segments`. Here is how it is read, kept and differentiated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from policygrad.learners.local.segments import PathSegment
from policygrad.learners.local.tree_attention import Ints
from policygrad.models.loading import at_least_float32

if TYPE_CHECKING:
    from policygrad.learners.local.forward import Network
    from policygrad.learners.local.packing import Pack, PackPart


@dataclass(frozen=True, eq=False)
class PathReaders:
    """The readers of packs that come in an order in which each path is read once: one for every network."""

    capacity: int
    """Tokens of the longest path."""
    all_reduce: Callable[[Tensor], Tensor] | None = None
    """Adds up over the processes that read at the same time, each its own packs; None = all read the same, or there is one."""
    by_backbone: dict[int, PathReader] = field(default_factory=dict)

    def read(self, network: Network, backbone: nn.Module, part: Pack) -> Tensor:
        """Return [u, H] the backbone's states at `part.predicting_nodes`."""
        reader = self.open(network, backbone)
        if reader.prepared is not part:
            reader.prepare(part)
        return reader.read(part)

    def open(self, network: Network, backbone: nn.Module, calls: PathCalls | None = None) -> PathReader:
        """Return the reader that keeps what this network needs."""
        reader = self.by_backbone.get(id(backbone))
        if reader is None:
            reader = self.by_backbone[id(backbone)] = self._open(network, backbone, calls or PathCalls())
        return reader

    def _open(self, network: Network, backbone: nn.Module, calls: PathCalls) -> PathReader:
        learns = torch.is_grad_enabled()
        memory: PathMemory
        if network.use_tree:
            from policygrad.learners.local.key_memory import KeyMemory

            memory = KeyMemory(lambda part: network.read_states(part, backbone), self.capacity, learns)
        else:
            from policygrad.learners.local.cache_memory import CacheMemory

            memory = CacheMemory(backbone, learns, None if network.load is None else network.load.weigh)
        return PathReader(network, backbone, memory, learns, calls)

    def finish(self) -> None:
        """Compute what is left of the gradients."""
        for reader in self.by_backbone.values():
            reader.finish()
        self.by_backbone.clear()


class PathCalls:
    """Makes the calls of a network that are differentiated at once or not at all: here, as they come."""

    keeps_order = False
    """A layer must have the gradient of its output before that of the keys that it left."""

    def run(self, work: Callable[[], Tensor]) -> Tensor:
        """Return what `work` does, which calls the network."""
        return work()

    def meet(self) -> None:
        """Wait until no process has another such call to make before its next pass."""


@dataclass(eq=False)
class _Step:
    """What has been read without a graph: a segment, or a part of a pack behind its path."""

    part: Pack
    states: Tensor | None  # [p, H] at its predicting nodes; None once no pass will read them
    num_readers: int = 1
    """Passes that will."""
    gradient: Tensor | None = None
    """[p, H] of the states, so far."""


@dataclass(frozen=True, eq=False)
class _Source:
    """Rows of a step's states, and their places among those that a pass needs."""

    step: _Step
    which: Tensor  # [k]
    rows: Tensor  # [k]


class _Collect(torch.autograd.Function):
    """The states that a pass needs: its own, and those of what it follows, whose gradients stay there."""

    @staticmethod
    def forward(ctx: Any, read: Tensor, which: Tensor, sources: Sequence[_Source]) -> Tensor:
        out = read.new_empty(len(which) + sum(len(x.which) for x in sources), read.shape[1])
        for x in sources:
            assert x.step.states is not None
            out[x.which] = x.step.states.index_select(0, x.rows)
        out[which] = read
        ctx.sources, ctx.which = sources, which
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        for x in ctx.sources:
            step = x.step
            assert step.states is not None
            if step.gradient is None:
                step.gradient = at_least_float32(torch.zeros_like(step.states))
            step.gradient.index_add_(0, x.rows, grad[x.which].to(step.gradient.dtype))
            step.num_readers -= 1
            if not step.num_readers:
                step.states = None
        return grad[ctx.which], None, None


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
    """Reads packs behind their paths with one network, and keeps the states of the segments that are followed."""

    def __init__(
        self, network: Network, backbone: nn.Module, memory: PathMemory, learns: bool, calls: PathCalls
    ) -> None:
        self.network, self.backbone, self.memory, self.learns = network, backbone, memory, learns
        self.calls = calls
        self.prepared: Pack | None = None
        """The pack that is to be read next, if what it follows has been read."""
        self.sources = list[_Source]()
        """Of the states of that pack."""
        self.path, self.steps = list[PathSegment](), dict[PathSegment, _Step]()
        """The segments that the memory has now, and what was read of all that are not done."""
        self.unfinished: list[tuple[PackPart, _Step]] = []
        """Parts of the last pack that wait for the gradients of their states."""
        self.recomputes = backbone.training  # transformers recompute activations in training mode only

    def prepare(self, pack: Pack) -> None:
        """Read what the last call of a pack follows: its segments, and its other parts."""
        self._finish_parts()
        sources, count = list[_Source](), len(pack.parts)
        device = pack.ids.device

        def add(step: _Step, which: Ints, rows: Ints) -> None:
            if len(which):
                sources.append(_Source(step, torch.from_numpy(which).to(device), torch.from_numpy(rows).to(device)))

        for number, part in enumerate(pack.parts):
            self._go_to(part, pack, is_left=number == 0)
            for source in part.sources:
                rows = np.searchsorted(np.flatnonzero(source.segment.predicting), source.places)
                add(self.steps[source.segment], source.which, rows)
            if number < count - 1:
                with torch.no_grad(), self.network.uncounted():
                    piece = _cut_own(part, pack)
                    step = _Step(piece, self._follow(piece, part.depth))
                self.unfinished.append((part, step))
                add(step, part.which, np.arange(len(part.which)))
        self.calls.meet()
        self.prepared, self.sources = pack, sources

    def read(self, pack: Pack) -> Tensor:
        """Return [u, H] the states at the predicting nodes of a pack that is prepared: of its segments and of all its parts."""
        part, sources = pack.parts[-1], self.sources
        states = self.memory.follow(_cut_own(part, pack), part.depth)
        self.prepared, self.sources = None, []
        if not self.learns:
            self.unfinished, self.steps = [], {segment: self.steps[segment] for segment in self.path}
        if not sources:
            return states
        which = torch.from_numpy(part.which).to(states.device)
        return _Collect.apply(states, which, sources)  # type: ignore[no-any-return,no-untyped-call]

    def finish(self) -> None:
        """Compute what is left of the gradients."""
        self._finish_parts()
        self._return_to(0)
        self.calls.meet()

    def _follow(self, piece: Pack, depth: int) -> Tensor:
        return self.calls.run(lambda: self.memory.follow(piece, depth))

    def _go_to(self, part: PackPart, pack: Pack, *, is_left: bool) -> None:
        """Make the memory have a part's path; `is_left`: no pass will follow what it has of another."""
        common = 0
        while common < min(len(self.path), len(part.path)) and self.path[common] is part.path[common]:
            common += 1
        if is_left:
            self._return_to(common)
        del self.path[common:]
        for segment in part.path[common:]:
            self._enter(segment, part.pack or pack)

    def _enter(self, segment: PathSegment, pack: Pack) -> None:
        """Read a segment, also a second time where another has taken its place."""
        piece = cut_part(pack, segment.begin, segment.end, segment.predicting)
        with torch.no_grad(), self.network.uncounted():
            states = self.calls.run(lambda: self.memory.enter(piece, segment.begin))
        if segment not in self.steps:
            self.steps[segment] = _Step(piece, states, segment.num_readers)
        self.path.append(segment)

    def _finish_parts(self) -> None:
        """Read the last pack's parts again, last first, each with a graph, and pass on the gradients of their states."""
        with self._training():
            while self.unfinished:
                part, step = self.unfinished.pop()
                self._go_to(part, step.part, is_left=True)
                with torch.enable_grad():
                    states = self._follow(step.part, part.depth)
                self._backward(states, step.gradient)

    def _return_to(self, count: int) -> None:
        """Leave all but the first `count` segments of the path, which nothing will follow any more."""
        with self._training():
            while len(self.path) > count:
                segment = self.path.pop()
                step = self.steps.pop(segment)
                if self.learns:
                    self._differentiate(segment, step)

    def _differentiate(self, segment: PathSegment, step: _Step) -> None:
        """Read a segment again, with a graph, and pass on the gradients that its states and what it leaves have received."""
        pairs = list[tuple[Tensor, Tensor]]()

        def work() -> Tensor:
            states, left = self.memory.recompute(step.part, segment.begin)
            pairs.extend(left)
            return states

        with torch.enable_grad():
            states = self.calls.run(work)
        self._backward(states, step.gradient, pairs)

    def _backward(self, states: Tensor, gradient: Tensor | None, pairs: Sequence[tuple[Tensor, Tensor]] = ()) -> None:
        """Pass on the gradients of a call's states and of what it leaves."""
        if gradient is None and self.calls.keeps_order:
            gradient = torch.zeros_like(states)
        if gradient is not None:
            pairs = [(states, gradient.to(states.dtype)), *pairs]
        if pairs := [(x, gradient) for x, gradient in pairs if x.requires_grad]:
            torch.autograd.backward([x for x, _ in pairs], [gradient for _, gradient in pairs])

    @contextmanager
    def _training(self) -> Iterator[None]:
        """Enclose passes that are differentiated at once."""
        was_training = self.backbone.training
        self.backbone.train(self.recomputes)
        try:
            yield
        finally:
            self.backbone.train(was_training)


def _cut_own(part: PackPart, pack: Pack) -> Pack:
    """Return what a part reads behind its path."""
    texts = part.pack or pack
    return cut_part(texts, part.depth, len(texts.ids))


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
        parts=(),
        path_readers=None,
    )
