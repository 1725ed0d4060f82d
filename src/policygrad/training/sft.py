"""Supervised fine-tuning: −log π of the demonstrations' answers, a mean over the tokens of the whole update."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Unpack

import torch
from torch import Tensor, nn

from policygrad.core.batch import Batch
from policygrad.errors import ModelError
from policygrad.learners.local.forward import differentiating, without_effect
from policygrad.learners.local.packing import Pack, micro_tokens, pack
from policygrad.models.loading import at_least_float32, load_model
from policygrad.models.tokenizer import Tokenizer, load_tokenizer, shown_ids
from policygrad.tasks.preferences import Demonstration, read_demonstrations, split_rows, without
from policygrad.trackers import change
from policygrad.training.base_trainer import Followers, Result
from policygrad.training.config.supervised import SFTConfig
from policygrad.training.setup import pick_device, row_reading
from policygrad.training.supervised import Learner, Numbers, Share, device_of, supervise

PORTION = 64
"""Rows measured at a time, so that progress shows."""


def train_sft(
    config: SFTConfig | None = None,
    *,
    resume: str | Path | None = None,
    stop_after: int | None = None,
    stop_before: str | None = None,
    overwrite: bool = False,
    **followers: Unpack[Followers],
) -> Result[Numbers | None]:
    """Fine-tunes a causal language model on demonstrations, or goes on with the run in the folder `resume`.

    stop_after: stop, resumably, after so many steps of this call; stop_before: before so much time (23h50m) has passed.
    overwrite: begin anew in an output folder that holds a run, which is deleted once the new one begins. followers: `Lifecycle`.

    Raises:
        PolicygradError: what cannot be trained, with the way out.
    """
    return supervise(
        FineTuning,
        SFTConfig,
        config,
        resume=resume,
        stop_after=stop_after,
        stop_before=stop_before,
        overwrite=overwrite,
        **followers,
    )


sft = train_sft
"""The command's name."""


@dataclass(frozen=True, eq=False)
class Row:
    """A demonstration as token ids."""

    prompt: Tensor
    """[P]."""
    tokens: Tensor
    """[n] what follows."""
    learnt: Tensor
    """[n] bool; True where the assistant speaks, its end tokens included."""


class FineTuning:
    """L = −Σ log π(o_t) / (number of o_t), over the tokens that the assistant is to say, of the whole update."""

    causal = True

    def __init__(self, config: SFTConfig) -> None:
        how = row_reading(config.map, config.skip_bad_rows)
        rows = read_demonstrations(config.data, how)
        others = read_demonstrations(config.held_out, how) if config.held_out else []
        kept = without(rows, others, config.data, str(config.held_out)) if others else rows
        self.model: nn.Module = load_model(
            config.model,
            dtype=config.learner.dtype,
            device=pick_device(config.learner.device),
            trust_remote_code=config.trust_remote_code,
            lora=config.learner.adapters,
            seed=config.seed,
        )
        self.tokenizer = load_tokenizer(config.model, self.model, trust_remote_code=config.trust_remote_code)
        self.rows = [tokenise(row, self.tokenizer) for row in [*kept, *others]]
        split = None if others else split_rows(kept)
        self.units: list[tuple[int, ...]] = [(i,) for i in (split.train if split else range(len(kept)))]
        self.held_out = list(split.held_out) if split else list(range(len(kept), len(self.rows)))
        self.facts: dict[str, str] = {
            "held out": held_out_words(len(self.held_out), split is not None and split.held_out_is_train)
        }
        if len(kept) < len(rows):
            self.facts["left out"] = f"{len(rows) - len(kept)} rows, the held-out file has their prompts"

    def accumulate(self, learner: Learner, rows: Sequence[int]) -> dict[str, float]:
        """One update's gradient; {"loss": nats per token, "tokens": how many}."""
        batch = to_batch([self.rows[i] for i in rows])
        return {"loss": learner.do(gradient, batch), "tokens": float(batch.mask.sum())}

    def measure(self, learner: Learner, progress: Callable[[int, int], None]) -> dict[str, float]:
        """Held-out loss in nats per token, and the perplexity exp(loss)."""
        total, tokens = 0.0, 0
        for start in range(0, len(self.held_out), PORTION):
            some = self.held_out[start : start + PORTION]
            batch = to_batch([self.rows[i] for i in some])
            total -= learner.do(log_likelihood, batch)
            tokens += int(batch.mask.sum())
            progress(min(start + PORTION, len(self.held_out)), len(self.held_out))
        loss = total / tokens
        return {
            "held_out/loss": loss,
            "held_out/perplexity": math.exp(min(loss, 700.0)),
            "held_out/tokens": float(tokens),
        }

    def summary(self, before: Numbers, after: Numbers) -> dict[str, str]:
        """The held-out loss and perplexity, before and after."""
        return {
            "held-out loss": change(before["held_out/loss"], after["held_out/loss"], 3) + " nats per token",
            "perplexity": change(before["held_out/perplexity"], after["held_out/perplexity"]),
        }


def gradient(share: Share, batch: Batch) -> float:
    """Adds −∂/∂θ Σ log π(o_t) / n, of the n tokens of an update, to the gradients; the loss, in nats per token."""
    total, loss = float(batch.mask.sum()), 0.0
    kind = at_least_float32(next(share.model.parameters())[:0].detach()).dtype
    for part in _parts(share, batch):
        with differentiating(share.model, share.config.gradient_checkpointing):
            part = part.to(device_of(share))
            mine = -share.evaluator(part, expected=part.mask.to(kind) / -total).sum() / total
            torch.autograd.backward(mine)
        share.optimizer.collect()
        loss += float(mine.detach())
    return float(share.division.summed(torch.tensor(loss, dtype=torch.float64)))


@torch.no_grad()
def log_likelihood(share: Share, batch: Batch) -> float:
    """Σ log π(o_t), in nats."""
    found = 0.0
    for part in _parts(share, batch):
        found += float(share.evaluator(part.to(device_of(share))).double().sum())
    return float(share.division.summed(torch.tensor(found, dtype=torch.float64)))


def _parts(share: Share, batch: Batch) -> Iterator[Pack]:
    """This process's micro-batches."""

    def idle(part: Pack) -> None:
        with differentiating(share.model, share.config.gradient_checkpointing):
            without_effect(share.evaluator(part.to(device_of(share))))
        share.optimizer.collect()

    made = partial(pack, batch, torch.arange(len(batch.mask)))
    return share.division.packs(made, micro_tokens(share.config, share.model), idle)


def held_out_words(count: int, is_train: bool) -> str:
    """What the held-out rows are, for the display."""
    return "too few prompts to hold any out: measured on the training rows" if is_train else f"{count} rows"


def to_batch(rows: Sequence[Row]) -> Batch:
    """Demonstrations as completions of their prompts; what the assistant does not say is like a tool's output, unlearnt."""
    width = max(len(row.tokens) for row in rows)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    tokens = torch.zeros(len(rows), width, dtype=torch.int64)
    for i, row in enumerate(rows):
        mask[i, : len(row.tokens)], tokens[i, : len(row.tokens)] = row.learnt, row.tokens
    return Batch(
        mask=mask,
        group=torch.arange(len(rows)),
        reward=torch.zeros(len(rows)),
        tokens=tokens,
        prompts=tuple(row.prompt for row in rows),
    )


def tokenise(row: Demonstration, tokenizer: Tokenizer) -> Row:
    """Token ids exactly as in sampling: the prompt's own, then the answer's, closed by an end token.

    Raises:
        ModelError: text whose prompt is no prefix of the whole in token ids; a template that changes earlier turns or does not
            close the assistant's; more tokens than the model reads.
    """
    prompt = tokenizer.encode(row.prompt, 0, row.source)
    whole, learnt = shown_ids(tokenizer, prompt.tolist(), row.prompt, row.rest, row.source)
    if tokenizer.context is not None and len(whole) > tokenizer.context:
        raise ModelError(
            f"{row.source}: {len(whole)} tokens, more than the {tokenizer.context} positions of "
            f"{tokenizer.name!r}: shorten it, or leave the line out"
        )
    size = len(prompt)
    return Row(prompt, torch.tensor(whole[size:], dtype=torch.int64), torch.tensor(learnt[size:], dtype=torch.bool))
