"""How much of a device's published figures is reached: assumed, or measured by `policygrad plan --calibrate`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from policygrad.contents import read_json
from policygrad.errors import ConfigError
from policygrad.planning.devices import Device

KIND = "policygrad calibration 1"


@dataclass(frozen=True)
class Reached:
    """Shares of the time that operations at the peak rate and bytes at the full bandwidth would take, one after the other."""

    learning: float = 0.5
    """Forward and backward passes."""
    scoring: float = 0.5
    """Forward passes, also over prompts before anything is drawn."""
    drawing: float = 0.7
    """A token for each of the completions that are drawn at once."""
    layer: float = 125e-6
    """Seconds a layer takes besides for every such token: kernels are started, and the next tokens chosen."""
    link: float = 0.7
    """Of the bandwidth between devices."""
    storage: float = 2e9
    """Bytes a second, written to a folder and read from it by samplers apart."""
    reduce: float = 10e-6
    """Seconds to add up a small tensor over a sampler's devices, twice a layer."""


@dataclass(frozen=True)
class Calibration:
    """What was measured, and on what."""

    device: Device
    reached: Reached
    dtype: str
    about: Mapping[str, Any]
    """The machine, versions, seconds that were measured."""

    def write(self, path: Path) -> None:
        """As a JSON file.

        Raises:
            ConfigError: it cannot be written there.
        """
        values = {
            "kind": KIND,
            "dtype": self.dtype,
            "device": asdict(self.device),
            "reached": asdict(self.reached),
            "about": dict(self.about),
        }
        try:
            path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"--calibration {path} cannot be written ({error.strerror}): take another place"
            ) from error

    def of(self, device: Device, dtype: str) -> tuple[Device, Reached]:
        """The device with the figures that were measured, and what it reaches of them.

        Raises:
            ConfigError: another device or precision was measured.
        """
        if device.name != self.device.name:
            raise ConfigError(
                f"--calibration was measured on {self.device.name}, and --gpus names {device.name}: calibrate on one of those, or "
                "leave --calibration out"
            )
        if dtype != self.dtype:
            raise ConfigError(
                f"--calibration was measured in {self.dtype}, and the plan is for {dtype}: give --dtype {self.dtype}, or "
                f"calibrate with --dtype {dtype}"
            )
        return self.device, self.reached


def load(path: Path) -> Calibration:
    """What `Calibration.write` wrote.

    Raises:
        ConfigError: no such file, or another kind of file.
    """
    try:
        values = read_json(path)
    except OSError as error:
        raise ConfigError(
            f"--calibration {path} cannot be read ({error.strerror}): `policygrad plan --calibrate` writes one"
        ) from error
    except ValueError as error:
        raise ConfigError(f"--calibration {path} is not JSON: {error}") from error
    if not isinstance(values, dict) or values.get("kind") != KIND:
        raise ConfigError(f"--calibration {path} is not what `policygrad plan --calibrate` writes: measure again")
    try:
        device, reached = Device(**values["device"]), Reached(**values["reached"])
        numbers = [getattr(reached, f.name) for f in fields(Reached)]
        good = all(isinstance(x, int | float) and x >= 0 for x in numbers)
        if not good or min(reached.learning, reached.scoring, reached.drawing, reached.link, reached.storage) <= 0:
            raise ValueError("a share is not above 0")
        return Calibration(device, reached, str(values["dtype"]), dict(values["about"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"--calibration {path} is damaged ({error}): measure again, --calibrate") from error
