"""The key-value cache while decoding: room for the whole completion is taken once, instead of a copy of all of it per token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer


class RoomyLayer(DynamicLayer):
    """A cache layer whose memory [N, H, capacity, D] is allocated ahead; the keys and values so far are a view of it."""

    def __init__(self, keys: Tensor, values: Tensor, repeats: int, room: int) -> None:
        super().__init__()
        self.length = keys.shape[-2]
        self.room_keys, self.room_values = (self._roomy(x, repeats, room) for x in (keys, values))
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
        self._show()

    def _roomy(self, x: Tensor, repeats: int, room: int) -> Tensor:
        rows, heads, length, width = x.shape
        roomy = x.new_empty(rows * repeats, heads, length + room, width)
        roomy[:, :, :length] = x.repeat_interleave(repeats, 0)
        return roomy

    def _show(self) -> None:
        self.keys, self.values = self.room_keys[:, :, : self.length], self.room_values[:, :, : self.length]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        end = self.length + key_states.shape[-2]
        self.room_keys[:, :, self.length : end] = key_states
        self.room_values[:, :, self.length : end] = value_states
        self.length = end
        self._show()
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        self.room_keys, self.room_values = self.room_keys[indices], self.room_values[indices]
        self._show()


def expand(cache: Any, repeats: int, room: int) -> Any:
    """One cache row per completion from one per prompt; layers of another kind (sliding window, state space) repeat themselves."""
    for i, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer and isinstance(layer.keys, torch.Tensor):
            cache.layers[i] = RoomyLayer(layer.keys, layer.values, repeats, room)
        else:
            layer.batch_repeat_interleave(repeats)
    return cache
