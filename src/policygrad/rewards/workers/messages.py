"""Messages between the trainer and a reward worker: pickles to the worker, checked JSON back.

A reward function is the user's code and may run code that a model wrote, so the trainer never unpickles what a worker writes.
Anyone who finds the pipe can forge a reward, but not a command.
"""

import json
import math
import numbers
import pickle
import struct
import traceback
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, NoReturn

import cloudpickle

from policygrad.rewards.base import Columns, LoggedMetrics, StepScores

MAX_ABS_REWARD = 1e18
"""A reward beyond ± this counts as infinite: its square, in a group's standard deviation, leaves float32."""
_MAX_QUOTE = 120  # characters of a value in a message
_MAX_ERROR = 400  # characters of an exception's text, which often ends with its remedy


@dataclass(frozen=True)
class SampleResult:
    """The result of one reward function for one sample."""

    value: float | None = None  # None = failed, or does not apply
    reason: str | None = None  # of a failure (FAILURE_REASONS)
    message: str = ""
    kind: str = ""  # type of the exception: failures of one kind are reported once
    steps: StepScores = ()  # of a process reward, in place of `value`
    feedback: str = ""  # what the function wrote about the completion
    metrics: LoggedMetrics = ()  # what the call logged, at the first of its samples


Samples = tuple[Sequence[Any], Sequence[str], Columns]  # (prompts, completions, columns)


def select_samples(samples: Samples, places: Sequence[int]) -> Samples:
    prompts, completions, columns = samples
    chosen = {name: [values[i] for i in places] for name, values in columns.items()}
    return [prompts[i] for i in places], [completions[i] for i in places], chosen


# To a worker: pickles.


@dataclass(frozen=True)
class WorkerStart:
    """First message to a worker."""

    functions: tuple[tuple[str, bytes | None, bool], ...]
    """(name, pickled function, is a process reward). Pickled separately, so that a bad one can be named; None = on others."""
    memory: int | None = None  # bytes beyond what it has after loading; None = no limit
    nonce: bytes = b""  # first bytes of every reply of this worker
    sandbox: str = "none"
    show_output: bool = False  # print to the trainer's standard error instead of capturing the output

    @property
    def names(self) -> str:
        """Names of the functions that the worker loads."""
        return ", ".join(name for name, function, _ in self.functions if function is not None)


@dataclass(frozen=True)
class Chunk:
    """Samples, and the calls to make on them in order."""

    samples: bytes  # pickled (prompts, completions, columns)
    calls: tuple[tuple[int, tuple[int, ...]], ...]  # (number of the function, indices of its samples)


def pickle_by_value(value: Any) -> bytes:
    """Pickle user-defined functions and objects; what `__main__` defines is included by value."""
    return bytes(cloudpickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL))


# From a worker: its nonce (16 bytes), the length of the body (4 bytes) and a body of JSON. First `["started", error or ""]`,
# then for every call, in order, `[number of the call, [[value, reason, message, kind, steps, feedback, metrics], …], last]`, where
# `last` says whether the worker exits now.

NONCE_BYTES = 16
_REPLY_HEAD = struct.Struct(f">{NONCE_BYTES}sI")
_MAX_MESSAGE, _MAX_KIND, MAX_FEEDBACK, MAX_METRIC_NAME = 1000, 100, 4000, 100  # characters
_WORKER_REASONS = ("raised", "row", "nan", "inf", "type", "length")  # the trainer detects the other failures itself
_BASE_BYTES, _BYTES_PER_SAMPLE, _BYTES_PER_CHARACTER = 1 << 16, 1 << 15, 64  # limits of a body
_CONTROL_CATEGORIES = ("Cc", "Cf", "Cs")  # Unicode categories that can steer a terminal, or that no file can hold


class ProtocolError(Exception):
    """A worker sent bytes that break the protocol."""


@dataclass(frozen=True)
class CallReply:
    """Results of one call; `last`: the worker exits now because its memory has grown, and must be replaced."""

    results: list[SampleResult]
    last: bool = False


@dataclass(frozen=True)
class PendingCall:
    """A call whose reply is due, as the trainer remembers it."""

    number: int  # among the worker's calls, from 0
    lengths: tuple[int, ...]  # characters of each completion
    process_reward: bool = False

    @property
    def limit(self) -> int:
        """Maximum bytes of the body: message and feedback of each sample, and two steps per character of a process reward."""
        steps = _BYTES_PER_CHARACTER * sum(self.lengths) if self.process_reward else 0
        return _BASE_BYTES + _BYTES_PER_SAMPLE * len(self.lengths) + steps


def encode_ready(nonce: bytes, error: str = "") -> bytes:
    """Encode a worker's first message: its functions are loaded, or one could not be."""
    return _encode(nonce, ["started", _truncate(error, _MAX_MESSAGE)])


def encode_reply(nonce: bytes, call: PendingCall, results: Sequence[SampleResult], last: bool = False) -> bytes:
    """Encode the reply to a call. Results beyond its limit become failures."""
    rows = [
        [
            *(r.value, r.reason, _truncate(r.message, _MAX_MESSAGE), _truncate(r.kind, _MAX_KIND), r.steps),
            *(_truncate(r.feedback, MAX_FEEDBACK), r.metrics),
        ]
        for r in results
    ]
    frame = _encode(nonce, [call.number, rows, last])
    if len(frame) - _REPLY_HEAD.size <= call.limit:
        return frame
    message = f"returned more than {call.limit:,} bytes of steps, two per character of the completions; return fewer"
    return _encode(nonce, [call.number, [[None, "type", message, "size", [], "", []]] * len(rows), last])


class ReplyParser:
    """Parses the bytes of one worker, in whatever pieces they arrive.

    `parse_ready` and `parse_reply` return None while the message is incomplete, and raise ProtocolError for anything invalid.
    """

    def __init__(self, nonce: bytes) -> None:
        self._nonce, self._buffer = nonce, bytearray()

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def parse_ready(self) -> str | None:
        """Return "" for a worker that is ready, or else the error, which names the function that could not be loaded."""
        body = self._next_body(_BASE_BYTES)
        if body is None:
            return None
        match _parse_json(body):
            case ["started", str() as error] if len(error) <= _MAX_MESSAGE:
                return replace_control_characters(error)
        raise ProtocolError("unexpected first message")

    def parse_reply(self, call: PendingCall) -> CallReply | None:
        body = self._next_body(call.limit)
        if body is None:
            return None
        match _parse_json(body):
            case [int() as number, list() as rows, bool() as last] if type(number) is int:
                if number != call.number:
                    raise ProtocolError(f"reply to call {number} instead of call {call.number}")
                if len(rows) != len(call.lengths):
                    raise ProtocolError(f"{len(rows)} results for {len(call.lengths)} samples")
                pairs = zip(rows, call.lengths, strict=True)
                return CallReply([_parse_result(row, length, call.process_reward) for row, length in pairs], last)
        raise ProtocolError("malformed reply")

    def _next_body(self, limit: int) -> bytes | None:
        """Remove the next body from the buffer. A length beyond the limit is rejected before its bytes arrive."""
        if len(self._buffer) < _REPLY_HEAD.size:
            return None
        nonce, length = _REPLY_HEAD.unpack_from(self._buffer)
        if nonce != self._nonce:
            raise ProtocolError("wrong nonce")
        if length > limit:
            raise ProtocolError(f"{length:,} bytes, beyond the limit of {limit:,}")
        end = _REPLY_HEAD.size + length
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[_REPLY_HEAD.size : end])
        del self._buffer[:end]
        return body


def _encode(nonce: bytes, message: list[Any]) -> bytes:
    body = json.dumps(message, allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode()
    return _REPLY_HEAD.pack(nonce, len(body)) + body


def _truncate(text: str, length: int) -> str:
    return text[:length].encode("utf-8", "replace").decode()


def _parse_json(body: bytes) -> Any:
    def reject(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not a number")

    try:
        return json.loads(body.decode(), parse_constant=reject)
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, NaN, thousands of digits, or nested too deep
        raise ProtocolError(f"not JSON: {type(error).__name__}") from None


def _parse_result(row: Any, length: int, process_reward: bool) -> SampleResult:
    """Check one sample's result: every field has its type, and reports only what a worker can know."""
    match row:
        case [
            value,
            str() | None as reason,
            str() as message,
            str() as kind,
            list() as steps,
            str() as feedback,
            list() as metrics,
        ] if (
            len(message) <= _MAX_MESSAGE
            and len(feedback) <= MAX_FEEDBACK
            and len(kind) <= _MAX_KIND
            and (reason is None or (reason in _WORKER_REASONS and value is None and not steps))
            and (value is None if process_reward else not steps)
        ):
            number = None if value is None else _check_number(value)
            pairs = []
            for step in steps:
                match step:
                    case [int() as end, score] if type(end) is int and 1 <= end <= length:
                        pairs.append((end, _check_number(score)))
                    case _:
                        raise ProtocolError("malformed step")
            pairs.sort(key=lambda step: step[0])
            message, kind, feedback = map(replace_control_characters, (message, kind, feedback))
            return SampleResult(number, reason, message, kind, tuple(pairs), feedback, _parse_metrics(metrics))
    raise ProtocolError("malformed result")


def _parse_metrics(metrics: list[Any]) -> LoggedMetrics:
    logged = []
    for metric in metrics:
        match metric:
            case [str() as name, value] if is_metric_name(name):
                logged.append((name, _check_number(value)))
            case _:
                raise ProtocolError("malformed metric")
    return tuple(logged)


def _check_number(value: Any) -> float:
    if type(value) not in (int, float) or not abs(value) <= MAX_ABS_REWARD:  # also false for NaN
        raise ProtocolError("a reward is not a finite number")
    return float(value)


def is_metric_name(name: Any) -> bool:
    """Return whether a reward function may log a metric of this name."""
    return isinstance(name, str) and 0 < len(name) <= MAX_METRIC_NAME and name.isprintable()


def replace_control_characters(text: str) -> str:
    """Replace what could steer a terminal, except newlines and tabs."""
    return "".join("\ufffd" if unicodedata.category(c) in _CONTROL_CATEGORIES and c not in "\n\t" else c for c in text)


# Values that reward functions return, and messages about those that fail.


def to_number(value: Any) -> tuple[float | None, str | None]:
    """Convert a reward to (number, None) or (None, reason of the failure).

    Int, bool, Decimal, NumPy scalars and 0-d tensors count as numbers; None stays None.
    """
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


def explain_type(value: Any) -> str:
    """Return why a value that `to_number` refuses is no reward, and what to return in its place."""
    if isinstance(value, Mapping):
        if "score" in value:
            return f"its 'score' is {_describe_type(value['score'])}, not a number"
        return 'it is a dict without \'score\': return a number, or {"score": number, "feedback": text}'
    hint = ""
    if isinstance(value, str):
        try:
            hint = f", such as float({value[:20]!r})" if math.isfinite(float(value)) else ""
        except ValueError:
            hint = ""
    elif isinstance(value, (list, tuple)) and len(value) == 1:
        hint = ": a list of numbers, not of lists (squeeze(-1) of an array)"
    return f"it is {_describe_type(value)}, not a number: return one number per completion{hint}"


def _describe_type(value: Any) -> str:
    name = "text" if isinstance(value, str) else type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def split_feedback(value: Any) -> tuple[Any, str]:
    """Return (number, feedback) of a reward that is `{"score": number, "feedback": text}`; (value, "") of any other."""
    if not isinstance(value, Mapping) or "score" not in value:
        return value, ""
    feedback = value.get("feedback")
    return value["score"], "" if feedback is None else str(feedback)


def to_steps(value: Any, length: int) -> tuple[StepScores, str | None]:
    """Convert the steps of a completion of `length` characters to ((end, score), …) sorted by end, and None; or (), reason.

    An end is from 1 to `length`; None means no steps.
    """
    if value is None:
        return (), None
    if hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, (list, tuple)):
        return (), "type"
    steps: list[tuple[int, float]] = []
    for pair in value:
        pair = pair.tolist() if hasattr(pair, "tolist") else pair
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            return (), "type"
        (end, end_reason), (score, score_reason) = (to_number(part) for part in pair)
        if end_reason or score_reason or end is None or score is None:
            return (), score_reason or "type"
        if end != int(end) or not 1 <= end <= length:
            return (), "type"
        steps.append((int(end), score))
    return tuple(sorted(steps, key=lambda step: step[0])), None


def format_failure(name: str, what: str, completions: Sequence[str]) -> str:
    """Format the message of a failure: which function, what happened, on which sample."""
    sample = f"completion {quote(completions[0])}" if len(completions) == 1 else f"{len(completions)} completions"
    return f"reward {name!r} {what} ({sample})"


def describe_error(error: BaseException) -> str:
    """Describe an exception in one line: type, text, and the innermost line of its traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    try:
        text = str(error)
    except Exception:
        text = "(its text cannot be shown)"
    cut = text if len(text) <= _MAX_ERROR else f"{text[:_MAX_ERROR]}..."
    return f"raised {type(error).__name__}: {cut}{place}"


def quote(value: Any) -> str:
    """Return the repr of a value, truncated; never raises."""
    try:
        text = repr(value)
    except Exception:
        text = f"<{type(value).__name__}>"
    return text if len(text) <= _MAX_QUOTE else f"{text[:_MAX_QUOTE]}..."
