"""Prompts and datasets: a task provides training examples by index and a fixed set of evaluation examples."""

from policygrad.utils.lazy_exports import export_lazily

__getattr__, __dir__, __all__ = export_lazily(
    __name__,
    {
        "policygrad.tasks.base": "Example Prompt Task",
        "policygrad.tasks.registry": "EMBEDDED list_tasks load_task",
    },
)
