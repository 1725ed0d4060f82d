"""Exact ‖∇_θ log π_θ(o)‖² of every completion, by which the variance-minimising baseline weights rewards.

The score is that of the sampled tokens at the sampling temperature, over the trained parameters or a chosen part of them. It
costs a forward and a backward pass per distinct completion, with no prompt shared: several times an update on a model of 0.7M
parameters. Choosing late parameters (`learner.score_parameters`) shortens the backward pass. Gradients of several completions are
computed at once where model and memory allow it.
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
from policygrad.learners.local.packing import TokenSequences, WorkDivision, micro_batch_tokens, pack_micro_batches
from policygrad.models.loading import at_least_float32
from policygrad.models.replica import PlainAttention
from policygrad.utils.out_of_memory import is_out_of_memory

Norms = Iterator[tuple[Tensor, Tensor]]  # (completions [b], their squared norms [b])


@dataclass(frozen=True, eq=False)
class ScoreNorms:
    """Fills `Batch.grad_logp_sq_norm`. Memory: gradients of at most `forward.MAX_LOGITS` elements, or those of one completion."""

    evaluator: Evaluator
    parameters: Mapping[str, nn.Parameter]  # θ, by name
    micro_tokens: int
    batched: bool  # compute several completions in one pass
    division: WorkDivision = field(default_factory=WorkDivision)

    @classmethod
    def of(cls, evaluator: Evaluator, config: LearnerConfig) -> ScoreNorms:
        """Make it for the evaluator's model, batched if that gives the same norms on a small synthetic group.

        Raises:
            ConfigError: `learner.score_parameters` matches no trained parameter.
        """
        parameters = select_parameters(evaluator.model, config.score_parameters)
        plain = cls(evaluator, parameters, micro_batch_tokens(config, evaluator.model), batched=False)
        if config.gradient_checkpointing:
            return plain
        vocabulary, generator = evaluator.network.vocabulary, torch.Generator().manual_seed(0)
        batch = Batch(
            mask=torch.arange(5) < torch.tensor([5, 2, 4])[:, None],  # ragged, so that there is padding
            group=torch.tensor([0, 0, 1]),
            reward=torch.zeros(3),
            tokens=torch.randint(vocabulary, (3, 5), generator=generator),
            prompts=tuple(torch.randint(vocabulary, (n,), generator=generator) for n in (4, 2)),
        )
        truth = plain.evaluate(batch).grad_logp_sq_norm
        assert truth is not None
        tolerance = 0.05 if next(evaluator.model.parameters()).dtype == torch.bfloat16 else 1e-3
        batched = replace(plain, batched=True)
        try:
            norms = batched.evaluate(batch).grad_logp_sq_norm
        except Exception as error:  # architectures raise all kinds of errors in a transform that they do not support
            if is_out_of_memory(error):
                raise
            return plain
        return batched if norms is not None and torch.allclose(norms, truth, rtol=tolerance, atol=0) else plain

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Batch:
        """Return the batch with `grad_logp_sq_norm` [B]: equal completions of one prompt once, 0 where nothing was sampled."""
        # One completion of each text and mask represents its equals; all represent themselves if some are several texts.
        rows = batch.mask.any(1).nonzero().squeeze(1)
        representative, seen = torch.arange(len(batch.mask)), dict[bytes, int]()
        if batch.positions is None:
            columns, size = _columns(batch, rows), TokenSequences.of(batch, rows).offsets
            for i, row in enumerate(rows.tolist()):
                key = b"".join(c[i].numpy().tobytes() for c in columns) + bytes(str(size[i]), "ascii")
                key += "".join(m.digest for m in batch.media_of(row)).encode()
                representative[row] = seen.setdefault(key, row)
            rows = torch.tensor(list(seen.values()), dtype=torch.int64)
        # without what the score does not depend on, such as routed experts
        bare = Batch(
            mask=batch.mask, group=batch.group, reward=batch.reward, tokens=batch.tokens, prompts=batch.prompts
        )
        bare = replace(
            bare,
            positions=batch.positions,
            prompt_media=batch.prompt_media,
            completion_media=batch.completion_media,
        )
        out = torch.zeros(len(batch.mask), dtype=torch.float64)

        def work() -> None:
            for where, norms in self._norms(bare, rows):
                out[where] = norms.cpu().double()

        self.division.memory.run(work)
        return replace(batch, grad_logp_sq_norm=self.division.all_reduce(out)[representative])

    def _norms(self, batch: Batch, rows: Tensor) -> Norms:
        logits = batch.mask.shape[1] * self.evaluator.network.vocabulary
        each = max(sum(p.numel() for p in self.parameters.values()), logits)
        is_plain = batch.positions is None and not batch.has_media  # each is one text of tokens alone
        size = MAX_LOGITS // each if self.batched and is_plain else 1
        device = next(self.evaluator.model.parameters()).device
        if size <= 1:
            for part in pack_micro_batches(batch, rows, 0):  # each by itself, equal ones too
                self.division.memory.begin(part.num_nodes, 1)
                with torch.enable_grad():
                    logp = self.evaluator(part.to(device)).sum()
                score = torch.autograd.grad(logp, list(self.parameters.values()), allow_unused=True)
                yield part.rows, _squared_norm(score)[None]
            return
        log_pi = _LogPi(self.evaluator)
        theta = {f"model.{name}": p.detach() for name, p in self.parameters.items()}

        def norm(*completion: Tensor) -> Tensor:
            def completion_logp(values: dict[str, Tensor]) -> Tensor:
                return functional_call(log_pi, values, completion)  # type: ignore[no-any-return]

            return _squared_norm(grad(completion_logp)(theta).values())

        size = min(size, max(1, self.division.memory.cap(self.micro_tokens) // batch.mask.shape[1]))
        order = np.argsort(TokenSequences.of(batch, rows).lengths, kind="stable")  # batches of similar length
        for where in torch.split(rows[torch.from_numpy(order)], size):
            self.division.memory.begin(len(where) * batch.mask.shape[1], len(where))
            with PlainAttention():
                norms = vmap(norm)(*(column.to(device) for column in _columns(batch, where)))
            yield where, norms


class _LogPi(nn.Module):
    """log π(o) [] of one completion in operations of fixed shape.

    The text is at the start of its row, so causal attention does not see the padding and needs no mask.
    """

    def __init__(self, evaluator: Evaluator) -> None:
        super().__init__()
        self.evaluator, self.model = evaluator, evaluator.model

    def forward(self, ids: Tensor, where: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
        """Return log π of the `tokens` [T] in the `mask` [T], predicted at the positions `where` [T] of `ids` [L]."""
        # All ones, since without a mask some models look for padding ids; `new_ones` would make one per completion.
        attention_mask = torch.ones(1, len(ids), dtype=torch.int64, device=ids.device)
        network = self.evaluator.network
        logits = network.logits(network.states_at(where, {"input_ids": ids[None], "attention_mask": attention_mask}))
        return masked.apply_mask(selected_logp(logits, tokens, self.evaluator.temperature), mask).sum()


def _columns(batch: Batch, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return ids [b, L], positions [b, T], tokens [b, T] and mask [b, T] of completions, each at the start of its row."""
    assert batch.tokens is not None
    texts, mask, t = TokenSequences.of(batch, rows), batch.mask[rows], torch.arange(batch.mask.shape[1])
    ids = (torch.from_numpy(texts.ids.astype(np.int64)) - 1).clamp(min=0)
    where = torch.from_numpy(texts.offsets)[:, None] - 1 + t
    return ids, masked.apply_mask(where, mask), masked.apply_mask(batch.tokens[rows], mask), mask


def _squared_norm(gradients: Any) -> Tensor:
    """Return Σ g² [] over the gradients that are not None, in float32 or better."""
    return torch.stack([at_least_float32(g).square().sum() for g in gradients if g is not None]).sum()


def select_parameters(model: nn.Module, pattern: str) -> dict[str, nn.Parameter]:
    """Return the trained parameters whose name the regular expression matches. Raises ConfigError if there is none."""
    names = {name: p for name, p in model.named_parameters() if p.requires_grad}
    selected = {name: p for name, p in names.items() if re.search(pattern, name)}
    if not selected:
        all_names = list(names)
        examples = dict.fromkeys([all_names[0], all_names[len(names) // 2], all_names[-1]]) if names else {}
        raise ConfigError(
            f"learner.score_parameters={pattern!r} matches no trained parameter, such as {', '.join(examples)} (a head tied to the "
            "embeddings has their name); empty = all of them"
        )
    return selected
