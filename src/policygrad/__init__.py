"""policygrad: the policy-gradient family for language models, as one equation with interchangeable parts."""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "policygrad.algorithms": (
        "A2C ALGORITHMS CISPO DAPO DR_GRPO GRPO GSPO GSPO_TOKEN ITERATIVE_GRPO MAGISTRAL PPO PPO_PENALTY PRORL REINFORCE RLOO "
        "SAPO VAPO algorithm"
    ),
    "policygrad.core.advantages": "BatchMean BatchStd GroupMean GroupStd LeaveOneOut RunningMean",
    "policygrad.core.aggregates": "FixedLength GroupTokenMean SequenceMean SequenceSum TokenMean",
    "policygrad.core.algorithm": "Algorithm",
    "policygrad.core.corrections": "MaskedIS TruncatedIS",
    "policygrad.core.critic": "Critic",
    "policygrad.core.filters": "DropNoSpread MaskTruncated",
    "policygrad.core.gates": "Clip DualClip Importance OnPolicy SoftGate WeightCap",
    "policygrad.core.objective": "objective surrogate",
    "policygrad.core.ratios": "Sequence SequenceProduct Token",
    "policygrad.core.reference": "Reference",
    "policygrad.core.shaping": "KLInReward SoftOverlong",
    "policygrad.core.steps": "FirstOrder",
    "policygrad.core.terms": "Entropy KLToOld KLToReference PositiveNLL",
    "policygrad.core.types": "Batch Forward",
    "policygrad.core.values": "GAE LengthAdaptiveGAE NStep Whiten",
    "policygrad.rewards": "reward",
    "policygrad.rollout.types": "Sampling",
    "policygrad.training.config": "Checkpointing Evaluation Rewarding Run",
    "policygrad.training.learner_config": "LearnerConfig OptimizerConfig",
    "policygrad.training.session": "train",
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
