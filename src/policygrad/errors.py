"""Every refusal that is meant for a user, as one tree: the message names the file, line, option or function, and the way out.

Each child is also of the built-in class that older code catches.
"""

from __future__ import annotations

from typing import ClassVar


def install_command(extra: str) -> str:
    """Return the command that installs an extra of pyproject.toml, and where to run it.

    The package is on no index, so only a clone (or a wheel's file, docs/extras.md) can be named. Every message takes it from here.
    """
    return f"pip install '.[{extra}]' in a clone of policygrad"


class PolicygradError(Exception):
    """What was asked cannot be done, and the message says why. Anything else that is raised is a bug."""

    code: ClassVar[int] = 2
    """The command's exit code."""


class ConfigError(PolicygradError, ValueError):
    """Options, files of options, or parts of an algorithm that make no sense, alone or together."""


class DataError(PolicygradError, ValueError):
    """Prompts, tasks or data files that cannot be read or used."""


class ModelError(PolicygradError, ValueError):
    """A model, tokenizer or chat template that cannot be used."""


class RewardError(PolicygradError, RuntimeError):
    """Rewards cannot be computed: a function that no worker can load, a column that does not exist, or nearly all samples fail."""


class EngineError(PolicygradError, RuntimeError):
    """A sampler or an environment that does not do what it is asked to."""


class CheckpointError(PolicygradError, RuntimeError):
    """A checkpoint cannot be written or read."""


class RunError(PolicygradError, RuntimeError):
    """A run that cannot start or go on."""


class HangError(RunError):
    """A run of several processes of which one stood still; it can be gone on with."""

    code = 75


class NumericsError(PolicygradError, FloatingPointError):
    """Numbers that are not finite; the weights are as they were."""

    def __init__(self, message: str, part: str = "") -> None:
        super().__init__(message)
        self.part = part
        """The part of the algorithm that made them, "" where none did."""
