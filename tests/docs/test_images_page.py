"""docs/images.md: its commands run as they stand, only with fewer steps, and the row of data is read as the page says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from doubles.vision_models import FAMILIES, make_picture
from policygrad.cli import main
from policygrad.tasks import load_task
from policygrad.utils.message_parts import content_text, list_pictures

PAGE = (Path(__file__).parents[2] / "docs" / "images.md").read_text(encoding="utf-8")


@pytest.mark.full
def test_the_commands_train_evaluate_and_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    train, evaluate, report = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)[0].splitlines()
    fewer = ["--steps", "2", "--prompts-per-step", "4", "--samples-per-prompt", "4", "--evaluation.problems", "4"]
    fewer += ["--rewards.num-workers", "1"]
    assert main([*train.split()[1:], *fewer]) == 0
    assert "held-out accuracy" in capsys.readouterr().out
    assert main([*evaluate.split()[1:], "--problems", "4", "--samples", "1"]) == 0
    assert "shapes-run" in capsys.readouterr().out
    assert main(report.split()[1:]) == 0
    assert "data:image/png;base64," in Path("shapes-run/report.html").read_text(encoding="utf-8")


def test_the_row_of_data_is_read(tmp_path: Path) -> None:
    [row] = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "1.png").write_bytes(make_picture(32, 32, 1).data)
    (tmp_path / "rows.jsonl").write_text(row, encoding="utf-8")
    example = load_task(str(tmp_path / "rows.jsonl")).train_example(0)
    assert not isinstance(example.prompt, str)
    assert content_text(example.prompt[0]["content"]) == "[image]How many circles?"
    assert len(list(list_pictures(example.prompt))) == 1
    assert example.columns == {"answer": json.loads(row)["answer"]}


def test_every_tested_family_is_in_the_table() -> None:
    assert all(f"`{name}`" in PAGE for name in FAMILIES)
