"""A teacher behind a server: its log-probabilities are the model's own; a server that cannot be one is refused with a remedy."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from doubles.teacher_forms import Reply, TeacherForm
from policygrad.errors import ConfigError, EngineError
from policygrad.models.loading import load_model
from policygrad.models.tokenizer import Tokenizer, load_tokenizer
from policygrad.samplers.config import TeacherServerConfig
from policygrad.samplers.engines.registry import list_engines
from policygrad.samplers.engines.teachers import TeacherServer, make_probe_texts
from policygrad.utils.async_runner import AsyncRunner

URL = "http://teacher:8000/v1"
IDS = [5, 70, 300, 12, 9, 4]


@pytest.fixture(scope="module")
def teacher(random_model: Path) -> tuple[Any, Tokenizer]:
    model = load_model(str(random_model), dtype="fp32", device="cpu")
    return model, load_tokenizer(str(random_model), model)


@pytest.fixture
def wait() -> Iterator[AsyncRunner]:
    with AsyncRunner() as waiter:
        yield waiter


def connect(
    form: TeacherForm,
    tokenizer: Tokenizer,
    wait: AsyncRunner,
    address: str = URL,
    top_k: int = 0,
    **options: Any,
) -> TeacherServer:
    config = TeacherServerConfig(**{"recovery_timeout": 0.2, **options})
    server = TeacherServer(address, tokenizer, config, transport=form.transport, top_k=top_k)
    wait(server.connect(32))
    return server


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("start", [1, 3])
def test_scores_are_the_model_s_own(engine: str, start: int, teacher: Any, wait: AsyncRunner) -> None:
    model, tokenizer = teacher
    form = TeacherForm(model, tokenizer.hf, engine)
    server = connect(form, tokenizer, wait)
    scores = wait(server.score(IDS, start)).logp
    expected = model(input_ids=torch.tensor([IDS])).logits[0].log_softmax(-1)
    assert torch.allclose(scores, expected[range(start - 1, 5), IDS[start:]].detach(), atol=1e-5)
    assert form.scored == [IDS]
    assert {body["model"] for path, body, _ in form.requests if path == "/v1/completions"} <= {"teacher"}


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_likeliest_tokens_are_the_model_s_own(engine: str, teacher: Any, wait: AsyncRunner) -> None:
    model, tokenizer = teacher
    server = connect(TeacherForm(model, tokenizer.hf, engine), tokenizer, wait, top_k=3)
    scores = wait(server.score(IDS, 2))
    expected = model(input_ids=torch.tensor([IDS])).logits[0].log_softmax(-1)[1:5].detach()
    assert scores.top is not None
    assert scores.top.logp.shape == (4, 3)  # also where the given token is a fourth
    assert torch.equal(scores.top.ids.long(), expected.topk(3).indices)
    assert torch.allclose(scores.top.logp, expected.topk(3).values, atol=1e-5)
    assert torch.allclose(scores.logp, expected[range(4), IDS[2:]], atol=1e-5)


def test_a_server_that_tells_fewer_tokens_is_refused_with_its_option(teacher: Any, wait: AsyncRunner) -> None:
    model, tokenizer = teacher

    def fewer(path: str, body: Any, reply: Reply) -> Reply:
        if path == "/generate":
            for place in filter(None, reply[1]["meta_info"]["input_top_logprobs"]):
                del place[2:]
        return reply

    def refuse(path: str, body: Any, reply: Reply) -> Reply:
        text = "Requested prompt logprobs of 30, which is greater than max allowed: 20"
        return (400, {"error": {"message": text}}) if path == "/v1/completions" else reply

    with pytest.raises(EngineError, match=r"its 3 likeliest tokens .* and tells 2: set top_k to 2 at most"):
        connect(TeacherForm(model, tokenizer.hf, "sglang", change=fewer), tokenizer, wait, top_k=3)
    with pytest.raises(EngineError, match=r"max allowed: 20.*start vLLM with --max-logprobs 30, .* or lower top_k"):
        connect(TeacherForm(model, tokenizer.hf, change=refuse), tokenizer, wait, top_k=30)


def test_likeliest_tokens_that_are_no_distribution_are_refused(teacher: Any, wait: AsyncRunner) -> None:
    model, tokenizer = teacher

    def raise_all(path: str, body: Any, reply: Reply) -> Reply:
        if path == "/generate":
            for place in filter(None, reply[1]["meta_info"]["input_top_logprobs"]):
                place[:] = [[-0.1, i, None] for _, i, _ in place]
        return reply

    with pytest.raises(EngineError, match="probabilities sum to more than 1: start it with log-probabilities"):
        connect(TeacherForm(model, tokenizer.hf, "sglang", change=raise_all), tokenizer, wait, top_k=3)


def test_a_model_of_several_is_chosen_by_name(teacher: Any, wait: AsyncRunner) -> None:
    model, tokenizer = teacher
    form = TeacherForm(model, tokenizer.hf)
    wait(connect(form, tokenizer, wait, f"{URL}#second").score(IDS, 1))
    assert form.requests[-1][1]["model"] == "second"
    with pytest.raises(EngineError, match="has no model 'third', but teacher, second"):
        connect(form, tokenizer, wait, f"{URL}#third")


def test_engines_that_score_tokens() -> None:
    assert list_engines(lambda engine: engine.scores_tokens) == ["vllm", "sglang"]


class _Shifted:
    """A tokenizer with other ids for the same tokens."""

    def __init__(self, hf: Any) -> None:
        self.hf = hf

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": [(i + 1) % len(self.hf) for i in self.hf(text, **options)["input_ids"]]}


def test_another_tokenizer_is_refused_with_the_first_different_token(teacher: Any, wait: AsyncRunner) -> None:
    model, tokenizer = teacher
    [first, *_] = make_probe_texts(tokenizer.hf)
    token = tokenizer.hf(first, add_special_tokens=False)["input_ids"][0]
    with pytest.raises(EngineError, match=rf"another tokenizer than the policy.* id {token}, .* id {token + 1} in the"):
        connect(TeacherForm(model, _Shifted(tokenizer.hf)), tokenizer, wait)


def test_texts_of_the_check_have_every_added_token(teacher: Any) -> None:
    _, tokenizer = teacher
    texts = "".join(make_probe_texts(tokenizer.hf)[-1:])
    assert tokenizer.hf.get_added_vocab()
    assert all(token in texts for token in tokenizer.hf.get_added_vocab())


def _logits(path: str, body: Any, reply: Reply) -> Reply:
    if path == "/v1/completions":
        for entry in reply[1]["choices"][0]["prompt_logprobs"][1:]:
            next(iter(entry.values()))["logprob"] += 12.0
    return reply


def _infinite(path: str, body: Any, reply: Reply) -> Reply:
    if path == "/v1/completions":
        next(iter(reply[1]["choices"][0]["prompt_logprobs"][-1].values()))["logprob"] = -9999.0
    return reply


def _other_tokens(path: str, body: Any, reply: Reply) -> Reply:
    if path == "/v1/completions":
        reply[1]["choices"][0]["prompt_logprobs"][1] = {"123456": {"logprob": -1.0}}
    return reply


def _too_few(path: str, body: Any, reply: Reply) -> Reply:
    if path == "/v1/completions":
        reply[1]["choices"][0]["prompt_logprobs"].pop()
    return reply


def _none(path: str, body: Any, reply: Reply) -> Reply:
    if path == "/v1/completions":
        reply[1]["choices"][0]["prompt_logprobs"] = None
    return reply


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_logits, "as a log-probability of a given token: it is none"),
        (_infinite, "returns -9999.0 as a log-probability"),
        (_other_tokens, "no log-probability of the token"),
        (_too_few, "log-probabilities of 64 tokens for 65"),
        (_none, "does not answer as vLLM does"),
    ],
)
def test_invalid_replies_are_refused(change: Any, says: str, teacher: Any, wait: AsyncRunner) -> None:
    model, tokenizer = teacher
    with pytest.raises(EngineError, match=says):
        connect(TeacherForm(model, tokenizer.hf, change=change), tokenizer, wait)


def test_sglang_s_scores_of_other_tokens_are_refused(teacher: Any, wait: AsyncRunner) -> None:
    model, tokenizer = teacher

    def swap(path: str, body: Any, reply: Reply) -> Reply:
        if path == "/generate":
            reply[1]["meta_info"]["input_token_logprobs"][-1][1] += 1
        return reply

    with pytest.raises(EngineError, match="log-probabilities of other tokens than it was given"):
        connect(TeacherForm(model, tokenizer.hf, "sglang", change=swap), tokenizer, wait)


def test_a_server_that_does_not_score_is_refused(teacher: Any, wait: AsyncRunner) -> None:
    model, tokenizer = teacher
    with pytest.raises(EngineError, match=r"llamacpp, which does not tell .* serve it with vllm or sglang, or let"):
        connect(TeacherForm(model, tokenizer.hf, "llamacpp"), tokenizer, wait)
    with pytest.raises(EngineError, match="lists no models: is it a server of vLLM or SGLang"):
        connect(TeacherForm(model, tokenizer.hf, change=lambda path, body, reply: (200, {})), tokenizer, wait)


def test_the_key_is_sent_and_never_shown(teacher: Any, wait: AsyncRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = teacher
    form = TeacherForm(model, tokenizer.hf, key="secret-1")
    monkeypatch.delenv("TEACHER_API_KEY", raising=False)
    with pytest.raises(EngineError, match=r"answers 401: it needs a key, and TEACHER_API_KEY is not set"):
        connect(form, tokenizer, wait)
    monkeypatch.setenv("MINE", "secret-2")
    with pytest.raises(EngineError, match=r"answers 401: it needs the key in MINE, which it does not accept") as error:
        connect(form, tokenizer, wait, api_key="MINE")
    assert "secret" not in f"{error.value}{error.value.__cause__}"
    monkeypatch.setenv("MINE", "secret-1")
    wait(connect(form, tokenizer, wait, api_key="MINE").score(IDS, 1))


def test_a_text_longer_than_the_context_is_refused(teacher: Any, wait: AsyncRunner) -> None:
    model, tokenizer = teacher
    with pytest.raises(EngineError, match=r"reads at most 31 tokens, and is to score a text of 32: .* at least 33"):
        connect(TeacherForm(model, tokenizer.hf, context_length=32), tokenizer, wait)
    server = connect(TeacherForm(model, tokenizer.hf, context_length=33), tokenizer, wait)
    with pytest.raises(EngineError, match="a text of 33"):
        wait(server.score([1] * 33, 1))


def test_a_server_that_comes_back_is_asked_again(teacher: Any, wait: AsyncRunner) -> None:
    model, tokenizer = teacher
    form = TeacherForm(model, tokenizer.hf)
    server = connect(form, tokenizer, wait)
    expected = wait(server.score(IDS, 1)).logp
    failures = iter([(503, {"error": "loading"})] * 2)
    form.change = lambda path, body, reply: next(failures, reply)
    assert torch.equal(wait(server.score(IDS, 1)).logp, expected)
    assert server.pop_retries() == 1  # the second failure was that of the check
    assert server.pop_retries() == 0


def test_a_server_that_stays_away_ends_the_run_with_its_address(teacher: Any, wait: AsyncRunner) -> None:
    model, tokenizer = teacher
    form = TeacherForm(model, tokenizer.hf)
    server = connect(form, tokenizer, wait)
    form.change = lambda path, body, reply: (503, {"error": "gone"})
    with pytest.raises(EngineError, match=r"http://teacher:8000: 503 .*--teacher-server.recovery-timeout SECONDS"):
        wait(server.score(IDS, 1))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_concurrency": 0}, "teacher_server.max_concurrency must be at least 1, not 0"),
        ({"timeout": 0.0}, "teacher_server.timeout and teacher_server.recovery_timeout must be above 0"),
        ({"recovery_timeout": math.inf}, "must be above 0 seconds and finite"),
        ({"api_key": "sk-123"}, r"is the \*name\* of an environment variable"),
    ],
)
def test_invalid_options(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        TeacherServerConfig(**options)
