"""Which parts there are, by name and by place, and what is said when a name is wrong."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import is_dataclass, replace

import policygrad
from policygrad.algorithms import algorithm
from policygrad.core.algorithm import Algorithm
from policygrad.core.roles import ROLES, not_frozen
from policygrad.errors import ConfigError
from policygrad.training.config.own import assigned, is_own, load_own, location

_PLACES = {  # module of policygrad.core -> field of an algorithm that its parts go into
    "advantages": "psi",
    "baselines": "psi",
    "corrections": "corrections",
    "critic": "critic",
    "curriculum": "filters",
    "distillation": "psi",
    "dual_descent": "step",
    "values": "psi",
    "process": "psi",
    "success": "psi",
    "ratios": "ratio",
    "gates": "gate",
    "off_policy": "gate",
    "proximal": "gate",
    "selecting_gates": "gate",
    "token_masks": "corrections",
    "drift_terms": "terms",
    "aggregates": "aggregate",
    "terms": "terms",
    "loss_terms": "terms",
    "shaping": "shaping",
    "filters": "filters",
    "update_rules": "step",
    "trust_region": "step",
    "reference": "reference",
    "reward_model": "reward_model",
    "multi_reward": "psi",
    "turns": "psi",
    "turn_values": "psi",
    "policy_shaping": "gate",
    "demonstrations": "terms",
    "vine": "",  # parts of several roles: by each one's own
}


def nearest(name: str, known: Iterable[str]) -> str:
    """' did you mean …?' or the known names."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known))}"


def part_names(place: str | None = None) -> list[str]:
    """policygrad's own parts by class name, sorted; `place` = those that go into that field of an algorithm."""
    found = []
    for name in policygrad.__all__:
        kind = getattr(policygrad, name)
        if (
            isinstance(kind, type)
            and kind is not Algorithm
            and _place(kind) in (_PLACES.values() if not place else (place,))
        ):
            found.append(name)
    return found


def part_class(name: str, where: str, dotted: str) -> type:
    """The class of a part by its policygrad name, or `module:Class`, or `path/to/file.py:Class`.

    Raises:
        ConfigError: no such class, or not a dataclass.
    """
    if is_own(name):
        script = (
            "; it was defined in a script: move the class to a module of its own"
            if name.startswith("__main__:")
            else ""
        )
        try:
            kind = load_own(name, f"{where}: {dotted}: cannot import the part {name!r}")
        except ConfigError as error:
            raise ConfigError(f"{error}{script}") from error
        if isinstance(kind, Algorithm):
            raise ConfigError(
                f"{where}: {dotted}: {name!r} ({assigned(name)}) is a whole algorithm, not a part: --algorithm {name}"
            )
        if not isinstance(kind, type):
            raise ConfigError(f"{where}: {dotted}: {name!r} is not a part: name its class, which is a frozen dataclass")
        if problem := not_frozen(kind):
            raise ConfigError(f"{where}: {dotted}: {name!r}: {problem}")
        return kind
    if name not in part_names():
        known = part_names(dotted.rpartition(".")[2]) or part_names()
        hint = (
            nearest(name, part_names())
            if difflib.get_close_matches(name, part_names(), 1, 0.5)
            else nearest(name, known)
        )
        raise ConfigError(
            f"{where}: {dotted}: no part is called {name!r}: {hint}; your own is module:Class or file.py:Class"
        )
    return getattr(policygrad, name)  # type: ignore[no-any-return]


def find_algorithm(name: str) -> Algorithm:
    """The named algorithm, or one of a user's own: `module:NAME`, `path/to/file.py:NAME`.

    Raises:
        ConfigError: an unknown name, with the nearest known one; no such module, file or attribute; no algorithm.
    """
    if not is_own(name):
        return algorithm(name)
    found = load_own(name, f"algorithm {name!r}", Algorithm)
    if isinstance(found, type) and is_dataclass(found):
        field = next((field for field, role in ROLES.items() if issubclass(found, role.bases)), "FIELD")
        raise ConfigError(
            f"algorithm {name!r}: {location(found) or name} is a part, not an algorithm: put it into one, "
            f"--algorithm.{field} {name}, or in the file NAME = dataclasses.replace(policygrad.GRPO, {field}=…)"
        )
    if not isinstance(found, Algorithm):
        raise ConfigError(
            f"algorithm {name!r} ({assigned(name)}) is {type(found).__name__}, not a policygrad.Algorithm"
        )
    return replace(found, name=name.rpartition(":")[2]) if found.name == Algorithm().name else found


def _place(kind: type) -> str | None:
    package, _, module = kind.__module__.rpartition(".")
    place = _PLACES.get(module) if package == "policygrad.core" else None
    return (
        next((field for field, role in ROLES.items() if issubclass(kind, role.bases)), None) if place == "" else place
    )


def check_place(kind: type, where: str, dotted: str) -> None:
    """Refuses a part of ours in a place where it means nothing; what others write is theirs to know."""
    place, own = dotted.rpartition(".")[2], _place(kind)
    if own is not None and own != place and place in _PLACES.values():
        raise ConfigError(
            f"{where}: {dotted}: {kind.__name__} goes into {own!r}, not {place!r}, which takes {', '.join(part_names(place))}"
        )
