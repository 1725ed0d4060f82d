"""Grade-school answers: one number, compared exactly. The standard library is all it needs."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from policygrad.rewards.math.extraction import check_policies, extract
from policygrad.rewards.math.latex import tidy
from policygrad.rewards.math.numbers import Quantity, first_number, read
from policygrad.rewards.math.references import references

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
        right = [number for text in references(answer) if (number := read(text)) is not None]
        if not right:
            return None
        found = extract(completion, self.policies)
        said = number_in(found) if found else None
        return float(said is not None and any(number.equals(said) for number in right))

    def voted(self, completion: str) -> str | None:
        """The number by which completions vote; None = there is none."""
        found = extract(completion, self.policies)
        said = number_in(found) if found else None
        return None if said is None else said.key


def number_in(text: str) -> Quantity | None:
    """The number that a short text says: all of it, or else the first number behind its last equals sign; None where what is
    there is a formula, which has a value of its own."""
    if (whole := read(text)) is not None:
        return whole
    words = tidy(text).rpartition("=")[2]
    figure = None if _FORMULA.search(words) else first_number(words)
    return read(figure) if figure else None


gsm8k = Gsm8k()
