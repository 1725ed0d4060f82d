"""Whether drafts would pay: what a forward pass over several tokens of a row costs beside one over one, and how often siblings know
what comes next.

A pass over k drafted tokens and one more gives, where each is accepted with probability a behind accepted ones,
(1 − a^(k+1)) / (1 − a) tokens in the mean (Leviathan, Kalman, Matias 2023, arXiv:2211.17192, equation 1). It pays where that is
more than the pass costs, in passes over one token. A pass that is compiled by torch stands beside them.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

import policygrad as pg
from bench.decoding import requests
from bench.models import untrained
from bench.timing import Table, cpu_seconds
from bench.works import SEVEN, SMALL
from policygrad.models.loading import load_model
from policygrad.models.tokenizer import load_tokenizer
from policygrad.samplers.local.kv_cache import PreallocatedLayer, repeat_rows

CONTEXT = 200
"""Tokens before those of a pass."""
DRAFTED = (1, 3, 7)
WORDS = 2
"""Tokens that have to agree before a sibling's next one is a draft."""


class Passes:
    """Forward passes over the next tokens of some rows, again and again in the same place."""

    def __init__(self, model: Any, rows: int, most: int, vocabulary: int) -> None:
        draw = torch.Generator().manual_seed(0)
        self.model = model
        self.ids = torch.randint(2, vocabulary, (rows, CONTEXT + most), generator=draw)
        with torch.no_grad():
            self.cache = model(self.ids[:, :CONTEXT], use_cache=True, logits_to_keep=1).past_key_values
        repeat_rows(self.cache, torch.ones(rows, dtype=torch.int64), most)

    @torch.no_grad()
    def __call__(self, forward: Callable[..., Any], tokens: int) -> None:
        """[rows, tokens, V] logits, and the cache as it was."""
        forward(self.ids[:, CONTEXT : CONTEXT + tokens], past_key_values=self.cache, use_cache=True)
        for layer in self.cache.layers:
            assert isinstance(layer, PreallocatedLayer)
            layer.length = CONTEXT
            layer.keys, layer.values = layer._views()


def needed(cost: float, drafted: int) -> float | None:
    """The acceptance from which on so many drafts pay in a pass that costs `cost` passes over one token; None = they never do.

    Found by bisection: the mean number of tokens grows from 1 to drafted + 1 with the acceptance.
    """
    if cost >= drafted + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**i for i in range(drafted + 1)) < cost else (low, middle)
    return high


def agreement(groups: Sequence[Sequence[Sequence[int]]], words: int = WORDS) -> tuple[float, float]:
    """(share of the tokens behind whose last `words` a sibling has said something, share of those that are what siblings said most
    often there): what drafts from them would be, as a token that was drawn knows nothing of its siblings."""
    drafted = right = count = 0
    for group in groups:
        for i, own in enumerate(group):
            after: dict[tuple[int, ...], Counter[int]] = {}
            for other in (*group[:i], *group[i + 1 :]):
                for before, token in _behind(other, words):
                    after.setdefault(before, Counter())[token] += 1
            for before, token in _behind(own, words):
                count += 1
                if found := after.get(before):
                    drafted += 1
                    right += found.most_common(1)[0][0] == token
    return drafted / max(1, count), right / max(1, drafted)


def _behind(tokens: Sequence[int], words: int) -> list[tuple[tuple[int, ...], int]]:
    """Each token with the `words` before it."""
    padded = [-1] * words + list(tokens)
    return [(tuple(padded[t : t + words]), token) for t, token in enumerate(tokens)]


def _siblings(prompts: int) -> list[list[list[int]]]:
    """Answers of the model inside the package to its own task, eight to each problem."""
    model, task = load_model("tiny"), pg.load_task("embedded")
    tokenizer = load_tokenizer("tiny", model)
    asked = requests(
        [tokenizer.encode(task.train_example(i).prompt, 32).ids for i in range(prompts)], 8, [32] * prompts * 8
    )
    said = [g.tokens.tolist() for g in asyncio.run(pg.LocalSampler.from_tokenizer(model, tokenizer).generate(asked))]
    return [said[i : i + 8] for i in range(0, len(said), 8)]


def drafts(small: bool, repeats: int) -> Table:
    """Passes over several tokens, and compiled ones, beside a pass over one."""
    shape, most = SMALL if small else SEVEN, max(DRAFTED) + 1
    model, body = untrained(shape), list[tuple[str | float, ...]]()
    compiled = torch.compile(model, dynamic=True)
    for rows in (2,) if small else (1, 8, 32, 128):
        passes = Passes(model, rows, most, shape.vocabulary)
        works = {f"{k + 1} tokens": partial(passes, model, k + 1) for k in DRAFTED}
        works |= {"one token": partial(passes, model, 1), "one token, compiled": partial(passes, compiled, 1)}
        took = cpu_seconds(works, 5 * repeats)
        one = took["one token"]
        for name in ("one token", "one token, compiled"):
            body.append((str(rows), name, took[name], took[name] / one, ""))
        for k in DRAFTED:
            cost = took[f"{k + 1} tokens"] / one
            least = needed(cost, k)
            body.append((str(rows), f"{k + 1} tokens", cost * one, cost, "never" if least is None else least))
    drafted, right = agreement(_siblings(4 if small else 64))
    note = (
        f"A forward pass with {CONTEXT} tokens before it, 7M parameters. A pass over {most} tokens checks {most - 1} drafts; the "
        "last column is the share of drafts that must be accepted before it pays. Of the embedded task's answers "
        f"{drafted:.0%} of the tokens have a draft in a sibling, behind {WORDS} equal tokens, and {right:.0%} of these are what "
        "was drawn."
    )
    return Table("Drafts", note, ("rows", "pass", "CPU s", "× one token", "pays from"), tuple(body))
