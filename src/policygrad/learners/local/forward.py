"""One forward pass: from a pack of tokens to log π [b, T], and to what is exact over the vocabulary where a term asks for it,
never holding more logits than a chunk of tokens needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from policygrad.core.batch import Batch, Forward
from policygrad.learners.local.logprobs import fused_log_probability
from policygrad.learners.local.packing import Pack, pack_micro_batches
from policygrad.learners.local.tree_attention import disable_tree_attention, enable_tree_attention
from policygrad.models.loading import at_least_float32
from policygrad.models.moe_routing import Routing

# Where a model is called past its root, its backbone or its head alone. The only place.
#
# A model that `fully_shard` has split gathers its embeddings and its head when the root is called, not when a part of it is: a
# sharded evaluator calls all of this within its root, a module around the model (see `fsdp/sharding.py`).

Inputs = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Network:
    """A causal language model in two halves: states, and the logits they are turned into."""

    model: nn.Module
    split_head: bool = False
    """The head applied to the last hidden states gives the model's logits, so it need only see predicting positions. Otherwise a
    state is the logits themselves."""
    use_tree: bool = False
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
        head: nn.Module = self._root.get_output_embeddings()
        return head if self.split_head else None

    def width(self, states: Tensor) -> int:
        """V, logits per state."""
        return int(self._root.get_output_embeddings().weight.shape[0]) if self.split_head else states.shape[1]

    def states(self, part: Pack) -> Tensor:
        """[u, ·] what `logits` turns into those that predict the sampled tokens, at the nodes `part.reading`."""
        if self.routing is not None:  # also for what is recomputed on the way back
            routes = part.routes
            if routes is not None and not self.use_tree:
                routes = routes[part.paths.flatten()]
            self.routing.replay(routes)
        return self.states_at(*self.call(part))

    def call(self, part: Pack) -> tuple[Tensor, Inputs]:
        """(where the reading nodes stand in what the model gives back, what it is called with)."""
        return (
            (part.predicting_nodes, make_tree_inputs(part))
            if self.use_tree
            else (part.predicting_positions, make_text_inputs(part))
        )

    def states_at(self, index: Tensor, call: Inputs) -> Tensor:
        """[n, ·] the states at the flat positions `index` [n] of what the model is called with."""
        if self.split_head:
            return _hidden_states(get_backbone(self.model), index, call)
        return gather_positions(self._root(**call, use_cache=False).logits, index)

    def hidden(self, part: Pack, network: nn.Module | None = None) -> Tensor:
        """[u, H] last hidden states at `part.reading`, whatever the states are; of `network`, another backbone of this kind, where
        one is given."""
        return _hidden_states(get_backbone(self.model) if network is None else network, *self.call(part))

    def logits(self, states: Tensor) -> Tensor:
        """[n, V]."""
        output: Tensor = self._root.get_output_embeddings()(states) if self.split_head else states
        return output

    @property
    def _root(self) -> Any:
        return self.model


def make_tree_inputs(part: Pack) -> Inputs:
    """What a transformers model whose attention follows trees is called with. A mask of four dimensions is left alone."""
    ids = part.ids[None]
    mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=ids.device)
    return {"input_ids": ids, "attention_mask": mask, "position_ids": part.positions[None], "tree": part.tree}


def make_text_inputs(part: Pack) -> Inputs:
    """What any transformers model is called with: the texts in rows. No token sees what stands behind it, so that padding needs no
    mask; without any, some models look for padding in the ids."""
    ids = part.ids[part.paths]
    positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": positions}


def _hidden_states(network: nn.Module, index: Tensor, call: Inputs) -> Tensor:
    return gather_positions(network(**call, use_cache=False).last_hidden_state, index)


def gather_positions(x: Tensor, index: Tensor) -> Tensor:
    """[n, ·] x [R, L, ·] at flat positions. The backward pass of indexing adds up atomically, in the threads' order, where an
    index repeats, so that a gradient would not be the same twice; that of `index_select` is, on the CPU."""
    return x.flatten(0, 1).index_select(0, index)


def get_backbone(model: Any) -> nn.Module:
    """The model without its head."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    network: nn.Module = model.base_model if decoder is None else decoder
    return network


MAX_LOGITS = 2**26
"""Logits held at a time, in elements (256 MiB in float32)."""
_WINDOWS = ("sliding_window", "attention_chunk_size", "attention_window_size", "window_size")


def scale_logits(logits: Tensor, temperature: float) -> Tensor:
    """Logits at the sampling temperature, in float32 or better."""
    logits = at_least_float32(logits)
    return logits if temperature == 1 else logits / temperature


def selected_logp(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """log π(token) [n] from logits [n, V] at the sampling temperature, in float32 or better."""
    logits = scale_logits(logits, temperature)
    return logits.gather(-1, tokens[:, None]).squeeze(-1) - logits.logsumexp(-1)


def _expectation(p: Tensor, x: Tensor) -> Tensor:
    """Σ p·x over the vocabulary, 0·∞ = 0: a token that a model rules out has a logit of −∞."""
    return (p * torch.where(p > 0, x, 0)).sum(-1)


def compute_exact(
    logits: Tensor, old: Tensor | None, names: Sequence[str], temperature: float, reference: Tensor | None = None
) -> list[Tensor]:
    """[n] each, over the vocabulary: the entropy −Σ π log π, kl_old = Σ π_old log(π_old/π), and kl_ref = Σ π log(π/π_ref), from
    logits [n, V]."""
    logp = scale_logits(logits, temperature).log_softmax(-1)
    out = []
    for name in names:
        if name == "entropy":
            out.append(-_expectation(logp.exp(), logp))
        elif name == "kl_ref":
            assert reference is not None  # as above
            out.append(_expectation(logp.exp(), logp - scale_logits(reference, temperature).log_softmax(-1)))
        else:
            assert old is not None  # `Evaluator.forward` asked for it
            before = scale_logits(old, temperature).log_softmax(-1)
            out.append(_expectation(before.exp(), before - logp))
    return out


@dataclass(frozen=True, eq=False)
class Evaluator:
    """Log-probabilities under one model. Which short cuts the model allows was measured by `probe`, not assumed."""

    network: Network
    temperature: float
    window: int | None = None
    """Tokens that the model's local attention looks back: longer texts are read as texts, which it knows how to do."""

    @property
    def model(self) -> nn.Module:
        """The whole model."""
        return self.network.model

    def with_model(self, model: nn.Module) -> Evaluator:
        """The same under another model of the same architecture."""
        return replace(self, network=replace(self.network, model=model, routing=None))

    def with_routing(self, routing: Routing) -> Evaluator:
        """The same, its experts those that sampled where a batch knows them."""
        return replace(self, network=replace(self.network, routing=routing))

    def states(self, part: Pack) -> Tensor:
        """[u, ·] of this model, for a term that compares another with it: `network.logits` reads them until `at_rest`."""
        return self.network_for(part).states(part)

    def release(self) -> None:
        """Nothing is replayed to whoever calls the model next, and what `states` has kept at hand is let go."""
        if self.network.routing is not None:
            self.network.routing.replay(None)

    def run_in_root(self, work: Callable[[], Tensor]) -> Tensor:
        """What `work` gives, which calls the model as a whole."""
        return work()

    def network_for(self, part: Pack) -> Network:
        """The network as it reads this pack."""
        if self.network.use_tree and self.window is not None and part.paths.shape[1] > self.window:
            return replace(self.network, use_tree=False)
        return self.network

    def __call__(self, part: Pack, expected: Tensor | None = None) -> Tensor:
        """[b, T] nats with graph; 0 off the mask."""
        return self.forward(part, expected=expected).logp

    def forward(
        self,
        part: Pack,
        needs: frozenset[str] = frozenset(),
        old: Evaluator | None = None,
        reference: Evaluator | None = None,
        expected: Tensor | None = None,
    ) -> Forward:
        """log π [b, T] with graph, 0 off the mask, and what `needs` names, exact over the vocabulary: entropy, kl_old =
        KL(π_old‖π) with `old` the evaluator of π_old, kl_ref = KL(π‖π_ref) with `reference` that of π_ref.

        expected: [b, T] the gradient that log π will be given, where it is known beforehand: it saves a product with the head.

        Raises:
            ValueError: a field that an evaluator cannot give, or kl_old without `old`, or kl_ref without `reference`.
        """
        names = sorted(needs)
        if unknown := set(names) - {"entropy", "kl_old", "kl_ref"}:
            raise ValueError(f"an evaluator gives logp, entropy, kl_old and kl_ref, not {', '.join(sorted(unknown))}")
        if "kl_old" in names and old is None:
            raise ValueError("kl_old compares with the policy before: pass its evaluator as `old`")
        if "kl_ref" in names and reference is None:
            raise ValueError("kl_ref compares with the reference: pass its evaluator as `reference`")
        compared = [x for name, x in (("kl_old", old), ("kl_ref", reference)) if name in names and x is not None]
        states, tokens, index = self.network_for(part).states(part), part.tokens[part.mask], part.predictor[part.mask]
        head = self.network.head
        statistics: Sequence[Tensor | None]
        if type(head) is nn.Linear and not compared:
            gradient = None if expected is None else expected[part.mask]
            statistics = fused_log_probability(
                states, head, index, tokens, self.temperature, entropy="entropy" in names, expected=gradient
            )
        else:
            statistics = self._forward_exact(part, states, names, compared)
        placed = (x.new_zeros(part.mask.shape).masked_scatter(part.mask, x) for x in statistics if x is not None)
        return Forward(next(placed), **dict(zip(names, placed, strict=True)))

    def _forward_exact(
        self, part: Pack, states: Tensor, names: Sequence[str], compared: Sequence[Evaluator]
    ) -> list[Tensor]:
        """logp [n] and what `names` says, through the head as a module, over chunks of tokens: a chunk's logits are computed once
        more on the way back instead of being held."""
        index, head = part.predictor[part.mask], self.network.logits
        with torch.no_grad():
            before = [other.states(part).index_select(0, index) for other in compared]

        def some(tokens: Tensor, states: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
            logits = head(states)
            with torch.no_grad():
                fixed = [other.network.logits(x) for other, x in zip(compared, rest, strict=True)]
            old, reference = fixed[0] if "kl_old" in names else None, fixed[-1] if "kl_ref" in names else None
            logp = selected_logp(logits, tokens, self.temperature)
            return logp, *compute_exact(logits, old, names, self.temperature, reference)

        columns = (part.tokens[part.mask], states.index_select(0, index), *before)
        size = max(1, MAX_LOGITS // self.network.width(states))
        recompute: Callable[..., tuple[Tensor, ...]] = some
        if torch.is_grad_enabled() and len(index) > size:
            recompute = lambda *x: checkpoint(some, *x, use_reentrant=False)  # noqa: E731
        chunks = zip(*(torch.split(x, size) for x in columns), strict=True)
        return [torch.cat(x) for x in zip(*(recompute(*chunk) for chunk in chunks), strict=True)]


def _attention_window(model: Any) -> int | None:
    """Tokens that the narrowest local attention of the model looks back, as its configuration says."""
    config = model.config.get_text_config() if hasattr(model, "config") else None
    widths = [getattr(config, name, None) for name in _WINDOWS]
    return min((w for w in widths if isinstance(w, int) and w > 0), default=None)


@torch.no_grad()
def build_evaluator(model: nn.Module, temperature: float) -> Evaluator:
    """Tries both short cuts on a small made-up group and keeps those that leave every log-probability as it was.

    "As it was" is measured against how much a prompt matters to this model, so that a model of small logits hides nothing.
    """
    generator = torch.Generator().manual_seed(0)
    vocabulary = Network(model).vocabulary
    prompts = torch.randint(vocabulary, (2, 4), generator=generator)
    tokens = torch.randint(vocabulary, (4, 5), generator=generator)
    tokens[1, :2] = tokens[0, :2]
    batch = Batch(
        mask=torch.arange(5) < torch.tensor([5, 5, 5, 3])[:, None],
        group=torch.zeros(4, dtype=torch.int64),
        reward=torch.zeros(4),
        tokens=tokens,
        prompts=(prompts[0],),
    )
    device, dtype = next(model.parameters()).device, next(model.parameters()).dtype

    def evaluated(evaluator: Evaluator, batch: Batch) -> Tensor:
        out = torch.zeros(batch.mask.shape)
        for p in pack_micro_batches(batch, torch.arange(len(out)), 10**6):
            out[p.rows] = evaluator(p.to(device)).cpu().float()
        return out

    plain = Evaluator(Network(model), temperature, _attention_window(model))
    truth = evaluated(plain, batch)
    effect = float((evaluated(plain, replace(batch, prompts=(prompts[1],))) - truth).abs().max())
    tolerance = (0.05 if dtype == torch.bfloat16 else 1e-4) * effect

    def holds(evaluator: Evaluator) -> bool:
        try:
            return float((evaluated(evaluator, batch) - truth).abs().max()) <= tolerance
        except Exception:  # whatever an architecture says to a call it does not take: the plain path remains
            return False

    split = replace(plain, network=Network(model, split_head=True))
    best = split if holds(split) else plain
    if not enable_tree_attention(model):
        return best
    tree = replace(best, network=replace(best.network, use_tree=True))
    if holds(tree):
        return tree
    disable_tree_attention(model)
    return best


# Recomputed activations: less memory for more time, and the mode that a backward pass needs for it.


@contextmanager
def backward_mode(model: nn.Module, recompute: bool) -> Iterator[None]:
    """Transformers recompute activations only in training mode, in which they keep no cache: sampling needs the other.

    Dropout is 0 in both (see `load_model`).
    """
    model.train(recompute)
    try:
        yield
    finally:
        model.eval()


def recompute_activations(model: Any) -> None:
    """Under its name in transformers ≥ 5.2x, or the one before."""
    enable = getattr(model, "activation_checkpointing_enable", None)
    if enable is not None:
        enable()
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def backward_zero(x: Tensor) -> None:
    """A way back that adds 0 to every gradient; none where nothing is differentiated."""
    if x.requires_grad:
        torch.autograd.backward(x.sum() * 0)
