"""The public names, pinned; and that they cost nothing until they are used."""

from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

import policygrad as pg

PUBLIC = """
ALGORITHMS Action Advantage AgentProgram Aggregation Algorithm Batch Callback CheckpointConfig CheckpointError
ConfigError Correction DataError EngineError EngineSampler Environment EvaluationConfig Example Filter Forward Game
GameStep Gate Generation GuardConfig GymnasiumText HangError Learner LearnerConfig LearnerSpec LocalLearner
LocalSampler LossTerm McpTools ModelError NumericsError Observation OpenEnv OptimizerConfig Part Picture
PolicygradError PublishedWeights Ratio Request RewardConfig RewardError RewardModelConfig RewardPool Rollout Rollouter
Run RunError RunInfo RunOptions SFTConfig Sampler SamplerConfig SamplingMask SamplingParams Segment SelfPlay Shaping
SingleTurn Step SupervisedGuardConfig TeacherServerConfig Term TextArena ToolCall ToolUse Tracker Trainer Trajectory
Turn UpdateRule Verifiers clone_model collect evaluate get_algorithm load_reference load_task make_local_learner
objective reward surrogate train train_reward_model train_sft
"""
PARTS = """
A2C ASPO ASTAR_PO ASYMRE AdaptiveProblem BatchMean BatchStd BiLevelGAE CE_GPPO CHORD CISPO CLIP_COV CPGD ClassLabels
ClassificationWeight Clip ClipAdvantage ClipCov ClipReward ClippedImportance ConstantBaseline Critic
CurvatureProblem DAPO DEEPSEEK_V32 DISTILL DPPO DRO DR_GRPO DemonstrationNLL DivergenceClip DivideByGroupMean
Downsample DropZeroVariance DualDescent ECHO Entropy ExactEntropy ExactKLToOld ExactKLToReference FIPO FixedLength
FlippedImportance FutureKL GAE GDPO GFPO GIGPO GMPO GPG GRPO GRPO_PROCESS GSPO GSPO_TOKEN GammaKernel GeometricMean
GradientPreservingClip GradientProblem GradientSteps GreedyBaseline GroupInGroup GroupLength GroupMean GroupStd
GroupTokenMean HIGH_ENTROPY HighEntropy ITERATIVE_GRPO ImplicitProcess ImplicitReward Importance KLCov KLInReward
KLToOld KLToReference KL_COV LITE_PPO LUFFY LUSPO LeaveOneOut LengthAdaptiveGAE LogClip M2PO MAGISTRAL MAXRL
MarginalMax MaskTruncated MaskedIS MismatchMask MovingLevel MultiTurnGAE NATURAL NStep NoPositiveResampling ONLINE_DPO OPO OPSD
OTB ObservationNLL OffPolicySequenceMask OnPolicy OptimalBaseline OptimalValue PASSK PF_PPO PPO PPO_PENALTY PRIME PRIME_RL
PRORL PassAtK PassRateBand PolicyShaping PositiveNLL PreferencePairs PrefixValue ProcessReward RAFT RAFT_PP REAL REINFORCE
REINFORCE_PP REINFORCE_PP_BASELINE REMAX RLOO Reference RejectionSampling ReplayBuffer RewardRange RewardZScores RunningMean
RunningScale SAPO SCALE_RL SDFT SDPO SKYWORK_OR1 SPIRAL SecondMomentFilter SelfNormalisation SelfNormalised
SeparateDemonstrations Sequence SequenceMean SequenceProduct SequenceSum SigmoidGate SoftOverlong TOPR TRPO
TRPO_VINE TaperedImportance TeacherBonus TeacherLogRatio Token TokenMean TokenSum TruncatedIS TrustRegion
TurnDiscount TurnGAE TurnLeaveOneOut TurnReturn UnitWeight VAPO VESPO VINEPPO Vine Whiten gate_weight
"""


@pytest.mark.parametrize(("module", "public"), [(pg, PUBLIC), (pg.parts, PARTS)])
def test_public_names_are_these(module: ModuleType, public: str) -> None:
    names = sorted(public.split())
    assert names == module.__all__ == dir(module)
    for name in names:
        assert getattr(module, name) is not None
    with pytest.raises(AttributeError, match=f"module '{module.__name__}' has no attribute 'grpo'"):
        module.grpo  # noqa: B018


def test_a_part_is_the_same_object_from_the_top() -> None:
    from policygrad import GRPO, Clip

    assert Clip is pg.parts.Clip
    assert GRPO is pg.parts.GRPO
    assert len(PUBLIC.split()) <= 90
    assert not {*PUBLIC.split()} & {*PARTS.split()}


@pytest.mark.parametrize(
    ("code", "unwanted"),
    [
        ("import policygrad", ("torch", "numpy", "transformers")),
        ("import policygrad.rewards, policygrad.tasks", ("torch", "transformers", "reasoning_gym")),
        ("import policygrad.parts, policygrad.errors", ("torch", "numpy")),
        (
            "import policygrad as pg; pg.GRPO, pg.surrogate, pg.Batch; import policygrad.lab.report",
            (
                "transformers",
                "safetensors",
                "rich",
                "tyro",
                "reasoning_gym",
                "policygrad.training",
                "policygrad.rollout",
            ),
        ),
        ("import policygrad.cli", ("torch", "tyro", "rich")),
    ],
)
def test_imports_only_what_is_used(code: str, unwanted: tuple[str, ...]) -> None:
    check = f"{code}\nimport sys\nprint([m for m in {unwanted!r} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


def test_the_readme_example_on_plain_tensors() -> None:
    """What docs/extending.md describes: the same objects in any other training loop, share by share."""
    torch.manual_seed(0)
    logp = torch.randn(8, 5, dtype=torch.float64, requires_grad=True)
    batch = pg.Batch(
        mask=torch.arange(5) < torch.randint(1, 6, (8, 1)),
        group=torch.arange(2).repeat_interleave(4),
        reward=torch.rand(8, dtype=torch.float64),
        logp_old=logp.detach() + 0.1,
        logp_ref=logp.detach() - 0.1,
    )
    psi, coef = pg.GRPO.compute_advantages(batch), pg.GRPO.coefficients(batch)
    (full,) = torch.autograd.grad(pg.surrogate(logp, batch, psi, pg.GRPO), logp)
    for rows in (torch.arange(0, 3), torch.arange(3, 8)):
        pg.surrogate(logp[rows], batch.select(rows), psi[rows], pg.GRPO, coef[rows]).backward()
    assert logp.grad is not None
    assert torch.allclose(logp.grad, full, atol=1e-15)
    wider = replace(pg.GRPO, gate=pg.Clip(0.2, 0.28))
    assert wider.gate.high == 0.28  # type: ignore[attr-defined]


def test_every_python_that_is_started_leaves_the_current_folder_out() -> None:
    """Its modules would hide the standard library's: -P stands behind the interpreter wherever one is started."""
    started = []
    for file in Path(pg.__file__).parent.rglob("*.py"):
        if "sys.executable" not in (text := file.read_text(encoding="utf-8")):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.List, ast.Tuple)) and node.elts and ast.unparse(node.elts[0]) == "sys.executable":
                started.append((file.name, ast.unparse(node.elts[1]) == "'-P'"))
    assert len(started) >= 6
    assert [name for name, safe in started if not safe] == []
