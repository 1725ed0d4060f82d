"""A run's folder that is begun anew: what the old run left is put aside, deleted once the new one begins, back if it never does."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path

from policygrad.errors import ConfigError, RunError

CONFIGS = ("run.toml", "sft.toml", "reward-model.toml")
"""One of them is in every run's folder."""
LEFT = (
    "lock",
    *CONFIGS,
    "metrics.jsonl",
    "completions.jsonl",
    "checkpoints",
    "model",
    "model-step-*",
    "merged",
    "model.gguf",
    "weights",
    "result.json",
    "tracked.json*",
    "report.html",
    "stacks.txt",
    "tensorboard",
    "wandb",
    ".tmp-*",
)
"""What runs leave, and what is made of them beside it. Anything else in the folder is somebody's own."""
PAGE = "report.html"
"""Of these, what is written anew at any time."""
ASIDE = ".tmp-overwritten"
"""Where the old run waits for the new one to begin."""
_GONE = ".tmp-forgotten"


def check_overwritable(folder: Path) -> None:
    """Raises RunError where there is no run in the folder, or more than a run."""
    if not any((place / name).is_file() for place in (folder, folder / ASIDE) for name in CONFIGS):
        raise RunError(f"{folder} holds no run, so --overwrite deletes nothing in it: choose another --output")
    own = sorted(path.name for path in folder.iterdir() if not any(fnmatch(path.name, name) for name in LEFT))
    if own:
        some = ", ".join([*own[:3], *["…"] * (len(own) > 3)])
        raise RunError(
            f"{folder} holds more than a run leaves ({some}), so --overwrite deletes nothing in it: move that elsewhere, or choose "
            "another --output"
        )


def check_no_run_file(path: Path, option: str) -> None:
    """Refuse to overwrite what a run has written. option: which names the path.

    Raises:
        ConfigError: the path is a file of a run, or lies in one of its folders.
        OSError, ValueError: no file can have this name.
    """
    path = Path(os.path.realpath(path))
    for folder in path.parents:
        first = path.relative_to(folder).parts[0]
        if (
            first != PAGE
            and any(fnmatch(first, name) for name in LEFT)
            and any((folder / c).is_file() for c in CONFIGS)
        ):
            raise ConfigError(
                f"{option} {path} is a file of the run in {folder}, which would be lost: take another name"
            )


def check_begun(folder: Path) -> None:
    """Raises RunError where a run waits that was to be overwritten, by one that was killed before it began."""
    if (aside := folder / ASIDE).is_dir():
        raise RunError(
            f"{folder} was to be overwritten, and the new run was killed before it began: begin it again with --overwrite; or, to "
            f"have the old run back, move what is in {aside} one folder up"
        )


def put_aside(folder: Path, lock: str) -> None:
    """All but the lock goes into a folder of its own; the configuration last, so that what is killed midway is still a run's.
    Where an old run waits there already, what is here is of one that was killed before it began, and goes."""
    aside = folder / ASIDE
    aside.mkdir(exist_ok=True)
    waits = _configured(aside) and _configured(folder)
    for path in _config_last(folder):
        if path.name not in (lock, ASIDE):
            _delete(path) if waits else _move(path, aside)


def put_back(folder: Path) -> None:
    """What was put aside, where anything was."""
    aside = folder / ASIDE
    if aside.is_dir():
        for path in _config_last(aside):
            _move(path, folder)
        aside.rmdir()


def forget(folder: Path) -> None:
    """Deletes what was put aside, at once as far as its name goes; what cannot be deleted is in nobody's way."""
    with suppress(OSError):
        os.replace(folder / ASIDE, folder / _GONE)
    for name in (ASIDE, _GONE):
        shutil.rmtree(folder / name, ignore_errors=True)


def _configured(folder: Path) -> bool:
    return any((folder / name).is_file() for name in CONFIGS)


def _config_last(folder: Path) -> list[Path]:
    return sorted(folder.iterdir(), key=lambda path: path.name in CONFIGS)


def _move(path: Path, into: Path) -> None:
    there = into / path.name
    if there.is_dir() and not there.is_symlink():
        shutil.rmtree(there)
    os.replace(path, there)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
