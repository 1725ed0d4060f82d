"""Reading along paths in several processes: what each reads differs, and all must call a sharded network equally often.

A layer's weights are gathered when it is called, and its gradients summed when it is differentiated, by all processes at once. So
they agree before each call that is not a micro-batch's pass, of which all have equally many: while some process has a call
without a graph to make, all make one, then those that are differentiated; who has none reads a single token, which adds nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from policygrad.learners.local.forward import Network, backward_zero
from policygrad.learners.local.packing import make_smallest_pack
from policygrad.learners.local.path_reader import PathCalls

if TYPE_CHECKING:
    from policygrad.learners.local.packing import Pack


class SharedCalls(PathCalls):
    """Makes the calls of a sharded network, together with the other processes."""

    keeps_order = True  # FSDP gathers a layer again when its output receives a gradient

    def __init__(
        self,
        network: Network,
        backbone: nn.Module,
        root: Callable[[Callable[[], Tensor]], Tensor],
        all_reduce: Callable[[Tensor], Tensor] | None,
    ) -> None:
        """
        Args:
            root: Calls a function inside FSDP's root.
            all_reduce: Adds up a CPU tensor over the processes; None = all make the same calls.
        """
        self.network, self.backbone, self.root, self.all_reduce = network, backbone, root, all_reduce
        self.recomputes = backbone.training
        device = network.model.get_input_embeddings().weight.device
        self.smallest: Pack = make_smallest_pack().to(device)

    def run(self, work: Callable[[], Tensor]) -> Tensor:
        has_graph = torch.is_grad_enabled()
        while self._agree(has_graph) is not has_graph:
            self._make_smallest_call(not has_graph)
        return self.root(work)

    def meet(self) -> None:
        while (has_graph := self._agree(None)) is not None:
            self._make_smallest_call(has_graph)

    def _agree(self, has_graph: bool | None) -> bool | None:
        """Return which kind of call all make now, with a graph or without; None = no process has one to make."""
        if self.all_reduce is None:
            return has_graph
        counts = torch.tensor([has_graph is False, has_graph is True], dtype=torch.int64)
        without, with_graph = self.all_reduce(counts).tolist()
        return False if without else True if with_graph else None

    def _make_smallest_call(self, has_graph: bool) -> None:
        was_training = self.backbone.training
        self.backbone.train(self.recomputes and has_graph)
        try:
            with torch.set_grad_enabled(has_graph), self.network.uncounted():
                backward_zero(self.root(lambda: self.network.read_states(self.smallest, self.backbone)))
        finally:
            self.backbone.train(was_training)
