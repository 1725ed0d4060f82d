"""Keep what a model has cached of a conversation's turn, so that the next turn reads only what has been added to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from policygrad.samplers.local.kv_cache import left_pad, prefill

LayerTensors = list[tuple[Tensor, Tensor]]  # keys and values of each layer, [H, n, D]
MAX_BYTES_CPU = 2**31
MAX_SHARE = 0.25  # of a GPU's free memory


class TextCache:
    """Keys and values of texts [n], by their token ids."""

    def __init__(self, model: nn.Module) -> None:
        device = next(model.parameters()).device
        on_gpu = device.type == "cuda"
        self.room = int(MAX_SHARE * torch.cuda.mem_get_info(device)[0]) if on_gpu else MAX_BYTES_CPU
        self.texts: dict[bytes, LayerTensors] = {}
        self.lengths: set[int] = set()
        self.tails = set[tuple[int, bytes]]()  # the length and last tokens of each text, which tell most others apart
        self._weights = _weights_version(model)

    def is_valid_for(self, model: nn.Module) -> bool:
        """Return whether the weights that the texts were read with have not been changed in place."""
        return self._weights == _weights_version(model)

    def add(self, ids: Tensor, layers: LayerTensors) -> None:
        """Keep a text, unless memory is short: then it is read again."""
        key, size = ids.numpy().tobytes(), sum(x.nbytes for pair in layers for x in pair)
        if size <= self.room and key not in self.texts:
            self.room -= size
            self.texts[key] = layers
            self.lengths.add(len(ids))
            self.tails.add((len(ids), _tail(ids)))

    def find(self, ids: Tensor) -> tuple[int, LayerTensors]:
        """Return the longest cached text that `ids` continues, as (its length, its tensors); (0, []) if there is none."""
        for length in sorted(self.lengths, reverse=True):
            if length < len(ids) and (length, _tail(ids[:length])) in self.tails:
                layers = self.texts.get(ids[:length].numpy().tobytes())
                if layers is not None:
                    return length, layers
        return 0, []

    def prefill(self, model: nn.Module, prompts: Sequence[Tensor], pad: int) -> tuple[Any, Tensor]:
        """Read prompts in one forward pass, what is cached of them not again.

        Returns:
            The model's output, with logits of the last position only, and the mask [C, L] of the keys that are tokens.
        """
        matches = [self.find(prompt) for prompt in prompts]
        past = [prompt[:length] for prompt, (length, _) in zip(prompts, matches, strict=True)]
        new = [prompt[length:] for prompt, (length, _) in zip(prompts, matches, strict=True)]
        width = max(map(len, past))
        if not width or max(map(len, new)) + width // 8 >= max(map(len, prompts)):  # padding would cost what is saved
            return prefill(model, prompts, pad, keep_all=True)
        ids, mask = left_pad(new, pad)
        device = next(model.parameters()).device
        _, past_mask = left_pad(past, pad)
        cache = DynamicCache()  # all keys, also of layers with windows
        for number, pair in enumerate(next(layers for _, layers in matches if layers)):
            padded = [x.new_zeros(len(prompts), x.shape[0], width, x.shape[2]) for x in pair]
            for row, (length, layers) in enumerate(matches):
                for target, x in zip(padded, layers[number] if layers else (), strict=False):
                    target[row, :, width - length :] = x
            cache.update(padded[0], padded[1], number)
        starts = torch.tensor([length for length, _ in matches])
        positions = (starts[:, None] + mask.cumsum(1) - 1).clamp(min=0)
        mask = torch.cat([past_mask, mask], 1).to(device)
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


def _tail(ids: Tensor) -> bytes:
    """Return the last tokens of a text."""
    return ids[-4:].numpy().tobytes()


def _weights_version(model: nn.Module) -> int:
    """Return a number that changes when the weights are changed in place, except by a fused optimizer: `LocalSampler.update` is
    called for that."""
    return sum(p._version for p in model.parameters())
