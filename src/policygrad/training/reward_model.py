"""A reward model from preferences: the Bradley–Terry loss on pairs of completions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Unpack

import torch
from torch import Tensor, nn

from policygrad.errors import ConfigError, ModelError
from policygrad.learners.local.packing import micro_tokens
from policygrad.learners.local.recompute import differentiating, recompute_activations
from policygrad.models.adapters import adapt, adapters_of
from policygrad.models.classifier import (
    choose_padding,
    context_length,
    encode,
    forward,
    heads,
    labels,
    load_classifier,
    load_tokenizer,
    micro_batches,
)
from policygrad.models.loading import origin, resolve, without_dropout
from policygrad.models.lora import Lora, base_of, check_agrees, described
from policygrad.models.precision import DTYPES
from policygrad.models.tokenizer import Tokenizer, check_vocabulary
from policygrad.tasks.preferences import Pair, by_prompt, read_pairs, split_rows, without
from policygrad.trackers import change
from policygrad.training.config.supervised import RewardModelConfig
from policygrad.training.lifecycle import Followers, Result
from policygrad.training.reading import row_reading
from policygrad.training.resources import pick_device
from policygrad.training.sft import held_out_words
from policygrad.training.supervised import Numbers, supervise


def train_reward_model(
    config: RewardModelConfig | None = None,
    *,
    resume: str | Path | None = None,
    stop_after: int | None = None,
    stop_before: str | None = None,
    overwrite: bool = False,
    **followers: Unpack[Followers],
) -> Result[Numbers | None]:
    """Trains a reward model on preferences, or goes on with the run in the folder `resume`.

    stop_after: stop, resumably, after so many steps of this call; stop_before: before so much time (23h50m) has passed.
    overwrite: begin anew in an output folder that holds a run, which is deleted once the new one begins. followers: `Lifecycle`.

    Raises:
        PolicygradError: what cannot be trained, with the way out.
    """
    return supervise(
        Preferences,
        RewardModelConfig,
        config,
        resume=resume,
        stop_after=stop_after,
        stop_before=stop_before,
        overwrite=overwrite,
        **followers,
    )


class Preferences:
    """L = −mean over prompts of the mean over a prompt's pairs of log σ(r(x, y_w) − r(x, y_l)).

    Ouyang et al. 2022, eq. 1; with one pair per prompt it is that of Christiano et al. 2017, eq. 1, and of Stiennon et al. 2020.
    The pairs of one prompt stay in one update and on one side of the held-out split.
    """

    def __init__(self, config: RewardModelConfig) -> None:
        how = row_reading(config.map, config.skip_bad_rows)
        pairs = read_pairs(config.data, how)
        others = read_pairs(config.held_out, how) if config.held_out else []
        kept = without(pairs, others, config.data, str(config.held_out)) if others else pairs
        split = None if others else split_rows(kept)
        train = split.train if split else range(len(kept))
        held_out = split.held_out if split else range(len(kept), len(kept) + len(others))
        self.pairs = [*kept, *others]
        self.units = by_prompt(self.pairs, list(train))
        self.held_out = by_prompt(self.pairs, list(held_out))
        self.facts: dict[str, str] = {
            "held out": held_out_words(len(held_out), split is not None and split.held_out_is_train)
        }
        if len(kept) < len(pairs):
            self.facts["left out"] = f"{len(pairs) - len(kept)} pairs, the held-out file has their prompts"
        self.config = config
        self.model, self.tokenizer = load(config)
        self.texts = [self._encode(pair) for pair in self.pairs]
        if config.learner.gradient_checkpointing:
            recompute_activations(self.model)

    def _encode(self, pair: Pair) -> tuple[list[int], list[int]]:
        sides = []
        for name, completion in (("chosen", pair.chosen), ("rejected", pair.rejected)):
            ids = encode(self.tokenizer, pair.prompt, completion, pair.source)
            if self.tokenizer.context is not None and len(ids) > self.tokenizer.context:
                raise ModelError(
                    f"{pair.source}: prompt and {name!r} have {len(ids)} tokens, more than the {self.tokenizer.context} positions "
                    f"of {self.tokenizer.name!r}: shorten them, or leave the line out"
                )
            sides.append(ids)
        if sides[0] == sides[1]:
            raise ModelError(f"{pair.source}: 'chosen' and 'rejected' are equal in token ids: remove the line")
        return sides[0], sides[1]

    def rewards(self, pairs: Sequence[int]) -> Tensor:
        """r [n, 2] float32 with graph: chosen and rejected of each pair, in one forward pass."""
        texts = [text for i in pairs for text in self.texts[i]]
        return forward(self.model, texts).view(len(pairs), 2)

    def micro_batches(self, pairs: Sequence[int]) -> list[list[int]]:
        """The pairs by length, as many at a time as `learner.micro_tokens` allows."""
        lengths = [max(map(len, self.texts[i])) for i in pairs]
        tokens = micro_tokens(self.config.learner, self.model)
        return [[pairs[i] for i in places] for places in micro_batches(lengths, tokens // 2)]

    def accumulate(self, rows: Sequence[int], collect: Callable[[], None]) -> dict[str, float]:
        """One update's gradient; loss in nats, accuracy, margin r_w − r_l, tokens read."""
        weight = self._weights(by_prompt(self.pairs, rows))
        sums = torch.zeros(3, dtype=torch.float64)
        for some in self.micro_batches(rows):
            with differentiating(self.model, self.config.learner.gradient_checkpointing):
                margin = self.rewards(some).diff(dim=1).squeeze(1).neg()
                each = torch.tensor([weight[i] for i in some], device=margin.device)
                loss = (each * bradley_terry(margin)).sum()
                torch.autograd.backward(loss)
            collect()
            known, c = margin.detach().cpu().double(), each.cpu().double()
            sums += torch.stack([loss.detach().cpu().double(), (c * correct(known)).sum(), (c * known).sum()])
        tokens = sum(len(text) for i in rows for text in self.texts[i])
        return dict(zip(("loss", "accuracy", "margin"), sums.tolist(), strict=True)) | {"tokens": float(tokens)}

    @staticmethod
    def _weights(units: Sequence[tuple[int, ...]]) -> dict[int, float]:
        """Each prompt counts once, however many pairs it has."""
        return {i: 1 / (len(units) * len(unit)) for unit in units for i in unit}

    @torch.no_grad()
    def measure(self, progress: Callable[[int, int], None]) -> dict[str, float]:
        """Held-out accuracy with its standard error over prompts, loss, margin, and the rewards' mean and spread."""
        pairs = [i for unit in self.held_out for i in unit]
        rewards = dict[int, Tensor]()
        for some in self.micro_batches(pairs):
            rewards.update(zip(some, self.rewards(some).cpu().double(), strict=True))
            progress(len(rewards), len(pairs))
        margins = [torch.stack([rewards[i][0] - rewards[i][1] for i in unit]) for unit in self.held_out]
        right = torch.stack([correct(margin).mean() for margin in margins])
        everything = torch.stack([rewards[i] for i in pairs])
        return {
            "held_out/accuracy": float(right.mean()),
            "held_out/accuracy_stderr": float(right.std() / len(right) ** 0.5) if len(right) > 1 else 0.0,
            "held_out/loss": float(torch.stack([bradley_terry(margin).mean() for margin in margins]).mean()),
            "held_out/margin": float(torch.stack([margin.mean() for margin in margins]).mean()),
            "held_out/reward_mean": float(everything.mean()),
            "held_out/reward_std": float(everything.std()),
        }

    def summary(self, before: Numbers, after: Numbers) -> dict[str, str]:
        """Held-out accuracy, loss and margin, before and after; and how far rewards spread, for choosing the KL's β."""
        error = f" ± {after['held_out/accuracy_stderr']:.3f} (standard error over {len(self.held_out)} prompts)"
        return {
            "held-out accuracy": change(before["held_out/accuracy"], after["held_out/accuracy"], 3) + error,
            "held-out loss": change(before["held_out/loss"], after["held_out/loss"], 3) + " nats per pair",
            "margin": change(before["held_out/margin"], after["held_out/margin"]),
            "rewards": f"mean {after['held_out/reward_mean']:.2f}, standard deviation {after['held_out/reward_std']:.2f}",
        }


def bradley_terry(margin: Tensor) -> Tensor:
    """−log σ(r_w − r_l) per pair, nats: the probability that the better one is preferred (Bradley and Terry 1952)."""
    return -nn.functional.logsigmoid(margin)


def correct(margin: Tensor) -> Tensor:
    """1 where the chosen one has the higher reward, a half for a tie."""
    return (margin > 0).to(margin.dtype) + 0.5 * (margin == 0).to(margin.dtype)


def load(config: RewardModelConfig) -> tuple[nn.Module, Tokenizer]:
    """A causal model's weights with a new head of one output, or an existing reward model; and its tokenizer.

    Raises:
        ModelError: no such model, a classifier of several labels, no tokenizer; ConfigError: adapters that it cannot have.
    """
    path = resolve(config.model)
    count, _ = labels(path, config.trust_remote_code)
    if count > 1:
        raise ModelError(
            f"{config.model!r} is a classifier with {count} labels: start from a causal language model, or from a reward model, "
            "which has one"
        )
    if count == 0 and base_of(path) is not None:
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
    if adapters_of(model):
        check_agrees(lora or Lora(), described(path), config.model)
    else:
        model.requires_grad_(True)
        if lora is not None:
            adapt(model, lora, base=origin(config.model), seed=config.seed, whole=heads(model))
    tokenizer = load_tokenizer(path, trust)
    check_vocabulary(tokenizer.hf, model, config.model)
    for module in model.modules():
        without_dropout(module)
    choose_padding(model, tokenizer.hf)
    return model, replace(tokenizer, name=config.model, context=context_length(model))
