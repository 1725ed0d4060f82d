"""Rewards that are computed while others are still drawn: a run is the same with and without, bit for bit."""

from __future__ import annotations

import math
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import policygrad as pg
from doubles.files import rows, same, untimed, weights
from doubles.stops import AtDecoding
from policygrad.rewards.workers import pool as pools
from policygrad.rewards.workers.pool import IncrementalScoring

MINE = """
import os, zlib

def moody(prompts, completions, answer, **columns):
    what = zlib.crc32(completions[0].encode()) % 31
    if what == 0: os._exit(3)
    if what < 4: raise ValueError("a mood")
    if what < 8: return [float("nan")]
    return [None if what < 12 else float(what % 2)]

def length(prompts, completions, **columns):
    return [len(completions[0]) / 8]
"""


@pytest.fixture
def run(small: pg.Run, tmp_path: Path) -> pg.Run:
    (tmp_path / "mine.py").write_text(MINE)
    return replace(
        small,
        reward=(f"{tmp_path / 'mine.py'}:moody", f"{tmp_path / 'mine.py'}:length*0.5"),
        sampling=pg.SamplingParams(max_tokens=8, decode_rows=16),
        evaluation=pg.EvaluationConfig(problems=3, samples_per_prompt=2, every=2),
        steps=4,
    )


class Looks:
    """Counts the completions that were over before others, and the scorings that began early."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.early, self.scorings = 0, 0
        look, take = IncrementalScoring.add_completions, IncrementalScoring.collect

        def looked(begun: IncrementalScoring, completions: Any) -> None:
            self.early += len(completions)
            look(begun, completions)

        def taken(begun: IncrementalScoring, *args: Any) -> Any:
            self.scorings += 1
            return take(begun, *args)

        monkeypatch.setattr(IncrementalScoring, "add_completions", looked)
        monkeypatch.setattr(IncrementalScoring, "collect", taken)


def trained(run: pg.Run, folder: Path, worth: float, monkeypatch: pytest.MonkeyPatch, **given: Any) -> Path:
    monkeypatch.setattr(pools, "MIN_OVERLAP_SECONDS", worth)
    pg.train(replace(run, output=str(folder)), display=False, **given)
    return folder


def equal(a: Path, b: Path) -> bool:
    return (
        same(weights(a), weights(b))
        and untimed(a / "metrics.jsonl") == untimed(b / "metrics.jsonl")
        and rows(a / "completions.jsonl") == rows(b / "completions.jsonl")
    )


ANY, NONE = 1e-9, math.inf  # seconds that must be hidden


@pytest.mark.full
@pytest.mark.parametrize(("name", "staleness"), [pytest.param("dr_grpo", 0, marks=pytest.mark.full), ("dapo", 1)])
def test_scoring_while_sampling_leaves_the_run_unchanged(
    run: pg.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, staleness: int
) -> None:
    looks = Looks(monkeypatch)
    run = replace(run, algorithm=pg.get_algorithm(name), max_staleness=staleness)
    without = trained(run, tmp_path / "without", NONE, monkeypatch)
    assert looks.scorings == 0
    early = trained(run, tmp_path / "early", ANY, monkeypatch)
    assert looks.scorings >= run.steps
    assert looks.early >= 32 * run.steps
    failed = [row.get("rewards/failed_raised", 0) for row in rows(early / "metrics.jsonl")]
    assert sum(failed) > 0  # or the moods show nothing
    assert equal(without, early)


@pytest.mark.full
def test_resume_after_a_stop_during_scoring_is_bitwise(
    run: pg.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = trained(run, tmp_path / "whole", NONE, monkeypatch)
    looks = Looks(monkeypatch)
    sampler = lambda model, tokenizer: AtDecoding(model, tokenizer, 4, signal.SIGTERM)  # noqa: E731
    broken = trained(run, tmp_path / "broken", ANY, monkeypatch, sampler=sampler)
    assert not (broken / "model").exists()
    assert looks.scorings > 0
    pg.train(resume=broken, allow_code=[str(tmp_path / "mine.py")], display=False)
    assert equal(full, broken)
