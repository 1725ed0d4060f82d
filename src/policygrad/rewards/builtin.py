"""Built-in rewards that need only the completion's text or reasoning-gym: exact match, format, penalties, steps."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal

from policygrad.errors import ConfigError, DataError
from policygrad.rewards.base import Reward, StepScores, parse_reward_options, reward

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_ONE_ANSWER = r"\A(?:(?!</?answer>).)*<answer>(?:(?!</?answer>).)*</answer>(?:(?!</?answer>).)*\Z"


def extract_final_answer(completion: str) -> str:
    """Return the text inside the last <answer>...</answer>, or else the full completion; stripped."""
    answers = _ANSWER.findall(completion)
    return (answers[-1] if answers else completion).strip()


def exact_match(prompts: Any, completions: Sequence[str], answer: Sequence[Any], **_: Any) -> list[float | None]:
    """Score 1.0 if the final answer equals the column `answer` (as text, stripped), else 0.0; None where `answer` is null."""
    return [
        None if reference is None else float(extract_final_answer(text) == str(reference).strip())
        for text, reference in zip(completions, answer, strict=True)
    ]


_CHOICE = re.compile(  # a box; or a mark with a letter that is no word ("the answer is A number")
    r"\\boxed\{\s*(?:\\text(?:bf)?\{)?\s*\(?([A-Za-z])\)?\s*\}"
    r"|\banswer\b[ \t*_]*(?::|\bis\b)[ \t*_:$]*(?:\\boxed\{\s*)?(?:\\text(?:bf)?\{\s*)?\(?(?![AI] [a-z])((?-i:[A-Z]))\b(?!['’])",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Choice:
    """Score 1.0 if the letter that the completion answers with equals the column `answer`, else 0.0; None where `answer` is null.

    The letter is that of the last "Answer: X", "the answer is (X)" or `\\boxed{X}`, or of the last `<answer>`, or a completion that
    is a letter alone.
    """

    def __call__(self, prompts: Any, completions: Sequence[str], answer: Sequence[Any], **_: Any) -> list[float | None]:
        return [
            None if right is None else float(self.extract_answer(text) == str(right).strip().upper())
            for text, right in zip(completions, answer, strict=True)
        ]

    def extract_answer(self, completion: str) -> str | None:
        """Return the letter in upper case; None = there is none."""
        final = extract_final_answer(completion)
        if re.fullmatch(r"\(?[A-Za-z]\)?\.?", final):
            return final.strip("().").upper()
        matches = _CHOICE.findall(completion)
        return "".join(matches[-1]).upper() if matches else None


choice = Choice()


@dataclass(frozen=True)
class Format:
    """Score 1.0 if the pattern occurs in the completion (`re.search`, `.` also matches newlines), else 0.0.

    Anchor it with \\A and \\Z to match the full completion. The default requires exactly one <answer>...</answer>. A pattern that
    backtracks without end runs into the pool's timeout, like any other reward.
    """

    pattern: str = _ONE_ANSWER

    def __post_init__(self) -> None:
        _compile_pattern("reward 'format':", self.pattern)

    def __call__(self, prompts: Any, completions: Sequence[str], **_: Any) -> list[float | None]:
        pattern = re.compile(self.pattern, re.DOTALL)
        return [float(pattern.search(text) is not None) for text in completions]


def _compile_pattern(option: str, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.DOTALL)
    except (re.error, OverflowError, RecursionError) as error:
        raise ConfigError(
            f"{option} {pattern!r} is not a regular expression: {error}; put a backslash before a character that is meant literally"
        ) from None


AnswerExtractor = Callable[[str], str | None]
"""Maps a completion to its answer, equal texts for equal answers; None = it has none."""


def find_answer_extractor(rewards: Sequence[Reward]) -> AnswerExtractor:
    """Return the first reward function's `extract_answer`, for votes; without one, the last <answer>'s text or the full text."""
    extractors = (getattr(each.function, "extract_answer", None) for each in rewards)
    return next(filter(None, extractors), lambda text: extract_final_answer(text) or None)


# Penalties between -1 and 0.

TextUnit = Literal["words", "characters"]


def _split_units(text: str, unit: TextUnit) -> Sequence[str]:
    return text.split() if unit == "words" else text


@dataclass(frozen=True)
class LengthPenalty:
    """0 up to `max_length` − `ramp`, then linear to −1 at `max_length`, −1 beyond; in words or characters of the completion.

    Source: DAPO's soft overlong punishment, Yu et al. 2025 (arXiv:2503.14476), eq. 13, with L_max = max_length and L_cache =
    ramp. It counts tokens: that is the algorithm's part SoftOverlong, as a reward sees text.
    """

    max_length: int
    ramp: int | None = None  # None = a fifth of `max_length`, DAPO's ratio
    unit: TextUnit = "words"

    def __post_init__(self) -> None:
        if self.max_length < 1 or not 0 < self._ramp <= self.max_length:
            raise ConfigError(
                "reward 'length_penalty': max_length must be at least 1 and ramp from 1 to max_length, not "
                f"{self.max_length}, {self._ramp}"
            )

    @property
    def _ramp(self) -> int:
        return max(1, self.max_length // 5) if self.ramp is None else self.ramp

    @classmethod
    def from_options(cls, options: str) -> LengthPenalty:
        """Parse `max_length=400,ramp=100,unit=characters`. Raises ConfigError."""
        return parse_reward_options(cls, "length_penalty", options)

    def __call__(self, prompts: Any, completions: Sequence[str], **_: Any) -> list[float | None]:
        free = self.max_length - self._ramp
        return [min(0.0, max(-1.0, (free - len(_split_units(text, self.unit))) / self._ramp)) for text in completions]


@dataclass(frozen=True)
class RepetitionPenalty:
    """−(1 − distinct / all) of the completion's n-grams: 0 where none is repeated, towards −1 where one is repeated throughout.

    Case is ignored; a text with fewer than n units gets 0. Source: open-r1's repetition reward (rewards.py,
    get_repetition_penalty_reward) with max_penalty = −1, after Yeo et al. 2025 (arXiv:2502.03373), app. C.2.
    """

    ngram: int = 3
    unit: TextUnit = "words"

    def __post_init__(self) -> None:
        if self.ngram < 1:
            raise ConfigError(f"reward 'repetition_penalty': ngram must be at least 1, not {self.ngram}")

    @classmethod
    def from_options(cls, options: str) -> RepetitionPenalty:
        """Parse `ngram=4,unit=characters`. Raises ConfigError."""
        return parse_reward_options(cls, "repetition_penalty", options)

    def __call__(self, prompts: Any, completions: Sequence[str], **_: Any) -> list[float | None]:
        scores: list[float | None] = []
        for text in completions:
            units = _split_units(text.lower(), self.unit)
            grams = [tuple(units[i : i + self.ngram]) for i in range(len(units) - self.ngram + 1)]
            scores.append(len(set(grams)) / len(grams) - 1 if grams else 0.0)
        return scores


# Process rewards: the steps of a worked-out answer to a problem of the embedded tasks, and steps that end at a pattern.

_TERM = r"(?:\d+(?:\s*\*\s*[a-z]|[a-z])?|[a-z])"
_EQUATION = re.compile(rf"(?<![\w*/.+-])(?P<left>-?{_TERM}(?:\s*[-+*/]\s*{_TERM})*)\s*=\s*(?P<right>-?\d+)(?![\w.]*\w)")
_SPELLED = re.compile(r"(?<![\w-])[\w'](?:-[\w'])+(?![\w-])")


@reward(process=True)
def worked_steps(
    prompts: Any, completions: Sequence[str], dataset: Sequence[str], entry: Sequence[Mapping[str, Any]], **_: Any
) -> list[StepScores | None]:
    """Score each statement before the answer: 1.0 for a result that this problem needs, stated for the first time; else 0.0.

    The results are those of the embedded model's way of working: tens and ones apart (`90 - 10 = 80, 2 - 8 = -6`), the variable's
    term and then the variable (`9*d = 27, d = 3`), the word spelled from its end (`p-a-t`). Statements that are true but useless,
    wrong, or repeated get 0.0, the minimum, so that more of them never raise a normalised sum; only the first statement about a
    left-hand side counts, so that trying out numbers earns one guess. The final answer is the last step, scored by the outcome's
    reward. None for a problem of another dataset.
    """
    scores: list[StepScores | None] = []
    for text, name, item in zip(completions, dataset, entry, strict=True):
        expected = _find_expected_results(name, item)
        if expected is None:
            scores.append(None)
            continue
        stated, steps = set[str](), []
        for match in (_SPELLED if name == "spell_backward" else _EQUATION).finditer(text.partition("<answer>")[0]):
            if match.re is _SPELLED:
                left, right = "", match.group()
            else:  # `9 * d = 27` states that 9d is 27
                left = re.sub(r"(?<=\d)\*(?=[a-z])", "", re.sub(r"\s+", "", match["left"]))
                right = str(int(match["right"]))
            steps.append((match.end(), float(left not in stated and expected.get(left) == right)))
            stated.add(left)
        scores.append(tuple(steps))
    return scores


def _find_expected_results(dataset: str, entry: Mapping[str, Any]) -> dict[str, str] | None:
    """Return the results that a problem needs, by the left-hand sides of their statements; None for another dataset."""
    match dataset:
        case "chain_sum":  # tens and ones of every term, each added up
            first, *tail = entry["metadata"]["expression"].split()
            signs = [1] + [1 if sign == "+" else -1 for sign in tail[::2]]
            numbers = [int(n) for n in (first, *tail[1::2])]
            expected = {}
            for digits in ([n - n % 10 for n in numbers], [n % 10 for n in numbers]):
                left = "".join(f"{'+' if sign > 0 else '-'}{n}" for sign, n in zip(signs, digits, strict=True))
                total = sum(sign * n for sign, n in zip(signs, digits, strict=True))
                expected[left.removeprefix("+")] = str(total)
            return expected
        case "simple_equations":  # the variable's term, and the variable
            variable, solution = entry["metadata"]["variable"], int(entry["answer"])
            match = re.search(rf"(?:(\d+)\*)?{variable}\b", entry["metadata"]["equation"])
            factor = int(match.group(1) or 1) if match else 1
            term = {} if factor == 1 else {f"{factor}{variable}": str(factor * solution)}
            return term | {variable: str(solution)}
        case "spell_backward":
            return {"": "-".join(entry["answer"])}
    return None


@dataclass(frozen=True)
class StepEnd:
    """End a step where a match of the pattern ends (`re.finditer`, `.` also matches newlines); every score is 0."""

    pattern: str
    reward_options: ClassVar[Mapping[str, Any]] = {"process_reward": True}

    def __post_init__(self) -> None:
        check_step_pattern(self.pattern)

    def __call__(self, prompts: Any, completions: Sequence[str], **_: Any) -> list[StepScores | None]:
        pattern = re.compile(self.pattern, re.DOTALL)
        return [tuple((m.end(), 0.0) for m in pattern.finditer(text) if m.end()) for text in completions]


def check_step_pattern(pattern: str) -> None:
    """Raise ConfigError for an invalid regular expression, with the position, and for one that matches everywhere."""
    compiled = _compile_pattern("step_end", pattern)
    if {match.end() for match in compiled.finditer("a b") if not match.group()} == {0, 1, 2, 3}:
        raise ConfigError(
            f"step_end {pattern!r} matches the empty text everywhere, so that every character would end a step; give what ends a "
            "step, such as '\\n' for every line"
        )


# reasoning-gym's own scorers. Only here is it imported, when one is used.

_CORRECT = 1.0 - 1e-6


def import_reasoning_gym() -> None:
    """Import reasoning-gym (about a second) before the first sample's timeout starts."""
    import reasoning_gym  # noqa: F401


@reward(prepare=import_reasoning_gym)
def reasoning_gym(
    prompts: Any, completions: Sequence[str], dataset: Sequence[str], entry: Sequence[Mapping[str, Any]], **_: Any
) -> list[float | None]:
    """Score 1.0 if reasoning-gym accepts the final answer, else 0.0: its partial credit is mostly for the format."""
    scores = reasoning_gym_partial(prompts, completions, dataset, entry)
    return [None if score is None else float(score >= _CORRECT) for score in scores]


@reward(prepare=import_reasoning_gym)
def reasoning_gym_partial(
    prompts: Any, completions: Sequence[str], dataset: Sequence[str], entry: Sequence[Mapping[str, Any]], **_: Any
) -> list[float | None]:
    """Return reasoning-gym's own score, usually 0 to 1; many datasets give 0.01 or 0.05 for a wrong but readable answer."""
    scores: list[float | None] = []
    for text, name, item in zip(completions, dataset, entry, strict=True):
        scorer = _load_scorer(name)
        try:
            score = float(scorer(extract_final_answer(text), item))
        except Exception:  # an answer that the scorer cannot read is wrong, unless it cannot read the entry's either
            if item["answer"] is not None:
                scorer(item["answer"], item)
            score = 0.0
        scores.append(score)
    return scores


@lru_cache(maxsize=128)
def _load_scorer(dataset: str) -> Any:
    from reasoning_gym.factory import DATASETS, get_score_answer_fn

    if dataset not in DATASETS:
        raise DataError(f"column 'dataset' names {dataset!r}, which is not a reasoning-gym dataset; see list_tasks()")
    return get_score_answer_fn(dataset)
