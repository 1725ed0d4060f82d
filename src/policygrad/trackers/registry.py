"""Trackers by name: `--track wandb tensorboard trace`. A row is data; its module is imported when the tracker is made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from policygrad.errors import ConfigError, install_command
from policygrad.trackers.base import Tracker
from policygrad.utils.field_types import describe_idle
from policygrad.utils.plugins import find_plugin, list_plugin_names, load_plugin
from policygrad.utils.user_code import load_object

DEFAULT_TRACE_MIB, MIN_TRACE_MIB = 256, 4
"""MiB of disk for a run's trace."""
LOCALHOST = "127.0.0.1"


@dataclass(frozen=True)
class TrackerRow:
    """A tracker of policygrad's own."""

    target: str
    """module:CLASS."""
    library: str = ""
    """What it needs, which is the name of its extra as well."""
    takes_disk: bool = False
    """It is given the MiB that its file may take."""


TRACKERS = {
    "mlflow": TrackerRow("policygrad.trackers.services:MLflow", "mlflow"),
    "otel": TrackerRow("policygrad.trackers.opentelemetry:OpenTelemetry"),
    "tensorboard": TrackerRow("policygrad.trackers.services:TensorBoard", "tensorboard"),
    "trace": TrackerRow("policygrad.trackers.trace:TraceFile", takes_disk=True),
    "trackio": TrackerRow("policygrad.trackers.services:Trackio", "trackio"),
    "wandb": TrackerRow("policygrad.trackers.services:WandB", "wandb"),
}


def check_trackers(names: Sequence[str]) -> None:
    """Raise ConfigError for an unknown or repeated name."""
    for name in names:
        if "," in name:
            raise ConfigError(f"track: separate names by spaces, not commas: {name.replace(',', ' ')}")
        if name not in TRACKERS and find_plugin("tracker", name) is None:
            choices = ", ".join((*TRACKERS, *list_plugin_names("tracker")))
            raise ConfigError(
                f"track: {name!r} is unknown, use {choices}. Python code can pass any tracker: pg.train(run, trackers=[…])"
            )
    if len({*names}) < len(names):
        raise ConfigError(f"track has a name twice: {', '.join(names)}")


def check_tracking(names: Sequence[str], trace_mib: int, metrics_port: str | None) -> None:
    """Raise ConfigError for a wrong option of a run about what is tracked."""
    check_trackers(names)
    if trace_mib < MIN_TRACE_MIB:
        raise ConfigError(f"trace_mib must be at least {MIN_TRACE_MIB}, not {trace_mib}")
    if metrics_port is not None:
        parse_metrics_port(metrics_port)


def find_idle_tracking(names: Sequence[str], trace_mib: int) -> Iterator[str]:
    """Yield options of tracking that can have no effect, each with a remedy."""
    if trace_mib != DEFAULT_TRACE_MIB and "trace" not in names:
        yield from describe_idle(
            [f"trace_mib = {trace_mib}"], "no trace is written. Add --track trace, or leave it out"
        )


def create_trackers(names: Sequence[str], trace_mib: int = DEFAULT_TRACE_MIB) -> list[Tracker]:
    """Return the trackers of these names. trace_mib: MiB of disk for a trace.

    Raises:
        ConfigError: A library is not installed; the message has the command that installs it.
    """
    check_trackers(names)
    for name in names:
        row = TRACKERS.get(name)
        if row is not None and row.library and find_spec(row.library) is None:
            raise ConfigError(f"--track {name} needs a library that is not installed: {install_command(name)}")
    return [_create_tracker(name, trace_mib) for name in names]


def _create_tracker(name: str, trace_mib: int) -> Tracker:
    row, plugin = TRACKERS.get(name), find_plugin("tracker", name)
    if row is None and plugin is not None:
        made: Any = load_plugin(plugin)()
        if not isinstance(made, Tracker):
            raise ConfigError(
                f"--track {name}: {plugin.target} of {plugin.package} made no policygrad.Tracker but {type(made).__name__}"
            )
        return made
    row = TRACKERS[name]
    tracker: Tracker = load_object(row.target, "--track")(*((trace_mib,) if row.takes_disk else ()))
    return tracker


def parse_metrics_port(text: str) -> tuple[str, int]:
    """Return host and port of `9100`, `0.0.0.0:9100` or `[::]:9100`.

    Raises:
        ConfigError: It is none of these.
    """
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdigit() and int(port) < 65536) or (":" in host and not host.startswith("[")):
        raise ConfigError(
            f"metrics_port is {text!r}: give a port, 9100, or an address and a port, 0.0.0.0:9100 or [::]:9100"
        )
    return host.strip("[]") or LOCALHOST, int(port)
