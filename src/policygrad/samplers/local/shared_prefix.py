"""Decoding with the keys of a prompt stored once for all its completions, which store their own keys beside it.

The softmax over [prompt, completion] is taken at once, from scores that are computed separately, so the result is that of plain
attention. Reading a prompt's keys once for all completions instead of once for each: Juravsky et al. 2024 (Hydragen),
arXiv:2402.05099.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from policygrad.core.media import TextMedia
from policygrad.errors import ModelError
from policygrad.models.attention import (
    attend_with_sinks,
    handling_keys,
    set_attention,
    short_windows,
    softmax_with_sinks,
    switch_to_own_attention,
)
from policygrad.models.loading import at_least_float32, attention_limits, context_length
from policygrad.samplers.local import kv_cache
from policygrad.samplers.local.kv_cache import (
    COMPACT_FRACTION,
    PlainDecodeCache,
    PrefillCounts,
    divide_by_length,
    prefill,
)
from policygrad.utils.out_of_memory import is_out_of_memory

if TYPE_CHECKING:
    from policygrad.samplers.local.text_cache import LayerTensors, TextCache

_FIRST_TOKENS = 8  # tokens that memory is allocated for at first; then twice as many
_ALIGNMENT = 32
_MASK_TOKENS = 32  # columns of `PrefixLayout.mask` that are allocated at a time; a multiple of `_ALIGNMENT`
_TOLERANCE = 0.2
"""Fraction of the difference between two texts, and of the spread of the logits: an error beyond both is no rounding."""
_LONGEST_LIMIT = 160  # tokens: texts beyond a longer window or block would take too long to test


class SharedPrefixCache:
    """One copy of each prompt for all its rows, for models whose layers all have keys, of all tokens or of a window, and use
    scaled-dot-product attention."""

    supports_refill = True
    needs_equal_lengths = False

    def __init__(
        self,
        model: nn.Module,
        pad: int,
        texts: TextCache | None = None,
        *,
        at_attention: bool = False,
        counts: PrefillCounts | None = None,
        kernels: bool = False,
        in_passes: bool = False,
    ) -> None:
        """
        Args:
            texts: Texts that prompts may continue.
            in_passes: Prompts of very different lengths are read in several passes.
            kernels: Attend by Triton's kernel, where it supports the keys.
            counts: Counts the tokens of prompts.
            at_attention: Keys and values are taken where layers attend (`models.attention.attend`), not where they are cached:
                latent attention caches what it computes them from, and would compute all of them again for every token.
        """
        self.model, self.pad, self.texts, self.windows = model, pad, texts, find_windows(model)
        self.counts = counts or PrefillCounts()
        self.at_attention, self.in_passes = at_attention, in_passes
        self.device = next(model.parameters()).device
        self.rows = torch.empty(0, dtype=torch.int64, device=self.device)
        self.cache: Any = None
        self.layers: list[SharedPrefixLayer] = []
        self.places = dict[int, int]()  # of the layers, by their numbers in the model, with `at_attention`
        self.owner, self.start = self.rows, self.rows  # of each row: its prompt, and its first column
        self.prompt_mask = self.rows.new_empty(0, 0)  # [C, L], 1 where a prompt has a token
        self.layout = PrefixLayout(None, 0, 0, torch.empty(0), torch.empty(0), 0, kernels=kernels)

    @property
    def batch_size(self) -> int:
        return len(self.owner)

    def read(
        self, prompts: Sequence[Tensor], repeats: Tensor, max_tokens: int, media: Sequence[TextMedia] = ()
    ) -> tuple[Tensor, int]:
        self.layout.column = None
        if self.texts is None or any(media):
            self.counts.read += sum(map(len, prompts))
            is_divided = self.in_passes and not any(media)
            divided = divide_by_length([len(p) for p in prompts]) if is_divided else [list(range(len(prompts)))]
            logits, mask, pairs = self._prefill_divided(prompts, divided, media)
        else:
            logits, mask, pairs = self._prefill_continuing(self.texts, prompts)
        before, new = len(self.owner), int(repeats.sum())
        if before == 0:
            self.layout.used, self.cache = 0, DynamicCache()
            windows = zip(self.windows, pairs, strict=True)
            self.layers = [SharedPrefixLayer(k, v, new, self.layout, window) for window, (k, v) in windows]
            passing = [PassingLayer(self.layout) for _ in self.layers]
            self.cache.layers = passing if self.at_attention else list(self.layers)
            self.prompt_mask = mask
        else:
            for layer, (k, v) in zip(self.layers, pairs, strict=True):
                layer.add_prompts(k, v, slice(before, before + new))
            width = max(self.prompt_mask.shape[1], mask.shape[1])
            self.prompt_mask = torch.cat([F.pad(x, (width - x.shape[1], 0)) for x in (self.prompt_mask, mask)])
        ids = torch.arange(len(repeats), device=self.device) + len(self.prompt_mask) - len(mask)
        self.owner = torch.cat([self.owner, ids.repeat_interleave(repeats)])
        self.start = torch.cat([self.start, self.start.new_full((new,), self.layout.used)])
        self._update_layout()
        return logits.repeat_interleave(repeats, 0), mask.shape[1]

    def _prefill(
        self, prompts: Sequence[Tensor], media: Sequence[TextMedia] = (), texts: TextCache | None = None
    ) -> tuple[Tensor, Tensor, list[list[Tensor]]]:
        """Read prompts in one pass.

        Returns:
            The logits [C, V] after each, the mask [C, L] of what are tokens, and each layer's keys and values [C, H, L, D].
        """
        attended = dict[int, tuple[Tensor, Tensor]]()

        def keep(module: Any, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            attended[module.layer_idx] = key, value
            return key, value

        with handling_keys(keep) if self.at_attention else nullcontext():
            if texts is None:
                out, mask = prefill(self.model, prompts, self.pad, media, keep_all=True)
            else:
                out, mask = texts.prefill(self.model, prompts, self.pad)
        _, cache = kv_cache.get_cache(out, self.model)
        if any(type(layer) is not DynamicLayer for layer in cache.layers):
            raise UnsupportedError("layers of the model's own")
        if texts is not None and texts.keeps_prompts:
            texts.add_read(cache, prompts, mask.shape[1])
        self.places = {number: place for place, number in enumerate(attended)}
        kept = attended.values() if self.at_attention else [(layer.keys, layer.values) for layer in cache.layers]
        padding = (mask == 0)[:, None, :, None]
        return out.logits[:, -1], mask, [[x.masked_fill(padding, 0) for x in pair] for pair in kept]

    def _prefill_continuing(
        self, texts: TextCache, prompts: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, list[list[Tensor]]]:
        """Read prompts of which something may be cached, in one pass or a few; returns as `_prefill`."""
        texts.read_beginnings(self.model, prompts, self.pad)
        return self._prefill_divided(prompts, texts.divide(prompts), texts=texts)

    def _prefill_divided(
        self,
        prompts: Sequence[Tensor],
        divided: Sequence[Sequence[int]],
        media: Sequence[TextMedia] = (),
        texts: TextCache | None = None,
    ) -> tuple[Tensor, Tensor, list[list[Tensor]]]:
        """Read prompts in one pass for each of the given parts; returns as `_prefill`. Pictures are read in a single one."""
        parts = [self._prefill([prompts[i] for i in which], media, texts) for which in divided]
        if len(parts) == 1:
            return parts[0]
        width = max(mask.shape[1] for _, mask, _ in parts)
        order = torch.tensor([i for which in divided for i in which], device=self.device).argsort()

        def join(padded: Sequence[Tensor]) -> Tensor:
            return torch.cat(list(padded)).index_select(0, order)

        pairs = [
            [join([F.pad(x, (0, 0, width - x.shape[2], 0)) for x in of_parts]) for of_parts in zip(*layer, strict=True)]
            for layer in zip(*(pairs for _, _, pairs in parts), strict=True)
        ]
        mask = join([F.pad(mask, (width - mask.shape[1], 0)) for _, mask, _ in parts])
        return join([logits for logits, _, _ in parts]), mask, pairs

    def step(self, token: Tensor, position: Tensor) -> Tensor:
        layout = self.layout
        if layout.column is not None:
            layout.mask.index_fill_(-1, layout.length + layout.column, 0)
        else:
            if layout.length + layout.used == layout.mask.shape[-1]:
                more = layout.mask.new_full((len(self.rows), 1, 1, _MASK_TOKENS), -torch.inf)
                layout.mask = torch.cat([layout.mask, more], -1)
            layout.mask[..., layout.length + layout.used] = 0
        layout.views.clear()
        layout.ranges.clear()
        with handling_keys(self._extend) if self.at_attention else nullcontext():
            out = self.model(
                input_ids=token[:, None],
                attention_mask=torch.ones(len(token), 1, 1, 1, dtype=torch.bool, device=self.device),
                position_ids=position[:, None],
                past_key_values=self.cache,
                use_cache=True,
                return_dict=True,
            )
        if layout.column is not None:
            layout.column.add_(1)  # `advance` counts
        else:
            layout.used += 1
        return out.logits[:, -1]  # type: ignore[no-any-return]

    def _extend(self, module: Any, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return self.layers[self.places[module.layer_idx]].update(key, value)

    def reserve(self, steps: int) -> bool:
        """Make the next `steps` steps use the same memory and shapes, so that they can be captured: attention reads all columns
        that are allocated, and the next one's index is a tensor. Undone by `read` and `keep_rows`.

        Returns:
            True if something has moved since the last call.
        """
        layout = self.layout
        if layout.column is not None and layout.used + steps <= layout.capacity:
            return False
        needed, growth = layout.used + steps, kv_cache.GROWTH_TOKENS
        doubled = max(2 * _MASK_TOKENS, 1 << (needed - 1).bit_length())
        layout.capacity = doubled if needed <= growth else -(-needed // growth) * growth
        layout.column = torch.tensor([layout.used], device=self.device)
        for layer in self.layers:
            layer.set_capacity(layout.capacity, len(self.owner))
        self._update_layout()
        return True

    def advance(self, steps: int) -> None:
        """Count steps that were captured."""
        self.layout.used += steps

    def keep_rows(self, rows: Tensor) -> Tensor:
        self.layout.column = None
        # the last rows move to the places of dropped ones, so that no others are copied
        n = len(rows)
        stays = torch.zeros(len(self.owner), dtype=torch.bool, device=self.device)
        stays[rows] = True
        target = (~stays[:n]).nonzero().squeeze(1)
        order = torch.arange(n, device=self.device)
        if len(target):
            source = stays[n:].nonzero().squeeze(1) + n
            for layer in self.layers:
                layer.move_rows(target, source)
            order[target] = source
        self.owner, self.start = self.owner[order], self.start[order]
        prompts, owner = torch.unique(self.owner, return_inverse=True)
        if len(prompts) < COMPACT_FRACTION * len(self.prompt_mask):
            self.prompt_mask, self.owner = self.prompt_mask[prompts], owner
            for layer in self.layers:
                layer.select_prompts(prompts)
        if n and (unused := int(self.start.min())) > self.layout.used // 4:
            for layer in self.layers:
                layer.drop_columns(unused)
            self.layout.used -= unused
            self.start = self.start - unused
        if n:
            self._update_layout()
        return order

    def copy_text(self, row: int, tokens: int, start: int = 0) -> LayerTensors:
        """Return copies of the keys and values of a row's prompt and its first `tokens` tokens, from token `start` on."""
        prompt, first = int(self.owner[row]), int(self.start[row])
        length, width = int(self.prompt_mask[prompt].sum()), self.prompt_mask.shape[1]
        of_prompt = slice(width - length + min(start, length), width)
        of_row = slice(first + max(0, start - length), first + tokens)
        texts = []
        for layer in self.layers:
            pairs = zip(layer.prompt, layer.row_buffers, strict=True)
            keys, values = (torch.cat([x[prompt][:, of_prompt], y[row, :, of_row]], 1) for x, y in pairs)
            texts.append((keys, values))
        return texts

    def _update_layout(self) -> None:
        """Compute the layout of the current rows."""
        rows, prompts, width = len(self.owner), len(self.prompt_mask), self.prompt_mask.shape[1]
        self.rows = torch.arange(rows, device=self.device)
        counts = self.owner.bincount(minlength=prompts)
        most = int(counts.max())
        order = self.owner.argsort(stable=True)
        nth = self.rows - (counts.cumsum(0) - counts)[self.owner[order]]
        place = torch.empty_like(self.rows)
        place[order] = self.owner[order] * most + nth
        is_full = rows == prompts * most and bool((place == self.rows).all())
        count = (self.layout.used // _MASK_TOKENS + 1) * _MASK_TOKENS
        columns = torch.arange(count if self.layout.column is None else self.layout.capacity, device=self.device)
        hidden = (columns < self.start[:, None]) | (columns >= self.layout.used)
        hidden = torch.cat([self.prompt_mask[self.owner] == 0, hidden], 1)[:, None, None]
        self.layout.mask, self.layout.prompt_mask = (
            torch.zeros(x.shape, dtype=self.layers[0].dtype, device=self.device).masked_fill_(x, -torch.inf)
            for x in (hidden, (self.prompt_mask == 0)[:, None, None])
        )
        self.layout.place, self.layout.prompts, self.layout.most = None if is_full else place, prompts, most
        self.layout.length, self.layout.start, self.layout.latest = width, self.start, int(self.start.max())
        first_rows = place.new_zeros(prompts).scatter_(0, self.owner, self.rows)
        self.layout.prompt_start = self.start[first_rows]  # rows of a prompt begin together
        if self.layout.kernels:
            by_prompt = self.rows.new_full((prompts * most,), -1, dtype=torch.int32)
            self.layout.rows_of_prompts = by_prompt.index_copy_(0, place, self.rows.int()).view(prompts, most)
            self.layout.rows_of_rows = self.rows.int()[:, None]
            self.layout.first_of_prompt = (width - self.prompt_mask.sum(1))[self.owner]


@dataclass(eq=False)
class PrefixLayout:
    """The state that all layers share: the prompt that each row continues, and the columns that it attends to."""

    place: Tensor | None
    """[N] int64, the row's place in a grid [prompts, most]; None: row i is at place i, and the grid is full."""
    prompts: int
    most: int  # rows of the prompt that has the most
    mask: Tensor
    """[N, 1, 1, L + capacity], added to scores, −∞ for hidden columns: the prompt's columns first, then the row's own."""
    prompt_mask: Tensor  # [prompts, 1, 1, L] likewise
    length: int  # columns L of the prompts, which are left-padded
    used: int = 0  # columns of completions in use
    column: Tensor | None = None  # [1] `used` on the device, while steps are captured (`SharedPrefixCache.reserve`)
    capacity: int = 0  # columns of completions that attention reads then
    start: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.int64))  # [N] the first column of each row
    prompt_start: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.int64))  # [prompts] likewise
    latest: int = 0  # the last of them
    views: dict[int | None, LayoutView] = field(default_factory=dict)  # of the current step, by window
    kernels: bool = False  # True: the following are set, and read by Triton's kernel instead of the masks
    rows_of_prompts: Tensor = field(default_factory=lambda: torch.zeros(1, 1, dtype=torch.int32))
    """[prompts, most] the rows of each prompt, −1 where it has fewer."""
    rows_of_rows: Tensor = field(default_factory=lambda: torch.zeros(1, 1, dtype=torch.int32))  # [N, 1] 0, 1, 2, …
    first_of_prompt: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.int64))
    """[N] the column of its prompt's first token."""
    ranges: dict[int | None, tuple[Tensor, ...]] = field(default_factory=dict)  # of the current step, by window

    def view(self, window: int | None, alignment: int) -> LayoutView:
        """Return what layers with a window, or without one (None), attend to from the next column; the same for all of a step.

        Args:
            alignment: Columns are left out by as many at a time.
        """
        if window not in self.views:
            self.views[window] = self._make_view(window, alignment)
        return self.views[window]

    def _make_view(self, window: int | None, alignment: int) -> LayoutView:
        if window is None:
            return LayoutView(0, 0, self.mask[..., : self.length], self.mask[..., self.length :], self.prompt_mask)
        columns = torch.arange(self.mask.shape[-1] - self.length, device=self.mask.device)
        # tokens from the first sampled one back to each column of the prompts
        before = self.length - torch.arange(self.length, device=self.mask.device)
        if self.column is not None:
            first_prompt_column, first_completion_column, next_column = 0, 0, self.column
        else:
            seen = max(1, window - 1 - (self.used - self.latest))  # columns of the prompts, by the row that began last
            first_prompt_column = max(0, self.length - seen) // alignment * alignment
            first_completion_column = max(0, self.used - window + 1) // alignment * alignment
            next_column = torch.full((1,), self.used, device=self.mask.device)

        def hide(mask: Tensor, distance: Tensor) -> Tensor:
            return mask.masked_fill((distance >= window)[:, None, None], -torch.inf)

        of_rows, of_prompts = (
            next_column - x[:, None] + before[None, first_prompt_column:] for x in (self.start, self.prompt_start)
        )
        return LayoutView(
            first_prompt_column,
            first_completion_column,
            hide(self.mask[..., first_prompt_column : self.length], of_rows),
            hide(
                self.mask[..., self.length + first_completion_column :],
                (next_column - columns[first_completion_column:])[None],
            ),
            hide(self.prompt_mask[..., first_prompt_column:], of_prompts),
        )

    def find_ranges(self, window: int | None) -> tuple[Tensor, ...]:
        """Return [N] int32 the columns that each row attends to from the next one, in layers with this window: the first of the
        prompt's and the one after its last, and the same of the row's own."""
        if window not in self.ranges:
            column = self.column
            if column is None:
                column = torch.full((1,), self.used, device=self.start.device)
            first_of_prompt, first = self.first_of_prompt, self.start
            if window is not None:
                first_of_prompt = first_of_prompt.maximum(self.length + column - first - window + 1)
                first = first.maximum(column - window + 1)
            after = torch.full_like(first, self.length), (column + 1).expand_as(first)
            columns = (first_of_prompt, after[0], first, after[1])
            self.ranges[window] = tuple(x.to(torch.int32, memory_format=torch.contiguous_format) for x in columns)
        return self.ranges[window]

    def to_grid(self, x: Tensor) -> Tensor:
        """Arrange [N, H, G, D] of rows as [prompts, H, most·G, D], with 0 where a prompt has fewer rows."""
        _, heads, each, width = x.shape
        if self.place is not None:
            x = x.new_zeros(self.prompts * self.most, heads, each, width).index_copy_(0, self.place, x)
        return x.view(self.prompts, self.most, heads, each, width).transpose(1, 2).flatten(2, 3)

    def from_grid(self, x: Tensor) -> Tensor:
        """Invert `to_grid`."""
        prompts, heads, rows, width = x.shape
        x = x.view(prompts, heads, self.most, rows // self.most, width).transpose(1, 2).flatten(0, 1)
        return x if self.place is None else x.index_select(0, self.place)


@dataclass(frozen=True, eq=False)
class LayoutView:
    """The columns that layers attend to in a step: those before them are outside of every row's window."""

    first_prompt_column: int  # column of the prompts
    first_completion_column: int  # column of completions
    prompt_columns: Tensor  # [N, 1, 1, L − first_prompt_column] added to scores
    completion_columns: Tensor  # [N, 1, 1, capacity − first_completion_column]
    prompt_mask: Tensor  # [prompts, 1, 1, L − first_prompt_column]


class SharedPrefixLayer(DynamicLayer):  # type: ignore[no-untyped-call]  # transformers' own __init_subclass__
    """Keys and values of prompts, [C, H, L, D], and of the tokens sampled since, [rows, H, capacity, D]."""

    def __init__(
        self, keys: Tensor, values: Tensor, rows: int, layout: PrefixLayout, window: int | None = None
    ) -> None:
        """
        Args:
            keys, values: Of the prompts, [C, H, L, D].
            window: A token sees itself and the `window` − 1 tokens before it; None = all before it.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.layout, self.window, self.prompt = layout, window, (keys.contiguous(), values.contiguous())
        self.row_buffers = tuple(x.new_zeros(rows, x.shape[1], _FIRST_TOKENS, x.shape[3]) for x in (keys, values))
        self.alignment = column_alignment(keys)
        self.uses_kernel = layout.kernels and _is_kernels_kind(keys, values)
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True

    def get_seq_length(self) -> int:
        return self.layout.length + self.layout.used

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        rows, used = len(key_states), self.layout.used
        if self.layout.column is not None:
            for buffer, new in zip(self.row_buffers, (key_states, value_states), strict=True):
                buffer[:rows].index_copy_(2, self.layout.column, new)
            self.keys, self.values = (_SharedTensor.wrap(x[:rows], self) for x in self.row_buffers)
            return self.keys, self.values
        read = self._count_columns(used)
        if used == self.row_buffers[0].shape[2]:  # double it for the remaining rows; unused pages are never touched
            extra = min(used, kv_cache.GROWTH_TOKENS)
            self.row_buffers = tuple(kv_cache.preallocate(x[:rows], None, extra) for x in self.row_buffers)
        columns = self._count_columns(used + 1)
        for buffer, new in zip(self.row_buffers, (key_states, value_states), strict=True):
            if columns > max(read, used + 1):  # these are read from now on, and hidden columns must be finite
                buffer[:, :, used:columns] = 0
            buffer[:rows, :, used : used + 1] = new
        self.keys, self.values = (_SharedTensor.wrap(x[:rows, :, :columns], self) for x in self.row_buffers)
        return self.keys, self.values

    def set_capacity(self, columns: int, rows: int) -> None:
        """Give `rows` rows this many columns, finite ones."""
        used, before = self.layout.used, self.row_buffers
        self.keys = self.values = None  # views, which would hold the old memory of all layers
        self.row_buffers = tuple(x.new_zeros(rows, x.shape[1], columns, x.shape[3]) for x in before)
        for buffer, x in zip(self.row_buffers, before, strict=True):
            buffer[:, :, :used] = x[:rows, :, :used]

    def _count_columns(self, used: int) -> int:
        """Return the columns that attention computes with when `used` are in use."""
        return min(-(-used // self.alignment) * self.alignment, self.row_buffers[0].shape[2])

    def move_rows(self, target: Tensor, source: Tensor) -> None:
        """Copy the rows at `source` to `target`."""
        for buffer in self.row_buffers:
            buffer[target, :, : self.layout.used] = buffer[source, :, : self.layout.used]

    def drop_columns(self, columns: int) -> None:
        """Drop the first `columns` of completions, which no row attends to any more."""
        used = self.layout.used
        for buffer in self.row_buffers:
            buffer[:, :, : used - columns] = buffer[:, :, columns:used].clone()

    def select_prompts(self, prompts: Tensor) -> None:
        """Keep these prompts only."""
        self.prompt = tuple(x.index_select(0, prompts) for x in self.prompt)  # type: ignore[assignment]

    def add_prompts(self, keys: Tensor, values: Tensor, rows: slice) -> None:
        """Add prompts whose rows are at `rows`, and zero their earlier columns, as hidden columns must be finite."""
        width = max(self.prompt[1].shape[2], keys.shape[2])
        self.prompt = tuple(  # type: ignore[assignment]
            torch.cat([F.pad(x, (0, 0, width - x.shape[2], 0)) for x in pair])
            for pair in zip(self.prompt, (keys, values), strict=True)
        )
        if (missing := rows.stop - len(self.row_buffers[0])) > 0:
            self.row_buffers = tuple(torch.cat([x, x.new_empty(missing, *x.shape[1:])]) for x in self.row_buffers)
        for x in self.row_buffers:
            x[rows, :, : self._count_columns(self.layout.used)] = 0


class PassingLayer(DynamicLayer):  # type: ignore[no-untyped-call]  # transformers' own __init_subclass__
    """Caches nothing: the keys of what came before are added where the layer attends."""

    def __init__(self, layout: PrefixLayout) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.layout = layout

    def get_seq_length(self) -> int:
        return self.layout.length + self.layout.used

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states


def _is_kernels_kind(keys: Tensor, values: Tensor) -> bool:
    from policygrad.samplers.local.kernels import ATTENTION_DTYPES, LARGEST_WIDTH

    return keys.dtype in ATTENTION_DTYPES and max(keys.shape[-1], values.shape[-1]) <= LARGEST_WIDTH


def column_alignment(keys: Tensor) -> int:
    """Return the multiple of columns that attention computes with. In half precision on a CPU, oneDNN compiles a matrix product for
    every new shape and keeps it, which would be one per length."""
    return _ALIGNMENT if is_half_on_cpu(keys) else 1


def is_half_on_cpu(x: Tensor) -> bool:
    return x.dtype.itemsize < 4 and x.device.type == "cpu"


class UnsupportedError(NotImplementedError):
    """The model does something else with its keys than pass them to `scaled_dot_product_attention`."""


class _SharedTensor(Tensor):
    """Keys or values of one layer, usable in attention only: any other operation would see the completion without its prompt."""

    layer: SharedPrefixLayer
    repeats: int | None
    """While heads are being repeated for grouped queries: how often; 0 before that is known. None otherwise."""

    @classmethod
    def wrap(cls, x: Tensor, layer: SharedPrefixLayer, repeats: int | None = None) -> _SharedTensor:
        wrapped = x.as_subclass(cls)
        wrapped.layer, wrapped.repeats = layer, repeats
        return wrapped

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("__get__", "size", "dim"):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func is F.scaled_dot_product_attention:
            return _attend(*args, **(kwargs or {}))
        if func is attend_with_sinks:
            query, key, value, mask, sinks, scale = args
            return _attend(query, key, value, mask, scale=scale, sinks=sinks)
        # x[:, :, None].expand(N, H, n, L, D).reshape(N, n·H, L, D), by which transformers 5.17 gives each query a head of its own:
        # `_attend` needs no repeated heads, so nothing is copied
        x, *rest = args
        if isinstance(x, _SharedTensor):
            every, (rows, heads, used, width), repeats = slice(None), x.shape, x.repeats
            if name == "__getitem__" and repeats is None and rest == [(every, every, None, every, every)]:
                return cls.wrap(x, x.layer, 0)
            if name == "expand" and repeats == 0 and len(rest) == 5 and rest == [rows, heads, rest[2], used, width]:
                return cls.wrap(x, x.layer, int(rest[2]))
            if name == "reshape" and repeats and rest == [rows, heads * repeats, used, width]:
                return cls.wrap(x, x.layer)
        raise UnsupportedError(f"{func} on shared keys")


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute softmax(scale · q kᵀ) v, [N, Hq, 1, D] or [N, H, Hq / H, D] like `query`, with one token per row.

    A row attends to what `PrefixLayout.view` allows, not `attn_mask`, which must be the [N, 1, 1, 1] that the model was given.
    """
    if not isinstance(key, _SharedTensor) or not isinstance(value, _SharedTensor) or isinstance(query, _SharedTensor):
        raise UnsupportedError("keys and values that are not both shared")
    if key.repeats is not None or value.repeats is not None:
        raise UnsupportedError("partly repeated heads")
    if is_causal or dropout_p or attn_mask is None or attn_mask.shape[-1] != 1 or attn_mask.dtype != torch.bool:
        raise UnsupportedError("attention with another mask than the given one")
    if key.layer.uses_kernel:
        return _attend_by_kernel(query, key, value, scale, sinks)
    layout, view = key.layer.layout, key.layer.layout.view(key.layer.window, key.layer.alignment)
    with torch._C.DisableTorchFunctionSubclass():
        keys, values = (x.as_subclass(Tensor)[:, :, view.first_completion_column :] for x in (key, value))
        prompt_keys, prompt_values = (x[:, :, view.first_prompt_column :] for x in key.layer.prompt)
        rows, heads, used, width = keys.shape
        scale = width**-0.5 if scale is None else scale
        completion_columns = view.completion_columns[..., :used]
        q = query.reshape(rows, heads, -1, width)
        sink = None if sinks is None else sinks.view(1, heads, -1, 1)
        if is_half_on_cpu(keys):
            out = _attend_in_half_precision(q, (keys, values), (prompt_keys, prompt_values), layout, view, scale, sink)
            return out.reshape(*query.shape[:-1], values.shape[-1])
        q, length = q * scale, prompt_keys.shape[2]
        prompt_scores = layout.from_grid(layout.to_grid(q) @ prompt_keys.transpose(2, 3))
        scores = at_least_float32(torch.cat([prompt_scores, q @ keys.transpose(2, 3)], -1))
        scores[..., :length] += view.prompt_columns
        scores[..., length:] += completion_columns
        p = (scores.softmax(-1) if sink is None else softmax_with_sinks(scores, sink)).to(values.dtype)
        out = p[..., length:] @ values
        out += layout.from_grid(layout.to_grid(p[..., :length]) @ prompt_values)
        return out.reshape(*query.shape[:-1], values.shape[-1])


def _attend_by_kernel(
    query: Tensor, key: _SharedTensor, value: _SharedTensor, scale: float | None, sinks: Tensor | None
) -> Tensor:
    """Compute the same by Triton's kernel."""
    from policygrad.samplers.local.kernels import attend_once

    layer, layout = key.layer, key.layer.layout
    with torch._C.DisableTorchFunctionSubclass():
        keys, values = (x.as_subclass(Tensor) for x in (key, value))
        prompt_first, prompt_end, first, end = layout.find_ranges(layer.window)
        parts = [
            (*layer.prompt, layout.rows_of_prompts, prompt_first, prompt_end),
            (keys, values, layout.rows_of_rows, first, end),
        ]
        rows, _, _, width = keys.shape
        scale = width**-0.5 if scale is None else scale
        out = attend_once(query.reshape(rows, -1, width), parts, scale, None if sinks is None else sinks.contiguous())
        return out.view(*query.shape[:-1], values.shape[-1])


def _attend_in_half_precision(
    query: Tensor,
    completions: tuple[Tensor, Tensor],
    prompt: tuple[Tensor, Tensor],
    layout: PrefixLayout,
    view: LayoutView,
    scale: float,
    sink: Tensor | None,
) -> Tensor:
    """Compute the same on a CPU, with scores and sums in float32 although products are in half precision; query [N, H, G, D].

    The kernel also returns log Σ exp(score). A softmax over the columns of both parts weights the prompt's by its share of the sum,
    1 / (1 + exp(completion's − prompt's)).

    Args:
        completions, prompt: Keys and values.
    """
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    mask = view.completion_columns[..., : completions[0].shape[2]]
    # a group's queries are given like places of a text, so that their keys are read once for all of them
    completion, total_of_completion = flash(query, *completions, 0.0, False, attn_mask=mask, scale=scale)
    shared, total = flash(layout.to_grid(query), *prompt, 0.0, False, attn_mask=view.prompt_mask, scale=scale)
    shared, total = layout.from_grid(shared), layout.from_grid(total[..., None])
    sees_prompt = (view.prompt_columns == 0).any(-1, keepdim=True)  # of nothing the kernel returns a sum too
    total, total_of_completion = total.where(sees_prompt, -torch.inf), total_of_completion.view(total.shape)
    out = at_least_float32(completion.view(shared.shape))
    out = out.lerp(at_least_float32(shared).where(sees_prompt, 0), (total - total_of_completion).sigmoid_())
    if sink is not None:
        out *= (torch.logaddexp(total, total_of_completion) - sink).sigmoid_()
    return out.to(query.dtype)


def find_windows(model: Any) -> list[int | None]:
    """Return the window of each layer that has keys, None where it sees all tokens. Raises UnsupportedError for other layers."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = base.config.get_text_config(decoder=True)
    layers, chunked = DynamicCache(config=config).layers, "chunked_attention"
    if chunked in (getattr(config, "layer_types", None) or ()) or getattr(config, "attention_chunk_size", None):
        raise UnsupportedError(chunked)
    kept = [
        x for x in layers if hasattr(x, "update") or hasattr(x, "update_conv_state")
    ]  # others read a layer before them
    if any(type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) for layer in kept):
        raise UnsupportedError("layers without keys")
    return [int(x.sliding_window) if isinstance(x, DynamicSlidingWindowLayer) else None for x in kept]


# Tests of a model on a few made-up tokens, before the first completion.


@torch.no_grad()
def supports_shared_prefix(model: nn.Module, pad: int, *, at_attention: bool = False, kernels: bool = False) -> bool:
    """Return True if a `SharedPrefixCache` gives the logits of full sequences, relative to how much a sequence matters to this
    model: with prompts of two lengths, rows that leave, and a prompt that is added later."""
    config: Any = getattr(model, "config", None)
    before = switch_to_own_attention(model) if at_attention and config is not None else ""
    with short_windows(model):
        shares = _shares_prefixes(model, pad, at_attention, kernels)
    if before and not shares and config.get_text_config()._attn_implementation != before:
        set_attention(model, before)
    return shares


def _shares_prefixes(model: nn.Module, pad: int, at_attention: bool, kernels: bool) -> bool:
    tokens = torch.arange(18, device=next(model.parameters()).device).view(3, 6) * 5 % 7 + 1
    prompts = [tokens[0, :5], tokens[1, :3], tokens[2, :4]]
    sequences = [torch.cat([prompts[i], tokens[j, :2]]) for i, j in ((1, 0), (0, 2))]
    expected = _last_logits(model, [*sequences, torch.cat([prompts[2], tokens[0, :1]])]).float()
    effect = float((expected[0] - expected[1]).abs().max())
    try:
        cache = SharedPrefixCache(model, pad, at_attention=at_attention, kernels=kernels)
        cache.read(prompts[:2], torch.tensor([2, 1], device=cache.device), 4)
        cache.step(tokens[[1, 2, 0], 0], torch.tensor([5, 5, 3], device=cache.device))
        order = cache.keep_rows(torch.tensor([1, 2], device=cache.device))
        if order.tolist() != [2, 1]:
            return False
        cache.read(prompts[2:], torch.tensor([1], device=cache.device), 4)
        position = torch.tensor([4, 6, 4], device=cache.device)
        actual = cache.step(torch.stack([tokens[0, 1], tokens[2, 1], tokens[0, 0]]), position).float()
    except Exception:  # an architecture may raise anything for a call that it does not support; the plain cache remains
        return False
    is_half = next(model.parameters()).dtype in (torch.bfloat16, torch.float16)
    return float((actual - expected).abs().max()) <= (0.05 if is_half else 1e-4) * effect


@torch.no_grad()
def supports_continuing(model: nn.Module, pad: int, *, at_attention: bool = False) -> bool:
    """Return True if texts that continue a cached one, in different places, get the logits of the whole text, beside one that
    continues none."""
    from policygrad.samplers.local.text_cache import TextCache

    tokens = torch.arange(36, device=next(model.parameters()).device).view(3, 12) * 5 % 7 + 1
    prompts = [tokens[0, :11], torch.cat([tokens[0, :5], tokens[2, :3]]), tokens[1, :3]]
    with short_windows(model):
        expected = _last_logits(model, prompts).float()
        effect = float((expected[0] - expected[1]).abs().max())
        try:
            texts = TextCache(model, keeps_prompts=True)
            cache = SharedPrefixCache(model, pad, texts, at_attention=at_attention)
            begun = [tokens[0, :7].cpu(), tokens[1, :4].cpu()]
            cache.read(begun, torch.tensor([1, 1], device=cache.device), 4)
            if not at_attention:
                cache.step(tokens[[0, 1], [7, 4]], torch.tensor([7, 4], device=cache.device))
                texts.add(tokens[0, :8].cpu(), lambda start: cache.copy_text(0, 1, start))
            actual, _ = SharedPrefixCache(model, pad, texts, at_attention=at_attention).read(
                [p.cpu() for p in prompts], torch.tensor([1, 1, 1], device=cache.device), 4
            )
        except Exception:  # as above: texts are then read whole
            return False
    return texts.counts.shared > 0 and _is_close(model, actual, expected, effect)


@torch.no_grad()
def supports_continuing_states(model: nn.Module, pad: int) -> bool:
    """Return True if prompts that begin alike get the logits of the whole text from a `StateCache`, beside one that begins
    otherwise, also after another token."""
    from policygrad.samplers.local.state_cache import StateCache

    tokens = torch.arange(36, device=next(model.parameters()).device).view(3, 12) * 5 % 7 + 1
    prompts = [tokens[0, :11], tokens[1, :3], torch.cat([tokens[0, :7], tokens[2, :2]]), tokens[0, :9]]
    sequences = [torch.cat([p, tokens[2, 3:4]]) for p in prompts]
    expected, after = _last_logits(model, prompts).float(), _last_logits(model, sequences).float()
    effect = float((expected[0] - expected[1]).abs().max())
    repeats = torch.ones(len(prompts), dtype=torch.int64, device=tokens.device)
    try:
        texts = StateCache(model, keeps_prompts=True)
        texts.call_tokens = 0
        PlainDecodeCache(model, pad, texts=texts).read([tokens[0, :7].cpu()], repeats[:1], 4)
        cache = PlainDecodeCache(model, pad, texts=texts)
        actual, _ = cache.read([p.cpu() for p in prompts], repeats, 4)
        if not cache.supports_refill:
            return False
        positions = torch.tensor([len(p) for p in prompts], device=tokens.device)
        next_actual = cache.step(tokens[2, 3].expand(len(prompts)), positions)
    except Exception:  # as above
        return False
    is_close = _is_close(model, actual, expected, effect) and _is_close(model, next_actual, after, effect)
    return texts.counts.shared > 0 and is_close


@torch.no_grad()
def supports_appending(model: nn.Module, pad: int) -> bool:
    """Return True if the plain cache takes rows that are read after others, and continues both as one pass does."""
    tokens = torch.arange(24, device=next(model.parameters()).device).view(2, 12) * 5 % 7 + 1
    prompts, cache = [tokens[0, :9], tokens[1, :3]], PlainDecodeCache(model, pad)
    sequences = [torch.cat([prompt, tokens[1, 3:4]]) for prompt in prompts]
    expected = _last_logits(model, sequences).float()
    effect = float((expected[0] - expected[1]).abs().max())
    try:
        for prompt in prompts:
            if cache.batch_size and not cache.supports_refill:
                return False
            cache.read([prompt], tokens.new_ones(1), 4)
        actual = cache.step(tokens[1, 3].expand(2), tokens.new_tensor([len(prompt) for prompt in prompts]))
    except Exception:  # as above
        return False
    return _is_close(model, actual, expected, effect)


def _is_close(model: nn.Module, actual: Tensor, expected: Tensor, effect: float) -> bool:
    """Return whether logits differ by less than a small part of what another text makes of them."""
    is_half = next(model.parameters()).dtype in (torch.bfloat16, torch.float16)
    return float((actual.float() - expected).abs().max()) <= (0.05 if is_half else 1e-4) * effect


@torch.no_grad()
def supports_padding(model: nn.Module, pad: int) -> bool:
    """Test the plain cache with two prompts, two rows of one of them, and a row that leaves, in texts beyond the limits of the
    model's attention up to `_LONGEST_LIMIT`.

    Returns:
        True if prompts of two lengths, one of them padded, get the logits of the same texts in one pass; False, with a
        warning, if only prompts of equal length do.

    Raises:
        ModelError: Not even those: the architecture's cache cannot be repeated and reordered by row, or continues other texts.
    """
    context = (context_length(model) or 2 * _LONGEST_LIMIT) - 8
    longest = 5 + max((n for n in attention_limits(model) if n <= min(_LONGEST_LIMIT, context)), default=0)
    is_half = next(model.parameters()).dtype in (torch.bfloat16, torch.float16)
    unequal, scale, reason = _decode_gap(model, pad, (longest, longest - 2))
    if math.isnan(unequal):  # the weights or activations are not finite, which the first step names
        return True
    if unequal <= (0.05 if is_half else 1e-3) * scale:
        return True
    equal, scale, reason = _decode_gap(model, pad, (longest, longest))
    if not equal <= _TOLERANCE * scale:
        raise _unsupported_model(model, reason)
    if unequal <= min(3 * equal, _TOLERANCE * scale):  # rounding, which padding does not increase
        return True
    warnings.warn(
        f"{type(model).__name__} computes otherwise where a prompt is padded: only prompts of equal length are sampled together, "
        "which takes longer where prompts have many lengths",
        stacklevel=2,
    )
    return False


def _decode_gap(model: nn.Module, pad: int, lengths: tuple[int, int]) -> tuple[float, float, str]:
    """Return the largest difference of logits between the plain cache and one pass, after prompts of these lengths; how far two
    texts' logits differ, or logits spread; and what is wrong in words. An error counts as an infinite difference."""
    cache = PlainDecodeCache(model, pad)
    starts = torch.tensor([[0], [3]], device=cache.device)
    tokens = (torch.arange(max(lengths), device=cache.device) * 5 + starts) % 7 + 1
    prompts, new = [tokens[i, :n] for i, n in enumerate(lengths)], torch.arange(1, 4, device=cache.device)
    sequences = [torch.cat([prompts[0], new[1:2], new[:1]]), torch.cat([prompts[1], new[2:], new[1:2]])]
    expected = _last_logits(model, sequences)
    scale = max(float((expected[0] - expected[1]).abs().max()), float(expected.std()))
    first, second = lengths
    try:
        cache.read(prompts, torch.tensor([2, 1], device=cache.device), 4)
        cache.step(new, torch.tensor([first, first, second], device=cache.device))
        cache.keep_rows(torch.tensor([1, 2], device=cache.device))
        actual = cache.step(new[:2], torch.tensor([first + 1, second + 1], device=cache.device))
    except ModelError:
        raise
    except (AttributeError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        if is_out_of_memory(error):
            raise
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
        return math.inf, scale, reason
    gap = float((actual - expected).abs().max())
    return gap, scale, f"logits differ by up to {gap:.2g} from those of the same text in one pass"


def _last_logits(model: nn.Module, sequences: Sequence[Tensor]) -> Tensor:
    """Return the logits [n, V] after each sequence."""
    return torch.stack(
        [model(input_ids=ids[None], use_cache=False, return_dict=True).logits[0, -1] for ids in sequences]
    )


def _unsupported_model(model: nn.Module, reason: str) -> ModelError:
    return ModelError(
        f"{type(model).__name__} cannot decode several completions at once from its cache ({reason}). Sample with an engine that "
        "has this architecture (--sampler.engine vllm), or choose another model."
    )
