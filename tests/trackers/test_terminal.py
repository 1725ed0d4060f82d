"""The live display, for every size of terminal."""

import io
import math

import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from doubles.followed import SAMPLE, Clock, budgeted, follow, metrics, row
from policygrad.trackers import RunInfo
from policygrad.trackers.rich_display import TerminalTracker


def rich(width: int, height: int = 30) -> tuple[TerminalTracker, Clock, io.StringIO, Console]:
    clock, stream = Clock(), io.StringIO()
    console = Console(
        file=stream,
        force_terminal=True,
        width=width,
        height=height,
        highlight=False,
        color_system="standard",
        legacy_windows=False,
    )
    return TerminalTracker(console, clock), clock, stream, console


def picture(tracker: TerminalTracker, width: int, height: int = 30) -> list[str]:
    console = Console(file=io.StringIO(), record=True, force_terminal=True, width=width, height=height)
    console.print(tracker)
    return console.export_text().split("\n")[:-1]


def run_to(step: int, width: int = 80, height: int = 30, sample: dict = SAMPLE, total: int = 200) -> list[str]:
    tracker, clock, _, _ = rich(width, height)
    with tracker:
        tracker.start(RunInfo("a run", {}, total))
        for s in range(1, step + 1):
            clock.now += 5
            tracker.log(s, metrics(s, grad_norm=0.8), [sample])
        return picture(tracker, width, height)


@pytest.mark.parametrize("height", [8, 12, 18, 24, 50])
@pytest.mark.parametrize("width", [20, 40, 80, 104, 120, 200])
def test_display_fits_every_terminal(width, height):
    wild = row("日本語" * 50 + " [bold]x", "👩‍👩‍👧 \x1b[31m\t" + "word " * 400 + "日" * 300 + "\nanswer", -1.0)
    for sample in (SAMPLE, wild):
        out = run_to(60, width, height, sample)
        assert all(cell_len(line) <= width for line in out)
        assert len(out) <= max(height, 11)
        assert any("60/200" in line for line in out)


def test_display_at_80_columns():
    out = "\n".join(run_to(100, 80, 24))
    assert "step 100/200  8m20s  8m20s left" in out
    for label, value in {
        "reward": "0.50",
        "kl": "0.003",
        "entropy": "0.61",
        "length": "14.2",
        "tok/s": "21k",
        "grad": "0.80",
    }.items():
        assert label in out
        assert value in out
    assert "a sample of step 100" in out
    assert "make [red]5[/red]." in out  # not markup
    assert "reward 1.00" in out
    assert any(0x2800 < ord(char) < 0x2900 for char in out)
    assert "step 1 " in out


def test_wide_terminals_show_curve_and_sample_side_by_side():
    assert any("┤" in line and "╮" in line for line in run_to(50, 120))
    assert not any("┤" in line and "╮" in line for line in run_to(50, 80))


def test_only_present_metrics_are_shown():
    tracker, _, _, _ = rich(80)
    with tracker:
        tracker.start(RunInfo("a run", {}, 5))
        assert not any("kl" in line for line in picture(tracker, 80))
        tracker.log(1, {"kl": 0.5, "objective": 3.0})
        out = "\n".join(picture(tracker, 80))
        assert "kl" in out
        assert "reward" not in out
        assert "objective" not in out
        tracker.log(2, {"reward": math.nan, "grad_norm": math.inf, "clip_ratio/high": math.nan})
        assert "nan" in "\n".join(picture(tracker, 80))


def test_the_end_of_a_long_completion_is_visible():
    text = "\n".join(f"line {i}" for i in range(500)) + "\n\\boxed{42}"
    out = "\n".join(run_to(3, 80, 24, row("p " * 4000 + "the question", text, 0.0)))
    assert "\\boxed{42}" in out
    assert "line 0" in out
    assert "…" in out
    assert "the question" in out


def test_a_sample_stays_readable_and_the_last_is_always_shown():
    tracker, clock, _, _ = rich(80)
    seen = []
    with tracker:
        tracker.start(RunInfo("a run", {}, 100))
        for step in range(1, 101):
            clock.now += 0.5
            tracker.log(step, metrics(step), [row("p", f"text {step}", 0.5)])
            seen.append(next(line.split()[2] for line in picture(tracker, 80) if " text " in line))
    assert seen[0] == "1"
    assert seen[-1] == "100"
    assert 15 <= len(set(seen)) <= 20


def test_time_left_ignores_evaluation():
    tracker, clock, _, _ = rich(80)
    with tracker:
        tracker.start(RunInfo("a run", {}, 100))
        tracker.phase("evaluating before training")
        clock.now += 5000
        tracker.phase("evaluating before training", 3, 4)
        assert any("evaluating before training" in line and "75%" in line for line in picture(tracker, 80))
        tracker.phase("evaluating before training", 4, 4)
        assert not any("evaluating" in line for line in picture(tracker, 80))
        clock.now += 40
        tracker.log(1, metrics(1))
        assert any("1h06m left" in line for line in picture(tracker, 80))
        for step in range(2, 50):
            clock.now += 2
            tracker.log(step, metrics(step))
        assert any("1m42s left" in line for line in picture(tracker, 80))


def test_a_resumed_run_shows_the_full_curve():
    tracker, _, _, _ = rich(80)
    with tracker:
        tracker.start(RunInfo("a run", {}, 100, 51, [(s, 1.0 - s / 100) for s in range(1, 51)]))
        assert any("50/100" in line for line in picture(tracker, 80))
        assert sum(0x2800 < ord(c) < 0x2900 for line in picture(tracker, 80) for c in line) > 20


def test_notes_stay_readable_at_any_time():
    tracker, _, stream, _ = rich(60)
    tracker.note("before [bold]")
    tracker.phase("loading the model")
    with tracker:
        tracker.start(RunInfo("a run", {"folder": "[red]runs"}, 5))
        tracker.note("during " + "long " * 30)
        tracker.log(1, metrics(1))
        tracker.finish({"model": "x" * 100})
    tracker.note("after")
    text = Text.from_ansi(stream.getvalue()).plain
    for word in ("before [bold]", "loading the model", "stopped  step 1/5", "during", "after", "[red]runs"):
        assert word in text
    assert text.count("long") == 30
    assert text.count("x") >= 100  # folded, not cut


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_interrupted_run_restores_the_terminal(error):
    tracker, _, stream, console = rich(80)

    def train() -> None:
        with tracker:
            tracker.start(RunInfo("a run", {}, 5))
            tracker.log(1, metrics(1), [SAMPLE])
            raise error

    with pytest.raises(error):
        train()
    out = stream.getvalue()
    assert out.rindex("\x1b[?25h") > out.rindex("\x1b[?25l")  # the cursor is shown again
    assert console._live_stack == []
    tracker.close()  # twice does no harm


def test_a_full_run_on_the_rich_display():
    tracker, clock, stream, _ = rich(80)
    follow(tracker, clock, 20, first=6, grad_norm=1.0)
    text = Text.from_ansi(stream.getvalue()).plain
    assert "0.31 -> 0.74  (+0.43)" in text
    assert "done  step 20/20 after 5m15s" in text
    assert text.rstrip().endswith("runs/a/model")


def test_the_live_bar_follows_the_budget():
    clock, stream = Clock(), io.StringIO()
    tracker = TerminalTracker(Console(file=stream, width=100, force_terminal=True), clock)
    budgeted(tracker, clock, sampled=500)
    text = Text.from_ansi(stream.getvalue()).plain
    assert "1.0k/1.0k tokens" in text
    assert "done  step 50/500" in text
