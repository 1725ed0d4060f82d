"""What to change where a plan does not fit: each change helps, and the last one fits unless nothing does."""

from __future__ import annotations

from itertools import pairwise

import pytest

from policygrad.planning.cost_model import AlgorithmCost, ParallelLayout, Workload
from policygrad.planning.hardware import DEVICES, Efficiency
from policygrad.planning.model_shapes import KNOWN_SHAPES
from policygrad.planning.planner import CapacityPlan, PlanRequest, suggest_changes
from policygrad.planning.render import PlanReport, list_assumptions, plan_summary, plan_tables


def plan(model: str, layout: ParallelLayout, device: str = "H100", budget: int = 3840) -> CapacityPlan:
    work = Workload(64, 8, 256, 1000, budget)
    return CapacityPlan(
        PlanRequest(
            KNOWN_SHAPES[model],
            DEVICES[device],
            work,
            AlgorithmCost("grpo", frozen_models=1, scoring_passes=1),
            Efficiency(),
        ),
        layout,
    )


def test_a_plan_that_fits_needs_none() -> None:
    result = plan("Qwen3-0.6B", ParallelLayout(8))
    assert result.fits
    assert suggest_changes(result) == []


@pytest.mark.parametrize(
    ("model", "layout", "device"),
    [
        ("Qwen3-8B", ParallelLayout(8), "H100"),
        ("Qwen3-8B", ParallelLayout(2, dtype="fp32"), "H200"),
        ("Qwen3-14B", ParallelLayout(8, samplers=4, max_staleness=1), "H100"),
        ("Qwen3-32B", ParallelLayout(8), "H100"),
        ("Llama-3.1-70B", ParallelLayout(8), "H100"),
        ("Llama-3.1-70B", ParallelLayout(16, samplers=8, max_staleness=1), "H200"),
    ],
)
def test_every_change_takes_less_and_the_last_fits(model: str, layout: ParallelLayout, device: str) -> None:
    result = plan(model, layout, device)
    ways = suggest_changes(result)
    assert not result.fits
    assert ways
    kept = [way for way in ways if not way.option.startswith("--gpus")]
    assert all(b.plan.peak_bytes < a.plan.peak_bytes for a, b in pairwise(kept))
    assert not kept or kept[0].plan.peak_bytes < result.peak_bytes
    assert all(not way.plan.fits for way in kept[:-1])
    for way in ways:
        assert way.plan.fits or way in kept


def test_in_their_order() -> None:
    ways = suggest_changes(plan("Qwen3-8B", ParallelLayout(8)))
    assert ways[0].option == "--learner.gradient-checkpointing"
    assert ways[0].plan.layout.checkpointing
    assert ways[-1].plan.fits


def test_what_does_not_fit_in_a_sampler_is_spread_over_several() -> None:
    layout = ParallelLayout(32, samplers=8, max_staleness=1, checkpointing=True, keeps_full_policy=False)
    result = plan("Llama-3.1-70B", layout, "H200")
    (way,) = suggest_changes(result)
    assert result.learner.peak_bytes < result.usable_bytes < result.peak_bytes
    assert way.option == "--tensor-parallel 2"
    assert way.plan.layout.tensor_parallel == 2
    assert way.plan.fits


@pytest.mark.parametrize(("model", "gpus"), [("Llama-3.1-70B", 64), ("Qwen3-32B", 64), ("Qwen3-32B", 16)])
def test_a_division_is_proposed_only_where_it_fits(model: str, gpus: int) -> None:
    """One sampler that held no completion was proposed here, with a step of hours."""
    result = plan(model, ParallelLayout(gpus))
    ways = suggest_changes(result)
    divided = [way for way in ways if "--samplers" in way.option]
    assert divided
    assert all(way.plan.fits and way.plan.step_seconds < 1800 for way in divided)
    assert ways[-1].plan.fits
    assert any(way.option.startswith("--sampler.engine vllm") for way in ways)


def test_where_nothing_is_enough_it_says_so() -> None:
    result = plan("Llama-3.1-70B", ParallelLayout(8))
    ways = suggest_changes(result)
    assert ways
    assert not any(way.plan.fits for way in ways)  # the policy whole is more than an H100 has
    report = next(
        table
        for table in plan_tables(PlanReport(result, [result], ways, 1000, None))
        if table.title == "What to change"
    )
    assert "None of these is enough" in report.note
    assert "It does not fit" in plan_summary(result, 1000, None)
    assert any("keeps the full policy" in text for text in list_assumptions(result))
