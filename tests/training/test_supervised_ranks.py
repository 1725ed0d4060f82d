"""Fine-tuning and reward models in several processes: the gradients of one, and runs that are one process's, whoever goes on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

import policygrad as pg
from doubles.batches import VOCABULARY
from doubles.files import same, untimed, weights, write_rows
from doubles.models import changed_copy
from doubles.ranked import BATCH, SIZES, model, started
from policygrad.checkpoint import format as checkpoints
from policygrad.learners.fsdp.controller import FsdpController
from policygrad.learners.fsdp.processes import WorkerGroup
from policygrad.learners.fsdp.sharding import ModelSkeleton
from policygrad.learners.local.optimizer import Optimizer
from policygrad.training import reward_model, sft
from policygrad.training.config.guard import SupervisedGuardConfig
from policygrad.training.supervised import (
    NULL_ALGORITHM,
    LearnerShard,
    LocalSupervisedLearner,
    SupervisedTrainer,
    step_optimizer,
)

pytestmark = pytest.mark.usefixtures("forked_ranks")
LOOSE = 2e-4
"""Sums are taken in another order."""
COARSE = 0.05
"""Of gradients in bfloat16, relative: each micro-batch's is rounded to 8 bits, and micro-batches are others."""
CONFIG = pg.SFTConfig(
    data="rows.jsonl",
    lr=1e-2,
    learner=pg.LearnerConfig(micro_tokens=24, dtype="fp32"),
    optimizer=pg.OptimizerConfig(
        eps=1.0
    ),  # a step that is about linear in the gradient, so that rounding stays rounding
)
TEXTS = reward_model.PreferenceBatch(
    [([2 + i, *range(2, 4 + i)], [3, 2 + i % 3, 5, *range(3, 8 - i)]) for i in range(5)],
    [0.25, 0.25, 0.25, 0.125, 0.125],
)


def judge(dtype: torch.dtype = torch.float64, **sizes: int) -> nn.Module:
    """A reward model whose parts cannot all be halved; its padding token is in no text."""
    torch.manual_seed(0)
    config = tf.GPT2Config(
        **(SIZES | sizes),
        vocab_size=VOCABULARY,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
        initializer_range=0.5,
        num_labels=1,
        pad_token_id=0,
    )
    made: nn.Module = tf.GPT2ForSequenceClassification(config).to(dtype).eval()
    made.config.use_cache = False  # type: ignore[union-attr]
    return made


def both(
    ranks: WorkerGroup, kind: str, weights: torch.dtype = torch.float64, **learner: Any
) -> tuple[LocalSupervisedLearner, FsdpController]:
    """A learner in this process, and one in all."""
    causal = kind == "sft"
    one, full = (model(weights) if causal else judge(weights) for _ in range(2))
    config = replace(CONFIG, learner=replace(CONFIG.learner, **learner))
    skeleton = None if causal else ModelSkeleton.without_shortcuts(full)
    spec = pg.LearnerSpec(NULL_ALGORITHM, config.lr, 4, config=config.learner, optimizer=config.optimizer)
    return LocalSupervisedLearner(one, config, 4, causal), FsdpController(ranks, full, spec, skeleton=skeleton)


DATA: dict[str, Any] = {"sft": replace(BATCH, reward=BATCH.reward), "reward-model": TEXTS}
GRADIENT: dict[str, Any] = {
    "sft": sft.accumulate_sft_gradient,
    "reward-model": reward_model.accumulate_preference_gradient,
}
MEASURED: dict[str, Any] = {"sft": sft.sum_log_likelihood, "reward-model": reward_model.compute_rewards}


def gradients(share: LearnerShard) -> dict[str, Tensor]:
    """As they have been added up, whole."""
    held = {name: master.grad for name, master in share.optimizer.masters.items()}
    return {name: (x.full_tensor() if hasattr(x, "full_tensor") else x).float() for name, x in held.items()}  # type: ignore[union-attr]


def check_equal(alone: LocalSupervisedLearner, ranked: FsdpController, tolerance: float = 1e-12) -> None:
    (expected, values), (results, message) = alone.state(), ranked.state()
    assert values["optimizer"] == message["optimizer"]
    assert expected.keys() == results.keys()
    for name, tensor in expected.items():
        assert float((results[name] - tensor).abs().max()) <= tolerance * max(1e-30, float(tensor.abs().max())), name


def check_learns_as_one(ranks: WorkerGroup, kind: str, **learner: Any) -> None:
    """Two updates of all rows, one of a single row, which others idle at; and what is measured."""
    alone, ranked = both(ranks, kind, **learner)
    full, function = DATA[kind], GRADIENT[kind]
    one = full.select(torch.tensor([1])) if kind == "sft" else reward_model.PreferenceBatch(TEXTS.pairs[:1], [1.0])
    for data in (full, full, one):
        assert ranked.run_on_all(function, data) == pytest.approx(alone.run_on_all(function, data), rel=1e-12)
        expected, results = alone.run_on_all(step_optimizer), ranked.run_on_all(step_optimizer)
        assert results == pytest.approx(expected, rel=1e-12)
    assert alone.version == ranked.version == 3
    check_equal(alone, ranked)
    assert torch.allclose(
        torch.as_tensor(ranked.run_on_all(MEASURED[kind], full)),
        torch.as_tensor(alone.run_on_all(MEASURED[kind], full)),
        rtol=1e-12,
        atol=0,
    )
    ranked.publish()
    state, _ = ranked.state()
    assert all(torch.equal(p, state[f"weights/{n}"]) for n, p in ranked._learner.full_model.named_parameters())  # type: ignore[union-attr]


def check_bf16(ranks: WorkerGroup, kind: str) -> None:
    """Passes in bfloat16, sums in float32."""
    alone, ranked = both(ranks, kind, torch.bfloat16, dtype="bf16")
    for learner in (alone, ranked):
        learner.run_on_all(GRADIENT[kind], DATA[kind])
    expected, results = alone.run_on_all(gradients), ranked.run_on_all(gradients)
    assert expected.keys() == results.keys()
    square = lambda x: sum(float(t.square().sum()) for t in x.values())  # noqa: E731
    apart = {name: results[name] - expected[name] for name in expected}
    assert square(expected) > 0
    assert square(apart) <= COARSE**2 * square(expected)
    assert all(master.dtype == torch.float32 for master in ranked._learner.optimizer.masters.values())


@pytest.mark.parametrize(
    "size",
    [2, *(pytest.param(n, marks=pytest.mark.full) for n in (3, 4))],
)
def test_several_processes_equal_one(size: int) -> None:
    """In float64, to 12 digits."""
    kinds = ("sft", "reward-model")
    with started(size) as ranks:
        check_learns_as_one(ranks, "sft")
        check_learns_as_one(ranks, "reward-model", gradient_checkpointing=True)
        for kind in kinds[: size - 1]:
            check_bf16(ranks, kind)


# --- runs

ROWS: dict[str, list[dict[str, Any]]] = {
    "sft": [{"prompt": f"{i} + 1 =\n", "completion": f"{i + 1}" * (1 + i % 3)} for i in range(24)],
    "reward-model": [
        {"prompt": f"{i} + 1 =\n", "chosen": f"{i + 1}", "rejected": "no" * (1 + i % 3)} for i in range(24)
    ],
}
TRAIN: dict[str, Any] = {"sft": pg.train_sft, "reward-model": pg.train_reward_model}


def configured(kind: str, random_model: Path, folder: Path, ranks: int, name: str) -> Any:
    data = write_rows(folder / f"{kind}.jsonl", ROWS[kind])
    config = pg.SFTConfig if kind == "sft" else pg.RewardModelConfig
    return config(
        data=data,
        model=str(random_model),
        batch_size=6,
        lr=1e-3,
        checkpoint=pg.CheckpointConfig(every=2),
        learner=pg.LearnerConfig(micro_tokens=64, world_size=ranks),
        output=str(folder / name),
    )


def check_alike(one: Path, other: Path) -> None:
    """Numbers that differ by rounding."""
    for expected, results in zip(untimed(one / "metrics.jsonl"), untimed(other / "metrics.jsonl"), strict=True):
        assert results == pytest.approx(expected, rel=LOOSE, abs=LOOSE)
    before, after = weights(one), weights(other)
    assert before.keys() == after.keys()
    assert all(torch.allclose(before[name], after[name], atol=LOOSE) for name in before)


class Killing(pg.Callback):
    """Kills the other process after a step, as the kernel would."""

    def __init__(self, step: int) -> None:
        self.at = step

    def step(self, trainer: Any, step: int, metrics: Mapping[str, float]) -> None:
        if step == self.at:
            assert isinstance(trainer, SupervisedTrainer)
            assert isinstance(trainer.learner, FsdpController)
            (other,) = trainer.learner._workers._processes
            other.kill()


@pytest.mark.full
@pytest.mark.parametrize("kind", ["sft", "reward-model"])
def test_two_processes_equal_one_and_any_number_resumes(random_model: Path, tmp_path: Path, kind: str) -> None:
    """As many go on to the bit. A process that is killed ends the run, which then goes on from its last checkpoint."""
    train = TRAIN[kind]
    alone = train(configured(kind, random_model, tmp_path, 1, "one"), display=False)
    full = train(configured(kind, random_model, tmp_path, 2, "two"), display=False)
    check_alike(alone.output, full.output)
    assert full.after == pytest.approx(alone.after, rel=LOOSE, abs=LOOSE)
    killed = configured(kind, random_model, tmp_path, 2, "killed")
    with pytest.raises(pg.RunError, match=r"rank 1 has exited \(exit code -9\), during") as raised:
        train(killed, display=False, callbacks=[Killing(3)])
    assert f"policygrad {kind} --resume {killed.output}" in "".join(raised.value.__notes__)
    folder = Path(killed.output)
    saved = folder / "checkpoints" / "step-000002"
    assert checkpoints.newest_step(folder / "checkpoints") == 2
    assert (saved / "shard-00001.safetensors").is_file()
    for ranks in (1, 3):
        copy = tmp_path / f"copy-{ranks}"
        shutil.copytree(folder, copy)
        train(replace(killed, learner=replace(killed.learner, world_size=ranks)), resume=copy, display=False)
        check_alike(alone.output, copy)
    train(killed, resume=folder, display=False)
    assert same(weights(full.output), weights(folder))
    assert untimed(full.output / "metrics.jsonl") == untimed(folder / "metrics.jsonl")


def test_two_processes_resume_what_one_saved(random_model: Path, tmp_path: Path) -> None:
    """And what a step has spoilt is undone in both."""
    config = configured("sft", random_model, tmp_path, 1, "run")
    config = replace(
        config, guard=SupervisedGuardConfig(action="skip", loss=0.0, grad_norm=1.5, window=2, max_consecutive_alarms=0)
    )
    pg.train_sft(config, stop_after=2, display=False)

    class Spoiling(pg.Callback):
        def start(self, trainer: Any) -> None:
            self.before = trainer.learner.state()[0]
            trainer.learner.run_on_all(_spoil)

        def step(self, trainer: Any, step: int, metrics: Mapping[str, float]) -> None:
            self.undone = metrics["guard/undone"]

    two = replace(config, learner=replace(config.learner, world_size=2))
    spoiling = Spoiling()
    result = pg.train_sft(two, resume=config.output, stop_after=1, display=False, callbacks=[spoiling])
    assert (result.steps, spoiling.undone) == (3, 1.0)
    names = [name for name in spoiling.before if name.startswith("weights/")]
    saved = checkpoints.load_checkpoint(Path(config.output) / "checkpoints" / "step-000003").tensors
    assert all(torch.equal(saved[name], spoiling.before[name]) for name in names)


def _spoil(share: LearnerShard) -> None:
    """The next gradient is a thousand times what it was."""
    optimizer, step = share.optimizer, Optimizer.step

    def spoilt() -> tuple[float | None, float]:
        del optimizer.step  # type: ignore[method-assign]  # the class's own is back
        for master in optimizer.masters.values():
            if master.grad is not None:
                master.grad.mul_(1000.0)
        return step(optimizer)

    optimizer.step = spoilt  # type: ignore[method-assign]


@pytest.mark.full
@pytest.mark.parametrize("kind", ["sft", "reward-model"])
def test_adapters_are_trained_by_two_processes(random_model: Path, tmp_path: Path, kind: str) -> None:
    """A reward model's new head beside them."""
    pytest.importorskip("peft")
    one, two = (configured(kind, random_model, tmp_path, ranks, f"{ranks}") for ranks in (1, 2))
    one, two = (replace(c, learner=replace(c.learner, lora="rank=4")) for c in (one, two))
    for config in (one, two):
        TRAIN[kind](config, display=False)
    assert all("lora_" in name or "score" in name for name in weights(Path(two.output)))
    check_alike(Path(one.output), Path(two.output))


def test_a_model_without_padding_needs_one_process(
    random_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = changed_copy(random_model, tmp_path / "bare", config={"pad_token_id": None})
    monkeypatch.setattr(
        reward_model, "set_padding_token", lambda model, tokenizer: None
    )  # a tokenizer without any word for it
    config = configured("reward-model", folder, tmp_path, 2, "run")
    with pytest.raises(pg.ConfigError, match=r"has no padding token.*"):
        reward_model.PreferenceObjective(config.resolve())


@pytest.mark.full
def test_torchrun_starts_fine_tuning(random_model: Path, tmp_path: Path) -> None:
    alone = pg.train_sft(configured("sft", random_model, tmp_path, 1, "one"), display=False)
    start = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint"]
    argv = ["localhost:0", "-m", "policygrad", "sft", "--config", str(alone.output / "sft.toml"), "--output", "two"]
    done = subprocess.run(
        [sys.executable, *start, *argv, "--plain"], cwd=tmp_path, env=os.environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "2 processes" in done.stdout
    check_alike(alone.output, tmp_path / "two")
