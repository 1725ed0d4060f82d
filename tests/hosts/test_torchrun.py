"""torchrun on several hosts: one process's numbers, checkpoints for other numbers of hosts, SLURM's script. `make test-hosts`."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from measure_hosts import BIN, PATHS, ROOT, Program, always, count_steps, digest, prepare, start, start_everywhere

from doubles import two_learners
from doubles.ray_runs import check_alike
from hosts import Laboratory

pytestmark = pytest.mark.hosts


def succeeded(programs: Sequence[Program]) -> str:
    """Return what all hosts said, once they have ended well."""
    codes = [one.wait() for one in programs]
    said = "\n".join(f"{one.host.name} ({code}): {one.said}" for one, code in zip(programs, codes, strict=True))
    assert not any(codes), said
    return said


@pytest.mark.parametrize("hosts", [2, 3])
def test_numbers_are_those_of_one_process(hosts: int, tmp_path: Path) -> None:
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    with Laboratory(hosts) as lab:
        said = succeeded(start_everywhere(lab, [two_learners.__file__], tmp_path, PYTHONPATH=paths))
    assert json.dumps({"agree": hosts}) in said


def test_machines_that_share_no_key_do_not_start(tmp_path: Path) -> None:
    words = ["-m", "policygrad", *prepare(tmp_path), *always(tmp_path), "--output", str(tmp_path / "run")]
    with Laboratory(2) as lab:
        programs = start_everywhere(lab, words, tmp_path, POLICYGRAD_KEY="")
        codes = [one.wait() for one in programs]
    assert all(codes)
    assert all("POLICYGRAD_KEY is not set: " in one.said for one in programs), "\n".join(one.said for one in programs)


def test_a_checkpoint_of_three_hosts_is_resumed_by_three_two_and_one(tmp_path: Path) -> None:
    begin = ["-m", "policygrad", *prepare(tmp_path), "--steps", "4", *always(tmp_path), "--output"]
    go_on = ["-m", "policygrad", "train", "--resume", "half", *always(tmp_path), "--output"]
    size = ["--learner.world-size"]
    with Laboratory(3) as lab:
        assert "learner: 3 processes" in succeeded(start_everywhere(lab, [*begin, "whole"], tmp_path))
        for one in start_everywhere(lab, [*begin, "half", "--stop-after", "2"], tmp_path):
            one.wait()  # torchrun calls a stop a failure
        assert count_steps(tmp_path / "half") == 2
        succeeded(start_everywhere(lab, [*go_on, "three"], tmp_path))
    with Laboratory(2) as lab:
        assert "learner: 2 processes" in succeeded(start_everywhere(lab, [*go_on, "two", *size, "2"], tmp_path))
    with Laboratory(1) as lab:
        succeeded([start(lab.hosts[0], [sys.executable, *go_on, "one", *size, "1"], tmp_path)])
    assert digest(tmp_path / "whole") == digest(tmp_path / "three")  # with the same number, to the bit
    for name in ("two", "one"):
        check_alike(tmp_path / "whole", tmp_path / name)


SRUN = """
task=0
for enter in $ENTER; do SLURM_NODEID=$task ${enter//+/ } "$@" & task=$((task + 1)); done
code=0
for job in $(jobs -p); do wait $job || code=$?; done
exit $code"""
SCONTROL = 'if [ "$1" = show ]; then echo host0; echo host1; else echo "$*" >> "$LOG"; fi'


def submit(lab: Laboratory, folder: Path) -> subprocess.Popen[str]:
    """Start the batch script with what a user edits in it, and a stand-in for srun that starts a task on each host."""
    begin, rest = shlex.join(prepare(folder)), shlex.join(always(folder))
    text = (ROOT / "cluster" / "slurm" / "train.sbatch").read_text(encoding="utf-8")
    for name, value in {
        "begin": f"({begin})",
        "always": f"({rest} --learner.hang-timeout 10)",
        "PER_NODE": "1",
    }.items():
        text, count = re.subn(rf"^{name}=.*$", lambda _, v=f"{name}={value}": v, text, flags=re.MULTILINE)  # type: ignore[misc]
        assert count == 1
    programs, activate = folder / "programs", folder / ".venv" / "bin" / "activate"
    for where in (programs, activate.parent):
        where.mkdir(parents=True, exist_ok=True)
    activate.write_text(f"PATH={BIN}:$PATH\n")
    for name, script in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (programs / name).write_text(f"#!/bin/bash\n{script}\n")
        (programs / name).chmod(0o755)
    (folder / "train.sbatch").write_text(text)
    slurm = {
        "SLURM_SUBMIT_DIR": str(folder),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_END_TIME": str(int(time.time()) + 3600),
        "SLURM_JOB_NODELIST": "host[0-1]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_CPUS_PER_TASK": "1",
        "GLOO_SOCKET_IFNAME": "eth0",
    }
    own = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "LOG": str(folder / "log"),
        "ENTER": " ".join("+".join(host.enter([], folder)) for host in lab.hosts if host.pid),
    }
    with (folder / "job.txt").open("w") as output:
        return subprocess.Popen(
            ["bash", "train.sbatch"],
            cwd=folder,
            env=os.environ | PATHS | slurm | own,
            stdout=output,
            stderr=output,
            text=True,
        )


def test_a_job_of_slurm_whose_node_loses_its_power_is_requeued_and_goes_on(tmp_path: Path) -> None:
    run, said = tmp_path / "runs" / "grpo-7", tmp_path / "job.txt"
    with Laboratory(2) as lab:
        job = submit(lab, tmp_path)
        while count_steps(run) < 2:
            assert job.poll() is None, said.read_text()
            time.sleep(0.1)
        lab.power_off(1)
        assert job.wait(300) == 0, said.read_text()
    assert (tmp_path / "log").read_text() == "requeue 7\n"
    assert "rank 1 on host1 did not answer for 10 seconds" in said.read_text()
    with Laboratory(2) as lab:
        assert submit(lab, tmp_path).wait(300) == 0, said.read_text()
    assert json.loads((run / "result.json").read_text())["steps"] == 5
