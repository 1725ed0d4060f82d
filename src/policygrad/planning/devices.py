"""What computes: the vendors' published figures of a GPU, and which of them, how many.

Bandwidths are in bytes a second, rates in operations a second, a multiplication and an addition being two. Rates are without
sparsity; links are counted in one direction.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from policygrad.errors import ConfigError

GB, TB = 10**9, 10**12
MOST_DEVICES = 2**17
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


def fleet(text: str, measured: Device | None = None) -> tuple[Device, int]:
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
    if count > MOST_DEVICES:
        raise ConfigError(f"--gpus has {found.group(2):.20} devices: from 1 to {MOST_DEVICES:,} can be planned")
    key = found.group(1).lower()
    if key not in known:
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
        hint = f"did you mean {known[near[0]]}?" if near else f"there are {', '.join(devices)}"
        raise ConfigError(
            f"--gpus {text}: no figures of {found.group(1)!r} are known: {hint} (your own: --calibrate on it)"
        )
    name = known[key]
    return devices[ALIASES.get(name, name)], count
