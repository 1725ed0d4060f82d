"""Mathematical answers compared by value; the one file that imports math-verify, and only when it is used."""

import importlib.util
import logging
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from policygrad.errors import ConfigError
from policygrad.rewards.builtin import final_answer
from policygrad.rewards.types import reward

PARSE_LIMIT = 3  # seconds, whole ones; with the comparison's it stays within a pool's default budget of 10 s
_DELIMITED = re.compile(r"\$|\\boxed|\\\(|\\\[")
_SHORT = 200  # characters; a longer text without delimiters is prose, not one formula


def check_installed() -> None:
    """Raise ConfigError with the way out when math-verify is missing."""
    if importlib.util.find_spec("math_verify") is None:
        raise ConfigError("reward 'math' needs the package math-verify: pip install policygrad[math]")


def prepare() -> None:
    """Import math-verify (about half a second) before the first sample's clock runs."""
    check_installed()
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    math([""], ["$\\frac{1}{2}$"], answer=["0.5"])


@reward(prepare=prepare)
def math(prompts: Any, completions: Sequence[str], answer: Sequence[Any], **_: Any) -> list[float | None]:
    """1.0 if the completion's final answer equals the column `answer` in value, else 0.0.

    The reference may be a number, LaTeX (MATH), or a worked solution that ends in `#### number` (GSM8K); None where it
    is null or cannot be read. The completion's final answer is what math-verify finds last inside the last
    <answer>...</answer>, or after the last `####`, or in the whole completion, \\boxed first; unreadable scores 0.0.
    """
    return [_score(text, right) for text, right in zip(completions, answer, strict=True)]


def _score(completion: str, answer: Any) -> float | None:
    gold = None if answer is None else _reference(str(answer))
    if not gold:
        return None
    import math_verify

    text = _after_marks(final_answer(completion))
    for candidate in (text, f"${text}$") if _is_bare(text) else (text,):
        found = math_verify.parse(candidate, parsing_timeout=PARSE_LIMIT)
        if found and math_verify.verify(gold, found, timeout_seconds=PARSE_LIMIT):
            return 1.0
    return 0.0


@lru_cache(maxsize=1024)
def _reference(answer: str) -> list[Any]:
    """The parsed reference; a group of completions shares it. Empty when it cannot be read."""
    import math_verify

    text = _after_marks(answer)
    return list(math_verify.parse(f"${text}$" if _is_bare(text) else text, parsing_timeout=PARSE_LIMIT))


def _after_marks(text: str) -> str:
    return text.rpartition("####")[2].strip()


def _is_bare(text: str) -> bool:
    """Whether this may be a formula without the delimiters that math-verify looks for."""
    return 0 < len(text) <= _SHORT and "\n" not in text and not _DELIMITED.search(text.replace("\\$", ""))
