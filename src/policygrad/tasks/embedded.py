"""The task mix that goes with the embedded base model, as data.

Every component names a reasoning-gym dataset and the configuration to create
it with. Questions, reference answers and scoring are all reasoning-gym's own;
nothing in this module imports it, so that listing the mix stays cheap.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Component:
    """One reasoning-gym dataset in a mix: its name, its share, its settings."""

    name: str
    weight: float
    config: dict[str, Any] = field(default_factory=dict)


MIX: tuple[Component, ...] = (
    # Arithmetic: "... 98 - 35 =", two numbers of two digits.
    Component("chain_sum", 1.0, {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}),
    # Algebra: "Solve for e: 5 - 8*e = -51", with a solution between 1 and 9.
    Component(
        "simple_equations",
        1.0,
        {
            "min_terms": 2,
            "max_terms": 2,
            "min_value": 1,
            "max_value": 9,
            "operators_weights": [0.5, 0.5, 0.0],
        },
    ),
    # Text: "Spell this word backward (example: sun -> nus): splat".
    Component("spell_backward", 1.0, {"min_word_len": 3, "max_word_len": 5}),
)

# What is worked out in several steps.
STEPS: tuple[Component, ...] = tuple(c for c in MIX if c.name in ("chain_sum", "simple_equations"))

# Enough for the longest worked-out answer that the base model knows.
MAX_NEW_TOKENS = 32


def prompt_text(question: str) -> str:
    """Turn a question into the text handed to the model: the question and a newline.

    The base model has seen every question closed by exactly one newline, and
    its chat template renders a single user message the same way.
    """
    return question + "\n"
