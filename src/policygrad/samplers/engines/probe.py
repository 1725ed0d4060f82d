"""Whether a server draws from the policy: the same continuations under the server's weights and under the learner's.

The server continues a few fixed sequences at two temperatures, as it does in a rollout. Its log-probabilities have to be the
learner's own, under softmax(logits / temperature). What they cannot tell, a distribution that is cut off while they are those of
the whole, shows in what is drawn: that each of N tokens is inside the most probable share q of its distribution has a probability
of at most q^N.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from policygrad.errors import EngineError
from policygrad.models.loading import at_least_float32
from policygrad.samplers.base import Generation, Request, SamplingParams

SEQUENCES = 16
"""At the temperature of the run; twice as many at the second."""
PROMPT_LENGTH, MAX_NEW_TOKENS = 12, 16
"""Tokens of each, and tokens that continue it, at most."""
HIGH_TEMPERATURE = 2.0
"""The second temperature: far enough from 1 that raw log-probabilities show, and flat, so that what is cut off shows too."""
GATHERED_ROWS = 16
"""Sequences at a time whose logits are asked for, where no process has the model."""
LogitSource = nn.Module | Callable[[Tensor], Tensor]
"""The learner's model; or from ids [b, L] to its logits [b, L, V]."""
FALSE_ALARM_PROBABILITY = 1e-6
"""Of refusing a server that draws as it should, by what it has drawn."""
_STREAM = 0x70726F62
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4, torch.bfloat16: 0.2, torch.float16: 0.05}
"""Nats, by the precision of the learner's model."""


@dataclass(frozen=True)
class ProbeResult:
    """What a probe has found."""

    tokens: int
    difference: float
    """Nats, the largest between a server's log-probability and the learner's."""


def make_probe_requests(vocab_size: int, temperature: float, version: int) -> list[Request]:
    """The fixed sequences [LENGTH] of ids below `vocabulary`, the last id among them. version: of the random numbers."""
    rng = np.random.default_rng(_STREAM)
    found = []
    for i, heat in enumerate((temperature or 1.0, HIGH_TEMPERATURE, HIGH_TEMPERATURE) * SEQUENCES):
        tokens = torch.from_numpy(rng.integers(0, vocab_size, PROMPT_LENGTH))
        if i < 3:
            tokens[PROMPT_LENGTH // 2] = vocab_size - 1
        sampling = SamplingParams(temperature=heat, max_tokens=MAX_NEW_TOKENS)
        found.append(Request(tokens, (_STREAM, version, i), sampling, MAX_NEW_TOKENS))
    return found


def compare_logprobs(
    model: LogitSource,
    requests: Sequence[Request],
    generations: Sequence[Generation],
    tolerance: float,
    where: str,
    launch_hint: str,
) -> ProbeResult:
    """Compares what was drawn with the model's own distribution.

    model: the learner's, or what asks for its logits. where: begins the message. way_out: what the server has to be started with.

    Raises:
        EngineError: it is not drawn from the model's distribution, and as far as that can be seen, why not.
    """
    said = torch.cat([g.logp.double() for g in generations])
    own, raw, within = score_tokens(model, requests, generations)
    gap = (said - own).abs()
    worst = float(gap.max())
    if not worst <= tolerance:
        high = torch.cat(
            [torch.full((len(g.tokens),), r.sampling.temperature) for r, g in zip(requests, generations, strict=True)]
        )
        differs = high != 1
        told = f"{where}: its log-probabilities differ from the learner's by up to {worst:.2g} nats"
        if bool(differs.any()) and float((said - raw).abs()[differs].max()) <= max(2 * tolerance, 0.01 * worst):
            raise EngineError(f"{told}: they are those before the temperature. {launch_hint}")
        if float((said - own).min()) > -tolerance:
            raise EngineError(
                f"{told}, and each is larger: it cuts unlikely tokens off (top-k, top-p, min-p), or has penalties. {launch_hint}"
            )
        raise EngineError(
            f"{told} (mean {float(gap.mean()):.2g}): it has other weights, an older version of them, another vocabulary or a "
            f"lower precision than the learner. {launch_hint}, or allow for its precision, --sampler.logprob-tolerance NATS"
        )
    flat = torch.cat(
        [
            torch.full((len(g.tokens),), r.sampling.temperature == HIGH_TEMPERATURE)
            for r, g in zip(requests, generations, strict=True)
        ]
    )
    share, count = float(within[flat].max()), int(flat.sum())
    if count * math.log(min(share, 1.0)) < math.log(FALSE_ALARM_PROBABILITY):
        raise EngineError(
            f"{where}: all of {count} tokens are among the most probable {share:.1%} of what could be drawn: it cuts unlikely "
            f"tokens off (top-k, top-p, min-p) and says nothing of it. {launch_hint}"
        )
    return ProbeResult(len(said), worst)


@torch.no_grad()
def score_tokens(
    model: LogitSource, requests: Sequence[Request], generations: Sequence[Generation]
) -> tuple[Tensor, Tensor, Tensor]:
    """Per token drawn [N]: its log-probability at the temperature, that at temperature 1, and the probability of all tokens that
    are at least as probable."""
    own, raw, within = [], [], []
    texts = [torch.cat([r.prompt_ids, g.tokens]) for r, g in zip(requests, generations, strict=True)]
    found = _alone(model, texts) if isinstance(model, nn.Module) else _together(model, texts)
    for request, generation, every in zip(requests, generations, found, strict=True):
        logits = at_least_float32(every)[len(request.prompt_ids) - 1 : -1].double().cpu()
        tempered = (logits / request.sampling.temperature).log_softmax(-1)
        chosen = generation.tokens[:, None]
        logp = tempered.gather(-1, chosen)
        own.append(logp[:, 0])
        raw.append(logits.log_softmax(-1).gather(-1, chosen)[:, 0])
        within.append(tempered.exp().masked_fill(tempered < logp, 0.0).sum(-1))
    return torch.cat(own), torch.cat(raw), torch.cat(within)


def _alone(model: nn.Module, texts: Sequence[Tensor]) -> Iterator[Tensor]:
    """Logits [L, V] of each text."""
    device, training = next(model.parameters()).device, model.training
    model.eval()
    for text in texts:
        yield model(input_ids=text[None].to(device), use_cache=False).logits[0]
    model.train(training)


def _together(logits: Callable[[Tensor], Tensor], texts: Sequence[Tensor]) -> Iterator[Tensor]:
    """The same, some at a time: all processes gather every layer for it. No token sees what stands behind it."""
    for first in range(0, len(texts), GATHERED_ROWS):
        some = texts[first : first + GATHERED_ROWS]
        found = logits(nn.utils.rnn.pad_sequence(list(some), batch_first=True))
        yield from (row[: len(text)] for row, text in zip(found, some, strict=True))
