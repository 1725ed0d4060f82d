"""What machine this is, for the page."""

from __future__ import annotations

import datetime
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
PACKAGES = ("torch", "transformers", "policygrad")


def describe() -> dict[str, str]:
    """Name and value. load: of the whole machine, in processes, as measuring begins; 0 is a quiet one."""
    info = read(Path("/proc/cpuinfo"))
    memory = re.search(r"MemTotal:\s+(\d+)", read(Path("/proc/meminfo")))
    model = re.search(r"model name\s*:\s*(.*)", info)
    flags = re.search(r"flags\s*:\s*(.*)", info)
    known = set(flags.group(1).split()) if flags else set()
    return {
        "processor": model.group(1) if model else platform.processor() or platform.machine(),
        "cores": str(os.cpu_count()),
        "instructions": ", ".join(flag for flag in FLAGS if flag in known) or "not told",
        "memory": f"{int(memory.group(1)) / 2**20:.0f} GiB" if memory else "not told",
        "system": f"{platform.system()} {platform.release()}",
        "Python": platform.python_version(),
        **{name: version(name) for name in PACKAGES},
        "load": f"{os.getloadavg()[0]:.1f}",
    }


def alike() -> str:
    """Of what figures are that may stand in one table: processor, cores, libraries."""
    known = describe()
    return f"{known['processor']}, {known['cores']} cores, torch {known['torch']}, transformers {known['transformers']}"


def processor(record: Mapping[str, Any]) -> str:
    """What a measurement was taken on."""
    told: str = record.get("machine") or record.get("fingerprint", "").partition(" on ")[2]
    return told.partition(",")[0]


def when() -> str:
    """The day, and what was checked out."""
    return f"{datetime.datetime.now(datetime.UTC).date().isoformat()} at {commit()}"


def commit() -> str:
    """What is checked out, and whether there are changes besides in what is measured, or in what measures."""
    root = Path(__file__).resolve().parents[2]

    def told(*words: str) -> str:
        return subprocess.run(("git", *words), capture_output=True, text=True, cwd=root).stdout.strip()

    changed = told("status", "--porcelain", "--", "src", "benchmarks")
    return (told("describe", "--always") or "not told") + "-dirty" * bool(changed)


def read(file: Path) -> str:
    return file.read_text(encoding="utf-8") if file.is_file() else ""
