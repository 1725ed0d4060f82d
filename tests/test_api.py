"""The public names, pinned; and that they cost nothing until they are used."""

from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import policygrad as pg

PUBLIC = """
A2C ALGORITHMS ASTAR_PO ASYMRE Action AdaptiveProblem Advantage AgentProgram Aggregation Algorithm Batch BatchMean BatchStd
BiLevelGAE CHORD CISPO CLIP_COV CPGD Callback CheckpointConfig CheckpointError ClassLabels ClassificationWeight Clip
ClipCov ClippedImportance ConfigError ConstantBaseline Correction Critic CurvatureProblem DAPO DEEPSEEK_V32 DISTILL DPPO
DRO DR_GRPO DataError DemonstrationNLL DivergenceClip DivideByGroupMean Downsample DropZeroVariance DualDescent ECHO
EngineError EngineSampler Entropy Environment EvaluationConfig ExactEntropy ExactKLToOld ExactKLToReference Example FIPO
Filter FixedLength Forward FutureKL GAE GDPO GIGPO GMPO GPG GRPO GRPO_PROCESS GSPO GSPO_TOKEN Game GameStep GammaKernel
Gate Generation GeometricMean GradientProblem GradientSteps GreedyBaseline GroupInGroup GroupMean GroupStd
GroupTokenMean GuardConfig GymnasiumText HIGH_ENTROPY HangError HighEntropy ITERATIVE_GRPO ImplicitProcess
ImplicitReward Importance KLCov KLInReward KLToOld KLToReference KL_COV LITE_PPO LUFFY LUSPO Learner LearnerConfig
LearnerSpec LeaveOneOut LengthAdaptiveGAE LocalLearner LocalSampler LogClip LossTerm M2PO MAGISTRAL MAXRL MaskTruncated
MaskedIS McpTools ModelError MovingLevel MultiTurnGAE NATURAL NStep NoPositiveResampling NumericsError OPO OPSD OTB
Observation ObservationNLL OffPolicySequenceMask OnPolicy OpenEnv OptimalBaseline OptimalValue OptimizerConfig PASSK PPO
PPO_PENALTY PRIME PRIME_RL PRORL Part PassAtK PassRateBand Picture PolicyShaping PolicygradError PositiveNLL PrefixValue
ProcessReward PublishedWeights RAFT RAFT_PP REAL REINFORCE REINFORCE_PP REINFORCE_PP_BASELINE REMAX RLOO Ratio Reference
RejectionSampling Request RewardConfig RewardError RewardModelConfig RewardPool RewardZScores Rollout Rollouter Run
RunError RunInfo RunOptions RunningMean SAPO SCALE_RL SDFT SDPO SFTConfig SKYWORK_OR1 SPIRAL Sampler SamplerConfig
SamplingMask SamplingParams SecondMomentFilter Segment SelfNormalisation SelfNormalised SelfPlay SeparateDemonstrations
Sequence SequenceMean SequenceProduct SequenceSum Shaping SigmoidGate SingleTurn SoftOverlong Step SupervisedGuardConfig
TOPR TRPO TRPO_VINE TaperedImportance TeacherLogRatio TeacherServerConfig Term TextArena Token TokenMean ToolCall
ToolUse Tracker Trainer Trajectory TruncatedIS TrustRegion Turn TurnDiscount TurnGAE TurnLeaveOneOut TurnReturn
UnitWeight UpdateRule VAPO VESPO VINEPPO Verifiers Vine Whiten clone_model collect evaluate gate_weight get_algorithm
load_reference load_task make_local_learner objective reward surrogate train train_reward_model train_sft
"""


def test_public_names_are_these() -> None:
    names = sorted(PUBLIC.split())
    assert names == pg.__all__ == dir(pg)
    for name in names:
        assert getattr(pg, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'grpo'"):
        pg.grpo  # noqa: B018


@pytest.mark.parametrize(
    ("code", "unwanted"),
    [
        ("import policygrad", ("torch", "numpy", "transformers")),
        ("import policygrad.rewards, policygrad.tasks", ("torch", "transformers", "reasoning_gym")),
        ("import policygrad as pg; pg.GRPO, pg.surrogate, pg.Batch", ("transformers", "safetensors", "rich", "tyro")),
        ("import policygrad.cli", ("torch", "tyro", "rich")),
    ],
)
def test_imports_only_what_is_used(code: str, unwanted: tuple[str, ...]) -> None:
    check = f"{code}\nimport sys\nprint([m for m in {unwanted!r} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


def test_the_readme_example_on_plain_tensors() -> None:
    """What docs/own-model-and-data.md shows: the same objects in any other training loop, share by share."""
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
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.List, ast.Tuple)) and node.elts and ast.unparse(node.elts[0]) == "sys.executable":
                started.append((file.name, ast.unparse(node.elts[1]) == "'-P'"))
    assert len(started) >= 6
    assert [name for name, safe in started if not safe] == []
