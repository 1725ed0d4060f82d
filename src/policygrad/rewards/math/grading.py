"""Mathematical answers compared by value: as text, as numbers, as intervals, and what is none of that by math-verify."""

import importlib.util
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from policygrad.errors import ConfigError, install_command
from policygrad.rewards.math import numbers
from policygrad.rewards.math.extraction import (
    MAX_ANSWER_LENGTH,
    check_policies,
    extract,
    extract_boxed,
    extract_last_formula,
    is_prose,
    parse_references,
)
from policygrad.rewards.math.numbers import Quantity, find_first_number, normalise_latex, parse_quantity

# Formulas compared by value; the one file that imports math-verify, and only when it is used.

PARSE_TIMEOUT = 3  # seconds, whole ones; with the comparison's it stays within a pool's default budget of 10 s
_TOWER = re.compile(r"\d[\s)}]*(?:\^|\*\*)[\s{(]*-?\d[\d.]*[\s)}]*(?:\^|\*\*)")
_HUGE = re.compile(r"(?:\^|\*\*)[\s{(]*[-+]?\d{5,}")
_FACTORIAL = re.compile(r"\d{5,}[\s)}]*!|!\s*[)}\]]*\s*!")


def check_math_verify_installed() -> None:
    """Raise ConfigError with the way out when math-verify is missing."""
    if importlib.util.find_spec("math_verify") is None:
        raise ConfigError(
            f"reward 'math' needs the package math-verify: {install_command('math')}; for answers that are plain "
            "numbers, 'gsm8k' does without"
        )


def import_math_verify() -> None:
    """Import math-verify (about half a second) before the first sample's clock runs."""
    check_math_verify_installed()
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    compare_formulas(r"\frac{1}{2}", "0.5")


def is_costly(text: str) -> bool:
    """Whether reading a text could compute what fills the machine: a tower of powers, a huge exponent or factorial.

    Only what is known to do harm is refused here; what else takes long is cut off by math-verify's alarm and, where that does
    not come through, by the pool's budget.
    """
    return any(pattern.search(text) for pattern in (_TOWER, _HUGE, _FACTORIAL))


def compare_formulas(right: str, said: str) -> bool:
    """Whether math-verify takes two LaTeX formulas, without delimiters, for equal; False for what it cannot read.

    It limits its time by SIGALRM, so this is for a process's main thread, as a reward worker's is.
    """
    if is_costly(said):
        return False
    import math_verify

    gold, found = list(_parsed(right)), _parse(said)
    if not gold or not found or _of_other_variables(gold[0], found[0]):
        return False
    return bool(math_verify.verify(gold, found, timeout_seconds=PARSE_TIMEOUT))


def _of_other_variables(right: Any, said: Any) -> bool:
    """Whether two expressions differ in their variables: they are not equal, and simplifying the difference costs most of all."""
    import sympy

    both = isinstance(right, sympy.Expr) and isinstance(said, sympy.Expr)
    return both and right.free_symbols != said.free_symbols


@lru_cache(maxsize=1024)
def _parsed(text: str) -> tuple[Any, ...]:
    """A reference, which a group of completions shares."""
    return tuple(_parse(text))


def _parse(text: str) -> list[Any]:
    """As one formula: math-verify's other way, looking for expressions in the text, would take one of several numbers."""
    import math_verify

    formula = (math_verify.LatexExtractionConfig(),)
    return list(math_verify.parse(f"${text}$", extraction_config=formula, parsing_timeout=PARSE_TIMEOUT))


# Intervals and unions of them, as brackets or as inequalities: (1, 2], x ≥ 5, -1 < x ≤ 3, (-∞, 3) ∪ (3, ∞).

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


def parse_intervals(text: str) -> tuple[Interval, ...] | None:
    """The intervals of a tidy text; None = it is something else. `(1, 2)` is one, and a point: which, the caller has to know."""
    text = _BELONGS.sub("", text)
    for pattern, sign in _SIGNS:
        text = pattern.sub(sign, text)
    parts = _UNION.split(text)
    if len(parts) > _MOST:
        return None
    found = [_one(part.strip()) for part in parts]
    return None if None in found else tuple(one for one in found if one is not None)


def is_unambiguous(text: str) -> bool:
    """Whether a text that `read` takes can be nothing but intervals: not (1, 2), which is a point too, nor [1, 2], a list."""
    brackets = _BRACKETS.fullmatch(text.strip())
    return brackets is None or (brackets[1] == "[") != (brackets[4] == "]") or "infty" in text


def compare_intervals(
    mine: tuple[Interval, ...], theirs: tuple[Interval, ...], equal: Callable[[str, str], bool]
) -> bool:
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


_SEVERAL = re.compile(r"\s*(?:,\s*)?(?:\bor\b|\band\b|\\(?:text|mathrm)\{\s*(?:or|and)\s*\})\s*")
_NAMED = re.compile(r"\A\s*[a-zA-Z]\s*=\s*(?=[^=]+\Z)")
_NAMED_LAST = re.compile(r"\A([^=]*[^=\s<>!:])\s*=\s*[a-zA-Z]\s*\Z")
_COMPARED = re.compile(r"[<>≤≥≠]|\\(?:l|g|n)(?:e|t)q?\b|:=")
_WORD = re.compile(r"(?!sin|cos|tan|log|sqrt|inf)[A-Za-z][a-z]{3,}")  # Evelyn, not abc
_NUMERAL = re.compile(r"\d[\d.,]*")
_TEXT = re.compile(r"\\(?:text|textbf|textrm|mathrm|mbox)\s*\{\s*\(?([^{}()]*)\)?\s*\}\Z|\(([A-Za-z])\)\Z")


@dataclass(frozen=True)
class Math:
    """1.0 if the completion's answer equals the column `answer` in value, else 0.0; None where that is null or empty.

    `answer` is a number, LaTeX (MATH), a worked solution that ends in `#### number` or `\\boxed{…}`, or a list of such: one of them
    has to be met. An answer of more than LONGEST characters, or that cannot be read, is worth 0.0.
    policies: where the answer is looked for (extraction.POLICIES); the first whose mark is there decides.
    """

    policies: tuple[str, ...] = ("answer", "hashes", "boxed", "said", "whole", "formula", "last")

    def __post_init__(self) -> None:
        check_policies(self.policies, "math")

    def reward_prepare(self) -> None:
        """Import math-verify, outside of any sample's budget."""
        import_math_verify()

    def __call__(self, prompts: Any, completions: Sequence[str], answer: Sequence[Any], **_: Any) -> list[float | None]:
        return [self.score(text, right) for text, right in zip(completions, answer, strict=True)]

    def score(self, completion: str, answer: Any) -> float | None:
        """One completion's reward."""
        right = parse_references(answer)
        if not right:
            return None
        said = extract(completion, self.policies)
        if not said or len(said) > MAX_ANSWER_LENGTH:
            return 0.0
        said = strip_wrappers(said)
        return float(any(compare_answers(reference, said) for reference in right))

    def extract_answer(self, completion: str) -> str | None:
        """The answer by which completions vote: a number by its value, a formula by its letters; None = there is none."""
        said = extract(completion, self.policies)
        if not said or len(said) > MAX_ANSWER_LENGTH:
            return None
        plain, _ = _plain(strip_wrappers(said))
        quantity = numbers.parse_quantity(plain)
        return quantity.key if quantity is not None else _squeezed(plain) or None


def strip_wrappers(text: str) -> str:
    """What a marked passage comes to: its box; the last formula of a sentence, or the one number in it."""
    if (boxed := extract_boxed(text)) is not None:
        return boxed
    tidied = normalise_latex(text)
    if "$" in tidied.replace(r"\$", "") and (formula := extract_last_formula(text)) is not None:
        return formula
    if numbers.parse_quantity(text) is None and is_prose(tidied) and "\\" not in tidied:
        figures = _NUMERAL.findall(tidied)
        if len(figures) == 1 and (figure := numbers.find_last_number(tidied)) is not None:
            return figure
    return text


def compare_answers(right: str, said: str) -> bool:
    """Whether an answer equals a reference in value. Both are LaTeX or plain, with or without delimiters."""
    sides, other_sides = _sides(right), _sides(said)
    if (
        sides
        and other_sides
        and any(all(map(compare_answers, sides, order)) for order in (other_sides, other_sides[::-1]))
    ):
        return True
    (right, word), (said, other_word) = _plain(right), _plain(said)
    if not said:
        return False
    if right == said or _squeezed(right) == _squeezed(said):
        return True
    if word or other_word:
        return False
    for compare in (_same_base, _same_time):
        if (same := compare(right, said)) is not None:
            return same
    mine, theirs = numbers.parse_quantity(right), numbers.parse_quantity(said)
    if mine is not None and theirs is not None:
        return mine.equals(theirs)
    left, other = parse_intervals(right), parse_intervals(said)
    if left is not None and other is not None and (is_unambiguous(right) or is_unambiguous(said)):
        return compare_intervals(left, other, compare_answers)
    return compare_formulas(_formula(right), _formula(said))


def _sides(text: str) -> tuple[str, str] | None:
    """The two sides of an equation; None = it is none."""
    left, equals, right = normalise_latex(text).partition("=")
    one = equals and "=" not in right and left.strip() and right.strip()
    return (left.strip(), right.strip()) if one and not _COMPARED.search(text) else None


def _same_base(right: str, said: str) -> bool | None:
    """Numbers as their bases have them, 4343_9: by digits and, where both say it, base; None = neither says one."""
    mine, theirs = numbers.parse_based_number(right), numbers.parse_based_number(said)
    if not (mine and mine[1]) and not (theirs and theirs[1]):
        return None
    if mine is None or theirs is None:
        return None if "_" not in right or "_" not in said else False
    return mine[0] == theirs[0] and (mine[1] == theirs[1] or not (mine[1] and theirs[1]))


def _same_time(right: str, said: str) -> bool | None:
    """Times of day, where one says which half of the day it means, and the other the same or nothing; None = neither does."""
    mine, theirs = numbers.parse_clock_time(right), numbers.parse_clock_time(said)
    if not (mine and mine[1]) and not (theirs and theirs[1]):
        return None
    if mine is None or theirs is None:
        return False
    return mine[0] == theirs[0] or (
        not (mine[1] and theirs[1]) and (mine[0] - theirs[0]) % 720 == 0 and _early(mine, theirs)
    )


def _early(*times: tuple[int, bool]) -> bool:
    """Whether what does not say its half of the day has an hour of both, 1 to 12."""
    return all(half or 60 <= minute < 780 for minute, half in times)


@lru_cache(maxsize=4096)
def _plain(text: str) -> tuple[str, bool]:
    """Tidy, and without the name of what was asked for: x = 5 and 5 = x are 5, \\text{(B)} is B; and whether it is a word."""
    text = _NAMED.sub("", normalise_latex(text))
    text = _NAMED_LAST.sub(r"\1", text)
    found = _TEXT.match(text)
    if found:
        text = (found[1] or found[2] or "").strip()
    return text, bool(_WORD.fullmatch(text))


def _squeezed(text: str) -> str:
    """Blanks out; words of three letters and more in small."""
    short = "".join(text.split())
    return short.casefold() if len(short) > 2 and short.isalpha() else short


def _formula(text: str) -> str:
    """As math-verify is given it: several answers with commas between them, a percent sign escaped."""
    return re.sub(r"(?<!\\)%", r"\\%", _SEVERAL.sub(", ", text)).replace("$", "")


math = Math()


# Grade-school answers: one number, compared exactly. The standard library is all it needs.

_FORMULA = re.compile(r"[\\^_*+{}]|\d\s*[-/]\s*[\d(a-z]|\d[a-z]\b|[(\[]\s*[-\d.]+\s*,")


@dataclass(frozen=True)
class Gsm8k:
    """1.0 if the completion's number equals the column `answer`, else 0.0; None where that is null or is no number.

    `answer` is a number, a text with one, a worked solution that ends in `#### number`, or a list of such: one of them has to be
    met. Numbers are compared as exact fractions, whatever way they are written; what was counted ("18 eggs") is not compared.
    policies: where the answer is looked for (extraction.POLICIES); the first whose mark is there decides.
    """

    policies: tuple[str, ...] = ("answer", "hashes", "boxed", "said", "last")

    def __post_init__(self) -> None:
        check_policies(self.policies, "gsm8k")

    def __call__(self, prompts: Any, completions: Sequence[str], answer: Sequence[Any], **_: Any) -> list[float | None]:
        return [self.score(text, right) for text, right in zip(completions, answer, strict=True)]

    def score(self, completion: str, answer: Any) -> float | None:
        """One completion's reward."""
        right = [number for text in parse_references(answer) if (number := parse_quantity(text)) is not None]
        if not right:
            return None
        found = extract(completion, self.policies)
        said = parse_number(found) if found else None
        return float(said is not None and any(number.equals(said) for number in right))

    def extract_answer(self, completion: str) -> str | None:
        """The number by which completions vote; None = there is none."""
        found = extract(completion, self.policies)
        said = parse_number(found) if found else None
        return None if said is None else said.key


def parse_number(text: str) -> Quantity | None:
    """The number that a short text says: all of it, or else the first number behind its last equals sign; None where what is
    there is a formula, which has a value of its own."""
    if (whole := parse_quantity(text)) is not None:
        return whole
    words = normalise_latex(text).rpartition("=")[2]
    figure = None if _FORMULA.search(words) else find_first_number(words)
    return parse_quantity(figure) if figure else None


gsm8k = Gsm8k()
