"""Training: the learner, the loop, checkpoints, and a run's configuration."""

from importlib import import_module
from typing import Any

_HOME = {
    "Run": "policygrad.training.config",
    "train": "policygrad.training.session",
    "evaluate": "policygrad.training.evaluate",
}


def __getattr__(name: str) -> Any:
    """Lazy, so that reading a configuration loads no model code."""
    if name not in _HOME:
        raise AttributeError(f"module 'policygrad.training' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
