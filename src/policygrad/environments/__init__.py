"""Worlds that episodes take place in: what the policy reads, and what becomes of what it says."""

from policygrad.environments.base import Action, Environment, EnvironmentFactory, Observation, SingleTurn, Step
from policygrad.environments.tools import ToolUse

__all__ = ["Action", "Environment", "EnvironmentFactory", "Observation", "SingleTurn", "Step", "ToolUse"]
