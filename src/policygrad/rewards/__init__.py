"""Rewards: functions by name, and the pool of killable worker processes that runs them."""

from policygrad.errors import RewardError
from policygrad.rewards.base import ProcessScores, Reward, RewardFunction, RewardScores, reward
from policygrad.rewards.resolve import list_rewards, resolve_reward
from policygrad.rewards.workers.pool import RewardPool

__all__ = [
    "ProcessScores",
    "Reward",
    "RewardError",
    "RewardFunction",
    "RewardPool",
    "RewardScores",
    "list_rewards",
    "resolve_reward",
    "reward",
]
