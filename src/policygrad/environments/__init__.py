"""Environments that episodes run in: observations for the policy, and the results of its actions."""

from policygrad.environments.tools import ToolUse
from policygrad.rollout.environment import Action, Environment, EnvironmentFactory, Observation, SingleTurn, Step

__all__ = ["Action", "Environment", "EnvironmentFactory", "Observation", "SingleTurn", "Step", "ToolUse"]
