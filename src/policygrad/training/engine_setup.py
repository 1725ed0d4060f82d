"""The engine that a run samples with, and what it must know of the learner: its GPUs, what it keeps there, what it needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from policygrad.core.algorithm import Algorithm
from policygrad.models.tokenizer import Tokenizer
from policygrad.samplers.engines.base import EngineSampler
from policygrad.samplers.engines.factory import LearnerFacts, make_engine_factory
from policygrad.samplers.engines.registry import WEIGHTS_FOLDER
from policygrad.training.config.run import RunOptions
from policygrad.training.cost_estimate import compute_algorithm_cost, count_static_bytes
from policygrad.utils.progress import ProgressCallback


def make_run_engine(
    options: RunOptions, algorithm: Algorithm | None, device: str, sampler: Any, phase: ProgressCallback
) -> Callable[[nn.Module, Tokenizer], EngineSampler] | None:
    """Return a function that builds the sampler of the run's engine, from the model and its tokenizer; None for the local one.

    Args:
        algorithm: None = nothing learns.
        sampler: One that was passed from Python, which is refused.
        phase: Called while a server is waited for.
    """
    facts = LearnerFacts(
        gpus=list_learner_gpus(device, options.learner.world_size),
        replays_experts=algorithm is not None and options.learner.routing_replay,
        needs_masks=algorithm is not None and options.sampling.is_truncated,
        resident_bytes=partial(compute_resident_bytes, options, algorithm),
    )
    longest = options.evaluation.resolve_sampling(options.sampling).max_tokens
    sampled = replace(options.sampling, max_tokens=max(options.sampling.max_tokens, longest))  # room for both
    return make_engine_factory(
        options.sampler, Path(options.output or ".") / WEIGHTS_FOLDER, sampled, sampler, phase, facts
    )


def compute_resident_bytes(options: RunOptions, algorithm: Algorithm | None, parameters: int) -> float:
    """Return the bytes of a GPU that the learner keeps while completions are sampled: weights, gradients and moments.

    Args:
        parameters: Of the policy.
    """
    number = 2 if options.learner.resolve().dtype == "bf16" else 4
    if algorithm is None or options.learner.lora:  # adapters and their moments are small
        return float(parameters * number)
    cost = compute_algorithm_cost(algorithm)
    if options.learner.world_size == 1 and (options.learner.offload or options.optimizer.offload):
        return float(parameters * number * (cost.trained_models + cost.frozen_models))
    state = count_static_bytes(parameters, number, cost, options.optimizer, algorithm, options.learner.world_size)
    return sum(state.values())


def list_learner_gpus(device: str, world_size: int) -> range:
    """Return the numbers of the learner's GPUs."""
    kind, _, number = device.partition(":")
    first = int(number or 0)
    return range(first, first + world_size if kind == "cuda" else first)
