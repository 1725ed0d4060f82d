"""Held-out accuracy: mean@k and the unbiased pass@k."""

from __future__ import annotations

from dataclasses import dataclass
from math import comb

from policygrad.errors import ConfigError


@dataclass(frozen=True)
class EvaluationResult:
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
            ConfigError: k larger than the samples per problem.
        """
        values = []
        for row in self.scores:
            n, c = len(row), sum(s >= threshold for s in row)
            if not 1 <= k <= n:
                raise ConfigError(f"pass@{k} needs at least {k} samples per problem, there are {n}")
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
