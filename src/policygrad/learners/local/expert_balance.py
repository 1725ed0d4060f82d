"""The load-balancing loss of a mixture of experts, exact over an update however it is split into micro-batches.

    L = coefficient · E · Σ_e f_e · P_e,   f_e = selections of expert e per token and layer,   P_e = mean router probability of e

f_e has no gradient, so that with the f_e of the whole update L is a sum over tokens: each micro-batch adds its own. They come from
a pass before the update's own. Every token that a text reads counts, its prompt's too; the last one predicts nothing and is not
read. A model asks for the loss by `output_router_logits` in its config, as in transformers, with
`router_aux_loss_coef` as coefficient.
Source: Fedus, Zoph & Shazeer 2022 (Switch Transformers), eq. 4 to 6, over the top k experts as in transformers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from policygrad.core.metrics import Mean, Metrics
from policygrad.errors import ConfigError
from policygrad.learners.config import LearnerConfig
from policygrad.learners.local.forward import Evaluator
from policygrad.learners.local.packing import Pack, WorkDivision
from policygrad.models.loading import at_least_float32
from policygrad.models.traits import read_balance_coefficient

_ASKED = "the model's config has output_router_logits = true, which asks for the load-balancing loss of its experts"
_REMEDY = "set output_router_logits to false in the model's config.json to train without it"


def find_expert_balance(evaluator: Evaluator, config: LearnerConfig, division: WorkDivision) -> ExpertBalance | None:
    """Return the load-balancing loss that the model's config asks for, compared with the model's own on the first call; None if
    it asks for none.

    Raises:
        ConfigError: it asks for one that cannot be computed exactly here.
    """
    model: Any = evaluator.model
    coefficient = read_balance_coefficient(model)
    if not coefficient:
        return None
    if type(division) is not WorkDivision:
        raise ConfigError(f"{_ASKED}, and several processes do not compute it: set learner.world_size=1, or {_REMEDY}")
    if config.compiles:
        raise ConfigError(
            f"{_ASKED}, and compiled blocks do not show their routers: unset learner.compile, or {_REMEDY}"
        )
    cached: ExpertBalance | None = model.__dict__.get("_policygrad_balance")
    balance = cached or ExpertBalance.of(model, coefficient)
    if balance is None:
        raise ConfigError(
            f"{_ASKED}, and that of {type(model).__name__} is another than it is for Mixtral or Qwen: {_REMEDY}"
        )
    model.__dict__["_policygrad_balance"] = balance
    return balance


@dataclass(frozen=True, eq=False)
class Load:
    """How often an update's tokens chose each expert."""

    selections: Tensor  # [E]
    rows: float  # tokens times layers


@dataclass(frozen=True, eq=False)
class ExpertBalance:
    """The routers of a model, and the coefficient of their loss."""

    coefficient: float
    routers: tuple[nn.Module, ...]
    top_k: int

    @classmethod
    def of(cls, model: Any, coefficient: float) -> ExpertBalance | None:
        """Return the loss if it is the model's own on a short text; None if not."""
        kinds = _router_kinds(model)
        routers = tuple(module for module in model.modules() if isinstance(module, kinds)) if kinds else ()
        text = model.config.get_text_config()
        top_k = getattr(text, "num_experts_per_tok", None) or getattr(text, "num_experts_per_token", None)
        if not routers or not isinstance(top_k, int):
            return None
        balance = cls(coefficient, routers, top_k)
        ids = (
            torch.arange(12, device=next(model.parameters()).device)[None]
            % model.get_input_embeddings().weight.shape[0]
        )
        with torch.no_grad(), balance.observe() as logits:
            mask = torch.ones_like(ids)
            mask[0, 9:] = 0
            out = model(input_ids=ids, attention_mask=mask, output_router_logits=True, use_cache=False)
        expected, weight = getattr(out, "aux_loss", None), mask[0].to(at_least_float32(ids[:0].float()).dtype)
        if not isinstance(expected, Tensor) or not logits or any(x.shape[0] != len(weight) for x in logits):
            return None
        load = balance.count([(logits, weight)])
        value = float(balance.loss(logits, weight, load)) / coefficient
        return balance if abs(value - float(expected)) <= 1e-3 * abs(float(expected)) else None

    @contextmanager
    def observe(self) -> Iterator[list[Tensor]]:
        """Collect the routers' logits [rows, E] of the passes inside, layer by layer."""
        logits = list[Tensor]()

        def record(module: nn.Module, args: Any, out: Any) -> None:
            x = out[0] if isinstance(out, tuple) else out
            logits.append(x.reshape(-1, x.shape[-1]))

        with ExitStack() as hooks:
            for router in self.routers:
                hooks.enter_context(router.register_forward_hook(record))
            yield logits

    def measure(self, evaluator: Evaluator, packs: Iterable[Pack]) -> Load:
        """Count the selections of an update's tokens, by a pass over its micro-batches without graph."""
        device = next(evaluator.model.parameters()).device

        def run() -> Iterator[tuple[list[Tensor], Tensor]]:
            for pack in packs:
                pack = pack.to(device)
                with torch.no_grad(), self.observe() as logits:
                    evaluator.states(pack)
                yield logits, row_weights(evaluator, pack)

        return self.count(run())

    def count(self, passes: Iterable[tuple[list[Tensor], Tensor]]) -> Load:
        """Count the selections in the routers' logits of several passes, each row times its weight."""
        selections, rows = torch.zeros(0), 0.0
        for logits, weight in passes:
            for x in logits:
                chosen = torch.zeros_like(x).scatter_(-1, _probabilities(x).topk(self.top_k, -1).indices, 1.0)
                counted = (chosen.double() * weight.double()[:, None]).sum(0).cpu()
                selections = counted if not len(selections) else selections + counted
                rows += float(weight.sum())
        return Load(selections, rows)

    def loss(self, logits: Iterable[Tensor], weight: Tensor, load: Load) -> Tensor:
        """Return the share [] of the update's loss, with graph, of the rows whose routers' logits these are."""
        total: Tensor | float = 0.0
        for x in logits:
            p = _probabilities(x)
            frequency = (load.selections / load.rows).to(device=p.device, dtype=p.dtype)
            total = total + (weight.to(p.dtype) * (p @ frequency)).sum()
        return torch.as_tensor(total) * (self.coefficient * len(load.selections) / load.rows)

    def loss_of_pack(self, evaluator: Evaluator, pack: Pack, logits: Iterable[Tensor], load: Load) -> Tensor:
        """Return `loss` of the routers' logits that a pass over this pack gave."""
        return self.loss(logits, row_weights(evaluator, pack), load)

    def report(self, loss: float) -> Metrics:
        """router_aux_loss: L without its coefficient; top-k for a perfect balance, more the less balanced."""
        return {"router_aux_loss": Mean(loss / self.coefficient)}


def row_weights(evaluator: Evaluator, pack: Pack) -> Tensor:
    """Return how many texts of the pack read each row of the model's input: 0 at padding, 2 at a prompt of two completions.

    [N] where a tree is read, [S·L] where texts are.
    """
    if evaluator.network_for(pack).use_tree:
        return pack.reads
    lengths = torch.from_numpy(pack.tree.lengths).to(pack.paths.device)
    is_token = torch.arange(pack.paths.shape[1], device=lengths.device) < lengths[:, None]
    copies = torch.bincount(pack.paths[is_token], minlength=len(pack.ids)).clamp(min=1)
    return torch.where(is_token, (pack.reads / copies)[pack.paths], 0).flatten()


def _probabilities(logits: Tensor) -> Tensor:
    return at_least_float32(logits).softmax(-1)


def _router_kinds(model: Any) -> tuple[type[nn.Module], ...]:
    """Return the classes of modules whose first output transformers records as router logits."""
    kinds = list[type[nn.Module]]()
    for module in model.modules():
        recorded = (getattr(module, "_can_record_outputs", None) or {}).get("router_logits")
        for recorder in recorded if isinstance(recorded, list | tuple) else [recorded]:
            kind = getattr(recorder, "target_class", recorder)
            is_first = getattr(recorder, "index", 0) == 0
            if isinstance(kind, type) and issubclass(kind, nn.Module) and is_first and kind not in kinds:
                kinds.append(kind)
    return tuple(kinds)
