"""Context parallelism: the nodes of a pack divided between neighbouring ranks, a long text's too.

Everything but attention acts on each node alone, so a rank calls the model with its own nodes. In each layer the ranks exchange
what attention needs, with gradients on the way back: the keys and values of all nodes, of which a rank's queries read those that
the tree lets them see (Llama Team 2024, arXiv:2407.21783, sec. 3.3.2); or, where that moves less, all nodes of some heads (Jacobs
et al. 2023, DeepSpeed-Ulysses, arXiv:2309.14509, sec. 3.1). Each rank then computes the log-probabilities that its nodes predict.
Their sum over the ranks is what the equation reads, the same in all of them, and each takes the gradient of its own part.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from policygrad.errors import ConfigError
from policygrad.learners.local.packing import Pack
from policygrad.learners.local.prefix_attention import attend_in_parts, check_options
from policygrad.learners.local.tree_attention import AttentionTree, Ints, attend_by_flex, tree_attention
from policygrad.models.loading import at_least_float32

_SLICES = 4  # of the nodes, for each rank: an even number balances a single text exactly
_OF_LENGTH = ("dynamic", "longrope")  # positions that are rotated otherwise where the longest text of a call is long


def check_context_parallel(model: Any, size: int, reads_tree: bool) -> None:
    """Check that the model's nodes can be divided between `size` ranks. Raises ConfigError for layers that mix nodes otherwise than
    by attention, or depend on all of a call's nodes.

    Args:
        reads_tree: Its attention follows a tree (`Network.use_tree`), and nothing else mixes nodes.
    """
    if size == 1:
        return
    name, remedy = type(model).__name__, "leave --learner.context-parallel out"
    if not reads_tree:
        raise ConfigError(
            f"learner.context_parallel={size} needs a model of which attention alone mixes the tokens of a text, by a tree, and "
            f"{name} has other layers (convolutions, states), or an attention of its own: {remedy}"
        )
    if kinds := sorted(set(_find_rope_types(model.config.get_text_config().to_dict())) & {*_OF_LENGTH}):
        raise ConfigError(
            f"learner.context_parallel={size}: {name} rotates positions by the longest text of a call (rope_type {kinds[0]!r}), "
            f"and each process calls it with other tokens: {remedy}"
        )


def _find_rope_types(settings: object) -> Iterator[str]:
    if isinstance(settings, dict):
        for key, value in settings.items():
            if key in ("rope_type", "type") and isinstance(value, str):
                yield value
            yield from _find_rope_types(value)


@dataclass(frozen=True, eq=False)
class ContextGroup:
    """The ranks that divide packs between them, as one of them sees it."""

    group: dist.ProcessGroup
    rank: int  # in the group
    size: int

    def divide(self, part: Pack, reads_tree: bool) -> Pack:
        """Return this rank's nodes of a pack, with the tokens that they predict; what π_ref reads of its own remains whole.

        A pack with pictures, or one that is read as texts (`reads_tree` = False), is read whole by each rank, and counts in one.
        """
        if not reads_tree or part.slots is not None:
            counted = torch.full_like(part.ids, self.rank == 0, dtype=torch.bool)
            return replace(_keep_tokens(part, part.mask & (self.rank == 0)), counted=counted)
        shares = divide_nodes(part.tree.depths() + 1, self.size)
        width, own = max(1, max(map(len, shares))), shares[self.rank]
        is_empty = not len(own)
        if is_empty:  # a node that counts elsewhere, for the calls to have one
            own = np.zeros(1, dtype=np.int64)
        owner, place = np.zeros((2, len(part.ids)), dtype=np.int64)
        sources = np.zeros(self.size * width, dtype=np.int64)
        for rank, share in enumerate(shares):
            owner[share], place[share] = rank, np.arange(len(share))
            sources[rank * width : rank * width + len(share)] = share
        nodes, owners, places, order, all_sources = (
            part.tree.convert(torch.from_numpy(x)) for x in (own, owner, place, owner * width + place, sources)
        )
        attention = DividedAttention(self, width, order, all_sources, part.tree, replace(part.tree, queries=own))
        is_mine = owners[part.predicting_nodes] == self.rank
        divided = _keep_tokens(part, part.mask & is_mine[part.predictor])
        mine = places[part.predicting_nodes[is_mine]]
        number = is_mine.cumsum(0) - 1  # of each state among those of this rank
        return replace(
            divided,
            ids=part.ids[nodes],
            positions=part.positions[nodes],
            predicting_nodes=mine if len(mine) else mine.new_zeros(1),
            predictor=torch.where(divided.mask, number[part.predictor], 0),
            reads=part.reads[nodes],
            routes=None if part.routes is None else part.routes[nodes],
            counted=torch.zeros_like(nodes, dtype=torch.bool) if is_empty else None,
            tree=replace(part.tree, attend=attention),
        )

    def add_up(self, x: Tensor) -> Tensor:
        """Return the sum over the ranks, the same tensor in each. Each rank differentiates what it has put in."""
        return _Sum.apply(x, self.group)  # type: ignore[no-any-return,no-untyped-call]

    def gather(self, x: Tensor) -> Tensor:
        """Return the rows of all ranks [R·n, W], rank by rank; their gradients are summed over the ranks."""
        return _Gather.apply(x, self)  # type: ignore[no-any-return,no-untyped-call]

    def exchange(self, x: Tensor) -> Tensor:
        """Send x[r] to rank r, [R, n, W]; return what each rank has sent to this one."""
        return _Exchange.apply(x, self.group)  # type: ignore[no-any-return,no-untyped-call]


def divide_nodes(cost: Ints, size: int) -> list[Ints]:
    """Return each rank's nodes, ascending, given how many keys each node attends to.

    Slices of equal length are dealt out to and fro, the dearest first, so that all ranks have equally many nodes and about the same
    cost: of a single text exactly.
    """
    slices = np.array_split(np.arange(len(cost)), _SLICES * size)
    dealt: list[list[Ints]] = [[] for _ in range(size)]
    for turn, chosen in enumerate(np.argsort([-cost[nodes].sum() for nodes in slices], kind="stable")):
        cycle, at = divmod(turn, size)
        dealt[at if cycle % 2 == 0 else size - 1 - at].append(slices[chosen])
    return [np.sort(np.concatenate(chosen)) for chosen in dealt]


def _keep_tokens(part: Pack, mask: Tensor) -> Pack:
    """Return a pack of which only the tokens on a mask [b, T] are predicted."""
    left, top, reference = part.sampling_mask, part.reference_top, part.reference
    return replace(
        part,
        mask=mask,
        tokens=torch.where(mask, part.tokens, 0),
        sampling_mask=None if left is None else left.select(mask[part.mask]),
        reference_top=None if top is None else top.select(mask[part.mask]),
        reference=None if reference is None else replace(reference, mask=mask),
    )


@dataclass(frozen=True, eq=False)
class DividedAttention:
    """Attention of nodes that the ranks of a group have divided, as `AttentionTree.attend`."""

    context: ContextGroup
    width: int
    """Rows that each rank sends: the nodes of the one that has most, padded."""
    order: Tensor  # [N] the row of each node among those of all ranks
    sources: Tensor  # [R·width] the node of each row; any where it is padding
    whole: AttentionTree
    own: AttentionTree  # the same, in which this rank's nodes alone attend

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        tree: AttentionTree,
        use_flex: bool = True,
        **options: Any,
    ) -> Tensor:
        """Return [1, H, n, D] of this rank's n nodes."""
        check_options(options, "nodes that processes divide")
        heads, shared, size = query.shape[1], key.shape[1], self.context.size
        # what is sent: queries, keys, values and results of a rank's nodes, or the keys and values of all
        moves_less = shared % size == 0 and heads + shared <= size * shared
        if moves_less:
            return self._attend_by_heads(module, query, key, value, use_flex=use_flex, **options)
        every = self.context.gather(torch.cat([self._as_rows(x) for x in (key, value)], 1)).index_select(0, self.order)
        split = shared * key.shape[3]
        key, value = (_as_heads(x, shared) for x in (every[:, :split], every[:, split:]))
        out = attend_by_flex(query, key, value, self.own, **options) if use_flex else None
        if out is not None:
            return out
        scale = query.shape[-1] ** -0.5 if (given := options.get("scaling")) is None else given
        window, sinks = options.get("sliding_window"), options.get("s_aux")
        return attend_in_parts(query, key, value, self.own, scale=scale, window=window, sinks=sinks)

    def _attend_by_heads(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, s_aux: Tensor | None = None, **options: Any
    ) -> Tensor:
        size, count = self.context.size, query.shape[2]
        inputs = query, key, value
        chunks = [torch.stack([self._as_rows(y) for y in x.chunk(size, 1)]) for x in inputs]
        rows = self.context.exchange(torch.cat(chunks, 2)).flatten(0, 1).index_select(0, self.order)
        parts = torch.split(rows, [x.shape[2] for x in chunks], 1)
        q, k, v = (_as_heads(part, x.shape[1] // size) for part, x in zip(parts, inputs, strict=True))
        sinks = None if s_aux is None else s_aux.chunk(size)[self.context.rank]
        out, _ = tree_attention(module, q, k, v, None, self.whole, s_aux=sinks, **options)
        back = out[0].flatten(1).index_select(0, self.sources).view(size, self.width, -1)
        own = self.context.exchange(back)[:, :count].transpose(0, 1)  # [n, R, heads of each · D]
        return _as_heads(own.flatten(1), query.shape[1])

    def _as_rows(self, x: Tensor) -> Tensor:
        """Return [width, heads·D] of x [1, heads, n, D], padded."""
        rows = x[0].transpose(0, 1).flatten(1)
        return F.pad(rows, (0, 0, 0, self.width - len(rows)))


def _as_heads(rows: Tensor, heads: int) -> Tensor:
    """Return [1, heads, n, D] of [n, heads·D]."""
    return rows.view(len(rows), heads, -1).transpose(0, 1)[None]


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = x.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, context: ContextGroup) -> Tensor:
        ctx.context = context
        every = x.new_empty(context.size * len(x), x.shape[1])
        _all_gather(every, x.contiguous(), group=context.group)
        return every

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        wide = at_least_float32(grad).contiguous()
        own = wide.new_empty(len(wide) // ctx.context.size, wide.shape[1])
        _reduce_scatter(own, wide, group=ctx.context.group)
        return own.to(grad.dtype), None


# by their names since torch 2.13, or those before
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        received = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, x.contiguous(), group=group)
        return received

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        returned = torch.empty_like(grad, memory_format=torch.contiguous_format)
        dist.all_to_all_single(returned, grad.contiguous(), group=ctx.group)
        return returned, None
