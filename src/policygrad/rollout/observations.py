"""The environment's own tokens as a field of a batch, for an algorithm that learns to predict them."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from policygrad.errors import ConfigError
from policygrad.models.tokenizer import Tokenizer
from policygrad.rollout.providers import Collected, FieldProvider, ProviderContext, Stage

SINGLE_TURN_OBSERVATIONS = (
    "the algorithm learns to predict what an environment writes (ObservationNLL), and the run has single answers: set "
    "--environment, or use an algorithm without it, such as grpo"
)


class Observations(FieldProvider):
    """Fills `observation`, with the other fields of the episodes, by a tokenizer that marks what messages contain."""

    stage: ClassVar[Stage] = Stage.EPISODES

    def check(self, *, is_single_answer: bool) -> None:
        if is_single_answer:
            raise ConfigError(SINGLE_TURN_OBSERVATIONS)

    def prepare_tokenizer(self, tokenizer: Tokenizer) -> Tokenizer:
        return tokenizer if tokenizer.marks_contents else replace(tokenizer, marks_contents=True)

    def provide(self, collected: Collected, context: ProviderContext) -> Collected:
        return collected
