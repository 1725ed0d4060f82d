"""Worlds that episodes take place in: what the policy reads, and what becomes of what it says."""

from policygrad.environments.base import Action, Environment, EnvironmentFactory, Observation, Step
from policygrad.environments.single_turn import SingleTurn
from policygrad.environments.tool_use import ToolUse

__all__ = ["Action", "Environment", "EnvironmentFactory", "Observation", "SingleTurn", "Step", "ToolUse"]
