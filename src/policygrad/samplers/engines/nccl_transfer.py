"""Weights into servers over a group of processes with each: what a server is asked, and what it is sent at the same time.

Stands where the folder of versions stands (`VersionFolder`), and writes nothing: what is published stays where it is, in the
sampler's model, and a server that comes back later is sent the same. An engine's own words are a file of their own.
"""

from __future__ import annotations

import asyncio
import threading
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn

from policygrad.errors import EngineError
from policygrad.models.adapters import adapter_configs
from policygrad.samplers.config import NCCL
from policygrad.samplers.engines.base import EngineSampler
from policygrad.samplers.engines.http import HttpClient, ServerUnavailableError
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
from policygrad.weight_sync.nccl import GroupError

if TYPE_CHECKING:
    from policygrad.weight_sync.nccl import GroupFactory, TransferGroup


CONTROL_TIMEOUT = 10.0
"""Seconds for a question that needs no weights, for the end of a group, and for what is under way when somebody breaks it off."""


@dataclass(eq=False)
class ServerGroup:
    """A group with one server."""

    name: str
    group: TransferGroup = field(repr=False)
    version: str = ""
    """What was sent over it last, whole."""


class WeightTransfer(VersionFolder, ABC):
    """What is published, and the groups that it is sent over."""

    def __init__(
        self,
        root: Path,
        model: nn.Module,
        timeout: float,
        group_factory: GroupFactory,
        address: Callable[[str], str],
        tied_head: tuple[str, str] | None = None,
        bucket: int = BUCKET_BYTES,
    ) -> None:
        """root: where an engine that is published to by a folder has it. model: the sampler's, which has the weights that are
        published. patience: seconds for all of a server's. address: this machine's, as seen from a server's. twice: a name that is
        sent too, and the one whose tensor it has."""
        super().__init__(root, _nothing)
        self._model, self._timeout, self._group_factory, self._address = model, timeout, group_factory, address
        self._tied_head, self._bucket = tied_head, bucket
        self._tensors: Mapping[str, Tensor] = {}
        self._groups: dict[str, ServerGroup] = {}
        self._broken = set[str]()
        """Servers that may be in the middle of something."""

    # what an engine fills in

    @abstractmethod
    async def get_world_size(self, http: HttpClient, url: str) -> int:
        """Processes of a server, each with a GPU. Raises EngineError for one that cannot be sent weights."""

    @abstractmethod
    async def init_group(self, http: HttpClient, url: str, init_request: Mapping[str, Any]) -> None:
        """Returns when the server has joined."""

    @abstractmethod
    async def receive_bucket(self, http: HttpClient, url: str, bucket: Bucket, group: str, version: str) -> None:
        """Has it take a bucket; returns when it has. group: its name. version: of all of them."""

    @abstractmethod
    async def destroy_group(self, http: HttpClient, url: str, group: str) -> None:
        """Has it forget the group."""

    async def start_update(self, http: HttpClient, url: str) -> None:
        """Before the first bucket."""

    async def finish_update(self, http: HttpClient, url: str, version: str) -> None:
        """After the last."""

    async def recover(self, http: HttpClient, url: str) -> None:
        """Before a server joins that may be in the middle of something."""

    # instead of a folder

    def publish(self, weights: PublishedWeights) -> WeightVersion:
        """From now on this is what is sent: the model's own tensors, which hold these weights, or what is gathered, a bucket at a
        time for each server, as long as the learner has it."""
        tensors = weights.tensors
        if not isinstance(tensors, LazyStateDict):
            own = dict(self._model.named_parameters())
            tensors = {name: own[name].detach() for name in tensors}
        self._tensors = tensors if self._tied_head is None else with_alias(tensors, *self._tied_head)
        name, size = (
            f"v{weights.version:08d}-{uuid.uuid4().hex[:8]}",
            sum(t.nbytes for t in tensor_specs(self._tensors).values()),
        )
        return WeightVersion(name, weights.version, self.root / name, size)

    def remove_old_versions(self, current: WeightVersion) -> None:
        """Of older versions nothing is anywhere."""

    # what is sent

    async def send(self, http: HttpClient, url: str, publication: WeightVersion, server_version: object) -> None:
        """Returns when the server has all of the weights. What has begun is given `CONTROL_TIMEOUT` seconds more when it is broken off, as a
        server that waits for the rest of a broadcast waits for ever. known: the version that it says it has, None = none.

        Raises:
            ServerUnavailableError: it cannot be reached, fails on the way, or takes too long: it is in no group any more.
            EngineError: it cannot be sent weights, with what to do.
        """
        await _to_its_end(self._send(http, url, publication, server_version))

    async def close(self, http: HttpClient) -> None:
        """Ends the groups, and has servers that are there forget them."""

        async def left(url: str, joined: ServerGroup) -> None:
            with suppress(
                ServerUnavailableError, EngineError, TimeoutError
            ):  # it is gone, or has forgotten it: both will do
                async with asyncio.timeout(CONTROL_TIMEOUT):
                    await self.destroy_group(http, url, joined.name)

        found, self._groups = self._groups, {}
        await asyncio.gather(*(left(url, joined) for url, joined in found.items()), *map(_ended, found.values()))

    async def _send(self, http: HttpClient, url: str, publication: WeightVersion, known: object) -> None:
        held = self._groups.get(url)
        if held is not None and known not in (None, held.version):  # it was started again since, and is in no group
            await self._drop(url)
        try:
            async with asyncio.timeout(self._timeout):
                joined = self._groups.get(url) or await self._join(http, url)
                await self.start_update(http, url)
                portions = iter_buckets(self._tensors, self._bucket)
                while await self._one(http, url, joined, portions, publication.name):
                    pass
                await self.finish_update(http, url, publication.name)
                joined.version = publication.name
                self._broken.discard(url)
        except TimeoutError as error:
            await self._drop(url)
            raise ServerUnavailableError(
                f"it has not taken over the weights within {self._timeout:g} seconds"
            ) from error
        except GroupError as error:
            await self._drop(url)
            raise ServerUnavailableError(f"the group with it is broken: {error}") from error
        except StaleWeightsError as error:
            await self._drop(url)
            raise ServerUnavailableError(f"it is sent the next weights: {error}") from error
        except BaseException:
            await self._drop(url)
            raise

    async def _one(
        self, http: HttpClient, url: str, joined: ServerGroup, portions: Iterator[Bucket], version: str
    ) -> bool:
        """Sends one bucket, and lets go of it; whether there are more. What is gathered may wait for what the learner is at, which
        this loop does not."""
        bucket = await asyncio.to_thread(next, portions) if isinstance(self._tensors, LazyStateDict) else next(portions)
        asked = self.receive_bucket(http, url, bucket, joined.name, version)
        await _both(asked, partial(joined.group.send, bucket.tensors))
        return not bucket.is_last

    async def _join(self, http: HttpClient, url: str) -> ServerGroup:
        if url in self._broken:
            await self.recover(http, url)
        size = 1 + await self.get_world_size(http, url)
        name = f"policygrad-{uuid.uuid4().hex[:12]}"
        joined = self._groups[url] = ServerGroup(name, self._group_factory(size, self._address(url), name))
        await _both(self.init_group(http, url, joined.group.init_request()), joined.group.join)
        return joined

    async def _drop(self, url: str) -> None:
        """The server is in no group any more, as far as this side goes."""
        self._broken.add(url)
        joined = self._groups.pop(url, None)
        if joined is not None:
            await _ended(joined)


def _nothing(tensors: Mapping[str, Tensor], folder: Path) -> None:
    raise AssertionError("nothing is written")


async def _both(asked: Coroutine[Any, Any, None], sent: Callable[[], None]) -> None:
    """A question, and what its answer waits for. The first error is raised, and the other one of them is not waited for."""
    question, thread = asyncio.ensure_future(asked), _in_thread(sent)
    try:
        await asyncio.gather(question, thread)
    finally:
        question.cancel()
        thread.cancel()
        await asyncio.gather(question, thread, return_exceptions=True)


async def _ended(joined: ServerGroup) -> None:
    """What waits in the group is let go. Where that fails or takes long there is nothing more to do: nobody needs it."""
    with suppress(GroupError, TimeoutError):
        await asyncio.wait_for(_in_thread(joined.group.abort), CONTROL_TIMEOUT)


def _in_thread(work: Callable[[], None]) -> asyncio.Future[None]:
    """What blocks, in a thread that the process does not wait for at its end: a peer that is gone may never answer."""
    loop = asyncio.get_running_loop()
    found: asyncio.Future[None] = loop.create_future()

    def settle(error: BaseException | None) -> None:
        if found.done():  # given up
            return
        if error is None:
            found.set_result(None)
        else:
            found.set_exception(error)

    def run() -> None:
        error: BaseException | None = None
        try:
            work()
        except BaseException as raised:  # whoever waits is told
            error = raised
        with suppress(RuntimeError):  # the loop is closed, and nobody waits
            loop.call_soon_threadsafe(settle, error)

    threading.Thread(target=run, daemon=True).start()
    return found


async def _to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """Awaits it; whoever breaks that off waits until it is over, or for as long as a question may take."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task], timeout=CONTROL_TIMEOUT)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        raise


# A sampler whose servers may be sent weights over NCCL, instead of reading them from a folder: --sampler.weight-transport nccl.


class NcclEngineSampler(EngineSampler):
    """An engine says how: `transfers`, and whether it takes an output head that is tied to the embeddings by its own name too."""

    send_tied_head: ClassVar[bool] = False
    group_factory_override: ClassVar[GroupFactory | None] = None
    """How a group is formed; None = over NCCL."""
    transfer: WeightTransfer | None = None
    """None = by a folder."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """As `EngineSampler`.

        Raises:
            EngineError: a model that cannot be sent, or no GPU for it.
        """
        super().__init__(*args, **options)
        if self.config.weight_transport != NCCL:
            return
        if adapter_configs(self.model):
            raise EngineError("adapters are published by a folder: --sampler.weight-transport folder")
        from policygrad.weight_sync.nccl import find_local_address  # torch.distributed takes a while to import

        self.transfer = self.versions = self.transfer_class()(
            self.versions.root,
            self.model,
            self.config.recovery_timeout,
            type(self).group_factory_override or self.group_factory(),
            find_local_address,
            find_tied_head(self.model) if self.send_tied_head else None,
        )

    @abstractmethod
    def transfer_class(self) -> Callable[..., WeightTransfer]:
        """The class that has the engine's words."""

    @abstractmethod
    def group_factory(self) -> GroupFactory:
        """How the engine's groups are formed over NCCL. Raises EngineError where they cannot be."""

    async def close(self) -> None:
        """As ever, and servers forget their groups."""
        if self._servers is not None:
            await self._servers.close()
        if self.transfer is not None:
            await self.transfer.close(self.http)
        await super().close()
