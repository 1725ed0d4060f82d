"""What of a run's completions a page holds: all of a small file, of a large one some of all its length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from doubles.runs import row, run_folder
from policygrad.report import completions
from policygrad.report.completions import count_chars, embed_completions, excerpt_completions
from policygrad.report.data import read_json_rows


def file(folder: Path, steps: int, many: int, length: int = 10) -> Path:
    """The prompt of row i at step s is (s + i) mod 7: some come again."""
    made = [
        (s, [row(f"p{(s + i) % 7}", f"{s}." * length, 0.0, group=i) for i in range(many)]) for s in range(1, steps + 1)
    ]
    return run_folder(folder, [], made) / "completions.jsonl"


def test_a_small_file_is_shown_in_full(tmp_path: Path) -> None:
    result = excerpt_completions(file(tmp_path / "a", 3, 2))
    assert result.is_complete
    assert [r["step"] for r in result.rows] == [1, 1, 2, 2, 3, 3]


def test_a_run_without_completions_has_none(tmp_path: Path) -> None:
    assert excerpt_completions(tmp_path / "completions.jsonl").rows == ()


@pytest.mark.parametrize("length", [1, 40])
def test_a_large_file_is_sampled_at_evenly_spaced_steps(tmp_path: Path, length: int) -> None:
    path = file(tmp_path / "a", 231, 8, length)
    result = excerpt_completions(path, text=sum(map(count_chars, read_json_rows(path))) - 1)
    steps = list(dict.fromkeys(r["step"] for r in result.rows))
    assert not result.is_complete
    assert steps == list(range(1, 232, 10))  # 24 of them
    assert all(r["completion"].startswith(f"{r['step']}.") for r in result.rows)


def test_the_limit_counts_characters_not_bytes(tmp_path: Path) -> None:
    """Two runs of 14 steps each were said to be shown in part, because their files have more columns than the page."""
    texts = [(s, [row("é" * 40, "ü" * 40, 0.0, group=i, other="x" * 300) for i in range(4)]) for s in range(1, 15)]
    path = run_folder(tmp_path / "a", [], texts) / "completions.jsonl"
    characters = 14 * 4 * (40 + 40 + 60)
    assert path.stat().st_size > 3 * characters
    assert excerpt_completions(path, text=characters).is_complete
    assert not excerpt_completions(path, text=characters - 1).is_complete
    assert excerpt_completions(path, most=56).is_complete
    assert not excerpt_completions(path, most=55).is_complete


def test_turns_count_towards_the_limit(tmp_path: Path) -> None:
    turns = [["policy", "y" * 1000]]
    path = run_folder(tmp_path / "a", [], [(1, [row("p", "c", 0.0, turns=turns)])]) / "completions.jsonl"
    assert not excerpt_completions(path, text=1000).is_complete
    assert excerpt_completions(path, text=1200).is_complete


def test_selection_respects_the_limit_and_prefers_repeated_prompts(tmp_path: Path) -> None:
    path = file(tmp_path / "a", 100, 6)
    result = excerpt_completions(path, text=24 * 3 * 95)
    by_step: dict[int, list[dict[str, Any]]] = {}
    for r in result.rows:
        by_step.setdefault(r["step"], []).append(r)
    assert all(1 <= len(rows) <= 3 for rows in by_step.values())
    first, second = list(by_step.values())[:2]
    known = {f"p{(1 + i) % 7}" for i in range(6)}  # of step 1, whether shown or not
    assert {r["prompt"] for r in second} <= known
    assert len(first) == 3


def test_a_long_file_is_not_read_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = file(tmp_path / "a", 2000, 4, 50)
    parsed = completions.parsed
    lines: list[bytes] = []
    monkeypatch.setattr(completions, "parsed", lambda line: lines.append(line) or parsed(line))
    assert len({r["step"] for r in excerpt_completions(path, text=100_000).rows}) == 24
    assert len(lines) < 1500  # of 8,000


def test_a_partial_last_line_is_ignored(tmp_path: Path) -> None:
    path = file(tmp_path / "a", 40, 2)
    with path.open("ab") as end:
        end.write(b'{"step": 41, "pro')
    assert [r["step"] for r in excerpt_completions(path).rows][-1] == 40
    assert [r["step"] for r in excerpt_completions(path, text=100).rows][-1] == 40


def test_page_rows_store_each_prompt_once_and_every_reward(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
    turns = [["policy", "look"], ["environment", "a door"], ["policy", "open"]]
    rows = [
        row(chat, "2", 1.5, group=3, rewards={"right": 1.0, "short": None}),
        row(chat, "lookopen", None, turns=turns, truncated=True),
        row("plain", "x" * 9000, 0.0),
    ]
    folder = run_folder(tmp_path / "a", [], [(1, rows)])
    result = embed_completions([excerpt_completions(folder / "completions.jsonl")])
    assert result["prompts"] == [[["system", "Be brief."], ["user", "1+1?"]], [["", "plain"]]]
    first, second, third = result["rows"]
    assert first == {
        "r": 0,
        "s": 1,
        "p": 0,
        "c": "2",
        "w": 1.5,
        "a": 0.5,
        "n": 3,
        "g": 3,
        "x": {"right": 1.0, "short": None},
    }
    assert "w" not in second
    assert second["u"] == turns
    assert second["t"] is True
    assert third["c"].endswith("… (3,000 characters more)")
    assert len(third["c"]) < 6040
