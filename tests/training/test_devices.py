"""Devices other than NVIDIA's: a run on one that has no float64, and what may name CUDA."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import policygrad as pg
from doubles import python_device
from doubles.algorithms import SINGLE_TURN
from policygrad.core import precision
from policygrad.core.precision import move, widen
from policygrad.samplers.base import SamplingParams
from policygrad.samplers.local.sampling import sample_tokens
from policygrad.utils import devices

SOURCE, TESTS = Path(pg.__file__).parent, Path(__file__).resolve().parents[1]
CUDA = {
    "commands/doctor.py",  # lists GPUs
    "commands/engine.py",  # engines run on GPUs or a CPU
    "commands/plan.py",  # as calibration.py
    "cluster/actors.py",  # Ray's GPUs
    "learners/fsdp/learner.py",
    "learners/fsdp/processes.py",  # NCCL
    "learners/local/host_memory.py",  # pinned memory
    "samplers/engines/base.py",  # memory that a server shares
    "samplers/engines/factory.py",
    "samplers/local/cuda_graphs.py",
    "samplers/local/text_cache.py",  # room on the GPU
    "training/calibration.py",
    "training/memory_limits.py",  # what fills the memory
    "training/trainer.py",  # peak memory
    "utils/devices.py",
    "utils/out_of_memory.py",  # frees what the allocator has cached
    "weight_sync/nccl.py",
}


def test_only_what_needs_cuda_names_it() -> None:
    found = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if re.search(r"torch\.cuda\b|\.cuda\(", path.read_text(encoding="utf-8"))
    }
    assert found == CUDA


LEFT_OUT = {"trpo", "natural", "trpo_vine", "distill"}
"""Three need forward-mode derivatives, which torch does not do on such a device, and one a teacher."""


def test_a_run_without_float64_equals_one_with_it(
    small: pg.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a critic, a reference and several updates; on the CPU, which has it."""
    sizes: dict[str, Any] = {"steps": 2, "prompts_per_step": 2, "samples_per_prompt": 4}
    run = replace(small, algorithm=pg.PPO, **sizes)
    pg.train(replace(run, output=str(tmp_path / "with")), display=False)
    monkeypatch.setattr(precision, "DEVICES_WITHOUT_FLOAT64", {"cpu"})
    pg.train(replace(run, output=str(tmp_path / "without")), display=False)
    check_equal(tmp_path / "with", tmp_path / "without")


@pytest.mark.full
def test_every_run_on_a_device_without_float64_equals_the_cpus(tmp_path: Path) -> None:
    """Every tensor is where it belongs, as the device refuses those of the CPU; and the same tokens are sampled."""
    algorithms = [name for name in SINGLE_TURN if name not in LEFT_OUT]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(SOURCE.parent), str(TESTS)))}
    command = [sys.executable, "-m", "doubles.python_device", str(tmp_path), *algorithms]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    for algorithm in algorithms:
        check_equal(tmp_path / algorithm / "cpu", tmp_path / algorithm / python_device.NAME)


def check_equal(one: Path, other: Path) -> None:
    """Compare what two runs of two steps have logged."""
    expected, actual = read_rows(one), read_rows(other)
    assert len(actual) == 2
    assert [row.keys() for row in actual] == [row.keys() for row in expected], other
    here, there = actual[0], expected[0]
    for name in {"tokens/sampled", "reward", "entropy", "completions/computed"} & there.keys():
        assert here[name] == pytest.approx(there[name], rel=1e-4, abs=1e-6), (other, name)
    if "grad_norm" in there:  # a mean over updates that have moved the weights, in which Adam makes much of rounding
        assert here["grad_norm"] == pytest.approx(there["grad_norm"], rel=0.2, abs=1e-6), other


def read_rows(folder: Path) -> list[dict[str, Any]]:
    rows = map(json.loads, (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [row for row in rows if "reward" in row]


def test_float64_becomes_float32_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.tensor([1.0, 2.0])
    assert widen(x).dtype == torch.float64
    assert move(x.double(), "cpu").dtype == torch.float64
    monkeypatch.setattr(precision, "DEVICES_WITHOUT_FLOAT64", {"cpu"})
    assert widen(x.bfloat16()).dtype == torch.float32
    assert move(x.double(), "cpu").dtype == torch.float32
    assert move(torch.tensor([3]), "cpu").dtype == torch.int64


@pytest.mark.parametrize("vocabulary", [7, 5000])
def test_sampling_in_float32_draws_no_impossible_token(vocabulary: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even for the largest number below 1; and else the tokens of float64."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(200, vocabulary, generator=generator)
    logits[:, -3:] = -torch.inf
    u = torch.rand(200, generator=generator, dtype=torch.float64)
    u[0], u[1] = 0.0, 1 - 2**-53
    exact, exact_logp = sample_tokens(logits, u, SamplingParams())
    monkeypatch.setattr(precision, "DEVICES_WITHOUT_FLOAT64", {"cpu"})
    token, logp = sample_tokens(logits, u, SamplingParams())
    assert int(token.max()) < vocabulary - 3
    assert (token == exact).float().mean() > 0.98
    same = token == exact
    assert torch.allclose(logp[same], exact_logp[same], atol=2e-6)


@pytest.mark.parametrize(
    ("present", "device", "has_bf16"), [({"cuda"}, "cuda", True), ({"xpu"}, "xpu", True), ({"mps"}, "cpu", False)]
)
def test_auto_is_the_gpu_that_is_there(
    present: set[str], device: str, has_bf16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Apple's must be named."""
    for kind in ("cuda", "xpu", "mps"):
        monkeypatch.setattr(getattr(torch, kind), "is_available", lambda kind=kind: kind in present)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    monkeypatch.setattr(torch.xpu, "is_bf16_supported", lambda: True)
    assert devices.choose_device() == device
    assert pg.LearnerConfig().resolve().dtype == ("bf16" if has_bf16 else "fp32")
    assert pg.LearnerConfig(device="mps").resolve().dtype == "fp32"
