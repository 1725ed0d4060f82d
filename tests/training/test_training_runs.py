"""The main job on the real path: it learns, with every algorithm, and it leaves a model that others load."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import policygrad as pg
from doubles.algorithms import SINGLE_TURN, runnable
from doubles.files import rows, same, weights
from doubles.trackers import Record
from policygrad.checkpoint import format as checkpoint
from policygrad.models.loading import resolve_model
from policygrad.samplers.base import SamplingParams
from policygrad.training.config.checkpoint import CheckpointConfig
from policygrad.training.config.evaluation import EvaluationConfig
from policygrad.training.config.run import Run
from policygrad.training.config.serialization import load_config
from policygrad.training.trainer import train


def test_the_reward_rises(small: Run, tmp_path: Path) -> None:
    """A random model writes a digit in 10 to 25 % of its answers; after 24 short steps it does most of the time.

    (After 20 steps of three seeds: 0.90, 0.63, 0.65.)
    """
    (tmp_path / "rewards.py").write_text(
        "def has_a_digit(completions, **columns):\n    return [float(any(x.isdigit() for x in c)) for c in completions]\n"
    )
    run = replace(
        small,
        reward=(f"{tmp_path / 'rewards.py'}:has_a_digit",),
        steps=24,
        lr=6e-3,
        checkpoint=CheckpointConfig(every=100),
        evaluation=EvaluationConfig(problems=3, samples_per_prompt=32, every=12),
        output=str(tmp_path / "run"),
    )
    record = Record()
    result = train(run, display=record)
    assert result.before is not None
    assert result.after is not None
    assert result.after > result.before + 0.3
    assert json.loads((result.output / "result.json").read_text())["eval_reward_after"] == result.after
    metrics = rows(result.output / "metrics.jsonl")
    assert [m["step"] for m in metrics if "eval/reward" in m] == [0, 12, 24]
    assert [s for s, _ in record.steps] == list(range(1, 25))
    for name in (
        "reward",
        "reward_std",
        "frac_reward_zero_std",
        "entropy",
        "clip_ratio/low",
        "clip_ratio/high",
        "completions/mean_length",
        "completions/truncated_ratio",
        "objective",
        "grad_norm",
        "mismatch/logp_max",
        "tokens_per_second",
    ):
        assert all(name in m for m in metrics if "reward" in m and m.get("updates/taken")), name
    assert max(m["mismatch/logp_max"] for m in metrics if "mismatch/logp_max" in m) < 1e-3
    completions = rows(result.output / "completions.jsonl")
    assert len(completions) == 24 * 32
    assert {"step", "prompt", "completion", "reward", "advantage", "tokens", "truncated"} <= completions[0].keys()


def test_the_saved_model_has_the_same_logprobs_in_transformers(small: Run, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    result = train(replace(small, steps=2, output=str(tmp_path / "run")))
    assert result.model is not None
    model = AutoModelForCausalLM.from_pretrained(result.model)
    tokenizer = AutoTokenizer.from_pretrained(result.model)
    saved = checkpoint.load_latest(result.output / "checkpoints", warn=pytest.fail)
    assert saved is not None
    masters = {k.removeprefix("weights/"): v for k, v in saved.tensors.items() if k.startswith("weights/")}
    own = AutoModelForCausalLM.from_pretrained(small.model)
    own.load_state_dict(masters, strict=False)
    ids = tokenizer("2 + 3 =\n", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        assert torch.equal(model(ids).logits.log_softmax(-1), own(ids).logits.log_softmax(-1))
    original = AutoModelForCausalLM.from_pretrained(small.model)
    assert not torch.equal(model(ids).logits, original(ids).logits)


FEW = ("vapo",)
"""What trains the base model in every test run; the others, which `test_every_algorithm_resumes` trains on a random model, do in
`make test-full`."""


@pytest.mark.parametrize("name", [n if n in FEW else pytest.param(n, marks=pytest.mark.full) for n in SINGLE_TURN])
def test_every_named_algorithm_trains(small: Run, tmp_path: Path, name: str) -> None:
    """One row of the matrix, two steps, on the real path; the metrics are finite and the weights have moved."""
    record = Record()
    lr = 1e-4 if pg.get_algorithm(name).update_rule.uses_lr else None
    options = {"model": "tiny", "task": "embedded", "reward": (), "lr": lr, "sampling": SamplingParams(max_tokens=32)}
    folder = str(tmp_path / "run")
    run = replace(
        small,
        **options,
        algorithm=runnable(name, small.model),
        steps=2,
        output=folder,
        checkpoint=CheckpointConfig(every=9),
    )
    result = train(run, display=record)
    assert load_config(result.output / "run.toml", Run()) == replace(run.resolve(), output=str(result.output))
    still = run.algorithm.critic is not None and run.algorithm.critic.pretrain > 0  # VAPO fits its critic first
    assert same(weights(result.output), load_file(Path(resolve_model("tiny")) / "model.safetensors")) is still
    for _, metrics in record.steps:
        assert all(value == value and abs(value) != float("inf") for value in metrics.values())
        assert ("lambda/max" in metrics) is (name == "vapo")


@pytest.mark.parametrize(
    "name",
    [
        "reinforce_pp",
        "grpo",
        *(pytest.param(n, marks=pytest.mark.full) for n in ("reinforce_pp_baseline", "magistral")),
    ],
)
def test_training_on_constant_rewards_leaves_the_weights_as_they_are(name: str, small: Run, tmp_path: Path) -> None:
    """0.7 is no float32: the mean of several is another number, and a spread of rounding alone used to train `reinforce_pp`."""
    (tmp_path / "rewards.py").write_text("def constant(completions, **columns):\n    return [0.7] * len(completions)\n")
    algorithm = replace(
        pg.get_algorithm(name), filters=(), shaping=(), terms=(), update_rule=pg.GradientSteps(minibatches=1)
    )
    reward = (f"{tmp_path / 'rewards.py'}:constant",)
    run = replace(small, algorithm=algorithm, reward=reward, steps=2, output=str(tmp_path / "run"))
    trained = weights(train(run).output)
    assert same(trained, load_file(Path(small.model) / "model.safetensors"))


@pytest.mark.full
def test_value_pretraining_is_noted_at_start_and_end(small: Run, tmp_path: Path) -> None:
    record = Record()
    critic = pg.Critic(pretrain=2, pretrain_until=2.0)  # more than there is to explain: both rollouts go into the fit
    algorithm = replace(pg.VAPO, critic=critic)
    train(replace(small, algorithm=algorithm, steps=4, output=str(tmp_path / "run")), display=record)
    report = [note for note in record.notes if "value pre-training" in note]
    assert [note.partition(",")[0].partition(": only")[0] for note in report] == [
        "step 1: value pre-training",
        "step 3: value pre-training is finished",
    ]
    explained = record.steps[2][1]["explained_variance"]
    assert f"{explained:.0%} of the returns' variance" in report[1]
