"""What a learner refuses at the beginning, with the way out."""

from __future__ import annotations

from typing import Any

from torch import nn

from policygrad.core.algorithm import Algorithm
from policygrad.errors import ConfigError
from policygrad.learners.config import LearnerConfig
from policygrad.models.adapters import adapters_of


def check_adapters(model: nn.Module, config: LearnerConfig) -> None:
    """Raises ConfigError where adapters are to train, and there are none."""
    if config.lora and not adapters_of(model):
        raise ConfigError(
            "learner.lora trains adapters, and this model has none: put them in first (peft.get_peft_model), or let "
            "policygrad.train load the model"
        )


def check_widths(algorithm: Algorithm, reference: Any, policy: Any) -> None:
    """Raises ConfigError where distributions over different vocabularies would be compared."""
    widths = [int(m.get_output_embeddings().weight.shape[0]) for m in (reference, policy)]
    if "kl_ref" in algorithm.forward_needs and widths[0] != widths[1]:
        raise ConfigError(
            f"ExactKLToReference compares two distributions over one vocabulary, and the reference has {widths[0]} logits, the "
            f"policy {widths[1]}: take TeacherLogRatio() or KLToReference(), which read the sampled tokens alone"
        )


def check_replay(algorithm: Algorithm) -> None:
    """Raises ConfigError for what looks at the policy past the routes that are replayed."""
    reasons = {
        type(algorithm.step).__name__: not algorithm.step.uses_lr,
        "OptimalBaseline(norm='exact')": "score_norm" in algorithm.needs,
        "an exact KL to the old policy": "kl_old" in algorithm.forward_needs,
    }
    for name in (name for name, holds in reasons.items() if holds):
        raise ConfigError(
            f"{name} looks at policies in ways of its own, where no experts are replayed: set learner.routing_replay to false, or "
            "take an algorithm without it, such as grpo"
        )


def check_lr(algorithm: Algorithm, lr: float | None) -> None:
    """Raises ConfigError where a step needs a learning rate and has none."""
    if lr is None and algorithm.step.uses_lr:
        raise ConfigError(f"{type(algorithm.step).__name__} needs a learning rate: give LocalLearner a number as lr")
