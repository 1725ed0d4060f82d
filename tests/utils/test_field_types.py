"""Options given in Python with another type are refused by name, wherever in the configuration they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import policygrad as pg
from policygrad.errors import ConfigError

REFUSED: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: pg.Run(evaluation=None),
        "evaluation must be a policygrad.EvaluationConfig, such as EvaluationConfig(), not None",
    ),
    (lambda: pg.Run(sampler="vllm"), "sampler must be a policygrad.SamplerConfig"),
    (lambda: pg.Run(optimizer={"clip": 1.0}), "optimizer must be a policygrad.OptimizerConfig"),
    (lambda: pg.Run(steps="3"), "steps must be a whole number, not '3'"),
    (lambda: pg.Run(steps=True), "steps must be a whole number, not True"),
    (lambda: pg.Run(seed=1.5), "seed must be a whole number, not 1.5"),
    (lambda: pg.Run(lr="1e-3"), "lr must be a number or None, not '1e-3'"),
    (lambda: pg.Run(track=3), "track must be a tuple, such as (3,), not 3"),
    (lambda: pg.EvaluationConfig(problems="3"), "evaluation.problems must be a whole number"),
    (lambda: pg.OptimizerConfig(betas=(0.9,)), "optimizer.betas must be a tuple of 2, not (0.9,)"),
    (lambda: pg.LearnerConfig(compile=1), "learner.compile must be auto, on (True) or off (False), not 1"),
    (lambda: pg.Run(trust_remote_code=1), "trust_remote_code must be True or False, not 1"),
    (lambda: pg.SFTConfig(epochs=None), "epochs must be a whole number, not None"),
]


def test_an_option_of_another_type_is_refused_by_name() -> None:
    for make, message in REFUSED:
        with pytest.raises(ConfigError) as caught:
            make()
        assert str(caught.value).startswith(message)


def test_numbers_of_numpy_and_whole_numbers_for_fractions_are_accepted() -> None:
    run = pg.Run(steps=np.int64(3), lr=np.float64(1e-3), optimizer=pg.OptimizerConfig(clip=1))
    assert (run.steps, run.optimizer.clip) == (3, 1)
