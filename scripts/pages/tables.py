"""docs/tables.md: the family side by side. Every cell is computed from an algorithm's parts, or is its entry in CATALOG."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

import policygrad as pg
from pages.markdown import page, table
from policygrad.algorithms import ALGORITHMS, GRPO, PPO
from policygrad.catalog import CATALOG
from policygrad.core.algorithm import Algorithm
from policygrad.core.auxiliary import Reference
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
        table(("algorithm", "Ψ", *(f"r = {r:g}" for r in RATIOS)), gates()),
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
        ratio = "" if a.ratio is None else f"; ratio per {ratio_unit(a)}"
        kl = "; ".join(f"`{text}`" for text in kl_terms(a))
        rows.append((_link(name), f"`{type(a.gate).__name__}`: {a.gate.formula}{ratio}", kl, outside(a)))
    return rows


def gates() -> list[tuple[str, ...]]:
    """w at five ratios, for both signs of Ψ; algorithms with one gate share a row."""
    users: dict[str, list[str]] = {}
    for name, a in ALGORITHMS.items():
        users.setdefault(repr(a.gate), []).append(name)
    rows = []
    for names in users.values():
        for psi in (1.0, -1.0):
            weights = gate_weights(ALGORITHMS[names[0]], psi)
            cells = (f"{w:.3f}".rstrip("0").rstrip(".") for w in weights)
            rows.append(
                (", ".join(f"`{n}`" for n in names) if psi > 0 else '"', f"{psi:+.0f}".replace("-", "−"), *cells)
            )
    return rows


def units() -> list[tuple[str, ...]]:
    """Lever 1 and lever 2 in a line each, from the parts; failures from CATALOG."""
    rows = []
    for name, a in ALGORITHMS.items():
        length = f"{length_handling(a)} (`{type(a.aggregation).__name__}`)"
        rows.append(
            (
                _link(name),
                a.equation()["Ψ"],
                advantage_unit(a),
                ratio_unit(a),
                length,
                CATALOG[name].failure_modes,
            )
        )
    return rows
