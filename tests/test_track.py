"""What a run tells the world: its JSON lines after every kind of stop, and a display for every kind of terminal."""

import errno
import io
import json
import math
import os
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from policygrad.trackers import Display, Outline, PlainDisplay, RunFiles, Sample, Silent, change, make_display
from policygrad.trackers.curve import horizon, limits, smooth
from policygrad.trackers.progress import RunProgress as Course
from policygrad.trackers.terminal.braille import plot
from policygrad.trackers.terminal.display import RichDisplay
from policygrad.trackers.words import clean, count, duration, number, one_line

# --- files ---


def lines(path: Path) -> list[dict]:
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text("utf-8").split("\n")[:-1]]


def test_lines_are_strict_json(tmp_path):
    with RunFiles(tmp_path / "new" / "run") as files:
        files.metrics(1, {"reward": 0.1 + 0.2, "kl": math.nan, "grad_norm": math.inf, "tokens": 2**70, "ok": True})
        files.metrics(2, {"reward": torch.tensor(0.5), "kl": np.float32(0.25), "parts": {"a": [1, (None, -math.inf)]}})
        files.completions(
            1, [{"prompt": "2+2", "completion": "4 \ud800\u2028\n\x00 日本", "reward": 1}, {"truncated": False}]
        )
        files.completions(2, [])
        assert lines(files.folder / "metrics.jsonl") == [
            {"step": 1, "reward": 0.1 + 0.2, "kl": None, "grad_norm": None, "tokens": 2**70, "ok": True},
            {"step": 2, "reward": 0.5, "kl": 0.25, "parts": {"a": [1, [None, None]]}},
        ]
        assert lines(files.folder / "completions.jsonl") == [
            {"step": 1, "prompt": "2+2", "completion": "4 \ud800\u2028\n\x00 日本", "reward": 1},
            {"step": 1, "truncated": False},
        ]
        assert files.history("reward") == [(1, 0.1 + 0.2), (2, 0.5)]
        assert files.history("kl") == [(2, 0.25)]
        files.sync()


def test_a_line_is_on_its_way_at_once(tmp_path):
    files = RunFiles(tmp_path)
    files.metrics(1, {"reward": 1.0})
    assert len(lines(tmp_path / "metrics.jsonl")) == 1  # before close
    files.close()


@pytest.mark.parametrize("value", [object(), {1, 2}, torch.ones(2), b"bytes"])
def test_what_json_cannot_hold_is_named_and_nothing_is_written(tmp_path, value):
    with RunFiles(tmp_path) as files:
        with pytest.raises(TypeError, match=r"completions.jsonl: 'parts'.format is a .*pass plain numbers"):
            files.completions(1, [{"prompt": "fine"}, {"parts": {"format": value}}])
        assert (tmp_path / "completions.jsonl").read_bytes() == b""


def write(folder: Path, steps: range) -> None:
    with RunFiles(folder) as files:
        for step in steps:
            files.metrics(step, {"reward": step / 7, "note": "né\n"})
            files.completions(step, [{"prompt": f"p{i}", "completion": "x" * i} for i in range(3)])


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@settings(max_examples=60, deadline=None)
@given(cuts=st.tuples(st.floats(0, 1), st.floats(0, 1)), data=st.data())
@example(cuts=(1.0, 1.0), data=None)
def test_a_run_cut_anywhere_and_resumed_equals_one_never_stopped(tmp_path_factory, cuts, data):
    """Both files are cut at any byte; the run goes on from any step whose lines are whole."""
    unbroken, broken = tmp_path_factory.mktemp("unbroken"), tmp_path_factory.mktemp("broken")
    write(unbroken, range(1, 7))
    write(broken, range(1, 6))
    whole = 5
    for (name, text), cut in zip(sorted(contents(broken).items()), cuts, strict=True):
        size = round(cut * len(text))
        os.truncate(broken / name, size)
        per_step = 3 if name == "completions.jsonl" else 1
        whole = min(whole, text[:size].count(b"\n") // per_step)
    step = data.draw(st.integers(0, whole)) if data else 5
    with RunFiles(broken) as files:
        files.truncate_after(step)
    write(broken, range(step + 1, 7))
    assert contents(broken) == contents(unbroken)


def test_every_torn_last_line_is_repaired_on_opening(tmp_path):
    write(tmp_path, range(1, 3))
    text = (tmp_path / "metrics.jsonl").read_bytes()
    end_of_first = text.index(b"\n") + 1
    for size in range(end_of_first, len(text) + 1):
        (tmp_path / "metrics.jsonl").write_bytes(text[:size])
        with RunFiles(tmp_path) as files:
            files.metrics(9, {})
        expected = text if size >= len(text) - 1 else text[:end_of_first]
        assert (tmp_path / "metrics.jsonl").read_bytes() == expected + b'{"step": 9}\n'


@pytest.mark.parametrize("torn", [b"\x00" * 5000, b'{"step": 3, "x": "' + b"y" * 200_000, b"\xff\xfe", b"[1]"])
def test_strange_tails(tmp_path, torn):
    write(tmp_path, range(1, 3))
    text = (tmp_path / "metrics.jsonl").read_bytes()
    (tmp_path / "metrics.jsonl").write_bytes(text + torn)
    RunFiles(tmp_path).close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == text


def test_truncation_counts_and_drops_unreadable_lines(tmp_path):
    write(tmp_path, range(1, 4))
    path = tmp_path / "metrics.jsonl"
    first, *rest = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + b"torn{\n" + b"".join(rest))
    with RunFiles(tmp_path) as files:
        assert files.truncate_after(2) == 2 + 3
        assert files.truncate_after(2) == 0
        assert [row["step"] for row in lines(path)] == [1, 2]
        files.metrics(3, {})
    assert [row["step"] for row in lines(path)] == [1, 2, 3]


def test_truncation_is_all_or_nothing(tmp_path, monkeypatch):
    write(tmp_path, range(1, 4))
    before = (tmp_path / "metrics.jsonl").read_bytes()

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with RunFiles(tmp_path) as files:
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            files.truncate_after(1)
        monkeypatch.undo()
        assert (tmp_path / "metrics.jsonl").read_bytes() == before
        files.truncate_after(1)
    assert len(lines(tmp_path / "metrics.jsonl")) == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_names_the_file(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    files = RunFiles(tmp_path)
    with pytest.raises(OSError, match=r"see to it, then --resume .* goes on.*metrics.jsonl") as caught:
        files.metrics(1, {"reward": 0.5})
    assert caught.value.errno == errno.ENOSPC
    with suppress(OSError):
        files.close()


# --- words ---


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.414, "0.41"), (0, "0.00"), (0.0031, "0.003"), (0.000021, "2e-05"), (14.23, "14.2"), (1234.5, "1,234"), (-0.5, "-0.50"),
     (math.nan, "nan"), (-math.inf, "-inf"), (1e30, "1.0e+30"), (0.0999, "0.10"), (0.00096, "0.001")],
)  # fmt: skip
def test_numbers_are_short(value, text):
    assert number(value) == text


def test_counts_durations_and_changes():
    assert [count(x) for x in (812, 2100, 9990, 21_000, 999_900, 3.4e6, math.nan)] == [
        "812", "2.1k", "10k", "21k", "1.0M", "3.4M", "nan",
    ]  # fmt: skip
    assert [duration(x) for x in (0.4, 59.7, 100, 3600, 7500, 90_000)] == [
        "0s",
        "1m00s",
        "1m40s",
        "1h00m",
        "2h05m",
        "1d01h",
    ]
    assert change(0.31, 0.74) == "0.31 -> 0.74  (+0.43)"


@given(st.text())
def test_clean_text_cannot_steer_a_terminal(text):
    assert all(char == "\n" or char.isprintable() or char == " " or char.isspace() for char in clean(text))
    assert not set(clean(text)) & {*map(chr, range(10)), *map(chr, range(11, 32)), *map(chr, range(127, 160)), "\u202e"}
    clean(text).encode()


def test_one_line_keeps_both_ends():
    assert one_line(" a\nb ") == "a\\nb"
    text = one_line("start" + "x" * 1000 + "end")
    assert text.startswith("start")
    assert text.endswith("end")
    assert len(text) < 130


# --- curve ---


def test_smoothing():
    assert smooth([2.0] * 9, 3.0) == pytest.approx([2.0] * 9)
    assert smooth([0.0, 1.0, 0.0], 1e-6) == pytest.approx([0.0, 1.0, 0.0])
    line = smooth([0.0] * 10 + [1.0] * 10, 2.0)
    assert line == sorted(line)
    assert line[9] + line[10] == pytest.approx(1.0)  # no delay: the step stays in the middle


def test_the_step_axis_is_at_least_half_used_and_ends_with_the_run():
    ends = [horizon(step, 200) for step in range(1, 201)]
    assert ends[0] == 13
    assert ends[-1] == 200
    assert ends == sorted(ends)
    assert all(end >= step for step, end in enumerate(ends, 1))
    assert all(end <= 2 * step for step, end in enumerate(ends, 1) if step > 10)
    assert len(set(ends)) == 5  # it rarely changes
    assert horizon(1, 1) == 2


@given(st.lists(st.floats(-1e30, 1e30), min_size=1, max_size=40), st.integers(4, 70), st.integers(2, 10))
def test_any_curve_can_be_drawn(values, columns, rows):
    low, high = limits(values)
    slack = 1e-6 * (high - low)
    assert low - slack <= min(values) <= max(values) <= high + slack
    assert low < high
    picture, _, _ = plot(list(enumerate(values, 1)), max(len(values), 2), columns, rows)
    for row in range(rows):
        cells = picture.row(row)
        assert len(cells) == columns
        assert all(char == " " or 0x2800 < ord(char) < 0x2900 for char, _ in cells)


def test_a_rising_line():
    picture, low, high = plot([(step, step / 100) for step in range(1, 101)], 100, 20, 5)
    assert (low, high) == pytest.approx((0.0, 1.0))
    heights = [[row for row in range(5) if picture.row(row)[column][1]] for column in range(20)]
    assert all(heights)  # no gaps
    assert heights[0] == [4]
    assert heights[-1] == [0]
    assert [min(h) for h in heights] == sorted((min(h) for h in heights), reverse=True)


# --- displays ---


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


SAMPLE = Sample("What is 2 + 3?", "Two and three\nmake [red]5[/red].", 1.0)


def follow(
    display: Display, clock: Clock, total: int = 200, first: int = 1, seconds: float = 1.0, **more: float
) -> None:
    with display:
        display.start(Outline("a run", {"model": "tiny"}, total, first, [(s, s / 200) for s in range(1, first)]))
        display.phase("evaluating before training")
        for done in range(1, 11):
            clock.now += 30
            display.phase_progress(done, 10)
        for step in range(first, total + 1):
            clock.now += seconds
            display.step(step, metrics(step, **more), SAMPLE)
        display.finish({"held-out accuracy": change(0.31, 0.74), "model": "runs/a/model"})


def plain(total: int = 200, first: int = 1, seconds: float = 1.0) -> list[str]:
    clock, stream = Clock(), io.StringIO()
    follow(PlainDisplay(stream, clock), clock, total, first, seconds)
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
def test_how_often_plain_lines_come(total, first, seconds, least, most):
    steps = [int(line[4:].split("/")[0]) for line in plain(total, first, seconds) if line.startswith("step")]
    assert least <= len(steps) <= most
    assert steps[0] == first
    assert steps[-1] == total


def test_plain_on_an_ascii_stream_and_with_metrics_missing():
    clock, raw = Clock(), io.BytesIO()
    stream = io.TextIOWrapper(raw, "ascii", newline="\n")
    display = PlainDisplay(stream, clock)
    display.start(Outline("über", {}, 3))
    display.note("\x1b[2J 日本 \ud800")
    display.step(1, {"reward": math.nan, "completions/truncated_ratio": 0.25})
    display.step(2, {})
    assert raw.getvalue().decode().split("\n")[:-1] == [
        "?ber", "note: ?[2J ?? ?", "step 1/3  reward nan  25% cut off  left 0s", "step 2/3  left 0s",
    ]  # fmt: skip


def test_what_happens_at_every_step_is_not_said_every_time():
    stream = io.StringIO()
    display = PlainDisplay(stream, Clock())
    display.start(Outline("t", {}, 3))
    for step in (1, 2, 3):
        display.phase("sampling")
        display.phase("updating")
        display.step(step, {})
    assert stream.getvalue().count("sampling") == stream.getvalue().count("updating") == 1


def rich(width: int, height: int = 30) -> tuple[RichDisplay, Clock, io.StringIO, Console]:
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
    return RichDisplay(console, clock), clock, stream, console


def picture(display: RichDisplay, width: int, height: int = 30) -> list[str]:
    console = Console(file=io.StringIO(), record=True, force_terminal=True, width=width, height=height)
    console.print(display)
    return console.export_text().split("\n")[:-1]


def run_to(step: int, width: int = 80, height: int = 30, sample: Sample = SAMPLE, total: int = 200) -> list[str]:
    display, clock, _, _ = rich(width, height)
    with display:
        display.start(Outline("a run", {}, total))
        for s in range(1, step + 1):
            clock.now += 5
            display.step(s, metrics(s, grad_norm=0.8), sample)
        return picture(display, width, height)


@pytest.mark.parametrize("height", [8, 12, 18, 24, 50])
@pytest.mark.parametrize("width", [20, 40, 80, 104, 120, 200])
def test_the_picture_fits_every_terminal(width, height):
    wild = Sample("日本語" * 50 + " [bold]x", "👩‍👩‍👧 \x1b[31m\t" + "word " * 400 + "日" * 300 + "\nanswer", -1.0)
    for sample in (SAMPLE, wild):
        out = run_to(60, width, height, sample)
        assert all(cell_len(line) <= width for line in out)
        assert len(out) <= max(height, 11)
        assert any("60/200" in line for line in out)


def test_the_picture_at_80_columns():
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


def test_wide_terminals_have_curve_and_sample_beside_each_other():
    assert any("┤" in line and "╮" in line for line in run_to(50, 120))
    assert not any("┤" in line and "╮" in line for line in run_to(50, 80))


def test_only_metrics_that_are_there_are_shown():
    display, _, _, _ = rich(80)
    with display:
        display.start(Outline("a run", {}, 5))
        assert not any("kl" in line for line in picture(display, 80))
        display.step(1, {"kl": 0.5, "objective": 3.0})
        out = "\n".join(picture(display, 80))
        assert "kl" in out
        assert "reward" not in out
        assert "objective" not in out
        display.step(2, {"reward": math.nan, "grad_norm": math.inf, "clip_ratio/high": math.nan})
        assert "nan" in "\n".join(picture(display, 80))


def test_the_end_of_a_long_completion_is_seen():
    text = "\n".join(f"line {i}" for i in range(500)) + "\n\\boxed{42}"
    out = "\n".join(run_to(3, 80, 24, Sample("p " * 4000 + "the question", text, 0.0)))
    assert "\\boxed{42}" in out
    assert "line 0" in out
    assert "…" in out
    assert "the question" in out


def test_a_sample_stays_long_enough_to_be_read_and_the_last_is_always_shown():
    display, clock, _, _ = rich(80)
    seen = []
    with display:
        display.start(Outline("a run", {}, 100))
        for step in range(1, 101):
            clock.now += 0.5
            display.step(step, metrics(step), Sample("p", f"text {step}", 0.5))
            seen.append(next(line.split()[2] for line in picture(display, 80) if " text " in line))
    assert seen[0] == "1"
    assert seen[-1] == "100"
    assert 15 <= len(set(seen)) <= 20


def test_time_left_follows_the_last_steps_and_not_the_evaluation():
    display, clock, _, _ = rich(80)
    with display:
        display.start(Outline("a run", {}, 100))
        display.phase("evaluating before training")
        clock.now += 5000
        display.phase_progress(3, 4)
        assert any("evaluating before training" in line and "75%" in line for line in picture(display, 80))
        display.phase_progress(4, 4)
        assert not any("evaluating" in line for line in picture(display, 80))
        clock.now += 40
        display.step(1, metrics(1))
        assert any("1h06m left" in line for line in picture(display, 80))
        for step in range(2, 50):
            clock.now += 2
            display.step(step, metrics(step))
        assert any("1m42s left" in line for line in picture(display, 80))


def test_a_resumed_run_shows_the_whole_curve():
    display, _, _, _ = rich(80)
    with display:
        display.start(Outline("a run", {}, 100, 51, [(s, 1.0 - s / 100) for s in range(1, 51)]))
        assert any("50/100" in line for line in picture(display, 80))
        assert sum(0x2800 < ord(c) < 0x2900 for line in picture(display, 80) for c in line) > 20


def test_notes_stay_readable_at_any_time():
    display, _, stream, _ = rich(60)
    display.note("before [bold]")
    display.phase("loading the model")
    with display:
        display.start(Outline("a run", {"folder": "[red]runs"}, 5))
        display.note("during " + "long " * 30)
        display.step(1, metrics(1))
        display.finish({"model": "x" * 100})
    display.note("after")
    text = Text.from_ansi(stream.getvalue()).plain
    for word in ("before [bold]", "loading the model", "stopped  step 1/5", "during", "after", "[red]runs"):
        assert word in text
    assert text.count("long") == 30
    assert text.count("x") >= 100  # folded, not cut


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_interrupted_run_gives_the_terminal_back(error):
    display, _, stream, console = rich(80)

    def train() -> None:
        with display:
            display.start(Outline("a run", {}, 5))
            display.step(1, metrics(1), SAMPLE)
            raise error

    with pytest.raises(error):
        train()
    out = stream.getvalue()
    assert out.rindex("\x1b[?25h") > out.rindex("\x1b[?25l")  # the cursor is shown again
    assert console._live_stack == []
    display.close()  # twice does no harm


def test_a_whole_rich_run():
    display, clock, stream, _ = rich(80)
    follow(display, clock, 20, first=6, grad_norm=1.0)
    text = Text.from_ansi(stream.getvalue()).plain
    assert "0.31 -> 0.74  (+0.43)" in text
    assert "done  step 20/20 after 5m15s" in text
    assert text.rstrip().endswith("runs/a/model")


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_which_display_is_made(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert isinstance(make_display(Terminal()), RichDisplay)
    assert isinstance(make_display(io.StringIO()), PlainDisplay)
    assert isinstance(make_display(Terminal(), plain=True), PlainDisplay)
    assert isinstance(make_display(io.StringIO(), plain=False), RichDisplay)
    monkeypatch.setattr(Terminal, "encoding", "ascii")
    assert isinstance(make_display(Terminal()), PlainDisplay)
    monkeypatch.setattr(Terminal, "encoding", "UTF8")
    for name, value in (("NO_COLOR", "1"), ("TERM", "dumb")):
        monkeypatch.setenv(name, value)
        assert isinstance(make_display(Terminal()), PlainDisplay)
        monkeypatch.setenv(name, "xterm" if name == "TERM" else "")


def test_silent_takes_every_call():
    clock = Clock()
    follow(Silent(), clock)
    Silent().note("nothing")


def budgeted(display: Display, clock: Clock, tokens: int = 1000, steps: int = 500, sampled: int = 0) -> None:
    """10 tokens a step and a second a step: a budget of 1000 ends the run after 100 of its 500 steps."""
    with display:
        display.start(Outline("a run", {}, steps, tokens=tokens, sampled=sampled))
        for step in range(1, (tokens - sampled) // 10 + 1):
            clock.now += 1
            display.step(step, metrics(step, **{"tokens/sampled": 10.0}), SAMPLE)
        display.finish({})


def test_a_token_budget_that_ends_before_the_steps_sets_the_time_left():
    clock, stream = Clock(), io.StringIO()
    budgeted(PlainDisplay(stream, clock), clock)
    steps = [line for line in stream.getvalue().split("\n") if line.startswith("step")]
    assert 20 <= len(steps) <= 60
    assert steps[0].startswith("step   1/500  10/1.0k tokens")
    assert steps[0].endswith("left 1m39s")
    assert "left" not in steps[-1]
    assert steps[-1].startswith("step 100/500  1.0k/1.0k tokens")
    assert "\ndone at step 100/500  1.0k/1.0k tokens after 1m40s" in stream.getvalue()


def test_the_steps_set_the_time_left_when_they_end_first():
    course = Course(Outline("", steps=10, first_step=5, tokens=1000, sampled=400))
    assert (course.share, course.left, course.over) == (0.4, 6.0, False)
    course.advance(5, {"tokens/sampled": 100.0})
    assert (course.share, course.left) == (0.5, 5.0)
    course.advance(6, {"tokens/sampled": 300.0})  # 200 a step: the last 200 are one more
    assert (course.share, course.left) == (0.8, 1.0)
    course.advance(7, {"tokens/sampled": 250.0})
    assert course.over
    assert course.left == 0


def test_the_live_bar_follows_the_budget():
    clock, stream = Clock(), io.StringIO()
    display = RichDisplay(Console(file=stream, width=100, force_terminal=True), clock)
    budgeted(display, clock, sampled=500)
    text = Text.from_ansi(stream.getvalue()).plain
    assert "1.0k/1.0k tokens" in text
    assert "done  step 50/500" in text
