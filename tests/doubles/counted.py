"""How often an optimiser is handed a micro-batch's gradient."""

from __future__ import annotations

from policygrad.learners.local.optimizer import Optimizer


def counted(optimizer: Optimizer) -> list[int]:
    """One entry for each time, from now on."""
    calls, collect = list[int](), optimizer.collect

    def counting() -> None:
        calls.append(1)
        collect()

    optimizer.collect = counting  # type: ignore[method-assign]
    return calls
