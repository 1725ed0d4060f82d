"""File names in configurations. Relative names refer to the current folder, or to the configuration's `directory`. A run's own file
gives `directory` relative to the run's folder, so that a run can be resumed from anywhere and moves together with its data.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

from policygrad.environments.registry import code_references
from policygrad.errors import ConfigError, RunError
from policygrad.planning.model_sizes import EMBEDDED_MODELS
from policygrad.rewards.resolve import find_code, resolve_with_paths
from policygrad.rewards.resolve import resolve_paths as resolve_reward_paths

C = TypeVar("C", bound=Any)  # a configuration: a frozen dataclass with `directory`
_WEIGHT = re.compile(r"\s*[\d.]+(?:[eE][+-]?\d+)?\s*\*\s*")
HARBOR_PREFIX = "harbor:"  # as in tasks/sources.py, which takes a while to import
_DATASETS_FILES = ("dataset_info.json", "dataset_dict.json")


def resolve_directory(data: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Return a configuration file's options with an absolute `directory`, which the file gives relative to its own folder.

    `directory` is dropped where it is the current folder, and where the files are missing there but present in the current
    folder, as for a run's folder that was moved alone.

    Raises:
        ConfigError: `directory` cannot be a folder's name.
    """
    value = data.get("directory")
    if not isinstance(value, str):
        return dict(data)
    try:
        directory, current = (file.parent / value).resolve(), Path.cwd().resolve()
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{file}: directory {value[:40]!r} cannot be a folder's name: {error}") from error
    options = {name: value for name, value in data.items() if name != "directory"}
    if directory == current or (not _names_file_in(options, directory) and _names_file_in(options, current)):
        return options
    return options | {"directory": str(directory)}


def relative_to_folder(config: C, folder: Path) -> C:
    """Return the configuration as the file in a run's folder states it: with `directory` relative to that folder."""
    directory, folder = Path(config.directory or ".").resolve(), folder.resolve()
    output = config.output
    if config.directory is not None and output is not None and not Path(output).is_absolute():
        output = _relative_path(directory, folder)
    return replace(config, directory=_relative_path(folder, directory), output=output)


def _relative_path(start: Path, path: Path) -> str:
    try:
        return Path(os.path.relpath(path, start)).as_posix()
    except ValueError:  # another drive
        return str(path)


def is_own_config(config: C, file: Path) -> bool:
    """Return whether a configuration file lies in its own output folder, as a run's own file does."""
    return config.output is not None and Path(config.directory or ".", config.output).resolve() == file.resolve().parent


def with_full_paths(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return options by name, with full paths of the files that exist in their `directory`."""
    directory = data.get("directory")
    return {**data, **_full_paths(data, Path(directory))} if isinstance(directory, str) else dict(data)


def resolve_config_paths(config: C) -> C:
    """Return the configuration with full paths of the files and folders that exist in its directory. All other names stay as they
    are: relative to the current folder, or no files at all (a hub id, a task's name)."""
    if config.directory is None:
        return config
    directory = Path(config.directory).resolve()
    changes = _full_paths({f.name: getattr(config, f.name) for f in fields(config)}, directory)
    reference = getattr(getattr(config, "algorithm", None), "reference", None)
    if reference is not None and reference.models:
        model = None if reference.model is None else _model_path(reference.model, directory)
        named = reference.models.items() if reference.teachers else ()
        teachers = tuple(f"{name}={_model_path(model, directory)}" for name, model in named)
        tokenizer = None if reference.tokenizer is None else _model_path(reference.tokenizer, directory)
        reference = replace(reference, model=model, teachers=teachers, tokenizer=tokenizer)
        changes["algorithm"] = replace(config.algorithm, reference=reference)
    if folder := getattr(getattr(config, "evaluation", None), "benchmark_data", None):
        changes["evaluation"] = replace(config.evaluation, benchmark_data=_path_in(folder, directory))
    return replace(config, **changes)


def find_changed_options(before: C, after: C) -> set[str]:
    """Return the options whose text differs and that do not name the same files either."""
    pairs = ((before, after), (resolve_config_paths(before), resolve_config_paths(after)))
    names = [f.name for f in fields(before) if f.name != "algorithm"]
    return {name for name in names if all(getattr(a, name) != getattr(b, name) for a, b in pairs)}


def resolve_rewards(config: C) -> tuple[Any, ...]:
    """Return the rewards with full paths of the files in `directory`, under the names that the configuration gives them."""
    if config.directory is None:
        return tuple(config.reward)
    directory = Path(config.directory).resolve()
    return tuple(
        resolve_with_paths(r, lambda name: _path_in(name, directory)) if isinstance(r, str) else r
        for r in config.reward
    )


def check_files_exist(config: C) -> None:
    """Raise RunError for data or code that is neither in `directory` nor in the current folder."""
    if config.directory is None:
        return
    from policygrad.tasks.files import DATA_SUFFIXES
    from policygrad.tasks.sources import HUB_PREFIX

    resolved = resolve_config_paths(config)
    files = list[tuple[str, str]]()  # (option, name) of each name that can only be a file's
    for option in ("task", "data", "eval_data"):
        name = getattr(resolved, option, None)
        if isinstance(name, str) and not name.startswith(HUB_PREFIX) and not Path(name).exists():
            parts = [_WEIGHT.sub("", part, count=1).strip() for part in name.split("+")]
            files += [(option, p) for p in parts if p.endswith(DATA_SUFFIXES) and not p.startswith(HUB_PREFIX)]
    for option in ("row_map", "environment"):
        name = getattr(resolved, option, None)
        if isinstance(name, str) and (path := code_references(name)[:1]) and path[0].endswith(".py"):
            files.append((option, path[0]))
    for name in getattr(resolved, "reward", ()):
        if isinstance(name, str):
            files += [("reward", code) for code in find_code(name) if code.endswith(".py")]
    for option, file in files:
        if not Path(file).expanduser().exists() and not glob.glob(file, recursive=True):
            raise RunError(
                f"--{option.replace('_', '-')}: {Path(config.directory) / file}, which the run used, does not exist, and neither "
                f"does {file} in the current folder: --directory DIR says where such files are now"
            )


def _names_file_in(options: Mapping[str, Any], directory: Path) -> bool:
    return any(options[name] != value for name, value in _full_paths(options, directory).items())


def _full_paths(options: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Return the options that may name files, with full paths of those in the directory."""
    paths: dict[str, Any] = {
        name: resolve(value, directory)
        for name, resolve in _RESOLVERS.items()
        if isinstance(value := options.get(name), str)
    }
    if isinstance(rewards := options.get("reward"), (list, tuple)):
        paths["reward"] = type(rewards)(
            resolve_reward_paths(r, lambda n: _path_in(n, directory)) if isinstance(r, str) else r for r in rewards
        )
    return paths


def _path_in(name: str, directory: Path) -> str:
    """Return the full path of a file or folder that exists in the directory; any other name unchanged."""
    path = os.path.join(directory, name)  # not normalised: parts of a mix are distinguished by their names
    return path if name and not name.startswith("~") and os.path.exists(path) else name


def _model_path(name: str, directory: Path) -> str:
    return name if name in EMBEDDED_MODELS else _path_in(name, directory)


def _code_path(name: str, directory: Path) -> str:
    if name.startswith(HARBOR_PREFIX):
        return _harbor_path(name, directory)
    agent, name = ("agent:", name.removeprefix("agent:")) if name.startswith("agent:") else ("", name)
    file, _, attribute = name.rpartition(":")
    return agent + (f"{_path_in(file, directory)}:{attribute}" if file.endswith(".py") else name)


def _data_path(name: str, directory: Path) -> str:
    """Resolve data, or each part of a mix of data."""
    path = _dataset_path(name, directory)
    if path != name:
        return path
    parts = []
    for part in name.split("+"):
        match = _WEIGHT.match(part)
        weight = match[0] if match else ""
        file = part[len(weight) :].strip()
        path = _dataset_path(file, directory)
        parts.append(part if path == file else weight + path)
    return "+".join(parts)


def _dataset_path(name: str, directory: Path) -> str:
    """Resolve a file, a folder or a pattern of files, or a folder that `datasets` saved, possibly followed by a split."""
    from policygrad.tasks.files import is_data_folder

    if name.startswith(HARBOR_PREFIX):
        return _harbor_path(name, directory)
    path = _path_in(name, directory)
    if path != name and (Path(path).is_file() or is_data_folder(name, str(directory))):
        return path
    pattern = os.path.join(glob.escape(str(directory)), name)
    if path == name and glob.has_magic(name) and glob.glob(pattern, recursive=True):
        return pattern
    folder, colon, split = name.partition(":")
    path = _path_in(folder, directory)
    is_dataset = path != folder and any((Path(path) / file).is_file() for file in _DATASETS_FILES)
    return path + colon + split if is_dataset else name


def _harbor_path(name: str, directory: Path) -> str:
    """Resolve the folder of `harbor:FOLDER`, which options may follow."""
    folder, comma, options = name.removeprefix(HARBOR_PREFIX).partition(",")
    return f"{HARBOR_PREFIX}{_path_in(folder, directory)}{comma}{options}"


# Options that may name a file or folder, besides rewards.
_RESOLVERS: dict[str, Callable[[str, Path], str]] = {
    "model": _model_path,
    "tokenizer": _model_path,
    "task": _data_path,
    "data": _data_path,
    "eval_data": _data_path,
    "row_map": _code_path,
    "environment": _code_path,
}
