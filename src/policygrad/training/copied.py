"""A run that goes on in another folder: a copy of what it needs for that, and the run stays as it is."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from policygrad.errors import RunError
from policygrad.trackers.jsonl import writing
from policygrad.training.config.places import written_to
from policygrad.training.config.toml import dumps
from policygrad.training.folder import LOCK, resumed_folder, sealed

LEFT_BEHIND = (
    LOCK,
    ".tmp-*",
    "model",
    "merged",
    "model.gguf",
    "weights",
    "result.json",
    "tracked.json*",
    "wandb",
    "report.html",
)
"""What an end has left, what servers are given, and what trackers know the run by: the copy has its own."""


def copied(run: Path, to: Path, kind: str, config: Any, note: Callable[[str], None]) -> Path:
    """The folder `to`, whole or not there: history and checkpoints of the run's, with this configuration. note: hears what is worth
    saying of the run's folder.

    Raises:
        RunError: there is no such run; another process is at work on it; `to` is not empty, lies within it, or cannot be written.
    """
    with resumed_folder(run, kind, note), writing(to, run):
        if to.exists() and (not to.is_dir() or any(to.iterdir())):
            raise RunError(f"{to} is not empty: --resume {run} would go on there in a copy, so choose another --output")
        if run.resolve() in to.resolve().parents:
            raise RunError(f"{to} is within {run}, of which it would be a copy: choose another --output")
        temporary = to.with_name(f".tmp-{to.name}")
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.copytree(run, temporary, ignore=_left_behind(run))
        file = "run.toml" if kind == "train" else f"{kind}.toml"
        (temporary / file).write_text(sealed(dumps(written_to(config, to))), encoding="utf-8")
        os.replace(temporary, to)
    return to


def _left_behind(run: Path) -> Callable[[str, list[str]], set[str]]:
    def ignored(folder: str, names: list[str]) -> set[str]:
        patterns = LEFT_BEHIND if Path(folder) == run else (".tmp-*",)
        return {name for name in names if any(fnmatch(name, pattern) for pattern in patterns)}

    return ignored


def going_on(resume: str | None, kind: str, config: Any, note: Callable[[str], None] = print) -> str | None:
    """The folder to go on in: the run's own, `resume`, or a copy of it where `config.output` is another. Raises as `copied`."""
    if resume is None or config.output is None or Path(config.output).resolve() == Path(resume).resolve():
        return resume
    return str(copied(Path(resume), Path(config.output), kind, config, note))
