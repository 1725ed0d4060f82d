"""Rewards: verifiers by name or function, and the pool of killable worker processes that runs them."""

from policygrad.errors import RewardError
from policygrad.rewards.base import ProcessScores, Reward, RewardFunction, RewardScores, reward
from policygrad.rewards.resolve import known_rewards, resolve
from policygrad.rewards.workers.pool import RewardPool

__all__ = [
    "ProcessScores",
    "Reward",
    "RewardError",
    "RewardFunction",
    "RewardPool",
    "RewardScores",
    "known_rewards",
    "resolve",
    "reward",
]
