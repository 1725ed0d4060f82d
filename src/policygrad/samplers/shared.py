"""Decoding attention over keys that completions of one context share: the context's stand once, each completion's own beside them.

softmax over [context, own] is taken in one go, from scores that are computed apart, so the result is that of plain attention.
Reading a context once for all its completions instead of once for each: Juravsky et al. 2024 (Hydragen), arXiv:2402.05099.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from policygrad.models.precision import at_least_float32
from policygrad.samplers import cache

_FIRST = 8
"""Tokens that memory is taken for at first; then twice as many."""
_EVEN = 32


def even(keys: Tensor) -> int:
    """Columns of their own that rows are computed with: a multiple of this. In half precision oneDNN compiles a product anew for
    every shape that it meets, and keeps it, which would be every length."""
    return _EVEN if keys.dtype.itemsize < 4 and keys.device.type == "cpu" else 1


class UnsupportedError(NotImplementedError):
    """The model does something else with its keys than hand them to `scaled_dot_product_attention`."""


@dataclass(eq=False)
class Layout:
    """What all layers have in common: which context each row goes on from, and what it may see."""

    place: Tensor | None
    """[N] int64, the row's place in a grid [contexts, most]; None: row i stands at place i, and the grid is full."""
    contexts: int
    most: int
    """Rows of the context that has most of them."""
    hidden: Tensor
    """[N, 1, 1, L + capacity], added to scores: −∞ where a row must not look, first the context's columns, then its own."""
    length: int
    """Columns L of the contexts, padded on the left."""
    used: int = 0
    """Columns of their own that rows have filled so far."""

    def spread(self, x: Tensor) -> Tensor:
        """[N, H, G, D] of rows to [contexts, H, most·G, D]; 0 where a context has fewer rows."""
        _, heads, each, width = x.shape
        if self.place is not None:
            x = x.new_zeros(self.contexts * self.most, heads, each, width).index_copy_(0, self.place, x)
        return x.view(self.contexts, self.most, heads, each, width).transpose(1, 2).flatten(2, 3)

    def gather(self, x: Tensor) -> Tensor:
        """The way back."""
        contexts, heads, rows, width = x.shape
        x = x.view(contexts, heads, self.most, rows // self.most, width).transpose(1, 2).flatten(0, 1)
        return x if self.place is None else x.index_select(0, self.place)


class _Shared(Tensor):
    """Keys or values of one layer, of which attention alone may be taken: anything else would be computed from half."""

    layer: SharedLayer
    times: int | None
    """While a head is being written out for each of its queries, how often; 0 where nobody has said it yet."""

    @classmethod
    def of(cls, own: Tensor, layer: SharedLayer, times: int | None = None) -> _Shared:
        found = own.as_subclass(cls)
        found.layer, found.times = layer, times
        return found

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("__get__", "size", "dim"):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func is F.scaled_dot_product_attention:
            return _attend(*args, **(kwargs or {}))
        if isinstance(args[0], _Shared) and (found := args[0]._repeated(name, args[1:])) is not None:
            return found
        raise UnsupportedError(f"{func} on keys that are shared")

    def _repeated(self, name: str, words: tuple[Any, ...]) -> _Shared | None:
        """A step of x[:, :, None].expand(N, H, n, L, D).reshape(N, n·H, L, D), by which transformers 5.17 gives each query a
        head of its own. `_attend` needs none of it: nothing is written out. None: it is no such step."""
        every, (rows, heads, used, width) = slice(None), self.shape
        times = self.times
        if name == "__getitem__" and times is None and words == ((every, every, None, every, every),):
            return _Shared.of(self, self.layer, 0)
        if name == "expand" and times == 0 and len(words) == 5 and words == (rows, heads, words[2], used, width):
            return _Shared.of(self, self.layer, int(words[2]))
        if name == "reshape" and times and words == (rows, heads * times, used, width):
            return _Shared.of(self, self.layer)
        return None


class SharedLayer(DynamicLayer):  # type: ignore[no-untyped-call]  # transformers' own __init_subclass__
    """Keys [C, H, D, L] and values [C, H, L, D] of contexts, and both of what rows drew since [rows, H, capacity, D]."""

    def __init__(self, keys: Tensor, values: Tensor, rows: int, layout: Layout) -> None:
        """keys, values: of the contexts, [C, H, L, D]."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.layout, self.context = layout, (keys.transpose(2, 3).contiguous(), values.contiguous())
        self.own = tuple(x.new_zeros(rows, x.shape[1], _FIRST, x.shape[3]) for x in (keys, values))
        self.even = even(keys)
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True

    def get_seq_length(self) -> int:
        return self.layout.length + self.layout.used

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        rows, at = len(key_states), self.layout.used
        read = self._columns(at)
        if (
            at == self.own[0].shape[2]
        ):  # twice as much, for the rows that are left; pages that nobody fills are not touched
            self.own = tuple(cache.roomy(x[:rows], None, min(at, cache.ROOM)) for x in self.own)
        columns = self._columns(at + 1)
        for held, new in zip(self.own, (key_states, value_states), strict=True):
            if columns > max(read, at + 1):  # read from now on, and hidden columns have to be finite
                held[:, :, at:columns] = 0
            held[:rows, :, at : at + 1] = new
        self.keys, self.values = (_Shared.of(x[:rows, :, :columns], self) for x in self.own)
        return self.keys, self.values

    def _columns(self, used: int) -> int:
        """That are computed with, where so many are used."""
        return min(-(-used // self.even) * self.even, self.own[0].shape[2])

    def move(self, target: Tensor, source: Tensor) -> None:
        """Rows at `source` take the places `target`."""
        for held in self.own:
            held[target, :, : self.layout.used] = held[source, :, : self.layout.used]

    def shift(self, columns: int) -> None:
        """The first `columns` of rows' own, which nobody looks at, make room."""
        used = self.layout.used
        for held in self.own:
            held[:, :, : used - columns] = held[:, :, columns:used].clone()

    def keep_contexts(self, kept: Tensor) -> None:
        """These contexts alone."""
        self.context = tuple(x.index_select(0, kept) for x in self.context)  # type: ignore[assignment]

    def join(self, keys: Tensor, values: Tensor, rows: slice) -> None:
        """More contexts, whose rows stand at `rows`: what these were before is finite, as hidden columns have to be."""
        width = max(self.context[1].shape[2], keys.shape[2])
        held, new = self.context, (keys.transpose(2, 3), values)
        self.context = (
            torch.cat([F.pad(x[0], (width - x[0].shape[3], 0)) for x in (held, new)]),
            torch.cat([F.pad(x[1], (0, 0, width - x[1].shape[2], 0)) for x in (held, new)]),
        )
        if (missing := rows.stop - len(self.own[0])) > 0:
            self.own = tuple(torch.cat([x, x.new_empty(missing, *x.shape[1:])]) for x in self.own)
        for x in self.own:
            x[rows, :, : self._columns(self.layout.used)] = 0


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(scale · q kᵀ) v, [N, Hq, 1, D] or [N, H, Hq / H, D] as `query` is, one token a row.

    A row sees what `Layout.hidden` lets it, not `attn_mask`, which has to be the [N, 1, 1, 1] that the model was given.
    """
    if not isinstance(key, _Shared) or not isinstance(value, _Shared) or isinstance(query, _Shared):
        raise UnsupportedError("keys and values that are not both shared")
    if key.times is not None or value.times is not None:
        raise UnsupportedError("heads that are written out in part")
    if is_causal or dropout_p or attn_mask is None or attn_mask.shape[-1] != 1 or attn_mask.dtype != torch.bool:
        raise UnsupportedError("attention with a mask that is not the one that was handed in")
    layout, context = key.layer.layout, key.layer.context
    with torch._C.DisableTorchFunctionSubclass():
        keys, values = key.as_subclass(Tensor), value.as_subclass(Tensor)
        rows, heads, used, width = keys.shape
        q = (query * (width**-0.5 if scale is None else scale)).reshape(rows, heads, -1, width)
        shared = layout.gather(layout.spread(q) @ context[0])
        # keys are read as they lie; q kᵀ copies them first, where their format is half as wide
        own = (keys @ q.transpose(2, 3)).transpose(2, 3)
        scores = at_least_float32(torch.cat([shared, own], -1))
        scores += layout.hidden[..., : layout.length + used]
        p = scores.softmax(-1).to(values.dtype)
        out = p[..., layout.length :] @ values
        out += layout.gather(layout.spread(p[..., : layout.length]) @ context[1])
        return out.reshape(*query.shape[:-1], values.shape[-1])
