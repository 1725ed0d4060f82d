"""A model spread over the processes by FSDP2 (`fully_shard`), and its evaluator.

Each layer is a unit, gathered when it is called and let go after; what is left (embeddings, head) is the root's. The evaluator
calls a model past its root (see `network`), so the root is a module around the whole evaluation, `Call`: what it gathers is there
for all that happens within. Gradients are summed over the processes, never averaged: coefficients are of the whole update.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from policygrad.core.batch import Forward
from policygrad.learners.fsdp.blueprint import Blueprint, fill
from policygrad.learners.fsdp.ranks import Ranks
from policygrad.learners.fsdp.tensor import cut, plan_of
from policygrad.learners.local.curvature import Call
from policygrad.learners.local.forward import Evaluator
from policygrad.learners.local.network import Network
from policygrad.learners.local.packing import Pack
from policygrad.models.adapters import switch
from policygrad.models.precision import at_least_float32
from policygrad.models.replica import copy_weights


@dataclass(frozen=True, eq=False, kw_only=True)
class ShardedEvaluator(Evaluator):
    """Log-probabilities under a model of which each process has a share: all of them evaluate at once, each a pack of its own."""

    root: Call

    def forward(
        self,
        part: Pack,
        needs: frozenset[str] = frozenset(),
        old: Evaluator | None = None,
        reference: Evaluator | None = None,
        expected: Tensor | None = None,
    ) -> Forward:
        """As `Evaluator.forward`; `old` and `reference` are sharded too."""

        def work() -> dict[str, Tensor]:  # of a dataclass FSDP would not see the tensors
            out = Evaluator.forward(self, part, needs, old, reference, expected)
            return {f.name: x for f in fields(out) if (x := getattr(out, f.name)) is not None}

        return Forward(**cast(Any, self.root)(work))

    def states(self, part: Pack) -> Tensor:
        """As `Evaluator.states`. Until `at_rest` this process has the head as a whole: it asks for logits as often as it needs."""
        root = cast(Any, self.root)
        found: Tensor = root(lambda: Evaluator.states(self, part))
        if self.network.split_head:
            root.unshard()
        return found

    def within(self, work: Callable[[], Tensor]) -> Tensor:
        """As `Evaluator.within`; all processes do it at once."""
        found: Tensor = cast(Any, self.root)(lambda: work().clone())  # of a view FSDP could lose sight
        return found

    def at_rest(self) -> None:
        """As `Evaluator.at_rest`."""
        Evaluator.at_rest(self)
        cast(Any, self.root).reshard()


@dataclass(frozen=True, eq=False, kw_only=True)
class BareEvaluator(ShardedEvaluator):
    """Of the policy with its adapters off: what it began as, in no memory of its own."""

    def forward(
        self,
        part: Pack,
        needs: frozenset[str] = frozenset(),
        old: Evaluator | None = None,
        reference: Evaluator | None = None,
        expected: Tensor | None = None,
    ) -> Forward:
        """As `Evaluator.forward`."""
        switch(self.model, False)
        try:
            return ShardedEvaluator.forward(self, part, needs, old, reference, expected)
        finally:
            switch(self.model, True)

    @classmethod
    def of(cls, policy: ShardedEvaluator) -> BareEvaluator:
        """Of this policy, whose adapters had not moved when it began."""
        return cls(policy.network, policy.temperature, policy.window, root=policy.root)


@dataclass(frozen=True, eq=False, kw_only=True)
class ShardedNetwork(Network):
    """The halves of that model, called within its root; alone only its states are asked for."""

    root: Call

    def hidden(self, part: Pack, network: nn.Module | None = None) -> Tensor:
        """As `Network.hidden`."""
        if network is not None:
            return Network.hidden(self, part, network)
        found: Tensor = cast(Any, self.root)(lambda: Network.hidden(self, part))
        return found


def sharded(
    blueprint: Blueprint,
    source: nn.Module | None,
    ranks: Ranks,
    mesh: DeviceMesh,
    device: torch.device,
    temperature: float,
    across: DeviceMesh | None = None,
) -> ShardedEvaluator:
    """The blueprint's model, with the numbers of `source`, which rank 0 has. No process holds more than a layer of it as a whole
    on the way. across: the processes that its layers' matrices are cut between too."""
    given = None if source is None else dict(source.named_parameters())

    def numbers(name: str, p: Tensor) -> Tensor:
        return ranks.given(None if given is None else given[name], p, device)

    return _made(blueprint, numbers, mesh, device, temperature, across)


def twin(
    evaluator: Evaluator,
    blueprint: Blueprint,
    mesh: DeviceMesh,
    device: torch.device,
    across: DeviceMesh | None = None,
) -> ShardedEvaluator:
    """Of a second model with the numbers of the evaluator's, of which each process copies its share; frozen."""

    def numbers(name: str, p: Tensor) -> Tensor:
        return torch.empty_like(p, device=device)

    found = _made(blueprint, numbers, mesh, device, evaluator.temperature, across)
    copy_weights(evaluator.model, found.model)
    found.model.requires_grad_(False)
    return found


def _made(
    blueprint: Blueprint,
    given: Callable[[str, Tensor], Tensor],
    mesh: DeviceMesh,
    device: torch.device,
    temperature: float,
    across: DeviceMesh | None,
) -> ShardedEvaluator:
    """given: whole parameters, by name and likeness."""
    model = blueprint.model()
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    root, made = Call(model), dict[Tensor, nn.Parameter]()

    def numbers(p: nn.Parameter) -> Tensor:
        return given(names[p], at_least_float32(p))

    plan, called = (
        plan_of(model) if across is not None else {},
        {module: name for name, module in model.named_modules()},
    )

    def before(unit: nn.Module) -> None:
        fill(unit.modules(), device, numbers, made)
        if across is not None and unit is not root:
            cut(unit, called, plan, across)

    shard(root, mesh, blueprint.narrow, before)
    network = ShardedNetwork(model, split_head=blueprint.split_head, branches=blueprint.branches, root=root)
    return ShardedEvaluator(network, temperature, blueprint.window, root=root)


def shard(
    root: nn.Module,
    mesh: DeviceMesh,
    narrow: torch.dtype | None,
    before: Callable[[nn.Module], None] = lambda unit: None,
) -> None:
    """Leaves each process its share of the module's parameters, layer by layer, each after `before`. narrow: what they are gathered
    in, where that is less than they are kept in; gradients are summed in float32 then."""
    policy = MixedPrecisionPolicy()
    if narrow is not None:
        policy = MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for unit in (*reversed(layers(root)), root):
        before(unit)
        one = fully_shard(unit, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
        one.set_gradient_divide_factor(1.0)
        one.set_force_sum_reduction_for_comms(True)
        if hasattr(
            one, "set_reduce_scatter_unused_params"
        ):  # torch 2.13: experts that only some processes' tokens go to
            one.set_reduce_scatter_unused_params(True, recurse=False)


def layers(model: nn.Module) -> list[nn.Module]:
    """What the model is a pile of, as transformers names it (`_no_split_modules`); nothing where it does not."""
    names = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    return [module for module in model.modules() if type(module).__name__ in names]
