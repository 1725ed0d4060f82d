"""A reward that fails everywhere ends the run, resumably; one that fails now and then does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import policygrad as pg
from doubles.files import rows
from doubles.trackers import Record
from policygrad.rewards.workers import pool

MINE = """
import os, pathlib, time
here = pathlib.Path(__file__).parent

def broken(prompts, completions, **columns):
    if not (here / "mended").exists(): raise ValueError("the judge is away")
    return [float(len(c) % 2) for c in completions]

def later(prompts, completions, **columns):
    if (here / "broken").exists(): raise ValueError("the judge has left")
    return [float(len(c) % 2) for c in completions]

def length(prompts, completions, **columns):
    return [float(len(c)) for c in completions]

def elsewhere(prompts, completions, **columns):
    return [None for c in completions]

def hangs(prompts, completions, **columns):
    while not (here / "mended").exists(): time.sleep(1000)
    return [1.0]
"""


@pytest.fixture
def run(small: pg.Run, tmp_path: Path) -> pg.Run:
    (tmp_path / "mine.py").write_text(MINE)
    return replace(
        small,
        prompts_per_step=2,
        samples_per_prompt=4,
        sampling=pg.SamplingParams(max_tokens=4),
        output=str(tmp_path / "run"),
        rewards=pg.RewardConfig(num_workers=1, timeout=0.3),
        checkpoint=pg.CheckpointConfig(),
    )


def mine(run: pg.Run) -> Path:
    return Path(str(run.output)).parent / "mine.py"


def named(run: pg.Run, function: str, **changes: object) -> pg.Run:
    return replace(run, reward=(f"{mine(run)}:{function}",), **changes)  # type: ignore[arg-type]


def test_a_reward_that_applies_to_no_sample_is_no_metric(run: pg.Run) -> None:
    """Its mean would be over nothing: it is left out, and the other one is reported."""
    both = replace(run, reward=tuple(f"{mine(run)}:{name}" for name in ("length", "elsewhere")), steps=1)
    pg.train(both, display=False)
    step = next(row for row in rows(Path(str(run.output)) / "metrics.jsonl") if row.get("step") == 1)
    named_rewards = {name for name in step if name.startswith("rewards/") and not name.startswith("rewards/failed_")}
    assert {name.rsplit(":", 1)[-1] for name in named_rewards} == {"length", "length/std"}


def test_a_reward_that_fails_everywhere_ends_the_run_at_its_first_step(run: pg.Run) -> None:
    with pytest.raises(pg.RewardError) as caught:
        pg.train(named(run, "broken", steps=2), display=False)
    message = str(caught.value)
    assert message.startswith("no sample of the first step has a reward: reward ")
    assert "ValueError: the judge is away" in message
    assert (
        f"Step 1 is saved: policygrad train --resume {run.output} --allow-code {mine(run)} resumes once the reward works"
        in message
    )
    (Path(str(run.output)).parent / "mended").touch()
    assert pg.train(resume=run.output, display=False).steps == 2  # type: ignore[arg-type]
    assert [row["step"] for row in rows(Path(str(run.output)) / "metrics.jsonl")] == [1, 2]


def test_a_run_whose_only_step_fails_is_an_error(run: pg.Run) -> None:
    with pytest.raises(pg.RewardError, match="no sample of the first step"):
        pg.train(named(run, "broken", steps=1), display=False)
    assert not (Path(str(run.output)) / "result.json").exists()


class Breaks(pg.Callback):
    """The reward stops working after the second step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def step(self, trainer: object, step: int, metrics: object) -> None:
        if step == 2:
            (self.folder / "broken").touch()


def test_consecutive_failed_steps_end_the_run(run: pg.Run, tmp_path: Path) -> None:
    with pytest.raises(pg.RewardError, match=r"the last 3 steps, all in a row \(100%, 100%, 100%\).*Step 5 is saved"):
        pg.train(named(run, "later", steps=20), callbacks=[Breaks(tmp_path)], display=False)
    with pytest.raises(pg.RewardError, match=r"first step has a reward.*Step 6 is saved"):
        pg.train(resume=tmp_path / "run", display=False)
    (tmp_path / "broken").unlink()
    assert pg.train(resume=tmp_path / "run", stop_after=1, display=False).steps == 7


def test_a_failed_first_evaluation_ends_the_run(run: pg.Run, tmp_path: Path) -> None:
    measured = pg.EvaluationConfig(problems=3, samples_per_prompt=2)
    run = replace(run, steps=1)
    with pytest.raises(
        pg.RewardError, match=r"no sample of the first evaluation .*the judge is away.*--resume .* resumes"
    ):
        pg.train(named(run, "broken", evaluation=measured), display=False)
    (tmp_path / "mended").touch()
    assert pg.train(resume=tmp_path / "run", display=False).before is not None


@pytest.mark.full
@pytest.mark.parametrize("problems", [0, 3])
def test_a_reward_that_hangs_on_every_sample_ends_the_run(
    run: pg.Run, tmp_path: Path, problems: int, run_command: Callable[..., tuple[int, str, str]]
) -> None:
    record = Record()
    with pytest.raises(
        pg.RewardError, match=r"'.*hangs' has not returned a single reward, and 4 calls of it were lost"
    ):
        pg.train(named(run, "hangs", evaluation=pg.EvaluationConfig(problems=problems)), display=record)
    if problems:
        return
    assert (
        f"step 1 failed: policygrad train --resume {run.output} --allow-code {mine(run)} resumes from step 0"
        in record.said
    )
    code, _, err = run_command("train", "--resume", str(run.output), "--plain")
    assert code != 0
    assert "has not returned a single reward" in err
    (tmp_path / "mended").touch()
    assert pg.train(resume=tmp_path / "run", stop_after=1, display=False).steps == 1


class Phases(pg.Tracker):
    """Remembers what happens meanwhile."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int, int]] = []

    def phase(self, text: str, done: int = 0, total: int = 0) -> None:
        self.told.append((text, done, total))


@pytest.mark.full
def test_the_display_shows_what_is_waited_for(run: pg.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "REPORT_AFTER_SECONDS", 0.0)
    monkeypatch.setattr(pool, "MIN_LOST_CALLS", 1)
    monkeypatch.setattr(
        pool, "_REPORT_INTERVAL", 0.0
    )  # a worker may be slow to load, and then the reward is lost within a second
    display = Phases()
    with pytest.raises(pg.RewardError):
        pg.train(named(run, "hangs"), display=display)
    assert any(text.startswith("waiting for re") and total == 8 for text, _, total in display.told)
    assert display.told[-1] == ("", 0, 0)


def test_max_failed_steps_zero_never_ends_the_run(run: pg.Run) -> None:
    patient = pg.RewardConfig(num_workers=1, max_failed_steps=0)
    result = pg.train(
        named(run, "broken", rewards=patient, steps=2, evaluation=pg.EvaluationConfig(problems=2)), display=False
    )
    assert (result.steps, result.before, result.after) == (2, None, None)
