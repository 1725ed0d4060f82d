"""A run that was stopped: its last checkpoint as a model that others load, and the run goes on as if nobody had looked."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import policygrad as pg
from doubles.files import same, weights, write_rows
from doubles.resuming import rewind
from policygrad.checkpoint import format as checkpoint
from policygrad.errors import ConfigError, RunError
from policygrad.models.loading import load_model
from policygrad.training.export import export_stopped

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(small: pg.Run, tmp_path: Path) -> pg.Run:
    (tmp_path / "mine.py").write_text(
        "def mine(prompts, completions, **columns):\n    return [sum(map(ord, c)) % 7 / 7 for c in completions]\n"
    )
    reward = (f"{tmp_path / 'mine.py'}:mine",)
    return replace(
        small, steps=2, prompts_per_step=2, samples_per_prompt=2, reward=reward, output=str(tmp_path / "run")
    )


def test_the_export_equals_a_run_of_that_many_steps(run: pg.Run, tmp_path: Path, run_command: Command) -> None:
    full = pg.train(run, display=False).output
    stopped = rewind(full, tmp_path / "stopped", 1)
    code, out, err = run_command("export", str(stopped))
    assert (code, out.strip()) == (0, str(stopped / "model-step-1")), err
    one = pg.train(replace(run, steps=1, output=str(tmp_path / "one")), display=False)
    result = load_model(out.strip()).state_dict()
    assert same(result, load_model(str(one.output)).state_dict())
    assert not same(result, load_model(str(run.model)).state_dict())
    card = (stopped / "model-step-1" / "README.md").read_text()
    assert "| steps | 1 |" in card
    assert "The model was not evaluated." in card
    assert same(weights(pg.train(resume=stopped, allow_code=("/",), display=False).output), weights(full))
    code, _, err = run_command("export", str(stopped))  # which is over now
    assert code == 2
    assert "the trained model is already in" in err


def test_export_needs_permission_for_remote_code(run: pg.Run) -> None:
    stopped = pg.train(run, stop_after=1, display=False).output
    file = stopped / "run.toml"
    message = file.read_text()
    assert "trust_remote_code = false" in message
    file.write_text(message.replace("trust_remote_code = false", "trust_remote_code = true"))
    with pytest.raises(ConfigError, match=r"run\.toml: .* which a file cannot allow: add --trust-remote-code"):
        export_stopped(stopped)
    assert export_stopped(stopped, trust_remote_code=True).is_dir()


@pytest.mark.full
def test_an_exported_adapter_can_be_merged(run: pg.Run, run_command: Command) -> None:
    pytest.importorskip("peft")
    lora = replace(run, learner=pg.LearnerConfig(lora="rank=4", dtype="bf16"), lr=1e-2)
    stopped = pg.train(lora, stop_after=1, display=False).output
    code, _, err = run_command("export", str(stopped), "--merge")
    assert code == 2
    assert f"`policygrad export {stopped}` makes of its last checkpoint" in err
    code, out, err = run_command("export", str(stopped))
    assert code == 0, err
    assert (Path(out.strip()) / "adapter_model.safetensors").is_file()
    trained = {n: p for n, p in load_model(out.strip(), dtype="bf16").named_parameters() if p.requires_grad}
    saved = checkpoint.load_checkpoint(stopped / "checkpoints" / "step-000001").tensors
    assert {f"weights/{n}" for n in trained} == {n for n in saved if n.startswith("weights/")}
    assert all(torch.equal(p, saved[f"weights/{n}"]) for n, p in trained.items())
    assert run_command("export", out.strip(), "--merge", "--output", str(stopped.parent / "merged"))[0] == 0
    assert load_model(str(stopped.parent / "merged")) is not None


def test_a_stopped_fine_tuning_run_is_exported(run: pg.Run, tmp_path: Path, run_command: Command) -> None:
    data = write_rows(tmp_path / "d.jsonl", [{"prompt": f"{a} + 1 =", "completion": str(a + 1)} for a in range(40)])
    config = pg.SFTConfig(data=data, model=str(run.model), batch_size=8, lr=1e-2, output=str(tmp_path / "sft"))
    stopped = pg.train_sft(config, stop_after=1, display=False).output
    code, out, err = run_command("export", str(stopped))
    assert (code, out.strip()) == (0, str(stopped / "model-step-1")), err
    assert not same(load_model(out.strip()).state_dict(), load_model(str(run.model)).state_dict())


def test_invalid_exports_are_refused(run: pg.Run, tmp_path: Path) -> None:
    stopped = pg.train(run, stop_after=1, display=False).output
    config = (stopped / "run.toml").read_text()
    (stopped / "run.toml").write_text(config.replace(str(run.model), "object:LlamaForCausalLM"))
    with pytest.raises(RunError, match="started from Python with a model or tokenizer in memory"):
        export_stopped(stopped)
    (stopped / "run.toml").write_text(config.replace(str(run.model), "tiny"))
    with pytest.raises(RunError, match=r"step-000001 does not fit the model 'tiny'"):
        export_stopped(stopped)
    (stopped / "run.toml").write_text(config)
    (stopped / "checkpoints").rename(tmp_path / "elsewhere")
    with pytest.raises(RunError, match=f"has no checkpoint yet: resume it with policygrad train --resume {stopped}"):
        export_stopped(stopped)
    with pytest.raises(RunError, match="holds no run"):
        export_stopped(tmp_path)
    assert json.loads((tmp_path / "elsewhere" / "step-000001" / "state.json").read_text())["step"] == 1
