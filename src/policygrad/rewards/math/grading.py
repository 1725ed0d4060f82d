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
from policygrad.rewards.math.latex import drop_name, format_formula, normalise_latex, unwrap_text
from policygrad.rewards.math.numbers import Quantity, find_first_number, find_last_number, parse_quantity


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
        plain = _normalise(given)
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
_LONG_WORD = re.compile(r"(?!sin|cos|tan|log|sqrt|inf)[A-Za-z][a-z]{3,}")  # Evelyn, not abc


def strip_wrappers(text: str) -> str:
    """Reduce an extracted passage to its box, the last formula of a sentence, or the one number in it."""
    if (boxed := extract_boxed(text)) is not None:
        return boxed
    normalised = normalise_latex(text)
    if "$" in normalised.replace(r"\$", "") and (formula := extract_last_formula(text)) is not None:
        return formula
    has_one_number = len(re.findall(r"\d[\d.,]*", normalised)) == 1
    if has_one_number and parse_quantity(text) is None and is_prose(normalised) and "\\" not in normalised:
        return find_last_number(normalised) or text
    return text


def compare_answers(reference: str, given: str) -> bool:
    """Return whether an answer equals a reference in value. Both are LaTeX or plain, with or without delimiters."""
    reference, given = _normalise(reference), _normalise(given)
    if not given:
        return False
    if reference == given or _squeeze(reference) == _squeeze(given):
        return True
    if _LONG_WORD.fullmatch(reference) or _LONG_WORD.fullmatch(given):
        return False
    for compare in (_compare_in_bases, _compare_clock_times, _compare_quantities):
        if (is_equal := compare(reference, given)) is not None:
            return is_equal
    return compare_formulas(format_formula(reference), format_formula(given))


@lru_cache(maxsize=4096)
def _normalise(text: str) -> str:
    return drop_name(normalise_latex(text))


def _squeeze(text: str) -> str:
    """Remove blanks, and ignore case in words of at least three letters."""
    short = "".join(text.split())
    return short.casefold() if len(short) > 2 and short.isalpha() else short


def _compare_quantities(reference: str, given: str) -> bool | None:
    mine, theirs = parse_quantity(reference), parse_quantity(given)
    return mine.equals(theirs) if mine and theirs else None


_BASED = re.compile(r"(-?(?=[a-z]*\d)[\da-z]{1,60})(?:_\s*\{?\s*(\w+)\s*\}?)?", re.IGNORECASE | re.ASCII)
_BASE_WORDS = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
_BASES = {str(base): base for base in range(2, 37)} | {word: base for base, word in enumerate(_BASE_WORDS, 2)}


def _compare_in_bases(reference: str, given: str) -> bool | None:
    """Compare numbers such as 4343_9 by digits and, where both have one, base; None = neither has one."""
    mine, theirs = _parse_based(reference), _parse_based(given)
    if not (mine and mine[1]) and not (theirs and theirs[1]):
        return None
    if mine is None or theirs is None:
        return False
    return mine[0] == theirs[0] and (mine[1] == theirs[1] or not (mine[1] and theirs[1]))


def _parse_based(text: str) -> tuple[int, int] | None:
    """Return the digits, as a number in base 36, and the base, 0 where it has none; None = something else, such as x_1."""
    match = _BASED.fullmatch(unwrap_text(text))
    if match is None:
        return None
    digits, name = match.groups()
    base = _BASES.get(name.lower()) if name else 0
    if base is None or (base and int(max(digits.upper()), 36) >= base):
        return None
    return int(digits, 36), base


_CLOCK = re.compile(r"(\d{1,2})(?::([0-5]\d))?\s*(?:([ap])\.?\s?m\.?)?", re.IGNORECASE | re.ASCII)


def _compare_clock_times(reference: str, given: str) -> bool | None:
    """Compare times of day such as 10:30 p.m.; None = neither has a.m. or p.m."""
    times = [_CLOCK.fullmatch(unwrap_text(text)) for text in (reference, given)]
    if not any(time and time[3] for time in times):
        return None
    mine, theirs = ([] if time is None else _list_minutes(time) for time in times)
    return any(minute in theirs for minute in mine)


def _list_minutes(time: re.Match[str]) -> list[int]:
    """Return the minutes of the day that a time may mean: without a.m. or p.m. an hour from 1 to 12 is in either half."""
    hour, minute, half = int(time[1]), int(time[2] or 0), (time[3] or "").lower()
    if 1 <= hour <= 12:
        return [60 * (hour % 12 + 12 * (each == "p")) + minute for each in half or "ap"]
    return [60 * hour + minute] if hour <= 24 and not half else []
