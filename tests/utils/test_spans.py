"""Spans nest by context, get rows that nest too, follow one clock, and cost a run nothing where none is recorded."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from policygrad.utils import spans
from policygrad.utils.span_recorder import MAX_LANES, SpanRecord, SpanRecorder
from policygrad.utils.spans import span, start_recording, stop_recording


class Ticking:
    """A clock that moves by a millisecond with each reading."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        self.now += 1_000_000
        return self.now


@pytest.fixture
def recorder() -> Iterator[SpanRecorder]:
    yield start_recording(SpanRecorder(clock=Ticking(), wall=lambda: 10**18))
    stop_recording()


def by_name(records: list[SpanRecord]) -> dict[str, SpanRecord]:
    return {record.name: record for record in records}


def test_spans_nest_and_say_their_attributes(recorder: SpanRecorder) -> None:
    with span("step", step=3) as outer, span("learn") as inner:
        inner.set(tokens=5)
    records = by_name(recorder.take())
    step, learn = records["step"], records["learn"]
    assert (step.parent, learn.parent, learn.root) == (0, step.id, step.id)
    assert step.start < learn.start <= learn.end <= step.end
    assert (dict(step.attributes), dict(learn.attributes)) == ({"step": 3}, {"tokens": 5})
    assert (step.process, step.track, step.lane, learn.lane) == ("trainer", "main", 0, 0)
    assert outer.seconds == (step.end - step.start) / 1e9
    assert 10**18 <= step.start < 10**18 + 10**9  # of the wall's clock


def test_a_span_begins_a_microsecond_after_its_parent_whatever_the_clock_shows() -> None:
    recorder = start_recording(SpanRecorder(clock=lambda: 5, wall=lambda: 5))
    with span("a"), span("b"), span("c"):
        pass
    stop_recording()
    records = by_name(recorder.take())
    assert [records[name].start // 1000 for name in "abc"] == [0, 1, 2]
    assert all(record.end >= record.start for record in records.values())


def test_concurrent_tasks_get_rows_of_their_own_that_nest(recorder: SpanRecorder) -> None:
    async def call(number: int) -> None:
        with span(f"call {number}"):
            await asyncio.sleep(0)
            with span(f"inner {number}"):
                await asyncio.sleep(0)

    async def run() -> None:
        with span("rollout"):
            await asyncio.gather(*(call(number) for number in range(3)))

    asyncio.run(run())
    records = by_name(recorder.take())
    assert [records[f"call {number}"].lane for number in range(3)] == [0, 1, 2]
    for number in range(3):
        call_record, inner = records[f"call {number}"], records[f"inner {number}"]
        assert (inner.parent, inner.lane) == (call_record.id, call_record.lane)
        assert call_record.parent == inner.root == records["rollout"].id
    for a in records.values():  # in a row, spans are one in the other or apart
        for b in records.values():
            if a.lane == b.lane and a.start < b.start < a.end:
                assert b.end <= a.end


def test_a_thread_is_a_track_and_begins_outside_of_all_spans(recorder: SpanRecorder) -> None:
    def work() -> None:
        with span("sampled ahead"):
            pass

    with span("step"):
        thread = threading.Thread(target=work, name="rollout")
        thread.start()
        thread.join()
    record = by_name(recorder.take())["sampled ahead"]
    assert (record.track, record.parent, record.root) == ("rollout", 0, record.id)


def test_an_error_marks_its_span_and_those_around_it(recorder: SpanRecorder) -> None:
    def fail() -> None:
        with span("outer"):
            with span("fine"):
                pass
            with span("inner"):
                raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fail()
    records = by_name(recorder.take())
    assert {name: record.error for name, record in records.items()} == {
        "fine": "",
        "inner": "ValueError: no",
        "outer": "ValueError: no",
    }


def test_more_concurrent_spans_than_rows_are_counted_and_not_recorded(recorder: SpanRecorder) -> None:
    async def call(ready: asyncio.Event) -> None:
        with span("call"):
            await ready.wait()
            with span("inner"):
                pass

    async def run() -> None:
        ready = asyncio.Event()
        tasks = [asyncio.create_task(call(ready)) for _ in range(MAX_LANES + 5)]
        await asyncio.sleep(0)
        ready.set()
        await asyncio.gather(*tasks)

    asyncio.run(run())
    names = [record.name for record in recorder.take()]
    assert (names.count("call"), names.count("inner")) == (MAX_LANES, MAX_LANES)
    assert recorder.num_dropped == 5


def test_without_a_recorder_a_span_measures_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.perf_counter_ns", Ticking())
    with span("step") as measured:
        pass
    assert measured.seconds == 0.001
    assert not spans.is_recording()
    assert spans.current_span() is None


def test_a_sink_gets_everything_once_and_its_failure_waits_for_the_run(recorder: SpanRecorder) -> None:
    received = list[str]()

    def sink(records: list[SpanRecord]) -> None:
        received.extend(record.name for record in records)
        if "bad" in received:
            raise OSError("full")

    with span("early"):
        pass
    recorder.attach(sink)
    with span("good"):
        pass
    recorder.flush()
    with span("bad"):
        pass
    recorder.flush()  # raises nothing, for any thread may do this
    with span("lost"):
        pass
    recorder.detach(sink)
    assert received == ["early", "good", "bad"]
    with pytest.raises(OSError, match="full"):
        recorder.raise_failure(sink)
    recorder.raise_failure(sink)


def test_spans_of_other_processes_belong_to_the_current_one(recorder: SpanRecorder) -> None:
    remote = SpanRecord("update", 7, 0, 7, 1, 2, "rank 1", "main", 0, {})
    child = SpanRecord("forward", 8, 7, 7, 1, 2, "rank 1", "main", 0, {})
    with span("step"):
        recorder.add([remote, child])
    records = by_name(recorder.take())
    step = records["step"]
    assert (records["update"].parent, records["update"].root) == (step.id, step.id)
    assert (records["forward"].parent, records["forward"].root) == (7, step.id)
