"""Pictures of what is written in the code: each gate's weight over the ratio, the trust region's bound over the step."""

from __future__ import annotations

import torch
from torch import Tensor

from policygrad.core.batch import Batch
from policygrad.core.gates import Clip, DualClip, Importance, OnPolicy, SoftGate, WeightCap
from policygrad.core.protocols import Gate
from policygrad.lab.finding import Finding, verdict
from policygrad.lab.mdp import improvement_bound, natural_gradient, random_mdp, softmax, solve, surrogate_value

GATES: dict[str, Gate] = {
    "OnPolicy": OnPolicy(),
    "Importance": Importance(),
    "Clip(0.2, 0.2)": Clip(0.2, 0.2),
    "Clip(0.2, 0.28)": Clip(0.2, 0.28),
    "DualClip(c=3)": DualClip(),
    "SoftGate": SoftGate(),
    "WeightCap(0, 5)": WeightCap(),
}
"""Those of the matrix, and DualClip. GSPO's clip has the same shape, on a ratio of the whole sequence, 3e-4 wide."""
FAR = 2.0


def weights(gate: Gate, ratios: tuple[float, ...], sign: int) -> tuple[float, ...]:
    """w(r) for Ψ = ±1."""
    r = torch.tensor(ratios, dtype=torch.float64)[:, None]
    return tuple(gate.weight(r, torch.full_like(r, float(sign)), tokens_apart(r)).flatten().tolist())


def tokens_apart(ratio: Tensor) -> Batch:
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
        f"{name} {'up' if sign > 0 else 'down'}": weights(gate, ratios, sign)
        for sign in (1, -1)
        for name, gate in GATES.items()
    }
    off = max(abs(weights(gate, (1.0,), sign)[0] - 1) for gate in GATES.values() for sign in (1, -1))
    far = {name: weights(gate, (FAR,), 1)[0] for name, gate in GATES.items()}
    return Finding(
        "gate_weights",
        "Every gate weighs 1 at r = 1; they differ in what they let through away from it.",
        off < 1e-12,
        f"They do, {verdict(off == 0, 'exactly', f'to {off:.0e}')}. A token of a good answer that is already twice "
        f"as likely (r = {FAR:g}, Ψ > 0) weighs {far['Clip(0.2, 0.28)']:.0f} under the clip, {far['SoftGate']:.2f} under SAPO's "
        f"soft gate, {far['WeightCap(0, 5)']:.0f} under CISPO's cap and in the plain importance ratio, {far['OnPolicy']:.0f} "
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
        f"Along the natural gradient of a random MDP (γ = 0.5) the bound is {verdict(holds, 'never', 'somewhere')} above J. Its "
        f"maximum promises {promised:.3f} at a step of {safe:.2f} in the logits (total variation; the KL form {max(by_kl):.3f}); "
        f"J gains {true[lengths.index(safe)]:.3f} there, and {reached:.3f} at a step of {longest:g}"
        f"{verdict(longest == lengths[-1], ', the longest tried', '')}.",
        {"promised": promised, "promised_kl": max(by_kl), "safe": safe, "reached": reached, "best": longest},
        curves={"step": lengths, "J": true, "surrogate": surrogate, "bound_kl": by_kl, "bound_tv": by_tv},
    )
