"""What computes: the vendors' published figures of a GPU, and which of them, how many.

Bandwidths are in bytes a second, rates in operations a second, a multiplication and an addition being two. Rates are without
sparsity; links are counted in one direction.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from policygrad.errors import ConfigError
from policygrad.utils.filesystem import read_json

GB, TB = 10**9, 10**12
MAX_DEVICES = 2**17
"""More than any cluster has; each is counted on its own."""


@dataclass(frozen=True)
class Device:
    """One GPU, or one core."""

    name: str
    memory: float
    """Bytes."""
    bandwidth: float
    """Of its memory."""
    bf16: float
    """Peak rate of matrix products in bfloat16."""
    fp32: float
    """In float32."""
    link: float
    """To each other device of the machine."""
    network: float
    """Of the machine's network, for each of its devices."""
    per_node: int = 8
    """In one machine."""
    source: str = ""

    def rate(self, weight: int) -> float:
        """Of matrix products of numbers of so many bytes."""
        return self.bf16 if weight == 2 else self.fp32


DEVICES = {
    device.name: device
    for device in (
        Device(
            "A100", 80 * GB, 2.039 * TB, 312e12, 19.5e12, 300 * GB, 25 * GB, source="NVIDIA A100 datasheet, SXM4 80 GB"
        ),
        Device("H100", 80 * GB, 3.35 * TB, 989e12, 67e12, 450 * GB, 50 * GB, source="NVIDIA H100 datasheet, SXM5"),
        Device("H200", 141 * GB, 4.8 * TB, 989e12, 67e12, 450 * GB, 50 * GB, source="NVIDIA H200 datasheet, SXM"),
        Device(
            "B200", 180 * GB, 8 * TB, 2250e12, 75e12, 900 * GB, 50 * GB, source="NVIDIA DGX B200 datasheet, an eighth"
        ),
        Device(
            "cpu",
            8 * 2**30,
            10 * GB,
            200e9,
            100e9,
            5 * GB,
            GB,
            1,
            "one core of docs/benchmarks.md, its bandwidth assumed: measure yours with --calibrate",
        ),
    )
}
ALIASES = {"A100-80": "A100", "A100-80GB": "A100", "H100-80": "H100", "H100-80GB": "H100", "H200-141GB": "H200"}


def parse_devices(text: str, measured: Device | None = None) -> tuple[Device, int]:
    """`H200:64`, or `H200` for one. measured: a device of a calibration, known by its name too.

    Raises:
        ConfigError: an unknown device, with the nearest; no number, or none above 0.
    """
    found = re.fullmatch(r"([^:]+?)(?::(\d+))?", text.strip())
    count = int(found.group(2) or 1) if found else 0
    if found is None or count < 1:
        raise ConfigError(f"--gpus is a device and how many, as in H200:64, not {text!r}")
    devices = DEVICES if measured is None else {measured.name: measured} | DEVICES
    known = {name.lower(): name for name in (*devices, *ALIASES)}
    if count > MAX_DEVICES:
        raise ConfigError(f"--gpus has {found.group(2):.20} devices: from 1 to {MAX_DEVICES:,} can be planned")
    key = found.group(1).lower()
    if key not in known:
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
        hint = f"did you mean {known[near[0]]}?" if near else f"there are {', '.join(devices)}"
        raise ConfigError(
            f"--gpus {text}: no figures of {found.group(1)!r} are known: {hint} (your own: --calibrate on it)"
        )
    name = known[key]
    return devices[ALIASES.get(name, name)], count


# How much of a device's published figures is reached: assumed, or measured by `policygrad plan --calibrate`.

CALIBRATION_FORMAT = "policygrad calibration 1"


@dataclass(frozen=True)
class Efficiency:
    """Shares of the time that operations at the peak rate and bytes at the full bandwidth would take, one after the other."""

    training: float = 0.5
    """Forward and backward passes."""
    scoring: float = 0.5
    """Forward passes, also over prompts before anything is drawn."""
    sampling: float = 0.7
    """A token for each of the completions that are drawn at once."""
    layer_overhead: float = 125e-6
    """Seconds a layer takes besides for every such token: kernels are started, and the next tokens chosen."""
    link: float = 0.7
    """Of the bandwidth between devices."""
    storage: float = 2e9
    """Bytes a second, written to a folder and read from it by samplers apart."""
    allreduce: float = 10e-6
    """Seconds to add up a small tensor over a sampler's devices, twice a layer."""


@dataclass(frozen=True)
class Calibration:
    """What was measured, and on what."""

    device: Device
    efficiency: Efficiency
    dtype: str
    details: Mapping[str, Any]
    """The machine, versions, seconds that were measured."""

    def write(self, path: Path) -> None:
        """As a JSON file.

        Raises:
            ConfigError: it cannot be written there.
        """
        values = {
            "kind": CALIBRATION_FORMAT,
            "dtype": self.dtype,
            "device": asdict(self.device),
            "reached": asdict(self.efficiency),
            "about": dict(self.details),
        }
        try:
            path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"--calibration {path} cannot be written ({error.strerror}): take another place"
            ) from error

    def apply(self, device: Device, dtype: str) -> tuple[Device, Efficiency]:
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
        return self.device, self.efficiency


def load_calibration(path: Path) -> Calibration:
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
    if not isinstance(values, dict) or values.get("kind") != CALIBRATION_FORMAT:
        raise ConfigError(f"--calibration {path} is not what `policygrad plan --calibrate` writes: measure again")
    try:
        device, reached = Device(**values["device"]), Efficiency(**values["reached"])
        numbers = [getattr(reached, f.name) for f in fields(Efficiency)]
        good = all(isinstance(x, int | float) and x >= 0 for x in numbers)
        if not good or min(reached.training, reached.scoring, reached.sampling, reached.link, reached.storage) <= 0:
            raise ValueError("a share is not above 0")
        return Calibration(device, reached, str(values["dtype"]), dict(values["about"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"--calibration {path} is damaged ({error}): measure again, --calibrate") from error
