"""Log-probabilities of given tokens under a model, of several texts in one pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from policygrad.samplers.base import SamplingParams
from policygrad.samplers.local.sampling import log_probabilities

LOGITS_AT_ONCE = 2**26
"""Elements of logits that a pass over several texts has at most; a text that alone has more is read alone."""
PLACES_AT_ONCE = 256
"""Places of a text whose tokens are compared at once: each has a log-probability for the whole vocabulary."""
LEAST_LOGP = -9999.0
"""Nats of what has probability 0, as in OpenAI's formats, since JSON has no infinity."""


@dataclass(frozen=True, eq=False)
class GivenText:
    """A text whose tokens are scored."""

    ids: Tensor
    """[L] int64."""
    start: int
    """Tokens before the first that is scored, at least 1."""
    num_given: int
    """Tokens that are scored at temperature 1; the rest was sampled, and is scored as it was sampled."""
    sampling: SamplingParams
    num_alternatives: int = 0
    """How many of the most probable tokens are listed in each place."""


@dataclass(frozen=True)
class TokenScore:
    """What a model thinks of one token."""

    logp: float
    """Nats."""
    alternatives: tuple[tuple[int, float], ...]
    """Ids and nats of the most probable tokens in its place, the most probable first."""


def score_texts(model: Any, texts: Sequence[GivenText]) -> list[list[TokenScore]]:
    """Return the scores of each text's tokens from `start` on."""
    scores: list[list[TokenScore]] = [[] for _ in texts]
    with torch.inference_mode():
        for numbers in _group_by_length(texts, model.config.get_text_config().vocab_size):
            # what stands behind a text changes nothing before it, so rows are filled up with any token
            rows = torch.nn.utils.rnn.pad_sequence([texts[n].ids[:-1] for n in numbers], batch_first=True)
            device = next(model.parameters()).device
            logits = model(input_ids=rows.to(device), use_cache=False).logits
            for row, number in enumerate(numbers):
                scores[number] = list(_score_tokens(logits[row], texts[number]))
    return scores


def _group_by_length(texts: Sequence[GivenText], vocabulary: int) -> Iterator[list[int]]:
    """Yield the numbers of texts that are read in one pass."""
    group = list[int]()
    scored = [n for n, text in enumerate(texts) if text.start < len(text.ids)]
    for number in sorted(scored, key=lambda n: len(texts[n].ids)):
        if group and (len(group) + 1) * len(texts[number].ids) * vocabulary > LOGITS_AT_ONCE:
            yield group
            group = []
        group.append(number)
    if group:
        yield group


def _score_tokens(logits: Tensor, text: GivenText) -> Iterator[TokenScore]:
    """Yield the scores of a text whose next tokens the logits [≥ L − 1, V] predict."""
    length, boundary = len(text.ids), max(text.start, text.num_given)
    for first, end, sampling in ((text.start, boundary, SamplingParams()), (boundary, length, text.sampling)):
        for at in range(first, end, PLACES_AT_ONCE):
            stop = min(at + PLACES_AT_ONCE, end)
            logp = log_probabilities(logits[at - 1 : stop - 1], sampling).clamp(min=LEAST_LOGP)
            own = logp.gather(-1, text.ids[at:stop, None].to(logp.device))[:, 0].tolist()
            top = logp.topk(min(text.num_alternatives, logp.shape[-1]))
            for value, ids, values in zip(own, top.indices.tolist(), top.values.tolist(), strict=True):
                yield TokenScore(value, tuple(zip(ids, values, strict=True)))
