"""The key-value cache while decoding: room for tokens to come is taken in advance, instead of a copy of all of it per token."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin, DynamicCache, DynamicLayer

from policygrad.errors import ModelError

GROWTH_TOKENS = 256
"""Tokens that memory is taken for at a time: most completions end long before the budget does."""
_NAMES = ("past_key_values", "cache_params")  # the second: state-space models


class PreallocatedLayer(DynamicLayer):  # type: ignore[no-untyped-call]  # transformers' own __init_subclass__
    """A cache layer whose memory [N, H, capacity, D] is allocated ahead; the keys and values so far are a view of it."""

    def __init__(self, keys: Tensor, values: Tensor, repeats: Tensor | None, room: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.length = keys.shape[-2]
        self.key_buffer, self.value_buffer = (preallocate(x, repeats, room) for x in (keys, values))
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
        self._show()

    def _show(self) -> None:
        self.keys, self.values = self._used(self.key_buffer), self._used(self.value_buffer)

    def _used(self, room: Tensor) -> Tensor:
        return room[:, :, : self.length]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        end = self.length + key_states.shape[-2]
        if end > self.key_buffer.shape[-2]:
            self.key_buffer, self.value_buffer = (
                preallocate(x, None, max(GROWTH_TOKENS, end - self.length))
                for x in (self._used(self.key_buffer), self._used(self.value_buffer))
            )
        self.key_buffer[:, :, self.length : end] = key_states
        self.value_buffer[:, :, self.length : end] = value_states
        self.length = end
        self._show()
        return self._used(self.key_buffer), self._used(self.value_buffer)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keeps these rows (no more than there are), in place: fresh memory for all of the room would cost more than the copy."""
        rows, used = len(beam_idx), slice(self.length)
        for room in (self.key_buffer, self.value_buffer):
            room[:rows, :, used] = room[:, :, used].index_select(0, beam_idx)
        self.key_buffer, self.value_buffer = self.key_buffer[:rows], self.value_buffer[:rows]
        self._show()


class CountingCache(DynamicCache):
    """A cache that counts its tokens where no layer of it does: transformers' own raises ValueError when asked for its length."""

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.length = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.length + query_length, 0


def make_cache_arguments(model: nn.Module) -> dict[str, Any]:
    """Make what the model is to be called with first: a cache of ours if none of its layers is attention, else nothing."""
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    config = getattr(base, "config", None)
    if config is None or "past_key_values" not in inspect.signature(base.forward).parameters:
        return {}
    empty = DynamicCache(config=config.get_text_config(decoder=True))
    if not empty.layers or any(isinstance(layer, CacheLayerMixin) for layer in empty.layers):
        return {}
    return {"past_key_values": CountingCache(config.get_text_config(decoder=True))}


def set_cached_length(cache: Any, tokens: int) -> None:
    """Notes how many tokens the cache holds, where it does not know by itself."""
    if isinstance(cache, CountingCache):
        cache.length = tokens


def preallocate(x: Tensor, repeats: Tensor | None, room: int) -> Tensor:
    """A copy with room behind it, row i `repeats[i]` times."""
    rows, heads, length, width = x.shape
    times = [1] * rows if repeats is None else repeats.tolist()
    buffer = x.new_empty(sum(times), heads, length + room, width)
    if len(set(times)) == 1:  # in one go, and nothing is held twice
        buffer.view(rows, times[0], heads, length + room, width)[:, :, :, :length] = x[:, None]
    else:
        buffer[:, :, :length] = x.repeat_interleave(torch.tensor(times, device=x.device), 0)
    return buffer


def get_cache(out: Any, model: nn.Module) -> tuple[str, Any]:
    """(the name under which the model takes its cache back, the cache).

    Raises:
        ModelError: a model that keeps its state elsewhere, so that its rows can be neither repeated nor dropped.
    """
    for name in _NAMES:
        cache = getattr(out, name, None)
        if hasattr(cache, "layers"):
            return name, cache
    raise ModelError(
        f"{type(model).__name__} returns no cache made of layers, as current transformers models do, so it cannot decode a batch "
        "here: sample with an engine that has this architecture (--sampler.engine vllm), or choose another model"
    )


class _AsLong(DynamicLayer):  # type: ignore[no-untyped-call]  # transformers' own __init_subclass__
    """Stands for a layer without keys and has the length of one with keys: masks are made by the first layer's length."""

    def __init__(self, other: DynamicLayer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.other = other

    def get_seq_length(self) -> int:
        return int(self.other.get_seq_length())

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """There is nothing to reorder."""


def _reorder_beside(cache: Any, rows: Tensor) -> None:
    """Keeps these rows of the states that MiniMax's lightning attention keeps beside the layers, [] for a layer without any."""
    beside: list[Any] = getattr(cache, "linear_cache", [])
    attention = next((layer for layer in cache.layers if isinstance(layer, PreallocatedLayer)), None)
    for i, state in enumerate(beside):
        if isinstance(state, Tensor):
            beside[i] = state.index_select(0, rows)
            if attention is not None and i < len(cache.layers):
                cache.layers[i] = _AsLong(attention)


def repeat_rows(cache: Any, repeats: Tensor, room: int) -> None:
    """Row i `repeats[i]` times, one per completion; layers of another kind (sliding window, state space) grow themselves."""
    rows = torch.arange(len(repeats), device=repeats.device).repeat_interleave(repeats)
    for i, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer and isinstance(layer.keys, Tensor) and isinstance(layer.values, Tensor):
            cache.layers[i] = PreallocatedLayer(layer.keys, layer.values, repeats, min(room, GROWTH_TOKENS))
        elif hasattr(layer, "reorder_cache"):
            layer.reorder_cache(rows)
    _reorder_beside(cache, rows)


def select_rows(cache: Any, rows: Tensor) -> None:
    """Keeps these rows of every layer. `reorder_cache` is the one call that every kind of layer has."""
    for layer in cache.layers:
        if hasattr(layer, "reorder_cache"):
            layer.reorder_cache(rows)
    _reorder_beside(cache, rows)


# What a model remembers of the rows that are being decoded, for any kind of cache: contexts are read, rows go on, rows leave.

COMPACT_FRACTION = 0.8
"""Rows that are over wait in a plain cache until fewer than this share of it goes on: dropping them copies the rest."""


class DecodeCache(Protocol):
    """Rows stand in the order in which they came, but for `keep`."""

    model: nn.Module
    supports_refill: bool
    """Whether more contexts can be read while rows go on."""
    rows: Tensor
    """[N] int64: where the rows stood among those of the last forward pass."""

    def read(self, contexts: Sequence[Tensor], repeats: Tensor, room: int) -> tuple[Tensor, int]:
        """Reads each context once: logits [N, V] after it, for `repeats[i]` new rows behind all others, of which each will draw at
        most `room` tokens; and the width that contexts were padded to, on the left."""
        ...

    def step(self, token: Tensor, position: Tensor) -> Tensor:
        """Logits [N, V] after one more token [N] of each row, at `position` [N] of its sequence."""
        ...

    def keep_rows(self, rows: Tensor) -> Tensor:
        """Drops all but `rows` [n]; returns these in the order in which they now stand."""
        ...


class PlainDecodeCache:
    """The model's own kinds of layers, one row a completion, contexts left-padded."""

    supports_refill = False

    def __init__(self, model: nn.Module, pad: int) -> None:
        self.model, self.pad = model, pad
        self.device = next(model.parameters()).device
        self.rows, self.cache, self.attention, self.used = torch.empty(0), dict[str, Any](), torch.empty(0), 0

    def read(self, contexts: Sequence[Tensor], repeats: Tensor, room: int) -> tuple[Tensor, int]:
        out, seen = prefill(self.model, contexts, self.pad)
        name, held = get_cache(out, self.model)
        repeat_rows(held, repeats, room)
        self.cache, self.used = {name: held}, seen.shape[1]
        ahead = seen.new_ones(len(seen), room)
        self.attention = torch.cat([seen, ahead], 1).repeat_interleave(repeats, 0)
        self.rows = torch.arange(len(self.attention), device=self.device)
        return out.logits[:, -1].repeat_interleave(repeats, 0), self.used

    def step(self, token: Tensor, position: Tensor) -> Tensor:
        for held in self.cache.values():
            set_cached_length(held, self.used)
        self.used += 1
        place = self.rows.new_zeros(2, len(self.attention))  # which waits reads any token, within the model's context
        place[:, self.rows] = torch.stack([token, position])
        out = self.model(
            input_ids=place[0, :, None],
            attention_mask=self.attention[:, : self.used] if "past_key_values" in self.cache else None,
            position_ids=place[1, :, None],
            **self.cache,
            use_cache=True,
            return_dict=True,
        )
        return out.logits[:, -1].index_select(0, self.rows)  # type: ignore[no-any-return]

    def keep_rows(self, rows: Tensor) -> Tensor:
        self.rows = self.rows[rows]
        if not len(rows):
            self.cache = {}
        elif len(rows) < COMPACT_FRACTION * len(self.attention):
            for held in self.cache.values():
                select_rows(held, self.rows)
            self.attention = self.attention[self.rows]
            self.rows = torch.arange(len(rows), device=self.device)
        return rows


def prefill(model: nn.Module, contexts: Sequence[Tensor], pad: int) -> tuple[Any, Tensor]:
    """(the model's output after each context, which of the tokens [C, L] it read are the context's own, as 1 and 0)."""
    width = max(map(len, contexts))
    ids = torch.full((len(contexts), width), pad)
    seen = torch.zeros(len(contexts), width, dtype=torch.int64)
    for i, tokens in enumerate(contexts):
        ids[i, width - len(tokens) :] = tokens
        seen[i, width - len(tokens) :] = 1
    device = next(model.parameters()).device
    ids, seen = ids.to(device), seen.to(device)
    out = model(
        input_ids=ids,
        attention_mask=seen,
        position_ids=(seen.cumsum(1) - 1).clamp(min=0),
        use_cache=True,
        logits_to_keep=1,
        return_dict=True,
        **make_cache_arguments(model),
    )
    return out, seen
