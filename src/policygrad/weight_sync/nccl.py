"""Weights from a GPU of this process into a server's: a group of 1 + n processes with each server, n its GPUs, and this one rank 0.

A group per server, not one for all: a group is as alive as the least of its processes, and servers go and come back one by one. The
price is that the weights leave this machine once for each server.

vLLM's processes are given NCCL's unique id; SGLang's are torch process groups, which look for it in a store that rank 0 keeps.
"""

from __future__ import annotations

import base64
import ctypes
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol
from urllib.parse import urlsplit

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from policygrad.errors import EngineError

# NVIDIA's NCCL through its C interface, from the library that torch brings along. This process is rank 0 of what it makes.
#
# Source: NVIDIA/nccl, src/nccl.h.in, version 2. Not by `torch.distributed`, whose watchdog ends the whole process when a peer of a
# group dies (TORCH_NCCL_ASYNC_ERROR_HANDLING): a learner outlives its servers.

LIBRARY = "libnccl.so.2"
UNIQUE_ID = 128
"""Bytes of `ncclUniqueId`: where rank 0 is found."""
TYPES = {
    torch.int8: 0,
    torch.uint8: 1,
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}
"""torch's types to `ncclDataType_t`."""
_SUM = 0  # ncclRedOp_t


class GroupError(Exception):
    """A group of processes cannot be formed, or goes on no longer. Never reaches a user."""


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * UNIQUE_ID)]


_SENDS: list[Any] = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int]
_OVER: list[Any] = [ctypes.c_void_p, ctypes.c_void_p]  # the communicator, the stream
_SIGNATURES: dict[str, list[Any]] = {
    "ncclGetUniqueId": [ctypes.POINTER(_UniqueId)],
    "ncclCommInitRank": [ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, _UniqueId, ctypes.c_int],
    "ncclBroadcast": [*_SENDS, *_OVER],
    "ncclAllReduce": [*_SENDS, *_OVER],
    "ncclCommAbort": [ctypes.c_void_p],
}
"""Of the functions that are called, which all return `ncclResult_t`; 0 = done."""


class Nccl:
    """The library. Its calls block as NCCL's do, and raise GroupError where it says that one failed. A communicator is a number."""

    def __init__(self, load: Callable[[str], Any] = ctypes.CDLL) -> None:
        """load: from the library's name to its functions.

        Raises:
            EngineError: there is no such library.
        """
        try:
            self._library = load(LIBRARY)
        except OSError as error:
            raise EngineError(
                f"NCCL is not here ({error}): it comes with torch for CUDA on Linux. Publish by a folder, --sampler.weight-transport folder"
            ) from error
        for name, arguments in _SIGNATURES.items():
            getattr(self._library, name).argtypes = arguments
            getattr(self._library, name).restype = ctypes.c_int
        self._library.ncclGetErrorString.argtypes = [ctypes.c_int]
        self._library.ncclGetErrorString.restype = ctypes.c_char_p

    def unique_id(self) -> bytes:
        """Of a communicator that is yet to be made; from now on this process listens for its other ranks."""
        found = _UniqueId()
        self._call("ncclGetUniqueId", ctypes.byref(found))
        return bytes(found)

    def join(self, unique_id: bytes, size: int) -> int:
        """The communicator of `size` processes; returns when all of them ask for it."""
        found = ctypes.c_void_p()
        self._call("ncclCommInitRank", ctypes.byref(found), size, _UniqueId.from_buffer_copy(unique_id), 0)
        assert found.value is not None
        return found.value

    def broadcast(self, communicator: int, tensor: Tensor, stream: int) -> None:
        """From this process to all others, in the order of the stream. tensor: contiguous, on the communicator's device."""
        at, count, kind = _memory(tensor)
        self._call("ncclBroadcast", at, at, count, kind, 0, communicator, stream)

    def all_reduce(self, communicator: int, tensor: Tensor, stream: int) -> None:
        """The sum over all processes, in place."""
        at, count, kind = _memory(tensor)
        self._call("ncclAllReduce", at, at, count, kind, _SUM, communicator, stream)

    def abort(self, communicator: int) -> None:
        """Ends what is under way there, and frees it."""
        self._call("ncclCommAbort", communicator)

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            text = self._library.ncclGetErrorString(code)
            raise GroupError(f"{name}: {text.decode() if text else code}")


def _memory(tensor: Tensor) -> tuple[int, int, int]:
    """(address, elements, ncclDataType_t)."""
    if tensor.dtype not in TYPES:
        raise EngineError(f"NCCL sends no {tensor.dtype}: publish by a folder, --sampler.weight-transport folder")
    return tensor.data_ptr(), tensor.numel(), TYPES[tensor.dtype]


_CARDS = "/proc/driver/nvidia/gpus"
"""The driver's list of this machine's GPUs, whatever CUDA_VISIBLE_DEVICES lets a process see."""
_PORTS = {"http": 80, "https": 443}


class TransferGroup(Protocol):
    """This process and those of one server. What blocks is called in a thread of its own, and may be ended from another."""

    def init_request(self) -> Mapping[str, Any]:
        """What the server is told, to join."""
        ...

    def join(self) -> None:
        """Returns when the server may be sent weights. Raises GroupError."""
        ...

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Broadcasts them one after another; returns when they are sent. Raises GroupError."""
        ...

    def abort(self) -> None:
        """Nobody waits in `join` or `send` any more, and what was taken is freed."""
        ...


GroupFactory = Callable[[int, str, str], TransferGroup]
"""(processes, this machine's address, a name that no other group has) → a group that is yet to be joined."""


def unique_id_groups(device: torch.device, urls: Sequence[str]) -> GroupFactory:
    """Groups with servers of vLLM. Raises EngineError where this machine cannot form any."""
    check_device(device, urls)
    library = Nccl()
    return lambda size, address, name: UniqueIdGroup(size, device, library)


def store_groups(device: torch.device, urls: Sequence[str]) -> GroupFactory:
    """Groups with servers of SGLang. Raises EngineError where this machine cannot form any."""
    check_device(device, urls)
    library = Nccl()
    return lambda size, address, name: StoreGroup(size, address, name, device, library)


class UniqueIdGroup:
    """For vLLM: its worker makes the communicator from the id at once, and sums one number over it, so that all have to.

    Source: vllm-project/vllm 0.32, vllm/distributed/weight_transfer/nccl_common.py (`nccl_unique_id_b64`).
    """

    def __init__(self, size: int, device: torch.device, library: Nccl) -> None:
        self._size, self._device, self._library = size, device, library
        self._id, self._communicator = library.unique_id(), 0

    def init_request(self) -> Mapping[str, Any]:
        encoded = base64.b64encode(self._id).decode()
        return {"nccl_unique_id_b64": encoded, "rank_offset": 1, "world_size": self._size, "packed": False}

    def join(self) -> None:
        with torch.cuda.device(self._device):
            self._communicator = self._library.join(self._id, self._size)
            one = torch.zeros(1, device=self._device)
            stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream(self._device))
            self._library.all_reduce(self._communicator, one, stream.cuda_stream)
            stream.synchronize()

    def send(self, tensors: Sequence[Tensor]) -> None:
        _send(self._library, self._communicator, tensors, self._device)

    def abort(self) -> None:
        _end(self._library, self._communicator)
        self._communicator = 0


class StoreGroup:
    """For SGLang: its process group looks for the id in rank 0's store, when it first has to send or receive.

    Source: sgl-project/sglang 0.5, python/sglang/srt/model_executor/model_runner.py (`init_weights_update_group`), and pytorch,
    torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp (`broadcastUniqueNCCLID`).
    """

    def __init__(self, size: int, address: str, name: str, device: torch.device, library: Nccl) -> None:
        self._size, self._address, self._name, self._device, self._library = size, address, name, device, library
        self._store, self._id, self._communicator = create_store(address), library.unique_id(), 0

    def init_request(self) -> Mapping[str, Any]:
        return make_init_request(self._store, self._size, self._address, self._name, "nccl")

    def join(self) -> None:
        prefix_store(self._store, self._name, "cuda").set("0", self._id)  # type: ignore[arg-type]  # bytes are taken too

    def send(self, tensors: Sequence[Tensor]) -> None:
        if not self._communicator:
            with torch.cuda.device(self._device):
                self._communicator = self._library.join(self._id, self._size)
        _send(self._library, self._communicator, tensors, self._device)

    def abort(self) -> None:
        _end(self._library, self._communicator)
        self._communicator = 0


def create_store(address: str, seconds: float = 60.0) -> TCPStore:
    """Kept by this process, at a free port."""
    wait = timedelta(seconds=seconds)
    return TCPStore(address, 0, None, is_master=True, timeout=wait, wait_for_workers=False)


def make_init_request(kept: TCPStore, size: int, address: str, name: str, backend: str) -> Mapping[str, Any]:
    """What SGLang's `/init_weights_update_group` is told."""
    there: dict[str, Any] = {"master_address": address, "master_port": kept.port}
    return there | {"rank_offset": 1, "world_size": size, "group_name": name, "backend": backend}


def prefix_store(kept: Store, name: str, device: str) -> Store:
    """The part of a store in which torch's process group of this name looks: `_new_process_group_helper`, on a store that SGLang
    has given the name already."""
    return PrefixStore(f"{device}/", PrefixStore(f"{name}/", PrefixStore(name, kept)))


def make_contiguous(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """On the device, each element after the one before it: what is sent is memory. Copies where it has to."""
    return [tensor.detach().to(device).contiguous() for tensor in tensors]


def _send(library: Nccl, communicator: int, tensors: Sequence[Tensor], device: torch.device) -> None:
    with torch.cuda.device(device):
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))  # on which they were written
        with torch.cuda.stream(stream):
            held = make_contiguous(tensors, device)  # until they are sent
            for tensor in held:
                library.broadcast(communicator, tensor, stream.cuda_stream)
        stream.synchronize()


def _end(library: Nccl, communicator: int) -> None:
    if communicator:
        library.abort(communicator)


def find_local_address(url: str) -> str:
    """This machine's address as a server sees it, by the way there; nothing is sent.

    Raises:
        GroupError: there is no way there.
    """
    return _ends(url)[0]


def _ends(url: str) -> tuple[str, str]:
    """(this machine's address, the server's)."""
    parts = urlsplit(url)
    try:
        family, *_, there = socket.getaddrinfo(
            parts.hostname, parts.port or _PORTS.get(parts.scheme, 80), type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(there)
            return str(probe.getsockname()[0]), str(there[0])
    except OSError as error:
        raise GroupError(f"there is no way to {url}: {error}") from error


def check_device(device: torch.device, urls: Sequence[str], cards: str = _CARDS) -> None:
    """Whether this process and servers at these addresses can have a GPU each.

    Raises:
        EngineError: the weights are not on a GPU, or a server on this machine would need the only one.
    """
    way_out = "publish by a folder, --sampler.weight-transport folder"
    if device.type != "cuda":
        raise EngineError(
            f"NCCL sends from a GPU, and the policy is on the {device.type}: take --learner.device cuda, or {way_out}"
        )
    found = len(os.listdir(cards)) if os.path.isdir(cards) else None
    if found == 1 and (local := next((url for url in urls if _here(url)), None)):
        raise EngineError(
            f"NCCL takes a GPU for this process and others for the server at {local}, and this machine has one: {way_out}"
        )


def _here(url: str) -> bool:
    try:
        own, there = _ends(url)
    except GroupError:
        return False  # it may come to be known; the group says so
    return own == there
