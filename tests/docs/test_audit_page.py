"""docs/trust.md, on other trainers: its loop and its command give what the page says; its tables are complete."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from policygrad.audit.recording import FIELDS
from policygrad.cli import main

TEXT = (Path(__file__).parents[2] / "docs" / "trust.md").read_text(encoding="utf-8")
PAGE = TEXT.partition("## Another trainer")[2]


def test_the_command_prints_what_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    [program], [command], [output] = (
        re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL) for kind in ("python", "sh", "text")
    )
    exec(program, {})
    assert main(command.split()[1:]) == 1
    errors = r"to \d+e-\d+|to 0e\+00"  # roundings, which differ between machines
    assert re.sub(errors, "to …", capsys.readouterr().out) == re.sub(errors, "to …", output)


def test_every_field_has_its_row() -> None:
    table = PAGE.partition("| field |")[2].partition("\n\n")[0]
    names = {name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert names == set(FIELDS)
