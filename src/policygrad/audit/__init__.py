"""Audit another trainer's numbers: record one update, and name the formulas that reproduce it."""

from policygrad.utils.lazy_exports import export_lazily

_HOME = {
    "policygrad.audit.findings": "Audit audit compare",
    "policygrad.audit.recorders": "trl verl",
    "policygrad.audit.recording": "AuditBatch read record",
    "policygrad.findings": "Finding",
}

__getattr__, __dir__, __all__ = export_lazily(__name__, _HOME)
