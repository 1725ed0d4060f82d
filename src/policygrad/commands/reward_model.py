"""`policygrad reward-model`: a reward model from preferences."""

from __future__ import annotations

from policygrad.commands.supervised import dry_run, parse
from policygrad.training.supervised_config import RewardModelConfig

HELP = (
    "Train a reward model on preferences: a .jsonl file whose lines have `prompt`, `chosen` and `rejected`.",
    "`policygrad train --reward model:RUN` then trains a policy against it.",
)


def reward_model(args: list[str]) -> int:
    """`policygrad reward-model --data FILE [options]`."""
    config, command = parse(RewardModelConfig, args, HELP)
    if command.dry_run:
        print(dry_run(config))
        return 0
    from policygrad.track import make_display
    from policygrad.training.reward_model import train_reward_model

    display = make_display(plain=command.plain or None)
    train_reward_model(config, resume=command.resume, stop_after=command.stop_after, display=display)
    return 0
