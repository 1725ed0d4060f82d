"""From a run's `[sampler]` to the engine it names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from policygrad.errors import ConfigError, EngineError
from policygrad.models.tokenizer import Tokenizer
from policygrad.samplers.base import SamplingParams
from policygrad.samplers.config import ENGINES, LOCAL, SamplerConfig
from policygrad.samplers.engines.http import HttpClient, ServerUnavailableError
from policygrad.utils.progress import ProgressCallback, ignore_progress

if TYPE_CHECKING:
    from policygrad.samplers.engines.base import EngineSampler


WEIGHTS_FOLDER = "weights"
"""In the run's folder, or a temporary one."""
_ASKS = 10.0
"""Seconds."""
_KNOWN = (
    ("/props", "llama_cpp", "default_generation_settings"),
    ("/version", "vllm", "version"),
    ("/get_model_info", "sglang", "model_path"),
    ("/model_info", "sglang", "model_path"),
)
"""(question, engine, what is in its answer)."""


def load_engine_class(name: str) -> type[EngineSampler]:
    """The class of an engine's sampler."""
    module, _, attribute = ENGINES[name].partition(":")
    found: type[EngineSampler] = getattr(import_module(module), attribute)
    return found


def build_engine_sampler(
    config: SamplerConfig,
    model: nn.Module,
    tokenizer: Tokenizer,
    folder: Path,
    temperature: float,
    on_progress: ProgressCallback = ignore_progress,
) -> EngineSampler:
    """What draws from servers. folder: where weights are published, unless the configuration says another. tell: is told when no
    server is there."""
    own = folder if config.folder is None else Path(config.folder).expanduser()
    return load_engine_class(config.engine)(model, tokenizer, config, own.resolve(), temperature, on_progress)


async def detect_engine(url: str) -> str:
    """Which engine answers at an address, by a question that only it knows.

    Raises:
        EngineError: nobody answers, or none of them.
    """
    http = HttpClient(_ASKS)
    try:
        for path, name, known in _KNOWN:
            try:
                told = await http.get(url + path)
            except EngineError:  # no such question there
                continue
            except ServerUnavailableError as error:
                raise EngineError(f"{url} does not answer: {error}") from error
            if isinstance(told, dict) and known in told:
                return name
    finally:
        await http.close()
    raise EngineError(f"{url} answers as none of {', '.join(ENGINES)} does")


def make_engine_factory(
    config: SamplerConfig,
    folder: Path,
    sampling: SamplingParams,
    sampler: Any = None,
    on_progress: ProgressCallback = ignore_progress,
) -> Callable[[nn.Module, Tokenizer], EngineSampler] | None:
    """What makes the sampler that is configured, once there are a model and a tokenizer; None = this process samples.

    folder, tell: as `build_engine_sampler`'s. given: a sampler from Python.

    Raises:
        ConfigError: two samplers.
    """
    if config.engine == LOCAL:
        return None
    if sampler is not None:
        raise ConfigError(f"sampler= was given, and sampler.engine is {config.engine}: leave one of the two away")

    def made(model: nn.Module, tokenizer: Tokenizer) -> EngineSampler:
        wide = replace(
            config, context_length=config.resolve_context_length(tokenizer.context_length, sampling.max_tokens)
        )
        return build_engine_sampler(wide, model, tokenizer, folder, sampling.temperature, on_progress)

    return made
