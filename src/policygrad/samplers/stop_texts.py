"""Texts that end a completion, such as `</answer>`: it ends with the token after which its decoded text contains one.

The tokens stay what was sampled; what the last one holds beyond the stop text stays too. Whatever the sampler, `cut_at_stop`
decides; a sampler that stops early, with the same rule, saves tokens.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from policygrad.samplers.base import Generation

Decode = Callable[[Tensor], str]
_EXTRA_TOKENS = 8
"""Tokens before a stop text that are decoded with it: the first may hold a part of a character."""


def find_stop(tokens: Tensor, stop: Sequence[str], decode: Decode) -> int | None:
    """Return the number of tokens [n] after which their text first contains one of the stop texts; None = it has none."""
    if not stop or not any(text in decode(tokens) for text in stop):
        return None
    counts = range(1, len(tokens) + 1)
    return counts[bisect_left(counts, True, key=lambda n: any(text in decode(tokens[:n]) for text in stop))]


def cut_at_stop(
    generation: Generation, stop: Sequence[str], decode: Decode, prefix: Tensor | None = None
) -> Generation:
    """Return a completion up to its first stop text, which is then finished.

    Args:
        prefix: [n] int64; tokens at the end of the prompt that belong to the same completion.
    """
    before = 0 if prefix is None else len(prefix)
    tokens = generation.tokens if prefix is None else torch.cat([prefix, generation.tokens])
    found = find_stop(tokens, stop, decode)
    if found is None:
        return generation
    count, size = max(1, found - before), len(generation.tokens)
    version, experts, mask = generation.version, generation.routed_experts, generation.sampling_mask
    return Generation(
        generation.tokens[:count],
        generation.logp[:count],
        "stop",
        version if isinstance(version, int) else version[:count],
        None if experts is None else experts[: len(experts) - (size - count)],
        None if mask is None else mask.select(torch.arange(size) < count),
    )


class StopDetector:
    """Says of completions that are being sampled whether a token has completed a stop text."""

    def __init__(self, stop: Sequence[str], decode: Decode) -> None:
        self.stop, self.decode = tuple(stop), decode
        self.window = max(len(text.encode()) for text in stop) + _EXTRA_TOKENS
        self._last = {text[-1] for text in stop}
        self._may_complete = dict[int, bool]()  # by token

    def may_complete(self, token: int) -> bool:
        """Whether a token may write the end of a stop text."""
        if token not in self._may_complete:
            text = self.decode(torch.tensor([token]))
            # white space may be lost at a text's ends, and a part of a character is decoded as U+FFFD
            self._may_complete[token] = any(
                end in text or end.isspace() or (not end.isascii() and "\ufffd" in text) for end in self._last
            )
        return self._may_complete[token]

    def has_stopped(self, tokens: Tensor) -> bool:
        """Whether the text of tokens [n], n ≥ 1, contains a stop text, of which the last token has written the end."""
        recent = self.decode(tokens[-self.window :])
        return any(text in recent for text in self.stop) and find_stop(tokens, self.stop, self.decode) is not None
