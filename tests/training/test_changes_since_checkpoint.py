"""What is another than when a run began: refused where it is measured on, said where a run may go on with it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import policygrad as pg
from doubles.files import write_rows
from doubles.judge_server import judging
from doubles.trackers import Record
from policygrad.errors import RunError
from policygrad.report.data import read_run
from policygrad.report.page import render_report
from policygrad.training.provenance import compare_fingerprints, fingerprint_run
from policygrad.training.run_folder import check_resumable, with_end_marker

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def begun(small: pg.Run, tmp_path_factory: pytest.TempPathFactory) -> tuple[pg.Run, Path]:
    """A run stopped after its first step, whose task, held-out problems and reward are files of its own; and a copy of them all."""
    folder = tmp_path_factory.mktemp("changes") / "files"
    folder.mkdir()
    (folder / "mine.py").write_text(
        "def one(prompts, completions, **columns): return [float(len(c)) for c in completions]\n"
    )
    rows = [{"prompt": f"{i} + 1 =\n", "answer": "1"} for i in range(8)]
    run = replace(
        small,
        task=write_rows(folder / "task.jsonl", rows[:4]),
        eval_data=write_rows(folder / "held_out.jsonl", rows[4:]),
        reward=(f"{folder / 'mine.py'}:one",),
        output=str(folder / "run"),
        steps=3,
        prompts_per_step=2,
        samples_per_prompt=2,
        sampling=pg.SamplingParams(max_tokens=4),
    )
    pg.train(run, stop_after=1, display=False)
    shutil.copytree(folder, folder.with_name("copy"))
    return run, folder.with_name("copy")


@pytest.fixture
def run(begun: tuple[pg.Run, Path]) -> pg.Run:
    """The run as it was after its first step."""
    restore(begun)
    return begun[0]


def restore(begun: tuple[pg.Run, Path]) -> None:
    run, copy = begun
    shutil.rmtree(find_folder(run))
    shutil.copytree(copy, find_folder(run))


def find_folder(run: pg.Run) -> Path:
    """Where its files are."""
    return Path(str(run.output)).parent


def go_on(run: pg.Run, **changes: Any) -> str:
    """What a step more of the run says."""
    record = Record()
    pg.train(replace(run, **changes), resume=run.output, stop_after=1, display=record)
    return record.said


def test_changed_training_or_eval_data_are_refused(run: pg.Run) -> None:
    for file in ("task.jsonl", "held_out.jsonl"):
        path = find_folder(run) / file
        before = path.read_text()
        path.write_text(before.replace("1 =", "2 ="))
        with pytest.raises(
            RunError, match=rf"{file} is not what the run in .* started with.*restore the old file, or start a new run"
        ):
            go_on(run)
        path.write_text(before)
    assert "checkpoint" not in go_on(run)


def test_changes_that_may_be_intended_are_noted(run: pg.Run) -> None:
    message = go_on(run, seed=7, sampling=pg.SamplingParams(max_tokens=3), learner=pg.LearnerConfig(dtype="bf16"))
    assert (
        "changed since the checkpoint: seed 0 -> 7, sampling.max_tokens 4 -> 3, learner.dtype fp32 -> bf16" in message
    )
    assert "no longer bit for bit" in message
    mine = find_folder(run) / "mine.py"
    mine.write_text(mine.read_text() + "\n# mended\n")
    changed = replace(run, seed=7, sampling=pg.SamplingParams(max_tokens=3), learner=pg.LearnerConfig(dtype="bf16"))
    message = go_on(changed)
    assert f"{mine} changed since the checkpoint" in message
    assert "set otherwise" not in message


def test_every_changed_option_is_noted(begun: tuple[pg.Run, Path]) -> None:
    run = begun[0]
    cases: dict[str, dict[str, Any]] = {
        "lr 0.003 -> 0.5; the run continues, but no longer bit for bit": {"lr": 0.5},
        "optimizer.clip 1.0 -> 0.5; the run continues": {"optimizer": pg.OptimizerConfig(clip=0.5)},
        "algorithm.gate Clip(low=0.2, high=0.2, c=none) -> Clip(low=0.1": {
            "algorithm": replace(run.algorithm, gate=pg.Clip(0.1, 0.1))
        },
        "steps 3 -> 4": {"steps": 4},
        "checkpoint.every 1 -> 2": {"checkpoint": pg.CheckpointConfig(every=2, keep=3)},
        "rewards.num_workers 1 -> 2": {"rewards": pg.RewardConfig(num_workers=2)},
    }
    before = fingerprint_run(run, "cpu")
    for message, change in cases.items():
        (note,) = compare_fingerprints(before, fingerprint_run(replace(run, **change), "cpu"), run, Path())
        assert note.startswith(f"changed since the checkpoint: {message}"), note
        assert ("bit for bit" in note) is (not {"steps", "checkpoint", "rewards"} & set(change)), note


def test_card_and_report_list_changed_options_by_step(run: pg.Run) -> None:
    pg.train(replace(run, lr=0.5), resume=run.output, stop_after=1, display=False)
    pg.train(replace(run, lr=0.25), resume=run.output, display=False)
    lines = [f"after step 1: lr {run.lr} -> 0.5", "after step 2: lr 0.5 -> 0.25"]
    assert read_run(Path(run.output)).changes == tuple(lines)
    assert f"<dt>changed</dt><dd>{'; '.join(lines)}</dd>" in render_report([read_run(Path(run.output))]).replace(
        "-&gt;", "->"
    )
    card = (Path(run.output) / "model" / "README.md").read_text(encoding="utf-8")
    assert "## Changed during training" in card
    for line in lines:
        assert "| " + line.replace(": ", " | ") + " |" in card


@pytest.mark.full
def test_a_changed_rubric_is_noted(begun: tuple[pg.Run, Path], tmp_path: Path) -> None:
    run = begun[0]
    (tmp_path / "rubric.md").write_text("Short answers are good.")
    with judging(lambda completion, times: (200, '{"score": ' + str(1 + len(completion) % 5) + "}", {})) as asked:
        judge = f"judge:{tmp_path / 'rubric.md'},model=m,url={asked.url},cache={tmp_path / 'cache'}"
        judged = replace(run, reward=(f"0.5*{judge}", *run.reward), output=str(tmp_path / "judged"))
        pg.train(judged, stop_after=1, display=False)
        (tmp_path / "rubric.md").write_text("Long answers are good.")
        assert "rubric.md changed since the checkpoint" in go_on(judged)
    assert asked.bodies


def test_changed_versions_and_device_are_noted(begun: tuple[pg.Run, Path], tmp_path: Path) -> None:
    run = begun[0]
    before = fingerprint_run(run, "cuda")
    old = {**before, "versions": {**before["versions"], "torch": "1.0", "gone": "2"}}
    (message,) = compare_fingerprints(old, fingerprint_run(run, "cpu"), run, tmp_path)
    assert "versions changed since the checkpoint: torch 1.0 -> " in message
    assert "device cuda -> cpu" in message
    assert "gone" not in message
    assert compare_fingerprints(before, fingerprint_run(run, "cuda"), run, tmp_path) == []


def test_inputs_without_a_file_have_no_hash(begun: tuple[pg.Run, Path]) -> None:
    for task in ("embedded", "x" * 5000, "a\0b", [{"prompt": "1"}]):
        assert fingerprint_run(replace(begun[0], task=task, eval_data=None), "cpu")["files"] == {}


@pytest.mark.parametrize(
    "text", ["", "\n\n", "# complete only wi", '# complete only with its last line, "# end"\n# end\n']
)
@pytest.mark.parametrize(
    ("command", "file"), [("train", "run.toml"), ("sft", "sft.toml"), ("reward-model", "reward-model.toml")]
)
def test_an_empty_configuration_is_refused(
    run_command: Command, tmp_path: Path, text: str, command: str, file: str
) -> None:
    (tmp_path / file).write_text(text)
    code, _, err = run_command(command, "--resume", str(tmp_path), "--dry-run")
    assert code == 2
    assert f"{file} is empty, so the run's options are lost: restore a copy of it, or write it again" in err


def test_a_truncated_configuration_is_refused_wherever_it_ends(run: pg.Run) -> None:
    file = Path(str(run.output)) / "run.toml"
    text = file.read_text()
    assert check_resumable(file.parent, "train") == file.parent
    lines = text.splitlines(keepends=True)
    for end in range(len(lines) - 1):
        file.write_text("".join(lines[:end]))
        with pytest.raises(RunError, match=r"run\.toml is (truncated|empty), so the run's options are lost"):
            check_resumable(file.parent, "train")
    file.write_text(text + "\n# a remark of one's own\n")
    check_resumable(file.parent, "train")
    file.write_text("steps = 3\n")  # written by hand, or before there was a seal
    check_resumable(file.parent, "train")
    assert with_end_marker("a = 1\n").splitlines()[-1] == "# end"


def test_fine_tuning_notes_changes_too(random_model: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}", "answer": "1"} for i in range(8)]
    config = pg.SFTConfig(
        data=write_rows(tmp_path / "data.jsonl", [{"prompt": r["prompt"], "completion": r["answer"]} for r in rows]),
        model=str(random_model),
        batch_size=2,
        output=str(tmp_path / "sft"),
        checkpoint=pg.CheckpointConfig(every=1),
    )
    pg.train_sft(config, stop_after=1, display=False)
    record = Record()
    pg.train_sft(
        replace(config, learner=pg.LearnerConfig(micro_tokens=99)),
        resume=tmp_path / "sft",
        stop_after=1,
        display=record,
    )
    assert "learner.micro_tokens 0 -> 99" in record.said
    manifest = json.dumps(fingerprint_run(config, "cpu"))
    assert "data.jsonl" not in manifest
