"""Seconds of a plan: operations by hand and by enumeration, and what can never be."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policygrad.errors import ConfigError
from policygrad.planning.cost_model import AlgorithmCost, ParallelLayout, TokenCounts, Workload
from policygrad.planning.hardware import DEVICES, Efficiency, parse_devices
from policygrad.planning.model_shapes import KNOWN_SHAPES
from policygrad.planning.planner import (
    CapacityPlan,
    PlanRequest,
    device_counts,
    device_splits,
    find_best_split,
    plan_device_counts,
)
from policygrad.planning.shapes import DenseShape
from policygrad.planning.time_model import SamplerSpeed, TimeModel

H100 = DEVICES["H100"]
SMALL = DenseShape("small", 4, 8, layers=2, heads=2, kv_heads=1, head_dim=2, vocabulary=10)
ONE = Efficiency(training=1, scoring=1, sampling=1, layer_overhead=0, link=1, allreduce=0)


def question(model: str = "Qwen3-8B", work: Workload | None = None, asks: AlgorithmCost | None = None) -> PlanRequest:
    return PlanRequest(
        KNOWN_SHAPES[model], H100, work or Workload(64, 8, 256, 1000, 3840), asks or AlgorithmCost("grpo"), Efficiency()
    )


def test_tokens_by_hand() -> None:
    work = Workload(prompts=2, samples_per_prompt=2, prompt_tokens=3, completion_tokens=5, max_completion_tokens=5)
    assert work.lengths == (5, 5, 5, 5)
    assert work.count_tokens() == TokenCounts(2 * 3 + 4 * 4, 2 * 6 + 16 * 3 + 4 * 10, 2 + 16)
    assert work.count_tokens(shares_prompts=False) == TokenCounts(4 * 3 + 4 * 4, 4 * 6 + 16 * 3 + 4 * 10, 4 + 16)
    assert work.mean_attended_tokens == 3 + 2.5


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 6), st.floats(1, 9), st.booleans())
def test_pairs_are_those_that_attention_sees(
    prompts: int, samples: int, prompt: int, mean: float, shared: bool
) -> None:
    work = Workload(prompts, samples, prompt, mean, 9)
    result = nodes = 0
    for i, length in enumerate(work.lengths):
        first = 0 if not shared or i < prompts else prompt  # one completion of each prompt computes it
        for place in range(first, prompt + length - 1):
            nodes += 1
            result += place + 1
    assert work.count_tokens(shared).layer_tokens == nodes
    assert work.count_tokens(shared).attention_pairs == result


@given(st.floats(1, 4000), st.integers(500, 3000))
def test_lengths_have_the_mean_that_was_asked_for(mean: float, count: int) -> None:
    work = Workload(count, 1, 1, mean, 4000)
    assert all(1 <= n <= 4000 for n in work.lengths)
    assert work.sampled_tokens / count == pytest.approx(mean, rel=0.03, abs=1)


def test_lengths_are_mixed() -> None:
    lengths = Workload(256, 8, 1, 800, 4000).lengths
    shares = [sum(lengths[i::8]) for i in range(8)]
    assert max(shares) < 1.2 * min(shares)


def test_operations_and_bytes_by_hand() -> None:
    clock = TimeModel(SMALL, H100, ONE, ParallelLayout(1, dtype="fp32"))
    tokens = TokenCounts(22, 100, 18)
    assert clock.operations(tokens, 1, 1) == 2 * (2 * 144 * 22 + 4 * 4 * 100) + 2 * 40 * 18
    assert clock.bytes_moved(tokens, 1, 1) == 2 * (20 * 4 + 8 * 8 + 5 * 8) * 4 * 22 + 20 * 10 * 18
    forward = clock.operations(tokens, 1, 1) / 67e12 + clock.bytes_moved(tokens, 1, 1) / 3.35e12
    assert clock.scoring_seconds(tokens) == pytest.approx(forward)
    assert clock.training_seconds(tokens, AlgorithmCost()) == pytest.approx(3 * forward)
    second = replace(clock, layout=replace(clock.layout, checkpointing=True)).training_seconds(
        tokens, AlgorithmCost(recomputes_head=True)
    )
    assert second == pytest.approx(4 * forward)


def test_six_operations_per_parameter_and_token() -> None:
    """The usual estimate, where attention and embeddings are small."""
    clock = TimeModel(KNOWN_SHAPES["Llama-3.1-70B"], H100, ONE, ParallelLayout(1))
    tokens = Workload(1, 1, 1, 500, 500).count_tokens()
    assert clock.operations(tokens, 3, 3) == pytest.approx(6 * 70.55e9 * 500, rel=0.02)


def test_drawing_by_hand() -> None:
    work = Workload(prompts=2, samples_per_prompt=2, prompt_tokens=3, completion_tokens=5, max_completion_tokens=5)
    speed = TimeModel(SMALL, H100, replace(ONE, layer_overhead=1.0), ParallelLayout(2, dtype="fp32")).sampler_speed(
        work
    )
    assert speed.max_concurrency == 2  # four completions, two samplers
    assert speed.fixed == pytest.approx((2 * 144 + 40) * 4 / 3.35e12 + 2)
    operations = 2 * (2 * 144 + 4 * 4 * 5.5) + 2 * 40
    assert speed.per_completion == pytest.approx((5.5 * 8 * 4 + 24 * 10) / 3.35e12 + operations / 67e12)
    assert TimeModel(SMALL, H100, replace(ONE, layer_overhead=1.0), ParallelLayout(2, dtype="fp32")).sampling_seconds(
        work
    ) == pytest.approx(speed.startup + 5 * (speed.fixed + 2 * speed.per_completion))


def test_a_completion_that_ends_makes_room_for_the_next() -> None:
    speed = SamplerSpeed(fixed=1.0, per_completion=0.5, max_concurrency=2, startup=3.0)
    # 4 and 1 together for one token (2 s), then the other three tokens of 4 beside 3 (3 · 2 s)
    assert speed([4, 1, 3]) == 3.0 + 2.0 + 6.0
    assert speed([4, 3, 1]) == 3.0 + 3 * 2.0 + 2.0
    assert speed([0, 0]) == 3.0
    assert SamplerSpeed(1.0, 0.5, 1, 3.0)([4, 1, 3]) == 3.0 + 8 * 1.5
    for count, waves in ((1, 1), (4, 1), (5, 2), (8, 2), (9, 3)):
        assert SamplerSpeed(1.0, 0.0, 4)([6] * count) == 6.0 * waves


@given(st.lists(st.integers(0, 20), min_size=1, max_size=12), st.integers(1, 8), st.floats(0.25, 8), st.floats(0.25, 8))
def test_concurrency_saves_rounds_and_no_tokens(lengths: list[int], limit: int, fixed: float, each: float) -> None:
    """Each token costs the same at any concurrency. There are at least as many rounds as the longest completion has tokens and as
    a full server takes, and at most as many as both together (Graham 1969)."""
    assert SamplerSpeed(0.0, each, limit)(lengths) == pytest.approx(each * sum(lengths))
    rounds = SamplerSpeed(1.0, 0.0, limit)(lengths)
    assert max(max(lengths), sum(lengths) / limit) <= rounds + 1e-9
    assert rounds <= max(lengths) + sum(lengths) / limit + 1e-9
    assert SamplerSpeed(fixed, each, limit, 2.0)(lengths) == pytest.approx(2.0 + fixed * rounds + each * sum(lengths))


@given(st.sampled_from(["bandwidth", "bf16", "link", "network"]), st.integers(0, 4), st.booleans())
def test_a_better_device_is_never_slower(figure: str, power: int, apart: bool) -> None:
    gpus = 2 ** (power + 1)
    layout = ParallelLayout(gpus, samplers=gpus // 2 if apart else 0, max_staleness=int(apart))
    slow = question()
    fast = replace(slow, device=replace(H100, **{figure: 2 * getattr(H100, figure)}))
    assert CapacityPlan(fast, layout).step_seconds <= CapacityPlan(slow, layout).step_seconds * (1 + 1e-9)
    if figure == "bandwidth":
        assert CapacityPlan(fast, layout).step_times.generation < CapacityPlan(slow, layout).step_times.generation


@given(st.integers(0, 3), st.integers(0, 3), st.integers(1, 3))
def test_what_is_asked_for_takes_time(scores: int, updates: int, epochs: int) -> None:
    asks = AlgorithmCost(scoring_passes=scores, updates=epochs * 2**updates, epochs=epochs)
    result = CapacityPlan(question(asks=asks), ParallelLayout(8)).step_times
    assert result.scoring == pytest.approx(
        scores * CapacityPlan(question(asks=AlgorithmCost(scoring_passes=1)), ParallelLayout(8)).step_times.scoring
    )
    assert result.learning >= epochs * CapacityPlan(question(), ParallelLayout(8)).step_times.learning * (1 - 1e-9)


def test_weights_go_through_a_folder_or_to_each_sampler_by_itself() -> None:
    reached = Efficiency(link=0.5, storage=4e9, broadcast=10e9)
    near, far = (ParallelLayout(n, samplers=n // 2, weight_transport="nccl") for n in (8, 64))

    def seconds(layout: ParallelLayout) -> float:
        return TimeModel(SMALL, H100, reached, layout).sending_seconds(100e9)

    assert seconds(replace(near, weight_transport="folder")) == pytest.approx(2 * 100 / 4)
    assert seconds(near) == pytest.approx(4 * 100 / (450 / 2))
    assert seconds(replace(far, tensor_parallel=32)) == pytest.approx(100 / 10)
    assert seconds(far) == pytest.approx(32 * 100 / (50 / 2))  # as much as the network carries


def test_weights_of_experts_are_not_gathered_ahead() -> None:
    """A mixture waits for the links as long as a dense model would if nothing overlapped, times the fraction that experts are."""
    asked, layout = question("Qwen3-30B-A3B"), ParallelLayout(8, keeps_full_policy=False)
    plan = CapacityPlan(asked, layout)
    instant = CapacityPlan(replace(asked, device=replace(H100, link=1e18)), layout)
    size = asked.shape.parameters * 2
    assert 0.9 < asked.shape.routed_parameters / asked.shape.parameters < 1
    batches = -(-asked.workload.count_tokens().layer_tokens // 8 // layout.micro_tokens)
    links = (
        (2 * size + 2 * size) / H100.link / Efficiency().link * batches
    )  # two gathers, and gradients of twice the bytes
    waited = plan.step_times.learning - instant.step_times.learning
    assert waited == pytest.approx(links * asked.shape.routed_parameters / asked.shape.parameters)
    assert question().shape.routed_parameters == 0


def test_an_engine_has_an_overhead_of_its_own_and_loads_weights_before_it_wakes() -> None:
    reached = replace(
        ONE, engine_sampling=0.5, engine_overhead=2.0, layer_overhead=1.0, engine_load=10.0, allreduce_network=3.0
    )
    own = TimeModel(SMALL, H100, reached, ParallelLayout(1, dtype="fp32"))
    engine = replace(own, layout=replace(own.layout, keeps_full_policy=False))
    wide = replace(own, layout=ParallelLayout(16, dtype="fp32", keeps_full_policy=False, tensor_parallel=16))
    work = Workload(1, 1, 3, 5, 5)
    weights = (2 * 144 + 40) * 4 / 3.35e12
    assert own.sampler_speed(work).fixed == pytest.approx(weights + 2 * 1.0)
    assert engine.sampler_speed(work).fixed == pytest.approx(2 * weights + 2 * 2.0)
    assert wide.sampler_speed(work).fixed == pytest.approx(2 * weights / 16 + 2 * (2.0 + 2 * 3.0))
    assert engine.step_times(work, AlgorithmCost()).publishing == pytest.approx(SMALL.parameters * 4 / 10)
    assert own.step_times(work, AlgorithmCost()).publishing == 0


def test_a_device_may_come_closer_to_its_peak_than_others() -> None:
    tokens = TokenCounts(22, 100, 18)
    clock = TimeModel(SMALL, H100, Efficiency(), ParallelLayout(1, dtype="fp32"))
    closer = replace(clock, device=replace(H100, utilisation=1.5))
    assert closer.training_seconds(tokens, AlgorithmCost()) == pytest.approx(
        clock.training_seconds(tokens, AlgorithmCost()) / 1.5
    )
    assert closer.scoring_seconds(tokens) == pytest.approx(clock.scoring_seconds(tokens) / 1.5)


def test_checkpointing_takes_a_pass_more() -> None:
    plain, second = (
        CapacityPlan(question(), ParallelLayout(8, checkpointing=c)).step_times.learning for c in (False, True)
    )
    assert 1.2 < second / plain < 1.34


def test_alternating_phases_add_up_and_overlapping_ones_take_the_longer() -> None:
    alternating = CapacityPlan(question(), ParallelLayout(8))
    assert alternating.idle_fractions is None
    assert alternating.step_seconds == alternating.step_times.total
    ahead = CapacityPlan(question(), ParallelLayout(8, samplers=4, max_staleness=1))
    times = ahead.step_times
    assert times.generation > times.update
    assert ahead.step_seconds == times.generation + times.publishing
    assert ahead.idle_fractions == pytest.approx(
        {
            "learner": (times.generation - times.update) / ahead.step_seconds,
            "sampler": times.publishing / ahead.step_seconds,
        }
    )
    lock = CapacityPlan(question(), ParallelLayout(8, samplers=4))
    assert lock.step_seconds == pytest.approx(times.total - times.scoring + lock.step_times.scoring)
    assert lock.idle_fractions is not None
    assert sum(lock.idle_fractions.values()) == pytest.approx(1)  # one of them waits at any time


def test_samples_that_are_behind_are_read_once_more() -> None:
    asks = AlgorithmCost(stale_scoring_passes=1)
    assert CapacityPlan(question(asks=asks), ParallelLayout(8, samplers=4)).step_times.scoring == 0
    behind = CapacityPlan(question(asks=asks), ParallelLayout(8, samplers=4, max_staleness=1)).step_times
    assert behind.scoring > 0
    assert (
        behind.learning > CapacityPlan(question(asks=asks), ParallelLayout(8, samplers=4)).step_times.learning
    )  # logits once more


def test_the_best_division_is_the_fastest_that_fits() -> None:
    asked, layout = question("Qwen3-1.7B"), ParallelLayout(16, samplers=1, max_staleness=1)
    result = find_best_split(asked, layout)
    every = [CapacityPlan(asked, replace(layout, samplers=n)) for n in range(1, 16)]
    assert result.fits
    assert result.step_seconds == min(plan.step_seconds for plan in every if plan.fits)
    assert result.layout.samplers == next(p.layout.samplers for p in every if p.step_seconds == result.step_seconds)


def test_divisions_are_of_whole_samplers_and_few() -> None:
    assert device_splits(4, 1) == [1, 2, 3]
    assert device_splits(8, 4) == [4]
    assert device_splits(1, 1) == []
    many = device_splits(256, 8)
    assert len(many) <= 16
    assert all(n % 8 == 0 and 0 < n < 256 for n in many)
    with pytest.raises(ConfigError, match="at least 2 devices, not 1"):
        find_best_split(question(), ParallelLayout(1, max_staleness=1))


def test_over_numbers_of_devices() -> None:
    assert device_counts(6) == [1, 2, 4, 6, 8, 16]
    assert device_counts(8) == [1, 2, 4, 8, 16, 32]
    turns = plan_device_counts(question(), ParallelLayout(8), device_counts(8))
    assert [plan.layout.gpus for plan in turns] == device_counts(8)
    steps = [plan.step_seconds for plan in turns]
    assert steps == sorted(steps, reverse=True)
    apart = plan_device_counts(
        question(), ParallelLayout(8, samplers=2, tensor_parallel=2, max_staleness=1), device_counts(8)
    )
    assert [plan.layout.gpus for plan in apart] == [4, 8, 16, 32]
    assert all(plan.layout.samplers % 2 == 0 for plan in apart)


def test_hours_and_shares() -> None:
    plan = CapacityPlan(question(), ParallelLayout(8))
    assert plan.device_hours(1000) == pytest.approx(8 * plan.step_seconds * 1000 / 3600)
    report = plan.to_dict(1000, 3.0)
    assert report["cost"] == pytest.approx(3 * plan.device_hours(1000))
    assert report["seconds"]["step"] == plan.step_seconds
    assert 0 < plan.mfu < 0.5
    assert plan.tokens_per_second == plan.request.workload.sampled_tokens / plan.step_seconds


def test_devices_by_name() -> None:
    assert parse_devices("h200:64") == (DEVICES["H200"], 64)
    assert parse_devices("A100-80GB:8") == (DEVICES["A100"], 8)
    assert parse_devices("cpu") == (DEVICES["cpu"], 1)
    assert parse_devices("rtx 4090") == (DEVICES["RTX-4090"], 1)
    assert parse_devices("RTX-PRO-6000-Blackwell:8") == (DEVICES["RTX-PRO-6000"], 8)
    mine = replace(H100, name="Mine")
    assert parse_devices("mine:2", mine) == (mine, 2)
    with pytest.raises(ConfigError, match="did you mean H200"):
        parse_devices("H20:8")
    with pytest.raises(ConfigError, match="available: H100, H200"):
        parse_devices("Gaudi:8")
    for wrong in ("H100:0", "H100:", ":8", "H100:x"):
        with pytest.raises(ConfigError, match="a device and a count"):
            parse_devices(wrong)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"gpus": 0}, "--gpus must be at least 1"),
        ({"gpus": 4, "samplers": 4}, "leaves none to learn. Use at most 3"),
        ({"gpus": 4, "samplers": 3, "tensor_parallel": 2}, "does not divide the 3 sampling devices"),
        ({"gpus": 1, "dtype": "fp8"}, "one of bf16, fp32"),
        ({"gpus": 1, "max_staleness": -1}, "at least 0"),
        ({"gpus": 1, "micro_tokens": 0}, "--learner.micro-tokens must be at least 1"),
    ],
)
def test_layouts_that_cannot_be(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ParallelLayout(**values)  # type: ignore[arg-type]


def test_work_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="more than the maximum of 10"):
        Workload(1, 1, 1, 11, 10)
    with pytest.raises(ConfigError, match="prompts must be at least 1"):
        Workload(0, 1, 1, 1, 10)
