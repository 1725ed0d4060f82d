"""Supervised fine-tuning: −log π of the assistant's tokens in demonstrations, averaged over all such tokens of an update."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Unpack

import torch
from torch import Tensor, nn

from policygrad.core.batch import Batch
from policygrad.core.media import TextMedia, select_media
from policygrad.core.precision import widest_dtype
from policygrad.learners.local.expert_balance import ExpertBalance, Load, find_expert_balance
from policygrad.learners.local.forward import backward_mode, backward_zero
from policygrad.learners.local.networks import reads_segments
from policygrad.learners.local.packing import Pack
from policygrad.models.chat.demonstrations import encode_demonstration_texts
from policygrad.models.loading import at_least_float32, load_model
from policygrad.models.tokenizer import PromptTooLongError, Tokenizer, load_tokenizer
from policygrad.tasks.preferences import Demonstration, read_demonstrations
from policygrad.trackers import format_change
from policygrad.training.base_trainer import TrackingOptions, TrainingResult
from policygrad.training.config.supervised import SFTConfig
from policygrad.training.supervised import (
    LearnerShard,
    MetricValues,
    SupervisedLearner,
    SupervisedTrainer,
    encode_rows,
    get_device,
    load_resumed_config,
    read_rows,
    run_passes,
)
from policygrad.utils.devices import pick_device
from policygrad.utils.message_parts import list_pictures

EVAL_CHUNK = 64  # rows evaluated at a time, so that progress shows


def train_sft(
    config: SFTConfig | None = None,
    *,
    resume: str | Path | None = None,
    stop_after: int | None = None,
    time_limit: str | None = None,
    overwrite: bool = False,
    **tracking: Unpack[TrackingOptions],
) -> TrainingResult[MetricValues | None]:
    """Fine-tune a causal language model on demonstrations, or resume the run in the folder `resume`. The other
    arguments are those of `train`.

    Raises:
        PolicygradError: The run cannot be trained; the message says what to change.
    """
    trainer = SupervisedTrainer(config or load_resumed_config(SFTConfig, resume), SFTObjective, **tracking)
    return trainer.train(resume=resume, stop_after=stop_after, time_limit=time_limit, overwrite=overwrite)


@dataclass(frozen=True, eq=False)
class SFTExample:
    """A demonstration as token ids."""

    prompt_ids: Tensor  # [P]
    tokens: Tensor  # [n] what follows the prompt
    loss_mask: Tensor  # [n] bool; True for the assistant's tokens, its end tokens included
    load_media: Callable[[], TextMedia] = tuple
    """Processes the pictures of both; their inputs would fill the memory if all were kept."""


class SFTObjective:
    """L = −Σ log π(o_t) / (number of o_t), over the assistant's tokens o_t of the whole update."""

    causal = True

    def __init__(self, config: SFTConfig) -> None:
        rows, split, facts = read_rows(config, read_demonstrations, "rows")
        self.model: nn.Module = load_model(
            config.model,
            dtype=config.learner.dtype,
            device=pick_device(config.learner.device),
            trust_remote_code=config.trust_remote_code,
            lora=config.learner.adapters,
            seed=config.seed,
        )
        loaded = load_tokenizer(config.model, self.model, trust_remote_code=config.trust_remote_code)
        self.tokenizer = loaded.with_template_options(config.template_options)
        encode = partial(tokenise_demonstration, tokenizer=self.tokenizer)
        _, encodings, split, self.run_facts = encode_rows(config, rows, split, facts, encode)
        self.rows = [text for texts in encodings for text in texts]
        ends = [0, *accumulate(map(len, encodings))]
        numbers = [tuple(range(a, b)) for a, b in pairwise(ends)]  # of each conversation's texts
        if len(self.rows) > len(encodings):
            reason = "the chat template shows earlier turns otherwise later"
            self.run_facts = self.run_facts | {"texts": f"{len(self.rows)} of {len(encodings)} conversations: {reason}"}
        self.units: list[tuple[int, ...]] = [numbers[i] for i in split.train]
        self.eval_rows = [text for i in split.eval for text in numbers[i]]

    def accumulate(self, learner: SupervisedLearner, rows: Sequence[int]) -> dict[str, float]:
        """Add one update's gradient; return {"loss": nats per token, "tokens": their number}, and "router_aux_loss" where a mixture
        of experts asks for it."""
        batch = build_sft_batch([self.rows[i] for i in rows])
        return learner.run_on_all(accumulate_sft_gradient, batch) | {"tokens": float(batch.mask.sum())}

    def evaluate(self, learner: SupervisedLearner, progress: Callable[[int, int], None]) -> dict[str, float]:
        """Return the held-out loss in nats per token, and the perplexity exp(loss)."""
        total, tokens = 0.0, 0
        for start in range(0, len(self.eval_rows), EVAL_CHUNK):
            chunk = self.eval_rows[start : start + EVAL_CHUNK]
            batch = build_sft_batch([self.rows[i] for i in chunk])
            total -= learner.run_on_all(sum_log_likelihood, batch)
            tokens += int(batch.mask.sum())
            progress(start + len(chunk), len(self.eval_rows))
        loss = total / tokens
        return {"eval/loss": loss, "eval/perplexity": math.exp(min(loss, 700.0)), "eval/tokens": float(tokens)}

    def summarise(self, before: MetricValues, after: MetricValues) -> dict[str, str]:
        return {
            "held-out loss": format_change(before["eval/loss"], after["eval/loss"], 3) + " nats per token",
            "perplexity": format_change(before["eval/perplexity"], after["eval/perplexity"]),
        }


def accumulate_sft_gradient(shard: LearnerShard, batch: Batch) -> dict[str, float]:
    """Add −∂/∂θ Σ log π(o_t) / n, for the n tokens of an update, to the gradients, and the load-balancing loss of experts where the
    model asks for it; return the loss in nats per token."""
    balance = find_expert_balance(shard.evaluator, shard.config, shard.division)
    load = None
    if balance is not None:
        load = run_passes(shard, lambda: balance.measure(shard.evaluator, _micro_batches(shard, batch)))
    loss, balance_loss = run_passes(shard, lambda: _run_micro_batches(shard, batch, balance, load))
    mean = float(shard.division.all_reduce(torch.tensor(loss, dtype=torch.float64)))
    reported = {} if balance is None else balance.report(balance_loss)
    return {"loss": mean} | {name: metric.value for name, metric in reported.items()}


def _run_micro_batches(
    shard: LearnerShard, batch: Batch, balance: ExpertBalance | None, load: Load | None
) -> tuple[float, float]:
    """Add the gradients; return the sums of this process's loss and of its load-balancing loss."""
    total, loss, balance_loss = float(batch.mask.sum()), 0.0, 0.0
    dtype = at_least_float32(next(shard.model.parameters())[:0].detach()).dtype
    for pack in _micro_batches(shard, batch):
        with backward_mode(shard.model, shard.config.gradient_checkpointing):
            pack = pack.to(get_device(shard))
            with nullcontext(list[Tensor]()) if balance is None else balance.observe() as logits:
                pack_loss = -shard.evaluator(pack, expected=pack.mask.to(dtype) / -total).sum() / total
            if balance is None or load is None:
                torch.autograd.backward(pack_loss)
            else:
                more = balance.loss_of_pack(shard.evaluator, pack, logits, load)
                torch.autograd.backward(pack_loss + more)
                balance_loss += float(more.detach())
        shard.optimizer.accumulate_master_grads()
        loss += float(pack_loss.detach())
    shard.optimizer.accumulate_master_grads()  # of what the last micro-batches followed
    return loss, balance_loss


@torch.no_grad()
def sum_log_likelihood(shard: LearnerShard, batch: Batch) -> float:
    """Return Σ log π(o_t), in nats."""

    def work() -> float:
        total, device = 0.0, get_device(shard)
        for pack in _micro_batches(shard, batch):
            total += float(shard.evaluator(pack.to(device)).sum(dtype=widest_dtype(device)))
        return total

    total = run_passes(shard, work)
    return float(shard.division.all_reduce(torch.tensor(total, dtype=torch.float64)))


def _micro_batches(shard: LearnerShard, batch: Batch) -> Iterator[Pack]:
    """Yield this process's micro-batches."""

    def idle(pack: Pack) -> None:
        with backward_mode(shard.model, shard.config.gradient_checkpointing):
            backward_zero(shard.evaluator(pack))
        shard.optimizer.accumulate_master_grads()

    def can_follow(saving: float) -> bool:
        balance = find_expert_balance(shard.evaluator, shard.config, shard.division)
        return reads_segments(shard.evaluator, shard.config, shard.division, balance, saving)

    return shard.division.micro_batches(batch, shard.config, shard.model, idle, can_follow=can_follow)


def build_sft_batch(rows: Sequence[SFTExample]) -> Batch:
    """Build a batch of completions from demonstrations; tokens that are not the assistant's are masked, like a tool's output."""
    width = max(len(row.tokens) for row in rows)
    media = [row.load_media() for row in rows]
    sizes = [len(row.prompt_ids) for row in rows]
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
        prompt_media=tuple(select_media(m, 0, n) for m, n in zip(media, sizes, strict=True)) if any(media) else (),
        completion_media=tuple(
            select_media(m, n, n + len(row.tokens)) for m, n, row in zip(media, sizes, rows, strict=True)
        )
        if any(media)
        else (),
    )


def tokenise_demonstration(row: Demonstration, tokenizer: Tokenizer) -> list[SFTExample]:
    """Return token ids exactly as in sampling: the prompt's own, then the answer's, closed by an end token.

    It is one text, or several where the template renders earlier turns differently once there are more.

    Raises:
        ModelError: The prompt's ids are no prefix of the full text's, the template begins the assistant's turn differently or does
            not close it, or there are more tokens than the model can read.
    """
    prompt_ids = tokenizer.encode(row.prompt, 0, row.source, row.tools).ids
    texts = encode_demonstration_texts(
        tokenizer, prompt_ids.tolist(), row.prompt, row.completion, row.source, row.tools
    )
    return [_make_example(row, tokenizer, *text) for text in texts]


def _make_example(row: Demonstration, tokenizer: Tokenizer, ids: list[int], is_learned: list[bool]) -> SFTExample:
    if tokenizer.context_length is not None and len(ids) > tokenizer.context_length:
        raise PromptTooLongError(
            f"{row.source}: {len(ids)} tokens, more than the {tokenizer.context_length} positions of {tokenizer.name!r}: shorten it"
        )
    size, tensor, mask = is_learned.index(True), torch.tensor(ids, dtype=torch.int64), torch.tensor(is_learned)
    messages = () if isinstance(row.prompt, str) or isinstance(row.completion, str) else (*row.prompt, *row.completion)
    pictures = list(list_pictures(messages))
    if not pictures or tokenizer.pictures is None:
        return SFTExample(tensor[:size], tensor[size:], mask[size:])
    load_media = partial(tokenizer.pictures.media, tensor, pictures, row.source)
    load_media()  # for its errors
    return SFTExample(tensor[:size], tensor[size:], mask[size:], load_media)
