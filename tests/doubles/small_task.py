"""A task whose rewards import nothing: a worker of the embedded task imports reasoning_gym, for seconds."""

from __future__ import annotations

from pathlib import Path

from doubles.files import write_rows


def write_task(folder: Path, name: str = "sums.jsonl") -> list[str]:
    """Write rows into a file of the folder, and return the options of `train` for them."""
    sums = [{"prompt": f"{i} + {j} =\n", "answer": str(i + j)} for i in range(6) for j in range(8)]
    task = write_rows(folder / name, sums)
    return ["--task", task, "--reward", "exact_match", "--rewards.num-workers", "1"]
