"""A rollout drawn while the weights are updated is the one that older weights would have drawn in its place, and counts as that."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
from torch import nn

import policygrad as pg
from doubles.algorithms import trainable
from doubles.failing import FailingSampler, learner_cut_short
from doubles.files import rows, same, untimed, weights
from doubles.rollouts import empty
from policygrad.core.batch import Batch
from policygrad.errors import ConfigError
from policygrad.models.replica import clone_model
from policygrad.models.tokenizer import Tokenizer, pad_token_id
from policygrad.rollout.async_producer import RolloutProducer, RolloutQueue
from policygrad.rollout.rollouter import Rollout
from policygrad.rollout.trajectory import RolloutRequest
from policygrad.samplers.base import SamplingParams
from policygrad.samplers.local.sampler import LocalSampler
from policygrad.training.config.checkpoint import CheckpointConfig
from policygrad.training.config.run import Run
from policygrad.training.trainer import train
from policygrad.weight_sync.base import PublishedWeights


class Late(LocalSampler):
    """Draws with weights that are `lag` publications old, and says so."""

    def __init__(self, model: nn.Module, tokenizer: Tokenizer, lag: int) -> None:
        super().__init__(clone_model(model), tokenizer.end_ids, pad_token_id(tokenizer))
        self.held, self.lag = deque[PublishedWeights](), lag

    async def update(self, weights: PublishedWeights) -> None:
        self.held.append(PublishedWeights(weights.version, {n: t.detach().clone() for n, t in weights.tensors.items()}))
        await super().update(self.held[0])
        if len(self.held) > self.lag:
            self.held.popleft()


@pytest.fixture(scope="module")
def run(small: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """With a reward that about half of the answers have."""
    file = tmp_path_factory.mktemp("reward") / "odd.py"
    file.write_text("def odd(prompts, completions, **columns):\n    return [float(len(c) % 2) for c in completions]\n")
    sizes: dict[str, Any] = {"steps": 4, "prompts_per_step": 3, "samples_per_prompt": 4}
    return replace(small, **sizes, reward=(f"{file}:odd",), sampling=SamplingParams(max_tokens=6))


@pytest.mark.parametrize(
    ("name", "lag"),
    [
        ("dapo", 1),
        *(pytest.param(*case, marks=pytest.mark.full) for case in (("dr_grpo", 1), ("dr_grpo", 2), ("dapo", 2))),
    ],
)
def test_max_staleness_equals_a_sampler_with_late_weights(run: Run, tmp_path: Path, name: str, lag: int) -> None:
    """Bit for bit, though one of them samples and learns at the same time."""
    run = replace(run, algorithm=trainable(name))
    late = train(replace(run, output=str(tmp_path / "late")), sampler=lambda m, t: Late(m, t, lag), display=False)
    ahead = train(replace(run, max_staleness=lag, output=str(tmp_path / "ahead")), display=False)
    prompt = train(replace(run, output=str(tmp_path / "prompt")), display=False)
    assert same(weights(late.output), weights(ahead.output))
    assert untimed(late.output / "metrics.jsonl") == untimed(ahead.output / "metrics.jsonl")
    assert rows(late.output / "completions.jsonl") == rows(ahead.output / "completions.jsonl")
    assert not same(weights(prompt.output), weights(ahead.output))
    report = [row["staleness/max"] for row in rows(ahead.output / "metrics.jsonl")]
    each = run.resolve().algorithm.update_rule.updates
    if name == "dr_grpo":  # which carries nothing over
        assert report == [each * min(step, lag) for step in range(run.steps)]
    assert max(report) >= lag


@pytest.mark.parametrize(
    ("name", "depth"),
    [
        ("dapo", 3),
        *(pytest.param(*case, marks=pytest.mark.full) for case in (("dapo", 1), ("trpo_vine", 1), ("trpo_vine", 3))),
    ],
)
def test_resume_is_bitwise_with_queued_rollouts(run: Run, tmp_path: Path, name: str, depth: int) -> None:
    """Stopped after its first step, resumed for one with all that is queued, and for the others."""
    run = replace(run, algorithm=trainable(name), lr=None, max_staleness=depth)
    full = train(replace(run, output=str(tmp_path / "whole"), checkpoint=CheckpointConfig(every=9)), display=False)
    pieces = tmp_path / "pieces"
    train(replace(run, output=str(pieces)), stop_after=1, display=False)
    train(resume=pieces, stop_after=1, display=False)
    train(resume=pieces, display=False)
    assert same(weights(full.output), weights(pieces))
    assert untimed(full.output / "metrics.jsonl") == untimed(pieces / "metrics.jsonl")
    assert rows(full.output / "completions.jsonl") == rows(pieces / "completions.jsonl")


@pytest.mark.full
def test_a_background_failure_fails_the_step_and_resumes(run: Run, tmp_path: Path) -> None:
    run = replace(run, max_staleness=1)
    full = train(replace(run, output=str(tmp_path / "whole")), display=False)
    for where, given in {
        "rollout": {"sampler": lambda m, t: FailingSampler(m, t, 3, OSError("no room"))},
        "update": {"learner": lambda m, r: learner_cut_short(m, r, 3)},
    }.items():
        folder = tmp_path / where
        with pytest.raises((OSError, RuntimeError), match=r"no room|out of memory"):
            train(replace(run, output=str(folder)), display=False, **given)  # type: ignore[arg-type]
        assert not [t for t in threading.enumerate() if t.name == "rollout"]
        train(resume=folder, display=False)
        assert same(weights(full.output), weights(folder))


def test_a_filter_that_needs_the_learner_is_refused(small: Run) -> None:
    with pytest.raises(ConfigError, match="staleness must be at least 0, not -1"):
        replace(small, max_staleness=-1)

    @dataclass(frozen=True)
    class Sure(pg.Filter):
        needs = frozenset({"entropy"})

        def __call__(self, batch: Batch) -> Batch:
            return batch

    with pytest.raises(
        ConfigError, match=r"reads entropy, which the learner computes during a rollout.* set max_staleness to 0"
    ):
        replace(small, max_staleness=1, algorithm=replace(pg.DR_GRPO, filters=(Sure(),)))


def values(request: RolloutRequest) -> tuple[object, ...]:
    return request.step, request.position, request.leftover_groups


def test_each_rollout_starts_where_the_last_ended() -> None:
    asked: list[tuple[object, ...]] = []

    def collect(request: RolloutRequest) -> Rollout:
        asked.append(values(request))
        return empty(request.position + 4, (request.step,))

    producer = RolloutProducer(RolloutQueue(3, (), 10, ()))
    first = producer.take(2, collect)
    assert asked == [(3, 10, ()), (4, 14, (3,))]
    assert (first.position, producer.queue.step) == (14, 4)
    assert values(producer.queue.next_request) == (5, 18, (4,))
    with producer.produce_during(1, collect):
        pass
    producer.wait_idle()
    assert len(asked) == 2  # one is there
    with producer.produce_during(3, collect):
        pass
    producer.wait_idle()
    assert asked[2:] == [(5, 18, (4,)), (6, 22, (5,))]
    assert [producer.take(1, collect).leftover_groups for _ in range(4)] == [(4,), (5,), (6,), (7,)]


def test_the_producer_samples_during_steps() -> None:
    """Two wait at most: it stops there, and goes on when one of them has been taken."""
    begun, go = Queue[int](), Queue[None]()

    def collect(request: RolloutRequest) -> Rollout:
        begun.put(request.step)
        go.get()
        return empty(request.position + 1)

    producer = RolloutProducer(RolloutQueue(1, (), 0, ()))
    for step in (1, 2, 3):
        with producer.produce_during(2, collect):
            assert begun.get() == step
            go.put(None)
            assert producer.take(1, collect).position == step  # while the next one is in the making
            assert producer.busy_seconds > 0
    for step in (4, 5):
        assert begun.get() == step
        go.put(None)
    producer.wait_idle()
    assert values(producer.queue.next_request) == (6, 5, ())
    assert begun.empty()


@pytest.mark.parametrize(("steps", "budget", "begun"), [(3, None, 3), (9, 25, 3), (2, 5, 1)])
def test_no_rollout_is_started_beyond_the_last_step(
    monkeypatch: pytest.MonkeyPatch, steps: int, budget: int | None, begun: int
) -> None:
    """Ten tokens each. Before anybody says that no more are wanted a thread looks for work, the last one taken."""
    taken, looked, asked = Queue[None](), Queue[bool](), list[int]()
    original = RolloutProducer._should_continue

    def should_continue(producer: RolloutProducer) -> bool:
        if asked:  # from the first on, it looks when what it has brought is taken
            taken.get()
        more = original(producer)
        looked.put(more)
        return more

    def collect(request: RolloutRequest) -> Rollout:
        asked.append(request.step)
        return empty(request.position + 4, tokens=10)

    monkeypatch.setattr(RolloutProducer, "_should_continue", should_continue)
    over = lambda q: q.next_request.step > steps or (budget is not None and q.num_sampled_tokens >= budget)  # noqa: E731
    producer = RolloutProducer(RolloutQueue(1, (), 0, ()), over)
    with producer.produce_during(1, collect):
        assert looked.get()
    for step in range(1, begun + 1):
        producer.take(1, collect)
        taken.put(None)
        assert looked.get() is (step < begun)
    producer.wait_idle()
    assert asked == [*range(1, begun + 1)]
    with producer.produce_during(2, collect):
        pass
    producer.wait_idle()
    assert len(asked) == begun


def test_a_finished_thread_does_not_replace_its_successor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one may begin before the one that has nothing to do any more is gone."""
    go, original = threading.Event(), RolloutProducer._should_continue

    def collect(request: RolloutRequest) -> Rollout:
        if request.step > 1:
            go.wait()
        return empty(request.position + 1)

    def should_continue(producer: RolloutProducer) -> bool:
        more = original(producer)
        if not more and len(producer.queue.rollouts) == 1:
            with producer.produce_during(2, collect):
                pass
        return more

    monkeypatch.setattr(RolloutProducer, "_should_continue", should_continue)
    producer = RolloutProducer(RolloutQueue(1, (), 0, ()))
    with producer.produce_during(1, collect):
        first = producer._thread
    assert first is not None
    first.join()
    second = producer._thread
    assert second is not None
    assert second.is_alive()
    go.set()
    producer.wait_idle()
    assert values(producer.queue.next_request) == (3, 2, ())


def test_rollouts_in_progress_are_cancelled_with_the_run() -> None:
    begun, ended = threading.Event(), threading.Event()

    def collect(*_: object) -> Rollout:
        begun.set()
        ended.wait()
        raise OSError("cancelled")

    producer = RolloutProducer(RolloutQueue(1, (), 0, ()))
    with producer.produce_during(1, collect):
        begun.wait()
    producer.stop(ended.set)
    assert not [t for t in threading.enumerate() if t.name == "rollout"]
    producer.stop(lambda: pytest.fail("there is nothing to end"))


def test_background_errors_are_raised_in_take() -> None:
    def broken(*_: object) -> Rollout:
        raise OSError("beside")

    for wait in (lambda p: p.wait_idle(), lambda p: p.take(1, broken)):
        producer = RolloutProducer(RolloutQueue(1, (), 0, ()))
        with producer.produce_during(1, broken):
            pass
        with pytest.raises(OSError, match="beside"):
            wait(producer)
    with (
        pytest.raises(ZeroDivisionError),
        RolloutProducer(RolloutQueue(1, (), 0, ())).produce_during(1, lambda *_: empty()),
    ):
        raise ZeroDivisionError
    assert not [t for t in threading.enumerate() if t.name == "rollout"]
