"""The fingerprint of a run's inputs, stored in every checkpoint, so that resuming notices what has changed.

Changed training or evaluation data are refused: before and after would measure different things. Everything else is only noted,
since a user may have changed it on purpose or could not help it: custom code, options, package versions, the device. Such a run no
longer equals, bit for bit, one that never stopped.
"""

from __future__ import annotations

import hashlib
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from policygrad.core.algorithm import Algorithm
from policygrad.errors import RunError
from policygrad.rewards.resolve import find_rubrics
from policygrad.tasks.registry import GENERATED
from policygrad.training.config.paths import resolve_config_paths
from policygrad.training.config.run import Run
from policygrad.training.config.serialization import algorithm_to_dict, format_option
from policygrad.training.config.trust import find_code_references

PACKAGES = ("policygrad", "torch", "transformers", "reasoning-gym", "peft")
EXCLUDED_OPTIONS = {
    *("model", "tokenizer", "trust_remote_code", "reward", "environment", "step_end", "output", "directory"),
    *("task", "data", "row_map", "skip_bad_rows", "fetch_images", "decontaminate", "eval_data"),
    *("sampler.folder", "algorithm.samples_per_prompt"),
}
"""Options that are no settings: files and code, which are compared by content, locations, and repetitions of another option."""
# Prefixes of options that do not affect what a step learns (`rewards.memory` does).
NON_LEARNING_PREFIXES = (
    *("steps", "track", "trace_mib", "metrics_port", "verify", "checkpoint.", "evaluation.", "rewards."),
    *("sampler.urls", "sampler.servers", "sampler.python", "sampler.gpus", "sampler.gpu_memory", "sampler.colocate"),
    *("sampler.env", "sampler.timeout", "sampler.heartbeat", "sampler.start_timeout", "teacher_server."),
)
Fingerprint = Mapping[str, Mapping[str, Any]]


def fingerprint_run(config: Any, device: str, code: Mapping[str, str] | None = None) -> dict[str, dict[str, Any]]:
    """Return the sha256 of data files and code, the settings and the versions.

    Args:
        code: The name that the run has for each imported module or file of custom code → its module or path.
    """
    versions = {}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    data = {name: getattr(config, name, None) for name in ("task", "eval_data")}
    sources = {name: getattr(sys.modules.get(place), "__file__", place) for name, place in (code or {}).items()}
    code_hashes = {}
    for name, source in sources.items():
        with suppress(OSError, ValueError):  # no file: an object, a name that is too long, or one with a NUL in it
            if isinstance(source, str):
                code_hashes[name] = hashlib.sha256(Path(source).read_bytes()).hexdigest()
    return {
        "files": {name: sha for name, path in data.items() if (sha := _digest_data(path, config.directory))},
        "code": code_hashes,
        "settings": dict(_iter_settings(config)),
        "versions": {**versions, "device": device, "cpu": describe_cpu(), "threads": torch.get_num_threads()},
    }


def fingerprint_inputs(run: Run, model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return `fingerprint_run` of reinforcement learning: its code is that of custom parts, rewards and rubrics."""
    resolved = resolve_config_paths(run)
    code = dict(zip(_list_code(run), _list_code(resolved), strict=True))
    return fingerprint_run(resolved, next(model.parameters()).device.type, code)


def code_options(run: Run) -> dict[str, Any]:
    """Return the options that may name custom code."""
    single = {"row_map": run.row_map, "environment": run.environment}
    names = {option: name for option, name in single.items() if isinstance(name, str)}
    return {"algorithm": algorithm_to_dict(run.algorithm), "reward": list(run.reward), **names}


def _list_code(run: Run) -> list[str]:
    """Return a run's modules and files of custom code, and its judges' rubrics."""
    rubrics = (file for name in run.reward if isinstance(name, str) for file in find_rubrics(name))
    return [*find_code_references(code_options(run)), *rubrics]


def _digest_data(name: object, directory: str | None) -> str | None:
    """Return `digest_data` of a run's data; None for a task that generates its examples."""
    if not isinstance(name, str) or name in GENERATED:
        return None
    from policygrad.tasks.sources import digest_data

    return digest_data(name, directory)


def describe_cpu() -> str:
    """Return the CPU's name and the instructions that torch uses on it; rounding depends on both."""
    name = platform.processor() or platform.machine()
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{name} ({torch.backends.cpu.get_cpu_capability()})"


def compare_fingerprints(before: Fingerprint, current: Fingerprint, config: Any, folder: Path) -> list[str]:
    """Return notes about what differs from the run resumed. Raises RunError if the training or evaluation data differ."""
    files = current["files"]
    for name, sha in before["files"].items():
        if files.get(name) != sha:
            raise RunError(
                f"{getattr(config, name)} is not what the run in {folder} started with, so before and after would measure "
                f"different things: restore the old file, or start a new run with --config {folder}/run.toml --output DIR"
            )
    notes = []
    if changed := [name for name, sha in current["code"].items() if before["code"].get(name, sha) != sha]:
        notes.append(f"{', '.join(changed)} changed since the checkpoint; the steps so far used the old code")
    bitwise = "; the run continues, but no longer bit for bit as it would have"
    if changes := _compare(before["settings"], current["settings"]):
        affects_learning = any(n == "rewards.memory" or not n.startswith(NON_LEARNING_PREFIXES) for n in changes)
        notes.append(f"changed since the checkpoint: {', '.join(changes.values())}" + bitwise * affects_learning)
    if changes := _compare(before["versions"], current["versions"]):
        notes.append(f"versions changed since the checkpoint: {', '.join(changes.values())}{bitwise}")
    return notes


def list_changed_options(before: Fingerprint, current: Fingerprint) -> list[str]:
    """Return each changed option, as `lr 0.01 -> 0.003`."""
    return [*_compare(before["settings"], current["settings"]).values()]


def _compare(before: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, str]:
    """Return name → change. Options and packages that only one side has are ignored."""
    names = [name for name in current if name in before and before[name] != current[name]]
    return {name: f"{name} {_format(before[name])} -> {_format(current[name])}" for name in names}


def _format(value: Any) -> str:
    return "none" if value is None else ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)


def _iter_settings(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every option by its dotted name; the algorithm's parts as text, without folders."""
    for f in fields(config):
        name, value = f"{prefix}{f.name}", getattr(config, f.name)
        if name in EXCLUDED_OPTIONS:
            continue
        if isinstance(value, Algorithm):
            for field, part in algorithm_to_dict(value).items():
                if (key := f"{name}.{field}") not in EXCLUDED_OPTIONS:
                    yield key, re.sub(r"[^\s,=(]*/", "", format_option(part))
        elif is_dataclass(value):
            yield from _iter_settings(value, f"{name}.")
        elif isinstance(value, tuple | list):
            yield name, [*map(str, value)]
        else:
            yield name, value if value is None or isinstance(value, str | int | float) else str(value)
