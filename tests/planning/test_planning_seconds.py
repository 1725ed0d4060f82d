"""Seconds of a plan: operations by hand and by enumeration, and what can never be."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policygrad.errors import ConfigError
from policygrad.planning.cost_model import Asks, Clock, Layout, Tokens, Work
from policygrad.planning.hardware import DEVICES, Reached, fleet
from policygrad.planning.model_shapes import NAMED, Shape
from policygrad.planning.planner import Plan, Question, best, counts, curve, splits

H100 = DEVICES["H100"]
SMALL = Shape("small", 4, 8, layers=2, heads=2, kv_heads=1, head_dim=2, vocabulary=10)
ONE = Reached(learning=1, scoring=1, drawing=1, layer=0, link=1, reduce=0)


def question(model: str = "Qwen3-8B", work: Work | None = None, asks: Asks | None = None) -> Question:
    return Question(NAMED[model], H100, work or Work(64, 8, 256, 1000, 3840), asks or Asks("grpo"), Reached())


def test_tokens_by_hand() -> None:
    work = Work(prompts=2, samples=2, prompt=3, completion=5, budget=5)
    assert work.lengths == (5, 5, 5, 5)
    assert work.tokens() == Tokens(2 * 3 + 4 * 4, 2 * 6 + 16 * 3 + 4 * 10, 2 + 16)
    assert work.tokens(shared=False) == Tokens(4 * 3 + 4 * 4, 4 * 6 + 16 * 3 + 4 * 10, 4 + 16)
    assert work.seen == 3 + 2.5


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 6), st.floats(1, 9), st.booleans())
def test_pairs_are_those_that_attention_sees(
    prompts: int, samples: int, prompt: int, mean: float, shared: bool
) -> None:
    work = Work(prompts, samples, prompt, mean, 9)
    found = nodes = 0
    for i, length in enumerate(work.lengths):
        first = 0 if not shared or i < prompts else prompt  # one completion of each prompt computes it
        for place in range(first, prompt + length - 1):
            nodes += 1
            found += place + 1
    assert work.tokens(shared).nodes == nodes
    assert work.tokens(shared).pairs == found


@given(st.floats(1, 4000), st.integers(500, 3000))
def test_lengths_have_the_mean_that_was_asked_for(mean: float, count: int) -> None:
    work = Work(count, 1, 1, mean, 4000)
    assert all(1 <= n <= 4000 for n in work.lengths)
    assert work.sampled / count == pytest.approx(mean, rel=0.03, abs=1)


def test_lengths_are_mixed() -> None:
    lengths = Work(256, 8, 1, 800, 4000).lengths
    shares = [sum(lengths[i::8]) for i in range(8)]
    assert max(shares) < 1.2 * min(shares)


def test_operations_and_bytes_by_hand() -> None:
    clock = Clock(SMALL, H100, ONE, Layout(1, dtype="fp32"))
    tokens = Tokens(22, 100, 18)
    assert clock.operations(tokens, 1, 1) == 2 * (2 * 144 * 22 + 4 * 4 * 100) + 2 * 40 * 18
    assert clock.moved(tokens, 1, 1) == 2 * (20 * 4 + 8 * 8 + 5 * 8) * 4 * 22 + 20 * 10 * 18
    forward = clock.operations(tokens, 1, 1) / 67e12 + clock.moved(tokens, 1, 1) / 3.35e12
    assert clock.scored(tokens) == pytest.approx(forward)
    assert clock.learned(tokens, Asks()) == pytest.approx(3 * forward)
    again = replace(clock, layout=replace(clock.layout, checkpointing=True)).learned(tokens, Asks(head_twice=True))
    assert again == pytest.approx(4 * forward)


def test_six_operations_per_parameter_and_token() -> None:
    """The usual estimate, where attention and embeddings are small."""
    clock = Clock(NAMED["Llama-3.1-70B"], H100, ONE, Layout(1))
    tokens = Work(1, 1, 1, 500, 500).tokens()
    assert clock.operations(tokens, 3, 3) == pytest.approx(6 * 70.55e9 * 500, rel=0.02)


def test_drawing_by_hand() -> None:
    work = Work(prompts=2, samples=2, prompt=3, completion=5, budget=5)
    speed = Clock(SMALL, H100, replace(ONE, layer=1.0), Layout(2, dtype="fp32")).sampler(work)
    assert speed.slots == 2  # four completions, two samplers
    assert speed.fixed == pytest.approx((2 * 144 + 40) * 4 / 3.35e12 + 2)
    operations = 2 * (2 * 144 + 4 * 4 * 5.5) + 2 * 40
    assert speed.each == pytest.approx((5.5 * 8 * 4 + 24 * 10) / 3.35e12 + operations / 67e12)
    assert Clock(SMALL, H100, replace(ONE, layer=1.0), Layout(2, dtype="fp32")).generation(work) == pytest.approx(
        speed.start + 5 * (speed.fixed + 2 * speed.each)
    )


@given(st.sampled_from(["bandwidth", "bf16", "link", "network"]), st.integers(0, 4), st.booleans())
def test_a_better_device_is_never_slower(figure: str, power: int, apart: bool) -> None:
    gpus = 2 ** (power + 1)
    layout = Layout(gpus, samplers=gpus // 2 if apart else 0, staleness=int(apart))
    slow = question()
    fast = replace(slow, device=replace(H100, **{figure: 2 * getattr(H100, figure)}))
    assert Plan(fast, layout).step <= Plan(slow, layout).step * (1 + 1e-9)
    if figure == "bandwidth":
        assert Plan(fast, layout).phases.generation < Plan(slow, layout).phases.generation


@given(st.integers(0, 3), st.integers(0, 3), st.integers(1, 3))
def test_what_is_asked_for_takes_time(scores: int, updates: int, epochs: int) -> None:
    asks = Asks(scores=scores, updates=epochs * 2**updates, epochs=epochs)
    found = Plan(question(asks=asks), Layout(8)).phases
    assert found.scoring == pytest.approx(scores * Plan(question(asks=Asks(scores=1)), Layout(8)).phases.scoring)
    assert found.learning >= epochs * Plan(question(), Layout(8)).phases.learning * (1 - 1e-9)


def test_checkpointing_takes_a_pass_more() -> None:
    plain, again = (Plan(question(), Layout(8, checkpointing=c)).phases.learning for c in (False, True))
    assert 1.2 < again / plain < 1.34


def test_in_turns_a_step_is_the_sum_and_apart_the_longer() -> None:
    alone = Plan(question(), Layout(8))
    assert alone.timeline is None
    assert alone.step == alone.phases.whole
    apart = Plan(question(), Layout(8, samplers=4, staleness=1))
    found = apart.phases
    assert apart.step == pytest.approx(max(found.generation, found.update) + found.publishing, rel=0.05)
    lock = Plan(question(), Layout(8, samplers=4))
    assert lock.step == pytest.approx(found.whole - found.scoring + lock.phases.scoring, rel=0.01)


def test_samples_that_are_behind_are_read_once_more() -> None:
    asks = Asks(behind=1)
    assert Plan(question(asks=asks), Layout(8, samplers=4)).phases.scoring == 0
    behind = Plan(question(asks=asks), Layout(8, samplers=4, staleness=1)).phases
    assert behind.scoring > 0
    assert behind.learning > Plan(question(asks=asks), Layout(8, samplers=4)).phases.learning  # logits once more


def test_the_best_division_is_the_fastest_that_fits() -> None:
    asked, layout = question("Qwen3-1.7B"), Layout(16, samplers=1, staleness=1)
    found = best(asked, layout)
    every = [Plan(asked, replace(layout, samplers=n)) for n in range(1, 16)]
    assert found.fits
    assert found.step == min(plan.step for plan in every if plan.fits)
    assert found.layout.samplers == next(p.layout.samplers for p in every if p.step == found.step)


def test_divisions_are_of_whole_samplers_and_few() -> None:
    assert splits(4, 1) == [1, 2, 3]
    assert splits(8, 4) == [4]
    assert splits(1, 1) == []
    many = splits(256, 8)
    assert len(many) <= 16
    assert all(n % 8 == 0 and 0 < n < 256 for n in many)
    with pytest.raises(ConfigError, match="at least 2 devices, not 1"):
        best(question(), Layout(1, staleness=1))


def test_over_numbers_of_devices() -> None:
    assert counts(6) == [1, 2, 4, 6, 8, 16]
    assert counts(8) == [1, 2, 4, 8, 16, 32]
    turns = curve(question(), Layout(8), counts(8))
    assert [plan.layout.gpus for plan in turns] == counts(8)
    steps = [plan.step for plan in turns]
    assert steps == sorted(steps, reverse=True)
    apart = curve(question(), Layout(8, samplers=2, tensor=2, staleness=1), counts(8))
    assert [plan.layout.gpus for plan in apart] == [4, 8, 16, 32]
    assert all(plan.layout.samplers % 2 == 0 for plan in apart)


def test_hours_and_shares() -> None:
    plan = Plan(question(), Layout(8))
    assert plan.hours(1000) == pytest.approx(8 * plan.step * 1000 / 3600)
    told = plan.as_dict(1000, 3.0)
    assert told["cost"] == pytest.approx(3 * plan.hours(1000))
    assert told["seconds"]["step"] == plan.step
    assert 0 < plan.mfu < 0.5
    assert plan.tokens_per_second == plan.question.work.sampled / plan.step


def test_devices_by_name() -> None:
    assert fleet("h200:64") == (DEVICES["H200"], 64)
    assert fleet("A100-80GB:8") == (DEVICES["A100"], 8)
    assert fleet("cpu") == (DEVICES["cpu"], 1)
    mine = replace(H100, name="L40S")
    assert fleet("l40s:2", mine) == (mine, 2)
    with pytest.raises(ConfigError, match="did you mean H200"):
        fleet("H20:8")
    with pytest.raises(ConfigError, match="there are A100, H100"):
        fleet("MI300X:8")
    for wrong in ("H100:0", "H100:", ":8", "H100:x"):
        with pytest.raises(ConfigError, match="a device and how many"):
            fleet(wrong)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"gpus": 0}, "--gpus must be at least 1"),
        ({"gpus": 4, "samplers": 4}, "leave none to learn: give at most 3"),
        ({"gpus": 4, "samplers": 3, "tensor": 2}, "does not divide the 3 devices"),
        ({"gpus": 1, "dtype": "fp8"}, "one of bf16, fp32"),
        ({"gpus": 1, "staleness": -1}, "at least 0"),
        ({"gpus": 1, "micro_tokens": 0}, "--micro-tokens must be at least 1"),
    ],
)
def test_layouts_that_cannot_be(values: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Layout(**values)  # type: ignore[arg-type]


def test_work_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="more than the 10 that one may have"):
        Work(1, 1, 1, 11, 10)
    with pytest.raises(ConfigError, match="prompts must be at least 1"):
        Work(0, 1, 1, 1, 10)
