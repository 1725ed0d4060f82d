"""Ratios and gates off-policy, and the shapes of gates. Exact unless an error is given."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from policygrad.core.advantages import RunningMean
from policygrad.core.base import Gate, Ratio
from policygrad.core.batch import Batch
from policygrad.core.gates import Clip, ClippedImportance, Importance, OnPolicy, SigmoidGate
from policygrad.core.ratios import Sequence, SequenceProduct, Token
from policygrad.lab.findings.advantages import EXACT, exact_figures, with_advantage
from policygrad.lab.measurement import Figures, MeasuredClaim, compute_figures, format_percent, join_numbers
from policygrad.lab.policies import Experts
from policygrad.lab.sequences import PrefixTree, World, derivative, perturb_policy, sample_normal, sample_right_answers
from policygrad.lab.setting import LabSetting
from policygrad.lab.worlds import one_prompt

RATIOS: dict[str, Ratio] = {"token": Token(), "sequence": Sequence(), "product": SequenceProduct()}
PER_TOKEN_KL = 0.02  # nats per sampled token between π_old and π_θ
EXPERTS_KL = 0.02  # nats per completion between the two mixtures of experts, with replayed routing


def move_off_policy(setting: LabSetting, kl: float, seed: int) -> LabSetting:
    """Return the setting with π_θ moved away from the sampling policy by `kl` nats per completion."""
    return replace(setting, old=setting.theta, theta=perturb_policy(setting.world, setting.theta, kl, seed=seed + 1))


def _weighted_std(x: Tensor, weight: Tensor) -> float:
    return math.sqrt(float((weight * (x - (weight * x).sum()) ** 2).sum()))


def ratio_over_length(seed: int = 0) -> MeasuredClaim:
    """The spread of the weights, and the variance and bias of R − J times them, over the length of answers, in random worlds."""
    lengths, worlds = (2, 4, 6), 6
    width, variance, bias = ({name: torch.zeros(worlds, len(lengths)).double() for name in RATIOS} for _ in range(3))
    for w in range(worlds):
        world_seed = seed * 100 + w
        for i, n in enumerate(lengths):
            near = one_prompt(n, seed=world_seed)
            distance = PER_TOKEN_KL * float(near.world.mean_length(near.theta))
            setting = move_off_policy(near, distance, world_seed)
            world, weight = setting.world, setting.world.token_weight(setting.sampling_theta)
            log_ratio = world.token_logp(setting.theta) - world.token_logp(setting.sampling_theta)
            for name, ratio in RATIOS.items():
                width[name][w, i] = _weighted_std(ratio(log_ratio, world.mask), weight / weight.sum())
                f = exact_figures(with_advantage(RunningMean(), ratio=ratio, gate=Importance()), setting, 1)
                variance[name][w, i], bias[name][w, i] = f.variance, f.bias
    change = variance["sequence"] / variance["token"] - 1
    mean, error = change.mean(0), change.std(0) / math.sqrt(worlds)
    narrower = bool((width["sequence"] < width["token"]).all())
    holds = narrower and bool((mean + 2 * error < 0).all())
    deltas = ", ".join(f"{100 * float(m):+.1f} % (± {100 * float(e):.1f})" for m, e in zip(mean, error, strict=True))

    def means(table: Tensor) -> str:
        return join_numbers(table.mean(0).tolist(), ".2f", " / ")

    return MeasuredClaim(
        "ratio_over_length",
        "One ratio per sequence cuts variance against one per token.",
        holds,
        f"{PER_TOKEN_KL:g} nats per token away, at lengths up to 2, 4 and 6, the weights' standard deviation is "
        f"{means(width['token'])} per token, {means(width['sequence'])} for the sequence's mean and {means(width['product'])} "
        f"for the product. In place of the token ratio the sequence ratio changes the gradient's variance by {deltas} over "
        f"{worlds} random worlds{'' if holds else ': its weights vary less, its gradient does not at every length'}. "
        f"Its bias is {means(bias['sequence'])} of ‖∇J‖, the token ratio's {means(bias['token'])}.",
        {f"change_{n}": float(m) for n, m in zip(lengths, mean, strict=True)},
        error=float(error.max()),
        curves={
            "length": tuple(map(float, lengths)),
            **{
                f"{kind}_{name}": tuple(table.mean(0).tolist())
                for kind, tables in (("spread", width), ("variance", variance), ("bias", bias))
                for name, table in tables.items()
            },
        },
    )


def product_ratio(seed: int = 0) -> MeasuredClaim:
    """Π_t r_t is the importance weight of a whole completion."""
    distances = (0.02, 0.1, 0.3)
    settings = [move_off_policy(one_prompt(5, seed=seed), kl, seed) for kl in distances]
    figures: dict[str, list[Figures]] = {}
    for name, ratio in RATIOS.items():
        algorithm = with_advantage(RunningMean(), ratio=ratio, gate=Importance())
        figures[name] = [exact_figures(algorithm, setting, 1) for setting in settings]
    bias = max(f.bias for f in figures["product"])
    price = [p.variance / t.variance for p, t in zip(figures["product"], figures["token"], strict=True)]
    other_bias = min(f.bias for name in ("token", "sequence") for f in figures[name])
    holds = bias < EXACT < other_bias
    return MeasuredClaim(
        "product_ratio",
        "The product of the token ratios is the unbiased one, at a high variance.",
        holds,
        f"Its bias {'alone is zero' if holds else 'is zero, but not its alone'} ({bias:.0e}): at {join_numbers(distances, 'g')} "
        f"nats per completion the token ratio's is {join_numbers(f.bias for f in figures['token'])} and the sequence ratio's "
        f"{join_numbers(f.bias for f in figures['sequence'])} of ‖∇J‖. The product's variance is {join_numbers(price)} times the "
        "token ratio's.",
        {"bias": bias, **{f"price_{kl:g}": x for kl, x in zip(distances, price, strict=True)}},
        curves={
            "kl": distances,
            **{f"bias_{name}": tuple(f.bias for f in v) for name, v in figures.items()},
            **{f"variance_{name}": tuple(f.variance for f in v) for name, v in figures.items()},
        },
    )


GATES: dict[str, Gate] = {"clip": Clip(0.2, 0.2), "soft": SigmoidGate(), "cap": ClippedImportance(0.0, 5.0)}


def gates(seed: int = 0) -> MeasuredClaim:
    """Σ|w Ψ| over Σ|r Ψ| on the tokens that Clip(0.2, 0.2) drops, Ψ = R − J: PPO's clip, SAPO's soft gate, CISPO's cap."""
    distances = (0.02, 0.1, 0.3, 1.0)
    base = one_prompt(4, seed=seed)
    settings = [move_off_policy(base, kl, seed) for kl in distances]
    shares, cosine = ({name: list[float]() for name in GATES} for _ in range(2))
    for setting in settings:
        world, old = setting.world, setting.sampling_theta
        r = Token()(world.token_logp(setting.theta) - world.token_logp(old), world.mask)
        psi = (world.reward.flatten() - world.objective(old))[:, None].expand(r.shape)
        batch = Batch(mask=world.mask, group=torch.arange(len(r)), reward=psi[:, 0], logp_old=world.token_logp(old))
        below, above = Clip(0.2, 0.2).clipped(r, psi, batch)
        weight = world.token_weight(old) * psi.abs() * (below | above)
        for name, gate in GATES.items():
            shares[name].append(float((weight * gate.weight(r, psi, batch)).sum() / (weight * r).sum()))
            algorithm = with_advantage(RunningMean(), ratio=Token(), gate=gate)
            cosine[name].append(exact_figures(algorithm, setting, 1).cosine)
    holds = all(clip == 0 and clip < soft < cap for clip, soft, cap in zip(*shares.values(), strict=True))

    def percents(name: str) -> str:
        return ", ".join(map(format_percent, shares[name]))

    return MeasuredClaim(
        "gates",
        "CISPO keeps gradient where clipping drops it; SAPO stands in between.",
        holds,
        f"On the tokens that clip 0.2 drops, {join_numbers(distances, 'g')} nats per completion away, the cap keeps "
        f"{percents('cap')} of the weight r, the soft gate {percents('soft')} and the clip {format_percent(max(shares['clip']))}. "
        f"{'' if holds else 'The order differs. '}The cosine with ∇J is {join_numbers(cosine['cap'], '.3f')} capped, "
        f"{join_numbers(cosine['soft'], '.3f')} soft and {join_numbers(cosine['clip'], '.3f')} clipped.",
        {f"kept_{name}_{kl:g}": x for name, v in shares.items() for kl, x in zip(distances, v, strict=True)},
        curves={
            "kl": distances,
            **{f"kept_{name}": tuple(v) for name, v in shares.items()},
            **{f"cosine_{name}": tuple(v) for name, v in cosine.items()},
        },
    )


def experts(seed: int = 0) -> MeasuredClaim:
    """A small move of θ flips the router's choice at some states: ratios jump there. With routing replay they do not.

    The distance is that of the replayed policies, because with flips it jumps and cannot be chosen. Each move is measured with
    and without flips, so that the differences are paired.
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
        weight = world.token_weight(theta)
        weight = weight / weight.sum()
        stds = []  # of log r over tokens, and of its mean over completions, with flips and without
        for moved in (world, replay):
            change = moved.token_logp(new) - moved.token_logp(theta)
            chance = moved.logp(theta).exp().flatten()
            stds += [_weighted_std(change, weight), _weighted_std(change.sum(1) / tree.lengths, chance)]
        rows.append([*stds, float((weight * flipped[world.state]).sum()), float(world.kl(theta, new))])
    table = torch.tensor(rows, dtype=torch.float64)
    token, sequence, token_replay, sequence_replay, share, far = table.mean(0).tolist()
    growth = (table[:, 0] / table[:, 2]).log()
    milder = growth - (table[:, 1] / table[:, 3]).log()
    (jump, jump_error), (less, error) = ((float(x.mean()), float(x.std() / math.sqrt(draws))) for x in (growth, milder))
    holds = jump > 2 * jump_error and less > 2 * error and sequence < token
    return MeasuredClaim(
        "experts",
        "In a mixture of experts flips of the routing make token ratios jump; sequence ratios bear it.",
        holds,
        f"Moves of {EXPERTS_KL:g} nats per completion flip the expert at {format_percent(share)} of the states visited, and are "
        f"{far:.3f} nats with the flips. The standard deviation of log r is {token:.3f} per token ({token_replay:.3f} with the "
        f"routing replayed) and {sequence:.3f} for the sequence's mean ({sequence_replay:.3f}). Flips multiply the token "
        f"ratio's by {math.exp(jump):.2f} (log {jump:.2f} ± {jump_error:.2f}) and the sequence ratio's by "
        f"{math.exp(jump - less):.2f}: the difference in the log is {less:+.2f} ± {error:.2f}, so the sequence ratio varies "
        f"less, and its share of the jump {'is smaller too' if holds else 'is not clearly smaller'}. That it “bears” "
        f"flips rests on {math.exp(jump - less):.2f} times against {math.exp(jump):.2f}: it jumps as well.",
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


# Ratios over long chains with too many completions to enumerate: sampled, against an exact ∇J.

LENGTHS = (8, 32, 128, 512)
CHAINS, WORLDS = 1024, 4
DISTANCES = (0.02, 0.2)  # nats per token between π_old and π_θ


@dataclass(frozen=True)
class Chain:
    """Each token depends on the one before and earns f(before, token)/√n, so J and ∇J are exact at any length n."""

    earns: Tensor  # [V + 1, V] f; row V is the start

    def policy(self, theta: Tensor) -> Tensor:
        """[V + 1, V] log π."""
        return theta.reshape(self.earns.shape).log_softmax(1)

    def visits(self, theta: Tensor, n: int) -> Tensor:
        """[V + 1] expected number of tokens sampled in each state."""
        p, (states, v) = self.policy(theta).exp(), self.earns.shape
        state = torch.zeros(states, dtype=torch.float64)
        state[v] = 1.0
        total = state
        for _ in range(n - 1):
            state = torch.cat([state @ p, torch.zeros(1, dtype=torch.float64)])
            total = total + state
        return total

    def objective(self, theta: Tensor, n: int) -> Tensor:
        """J."""
        value = self.visits(theta, n) @ (self.policy(theta).exp() * self.earns).sum(1)
        return value / math.sqrt(n)

    def distance(self, old: Tensor, new: Tensor, n: int) -> float:
        """KL(old‖new) in nats per token, for chains of n tokens sampled from `old`."""
        p, q = self.policy(old), self.policy(new)
        return float(self.visits(old, n) @ (p.exp() * (p - q)).sum(1)) / n

    def draw(self, theta: Tensor, number: int, n: int, seed: int) -> tuple[Tensor, Tensor]:
        """Sample (states, tokens), [number, n] each."""
        p, generator = self.policy(theta).exp(), torch.Generator().manual_seed(seed)
        state = torch.full((number,), self.earns.shape[1])
        states, tokens = [], []
        for _ in range(n):
            states.append(state)
            state = torch.multinomial(p[state], 1, generator=generator).squeeze(1)
            tokens.append(state)
        return torch.stack(states, 1), torch.stack(tokens, 1)

    def perturb(self, old: Tensor, kl: float, seed: int) -> Tensor:
        """Return θ in a random direction from `old`, `kl` nats per token away."""
        direction, low, high = sample_normal(len(old), 1.0, seed), 0.0, 8.0
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if self.distance(old, old + middle * direction, 64) < kl else (low, middle)
        return old + low * direction

    def scores(self, theta: Tensor, states: Tensor, tokens: Tensor, weight: Tensor) -> Tensor:
        """[N, P] Σ_t weight_t ∇log π_θ(token_t | state_t)."""
        rows, v = self.earns.shape
        sampled = torch.zeros(len(states), rows * v, dtype=torch.float64)
        sampled.scatter_add_(1, states * v + tokens, weight)
        visited = torch.zeros(len(states), rows, dtype=torch.float64).scatter_add_(1, states, weight)
        return sampled - (visited[:, :, None] * self.policy(theta).exp()).flatten(1)


def long_chains(seed: int = 0) -> MeasuredClaim:
    """The variance and the bias of both ratios on chains up to 512 tokens, in random worlds.

    Under π_old the score Σ_t ∇log π_θ no longer has mean 0: its mean is −Σ_t ∇KL(π_old‖π_θ), which grows with the length. Token
    ratios restore 0 state by state, E_old[r ∇log π_θ] = 0; a factor per sequence cannot. Source of the claim: Zheng et al. 2025
    (GSPO), sec. 3.
    """
    ratios: dict[str, Ratio] = {"token": Token(), "sequence": Sequence()}
    uniform = torch.full((CHAINS,), 1 / CHAINS, dtype=torch.float64)
    table = torch.zeros(4, len(ratios), len(DISTANCES), len(LENGTHS), WORLDS).double()
    for w in range(WORLDS):
        world_seed = seed * 1000 + w * 10
        chain = Chain(sample_normal((5, 4), 1.0, world_seed))
        old = sample_normal(20, 0.7, world_seed + 1)
        states, tokens = chain.draw(old, CHAINS, LENGTHS[-1], world_seed + 2)
        for d, kl in enumerate(DISTANCES):
            new = chain.perturb(old, kl, world_seed + 3)
            for i, n in enumerate(LENGTHS):
                first = (states[:, :n], tokens[:, :n])
                log_ratio = (chain.policy(new) - chain.policy(old))[first]
                psi = chain.earns[first].sum(1) / math.sqrt(n) - float(chain.objective(old, n))
                truth = derivative(partial(chain.objective, n=n), new)
                for k, ratio in enumerate(ratios.values()):
                    r = ratio(log_ratio, torch.ones_like(log_ratio, dtype=torch.bool))
                    score = chain.scores(new, *first, r)
                    f = compute_figures(score * psi[:, None], uniform, truth, exact=False)
                    # the share of the variance that is Var R·‖E Σ_t r_t ∇log π_t‖²
                    drift = float(psi.var() * score.mean(0).square().sum()) / (f.variance * float(truth @ truth))
                    table[:, k, d, i, w] = torch.tensor([f.variance, f.bias, float(r.std()), drift])
    variance, bias, width, drifts = (dict(zip(ratios, part, strict=True)) for part in table)
    change = variance["sequence"] / variance["token"]
    mean, error = change.mean(2), change.std(2) / math.sqrt(WORLDS)
    holds = bool((mean + 2 * error < 1).all())

    def times(d: int) -> str:
        pairs = ", ".join(f"{float(m):.2f} (± {float(e):.2f})" for m, e in zip(mean[d], error[d], strict=True))
        return f"{pairs} times the token ratio's {DISTANCES[d]:g} nats per token away"

    def at_end(values: Tensor) -> str:
        return join_numbers(values[:, -1].mean(1).tolist(), ".2f", " and ")

    def percents(values: Tensor) -> str:
        return " and ".join(map(format_percent, values[:, -1].mean(1).tolist()))

    return MeasuredClaim(
        "long_chains",
        "Over long answers one ratio per sequence cuts variance against one per token.",
        holds,
        f"On chains of {', '.join(map(str, LENGTHS[:-1]))} and {LENGTHS[-1]} tokens ({CHAINS} sampled in each of {WORLDS} random "
        f"worlds) the sequence ratio's variance is {'; '.join(map(times, range(len(DISTANCES))))}: "
        f"{'less at every length' if holds else 'no cut that grows with the length'}. Its weights do vary less, "
        f"{at_end(width['sequence'])} against {at_end(width['token'])} at {LENGTHS[-1]} tokens, but they let the score drift: "
        f"{percents(drifts['sequence'])} of its variance is Var R times the squared mean of Σ∇log π under π_old, which "
        f"token ratios keep near 0 ({percents(drifts['token'])}). Its bias is {at_end(bias['sequence'])} of ‖∇J‖ there, the token "
        f"ratio's {at_end(bias['token'])}.",
        {f"times_{kl:g}_{n}": float(mean[d, i]) for d, kl in enumerate(DISTANCES) for i, n in enumerate(LENGTHS)}
        | {f"drift_{name}": float(drifts[name][0, -1].mean()) for name in ratios},
        error=float(error.max()),
        curves={
            "length": tuple(map(float, LENGTHS)),
            **{
                f"{kind}_{name}": tuple(values[0].mean(1).tolist())
                for kind, tables in (("spread", width), ("variance", variance), ("bias", bias))
                for name, values in tables.items()
            },
        },
    )


# A plot of the code itself: each gate's weight over the ratio.

SHAPE_GATES: dict[str, Gate] = {
    "OnPolicy": OnPolicy(),
    "Importance": Importance(),
    "Clip(0.2, 0.2)": Clip(0.2, 0.2),
    "Clip(0.2, 0.28)": Clip(0.2, 0.28),
    "Clip(c=3)": Clip(c=3.0),
    "SigmoidGate": SigmoidGate(),
    "ClippedImportance(0, 5)": ClippedImportance(),
}
"""The gates of the matrix, and the dual clip. GSPO's clip has the same shape, on a ratio of the complete sequence, 3e-4 wide."""
FAR = 2.0


def gate_curve(gate: Gate, ratios: tuple[float, ...], sign: int) -> tuple[float, ...]:
    """Return w(r) for Ψ = ±1."""
    r = torch.tensor(ratios, dtype=torch.float64)[:, None]
    return tuple(gate.weight(r, torch.full_like(r, float(sign)), make_token_batch(r)).flatten().tolist())


def make_token_batch(ratio: Tensor) -> Batch:
    """Return a batch with one completion of one token per ratio [n, 1].

    π_old gave each token e^{-3}, so r may reach 20; a gate that selects tokens has selected none.
    """
    n = len(ratio)
    return Batch(
        mask=torch.ones(n, 1, dtype=torch.bool),
        group=torch.arange(n),
        reward=torch.zeros(n, dtype=ratio.dtype),
        logp_old=torch.full_like(ratio, -3.0),
        selected=torch.zeros(n, 1, dtype=torch.bool),
        demonstration=torch.zeros(n, dtype=torch.bool),
    )


def gate_weights(seed: int = 0) -> MeasuredClaim:
    """w(r, sign Ψ) of every gate, r from 0 to 6."""
    ratios = tuple(i / 50 for i in range(301))
    curves = {
        f"{name} {'up' if sign > 0 else 'down'}": gate_curve(gate, ratios, sign)
        for sign in (1, -1)
        for name, gate in SHAPE_GATES.items()
    }
    off = max(abs(gate_curve(gate, (1.0,), sign)[0] - 1) for gate in SHAPE_GATES.values() for sign in (1, -1))
    far = {name: gate_curve(gate, (FAR,), 1)[0] for name, gate in SHAPE_GATES.items()}
    return MeasuredClaim(
        "gate_weights",
        "Every gate weighs 1 at r = 1; they differ in what they let through away from it.",
        off < 1e-12,
        f"They do, {'exactly' if off == 0 else f'to {off:.0e}'}. A token of a good answer that is already twice as likely (r = "
        f"{FAR:g}, Ψ > 0) weighs {far['Clip(0.2, 0.28)']:.0f} under the clip, {far['SigmoidGate']:.2f} under SAPO's soft gate, "
        f"{far['ClippedImportance(0, 5)']:.0f} under CISPO's cap and in the plain importance ratio, {far['OnPolicy']:.0f} with "
        "none. Far tokens of bad answers keep their weight under the clip, up to r = 3 under the dual clip.",
        {f"at_{FAR:g} {name}": x for name, x in far.items()},
        curves={"ratio": ratios, **curves},
    )
