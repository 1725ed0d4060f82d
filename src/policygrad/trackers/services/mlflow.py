"""MLflow. MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME count."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from policygrad.trackers.base import RunInfo, Tracker
from policygrad.trackers.services.base import finite, flat, identity, project, remember, title

MOST = 100
"""Parameters in one call."""
LONGEST = 6000
"""Characters of a parameter's value."""


class MLflow(Tracker):
    """Metrics over steps, the configuration as parameters. Steps that a resumed run does again stand there twice."""

    def start(self, info: RunInfo) -> None:
        from mlflow import MlflowClient

        self._client: Any = MlflowClient()
        self._status = "FAILED"
        known = identity(info, "mlflow")
        if known is not None:
            self._client.update_run(known, "RUNNING")
            self._id = known
            return
        name = project("MLFLOW_EXPERIMENT_NAME")
        experiment = self._client.get_experiment_by_name(name)
        where = experiment.experiment_id if experiment is not None else self._client.create_experiment(name)
        self._id = self._client.create_run(where, run_name=title(info)).info.run_id
        remember(info.folder, "mlflow", self._id)
        self._parameters(flat(info.config))

    def _parameters(self, values: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        told = [Param(_name(k), str(v)[:LONGEST]) for k, v in values.items()]
        for begin in range(0, len(told), MOST):
            self._client.log_batch(self._id, params=told[begin : begin + MOST])

    def log(self, step: int, metrics: Mapping[str, float], completions: Sequence[Mapping[str, Any]] = ()) -> None:
        self.log_evaluation(step, metrics)

    def log_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        self._client.log_batch(self._id, metrics=[Metric(_name(k), v, now, step) for k, v in finite(metrics).items()])

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
