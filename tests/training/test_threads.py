"""A small model computes with one thread, unless the environment says how many."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from policygrad.training.threads import SMALL, few_threads


def test_one_thread_for_a_small_model_and_as_it_was_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = nn.Linear(2, 2), nn.Linear(1, SMALL)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        with few_threads(small):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
        with few_threads(large):
            assert torch.get_num_threads() == 2
        monkeypatch.setenv("OMP_NUM_THREADS", "2")
        with few_threads(small):
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
