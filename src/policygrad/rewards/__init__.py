"""Rewards: verifiers by name or function, and the pool of killable worker processes that runs them."""

from policygrad.errors import RewardError
from policygrad.rewards.pool import RewardPool
from policygrad.rewards.resolve import known_rewards, resolve
from policygrad.rewards.types import Reward, RewardFunction, Scores, StepScores, reward

__all__ = [
    "Reward",
    "RewardError",
    "RewardFunction",
    "RewardPool",
    "Scores",
    "StepScores",
    "known_rewards",
    "resolve",
    "reward",
]
