"""A small model computes with one thread, unless the environment says how many."""

from __future__ import annotations

import asyncio
import os
import sys

import pytest
import torch
from torch import nn

from doubles.rollouts import empty
from policygrad.planning.model_sizes import SMALL_MODEL_PARAMETERS
from policygrad.rollout.async_producer import RolloutProducer, RolloutQueue
from policygrad.rollout.rollouter import Rollout
from policygrad.training.learner_setup import limit_torch_threads
from policygrad.utils.async_runner import AsyncRunner


def test_small_models_use_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = nn.Linear(2, 2), nn.Linear(1, SMALL_MODEL_PARAMETERS)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        with limit_torch_threads(small):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
        with limit_torch_threads(large):
            assert torch.get_num_threads() == 2
        monkeypatch.setenv("OMP_NUM_THREADS", "2")
        with limit_torch_threads(small):
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
@pytest.mark.parametrize("notebook", [False, True])
def test_background_threads_respect_the_thread_limit(notebook: bool) -> None:
    """With more its products are summed in another order, and a run is not bitwise the one that was never stopped."""
    before = torch.get_num_threads()
    square = torch.ones(1024, 1024)

    def work() -> int:
        (square @ square).sum()
        return len(os.listdir("/proc/self/task"))

    def next_to() -> int:
        counted = list[int]()

        def collect(*_: object) -> Rollout:
            counted.append(work())
            return empty()

        producer = RolloutProducer(RolloutQueue(1, (), 0, ()))
        with producer.produce_during(1, collect):
            producer.wait_idle()
        return counted[0]

    async def below() -> int:
        async def asked() -> int:
            return work()

        return waiter(asked())

    torch.set_num_threads(1)
    try:
        alone = work()
        with AsyncRunner() as waiter:
            assert (asyncio.run(below()) if notebook else next_to()) == alone + 1
    finally:
        torch.set_num_threads(before)
