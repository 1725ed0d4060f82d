"""What a soak's runs have left, and what of it does not hold: read off their folders, judged, nothing run."""

from __future__ import annotations

import contextlib
import hashlib
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import policygrad
from policygrad.checkpoint.format import load_latest
from policygrad.errors import CheckpointError

GROWTH = 0.02
"""By how much memory may change, as a share."""
PARTS = 5
"""Of the watched run, whose medians are compared."""
ENOUGH = 10
"""Looks in each part; of fewer a median says nothing, and nothing is judged."""
PHASES = ("starting", "loading", "evaluating", "sampling", "updating", "saving")
"""In which a run is long enough for kills to fall there."""
MANY = 100
"""Kills, of which some must have fallen into each of those."""


def rows(path: Path) -> list[dict[str, Any]]:
    """JSON Lines; the last line may be torn."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def logged(folder: Path) -> int:
    """The last step in a run's log; 0 without one. It reads the file's end only, as it is asked many times a second."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return 0
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 2**16))
        lines = file.read().split(b"\n")[:-1]
    return int(json.loads(lines[-1])["step"]) if lines else 0


def saved(folder: Path) -> int:
    """The step of the newest checkpoint; 0 without one."""
    return max((int(path.name[5:]) for path in folder.glob("checkpoints/step-*") if path.name[5:].isdigit()), default=0)


def unfinished(run: Path) -> set[tuple[str, int]]:
    """What is being written in a run's folder, or was when it was killed."""
    found = set()
    for path in (*run.glob(".tmp-*"), *run.glob("checkpoints/.tmp-*")):
        with contextlib.suppress(OSError):  # it is whole, and has its name
            found.add((path.name, path.stat().st_ino))
    return found


def untimed(found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Metrics without what a clock decides."""
    return [{k: v for k, v in row.items() if "time" not in k and "per_second" not in k} for row in found]


def files(folder: Path) -> set[str]:
    """Of a run, by their names in its folder."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def same_bits(a: Path, b: Path) -> bool:
    """Whether two safetensors files hold the same names, and the same bits under them."""
    one, other = load_file(a), load_file(b)
    return one.keys() == other.keys() and all(
        (one[k].dtype, one[k].shape) == (other[k].dtype, other[k].shape)
        and torch.equal(one[k].contiguous().view(torch.uint8), other[k].contiguous().view(torch.uint8))
        if one[k].dim()
        else torch.equal(one[k], other[k])
        for k in one
    )


def differences(whole: Path, pieces: Path, steps: int) -> list[str]:
    """In what a run that was killed again and again is another than the one that never was; empty: in nothing."""
    found = []
    if odd := files(whole) ^ files(pieces):
        return [f"files that only one of the runs has: {', '.join(sorted(odd)[:5])}"]
    for name in ("model/model.safetensors", f"checkpoints/step-{steps:06d}/tensors.safetensors"):
        if not same_bits(whole / name, pieces / name):
            found.append(f"{name} differs")
    for name in ("metrics.jsonl", "completions.jsonl"):
        one, other = untimed(rows(whole / name)), untimed(rows(pieces / name))
        if one != other:
            line = next((i for i, (a, b) in enumerate(zip(one, other, strict=False), 1) if a != b), "the last")
            found.append(f"{name} differs from line {line} on ({len(one)} and {len(other)} lines)")
    done = [row["step"] for row in rows(pieces / "metrics.jsonl") if "reward" in row]
    if done != list(range(1, steps + 1)):
        found.append(f"not every step is logged once: {len(done)} lines, {len({*done})} steps")
    ends = [json.loads((folder / "result.json").read_text()) for folder in (whole, pieces)]
    odd = {k for k in ends[0] if k not in ("seconds", "peak_memory_mib") and ends[0][k] != ends[1].get(k)}
    return found + [f"result.json differs in {k}" for k in sorted(odd)]


def course(values: Sequence[float]) -> dict[str, float]:
    """What a quantity did after the warm-up, a tenth of the run: medians of its fifths, how far they are apart as a share of the
    least, how much the last is above the first."""
    after = values[max(1, len(values) // 10) :]
    size = len(after) / PARTS
    medians = [statistics.median_low(after[round(i * size) : round((i + 1) * size)]) for i in range(PARTS)]
    apart = (max(medians) - min(medians)) / max(min(medians), 1e-9)
    return {
        "first": medians[0],
        "last": medians[-1],
        "least": min(after),
        "largest": max(after),
        "apart": apart,
        "growth": medians[-1] / max(medians[0], 1e-9) - 1,
    }


def unsteady(courses: Mapping[str, Mapping[str, float]]) -> list[str]:
    """What did not stay as it was: memory by more than 2 %, numbers of things at all."""
    found = []
    for name, seen in courses.items():
        if seen["apart"] > (GROWTH if name.endswith("_mib") else 0.0):
            found.append(f"{name} is not constant: {seen['first']:.1f} at first, {seen['last']:.1f} at last")
    return found


def damaged(run: Path) -> list[str]:
    """What is said of a run's checkpoints by whoever would go on with it; empty: the newest is whole, or there is none yet."""
    said = list[str]()
    try:
        load_latest(run / "checkpoints", warn=said.append)
    except CheckpointError as error:
        said.append(str(error))
    return said


def wrong(line: Mapping[str, Any], before: Sequence[Mapping[str, Any]], every: int, said: Sequence[str]) -> str | None:
    """What a kill has cost that it may not have. every: steps between checkpoints. said: of the checkpoints, as `damaged` does."""
    which = f"kill {line['kill']} ({line['phase']})"
    if line["step"] - line["saved"] > every:
        return f"{which} lost {line['step'] - line['saved']} steps"
    if before and line["saved"] < before[-1]["saved"]:
        return f"{which}: checkpoints went back from {before[-1]['saved']} to {line['saved']}"
    return f"{which} left a checkpoint that is not whole: {said[0]}" if said else None


def missed(phases: Iterable[str], kills: int) -> list[str]:
    """The phases into which none of many kills has fallen, so that nothing is known of them."""
    return [f"no kill fell into: {name}" for name in PHASES if name not in set(phases)] if kills >= MANY else []


def code() -> str:
    """Of the package as it is: what is gone on with in parts has to be the same in all of them."""
    files = sorted(Path(policygrad.__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()[:12]
