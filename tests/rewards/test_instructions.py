"""IFEval's checks: every kind of instruction, followed and not, strictly and loosely; and what counts as a word or a sentence."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from policygrad.errors import ConfigError, DataError
from policygrad.rewards import instructions
from policygrad.rewards.instructions import INSTRUCTIONS, IFEval, count_sentences, count_words, follows, list_variants
from policygrad.rewards.resolve import resolve_reward

TABLE = Path(__file__).parent / "ifeval_cases.jsonl"
PAGE = Path(__file__).parents[2] / "docs" / "evaluation.md"
LESS, MORE = "less than", "at least"
# instruction, its arguments, a text that follows it, and one that does not
CASES: list[tuple[str, dict[str, Any], str, str]] = [
    ("keywords:existence", {"keywords": ["kite", "wind"]}, "A Kite needs wind.", "A kite."),
    ("keywords:frequency", {"keyword": "bee", "frequency": 2, "relation": MORE}, "Bee, bee.", "One bee."),
    ("keywords:frequency", {"keyword": "bee", "frequency": 2, "relation": LESS}, "One bee.", "Bee, bee."),
    ("keywords:forbidden_words", {"forbidden_words": ["red", "C++"]}, "A redder roof.", "A RED roof."),
    ("keywords:letter_frequency", {"letter": "Z", "let_frequency": 2, "let_relation": MORE}, "Zzz", "zoo"),
    ("language:response_language", {"language": "de"}, "[de] Guten Tag", "[en] Good day"),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": MORE}, "One. Two!", "Only one"),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "One\n***\nTwo", "One\n\nTwo"),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "***\nOne\n***\nTwo", "One\n***\n***\nTwo"),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 1}, "One\n***\n", "One\n***\nTwo"),
    ("length_constraints:number_words", {"num_words": 3, "relation": LESS}, "Two words", "These are three"),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "then"},
        'One\n\n"Then, two.',
        "Then\n\nother",
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "Dear [name] of [place]", "Dear [name]"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Bye.\np. s. Write.", "Bye."),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "Bye.\nP.P.S Write.", "Bye.\nP.S. Write."),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* one\n- two", "* one\n** two **"),
    ("detectable_format:constrained_response", {}, "Well. My answer is maybe.", "Maybe."),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*one* and **two**", "*one* and **"),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "SECTION", "num_sections": 2},
        "SECTION 1\na\nSECTION 2\nb",
        "SECTION 1\na",
    ),
    ("detectable_format:json_format", {}, '```json\n{"a": [1]}\n```', '{"a": [1'),
    ("detectable_format:title", {}, "<<A title>>\ntext", "<< >>\ntext"),
    ("combination:two_responses", {}, "One\n******\nTwo", "One\n******\nOne"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "What is it?"}, "what is it? A pen.", "A pen."),
    ("startend:end_checker", {"end_phrase": "That is all."}, 'So. That is ALL."', "That is all. Or not"),
    ("startend:quotation", {}, ' "So it is." ', '"So it is.'),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": MORE},
        "NASA and U.S. ships",
        "NASA ships",
    ),
    ("change_case:english_capital", {}, "[EN] GOOD DAY", "[EN] Good day"),
    ("change_case:english_lowercase", {}, "[en] good day", "[de] guten tag"),
    ("punctuation:no_comma", {}, "One and two", "One, two"),
]


@pytest.fixture(autouse=True)
def _detector(monkeypatch: pytest.MonkeyPatch) -> None:
    """A detector that reads the language from a mark, so that these tests need no package."""

    class LangDetectException(Exception):
        pass

    def detect(text: str) -> str:
        if not text.startswith("["):
            raise LangDetectException("no letters")
        return text[1:3].lower()

    module: Any = ModuleType("langdetect")
    module.DetectorFactory = SimpleNamespace(seed=None)
    module.detect = detect
    module.lang_detect_exception = SimpleNamespace(LangDetectException=LangDetectException)
    monkeypatch.setitem(sys.modules, "langdetect", module)
    instructions.detect_language.cache_clear()


@pytest.mark.parametrize(("name", "arguments", "good", "bad"), CASES)
def test_an_instruction_is_followed_or_not(name: str, arguments: dict[str, Any], good: str, bad: str) -> None:
    others = dict.fromkeys(("num_words", "language", "keyword"))  # as the data has them
    assert follows(name, {**others, **arguments}, good)
    assert not follows(name, {**others, **arguments}, bad)
    assert not follows(name, arguments, " \n")


def test_all_25_instructions_of_the_paper_are_tried() -> None:
    assert len(INSTRUCTIONS) == 25
    assert {name for name, *_ in CASES} == set(INSTRUCTIONS)


def test_sentences_and_words() -> None:
    assert count_sentences("Dr. A. Smith paid 3.50 dollars. He left! Why?") == 3
    assert count_sentences('She said "no." Then e.g. this one... And a heading\nwithout a mark.') == 3
    assert count_sentences("no mark") == 1
    assert count_sentences("!!! ...") == 0
    assert count_words("It's 3.5 well-known words") == 7


def test_strict_and_loose_accuracy_of_prompts_and_instructions() -> None:
    names = ["detectable_format:title", "startend:quotation"]
    text = '*Sure:*\n"<<Title>> as asked"'
    score = IFEval().score(text, names, [{}, {}])
    assert (score, IFEval(level="instruction").score(text, names, [{}, {}])) == (0.0, 0.5)
    assert IFEval(loose=True).score(text, names, [{}, {}]) == 1.0
    assert len(list_variants("a\nb\nc")) == 8
    assert "b" in list_variants("*a*\nb\nc")


def test_reasoning_is_no_part_of_the_response() -> None:
    assert IFEval().score("<think>one, two</think>none", ["punctuation:no_comma"], [{}]) == 1.0


def test_a_row_of_unknown_form_is_an_error() -> None:
    with pytest.raises(DataError, match="unknown instruction 'colour:red'"):
        IFEval().score("x", ["colour:red"], [{}])
    with pytest.raises(DataError, match="keywords:frequency has no argument 'keyword'"):
        IFEval().score("x", ["keywords:frequency"], [{"keyword": None}])
    with pytest.raises(DataError, match="2 instructions and 1 objects"):
        IFEval().score("x", ["startend:quotation"] * 2, [{}])
    assert IFEval()((), ["x"], [None], [None]) == [None]


def test_options_are_parsed_and_the_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_reward("ifeval:level=instruction,loose=yes").function == IFEval("instruction", True)
    with pytest.raises(ConfigError, match="level is prompt or instruction"):
        resolve_reward("ifeval:level=word")
    monkeypatch.setitem(sys.modules, "langdetect", None)
    with pytest.raises(ConfigError, match=r"needs langdetect, which is not installed: pip install '\.\[benchmarks\]'"):
        resolve_reward("ifeval")


def use_real_detector(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "langdetect"]:
        monkeypatch.delitem(sys.modules, name)
    pytest.importorskip("langdetect")
    instructions.detect_language.cache_clear()


DIFFERENT: dict[tuple[str, str], tuple[float, float]] = {  # ours, and the published evaluator's
    ("number_sentences", "Wait... what?"): (2, 1),
    ("number_sentences", "See e.g. the book. It is long."): (2, 3),
    ("number_sentences", "Hi!!! How are you??"): (2, 3),
    ("number_sentences", "Apples, pears, etc. are fruit. Good."): (2, 3),
    ("capital_word_frequency", "GPT-4 and USA's"): (0, 1),
    ("capital_word_frequency", "AI/ML"): (1, 0),
}


def test_scores_differ_from_the_published_evaluator_s_in_the_documented_cases_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """scripts/compare_ifeval.py has recorded its counts of words and sentences, and its verdicts."""
    use_real_detector(monkeypatch)
    cases = [json.loads(line) for line in TABLE.read_text(encoding="utf-8").splitlines()]
    assert {case["instruction"] for case in cases} == INSTRUCTIONS.keys()
    differ = {}
    for case in cases:
        name, text = case["instruction"], case["text"]
        count = {"number_words": count_words, "number_sentences": count_sentences}.get(name.partition(":")[2])
        ours = count(text) if count else follows(name, case["arguments"], text)
        if ours != case["published"]:
            differ[name.partition(":")[2], text] = (ours, case["published"])
    assert differ == DIFFERENT
    page = PAGE.read_text(encoding="utf-8")
    assert f"{len(cases)} short texts" in page
    for (_, text), (ours, published) in DIFFERENT.items():
        row = next(line for line in page.splitlines() if f"`{text}`" in line)
        values = [str(bool(x)).lower() if "AI" in text or "GPT" in text else str(x) for x in (ours, published)]
        assert row.split(" | ")[1:3] == [value.replace("true", "yes").replace("false", "no") for value in values]


def test_the_real_detector_knows_english_and_german(monkeypatch: pytest.MonkeyPatch) -> None:
    use_real_detector(monkeypatch)
    assert instructions.detect_language("The weather is fine today, and we went for a long walk.") == "en"
    assert instructions.detect_language("Das Wetter ist heute schön, und wir gingen lange spazieren.") == "de"
    assert instructions.detect_language("12 + 3") is None
