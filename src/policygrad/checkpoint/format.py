"""Checkpoints that survive a killed process, a full disk and a flipped bit; safetensors and JSON, never pickle.

A checkpoint is a folder `step-000123/` with `tensors.safetensors`, `state.json` and `manifest.json` (format version, size
and sha256 of the others). It is written under a temporary name, every file fsynced, the manifest last, and renamed
into place, so a name `step-N` always means a complete checkpoint. One process writes to a directory; any number may read.
Where several processes hold the state, each writes a file of its own beside these (see `pieces`), and one of them the rest.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from policygrad.checkpoint.manifest import (
    check_manifest,
    decode_json,
    dump_json,
    encode_json,
    seal,
    shard_name,
    storage_key,
    verify_files,
)
from policygrad.checkpoint.shards import TENSORS_FILE, ShardedTensors, ShardFile, build_shard_index
from policygrad.errors import CheckpointError
from policygrad.utils.filesystem import apply_default_permissions, install_folder, is_disk_full

# Which checkpoints there are in a folder, which of them stay, and how one goes without leaving half of it.

STATE = "state.json"
FILES = (STATE, TENSORS_FILE)
"""In every checkpoint, beside its manifest."""
_NAME = re.compile(r"step-(\d{6,})(\.old)?")  # .old: the one that a save of the same step is about to replace


def list_checkpoints(directory: Path) -> list[Path]:
    """Checkpoint folders, newest first; of one step, the `.old` one comes after the one that replaced it."""
    entries = [p for p in directory.iterdir() if p.is_dir()] if directory.is_dir() else []
    named = [(step, path.suffix != ".old", path) for path in entries if (step := parse_step(path)) is not None]
    return [path for _, _, path in sorted(named, reverse=True)]


def parse_step(path: Path) -> int | None:
    """Of a checkpoint's folder, by its name; None for any other."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def is_intact(folder: Path) -> bool:
    """The quick checks only, so a few milliseconds for any size."""
    with contextlib.suppress(CheckpointError):
        return bool(check_manifest(folder, FILES))
    return False


def newest_step(directory: Path) -> int:
    """The step of the newest checkpoint there, intact or not; 0 without one."""
    checkpoints = list_checkpoints(Path(directory))
    return (parse_step(checkpoints[0]) or 0) if checkpoints else 0


def describe_save_error(final: Path, error: Exception) -> str:
    """What became of a save, in words, with the way out."""
    before = [path.name for path in list_checkpoints(final.parent) if is_intact(path)]
    full = is_disk_full(error)
    reason = "the disk is full" if full else str(error)
    previous = f"the previous checkpoint, {before[0]}, is intact" if before else "there is no earlier checkpoint"
    run = final.parent.parent  # its folder
    hint = f"{'free some space' if full else 'see to the cause'}; --resume {run} goes on from there"
    return f"{final} was not written: {reason}; {previous}: {hint if before else hint.partition(';')[0]}"


def remove_checkpoint(folder: Path) -> None:
    """Delete so that a kill midway leaves no half checkpoint under a checkpoint's name."""
    doomed = folder.with_name(f".tmp-delete-{folder.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    os.replace(folder, doomed)
    shutil.rmtree(doomed)


def recover_checkpoints(directory: Path) -> None:
    """Finish what a killed process began: drop its temporary folders, settle a replacement that was cut short."""
    for path in directory.glob(".tmp-*"):
        shutil.rmtree(path, ignore_errors=True)
    for old in directory.glob("step-*.old"):
        final = old.with_suffix("")
        if is_intact(final):
            remove_checkpoint(old)
        else:
            if final.exists():
                remove_checkpoint(final)
            os.replace(old, final)


def prune_quietly(directory: Path, step: int, keep: int, every: int = 1, *, finished: bool = False) -> None:
    """What `save` deletes after checkpoint `step`, where it was killed before it did."""
    with contextlib.suppress(OSError):  # nothing is lost by it, and the next save deletes too
        prune_checkpoints(directory, step, keep, every, finished=finished)


def prune_checkpoints(directory: Path, step: int, keep: int, every: int = 1, *, finished: bool = False) -> None:
    """Delete all checkpoints up to `step` but the newest intact one and the `keep` - 1 before it; damaged ones too.

    Those of every `every` steps come first. A stop leaves one between them, which must not take the place of one that a run
    without the stop keeps: it fills up the number while there are fewer, and goes when the run is finished.
    """
    past = [path for path in list_checkpoints(directory) if (parse_step(path) or 0) <= step]
    intact_paths = [path for path in past if is_intact(path)]
    regular = [path for path in intact_paths[1:] if (parse_step(path) or 0) % every == 0]
    between = [] if finished else [path for path in intact_paths[1:] if path not in regular]
    retained = [*intact_paths[:1], *regular, *between][:keep]
    for path in past:
        if path not in retained:
            remove_checkpoint(path)


__all__ = [
    "Checkpoint",
    "CheckpointError",
    "CheckpointWriter",
    "load_checkpoint",
    "load_latest",
    "newest_step",
    "open_tensors",
    "prune_quietly",
    "save_checkpoint",
]


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint. The tensors are on the CPU, contiguous, and own their memory; tied ones are one object."""

    step: int
    tensors: dict[str, Tensor]
    state: dict[str, Any]
    path: Path


def save_checkpoint(
    directory: Path,
    step: int,
    tensors: Mapping[str, Tensor],
    state: Mapping[str, Any],
    *,
    keep: int = 2,
    every: int = 1,
) -> Path:
    """Write `directory/step-N`, verify it in place, then delete all but `keep`, as `keeping.prune` does; return its path.

    `directory` is a run's `checkpoints` folder. `state` holds JSON values (and, beyond JSON, tuples, dicts with any plain
    keys, NaN and infinities): all come back exactly. Checkpoints of later steps, from before a run went back, do not count
    towards `keep` and are left alone.
    Raises CheckpointError; whatever goes wrong, the checkpoints that were there stay loadable.
    """
    saving = CheckpointWriter(directory, step, tensors, state, keep, every=every)
    saving.begin()
    return saving.finish()


class CheckpointWriter:
    """A checkpoint on its way to the disk: `begin` makes `folder`, where others may write shares; `finish` writes the rest."""

    def __init__(
        self,
        directory: Path,
        step: int,
        tensors: Mapping[str, Tensor],
        state: Mapping[str, Any],
        keep: int = 2,
        suffix: str = "",
        every: int = 1,
    ) -> None:
        """As `save`. mark: an end of the temporary name, that no other process takes.

        Raises:
            CheckpointError: what cannot be stored, named.
        """
        if step < 0 or keep < 1:
            raise CheckpointError(f"step must be >= 0 and keep >= 1, not step={step} and keep={keep}")
        self._directory, self._step, self._keep, self._every = Path(directory), step, keep, every
        self._arrays, aliases = _prepare_tensors(dict(tensors))
        self.final, self.folder = (
            self._directory / f"step-{step:06d}",
            self._directory / f".tmp-step-{step:06d}{suffix}",
        )
        try:
            record = {
                "aliases": aliases,
                "state": encode_json(state, "state"),
                "step": step,
                "tensors": sorted(self._arrays),
            }
            self._record, self._text = record, dump_json(record)
        except (TypeError, RecursionError) as error:
            raise CheckpointError(str(error)) from error

    def begin(self) -> None:
        """Raises CheckpointError."""
        with self._cleanup_on_error():
            self._directory.mkdir(parents=True, exist_ok=True)
            recover_checkpoints(self._directory)
            self.folder.mkdir()

    def finish(self, wait_for_shards: Callable[[], Sequence[ShardFile]] = tuple) -> Path:
        """written: waits for what others write into `folder`, each under the name of its place in the list.

        Raises:
            CheckpointError: it cannot be written, or another could not.
        """
        with self._cleanup_on_error():
            shares = wait_for_shards()
            entries = {shard_name(number): share.entry for number, share in enumerate(shares)}
            if shares:
                self._text = dump_json(self._record | {"spread": build_shard_index(shares)})
            _write_files(self.folder, self._arrays, self._text, entries)
            install_folder(self.folder, self.final)
        if shares:  # each has taken its sha256 from what it wrote
            check_manifest(self.final, FILES)
        else:
            verify_files(self.final, FILES)
        with contextlib.suppress(OSError):  # what cannot be deleted now is deleted at the next save
            recover_checkpoints(self._directory)
            prune_checkpoints(self._directory, self._step, self._keep, self._every)
        return self.final

    def abandon(self) -> None:
        """Takes away what is written so far."""
        shutil.rmtree(self.folder, ignore_errors=True)

    @contextlib.contextmanager
    def _cleanup_on_error(self) -> Iterator[None]:
        """What fails leaves no folder, and says what is left."""
        try:
            yield
        except (OSError, SafetensorError) as error:
            self.abandon()
            raise CheckpointError(describe_save_error(self.final, error)) from error
        except BaseException:
            self.abandon()
            raise


def load_latest(
    directory: Path,
    *,
    warn: Callable[[str], None],
    check: Callable[[Checkpoint], None] = lambda checkpoints: None,
    keep_on_meta: Callable[[str], bool] = lambda name: False,
) -> Checkpoint | None:
    """The newest checkpoint that verifies, or None when there is none; `warn` hears of each damaged one passed over.
    check: raises CheckpointError for one that is intact and lacks something. leave: as for `load`.

    Raises CheckpointError when there are checkpoints but none verifies.
    """
    checkpoints = list_checkpoints(Path(directory))
    for path, before in itertools.zip_longest(checkpoints, checkpoints[1:]):
        try:
            loaded = load_checkpoint(path, keep_on_meta)
            check(loaded)
            return loaded
        except CheckpointError as error:
            if before is None:
                raise CheckpointError(
                    f"none of the {len(checkpoints)} checkpoint(s) in {directory} is intact (the last: {error}); restore one "
                    "from a backup, or move the directory away to start the run from step 0"
                ) from error
            warn(f"{error}; using the one before it, {before.name}")
    return None


def load_checkpoint(path: Path, keep_on_meta: Callable[[str], bool] = lambda name: False) -> Checkpoint:
    """Verify and read one checkpoint. leave: whether a tensor stays where it is, by its name; its shape and kind stand for it, on
    the meta device. Raises CheckpointError that names the damaged file and the reason."""
    path = Path(path)
    files = verify_files(path, FILES)
    try:
        record = json.loads((path / STATE).read_bytes())
        with ShardedTensors(path, record, len(files) - len(FILES)) as pieces:
            stored = pieces.unsharded
            if odd := set(record.get("tensors", stored)) ^ stored:
                raise CheckpointError(
                    f"{path / TENSORS_FILE} is not what {STATE} says: {min(odd)!r} is in one of them only"
                )
            tensors = {name: pieces.spec(name) if keep_on_meta(name) else pieces.read(name) for name in pieces.names}
        tensors |= {name: tensors[target] for name, target in record["aliases"].items()}
        checkpoint = Checkpoint(record["step"], tensors, decode_json(record["state"]), path)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error!r}") from error
    if parse_step(path) not in (checkpoint.step, None):
        raise CheckpointError(f"{path / STATE} is of step {checkpoint.step}: rename the folder to that step")
    return checkpoint


def open_tensors(path: Path) -> ShardedTensors:
    """The tensors of a checkpoint that `load` has verified, to read boxes of them.

    Raises:
        CheckpointError: what cannot be read.
    """
    try:
        shares = len(check_manifest(path, FILES)) - len(FILES)
        return ShardedTensors(path, json.loads((path / STATE).read_bytes()), shares)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error!r}") from error


def _prepare_tensors(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Dense contiguous CPU tensors that share no memory, and {name: stored name} for those tied to an earlier one."""
    stored: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[tuple[object, ...], str] = {}
    used_storages: set[int] = set()
    for name, tensor in tensors.items():
        if name == "__metadata__":
            raise CheckpointError("the tensor name '__metadata__' is reserved by safetensors: rename it")
        if tensor.layout != torch.strided or tensor.is_meta:
            raise CheckpointError(f"tensor {name!r} is sparse or holds no data: make it a dense one to store it")
        original = first.setdefault(storage_key(tensor), name)
        if original != name:
            aliases[name] = original
            continue
        plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        storage = plain.untyped_storage()
        if storage.data_ptr() in used_storages or storage.nbytes() != plain.nbytes:  # a view: safetensors refuses those
            plain = plain.clone()
        used_storages.add(storage.data_ptr())
        stored[name] = plain
    return stored, aliases


def _write_files(
    folder: Path, tensors: dict[str, Tensor], state: bytes, shares: Mapping[str, Mapping[str, int | str]]
) -> None:
    try:
        save_file(tensors, folder / TENSORS_FILE)
    except (KeyError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"safetensors cannot hold one of the tensors ({error}): convert it first") from error
    (folder / STATE).write_bytes(state)
    apply_default_permissions(folder)
    seal(folder, FILES, shares)
