"""Held-out accuracy: mean@k and the unbiased pass@k."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import comb

from policygrad.rollout.source import EVALUATE, Example, Source, make_prompt, score_groups
from policygrad.samplers.base import Sampler, Sampling

PORTION = 64
"""Prompts sampled at a time, so that progress shows."""


@dataclass(frozen=True)
class Outcome:
    """Scores of k samples for each of n problems; a completion without a reward counts as 0 and is in `failed`."""

    scores: tuple[tuple[float, ...], ...]
    texts: tuple[tuple[str, ...], ...]
    failed: int
    truncated: int
    tokens: int
    messages: tuple[str, ...]

    @property
    def scored(self) -> bool:
        """Whether any completion has a reward."""
        return self.failed < sum(map(len, self.scores))

    @property
    def mean(self) -> float:
        """mean@k: the average score over problems and samples."""
        flat = [s for row in self.scores for s in row]
        return sum(flat) / len(flat) if flat else 0.0

    @property
    def binary(self) -> bool:
        """Whether every score is 0 or 1, so that the mean is an accuracy."""
        return all(s in (0.0, 1.0) for row in self.scores for s in row)

    def pass_at(self, k: int, threshold: float = 1.0) -> float:
        """The unbiased pass@k, mean of 1 − C(n−c, k)/C(n, k) with c of n samples at or above threshold (Chen et al. 2021, eq. 1).

        Raises:
            ValueError: k larger than the samples per problem.
        """
        values = []
        for row in self.scores:
            n, c = len(row), sum(s >= threshold for s in row)
            if not 1 <= k <= n:
                raise ValueError(f"pass@{k} needs at least {k} samples per problem, there are {n}")
            values.append(1 - comb(n - c, k) / comb(n, k))
        return sum(values) / len(values) if values else 0.0

    def standard_error(self) -> float:
        """Of the mean, over problems (the samples of one problem are not independent)."""
        means = [sum(row) / len(row) for row in self.scores]
        n = len(means)
        if n < 2:
            return 0.0
        centre = sum(means) / n
        return float((sum((m - centre) ** 2 for m in means) / (n - 1) / n) ** 0.5)


def evaluate(
    source: Source,
    sampler: Sampler,
    examples: Sequence[Example],
    samples: int,
    sampling: Sampling,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Outcome:
    """k samples of each held-out example. The same random numbers every time, so that two evaluations differ by the weights."""
    scores: list[tuple[float, ...]] = []
    texts: list[tuple[str, ...]] = []
    failed = truncated = tokens = 0
    messages: dict[str, None] = {}
    for start in range(0, len(examples), PORTION):
        some = examples[start : start + PORTION]
        prompts = [make_prompt(source, e, sampling.max_tokens, EVALUATE, 0, start + i) for i, e in enumerate(some)]
        groups = sampler.sample(prompts, samples, sampling)
        decoded, said = score_groups(source, some, groups)
        messages.update(dict.fromkeys(said.messages))
        failed += sum(s is None for s in said.total)
        truncated += sum(c.truncated for g in groups for c in g.completions)
        tokens += sum(len(c.tokens) for g in groups for c in g.completions)
        total = [0.0 if s is None else s for s in said.total]
        scores += [tuple(total[i * samples : (i + 1) * samples]) for i in range(len(some))]
        texts += [tuple(decoded[i * samples : (i + 1) * samples]) for i in range(len(some))]
        progress(start + len(some), len(examples))
    return Outcome(tuple(scores), tuple(texts), failed, truncated, tokens, tuple(messages))
