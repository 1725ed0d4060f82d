"""Published figures of GPUs, and the efficiency that is assumed or was measured on a machine.

Bandwidths are in bytes per second, rates in operations per second; a multiply-add counts as two operations. Rates are without
sparsity; links are counted in one direction.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from policygrad.errors import ConfigError
from policygrad.utils.filesystem import read_json

GB, TB = 10**9, 10**12
MAX_DEVICES = 2**17  # upper limit of `--gpus`, beyond any cluster


@dataclass(frozen=True)
class Device:
    """Figures of one GPU, or of one CPU core."""

    name: str
    memory: float  # Bytes
    bandwidth: float  # memory bandwidth
    bf16: float  # peak rate of bfloat16 matrix products
    fp32: float  # peak rate of float32 matrix products
    link: float  # bandwidth to each other device of the same machine
    network: float  # network bandwidth per device
    per_node: int = 8  # devices per machine
    source: str = ""

    def rate(self, bytes_per_number: int) -> float:
        """Return the peak rate of matrix products in this precision."""
        return self.bf16 if bytes_per_number == 2 else self.fp32


CPU_SOURCE = "one core as in docs/benchmarks.md, bandwidth assumed; measure yours with --calibrate"
DEVICES = {
    device.name: device
    for device in (
        Device(
            "A100", 80 * GB, 2.039 * TB, 312e12, 19.5e12, 300 * GB, 25 * GB, source="NVIDIA A100 datasheet, SXM4 80 GB"
        ),
        Device("H100", 80 * GB, 3.35 * TB, 989e12, 67e12, 450 * GB, 50 * GB, source="NVIDIA H100 datasheet, SXM5"),
        Device("H200", 141 * GB, 4.8 * TB, 989e12, 67e12, 450 * GB, 50 * GB, source="NVIDIA H200 datasheet, SXM"),
        Device(
            "B200", 180 * GB, 8 * TB, 2250e12, 75e12, 900 * GB, 50 * GB, source="NVIDIA DGX B200 datasheet, one eighth"
        ),
        Device("cpu", 8 * 2**30, 10 * GB, 200e9, 100e9, 5 * GB, GB, 1, CPU_SOURCE),
    )
}
ALIASES = {"A100-80": "A100", "A100-80GB": "A100", "H100-80": "H100", "H100-80GB": "H100", "H200-141GB": "H200"}


def parse_devices(text: str, measured: Device | None = None) -> tuple[Device, int]:
    """Parse `H200:64`, or `H200` for a single device.

    Args:
        measured: A calibrated device, which takes the place of the published one of its name.

    Raises:
        ConfigError: The device is unknown, or the count is invalid.
    """
    match = re.fullmatch(r"([^:]+?)(?::(\d+))?", text.strip())
    count = int(match.group(2) or 1) if match else 0
    if match is None or count < 1:
        raise ConfigError(f"--gpus must name a device and a count, as in H200:64, not {text!r}")
    if count > MAX_DEVICES:
        raise ConfigError(f"--gpus {text:.40}: the count must be from 1 to {MAX_DEVICES:,}")
    devices = DEVICES if measured is None else {measured.name: measured} | DEVICES
    names = {name.lower(): name for name in (*devices, *ALIASES)}
    key = match.group(1).lower()
    if key not in names:
        near = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
        hint = f"did you mean {names[near[0]]}?" if near else f"available: {', '.join(devices)}."
        raise ConfigError(
            f"--gpus {text}: there are no figures for {match.group(1)!r}; {hint} Measure your own device with --calibrate."
        )
    return devices[ALIASES.get(names[key], names[key])], count


# Efficiency: assumed, or measured by `policygrad plan --calibrate`.

CALIBRATION_FORMAT = "policygrad calibration 2"


@dataclass(frozen=True)
class Efficiency:
    """Fractions of the published figures that a real run reaches."""

    training: float = 0.5  # forward and backward passes
    scoring: float = 0.5  # forward passes, including prompts before sampling
    sampling: float = 0.7  # generating one token for each concurrent completion
    layer_overhead: float = 125e-6
    """Seconds of overhead per layer and generated token: kernel launches and token selection."""
    link: float = 0.7  # bandwidth between devices
    storage: float = 2e9  # bytes per second, for weights that pass through a folder to samplers on other devices
    allreduce: float = 10e-6  # seconds to all-reduce a small tensor over a sampler's devices, twice per layer


@dataclass(frozen=True)
class Calibration:
    """A measured device."""

    device: Device
    efficiency: Efficiency
    dtype: str
    details: Mapping[str, Any]  # machine, versions, measured seconds

    def write(self, path: Path) -> None:
        """Write a JSON file. Raises ConfigError if the file cannot be written."""
        values = {
            "kind": CALIBRATION_FORMAT,
            "dtype": self.dtype,
            "device": asdict(self.device),
            "efficiency": asdict(self.efficiency),
            "details": dict(self.details),
        }
        try:
            path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"--calibration {path} cannot be written ({error.strerror}). Choose another path."
            ) from error

    def apply(self, device: Device, dtype: str) -> tuple[Device, Efficiency]:
        """Return the measured figures and efficiency. Raises ConfigError if another device or precision was measured."""
        if device.name != self.device.name:
            raise ConfigError(
                f"--calibration was measured on {self.device.name}, but --gpus names {device.name}. Calibrate on that device, or "
                "omit --calibration."
            )
        if dtype != self.dtype:
            raise ConfigError(
                f"--calibration was measured in {self.dtype}, but the plan is for {dtype}. Use --dtype {self.dtype}, or calibrate "
                f"with --dtype {dtype}."
            )
        return self.device, self.efficiency


def load_calibration(path: Path) -> Calibration:
    """Read a file of `Calibration.write`. Raises ConfigError if the file is missing, of another kind, or damaged."""
    try:
        values = read_json(path)
    except OSError as error:
        raise ConfigError(
            f"--calibration {path} cannot be read ({error.strerror}). `policygrad plan --calibrate` writes one."
        ) from error
    except ValueError as error:
        raise ConfigError(f"--calibration {path} is not JSON: {error}") from error
    if not isinstance(values, dict) or values.get("kind") != CALIBRATION_FORMAT:
        raise ConfigError(f"--calibration {path} is not a file of `policygrad plan --calibrate`. Measure again.")
    try:
        device, reached = Device(**values["device"]), Efficiency(**values["efficiency"])
        fractions = (reached.training, reached.scoring, reached.sampling, reached.link, reached.storage)
        if min(fractions) <= 0 or min(reached.layer_overhead, reached.allreduce) < 0:
            raise ValueError("an efficiency is not above 0")
        return Calibration(device, reached, str(values["dtype"]), dict(values["details"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"--calibration {path} is damaged ({error}). Measure again with --calibrate.") from error
