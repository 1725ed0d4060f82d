"""What a run is called: the named algorithm it starts from, and what of it was changed, so that no other bears its name."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, fields
from difflib import SequenceMatcher
from typing import Any

from policygrad.algorithms import ALGORITHMS
from policygrad.core.algorithm import Algorithm
from policygrad.core.validation import ROLES

_RATES = ("lr",)
"""Settings that a run fills in from its own options, as its learning rate."""
_OPEN = ("length", None)
"""What a run sets to its budget."""
_LONGEST = 60
"""Characters of a name, at most: it becomes a folder's."""


@dataclass(frozen=True)
class PartChange:
    """Parts of one field that are not the named algorithm's."""

    field: str
    added: tuple[Any, ...] = ()
    removed: tuple[Any, ...] = ()


@dataclass(frozen=True)
class SettingChange:
    """One setting of a part that stayed; `part` is its class, or "" for the algorithm's own."""

    part: str
    name: str
    base_value: Any
    new_value: Any


@dataclass(frozen=True)
class RunName:
    """An algorithm beside the named one whose name it has; nothing changed where there is none of that name."""

    base: str
    part_changes: tuple[PartChange, ...] = ()
    setting_changes: tuple[SettingChange, ...] = ()

    @property
    def is_changed(self) -> bool:
        """Whether anything is other than the named algorithm's."""
        return bool(self.part_changes or self.setting_changes)

    @property
    def name(self) -> str:
        """`grpo+WeightCap`, `grpo-KLToReference`; plain where only settings differ."""
        marks, kept = [mark for swap in self.part_changes for mark in _marks(swap)], list[str]()
        for mark in marks:
            if len("".join([self.base, *kept, mark])) > _LONGEST:
                break
            kept.append(mark)
        left = len(marks) - len(kept)
        return "".join([self.base, *kept]) + (f"+{left}more" if left else "")

    @property
    def title(self) -> str:
        """The name, and the settings that differ: `grpo (Clip.high = 0.28)`."""
        told = [f"{s.part}.{s.name}".lstrip(".") + f" = {format_setting(s.new_value)}" for s in self.setting_changes]
        told = [*told[:3], f"{len(told) - 3} settings more"] if len(told) > 4 else told
        return f"{self.name} ({', '.join(told)})" if told else self.name


def name_run(a: Algorithm, max_tokens: int | None = None, base: Algorithm | None = None) -> RunName:
    """What differs from `row`, the named algorithm of the same name where it is left out.

    budget: tokens a completion may have, for lengths that are open in either; None = a length is no change where one is open.
    """
    base = ALGORITHMS.get(a.name) if base is None else base
    if base is None:
        return RunName(a.name)
    if max_tokens is not None:
        base, a = base.with_max_tokens(max_tokens), a.with_max_tokens(max_tokens)
    swaps, settings = list[PartChange](), list[SettingChange]()
    for name in ROLES:
        if name == "reference" and "logp_ref" not in a.needs:
            continue  # which nothing reads
        theirs, mine = _held(base, name), _held(a, name)
        kept, swap = _aligned(name, theirs, mine)
        swaps += [] if swap is None else [swap]
        settings += [s for old, new in kept for s in _settings(old, new)]
    if base.old_policy != a.old_policy:
        settings.append(SettingChange("", "old_policy", base.old_policy, a.old_policy))
    return RunName(a.name, tuple(swaps), tuple(settings))


def format_setting(value: Any) -> str:
    """A setting's value: 0.28, none, `SequenceMean`."""
    if value is None:
        return "none"
    return (
        f"{value:g}"
        if isinstance(value, float)
        else value
        if isinstance(value, str)
        else re.sub(r"\(\)$", "", repr(value))
    )


def _held(a: Algorithm, name: str) -> tuple[Any, ...]:
    value = getattr(a, name)
    return tuple(p for p in (value if isinstance(value, tuple) else (value,)) if p is not None)


def _aligned(
    name: str, theirs: tuple[Any, ...], mine: tuple[Any, ...]
) -> tuple[list[tuple[Any, Any]], PartChange | None]:
    """(parts of the same class on both sides, and what is on one side only)."""
    kept, added, removed = list[tuple[Any, Any]](), list[Any](), list[Any]()
    kinds = [type(p) for p in theirs], [type(p) for p in mine]
    for tag, i, j, k, m in SequenceMatcher(None, *kinds, autojunk=False).get_opcodes():
        if tag == "equal":
            kept += zip(theirs[i:j], mine[k:m], strict=True)
        else:
            removed += theirs[i:j]
            added += mine[k:m]
    return kept, PartChange(name, tuple(added), tuple(removed)) if added or removed else None


def _settings(old: Any, new: Any) -> list[SettingChange]:
    values = [(f.name, getattr(old, f.name), getattr(new, f.name)) for f in fields(old) if f.name not in _RATES]
    return [SettingChange(type(new).__name__, name, a, b) for name, a, b in values if a != b and (name, a) != _OPEN]


def _marks(swap: PartChange) -> list[str]:
    """`+New` for what came in, in the place of as many; `-Old` for what went without another in its place."""
    added, removed = [[type(p).__name__ for p in side] for side in (swap.added, swap.removed)]
    if added and Counter(added) == Counter(removed):
        return ["+reordered" if set(map(type, swap.added)) == set(map(type, swap.removed)) else f"+{added[0]}"]
    gone = removed[len(added) :]
    return [*(f"+{name}" for name in added), *(f"-{name}" for name in gone)]
