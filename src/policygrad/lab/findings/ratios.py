"""Lever 2: ratios and gates off-policy. All exact."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from policygrad.core.advantages import RunningMean
from policygrad.core.batch import Batch
from policygrad.core.gates import Clip, Importance, SoftGate, WeightCap
from policygrad.core.protocols import Gate, Ratio
from policygrad.core.ratios import Sequence, SequenceProduct, Token
from policygrad.lab.finding import Finding, percent, verdict
from policygrad.lab.findings.baselines import EXACT, centred, measured
from policygrad.lab.policies import Experts
from policygrad.lab.rewards import random_subsets
from policygrad.lab.sequences import Tree, World, moved
from policygrad.lab.setting import Setting
from policygrad.lab.worlds import one_prompt

RATIOS: dict[str, Ratio] = {"token": Token(), "sequence": Sequence(), "product": SequenceProduct()}
PER_TOKEN_KL = 0.02
"""Nats a sampled token between π_old and π_θ."""
EXPERTS_KL = 0.02
"""Nats a completion between the two mixtures of experts, the routing replayed."""


def off_policy(setting: Setting, kl: float, seed: int) -> Setting:
    """The same, sampled by a policy from which π_θ has moved by `kl` nats a completion."""
    return replace(setting, old=setting.theta, theta=moved(setting.world, setting.theta, kl, seed=seed + 1))


def spread(setting: Setting, ratio: Ratio) -> float:
    """Standard deviation of w = r over the tokens that π_old samples."""
    world = setting.world
    change = world.token_logp(setting.theta) - world.token_logp(setting.behaviour)
    r = ratio(change, world.mask)
    weight = torch.where(world.mask, world.logp(setting.behaviour).exp().flatten()[:, None], 0)
    weight = weight / weight.sum()
    return math.sqrt(float((weight * (r - (weight * r).sum()) ** 2).sum()))


def ratio_over_length(seed: int = 0) -> Finding:
    """The spread of the weights, and the variance and bias of R − J times them, over the length of answers, in random worlds."""
    lengths, worlds = (2, 4, 6), 6
    width = {name: torch.zeros(worlds, len(lengths)).double() for name in RATIOS}
    variance, bias = ({name: torch.zeros(worlds, len(lengths)).double() for name in RATIOS} for _ in range(2))
    for w in range(worlds):
        for i, n in enumerate(lengths):
            setting = off_policy(near := one_prompt(n, seed=seed * 100 + w), _distance(near), seed * 100 + w)
            for name, ratio in RATIOS.items():
                found = measured(replace(centred(RunningMean()), ratio=ratio, gate=Importance()), setting, 1)
                width[name][w, i], variance[name][w, i], bias[name][w, i] = (
                    spread(setting, ratio),
                    found.variance,
                    found.bias,
                )
    change = variance["sequence"] / variance["token"] - 1
    mean, error = change.mean(0), change.std(0) / math.sqrt(worlds)
    narrower = bool((width["sequence"] < width["token"]).all())
    holds = narrower and bool((mean + 2 * error < 0).all())
    deltas = ", ".join(f"{100 * float(m):+.1f} % (± {100 * float(e):.1f})" for m, e in zip(mean, error, strict=True))
    return Finding(
        "ratio_over_length",
        "One ratio per sequence cuts variance against one per token.",
        holds,
        f"{PER_TOKEN_KL:g} nats a token away, at lengths up to 2, 4 and 6, the weights' standard deviation is "
        f"{_three(width['token'])} per token, {_three(width['sequence'])} for the sequence's mean and {_three(width['product'])} "
        f"for the product. In place of the token ratio the sequence ratio changes the gradient's variance by {deltas} over "
        f"{worlds} random worlds{verdict(holds, '', ': its weights vary less, its gradient does not at every length')}. Its bias "
        f"is {_three(bias['sequence'])} of ‖∇J‖, the token ratio's {_three(bias['token'])}.",
        {f"change_{n}": float(m) for n, m in zip(lengths, mean, strict=True)},
        error=float(error.max()),
        curves={
            "length": tuple(map(float, lengths)),
            **{f"spread_{name}": tuple(v.mean(0).tolist()) for name, v in width.items()},
            **{f"variance_{name}": tuple(v.mean(0).tolist()) for name, v in variance.items()},
            **{f"bias_{name}": tuple(v.mean(0).tolist()) for name, v in bias.items()},
        },
    )


def _distance(setting: Setting) -> float:
    """Nats a completion, `PER_TOKEN_KL` for each of the tokens that one has on average."""
    return PER_TOKEN_KL * float(setting.world.mean_length(setting.theta))


def _three(table: Tensor) -> str:
    return " / ".join(f"{x:.2f}" for x in table.mean(0).tolist())


def product_ratio(seed: int = 0) -> Finding:
    """Π_t r_t is the importance weight of a whole completion."""
    distances = (0.02, 0.1, 0.3)
    settings = [off_policy(one_prompt(5, seed=seed), kl, seed) for kl in distances]
    found = {
        name: [measured(replace(centred(RunningMean()), ratio=ratio, gate=Importance()), s, 1) for s in settings]
        for name, ratio in RATIOS.items()
    }
    bias = max(f.bias for f in found["product"])
    price = [p.variance / t.variance for p, t in zip(found["product"], found["token"], strict=True)]
    others = min(f.bias for name in ("token", "sequence") for f in found[name])
    holds = bias < EXACT < others
    return Finding(
        "product_ratio",
        "The product of the token ratios is the unbiased one, at a high variance.",
        holds,
        f"Its bias is {bias:.0e} {verdict(holds, 'and only its is', 'but that of others is too')} zero: at "
        f"{', '.join(f'{kl:g}' for kl in distances)} nats a completion the token ratio's is "
        f"{', '.join(f'{f.bias:.2f}' for f in found['token'])} and the sequence ratio's "
        f"{', '.join(f'{f.bias:.2f}' for f in found['sequence'])} of ‖∇J‖. The product's variance is "
        f"{', '.join(f'{x:.2f}' for x in price)} times the token ratio's.",
        {"bias": bias, **{f"price_{kl:g}": x for kl, x in zip(distances, price, strict=True)}},
        curves={
            "kl": distances,
            **{f"bias_{name}": tuple(f.bias for f in v) for name, v in found.items()},
            **{f"variance_{name}": tuple(f.variance for f in v) for name, v in found.items()},
        },
    )


GATES: dict[str, Gate] = {"clip": Clip(0.2, 0.2), "soft": SoftGate(), "cap": WeightCap(0.0, 5.0)}


def gates(seed: int = 0) -> Finding:
    """What of |r·Ψ| each gate keeps on the tokens that the clip drops: PPO's clip, SAPO's soft gate, CISPO's cap."""
    distances = (0.02, 0.1, 0.3, 1.0)
    base = one_prompt(4, seed=seed)
    settings = [off_policy(base, kl, seed) for kl in distances]
    kept = {name: [_kept(s, gate) for s in settings] for name, gate in GATES.items()}
    found = {
        name: [measured(replace(centred(RunningMean()), ratio=Token(), gate=gate), s, 1) for s in settings]
        for name, gate in GATES.items()
    }
    holds = all(c == 0 and c < s < k for c, s, k in zip(*kept.values(), strict=True))
    return Finding(
        "gates",
        "CISPO keeps gradient where clipping drops it; SAPO stands in between.",
        holds,
        f"On the tokens that clip 0.2 drops, {', '.join(f'{kl:g}' for kl in distances)} nats a completion away, the cap keeps "
        f"{', '.join(percent(x) for x in kept['cap'])} of the weight r, the soft gate {', '.join(percent(x) for x in kept['soft'])}"
        f" and the clip {percent(max(kept['clip']))}. {verdict(holds, '', 'The order is another one. ')}The cosine with ∇J is "
        f"{', '.join(f'{f.cosine:.3f}' for f in found['cap'])} capped, {', '.join(f'{f.cosine:.3f}' for f in found['soft'])} soft "
        f"and {', '.join(f'{f.cosine:.3f}' for f in found['clip'])} clipped.",
        {f"kept_{name}_{kl:g}": x for name, v in kept.items() for kl, x in zip(distances, v, strict=True)},
        curves={
            "kl": distances,
            **{f"kept_{name}": tuple(v) for name, v in kept.items()},
            **{f"cosine_{name}": tuple(f.cosine for f in v) for name, v in found.items()},
        },
    )


def _kept(setting: Setting, gate: Gate) -> float:
    """Σ|w Ψ| over Σ|r Ψ| on the tokens that Clip(0.2, 0.2) drops, Ψ = R − J."""
    world = setting.world
    r, psi, weight = _tokens(setting)
    batch = Batch(
        mask=world.mask, group=torch.arange(len(r)), reward=psi[:, 0], logp_old=world.token_logp(setting.behaviour)
    )
    below, above = Clip(0.2, 0.2).clipped(r, psi, batch)
    here = weight * psi.abs() * ((below | above) & world.mask)
    return float((here * gate.weight(r, psi, batch)).sum() / (here * r).sum())


def _tokens(setting: Setting) -> tuple[Tensor, Tensor, Tensor]:
    """(r, Ψ, probability) at every token of every completion [N, L]."""
    world, old = setting.world, setting.behaviour
    r = Token()(world.token_logp(setting.theta) - world.token_logp(old), world.mask)
    psi = (world.reward.flatten() - world.objective(old))[:, None].expand(r.shape)
    return r, psi, world.logp(old).exp().flatten()[:, None].expand(r.shape)


def experts(seed: int = 0) -> Finding:
    """A small move of θ flips the router's choice at some states: ratios jump there. With routing replay they do not.

    The distance is that of the replayed policies: with flips it cannot be chosen, since it jumps. Each move is seen twice,
    with and without flips, so that the differences are paired.
    """
    draws = 16
    tree = Tree(3, 5)
    policy = Experts(tree)
    theta = policy.initial(seed)
    world = World(tree, random_subsets(tree, policy, theta, (0.4,), seed), policy)
    replay = replace(world, policy=replace(policy, frozen=tuple(policy.routes(theta).tolist())))
    rows = []
    for draw in range(draws):
        new = moved(replay, theta, EXPERTS_KL, seed=seed * 1000 + draw)
        flipped = policy.routes(theta) != policy.routes(new)
        far = float(world.kl(theta, new))
        rows.append([*_jumps(world, theta, new, flipped), *_jumps(replay, theta, new, flipped)[:2], far])
    table = torch.tensor(rows, dtype=torch.float64)
    token, sequence, share, token_replay, sequence_replay, far = table.mean(0).tolist()
    growth = (table[:, 0] / table[:, 3]).log()
    milder = growth - (table[:, 1] / table[:, 4]).log()
    (jump, jump_error), (less, error) = ((float(x.mean()), float(x.std() / math.sqrt(draws))) for x in (growth, milder))
    holds = jump > 2 * jump_error and less > 2 * error and sequence < token
    return Finding(
        "experts",
        "In a mixture of experts flips of the routing make token ratios jump; sequence ratios bear it.",
        holds,
        f"Moves of {EXPERTS_KL:g} nats a completion flip the expert at {percent(share)} of the states visited, and are {far:.3f} "
        f"nats with the flips. The standard deviation of log r is {token:.3f} per token ({token_replay:.3f} with the routing "
        f"replayed) and {sequence:.3f} for the sequence's mean ({sequence_replay:.3f}). Flips multiply the token ratio's by "
        f"{math.exp(jump):.2f} (log {jump:.2f} ± {jump_error:.2f}) and the sequence ratio's by {math.exp(jump - less):.2f}: the "
        f"difference in the log is {less:+.2f} ± {error:.2f}, so the sequence ratio varies less, and its share of the jump "
        f"{verdict(holds, 'is smaller too', 'is not clearly smaller')}. That it “bears” flips rests on {math.exp(jump - less):.2f} "
        f"times against {math.exp(jump):.2f}: it jumps as well.",
        {
            "token": token,
            "sequence": sequence,
            "token_replay": token_replay,
            "sequence_replay": sequence_replay,
            "flips": share,
            "growth_token": jump,
            "growth_less": less,
        },
        error=error,
    )


def _jumps(world: World, old: Tensor, new: Tensor, flipped: Tensor) -> tuple[float, float, float]:
    """(std of log r over sampled tokens, std of its mean over completions, share of sampled tokens at flipped states)."""
    change = world.token_logp(new) - world.token_logp(old)
    p = world.logp(old).exp().flatten()
    weight = torch.where(world.mask, p[:, None], 0)
    mean = change.sum(1) / world.tree.lengths
    share = float((weight * flipped[world.state]).sum() / weight.sum())
    return _std(change, weight / weight.sum()), _std(mean, p), share


def _std(x: Tensor, weight: Tensor) -> float:
    return math.sqrt(float((weight * (x - (weight * x).sum()) ** 2).sum()))
