"""What the parent sends to a worker: the length as 8 bytes, then a pickle. What comes back is in `answers.py`, and no pickle."""

import inspect
import json
import math
import numbers
import pickle
import struct
import traceback
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, NoReturn

import cloudpickle

from policygrad.errors import DataError
from policygrad.rewards.base import StepScores
from policygrad.utils.async_runner import AsyncRunner

HEAD = struct.Struct(">Q")


@dataclass(frozen=True)
class WorkerStart:
    """First message to a worker: (name, function, whether it is a process reward); each function is pickled on its own so
    that a bad one can be named. Without a function: another worker has it."""

    functions: tuple[tuple[str, bytes | None, bool], ...]
    memory: int | None = None  # bytes that it may take beyond what it has when everything is loaded; None = no limit
    nonce: bytes = b""  # begins every answer; the worker's own
    sandbox: str = "none"  # the wall that it is started behind
    show_output: bool = False  # what it prints goes to the parent's standard error, and is not captured

    @property
    def names(self) -> str:
        """The functions that it loads."""
        return ", ".join(name for name, function, _ in self.functions if function is not None)


@dataclass(frozen=True)
class Chunk:
    """Samples, and the calls to make on them in order: (number of the function, places of the samples)."""

    samples: bytes  # pickled (prompts, completions, columns)
    calls: tuple[tuple[int, tuple[int, ...]], ...]


def encode_message(message: WorkerStart | Chunk) -> bytes:
    """One message as bytes."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return HEAD.pack(len(body)) + body


def pickle_by_value(thing: Any) -> bytes:
    """Pickle functions and objects of the user's own; what is defined in `__main__` travels along by value."""
    return bytes(cloudpickle.dumps(thing, protocol=pickle.HIGHEST_PROTOCOL))


# One call of a reward function, made safe: whatever it does, every sample gets a value or a named reason.

_CLIP = 120  # characters of a sample or an exception quoted in a message
MAX_ABS_REWARD = (
    1e18  # a reward beyond ±this counts as infinite: its square, in a group's standard deviation, leaves float32
)


@dataclass(frozen=True)
class SampleResult:
    """What one reward function said of one sample; `reason` is a failure (types.FAILURES), None = `value` counts."""

    value: float | None = None
    reason: str | None = None
    message: str = ""
    kind: str = ""  # the exception's type: failures of one kind are told once
    steps: StepScores = ()  # of a process reward, in place of `value`
    printed: str = ""  # of a failure: the last lines that its worker has printed


@dataclass(frozen=True)
class Signature:
    """Which arguments a function takes: a function need not name every column of the task."""

    keywords: bool  # prompts and completions by keyword, else as the first two positional arguments
    accepted: frozenset[str] | None  # None: any column, it has **kwargs
    required: frozenset[str]  # columns without a default

    @classmethod
    def from_function(cls, function: Callable[..., Any]) -> "Signature":
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


def build_signature(columns: Iterable[str]) -> inspect.Signature:
    """Of a function that takes any column and cannot do without these."""
    words = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("prompts", "completions")]
    words += [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in sorted(set(columns))]
    return inspect.Signature([*words, inspect.Parameter("columns", inspect.Parameter.VAR_KEYWORD)])


class RewardCaller:
    """Calls one function, sync or async, always from the thread it lives in."""

    def __init__(self, name: str, function: Callable[..., Any], process_reward: bool = False) -> None:
        """process_reward: the function answers with steps, not with a number."""
        self.name, self.process_reward = name, process_reward
        self.hint: Callable[[BaseException], str] = lambda error: ""  # what to say besides of what was raised
        self._function = function
        self._signature = Signature.from_function(function)
        self._waiter = AsyncRunner()

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[str], columns: Mapping[str, Sequence[Any]]
    ) -> list[SampleResult]:
        """One judgement per completion; never raises on the function's account, except KeyboardInterrupt."""
        try:
            result = self._signature.call(self._function, prompts, completions, columns)
            if inspect.isawaitable(result):
                result = self._wait(result)
        except KeyboardInterrupt:
            raise
        except DataError as error:  # the row is to blame, not the completion: each such row is told, by its text
            message = self._tell(f"cannot judge a row: {error}", completions)
            return [SampleResult(None, "row", message, str(error))] * len(completions)
        except BaseException as error:
            message = self._tell(describe_error(error) + self.hint(error), completions)
            return [SampleResult(None, "raised", message, type(error).__name__)] * len(completions)
        return self._judgements(result, completions)

    def _wait(self, awaitable: Any) -> Any:
        """Run an awaitable to its end; one event loop per function, so that its connections stay open."""

        async def wait() -> Any:
            return await awaitable

        return self._waiter(wait())

    def _judgements(self, result: Any, completions: Sequence[str]) -> list[SampleResult]:
        if not isinstance(result, (list, tuple)) and hasattr(result, "tolist"):
            result = result.tolist()
        if not isinstance(result, (list, tuple)):
            each = "one list of (end, score)" if self.process_reward else "one number"
            said = f"returned {quote(result)}, a {type(result).__name__}; return a list, {each} per completion"
            return [SampleResult(None, "type", self._tell(said, completions), "container")] * len(completions)
        if len(result) != len(completions):
            said = f"returned {len(result)} rewards for {len(completions)} completions; return one per completion"
            return [SampleResult(None, "length", self._tell(said, completions))] * len(completions)
        judge = self._steps if self.process_reward else self._number
        return [judge(value, completion) for value, completion in zip(result, completions, strict=True)]

    def _number(self, value: Any, completion: str) -> SampleResult:
        if isinstance(value, SampleResult):  # of a reward that asks others
            return value
        if isinstance(value, Exception):  # a batched function that can judge all but this one
            said = self._tell(f"could not judge a completion: {value}", [completion])
            return SampleResult(None, "raised", said, type(value).__name__)
        number, reason = to_number(value)
        return SampleResult(number, reason, self._returned(value, reason, completion))

    def _steps(self, value: Any, completion: str) -> SampleResult:
        steps: StepScores | None
        steps, reason = to_steps(value, len(completion))
        said = self._returned(value, reason, completion)
        if reason == "type":
            said += (
                f"; per completion it is a list of (end, score), each end from 1 to its {len(completion)} characters"
            )
        return SampleResult(None, reason, said, steps=steps or ())

    def _returned(self, value: Any, reason: str | None, completion: str) -> str:
        beyond = f", beyond ±{MAX_ABS_REWARD:g}" if reason == "inf" else ""
        return self._tell(f"returned {quote(value)}{beyond}", [completion]) if reason else ""

    def _tell(self, said: str, completions: Sequence[str]) -> str:
        return format_failure(self.name, said, completions)


def format_last_output(printed: str) -> str:
    """Return the end of a failure's message that shows what its worker printed last; "" where that is nothing."""
    return f"; its worker printed last: {printed}" if printed else ""


def format_failure(name: str, said: str, completions: Sequence[str]) -> str:
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
    return (None, "inf") if abs(number) > MAX_ABS_REWARD else (number, None)


def to_steps(value: Any, length: int) -> tuple[StepScores | None, str | None]:
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


def describe_error(error: BaseException) -> str:
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


# What a worker says: frames of JSON, of which the parent believes nothing that it did not check.
#
# A frame is the worker's nonce (16 bytes), the length of the body (4 bytes) and the body: `["started", error or null]` once, then
# `[number of the call, [[value, reason, message, kind, steps], …], whether the worker ends now]` for every call, in order. A
# reward function is the user's code, and may run a model's: whoever finds the pipe can write to it. What is written there can be
# a wrong reward, never a command.

NONCE_BYTES = 16  # bytes
_HEAD = struct.Struct(f">{NONCE_BYTES}sI")
_TEXT, _KIND = 1000, 100  # characters of a message and of an exception's type, at most
_SAYS = (
    "raised",
    "row",
    "nan",
    "inf",
    "type",
    "length",
)  # what a worker finds itself; the other failures are the parent's to see
_FIXED, _PER_SAMPLE, _PER_CHARACTER = 1 << 16, 1 << 13, 64  # bytes of a body
_HIDDEN = ("Cc", "Cf", "Cs")  # categories of characters that steer a terminal, or that no file can hold


class ProtocolError(Exception):
    """Bytes that no worker writes which is what it was when it started."""


@dataclass(frozen=True)
class WorkerReady:
    """The worker's first word; `error` says which function could not be loaded, None = ready."""

    error: str | None = None


@dataclass(frozen=True)
class CallReply:
    """What a call came to; `last`: the worker ends now, its memory has grown, and another takes its place."""

    results: list[SampleResult]
    last: bool = False


@dataclass(frozen=True)
class PendingCall:
    """One call, as the parent remembers it."""

    number: int  # of the worker's calls, from 0
    lengths: tuple[int, ...]  # characters of each completion
    process_reward: bool = False

    @property
    def limit(self) -> int:
        """Bytes that the body of its answer may have: a message for each sample, and two steps per character."""
        return _FIXED + _PER_SAMPLE * len(self.lengths) + _PER_CHARACTER * sum(self.lengths) * self.process_reward


def encode_ready(nonce: bytes, error: str | None = None) -> bytes:
    """The frame of a worker that has loaded its functions, or could not."""
    return _frame(nonce, ["started", None if error is None else _cut(error, _TEXT)])


def encode_reply(nonce: bytes, call: PendingCall, results: Sequence[SampleResult], last: bool = False) -> bytes:
    """The frame for a call; what would be too long for one is a failure of its own."""
    rows = [[j.value, j.reason, _cut(j.message, _TEXT), _cut(j.kind, _KIND), j.steps] for j in results]
    whole = _frame(nonce, [call.number, rows, last])
    if len(whole) - _HEAD.size <= call.limit:
        return whole
    said = f"returned more than {call.limit:,} bytes of steps, two for each character of the completions; return fewer"
    return _frame(nonce, [call.number, [[None, "type", said, "size", []]] * len(rows), last])


class ReplyParser:
    """Turns the bytes of one worker, in whatever pieces they arrive, into what it said. Its methods raise ProtocolError."""

    def __init__(self, nonce: bytes) -> None:
        self._nonce, self._buffer = nonce, bytearray()

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def parse_ready(self) -> WorkerReady | None:
        """The worker's first word; None = it is not all there yet."""
        body = self._take(_FIXED)
        if body is None:
            return None
        match _parsed(body):
            case ["started", str() | None as error] if error is None or len(error) <= _TEXT:
                return WorkerReady(None if error is None else replace_control_characters(error))
        raise ProtocolError("its first word is another")

    def parse_reply(self, asked: PendingCall) -> CallReply | None:
        """What the worker says to this call; None = it is not all there yet."""
        body = self._take(asked.limit)
        if body is None:
            return None
        match _parsed(body):
            case [int() as number, list() as rows, bool() as last] if type(number) is int:
                if number != asked.number:
                    raise ProtocolError(f"it is to call {number}, and call {asked.number} was asked")
                if len(rows) != len(asked.lengths):
                    raise ProtocolError(f"it is of {len(rows)} samples, and {len(asked.lengths)} were asked")
                pairs = zip(rows, asked.lengths, strict=True)
                return CallReply([_judgement(row, length, asked.process_reward) for row, length in pairs], last)
        raise ProtocolError("it has not the fields of one")

    def _take(self, limit: int) -> bytes | None:
        """The next body; a length beyond the limit is refused before it is waited for."""
        if len(self._buffer) < _HEAD.size:
            return None
        nonce, length = _HEAD.unpack_from(self._buffer)
        if nonce != self._nonce:
            raise ProtocolError("it does not begin as this worker's do")
        if length > limit:
            raise ProtocolError(f"it has {length:,} bytes, and {limit:,} are the most")
        end = _HEAD.size + length
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[_HEAD.size : end])
        del self._buffer[:end]
        return body


def _frame(nonce: bytes, message: list[Any]) -> bytes:
    body = json.dumps(message, allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode()
    return _HEAD.pack(nonce, len(body)) + body


def _cut(text: str, length: int) -> str:
    return text[:length].encode("utf-8", "replace").decode()


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body.decode(), parse_constant=_refuse)
    except (
        ValueError,
        RecursionError,
    ) as error:  # no UTF-8, no JSON, NaN, a number of thousands of digits, or too deep
        raise ProtocolError(f"it is no JSON: {type(error).__name__}") from None


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number")


def _judgement(row: Any, length: int, process_reward: bool) -> SampleResult:
    """One sample's; every field has its type, and says no more than a worker knows."""
    match row:
        case [value, str() | None as reason, str() as message, str() as kind, list() as steps]:
            short = len(message) <= _TEXT and len(kind) <= _KIND
            known = reason is None or (reason in _SAYS and value is None and not steps)
            placed = value is None if process_reward else not steps
            if short and known and placed:
                number = None if value is None else _number(value)
                return SampleResult(
                    number,
                    reason,
                    replace_control_characters(message),
                    replace_control_characters(kind),
                    _steps(steps, length),
                )
    raise ProtocolError("a sample has not the fields of one")


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not abs(value) <= MAX_ABS_REWARD:  # which NaN is not either
        raise ProtocolError("a reward is no finite number")
    return float(value)


def _steps(steps: list[Any], length: int) -> StepScores:
    found = []
    for pair in steps:
        match pair:
            case [int() as end, score] if type(end) is int and 1 <= end <= length:
                found.append((end, _number(score)))
            case _:
                raise ProtocolError("a step has not the fields of one")
    return tuple(sorted(found, key=lambda step: step[0]))


def replace_control_characters(text: str) -> str:
    """Without what would steer a terminal."""
    return "".join("\ufffd" if unicodedata.category(c) in _HIDDEN and c not in "\n\t" else c for c in text)
