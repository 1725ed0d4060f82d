"""docs/distillation.md, from itself: its commands are runs, its data is written, and a run on it follows its teacher."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from doubles.files import rows

TEXT = (Path(__file__).parents[2] / "docs" / "distillation.md").read_text(encoding="utf-8")
PAGE = TEXT.partition("## From itself")[2]
BLOCKS: dict[str, str] = dict(re.findall(r"```python ([\w-]+)\n(.*?)```", PAGE, re.DOTALL))
COMMANDS = [shlex.split(line) for line in re.findall(r"^    (policygrad train .*)$", PAGE, re.MULTILINE)]
Command = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize("argv", COMMANDS, ids=lambda argv: " ".join(argv[2:4]))
def test_commands_are_runs(run_command: Command, argv: list[str]) -> None:
    code, out, err = run_command(*argv[1:], "--dry-run")
    assert code == 0, err
    assert "templates = [" in out


def test_hints_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(BLOCKS["hints"].replace("6000", "20"), {})
    first = json.loads(Path("hints.jsonl").read_text().splitlines()[0])
    assert first["completion"] in first["prompt"]


@pytest.mark.full
def test_a_run_follows_its_teacher(run_command: Command, tmp_path: Path) -> None:
    """The embedded model draws near what it says under a hint, whether that is any good or not."""
    few = ["--steps", "8", "--prompts-per-step", "8", "--samples-per-prompt", "4", "--evaluation.problems", "0"]
    few += ["--rewards.num-workers", "1"]
    code, _, err = run_command("train", "opsd", *few, "--lr", "3e-3", "--output", str(tmp_path / "run"))
    assert code == 0, err
    kl = [row["teacher/kl"] for row in rows(tmp_path / "run" / "metrics.jsonl") if "teacher/kl" in row]
    assert len(kl) == 8
    assert sum(kl[-3:]) < 0.97 * sum(kl[:3])
    code, out, err = run_command("verify", str(tmp_path / "run"))
    assert code == 0, out + err


def test_the_function_with_feedback_counts_words() -> None:
    names: dict[str, Any] = {}
    exec(BLOCKS["feedback"], names)
    assert names["within_limit"](["p"], ["a few words"]) == [1.0]
    (result,) = names["within_limit"](["p"], ["word " * 31])
    assert result == {"score": 0.0, "feedback": "The answer has 31 words, and 30 are allowed."}
