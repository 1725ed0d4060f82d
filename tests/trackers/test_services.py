"""Each service by its real library, offline: what it was told can be read from it, and a resumed run goes on in the same place."""

from __future__ import annotations

import json
import math
import struct
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from typing import Any

import pytest

import policygrad as pg
from policygrad.commands.completion import generate_script
from policygrad.commands.train import train
from policygrad.errors import ConfigError
from policygrad.trackers.base import STOP_SUMMARY, RunInfo
from policygrad.trackers.registry import TRACKERS, TrackerRow, create_trackers
from policygrad.trackers.services import (
    MAX_COMPLETIONS,
    _has_key,
    flatten_config,
    load_run_id,
    save_run_id,
    select_completions,
    select_finite,
)

CONFIG = {"lr": 1e-3, "algorithm": {"name": "dapo", "advantage": ["GroupMean", "GroupStd"]}, "eval/reward": None}
ROW = {"prompt": "1 + 1 =", "completion": "2", "reward": 1.0, "advantage": 0.5, "tokens": 1, "truncated": False}

RESULT = {"held-out accuracy": "0.25 -> 0.90"}
STOPPED = dict.fromkeys(STOP_SUMMARY, "text")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run's, in a home and a current folder of its own."""
    run = tmp_path / "runs" / "dapo-1"
    run.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_PROJECT", "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    return run


def tell(
    name: str, folder: Path, first: int, last: int, *, finish: bool = True, summary: Mapping[str, str] = RESULT
) -> None:
    """A run from step `first` to `last`."""
    (tracker,) = create_trackers([name])
    with tracker:
        tracker.start(RunInfo("dapo on embedded", steps=3, first_step=first, config=CONFIG, folder=folder))
        if first == 1:
            tracker.log_evaluation(0, {"eval/accuracy": 0.25})
        for step in range(first, last + 1):
            tracker.log(step, {"reward": step / 4 + first, "kl": math.nan}, [ROW] * 3)
        if finish:
            tracker.finish(summary)
    tracker.close()  # twice does no harm


def test_tensorboard_has_every_step_once(folder: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    tell("tensorboard", folder, 1, 3)  # killed after step 3, its checkpoint of step 1
    tell("tensorboard", folder, 2, 3)
    result = accumulators.EventAccumulator(str(folder / "tensorboard"))
    result.Reload()
    assert [(e.step, e.value) for e in result.Scalars("reward")] == [(1, 1.25), (2, 2.5), (3, 2.75)]
    assert [(e.step, e.value) for e in result.Scalars("eval/accuracy")] == [(0, 0.25)]
    assert set(result.Tags()["scalars"]) == {"reward", "eval/accuracy"}
    message = result.Tensors("completion/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "1 + 1 =" in message
    assert "reward 1" in message


@pytest.mark.full
def test_wandb_is_offline_without_a_key_and_resumes_its_id(folder: Path) -> None:
    wandb = pytest.importorskip("wandb")
    tell("wandb", folder, 1, 2)
    with pytest.warns(UserWarning, match="W&B is offline.*wandb sync --id"):
        tell("wandb", folder, 2, 3)
    wandb.teardown()  # waits for the process that writes
    known = json.loads((folder / "tracked.json").read_text())["wandb"]
    parts = sorted(folder.glob("wandb/offline-run-*"))
    assert len(parts) == 2
    assert all(part.name.endswith(f"-{known}") for part in parts)
    report = [record for part in parts for record in records(next(part.glob("*.wandb")))]
    history = [{i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in r.history.item} for r in report]
    steps = [row["step"] for row in history if "reward" in row]
    assert steps == [1, 2, 2, 3]
    assert [row["eval/accuracy"] for row in history if "eval/accuracy" in row] == [0.25]
    assert all("kl" not in row for row in history)
    assert any("completions" in key for row in history for key in row)
    run = next(r.run for r in report if r.WhichOneof("record_type") == "run")
    assert (run.project, run.display_name) == ("policygrad", "dapo-1")
    assert sum(r.WhichOneof("record_type") == "exit" and r.exit.exit_code == 0 for r in report) == 2


def records(file: Path) -> Iterator[Any]:
    """What an offline run holds: protocol buffers in a LevelDB log, whose blocks of 32 KiB begin with the file, after 7 bytes; a
    record is whole (1), or a first, middle and last part (2, 3, 4)."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts, block = file.read_bytes(), 7, b"", 2**15
    while at + 7 <= len(data):
        if (left := block - at % block) < 7:  # too few for a head
            at += left
            continue
        size, kind = struct.unpack_from("<HB", data, at + 4)  # after a checksum
        assert kind in (1, 2, 3, 4)
        parts += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            record = Record()
            record.ParseFromString(parts)
            yield record
            parts = b""
    assert not parts


@pytest.mark.full
def test_mlflow_resumes_the_same_run(folder: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    tell("mlflow", folder, 1, 2, finish=False)
    client = mlflow.MlflowClient()
    known = json.loads((folder / "tracked.json").read_text())["mlflow"]
    assert client.get_run(known).info.status == "FAILED"
    tell("mlflow", folder, 2, 1, summary=STOPPED)
    assert STOPPED.keys() <= client.get_run(known).data.tags.keys()
    tell("mlflow", folder, 2, 3)
    run = client.get_run(known)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "dapo-1")
    assert run.data.params["algorithm.name"] == "dapo"
    assert run.data.tags["held-out accuracy"] == "0.25 -> 0.90"
    assert not STOPPED.keys() & run.data.tags.keys()
    assert [(m.step, m.value) for m in client.get_metric_history(known, "reward")] == [
        (1, 1.25),
        (2, 1.5),
        (2, 2.5),
        (3, 2.75),
    ]
    assert len(client.search_runs([run.info.experiment_id])) == 1


def test_trackio_resumes_the_same_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip(
        "trackio"
    )  # it cannot be installed beside a newer pillow, so the development extra leaves it out
    monkeypatch.setenv("TRACKIO_DIR", str(folder.parent / "trackio"))
    tell("trackio", folder, 1, 2)
    tell("trackio", folder, 2, 3)
    from trackio.sqlite_storage import SQLiteStorage

    assert SQLiteStorage.get_runs("policygrad") == ["dapo-1"]
    rows = [row for row in SQLiteStorage.get_logs("policygrad", "dapo-1") if "reward" in row]
    assert [row["step"] for row in rows] == [1, 2, 2, 3]
    assert "completions" in rows[0]
    assert "Trackio" not in capsys.readouterr().out


def test_an_unknown_service_or_missing_library_is_refused_at_the_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(
        ConfigError, match="'tensorbord' is unknown, use mlflow, otel, tensorboard, trace, trackio, wandb"
    ):
        pg.Run(track=("tensorbord",))
    with pytest.raises(ConfigError, match="separate names by spaces, not commas: wandb tensorboard"):
        pg.Run(track=("wandb,tensorboard",))
    with pytest.raises(ConfigError, match="twice"):
        pg.SFTConfig(track=("wandb", "wandb"))
    monkeypatch.setitem(TRACKERS, "no_such_library", TrackerRow("module:None", "no_such_library"))
    with pytest.raises(ConfigError, match=r"pip install '\.\[no_such_library\]' in a clone"):
        create_trackers(["no_such_library"])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="needs a library that is not installed"):
        pg.train(pg.Run(track=("no_such_library",)), display=False)
    assert not list(tmp_path.iterdir())  # and no folder was made for it


def test_no_library_is_loaded_before_a_run_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by the modules, which are executed once more, nor by a configuration."""
    for name in ("wandb", "mlflow", "tensorboard", "trackio"):
        monkeypatch.setitem(sys.modules, name, None)  # to import it is an error
    for name in ("registry", "services"):
        spec = find_spec(f"policygrad.trackers.{name}")
        assert spec is not None
        assert spec.loader is not None
        spec.loader.exec_module(module_from_spec(spec))
    assert pg.Run(track=("wandb", "mlflow")).track == ("wandb", "mlflow")


def test_services_are_in_run_toml_and_in_shell_completion(capsys: pytest.CaptureFixture[str]) -> None:
    assert train(["grpo", "--track", "tensorboard", "--dry-run"]) == 0
    assert tomllib.loads(capsys.readouterr().out)["track"] == ["tensorboard"]
    assert "--track) words='mlflow otel tensorboard trace trackio wandb'" in generate_script("bash")


def test_a_run_tells_a_service_its_steps_and_evaluations(small: pg.Run, folder: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    measured = pg.EvaluationConfig(problems=4, samples_per_prompt=1)
    run = replace(small, track=("tensorboard",), steps=2, output=str(folder.parent / "real"), evaluation=measured)
    pg.train(run, display=False)
    result = accumulators.EventAccumulator(str(folder.parent / "real" / "tensorboard"))
    result.Reload()
    assert [e.step for e in result.Scalars("reward")] == [1, 2]
    reward = next(tag for tag in result.Tags()["scalars"] if tag.startswith("eval/reward"))
    assert [e.step for e in result.Scalars(reward)] == [0, 2]


def test_services_get_finite_metrics_flat_configuration_and_a_stable_run_id(tmp_path: Path) -> None:
    assert select_finite({"a": 1, "b": math.inf, "c": "x", "d": 0.5}) == {"a": 1.0, "d": 0.5}
    assert flatten_config(CONFIG) == {
        "lr": 1e-3,
        "algorithm.name": "dapo",
        "algorithm.advantage": "['GroupMean', 'GroupStd']",
        "eval/reward": "None",
    }
    rows = select_completions(3, [ROW | {"tokens": i} for i in range(100)])
    assert len(rows) <= MAX_COMPLETIONS
    assert rows[0][:3] == [3, "1 + 1 =", "2"]
    assert rows[-1][5] >= 90
    second = RunInfo("t", first_step=2, folder=tmp_path)
    assert load_run_id(second, "wandb") is None
    save_run_id(tmp_path, "wandb", "abc")
    save_run_id(tmp_path, "mlflow", "def")
    assert (load_run_id(second, "wandb"), load_run_id(second, "mlflow")) == ("abc", "def")
    assert load_run_id(RunInfo("t", folder=tmp_path), "wandb") is None  # a run that begins is another


def test_the_key_is_read_where_wandb_stores_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "netrc"
    monkeypatch.setenv("NETRC", str(file))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_BASE_URL", raising=False)
    assert not _has_key()
    file.write_text("machine api.wandb.ai login user password k\n")
    assert _has_key()
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org:8080")
    assert not _has_key()
    monkeypatch.setenv("WANDB_API_KEY", "k")
    assert _has_key()
