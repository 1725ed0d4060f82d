"""Records of steps: a digest of each tensor of the learner, and none is lost with the process that writes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from policygrad.checkpoint import manager
from policygrad.training.config.run import Run
from policygrad.training.step_records import SAMPLED_ELEMENTS, digest_tensor, list_records
from policygrad.training.trainer import train


@pytest.mark.parametrize("size", [0, 1, SAMPLED_ELEMENTS, 28_311_552])
def test_a_digest_samples_from_the_first_element_to_the_last(size: int) -> None:
    # 28,311,552 is the size of SmolLM2-135M's embedding
    tensor = torch.zeros(size, dtype=torch.uint8)
    if size:
        tensor[0], tensor[-1] = 1, 2
    elements = digest_tensor(tensor).elements
    assert len(elements) == min(size, SAMPLED_ELEMENTS)
    assert elements[:1] + elements[-1:] == {0: (), 1: (2.0, 2.0)}.get(size, (1.0, 2.0))


class Killed(BaseException):
    """Stands for SIGKILL: nothing that handles errors sees it."""


@pytest.mark.full
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_process_that_ends_beside_a_checkpoint_loses_no_record(
    small: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    run = replace(small, steps=3, verify=3, output=str(tmp_path / "run"), checkpoint=replace(small.checkpoint, every=1))
    save: Callable[..., Any] = manager.checkpoints.save_checkpoint

    def save_and_end(folder: Path, step: int, *args: Any, **options: Any) -> Any:
        if (step, moment) == (2, "before"):
            raise Killed
        path = save(folder, step, *args, **options)
        if step == 2:
            raise Killed
        return path

    with monkeypatch.context() as patch:
        patch.setattr(manager.checkpoints, "save_checkpoint", save_and_end)
        with pytest.raises(Killed):
            train(run)
    train(resume=tmp_path / "run")
    assert list_records(tmp_path / "run") == [1, 2, 3]
