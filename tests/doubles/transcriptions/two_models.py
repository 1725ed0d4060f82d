"""Literal transcriptions of the rows that learn from a second model: a teacher, or a reward model that learns beside the policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

import policygrad as pg
from doubles.transcriptions.objectives import Prompts, clip, count_tokens, sg, without_no_spread, zero


def distill(prompts: Prompts, width: int, discount: float = 0.0, coefficient: float = 1.0) -> Tensor:
    """Σ r·Â over the tokens, divided by their number; Â_t = −Σ_{s≥t} discount^{s−t}·(log π_old − log π_T)_s."""
    J = zero(prompts)
    for o in (o for outputs in prompts for o in outputs):
        reverse_kl = [sg(o.old[t]) - o.ref[t] for t in range(len(o))]
        for t in range(len(o)):
            A = -coefficient * sum(discount ** (s - t) * reverse_kl[s] for s in range(t, len(o)))
            J = J + o.r(t) * A
    return J / max(1, count_tokens(prompts))


def prime(prompts: Prompts, width: int, gamma: float = 1.0) -> Tensor:
    """PRIME, eq. 5 and 6, on the prompts that its filter keeps; a prompt's only answer has nothing to be compared with."""
    prompts = without_no_spread(prompts)
    J = zero(prompts)
    for outputs in prompts:
        K = len(outputs)
        for o in outputs:
            others = [p for p in outputs if p is not o]
            outcome = o.reward - sum(p.reward for p in others) / (K - 1)
            average = sum(sum(p.implicit) / len(p) for p in others) / (K - 1)
            for t in range(len(o)):
                process = sum(gamma ** (s - t) * (o.implicit[s] - average) for s in range(t, len(o)))
                A = process + outcome
                J = J + torch.minimum(o.r(t) * A, clip(o.r(t), 0.8, 1.2) * A)
    return J / max(1, count_tokens(prompts))


PARTS: dict[str, tuple[pg.Algorithm, Callable[[Prompts, int], Tensor]]] = {
    "distill, discounted": (
        replace(pg.DISTILL, advantage=(pg.TeacherLogRatio(0.7, 0.9),)),
        lambda p, w: distill(p, w, 0.9, 0.7),
    ),
    "distill, whole completions": (
        replace(pg.DISTILL, advantage=(pg.TeacherLogRatio(discount=1.0),)),
        lambda p, w: distill(p, w, 1.0),
    ),
    "prime, discounted": (
        replace(pg.PRIME, advantage=(pg.LeaveOneOut(), pg.ImplicitProcess(0.6))),
        lambda p, w: prime(p, w, 0.6),
    ),
}
ROWS = {"distill": distill, "prime": prime}
