"""The reward `ifeval`: does a completion follow instructions that a program can check ("at least 3 bullets", "no commas")?

The 25 kinds of instructions, and strict and loose accuracy, are those of IFEval (Zhou et al. 2023, arXiv:2311.07911, table 1 and
sec. 2), under the names and arguments of its data. A row has `instruction_id_list`, and `kwargs` with an object of arguments for
each. Where the paper leaves a text's parts open: words are runs of letters and digits; a sentence ends at . ! or ? before white
space or the end, but not after an abbreviation, an initial or inside of a number.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from policygrad.errors import DataError, import_optional
from policygrad.rewards.base import parse_reward_options

DETECTED_LETTERS = 20_000
"""Characters of a text that its language is detected by."""


@dataclass(frozen=True)
class IFEval:
    """Score whether all of a row's instructions are followed (1.0 or 0.0), or their share."""

    level: Literal["prompt", "instruction"] = "prompt"
    """prompt: 1.0 if all are followed; instruction: the share of them."""
    loose: bool = False
    """Accept a text that follows them without its first or last line, or without asterisks."""

    def reward_prepare(self) -> None:
        """Read langdetect's profiles (about a second) before the first sample's timeout starts."""
        detect_language("These are a few words of English.")

    @classmethod
    def from_options(cls, options: str) -> IFEval:
        """Parse `level=instruction,loose=yes`. Raises ConfigError."""
        return parse_reward_options(cls, "ifeval", options)

    def __call__(
        self,
        prompts: Any,
        completions: Sequence[str],
        instruction_id_list: Sequence[Sequence[str] | None],
        kwargs: Sequence[Sequence[Mapping[str, Any]] | None],
        **_: Any,
    ) -> list[float | None]:
        return [
            None if not names else self.score(text, names, arguments or ())
            for text, names, arguments in zip(completions, instruction_id_list, kwargs, strict=True)
        ]

    def score(self, completion: str, names: Sequence[str], arguments: Sequence[Mapping[str, Any]]) -> float:
        """Score one completion. Raises DataError for an unknown instruction, or one without its arguments."""
        if len(names) != len(arguments):
            raise DataError(f"reward 'ifeval': {len(names)} instructions and {len(arguments)} objects in kwargs")
        text = completion.rpartition("</think>")[2]  # reasoning is no part of the response
        texts = list_variants(text) if self.loose else [text]
        followed = [
            any(follows(name, values, each) for each in texts) for name, values in zip(names, arguments, strict=True)
        ]
        return float(all(followed)) if self.level == "prompt" else sum(followed) / len(followed)


ifeval = IFEval()


def list_variants(text: str) -> list[str]:
    """Return the texts of which loose accuracy asks that one follows an instruction: without asterisks, and without the first line,
    the last, or both."""
    lines = text.split("\n")
    cut = [text, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    return [*cut, *(each.replace("*", "") for each in cut)]


def follows(name: str, arguments: Mapping[str, Any], text: str) -> bool:
    """Return whether a text follows an instruction; an empty one follows none.

    Args:
        arguments: Those of the instruction; others are None.

    Raises:
        DataError: An unknown instruction, or an argument is missing.
    """
    if name not in INSTRUCTIONS:
        raise DataError(f"reward 'ifeval': unknown instruction {name!r}; known: {', '.join(INSTRUCTIONS)}")
    values = {key: value for key, value in arguments.items() if value is not None}
    try:
        return bool(text.strip()) and INSTRUCTIONS[name](text, values)
    except KeyError as error:
        raise DataError(f"reward 'ifeval': the instruction {name} has no argument {error} in its kwargs") from None


Arguments = Mapping[str, Any]
Check = Callable[[str, Arguments], bool]


def _compare(count: int, limit: float, relation: str) -> bool:
    """Return whether a count is "less than" the limit, or "at least" it."""
    return count < limit if relation == "less than" else count >= limit


def count_words(text: str) -> int:
    return len(re.findall(r"\w+", text))


_ABBREVIATION = re.compile(
    r"(?:\b(?:Mr|Mrs|Ms|Dr|Prof|St|Jr|Sr|Inc|Ltd|Co|vs|etc|e\.g|i\.e|Ph\.D)|\b[A-Z](?:\.[A-Z])*)\.\Z", re.IGNORECASE
)
_SENTENCE_END = re.compile(r"[.!?]+[\"'”’)\]*_]*(?=\s|\Z)")


def count_sentences(text: str) -> int:
    """Count sentences. A line that ends without a mark belongs to the next one, as a heading does."""
    count, start = 0, 0
    for match in _SENTENCE_END.finditer(text):
        sentence = text[start : match.end()]
        is_last = not text[match.end() :].strip()
        if match.group() == "." and not is_last and _ABBREVIATION.search(sentence):
            continue
        count, start = count + bool(re.search(r"\w", sentence)), match.end()
    return count + bool(re.search(r"\w", text[start:]))


def _count_matches(pattern: str, text: str) -> int:
    """Count a keyword, which may be part of a word; in the data it is a plain word or phrase."""
    return len(re.findall(re.escape(pattern), text, re.IGNORECASE))


def _count_letter(text: str, a: Arguments) -> bool:
    return _compare(text.lower().count(str(a["letter"]).lower()), a["let_frequency"], a["let_relation"])


def check_langdetect_installed() -> None:
    """Raise ConfigError if langdetect is not installed."""
    import_optional("langdetect", "the reward 'ifeval', for the language of a response,", "benchmarks")


@lru_cache(maxsize=64)
def detect_language(text: str) -> str | None:
    """Return a text's language, as ISO 639-1; None where it has no letters to tell by. langdetect is imported here alone.

    Raises:
        ConfigError: langdetect is not installed.
    """
    langdetect = import_optional("langdetect", "the reward 'ifeval', for the language of a response,", "benchmarks")
    langdetect.DetectorFactory.seed = 0  # otherwise the same text may get another language
    try:
        return str(langdetect.detect(text[:DETECTED_LETTERS]))
    except langdetect.lang_detect_exception.LangDetectException:
        return None


def _is_language(text: str, code: str) -> bool:
    return detect_language(text) in (code, None)


def _has_paragraphs(text: str, a: Arguments) -> bool:
    """Paragraphs are separated by `***`; an empty one counts only between two others, where it is a mistake."""
    parts = [part.strip() for part in re.split(r"\s?\*\*\*\s?", text)]
    inner = parts[1:-1]
    return all(inner) and len(inner) + bool(parts[0]) + (len(parts) > 1 and bool(parts[-1])) == a["num_paragraphs"]


def _has_first_word(text: str, a: Arguments) -> bool:
    """Paragraphs are separated by an empty line; the n-th begins with a word, whatever its case and the marks around it."""
    parts = text.split("\n\n")
    place = a["nth_paragraph"] - 1
    if sum(bool(part.strip()) for part in parts) != a["num_paragraphs"] or not 0 <= place < len(parts):
        return False
    words = parts[place].split()
    word = re.split(r"[.,?!'\"]", words[0].lstrip("'\""))[0].lower() if words else ""
    return word == str(a["first_word"]).lower()


def _has_postscript(text: str, a: Arguments) -> bool:
    marker = str(a["postscript_marker"])
    patterns = {"P.S.": r"p\.\s?s\.", "P.P.S": r"p\.\s?p\.\s?s"}
    return bool(re.search(patterns.get(marker, re.escape(marker)), text, re.IGNORECASE))


def _count_bullets(text: str) -> int:
    return len(re.findall(r"^\s*(?:\*[^*]|-).*$", text, re.MULTILINE))


def _count_highlights(text: str) -> int:
    """Count `*…*` and `**…**` with something between them on one line."""
    double = [part for part in re.findall(r"\*\*([^\n*]*)\*\*", text) if part.strip()]
    single = [part for part in re.findall(r"\*([^\n*]*)\*", re.sub(r"\*\*[^\n*]*\*\*", " ", text)) if part.strip()]
    return len(double) + len(single)


def _count_sections(text: str, a: Arguments) -> int:
    return len(re.findall(rf"{re.escape(a['section_spliter'])}\s?\d+", text))


def _is_json(text: str, _: Arguments) -> bool:
    body = re.sub(r"\A```(?:json)?|```\Z", "", text.strip(), flags=re.IGNORECASE).strip()
    try:
        json.loads(body)
    except (ValueError, RecursionError):
        return False
    return True


def _has_two_responses(text: str, _: Arguments) -> bool:
    parts = [part.strip() for part in text.split("******")]
    inner = [part for i, part in enumerate(parts) if part or 0 < i < len(parts) - 1]
    return len(inner) == 2 and all(inner) and inner[0] != inner[1]


def _starts_with_prompt(text: str, a: Arguments) -> bool:
    return text.strip().lower().startswith(str(a["prompt_to_repeat"]).strip().lower())


def _ends_with(text: str, a: Arguments) -> bool:
    return text.strip().strip('"').lower().endswith(str(a["end_phrase"]).strip().lower())


def _is_quoted(text: str, _: Arguments) -> bool:
    stripped = text.strip()
    return len(stripped) > 1 and stripped[0] == stripped[-1] == '"'


def _count_capital_words(text: str) -> int:
    """Count words without a small letter, and with a capital: AI, U.S., A."""
    return sum(word.isupper() for word in re.findall(r"\w+(?:[.'’-]\w+)*", text))


_ANSWERS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
INSTRUCTIONS: dict[str, Check] = {
    "keywords:existence": lambda text, a: all(_count_matches(word, text) for word in a["keywords"]),
    "keywords:frequency": lambda text, a: _compare(_count_matches(a["keyword"], text), a["frequency"], a["relation"]),
    "keywords:forbidden_words": lambda text, a: (
        not any(re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) for word in a["forbidden_words"])
    ),
    "keywords:letter_frequency": _count_letter,
    "language:response_language": lambda text, a: _is_language(text, a["language"]),
    "length_constraints:number_paragraphs": _has_paragraphs,
    "length_constraints:number_words": lambda text, a: _compare(count_words(text), a["num_words"], a["relation"]),
    "length_constraints:number_sentences": lambda text, a: _compare(
        count_sentences(text), a["num_sentences"], a["relation"]
    ),
    "length_constraints:nth_paragraph_first_word": _has_first_word,
    "detectable_content:postscript": _has_postscript,
    "detectable_content:number_placeholders": lambda text, a: (
        len(re.findall(r"\[.*?\]", text)) >= a["num_placeholders"]
    ),
    "detectable_format:number_bullet_lists": lambda text, a: _count_bullets(text) == a["num_bullets"],
    "detectable_format:title": lambda text, _: any(part.strip("<> ") for part in re.findall(r"<<[^\n]+>>", text)),
    "detectable_format:constrained_response": lambda text, _: any(answer in text for answer in _ANSWERS),
    "detectable_format:number_highlighted_sections": lambda text, a: _count_highlights(text) >= a["num_highlights"],
    "detectable_format:multiple_sections": lambda text, a: _count_sections(text, a) >= a["num_sections"],
    "detectable_format:json_format": _is_json,
    "combination:repeat_prompt": _starts_with_prompt,
    "combination:two_responses": _has_two_responses,
    "change_case:english_capital": lambda text, _: text.isupper() and _is_language(text, "en"),
    "change_case:english_lowercase": lambda text, _: text.islower() and _is_language(text, "en"),
    "change_case:capital_word_frequency": lambda text, a: _compare(
        _count_capital_words(text), a["capital_frequency"], a["capital_relation"]
    ),
    "startend:end_checker": _ends_with,
    "startend:quotation": _is_quoted,
    "punctuation:no_comma": lambda text, _: "," not in text,
}
"""The checks of all kinds of instructions, in the order of the paper's table 1: (response, arguments) -> whether it is followed."""
