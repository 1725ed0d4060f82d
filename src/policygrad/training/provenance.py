"""What a run began with, in every checkpoint, so that going on notices what is another: refused or said, by what it does.

Refused: the files that are trained and measured on, as before and after would be of different things. Said: all that a user may
mean to change, or cannot help (code of one's own, which may have been mended; every other option; versions and the device),
as the run then no longer is, bit for bit, the one that was never stopped.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from policygrad.core.algorithm import Algorithm
from policygrad.errors import RunError
from policygrad.tasks.sources import digest_data
from policygrad.training.config.serialization import algorithm_to_dict, format_option

PACKAGES = ("policygrad", "torch", "transformers", "reasoning-gym", "peft")
EXCLUDED_OPTIONS = {
    *(
        "model",
        "tokenizer",
        "trust_remote_code",
        "reward",
        "environment",
        "step_end",
        "output",
        "directory",
        "sampler.folder",
    ),
    *("task", "data", "map", "skip_bad_rows", "decontaminate", "eval/reward", "algorithm.samples_per_prompt"),
}
"""Options that are no settings: files and code, which are compared by what is in them, places, and what another option repeats."""
NON_LEARNING_PREFIXES = (
    "steps",
    "track",
    "checkpoint.",
    "evaluation.",
    "rewards.",
    "sampler.urls",
    "sampler.timeout",
    "sampler.heartbeat",
)
"""How options begin that change nothing of what is learned from a step, but `rewards.memory`."""
Fingerprint = Mapping[str, Mapping[str, Any]]


def fingerprint_run(config: Any, device: str, code: Mapping[str, str] | None = None) -> dict[str, dict[str, Any]]:
    """By kind: files and code by their sha256, settings, versions. code: modules of one's own, loaded by now, and files, by the
    names that the run has for them."""
    data = {name: getattr(config, name, None) for name in ("task", "eval/reward")}
    directory = config.directory
    return {
        "files": {name: sha for name, path in data.items() if (sha := digest_data(path, directory))},
        "code": {name: sha for name, place in (code or {}).items() if (sha := _sha(_source(place)))},
        "settings": dict(_settings(config)),
        "versions": {**{name: found for name in PACKAGES if (found := _version(name))}, "device": device},
    }


def compare_fingerprints(before: Fingerprint, now: Fingerprint, config: Any, folder: Path) -> list[str]:
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
    bitwise = "; the run goes on, and no longer bit for bit as it would have"
    if changes := _changes(before["settings"], now["settings"]):
        learned = any(name == "rewards.memory" or not name.startswith(NON_LEARNING_PREFIXES) for name in changes)
        said.append(f"set otherwise than at the checkpoint: {', '.join(changes.values())}" + bitwise * learned)
    if changes := _changes(before["versions"], now["versions"]):
        said.append(f"another than at the checkpoint: {', '.join(changes.values())}{bitwise}")
    return said


def list_changed_options(before: Fingerprint, now: Fingerprint) -> list[str]:
    """Return each option that is set otherwise than before, as `lr 0.01 -> 0.003`."""
    return [*_changes(before["settings"], now["settings"]).values()]


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """By name. An option or a package that only another version has is none that was changed."""
    both = [name for name in now if name in before and before[name] != now[name]]
    return {name: f"{name} {_shown(before[name])} -> {_shown(now[name])}" for name in both}


def _shown(value: Any) -> str:
    return "none" if value is None else ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)


def _settings(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every option by its name, with a dot those of a group; the algorithm's parts as text, without folders."""
    for f in fields(config):
        name, value = f"{prefix}{f.name}", getattr(config, f.name)
        if name in EXCLUDED_OPTIONS:
            continue
        if isinstance(value, Algorithm):
            parts = {f"{name}.{field}": format_option(part) for field, part in algorithm_to_dict(value).items()}
            yield from (
                (key, re.sub(r"[^\s,=(]*/", "", text)) for key, text in parts.items() if key not in EXCLUDED_OPTIONS
            )
        elif is_dataclass(value):
            yield from _settings(value, f"{name}.")
        else:
            plain = value is None or isinstance(value, str | int | float)
            yield name, value if plain else [*map(str, value)] if isinstance(value, tuple | list) else str(value)


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
