"""What a worker says: frames of JSON, of which the parent believes nothing that it did not check.

A frame is the worker's nonce (16 bytes), the length of the body (4 bytes) and the body: `["started", error or null]` once, then
`[number of the call, [[value, reason, message, kind, steps], …], whether the worker ends now]` for every call, in order. A
reward function is the user's code, and may run a model's: whoever finds the pipe can write to it. What is written there can be
a wrong reward, never a command.
"""

import json
import struct
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from policygrad.rewards.calls import LARGEST, Judgement
from policygrad.rewards.types import ScoredSteps

NONCE = 16  # bytes
_HEAD = struct.Struct(f">{NONCE}sI")
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


class NoAnswerError(Exception):
    """Bytes that no worker writes which is what it was when it started."""


@dataclass(frozen=True)
class Started:
    """The worker's first word; `error` says which function could not be loaded, None = ready."""

    error: str | None = None


@dataclass(frozen=True)
class Answer:
    """What a call came to; `last`: the worker ends now, its memory has grown, and another takes its place."""

    judgements: list[Judgement]
    last: bool = False


@dataclass(frozen=True)
class Asked:
    """One call, as the parent remembers it."""

    number: int  # of the worker's calls, from 0
    lengths: tuple[int, ...]  # characters of each completion
    process_reward: bool = False

    @property
    def limit(self) -> int:
        """Bytes that the body of its answer may have: a message for each sample, and two steps per character."""
        return _FIXED + _PER_SAMPLE * len(self.lengths) + _PER_CHARACTER * sum(self.lengths) * self.process_reward


def started(nonce: bytes, error: str | None = None) -> bytes:
    """The frame of a worker that has loaded its functions, or could not."""
    return _frame(nonce, ["started", None if error is None else _cut(error, _TEXT)])


def answer(nonce: bytes, asked: Asked, judgements: Sequence[Judgement], last: bool = False) -> bytes:
    """The frame for a call; what would be too long for one is a failure of its own."""
    rows = [[j.value, j.reason, _cut(j.message, _TEXT), _cut(j.kind, _KIND), j.steps] for j in judgements]
    whole = _frame(nonce, [asked.number, rows, last])
    if len(whole) - _HEAD.size <= asked.limit:
        return whole
    said = f"returned more than {asked.limit:,} bytes of steps, two for each character of the completions; return fewer"
    return _frame(nonce, [asked.number, [[None, "type", said, "size", []]] * len(rows), last])


class Inbox:
    """Turns the bytes of one worker, in whatever pieces they arrive, into what it said. Its methods raise NoAnswerError."""

    def __init__(self, nonce: bytes) -> None:
        self._nonce, self._buffer = nonce, bytearray()

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def started(self) -> Started | None:
        """The worker's first word; None = it is not all there yet."""
        body = self._take(_FIXED)
        if body is None:
            return None
        match _parsed(body):
            case ["started", str() | None as error] if error is None or len(error) <= _TEXT:
                return Started(None if error is None else plain(error))
        raise NoAnswerError("its first word is another")

    def answer(self, asked: Asked) -> Answer | None:
        """What the worker says to this call; None = it is not all there yet."""
        body = self._take(asked.limit)
        if body is None:
            return None
        match _parsed(body):
            case [int() as number, list() as rows, bool() as last] if type(number) is int:
                if number != asked.number:
                    raise NoAnswerError(f"it is to call {number}, and call {asked.number} was asked")
                if len(rows) != len(asked.lengths):
                    raise NoAnswerError(f"it is of {len(rows)} samples, and {len(asked.lengths)} were asked")
                pairs = zip(rows, asked.lengths, strict=True)
                return Answer([_judgement(row, length, asked.process_reward) for row, length in pairs], last)
        raise NoAnswerError("it has not the fields of one")

    def _take(self, limit: int) -> bytes | None:
        """The next body; a length beyond the limit is refused before it is waited for."""
        if len(self._buffer) < _HEAD.size:
            return None
        nonce, length = _HEAD.unpack_from(self._buffer)
        if nonce != self._nonce:
            raise NoAnswerError("it does not begin as this worker's do")
        if length > limit:
            raise NoAnswerError(f"it has {length:,} bytes, and {limit:,} are the most")
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
        raise NoAnswerError(f"it is no JSON: {type(error).__name__}") from None


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number")


def _judgement(row: Any, length: int, process_reward: bool) -> Judgement:
    """One sample's; every field has its type, and says no more than a worker knows."""
    match row:
        case [value, str() | None as reason, str() as message, str() as kind, list() as steps]:
            short = len(message) <= _TEXT and len(kind) <= _KIND
            known = reason is None or (reason in _SAYS and value is None and not steps)
            placed = value is None if process_reward else not steps
            if short and known and placed:
                number = None if value is None else _number(value)
                return Judgement(number, reason, plain(message), plain(kind), _steps(steps, length))
    raise NoAnswerError("a sample has not the fields of one")


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not abs(value) <= LARGEST:  # which NaN is not either
        raise NoAnswerError("a reward is no finite number")
    return float(value)


def _steps(steps: list[Any], length: int) -> ScoredSteps:
    found = []
    for pair in steps:
        match pair:
            case [int() as end, score] if type(end) is int and 1 <= end <= length:
                found.append((end, _number(score)))
            case _:
                raise NoAnswerError("a step has not the fields of one")
    return tuple(sorted(found, key=lambda step: step[0]))


def plain(text: str) -> str:
    """Without what would steer a terminal."""
    return "".join("\ufffd" if unicodedata.category(c) in _HIDDEN and c not in "\n\t" else c for c in text)
