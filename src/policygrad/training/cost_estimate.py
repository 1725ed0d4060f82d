"""Estimate how much memory a run will take, before it starts.

    peak = libraries + weights + gradients + optimizer + other models + max(training, sampling)

Training is what one micro-batch saves for its backward pass, counted on the architecture itself (`memory_probe.py`), and the
logits over the vocabulary. Sampling is the key-value cache of the rows that decode at once, and their logits. The estimate is for
a run that samples and trains in one process, on one device.

On an accelerator it is also an upper bound: PyTorch's allocator releases its cache before it fails. The C library's allocator on
the CPU releases little: what sampling took remains beside training, freed tensors leave holes between others (`HOLES`),
and kernels and threads are loaded with the first step (`FIRST_STEP_BYTES`). `upper_bound` counts them.
"""

from __future__ import annotations

from dataclasses import dataclass

from policygrad.core.algorithm import Algorithm
from policygrad.core.updates import GradientSteps
from policygrad.errors import ConfigError, PolicygradError
from policygrad.learners.config import OptimizerConfig
from policygrad.learners.local.logprobs import BUFFER_ACCELERATOR, BUFFER_CPU, MAX_CACHED
from policygrad.models.loading import DTYPES
from policygrad.planning.cost_model import HOLES, AlgorithmCost, static_bytes
from policygrad.rewards.workers.limits import format_size
from policygrad.rollout.evaluation import EVAL_CHUNK
from policygrad.tasks.benchmarks import parse_benchmarks
from policygrad.training.config.paths import resolve_config_paths
from policygrad.training.config.run import Run
from policygrad.training.memory_probe import probe_model
from policygrad.utils.devices import pick_device

FIRST_STEP_BYTES = 96 * 2**20
"""Memory that kernels and threads add to the libraries on the CPU, with a margin: 50 to 64 MiB were measured."""


def compute_algorithm_cost(algorithm: Algorithm) -> AlgorithmCost:
    """Return how many models are trained and how many are frozen, and how often a rollout is read, from the algorithm's parts."""
    needs, rule = algorithm.needs, algorithm.update_rule
    separate_critic = algorithm.critic is not None and algorithm.critic.backbone == "separate"
    reward_model = algorithm.reward_model is not None
    is_live = algorithm.reference is not None and algorithm.reference.live
    epochs = max(1, rule.updates // rule.minibatches)
    references = algorithm.reference.num_in_memory if algorithm.reference is not None and "logp_ref" in needs else 0
    scoring_passes = bool({"logp_old", "entropy", "sum_pi_squared"} & needs) + bool(references) + reward_model
    scoring_passes += separate_critic and "values" in needs
    if algorithm.token_selector is not None and algorithm.selection_needs:
        scoring_passes += epochs  # tokens are selected among all of an update's before it is split
    recomputed = algorithm.old_policy == "learner"
    reuses_head = recomputed and "logp_old" not in needs and not algorithm.terms and not algorithm.forward_needs
    uncounted = list[str]()
    if any(part.refills for part in algorithm.filters):
        uncounted.append("further prompts, sampled in place of those that a filter drops")
    uncounted += dict.fromkeys(part.extra_samples for part in algorithm.parts() if part.extra_samples)
    if "grad_logp_sq_norm" in needs:
        uncounted.append("norms of every completion's gradient")
    return AlgorithmCost(
        name=algorithm.name,
        trained_models=1 + separate_critic + reward_model,
        frozen_models=references * (not is_live) + ("kl_old" in algorithm.forward_needs),
        scoring_passes=scoring_passes,
        stale_scoring_passes=int(recomputed and "logp_old" not in needs),
        recomputes_head=not reuses_head,
        epochs=epochs,
        updates=rule.updates,
        samples_per_prompt=algorithm.samples_per_prompt,
        uncounted=tuple(uncounted),
    )


def compute_plannable_cost(algorithm: Algorithm) -> AlgorithmCost:
    """Return the cost of an algorithm that a plan can count completely.

    Raises:
        ConfigError: It does not update the weights by gradient steps.
    """
    if type(algorithm.update_rule) is not GradientSteps:
        raise ConfigError(
            f"--algorithm {algorithm.name} updates by {type(algorithm.update_rule).__name__}, and a plan counts gradient steps "
            "(GradientSteps) only: plan with ppo or grpo, and expect more seconds"
        )
    return compute_algorithm_cost(algorithm)


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes by purpose."""

    fixed: dict[str, int]  # for the whole run
    training: int
    sampling: int
    micro_tokens: int  # tokens of a micro-batch
    holes: float = HOLES["weights"]
    """Bytes that the CPU's allocator holds beside each of training."""
    releases_memory: bool = False
    """Whether the allocator releases its cache before it fails, as an accelerator's does."""

    @property
    def peak(self) -> int:
        return sum(self.fixed.values()) + max(self.training, self.sampling)

    @property
    def upper_bound(self) -> int:
        """The peak if the allocator releases nothing."""
        if self.releases_memory:
            return self.peak
        return sum(self.fixed.values()) + FIRST_STEP_BYTES + self.sampling + int((1 + self.holes) * self.training)

    def __str__(self) -> str:
        fixed = ", ".join(f"{name} {format_size(size)}" for name, size in self.fixed.items() if size)
        bound = f", at most {format_size(self.upper_bound)} as the CPU's allocator leaves holes"
        return (
            f"memory: about {format_size(self.peak)}{'' if self.releases_memory else bound} ({fixed}, and a micro-batch of "
            f"{self.micro_tokens:,} tokens {format_size(self.training)} or decoding {format_size(self.sampling)})"
        )


def count_static_bytes(
    parameters: float,
    bytes_per_number: int,
    cost: AlgorithmCost,
    optimizer: OptimizerConfig,
    algorithm: Algorithm,
    ranks: int = 1,
    *,
    outer: float = 0.0,
    ahead: bool = False,
) -> dict[str, float]:
    """Return the bytes of models and optimizer state on one of `ranks` devices, with what a run's optimizer keeps of them.

    Args:
        bytes_per_number: In the compute precision.
        outer: Fraction of the parameters in embeddings and output head.
        ahead: Whether a further model samples while the policy learns.
    """
    uses_lr, trained = algorithm.update_rule.uses_lr, cost.trained_models
    state = optimizer.describe_state() if uses_lr else None
    frozen = cost.frozen_models + ahead
    return static_bytes(parameters, bytes_per_number, trained, frozen, ranks, optimizer=state, outer=outer)


def estimate_memory(run: Run) -> MemoryEstimate:
    """Estimate from the configuration of the run's model and the first prompts of its task; no weights are read.

    Raises:
        PolicygradError: Something cannot be loaded, or the architecture cannot be counted.
    """
    run, device = resolve_config_paths(run), pick_device(run.learner.device)
    if run.learner.world_size > 1:
        raise PolicygradError("with learner.world_size > 1 memory is spread over processes; only one can be counted")
    facts, dtype = probe_model(run, device), DTYPES[run.learner.dtype]
    parameters, adapters = facts.parameters, facts.adapters
    samples, completion = run.effective_samples_per_prompt, run.sampling.max_tokens
    logits = (BUFFER_CPU if device == "cpu" else BUFFER_ACCELERATOR) * 4 * 3
    if "logp_old" in run.algorithm.needs or run.algorithm.terms or run.algorithm.forward_needs:  # the head runs twice
        logits += min(MAX_CACHED, facts.micro_tokens * facts.vocabulary) * 4
    evaluated = run.evaluation.problems * run.evaluation.samples_per_prompt
    rows = min(run.sampling.decode_rows, max(run.prompts_per_step * samples, evaluated))
    cache_bytes = facts.cache_numbers * dtype.itemsize  # of a token, in all layers
    # weights, gradients and Adam's moments of all trained models, the copy that undoes a failed step, and other models
    cost, weight = compute_algorithm_cost(run.algorithm), dtype.itemsize
    trained, frozen = cost.trained_models, cost.frozen_models + (run.max_staleness > 0)
    moving = parameters if adapters is None else adapters
    share = facts.outer_parameters / parameters if adapters is None else 0.0
    by_purpose = count_static_bytes(
        moving, weight, cost, run.optimizer, run.algorithm, outer=share, ahead=run.max_staleness > 0
    )
    fixed = {"libraries": facts.libraries, **{name: int(size) for name, size in by_purpose.items()}}
    if adapters is not None:  # trained in float32, on weights that all models share
        four_bits = run.learner.adapters is not None and run.learner.adapters.bits is not None
        reference = run.algorithm.reference
        full = (
            reference.num_in_memory if reference is not None and reference.models else 0
        )  # models that are no adapters
        other = adapters * (frozen - full) * 4 + parameters * full * weight
        base = parameters // 2 + parameters // 16 if four_bits else parameters * weight  # NF4, with its scales
        fixed |= {"weights": base, "adapters": adapters * trained * 4, "other models": other}
    sampled = [(rows, facts.longest_prompt + completion)]  # rows at a time, and tokens of each
    if evaluated:
        number = min(run.evaluation.problems, EVAL_CHUNK) * run.evaluation.samples_per_prompt
        longest = run.evaluation.resolve_sampling(run.sampling).max_tokens
        sampled.append((min(run.sampling.decode_rows, number), facts.longest_prompt + longest))
    for benchmark in parse_benchmarks(run.evaluation.benchmarks):
        settings, limit = benchmark.sampling, run.evaluation.benchmark_problems or benchmark.problems
        number = min(limit, EVAL_CHUNK) * (run.evaluation.benchmark_samples or settings.samples)
        tokens_each = facts.longest_prompt + (run.evaluation.benchmark_max_tokens or settings.max_tokens)
        positions = facts.context_length or tokens_each
        sampled.append((min(run.sampling.decode_rows, number), min(tokens_each, positions)))
    return MemoryEstimate(
        fixed,
        training=facts.saved_bytes + logits,
        sampling=max(number * (length * cache_bytes + facts.vocabulary * 24) for number, length in sampled),
        micro_tokens=facts.micro_tokens,
        holes=HOLES["weights" if adapters is None else "adapters"],
        releases_memory=device != "cpu",
    )
