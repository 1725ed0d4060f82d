"""LEVER 1 for other objectives than the mean reward: the likelihood of success, pass@k, the likelihood of what is accepted."""

from __future__ import annotations

from dataclasses import dataclass
from math import comb
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from policygrad.core import ragged
from policygrad.core.advantages import totals
from policygrad.core.batch import Batch
from policygrad.core.protocols import Advantage
from policygrad.core.ragged import Groups
from policygrad.errors import ConfigError


@dataclass(frozen=True)
class OverGroupMean(Advantage):
    """Ψ ← Ψ/mean_g. After `GroupMean`: (R_i − mean_g)/mean_g, maximum likelihood of success.

    For rewards of 0 and 1 and p the probability of success, log p = −Σ_k (1 − p)^k/k, so ∇log p = Σ_k 1/k ∇pass@k. The mean
    score of the right ones among G samples is an unbiased estimate of the first G terms; less the mean score of all, and 0
    where none is right (Ψ = 0 where mean_g ≤ 0), of the first G − 1. A reward of 0 or more weighs a success; below 0 there is no
    likelihood of it, and a group's mean near 0 would multiply what it divides. Source: Tajwar et al. 2026 (MaxRL),
    arXiv:2602.02710.

    Raises:
        ConfigError: a reward below 0, of a completion that counts.
    """

    group_statistic: ClassVar[bool] = True

    @property
    def formula(self) -> str:
        return "/mean_g,  0 where mean_g ≤ 0"

    def __call__(self, psi: Tensor, batch: Batch) -> Tensor:
        total = totals(batch)
        if bool((below := total < 0).any()):
            row = int(below.nonzero()[0])
            raise ConfigError(
                f"OverGroupMean follows the likelihood of success, and the reward of row {row} is {float(total[row]):g}: give a "
                "reward of 0 or more, such as 1 for what is right and else 0, or take an algorithm for any reward, such as grpo"
            )
        mean = Groups(batch.group, batch.counted).mean(total)
        some = mean > 0
        return ragged.masked(psi / torch.where(some, mean, 1)[:, None], batch.mask & some[:, None])


@dataclass(frozen=True)
class PassAtK(Advantage):
    """Ψ_i = (E[max of k | i among them] − R̄)/(σ + eps): the advantage of pass@k, exact over all k-subsets of the group.

    R̄ and σ are mean and standard deviation of a k-subset's largest reward. With c of G rewards 1 and the others 0,
    R̄ = 1 − C(G−c, k)/C(G, k), σ = √(R̄(1 − R̄)), and Ψσ is 1 − R̄ for the right ones, 1 − R̄ − C(G−c−1, k−1)/C(G−1, k−1) for the
    wrong ones; k = 1 is the z-score with ddof 0. Other rewards go by their order. Ψ = 0 where all k-subsets have one maximum,
    and in a group of which fewer than k completions count.
    Source: Chen et al. 2025 (pass@k training), arXiv:2508.10751, the analytical derivation.
    """

    k: int = 4
    eps: float = 1e-6
    normalise: bool = True
    """Over σ. False: the difference alone, G/k times the unbiased gradient of pass@k less a baseline of the group itself.
    That one is of Walder & Karkhanis 2025 (PKPO), arXiv:2505.15201."""
    group_statistic: ClassVar[bool] = True
    starts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ConfigError(f"PassAtK.k must be at least 1, not {self.k}: pass@1 is the mean reward")

    @property
    def formula(self) -> str:
        over = f"/(σ + {self.eps:g})" if self.normalise else ""
        return f"(E[max of {self.k} | i among them] − R̄){over},  R̄, σ of the max of {self.k} of the group"

    def __call__(self, psi: Tensor, batch: Batch) -> Tensor:
        total, counted = totals(batch), batch.counted
        size = Groups(batch.group, counted).size
        out = torch.zeros_like(total)
        for n in sorted({n for n in size[counted].tolist() if n >= self.k}):
            rows = (counted & (size == n)).nonzero().squeeze(1)
            rows = rows[total[rows].argsort(stable=True)]
            rows = rows[batch.group[rows].argsort(stable=True)].view(-1, n)  # [groups, n], rewards ascending
            out[rows] = self._of(total[rows])
        return ragged.masked(out[:, None], batch.mask)

    def _of(self, reward: Tensor) -> Tensor:
        """[groups, n], rewards ascending along a row: the j-th is the largest of C(j−1, k−1) of the C(n, k) subsets."""
        n, k = reward.shape[1], self.k

        def shares(place: int, among: int, whole: int) -> Tensor:
            """[n] C(j − place, among)/whole, j = 1 … n."""
            return reward.new_tensor([comb(j - place, among) / whole if j >= place else 0.0 for j in range(1, n + 1)])

        largest, with_i = shares(1, k - 1, comb(n, k)), comb(n - 1, k - 1)
        mean = (reward @ largest)[:, None]
        own = reward * shares(1, k - 1, with_i)
        above = reward * shares(2, k - 2, with_i) if k > 1 else torch.zeros_like(reward)
        psi = own + ragged.to_go(above) - above - mean
        if self.normalise:
            psi = psi / (((reward - mean) ** 2 @ largest).sqrt()[:, None] + self.eps)
        one_maximum = reward[:, k - 1] >= reward[:, -1]
        return ragged.masked(psi, ~one_maximum[:, None])


Keep = Literal["right", "best"]


@dataclass(frozen=True)
class Accepted(Advantage):
    """Ψ = 1 for a completion that is kept, else 0: rejection sampling, the likelihood of what was accepted.

    Source: Xiong et al. 2025, arXiv:2504.11343 (right ones); Dong et al. 2023 (RAFT), arXiv:2304.06767 (the best of each prompt).
    """

    keep: Keep = "right"
    """right: R_i ≥ threshold; best: R_i ≥ max_g R, all of them where several are."""
    threshold: float = 1.0
    starts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.keep not in get_args(Keep):
            raise ConfigError(
                f"Accepted.keep must be 'right' (R_i ≥ threshold) or 'best' (the best of each prompt), not {self.keep!r}"
            )

    @property
    def group_statistic(self) -> bool:  # type: ignore[override]
        """The best of one prompt's samples is a comparison of them."""
        return self.keep == "best"

    @property
    def formula(self) -> str:
        return f"1 where R ≥ {f'{self.threshold:g}' if self.keep == 'right' else 'max_g R'}, else 0"

    def __call__(self, psi: Tensor, batch: Batch) -> Tensor:
        total, counted = totals(batch), batch.counted
        enough: float | Tensor = self.threshold if self.keep == "right" else Groups(batch.group, counted).max(total)
        return ragged.masked(((total >= enough) & counted).to(total.dtype)[:, None], batch.mask)
