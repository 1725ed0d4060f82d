"""Intervals and unions of them, as brackets or as inequalities: (1, 2], x ≥ 5, -1 < x ≤ 3, (-∞, 3) ∪ (3, ∞)."""

import re
from collections.abc import Callable
from dataclasses import dataclass

_END = r"[^,<>≤≥\[\]()]{1,100}?"
_BRACKETS = re.compile(rf"([\[(])\s*({_END})\s*,\s*({_END})\s*([\])])")
_BELONGS = re.compile(r"\A\s*[a-zA-Z]\s*(?:\\in\b|∈|=)\s*(?=[\[(])")
_UNION = re.compile(r"\\cup\b|∪|\bU\b|\bunion\b")
_SIGNS = (
    (re.compile(r"\\leqslant\b|\\leq\b|\\le\b|<="), "≤"),
    (re.compile(r"\\geqslant\b|\\geq\b|\\ge\b|>="), "≥"),
    (re.compile(r"\\lt\b|&lt;"), "<"),
    (re.compile(r"\\gt\b|&gt;"), ">"),
)
_CHAIN = re.compile(r"([^<>≤≥]{1,100})([<>≤≥])([^<>≤≥]{1,100})(?:([<>≤≥])([^<>≤≥]{1,100}))?")
_VARIABLE = re.compile(r"[a-zA-Z]|\\(?:theta|alpha|beta|lambda|mu)")
_INFINITE = {"\\infty": "inf", "+\\infty": "inf", "-\\infty": "-inf", "inf": "inf", "-inf": "-inf", "infinity": "inf"}
_INFINITE |= {"oo": "inf", "-oo": "-inf", "-infinity": "-inf", "- \\infty": "-inf", "+ \\infty": "inf"}
_MOST = 20  # intervals of a union


@dataclass(frozen=True)
class Interval:
    """Its ends as they are written (`inf` and `-inf` where there is none), and whether each belongs to it."""

    low: str
    high: str
    low_in: bool
    high_in: bool

    def equals(self, other: "Interval", equal: Callable[[str, str], bool]) -> bool:
        if (self.low_in, self.high_in) != (other.low_in, other.high_in):
            return False
        ends = ((self.low, other.low), (self.high, other.high))
        return all(a == b or ("inf" not in (a.lstrip("-"), b.lstrip("-")) and equal(a, b)) for a, b in ends)


def read(text: str) -> tuple[Interval, ...] | None:
    """The intervals of a tidy text; None = it is something else. `(1, 2)` is one, and a point: which, the caller has to know."""
    text = _BELONGS.sub("", text)
    for pattern, sign in _SIGNS:
        text = pattern.sub(sign, text)
    parts = _UNION.split(text)
    if len(parts) > _MOST:
        return None
    found = [_one(part.strip()) for part in parts]
    return None if None in found else tuple(one for one in found if one is not None)


def certain(text: str) -> bool:
    """Whether a text that `read` takes can be nothing but intervals: not (1, 2), which is a point too, nor [1, 2], a list."""
    brackets = _BRACKETS.fullmatch(text.strip())
    return brackets is None or (brackets[1] == "[") != (brackets[4] == "]") or "infty" in text


def equal_sets(mine: tuple[Interval, ...], theirs: tuple[Interval, ...], equal: Callable[[str, str], bool]) -> bool:
    """Whether the same intervals are in both, in any order. They are not merged: [0, 1] ∪ [1, 2] is not [0, 2]."""
    left = list(theirs)
    for one in mine:
        match = next((other for other in left if one.equals(other, equal)), None)
        if match is None:
            return False
        left.remove(match)
    return not left


def _one(text: str) -> Interval | None:
    if found := _BRACKETS.fullmatch(text):
        return Interval(_end(found[2]), _end(found[3]), found[1] == "[", found[4] == "]")
    found = _CHAIN.fullmatch(text)
    if found is None:
        return None
    a, first, b, second, c = (part and part.strip() for part in found.groups())
    if second is None:  # x < 5 or 5 < x
        if _VARIABLE.fullmatch(a) and not _VARIABLE.fullmatch(b):
            return _half(first, b)
        return _half(_turned(first), a) if _VARIABLE.fullmatch(b) and not _VARIABLE.fullmatch(a) else None
    if not _VARIABLE.fullmatch(b) or (first in "<≤") != (second in "<≤"):
        return None
    if first in ">≥":
        a, first, second, c = c, _turned(second), _turned(first), a
    return Interval(_end(a), _end(c), first == "≤", second == "≤")


def _half(sign: str, end: str) -> Interval:
    """x sign end."""
    if sign in "<≤":
        return Interval("-inf", _end(end), False, sign == "≤")
    return Interval(_end(end), "inf", sign == "≥", False)


def _turned(sign: str) -> str:
    return {"<": ">", ">": "<", "≤": "≥", "≥": "≤"}[sign]


def _end(text: str) -> str:
    return _INFINITE.get(text.strip(), text.strip())
