"""The equation of an algorithm in words: each symbol with what is put in."""

from __future__ import annotations

from policygrad.core.composition import Composition
from policygrad.core.mixing import told
from policygrad.core.protocols import Advantage


def written(a: Composition) -> dict[str, str]:
    """Symbol -> formula."""
    chain = "R"
    for link in a.psi:
        chain = linked(chain, link)
    lines = {"Ψ": chain + told(a.terms), "w": a.gate.formula, "c": a.aggregate.formula}
    if a.ratio is not None:
        lines["r"] = a.ratio.formula
    if a.behaviour == "sampler":
        lines["π_old"] = "μ, as the sampler says"
    if a.critic is not None:
        lines["V"] = a.critic.formula
    if a.reward_model is not None:
        lines["r_φ"] = a.reward_model.formula
    for name, label in (("corrections", "ρ"), ("terms", "k"), ("shaping", "reward"), ("filters", "filter")):
        for part in getattr(a, name):
            key = "mask" if name == "corrections" and not part.weighs_sampler else label
            lines[key] = f"{lines[key]};  {part.formula}" if key in lines else part.formula
    lines["step"] = a.step.formula
    return lines


def linked(chain: str, link: Advantage) -> str:
    """The chain so far with one link more."""
    formula = link.formula
    if formula == type(link).__name__ and not link.starts:  # a part of one's own that does not say
        return f"{formula}({chain})"
    if formula.startswith("/"):
        return f"({chain}){formula}"
    if formula.startswith(("− ", "+ ")):
        return f"{chain} {formula}"
    return chain * formula.startswith(";") + formula
