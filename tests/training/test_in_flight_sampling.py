"""Sampling that goes on from step to step while weights change under it: what a checkpoint holds of it, what a signal leaves of it,
and that nothing is drawn or trained on twice. The sampler fixes the token at which the weights change; an engine's own are in
tests/samplers."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import policygrad as pg
from doubles.files import rows, same, untimed, weights
from doubles.in_flight import PIECE, InFlight
from doubles.stops import AtDecoding, learner_that_sends, send
from policygrad.checkpoint.format import load_latest
from policygrad.models.tokenizer import Tokenizer, pad_token_id
from policygrad.rollout.async_producer import RolloutProducer
from policygrad.training.loop import StepResult

STEPS, PROMPTS, SAMPLES = 5, 2, 4


@pytest.fixture(scope="module")
def run(small: pg.Run) -> pg.Run:
    assert small.algorithm.update_rule.updates == 1  # a version is a step
    return replace(small, steps=STEPS, prompts_per_step=PROMPTS, samples_per_prompt=SAMPLES, max_staleness=2)


class Counting(pg.Trainer):
    """Notes what it trains on."""

    done: list[StepResult]

    def on_step(self, done: StepResult) -> Any:
        self.done.append(done)
        return super().on_step(done)


Drawing = Callable[[Any, Tokenizer], InFlight]


def trained(run: pg.Run, **how: Any) -> tuple[list[StepResult], Any]:
    """(steps that were trained on, the result) of one process's share of a run."""
    given = {name: how.pop(name) for name in ("sampler", "learner", "callbacks") if name in how}
    trainer = Counting(run, display=False, **given)
    trainer.done = []
    result = trainer.train(**how)
    return trainer.done, result


def drawing(made: list[InFlight], **how: Any) -> Drawing:
    """Makes the sampler, and keeps it in `made`."""

    def make(model: Any, tokenizer: Tokenizer) -> InFlight:
        made.append(InFlight(model, tokenizer, last=STEPS, **how))
        return made[-1]

    return make


def there(folder: Path) -> int:
    """The last step whose rollout a resumed run has, or draws before it learns."""
    saved = load_latest(folder / "checkpoints", warn=lambda text: None)
    return 1 if saved is None else saved.step + max(1, len(saved.state["queued_rollouts"]))


def once(done: list[StepResult]) -> bool:
    """Whether every step was trained on once, and every prompt in one of them."""
    prompts = [group.spec.key[3] for one in done for group in one.rollout.groups]
    return [one.step for one in done] == [*range(1, STEPS + 1)] and sorted(prompts) == [*range(STEPS * PROMPTS)]


class Waiting(pg.Callback):
    """After step `at`, until the rollout of the step after the next is begun: then that of the next is whole."""

    def __init__(self, made: list[InFlight], at: int) -> None:
        self.made, self.after = made, at

    def step(self, trainer: Any, step: int, metrics: Any) -> None:
        if step == self.after:
            assert self.made[-1].begun[step + 2].wait(120)


@pytest.fixture(scope="module")
def full(run: pg.Run, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, InFlight]:
    """A run that nothing has happened to, and its sampler."""
    made: list[InFlight] = []
    folder = tmp_path_factory.mktemp("whole") / "run"
    done, _ = trained(replace(run, output=str(folder)), sampler=drawing(made))
    assert once(done)
    return folder, made[0]


def test_each_rollout_and_completion_is_sampled_once(full: tuple[Path, InFlight]) -> None:
    folder, sampler = full
    assert sorted(sampler.asked) == [*range(1, STEPS + 1)]
    assert all(len(keys) == len(set(keys)) == PROMPTS * SAMPLES for keys in sampler.asked.values())
    told = [row["staleness/max"] for row in rows(folder / "metrics.jsonl")]
    assert told == [0] + [1] * (STEPS - 1)


@pytest.mark.full
def test_resume_amid_a_weight_change_repeats_nothing(run: pg.Run, full: tuple[Path, InFlight], tmp_path: Path) -> None:
    folder, made = tmp_path / "run", list[InFlight]()
    stopped = replace(run, output=str(folder))
    before, result = trained(stopped, sampler=drawing(made), callbacks=[Waiting(made, 2)], stop_after=2)
    assert (result.steps, result.model) == (2, None)
    saved = load_latest(folder / "checkpoints", warn=lambda text: None)
    assert saved is not None
    assert len(saved.state["queued_rollouts"]) == 1
    after, _ = trained(run, sampler=drawing(made, alone=there(folder)), resume=folder)
    first, second = made
    assert sorted(first.asked) == [1, 2, 3, 4]
    assert sorted(second.asked) == [4, 5]  # the third is there, the fourth had been begun
    assert not {*second.drawn} & {*first.drawn}
    assert once([*before, *after])

    batch = after[0].rollout.batch  # of the third step
    assert batch.version is not None
    assert batch.logp_sampler is not None
    keys = [(*group.spec.key, j) for group in after[0].rollout.groups for j in range(SAMPLES)]
    assert {key[2] for key in keys} == {3}
    mixed = 0
    for row, key in enumerate(keys):
        drawn, own = first.drawn[key], batch.mask[row]
        versions = torch.as_tensor(drawn.version).expand(len(drawn.tokens))
        assert batch.version[row][own].tolist() == versions.tolist()
        assert torch.equal(batch.logp_sampler[row][own], drawn.logp)
        mixed += len(set(versions.tolist())) == 2
        assert set(versions[:PIECE].tolist()) == {1}
        assert set(versions[PIECE:].tolist()) <= {2}
    assert mixed > PROMPTS

    unbroken, _ = full
    assert same(weights(unbroken), weights(folder))
    assert untimed(unbroken / "metrics.jsonl") == untimed(folder / "metrics.jsonl")
    assert rows(unbroken / "completions.jsonl") == rows(folder / "completions.jsonl")


# --- signals


def when(what: str, number: int, sent: signal.Signals) -> Callable[[str, int], None]:
    """Sends the signal when the sampler tells this, once."""
    left = [True]

    def told(message: str, at: int) -> None:
        if (message, at) == (what, number) and left[0]:
            left[0] = False
            send(sent)

    return told


def learning(where: str, sent: signal.Signals) -> dict[str, Any]:
    return {"learner": lambda model, run: learner_that_sends(model, run, where, 2, sent)}


INT, TERM, HUP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
PHASES: dict[str, tuple[Callable[[list[InFlight]], dict[str, Any]], int]] = {
    "drawing alone": (lambda made: {"sampler": drawing(made, told=when("begun", 1, HUP))}, 0),
    "drawing beside an update": (lambda made: {"sampler": drawing(made, told=when("begun", 2, INT))}, 1),
    "waiting for the buffer": (lambda made: {"sampler": drawing(made, held=3)}, 2),
    "updating": (lambda made: {"sampler": drawing(made)} | learning("update", HUP), 2),
    "publishing": (lambda made: {"sampler": drawing(made, told=when("published", 2, TERM))}, 2),
    "saving": (lambda made: {"sampler": drawing(made)} | learning("state", INT), 1),
}
"""What is given to the run, and the steps that are then saved."""


def mark_all_but(phases: Iterable[str], *first: str) -> list[Any]:
    """The phases as parameters, of which the fast tier has the first."""
    return [pytest.param(phase, marks=[] if phase in first else pytest.mark.full) for phase in phases]


@pytest.mark.full
@pytest.mark.parametrize("phase", mark_all_but(PHASES, "drawing beside an update", "waiting for the buffer"))
def test_a_signal_in_any_phase_is_resumable_and_repeats_nothing(
    run: pg.Run, tmp_path: Path, phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, steps = PHASES[phase]
    made = list[InFlight]()
    if phase == "waiting for the buffer":
        monkeypatch.setattr(RolloutProducer, "__init__", waited_for_with_a_signal(made))
    folder = tmp_path / "run"
    before, result = trained(replace(run, output=str(folder)), **make(made))
    assert (result.steps, result.model, result.interrupted) == (steps, None, True)
    after, result = trained(run, sampler=drawing(made, alone=there(folder)), resume=folder)
    assert (result.steps, result.interrupted) == (STEPS, False)
    assert once([*before, *after])
    assert [row["step"] for row in rows(folder / "metrics.jsonl")] == [*range(1, STEPS + 1)]
    first, second = made
    kept = [one for one in first.drawn if one[2] in {step.step for step in before}]
    assert not {*second.drawn} & {*kept}


def waited_for_with_a_signal(made: list[InFlight]) -> Callable[..., None]:
    """The making of a producer at which a signal comes upon whoever waits for the rollout that is held."""
    begin = RolloutProducer.__init__

    class Condition(threading.Condition):
        def wait(self, timeout: float | None = None) -> bool:
            held = made[0].held
            if (
                held is not None
                and made[0].begun[held].is_set()
                and threading.current_thread() is threading.main_thread()
            ):
                made[0].held = None
                send(TERM)
            return super().wait(timeout)

    def init(producer: RolloutProducer, *args: Any) -> None:
        begin(producer, *args)
        producer._changed = Condition()

    return init


# --- the local sampler, which is whole before the weights change


class Publishing(pg.LocalSampler):
    """Sends a signal when it is given a version."""

    def __init__(self, model: Any, tokenizer: Tokenizer, version: int, number: signal.Signals) -> None:
        super().__init__(model, tokenizer.end_ids, pad_token_id(tokenizer))
        self.at, self.number = version, number

    async def update(self, weights: Any) -> None:
        if weights.version == self.at:
            send(self.number)
        await super().update(weights)


LOCAL: dict[str, tuple[dict[str, Any], int]] = {
    "drawing alone": ({"sampler": lambda m, t: AtDecoding(m, t, 1, TERM)}, 0),
    "drawing beside an update": ({"sampler": lambda m, t: AtDecoding(m, t, 3, HUP)}, 1),
    "updating": (learning("update", INT), 2),
    "publishing": ({"sampler": lambda m, t: Publishing(m, t, 1, TERM)}, 1),
    "saving": (learning("state", HUP), 1),
}


@pytest.mark.parametrize("phase", mark_all_but(LOCAL, "drawing beside an update"))
def test_resume_is_bitwise_with_the_local_sampler(run: pg.Run, local: Path, tmp_path: Path, phase: str) -> None:
    given, steps = LOCAL[phase]
    folder = tmp_path / "run"
    before, result = trained(replace(run, output=str(folder)), **given)
    assert (result.steps, result.model, result.interrupted) == (steps, None, True)
    after, _ = trained(run, resume=folder)
    assert once([*before, *after])
    assert same(weights(local), weights(folder))
    assert untimed(local / "metrics.jsonl") == untimed(folder / "metrics.jsonl")


@pytest.fixture(scope="module")
def local(run: pg.Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the local sampler that nothing has happened to."""
    folder = tmp_path_factory.mktemp("local") / "run"
    done, _ = trained(replace(run, output=str(folder)))
    assert once(done)
    return folder
