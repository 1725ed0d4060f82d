"""The engines by name. This table is their only list: every fact about an engine is read from its class."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING

from policygrad.utils.plugins import find_plugin, list_plugin_names, load_plugin

if TYPE_CHECKING:  # the command line reads the names without importing torch
    from policygrad.samplers.engines.base import EngineSampler

# Value of `sampler.engine` to the engine's class, as module:name.
ENGINES = {
    "llama_cpp": "policygrad.samplers.engines.llama_cpp:LlamaCppSampler",
    "vllm": "policygrad.samplers.engines.vllm:VllmSampler",
    "sglang": "policygrad.samplers.engines.sglang:SglangSampler",
}
WEIGHTS_FOLDER = "weights"  # default folder for published weights, inside the run's folder or a temporary one


def list_engine_names() -> list[str]:
    """Return the names of all engines, those of other packages last."""
    return list(dict.fromkeys((*ENGINES, *list_plugin_names("engine"))))


def is_engine(name: str) -> bool:
    """Return whether there is an engine of this name."""
    return name in ENGINES or find_plugin("engine", name) is not None


def load_engine_class(name: str) -> type[EngineSampler]:
    """Import the class of an engine."""
    if name not in ENGINES and (plugin := find_plugin("engine", name)) is not None:
        added: type[EngineSampler] = load_plugin(plugin)
        return added
    module, _, attribute = ENGINES[name].partition(":")
    engine: type[EngineSampler] = getattr(import_module(module), attribute)
    return engine


def list_engines(condition: Callable[[type[EngineSampler]], bool]) -> list[str]:
    """Return the names of the engines whose class meets the condition."""
    return [name for name in list_engine_names() if condition(load_engine_class(name))]
