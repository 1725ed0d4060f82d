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
from policygrad.learners.local.forward import backward_mode, backward_zero
from policygrad.learners.local.packing import Pack, micro_batch_tokens, pack_micro_batches
from policygrad.models.loading import at_least_float32, load_model
from policygrad.models.tokenizer import Tokenizer, encode_demonstration, load_tokenizer
from policygrad.tasks.preferences import Demonstration, exclude_eval_prompts, read_demonstrations, split_by_prompt
from policygrad.trackers import format_change
from policygrad.training.base_trainer import TrackingOptions, TrainingResult
from policygrad.training.config.supervised import SFTConfig
from policygrad.training.setup import load_row_options, pick_device
from policygrad.training.supervised import LearnerShard, Numbers, SupervisedLearner, get_device, train_supervised

EVAL_CHUNK = 64
"""Rows measured at a time, so that progress shows."""


def train_sft(
    config: SFTConfig | None = None,
    *,
    resume: str | Path | None = None,
    stop_after: int | None = None,
    time_limit: str | None = None,
    overwrite: bool = False,
    **followers: Unpack[TrackingOptions],
) -> TrainingResult[Numbers | None]:
    """Fine-tunes a causal language model on demonstrations, or goes on with the run in the folder `resume`.

    stop_after: stop, resumably, after so many steps of this call; stop_before: before so much time (23h50m) has passed.
    overwrite: begin anew in an output folder that holds a run, which is deleted once the new one begins. followers: `BaseTrainer`.

    Raises:
        PolicygradError: what cannot be trained, with the way out.
    """
    return train_supervised(
        SFTObjective,
        SFTConfig,
        config,
        resume=resume,
        stop_after=stop_after,
        time_limit=time_limit,
        overwrite=overwrite,
        **followers,
    )


sft = train_sft
"""The command's name."""


@dataclass(frozen=True, eq=False)
class SFTExample:
    """A demonstration as token ids."""

    prompt_ids: Tensor
    """[P]."""
    tokens: Tensor
    """[n] what follows."""
    loss_mask: Tensor
    """[n] bool; True where the assistant speaks, its end tokens included."""


class SFTObjective:
    """L = −Σ log π(o_t) / (number of o_t), over the tokens that the assistant is to say, of the whole update."""

    causal = True

    def __init__(self, config: SFTConfig) -> None:
        how = load_row_options(config.row_map, config.skip_bad_rows)
        rows = read_demonstrations(config.data, how)
        others = read_demonstrations(config.eval_data, how) if config.eval_data else []
        kept = exclude_eval_prompts(rows, others, config.data, str(config.eval_data)) if others else rows
        self.model: nn.Module = load_model(
            config.model,
            dtype=config.learner.dtype,
            device=pick_device(config.learner.device),
            trust_remote_code=config.trust_remote_code,
            lora=config.learner.adapters,
            seed=config.seed,
        )
        self.tokenizer = load_tokenizer(config.model, self.model, trust_remote_code=config.trust_remote_code)
        self.rows = [tokenise_demonstration(row, self.tokenizer) for row in [*kept, *others]]
        split = None if others else split_by_prompt(kept)
        self.units: list[tuple[int, ...]] = [(i,) for i in (split.train if split else range(len(kept)))]
        self.eval_rows = list(split.eval) if split else list(range(len(kept), len(self.rows)))
        self.run_facts: dict[str, str] = {
            "held out": describe_eval_split(len(self.eval_rows), split is not None and split.eval_on_train)
        }
        if len(kept) < len(rows):
            self.run_facts["left out"] = f"{len(rows) - len(kept)} rows, the held-out file has their prompts"

    def accumulate(self, learner: SupervisedLearner, rows: Sequence[int]) -> dict[str, float]:
        """One update's gradient; {"loss": nats per token, "tokens": how many}."""
        batch = build_sft_batch([self.rows[i] for i in rows])
        return {"loss": learner.run_on_all(accumulate_sft_gradient, batch), "tokens": float(batch.mask.sum())}

    def evaluate(self, learner: SupervisedLearner, progress: Callable[[int, int], None]) -> dict[str, float]:
        """Held-out loss in nats per token, and the perplexity exp(loss)."""
        total, tokens = 0.0, 0
        for start in range(0, len(self.eval_rows), EVAL_CHUNK):
            some = self.eval_rows[start : start + EVAL_CHUNK]
            batch = build_sft_batch([self.rows[i] for i in some])
            total -= learner.run_on_all(sum_log_likelihood, batch)
            tokens += int(batch.mask.sum())
            progress(min(start + EVAL_CHUNK, len(self.eval_rows)), len(self.eval_rows))
        loss = total / tokens
        return {
            "eval/loss": loss,
            "eval/perplexity": math.exp(min(loss, 700.0)),
            "eval/tokens": float(tokens),
        }

    def summarise(self, before: Numbers, after: Numbers) -> dict[str, str]:
        """The held-out loss and perplexity, before and after."""
        return {
            "held-out loss": format_change(before["eval/loss"], after["eval/loss"], 3) + " nats per token",
            "perplexity": format_change(before["eval/perplexity"], after["eval/perplexity"]),
        }


def accumulate_sft_gradient(share: LearnerShard, batch: Batch) -> float:
    """Adds −∂/∂θ Σ log π(o_t) / n, of the n tokens of an update, to the gradients; the loss, in nats per token."""
    total, loss = float(batch.mask.sum()), 0.0
    kind = at_least_float32(next(share.model.parameters())[:0].detach()).dtype
    for part in _parts(share, batch):
        with backward_mode(share.model, share.config.gradient_checkpointing):
            part = part.to(get_device(share))
            mine = -share.evaluator(part, expected=part.mask.to(kind) / -total).sum() / total
            torch.autograd.backward(mine)
        share.optimizer.accumulate_master_grads()
        loss += float(mine.detach())
    return float(share.division.all_reduce(torch.tensor(loss, dtype=torch.float64)))


@torch.no_grad()
def sum_log_likelihood(share: LearnerShard, batch: Batch) -> float:
    """Σ log π(o_t), in nats."""
    found = 0.0
    for part in _parts(share, batch):
        found += float(share.evaluator(part.to(get_device(share))).double().sum())
    return float(share.division.all_reduce(torch.tensor(found, dtype=torch.float64)))


def _parts(share: LearnerShard, batch: Batch) -> Iterator[Pack]:
    """This process's micro-batches."""

    def idle(part: Pack) -> None:
        with backward_mode(share.model, share.config.gradient_checkpointing):
            backward_zero(share.evaluator(part.to(get_device(share))))
        share.optimizer.accumulate_master_grads()

    made = partial(pack_micro_batches, batch, torch.arange(len(batch.mask)))
    return share.division.divide(made, micro_batch_tokens(share.config, share.model), idle)


def describe_eval_split(count: int, is_train: bool) -> str:
    """What the held-out rows are, for the display."""
    return "too few prompts to hold any out: measured on the training rows" if is_train else f"{count} rows"


def build_sft_batch(rows: Sequence[SFTExample]) -> Batch:
    """Demonstrations as completions of their prompts; what the assistant does not say is like a tool's output, unlearnt."""
    width = max(len(row.tokens) for row in rows)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    tokens = torch.zeros(len(rows), width, dtype=torch.int64)
    for i, row in enumerate(rows):
        mask[i, : len(row.tokens)], tokens[i, : len(row.tokens)] = row.loss_mask, row.tokens
    return Batch(
        mask=mask,
        group=torch.arange(len(rows)),
        reward=torch.zeros(len(rows)),
        tokens=tokens,
        prompts=tuple(row.prompt_ids for row in rows),
    )


def tokenise_demonstration(row: Demonstration, tokenizer: Tokenizer) -> SFTExample:
    """Token ids exactly as in sampling: the prompt's own, then the answer's, closed by an end token.

    Raises:
        ModelError: text whose prompt is no prefix of the whole in token ids; a template that changes earlier turns or does not
            close the assistant's; more tokens than the model reads.
    """
    prompt = tokenizer.encode(row.prompt, 0, row.source)
    whole, learnt = encode_demonstration(tokenizer, prompt.tolist(), row.prompt, row.completion, row.source)
    if tokenizer.context_length is not None and len(whole) > tokenizer.context_length:
        raise ModelError(
            f"{row.source}: {len(whole)} tokens, more than the {tokenizer.context_length} positions of "
            f"{tokenizer.name!r}: shorten it, or leave the line out"
        )
    size = len(prompt)
    return SFTExample(
        prompt, torch.tensor(whole[size:], dtype=torch.int64), torch.tensor(learnt[size:], dtype=torch.bool)
    )
