"""Which part of a completion is its answer. Every search is linear in the text, whatever the text is.

A policy names a mark; a preset tries several in turn, and the first whose mark is there decides. Of several marks of one kind the
last counts: a model that corrects itself is taken at its last word.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

from policygrad.errors import ConfigError
from policygrad.rewards.math.numbers import find_last_match, find_last_number

SEARCHED_TAIL = 20_000  # characters from the end in which a phrase, a formula or a number is looked for
MAX_ANSWER_LENGTH = 1_000  # characters of an answer; what is longer is none

_SAID = re.compile(
    r"(?:^[ \t]*A\b[ \t]*[*_]{0,2}:|\banswer(?:[ \t]*[*_]{0,2}:|\s+(?:is|equals|=)(?![a-z])))[ \t]*[:*_]{0,3}[ \t]*",
    re.IGNORECASE | re.MULTILINE,
)
_SENTENCE = re.compile(r"(?<!\\)[.;!?](?=\s|\Z)")
_FORMULA = re.compile(
    r"(?<!\\)\$\$?((?:[^$\\]|\\.){1,1000})\$|\\\[((?:[^\\]|\\[^\]]){1,1000})\\\]|\\\(((?:[^\\]|\\[^)]){1,1000})\\\)",
    re.DOTALL,
)
_WORD = re.compile(r"(?<![\\A-Za-z{])[A-Za-z]{2,}")
_FORMULA_WORDS = re.compile(
    r"(?:and|arccos|arcsin|arctan|cos|cot|csc|exp|inf|infinity|ln|log|mod|oo|or|pi|sec|sin|"
    r"sqrt|tan)",
    re.IGNORECASE,
)
_BOXES = (r"\boxed{", r"\fbox{")


def extract_tagged(text: str) -> str | None:
    """Inside the last `<answer>…</answer>`."""
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, end) if end >= 0 else -1
    return text[start + len("<answer>") : end] if start >= 0 else None


def extract_after_hashes(text: str) -> str | None:
    """The line after the last `####`, as in GSM8K's solutions."""
    _, mark, rest = text.rpartition("####")
    return rest.lstrip(" \t#").partition("\n")[0] if mark else None


def extract_boxed(text: str) -> str | None:
    """Inside the last `\\boxed{…}` with its braces balanced; None where they are not within LONGEST characters."""
    start, mark = max((text.rfind(mark), mark) for mark in _BOXES)
    if start < 0:
        return None
    start += len(mark)
    depth, escaped = 1, False
    for place, character in enumerate(text[start : start + MAX_ANSWER_LENGTH], start):
        if not escaped:
            depth += (character == "{") - (character == "}")
        escaped = character == "\\" and not escaped
        if depth == 0:
            return text[start:place]
    return None


def extract_after_phrase(text: str) -> str | None:
    """What follows the last "answer is", "Answer:" or "A:", to the end of the sentence or line."""
    tail = text[-SEARCHED_TAIL:]
    found = find_last_match(_SAID, tail)
    rest = tail[found.end() :].partition("\n")[0].strip() if found else ""
    return _SENTENCE.split(rest, maxsplit=1)[0] if rest else None


def extract_last_formula(text: str) -> str | None:
    """The last `$…$`, `\\(…\\)` or `\\[…\\]`."""
    found = find_last_match(_FORMULA, text[-SEARCHED_TAIL:])
    return next((group for group in found.groups() if group is not None), None) if found else None


def extract_last_number(text: str) -> str | None:
    """The last number."""
    return find_last_number(text[-SEARCHED_TAIL:])


def extract_single_line(text: str) -> str | None:
    """All of it, where it is one line, short, and no sentence."""
    line = text.strip()
    return line if line and "\n" not in line and len(line) <= MAX_ANSWER_LENGTH and not is_prose(line) else None


def is_prose(text: str) -> bool:
    """Whether a text has two words or more that are none of a formula's."""
    return sum(not _FORMULA_WORDS.fullmatch(word) for word in _WORD.findall(text)) > 1


POLICIES: dict[str, Callable[[str], str | None]] = {
    "answer": extract_tagged,
    "hashes": extract_after_hashes,
    "boxed": extract_boxed,
    "said": extract_after_phrase,
    "formula": extract_last_formula,
    "last": extract_last_number,
    "whole": extract_single_line,
}
"""The ways of finding an answer, by name."""


def extract(text: str, policies: Sequence[str]) -> str | None:
    """The answer by the first policy whose mark is there, without blanks around it; None = none of them is."""
    for name in policies:
        if (found := POLICIES[name](text)) is not None:
            return found.strip()
    return None


def check_policies(policies: Sequence[str], reward: str) -> None:
    """Raises ConfigError for a name that is no policy, or none at all."""
    known = ", ".join(POLICIES)
    if not policies:
        raise ConfigError(f"reward {reward!r}: no extraction policy is named; there are {known}")
    for name in policies:
        if name not in POLICIES:
            raise ConfigError(f"reward {reward!r}: unknown extraction policy {name!r}; there are {known}")


# The right answers of a task's row, in the forms that data sets have them.


def parse_references(answer: Any) -> tuple[str, ...]:
    """The answers that count as right: of a text or a number one, of a list each; what is null or empty is none.

    A worked solution stands for what follows its last `####` (GSM8K), or, over several lines, for its last `\\boxed{…}` (MATH).
    """
    if isinstance(answer, (list, tuple)):
        return tuple(text for each in answer for text in parse_references(each))
    text = "" if answer is None else str(answer).strip()
    if "####" in text:
        text = (extract_after_hashes(text) or "").strip()
    elif r"\boxed{" in text:
        text = (extract_boxed(text) or text).strip()
    return (text,) if text else ()
