"""Exact score norms under a model that is spread over processes: completions are dealt out, one at a time to each.

A completion's gradient is never summed over the processes. It is squared where it comes up, a parameter after another, and let go.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from policygrad.core.batch import Batch
from policygrad.learners.fsdp.units import Unit, watched
from policygrad.learners.local.packing import Pack
from policygrad.learners.local.score_norms import Norms, ScoreNorms, alone
from policygrad.models.precision import at_least_float32


@dataclass(frozen=True, eq=False, kw_only=True)
class ShardedScoreNorms(ScoreNorms):
    """As `ScoreNorms`. Memory: the gradient of a layer, as a whole."""

    units: Sequence[Unit]

    def _norms(self, batch: Batch, rows: Tensor) -> Norms:
        root: Any = self.units[-1].module
        root.set_requires_gradient_sync(False)
        try:
            with self._squares() as total:
                for part in self.division.dealt(alone(batch, rows), self._back):
                    total.zero_()
                    self._back(part)
                    yield part.rows, total.clone()[None]
        finally:
            root.set_requires_gradient_sync(True)

    @property
    def _device(self) -> torch.device:
        return next(self.evaluator.model.parameters()).device

    def _back(self, part: Pack) -> None:
        with torch.enable_grad():
            torch.autograd.backward(self.evaluator(part.to(self._device)).sum())

    @contextmanager
    def _squares(self) -> Iterator[Tensor]:
        """[] to which each way back within adds Σ g² of the parameters that count; no gradient is left behind."""
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        seen, handles = dict[int, Tensor](), list[RemovableHandle]()

        def see(name: str, p: Tensor) -> None:  # FSDP keeps one object for each whole parameter
            if id(p) in seen or not p.requires_grad:
                return

            def arrived(p: Tensor) -> None:
                assert p.grad is not None
                if name in self.parameters:
                    total.add_(at_least_float32(p.grad).square().sum())
                p.grad = None

            seen[id(p)] = p
            handles.append(p.register_post_accumulate_grad_hook(arrived))  # type: ignore[no-untyped-call]

        try:
            with watched(self.units, see):
                yield total
        finally:
            for handle in handles:
                handle.remove()
