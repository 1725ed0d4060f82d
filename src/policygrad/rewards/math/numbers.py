"""Numbers as people and models write them, read exactly: separators, fractions, mixed numbers, percent, currency, units.

Nothing is evaluated, only read: a number has at most DIGITS digits and an exponent of at most ±EXPONENT.
"""

import re
from collections import deque
from dataclasses import dataclass
from fractions import Fraction

# What stands behind a number: units that convert into each other, exactly, and words that say only what was counted.

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
_OPERATOR = re.compile(
    r"(?:and|base|choose|cos|cot|csc|div|equals|exp|from|gcd|infinity|infty|lcm|log|max|"
    r"minus|mod|not|over|plus|root|sin|sqrt|tan|the|times)",
    re.IGNORECASE,
)  # words that go on with a formula or name another answer
_SMALL = ("of", "a", "an", "in", "to")
_MOST = 80  # characters


@dataclass(frozen=True)
class MeasureUnit:
    """So many of the base units (metre, kilogram, second), and which they are."""

    factor: Fraction
    dimensions: tuple[tuple[str, int], ...]


def parse_unit(words: str, *, glued: bool = False) -> tuple[bool, MeasureUnit | None]:
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
    said = all((_WORD.fullmatch(word) or word.lower() in _SMALL) and not _OPERATOR.fullmatch(word) for word in counted)
    return bool(counted) and said, None


def _product(above: str, below: str) -> MeasureUnit | None:
    parts = [(above, 1), *([(below, -1)] if below else [])]
    factor, dimensions = Fraction(1), dict[str, int]()
    for text, sign in parts:
        found = _single(text)
        if found is None:
            return None
        name, power = found
        factor *= _KNOWN[name][1] ** (sign * power)
        dimensions[_BASE[name]] = dimensions.get(_BASE[name], 0) + sign * power
    return MeasureUnit(factor, tuple(sorted(dimensions.items())))


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


# LaTeX and typography of an answer brought to one form, as text: nothing is read as mathematics here.

_DELIMITERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))
_GLYPHS = {"½": (1, 2), "⅓": (1, 3), "⅔": (2, 3), "¼": (1, 4), "¾": (3, 4), "⅕": (1, 5), "⅛": (1, 8)}
_GLYPH = re.compile("[" + "".join(_GLYPHS) + "]")
_WORDS = re.compile(r"\\(?:text|textrm|textbf|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
_MARKS = str.maketrans({"−": "-", "–": "-", "\u00a0": " ", "~": " ", "∞": r"\infty "})
_SPACED = re.compile(r"(?<!\\)\\(?:[!,;: ]|(?:left|right|displaystyle)(?![A-Za-z]))")
_JOINED = re.compile(r"(?<=\d)(?:\\[,!;:]|\{,\}\\?!?|,\\!|\u2009|\u202f)(?=\d{3}(?!\d))")
_SHORT_FRACTION = re.compile(r"\\frac\s*(\d)\s*(\d)(?!\d)|\\frac\s*(\d)\s*(?=\{)|\\frac(\{[^{}]*\})\s*(\d)")
_FORMULA = r"(?:(?<!\\)\$[^$]{1,300}(?<!\\)\$|\\\((?:[^\\]|\\[^)]){1,300}\\\))"
_LISTED = re.compile(rf"{_FORMULA}(?:\s*(?:[,;]|(?:[,;]\s*)?\b(?:and|or)\b)\s*{_FORMULA}){{1,50}}")
_BETWEEN = re.compile(r"(?:(?<=\$)|(?<=\\\)))\s*(?:[,;]|(?:[,;]\s*)?\b(?:and|or)\b)\s*(?=\$|\\\()")


def normalise_latex(text: str) -> str:
    """An answer without what has no meaning: delimiters, bold, spacing commands, the full stop at its end."""
    text = text.translate(_MARKS).strip().strip("*_`").strip()
    if _LISTED.fullmatch(listed := text.rstrip(".,;: ")):  # $69$, $84$
        text = re.sub(r"(?<!\\)\$|\\[()]", "", _BETWEEN.sub(", ", listed))
    for left, right in _DELIMITERS:
        inner = text[len(left) : len(text) - len(right)]
        bare = left not in inner.replace(r"\$", "")
        if inner and bare and text.startswith(left) and text.endswith(right):
            text = inner
    text = _JOINED.sub(lambda found: ",", text)
    text = _SPACED.sub(" ", text)
    text = text.replace(r"\dfrac", r"\frac").replace(r"\tfrac", r"\frac").replace(r"\cfrac", r"\frac")
    text = text.replace(r"\$", "$").replace(r"\%", "%").replace(r"^{\circ}", " degrees").replace(r"^\circ", " degrees")
    text = _SHORT_FRACTION.sub(_braced, text.replace("°", " degrees"))
    text = _GLYPH.sub(lambda found: " " + "/".join(map(str, _GLYPHS[found[0]])), text)
    return " ".join(text.split()).rstrip(".,;: ").strip("*_` ")


def unwrap_text(text: str) -> str:
    """A tidy text with what stands in \\text{…} and its kin as plain words."""
    return _WORDS.sub(r" \1", text).strip()


def _braced(found: re.Match[str]) -> str:
    """\\frac12, \\frac1{2} and \\frac{1}2 with all their braces."""
    if found[1]:
        return rf"\frac{{{found[1]}}}{{{found[2]}}}"
    return rf"\frac{{{found[3]}}}" if found[3] else rf"\frac{found[4]}{{{found[5]}}}"


MAX_DIGITS = 300
MAX_EXPONENT = 300
ROUNDED_DECIMALS = 6  # decimals from which on a rounded number counts as the number, as math-verify's float_rounding

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
    unit: MeasureUnit | None = None

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
        return any(a == b or (rounded and round(a, ROUNDED_DECIMALS) == round(b, ROUNDED_DECIMALS)) for a, b in pairs)


def parse_quantity(text: str) -> Quantity | None:
    """The quantity that a text is, as a whole; None = it is something else."""
    found = _NUMBER.fullmatch(unwrap_text(normalise_latex(text))) if len(text) <= MAX_DIGITS else None
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
    return Quantity(value * factor, value, len(decimals) >= ROUNDED_DECIMALS, unit)


def parse_based_number(text: str) -> tuple[str, str] | None:
    """The digits of a number and its base as 4343_9 has it, "" where it has none; None = it is something else."""
    found = _BASED.fullmatch(unwrap_text(normalise_latex(text))) if "_" in text or text.strip().isalnum() else None
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


def parse_clock_time(text: str) -> tuple[int, bool] | None:
    """The minute of the day that a text says, 10:30 p.m., and whether it says which half; None = it is something else."""
    found = _CLOCK.fullmatch(unwrap_text(normalise_latex(text)))
    if found is None:
        return None
    hour, minute, half = int(found["hour"]), int(found["minute"] or 0), (found["half"] or "").lower()
    if minute > 59 or hour > (12 if half else 24) or (half and not hour):
        return None
    return (60 * (hour % 12 + 12 * (half == "p") if half else hour) + minute, bool(half))


def find_last_match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    """The last place in a text that a pattern fits."""
    return next(iter(deque(pattern.finditer(text), maxlen=1)), None)


def find_last_number(text: str) -> str | None:
    """The last number in a text as it stands there, with its sign, where that is no subtraction, and a percent sign."""
    found = find_last_match(_FIGURE, text)
    return found and _shown(text, found)


def find_first_number(text: str) -> str | None:
    """The first number in a text, as `find_last_number` shows it."""
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
            Fraction(found["plain"].replace(",", "")) * Fraction(10) ** exponent
            if abs(exponent) <= MAX_EXPONENT
            else None
        )
    except ZeroDivisionError:
        return None


def _behind(rest: str) -> tuple[Fraction, MeasureUnit | None] | None:
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
    known, unit = parse_unit(words, glued=glued)
    return (factor, unit) if known else None
