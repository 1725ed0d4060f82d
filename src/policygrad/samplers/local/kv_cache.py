"""Key-value caches for batched decoding: memory is allocated ahead, instead of copied at every token, and rows can be repeated and
dropped for any kind of layer."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from policygrad.core.media import TextMedia, mark_slots, shift_media
from policygrad.errors import ModelError

if TYPE_CHECKING:
    from policygrad.samplers.local.state_cache import StateCache

GROWTH_TOKENS = 256  # tokens that memory is allocated for at a time: most completions end long before their limit
COMPACT_FRACTION = 0.8
"""Finished rows stay in the cache until fewer than this fraction of its rows are active: dropping them copies the rest."""
CALL_TOKENS = 512  # reading fewer tokens than these takes about as long as a forward pass does anyway
_CACHE_NAMES = ("past_key_values", "cache_params")  # the second: state-space models


@dataclass
class PrefillCounts:
    """Tokens of prompts."""

    read: int = 0
    shared: int = 0
    """Not read, since what another text begins with likewise had been."""


def weights_version(model: nn.Module) -> int:
    """Return a number that changes when the weights are changed in place, except by a fused optimizer: `LocalSampler.update` is
    called for that."""
    return sum(p._version for p in model.parameters())


class DecodeCache(Protocol):
    """What a model has cached of the rows being decoded. Rows keep the order in which they were added, except in `keep_rows`."""

    model: nn.Module
    needs_equal_lengths: bool  # True if prompts that are read together must have equal lengths
    rows: Tensor  # [N] int64: the position of each active row in the last forward pass

    @property
    def supports_refill(self) -> bool:
        """True if prompts can be added while rows are active."""

    @property
    def batch_size(self) -> int:
        """Number of rows of the next step, finished ones included."""

    def read(
        self, prompts: Sequence[Tensor], repeats: Tensor, max_tokens: int, media: Sequence[TextMedia] = ()
    ) -> tuple[Tensor, int]:
        """Read each prompt once and add `repeats[i]` rows that continue it.

        Args:
            max_tokens: Maximum tokens that each new row will sample.
            media: The pictures of each prompt; () = none has any.

        Returns:
            The logits [N, V] after the prompt for each new row, and the width that prompts were left-padded to.
        """

    def step(self, token: Tensor, position: Tensor) -> Tensor:
        """Return the logits [N, V] after one more token [N] per row, at `position` [N] of its sequence."""

    def keep_rows(self, rows: Tensor) -> Tensor:
        """Drop all rows except `rows` [n]; return them in their new order."""


class PlainDecodeCache:
    """A cache with one row per completion, for any kind of layer. Prompts are left-padded; so are rows that are read later than
    others, whose keys end in the same column."""

    def __init__(
        self,
        model: nn.Module,
        pad: int,
        needs_equal_lengths: bool = False,
        texts: StateCache | None = None,
        counts: PrefillCounts | None = None,
        in_passes: bool = False,
    ) -> None:
        """
        Args:
            needs_equal_lengths: The model reads padding as a part of the text: DeepSeek V4 compresses blocks that are
                counted from it.
            texts: What is kept of texts that prompts may continue.
            counts: Counts the tokens of prompts.
            in_passes: Prompts of very different lengths are read in several passes, whose rows are appended to one another.
        """
        self.model, self.pad, self.needs_equal_lengths = model, pad, needs_equal_lengths
        self.texts, self.counts, self.in_passes = texts, counts or PrefillCounts(), in_passes
        self.device = next(model.parameters()).device
        self.rows, self.cache, self.attention, self.used = torch.empty(0), dict[str, Any](), torch.empty(0), 0

    @property
    def supports_refill(self) -> bool:
        return not self.needs_equal_lengths and all(can_append_rows(cache) for cache in self.cache.values())

    @property
    def batch_size(self) -> int:
        return len(self.attention)

    def read(
        self, prompts: Sequence[Tensor], repeats: Tensor, max_tokens: int, media: Sequence[TextMedia] = ()
    ) -> tuple[Tensor, int]:
        if self.texts is None or any(media):
            self.counts.read += sum(map(len, prompts))
            if any(media) or not self.in_passes:
                return self._add(*prefill(self.model, prompts, self.pad, media), repeats, max_tokens)
            parts: Iterable[ReadPart] = read_in_passes(self.model, prompts, self.pad)
        else:
            parts = self.texts.read(self.model, prompts, self.pad)
        logits, order, width, before = list[Tensor](), list[int](), 0, len(self.rows)
        starts = repeats.cumsum(0) - repeats
        for part in parts:
            which = torch.tensor(part.which, device=self.device)
            new_logits, width = self._add(part.out, part.mask, repeats[which], max_tokens)
            logits.append(new_logits)
            order += [int(starts[i]) + n for i in part.which for n in range(int(repeats[i]))]
        place = torch.tensor(order, device=self.device).argsort()  # of each new row among those that were read
        self.rows = torch.cat([self.rows[:before], self.rows[before:][place]])
        return torch.cat(logits)[place], width

    def _add(self, out: Any, mask: Tensor, repeats: Tensor, max_tokens: int) -> tuple[Tensor, int]:
        """Add `repeats[i]` rows for each prompt that was read; see `read`."""
        name, cache = get_cache(out, self.model)
        repeat_rows(cache, repeats, max_tokens)
        attention, width = mask.repeat_interleave(repeats, 0), mask.shape[1]
        if not self.cache:
            self.cache, self.used = {name: cache}, width
        else:
            attention = self._append(self.cache[name], cache, attention)
            max_tokens = max(max_tokens, self.attention.shape[1] - self.used)
            self.used = attention.shape[1]
        self.attention = F.pad(attention, (0, max_tokens), value=1)
        self.rows = torch.arange(len(self.attention), device=self.device)
        return out.logits[:, -1].repeat_interleave(repeats, 0), width

    def _append(self, cache: Any, other: Any, attention: Tensor) -> Tensor:
        """Append the rows of `other` to those that are active in `cache`; return the mask of all columns that any of them has."""
        select_rows(cache, self.rows)
        active = self.attention[self.rows, : self.used]
        active = active[:, int(active.argmax(1).min()) :]  # without the columns of rows that have ended
        width = max(active.shape[1], attention.shape[1])
        append_rows(cache, other, (active.shape[1], attention.shape[1]), width)
        return torch.cat([F.pad(x, (width - x.shape[1], 0)) for x in (active, attention)])

    def step(self, token: Tensor, position: Tensor) -> Tensor:
        for cache in self.cache.values():
            if isinstance(cache, CountingCache):
                cache.length = self.used
        self.used += 1
        inputs = self.rows.new_zeros(2, len(self.attention))  # a finished row reads any token at any valid position
        inputs[:, self.rows] = torch.stack([token, position])
        out = self.model(
            input_ids=inputs[0, :, None],
            attention_mask=self.attention[:, : self.used] if "past_key_values" in self.cache else None,
            position_ids=inputs[1, :, None],
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
            for cache in self.cache.values():
                select_rows(cache, self.rows)
            self.attention = self.attention[self.rows]
            self.rows = torch.arange(len(rows), device=self.device)
        return rows


@dataclass(frozen=True, eq=False)
class ReadPart:
    """Prompts that were read together: which, with the model's output, and the mask [C, L] of the columns that are tokens."""

    which: Sequence[int]
    out: Any
    mask: Tensor


def read_in_passes(model: nn.Module, prompts: Sequence[Tensor], pad: int) -> Iterator[ReadPart]:
    """Read prompts, those of like lengths together: padding is read like tokens, and takes as long."""
    for which in divide_by_length([len(prompt) for prompt in prompts]):
        yield ReadPart(which, *prefill(model, [prompts[i] for i in which], pad))


def divide_by_length(lengths: Sequence[int]) -> list[list[int]]:
    """Divide prompts into those that are read in one pass, padded to the longest of them: with the fewest tokens, padding and
    `CALL_TOKENS` for each pass included."""
    count = len(lengths)
    if count * max(lengths, default=0) - sum(lengths) < CALL_TOKENS:
        return [list(range(count))] if count else []
    import numpy as np

    order = np.argsort(-np.asarray(lengths), kind="stable")
    longest, places = np.asarray(lengths)[order], np.arange(count)
    least, begins = np.zeros(count + 1, dtype=np.int64), np.zeros(count + 1, dtype=np.int64)
    for end in range(1, count + 1):  # the last pass reads order[begin:end]
        tokens = least[:end] + (end - places[:end]) * longest[:end] + CALL_TOKENS
        begins[end] = tokens.argmin()
        least[end] = tokens[begins[end]]
    passes, end = list[list[int]](), count
    while end:
        passes.append(sorted(order[begins[end] : end].tolist()))
        end = int(begins[end])
    return passes


def prefill(
    model: nn.Module, prompts: Sequence[Tensor], pad: int, media: Sequence[TextMedia] = (), *, keep_all: bool = False
) -> tuple[Any, Tensor]:
    """Read left-padded prompts in one forward pass, with their pictures (`media`, () = none has any).

    Args:
        keep_all: Every layer keeps the keys of all tokens, also outside of its window.

    Returns:
        The model's output, with logits of the last position only, and the attention mask [C, L].
    """
    ids, mask = left_pad(prompts, pad)
    device = next(model.parameters()).device
    ids, mask = ids.to(device), mask.to(device)
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    cache: dict[str, Any] = {}
    if getattr(base, "config", None) is not None and "past_key_values" in inspect.signature(base.forward).parameters:
        config = base.config.get_text_config(decoder=True)
        layers = DynamicCache(config=config).layers
        if layers and not any(isinstance(layer, CacheLayerMixin) for layer in layers):  # none is attention
            cache = {"past_key_values": CountingCache(config)}
        elif keep_all:
            cache = {"past_key_values": DynamicCache()}
    inputs: dict[str, Any] = {"input_ids": ids, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    embedded: AbstractContextManager[None] = nullcontext()
    if any(media):
        from policygrad.models.vision import embedding, picture_inputs, picture_positions

        slots, pictures = _pad_slots(prompts, media).to(device), list(chain.from_iterable(media))
        inputs["position_ids"] = picture_positions(model, ids, slots, mask.bool(), pictures)
        inputs |= picture_inputs(model, ids, slots, pictures)
        embedded = embedding(model, inputs.pop("embedded_ids", None))
    with embedded:
        out = model(attention_mask=mask, use_cache=True, logits_to_keep=1, return_dict=True, **inputs, **cache)
    return out, mask


def _pad_slots(prompts: Sequence[Tensor], media: Sequence[TextMedia]) -> Tensor:
    """Return [C, L] bool: the places of pictures in left-padded prompts."""
    width = max(map(len, prompts))
    return torch.stack([mark_slots(shift_media(m, width - len(p)), width) for p, m in zip(prompts, media, strict=True)])


def first_positions(model: nn.Module, prompts: Sequence[Tensor], media: Sequence[TextMedia]) -> list[int]:
    """Return the position of the first token after each prompt, which after a picture may be less than the prompt's length."""
    device, positions = next(model.parameters()).device, list[int]()
    for prompt, pictures in zip(prompts, media, strict=True):
        if not pictures:
            positions.append(len(prompt))
            continue
        from policygrad.models.vision import next_position, picture_positions

        slots, is_token = mark_slots(pictures, len(prompt)), torch.ones(1, len(prompt), dtype=torch.bool)
        ids, slots, is_token = (x.to(device) for x in (prompt[None], slots[None], is_token))
        positions.append(next_position(picture_positions(model, ids, slots, is_token, pictures)))
    return positions


def left_pad(texts: Sequence[Tensor], pad: int) -> tuple[Tensor, Tensor]:
    """Return token ids [C, L], padded to the longest text's length, and their mask, 1 where there is a token."""
    width = max(map(len, texts))
    ids = torch.full((len(texts), width), pad)
    mask = torch.zeros(len(texts), width, dtype=torch.int64)
    for i, text in enumerate(texts):
        ids[i, width - len(text) :] = text
        mask[i, width - len(text) :] = 1
    return ids, mask


class PreallocatedLayer(DynamicLayer):  # type: ignore[no-untyped-call]  # transformers' own __init_subclass__
    """A cache layer with memory [N, H, capacity, D] allocated ahead; `keys` and `values` are views of the used part."""

    def __init__(self, keys: Tensor, values: Tensor, repeats: Tensor | None, extra: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.length = keys.shape[-2]
        self.key_buffer, self.value_buffer = (preallocate(x, repeats, extra) for x in (keys, values))
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
        self.keys, self.values = self._views()

    def replace(self, key_buffer: Tensor, value_buffer: Tensor, length: int) -> None:
        """Use these buffers, of which `length` columns are used."""
        self.key_buffer, self.value_buffer, self.length = key_buffer, value_buffer, length
        self.keys, self.values = self._views()

    def _views(self) -> tuple[Tensor, Tensor]:
        return self.key_buffer[:, :, : self.length], self.value_buffer[:, :, : self.length]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        end = self.length + key_states.shape[-2]
        if end > self.key_buffer.shape[-2]:
            extra = max(GROWTH_TOKENS, end - self.length)
            self.key_buffer, self.value_buffer = (preallocate(x, None, extra) for x in self._views())
        self.key_buffer[:, :, self.length : end] = key_states
        self.value_buffer[:, :, self.length : end] = value_states
        self.length = end
        self.keys, self.values = views = self._views()
        return views

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep these rows in place: new memory for the full capacity would cost more than the copy."""
        rows, used = len(beam_idx), slice(self.length)
        for buffer in (self.key_buffer, self.value_buffer):
            buffer[:rows, :, used] = buffer[:, :, used].index_select(0, beam_idx)
        self.key_buffer, self.value_buffer = self.key_buffer[:rows], self.value_buffer[:rows]
        self.keys, self.values = self._views()


def preallocate(x: Tensor, repeats: Tensor | None, extra: int) -> Tensor:
    """Copy a tensor [N, H, L, D] into one with `extra` more columns, row i `repeats[i]` times."""
    rows, heads, length, width = x.shape
    times = [1] * rows if repeats is None else repeats.tolist()
    buffer = x.new_empty(sum(times), heads, length + extra, width)
    if len(set(times)) == 1:  # without an intermediate copy
        buffer.view(rows, times[0], heads, length + extra, width)[:, :, :, :length] = x[:, None]
    else:
        buffer[:, :, :length] = x.repeat_interleave(torch.tensor(times, device=x.device), 0)
    return buffer


class CountingCache(DynamicCache):
    """A cache that counts its tokens itself, for models none of whose layers does: transformers' own raises ValueError then."""

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.length = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.length + query_length, 0


def get_cache(out: Any, model: nn.Module) -> tuple[str, Any]:
    """Return the cache in a model's output and the name of the argument that passes it back.

    Raises:
        ModelError: The model keeps its state elsewhere, so that rows can be neither repeated nor dropped.
    """
    for name in _CACHE_NAMES:
        cache = getattr(out, name, None)
        if hasattr(cache, "layers"):
            return name, cache
    raise ModelError(
        f"{type(model).__name__} returns no cache made of layers, as current transformers models do, so it cannot decode a batch "
        "here. Sample with an engine that has this architecture (--sampler.engine vllm), or choose another model."
    )


class _LengthOf(DynamicLayer):  # type: ignore[no-untyped-call]  # transformers' own __init_subclass__
    """Replaces a layer without keys and has the length of one with keys: masks are made from the first layer's length."""

    def __init__(self, other: DynamicLayer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.other = other

    def get_seq_length(self) -> int:
        return int(self.other.get_seq_length())

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Do nothing: the layer is empty."""


def repeat_rows(cache: Any, repeats: Tensor, max_tokens: int) -> None:
    """Repeat row i `repeats[i]` times, one per completion, with memory for further tokens. Layers of another kind than full
    attention (sliding window, state space) grow by themselves."""
    rows = torch.arange(len(repeats), device=repeats.device).repeat_interleave(repeats)
    for i, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer and isinstance(layer.keys, Tensor) and isinstance(layer.values, Tensor):
            cache.layers[i] = PreallocatedLayer(layer.keys, layer.values, repeats, min(max_tokens, GROWTH_TOKENS))
        elif hasattr(layer, "reorder_cache"):
            layer.reorder_cache(rows)
    _select_linear_states(cache, rows)


def select_rows(cache: Any, rows: Tensor) -> None:
    """Keep these rows of every layer. `reorder_cache` is the one method that every kind of layer has."""
    for layer in cache.layers:
        if hasattr(layer, "reorder_cache"):
            layer.reorder_cache(rows)
    _select_linear_states(cache, rows)


_APPENDABLE = (PreallocatedLayer, LinearAttentionLayer, LinearAttentionAndFullAttentionLayer)


def can_append_rows(cache: Any) -> bool:
    """Return whether `append_rows` can handle every layer: full attention, states, both, or nothing at all."""
    if hasattr(cache, "linear_cache"):
        return False
    return all(type(layer) in _APPENDABLE or getattr(layer, "keys", layer) is None for layer in cache.layers)


def append_rows(cache: Any, other: Any, lengths: tuple[int, int], width: int) -> None:
    """Append the rows of another cache of the same model, all columns padded on the left to `width`.

    Args:
        lengths: How many columns, the last ones, to keep of the keys of each.
    """
    for layer, added in zip(cache.layers, other.layers, strict=True):
        if isinstance(layer, LinearAttentionLayer):
            for states in ("conv_states", "recurrent_states"):
                for i, state in getattr(layer, states).items():
                    if isinstance(state, Tensor):
                        getattr(layer, states)[i] = torch.cat([state, getattr(added, states)[i]])
        if isinstance(layer, DynamicLayer) and layer.keys is not None:
            pairs = zip((layer, added), lengths, strict=True)
            columns = [tuple(x[:, :, x.shape[2] - n :] for x in (part.keys, part.values)) for part, n in pairs]
            keys, values = (_join_rows([part[i] for part in columns], width) for i in range(2))
            if isinstance(layer, PreallocatedLayer):
                layer.replace(keys, values, width)
            else:
                layer.keys, layer.values = keys[:, :, :width], values[:, :, :width]
    if isinstance(cache, CountingCache):
        cache.length = width


def _join_rows(parts: Sequence[Tensor], width: int) -> Tensor:
    """Return [Σ N, H, width + more, D]: the rows of all parts [N, H, L, D], padded with 0 on the left; the rest is for later."""
    rows = sum(map(len, parts))
    joined = parts[0].new_empty(rows, parts[0].shape[1], width + GROWTH_TOKENS, parts[0].shape[3])
    start = 0
    for part in parts:
        block, pad = joined[start : start + len(part)], width - part.shape[2]
        block[:, :, :pad] = 0
        block[:, :, pad:width] = part
        start += len(part)
    return joined


def _select_linear_states(cache: Any, rows: Tensor) -> None:
    """Keep these rows of the states of MiniMax's lightning attention, stored outside the layers ([] for a layer without)."""
    states: list[Any] = getattr(cache, "linear_cache", [])
    attention = next((layer for layer in cache.layers if isinstance(layer, PreallocatedLayer)), None)
    for i, state in enumerate(states):
        if isinstance(state, Tensor):
            states[i] = state.index_select(0, rows)
            if attention is not None and i < len(cache.layers):
                cache.layers[i] = _LengthOf(attention)
