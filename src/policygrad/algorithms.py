"""The named algorithms, each a composition of parts."""

from __future__ import annotations

import difflib
from dataclasses import replace

from policygrad.core.advantages import (
    BatchStd,
    ClassLabels,
    ConstantBaseline,
    DivideByGroupMean,
    GreedyBaseline,
    GroupMean,
    GroupStd,
    LeaveOneOut,
    OptimalBaseline,
    OptimalValue,
    PassAtK,
    PreferencePairs,
    RejectionSampling,
    RewardZScores,
    RunningMean,
    TeacherLogRatio,
)
from policygrad.core.aggregation import FixedLength, GroupTokenMean, SequenceMean, SequenceSum, TokenMean
from policygrad.core.algorithm import Algorithm
from policygrad.core.auxiliary import Critic, ImplicitReward, Reference
from policygrad.core.filters import (
    Downsample,
    DropZeroVariance,
    MaskTruncated,
    NoPositiveResampling,
    SeparateDemonstrations,
)
from policygrad.core.gae import GAE, LengthAdaptiveGAE, NStep, Whiten
from policygrad.core.gates import (
    ClassificationWeight,
    Clip,
    ClipCov,
    ClippedImportance,
    DivergenceClip,
    FutureKL,
    GammaKernel,
    GeometricMean,
    Importance,
    LogClip,
    OnPolicy,
    PolicyShaping,
    SecondMomentFilter,
    SigmoidGate,
    TaperedImportance,
    UnitWeight,
)
from policygrad.core.process import ImplicitProcess, PrefixValue, ProcessReward
from policygrad.core.ratios import HighEntropy, OffPolicySequenceMask, Sequence, SequenceProduct, Token
from policygrad.core.shaping import KLInReward, SoftOverlong
from policygrad.core.soft_clips import FlippedImportance, GradientPreservingClip
from policygrad.core.terms import (
    DemonstrationNLL,
    Entropy,
    ExactEntropy,
    ExactKLToReference,
    KLCov,
    KLToOld,
    KLToReference,
    ObservationNLL,
    PositiveNLL,
)
from policygrad.core.trust_region import TrustRegion
from policygrad.core.turns import GroupInGroup
from policygrad.core.updates import GradientSteps
from policygrad.core.vine import SelfNormalisation, SelfNormalised, Vine
from policygrad.errors import ConfigError

# One sample of a prompt, or several on-policy.
REINFORCE = Algorithm("reinforce", advantage=(RunningMean(),), gate=OnPolicy(), aggregation=SequenceSum())
RLOO = replace(
    REINFORCE,
    name="rloo",
    advantage=(LeaveOneOut(),),
    shaping=(KLInReward(0.05, level="sequence"),),
    samples_per_prompt=4,
)
OPO = replace(REINFORCE, name="opo", advantage=(OptimalBaseline("length", leave_one_out=False),))

# A critic, or values from fresh completions.
A2C = replace(
    REINFORCE,
    name="a2c",
    advantage=(NStep(5),),
    aggregation=TokenMean(),
    terms=(Entropy(0.01),),
    critic=Critic(clip=0.0),
)
TRPO = Algorithm(
    "trpo",
    advantage=(GAE(1.0, 0.95),),
    ratio=Token(),
    gate=Importance(),
    aggregation=TokenMean(),
    update_rule=TrustRegion(0.01),
    critic=Critic(),
)
NATURAL = replace(TRPO, name="natural", update_rule=TrustRegion(0.01, line_search=False))
PPO = Algorithm(
    "ppo",
    advantage=(GAE(1.0, 0.95), Whiten()),
    ratio=Token(),
    gate=Clip(0.2, 0.2),
    aggregation=TokenMean(),
    shaping=(KLInReward(0.05),),
    update_rule=GradientSteps(epochs=4),
    critic=Critic(),
)
PPO_PENALTY = replace(PPO, name="ppo_penalty", gate=Importance(), terms=(KLToOld(1.0, target=0.01),), shaping=())
VAPO = replace(
    PPO,
    name="vapo",
    advantage=(LengthAdaptiveGAE(0.05),),
    gate=Clip(0.2, 0.28),
    terms=(PositiveNLL(0.1),),
    shaping=(),
    update_rule=GradientSteps(minibatches=16),
    critic=Critic(lam=1.0, pretrain=20),
    samples_per_prompt=16,
)
PF_PPO = replace(
    PPO,
    name="pf_ppo",
    shaping=(KLInReward(0.01),),
    filters=(Downsample(2, by="best_one", statistics="kept"),),
    update_rule=GradientSteps(epochs=3, minibatches=2),
    samples_per_prompt=5,
)
VINEPPO = replace(
    PPO, name="vineppo", advantage=(PrefixValue(9),), critic=None, update_rule=GradientSteps(epochs=2, minibatches=8)
)

# Completions of one prompt compared.
GRPO = Algorithm(
    "grpo",
    advantage=(GroupMean(), GroupStd()),
    ratio=Token(),
    gate=Clip(0.2, 0.2),
    aggregation=SequenceMean(),
    terms=(KLToReference(0.04, "k3"),),
)
GRPO_PROCESS = replace(GRPO, name="grpo_process", advantage=(ProcessReward(),))
ITERATIVE_GRPO = replace(
    GRPO, name="iterative_grpo", update_rule=GradientSteps(epochs=2), reference=Reference(refresh_every=100)
)
DR_GRPO = replace(GRPO, name="dr_grpo", advantage=(GroupMean(),), aggregation=FixedLength(), terms=())
DAPO = replace(
    GRPO,
    name="dapo",
    gate=Clip(0.2, 0.28),
    aggregation=TokenMean(),
    terms=(),
    shaping=(SoftOverlong(),),
    filters=(DropZeroVariance(), MaskTruncated()),
    update_rule=GradientSteps(minibatches=16),
)
PRORL = replace(
    DAPO,
    name="prorl",
    gate=Clip(0.2, 0.4),
    terms=(KLToReference(1e-4, "k2"),),
    update_rule=GradientSteps(minibatches=4),
    reference=Reference(refresh_every=200, reset_optimizer=True),
)
MAGISTRAL = replace(
    GRPO,
    name="magistral",
    advantage=(GroupMean(), BatchStd()),
    gate=Clip(0.2, 0.28),
    aggregation=GroupTokenMean(),
    terms=(),
    shaping=(SoftOverlong(scale=0.1),),
    filters=(DropZeroVariance(),),
)
GSPO = replace(
    GRPO, name="gspo", ratio=Sequence(), gate=Clip(3e-4, 4e-4), terms=(), update_rule=GradientSteps(minibatches=4)
)
GSPO_TOKEN = replace(GSPO, name="gspo_token")
CISPO = replace(
    GRPO,
    name="cispo",
    gate=ClippedImportance(0.0, 5.0),
    aggregation=TokenMean(),
    terms=(),
    shaping=(SoftOverlong(),),
    filters=(DropZeroVariance(),),
    update_rule=GradientSteps(minibatches=16),
)
SAPO = replace(GRPO, name="sapo", gate=SigmoidGate(1.0, 1.05), terms=(), update_rule=GradientSteps(minibatches=4))

# Other baselines and other objectives than the mean reward.
REMAX = replace(REINFORCE, name="remax", advantage=(GreedyBaseline(),), samples_per_prompt=1)
ASTAR_PO = replace(
    REMAX,
    name="astar_po",
    advantage=(OptimalValue(),),
    ratio=Token(),
    gate=UnitWeight(),
    terms=(KLToReference(1e-3, "k2", level="sequence"),),
    update_rule=GradientSteps(minibatches=2),
)
REINFORCE_PP = Algorithm(
    "reinforce_pp",
    advantage=(Whiten(),),
    ratio=Token(),
    gate=Clip(0.2, 0.2),
    aggregation=TokenMean(),
    shaping=(KLInReward(0.01),),
    update_rule=GradientSteps(minibatches=8),
)
REINFORCE_PP_BASELINE = replace(
    REINFORCE_PP,
    name="reinforce_pp_baseline",
    advantage=(GroupMean(), Whiten()),
    shaping=(),
    terms=(KLToReference(1e-5, "k2"),),
    update_rule=GradientSteps(),
)
ONLINE_DPO = replace(REINFORCE, name="online_dpo", advantage=(PreferencePairs(0.1),), samples_per_prompt=2)
OTB = replace(
    GRPO,
    name="otb",
    advantage=(OptimalBaseline("logits", leave_one_out=False),),
    aggregation=TokenMean(),
    terms=(),
)
GPG = replace(
    REINFORCE, name="gpg", advantage=(GroupMean(),), aggregation=TokenMean(), filters=(DropZeroVariance("reweight"),)
)
RAFT = Algorithm(
    "raft",
    advantage=(RejectionSampling(),),
    ratio=Token(),
    gate=UnitWeight(),
    aggregation=TokenMean(),
    update_rule=GradientSteps(minibatches=4),
    old_policy="sampler",
)
RAFT_PP = replace(RAFT, name="raft_pp", gate=Clip(0.2, 0.2), old_policy="learner")
MAXRL = replace(GRPO, name="maxrl", advantage=(GroupMean(), DivideByGroupMean()), aggregation=TokenMean(), terms=())
PASSK = replace(GRPO, name="passk", advantage=(PassAtK(2),), terms=())
TOPR = Algorithm(
    "topr",
    advantage=(ConstantBaseline(0.5),),
    ratio=SequenceProduct(),
    gate=TaperedImportance(),
    update_rule=GradientSteps(minibatches=8),
    old_policy="sampler",
)
ASYMRE = replace(TOPR, name="asymre", advantage=(GroupMean(), ConstantBaseline(-0.1)), ratio=Token(), gate=UnitWeight())
DRO = replace(ASYMRE, name="dro", advantage=(GroupMean(),), terms=(KLToOld(0.05, "k2"),))
SCALE_RL = replace(
    GRPO,
    name="scale_rl",
    advantage=(GroupMean(), BatchStd()),
    gate=ClippedImportance(0.0, 5.0),
    aggregation=GroupTokenMean(),
    terms=(),
    filters=(DropZeroVariance("drop"), NoPositiveResampling(0.9)),
    old_policy="sampler",
    head="fp32",
)
LITE_PPO = replace(
    MAXRL, name="lite_ppo", advantage=(GroupMean(), BatchStd(of="rewards")), update_rule=GradientSteps(minibatches=8)
)

GFPO = replace(
    LITE_PPO,
    name="gfpo",
    advantage=(GroupMean(), GroupStd(ddof=0)),
    terms=(KLToReference(0.001, "k3"), Entropy(0.001)),
    filters=(Downsample(4, by="shortest", statistics="kept"),),
    update_rule=GradientSteps(),
)

# Other bounds on the change of the policy.
GMPO = replace(GRPO, name="gmpo", gate=GeometricMean(0.4, 0.4), terms=(), update_rule=GradientSteps(minibatches=8))
DPPO = replace(
    DR_GRPO,
    name="dppo",
    gate=DivergenceClip("tv", 0.15, c=10_000.0),
    update_rule=GradientSteps(minibatches=8),
    old_policy="sampler",
)
PRIME_RL = replace(
    DPPO,
    name="prime_rl",
    gate=DivergenceClip("tv", 0.2),
    aggregation=TokenMean(),
    terms=(KLToOld(2e-3, "k2"),),
    filters=(DropZeroVariance("drop"),),
    update_rule=GradientSteps(),
)
DEEPSEEK_V32 = replace(
    GRPO,
    name="deepseek_v32",
    advantage=(GroupMean(),),
    corrections=(OffPolicySequenceMask(0.5),),
    terms=(KLToReference(0.001, "r*k3"),),
    update_rule=GradientSteps(minibatches=4),
    old_policy="sampler",
)
M2PO = replace(
    GRPO,
    name="m2po",
    gate=SecondMomentFilter(0.04),
    aggregation=TokenMean(),
    terms=(),
    update_rule=GradientSteps(minibatches=4),
    old_policy="sampler",
)
LUSPO = replace(GSPO, name="luspo", gate=Clip(2e-3, 2.5e-3), aggregation=SequenceSum())
VESPO = replace(
    M2PO, name="vespo", ratio=SequenceProduct(), gate=GammaKernel(), update_rule=GradientSteps(minibatches=8)
)
CPGD = replace(
    GRPO,
    name="cpgd",
    gate=LogClip(0.2, 0.2),
    aggregation=TokenMean(),
    terms=(KLToOld(0.001, cap=2.0),),
    update_rule=GradientSteps(minibatches=2),
)
CLIP_COV = replace(
    GRPO,
    name="clip_cov",
    gate=ClipCov(1.0, 1.0, fraction=2e-4),
    aggregation=TokenMean(),
    terms=(),
    filters=(DropZeroVariance(),),
    update_rule=GradientSteps(minibatches=8),
)
CE_GPPO = replace(CLIP_COV, name="ce_gppo", gate=GradientPreservingClip(0.2, 0.2, beta_low=0.75, beta_high=1.0))
ASPO = replace(
    GRPO,
    name="aspo",
    gate=FlippedImportance(0.2, 0.2),
    aggregation=TokenMean(),
    terms=(KLToReference(0.001, "k3"),),
    filters=(DropZeroVariance("drop"),),
    update_rule=GradientSteps(epochs=3, minibatches=4),
    samples_per_prompt=16,
)
KL_COV = replace(CLIP_COV, name="kl_cov", gate=Importance(), terms=(KLCov(1.0, fraction=2e-3),))
REAL = replace(
    GRPO,
    name="real",
    advantage=(ClassLabels(),),
    ratio=Sequence(),
    gate=ClassificationWeight(),
    terms=(),
    update_rule=GradientSteps(minibatches=4),
)
FIPO = replace(
    DAPO,
    name="fipo",
    gate=FutureKL(0.2, 0.28),
    filters=(DropZeroVariance(),),
    update_rule=GradientSteps(minibatches=8),
)
SKYWORK_OR1 = replace(
    GRPO,
    name="skywork_or1",
    aggregation=TokenMean(),
    terms=(ExactEntropy(0.0, target=0.2),),
    filters=(DropZeroVariance("drop"),),
)
HIGH_ENTROPY = replace(DAPO, name="high_entropy", corrections=(HighEntropy(0.2),))

# Several rewards, turns, or demonstrations.
GDPO = replace(
    GRPO,
    name="gdpo",
    advantage=(RewardZScores(), BatchStd()),
    terms=(),
    update_rule=GradientSteps(minibatches=4),
    samples_per_prompt=4,
)
GIGPO = replace(
    GRPO,
    name="gigpo",
    advantage=(GroupInGroup(),),
    aggregation=TokenMean(),
    terms=(KLToReference(0.01, "k3"),),
    update_rule=GradientSteps(minibatches=4),
)
LUFFY = replace(
    GRPO,
    name="luffy",
    gate=PolicyShaping(),
    aggregation=TokenMean(),
    terms=(),
    update_rule=GradientSteps(minibatches=2),
    samples_per_prompt=7,
)
CHORD = replace(
    GRPO,
    name="chord",
    aggregation=TokenMean(),
    terms=(DemonstrationNLL(0.1),),
    filters=(SeparateDemonstrations(),),
)

ECHO = replace(GRPO, name="echo", terms=(ObservationNLL(0.05),))

# Several players.
SPIRAL = replace(
    DR_GRPO,
    name="spiral",
    advantage=(RunningMean(0.95, by="role", per="sample"),),
    update_rule=GradientSteps(epochs=2),
    samples_per_prompt=1,
)

# A teacher, or a reward model beside the policy.
DISTILL = Algorithm(
    "distill",
    advantage=(TeacherLogRatio(),),
    ratio=Token(),
    gate=Importance(),
    aggregation=TokenMean(),
    samples_per_prompt=4,
)
# The policy is its own teacher, which reads more than the policy. Prompts of plain text have the question last.
SDPO = replace(
    DISTILL,
    name="sdpo",
    advantage=(TeacherLogRatio(0.0),),
    terms=(KLToReference(1.0, "r*k3", cap=2.0),),
    reference=Reference(
        ema=0.05,
        templates=(
            "A correct answer to the question below is:\n{success}\n\nThe question:\n{prompt}",
            "An earlier answer to the question below was wrong:\n{feedback}\n\nThe question:\n{prompt}",
        ),
    ),
    samples_per_prompt=8,
    old_policy="sampler",
)
SDFT = replace(
    SDPO,
    name="sdft",
    aggregation=SequenceMean(),
    terms=(ExactKLToReference(),),
    reference=Reference(
        ema=0.01,
        templates=(
            "An example of an answer to the question below is:\n{demonstration}\n\nThe question:\n{prompt}",
            "An example of an answer to the question below is:\n{answer}\n\nThe question:\n{prompt}",
        ),
    ),
    samples_per_prompt=1,
    old_policy="learner",
)
OPSD = replace(
    SDFT,
    name="opsd",
    aggregation=TokenMean(),
    terms=(ExactKLToReference(alpha=0.5, over="vocabulary"),),
    reference=Reference(
        templates=(
            "A solution of the problem below is:\n{solution}\n\nThe problem:\n{prompt}",
            "A solution of the problem below is:\n{demonstration}\n\nThe problem:\n{prompt}",
            "A solution of the problem below is:\n{answer}\n\nThe problem:\n{prompt}",
        )
    ),
)
PRIME = Algorithm(
    "prime",
    advantage=(LeaveOneOut(), ImplicitProcess()),
    ratio=Token(),
    gate=Clip(0.2, 0.2),
    aggregation=TokenMean(),
    filters=(DropZeroVariance(),),
    update_rule=GradientSteps(minibatches=4),
    reward_model=ImplicitReward(),
    samples_per_prompt=4,
)

# Several next tokens of one state compared.
TRPO_VINE = replace(
    TRPO,
    name="trpo_vine",
    advantage=(Vine(),),
    gate=SelfNormalised(),
    aggregation=GroupTokenMean(),
    terms=(SelfNormalisation(),),
    critic=None,
    samples_per_prompt=4,
    old_policy="sampler",
)

# The algorithms by name, in the order above.
ALGORITHMS: dict[str, Algorithm] = {
    value.name: value for value in list(globals().values()) if isinstance(value, Algorithm)
}


def get_algorithm(name: str) -> Algorithm:
    """Return an algorithm by name; case, dashes and underscores do not matter.

    Raises:
        ConfigError: an unknown name; the message suggests the nearest one.
    """
    key = name.strip().lower().replace("-", "_")
    if key not in ALGORITHMS:
        near = difflib.get_close_matches(key, ALGORITHMS, n=3, cutoff=0.6)
        near.sort(key=lambda candidate: sorted(candidate) != sorted(key))  # swapped letters first
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(ALGORITHMS)}"
        raise ConfigError(f"unknown algorithm {name!r}: {hint}")
    return ALGORITHMS[key]
