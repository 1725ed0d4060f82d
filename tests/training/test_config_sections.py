"""Each section of a configuration checks itself, and a run asks all of them."""

from __future__ import annotations

from dataclasses import dataclass, fields

import pytest

import policygrad as pg
from policygrad.errors import ConfigError
from policygrad.training.config.run import Run, RunOptions

SECTIONS = [f.name for f in fields(RunOptions) if hasattr(getattr(RunOptions(), f.name), "check")]


@dataclass(frozen=True)
class SilentServer:
    """A sampler that reports no experts."""

    engine: str = "mine"
    returns_routed_experts: bool = False


def test_a_run_asks_every_section(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {"sampling", "sampler", "learner", "optimizer", "evaluation", "checkpoint", "guard"} < set(SECTIONS)
    for name in SECTIONS:

        def refuse(*_: object, name: str = name) -> None:
            raise ConfigError(f"{name} was asked")

        with monkeypatch.context() as patch:
            patch.setattr(type(getattr(RunOptions(), name)), "check", refuse)
            with pytest.raises(ConfigError, match=f"^{name} was asked$"):
                Run()


def test_a_section_takes_what_it_needs_without_a_run() -> None:
    with pytest.raises(ConfigError, match="which mine does not report: set it to false"):
        pg.LearnerConfig(routing_replay=True).check(pg.GRPO, SilentServer())
    with pytest.raises(ConfigError, match=r"max_staleness=1 they sample then: leave one of them out"):
        pg.SamplerConfig(engine="vllm", colocate=True).check(1, pg.SamplingParams())
    with pytest.raises(ConfigError, match=r"guard\.action=rollback lowers the learning rate, and TrustRegion has none"):
        pg.GuardConfig(action="rollback").check(pg.TRPO)
    with pytest.raises(ConfigError, match=r"keep_best='eval/reward' compares evaluations during training"):
        pg.CheckpointConfig(keep_best="eval/reward").check(pg.EvaluationConfig(every=0))
    pg.CheckpointConfig(keep_best="eval/reward").check(pg.EvaluationConfig(every=1))
