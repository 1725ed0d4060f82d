"""Which texts are read in one pass, and what they follow: memory grows with length by keys and values alone.

A tree of texts is cut: what several passes follow is a path of segments, and each pass reads a small tree behind a path. A
segment is read once without a graph and leaves its keys and values, and the states that predict something. Passes take these as
leaves. When the last pass behind a segment is done, the segment is read again with a graph, and one backward pass takes the
gradients that its keys, values and states have received. So what passes read is computed once, and what they follow twice, as
checkpoints do; a gradient is that of whole texts. Source: the chain rule; arXiv:2606.01143 schedules the same, text by text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from policygrad.learners.local.tree_attention import Ints

LEAST_SEGMENT = 64  # tokens: fewer are read again by each pass that follows them


@dataclass(eq=False)
class PathSegment:
    """Tokens `begin` to `end` of a path of texts, and what passes read of it, which is noted while they are laid out."""

    begin: int
    end: int
    predicting: NDArray[np.bool_] = field(init=False)
    """[end − begin] which of them predict a token in some pass."""
    num_readers: int = 0
    """Passes in which some of them do."""

    def __post_init__(self) -> None:
        self.predicting = np.zeros(self.end - self.begin, dtype=bool)


@dataclass(frozen=True, eq=False)
class PassPlan:
    """Texts that are read in one pass, behind a path."""

    texts: Ints
    path: tuple[PathSegment, ...]
    parts: tuple[PassPlan, ...] = ()
    """Several = one completion's texts that have too many tokens for a pass: those of each part are read behind a path of its own,
    and the loss is that of all."""

    def move(self, count: int) -> PassPlan:
        """Return the plan of the texts `count` further on."""
        return PassPlan(self.texts + count, self.path, tuple(part.move(count) for part in self.parts))


def plan_passes(lengths: Ints, shared: Ints, units: Ints, budget: int) -> list[PassPlan]:
    """Divide texts into passes of at most `budget` tokens of their own. A segment has two tokens or more, as one is a step of
    decoding to a model with a cache, which knows no gradient: a pass may have one more than the budget where that leaves none.

    Args:
        lengths: [n] tokens of the texts, neighbours of which have the longest common beginnings.
        shared: [n] how many each has in common with the one before it.
        units: [n] texts of equal numbers, neighbours, are read in one pass.
    """
    starts = np.flatnonzero(np.diff(units, prepend=units[0] - 1))
    return list(_divide(lengths, shared, np.append(starts, len(units)), max(budget, 3), ()))


def find_saving(lengths: Ints, shared: Ints, units: Ints, budget: int) -> float:
    """Return which share of the tokens passes would read again that follow nothing; 1 where a text is too long for one."""
    if not budget:
        return 0.0
    starts = np.flatnonzero(np.diff(units, prepend=units[0] - 1))
    new_tokens = np.add.reduceat(lengths - shared, starts)
    if (new_tokens + shared[starts]).max() > budget:
        return 1.0
    repeated, used = 0, 0
    for common, more in zip(shared[starts].tolist(), new_tokens.tolist(), strict=True):
        if used and used + more > budget:
            repeated, used = repeated + (common if common >= LEAST_SEGMENT else 0), common
        used += more
    return repeated / int(new_tokens.sum())


def _divide(
    lengths: Ints, shared: Ints, starts: Ints, budget: int, path: tuple[PathSegment, ...]
) -> Iterator[PassPlan]:
    """Divide the units that begin at `starts` (the last entry is their end), all of which follow the path."""
    first, end = int(starts[0]), int(starts[-1])
    depth = path[-1].end if path else 0
    between = shared[first + 1 : end]
    common = int(min(lengths[first:end].min() - 1, between.min(initial=lengths[first])))
    tokens = int(lengths[first] + (lengths - shared)[first + 1 : end].sum()) - depth
    if tokens <= budget:
        yield PassPlan(np.arange(first, end), path)
        return
    is_text = end - first == 1
    if len(starts) == 2 and not is_text:
        yield _divide_unit(lengths, shared, first, end, budget, path)
        return
    room = min(common, max(depth + 2, depth + tokens - budget)) if is_text else common
    if room - depth >= (2 if is_text else LEAST_SEGMENT):
        bounds = np.linspace(depth, room, -(-(room - depth) // budget) + 1).astype(int).tolist()
        path = (*path, *(PathSegment(begin, stop) for begin, stop in pairwise(bounds)))
    if is_text:
        yield PassPlan(np.arange(first, end), path)
        return
    depth = path[-1].end if path else 0
    # units that go on from one another beyond what all have in common stay together
    inner = starts[1:-1]
    least = int(shared[inner].min())
    starts_of_passes = [first, *inner[shared[inner] <= max(least, depth)].tolist(), end]
    begin, used = first, 0
    for start, stop in pairwise(starts_of_passes):
        size = int(lengths[start] + (lengths - shared)[start + 1 : stop].sum()) - depth
        more = size - (max(0, int(shared[start]) - depth) if start > begin else 0)
        if start > begin and used + more > budget:
            yield PassPlan(np.arange(begin, start), path)
            begin, used, more = start, 0, size
        if more > budget and start == begin:
            yield from _divide(lengths, shared, starts[(starts >= start) & (starts <= stop)], budget, path)
            begin, used = stop, 0
        else:
            used += more
    if begin < end:
        yield PassPlan(np.arange(begin, end), path)


def _divide_unit(
    lengths: Ints, shared: Ints, first: int, end: int, budget: int, path: tuple[PathSegment, ...]
) -> PassPlan:
    """Plan the pass of a completion's texts, which follow the path and have too many tokens: in parts."""
    parts = tuple(_divide(lengths, shared, np.arange(first, end + 1), budget, path))
    if len(parts) == 1:
        return parts[0]
    return PassPlan(np.arange(first, end), (), parts)


@dataclass(frozen=True, eq=False)
class StateSource:
    """Where some of a pass's states come from: the tokens `places` of a segment predict the pass's nodes numbers `which`."""

    segment: PathSegment
    which: Ints
    places: Ints


def find_sources(
    predicting: Ints, nodes: Ints, path: Sequence[PathSegment], is_found: NDArray[np.bool_]
) -> tuple[tuple[StateSource, ...], Ints]:
    """Return which of a pass's predicting nodes [u], not found before, lie on a path, and [k] which behind it; all are noted.

    Args:
        nodes: [n] the pass's nodes of a part's texts, in ascending order, those of its path first.
    """
    sources = list[StateSource]()

    def find(begin: int, end: int | None) -> Ints:
        hit = np.isin(predicting, nodes[begin:end]) & ~is_found
        is_found[hit] = True
        return np.flatnonzero(hit)

    for segment in path:
        which = find(segment.begin, segment.end)
        if len(which):
            places = np.searchsorted(nodes, predicting[which]) - segment.begin
            segment.predicting[places] = True
            segment.num_readers += 1
            sources.append(StateSource(segment, which, places))
    return tuple(sources), find(path[-1].end if path else 0, None)
