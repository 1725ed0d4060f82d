"""torchrun on several hosts: one process's numbers. `make test-hosts`."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from doubles import two_learners
from hosts import Laboratory

pytestmark = pytest.mark.hosts
ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
PATHS = os.pathsep.join(filter(None, [str(ROOT / "src"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]))
PATIENCE = 300


def documented_line(hosts: int) -> list[str]:
    """The words of docs/scaling.md that start torchrun on each of several hosts, up to the program."""
    text = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    (line,) = [line.strip() for line in text.splitlines() if line.strip().startswith("torchrun --nnodes")]
    words = shlex.split(line.partition(" -m policygrad")[0])
    changes = {"--nnodes": str(hosts), "--nproc-per-node": "1"}
    pairs = zip(["", *words], words, strict=False)
    return [str(BIN / words[0]), *[changes.get(before, word) for before, word in pairs][1:]]


def on_all(lab: Laboratory, argv: Sequence[str], folder: Path) -> list[subprocess.CompletedProcess[str]]:
    """Run torchrun on every host with the documented words, and this program."""
    words = [*documented_line(len(lab.hosts)), *argv]
    options = {"cwd": folder, "env": {"PYTHONPATH": PATHS}, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    started = [host.start(words, **options) for host in lab.hosts]
    said = [process.communicate(timeout=PATIENCE) for process in started]
    return [
        subprocess.CompletedProcess(words, process.returncode, *texts)
        for process, texts in zip(started, said, strict=True)
    ]


def succeeded(done: Sequence[subprocess.CompletedProcess[str]]) -> str:
    """Return what all hosts said."""
    assert all(one.returncode == 0 for one in done), "\n".join(one.stdout + one.stderr for one in done)
    return "".join(one.stdout for one in done)


@pytest.mark.parametrize("hosts", [2, 3])
def test_numbers_are_those_of_one_process(hosts: int, tmp_path: Path) -> None:
    with Laboratory(hosts) as lab:
        assert json.dumps({"agree": hosts}) in succeeded(on_all(lab, [two_learners.__file__], tmp_path))
