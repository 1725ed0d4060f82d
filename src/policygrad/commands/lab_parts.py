"""What `policygrad lab` measures beside the named algorithms: algorithms and parts of one's own."""

from __future__ import annotations

import ast
import inspect
import re
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from policygrad.core.algorithm import Algorithm
from policygrad.core.roles import ROLES
from policygrad.errors import ConfigError, PolicygradError
from policygrad.training.config.composed import composed
from policygrad.training.config.parts import check_place, find_algorithm, part_class
from policygrad.training.config.toml import read_part

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


@dataclass(frozen=True)
class Trial:
    """A part, or a chain of parts, in an algorithm."""

    label: str
    """What its row is called: the parts' names, with the settings that were given."""
    algorithm: Algorithm
    base: str
    """The name of the algorithm that it was put into."""
    place: str
    """The field that holds it."""
    replaced: tuple[str, ...]
    """The parts that stood there."""

    @property
    def sentence(self) -> str:
        """Which algorithm it is in, and in the place of what."""
        instead = f"in place of {' and '.join(self.replaced)}" if self.replaced else "where there was none"
        return f"{self.label} is {self.base} with {self.place} = {self.label}, {instead}"


def with_part(base: Algorithm, spec: str) -> Trial:
    """Put a part, `mine:Gate(width=0.3)`, or a chain of them, `psi=GroupMean,mine:Asym`, into an algorithm.

    Raises:
        ConfigError: no such class, or one that cannot be built with these settings, or a field that there is not.
    """
    place, items = _parsed(spec)
    path = ",".join(name for name, _ in items)
    dotted = f"algorithm.{place or 'gate'}" if ":" in path else "part"
    kinds = [part_class(name, "command line", dotted) for name, _ in items]
    place = place or _field(kinds[0])
    if not place:
        raise ConfigError(
            f"--part {spec}: {kinds[0].__name__} is no gate (weight and value) and no advantage (it is not called): name "
            f"its field, FIELD={path}"
        )
    if place not in FIELDS:
        raise ConfigError(
            f"--part {spec}: no field {place!r} takes a part here: psi, ratio, gate, aggregate, terms, shaping, …"
        )
    before = getattr(base, place)
    several = isinstance(before, tuple)
    if len(kinds) > 1 and not several:
        raise ConfigError(
            f"--part {spec}: {place} holds one part, not {len(kinds)}; several rows are --part A --part B"
        )
    for kind in kinds:
        check_place(kind, "command line", f"algorithm.{place}")
    parts, labels = list[Any](), list[str]()
    for kind, (name, source) in zip(kinds, items, strict=True):
        settings = _settings(kind, source, spec)
        taken = {k: "none" if v is None else list(v) if isinstance(v, tuple) else v for k, v in settings.items()}
        parts.append(read_part(None, {"part": name, **taken}, f"--part {spec}", f"algorithm.{place}"))
        given = ", ".join(f"{k}={v!r}" for k, v in settings.items())
        labels.append(f"{kind.__name__}({given})" if given else kind.__name__)
    changes: dict[str, Any] = {place: tuple(parts) if several else parts[0]}
    if place == "gate" and getattr(parts[0], "on_policy", False):  # of no role yet
        changes["ratio"] = None
    label = "+".join(labels)
    replaced = tuple(type(part).__name__ for part in (before if several else (before,)) if part is not None)
    return Trial(label, replace(base, name=label, **changes), composed(base).name, place, replaced)


def _parsed(spec: str) -> tuple[str, list[tuple[str, str]]]:
    """(the field, "" where none is named; each part's name and the text of its settings)."""
    place, path = match.groups() if (match := re.fullmatch(r"(?:(\w+)=)?(.*)", spec, re.DOTALL)) else ("", spec)
    items, depth = [""], 0
    for letter in path:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and not depth:
            items.append("")
        else:
            items[-1] += letter
    found = [re.fullmatch(r"(.*?\w)\s*(?:\((.*)\))?", item.strip(), re.DOTALL) for item in items]
    if not all(found):
        raise ConfigError(
            f"--part {spec!r} cannot be read: write [FIELD=]PART[,PART], each with its settings in brackets where it has some, "
            "mine:Gate(width=0.3)"
        )
    return place or "", [(item[1], item[2] or "") for item in found if item]


def _settings(kind: type, source: str, spec: str) -> dict[str, Any]:
    """The settings `eps=1, mode='all'` by name: literals alone, so that nothing of the text is run.

    Raises:
        ConfigError: what is no literal, more than the part has, or less than it needs.
    """
    names = [f.name for f in fields(kind) if f.init]
    try:
        call = ast.parse(f"part({source})", mode="eval").body
        if not isinstance(call, ast.Call) or any(word.arg is None for word in call.keywords):
            raise ValueError(source)
        by_place = [ast.literal_eval(value) for value in call.args]
        by_name = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise ConfigError(
            f"--part {spec}: {kind.__name__}({source}) has settings that are no literals: write numbers, text in quotes, True, "
            f"False or None, as in {kind.__name__}({names[0] if names else 'name'}=1)"
        ) from error
    if len(by_place) > len(names):
        raise ConfigError(f"--part {spec}: {kind.__name__} takes {len(names)} settings, not {len(by_place)}")
    given = dict(zip(names, by_place, strict=False))
    if twice := given.keys() & by_name.keys():
        raise ConfigError(f"--part {spec}: {kind.__name__} is given {', '.join(sorted(twice))} twice")
    given |= by_name
    needed = [p.name for p in inspect.signature(kind).parameters.values() if p.default is p.empty]
    if missing := [name for name in needed if name not in given]:
        raise ConfigError(
            f"--part {spec}: {kind.__name__} needs {', '.join(missing)}: give it, {kind.__name__}({missing[0]}=…), or give its "
            "fields defaults"
        )
    return given


def _field(kind: type) -> str:
    """The field that a class goes into by its role; of one without a role by what it has, "" where that says nothing."""
    for place in FIELDS:
        if issubclass(kind, ROLES[place].bases):
            return place
    called = any("__call__" in base.__dict__ for base in kind.__mro__)
    return "gate" if callable(getattr(kind, "weight", None)) else "psi" if called else ""


def tried(trial: Trial, spec: str, size: int) -> None:
    """Measures it in a world of seven completions, so that a part that fails is named with its line, before the work.

    Raises:
        ConfigError: what the part raised that is no refusal in words.
    """
    from policygrad.lab.groups import all_steps
    from policygrad.lab.measurement import measure
    from policygrad.lab.worlds import one_prompt

    own, setting = trial.algorithm, one_prompt(2)
    try:
        measure(own, replace(setting, old=setting.theta), all_steps(setting, min(size, 4)))
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)
        kinds = [type(part) for _, part in own.parts()]
        files = {inspect.getfile(kind) for kind in kinds if not kind.__module__.startswith("policygrad.")}
        mine = [frame for frame in at if frame.filename in files]
        if isinstance(error, PolicygradError) and not mine:
            raise  # the library's own refusal
        where = (mine or at)[-1]
        raise ConfigError(
            f"--part {spec}: {type(error).__name__}: {error} ({where.filename}, line {where.lineno}, in {where.name})"
        ) from error
