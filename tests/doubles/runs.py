"""Folders of runs as training writes them, without the training."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from policygrad.trackers import JsonlTracker

ALGORITHM = '[algorithm]\nname = "{name}"\nadvantage = [{{ part = "GroupMean" }}]\nterms = []\ncritic = "none"\n'
GATE = '[algorithm.gate]\npart = "Clip"\nlow = 0.2\n'


def run_folder(
    folder: Path,
    steps: Iterable[tuple[int, Mapping[str, float]]],
    completions: Iterable[tuple[int, Sequence[Mapping[str, Any]]]] = (),
    *,
    name: str = "dapo",
    seed: int = 0,
    lr: float = 0.1,
    result: Mapping[str, Any] | None = None,
) -> Path:
    """A run of `train`. steps: (step, metrics), held-out ones with them. result: None = it is not over."""
    with JsonlTracker(folder) as files:
        for step, metrics in steps:
            files.log(step, metrics)
        for step, rows in completions:
            files.append_completions(step, rows)
    options = f'model = "tiny"\ntask = "embedded"\nsteps = 8\nseed = {seed}\nlr = {lr}\noutput = "{folder}"\n'
    (folder / "run.toml").write_text(options + ALGORITHM.format(name=name) + GATE, encoding="utf-8")
    if result is not None:
        (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")
    return folder


def row(prompt: Any, completion: str, reward: float | None, **more: Any) -> dict[str, Any]:
    """A completion as it stands in completions.jsonl."""
    return {"prompt": prompt, "completion": completion, "reward": reward, "advantage": 0.5, "tokens": 3, **more}
