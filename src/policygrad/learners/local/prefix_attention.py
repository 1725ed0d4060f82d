"""Attention of texts to a common beginning whose keys are kept elsewhere, and to themselves; exact in both passes.

A softmax over all keys is that of its parts, merged by their log-sums:

    out = Σ_i exp(lse_i − lse) · out_i,   lse = log Σ_i exp(lse_i)

With `out` and `lse` known, the gradient of a part needs nothing of the others: P = exp(s − lse), ds = P ∘ (dP − Σ dout ∘ out). So
the beginning is read where it lies, once for all texts and without a copy for each head, and its gradients are added up there.
Source: Juravsky et al. 2024 (Hydragen), arXiv:2402.05099, sec. 3.1; Liu et al. 2023 (ring attention), arXiv:2310.01889, for the
gradient by parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from policygrad.learners.local.tree_attention import AttentionTree, gather_nodes
from policygrad.models.loading import at_least_float32

_MAX_SCORES = 2**24  # scores that are written out at once, where no kernel does it otherwise


def check_options(options: Mapping[str, Any], what: str) -> None:
    """Raise NotImplementedError for options of attention that change its scores, which `what` does not know."""
    if unknown := [name for name in ("softcap", "position_bias", "head_mask") if options.get(name) is not None]:
        raise NotImplementedError(f"{what} do not know attention with {', '.join(unknown)}")


@dataclass(eq=False)
class KeyBuffers:
    """Keys and values [1, h, C, D] of a layer, of which the first ones are in use, and their gradients so far."""

    keys: Tensor
    values: Tensor
    key_gradients: Tensor | None = None
    """[1, h, C, D] in float32 or better; None = nobody learns."""
    value_gradients: Tensor | None = None

    @classmethod
    def allocate(cls, key: Tensor, value: Tensor, capacity: int, learns: bool) -> KeyBuffers:
        """Make room for `capacity` tokens of a layer with such keys and values [1, h, n, D]."""

        def room(like: Tensor, zero: bool = False) -> Tensor:
            shape = (*like.shape[:2], capacity, like.shape[3])
            return at_least_float32(like[:0]).new_zeros(shape) if zero else like.new_empty(shape)

        buffers = cls(room(key.detach()), room(value.detach()))
        if learns:
            buffers.key_gradients, buffers.value_gradients = room(key.detach(), True), room(value.detach(), True)
        return buffers

    def store(self, key: Tensor, value: Tensor, begin: int) -> None:
        """Keep the keys and values [1, h, n, D] of the tokens from `begin` on."""
        end = begin + key.shape[2]
        self.keys[:, :, begin:end], self.values[:, :, begin:end] = key.detach(), value.detach()

    def pop_gradients(self, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """Return the gradients of these tokens' keys and values, which are 0 afterwards."""
        assert self.key_gradients is not None
        assert self.value_gradients is not None
        popped = list[Tensor]()
        for gradients, like in ((self.key_gradients, self.keys), (self.value_gradients, self.values)):
            popped.append(gradients[:, :, begin:end].to(like.dtype, copy=True))
            gradients[:, :, begin:end] = 0
        return popped[0], popped[1]


def attend_after(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    buffers: KeyBuffers,
    length: int,
    tree: AttentionTree,
    *,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return [1, H, N, D]: the nodes of a tree attend to the first `length` kept tokens and along the tree's paths.

    Args:
        query, key, value: [1, heads, N, width] of the tree's nodes; of keys and values also fewer heads.
        window: A token sees itself and the `window` − 1 tokens before it; None = all before it.
        sinks: [H] a score of each head that takes a share of the softmax and gives nothing.
    """
    parts = _Parts(buffers, length, tree, window, scale)
    return _AttendAfter.apply(query, key, value, sinks, parts)  # type: ignore[no-any-return,no-untyped-call]


def attend_in_parts(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tree: AttentionTree,
    *,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the same [1, H, n, D] of a tree that follows nothing, without a mask or a head's copy of keys for the backward pass.

    Args:
        query: [1, H, n, width] of `tree.queries`, or of all nodes.
    """
    parts = _Parts(None, 0, tree, window, scale)
    return _AttendAfter.apply(query, key, value, sinks, parts)  # type: ignore[no-any-return,no-untyped-call]


@dataclass(frozen=True, eq=False)
class _Parts:
    """What the nodes of a tree attend to."""

    buffers: KeyBuffers | None  # None = nothing but the tree
    length: int
    tree: AttentionTree
    window: int | None
    scale: float

    def beginning(self, device: torch.device) -> tuple[slice, Tensor | None, Tensor | None]:
        """Return the kept tokens that some node sees, the nodes [n] that see any (None = all), and their mask [1, 1, n, k] (None =
        they see all)."""
        window, length = self.window, self.length
        if self.buffers is None:
            return slice(0), torch.zeros(0, dtype=torch.int64, device=device), None
        depth = torch.from_numpy(self.tree.depths()).to(device)
        if window is None or window > length + int(self.tree.lengths.max()) - 1:
            return slice(0, length), None, None
        first = max(0, length - window + 1)
        nodes = (depth < window - 1).nonzero().squeeze(1)
        position = torch.arange(first, length, device=device)
        return slice(first, length), nodes, (position > length + depth[nodes, None] - window)[None, None]


class _AttendAfter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, parts: _Parts) -> Tensor:
        buffers, scale = parts.buffers, parts.scale
        # the tree's own nodes
        blocks, output_index = parts.tree.blocks(parts.window)
        outs, sums = list[Tensor](), list[Tensor]()
        for b in blocks:
            q, k, v = (gather_nodes(x, nodes) for x, nodes in ((query, b.queries), (key, b.keys), (value, b.keys)))
            out, lse = _attend(q, k, v, b.mask, scale, is_causal=b.mask is None)
            outs.append(out.transpose(1, 2).flatten(0, 1))
            sums.append(lse.transpose(1, 2).flatten(0, 1))
        out = at_least_float32(torch.cat(outs).index_select(0, output_index).transpose(0, 1)[None])  # [1, H, N, D]
        lse = torch.cat(sums).index_select(0, output_index).T[None]  # [1, H, N]
        # and what they follow
        tokens, nodes, mask = parts.beginning(query.device)
        if buffers is not None and (nodes is None or len(nodes)):
            q = query if nodes is None else query.index_select(2, nodes)
            before, before_lse = _attend(q, buffers.keys[:, :, tokens], buffers.values[:, :, tokens], mask, scale)
            places = slice(None) if nodes is None else nodes
            tree_out, tree_lse = out[:, :, places], lse[:, :, places]
            total = torch.logaddexp(tree_lse, before_lse)
            out[:, :, places] = (
                tree_out * (tree_lse - total).exp()[..., None] + before * (before_lse - total).exp()[..., None]
            )
            lse[:, :, places] = total
        if sinks is not None:
            total = torch.logaddexp(lse, sinks.to(lse.dtype)[None, :, None])
            out, lse = out * (lse - total).exp()[..., None], total
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, sinks, out, lse)
        ctx.parts = parts
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, out, lse = ctx.saved_tensors
        parts: _Parts = ctx.parts
        buffers, scale = parts.buffers, parts.scale
        dq, dk, dv = (at_least_float32(torch.zeros_like(x)) for x in (query, key, value))
        blocks, output_index = parts.tree.blocks(parts.window)
        total, heads = sum(b.queries.numel() for b in blocks), query.shape[1]
        placed = grad.new_zeros(total, heads, grad.shape[-1])  # 0 where a block queries a node that counts elsewhere
        placed.index_copy_(0, output_index, grad[0].transpose(0, 1))
        start = 0
        for b in blocks:
            end = start + b.queries.numel()
            g = placed[start:end].view(*b.queries.shape, heads, -1).transpose(1, 2)
            q, o = gather_nodes(query, b.queries), gather_nodes(out, b.queries)
            k, v = gather_nodes(key, b.keys), gather_nodes(value, b.keys)
            sums = gather_nodes(lse[..., None], b.queries)[..., 0]
            gradients = _differentiate(g, q, k, v, b.mask, scale, o, sums, is_causal=b.mask is None)
            for x, gradient, nodes in zip((dq, dk, dv), gradients, (b.queries, b.keys, b.keys), strict=True):
                rows = gradient.transpose(1, 2).flatten(0, 1).to(x.dtype)
                x[0].transpose(0, 1).index_add_(0, nodes.flatten(), rows)
            start = end
        tokens, seeing, mask = parts.beginning(query.device)
        if buffers is not None and (seeing is None or len(seeing)):
            g, q, o, sums = (x if seeing is None else x.index_select(2, seeing) for x in (grad, query, out, lse))
            k, v = buffers.keys[:, :, tokens], buffers.values[:, :, tokens]
            gq, gk, gv = _differentiate(g, q, k, v, mask, scale, o, sums)
            if seeing is None:
                dq += gq
            else:
                dq.index_add_(2, seeing, gq.to(dq.dtype))
            if buffers.key_gradients is not None and buffers.value_gradients is not None:
                buffers.key_gradients[:, :, tokens] += gk
                buffers.value_gradients[:, :, tokens] += gv
        d_sinks: Tensor | None = None
        if sinks is not None:
            share = (sinks.to(lse.dtype)[None, :, None] - lse).exp()
            d_sinks = -(share * (at_least_float32(grad) * out).sum(-1)).sum((0, 2)).to(sinks.dtype)
        return dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype), d_sinks, None


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, *, is_causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Return [b, H, m, D] attention and [b, H, m] its log-sum, of q [b, H, m, D] to k and v [b, h, n, D], h ≤ H.

    Args:
        mask: [b or 1, 1, m, n] True = visible; None = all, or with `is_causal` those up to the query's own position. A query sees
            at least one key.
    """
    q, k, v, folded_mask, unfold = _fold_heads(q, k, v, mask, is_causal)
    if _has_kernel(q, v):
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = kernel(q, k, v, 0.0, is_causal, attn_mask=_as_bias(folded_mask, q), scale=scale)
        return unfold(out), unfold(lse)
    out, lse = v.new_empty(*q.shape[:3], v.shape[3]), at_least_float32(q[..., 0]).clone()
    for rows in _chunks(q, k):
        scores = _scores(q, k, folded_mask, scale, is_causal, rows)
        lse[:, :, rows] = scores.logsumexp(-1)
        out[:, :, rows] = (scores - lse[:, :, rows, None]).exp_().to(v.dtype) @ v
    return unfold(out), unfold(lse)


def _differentiate(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    out: Tensor,
    lse: Tensor,
    *,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, given those of the whole attention: of which `out` and `lse` are the result."""
    heads = k.shape[1]
    q, k, v, folded_mask, unfold = _fold_heads(q, k, v, mask, is_causal)
    (grad, out, lse), repeats = (_fold(x, q.shape) for x in (grad, out, lse)), k.shape[1] // heads
    if _has_kernel(q, v):
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        bias = _as_bias(folded_mask, q)
        dq, dk, dv = kernel(grad, q, k, v, out, lse, 0.0, is_causal, attn_mask=bias, scale=scale)
    else:
        delta = (at_least_float32(grad) * out).sum(-1, keepdim=True)
        dq, dk, dv = (at_least_float32(torch.zeros_like(x)) for x in (q, k, v))
        for rows in _chunks(q, k):
            p = (_scores(q, k, folded_mask, scale, is_causal, rows) - lse[:, :, rows, None]).exp_()
            g = grad[:, :, rows]
            dv += p.to(g.dtype).mT @ g
            ds = ((g @ v.mT) - delta[:, :, rows]).mul_(p).mul_(scale).to(q.dtype)
            dq[:, :, rows] = ds @ k
            dk += ds.mT @ q[:, :, rows]
    if repeats > 1:
        dk, dv = (x.unflatten(1, (heads, repeats)).sum(2) for x in (dk, dv))
    return unfold(dq), dk, dv


def _fold_heads(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> tuple[Any, ...]:
    """Return queries, keys and values with as many heads each, the mask, and what undoes it for a result.

    Queries of heads that share their keys become queries of one head; where each sees up to its own position the keys are repeated.
    """
    heads, shared = q.shape[1], q.shape[1] // k.shape[1]
    if shared == 1 or is_causal:
        if shared > 1:
            k, v = (x.repeat_interleave(shared, 1) for x in (k, v))
        return q, k, v, mask, lambda x: x
    length = q.shape[2]
    folded = q.reshape(q.shape[0], k.shape[1], shared * length, q.shape[3])
    return (
        folded,
        k,
        v,
        None if mask is None else mask.repeat(1, 1, shared, 1),
        (lambda x: x.reshape(x.shape[0], heads, length, *x.shape[3:])),
    )


def _fold(x: Tensor, shape: torch.Size) -> Tensor:
    """Return a value of each query in the shape that `_fold_heads` gives the queries."""
    return x.reshape(*shape[:3], *x.shape[3:])


def _has_kernel(q: Tensor, v: Tensor) -> bool:
    return q.device.type == "cpu" and q.shape[-1] == v.shape[-1] and q.dtype in (torch.float32, torch.float64)


def _as_bias(mask: Tensor | None, q: Tensor) -> Tensor | None:
    return None if mask is None else q.new_zeros(mask.shape).masked_fill_(~mask, -torch.inf)


def _chunks(q: Tensor, k: Tensor) -> Iterator[slice]:
    size = max(1, _MAX_SCORES // (q.shape[0] * q.shape[1] * k.shape[2]))
    return (slice(start, start + size) for start in range(0, q.shape[2], size))


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, scale: float, is_causal: bool, rows: slice) -> Tensor:
    """Return [b, h, m, n] in float32 or better, −∞ where nothing is seen."""
    scores = at_least_float32(q[:, :, rows] @ k.mT).mul_(scale)
    visible = q.new_ones(q.shape[2], k.shape[2], dtype=torch.bool).tril_()[None, None] if is_causal else mask
    return scores if visible is None else scores.masked_fill_(~visible[:, :, rows], -torch.inf)
