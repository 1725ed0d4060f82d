"""Completions of given lengths from `generate`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import LogitsProcessor


class EndAt(LogitsProcessor):
    """Ends row i after lengths[i] tokens and not before, from the beginning again where there are more rows than lengths; in
    place, so that it costs next to nothing."""

    def __init__(self, lengths: Sequence[int], rows: int, width: int, end: int) -> None:
        """width: tokens before the first that is drawn."""
        self.lengths = torch.tensor([lengths[i % len(lengths)] for i in range(rows)])
        self.width, self.end = width, end

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        last = self.lengths <= input_ids.shape[1] - self.width + 1
        scores[:, self.end] = -torch.inf
        if last.any():
            scores[last] = -torch.inf
            scores[last, self.end] = 0.0
        return scores
