"""Keep what a model has cached of texts, so that what several requests begin with is read once: a conversation's earlier turns, and
instructions that many prompts have in common.

The texts are a tree: a node has the keys and values of its own tokens, and what several texts begin with is there once. It is all
of one version of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from policygrad.samplers.local.beginnings import plan_beginnings
from policygrad.samplers.local.kv_cache import (
    CALL_TOKENS,
    PrefillCounts,
    divide_by_length,
    left_pad,
    prefill,
    weights_version,
)
from policygrad.utils.memory import measure_free_memory

Ids = NDArray[np.int64]
LayerTensors = list[tuple[Tensor, Tensor]]  # keys and values of each layer, [H, n, D]
MAX_BYTES_CPU = 2**31
MAX_SHARE = 0.25  # of the memory that is free
_FULL = 0.9  # of the room that is kept when it was too little
_GATHERING = 8  # cached tokens whose copy takes as long as reading one


def find_room(device: torch.device) -> int:
    """Return how many bytes texts may take: a quarter of what is free, on a CPU at most 2 GiB."""
    if device.type == "cuda":
        return int(MAX_SHARE * torch.cuda.mem_get_info(device)[0])
    return int(min(MAX_BYTES_CPU, MAX_SHARE * measure_free_memory()))


@dataclass(eq=False)
class _Node:
    """Tokens that follow those of the node above."""

    ids: Ids
    layers: LayerTensors
    parent: _Node | None = None
    children: dict[int, _Node] = field(default_factory=dict)  # by their first token
    used: int = 0  # when, by the cache's clock

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for pair in self.layers for x in pair)


class TextCache:
    """Keys and values of texts, by their token ids. Beyond `room` bytes those go that were used longest ago."""

    def __init__(self, model: nn.Module, counts: PrefillCounts | None = None, *, keeps_prompts: bool = False) -> None:
        """
        Args:
            counts: Counts the tokens of prompts.
            keeps_prompts: Keep prompts that are read, not only what several of them begin with.
        """
        self.room, self.size, self.clock = find_room(next(model.parameters()).device), 0, 0
        self.counts, self.keeps_prompts = counts or PrefillCounts(), keeps_prompts
        self._root, self._weights = _Node(np.empty(0, dtype=np.int64), []), weights_version(model)
        self._beginnings = dict[int, tuple[int, ...]]()  # by id of a prompt: the lengths of what it shares with others

    def is_valid_for(self, model: nn.Module) -> bool:
        """Return whether the weights that the texts were read with have not been changed in place."""
        return self._weights == weights_version(model)

    def plan(self, prompts: Sequence[Tensor]) -> None:
        """Choose what is read once for several of the prompts that will be read."""
        self._beginnings = plan_beginnings(prompts)

    def add(self, ids: Tensor, copy: Callable[[int], LayerTensors]) -> None:
        """Keep a text, unless it is larger than all the room there is.

        Args:
            copy: Returns copies of its keys and values from a token on: those before it are there already.
        """
        tokens = ids.numpy()
        self.clock += 1
        node, length = self._root, 0
        for node, count in self._walk(tokens):
            length += count
            if count < len(node.ids):
                node = self._split(node, count) if length < len(tokens) else node
        if length == len(tokens):
            return
        leaf = _Node(tokens[length:].copy(), copy(length), node, used=self.clock)
        if leaf.nbytes > self.room:
            return
        node.children[int(leaf.ids[0])] = leaf
        self.size += leaf.nbytes
        if self.size > self.room:
            self._make_room()

    def count_cached(self, ids: Tensor) -> int:
        """Return how many tokens at a text's beginning are cached; of its last one the logits are wanted, so it is not."""
        return sum(count for _, count in self._walk(ids.numpy()[:-1]))

    def __len__(self) -> int:
        """Number of texts that no other continues."""
        return sum(1 for node in self._nodes() if not node.children)

    def read_beginnings(self, model: nn.Module, prompts: Sequence[Tensor], pad: int) -> None:
        """Read what several planned prompts begin with, as far as these have it and it is not cached: shorter ones first."""
        wanted = dict[bytes, tuple[int, Tensor]]()
        for prompt in prompts:
            for level, length in enumerate(self._beginnings.get(id(prompt), ())):
                wanted.setdefault(prompt[:length].numpy().tobytes(), (level, prompt[:length]))
        for level in sorted({level for level, _ in wanted.values()}):
            texts = [ids for at, ids in wanted.values() if at == level and self.count_cached(ids) < len(ids) - 1]
            for part in self.divide(texts):
                read = [texts[i] for i in part]
                out, mask = self.prefill(model, read, pad)
                self.add_read(out.past_key_values, read, mask.shape[1])

    def add_read(self, cache: Any, prompts: Sequence[Tensor], width: int) -> None:
        """Keep prompts that were just read into a cache of `width` columns, padded on the left."""
        for row, prompt in enumerate(prompts):
            first = width - len(prompt)

            def copy(start: int, row: int = row, first: int = first) -> LayerTensors:
                return [
                    (
                        layer.keys[row, :, first + start : width].clone(),
                        layer.values[row, :, first + start : width].clone(),
                    )
                    for layer in cache.layers
                ]

            self.add(prompt, copy)

    def divide(self, prompts: Sequence[Tensor]) -> list[list[int]]:
        """Divide prompts into those that are read together: those with a cached beginning apart from the others where that saves
        time, and otherwise by their lengths."""
        if not prompts:
            return []
        everything, cached = list(range(len(prompts))), [self.count_cached(prompt) for prompt in prompts]
        known = [i for i in everything if cached[i]]
        others = [i for i in everything if not cached[i]]
        if not known:
            return divide_by_length([len(prompt) for prompt in prompts])
        if not others:
            return [everything]
        apart = self._cost(prompts, known) + self._cost(prompts, others) + CALL_TOKENS
        return [known, others] if apart < self._cost(prompts, everything) else [everything]

    def _cost(self, prompts: Sequence[Tensor], which: Sequence[int]) -> int:
        """Return about how many tokens one call for these prompts takes as long as."""
        new = max(len(prompts[i]) - self.count_cached(prompts[i]) for i in which)
        longest = max(len(prompts[i]) for i in which)
        return len(which) * min(longest, new + (longest - new) // _GATHERING)

    def prefill(self, model: nn.Module, prompts: Sequence[Tensor], pad: int) -> tuple[Any, Tensor]:
        """Read prompts in one forward pass, what is cached of them not again.

        Returns:
            The model's output, with logits of the last position only, and the mask [C, L] of the keys that are tokens.
        """
        self.clock += 1
        longest = max(map(len, prompts))
        new = max(len(prompt) - self.count_cached(prompt) for prompt in prompts)
        width = longest - new
        if not width or new + width // _GATHERING >= longest:  # copying would cost what is saved
            self.counts.read += sum(map(len, prompts))
            return prefill(model, prompts, pad, keep_all=True)
        # Each row reads its last `new` tokens, also those that are cached, where others would have padding: padding between what
        # is cached and what is read would count in a window.
        lengths = [max(0, len(prompt) - new) for prompt in prompts]
        self.counts.shared += sum(lengths)
        self.counts.read += sum(map(len, prompts)) - sum(lengths)
        cache = self._gather(model, prompts, lengths, width)
        ids, mask = left_pad([prompt[n:] for prompt, n in zip(prompts, lengths, strict=True)], pad)
        starts = torch.tensor(lengths)
        positions = (starts[:, None] + mask.cumsum(1) - 1).clamp(min=0)
        past = (torch.arange(width) >= width - starts[:, None]).to(mask.dtype)
        device = next(model.parameters()).device
        mask = torch.cat([past, mask], 1).to(device)
        out = model(
            input_ids=ids.to(device),
            attention_mask=mask,
            position_ids=positions.to(device),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
            return_dict=True,
        )
        return out, mask

    def _gather(self, model: nn.Module, prompts: Sequence[Tensor], lengths: Sequence[int], width: int) -> DynamicCache:
        """Return a cache with the first tokens of each prompt, padded on the left, of all layers, also those with windows."""
        cache = DynamicCache()
        paths = [list(self._walk(prompt.numpy()[:n])) for prompt, n in zip(prompts, lengths, strict=True)]
        first = next(node for path in paths for node, _ in path)
        for number, pair in enumerate(first.layers):
            padded = [x.new_zeros(len(prompts), x.shape[0], width, x.shape[2]) for x in pair]
            for row, (path, length) in enumerate(zip(paths, lengths, strict=True)):
                column = width - length
                for node, count in path:
                    for target, x in zip(padded, node.layers[number], strict=True):
                        target[row, :, column : column + count] = x[:, :count]
                    column += count
            cache.update(padded[0], padded[1], number)
        return cache

    # The tree.

    def _walk(self, tokens: Ids) -> Iterator[tuple[_Node, int]]:
        """Yield the nodes that have a text's tokens, each with how many of its own these are."""
        node, at = self._root, 0
        while at < len(tokens) and (child := node.children.get(int(tokens[at]))) is not None:
            count = min(len(child.ids), len(tokens) - at)
            differs = child.ids[:count] != tokens[at : at + count]
            count = int(differs.argmax()) if differs.any() else count
            child.used = self.clock
            yield child, count
            if count < len(child.ids):
                return
            node, at = child, at + count

    def _split(self, node: _Node, count: int) -> _Node:
        """Divide a node after its first `count` tokens; return the upper part."""
        assert node.parent is not None
        upper = _Node(
            node.ids[:count], [_part(pair, slice(count)) for pair in node.layers], node.parent, used=self.clock
        )
        node.parent.children[int(upper.ids[0])] = upper
        node.ids, node.layers = node.ids[count:], [_part(pair, slice(count, None)) for pair in node.layers]
        node.parent, upper.children = upper, {int(node.ids[0]): node}
        return upper

    def _make_room(self) -> None:
        """Drop texts, those first that were used longest ago, until a tenth of the room is free."""
        while leaves := [node for node in self._nodes() if not node.children and node.used < self.clock]:
            for leaf in sorted(leaves, key=lambda node: node.used):
                assert leaf.parent is not None
                del leaf.parent.children[int(leaf.ids[0])]
                self.size -= leaf.nbytes
                if self.size <= _FULL * self.room:
                    return

    def _nodes(self) -> Iterator[_Node]:
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            stack += node.children.values()
            yield node


def _part(pair: tuple[Tensor, Tensor], columns: slice) -> tuple[Tensor, Tensor]:
    """Copy some columns, so that each part's memory can be freed alone."""
    keys, values = (x[:, columns].clone() for x in pair)
    return keys, values
