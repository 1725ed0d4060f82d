"""SGLang's words for weights that come over a group of processes.

Source: sgl-project/sglang 0.5, python/sglang/srt/managers/io_struct.py (`InitWeightsUpdateGroupReqInput`,
`UpdateWeightsFromDistributedReqInput`), python/sglang/srt/model_executor/model_runner.py and
python/sglang/srt/entrypoints/http_server.py. A request's tensors are broadcast one by one, and loaded when all of them are there. A
server that is told of a group that it does not know ends: one that was started again is to join first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from policygrad.errors import EngineError
from policygrad.samplers.http import Http
from policygrad.samplers.transfer import ASKS, Transfer
from policygrad.weight_sync.buckets import Bucket


class SglangTransfer(Transfer):
    """`/init_weights_update_group`, `/update_weights_from_distributed`, `/destroy_weights_update_group`."""

    async def size(self, http: Http, url: str) -> int:
        told = await first_known(http, url, "/server_info", "/get_server_info")
        many = [name for name in ("dp_size", "pp_size") if int(told.get(name) or 1) > 1]
        if many and not (many == ["dp_size"] and told.get("enable_dp_attention")):
            raise EngineError(
                f"{url} has {' and '.join(f'{name} {told[name]}' for name in many)}, with which SGLang takes no weights over NCCL: "
                "start a server for each, or publish by a folder, --sampler.transfer folder"
            )
        if "tp_size" not in told:
            raise EngineError(f"{url}/server_info does not say tp_size: is it a server of SGLang 0.5?")
        return int(told["tp_size"])

    async def invite(self, http: Http, url: str, invitation: Mapping[str, Any]) -> None:
        _done(url, await http.post(f"{url}/init_weights_update_group", dict(invitation), self._patience))

    async def take(self, http: Http, url: str, bucket: Bucket, group: str, version: str) -> None:
        body: dict[str, Any] = {
            "names": list(bucket.names),
            "dtypes": bucket.dtypes,
            "shapes": bucket.shapes,
            "group_name": group,
            "flush_cache": bucket.last,
            "abort_all_requests": False,
        }
        if bucket.last:
            body["weight_version"] = version
        _done(url, await http.post(f"{url}/update_weights_from_distributed", body, self._patience))

    async def leave(self, http: Http, url: str, group: str) -> None:
        await http.post(f"{url}/destroy_weights_update_group", {"group_name": group}, ASKS)


async def weight_version(http: Http, url: str) -> object:
    """What a server calls its weights; None = it does not say."""
    return (await first_known(http, url, "/model_info", "/get_model_info")).get("weight_version")


async def first_known(http: Http, url: str, *paths: str) -> dict[str, Any]:
    """The answer to the first of these questions that the server knows.

    Raises:
        EngineError: it knows none of them.
    """
    refused: EngineError | None = None
    for path in paths:
        try:
            told = await http.get(url + path, ASKS)
        except EngineError as error:
            refused = error
            continue
        if isinstance(told, dict):
            return told
    raise EngineError(f"{url} answers none of {', '.join(paths)}: is it a server of SGLang 0.5?") from refused


def _done(url: str, told: Any) -> None:
    if not (isinstance(told, dict) and told.get("success")):
        said = told.get("message") if isinstance(told, dict) else told
        raise EngineError(f"{url} did not take over the weights: {said}")
