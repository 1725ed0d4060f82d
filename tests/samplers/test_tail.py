"""Waiting for the last of the requests that run together."""

from __future__ import annotations

from contextlib import ExitStack

from policygrad.samplers.engines.tail import RequestTail


def test_the_tail_is_the_time_from_nine_tenths_of_the_requests_that_overlap_to_the_last() -> None:
    now = 0.0
    tail = RequestTail(lambda: now)
    requests = [ExitStack() for _ in range(11)]
    for request in requests:
        request.enter_context(tail.request())
    for i, request in enumerate(requests):
        now = i * i  # nine tenths, the tenth of eleven, have ended at 81
        request.close()
    assert tail.pop() == 100 - 81
    assert tail.pop() == 0


def test_requests_of_several_callers_are_one_tail_while_they_overlap() -> None:
    now = 0.0
    tail = RequestTail(lambda: now)
    first, second, alone = ExitStack(), ExitStack(), ExitStack()
    first.enter_context(tail.request())
    second.enter_context(tail.request())
    now = 2.0
    first.close()
    assert tail.pop() == 0  # the second goes on
    now = 7.0
    second.close()
    alone.enter_context(tail.request())
    now = 20.0
    alone.close()  # nothing ran beside it
    assert tail.pop() == 5
