"""Checkpoints that survive a killed process, a full disk and a flipped bit; safetensors and JSON, never pickle.

A checkpoint is a folder `step-000123/` with `tensors.safetensors`, `state.json` and `manifest.json` (format version, size
and sha256 of the other two). It is written under a temporary name, every file fsynced, the manifest last, and renamed
into place, so a name `step-N` always means a complete checkpoint. One process writes to a directory; any number may read.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from policygrad.checkpoint.disk import as_others, install, is_full
from policygrad.checkpoint.manifest import check, dump, seal, verify
from policygrad.checkpoint.tree import decode, encode, same_memory
from policygrad.errors import CheckpointError

__all__ = ["Checkpoint", "CheckpointError", "load", "load_latest", "save", "tidy"]

FILES = (STATE, TENSORS) = ("state.json", "tensors.safetensors")
_NAME = re.compile(r"step-(\d{6,})(\.old)?")  # .old: the one that a save of the same step is about to replace


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint. The tensors are on the CPU, contiguous, and own their memory; tied ones are one object."""

    step: int
    tensors: dict[str, Tensor]
    state: dict[str, Any]
    path: Path


def save(directory: Path, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any], *, keep: int = 2) -> Path:
    """Write `directory/step-N`, verify it in place, then delete what is older than the newest `keep`; return its path.

    `directory` is a run's `checkpoints` folder. `state` holds JSON values (and, beyond JSON, tuples, dicts with any plain
    keys, NaN and infinities): all come back exactly. Checkpoints of later steps, from before a run went back, do not count
    towards `keep` and are left alone.
    Raises CheckpointError; whatever goes wrong, the checkpoints that were there stay loadable.
    """
    if step < 0 or keep < 1:
        raise CheckpointError(f"step must be >= 0 and keep >= 1, not step={step} and keep={keep}")
    directory = Path(directory)
    arrays, aliases = _storable(dict(tensors))
    try:
        text = dump({"aliases": aliases, "state": encode(state, "state"), "step": step, "tensors": sorted(arrays)})
    except (TypeError, RecursionError) as error:
        raise CheckpointError(str(error)) from error
    final, temporary = directory / f"step-{step:06d}", directory / f".tmp-step-{step:06d}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _clean(directory)
        _write(temporary, arrays, text)
        install(temporary, final)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(_not_written(final, error)) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    verify(final, FILES)
    with contextlib.suppress(OSError):  # what cannot be deleted now is deleted at the next save
        _clean(directory)
        _prune(directory, step, keep)
    return final


def load_latest(
    directory: Path, *, warn: Callable[[str], None], check: Callable[[Checkpoint], None] = lambda found: None
) -> Checkpoint | None:
    """The newest checkpoint that verifies, or None when there is none; `warn` hears of each damaged one passed over.
    check: raises CheckpointError for one that is intact and lacks something.

    Raises CheckpointError when there are checkpoints but none verifies.
    """
    found = _found(Path(directory))
    for path, before in itertools.zip_longest(found, found[1:]):
        try:
            found_here = load(path)
            check(found_here)
            return found_here
        except CheckpointError as error:
            if before is None:
                raise CheckpointError(
                    f"none of the {len(found)} checkpoint(s) in {directory} is intact (the last: {error}); restore one "
                    "from a backup, or move the directory away to start the run from step 0"
                ) from error
            warn(f"{error}; using the one before it, {before.name}")
    return None


def newest(directory: Path) -> int:
    """The step of the newest checkpoint there, intact or not; 0 without one."""
    found = _found(Path(directory))
    return (_step(found[0]) or 0) if found else 0


def load(path: Path) -> Checkpoint:
    """Verify and read one checkpoint. Raises CheckpointError that names the damaged file and the reason."""
    path = Path(path)
    verify(path, FILES)
    try:
        record = json.loads((path / STATE).read_bytes())
        with safe_open(path / TENSORS, framework="pt") as file:
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (not a dict)
        stored = set(tensors)
        tensors |= {name: tensors[target] for name, target in record["aliases"].items()}
        if odd := set(record.get("tensors", stored)) ^ stored:
            raise CheckpointError(f"{path / TENSORS} is not what {STATE} says: {min(odd)!r} is in one of them only")
        checkpoint = Checkpoint(record["step"], tensors, decode(record["state"]), path)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error!r}") from error
    if _step(path) not in (checkpoint.step, None):
        raise CheckpointError(f"{path / STATE} is of step {checkpoint.step}: rename the folder to that step")
    return checkpoint


def _storable(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Dense contiguous CPU tensors that share no memory, and {name: stored name} for those tied to an earlier one."""
    stored: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[tuple[object, ...], str] = {}
    taken: set[int] = set()
    for name, tensor in tensors.items():
        if name == "__metadata__":
            raise CheckpointError("the tensor name '__metadata__' is reserved by safetensors: rename it")
        if tensor.layout != torch.strided or tensor.is_meta:
            raise CheckpointError(f"tensor {name!r} is sparse or holds no data: make it a dense one to store it")
        known = first.setdefault(same_memory(tensor), name)
        if known != name:
            aliases[name] = known
            continue
        plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        storage = plain.untyped_storage()
        if storage.data_ptr() in taken or storage.nbytes() != plain.nbytes:  # a view: safetensors refuses those
            plain = plain.clone()
        taken.add(storage.data_ptr())
        stored[name] = plain
    return stored, aliases


def _write(folder: Path, tensors: dict[str, Tensor], state: bytes) -> None:
    folder.mkdir()
    try:
        save_file(tensors, folder / TENSORS)
    except (KeyError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"safetensors cannot hold one of the tensors ({error}): convert it first") from error
    (folder / STATE).write_bytes(state)
    as_others(folder)
    seal(folder, FILES)


def _not_written(final: Path, error: Exception) -> str:
    before = [path.name for path in _found(final.parent) if _intact(path)]
    full = is_full(error)
    reason = "the disk is full" if full else str(error)
    kept = f"the previous checkpoint, {before[0]}, is intact" if before else "there is no earlier checkpoint"
    run = final.parent.parent  # its folder
    way_out = f"{'free some space' if full else 'see to the cause'}; --resume {run} goes on from there"
    return f"{final} was not written: {reason}; {kept}: {way_out if before else way_out.partition(';')[0]}"


def _intact(folder: Path) -> bool:
    """The quick checks only, so a few milliseconds for any size."""
    with contextlib.suppress(CheckpointError):
        return bool(check(folder, FILES))
    return False


def _step(path: Path) -> int | None:
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def _found(directory: Path) -> list[Path]:
    """Checkpoint folders, newest first; of one step, the `.old` one comes after the one that replaced it."""
    entries = [p for p in directory.iterdir() if p.is_dir()] if directory.is_dir() else []
    named = [(step, path.suffix != ".old", path) for path in entries if (step := _step(path)) is not None]
    return [path for _, _, path in sorted(named, reverse=True)]


def _remove(folder: Path) -> None:
    """Delete so that a kill midway leaves no half checkpoint under a checkpoint's name."""
    doomed = folder.with_name(f".tmp-delete-{folder.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    os.replace(folder, doomed)
    shutil.rmtree(doomed)


def _clean(directory: Path) -> None:
    """Finish what a killed process began: drop its temporary folders, settle a replacement that was cut short."""
    for path in directory.glob(".tmp-*"):
        shutil.rmtree(path, ignore_errors=True)
    for old in directory.glob("step-*.old"):
        final = old.with_suffix("")
        if _intact(final):
            _remove(old)
        else:
            if final.exists():
                _remove(final)
            os.replace(old, final)


def tidy(directory: Path, step: int, keep: int) -> None:
    """What `save` deletes after checkpoint `step`, where it was killed before it did."""
    with contextlib.suppress(OSError):  # nothing is lost by it, and the next save deletes too
        _prune(directory, step, keep)


def _prune(directory: Path, step: int, keep: int) -> None:
    """Delete the checkpoints older than the newest `keep` intact ones up to `step`, and damaged ones among them."""
    past = [path for path in _found(directory) if (_step(path) or 0) <= step]
    kept = [path for path in past if _intact(path)][:keep]
    for path in past:
        if path not in kept:
            _remove(path)
