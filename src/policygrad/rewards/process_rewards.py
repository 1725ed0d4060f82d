"""Process rewards: the steps of a worked-out answer to a problem of the embedded tasks, and ends found by a pattern."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from policygrad.errors import ConfigError
from policygrad.rewards.types import ScoredSteps, reward

_TERM = r"(?:\d+(?:\s*\*\s*[a-z]|[a-z])?|[a-z])"
_STATEMENT = re.compile(
    rf"(?<![\w*/.+-])(?P<left>-?{_TERM}(?:\s*[-+*/]\s*{_TERM})*)\s*=\s*(?P<right>-?\d+)(?![\w.]*\w)"
)
_SPELLED = re.compile(r"(?<![\w-])[\w'](?:-[\w'])+(?![\w-])")


@reward(process=True)
def worked_steps(
    prompts: Any, completions: Sequence[str], dataset: Sequence[str], entry: Sequence[Mapping[str, Any]], **_: Any
) -> list[ScoredSteps | None]:
    """A step per statement before the answer: 1.0 for a result this problem needs, stated for the first time; else 0.0.

    The results are those of the way the embedded model works: tens and ones apart (`90 - 10 = 80, 2 - 8 = -6`), the
    variable's term alone and then the variable (`9*d = 27, d = 3`), the word spelled from its end (`p-a-t`). Statements that
    are true and useless, wrong, or repeated get 0.0, the least there is, so that more of them never raise a normalised sum;
    and only the first statement about a left-hand side counts, so that trying out numbers is worth one guess. The final
    answer is the last step, which the outcome's reward scores. None for a problem of another dataset.
    """
    return [_steps(text, name, item) for text, name, item in zip(completions, dataset, entry, strict=True)]


def _steps(completion: str, dataset: str, entry: Mapping[str, Any]) -> ScoredSteps | None:
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
        check_pattern(self.pattern)

    def __call__(self, prompts: Any, completions: Sequence[str], **_: Any) -> list[ScoredSteps | None]:
        pattern = re.compile(self.pattern, re.DOTALL)
        return [tuple((m.end(), 0.0) for m in pattern.finditer(text) if m.end()) for text in completions]


def check_pattern(pattern: str) -> None:
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
