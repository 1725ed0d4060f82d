"""Groups without a network: tensors go from a thread to a server double of vLLM or SGLang."""

from __future__ import annotations

import asyncio
import json
import queue
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import torch
from torch import Tensor

from doubles.http_engines import FormServer, SglangForm, VllmForm
from policygrad.samplers.engines.base import EngineSampler
from policygrad.weight_sync.nccl import GroupError, GroupFactory


def with_groups(sampler_class: type[EngineSampler], factory: GroupFactory) -> type[EngineSampler]:
    """Return the sampler class with groups of this factory instead of NCCL's."""
    transfer = type(
        "Transfer", (sampler_class.transfer_class,), {"make_group_factory": lambda self, device, urls: factory}
    )
    return type(f"Wired{sampler_class.__name__}", (sampler_class,), {"transfer_class": transfer})


class WireGroup:
    """A group with one server, which receives from `tensors`."""

    def __init__(self, number: int, size: int, name: str) -> None:
        self.number, self.size, self.name = number, size, name
        self.tensors: queue.Queue[Tensor | None] = queue.Queue()
        self.said: queue.Queue[str] = queue.Queue()
        self.ended = False

    def init_request(self) -> Mapping[str, Any]:
        return {"wire": self.number, "rank_offset": 1, "world_size": self.size, "group_name": self.name}

    def join(self) -> None:
        self._wait()

    def send(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            self.tensors.put(tensor.clone())
            self._wait()

    def abort(self) -> None:
        self.ended = True
        self.said.put("ended")
        self.tensors.put(None)

    def _wait(self) -> None:
        if self.said.get() == "ended":
            raise GroupError("ended")


class Wires:
    """A group factory that keeps every group, in order."""

    def __init__(self) -> None:
        self.opened: list[WireGroup] = []

    def __call__(self, size: int, address: str, name: str) -> WireGroup:
        self.opened.append(WireGroup(len(self.opened), size, name))
        return self.opened[-1]


class Taking(FormServer):
    """A server that receives weights from a wire: with `workers` processes; `lost` tensors before it is gone for good; without ever
    receiving if it `hangs`."""

    workers = 1
    lost: int | None = None
    hangs = False

    def __init__(self, table: Tensor, end: frozenset[int], wires: Wires) -> None:
        super().__init__(table, end)
        self.wires = wires
        self.begin()

    def begin(self) -> None:
        """Reset to a process that was just started, with its own weights and no group."""
        self.version, self.lost, self.hangs = "default", None, False
        self.groups: dict[str, WireGroup] = {}
        self.got: dict[str, Tensor] = {}

    async def answer(self, request: httpx.Request) -> httpx.Response:  # type: ignore[override]
        path = request.url.raw_path.decode()
        body = json.loads(request.content) if request.content not in (b"", b"null") else None
        if self.lost is not None and self.lost < 0:
            raise httpx.ConnectError("nobody is there")
        self.asked.append((path, body))
        code, report = await self.transferred(path, body)
        report = self.tell(path, body) if report is None else report
        return (
            httpx.Response(404, json={"detail": "Not Found"}) if report is None else httpx.Response(code, json=report)
        )

    async def transferred(self, path: str, body: Any) -> tuple[int, Any]:
        """Return (status, reply) to a request about groups; a reply of None for other requests."""
        raise NotImplementedError

    def join(self, init_request: Mapping[str, Any]) -> None:
        wire = self.wires.opened[init_request["wire"]]
        assert (init_request["rank_offset"], init_request["world_size"]) == (1, 1 + self.workers)
        self.groups[init_request["group_name"]] = wire
        wire.said.put("joined")

    async def take(self, wire: WireGroup, names: list[str], dtypes: list[str], shapes: list[list[int]]) -> None:
        if self.hangs:
            await asyncio.Event().wait()
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
            if self.lost == 0:
                self.lost = -1
                raise httpx.ReadError("the connection is gone")
            tensor = await asyncio.to_thread(wire.tensors.get)
            if tensor is None:
                raise httpx.ReadError("the group is gone")
            assert (tensor.dtype, list(tensor.shape)) == (getattr(torch, dtype), shape)
            self.got[name] = tensor
            self.lost = self.lost if self.lost is None else self.lost - 1
            wire.said.put("taken")


class VllmTaking(Taking, VllmForm):
    """Started with --weight-transfer-config if `configured`."""

    configured = True
    active = False

    async def transferred(self, path: str, body: Any) -> tuple[int, Any]:
        refused = {"error": {"message": "Weight transfer not configured.", "type": "InternalServerError", "code": 500}}
        if path == "/get_world_size":
            return 200, {"world_size": self.workers}
        if path == "/init_weight_transfer_engine":
            if not self.configured:
                return 500, refused
            self.groups.clear()  # it has one group
            self.join(body["init_info"])
            return 200, {"message": "Weight transfer initialized"}
        if path == "/start_weight_update":
            if self.active:
                return 500, {"error": {"message": "start_weight_update called while a weight update is already active"}}
            self.active = True
            return 200, {"message": "Weight update started"}
        if path == "/update_weights":
            if not (self.active and self.groups):
                return 500, {"error": {"message": "NCCL weight transfer not initialized"}}
            report = body["update_info"]
            [wire] = self.groups.values()
            await self.take(wire, report["names"], report["dtype_names"], report["shapes"])
            return 200, {"message": "Weights updated"}
        if path == "/finish_weight_update":
            if not self.active:
                return 500, {"error": {"message": "finish_weight_update called without a matching start_weight_update"}}
            self.active, self.table = False, self.got.get("table", self.table)
            self.version = (body or {}).get("weight_version", self.version)
            return 200, {"message": "Weight update finished"}
        if path == "/shutdown_weight_transfer_engine":
            self.groups.clear()
            return 200, {"message": "Weight transfer shut down"}
        return 200, None

    def begin(self) -> None:
        super().begin()
        self.active = False


class SglangTaking(Taking, SglangForm):
    """With processes of other kinds than tensor parallelism in `many`."""

    many: Mapping[str, Any] = {}

    async def transferred(self, path: str, body: Any) -> tuple[int, Any]:
        if path == "/server_info":
            return 200, {"tp_size": self.workers, "dp_size": 1, "pp_size": 1, "version": "0.5"} | dict(self.many)
        if path == "/model_info":
            return 200, {"model_path": "model", "weight_version": self.version}
        if path == "/init_weights_update_group":
            self.join(body)
            return 200, {"success": True, "message": "Succeeded to initialize custom process group."}
        if path == "/update_weights_from_distributed":
            assert body["group_name"] in self.groups  # a real server would exit
            await self.take(self.groups[body["group_name"]], body["names"], body["dtypes"], body["shapes"])
            self.table, self.version = self.got.get("table", self.table), body.get("weight_version", self.version)
            return 200, {"success": True, "message": "Succeeded to update parameter online."}
        if path == "/destroy_weights_update_group":
            self.groups.pop(body["group_name"])
            return 200, {"success": True, "message": "Succeeded to destroy custom process group."}
        return 200, None
