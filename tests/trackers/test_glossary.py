"""Every number that a run tells of itself is described, and what is described exists."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

import policygrad as pg
from doubles import rewards
from doubles.cases import keep_fast
from policygrad.commands.show import show
from policygrad.trackers.glossary import MetricDoc, find_metric_doc, load_glossary

SOURCE = Path(pg.__file__).parent
ROOMS = ("core", "environments", "learners", "models", "rollout", "samplers", "training")
NO_METRICS = re.compile(r"(adam|critic|reference|weights|runs/distill|rng|tools|reward_model/\{|tok)\b")
"""Names of tensors in a checkpoint, a folder, and a unit."""


def told() -> set[str]:
    """What stands in the code as the name of a metric: `"staleness/max"`, `f"rewards/{name}"`, with * for what is filled in."""
    text = "\n".join(p.read_text(encoding="utf-8") for room in ROOMS for p in (SOURCE / room).rglob("*.py"))
    names = set(re.findall(r"\"([a-z_]+/[a-z_/{}]+)\"", text))
    return {re.sub(r"\{\w+\}", "*", name) for name in names if not NO_METRICS.match(name)}


def described() -> list[MetricDoc]:
    return [metric for chapter in load_glossary() for metric in chapter.metrics]


def test_every_metric_in_the_code_is_described() -> None:
    names = told()
    assert len(names) > 50
    plain = {name for name in names if "*" not in name}
    assert {name for name in plain if find_metric_doc(name) is None} == set()
    assert {n for n in names - plain if not any(fnmatchcase(m.name, n) for m in described())} == set()


def test_every_described_metric_exists() -> None:
    text = "\n".join(p.read_text(encoding="utf-8") for room in ROOMS for p in (SOURCE / room).rglob("*.py"))
    names = told()
    for metric in described():
        known = f'"{metric.name}"' in text or metric.name == "beta/*"  # which is named after a part
        known = known or any(fnmatchcase(metric.name, n) or fnmatchcase(n, metric.name) for n in names)
        assert known, metric.name
        assert metric.unit
        assert metric.text


def test_exact_names_match_before_patterns_and_patterns_in_order() -> None:
    for name, result in (
        ("kl_old/last", "kl_old/last"),
        ("rewards/math/std", "rewards/*/std"),
        ("rewards/failed_timeout", "rewards/failed_*"),
        ("rewards/math", "rewards/*"),
        ("environment/turns", "environment/turns"),
        ("eval/tokens", "eval/*"),
    ):
        known = find_metric_doc(name)
        assert known is not None
        assert known.name == result
    assert find_metric_doc("no such metric") is None
    names = [m.name for m in described()]
    assert len(names) == len({*names})


def test_show_explains_a_metric(capsys: pytest.CaptureFixture[str]) -> None:
    assert show(["entropy"]) == 0
    message = capsys.readouterr().out
    assert "nats per token" in message
    assert "Moves" in message
    with pytest.raises(pg.ConfigError, match="there is no algorithm, part, reward, metric or benchmark 'entropi'"):
        show(["entropi"])


class Heard(pg.Tracker):
    """The names of all metrics."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def log(self, step: int, metrics: Mapping[str, float], completions: Sequence[Mapping[str, Any]] = ()) -> None:
        self.names |= {*metrics}

    def log_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        self.names |= {*metrics}


@pytest.mark.parametrize("name", keep_fast(("ppo", "trpo", "prorl", "prime", "vineppo"), "ppo", "trpo"))
def test_every_metric_of_a_run_is_described(name: str, small: pg.Run, tmp_path: Path) -> None:
    run = replace(
        small,
        algorithm=pg.get_algorithm(name),
        steps=1,
        prompts_per_step=2,
        lr=None,
        sampling=pg.SamplingParams(max_tokens=16, stop=tuple("abcdefghij0123456789")),  # few are cut off
        evaluation=pg.EvaluationConfig(problems=2, samples_per_prompt=1),
        output=str(tmp_path / "run"),
    )
    if name == "vineppo":
        run = replace(run, task="embedded_steps", reward=())
    elif name != "prime":  # whose rewards are labels
        run = replace(run, reward=(f"{rewards.__file__}:brief",))  # so that every group has a spread
    received = Heard()
    pg.train(run, display=False, trackers=[received])
    assert len(received.names) > 25
    assert {n for n in received.names if find_metric_doc(n) is None} == set()
