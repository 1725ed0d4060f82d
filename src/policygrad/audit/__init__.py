"""Audit another trainer's numbers: record one update, and name the formulas that reproduce it."""

from importlib import import_module
from typing import Any

_HOME = {
    "policygrad.audit.findings": "Audit audit compare",
    "policygrad.audit.recorders": "trl verl",
    "policygrad.audit.recording": "AuditBatch read record",
    "policygrad.findings": "Finding",
}
_WHERE = {name: module for module, names in _HOME.items() for name in names.split()}

__all__ = sorted(_WHERE)


def __getattr__(name: str) -> Any:
    """Import names on first use, as `policygrad` does."""
    if name not in _WHERE:
        raise AttributeError(f"module 'policygrad.audit' has no attribute {name!r}")
    value = getattr(import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
