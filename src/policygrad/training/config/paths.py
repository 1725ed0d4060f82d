"""Where the files are that a configuration names. Relative names are of the current folder, or of `directory` where it says one; a
run's own file says it, from the run's folder on, so that a run goes on wherever the command is given, and moves with its data.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

from policygrad.errors import ConfigError, RunError
from policygrad.rewards.resolve import find_code, resolve_with_paths
from policygrad.rewards.resolve import resolve_paths as found_reward
from policygrad.tasks.sources import HUB_PREFIX, TABLE_SUFFIXES

C = TypeVar("C", bound=Any)  # a configuration: a frozen dataclass with `directory`
_WEIGHT = re.compile(r"\s*[\d.]+(?:[eE][+-]?\d+)?\s*\*\s*")
_DATA = (".jsonl", ".jsonl.gz", *TABLE_SUFFIXES)
_SAVED = ("dataset_info.json", "dataset_dict.json")


# --- files of options


def resolve_directory(data: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """What a file of options says, with the whole path of its `directory`, which is from the file's own folder on. Without it where
    that is the current folder, and where what the file names is not there but here: a run's folder that was moved alone.

    Raises:
        ConfigError: a directory that can be none.
    """
    said = data.get("directory")
    if not isinstance(said, str):
        return dict(data)
    try:
        directory, here = (file.parent / said).resolve(), Path.cwd().resolve()
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{file}: directory {said[:40]!r} is no folder's name: {error}") from error
    rest = {name: value for name, value in data.items() if name != "directory"}
    if directory == here or (not _has(rest, directory) and _has(rest, here)):
        return rest
    return rest | {"directory": str(directory)}


def relative_to_folder(config: C, folder: Path) -> C:
    """The configuration as the file in a run's folder has it: with its directory, from that folder on."""
    directory, folder = Path(config.directory or ".").resolve(), folder.resolve()
    output = config.output
    if config.directory is not None and output is not None and not Path(output).is_absolute():
        output = _from(directory, folder)
    return replace(config, directory=_from(folder, directory), output=output)


def is_own_config(config: C, file: Path) -> bool:
    """Whether a file of options is the one in the folder that it names: a run's own."""
    return config.output is not None and Path(config.directory or ".", config.output).resolve() == file.resolve().parent


def _from(start: Path, place: Path) -> str:
    try:
        return Path(os.path.relpath(place, start)).as_posix()
    except ValueError:  # another drive
        return str(place)


def with_full_paths(data: Mapping[str, Any]) -> dict[str, Any]:
    """Options by name, with every file that the directory among them has by its whole path."""
    directory = data.get("directory")
    return {**data, **_changes(data, Path(directory))} if isinstance(directory, str) else dict(data)


# --- configurations


def resolve_paths(config: C) -> C:
    """The same with every relative name of a file or folder that is in its directory as the whole path. What is not there stays as
    it is: of the current folder, or no file at all (a hub id, a task's name)."""
    if config.directory is None:
        return config
    directory = Path(config.directory).resolve()
    changes = _changes({f.name: getattr(config, f.name) for f in fields(config)}, directory)
    reference = getattr(getattr(config, "algorithm", None), "reference", None)
    if reference is not None and reference.model is not None:
        there = replace(reference, model=_model(reference.model, directory))
        changes["algorithm"] = replace(config.algorithm, reference=there)
    return replace(config, **changes)


def find_changed_options(before: C, now: C) -> set[str]:
    """Options that are another: neither typed alike, whatever the directory is now, nor the same files."""
    found, there, here = set[str](), resolve_paths(before), resolve_paths(now)
    for f in fields(before):
        pairs = ((before, now), (there, here))
        if f.name != "algorithm" and all(getattr(a, f.name) != getattr(b, f.name) for a, b in pairs):
            found.add(f.name)
    return found


def resolve_rewards(config: C) -> tuple[Any, ...]:
    """The rewards that are asked for: as they are named, or, of a directory, what they name there under the same name."""
    if config.directory is None:
        return tuple(config.reward)
    directory = Path(config.directory).resolve()
    return tuple(
        resolve_with_paths(r, lambda name: _there(name, directory)) if isinstance(r, str) else r for r in config.reward
    )


def check_files_exist(config: C) -> None:
    """Raises RunError for data or code that is neither in the directory nor here."""
    if config.directory is None:
        return
    now = resolve_paths(config)
    for option, file in _files({f.name: getattr(now, f.name) for f in fields(now)}):
        if not Path(file).expanduser().exists():
            raise RunError(
                f"--{option.replace('_', '-')}: there is no {Path(config.directory) / file}, where the run has had it, nor "
                "is it in the current folder: --directory DIR says where such files are now"
            )


def _files(options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(option, name) of what can be nothing but a file."""
    for option in ("task", "data", "eval/reward"):
        name = options.get(option)
        if isinstance(name, str) and not name.startswith(HUB_PREFIX) and not Path(name).exists():
            parts = (_WEIGHT.sub("", part, count=1).strip() for part in name.split("+"))
            yield from ((option, part) for part in parts if part.endswith(_DATA) and not part.startswith(HUB_PREFIX))
    for option in ("map", "environment"):
        name = options.get(option)
        if isinstance(name, str) and (path := name.rpartition(":")[0]).endswith(".py"):
            yield option, path
    for name in options.get("reward", ()):
        if isinstance(name, str):
            yield from (("reward", code) for code in find_code(name) if code.endswith(".py"))


# --- names


def _has(options: Mapping[str, Any], directory: Path) -> bool:
    """Whether a name is one of a file in the directory."""
    return any(options[name] != value for name, value in _changes(options, directory).items())


def _changes(options: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """The options that may name files, those of the directory by their whole paths."""
    found: dict[str, Any] = {
        name: kind(value, directory) for name, kind in _KINDS.items() if isinstance(value := options.get(name), str)
    }
    rewards = options.get("reward")
    if isinstance(rewards, (list, tuple)):
        placed = (found_reward(r, lambda n: _there(n, directory)) if isinstance(r, str) else r for r in rewards)
        found["reward"] = type(rewards)(placed)
    return found


def _there(name: str, directory: Path) -> str:
    """A file or folder of the directory by its whole path; any other name as it is."""
    if not name or name.startswith("~"):
        return name
    try:
        path = os.path.join(directory, name)  # as it is typed: names of parts of a mix are told apart by it
        return path if Path(path).exists() else name
    except (OSError, ValueError):  # too long for a file name, or a NUL in it
        return name


def _model(name: str, directory: Path) -> str:
    return name if name == "tiny" else _there(name, directory)


def _code(name: str, directory: Path) -> str:
    file, _, attribute = name.rpartition(":")
    return f"{_there(file, directory)}:{attribute}" if file.endswith(".py") else name


def _data(name: str, directory: Path) -> str:
    """Data, or each part of a mix of data."""
    if (whole := _saved(name, directory)) != name:
        return whole
    parts = [_part(part, directory) for part in name.split("+")]
    return "+".join(parts)


def _part(part: str, directory: Path) -> str:
    weight = found[0] if (found := _WEIGHT.match(part)) else ""
    name = part[len(weight) :].strip()
    there = _saved(name, directory)
    return part if there == name else weight + there


def _saved(name: str, directory: Path) -> str:
    """A file, or a folder that `datasets` has saved, perhaps with a split behind it."""
    path = _there(name, directory)
    if path != name and Path(path).is_file():
        return path
    folder, colon, split = name.partition(":")
    there = _there(folder, directory)
    return there + colon + split if there != folder and any((Path(there) / kind).is_file() for kind in _SAVED) else name


_KINDS: dict[str, Callable[[str, Path], str]] = {
    "model": _model,
    "tokenizer": _model,
    "task": _data,
    "data": _data,
    "eval/reward": _data,
    "map": _code,
    "environment": _code,
}
"""Options that may name a file or folder, besides rewards."""
