"""Rewards that need nothing but the completion's text: exact match and format."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from policygrad.errors import ConfigError

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_ONE_ANSWER = r"\A(?:(?!</?answer>).)*<answer>(?:(?!</?answer>).)*</answer>(?:(?!</?answer>).)*\Z"


def final_answer(completion: str) -> str:
    """The text inside the last <answer>...</answer>, or else the whole completion; stripped."""
    found = _ANSWER.findall(completion)
    return (found[-1] if found else completion).strip()


def exact_match(prompts: Any, completions: Sequence[str], answer: Sequence[Any], **_: Any) -> list[float | None]:
    """1.0 if the final answer is the column `answer` (as text, stripped), else 0.0; None where `answer` is null."""
    return [
        None if right is None else float(final_answer(text) == str(right).strip())
        for text, right in zip(completions, answer, strict=True)
    ]


@dataclass(frozen=True)
class Format:
    """1.0 if the pattern is found anywhere in the completion (`re.search`, `.` also matches newlines), else 0.0.

    Anchor it with \\A and \\Z to judge the completion as a whole. The default asks for exactly one <answer>...</answer>.
    A pattern that backtracks for ever runs into the pool's time budget like any other reward.
    """

    pattern: str = _ONE_ANSWER

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern, re.DOTALL)
        except (re.error, OverflowError, RecursionError) as error:
            raise ConfigError(
                f"reward 'format': {self.pattern!r} is not a regular expression: {error}; put a backslash before "
                "a character that is meant literally"
            ) from None

    def __call__(self, prompts: Any, completions: Sequence[str], **_: Any) -> list[float | None]:
        pattern = re.compile(self.pattern, re.DOTALL)
        return [float(pattern.search(text) is not None) for text in completions]
