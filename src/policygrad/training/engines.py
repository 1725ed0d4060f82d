"""From a run's `[sampler]` to the engine it names."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from policygrad.errors import ConfigError
from policygrad.models.tokenizer import Tokenizer
from policygrad.samplers.config import ENGINES, LOCAL, SamplerConfig

if TYPE_CHECKING:
    from policygrad.samplers.engine import EngineSampler
    from policygrad.training.config.run import Run

FOLDER = "weights"
"""In the run's folder."""


def engine_class(name: str) -> type[EngineSampler]:
    """The class of an engine's sampler."""
    module, _, attribute = ENGINES[name].partition(":")
    found: type[EngineSampler] = getattr(import_module(module), attribute)
    return found


def engine_sampler(
    config: SamplerConfig, model: nn.Module, tokenizer: Tokenizer, folder: Path, temperature: float
) -> EngineSampler:
    """What draws from servers. folder: where weights are published, unless the configuration says another."""
    own = folder if config.folder is None else Path(config.folder).expanduser()
    return engine_class(config.engine)(model, tokenizer, config, own.resolve(), temperature)


def engine_of(run: Run, given: Any = None) -> Callable[[nn.Module, Tokenizer], EngineSampler] | None:
    """What makes a run's sampler, once there are a model and a tokenizer; None = this process samples.

    given: a sampler from Python.

    Raises:
        ConfigError: two samplers.
    """
    if run.sampler.engine == LOCAL:
        return None
    if given is not None:
        raise ConfigError(f"sampler= was given, and sampler.engine is {run.sampler.engine}: leave one of the two away")
    folder = Path(run.output or ".") / FOLDER
    return lambda model, tokenizer: engine_sampler(run.sampler, model, tokenizer, folder, run.sampling.temperature)
