"""docs/large-runs.md and docs/results/published.toml: what others published beside the plan, and its constants."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import plan_published
import pytest
from plan_published import ALLOWED, Figure, compare_runs, list_measured, list_sources, load_misses, load_runs

from pages import published
from policygrad.planning.hardware import Efficiency

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "large-runs.md").read_text(encoding="utf-8")
RUNS = load_runs()
FIGURES = compare_runs(RUNS)


def test_every_run_says_where_it_is_from_and_what_was_measured() -> None:
    sources = list_sources()
    assert len({run.name for run in RUNS}) == len(RUNS)
    assert {run.source for run in RUNS} == set(sources)
    for run in RUNS:
        plan_published.find_shape(run.model)
        plan_published.find_device(run.device)
        assert list(list_measured(run)), run.name
        assert all(value > 0 for _, value in list_measured(run)), run.name
    for source in sources.values():
        assert "url" in source or re.fullmatch(r"[0-9a-f]{40}", source["commit"])


def test_halves_alternate_by_name_within_a_kind() -> None:
    for kind in {run.kind for run in RUNS}:
        of_kind = [run for run in RUNS if run.kind == kind]
        assert [run.name for run in of_kind] == sorted(run.name for run in of_kind)
        assert [run.is_judged for run in of_kind] == [place % 2 == 1 for place in range(len(of_kind))]


def test_the_judged_half_is_as_the_page_says() -> None:
    judged = [figure for figure in FIGURES if figure.run.is_judged]
    assert f"{published.count_within(judged)} are within" in PAGE
    assert len(judged) >= 60
    for kind, share in {"memory": 0.7, "learning": 0.8, "sampling": 0.8, "publishing": 0.8, "step": 0.8}.items():
        of_kind = [figure for figure in judged if figure.kind == kind]
        assert sum(figure.is_within for figure in of_kind) >= share * len(of_kind), kind
    assert published.summary_block() in PAGE
    assert all(figure.ratio < 1 for figure in judged if figure.kind == "step")  # as the page says


def test_every_figure_that_is_missed_has_one_reason_and_no_reason_is_left_over() -> None:
    misses = load_misses()
    for figure in FIGURES:
        if not figure.is_within:
            assert sum(miss.explains(figure) for miss in misses) == 1, (figure.run.name, figure.kind)
    for miss in misses:
        assert any(miss.explains(figure) and not figure.is_within for figure in FIGURES), miss
        for name in miss.runs:
            assert any(run.name.startswith(name) for run in RUNS), name


def test_a_ratio_is_the_plan_over_the_measurement() -> None:
    figure = Figure(RUNS[0], "memory", measured=40.0, planned=50.0)
    assert figure.ratio == 1.25
    assert figure.is_within
    assert not replace(figure, planned=50.5).is_within
    assert replace(figure, kind="step", planned=53.9).is_within
    assert set(ALLOWED) == set(published.TITLES)


def test_rates_become_seconds_and_what_is_written_between_steps_is_publication() -> None:
    run = next(run for run in RUNS if run.name == "prime-rl, RL, Qwen3-0.6B, 1 × H100, 16,384")
    measured = dict(list_measured(run))
    assert measured["learning"] == run.measured["step_seconds"]
    assert measured["publishing"] == pytest.approx(2 * 16384 / run.measured["tokens_per_second"] - measured["learning"])
    rate = replace(run, measured={"tokens_per_second_per_gpu": 8192.0}, gpus=2)
    assert dict(list_measured(rate)) == {"learning": 2.0}


def test_a_constant_is_fitted_to_the_half_that_is_not_judged() -> None:
    """Storage alone, which is quick."""
    fit = next(fit for fit in plan_published.FITS if fit.names == ("storage",))
    learners = [
        run for run in RUNS if run.kind == "learner" and any(kind == "publishing" for kind, _ in list_measured(run))
    ]
    fitted = [run for run in learners if not run.is_judged]
    assert plan_published.search(fit, fitted, {}) == {"storage": Efficiency().storage}


@pytest.mark.full
def test_the_plans_constants_are_those_that_fit_best() -> None:
    for name, value in plan_published.fit_constants(RUNS).items():
        now = plan_published.find_device("A100").utilisation if name == "utilisation" else getattr(Efficiency(), name)
        assert now == pytest.approx(value), name


def test_large_runs_are_on_the_page() -> None:
    assert published.dense_block() in PAGE
    assert published.experts_block() in PAGE
    first, shared, *_ = (run.plan for run in published.EXPERT_RUNS)
    assert not first.fits
    assert not shared.fits
    assert published.EXPERT_RUNS[2].plan.fits
    dense, experts = published.DENSE_RUNS[1].plan, published.EXPERT_RUNS[2].plan
    assert dense.fits
    longest = max(dense.request.workload.lengths) * dense.time_model.sampler_speed(dense.request.workload).fixed
    assert longest > dense.step_times.generation / 2
    assert published.DENSE_RUNS[2].plan.step_times.publishing < dense.step_times.publishing / 2
    assert experts.step_times.publishing > experts.step_seconds / 2
    assert experts.mfu < 0.01
