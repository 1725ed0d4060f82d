"""Which part may stand in which field of an algorithm: an instance of its role's base, or anything that declares all of it."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

from policygrad.core.batch import Batch, Forward
from policygrad.core.critic import Critic
from policygrad.core.protocols import (
    Advantage,
    Aggregation,
    Correction,
    Filter,
    Gate,
    LossTerm,
    Part,
    Ratio,
    Shaping,
    Term,
    UpdateRule,
)
from policygrad.core.reference import Reference
from policygrad.core.reward_model import ImplicitReward


class Role(NamedTuple):
    """One field of an algorithm, and what it holds."""

    word: str
    bases: tuple[type[Part], ...]
    methods: str = "a part is called"
    several: bool = False


ROLES = {  # in the order of the data's way
    "filters": Role("a filter", (Filter,), several=True),
    "shaping": Role("reward shaping", (Shaping,), several=True),
    "psi": Role("an advantage", (Advantage,), several=True),
    "ratio": Role("a ratio", (Ratio,)),
    "gate": Role("a gate", (Gate,), "it has no weight or value()"),
    "corrections": Role("a correction", (Correction,), several=True),
    "aggregate": Role("an aggregation", (Aggregation,)),
    "terms": Role(
        "a term",
        (Term, LossTerm),
        "it needs score(out, batch, psi) and value(out, batch, psi), or objective(out, batch, psi)",
        True,
    ),
    "step": Role("an update rule", (UpdateRule,)),
    "critic": Role("a critic", (Critic,), "it has no targets or loss()"),
    "reward_model": Role("a reward model", (ImplicitReward,), "it has no rewards or loss()"),
    "reference": Role("a reference", (Reference,), "it has no due()"),
}
_REQUIRED = {"gate": "OnPolicy()", "aggregate": "SequenceSum()", "step": "FirstOrder()"}
_MEANS = {
    "needs": "the Batch fields it reads",
    "group_statistic": "whether it compares the samples of one prompt",
    "select_needs": "the Forward fields that select reads, {'logp'} or none",
    "select": "the tokens it chooses among all of an update, where needs name 'selected'",
    "weighs_sampler": "whether it accounts for a sampler that is not π_old",
    "length": "a number of tokens, None where a run sets its budget, 0 where there is none",
    "formula": "what it puts into the equation",
    "init": "its memory before the first rollout, or None",
    "update": "its memory after a rollout",
    "at": "the part with its memory put in",
    "report": "its metrics of a rollout",
    "starts": "whether it ignores the Ψ it is given and must come first",
    "reads_reward": "whether it reads rewards",
    "samples_values": "whether a rollout samples values for it",
    "samples": "how many completions a sampled value takes",
    "joint": "whether r is of the whole completion",
    "on_policy": "whether it takes no ratio",
    "token_ratio": "whether it reads the tokens' own ratios",
    "whole_groups": "whether a token's weight depends on its group's other tokens",
    "clipped": "where it cuts, or None",
    "forward_needs": "the Forward fields it reads",
    "constrains": "'kl_old' for a penalty on it, or None",
    "aggregate": "how its tokens are averaged, None as the policy's",
    "mixture": "what it takes from the policy's term, 0 where it comes on top",
    "where": "the tokens that count in it, or None for all",
    "rounds": "rounds of sampling that a step may take",
    "carry": "whether groups that a step has no room for begin the next one",
    "resting": "the prompts that a rollout passes over, by number",
    "level": "how difficult a rollout's prompts shall be, or None",
    "refill": "whether other prompts are sampled for what it drops",
    "dropped": "the completions it takes out",
    "uses_lr": "whether the learning rate means anything",
    "minibatches": "shares that a rollout is split into",
    "updates": "updates of the policy per rollout",
    "value_updates": "updates of the critic per rollout",
}
"""What an attribute that a part must declare says, for whoever has left it out."""


def check_kinds(algorithm: Any) -> Iterator[str]:
    """What is wrong with the kinds of an algorithm's parts, in words, one by one."""
    for name, role in ROLES.items():
        value = getattr(algorithm, name)
        if role.several and not isinstance(value, tuple):
            given = getattr(value, "__name__", type(value).__name__)
            yield f"{name} is a tuple of parts, not {given}: write {name}=({given}(),), with the comma"
        elif value is None and name in _REQUIRED:
            yield f"an algorithm needs a part as its {name}; it is None. On-policy: {_REQUIRED[name]}"
        else:
            for part in value if role.several else () if value is None else (value,):
                yield from _kind(name, role, part)


def _kind(name: str, role: Role, part: Any) -> Iterator[str]:
    if isinstance(part, type):
        yield f"{name} holds the class {part.__name__}, not a part: write {part.__name__}()"
        return
    if is_dataclass(part) and (problem := not_frozen(type(part), name)):
        yield problem
        return
    base = next((base for base in role.bases if isinstance(part, base)), None)
    others = [(field, other) for field, other in ROLES.items() if isinstance(part, other.bases)]
    if base is None and others:
        field, other = others[0]
        yield f"{part!r} is not {role.word}: {role.methods}. It is {other.word}: put it into {field}"
    elif base is None and (missing := _missing(role, part)):
        yield missing
    elif base is not None and (unwritten := [n for n in dir(base) if _abstract(type(part), n)]):
        named = ", ".join(f"{n}()" for n in unwritten)
        yield f"{type(part).__name__} is {role.word} without {named}: write it, as in policygrad.core.protocols.{base.__name__}"
    else:
        yield from _arguments(part, role)
        yield from _reads(part, "needs", Batch)
        if name == "terms":
            yield from _reads(part, "forward_needs", Forward)


def not_frozen(kind: type, place: str = "") -> str:
    """Say what is wrong with the class of a part that is no frozen dataclass; "" for one that is. place: the algorithm's field."""
    if is_dataclass(kind) and kind.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        return ""
    where, what = (
        f" in {place}" * bool(place),
        "a dataclass that is not frozen" if is_dataclass(kind) else "no dataclass",
    )
    return (
        f"{kind.__name__}{where} is {what}, and a part's settings are data that run.toml holds and nothing changes: write "
        f"@dataclass(frozen=True) above class {kind.__name__}"
    )


def _arguments(part: Any, role: Role) -> Iterator[str]:
    """A method that takes other arguments than its role's would fail at the first rollout."""
    for base in (base for base in role.bases if isinstance(part, base) or len(role.bases) == 1):
        for name in (n for n in dir(base) if _abstract(base, n) and callable(getattr(part, n, None))):
            asked = list(inspect.signature(getattr(base, name)).parameters)[1:]
            try:
                inspect.signature(getattr(part, name)).bind(*asked)
            except TypeError:
                method = type(part).__name__ + ("" if name == "__call__" else f".{name}")
                given, called = ", ".join(inspect.signature(getattr(part, name)).parameters), ", ".join(asked)
                yield f"{method} takes ({given}), and {role.word} is called with ({called}): write it so"
            except ValueError:  # a callable without a signature
                continue


def _abstract(kind: type, name: str) -> bool:
    return getattr(getattr(kind, name), "__isabstractmethod__", False)


def _missing(role: Role, part: Any) -> str:
    """What a part that inherits no base lacks of its role's, or nothing."""
    base, name = role.bases[0], type(part).__name__
    calls = (
        [n for n in dir(base) if _abstract(base, n)]
        + ["targets", "loss"] * (base is Critic)
        + ["rewards", "loss", "rate"] * (base is ImplicitReward)
        + ["due"] * (base is Reference)
    )
    if not all(hasattr(part, n) for n in calls if n != "updates"):
        word, holds = role.word, f"is not a part that {next(f for f, r in ROLES.items() if r is role)} can hold"
        called = role.methods == "a part is called"
        said = f"{holds}: {role.methods}" if called else f"is not {word}: {role.methods}"
        return f"{part!r} {said}. Inherit policygrad.{base.__name__}; `policygrad show` lists the parts"
    for attribute in (n for n in dir(base) if not n.startswith("_")):
        if not hasattr(part, attribute):
            return (
                f"{name}, as {role.word}, does not say {attribute} ({_MEANS.get(attribute, 'which is read')}): inherit its "
                f"default, class {name}(policygrad.{base.__name__}), or declare it"
            )
    return ""


def _reads(part: Any, attribute: str, kind: type) -> Iterator[str]:
    """A part that reads a field which does not exist would never be given it."""
    known, names = [f.name for f in fields(kind)], getattr(part, attribute)
    what = f"{type(part).__name__}.{attribute}"
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        yield f"{what} is a set of names, such as frozenset({{{known[-1]!r}}}), not {names!r}"
        return
    for name in sorted(set(names) - set(known)):
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known)}"
        yield f"{what} names {name!r}, which is no field of {kind.__name__}: {hint}"
