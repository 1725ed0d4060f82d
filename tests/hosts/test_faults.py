"""Faults between hosts, those that take less than a minute (of a Ray cluster: `test_ray_hosts.py`); `scripts/measure_hosts.py`
measures all of them. `make test-hosts`."""

from __future__ import annotations

from pathlib import Path

import measure_hosts
import pytest
from measure_hosts import FAULTS

pytestmark = pytest.mark.hosts
FAST = {
    "ranks": ("cut 5 s", "host dies", "first host dies"),
    "engine": ("cut 5 s", "host dies", "dns", "address", "disk"),
}


@pytest.mark.parametrize("kind", FAST)
def test_a_fault_loses_nothing_and_trains_from_no_other_weights(kind: str, tmp_path: Path) -> None:
    outcomes = list(measure_hosts.measure_faults(kind, FAST[kind], tmp_path))
    assert len(outcomes) == len(FAST[kind])
    assert not [outcome for outcome in outcomes if outcome.broken]
    assert [outcome.went_on for outcome in outcomes] == [FAULTS[name].goes_on[kind] for name in FAST[kind]]


def test_a_run_that_is_another_one_than_without_a_fault_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The measure itself can fail."""
    monkeypatch.setattr(measure_hosts, "undisturbed", lambda kind: "of another run")
    (outcome,) = measure_hosts.measure_faults("engine", ["cut 5 s"], tmp_path)
    assert "completions or weights are others than those of a run without a fault" in outcome.broken[0]
