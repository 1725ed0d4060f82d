"""Weights sent to servers over a process group with each server, instead of through a folder.

`WeightTransfer` replaces `VersionFolder` and writes nothing: published weights stay in the sampler's model, and a server that comes
back later is sent the same tensors. The requests of an engine are in its own file.
"""

from __future__ import annotations

import asyncio
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from policygrad.errors import EngineError
from policygrad.samplers.config import SamplerConfig
from policygrad.samplers.engines.http import HttpClient, ServerUnavailableError
from policygrad.utils.async_runner import gather_or_cancel, run_in_daemon_thread
from policygrad.weight_sync.base import (
    BUCKET_BYTES,
    Bucket,
    LazyStateDict,
    PublishedWeights,
    StaleWeightsError,
    iter_buckets,
    tensor_specs,
    with_alias,
)
from policygrad.weight_sync.folder import VersionFolder, WeightVersion, find_tied_head
from policygrad.weight_sync.nccl import (
    GroupError,
    GroupFactory,
    Nccl,
    NcclGroup,
    TransferGroup,
    check_device,
    find_endpoints,
)

CONTROL_TIMEOUT = 10.0
"""Seconds for a request that moves no weights, for the end of a group, and for a transfer that is cancelled."""


@dataclass(eq=False)
class ServerGroup:
    """The process group with one server."""

    name: str
    group: TransferGroup = field(repr=False)
    version: str = ""  # name of the last version that was sent completely


class WeightTransfer(VersionFolder, ABC):
    """The published weights, and the process groups over which they are sent. An engine implements the requests."""

    group_class: ClassVar[type[NcclGroup]]  # the engine's groups
    sends_tied_head: ClassVar[bool] = False
    """True if an output head tied to the embeddings must be sent a second time under its own name."""

    def __init__(self, root: Path, model: nn.Module, config: SamplerConfig, bucket_bytes: int = BUCKET_BYTES) -> None:
        """
        Args:
            root: The folder of versions that the engine would read otherwise.
            model: The sampler's, which holds the published weights.
            config: Its `recovery_timeout` limits a server's update.

        Raises:
            EngineError: No group can be formed here.
        """
        super().__init__(root, lambda tensors, folder: None)
        self._model, self._timeout, self._bucket_bytes = model, config.recovery_timeout, bucket_bytes
        self._make_group = self.make_group_factory(next(model.parameters()).device, config.urls)
        self._tied_head = find_tied_head(model) if self.sends_tied_head else None
        self._tensors: Mapping[str, Tensor] = {}
        self._groups: dict[str, ServerGroup] = {}
        self._interrupted = set[str]()  # servers that may be in the middle of an update

    # Requests of the engine.

    @abstractmethod
    async def get_world_size(self, http: HttpClient, url: str) -> int:
        """Return the number of the server's processes, one GPU each. Raises EngineError if it cannot be sent weights."""

    @abstractmethod
    async def init_group(self, http: HttpClient, url: str, init_request: Mapping[str, Any]) -> None:
        """Let the server join the group."""

    @abstractmethod
    async def receive_bucket(self, http: HttpClient, url: str, bucket: Bucket, group: str, version: str) -> None:
        """Let the server receive a bucket; return when it has.

        Args:
            group: Name of the group.
            version: Name of the version that the bucket belongs to.
        """

    @abstractmethod
    async def destroy_group(self, http: HttpClient, url: str, group: str) -> None:
        """Let the server leave the group."""

    async def start_update(self, http: HttpClient, url: str) -> None:
        """Called before the first bucket."""

    async def finish_update(self, http: HttpClient, url: str, version: str) -> None:
        """Called after the last bucket."""

    async def recover(self, http: HttpClient, url: str) -> None:
        """Called before a server that may be in the middle of an update joins a new group."""

    def make_group_factory(self, device: torch.device, urls: Sequence[str]) -> GroupFactory:
        """Return what forms groups with these servers. Raises EngineError if this machine can form none."""
        check_device(device, urls)
        library = Nccl()
        return lambda world_size, address, name: self.group_class(world_size, address, name, device, library)

    # The interface of `VersionFolder`.

    def publish(self, weights: PublishedWeights) -> WeightVersion:
        """Make these the weights that are sent from now on: the model's own tensors, or, for a sharded policy, tensors that are
        gathered bucket by bucket for each server as long as the learner has them."""
        tensors = weights.tensors
        if not isinstance(tensors, LazyStateDict):
            parameters = dict(self._model.named_parameters())
            tensors = {name: parameters[name].detach() for name in tensors}
        self._tensors = tensors if self._tied_head is None else with_alias(tensors, *self._tied_head)
        name = f"v{weights.version:08d}-{uuid.uuid4().hex[:8]}"
        size = sum(spec.nbytes for spec in tensor_specs(self._tensors).values())
        return WeightVersion(name, weights.version, self.root / name, size)

    def remove_old_versions(self, *kept: WeightVersion) -> None:
        """Do nothing: older versions are stored nowhere."""

    async def send(self, http: HttpClient, url: str, version: WeightVersion, server_version: object) -> None:
        """Send all weights to a server; return when it has them. A cancelled transfer gets `CONTROL_TIMEOUT` seconds to finish,
        because a server that waits for the rest of a broadcast waits forever.

        Args:
            server_version: The version that the server reports; None if it reports none.

        Raises:
            ServerUnavailableError: It is unreachable, fails or takes too long; it is in no group afterwards.
            EngineError: It cannot be sent weights; the message says how to start it.
        """
        task = asyncio.ensure_future(self._send(http, url, version, server_version))
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait([task], timeout=CONTROL_TIMEOUT)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            raise

    async def close(self, http: HttpClient) -> None:
        """Destroy all groups, on this side and on the servers that are available."""

        async def destroy(url: str, group: ServerGroup) -> None:
            with suppress(ServerUnavailableError, EngineError, TimeoutError):  # it is gone, or has left already
                async with asyncio.timeout(CONTROL_TIMEOUT):
                    await self.destroy_group(http, url, group.name)

        groups, self._groups = self._groups, {}
        await asyncio.gather(*(destroy(url, group) for url, group in groups.items()), *map(_abort, groups.values()))

    async def _send(self, http: HttpClient, url: str, version: WeightVersion, server_version: object) -> None:
        previous = self._groups.get(url)
        if previous is not None and server_version not in (None, previous.version):  # it restarted, and is in no group
            await self._drop_group(url)
        try:
            async with asyncio.timeout(self._timeout):
                group = self._groups.get(url)
                if group is None:
                    if url in self._interrupted:
                        await self.recover(http, url)
                    world_size = 1 + await self.get_world_size(http, url)
                    name = f"policygrad-{uuid.uuid4().hex[:12]}"
                    joined = self._make_group(world_size, find_endpoints(url)[0], name)
                    group = self._groups[url] = ServerGroup(name, joined)
                    request = self.init_group(http, url, joined.init_request())
                    await gather_or_cancel([request, run_in_daemon_thread(joined.join)])
                await self.start_update(http, url)
                buckets = iter_buckets(self._tensors, self._bucket_bytes)
                is_last = False
                while not is_last:
                    # gathering may wait for the learner, which must not block the event loop
                    is_lazy = isinstance(self._tensors, LazyStateDict)
                    bucket = await asyncio.to_thread(next, buckets) if is_lazy else next(buckets)
                    request = self.receive_bucket(http, url, bucket, group.name, version.name)
                    send = partial(group.group.send, bucket.tensors)
                    await gather_or_cancel([request, run_in_daemon_thread(send)])
                    is_last = bucket.is_last
                    del bucket, request, send  # before the next one is gathered
                await self.finish_update(http, url, version.name)
                group.version = version.name
                self._interrupted.discard(url)
        except BaseException as error:
            await self._drop_group(url)
            if isinstance(error, TimeoutError):
                raise ServerUnavailableError(
                    f"it has not loaded the weights within {self._timeout:g} seconds"
                ) from error
            if isinstance(error, GroupError):
                raise ServerUnavailableError(f"the process group with it is broken: {error}") from error
            if isinstance(error, StaleWeightsError):
                raise ServerUnavailableError(f"it is sent the next weights: {error}") from error
            raise

    async def _drop_group(self, url: str) -> None:
        """Destroy this side of a server's group."""
        self._interrupted.add(url)
        if (group := self._groups.pop(url, None)) is not None:
            await _abort(group)


async def _abort(group: ServerGroup) -> None:
    """Abort a group. If that fails or takes long, it is left behind: no one needs it."""
    with suppress(GroupError, TimeoutError):
        await asyncio.wait_for(run_in_daemon_thread(group.group.abort), CONTROL_TIMEOUT)
