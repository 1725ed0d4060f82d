"""docs/extending.md: each part of one's own in one file, run as it stands there, and seen to do what it says."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import policygrad as pg

PAGE = (Path(__file__).parents[1] / "docs" / "extending.md").read_text(encoding="utf-8")
BLOCKS: dict[str, str] = dict(re.findall(r"```python (\w+)\n(.*?)```", PAGE, re.DOTALL))


def small(tmp_path: Path, **changes: Any) -> pg.Run:
    """A run of seconds on the embedded model."""
    return pg.Run(
        steps=4,
        prompts_per_step=4,
        samples_per_prompt=4,
        lr=1e-3,
        evaluation=pg.EvaluationConfig(problems=0),
        rewards=pg.RewardConfig(num_workers=1),
        output=str(tmp_path / "run"),
        **changes,
    )


def run_block(name: str, tmp_path: Path, **more: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Executes a block of the page with `pg.train` at a small size, by GRPO where it names no algorithm, so that a step is one
    update; (what the block defines, what the trainer was given)."""
    given: dict[str, Any] = {}

    class Small:
        def __getattr__(self, attribute: str) -> Any:
            return getattr(pg, attribute)

        @staticmethod
        def train(run: pg.Run, **options: Any) -> Any:
            given.update(options, run=run)
            given["trainer"] = trainer = pg.Trainer(
                small(tmp_path, algorithm=pg.GRPO if run.algorithm == pg.DAPO else run.algorithm),
                display=False,
                **(options | more),
            )
            given["result"] = trainer.train()

    names: dict[str, Any] = {"__name__": "page", "pg": Small()}
    code = BLOCKS[name].replace("import policygrad as pg\n", "")
    exec(compile(code, name, "exec", dont_inherit=True), names)
    return names, given


class Spy:
    """A learner that remembers what it was given."""

    def __init__(self, model: nn.Module, run: pg.Run) -> None:
        self.inner = pg.make_local_learner(model, run)
        self.seen: list[tuple[pg.Batch, Tensor, pg.Algorithm]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def update(self, batch: pg.Batch, psi: Tensor, algorithm: pg.Algorithm) -> Any:
        self.seen.append((batch, psi, algorithm))
        return self.inner.update(batch, psi, algorithm)


@pytest.fixture
def spies() -> list[Spy]:
    return []


@pytest.fixture
def spying(spies: list[Spy]) -> Any:
    def learner(model: nn.Module, run: pg.Run) -> Spy:
        spies.append(Spy(model, run))
        return spies[-1]

    return learner


def metrics(given: dict[str, Any], name: str) -> list[float]:
    history = given["trainer"].files.history(name)
    return [value for _, value in history]


@pytest.mark.parametrize("name", sorted(BLOCKS))
def test_each_is_at_most_33_lines(name: str) -> None:
    assert len(BLOCKS[name].strip().splitlines()) <= 33
    assert set(BLOCKS) == {"gate", "sampler", "environment", "field", "tracker", "callback", "learner"}


def test_a_part_brings_what_fills_its_field(tmp_path: Path, spies: list[Spy], spying: Any) -> None:
    run_block("field", tmp_path, learner=spying)
    batch, psi, _ = spies[0].seen[0]
    assert batch.baseline is not None
    assert torch.allclose(batch.baseline, batch.mask.sum(1) / pg.Run().sampling.max_tokens)
    assert torch.allclose(psi, (batch.reward - batch.baseline)[:, None] * batch.mask)


def test_a_gate(tmp_path: Path, spies: list[Spy], spying: Any) -> None:
    _, given = run_block("gate", tmp_path, learner=spying)
    assert given["result"].steps == 4
    _, psi, algorithm = spies[0].seen[0]
    assert type(algorithm.gate).__name__ == "Window"
    ratio = torch.tensor([0.7, 0.9, 1.1, 1.3])
    batch = pg.Batch(
        mask=torch.ones(1, 4, dtype=torch.bool), group=torch.zeros(1, dtype=torch.int64), reward=torch.ones(1)
    )
    assert algorithm.gate.weight(ratio[None], psi[:1, :1], batch)[0].tolist() == pytest.approx([0.0, 0.9, 1.1, 0.0])


def test_a_sampler_that_lags_is_not_taken_for_on_policy(tmp_path: Path, spies: list[Spy], spying: Any) -> None:
    _, given = run_block("sampler", tmp_path, learner=spying)
    assert metrics(given, "staleness/max") == [0.0, 1.0, 2.0, 2.0]
    for step, (batch, psi, algorithm) in enumerate(spies[0].seen):
        behind = min(step, 2)
        assert batch.version is not None
        assert set(batch.version[batch.mask].tolist()) == {step - behind}
        if not behind:
            assert algorithm.corrections == ()
            assert batch.logp_old is None  # drawn with the learner's own weights: no second forward pass
            continue
        assert algorithm.corrections == (pg.TruncatedIS(),)
        weight = algorithm.apply_corrections(torch.ones(batch.mask.shape), pg.Forward(batch.logp_old), batch, psi)[
            batch.mask
        ]
        assert float((weight - 1).abs().max()) > 1e-4


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo", "sapo"])
def test_with_the_sampler_as_old_policy_the_ratio_itself_is_not_1(
    name: str, tmp_path: Path, spies: list[Spy], spying: Any
) -> None:
    names, _ = run_block("sampler", tmp_path / "page")
    algorithm = replace(pg.get_algorithm(name), old_policy="sampler")
    pg.train(small(tmp_path, algorithm=algorithm), sampler=names["lagging"], learner=spying, display=False)
    batch, psi, seen = spies[0].seen[-1]
    logp = spies[0].evaluate(replace(batch, logp_old=None), frozenset({"logp_old"})).logp_old  # after the last update
    weight, ratio = pg.gate_weight(pg.Forward(logp), batch, psi, seen)
    assert float((ratio - 1)[batch.mask].abs().max()) > 1e-4
    assert float((weight - 1)[batch.mask].abs().max()) > 1e-4


def test_what_an_environment_says_is_read_and_has_no_gradient(tmp_path: Path, spies: list[Spy], spying: Any) -> None:
    _, given = run_block("environment", tmp_path, learner=spying)
    assert all(turns > 1 for turns in metrics(given, "environment/turns"))
    assert metrics(given, "environment/answered")
    assert max(metrics(given, "mismatch/logp_max")) < 1e-3  # the learner reads what the sampler read, holes included
    tokenizer = given["trainer"].tokenizer
    batch, psi, algorithm = spies[0].seen[0]
    assert batch.tokens is not None
    rows = [i for i in range(len(batch.mask)) if "letters." in tokenizer.decode(batch.tokens[i])]
    assert rows
    logp = torch.zeros(batch.mask.shape, requires_grad=True)
    pg.surrogate(
        logp, replace(batch, logp_ref=torch.zeros(batch.mask.shape)), torch.ones_like(psi), algorithm
    ).backward()
    assert logp.grad is not None
    for i in rows:
        last = int(batch.mask[i].nonzero().max())
        hole = (~batch.mask[i, :last]).nonzero().squeeze(1)
        assert "letters." in tokenizer.decode(batch.tokens[i, hole])
        assert not logp.grad[i, hole].any()
        assert logp.grad[i, batch.mask[i]].all()


def test_a_tracker(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, given = run_block("tracker", tmp_path)
    rewards = metrics(given, "reward")
    step = rewards.index(max(rewards)) + 1
    assert capsys.readouterr().out == f"best: {max(rewards):.2f} at step {step}\n"


def test_a_callback_changes_the_learning_rate(tmp_path: Path) -> None:
    names, _ = run_block("callback", tmp_path / "page")

    class Soon(names["Halving"]):  # type: ignore[misc, name-defined]
        def step(self, trainer: Any, step: int, metrics: Any) -> None:
            super().step(trainer, 20 * step, metrics)

    trainer = pg.Trainer(small(tmp_path), callbacks=[Soon()], display=False)
    trainer.train()
    rates = [rate for _, rate in trainer.files.history("lr")]
    taken = [1e-3 / 2**k for k in range(4)]
    assert rates
    assert set(rates) <= set(taken)
    assert len(set(rates)) > 1


def test_a_learner(tmp_path: Path) -> None:
    names, _ = run_block("learner", tmp_path)
    (learner,) = names["made"]
    assert learner.updates == 4
    assert learner.version == 4
