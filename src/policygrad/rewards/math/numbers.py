"""Numbers in answers: fractions, separators, exponents, mixed numbers, percent, currency, units.

Nothing is evaluated, only parsed: a number has at most MAX_DIGITS digits and an exponent of at most ±MAX_EXPONENT.
"""

import re
from collections import deque
from dataclasses import dataclass
from fractions import Fraction

# What follows a number: units that convert into each other, exactly, and words for what was counted.

_INCH = Fraction(254, 10_000)  # metres
_POUND = Fraction(45_359_237, 100_000_000)  # kilograms

_UNITS = (  # names, dimension, factor to its base unit
    (("m", "meter", "metre"), "length", Fraction(1)),
    (("km", "kilometer", "kilometre"), "length", Fraction(1000)),
    (("cm", "centimeter", "centimetre"), "length", Fraction(1, 100)),
    (("mm", "millimeter", "millimetre"), "length", Fraction(1, 1000)),
    (("inch", "inches", "in"), "length", _INCH),
    (("ft", "foot", "feet"), "length", 12 * _INCH),
    (("yd", "yard"), "length", 36 * _INCH),
    (("mi", "mile"), "length", 63_360 * _INCH),
    (("kg", "kilogram"), "mass", Fraction(1)),
    (("g", "gram"), "mass", Fraction(1, 1000)),
    (("mg", "milligram"), "mass", Fraction(1, 1_000_000)),
    (("lb", "lbs"), "mass", _POUND),
    (("oz", "ounce"), "mass", _POUND / 16),
    (("s", "sec", "second"), "time", Fraction(1)),
    (("min", "minute"), "time", Fraction(60)),
    (("h", "hr", "hour"), "time", Fraction(3600)),
    (("day",), "time", Fraction(86_400)),
    (("week",), "time", Fraction(604_800)),
)
_NAMES = {name: (dimension, factor) for names, dimension, factor in _UNITS for name in names}
_NAMES |= {f"{name}s": unit for name, unit in list(_NAMES.items()) if len(name) > 2}
_COMPOUND = {"mph": "mile/hour", "kph": "km/hour", "kmh": "km/hour", "kmph": "km/hour", "mps": "m/s"}
_POWERS = {"square": 2, "sq": 2, "sq.": 2, "cubic": 3, "cu": 3}
_SUFFIX = re.compile(
    r"(?P<name>[A-Za-z.]+?)\.?\s*(?:\^?\s*\{?(?P<power>[23])\}?|\^\s*\{?\s*(?P<high>\d{1,2})\s*\}?|(?P<glyph>[²³]))?"
)
_WORD = re.compile(r"[A-Za-z][A-Za-z'’.-]{2,}")
# Words that continue a formula or name another answer.
_OPERATOR = re.compile(
    r"(?:and|base|choose|cos|cot|csc|div|equals|exp|from|gcd|infinity|infty|lcm|log|max|minus|mod|not|over|plus|root|sin|"
    r"sqrt|tan|the|times)",
    re.IGNORECASE,
)
_SMALL_WORDS = ("of", "a", "an", "in", "to")
_MAX_UNIT_LENGTH = 80  # characters


@dataclass(frozen=True)
class MeasureUnit:
    """A product of base units (metre, kilogram, second), with a factor."""

    factor: Fraction
    dimensions: tuple[tuple[str, int], ...]  # (dimension, power)


def parse_unit(text: str, *, glued: bool = False) -> tuple[bool, MeasureUnit | None]:
    """Return whether the text after a number is a unit or what was counted, and the unit where it is one that converts.

    glued: no blank separates number and text, so that a single letter is a variable, with or without a power.
    """
    text = text.strip().rstrip(".")
    if len(text) > _MAX_UNIT_LENGTH or (glued and len(text.rstrip("^{} 0123456789²³")) == 1):
        return False, None
    spelled_out = _COMPOUND.get(text.lower(), text)
    above, _, below = re.sub(r"\s+(?:per|an|a)\s+", "/", spelled_out).partition("/")
    unit = _parse_quotient(above, below)
    if unit is not None:
        return True, unit
    counted = [word for word in re.split(r"[\s/]+", text) if word]
    plain = all(
        (_WORD.fullmatch(word) or word.lower() in _SMALL_WORDS) and not _OPERATOR.fullmatch(word) for word in counted
    )
    return bool(counted) and plain, None


def _parse_quotient(above: str, below: str) -> MeasureUnit | None:
    """Parse `cm^2` or `square feet` above, and where there is one, a unit below."""
    factor, dimensions = Fraction(1), dict[str, int]()
    for text, sign in [(above, 1), *([(below, -1)] if below else [])]:
        parts, power = text.split(), sign
        if len(parts) == 2 and parts[0].lower() in _POWERS:
            parts, power = parts[1:], sign * _POWERS[parts[0].lower()]
        match = _SUFFIX.fullmatch(" ".join(parts))
        if match is None or (match["high"] and len(match["name"]) == 1):  # s^4 is a variable's power
            return None
        # a single letter is a unit only in lower case: M may be millions
        unit = _NAMES.get(match["name"] if len(match["name"]) == 1 else match["name"].lower())
        if unit is None:
            return None
        dimension, base = unit
        power *= int(match["power"] or match["high"] or {"²": 2, "³": 3}.get(match["glyph"] or "", 1))
        factor *= base**power
        dimensions[dimension] = dimensions.get(dimension, 0) + power
    return MeasureUnit(factor, tuple(sorted(dimensions.items())))


# LaTeX and typography of an answer in one form, as text: nothing is parsed as mathematics here.

_DELIMITERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))
_GLYPHS = {"½": (1, 2), "⅓": (1, 3), "⅔": (2, 3), "¼": (1, 4), "¾": (3, 4), "⅕": (1, 5), "⅛": (1, 8)}
_GLYPH = re.compile("[" + "".join(_GLYPHS) + "]")
_TEXT_COMMAND = re.compile(r"\\(?:text|textrm|textbf|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
_MARKS = str.maketrans({"−": "-", "–": "-", "\u00a0": " ", "~": " ", "∞": r"\infty "})
_SPACING = re.compile(r"(?<!\\)\\(?:[!,;: ]|(?:left|right|displaystyle)(?![A-Za-z]))")
_THOUSANDS = re.compile(r"(?<=\d)(?:\\[,!;:]|\{,\}\\?!?|,\\!|\u2009|\u202f)(?=\d{3}(?!\d))")
_SHORT_FRACTIONS = (
    (re.compile(r"\\frac(\{[^{}]*\})\s*(\d)"), r"\\frac\1{\2}"),  # \frac{1}2
    (re.compile(r"\\frac\s*(\d)\s*(\d)(?!\d)"), r"\\frac{\1}{\2}"),  # \frac12
    (re.compile(r"\\frac\s*(\d)\s*(?=\{)"), r"\\frac{\1}"),  # \frac1{2}
)
_FORMULA = r"(?:(?<!\\)\$[^$]{1,300}(?<!\\)\$|\\\((?:[^\\]|\\[^)]){1,300}\\\))"
_FORMULA_LIST = re.compile(rf"{_FORMULA}(?:\s*(?:[,;]|(?:[,;]\s*)?\b(?:and|or)\b)\s*{_FORMULA}){{1,50}}")
_SEPARATOR = re.compile(r"(?:(?<=\$)|(?<=\\\)))\s*(?:[,;]|(?:[,;]\s*)?\b(?:and|or)\b)\s*(?=\$|\\\()")


def normalise_latex(text: str) -> str:
    """Remove what has no meaning in an answer: delimiters, bold, spacing commands, the final full stop."""
    text = text.translate(_MARKS).strip().strip("*_`").strip()
    if _FORMULA_LIST.fullmatch(formulas := text.rstrip(".,;: ")):  # $69$, $84$
        text = re.sub(r"(?<!\\)\$|\\[()]", "", _SEPARATOR.sub(", ", formulas))
    for left, right in _DELIMITERS:
        inner = text[len(left) : len(text) - len(right)]
        bare = left not in inner.replace(r"\$", "")
        if inner and bare and text.startswith(left) and text.endswith(right):
            text = inner
    text = _THOUSANDS.sub(lambda match: ",", text)
    text = _SPACING.sub(" ", text)
    text = text.replace(r"\dfrac", r"\frac").replace(r"\tfrac", r"\frac").replace(r"\cfrac", r"\frac")
    text = text.replace(r"\$", "$").replace(r"\%", "%").replace(r"^{\circ}", " degrees").replace(r"^\circ", " degrees")
    text = text.replace("°", " degrees")
    for pattern, complete in _SHORT_FRACTIONS:
        text = pattern.sub(complete, text)
    text = _GLYPH.sub(lambda match: " " + "/".join(map(str, _GLYPHS[match[0]])), text)
    return " ".join(text.split()).rstrip(".,;: ").strip("*_` ")


def unwrap_text(text: str) -> str:
    """Replace \\text{…} and similar commands in a normalised text by their contents."""
    return _TEXT_COMMAND.sub(r" \1", text).strip()


MAX_DIGITS = 300
MAX_EXPONENT = 300
ROUNDED_DECIMALS = 6  # from which on a rounded number equals the exact one, as math-verify's float_rounding

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
    r"(?P<suffix>.*)",
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
    """A number with its scale and unit.

    A percent sign or a scale word may be part of the question ("how many percent", "in millions"), so where only one of two
    quantities has it, the figure alone counts too: 50 % is 0.5, and 50; 1.5 million is 1,500,000, and 1.5.
    """

    value: Fraction  # 50 % is 1/2
    bare: Fraction  # the figure alone: 50
    rounded: bool = False  # written with at least ROUNDED_DECIMALS decimals, so perhaps truncated
    unit: MeasureUnit | None = None

    @property
    def scaled(self) -> bool:
        return self.value != self.bare

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
        if self.scaled != other.scaled:  # one has a percent sign or a scale word that the other lacks
            pairs.append((self.bare, other.bare))
        rounded = self.rounded or other.rounded
        return any(a == b or (rounded and round(a, ROUNDED_DECIMALS) == round(b, ROUNDED_DECIMALS)) for a, b in pairs)


def parse_quantity(text: str) -> Quantity | None:
    """Parse all of a text as one quantity; None = something else."""
    match = _NUMBER.fullmatch(unwrap_text(normalise_latex(text))) if len(text) <= MAX_DIGITS else None
    if match is None or (match["sign"] and match["sign2"]):
        return None
    try:
        if match["num"]:
            value = int(match["whole"] or 0) + Fraction(int(match["num"]), int(match["den"]))
        elif match["mixed"]:
            value = int(match["mixed"]) + Fraction(int(match["mnum"]), int(match["mden"]))
        elif match["over"]:
            value = Fraction(match["over"].replace(",", "")) / Fraction(match["under"])
        elif abs(exponent := int(match["exp"] or match["ten"] or 0)) <= MAX_EXPONENT:
            value = Fraction(match["plain"].replace(",", "")) * Fraction(10) ** exponent
        else:
            return None
    except ZeroDivisionError:
        return None
    if "-" in (match["sign"], match["sign2"]):
        value = -value
    decimals = (match["plain"] or "").partition(".")[2]
    # what follows: a percent sign, a scale word, then a unit; anything else continues a formula
    text, factor = match["suffix"].strip(), Fraction(1)
    unit: MeasureUnit | None = None
    if text.startswith("%") or text.lower().startswith("percent"):
        text, factor = text[1 if text.startswith("%") else len("percent") :].strip(), Fraction(1, 100)
    head, _, tail = text.partition(" ")
    if head.lower() in _SCALES:
        text, factor = tail.strip(), factor * _SCALES[head.lower()]
    if text and text.lower() not in _CURRENCY:
        is_unit, unit = parse_unit(text, glued=match["suffix"][:1].isalpha())  # 5x is a product, 5 cm is not
        if not is_unit:
            return None
    return Quantity(value * factor, value, len(decimals) >= ROUNDED_DECIMALS, unit)


def parse_based_number(text: str) -> tuple[str, str] | None:
    """Return the digits and the base of a number such as 4343_9, "" where it has no base; None = something else."""
    match = _BASED.fullmatch(unwrap_text(normalise_latex(text))) if "_" in text or text.strip().isalnum() else None
    if match is None:
        return None
    base = (match["braced"] or match["bare"] or "").lower()
    base = str(_BASES.index(base) + 2) if base in _BASES else base
    digits = match["digits"]
    if "_" in text:
        has_figures = any(digit.isdigit() for digit in digits)  # a_{12} is a variable
        valid_base = base.isdigit() and 2 <= int(base) <= 36
        if not has_figures or not valid_base or any(int(digit, 36) >= int(base) for digit in digits):
            return None
    return match["sign"] + digits.upper().lstrip("0"), base


def parse_clock_time(text: str) -> tuple[frozenset[int], bool] | None:
    """Return the minutes of the day that a time such as 10:30 p.m. may mean, and whether it has a.m. or p.m.; None = no time.

    Without them an hour from 1 to 12 may mean either half of the day.
    """
    match = _CLOCK.fullmatch(unwrap_text(normalise_latex(text)))
    if match is None:
        return None
    hour, minute, half = int(match["hour"]), int(match["minute"] or 0), (match["half"] or "").lower()
    if minute > 59 or hour > (12 if half else 24) or (half and not hour):
        return None
    if not 1 <= hour <= 12:
        return frozenset({60 * hour + minute}), False
    return frozenset(60 * (hour % 12 + 12 * (each == "p")) + minute for each in half or "ap"), bool(half)


def find_last_match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    return next(iter(deque(pattern.finditer(text), maxlen=1)), None)


def find_last_number(text: str) -> str | None:
    """Return the last number in a text as it is written, with its percent sign, and its sign unless that is a subtraction."""
    match = find_last_match(_FIGURE, text)
    return match and _add_percent(text, match)


def find_first_number(text: str) -> str | None:
    """Return the first number in a text, in the form of `find_last_number`."""
    match = _FIGURE.search(text)
    return match and _add_percent(text, match)


def _add_percent(text: str, match: re.Match[str]) -> str:
    return match[0] + ("%" if _PERCENT.match(text, match.end()) else "")
