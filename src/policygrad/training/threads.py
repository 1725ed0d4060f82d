"""How many threads torch computes with."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from policygrad.learners.config import SMALL


@contextmanager
def few_threads(model: nn.Module) -> Iterator[None]:
    """One thread for a small model on the CPU, unless OMP_NUM_THREADS says otherwise; as it was, afterwards.

    On two cores the default run's training takes 21 seconds with one thread and 30 with two, which are in each other's and in
    the reward workers' way.
    """
    before = torch.get_num_threads()
    on_cpu = all(p.device.type == "cpu" for p in model.parameters())
    if on_cpu and sum(p.numel() for p in model.parameters()) < SMALL and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
