"""Rewrites of an answer's LaTeX and typography into one form, as text: nothing is parsed as mathematics here."""

import re

_CHARACTERS = str.maketrans(
    {"−": "-", "–": "-", "\u00a0": " ", "~": " ", "∞": r"\infty ", "°": " degrees"}
    | {"½": " 1/2", "⅓": " 1/3", "⅔": " 2/3", "¼": " 1/4", "¾": " 3/4", "⅕": " 1/5", "⅛": " 1/8"}
)
_SEPARATOR = r"\s*(?:[,;]|(?:[,;]\s*)?\b(?:and|or)\b)\s*"
_BETWEEN_FORMULAS = re.compile(rf"(?<!\\)\${_SEPARATOR}\$|\\\){_SEPARATOR}\\\(")
_DELIMITED = re.compile(
    r"(?:\$\$?((?:[^$\\]|\\.)+)\$\$?|\\\(((?:(?!\\\().)+)\\\)|\\\[((?:(?!\\\[).)+)\\\])[.,;: ]*", re.DOTALL
)
_REWRITES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"(?<=\d)(?:\\[,!;:]|\{,\}\\?!?|,\\!|\u2009|\u202f)(?=\d{3}(?!\d))", ","),  # 1\,234
        (r"(?<!\\)\\(?:[!,;: ]|(?:left|right|displaystyle)(?![A-Za-z]))", " "),
        (r"\\[dtc]frac", r"\\frac"),
        (r"\\([$%])", r"\1"),
        (r"\^(?:\{\\circ\}|\\circ)", " degrees"),
        (r"(\\frac\{[^{}]*\})\s*(\d)", r"\1{\2}"),  # \frac{1}2
        (r"\\frac\s*(\d)\s*(\d)(?!\d)", r"\\frac{\1}{\2}"),  # \frac12
        (r"\\frac\s*(\d)\s*(?=\{)", r"\\frac{\1}"),  # \frac1{2}
    )
)
_TEXT_COMMAND = re.compile(r"\\(?:text|textrm|textbf|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")


def normalise_latex(text: str) -> str:
    """Remove what has no meaning in an answer: delimiters, bold, spacing commands, the final full stop."""
    text = text.translate(_CHARACTERS).strip().strip("*_`").strip()
    text = _BETWEEN_FORMULAS.sub(", ", text)  # $69$, $84$ is the list $69, 84$
    while match := _DELIMITED.fullmatch(text):
        text = match[match.lastindex or 0].strip()
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    return " ".join(text.split()).rstrip(".,;: ").strip("*_` ")


def unwrap_text(text: str) -> str:
    """Replace \\text{…} and similar commands in a normalised text by their contents."""
    return _TEXT_COMMAND.sub(r" \1", text).strip()


_NAMED = re.compile(r"\A\s*[a-zA-Z]\s*=\s*(?=[^=]+\Z)(?!\s*[a-zA-Z]\s*\Z)")  # not x = y
_NAMED_LAST = re.compile(r"\A(?!\s*[a-zA-Z]\s*=)([^=]*[^=\s<>!:])\s*=\s*[a-zA-Z]\s*\Z")
_LABEL = re.compile(r"\\(?:text|textbf|textrm|mathrm|mbox)\s*\{\s*\(?([^{}()]*)\)?\s*\}\Z|\(([A-Za-z])\)\Z")


def drop_name(text: str) -> str:
    """Drop the name of the unknown: x = 5 and 5 = x are 5, and what surrounds a label: \\text{(B)} is B."""
    text = _NAMED_LAST.sub(r"\1", _NAMED.sub("", text))
    match = _LABEL.match(text)
    return (match[1] or match[2] or "").strip() if match else text


def format_formula(text: str) -> str:
    """Format for math-verify: intervals for inequalities, commas for an upright "or", percent signs escaped."""
    text = write_as_intervals(re.sub(r"\\mathrm\{\s*(?:or|and)\s*\}", ", ", text))
    return re.sub(r"(?<!\\)%", r"\\%", text).replace("$", "")


_UNION = re.compile(r"\\cup\b|∪")
_COMPARISONS = {
    "≤": r"\\leqslant\b|\\leq?\b|<=",
    "≥": r"\\geqslant\b|\\geq?\b|>=",
    "<": r"\\lt\b|&lt;",
    ">": r"\\gt\b|&gt;",
}
_FLIPPED = str.maketrans("<>≤≥", "><≥≤")
_VARIABLE = re.compile(r"[a-zA-Z]|\\(?:theta|alpha|beta|lambda|mu)")


def write_as_intervals(text: str) -> str:
    """Rewrite inequalities in one variable, and unions of them, as intervals: x ≥ 5 is [5, ∞), and 1 < x ≤ 3 is (1, 3]."""
    return r" \cup ".join(map(_write_as_interval, _UNION.split(text)))


def _write_as_interval(text: str) -> str:
    signed = text
    for sign, pattern in _COMPARISONS.items():
        signed = re.sub(pattern, sign, signed)
    parts = [part.strip() for part in re.split("([<>≤≥])", signed)]
    if {*parts[1::2]} <= {">", "≥"}:
        parts = [part.translate(_FLIPPED) for part in reversed(parts)]
    if len(parts) == 3:  # x < 5 is -∞ < x < 5, and 5 < x is 5 < x < ∞
        parts = [r"-\infty", "<", *parts] if _VARIABLE.fullmatch(parts[0]) else [*parts, "<", r"\infty"]
    if len(parts) != 5 or [bool(_VARIABLE.fullmatch(part)) for part in parts[::2]] != [False, True, False]:
        return text
    low, left, _, right, high = parts
    if not {left, right} <= {"<", "≤"}:
        return text
    return f"{'(' if left == '<' else '['}{low}, {high}{')' if right == '<' else ']'}"
