"""Rewards that need nothing but the completion's text: exact match and format."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from policygrad.errors import ConfigError, DataError
from policygrad.rewards.base import Reward, StepScores, parse_choice, parse_int, parse_reward_options, reward

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_ONE_ANSWER = r"\A(?:(?!</?answer>).)*<answer>(?:(?!</?answer>).)*</answer>(?:(?!</?answer>).)*\Z"


def extract_final_answer(completion: str) -> str:
    """The text inside the last <answer>...</answer>, or else the whole completion; stripped."""
    found = _ANSWER.findall(completion)
    return (found[-1] if found else completion).strip()


def exact_match(prompts: Any, completions: Sequence[str], answer: Sequence[Any], **_: Any) -> list[float | None]:
    """1.0 if the final answer is the column `answer` (as text, stripped), else 0.0; None where `answer` is null."""
    return [
        None if right is None else float(extract_final_answer(text) == str(right).strip())
        for text, right in zip(completions, answer, strict=True)
    ]


@dataclass(frozen=True)
class Format:
    """1.0 if the pattern is found anywhere in the completion (`re.search`, `.` also matches newlines), else 0.0.

    Anchor it with \\A and \\Z to judge the completion as a whole. The default asks for exactly one <answer>...</answer>.
    A pattern that backtracks for ever runs into the pool's time budget like any other reward.
    """

    pattern: str = _ONE_ANSWER

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern, re.DOTALL)
        except (re.error, OverflowError, RecursionError) as error:
            raise ConfigError(
                f"reward 'format': {self.pattern!r} is not a regular expression: {error}; put a backslash before "
                "a character that is meant literally"
            ) from None

    def __call__(self, prompts: Any, completions: Sequence[str], **_: Any) -> list[float | None]:
        pattern = re.compile(self.pattern, re.DOTALL)
        return [float(pattern.search(text) is not None) for text in completions]


# By what answers vote: the answer that a completion gives, as the reward that judges it reads it.

AnswerExtractor = Callable[[str], str | None]
"""From a completion to its answer, equal texts for equal answers; None = it gives none."""


def find_answer_extractor(rewards: Sequence[Reward]) -> AnswerExtractor:
    """The `voted` of the first reward whose function has one; otherwise what is inside the last <answer>, or the whole text."""
    for rewarding in rewards:
        own: AnswerExtractor | None = getattr(rewarding.function, "voted", None)
        if own is not None:
            return own
    return lambda text: extract_final_answer(text) or None


# Penalties that need nothing but the completion's text: for length and for repetition. Between -1 and 0, to be weighted.

_UNITS = ("words", "characters")


@dataclass(frozen=True)
class LengthPenalty:
    """0 up to `longest` − `ramp`, then linear to −1 at `longest`, −1 beyond; in words or characters of the completion.

    Source: the formula is DAPO's soft overlong punishment, Yu et al. 2025 (arXiv:2503.14476), eq. 13, with L_max = longest and
    L_cache = ramp, which counts tokens: that is the algorithm's part SoftOverlong, and what a reward sees is text.
    """

    max_length: int
    ramp: int | None = None
    """None = a fifth of `longest`, DAPO's share."""
    unit: str = "words"

    def __post_init__(self) -> None:
        if self.max_length < 1 or not 0 < self._ramp <= self.max_length:
            raise ConfigError(
                f"reward 'length_penalty': longest must be at least 1 and ramp from 1 to longest, not {self.max_length}, {self._ramp}"
            )

    @property
    def _ramp(self) -> int:
        return max(1, self.max_length // 5) if self.ramp is None else self.ramp

    @classmethod
    def from_options(cls, options: str) -> LengthPenalty:
        """`longest=400,ramp=100,unit=characters`. Raises ConfigError."""
        readers = {"longest": parse_int, "ramp": parse_int, "unit": parse_choice(*_UNITS)}
        return parse_reward_options(cls, "length_penalty", options, readers)

    def __call__(self, prompts: Any, completions: Sequence[str], **_: Any) -> list[float | None]:
        free = self.max_length - self._ramp
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
    def from_options(cls, options: str) -> RepetitionPenalty:
        """`ngram=4,unit=characters`. Raises ConfigError."""
        return parse_reward_options(
            cls, "repetition_penalty", options, {"ngram": parse_int, "unit": parse_choice(*_UNITS)}
        )

    def __call__(self, prompts: Any, completions: Sequence[str], **_: Any) -> list[float | None]:
        return [self._penalty(_units(text.lower(), self.unit)) for text in completions]

    def _penalty(self, units: Sequence[str]) -> float:
        grams = [tuple(units[i : i + self.ngram]) for i in range(len(units) - self.ngram + 1)]
        return len(set(grams)) / len(grams) - 1 if grams else 0.0


def _units(text: str, unit: str) -> Sequence[str]:
    return text.split() if unit == "words" else text


# Process rewards: the steps of a worked-out answer to a problem of the embedded tasks, and ends found by a pattern.

_TERM = r"(?:\d+(?:\s*\*\s*[a-z]|[a-z])?|[a-z])"
_STATEMENT = re.compile(
    rf"(?<![\w*/.+-])(?P<left>-?{_TERM}(?:\s*[-+*/]\s*{_TERM})*)\s*=\s*(?P<right>-?\d+)(?![\w.]*\w)"
)
_SPELLED = re.compile(r"(?<![\w-])[\w'](?:-[\w'])+(?![\w-])")


@reward(process=True)
def worked_steps(
    prompts: Any, completions: Sequence[str], dataset: Sequence[str], entry: Sequence[Mapping[str, Any]], **_: Any
) -> list[StepScores | None]:
    """A step per statement before the answer: 1.0 for a result this problem needs, stated for the first time; else 0.0.

    The results are those of the way the embedded model works: tens and ones apart (`90 - 10 = 80, 2 - 8 = -6`), the
    variable's term alone and then the variable (`9*d = 27, d = 3`), the word spelled from its end (`p-a-t`). Statements that
    are true and useless, wrong, or repeated get 0.0, the least there is, so that more of them never raise a normalised sum;
    and only the first statement about a left-hand side counts, so that trying out numbers is worth one guess. The final
    answer is the last step, which the outcome's reward scores. None for a problem of another dataset.
    """
    return [_steps(text, name, item) for text, name, item in zip(completions, dataset, entry, strict=True)]


def _steps(completion: str, dataset: str, entry: Mapping[str, Any]) -> StepScores | None:
    if dataset not in _EXPECTED:
        return None
    working = completion.partition("<answer>")[0]
    expected, said = _EXPECTED[dataset](entry), set[str]()
    steps: list[tuple[int, float]] = []
    for found in (_SPELLED if dataset == "spell_backward" else _STATEMENT).finditer(working):
        left, right = _normal(found)
        right_step = left not in said and expected.get(left) == right
        said.add(left)
        steps.append((found.end(), float(right_step)))
    return tuple(steps)


def _normal(found: re.Match[str]) -> tuple[str, str]:
    """(what a statement is about, what it says): `9 * d = 27` is about `9d`; a spelled word is about the word to spell."""
    if found.re is _SPELLED:
        return "", found.group()
    left = re.sub(r"\s+", "", found["left"])
    return re.sub(r"(?<=\d)\*(?=[a-z])", "", left), str(int(found["right"]))


def _sums(entry: Mapping[str, Any]) -> dict[str, str]:
    """Tens and ones of every term, each added up."""
    first, *rest = entry["metadata"]["expression"].split()
    signs, numbers = [1] + [1 if sign == "+" else -1 for sign in rest[::2]], [int(n) for n in (first, *rest[1::2])]
    expected = {}
    for digits in ([n - n % 10 for n in numbers], [n % 10 for n in numbers]):
        left = "".join(f"{'+' if sign > 0 else '-'}{n}" for sign, n in zip(signs, digits, strict=True))
        expected[left.removeprefix("+")] = str(sum(sign * n for sign, n in zip(signs, digits, strict=True)))
    return expected


def _equation(entry: Mapping[str, Any]) -> dict[str, str]:
    """The variable's term, and the variable."""
    variable, solution = entry["metadata"]["variable"], int(entry["answer"])
    found = re.search(rf"(?:(\d+)\*)?{variable}\b", entry["metadata"]["equation"])
    factor = int(found.group(1) or 1) if found else 1
    term = {} if factor == 1 else {f"{factor}{variable}": str(factor * solution)}
    return term | {variable: str(solution)}


def _spelled(entry: Mapping[str, Any]) -> dict[str, str]:
    """The answer's letters, joined by hyphens."""
    return {"": "-".join(entry["answer"])}


_EXPECTED = {"chain_sum": _sums, "simple_equations": _equation, "spell_backward": _spelled}


@dataclass(frozen=True)
class StepEnd:
    """A step ends where a match of the pattern ends (`re.finditer`, `.` also matches newlines); it says nothing of worth."""

    pattern: str
    reward_options: ClassVar[Mapping[str, Any]] = {"process_reward": True}

    def __post_init__(self) -> None:
        check_step_pattern(self.pattern)

    def __call__(self, prompts: Any, completions: Sequence[str], **_: Any) -> list[StepScores | None]:
        pattern = re.compile(self.pattern, re.DOTALL)
        return [tuple((m.end(), 0.0) for m in pattern.finditer(text) if m.end()) for text in completions]


def check_step_pattern(pattern: str) -> None:
    """Raises ConfigError for what is no regular expression, with the position, and for what is found everywhere."""
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except (re.error, OverflowError, RecursionError) as error:  # the first says at which position
        raise ConfigError(
            f"step_end {pattern!r} is not a regular expression: {error}; put a backslash before a character that is meant "
            "literally"
        ) from None
    if {found.end() for found in compiled.finditer("a b") if not found.group()} == {0, 1, 2, 3}:
        raise ConfigError(
            f"step_end {pattern!r} matches the empty text everywhere, so that every character would end a step: say what "
            "stands at a step's end, '\\n' = every line"
        )


# Answers judged by reasoning-gym's own scorers; the one file in rewards that imports it, and only when it is used.

_RIGHT = 1.0 - 1e-6


def import_reasoning_gym() -> None:
    """Import reasoning-gym (about a second) before the first sample's clock runs."""
    import reasoning_gym  # noqa: F401


@reward(prepare=import_reasoning_gym)
def reasoning_gym(
    prompts: Any, completions: Sequence[str], dataset: Sequence[str], entry: Sequence[Mapping[str, Any]], **_: Any
) -> list[float | None]:
    """1.0 if reasoning-gym calls the final answer right, else 0.0: its partial credit is mostly for the format."""
    scores = reasoning_gym_partial(prompts, completions, dataset, entry)
    return [None if score is None else float(score >= _RIGHT) for score in scores]


@reward(prepare=import_reasoning_gym)
def reasoning_gym_partial(
    prompts: Any, completions: Sequence[str], dataset: Sequence[str], entry: Sequence[Mapping[str, Any]], **_: Any
) -> list[float | None]:
    """The scorer's own number, usually 0 to 1; a wrong but readable answer gets 0.01 or 0.05 from many datasets."""
    return [
        _score(extract_final_answer(text), name, item)
        for text, name, item in zip(completions, dataset, entry, strict=True)
    ]


def _score(answer: str, dataset: str, entry: Mapping[str, Any]) -> float:
    """An answer that the scorer cannot read is wrong; an entry whose own answer it cannot read is an error."""
    scorer = _scorer(dataset)
    try:
        return float(scorer(answer, entry))
    except Exception:
        if entry["answer"] is not None:
            scorer(entry["answer"], entry)
        return 0.0


@lru_cache(maxsize=128)
def _scorer(dataset: str) -> Any:
    from reasoning_gym.factory import DATASETS, get_score_answer_fn

    if dataset not in DATASETS:
        raise DataError(f"column 'dataset' names {dataset!r}, which is no reasoning-gym dataset; see list_tasks()")
    return get_score_answer_fn(dataset)
