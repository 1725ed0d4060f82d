"""Rewards one by one, turns and demonstrations on the real path: what trains, what is written down, what is refused at once."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import policygrad as pg
from doubles.files import rows, same, weights, write_rows
from doubles.rewards import brief, shouted
from policygrad.models.loading import load_model
from policygrad.models.tokenizer import load_tokenizer
from policygrad.trackers.base import choose_sample

TASK = [
    {"prompt": f"{i} + {j} =\n", "answer": str(i + j), "demonstration": f"{i + j}!"} for i in range(4) for j in range(3)
]


@pytest.fixture
def run(small: pg.Run, tmp_path: Path) -> pg.Run:
    return replace(
        small,
        task=TASK,
        reward=(shouted,),
        steps=3,
        prompts_per_step=4,
        samples_per_prompt=3,
        sampling=pg.SamplingParams(max_tokens=6),
        output=str(tmp_path / "run"),
    )


def shown_logp(folder: Path | str, run: pg.Run) -> float:
    """Mean log π of the demonstrations' tokens, nats."""
    model = load_model(str(folder))
    tokenizer = load_tokenizer(str(run.model), model)
    total, count = 0.0, 0
    for row in TASK:
        prompt = tokenizer.encode(row["prompt"], 0).ids
        answer = torch.tensor(tokenizer.encode_answer(prompt, row["prompt"], row["demonstration"]))
        ids = torch.cat([prompt, answer])[None]
        with torch.no_grad():
            logp = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        total, count = total + float(logp.gather(-1, answer[:, None]).sum()), count + len(answer)
    return total / count


@pytest.mark.parametrize("name", ["luffy", "chord"])
def test_demonstrations_teach_answers_that_are_never_sampled(run: pg.Run, name: str) -> None:
    """Every sample is wrong, every demonstration right: GRPO would learn nothing, these make the demonstrations likely."""
    run = replace(run, algorithm=pg.ALGORITHMS[name], lr=1e-2)
    before = shown_logp(str(run.model), run)
    result = pg.train(run, display=False)
    assert shown_logp(result.output / "model", run) > before + 0.1
    written = rows(result.output / "completions.jsonl")
    shown = [row for row in written if row["demonstration"]]
    assert len(shown) * 4 == len(written)
    assert all((row["reward"], row["tokens"], row["truncated"]) == (1.0, 0, False) for row in shown)
    measured = [row for row in rows(result.output / "metrics.jsonl") if "demonstrations/count" in row]
    assert [row["demonstrations/count"] for row in measured] == [4] * 3
    assert all(row["demonstrations/reward"] == 1 for row in measured)
    assert measured[0]["reward"] == 0
    assert all(row["completions/max_length"] <= 6 for row in measured)


def test_displayed_samples_are_the_policys() -> None:
    report = [
        {"completion": "mine"},
        {"completion": "shown", "demonstration": True},
        {"completion": "too", "demonstration": False},
    ]
    results = [choose_sample(step, report) for step in range(4)]
    assert [sample.completion for sample in results if sample] == ["mine", "too", "mine", "too"]
    assert choose_sample(0, report[1:2]) is None


def test_a_task_without_demonstrations_is_refused_before_anything_is_sampled(run: pg.Run) -> None:
    bare = [{k: v for k, v in row.items() if k != "demonstration"} for row in TASK]
    with pytest.raises(
        pg.ConfigError, match=r"no row of 'rows' has one: give the task a column 'demonstration'.*such as grpo"
    ):
        pg.train(replace(run, algorithm=pg.LUFFY, task=bare), display=False)
    with pytest.raises(
        pg.ConfigError,
        match=r"learns from demonstrations, which are single completions, and an environment's episodes consist of turns",
    ):
        pg.train(replace(run, algorithm=pg.LUFFY), environment=lambda example: pg.SingleTurn(example), display=False)


def test_rows_with_a_demonstration_too_long_are_refused_before_anything_is_sampled(run: pg.Run, tmp_path: Path) -> None:
    """At once and with all that is needed to mend it: not at the step that comes to the row, and at each resume again."""
    long = [{**row, "demonstration": "1 2 3 4 5" + "!" * i} if i in (5, 9) else row for i, row in enumerate(TASK)]
    file = write_rows(tmp_path / "sums.jsonl", long)
    message = (
        r"sums\.jsonl:6: column 'demonstration' has (\d+) tokens, but an answer may have at most 6 \(2 of 12 "
        r"demonstrations are too long\): set --max-tokens (\d+), which is enough for all, or remove those rows"
    )
    run = replace(run, algorithm=pg.LUFFY, task=file, steps=1)
    with pytest.raises(pg.DataError, match=message) as error:
        pg.train(run, display=False)
    first, enough = map(int, re.search(message, str(error.value)).groups())  # type: ignore[union-attr]
    assert 6 < first <= enough
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    pg.train(replace(run, sampling=pg.SamplingParams(max_tokens=enough)), display=False)
    with pytest.raises(pg.DataError, match=f"set --max-tokens {enough}"):
        pg.train(
            replace(run, sampling=pg.SamplingParams(max_tokens=enough - 1), output=str(tmp_path / "less")),
            display=False,
        )


class Endless:
    """A task that makes its examples: every demonstration is longer than an answer may be."""

    name, rewards, steps, rows, eval_on_train = "endless", (), (), (), False

    def train_example(self, index: int) -> pg.Example:
        return pg.Example(f"{index} + 1 =\n", {"answer": str(index + 1), "demonstration": "much too long" * 4})

    def eval_examples(self, count: int) -> list[pg.Example]:
        return []


class Bare(Endless):
    """One that has the column, and nothing in it."""

    def train_example(self, index: int) -> pg.Example:
        return pg.Example(f"{index} + 1 =\n", {"answer": str(index + 1), "demonstration": None})


def test_a_task_that_makes_no_demonstration_is_refused_before_anything_is_sampled(run: pg.Run) -> None:
    with pytest.raises(pg.ConfigError, match="and none of the first 64 examples of 'endless' has one: give the task a"):
        pg.train(replace(run, task=Bare(), algorithm=pg.LUFFY, reward=(brief,)), display=False)


def test_steps_without_a_demonstration_are_trained(run: pg.Run) -> None:
    """One row of twelve has one, four prompts a step: two of three steps have none."""
    sparse = [{**row, "demonstration": row["demonstration"] if i == 0 else None} for i, row in enumerate(TASK)]
    reward = (brief, "exact_match")  # which reads a column
    result = pg.train(replace(run, task=sparse, algorithm=pg.LUFFY, reward=reward, steps=3), display=False)
    measured = [row for row in rows(result.output / "metrics.jsonl") if "demonstrations/count" in row]
    assert sorted(row["demonstrations/count"] for row in measured) == [0, 0, 1]


@pytest.mark.parametrize("name", ["luffy", pytest.param("chord", marks=pytest.mark.full)])
def test_a_step_whose_demonstrations_are_all_too_long_trains_on_the_samples(run: pg.Run, name: str) -> None:
    run = replace(run, task=Endless(), algorithm=pg.ALGORITHMS[name], reward=(brief,), steps=2)
    result = pg.train(run, display=False)
    measured = [row for row in rows(result.output / "metrics.jsonl") if "demonstrations/count" in row]
    assert [(row["demonstrations/count"], row["demonstrations/too_long"]) for row in measured] == [(0, 4)] * 2
    assert all(math.isfinite(row["objective"]) and row["updates/taken"] for row in measured)


def test_algorithms_without_demonstrations_ignore_the_column(run: pg.Run, tmp_path: Path) -> None:
    bare = [{k: v for k, v in row.items() if k != "demonstration"} for row in TASK]
    run = replace(run, algorithm=pg.DR_GRPO, reward=(brief,), steps=2)
    with_ = pg.train(run, display=False)
    without = pg.train(replace(run, task=bare, output=str(tmp_path / "bare")), display=False)
    assert same(weights(with_.output), weights(without.output))
    assert "demonstration" not in rows(with_.output / "completions.jsonl")[0]


def test_several_rewards_are_trained_and_logged(run: pg.Run) -> None:
    result = pg.train(replace(run, algorithm=pg.GDPO, reward=(shouted, brief), steps=2), display=False)
    measured = [row for row in rows(result.output / "metrics.jsonl") if "rewards/brief" in row]
    assert len(measured) == 2
    assert all(row["rewards/brief/std"] > 0 for row in measured)
    assert all(math.isfinite(row["objective"]) for row in measured)
    assert max(row["updates/taken"] for row in measured) == 4
    logged = rows(result.output / "completions.jsonl")
    assert all(row["reward"] == pytest.approx(sum(row["rewards"].values())) for row in logged)
    assert {tuple(row["rewards"]) for row in logged} == {("shouted", "brief")}
    prompts = {(row["step"], row["group"]): row["prompt"] for row in logged}
    assert all(row["prompt"] == prompts[row["step"], row["group"]] for row in logged)
    assert {group for _, group in prompts} == set(range(len(prompts) // 2))


class Twice:
    """Asks twice; a turn is worth 1 where it says <answer>, and what came of the first is the state of the second."""

    waits = False

    def __init__(self, example: pg.Example) -> None:
        self.example, self.turns = example, 0

    async def reset(self) -> pg.Observation:
        return pg.Observation(self.example.prompt, state="start")

    async def step(self, action: pg.Action) -> pg.Step:
        self.turns += 1
        right = "<answer>" in action.text
        more = pg.Observation(f"\n{self.example.prompt}", state=right) if self.turns < 2 else None
        return pg.Step(more, reward=float(right))


class Spy:
    """A learner that remembers the batches it was given."""

    def __init__(self, model: torch.nn.Module, run: pg.Run) -> None:
        self.inner, self.seen = pg.make_local_learner(model, run), list[tuple[pg.Batch, torch.Tensor]]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def update(self, batch: pg.Batch, psi: torch.Tensor, algorithm: pg.Algorithm) -> Any:
        self.seen.append((batch, psi))
        return self.inner.update(batch, psi, algorithm)


@pytest.mark.parametrize("steps", [1, pytest.param(6, marks=pytest.mark.full)])
def test_turns_have_advantages_of_their_own_which_are_learned(run: pg.Run, steps: int) -> None:
    """The whole way: an environment of two turns, states named by it, each turn's Ψ its own, and more answers after six steps."""
    spies: list[Spy] = []

    def learner(model: torch.nn.Module, given: pg.Run) -> Spy:
        spies.append(Spy(model, given))
        return spies[0]

    run = replace(run, model="tiny", task="embedded", algorithm=pg.GIGPO, reward=(), steps=steps, samples_per_prompt=8)
    run = replace(run, lr=1e-3, sampling=pg.SamplingParams(max_tokens=64))
    result = pg.train(run, environment=Twice, learner=learner, display=False)
    measured = [row for row in rows(result.output / "metrics.jsonl") if "environment/turns" in row]
    assert all(row["environment/turns"] > 1.5 for row in measured)
    if steps > 1:
        assert sum(row["reward"] for row in measured[-2:]) > sum(row["reward"] for row in measured[:2]) + 0.3
    batch, psi = spies[0].seen[0]
    assert batch.turn_state is not None
    assert batch.token_reward is not None
    several = [i for i in range(len(psi)) if len(set(psi[i][batch.mask[i]].tolist())) > 1]
    assert several
    written = rows(result.output / "completions.jsonl")[: len(psi)]
    totals = batch.reward + torch.where(batch.mask, batch.token_reward, 0).sum(1)
    assert [
        row["reward"] for row in written
    ] == totals.tolist()  # what is logged is the episode's reward, not what is left of it
    assert not batch.reward.any()
    talks = [row["turns"] for row in written if "turns" in row]
    assert talks
    assert all([who for who, _ in turns] == ["policy", "environment", "policy"] for turns in talks)
    assert all("".join(text for _, text in row["turns"]) == row["completion"] for row in written if "turns" in row)
    assert all(row["prompt"].strip() in row["turns"][1][1] for row in written if "turns" in row)
