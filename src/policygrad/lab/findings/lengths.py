"""How tokens are averaged, γ, and what either does to the length of answers. All exact."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from policygrad.core.advantages import LeaveOneOut
from policygrad.core.aggregates import FixedLength, SequenceMean, SequenceSum, TokenMean
from policygrad.core.protocols import Aggregation
from policygrad.core.values import NStep
from policygrad.lab.calculus import derivative
from policygrad.lab.estimators import estimates
from policygrad.lab.finding import Finding, percent, verdict
from policygrad.lab.findings.baselines import MONTE_CARLO, centred
from policygrad.lab.groups import all_steps
from policygrad.lab.measurement import measure
from policygrad.lab.setting import Setting
from policygrad.lab.worlds import directional, one_prompt

GROUP = 4


def length_gradient(setting: Setting, right: bool) -> Tensor:
    """[P] ∇E[|o|] among the right, or the wrong, completions."""
    where = setting.world.reward == (1.0 if right else 0.0)
    return derivative(lambda theta: setting.world.mean_length(theta, where), setting.theta)


def sequence_mean(seed: int = 0) -> Finding:
    """The weight of a token by the length and the rightness of its completion, relative to the unbiased sequence sum."""
    setting = one_prompt(p=0.5, seed=seed)
    steps = all_steps(setting, GROUP)

    def weights(aggregate: Aggregation, key: str) -> tuple[float, ...]:
        rows = measure(replace(centred(LeaveOneOut()), aggregate=aggregate), setting, steps).length
        return tuple(row[key] for row in rows if key in row)

    kinds: dict[str, Aggregation] = {
        "sum": SequenceSum(),
        "sequence": SequenceMean(),
        "token": TokenMean(),
        "fixed": FixedLength(),
    }
    relative = {
        f"{name}_{key}": tuple(w / s for w, s in zip(weights(kind, key), weights(SequenceSum(), key), strict=True))
        for name, kind in kinds.items()
        for key in ("right", "wrong")
    }
    lengths = tuple(map(float, sorted(set(setting.world.tree.lengths.tolist()))))
    shift = _shift(setting, SequenceMean())
    right, wrong = relative["sequence_right"], relative["sequence_wrong"]
    holds = right[-1] < right[0] and wrong[-1] < wrong[0]
    return Finding(
        "sequence_mean",
        "The sequence mean favours short right and long wrong answers.",
        holds,
        f"Beside the sequence sum, a token of a right answer of the longest length has {right[-1] / right[0]:.2f} of the weight "
        f"of a token of the shortest, and a token of a wrong one {wrong[-1] / wrong[0]:.2f}: short right answers are "
        f"{verdict(right[-1] < right[0], 'favoured', 'not favoured')}, long wrong ones "
        f"{verdict(wrong[-1] < wrong[0], 'spared', 'not spared')}. For the same first gain in J the mean length of wrong "
        f"answers moves by {shift[0]:+.3f} tokens per unit of J more than along ∇J, that of right ones by {shift[1]:+.3f}.",
        {
            "right": right[-1] / right[0],
            "wrong": wrong[-1] / wrong[0],
            "shift_wrong": shift[0],
            "shift_right": shift[1],
        },
        curves={"length": lengths, **{key: v for key, v in relative.items() if len(v) == len(lengths)}},
    )


def _shift(setting: Setting, aggregate: Aggregation) -> tuple[float, float]:
    """How much faster E|o| of (wrong, right) answers grows along E g than along ∇J, per unit of ‖∇J‖² gained in J."""
    algorithm = replace(centred(LeaveOneOut()), aggregate=aggregate)
    mean = estimates(algorithm, setting, all_steps(setting, GROUP)).mean
    unit = setting.world.gradient(setting.theta)
    wrong, right = (
        directional(setting, length_gradient(setting, right), mean)
        - directional(setting, length_gradient(setting, right), unit)
        for right in (False, True)
    )
    square = float(unit @ unit)
    return wrong / square, right / square


def brevity(seed: int = 0) -> Finding:
    """γ < 1 on a reward at the end is γ^(tokens to go)·R: right answers are pushed the harder the shorter they are."""
    setting = one_prompt(length=4, seed=seed)
    gammas = (1.0, 0.99, 0.9, 0.7, 0.5)
    state = torch.zeros(len(setting.world.tree.prefixes), dtype=torch.float64)
    setting, steps = replace(setting, values=state), all_steps(setting, 1)
    length = length_gradient(setting, True)
    pace, cosine = [], []
    truth = setting.world.gradient(setting.theta)
    for gamma in gammas:
        mean = estimates(replace(MONTE_CARLO, psi=(NStep(0, gamma),)), setting, steps).mean
        pace.append(directional(setting, length, mean) / float(truth @ truth))
        cosine.append(float(torch.cosine_similarity(mean, truth, dim=0)))
    holds = all(a > b for a, b in pairwise(pace))
    return Finding(
        "brevity",
        "γ < 1 is a hidden penalty on length.",
        holds,
        f"For the same first gain in J, right answers change their mean length by {pace[0]:+.3f} tokens per unit of J at γ = 1, "
        f"{pace[2]:+.3f} at 0.9 and {pace[4]:+.3f} at 0.5: {verdict(holds, 'the shorter the smaller γ', 'not always shorter')}. "
        f"The cosine with ∇J is {cosine[1]:.4f} at 0.99, {cosine[2]:.3f} at 0.9 and {cosine[4]:.3f} at 0.5; "
        f"{percent(1 - cosine[2] ** 2)} of the direction at 0.9 is not the gradient.",
        {f"pace_{g:g}": x for g, x in zip(gammas, pace, strict=True)},
        curves={"gamma": gammas, "length_change": tuple(pace), "cosine": tuple(cosine)},
    )
