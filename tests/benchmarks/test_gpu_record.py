"""What a lent machine is brought, what it writes, and what docs/gpu.md says of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gpu_colocation
import gpu_real_model
import gpu_real_trl
import gpu_record
import measure_gpu
import pieces
import pytest
from gpu_parts import CheckFailedError

from pages import gpu
from policygrad.rewards.math import Gsm8k


def test_pieces_give_the_file_again(tmp_path: Path) -> None:
    file, data = tmp_path / "weights", bytes(range(256)) * 9
    file.write_bytes(data)
    places = pieces.split_file(file, tmp_path / "pieces", 1000)
    assert [x.name for x in places] == ["1", "2", "3"]
    assert max((x / pieces.DATA).stat().st_size for x in places) == 1000
    pieces.join_pieces(tmp_path / "pieces", tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == data


def test_changed_and_missing_pieces_are_named(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"abcdef")
    places = pieces.split_file(file, tmp_path / "pieces", 2)
    (places[1] / pieces.DATA).write_bytes(b"xx")
    with pytest.raises(ValueError, match="bring them again"):
        pieces.join_pieces(tmp_path / "pieces", tmp_path / "again")
    (places[1] / pieces.NOTE).unlink()
    with pytest.raises(ValueError, match="lacks the pieces 2 of 3"):
        pieces.join_pieces(tmp_path / "pieces", tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_a_digest_is_of_the_files_that_a_part_measures(tmp_path: Path) -> None:
    package = tmp_path / gpu_record.PACKAGE
    for name in ("learners/local", "samplers/local"):
        (package / name).mkdir(parents=True)
        (package / name / "a.py").write_text("x = 1")
    before = [gpu_record.digest_code(part, tmp_path) for part in ("learner 16k", "decoding")]
    (package / "samplers/local/a.py").write_text("x = 2")
    after = [gpu_record.digest_code(part, tmp_path) for part in ("learner 16k", "decoding")]
    assert after[0] == before[0]
    assert after[1] != before[1]


def test_every_pattern_of_code_names_files() -> None:
    empty = [name for name in (*gpu_record.CODE, "anything else") if not list(gpu_record.find_code(name))]
    assert empty == []


def test_a_part_that_had_no_time_replaces_no_result(tmp_path: Path) -> None:
    file, new = tmp_path / "gpu.json", tmp_path / "new.json"
    gpu_record.write_part(file, "head", {"result": {"x": 1}})
    gpu_record.write_part(new, "head", {"error": gpu_record.NOT_RUN})
    gpu_record.write_part(new, "resume", {"error": "CheckFailedError: 2"})
    assert gpu_record.merge_results(new, file) == ["head", "resume"]
    parts = json.loads(file.read_text())["parts"]
    assert parts == {"head": {"result": {"x": 1}}, "resume": {"error": "CheckFailedError: 2"}}


def test_a_row_says_when_it_was_measured_and_whether_its_code_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    part = {"result": {"text tokens/s": 5.0}, "date": "2026-12-01", "device": "NVIDIA H200"}
    same = part | {"code": gpu_record.digest_code("learner 16k")}
    failed = {"error": "a | b\nc", "date": "2026-12-02", "device": "NVIDIA H200", "code": "0"}
    parts = {"learner 16k": same, "learner 64k recomputed": part | {"code": "0"}, "out of memory": failed}
    monkeypatch.setattr(gpu, "load", lambda name: {"parts": parts})
    rows = gpu.seen_block().splitlines()
    assert "| 0.6B, texts of 16,384 | – | 5 | – | – | 2026-12-01, H200 |" in rows
    assert any(row.endswith("| 5 | – | – | 2026-12-01, H200; code changed since |") for row in rows)
    assert "| out of memory | failed: a b c | 2026-12-02, H200; code changed since |" in rows
    assert "| pictures | – | not run yet |" in rows


def test_every_measured_row_has_its_date_and_card() -> None:
    parts = gpu_record.read_parts(Path(gpu_record.ROOT) / "docs/results/gpu.json")
    assert all({"date", "device", "commit", "code", "versions"} <= set(part) for part in parts.values())


def test_generated_problems_differ_and_their_answers_are_scored_right() -> None:
    rows = gpu_real_model.make_problems(200, seed=0)
    assert len({row["prompt"][-1]["content"] for row in rows}) == 200
    assert all([turn["role"] for turn in row["prompt"]] == ["user", "assistant"] * 3 + ["user"] for row in rows)
    answers = [row["answer"] for row in rows]
    texts = [f"So #### {x}" for x in answers]
    assert [Gsm8k().score(text, x) for text, x in zip(texts, answers, strict=True)] == [1.0] * 200


CYCLE = ("sleep", "wake weights", "load", "wake kv_cache")


def make_phases(asleep: float, events: tuple[str, ...] = ("start", "load", *CYCLE * 2)) -> list[dict[str, Any]]:
    """What a server notes that holds 3 GiB beside 1 of its own, and `asleep` GiB while it sleeps."""
    used = {"sleep": asleep, "wake weights": 2.0}
    return [{"event": event, "GiB": used.get(event, 4.0)} for event in events]


def test_a_server_that_keeps_its_memory_asleep_is_found() -> None:
    sizes, learner = gpu_colocation.Sizes(1024, 2048), [{"before an update": 1.0}] * 2
    report = gpu_colocation.check_phases("cpu", sizes, learner, make_phases(1.0))
    assert report["held by the server, GiB"] == 3.0
    assert report["server: sleep"] == [1.0, 1.0]
    with pytest.raises(CheckFailedError, match="sleep freed 0 of 3 GiB"):
        gpu_colocation.check_phases("cpu", sizes, learner, make_phases(4.0))
    with pytest.raises(CheckFailedError, match="was asked for start, load"):
        gpu_colocation.check_phases("cpu", sizes, learner, make_phases(1.0, ("start", "load")))


def test_a_group_of_parts_leaves_none_out() -> None:
    grouped = [name for names in measure_gpu.GROUPS.values() for name in names]
    by_themselves = [*gpu_real_model.PARTS, *gpu_real_trl.PARTS]
    assert sorted(grouped + by_themselves) == sorted(measure_gpu.PARTS)


def test_steps_fill_the_time() -> None:
    rows = [{"time/rollout": 9.0, "time/update": 9.0}, {"time/rollout": 0.5, "time/update": 0.7}]
    assert gpu_real_model.choose_steps(rows, "cuda") == gpu_real_model.TRAIN_SECONDS / 1.2
