"""One call of a reward function, made safe: whatever it does, every sample gets a value or a named reason."""

import inspect
import math
import numbers
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from policygrad.errors import DataError
from policygrad.rewards.types import ScoredSteps
from policygrad.waiting import Waiter

_CLIP = 120  # characters of a sample or an exception quoted in a message
LARGEST = 1e18  # a reward beyond ±this counts as infinite: its square, in a group's standard deviation, leaves float32


@dataclass(frozen=True)
class Judgement:
    """What one reward function said of one sample; `reason` is a failure (types.FAILURES), None = `value` counts."""

    value: float | None = None
    reason: str | None = None
    message: str = ""
    kind: str = ""  # the exception's type: failures of one kind are told once
    steps: ScoredSteps = ()  # of a process reward, in place of `value`
    printed: str = ""  # of a failure: the last lines that its worker has printed


@dataclass(frozen=True)
class Signature:
    """Which arguments a function takes: a function need not name every column of the task."""

    keywords: bool  # prompts and completions by keyword, else as the first two positional arguments
    accepted: frozenset[str] | None  # None: any column, it has **kwargs
    required: frozenset[str]  # columns without a default

    @classmethod
    def of(cls, function: Callable[..., Any]) -> "Signature":
        try:
            parameters = inspect.signature(function).parameters.values()
        except (ValueError, TypeError):  # a builtin without a signature
            return cls(False, None, frozenset())
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        names = frozenset(p.name for p in named)
        positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters)
        keywords = "completions" in names or (open_ended and not positional)
        rest = names - {"prompts", "completions"} if keywords else names - {p.name for p in positional[:2]}
        required = frozenset(p.name for p in named if p.name in rest and p.default is p.empty)
        return cls(keywords, None if open_ended else names, required)

    def call(
        self,
        function: Callable[..., Any],
        prompts: Sequence[Any],
        completions: Sequence[str],
        columns: Mapping[str, Sequence[Any]],
    ) -> Any:
        chosen = {k: v for k, v in columns.items() if self.accepted is None or k in self.accepted}
        if not self.keywords:
            return function(prompts, completions, **chosen)
        if self.accepted is None or "prompts" in self.accepted:
            chosen["prompts"] = prompts
        return function(completions=completions, **chosen)


def needing(columns: Iterable[str]) -> inspect.Signature:
    """Of a function that takes any column and cannot do without these."""
    words = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("prompts", "completions")]
    words += [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in sorted(set(columns))]
    return inspect.Signature([*words, inspect.Parameter("columns", inspect.Parameter.VAR_KEYWORD)])


class Caller:
    """Calls one function, sync or async, always from the thread it lives in."""

    def __init__(self, name: str, function: Callable[..., Any], process_reward: bool = False) -> None:
        """process_reward: the function answers with steps, not with a number."""
        self.name, self.of_steps = name, process_reward
        self.hint: Callable[[BaseException], str] = lambda error: ""  # what to say besides of what was raised
        self._function = function
        self._signature = Signature.of(function)
        self._waiter = Waiter()

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[str], columns: Mapping[str, Sequence[Any]]
    ) -> list[Judgement]:
        """One judgement per completion; never raises on the function's account, except KeyboardInterrupt."""
        try:
            result = self._signature.call(self._function, prompts, completions, columns)
            if inspect.isawaitable(result):
                result = self._wait(result)
        except KeyboardInterrupt:
            raise
        except DataError as error:  # the row is to blame, not the completion: each such row is told, by its text
            message = self._tell(f"cannot judge a row: {error}", completions)
            return [Judgement(None, "row", message, str(error))] * len(completions)
        except BaseException as error:
            message = self._tell(describe(error) + self.hint(error), completions)
            return [Judgement(None, "raised", message, type(error).__name__)] * len(completions)
        return self._judgements(result, completions)

    def _wait(self, awaitable: Any) -> Any:
        """Run an awaitable to its end; one event loop per function, so that its connections stay open."""

        async def wait() -> Any:
            return await awaitable

        return self._waiter(wait())

    def _judgements(self, result: Any, completions: Sequence[str]) -> list[Judgement]:
        if not isinstance(result, (list, tuple)) and hasattr(result, "tolist"):
            result = result.tolist()
        if not isinstance(result, (list, tuple)):
            each = "one list of (end, score)" if self.of_steps else "one number"
            said = f"returned {quote(result)}, a {type(result).__name__}; return a list, {each} per completion"
            return [Judgement(None, "type", self._tell(said, completions), "container")] * len(completions)
        if len(result) != len(completions):
            said = f"returned {len(result)} rewards for {len(completions)} completions; return one per completion"
            return [Judgement(None, "length", self._tell(said, completions))] * len(completions)
        judge = self._steps if self.of_steps else self._number
        return [judge(value, completion) for value, completion in zip(result, completions, strict=True)]

    def _number(self, value: Any, completion: str) -> Judgement:
        if isinstance(value, Judgement):  # of a reward that asks others
            return value
        if isinstance(value, Exception):  # a batched function that can judge all but this one
            said = self._tell(f"could not judge a completion: {value}", [completion])
            return Judgement(None, "raised", said, type(value).__name__)
        number, reason = to_number(value)
        return Judgement(number, reason, self._returned(value, reason, completion))

    def _steps(self, value: Any, completion: str) -> Judgement:
        steps: ScoredSteps | None
        steps, reason = to_steps(value, len(completion))
        said = self._returned(value, reason, completion)
        if reason == "type":
            said += (
                f"; per completion it is a list of (end, score), each end from 1 to its {len(completion)} characters"
            )
        return Judgement(None, reason, said, steps=steps or ())

    def _returned(self, value: Any, reason: str | None, completion: str) -> str:
        beyond = f", beyond ±{LARGEST:g}" if reason == "inf" else ""
        return self._tell(f"returned {quote(value)}{beyond}", [completion]) if reason else ""

    def _tell(self, said: str, completions: Sequence[str]) -> str:
        return tell(self.name, said, completions)


def last_words(printed: str) -> str:
    """Return the end of a failure's message that shows what its worker printed last; "" where that is nothing."""
    return f"; its worker printed last: {printed}" if printed else ""


def tell(name: str, said: str, completions: Sequence[str]) -> str:
    """The message for a failure: which function, what it did, on which sample."""
    sample = f"completion {quote(completions[0])}" if len(completions) == 1 else f"{len(completions)} completions"
    return f"reward {name!r} {said} ({sample})"


def to_number(value: Any) -> tuple[float | None, str | None]:
    """A reward as a float, or the reason why it is none. Int, bool, Decimal, NumPy scalars and 0-d tensors count as numbers."""
    if value is None:
        return None, None
    try:
        if not isinstance(value, (numbers.Real, Decimal, str, bytes)) and hasattr(value, "item"):
            value = value.item()
        if not isinstance(value, (numbers.Real, Decimal)):
            return None, "type"
        number = float(value)
    except OverflowError:
        return None, "inf"
    except Exception:  # an array of several elements, or an object that only looks like a number
        return None, "type"
    if math.isnan(number):
        return None, "nan"
    return (None, "inf") if abs(number) > LARGEST else (number, None)


def to_steps(value: Any, length: int) -> tuple[ScoredSteps | None, str | None]:
    """(end, score) pairs by end, or the reason why they are none; None = no steps. An end is in 1..length characters."""
    if value is None:
        return (), None
    if hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, (list, tuple)):
        return None, "type"
    steps: list[tuple[int, float]] = []
    for pair in value:
        pair = pair.tolist() if hasattr(pair, "tolist") else pair
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            return None, "type"
        (end, reason), (score, why) = (to_number(part) for part in pair)
        if reason or why or end is None or score is None:
            return None, why or "type"
        if end != int(end) or not 1 <= end <= length:
            return None, "type"
        steps.append((int(end), score))
    return tuple(sorted(steps, key=lambda step: step[0])), None


def describe(error: BaseException) -> str:
    """Type, text and place of an exception in one line; the place is the innermost line of the traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    try:
        text = str(error)
    except Exception:
        text = "(its text cannot be shown)"
    return f"raised {type(error).__name__}: {text[:_CLIP]}{place}"


def quote(value: Any) -> str:
    """A value as a message shows it: cut short, and without trust in its `__repr__`."""
    try:
        text = repr(value)
    except Exception:
        text = f"<{type(value).__name__}>"
    return text if len(text) <= _CLIP else f"{text[:_CLIP]}..."
