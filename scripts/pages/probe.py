"""What an algorithm does, asked of its parts: small batches go in, and the numbers that come out are put in words."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

import policygrad as pg
from policygrad.core.algorithm import Algorithm
from policygrad.core.batch import PER_COMPLETION, PER_TOKEN, Batch
from policygrad.lab.findings.ratios import make_token_batch

RATIOS = (0.5, 0.9, 1.0, 1.1, 1.5)
FAR = (0.25, 4.0)
"""Ratios that every gate's range excludes."""


def short_and_long(algorithm: Algorithm, short: int = 10, long: int = 20) -> Batch:
    """Two prompts, each with one short and one long completion; every field the algorithm reads holds random numbers."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    mask = torch.arange(long) < torch.tensor([[short], [long]] * 2)
    ends = torch.zeros_like(mask)
    ends[:, [3, short - 1, long - 1]] = True
    reads = algorithm.all_needs
    if any(link.samples_values for link in algorithm.advantage):
        reads |= {"values"}  # the rollout's, not a critic's
    fields = {name: random(4, long) for name in PER_TOKEN if name in reads and name not in ("mask", "step_end")}
    fields |= {name: random(4) for name in PER_COMPLETION if name in reads and name not in ("group", "reward")}
    fields |= {name: fields[name] > 0.5 for name in ("selected", "truncated", "demonstration") if name in fields}
    fields |= {
        name: (2 * fields[name]).long()
        for name in ("version", "turn_state", "example_id", "level", "levels")
        if name in fields
    }
    if "rewards" in reads:
        fields |= {"rewards": random(4, 2), "reward_names": ("a", "b"), "reward_weights": (1.0, 1.0)}
    if "step_end" in reads:
        fields |= {"step_end": ends & mask, "token_reward": torch.where(ends & mask, random(4, long), 0)}
    reward = torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    return pg.Batch(**{"mask": mask, "group": torch.tensor([0, 0, 1, 1]), "reward": reward, **fields})


def advantage_unit(algorithm: Algorithm) -> str:
    """Whether Ψ differs between the tokens of one completion."""
    batch = short_and_long(algorithm)
    psi = algorithm.with_max_tokens(batch.mask.shape[1]).compute_advantages(batch)
    spread = [float(row[keep].max() - row[keep].min()) for row, keep in zip(psi, batch.mask, strict=True)]
    return "token" if max(spread) > 1e-9 else "completion"


def ratio_unit(algorithm: Algorithm) -> str:
    """Which tokens' ratios move when one token's log-probability does."""
    if algorithm.ratio is None:
        return "none, r = 1"
    mask = torch.ones(1, 4, dtype=torch.bool)
    change = torch.tensor([[0.1, 0.0, 0.0, 0.0]], dtype=torch.float64)
    ratio = algorithm.ratio(change, mask)[0]
    if float(ratio[1]) == 1:
        return "token"
    mean = float(ratio[0].log()) < 0.1 - 1e-9
    return "completion, geometric mean" if mean else "completion, product"


def length_handling(algorithm: Algorithm) -> str:
    """What a token, and a completion, of twice the length weighs."""
    batch = short_and_long(algorithm)
    c = algorithm.with_max_tokens(batch.mask.shape[1]).coefficients(batch)
    token = float(c[1, 0] / c[0, 0])
    whole = float(c[1].sum() / c[0].sum())
    return f"twice as long: a token × {token:g}, the completion × {whole:g}"


def gate_weights(algorithm: Algorithm, psi: float, ratios: tuple[float, ...] = RATIOS) -> list[float]:
    """w at each ratio, for Ψ = `psi`; where a gate looks at whole groups, of a token among four whose others have not moved."""
    if algorithm.gate.requires_full_groups:
        return [_among_four(algorithm, psi, x) for x in ratios]
    r = torch.tensor(ratios, dtype=torch.float64)[:, None]
    return [float(w) for w in algorithm.gate.weight(r, torch.full_like(r, psi), make_token_batch(r))]


def _among_four(algorithm: Algorithm, psi: float, ratio: float) -> float:
    r = torch.tensor([ratio, 1.0, 1.0, 1.0], dtype=torch.float64)[:, None]
    state = replace(make_token_batch(r), group=torch.zeros(4, dtype=torch.int64))
    return float(algorithm.gate.weight(r, torch.full_like(r, psi), state)[0])


def outside(algorithm: Algorithm) -> str:
    """w once the ratio has gone far above 1 and far below, for both signs of Ψ; one phrase where they agree."""
    low, high = FAR
    sides = {}
    for sign, psi in (("Ψ>0", 1.0), ("Ψ<0", -1.0)):
        above, below = _kind(algorithm, psi, high), _kind(algorithm, psi, low)
        sides[sign] = f"w = {above}" if above == below else f"w = {above} above, {below} below"
    same = len(set(sides.values())) == 1
    return sides["Ψ>0"].replace("= →", "→") if same else "; ".join(f"{sign}: {text}" for sign, text in sides.items())


def _kind(algorithm: Algorithm, psi: float, r: float) -> str:
    far, farther = (gate_weights(algorithm, psi, (x,))[0] for x in (r, r**4))
    if far == farther:
        return f"{far:g}"
    if abs(farther - r**4) < 1e-12 and abs(far - r) < 1e-12:
        return "r"
    return "→ 0" if farther < far else f"{farther:.3g}"


def kl_terms(algorithm: Algorithm) -> list[str]:
    """Where a KL stands in the algorithm, from its parts' formulas."""
    found = [f"in the reward: {p.formula}" for p in algorithm.shaping if "logp_ref" in p.needs]
    for term in algorithm.terms:
        needs = term.needs
        if needs & {"logp_ref", "logp_old"} or "kl_old" in term.forward_needs:
            found.append(f"in the loss: {term.formula}")
    delta = getattr(algorithm.update_rule, "delta", None)
    if delta is None:
        return found
    checked = getattr(algorithm.update_rule, "line_search", True)
    return [
        *found,
        f"KL(π_old‖π_θ) ≤ {delta:g}, a constraint" if checked else f"step length for a KL of {delta:g}, unchecked",
    ]
