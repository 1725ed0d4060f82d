"""What a run noticed is kept in its folder, as often as it was, and its end says what came out of it and what to do next."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import policygrad as pg
from doubles.files import rows
from doubles.trackers import Record
from policygrad.report.data import read_run

ALL_EQUAL = "\ndef all_equal(prompts, completions, **columns):\n    return [0.0 for _ in completions]\n"


def unrewarded(small: pg.Run, output: Path) -> pg.Run:
    """A run of three steps whose rewards are all equal."""
    file = output.with_suffix(".py")
    file.write_text(ALL_EQUAL)
    return replace(small, reward=(f"{file}:all_equal",), output=str(output), steps=3, prompts_per_step=2)


def test_a_note_is_shown_once_and_kept_at_every_step(small: pg.Run, tmp_path: Path) -> None:
    display = Record()
    run = pg.train(unrewarded(small, tmp_path / "run"), display=display).output
    kinds = [text.partition("step ")[2][3:] for text in display.notes if text.startswith("step ")]
    assert len(kinds) == len(set(kinds)) >= 1
    kept = [row for row in rows(run / "notes.jsonl") if row["step"] > 0]
    assert [row["step"] for row in kept if row["kind"] == kept[0]["kind"]] == [1, 2, 3]
    assert not [row for row in kept if row["text"].startswith("step")]
    (first, *_) = read_run(run).notes
    assert first.describe().endswith("(3 times, last at step 3)")


def test_a_resumed_run_has_the_notes_of_an_uninterrupted_one(small: pg.Run, tmp_path: Path) -> None:
    whole = pg.train(unrewarded(small, tmp_path / "whole"), display=False).output
    parts = pg.train(unrewarded(small, tmp_path / "parts"), display=False, stop_after=2).output
    pg.train(unrewarded(small, tmp_path / "parts"), display=False, resume=parts)
    assert (parts / "notes.jsonl").read_bytes() == (whole / "notes.jsonl").read_bytes()


def test_the_end_of_a_run_has_its_error_and_the_next_commands(
    random_model: Path, tmp_path: Path, run_command: Callable[..., tuple[int, str, str]]
) -> None:
    sizes = ["--steps", "1", "--prompts-per-step", "2", "--samples-per-prompt", "2", "--max-tokens", "4"]
    model = ["--model", str(random_model), "--reward", f"{tmp_path / 'mine.py'}:vowels", "--evaluation.problems", "8"]
    (tmp_path / "mine.py").write_text(
        "def vowels(prompts, completions, **columns):\n    return [0.1 * len(p) for p in prompts]\n"
    )
    output = str(tmp_path / "run")
    code, out, err = run_command("train", "grpo", "--plain", "--output", output, *model, *sizes)
    assert code == 0
    said = out + err
    assert re.search(
        r"held-out reward +\d+\.\d\d -> \d+\.\d\d  \([+-]\d+\.\d\d ± \d+\.\d\d at 95 %, within noise\)", said
    )
    for command in (f"policygrad report {output}", f"policygrad eval {output}", f"policygrad train --resume {output}"):
        assert command in said
    assert "--steps 2" in said
