"""The trace of a run: valid Trace Event JSON however the run ends, and of the same run as its metrics."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import policygrad as pg
from doubles.files import rows, same, untimed, weights
from doubles.forked import Forked
from doubles.trackers import Record
from policygrad.models.replica import clone_model
from policygrad.models.tokenizer import Tokenizer, pad_token_id
from policygrad.samplers.base import Generation
from policygrad.samplers.local.sampler import LocalSampler
from policygrad.trackers import RunInfo
from policygrad.trackers.trace import TraceFile, read_events, trace_files
from policygrad.utils.span_recorder import SpanRecorder
from policygrad.utils.spans import span, start_recording, stop_recording

SPAN_KEYS = {"name", "cat", "ph", "ts", "dur", "pid", "tid"}


def events(folder: Path) -> list[dict[str, Any]]:
    return [event for path in trace_files(folder) for event in read_events(path)]


def spans(folder: Path, name: str = "") -> list[dict[str, Any]]:
    return [e for e in events(folder) if e["ph"] == "X" and name in ("", e["name"])]


def end(event: Mapping[str, Any]) -> int:
    return int(event["ts"] + event["dur"])


def check_format(path: Path, *, complete: bool = True) -> None:
    """The JSON Array Format: complete events whose rows nest, metadata, and instant events."""
    text = path.read_text()
    read = json.loads(text if complete else text.rstrip().rstrip(",") + "]")
    for event in read:
        assert event["ph"] in "XMi"
        assert {"name", "ph", "pid", "tid"} <= event.keys()
        if event["ph"] == "X":
            assert event.keys() >= SPAN_KEYS
            assert isinstance(event["ts"], int)
            assert event["dur"] >= 0
    by_row: dict[tuple[int, int], list[Any]] = {}
    for event in read:
        if event["ph"] == "X":
            by_row.setdefault((event["pid"], event["tid"]), []).append(event)
    named = {(e["pid"], e["tid"]) for e in read if e["name"] == "thread_name"}
    assert by_row.keys() <= named
    for row in by_row.values():
        open_spans: list[Any] = []
        for event in sorted(row, key=lambda e: (e["ts"], -e["dur"])):
            while open_spans and end(open_spans[-1]) <= event["ts"]:
                open_spans.pop()
            assert not open_spans or end(event) <= end(open_spans[-1]), (event, open_spans[-1])
            open_spans.append(event)


@pytest.fixture(scope="module")
def traced(small: pg.Run, tmp_path_factory: pytest.TempPathFactory) -> tuple[pg.Run, Path]:
    """A run with everything that has a span of its own."""
    run = replace(small, steps=3, track=("trace",), evaluation=pg.EvaluationConfig(problems=4, samples_per_prompt=1))
    folder = tmp_path_factory.mktemp("traced") / "run"
    pg.train(replace(run, output=str(folder)), display=False)
    return run, folder


def test_the_file_is_valid_and_names_every_phase(traced: tuple[pg.Run, Path]) -> None:
    _, folder = traced
    check_format(folder / "trace.json")
    names = {event["name"] for event in spans(folder)}
    assert names >= {"load", "evaluation", "step", "take rollout", "rollout", "environment reset", "sample", "score"}
    assert names >= {"environment step", "learn", "advantages", "update", "forward and backward", "optimizer step"}
    assert names >= {"publish", "log", "checkpoint", "snapshot", "export"}
    assert [e["args"]["step"] for e in spans(folder, "step")] == [1, 2, 3]
    (sampled, *_) = spans(folder, "sample")
    assert sampled["args"]["gen_ai.usage.output_tokens"] > 0


def test_phases_are_within_their_step_and_add_up_to_its_metrics(traced: tuple[pg.Run, Path]) -> None:
    """`time/rollout` and `time/update` are sums of spans, up to the rounding of each to a microsecond."""
    _, folder = traced
    times = {row["step"]: row for row in rows(folder / "metrics.jsonl") if "time/update" in row}
    for step in spans(folder, "step"):
        inside = [e for e in spans(folder) if e["tid"] == 1 and step["ts"] <= e["ts"] and end(e) <= end(step)]
        seconds = {
            name: sum(e["dur"] for e in inside if e["name"] == name) / 1e6 for name in {e["name"] for e in inside}
        }
        row = times[step["args"]["step"]]
        rollout = seconds["take rollout"] + seconds["lend memory"] + seconds["wait for sampler"]
        assert row["time/rollout"] == pytest.approx(rollout, abs=1e-5)
        assert row["time/update"] == pytest.approx(seconds["learn"] + seconds["publish"], abs=1e-5)
        assert seconds["update"] <= seconds["learn"]
        assert seconds["rollout"] <= seconds["take rollout"]


def test_a_trace_changes_nothing_that_is_trained(traced: tuple[pg.Run, Path], tmp_path: Path) -> None:
    run, folder = traced
    plain = pg.train(replace(run, track=(), output=str(tmp_path / "plain")), display=False)
    assert same(weights(plain.output), weights(folder))
    assert untimed(plain.output / "metrics.jsonl") == untimed(folder / "metrics.jsonl")
    assert rows(plain.output / "completions.jsonl") == rows(folder / "completions.jsonl")
    assert not (plain.output / "trace.json").exists()


class KilledAt(pg.Callback):
    """Ends the process at once, in the middle of a run."""

    def __init__(self, step: int) -> None:
        self._step = step

    def step(self, trainer: Any, step: int, metrics: Mapping[str, float]) -> None:
        if step == self._step:
            os.kill(os.getpid(), signal.SIGKILL)


def train_killed(run: pg.Run) -> None:
    pg.train(run, display=False, callbacks=[KilledAt(3)])


@pytest.mark.full
def test_a_killed_run_leaves_what_happened_and_a_resumed_one_goes_on(
    small: pg.Run, tmp_path: Path, forked: Forked
) -> None:
    folder = tmp_path / "run"
    run = replace(small, steps=4, track=("trace",), output=str(folder))
    assert forked.exit_code(train_killed, run) == -signal.SIGKILL
    text = (folder / "trace.json").read_text()
    assert not text.rstrip().endswith("]")
    check_format(folder / "trace.json", complete=False)
    assert [e["args"]["step"] for e in spans(folder, "step")] == [1, 2]
    with (folder / "trace.json").open("a") as file:
        file.write(',\n{"name":"half an ev')  # as if the kill had come in the middle of a write
    before = spans(folder)
    pg.train(run, resume=folder, display=False)
    check_format(folder / "trace.json")
    assert spans(folder)[: len(before)] == before
    assert [e["args"]["step"] for e in spans(folder, "step")] == [1, 2, 3, 4]
    pg.train(run, resume=folder, display=False)  # of a finished run: the closing bracket is written over
    check_format(folder / "trace.json")


class Meeting(LocalSampler):
    """Samples the rollout of step 2 only once the learner is at work on step 1."""

    def __init__(self, model: nn.Module, tokenizer: Tokenizer, learning: threading.Event) -> None:
        super().__init__(clone_model(model), tokenizer.end_ids, pad_token_id(tokenizer))
        self._learning, self.sampled = learning, threading.Event()

    async def generate(self, requests: Any) -> list[Generation]:
        if requests[0].key[2] == 2:
            assert self._learning.wait(60)
        result = await super().generate(requests)
        if requests[0].key[2] == 2:
            self.sampled.set()
        return result


def test_rollouts_ahead_are_a_track_that_overlaps_learning(small: pg.Run, tmp_path: Path) -> None:
    learning, samplers = threading.Event(), list[Meeting]()

    def make_sampler(model: nn.Module, tokenizer: Tokenizer) -> Meeting:
        samplers.append(Meeting(model, tokenizer, learning))
        return samplers[0]

    def make_learner(model: nn.Module, run: pg.Run) -> Any:
        learner = pg.make_local_learner(model, run)
        update = learner.update

        def update_during_sampling(*arguments: Any) -> Any:
            learning.set()
            assert samplers[0].sampled.wait(60)
            return update(*arguments)

        learner.update = update_during_sampling
        return learner

    run = replace(small, steps=2, max_staleness=1, track=("trace",), output=str(tmp_path / "run"))
    pg.train(run, sampler=make_sampler, learner=make_learner, display=False)
    check_format(tmp_path / "run" / "trace.json")
    ahead = next(e for e in spans(tmp_path / "run", "rollout") if e["args"]["step"] == 2)
    update = spans(tmp_path / "run", "update")[0]
    sampled = next(e for e in spans(tmp_path / "run", "sample") if e["tid"] == ahead["tid"])
    assert ahead["cat"] == "rollout"
    assert ahead["tid"] != update["tid"]
    assert ahead["ts"] < end(update)
    assert end(sampled) < end(update)


@pytest.mark.full
def test_every_rank_has_a_process_in_the_trace(small: pg.Run, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    two = replace(small.learner, world_size=2)
    pg.train(replace(small, steps=2, learner=two, track=("trace",), output=str(folder)), display=False)
    check_format(folder / "trace.json")
    names = {e["args"]["name"]: e["pid"] for e in events(folder) if e["name"] == "process_name"}
    assert names == {"trainer": 1, "rank 1": 2}
    for pid in (1, 2):
        of_rank = [e["name"] for e in spans(folder) if e["pid"] == pid]
        assert of_rank.count("update") == 2
        assert {"optimizer step", "publish" if pid == 2 else "learn"} <= {*of_rank}
    here, there = ([e for e in spans(folder, "update") if e["pid"] == pid] for pid in (1, 2))
    for a, b in zip(here, there, strict=True):  # one clock
        assert a["ts"] < end(b)
        assert b["ts"] < end(a)


def test_an_error_is_marked_in_the_file(small: pg.Run, tmp_path: Path) -> None:
    class Failing(LocalSampler):
        async def generate(self, requests: Any) -> list[Generation]:
            if requests[0].key[2] == 2:
                raise pg.EngineError("no server answers")
            return await super().generate(requests)

    run = replace(small, track=("trace",), output=str(tmp_path / "run"))
    with pytest.raises(pg.EngineError):
        pg.train(run, sampler=lambda m, t: Failing(m, t.end_ids, pad_token_id(t)), display=False)
    check_format(tmp_path / "run" / "trace.json")
    marked = [e["name"] for e in spans(tmp_path / "run") if "no server answers" in e.get("args", {}).get("error", "")]
    assert marked == ["sample", "rollout", "take rollout", "step"]


def test_full_parts_are_closed_and_the_middle_ones_deleted(tmp_path: Path) -> None:
    recorder = start_recording(SpanRecorder())
    tracker = TraceFile(mib=4)
    tracker._part_bytes = 2000
    tracker.start(RunInfo("a run", folder=tmp_path))
    for step in range(1, 101):
        with span("step", step=step):
            pass
        recorder.flush()
    tracker.close()
    stop_recording()
    first, *others = trace_files(tmp_path)
    assert first.name == "trace-1.json"
    assert len(others) == 3
    assert sum(path.stat().st_size for path in trace_files(tmp_path)) < 4 * 2300
    for path in trace_files(tmp_path):
        check_format(path)
    steps = [e["args"]["step"] for e in spans(tmp_path, "step")]
    assert steps[0] == 1
    assert steps[-1] == 100
    assert len(steps) < 100
    assert any("parts of the trace after trace-1.json were deleted" in e["name"] for e in events(tmp_path))


def test_a_full_disk_costs_the_trace_and_not_the_run(
    small: pg.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: TraceFile, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    record = Record()
    original = TraceFile._write
    monkeypatch.setattr(
        TraceFile, "_write", lambda self, data: full(self, data) if b'"step"' in data else original(self, data)
    )
    run = replace(small, steps=3, track=("trace",), output=str(tmp_path / "run"))
    with pytest.warns(UserWarning, match="TraceFile.log failed"):
        assert pg.train(run, display=record).steps == 3
    assert "the run continues without this tracker" in record.said


def test_fine_tuning_is_traced_too(small: pg.Run, tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(f'{{"prompt": "{i} =\\n", "completion": "{i}"}}\n' for i in range(8)))
    config = pg.SFTConfig(
        model=small.model,
        data=str(data),
        epochs=1,
        batch_size=4,
        lr=1e-3,
        track=("trace",),
        output=str(tmp_path / "run"),
    )
    pg.train_sft(config, display=False)
    check_format(tmp_path / "run" / "trace.json")
    assert [e["args"]["step"] for e in spans(tmp_path / "run", "step")] == [1, 2]


def test_a_trace_too_small_for_its_parts_is_refused() -> None:
    with pytest.raises(pg.ConfigError, match="trace_mib must be at least 4, not 1"):
        pg.Run(trace_mib=1)
