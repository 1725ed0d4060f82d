"""Where a model is called past its root, its backbone or its head alone. The only place.

A model that `fully_shard` has split gathers its embeddings and its head when the root is called, not when a part of it is. A
sharded learner makes `states`, `hidden` and `logits` methods of the root, registers them with torch's
`register_fsdp_forward_method`, and hands out a Network that calls those.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from policygrad.learners.local.packing import Pack
from policygrad.models.routing import Routing

Inputs = dict[str, Tensor | None]


@dataclass(frozen=True, eq=False)
class Network:
    """A causal language model in two halves: states, and the logits they are turned into."""

    model: nn.Module
    split_head: bool = False
    """The head applied to the last hidden states gives the model's logits, so it need only see predicted positions. Otherwise a
    state is the logits themselves."""
    routing: Routing | None = None
    """Of a mixture of experts whose choices are replayed."""

    @property
    def vocabulary(self) -> int:
        """Token ids it reads."""
        return int(self._root.get_input_embeddings().weight.shape[0])

    @property
    def hidden_size(self) -> int:
        """H."""
        return int(self._root.get_output_embeddings().weight.shape[1])

    def width(self, states: Tensor) -> int:
        """V, logits per state."""
        return int(self._root.get_output_embeddings().weight.shape[0]) if self.split_head else states.shape[1]

    def states(self, part: Pack) -> Tensor:
        """[n, ·] what `logits` turns into those that predict the sampled tokens, in the order of `part.mask`."""
        if self.routing is not None:  # also for what is recomputed on the way back
            self.routing.replay(part.routes)
        return self.states_at(part.predictor[part.mask], inputs(part))

    def states_at(self, index: Tensor, call: Inputs) -> Tensor:
        """[n, ·] the states at the flat positions `index` [n] of what the model is called with."""
        if self.split_head:
            return _hidden(backbone(self.model), index, call)
        return rows(self._root(**call, use_cache=False).logits, index)

    def hidden(self, part: Pack) -> Tensor:
        """[n, H] last hidden states at the positions that predict the sampled tokens, whatever the states are."""
        return predicting_states(backbone(self.model), part)

    def logits(self, states: Tensor) -> Tensor:
        """[n, V]."""
        found: Tensor = self._root.get_output_embeddings()(states) if self.split_head else states
        return found

    @property
    def _root(self) -> Any:
        return self.model


def inputs(part: Pack) -> Inputs:
    """What a transformers model is called with; without padding it needs no mask."""
    whole = part.attention.ndim == 2 and bool(part.attention.all())
    mask = None if whole else part.attention
    return {"input_ids": part.input_ids, "attention_mask": mask, "position_ids": part.positions}


def predicting_states(network: nn.Module, part: Pack) -> Tensor:
    """[n, H] last hidden states of a backbone at the positions that predict the sampled tokens."""
    return _hidden(network, part.predictor[part.mask], inputs(part))


def _hidden(network: nn.Module, index: Tensor, call: Inputs) -> Tensor:
    return rows(network(**call, use_cache=False).last_hidden_state, index)


def rows(x: Tensor, index: Tensor) -> Tensor:
    """[n, ·] x [R, L, ·] at flat positions. The backward pass of indexing adds up atomically, in the threads' order, where an
    index repeats (a shared prompt's last position does), so that a gradient would not be the same twice; that of
    `index_select` is, on the CPU."""
    return x.flatten(0, 1).index_select(0, index)


def backbone(model: Any) -> nn.Module:
    """The model without its head."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    found: nn.Module = model.base_model if decoder is None else decoder
    return found
