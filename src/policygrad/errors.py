"""Exceptions for errors that the user can fix. Messages name the file, line, option or function, and a remedy.

Each class also inherits the matching built-in exception.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any, ClassVar


def install_command(extra: str) -> str:
    """Return the command that installs an extra of pyproject.toml, for messages.

    The package is not on an index, so the command names a clone (docs/extras.md covers wheel files).
    """
    return f"pip install '.[{extra}]' in a clone of policygrad"


def import_optional(module: str, what: str, extra: str) -> Any:
    """Import a module of an optional package, and return the package. what: needs it, for the message.

    Raises:
        ConfigError: It is not installed.
    """
    package = module.partition(".")[0]
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"{what} needs {package}, which is not installed: {install_command(extra)}") from error
    return sys.modules[package]


class PolicygradError(Exception):
    """Base class of errors that the user can fix. Any other exception is a bug."""

    code: ClassVar[int] = 2
    """Exit code of the command."""


class ConfigError(PolicygradError, ValueError):
    """Invalid options, configuration files or parts of an algorithm, or an invalid combination of them."""


class DataError(PolicygradError, ValueError):
    """Prompts, tasks or data files that cannot be read or used."""


class ModelError(PolicygradError, ValueError):
    """A model, tokenizer or chat template that cannot be used."""


class RewardError(PolicygradError, RuntimeError):
    """Rewards that cannot be computed: a function that fails to load, a missing column, or too many failed samples."""


class EngineError(PolicygradError, RuntimeError):
    """A sampler or an environment that violates its protocol."""


class CheckpointError(PolicygradError, RuntimeError):
    """A checkpoint that cannot be written or read."""


class RunError(PolicygradError, RuntimeError):
    """A run that cannot start or continue."""


class HangError(RunError):
    """A run with several processes of which one hung; it can be resumed."""

    code = 75


class OutOfMemoryError(RunError):
    """Memory that does not suffice for the smallest piece of work: one text, one completion, or an optimizer step."""

    def __init__(self, message: str, *, flag: str = "", size: int | None = None, limit: int | None = None) -> None:
        super().__init__(message)
        self.flag = flag
        """Option that limits such work, --learner.micro-tokens; "" if none does."""
        self.size = size
        """Tokens or completions of the piece that did not fit."""
        self.limit = limit
        """Value of the option with which a resumed run should begin; None = the one that it has."""


class MemoryStopError(OutOfMemoryError):
    """A run that ended for want of memory; it can be resumed."""

    code = 75


class NumericsError(PolicygradError, FloatingPointError):
    """Numbers that are not finite; the weights are unchanged."""

    def __init__(self, message: str, part: str = "") -> None:
        super().__init__(message)
        self.part = part
        """Name of the part that caused them; "" if none did."""
