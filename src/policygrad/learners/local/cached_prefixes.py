"""Reading the common beginnings of texts once, through what the model itself keeps of them.

A tree of tokens needs attention of our own, which convolutions and recurrent states do not have. They all have a
cache: the beginnings are read in one call, each row of its cache is repeated for the texts that go on from it, and these are read
after it. The gradients of all texts meet in the cache's tensors, so one backward pass through both calls is exact.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from policygrad.learners.local.packing import Pack
from policygrad.learners.local.tree_attention import Ints

StateName = tuple[int, str, int | None]
"""Of a state in a cache: its layer, its name there, and its number where a layer has several of that name."""

_CACHE_NAMES = ("past_key_values", "cache_params")  # the second: state-space models
_LEAST_SAVING = 0.9  # of the tokens that are read: two calls cost more than one
_SMALL_CALL = 512  # tokens below which padding costs less than another call
_MAX_PADDING = 1.25  # padded tokens per token of a larger call


@dataclass(frozen=True, eq=False)
class PrefixPlan:
    """How the texts of a tree are read: each belongs to a beginning, and those of similar length go on together."""

    lengths: Ints  # [G] tokens of each beginning
    firsts: Ints  # [G] a text that has it
    owners: Ints  # [S] the beginning of each text
    calls: tuple[Ints, ...]  # texts that are read in one call, each

    @property
    def width(self) -> int:
        """Tokens that beginnings are padded to."""
        return int(self.lengths.max())


def plan_prefixes(lengths: Ints, shared: Ints) -> PrefixPlan | None:
    """Choose the beginnings that save most tokens; None where they would save few.

    Args:
        lengths: [S] tokens of each text, in the order of a tree.
        shared: [S] how many of them, from the first, belong to the text before.
    """
    begins = _divide(lengths, shared)
    ends = [*begins[1:], len(lengths)]
    common = np.array(
        [
            min(int(shared[a + 1 : b].min(initial=2**62)), int(lengths[a:b].min()) - 1)
            for a, b in zip(begins, ends, strict=True)
        ]
    )
    is_alone = np.diff([*begins, len(lengths)]) == 1
    if is_alone.all() or (common < 1).any():
        return None
    # of a text alone any part may be read first
    common[is_alone] = np.minimum(common[is_alone], common[~is_alone].max())
    owners = np.repeat(np.arange(len(begins)), np.diff([*begins, len(lengths)]))
    remaining = lengths - common[owners]
    calls = tuple(group_by_length(remaining))
    read = len(common) * int(common.max()) + sum(len(x) * int(remaining[x].max()) for x in calls)
    alone = sum(len(x) * int(lengths[x].max()) for x in group_by_length(lengths))
    if read > _LEAST_SAVING * alone or remaining.max() < 2:  # one token is read as a step of decoding, in place
        return None
    return PrefixPlan(common, np.array(begins), owners, calls)


def _divide(lengths: Ints, shared: Ints) -> list[int]:
    """Return where runs of texts begin, each with one beginning, so that most tokens are saved."""
    count = len(lengths)
    saved, previous = np.zeros(count + 1, dtype=np.int64), np.zeros(count + 1, dtype=np.int64)
    for end in range(1, count + 1):
        best, common = -1, 2**62  # tokens that the run's texts but the first have in common with it
        for begin in range(end - 1, -1, -1):
            gain = int(saved[begin]) + (end - begin - 1) * min(common, int(lengths[begin]) - 1)
            if gain > best:
                best, previous[end] = gain, begin
            common = min(common, int(shared[begin]), int(lengths[begin]) - 1)
            if common < 1:
                break
        saved[end] = best
    begins, end = list[int](), count
    while end:
        end = int(previous[end])
        begins.append(end)
    return begins[::-1]


def group_by_length(lengths: Ints) -> Iterator[Ints]:
    """Group texts of similar length, longest first."""
    order = np.argsort(-lengths, kind="stable")
    start, needed = 0, 0
    for i, text in enumerate(order):
        padded = (i - start + 1) * int(lengths[order[start]])
        if i > start and padded > max(_SMALL_CALL, _MAX_PADDING * (needed + int(lengths[text]))):
            yield order[start:i]
            start, needed = i, 0
        needed += int(lengths[text])
    yield order[start:]


def read_with_prefixes(
    network: Any, part: Pack, plan: PrefixPlan, output: str, weigh: Callable[[Tensor], None] | None = None
) -> Tensor:
    """Return [u, ·] what a network computes at `part.predicting_nodes`.

    Args:
        output: The network's output to return, `last_hidden_state` or `logits`.
        weigh: Told before each call which of its tokens [n] are read for the first time, and are no padding.
    """
    device, paths, width = part.ids.device, part.tree.paths, plan.width
    name, config = find_cache_argument(network)
    # the beginnings, padded on the left
    column = np.arange(width) - (width - plan.lengths)[:, None]
    nodes = np.take_along_axis(paths[plan.firsts], np.maximum(column, 0), 1)
    is_token = torch.from_numpy(column >= 0).to(device)
    cache = PrefixCache(config=config)
    inputs = {
        "input_ids": part.ids[torch.from_numpy(nodes).to(device)],
        "attention_mask": is_token.long(),
        "position_ids": torch.from_numpy(np.maximum(column, 0)).to(device),
    }
    is_read = np.zeros(len(part.ids), dtype=bool)

    def announce(nodes: Ints, is_own: np.ndarray[Any, np.dtype[np.bool_]]) -> None:
        if weigh is not None:
            is_new = is_own & ~is_read[nodes]
            _, first = np.unique(np.where(is_new, nodes, -1), return_index=True)
            is_first = np.zeros(nodes.size, dtype=bool)
            is_first[first] = True
            weigh(torch.from_numpy(is_first & is_new.ravel()).to(device))
            is_read[nodes[is_own]] = True

    announce(nodes, column >= 0)
    outputs = [getattr(network(**inputs, **{name: cache}, use_cache=True), output)]
    places_of_calls, offset = [(nodes, column >= 0, 0)], nodes.size
    for texts in plan.calls:
        owners = plan.owners[texts]
        starts, ends = plan.lengths[owners, None], part.tree.lengths[texts, None]
        depth = starts + np.arange((ends - starts).max())
        nodes = np.take_along_axis(paths[texts], np.minimum(depth, ends - 1), 1)
        rows = torch.from_numpy(owners).to(device)
        inputs = {
            "input_ids": part.ids[torch.from_numpy(nodes).to(device)],
            "attention_mask": torch.cat([is_token[rows].long(), is_token.new_ones(nodes.shape).long()], 1),
            "position_ids": torch.from_numpy(depth).to(device),
        }
        announce(nodes, depth < ends)
        outputs.append(getattr(network(**inputs, **{name: cache.repeat(rows)}, use_cache=True), output))
        places_of_calls.append((nodes, depth < ends, offset))
        offset += nodes.size
    places = np.zeros(len(part.ids), dtype=np.int64)
    for nodes, is_own, start in reversed(places_of_calls):  # a node that several calls read: the first counts
        places[nodes[is_own]] = start + np.flatnonzero(is_own)
    merged = torch.cat([x.flatten(0, 1) for x in outputs])
    return merged.index_select(0, torch.from_numpy(places).to(device)[part.predicting_nodes])


def find_cache_argument(network: Any) -> tuple[str, Any]:
    """Return the name of a network's argument that takes a cache, and the config that a cache is made for."""
    base = network.get_base_model() if hasattr(network, "get_base_model") else network
    parameters = inspect.signature(type(base).forward).parameters
    return next(name for name in _CACHE_NAMES if name in parameters), base.config.get_text_config(decoder=True)


def replace_states(cache: PrefixCache, function: Callable[[StateName, Tensor], Tensor]) -> PrefixCache:
    """Return a copy of a cache in which `function` has replaced each state that a layer keeps, without changing this one."""
    replaced = copy.copy(cache)
    replaced.layers, layers = [], list[Any](cache.layers)
    for number, layer in enumerate(map(copy.copy, layers)):
        for name, value in vars(layer).items():
            if isinstance(value, dict):
                value = {
                    key: function((number, name, key), x) if _is_state(x) else x for key, x in value.items()
                }  # of several states of a layer
            elif _is_state(value):
                value = function((number, name, None), value)
            setattr(layer, name, value)
        replaced.layers.append(layer)
    return replaced


def _is_state(x: object) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and x.numel() > 0


class PrefixCache(DynamicCache):
    """A cache whose tensors have gradients: transformers writes recurrent states in place."""

    def repeat(self, rows: Tensor) -> PrefixCache:
        """Return a cache with these rows [n] of all layers, without changing this one."""
        repeated = replace_states(self, lambda name, x: x)
        for layer in list[Any](repeated.layers):
            if hasattr(layer, "reorder_cache"):
                layer.reorder_cache(rows)
        return repeated

    def states(self) -> dict[StateName, Tensor]:
        """Return what the layers keep."""
        states = dict[StateName, Tensor]()

        def note(name: StateName, x: Tensor) -> Tensor:
            states[name] = x
            return x

        replace_states(self, note)
        return states

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **options: Any
    ) -> Tensor:
        layer: Any = self.layers[layer_idx]
        if not layer.is_recurrent_states_initialized[state_idx]:
            layer.lazy_initialization(recurrent_states=recurrent_states, state_idx=state_idx)
        layer.recurrent_states[state_idx] = recurrent_states
        return recurrent_states

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **options: Any) -> Tensor:
        layer: Any = self.layers[layer_idx]
        if (state := layer.conv_states[state_idx]) is not None:
            layer.conv_states[state_idx] = state.clone()
        return super().update_conv_state(conv_states, layer_idx, state_idx, **options)
