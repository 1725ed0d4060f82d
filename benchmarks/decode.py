"""What decoding costs: ours, ours with each saving switched off, and transformers' `generate`, one thread, alternating.

    python benchmarks/decode.py [--works short,tiny,seven] [--repeats 5]

short: the embedded task, 64 prompts × 8, which end by themselves. tiny and seven: 16 × 8 completions of lengths spread
geometrically over 16 to 256 tokens, with the model of the package (0.7M parameters) and a Qwen3 shape (7M, vocabulary 8,192), both
told when to stop. Prints medians: CPU seconds, wall seconds, and how many times ours the CPU seconds are.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import transformers as tf

import policygrad as pg
from policygrad.models.loading import load_model
from policygrad.models.tokenizer import load_tokenizer
from policygrad.samplers import decoding
from policygrad.samplers.base import Request, Sampling
from policygrad.samplers.draw import log_probabilities
from policygrad.samplers.memory import Plain
from policygrad.tasks import load_task

SEVEN = {
    "vocab_size": 8192,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "tie_word_embeddings": True,
}


def work(name: str) -> tuple[pg.LocalSampler, list[Request]]:
    """A sampler and what it is asked."""
    model = load_model("tiny")
    tokenizer = load_tokenizer("tiny", model)
    if name == "short":
        sampling, task = Sampling(max_tokens=32), load_task("embedded")
        contexts = [tokenizer.encode(str(task.train(i).prompt), 32) for i in range(64)]
        requests = [Request(c, (0, i, j), sampling, 32) for i, c in enumerate(contexts) for j in range(8)]
        return pg.LocalSampler.of(model, tokenizer), requests
    generator = torch.Generator().manual_seed(0)
    if name == "seven":
        torch.manual_seed(0)
        model = tf.AutoModelForCausalLM.from_config(tf.Qwen3Config(**SEVEN)).eval()
    size, sampling = model.config.vocab_size, Sampling(max_tokens=256)
    widths = torch.randint(60, 140, (16,), generator=generator).tolist()
    contexts = [torch.randint(3, size, (n,), generator=generator) for n in widths]
    lengths = [round(16 * 16 ** float(x)) for x in torch.rand(128, generator=generator)]
    requests = [Request(contexts[i // 8], (i // 8, i % 8), sampling, n) for i, n in enumerate(lengths)]
    return pg.LocalSampler(model, frozenset({size}), 0), requests  # an end that never comes


class _Enough(tf.StoppingCriteria):
    """Each row is over at its own length."""

    def __init__(self, requests: list[Request]) -> None:
        self.width = max(len(r.tokens) for r in requests)
        self.limit = torch.tensor([r.max_tokens for r in requests])

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids.shape[1] - self.width >= self.limit


def generate(sampler: pg.LocalSampler, requests: list[Request], name: str) -> Callable[[], object]:
    """All of them in one batch, by transformers."""
    width = max(len(r.tokens) for r in requests)
    ids, seen = torch.full((len(requests), width), sampler.pad), torch.zeros(len(requests), width, dtype=torch.int64)
    for i, request in enumerate(requests):
        ids[i, width - len(request.tokens) :], seen[i, width - len(request.tokens) :] = request.tokens, 1
    ends = {} if name == "short" else {"eos_token_id": None, "stopping_criteria": [_Enough(requests)]}
    most = max(r.max_tokens for r in requests)
    return lambda: sampler.model.generate(  # type: ignore[operator]
        ids, attention_mask=seen, do_sample=True, top_k=0, max_new_tokens=most, pad_token_id=sampler.pad, **ends
    )


def plain_draw(logits: torch.Tensor, u: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """A table of log-probabilities, all of them cumulated."""
    logp = log_probabilities(logits, sampling)
    cumulative = logp.exp().cumsum(-1, dtype=torch.float64)
    token = torch.searchsorted(cumulative, u[:, None] * (1 - 2**-40) * cumulative[:, -1:], right=True)
    return token.squeeze(1), logp.gather(-1, token).squeeze(1)


def ways(name: str) -> dict[str, Callable[[], object]]:
    """What is measured: each a call that draws everything."""
    sampler, requests = work(name)
    model, pad, end = sampler.model, sampler.pad, sampler.end
    quarter = replace(requests[0].sampling, decode_rows=len(requests) // 4)
    few = [replace(r, sampling=quarter) for r in requests]

    def drawn_plainly() -> None:
        with patch.object(decoding, "draw", plain_draw):
            asyncio.run(sampler.generate(requests))

    return {
        "ours": lambda: asyncio.run(sampler.generate(requests)),
        "contexts for each row": lambda: decoding.Decoding(requests, end, pad, None).run(Plain(model, pad), 0),
        "drawing by a table": drawn_plainly,
        "ours, a quarter of the slots": lambda: asyncio.run(sampler.generate(few)),
        "the same without refilling": lambda: decoding.Decoding(few, end, pad, None).run(Plain(model, pad), 0),
        "generate": generate(sampler, requests, name),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--works", default="short,tiny,seven")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in args.works.split(","):
        found = ways(name)
        times: dict[str, list[tuple[float, float]]] = {way: [] for way in found}
        for repeat in range(args.repeats + 1):
            for way, call in found.items():
                cpu, wall = time.process_time(), time.perf_counter()
                call()
                if repeat:  # the first is not counted
                    times[way].append((time.process_time() - cpu, time.perf_counter() - wall))
        ours = statistics.median(cpu for cpu, _ in times["ours"])
        for way, pairs in times.items():
            cpu, wall = (statistics.median(x) for x in zip(*pairs, strict=True))
            print(f"{name:6} {way:30} {cpu:7.3f} s CPU {wall:7.3f} s wall {cpu / ours:6.2f} x", flush=True)


if __name__ == "__main__":
    main()
