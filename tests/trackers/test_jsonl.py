"""A run's JSON lines, after every kind of stop."""

import errno
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

from policygrad.errors import RunError
from policygrad.trackers import JsonlTracker
from policygrad.trackers.jsonl import RunNote, read_rows, summarise_notes


def lines(path: Path) -> list[dict]:
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text("utf-8").split("\n")[:-1]]


def test_lines_are_strict_json(tmp_path):
    with JsonlTracker(tmp_path / "new" / "run") as files:
        files.append_metrics(
            1, {"reward": 0.1 + 0.2, "kl": math.nan, "grad_norm": math.inf, "tokens": 2**70, "ok": True}
        )
        files.append_metrics(
            2, {"reward": torch.tensor(0.5), "kl": np.float32(0.25), "parts": {"a": [1, (None, -math.inf)]}}
        )
        files.append_completions(
            1, [{"prompt": "2+2", "completion": "4 \ud800\u2028\n\x00 日本", "reward": 1}, {"truncated": False}]
        )
        files.append_completions(2, [])
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


def test_a_line_is_written_immediately(tmp_path):
    files = JsonlTracker(tmp_path)
    files.append_metrics(1, {"reward": 1.0})
    assert len(lines(tmp_path / "metrics.jsonl")) == 1  # before close
    files.close()


@pytest.mark.parametrize("value", [object(), {1, 2}, torch.ones(2), b"bytes"])
def test_a_value_json_cannot_hold_is_named_and_nothing_is_written(tmp_path, value):
    with JsonlTracker(tmp_path) as files:
        with pytest.raises(TypeError, match=r"completions.jsonl: 'parts'.format is a .*pass plain numbers"):
            files.append_completions(1, [{"prompt": "fine"}, {"parts": {"format": value}}])
        assert (tmp_path / "completions.jsonl").read_bytes() == b""


def write(folder: Path, steps: range) -> None:
    with JsonlTracker(folder) as files:
        for step in steps:
            files.append_metrics(step, {"reward": step / 7, "note": "né\n"})
            files.append_note(step, f"step {step}: {10 * step}% were cut off", "truncated")
            files.append_completions(step, [{"prompt": f"p{i}", "completion": "x" * i} for i in range(3)])


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@settings(max_examples=60)
@given(cuts=st.tuples(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1)), data=st.data())
@example(cuts=(1.0, 1.0, 1.0), data=None)
def test_a_log_cut_anywhere_and_resumed_equals_an_uninterrupted_one(tmp_path_factory, cuts, data):
    """The files are cut at any byte; the run goes on from any step whose lines are whole."""
    unbroken, broken = tmp_path_factory.mktemp("unbroken"), tmp_path_factory.mktemp("broken")
    write(unbroken, range(1, 7))
    write(broken, range(1, 6))
    uninterrupted = 5
    for (name, text), cut in zip(sorted(contents(broken).items()), cuts, strict=True):
        size = round(cut * len(text))
        os.truncate(broken / name, size)
        per_step = 3 if name == "completions.jsonl" else 1
        uninterrupted = min(uninterrupted, text[:size].count(b"\n") // per_step)
    step = data.draw(st.integers(0, uninterrupted)) if data else 5
    with JsonlTracker(broken) as files:
        files.truncate_after(step)
    write(broken, range(step + 1, 7))
    assert contents(broken) == contents(unbroken)


def test_every_partial_last_line_is_repaired_on_opening(tmp_path):
    write(tmp_path, range(1, 3))
    text = (tmp_path / "metrics.jsonl").read_bytes()
    end_of_first = text.index(b"\n") + 1
    for size in range(end_of_first, len(text) + 1):
        (tmp_path / "metrics.jsonl").write_bytes(text[:size])
        with JsonlTracker(tmp_path) as files:
            files.append_metrics(9, {})
        expected = text if size >= len(text) - 1 else text[:end_of_first]
        assert (tmp_path / "metrics.jsonl").read_bytes() == expected + b'{"step": 9}\n'


@pytest.mark.parametrize("torn", [b"\x00" * 5000, b'{"step": 3, "x": "' + b"y" * 200_000, b"\xff\xfe", b"[1]"])
def test_unusual_file_ends_are_repaired(tmp_path, torn):
    write(tmp_path, range(1, 3))
    text = (tmp_path / "metrics.jsonl").read_bytes()
    (tmp_path / "metrics.jsonl").write_bytes(text + torn)
    JsonlTracker(tmp_path).close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == text


def test_truncation_counts_and_drops_unreadable_lines(tmp_path):
    write(tmp_path, range(1, 4))
    path = tmp_path / "metrics.jsonl"
    first, *rest = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + b"torn{\n" + b"".join(rest))
    with JsonlTracker(tmp_path) as files:
        assert files.truncate_after(2) == 2 + 3 + 1
        assert files.truncate_after(2) == 0
        assert [row["step"] for row in lines(path)] == [1, 2]
        files.append_metrics(3, {})
    assert [row["step"] for row in lines(path)] == [1, 2, 3]


def test_only_the_end_of_completions_is_read_when_a_run_resumes(tmp_path, monkeypatch):
    """What stays is not parsed, whatever its size; a line may be longer than a block."""
    with JsonlTracker(tmp_path) as files:
        for step in range(1, 9):
            files.log(step, {}, [{"completion": "x" * 50_000 * step}, {"completion": "\r\u2028\n"}])
    before = lines(tmp_path / "completions.jsonl")
    parsed = list[int]()

    def count(line, *place):
        parsed.append(len(line))
        return json.loads(line)

    monkeypatch.setattr("policygrad.trackers.jsonl._usable", count)
    for step, kept in ((8, 8), (5, 5), (9, 5), (-1, 0)):
        parsed.clear()
        with JsonlTracker(tmp_path) as files:
            monkeypatch.setattr(files, "_drop_rows", lambda name, step: 0)
            dropped = files.truncate_after(step)
        after = lines(tmp_path / "completions.jsonl")
        assert after == before[: 2 * kept]
        assert len(parsed) == dropped + (kept > 0)
    with JsonlTracker(tmp_path) as files:
        files.append_completions(1, [{"completion": "again"}])
    assert lines(tmp_path / "completions.jsonl") == [{"step": 1, "completion": "again"}]


def test_truncation_is_all_or_nothing(tmp_path, monkeypatch):
    write(tmp_path, range(1, 4))
    before = (tmp_path / "metrics.jsonl").read_bytes()

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with JsonlTracker(tmp_path) as files:
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(RunError, match="No space"):
            files.truncate_after(1)
        monkeypatch.undo()
        assert (tmp_path / "metrics.jsonl").read_bytes() == before
        files.truncate_after(1)
    assert len(lines(tmp_path / "metrics.jsonl")) == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_names_the_file(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    files = JsonlTracker(tmp_path)
    with pytest.raises(RunError, match=r"metrics.jsonl .*No space .*--resume"):
        files.append_metrics(1, {"reward": 0.5})
    with suppress(OSError):
        files.close()


def noted(folder: Path) -> tuple[RunNote, ...]:
    return summarise_notes(row for _, row in read_rows(folder / "notes.jsonl") if row is not None)


def test_notes_are_counted_by_kind_and_step(tmp_path):
    with JsonlTracker(tmp_path) as files:
        files.append_note(0, "few groups", "few groups", once=True)
        for step in (1, 2, 2, 4):
            files.append_note(step, f"step {step}: {20 * step}% were cut off", "truncated")
        files.append_note(3, "step 3: grad_norm is 9.1, above 4.5", "step 3: grad_norm is 9.1, above 4.5")
        files.append_note(4, "step 4: grad_norm is 30, above 2e+01", "step 4: grad_norm is 30, above 2e+01")
    assert [note.describe() for note in noted(tmp_path)] == [
        "80% were cut off (3 times, last at step 4)",
        "grad_norm is 30, above 2e+01 (2 times, last at step 4)",
        "few groups (before the first step)",
    ]


def test_what_each_process_notes_at_its_start_is_kept_once(tmp_path):
    for step in (0, 5):
        with JsonlTracker(tmp_path) as files:
            files.truncate_after(step)
            files.append_note(step, "few groups", "few groups", once=True)
    assert noted(tmp_path) == (RunNote("few groups", 1, 0),)
