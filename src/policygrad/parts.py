"""The parts of the equation, and the algorithms composed of them: `from policygrad.parts import Clip, GRPO`."""

from policygrad.utils.lazy_exports import export_lazily

_HOME = {
    "policygrad.algorithms": (
        "A2C ASPO ASTAR_PO ASYMRE CE_GPPO CHORD CISPO CLIP_COV CPGD DAPO DEEPSEEK_V32 DISTILL DPPO DRO DR_GRPO FIPO GDPO GFPO "
        "GIGPO GMPO GPG GRPO GRPO_PROCESS GSPO GSPO_TOKEN HIGH_ENTROPY ITERATIVE_GRPO KL_COV LITE_PPO LUFFY LUSPO M2PO "
        "MAGISTRAL MAXRL NATURAL ONLINE_DPO OPO PASSK PF_PPO PPO PPO_PENALTY PRIME PRIME_RL PRORL RAFT RAFT_PP REAL REINFORCE "
        "REINFORCE_PP REINFORCE_PP_BASELINE REMAX RLOO SAPO SCALE_RL SKYWORK_OR1 TOPR TRPO TRPO_VINE VAPO VESPO "
        "VINEPPO SPIRAL OPSD SDFT SDPO ECHO OTB"
    ),
    "policygrad.core.adjustments": "ClipAdvantage TeacherBonus",
    "policygrad.core.advantages": (
        "RejectionSampling BatchMean BatchStd ClassLabels ConstantBaseline GreedyBaseline GroupMean GroupStd "
        "LeaveOneOut MarginalMax OptimalBaseline OptimalValue DivideByGroupMean PassAtK PreferencePairs RewardZScores RunningMean "
        "TeacherLogRatio"
    ),
    "policygrad.core.aggregation": "FixedLength GroupTokenMean SequenceMean SequenceSum TokenMean TokenSum",
    "policygrad.core.auxiliary": "Critic ImplicitReward Reference",
    "policygrad.core.filters": (
        "SeparateDemonstrations Downsample DropZeroVariance MaskTruncated MovingLevel NoPositiveResampling PassRateBand "
        "RewardRange"
    ),
    "policygrad.core.gae": "GAE LengthAdaptiveGAE NStep Whiten",
    "policygrad.core.gates": (
        "Clip ClipCov DivergenceClip GammaKernel GeometricMean Importance LogClip OnPolicy PolicyShaping "
        "SecondMomentFilter SigmoidGate TaperedImportance UnitWeight ClippedImportance FutureKL "
        "ClassificationWeight"
    ),
    "policygrad.core.mismatch": "MismatchMask",
    "policygrad.core.objective": "gate_weight",
    "policygrad.core.process": "ImplicitProcess PrefixValue ProcessReward",
    "policygrad.core.ratios": "HighEntropy MaskedIS OffPolicySequenceMask Sequence SequenceProduct Token TruncatedIS",
    "policygrad.core.replay": "ReplayBuffer",
    "policygrad.core.shaping": "ClipReward GroupLength KLInReward RunningScale SoftOverlong",
    "policygrad.core.soft_clips": "FlippedImportance GradientPreservingClip",
    "policygrad.core.terms": (
        "DemonstrationNLL Entropy ExactEntropy ExactKLToOld ExactKLToReference KLCov KLToOld KLToReference "
        "PositiveNLL ObservationNLL"
    ),
    "policygrad.core.trust_region": "TrustRegion",
    "policygrad.core.turns": "BiLevelGAE GroupInGroup MultiTurnGAE TurnDiscount TurnGAE TurnLeaveOneOut TurnReturn",
    "policygrad.core.updates": "AdaptiveProblem CurvatureProblem DualDescent GradientSteps GradientProblem",
    "policygrad.core.vine": "SelfNormalisation SelfNormalised Vine",
}

__getattr__, __dir__, __all__ = export_lazily(__name__, _HOME)
