"""docs/extending.md: each part of one's own in one file, run as it stands there, and seen to do what it says."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import policygrad as pg

PAGE = (Path(__file__).parents[1] / "docs" / "extending.md").read_text(encoding="utf-8")
BLOCKS: dict[str, str] = dict(re.findall(r"```python (\w+)\n(.*?)```", PAGE, re.DOTALL))
[TENT, *_] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
BLOCKS["gate"] = f"{TENT}\npg.train(pg.Run(algorithm=TENT))\n"


@pytest.fixture
def short(small: pg.Run, tmp_path: Path) -> pg.Run:
    """A run of four steps, each of which is one update that moves the policy: of four completions hardly two are worth the same."""
    file = tmp_path / "letters.py"
    file.write_text("def letters(prompts, completions, **columns):\n    return [len({*c}) / 8 for c in completions]\n")
    return replace(
        small,
        algorithm=pg.GRPO,
        reward=(f"{file}:letters",),
        steps=4,
        samples_per_prompt=4,
        checkpoint=pg.CheckpointConfig(),
        output=str(tmp_path / "run"),
    )


def define(name: str, train: Callable[..., object] = lambda run, **options: None) -> dict[str, Any]:
    """What a block of the page defines, with this as `pg.train`."""

    class Small:
        def __getattr__(self, attribute: str) -> Any:
            return train if attribute == "train" else getattr(pg, attribute)

    names: dict[str, Any] = {"__name__": "page", "pg": Small()}
    code = BLOCKS[name].replace("import policygrad as pg\n", "")
    exec(compile(code, name, "exec", dont_inherit=True), names)
    return names


def run_block(name: str, short: pg.Run, **more: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Execute a block of the page with `pg.train` as a short run, by GRPO where the block names no algorithm; return what the
    block defines, and what the trainer was given."""
    given: dict[str, Any] = {}

    def train(run: pg.Run, **options: Any) -> None:
        given.update(options, run=run)
        given["trainer"] = trainer = pg.Trainer(
            short if run.algorithm == pg.DAPO else replace(short, algorithm=run.algorithm),
            display=False,
            **(options | more),
        )
        given["result"] = trainer.train()

    return define(name, train), given


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


def test_each_block_is_at_most_33_lines() -> None:
    for name, block in BLOCKS.items():
        assert len(block.strip().splitlines()) <= 33, name
    assert set(BLOCKS) == {"gate", "sampler", "environment", "field", "tracker", "callback", "learner"}


def test_a_part_brings_what_fills_its_field(short: pg.Run, spies: list[Spy], spying: Any) -> None:
    run_block("field", short, learner=spying)
    batch, psi, _ = spies[0].seen[0]
    assert batch.baseline is not None
    assert torch.allclose(batch.baseline, batch.mask.sum(1) / short.sampling.max_tokens)
    assert torch.allclose(psi, (batch.reward - batch.baseline)[:, None] * batch.mask)


def test_a_gate_of_one_s_own_weighs_the_ratios(short: pg.Run, spies: list[Spy], spying: Any) -> None:
    _, given = run_block("gate", short, learner=spying)
    assert given["result"].steps == 4
    _, psi, algorithm = spies[0].seen[0]
    assert type(algorithm.gate).__name__ == "Tent"
    ratio = torch.tensor([0.7, 0.9, 1.1, 1.3])
    batch = pg.Batch(
        mask=torch.ones(1, 4, dtype=torch.bool), group=torch.zeros(1, dtype=torch.int64), reward=torch.ones(1)
    )
    assert algorithm.gate.weight(ratio[None], psi[:1, :1], batch)[0].tolist() == pytest.approx([0.28, 0.72, 0.88, 0.52])


def test_a_sampler_that_lags_is_not_taken_for_on_policy(short: pg.Run, spies: list[Spy], spying: Any) -> None:
    _, given = run_block("sampler", short, learner=spying)
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


@pytest.mark.parametrize(
    "name", ["grpo", *(pytest.param(name, marks=pytest.mark.full) for name in ("gspo", "cispo", "sapo"))]
)
def test_with_the_sampler_as_old_policy_the_ratio_itself_is_not_1(
    name: str, short: pg.Run, spies: list[Spy], spying: Any
) -> None:
    algorithm = replace(pg.get_algorithm(name), old_policy="sampler")
    run = replace(short, algorithm=algorithm)
    pg.train(run, sampler=define("sampler")["lagging"], learner=spying, display=False)
    batch, psi, seen = spies[0].seen[-1]
    logp = spies[0].evaluate(replace(batch, logp_old=None), frozenset({"logp_old"})).logp_old  # after the last update
    weight, ratio = pg.gate_weight(pg.Forward(logp), batch, psi, seen)
    assert float((ratio - 1)[batch.mask].abs().max()) > 1e-4
    assert float((weight - 1)[batch.mask].abs().max()) > 1e-4


def test_what_an_environment_says_is_read_and_has_no_gradient(short: pg.Run, spies: list[Spy], spying: Any) -> None:
    longer = replace(short, sampling=pg.SamplingParams(max_tokens=32))
    _, given = run_block("environment", longer, learner=spying)
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


def test_a_tracker_remembers_the_best_step(short: pg.Run, capsys: pytest.CaptureFixture[str]) -> None:
    _, given = run_block("tracker", short)
    rewards = metrics(given, "reward")
    step = rewards.index(max(rewards)) + 1
    assert capsys.readouterr().out == f"best: {max(rewards):.2f} at step {step}\n"


def test_a_callback_changes_the_learning_rate(short: pg.Run) -> None:
    names = define("callback")

    class Soon(names["Halving"]):  # type: ignore[misc, name-defined]
        def step(self, trainer: Any, step: int, metrics: Any) -> None:
            super().step(trainer, 20 * step, metrics)

    trainer = pg.Trainer(short, callbacks=[Soon()], display=False)
    trainer.train()
    rates = [rate for _, rate in trainer.files.history("lr")]
    taken = [short.lr / 2**k for k in range(4)]
    assert rates
    assert set(rates) <= set(taken)
    assert len(set(rates)) > 1


def test_a_learner_counts_its_updates(short: pg.Run) -> None:
    names, _ = run_block("learner", short)
    (learner,) = names["made"]
    assert learner.updates == 4
    assert learner.version == 4
