"""What a run was measured on and how, from the `run.toml` in its folder: its task, rewards and lengths, and no more of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from policygrad.training.config.allowed import Allowed, check_allowed
from policygrad.training.config.places import located, options_in, read_from
from policygrad.training.config.run import OBJECT, Draft
from policygrad.training.config.toml import from_dict, read

SAME = (
    "task", "map", "skip_bad_rows", "reward", "environment", "environment_timeout", "held_out", "sampling", "seed",
    "trust_remote_code",
)  # fmt: skip
"""Options that mean the same where a model is measured."""
_READ = (*SAME, "evaluation", "rewards", "learner", "directory")


def measured(file: Path, allowed: Allowed) -> tuple[Draft, tuple[str, ...]]:
    """(the run as far as it is measured, with its files wherever they are, and the options that were objects of Python's, which the
    file does not hold).

    Its algorithm is not read, so that parts of one's own need no leave.

    Raises:
        ConfigError: what cannot be read, or code that is not allowed.
    """
    data = {name: value for name, value in read_from(read(file), file).items() if name in _READ}
    objects = tuple(name for name, value in data.items() if _is_object(value))
    data = {name: value for name, value in data.items() if name not in objects}
    if isinstance(data.get("learner"), Mapping):
        data["learner"] = {name: data["learner"][name] for name in ("device", "dtype") if name in data["learner"]}
    check_allowed(options_in(data), file, allowed)
    return located(from_dict(data, Draft(), str(file))), objects


def _is_object(value: Any) -> bool:
    several = value if isinstance(value, list) else [value]
    return any(isinstance(word, str) and word.startswith(OBJECT) for word in several)
