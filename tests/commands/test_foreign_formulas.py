"""Each row of docs/from-other-libraries.md that names a formula, against that library's formula written out token by token.

The formulas are those of TRL 1.16.0, of verl at b178a3c, of OpenRLHF at 3c3be62 and of prime-rl at 559b447, read from their
sources; TRL's PPO, which 1.16.0 no longer has, is taken as verl's source quotes it. What a row's note says to differ is checked to
differ so.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

import policygrad as pg
from policygrad.commands.converters.openrlhf import RENAMED
from policygrad.commands.foreign_options import load_foreign_options
from policygrad.commands.train import parse_run
from policygrad.core.kl_controllers import adapt_proportionally
from policygrad.core.replay import ReplayBuffer, measure_worth

LENGTHS = (5, 2, 3, 5, 4, 1, 5, 2, 3, 3, 5, 1)
ROWS, WIDTH, SIZE = len(LENGTHS), 5, 4
REWARDS = (1.0, 0.0, 0.0, 1.0, 0.5, 1.0, 0.25, 0.0, 1.0, 1.0, 1.0, 1.0)
TRUNCATED = tuple(n == WIDTH for n in LENGTHS)
TOKENS = [(i, t) for i, n in enumerate(LENGTHS) for t in range(n)]
Numbers = dict[tuple[int, int], float]


@cache
def algorithm(argv: str) -> pg.Algorithm:
    """What the command line makes of `policygrad train WORDS`."""
    return parse_run(argv.split())[0].algorithm


def rollout(seed: int = 0) -> pg.Batch:
    """Three prompts with four completions each; policies that are some way apart."""
    random = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(ROWS, WIDTH, generator=random, dtype=torch.float64)

    mask = torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]
    old = -normal(1.0).abs()
    return pg.Batch(
        mask=mask,
        group=torch.arange(ROWS) // SIZE,
        reward=torch.tensor(REWARDS, dtype=torch.float64),
        truncated=torch.tensor(TRUNCATED),
        logp_old=old,
        logp_ref=old + normal(0.7),
        logp_sampler=old + normal(0.7),
        values=normal(1.0),
    )


BATCH = rollout()
PSI = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
LOGP = BATCH.logp_old + 0.6 * torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(2), dtype=torch.float64)  # type: ignore[operator]


def ours(argv: str, psi: Tensor = PSI, batch: pg.Batch = BATCH) -> Tensor:
    """∂loss/∂log π_θ of the command line's algorithm."""
    leaf = LOGP.clone().requires_grad_()
    return torch.autograd.grad(pg.surrogate(leaf, batch, psi, algorithm(argv)), leaf)[0]


def theirs(loss: Callable[[Tensor], Tensor]) -> Tensor:
    leaf = LOGP.clone().requires_grad_()
    return torch.autograd.grad(loss(leaf), leaf)[0]


def agree(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a * BATCH.mask, b * BATCH.mask, rtol=1e-9, atol=1e-12)


def ratio(logp: Tensor, i: int, t: int) -> Tensor:
    return (logp[i, t] - BATCH.logp_old[i, t]).exp()  # type: ignore[index]


def token_mean(of: Callable[[Tensor, int, int], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda logp: torch.stack([of(logp, i, t) for i, t in TOKENS]).sum() / len(TOKENS)


def clipped(r: Tensor, a: Tensor, low: float, high: float) -> Tensor:
    return torch.minimum(r * a, r.clamp(1 - low, 1 + high) * a)


BARE = "grpo --algorithm.terms none --algorithm.aggregation TokenMean"


def clip() -> None:
    agree(
        ours(f"{BARE} --algorithm.gate.low 0.1 --algorithm.gate.high 0.4"),
        theirs(token_mean(lambda logp, i, t: -clipped(ratio(logp, i, t), PSI[i, t], 0.1, 0.4))),
    )


def clip_of_cispo() -> None:
    """The upper bound itself; the weight stands still, and its log-probability is differentiated."""
    agree(
        ours("cispo --algorithm.gate.high 1.5"),
        theirs(token_mean(lambda logp, i, t: -ratio(logp, i, t).detach().clamp(max=1.5) * PSI[i, t] * logp[i, t])),
    )


def dual_clip_as_bound() -> None:
    """verl, OpenRLHF: where Ψ < 0, no less than c·Ψ."""

    def value(logp: Tensor, i: int, t: int) -> Tensor:
        a, plain = PSI[i, t], clipped(ratio(logp, i, t), PSI[i, t], 0.2, 0.2)
        return -torch.maximum(plain, 1.5 * a) if a < 0 else -plain

    agree(ours(f"{BARE} --algorithm.gate.c 1.5"), theirs(token_mean(value)))


def dual_clip_as_cap() -> None:
    """TRL: the unclipped ratio is capped at delta, on both sides of Ψ."""

    def value(logp: Tensor, i: int, t: int) -> Tensor:
        r, a = ratio(logp, i, t), PSI[i, t]
        return -torch.minimum(r.clamp(max=1.5) * a, r.clamp(0.8, 1.2) * a)

    agree(ours(f"{BARE} --algorithm.gate.c 1.5"), theirs(token_mean(value)))


def cap_below_the_clip() -> None:
    """TRL: a delta below 1 + epsilon_high is the bound where Ψ > 0, and 1 + epsilon_high the one where Ψ < 0."""

    def value(logp: Tensor, i: int, t: int) -> Tensor:
        r, a = ratio(logp, i, t), PSI[i, t]
        return -torch.minimum(r.clamp(max=1.1) * a, r.clamp(0.8, 1.4) * a)

    loss = theirs(token_mean(value))
    agree(ours(f"{BARE} --algorithm.gate.c 1.4 --algorithm.gate.high 0.1"), loss)
    assert not torch.allclose(ours(f"{BARE} --algorithm.gate.c 1.1 --algorithm.gate.high 0.4"), loss)


def value_loss(factor: float, argv: str) -> Callable[[], None]:
    """factor · max((V − R)², (V clipped about the old one − R)²), a token."""

    def check() -> None:
        critic = algorithm(f"ppo --algorithm.critic.clip 0.3 {argv}").critic
        assert critic is not None
        assert BATCH.values is not None
        new, targets = BATCH.values + PSI, PSI.flip(0)
        loss = critic.loss(new, BATCH, targets)
        for i, t in TOKENS:
            v, old, goal = float(new[i, t]), float(BATCH.values[i, t]), float(targets[i, t])
            near = min(max(v, old - 0.3), old + 0.3)
            assert float(loss[i, t]) == pytest.approx(factor * max((v - goal) ** 2, (near - goal) ** 2))

    return check


def token_rewards(beta: float = 0.0) -> Numbers:
    """−β(log π_old − log π_ref) at every token, and the completion's reward at its last."""
    rewards = {(i, t): -beta * float(BATCH.logp_old[i, t] - BATCH.logp_ref[i, t]) for i, t in TOKENS}  # type: ignore[index]
    for i, n in enumerate(LENGTHS):
        rewards[i, n - 1] += REWARDS[i]
    return rewards


def gae_by_hand(gamma: float, lam: float, beta: float = 0.0) -> Numbers:
    rewards, result = token_rewards(beta), Numbers()
    for i, n in enumerate(LENGTHS):
        value, advantage = 0.0, 0.0
        for t in reversed(range(n)):
            now = float(BATCH.values[i, t])  # type: ignore[index]
            advantage = rewards[i, t] + gamma * value - now + gamma * lam * advantage
            value = now
            result[i, t] = advantage
    return result


def to_go_by_hand(beta: float) -> Numbers:
    rewards = token_rewards(beta)
    return {(i, t): sum(rewards[i, s] for s in range(t, LENGTHS[i])) for i, t in TOKENS}


def whitened(values: Numbers, ddof: int = 1, added: float = 1e-8, floor: float = 0.0) -> Numbers:
    mean = sum(values.values()) / len(values)
    variance = sum((x - mean) ** 2 for x in values.values()) / (len(values) - ddof)
    return {key: (x - mean) / math.sqrt(max(variance, floor) + added) for key, x in values.items()}


def same(psi: Tensor, values: Numbers, factor: float = 1.0, tolerance: float = 1e-9) -> None:
    for i, t in TOKENS:
        assert float(psi[i, t]) == pytest.approx(factor * values[i, t], rel=tolerance, abs=1e-9), (i, t)


GAE = (
    "ppo --algorithm.shaping none --algorithm.advantage.gae.gamma 0.9 --algorithm.advantage.gae.lam 0.8 "
    "--algorithm.critic.gamma 0.9 --algorithm.critic.lam 0.8"
)


def gae() -> None:
    """TRL, verl: whitened with ddof 1 and 1e-8 under the root; the critic's targets are the unwhitened ones plus V."""
    same(algorithm(GAE).compute_advantages(BATCH), whitened(gae_by_hand(0.9, 0.8)))
    critic, by_hand = algorithm(GAE).critic, gae_by_hand(0.9, 0.8)
    assert critic is not None
    assert BATCH.values is not None
    same(critic.targets(BATCH), {(i, t): x + float(BATCH.values[i, t]) for (i, t), x in by_hand.items()})


DDOF = math.sqrt((len(TOKENS) - 1) / len(TOKENS))
"""Ours over OpenRLHF's, whose variance is over n and not n − 1."""


def gae_of_openrlhf() -> None:
    same(algorithm(GAE).compute_advantages(BATCH), whitened(gae_by_hand(0.9, 0.8), 0, 0.0, 1e-8), DDOF, 1e-7)


FORMS = {"k2": lambda u: u * u / 2, "k3": lambda u: (-u).exp() - 1 + u}


def kl_in_loss() -> None:
    for form, k in FORMS.items():
        part = "--algorithm.terms.kl-to-reference"
        term = f"--algorithm.terms KLToReference {part}.beta 0.3 {part}.form {form}"
        agree(
            ours(f"dr_grpo {term} --algorithm.aggregation TokenMean", torch.zeros_like(PSI)),
            theirs(token_mean(lambda logp, i, t, k=k: 0.3 * k(logp[i, t] - BATCH.logp_ref[i, t]))),  # type: ignore[index,misc]
        )


def no_k1_in_loss() -> None:
    with pytest.raises(SystemExit):
        algorithm("grpo --algorithm.terms.kl-to-reference.form k1")
    with pytest.raises(pg.ConfigError, match="does nothing"):
        pg.KLToReference(0.3, "k1")


KL = "--algorithm.shaping KLInReward --algorithm.shaping.kl-in-reward.beta 0.3"


def kl_in_reward() -> None:
    """Before the advantages of a critic, and before whitening."""
    same(algorithm(f"ppo {KL}").compute_advantages(BATCH), whitened(gae_by_hand(1.0, 0.95, 0.3)))
    same(algorithm(f"reinforce_pp {KL}").compute_advantages(BATCH), whitened(to_go_by_hand(0.3)))


def kl_in_reward_of_a_group() -> None:
    """verl compares whole sums of a completion's rewards, KL included: level = sequence."""
    psi = algorithm(
        f"grpo --algorithm.advantage GroupMean {KL} --algorithm.shaping.kl-in-reward.level sequence"
    ).compute_advantages(BATCH)
    full = [to_go_by_hand(0.3)[i, 0] for i in range(ROWS)]
    same(psi, {(i, t): full[i] - mean_of_group(full, i) for i, t in TOKENS})


def kl_after_the_baseline() -> None:
    """OpenRLHF takes the baseline off the rewards alone, and the KL to go comes behind it: it is in no baseline."""
    psi = algorithm(f"grpo --algorithm.advantage GroupMean {KL}").compute_advantages(BATCH)
    kl = {key: to_go_by_hand(0.3)[key] - REWARDS[key[0]] for key in TOKENS}
    first = [kl[i, 0] for i in range(ROWS)]
    apart = {(i, t): REWARDS[i] - mean_of_group(REWARDS, i) + kl[i, t] - mean_of_group(first, i) for i, t in TOKENS}
    same(psi, apart)


def kl_of_rloo() -> None:
    """TRL's beta in RLOOConfig: the completion's whole KL off its reward."""
    psi = algorithm("rloo --algorithm.shaping.kl-in-reward.beta 0.3").compute_advantages(BATCH)
    full = [to_go_by_hand(0.3)[i, 0] for i in range(ROWS)]
    same(psi, {(i, t): (full[i] - mean_of_group(full, i)) * SIZE / (SIZE - 1) for i, t in TOKENS})


def target_kl() -> None:
    """verl, OpenRLHF: β(1 + n/horizon · clip(KL/target − 1, ±0.2)), with n completions a horizon of 10 n."""
    for kl in (0.01, 0.095, 0.1, 0.11, 3.0):
        assert adapt_proportionally(0.2, kl, 0.1) == pytest.approx(
            0.2 * (1 + min(max(kl / 0.1 - 1, -0.2), 0.2) * 64 / 640)
        )
    assert isinstance(algorithm(f"ppo {KL} --algorithm.shaping.kl-in-reward.target 0.1").shaping[0], pg.KLInReward)


def aggregated(per_token: str, weight: Callable[[int], float]) -> None:
    """Σ c·loss with c = weight(row) at each of a row's tokens."""

    def loss(logp: Tensor) -> Tensor:
        values = [-weight(i) * clipped(ratio(logp, i, t), PSI[i, t], 0.2, 0.2) for i, t in TOKENS]
        return torch.stack(values).sum()

    agree(ours(f"grpo --algorithm.terms none --algorithm.aggregation {per_token}"), theirs(loss))


def loss_types() -> None:
    aggregated("SequenceMean", lambda i: 1 / LENGTHS[i] / ROWS)  # grpo
    aggregated(
        "FixedLength --algorithm.aggregation.length 9", lambda i: 1 / (ROWS * 9)
    )  # dr_grpo, over max_completion_length
    aggregated("TokenMean", lambda i: 1 / len(TOKENS))  # dapo, bnpo


def loss_agg_modes() -> None:
    aggregated("TokenMean", lambda i: 1 / len(TOKENS))  # token-mean
    aggregated("SequenceSum", lambda i: 1 / ROWS)  # seq-mean-token-sum
    aggregated("SequenceMean", lambda i: 1 / LENGTHS[i] / ROWS)  # seq-mean-token-mean


def mean_of_group(x: tuple[float, ...] | list[float], i: int) -> float:
    first = i // SIZE * SIZE
    return sum(x[first : first + SIZE]) / SIZE


def deviation(x: tuple[float, ...] | list[float]) -> float:
    mean = sum(x) / len(x)
    return math.sqrt(sum((y - mean) ** 2 for y in x) / (len(x) - 1))


def compared(psi: str, scale: Callable[[int], float]) -> None:
    result = algorithm(f"grpo --algorithm.advantage {psi}").compute_advantages(BATCH)
    same(result, {(i, t): (REWARDS[i] - mean_of_group(REWARDS, i)) / scale(i) for i, t in TOKENS})


def of_group(i: int) -> float:
    first = i // SIZE * SIZE
    return deviation(REWARDS[first : first + SIZE])


def scale_rewards() -> None:
    compared("GroupMean,GroupStd", lambda i: of_group(i) + 1e-4)
    compared("GroupMean,BatchStd --algorithm.advantage.batch-std.of rewards", lambda i: deviation(REWARDS) + 1e-4)
    compared("GroupMean", lambda i: 1.0)
    other = algorithm("grpo --algorithm.advantage GroupMean,BatchStd").compute_advantages(
        BATCH
    )  # of the centred ones: another number
    assert not torch.allclose(
        other,
        algorithm(
            "grpo --algorithm.advantage GroupMean,BatchStd --algorithm.advantage.batch-std.of rewards"
        ).compute_advantages(BATCH),
    )


def norm_by_std() -> None:
    compared("GroupMean", lambda i: 1.0)
    compared("GroupMean,GroupStd --algorithm.advantage.group-std.eps 1e-6", lambda i: of_group(i) + 1e-6)


def estimators() -> None:
    """OpenRLHF's --advantage_estimator, as the page's table has them; without a KL."""
    centred = {(i, t): REWARDS[i] - mean_of_group(REWARDS, i) for i, t in TOKENS}
    same(algorithm("dr_grpo").compute_advantages(BATCH), centred)
    same(algorithm("rloo --algorithm.shaping none").compute_advantages(BATCH), centred, SIZE / (SIZE - 1))
    compared("GroupMean,GroupStd --algorithm.advantage.group-std.eps 1e-9", lambda i: of_group(i) + 1e-9)  # group_norm
    none = {(i, t): REWARDS[i] for i, t in TOKENS}
    same(
        algorithm("reinforce_pp --algorithm.shaping none").compute_advantages(BATCH),
        whitened(none, 0, 0.0, 1e-8),
        DDOF,
        1e-7,
    )
    same(algorithm("reinforce_pp_baseline").compute_advantages(BATCH), whitened(centred, 0, 0.0, 1e-8), DDOF, 1e-7)


def no_std_norm() -> None:
    """The mean over tokens still comes off: of what is left without Whiten, the same constant at every token."""
    for argv, values in (
        (
            "reinforce_pp_baseline --algorithm.advantage GroupMean",
            {(i, t): REWARDS[i] - mean_of_group(REWARDS, i) for i, t in TOKENS},
        ),
        ("ppo --algorithm.shaping none --algorithm.advantage GAE", gae_by_hand(1.0, 0.95)),
    ):
        psi, mean = algorithm(argv).compute_advantages(BATCH), sum(values.values()) / len(values)
        same(psi - mean, {key: x - mean for key, x in values.items()})
        assert abs(mean) > 1e-3


def sampling_level() -> None:
    """Token: its own ratio; sequence: one for the completion, the geometric mean of its tokens'."""

    def sequence(logp: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for i, n in enumerate(LENGTHS):
            change = torch.stack([logp[i, t] - BATCH.logp_old[i, t] for t in range(n)]).mean()  # type: ignore[index]
            total = total - clipped(change.exp(), PSI[i, 0], 0.2, 0.2) / ROWS
        return total

    per_completion = PSI[:, :1].expand_as(PSI)
    agree(ours("grpo --algorithm.terms none --algorithm.ratio Sequence", per_completion), theirs(sequence))
    agree(ours("gspo --algorithm.gate.low 0.2 --algorithm.gate.high 0.2", per_completion), theirs(sequence))
    clip()


def truncated() -> None:
    """TRL masks them in the loss, and their rewards stay in the group's statistics."""
    kept = algorithm("dr_grpo --algorithm.filters MaskTruncated --algorithm.filters.mask-truncated.keep-in-statistics")
    batch = kept.apply_filters(BATCH)
    psi = kept.compute_advantages(batch)
    for i, t in TOKENS:
        assert bool(batch.mask[i, t]) is not TRUNCATED[i]
        assert float(psi[i, t]) == pytest.approx(0.0 if TRUNCATED[i] else REWARDS[i] - mean_of_group(REWARDS, i))


def averages_without_truncated_ones() -> None:
    """TRL divides by all completions or all tokens there could be, grpo, dr_grpo and sapo alike; here by those that are left. Where
    the tokens are counted both count the same."""
    kept, left = "--algorithm.filters MaskTruncated --algorithm.filters.mask-truncated.keep-in-statistics", []
    for argv, length, factor in (
        ("grpo --algorithm.terms none", None, ROWS / (ROWS - sum(TRUNCATED))),
        ("sapo", None, ROWS / (ROWS - sum(TRUNCATED))),
        ("dr_grpo --algorithm.aggregation.length 5", WIDTH, ROWS / (ROWS - sum(TRUNCATED))),
        (BARE, 0, 1.0),
    ):
        chosen = algorithm(f"{argv} {kept}")
        batch = chosen.apply_filters(BATCH)
        left = [(i, t) for i, t in TOKENS if not TRUNCATED[i]]
        for i, t in left:
            denominator = len(left) if length == 0 else ROWS * (length or LENGTHS[i])
            assert float(chosen.coefficients(batch)[i, t]) == pytest.approx(factor / denominator), argv


def temperatures() -> None:
    def value(logp: Tensor, i: int, t: int) -> Tensor:
        tau = 1.5 if PSI[i, t] > 0 else 2.5
        return -torch.sigmoid(tau * (ratio(logp, i, t) - 1)) * 4 / tau * PSI[i, t]

    argv = "sapo --algorithm.gate.tau-pos 1.5 --algorithm.gate.tau-neg 2.5 --algorithm.aggregation TokenMean"
    agree(ours(argv), theirs(token_mean(value)))


def off_policy_mask() -> None:
    """Failures whose mean log μ/π_θ exceeds the threshold are left out; a completion has one advantage, as in TRL."""
    psi = PSI[:, :1].expand(PSI.shape)

    def far(i: int, bound: float) -> bool:
        gaps = [float(BATCH.logp_sampler[j, t] - LOGP[j, t]) for j, t in TOKENS if j == i]  # type: ignore[index]
        return bool(psi[i, 0] < 0) and sum(gaps) / len(gaps) > bound

    def masked(bound: float) -> Tensor:
        def value(logp: Tensor, i: int, t: int) -> Tensor:
            return -(not far(i, bound)) * clipped(ratio(logp, i, t), psi[i, t], 0.2, 0.2)

        return theirs(token_mean(value))

    mask = (
        f"{BARE} --algorithm.corrections OffPolicySequenceMask --algorithm.corrections.off-policy-sequence-mask.delta"
    )
    agree(ours(f"{mask} 0.05", psi), masked(0.05))
    assert {far(i, 0.05) for i, _ in TOKENS if psi[i, 0] < 0} == {True, False}


def corrections() -> None:
    """Token by token, from above; and from below for OpenRLHF, and for TRL where a minimum is set."""

    def weighed(weight: Callable[[float], float]) -> Tensor:
        def value(logp: Tensor, i: int, t: int) -> Tensor:
            rho = float((BATCH.logp_old[i, t] - BATCH.logp_sampler[i, t]).exp())  # type: ignore[index]
            return -weight(rho) * clipped(ratio(logp, i, t), PSI[i, t], 0.2, 0.2)

        return theirs(token_mean(value))

    cap = f"{BARE} --algorithm.corrections TruncatedIS --algorithm.corrections.truncated-is.cap 1.5"
    agree(ours(cap), weighed(lambda rho: min(rho, 1.5)))
    band = "--algorithm.corrections.masked-is.low 0.5 --algorithm.corrections.masked-is.high 1.5"
    agree(
        ours(f"{BARE} --algorithm.corrections MaskedIS {band}"), weighed(lambda rho: rho if 0.5 <= rho <= 1.5 else 0.0)
    )
    agree(ours(f"{cap} --algorithm.corrections.truncated-is.low 0.5"), weighed(lambda rho: min(max(rho, 0.5), 1.5)))


def geometric_mask() -> None:
    """OpenRLHF's seq-mask-tis: a completion's geometric mean decides, and the tokens keep their unbounded weights."""
    gaps = [[float(BATCH.logp_old[i, t] - BATCH.logp_sampler[i, t]) for t in range(n)] for i, n in enumerate(LENGTHS)]  # type: ignore[index]

    def value(logp: Tensor, i: int, t: int) -> Tensor:
        is_kept = 0.8 <= math.exp(sum(gaps[i]) / len(gaps[i])) <= 1.3
        return -is_kept * math.exp(gaps[i][t]) * clipped(ratio(logp, i, t), PSI[i, t], 0.2, 0.2)

    kept = "MismatchMask(low=0.8,high=1.3),TruncatedIS(cap=inf)"
    agree(ours(f"{BARE} --algorithm.corrections {kept}"), theirs(token_mean(value)))


def entropy() -> None:
    """verl, OpenRLHF: −η times the mean over tokens of the entropy over the vocabulary; `Entropy`'s expectation is the same."""
    logits = torch.tensor([0.3, -1.0, 0.8], dtype=torch.float64, requires_grad=True)
    distribution = logits.log_softmax(0)
    (exact,) = torch.autograd.grad(-0.3 * -(distribution.exp() * distribution).sum(), logits)
    expected = torch.zeros(3, dtype=torch.float64)
    row = algorithm(
        "dr_grpo --algorithm.terms Entropy --algorithm.terms.entropy.eta 0.3 --algorithm.aggregation TokenMean"
    )
    for token in range(3):
        logp = logits.log_softmax(0)[token].view(1, 1)
        one = pg.Batch(
            mask=torch.ones(1, 1, dtype=torch.bool),
            group=torch.zeros(1, dtype=torch.int64),
            reward=torch.zeros(1, dtype=torch.float64),
            logp_old=logp.detach(),
        )
        loss = pg.surrogate(logp, one, torch.zeros(1, 1, dtype=torch.float64), row)
        expected += logp.detach().exp().item() * torch.autograd.grad(loss, logits)[0]
    torch.testing.assert_close(expected, exact)


def overlong() -> None:
    """OpenRLHF: a buffer of 2 of 5 tokens is a share of 0.4; each token in it costs its part of 1."""
    argv = "reinforce --max-tokens 5 --algorithm.shaping SoftOverlong --algorithm.shaping.soft-overlong.cache 0.4"
    row = algorithm(argv)
    shaped = replace(BATCH, truncated=None)
    for part in row.shaping:
        shaped = part(shaped)
    for i, n in enumerate(LENGTHS):
        assert float(shaped.reward[i]) == pytest.approx(REWARDS[i] - min(max(n - 3, 0), 2) / 2)


def filtered_groups() -> None:
    """Of rewards of 0 and 1, a group goes where its mean is 0 or 1 (OpenRLHF), its std 0 (verl): the same groups."""
    rewards = torch.tensor([1.0, 0, 0, 1, 0, 0, 0, 0, 1, 1, 1, 1], dtype=torch.float64)
    dropped = algorithm("grpo --algorithm.filters DropZeroVariance").filters[0]
    assert isinstance(dropped, pg.DropZeroVariance)
    assert (~dropped.find_dropped(replace(BATCH, reward=rewards))).tolist() == [
        0 < float(rewards[i // 4 * 4 :][:4].mean()) < 1 for i in range(ROWS)
    ]


def range_of_groups() -> None:
    """OpenRLHF: a group is kept whose mean reward lies strictly within the range."""
    argv = "grpo --algorithm.filters RewardRange --algorithm.filters.reward-range.low"
    for low, high in ((0.0, 1.0), (0.1, 0.6), (0.3, 0.625)):
        part = algorithm(f"{argv} {low} --algorithm.filters.reward-range.high {high}").filters[0]
        means = [sum(REWARDS[i // SIZE * SIZE :][:SIZE]) / SIZE for i in range(ROWS)]
        assert (~part.find_dropped(BATCH)).tolist() == [low < mean < high for mean in means]


def worth_of_groups() -> None:
    """TRL keeps the groups of the largest Σ |A|·std, A = (R − mean)/(std + 1e-4), and replaces those without spread."""
    part = algorithm("grpo --algorithm.filters ReplayBuffer --algorithm.filters.replay-buffer.size 2").filters[0]
    assert isinstance(part, ReplayBuffer)
    rewards = [torch.tensor(REWARDS[i : i + SIZE], dtype=torch.float64) for i in range(0, ROWS, SIZE)]
    scores = [float((((r - r.mean()) / (r.std() + 1e-4)).abs() * r.std()).sum()) for r in rewards]
    worth = [measure_worth(r.tolist()) for r in rewards]
    assert worth == pytest.approx(scores, rel=1e-3)
    best = sorted(range(len(scores)), key=lambda i: scores[i])[-2:]
    assert part.choose_kept(worth) == sorted(best)
    assert part.find_dropped(BATCH).tolist() == [float(r.std()) == 0 for r in rewards for _ in range(SIZE)]


def bounds_of_rewards() -> None:
    row = algorithm("reinforce --algorithm.shaping ClipReward --algorithm.shaping.clip-reward.low 0.25 "
                    "--algorithm.shaping.clip-reward.high 0.75")  # fmt: skip
    assert row.shape_rewards(BATCH).reward.tolist() == [min(max(x, 0.25), 0.75) for x in REWARDS]


def loss_of_prime_rl() -> None:
    """−keep·Ψ·r + kl_tau·(log r)², the mean over tokens: kept where π has not moved by more than the bound in Ψ's direction."""

    def value(logp: Tensor, i: int, t: int) -> Tensor:
        a, r, old = PSI[i, t], ratio(logp, i, t), BATCH.logp_old[i, t]  # type: ignore[index]
        moved = (
            logp[i, t].detach().clamp(max=0).exp() - old.exp()
        )  # the batch's numbers may be above a probability of 1
        masked = moved > 0.1 if a > 0 else moved < -0.1
        return -(a * r * ~masked) + 0.003 * r.log() ** 2

    agree(ours("prime_rl --algorithm.gate.delta 0.1 --algorithm.terms.kl-to-old.beta 0.006"), theirs(token_mean(value)))


def algorithms_of_prime_rl() -> None:
    """grpo: R − the group's mean; max_rl divides that by the mean."""
    compared("GroupMean", lambda i: 1.0)
    rewards = torch.tensor(REWARDS)
    compared("GroupMean,DivideByGroupMean", lambda i: float(rewards[i // SIZE * SIZE :][:SIZE].mean()))


Check = Callable[[], None]
CHECKS: dict[str, dict[str, tuple[Check, ...]]] = {
    "TRL": {
        **dict.fromkeys(("epsilon", "cliprange"), (clip,)),
        "epsilon_high": (clip, clip_of_cispo),
        "delta": (dual_clip_as_cap, cap_below_the_clip),
        "cliprange_value": (value_loss(0.5, ""),),
        "vf_coef": (value_loss(0.5 * 0.2, "--algorithm.critic.coefficient 0.1"),),  # vf_coef 0.2
        **dict.fromkeys(("gamma", "lam"), (gae,)),
        "beta": (kl_in_loss, kl_of_rloo),
        **dict.fromkeys(("kl_coef", "init_kl_coef", "kl_estimator"), (kl_in_reward,)),
        "loss_type": (loss_types, clip_of_cispo, temperatures),
        "scale_rewards": (scale_rewards,),
        "importance_sampling_level": (sampling_level,),
        "mask_truncated_completions": (truncated, averages_without_truncated_ones),
        **dict.fromkeys(("sapo_temperature_pos", "sapo_temperature_neg"), (temperatures,)),
        "off_policy_mask_threshold": (off_policy_mask,),
        "replay_buffer_size": (worth_of_groups,),
        **dict.fromkeys(("vllm_importance_sampling_correction", "vllm_importance_sampling_cap"), (corrections,)),
    },
    "verl": {
        **dict.fromkeys((f"actor_rollout_ref.actor.clip_ratio{end}" for end in ("", "_low", "_high")), (clip,)),
        "actor_rollout_ref.actor.clip_ratio_c": (dual_clip_as_bound,),
        "actor_rollout_ref.actor.loss_agg_mode": (loss_agg_modes,),
        "actor_rollout_ref.actor.policy_loss.loss_mode": (sampling_level,),
        "actor_rollout_ref.actor.entropy_coeff": (entropy,),
        **dict.fromkeys(("actor_rollout_ref.actor.use_kl_loss", "actor_rollout_ref.actor.kl_loss_coef"), (kl_in_loss,)),
        "actor_rollout_ref.actor.kl_loss_type": (kl_in_loss, no_k1_in_loss),
        "critic.cliprange_value": (value_loss(0.5, ""),),
        "algorithm.adv_estimator": (norm_by_std, gae),
        **dict.fromkeys(("algorithm.gamma", "algorithm.lam"), (gae,)),
        "algorithm.norm_adv_by_std_in_grpo": (norm_by_std,),
        "algorithm.use_kl_in_reward": (kl_in_reward, kl_in_reward_of_a_group),
        **dict.fromkeys(("algorithm.kl_penalty", "algorithm.kl_ctrl.kl_coef"), (kl_in_reward,)),
        "algorithm.kl_ctrl.target_kl": (target_kl,),
        "algorithm.filter_groups.enable": (filtered_groups,),
    },
    "OpenRLHF": {
        **dict.fromkeys(("eps_clip", "eps_clip_low_high"), (clip,)),
        "dual_clip": (dual_clip_as_bound,),
        "value_clip": (value_loss(0.5, ""),),
        **dict.fromkeys(("gamma", "lambd"), (gae_of_openrlhf,)),
        "init_kl_coef": (kl_in_reward, kl_after_the_baseline),
        "kl_target": (target_kl,),
        "kl_estimator": (kl_in_loss, no_k1_in_loss),
        "use_kl_loss": (kl_in_loss,),
        "entropy_loss_coef": (entropy,),
        "policy_loss_type": (clip, sampling_level),
        "advantage_estimator": (estimators, gae_of_openrlhf),
        "no_advantage_std_norm": (no_std_norm,),
        "overlong_buffer_len": (overlong,),
        **dict.fromkeys(("dynamic_filtering", "dynamic_filtering_reward_range"), (range_of_groups,)),
        "reward_clip_range": (bounds_of_rewards,),
        **dict.fromkeys(("enable_vllm_is_correction", "vllm_is_truncated_threshold"), (corrections,)),
        "vllm_is_correction_type": (corrections, geometric_mask),
    },
    "prime-rl": {
        "orchestrator.algo.type": (algorithms_of_prime_rl,),
        **dict.fromkeys(("trainer.loss.dppo_mask_high", "trainer.loss.dppo_mask_low"), (loss_of_prime_rl,)),
        "trainer.loss.kl_tau": (loss_of_prime_rl,),
        "orchestrator.train.filter_zero_advantages": (filtered_groups,),
    },
}
CHECKS["OpenRLHF"] |= {RENAMED[name]: checks for name, checks in CHECKS["OpenRLHF"].items()}
"""By library and option: what shows that the option named beside it is that formula."""
COUNTS = ("--algorithm.update-rule.", "--algorithm.reference.", "--algorithm.critic.pretrain", "--algorithm.critic.lr")
"""Options that count updates or rollouts, or are a rate: no formula is named there."""
BOUNDS = ("--algorithm.filters.drop-zero-variance.max-rounds",)


def test_every_row_that_names_a_formula_has_a_numerical_check() -> None:
    for library, names in load_foreign_options()[0].items():
        formulas = {
            name
            for name, answer in names.items()
            if answer.flag.startswith(("--algorithm.", "ALGORITHM")) and not answer.flag.startswith((*COUNTS, *BOUNDS))
        }
        assert formulas == set(CHECKS[library]), library


NAMED = {
    ("TRL", "scale_rewards"): "batch GroupMean,BatchStd with --algorithm.advantage.batch-std.of rewards",
    ("TRL", "mask_truncated_completions"): "B/(B − truncated) times TRL's gradient",
    ("TRL", "delta"): "--algorithm.gate.high is delta − 1 and --algorithm.gate.c 1 + epsilon_high",
    ("TRL", "gamma"): "different ones are refused",
    ("verl", "algorithm.lam"): "the critic's is 0.95 until it is set",
    ("OpenRLHF", "vllm_is_correction_type"): "'MismatchMask(low=0.5,high=5),TruncatedIS(cap=inf)' for seq-mask-tis",
    ("verl", "algorithm.norm_adv_by_std_in_grpo"): "--algorithm.advantage.group-std.eps 1e-6",
    ("verl", "algorithm.use_kl_in_reward"): "--algorithm.shaping.kl-in-reward.level sequence",
    ("OpenRLHF", "init_kl_coef"): "after the baselines",
    ("OpenRLHF", "no_advantage_std_norm"): "without Whiten",
    ("OpenRLHF", "vllm_is_truncated_threshold"): "--algorithm.corrections.truncated-is.low",
    ("prime-rl", "trainer.loss.kl_tau"): "twice prime-rl's value",
}
"""What a row has to say besides its option, for its check to be of what it says."""


def test_notes_name_the_formula_that_is_checked() -> None:
    for (library, name), argv in NAMED.items():
        assert argv in load_foreign_options()[0][library][name].note, name


@pytest.mark.parametrize(
    "check",
    dict.fromkeys(check for rows in CHECKS.values() for checks in rows.values() for check in checks),
    ids=lambda check: check.__qualname__.replace(".<locals>.check", ""),
)
def test_our_options_compute_the_foreign_formulas(check: Check) -> None:
    check()
