"""The rewards `math` and `gsm8k`: answers compared by value, as text, as numbers, and else by math-verify."""

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self

from policygrad.errors import ConfigError
from policygrad.rewards.math.extraction import (
    MAX_ANSWER_LENGTH,
    POLICIES,
    extract,
    extract_boxed,
    extract_last_formula,
    is_prose,
    parse_references,
)
from policygrad.rewards.math.formulas import check_math_verify_installed, compare_formulas
from policygrad.rewards.math.numbers import (
    Quantity,
    find_first_number,
    find_last_number,
    normalise_latex,
    parse_based_number,
    parse_clock_time,
    parse_quantity,
)


@dataclass(frozen=True)
class AnswerReward:
    """Scores the answer in a completion. policies: where it is looked for (extraction.POLICIES); the first whose mark is present
    decides."""

    policies: tuple[str, ...]

    def __post_init__(self) -> None:
        reward, names = type(self).__name__.lower(), ", ".join(POLICIES)
        if not self.policies:
            raise ConfigError(f"reward {reward!r}: no extraction policy is given; choose from {names}")
        for name in self.policies:
            if name not in POLICIES:
                raise ConfigError(f"reward {reward!r}: unknown extraction policy {name!r}; choose from {names}")

    @classmethod
    def from_options(cls, options: str) -> Self:
        """Parse `boxed,phrase`. Raises ConfigError."""
        return cls(tuple(name.strip() for name in options.split(",") if name.strip()))

    def __call__(self, prompts: Any, completions: Sequence[str], answer: Sequence[Any], **_: Any) -> list[float | None]:
        return [self.score(text, right) for text, right in zip(completions, answer, strict=True)]

    def score(self, completion: str, answer: Any) -> float | None:
        """Score one completion; None where the row has no answer."""
        raise NotImplementedError


@dataclass(frozen=True)
class Math(AnswerReward):
    """Score 1.0 if the completion's answer equals the column `answer` in value, else 0.0; None where that is null or empty.

    `answer` is a number, LaTeX (MATH), a worked solution that ends in `#### number` or `\\boxed{…}`, or a list of these, of which
    one has to be met. An answer of more than MAX_ANSWER_LENGTH characters, or that cannot be parsed, scores 0.0.
    """

    policies: tuple[str, ...] = ("answer", "hashes", "boxed", "phrase", "line", "formula", "last")

    def reward_prepare(self) -> None:
        """Import math-verify (about half a second) before the first sample's timeout starts."""
        check_math_verify_installed()
        logging.getLogger("math_verify").setLevel(logging.CRITICAL)
        compare_formulas(r"\frac{1}{2}", "0.5")

    def score(self, completion: str, answer: Any) -> float | None:
        references = parse_references(answer)
        if not references:
            return None
        given = self._extract(completion)
        return float(given is not None and any(compare_answers(reference, given) for reference in references))

    def extract_answer(self, completion: str) -> str | None:
        """Return the answer by which completions vote: a number by its value, a formula by its letters; None = there is none."""
        given = self._extract(completion)
        if given is None:
            return None
        plain, _ = _normalise(given)
        quantity = parse_quantity(plain)
        return quantity.key if quantity is not None else _squeeze(plain) or None

    def _extract(self, completion: str) -> str | None:
        given = extract(completion, self.policies)
        return strip_wrappers(given) if given and len(given) <= MAX_ANSWER_LENGTH else None


math = Math()


@dataclass(frozen=True)
class Gsm8k(AnswerReward):
    """Score 1.0 if the completion's number equals the column `answer`, else 0.0; None where that is null or not a number.

    `answer` is a number, a text with one, a worked solution that ends in `#### number`, or a list of these, of which one has to
    be met. Numbers are compared as exact fractions, however they are written; what was counted ("18 eggs") is ignored.
    """

    policies: tuple[str, ...] = ("answer", "hashes", "boxed", "phrase", "last")

    def score(self, completion: str, answer: Any) -> float | None:
        references = [number for text in parse_references(answer) if (number := parse_quantity(text)) is not None]
        if not references:
            return None
        number = self._extract_number(completion)
        return float(number is not None and any(reference.equals(number) for reference in references))

    def extract_answer(self, completion: str) -> str | None:
        """Return the number by which completions vote; None = there is none."""
        number = self._extract_number(completion)
        return None if number is None else number.key

    def _extract_number(self, completion: str) -> Quantity | None:
        """Return the number that the answer is, or else the first one after its last equals sign; None for a formula."""
        given = extract(completion, self.policies) or ""
        if (quantity := parse_quantity(given)) is not None:
            return quantity
        right_side = normalise_latex(given).rpartition("=")[2]
        figure = None if _FORMULA.search(right_side) else find_first_number(right_side)
        return parse_quantity(figure) if figure else None


gsm8k = Gsm8k()
_FORMULA = re.compile(r"[\\^_*+{}]|\d\s*[-/]\s*[\d(a-z]|\d[a-z]\b|[(\[]\s*[-\d.]+\s*,")
_SEVERAL = re.compile(r"\s*(?:,\s*)?(?:\bor\b|\band\b|\\(?:text|mathrm)\{\s*(?:or|and)\s*\})\s*")
_NAMED = re.compile(r"\A\s*[a-zA-Z]\s*=\s*(?=[^=]+\Z)(?!\s*[a-zA-Z]\s*\Z)")  # not x = y
_NAMED_LAST = re.compile(r"\A(?!\s*[a-zA-Z]\s*=)([^=]*[^=\s<>!:])\s*=\s*[a-zA-Z]\s*\Z")
_WORD = re.compile(r"(?!sin|cos|tan|log|sqrt|inf)[A-Za-z][a-z]{3,}")  # Evelyn, not abc
_NUMERAL = re.compile(r"\d[\d.,]*")
_TEXT = re.compile(r"\\(?:text|textbf|textrm|mathrm|mbox)\s*\{\s*\(?([^{}()]*)\)?\s*\}\Z|\(([A-Za-z])\)\Z")


def strip_wrappers(text: str) -> str:
    """Reduce an extracted passage to its box, the last formula of a sentence, or the one number in it."""
    if (boxed := extract_boxed(text)) is not None:
        return boxed
    normalised = normalise_latex(text)
    if "$" in normalised.replace(r"\$", "") and (formula := extract_last_formula(text)) is not None:
        return formula
    if parse_quantity(text) is None and is_prose(normalised) and "\\" not in normalised:
        figures = _NUMERAL.findall(normalised)
        if len(figures) == 1 and (figure := find_last_number(normalised)) is not None:
            return figure
    return text


def compare_answers(reference: str, given: str) -> bool:
    """Return whether an answer equals a reference in value. Both are LaTeX or plain, with or without delimiters."""
    (reference, is_word), (given, given_is_word) = _normalise(reference), _normalise(given)
    if not given:
        return False
    if reference == given or _squeeze(reference) == _squeeze(given):
        return True
    if is_word or given_is_word:
        return False
    # numbers with bases, 4343_9: by digits and, where both have one, base
    mine, theirs = parse_based_number(reference), parse_based_number(given)
    if (mine and mine[1]) or (theirs and theirs[1]):
        if mine and theirs:
            return mine[0] == theirs[0] and (mine[1] == theirs[1] or not (mine[1] and theirs[1]))
        if "_" in reference and "_" in given:
            return False
    # times of day, where one has a.m. or p.m.
    time, given_time = parse_clock_time(reference), parse_clock_time(given)
    if (time and time[1]) or (given_time and given_time[1]):
        return time is not None and given_time is not None and not time[0].isdisjoint(given_time[0])
    quantity, given_quantity = parse_quantity(reference), parse_quantity(given)
    if quantity is not None and given_quantity is not None:
        return quantity.equals(given_quantity)
    return compare_formulas(_format_formula(reference), _format_formula(given))


@lru_cache(maxsize=4096)
def _normalise(text: str) -> tuple[str, bool]:
    """Normalise, and drop the name of the unknown: x = 5 and 5 = x are 5, \\text{(B)} is B. Also returns whether it is a word."""
    text = _NAMED.sub("", normalise_latex(text))
    text = _NAMED_LAST.sub(r"\1", text)
    match = _TEXT.match(text)
    if match:
        text = (match[1] or match[2] or "").strip()
    return text, bool(_WORD.fullmatch(text))


def _squeeze(text: str) -> str:
    """Remove blanks, and ignore case in words of at least three letters."""
    short = "".join(text.split())
    return short.casefold() if len(short) > 2 and short.isalpha() else short


def _format_formula(text: str) -> str:
    """Format for math-verify: commas between several answers, intervals for inequalities, percent signs escaped."""
    return re.sub(r"(?<!\\)%", r"\\%", write_as_intervals(_SEVERAL.sub(", ", text))).replace("$", "")


# An inequality in one variable is an interval, as which math-verify compares it: x ≥ 5 is [5, ∞), and 1 < x ≤ 3 is (1, 3].

_UNION = re.compile(r"\\cup\b|∪")
_SIGNS = (
    (re.compile(r"\\leqslant\b|\\leq\b|\\le\b|<="), "≤"),
    (re.compile(r"\\geqslant\b|\\geq\b|\\ge\b|>="), "≥"),
    (re.compile(r"\\lt\b|&lt;"), "<"),
    (re.compile(r"\\gt\b|&gt;"), ">"),
)
_SIGN = re.compile(r"\s*([<>≤≥])\s*")
_FLIPPED = str.maketrans("<>≤≥", "><≥≤")
_VARIABLE = re.compile(r"[a-zA-Z]|\\(?:theta|alpha|beta|lambda|mu)")


def write_as_intervals(text: str) -> str:
    """Rewrite inequalities in one variable, and unions of them, as intervals; return any other text as it is."""
    return r" \cup ".join(map(_write_as_interval, _UNION.split(text)))


def _write_as_interval(text: str) -> str:
    signed = text
    for pattern, sign in _SIGNS:
        signed = pattern.sub(sign, signed)
    parts = _SIGN.split(signed.strip())
    if {*parts[1::2]} <= {">", "≥"}:
        parts = [part.translate(_FLIPPED) for part in reversed(parts)]
    if len(parts) == 3:  # x < 5 is -∞ < x < 5, and 5 < x is 5 < x < ∞
        parts = [r"-\infty", "<", *parts] if _VARIABLE.fullmatch(parts[0]) else [*parts, "<", r"\infty"]
    if len(parts) != 5 or not {*parts[1::2]} <= {"<", "≤"}:
        return text
    low, left, variable, right, high = parts
    if [bool(_VARIABLE.fullmatch(part)) for part in (low, variable, high)] != [False, True, False]:
        return text
    return f"{'(' if left == '<' else '['}{low}, {high}{')' if right == '<' else ']'}"
