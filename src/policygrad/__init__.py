"""policygrad: policy-gradient methods for language models, as one equation with interchangeable parts."""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "policygrad.algorithms": (
        "A2C ALGORITHMS ASTAR_PO ASYMRE CHORD CISPO CLIP_COV CPGD DAPO DEEPSEEK_V32 DISTILL DPPO DRO DR_GRPO FIPO GDPO GIGPO "
        "GMPO GPG GRPO GRPO_PROCESS GSPO GSPO_TOKEN HIGH_ENTROPY ITERATIVE_GRPO KL_COV LITE_PPO LUFFY LUSPO M2PO "
        "MAGISTRAL MAXRL NATURAL OPO PASSK PPO PPO_PENALTY PRIME PRIME_RL PRORL RAFT RAFT_PP REAL REINFORCE "
        "REINFORCE_PP REINFORCE_PP_BASELINE REMAX RLOO SAPO SCALE_RL SKYWORK_OR1 TOPR TRPO TRPO_VINE VAPO VESPO VINEPPO "
        "get_algorithm SPIRAL OPSD SDFT SDPO ECHO OTB"
    ),
    "policygrad.core.advantages": (
        "RejectionSampling BatchMean BatchStd ClassLabels ConstantBaseline GreedyBaseline GroupMean GroupStd LeaveOneOut "
        "OptimalBaseline OptimalValue DivideByGroupMean PassAtK RewardZScores RunningMean TeacherLogRatio"
    ),
    "policygrad.core.aggregation": "FixedLength GroupTokenMean SequenceMean SequenceSum TokenMean",
    "policygrad.core.algorithm": "Algorithm",
    "policygrad.core.auxiliary": "Critic ImplicitReward Reference",
    "policygrad.core.base": "Advantage Aggregation Correction Filter Gate LossTerm Part Ratio Shaping Term UpdateRule",
    "policygrad.core.batch": "Batch Forward SamplingMask",
    "policygrad.core.filters": (
        "SeparateDemonstrations Downsample DropZeroVariance MaskTruncated MovingLevel NoPositiveResampling PassRateBand"
    ),
    "policygrad.core.gae": "GAE LengthAdaptiveGAE NStep Whiten",
    "policygrad.core.gates": (
        "Clip ClipCov DivergenceClip GammaKernel GeometricMean Importance LogClip OnPolicy PolicyShaping "
        "SecondMomentFilter SigmoidGate TaperedImportance UnitWeight ClippedImportance FutureKL ClassificationWeight"
    ),
    "policygrad.core.objective": "gate_weight objective surrogate",
    "policygrad.core.process": "ImplicitProcess PrefixValue ProcessReward",
    "policygrad.core.ratios": "HighEntropy MaskedIS OffPolicySequenceMask Sequence SequenceProduct Token TruncatedIS",
    "policygrad.core.shaping": "KLInReward SoftOverlong",
    "policygrad.core.terms": (
        "DemonstrationNLL Entropy ExactEntropy ExactKLToOld ExactKLToReference KLCov KLToOld KLToReference PositiveNLL "
        "ObservationNLL"
    ),
    "policygrad.core.trust_region": "TrustRegion",
    "policygrad.core.turns": "BiLevelGAE GroupInGroup MultiTurnGAE TurnDiscount TurnGAE TurnLeaveOneOut TurnReturn",
    "policygrad.core.updates": "AdaptiveProblem CurvatureProblem DualDescent GradientSteps GradientProblem",
    "policygrad.core.vine": "SelfNormalisation SelfNormalised Vine",
    "policygrad.environments": "Action Environment Observation SingleTurn Step ToolUse",
    "policygrad.utils.pictures": "Picture",
    "policygrad.environments.games": "Game GameStep SelfPlay Turn",
    "policygrad.environments.gymnasium": "GymnasiumText",
    "policygrad.environments.mcp": "McpTools",
    "policygrad.environments.openenv": "OpenEnv",
    "policygrad.environments.agent_program": "AgentProgram",
    "policygrad.environments.textarena": "TextArena",
    "policygrad.environments.verifiers": "Verifiers",
    "policygrad.errors": (
        "CheckpointError ConfigError DataError EngineError HangError ModelError NumericsError PolicygradError "
        "RewardError RunError"
    ),
    "policygrad.learners.base": "Learner LearnerSpec",
    "policygrad.learners.config": "LearnerConfig OptimizerConfig",
    "policygrad.learners.local.learner": "LocalLearner",
    "policygrad.models.replica": "load_reference clone_model",
    "policygrad.models.tool_calls": "ToolCall",
    "policygrad.rewards.base": "reward",
    "policygrad.rewards.config": "RewardConfig",
    "policygrad.rewards.workers.pool": "RewardPool",
    "policygrad.rollout.rollouter": "Rollout Rollouter",
    "policygrad.rollout.trajectory": "Segment Trajectory",
    "policygrad.samplers.base": "Generation Request Sampler SamplingParams",
    "policygrad.samplers.config": "SamplerConfig TeacherServerConfig",
    "policygrad.samplers.engines.base": "EngineSampler",
    "policygrad.samplers.local.sampler": "LocalSampler",
    "policygrad.tasks": "load_task",
    "policygrad.tasks.base": "Example",
    "policygrad.trackers": "RunInfo Tracker",
    "policygrad.training.base_trainer": "Callback",
    "policygrad.training.config.checkpoint": "CheckpointConfig",
    "policygrad.training.config.evaluation": "EvaluationConfig",
    "policygrad.training.config.guard": "GuardConfig SupervisedGuardConfig",
    "policygrad.training.config.run": "Run RunOptions",
    "policygrad.training.config.supervised": "RewardModelConfig SFTConfig",
    "policygrad.training.evaluation": "collect evaluate",
    "policygrad.training.reward_model": "train_reward_model",
    "policygrad.training.sft": "train_sft",
    "policygrad.training.trainer": "Trainer make_local_learner train",
    "policygrad.weight_sync.base": "PublishedWeights",
}
_WHERE = {name: module for module, names in _HOME.items() for name in names.split()}

__all__ = sorted(_WHERE)


def __getattr__(name: str) -> Any:
    """Import names on first use (PEP 562), so that `import policygrad` is fast and reward workers never import torch."""
    if name == "audit":  # a package, not a name in one
        return import_module("policygrad.audit")
    if name not in _WHERE:
        raise AttributeError(f"module 'policygrad' has no attribute {name!r}")
    value = getattr(import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
