"""`policygrad runs`: each run's state is read from its folder alone, and the table fits 80 columns."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from doubles.files import write_rows
from policygrad.commands import runs
from policygrad.commands.runs import find_runs, format_runs, read_status, shorten_middle
from policygrad.report import data
from policygrad.utils.filesystem import hold_lock, is_locked, write_lock_owner

Command = Callable[..., tuple[int, str, str]]


def make_run(folder: Path, *, steps: int = 10, done: int = 4, saved: int | None = None, result: Any = None) -> Path:
    """A run's folder with `done` steps of two seconds each."""
    folder.mkdir(parents=True)
    (folder / "run.toml").write_text(f'steps = {steps}\n[algorithm]\nname = "grpo"\n', encoding="utf-8")
    rows = [{"step": 0, "eval/reward": 0.25}]
    rows += [{"step": n, "reward": n / 10, "time/rollout": 1.5, "time/update": 0.5} for n in range(1, done + 1)]
    write_rows(folder / "metrics.jsonl", rows)
    if saved is not None:
        (folder / "checkpoints" / f"step-{saved:06}").mkdir(parents=True)
    if result is not None:
        (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")
    return folder


def test_states_are_read_from_the_folder(tmp_path: Path) -> None:
    finished = {"steps": 10, "eval_reward_before": 0.25, "eval_reward_after": 0.5}
    assert read_status(make_run(tmp_path / "a", done=10, saved=10, result=finished), tmp_path).state == "finished"
    assert read_status(make_run(tmp_path / "b", saved=4), tmp_path).state == "stopped"
    assert read_status(make_run(tmp_path / "c", saved=3), tmp_path).state == "failed"  # step 4 is lost
    assert read_status(make_run(tmp_path / "d"), tmp_path).state == "failed"
    with hold_lock(make_run(tmp_path / "e") / "lock") as file:
        write_lock_owner(file)
        status = read_status(tmp_path / "e", tmp_path)
    assert (status.state, status.step, status.steps, status.left_seconds) == ("running", 4, 10, 12.0)
    assert (status.metric, status.before, status.value) == ("eval/reward", None, 0.25)
    assert read_status(tmp_path / "e", tmp_path).state == "failed"


def test_the_owner_of_a_lock_that_is_gone_holds_nothing(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    assert not is_locked(lock)
    for text in ("", "{}", '{"pid": "x", "host": 1}', json.dumps({"pid": os.getpid(), "host": "elsewhere"})):
        lock.write_text(text)
        assert not is_locked(lock)
    with hold_lock(lock) as file:
        write_lock_owner(file)
        assert is_locked(lock)


def test_damaged_files_count_as_empty(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a")
    (folder / "run.toml").write_text("steps = ")
    (folder / "result.json").write_text("[1]")
    (folder / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n{"step": "2"}\n{"st')
    status = read_status(folder, tmp_path)
    assert (status.step, status.steps, status.value, status.state) == (1, None, 0.5, "failed")


def test_runs_are_found_below_a_folder_but_not_in_a_run(tmp_path: Path) -> None:
    make_run(tmp_path / "deep" / "er" / "one")
    make_run(tmp_path / "two")
    make_run(tmp_path / "two" / "verification" / "hidden")
    assert [f.name for f in find_runs(tmp_path)] == ["one", "two"]
    assert [*find_runs(tmp_path / "two")] == [tmp_path / "two"]


def test_the_table_fits_and_the_newest_is_first(run_command: Command, tmp_path: Path) -> None:
    for number, name in enumerate(("old", "a-name-that-is-much-too-long-for-a-column-of-a-table-with-eighty", "new")):
        folder = make_run(
            tmp_path / name, steps=100_000, done=3, result={"eval_reward_before": 0.1, "eval_reward_after": 0.9}
        )
        os.utime(folder / "run.toml", (number, number))
    code, out, _ = run_command("runs", str(tmp_path))
    assert code == 0
    head, *rows = out.splitlines()
    assert head.split() == ["run", "algorithm", "step", "result", "state", "age", "left"]
    assert [row.partition(" ")[0][:6] for row in rows] == [
        "new",
        "a-name",
        "",
        "old",
    ]  # the row of a long name is below it
    assert "0.10 → 0.90" in rows[0]
    assert max(map(len, out.splitlines())) <= 80
    statuses = [read_status(f, tmp_path) for f in find_runs(tmp_path)]
    assert max(sum(len(text) for text, _ in line) for line in format_runs(statuses, 80)) <= 80
    assert shorten_middle("abcdefghij", 5) == "ab…ij"


def test_supervised_runs_have_their_own_numbers(tmp_path: Path) -> None:
    folder = tmp_path / "sft-1"
    folder.mkdir()
    (folder / "sft.toml").write_text("epochs = 2\n")
    write_rows(folder / "metrics.jsonl", [{"step": 5, "loss": 1.5, "epoch": 0.5, "time/step": 1.0}])
    status = read_status(folder, tmp_path)
    assert (status.kind, status.algorithm, status.step, status.steps) == ("sft", "sft", 5, 20)
    assert (status.metric, status.value) == ("loss", 1.5)


def test_a_folder_without_runs_and_one_that_is_none(run_command: Command, tmp_path: Path) -> None:
    assert run_command("runs", str(tmp_path))[:2] == (0, f"no runs in {tmp_path}\n")
    code, _, err = run_command("runs", str(tmp_path / "no"))
    assert code == 2
    assert "is not a folder: give one that holds runs" in err
    make_run(tmp_path / "a")
    [told] = json.loads(run_command("runs", str(tmp_path), "--json")[1])["runs"]
    assert (told["name"], told["algorithm"], told["state"], told["left_seconds"]) == ("a", "grpo", "failed", None)


@pytest.mark.full
def test_the_states_of_real_runs(run_command: Command, random_model: Path, tmp_path: Path) -> None:
    write_rows(tmp_path / "sums.jsonl", [{"prompt": f"{i} =\n", "answer": str(i)} for i in range(20)])
    options = [
        "--model",
        str(random_model),
        "--task",
        str(tmp_path / "sums.jsonl"),
        "--reward",
        "exact_match",
        "--steps",
        "2",
    ]
    options += [
        "--prompts-per-step",
        "2",
        "--samples-per-prompt",
        "2",
        "--max-tokens",
        "4",
        "--evaluation.problems",
        "2",
    ]
    assert run_command("train", "grpo", *options, "--output", str(tmp_path / "runs" / "done"))[0] == 0
    assert (
        run_command("train", "grpo", *options, "--output", str(tmp_path / "runs" / "half"), "--stop-after", "1")[0] == 0
    )
    told = json.loads(run_command("runs", str(tmp_path / "runs"), "--json")[1])["runs"]
    assert {run["name"]: (run["state"], run["step"]) for run in told} == {
        "done": ("finished", 2),
        "half": ("stopped", 1),
    }


def test_its_files_of_a_run_are_those_of_the_report() -> None:
    assert {file: kind for kind, file in data.CONFIG_FILES.items()} == runs.CONFIG_FILES
