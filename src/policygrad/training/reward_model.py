"""A reward model from preferences: the Bradley–Terry loss on pairs of completions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Unpack

import torch
from torch import Tensor, nn

from policygrad.errors import ConfigError, ModelError
from policygrad.learners.local.forward import differentiating, without_effect
from policygrad.learners.local.packing import Pack, micro_tokens
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
from policygrad.models.loading import DTYPES, origin, resolve, without_dropout
from policygrad.models.lora_config import Lora, base_of, check_agrees, described
from policygrad.models.tokenizer import Tokenizer, check_vocabulary
from policygrad.tasks.preferences import Pair, by_prompt, read_pairs, split_rows, without
from policygrad.trackers import change
from policygrad.training.base_trainer import Followers, Result
from policygrad.training.config.supervised import RewardModelConfig
from policygrad.training.setup import pick_device, row_reading
from policygrad.training.sft import held_out_words
from policygrad.training.supervised import Learner, Numbers, Share, supervise


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


PORTION = 64
"""Pairs measured at a time, so that progress shows."""


@dataclass(frozen=True)
class Texts:
    """Pairs as token ids, and what each counts in the loss."""

    pairs: list[tuple[list[int], list[int]]]
    """Chosen, rejected."""
    weights: list[float]

    def made(self, tokens: int) -> Iterator[list[int]]:
        """Micro-batches of at most so many tokens, or one pair: places in `pairs`, the longest first."""
        return micro_batches([max(map(len, pair)) for pair in self.pairs], tokens // 2)

    def tokens(self, some: Sequence[int]) -> int:
        """Of a micro-batch, padding included."""
        return 2 * len(some) * max(len(text) for i in some for text in self.pairs[i])


class Preferences:
    """L = −mean over prompts of the mean over a prompt's pairs of log σ(r(x, y_w) − r(x, y_l)).

    Ouyang et al. 2022, eq. 1; with one pair per prompt it is that of Christiano et al. 2017, eq. 1, and of Stiennon et al. 2020.
    The pairs of one prompt stay in one update and on one side of the held-out split.
    """

    causal = False

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
        self.model, self.tokenizer = load(config)
        padding = self.model.config.get_text_config().pad_token_id  # type: ignore[operator, union-attr]
        if (
            config.learner.ranks > 1 and padding is None
        ):  # without it texts may be read one by one, elsewhere all at once
            raise ConfigError(
                f"{config.model!r} has no token that texts can be padded with, which several processes need: name one in its "
                "tokenizer_config.json (pad_token), or let one process learn (learner.ranks 1)"
            )
        self.texts = [self._encode(pair) for pair in self.pairs]

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

    def accumulate(self, learner: Learner, rows: Sequence[int]) -> dict[str, float]:
        """One update's gradient; loss in nats, accuracy, margin r_w − r_l, tokens read."""
        weight = self._weights(by_prompt(self.pairs, rows))
        texts = Texts([self.texts[i] for i in rows], [weight[i] for i in rows])
        sums = learner.do(gradient, texts)
        tokens = sum(len(text) for pair in texts.pairs for text in pair)
        return dict(zip(("loss", "accuracy", "margin"), sums, strict=True)) | {"tokens": float(tokens)}

    @staticmethod
    def _weights(units: Sequence[tuple[int, ...]]) -> dict[int, float]:
        """Each prompt counts once, however many pairs it has."""
        return {i: 1 / (len(units) * len(unit)) for unit in units for i in unit}

    def measure(self, learner: Learner, progress: Callable[[int, int], None]) -> dict[str, float]:
        """Held-out accuracy with its standard error over prompts, loss, margin, and the rewards' mean and spread."""
        pairs = sorted((i for unit in self.held_out for i in unit), key=lambda i: -max(map(len, self.texts[i])))
        rewards = dict[int, Tensor]()
        for start in range(0, len(pairs), PORTION):
            some = pairs[start : start + PORTION]
            found = learner.do(rewards_of, Texts([self.texts[i] for i in some], []))
            rewards.update(zip(some, found, strict=True))
            progress(len(rewards), len(pairs))
        margins = [torch.stack([rewards[i][0] - rewards[i][1] for i in unit]) for unit in self.held_out]
        right = torch.stack([correct(margin).mean() for margin in margins])
        everything = torch.stack([rewards[i] for unit in self.held_out for i in unit])
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


def gradient(share: Share, texts: Texts) -> list[float]:
    """Adds ∂L/∂θ of one update's pairs to the gradients; [loss, accuracy, margin], weighted."""
    sums = torch.zeros(3, dtype=torch.float64)
    for some in _parts(share, texts):
        with differentiating(share.model, share.config.gradient_checkpointing):
            margin = _rewards(share, [texts.pairs[i] for i in some]).diff(dim=1).squeeze(1).neg()
            each = torch.tensor([texts.weights[i] for i in some], device=margin.device, dtype=margin.dtype)
            loss = (each * bradley_terry(margin)).sum()
            torch.autograd.backward(loss)
        share.optimizer.collect()
        known, c = margin.detach().cpu().double(), each.cpu().double()
        sums += torch.stack([loss.detach().cpu().double(), (c * correct(known)).sum(), (c * known).sum()])
    return list(share.division.summed(sums).tolist())


@torch.no_grad()
def rewards_of(share: Share, texts: Texts) -> Tensor:
    """r [n, 2] float64 of chosen and rejected, on the CPU."""
    found = torch.zeros(len(texts.pairs), 2, dtype=torch.float64)
    for some in _parts(share, texts):
        found[some] = _rewards(share, [texts.pairs[i] for i in some]).cpu().double()
    return share.division.summed(found)


def _parts(share: Share, texts: Texts) -> Iterator[list[int]]:
    """This process's micro-batches."""

    def idle(part: Pack) -> None:
        with differentiating(share.model, share.config.gradient_checkpointing):
            without_effect(_rewards(share, [(texts.pairs[0][0][:1],) * 2]))
        share.optimizer.collect()

    return share.division.packs(texts.made, micro_tokens(share.config, share.model), idle, texts.tokens)


def _rewards(share: Share, pairs: Sequence[tuple[list[int], list[int]]]) -> Tensor:
    """r [n, 2] with graph: chosen and rejected of each pair, in one forward pass."""
    texts = [text for pair in pairs for text in pair]
    return share.evaluator.within(lambda: forward(share.model, texts)).view(len(pairs), 2)


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
