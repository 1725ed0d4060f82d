"""Runs whose layers are shared between processes, or whose texts: that of one, gone on with by any number."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import policygrad as pg
from doubles.files import rows, weights

pytestmark = pytest.mark.usefixtures("forked_ranks")
LOOSE = 2e-4
"""Sums are taken in another order."""


@pytest.mark.full
@pytest.mark.parametrize("shared", ["tensor_parallel", "context_parallel"])
@pytest.mark.parametrize(("ranks", "then"), [(2, 1), (4, 3)])
def test_a_run_goes_on_cut_otherwise(small: pg.Run, tmp_path: Path, ranks: int, then: int, shared: str) -> None:
    """Begun by one process, gone on with by such as share layers or texts, ended by others again."""
    run = replace(small, algorithm=pg.GRPO, steps=4, learner=pg.LearnerConfig(micro_tokens=64))
    full = pg.train(replace(run, output=str(tmp_path / "whole")), display=False)
    folder = tmp_path / "run"
    pg.train(replace(run, output=str(folder)), stop_after=1, display=False)
    cut = replace(run.learner, world_size=ranks, **{shared: 2})
    pg.train(replace(run, learner=cut), resume=folder, stop_after=2, display=False)
    spread = replace(run.learner, world_size=then)
    ended = pg.train(replace(run, learner=spread), resume=folder, display=False)
    assert ended.steps == 4
    message = [[row["completion"] for row in rows(r.output / "completions.jsonl")] for r in (full, ended)]
    assert message[0] == message[1]
    expected, result = weights(full.output), weights(ended.output)
    assert all(torch.allclose(expected[name], result[name], atol=LOOSE) for name in expected)
