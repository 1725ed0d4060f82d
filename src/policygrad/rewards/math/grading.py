"""Mathematical answers compared by value: as text, as numbers, as intervals, and what is none of that by math-verify."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from policygrad.rewards.math import expressions, intervals, numbers
from policygrad.rewards.math.extraction import LONGEST, check_policies, extract, in_box, last_formula, prose
from policygrad.rewards.math.latex import tidy
from policygrad.rewards.math.references import references

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
        expressions.prepare()

    def __call__(self, prompts: Any, completions: Sequence[str], answer: Sequence[Any], **_: Any) -> list[float | None]:
        return [self.score(text, right) for text, right in zip(completions, answer, strict=True)]

    def score(self, completion: str, answer: Any) -> float | None:
        """One completion's reward."""
        right = references(answer)
        if not right:
            return None
        said = extract(completion, self.policies)
        if not said or len(said) > LONGEST:
            return 0.0
        said = inner(said)
        return float(any(equal(reference, said) for reference in right))

    def voted(self, completion: str) -> str | None:
        """The answer by which completions vote: a number by its value, a formula by its letters; None = there is none."""
        said = extract(completion, self.policies)
        if not said or len(said) > LONGEST:
            return None
        plain, _ = _plain(inner(said))
        quantity = numbers.read(plain)
        return quantity.key if quantity is not None else _squeezed(plain) or None


def inner(text: str) -> str:
    """What a marked passage comes to: its box; the last formula of a sentence, or the one number in it."""
    if (boxed := in_box(text)) is not None:
        return boxed
    tidied = tidy(text)
    if "$" in tidied.replace(r"\$", "") and (formula := last_formula(text)) is not None:
        return formula
    if numbers.read(text) is None and prose(tidied) and "\\" not in tidied:
        figures = _NUMERAL.findall(tidied)
        if len(figures) == 1 and (figure := numbers.last_number(tidied)) is not None:
            return figure
    return text


def equal(right: str, said: str) -> bool:
    """Whether an answer equals a reference in value. Both are LaTeX or plain, with or without delimiters."""
    sides, other_sides = _sides(right), _sides(said)
    if sides and other_sides and any(all(map(equal, sides, order)) for order in (other_sides, other_sides[::-1])):
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
    mine, theirs = numbers.read(right), numbers.read(said)
    if mine is not None and theirs is not None:
        return mine.equals(theirs)
    left, other = intervals.read(right), intervals.read(said)
    if left is not None and other is not None and (intervals.certain(right) or intervals.certain(said)):
        return intervals.equal_sets(left, other, equal)
    return expressions.equal_formulas(_formula(right), _formula(said))


def _sides(text: str) -> tuple[str, str] | None:
    """The two sides of an equation; None = it is none."""
    left, equals, right = tidy(text).partition("=")
    one = equals and "=" not in right and left.strip() and right.strip()
    return (left.strip(), right.strip()) if one and not _COMPARED.search(text) else None


def _same_base(right: str, said: str) -> bool | None:
    """Numbers as their bases have them, 4343_9: by digits and, where both say it, base; None = neither says one."""
    mine, theirs = numbers.based(right), numbers.based(said)
    if not (mine and mine[1]) and not (theirs and theirs[1]):
        return None
    if mine is None or theirs is None:
        return None if "_" not in right or "_" not in said else False
    return mine[0] == theirs[0] and (mine[1] == theirs[1] or not (mine[1] and theirs[1]))


def _same_time(right: str, said: str) -> bool | None:
    """Times of day, where one says which half of the day it means, and the other the same or nothing; None = neither does."""
    mine, theirs = numbers.clock(right), numbers.clock(said)
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
    text = _NAMED.sub("", tidy(text))
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
