"""The reward functions of `trl.rewards`, by the same names."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

__all__ = [
    "accuracy_reward",
    "get_cosine_scaled_reward",
    "get_repetition_penalty_reward",
    "get_soft_overlong_punishment",
    "reasoning_accuracy_reward",
    "think_format_reward",
]
Completions = Sequence[Sequence[dict[str, Any]]]
"""Each a list of messages, of which the first is read."""
_THOUGHT = re.compile(r"<think>(?!.*<think>).*?</think>", re.DOTALL)


def accuracy_reward(completions: Completions, solution: Sequence[str], **options: Any) -> list[float | None]:
    r"""Return 1 where the answer, in \boxed{…} or other LaTeX, equals the solution, else 0; None if the solution is no formula."""
    return _compare([completion[0]["content"] for completion in completions], solution, options.get("log_extra"))


def reasoning_accuracy_reward(
    completions: Completions, solution: Sequence[str], reasoning_delimiters: Sequence[str] | None = None, **options: Any
) -> list[float | None]:
    """Return `accuracy_reward` of what follows the reasoning, and 0 where the reasoning has not ended."""
    ends = reasoning_delimiters or ("</think>",)
    answers = list[str | None]()
    for completion in completions:
        text = completion[0]["content"]
        end = next((end for end in ends if end in text), None)
        answers.append(None if end is None else text.rpartition(end)[2])
    return _compare(answers, solution, options.get("log_extra"))


def think_format_reward(completions: Completions, **_: Any) -> list[float]:
    """Return 1 for a completion that begins with one thought, `<think>…</think>`, else 0."""
    return [float(_THOUGHT.match(completion[0]["content"]) is not None) for completion in completions]


@dataclass
class get_soft_overlong_punishment:
    """Penalise completions longer than `max_completion_len` − `soft_punish_cache`, linearly down to −1. Source: DAPO, eq. 13."""

    max_completion_len: int
    soft_punish_cache: int
    __name__: ClassVar[str] = "soft_overlong_punishment_reward"

    def __call__(self, completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        free = self.max_completion_len - self.soft_punish_cache
        return [
            0.0
            if len(ids) <= free
            else -1.0
            if len(ids) > self.max_completion_len
            else (free - len(ids)) / self.soft_punish_cache
            for ids in completion_ids
        ]


@dataclass
class get_repetition_penalty_reward:
    """Penalise the share of n-grams of tokens that were there before, up to `max_penalty`. Source: Yeo et al. 2025, app. C.2."""

    ngram_size: int = 3
    max_penalty: float = -1.0
    __name__: ClassVar[str] = "repetition_penalty_reward"

    def __post_init__(self) -> None:
        if self.max_penalty > 0:
            raise ValueError(f"max_penalty {self.max_penalty} should not be positive: it is the largest penalty")

    def __call__(self, completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        return [self._penalise(ids) for ids in completion_ids]

    def _penalise(self, ids: Sequence[int]) -> float:
        grams = [tuple(ids[i : i + self.ngram_size]) for i in range(len(ids) - self.ngram_size + 1)]
        repeated = 1 - len(set(grams)) / len(grams) if grams else 0.0
        return repeated * self.max_penalty if repeated else 0.0


@dataclass
class get_cosine_scaled_reward:
    """Scale correctness by the length along a cosine: short right answers and long wrong ones cost least. Source: Yeo et al. 2025,
    app. C.1."""

    max_len: int
    min_value_wrong: float = -1.0
    max_value_wrong: float = -0.5
    min_value_correct: float = 0.5
    max_value_correct: float = 1.0
    __name__: ClassVar[str] = "cosine_scaled_reward"

    def __call__(
        self, completions: Completions, solution: Sequence[str], completion_ids: Sequence[Sequence[int]], **_: Any
    ) -> list[float | None]:
        scores = accuracy_reward(completions, solution)
        return [self._scale(score, len(ids)) for score, ids in zip(scores, completion_ids, strict=True)]

    def _scale(self, score: float | None, length: int) -> float | None:
        if score is None:
            return None
        wrong, right = (self.max_value_wrong, self.min_value_wrong), (self.min_value_correct, self.max_value_correct)
        long, short = right if score else wrong
        return long + (short - long) * (1 + math.cos(math.pi * min(length / self.max_len, 1.0))) / 2


def _compare(
    answers: Sequence[str | None], solutions: Sequence[str], log_extra: Callable[[str, list[Any]], None] | None
) -> list[float | None]:
    """Return 1 or 0 for each answer, None for a solution that cannot be parsed; an answer of None is wrong."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify

    # its timeouts are signals, which the main thread alone receives
    is_main = threading.current_thread() is threading.main_thread()
    how = LatexExtractionConfig(
        normalization_config=NormalizationConfig(units=True), boxed_match_priority=0, try_extract_without_anchor=False
    )
    parsing = {"parsing_timeout": 10 if is_main else None}
    scores, read = list[float | None](), list[tuple[str, str]]()
    for answer, solution in zip(answers, solutions, strict=True):
        gold = parse(solution, **parsing)
        if answer is None or not gold:
            scores.append(0.0 if answer is None else None)
            read.append(("[incomplete reasoning]",) * 2 if answer is None else ("[unparseable]", "[skipped]"))
            continue
        parsed = parse(answer, extraction_config=[how], extraction_mode="first_match", **parsing)
        scores.append(float(verify(gold, parsed, timeout_seconds=5 if is_main else None)))
        read.append((str(gold), str(parsed) if parsed else "[unparseable]"))
    if log_extra is not None:
        log_extra("solution", list(solutions))
        log_extra("gold_parsed", [gold for gold, _ in read])
        log_extra("answer_parsed", [answer for _, answer in read])
    return scores
