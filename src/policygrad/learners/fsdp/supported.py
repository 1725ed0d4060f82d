"""What is not spread over several processes: refused at the beginning, with the way out."""

from __future__ import annotations

from torch import nn

from policygrad.core.algorithm import Algorithm
from policygrad.errors import ConfigError
from policygrad.learners.config import LearnerConfig
from policygrad.learners.fsdp.torchrun import ranks_of

_ONE = "let one process learn (learner.ranks 1)"


def check_ranks(config: LearnerConfig, algorithm: Algorithm | None = None) -> None:
    """Raises ConfigError for the first option that several processes cannot share."""
    if (ranks := ranks_of(config.ranks)) % config.tensor:
        raise ConfigError(
            f"learner.tensor {config.tensor} of {ranks} processes (learner.ranks) share a layer: give a divisor of that, as "
            f"in --learner.ranks {config.tensor} --learner.tensor {config.tensor}"
        )
    if config.ranks == 1:
        return
    options = {
        "learner.lora with bits=4": config.adapters is not None and config.adapters.bits is not None,
        f"learner.device {config.device}, one GPU for all,": config.device.startswith("cuda:"),
    }
    for what in (what for what, holds in options.items() if holds):
        raise ConfigError(
            f"{what} is not for several processes, and learner.ranks is {config.ranks}: leave it away, or {_ONE}"
        )


def check_model(model: nn.Module) -> None:
    """Raises ConfigError for weights that cannot be cut into shares."""
    if getattr(model, "is_quantized", False):
        raise ConfigError(
            f"the model's weights are quantised, and are not spread over several processes: take them as they are, or {_ONE}"
        )
