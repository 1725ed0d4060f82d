"""Environments that episodes run in: what the policy observes, and what each of its actions leads to."""

from policygrad.environments.base import Action, Environment, EnvironmentFactory, Observation, SingleTurn, Step
from policygrad.environments.tools import ToolUse

__all__ = ["Action", "Environment", "EnvironmentFactory", "Observation", "SingleTurn", "Step", "ToolUse"]
