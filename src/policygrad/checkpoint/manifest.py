"""A folder sealed by a manifest: the files that it lists are complete, on the disk, and unchanged since they were written."""

from __future__ import annotations

import hashlib
import json
import math
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from policygrad.errors import CheckpointError
from policygrad.utils.filesystem import fsync_path

FORMAT = 2  # format 1 had the state of an algorithm's parts among their settings
SHARDED_FORMAT = 3  # format 2 with files of several processes
MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 2**20  # more than any manifest has


TENSORS_FILE = "tensors.safetensors"  # tensors that one process has written completely


def shard_name(number: int) -> str:
    """Return the file name of one of several processes, counted from 0."""
    return f"shard-{number:05d}.safetensors"


def dump_json(value: Any) -> bytes:
    """Return strict JSON in its canonical form, so that any changed byte is noticed."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


def seal(folder: Path, names: Iterable[str], shards: Mapping[str, Mapping[str, int | str]] | None = None) -> None:
    """Sync the named files, then write and sync the manifest: format, size in bytes and sha256 of each. Raises OSError.
    `shards`: Entries of files that other processes have written, synced and digested."""
    files = {name: _digest(folder / name) for name in names}
    for name in files:
        fsync_path(folder / name)
    files |= {name: dict(entry) for name, entry in (shards or {}).items()}
    (folder / MANIFEST).write_bytes(dump_json({"files": files, "format": SHARDED_FORMAT if shards else FORMAT}))
    fsync_path(folder / MANIFEST)
    fsync_path(folder)


def check_manifest(folder: Path, names: Iterable[str]) -> dict[str, dict[str, int | str]]:
    """Return the entries of the named files and of shard files, after quick checks: known format, canonical bytes,
    sizes. Raises CheckpointError if a check fails."""
    path = folder / MANIFEST
    try:
        for name in (MANIFEST, *names):
            check_regular_file(folder / name)
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise CheckpointError(f"{path} is damaged: it is larger than any manifest")
        raw = path.read_bytes()
        manifest = json.loads(raw)
        if manifest["format"] not in (FORMAT, SHARDED_FORMAT):
            is_newer = manifest["format"] > SHARDED_FORMAT
            hint = "upgrade" if is_newer else "finish the run with its own version, or train anew from its model"
            raise CheckpointError(
                f"{path} has format {manifest['format']!r} and this version reads {FORMAT} and {SHARDED_FORMAT}: {hint}"
            )
        files: dict[str, dict[str, int | str]] = manifest["files"]
        shards = {shard_name(number) for number in range(len(files) - len(set(names)))}
        is_sharded = manifest["format"] == SHARDED_FORMAT
        if dump_json(manifest) != raw or set(files) != {*names, *shards} or bool(shards) is not is_sharded:
            raise CheckpointError(f"{path} is damaged: it is not as it was written")
        for name in shards:
            check_regular_file(folder / name)
        for name, entry in files.items():
            size = (folder / name).stat().st_size
            if size != entry["bytes"]:
                raise CheckpointError(f"{folder / name} is damaged: {size} bytes instead of {entry['bytes']}")
    except FileNotFoundError as error:
        raise CheckpointError(f"{error.filename} is missing") from error
    except OSError as error:
        raise CheckpointError(f"{error.filename or folder} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error!r}") from error
    return files


def check_regular_file(path: Path) -> None:
    """Raise CheckpointError for a pipe or a device, which may never end; OSError if there is nothing."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise CheckpointError(f"{path} is damaged: it is no regular file")


def verify_files(folder: Path, names: Iterable[str]) -> dict[str, dict[str, int | str]]:
    """Check the manifest and compare every file with its sha256. Raises CheckpointError that names the damaged file."""
    files = check_manifest(folder, names)
    for name, entry in files.items():
        try:
            intact = _digest(folder / name) == entry
        except OSError as error:
            raise CheckpointError(f"{folder / name} cannot be read: {error.strerror}") from error
        if not intact:
            raise CheckpointError(f"{folder / name} is damaged: its sha256 is not the one in {MANIFEST}")
    return files


def _digest(path: Path) -> dict[str, int | str]:
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": file.tell(), "sha256": sha256}


def storage_key(tensor: Tensor) -> tuple[object, ...]:
    """Return a key that is equal for tied tensors: one storage with the same view. Empty tensors have no address but their id."""
    if not tensor.numel() or tensor.is_meta:
        return (id(tensor),)
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.is_conj())


# Nested plain values as strict JSON and back. JSON lacks tuples, keys that are not strings, NaN, infinities and huge integers:
# each is written as a dict with one tag, `{"$tuple": [...]}`; a key that begins with "$" gets one more. Subclasses become the
# plain type.


def encode_json(value: Any, where: str) -> Any:
    """Return `value` as strict JSON; `where` is the path so far. Raises TypeError with the path of an unsupported value."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):  # Python refuses to read or write more than 4300 decimal digits
        return int(value) if value.bit_length() < 4096 else {"$int": hex(value)}
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": str(float(value))}
    if isinstance(value, list | tuple):
        items = [encode_json(item, f"{where}.{i}") for i, item in enumerate(value)]
        return {"$tuple": items} if isinstance(value, tuple) else items
    if isinstance(value, Mapping):
        pairs = [(key, encode_json(item, f"{where}.{key}")) for key, item in value.items()]
        if all(isinstance(key, str) for key, _ in pairs):
            return {f"${key}" if key.startswith("$") else key: item for key, item in pairs}
        return {"$items": [[encode_json(key, f"a key of {where}"), item] for key, item in pairs]}
    plain = "store plain numbers, strings, booleans, None, lists, tuples and dicts instead"
    hint = "put it among the tensors" if isinstance(value, Tensor) else plain
    raise TypeError(f"{where} is a {type(value).__name__}, which JSON cannot hold: {hint}")


def decode_json(value: Any) -> Any:
    """Invert `encode_json`."""
    if isinstance(value, list):
        return [decode_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    tag: str
    content: Any
    tag, content = next(iter(value.items())) if len(value) == 1 else ("", None)
    match tag:
        case "$int":
            return int(content, 16)
        case "$float":
            return float(content)
        case "$tuple":
            return tuple(decode_json(item) for item in content)
        case "$items":
            return {decode_json(key): decode_json(item) for key, item in content}
    return {key.removeprefix("$"): decode_json(item) for key, item in value.items()}
