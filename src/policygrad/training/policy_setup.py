"""The policy of a run: its model, its tokenizer, and what samples from it."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch import nn

from policygrad.core.algorithm import Algorithm
from policygrad.errors import ConfigError, ModelError
from policygrad.models.loading import compute_head_in_float32, load_model
from policygrad.models.tokenizer import Tokenizer, load_tokenizer
from policygrad.rollout.environment import INITIAL
from policygrad.rollout.runners import EpisodeContext
from policygrad.samplers.base import AsyncCloseable, Sampler
from policygrad.samplers.local.sampler import LocalSampler
from policygrad.training.config.run import RunOptions
from policygrad.utils.async_runner import AsyncRunner

PROBE_EXAMPLES = 64  # examples of a generated task that are searched for a column


@dataclass(frozen=True, eq=False)
class LoadedPolicy:
    """The model that is trained or evaluated."""

    model: nn.Module
    tokenizer: Tokenizer
    device: str


def load_policy(options: RunOptions, algorithm: Algorithm | None, device: str) -> LoadedPolicy:
    """Load model and tokenizer. algorithm: None = an evaluation."""
    model = load_model(
        options.model,
        dtype=options.learner.resolve().dtype,
        device=device,
        trust_remote_code=options.trust_remote_code,
        lora=None if algorithm is None else options.learner.adapters,
        seed=options.seed,
    )
    if algorithm is not None and options.learner.resolve(algorithm.head).head == "fp32":
        compute_head_in_float32(model)  # before it is cloned for the sampler
    tokenizer = load_policy_tokenizer(
        options.model, options.tokenizer, model, options.trust_remote_code, options.template_options
    )
    return LoadedPolicy(model, tokenizer, device)


def load_policy_tokenizer(
    model: Any,
    tokenizer: Any,
    network: nn.Module,
    trust_remote_code: bool = False,
    template_options: Sequence[str] = (),
) -> Tokenizer:
    """Load the requested tokenizer, or the model's own.

    Raises:
        ModelError: The model is an object that names no folder, and there is no tokenizer; or see `with_template_options`.
    """
    source = model if isinstance(model, str) else getattr(getattr(network, "config", None), "_name_or_path", "")
    if not (tokenizer or source):
        raise ModelError("the model is an object that names no folder to read its tokenizer from: pass tokenizer= too")
    loaded = load_tokenizer(tokenizer or source, network, trust_remote_code=trust_remote_code)
    return loaded.with_template_options(template_options)


def make_sampler(
    stack: ExitStack,
    policy: LoadedPolicy,
    factory: Any,
    options: RunOptions,
    algorithm: Algorithm | None,
    run_async: AsyncRunner,
) -> Sampler:
    """Return what samples from the policy.

    Args:
        stack: Closes it.
        factory: A sampler, or a function of (model, tokenizer) that makes one; None = the local one.

    Raises:
        ConfigError: The factory makes no sampler.
    """
    model, tokenizer = policy.model, policy.tokenizer
    samples_ahead = algorithm is not None and options.max_staleness > 0 and not options.publishes_sharded
    if samples_ahead and (factory is None or callable(factory)):  # it samples while the learner changes its weights
        from policygrad.models.replica import clone_model

        model = clone_model(model)
    if factory is None:
        routing = None
        if algorithm is not None and options.learner.routing_replay:
            from policygrad.models.moe_routing import Routing

            routing = Routing.for_model(model)
        loaded: object = LocalSampler.from_tokenizer(
            model, tokenizer, routing, cuda_graphs=options.sampler.cuda_graphs, kernels=options.sampler.kernels
        )
    else:
        loaded = call_factory(factory, Sampler, model, tokenizer)
    if not isinstance(loaded, Sampler):
        raise ConfigError(
            f"sampler is {loaded!r}: pass an object with `async generate(requests)` and `async update(weights)`, see "
            "policygrad.Sampler, or a function of (model, tokenizer) that returns one"
        )
    if isinstance(loaded, AsyncCloseable):
        stack.callback(lambda: run_async(_close(loaded)))
    return loaded


def load_opponent(name: str, options: RunOptions, policy: LoadedPolicy) -> EpisodeContext:
    """Load a model that takes part in the policy's episodes: the run's own before training, or another one by name.

    Raises:
        ModelError: a model that cannot be loaded.
    """
    if name == INITIAL:
        from policygrad.models.replica import clone_model

        network, tokenizer = clone_model(policy.model), policy.tokenizer
    else:
        dtype = options.learner.resolve().dtype
        network = load_model(name, dtype=dtype, device=policy.device, trust_remote_code=options.trust_remote_code)
        tokenizer = load_policy_tokenizer(name, None, network, options.trust_remote_code)
    network.requires_grad_(False)
    return EpisodeContext(LocalSampler.from_tokenizer(network, tokenizer), tokenizer)


async def _close(sampler: AsyncCloseable) -> None:
    result: object = sampler.close()
    if isinstance(result, Awaitable):  # a custom sampler's may be synchronous
        await result


def call_factory(value: object, kind: type, *args: object) -> object:
    """Return `value`, or the result of calling it if it is a factory. A class is always a factory, even where a protocol would
    accept it as an instance."""
    is_factory = callable(value) and (isinstance(value, type) or not isinstance(value, kind))
    return value(*args) if is_factory else value  # type: ignore[operator]
