"""Many trackers at once: each hears everything, and one that fails leaves alone."""

import pytest

from doubles.followed import SAMPLE, Clock, follow, metrics
from policygrad.errors import ConfigError
from policygrad.trackers import CompositeTracker, JsonlTracker, RunInfo, Tracker
from policygrad.trackers.base import choose_sample

CALLS = ("start", "log", "log_evaluation", "note", "phase", "finish", "close")


class Listener(Tracker):
    """Remembers every call; raises at one, if told so."""

    def __init__(self, fails_at: str = "", error: type[BaseException] = OSError, calls: list | None = None) -> None:
        self.calls = [] if calls is None else calls
        self.fails_at, self.error = fails_at, error

    def __getattribute__(self, name: str) -> object:
        if name not in CALLS:
            return super().__getattribute__(name)

        def hear(*args: object) -> None:
            self.calls.append((name, args))
            if name == self.fails_at:
                raise self.error("no connection")

        return hear

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]


class Essential(Listener):
    essential = True


def every_call(tracker: Tracker) -> None:
    tracker.start(RunInfo("a run"))
    tracker.phase("evaluating", 1, 2)
    tracker.log_evaluation(0, {"eval/reward": 0.5})
    tracker.log(1, {"reward": 1.0}, [SAMPLE])
    tracker.note("a remark")
    tracker.finish({"model": "m"})
    tracker.close()


def test_every_tracker_gets_every_call_in_order():
    calls: list = []
    one, two = Listener(calls=calls), Listener(calls=calls)
    every_call(CompositeTracker([one, two]))
    alone = Listener()
    every_call(alone)
    assert calls[::2] == calls[1::2] == alone.calls
    assert {name for name, _ in alone.calls} == set(CALLS)


def test_trackers_close_in_reverse_order():
    order: list[str] = []

    class Named(Tracker):
        def __init__(self, name: str) -> None:
            self.name = name

        def note(self, text: str) -> None:
            order.append(self.name)

        def close(self) -> None:
            order.append(f"close {self.name}")

    with CompositeTracker([Named("a"), Named("b")]) as both:
        both.note("x")
    assert order == ["a", "b", "close b", "close a"]


@pytest.mark.parametrize("method", CALLS)
def test_a_failing_tracker_is_dropped_with_a_warning(method):
    before, failing, after = Listener(), Listener(method), Listener()
    output = rf"Listener\.{method} failed \(OSError: no connection\); the run continues without"
    with pytest.warns(UserWarning, match=output):
        every_call(CompositeTracker([before, failing, after]))
    assert failing.names().count(method) == 1  # asked no more
    assert failing.names().count("close") == 1
    assert failing.names()[-1] == "close"
    alone = Listener()
    every_call(alone)
    for other in (before, after):
        report = [args[0] for name, args in other.calls if name == "note" and args != ("a remark",)]
        assert len(report) == 1
        assert "Listener" in report[0]
        assert [call for call in other.calls if call != ("note", (report[0],))] == alone.calls


def test_all_trackers_may_fail_even_on_the_note_about_another():
    with pytest.warns(UserWarning, match="failed") as caught:
        every_call(CompositeTracker([Listener("log"), Listener("note"), Listener("note")]))
    assert len(caught) == 3


def test_closing_a_failed_tracker_may_fail():
    class Broken(Tracker):
        def note(self, text: str) -> None:
            raise ValueError("no disk")

        def close(self) -> None:
            raise OSError("no file")

    with pytest.warns(
        UserWarning, match=r"Broken.note failed .*no disk.*, and closing it failed too \(OSError: no file\)"
    ):
        CompositeTracker([Broken()]).note("x")


@pytest.mark.parametrize("method", CALLS)
def test_an_essential_tracker_raises_through_nested_fanouts(method):
    others = Listener(), Listener()
    trackers = CompositeTracker([others[0], CompositeTracker([Essential(method)]), others[1]])
    with pytest.raises(OSError, match="no connection"):
        every_call(trackers)
    if method == "close":
        assert [other.names()[-1] for other in others] == ["close", "close"]  # the terminal is given back all the same


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_exceptions_that_end_a_program_propagate(error):
    with pytest.raises(error):
        CompositeTracker([Listener("log", error)]).log(1, {})


def test_a_failed_run_closes_all_trackers_and_keeps_its_error():
    listener = Listener()
    with pytest.raises(ZeroDivisionError) as caught, CompositeTracker([listener, Essential("close")]):
        raise ZeroDivisionError
    assert listener.names() == ["close"]
    assert caught.value.__notes__ == ["closing the trackers failed too: OSError: no connection"]


def test_failing_to_close_an_essential_tracker_raises():
    with pytest.raises(OSError, match="no connection"), CompositeTracker([Essential("close")]):
        pass


def test_equal_trackers_are_distinguished():
    class Equal(Listener):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = None

    good, bad = Equal(), Equal("log")
    trackers = CompositeTracker([good, bad])
    with pytest.warns(UserWarning, match="Equal.log"):
        trackers.log(1, {})
    trackers.log(2, {})
    assert good.names() == ["log", "note", "log"]
    assert bad.names() == ["log", "close"]


@pytest.mark.parametrize("wrong", [Listener, None, "wandb"])
def test_an_object_that_is_not_a_tracker_is_refused(wrong):
    with pytest.raises(ConfigError, match="is not a tracker: pass instances"):
        CompositeTracker([wrong])


def test_no_tracker_and_the_base_class_accept_every_call():
    for tracker in (CompositeTracker(), Tracker(), CompositeTracker([Tracker()])):
        follow(tracker, Clock(), 3)
        every_call(tracker)


def test_run_files_do_not_depend_on_other_trackers(tmp_path):
    with JsonlTracker(tmp_path / "alone") as alone:
        alone.append_metrics(1, metrics(1))
        alone.append_completions(1, [SAMPLE])
        alone.append_metrics(1, {"eval/reward": 0.5})
    with CompositeTracker([Listener("log"), JsonlTracker(tmp_path / "many"), Listener()]) as many:
        with pytest.warns(UserWarning, match=r"Listener\.log"):
            many.log(1, metrics(1), [SAMPLE])
        many.log_evaluation(1, {"eval/reward": 0.5})
    for name in ("metrics.jsonl", "completions.jsonl"):
        assert (tmp_path / "many" / name).read_bytes() == (tmp_path / "alone" / name).read_bytes() != b""


def test_the_displayed_sample_changes_every_step():
    chat = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"})
    rows = [{"prompt": f"p{i}", "completion": f"c{i}", "reward": None} for i in range(3)] + [{"prompt": chat}]
    assert [choose_sample(step, rows).prompt for step in (1, 2, 3, 4)] == [
        "p1",
        "p2",
        "system: Be brief.\nuser: Hi",
        "p0",
    ]
    assert choose_sample(3, []) is None
