"""TRPO's vine on the real path: it keeps to δ, it counts what it samples, it resumes to the bit, and it is refused elsewhere."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import policygrad as pg
from doubles.resuming import check_resume
from doubles.trackers import Record
from policygrad.lab.control.train import check_control_algorithm
from policygrad.lab.measurement import measure_algorithm
from policygrad.lab.setting import supported_algorithms
from policygrad.lab.worlds import one_prompt
from policygrad.training.config.run import Run
from policygrad.training.config.serialization import check_part_field, list_parts


@pytest.mark.parametrize("distinct", [True, pytest.param(False, marks=pytest.mark.full)])
def test_a_run_respects_delta_and_resume_is_bitwise(small: Run, tmp_path: Path, distinct: bool) -> None:
    algorithm = replace(pg.TRPO_VINE, advantage=(pg.Vine(states=2, actions=3, distinct=distinct),))
    own = tmp_path / "own.py"
    own.write_text("def variety(prompts, completions, **columns):\n    return [len(set(c)) / 8 for c in completions]\n")
    run = replace(small, algorithm=algorithm, lr=None, steps=2, samples_per_prompt=2, reward=(f"{own}:variety",))
    record = Record()
    check_resume(run, tmp_path, display=record)
    for _, metrics in record.steps:
        assert metrics["updates/taken"] == 1
        assert 0 < metrics["trust_region/kl"] <= 0.01
        assert abs(metrics["objective"]) < 1e-4  # L − Q̄ where the step begins
        assert 0 < metrics["tokens/vine"] < metrics["tokens/sampled"]
        assert 1 <= metrics["vine/actions"] <= 3
        assert metrics["completions/trained"] == pytest.approx(metrics["vine/states"] * 3, abs=metrics["vine/states"])


def test_lab_and_control_refuse_vine() -> None:
    with pytest.raises(pg.ConfigError, match=r"trpo_vine trains on single tokens.*use trpo"):
        measure_algorithm(pg.TRPO_VINE, one_prompt(2))
    assert supported_algorithms({"trpo": pg.TRPO, "trpo_vine": pg.TRPO_VINE}) == {"trpo": pg.TRPO}
    with pytest.raises(pg.ConfigError, match="cannot be set back"):
        check_control_algorithm(replace(pg.TRPO_VINE, old_policy="learner"))


def test_each_part_fits_its_field_only() -> None:
    """One module, three roles."""
    places = {"advantage": "Vine", "gate": "SelfNormalised", "terms": "SelfNormalisation"}
    for place, name in places.items():
        assert name in list_parts(place)
        assert {*places.values()} & {*list_parts(place)} == {name}
        check_part_field(getattr(pg, name), "here", f"algorithm.{place}")
    with pytest.raises(pg.ConfigError, match=r"Vine goes into 'advantage', not 'gate', which takes .*Clip"):
        check_part_field(pg.Vine, "here", "algorithm.gate")
