"""Penalties that need nothing but the completion's text: for length and for repetition. Between -1 and 0, to be weighted."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from policygrad.errors import ConfigError
from policygrad.rewards.options import choice, from_options, whole

_UNITS = ("words", "characters")


@dataclass(frozen=True)
class LengthPenalty:
    """0 up to `longest` − `ramp`, then linear to −1 at `longest`, −1 beyond; in words or characters of the completion.

    Source: the formula is DAPO's soft overlong punishment, Yu et al. 2025 (arXiv:2503.14476), eq. 13, with L_max = longest and
    L_cache = ramp, which counts tokens: that is the algorithm's part SoftOverlong, and what a reward sees is text.
    """

    longest: int
    ramp: int | None = None
    """None = a fifth of `longest`, DAPO's share."""
    unit: str = "words"

    def __post_init__(self) -> None:
        if self.longest < 1 or not 0 < self._ramp <= self.longest:
            raise ConfigError(
                f"reward 'length_penalty': longest must be at least 1 and ramp from 1 to longest, not {self.longest}, {self._ramp}"
            )

    @property
    def _ramp(self) -> int:
        return max(1, self.longest // 5) if self.ramp is None else self.ramp

    @classmethod
    def of(cls, options: str) -> "LengthPenalty":
        """`longest=400,ramp=100,unit=characters`. Raises ConfigError."""
        readers = {"longest": whole, "ramp": whole, "unit": choice(*_UNITS)}
        return from_options(cls, "length_penalty", options, readers)

    def __call__(self, prompts: Any, completions: Sequence[str], **_: Any) -> list[float | None]:
        free = self.longest - self._ramp
        return [min(0.0, max(-1.0, (free - len(_units(text, self.unit))) / self._ramp)) for text in completions]


@dataclass(frozen=True)
class RepetitionPenalty:
    """−(1 − distinct / all) of the n-grams of the completion: 0 where none comes twice, towards −1 where one comes all the time.

    Words are compared in small letters; a text of fewer than n has no n-gram, and 0. Source: open-r1's repetition reward
    (rewards.py, get_repetition_penalty_reward) with max_penalty = −1, after Yeo et al. 2025 (arXiv:2502.03373), app. C.2.
    """

    ngram: int = 3
    unit: str = "words"

    def __post_init__(self) -> None:
        if self.ngram < 1:
            raise ConfigError(f"reward 'repetition_penalty': ngram must be at least 1, not {self.ngram}")

    @classmethod
    def of(cls, options: str) -> "RepetitionPenalty":
        """`ngram=4,unit=characters`. Raises ConfigError."""
        return from_options(cls, "repetition_penalty", options, {"ngram": whole, "unit": choice(*_UNITS)})

    def __call__(self, prompts: Any, completions: Sequence[str], **_: Any) -> list[float | None]:
        return [self._penalty(_units(text.lower(), self.unit)) for text in completions]

    def _penalty(self, units: Sequence[str]) -> float:
        grams = [tuple(units[i : i + self.ngram]) for i in range(len(units) - self.ngram + 1)]
        return len(set(grams)) / len(grams) - 1 if grams else 0.0


def _units(text: str, unit: str) -> Sequence[str]:
    return text.split() if unit == "words" else text
