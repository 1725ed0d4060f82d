"""A calibration: of a device that is small enough for a test, written, read, and refused where it is of something else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from policygrad.errors import ConfigError
from policygrad.planning.cost_model import AlgorithmCost, ParallelLayout, Workload
from policygrad.planning.hardware import DEVICES, Calibration, Efficiency, load_calibration
from policygrad.planning.shapes import DenseShape
from policygrad.planning.time_model import TimeModel
from policygrad.training.calibration import CPU, GPU, CalibrationWorkload, build_model, calibrate, fit_decoding

TINY = CalibrationWorkload(
    DenseShape("tiny", 16, 32, 2, 2, 1, 8, 40, tied=True, qk_norm=True),
    Workload(2, 2, 3, 6, 6),
    (16,),
    2**16,
    (2, 4),
    5,
    repeats=1,
)


@pytest.fixture(scope="module")
def measured() -> tuple[Calibration, list[str]]:
    message = list[str]()
    return calibrate("fp32", "cpu", message.append, TINY), message


def test_a_plan_of_what_was_measured_comes_out_as_measured(measured: tuple[Calibration, list[str]]) -> None:
    result, message = measured
    device, reached = result.apply(DEVICES["cpu"], "fp32")
    clock = TimeModel(TINY.shape, device, reached, ParallelLayout(1, dtype="fp32"))
    seconds, tokens = result.details["seconds"], TINY.workload.count_tokens()
    assert clock.training_seconds(tokens, AlgorithmCost()) == pytest.approx(seconds["training"])
    assert clock.scoring_seconds(tokens) == pytest.approx(seconds["scoring"])
    assert device.fp32 > 0
    assert device.bf16 == DEVICES["cpu"].bf16  # not measured
    assert len(message) == 5


def test_what_grows_with_completions_is_told_from_what_does_not() -> None:
    """A sampler that reaches half of what it could, and takes 3 ms a layer besides."""
    clock = TimeModel(
        TINY.shape, DEVICES["cpu"], Efficiency(sampling=0.5, layer_overhead=3e-3), ParallelLayout(1, dtype="fp32")
    )
    speed = clock.sampler_speed(Workload(2, 2, 3, 5, 5))
    few, many = (speed.fixed + n * speed.per_completion for n in TINY.decode_rows)
    assert fit_decoding(TINY, clock, few, many) == {
        "sampling": pytest.approx(0.5),
        "layer_overhead": pytest.approx(3e-3),
    }


def test_the_usual_trials_have_the_shape_that_they_say() -> None:
    for trial in (CPU, GPU):
        assert (
            trial.decode_rows[1] % trial.workload.samples_per_prompt
            == trial.decode_rows[0] % trial.workload.samples_per_prompt
            == 0
        )
    assert sum(p.numel() for p in build_model(CPU.shape, "fp32", "cpu").parameters()) == CPU.shape.parameters


def test_it_is_written_and_read(measured: tuple[Calibration, list[str]], tmp_path: Path) -> None:
    result, _ = measured
    result.write(tmp_path / "c.json")
    second = load_calibration(tmp_path / "c.json")
    assert (second.device, second.efficiency, second.dtype) == (result.device, result.efficiency, "fp32")
    with pytest.raises(ConfigError, match="cannot be written"):
        result.write(tmp_path / "nowhere" / "c.json")


def test_it_is_of_one_device_and_one_precision(measured: tuple[Calibration, list[str]]) -> None:
    result, _ = measured
    with pytest.raises(ConfigError, match="measured on cpu, but --gpus names H100"):
        result.apply(DEVICES["H100"], "fp32")
    with pytest.raises(ConfigError, match=r"calibrate with --learner\.dtype bf16"):
        result.apply(DEVICES["cpu"], "bf16")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "else"}, "is not a file of `policygrad plan --calibrate`"),
        ({"efficiency": {"training": 0}}, "is damaged"),
        ({"efficiency": {"other": 1}}, "is damaged"),
        ({"efficiency": {"training": "1"}}, "is damaged"),
        ({"device": {}}, "is damaged"),
    ],
)
def test_other_files_are_refused(
    change: dict[str, object], message: str, measured: tuple[Calibration, list[str]], tmp_path: Path
) -> None:
    path = tmp_path / "c.json"
    measured[0].write(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError, match=message):
        load_calibration(path)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--calibrate` writes one"):
        load_calibration(tmp_path / "c.json")
    (tmp_path / "c.json").write_text("{")
    with pytest.raises(ConfigError, match="is not JSON"):
        load_calibration(tmp_path / "c.json")


def test_the_command_measures_this_machine_and_plans_with_it(
    run_command: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a work that takes less than the minute of the command's own."""
    monkeypatch.setattr("policygrad.training.calibration.CPU", TINY)
    monkeypatch.setattr("policygrad.training.calibration.GPU", TINY)
    file = tmp_path / "calibration.json"
    code, out, err = run_command("plan", "--calibration", str(file), "--calibrate", "--learner.dtype", "fp32")
    assert (code, out) == (0, f"{file}\n"), err
    result = load_calibration(file)
    assert result.device.utilisation == 1  # what was measured is the efficiency itself
    assert all(getattr(result.efficiency, name) > 0 for name in ("training", "scoring", "sampling"))
    if result.device.name != "cpu":
        return
    argv = ["--gpus", "cpu", "--model", "tiny", "--context", "64", "--prompt", "16", "--json"]
    code, out, err = run_command("plan", "--calibration", str(file), *argv)
    assert code == 0, err
    report = json.loads(out)
    assert report["efficiency"] == json.loads(file.read_text())["efficiency"]
    assert report["device"]["fp32"] == result.device.fp32
