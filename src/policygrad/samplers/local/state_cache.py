"""Keep a model's own cache at the ends of texts that later ones begin with: for layers with a state instead of keys, which can be
continued where it was kept and nowhere else."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from policygrad.samplers.local.beginnings import plan_beginnings
from policygrad.samplers.local.kv_cache import (
    CALL_TOKENS,
    CountingCache,
    PrefillCounts,
    ReadPart,
    divide_by_length,
    get_cache,
    prefill,
    weights_version,
)
from policygrad.samplers.local.text_cache import find_room

_REMEMBERED = 256  # prompts whose beginnings are looked for in later ones


@dataclass(frozen=True, eq=False)
class _Kept:
    """A cache of one row after a text."""

    length: int
    name: str
    """The model's argument that takes it."""
    cache: Any

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for layer in self.cache.layers for _, _, x in _list_states(layer))


class StateCache:
    """Caches at the ends of texts, by their token ids. Beyond `room` bytes those go that were used longest ago."""

    def __init__(self, model: nn.Module, counts: PrefillCounts | None = None, *, keeps_prompts: bool = False) -> None:
        """
        Args:
            counts: Counts the tokens of prompts.
            keeps_prompts: Keep what is cached at the end of each prompt, not only where several of them part.
        """
        self.room, self.size, self.call_tokens = find_room(next(model.parameters()).device), 0, CALL_TOKENS
        self.counts, self.keeps_prompts = counts or PrefillCounts(), keeps_prompts
        self._kept, self._weights = OrderedDict[bytes, _Kept](), weights_version(model)
        self._remembered = OrderedDict[int, Tensor]()
        self._beginnings = dict[int, tuple[int, ...]]()

    def is_valid_for(self, model: nn.Module) -> bool:
        """Return whether the weights that the texts were read with have not been changed in place."""
        return self._weights == weights_version(model)

    def plan(self, prompts: Sequence[Tensor]) -> None:
        """Choose what is read once for several of the prompts that will be read, and of those that were."""
        for prompt in prompts:
            self._remembered[id(prompt)] = prompt
        while len(self._remembered) > max(_REMEMBERED, len(prompts)):
            self._remembered.popitem(last=False)
        self._beginnings = plan_beginnings(list(self._remembered.values()))

    def __len__(self) -> int:
        return len(self._kept)

    def read(self, model: nn.Module, prompts: Sequence[Tensor], pad: int) -> list[ReadPart]:
        """Read prompts, what is kept of them not again. Those with the same beginning and equally many tokens after it are read
        together: padding would change a state."""
        self._read_beginnings(model, prompts, pad)
        groups = dict[tuple[int, int], list[int]]()
        kept = [self._find(prompt) for prompt in prompts]
        for i, (prompt, found) in enumerate(zip(prompts, kept, strict=True)):
            groups.setdefault((0, 0) if found is None else (id(found), len(prompt) - found.length), []).append(i)
        alone = groups.pop((0, 0), [])
        passes, everything = _divide(prompts, alone), _divide(prompts, range(len(prompts)))
        tokens = [len(which) * new for (_, new), which in groups.items()] + _count_tokens(prompts, passes)
        if sum(max(n, self.call_tokens) for n in tokens) >= sum(_count_tokens(prompts, everything)):
            groups, passes = {}, everything
        parts = list[ReadPart]()
        for which in passes:
            self.counts.read += sum(len(prompts[i]) for i in which)
            parts.append(ReadPart(which, *prefill(model, [prompts[i] for i in which], pad)))
        for (_, new), which in groups.items():
            beginning = kept[which[0]]
            assert beginning is not None
            self.counts.shared += len(which) * beginning.length
            parts.append(self._continue(model, beginning, which, [prompts[i][-new:] for i in which]))
        if self.keeps_prompts:
            for part in parts:
                self._keep([prompts[i] for i in part.which], part, model)
        return parts

    def _continue(self, model: nn.Module, beginning: _Kept, which: Sequence[int], new: Sequence[Tensor]) -> ReadPart:
        """Read texts of equal lengths after a beginning."""
        device, length = next(model.parameters()).device, beginning.length
        ids = torch.stack(list(new)).to(device)
        self.counts.read += ids.numel()
        cache = _copy_rows(beginning.cache, torch.zeros(len(ids), dtype=torch.int64, device=device))
        if isinstance(cache, CountingCache):
            cache.length = length
        mask = torch.ones(len(ids), length + ids.shape[1], dtype=torch.int64, device=device)
        has_keys = beginning.name == "past_key_values"
        out = model(
            input_ids=ids,
            attention_mask=mask if has_keys else None,
            position_ids=(length + torch.arange(ids.shape[1], device=device)).expand_as(ids),
            **{beginning.name: cache},
            use_cache=True,
            logits_to_keep=1,
            return_dict=True,
        )
        return ReadPart(which, out, mask)

    def _read_beginnings(self, model: nn.Module, prompts: Sequence[Tensor], pad: int) -> None:
        """Read what several planned prompts begin with, and is not kept: shorter ones first."""
        wanted = dict[bytes, Tensor]()
        for prompt in prompts:
            for length in self._beginnings.get(id(prompt), ()):
                wanted.setdefault(_key(prompt[:length]), prompt[:length])
        for key, ids in sorted(wanted.items(), key=lambda item: len(item[1])):
            if key in self._kept:
                continue
            shorter = self._find(ids)
            if shorter is not None:
                self.counts.shared += shorter.length
                part = self._continue(model, shorter, [0], [ids[shorter.length :]])
            else:
                self.counts.read += len(ids)
                part = ReadPart([0], *prefill(model, [ids], pad))
            self._keep([ids], part, model)

    def _keep(self, texts: Sequence[Tensor], part: ReadPart, model: nn.Module) -> None:
        """Keep copies of what was cached of texts that have been read."""
        name, cache = get_cache(part.out, model)
        for row, ids in enumerate(texts):
            if (key := _key(ids)) in self._kept:
                continue
            own = _copy_rows(cache, torch.tensor([row], device=part.mask.device))
            for layer in own.layers:
                if isinstance(getattr(layer, "keys", None), Tensor):  # without padding
                    columns = slice(layer.keys.shape[2] - len(ids), None)
                    layer.keys, layer.values = layer.keys[:, :, columns], layer.values[:, :, columns]
            kept = _Kept(len(ids), name, own)
            if kept.nbytes > self.room:
                continue
            self._kept[key] = kept
            self.size += kept.nbytes
        while self.size > self.room:
            self.size -= self._kept.popitem(last=False)[1].nbytes

    def _find(self, ids: Tensor) -> _Kept | None:
        """Return what is kept of the longest text that `ids` continues."""
        for length in sorted({kept.length for kept in self._kept.values()}, reverse=True):
            if length < len(ids) and (kept := self._kept.get(key := _key(ids[:length]))) is not None:
                self._kept.move_to_end(key)
                return kept
        return None


def _divide(prompts: Sequence[Tensor], which: Sequence[int]) -> list[list[int]]:
    """Divide some of the prompts by their lengths."""
    return [[which[i] for i in part] for part in divide_by_length([len(prompts[i]) for i in which])]


def _count_tokens(prompts: Sequence[Tensor], passes: Sequence[Sequence[int]]) -> list[int]:
    """Return how many tokens each pass reads, padding included."""
    return [len(part) * max(len(prompts[i]) for i in part) for part in passes]


def _key(ids: Tensor) -> bytes:
    return ids.numpy().tobytes()


def _copy_rows(cache: Any, rows: Tensor) -> Any:
    """Return a cache with these rows, which shares no memory with the other one."""
    copied = copy.copy(cache)
    copied.layers = []
    for layer in map(copy.copy, cache.layers):
        for name, value in vars(layer).items():
            if isinstance(value, dict):
                setattr(layer, name, dict(value))
        if hasattr(layer, "reorder_cache"):
            layer.reorder_cache(rows)
        copied.layers.append(layer)
    return copied


def _list_states(layer: Any) -> Iterator[tuple[str, object, Tensor]]:
    """Yield the tensors that a layer keeps."""
    for name, value in vars(layer).items():
        for key, x in value.items() if isinstance(value, dict) else [(None, value)]:
            if isinstance(x, Tensor):
                yield name, key, x
