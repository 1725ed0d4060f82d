"""`policygrad reward-model`: a reward model from preferences."""

from __future__ import annotations

from policygrad.commands.supervised import command
from policygrad.training.config.supervised import RewardModelConfig

HELP = (
    "Train a reward model on preferences: a .jsonl file whose lines have `prompt`, `chosen` and `rejected`.",
    "`policygrad train --reward model:RUN` then trains a policy against it.",
)


def reward_model(args: list[str]) -> int:
    """`policygrad reward-model --data FILE [options]`."""
    return command(RewardModelConfig, args, HELP, "policygrad.training.reward_model:train_reward_model")
