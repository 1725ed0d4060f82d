"""policygrad: the policy-gradient family for language models, as one equation with interchangeable parts."""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "policygrad.algorithms": (
        "A2C ALGORITHMS ASYMRE CHORD CISPO CLIP_COV CPGD DAPO DISTILL DPPO DR_GRPO GDPO GIGPO GMPO GPG GRPO GRPO_PROCESS GSPO "
        "GSPO_TOKEN HIGH_ENTROPY ITERATIVE_GRPO KL_COV LITE_PPO LUFFY LUSPO M2PO MAGISTRAL MAXRL NATURAL OPO PASSK "
        "PPO PPO_PENALTY PRIME PRORL RAFT REINFORCE REINFORCE_PP REINFORCE_PP_BASELINE REMAX RLOO SAPO SCALE_RL TOPR TRPO "
        "TRPO_VINE VAPO VESPO VINEPPO algorithm"
    ),
    "policygrad.core.advantages": "BatchMean BatchStd GroupMean GroupStd LeaveOneOut OptimalBaseline RunningMean",
    "policygrad.core.aggregates": "FixedLength GroupTokenMean SequenceMean SequenceSum TokenMean",
    "policygrad.core.algorithm": "Algorithm",
    "policygrad.core.baselines": "ConstantBaseline GreedyBaseline",
    "policygrad.core.batch": "Batch Forward",
    "policygrad.core.corrections": "MaskedIS TruncatedIS",
    "policygrad.core.critic": "Critic",
    "policygrad.core.curriculum": "MovingLevel NoPositiveResampling PassRateBand",
    "policygrad.core.distillation": "TeacherLogRatio",
    "policygrad.core.dual_descent": "DualDescent",
    "policygrad.core.drift_terms": "KLCov PolicyDrift",
    "policygrad.core.filters": "DemonstrationsApart Downsample DropNoSpread MaskTruncated",
    "policygrad.core.gates": "Clip DualClip Importance OnPolicy SoftGate WeightCap",
    "policygrad.core.loss_terms": "ExactEntropy ExactKLToOld ExactKLToReference",
    "policygrad.core.objective": "gate_weight objective surrogate",
    "policygrad.core.off_policy": "Taper Unweighted",
    "policygrad.core.problems": "AdaptiveProblem CurvatureProblem GradientProblem",
    "policygrad.core.process": "ImplicitProcess PrefixValue ProcessReward",
    "policygrad.core.protocols": "Advantage Aggregation Correction Filter Gate LossTerm Part Ratio Shaping Term UpdateRule",
    "policygrad.core.proximal": "DivergenceClip GammaKernel GeometricMean LogClip",
    "policygrad.core.ratios": "Sequence SequenceProduct Token",
    "policygrad.core.reference": "Reference",
    "policygrad.core.reward_model": "ImplicitReward",
    "policygrad.core.selecting_gates": "ClipCov SecondMoment",
    "policygrad.core.shaping": "KLInReward SoftOverlong",
    "policygrad.core.success": "Accepted OverGroupMean PassAtK",
    "policygrad.core.terms": "Entropy KLToOld KLToReference PositiveNLL",
    "policygrad.core.token_masks": "HighEntropy",
    "policygrad.core.trust_region": "TrustRegion",
    "policygrad.core.update_rules": "FirstOrder",
    "policygrad.core.values": "GAE LengthAdaptiveGAE NStep Whiten",
    "policygrad.core.demonstrations": "DemonstrationNLL",
    "policygrad.core.multi_reward": "RewardZScores",
    "policygrad.core.policy_shaping": "PolicyShaping",
    "policygrad.core.turn_values": "BiLevelGAE MultiTurnGAE TurnGAE",
    "policygrad.core.turns": "GroupInGroup TurnDiscount TurnLeaveOneOut TurnReturn",
    "policygrad.core.vine": "SelfNormalisation SelfNormalised Vine",
    "policygrad.errors": (
        "CheckpointError ConfigError DataError EngineError HangError ModelError NumericsError PolicygradError RewardError "
        "RunError"
    ),
    "policygrad.environments": "Action Environment Observation SingleTurn Step ToolUse",
    "policygrad.environments.gymnasium": "GymnasiumText",
    "policygrad.environments.openenv": "OpenEnv",
    "policygrad.environments.textarena": "TextArena",
    "policygrad.environments.verifiers": "Verifiers",
    "policygrad.learners.base": "Learner",
    "policygrad.learners.local.learner": "LocalLearner",
    "policygrad.models.reference": "load_reference",
    "policygrad.models.replica": "replica",
    "policygrad.models.tool_calls": "ToolCall",
    "policygrad.rewards": "RewardPool reward",
    "policygrad.rewards.config": "Rewarding",
    "policygrad.rollout.rollouter": "Rollout Rollouter",
    "policygrad.rollout.trajectory": "Segment Trajectory",
    "policygrad.samplers.base": "Generation Request Sampler Sampling",
    "policygrad.samplers.config": "SamplerConfig",
    "policygrad.samplers.engine": "EngineSampler",
    "policygrad.samplers.local": "LocalSampler",
    "policygrad.tasks": "load_task",
    "policygrad.training.config.run": "Checkpointing Evaluation Run",
    "policygrad.learners.config": "LearnerConfig OptimizerConfig",
    "policygrad.training.reward_model": "train_reward_model",
    "policygrad.training.trainer": "Trainer local_learner train",
    "policygrad.tasks.types": "Example",
    "policygrad.trackers": "RunInfo Tracker",
    "policygrad.training.callbacks": "Callback",
    "policygrad.training.evaluation": "collect evaluate",
    "policygrad.training.sft": "sft train_sft",
    "policygrad.weight_sync.base": "Published",
    "policygrad.training.config.supervised": "RewardModelConfig SFTConfig",
}
_WHERE = {name: module for module, names in _HOME.items() for name in names.split()}

__all__ = sorted(_WHERE)


def __getattr__(name: str) -> Any:
    """Lazy exports (PEP 562): `import policygrad` costs nothing, and a reward worker never imports torch."""
    if name not in _WHERE:
        raise AttributeError(f"module 'policygrad' has no attribute {name!r}")
    value = getattr(import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
