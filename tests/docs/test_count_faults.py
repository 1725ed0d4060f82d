"""scripts/stress_checkpoints.py: each fault once on the real path, and that what does not hold is counted and said."""

from __future__ import annotations

import errno
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import stress_checkpoints as count_faults
import stress_checkpoints as disk_faults
from pages.reliability import counted_section
from policygrad.checkpoint import format
from policygrad.checkpoint import format as checkpoint

CONTENT: disk_faults.Content = {"w": torch.arange(64.0), "step": torch.tensor(1)}, {"a": [1, "two"]}


@pytest.mark.full
def test_every_call_is_killed_and_refused_and_all_of_it_holds(tmp_path: Path) -> None:
    killed = disk_faults.kills(CONTENT, tmp_path, times=1)
    failed = disk_faults.errors(CONTENT, tmp_path)
    assert (killed["wrong"], failed["wrong"]) == ([], [])
    assert killed["count"] > 40
    assert failed["count"] == len(disk_faults.ERRORS) * killed["count"]  # the same calls
    assert failed["kinds"][0] == "ENOSPC"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.full
def test_a_save_in_place_does_not_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the promise is for: a save that first takes the old checkpoint away is found."""

    def bare(directory: Path, step: int, content: disk_faults.Content, mark: int) -> None:
        for old in format.list_checkpoints(directory):
            format.remove_checkpoint(old)
        checkpoint.save_checkpoint(directory, step, content[0], content[1] | {"mark": mark}, keep=1)

    monkeypatch.setattr(disk_faults, "save", bare)
    assert "neither the one before nor this one" in " ".join(disk_faults.kills(CONTENT, tmp_path, times=1)["wrong"])
    output = disk_faults.errors(CONTENT, tmp_path)["wrong"]
    assert any("no CheckpointError" in text for text in output)


def test_bits_are_turned_and_turned_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert disk_faults.flips(CONTENT, tmp_path, 30) == {
        "count": 30,
        "files": ["manifest.json", "state.json", "tensors.safetensors"],
        "wrong": [],
    }
    load = checkpoint.load_checkpoint
    blind = load(tmp_path / "flips" / "step-000001")
    monkeypatch.setattr(checkpoint, "load_checkpoint", lambda path: blind)
    assert len(disk_faults.flips(CONTENT, tmp_path / "blind", 30)["wrong"]) == 30


def test_an_error_is_raised_once_and_the_functions_are_put_back(tmp_path: Path) -> None:
    disk_faults.save(tmp_path, 1, CONTENT, 1)
    before = disk_faults.calls_of_a_save(lambda: None)
    disk_faults.put(before)
    assert disk_faults.failed_save(tmp_path, 2, CONTENT, 1, errno.EIO) == (True, "")
    assert disk_faults.failed_save(tmp_path, 2, CONTENT, 10_000, errno.EIO) == (False, "")
    assert before["fsync"] is disk_faults.os.fsync


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_a_killed_fine_tuning_is_compared_and_what_differs_is_said(tmp_path: Path) -> None:
    argv = ["sft", "--data", str(count_faults.written("sft", tmp_path)), "--batch-size", "125", "--epochs", "1"]
    argv += ["--checkpoint.every", "1"]
    full, pieces = tmp_path / "whole", tmp_path / "pieces"
    assert count_faults.lived(argv, pieces, 0.5)[1] in ("starting", "in the kernel")  # on a busy machine
    assert count_faults.lived(argv, pieces, None)[1] is None
    assert count_faults.lived(argv, full, None)[1] is None
    assert count_faults.differing(full, pieces) == []
    log = pieces / "metrics.jsonl"
    rows = [json.loads(line) | {"loss": 0.0} for line in log.read_text().splitlines()]
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert count_faults.differing(full, pieces) == ["pieces: metrics.jsonl differs"]
    (pieces / "further").touch()
    assert "only one of the runs has: further" in count_faults.differing(full, pieces)[0]
    with pytest.raises(SystemExit, match=r"ended with exit code 2: see .*pieces-2\.log"):
        count_faults.lived(["sft", "--data", str(tmp_path / "nowhere.jsonl")], tmp_path / "pieces-2", None)


def test_the_page_says_what_did_not_hold() -> None:
    about = {"made_by": "python scripts/stress_checkpoints.py", "machine": "a machine"}
    result: dict[str, Any] = {
        "kills": {"count": 60, "wrong": ["killed at call 3 of a save: it is gone"], **about},
        "supervised": {"count": 2, "phases": {"updating": 2}, "wrong": [], **about},
    }
    text = counted_section(result)
    assert "| 60 | 1 |" in text
    assert "(updating 2)" in text
    assert "**Broken:** killed at call 3 of a save: it is gone." in text
    assert text.count("`python scripts/stress_checkpoints.py`") == 1
    assert "Not measured yet" in counted_section(None)
