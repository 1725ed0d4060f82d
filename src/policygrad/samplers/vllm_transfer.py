"""vLLM's words for weights that come over a group of processes.

Source: vllm-project/vllm 0.32, vllm/entrypoints/rl/online/api_router.py and vllm/distributed/weight_transfer/nccl_engine.py. An
update is begun, takes weights in any number of requests, each of which returns when its weights are there, and is finished. Nothing
is packed: tensors are broadcast one by one, as they lie, and each is loaded as it comes.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from policygrad.errors import EngineError
from policygrad.samplers.http import AwayError, Http
from policygrad.samplers.transfer import ASKS, Transfer
from policygrad.weight_sync.buckets import Bucket

_ASKED_FOR = '--weight-transfer-config \'{"backend":"nccl"}\', as `policygrad engine vllm --transfer nccl --print` says'


class VllmTransfer(Transfer):
    """`/init_weight_transfer_engine`, `/start_weight_update`, `/update_weights`, `/finish_weight_update`."""

    async def size(self, http: Http, url: str) -> int:
        told = await http.get(f"{url}/get_world_size", ASKS)
        try:
            return int(told["world_size"])
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(f"{url}/get_world_size says {told!r}: is it a server of vLLM 0.32?") from error

    async def invite(self, http: Http, url: str, invitation: Mapping[str, Any]) -> None:
        try:
            await http.post(f"{url}/init_weight_transfer_engine", {"init_info": dict(invitation)}, self._patience)
        except (AwayError, EngineError) as error:
            if isinstance(error, AwayError) and not str(error).startswith("500"):
                raise
            raise EngineError(
                f"{url} joins no group over NCCL: start it with {_ASKED_FOR}, or publish by a folder, --sampler.transfer folder "
                f"({error})"
            ) from error

    async def begin(self, http: Http, url: str) -> None:
        await http.post(f"{url}/start_weight_update", None, ASKS)

    async def take(self, http: Http, url: str, bucket: Bucket, group: str, version: str) -> None:
        told = {"names": list(bucket.names), "dtype_names": bucket.dtypes, "shapes": bucket.shapes}
        await http.post(f"{url}/update_weights", {"update_info": told}, self._patience)

    async def finish(self, http: Http, url: str, version: str) -> None:
        await http.post(f"{url}/finish_weight_update", {"weight_version": version}, self._patience)

    async def recover(self, http: Http, url: str) -> None:
        with suppress(AwayError, EngineError):  # none was begun
            await http.post(f"{url}/finish_weight_update", None, ASKS)
        with suppress(AwayError, EngineError):  # there is no group, or it is a vLLM that cannot forget one
            await self.leave(http, url, "")

    async def leave(self, http: Http, url: str, group: str) -> None:
        await http.post(f"{url}/shutdown_weight_transfer_engine", None, ASKS)
