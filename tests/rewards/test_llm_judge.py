"""A language model as a judge, called over HTTP by real reward workers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from doubles.judge_server import Answer, Asked, judging, shown
from policygrad.errors import ConfigError, RewardError
from policygrad.rewards.base import RewardScores
from policygrad.rewards.llm_judge import LLMJudge, parse_judgement
from policygrad.rewards.resolve import find_code, resolve_reward
from policygrad.rewards.workers.pool import RewardPool
from policygrad.training.config.trust import CodePermissions, code_in_argv, missing_permissions

KEY = "JUDGE_TEST_KEY"


@pytest.fixture
def rubric(tmp_path: Path) -> Path:
    path = tmp_path / "rubric.md"
    path.write_text("Good is what is short.")
    return path


def said(score: Any, **more: Any) -> str:
    return json.dumps({"reason": "so", "score": score, **more})


def spec(rubric: Path, asked: Asked, *options: str) -> str:
    argv = (str(rubric), "model=m", f"url={asked.url}", "wait=0", f"cache={rubric.parent / 'cache'}", *options)
    return f"judge:{','.join(argv)}"


def score(name: str, texts: Sequence[str], environment: Sequence[str] = (), **columns: list[Any]) -> RewardScores:
    with RewardPool([name], num_workers=1, environment=environment) as pool:
        return pool.score([f"about {text}" for text in texts], texts, columns)


def test_scores_are_cached(rubric: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, "s3cret")
    with judging(lambda text, before: (200, said(len(text)), {})) as asked:
        name = spec(rubric, asked, f"key={KEY}", "columns=answer", "temperature=0.5")
        result = score(name, ["a", "bbbb"], [KEY], answer=["x", "y"])
        assert result.total == [0.1, 0.4]  # of the scale 0..10
        assert asked.paths == ["/v1/chat/completions"] * 2
        assert {header["authorization"] for header in asked.headers} == {"Bearer s3cret"}
        body = next(body for body in asked.bodies if shown(body)["completion"] == "a")
        assert shown(body) == {"prompt": "about a", "answer": "x", "completion": "a"}
        assert (body["model"], body["temperature"]) == ("m", 0.5)
        assert body["messages"][0]["content"].startswith("Good is what is short.\n\nAnswer with one JSON object")
        second = score(name, ["a", "bbbb", "a"], [KEY], answer=["x", "y", "z"])  # other workers; one new question
        assert second.total == [0.1, 0.4, 0.1]
        assert len(asked.bodies) == 3


def test_its_reason_is_feedback_where_that_is_wanted(rubric: Path) -> None:
    """Also from what was stored, and by the scale; a judge that gives no reason gives no feedback."""

    def tell(text: str, before: int) -> Answer:
        return (
            200,
            json.dumps({"score": 3}) if text == "b" else json.dumps({"reason": f"{text} is long", "score": 2}),
            {},
        )

    with judging(tell) as asked:
        assert score(spec(rubric, asked), ["a", "b"]).feedback == []
        for _ in range(2):
            result = score(spec(rubric, asked, "feedback=yes"), ["a", "b"])
            assert (result.total, result.feedback) == ([0.2, 0.3], ["a is long", ""])
        assert len(asked.bodies) == 2


@pytest.mark.parametrize("form", ["{}", "0.5*{} within 0..1 if format"])
def test_a_sandbox_is_refused_before_any_request(rubric: Path, form: str) -> None:
    with judging(lambda text, before: (200, said(5), {})) as asked:
        with pytest.raises(ConfigError, match=r"'judge:.* calls a server, and --rewards.sandbox auto has no network"):
            RewardPool([form.format(spec(rubric, asked))], num_workers=1, sandbox="auto")
        assert not asked.bodies


def test_equal_texts_are_one_request(rubric: Path) -> None:
    with (
        judging(lambda text, before: (200, said(5), {})) as asked,
        RewardPool([spec(rubric, asked)], num_workers=1) as pool,
    ):
        assert pool.score(["p"] * 4, ["same"] * 4, {}).total == [0.5] * 4
        assert len(asked.bodies) == 1
        assert "authorization" not in asked.headers[0]


def test_a_failed_judgement_is_a_failed_sample_not_zero(rubric: Path) -> None:
    says: dict[str, Answer] = {
        "good": (200, said(10), {}),
        "worthless": (200, said(0), {}),
        "chatty": (200, "I would say " + said(7), {}),
        "off": (200, said(11), {}),
        "refused": (400, b'{"error": "no such model"}', {}),
        "html": (200, b"<html>", {}),
        "other": (200, b'{"choices": []}', {}),
    }
    with judging(lambda text, before: says[text]) as asked:
        result = score(spec(rubric, asked), list(says))
    assert result.total == [1.0, 0.0, None, None, None, None, None]
    assert result.failures == {"raised": 5}
    assert all(asked.about(text) == 1 for text in says), "what was said is not asked for again"


def test_temporary_failures_are_retried(rubric: Path) -> None:
    def says(text: str, before: int) -> Answer:
        if text == "down":
            return 503, b"starting", {}
        return (429, b"slow down", {"Retry-After": "0"}) if before < 2 else (200, said(10), {})

    with judging(says) as asked:
        result = score(spec(rubric, asked, "retries=3"), ["busy", "down"])
        assert result.total == [1.0, None]
        assert (asked.about("busy"), asked.about("down")) == (3, 4)
        assert "has not answered in 4 tries: 503" in result.messages[0]
    result = score(spec(rubric, asked, "retries=1"), ["gone"])  # the server is gone
    assert result.total == [None]
    assert "has not answered in 2 tries: ConnectError" in result.messages[0]


def test_max_calls_is_shared_by_workers(rubric: Path) -> None:
    with judging(lambda text, before: (200, said(10), {})) as asked:
        reward = resolve_reward(spec(rubric, asked, "max_calls=2"))
        with RewardPool([reward], num_workers=1) as pool:
            assert pool.score([""], ["a"], {}).total == [1.0]
        with RewardPool([reward], num_workers=1) as pool:  # a worker that takes another's place has no more
            result = pool.score([""] * 3, ["a", "b", "c"], {})
        assert result.total[0] == 1.0, "what is known costs nothing"
        assert sorted(map(str, result.total)) == ["1.0", "1.0", "None"]
        assert len(asked.bodies) == 2
        assert "was called 2 times" in result.messages[0]


def test_a_withheld_or_wrong_key(rubric: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, "s3cret")
    with judging(lambda text, before: (401, b'{"error": "s3cret is no key"}', {})) as asked:
        result = score(spec(rubric, asked, f"key={KEY}"), ["a"])
        assert "authorization" not in asked.headers[0]
        assert f"--rewards.environment {KEY}" in result.messages[0]
        result = score(spec(rubric, asked, f"key={KEY}"), ["a"], [KEY])
        assert f"its key is the environment variable {KEY}" in result.messages[0]
        assert "s3cret" not in result.messages[0]


def test_a_closed_gate_sends_no_request(rubric: Path) -> None:
    with judging(lambda text, before: (200, said(10), {})) as asked:
        result = score(f"0.5*{spec(rubric, asked)} if format:\\Aok", ["ok", "no"])
        assert result.total == [0.5, 0.0]
        assert asked.about("no") == 0


def test_a_missing_column(rubric: Path) -> None:
    with judging(lambda text, before: (200, said(1), {})) as asked, pytest.raises(RewardError, match="column 'hint'"):
        score(spec(rubric, asked, "columns=hint"), ["a"])


@pytest.mark.parametrize("text", [said(3), f" {said(3)}\n", f"```json\n{said(3)}\n```", f"```\n{said(3.0)}\n```"])
def test_valid_responses(text: str) -> None:
    assert parse_judgement(text, 0, 10).score == 3


@pytest.mark.parametrize(
    "text",
    [
        *("", "3", "[3]", "{}", said("3"), said(True), said(None), said(-0.1), said(10.01), '{"score": NaN}'),
        *(
            '{"score": 1, "score": 9}',
            said(3) + said(3),
            f"Sure: {said(3)}",
            f"```json\n{said(3)}\n``` done",
            "[" * 9999,
        ),
        '{"score": 1e999}',
    ],
)
def test_invalid_responses(text: str) -> None:
    with pytest.raises(RewardError, match="the judge's response is not"):
        parse_judgement(text, 0, 10)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("no-such.md,model=m", "the rubric no-such.md cannot be read"),
        ("{rubric}", "needs model"),
        ("{rubric},model=m,url=localhost", "an address"),
        ("{rubric},model=m,key=sk-123", "the \\*name\\* of an environment variable"),
        ("{rubric},model=m,scale=5", "scale is LOW..HIGH, not '5'"),
        ("{rubric},model=m,session=x", "has no option 'session'"),
        ("{rubric},model=m,max_calls=0", "at least 1"),
        ("{rubric},model=m,timeout=nan", "timeout above 0"),
    ],
)
def test_invalid_options(rubric: Path, argv: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        resolve_reward(f"judge:{argv.format(rubric=rubric)}")


def test_files_need_permission_for_remote_judges(tmp_path: Path) -> None:
    """A foreign run folder names the server, the key and the variables that workers get: that takes permission."""
    away = "judge:r.md,model=m,url=http://localhost@evil.example/v1,key=AWS_SECRET_ACCESS_KEY"
    file = tmp_path / "run.toml"
    address = "http://localhost@evil.example/v1"
    assert missing_permissions({"reward": [f"math if {away}"]}, file) == [address]
    assert missing_permissions({"reward": [away]}, file, CodePermissions((address,))) == []
    assert code_in_argv(["train", "--reward", away]) == [address]
    assert missing_permissions({"reward": [away]}, file, CodePermissions(("http://localhost",))) == [address]
    assert find_code("judge:r.md,model=m") == ("https://api.openai.com/v1",)
    assert find_code("judge:r.md,model=m,url=http://127.0.0.1:8000/v1") == ()


def test_defaults(rubric: Path) -> None:
    result = resolve_reward(f"judge:{rubric},model=m")
    assert isinstance(result.function, LLMJudge)
    assert (result.batched, result.function.url, result.function.scale) == (
        True,
        "https://api.openai.com/v1",
        (0.0, 10.0),
    )
