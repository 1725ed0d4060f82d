"""How often an optimiser is handed a micro-batch's gradient."""

from __future__ import annotations

from policygrad.learners.local.optimizer import Optimizer


def counted(optimizer: Optimizer) -> list[int]:
    """One entry for each time, from now on."""
    calls, collect = list[int](), optimizer.accumulate_master_grads

    def counting() -> None:
        calls.append(1)
        collect()

    optimizer.accumulate_master_grads = counting  # type: ignore[method-assign]
    return calls
