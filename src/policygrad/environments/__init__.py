"""Environments that episodes run in: observations for the policy, and the results of its actions."""

from policygrad.utils.lazy_exports import export_lazily

__getattr__, __dir__, __all__ = export_lazily(
    __name__,
    {
        "policygrad.rollout.environment": "Action Environment EnvironmentFactory Observation SingleTurn Step",
        "policygrad.environments.tools": "ToolUse",
    },
)
