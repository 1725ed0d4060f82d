"""Which parts there are, by name and by place, and what is said when a name is wrong."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import is_dataclass
from importlib import import_module

import policygrad
from policygrad.core.algorithm import Algorithm
from policygrad.errors import ConfigError

_PLACES = {  # module of policygrad.core -> field of an algorithm that its parts go into
    "advantages": "psi",
    "baselines": "psi",
    "corrections": "corrections",
    "critic": "critic",
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
    "multi_reward": "psi",
    "turns": "psi",
    "mixing": "psi",
    "policy_shaping": "gate",
    "demonstrations": "terms",
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
    """The class of a part by its policygrad name, or `module:Class`.

    Raises:
        ConfigError: no such class, or not a dataclass.
    """
    if ":" in name:
        from policygrad.rewards.resolve import look_here

        module, _, qualname = name.partition(":")
        look_here(module)
        try:
            kind = getattr(import_module(module), qualname)
        except (ImportError, AttributeError) as error:
            script = (
                "; it was defined in a script: move the class to a module of its own" if module == "__main__" else ""
            )
            raise ConfigError(f"{where}: {dotted}: cannot import the part {name!r}: {error}{script}") from error
        if not (isinstance(kind, type) and is_dataclass(kind)):
            raise ConfigError(f"{where}: {dotted}: {name!r} is not a part: a part is a dataclass")
        return kind
    if name not in part_names():
        known = part_names(dotted.rpartition(".")[2]) or part_names()
        hint = (
            nearest(name, part_names())
            if difflib.get_close_matches(name, part_names(), 1, 0.5)
            else nearest(name, known)
        )
        raise ConfigError(f"{where}: {dotted}: no part is called {name!r}: {hint}; your own is module:Class")
    return getattr(policygrad, name)  # type: ignore[no-any-return]


def _place(kind: type) -> str | None:
    package, _, module = kind.__module__.rpartition(".")
    return _PLACES.get(module) if package == "policygrad.core" else None


def check_place(kind: type, where: str, dotted: str) -> None:
    """Refuses a part of ours in a place where it means nothing; what others write is theirs to know."""
    place, own = dotted.rpartition(".")[2], _place(kind)
    if own is not None and own != place and place in _PLACES.values():
        raise ConfigError(
            f"{where}: {dotted}: {kind.__name__} goes into {own!r}, not {place!r}, which takes {', '.join(part_names(place))}"
        )
