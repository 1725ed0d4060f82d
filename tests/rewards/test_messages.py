"""Messages of a worker round-trip, and anything else is rejected."""

from __future__ import annotations

import json
import pickle
import struct
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policygrad.rewards.workers.messages import (
    MAX_ABS_REWARD,
    NONCE_BYTES,
    PendingCall,
    ProtocolError,
    ReplyParser,
    SampleResult,
    describe_error,
    encode_ready,
    encode_reply,
)

OURS = bytes(range(NONCE_BYTES))
ASKED = PendingCall(3, (5, 7))
FINE = ["", "", [], "", []]

numbers = st.floats(-MAX_ABS_REWARD, MAX_ABS_REWARD)
values = numbers.map(SampleResult) | st.builds(
    SampleResult,
    st.none(),
    st.sampled_from(["raised", "nan", "inf", "type", "length"]),
    st.text(),
    st.text(max_size=20),
)
steps = st.lists(st.tuples(st.integers(1, 40), numbers), max_size=80)
scored = steps.map(lambda found: SampleResult(steps=tuple(sorted(found, key=lambda step: step[0]))))


def framed(body: bytes, nonce: bytes = OURS, length: int | None = None) -> bytes:
    return struct.pack(f">{NONCE_BYTES}sI", nonce, len(body) if length is None else length) + body


def read(data: bytes, asked: PendingCall = ASKED) -> object:
    inbox = ReplyParser(OURS)
    inbox.feed(data)
    return inbox.parse_reply(asked)


@given(st.lists(values, max_size=8), st.booleans(), st.data())
def test_results_round_trip_exactly_in_any_pieces(output: list[SampleResult], last: bool, data: st.DataObject) -> None:
    asked = PendingCall(12, (0,) * len(output))
    full, inbox = encode_reply(OURS, asked, output, last), ReplyParser(OURS)
    cut = data.draw(st.integers(0, len(full) - 1))
    inbox.feed(full[:cut])
    assert inbox.parse_reply(asked) is None
    inbox.feed(full[cut:])
    found = inbox.parse_reply(asked)
    assert found is not None
    assert found.last is last
    assert [repr(j.value) for j in found.results] == [repr(j.value) for j in output]
    assert [j.reason for j in found.results] == [j.reason for j in output]
    printable = [(j.message, k.message) for j, k in zip(found.results, output, strict=True) if k.message.isprintable()]
    assert all(shown == meant[:1000] for shown, meant in printable)


@given(st.lists(scored, min_size=1, max_size=4))
def test_steps_round_trip(output: list[SampleResult]) -> None:
    asked = PendingCall(0, (40,) * len(output), process_reward=True)
    found = read(encode_reply(OURS, asked, output), asked)
    assert found.results == output  # type: ignore[attr-defined]


def test_first_message_round_trips() -> None:
    for error in ("", "no licence\nfile"):
        inbox = ReplyParser(OURS)
        inbox.feed(encode_ready(OURS, error))
        assert inbox.parse_ready() == error


def test_messages_are_truncated_without_control_characters() -> None:
    output = SampleResult(None, "raised", "\x1b[2J" + "\ud800" + "x" * 5000, "E" * 500)
    found = read(encode_reply(OURS, replace(ASKED, lengths=(5,)), [output]), replace(ASKED, lengths=(5,)))
    (judgement,) = found.results  # type: ignore[attr-defined]
    assert judgement.message.startswith("\ufffd[2J?xxx")
    assert (len(judgement.message), len(judgement.kind)) == (1000, 100)


def test_a_reply_beyond_its_limit_fails_only_that_call() -> None:
    asked = PendingCall(0, (10,), process_reward=True)
    many = SampleResult(steps=tuple((1 + k % 10, 0.123456789) for k in range(9000)))
    (judgement,) = read(encode_reply(OURS, asked, [many]), asked).results  # type: ignore[attr-defined]
    assert (judgement.reason, judgement.steps) == ("type", ())
    assert "return fewer" in judgement.message


class Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("executed",)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (pickle.dumps(Bomb()), "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[3, [[1.0", "not JSON"),
        (b"[" * 60_000, "not JSON: RecursionError"),
        (b"[3, [[NaN, null, '', '', [], '', []]], false]", "not JSON"),
        (b'[3, [[NaN, null, "", "", [], "", []], [1, null, "", "", [], "", []]], false]', "not JSON"),
        (b'[3, [[Infinity, null, "", "", [], "", []], [1, null, "", "", [], "", []]], false]', "not JSON"),
        (b'[3, [[1e999, null, "", "", [], "", []], [1, null, "", "", [], "", []]], false]', "not a finite number"),
        (b"[3, [[" + b"9" * 5000 + b', null, "", "", [], "", []], [1, null, "", "", [], "", []]], false]', "not JSON"),
        ([3, [[10**400, None, *FINE], [1, None, *FINE]], False], "not a finite number"),
        ([3, [[-2e18, None, *FINE], [1, None, *FINE]], False], "not a finite number"),
        ([3, [[True, None, *FINE], [1, None, *FINE]], False], "not a finite number"),
        ([3, [["1", None, *FINE], [1, None, *FINE]], False], "not a finite number"),
        ([3, [[1, None, *FINE]], False], "1 results for 2 samples"),
        ([3, [[1, None, *FINE]] * 3, False], "3 results for 2 samples"),
        ([2, [[1, None, *FINE]] * 2, False], "reply to call 2 instead of call 3"),
        ([3.0, [[1, None, *FINE]] * 2, False], "malformed reply"),
        ([True, [[1, None, *FINE]] * 2, False], "malformed reply"),
        ([3, [[1, None, *FINE]] * 2, 0], "malformed reply"),
        ([3, {"0": 1}, False], "malformed reply"),
        ({"number": 3}, "malformed reply"),
        ([3, [[1, "raised", *FINE]] * 2, False], "malformed result"),  # a failure has no value
        ([3, [[None, "timeout", *FINE]] * 2, False], "malformed result"),  # which is the parent's to say
        ([3, [[None, ["raised"], *FINE]] * 2, False], "malformed result"),
        ([3, [[1, None, 5, "", [], "", []]] * 2, False], "malformed result"),
        ([3, [[1, None, "x" * 1001, "", [], "", []]] * 2, False], "malformed result"),
        ([3, [[1, None, "", "x" * 101, [], "", []]] * 2, False], "malformed result"),
        ([3, [[1, None, "", "", [[1, 1.0]], "", []]] * 2, False], "malformed result"),  # no process reward was asked
        ([3, [[1, None, "", "", [], "x" * 4001, []]] * 2, False], "malformed result"),
        ([3, [[1, None, "", "", [], None, []]] * 2, False], "malformed result"),
        ([3, [[1, None, ""]] * 2, False], "malformed result"),
        ([3, [1, 2], False], "malformed result"),
        ([3, [[1, None, "", "", [], "", {"x": 1}]] * 2, False], "malformed result"),
        ([3, [[1, None, "", "", [], "", [["x"]]]] * 2, False], "malformed metric"),
        ([3, [[1, None, "", "", [], "", [["a\nb", 1]]]] * 2, False], "malformed metric"),
        ([3, [[1, None, "", "", [], "", [["x" * 101, 1]]]] * 2, False], "malformed metric"),
        ([3, [[1, None, "", "", [], "", [["x", "1"]]]] * 2, False], "not a finite number"),
    ],
)
def test_malformed_replies_are_rejected(body: object, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ProtocolError, match=says):
        read(framed(body if isinstance(body, bytes) else json.dumps(body).encode()))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("step", [[0, 1.0], [6, 1.0], [1.0, 1.0], [True, 1.0], [1, None], [1], "11", [1, 1e19]])
def test_malformed_steps_are_rejected(step: object) -> None:
    body = json.dumps([3, [[None, None, "", "", [step], "", []]], False]).encode()
    with pytest.raises(ProtocolError):
        read(framed(body), PendingCall(3, (5,), process_reward=True))
    value = json.dumps([3, [[1.0, None, "", "", [], "", []]], False]).encode()
    with pytest.raises(ProtocolError):
        read(framed(value), PendingCall(3, (5,), process_reward=True))


def test_wrong_nonce_and_excessive_length_are_rejected_at_once() -> None:
    with pytest.raises(ProtocolError, match="wrong nonce"):
        read(framed(b"", nonce=bytes(NONCE_BYTES))[: NONCE_BYTES + 4])
    with pytest.raises(ProtocolError, match="4,294,967,295 bytes"):
        read(framed(b"", length=2**32 - 1))
    asked = PendingCall(3, (5, 7))
    assert asked.limit == (1 << 16) + 2 * (1 << 15)
    assert replace(asked, process_reward=True).limit == asked.limit + 12 * 64
    for word in (b'["started", 5]', b'["stopped", null]', b'["started", "%s"]' % (b"x" * 1001), b"[]"):
        inbox = ReplyParser(OURS)
        inbox.feed(framed(word))
        with pytest.raises(ProtocolError, match="unexpected first message"):
            inbox.parse_ready()


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_parsed_or_rejected(data: bytes) -> None:
    for stream in (data, framed(data)):
        inbox = ReplyParser(OURS)
        inbox.feed(stream)
        try:
            found = inbox.parse_reply(ASKED)
        except ProtocolError:
            continue
        assert found is None or len(found.results) == 2


def test_an_exception_is_described_with_the_remedy_at_its_end() -> None:
    text = (
        "it does not work in a thread, since it waits by a signal"
        + ", of the main thread alone" * 8
        + ". Set timeout=None"
    )
    assert describe_error(ValueError(text)) == f"raised ValueError: {text}"
    assert describe_error(ValueError("x" * 500)) == f"raised ValueError: {'x' * 400}..."
