"""What is refused, when it is built, with the reason and the way out."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import policygrad as pg
from doubles.random_batches import Shape, make, policy
from policygrad.core.auxiliary import Reference
from policygrad.core.metrics import Max, Sum, merge
from policygrad.core.objective import gate_weight
from policygrad.core.validation import check_sampling

TWO_STEPS = pg.GradientSteps(epochs=2)

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
    "on-policy, several steps": (lambda: replace(pg.RLOO, update_rule=TWO_STEPS), ["one update", "not 2", "Clip()"]),
    "on-policy, minibatches": (
        lambda: replace(pg.REINFORCE, update_rule=pg.GradientSteps(minibatches=3)),
        ["one update", "not 3", "GradientSteps(1, 1)"],
    ),
    "on-policy, with a ratio": (
        lambda: pg.Algorithm(ratio=pg.Token()),
        ["OnPolicy ignores the ratio", "ratio is Token", "Importance()"],
    ),
    "a gate without a ratio": (lambda: pg.Algorithm(gate=pg.Clip()), ["Clip needs a ratio", "ratio=Token()"]),
    "KL in the loss, no reference": (
        lambda: replace(pg.GRPO, reference=None),
        ["needs a reference, and reference is None"],
    ),
    "KL in the reward, no reference": (
        lambda: replace(pg.RLOO, reference=None),
        ["needs a reference, and reference is None"],
    ),
    "cap, high below 1": (lambda: pg.ClippedImportance(0.0, 0.28), ["absolute", "high = 0.28", "1 + ε_high"]),
    "cap, low above 1": (lambda: pg.ClippedImportance(1.5, 5.0), ["absolute", "low = 1.5"]),
    "cap, low negative": (lambda: pg.ClippedImportance(-0.2, 5.0), ["absolute", "low = -0.2"]),
    "cap, NaN": (lambda: pg.ClippedImportance(0.0, float("nan")), ["high = nan"]),
    "a negative clip range": (lambda: pg.Clip(0.2, -0.1), ["Clip.high", "-0.1"]),
    "dual clip's c": (lambda: pg.Clip(c=1.0), ["Clip.c", "above 1"]),
    "a soft gate's temperature": (
        lambda: pg.SigmoidGate(tau_neg=0.0),
        ["SigmoidGate.tau_neg must be above 0, not 0.0"],
    ),
    "a soft gate's endless temperature": (
        lambda: pg.SigmoidGate(math.inf),
        ["SigmoidGate.tau_pos must be above 0 and finite, not inf"],
    ),
    "a clip that is no number": (lambda: pg.Clip(high=math.nan), ["Clip.high must be at least 0, not nan"]),
    "a discount above 1": (lambda: pg.GAE(gamma=1.5), ["GAE.gamma must be in [0, 1], not 1.5"]),
    "no budget": (lambda: pg.FixedLength(0), ["FixedLength.length", "at least 1 token"]),
    "no penalty": (lambda: pg.SoftOverlong(scale=0.0), ["SoftOverlong.scale", "remove the part"]),
    "no such level": (lambda: pg.KLInReward(level="turn"), ["KLInReward.level", "'token'", "'sequence'", "'turn'"]),  # type: ignore[arg-type]
    "None where a number is needed": (lambda: pg.GAE(gamma=None), ["GAE.gamma", "in [0, 1]", "None"]),  # type: ignore[arg-type]
    "no cache": (lambda: pg.SoftOverlong(cache=0.0), ["SoftOverlong.cache", "above 0 and at most 1"]),
    "a mode of dynamic sampling": (lambda: pg.DropZeroVariance("skip"), ["'refill', 'reweight' or 'drop'", "skip"]),  # type: ignore[arg-type]
    "a std of something else": (lambda: pg.BatchStd(of="tokens"), ["BatchStd.of", "'rewards'", "tokens"]),  # type: ignore[arg-type]
    "no rounds": (lambda: pg.DropZeroVariance(max_rounds=0), ["max_rounds", "at least 1"]),
    "a mean that never moves": (lambda: pg.RunningMean(decay=1.0), ["RunningMean.decay", "[0, 1)"]),
    "no epoch": (lambda: pg.GradientSteps(epochs=0), ["GradientSteps.epochs", "at least 1"]),
    "a mask at no distance": (lambda: pg.OffPolicySequenceMask(0.0), ["OffPolicySequenceMask.delta", "above 0", "0.0"]),
    "an unknown form of the penalty": (lambda: pg.KLToOld(form="k1"), ["KLToOld.form", "'k3'", "'k2'", "k1"]),  # type: ignore[arg-type]
    "an entropy target without a range": (
        lambda: pg.ExactEntropy(0.01, target=0.2),
        ["ExactEntropy.eta", "from 0 to max_eta = 0.005", "0.01"],
    ),
    "no temperature of labels": (lambda: pg.ClassificationWeight(0.0), ["ClassificationWeight.tau", "above 0"]),
    "labels without classes": (
        lambda: replace(pg.REAL, advantage=(pg.GroupMean(),)),
        ["ClassificationWeight", "advantage is GroupMean", "ClassLabels()"],
    ),
    "labels and another link": (
        lambda: replace(pg.REAL, advantage=(pg.ClassLabels(), pg.GroupStd())),
        ["GroupStd takes a reward, with or without a baseline", "after ClassLabels"],
    ),
    "labels of single tokens": (
        lambda: replace(pg.REAL, ratio=pg.Token()),
        ["ClassificationWeight", "ratio is Token", "ratio=Sequence()"],
    ),
    "influence without a future": (lambda: pg.FutureKL(half_life=0.0), ["FutureKL.half_life", "above 0"]),
    "no such algorithm": (lambda: pg.get_algorithm("grop"), ["'grop'", "did you mean 'grpo'"]),
    "letters that changed places": (lambda: pg.get_algorithm("gpro"), ["did you mean 'grpo'"]),
    "a letter too many": (lambda: pg.get_algorithm("Dr-GRRPO"), ["did you mean 'dr_grpo'"]),
    "nothing near": (lambda: pg.get_algorithm("xyzzy"), ["unknown algorithm 'xyzzy': known: reinforce"]),
    "letters in common": (lambda: pg.get_algorithm("nosuch"), ["unknown algorithm 'nosuch': known: reinforce"]),
    "one sample": (lambda: check_sampling(pg.GRPO, 1, 1.0), ["GroupMean", "one per prompt", "samples_per_prompt"]),
    "one sample, leave-one-out": (lambda: check_sampling(pg.RLOO, 1, 1.0), ["LeaveOneOut", "RunningMean()"]),
    "temperature 0": (lambda: check_sampling(pg.DAPO, 8, 0.0), ["temperature 0", "sampling.temperature"]),
    "dynamic sampling of single samples": (
        lambda: check_sampling(replace(pg.REINFORCE, filters=(pg.DropZeroVariance(),)), 1, 1.0),
        ["DropZeroVariance", "one per prompt"],
    ),
}


BUILT |= {
    "a part where a tuple belongs": (
        lambda: pg.Algorithm(advantage=pg.GroupMean()),  # type: ignore[arg-type]
        ["advantage is a tuple of parts, not GroupMean", "advantage=(GroupMean(),), with the comma"],
    ),
    "a list where a tuple belongs": (
        lambda: pg.Algorithm(terms=[pg.Entropy()]),  # type: ignore[arg-type]
        ["terms is a tuple of parts, not list"],
    ),
    "a class where a part belongs": (
        lambda: replace(pg.GRPO, gate=pg.Clip),
        ["gate holds the class Clip, not a part: write Clip()"],
    ),
    "a class in a tuple": (
        lambda: replace(pg.GRPO, advantage=(pg.GroupMean,)),
        ["advantage holds the class GroupMean, not a part: write GroupMean()"],
    ),
    "no gate": (lambda: replace(pg.GRPO, gate=None), ["gate is None", "OnPolicy()"]),
    "no aggregation": (lambda: replace(pg.GRPO, aggregation=None), ["aggregation is None", "SequenceSum()"]),
    "no step": (lambda: replace(pg.GRPO, update_rule=None), ["update_rule is None", "GradientSteps()"]),
    "a ratio as a gate": (lambda: replace(pg.GRPO, gate=pg.Token()), ["is not a gate but a ratio: put it into ratio"]),
    "an advantage as a term": (
        lambda: replace(pg.GRPO, terms=(pg.GroupMean(),)),
        ["GroupMean(within='group')", "is not a term but an advantage"],
    ),
    "a number as an advantage": (
        lambda: pg.Algorithm(advantage=(3,)),
        ["3 is not an advantage", "inherits policygrad.Advantage"],
    ),  # type: ignore[arg-type]
    "a number as a reference": (
        lambda: replace(pg.GRPO, reference=3),
        ["3 is not a reference", "inherits policygrad.Reference"],
    ),
    "a reference reset that never comes": (
        lambda: Reference(reset_optimizer=True),
        ["Reference.reset_optimizer", "refresh_every or refresh_after_stall", "no effect"],
    ),
    "solved prompts that nobody sees": (
        lambda: replace(pg.SCALE_RL, filters=(pg.DropZeroVariance(), pg.NoPositiveResampling())),
        ["NoPositiveResampling", "DropZeroVariance(mode='drop')"],
    ),
    "a negative stall": (
        lambda: Reference(refresh_after_stall=-1),
        ["Reference.refresh_after_stall", "at least 1 evaluation", "-1"],
    ),
    "a reference that waits and that no part reads": (
        lambda: replace(pg.DR_GRPO, reference=Reference(refresh_after_stall=2)),
        ["no part uses it", "refresh_after_stall=None"],
    ),
}


@pytest.mark.parametrize(("build", "message"), BUILT.values(), ids=BUILT.keys())
def test_refused(build: Callable[[], Any], message: list[str]) -> None:
    with pytest.raises(ValueError, match=r"\w") as error:
        build()
    assert [words for words in message if words not in str(error.value)] == []


def test_what_is_not_refused() -> None:
    check_sampling(pg.REINFORCE, 1, 0.0)
    check_sampling(pg.GRPO, 2, 0.5)
    assert replace(pg.GRPO, update_rule=TWO_STEPS).update_rule.updates == 2
    assert replace(pg.DR_GRPO, reference=None).needs == frozenset()
    assert pg.get_algorithm(" Dr-GRPO ") is pg.DR_GRPO


def test_needs_are_what_the_parts_declare() -> None:
    """No reference model without a KL term, no second forward pass without several steps."""
    assert pg.GRPO.needs == {"logp_ref"}
    assert pg.DR_GRPO.needs == frozenset()
    assert pg.DAPO.needs == {"logp_old"}
    assert pg.RLOO.needs == {"logp_old", "logp_ref"}
    assert replace(pg.DAPO, update_rule=TWO_STEPS).needs == {"logp_old"}


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


@pytest.mark.parametrize(("wrong", "message"), FIELDS.values(), ids=FIELDS.keys())
def test_a_batch_names_the_field_that_does_not_fit(wrong: dict[str, Any], message: list[str]) -> None:
    right = {
        "mask": torch.ones(2, 3, dtype=torch.bool),
        "group": torch.zeros(2, dtype=torch.int64),
        "reward": torch.zeros(2),
    }
    pg.Batch(**right)
    with pytest.raises(ValueError, match=r"Batch\.") as error:
        pg.Batch(**right | wrong)
    assert [words for words in message if words not in str(error.value)] == []


def test_missing_field_names_the_part() -> None:
    batch, logits = make(Shape((3,), 4, seed=0, binary=False))
    logp = policy(logits, batch.tokens, batch.mask)
    bare = replace(batch, logp_ref=None)
    with pytest.raises(ValueError, match=r"KLToReference needs Batch\.logp_ref"):
        pg.surrogate(logp, bare, pg.GRPO.compute_advantages(bare), pg.GRPO)
    with pytest.raises(ValueError, match=r"KLInReward needs Batch\.logp_old"):
        pg.RLOO.compute_advantages(batch)


@pytest.mark.parametrize("call", [pg.surrogate, pg.objective])
def test_a_lone_coefficient_tensor_for_terms_that_aggregate_otherwise(call) -> None:
    batch, logits = make(Shape((3,), 4, seed=0, binary=False))
    algorithm = replace(pg.GRPO, terms=(pg.KLToReference(0.04, "k3", aggregation=pg.TokenMean()),))
    logp, psi = policy(logits, batch.tokens, batch.mask), algorithm.compute_advantages(batch)
    with pytest.raises(ValueError, match=r"KLToReference aggregates differently.*all_coefficients"):
        call(logp, batch, psi, algorithm, algorithm.coefficients(batch))
    call(logp, batch, psi, algorithm, algorithm.all_coefficients(batch))


WIDTHS: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], tuple[Any, ...]], list[str]]] = {
    "psi per completion": (lambda logp, psi, c: (logp, psi[:, 0], c), ["psi has shape [3]", "psi[:, None]"]),
    "psi of another rollout": (lambda logp, psi, c: (logp, psi[:2], c), ["psi has shape [2, 3]"]),
    "logp with the prompt": (lambda logp, psi, c: (logp.repeat(1, 2), psi, c), ["out.logp has shape [3, 6]", "prompt"]),
    "an entropy per completion": (
        lambda logp, psi, c: (pg.Forward(logp, entropy=logp[:, 0]), psi, c),
        ["out.entropy has shape [3]"],
    ),
    "coefficients per completion": (lambda logp, psi, c: (logp, psi, c[:, 0]), ["coef has shape [3]"]),
    "a term's coefficients": (lambda logp, psi, c: (logp, psi, (c, c[0])), ["coef[1] has shape [3]"]),
}


@pytest.mark.parametrize("call", [pg.surrogate, pg.objective])
@pytest.mark.parametrize(("change", "message"), WIDTHS.values(), ids=WIDTHS.keys())
def test_an_argument_of_another_shape_is_named(call, change, message: list[str]) -> None:
    """B = T = 3, where Ψ [B] would broadcast along the tokens."""
    batch = pg.Batch(
        mask=torch.ones(3, 3, dtype=torch.bool),
        group=torch.zeros(3, dtype=torch.int64),
        reward=torch.tensor([1.0, 0.0, 0.0]),
        logp_ref=torch.zeros(3, 3),
    )
    logp, psi, c = torch.zeros(3, 3, requires_grad=True), pg.GRPO.compute_advantages(batch), pg.GRPO.coefficients(batch)
    call(logp, batch, psi, pg.GRPO, (c, c))
    out, psi, coef = change(logp, psi, c)
    with pytest.raises(ValueError, match=r"expected \[B, T\] = \[3, 3\] as in Batch\.mask") as error:
        call(out, batch, psi, pg.GRPO, coef)
    assert [words for words in message if words not in str(error.value)] == []


def test_gate_weight_checks_shapes() -> None:
    batch, logits = make(Shape((3,), 3, seed=0, binary=False), 0.2)
    logp = policy(logits, batch.tokens, batch.mask)
    with pytest.raises(ValueError, match="psi has shape"):
        gate_weight(pg.Forward(logp), batch, torch.ones(3), pg.DR_GRPO)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")], ids=str)
def test_a_reward_that_is_not_finite_is_refused_where_it_is_read(bad: float) -> None:
    mask = torch.ones(4, 2, dtype=torch.bool)
    group, reward = torch.tensor([0, 0, 1, 1]), torch.tensor([1.0, 0.0, bad, 1.0])
    with pytest.raises(ValueError, match=r"row 2: set a number, or exclude the completion"):
        pg.DR_GRPO.compute_advantages(pg.Batch(mask=mask, group=group, reward=reward))
    token_reward = torch.tensor([[0.0, 0.0], [0.0, bad], [0.0, 0.0], [bad, 0.0]])
    with pytest.raises(ValueError, match="in rows 1, 3:"):
        pg.DR_GRPO.compute_advantages(pg.Batch(mask=mask, group=group, reward=torch.ones(4), token_reward=token_reward))
    mask[2] = False
    out = pg.Batch(mask=mask, group=group, reward=reward)
    psi = pg.DR_GRPO.compute_advantages(out)  # a failed reward, never read
    assert psi.isfinite().all()
    counted = torch.ones(4, dtype=torch.bool)
    with pytest.raises(ValueError, match="in row 2"):  # masked, but its group's statistics read it
        pg.DR_GRPO.compute_advantages(replace(out, in_statistics=counted))


def test_one_metric_name_has_one_reduction() -> None:
    with pytest.raises(TypeError, match="'kl' is a Sum and a Max"):
        merge({"kl": Sum(1.0)}, {"kl": Max(1.0)})


def test_reference_by_default() -> None:
    assert pg.Algorithm().reference == Reference()


def test_invalid_filter_order_is_refused() -> None:
    with pytest.raises(ValueError, match="put it first in filters"):
        replace(pg.DAPO, filters=(pg.MaskTruncated(), pg.DropZeroVariance()))


BOUNDS = {
    *(
        "Clip.low",
        "Clip.high",
        "PolicyShaping.low",
        "PolicyShaping.high",
        "FutureKL.low",
        "FutureKL.high",
        "FutureKL.c",
    ),
    *("ClippedImportance.high", "ClipCov.low", "ClipCov.high", "ClipCov.cov_high", "TruncatedIS.cap", "MaskedIS.high"),
    *("PassRateBand.high", "MovingLevel.up", "MismatchMask.high", "ClipReward.high", "ClipAdvantage.high"),
    "DivergenceClip.c",
    *("GradientPreservingClip.high", "GradientPreservingClip.c", "FlippedImportance.high", "FlippedImportance.c"),
}


@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
def test_no_setting_takes_nan_or_an_infinity_that_it_does_not_declare(bad: float) -> None:
    """Infinity is a bound that bounds nothing: `setting(…, unbounded=True)`."""
    taken = set()
    for name in pg.parts.__all__:
        kind = getattr(pg.parts, name)
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            for f in dataclasses.fields(kind):
                if isinstance(getattr(kind(), f.name), float):
                    try:
                        kind(**{f.name: bad})
                    except pg.ConfigError:
                        continue
                    taken.add(f"{name}.{f.name}")
    assert taken == (BOUNDS if bad == math.inf else set())
