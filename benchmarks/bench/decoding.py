"""Rollout against transformers' `generate`, and with each of its savings switched off."""

from __future__ import annotations

import asyncio
import copy
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import policygrad as pg
from bench.lengths import EndAt
from bench.models import rollout as made_up
from bench.models import untrained
from bench.timing import Table, cpu_seconds
from bench.works import SEVEN, SMALL, geometric
from policygrad.models.loading import has_bf16_products, load_model
from policygrad.models.tokenizer import Tokenizer, load_tokenizer, pad_token_id
from policygrad.samplers.local import sampler as decoding
from policygrad.samplers.local.kv_cache import PlainDecodeCache
from policygrad.samplers.local.sampling import log_probabilities


def generated(
    model: Any, prompts: list[Tensor], samples: int, pad: int, budget: int, ends: list[EndAt] | None
) -> Tensor:
    """[rows, width] prompts padded on the left, each `samples` times, and what follows them."""
    width = max(map(len, prompts))
    ids = torch.full((len(prompts), width), pad)
    seen = torch.zeros_like(ids)
    for i, prompt in enumerate(prompts):
        ids[i, width - len(prompt) :], seen[i, width - len(prompt) :] = prompt, 1
    out: Tensor = model.generate(
        input_ids=ids.repeat_interleave(samples, 0),
        attention_mask=seen.repeat_interleave(samples, 0),
        do_sample=True,
        top_k=0,
        max_new_tokens=budget,
        pad_token_id=pad,
        logits_processor=ends,
    )
    return out[:, width:]


def requests(prompts: list[Tensor], samples: int, lengths: list[int]) -> list[pg.Request]:
    sampling = pg.SamplingParams(max_tokens=max(lengths))
    return [
        pg.Request(prompt, (0, i, j), sampling, lengths[i * samples + j])
        for i, prompt in enumerate(prompts)
        for j in range(samples)
    ]


def embedded(prompts: int) -> tuple[Any, Tokenizer, list[Tensor]]:
    """The model inside the package, and prompts of its task."""
    model, task = load_model("tiny"), pg.load_task("embedded")
    tokenizer = load_tokenizer("tiny", model)
    return model, tokenizer, [tokenizer.encode(task.train_example(i).prompt, 32).ids for i in range(prompts)]


def rollout(small: bool, repeats: int) -> Table:
    """Sampled tokens per second, of ours and of `generate`."""
    rows = list[tuple[str | float, ...]]()
    (model, tokenizer, prompts), samples = embedded(8 if small else 64), 8
    short = requests(prompts, samples, [32] * len(prompts) * samples)
    pad, ours = pad_token_id(tokenizer), pg.LocalSampler.from_tokenizer(model, tokenizer)
    rows.append(_row("embedded task, at most 32 tokens", ours, short, model, prompts, samples, pad, None, repeats))
    shape, count = (SMALL, 8) if small else (SEVEN, 128)
    large = untrained(shape)
    lengths = list(geometric(2, 32, count) if small else geometric(16, 1024, count))
    made = made_up(shape.vocabulary, count // 8, 8, lengths).prompts
    prompts = list(made or ())
    spread = requests(prompts, 8, lengths)
    sampler, ends = pg.LocalSampler(large, frozenset({-1}), 0), [EndAt(lengths, count, len(prompts[0]), 1)]
    rows.append(
        _row(
            f"{count} of {min(lengths)} to {max(lengths):,} tokens",
            sampler,
            spread,
            large,
            prompts,
            8,
            0,
            ends,
            repeats,
        )
    )
    note = "Sampled tokens per CPU second, without rewards; `generate` has the same model, prompts and, where given, lengths."
    columns = ("completions", "policygrad, tokens per CPU s", "generate, tokens per CPU s", "ratio")
    return Table("Rollout", note, columns, tuple(rows))


def _row(
    name: str,
    sampler: pg.LocalSampler,
    asked: list[pg.Request],
    model: Any,
    prompts: list[Tensor],
    samples: int,
    pad: int,
    ends: list[EndAt] | None,
    repeats: int,
) -> tuple[str | float, ...]:
    tokens: dict[str, list[int]] = {"ours": [], "generate": []}

    def ours() -> None:
        tokens["ours"].append(sum(len(g.tokens) for g in asyncio.run(sampler.generate(asked))))

    def theirs() -> None:
        with torch.no_grad():
            out = generated(model, prompts, samples, pad, asked[0].sampling.max_tokens, ends)
        tokens["generate"].append(int((out != pad).sum()) if ends is None else sum(r.max_tokens for r in asked))

    took = cpu_seconds({"ours": ours, "generate": theirs}, repeats)
    speed = {name: sum(n) / len(n) / took[name] for name, n in tokens.items()}
    return name, speed["ours"], speed["generate"], speed["ours"] / speed["generate"]


def savings(small: bool, repeats: int) -> Table:
    """Drawing completions of given lengths, with what saves time and without."""
    shape, count = (SMALL, 8) if small else (SEVEN, 128)
    lengths = list(geometric(2, 16, count) if small else geometric(16, 256, count))
    model, made = untrained(shape), made_up(shape.vocabulary, count // 8, 8, lengths).prompts
    asked, sampler = requests(list(made or ()), 8, lengths), pg.LocalSampler(model, frozenset({-1}), 0)
    few = [replace(r, sampling=replace(r.sampling, decode_rows=count // 4)) for r in asked]

    def ours(requests: list[pg.Request]) -> None:
        asyncio.run(sampler.generate(requests))

    def plain(requests: list[pg.Request]) -> None:
        decoding.DecodeLoop(requests, sampler.end, 0, None).run(PlainDecodeCache(model, 0), 0)

    def by_a_table() -> None:
        with patch.object(decoding, "sample_tokens", _from_a_table):
            ours(asked)

    ways: dict[str, Callable[[], object]] = {
        "every saving": partial(ours, asked),
        "without contexts that rows share": partial(plain, asked),
        "without drawing in one pass": by_a_table,
        "every saving, a quarter of the rows": partial(ours, few),
        "the same without rows that are filled again": partial(plain, few),
    }
    took = cpu_seconds(ways, repeats)
    rows = tuple((name, seconds, seconds / took["every saving"]) for name, seconds in took.items())
    said = f"{min(lengths)} to {max(lengths)} tokens to {count // 8} prompts of 100"
    note = f"{count} completions of {said}. What is drawn is the same."
    return Table("Decoding's savings", note, ("way", "CPU s", "× every saving"), rows)


def precision(small: bool, repeats: int) -> Table:
    """Drawing with weights of fewer bits than the policy's, which is in float32, and how far what is drawn is from the policy."""
    shape, prompts, length = (SMALL, 2, 8) if small else (SEVEN, 16, 252)
    made = made_up(shape.vocabulary, prompts, 8, (length,), 60).prompts
    model, tokenizer, prompts_of_task = embedded(8 if small else 64)
    short = requests(prompts_of_task, 8, [32] * 8 * len(prompts_of_task))
    found = {"embedded task": _in_fewer_bits(model, short, tokenizer.end_ids, repeats)}
    asked = requests(list(made or ()), 8, [length] * 8 * prompts)
    found["7M, random weights"] = _in_fewer_bits(untrained(shape), asked, frozenset({-1}), repeats)
    note = (
        f"The embedded task, and {8 * prompts} completions of {length} tokens, drawn with a copy of the policy in fewer bits (int8 "
        "by torch's dynamic quantization). The ratio π/μ of the float32 policy to what was drawn from corrects for it; the last "
        "column is the share of tokens that are left in effect, (Σ w)² / n Σ w²."
    )
    columns = ("policy", "weights", "CPU s", "× float32", "mean of abs log π/μ", "largest", "tokens in effect")
    return Table("Drawing in fewer bits", note, columns, tuple((name, *row) for name in found for row in found[name]))


def _in_fewer_bits(
    policy: Any, asked: list[pg.Request], ends: frozenset[int], repeats: int
) -> list[tuple[str | float, ...]]:
    models: dict[str, Any] = {"float32": policy}
    if has_bf16_products():
        models["bfloat16"] = copy.deepcopy(policy).bfloat16()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's successor of this function is another package
        models["int8"] = torch.ao.quantization.quantize_dynamic(copy.deepcopy(policy), {nn.Linear})
    samplers = {name: pg.LocalSampler(model, ends, 0) for name, model in models.items()}
    drawn: dict[str, list[pg.Generation]] = {}

    def draw(name: str) -> None:
        drawn[name] = asyncio.run(samplers[name].generate(asked))

    took = cpu_seconds({name: partial(draw, name) for name in models}, repeats)
    rows = list[tuple[str | float, ...]]()
    for name, seconds in took.items():
        pairs = zip(asked[::8], drawn[name][::8], strict=True)
        weights = torch.cat([_ratios(policy, request.prompt_ids, generation) for request, generation in pairs])
        off, share = weights.log().abs(), float(weights.sum() ** 2 / (weights**2).sum() / len(weights))
        rows.append((name, seconds, seconds / took["float32"], float(off.mean()), float(off.max()), share))
    return rows


@torch.no_grad()
def _ratios(policy: Any, prompt: Tensor, drawn: pg.Generation) -> Tensor:
    """π/μ [T] of a completion's tokens."""
    logits = policy(input_ids=torch.cat([prompt, drawn.tokens])[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
    logp = logits.log_softmax(-1).gather(-1, drawn.tokens[:, None])[:, 0]
    return (logp.double() - drawn.logp.double()).exp()


def _from_a_table(
    logits: Tensor, u: Tensor, sampling: pg.SamplingParams, kernels: bool = False
) -> tuple[Tensor, Tensor]:
    """A table of log-probabilities, all of them cumulated."""
    logp = log_probabilities(logits, sampling)
    cumulative = logp.exp().cumsum(-1, dtype=torch.float64)
    token = torch.searchsorted(cumulative, u[:, None] * (1 - 2**-40) * cumulative[:, -1:], right=True)
    return token.squeeze(1), logp.gather(-1, token).squeeze(1)
