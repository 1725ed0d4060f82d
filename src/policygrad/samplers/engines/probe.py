"""Check that a server samples from the policy: compare its log-probabilities with the learner's on the same completions.

The server completes a few fixed prompts at two temperatures, as it does in a rollout. Its log-probabilities must be the learner's,
under softmax(logits / temperature). A truncated distribution whose log-probabilities are those of the full one shows in the samples
instead: the probability that each of N tokens lies within the most probable share q of its distribution is at most q^N.

Of a model that sees, a quarter of the prompts have pictures: an old vision tower, another image processor and other positions show.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from policygrad.errors import EngineError
from policygrad.models.chat.messages import EncodedText
from policygrad.models.loading import at_least_float32
from policygrad.models.tokenizer import Tokenizer
from policygrad.models.traits import placeholder_id
from policygrad.models.vision import read_texts
from policygrad.samplers.base import Generation, Request, SamplingParams
from policygrad.utils.pictures import Picture
from policygrad.weight_sync.base import LogitFunction

NUM_PROMPTS = 16  # prompts at the run's temperature; twice as many at the second one
PROMPT_LENGTH, MAX_NEW_TOKENS = 12, 16
HIGH_TEMPERATURE = 2.0
"""The second temperature: far enough from 1 that raw log-probabilities show, and flat, so that truncation shows too."""
PICTURE_SIZES = (((72, 56),), ((56, 72), (64, 64)))
"""Of the prompts with pictures, in turn: the width and height of each picture in pixels."""
PICTURE_PERIOD = 4
"""Every 4th prompt has pictures. 3 would give them all the same temperature."""
GATHERED_ROWS = 16  # sequences per batch if the logits come from a sharded policy
LogitSource = nn.Module | LogitFunction
"""The learner's model, or the function that computes its logits."""
FALSE_ALARM_PROBABILITY = 1e-6  # probability of refusing a correct server because of its samples
_STREAM = 0x70726F62
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4, torch.bfloat16: 0.2, torch.float16: 0.05}
"""Nats, by the precision of the learner's model."""


@dataclass(frozen=True)
class ProbeResult:
    """The outcome of a successful probe."""

    tokens: int  # number of compared tokens
    difference: float  # largest difference in nats between a log-probability of the server and the learner's


def make_pictured_prompts(tokenizer: Tokenizer, context_length: int) -> list[EncodedText]:
    """Return the fixed prompts with pictures, of noise; none for a model that does not see, or has no chat template to place them.

    Args:
        context_length: Maximum tokens of a prompt and its completion.
    """
    if tokenizer.pictures is None or getattr(tokenizer.hf, "chat_template", None) is None:
        return []
    from PIL import Image

    rng, prompts = np.random.default_rng(_STREAM), list[EncodedText]()
    for sizes in PICTURE_SIZES:
        if prompts and 3 * len(prompts[0].ids) > context_length:  # two pictures do not fit
            break
        parts = list[Any]()
        for width, height in sizes:
            file = io.BytesIO()
            Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(file, "PNG")
            parts += [
                {"type": "image", "image": Picture(data=file.getvalue())},
                {"type": "text", "text": "What is this? "},
            ]
        prompts.append(tokenizer.encode([{"role": "user", "content": tuple(parts)}], MAX_NEW_TOKENS, "the probe"))
    return prompts


def make_probe_requests(
    vocab_size: int, temperature: float, version: int, pictured: Sequence[EncodedText] = ()
) -> list[Request]:
    """Return the fixed requests, with prompts of ids below `vocab_size`, including the last id.

    Args:
        version: Seeds the completions' random numbers.
        pictured: Prompts with pictures, which take the place of some of the others.
    """
    rng = np.random.default_rng(_STREAM)
    requests = []
    for i, heat in enumerate((temperature or 1.0, HIGH_TEMPERATURE, HIGH_TEMPERATURE) * NUM_PROMPTS):
        prompt_ids = torch.from_numpy(rng.integers(0, vocab_size, PROMPT_LENGTH))
        if i < 3:
            prompt_ids[PROMPT_LENGTH // 2] = vocab_size - 1
        sampling = SamplingParams(temperature=heat, max_tokens=MAX_NEW_TOKENS)
        text = EncodedText(prompt_ids)
        if pictured and i % PICTURE_PERIOD == PICTURE_PERIOD - 1:
            text = pictured[i // PICTURE_PERIOD % len(pictured)]
        key = (_STREAM, version, i)
        requests.append(
            Request(text.ids, key, sampling, MAX_NEW_TOKENS, media=text.media, compact_ids=text.compact_ids)
        )
    return requests


def compare_logprobs(
    model: LogitSource,
    requests: Sequence[Request],
    generations: Sequence[Generation],
    tolerance: float,
    server: str,
    launch_hint: str,
) -> ProbeResult:
    """Compare a server's completions with the model's own distribution.

    Args:
        tolerance: Nats.
        server: Starts the error message.
        launch_hint: How the server must be started, for the error message.

    Raises:
        EngineError: They were not sampled from the model's distribution; the message names the likely cause.
    """
    reported = torch.cat([g.logp.double() for g in generations])
    logp, raw_logp, mass_above = score_tokens(model, requests, generations)
    temperature = torch.cat(
        [torch.full((len(g.tokens),), r.sampling.temperature) for r, g in zip(requests, generations, strict=True)]
    )
    gap = (reported - logp).abs()
    largest = float(gap.max())
    if not largest <= tolerance:
        message = f"{server}: its log-probabilities differ from the learner's by up to {largest:.2g} nats"
        tempered = temperature != 1
        if bool(tempered.any()) and float((reported - raw_logp).abs()[tempered].max()) <= max(
            2 * tolerance, 0.01 * largest
        ):
            raise EngineError(f"{message}: they are those before the temperature. {launch_hint}")
        if float((reported - logp).min()) > -tolerance:
            raise EngineError(
                f"{message}, and all are larger: it truncates the distribution (top-k, top-p, min-p) or applies penalties. "
                f"{launch_hint}"
            )
        cause = _explain_pictured(requests, generations, gap) or (
            ": it has other weights, an older version, another vocabulary or a lower precision than the learner"
        )
        raise EngineError(
            f"{message} (mean {float(gap.mean()):.2g}){cause}. {launch_hint}, or allow for its precision: "
            "--sampler.logprob-tolerance NATS"
        )
    flat = temperature == HIGH_TEMPERATURE
    share, count = float(mass_above[flat].max()), int(flat.sum())
    if count * math.log(min(share, 1.0)) < math.log(FALSE_ALARM_PROBABILITY):
        raise EngineError(
            f"{server}: all of {count} tokens are within the most probable {share:.1%} of the distribution: it truncates the "
            f"distribution (top-k, top-p, min-p) without reporting it. {launch_hint}"
        )
    return ProbeResult(len(reported), largest)


def _explain_pictured(requests: Sequence[Request], generations: Sequence[Generation], gap: Tensor) -> str:
    """Return the likely cause where the differences `gap` [N] are those of prompts with pictures; "" where they are not."""
    sees = [torch.full((len(g.tokens),), bool(r.media)) for r, g in zip(requests, generations, strict=True)]
    is_pictured = torch.cat(sees)
    if not bool(is_pictured.any()) or float(gap[is_pictured].max()) < 10 * float(gap[~is_pictured].max()):
        return ""
    return (
        f" after pictures, and {float(gap[~is_pictured].max()):.2g} without: it has an older vision tower, or processes pictures "
        "differently (other settings, another release of transformers, or torchvision on one side alone)"
    )


@torch.no_grad()
def score_tokens(
    model: LogitSource, requests: Sequence[Request], generations: Sequence[Generation]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return for each sampled token [N]: its log-probability at the request's temperature, that at temperature 1, and the total
    probability of all tokens that are at least as probable."""
    logp, raw_logp, mass_above = [], [], []
    sequences = [torch.cat([r.prompt_ids, g.tokens]) for r, g in zip(requests, generations, strict=True)]
    if isinstance(model, nn.Module):
        device, training = next(model.parameters()).device, model.training
        model.eval()
        if placeholder_id(model) is None:
            outputs = (model(input_ids=ids[None].to(device), use_cache=False).logits[0] for ids in sequences)
        else:
            outputs = (
                read_texts(model, ids[None].to(device), [request.media])[0]
                for ids, request in zip(sequences, requests, strict=True)
            )
    else:  # in batches, because each gathers all layers; no token attends to padding on its right
        batches = [slice(i, i + GATHERED_ROWS) for i in range(0, len(sequences), GATHERED_ROWS)]
        pad, media = partial(nn.utils.rnn.pad_sequence, batch_first=True), [request.media for request in requests]
        outputs = (row for batch in batches for row in model(pad(sequences[batch]), media[batch]))
    for request, generation, full in zip(requests, generations, outputs, strict=True):
        start = len(request.prompt_ids) - 1
        logits = at_least_float32(full)[start : start + len(generation.tokens)].cpu().double()
        tempered = (logits / request.sampling.temperature).log_softmax(-1)
        token = generation.tokens[:, None]
        token_logp = tempered.gather(-1, token)
        logp.append(token_logp[:, 0])
        raw_logp.append(logits.log_softmax(-1).gather(-1, token)[:, 0])
        mass_above.append(tempered.exp().masked_fill(tempered < token_logp, 0.0).sum(-1))
    if isinstance(model, nn.Module):
        model.train(training)
    return torch.cat(logp), torch.cat(raw_logp), torch.cat(mass_above)
