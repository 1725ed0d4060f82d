"""Validation of an algorithm: the types of its parts, and the combinations of parts that contradict each other.

What one part does not fit is stated by the part (`Part.find_conflicts`). Here are the roles, the rules of no single part, and the
questions to the parts. Each message gives a remedy.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from policygrad.core.auxiliary import Critic, ImplicitReward, Reference, find_missing_models
from policygrad.core.base import (
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
from policygrad.core.batch import Batch, Forward
from policygrad.core.chains import find_chain_conflicts
from policygrad.errors import ConfigError

if TYPE_CHECKING:
    from policygrad.core.algorithm import Algorithm


OLD_POLICIES = ("learner", "sampler")
HEADS = ("model", "fp32")


def validate_algorithm(algorithm: Algorithm) -> None:
    """Raise ConfigError for the first problem of an algorithm."""
    for check in (check_part_types, find_conflicts):
        for problem in check(algorithm):
            raise ConfigError(problem)


def check_rollout(algorithm: Algorithm) -> None:
    """Raise ConfigError for an algorithm that no run can train with, although a custom loop can."""
    for problem in ask_parts(algorithm, "find_run_conflicts", algorithm):
        raise ConfigError(problem)


def check_sampling(algorithm: Algorithm, samples_per_prompt: int, temperature: float) -> None:
    """Raise ConfigError if too few samples per prompt, or equal ones, are sampled for the algorithm's parts."""
    for problem in ask_parts(algorithm, "find_sampling_conflicts", samples_per_prompt, temperature):
        raise ConfigError(problem)


def ask_parts(algorithm: Algorithm, question: str, *args: object) -> Iterator[str]:
    """Yield what the parts answer to a method of `Part` that finds conflicts.

    Each class of a part is asked, its role's first, so that no part can lose the rules of its bases by stating one. An answer that
    begins with the part's class says in front what the class is: the gate Clip.
    """
    for key, part in algorithm.named_parts():
        name, noun = type(part).__name__, name_role(key)
        for kind in reversed(type(part).__mro__):
            if question in vars(kind):
                for text in getattr(kind, question)(part, *args):
                    is_bare = text.startswith(f"{name} ") and noun != name.lower()
                    yield f"the {noun} {text}" if is_bare else text


def list_idle(part: Part, algorithm: Algorithm) -> dict[str, str]:
    """Return setting -> why it cannot act, from every class of a part (`Part.find_idle_settings`)."""
    idle, question = dict[str, str](), "find_idle_settings"
    for kind in reversed(type(part).__mro__):
        if question in vars(kind):
            idle |= getattr(kind, question)(part, algorithm)
    return idle


def name_role(key: str) -> str:
    """Return what an algorithm's field holds, in a word: gate, term, update rule; key: `gate`, or `terms.1` of `named_parts`."""
    return ROLES[key.partition(".")[0]].noun.partition(" ")[2]


# The roles: which parts each field of an algorithm takes.


class PartRole(NamedTuple):
    """One field of an algorithm, and the parts it holds."""

    noun: str
    bases: tuple[type[Part], ...]
    is_tuple: bool = False
    is_required: bool = False


ROLES = {  # in the order in which data passes through them
    "filters": PartRole("a filter", (Filter,), is_tuple=True),
    "shaping": PartRole("reward shaping", (Shaping,), is_tuple=True),
    "advantage": PartRole("an advantage", (Advantage,), is_tuple=True),
    "ratio": PartRole("a ratio", (Ratio,)),
    "gate": PartRole("a gate", (Gate,), is_required=True),
    "corrections": PartRole("a correction", (Correction,), is_tuple=True),
    "aggregation": PartRole("an aggregation", (Aggregation,), is_required=True),
    "terms": PartRole("a term", (Term, LossTerm), is_tuple=True),
    "update_rule": PartRole("an update rule", (UpdateRule,), is_required=True),
    "critic": PartRole("a critic", (Critic,)),
    "reward_model": PartRole("a reward model", (ImplicitReward,)),
    "reference": PartRole("a reference", (Reference,)),
}


def check_part_types(algorithm: Algorithm) -> Iterator[str]:
    """Yield what is wrong with the types of an algorithm's parts."""
    for name, role in ROLES.items():
        value: Any = getattr(algorithm, name)
        if role.is_tuple and not isinstance(value, tuple):
            given = getattr(value, "__name__", type(value).__name__)
            yield f"{name} is a tuple of parts, not {given}: write {name}=({given}(),), with the comma"
        elif value is None and role.is_required:
            default = type(getattr(type(algorithm)(), name)).__name__
            yield f"{name} is None, and an algorithm needs one: on-policy it is {name}={default}()"
        else:
            for part in value if role.is_tuple else () if value is None else (value,):
                yield from _check_part(name, role, part)


def _check_part(name: str, role: PartRole, part: Any) -> Iterator[str]:
    if isinstance(part, type):
        yield f"{name} holds the class {part.__name__}, not a part: write {part.__name__}()"
        return
    if is_dataclass(part) and (problem := frozen_problem(type(part), name)):
        yield problem
        return
    base = next((base for base in role.bases if isinstance(part, base)), None)
    if base is None:
        other = next((field for field, other in ROLES.items() if isinstance(part, other.bases)), None)
        if other is not None:
            yield f"{part!r} is not {role.noun} but {ROLES[other].noun}: put it into {other}"
        else:
            bases = " or ".join(f"policygrad.{base.__name__}" for base in role.bases)
            yield f"{part!r} is not {role.noun}: a part in {name} inherits {bases}; `policygrad show` lists the parts"
        return
    abstract = _abstract_methods(base)
    if missing := [name for name in abstract if name in _abstract_methods(type(part))]:
        methods = ", ".join(f"{name}()" for name in missing)
        yield f"{type(part).__name__} is {role.noun} without {methods}: implement it as in policygrad.core.base.{base.__name__}"
        return
    for method in (method for method in abstract if callable(getattr(part, method))):
        arguments = list(inspect.signature(getattr(base, method)).parameters)[1:]
        try:
            signature = inspect.signature(getattr(part, method))
            signature.bind(*arguments)
        except TypeError:
            call = type(part).__name__ + ("" if method == "__call__" else f".{method}")
            yield f"{call} takes ({', '.join(signature.parameters)}), and {role.noun} is called with ({', '.join(arguments)})"
        except ValueError:  # a callable without a signature
            continue
    yield from _check_field_names(part, "needs", Batch)
    yield from _check_field_names(part, "forward_needs", Forward)


def _abstract_methods(kind: type) -> list[str]:
    return [name for name in dir(kind) if getattr(getattr(kind, name), "__isabstractmethod__", False)]


def frozen_problem(kind: type, field: str = "") -> str:
    """Describe why a class is not a frozen dataclass; "" if it is. field: the algorithm's field, for the message."""
    if is_dataclass(kind) and kind.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        return ""
    place = f" in {field}" if field else ""
    actual = "a dataclass that is not frozen" if is_dataclass(kind) else "no dataclass"
    return (
        f"{kind.__name__}{place} is {actual}, but a part's settings are constant data that run.toml holds: write "
        f"@dataclass(frozen=True) above class {kind.__name__}"
    )


def _check_field_names(part: Any, attribute: str, kind: type) -> Iterator[str]:
    """A part that reads a field which does not exist would never receive it."""
    fields_, names = [f.name for f in fields(kind)], getattr(part, attribute)
    where = f"{type(part).__name__}.{attribute}"
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        yield f"{where} must be a set of names, such as frozenset({{{fields_[-1]!r}}}), not {names!r}"
        return
    for name in sorted(set(names) - set(fields_)):
        near = difflib.get_close_matches(name, fields_, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"the fields are {', '.join(fields_)}"
        yield f"{where} contains {name!r}, which is not a field of {kind.__name__}: {hint}"


# Contradictions between parts. Each rule yields problems with their remedies.


def find_conflicts(algorithm: Algorithm) -> Iterator[str]:
    """Yield why parts of the right types do not fit together."""
    yield from _find_unknown_choices(algorithm)
    yield from find_missing_models(algorithm)
    yield from _find_order_conflicts(algorithm)
    yield from _find_demonstration_conflicts(algorithm)
    yield from _find_shared_resources(algorithm)
    yield from ask_parts(algorithm, "find_conflicts", algorithm)


def _find_unknown_choices(algorithm: Algorithm) -> Iterator[str]:
    if algorithm.old_policy not in OLD_POLICIES:
        yield f"old_policy must be {' or '.join(map(repr, OLD_POLICIES))}, not {algorithm.old_policy!r}"
    if algorithm.head not in HEADS:
        yield f"head must be {' or '.join(map(repr, HEADS))}, not {algorithm.head!r}"


def _find_order_conflicts(algorithm: Algorithm) -> Iterator[str]:
    """Yield filters and links in an order in which one would undo what another needs or has done."""
    for i, part in enumerate(algorithm.filters):
        if part.uses_group_statistics and not all(before.uses_group_statistics for before in algorithm.filters[:i]):
            yield f"{type(part).__name__} needs the task's scores of full groups: put it first in filters"
        elif part.replaces_groups and i:
            yield f"{type(part).__name__} decides which groups are replaced: put it first in filters, the only one that does"
    yield from find_chain_conflicts(algorithm.advantage)


def _find_demonstration_conflicts(algorithm: Algorithm) -> Iterator[str]:
    """Yield why no part learns from demonstrations that some part reads, or cannot from theirs."""
    if "demonstration" not in (needs := algorithm.all_needs):
        return
    if not any("demonstration" in part.needs for part in (algorithm.gate, *algorithm.terms)):
        yield "a part needs demonstrations, but none learns from them: set gate=PolicyShaping() or terms=(DemonstrationNLL(),)"
    if "step_end" in needs:
        yield "an advantage along steps reads them, and a demonstration has none: use GroupMean(), or remove the demonstrations"


def _find_shared_resources(algorithm: Algorithm) -> Iterator[str]:
    """Yield parts that claim more than there is of what an update has once: its selection of tokens, and the objective's shares."""
    names = [type(part).__name__ for part in algorithm.parts() if "selected" in part.needs]
    if len(names) > 1:
        yield f"{' and '.join(names)} each select tokens of an update, and Batch.selected holds one selection: remove one"
    names = [type(part).__name__ for part in algorithm.corrections if part.reweights]
    if len(names) > 1:
        yield f"{' and '.join(names)} each multiply by ρ = π_old/μ, which would then count twice: keep one in corrections"
    for when in ("mixture_weight", "final_mixture_weight"):
        shares = [(type(term).__name__, getattr(term, when)) for term in algorithm.terms]
        if sum(share for _, share in shares) > 1:
            claims = " and ".join(f"{name} {share:g}" for name, share in shares if share)
            yield f"the terms' shares of the objective add up to more than 1 ({claims}): reduce them"
