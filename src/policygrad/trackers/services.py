"""Trackers of services: MLflow, TensorBoard, Trackio, Weights & Biases. Each one's library is an extra, imported when needed."""

from __future__ import annotations

import contextlib
import io
import json
import math
import netrc
import os
import re
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from policygrad.trackers.base import STOP_SUMMARY, RunInfo, Tracker, choose_sample, format_prompt

PROJECT = "policygrad"  # default project name
RUN_IDS_FILE = "tracked.json"
"""File in the run's folder: service -> its id of this run, so that a resumed run continues there."""
MAX_COMPLETIONS = 16  # maximum completions per step sent to a service; completions.jsonl has all of them


def project_name(variable: str) -> str:
    """Return the value of the service's environment variable, or the default."""
    return os.environ.get(variable) or PROJECT


def run_title(info: RunInfo) -> str:
    """Return the name of the run's folder, or its title."""
    return info.folder.name if info.folder is not None else info.title


def load_run_id(info: RunInfo, service: str) -> str | None:
    """Return the service's id of a resumed run; None for a new one."""
    return None if info.folder is None or info.first_step == 1 else _read_run_ids(info.folder).get(service)


def save_run_id(folder: Path | None, service: str, name: str) -> None:
    """Save the service's id for `load_run_id`."""
    if folder is not None:
        run_ids = _read_run_ids(folder) | {service: name}
        new = folder / f"{RUN_IDS_FILE}.new"
        new.write_text(json.dumps(run_ids) + "\n", encoding="utf-8")
        os.replace(new, folder / RUN_IDS_FILE)


def _read_run_ids(folder: Path) -> dict[str, str]:
    file = folder / RUN_IDS_FILE
    run_ids: dict[str, str] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return run_ids


def select_finite(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics that are finite numbers."""
    return {k: float(v) for k, v in metrics.items() if isinstance(v, int | float) and math.isfinite(v)}


def flatten_config(config: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Flatten a nested configuration: names are joined with dots, lists and objects become text."""
    flattened: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            flattened |= flatten_config(value, f"{above}{name}.")
        else:
            flattened[f"{above}{name}"] = value if isinstance(value, bool | int | float | str) else str(value)
    return flattened


COLUMNS = ("step", "prompt", "completion", "reward", "advantage", "tokens", "truncated")


def select_completions(step: int, completions: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """Return `COLUMNS` of at most `MAX_COMPLETIONS` completions, evenly spaced over the step."""
    stride = max(1, math.ceil(len(completions) / MAX_COMPLETIONS))
    return [
        [step, format_prompt(row.get("prompt", "")), *(row.get(name) for name in COLUMNS[2:])]
        for row in completions[::stride]
    ]


PARAMS_PER_CALL = 100  # MLflow's maximum number of parameters per call
MAX_PARAM_CHARS = 6000  # MLflow's maximum length of a parameter's value


class MLflow(Tracker):
    """Logs metrics and, as parameters, the configuration. Uses MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME.

    Steps that a resumed run repeats appear twice.
    """

    def start(self, info: RunInfo) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client: Any = MlflowClient()
        self._status = "FAILED"
        if (run_id := load_run_id(info, "mlflow")) is not None:
            self._client.update_run(run_id, "RUNNING")
            self._id = run_id
            for name in {*STOP_SUMMARY} & {*self._client.get_run(run_id).data.tags}:  # of the process that stopped
                self._client.delete_tag(run_id, name)
            return
        name = project_name("MLFLOW_EXPERIMENT_NAME")
        experiment = self._client.get_experiment_by_name(name)
        where = experiment.experiment_id if experiment is not None else self._client.create_experiment(name)
        self._id = self._client.create_run(where, run_name=run_title(info)).info.run_id
        save_run_id(info.folder, "mlflow", self._id)
        params = [Param(_name(k), str(v)[:MAX_PARAM_CHARS]) for k, v in flatten_config(info.config).items()]
        for begin in range(0, len(params), PARAMS_PER_CALL):
            self._client.log_batch(self._id, params=params[begin : begin + PARAMS_PER_CALL])

    def log(self, step: int, metrics: Mapping[str, float], completions: Sequence[Mapping[str, Any]] = ()) -> None:
        self.log_evaluation(step, metrics)

    def log_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        values = [Metric(_name(k), v, now, step) for k, v in select_finite(metrics).items()]
        self._client.log_batch(self._id, metrics=values)

    def finish(self, summary: Mapping[str, str]) -> None:
        self._status = "FINISHED"
        for name, value in summary.items():
            self._client.set_tag(self._id, _name(name), value)

    def close(self) -> None:
        if hasattr(self, "_id"):
            self._client.set_terminated(self._id, self._status)
            del self._id


def _name(text: str) -> str:
    """Replace characters that MLflow does not allow in names."""
    return re.sub(r"[^\w\-. :/]", "_", text)


class TensorBoard(Tracker):
    """Writes scalars, the configuration and one completion per step as event files in the run's folder.

    Steps that a resumed run repeats replace the earlier ones.
    """

    def start(self, info: RunInfo) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = (info.folder or Path.cwd()) / "tensorboard"
        purge_step = info.first_step if info.first_step > 1 else None
        self._writer: Any = SummaryWriter(str(folder), purge_step=purge_step)
        text = json.dumps(dict(info.config), indent=2, default=str, ensure_ascii=False)
        self._writer.add_text("run", f"{info.title}\n\n    " + text.replace("\n", "\n    "), info.first_step - 1)

    def log(self, step: int, metrics: Mapping[str, float], completions: Sequence[Mapping[str, Any]] = ()) -> None:
        self.log_evaluation(step, metrics)
        sample = choose_sample(step, completions)
        if sample is not None:
            reward_text = "no reward" if sample.reward is None else f"reward {sample.reward:g}"
            self._writer.add_text(
                "completion", f"{sample.prompt}\n\n---\n\n{sample.completion}\n\n---\n\n{reward_text}", step
            )

    def log_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in select_finite(metrics).items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        if hasattr(self, "_writer"):
            self._writer.close()


class Trackio(Tracker):
    """Logs metrics, the configuration and some completions per step; locally, unless TRACKIO_SPACE_ID is set."""

    def start(self, info: RunInfo) -> None:
        import trackio

        self._trackio: Any = trackio
        run_id = load_run_id(info, "trackio")
        with contextlib.redirect_stdout(io.StringIO()):  # keep its greeting off the terminal
            self._run: Any = trackio.init(
                project=project_name("TRACKIO_PROJECT"),
                name=run_id or run_title(info),
                config=flatten_config(info.config),
                resume="allow" if run_id else "never",
                auto_log_gpu=False,
            )
        save_run_id(info.folder, "trackio", self._run.name)

    def log(self, step: int, metrics: Mapping[str, float], completions: Sequence[Mapping[str, Any]] = ()) -> None:
        rows = select_completions(step, completions)
        shown = {"completions": self._trackio.Table(columns=[*COLUMNS], data=rows)} if rows else {}
        self._run.log({**select_finite(metrics), **shown}, step=step)

    def log_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(select_finite(metrics), step=step)

    def close(self) -> None:
        if hasattr(self, "_run"):
            with contextlib.redirect_stdout(io.StringIO()):
                self._run.finish()
            del self._run


class WandB(Tracker):
    """Logs metrics, the configuration and some completions per step to Weights & Biases, with its environment variables.

    Without an API key the run is stored offline in its folder, to be sent with `wandb sync`. Steps that a resumed run repeats
    appear twice over the same `step`, since W&B cannot delete them.
    """

    def start(self, info: RunInfo) -> None:
        import wandb

        mode = os.environ.get("WANDB_MODE") or ("online" if _has_key() else "offline")
        self._wandb: Any = wandb
        self._run: Any = wandb.init(
            project=project_name("WANDB_PROJECT"),
            name=run_title(info),
            id=load_run_id(info, "wandb"),
            resume="allow",
            mode=mode,  # type: ignore[arg-type]  # the variable's value
            dir=None if info.folder is None else str(info.folder),
            config=dict(info.config),
            settings=wandb.Settings(silent=True, console="off"),  # keep its output off the terminal
        )
        self._code = 1
        save_run_id(info.folder, "wandb", self._run.id)
        summary: Any = self._run.summary
        for name in {*STOP_SUMMARY} & {*summary.keys()}:  # of the process that stopped
            del summary[name]
        if mode == "offline" and info.first_step > 1:
            warnings.warn(
                "W&B is offline: the resumed run is a second folder below the run's `wandb`. To send them as one run: wandb sync "
                f"--id {self._run.id} FOLDER FOLDER",
                stacklevel=2,
            )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float], completions: Sequence[Mapping[str, Any]] = ()) -> None:
        rows = select_completions(step, completions)
        shown = {"completions": self._wandb.Table(columns=[*COLUMNS], data=rows)} if rows else {}
        self._run.log({"step": step, **select_finite(metrics), **shown})

    def log_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **select_finite(metrics)})

    def finish(self, summary: Mapping[str, str]) -> None:
        self._code = 0
        self._run.summary.update(dict(summary))

    def close(self) -> None:
        if hasattr(self, "_run"):
            self._run.finish(exit_code=self._code)
            del self._run


def _has_key() -> bool:
    """Return True if W&B can log in without a prompt: by variable, or by the file that `wandb login` writes."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
