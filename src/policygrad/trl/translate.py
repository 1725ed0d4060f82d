"""From TRL's configurations to policygrad's: the algorithm as parts of the equation, and the run.

`translate_algorithm` gives the parts that anybody would name; `with_micro_batches` replaces those whose averages TRL takes within
each micro-batch, so that an optimizer step is TRL's to the last bit that arithmetic keeps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from policygrad.core.advantages import BatchStd, GroupMean, GroupStd, LeaveOneOut, RewardZScores
from policygrad.core.aggregation import FixedLength, SequenceMean, SequenceSum, TokenMean
from policygrad.core.algorithm import Algorithm
from policygrad.core.base import Advantage, Aggregation, Correction, Gate, Term
from policygrad.core.filters import MaskTruncated
from policygrad.core.gates import Clip, ClippedImportance, GammaKernel, SigmoidGate
from policygrad.core.ratios import (
    HighEntropy,
    MaskedIS,
    OffPolicySequenceMask,
    Sequence,
    SequenceProduct,
    Token,
    TruncatedIS,
)
from policygrad.core.shaping import KLInReward
from policygrad.core.terms import ExactEntropy, KLToReference
from policygrad.core.updates import GradientSteps
from policygrad.learners.config import LearnerConfig
from policygrad.samplers.base import SamplingParams
from policygrad.samplers.config import SamplerConfig
from policygrad.training.config.checkpoint import CheckpointConfig
from policygrad.training.config.evaluation import EvaluationConfig
from policygrad.training.config.run import Run
from policygrad.trl.config import GRPOConfig, OnlineConfig, RLOOConfig
from policygrad.trl.parts import (
    Average,
    CappedImportance,
    CompletionMean,
    CompletionZScores,
    MicroBatchHighEntropy,
    MicroBatchMean,
    SelectedEntropy,
    SequenceWeightedKL,
)

STD_EPS = 1e-4
"""What TRL adds to every standard deviation."""
_CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
_AVERAGES: dict[str, Average] = {
    "grpo": "sequence_mean",
    "sapo": "sequence_mean",
    "bnpo": "token_mean",
    "dr_grpo": "fixed_length",
    "luspo": "sequence_sum",
    "dapo": "generation_tokens",
    "cispo": "generation_tokens",
    "vespo": "generation_tokens",
    "rloo": "sequence_sum",
}


def translate_algorithm(args: OnlineConfig) -> Algorithm:
    """Return the algorithm of a configuration.

    Raises:
        ValueError: Settings that have no meaning together.
    """
    return _translate_rloo(args) if isinstance(args, RLOOConfig) else _translate_grpo(args)  # type: ignore[arg-type]


def with_micro_batches(
    algorithm: Algorithm, args: OnlineConfig, *, rows: int, count: int, num_tokens: float, entropy_coef: float = 0.0
) -> Algorithm:
    """Return the algorithm for one optimizer step, averaged as TRL does.

    Args:
        rows: Completions per micro-batch.
        count: Micro-batches of the step.
        num_tokens: Tokens of the generation that learn, per optimizer step; what dapo, cispo and vespo divide by.
        entropy_coef: The entropy bonus in this step.
    """
    average = _AVERAGES[getattr(args, "loss_type", "rloo")]
    budget = float(args.max_completion_length or 1) if average == "fixed_length" else num_tokens
    mean = MicroBatchMean(average, rows, count, budget)
    corrections: tuple[Correction, ...] = tuple(
        MicroBatchHighEntropy(part.fraction, rows=rows) if isinstance(part, HighEntropy) else part
        for part in algorithm.corrections
    )
    selects = any(isinstance(part, HighEntropy) for part in corrections)
    if isinstance(algorithm.ratio, Sequence) and args.loss_type != "cispo":  # type: ignore[attr-defined]
        corrections = tuple(CompletionMean(part) for part in corrections)
    terms = list[Any]()
    for term in algorithm.terms:
        if isinstance(term, ExactEntropy):
            kind = SelectedEntropy if selects else ExactEntropy
            term = kind(entropy_coef, MicroBatchMean("token_mean", rows, count))
        terms.append(term)
    return replace(algorithm, aggregation=mean, corrections=corrections, terms=tuple(terms))


@dataclass(frozen=True)
class Rhythm:
    """How many completions TRL samples at a time, and how it goes through them."""

    rows: int
    """Completions per micro-batch."""
    per_generation: int
    """Micro-batches per generation: steps_per_generation."""
    iterations: int
    """Passes over a generation."""
    accumulation: int
    """Micro-batches per optimizer step."""
    samples: int
    """Completions per prompt."""

    @classmethod
    def of(cls, args: OnlineConfig) -> Rhythm:
        assert args.steps_per_generation is not None
        assert args.num_generations is not None
        rows, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps
        return cls(rows, args.steps_per_generation, args.num_iterations, accumulation, args.num_generations)

    @property
    def prompts(self) -> int:
        """Prompts per generation."""
        return self.rows * self.per_generation // self.samples

    @property
    def micro_batches(self) -> int:
        """Micro-batches between two generations."""
        return self.per_generation * self.iterations

    @property
    def is_on_policy(self) -> bool:
        """True if every optimizer step ends where a generation ends, so that all ratios are 1."""
        return self.accumulation % self.micro_batches == 0

    @property
    def update_rule(self) -> GradientSteps:
        """The updates of a generation, as the equation's part."""
        if self.is_on_policy:
            return GradientSteps()
        epochs = max(
            1, self.iterations if self.per_generation >= self.accumulation else self.micro_batches // self.accumulation
        )
        minibatches = max(1, round(self.micro_batches / self.accumulation / epochs))
        return GradientSteps(epochs, minibatches) if epochs * minibatches > 1 else GradientSteps(2)


def translate_run(args: OnlineConfig, algorithm: Algorithm, model: Any, tokenizer: Any, device: str) -> Run:
    """Return the run of a configuration. Its steps are generations, each with all of its updates."""
    rhythm, seed = Rhythm.of(args), args.seed
    is_half = bool(args.bf16) and device != "cpu"
    sampler = SamplerConfig()
    if args.use_vllm and args.vllm_mode == "server":
        host = f"http://{args.vllm_server_host}:{args.vllm_server_port}"
        sampler = SamplerConfig(engine="vllm", urls=(args.vllm_server_base_url or host,))
    elif args.use_vllm:
        sampler = SamplerConfig(
            engine="vllm",
            colocate=True,
            gpu_memory=args.vllm_gpu_memory_utilization,
            context_length=args.vllm_max_model_length or 0,
        )
    return Run(
        model=model,
        tokenizer=tokenizer,
        trust_remote_code=args.trust_remote_code,
        reward=(),
        prompts_per_step=rhythm.prompts,
        samples_per_prompt=rhythm.samples,
        lr=args.learning_rate,
        seed=seed,
        output=str(Path(args.output_dir or ".") / "policygrad"),
        sampling=SamplingParams(args.temperature, args.top_p, args.top_k, args.max_completion_length or 1),
        sampler=sampler,
        learner=LearnerConfig(
            dtype="bf16" if is_half else "fp32",
            device=device,
            gradient_checkpointing=args.gradient_checkpointing,
            compile=args.torch_compile,
        ),
        evaluation=EvaluationConfig(problems=0),
        checkpoint=CheckpointConfig(),
        algorithm=algorithm,
    )


def _translate_grpo(args: GRPOConfig) -> Algorithm:
    rhythm = Rhythm.of(args)
    level: Token | Sequence | SequenceProduct = Token() if args.importance_sampling_level == "token" else Sequence()
    terms, corrections = list[Any](), list[Correction]()
    if args.beta:
        terms.append(_translate_kl(args))
    if args.entropy_coef or args.use_adaptive_entropy:
        terms.append(ExactEntropy(args.entropy_coef))
    if args.top_entropy_quantile < 1:
        corrections.append(HighEntropy(args.top_entropy_quantile))
    if args.off_policy_mask_threshold is not None:
        corrections.append(OffPolicySequenceMask(args.off_policy_mask_threshold))
    if args.use_vllm and args.vllm_importance_sampling_correction:
        corrections.append(_translate_correction(args))
    return Algorithm(
        f"trl_{args.loss_type}",
        advantage=_translate_advantage(args),
        ratio=SequenceProduct() if args.loss_type == "vespo" else level,
        gate=_translate_gate(args),
        aggregation=_choose_aggregation(args),
        terms=tuple(terms),
        corrections=tuple(corrections),
        filters=(MaskTruncated(keep_in_statistics=True),) if args.mask_truncated_completions else (),
        update_rule=rhythm.update_rule,
        samples_per_prompt=rhythm.samples,
        head="fp32" if args.cast_lm_head_to_fp32 else "model",
    )


def _translate_rloo(args: RLOOConfig) -> Algorithm:
    rhythm = Rhythm.of(args)
    advantage: tuple[Advantage, ...] = (LeaveOneOut(),)
    high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    return Algorithm(
        "trl_rloo",
        advantage=(*advantage, CompletionZScores(STD_EPS)) if args.normalize_advantages else advantage,
        ratio=SequenceProduct(),
        gate=Clip(args.epsilon, high),
        aggregation=SequenceSum(),
        shaping=(KLInReward(args.beta, level="sequence"),) if args.beta else (),
        filters=(MaskTruncated(keep_in_statistics=True),) if args.mask_truncated_completions else (),
        update_rule=rhythm.update_rule,
        samples_per_prompt=rhythm.samples,
    )


def _translate_advantage(args: GRPOConfig) -> tuple[Advantage, ...]:
    if args.multi_objective_aggregation == "normalize_then_sum":
        return RewardZScores(STD_EPS), CompletionZScores(STD_EPS)
    scales: dict[str, tuple[Advantage, ...]] = {
        "group": (GroupStd(STD_EPS),),
        "batch": (BatchStd(STD_EPS, of="rewards"),),
        "none": (),
    }
    return GroupMean(), *scales[args.scale_rewards]


def _translate_gate(args: GRPOConfig) -> Gate:
    high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    if args.loss_type == "cispo":
        return ClippedImportance(0.0, high) if high >= 1 else CappedImportance(0.0, high)
    if args.loss_type == "sapo":
        return SigmoidGate(args.sapo_temperature_pos, args.sapo_temperature_neg)
    if args.loss_type == "vespo":
        return GammaKernel(args.vespo_k_pos, args.vespo_lambda_pos, args.vespo_k_neg, args.vespo_lambda_neg)
    if args.delta is None:
        return Clip(args.epsilon, high)
    if args.delta < 1:
        raise ValueError(f"delta={args.delta} bounds the ratio below 1, which it is at first: use at least 1 + epsilon")
    # below 1 + epsilon_high it is the bound of the other sign of the advantage
    return Clip(args.epsilon, min(high, args.delta - 1), max(args.delta, 1 + high))


def _choose_aggregation(args: GRPOConfig) -> Aggregation:
    if args.loss_type == "dr_grpo":
        return FixedLength(args.max_completion_length)
    if args.loss_type == "luspo":
        return SequenceSum()
    return SequenceMean() if args.loss_type in ("grpo", "sapo") else TokenMean()


def _translate_kl(args: GRPOConfig) -> Term:
    if not args.use_bias_correction_kl:
        return KLToReference(args.beta, "k3")
    if args.importance_sampling_level == "sequence":
        return SequenceWeightedKL(args.beta)
    return KLToReference(args.beta, "r*k3")


def _translate_correction(args: GRPOConfig) -> Correction:
    kind, _, how = args.vllm_importance_sampling_mode.partition("_")
    level: Any = kind
    low, high = args.vllm_importance_sampling_clip_min, args.vllm_importance_sampling_clip_max
    if how == "mask":
        return MaskedIS(low or 0.0, float("inf") if high is None else high, level)
    if low is not None or high is None:
        raise ValueError(
            f"vllm_importance_sampling_mode={args.vllm_importance_sampling_mode!r} has an upper bound alone here: leave "
            "vllm_importance_sampling_clip_min out and set vllm_importance_sampling_clip_max"
        )
    return TruncatedIS(high, level)


def is_length_weighted(args: GRPOConfig) -> bool:
    """Return True if a ratio of completions is averaged over tokens, which weights completions by their lengths."""
    return args.importance_sampling_level == "sequence" and args.loss_type in ("bnpo", "dr_grpo", "dapo", "cispo")
