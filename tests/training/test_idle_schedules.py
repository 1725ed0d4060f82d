"""What cannot act before a run's end is said at its start and in --dry-run; what acts in its last but one step is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import policygrad as pg
from doubles.files import rows, same, weights
from doubles.trackers import Record
from policygrad.training.config.run import Run, describe_idle_schedules
from policygrad.training.trainer import train


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"algorithm": pg.ITERATIVE_GRPO},
            ["Reference.refresh_every = 100", "16 steps", "--steps above 100", "refresh-every to 4"],
        ),
        ({"algorithm": pg.ITERATIVE_GRPO, "steps": 101}, []),
        ({"algorithm": pg.PRORL}, ["Reference.refresh_every = 200", "--steps above 200"]),
        ({"algorithm": pg.PRORL, "steps": 200}, ["Reference.refresh_every = 200"]),
        ({"algorithm": pg.PRORL, "steps": 400}, []),
        ({"algorithm": pg.VAPO, "steps": 100}, []),
        (
            {"algorithm": pg.VAPO, "steps": 20},
            ["Critic.pretrain = 20", "is not trained", "--algorithm.critic.pretrain"],
        ),
        ({"algorithm": pg.GRPO, "steps": 1}, []),
    ],
)
def test_presets_report_idle_schedules(changes: dict[str, object], says: list[str]) -> None:
    result = describe_idle_schedules(Run(**changes))  # type: ignore[arg-type]
    assert len(result) == bool(says)
    assert all(word in result[0] for word in says)


@pytest.mark.parametrize(("steps", "acts"), [(8, True), (7, False), (1, False)])
def test_refresh_after_stall_that_never_acts(steps: int, acts: bool) -> None:
    """Scores after steps 2, 4 and 6, the second and third no better: anew with step 7, and compared with from step 8 on."""
    algorithm = replace(pg.GRPO, reference=pg.Reference(refresh_after_stall=2))
    result = describe_idle_schedules(Run(algorithm=algorithm, steps=steps, evaluation=pg.EvaluationConfig(every=2)))
    assert (not result) is acts
    if not acts:
        assert "after step 7 at the earliest" in result[0]
        assert "Set --steps above 7" in result[0]


@pytest.mark.full
def test_the_report_is_correct(small: Run, tmp_path: Path) -> None:
    """Of three steps a reference taken anew after the third changes no weight, after the second it does."""
    algorithm = replace(pg.GRPO, terms=(pg.KLToReference(1.0, "k3"),))
    run = replace(small, algorithm=algorithm, steps=3, prompts_per_step=2, sampling=pg.SamplingParams(max_tokens=4))
    never = train(replace(run, output=str(tmp_path / "never")), display=False)
    for every, acts in ((2, True), (3, False)):
        record = Record()
        refreshed = replace(run, algorithm=replace(algorithm, reference=pg.Reference(refresh_every=every)))
        result = train(replace(refreshed, output=str(tmp_path / f"every {every}")), display=record)
        metrics = rows(result.output / "metrics.jsonl")
        assert [m["step"] for m in metrics if m.get("reference/refreshed")] == [every]
        assert same(weights(never.output), weights(result.output)) is not acts
        assert any("never takes effect in this run" in note for note in record.notes) is not acts


def test_a_dry_run_reports_idle_schedules(run_command: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    code, message, _ = run_command("train", "prorl", "--dry-run")
    assert code == 0
    assert "# Note: Reference.refresh_every = 200 never takes effect" in message
    (tmp_path / "run.toml").write_text(message)
    code, rerun, _ = run_command("train", "--config", str(tmp_path / "run.toml"), "--steps", "300", "--dry-run")
    assert code == 0
    assert "Note:" not in rerun
