"""How far a run is."""

from policygrad.trackers import RunInfo
from policygrad.trackers.console import RunProgress


def test_time_left_follows_steps_if_they_run_out_first():
    progress = RunProgress(RunInfo("", steps=10, first_step=5, token_budget=1000, sampled_tokens=400))
    assert (progress.fraction, progress.steps_left, progress.is_finished) == (0.4, 6.0, False)
    progress.advance(5, {"tokens/sampled": 100.0})
    assert (progress.fraction, progress.steps_left) == (0.5, 5.0)
    progress.advance(6, {"tokens/sampled": 300.0})  # 200 a step: the last 200 are one more
    assert (progress.fraction, progress.steps_left) == (0.8, 1.0)
    progress.advance(7, {"tokens/sampled": 250.0})
    assert progress.is_finished
    assert progress.steps_left == 0
