"""Make the sampler of an engine: where its servers run and what they share with the learner; and tell which engine a server is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from policygrad.errors import ConfigError, EngineError
from policygrad.samplers.engines.colocation import memory_share
from policygrad.samplers.engines.http import HttpClient, ServerUnavailableError
from policygrad.samplers.engines.installation import find_installation
from policygrad.samplers.engines.registry import list_engine_names, load_engine_class
from policygrad.utils.progress import ProgressCallback, ignore_progress

if TYPE_CHECKING:
    from torch import nn

    from policygrad.models.tokenizer import Tokenizer
    from policygrad.samplers.base import SamplingParams
    from policygrad.samplers.config import SamplerConfig
    from policygrad.samplers.engines.base import EngineSampler

LEARNER_GPU_SHARE, OWN_GPU_SHARE = 0.4, 0.9
"""Share of a GPU's memory for all servers on one that also learns, and on one that only samples."""
_DETECTION_TIMEOUT = 10.0  # seconds per request


@dataclass(frozen=True)
class LearnerFacts:
    """Facts about the learner that an engine samples for."""

    gpus: Sequence[int] = ()  # their numbers
    replays_experts: bool = False  # it needs the experts that each token was routed to
    needs_masks: bool = False  # it needs the tokens that top-k and top-p left
    resident_bytes: Callable[[int], float] = lambda parameters: 0.0
    """Returns the bytes of a GPU that the learner keeps while completions are sampled, from the policy's number of parameters."""


async def detect_engine(url: str) -> str:
    """Return the name of the engine that serves at an address, found by a route that only it has.

    Raises:
        EngineError: No server answers, or it is none of the engines.
    """
    http = HttpClient(_DETECTION_TIMEOUT)
    try:
        for name in list_engine_names():
            for route, key in load_engine_class(name).detection_routes:
                try:
                    reply = await http.get(url + route)
                except EngineError:  # the server has no such route
                    continue
                except ServerUnavailableError as error:
                    raise EngineError(f"{url} does not answer: {error}") from error
                if isinstance(reply, dict) and key in reply:
                    return name
    finally:
        await http.close()
    raise EngineError(f"{url} is not a server of {', '.join(list_engine_names())}")


def build_engine_sampler(
    config: SamplerConfig,
    model: nn.Module,
    tokenizer: Tokenizer,
    folder: Path,
    temperature: float,
    on_progress: ProgressCallback = ignore_progress,
) -> EngineSampler:
    """Return the sampler of the configured engine.

    Args:
        folder: Where weights are published if `config.folder` is None, unless the servers are started here and shared memory has
            room. Their logs are beside it.
        on_progress: Called while no server is available.
    """
    from policygrad.weight_sync.folder import choose_folder  # imports torch

    logs = folder.resolve().parent
    if config.folder is not None:
        folder = Path(config.folder).expanduser()
    elif not config.urls:
        folder = choose_folder(folder, sum(p.numel() * p.element_size() for p in model.parameters()))
    engine = load_engine_class(config.engine)
    return engine(model, tokenizer, config, folder.resolve(), temperature, on_progress, logs)


def make_engine_factory(
    config: SamplerConfig,
    folder: Path,
    sampling: SamplingParams,
    sampler: Any = None,
    on_progress: ProgressCallback = ignore_progress,
    learner: LearnerFacts | None = None,
) -> Callable[[nn.Module, Tokenizer], EngineSampler] | None:
    """Return a function that builds the configured engine's sampler from a model and its tokenizer; None for the local sampler.

    Args:
        folder, on_progress: As in `build_engine_sampler`.
        sampler: A sampler passed from Python.
        learner: None = nothing learns.

    Raises:
        ConfigError: An engine is configured and a sampler is passed too, or an engine to start is not installed.
    """
    import torch

    from policygrad.samplers.config import LOCAL

    if config.engine == LOCAL:
        return None
    if sampler is not None:
        raise ConfigError(f"sampler= is given and sampler.engine is {config.engine}. Use only one of them.")
    if not config.urls:  # before anything is loaded
        find_installation(load_engine_class(config.engine), config.engine, config.python)

    facts = learner or LearnerFacts()

    def make(model: nn.Module, tokenizer: Tokenizer) -> EngineSampler:
        resolved = replace(
            config, context_length=config.resolve_context_length(tokenizer.context_length, sampling.max_tokens)
        )
        if not config.urls:
            resolved = assign_gpus(resolved, facts.gpus, torch.cuda.device_count())
        if resolved.colocate and not resolved.gpu_memory:
            total = torch.cuda.get_device_properties(resolved.gpus[0]).total_memory
            resident = facts.resident_bytes(sum(p.numel() for p in model.parameters()))
            per_gpu = -(-resolved.servers // len(resolved.gpus))
            resolved = replace(resolved, gpu_memory=round(memory_share(total, resident) / per_gpu, 3))
        engine = build_engine_sampler(resolved, model, tokenizer, folder, sampling.temperature, on_progress)
        engine.records_experts, engine.returns_masks = facts.replays_experts, facts.needs_masks
        return engine

    return make


def assign_gpus(config: SamplerConfig, learner_gpus: Sequence[int], gpu_count: int) -> SamplerConfig:
    """Return the options with the GPUs of the servers that the run starts, and their share of a GPU that is not theirs alone.

    Args:
        learner_gpus: Numbers of the learner's GPUs.
        gpu_count: GPUs of this machine; 0 = servers run on the CPU.

    Raises:
        ConfigError: A GPU is named that does not exist, or there is none to share.
    """
    if config.colocate and not learner_gpus:
        raise ConfigError(
            "sampler.colocate shares the learner's GPU with its servers, and the learner has none: leave it out, a server on the "
            "CPU and the learner share the memory"
        )
    if missing := [gpu for gpu in config.gpus if gpu >= gpu_count]:
        raise ConfigError(f"sampler.gpus names GPU {missing[0]}, and this machine has {gpu_count}, numbered from 0")
    free = [gpu for gpu in range(gpu_count) if gpu not in learner_gpus]
    gpus = config.gpus or tuple(learner_gpus if config.colocate else free) or tuple(range(gpu_count))
    if not gpus or config.colocate:
        return replace(config, gpus=gpus)
    used = [gpus[i % len(gpus)] for i in range(config.servers)]
    per_gpu = max(used.count(gpu) for gpu in used)
    available = LEARNER_GPU_SHARE if set(used) & set(learner_gpus) else OWN_GPU_SHARE
    is_shared = per_gpu > 1 or available < OWN_GPU_SHARE
    share = config.gpu_memory or (round(available / per_gpu, 3) if is_shared else 0.0)
    return replace(config, gpus=gpus, gpu_memory=share)
