"""What the page answers first: the result and its error, what was trained, the equation, the notes, and the step in progress."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

from doubles.runs import run_folder
from policygrad.report.data import group_runs, read_run
from policygrad.report.page import render_report
from policygrad.report.summary import find_step_in_progress, list_notes, load_equation, summarise_result
from policygrad.trackers import JsonlTracker

HELD = [(0, {"eval/reward": 0.15, "eval/reward_stderr": 0.03}), (8, {"eval/reward": 0.09, "eval/reward_stderr": 0.03})]
STEPS = [(step, {"reward": step / 10, "time/rollout": 1.0, "time/update": 0.5}) for step in range(1, 9)]


def test_a_result_within_noise_says_so(tmp_path: Path) -> None:
    (group,) = group_runs([read_run(run_folder(tmp_path / "a", [HELD[0], *STEPS, HELD[1]]))])
    result = summarise_result(group)
    assert result.change == "-0.060 ± 0.083 at 95 %, within noise"
    assert result.what == "dapo on embedded, model tiny, 8 steps in 12s"


def test_without_an_evaluation_the_reward_in_training_is_told(tmp_path: Path) -> None:
    (group,) = group_runs([read_run(run_folder(tmp_path / "a", STEPS))])
    result = summarise_result(group)
    assert (result.metric, result.before, result.after, result.interval) == ("reward in training", 0.1, 0.8, None)


def test_the_equation_has_the_numbers_of_the_run_and_imports_no_code_of_the_users(tmp_path: Path) -> None:
    config = read_run(run_folder(tmp_path / "a", STEPS)).config
    equation = load_equation(config)
    assert "1.2" in equation["w"]
    assert "mean_g" in equation["\u03a8"]
    own: dict[str, Any] = {**config["algorithm"], "gate": {"part": "mine:Tent"}}
    assert load_equation({"algorithm": own}) == {}


def test_notes_stand_before_the_curves(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "a", STEPS)
    with JsonlTracker(folder) as files:
        for step in (2, 3):
            files.append_note(step, f"step {step}: <b>81% were cut off", "truncated")
    text = render_report([read_run(folder)])
    assert "&lt;b&gt;81% were cut off (2 times, last at step 3)" in text
    assert text.index("What to look at") < text.index('id="curves"')


def test_a_run_shows_its_step_in_progress_while_its_process_is_there(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "a", STEPS[:3])
    found = find_step_in_progress(read_run(folder))
    assert found is not None
    assert (found.step, found.of, found.usual, found.is_running) == (4, 8, 1.5, True)
    owner = {"pid": os.getpid(), "host": socket.gethostname()}
    (folder / "lock").write_text(json.dumps(owner))
    assert find_step_in_progress(read_run(folder)) == found
    (folder / "lock").write_text(json.dumps(owner | {"pid": 2**22 + 1}))  # beyond the largest number of a process
    ended = find_step_in_progress(read_run(folder))
    assert ended is not None
    assert not ended.is_running
    (folder / "result.json").write_text('{"steps": 3}')
    assert find_step_in_progress(read_run(folder)) is None


def test_many_configurations_are_a_table(tmp_path: Path) -> None:
    runs = [read_run(run_folder(tmp_path / f"{i}", [HELD[0], *STEPS, HELD[1]], lr=0.1 * i)) for i in range(1, 5)]
    text = render_report(runs)
    assert "<h1>dapo, 4 configurations</h1>" in text
    assert text.count("-0.060 ± 0.083 at 95 %, within noise</td>") == 4
    assert '<th scope="row">lr=0.1</th>' in text


def test_notes_of_several_runs_are_told_once(tmp_path: Path) -> None:
    folders = [run_folder(tmp_path / name, STEPS, seed=seed) for seed, name in enumerate("abc")]
    for share, folder in zip((81, 92), folders, strict=False):
        with JsonlTracker(folder) as files:
            files.append_note(share - 80, f"{share}% were cut off", "truncated")
    with JsonlTracker(folders[2]) as files:
        files.append_note(0, "few groups", "few groups")
    assert list_notes([read_run(folder) for folder in folders]) == [
        ("2 of 3 runs", "92% were cut off (2 times, last at step 12)"),
        (str(folders[2]), "few groups (before the first step)"),
    ]
