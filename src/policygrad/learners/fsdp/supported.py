"""What is not spread over several processes yet: refused at the beginning, with the way out."""

from __future__ import annotations

from policygrad.core.algorithm import Algorithm
from policygrad.errors import ConfigError
from policygrad.learners.config import LearnerConfig

_ONE = "let one process learn (learner.ranks 1)"


def check_ranks(config: LearnerConfig, algorithm: Algorithm) -> None:
    """Raises ConfigError for the first part or option that several processes cannot share."""
    if config.ranks == 1:
        return
    step = type(algorithm.step).__name__
    parts = {
        f"{step}, which asks for products with the Fisher matrix,": not algorithm.step.uses_lr,
        "a reward model that learns beside the policy": algorithm.reward_model is not None,
        "OptimalBaseline(norm='exact')": "score_norm" in algorithm.needs,
        "a term that compares whole distributions (ExactKLToOld, ExactKLToReference)": bool(
            algorithm.forward_needs & {"kl_old", "kl_ref"}
        ),
    }
    for what in (what for what, holds in parts.items() if holds):
        raise ConfigError(
            f"{algorithm.name} has {what}, and learner.ranks is {config.ranks}: this is not spread over processes yet. "
            f"{_ONE.capitalize()}, or take an algorithm without it, such as grpo"
        )
    options = {
        "learner.lora": bool(config.lora),
        "learner.routing_replay": config.routing_replay,
        f"learner.device {config.device}, one GPU for all,": config.device.startswith("cuda:"),
    }
    for what in (what for what, holds in options.items() if holds):
        raise ConfigError(
            f"{what} is not for several processes yet, and learner.ranks is {config.ranks}: leave it away, or {_ONE}"
        )
