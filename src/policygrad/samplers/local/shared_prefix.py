"""Decoding attention over keys that completions of one context share: the context's stand once, each completion's own beside them.

softmax over [context, own] is taken in one go, from scores that are computed apart, so the result is that of plain attention.
Reading a context once for all its completions instead of once for each: Juravsky et al. 2024 (Hydragen), arXiv:2402.05099.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer

from policygrad.errors import ModelError
from policygrad.models.loading import at_least_float32
from policygrad.samplers.local import kv_cache
from policygrad.samplers.local.kv_cache import COMPACT_FRACTION, PlainDecodeCache, prefill

_FIRST = 8
"""Tokens that memory is taken for at first; then twice as many."""
_EVEN = 32


def column_alignment(keys: Tensor) -> int:
    """Columns of their own that rows are computed with: a multiple of this. In half precision oneDNN compiles a product anew for
    every shape that it meets, and keeps it, which would be every length."""
    return _EVEN if keys.dtype.itemsize < 4 and keys.device.type == "cpu" else 1


class UnsupportedError(NotImplementedError):
    """The model does something else with its keys than hand them to `scaled_dot_product_attention`."""


@dataclass(eq=False)
class PrefixLayout:
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

    def to_grid(self, x: Tensor) -> Tensor:
        """[N, H, G, D] of rows to [contexts, H, most·G, D]; 0 where a context has fewer rows."""
        _, heads, each, width = x.shape
        if self.place is not None:
            x = x.new_zeros(self.contexts * self.most, heads, each, width).index_copy_(0, self.place, x)
        return x.view(self.contexts, self.most, heads, each, width).transpose(1, 2).flatten(2, 3)

    def from_grid(self, x: Tensor) -> Tensor:
        """The way back."""
        contexts, heads, rows, width = x.shape
        x = x.view(contexts, heads, self.most, rows // self.most, width).transpose(1, 2).flatten(0, 1)
        return x if self.place is None else x.index_select(0, self.place)


class _Shared(Tensor):
    """Keys or values of one layer, of which attention alone may be taken: anything else would be computed from half."""

    layer: SharedPrefixLayer
    times: int | None
    """While a head is being written out for each of its queries, how often; 0 where nobody has said it yet."""

    @classmethod
    def of(cls, own: Tensor, layer: SharedPrefixLayer, times: int | None = None) -> _Shared:
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


class SharedPrefixLayer(DynamicLayer):  # type: ignore[no-untyped-call]  # transformers' own __init_subclass__
    """Keys [C, H, D, L] and values [C, H, L, D] of contexts, and both of what rows drew since [rows, H, capacity, D]."""

    def __init__(self, keys: Tensor, values: Tensor, rows: int, layout: PrefixLayout) -> None:
        """keys, values: of the contexts, [C, H, L, D]."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.layout, self.context = layout, (keys.transpose(2, 3).contiguous(), values.contiguous())
        self.row_buffers = tuple(x.new_zeros(rows, x.shape[1], _FIRST, x.shape[3]) for x in (keys, values))
        self.alignment = column_alignment(keys)
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True

    def get_seq_length(self) -> int:
        return self.layout.length + self.layout.used

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        rows, at = len(key_states), self.layout.used
        read = self._columns(at)
        if (
            at == self.row_buffers[0].shape[2]
        ):  # twice as much, for the rows that are left; pages that nobody fills are not touched
            self.row_buffers = tuple(
                kv_cache.preallocate(x[:rows], None, min(at, kv_cache.GROWTH_TOKENS)) for x in self.row_buffers
            )
        columns = self._columns(at + 1)
        for held, new in zip(self.row_buffers, (key_states, value_states), strict=True):
            if columns > max(read, at + 1):  # read from now on, and hidden columns have to be finite
                held[:, :, at:columns] = 0
            held[:rows, :, at : at + 1] = new
        self.keys, self.values = (_Shared.of(x[:rows, :, :columns], self) for x in self.row_buffers)
        return self.keys, self.values

    def _columns(self, used: int) -> int:
        """That are computed with, where so many are used."""
        return min(-(-used // self.alignment) * self.alignment, self.row_buffers[0].shape[2])

    def move(self, target: Tensor, source: Tensor) -> None:
        """Rows at `source` take the places `target`."""
        for held in self.row_buffers:
            held[target, :, : self.layout.used] = held[source, :, : self.layout.used]

    def shift(self, columns: int) -> None:
        """The first `columns` of rows' own, which nobody looks at, make room."""
        used = self.layout.used
        for held in self.row_buffers:
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
        if (missing := rows.stop - len(self.row_buffers[0])) > 0:
            self.row_buffers = tuple(torch.cat([x, x.new_empty(missing, *x.shape[1:])]) for x in self.row_buffers)
        for x in self.row_buffers:
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
        shared = layout.from_grid(layout.to_grid(q) @ context[0])
        # keys are read as they lie; q kᵀ copies them first, where their format is half as wide
        own = (keys @ q.transpose(2, 3)).transpose(2, 3)
        scores = at_least_float32(torch.cat([shared, own], -1))
        scores += layout.hidden[..., : layout.length + used]
        p = scores.softmax(-1).to(values.dtype)
        out = p[..., layout.length :] @ values
        out += layout.from_grid(layout.to_grid(p[..., : layout.length]) @ context[1])
        return out.reshape(*query.shape[:-1], values.shape[-1])


# Contexts that are read once and kept once, whatever number of completions goes on from each; and whether a model allows it.

_AHEAD = 32
"""Columns that what rows may see is written down for at a time, a multiple of those that layers compute with (`shared`)."""

_FAR = 0.2
"""Of the difference between two texts, and of the spread of logits: an error beyond both is no rounding."""


class SharedPrefixCache:
    """One copy of each context for all its rows; for models all of whose layers keep all keys, and whose attention is sdpa."""

    supports_refill = True

    def __init__(self, model: nn.Module, pad: int) -> None:
        self.model, self.pad = model, pad
        self.device = next(model.parameters()).device
        self.rows = torch.empty(0, dtype=torch.int64, device=self.device)
        self.cache: Any = None
        self.layers: list[SharedPrefixLayer] = []
        self.owner, self.start = self.rows, self.rows  # of each row: its context, and its first own column
        self.seen = torch.empty(0, 0, dtype=torch.int64, device=self.device)  # [C, L], 1 where a context has a token
        self.layout = PrefixLayout(None, 0, 0, torch.empty(0), 0)

    def read(self, contexts: Sequence[Tensor], repeats: Tensor, room: int) -> tuple[Tensor, int]:
        out, seen = prefill(self.model, contexts, self.pad)
        _, held = kv_cache.get_cache(out, self.model)
        if any(type(layer) is not DynamicLayer for layer in held.layers):
            raise UnsupportedError("layers that do not keep all keys, or not keys")
        gap = (seen == 0)[:, None, :, None]
        pairs = [[x.masked_fill(gap, 0) for x in (layer.keys, layer.values)] for layer in held.layers]
        before, new = len(self.owner), int(repeats.sum())
        if before == 0:
            self.layout.used, self.cache = 0, held
            self.layers = [SharedPrefixLayer(k, v, new, self.layout) for k, v in pairs]
            held.layers = list(self.layers)
            self.seen = seen
        else:
            for layer, (k, v) in zip(self.layers, pairs, strict=True):
                layer.join(k, v, slice(before, before + new))
            width = max(self.seen.shape[1], seen.shape[1])
            both = [nn.functional.pad(x, (width - x.shape[1], 0)) for x in (self.seen, seen)]
            self.seen = torch.cat(both)
        ids = torch.arange(len(repeats), device=self.device) + len(self.seen) - len(seen)
        self.owner = torch.cat([self.owner, ids.repeat_interleave(repeats)])
        self.start = torch.cat([self.start, self.start.new_full((new,), self.layout.used)])
        self._arrange()
        return out.logits[:, -1].repeat_interleave(repeats, 0), seen.shape[1]

    def step(self, token: Tensor, position: Tensor) -> Tensor:
        column = self.layout.length + self.layout.used
        if column == self.layout.hidden.shape[-1]:
            more = self.layout.hidden.new_full((len(self.rows), 1, 1, _AHEAD), -torch.inf)
            self.layout.hidden = torch.cat([self.layout.hidden, more], -1)
        self.layout.hidden[..., column] = 0
        out = self.model(
            input_ids=token[:, None],
            attention_mask=torch.ones(len(token), 1, 1, 1, dtype=torch.bool, device=self.device),
            position_ids=position[:, None],
            past_key_values=self.cache,
            use_cache=True,
            return_dict=True,
        )
        self.layout.used += 1
        return out.logits[:, -1]  # type: ignore[no-any-return]

    def keep_rows(self, rows: Tensor) -> Tensor:
        """The last rows take the places of those that leave, so that no others are copied."""
        n = len(rows)
        stays = torch.zeros(len(self.owner), dtype=torch.bool, device=self.device)
        stays[rows] = True
        target = (~stays[:n]).nonzero().squeeze(1)
        order = torch.arange(n, device=self.device)
        if len(target):
            source = stays[n:].nonzero().squeeze(1) + n
            for layer in self.layers:
                layer.move(target, source)
            order[target] = source
        self.owner, self.start = self.owner[order], self.start[order]
        kept, owner = torch.unique(self.owner, return_inverse=True)
        if len(kept) < COMPACT_FRACTION * len(self.seen):
            self.seen, self.owner = self.seen[kept], owner
            for layer in self.layers:
                layer.keep_contexts(kept)
        if n and (unseen := int(self.start.min())) > self.layout.used // 4:
            for layer in self.layers:
                layer.shift(unseen)
            self.layout.used -= unseen
            self.start = self.start - unseen
        if n:
            self._arrange()
        return order

    def _arrange(self) -> None:
        """The layout of the rows as they are now."""
        rows, contexts, width = len(self.owner), len(self.seen), self.seen.shape[1]
        self.rows = torch.arange(rows, device=self.device)
        counts = self.owner.bincount(minlength=contexts)
        most = int(counts.max())
        order = self.owner.argsort(stable=True)
        nth = self.rows - (counts.cumsum(0) - counts)[self.owner[order]]
        place = torch.empty_like(self.rows)
        place[order] = self.owner[order] * most + nth
        full = rows == contexts * most and bool((place == self.rows).all())
        columns = torch.arange((self.layout.used // _AHEAD + 1) * _AHEAD, device=self.device)
        own = (columns < self.start[:, None]) | (columns >= self.layout.used)
        blind = torch.cat([self.seen[self.owner] == 0, own], 1)[:, None, None]
        dtype = torch.promote_types(self.layers[0].dtype, torch.float32)
        self.layout.hidden = torch.zeros(blind.shape, dtype=dtype, device=self.device).masked_fill_(blind, -torch.inf)
        self.layout.place, self.layout.contexts, self.layout.most = None if full else place, contexts, most
        self.layout.length = width


@torch.no_grad()
def supports_shared_prefix(model: nn.Module, pad: int) -> bool:
    """Tries it on a few made-up tokens: contexts of two lengths, rows that leave, a context that comes later.

    What counts is whether the logits are those of whole sequences, measured against how much a sequence matters to this model.
    """
    shared = SharedPrefixCache(model, pad)
    tokens = torch.arange(18, device=shared.device).view(3, 6) * 5 % 7 + 1
    contexts = [tokens[0, :5], tokens[1, :3], tokens[2, :4]]

    def whole(*ids: Tensor) -> Tensor:
        return torch.stack([model(input_ids=row[None], use_cache=False, return_dict=True).logits[0, -1] for row in ids])

    follow = [torch.cat([contexts[i], tokens[j, :2]]) for i, j in ((0, 1), (0, 2), (1, 0))]
    truth = whole(follow[2], follow[1], torch.cat([contexts[2], tokens[0, :1]])).float()
    effect = float((truth[0] - truth[1]).abs().max())
    try:
        shared.read(contexts[:2], torch.tensor([2, 1], device=shared.device), 4)
        shared.step(tokens[[1, 2, 0], 0], torch.tensor([5, 5, 3], device=shared.device))
        order = shared.keep_rows(torch.tensor([1, 2], device=shared.device))
        if order.tolist() != [2, 1]:
            return False
        shared.read(contexts[2:], torch.tensor([1], device=shared.device), 4)
        position = torch.tensor([4, 6, 4], device=shared.device)
        got = shared.step(torch.stack([tokens[0, 1], tokens[2, 1], tokens[0, 0]]), position).float()
    except Exception:  # whatever an architecture says to a call it does not take: the plain memory remains
        return False
    half = next(model.parameters()).dtype in (torch.bfloat16, torch.float16)
    return float((got - truth).abs().max()) <= (0.05 if half else 1e-4) * effect


@torch.no_grad()
def check_batched_decoding(model: nn.Module, pad: int) -> None:
    """Tries the plain memory on a few made-up tokens: contexts of two lengths, two rows of one of them, a row that leaves.

    Raises:
        ModelError: an architecture whose cache cannot be repeated and reordered row by row, or continues other texts.
    """
    plain = PlainDecodeCache(model, pad)
    tokens = torch.arange(12, device=plain.device).view(2, 6) * 5 % 7 + 1
    contexts, new = [tokens[0, :5], tokens[1, :3]], torch.arange(1, 4, device=plain.device)
    texts = [torch.cat([contexts[0], new[1:2], new[:1]]), torch.cat([contexts[1], new[2:], new[1:2]])]
    truth = torch.stack([model(input_ids=x[None], use_cache=False, return_dict=True).logits[0, -1] for x in texts])
    try:
        plain.read(contexts, torch.tensor([2, 1], device=plain.device), 4)
        plain.step(new, torch.tensor([5, 5, 3], device=plain.device))
        plain.keep_rows(torch.tensor([1, 2], device=plain.device))
        got = plain.step(new[:2], torch.tensor([6, 4], device=plain.device))
    except ModelError:
        raise
    except (AttributeError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
        raise ModelError(_cannot_decode(model, why)) from error
    effect, gap = float((truth[0] - truth[1]).abs().max()), float((got - truth).abs().max())
    if gap > _FAR * effect and gap > _FAR * float(truth.std()):
        raise ModelError(
            _cannot_decode(model, f"logits differ by up to {gap:.2g} from those of the same text in one pass")
        )


def _cannot_decode(model: nn.Module, why: str) -> str:
    return (
        f"{type(model).__name__} cannot decode several completions at once from its cache ({why}): sample with an engine that "
        "has this architecture (--sampler.engine vllm), or choose another model"
    )
