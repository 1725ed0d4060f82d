"""Names of runs: the named algorithm a run starts from, plus what was changed in it, so that no other algorithm bears its name."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, fields
from difflib import SequenceMatcher
from typing import Any

from policygrad.algorithms import ALGORITHMS
from policygrad.core.algorithm import Algorithm
from policygrad.core.validation import ROLES

_FILLED_IN = ("lr",)  # settings that a run fills in from its own options
_OPEN_LENGTH = ("length", None)  # A setting that a run fills in with its token budget
_MAX_CHARACTERS = 60  # longest name; it becomes a folder's


@dataclass(frozen=True)
class PartChange:
    """Parts added to or removed from one field of the named algorithm."""

    field: str
    added: tuple[Any, ...] = ()
    removed: tuple[Any, ...] = ()


@dataclass(frozen=True)
class SettingChange:
    """A changed setting; `part` is the part's class, or "" for a setting of the algorithm."""

    part: str
    name: str
    base_value: Any
    new_value: Any


@dataclass(frozen=True)
class RunName:
    """An algorithm compared with the named one; without changes if none has its name."""

    base: str
    part_changes: tuple[PartChange, ...] = ()
    setting_changes: tuple[SettingChange, ...] = ()

    @property
    def is_changed(self) -> bool:
        return bool(self.part_changes or self.setting_changes)

    @property
    def name(self) -> str:
        """`grpo+ClippedImportance`, `grpo-KLToReference`; the base's name if only settings differ."""
        suffixes = list[str]()  # `+New` for each added part, `-Old` for each removed one that no added part replaces
        for change in self.part_changes:
            added, removed = ([type(p).__name__ for p in side] for side in (change.added, change.removed))
            if added and Counter(added) == Counter(removed):
                same_classes = set(map(type, change.added)) == set(map(type, change.removed))
                suffixes.append("+reordered" if same_classes else f"+{added[0]}")
            else:
                suffixes += [*(f"+{name}" for name in added), *(f"-{name}" for name in removed[len(added) :])]
        name = self.base
        for i, suffix in enumerate(suffixes):
            if len(name + suffix) > _MAX_CHARACTERS:
                return f"{name}+{len(suffixes) - i}more"
            name += suffix
        return name

    @property
    def title(self) -> str:
        """The name with the settings that differ: `grpo (Clip.high = 0.28)`."""
        settings = [
            f"{s.part}.{s.name}".lstrip(".") + f" = {format_setting(s.new_value)}" for s in self.setting_changes
        ]
        if len(settings) > 4:
            settings = [*settings[:3], f"{len(settings) - 3} more settings"]
        return f"{self.name} ({', '.join(settings)})" if settings else self.name


def name_run(algorithm: Algorithm, max_tokens: int | None = None, base: Algorithm | None = None) -> RunName:
    """Compare an algorithm with `base`, by default the named algorithm of the same name. `max_tokens`: Token budget for lengths
    that either leaves open; None = an open length counts as no change."""
    base = ALGORITHMS.get(algorithm.name) if base is None else base
    if base is None:
        return RunName(algorithm.name)
    if max_tokens is not None:
        base, algorithm = base.with_max_tokens(max_tokens), algorithm.with_max_tokens(max_tokens)
    part_changes, setting_changes = list[PartChange](), list[SettingChange]()
    for field in ROLES:
        if field == "reference" and "logp_ref" not in algorithm.needs:
            continue  # nothing reads it
        old_parts, new_parts = (
            [part for key, part in a.named_parts() if key.partition(".")[0] == field] for a in (base, algorithm)
        )
        pairs, added, removed = list[tuple[Any, Any]](), list[Any](), list[Any]()  # pairs are of the same class
        kinds = [type(p) for p in old_parts], [type(p) for p in new_parts]
        for tag, i, j, k, m in SequenceMatcher(None, *kinds, autojunk=False).get_opcodes():
            if tag == "equal":
                pairs += zip(old_parts[i:j], new_parts[k:m], strict=True)
            else:
                removed += old_parts[i:j]
                added += new_parts[k:m]
        if added or removed:
            part_changes.append(PartChange(field, tuple(added), tuple(removed)))
        for old, new in pairs:
            values = [
                (f.name, getattr(old, f.name), getattr(new, f.name)) for f in fields(old) if f.name not in _FILLED_IN
            ]
            setting_changes += [
                SettingChange(type(new).__name__, name, a, b)
                for name, a, b in values
                if a != b and (name, a) != _OPEN_LENGTH
            ]
    for name in ("old_policy", "head"):
        old, new = getattr(base, name), getattr(algorithm, name)
        setting_changes += [SettingChange("", name, old, new)] if old != new else []
    return RunName(algorithm.name, tuple(part_changes), tuple(setting_changes))


def format_setting(value: Any) -> str:
    """Return a setting's value as text: 0.28, none, `SequenceMean`; of several texts their number."""
    if value is None or value == ():
        return "none"
    if isinstance(value, tuple):
        return f"{len(value)} text{'s' * (len(value) != 1)}"
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else re.sub(r"\(\)$", "", repr(value))
