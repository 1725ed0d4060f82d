"""Which runs are one series, what their labels say, and what a point of a curve is the mean of."""

from __future__ import annotations

from pathlib import Path

from doubles.runs import run_folder
from policygrad.report.data import build_curves, compute_cost, group_runs, read_run


def test_runs_that_differ_by_seed_are_one_series_and_others_name_the_difference(tmp_path: Path) -> None:
    steps = [(1, {"reward": 0.5})]
    made = [
        run_folder(tmp_path / "a", steps, seed=0),
        run_folder(tmp_path / "b", steps, seed=1, lr=0.2),
        run_folder(tmp_path / "c", steps, seed=1),
        run_folder(tmp_path / "d", steps, name="gspo"),
    ]
    result = group_runs([read_run(folder) for folder in made])
    assert [group.label for group in result] == ["dapo lr=0.1", "dapo lr=0.2", "gspo"]
    assert [group.label for group in group_runs([read_run(folder) for folder in made[:2]])] == ["lr=0.1", "lr=0.2"]
    assert [run.folder.name for run in result[0].runs] == ["a", "c"]


def test_a_point_is_the_mean_over_runs_and_the_band_their_range(tmp_path: Path) -> None:
    a = run_folder(tmp_path / "a", [(0, {"eval/reward": 0.0}), (1, {"reward": 1.0}), (2, {"reward": 4.0})], seed=0)
    b = run_folder(tmp_path / "b", [(1, {"reward": 3.0})], seed=1)
    c = run_folder(tmp_path / "c", [(2, {"reward": 7.0})], name="gspo")
    series = group_runs([read_run(folder) for folder in (a, b, c)])
    both = {"value": [2.0, 4.0], "low": [1.0, 4.0], "high": [3.0, 4.0]}
    assert build_curves(series, "reward") == {"x": [1, 2], "lines": [both, {"value": [None, 7.0]}], "per": 1}
    assert build_curves(series, "eval/reward") == {"x": [0], "lines": [{"value": [0.0]}, None], "per": 1}


def test_the_band_of_one_run_is_the_interval_of_its_evaluation(tmp_path: Path) -> None:
    held = [(step, {"eval/reward": 0.5, "eval/reward_stderr": 0.1}) for step in (0, 4)]
    plot = build_curves(group_runs([read_run(run_folder(tmp_path / "a", held))]), "eval/reward")
    assert plot["error"]
    assert plot["lines"] == [{"value": [0.5, 0.5], "low": [0.304, 0.304], "high": [0.696, 0.696]}]


def test_long_curves_are_thinned_and_keep_their_extremes(tmp_path: Path) -> None:
    """10 steps in at most 4 points are 3 to a point: 1 2 3, 4 5 6, 7 8 9, 10."""
    folder = run_folder(tmp_path / "a", [(step, {"reward": float(step)}) for step in range(1, 11)])
    plot = build_curves(group_runs([read_run(folder)]), "reward", most=4)
    assert plot["per"] == 3
    assert plot["x"] == [3, 6, 9, 10]
    assert plot["lines"] == [
        {"value": [2.0, 5.0, 8.0, 10.0], "low": [1.0, 4.0, 7.0, 10.0], "high": [3.0, 6.0, 9.0, 10.0]}
    ]


def test_costs_are_sums_over_steps_and_means_over_runs(tmp_path: Path) -> None:
    metrics = {"tokens/sampled": 1000.0, "completions/sampled": 30.0, "completions/trained": 20.0}
    metrics |= {"tokens/offered": 400.0, "tokens/computed": 300.0}
    metrics |= {"completions/offered": 20.0, "completions/computed": 15.0, "time/rollout": 3.0, "time/update": 1.0}
    a = run_folder(tmp_path / "a", [(1, metrics), (2, metrics)], seed=0)
    b = run_folder(tmp_path / "b", [(1, metrics)], seed=1)
    (group,) = group_runs([read_run(folder) for folder in (a, b)])
    result = compute_cost(group)
    assert ("tokens/sampled", "tokens sampled", "1.5k") in result.sums
    assert [(took, share) for _, took, share in result.times] == [("3 s", 0.75), ("1 s", 0.25)]
    assert result.notes[0].startswith("1.50 completions were sampled")
    assert result.notes[1].startswith("25% of the forward and backward passes were skipped")
    assert result.notes[2].startswith("25% of the tokens in updates were not computed again")
