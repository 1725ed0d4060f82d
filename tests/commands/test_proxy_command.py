"""`policygrad proxy`: what waits is sampled for together, and given text is scored as the model scores it."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

import policygrad as pg
from doubles.scripted_sampler import ScriptedSampler
from policygrad.commands.served_model import ServedModel
from policygrad.commands.text_scores import GivenText, TokenScore, score_texts
from policygrad.proxy.formats import COMPLETIONS, ApiError, ChatRequest, parse_chat
from policygrad.rollout.conversation_tree import ConversationTree
from policygrad.samplers.base import Request, SamplingParams
from policygrad.samplers.local.cuda_graphs import STEPS
from policygrad.samplers.local.sampler import ABANDONED_STEPS


@pytest.fixture(scope="module")
def model() -> ServedModel:
    return ServedModel("tiny")


class Noting:
    """A sampler that notes how many requests each call begins with."""

    def __init__(self, sampler: pg.LocalSampler) -> None:
        self.sampler, self.calls = sampler, list[int]()

    def generate_arriving(self, requests: Sequence[Request], take: Any, finish: Any) -> None:
        self.calls.append(len(requests))
        self.sampler.generate_arriving(requests, take, finish)


def answer(model: ServedModel, *requests: ChatRequest) -> tuple[list[Future[Any]], list[int]]:
    """The futures of requests that all wait when sampling begins, and the sizes of the sampler's calls."""
    sampler, noting = model.sampler, Noting(model.sampler)
    futures = [model.submit(request) for request in requests]
    model.sampler = noting  # type: ignore[assignment]
    try:
        if not model.thread_started:  # type: ignore[attr-defined]
            threading.Thread(target=model.run, daemon=True).start()
            model.thread_started = True  # type: ignore[attr-defined]
        for future in futures:
            future.exception(60)
    finally:
        model.sampler = sampler
    return futures, noting.calls


@pytest.fixture(autouse=True)
def _no_thread(model: ServedModel) -> None:
    model.queue, model.thread_started = type(model.queue)(), False  # type: ignore[attr-defined]


def test_all_that_waits_is_sampled_for_together_and_one_that_fails_fails_alone(model: ServedModel) -> None:
    user = [{"role": "user", "content": "1 + 1"}]
    requests = [parse_chat({"messages": user, "max_tokens": 3, "temperature": t, "seed": 1}) for t in (1, 1, 0)]
    futures, calls = answer(model, *requests)
    assert calls == [3]
    alone = ServedModel("tiny")
    for request, future in zip(requests, futures, strict=True):
        ((again,), _) = answer_alone(alone, request)
        assert again.result().choices[0].token_ids == future.result().choices[0].token_ids
    model.queue = type(model.queue)()
    model.thread_started = False  # type: ignore[attr-defined]
    extreme = parse_chat({"messages": user, "max_tokens": 3, "temperature": 1e-300})
    futures, calls = answer(model, requests[0], extreme, requests[1])
    assert [future.exception() is None for future in futures] == [True, False, True]


def answer_alone(model: ServedModel, request: ChatRequest) -> tuple[list[Future[Any]], list[int]]:
    model.queue, model.thread_started = type(model.queue)(), False  # type: ignore[attr-defined]
    return answer(model, request)


def test_a_request_joins_those_that_are_being_sampled_and_is_answered_before_them() -> None:
    """With another temperature and a stop text of its own; both are as they would be alone."""
    model, joins = ServedModel("tiny", max_tokens=200), list[bool]()
    long = COMPLETIONS.parse({"prompt": "1 + 1", "max_tokens": 200, "seed": 1, "temperature": 3})
    short = COMPLETIONS.parse({"prompt": "2 + 3 =", "max_tokens": 3, "seed": 2, "stop": "9", "temperature": 0.5})
    model.sampler.end = torch.empty(0, dtype=torch.int64)  # so that the first one takes long
    submitted = [model.submit(long)]

    class Joining(Noting):
        def generate_arriving(self, requests: Sequence[Request], take: Any, finish: Any) -> None:
            calls = iter(range(10**6))

            def take_later() -> Sequence[Request]:
                if next(calls) == 20:
                    submitted.append(model.submit(short))
                return take()

            def note(request: Request, generation: Any) -> None:
                finish(request, generation)
                joins.append(submitted[0].done())

            super().generate_arriving(requests, take_later, note)

    sampler = model.sampler
    model.sampler = Joining(sampler)  # type: ignore[assignment]
    threading.Thread(target=model.run, daemon=True).start()
    together = [submitted[0].result(60), submitted[1].result(60)]
    assert joins[:1] == [False]
    assert model.sampler.calls == [1]  # type: ignore[attr-defined]
    alone = ServedModel("tiny", max_tokens=200)
    alone.sampler.end = torch.empty(0, dtype=torch.int64)
    for request, reply in zip((long, short), together, strict=True):
        ((again,), _) = answer_alone(alone, request)
        assert again.result().choices[0].token_ids == reply.choices[0].token_ids
    assert len(together[0].choices[0].token_ids) == 200


def test_an_abandoned_request_is_not_sampled_for(model: ServedModel) -> None:
    request = COMPLETIONS.parse({"prompt": "1 + 1", "max_tokens": 2})
    gone = model.submit(request)
    assert gone.cancel()
    _, calls = answer(model, request)
    assert calls == [1]


def test_echo_scores_given_text_as_the_model_does(model: ServedModel) -> None:
    body = {"prompt": "1 + 2 = 3", "echo": True, "logprobs": 2, "max_tokens": 1, "temperature": 0}
    (future,), _ = answer(model, COMPLETIONS.parse(body))
    reply = future.result()
    ids = torch.tensor([reply.prompt_ids])
    with torch.no_grad():
        logp = model.model(ids).logits[0].float().log_softmax(-1)
    scored = reply.choices[0].prompt
    assert scored.logp[0] is None
    expected = logp[:-1].gather(-1, ids[0, 1:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(scored.logp[1:]), expected, atol=1e-5, rtol=0)
    for place, alternatives in zip(logp, scored.alternatives[1:], strict=False):
        assert max(alternatives.values()) == pytest.approx(float(place.max()), abs=1e-5)
    answer_ = COMPLETIONS.render(COMPLETIONS.parse(body), reply)["choices"][0]
    assert len(answer_["logprobs"]["token_logprobs"]) == len(ids[0]) + 1
    assert answer_["text"].startswith(scored.pieces[0])
    (future,), calls = answer_alone(model, COMPLETIONS.parse({**body, "max_tokens": 0}))
    assert calls == []
    again = future.result().choices[0].prompt
    assert (again.pieces, again.text) == (scored.pieces, scored.text)
    assert again.logp[1:] == pytest.approx(scored.logp[1:], abs=1e-5)


def test_a_text_that_is_scored_is_read_as_the_tokenizer_writes_it_whatever_was_sampled_before(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model.tree = ConversationTree(model.encoder, "a request")
    apart = [model.encoder.hf(letter)["input_ids"][0] for letter in " = "]  # which the tokenizer writes as one token
    monkeypatch.setattr(model, "sampler", ScriptedSampler(model.encoder, lambda key, context: apart))
    (sampled,), _ = answer(model, COMPLETIONS.parse({"prompt": "1", "max_tokens": 3}))
    text = "1" + sampled.result().choices[0].text + "5"
    (continued,), _ = answer_alone(model, COMPLETIONS.parse({"prompt": text, "max_tokens": 1}))
    assert list(continued.result().prompt_ids[1:-1]) == apart
    turns = model.tree.num_turns
    scored = {"prompt": text, "echo": True, "logprobs": 1}
    for body in (scored | {"max_tokens": 1}, scored | {"max_tokens": 0}, {"prompt": [5, 6], "max_tokens": 1}):
        (future,), _ = answer_alone(model, COMPLETIONS.parse(body))
        expected = body["prompt"] if isinstance(body["prompt"], list) else model.encoder.hf(text)["input_ids"]
        assert list(future.result().prompt_ids) == expected
        assert expected[1:-1] != apart
    assert model.tree.num_turns == turns  # nothing that is scored is kept


def test_texts_that_cannot_be_scored_cost_their_own_request(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(model: Any, texts: Sequence[GivenText]) -> list[list[TokenScore]]:
        if any(len(text.ids) > 5 for text in texts):
            raise RuntimeError("out of memory")
        return score_texts(model, texts)

    monkeypatch.setattr("policygrad.commands.text_scores.score_texts", fail)
    body = {"echo": True, "logprobs": 1, "max_tokens": 0}
    bodies = [{**body, "prompt": [5] * length} for length in (3, 9, 4)]
    futures, _ = answer(model, *map(COMPLETIONS.parse, bodies))
    assert [future.exception() is None for future in futures] == [True, False, True]


def test_a_request_for_more_tokens_than_the_server_gives_is_named_once(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(model, "max_tokens", 2)
    requests = [COMPLETIONS.parse({"prompt": "1 + 1", "max_tokens": 7})] * 2
    answer(model, *requests)
    assert capsys.readouterr().err == "a request asks for 7 tokens and gets 2 at most: raise --max-tokens\n"


def test_of_several_tokens_with_one_text_the_most_probable_is_listed(model: ServedModel) -> None:
    first, second, own = model.encoder.hf("\N{GRINNING FACE}")["input_ids"][:3]  # bytes that are no character alone
    score = TokenScore(-3.0, ((first, -0.5), (second, -2.0)))
    assert model._list_alternatives([own], [score]) == ({"\N{REPLACEMENT CHARACTER}": -0.5},)


def test_alternatives_are_those_of_the_distribution_that_was_sampled_from(model: ServedModel) -> None:
    body = {"prompt": "1 + 2 =", "logprobs": 3, "max_tokens": 4, "temperature": 0.7, "seed": 3}
    (future,), _ = answer(model, COMPLETIONS.parse(body))
    (choice,) = future.result().choices
    for piece, logp, alternatives in zip(choice.pieces, choice.logp, choice.alternatives, strict=True):
        assert alternatives[piece] == pytest.approx(logp, abs=1e-4)
        assert 3 <= len(alternatives) <= 4
        assert sum(torch.tensor(list(alternatives.values())).exp()) <= 1 + 1e-5


def test_tokens_are_counted_without_sampling(model: ServedModel) -> None:
    request = parse_chat({"messages": [{"role": "user", "content": "1 + 1"}]})
    from dataclasses import replace

    (future,), calls = answer(model, replace(request, only_counts=True))
    assert calls == []
    assert len(future.result().prompt_ids) > 3
    with pytest.raises(ApiError, match="the model reads"):
        raise answer_alone(model, COMPLETIONS.parse({"prompt": [5] * 10**4}))[0][0].exception()  # type: ignore[misc]


def test_options_that_no_request_could_use_are_refused(
    tmp_path: Path, run_command: Callable[..., tuple[int, str, str]]
) -> None:
    os.mkfifo(tmp_path / "fifo")
    for argv, reason in (
        (("--max-tokens", "-1"), "--max-tokens must be at least 1"),
        (("--record", str(tmp_path / "fifo")), "is a pipe that nothing reads"),
        (("--record", str(tmp_path)), "is a folder"),
    ):
        code, _, err = run_command("proxy", *argv)
        assert code == 2
        assert reason in err


@pytest.mark.parametrize("decodes_ahead", [False, True])
def test_a_completion_that_nobody_waits_for_ends_early_and_leaves_the_others_as_they_are(decodes_ahead: bool) -> None:
    """Also where results are looked at every few tokens only, as on a GPU."""
    model = ServedModel("tiny")
    model.sampler.decodes_ahead = decodes_ahead
    requests = [
        Request(torch.tensor([1, 2, 3 + i]), (0, i), SamplingParams(max_tokens=60), 60, stop=frozenset())
        for i in range(3)
    ]
    whole = asyncio.run(model.sampler.generate(requests))
    assert [len(g.tokens) for g in whole] == [60] * 3
    model.sampler.is_abandoned = lambda request: request is requests[1]
    cut = asyncio.run(model.sampler.generate(requests))
    assert [len(g.tokens) for g in cut] == [60, STEPS + 1 if decodes_ahead else ABANDONED_STEPS, 60]
    assert all(torch.equal(a.tokens, b.tokens[: len(a.tokens)]) for a, b in zip(cut, whole, strict=True))


def test_the_sampler_is_told_whose_client_has_gone_away(model: ServedModel) -> None:
    told = list[bool]()
    gone, kept = (model.submit(COMPLETIONS.parse({"prompt": f"1 + {i}", "max_tokens": 3})) for i in (1, 2))

    class Leaving(Noting):
        is_abandoned: Callable[[Request], bool]

        def generate_arriving(self, requests: Sequence[Request], take: Any, finish: Any) -> None:
            assert gone.cancel()  # as the proxy does when the connection ends
            told.extend(map(self.is_abandoned, requests))
            super().generate_arriving(requests, take, finish)

    sampler, model.sampler = model.sampler, Leaving(model.sampler)  # type: ignore[assignment]
    try:
        threading.Thread(target=model.run, daemon=True).start()
        assert kept.result(60).choices[0].token_ids
    finally:
        model.sampler = sampler
    assert told == [True, False]
    assert gone.cancelled()
