"""Seconds of steps with a llama.cpp server beside the learner, and what `policygrad.planning.pipeline` makes of them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import policygrad as pg
from policygrad.planning.pipeline import LearnerSpeed, Lengths, SamplerSpeed, Timeline, enough, simulate
from policygrad.samplers.config import SamplerConfig

MODEL, STEPS = "tiny", 24
SETTINGS = ((0, 0), (1, 0), (2, 0), (0, 8), (1, 8), (2, 8), (4, 8))
"""(staleness, tokens of a piece; 0 = whole answers). The first two without a piece and with one say how fast each is."""
PARALLEL = 16
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Seen:
    """One run."""

    lengths: list[list[int]]
    """Tokens of each completion, per step."""
    draws: list[float]
    """Seconds that the rollout took, where it was alone."""
    updates: list[float]
    publishes: list[float]
    step: float
    """Mean seconds of a step from the second on, evaluations and logs left out."""
    waited: float
    """Share of them in which the learner waited."""
    idle: float
    """Share of them in which nothing was drawn."""


def run(model: str, steps: int, staleness: int, piece: int, folder: Path) -> Seen:
    """Trains, unless that was done before; what was broken off begins anew."""
    output = folder / f"{Path(model).name}-{steps}-steps-staleness-{staleness}-piece-{piece}"
    if not (output / "result.json").exists():
        made = pg.Run(
            algorithm=pg.algorithm("grpo"),
            model=model,
            steps=steps,
            staleness=staleness,
            prompts_per_step=32,
            samples_per_prompt=8,
            sampler=SamplerConfig(engine="llama_cpp", threads=1, parallel=PARALLEL, piece=piece),
            evaluation=pg.Evaluation(problems=0),
            output=str(output),
        )
        pg.train(made, display=True, overwrite=(output / "run.toml").exists())
    metrics, completions = (_rows(output / name) for name in ("metrics.jsonl", "completions.jsonl"))
    return seen([row for row in metrics if row["step"]], completions)


def seen(metrics: Sequence[Row], completions: Sequence[Row]) -> Seen:
    """What the logs of a run say."""
    lengths = [[row["tokens"] for row in completions if row["step"] == m["step"]] for m in metrics]
    draws = [m["time/rollout"] for m in metrics]
    publishes = [m["publication/seconds"] for m in metrics]
    updates = [m["time/update"] - p for m, p in zip(metrics, publishes, strict=True)]
    later = metrics[1:]
    seconds = sum(m["time/rollout"] + m["time/update"] for m in later)
    idle = sum(m.get("time/sampler_idle", m["time/update"]) for m in later)
    waited = sum(m["time/rollout"] for m in later)
    return Seen(lengths, draws, updates, publishes, seconds / len(later), waited / seconds, idle / seconds)


def speeds(alone: Seen) -> tuple[SamplerSpeed, LearnerSpeed]:
    """Of a run in which each waits for the other: the medians, as seconds per token."""
    pairs = zip(alone.lengths, alone.draws, alone.updates, strict=True)
    drawn, learned = zip(*((d / sum(n), u / sum(n)) for n, d, u in pairs), strict=True)
    each = statistics.median(drawn)
    sampler = SamplerSpeed(0.0, each, PARALLEL)  # `each` per token, however many are drawn at a time
    return sampler, LearnerSpeed(0.0, statistics.median(learned), statistics.median(alone.publishes))


def predicted(lengths: Sequence[Lengths], alone: Seen, staleness: int, piece: int) -> Timeline:
    sampler, learner = speeds(alone)
    return simulate(lengths, sampler, learner, staleness, in_flight=piece > 0)


def measure(model: str, steps: int, folder: Path) -> dict[str, Any]:
    """Every setting: what was seen and what was predicted from the run of staleness 0 with the same pieces."""
    runs = {setting: run(model, steps, *setting, folder) for setting in SETTINGS}
    rows = []
    for (staleness, piece), found in runs.items():
        alone = runs[(0, piece)]
        told = predicted(alone.lengths, alone, staleness, piece)
        rows.append(
            {
                "staleness": staleness,
                "piece": piece,
                "seen": {"step": found.step, "learner_idle": found.waited, "sampler_idle": found.idle},
                "predicted": {
                    "step": told.step,
                    "learner_idle": told.learner_idle,
                    "sampler_idle": told.sampler_idle,
                },
            }
        )
    pieces = [row for row in rows if row["piece"]]
    return {
        "model": model,
        "steps": steps,
        "rows": rows,
        "enough": {
            kind: pieces[enough([row[kind]["step"] for row in pieces], within=0.05)]["staleness"]
            for kind in ("seen", "predicted")
        },
        "speeds": {str(piece): [asdict(x) for x in speeds(runs[(0, piece)])] for piece in {p for _, p in SETTINGS}},
    }


def _rows(file: Path) -> list[Row]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
