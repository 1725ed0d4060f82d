"""‖∇_θ log π_θ(o)‖² of every completion, exactly: what the variance-minimising baseline weighs rewards by.

The score is that of the sampled tokens at the sampling temperature, over the parameters that train or a chosen part of them. It
costs a forward and a backward pass per distinct completion, with no prompt shared and a gradient to each: several times an
update on a model of 0.7M parameters. A choice of late parameters (`learner.score_parameters`) shortens the way back. Several
completions' gradients are taken at once where the model and memory allow it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from policygrad.core import masked
from policygrad.core.batch import Batch
from policygrad.errors import ConfigError
from policygrad.learners.config import LearnerConfig
from policygrad.learners.local.forward import MAX_LOGITS, Evaluator, selected_logp
from policygrad.learners.local.packing import Pack, TokenSequences, WorkDivision, micro_batch_tokens, pack_micro_batches
from policygrad.models.loading import at_least_float32
from policygrad.models.replica import PlainAttention

Norms = Iterator[tuple[Tensor, Tensor]]
"""(completions [b], their squared norms [b])."""


@dataclass(frozen=True, eq=False)
class ScoreNorms:
    """Fills `Batch.grad_logp_sq_norm`. Memory: gradients of at most `forward.CHUNK` elements, or those of one completion."""

    evaluator: Evaluator
    parameters: Mapping[str, nn.Parameter]
    """θ, by name."""
    micro_tokens: int
    batched: bool
    """Gradients of several completions in one pass; measured when built, not assumed."""
    division: WorkDivision = field(default_factory=WorkDivision)

    @classmethod
    def of(cls, evaluator: Evaluator, config: LearnerConfig) -> ScoreNorms:
        """For the model of `evaluator`.

        Raises:
            ConfigError: `learner.score_parameters` matches no parameter that trains.
        """
        chosen = select_parameters(evaluator.model, config.score_parameters)
        plain = cls(evaluator, chosen, micro_batch_tokens(config, evaluator.model), batched=False)
        fast = replace(plain, batched=True)
        return fast if not config.gradient_checkpointing and _norms_agree(plain, fast) else plain

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Batch:
        """The batch with `score_norm` [B]: equal completions of one prompt once, 0 where nothing was sampled."""
        zeros = torch.zeros(len(batch.mask))  # rewards are no part of a score
        bare = Batch(
            mask=batch.mask,
            group=batch.group,
            reward=zeros,
            tokens=batch.tokens,
            prompts=batch.prompts,
            positions=batch.positions,
        )
        rows, representative = _find_distinct(bare)
        out = torch.zeros(len(batch.mask), dtype=torch.float64)
        for where, norms in self._norms(bare, rows):
            out[where] = norms.cpu().double()
        return replace(batch, grad_logp_sq_norm=self.division.all_reduce(out)[representative])

    def _norms(self, batch: Batch, rows: Tensor) -> Norms:
        logits = batch.mask.shape[1] * self.evaluator.network.vocabulary
        each = max(sum(p.numel() for p in self.parameters.values()), logits)
        size = MAX_LOGITS // each if self.batched and batch.positions is None else 1  # there each is one text
        return self._batched_norms(batch, rows, size) if size > 1 else self._sequential_norms(batch, rows)

    def _sequential_norms(self, batch: Batch, rows: Tensor) -> Norms:
        device = next(self.evaluator.model.parameters()).device
        for part in pack_singly(batch, rows):
            with torch.enable_grad():
                logp = self.evaluator(part.to(device)).sum()
            score = torch.autograd.grad(logp, list(self.parameters.values()), allow_unused=True)
            yield part.rows, _squared_norm(score)[None]

    def _batched_norms(self, batch: Batch, rows: Tensor, size: int) -> Norms:
        log_pi = _LogPi(self.evaluator)
        theta = {f"model.{name}": p.detach() for name, p in self.parameters.items()}
        device = next(self.evaluator.model.parameters()).device

        def norm(*completion: Tensor) -> Tensor:
            def logp(values: dict[str, Tensor]) -> Tensor:
                return functional_call(log_pi, values, completion)  # type: ignore[no-any-return]

            return _squared_norm(grad(logp)(theta).values())

        for where in _batch_by_length(batch, rows, min(size, max(1, self.micro_tokens // batch.mask.shape[1]))):
            with PlainAttention():
                norms = vmap(norm)(*(column.to(device) for column in _columns(batch, where)))
            yield where, norms


class _LogPi(nn.Module):
    """log π(o) [] of one completion in operations of fixed shape. It stands at the start of its row: no token of a causal model
    sees the padding behind it, so there is no mask."""

    def __init__(self, evaluator: Evaluator) -> None:
        super().__init__()
        self.evaluator, self.model = evaluator, evaluator.model

    def forward(self, ids: Tensor, where: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
        """ids [L], and the positions [T] that predict the tokens [T] that the mask [T] says were sampled."""
        # One mask for all completions (`new_ones` would make one for each): without any, some models look for padding in the ids.
        everything = torch.ones(1, len(ids), dtype=torch.int64, device=ids.device)
        network = self.evaluator.network
        logits = network.logits(network.states_at(where, {"input_ids": ids[None], "attention_mask": everything}))
        return masked.apply_mask(selected_logp(logits, tokens, self.evaluator.temperature), mask).sum()


def _columns(batch: Batch, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """ids [b, L], where [b, T], tokens [b, T], mask [b, T] of completions, each at the start of a row of its own."""
    assert batch.tokens is not None
    texts, mask, t = TokenSequences.of(batch, rows), batch.mask[rows], torch.arange(batch.mask.shape[1])
    ids = (torch.from_numpy(texts.ids.astype(np.int64)) - 1).clamp(min=0)
    where = torch.from_numpy(texts.offsets)[:, None] - 1 + t
    return ids, masked.apply_mask(where, mask), masked.apply_mask(batch.tokens[rows], mask), mask


def _batch_by_length(batch: Batch, rows: Tensor, size: int) -> Iterator[Tensor]:
    """Completions of about equal length together, `size` at a time."""
    order = np.argsort(TokenSequences.of(batch, rows).lengths, kind="stable")
    return iter(torch.split(rows[torch.from_numpy(order)], size))


def pack_singly(batch: Batch, rows: Tensor) -> Iterator[Pack]:
    """Each completion in a micro-batch of its own, also where two have read the same."""
    return pack_micro_batches(batch, rows, 0)


def _find_distinct(batch: Batch) -> tuple[Tensor, Tensor]:
    """([n] one completion of each text and mask, [B] which stands for each; one without a sampled token for itself, and each where
    some are several texts)."""
    rows = batch.mask.any(1).nonzero().squeeze(1)
    representative, seen = torch.arange(len(batch.mask)), dict[bytes, int]()
    if batch.positions is not None:
        return rows, representative
    columns = _columns(batch, rows)
    size = TokenSequences.of(batch, rows).offsets
    for i, row in enumerate(rows.tolist()):
        key = b"".join(c[i].numpy().tobytes() for c in columns) + bytes(str(size[i]), "ascii")
        representative[row] = seen.setdefault(key, row)
    return torch.tensor(list(seen.values()), dtype=torch.int64), representative


def _squared_norm(gradients: Any) -> Tensor:
    """Σ g² [] over the tensors that are there, in float32 or better."""
    return torch.stack([at_least_float32(g).square().sum() for g in gradients if g is not None]).sum()


def select_parameters(model: nn.Module, pattern: str) -> dict[str, nn.Parameter]:
    """The parameters that train and whose name the regular expression `pattern` is found in.

    Raises:
        ConfigError: there is none; some names are in the message.
    """
    names = {name: p for name, p in model.named_parameters() if p.requires_grad}
    selected = {name: p for name, p in names.items() if re.search(pattern, name)}
    if not selected:
        all_names = list(names)
        some = dict.fromkeys([all_names[0], all_names[len(all_names) // 2], all_names[-1]]) if all_names else {}
        raise ConfigError(
            f"learner.score_parameters {pattern!r} is found in the name of no parameter that trains. Names here: "
            f"{', '.join(some)} (a head tied to the embeddings goes by their name); empty = all of them"
        )
    return selected


def _norms_agree(plain: ScoreNorms, fast: ScoreNorms) -> bool:
    """Whether both ways give the norms of a small made-up group, ragged so that there is padding."""
    vocabulary = plain.evaluator.network.vocabulary
    generator = torch.Generator().manual_seed(0)
    batch = Batch(
        mask=torch.arange(5) < torch.tensor([5, 2, 4])[:, None],
        group=torch.tensor([0, 0, 1]),
        reward=torch.zeros(3),
        tokens=torch.randint(vocabulary, (3, 5), generator=generator),
        prompts=tuple(torch.randint(vocabulary, (n,), generator=generator) for n in (4, 2)),
    )
    truth = plain.evaluate(batch).grad_logp_sq_norm
    assert truth is not None
    tolerance = 0.05 if next(plain.evaluator.model.parameters()).dtype == torch.bfloat16 else 1e-3
    try:
        tried = fast.evaluate(batch).grad_logp_sq_norm
    except Exception:  # whatever an architecture says to a transform it does not take: the plain way remains
        return False
    return tried is not None and torch.allclose(tried, truth, rtol=tolerance, atol=0)
