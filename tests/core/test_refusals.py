"""What is refused, when it is built, with the reason and the way out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from random_batches import Shape, make, policy

import policygrad as pg
from policygrad.core.metrics import Max, Sum, merge
from policygrad.core.reference import Reference

TWO_STEPS = pg.FirstOrder(epochs=2)

BUILT: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "k1 in the loss": (
        lambda: pg.KLToReference(form="k1"),  # type: ignore[arg-type]
        ["k1", "zero expected gradient", "r*k1", "KLInReward"],
    ),
    "an unknown form in the loss": (lambda: pg.KLToReference(form="k4"), ["k4", "k2, k3, r*k1, r*k3"]),  # type: ignore[arg-type]
    "k2 in the reward": (lambda: pg.KLInReward(form="k2"), ["k2", "sequence KL", "KLToReference"]),
    "k3 in the reward": (lambda: pg.KLInReward(form="k3"), ["k3", "sequence KL", "KLToReference"]),
    "a negative β in the loss": (lambda: pg.KLToReference(-0.1), ["KLToReference.beta", "-0.1"]),
    "a negative β in the reward": (lambda: pg.KLInReward(-0.1), ["KLInReward.beta", "-0.1"]),
    "on-policy, several steps": (lambda: replace(pg.RLOO, step=TWO_STEPS), ["one optimiser step", "not 2", "Clip()"]),
    "on-policy, minibatches": (
        lambda: replace(pg.REINFORCE, step=pg.FirstOrder(minibatches=3)),
        ["one optimiser step", "not 3", "FirstOrder(1, 1)"],
    ),
    "on-policy, with a ratio": (
        lambda: pg.Algorithm(ratio=pg.Token()),
        ["OnPolicy ignores the ratio", "ratio is Token", "Importance()"],
    ),
    "a gate without a ratio": (lambda: pg.Algorithm(gate=pg.Clip()), ["Clip gates a ratio", "ratio=Token()"]),
    "KL in the loss, no reference": (lambda: replace(pg.GRPO, reference=None), ["KL term without a reference"]),
    "KL in the reward, no reference": (lambda: replace(pg.RLOO, reference=None), ["KL term without a reference"]),
    "cap, high below 1": (lambda: pg.WeightCap(0.0, 0.28), ["absolute", "high = 0.28", "1 + ε_high"]),
    "cap, low above 1": (lambda: pg.WeightCap(1.5, 5.0), ["absolute", "low = 1.5"]),
    "cap, low negative": (lambda: pg.WeightCap(-0.2, 5.0), ["absolute", "low = -0.2"]),
    "cap, NaN": (lambda: pg.WeightCap(0.0, float("nan")), ["high = nan"]),
    "a negative clip range": (lambda: pg.Clip(0.2, -0.1), ["Clip.high", "-0.1"]),
    "dual clip's c": (lambda: pg.DualClip(c=1.0), ["DualClip.c", "greater than 1"]),
    "a soft gate's temperature": (lambda: pg.SoftGate(tau_neg=0.0), ["SoftGate.tau_neg", "greater than 0"]),
    "no budget": (lambda: pg.FixedLength(0), ["FixedLength.length", "at least 1 token"]),
    "no cache": (lambda: pg.SoftOverlong(cache=0.0), ["SoftOverlong.cache", "(0, 1]"]),
    "a mode of dynamic sampling": (lambda: pg.DropNoSpread("skip"), ["'refill' or 'reweight'", "skip"]),  # type: ignore[arg-type]
    "no rounds": (lambda: pg.DropNoSpread(max_rounds=0), ["max_rounds", "at least 1"]),
    "a mean that never moves": (lambda: pg.RunningMean(decay=1.0), ["RunningMean.decay", "[0, 1)"]),
    "no epoch": (lambda: pg.FirstOrder(epochs=0), ["FirstOrder.epochs", "at least 1"]),
    "no such algorithm": (lambda: pg.algorithm("grop"), ["'grop'", "did you mean 'grpo'", "cispo"]),
    "nothing near": (lambda: pg.algorithm("xyzzy"), ["unknown algorithm 'xyzzy': known: reinforce"]),
    "one sample": (lambda: pg.GRPO.check_sampling(1, 1.0), ["GroupMean", "one per prompt", "samples_per_prompt"]),
    "one sample, leave-one-out": (lambda: pg.RLOO.check_sampling(1, 1.0), ["LeaveOneOut", "RunningMean()"]),
    "temperature 0": (lambda: pg.DAPO.check_sampling(8, 0.0), ["temperature 0", "sampling.temperature"]),
    "dynamic sampling of single samples": (
        lambda: replace(pg.REINFORCE, filters=(pg.DropNoSpread(),)).check_sampling(1, 1.0),
        ["DropNoSpread", "one per prompt"],
    ),
}


@pytest.mark.parametrize(("build", "said"), BUILT.values(), ids=BUILT.keys())
def test_refused(build: Callable[[], Any], said: list[str]) -> None:
    with pytest.raises(ValueError, match=r"\w") as error:
        build()
    assert [words for words in said if words not in str(error.value)] == []


def test_what_is_not_refused() -> None:
    pg.REINFORCE.check_sampling(1, 0.0)
    pg.GRPO.check_sampling(2, 0.5)
    assert replace(pg.GRPO, step=TWO_STEPS).step.updates == 2
    assert replace(pg.DR_GRPO, reference=None).needs == frozenset()
    assert pg.algorithm(" Dr-GRPO ") is pg.DR_GRPO


def test_needs_are_what_the_parts_declare() -> None:
    """No reference model without a KL term, no second forward pass without several steps."""
    assert pg.GRPO.needs == {"logp_ref"}
    assert pg.DAPO.needs == frozenset()
    assert pg.RLOO.needs == {"logp_old", "logp_ref"}
    assert replace(pg.DAPO, step=TWO_STEPS).needs == {"logp_old"}


FIELDS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "mask dtype": ({"mask": torch.ones(2, 3)}, ["Batch.mask", "bool", "float32", "mask.bool()"]),
    "mask shape": ({"mask": torch.ones(2, dtype=torch.bool)}, ["Batch.mask", "[B, T]", "[2]"]),
    "reward shape": ({"reward": torch.zeros(2, 3)}, ["Batch.reward", "[2, 3]", "[B] = [2]"]),
    "reward dtype": ({"reward": torch.zeros(2, dtype=torch.int64)}, ["Batch.reward", "floating", "reward.float()"]),
    "group shape": ({"group": torch.zeros(3, dtype=torch.int64)}, ["Batch.group", "[3]", "[B] = [2]"]),
    "group dtype": ({"group": torch.zeros(2)}, ["Batch.group", "integers", "float32"]),
    "logp_old": ({"logp_old": torch.zeros(2, 4)}, ["Batch.logp_old", "[2, 4]", "[B, T] = [2, 3]"]),
    "logp_ref": ({"logp_ref": torch.zeros(2)}, ["Batch.logp_ref", "[2]"]),
    "tokens": ({"tokens": torch.zeros(3, 3, dtype=torch.int64)}, ["Batch.tokens", "[3, 3]"]),
    "weight": ({"weight": torch.zeros(2)}, ["Batch.weight", "[B, T]"]),
    "truncated dtype": ({"truncated": torch.tensor([0, 1])}, ["Batch.truncated", "bool", "int64"]),
    "in_statistics": ({"in_statistics": torch.ones(2)}, ["Batch.in_statistics", "bool", "float32"]),
    "step_end": ({"step_end": torch.ones(2, 3)}, ["Batch.step_end", "bool"]),
}


@pytest.mark.parametrize(("wrong", "said"), FIELDS.values(), ids=FIELDS.keys())
def test_a_batch_names_the_field_that_does_not_fit(wrong: dict[str, Any], said: list[str]) -> None:
    right = {
        "mask": torch.ones(2, 3, dtype=torch.bool),
        "group": torch.zeros(2, dtype=torch.int64),
        "reward": torch.zeros(2),
    }
    pg.Batch(**right)
    with pytest.raises(ValueError, match=r"Batch\.") as error:
        pg.Batch(**right | wrong)
    assert [words for words in said if words not in str(error.value)] == []


def test_a_missing_field_says_which_part_wants_it() -> None:
    batch, logits = make(Shape((3,), 4, seed=0, binary=False))
    logp = policy(logits, batch.tokens, batch.mask)
    bare = replace(batch, logp_ref=None)
    with pytest.raises(ValueError, match=r"KLToReference needs Batch\.logp_ref"):
        pg.surrogate(logp, bare, pg.GRPO.advantages(bare), pg.GRPO)
    with pytest.raises(ValueError, match=r"KLInReward needs Batch\.logp_old"):
        pg.RLOO.advantages(batch)


@pytest.mark.parametrize("call", [pg.surrogate, pg.objective])
def test_a_lone_coefficient_tensor_for_terms_that_aggregate_otherwise(call) -> None:
    batch, logits = make(Shape((3,), 4, seed=0, binary=False))
    algorithm = replace(pg.GRPO, terms=(pg.KLToReference(0.04, "k3", aggregate=pg.TokenMean()),))
    logp, psi = policy(logits, batch.tokens, batch.mask), algorithm.advantages(batch)
    with pytest.raises(ValueError, match=r"KLToReference aggregates otherwise.*all_coefficients"):
        call(logp, batch, psi, algorithm, algorithm.coefficients(batch))
    call(logp, batch, psi, algorithm, algorithm.all_coefficients(batch))


def test_one_metric_name_has_one_reduction() -> None:
    with pytest.raises(TypeError, match="'kl' is a Sum and a Max"):
        merge({"kl": Sum(1.0)}, {"kl": Max(1.0)})


def test_a_reference_is_there_by_default() -> None:
    assert pg.Algorithm().reference == Reference()


def test_filters_in_an_order_that_cannot_be_meant() -> None:
    with pytest.raises(ValueError, match="put it first in filters"):
        replace(pg.DAPO, filters=(pg.MaskTruncated(), pg.DropNoSpread()))
