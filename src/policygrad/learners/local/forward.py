"""The forward pass from a pack of tokens to log π [b, T] and to exact statistics over the vocabulary, chunk by chunk of logits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from policygrad.core.batch import Batch, Forward, TopTokens
from policygrad.core.divergences import REVERSE_KL, Divergence, expectation
from policygrad.core.media import Media
from policygrad.learners.config import AUTO, LearnerConfig
from policygrad.learners.local.logprobs import FUSED_HEADS, fused_log_probability
from policygrad.learners.local.packing import Pack, pack_micro_batches
from policygrad.learners.local.tree_attention import (
    disable_tree_attention,
    enable_tree_attention,
)
from policygrad.models.attention import short_windows
from policygrad.models.loading import at_least_float32, attention_limits
from policygrad.models.traits import base_network, placeholder_id, read_balance_coefficient
from policygrad.utils.out_of_memory import is_out_of_memory

if TYPE_CHECKING:
    from policygrad.learners.local.path_reader import PathReaders
    from policygrad.models.moe_routing import Routing

Inputs = dict[str, Any]
E = TypeVar("E", bound="Evaluator")
MAX_LOGITS = 2**26  # logits in memory at a time, in elements (256 MiB in float32)


@dataclass(frozen=True, eq=False)
class Network:
    """A causal language model in two halves: hidden states, and the logits made of them.

    This is the only place that calls a backbone or a head without the model. FSDP gathers the root's parameters, embeddings and
    head, only when the root is called; a sharded evaluator therefore calls all of this inside a root module around the model (see
    `fsdp/sharding.py`).
    """

    model: Any  # an AutoModelForCausalLM
    split_head: bool = False
    """The head on last hidden states gives the model's logits, so it need only see predicting positions; otherwise a state is the
    logits themselves."""
    use_tree: bool = False  # the model reads a pack as a tree, each node once; otherwise text by text
    use_flex: bool = True  # FlexAttention where it is faster
    routing: Routing | None = None  # replays the sampler's experts in a mixture of experts
    load: Routing | None = None  # counts which experts tokens use
    shares_pictures: bool = True  # a tree may have pictures: none of its masks depends on them
    reads_prefixes: bool = False  # without a tree, common beginnings are read once by the model's own cache

    @property
    def vocabulary(self) -> int:
        """Number of token ids that it reads."""
        return int(self.model.get_input_embeddings().weight.shape[0])

    @property
    def hidden_size(self) -> int:
        """H."""
        return int(self.model.get_output_embeddings().weight.shape[1])

    @property
    def head(self) -> nn.Module | None:
        """The module from states to logits; None if a state is logits."""
        return self.model.get_output_embeddings() if self.split_head else None

    def width(self, states: Tensor) -> int:
        """Return V, the number of logits per state."""
        return int(self.model.get_output_embeddings().weight.shape[0]) if self.split_head else states.shape[1]

    def states(self, part: Pack) -> Tensor:
        """Return [u, ·] the states at `part.predicting_nodes`, which `logits` reads."""
        if (readers := self._find_readers(part)) is not None:
            return readers.read(self, get_backbone(self.model), part)
        return self.read_states(part)

    def read_states(self, part: Pack, backbone: nn.Module | None = None) -> Tensor:
        """Return them for a pack that is read as a whole; of another backbone [u, H] its last hidden states."""
        if self.routing is not None:  # stays set for activations that the backward pass recomputes
            routes = part.routes
            if routes is not None and not self.use_tree:
                routes = routes[part.paths.flatten()]
            self.routing.replay(routes, None if routes is None else self._counts(part))
        if self.load is not None:
            self.load.weigh(self._counts(part))
        if backbone is not None:
            return _hidden_states(backbone, *self.call(part))
        read = self._read_prefixes(part, get_backbone(self.model) if self.split_head else self.model)
        return self.states_at(*self.call(part)) if read is None else read

    def _read_prefixes(self, part: Pack, network: nn.Module, *, hidden: bool | None = None) -> Tensor | None:
        """Return [u, ·] what the network computes at the predicting nodes, their common beginnings read once; None where that saves
        nothing or is not possible.

        Args:
            hidden: The last hidden states, or the logits; None = what `split_head` says.
        """
        if not self.reads_prefixes or self.use_tree or self.routing is not None or part.slots is not None:
            return None
        from policygrad.learners.local.cached_prefixes import plan_prefixes, read_with_prefixes

        plan = plan_prefixes(part.tree.lengths, part.tree.shared)
        is_hidden = self.split_head if hidden is None else hidden
        output = "last_hidden_state" if is_hidden else "logits"
        weigh = None if self.load is None else self.load.weigh
        return None if plan is None else read_with_prefixes(network, part, plan, output, weigh)

    def as_evaluator(self) -> Evaluator:
        """Return what evaluates texts of any length at temperature 1."""
        return Evaluator(self, 1.0)

    @property
    def reads_segments(self) -> bool:
        """True if packs may follow a path that is read once for several of them: found by trying it, on the first call."""
        if not self.split_head or not (self.use_tree or (self.reads_prefixes and self.routing is None)):
            return False
        answer: bool | None = self.model.__dict__.get(_SEGMENTS)
        if answer is None:
            self.model.__dict__[_SEGMENTS] = True  # while it is tried
            try:
                answer = _reads_segments(self)
            finally:
                del self.model.__dict__[_SEGMENTS]
            self.model.__dict__[_SEGMENTS] = answer
        return answer

    def _find_readers(self, part: Pack) -> PathReaders | None:
        """Return what reads this pack behind its path; None = it is read as a whole."""
        is_cut = len(part.parts) > 1 or any(x.path for x in part.parts)
        return part.path_readers if is_cut and self.reads_segments else None

    def uncounted(self) -> AbstractContextManager[None]:
        """Enclose passes whose tokens do not count for `load`."""
        return nullcontext() if self.load is None else self.load.counting(False)

    def call(self, part: Pack) -> tuple[Tensor, Inputs]:
        """Return the flat positions of the predicting nodes in the model's output, and the model's inputs."""
        if self.use_tree:  # tree attention leaves a four-dimensional mask as it is
            ids, positions = part.ids[None], part.positions[None]
            mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=ids.device)
            inputs: Inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
            if part.slots is not None:
                inputs |= self._picture_inputs(ids, part.slots[None], part.node_media)
                inputs["position_ids"] = self._node_positions(part)
            return part.predicting_nodes, inputs | {"tree": part.tree, "use_flex": self.use_flex}
        # A row per text. Causal attention does not see the padding behind a text; without a mask, which is all ones, some models
        # look for padding ids.
        ids = part.ids[part.paths]
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": positions}
        if part.slots is not None:
            slots = part.slots[part.paths] & self._is_token(part)
            inputs |= self._picture_inputs(ids, slots, chain.from_iterable(part.media))
            inputs["position_ids"] = self._text_positions(part)
        return part.predicting_positions, inputs

    def _picture_inputs(self, ids: Tensor, slots: Tensor, media: Iterable[Media]) -> Inputs:
        from policygrad.models.vision import picture_inputs

        return picture_inputs(self.model, ids, slots, media)

    def _is_token(self, part: Pack) -> Tensor:
        """Return [S, L] bool, False at the padding of texts."""
        lengths = torch.from_numpy(part.tree.lengths).to(part.paths.device)
        return torch.arange(part.paths.shape[1], device=lengths.device) < lengths[:, None]

    def _counts(self, part: Pack) -> Tensor | None:
        """Return [rows of the input] bool, True once for each token that is read; None = everywhere."""
        if self.use_tree:
            return part.counted
        first = self._is_token(part) & ~self._is_shared(part)
        return (first if part.counted is None else first & part.counted[part.paths]).flatten()

    def _is_shared(self, part: Pack) -> Tensor:
        """Return [S, L] bool, True at the tokens that an earlier text has too."""
        shared = torch.from_numpy(part.tree.shared).to(part.paths.device)
        return torch.arange(part.paths.shape[1], device=shared.device) < shared[:, None]

    def _text_positions(self, part: Pack) -> Tensor:
        """Return the positions of distinct texts with pictures, [S, L] or [k, S, L]."""
        from policygrad.models.vision import picture_positions

        assert part.slots is not None
        ids, is_token = part.ids[part.paths], self._is_token(part)
        slots = part.slots[part.paths] & is_token
        return picture_positions(self.model, ids, slots, is_token, chain.from_iterable(part.media))

    def _node_positions(self, part: Pack) -> Tensor:
        """Return the positions of a tree's nodes in their texts, [1, N] or [k, 1, N]."""
        positions, is_token = self._text_positions(part), self._is_token(part)
        nodes = positions.new_zeros(*positions.shape[:-2], 1, len(part.ids))
        nodes[..., 0, part.paths[is_token]] = positions[..., is_token]
        return nodes

    def states_at(self, index: Tensor, call: Inputs) -> Tensor:
        """Return [n, ·] the states at flat positions [n] of the inputs."""
        if self.split_head:
            return _hidden_states(get_backbone(self.model), index, call)
        return gather_positions(_run(self.model, call).logits, index)

    def hidden(self, part: Pack, network: nn.Module | None = None) -> Tensor:
        """Return [u, H] last hidden states at `part.predicting_nodes`; `network`: another backbone to use."""
        backbone = get_backbone(self.model) if network is None else network
        if (readers := self._find_readers(part)) is not None:
            return readers.read(replace(self, routing=None, load=None), backbone, part)
        read = self._read_prefixes(part, backbone, hidden=True)
        return _hidden_states(backbone, *self.call(part)) if read is None else read

    def logits(self, states: Tensor) -> Tensor:
        """Return [n, V]."""
        return self.model.get_output_embeddings()(states) if self.split_head else states


def _hidden_states(network: nn.Module, index: Tensor, call: Inputs) -> Tensor:
    return gather_positions(_run(network, call).last_hidden_state, index)


def _run(network: nn.Module, call: Inputs) -> Any:
    """Call a network with the inputs of `Network.call`."""
    inputs = dict(call)
    embedded = inputs.pop("embedded_ids", None)
    if embedded is None:
        return network(**inputs, use_cache=False)
    from policygrad.models.vision import embedding

    with embedding(network, embedded):
        return network(**inputs, use_cache=False)


def gather_positions(x: Tensor, index: Tensor) -> Tensor:
    """Return [n, ·] of x [R, L, ·] at flat positions.

    On a CPU the backward pass of `index_select` is deterministic; that of indexing adds up repeated positions in the threads'
    order.
    """
    return x.flatten(0, 1).index_select(0, index)


def get_backbone(model: Any) -> nn.Module:
    """Return the model without its head."""
    if placeholder_id(model) is not None:  # with its vision tower
        inner: nn.Module = base_network(model).base_model
        return inner
    decoder: nn.Module | None = model.get_decoder() if hasattr(model, "get_decoder") else None
    return model.base_model if decoder is None else decoder


def scale_logits(logits: Tensor, temperature: float) -> Tensor:
    """Return logits at the sampling temperature, in float32 or better."""
    logits = at_least_float32(logits)
    return logits if temperature == 1 else logits / temperature


def selected_logp(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """Return log π(token) [n] from logits [n, V] at the sampling temperature, in float32 or better."""
    logits = scale_logits(logits, temperature)
    return logits.gather(-1, tokens[:, None]).squeeze(-1) - logits.logsumexp(-1)


def check_statistics(names: Sequence[str], has_old: bool, has_reference: bool) -> None:
    """Raise ValueError for a statistic that is unknown, or whose other model is missing."""
    if unknown := sorted({*names} - {"entropy", "kl_old", "kl_ref", "sum_pi_squared"}):
        raise ValueError(
            f"an evaluator computes logp, entropy, kl_old, kl_ref and sum_pi_squared, not {', '.join(unknown)}"
        )
    if "kl_old" in names and not has_old:
        raise ValueError("kl_old compares with the old policy: pass its evaluator as `old`")
    if "kl_ref" in names and not has_reference:
        raise ValueError("kl_ref compares with the reference: pass its evaluator as `reference`")


def compute_exact(
    logits: Tensor,
    old: Tensor | None,
    names: Sequence[str],
    temperature: float,
    reference: Tensor | None = None,
    divergence: Divergence = REVERSE_KL,
    top: TopTokens | None = None,
    unmasked: Tensor | None = None,
) -> list[Tensor]:
    """Return the statistics `names`, each [n], from logits [n, V]: the entropy −Σ π log π, kl_old = Σ π_old log(π_old/π), kl_ref,
    the `divergence` from π_ref, or from what `top` tells of it, and sum_pi_squared = Σ π², without graph.

    Args:
        unmasked: Logits for kl_ref, before tokens were masked; None = the same.
    """
    logp = scale_logits(logits, temperature).log_softmax(-1)
    out = []
    for name in names:
        if name == "entropy":
            out.append(-expectation(logp.exp(), logp))
        elif name == "sum_pi_squared":
            out.append((2 * logp.detach()).exp().sum(-1))
        elif name == "kl_ref":
            compared = logp if unmasked is None else scale_logits(unmasked, temperature).log_softmax(-1)
            if top is not None:
                out.append(divergence.compute_top(compared, top))
                continue
            assert reference is not None  # checked by `Evaluator.forward`
            out.append(divergence.compute(compared, scale_logits(reference, temperature).log_softmax(-1)))
        else:
            assert old is not None  # likewise
            before = scale_logits(old, temperature).log_softmax(-1)
            out.append(expectation(before.exp(), before - logp))
    return out


@dataclass(frozen=True, eq=False)
class Evaluator:
    """Log-probabilities under one model, with the shortcuts that `build_evaluator` found valid for it."""

    network: Network
    temperature: float
    window: int | None = None
    """Tokens from which on the model attends otherwise than the tree knows (chunks, a top-k, compressed blocks, windows that its
    layers do not tell): longer texts are read as texts, with the model's own masks."""

    @property
    def model(self) -> nn.Module:
        return self.network.model  # type: ignore[no-any-return]

    def states(self, part: Pack) -> Tensor:
        """Return [u, ·] this model's states for a comparison with another's; `network.logits` may read them until `release`."""
        return self.network_for(part).states(part)

    def release(self) -> None:
        """Stop replaying experts, and free what `states` has kept."""
        if self.network.routing is not None:
            self.network.routing.replay(None)

    def run_in_root(self, work: Callable[[], Tensor]) -> Tensor:
        """Return the result of `work`, which calls the full model."""
        return work()

    def network_for(self, part: Pack) -> Network:
        """Return the network in the mode that suits this pack."""
        if self.window is not None and part.paths.shape[1] > self.window:
            return replace(self.network, use_tree=False, reads_prefixes=False)
        if self.network.use_tree and part.slots is not None and not self.network.shares_pictures:
            return replace(self.network, use_tree=False)
        return self.network

    def lead(
        self,
        part: Pack,
        backbone: nn.Module | None = None,
        call: Callable[[Callable[[], Tensor]], Tensor] | None = None,
    ) -> None:
        """Read what a pack follows, where that must come before the pass that reads the pack; here the pass does it.

        Args:
            backbone: Another than the model's, which is called within `call`.
        """

    @contextmanager
    def keep_gradients(self) -> Iterator[None]:
        """Enclose passes that must leave no gradient."""
        trained = [p for p in self.model.parameters() if p.requires_grad]
        try:
            for p in trained:
                p.requires_grad_(False)
            yield
        finally:
            for p in trained:
                p.requires_grad_()

    def share(self, part: Pack) -> Pack:
        """Return what this process reads of a pack: all of it, unless it divides packs with others."""
        return part

    def add_up(self, x: Tensor) -> Tensor:
        """Return the sum of what the processes that divide a pack have computed, [b, T] each; what follows they all compute."""
        return x

    def __call__(self, part: Pack, expected: Tensor | None = None) -> Tensor:
        """Return log π [b, T] in nats with graph; 0 off the mask."""
        return self.forward(part, expected=expected).logp

    def forward(
        self,
        part: Pack,
        needs: frozenset[str] = frozenset(),
        old: Evaluator | None = None,
        reference: Evaluator | None = None,
        expected: Tensor | None = None,
        divergence: Divergence = REVERSE_KL,
    ) -> Forward:
        """Return log π [b, T] with graph, 0 off the mask, and the statistics `needs`, exact over the vocabulary.

        Args:
            needs: entropy, kl_old = KL(π_old‖π), kl_ref = the `divergence` from π_ref, sum_pi_squared = Σ π² (without graph).
            old: Evaluator of π_old.
            reference: Evaluator of π_ref, which reads `part.reference` if there is one; None where `part.reference_top` has what a
                server tells.
            divergence: From π_ref.
            expected: [b, T] the gradient that log π will receive, if known: it saves a product with the head.

        Raises:
            ValueError: An unknown statistic, kl_old without `old`, or kl_ref without `reference`.
        """
        names = sorted(needs)
        check_statistics(names, old is not None, reference is not None or part.reference_top is not None)
        part = self.share(part)
        read = part if part.reference is None else part.reference  # by π_ref
        pairs = (("kl_old", old, part), ("kl_ref", reference, read))
        compared = [(x, pack) for name, x, pack in pairs if name in names and x is not None]
        states, tokens, index = self.network_for(part).states(part), part.tokens[part.mask], part.predictor[part.mask]
        network, head, temperature = self.network, self.network.head, self.temperature
        statistics: Sequence[Tensor | None]
        if isinstance(head, nn.Linear) and type(head) in FUSED_HEADS and not compared and "kl_ref" not in names:
            gradient = None if expected is None else expected[part.mask]
            statistics = fused_log_probability(
                states,
                head,
                index,
                tokens,
                temperature,
                entropy="entropy" in names,
                sum_pi_squared="sum_pi_squared" in names,
                expected=gradient,
                sampling_mask=part.sampling_mask,
            )
        else:  # through the head module; the backward pass recomputes a chunk's logits
            with torch.no_grad():
                compared_states = [
                    other.states(pack).index_select(0, pack.predictor[pack.mask]) for other, pack in compared
                ]
            top = part.reference_top if reference is None and "kl_ref" in names else None
            reads_reference = "kl_ref" in names and top is None

            def compute(places: Tensor, tokens: Tensor, states: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
                def mask(logits: Tensor) -> Tensor:
                    left = part.sampling_mask
                    return logits if left is None or not len(places) else left.apply_(logits.clone(), int(places[0]))

                all_logits = network.logits(states)
                logits = mask(all_logits)
                compares_all = part.sampling_mask is not None and divergence.over == "vocabulary"
                with torch.no_grad():
                    fixed = [other.network.logits(x) for (other, _), x in zip(compared, others, strict=False)]
                    old = mask(fixed[0]) if "kl_old" in names else None
                    reference = (fixed[-1] if compares_all else mask(fixed[-1])) if reads_reference else None
                likeliest = None if top is None else TopTokens(*others[-2:])
                unmasked = all_logits if compares_all else None
                logp = selected_logp(logits, tokens, temperature)
                return logp, *compute_exact(logits, old, names, temperature, reference, divergence, likeliest, unmasked)

            places = torch.arange(len(index), device=index.device)  # of the tokens in the sampling mask
            columns = (places, tokens, states.index_select(0, index), *compared_states)
            columns += () if top is None else (top.ids, top.logp)
            size = max(1, MAX_LOGITS // network.width(states))
            recomputed = partial(checkpoint, compute, use_reentrant=False)
            run = recomputed if torch.is_grad_enabled() and len(index) > size else compute
            chunks = zip(*(torch.split(x, size) for x in columns), strict=True)
            statistics = [torch.cat(x) for x in zip(*(run(*chunk) for chunk in chunks), strict=True)]
        placed = (x.new_zeros(part.mask.shape).masked_scatter(part.mask, x) for x in statistics if x is not None)
        total = map(self.add_up, placed)
        return Forward(next(total), **dict(zip(names, total, strict=True)))


@torch.no_grad()
def build_evaluator(model: nn.Module, temperature: float) -> Evaluator:
    """Return an evaluator with those shortcuts (head alone, tree) that change no log-probability of a small synthetic group.

    The tolerance is relative to how much a prompt matters to this model, so small logits hide nothing.
    """
    generator = torch.Generator().manual_seed(0)
    vocabulary = Network(model).vocabulary
    prompts = torch.randint(vocabulary, (2, 4), generator=generator)
    tokens = torch.randint(vocabulary, (4, 5), generator=generator)
    tokens[1, :2] = tokens[0, :2]
    mask, group = torch.arange(5) < torch.tensor([5, 5, 5, 3])[:, None], torch.zeros(4, dtype=torch.int64)
    batch = Batch(mask=mask, group=group, reward=torch.zeros(4), tokens=tokens, prompts=(prompts[0],))
    device, dtype = next(model.parameters()).device, next(model.parameters()).dtype

    def evaluate(evaluator: Evaluator, batch: Batch) -> Tensor:
        out = torch.zeros(batch.mask.shape)
        for p in pack_micro_batches(batch, torch.arange(len(out)), 10**6):
            out[p.rows] = evaluator(p.to(device)).cpu().float()
        return out

    plain = Evaluator(Network(model), temperature, min(attention_limits(model), default=None))
    truth = evaluate(plain, batch)
    effect = float((evaluate(plain, replace(batch, prompts=(prompts[1],))) - truth).abs().max())
    tolerance = (0.05 if dtype == torch.bfloat16 else 1e-4) * effect

    def is_exact(evaluator: Evaluator) -> bool:
        try:
            return float((evaluate(evaluator, batch) - truth).abs().max()) <= tolerance
        except Exception as error:  # architectures raise all kinds of errors for a call that they do not support
            if is_out_of_memory(error):
                raise
            return False

    split = replace(plain, network=Network(model, split_head=True))
    best = split if is_exact(split) else plain
    if enable_tree_attention(model):
        shares = True
        if placeholder_id(model) is not None:
            from policygrad.models.vision import attends_both_ways

            shares = not attends_both_ways(model)
        tree = replace(best, network=replace(best.network, use_tree=True, shares_pictures=shares))
        if is_exact(tree):
            with short_windows(model) as has_windows:
                if not has_windows:
                    return tree
                truth, unlimited = evaluate(plain, batch), replace(tree, window=None)
                reads_windows = is_exact(unlimited)
            window = min(attention_limits(model, windows=False), default=None)
            return replace(tree, window=window) if reads_windows else tree
        disable_tree_attention(model)
    limit = min(attention_limits(model, windows=False), default=None)
    prefixes = replace(best, network=replace(best.network, reads_prefixes=True), window=limit)
    with short_windows(model):
        return prefixes if _is_equal(replace(prefixes, window=None), replace(best, window=None), generator) else best


def _is_equal(evaluator: Evaluator, truth: Evaluator, generator: torch.Generator) -> bool:
    """Return whether an evaluator gives the log-probabilities of another, and the gradient of the embeddings, on two small groups;
    with prompts of two lengths as exactly as with equal ones, so that padding is no part of the text."""
    gaps = list[float]()
    try:
        for lengths in _CHECKED_PROMPTS:
            batch = _draw_batch(truth.network, generator, lengths)
            results = [
                _measure(x, batch, pack_micro_batches(batch, torch.arange(6), 10**6)) for x in (evaluator, truth)
            ]
            gaps.append(float((results[0][0] - results[1][0]).abs().max()))
            if not _are_close(results[0], results[1], truth.network):
                return False
    except Exception as error:  # architectures raise all kinds of errors for a call that they do not support
        if is_out_of_memory(error):
            raise
        return False
    equal, padded = gaps
    dtype = truth.network.model.get_input_embeddings().weight.dtype
    # parts of a model in float64 are often computed in float32
    return padded <= 10 * max(equal, torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)


@torch.no_grad()
def _reads_segments(network: Network) -> bool:
    """Return whether texts in segments have the log-probabilities of whole texts, and the gradient of their embeddings."""
    evaluator = replace(network, load=None, routing=None).as_evaluator()
    generator = torch.Generator().manual_seed(0)
    batch = _draw_batch(network, generator, (66, 19))

    def is_exact() -> bool:
        rows = torch.arange(6)
        packs = (pack_micro_batches(batch, rows, budget, can_follow=lambda saving: True) for budget in (10**6, 13))
        truth, cut = (_measure(evaluator, batch, x) for x in packs)
        return _are_close(cut, truth, network)

    try:
        with network.uncounted():
            if not is_exact():
                return False
            with short_windows(network.model) as has_windows:
                return not has_windows or is_exact()
    except Exception as error:  # architectures raise all kinds of errors for a call that they do not support
        if is_out_of_memory(error):
            raise
        return False


def _draw_batch(network: Network, generator: torch.Generator, lengths: tuple[int, int]) -> Batch:
    """Return two groups of three completions of random tokens, after prompts of these lengths."""
    tokens = torch.randint(network.vocabulary, (6, 5), generator=generator)
    mask, group = torch.arange(5) < torch.tensor([5, 4, 3, 5, 5, 4])[:, None], torch.arange(6) // 3
    prompts = tuple(torch.randint(network.vocabulary, (n,), generator=generator) for n in lengths)
    return Batch(mask=mask, group=group, reward=torch.zeros(6), tokens=tokens, prompts=prompts)


def _measure(evaluator: Evaluator, batch: Batch, packs: Iterable[Pack]) -> tuple[Tensor, Tensor]:
    """Return log π [6, 5] and the gradient of the embedding of each token id, of a weighted sum of it; that of no weight."""
    embeddings = evaluator.network.model.get_input_embeddings()
    device, read = embeddings.weight.device, list[tuple[Tensor, Tensor]]()
    weights = torch.linspace(-1, 1, batch.mask.numel(), device=device).view(batch.mask.shape)

    def observe(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        read.append((args[0], out.detach().requires_grad_()))
        return read[-1][1]

    handle = embeddings.register_forward_hook(observe)
    logp = torch.zeros(batch.mask.shape, device=device)
    try:
        with evaluator.keep_gradients(), torch.enable_grad():
            for pack in packs:
                pack = pack.to(device)
                result = evaluator(pack)
                torch.autograd.backward((weights[pack.rows] * result).sum())
                logp[pack.rows] = result.detach().float()
    finally:
        handle.remove()
    kinds, place = torch.unique(torch.cat([ids.flatten() for ids, _ in read]), return_inverse=True)
    gradients = [torch.zeros_like(x) if x.grad is None else x.grad for _, x in read]
    total = torch.zeros(len(kinds), gradients[0].shape[-1], device=device)
    return logp, total.index_add_(0, place, torch.cat([x.flatten(0, 1) for x in gradients]).float())


def _are_close(results: tuple[Tensor, Tensor], truth: tuple[Tensor, Tensor], network: Network) -> bool:
    dtype = network.model.get_input_embeddings().weight.dtype
    error = max(float((a - b).norm() / b.norm()) for a, b in zip(results, truth, strict=True))
    return error <= (0.05 if dtype in (torch.bfloat16, torch.float16) else 1e-4)


_SEGMENTS = "_policygrad_reads_segments"  # in a model, what `Network.reads_segments` has found
_CHECKED_PROMPTS = ((70, 70), (70, 3))
"""Tokens of two prompts, beyond the blocks of 64 of delta rules, and with as much padding."""


def choose_kernels(evaluator: E, config: LearnerConfig) -> E:
    """Return an evaluator with the attention that `learner.attention` names. Blocks that are recomputed or compiled have no cache,
    and the experts' load-balancing loss counts each token where it is read."""
    network = evaluator.network
    needs_one_call = config.gradient_checkpointing or config.compiles or read_balance_coefficient(evaluator.model) > 0
    reads_prefixes = network.reads_prefixes and not needs_one_call
    return replace(
        evaluator, network=replace(network, use_flex=config.attention == AUTO, reads_prefixes=reads_prefixes)
    )


@contextmanager
def backward_mode(model: nn.Module, recompute: bool) -> Iterator[None]:
    """Enclose a backward pass, in training mode if activations are recomputed.

    Transformers recompute only in training mode, in which they keep no cache, so sampling needs evaluation mode. Dropout is 0 in
    both (see `load_model`).
    """
    model.train(recompute)
    try:
        yield
    finally:
        model.eval()


def recompute_activations(model: Any) -> None:
    """Turn on gradient checkpointing, by its name in transformers ≥ 5.2x or the one before."""
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable()
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def backward_zero(x: Tensor) -> None:
    """Run a backward pass that adds 0 to every gradient, if there is a graph."""
    if x.requires_grad:
        torch.autograd.backward(x.sum() * 0)
