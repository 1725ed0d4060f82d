"""What stands behind a number: units that convert into each other, exactly, and words that say only what was counted."""

import re
from dataclasses import dataclass
from fractions import Fraction

_INCH = Fraction(254, 10_000)  # metres
_POUND = Fraction(45_359_237, 100_000_000)  # kilograms

_KNOWN: dict[str, tuple[tuple[str, ...], Fraction]] = {
    "m": (("m", "meter", "metre"), Fraction(1)),
    "km": (("km", "kilometer", "kilometre"), Fraction(1000)),
    "cm": (("cm", "centimeter", "centimetre"), Fraction(1, 100)),
    "mm": (("mm", "millimeter", "millimetre"), Fraction(1, 1000)),
    "inch": (("inch", "inches", "in"), _INCH),
    "foot": (("ft", "foot", "feet"), 12 * _INCH),
    "yard": (("yd", "yard"), 36 * _INCH),
    "mile": (("mi", "mile"), 63_360 * _INCH),
    "kg": (("kg", "kilogram"), Fraction(1)),
    "g": (("g", "gram"), Fraction(1, 1000)),
    "mg": (("mg", "milligram"), Fraction(1, 1_000_000)),
    "pound": (("lb", "lbs"), _POUND),
    "ounce": (("oz", "ounce"), _POUND / 16),
    "s": (("s", "sec", "second"), Fraction(1)),
    "min": (("min", "minute"), Fraction(60)),
    "h": (("h", "hr", "hour"), Fraction(3600)),
    "day": (("day",), Fraction(86_400)),
    "week": (("week",), Fraction(604_800)),
}
_BASE = {
    **dict.fromkeys(("m", "km", "cm", "mm", "inch", "foot", "yard", "mile"), "length"),
    **dict.fromkeys(("kg", "g", "mg", "pound", "ounce"), "mass"),
    **dict.fromkeys(("s", "min", "h", "day", "week"), "time"),
}
_COMPOUND = {"mph": "mile/hour", "kph": "km/hour", "kmh": "km/hour", "kmph": "km/hour", "mps": "m/s"}
_POWERS = {"square": 2, "sq": 2, "sq.": 2, "cubic": 3, "cu": 3}
_SUFFIX = re.compile(
    r"(?P<name>[A-Za-z.]+?)\.?\s*(?:\^?\s*\{?(?P<power>[23])\}?|\^\s*\{?\s*(?P<high>\d{1,2})\s*\}?|(?P<glyph>[²³]))?"
)
_WORD = re.compile(r"[A-Za-z][A-Za-z'’.-]{2,}")
_FORMULA = re.compile(
    r"(?:and|base|choose|cos|cot|csc|div|equals|exp|from|gcd|infinity|infty|lcm|log|max|"
    r"minus|mod|not|over|plus|root|sin|sqrt|tan|the|times)",
    re.IGNORECASE,
)  # words that go on with a formula or name another answer
_SMALL = ("of", "a", "an", "in", "to")
_MOST = 80  # characters


@dataclass(frozen=True)
class Unit:
    """So many of the base units (metre, kilogram, second), and which they are."""

    factor: Fraction
    dimensions: tuple[tuple[str, int], ...]


def unit_of(words: str, *, glued: bool = False) -> tuple[bool, Unit | None]:
    """Whether the words behind a number are a unit or say what was counted, and the unit where it is one that converts.

    glued: no blank is between number and words, so that a single letter is a variable, with or without a power.
    """
    words = words.strip().rstrip(".")
    if len(words) > _MOST or (glued and len(words.rstrip("^{} 0123456789²³")) == 1):
        return False, None
    text = _COMPOUND.get(words.lower(), words)
    above, _, below = re.sub(r"\s+(?:per|an|a)\s+", "/", text).partition("/")
    unit = _product(above, below)
    if unit is not None:
        return True, unit
    counted = [word for word in re.split(r"[\s/]+", words) if word]
    said = all((_WORD.fullmatch(word) or word.lower() in _SMALL) and not _FORMULA.fullmatch(word) for word in counted)
    return bool(counted) and said, None


def _product(above: str, below: str) -> Unit | None:
    parts = [(above, 1), *([(below, -1)] if below else [])]
    factor, dimensions = Fraction(1), dict[str, int]()
    for text, sign in parts:
        found = _single(text)
        if found is None:
            return None
        name, power = found
        factor *= _KNOWN[name][1] ** (sign * power)
        dimensions[_BASE[name]] = dimensions.get(_BASE[name], 0) + sign * power
    return Unit(factor, tuple(sorted(dimensions.items())))


def _single(text: str) -> tuple[str, int] | None:
    """`square feet`, `cm^2` as the unit's name and its power."""
    words, power = text.split(), 1
    if len(words) == 2 and words[0].lower() in _POWERS:
        words, power = words[1:], _POWERS[words[0].lower()]
    found = _SUFFIX.fullmatch(" ".join(words))
    if found is None or (name := _named(found["name"])) is None or (found["high"] and len(found["name"]) == 1):
        return None  # s^4 is a variable's power
    said = int(found["power"] or found["high"] or {"²": 2, "³": 3}.get(found["glyph"] or "", 1))
    return name, power * said


def _named(word: str) -> str | None:
    """A single letter is a unit in small only: M may be millions."""
    return _NAMES.get(word if len(word) == 1 else word.lower())


_NAMES = {name: unit for unit, (names, _) in _KNOWN.items() for name in names}
_NAMES |= {f"{name}s": unit for name, unit in list(_NAMES.items()) if len(name) > 2}
