"""`verify` finds faults that were planted in a run, and names each; an honest run has none."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import policygrad as pg
from doubles.cases import keep_fast
from doubles.files import write_rows
from policygrad.core.algorithm import Algorithm
from policygrad.learners.local.optimizer import Optimizer
from policygrad.learners.local.updates import LocalGradientProblem
from policygrad.rewards.config import RewardConfig
from policygrad.rollout import rollouter
from policygrad.samplers.base import SamplingParams
from policygrad.samplers.local.sampler import LocalSampler
from policygrad.training import provenance
from policygrad.training.config.checkpoint import CheckpointConfig
from policygrad.training.config.evaluation import EvaluationConfig
from policygrad.training.config.run import Run
from policygrad.training.config.serialization import load_config
from policygrad.training.config.trust import CodePermissions
from policygrad.verification.verify import Verification, verify_run

REWARD = """
def brevity(prompts, completions, **columns):
    return [{factor} / (1 + len(text)) for text in completions]
"""


@pytest.fixture(scope="module")
def settings(random_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A random model of 30k parameters, sums, and one worker for the rewards."""
    sums = [{"prompt": f"{i} + {j} =\n", "answer": str(i + j)} for i in range(4) for j in range(4)]
    task = write_rows(tmp_path_factory.mktemp("task") / "sums.jsonl", sums)
    return {"model": str(random_model), "task": task, "rewards": RewardConfig(num_workers=1)}


def make_run(folder: Path, settings: dict[str, Any], steps: int = 2, recorded: int = 2) -> Run:
    """A run of 2 steps, both recorded: 4 prompts × 4 completions, two updates per step."""
    (folder / "mine.py").write_text(REWARD.format(factor=8))
    rule = replace(pg.GRPO.update_rule, minibatches=2)
    return Run(
        algorithm=replace(pg.GRPO, update_rule=rule),
        steps=steps,
        prompts_per_step=4,
        samples_per_prompt=4,
        reward=(f"{folder}/mine.py:brevity",),
        output=str(folder / "run"),
        verify=recorded,
        sampling=SamplingParams(max_tokens=8, stop=("a", "e", "1", " ")),  # of several lengths
        evaluation=EvaluationConfig(problems=0),
        checkpoint=CheckpointConfig(every=1, keep=1),
        **settings,
    )


def verify(folder: Path, steps: Sequence[int] | None = None) -> Verification:
    return verify_run(folder / "run", load_config(folder / "run" / "run.toml", Run(), ALLOWED), steps)


ALLOWED = CodePermissions(("/",))


def in_call(number: int, change: Callable[[Any], Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """The function with the result of its call `number`, from 1, changed."""
    calls = 0

    def changed(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        result = original(*args, **kwargs)
        return change(result) if calls == number else result

    return changed


# Faults during training, in step 2 of 2


def scale_advantages(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Algorithm, "compute_advantages", in_call(2, lambda psi: 0.5 * psi, Algorithm.compute_advantages))


def shift_mask(patch: pytest.MonkeyPatch) -> None:
    def shift(batch: pg.Batch) -> pg.Batch:
        shifted = torch.cat([torch.zeros_like(batch.mask[:, :1]), batch.mask[:, :-1]], dim=1)
        return replace(batch, mask=shifted)

    patch.setattr(rollouter, "batch_groups", in_call(2, shift, rollouter.batch_groups))


def exchange_rewards(patch: pytest.MonkeyPatch) -> None:
    def exchange(batch: pg.Batch) -> pg.Batch:
        order = torch.arange(len(batch.reward))
        order[[0, 5]] = order[[5, 0]]
        assert batch.reward[0] != batch.reward[5]
        return replace(batch, reward=batch.reward[order])

    patch.setattr(rollouter, "batch_groups", in_call(2, exchange, rollouter.batch_groups))


def alter_token(patch: pytest.MonkeyPatch) -> None:
    original = LocalSampler.generate
    calls = 0

    async def generate(self: LocalSampler, requests: Any) -> Any:
        nonlocal calls
        calls += 1
        generations = await original(self, requests)
        if calls == 2:
            tokens = generations[3].tokens.clone()
            tokens[0] = 41 if tokens[0] != 41 else 42
            generations[3] = replace(generations[3], tokens=tokens)
        return generations

    patch.setattr(LocalSampler, "generate", generate)


def repeat_minibatch(patch: pytest.MonkeyPatch) -> None:
    split = LocalGradientProblem.split
    patch.setattr(LocalGradientProblem, "split", in_call(2, lambda parts: [parts[0], *parts], split))


def replace_minibatch(patch: pytest.MonkeyPatch) -> None:
    split = LocalGradientProblem.split
    patch.setattr(LocalGradientProblem, "split", in_call(2, lambda parts: [parts[0], parts[0]], split))


def reset_moments(patch: pytest.MonkeyPatch) -> None:
    step, calls = Optimizer.step, 0

    def reset_once(self: Optimizer, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:  # the first of step 2
            self.clear_moments()
        return step(self, *args)

    patch.setattr(Optimizer, "step", reset_once)


def keep_old_weights(patch: pytest.MonkeyPatch) -> None:
    """The sampler reads the weights that it began with, and misses every publication, as an engine may.

    They are written into the model while it samples: a copy of the model elsewhere in memory would be rounded otherwise.
    """
    create = LocalSampler.from_tokenizer.__func__  # type: ignore[attr-defined]

    def from_tokenizer(cls: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        first = [p.detach().clone() for p in model.parameters()]

        def exchange(values: list[torch.Tensor]) -> list[torch.Tensor]:
            current = [p.detach().clone() for p in model.parameters()]
            for p, value in zip(model.parameters(), values, strict=True):
                p.detach().copy_(value)
            return current

        class Forgetful(LocalSampler):
            async def generate(self, requests: Any) -> Any:
                current = exchange(first)
                try:
                    return await super().generate(requests)
                finally:
                    exchange(current)

        return create(Forgetful, model, *args, **kwargs)

    patch.setattr(LocalSampler, "from_tokenizer", classmethod(from_tokenizer))


def change_seed(patch: pytest.MonkeyPatch) -> None:
    original = rollouter.Rollouter.collect
    calls = 0

    def collect(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return original(replace(self, seed=self.seed + 1) if calls == 2 else self, *args, **kwargs)

    patch.setattr(rollouter.Rollouter, "collect", collect)


def drop_group(patch: pytest.MonkeyPatch) -> None:
    def drop(step: Any) -> Any:
        return replace(step, groups=step.groups[:-1])

    patch.setattr(rollouter, "sample_until_full", in_call(2, drop, rollouter.sample_until_full))


DURING_TRAINING = {
    "an advantage scaled by 0.5": (scale_advantages, "advantages", "every value is 0.5 times as large"),
    "a mask shifted by one": (shift_mask, "batch", "mask: shifted by one token to the right"),
    "rewards of two rows exchanged": (exchange_rewards, "batch", "rewards: rows 0 and 5 are exchanged"),
    "a token altered": (alter_token, "samples", "the first, row 3, column 0"),
    "a minibatch trained twice": (repeat_minibatch, "weights", "the minibatch of update 1 of 2 was trained twice"),
    "a minibatch in place of another": (
        replace_minibatch,
        "weights",
        "update 2 of 2 was made on the minibatch of the update before it",
    ),
    "Adam's moments reset": (reset_moments, "weights", "AdamW's moments were reset before the step"),
    "a sampler left on old weights": (
        keep_old_weights,
        "sampler's weights",
        "the sampler still had the weights of step 0",
    ),
    "a changed seed": (change_seed, "samples", "sampled with seed 1, and run.toml has seed 0"),
    "a group dropped": (drop_group, "groups", "3 groups are logged, and the run has 4"),
}


Plant = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(scope="module")
def train(settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Callable[[Plant | None], Path]:
    """`train(fault)`: the folder of a run with the fault, or of an honest one; each is trained once."""

    @cache
    def train_with(plant: Plant | None) -> Path:
        folder = tmp_path_factory.mktemp("faulty" if plant else "honest")
        with pytest.MonkeyPatch.context() as patch:
            if plant is not None:
                plant(patch)
            pg.train(make_run(folder, settings), display=False)
        return folder

    return train_with


@pytest.mark.parametrize("fault", keep_fast(DURING_TRAINING, *list(DURING_TRAINING)[:2]))
def test_a_fault_in_training_is_named(fault: str, train: Callable[[Plant | None], Path]) -> None:
    plant, subject, text = DURING_TRAINING[fault]
    failures = verify(train(plant)).failures
    named = [finding for finding in failures if finding.subject == subject and text in finding.message]
    assert named, [str(finding) for finding in failures]
    assert all(finding.step in (None, 2) for finding in failures), failures


# Faults in the files of a finished run


@pytest.fixture
def honest(train: Callable[[Plant | None], Path]) -> Iterator[Path]:
    """An honest run's folder, whose files a test may change: they are put back."""
    folder = train(None)
    kept = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    yield folder
    for path in folder.rglob("*"):
        if path.is_file() and path not in kept:
            path.unlink()
    for path, data in kept.items():
        if not path.exists() or path.read_bytes() != data:
            path.write_bytes(data)


def test_an_honest_run_has_no_failure(honest: Path) -> None:
    result = verify(honest)
    assert result.status == "holds"
    assert not result.failures
    recorded = {(finding.subject, finding.step) for finding in result.findings if finding.status == "holds"}
    stages = ("prompts", "samples", "rewards", "batch", "sampler's weights", "advantages", "metrics", "weights")
    assert recorded >= {(stage, step) for stage in stages for step in (1, 2)}


def edit_reward(folder: Path) -> None:
    (folder / "mine.py").write_text(REWARD.format(factor=4))


def edit_seed(folder: Path) -> None:
    file = folder / "run" / "run.toml"
    text = file.read_text()
    assert "\nseed = 0\n" in text
    file.write_text(text.replace("\nseed = 0\n", "\nseed = 7\n"))


def edit_rows(folder: Path, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> None:
    file = folder / "run" / "completions.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in change(rows)))


def alter_text(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    rows[20] |= {"completion": rows[20]["completion"] + "!"}
    return rows


def exchange_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    rows[16], rows[17] = rows[17], rows[16]
    return rows


def drop_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if (row["step"], row["group"]) != (2, 3)]


def repeat_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    first = [row for row in rows if row["step"] == 1]
    return first + [row | {"step": 2} for row in first]


def flip_bit(folder: Path) -> None:
    file = folder / "run" / "verification" / "steps" / "step-000002" / "tensors.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)


IN_FILES: dict[str, tuple[Callable[[Path], None], list[tuple[str, str]]]] = {
    "a reward file changed": (
        edit_reward,
        [("code", "mine.py changed since the step"), ("rewards", "every value is 2 times as large")],
    ),
    "the seed changed": (edit_seed, [("settings", "seed 0 -> 7")]),
    "a completion altered": (lambda f: edit_rows(f, alter_text), [("completions", "completion of row 4")]),
    "two rows exchanged": (lambda f: edit_rows(f, exchange_rows), [("completions", "2 rows differ")]),
    "a group dropped": (lambda f: edit_rows(f, drop_rows), [("groups", "3 groups are logged")]),
    "a rollout trained twice": (lambda f: edit_rows(f, repeat_rows), [("repetitions", "are those of step 1")]),
    "a bit of a record": (flip_bit, [("record", "is damaged: its sha256")]),
}


@pytest.mark.parametrize("fault", IN_FILES)
def test_a_fault_in_the_files_is_named(fault: str, honest: Path) -> None:
    plant, expected = IN_FILES[fault]
    plant(honest)
    failures = verify(honest, None if fault == "a rollout trained twice" else [2]).failures
    for subject, text in expected:
        named = [finding for finding in failures if finding.subject == subject and text in finding.message]
        assert named, [str(finding) for finding in failures]


# Steps without a record, and machines that round otherwise


@pytest.mark.full
def test_steps_without_a_record_are_repeated_up_to_a_checkpoint(settings: dict[str, Any], tmp_path: Path) -> None:
    pg.train(make_run(tmp_path, settings, steps=3, recorded=0), display=False)
    assert [finding.step for finding in verify(tmp_path).findings if finding.subject == "metrics"] == [1]
    result = verify(tmp_path, steps=[3])
    held = {(finding.subject, finding.step) for finding in result.findings if finding.status == "holds"}
    assert held >= {(subject, step) for subject in ("completions", "metrics") for step in (1, 2, 3)}
    assert ("weights", 3) in held
    assert not result.failures
    edit_rows(tmp_path, alter_text)
    altered = verify(tmp_path, steps=[3]).failures
    assert [(finding.subject, finding.step) for finding in altered] == [("completions", 2)]


@pytest.mark.parametrize("fault", [None, reset_moments, scale_advantages, keep_old_weights])
def test_another_machine_is_compared_within_bounds(
    fault: Plant | None, train: Callable[[Plant | None], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = train(fault)
    monkeypatch.setattr(provenance, "describe_cpu", lambda: "another one")
    result = verify(folder)
    named = {None: set(), reset_moments: {"weights"}, scale_advantages: {"advantages"}}
    failed = {finding.subject for finding in result.failures}
    assert named.get(fault, {"sampler's weights"}) <= failed
    assert failed if fault else not failed
    assert ("samples", "not checked") in {(finding.subject, finding.status) for finding in result.findings}


ENVIRONMENT = """
from pathlib import Path

import policygrad as pg


class Brevity:
    def __init__(self, example):
        self.example = example

    async def reset(self):
        return pg.Observation(self.example.prompt)

    async def step(self, action):
        return pg.Step(reward=float(Path(__file__).with_name("factor").read_text()) / (1 + len(action.text)))
"""


def test_an_environment_that_scores_otherwise_than_in_training_is_named(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    """Its own file is the same: what it reads has changed, as the tests in a repository may."""
    (tmp_path / "place.py").write_text(ENVIRONMENT)
    (tmp_path / "factor").write_text("8")
    run = replace(
        make_run(tmp_path, settings, recorded=1), reward=(), environment=f"{tmp_path}/place.py:Brevity", steps=1
    )
    pg.train(run, display=False)
    honest = verify(tmp_path)
    assert not honest.failures, honest.failures
    (finding,) = [finding for finding in honest.findings if finding.subject == "rewards"]
    assert (finding.status, finding.message) == (
        "holds",
        "16 rewards of the environment are those of the step repeated",
    )
    (tmp_path / "factor").write_text("4")
    (failure,) = [finding for finding in verify(tmp_path).failures if finding.subject == "rewards"]
    assert "the environment gives completion 0 the reward" in failure.message
