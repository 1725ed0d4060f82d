"""Runs that never happened, for trackers to follow, and the clock they are told."""

from typing import Any

from policygrad.trackers import RunInfo, Tracker, format_change


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def metrics(step: int, **more: float) -> dict[str, float]:
    return {
        "reward": step / 200,
        "kl": 0.003,
        "entropy": 0.61,
        "completions/mean_length": 14.2,
        "tokens_per_second": 21000.0,
        **more,
    }


def row(prompt: str, completion: str, reward: float | None) -> dict[str, Any]:
    return {"prompt": prompt, "completion": completion, "reward": reward}


SAMPLE = row("What is 2 + 3?", "Two and three\nmake [red]5[/red].", 1.0)


def follow(
    tracker: Tracker, clock: Clock, total: int = 200, first: int = 1, seconds: float = 1.0, **more: float
) -> None:
    with tracker:
        tracker.start(RunInfo("a run", {"model": "tiny"}, total, first, [(s, s / 200) for s in range(1, first)]))
        tracker.phase("evaluating before training")
        for done in range(1, 11):
            clock.now += 30
            tracker.phase("evaluating before training", done, 10)
        for step in range(first, total + 1):
            clock.now += seconds
            tracker.log(step, metrics(step, **more), [SAMPLE])
        tracker.finish({"held-out accuracy": format_change(0.31, 0.74), "model": "runs/a/model"})


def budgeted(tracker: Tracker, clock: Clock, tokens: int = 1000, steps: int = 500, sampled: int = 0) -> None:
    """10 tokens a step and a second a step: a budget of 1000 ends the run after 100 of its 500 steps."""
    with tracker:
        tracker.start(RunInfo("a run", {}, steps, token_budget=tokens, sampled_tokens=sampled))
        for step in range(1, (tokens - sampled) // 10 + 1):
            clock.now += 1
            tracker.log(step, metrics(step, **{"tokens/sampled": 10.0}), [SAMPLE])
        tracker.finish({})
