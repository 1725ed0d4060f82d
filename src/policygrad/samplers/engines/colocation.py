"""One GPU for a server and the learner: the server sleeps, without its weights and its cache, while the learner learns.

    awake → asleep → weights → awake

Asleep, a server holds no memory of the GPU. At `weights` it has the memory of its weights back, and loads the newest ones, whose
old values are lost; only then it takes back that of its cache, so that at no time two copies of the weights lie beside the cache.
A server that does not go to sleep, or does not wake up, is stopped: its memory is free then, and it starts again awake.

Source: vllm-project/vllm 0.32, vllm/entrypoints/serve/dev/sleep/api_router.py (/sleep, /wake_up, /is_sleeping; tags weights and
kv_cache); sgl-project/sglang 0.5, python/sglang/srt/managers/io_struct.py (`ReleaseMemoryOccupationReqInput`).
"""

from __future__ import annotations

from enum import Enum
from typing import Protocol

from policygrad.errors import EngineError

WEIGHTS, CACHE = "weights", "kv_cache"
"""The parts of a server's memory, by the engines' own names."""
MIN_SHARE, MAX_SHARE = 0.1, 0.9  # of a GPU's memory that a server is started with


class Memory(Enum):
    """The part of its memory on the GPU that a server holds."""

    AWAKE = "all of it"
    ASLEEP = "nothing"
    LOADING = "that of its weights"


class SleepingEngine(Protocol):
    """The requests of an engine."""

    async def sleep(self, url: str) -> None:
        """Free the memory of a server that has no open requests. Return once it is free."""

    async def wake(self, url: str, part: str) -> None:
        """Give a server the memory of its weights, or that of its cache. Return once it has it."""


class ColocatedServer:
    """One server that shares its GPU with the learner."""

    def __init__(self, engine: SleepingEngine, url: str) -> None:
        self.engine, self.url, self.memory = engine, url, Memory.AWAKE
        self.has_slept = False  # if it never has, a refusal is a mistake in how it was started
        self.failures = 0  # consecutive attempts to wake it that failed

    async def lend(self) -> None:
        """Put it to sleep, unless it sleeps.

        Raises:
            ServerUnavailableError: It does not answer.
            EngineError: It refuses.
        """
        if self.memory is Memory.LOADING:  # it was interrupted while it woke up
            await self.engine.wake(self.url, CACHE)
        if self.memory is not Memory.ASLEEP:
            await self.engine.sleep(self.url)
            self.memory, self.has_slept = Memory.ASLEEP, True

    async def begin_waking(self) -> bool:
        """Give it the memory of its weights.

        Returns:
            True if its weights are lost, so that it must load them whatever version it names.
        """
        if self.memory is Memory.ASLEEP:
            await self.engine.wake(self.url, WEIGHTS)
            self.memory = Memory.LOADING
        return self.memory is Memory.LOADING

    async def finish_waking(self) -> None:
        """Give it the memory of its cache, after its weights are loaded."""
        if self.memory is Memory.ASLEEP:
            raise EngineError(f"{self.url} was given weights while it slept")
        if self.memory is Memory.LOADING:
            await self.engine.wake(self.url, CACHE)
            self.memory = Memory.AWAKE
        self.failures = 0

    def mark_restarted(self) -> None:
        """Note that it was started anew: a server starts awake."""
        self.memory, self.failures = Memory.AWAKE, 0


def memory_share(total: float, learner: float, reserve: float = 2 * 2**30) -> float:
    """Return the share of a GPU's memory that a server may take while it is awake.

    Args:
        total: Bytes of the GPU.
        learner: Bytes that the learner keeps meanwhile: weights, gradients, moments.
        reserve: Bytes of two CUDA contexts and of fragments.

    Raises:
        EngineError: Nothing is left.
    """
    share = (total - learner - reserve) / total
    if share < MIN_SHARE:
        raise EngineError(
            f"sampler.colocate: the learner keeps {learner / 2**30:.1f} of the GPU's {total / 2**30:.1f} GiB for weights, "
            "gradients and moments, which leaves nothing for a server. Train adapters (--learner.lora rank=16), divide the state "
            "over more GPUs (--learner.world-size), or give the server a GPU of its own"
        )
    return round(min(share, MAX_SHARE), 3)
