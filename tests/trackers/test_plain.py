"""The lines of a log: what they say and how often they come."""

import io
import math

import pytest

from doubles.followed import Clock, budgeted, follow
from policygrad.trackers import PlainTracker, RunInfo


def plain(total: int = 200, first: int = 1, seconds: float = 1.0) -> list[str]:
    clock, stream = Clock(), io.StringIO()
    follow(PlainTracker(stream, clock), clock, total, first, seconds)
    return stream.getvalue().split("\n")[:-1]


def test_plain_lines():
    out = plain()
    steps = [line for line in out if line.startswith("step")]
    assert 20 <= len(steps) <= 40
    assert len(out) <= 50
    assert steps[0].startswith("step   1/200  reward 0.005  kl 0.003  entropy 0.61  length 14.2  21k tok/s  left 3m19s")
    assert steps[-1] == "step 200/200  reward 1.00   kl 0.003  entropy 0.61  length 14.2  21k tok/s"
    assert out[:3] == ["a run", "  model: tiny", "evaluating before training"]
    assert "    completion  Two and three\\nmake [red]5[/red].  (reward 1.00)" in out
    assert 4 <= sum("completion  " in line for line in out) <= 6
    assert out[-3:] == [
        "done at step 200/200 after 8m20s",
        "  held-out accuracy  0.31 -> 0.74  (+0.43)",
        "  model              runs/a/model",
    ]


@pytest.mark.parametrize(
    ("total", "first", "seconds", "least", "most"),
    [
        (1, 1, 1, 1, 1),
        (5, 1, 1, 5, 5),
        (200, 190, 1, 11, 11),
        (100_000, 1, 0.001, 20, 40),
        (30, 1, 600, 30, 30),
        (200, 1, 70, 200, 200),  # more than a minute a step: each is told
    ],
)
def test_plain_lines_are_rate_limited(total, first, seconds, least, most):
    steps = [int(line[4:].split("/")[0]) for line in plain(total, first, seconds) if line.startswith("step")]
    assert least <= len(steps) <= most
    assert steps[0] == first
    assert steps[-1] == total


def test_plain_on_an_ascii_stream_without_some_metrics():
    clock, raw = Clock(), io.BytesIO()
    stream = io.TextIOWrapper(raw, "ascii", newline="\n")
    tracker = PlainTracker(stream, clock)
    tracker.start(RunInfo("über", {}, 3))
    tracker.note("\x1b[2J 日本 \ud800")
    tracker.log(1, {"reward": math.nan, "completions/truncated_ratio": 0.25})
    tracker.log(2, {})
    assert raw.getvalue().decode().split("\n")[:-1] == [
        "?ber", "note: ?[2J ?? ?", "step 1/3  reward nan  25% cut off  left 0s", "step 2/3  left 0s",
    ]  # fmt: skip


def test_phases_are_printed_once_not_at_every_step():
    stream = io.StringIO()
    tracker = PlainTracker(stream, Clock())
    tracker.start(RunInfo("t", {}, 3))
    for step in (1, 2, 3):
        tracker.phase("sampling")
        tracker.phase("updating")
        tracker.log(step, {})
    assert stream.getvalue().count("sampling") == stream.getvalue().count("updating") == 1


def test_a_wait_is_one_line_for_its_state_not_for_each_number():
    stream, now = io.StringIO(), [0.0]
    tracker = PlainTracker(stream, clock=lambda: now[0])
    for left in range(13, 0, -1):
        now[0] += 5.0
        tracker.phase(f"waiting for {left} programs (agent.py)", 13 - left, 13)
    tracker.phase("waiting for 2 programs (other-7b.py)")
    tracker.phase("evaluating math500")
    tracker.phase("evaluating math100")
    assert stream.getvalue().splitlines() == [
        "waiting for 13 programs (agent.py)",
        *("  4/13", "  8/13", "  12/13"),
        *("waiting for 2 programs (other-7b.py)", "evaluating math500", "evaluating math100"),
    ]


def test_time_left_follows_the_token_budget_if_it_ends_first():
    clock, stream = Clock(), io.StringIO()
    budgeted(PlainTracker(stream, clock), clock)
    steps = [line for line in stream.getvalue().split("\n") if line.startswith("step")]
    assert 20 <= len(steps) <= 60
    assert steps[0].startswith("step   1/500  10/1.0k tokens")
    assert steps[0].endswith("left 1m39s")
    assert "left" not in steps[-1]
    assert steps[-1].startswith("step 100/500  1.0k/1.0k tokens")
    assert "\ndone at step 100/500  1.0k/1.0k tokens after 1m40s" in stream.getvalue()


def test_a_long_phase_shows_its_progress():
    stream, now = io.StringIO(), [0.0]
    tracker = PlainTracker(stream, clock=lambda: now[0])
    for second in range(0, 150, 5):
        now[0] = float(second)
        tracker.phase("evaluating before training", second, 150)
    assert stream.getvalue().splitlines() == ["evaluating before training", *(f"  {n}/150" for n in range(20, 150, 20))]
