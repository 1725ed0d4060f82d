"""The equation of an algorithm in words: each symbol with what is put in."""

from __future__ import annotations

from policygrad.core.composition import Composition


def written(a: Composition) -> dict[str, str]:
    """Symbol -> formula."""
    chain = "R"
    for link in a.psi:
        formula = link.formula
        if formula.startswith("/"):
            chain = f"({chain}){formula}"
        elif formula.startswith(("− ", "+ ")):
            chain = f"{chain} {formula}"
        else:
            chain = chain * formula.startswith(";") + formula
    lines = {"Ψ": chain, "w": a.gate.formula, "c": a.aggregate.formula}
    if a.ratio is not None:
        lines["r"] = a.ratio.formula
    if a.behaviour == "sampler":
        lines["π_old"] = "μ, as the sampler says"
    if a.critic is not None:
        lines["V"] = a.critic.formula
    for name, label in (("corrections", "ρ"), ("terms", "k"), ("shaping", "reward"), ("filters", "filter")):
        for part in getattr(a, name):
            key = "mask" if name == "corrections" and not part.weighs_sampler else label
            lines[key] = f"{lines[key]};  {part.formula}" if key in lines else part.formula
    lines["step"] = a.step.formula
    return lines
