"""What reward functions write about a completion: from their worker to the log, and into the prompt of a self-teacher."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import policygrad as pg
from policygrad.rewards.code import Code
from policygrad.rewards.resolve import resolve_reward
from policygrad.rewards.workers.messages import MAX_FEEDBACK, PendingCall, ReplyParser, SampleResult, encode_reply
from policygrad.rewards.workers.pool import RewardPool


def length(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[Any]:
    """One point for a single letter."""
    good = len(completions[0]) == 1
    return [1.0 if good else {"score": 0.0, "feedback": f"{len(completions[0])} letters"}]


def capital(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[Any]:
    return [{"score": float(completions[0].isupper()), "feedback": None if completions[0].isupper() else "no capital"}]


def plain(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
    return [1.0]


def test_texts_of_several_functions_are_joined_and_scores_count() -> None:
    with RewardPool([length, capital], num_workers=1) as pool:
        scores = pool.score(["p"] * 3, ["A", "b", "cc"], {})
    assert scores.total == [2.0, 1.0, 0.0]
    assert scores.feedback == ["", "no capital", "2 letters\nno capital"]
    assert not scores.failures
    with RewardPool([plain], num_workers=1) as pool:
        assert pool.score(["p"], ["A"], {}).feedback == []


def test_a_dictionary_without_a_score_or_with_another_score_is_a_failure() -> None:
    def without(prompts: Any, completions: Any, **_: Any) -> Any:
        return [{"feedback": "but no score"} if completions[0] == "a" else {"score": "high"}]

    with RewardPool([without], num_workers=1) as pool:
        scores = pool.score(["p"] * 2, ["a", "b"], {})
    assert scores.failures == {"type": 2}
    assert scores.total == [None, None]


def test_a_text_has_a_limit_and_cannot_steer_a_terminal() -> None:
    """Also where every character takes six bytes, the reply is within the limit that the trainer allows."""
    results = [SampleResult(0.0, feedback="\x01" * 9000), SampleResult(0.0, feedback="\x1b[2Jok")]
    call = PendingCall(0, (1, 1))
    parser = ReplyParser(bytes(16))
    parser.feed(encode_reply(bytes(16), call, results))
    reply = parser.parse_reply(call)
    assert reply is not None
    assert reply.results[0].feedback == "\ufffd" * MAX_FEEDBACK
    assert reply.results[1].feedback == "\ufffd[2Jok"


def test_verls_functions_may_write_too(tmp_path: Path) -> None:
    (tmp_path / "scored.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return {'score': 0.5, 'feedback': f'not {ground_truth}', 'acc': 0}\n"
    )
    scored = resolve_reward(f"verl:{tmp_path / 'scored.py'}")
    with RewardPool([scored], num_workers=1) as pool:
        scores = pool.score(["p"], ["x"], {"answer": ["7"]})
    assert (scores.total, scores.feedback) == ([0.5], ["not 7"])


def test_code_tells_the_first_failing_test_if_asked() -> None:
    row = {"test_list": ["assert f(1) == 2", "assert f(2) == 3"]}
    texts = ["```python\ndef f(x): return x + 1\n```", "```python\ndef f(x): return 2\n```"]
    columns = {name: [value] * 2 for name, value in row.items()}
    try:
        Code().reward_prepare()
    except pg.ConfigError as error:
        pytest.skip(str(error))
    assert Code()(["Write f."] * 2, texts, **columns) == [1.0, 0.0]
    right, wrong = Code(feedback=True)(["Write f."] * 2, texts, **columns)
    assert right == 1.0
    assert wrong["score"] == 0.0
    assert "assert f(2) == 3" in wrong["feedback"]
    assert Code.from_options("feedback=yes") == Code(feedback=True)


def shorter(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[Any]:
    """No completion succeeds, so that sdpo has the feedback alone."""
    return [{"score": 0.0, "feedback": f"It has {len(completions[0])} letters."}]


@pytest.mark.full
def test_a_run_of_sdpo_reads_and_logs_it(tmp_path: Path) -> None:
    run = pg.Run(
        algorithm=replace(pg.SDPO, samples_per_prompt=2),
        reward=(shorter,),
        prompts_per_step=2,
        steps=1,
        evaluation=pg.EvaluationConfig(problems=0),
        sampling=pg.SamplingParams(max_tokens=8),
        output=str(tmp_path / "run"),
    )
    pg.train(run, display=False)
    rows = [json.loads(line) for line in (tmp_path / "run" / "completions.jsonl").read_text().splitlines()]
    assert [row["feedback"] for row in rows] == [f"It has {len(row['completion'])} letters." for row in rows]
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(step["reference/prompted"] == 1.0 for step in steps if "reward" in step)
