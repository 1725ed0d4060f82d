"""Services that follow a run, by name: `--track wandb tensorboard`. One file each; its library is an extra, loaded when needed."""

from __future__ import annotations

import contextlib
import io
import json
import math
import netrc
import os
import re
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from policygrad.errors import ConfigError, install_command
from policygrad.trackers.base import RunInfo, Tracker, choose_sample, format_prompt

SERVICES = {"mlflow": "MLflow", "tensorboard": "TensorBoard", "trackio": "Trackio", "wandb": "WandB"}
"""Name, which is that of the file here, of the extra and of the library; and the class."""


def check_services(names: Sequence[str]) -> None:
    """Raises ConfigError for a name that is no service's, or stands twice."""
    for name in names:
        if "," in name:
            raise ConfigError(f"track: {name!r} is one word: leave spaces between the names, {name.replace(',', ' ')}")
        if name not in SERVICES:
            raise ConfigError(
                f"track: {name!r} is no service that is known: {', '.join(SERVICES)}. From Python any tracker can follow a "
                "run: pg.train(run, trackers=[…])"
            )
    if len({*names}) < len(names):
        raise ConfigError(f"track names a service twice: {', '.join(names)}")


def create_service_trackers(names: Sequence[str]) -> list[Tracker]:
    """The trackers of these names.

    Raises:
        ConfigError: a library that is not installed, with the extra that brings it.
    """
    check_services(names)
    for name in names:
        if find_spec(name) is None:
            raise ConfigError(f"--track {name} needs a library that is not installed: {install_command(name)}")
    return [globals()[SERVICES[name]]() for name in names]


# What the services have in common: which of their runs is this one, and what they can be told of it.

PROJECT = "policygrad"
"""What runs are filed under where the service's own environment variable does not say."""
RUN_IDS_FILE = "tracked.json"
"""In the run's folder: service → the name it knows this run by, so that a resumed run goes on there."""
MAX_COMPLETIONS = 16
"""Completions of a step, at most, that a service is sent; all are in completions.jsonl."""


def project_name(variable: str) -> str:
    """The service's own environment variable, or ours."""
    return os.environ.get(variable) or PROJECT


def run_title(info: RunInfo) -> str:
    """What the run is called: its folder's name."""
    return info.folder.name if info.folder is not None else info.title


def load_run_id(info: RunInfo, service: str) -> str | None:
    """What the service knows this run by, where an earlier process began it there."""
    if info.folder is None or info.first_step == 1:
        return None
    file = info.folder / RUN_IDS_FILE
    run_ids: dict[str, str] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return run_ids.get(service)


def save_run_id(folder: Path | None, service: str, name: str) -> None:
    """For `identity`."""
    if folder is not None:
        file = folder / RUN_IDS_FILE
        run_ids = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        new = file.with_name(file.name + ".new")
        new.write_text(json.dumps(run_ids | {service: name}) + "\n", encoding="utf-8")
        os.replace(new, file)


def select_finite(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Those that are numbers, and finite."""
    return {k: float(v) for k, v in metrics.items() if isinstance(v, int | float) and math.isfinite(v)}


def flatten_config(config: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """A nested configuration as one level, names joined with dots; lists and objects as text."""
    flattened: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            flattened |= flatten_config(value, f"{above}{name}.")
        else:
            flattened[f"{above}{name}"] = value if isinstance(value, bool | int | float | str) else str(value)
    return flattened


COLUMNS = ("step", "prompt", "completion", "reward", "advantage", "tokens", "truncated")


def select_completions(step: int, completions: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """`MAX_SHOWN_COMMAND` completions, evenly spaced over the step's, with `EQUATION_COLUMNS`."""
    stride = max(1, math.ceil(len(completions) / MAX_COMPLETIONS))
    return [
        [step, format_prompt(row.get("prompt", "")), *(row.get(name) for name in COLUMNS[2:])]
        for row in completions[::stride]
    ]


# MLflow. MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME count.

PARAMS_PER_CALL = 100
"""Parameters in one call."""
MAX_PARAM_CHARS = 6000
"""Characters of a parameter's value."""


class MLflow(Tracker):
    """Metrics over steps, the configuration as parameters. Steps that a resumed run does again stand there twice."""

    def start(self, info: RunInfo) -> None:
        from mlflow import MlflowClient

        self._client: Any = MlflowClient()
        self._status = "FAILED"
        run_id = load_run_id(info, "mlflow")
        if run_id is not None:
            self._client.update_run(run_id, "RUNNING")
            self._id = run_id
            return
        name = project_name("MLFLOW_EXPERIMENT_NAME")
        experiment = self._client.get_experiment_by_name(name)
        where = experiment.experiment_id if experiment is not None else self._client.create_experiment(name)
        self._id = self._client.create_run(where, run_name=run_title(info)).info.run_id
        save_run_id(info.folder, "mlflow", self._id)
        self._parameters(flatten_config(info.config))

    def _parameters(self, values: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        params = [Param(_name(k), str(v)[:MAX_PARAM_CHARS]) for k, v in values.items()]
        for begin in range(0, len(params), PARAMS_PER_CALL):
            self._client.log_batch(self._id, params=params[begin : begin + PARAMS_PER_CALL])

    def log(self, step: int, metrics: Mapping[str, float], completions: Sequence[Mapping[str, Any]] = ()) -> None:
        self.log_evaluation(step, metrics)

    def log_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        self._client.log_batch(
            self._id, metrics=[Metric(_name(k), v, now, step) for k, v in select_finite(metrics).items()]
        )

    def finish(self, summary: Mapping[str, str]) -> None:
        self._status = "FINISHED"
        for name, value in summary.items():
            self._client.set_tag(self._id, _name(name), value)

    def close(self) -> None:
        if hasattr(self, "_id"):
            self._client.set_terminated(self._id, self._status)
            del self._id


def _name(text: str) -> str:
    """With the characters that MLflow takes in names."""
    return re.sub(r"[^\w\-. :/]", "_", text)


# TensorBoard: event files in the run's folder, `tensorboard --logdir runs`.


class TensorBoard(Tracker):
    """Scalars, the configuration and a completion of every step. What a resumed run does again takes the place of what it did."""

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


# Trackio, local unless TRACKIO_SPACE_ID says otherwise: `trackio show --project policygrad`.


class Trackio(Tracker):
    """Metrics over steps, the configuration, some completions of every step."""

    def start(self, info: RunInfo) -> None:
        import trackio

        self._trackio: Any = trackio
        run_id = load_run_id(info, "trackio")
        with contextlib.redirect_stdout(io.StringIO()):  # it greets; the terminal is the display's
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


# Weights & Biases. WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE and the rest of its environment variables count.


class WandB(Tracker):
    """Metrics over `step`, the configuration, some completions of every step.

    Without a key nobody is asked for one: the run is kept offline in its folder, and `wandb sync` sends it. Steps that a
    resumed run does again are drawn a second time over the same `step`: nothing can be taken back there.
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
            mode=mode,  # type: ignore[arg-type]  # whatever the variable says
            dir=None if info.folder is None else str(info.folder),
            config=dict(info.config),
            settings=wandb.Settings(silent=True, console="off"),  # the terminal is the display's
        )
        self._code = 1
        save_run_id(info.folder, "wandb", self._run.id)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float], completions: Sequence[Mapping[str, Any]] = ()) -> None:
        shown = (
            self._wandb.Table(columns=[*COLUMNS], data=select_completions(step, completions)) if completions else None
        )
        self._run.log({"step": step, **select_finite(metrics), **({"completions": shown} if shown is not None else {})})

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
    """Whether W&B could log in without asking anybody: by variable, or by the file that `wandb login` writes."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
