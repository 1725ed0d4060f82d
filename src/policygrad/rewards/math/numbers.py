"""Numbers as people and models write them, read exactly: separators, fractions, mixed numbers, percent, currency, units.

Nothing is evaluated, only read: a number has at most DIGITS digits and an exponent of at most ±EXPONENT.
"""

import re
from collections import deque
from dataclasses import dataclass
from fractions import Fraction

from policygrad.rewards.math.latex import tidy, words
from policygrad.rewards.math.units import Unit, unit_of

DIGITS = 300
EXPONENT = 300
PLACES = 6  # decimals from which on a rounded number counts as the number, as math-verify's float_rounding

_PLAIN = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_SIGN = r"(?:(?<![\w)\].])(?:[-−][$€£]?|[$€£][-−]))?"  # after a digit or a bracket it is a subtraction
_FIGURE = re.compile(
    rf"{_SIGN}(?:\d{{0,9}}\\[dt]?frac\{{-?\d+\}}\{{\d+\}}|\d{{1,9}}\s\d+/\d+|(?:{_PLAIN})(?:[eE][-+]?\d{{1,4}}(?!\w)|\s?/\s?\d+)?)"
)
_PERCENT = re.compile(r"\s?\\?%")
_TEN = r"\s*(?:\\times|\\cdot|[x×*])\s*10\s*(?:\^|\*\*)\s*\{?\s*(?P<ten>[-+]?\d{1,4})\s*\}?"
_NUMBER = re.compile(
    rf"(?P<sign>[-+]?)\s*[$€£]?\s*(?P<sign2>[-+]?)\s*"
    rf"(?:(?P<whole>\d{{1,9}})?\s*\\frac\{{\s*(?P<num>[-+]?\d+)\s*\}}\{{\s*(?P<den>\d+)\s*\}}"
    rf"|(?P<mixed>\d{{1,9}})\s+(?P<mnum>\d+)\s*/\s*(?P<mden>\d+)"
    rf"|(?P<over>{_PLAIN})\s*/\s*(?P<under>\d+(?:\.\d+)?)"
    rf"|(?P<plain>{_PLAIN})\.?(?:[eE](?P<exp>[-+]?\d{{1,4}})|{_TEN})?)"
    r"(?P<rest>.*)",
    re.DOTALL,
)
_BASED = re.compile(
    r"(?P<sign>-?)\s*(?P<digits>[0-9A-Za-z]{1,60})(?:_\s*(?:\{\s*(?P<braced>\w+)\s*\}|(?P<bare>\d+|[a-z]+)))?"
)
_BASES = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
_CLOCK = re.compile(r"(?P<hour>\d{1,2})(?::(?P<minute>\d{2}))?\s*(?:(?P<half>[ap])\.?\s?m\.?)?", re.IGNORECASE)
_SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_CURRENCY = ("dollars", "dollar", "usd", "euros", "euro", "eur", "pounds", "gbp", "cents", "cent")


@dataclass(frozen=True)
class Quantity:
    """A number with what stands behind it.

    A percent sign or a scale word may be part of the question ("how many percent", "in millions"), so where only one of two
    quantities has it, the figure alone counts too: 50 % is 0.5, and 50; 1.5 million is 1,500,000, and 1.5.
    """

    value: Fraction  # as it is written out: 50 % is 1/2
    bare: Fraction  # the figure alone: 50
    rounded: bool = False  # written with at least PLACES decimals, so perhaps cut off
    unit: Unit | None = None

    @property
    def scaled(self) -> bool:
        return self.value != self.bare

    @property
    def key(self) -> str:
        """Its value, the same text for 0.5, 1/2 and 50 %."""
        return str(self.value)

    def equals(self, other: "Quantity") -> bool:
        """Equal in value; a unit that one of them does not say, or that is not known, is not compared."""
        mine, theirs = self.value, other.value
        if self.unit and other.unit:
            if self.unit.dimensions != other.unit.dimensions:
                return False
            mine, theirs = mine * self.unit.factor, theirs * other.unit.factor
        pairs = [(mine, theirs)]
        if self.scaled != other.scaled:  # one has a sign or a word that the other lacks
            pairs.append((self.bare, other.bare))
        rounded = self.rounded or other.rounded
        return any(a == b or (rounded and round(a, PLACES) == round(b, PLACES)) for a, b in pairs)


def read(text: str) -> Quantity | None:
    """The quantity that a text is, as a whole; None = it is something else."""
    found = _NUMBER.fullmatch(words(tidy(text))) if len(text) <= DIGITS else None
    if found is None or (found["sign"] and found["sign2"]):
        return None
    value = _value(found)
    if value is None:
        return None
    if "-" in (found["sign"], found["sign2"]):
        value = -value
    decimals = (found["plain"] or "").partition(".")[2]
    behind = _behind(found["rest"])
    if behind is None:
        return None
    factor, unit = behind
    return Quantity(value * factor, value, len(decimals) >= PLACES, unit)


def based(text: str) -> tuple[str, str] | None:
    """The digits of a number and its base as 4343_9 has it, "" where it has none; None = it is something else."""
    found = _BASED.fullmatch(words(tidy(text))) if "_" in text or text.strip().isalnum() else None
    if found is None:
        return None
    base = (found["braced"] or found["bare"] or "").lower()
    base = str(_BASES.index(base) + 2) if base in _BASES else base
    figures = any(digit.isdigit() for digit in found["digits"])  # a_{12} is a variable
    number = "_" not in text or (
        figures and base.isdigit() and 2 <= int(base) <= 36 and _fits(found["digits"], int(base))
    )
    return (found["sign"] + found["digits"].upper().lstrip("0"), base) if number else None


def _fits(digits: str, base: int) -> bool:
    return all(int(digit, 36) < base for digit in digits)


def clock(text: str) -> tuple[int, bool] | None:
    """The minute of the day that a text says, 10:30 p.m., and whether it says which half; None = it is something else."""
    found = _CLOCK.fullmatch(words(tidy(text)))
    if found is None:
        return None
    hour, minute, half = int(found["hour"]), int(found["minute"] or 0), (found["half"] or "").lower()
    if minute > 59 or hour > (12 if half else 24) or (half and not hour):
        return None
    return (60 * (hour % 12 + 12 * (half == "p") if half else hour) + minute, bool(half))


def last_match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    """The last place in a text that a pattern fits."""
    return next(iter(deque(pattern.finditer(text), maxlen=1)), None)


def last_number(text: str) -> str | None:
    """The last number in a text as it stands there, with its sign, where that is no subtraction, and a percent sign."""
    found = last_match(_FIGURE, text)
    return found and _shown(text, found)


def first_number(text: str) -> str | None:
    """The first number in a text, as `last_number` shows it."""
    found = _FIGURE.search(text)
    return found and _shown(text, found)


def _shown(text: str, found: re.Match[str]) -> str:
    return found[0] + ("%" if _PERCENT.match(text, found.end()) else "")


def _value(found: re.Match[str]) -> Fraction | None:
    """The magnitude of what was matched; None = a denominator of zero, or an exponent beyond all use."""
    try:
        if found["num"]:
            part = Fraction(int(found["num"]), int(found["den"]))
            return part if found["whole"] is None else int(found["whole"]) + part
        if found["mixed"]:
            return int(found["mixed"]) + Fraction(int(found["mnum"]), int(found["mden"]))
        if found["over"]:
            return Fraction(found["over"].replace(",", "")) / Fraction(found["under"])
        exponent = int(found["exp"] or found["ten"] or 0)
        return (
            Fraction(found["plain"].replace(",", "")) * Fraction(10) ** exponent if abs(exponent) <= EXPONENT else None
        )
    except ZeroDivisionError:
        return None


def _behind(rest: str) -> tuple[Fraction, Unit | None] | None:
    """The factor and the unit that stand behind a number; None = it goes on as a formula."""
    words, factor = rest.strip(), Fraction(1)
    if words.startswith("%") or words.lower().startswith("percent"):
        words, factor = words[1 if words.startswith("%") else len("percent") :].strip(), Fraction(1, 100)
    head, _, tail = words.partition(" ")
    if head.lower() in _SCALES:
        words, factor = tail.strip(), factor * _SCALES[head.lower()]
    if not words or words.lower() in _CURRENCY:
        return factor, None
    glued = rest[:1].isalpha()  # 5x is a product, 5 cm is not
    known, unit = unit_of(words, glued=glued)
    return (factor, unit) if known else None
