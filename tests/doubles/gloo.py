"""Groups of real processes, over gloo instead of NCCL: this process's side. `receiver.py` is the other."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import BroadcastOptions, ProcessGroup, ProcessGroupGloo, Store

from policygrad.utils.rendezvous import serve_store
from policygrad.weight_sync.nccl import (
    UNIQUE_ID_BYTES,
    GroupError,
    make_contiguous,
    make_init_request,
    prefix_store,
)

WAIT = timedelta(seconds=60)


def gloo(kept: Store, rank: int, size: int) -> ProcessGroup:
    """Form a group; all of its processes must call it."""
    result = ProcessGroup(kept, rank, size)
    result._register_backend(
        torch.device("cpu"), ProcessGroup.BackendType.GLOO, ProcessGroupGloo(kept, rank, size, WAIT)
    )
    return result


def broadcast(group: ProcessGroup, tensor: Tensor) -> None:
    """Broadcast from rank 0, in place."""
    options = BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    group.broadcast([tensor], options).wait()


class GlooGroup:
    """A group formed like SGLang's: name, store, prefixes."""

    def __init__(self, size: int, address: str, name: str) -> None:
        self._size, self._address, self._name = size, address, name
        self._store, self._group = serve_store(address, WAIT), None  # type: ProcessGroup | None

    def init_request(self) -> Mapping[str, Any]:
        return make_init_request(self._store, self._size, self._address, self._name, "gloo")

    def join(self) -> None:
        self._group = gloo(prefix_store(self._store, self._name, "cpu"), 0, self._size)

    def send(self, tensors: Sequence[Tensor]) -> None:
        assert self._group is not None
        try:
            for tensor in make_contiguous(tensors, torch.device("cpu")):
                broadcast(self._group, tensor)
        except RuntimeError as error:  # gloo's: the other side is gone
            raise GroupError(str(error)) from error

    def abort(self) -> None:
        self._group = None


class GlooIdGroup(GlooGroup):
    """A group formed like vLLM's: from 128 bytes with the address, and one number that is summed at once."""

    def init_request(self) -> Mapping[str, Any]:
        where = f"{self._address}:{self._store.port}".encode().ljust(UNIQUE_ID_BYTES, b"\0")
        report = {"nccl_unique_id_b64": base64.b64encode(where).decode(), "rank_offset": 1, "world_size": self._size}
        return report | {"packed": False}

    def join(self) -> None:
        self._group = gloo(self._store, 0, self._size)
        self._group.allreduce([torch.zeros(1)]).wait()
