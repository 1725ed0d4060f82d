"""Which experts a mixture-of-experts model uses for each token: recorded while sampling, replayed while learning, counted.

A router selects the k experts with the largest scores, so rounding or a small update may send a token to another expert: its
ratio then compares two different networks. Replay keeps the sampler's selection and computes the scores from the current
weights. Source: Ma et al. 2025 (rollout routing replay, R3), arXiv:2510.11370; Zheng et al. 2025 (GSPO), arXiv:2507.18071,
sec. 5.3, which replays the experts of π_old.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.overrides import TorchFunctionMode

from policygrad.core.metrics import Mean, Metrics
from policygrad.errors import ModelError


class Routing:
    """The routers of a model, layer by layer; a model's sampler and learner share one object."""

    def __init__(self, routers: list[Router]) -> None:
        self.routers = routers

    @classmethod
    def for_model(cls, model: nn.Module) -> Routing:
        """Return the model's routing. Raises ModelError for a model whose routers are not found (`find_routing`)."""
        routing = find_routing(model)
        if not routing.routers:
            raise ModelError(
                f"{type(model).__name__} has no experts, so there is no routing to replay: set learner.routing_replay to "
                "false, or use a mixture of experts"
            )
        return routing

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Let the model select experts itself, and record its selections for `pop_recorded`."""
        for router in self.routers:
            router.recorded, router.replayed = [], None
        try:
            yield
        finally:
            for router in self.routers:
                router.recorded = None

    def pop_recorded(self) -> Tensor:
        """Return the last forward pass's selections [n, layers, k] int16 on the CPU, in the order of its n input tokens."""
        passes = [torch.cat(router.recorded or []) for router in self.routers]
        for router in self.routers:
            router.recorded = []
        return torch.stack(passes, 1)

    def replay(self, routes: Tensor | None, counted: Tensor | None = None) -> None:
        """Use these selections in the next passes and their recomputation.

        Args:
            routes: [n, layers, k]; −1 or None = the model's own.
            counted: [n] bool, True for the tokens that `routing/changed` counts: not padding, and a shared token once; None = all.
        """
        for layer, router in enumerate(self.routers):
            router.replayed = None if routes is None else routes[:, layer].long()
            router.counted = counted

    @contextmanager
    def counting(self, is_counting: bool = True) -> Iterator[None]:
        """Count how often each expert is used in the passes inside, for `pop_loads`, or do not."""
        before = [router.is_counting for router in self.routers]
        for router in self.routers:
            router.is_counting = is_counting
        try:
            yield
        finally:
            for router, was_counting in zip(self.routers, before, strict=True):
                router.is_counting, router.weight = was_counting, None

    def weigh(self, is_token: Tensor | None) -> None:
        """Count only the tokens of the next pass where this mask [n] bool is True; None = all of them."""
        for router in self.routers:
            router.weight = is_token

    def pop_loads(self) -> Tensor:
        """Return [layers, E] float64 on the CPU: how often each expert was used since the last call."""
        loads = [torch.zeros(r.experts, dtype=torch.float64) if r.load is None else r.load.cpu() for r in self.routers]
        for router in self.routers:
            router.load = None
        return pad_sequence(loads, batch_first=True)

    def pop_metrics(self) -> Metrics:
        """Return routing/changed: the share of selections replayed since the last call that the current weights would change."""
        changed, tokens = (sum(getattr(r, name) for r in self.routers) for name in ("changed", "tokens"))
        for router in self.routers:
            router.changed = router.tokens = 0.0
        return {"routing/changed": Mean(changed, tokens)} if tokens else {}


def find_routing(model: nn.Module) -> Routing:
    """Return the model's routing, found on the first call by observing `topk` in two texts; without routers for a model without
    experts, or with routers that choose otherwise.

    A router chooses k experts for each token, always among the same ones. What else calls `topk`, such as the indexer of sparse
    attention, chooses among the tokens of a text or blocks of them, so its choices depend on the text's length.
    """
    routing: Routing | None = model.__dict__.get("_policygrad_routing")
    if routing is not None:
        return routing
    short, long = (_observe_topk(model, length) for length in _TEXT_LENGTHS)
    routers = list[Router]()
    for module, calls in short.items():
        # the last call selects the experts: groups of them are selected first
        tokens, width, k = calls[-1]
        later = long.get(module, [])
        same = len(later) == len(calls) and tokens == _TEXT_LENGTHS[0] and later[-1] == (_TEXT_LENGTHS[1], width, k)
        if same and k:
            routers.append(Router(module, len(calls), k, width))
    model.__dict__["_policygrad_routing"] = routing = Routing(routers)
    return routing


_TEXT_LENGTHS = 5, 14  # tokens; no number of experts, and not the same number of blocks of any small size


@torch.no_grad()
def _observe_topk(model: nn.Module, length: int) -> dict[nn.Module, list[tuple[int, int, int]]]:
    """Return each module's calls of `topk` in a text of this length: rows, values in a row, and how many are chosen."""
    active, calls = list[nn.Module](), dict[nn.Module, list[tuple[int, int, int]]]()

    def enter(module: nn.Module, args: Any) -> None:
        active.append(module)

    def leave(module: nn.Module, args: Any, out: Any) -> None:
        active.pop()

    def record(scores: Tensor, indices: Tensor) -> None:  # by the innermost module
        width, k = scores.shape[-1], indices.shape[-1]
        calls.setdefault(active[-1], []).append((scores.numel() // max(width, 1), width, k))

    with ExitStack() as hooks, _TopK(record):
        for module in model.modules():
            hooks.enter_context(module.register_forward_pre_hook(enter))
            hooks.enter_context(module.register_forward_hook(leave))
        ids = torch.zeros(1, length, dtype=torch.int64, device=next(model.parameters()).device)
        model(input_ids=ids, use_cache=False)
    return calls


class Router:
    """The router of one layer."""

    def __init__(self, module: nn.Module, call: int, k: int, experts: int) -> None:
        """call: which of the module's calls of `topk` selects the experts, from 1. k: experts per token, of `experts`."""
        self.module, self.call, self.k, self.experts, self._calls = module, call, k, experts, 0
        self.recorded: list[Tensor] | None = None
        self.replayed: Tensor | None = None
        self.counted: Tensor | None = None
        self.changed, self.tokens = 0.0, 0.0
        self.is_counting = False
        self.load: Tensor | None = None
        self.weight: Tensor | None = None
        self._modes: list[_TopK] = []
        module.register_forward_pre_hook(self._before_forward)
        module.register_forward_hook(self._after_forward, always_call=True)

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if self.recorded is not None or self.replayed is not None or self.is_counting:
            self._calls = 0
            self._modes.append(_TopK(self.choose))
            self._modes[-1].__enter__()  # type: ignore[no-untyped-call]

    def _after_forward(self, module: nn.Module, args: Any, out: Any) -> None:
        if self._modes:
            self._modes.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def choose(self, scores: Tensor, live: Tensor) -> Tensor | None:
        """Record the model's selection in a call of `topk`, and return the experts [n, k] to use instead; None = the model's."""
        self._calls += 1
        if self._calls != self.call:
            return None
        flat = live.reshape(-1, self.k)
        if self.recorded is not None:
            self.recorded.append(flat.to("cpu", torch.int16))
        used = flat if self.replayed is None else self._replay(flat, self.replayed)
        if self.is_counting:
            self._count(used)
        return None if used is flat else used.view_as(live)

    def _replay(self, flat: Tensor, replayed: Tensor) -> Tensor:
        """Return the experts [n, k] to use instead of the model's selection."""
        if replayed.shape != flat.shape:
            raise ModelError(
                f"routing replay has the experts of {len(replayed)} tokens, and the router {type(self.module).__name__} is "
                f"called with {len(flat)}: this architecture does not support replay, set learner.routing_replay to false"
            )
        is_replayed = replayed[:, :1] >= 0
        experts = torch.where(is_replayed, replayed, flat)
        differs = (experts.sort(-1).values != flat.sort(-1).values).any(-1, keepdim=True)
        is_counted = is_replayed if self.counted is None else is_replayed & self.counted[:, None]
        self.changed += float((differs & is_counted).sum())
        self.tokens += float(is_counted.sum())
        return experts

    def _count(self, used: Tensor) -> None:
        """Add the selections [n, k] of the tokens that count to `load` [E]."""
        if self.load is None:
            self.load = torch.zeros(self.experts, dtype=torch.float64, device=used.device)
        weight = used.new_ones(len(used)) if self.weight is None else self.weight
        if len(weight) == len(used):  # a router may read other rows than the model's input, which have no weight
            self.load.scatter_add_(0, used.flatten(), weight.to(self.load.dtype).repeat_interleave(self.k))


class _TopK(TorchFunctionMode):
    """Gives the scores and indices of each call of `topk` to a function, which may return other indices to use instead."""

    def __init__(self, select: Callable[[Tensor, Tensor], Tensor | None]) -> None:
        super().__init__()
        self.select = select

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        indices = self.select(args[0], result.indices) if func in (torch.topk, torch.Tensor.topk) else None
        return result if indices is None else torch.return_types.topk((args[0].gather(-1, indices), indices))
