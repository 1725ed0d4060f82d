"""Which checkpoints there are in a folder, which of them stay, and how one goes without leaving half of it."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from pathlib import Path

from policygrad.checkpoint.disk import is_full
from policygrad.checkpoint.manifest import check
from policygrad.checkpoint.pieces import TENSORS
from policygrad.errors import CheckpointError

STATE = "state.json"
FILES = (STATE, TENSORS)
"""In every checkpoint, beside its manifest."""
_NAME = re.compile(r"step-(\d{6,})(\.old)?")  # .old: the one that a save of the same step is about to replace


def found_in(directory: Path) -> list[Path]:
    """Checkpoint folders, newest first; of one step, the `.old` one comes after the one that replaced it."""
    entries = [p for p in directory.iterdir() if p.is_dir()] if directory.is_dir() else []
    named = [(step, path.suffix != ".old", path) for path in entries if (step := step_of(path)) is not None]
    return [path for _, _, path in sorted(named, reverse=True)]


def step_of(path: Path) -> int | None:
    """Of a checkpoint's folder, by its name; None for any other."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def intact(folder: Path) -> bool:
    """The quick checks only, so a few milliseconds for any size."""
    with contextlib.suppress(CheckpointError):
        return bool(check(folder, FILES))
    return False


def newest(directory: Path) -> int:
    """The step of the newest checkpoint there, intact or not; 0 without one."""
    found = found_in(Path(directory))
    return (step_of(found[0]) or 0) if found else 0


def not_written(final: Path, error: Exception) -> str:
    """What became of a save, in words, with the way out."""
    before = [path.name for path in found_in(final.parent) if intact(path)]
    full = is_full(error)
    reason = "the disk is full" if full else str(error)
    kept = f"the previous checkpoint, {before[0]}, is intact" if before else "there is no earlier checkpoint"
    run = final.parent.parent  # its folder
    way_out = f"{'free some space' if full else 'see to the cause'}; --resume {run} goes on from there"
    return f"{final} was not written: {reason}; {kept}: {way_out if before else way_out.partition(';')[0]}"


def remove(folder: Path) -> None:
    """Delete so that a kill midway leaves no half checkpoint under a checkpoint's name."""
    doomed = folder.with_name(f".tmp-delete-{folder.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    os.replace(folder, doomed)
    shutil.rmtree(doomed)


def clean(directory: Path) -> None:
    """Finish what a killed process began: drop its temporary folders, settle a replacement that was cut short."""
    for path in directory.glob(".tmp-*"):
        shutil.rmtree(path, ignore_errors=True)
    for old in directory.glob("step-*.old"):
        final = old.with_suffix("")
        if intact(final):
            remove(old)
        else:
            if final.exists():
                remove(final)
            os.replace(old, final)


def tidy(directory: Path, step: int, keep: int, every: int = 1, *, finished: bool = False) -> None:
    """What `save` deletes after checkpoint `step`, where it was killed before it did."""
    with contextlib.suppress(OSError):  # nothing is lost by it, and the next save deletes too
        prune(directory, step, keep, every, finished=finished)


def prune(directory: Path, step: int, keep: int, every: int = 1, *, finished: bool = False) -> None:
    """Delete all checkpoints up to `step` but the newest intact one and the `keep` - 1 before it; damaged ones too.

    Those of every `every` steps come first. A stop leaves one between them, which must not take the place of one that a run
    without the stop keeps: it fills up the number while there are fewer, and goes when the run is finished.
    """
    past = [path for path in found_in(directory) if (step_of(path) or 0) <= step]
    there = [path for path in past if intact(path)]
    regular = [path for path in there[1:] if (step_of(path) or 0) % every == 0]
    between = [] if finished else [path for path in there[1:] if path not in regular]
    kept = [*there[:1], *regular, *between][:keep]
    for path in past:
        if path not in kept:
            remove(path)
