"""policygrad: policy-gradient methods for language models, as one equation with interchangeable parts.

Here is what a run, a part of your own, an environment and an engine need. The package's parts and algorithms are in
`policygrad.parts`, and can be reached from here as well: `pg.GRPO`, `pg.Clip`.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0rc1"

_HOME = {
    "policygrad.algorithms": "ALGORITHMS get_algorithm",
    "policygrad.core.algorithm": "Algorithm",
    "policygrad.core.base": "Advantage Aggregation Correction Filter Gate LossTerm Part Ratio Shaping Term UpdateRule",
    "policygrad.core.batch": "Batch Forward SamplingMask",
    "policygrad.core.objective": "objective surrogate",
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
    "policygrad.models.chat.turns": "ToolCall",
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
    if name in ("audit", "parts"):  # modules, not names in one
        return import_module(f"policygrad.{name}")
    parts = import_module("policygrad.parts")
    if name not in _WHERE and name not in parts.__all__:
        raise AttributeError(f"module 'policygrad' has no attribute {name!r}")
    value = getattr(import_module(_WHERE[name]) if name in _WHERE else parts, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
