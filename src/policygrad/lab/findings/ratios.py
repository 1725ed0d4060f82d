"""Lever 2: ratios and gates off-policy. All exact."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from policygrad.core.advantages import RunningMean
from policygrad.core.base import Gate, Ratio
from policygrad.core.batch import Batch
from policygrad.core.gates import Clip, ClippedImportance, DualClip, Importance, OnPolicy, SigmoidGate
from policygrad.core.ratios import Sequence, SequenceProduct, Token
from policygrad.lab.findings.advantages import EXACT, exact_figures, with_advantage
from policygrad.lab.mdp import improvement_bound, natural_gradient, random_mdp, softmax, solve, surrogate_value
from policygrad.lab.measurement import Figures, Finding, choose_text, compute_figures, format_percent
from policygrad.lab.policies import Experts, sample_normal
from policygrad.lab.sequences import PrefixTree, World, derivative, perturb_policy, sample_right_answers
from policygrad.lab.setting import LabSetting
from policygrad.lab.worlds import one_prompt

RATIOS: dict[str, Ratio] = {"token": Token(), "sequence": Sequence(), "product": SequenceProduct()}
PER_TOKEN_KL = 0.02
"""Nats a sampled token between π_old and π_θ."""
EXPERTS_KL = 0.02
"""Nats a completion between the two mixtures of experts, the routing replayed."""


def move_off_policy(setting: LabSetting, kl: float, seed: int) -> LabSetting:
    """The same, sampled by a policy from which π_θ has moved by `kl` nats a completion."""
    return replace(setting, old=setting.theta, theta=perturb_policy(setting.world, setting.theta, kl, seed=seed + 1))


def ratio_std(setting: LabSetting, ratio: Ratio) -> float:
    """Standard deviation of w = r over the tokens that π_old samples."""
    world = setting.world
    change = world.token_logp(setting.theta) - world.token_logp(setting.sampling_theta)
    r = ratio(change, world.mask)
    weight = torch.where(world.mask, world.logp(setting.sampling_theta).exp().flatten()[:, None], 0)
    weight = weight / weight.sum()
    return math.sqrt(float((weight * (r - (weight * r).sum()) ** 2).sum()))


def ratio_over_length(seed: int = 0) -> Finding:
    """The spread of the weights, and the variance and bias of R − J times them, over the length of answers, in random worlds."""
    lengths, worlds = (2, 4, 6), 6
    width = {name: torch.zeros(worlds, len(lengths)).double() for name in RATIOS}
    variance, bias = ({name: torch.zeros(worlds, len(lengths)).double() for name in RATIOS} for _ in range(2))
    for w in range(worlds):
        for i, n in enumerate(lengths):
            setting = move_off_policy(near := one_prompt(n, seed=seed * 100 + w), _distance(near), seed * 100 + w)
            for name, ratio in RATIOS.items():
                found = exact_figures(
                    replace(with_advantage(RunningMean()), ratio=ratio, gate=Importance()), setting, 1
                )
                width[name][w, i], variance[name][w, i], bias[name][w, i] = (
                    ratio_std(setting, ratio),
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
        f"{worlds} random worlds{choose_text(holds, '', ': its weights vary less, its gradient does not at every length')}. Its bias "
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


def _distance(setting: LabSetting) -> float:
    """Nats a completion, `PER_TOKEN_KL` for each of the tokens that one has on average."""
    return PER_TOKEN_KL * float(setting.world.mean_length(setting.theta))


def _three(table: Tensor) -> str:
    return " / ".join(f"{x:.2f}" for x in table.mean(0).tolist())


def product_ratio(seed: int = 0) -> Finding:
    """Π_t r_t is the importance weight of a whole completion."""
    distances = (0.02, 0.1, 0.3)
    settings = [move_off_policy(one_prompt(5, seed=seed), kl, seed) for kl in distances]
    found = {
        name: [
            exact_figures(replace(with_advantage(RunningMean()), ratio=ratio, gate=Importance()), s, 1)
            for s in settings
        ]
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
        f"Its bias is {bias:.0e} {choose_text(holds, 'and only its is', 'but that of others is too')} zero: at "
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


GATES: dict[str, Gate] = {"clip": Clip(0.2, 0.2), "soft": SigmoidGate(), "cap": ClippedImportance(0.0, 5.0)}


def gates(seed: int = 0) -> Finding:
    """What of |r·Ψ| each gate keeps on the tokens that the clip drops: PPO's clip, SAPO's soft gate, CISPO's cap."""
    distances = (0.02, 0.1, 0.3, 1.0)
    base = one_prompt(4, seed=seed)
    settings = [move_off_policy(base, kl, seed) for kl in distances]
    kept = {name: [_kept(s, gate) for s in settings] for name, gate in GATES.items()}
    found = {
        name: [exact_figures(replace(with_advantage(RunningMean()), ratio=Token(), gate=gate), s, 1) for s in settings]
        for name, gate in GATES.items()
    }
    holds = all(c == 0 and c < s < k for c, s, k in zip(*kept.values(), strict=True))
    return Finding(
        "gates",
        "CISPO keeps gradient where clipping drops it; SAPO stands in between.",
        holds,
        f"On the tokens that clip 0.2 drops, {', '.join(f'{kl:g}' for kl in distances)} nats a completion away, the cap keeps "
        f"{', '.join(format_percent(x) for x in kept['cap'])} of the weight r, the soft gate {', '.join(format_percent(x) for x in kept['soft'])}"
        f" and the clip {format_percent(max(kept['clip']))}. {choose_text(holds, '', 'The order is another one. ')}The cosine with ∇J is "
        f"{', '.join(f'{f.cosine:.3f}' for f in found['cap'])} capped, {', '.join(f'{f.cosine:.3f}' for f in found['soft'])} soft "
        f"and {', '.join(f'{f.cosine:.3f}' for f in found['clip'])} clipped.",
        {f"kept_{name}_{kl:g}": x for name, v in kept.items() for kl, x in zip(distances, v, strict=True)},
        curves={
            "kl": distances,
            **{f"kept_{name}": tuple(v) for name, v in kept.items()},
            **{f"cosine_{name}": tuple(f.cosine for f in v) for name, v in found.items()},
        },
    )


def _kept(setting: LabSetting, gate: Gate) -> float:
    """Σ|w Ψ| over Σ|r Ψ| on the tokens that Clip(0.2, 0.2) drops, Ψ = R − J."""
    world = setting.world
    r, psi, weight = _tokens(setting)
    batch = Batch(
        mask=world.mask, group=torch.arange(len(r)), reward=psi[:, 0], logp_old=world.token_logp(setting.sampling_theta)
    )
    below, above = Clip(0.2, 0.2).clipped(r, psi, batch)
    here = weight * psi.abs() * ((below | above) & world.mask)
    return float((here * gate.weight(r, psi, batch)).sum() / (here * r).sum())


def _tokens(setting: LabSetting) -> tuple[Tensor, Tensor, Tensor]:
    """(r, Ψ, probability) at every token of every completion [N, L]."""
    world, old = setting.world, setting.sampling_theta
    r = Token()(world.token_logp(setting.theta) - world.token_logp(old), world.mask)
    psi = (world.reward.flatten() - world.objective(old))[:, None].expand(r.shape)
    return r, psi, world.logp(old).exp().flatten()[:, None].expand(r.shape)


def experts(seed: int = 0) -> Finding:
    """A small move of θ flips the router's choice at some states: ratios jump there. With routing replay they do not.

    The distance is that of the replayed policies: with flips it cannot be chosen, since it jumps. Each move is seen twice,
    with and without flips, so that the differences are paired.
    """
    draws = 16
    tree = PrefixTree(3, 5)
    policy = Experts(tree)
    theta = policy.initial(seed)
    world = World(tree, sample_right_answers(tree, policy, theta, (0.4,), seed), policy)
    replay = replace(world, policy=replace(policy, frozen=tuple(policy.routes(theta).tolist())))
    rows = []
    for draw in range(draws):
        new = perturb_policy(replay, theta, EXPERTS_KL, seed=seed * 1000 + draw)
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
        f"Moves of {EXPERTS_KL:g} nats a completion flip the expert at {format_percent(share)} of the states visited, and are {far:.3f} "
        f"nats with the flips. The standard deviation of log r is {token:.3f} per token ({token_replay:.3f} with the routing "
        f"replayed) and {sequence:.3f} for the sequence's mean ({sequence_replay:.3f}). Flips multiply the token ratio's by "
        f"{math.exp(jump):.2f} (log {jump:.2f} ± {jump_error:.2f}) and the sequence ratio's by {math.exp(jump - less):.2f}: the "
        f"difference in the log is {less:+.2f} ± {error:.2f}, so the sequence ratio varies less, and its share of the jump "
        f"{choose_text(holds, 'is smaller too', 'is not clearly smaller')}. That it “bears” flips rests on {math.exp(jump - less):.2f} "
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


# Ratios over long chains, where completions are too many to enumerate: sampled, against an exact ∇J.

LENGTHS = (8, 32, 128, 512)
CHAINS, WORLDS = 1024, 4
DISTANCES = (0.02, 0.2)
"""Nats a token between π_old and π_θ."""


@dataclass(frozen=True)
class Chain:
    """Every token is drawn by the token before it, and earns f(before, token)/√n: J and ∇J are exact at any length n."""

    earns: Tensor
    """[V + 1, V] f; row V is the start."""

    def policy(self, theta: Tensor) -> Tensor:
        """[V + 1, V] log π."""
        return theta.reshape(self.earns.shape).log_softmax(1)

    def visits(self, theta: Tensor, n: int) -> Tensor:
        """[V + 1] expected number of tokens drawn in each state."""
        p, (states, v) = self.policy(theta).exp(), self.earns.shape
        here = torch.zeros(states, dtype=torch.float64)
        here[v] = 1.0
        total = here
        for _ in range(n - 1):
            here = torch.cat([here @ p, torch.zeros(1, dtype=torch.float64)])
            total = total + here
        return total

    def objective(self, theta: Tensor, n: int) -> Tensor:
        """J."""
        value = self.visits(theta, n) @ (self.policy(theta).exp() * self.earns).sum(1)
        return value / math.sqrt(n)

    def distance(self, old: Tensor, new: Tensor, n: int) -> float:
        """KL(old‖new) in nats a token, of chains of n tokens that `old` draws."""
        p, q = self.policy(old), self.policy(new)
        return float(self.visits(old, n) @ (p.exp() * (p - q)).sum(1)) / n

    def draw(self, theta: Tensor, number: int, n: int, seed: int) -> tuple[Tensor, Tensor]:
        """(states, tokens) [number, n] each."""
        p, generator = self.policy(theta).exp(), torch.Generator().manual_seed(seed)
        state = torch.full((number,), self.earns.shape[1])
        states, tokens = [], []
        for _ in range(n):
            states.append(state)
            state = torch.multinomial(p[state], 1, generator=generator).squeeze(1)
            tokens.append(state)
        return torch.stack(states, 1), torch.stack(tokens, 1)


def _moved(chain: Chain, old: Tensor, kl: float, seed: int) -> Tensor:
    """θ in a random direction from `old`, `kl` nats a token away."""
    direction, low, high = sample_normal(len(old), 1.0, seed), 0.0, 8.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if chain.distance(old, old + middle * direction, 64) < kl else (low, middle)
    return old + low * direction


def _scores(chain: Chain, theta: Tensor, drawn: tuple[Tensor, Tensor], weight: Tensor) -> Tensor:
    """[N, P] Σ_t weight_t ∇log π_θ(token_t | state_t)."""
    (states, tokens), (rows, v) = drawn, chain.earns.shape
    taken = torch.zeros(len(states), rows * v, dtype=torch.float64).scatter_add_(1, states * v + tokens, weight)
    there = torch.zeros(len(states), rows, dtype=torch.float64).scatter_add_(1, states, weight)
    return taken - (there[:, :, None] * chain.policy(theta).exp()).flatten(1)


@dataclass(frozen=True)
class RatioFigures:
    """One ratio's estimator over chains of one length."""

    figures: Figures
    """Of r·(R − J)∇log π, summed over tokens."""
    spread: float
    """Standard deviation of r."""
    drift: float
    """The share of the variance that is Var R·‖E Σ_t r_t ∇log π_t‖²: 0 where the score keeps its mean of 0 under π_old."""


def _sampled(
    chain: Chain, old: Tensor, new: Tensor, drawn: tuple[Tensor, Tensor], ratios: list[Ratio]
) -> list[RatioFigures]:
    states, tokens = drawn
    n = states.shape[1]
    change = (chain.policy(new) - chain.policy(old))[states, tokens]
    psi = chain.earns[states, tokens].sum(1) / math.sqrt(n) - float(chain.objective(old, n))
    truth = derivative(lambda theta: chain.objective(theta, n), new)
    even = torch.full((len(states),), 1 / len(states), dtype=torch.float64)
    found = []
    for ratio in ratios:
        r = ratio(change, torch.ones_like(change, dtype=torch.bool))
        score = _scores(chain, new, drawn, r)
        measured = compute_figures(score * psi[:, None], even, truth, exact=False)
        drift = float(psi.var() * score.mean(0).square().sum()) / (measured.variance * float(truth @ truth))
        found.append(RatioFigures(measured, float(r.std()), drift))
    return found


def long_chains(seed: int = 0) -> Finding:
    """The variance and the bias of both ratios on chains up to 512 tokens, in random worlds.

    Under π_old the score Σ_t ∇log π_θ has no longer the mean 0: it is −Σ_t ∇KL(π_old‖π_θ), and grows with the length. Token
    ratios take it back to 0 state by state, E_old[r ∇log π_θ] = 0; a factor per sequence cannot. Source of the claim: Zheng et
    al. 2025 (GSPO), sec. 3.
    """
    ratios: dict[str, Ratio] = {"token": Token(), "sequence": Sequence()}
    table = torch.zeros(4, len(ratios), len(DISTANCES), len(LENGTHS), WORLDS).double()
    for w in range(WORLDS):
        own = seed * 1000 + w * 10
        chain, old = Chain(sample_normal(20, 1.0, own).reshape(5, 4)), sample_normal(20, 0.7, own + 1)
        states, tokens = chain.draw(old, CHAINS, LENGTHS[-1], own + 2)
        for d, kl in enumerate(DISTANCES):
            new = _moved(chain, old, kl, own + 3)
            for i, n in enumerate(LENGTHS):
                for k, x in enumerate(_sampled(chain, old, new, (states[:, :n], tokens[:, :n]), [*ratios.values()])):
                    table[:, k, d, i, w] = torch.tensor([x.figures.variance, x.figures.bias, x.spread, x.drift])
    variance, bias, width, drift = (dict(zip(ratios, part, strict=True)) for part in table)
    change = variance["sequence"] / variance["token"]
    mean, error = change.mean(2), change.std(2) / math.sqrt(WORLDS)
    holds = bool((mean + 2 * error < 1).all())
    last = LENGTHS[-1]
    return Finding(
        "long_chains",
        "Over long answers one ratio per sequence cuts variance against one per token.",
        holds,
        f"On chains of {_list(LENGTHS)} tokens ({CHAINS} sampled in each of {WORLDS} random worlds) the sequence ratio's variance "
        "is "
        + "; ".join(_said(kl, mean[d], error[d]) for d, kl in enumerate(DISTANCES))
        + f": {choose_text(holds, 'less at every length', 'no cut that grows with the length')}. Its weights do vary less, "
        f"{_pair(width['sequence'][:, -1])} against {_pair(width['token'][:, -1])} at {last} tokens, but they let the score drift: "
        f"{_percents(drift['sequence'][:, -1])} of its variance is Var R times the squared mean of Σ∇log π under π_old, which "
        f"token ratios keep near 0 ({_percents(drift['token'][:, -1])}). Its bias is {_pair(bias['sequence'][:, -1])} of ‖∇J‖ "
        f"there, the token ratio's {_pair(bias['token'][:, -1])}.",
        {f"times_{kl:g}_{n}": float(mean[d, i]) for d, kl in enumerate(DISTANCES) for i, n in enumerate(LENGTHS)}
        | {f"drift_{name}": float(drift[name][0, -1].mean()) for name in ratios},
        error=float(error.max()),
        curves={
            "length": tuple(map(float, LENGTHS)),
            **{f"spread_{name}": tuple(v[0].mean(1).tolist()) for name, v in width.items()},
            **{f"variance_{name}": tuple(v[0].mean(1).tolist()) for name, v in variance.items()},
            **{f"bias_{name}": tuple(v[0].mean(1).tolist()) for name, v in bias.items()},
        },
    )


def _said(kl: float, mean: Tensor, error: Tensor) -> str:
    times = ", ".join(f"{float(m):.2f} (± {float(e):.2f})" for m, e in zip(mean, error, strict=True))
    return f"{times} times the token ratio's {kl:g} nats a token away"


def _percents(table: Tensor) -> str:
    return " and ".join(format_percent(x) for x in table.mean(1).tolist())


def _list(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers[:-1])) + f" and {numbers[-1]}"


def _pair(table: Tensor) -> str:
    return " and ".join(f"{x:.2f}" for x in table.mean(1).tolist())


# Pictures of what is written in the code: each gate's weight over the ratio, the trust region's bound over the step.

SHAPE_GATES: dict[str, Gate] = {
    "OnPolicy": OnPolicy(),
    "Importance": Importance(),
    "Clip(0.2, 0.2)": Clip(0.2, 0.2),
    "Clip(0.2, 0.28)": Clip(0.2, 0.28),
    "DualClip(c=3)": DualClip(),
    "SigmoidGate": SigmoidGate(),
    "ClippedImportance(0, 5)": ClippedImportance(),
}
"""Those of the matrix, and DualClip. GSPO's clip has the same shape, on a ratio of the whole sequence, 3e-4 wide."""
FAR = 2.0


def gate_curve(gate: Gate, ratios: tuple[float, ...], sign: int) -> tuple[float, ...]:
    """w(r) for Ψ = ±1."""
    r = torch.tensor(ratios, dtype=torch.float64)[:, None]
    return tuple(gate.weight(r, torch.full_like(r, float(sign)), make_token_batch(r)).flatten().tolist())


def make_token_batch(ratio: Tensor) -> Batch:
    """As many completions of one token as there are ratios [n, 1]; π_old gave each e^{-3}, so that r may reach 20, and a
    gate that chooses among tokens has chosen none."""
    n = len(ratio)
    return Batch(
        mask=torch.ones(n, 1, dtype=torch.bool),
        group=torch.arange(n),
        reward=torch.zeros(n, dtype=ratio.dtype),
        logp_old=torch.full_like(ratio, -3.0),
        selected=torch.zeros(n, 1, dtype=torch.bool),
        demonstration=torch.zeros(n, dtype=torch.bool),
    )


def gate_weights(seed: int = 0) -> Finding:
    """w(r, sign Ψ) of every gate, r from 0 to 6."""
    ratios = tuple(i / 50 for i in range(301))
    curves = {
        f"{name} {'up' if sign > 0 else 'down'}": gate_curve(gate, ratios, sign)
        for sign in (1, -1)
        for name, gate in SHAPE_GATES.items()
    }
    off = max(abs(gate_curve(gate, (1.0,), sign)[0] - 1) for gate in SHAPE_GATES.values() for sign in (1, -1))
    far = {name: gate_curve(gate, (FAR,), 1)[0] for name, gate in SHAPE_GATES.items()}
    return Finding(
        "gate_weights",
        "Every gate weighs 1 at r = 1; they differ in what they let through away from it.",
        off < 1e-12,
        f"They do, {choose_text(off == 0, 'exactly', f'to {off:.0e}')}. A token of a good answer that is already twice "
        f"as likely (r = {FAR:g}, Ψ > 0) weighs {far['Clip(0.2, 0.28)']:.0f} under the clip, {far['SigmoidGate']:.2f} under SAPO's "
        f"soft gate, {far['ClippedImportance(0, 5)']:.0f} under CISPO's cap and in the plain importance ratio, {far['OnPolicy']:.0f} "
        f"with none. Far tokens of bad answers keep their weight under the clip, up to r = 3 under the dual clip.",
        {f"at_{FAR:g} {name}": x for name, x in far.items()},
        curves={"ratio": ratios, **curves},
    )


def bound_over_step(seed: int = 0) -> Finding:
    """J(π), the surrogate L(π) and both lower bounds along the natural gradient of one random MDP, over the step's length.

    Source: Schulman et al. 2015, theorem 1 and eq. 9.
    """
    mdp = random_mdp(4, 3, 0.5, seed=seed)
    theta = torch.randn(mdp.reward.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    direction, old = natural_gradient(mdp, theta), softmax(theta)
    direction = direction / direction.norm()
    lengths = tuple(i / 80 for i in range(121))
    rows = []
    for length in lengths:
        new = softmax(theta + length * direction)
        level = float(surrogate_value(mdp, old, new))
        rows.append((float(solve(mdp, new).objective), level, *improvement_bound(mdp, old, new)))
    start = rows[0][0]
    true, surrogate, by_kl, by_tv = (tuple(row[i] - start for row in rows) for i in range(4))
    promised, reached = max(by_tv), max(true)
    safe, longest = lengths[by_tv.index(promised)], lengths[true.index(reached)]
    holds = all(kl <= tv + 1e-10 and tv <= j + 1e-10 for kl, tv, j in zip(by_kl, by_tv, true, strict=True))
    return Finding(
        "bound_over_step",
        "TRPO's bound touches J at the old policy and stays below: raising it raises J, in far shorter steps than would do.",
        holds,
        f"Along the natural gradient of a random MDP (γ = 0.5) the bound is {choose_text(holds, 'never', 'somewhere')} above J. Its "
        f"maximum promises {promised:.3f} at a step of {safe:.2f} in the logits (total variation; the KL form {max(by_kl):.3f}); "
        f"J gains {true[lengths.index(safe)]:.3f} there, and {reached:.3f} at a step of {longest:g}"
        f"{choose_text(longest == lengths[-1], ', the longest tried', '')}.",
        {"promised": promised, "promised_kl": max(by_kl), "safe": safe, "reached": reached, "best": longest},
        curves={"step": lengths, "J": true, "surrogate": surrogate, "bound_kl": by_kl, "bound_tv": by_tv},
    )
