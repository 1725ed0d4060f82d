"""Adapters by name: whether servers are sent a run's adapter alone, and what is said where one does not take it.

Each version has a name of its own, that of its publication, which every request says. So a token's version is the name that it was
asked under, and what was kept of a prompt under an older one is never read: vLLM hashes prefixes with the adapter's name
(vllm/v1/core/kv_cache_utils.py), SGLang keeps them by an id that each loading draws anew (python/sglang/srt/lora/lora_registry.py).
A server answers what it was asked under the old name before it is given the new one; then the old one is taken out of it.
"""

from __future__ import annotations

from torch import nn

from policygrad.errors import EngineError
from policygrad.samplers.config import ADAPTER, WHOLE
from policygrad.weight_sync.adapter_folder import unfit


def by_name(way: str, model: nn.Module, engine: str, takes: bool) -> bool:
    """Whether servers are sent the adapter alone. way: `SamplerConfig.publish`. engine: its name, for people. takes: whether its
    servers can.

    Raises:
        EngineError: the adapter alone is asked for, and cannot be sent.
    """
    reason = unfit(model) if takes else f"{engine} takes no adapters by name"
    if way == ADAPTER and reason:
        raise EngineError(
            f"--sampler.publish {ADAPTER}: {reason}: send all weights, with what is trained in them, --sampler.publish {WHOLE}"
        )
    return way != WHOLE and not reason


def not_taken(url: str, said: object, hints: tuple[tuple[str, str], ...], engine: str) -> EngineError:
    """What is raised where a server does not take an adapter. said: its answer. hints: (what an answer has in it, the way out); the
    first that fits is told. engine: as the command line names it."""
    hint = next((way for known, way in hints if known.lower() in str(said).lower()), "")
    start = f"start it as `policygrad engine {engine} --lora rank=N --print` says"
    return EngineError(
        f"{url} does not take the adapter: {said}. {hint or start}; or send all weights, --sampler.publish {WHOLE}"
    )
