"""Of several processes one runs out of memory: the run ends resumably with half of the tokens, with which it can be resumed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import policygrad as pg
from doubles.files import weights
from doubles.forked_ranks import forking_ranks
from doubles.short_memory import short_of_memory
from policygrad.checkpoint.format import newest_step
from policygrad.errors import MemoryStopError
from policygrad.learners.fsdp.controller import FsdpController
from policygrad.learners.fsdp.learner import FsdpLearner


def updating(learner: FsdpLearner, rank: int, *args: Any) -> Any:
    """In every rank: the second update, in which one of them has too little memory for the second pass."""
    if learner.workers.rank == rank and learner.version == 1:
        with short_of_memory(2):
            return FsdpLearner.update(learner, *args)
    return FsdpLearner.update(learner, *args)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.full), 1])
def test_a_rank_without_memory_ends_the_run_which_resumes_with_half_the_tokens(
    small: pg.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    run = replace(
        small,
        algorithm=pg.GRPO,
        steps=3,
        learner=pg.LearnerConfig(micro_tokens=64, world_size=2),
        output=str(tmp_path / "run"),
    )
    with forking_ranks():
        with monkeypatch.context() as patch:

            def update(self: FsdpController, *args: Any) -> Any:
                return self.run_on_all(updating, rank, *args)

            patch.setattr(FsdpController, "update", update)
            with pytest.raises(MemoryStopError, match=f"rank {rank}: out of memory at .* tokens at a time") as ended:
                pg.train(run, display=False)
        text = str(ended.value)
        assert ended.value.code == 75
        assert "keeps --learner.micro-tokens 32, with which this begins: policygrad train --resume" in text
        kept = json.loads((tmp_path / "run" / "memory.json").read_text())
        assert kept["learner.micro_tokens"]["limit"] == 32
        assert newest_step(tmp_path / "run" / "checkpoints") == 1
        done = pg.train(resume=tmp_path / "run", display=False)
    assert done.steps == 3
    expected = pg.train(
        replace(run, learner=pg.LearnerConfig(micro_tokens=64), output=str(tmp_path / "one")), display=False
    )
    actual = weights(done.output)
    assert all(float((actual[name] - x).abs().max()) < 5e-4 for name, x in weights(expected.output).items())
