"""docs/tables.md: the family side by side. Every cell is computed from an algorithm's parts, or is its entry in CATALOG."""

from __future__ import annotations

from dataclasses import replace

from pages import probe
from pages.markdown import page, table
from policygrad.algorithms import ALGORITHMS, GRPO, PPO
from policygrad.catalog import CATALOG
from policygrad.core.algorithm import Algorithm
from policygrad.core.auxiliary import Reference

ADAM = 4
"""Copies of the parameters that training one model in full precision holds: weights, gradient, two moments."""
CONSTRAINED = 6
"""The same of a constrained step: weights, gradient, four vectors of conjugate gradient."""


def tables_page() -> str:
    """The page."""
    return page(
        "# Tables",
        "The whole family side by side, computed from the algorithms themselves. "
        "[The algorithms](algorithms/index.md) have a page each.",
        "## Which policy is which\n\n" + STATES,
        table(("", "who makes it", "when it changes", "`Batch` field", "needed by"), states()),
        STATES_NOTE,
        "## Models in memory\n\n" + MEMORY,
        table(("", "policy", "reference", "critic", "reward model", "models", "parameters held"), classic()),
        "And every named algorithm, with a verifier that is no model:",
        table(("algorithm", "policy", "reference", "critic", "models", "parameters held"), models()),
        "## What bounds the step\n\n" + BOUNDS,
        table(("algorithm", "gate w", "KL", "far outside"), bounds()),
        "The gates in numbers, where tokens have a ratio of their own: w at the ratio r, for Ψ = +1 and for Ψ = −1.",
        table(("algorithm", "Ψ", *(f"r = {r:g}" for r in probe.RATIOS)), gates()),
        GATES_NOTE,
        "## Units, lengths, failures\n\n" + UNITS,
        table(("algorithm", "baseline and scale", "Ψ per", "ratio per", "length", "how it fails"), units()),
    )


STATES = "Four distributions meet in the equation. They are often one and the same; the algorithms differ in when they are not."
STATES_NOTE = (
    "Policies are kept as log-probabilities of the tokens that were sampled, not as models: only π_θ and π_ref are weights "
    "in memory. While every rollout feeds one update and is drawn with the weights as they are, π_old is π_θ and every ratio is 1. "
    "Tokens that older weights drew are corrected for by π_old/μ (`TruncatedIS`, unless the algorithm has corrections), or, with "
    "`old_policy='sampler'`, μ is taken as π_old."
)
MEMORY = (
    "Counted in copies of the policy's parameters P, in full precision: a model trained by AdamW costs 4 (weights, gradient, "
    "two moments), one moved by a constrained step about 6 (weights, gradient, four vectors of conjugate gradient), a frozen "
    "one 1. A critic or a reward model of another size counts by its own size. Activations and the sampler's cache come on "
    "top. First the classic comparison:"
)
BOUNDS = (
    "Clipping removes the incentive to go further; it does not stop a step that other tokens cause. A KL pulls back, "
    "everywhere and softly. A constraint is the only one that promises. *Far outside*: the weight that is left of a token's "
    "gradient once its ratio is far above or below 1."
)
GATES_NOTE = (
    "A clip is one-sided: with Ψ > 0 it acts above 1 only, with Ψ < 0 below 1 only, so that a token which has moved the wrong "
    "way can always come back. Ranges of 3e-4 are for a completion's ratio, in which single tokens average out. "
    "`SelfNormalised` is shown at one of four equally likely tokens of a state, the others at r = 1: w = r/m is at most 4."
)
UNITS = (
    "Ψ and the ratio may live on tokens or on whole completions. The column on length compares two completions in one step, "
    "one twice as long as the other: the coefficient c of a token, and of the completion as a whole."
)


def _names(field: str) -> str:
    users = [name for name, a in ALGORITHMS.items() if field in a.needs]
    return ", ".join(f"`{name}`" for name in users) or "none by default"


def states() -> list[tuple[str, ...]]:
    """π_θ, π_old, π_ref, μ."""
    refreshed = [
        f"`{n}` every {a.reference.refresh_every}"
        for n, a in ALGORITHMS.items()
        if a.reference and a.reference.refresh_every
    ]
    return [
        ("π_θ, the policy", "the learner", "every update", "the forward pass: `Forward.logp`", "all"),
        (
            "π_old, the policy when the rollout was taken",
            "the learner evaluates the rollout once, before updating",
            "every rollout; differs from π_θ from a rollout's second update on",
            "`logp_old`",
            _names("logp_old") + "; any other with a ratio as soon as a rollout feeds several updates",
        ),
        (
            "π_ref, the reference",
            "a frozen copy of the initial model",
            "never, or when renewed (" + ", ".join(refreshed) + " rollouts)",
            "`logp_ref`",
            _names("logp_ref"),
        ),
        (
            "μ, the sampler",
            "the engine that generated the tokens",
            "with every load of new weights; differs from π_old by rounding or staleness",
            "`logp_sampler`",
            _names("logp_sampler")
            + "; the corrections `TruncatedIS` and `MaskedIS` read it, `old_policy='sampler'` takes it as π_old, and it is "
            "else compared with π_old",
        ),
    ]


def _models(a: Algorithm, reward_model: bool) -> tuple[str, ...]:
    policy = ADAM if a.update_rule.uses_lr else CONSTRAINED
    reference = int("logp_ref" in a.needs)
    critic = ADAM * (a.critic is not None and a.critic.backbone == "separate")
    held = [policy, reference, critic, int(reward_model)]
    return (
        f"trained, {policy} P",
        "frozen, 1 P" if reference else "",
        f"trained, {critic} P" if critic else "",
        *(("frozen, 1 P",) if reward_model else ()),
        str(sum(map(bool, held))),
        f"{sum(held)} P",
    )


def classic() -> list[tuple[str, ...]]:
    """PPO, GRPO, GRPO with a verifier, GRPO with a verifier and without KL."""
    bare = replace(GRPO, name="custom", terms=(), reference=Reference())
    rows = []
    for label, a, reward_model in (
        ("PPO with a reward model (RLHF)", PPO, True),
        ("GRPO with a reward model", GRPO, True),
        ("GRPO with a verifier", GRPO, False),
        ("GRPO with a verifier, `terms=()`", bare, False),
    ):
        cells = _models(a, reward_model)
        rows.append((label, *(cells if reward_model else (*cells[:3], "", *cells[3:]))))
    return rows


def models() -> list[tuple[str, ...]]:
    """What each named algorithm holds."""
    return [(_link(name), *_models(a, False)) for name, a in ALGORITHMS.items()]


def _link(name: str) -> str:
    return f"[`{name}`](algorithms/{name}.md)"


def bounds() -> list[tuple[str, ...]]:
    """Gate, KL, and what is left of the gradient outside."""
    rows = []
    for name, a in ALGORITHMS.items():
        ratio = "" if a.ratio is None else f"; ratio per {probe.ratio_unit(a)}"
        kl = "; ".join(f"`{text}`" for text in probe.kl_terms(a))
        rows.append((_link(name), f"`{type(a.gate).__name__}`: {a.gate.formula}{ratio}", kl, probe.outside(a)))
    return rows


def gates() -> list[tuple[str, ...]]:
    """w at five ratios, for both signs of Ψ; algorithms with one gate share a row."""
    users: dict[str, list[str]] = {}
    for name, a in ALGORITHMS.items():
        users.setdefault(repr(a.gate), []).append(name)
    rows = []
    for names in users.values():
        for psi in (1.0, -1.0):
            weights = probe.gate_weights(ALGORITHMS[names[0]], psi)
            cells = (f"{w:.3f}".rstrip("0").rstrip(".") for w in weights)
            rows.append(
                (", ".join(f"`{n}`" for n in names) if psi > 0 else '"', f"{psi:+.0f}".replace("-", "−"), *cells)
            )
    return rows


def units() -> list[tuple[str, ...]]:
    """Lever 1 and lever 2 in a line each, from the parts; failures from CATALOG."""
    rows = []
    for name, a in ALGORITHMS.items():
        length = f"{probe.length_handling(a)} (`{type(a.aggregation).__name__}`)"
        rows.append(
            (
                _link(name),
                a.equation()["Ψ"],
                probe.advantage_unit(a),
                probe.ratio_unit(a),
                length,
                CATALOG[name].failure_modes,
            )
        )
    return rows
