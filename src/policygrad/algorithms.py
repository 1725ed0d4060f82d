"""THE MATRIX: every named algorithm as a composition of parts. An algorithm is data; this is all of it."""

from __future__ import annotations

import difflib
from dataclasses import replace

from policygrad.core.advantages import (
    Accepted,
    BatchStd,
    ConstantBaseline,
    GreedyBaseline,
    GroupMean,
    GroupStd,
    LeaveOneOut,
    OptimalBaseline,
    OverGroupMean,
    PassAtK,
    RewardZScores,
    RunningMean,
    TeacherLogRatio,
)
from policygrad.core.aggregation import FixedLength, GroupTokenMean, SequenceMean, SequenceSum, TokenMean
from policygrad.core.algorithm import Algorithm
from policygrad.core.auxiliary import Critic, ImplicitReward, Reference
from policygrad.core.filters import DemonstrationsApart, DropNoSpread, MaskTruncated, NoPositiveResampling
from policygrad.core.gae import GAE, LengthAdaptiveGAE, NStep, Whiten
from policygrad.core.gates import (
    Clip,
    ClipCov,
    DivergenceClip,
    GammaKernel,
    GeometricMean,
    Importance,
    LogClip,
    OnPolicy,
    PolicyShaping,
    SecondMoment,
    SoftGate,
    Taper,
    Unweighted,
    WeightCap,
)
from policygrad.core.process import ImplicitProcess, PrefixValue, ProcessReward
from policygrad.core.ratios import HighEntropy, Sequence, SequenceProduct, Token
from policygrad.core.shaping import KLInReward, SoftOverlong
from policygrad.core.terms import DemonstrationNLL, Entropy, KLCov, KLToOld, KLToReference, PolicyDrift, PositiveNLL
from policygrad.core.trust_region import TrustRegion
from policygrad.core.turns import GroupInGroup
from policygrad.core.updates import FirstOrder
from policygrad.core.vine import SelfNormalisation, SelfNormalised, Vine
from policygrad.errors import ConfigError

REINFORCE = Algorithm("reinforce", psi=(RunningMean(),), gate=OnPolicy(), aggregate=SequenceSum())
RLOO = replace(
    REINFORCE, name="rloo", psi=(LeaveOneOut(),), shaping=(KLInReward(0.05, level="sequence"),), samples_per_prompt=4
)
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
    step=FirstOrder(minibatches=16),
)
GSPO = replace(GRPO, name="gspo", ratio=Sequence(), gate=Clip(3e-4, 4e-4), terms=(), step=FirstOrder(minibatches=4))
CISPO = replace(
    GRPO,
    name="cispo",
    gate=WeightCap(0.0, 5.0),
    aggregate=TokenMean(),
    terms=(),
    shaping=(SoftOverlong(),),
    filters=(DropNoSpread(),),
    step=FirstOrder(minibatches=16),
)
SAPO = replace(GRPO, name="sapo", gate=SoftGate(1.0, 1.05), terms=(), step=FirstOrder(minibatches=4))

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
VINEPPO = replace(PPO, name="vineppo", psi=(PrefixValue(9),), critic=None, step=FirstOrder(epochs=2, minibatches=8))
PPO_PENALTY = replace(PPO, name="ppo_penalty", gate=Importance(), terms=(KLToOld(1.0, target=0.01),), shaping=())
VAPO = replace(
    PPO,
    name="vapo",
    psi=(LengthAdaptiveGAE(0.05),),
    gate=Clip(0.2, 0.28),
    terms=(PositiveNLL(0.1),),
    shaping=(),
    step=FirstOrder(minibatches=16),
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
    step=FirstOrder(minibatches=4),
    reference=Reference(every=200, reset=True),
)
MAGISTRAL = replace(
    GRPO,
    name="magistral",
    psi=(GroupMean(), BatchStd()),
    gate=Clip(0.2, 0.28),
    aggregate=GroupTokenMean(),
    terms=(),
    shaping=(SoftOverlong(scale=0.1),),
    filters=(DropNoSpread(),),
)

REMAX = replace(REINFORCE, name="remax", psi=(GreedyBaseline(),), samples_per_prompt=1)
REINFORCE_PP = Algorithm(
    "reinforce_pp",
    psi=(Whiten(),),
    ratio=Token(),
    gate=Clip(0.2, 0.2),
    aggregate=TokenMean(),
    shaping=(KLInReward(0.01),),
    step=FirstOrder(minibatches=8),
)
REINFORCE_PP_BASELINE = replace(
    REINFORCE_PP,
    name="reinforce_pp_baseline",
    psi=(GroupMean(), Whiten()),
    shaping=(),
    terms=(KLToReference(1e-5, "k2"),),
    step=FirstOrder(),
)
GPG = replace(
    REINFORCE,
    name="gpg",
    psi=(GroupMean(),),
    aggregate=TokenMean(),
    filters=(DropNoSpread("reweight"),),
)
RAFT = Algorithm(
    "raft",
    psi=(Accepted(),),
    ratio=Token(),
    gate=Unweighted(),
    aggregate=TokenMean(),
    step=FirstOrder(minibatches=4),
    behaviour="sampler",
)
MAXRL = replace(GRPO, name="maxrl", psi=(GroupMean(), OverGroupMean()), aggregate=TokenMean(), terms=())
PASSK = replace(GRPO, name="passk", psi=(PassAtK(2),), terms=())
TOPR = Algorithm(
    "topr",
    psi=(ConstantBaseline(0.5),),
    ratio=SequenceProduct(),
    gate=Taper(),
    step=FirstOrder(minibatches=8),
    behaviour="sampler",
)
ASYMRE = replace(TOPR, name="asymre", psi=(GroupMean(), ConstantBaseline(-0.1)), ratio=Token(), gate=Unweighted())
SCALE_RL = replace(
    GRPO,
    name="scale_rl",
    psi=(GroupMean(), BatchStd()),
    gate=WeightCap(0.0, 5.0),
    aggregate=GroupTokenMean(),
    terms=(),
    filters=(DropNoSpread("drop"), NoPositiveResampling(0.9)),
    behaviour="sampler",
)

LITE_PPO = replace(MAXRL, name="lite_ppo", psi=(GroupMean(), BatchStd(of="rewards")), step=FirstOrder(minibatches=8))
_OUTCOMES = (REMAX, REINFORCE_PP, REINFORCE_PP_BASELINE, GPG, RAFT, MAXRL, PASSK, TOPR, ASYMRE, SCALE_RL, LITE_PPO)

GMPO = replace(GRPO, name="gmpo", gate=GeometricMean(0.4, 0.4), terms=(), step=FirstOrder(minibatches=8))
DPPO = replace(
    DR_GRPO,
    name="dppo",
    gate=DivergenceClip("tv", 0.15),
    step=FirstOrder(minibatches=8),
    behaviour="sampler",
)
M2PO = replace(
    GRPO,
    name="m2po",
    gate=SecondMoment(0.04),
    aggregate=TokenMean(),
    terms=(),
    step=FirstOrder(minibatches=4),
    behaviour="sampler",
)
LUSPO = replace(GSPO, name="luspo", gate=Clip(2e-3, 2.5e-3), aggregate=SequenceSum(), step=FirstOrder(minibatches=4))
VESPO = replace(M2PO, name="vespo", ratio=SequenceProduct(), gate=GammaKernel(), step=FirstOrder(minibatches=8))
CPGD = replace(
    GRPO,
    name="cpgd",
    gate=LogClip(0.2, 0.2),
    aggregate=TokenMean(),
    terms=(PolicyDrift(0.001),),
    step=FirstOrder(minibatches=2),
)
CLIP_COV = replace(
    GRPO,
    name="clip_cov",
    gate=ClipCov(1.0, 1.0, share=2e-4),
    aggregate=TokenMean(),
    terms=(),
    filters=(DropNoSpread(),),
    step=FirstOrder(minibatches=8),
)
KL_COV = replace(CLIP_COV, name="kl_cov", gate=Importance(), terms=(KLCov(1.0, share=2e-3),))
HIGH_ENTROPY = replace(DAPO, name="high_entropy", corrections=(HighEntropy(0.2),), step=FirstOrder(minibatches=16))
_TRUST = (GMPO, DPPO, M2PO, LUSPO, VESPO, CPGD, CLIP_COV, KL_COV, HIGH_ENTROPY)

GDPO = replace(
    GRPO, name="gdpo", psi=(RewardZScores(), BatchStd()), terms=(), step=FirstOrder(minibatches=4), samples_per_prompt=4
)
GIGPO = replace(
    GRPO,
    name="gigpo",
    psi=(GroupInGroup(),),
    aggregate=TokenMean(),
    terms=(KLToReference(0.01, "k3"),),
    step=FirstOrder(minibatches=4),
)
LUFFY = replace(
    GRPO,
    name="luffy",
    gate=PolicyShaping(),
    aggregate=TokenMean(),
    terms=(),
    step=FirstOrder(minibatches=2),
    samples_per_prompt=7,
)
CHORD = replace(
    GRPO,
    name="chord",
    aggregate=TokenMean(),
    terms=(DemonstrationNLL(0.1),),
    filters=(DemonstrationsApart(),),
    samples_per_prompt=8,
)
_SEVERAL = (GDPO, GIGPO, LUFFY, CHORD)

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

TRPO_VINE = replace(
    TRPO,
    name="trpo_vine",
    psi=(Vine(),),
    gate=SelfNormalised(),
    aggregate=GroupTokenMean(),
    terms=(SelfNormalisation(),),
    critic=None,
    samples_per_prompt=4,
    behaviour="sampler",
)
_BRANCHING = (TRPO_VINE,)

_CRITICS = (A2C, TRPO, NATURAL, PPO, PPO_PENALTY, VAPO, VINEPPO)
_GROUPS = (GRPO, GRPO_PROCESS, ITERATIVE_GRPO, DR_GRPO, DAPO, PRORL, MAGISTRAL, GSPO, GSPO_TOKEN, CISPO, SAPO)
_FAMILIES = ((REINFORCE, RLOO, OPO), _CRITICS, _GROUPS, _OUTCOMES, _TRUST, _SEVERAL, _TWO_MODELS, _BRANCHING)
ALGORITHMS: dict[str, Algorithm] = {a.name: a for family in _FAMILIES for a in family}


def algorithm(name: str) -> Algorithm:
    """The named algorithm.

    Raises:
        ConfigError: an unknown name, with the nearest known one.
    """
    key = name.strip().lower().replace("-", "_")
    if key not in ALGORITHMS:
        near = difflib.get_close_matches(key, ALGORITHMS, n=3, cutoff=0.6)
        near.sort(key=lambda known: sorted(known) != sorted(key))  # letters that changed places, before others
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(ALGORITHMS)}"
        raise ConfigError(f"unknown algorithm {name!r}: {hint}")
    return ALGORITHMS[key]
