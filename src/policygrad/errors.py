"""The errors that are meant for a user. Whatever else is raised is a bug and keeps its traceback."""


class PolicygradError(Exception):
    """What was asked cannot be done; the message says why, and the way out."""


class ConfigError(PolicygradError, ValueError):
    """A configuration, a command line, or parts that do not fit together."""


class DataError(PolicygradError, ValueError):
    """A data file, a task or a prompt that cannot be used."""


class ModelError(PolicygradError, ValueError):
    """A model, a tokenizer or a chat template that cannot be used."""


class RewardError(PolicygradError, RuntimeError):
    """Rewards that cannot be computed at all."""


class EngineError(PolicygradError, RuntimeError):
    """An engine that cannot generate, or cannot take new weights."""


class CheckpointError(PolicygradError, RuntimeError):
    """A checkpoint that cannot be written or read."""


class RunError(PolicygradError, RuntimeError):
    """A run that cannot start or go on."""


class NumericsError(PolicygradError, FloatingPointError):
    """Numbers that are no longer finite, or cannot be computed in this precision."""
