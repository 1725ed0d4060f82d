"""Runs whose memory runs out: they go on with less at a time, keep what fitted, and end resumably where one text does not fit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import policygrad as pg
from doubles.files import weights
from doubles.short_memory import ON_CPU, short_of_memory
from policygrad.checkpoint.format import newest_step
from policygrad.cli import main
from policygrad.errors import MemoryStopError
from policygrad.learners.local.learner import LocalLearner
from policygrad.learners.local.optimizer import Optimizer
from policygrad.models.loading import load_model
from policygrad.trackers import Tracker
from policygrad.training import memory_limits
from policygrad.training.memory_limits import MemoryUse
from policygrad.training.trainer import Trainer


class Notes(Tracker):
    """Keeps what was said."""

    def __init__(self) -> None:
        self.said = list[str]()

    def note(self, text: str) -> None:
        self.said.append(text)

    def shortages(self) -> list[str]:
        return [text for text in self.said if text.startswith("out of memory")]


@pytest.fixture(scope="module")
def run(small: pg.Run) -> pg.Run:
    return replace(
        small,
        algorithm=pg.GRPO,
        steps=3,
        learner=pg.LearnerConfig(micro_tokens=128),
        optimizer=pg.OptimizerConfig(eps=1.0),
    )


@pytest.fixture(scope="module")
def undisturbed(run: pg.Run, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """The run's folder, and how many passes it has."""
    with short_of_memory() as passes:
        folder = pg.train(replace(run, output=str(tmp_path_factory.mktemp("plain") / "run")), display=False).output
    return folder, passes.count


def completions(folder: Path) -> list[str]:
    return [json.loads(line)["completion"] for line in (folder / "completions.jsonl").read_text().splitlines()]


def check_alike(folder: Path, expected: Path) -> None:
    assert completions(folder) == completions(expected)
    actual, wanted = weights(folder), weights(expected)
    assert all(torch.allclose(actual[name], x, rtol=1e-5, atol=1e-6) for name, x in wanted.items())


def test_a_run_goes_on_and_its_completions_and_weights_are_those_of_an_undisturbed_one(
    run: pg.Run, undisturbed: tuple[Path, int], tmp_path: Path
) -> None:
    expected, count = undisturbed
    notes = Notes()
    with short_of_memory(40, count // 2, count - 2):
        done = pg.train(replace(run, output=str(tmp_path / "run")), display=notes)
    check_alike(done.output, expected)
    assert len(notes.shortages()) == 3
    kept = json.loads((done.output / "memory.json").read_text())
    limits = {option: values["limit"] for option, values in kept.items()}
    assert limits.keys() <= {"learner.micro_tokens", "sampling.decode_rows"}
    flags = {"learner.micro_tokens": "--learner.micro-tokens", "sampling.decode_rows": "--decode-rows"}
    assert all(any(f"{flags[option]} {n} " in text for text in notes.shortages()) for option, n in limits.items())


def test_a_resumed_run_begins_with_what_fitted_unless_the_option_is_another(run: pg.Run, tmp_path: Path) -> None:
    limits = list[int | None]()
    tokens = list[int]()

    def looked_at(trainer: Trainer, stop_after: int | None, resume: Path | None) -> None:
        trainer.train(resume=resume, stop_after=stop_after)
        assert isinstance(trainer.learner, LocalLearner)
        limits.append(trainer.learner.memory.limit)
        tokens.append(trainer.learner.config.micro_tokens)

    run = replace(run, output=str(tmp_path / "run"))
    with short_of_memory() as passes:
        looked_at(Trainer(replace(run, output=str(tmp_path / "plain")), display=False), 1, None)
    with short_of_memory(passes.count):  # its last backward pass
        looked_at(Trainer(run, display=False), 1, None)
    looked_at(Trainer(run, display=False), 1, tmp_path / "run")
    changed = replace(run, learner=replace(run.learner, micro_tokens=100))
    looked_at(Trainer(changed, display=False), 1, tmp_path / "run")
    assert limits == [None, 64, 64, None]
    assert tokens == [128, 128, 64, 100]


def test_one_text_that_does_not_fit_ends_the_run_resumably_with_what_fills_the_memory(
    run: pg.Run, undisturbed: tuple[Path, int], tmp_path: Path
) -> None:
    expected, count = undisturbed
    folder, notes = tmp_path / "run", Notes()
    run = replace(run, output=str(folder))
    with short_of_memory(always_from=count - 3, error=ON_CPU), pytest.raises(MemoryStopError) as ended:
        pg.train(run, display=notes)
    assert ended.value.code == 75
    lines = str(ended.value).splitlines()
    assert f"policygrad train --resume {folder}" in lines[0]
    assert lines[1].startswith("What fills cpu (")
    table = {
        line.strip().rsplit("  ", 1)[0].strip(): line.rsplit("  ", 1)[1].strip()
        for line in lines[2 : lines.index(next(x for x in lines if x.startswith("To change")))]
    }
    numbers = sum(p.numel() for p in weights(expected).values())
    assert {"weights", "gradients", "moments"} <= table.keys()
    assert float(table["weights"].split()[0]) == pytest.approx(4 * numbers / 2**20, rel=0.2)
    assert float(table["moments"].split()[0]) == pytest.approx(2 * float(table["gradients"].split()[0]), rel=0.05)
    assert any(name.startswith("saved of ") for name in table), ended.value
    remedies = [line.strip() for line in lines[lines.index(next(x for x in lines if x.startswith("To change"))) + 1 :]]
    assert any(text.startswith("--learner.gradient-checkpointing") for text in remedies)
    assert any(text.startswith("--max-tokens below 8") for text in remedies)
    assert newest_step(folder / "checkpoints") == 2
    pg.train(resume=folder, allow_code=(), display=False)
    check_alike(folder, expected)


def test_the_command_ends_with_the_exit_code_of_a_run_that_can_be_resumed(
    run: pg.Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with short_of_memory(always_from=30):
        code = main(
            [
                "train",
                "grpo",
                "--steps",
                "2",
                "--model",
                run.model,
                "--reward",
                *run.reward,
                "--task",
                run.task,
                "--prompts-per-step",
                "4",
                "--max-tokens",
                "6",
                "--evaluation.problems",
                "0",
                "--output",
                "run",
                "--plain",
            ]
        )
    err = capsys.readouterr().err
    assert code == 75, err
    assert "Traceback" not in err
    assert "policygrad train --resume run" in err


def test_the_header_says_which_length_fits_where_that_is_near_what_may_be_sampled(
    run: pg.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With so little memory that 1,024 tokens just fit: below that it is a fact, beyond it there is a note with the remedy."""
    model = load_model(run.model)
    use = MemoryUse.measure(model, None, run)
    saved = use.estimate_saved(1024)
    assert saved is not None
    assert use.estimate_saved(512) == pytest.approx(saved / 2, rel=0.05)
    beside = use.parts["gradients"] + use.parts["moments"]
    monkeypatch.setattr(memory_limits, "_measure_free", lambda device: 1.7 * saved + beside)
    learner = SimpleNamespace(optimizers=[Optimizer(model, run.optimizer, 1e-3, 1)])
    for tokens, has_fact, has_note in ((8, False, False), (900, True, False), (1100, True, True)):
        changed = replace(run, sampling=replace(run.sampling, max_tokens=tokens))
        facts, note = memory_limits.describe_longest_text(model, learner, changed)
        assert (bool(facts), note is not None) == (has_fact, has_note), tokens
    assert facts["longest text"] == "about 1,024 tokens fit, prompt and completion"
    assert note is not None
    assert "completions may have 1,100 tokens" in note
    assert "--learner.gradient-checkpointing" in note
    learner.cuts_long_texts = lambda: True
    short = replace(changed, learner=replace(run.learner, micro_tokens=256))
    facts, note = memory_limits.describe_longest_text(model, learner, short)
    text, _, how = facts["longest text"].partition(" tokens fit")
    assert how == ", prompt and completion, read in segments of 256"
    config = model.config
    each = 8 * config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim + 12 * config.hidden_size
    assert int(text.split()[-1].replace(",", "")) == pytest.approx(256 + 0.75 * saved / each, rel=0.01)
    assert note is None


@pytest.mark.parametrize("kind", ["sft", "reward-model"])
def test_supervised_training_goes_on_too(kind: str, random_model: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"{i} + 1 =\n", "completion": f"{i + 1}\n"} for i in range(24)]
    if kind == "reward-model":
        rows = [{"prompt": r["prompt"], "chosen": r["completion"], "rejected": " no"} for r in rows]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options: dict[str, Any] = {
        "model": str(random_model),
        "data": str(data),
        "epochs": 1,
        "batch_size": 8,
        "learner": pg.LearnerConfig(micro_tokens=200),
        "optimizer": pg.OptimizerConfig(eps=1.0),
    }

    def train(name: str, display: Tracker | bool) -> dict[str, torch.Tensor]:
        output = str(tmp_path / name)
        if kind == "sft":
            return weights(pg.train_sft(pg.SFTConfig(**options, output=output), display=display).output)
        return weights(pg.train_reward_model(pg.RewardModelConfig(**options, output=output), display=display).output)

    with short_of_memory() as passes:
        expected = train("plain", False)
    notes = Notes()
    with short_of_memory(passes.count // 2, passes.count - 1):
        actual = train("short", notes)
    assert notes.shortages()
    assert all(torch.allclose(actual[name], x, rtol=1e-5, atol=1e-6) for name, x in expected.items())
    assert (tmp_path / "short" / "memory.json").exists()
