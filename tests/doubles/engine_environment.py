"""Environments that have an engine, as far as policygrad can tell: their Python knows a package of its name."""

from __future__ import annotations

import sys
from pathlib import Path

STAND_INS = Path(__file__).resolve().parents[2] / "scripts" / "stand_in_servers.py"
STAND_IN = f'exec {sys.executable} {STAND_INS} vllm "$@"'
"""What `vllm` does in `make_environment`: a server that samples from the weights it is given."""


def make_environment(folder: Path, package: str = "vllm", program: str = STAND_IN) -> Path:
    """Return the folder of an environment whose Python has the package, version 1.2, and nothing else.

    Args:
        program: A shell script, the program of the package's name.
    """
    site, scripts = folder / "site", folder / "bin"
    (site / package).mkdir(parents=True)
    (site / package / "__init__.py").write_text("")
    (site / f"{package}-1.2.dist-info").mkdir()
    (site / f"{package}-1.2.dist-info" / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2\n"
    )
    scripts.mkdir()
    for name, text in {"python": f'PYTHONPATH={site} exec {sys.executable} -S "$@"', package: program}.items():
        (scripts / name).write_text(f"#!/bin/sh\n{text}\n")
        (scripts / name).chmod(0o755)
    return folder
