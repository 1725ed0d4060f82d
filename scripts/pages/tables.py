"""Tables of docs/algorithms/index.md: all algorithms side by side. Every cell is computed from an algorithm's parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import policygrad as pg
from pages.markdown import table
from policygrad.algorithms import ALGORITHMS, GRPO, PPO
from policygrad.core.algorithm import Algorithm
from policygrad.core.auxiliary import Reference
from policygrad.core.batch import PER_COMPLETION, PER_TOKEN, Batch
from policygrad.lab.findings.ratios import make_token_batch

RATIOS = (0.5, 0.9, 1.0, 1.1, 1.5)
FAR = (0.25, 4.0)
"""Ratios that every gate's range excludes."""


_BOOLEAN = {
    "selected",
    "truncated",
    "demonstration",
    "observation",
    "has_reference",
}  # of the fields that get random numbers


def short_and_long(algorithm: Algorithm, short: int = 10, long: int = 20) -> Batch:
    """Make a batch of two prompts, each with a short and a long completion, and random numbers in every field that is "
    "read."""
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
    fields |= {name: fields[name] > 0.5 for name in _BOOLEAN & fields.keys()}
    fields |= {
        name: (2 * fields[name]).long()
        for name in ("version", "turn_state", "example_id", "level", "levels", "role", "peers", "teacher")
        if name in fields
    }
    if "role" in reads:
        fields["role_names"] = ("first", "second")
    if "rewards" in reads:
        fields |= {"rewards": random(4, 2), "reward_names": ("a", "b"), "reward_weights": (1.0, 1.0)}
    if "step_end" in reads:
        fields |= {"step_end": ends & mask, "token_reward": torch.where(ends & mask, random(4, long), 0)}
    reward = torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    return pg.Batch(**{"mask": mask, "group": torch.tensor([0, 0, 1, 1]), "reward": reward, **fields})


def advantage_unit(algorithm: Algorithm) -> str:
    """Return "token" if Ψ differs between the tokens of one completion, else "completion"."""
    batch = short_and_long(algorithm)
    psi = algorithm.with_max_tokens(batch.mask.shape[1]).compute_advantages(batch)
    spread = [float(row[keep].max() - row[keep].min()) for row, keep in zip(psi, batch.mask, strict=True)]
    return "token" if max(spread) > 1e-9 else "completion"


def ratio_unit(algorithm: Algorithm) -> str:
    """Return which tokens' ratios change with one token's log-probability."""
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
    """Return the weight of a token, and of a completion, of twice the length."""
    batch = short_and_long(algorithm)
    c = algorithm.with_max_tokens(batch.mask.shape[1]).coefficients(batch)
    token = float(c[1, 0] / c[0, 0])
    completion = float(c[1].sum() / c[0].sum())
    return f"twice as long: a token × {token:g}, the completion × {completion:g}"


def gate_weights(algorithm: Algorithm, psi: float, ratios: tuple[float, ...] = RATIOS) -> list[float]:
    """Compute w at each ratio for Ψ = `psi`; for a gate that sees full groups, of one token among four with the others "
    "at r = 1."""
    if algorithm.gate.requires_full_groups:
        return [_among_four(algorithm, psi, x) for x in ratios]
    r = torch.tensor(ratios, dtype=torch.float64)[:, None]
    return [float(w) for w in algorithm.gate.weight(r, torch.full_like(r, psi), make_token_batch(r))]


def _among_four(algorithm: Algorithm, psi: float, ratio: float) -> float:
    r = torch.tensor([ratio, 1.0, 1.0, 1.0], dtype=torch.float64)[:, None]
    state = replace(make_token_batch(r), group=torch.zeros(4, dtype=torch.int64))
    return float(algorithm.gate.weight(r, torch.full_like(r, psi), state)[0])


def describe_far_outside(algorithm: Algorithm) -> str:
    """Describe w where the ratio is far above 1 and far below, for both signs of Ψ; in one phrase if they agree."""
    low, high = FAR
    sides = {}
    for sign, psi in (("Ψ>0", 1.0), ("Ψ<0", -1.0)):
        above, below = _kind(algorithm, psi, high), _kind(algorithm, psi, low)
        sides[sign] = f"w = {above}" if above == below else f"w = {above} above, {below} below"
    same = len(set(sides.values())) == 1
    phrase = sides["Ψ>0"] if same else "; ".join(f"{sign}: {text}" for sign, text in sides.items())
    return phrase.replace("= →", "→")


def _kind(algorithm: Algorithm, psi: float, r: float) -> str:
    far, farther = (gate_weights(algorithm, psi, (x,))[0] for x in (r, r**4))
    if far == farther:
        return f"{far:g}"
    if abs(farther - r**4) < 1e-12 and abs(far - r) < 1e-12:
        return "r"
    return "→ 0" if farther < far else f"{farther:.3g}"


ADAM = 4
"""Copies of the parameters that AdamW keeps in full precision: weights, gradient, two moments."""
CONSTRAINED = 6
"""Copies that a constrained step keeps: weights, gradient, four vectors of conjugate gradient."""


def comparison_sections() -> tuple[str, ...]:
    """Write the sections that compare all algorithms."""
    return (
        "## Which policy is which\n\n" + STATES,
        table(("", "computed by", "when it changes", "`Batch` field", "needed by"), list_distributions()),
        STATES_NOTE,
        "## Models in memory\n\n" + MEMORY,
        table(
            ("", "policy", "reference", "critic", "reward model", "models", "parameters in memory"), compare_memory()
        ),
        "The named algorithms, with a verifier that is not a model:",
        table(("policy", "reference", "critic", "models", "parameters in memory", "algorithms"), list_memory()),
        "## What bounds the step\n\n" + BOUNDS,
        table(("gate", "far outside", *(f"r = {r:g}" for r in RATIOS), "algorithms"), list_gates()),
        GATES_NOTE,
        "## Units and lengths\n\n" + UNITS,
        table(("", "", "algorithms"), list_units()),
    )


STATES = "The equation has four distributions. They are often identical; algorithms differ in when they are not."
STATES_NOTE = (
    "Only π_θ and π_ref are models in memory; π_old and μ are stored as log-probabilities of the sampled tokens. While "
    "every "
    "rollout is sampled with the current weights and feeds one update, π_old is π_θ and every ratio is 1. Tokens sampled "
    "with older "
    "weights are corrected by π_old/μ (`TruncatedIS`, unless the algorithm has corrections); with "
    "`old_policy='sampler'`, μ is "
    "used as π_old."
)
MEMORY = (
    "Counted in copies of the policy's parameters P, in full precision: a model trained by AdamW takes 4 (weights, "
    "gradient, "
    "two moments), one trained by constrained steps about 6 (weights, gradient, four vectors of conjugate gradient), a "
    "frozen "
    "one 1. A critic or reward model of another size counts by its own size. Activations and the sampler's cache are "
    "extra. "
    "The classic comparison:"
)
BOUNDS = (
    "Clipping removes the incentive to move a token further, but does not stop steps that other tokens cause. A KL penalty pulls "
    "back softly everywhere. Only a constraint guarantees a bound. The table has the weight w of a token's gradient at its ratio "
    "r, for Ψ > 0 / Ψ < 0 where they differ. *Far outside*: where r is far above or below 1."
)
GATES_NOTE = (
    "A clip is one-sided: with Ψ > 0 it acts only above 1, with Ψ < 0 only below 1, so a token that has moved the wrong "
    "way "
    "can always move back. Ranges of 3e-4 are for a completion's ratio, in which single tokens average out. "
    "`SelfNormalised` is shown at one of four equally likely tokens of a state, the others at r = 1: w = r/m is at most 4."
)
UNITS = (
    "Ψ and the ratio are per token or per completion. For lengths the table compares two completions of one step, one twice as "
    "long as the other: the coefficient c of a token, and of the full completion."
)


def _names(field: str) -> str:
    users = [name for name, a in ALGORITHMS.items() if field in a.needs]
    return ", ".join(f"`{name}`" for name in users) or "none by default"


def list_distributions() -> list[tuple[str, ...]]:
    """Return the rows of π_θ, π_old, π_ref and μ."""
    refreshed = [
        f"`{n}` every {a.reference.refresh_every}"
        for n, a in ALGORITHMS.items()
        if a.reference and a.reference.refresh_every
    ]
    return [
        ("π_θ, the policy", "the learner", "every update", "the forward pass: `Forward.logp`", "all"),
        (
            "π_old, the policy when the rollout was sampled",
            "the learner evaluates the rollout once, before updating",
            "every rollout; differs from π_θ from a rollout's second update on",
            "`logp_old`",
            _names("logp_old") + "; any other with a ratio as soon as a rollout feeds several updates",
        ),
        (
            "π_ref, the reference",
            "a frozen copy of the initial model",
            "never, or when refreshed (" + ", ".join(refreshed) + " rollouts)",
            "`logp_ref`",
            _names("logp_ref"),
        ),
        (
            "μ, the sampler",
            "the engine that generated the tokens",
            "with every load of new weights; differs from π_old by rounding or staleness",
            "`logp_sampler`",
            _names("logp_sampler")
            + "; the corrections `TruncatedIS` and `MaskedIS` read it, `old_policy='sampler'` uses it as π_old, and otherwise "
            "it is compared with π_old",
        ),
    ]


def _models(a: Algorithm, reward_model: bool) -> tuple[str, ...]:
    policy = ADAM if a.update_rule.uses_lr else CONSTRAINED
    reference = int("logp_ref" in a.needs)
    critic = ADAM * (a.critic is not None and a.critic.backbone == "separate")
    copies = [policy, reference, critic, int(reward_model)]
    return (
        f"trained, {policy} P",
        "frozen, 1 P" if reference else "",
        f"trained, {critic} P" if critic else "",
        *(("frozen, 1 P",) if reward_model else ()),
        str(sum(map(bool, copies))),
        f"{sum(copies)} P",
    )


def compare_memory() -> list[tuple[str, ...]]:
    """Return the rows of PPO, GRPO, GRPO with a verifier, and GRPO with a verifier and without KL."""
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


def list_memory() -> list[tuple[str, ...]]:
    """Return the models that algorithms keep in memory, with the algorithms."""
    return [(*cells, names) for cells, names in _grouped(lambda a: _models(a, False)).items()]


def _grouped(key: Callable[[Algorithm], Any], others: bool = True) -> dict[Any, str]:
    """Return key -> the names of the algorithms that have it; the longest list is "all others"."""
    users: dict[Any, list[str]] = {}
    for name, a in ALGORITHMS.items():
        users.setdefault(key(a), []).append(name)
    most = max(users, key=lambda value: len(users[value])) if others else None
    return {
        value: "all others" if others and value == most else ", ".join(f"`{name}`" for name in names)
        for value, names in users.items()
    }


def list_gates() -> list[tuple[str, ...]]:
    """Return each gate's weights at five ratios for both signs of Ψ, and the algorithms that have it."""
    return [(*cells, names) for cells, names in _grouped(_describe_gate, others=False).items()]


def _describe_gate(a: Algorithm) -> tuple[str, ...]:
    above, below = ([f"{w:.3f}".rstrip("0").rstrip(".") for w in gate_weights(a, psi)] for psi in (1.0, -1.0))
    cells = (x if x == y else f"{x} / {y}" for x, y in zip(above, below, strict=True))
    return (f"`{type(a.gate).__name__}`", describe_far_outside(a), *cells)


def list_units() -> list[tuple[str, str, str]]:
    """Return the units of advantage and ratio and the handling of lengths, each with its algorithms."""
    return [
        *(("Ψ", f"per {unit}", names) for unit, names in _grouped(advantage_unit).items()),
        *(
            ("ratio", unit if unit.startswith("none") else f"per {unit}", names)
            for unit, names in _grouped(ratio_unit).items()
        ),
        *(
            ("length", f"{_length_of(kind)} (`{kind}`)", names)
            for kind, names in _grouped(lambda a: type(a.aggregation).__name__).items()
        ),
    ]


def _length_of(kind: str) -> str:
    """Return how an aggregation handles lengths, from the first algorithm that has it."""
    return length_handling(next(a for a in ALGORITHMS.values() if type(a.aggregation).__name__ == kind))
