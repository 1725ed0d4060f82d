"""Checkpoints that survive a killed process, a full disk and a flipped bit; safetensors and JSON, never pickle.

A checkpoint is a folder `step-000123/` with `tensors.safetensors`, `state.json` and `manifest.json` (format version, size and
sha256 of the others). It is written under a temporary name, every file synced, the manifest last, and renamed into place, so a name
`step-N` always means a complete checkpoint. One process writes to a directory; any number may read. If several processes hold the
state, each adds a file of its own (see `shards`).
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
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from policygrad.checkpoint.manifest import (
    TENSORS_FILE,
    check_manifest,
    decode_json,
    dump_json,
    encode_json,
    seal,
    shard_name,
    storage_key,
    verify_files,
)
from policygrad.errors import CheckpointError
from policygrad.utils.filesystem import apply_default_permissions, explain_write_error, install_folder

if TYPE_CHECKING:
    from policygrad.checkpoint.shards import ShardedTensors, ShardFile

STATE = "state.json"
FILES = (STATE, TENSORS_FILE)  # files of every checkpoint besides its manifest
_NAME = re.compile(r"step-(\d{6,})(\.old)?")  # .old: about to be replaced by a save of the same step
_READ_ERRORS = (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError, RecursionError)


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
    """Write `directory/step-N`, verify it, delete old checkpoints as `prune_checkpoints` does, and return its path.
    Raises CheckpointError for whatever goes wrong; existing checkpoints stay loadable.

    Args:
        directory: A run's `checkpoints` folder.
        state: JSON values and, beyond JSON, tuples, dicts with any plain keys, NaN and infinities; all are restored exactly.
        keep: Checkpoints to keep. Those of later steps, from before the run was rewound, neither count nor are deleted.
    """
    writer = CheckpointWriter(directory, step, tensors, state, keep, every=every)
    writer.begin()
    return writer.finish()


class CheckpointWriter:
    """Writes a checkpoint in two steps: `begin` makes `folder`, where others may write shards; `finish` writes the rest."""

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
        """`suffix`: end of the temporary name, unique among processes. Raises CheckpointError if something cannot be stored."""
        if step < 0 or keep < 1:
            raise CheckpointError(f"step must be >= 0 and keep >= 1, not step={step} and keep={keep}")
        self._directory, self._step, self._keep, self._every = Path(directory), step, keep, every
        # Dense contiguous CPU tensors that share no memory; a tied one is stored once, under its first name.
        self._arrays: dict[str, Tensor] = {}
        aliases, first, used_storages = dict[str, str](), dict[tuple[object, ...], str](), set[int]()
        for name, tensor in dict(tensors).items():
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
            if storage.data_ptr() in used_storages or storage.nbytes() != plain.nbytes:  # safetensors refuses views
                plain = plain.clone()
            used_storages.add(storage.data_ptr())
            self._arrays[name] = plain
        self.final = self._directory / f"step-{step:06d}"
        self.folder = self._directory / f".tmp-step-{step:06d}{suffix}"
        try:
            encoded = encode_json(state, "state")
            self._record = {"aliases": aliases, "state": encoded, "step": step, "tensors": sorted(self._arrays)}
            self._text = dump_json(self._record)
        except (TypeError, RecursionError) as error:
            raise CheckpointError(str(error)) from error

    def begin(self) -> None:
        """Make `folder`. Raises CheckpointError."""
        with self._cleanup_on_error():
            self._directory.mkdir(parents=True, exist_ok=True)
            recover_checkpoints(self._directory)
            self.folder.mkdir()

    def finish(self, wait_for_shards: Callable[[], Sequence[ShardFile]] = tuple) -> Path:
        """Write the rest, verify it and rename the folder into place.

        `wait_for_shards` waits until others have written into `folder`, and returns their files, named by their place in the list.

        Raises:
            CheckpointError: It cannot be written, or another could not write.
        """
        with self._cleanup_on_error():
            files = wait_for_shards()
            entries = {shard_name(number): file.entry for number, file in enumerate(files)}
            if files:
                from policygrad.checkpoint.shards import build_shard_index

                self._text = dump_json(self._record | {"shards": build_shard_index(files)})
            try:
                save_file(self._arrays, self.folder / TENSORS_FILE)
            except (KeyError, ValueError, RuntimeError) as error:
                raise CheckpointError(
                    f"safetensors cannot store one of the tensors ({error}): convert it first"
                ) from error
            (self.folder / STATE).write_bytes(self._text)
            apply_default_permissions(self.folder)
            seal(self.folder, FILES, entries)
            install_folder(self.folder, self.final)
        if files:  # each process has computed its sha256 while writing
            check_manifest(self.final, FILES)
        else:
            verify_files(self.final, FILES)
        with contextlib.suppress(OSError):  # what cannot be deleted now is deleted at the next save
            recover_checkpoints(self._directory)
            prune_checkpoints(self._directory, self._step, self._keep, self._every)
        return self.final

    def abandon(self) -> None:
        """Delete what has been written."""
        shutil.rmtree(self.folder, ignore_errors=True)

    @contextlib.contextmanager
    def _cleanup_on_error(self) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError) as error:
            self.abandon()
            intact = [path.name for path in list_checkpoints(self._directory) if is_intact(path)]
            reason, remedy = explain_write_error(error)
            if not intact:
                raise CheckpointError(
                    f"{self.final} was not written: {reason}; there is no earlier checkpoint: {remedy}"
                ) from error
            raise CheckpointError(
                f"{self.final} was not written: {reason}; the previous checkpoint, {intact[0]}, is intact: {remedy}, then "
                f"resume from it with --resume {self._directory.parent}"
            ) from error
        except BaseException:
            self.abandon()
            raise


def load_latest(
    directory: Path,
    *,
    warn: Callable[[str], None],
    check: Callable[[Checkpoint], None] = lambda checkpoint: None,
    keep_on_meta: Callable[[str], bool] = lambda name: False,
) -> Checkpoint | None:
    """Load the newest intact checkpoint; None if there is no checkpoint. Raises CheckpointError if none is intact.

    `warn` is called for each damaged one that is passed over; `check` raises CheckpointError for one that lacks something.
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
    """Verify and read one checkpoint. Raises CheckpointError with the damaged file and the reason.

    Of the tensors whose name satisfies `keep_on_meta`, only shape and dtype are read.
    """
    path = Path(path)
    files = verify_files(path, FILES)
    try:
        record = json.loads((path / STATE).read_bytes())
        with _open_stored(path, record, len(files)) as stored:
            if unknown := set(record.get("tensors", stored.unsharded)) ^ stored.unsharded:
                raise CheckpointError(f"{path / TENSORS_FILE} does not match {STATE}: {min(unknown)!r} is only in one")
            tensors = {n: stored.spec(n) if keep_on_meta(n) else stored.read(n) for n in stored.names}
        tensors |= {name: tensors[target] for name, target in record["aliases"].items()}
        checkpoint = Checkpoint(record["step"], tensors, decode_json(record["state"]), path)
    except _READ_ERRORS as error:
        raise CheckpointError(f"{path} cannot be read: {error!r}") from error
    if parse_step(path) not in (checkpoint.step, None):
        raise CheckpointError(f"{path / STATE} is of step {checkpoint.step}: rename the folder to that step")
    return checkpoint


def open_tensors(path: Path) -> ShardedTensors:
    """Open the tensors of a checkpoint that `load_checkpoint` has verified. Raises CheckpointError if they cannot be read."""
    try:
        num_files = len(check_manifest(path, FILES))
        return _open_stored(path, json.loads((path / STATE).read_bytes()), num_files)
    except _READ_ERRORS as error:
        raise CheckpointError(f"{path} cannot be read: {error!r}") from error


def _open_stored(path: Path, record: Mapping[str, Any], num_files: int) -> ShardedTensors:
    from policygrad.checkpoint.shards import ShardedTensors  # a run that starts reads none

    return ShardedTensors(path, record, num_files - len(FILES))


# The checkpoints in a folder: listing, recovery after a kill, deletion of old ones.


def list_checkpoints(directory: Path) -> list[Path]:
    """Return checkpoint folders, newest first; of one step, the `.old` one comes after the one that replaced it."""
    entries = [p for p in directory.iterdir() if p.is_dir()] if directory.is_dir() else []
    named = [(step, path.suffix != ".old", path) for path in entries if (step := parse_step(path)) is not None]
    return [path for _, _, path in sorted(named, reverse=True)]


def parse_step(path: Path) -> int | None:
    """Return the step of a checkpoint's folder; None for any other name."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def newest_step(directory: Path) -> int:
    """Return the step of the newest checkpoint, intact or not; 0 if there is none."""
    return max((parse_step(path) or 0 for path in list_checkpoints(Path(directory))), default=0)


def is_intact(folder: Path) -> bool:
    """Make the quick checks, which take a few milliseconds for any size."""
    with contextlib.suppress(CheckpointError):
        return bool(check_manifest(folder, FILES))
    return False


def remove_checkpoint(folder: Path) -> None:
    """Delete so that a kill midway leaves no half checkpoint under a checkpoint's name."""
    renamed = folder.with_name(f".tmp-delete-{folder.name}")
    shutil.rmtree(renamed, ignore_errors=True)
    os.replace(folder, renamed)
    shutil.rmtree(renamed)


def recover_checkpoints(directory: Path) -> None:
    """Finish what a killed process began: drop its temporary folders and complete or undo a replacement."""
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
    """Delete what a killed save of checkpoint `step` would have deleted, ignoring errors: the next save tries again."""
    with contextlib.suppress(OSError):
        prune_checkpoints(directory, step, keep, every, finished=finished)


def prune_checkpoints(directory: Path, step: int, keep: int, every: int = 1, *, finished: bool = False) -> None:
    """Delete all checkpoints up to `step` but the newest intact one and the `keep` - 1 before it; damaged ones too.

    Checkpoints at multiples of `every` take precedence. A stop leaves one in between, which must not displace one that a run
    without the stop would keep: it is kept while there are fewer, and deleted when the run is finished.
    """
    past = [path for path in list_checkpoints(directory) if (parse_step(path) or 0) <= step]
    intact = [path for path in past if is_intact(path)]
    regular = [path for path in intact[1:] if (parse_step(path) or 0) % every == 0]
    between = [] if finished else [path for path in intact[1:] if path not in regular]
    retained = [*intact[:1], *regular, *between][:keep]
    for path in past:
        if path not in retained:
            remove_checkpoint(path)
