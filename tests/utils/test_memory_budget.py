"""What counts as running out of memory, also as the system says it, and how much may be taken."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch

from doubles.forked import Forked
from doubles.short_memory import ON_CPU, ON_GPU
from policygrad.errors import EngineError, OutOfMemoryError
from policygrad.utils import memory
from policygrad.utils.memory import measure_free_memory, refusing_what_is_not_free
from policygrad.utils.out_of_memory import MemoryBudget, describe_missing_memory, is_out_of_memory

MIB = 2**20


@pytest.mark.parametrize(
    "error",
    [
        ON_GPU,
        ON_CPU,
        MemoryError(),
        OutOfMemoryError("a text"),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError(
            "NCCL error: unhandled cuda error, Failed to CUDA calloc async 608 bytes: Cuda failure 2 'out of memory'"
        ),
        RuntimeError("MPS backend out of memory (MPS allocated: 5.00 GB). Tried to allocate 1.00 GB on private pool."),
        RuntimeError("level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8589934592 bytes."),
    ],
    ids=lambda error: f"{type(error).__name__} {str(error)[:20]}",
)
def test_every_way_of_saying_it_is_recognised(error: Exception) -> None:
    assert is_out_of_memory(error)
    wrapped = RuntimeError("a pass failed")
    wrapped.__cause__ = error
    assert is_out_of_memory(wrapped)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("shapes differ"),
        ValueError("out of memory"),
        EngineError("server 0 ended: CUDA out of memory"),  # of another process
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED"),
    ],
    ids=str,
)
def test_other_errors_are_not_taken_for_it(error: Exception) -> None:
    assert not is_out_of_memory(error)


def test_a_shortage_is_described_by_what_was_wanted() -> None:
    assert describe_missing_memory(ON_GPU) == describe_missing_memory(ON_CPU) == "2.00 GiB more were wanted"
    assert describe_missing_memory(MemoryError()) == "MemoryError"
    assert describe_missing_memory(RuntimeError("CUDA error: out of memory\nmore")) == "CUDA error: out of memory"


def limited() -> int:
    """In a process with little memory: what torch, numpy and Python say."""
    size = int(Path("/proc/self/statm").read_bytes().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + 64 * MIB, size + 64 * MIB))
    budget, seen = MemoryBudget("--rows", "rows"), list[int]()

    def work() -> int:
        rows = budget.cap(4096)
        budget.begin(rows, rows)
        seen.append(rows)
        return int((torch.ones(rows, MIB // 4) + 1).sum()) // (MIB // 2)

    done = budget.run(work)  # a MiB each
    try:
        bytearray(2**33)
    except MemoryError as error:
        return 0 if is_out_of_memory(error) and done == seen[-1] < 64 and len(seen) > 5 else 1
    return 2


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="limits of the address space are Linux's")
def test_the_error_of_a_real_shortage_is_recognised_and_what_fits_is_found(forked: Forked) -> None:
    assert forked.exit_code(limited) == 0


def capped(folder: Path) -> int:
    """In a process whose container has 96 MiB left, by the container's own numbers: the kernel would kill it beyond these."""
    memory.CGROUPS = folder
    memory.measure_free_memory.__defaults__ = (folder, folder / "none")
    budget = MemoryBudget("--rows", "rows", "cpu")

    def work() -> int:
        rows = budget.cap(512)
        budget.begin(rows, rows)
        torch.ones(rows, MIB // 4)
        return rows

    done, after = budget.run(work), torch.ones(256, MIB // 4)  # beyond the block there is no limit
    # half as much again may lie in memory that the process has freed and kept
    return 0 if done in (64, 128) and len(after) == 256 else 1


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="limits of private memory are Linux's")
def test_what_a_containers_limit_leaves_is_refused_before_the_kernel_kills(
    forked: Forked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_group(tmp_path, limit=1000 * MIB, used=910 * MIB, files=6 * MIB)
    monkeypatch.setattr(memory, "read_meminfo", lambda: {"MemAvailable": 2**40})
    assert forked.exit_code(capped, tmp_path) == 0
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with refusing_what_is_not_free(), refusing_what_is_not_free():
        assert resource.getrlimit(resource.RLIMIT_DATA)[0] != resource.RLIM_INFINITY
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


def write_group(folder: Path, *, limit: int, used: int, files: int, version: int = 2) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    for name, value in zip(names, (limit, used), strict=True):
        (folder / name).write_text(f"{value}\n")
    prefix = "" if version == 2 else "total_"
    (folder / "memory.stat").write_text(f"{prefix}active_file {files}\n{prefix}inactive_file 0\n")


def test_the_tightest_group_around_the_process_counts(tmp_path: Path) -> None:
    """Of both versions of cgroups: a container sees its group at the top, a service of the machine is below."""
    membership = tmp_path / "membership"
    membership.write_text("4:memory:/docker/x\n0::/user.slice/job\n")
    write_group(tmp_path / "two" / "user.slice" / "job", limit=500, used=100, files=40)
    write_group(tmp_path / "two" / "user.slice", limit=450, used=100, files=0)
    assert measure_free_memory(tmp_path / "two", membership) == 350
    assert measure_free_memory(tmp_path / "two", tmp_path / "none") > 10**6  # not a member of these
    write_group(tmp_path / "one" / "memory", limit=300, used=100, files=10, version=1)
    assert measure_free_memory(tmp_path / "one", tmp_path / "none") == 210
    write_group(tmp_path / "one" / "memory" / "docker" / "x", limit=200, used=100, files=10, version=1)
    assert measure_free_memory(tmp_path / "one", membership) == 110
