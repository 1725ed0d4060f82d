"""Literal transcriptions of TRPO's vine: the self-normalised surrogate of each state, averaged over states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

import policygrad as pg
from doubles.transcriptions.objectives import Completion, Prompts, sg, zero


def trpo_vine(prompts: Prompts, width: int) -> Tensor:
    """1/N Σ_n Σ_k (π_θ/q)(Q_k − b) / Σ_k π_θ/q, eq. 66: a group is a state, its tokens the actions, q = π_old/ŵ.

    The paper has no b, which changes no gradient and takes a constant off the value: Σ ŵQ/Σ ŵ.
    """
    J = zero(prompts)
    for outputs in prompts:
        actions = [(o, t) for o in outputs for t in range(len(o))]
        if len({float(o.reward) for o in outputs}) == 1:
            continue  # a constant, whose gradient is 0 but for rounding
        b = sum(o.weight[t] * o.reward for o, t in actions) / sum(o.weight[t] for o, t in actions)
        above = sum(over_q(o, t) * (o.reward - sg(b)) for o, t in actions)
        below = sum(over_q(o, t) for o, t in actions)
        share = sum(o.weight[t] for o, t in actions) / len(actions)
        J = J + sg(share) * above / below / len(prompts)
    return J


def over_q(o: Completion, t: int) -> Tensor:
    """π_θ/q."""
    return sg(o.weight[t]) * o.r(t)


def without_baseline(prompts: Prompts, width: int) -> Tensor:
    """The same as it is printed, for Ψ that is the reward."""
    J = zero(prompts)
    for outputs in prompts:
        above = sum(over_q(o, t) * o.reward for o in outputs for t in range(len(o)))
        below = sum(over_q(o, t) for o in outputs for t in range(len(o)))
        share = sum(o.weight[t] for o in outputs for t in range(len(o))) / sum(len(o) for o in outputs)
        J = J + sg(share) * above / below / len(prompts)
    return J


VINE = {"trpo_vine": trpo_vine}
VINE_PARTS: dict[str, tuple[pg.Algorithm, Callable[[Prompts, int], Tensor]]] = {
    "vine, weighted": (pg.TRPO_VINE, trpo_vine),
    "vine, first order": (replace(pg.TRPO_VINE, update_rule=pg.GradientSteps(epochs=2)), trpo_vine),
}
VINE_FIELDS = dict.fromkeys(VINE_PARTS, "weights")
