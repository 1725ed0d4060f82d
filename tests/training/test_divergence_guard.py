"""The guard against divergence: what it takes for one, what it does, and that a run under it resumes bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import policygrad as pg
from doubles.cases import keep_fast
from doubles.failing import learner_with_a_spike
from doubles.files import rows, same, untimed, weights
from doubles.resuming import rewind
from doubles.trackers import Record
from policygrad.checkpoint import format as checkpoint
from policygrad.errors import ConfigError, RunError
from policygrad.training.config.guard import GuardConfig, SupervisedGuardConfig
from policygrad.training.divergence_guard import GuardDecision, GuardHistory, assess_step

GUARD = GuardConfig(window=2)


def judged(
    steps: list[dict[str, float]], flat: bool = False, guard: GuardConfig | SupervisedGuardConfig = GUARD
) -> tuple[list[GuardDecision], GuardHistory]:
    watched, result = GuardHistory(), []
    for values in steps:
        verdict, watched = assess_step(watched, values, flat, guard)
        result.append(verdict)
        assert assess_step(GuardHistory(**json.loads(json.dumps(asdict(watched)))), {}, flat, guard) == assess_step(
            watched, {}, flat, guard
        )
    return result, watched


@pytest.mark.parametrize(
    ("name", "values", "spike"),
    [
        ("grad_norm", [0.5, 0.5, 6.0], True),  # above 10 times 0.5, and above 1
        ("grad_norm", [0.5, 0.5, 4.9], False),
        ("grad_norm", [0.01, 0.01, 0.9], False),  # which clipping leaves alone
        ("grad_norm", [0.5, 6.0], False),  # a window of one step is none
        ("kl", [0.02, 0.02, 0.3], True),
        ("kl", [0.001, 0.001, 0.09], False),
        ("kl_old", [0.02, 0.02, 0.3], True),
        ("entropy", [3.0, 3.0, 0.9], True),  # a collapse
        ("entropy", [3.0, 3.0, 1.1], False),
        ("entropy", [0.2, 0.2, 0.01], False),  # it had converged
        ("entropy", [1.0, 1.0, 3.1], True),
        ("entropy", [0.2, 0.2, 0.9], False),
    ],
)
def test_spikes(name: str, values: list[float], spike: bool) -> None:
    result, _ = judged([{name: value} for value in values])
    assert [bool(v.spikes) for v in result] == [False] * (len(values) - 1) + [spike]
    assert result[-1].metrics == {"guard/alarms": float(spike)} | ({f"guard/{name}": 1.0} if spike else {})


def test_the_supervised_guard_watches_the_loss() -> None:
    guard = SupervisedGuardConfig(window=2)
    for last, spike in ((1.3, True), (1.1, False), (0.9, False)):  # above 3 times 0.4, and above 1 nat
        result, _ = judged([{"loss": x, "entropy": x, "kl": x} for x in (0.4, 0.4, last)], guard=guard)
        assert [v.metrics for v in result[2:]] == [
            {"guard/alarms": float(spike)} | ({"guard/loss": 1.0} if spike else {})
        ]
    result, _ = judged([{"loss": x} for x in (0.4, 0.4, 90.0)])  # reinforcement has no such number
    assert not result[-1].spikes
    with pytest.raises(ConfigError, match=r"guard\.loss must be above 1"):
        SupervisedGuardConfig(loss=0.5)


def test_a_new_level_stops_being_a_spike() -> None:
    result, watched = judged([{"grad_norm": x} for x in (1.0, 1.0, 50.0, 50.0, 50.0)])
    assert [bool(v.spikes) for v in result] == [False, False, True, False, False]  # median of (1, 50) is 25.5
    assert watched.recent == {"grad_norm": [50.0, 50.0]}


def test_undone_values_are_forgotten_and_consecutive_alarms_stop() -> None:
    guard = replace(GUARD, action="rollback", max_consecutive_alarms=3)
    result, watched = judged([{"grad_norm": x} for x in (1.0, 1.0, 50.0, 50.0, 50.0)], guard=guard)
    assert [v.action for v in result] == ["warn", "warn", "rollback", "rollback", "stop"]
    assert watched == GuardHistory({"grad_norm": [1.0, 1.0]}, alarm_streak=0, lr_factor=0.25)


def test_constant_rewards_are_skipped_and_finally_stop() -> None:
    steps = [{"grad_norm": 1.0, "updates/taken": 1.0}] * 3
    assert [v.action for v in judged(steps, True)[0]] == ["warn"] * 3
    for action, first in (("skip", "skip"), ("rollback", "skip"), ("stop", "warn")):
        result, _ = judged(steps, True, GuardConfig(action=action, max_consecutive_alarms=3))
        assert [v.action for v in result] == [first, first, "stop"]
    assert result[0].metrics == {"guard/alarms": 1.0, "guard/constant_rewards": 1.0}
    idle, _ = judged(
        [{"grad_norm": 1.0}] * 3, True, GuardConfig(action="skip", max_consecutive_alarms=3)
    )  # no update was taken
    assert [v.action for v in idle] == ["warn", "warn", "stop"]


@pytest.mark.parametrize(
    "wrong", [{"action": "pray"}, {"window": 1}, {"kl": 0.5}, {"lr_factor": 1.0}, {"max_consecutive_alarms": -1}]
)
def test_invalid_guard_options_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"guard\.{next(iter(wrong))}"):
        GuardConfig(**wrong)


def test_a_rollback_needs_a_learning_rate() -> None:
    with pytest.raises(ConfigError, match=r"guard\.action=rollback lowers .*TrustRegion has none"):
        pg.Run(algorithm=pg.get_algorithm("trpo"), guard=GuardConfig(action="rollback"))


# --- in a run


@pytest.fixture
def run(small: pg.Run, tmp_path: Path) -> pg.Run:
    (tmp_path / "mine.py").write_text(
        "def mine(prompts, completions, **columns):\n    return [sum(map(ord, c)) % 7 / 7 for c in completions]\n"
    )
    reward = (f"{tmp_path / 'mine.py'}:mine",)
    sizes: dict[str, Any] = {
        "prompts_per_step": 2,
        "samples_per_prompt": 4,
        "sampling": pg.SamplingParams(max_tokens=4),
    }
    return replace(small, steps=5, **sizes, guard=GUARD, reward=reward, output=str(tmp_path / "run"))


def spiking(at: int) -> Callable[[Any, pg.Run], pg.LocalLearner]:
    return lambda model, run: learner_with_a_spike(model, run, at)


def saved(folder: Path, step: int) -> checkpoint.Checkpoint:
    return checkpoint.load_checkpoint(folder / "checkpoints" / f"step-{step:06d}")


def learned(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return {n: t for n, t in saved(folder, step).tensors.items() if n.startswith(("weights/", "adam/"))}


def test_the_default_warns_and_leaves_the_run_unchanged(run: pg.Run, tmp_path: Path) -> None:
    record = Record()
    pg.train(run, learner=spiking(4), display=record)
    assert "step 4: grad_norm is " in record.said
    assert "(training continues; --guard.action changes that)" in record.said
    assert [row["guard/alarms"] for row in rows(tmp_path / "run" / "metrics.jsonl")] == [0, 0, 0, 1, 0]
    away = replace(run, guard=GuardConfig(grad_norm=0), output=str(tmp_path / "away"))
    record = Record()
    pg.train(away, learner=spiking(4), display=record)
    assert "grad_norm is" not in record.said
    assert same(weights(tmp_path / "run"), weights(tmp_path / "away"))


@pytest.mark.full
def test_a_skipped_step_is_undone_and_resume_is_bitwise(run: pg.Run, tmp_path: Path) -> None:
    run = replace(run, guard=replace(GUARD, action="skip"), checkpoint=pg.CheckpointConfig(every=1, keep=9))
    record = Record()
    pg.train(run, learner=spiking(4), display=record)
    full, pieces = tmp_path / "run", tmp_path / "pieces"
    assert "(its updates are undone)" in record.said
    assert same(learned(full, 3), learned(full, 4))
    assert not same(learned(full, 4), learned(full, 5))
    assert rows(full / "metrics.jsonl")[3]["guard/undone"] == 1
    rewind(full, pieces, 3)
    pg.train(run, resume=pieces, learner=spiking(1), stop_after=1, display=False)
    pg.train(run, resume=pieces, display=False)
    assert same(weights(full), weights(pieces))
    assert untimed(full / "metrics.jsonl") == untimed(pieces / "metrics.jsonl")


@pytest.mark.parametrize("waits", keep_fast((False, True), True))
def test_a_rollback_restores_the_checkpoint_at_a_lower_rate_and_resume_is_bitwise(
    run: pg.Run, tmp_path: Path, waits: bool
) -> None:
    """waits: with groups that are left over for the next step, which are of weights that are gone after a rollback."""
    guard = replace(GUARD, action="rollback", lr_factor=0.25)
    run = replace(run, steps=6, guard=guard, checkpoint=pg.CheckpointConfig(every=2, keep=9))
    if waits:
        algorithm = replace(pg.DR_GRPO, filters=(pg.DropZeroVariance(),))
        sizes: dict[str, Any] = {
            "prompts_per_step": 5,
            "samples_per_prompt": 8,
            "sampling": pg.SamplingParams(max_tokens=8),
        }
        run = replace(run, algorithm=algorithm, seed=1, **sizes)  # with this seed some wait after steps 2 and 4
        (tmp_path / "mine.py").write_text(
            "def mine(prompts, completions, **columns):\n"
            "    return [(p[0] in '135') * (sum(map(ord, c)) % 7) / 7 for p, c in zip(prompts, completions)]\n"
        )
    record = Record()
    pg.train(run, learner=spiking(4), display=record)
    full, pieces = tmp_path / "run", tmp_path / "pieces"
    assert "step 4: restored the weights of step 2, at a lower learning rate" in record.said
    assert same(learned(full, 2), learned(full, 4))
    assert bool(saved(full, 2).state["leftover_groups"]) is waits
    assert not saved(full, 4).state["leftover_groups"]
    rates = [row["lr"] for row in rows(full / "metrics.jsonl")]
    assert rates == pytest.approx([3e-3] * 4 + [0.75e-3] * 2)
    rewind(full, pieces, 4)
    pg.train(run, resume=pieces, display=False)
    assert same(weights(full), weights(pieces))
    assert untimed(full / "metrics.jsonl") == untimed(pieces / "metrics.jsonl")


def test_a_stop_undoes_the_updates_and_is_resumable(run: pg.Run, tmp_path: Path) -> None:
    run = replace(run, guard=replace(GUARD, action="stop"), checkpoint=pg.CheckpointConfig(every=1, keep=9))
    with pytest.raises(RunError, match=r"step 4: grad_norm is .* saved without its updates: .*resume"):
        pg.train(run, learner=spiking(4), display=False)
    assert same(learned(tmp_path / "run", 3), learned(tmp_path / "run", 4))
    assert pg.train(resume=tmp_path / "run", display=False).steps == 5


@pytest.mark.parametrize(
    "name", ["grpo", "ppo", *(pytest.param(n, marks=pytest.mark.full) for n in ("rloo", "reinforce"))]
)
def test_constant_rewards_are_reported_for_any_algorithm(run: pg.Run, tmp_path: Path, name: str) -> None:
    (tmp_path / "equal.py").write_text(
        "def one(prompts, completions, **columns):\n    return [1.0] * len(completions)\n"
    )
    record = Record()
    algorithm = replace(pg.get_algorithm(name), filters=())
    pg.train(replace(run, algorithm=algorithm, reward=(f"{tmp_path / 'equal.py'}:one",), steps=2), display=record)
    metrics = rows(tmp_path / "run" / "metrics.jsonl")
    assert [row["guard/constant_rewards"] for row in metrics] == [1, 1]
    message = [note for note in record.notes if "reward" in note and note.startswith("step 1: ")]
    assert len(message) == 1, record.notes
