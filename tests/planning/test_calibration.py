"""A calibration: of a device that is small enough for a test, written, read, and refused where it is of something else."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from policygrad.errors import ConfigError
from policygrad.planning.cost_model import Asks, Clock, Layout, Work
from policygrad.planning.hardware import DEVICES, Calibration, Reached, load
from policygrad.planning.model_shapes import Shape
from policygrad.training.calibration import CPU, GPU, Trial, calibrate, drawing, model_of

TINY = Trial(
    Shape("tiny", 16, 32, 2, 2, 1, 8, 40, tied=True, qk_norm=True),
    Work(2, 2, 3, 6, 6),
    (16,),
    2**16,
    (2, 4),
    5,
    repeats=1,
)


@pytest.fixture(scope="module")
def measured() -> tuple[Calibration, list[str]]:
    said = list[str]()
    return calibrate("fp32", "cpu", said.append, TINY), said


def test_a_plan_of_what_was_measured_comes_out_as_measured(measured: tuple[Calibration, list[str]]) -> None:
    found, said = measured
    device, reached = found.of(DEVICES["cpu"], "fp32")
    clock = Clock(TINY.shape, device, reached, Layout(1, dtype="fp32"))
    seconds, tokens = found.about["seconds"], TINY.work.tokens()
    assert clock.learned(tokens, Asks()) == pytest.approx(seconds["learning"])
    assert clock.scored(tokens) == pytest.approx(seconds["scoring"])
    assert device.fp32 > 0
    assert device.bf16 == DEVICES["cpu"].bf16  # not measured
    assert len(said) == 5


def test_what_grows_with_completions_is_told_from_what_does_not() -> None:
    """A sampler that reaches half of what it could, and takes 3 ms a layer besides."""
    clock = Clock(TINY.shape, DEVICES["cpu"], Reached(drawing=0.5, layer=3e-3), Layout(1, dtype="fp32"))
    speed = clock.sampler(Work(2, 2, 3, 5, 5))
    few, many = (speed.fixed + n * speed.each for n in TINY.rows)
    assert drawing(TINY, clock, few, many) == {"drawing": pytest.approx(0.5), "layer": pytest.approx(3e-3)}


def test_the_usual_trials_have_the_shape_that_they_say() -> None:
    for trial in (CPU, GPU):
        assert trial.rows[1] % trial.work.samples == trial.rows[0] % trial.work.samples == 0
    assert sum(p.numel() for p in model_of(CPU.shape, "fp32", "cpu").parameters()) == CPU.shape.parameters


def test_it_is_written_and_read(measured: tuple[Calibration, list[str]], tmp_path: Path) -> None:
    found, _ = measured
    found.write(tmp_path / "c.json")
    again = load(tmp_path / "c.json")
    assert (again.device, again.reached, again.dtype) == (found.device, found.reached, "fp32")
    with pytest.raises(ConfigError, match="cannot be written"):
        found.write(tmp_path / "nowhere" / "c.json")


def test_it_is_of_one_device_and_one_precision(measured: tuple[Calibration, list[str]]) -> None:
    found, _ = measured
    with pytest.raises(ConfigError, match="measured on cpu, and --gpus names H100"):
        found.of(DEVICES["H100"], "fp32")
    with pytest.raises(ConfigError, match="calibrate with --dtype bf16"):
        found.of(DEVICES["cpu"], "bf16")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kind": "else"}, "is not what `policygrad plan --calibrate` writes"),
        ({"reached": {"learning": 0}}, "is damaged"),
        ({"reached": {"other": 1}}, "is damaged"),
        ({"reached": {"learning": "1"}}, "is damaged"),
        ({"device": {}}, "is damaged"),
    ],
)
def test_other_files_are_refused(
    change: dict[str, object], said: str, measured: tuple[Calibration, list[str]], tmp_path: Path
) -> None:
    path = tmp_path / "c.json"
    measured[0].write(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError, match=said):
        load(path)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--calibrate` writes one"):
        load(tmp_path / "c.json")
    (tmp_path / "c.json").write_text("{")
    with pytest.raises(ConfigError, match="is not JSON"):
        load(tmp_path / "c.json")


@pytest.mark.long
@pytest.mark.slow
def test_the_command_measures_this_machine_and_plans_with_it(tmp_path: Path) -> None:
    """In about a minute; and a plan of the made-up model's own work is near to what was measured."""
    file = tmp_path / "calibration.json"
    program = [sys.executable, "-m", "policygrad", "plan", "--calibration", str(file)]
    done = subprocess.run([*program, "--calibrate", "--dtype", "fp32"], capture_output=True, text=True, check=True)
    assert done.stdout == f"{file}\n"
    found = load(file)
    assert all(0.01 < getattr(found.reached, name) < 3 for name in ("learning", "scoring", "drawing"))
    if found.device.name != "cpu":
        return
    words = ["--gpus", "cpu", "--model", "tiny", "--context", "64", "--prompt", "16", "--json"]
    told = json.loads(subprocess.run([*program, *words], capture_output=True, text=True, check=True).stdout)
    assert told["reached"] == json.loads(file.read_text())["reached"]
    assert told["device"]["fp32"] == replace(found.device).fp32
