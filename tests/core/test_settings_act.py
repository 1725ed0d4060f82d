"""Every setting of every part changes gradient, batch or sampling, or is said to be without effect."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch
from torch import Tensor

import policygrad as pg
from doubles.random_batches import Random, Shape, extra_of, gradients, make, passed, policy
from policygrad.core.base import Advantage, Part
from policygrad.core.metrics import Mean
from policygrad.core.validation import ROLES, list_idle
from policygrad.errors import ConfigError

SHAPE = Shape((8, 7, 2, 2, 3), 7, seed=11, binary=True)
PLACES = ("filters", "shaping", "advantage", "ratio", "gate", "corrections", "aggregation", "terms")
"""What acts on a batch. Update rules and models act in a learner, and have their own tests."""
PARTS = {
    name: kind
    for name, kind in ((name, getattr(pg.parts, name)) for name in pg.parts.__all__)
    if isinstance(kind, type) and is_dataclass(kind) and any(issubclass(kind, ROLES[place].bases) for place in PLACES)
}
BASE = pg.Algorithm(
    "base",
    advantage=(pg.GroupMean(),),
    ratio=pg.Token(),
    gate=pg.Importance(),
    aggregation=pg.TokenMean(),
    update_rule=pg.GradientSteps(2, 1),
    reference=pg.Reference(),
)


MOVABLE: dict[type, dict[str, Any]] = {pg.MovingLevel: {"start": 1}, pg.MismatchMask: {"high": 2.0}}
"""From level 0 there is no way down, and a product of ratios is hardly ever near 1."""
Outcome = list[Tensor | str]


def place_of(kind: type) -> str:
    return next(place for place in PLACES if issubclass(kind, ROLES[place].bases))


def build(part: Part, place: int | None = None) -> tuple[int, pg.Algorithm, Outcome] | None:
    """The first algorithm that takes the part, with its number and outcome: a plain one, or a row that has a part of its class.

    place: only the algorithm of this number.
    """
    role, kind = place_of(type(part)), type(part)
    homes = [(BASE, ())] + [
        (row, held) for row in pg.ALGORITHMS.values() if kind in map(type, held := as_tuple(getattr(row, role)))
    ]
    for number, (home, held) in enumerate(homes):
        if place in (None, number):
            new = tuple(part if type(other) is kind else other for other in held) or (part,)
            if home is BASE and isinstance(part, Advantage) and not part.starts_chain and "centred" in part.takes:
                new = (pg.GroupMean(), part)
            changes: dict[str, Any] = {role: new if ROLES[role].is_tuple else new[0]}
            if home is BASE and "values" in part.needs:
                changes["critic"] = pg.Critic(turn_gamma=getattr(part, "turn_gamma", 1.0))
            if not isinstance(home.update_rule, pg.TrustRegion):
                changes["update_rule"] = BASE.update_rule
            try:
                algorithm = replace(home, **changes)
                return number, algorithm, outcome(algorithm)
            except ConfigError:
                continue
    return None


def as_tuple(value: Any) -> tuple[Part, ...]:
    return value if isinstance(value, tuple) else (value,)


def outcome(algorithm: pg.Algorithm) -> Outcome:
    """What a part can change: gradient, Ψ, coefficients, states after three rollouts, and what a rollout reads of the parts."""
    algorithm = algorithm.with_max_tokens(SHAPE.width + 1)
    found: list[Tensor | str] = []
    state = algorithm.init_state()
    for seed, spread in enumerate((0.3, 2.5, 0.9)):
        now = algorithm.with_state(state)
        batch, logits = show(seed, spread, now)
        batch = now.apply_filters(batch)
        psi = now.compute_advantages(batch)
        logp = policy(logits, batch.tokens, now.read_tokens(batch))
        gradient = gradients(pg.surrogate(look(logp, batch, now), batch, psi, now), logp)[0]
        found += [gradient.nan_to_num(), psi, batch.mask.double(), now.coefficients(batch)]
        state = now.update_state(state, batch, {"kl_old/last": Mean(0.3), "kl": Mean(0.3), "entropy": Mean(0.5)})
        now = algorithm.with_state(state)
        found.append(repr(state))
        found += [repr([getattr(part, name, None) for name in read_by_rollouts(part)]) for part in now.parts()]
    values = (part.estimate_value([0.0, 1.0, 0.5]) for part in algorithm.advantage if isinstance(part, pg.OptimalValue))
    found.append(repr([*values]))
    return found


def show(seed: int, spread: float, algorithm: pg.Algorithm) -> tuple[pg.Batch, Tensor]:
    """A batch in which everything happens: rewards of 0 and 1 or numbers, truncation, a policy near the old one and far from it."""
    batch, logits = make(replace(SHAPE, seed=SHAPE.seed + seed, binary=seed < 2), spread, extra_of(algorithm))
    random = Random(seed)
    rows = len(batch.mask)
    level = next((part.task_level for part in algorithm.filters if part.task_level is not None), 0)
    levels = torch.full((rows,), level)
    return replace(
        batch,
        reward=batch.reward.nan_to_num(),
        bootstrap=random.normal(rows) if "bootstrap" in algorithm.all_needs else None,
        entropy=random.uniform(*batch.mask.shape),
        level=levels,
        levels=torch.full((rows,), 3),
    ), logits


def look(logp: Tensor, batch: pg.Batch, algorithm: pg.Algorithm) -> pg.Forward:
    """A forward pass whose entropy and divergences move with log π_θ."""
    out = passed(logp, batch, algorithm)
    assert batch.logp_old is not None
    return replace(out, entropy=(logp.detach() * logp).abs(), kl_old=(logp - batch.logp_old) ** 2)


def read_by_rollouts(part: Part) -> list[str]:
    """What a rollout or a learner asks a part for, beside its calls."""
    names = ["samples", "sampling_rounds", "refills", "excluded_examples", "task_level", "extra_samples"]
    names += ["states", "actions", "distinct", "prompts"]
    names += ["over"] * (not part.is_zero)  # which matters where top-k or top-p leave tokens out
    names += ["size", "max_age", "reuse", "seed"] * getattr(part, "replays", False)
    return [*names, "keep_leftovers"] if getattr(part, "refills", False) else names


def alternatives(part: Part, name: str) -> Iterator[Part]:
    """The part with other values of one setting, those that it takes."""
    value, hint = getattr(part, name), get_type_hints(type(part))[name]
    options = [option for h in (hint, *get_args(hint)) if get_origin(h) is Literal for option in get_args(h)]
    if isinstance(value, bool):
        others: list[Any] = [not value]
    elif options:
        others = [option for option in options if option != value]
    elif isinstance(value, int):
        others = [value + 1, value - 1, value + 3, 8, 4, 2, 1]
    elif isinstance(value, float) or "float" in str(hint):
        others = [0.0, 1e-3, 0.01, 0.1, 0.2, 0.3, 0.6, 0.9, 1.0, 1.2, 1.6, 3.0, 10.0, -0.5]
    elif "Aggregation" in str(hint):
        others = [pg.SequenceSum(), pg.SequenceMean()]
    elif "int" in str(hint):
        others = [3, 6, 2, 1]
    else:
        others = []
    for other in others:
        if other != value:
            try:
                yield replace(part, **{name: other})  # type: ignore[type-var]
            except ConfigError:
                continue


@cache
def bases(kind: type[Part]) -> tuple[Part, ...]:
    """The part as it is by default, and with each choice, switch and unset setting otherwise: what others may depend on."""
    default = kind(**MOVABLE.get(kind, {}))
    found = [default]
    for f in fields(default):  # type: ignore[arg-type]
        value = getattr(default, f.name)
        if isinstance(value, (bool, str)) or value is None or f.name in default.multipliers:
            found += [*alternatives(default, f.name)][:2]
    return tuple(found)


def same(first: Outcome, second: Outcome) -> bool:
    return all(
        torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b
        for a, b in zip(first, second, strict=True)
    )


@pytest.mark.parametrize("name", sorted(PARTS))
def test_a_setting_acts_or_is_said_not_to(name: str) -> None:
    wrong = []
    for part in bases(PARTS[name]):
        if (built := build(part)) is None:
            continue
        place, algorithm, before = built
        idle = list_idle(part, algorithm)
        for f in fields(part):  # type: ignore[arg-type]
            others = (build(other, place) for other in alternatives(part, f.name))
            differs = (not same(before, other[2]) for other in others if other is not None)
            first = next(differs, None)  # None: no other value is possible here
            if first is not None and (first or any(differs)) is (f.name in idle):
                wrong.append(f"{part}.{f.name} {'acts, and is said not to' if f.name in idle else 'does nothing'}")
    assert wrong == []
