"""NVIDIA's NCCL through its C interface, from the library that torch brings along. This process is rank 0 of what it makes.

Source: NVIDIA/nccl, src/nccl.h.in, version 2. Not by `torch.distributed`, whose watchdog ends the whole process when a peer of a
group dies (TORCH_NCCL_ASYNC_ERROR_HANDLING): a learner outlives its servers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from policygrad.errors import EngineError

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
                f"NCCL is not here ({error}): it comes with torch for CUDA on Linux. Publish by a folder, --sampler.transfer folder"
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
        raise EngineError(f"NCCL sends no {tensor.dtype}: publish by a folder, --sampler.transfer folder")
    return tensor.data_ptr(), tensor.numel(), TYPES[tensor.dtype]
