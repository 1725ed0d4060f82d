"""--export of report, compare and lab, by the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from doubles.runs import run_folder

Command = Callable[..., tuple[int, str, str]]
HELD = [(0, {"eval/reward": 0.15, "eval/reward_stderr": 0.03}), (8, {"eval/reward": 0.5, "eval/reward_stderr": 0.03})]


def test_report_writes_its_curves_a_table_and_what_can_be_said(tmp_path: Path, run_command: Command) -> None:
    run = run_folder(tmp_path / "a", [HELD[0], *((s, {"reward": s / 10}) for s in range(1, 9)), HELD[1]])
    code, out, err = run_command("report", str(run), "--export", str(tmp_path / "new" / "figures"), "--json")
    assert code == 0, err
    folder = tmp_path / "new" / "figures"
    assert json.loads(out)["export"] == str(folder)
    assert {path.name for path in folder.iterdir()} >= {"README.md", "reward.svg", "eval-reward.csv", "results.tex"}
    said = (folder / "README.md").read_text()
    assert "it has risen on these problems, of one run" in said
    assert f"policygrad report {run} --export {folder} --json" in said
    assert "[$0.267$, $0.433$]" in (folder / "results.tex").read_text()


def test_a_change_within_noise_is_not_claimed(tmp_path: Path, run_command: Command) -> None:
    run = run_folder(tmp_path / "a", [HELD[0], (8, HELD[1][1] | {"eval/reward": 0.2})])
    assert run_command("report", str(run), "--export", str(tmp_path / "out"))[0] == 0
    assert "within noise: no change can be claimed" in (tmp_path / "out" / "README.md").read_text()


def test_lab_writes_the_estimators_and_its_findings(tmp_path: Path, run_command: Command) -> None:
    folder = tmp_path / "lab"
    code, _, err = run_command(
        "lab", "--algorithm", "grpo", "rloo", "--experiment", "group_mean", "--export", str(folder)
    )
    assert code == 0, err
    names = {path.name for path in folder.iterdir()}
    assert names >= {"bias-and-variance-on-policy.svg", "estimators-on-policy.tex", "group_mean.svg", "group_mean.csv"}
    assert "rloo" in (folder / "estimators-on-policy.csv").read_text()
    assert "holds" in (folder / "README.md").read_text()


def test_a_folder_that_cannot_be_one_is_refused_before_any_work(tmp_path: Path, run_command: Command) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    run = run_folder(tmp_path / "a", HELD)
    for command in (["report", str(run)], ["lab"], ["compare", "grpo", "--output", str(tmp_path / "c")]):
        code, _, err = run_command(*command, "--export", str(file))
        assert code == 2
        assert "is a file: name a folder" in err
    assert run_command("report", str(run), "--watch", "--export", str(tmp_path / "x"))[0] == 2
    assert run_command("compare", "grpo", "--dry-run", "--export", str(tmp_path / "x"))[0] == 2
