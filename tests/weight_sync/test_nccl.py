"""Calls of NCCL's functions, with a library that records them. No GPU is needed."""

from __future__ import annotations

import ctypes
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from policygrad.errors import EngineError
from policygrad.weight_sync.nccl import (
    LIBRARY,
    GroupError,
    Nccl,
    StoreGroup,
    UniqueIdGroup,
    check_device,
    find_endpoints,
    prefix_store,
)


class Library:
    """A substitute for `libnccl`. The functions in `fails` return an error."""

    def __init__(self, *fails: str) -> None:
        self.calls: list[tuple[Any, ...]] = []

        def get_unique_id(at: Any) -> int:
            ctypes.memset(at, 7, 128)
            return self._said("ncclGetUniqueId")

        def init_rank(communicator: Any, size: int, unique_id: Any, rank: int) -> int:
            communicator._obj.value = 4711
            return self._said("ncclCommInitRank", size, bytes(unique_id), rank)

        self.fails = fails
        self.functions = SimpleNamespace(
            ncclGetUniqueId=get_unique_id,
            ncclCommInitRank=init_rank,
            ncclBroadcast=lambda *told: self._said("ncclBroadcast", *told),
            ncclAllReduce=lambda *told: self._said("ncclAllReduce", *told),
            ncclCommAbort=lambda *told: self._said("ncclCommAbort", *told),
            ncclGetErrorString=lambda code: b"unhandled system error" if code == 2 else None,
        )

    def load(self, name: str) -> Any:
        assert name == LIBRARY
        return self.functions

    def _said(self, name: str, *told: Any) -> int:
        self.calls.append((name, *told))
        return 2 if name in self.fails else 0


def test_communicator_is_joined_used_and_aborted() -> None:
    library = Library()
    nccl = Nccl(library.load)
    assert nccl.unique_id() == b"\7" * 128
    communicator = nccl.join(b"\7" * 128, 3)
    weights = torch.arange(6, dtype=torch.bfloat16)
    nccl.broadcast(communicator, weights, 99)
    nccl.all_reduce(communicator, torch.zeros(1), 99)
    nccl.abort(communicator)
    names = [call[0] for call in library.calls]
    assert names == ["ncclGetUniqueId", "ncclCommInitRank", "ncclBroadcast", "ncclAllReduce", "ncclCommAbort"]
    assert library.calls[1] == ("ncclCommInitRank", 3, b"\7" * 128, 0)
    at = weights.data_ptr()
    assert library.calls[2] == ("ncclBroadcast", at, at, 6, 9, 0, 4711, 99)  # 9 = ncclBfloat16; from rank 0, in place
    assert library.calls[3][3:] == (1, 7, 0, 4711, 99)  # one float32, summed
    assert library.calls[4] == ("ncclCommAbort", 4711)


def test_signatures_are_set_before_calls() -> None:
    library = Library()
    Nccl(library.load)
    for name in ("ncclCommInitRank", "ncclBroadcast", "ncclAllReduce", "ncclCommAbort", "ncclGetUniqueId"):
        assert getattr(library.functions, name).restype is ctypes.c_int
    assert library.functions.ncclBroadcast.argtypes[2] is ctypes.c_size_t
    assert ctypes.sizeof(library.functions.ncclCommInitRank.argtypes[2]) == 128  # by value


def test_nccl_errors_are_reported() -> None:
    with pytest.raises(GroupError, match="ncclCommInitRank: unhandled system error"):
        Nccl(Library("ncclCommInitRank").load).join(b"\0" * 128, 2)


def test_missing_library_is_reported_with_the_alternative() -> None:
    def missing(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    with pytest.raises(EngineError, match=r"libnccl.so.2: cannot open.*--sampler.weight-transport folder"):
        Nccl(missing)


def test_unsupported_dtype_is_refused() -> None:
    with pytest.raises(EngineError, match=r"NCCL sends no torch.complex64"):
        Nccl(Library().load).broadcast(1, torch.zeros(2, dtype=torch.complex64), 0)


def test_vllm_receives_the_id_in_base64() -> None:
    group = UniqueIdGroup(3, "127.0.0.1", "policygrad-1", torch.device("cuda", 0), Nccl(Library().load))
    reply = group.init_request()
    assert reply["nccl_unique_id_b64"] == "BwcH" * 42 + "Bwc="  # 128 bytes of 7
    assert (reply["rank_offset"], reply["world_size"], reply["packed"]) == (1, 3, False)
    group.abort()  # before joining


def test_sglang_finds_the_id_in_the_process_groups_store() -> None:
    library = Library()
    group = StoreGroup(2, "127.0.0.1", "policygrad-1", torch.device("cuda", 0), Nccl(library.load))
    reply = dict(group.init_request())
    port = reply.pop("master_port")
    assert reply == {
        "master_address": "127.0.0.1",
        "rank_offset": 1,
        "world_size": 2,
        "group_name": "policygrad-1",
        "backend": "nccl",
    }
    group.join()
    theirs = TCPStore("127.0.0.1", port, 2, is_master=False)
    assert prefix_store(theirs, "policygrad-1", "cuda").get("0") == b"\7" * 128
    group.abort()
    assert [call[0] for call in library.calls] == ["ncclGetUniqueId"]


def test_local_address_is_reachable_by_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_endpoints("http://127.0.0.1:8000")[0] == "127.0.0.1"

    def nowhere(*requests: Any, **options: Any) -> Any:
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", nowhere)
    with pytest.raises(GroupError, match="no route to http://"):
        find_endpoints("http://nowhere:1")


def test_single_gpu_machine_has_none_for_a_server(tmp_path: Path) -> None:
    cuda, here = torch.device("cuda", 0), ["http://127.0.0.1:8000"]
    (tmp_path / "0000:01:00.0").mkdir()
    with pytest.raises(EngineError, match=r"the server at http://127.0.0.1:8000, and this machine has one. .*folder"):
        check_device(cuda, here, str(tmp_path))
    check_device(cuda, ["http://192.0.2.1:8000"], str(tmp_path))  # a remote server has its own
    (tmp_path / "0000:02:00.0").mkdir()
    check_device(cuda, here, str(tmp_path))
    check_device(cuda, here, str(tmp_path / "unknown"))
    with pytest.raises(EngineError, match="the policy is on the cpu"):
        check_device(torch.device("cpu"), here, str(tmp_path))
