"""Records of steps: a digest of each tensor of the learner."""

from __future__ import annotations

import pytest
import torch

from policygrad.training.step_records import SAMPLED_ELEMENTS, digest_tensor


@pytest.mark.parametrize("size", [0, 1, SAMPLED_ELEMENTS, 28_311_552])
def test_a_digest_samples_from_the_first_element_to_the_last(size: int) -> None:
    # 28,311,552 is the size of SmolLM2-135M's embedding
    tensor = torch.zeros(size, dtype=torch.uint8)
    if size:
        tensor[0], tensor[-1] = 1, 2
    elements = digest_tensor(tensor).elements
    assert len(elements) == min(size, SAMPLED_ELEMENTS)
    assert elements[:1] + elements[-1:] == {0: (), 1: (2.0, 2.0)}.get(size, (1.0, 2.0))
