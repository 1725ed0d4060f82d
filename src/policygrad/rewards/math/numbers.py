"""Numbers in answers, as exact fractions: separators, exponents, mixed numbers, percent, currency, units.

Nothing is evaluated, only parsed: a number has at most MAX_DIGITS digits and an exponent of at most ±MAX_EXPONENT.
"""

import re
from collections import Counter, deque
from dataclasses import dataclass
from fractions import Fraction

from policygrad.rewards.math.latex import normalise_latex, unwrap_text

MAX_DIGITS = 300
MAX_EXPONENT = 300
ROUNDED_DECIMALS = 6  # from which on a rounded number equals the exact one, as math-verify's float_rounding


@dataclass(frozen=True)
class MeasureUnit:
    """A product of base units (metre, kilogram, second), with a factor."""

    factor: Fraction
    dimensions: frozenset[tuple[str, int]]  # (dimension, power)


@dataclass(frozen=True)
class Quantity:
    """A number with its scale and unit.

    A percent sign or a scale word may be part of the question ("how many percent", "in millions"), so where only one of two
    quantities has it, the figure alone counts too: 50 % is 0.5, and 50; 1.5 million is 1,500,000, and 1.5.
    """

    value: Fraction  # 50 % is 1/2
    bare: Fraction  # the figure alone: 50
    rounded: bool = False  # written with at least ROUNDED_DECIMALS decimals, so perhaps truncated
    unit: MeasureUnit | None = None

    @property
    def key(self) -> str:
        """The value, as the same text for 0.5, 1/2 and 50 %."""
        return str(self.value)

    def equals(self, other: "Quantity") -> bool:
        """Compare values; a unit that only one of them has, or that is unknown, is ignored."""
        mine, theirs = self.value, other.value
        if self.unit and other.unit:
            if self.unit.dimensions != other.unit.dimensions:
                return False
            mine, theirs = mine * self.unit.factor, theirs * other.unit.factor
        pairs = [(mine, theirs)]
        if (self.value != self.bare) != (other.value != other.bare):  # only one has a percent sign or a scale word
            pairs.append((self.bare, other.bare))
        rounded = self.rounded or other.rounded
        return any(a == b or (rounded and round(a, ROUNDED_DECIMALS) == round(b, ROUNDED_DECIMALS)) for a, b in pairs)


_PLAIN = r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
_FRACTION = re.compile(r"\\frac\{\s*([-+]?\d+)\s*\}\{\s*(\d+)\s*\}(?!\.?\d)")
_NUMBER = re.compile(
    rf"(?P<sign>[-+]?)\s*[$€£]?\s*(?P<sign2>[-+]?)\s*"
    rf"(?:(?:(?P<whole>\d{{1,9}})\s+)?(?P<over>{_PLAIN})\s*/\s*(?P<under>\d+(?:\.\d+)?)"
    rf"|(?P<plain>{_PLAIN})\.?(?:e(?P<exponent>[-+]?\d{{1,4}})"
    rf"|\s*(?:\\times|\\cdot|[x×*])\s*10\s*(?:\^|\*\*)\s*\{{?\s*(?P<ten>[-+]?\d{{1,4}})\s*\}}?)?)"
    r"(?P<blank>\s*)(?P<percent>%|percent(?:age)?(?![a-z]))?\s*(?:(?P<scale>thousand|million|billion|trillion)(?!\S))?\s*(?P<unit>.*)",
    re.DOTALL | re.IGNORECASE,
)
_SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}


def parse_quantity(text: str) -> Quantity | None:
    """Parse all of a text as one quantity; None = something else."""
    if len(text) > MAX_DIGITS:
        return None
    match = _NUMBER.fullmatch(_FRACTION.sub(r" \1/\2", unwrap_text(normalise_latex(text))).strip())
    exponent = int(match["exponent"] or match["ten"] or 0) if match else 0
    if match is None or (match["sign"] and match["sign2"]) or abs(exponent) > MAX_EXPONENT:
        return None
    if match["plain"]:
        value = Fraction(match["plain"].replace(",", "")) * Fraction(10) ** exponent
    elif under := Fraction(match["under"]):
        value = int(match["whole"] or 0) + Fraction(match["over"].replace(",", "")) / under
    else:
        return None
    if "-" in (match["sign"], match["sign2"]):
        value = -value
    factor = Fraction(1, 100 if match["percent"] else 1) * _SCALES.get((match["scale"] or "").lower(), 1)
    is_glued = not match["blank"] and not match["percent"] and not match["scale"]  # 5x is a product, 5 cm is not
    is_unit, unit = parse_unit(match["unit"], glued=is_glued) if match["unit"] else (True, None)
    has_decimals = len((match["plain"] or "").partition(".")[2]) >= ROUNDED_DECIMALS
    return Quantity(value * factor, value, has_decimals, unit) if is_unit else None


# What follows a number: units that convert into each other, exactly, and words for what was counted.

_UNITS = {  # names and factor to the base unit
    "length": {"m meter metre": "1", "km kilometer kilometre": "1000", "cm centimeter centimetre": "0.01"}
    | {"mm millimeter millimetre": "0.001", "in inch inches": "0.0254", "ft foot feet": "0.3048", "yd yard": "0.9144"}
    | {"mi mile": "1609.344"},
    "mass": {"kg kilogram": "1", "g gram": "0.001", "mg milligram": "0.000001", "lb lbs": "0.45359237"}
    | {"oz ounce": "0.028349523125"},
    "time": {"s sec second": "1", "min minute": "60", "h hr hour": "3600", "day": "86400", "week": "604800"},
}
_NAMES = {
    name: (dimension, Fraction(factor))
    for dimension, units in _UNITS.items()
    for names, factor in units.items()
    for name in names.split()
}
_NAMES |= {f"{name}s": unit for name, unit in _NAMES.items() if len(name) > 2}
_COMPOUND = {"mph": "mile/hour", "kph": "km/hour", "kmh": "km/hour", "kmph": "km/hour", "mps": "m/s"}
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_PART = re.compile(
    r"(?:(?P<word>square|sq|cubic|cu)\.?\s+)?(?P<name>[a-z.]+?)\.?\s*(?:\^?\s*\{?(?P<power>[23])\}?|\^\s*\{?\s*(?P<high>\d{1,2})\s*\}?)?",
    re.IGNORECASE,
)
_COUNTED = re.compile(  # words, but for those that continue a formula or name another answer
    r"[\s/]*(?:(?!(?:and|base|choose|cos|cot|csc|div|equals|exp|from|gcd|infinity|infty|lcm|log|max|minus|mod|not|over|plus|root|sin|"
    r"sqrt|tan|the|times)(?:[\s/]|\Z))(?:[a-z][a-z'’.-]{2,}|of|an?|in|to)(?:[\s/]+|\Z))+",
    re.IGNORECASE,
)
_MAX_UNIT_LENGTH = 80  # characters


def parse_unit(text: str, *, glued: bool = False) -> tuple[bool, MeasureUnit | None]:
    """Return whether the text after a number is a unit or what was counted, and the unit where it is one that converts.

    glued: no blank separates number and text, so that a single letter is a variable, with or without a power.
    """
    text = text.strip().rstrip("./ ").replace("²", "^2").replace("³", "^3")
    if len(text) > _MAX_UNIT_LENGTH or (glued and len(text.rstrip("^{} 0123456789")) == 1):
        return False, None
    unit = _parse_measure(_COMPOUND.get(text.lower(), text))
    return unit is not None or _COUNTED.fullmatch(text) is not None, unit


def _parse_measure(text: str) -> MeasureUnit | None:
    """Parse `cm^2` or `square feet`, and where there is one, a unit below a stroke."""
    factor, powers = Fraction(1), Counter[str]()
    above, *below = re.split(r"\s+(?:per|an|a)\s+|/", text, maxsplit=1)
    for part, sign in ((above, 1), *((part, -1) for part in below)):
        match = _PART.fullmatch(part.strip())
        if match is None or (match["high"] and len(match["name"]) == 1):  # s^4 is a variable's power
            return None
        # a single letter is a unit only in lower case: M may be millions
        name = match["name"] if len(match["name"]) == 1 else match["name"].lower()
        if name not in _NAMES:
            return None
        dimension, base = _NAMES[name]
        power = sign * int(match["power"] or match["high"] or 1) * _POWERS.get((match["word"] or "").lower(), 1)
        factor *= base**power
        powers[dimension] += power
    return MeasureUnit(factor, frozenset(powers.items()))


# Numbers within a text

_SIGN = r"(?:(?<![\w)\].])(?:[-−][$€£]?|[$€£][-−]))?"  # after a digit or a bracket it is a subtraction
_FIGURE = re.compile(
    rf"{_SIGN}(?:\d{{0,9}}\\[dt]?frac\{{-?\d+\}}\{{\d+\}}|\d{{1,9}}\s\d+/\d+|{_PLAIN}(?:[eE][-+]?\d{{1,4}}(?!\w)|\s?/\s?\d+)?)"
)
_PERCENT = re.compile(r"\s?\\?%")


def find_last_number(text: str) -> str | None:
    """Return the last number in a text as it is written, with its percent sign, and its sign unless that is a subtraction."""
    return _add_percent(text, find_last_match(_FIGURE, text))


def find_first_number(text: str) -> str | None:
    """Return the first number in a text, in the form of `find_last_number`."""
    return _add_percent(text, _FIGURE.search(text))


def find_last_match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    return next(iter(deque(pattern.finditer(text), maxlen=1)), None)


def _add_percent(text: str, match: re.Match[str] | None) -> str | None:
    return match and match[0] + ("%" if _PERCENT.match(text, match.end()) else "")
