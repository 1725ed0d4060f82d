"""A reward model from preferences: the Bradley–Terry loss on pairs of completions."""

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
from policygrad.models.adapters import adapter_configs, add_adapters
from policygrad.models.classifier import (
    classifier_context_length,
    encode_for_scoring,
    forward,
    load_classifier,
    load_classifier_tokenizer,
    micro_batches,
    read_num_labels,
    score_head_modules,
    set_padding_token,
)
from policygrad.models.loading import DTYPES, disable_dropout, model_origin, resolve_model
from policygrad.models.lora_config import Lora, adapter_base, check_same_adapter, read_lora
from policygrad.models.tokenizer import Tokenizer, check_vocabulary
from policygrad.tasks.preferences import (
    PreferencePair,
    exclude_eval_prompts,
    group_by_prompt,
    read_preferences,
    split_by_prompt,
)
from policygrad.trackers import format_change
from policygrad.training.base_trainer import TrackingOptions, TrainingResult
from policygrad.training.config.supervised import RewardModelConfig
from policygrad.training.setup import load_row_options, pick_device
from policygrad.training.sft import describe_eval_split
from policygrad.training.supervised import LearnerShard, Numbers, SupervisedLearner, train_supervised


def train_reward_model(
    config: RewardModelConfig | None = None,
    *,
    resume: str | Path | None = None,
    stop_after: int | None = None,
    time_limit: str | None = None,
    overwrite: bool = False,
    **followers: Unpack[TrackingOptions],
) -> TrainingResult[Numbers | None]:
    """Trains a reward model on preferences, or goes on with the run in the folder `resume`.

    stop_after: stop, resumably, after so many steps of this call; stop_before: before so much time (23h50m) has passed.
    overwrite: begin anew in an output folder that holds a run, which is deleted once the new one begins. followers: `BaseTrainer`.

    Raises:
        PolicygradError: what cannot be trained, with the way out.
    """
    return train_supervised(
        PreferenceObjective,
        RewardModelConfig,
        config,
        resume=resume,
        stop_after=stop_after,
        time_limit=time_limit,
        overwrite=overwrite,
        **followers,
    )


EVAL_CHUNK = 64
"""Pairs measured at a time, so that progress shows."""


@dataclass(frozen=True)
class PreferenceBatch:
    """Pairs as token ids, and what each counts in the loss."""

    pairs: list[tuple[list[int], list[int]]]
    """Chosen, rejected."""
    weights: list[float]

    def micro_batches(self, tokens: int) -> Iterator[list[int]]:
        """Micro-batches of at most so many tokens, or one pair: places in `pairs`, the longest first."""
        return micro_batches([max(map(len, pair)) for pair in self.pairs], tokens // 2)

    def count_tokens(self, some: Sequence[int]) -> int:
        """Of a micro-batch, padding included."""
        return 2 * len(some) * max(len(text) for i in some for text in self.pairs[i])


class PreferenceObjective:
    """L = −mean over prompts of the mean over a prompt's pairs of log σ(r(x, y_w) − r(x, y_l)).

    Ouyang et al. 2022, eq. 1; with one pair per prompt it is that of Christiano et al. 2017, eq. 1, and of Stiennon et al. 2020.
    The pairs of one prompt stay in one update and on one side of the held-out split.
    """

    causal = False

    def __init__(self, config: RewardModelConfig) -> None:
        how = load_row_options(config.row_map, config.skip_bad_rows)
        pairs = read_preferences(config.data, how)
        others = read_preferences(config.eval_data, how) if config.eval_data else []
        kept = exclude_eval_prompts(pairs, others, config.data, str(config.eval_data)) if others else pairs
        split = None if others else split_by_prompt(kept)
        train = split.train if split else range(len(kept))
        held_out = split.eval if split else range(len(kept), len(kept) + len(others))
        self.pairs = [*kept, *others]
        self.units = group_by_prompt(self.pairs, list(train))
        self.eval_units = group_by_prompt(self.pairs, list(held_out))
        self.run_facts: dict[str, str] = {
            "held out": describe_eval_split(len(held_out), split is not None and split.eval_on_train)
        }
        if len(kept) < len(pairs):
            self.run_facts["left out"] = f"{len(pairs) - len(kept)} pairs, the held-out file has their prompts"
        self.model, self.tokenizer = load_reward_model(config)
        padding = self.model.config.get_text_config().pad_token_id  # type: ignore[operator, union-attr]
        if (
            config.learner.world_size > 1 and padding is None
        ):  # without it texts may be read one by one, elsewhere all at once
            raise ConfigError(
                f"{config.model!r} has no token that texts can be padded with, which several processes need: name one in its "
                "tokenizer_config.json (pad_token), or let one process learn (learner.world_size 1)"
            )
        self.texts = [self._encode(pair) for pair in self.pairs]

    def _encode(self, pair: PreferencePair) -> tuple[list[int], list[int]]:
        sides = []
        for name, completion in (("chosen", pair.chosen), ("rejected", pair.rejected)):
            ids = encode_for_scoring(self.tokenizer, pair.prompt, completion, pair.source)
            if self.tokenizer.context_length is not None and len(ids) > self.tokenizer.context_length:
                raise ModelError(
                    f"{pair.source}: prompt and {name!r} have {len(ids)} tokens, more than the {self.tokenizer.context_length} positions "
                    f"of {self.tokenizer.name!r}: shorten them, or leave the line out"
                )
            sides.append(ids)
        if sides[0] == sides[1]:
            raise ModelError(f"{pair.source}: 'chosen' and 'rejected' are equal in token ids: remove the line")
        return sides[0], sides[1]

    def accumulate(self, learner: SupervisedLearner, rows: Sequence[int]) -> dict[str, float]:
        """One update's gradient; loss in nats, accuracy, margin r_w − r_l, tokens read."""
        weight = self._weights(group_by_prompt(self.pairs, rows))
        texts = PreferenceBatch([self.texts[i] for i in rows], [weight[i] for i in rows])
        sums = learner.run_on_all(accumulate_preference_gradient, texts)
        tokens = sum(len(text) for pair in texts.pairs for text in pair)
        return dict(zip(("loss", "accuracy", "margin"), sums, strict=True)) | {"tokens": float(tokens)}

    @staticmethod
    def _weights(units: Sequence[tuple[int, ...]]) -> dict[int, float]:
        """Each prompt counts once, however many pairs it has."""
        return {i: 1 / (len(units) * len(unit)) for unit in units for i in unit}

    def evaluate(self, learner: SupervisedLearner, progress: Callable[[int, int], None]) -> dict[str, float]:
        """Held-out accuracy with its standard error over prompts, loss, margin, and the rewards' mean and spread."""
        pairs = sorted((i for unit in self.eval_units for i in unit), key=lambda i: -max(map(len, self.texts[i])))
        rewards = dict[int, Tensor]()
        for start in range(0, len(pairs), EVAL_CHUNK):
            some = pairs[start : start + EVAL_CHUNK]
            found = learner.run_on_all(compute_rewards, PreferenceBatch([self.texts[i] for i in some], []))
            rewards.update(zip(some, found, strict=True))
            progress(len(rewards), len(pairs))
        margins = [torch.stack([rewards[i][0] - rewards[i][1] for i in unit]) for unit in self.eval_units]
        right = torch.stack([compute_accuracy(margin).mean() for margin in margins])
        everything = torch.stack([rewards[i] for unit in self.eval_units for i in unit])
        return {
            "eval/accuracy": float(right.mean()),
            "eval/accuracy_stderr": float(right.std() / len(right) ** 0.5) if len(right) > 1 else 0.0,
            "eval/loss": float(torch.stack([bradley_terry_loss(margin).mean() for margin in margins]).mean()),
            "eval/margin": float(torch.stack([margin.mean() for margin in margins]).mean()),
            "eval/reward_mean": float(everything.mean()),
            "eval/reward_std": float(everything.std()),
        }

    def summarise(self, before: Numbers, after: Numbers) -> dict[str, str]:
        """Held-out accuracy, loss and margin, before and after; and how far rewards spread, for choosing the KL's β."""
        error = f" ± {after['eval/accuracy_stderr']:.3f} (standard error over {len(self.eval_units)} prompts)"
        return {
            "held-out accuracy": format_change(before["eval/accuracy"], after["eval/accuracy"], 3) + error,
            "held-out loss": format_change(before["eval/loss"], after["eval/loss"], 3) + " nats per pair",
            "margin": format_change(before["eval/margin"], after["eval/margin"]),
            "rewards": f"mean {after['eval/reward_mean']:.2f}, standard deviation {after['eval/reward_std']:.2f}",
        }


def accumulate_preference_gradient(share: LearnerShard, texts: PreferenceBatch) -> list[float]:
    """Adds ∂L/∂θ of one update's pairs to the gradients; [loss, accuracy, margin], weighted."""
    sums = torch.zeros(3, dtype=torch.float64)
    for some in _parts(share, texts):
        with backward_mode(share.model, share.config.gradient_checkpointing):
            margin = _rewards(share, [texts.pairs[i] for i in some]).diff(dim=1).squeeze(1).neg()
            each = torch.tensor([texts.weights[i] for i in some], device=margin.device, dtype=margin.dtype)
            loss = (each * bradley_terry_loss(margin)).sum()
            torch.autograd.backward(loss)
        share.optimizer.accumulate_master_grads()
        known, c = margin.detach().cpu().double(), each.cpu().double()
        sums += torch.stack([loss.detach().cpu().double(), (c * compute_accuracy(known)).sum(), (c * known).sum()])
    return list(share.division.all_reduce(sums).tolist())


@torch.no_grad()
def compute_rewards(share: LearnerShard, texts: PreferenceBatch) -> Tensor:
    """r [n, 2] float64 of chosen and rejected, on the CPU."""
    found = torch.zeros(len(texts.pairs), 2, dtype=torch.float64)
    for some in _parts(share, texts):
        found[some] = _rewards(share, [texts.pairs[i] for i in some]).cpu().double()
    return share.division.all_reduce(found)


def _parts(share: LearnerShard, texts: PreferenceBatch) -> Iterator[list[int]]:
    """This process's micro-batches."""

    def idle(part: Pack) -> None:
        with backward_mode(share.model, share.config.gradient_checkpointing):
            backward_zero(_rewards(share, [(texts.pairs[0][0][:1],) * 2]))
        share.optimizer.accumulate_master_grads()

    return share.division.divide(
        texts.micro_batches, micro_batch_tokens(share.config, share.model), idle, texts.count_tokens
    )


def _rewards(share: LearnerShard, pairs: Sequence[tuple[list[int], list[int]]]) -> Tensor:
    """r [n, 2] with graph: chosen and rejected of each pair, in one forward pass."""
    texts = [text for pair in pairs for text in pair]
    return share.evaluator.run_in_root(lambda: forward(share.model, texts)).view(len(pairs), 2)


def bradley_terry_loss(margin: Tensor) -> Tensor:
    """−log σ(r_w − r_l) per pair, nats: the probability that the better one is preferred (Bradley and Terry 1952)."""
    return -nn.functional.logsigmoid(margin)


def compute_accuracy(margin: Tensor) -> Tensor:
    """1 where the chosen one has the higher reward, a half for a tie."""
    return (margin > 0).to(margin.dtype) + 0.5 * (margin == 0).to(margin.dtype)


def load_reward_model(config: RewardModelConfig) -> tuple[nn.Module, Tokenizer]:
    """A causal model's weights with a new head of one output, or an existing reward model; and its tokenizer.

    Raises:
        ModelError: no such model, a classifier of several labels, no tokenizer; ConfigError: adapters that it cannot have.
    """
    path = resolve_model(config.model)
    count, _ = read_num_labels(path, config.trust_remote_code)
    if count > 1:
        raise ModelError(
            f"{config.model!r} is a classifier with {count} labels: start from a causal language model, or from a reward model, "
            "which has one"
        )
    if count == 0 and adapter_base(path) is not None:
        raise ModelError(
            f"{config.model!r} is an adapter of a language model, which a new head cannot stand on: `policygrad export "
            f"{config.model} --merge` makes a whole model of it to start from"
        )
    if config.learner.adapters is not None and config.learner.adapters.bits is not None:
        raise ConfigError("a reward model is not trained in four bits: leave bits out of learner.lora")
    device = pick_device(config.learner.device)
    trust = config.trust_remote_code
    model = load_classifier(path, DTYPES[config.learner.dtype], device, new_head=count == 0, trust_remote_code=trust)
    lora = config.learner.adapters
    if adapter_configs(model):
        check_same_adapter(lora or Lora(), read_lora(path), config.model)
    else:
        model.requires_grad_(True)
        if lora is not None:
            add_adapters(
                model,
                lora,
                base=model_origin(config.model),
                seed=config.seed,
                modules_to_save=score_head_modules(model),
            )
    tokenizer = load_classifier_tokenizer(path, trust)
    check_vocabulary(tokenizer.hf, model, config.model)
    for module in model.modules():
        disable_dropout(module)
    set_padding_token(model, tokenizer.hf)
    return model, replace(tokenizer, name=config.model, context_length=classifier_context_length(model))
