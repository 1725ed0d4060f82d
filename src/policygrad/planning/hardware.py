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
    bf16: float  # peak rate of bfloat16 matrix products that accumulate in float32; 0 = it has none
    fp32: float  # peak rate of float32 matrix products
    link: float  # bandwidth to each other device of the same machine
    network: float  # network bandwidth per device
    per_node: int = 8  # devices per machine
    source: str = ""
    dtype: str = "bf16"  # precision that `--learner.dtype auto` chooses on it
    utilisation: float = 1.0
    """Efficiency that forward and backward passes reach, as a multiple of an H100's; of devices without published runs, 1."""

    def rate(self, bytes_per_number: int) -> float:
        """Return the peak rate of matrix products in this precision."""
        return self.bf16 if bytes_per_number == 2 else self.fp32


CPU_SOURCE = "one core as in docs/benchmarks.md, bandwidth assumed; measure yours with --calibrate"
PCIE_3, PCIE_4, PCIE_5 = 16 * GB, 32 * GB, 64 * GB  # 16 lanes, in one direction
ETHERNET_10, ETHERNET_100 = 1.25 * GB, 12.5 * GB
"""Assumed networks of desktops and of servers without NVLink, per machine."""
DEVICES = {
    device.name: device
    for device in (
        Device("H100", 80 * GB, 3.35 * TB, 989e12, 67e12, 450 * GB, 50 * GB, source="NVIDIA H100 datasheet, SXM5"),
        Device("H200", 141 * GB, 4.8 * TB, 989e12, 67e12, 450 * GB, 50 * GB, source="NVIDIA H200 datasheet, SXM"),
        Device(
            "B200", 180 * GB, 8 * TB, 2250e12, 75e12, 900 * GB, 50 * GB, source="NVIDIA DGX B200 datasheet, one eighth"
        ),
        Device(
            "MI300X",
            192 * GB,
            5.3 * TB,
            1307.4e12,
            163.4e12,
            448 * GB,
            50 * GB,
            source="AMD Instinct MI300X datasheet, seven links of 64 GB/s",
        ),
        Device(
            "RTX-PRO-6000",
            96 * GB,
            1.792 * TB,
            503.8e12,
            126e12,
            PCIE_5,
            ETHERNET_100 / 8,
            source="NVIDIA RTX Blackwell PRO architecture whitepaper, Workstation Edition",
        ),
        Device(
            "RTX-5090",
            32 * GB,
            1.792 * TB,
            209.5e12,
            104.8e12,
            PCIE_5,
            ETHERNET_10 / 4,
            4,
            "NVIDIA RTX Blackwell architecture whitepaper",
        ),
        Device(
            "RTX-4090",
            24 * GB,
            1.008 * TB,
            165.2e12,
            82.6e12,
            PCIE_4,
            ETHERNET_10 / 4,
            4,
            "NVIDIA Ada architecture whitepaper",
        ),
        Device(
            "RTX-3090",
            24 * GB,
            0.936 * TB,
            71e12,
            35.6e12,
            PCIE_4,
            ETHERNET_10 / 4,
            4,
            "NVIDIA Ampere GA102 architecture whitepaper",
        ),
        Device("L40S", 48 * GB, 0.864 * TB, 362e12, 91.6e12, PCIE_4, ETHERNET_100 / 8, source="NVIDIA L40S datasheet"),
        Device(
            "A100",
            80 * GB,
            2.039 * TB,
            312e12,
            19.5e12,
            300 * GB,
            25 * GB,
            source="NVIDIA A100 datasheet, SXM4 80 GB",
            utilisation=1.55,
        ),
        Device(
            "A100-40GB",
            40 * GB,
            1.555 * TB,
            312e12,
            19.5e12,
            300 * GB,
            25 * GB,
            source="NVIDIA A100 datasheet, SXM4 40 GB",
            utilisation=1.55,
        ),
        Device("L4", 24 * GB, 0.3 * TB, 121e12, 30.3e12, PCIE_4, ETHERNET_100 / 8, source="NVIDIA L4 datasheet"),
        Device("A10G", 24 * GB, 0.6 * TB, 70e12, 35e12, PCIE_4, ETHERNET_100 / 8, source="NVIDIA A10G datasheet"),
        Device(
            "T4",
            16 * GB,
            0.3 * TB,
            0,
            8.1e12,
            PCIE_3,
            ETHERNET_100 / 8,
            source="NVIDIA T4 datasheet; it has no bfloat16, and train does not use its float16",
            dtype="fp32",
        ),
        Device(
            "M4-Max",
            0.75 * 128 * GB,
            0.546 * TB,
            18.4e12,
            18.4e12,
            PCIE_4,
            ETHERNET_10,
            1,
            "Apple MacBook Pro (M4 Max, 128 GB) specifications; rate: 40 cores of 128 units at 1.8 GHz, as Apple publishes none; "
            "three quarters of the memory",
            "fp32",
        ),
        Device("cpu", 8 * 2**30, 10 * GB, 200e9, 100e9, 5 * GB, GB, 1, CPU_SOURCE, "fp32"),
    )
}
ALIASES = {"A100-80": "A100", "A100-80GB": "A100", "H100-80": "H100", "H100-80GB": "H100", "H200-141GB": "H200"} | {
    "A100-40": "A100-40GB",
    "RTX-PRO-6000-Blackwell": "RTX-PRO-6000",
    "RTXPRO6000": "RTX-PRO-6000",
    "RTX6000": "RTX-PRO-6000",
    "5090": "RTX-5090",
    "RTX5090": "RTX-5090",
    "4090": "RTX-4090",
    "RTX4090": "RTX-4090",
    "3090": "RTX-3090",
    "RTX3090": "RTX-3090",
    "M4Max": "M4-Max",
}


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
    key = match.group(1).strip().lower().replace(" ", "-")
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
    """Fractions of the published figures that a real run reaches.

    `training` and those of engines and of publishing are fitted to figures that others published (scripts/plan_published.py).
    """

    training: float = 0.48  # forward and backward passes
    scoring: float = 0.5  # forward passes, including prompts before sampling
    sampling: float = 0.7  # generating one token for each concurrent completion
    layer_overhead: float = 125e-6
    """Seconds of overhead per layer and generated token: kernel launches and token selection."""
    engine_sampling: float = 0.9  # the same two of an engine
    engine_overhead: float = 75e-6
    link: float = 0.7  # bandwidth between devices
    storage: float = 1.6e9  # bytes per second, for weights that pass through a folder to samplers on other devices
    broadcast: float = 3.9e9  # bytes per second, for weights that NCCL sends to an engine in other machines
    engine_load: float = 2.6e9  # bytes per second and device until an engine that slept has its weights and is awake
    allreduce: float = 10e-6  # seconds to all-reduce a small tensor over a sampler's devices, twice per layer
    allreduce_network: float = 100e-6  # the same where these are in several machines


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
                f"--calibration was measured in {self.dtype}, but the plan is for {dtype}. Use --learner.dtype {self.dtype}, or "
                f"calibrate with --learner.dtype {dtype}."
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
        seconds = ("layer_overhead", "engine_overhead", "allreduce", "allreduce_network")
        if any(value < 0 if name in seconds else value <= 0 for name, value in asdict(reached).items()):
            raise ValueError("an efficiency is not above 0")
        return Calibration(device, reached, str(values["dtype"]), dict(values["details"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"--calibration {path} is damaged ({error}). Measure again with --calibrate.") from error
