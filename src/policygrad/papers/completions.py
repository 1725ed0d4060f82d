"""A batch as lists of completions, each with its sampled tokens only, and the sums that most objectives share.

log π_θ is a tensor with graph; every other quantity is a constant of θ, and so a Python number. Where a paper writes Ψ log π_θ, the
value is stated with `log_pi`: log π_θ plus a constant, so that it is Ψ at π_θ = π_old. The gradient is the same.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from policygrad.core.batch import PER_COMPLETION, PER_TOKEN, Batch


@dataclass(frozen=True, eq=False)
class Completion:
    """One completion. Lists hold one entry per sampled token, in order; they are empty where the batch has no such field."""

    reward: float
    logp: list[Tensor]
    """log π_θ, with graph."""
    old: list[float]
    """log π_old; log π_θ where the batch has none."""
    ref: list[float]
    """log π_ref. Where spans of text are compared, log π_old(token) + log π_ref(span) − log π_old(span) at a span's last token, and
    log π_old at the others."""
    span: list[int]
    """Index of the last token of each token's span; its own where tokens are compared, or where it is in no span."""
    sampler: list[float]
    """log μ."""
    position: list[int]
    """Position of the token in its row of the batch."""
    weight: list[float]
    """Factor on the token's part of the objective; 1 where the batch has none."""
    token_reward: list[float]
    """0 where the batch has none."""
    value: list[float]
    """V before the token."""
    entropy: list[float]
    sum_pi_squared: list[float]
    """Σ_a π_old(a)² before the token."""
    implicit_reward: list[float]
    step_end: list[bool]
    turn_state: list[int]
    selected: list[bool]
    """The tokens that were chosen at random, or as the first of equal ones, where an objective is stated for a given choice."""
    policy: list[Tensor]
    """[V] log π_θ(·) over the vocabulary, with graph."""
    reference: list[list[float]]
    """[V] log π_ref(·) over the vocabulary."""
    observed: list[Tensor]
    """log π_θ of the tokens that the environment wrote, with graph."""
    truncated: bool
    demonstration: bool
    has_reference: bool
    """π_ref has read the completion."""
    baseline: float
    """Reward of the prompt's greedy completion; NaN where there is none."""
    rewards: list[float]
    """Each reward function's result; NaN where it failed."""
    reward_weights: tuple[float, ...]
    row: int = 0
    """Index of its row in the batch."""
    role: str = ""
    """The role that it played in a game; "" where there are none."""
    peers: int = 0
    """Equal for the completions of a prompt that can be compared; 0 where the batch has no such field."""

    def __len__(self) -> int:
        return len(self.logp)

    def r(self, t: int) -> Tensor:
        """π_θ/π_old."""
        return torch.exp(self.logp[t] - self.old[t])

    def u(self, t: int) -> Tensor:
        """log π_θ − log π_ref."""
        return self.logp[t] - self.ref[t]


Prompts = list[list[Completion]]
"""The completions of each prompt that have a sampled token."""


def read_batch(batch: Batch, logp: Tensor, distributions: tuple[Tensor, Tensor] | None = None) -> Prompts:
    """Read a batch into lists, in float64. A completion without a sampled token is left out.

    Args:
        logp: log π_θ [B, T], with graph; of sampled and, if the batch has some, of observed tokens.
        distributions: log π_θ(·), with graph, and log π_ref(·) over the vocabulary, each [B, T, V].
    """
    prompts: dict[int, list[Completion]] = defaultdict(list)
    policy = iter(logp[batch.mask].to("cpu", torch.float64).unbind())  # one node of the graph, not one per token
    observed = batch.observed_tokens
    environment = iter(logp[observed].to("cpu", torch.float64).unbind())
    positions = [row.nonzero().flatten().tolist() for row in batch.mask.cpu()]
    fields = (*PER_TOKEN, *PER_COMPLETION, "rewards")
    rows = {name: value.cpu().tolist() for name, value in batch.tensors().items() if name in fields}

    for i, where in enumerate(positions):
        if not where:
            continue

        def tokens(name: str, i: int = i, where: list[int] = where) -> list[float]:
            return [rows[name][i][t] for t in where] if name in rows else []

        tokens_logp = [next(policy) for _ in where]
        old = tokens("logp_old") or [float(x.detach()) for x in tokens_logp]
        ref, span = tokens("logp_ref"), list(range(len(where)))
        if "reference_spans" in rows:
            ends = [int(end) for end in tokens("reference_spans")]
            members = {end: [t for t, other in enumerate(ends) if other == end] for end in set(ends) - {-1}}
            told, ref = ref, list(old)
            for end, inside in members.items():
                last = where.index(end)
                ref[last] += math.fsum(told[t] for t in inside) - math.fsum(old[t] for t in inside)
                for t in inside:
                    span[t] = last
        ours, theirs = (None, None) if distributions is None else (x[i].double().cpu() for x in distributions)
        completion = Completion(
            reward=rows["reward"][i],
            logp=tokens_logp,
            old=old,
            ref=ref,
            span=span,
            sampler=tokens("logp_sampler"),
            position=where,
            weight=tokens("weight") or [1.0] * len(where),
            token_reward=tokens("token_reward") or [0.0] * len(where),
            value=tokens("values"),
            entropy=tokens("entropy"),
            sum_pi_squared=tokens("sum_pi_squared"),
            implicit_reward=tokens("implicit_reward"),
            step_end=[bool(x) for x in tokens("step_end")],
            turn_state=[int(x) for x in tokens("turn_state")],
            selected=[bool(x) for x in tokens("selected")],
            policy=[] if ours is None else [ours[t] for t in where],
            reference=[] if theirs is None else [theirs[t].tolist() for t in where],
            observed=[next(environment) for _ in range(int(observed[i].sum()))],
            truncated=rows["truncated"][i] if "truncated" in rows else False,
            demonstration=rows["demonstration"][i] if "demonstration" in rows else False,
            has_reference=rows["has_reference"][i] if "has_reference" in rows else True,
            baseline=rows["baseline"][i] if "baseline" in rows else math.nan,
            rewards=rows["rewards"][i] if "rewards" in rows else [],
            reward_weights=batch.reward_weights,
            row=i,
            role=batch.role_names[rows["role"][i]] if "role" in rows else "",
            peers=rows["peers"][i] if "peers" in rows else 0,
        )
        prompts[rows["group"][i]].append(completion)
    return list(prompts.values())


def completions(prompts: Prompts) -> Iterator[Completion]:
    return (o for outputs in prompts for o in outputs)


def tokens(prompts: Prompts) -> Iterator[tuple[Completion, int]]:
    return ((o, t) for o in completions(prompts) for t in range(len(o)))


def count(prompts: Prompts) -> int:
    """Count the completions, at least 1: a denominator."""
    return max(1, sum(1 for _ in completions(prompts)))


def count_tokens(prompts: Prompts) -> int:
    """Count the sampled tokens, at least 1: a denominator."""
    return max(1, sum(len(o) for o in completions(prompts)))


def total(xs: Iterable[Tensor]) -> Tensor:
    """Σ x, a tensor also where there is none."""
    return sum(xs, torch.zeros((), dtype=torch.float64))


def clip(r: Tensor, low: float, high: float) -> Tensor:
    return r.clamp(low, high)


def clipped_surrogate(o: Completion, t: int, A: float, low: float = 0.2, high: float = 0.2) -> Tensor:
    """min(r Â, clip(r, 1 − low, 1 + high) Â). Schulman et al. 2017 (PPO), eq. 7."""
    r = o.r(t)
    return torch.minimum(r * A, clip(r, 1 - low, 1 + high) * A)


def log_pi(o: Completion, t: int) -> Tensor:
    """log π_θ plus a constant of θ: 1 where π_θ = π_old."""
    return o.logp[t] - o.old[t] + 1


def unit_log_pi(o: Completion, t: int) -> Tensor:
    """log π_θ plus a constant of θ, so that the value is 1: for objectives without a ratio."""
    return o.logp[t] - o.logp[t].detach() + 1


def k3(o: Completion, t: int) -> Tensor:
    """π_ref/π_θ − log(π_ref/π_θ) − 1, an estimate of KL(π_θ‖π_ref). Shao et al. 2024 (DeepSeekMath), eq. 4."""
    return torch.exp(-o.u(t)) + o.u(t) - 1


def to_go(xs: Sequence[float], discount: float = 1.0) -> list[float]:
    """Σ_{s ≥ t} discount^{s − t} x_s, for every t."""
    sums, later = [], 0.0
    for x in reversed(xs):
        later = x + discount * later
        sums.append(later)
    return sums[::-1]


def average(xs: Sequence[float]) -> float:
    """The mean; 0 of nothing."""
    return math.fsum(xs) / max(1, len(xs))


def standard_deviation(xs: Sequence[float], ddof: int = 1) -> float:
    center = average(xs)
    return math.sqrt(math.fsum((x - center) ** 2 for x in xs) / (len(xs) - ddof))


def all_equal(xs: Sequence[float]) -> bool:
    return min(xs) == max(xs)


def group_z_score(o: Completion, outputs: list[Completion]) -> float:
    """(R_i − mean_g)/std_g, 0 where all rewards are equal. Shao et al. 2024 (DeepSeekMath), sec. 4.1.2."""
    return relative(o.reward, [p.reward for p in outputs])


def relative(x: float, xs: Sequence[float]) -> float:
    """(x − mean)/(std + ε), 0 where all are equal."""
    return 0.0 if all_equal(xs) else (x - average(xs)) / (standard_deviation(xs) + 1e-4)


def centered(o: Completion, outputs: list[Completion]) -> float:
    """R_i − mean_g, 0 where all rewards are equal."""
    rewards = [p.reward for p in outputs]
    return 0.0 if all_equal(rewards) else o.reward - average(rewards)


def without_constant_groups(prompts: Prompts) -> Prompts:
    """The prompts whose rewards are not all equal: 0 < |{right}| < G of Yu et al. 2025 (DAPO), eq. 11."""
    return [outputs for outputs in prompts if not all_equal([o.reward for o in outputs])]


def overlong_penalty(length: int, max_tokens: int) -> float:
    """R_length, in exact arithmetic, L_cache a fifth of L_max. Yu et al. 2025 (DAPO), eq. 13."""
    cache = Fraction(max_tokens, 5)
    if length <= max_tokens - cache:
        return 0.0
    return float(((max_tokens - cache) - length) / cache) if length <= max_tokens else -1.0


def penalized(o: Completion, max_tokens: int, scale: float = 1.0) -> float:
    """R + scale·R_length. A truncated completion has reached the budget, however many of its tokens were sampled."""
    return o.reward + scale * overlong_penalty(max_tokens if o.truncated else len(o), max_tokens)
