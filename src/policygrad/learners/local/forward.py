"""One forward pass: from a pack of tokens to log π [b, T], and to what is exact over the vocabulary where a term asks for it,
never holding more logits than a chunk of tokens needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from policygrad.core.batch import Batch, Forward
from policygrad.learners.local.network import Network
from policygrad.learners.local.packing import CAP, Pack, pack
from policygrad.models.precision import at_least_float32
from policygrad.models.routing import Routing

CHUNK = 2**26
"""Logits held at a time, in elements (256 MiB in float32)."""
_WINDOWS = ("sliding_window", "attention_chunk_size", "attention_window_size", "window_size")


def scaled(logits: Tensor, temperature: float) -> Tensor:
    """Logits at the sampling temperature, in float32 or better."""
    logits = at_least_float32(logits)
    return logits if temperature == 1 else logits / temperature


def selected_logp(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """log π(token) [n] from logits [n, V] at the sampling temperature, in float32 or better."""
    logits = scaled(logits, temperature)
    return logits.gather(-1, tokens[:, None]).squeeze(-1) - logits.logsumexp(-1)


def _times(p: Tensor, x: Tensor) -> Tensor:
    """Σ p·x over the vocabulary, 0·∞ = 0: a token that a model rules out has a logit of −∞."""
    return (p * torch.where(p > 0, x, 0)).sum(-1)


def exact(
    logits: Tensor, old: Tensor | None, names: Sequence[str], temperature: float, reference: Tensor | None = None
) -> list[Tensor]:
    """[n] each, over the vocabulary: the entropy −Σ π log π, kl_old = Σ π_old log(π_old/π), and kl_ref = Σ π log(π/π_ref), from
    logits [n, V]."""
    logp = scaled(logits, temperature).log_softmax(-1)
    out = []
    for name in names:
        if name == "entropy":
            out.append(-_times(logp.exp(), logp))
        elif name == "kl_ref":
            assert reference is not None  # as above
            out.append(_times(logp.exp(), logp - scaled(reference, temperature).log_softmax(-1)))
        else:
            assert old is not None  # `Evaluator.forward` asked for it
            before = scaled(old, temperature).log_softmax(-1)
            out.append(_times(before.exp(), before - logp))
    return out


@dataclass(frozen=True, eq=False)
class Evaluator:
    """Log-probabilities under one model. Which short cuts the model allows was measured by `probe`, not assumed."""

    network: Network
    temperature: float
    share_prompts: bool
    """The model takes a 4D mask, so a group's completions can share one row."""
    cap: int = CAP
    """Tokens in a shared row. Within the window of local attention: transformers take a 4D mask as it is for every layer."""

    @property
    def model(self) -> nn.Module:
        """The whole model."""
        return self.network.model

    def under(self, model: nn.Module) -> Evaluator:
        """The same under another model of the same architecture."""
        return replace(self, network=replace(self.network, model=model, routing=None))

    def replaying(self, routing: Routing) -> Evaluator:
        """The same, its experts those that sampled where a batch knows them."""
        return replace(self, network=replace(self.network, routing=routing))

    def at_rest(self) -> None:
        """Nothing is replayed to whoever calls the model next."""
        if self.network.routing is not None:
            self.network.routing.replay(None)

    def packs(self, batch: Batch, rows: Tensor, budget: int, whole: bool = False) -> Iterator[Pack]:
        """The completions `rows` in micro-batches this model can be given; `whole`: of whole groups."""
        return pack(batch, rows, budget, share=self.share_prompts, cap=self.cap, whole=whole)

    def __call__(self, batch: Pack) -> Tensor:
        """[b, T] nats with graph; 0 off the mask."""
        return self.forward(batch).logp

    def forward(
        self,
        batch: Pack,
        needs: frozenset[str] = frozenset(),
        old: Evaluator | None = None,
        reference: Evaluator | None = None,
    ) -> Forward:
        """log π [b, T] with graph, 0 off the mask, and what `needs` names, exact over the vocabulary: entropy, kl_old =
        KL(π_old‖π) with `old` the evaluator of π_old, kl_ref = KL(π‖π_ref) with `reference` that of π_ref.

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
        columns, head = [self.network.states(batch)], self.network.logits
        others = [other.network for name, other in (("kl_old", old), ("kl_ref", reference)) if name in names and other]
        with torch.no_grad():
            columns += [other.states(batch) for other in others]

        def part(tokens: Tensor, states: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
            logits = head(states)
            logp = selected_logp(logits, tokens, self.temperature)
            if not names:
                return (logp,)
            with torch.no_grad():
                fixed = [other.logits(x) for other, x in zip(others, rest, strict=True)]
            before = fixed[0] if "kl_old" in names else None
            return logp, *exact(logits, before, names, self.temperature, fixed[-1] if "kl_ref" in names else None)

        found = self._chunked(part, batch.tokens[batch.mask], *columns)
        placed = (x.new_zeros(batch.mask.shape).masked_scatter(batch.mask, x) for x in found)
        return Forward(next(placed), **dict(zip(names, placed, strict=True)))

    def _chunked(self, part: Callable[..., tuple[Tensor, ...]], tokens: Tensor, *columns: Tensor) -> tuple[Tensor, ...]:
        """`part` over chunks of tokens, its logits computed once more on the way back instead of being held."""
        size = max(1, CHUNK // self.network.width(columns[0]))
        if len(tokens) <= size:
            return part(tokens, *columns)
        recompute: Callable[..., tuple[Tensor, ...]] = part
        if torch.is_grad_enabled():
            recompute = lambda *x: checkpoint(part, *x, use_reentrant=False)  # noqa: E731
        chunks = zip(*(torch.split(x, size) for x in (tokens, *columns)), strict=True)
        return tuple(torch.cat(x) for x in zip(*(recompute(*chunk) for chunk in chunks), strict=True))


def _window(model: Any) -> int:
    """Tokens that the narrowest local attention of the model looks back, as its configuration says."""
    config = model.config.get_text_config() if hasattr(model, "config") else None
    widths = [getattr(config, name, None) for name in _WINDOWS]
    return min((w for w in widths if isinstance(w, int) and w > 0), default=CAP)


@torch.no_grad()
def probe(model: nn.Module, temperature: float) -> Evaluator:
    """Tries both short cuts on a small made-up group and keeps those that leave every log-probability as it was.

    "As it was" is measured against how much a prompt matters to this model, so that a model of small logits hides nothing.
    """
    generator = torch.Generator().manual_seed(0)
    vocabulary = Network(model).vocabulary
    prompts = torch.randint(vocabulary, (2, 4), generator=generator)
    batch = Batch(
        mask=torch.ones(3, 5, dtype=torch.bool),
        group=torch.zeros(3, dtype=torch.int64),
        reward=torch.zeros(3),
        tokens=torch.randint(vocabulary, (3, 5), generator=generator),
        prompts=(prompts[0],),
    )
    device, dtype = next(model.parameters()).device, next(model.parameters()).dtype

    def evaluated(evaluator: Evaluator, batch: Batch) -> Tensor:
        out = torch.zeros(3, 5)
        for p in evaluator.packs(batch, torch.arange(3), 10**6):
            out[p.rows] = evaluator(p.to(device)).cpu().float()
        return out

    plain = Evaluator(Network(model), temperature, share_prompts=False)
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
    shared = replace(best, share_prompts=True, cap=min(CAP, _window(model)))
    row = 4 + 3 * (5 - 1)  # a window that the made-up group does not fit into would leave sharing untried
    return shared if shared.cap >= row and holds(shared) else best
