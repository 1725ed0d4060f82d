"""Finding the answer in a completion. Every search is linear in the text, whatever the text is.

A policy looks for a mark; a reward tries several in turn, and the first whose mark is present decides. Of several marks of one
kind the last counts, as a model may correct itself.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

from policygrad.rewards.math.numbers import find_last_match, find_last_number

SEARCHED_TAIL = 20_000  # characters from the end in which a phrase, a formula or a number is looked for
MAX_ANSWER_LENGTH = 1_000  # characters; a longer text is not an answer

_PHRASE = re.compile(
    r"(?:^[ \t]*A\b[ \t]*[*_]{0,2}:|\banswer(?:[ \t]*[*_]{0,2}:|\s+(?:is|equals|=)(?![a-z])))[ \t]*[:*_]{0,3}[ \t]*",
    re.IGNORECASE | re.MULTILINE,
)
_SENTENCE_END = re.compile(r"(?<!\\)[.;!?](?=\s|\Z)")
_FORMULA = re.compile(
    r"(?<!\\)\$\$?((?:[^$\\]|\\.){1,1000})\$|\\\[((?:[^\\]|\\[^\]]){1,1000})\\\]|\\\(((?:[^\\]|\\[^)]){1,1000})\\\)",
    re.DOTALL,
)
_WORD = re.compile(r"(?<![\\A-Za-z{])[A-Za-z]{2,}")
_FORMULA_WORDS = re.compile(
    r"(?:and|arccos|arcsin|arctan|cos|cot|csc|exp|inf|infinity|ln|log|mod|oo|or|pi|sec|sin|sqrt|tan)", re.IGNORECASE
)
_BOXES = (r"\boxed{", r"\fbox{")


def extract_tagged(text: str) -> str | None:
    """Return the text inside the last `<answer>…</answer>`."""
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, end) if end >= 0 else -1
    return text[start + len("<answer>") : end] if start >= 0 else None


def extract_after_hashes(text: str) -> str | None:
    """Return the line after the last `####`, as in GSM8K's solutions."""
    _, mark, after = text.rpartition("####")
    return after.lstrip(" \t#").partition("\n")[0] if mark else None


def extract_boxed(text: str) -> str | None:
    """Return the text inside the last `\\boxed{…}`; None where its braces are not balanced within MAX_ANSWER_LENGTH characters."""
    start, mark = max((text.rfind(mark), mark) for mark in _BOXES)
    if start < 0:
        return None
    start += len(mark)
    depth, escaped = 1, False
    for position, character in enumerate(text[start : start + MAX_ANSWER_LENGTH], start):
        if not escaped:
            depth += (character == "{") - (character == "}")
        escaped = character == "\\" and not escaped
        if depth == 0:
            return text[start:position]
    return None


def extract_after_phrase(text: str) -> str | None:
    """Return what follows the last "answer is", "Answer:" or "A:", to the end of the sentence or line."""
    tail = text[-SEARCHED_TAIL:]
    match = find_last_match(_PHRASE, tail)
    line = tail[match.end() :].partition("\n")[0].strip() if match else ""
    return _SENTENCE_END.split(line, maxsplit=1)[0] if line else None


def extract_last_formula(text: str) -> str | None:
    """Return the last `$…$`, `\\(…\\)` or `\\[…\\]`."""
    match = find_last_match(_FORMULA, text[-SEARCHED_TAIL:])
    return next((group for group in match.groups() if group is not None), None) if match else None


def extract_last_number(text: str) -> str | None:
    return find_last_number(text[-SEARCHED_TAIL:])


def extract_single_line(text: str) -> str | None:
    """Return the full text, where it is one short line and not a sentence."""
    line = text.strip()
    return line if line and "\n" not in line and len(line) <= MAX_ANSWER_LENGTH and not is_prose(line) else None


def is_prose(text: str) -> bool:
    """Return whether a text has at least two words that are not part of a formula."""
    return sum(not _FORMULA_WORDS.fullmatch(word) for word in _WORD.findall(text)) > 1


POLICIES: dict[str, Callable[[str], str | None]] = {
    "answer": extract_tagged,
    "hashes": extract_after_hashes,
    "boxed": extract_boxed,
    "phrase": extract_after_phrase,
    "formula": extract_last_formula,
    "last": extract_last_number,
    "line": extract_single_line,
}


def extract(text: str, policies: Sequence[str]) -> str | None:
    """Return the answer by the first policy whose mark is present, stripped; None = no mark is."""
    for name in policies:
        if (answer := POLICIES[name](text)) is not None:
            return answer.strip()
    return None


def parse_references(answer: Any) -> tuple[str, ...]:
    """Return the correct answers of a task's row: one of a text or a number, one or more of each entry of a list; none where null
    or empty.

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
