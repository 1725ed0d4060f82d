"""Optimal values of prompts (A*-PO): estimated once with the initial policy, kept in the run's folder, and used as the baseline."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import policygrad as pg
from doubles.random_batches import Shape, make, policy
from doubles.rollouts import collect_rollout
from doubles.tabular_sampler import TabularSampler, TabularTokenizer
from policygrad.rewards.base import RewardScores
from policygrad.rollout.optimal_values import OPTIMAL_VALUES, OptimalValues, with_optimal_values
from policygrad.rollout.rollouter import Rollouter
from policygrad.tasks.base import Example


@pytest.fixture(scope="module")
def run(small: pg.Run) -> pg.Run:
    return pg.Run(
        algorithm=replace(pg.ASTAR_PO, advantage=(pg.OptimalValue(samples=4, prompts=70),)),
        model=small.model,
        reward=small.reward,
        prompts_per_step=32,
        steps=3,
        rewards=small.rewards,
        evaluation=small.evaluation,
        sampling=pg.SamplingParams(max_tokens=4),
        checkpoint=pg.CheckpointConfig(every=1),
    )


@pytest.fixture(scope="module")
def whole(run: pg.Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing has stopped."""
    return train(run, tmp_path_factory.mktemp("runs") / "whole")


@pytest.fixture(scope="module")
def stopped(run: pg.Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that ended after its first step."""
    return train(run, tmp_path_factory.mktemp("runs") / "stopped", stop_after=1)


def train(run: pg.Run, folder: Path, **options: Any) -> Path:
    pg.train(replace(run, output=str(folder)), display=False, **options)
    return folder


def read_estimate(folder: Path) -> dict[str, Any]:
    estimate: dict[str, Any] = json.loads((folder / OPTIMAL_VALUES).read_text())
    return estimate


def metrics_of(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def timeless(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{k: v for k, v in row.items() if "time" not in k and "second" not in k} for row in rows]


@pytest.mark.parametrize(
    ("rewards", "value"),
    [
        ([0.0, 0.0], 0.0),
        ([1.0], 1.0),
        ([1.0, 0.0, 0.0, 0.0], 0.5 * math.log((math.exp(2) + 3) / 4)),
        ([2000.0, 0.0], 2000 - 0.5 * math.log(2)),  # no overflow
    ],
)
def test_the_value_is_a_soft_maximum(rewards: list[float], value: float) -> None:
    assert pg.OptimalValue(beta=0.5).estimate_value(rewards) == pytest.approx(value, rel=1e-14)


def test_small_beta_takes_the_best_reward_and_large_beta_the_mean() -> None:
    rewards = [0.0, 0.25, 1.0]
    assert pg.OptimalValue(beta=1e-4).estimate_value(rewards) == pytest.approx(1.0, abs=1e-3)
    assert pg.OptimalValue(beta=1e4).estimate_value(rewards) == pytest.approx(sum(rewards) / 3, abs=1e-4)
    assert math.isnan(pg.OptimalValue().estimate_value([]))


@pytest.mark.parametrize("spread", [0.0, 0.6])
def test_the_gradient_is_that_of_the_authors_loss(spread: float) -> None:
    """mean_i (β Σ log π + v − r − β Σ log π_ref)², divided by 2β, also after the policy has left π_old."""
    batch, logits = make(Shape((1, 1, 1, 1, 1), 6, seed=3, binary=False), spread)
    beta = 0.2
    algorithm = replace(pg.ASTAR_PO, terms=(pg.KLToReference(beta, "k2", level="sequence"),))
    ours = pg.surrogate(policy(logits, batch.tokens, batch.mask), batch, algorithm.compute_advantages(batch), algorithm)
    logp = policy(logits, batch.tokens, batch.mask)
    assert batch.logp_ref is not None
    assert batch.baseline is not None
    change = (torch.where(batch.mask, logp - batch.logp_ref, 0)).sum(1)
    error = beta * change + batch.baseline - batch.reward
    loss = error[batch.mask.any(1)].square().mean() / (2 * beta)
    torch.testing.assert_close(*(torch.autograd.grad(x, logits)[0] for x in (ours, loss)), rtol=1e-12, atol=1e-14)


def test_a_run_estimates_once_and_trains_on_those_prompts_alone(whole: Path) -> None:
    saved = read_estimate(whole)
    assert saved["prompts"] == len(saved["rewards"]) == 70
    assert all(len(rewards) == 4 for rewards in saved["rewards"])
    assert len({sum(rewards) for rewards in saved["rewards"]}) > 1
    rows = metrics_of(whole)
    first, later = rows[0], rows[1:]
    assert first["tokens/values"] == saved["tokens"]
    assert first["tokens/sampled"] > saved["tokens"]
    values = [pg.OptimalValue().estimate_value(rewards) for rewards in saved["rewards"]]
    assert first["reward/optimal_value"] == pytest.approx(sum(values) / 70)
    assert first["time/rollout"] > first["time/optimal_values"] > 0
    assert not any({"tokens/values", "time/optimal_values"} & row.keys() for row in later)
    completions = [json.loads(line) for line in (whole / "completions.jsonl").read_text().splitlines()]
    prompts = [row["prompt"] for row in completions]
    assert len(prompts) == 3 * 32
    assert prompts[70:] == prompts[: 96 - 70]  # from the first prompt again
    for row, value in zip(completions[:70], values, strict=False):
        assert row["advantage"] == pytest.approx(row["reward"] - value, abs=1e-6)


@pytest.mark.full
def test_a_stopped_run_goes_on_with_the_estimate_in_its_folder(whole: Path, stopped: Path, tmp_path: Path) -> None:
    """Metrics of a resumed run are the same."""
    assert read_estimate(stopped)["rewards"] == read_estimate(whole)["rewards"]
    resumed = shutil.copytree(stopped, tmp_path / "resumed")
    pg.train(resume=resumed, display=False, allow_code=("/",))
    assert timeless(metrics_of(resumed)) == timeless(metrics_of(whole))


def test_a_stopped_estimate_samples_the_other_prompts_alone(run: pg.Run, whole: Path, tmp_path: Path) -> None:
    """A chunk of 64 prompts is in its file."""
    estimate = read_estimate(whole)
    file = tmp_path / OPTIMAL_VALUES
    file.write_text(json.dumps({**estimate, "rewards": estimate["rewards"][:64], "tokens": 0}))
    third = read_estimate(train(run, tmp_path / "third", callbacks=(Copy(file),), stop_after=1))
    assert third["rewards"] == estimate["rewards"]
    assert 0 < third["tokens"] < estimate["tokens"] / 4  # of the last six prompts


class Copy(pg.Callback):
    """Puts a file into the run's folder before its first step."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def start(self, trainer) -> None:  # type: ignore[no-untyped-def]
        (trainer.folder / self.file.name).write_bytes(self.file.read_bytes())


def test_a_lost_file_is_an_error_once_the_policy_has_changed(stopped: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(stopped, tmp_path / "run")
    (folder / OPTIMAL_VALUES).unlink()
    with pytest.raises(pg.RunError, match=r"0 of 70 prompts.*which the run has left: put a copy of the file back"):
        pg.train(resume=folder, display=False, allow_code=("/",))
    (folder / OPTIMAL_VALUES).write_text('{"prompts": 70, "rewards": [["x"]], "tokens": 1, "seconds": 1}')
    with pytest.raises(pg.RunError, match="cannot be read as a run's optimal values"):
        pg.train(resume=folder, display=False, allow_code=("/",))


def test_prompts_and_tokens_that_do_not_fit_are_refused(run: pg.Run, tmp_path: Path) -> None:
    run = replace(run, output=str(tmp_path / "run"))
    few = replace(run, algorithm=replace(run.algorithm, advantage=(pg.OptimalValue(prompts=8),)))
    with pytest.raises(pg.ConfigError, match=r"optimal-value\.prompts 8 is less than --prompts-per-step 32"):
        pg.train(few, display=False)
    with pytest.raises(pg.ConfigError, match=r"samples 4 completions of 70 prompts.*--tokens 200 would be used up"):
        pg.train(replace(run, tokens=200), display=False)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"advantage": (pg.OptimalValue(), pg.GreedyBaseline())}, "after OptimalValue Ψ is the reward less a baseline"),
        ({"filters": (pg.DropZeroVariance("refill"),)}, "DropZeroVariance replaces some by further ones"),
        ({"filters": (pg.MovingLevel(),)}, "MovingLevel moves to others"),
        ({"reference": pg.Reference(refresh_every=2)}, "Reference has refresh_every or refresh_after_stall"),
        ({"reference": pg.Reference(ema=0.1)}, "Reference has ema=0.1"),
        ({"reference": pg.Reference(model="teacher")}, "Reference has another model"),
    ],
)
def test_combinations_without_a_meaning_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(pg.ConfigError, match=message):
        replace(pg.ASTAR_PO, **changes)  # type: ignore[arg-type]


def test_squares_of_completions_are_of_k2_alone() -> None:
    with pytest.raises(pg.ConfigError, match=r"KLToReference\.level must be 'token' with form 'k3'"):
        pg.KLToReference(level="sequence")


def test_metrics_are_of_the_first_step_alone_and_leave_out_what_has_no_value() -> None:
    assert OptimalValues((0.5, math.nan)).metrics(2) == {}
    assert OptimalValues((0.5, math.nan)).metrics(1)["reward/optimal_value"].value == 0.5


def rollouter(score: Any) -> Rollouter:
    return Rollouter(lambda i: Example(str(i % 4)), TabularTokenizer(), TabularSampler(4, 3, 4), score)  # type: ignore[arg-type]


def first_token(prompts: Sequence[str], texts: Sequence[str], columns: Mapping[str, Sequence[Any]]) -> RewardScores:
    """No reward for completions of the prompt 2."""
    rewards = [None if prompt == "2" else float(len(text)) for prompt, text in zip(prompts, texts, strict=True)]
    return RewardScores(rewards, {}, messages=["a reward failed"])


def test_a_rollouter_without_values_says_how_to_get_them(tmp_path: Path) -> None:
    sampling, without = pg.SamplingParams(max_tokens=3), rollouter(first_token)
    with pytest.raises(pg.ConfigError, match="estimated before the first update"):
        collect_rollout(without, pg.ASTAR_PO, sampling, prompts=4, samples=1)
    file = tmp_path / "values.json"
    valued, messages = with_optimal_values(without, pg.OptimalValue(), 4, sampling, file, is_initial=True)
    assert messages == ("a reward failed",)
    rollout = collect_rollout(valued, pg.ASTAR_PO, sampling, prompts=4, samples=1, position=6)
    assert rollout.position == 10
    assert rollout.prompts == ("2", "3", "0", "1")
    psi = pg.ASTAR_PO.compute_advantages(rollout.batch)
    assert math.isnan(rollout.batch.baseline[0])  # type: ignore[index]
    assert (psi[0] == 0).all()
    (values,) = valued.providers
    assert isinstance(values, OptimalValues)
    for row, prompt in enumerate((3, 0, 1), 1):
        expected = rollout.batch.reward[row] - values.values[prompt]
        assert psi[row, 0] == pytest.approx(float(expected))


def test_rewards_that_all_fail_end_the_estimate_and_keep_what_there_is(tmp_path: Path) -> None:
    def fail(prompts: Sequence[str], texts: Sequence[str], columns: Mapping[str, Sequence[Any]]) -> RewardScores:
        return RewardScores([None] * len(texts), {}, messages=["the server is down"])

    file = tmp_path / "values.json"
    with pytest.raises(pg.RewardError, match=r"prompts 0 to 3 has a reward.*the server is down"):
        with_optimal_values(
            rollouter(fail), pg.OptimalValue(), 4, pg.SamplingParams(max_tokens=3), file, is_initial=True
        )
    assert not file.exists()
