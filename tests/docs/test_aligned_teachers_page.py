"""scripts/measure_aligned_teachers.py: its tokenizers and rows are what they say, and the page's table has what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import measure_aligned_teachers as measured
from measure_aligned_teachers import ACROSS, OWN, ROWS, WORDS, Teacher

from doubles.comparison import StubRunner, plan, row
from pages import aligned
from policygrad.commands.compare import build_rows
from policygrad.compare.report import build_report
from policygrad.compare.runner import ComparisonRun
from results import load_result

TEXTS = ["Step by step: 40 - 10 = 30, 2 - 0 = 2. <answer>32</answer>", "Find the value of x: 9*x + 8 = 71"] * 50
TEACHERS = {name: Teacher(f"teacher-{name}", 0.9, 400, ("Step", "Ġby")) for name in (OWN, WORDS, ACROSS)}


def test_tokens_end_where_words_do_or_cross_them() -> None:
    words, across = (measured.train_tokenizer(name, TEXTS) for name in (WORDS, ACROSS))
    cut = words.convert_ids_to_tokens(words(TEXTS[0])["input_ids"])
    assert cut[:9] == ["Step", "Ġby", "Ġstep", ":", "Ġ", "4", "0", "Ġ-", "Ġ"]
    crossing = across.convert_ids_to_tokens(across(TEXTS[0])["input_ids"])
    assert any("Ġ" in token[1:-1] for token in crossing)
    for tokenizer in (words, across):
        assert tokenizer.decode(tokenizer(TEXTS[0])["input_ids"]) == TEXTS[0]


def test_its_rows_are_runs_with_the_teachers_and_cuts_that_they_say() -> None:
    given = measured.specs({name: teacher.model for name, teacher in TEACHERS.items()})
    found = build_rows(given, None, (), (), lr_grid=(), delta_grid=(), tokens=1000, overrides=True)
    words = {row.label: " ".join(row.argv) for row in found}
    assert list(words) == list(ROWS)
    assert "--algorithm.reference.tokenizer" not in words["own"]
    assert words["across_tokens"].endswith("teacher-across --algorithm.reference.cut tokens")
    assert words["words_words"].endswith(
        "--algorithm.reference.tokenizer teacher-words --algorithm.reference.cut words"
    )


def test_the_measurement_makes_teachers_compares_and_keeps_the_report(tmp_path: Path) -> None:
    def compare(words: list[str]) -> int:
        folder = Path(words[words.index("--output") + 1])
        folder.mkdir(parents=True)
        (folder / "comparison.json").write_text(json.dumps({"rows": [], "seeds": [0]}))
        assert words[-9:] == ["--jobs", "2", "--", *measured.SHAPE]
        return 0

    made = list[str]()

    def make_teacher(name: str, folder: Path) -> Teacher:
        made.append(folder.name)
        return TEACHERS[name]

    at = (tmp_path / "results", tmp_path / "work")
    assert measured.main(["--", "--jobs", "2"], compare, *at, make_teacher) == 0
    assert made == ["teacher-own", "teacher-words", "teacher-across"]
    reported = load_result("aligned-teachers", tmp_path / "results") or {}
    assert reported["measured_by"] == "python scripts/measure_aligned_teachers.py -- --jobs 2"
    assert reported["teachers"]["words"]["accuracy"] == 0.9


def test_the_table_has_a_row_for_each_teacher_and_cut(tmp_path: Path) -> None:
    heights = {"own": 0.9, "words_tokens": 0.8, "words_words": 0.8, "across_tokens": 0.5, "across_words": 0.7}
    made = plan(*(row(name) for name in heights), seeds=4)
    found = build_report(made, ComparisonRun(made, tmp_path, StubRunner(heights), 1, lambda text: None).run()).to_dict()
    teachers = {name: vars(teacher) for name, teacher in TEACHERS.items()}
    text = aligned.aligned_block(found | {"measured_by": "python x", "teachers": teachers})
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    assert [line[:3] for line in lines[2:4]] == [
        ["the policy's tokens", "0.90", "each token"],
        ["tokens that end where words do", "0.90", "`tokens`"],
    ]
    assert len(lines) == 7
    said = " ".join(text.split())
    assert "with tokens that cross words `words` is better than `tokens`. 4 of the 4 rows" in said
    assert "tokens that cross words: `Step¦·by`" in text
