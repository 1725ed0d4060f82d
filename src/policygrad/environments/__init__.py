"""Environments that episodes run in: observations for the policy, and the results of its actions."""

from policygrad.environments.base import Action, Environment, EnvironmentFactory, Observation, SingleTurn, Step
from policygrad.environments.tools import ToolUse

__all__ = ["Action", "Environment", "EnvironmentFactory", "Observation", "SingleTurn", "Step", "ToolUse"]
