"""The pictures of what a gate lets through, in the pages of algorithms; drawn by `policygrad.pages.charts`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise

from pages import tables as probe
from policygrad.algorithms import ALGORITHMS
from policygrad.core.algorithm import Algorithm
from policygrad.core.gates import (
    Clip,
    ClipCov,
    ClippedImportance,
    DivergenceClip,
    GeometricMean,
    PolicyShaping,
    SecondMomentFilter,
)
from policygrad.core.vine import SelfNormalised
from policygrad.pages.charts import chart

POINTS, GATE_WIDTH = 240, 560
JUMP = 20
"""A curve is broken where w moves by more than a twentieth of the axis from one point to the next."""
SIGNS = {"Ψ > 0": 1.0, "Ψ < 0": -1.0}
OF = {
    GeometricMean: "of an answer of one token, whose mean is its own",
    DivergenceClip: "of a token that π_old gave e⁻³ ≈ 0.05; the bounds of a likelier one are nearer to 1",
    SecondMomentFilter: "of a token that is not among those left out, which weigh 0",
    ClipCov: "of a token that is not among those drawn, which weigh 0",
    PolicyShaping: "of what the policy sampled; a demonstration's weight is in the formula",
    SelfNormalised: "of one of four equally likely tokens of a state, the others at r = 1",
}
"""What the picture is of, where a token's weight depends on more than its ratio and Ψ's sign."""


@cache
def owner(name: str) -> str:
    """The first algorithm that has the same gate on the same kind of ratio: one picture serves them all."""
    return next(n for n, a in ALGORITHMS.items() if _shape(a) == _shape(ALGORITHMS[name]))


def owners() -> list[str]:
    """One algorithm per picture."""
    return list(dict.fromkeys(map(owner, ALGORITHMS)))


def _shape(a: Algorithm) -> tuple[str, str]:
    return repr(a.gate), repr(a.ratio)


def reach(a: Algorithm) -> tuple[float, float]:
    """The ratios that are shown: five times as far as a clip, beyond what others bound."""
    if isinstance(a.gate, Clip):
        far = 5 * max(a.gate.low, a.gate.high)
        return max(0.0, 1 - far), 1 + far
    return (0.0, 6.0) if isinstance(a.gate, ClippedImportance | DivergenceClip) else (0.0, 3.0)


def gate_figure(name: str) -> str:
    """The SVG."""
    a = ALGORITHMS[name]
    low, high = reach(a)
    ratios = tuple(low + (high - low) * (i + 0.5) / POINTS for i in range(POINTS))  # no bound is one of them
    weights = [probe.gate_weights(a, psi, ratios) for psi in SIGNS.values()]
    top = 1.08 * max(1.0, *(max(w) for w in weights))
    lines = [
        {"series": number, "values": part}
        for number, values in enumerate(weights)
        for part in _unbroken(values, top / JUMP)
    ]
    x = {"label": axis(a), "values": ratios, "log": False, "low": low, "high": high}
    panel = {"label": "w", "log": False, "low": 0.0, "high": top, "lines": lines}
    return chart(f"The gate of {name}", {"x": x, "series": list(SIGNS), "panels": [panel]}, width=GATE_WIDTH)


def axis(a: Algorithm) -> str:
    """What the ratio is of."""
    unit = probe.ratio_unit(a)
    kind = "a token" if unit == "token" else "the whole answer" if "completion" in unit else ""
    return f"r, the ratio of {kind}" if kind else "r, which is 1 here: there is no ratio"


def _unbroken(values: Sequence[float], jump: float) -> list[list[float | None]]:
    """The curve's pieces, each as long as the whole, None where it is another's."""
    ends = [i for i in range(1, len(values)) if abs(values[i] - values[i - 1]) > jump]
    bounds = [0, *ends, len(values)]
    return [[v if start <= i < end else None for i, v in enumerate(values)] for start, end in pairwise(bounds)]


def gate_section(name: str) -> str:
    """The picture in the algorithm's page, and what it is of."""
    a = ALGORITHMS[name]
    note = OF.get(type(a.gate), "")
    picture = f"![w over r, for Ψ > 0 and for Ψ < 0](gates/{owner(name)}.svg)"
    return f"{picture}\n\nThe gate w over {axis(a)}" + (f"; here {note}." if note else ".")
