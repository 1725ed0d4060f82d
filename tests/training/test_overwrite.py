"""A run that begins anew in the folder of another: that is deleted once the new one begins, not before, and not while it lives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import policygrad as pg
from doubles.files import rows, same, weights
from doubles.trackers import Record
from policygrad.errors import ConfigError, ModelError, RunError
from policygrad.training.interrupts import StopRequested
from policygrad.training.run_folder import LOCK_FILE, RUN_FILES, STASH
from policygrad.training.trainer import Trainer
from policygrad.utils.filesystem import HAS_FILE_LOCKS, hold_lock


@pytest.fixture
def run(small: pg.Run, tmp_path: Path) -> pg.Run:
    return replace(small, steps=2, prompts_per_step=2, samples_per_prompt=2, output=str(tmp_path / "run"))


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != LOCK_FILE
    }


@pytest.mark.full
def test_the_new_run_equals_one_in_an_empty_folder(run: pg.Run, tmp_path: Path) -> None:
    old = pg.train(run, display=False)
    (old.output / "report.html").write_text("of the old one")
    with pytest.raises(RunError, match=r"is not empty: resume .*; --overwrite deletes the run that is in it"):
        pg.train(run, display=False)
    new = replace(run, seed=1, steps=1)
    pg.train(new, overwrite=True, display=False)
    elsewhere = pg.train(replace(new, output=str(tmp_path / "elsewhere")), display=False)
    assert same(weights(old.output), weights(elsewhere.output))
    assert [row["step"] for row in rows(old.output / "metrics.jsonl")] == [1]
    assert set(files(old.output)) == set(files(elsewhere.output))
    assert not (old.output / STASH).exists()


def test_a_refused_run_leaves_the_old_one_unchanged(run: pg.Run) -> None:
    old = pg.train(run, display=False).output
    before = files(old)
    with pytest.raises(ModelError):
        pg.train(replace(run, model="nowhere/at/all"), overwrite=True, display=False)
    assert files(old) == before
    assert pg.train(resume=old, allow_code=("/",), display=False).steps == 2


def test_a_stop_while_loading_leaves_the_old_run(run: pg.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    old = pg.train(run, display=False).output
    before, record = files(old), Record()

    def stopped(trainer: Trainer, stack: object) -> None:
        raise StopRequested

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "build", stopped)
        result = pg.train(replace(run, seed=1), overwrite=True, display=record)
    assert result.interrupted
    assert f"the earlier run in {old} is unchanged" in record.said
    assert files(old) == before
    assert pg.train(resume=old, allow_code=("/",), display=False).steps == 2


@pytest.mark.skipif(not HAS_FILE_LOCKS, reason="this system has no such locks")
def test_an_active_run_is_not_overwritten(run: pg.Run) -> None:
    old = pg.train(run, stop_after=1, display=False).output
    before = files(old)
    with hold_lock(old / LOCK_FILE), pytest.raises(RunError, match="another process is at work on"):
        pg.train(run, overwrite=True, display=False)
    assert files(old) == before


def test_folders_with_other_files_are_not_overwritten(run: pg.Run, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("all of it")
    with pytest.raises(RunError, match="holds no run, so --overwrite deletes nothing"):
        pg.train(replace(run, output=str(tmp_path / "mine")), overwrite=True, display=False)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.tex"]
    old = pg.train(run, stop_after=1, display=False).output
    (old / "notes.md").write_text("what I saw")
    before = files(old)
    with pytest.raises(RunError, match=r"files that no run writes \(notes\.md\)"):
        pg.train(run, overwrite=True, display=False)
    assert files(old) == before


@pytest.mark.full
def test_overwriting_survives_a_kill_at_any_moment(run: pg.Run) -> None:
    """Put aside and killed before the new one began; the next try takes its place all the same."""
    old = pg.train(run, stop_after=1, display=False).output
    before = files(old)
    (old / STASH).mkdir()
    for path in list(old.iterdir()):
        if path.name not in (LOCK_FILE, STASH):
            path.rename(old / STASH / path.name)
    with pytest.raises(RunError, match="is not empty"):
        pg.train(run, display=False)
    (old / "run.toml").write_text("seed = 1\n")  # of the new one
    with pytest.raises(
        RunError, match=r"killed before it started: start it again with --overwrite; or, .*move the contents of"
    ):
        pg.train(resume=old, display=False)
    with pytest.raises(ModelError):
        pg.train(replace(run, model="nowhere/at/all"), overwrite=True, display=False)
    assert files(old) == before
    (old / STASH).mkdir()
    (old / "metrics.jsonl").rename(old / STASH / "metrics.jsonl")  # killed while it was put aside
    assert pg.train(run, overwrite=True, display=False).steps == 2
    assert not (old / STASH).exists()


def test_every_file_of_a_run_is_a_known_one(run: pg.Run) -> None:
    tracked = replace(run, track=("tensorboard",))
    left = {path.name for path in pg.train(tracked, display=False).output.iterdir()}
    assert left - {"tracked.json"} <= set(RUN_FILES)


def test_overwrite_needs_output_and_excludes_resume(
    run: pg.Run, run_command: Callable[..., tuple[int, str, str]]
) -> None:
    with pytest.raises(ConfigError, match="--overwrite replaces the run in the folder of --output"):
        pg.train(replace(run, output=None), overwrite=True, display=False)
    with pytest.raises(ConfigError, match="leave one of them out"):
        pg.train(run, resume=str(run.output), overwrite=True, display=False)
    sizes = "--steps 1 --prompts-per-step 2 --samples-per-prompt 2 --max-tokens 4 --evaluation.problems 0"
    argv = ["train", "--output", str(run.output), "--model", str(run.model), *sizes.split()]
    argv += ["--task", str(run.task), "--reward", run.reward[0], "--rewards.num-workers", "1"]
    assert run_command(*argv)[0] == 0
    assert run_command(*argv)[0] == 2
    assert run_command(*argv, "--overwrite")[0] == 0
    code, _, err = run_command("train", "--resume", str(run.output), "--overwrite")
    assert code == 2
    assert "--resume continues a run and --overwrite replaces it" in err
