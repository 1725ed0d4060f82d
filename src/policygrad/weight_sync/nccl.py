"""Broadcast weights from a GPU of this process into a server's: one process group per server, with this process as rank 0.

A group is only as alive as its least reliable process, and servers come and go one by one, so each has its own. The price is that
the weights leave this machine once per server.

vLLM's processes are given NCCL's unique id; SGLang's are torch process groups, which read it from a store that rank 0 provides.
"""

from __future__ import annotations

import base64
import ctypes
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Protocol
from urllib.parse import urlsplit

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from policygrad.errors import EngineError
from policygrad.utils.rendezvous import serve_store

# NVIDIA's NCCL through its C interface, from the library that torch installs. Source: NVIDIA/nccl, src/nccl.h.in, version 2.
#
# Not through `torch.distributed`, whose watchdog kills the process when a peer of a group dies (TORCH_NCCL_ASYNC_ERROR_HANDLING): a
# learner must outlive its servers.

LIBRARY = "libnccl.so.2"
STORE_TIMEOUT = timedelta(minutes=1)
UNIQUE_ID_BYTES = 128  # size of `ncclUniqueId`, which tells processes how to reach rank 0
# Torch's dtypes to `ncclDataType_t`.
DTYPES = {
    torch.int8: 0,
    torch.uint8: 1,
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}
_SUM = 0  # ncclRedOp_t
_USE_FOLDER = "Set --sampler.weight-transport folder"


class GroupError(Exception):
    """A process group cannot be formed, or is broken. Never reaches the user."""


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * UNIQUE_ID_BYTES)]


_BUFFERS: list[Any] = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int]
_TARGET: list[Any] = [ctypes.c_void_p, ctypes.c_void_p]  # the communicator, the stream
# Argument types of the functions used here. All return `ncclResult_t`, 0 for success.
_SIGNATURES: dict[str, list[Any]] = {
    "ncclGetUniqueId": [ctypes.POINTER(_UniqueId)],
    "ncclCommInitRank": [ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, _UniqueId, ctypes.c_int],
    "ncclBroadcast": [*_BUFFERS, *_TARGET],
    "ncclAllReduce": [*_BUFFERS, *_TARGET],
    "ncclCommAbort": [ctypes.c_void_p],
}


class Nccl:
    """The NCCL library. Its calls block as NCCL's do, and raise GroupError if one fails. A communicator is a number."""

    def __init__(self, load: Callable[[str], Any] = ctypes.CDLL) -> None:
        """`load`: loads a library by name. Raises EngineError if the library is not installed."""
        try:
            self._library = load(LIBRARY)
        except OSError as error:
            raise EngineError(
                f"NCCL is not installed ({error}); it comes with torch for CUDA on Linux. {_USE_FOLDER}"
            ) from error
        for name, arguments in _SIGNATURES.items():
            getattr(self._library, name).argtypes = arguments
            getattr(self._library, name).restype = ctypes.c_int
        self._library.ncclGetErrorString.argtypes = [ctypes.c_int]
        self._library.ncclGetErrorString.restype = ctypes.c_char_p

    def unique_id(self) -> bytes:
        """Return the id of a new communicator; this process listens for its other ranks from now on."""
        unique_id = _UniqueId()
        self._call("ncclGetUniqueId", ctypes.byref(unique_id))
        return bytes(unique_id)

    def join(self, unique_id: bytes, world_size: int) -> int:
        """Join a communicator as rank 0; return once all processes have joined."""
        communicator = ctypes.c_void_p()
        argument = _UniqueId.from_buffer_copy(unique_id)
        self._call("ncclCommInitRank", ctypes.byref(communicator), world_size, argument, 0)
        assert communicator.value is not None
        return communicator.value

    def broadcast(self, communicator: int, tensor: Tensor, stream: int) -> None:
        """Send a tensor, contiguous and on the communicator's device, to all other processes, in the stream's order."""
        address, count, dtype = _describe_memory(tensor)
        self._call("ncclBroadcast", address, address, count, dtype, 0, communicator, stream)

    def all_reduce(self, communicator: int, tensor: Tensor, stream: int) -> None:
        """Sum a tensor over all processes, in place."""
        address, count, dtype = _describe_memory(tensor)
        self._call("ncclAllReduce", address, address, count, dtype, _SUM, communicator, stream)

    def abort(self, communicator: int) -> None:
        """Abort running operations and free the communicator."""
        self._call("ncclCommAbort", communicator)

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            text = self._library.ncclGetErrorString(code)
            raise GroupError(f"{name}: {text.decode() if text else code}")


def _describe_memory(tensor: Tensor) -> tuple[int, int, int]:
    """Return address, number of elements, and ncclDataType_t."""
    if tensor.dtype not in DTYPES:
        raise EngineError(f"NCCL sends no {tensor.dtype}. {_USE_FOLDER}")
    return tensor.data_ptr(), tensor.numel(), DTYPES[tensor.dtype]


class TransferGroup(Protocol):
    """This process and those of one server. Blocking calls run in a thread, and may be aborted from another one."""

    def init_request(self) -> Mapping[str, Any]:
        """Return what the server is sent so that it joins."""

    def join(self) -> None:
        """Return once the server can be sent weights. Raises GroupError."""

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Broadcast tensors one after another; return once they are sent. Raises GroupError."""

    def abort(self) -> None:
        """End `join` and `send` in other threads, and free all resources."""


GroupFactory = Callable[[int, str, str], TransferGroup]
"""(world size, this machine's address, a unique name) to a group that is yet to be joined."""


class NcclGroup(TransferGroup):
    """A communicator on a device of this process."""

    def __init__(self, world_size: int, address: str, name: str, device: torch.device, library: Nccl) -> None:
        self._world_size, self._address, self._name = world_size, address, name
        self._device, self._library = device, library
        self._id, self._communicator = library.unique_id(), 0

    def send(self, tensors: Sequence[Tensor]) -> None:
        with self._new_stream() as stream:
            contiguous = make_contiguous(tensors, self._device)  # alive until they are sent
            for tensor in contiguous:
                self._library.broadcast(self._communicator, tensor, stream)

    def abort(self) -> None:
        if self._communicator:
            self._library.abort(self._communicator)
        self._communicator = 0

    def _join_communicator(self) -> None:
        with torch.cuda.device(self._device):
            self._communicator = self._library.join(self._id, self._world_size)

    @contextmanager
    def _new_stream(self) -> Iterator[int]:
        """Work on a stream that begins after the current one's work; it is done when the context ends."""
        with torch.cuda.device(self._device):
            stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(stream):
                yield stream.cuda_stream
                stream.synchronize()


class UniqueIdGroup(NcclGroup):
    """A group with vLLM, whose worker makes the communicator from the id at once and sums one number over it, so all ranks must.

    Source: vllm-project/vllm 0.32, vllm/distributed/weight_transfer/nccl_common.py (`nccl_unique_id_b64`).
    """

    def init_request(self) -> Mapping[str, Any]:
        encoded = base64.b64encode(self._id).decode()
        return {"nccl_unique_id_b64": encoded, "rank_offset": 1, "world_size": self._world_size, "packed": False}

    def join(self) -> None:
        self._join_communicator()
        with self._new_stream() as stream:
            self._library.all_reduce(self._communicator, torch.zeros(1, device=self._device), stream)


class StoreGroup(NcclGroup):
    """A group with SGLang, whose process group reads the id from rank 0's store when it first sends or receives.

    Source: sgl-project/sglang 0.5, python/sglang/srt/model_executor/model_runner.py (`init_weights_update_group`), and pytorch,
    torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp (`broadcastUniqueNCCLID`).
    """

    def __init__(self, world_size: int, address: str, name: str, device: torch.device, library: Nccl) -> None:
        super().__init__(world_size, address, name, device, library)
        self._store = serve_store(address, STORE_TIMEOUT)

    def init_request(self) -> Mapping[str, Any]:
        return make_init_request(self._store, self._world_size, self._address, self._name, "nccl")

    def join(self) -> None:
        prefix_store(self._store, self._name, "cuda").set("0", self._id)  # type: ignore[arg-type]  # takes bytes too

    def send(self, tensors: Sequence[Tensor]) -> None:
        if not self._communicator:
            self._join_communicator()
        super().send(tensors)


def make_init_request(store: TCPStore, world_size: int, address: str, name: str, backend: str) -> Mapping[str, Any]:
    """Return the body of SGLang's `/init_weights_update_group`."""
    place = {"master_address": address, "master_port": store.port}
    return place | {"rank_offset": 1, "world_size": world_size, "group_name": name, "backend": backend}


def prefix_store(store: Store, name: str, device: str) -> Store:
    """Return the part of a store that torch's process group of this name reads: `_new_process_group_helper`, on a store to which
    SGLang has added the name already."""
    return PrefixStore(f"{device}/", PrefixStore(f"{name}/", PrefixStore(name, store)))


def make_contiguous(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return the tensors on the device and contiguous in memory, copied only if necessary."""
    return [tensor.detach().to(device).contiguous() for tensor in tensors]


_CARDS = "/proc/driver/nvidia/gpus"  # the driver's list of this machine's GPUs, regardless of CUDA_VISIBLE_DEVICES
_PORTS = {"http": 80, "https": 443}


def check_device(device: torch.device, urls: Sequence[str], cards: str = _CARDS) -> None:
    """Check that this process and servers at these addresses can each have a GPU. Raises EngineError if the weights are
    not on a GPU, or a server on this machine would need the only one."""
    if device.type != "cuda":
        raise EngineError(
            f"NCCL sends from a GPU, and the policy is on the {device.type}. Set --learner.device cuda, or "
            "--sampler.weight-transport folder"
        )
    count = len(os.listdir(cards)) if os.path.isdir(cards) else None
    for url in urls if count == 1 else ():
        with suppress(GroupError):  # a server may become reachable; otherwise its group reports it
            local, remote = find_endpoints(url)
            if local == remote:
                raise EngineError(
                    f"NCCL needs one GPU for this process and another for the server at {url}, and this machine has one. "
                    f"{_USE_FOLDER}"
                )


def find_endpoints(url: str) -> tuple[str, str]:
    """Return this machine's address on the route to a server, and the server's. Raises GroupError if there is no route."""
    parts = urlsplit(url)
    try:
        family, *_, remote = socket.getaddrinfo(
            parts.hostname, parts.port or _PORTS.get(parts.scheme, 80), type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(remote)
            return str(probe.getsockname()[0]), str(remote[0])
    except OSError as error:
        raise GroupError(f"no route to {url}: {error}") from error
