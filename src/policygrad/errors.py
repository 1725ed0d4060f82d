"""Every error that is meant for whoever runs policygrad; `except pg.PolicygradError` catches them all.

A message says what is wrong and the way out. Each keeps a builtin base, so that `except ValueError` goes on working.
What else is raised is a mistake in the code, ours or a part's.
"""

from __future__ import annotations


class PolicygradError(Exception):
    """What policygrad refuses or cannot do, with the way out."""


class ConfigError(PolicygradError, ValueError):
    """A configuration that cannot be read, or options, parts and tensors that do not fit together."""


class DataError(PolicygradError, ValueError):
    """A data file, a task or a prompt that cannot be used."""


class ModelError(PolicygradError, ValueError):
    """A model, a tokenizer or a chat template that cannot be used."""


class RewardError(PolicygradError, RuntimeError):
    """A reward function that failed."""


class EngineError(PolicygradError, RuntimeError):
    """A sampling engine that does not answer, or not as it should."""


class CheckpointError(PolicygradError, RuntimeError):
    """A checkpoint that is damaged, missing, or of something else."""


class RunError(PolicygradError, RuntimeError):
    """A run that cannot start or go on: its folder, the disk, the machine."""


class NumericsError(PolicygradError, FloatingPointError):
    """Numbers that are not finite."""
