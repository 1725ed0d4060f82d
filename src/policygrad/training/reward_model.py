"""Reward models from preferences: the Bradley–Terry loss on pairs of completions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Unpack

import torch
from torch import Tensor, nn

from policygrad.errors import ConfigError, ModelError
from policygrad.learners.local.forward import backward_mode, backward_zero
from policygrad.learners.local.packing import Pack, micro_batch_tokens
from policygrad.models.adapters import add_adapters
from policygrad.models.classifier import (
    encode_for_scoring,
    forward,
    load_classifier,
    load_classifier_tokenizer,
    micro_batches,
    read_num_labels,
    score_head_modules,
    set_padding_token,
)
from policygrad.models.loading import DTYPES, context_length, disable_dropout, model_origin, resolve_model
from policygrad.models.lora_config import Lora, adapter_base, check_same_adapter, read_lora
from policygrad.models.tokenizer import PromptTooLongError, Tokenizer, check_vocabulary
from policygrad.models.traits import adapter_configs
from policygrad.tasks.preferences import PreferencePair, group_by_prompt, read_preferences
from policygrad.trackers import format_change
from policygrad.training.base_trainer import TrackingOptions, TrainingResult
from policygrad.training.config.supervised import RewardModelConfig
from policygrad.training.supervised import (
    LearnerShard,
    MetricValues,
    SupervisedLearner,
    SupervisedTrainer,
    encode_rows,
    load_resumed_config,
    read_rows,
    run_passes,
)
from policygrad.utils.devices import pick_device

EVAL_CHUNK = 64  # pairs evaluated at a time, so that progress shows


def train_reward_model(
    config: RewardModelConfig | None = None,
    *,
    resume: str | Path | None = None,
    stop_after: int | None = None,
    time_limit: str | None = None,
    overwrite: bool = False,
    **tracking: Unpack[TrackingOptions],
) -> TrainingResult[MetricValues | None]:
    """Train a reward model on preferences, or resume the run in the folder `resume`. The other arguments are those of `train`.

    Raises:
        PolicygradError: The run cannot be trained; the message says what to change.
    """
    trainer = SupervisedTrainer(
        config or load_resumed_config(RewardModelConfig, resume), PreferenceObjective, **tracking
    )
    return trainer.train(resume=resume, stop_after=stop_after, time_limit=time_limit, overwrite=overwrite)


@dataclass(frozen=True)
class PreferenceBatch:
    """Pairs as token ids, with their weights in the loss."""

    pairs: list[tuple[list[int], list[int]]]  # (chosen, rejected)
    weights: list[float]

    def micro_batches(self, tokens: int) -> Iterator[list[int]]:
        """Yield micro-batches, as indices into `pairs`, of at most this many tokens or one pair, the longest first."""
        return micro_batches([max(map(len, pair)) for pair in self.pairs], tokens // 2)

    def count_tokens(self, indices: Sequence[int]) -> int:
        """Return the tokens of a micro-batch, padding included."""
        return 2 * len(indices) * max(len(text) for i in indices for text in self.pairs[i])


class PreferenceObjective:
    """L = −mean over prompts of the mean over a prompt's pairs of log σ(r(x, y_w) − r(x, y_l)).

    Ouyang et al. 2022, eq. 1. With one pair per prompt it is that of Christiano et al. 2017, eq. 1, and of Stiennon et al. 2020.
    The pairs of one prompt stay in one update and on one side of the held-out split.
    """

    causal = False

    def __init__(self, config: RewardModelConfig) -> None:
        pairs, split, facts = read_rows(config, read_preferences, "pairs")
        self.model, self.tokenizer = load_reward_model(config)
        padding = self.model.config.get_text_config().pad_token_id  # type: ignore[operator, union-attr]
        if config.learner.world_size > 1 and padding is None:
            # one process would read its texts one by one, another all at once
            raise ConfigError(
                f"{config.model!r} has no padding token, which several processes need: name one in its tokenizer_config.json "
                "(pad_token), or train in one process (learner.world_size 1)"
            )
        self.pairs, self.texts, split, self.run_facts = encode_rows(config, pairs, split, facts, self._encode)
        self.units = group_by_prompt(self.pairs, split.train)
        self.eval_units = group_by_prompt(self.pairs, split.eval)

    def _encode(self, pair: PreferencePair) -> tuple[list[int], list[int]]:
        """Return the token ids of (chosen, rejected), each with the prompt."""
        sides, limit = list[list[int]](), self.tokenizer.context_length
        for name, completion in (("chosen", pair.chosen), ("rejected", pair.rejected)):
            ids = encode_for_scoring(self.tokenizer, pair.prompt, completion, pair.source)
            if limit is not None and len(ids) > limit:
                raise PromptTooLongError(
                    f"{pair.source}: prompt and {name!r} have {len(ids)} tokens, more than the {limit} positions of "
                    f"{self.tokenizer.name!r}: shorten them"
                )
            sides.append(ids)
        if sides[0] == sides[1]:
            raise ModelError(f"{pair.source}: 'chosen' and 'rejected' are equal in token ids: remove the line")
        return sides[0], sides[1]

    def accumulate(self, learner: SupervisedLearner, rows: Sequence[int]) -> dict[str, float]:
        """Add one update's gradient; return loss (nats), accuracy, margin r_w − r_l, and the tokens read."""
        units = group_by_prompt(self.pairs, rows)
        weights = {i: 1 / (len(units) * len(unit)) for unit in units for i in unit}  # each prompt counts once
        batch = PreferenceBatch([self.texts[i] for i in rows], [weights[i] for i in rows])
        sums = learner.run_on_all(accumulate_preference_gradient, batch)
        tokens = sum(len(text) for pair in batch.pairs for text in pair)
        return dict(zip(("loss", "accuracy", "margin"), sums, strict=True)) | {"tokens": float(tokens)}

    def evaluate(self, learner: SupervisedLearner, progress: Callable[[int, int], None]) -> dict[str, float]:
        """Return the held-out accuracy with its standard error over prompts, loss, margin, and the rewards' mean and spread."""
        pairs = sorted((i for unit in self.eval_units for i in unit), key=lambda i: -max(map(len, self.texts[i])))
        rewards = dict[int, Tensor]()
        for start in range(0, len(pairs), EVAL_CHUNK):
            chunk = pairs[start : start + EVAL_CHUNK]
            scores = learner.run_on_all(compute_rewards, PreferenceBatch([self.texts[i] for i in chunk], []))
            rewards.update(zip(chunk, scores, strict=True))
            progress(len(rewards), len(pairs))
        margins = [torch.stack([rewards[i][0] - rewards[i][1] for i in unit]) for unit in self.eval_units]
        accuracy = torch.stack([compute_accuracy(margin).mean() for margin in margins])
        all_rewards = torch.stack([rewards[i] for unit in self.eval_units for i in unit])
        return {
            "eval/accuracy": float(accuracy.mean()),
            "eval/accuracy_stderr": float(accuracy.std() / len(accuracy) ** 0.5) if len(accuracy) > 1 else 0.0,
            "eval/loss": float(torch.stack([bradley_terry_loss(margin).mean() for margin in margins]).mean()),
            "eval/margin": float(torch.stack([margin.mean() for margin in margins]).mean()),
            "eval/reward_mean": float(all_rewards.mean()),
            "eval/reward_std": float(all_rewards.std()),
        }

    def summarise(self, before: MetricValues, after: MetricValues) -> dict[str, str]:
        """Describe accuracy, loss and margin before and after, and the rewards' spread, which helps to choose the KL's β."""
        error = f" ± {after['eval/accuracy_stderr']:.3f} (standard error over {len(self.eval_units)} prompts)"
        return {
            "held-out accuracy": format_change(before["eval/accuracy"], after["eval/accuracy"], 3) + error,
            "held-out loss": format_change(before["eval/loss"], after["eval/loss"], 3) + " nats per pair",
            "margin": format_change(before["eval/margin"], after["eval/margin"]),
            "rewards": f"mean {after['eval/reward_mean']:.2f}, standard deviation {after['eval/reward_std']:.2f}",
        }


def accumulate_preference_gradient(shard: LearnerShard, batch: PreferenceBatch) -> list[float]:
    """Add ∂L/∂θ of one update's pairs to the gradients; return [loss, accuracy, margin], weighted."""
    return list(shard.division.all_reduce(run_passes(shard, lambda: _run_micro_batches(shard, batch))).tolist())


def _run_micro_batches(shard: LearnerShard, batch: PreferenceBatch) -> Tensor:
    """Add the gradients; return this process's sums [3] of loss, accuracy and margin."""
    sums = torch.zeros(3, dtype=torch.float64)
    for indices in _micro_batches(shard, batch):
        with backward_mode(shard.model, shard.config.gradient_checkpointing):
            margin = _compute_pair_rewards(shard, [batch.pairs[i] for i in indices]).diff(dim=1).squeeze(1).neg()
            weights = torch.tensor([batch.weights[i] for i in indices], device=margin.device, dtype=margin.dtype)
            loss = (weights * bradley_terry_loss(margin)).sum()
            torch.autograd.backward(loss)
        shard.optimizer.accumulate_master_grads()
        m, w = margin.detach().cpu().double(), weights.cpu().double()
        sums += torch.stack([loss.detach().cpu().double(), (w * compute_accuracy(m)).sum(), (w * m).sum()])
    return sums


@torch.no_grad()
def compute_rewards(shard: LearnerShard, batch: PreferenceBatch) -> Tensor:
    """Return r [n, 2] float64 of (chosen, rejected), on the CPU."""
    rewards = torch.zeros(len(batch.pairs), 2, dtype=torch.float64)

    def work() -> None:
        for indices in _micro_batches(shard, batch):
            rewards[indices] = _compute_pair_rewards(shard, [batch.pairs[i] for i in indices]).cpu().double()

    run_passes(shard, work)
    return shard.division.all_reduce(rewards)


def _micro_batches(shard: LearnerShard, batch: PreferenceBatch) -> Iterator[list[int]]:
    """Yield this process's micro-batches."""

    def idle(pack: Pack) -> None:
        with backward_mode(shard.model, shard.config.gradient_checkpointing):
            backward_zero(_compute_pair_rewards(shard, [(batch.pairs[0][0][:1],) * 2]))
        shard.optimizer.accumulate_master_grads()

    tokens = micro_batch_tokens(shard.config, shard.model)
    return shard.division.divide_within_memory(batch.micro_batches, tokens, idle, batch.count_tokens, len)


def _compute_pair_rewards(shard: LearnerShard, pairs: Sequence[tuple[list[int], list[int]]]) -> Tensor:
    """Return r [n, 2] with graph: chosen and rejected of each pair, in one forward pass."""
    texts = [text for pair in pairs for text in pair]
    return shard.evaluator.run_in_root(lambda: forward(shard.model, texts)).view(len(pairs), 2)


def bradley_terry_loss(margin: Tensor) -> Tensor:
    """Return −log σ(r_w − r_l) per pair, in nats (Bradley and Terry 1952)."""
    return -nn.functional.logsigmoid(margin)


def compute_accuracy(margin: Tensor) -> Tensor:
    """Return 1 where the chosen completion has the higher reward, a half for a tie, 0 otherwise."""
    return (margin > 0).to(margin.dtype) + 0.5 * (margin == 0).to(margin.dtype)


def load_reward_model(config: RewardModelConfig) -> tuple[nn.Module, Tokenizer]:
    """Load a causal model's weights with a new head of one output, or an existing reward model; and its tokenizer.

    Raises:
        ModelError: There is no such model, it is a classifier of several labels, or it has no tokenizer.
        ConfigError: The model cannot have these adapters.
    """
    path, lora, trust = resolve_model(config.model), config.learner.adapters, config.trust_remote_code
    count, _ = read_num_labels(path, trust)
    if count > 1:
        raise ModelError(
            f"{config.model!r} is a classifier with {count} labels: start from a causal language model, or from a reward model, "
            "which has one"
        )
    if count == 0 and adapter_base(path) is not None:
        raise ModelError(
            f"{config.model!r} is an adapter of a language model, which cannot carry a new head: `policygrad export {config.model} "
            "--merge` makes a complete model of it to start from"
        )
    if lora is not None and lora.bits is not None:
        raise ConfigError("a reward model cannot be trained in four bits: leave bits out of learner.lora")
    device = pick_device(config.learner.device)
    model = load_classifier(path, DTYPES[config.learner.dtype], device, new_head=count == 0, trust_remote_code=trust)
    if adapter_configs(model):
        check_same_adapter(lora or Lora(), read_lora(path), config.model)
    else:
        model.requires_grad_(True)
        if lora is not None:
            base, head = model_origin(config.model), score_head_modules(model)
            add_adapters(model, lora, base=base, seed=config.seed, modules_to_save=head)
    tokenizer = load_classifier_tokenizer(path, trust)
    check_vocabulary(tokenizer.hf, model, config.model)
    set_padding_token(disable_dropout(model), tokenizer.hf)
    return model, replace(tokenizer, name=config.model, context_length=context_length(model))
