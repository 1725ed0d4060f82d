"""What a run writes into its folder and says of it: run.toml before all else, completions without a reward, its result."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import policygrad as pg
from doubles.files import rows
from doubles.trackers import Record

SMALL: dict[str, Any] = {"steps": 1, "prompts_per_step": 2, "samples_per_prompt": 2}
TASK = [{"prompt": "1 + 1 ="}, {"prompt": "1 + 2 ="}]


def mine(folder: Path, body: str) -> str:
    (folder / "mine.py").write_text(f"def mine(prompts, completions, **columns):\n    return {body}\n")
    return f"{folder / 'mine.py'}:mine"


def test_run_toml_is_the_first_file(random_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from policygrad.training import base_trainer

    def killed(folder: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(base_trainer, "JsonlTracker", killed)
    run = pg.Run(
        **SMALL,
        model=str(random_model),
        task=TASK,
        reward=(mine(tmp_path, "[0.5]"),),
        evaluation=pg.EvaluationConfig(problems=0),
        rewards=pg.RewardConfig(num_workers=1),
        output=str(tmp_path / "run"),
    )
    with pytest.raises(KeyboardInterrupt):
        pg.train(run)
    monkeypatch.undo()
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["lock", "run.toml"]
    assert pg.train(run, resume=tmp_path / "run").steps == 1


def test_eval_completions_without_a_reward_count_as_zero(random_model: Path, tmp_path: Path) -> None:
    display = Record()
    run = pg.Run(
        **SMALL,
        model=str(random_model),
        task=TASK,
        reward=(mine(tmp_path, "[None]"),),
        evaluation=pg.EvaluationConfig(problems=2, samples_per_prompt=2),
        rewards=pg.RewardConfig(max_failed_steps=0),
        output=str(tmp_path / "run"),
    )
    pg.train(run, display=display)
    assert "4 of 4 held-out completions have no reward and count as 0" in display.notes


@pytest.mark.full
def test_the_seed_sets_the_global_random_state(random_model: Path, tmp_path: Path) -> None:
    states = []
    for name in ("a", "b"):
        torch.manual_seed(len(name) + len(states))
        pg.train(
            pg.Run(
                **SMALL,
                model=str(random_model),
                task=TASK,
                reward=(mine(tmp_path, "[0.5]"),),
                evaluation=pg.EvaluationConfig(problems=0),
                rewards=pg.RewardConfig(num_workers=1),
                output=str(tmp_path / name),
            )
        )
        states.append(torch.get_rng_state())
        shutil.rmtree(tmp_path / name)
    assert torch.equal(*states)


def test_a_completion_without_a_reward_is_logged(random_model: Path, tmp_path: Path) -> None:
    reward = mine(tmp_path, "[None if sum(map(ord, completions[0])) % 2 else 1.0]")
    run = pg.Run(
        algorithm=pg.DR_GRPO,
        model=str(random_model),
        task=TASK,
        reward=(reward,),
        steps=1,
        prompts_per_step=2,
        samples_per_prompt=8,
        evaluation=pg.EvaluationConfig(problems=0),
        rewards=pg.RewardConfig(num_workers=1),
        output=str(tmp_path / "run"),
    )
    pg.train(run)
    completions = rows(tmp_path / "run" / "completions.jsonl")
    assert {row["reward"] for row in completions} == {None, 1.0}
    assert all(1 <= row["tokens"] <= 32 for row in completions)
    sampled = rows(tmp_path / "run" / "metrics.jsonl")[-1]["tokens/sampled"]
    assert sum(row["tokens"] for row in completions) == sampled


@pytest.mark.full
def test_a_run_without_any_score_reports_it(random_model: Path, tmp_path: Path) -> None:
    display = Record()
    run = pg.Run(
        **SMALL,
        model=str(random_model),
        task=TASK,
        reward=(mine(tmp_path, "[None]"),),
        evaluation=pg.EvaluationConfig(problems=2, samples_per_prompt=2),
        rewards=pg.RewardConfig(max_failed_steps=0),
        checkpoint=pg.CheckpointConfig(every=1),
        output=str(tmp_path / "run"),
    )
    result = pg.train(run, display=display)
    assert result.before is result.after is None
    assert display.summary["held-out"].startswith("nothing could be scored, before or after")
    written = json.loads((tmp_path / "run" / "result.json").read_text())
    assert written["eval_reward_before"] is written["eval_reward_after"] is None
    assert "eval/reward" not in (tmp_path / "run" / "metrics.jsonl").read_text()
    pg.train(replace(run, steps=2, reward=(mine(tmp_path, "[0.25]"),)), resume=tmp_path / "run", display=display)
    assert display.summary["held-out reward"] == "not scored -> 0.25"


@pytest.mark.skipif(os.name == "nt", reason="modes are not Windows's")
@pytest.mark.parametrize("umask", [0o027, *(pytest.param(umask, marks=pytest.mark.full) for umask in (0o022, 0o077))])
def test_files_have_the_umasks_modes(small: pg.Run, tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        result = pg.train(replace(small, **{**SMALL, "steps": 2}, output=str(tmp_path / "run")), stop_after=1)
        pg.train(resume=result.output)
    finally:
        os.umask(before)
    paths = [result.output, *result.output.rglob("*")]
    assert {"tensors.safetensors", "model.safetensors", "tokenizer.json", "lock"} <= {path.name for path in paths}
    results = {(path.is_dir(), oct(path.stat().st_mode & 0o777)) for path in paths}
    assert results == {(False, oct(0o666 & ~umask)), (True, oct(0o777 & ~umask))}
