"""Runs on a Ray cluster, begun and compared with others."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import policygrad as pg
from doubles.files import rows, same, untimed, weights
from doubles.ray_cluster import TIMEOUT, RayCluster
from policygrad.cluster.config import ClusterConfig
from policygrad.training.config.serialization import dump_config

LOOSE = 2e-4
"""Sums are taken in another order where others draw."""


def on(cluster: RayCluster, **changes: object) -> ClusterConfig:
    return ClusterConfig(**{"address": cluster.address, "timeout": TIMEOUT} | changes)  # type: ignore[arg-type]


def command(run: pg.Run, folder: Path) -> list[str]:
    """What begins the run in this folder, without a cluster; its file lies beside the folder."""
    file = folder.with_suffix(".toml")
    file.write_text(dump_config(replace(run, output=str(folder))))
    code = str(Path(str(run.reward[0]).partition(":")[0]))
    return [sys.executable, "-m", "policygrad", "train", "--config", str(file), "--allow-code", code]


def begin(argv: list[str], log: Path) -> subprocess.Popen[bytes]:
    """A command in a process group of its own, as a shell makes it."""
    with log.open("w") as out:
        return subprocess.Popen(
            argv, stdout=out, stderr=subprocess.STDOUT, cwd=log.parent, start_new_session=True, env=os.environ
        )


def numbers(folder: Path) -> list[dict[str, object]]:
    """Without what belongs to a process: its clock, its memory, who was asked again, what it has kept of earlier turns."""
    result, own = untimed(folder / "metrics.jsonl"), ("sampler/moved", "sampler/prefill")
    return [{k: v for k, v in row.items() if "memory" not in k and not k.startswith(own)} for row in result]


def check_same(undisturbed: Path, folder: Path) -> None:
    """Every completion once, with its reward; the metrics; the weights: to the bit."""
    assert rows(folder / "completions.jsonl") == rows(undisturbed / "completions.jsonl")
    assert numbers(folder) == numbers(undisturbed)
    assert same(weights(folder), weights(undisturbed))


def check_alike(alone: Path, folder: Path) -> None:
    """The same completions and held-out scores, and numbers that differ by rounding."""
    assert rows(folder / "completions.jsonl") == [
        row | {"advantage": pytest.approx(row["advantage"], abs=LOOSE)} for row in rows(alone / "completions.jsonl")
    ]
    for one, other in zip(numbers(alone), numbers(folder), strict=True):
        assert other == pytest.approx(one, rel=LOOSE, abs=LOOSE)
    expected, result = weights(alone), weights(folder)
    assert expected.keys() == result.keys()
    assert all(torch.allclose(expected[name], result[name], atol=LOOSE) for name in expected)
