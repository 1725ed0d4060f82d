"""How much memory a run will take, estimated before it starts.

    peak = libraries + weights + gradients + optimiser + other models + max(learning, sampling)

Learning is what one micro-batch keeps for its backward pass, counted on the architecture itself
(`learners/local/activation_memory.py`), and the logits over the vocabulary; sampling is the key-value cache of the rows that
decode at once, with their logits. The estimate is for a run that samples and learns in one process, on one device.

On an accelerator that is the most as well: PyTorch's allocator gives back what it caches before it fails. On the CPU the C
library's allocator gives little back: what sampling took stays beside learning, tensors of changing sizes leave holes between them
(`FRAGMENTATION`), and kernels and threads come in with the first step (`FIRST_STEP_BYTES`); `most` counts them.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any, cast

import torch

from policygrad.core.algorithm import Algorithm
from policygrad.core.updates import GradientSteps
from policygrad.core.vine import Vine
from policygrad.errors import ConfigError, PolicygradError
from policygrad.learners.local.activation_memory import saved_activation_bytes
from policygrad.learners.local.logprobs import BUFFER_ACCELERATOR, BUFFER_CPU, MAX_CACHED
from policygrad.models.adapters import add_adapters
from policygrad.models.loading import DTYPES, pretrained_kwargs, read_config, resolve_model
from policygrad.models.lora_config import adapter_base, read_lora
from policygrad.planning.cost_model import AlgorithmCost, static_bytes
from policygrad.rewards.workers.limits import format_size, get_resident_bytes
from policygrad.tasks import load_task
from policygrad.training.config.paths import resolve_paths
from policygrad.training.config.run import Run

# What an algorithm asks of memory and time, read off its parts: for a plan, and for a run's footprint.


def compute_algorithm_cost(algorithm: Algorithm) -> AlgorithmCost:
    """How many models train and wait, and how often a rollout is read: what `Learner.evaluate` fills and `step` goes over."""
    needs, step = algorithm.needs, algorithm.update_rule
    own_critic = algorithm.critic is not None and algorithm.critic.backbone == "separate"
    rewarded = algorithm.reward_model is not None
    epochs = max(1, step.updates // step.minibatches)
    scores = bool({"logp_old", "entropy"} & needs) + ("logp_ref" in needs or rewarded) + rewarded
    scores += own_critic and "values" in needs
    if algorithm.token_selector is not None and algorithm.selection_needs:
        scores += epochs  # the choice is made among all of an update's tokens, before it is split
    recomputed = algorithm.old_policy == "learner"
    known = recomputed and "logp_old" not in needs and not algorithm.terms and not algorithm.forward_needs
    return AlgorithmCost(
        name=algorithm.name,
        trained_models=1 + own_critic + rewarded,
        frozen_models=("logp_ref" in needs) + ("kl_old" in algorithm.forward_needs),
        scoring_passes=scores,
        stale_scoring_passes=int(recomputed and "logp_old" not in needs),
        recomputes_head=not known,
        epochs=epochs,
        updates=step.updates,
        samples_per_prompt=algorithm.samples_per_prompt,
        uncounted=_uncounted(algorithm),
    )


def compute_plannable_cost(algorithm: Algorithm) -> AlgorithmCost:
    """As `compute_algorithm_cost`, of an algorithm that a plan counts whole.

    Raises:
        ConfigError: it moves the weights in another way than by gradient steps.
    """
    if type(algorithm.update_rule) is not GradientSteps:
        raise ConfigError(
            f"--algorithm {algorithm.name}: its step is {type(algorithm.update_rule).__name__}, and a plan counts gradient steps alone "
            "(GradientSteps): plan with ppo or grpo, and expect more seconds"
        )
    return compute_algorithm_cost(algorithm)


def _uncounted(algorithm: Algorithm) -> tuple[str, ...]:
    """Completions that are drawn besides."""
    found = list[str]()
    if any(part.refills for part in algorithm.filters):
        found.append("further prompts that are drawn in the place of those that a filter drops")
    if "baseline" in algorithm.needs:
        found.append("a greedy completion of every prompt")
    if any(link.samples_values or isinstance(link, Vine) for link in algorithm.advantage):
        found.append("completions that are drawn from within answers, to estimate values")
    if "grad_logp_sq_norm" in algorithm.needs:
        found.append("norms of every completion's gradient")
    return tuple(found)


NUM_PROBE_PROMPTS = 64
"""Prompts whose mean length stands for all."""
FRAGMENTATION = 1.7
"""Resident memory over what a micro-batch keeps, at most, under glibc: measured 1.04 to 1.08 where all weights train, 1.5 to 1.7
with LoRA (SmolLM2-135M, 2,048 tokens)."""
FIRST_STEP_BYTES = 96 * 2**20
"""Bytes that kernels and threads add to the libraries on the CPU, with something to spare: 50 to 64 MiB were measured."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes by what they are for."""

    fixed: dict[str, int]
    """For the whole run."""
    training: int
    sampling: int
    micro_tokens: int
    """Of a micro-batch."""
    releases_memory: bool = False
    """Whether the device's allocator does, before it fails: an accelerator's, not the CPU's."""

    @property
    def peak(self) -> int:
        return sum(self.fixed.values()) + max(self.training, self.sampling)

    @property
    def upper_bound(self) -> int:
        """The peak where nothing is given back: a run should not exceed it."""
        if self.releases_memory:
            return self.peak
        return sum(self.fixed.values()) + FIRST_STEP_BYTES + self.sampling + int(FRAGMENTATION * self.training)

    def __str__(self) -> str:
        held = ", ".join(f"{name} {format_size(size)}" for name, size in self.fixed.items() if size)
        most = (
            ""
            if self.releases_memory
            else f", at most {format_size(self.upper_bound)} as the CPU's allocator leaves holes"
        )
        return (
            f"memory: about {format_size(self.peak)}{most} ({held}, and a micro-batch of {self.micro_tokens:,} tokens "
            f"{format_size(self.training)} or decoding {format_size(self.sampling)})"
        )


def estimate_memory(run: Run) -> MemoryEstimate:
    """Of the run, from the configuration of its model and the first prompts of its task; no weights are read.

    Raises:
        PolicygradError: what cannot be loaded, or an architecture on which nothing can be counted.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    from policygrad.training.setup import (  # a plan needs none of it
        load_policy_tokenizer,
        load_row_options,
        pick_device,
    )

    run, device = resolve_paths(run), pick_device(run.learner.device)
    if run.learner.world_size > 1:
        raise PolicygradError("learner.world_size spreads it over several processes, and it is counted for one only")
    if not isinstance(run.model, str):
        raise PolicygradError("the model is an object: its memory is taken already")
    path = resolve_model(run.model)
    lora = run.learner.adapters or (read_lora(path) if adapter_base(path) is not None else None)
    read_config(adapter_base(path) or path, f"the model {run.model!r}")
    task, config = (
        load_task(
            run.task,
            seed=run.seed,
            eval_data=run.eval_data,
            row_options=load_row_options(run.row_map, run.skip_bad_rows, run.decontaminate),
        ),
        AutoConfig.from_pretrained(adapter_base(path) or path, **pretrained_kwargs(run.trust_remote_code)),
    )
    with torch.device("meta"):
        model: Any = cast(Any, AutoModelForCausalLM).from_config(config, **pretrained_kwargs(run.trust_remote_code))
        whole = sum(p.numel() for p in model.parameters())
        trained = (
            whole if lora is None else sum(p.numel() for p in add_adapters(model, lora).parameters() if p.requires_grad)
        )
    tokenizer = load_policy_tokenizer(run.model, run.tokenizer, model, run.trust_remote_code)
    lengths = [
        len(tokenizer.encode(task.train_example(i).prompt, run.sampling.max_tokens)) for i in range(NUM_PROBE_PROMPTS)
    ]
    prompt, libraries = round(statistics.fmean(lengths)), get_resident_bytes() if device == "cpu" else 0
    dtype, tokens = DTYPES[run.learner.dtype], run.learner.resolve_micro_tokens(device, whole)
    completion = run.sampling.max_tokens
    try:
        kept = saved_activation_bytes(config, dtype, tokens, prompt, completion, run.effective_samples_per_prompt, lora)
    except Exception as error:  # whatever an architecture says to tensors without memory
        raise PolicygradError(f"nothing can be counted on {type(model).__name__}: {error}") from error
    vocabulary = int(model.get_output_embeddings().weight.shape[0])
    logits = (BUFFER_CPU if device == "cpu" else BUFFER_ACCELERATOR) * 4 * 3
    if "logp_old" in run.algorithm.needs or run.algorithm.terms or run.algorithm.forward_needs:  # see `head`
        logits += min(MAX_CACHED, tokens * vocabulary) * 4
    rows = _decoded_rows(run)
    cache = rows * (max(lengths) + completion) * _cache_width(config) * dtype.itemsize
    return MemoryEstimate(
        {"libraries": libraries, **_models(run, whole, trained if lora is not None else None, dtype)},
        training=kept + logits,
        sampling=cache + rows * vocabulary * 24,
        micro_tokens=tokens,
        releases_memory=device != "cpu",
    )


def _models(run: Run, parameters: int, adapters: int | None, dtype: torch.dtype) -> dict[str, int]:
    """Weights, gradients and Adam's moments of all that trains, the copy that undoes a failed step, and the models beside it.
    adapters: parameters that train, in float32, on weights that all models have in common; None = all weights do."""
    algorithm, weight = run.algorithm, dtype.itemsize
    asked = compute_algorithm_cost(algorithm)
    trained, frozen = asked.trained_models, asked.frozen_models + (run.max_staleness > 0)
    moving = parameters if adapters is None else adapters
    held = static_bytes(moving, weight, trained, frozen, adamw=algorithm.update_rule.uses_lr)
    counted = {name: int(size) for name, size in held.items()}
    if adapters is None:
        return counted
    named = algorithm.reference is not None and algorithm.reference.model is not None
    base = parameters // 2 + parameters // 16 if _bits(run) else parameters * weight  # NF4, with its scales
    return {
        "weights": base,
        "adapters": adapters * trained * 4,
        **{name: counted[name] for name in ("gradients", "optimizer", "copy of the state")},
        "other models": adapters * (frozen - named) * 4 + parameters * named * weight,
    }


def _decoded_rows(run: Run) -> int:
    """Count the completions that decode at once: of a training step or of a measurement, whichever has more, up to decode_rows."""
    measured = run.evaluation.problems * run.evaluation.samples_per_prompt
    return min(run.sampling.decode_rows, max(run.prompts_per_step * run.effective_samples_per_prompt, measured))


def _bits(run: Run) -> bool:
    return run.learner.adapters is not None and run.learner.adapters.bits is not None


def _cache_width(config: Any) -> int:
    """Numbers that one token has in the key-value cache, in all layers."""
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return int(2 * text.num_hidden_layers * heads * width)
