"""What a run began with, in every checkpoint, so that going on notices what is another: refused or said, by what it does.

Refused: the files that are trained and measured on, as before and after would be of different things. Said: all that a user may
mean to change, or cannot help (code of one's own, which may have been mended; seed, precision, lengths; versions and the device),
as the run then no longer is, bit for bit, the one that was never stopped.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from policygrad.errors import RunError
from policygrad.tasks.source import digest

PACKAGES = ("policygrad", "torch", "transformers", "reasoning-gym", "peft")
SETTINGS = (
    "seed",
    "prompts_per_step",
    "samples_per_prompt",
    "batch_size",
    "sampling.max_tokens",
    "sampling.temperature",
    "learner.dtype",
    "learner.micro_tokens",
    "sampler.engine",
    "learner.lora",
    "rewards.memory",
)
"""Options, with a dot those of a group; of these, what a configuration has."""
Began = Mapping[str, Mapping[str, Any]]


def began(config: Any, device: str, code: Mapping[str, str] | None = None) -> dict[str, dict[str, Any]]:
    """By kind: files and code by their sha256, settings, versions. code: modules of one's own, loaded by now, and files, by the
    names that the run has for them."""
    data = {name: getattr(config, name, None) for name in ("task", "held_out")}
    directory = config.directory
    return {
        "files": {name: sha for name, path in data.items() if (sha := digest(path, directory))},
        "code": {name: sha for name, place in (code or {}).items() if (sha := _sha(_source(place)))},
        "settings": {name: value for name in SETTINGS if (value := _option(config, name)) is not None},
        "versions": {**{name: found for name in PACKAGES if (found := _version(name))}, "device": device},
    }


def noticed(before: Began, now: Began, config: Any, folder: Path) -> list[str]:
    """What is worth saying of a run that goes on, in words.

    Raises:
        RunError: another task, or other held-out problems, than the run began with.
    """
    files = now["files"]
    for name, sha in before["files"].items():
        if files.get(name) != sha:
            raise RunError(
                f"{getattr(config, name)} is not what the run in {folder} began with: before and after would be of different "
                f"things. Put the old file back, or train anew with --config {folder}/run.toml --output DIR"
            )
    said = []
    own = [name for name, sha in now["code"].items() if before["code"].get(name, sha) != sha]
    if own:
        said.append(
            f"{', '.join(own)} changed since the checkpoint: what was learned or scored before is by the old code"
        )
    for kind, words in (
        ("settings", "set otherwise than at the checkpoint"),
        ("versions", "another than at the checkpoint"),
    ):
        if changes := _changes(before[kind], now[kind]):
            said.append(f"{words}: {', '.join(changes)}; the run goes on, and no longer bit for bit as it would have")
    return said


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    both = [
        name for name in now if name in before
    ]  # an option or a package of another version is none that was changed
    return [f"{name} {before[name]} -> {now[name]}" for name in both if before[name] != now[name]]


def _option(config: Any, name: str) -> Any:
    for word in name.split("."):
        config = getattr(config, word, None)
    return config


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _source(code: str) -> str | None:
    return getattr(sys.modules.get(code), "__file__", code)


def _sha(path: Any) -> str | None:
    """None of what is no file: a task's name, rows, an object."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest() if isinstance(path, str) else None
    except (OSError, ValueError):  # too long for a file name, or a NUL in it
        return None
