"""THE MATRIX: every named algorithm as a composition of parts. An algorithm is data; this is all of it."""

from __future__ import annotations

import difflib
from dataclasses import replace

from policygrad.core.advantages import BatchStd, GroupMean, GroupStd, LeaveOneOut, OptimalBaseline, RunningMean
from policygrad.core.aggregates import FixedLength, GroupTokenMean, SequenceMean, SequenceSum, TokenMean
from policygrad.core.algorithm import Algorithm
from policygrad.core.critic import Critic
from policygrad.core.distillation import TeacherLogRatio
from policygrad.core.filters import DropNoSpread, MaskTruncated
from policygrad.core.gates import Clip, Importance, OnPolicy, SoftGate, WeightCap
from policygrad.core.process import ImplicitProcess, PrefixValue, ProcessReward
from policygrad.core.ratios import Sequence, Token
from policygrad.core.reference import Reference
from policygrad.core.reward_model import ImplicitReward
from policygrad.core.shaping import KLInReward, SoftOverlong
from policygrad.core.terms import Entropy, KLToOld, KLToReference, PositiveNLL
from policygrad.core.trust_region import TrustRegion
from policygrad.core.update_rules import FirstOrder
from policygrad.core.values import GAE, LengthAdaptiveGAE, NStep, Whiten
from policygrad.errors import ConfigError

REINFORCE = Algorithm("reinforce", psi=(RunningMean(),), gate=OnPolicy(), aggregate=SequenceSum())
RLOO = replace(REINFORCE, name="rloo", psi=(LeaveOneOut(),), shaping=(KLInReward(0.05),), samples_per_prompt=4)
OPO = replace(REINFORCE, name="opo", psi=(OptimalBaseline("length", leave_one_out=False),))
GRPO = Algorithm(
    "grpo",
    psi=(GroupMean(), GroupStd()),
    ratio=Token(),
    gate=Clip(0.2, 0.2),
    aggregate=SequenceMean(),
    terms=(KLToReference(0.04, "k3"),),
)
GRPO_PROCESS = replace(GRPO, name="grpo_process", psi=(ProcessReward(),))
DR_GRPO = replace(GRPO, name="dr_grpo", psi=(GroupMean(),), aggregate=FixedLength(), terms=())
DAPO = replace(
    GRPO,
    name="dapo",
    gate=Clip(0.2, 0.28),
    aggregate=TokenMean(),
    terms=(),
    shaping=(SoftOverlong(),),
    filters=(DropNoSpread(), MaskTruncated()),
)
GSPO = replace(GRPO, name="gspo", ratio=Sequence(), gate=Clip(3e-4, 4e-4), terms=())
CISPO = replace(
    GRPO, name="cispo", gate=WeightCap(0.0, 5.0), aggregate=TokenMean(), terms=(), filters=(DropNoSpread(),)
)
SAPO = replace(GRPO, name="sapo", gate=SoftGate(1.0, 1.05), terms=())

A2C = replace(
    REINFORCE, name="a2c", psi=(NStep(5),), aggregate=TokenMean(), terms=(Entropy(0.01),), critic=Critic(clip=0.0)
)
TRPO = Algorithm(
    "trpo",
    psi=(GAE(1.0, 0.95),),
    ratio=Token(),
    gate=Importance(),
    aggregate=TokenMean(),
    step=TrustRegion(0.01),
    critic=Critic(),
)
NATURAL = replace(TRPO, name="natural", step=TrustRegion(0.01, line_search=False))
PPO = Algorithm(
    "ppo",
    psi=(GAE(1.0, 0.95), Whiten()),
    ratio=Token(),
    gate=Clip(0.2, 0.2),
    aggregate=TokenMean(),
    shaping=(KLInReward(0.05),),
    step=FirstOrder(epochs=4),
    critic=Critic(),
)
VINEPPO = replace(PPO, name="vineppo", psi=(PrefixValue(9),), critic=None)
PPO_PENALTY = replace(PPO, name="ppo_penalty", gate=Importance(), terms=(KLToOld(1.0, target=0.01),), shaping=())
VAPO = replace(
    PPO,
    name="vapo",
    psi=(LengthAdaptiveGAE(0.05),),
    gate=Clip(0.2, 0.28),
    terms=(PositiveNLL(0.1),),
    shaping=(),
    step=FirstOrder(),
    critic=Critic(lam=1.0, pretrain=20),
    samples_per_prompt=16,
)

ITERATIVE_GRPO = replace(GRPO, name="iterative_grpo", step=FirstOrder(epochs=2), reference=Reference(every=100))
GSPO_TOKEN = replace(GSPO, name="gspo_token")
PRORL = replace(
    DAPO,
    name="prorl",
    gate=Clip(0.2, 0.4),
    terms=(KLToReference(1e-4, "k2"),),
    reference=Reference(every=200, reset=True),
)
MAGISTRAL = replace(
    GRPO,
    name="magistral",
    psi=(GroupMean(), BatchStd()),
    gate=Clip(0.2, 0.28),
    aggregate=GroupTokenMean(),
    terms=(),
    filters=(DropNoSpread(),),
)

DISTILL = Algorithm(
    "distill",
    psi=(TeacherLogRatio(),),
    ratio=Token(),
    gate=Importance(),
    aggregate=TokenMean(),
    samples_per_prompt=4,
)
PRIME = Algorithm(
    "prime",
    psi=(LeaveOneOut(), ImplicitProcess()),
    ratio=Token(),
    gate=Clip(0.2, 0.2),
    aggregate=TokenMean(),
    filters=(DropNoSpread(),),
    step=FirstOrder(minibatches=4),
    reward_model=ImplicitReward(),
    samples_per_prompt=4,
)

_TWO_MODELS = (DISTILL, PRIME)
_CRITICS = (A2C, TRPO, NATURAL, PPO, PPO_PENALTY, VAPO, VINEPPO)
_GROUPS = (GRPO, GRPO_PROCESS, ITERATIVE_GRPO, DR_GRPO, DAPO, PRORL, MAGISTRAL, GSPO, GSPO_TOKEN, CISPO, SAPO)
ALGORITHMS: dict[str, Algorithm] = {a.name: a for a in (REINFORCE, RLOO, OPO, *_CRITICS, *_GROUPS, *_TWO_MODELS)}


def algorithm(name: str) -> Algorithm:
    """The named algorithm.

    Raises:
        ConfigError: an unknown name, with the nearest known one.
    """
    key = name.strip().lower().replace("-", "_")
    if key not in ALGORITHMS:
        near = difflib.get_close_matches(key, ALGORITHMS, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(f"unknown algorithm {name!r}: {hint}known: {', '.join(ALGORITHMS)}")
    return ALGORITHMS[key]
