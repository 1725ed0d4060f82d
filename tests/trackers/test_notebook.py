"""The notebook's display, in a notebook that is not there."""

import math
from xml.etree import ElementTree

import pytest

from doubles import notebook
from doubles.followed import SAMPLE, Clock, follow, metrics, row
from policygrad.trackers import RunInfo
from policygrad.trackers.notebook import NotebookTracker


@pytest.fixture
def outputs(monkeypatch):
    return notebook.install(monkeypatch, notebook.ZMQInteractiveShell())


def words(html: str) -> str:
    """What is read; the page is well-formed XML, so that a tag left open or text that became markup is an error."""
    return " ".join(" ".join(ElementTree.fromstring(html).itertext()).split())


def test_a_run_is_one_notebook_output_that_is_redrawn(outputs):
    clock = Clock()
    tracker = NotebookTracker(clock)
    tracker.phase("loading the model")
    follow(tracker, clock, 20)
    assert len(outputs) == 1
    assert words(outputs[0].states[0]) == "loading the model"
    last = words(outputs[0].states[-1])
    for text in ("a run", "model tiny", "done · step 20/20", "reward", "0.10", "21k", "a sample of step 20, reward 1.00",
                 "What is 2 + 3?", "make [red]5[/red].", "held-out accuracy 0.31 -> 0.74 (+0.43)", "runs/a/model"):  # fmt: skip
        assert text in last
    assert any("evaluating before training" in words(state) for state in outputs[0].states)
    assert "evaluating" not in last


def test_progress_and_time_left(outputs):
    clock = Clock()
    tracker = NotebookTracker(clock)
    tracker.start(RunInfo("a run", {}, 200, step_unit="update"))
    for step in range(1, 101):
        clock.now += 5
        tracker.log(step, metrics(step), [SAMPLE])
    html = outputs[0].states[-1]
    assert "update 100/200 · 8m20s · 8m20s left" in words(html)
    assert '<progress value="0.5000" max="1">' in html
    tracker.phase("evaluating", 3, 4)
    assert '<progress value="0.7500" max="1">' in outputs[0].states[-1]


@pytest.mark.parametrize(
    "text", ["<script>alert(1)</script>", "</pre><b>", "a & b", "\x1b[2J\x00\u202e", '"><img src=x onerror=1>']
)
def test_completions_are_escaped(outputs, text):
    tracker = NotebookTracker(Clock())
    tracker.phase(text)
    tracker.start(RunInfo(text, {text: text}, 2, step_unit=text))
    tracker.note(text)
    tracker.log(1, metrics(1), [row(text, text, 1.0)])
    tracker.phase(text, 1, 2)
    tracker.finish({text: text})
    html = outputs[0].states[-1]
    assert {node.tag for node in ElementTree.fromstring(html).iter()} <= {
        "div", "b", "table", "tr", "td", "progress", "details", "summary", "pre", "svg", "path", "polyline", "g", "text",
    }  # fmt: skip
    assert not set(html) & {"\x1b", "\x00", "\u202e"}
    assert words(html).count("alert(1)") == 14 * ("script" in text)


def test_the_curve_stays_in_its_frame_and_has_every_finite_reward(outputs):
    tracker = NotebookTracker(Clock())
    values = [0.5, -1e300, math.nan, 1e300, math.inf, 0.0]
    tracker.start(RunInfo("a run", {}, 40, 31, [(step, step / 31) for step in range(1, 31)]))
    for step, value in enumerate(values, 31):
        tracker.log(step, {"reward": value})
    tracker.close()
    svg = ElementTree.fromstring(outputs[0].states[-1]).find("svg")
    _, _, width, height = map(float, svg.attrib["viewBox"].split())
    dots = svg.findall("path")[1].attrib["d"].removesuffix("h0").removeprefix("M").split("h0M")
    line = svg.find("polyline").attrib["points"].split(" ")
    assert len(dots) == len(line) == 30 + 4
    for point in dots + line:
        x, y = map(float, point.split(","))
        assert 0 <= x <= width
        assert 0 <= y <= height


def test_a_long_run_stays_small_and_a_rising_reward_rises(outputs):
    tracker = NotebookTracker(Clock())
    tracker.start(RunInfo("a run", {}, 20_000, 20_000, [(step, float(step)) for step in range(1, 20_000)]))
    tracker.log(20_000, {"reward": 20_000.0}, [row("p" * 10**6, "start" + "x" * 10**6 + "answer", 0.0)])
    html = outputs[0].states[-1]
    assert len(html) < 50_000
    assert "start" in html
    assert "answer" in html
    line = ElementTree.fromstring(html).find("svg/polyline").attrib["points"].split(" ")
    points = [tuple(map(float, point.split(","))) for point in line]
    assert points == sorted(points, key=lambda point: (point[0], -point[1]))


def test_other_metrics_have_their_own_curves(outputs):
    tracker = NotebookTracker(Clock())
    tracker.start(RunInfo("a run", {}, 10))
    tracker.log(1, {**metrics(1), "entropy": math.nan})
    tracker.log(2, metrics(2))
    tracker.close()
    pictures = ElementTree.fromstring(outputs[0].states[-1]).findall("svg")
    assert [svg.attrib["aria-label"] for svg in pictures] == ["reward by step", "entropy by step", "length by step"]
    assert [svg.attrib["width"] for svg in pictures] == ["100%", "50%", "50%"]
    assert [len(svg.find("polyline").attrib["points"].split(" ")) for svg in pictures] == [2, 1, 2]
    tracker.start(RunInfo("fine-tuning", {}, 10))
    tracker.log(1, {"loss": 2.0, "tokens": 10.0})
    tracker.close()
    (loss,) = ElementTree.fromstring(outputs[1].states[-1]).findall("svg")
    assert loss.attrib["aria-label"] == "loss by step"


def test_redraws_at_most_twice_a_second_and_ends_current(outputs):
    clock = Clock()
    tracker = NotebookTracker(clock)
    tracker.start(RunInfo("a run", {}, 1000))
    for step in range(1, 101):
        clock.now += 0.01
        tracker.log(step, metrics(step))
    assert len(outputs[0].states) <= 4
    assert "100/1000" not in words(outputs[0].states[-1])
    tracker.close()  # an error, say
    assert "100/1000" in words(outputs[0].states[-1])
    drawn = len(outputs[0].states)
    tracker.close()
    assert (len(outputs), len(outputs[0].states)) == (1, drawn)


def test_a_stopped_run_is_marked_and_the_next_has_its_own_output(outputs):
    tracker = NotebookTracker(Clock())
    with tracker:
        tracker.start(RunInfo("first", {}, 5))
        tracker.log(1, metrics(1))
        tracker.note("<slow>")
        tracker.finish({})
    with tracker:
        tracker.start(RunInfo("second", {}, 5))
    first, second = (words(output.states[-1]) for output in outputs)
    assert "stopped · step 1/5" in first
    assert "! <slow>" in first
    assert "second" in second
    assert "slow" not in second
