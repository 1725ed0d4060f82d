"""The page of `policygrad eval --output`: every answer, by problem and model, and a filter."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from policygrad.commands import eval_page
from policygrad.commands.eval_page import render_eval_page
from policygrad.commands.evaluate import build_report
from policygrad.rollout.evaluation import EvalSample, EvaluationResult

if TYPE_CHECKING:
    from playwright.sync_api import Browser

PROMPTS = ("1 + 1 =", [{"role": "user", "content": "2 + 2 ="}], "<script>alert(1)</script>")
AFTER = EvaluationResult(
    (
        (EvalSample("two", 1.0, (("math", 1.0), ("format", None)), "2", 3), EvalSample("three", 0.0, (), "3", 4)),
        (EvalSample("four", 1.0, (), "4", 3), EvalSample("<b>4</b>", 1.0, (), "4", 3)),
        (EvalSample("no", 0.0, (), None, 9, True), EvalSample("", None, (), None, 1)),
    ),
    PROMPTS,
)
BEFORE = EvaluationResult(
    (
        (EvalSample("two", 1.0, (), "2", 3), EvalSample("two", 1.0, (), "2", 3)),
        (EvalSample("five", 0.0, (), "5", 3), EvalSample("five", 0.0, (), "5", 3)),
        (EvalSample("no", 0.0, (), None, 9), EvalSample("no", 0.0, (), None, 9)),
    ),
    PROMPTS,
)
OUTCOMES = {"runs/a": AFTER, "tiny": BEFORE}


def render() -> str:
    return render_eval_page(build_report("sums", None, 2, 1.0, OUTCOMES), OUTCOMES, "policygrad eval runs/a tiny")


def test_every_answer_is_there_and_none_is_markup() -> None:
    page = render()
    for text in (
        "two",
        "three",
        "four",
        "five",
        "&lt;b&gt;4&lt;/b&gt;",
        "user: 2 + 2 =",
        "math 1, format –",
        "cut off",
    ):
        assert text in page
    assert "<script>alert" not in page
    assert "<b>4</b>" not in page
    kinds = re.findall(r'data-kinds="([^"]*)"', page)
    assert kinds == ["mixed same worse", "better same", "failed same truncated zero"]
    assert "runs/a − tiny: mean" in page
    assert "Made by <code>policygrad eval runs/a tiny</code>" in page


def test_a_page_that_would_be_too_large_has_the_first_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eval_page, "MAX_CHARS", 60)
    page = render()
    assert "The page has the first 2 problems; samples.jsonl has all." in page
    assert page.count("<article") == 2


def test_the_filter_leaves_problems_of_a_kind(chromium: Browser, tmp_path: Path) -> None:
    (tmp_path / "eval.html").write_text(render(), encoding="utf-8")
    errors = list[object]()
    for width in (1280, 400):
        page = chromium.new_page(viewport={"width": width, "height": 800})
        page.on("pageerror", lambda error: errors.append(error))
        page.goto((tmp_path / "eval.html").as_uri())
        assert page.locator("#count").inner_text() == "3 of 3 problems"
        page.select_option("#kind", "better")
        assert page.locator("#count").inner_text() == "1 of 3 problems"
        assert page.locator("#problem-1").is_visible()
        assert page.locator("#problem-0").is_hidden()
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert not errors
        page.close()
