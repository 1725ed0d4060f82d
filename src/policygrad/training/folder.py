"""The folder of a run: a new one, or, of `sft` and `reward-model`, one to go on with."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from policygrad.errors import RunError
from policygrad.training.config.supervised import Supervised
from policygrad.training.config.toml import load

AnyConfig = TypeVar("AnyConfig", bound=Supervised)


def configured(config: AnyConfig | None, kind: type[AnyConfig], resume: str | Path | None) -> AnyConfig:
    """The configuration given, or that of the run to go on with. Raises RunError for a folder without one."""
    if config is not None:
        return config
    if resume is None:
        return kind()
    check_resumable(Path(resume), kind.kind)
    return load(Path(resume) / f"{kind.kind}.toml", kind())  # type: ignore[type-var]


def check_resumable(folder: Path, kind: str) -> None:
    """Raises RunError when the folder holds no run of this kind."""
    if (folder / f"{kind}.toml").is_file():
        return
    other = next((name for name in ("train", "sft", "reward-model") if _own(folder, name).is_file()), None)
    hint = (
        f"go on with it by `policygrad {other} --resume {folder}`" if other else "a run's folder is what --output named"
    )
    raise RunError(f"{folder} holds no run of `policygrad {kind}`, there is no {kind}.toml in it: {hint}")


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
    number = 1
    while (folder := Path("runs") / f"{kind}-{number}").exists():
        number += 1
    return folder
