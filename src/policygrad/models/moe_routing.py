"""Which experts a mixture of experts sends a token to: recorded while sampling, replayed while learning.

A router picks the k experts of the largest scores, so that rounding, or a small update, may send a token elsewhere: its
ratio then compares two networks. Replaying the choice of the sampler leaves the scores to the weights as they are, and the
choice alone as it was. Source: Ma et al. 2025 (rollout routing replay, R3), arXiv:2510.11370; Zheng et al. 2025 (GSPO),
arXiv:2507.18071, sec. 5.3, which replays the experts of π_old.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from policygrad.core.metrics import Mean, Metrics
from policygrad.errors import ModelError

_CALLS = (torch.topk, torch.Tensor.topk)


class _TopK(TorchFunctionMode):
    """Answers the `topk` within that chooses experts."""

    def __init__(self, router: Router) -> None:
        super().__init__()
        self.router, self.calls = router, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in _CALLS:
            return found
        self.calls += 1
        if self.calls != self.router.call:
            return found
        indices = self.router.choose(found.indices)
        return found if indices is None else torch.return_types.topk((args[0].gather(-1, indices), indices))


class Router:
    """One layer's router."""

    def __init__(self, module: nn.Module, call: int, k: int) -> None:
        self.module, self.call, self.k = module, call, k
        self.recorded: list[Tensor] | None = None
        self.replayed: Tensor | None = None
        self.changed, self.tokens = 0.0, 0.0
        self._within: list[_TopK] = []
        module.register_forward_pre_hook(self._enter)
        module.register_forward_hook(self._leave, always_call=True)

    def _enter(self, module: nn.Module, args: Any) -> None:
        if self.recorded is not None or self.replayed is not None:
            self._within.append(_TopK(self))
            self._within[-1].__enter__()  # type: ignore[no-untyped-call]

    def _leave(self, module: nn.Module, args: Any, out: Any) -> None:
        if self._within:
            self._within.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def choose(self, live: Tensor) -> Tensor | None:
        """The experts [n, k] to take instead of the live choice; None = that."""
        flat = live.reshape(-1, self.k)
        if self.recorded is not None:
            self.recorded.append(flat.to("cpu", torch.int16))
        if self.replayed is None:
            return None
        if self.replayed.shape != flat.shape:
            raise ModelError(
                f"routing replay holds the experts of {len(self.replayed)} tokens, and the router {type(self.module).__name__} is "
                f"called with {len(flat)}: this architecture cannot be replayed, set learner.routing_replay to false"
            )
        known = self.replayed[:, :1] >= 0
        taken = torch.where(known, self.replayed, flat)
        other = (taken.sort(-1).values != flat.sort(-1).values).any(-1, keepdim=True)
        self.changed, self.tokens = self.changed + float((other & known).sum()), self.tokens + float(known.sum())
        return taken.view_as(live)


class Routing:
    """The routers of a model, layer by layer; one object a model, for what samples and what learns."""

    def __init__(self, routers: list[Router]) -> None:
        self.routers = routers

    @classmethod
    def for_model(cls, model: nn.Module) -> Routing:
        """Found by looking which modules ask for a `topk` of experts.

        Raises:
            ModelError: a model without experts.
        """
        known: Routing | None = model.__dict__.get("_policygrad_routing")
        if known is None:
            routers = [Router(module, call, k) for module, call, k in _found(model)]
            if not routers:
                raise ModelError(
                    f"{type(model).__name__} chooses no experts, so there is no routing to replay: set learner.routing_replay to "
                    "false, or take a mixture of experts"
                )
            known = model.__dict__["_policygrad_routing"] = cls(routers)
        return known

    @contextmanager
    def recording(self) -> Iterator[None]:
        """The model chooses for itself, and `take` gives what it chose."""
        for router in self.routers:
            router.recorded, router.replayed = [], None
        try:
            yield
        finally:
            for router in self.routers:
                router.recorded = None

    def pop_recorded(self) -> Tensor:
        """[n, layers, k] int16 on the CPU: the choices of the forward pass just made, in the order of its n input tokens."""
        passes = [torch.cat(router.recorded or []) for router in self.routers]
        for router in self.routers:
            router.recorded = []
        return torch.stack(passes, 1)

    def replay(self, routes: Tensor | None) -> None:
        """The next passes, and what they recompute on the way back, take these choices [n, layers, k], -1 = their own; None = all
        their own."""
        for layer, router in enumerate(self.routers):
            router.replayed = None if routes is None else routes[:, layer].long()

    def pop_metrics(self) -> Metrics:
        """routing/changed: the share of replayed choices, since last asked, where the weights would now choose other experts."""
        changed, tokens = (sum(getattr(r, name) for r in self.routers) for name in ("changed", "tokens"))
        for router in self.routers:
            router.changed = router.tokens = 0.0
        return {"routing/changed": Mean(changed, tokens)} if tokens else {}


@torch.no_grad()
def _found(model: nn.Module) -> list[tuple[nn.Module, int, int]]:
    """(module, which of its calls of `topk` is the choice of experts, k), in the order of the layers."""
    within: list[nn.Module] = []
    mode = _Watched(within)
    handles = [
        handle
        for module in model.modules()
        for handle in (
            module.register_forward_pre_hook(lambda m, args: within.append(m)),
            module.register_forward_hook(lambda m, args, out: within.pop() and None),
        )
    ]
    try:
        with mode:
            ids = torch.zeros(1, 2, dtype=torch.int64, device=next(model.parameters()).device)
            model(input_ids=ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return [
        (module, len(sizes), sizes[-1]) for module, sizes in mode.seen.items()
    ]  # groups of experts are chosen first


class _Watched(TorchFunctionMode):
    """Which module, innermost, calls `topk`, with which k."""

    def __init__(self, within: list[nn.Module]) -> None:
        super().__init__()
        self.within = within
        self.seen: dict[nn.Module, list[int]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func in _CALLS:
            self.seen.setdefault(self.within[-1], []).append(found.indices.shape[-1])
        return found
