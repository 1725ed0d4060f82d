"""Evaluation during training samples as `evaluation.*` says, and `policygrad eval RUN` like it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import policygrad as pg
from policygrad.errors import ConfigError
from policygrad.rollout.trajectory import EVALUATE, TRAIN
from policygrad.samplers.local.sampler import LocalSampler

OWN = pg.EvaluationConfig(problems=3, samples_per_prompt=2, every=1, temperature=0.5, top_p=0.9, top_k=5, max_tokens=3)


def test_evaluations_have_their_own_sampling(
    small: pg.Run, tmp_path: Path, run_command: Callable[..., tuple[int, str, str]]
) -> None:
    asked: set[tuple[int, float, float, int, int]] = set()

    def make(model: Any, tokenizer: Any) -> LocalSampler:
        sampler = LocalSampler.from_tokenizer(model, tokenizer)
        generate = sampler.generate

        async def record(requests: Any) -> Any:
            for r in requests:
                asked.add((r.key[1], r.sampling.temperature, r.sampling.top_p, r.sampling.top_k, r.max_tokens))
            return await generate(requests)

        sampler.generate = record  # type: ignore[method-assign]
        return sampler

    run = replace(small, steps=2, evaluation=OWN, output=str(tmp_path / "run"))
    trained = pg.train(run, sampler=make, display=False)
    assert asked == {(TRAIN, 1.0, 1.0, 0, run.sampling.max_tokens), (EVALUATE, 0.5, 0.9, 5, 3)}

    allowed = str(small.reward[0].rpartition(":")[0])
    code, out, err = run_command("eval", str(trained.output), "--json", "--allow-code", allowed)
    assert code == 0, err
    report = json.loads(out)
    assert report["mean"] == trained.after
    assert report["tokens"] <= 3 * 2 * 3
    longer = pg.evaluate(replace(run, evaluation=replace(OWN, max_tokens=7, temperature=2.0)))
    assert longer.num_tokens > report["tokens"]


def test_impossible_sampling_of_evaluations_is_refused() -> None:
    for options, message in {
        ("temperature", -1.0): r"evaluation: sampling\.temperature must be finite",
        ("top_p", 0.0): r"evaluation: sampling\.top_p must be in",
        ("top_k", -1): r"evaluation: sampling\.top_k must be at least 0",
        ("max_tokens", 0): "evaluation: max_tokens must be at least 1",
        ("temperature", 0.0): r"evaluation\.temperature=0 makes all 8 samples of a problem equal",
    }.items():
        with pytest.raises(ConfigError, match=message):
            pg.EvaluationConfig(**dict([options]))
    assert pg.EvaluationConfig(temperature=0.0, samples_per_prompt=1).temperature == 0


def test_progress_is_reported_while_a_chunk_of_problems_is_sampled(small: pg.Run) -> None:
    reports: list[tuple[int, int]] = []
    evaluation = pg.EvaluationConfig(problems=4, samples_per_prompt=2)
    run = replace(small, evaluation=evaluation, sampling=replace(small.sampling, decode_rows=2))
    pg.evaluate(run, progress=lambda done, total: reports.append((done, total)))
    assert reports == [(done, 4) for done in (1, 2, 3, 4)]
