"""Where a model is called past its root, its backbone or its head alone. The only place.

A model that `fully_shard` has split gathers its embeddings and its head when the root is called, not when a part of it is: a
sharded evaluator calls all of this within its root, a module around the model (see `fsdp/sharding.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from policygrad.learners.local.packing import Pack
from policygrad.models.routing import Routing

Inputs = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Network:
    """A causal language model in two halves: states, and the logits they are turned into."""

    model: nn.Module
    split_head: bool = False
    """The head applied to the last hidden states gives the model's logits, so it need only see predicting positions. Otherwise a
    state is the logits themselves."""
    branches: bool = False
    """The model reads a pack as a tree, each node once; otherwise text by text."""
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

    @property
    def head(self) -> nn.Module | None:
        """What turns a state into logits; None where a state is logits."""
        found: nn.Module = self._root.get_output_embeddings()
        return found if self.split_head else None

    def width(self, states: Tensor) -> int:
        """V, logits per state."""
        return int(self._root.get_output_embeddings().weight.shape[0]) if self.split_head else states.shape[1]

    def states(self, part: Pack) -> Tensor:
        """[u, ·] what `logits` turns into those that predict the sampled tokens, at the nodes `part.reading`."""
        if self.routing is not None:  # also for what is recomputed on the way back
            routes = part.routes
            if routes is not None and not self.branches:
                routes = routes[part.paths.flatten()]
            self.routing.replay(routes)
        return self.states_at(*self.call(part))

    def call(self, part: Pack) -> tuple[Tensor, Inputs]:
        """(where the reading nodes stand in what the model gives back, what it is called with)."""
        return (part.reading, as_tree(part)) if self.branches else (part.standing, as_texts(part))

    def states_at(self, index: Tensor, call: Inputs) -> Tensor:
        """[n, ·] the states at the flat positions `index` [n] of what the model is called with."""
        if self.split_head:
            return _hidden(backbone(self.model), index, call)
        return rows(self._root(**call, use_cache=False).logits, index)

    def hidden(self, part: Pack, network: nn.Module | None = None) -> Tensor:
        """[u, H] last hidden states at `part.reading`, whatever the states are; of `network`, another backbone of this kind, where
        one is given."""
        return _hidden(backbone(self.model) if network is None else network, *self.call(part))

    def logits(self, states: Tensor) -> Tensor:
        """[n, V]."""
        found: Tensor = self._root.get_output_embeddings()(states) if self.split_head else states
        return found

    @property
    def _root(self) -> Any:
        return self.model


def as_tree(part: Pack) -> Inputs:
    """What a transformers model whose attention follows trees is called with. A mask of four dimensions is left alone."""
    ids = part.ids[None]
    nothing = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=ids.device)
    return {"input_ids": ids, "attention_mask": nothing, "position_ids": part.positions[None], "tree": part.tree}


def as_texts(part: Pack) -> Inputs:
    """What any transformers model is called with: the texts in rows. No token sees what stands behind it, so that padding needs no
    mask; without any, some models look for padding in the ids."""
    ids = part.ids[part.paths]
    positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": positions}


def _hidden(network: nn.Module, index: Tensor, call: Inputs) -> Tensor:
    return rows(network(**call, use_cache=False).last_hidden_state, index)


def rows(x: Tensor, index: Tensor) -> Tensor:
    """[n, ·] x [R, L, ·] at flat positions. The backward pass of indexing adds up atomically, in the threads' order, where an
    index repeats, so that a gradient would not be the same twice; that of `index_select` is, on the CPU."""
    return x.flatten(0, 1).index_select(0, index)


def backbone(model: Any) -> nn.Module:
    """The model without its head."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    found: nn.Module = model.base_model if decoder is None else decoder
    return found
