"""docs/trust.md, on runs: its commands run as they stand, an untouched run holds, and the change is named as the page says."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from doubles.small_task import write_task
from policygrad.cli import main

TEXT = (Path(__file__).parents[2] / "docs" / "trust.md").read_text(encoding="utf-8")
PAGE = TEXT.partition("## Another trainer")[0]


@pytest.mark.full
def test_the_commands_do_what_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    [output] = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    train, verify = first.splitlines()
    assert main([*train.split()[1:], "--samples-per-prompt", "4", *write_task(tmp_path)]) == 0
    capsys.readouterr()
    assert main(verify.split()[1:]) == 0
    assert "steps 1, 3 repeated" in capsys.readouterr().out
    change, verify = second.splitlines()
    subprocess.run(change, shell=True, check=True)
    assert main(verify.split()[1:]) == 1
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert " ".join(output.split()) in lines
    assert {path.name for path in Path("trusted").glob("verify.*")} == {"verify.md", "verify.html", "verify.json"}
    assert main(["report", "trusted"]) == 0
    assert 'href="verify.html"' in Path("trusted/report.html").read_text(encoding="utf-8")
