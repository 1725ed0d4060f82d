"""The folder of a run: a new one, or one to go on with."""

from __future__ import annotations

import re
from pathlib import Path

from policygrad.errors import RunError


def check_resumable(folder: Path, kind: str) -> Path:
    """The folder. Raises RunError when it holds no run of this kind."""
    own = _own(folder, kind)
    if own.is_file():
        return folder
    other = next((name for name in ("train", "sft", "reward-model") if _own(folder, name).is_file()), None)
    hint = (
        f"go on with it by `policygrad {other} --resume {folder}`" if other else "a run's folder is what --output named"
    )
    raise RunError(f"{folder} holds no run of `policygrad {kind}`, there is no {own.name} in it: {hint}")


def _own(folder: Path, kind: str) -> Path:
    return folder / ("run.toml" if kind == "train" else f"{kind}.toml")


def new_folder(output: str | None, kind: str) -> Path:
    """The folder for a new run: `output`, or the next free runs/KIND-N. Raises RunError when there is something in it."""
    if output is not None:
        folder = Path(output)
        if folder.exists() and not folder.is_dir():
            raise RunError(f"{folder} is a file: choose another --output")
        if folder.exists() and any(folder.iterdir()):
            raise RunError(f"{folder} is not empty: go on with it by --resume {folder}, or choose another --output")
        return folder
    name = re.sub(r"[^\w.+-]", "_", kind).lstrip(".") or "run"  # an algorithm of a user's own may be called anything
    number = 1
    while (folder := Path("runs") / f"{name}-{number}").exists():
        number += 1
    return folder
