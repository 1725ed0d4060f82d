"""Plans, and carrying them out: what is run, what is run again, what is chosen, with a runner that stands in for the processes."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from doubles.comparison import StubRunner, plan, row, write_run
from policygrad.compare import runner as outcomes
from policygrad.compare.plan import FIRST_TUNING_SEED, ComparisonPlan, Job, open_comparison, read_plan
from policygrad.compare.runner import ComparisonRun, Results, choose_values
from policygrad.errors import RunError

GRID = (1e-4, 1e-3, 1e-2)


def carried_out(found: ComparisonPlan, folder: Path, runner: StubRunner, jobs: int = 1) -> tuple[Results, list[str]]:
    output: list[str] = []
    return ComparisonRun(found, folder, runner, jobs, output.append).run(), output


def test_the_plan_lists_the_runs() -> None:
    found = plan(row("grpo", GRID), row("trpo"), seeds=2, tuning=2)
    tuning = found.tuning_jobs()
    assert len(tuning) == 3 * 2
    assert {job.row for job in tuning} == {"grpo"}
    assert all(job.seed >= FIRST_TUNING_SEED for job in tuning)
    assert not {job.seed for job in tuning} & set(found.seeds)
    reported = found.reported_jobs({"grpo": 1e-3, "trpo": None})
    assert [str(job) for job in reported] == [
        "grpo at 0.001, seed 0",
        "trpo, seed 0",
        "grpo at 0.001, seed 1",
        "trpo, seed 1",
    ]
    assert found.train_argv(reported[0]) == ("train", "grpo", "--lr", "0.001", "--tokens", "12000", "--seed", "0")
    assert found.train_argv(reported[1]) == ("train", "trpo", "--tokens", "12000", "--seed", "0")
    assert len({job.folder for job in [*tuning, *reported]}) == len(tuning) + len(reported)


def test_a_plan_can_be_extended_and_finished_runs_count(tmp_path: Path) -> None:
    """Rows, values of a grid and seeds, in any order of the rows; not another budget."""
    first = plan(row("grpo", GRID[:2]), row("ppo"), seeds=2)
    more = plan(row("trpo"), row("ppo"), row("grpo", GRID), seeds=3)
    assert open_comparison(tmp_path / "new", first) == first
    assert open_comparison(tmp_path / "new", more) == more
    assert read_plan(tmp_path / "new") == more
    assert {job.folder for job in first.tuning_jobs()} < {job.folder for job in more.tuning_jobs()}
    with pytest.raises(RunError, match="which differs in the rows"):
        open_comparison(tmp_path / "new", first)
    with pytest.raises(RunError, match="which differs in tokens"):
        open_comparison(tmp_path / "new", replace(more, tokens=more.tokens + 1))


def test_a_plan_survives_saving_and_loading(tmp_path: Path) -> None:
    found = plan(row("grpo", GRID), row("ppo", updates=4))
    assert open_comparison(tmp_path / "new", found) == found
    assert read_plan(tmp_path / "new") == found
    assert open_comparison(tmp_path / "new", found) == found
    with pytest.raises(RunError, match=r"which differs in the row ppo: continue it with --resume"):
        open_comparison(tmp_path / "new", plan(row("grpo", GRID), row("ppo", updates=8)))
    with pytest.raises(RunError, match=r"which differs in the rows, seeds"):
        open_comparison(tmp_path / "new", plan(row("grpo", GRID), seeds=9))
    with pytest.raises(RunError, match=r"which differs in the row grpo"):
        open_comparison(tmp_path / "new", plan(row("grpo", GRID[:2]), row("ppo", updates=4)))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("…")
    with pytest.raises(RunError, match="is not empty and holds no comparison"):
        open_comparison(tmp_path / "other", found)
    with pytest.raises(RunError, match="holds no comparison"):
        read_plan(tmp_path / "other")
    (tmp_path / "other" / "plan.json").write_text("{}")
    with pytest.raises(RunError, match="is not a plan of a comparison"):
        read_plan(tmp_path / "other")


def test_the_best_rate_on_the_tuning_seeds_is_reported(tmp_path: Path) -> None:
    found, runner = plan(row("grpo", GRID), row("ppo")), StubRunner({"grpo": 0.8, "ppo": 0.7})
    results, output = carried_out(found, tmp_path, runner, jobs=2)
    assert results.chosen == {"grpo": 1e-3, "ppo": None}
    assert len(runner.ran) == 3 * 2 + 2 * 2
    assert {job.seed for job in results.outcomes if job.option_value == 1e-2} == set(found.tuning_seeds)
    assert not results.failures
    assert not results.stopped
    assert output[0] == "6 of 6 tuning runs to do"
    assert any("4 of 4 runs to do" in line for line in output)
    assert any(line.startswith("ppo, seed 1: 0.") and "12,000 tokens  12 updates" in line for line in output)


def test_ties_choose_the_smaller_rate_and_failed_rates_never(tmp_path: Path) -> None:
    found = plan(row("grpo", GRID), seeds=1, tuning=1)
    write_run(tmp_path / "run", 0.5, None, 0)
    same = outcomes.read_outcome(tmp_path / "run")
    assert choose_values(found, {Job("grpo", value, FIRST_TUNING_SEED): same for value in GRID}) == {"grpo": 1e-4}
    assert choose_values(found, {Job("grpo", value, FIRST_TUNING_SEED): same for value in GRID[1:]}) == {"grpo": 1e-3}
    assert choose_values(found, {}) == {}


def test_finished_runs_are_not_repeated(tmp_path: Path) -> None:
    found, runner = plan(row("grpo", GRID), row("ppo")), StubRunner()
    first, _ = carried_out(found, tmp_path, runner)
    rerun = StubRunner()
    second, output = carried_out(found, tmp_path, rerun)
    assert rerun.ran == []
    assert second.outcomes == first.outcomes
    assert output == ["0 of 6 tuning runs to do", "0 of 4 runs to do"]


def test_a_failed_run_is_reported_and_retried_on_resume(tmp_path: Path) -> None:
    found = plan(row("grpo", GRID), row("ppo"))
    runner = StubRunner(fails=lambda words: "0.01" in words or (words[1] == "ppo" and words[-1] == "1"))
    results, output = carried_out(found, tmp_path, runner)
    assert {(job.row, job.option_value, job.seed) for job in results.failures} == {
        ("grpo", 1e-2, FIRST_TUNING_SEED),
        ("grpo", 1e-2, FIRST_TUNING_SEED + 1),
        ("ppo", None, 1),
    }
    assert all("NaN in the loss" in error for error in results.failures.values())
    assert any("NaN in the loss" in line for line in output)
    assert Job("ppo", None, 0) in results.outcomes
    rerun = StubRunner()
    results, _ = carried_out(found, tmp_path, rerun)
    assert len(rerun.ran) == 3
    assert not results.failures


def test_a_run_without_scores_is_a_failure(tmp_path: Path) -> None:
    found = plan(row("grpo"), seeds=1)

    class Unscored(StubRunner):
        def __call__(self, words: object, folder: Path) -> None:
            write_run(folder, 0.5, None, 0)
            (folder / "metrics.jsonl").write_text('{"step": 1, "tokens/sampled": 5}\n')

    results, _ = carried_out(found, tmp_path, Unscored())
    (error,) = results.failures.values()
    assert "no evaluation score before or after training" in error
    results, _ = carried_out(found, tmp_path, StubRunner())  # read from the folder, not run again
    assert len(results.failures) == 1


def test_ctrl_c_ends_soon_and_the_comparison_resumes(tmp_path: Path) -> None:
    found = plan(row("grpo", GRID), row("ppo"))
    runner = StubRunner()

    def pressed(count: int) -> None:
        if count == 2:
            os.kill(os.getpid(), signal.SIGINT)
            assert runner.told.wait(30)

    runner.before = pressed
    results, output = carried_out(found, tmp_path, runner)
    assert results.stopped
    assert runner.stopped == 1
    assert any("stopping after this step" in line for line in output)
    assert len(results.outcomes) == 2  # the third was under way
    rerun = StubRunner()
    results, _ = carried_out(found, tmp_path, rerun)
    assert not results.stopped
    assert len(results.outcomes) == 10
    assert len(rerun.ran) == 8


def test_finished_runs_are_kept_small(tmp_path: Path) -> None:
    class Heavy(StubRunner):
        def __call__(self, words: object, folder: Path) -> None:
            super().__call__(words, folder)  # type: ignore[arg-type]
            for name in ("checkpoints/step-1", "model"):
                (folder / name).mkdir(parents=True)
                (folder / name / "weights").write_text("…")
            (folder / "completions.jsonl").write_text("…")

    found = plan(row("grpo", GRID), seeds=1, tuning=1)
    carried_out(found, tmp_path, Heavy())
    tuning, reported = (tmp_path / job.folder for job in (found.tuning_jobs()[0], *found.reported_jobs({"grpo": 1e-3})))
    assert sorted(p.name for p in tuning.iterdir()) == ["metrics.jsonl", "result.json"]
    assert sorted(p.name for p in reported.iterdir()) == ["completions.jsonl", "metrics.jsonl", "model", "result.json"]


def test_a_runs_curve_over_three_axes(tmp_path: Path) -> None:
    write_run(tmp_path / "run", 0.8, None, 0, updates=3)
    found = outcomes.read_outcome(tmp_path / "run")
    assert found.tokens == (0.0, 4000.0, 8000.0, 12000.0)
    assert found.updates == (0.0, 12.0, 24.0, 36.0)
    assert found.seconds == (0.0, 8.0, 16.0, 24.0)
    assert len(found.score) == 4
    assert found.steps == 12
    assert found.diagnostics["length"] == pytest.approx(9 + (10 + 11 + 12) / 3)  # the last fifth of twelve, rounded up
    assert found.cost["cpu_seconds"] == 20.0
    with pytest.raises(RunError, match="cannot be read as a finished run"):
        outcomes.read_outcome(tmp_path)
