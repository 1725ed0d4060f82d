"""What `policygrad lab` measures beside the named algorithms: algorithms and parts of one's own."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from policygrad.core.algorithm import Algorithm
from policygrad.core.roles import ROLES
from policygrad.errors import ConfigError, PolicygradError
from policygrad.training.config.composed import composed
from policygrad.training.config.parts import check_place, find_algorithm, part_class

FIELDS = ("gate", "psi", "ratio", "aggregate", "terms", "shaping", "filters", "corrections")
"""Where a part is measured: what makes one gradient."""


def named(names: Sequence[str]) -> dict[str, Algorithm]:
    """By the name that each goes by; one's own under what it is composed of, numbered by its words where two are alike."""
    found: dict[str, Algorithm] = {}
    for name in names:
        a = find_algorithm(name)
        label = composed(a).name
        found[name if label in found else label] = a
    return found


def with_part(base: Algorithm, spec: str) -> tuple[str, Algorithm]:
    """(its label, the algorithm with the part in it, or with the chain of parts `psi=GroupMean,mine:Asym`).

    Raises:
        ConfigError: no such class, or one that cannot be built without arguments, or a field that there is not.
    """
    place, _, path = spec.rpartition("=")
    kinds = _kinds(spec)
    for kind in kinds:
        missing = [p.name for p in inspect.signature(kind).parameters.values() if p.default is p.empty]
        if missing:
            raise ConfigError(f"--part {spec}: {kind.__name__} needs {', '.join(missing)}: give its fields defaults")
    parts = tuple(kind() for kind in kinds)
    place = place or _field(parts[0])
    if not place:
        raise ConfigError(
            f"--part {spec}: {kinds[0].__name__} is no gate (weight and value) and no advantage (it is not called): name "
            f"its field, FIELD={path}"
        )
    if place not in FIELDS:
        raise ConfigError(
            f"--part {spec}: no field {place!r} takes a part here: psi, ratio, gate, aggregate, terms, shaping, …"
        )
    several = isinstance(getattr(base, place), tuple)
    if len(parts) > 1 and not several:
        raise ConfigError(
            f"--part {spec}: {place} holds one part, not {len(parts)}; several rows are --part A --part B"
        )
    for kind in kinds:
        check_place(kind, "command line", f"algorithm.{place}")
    changes: dict[str, Any] = {place: parts if several else parts[0]}
    if place == "gate" and getattr(parts[0], "on_policy", False):  # of no role yet
        changes["ratio"] = None
    label = "+".join(kind.__name__ for kind in kinds)
    return label, replace(base, name=label, **changes)


def _kinds(spec: str) -> list[type]:
    place, _, path = spec.rpartition("=")
    dotted = f"algorithm.{place or 'gate'}" if ":" in path else "part"
    return [part_class(name, "command line", dotted) for name in path.split(",")]


def _field(part: Any) -> str:
    """The field it goes into by its role; of one without a role by what it has, "" where that says nothing."""
    for place in FIELDS:
        if isinstance(part, ROLES[place].bases):
            return place
    return "gate" if callable(getattr(part, "weight", None)) else "psi" if callable(part) else ""


def tried(own: Algorithm, spec: str, size: int) -> None:
    """Measures it in a world of seven completions, so that a part that fails is named with its line, before the work.

    Raises:
        ConfigError: what the part raised that is no refusal in words.
    """
    from policygrad.lab.groups import all_steps
    from policygrad.lab.measurement import measure
    from policygrad.lab.worlds import one_prompt

    setting = one_prompt(2)
    try:
        measure(own, replace(setting, old=setting.theta), all_steps(setting, min(size, 4)))
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)
        files = {inspect.getfile(kind) for kind in _kinds(spec) if not kind.__module__.startswith("policygrad.")}
        mine = [frame for frame in at if frame.filename in files]
        if isinstance(error, PolicygradError) and not mine:
            raise  # the library's own refusal
        where = (mine or at)[-1]
        raise ConfigError(
            f"--part {spec}: {type(error).__name__}: {error} ({where.filename}, line {where.lineno}, in {where.name})"
        ) from error
