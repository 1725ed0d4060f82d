"""Services that follow a run, by name: `--track wandb tensorboard`. One file each; its library is an extra, loaded when needed."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from importlib.util import find_spec

from policygrad.errors import ConfigError, install_command
from policygrad.trackers.base import Tracker

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


def services(names: Sequence[str]) -> list[Tracker]:
    """The trackers of these names.

    Raises:
        ConfigError: a library that is not installed, with the extra that brings it.
    """
    check_services(names)
    for name in names:
        if find_spec(name) is None:
            raise ConfigError(f"--track {name} needs a library that is not installed: {install_command(name)}")
    found = [getattr(importlib.import_module(f"policygrad.trackers.services.{n}"), SERVICES[n]) for n in names]
    return [kind() for kind in found]
