"""A server's process in a group, over gloo: it reads requests as lines of JSON, and replies with the received bytes.

    {"engine": "sglang", "init_request": …}   {"engine": "vllm", "init_request": …}   {"names": …, "dtypes": …, "shapes": …}

It forms its side like the engine: SGLang's with torch's own helper on the given store, vLLM's from an id.
"""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed import PrefixStore, ProcessGroup, TCPStore, rendezvous
from torch.distributed.distributed_c10d import Backend, _new_process_group_helper

from doubles.gloo import WAIT, broadcast, gloo


def sglang(report: Mapping[str, Any]) -> ProcessGroup:
    """Return the group that torch makes from a rendezvous over TCP and a name."""
    where = f"tcp://{report['master_address']}:{report['master_port']}"
    kept, rank, size = next(rendezvous(where, report["rank_offset"], report["world_size"], timeout=WAIT))
    named, backend = PrefixStore(report["group_name"], kept), Backend(report["backend"])
    result, _ = _new_process_group_helper(size, rank, [], backend, named, group_name=report["group_name"], timeout=WAIT)
    return result


def vllm(report: Mapping[str, Any]) -> ProcessGroup:
    """Return the group of an id, after summing one number over it."""
    unique_id = base64.b64decode(report["nccl_unique_id_b64"], validate=True)
    assert len(unique_id) == 128
    host, _, port = unique_id.rstrip(b"\0").decode().rpartition(":")
    kept = TCPStore(host, int(port), report["world_size"], is_master=False, timeout=WAIT)
    result = gloo(kept, report["rank_offset"], report["world_size"])
    one = torch.ones(1)
    result.allreduce([one]).wait()
    assert one.item() == 1.0  # the learner's is 0
    return result


def main() -> None:
    group: ProcessGroup | None = None
    for line in sys.stdin:
        report, output = json.loads(line), list[str]()
        if "engine" in report:
            group = {"sglang": sglang, "vllm": vllm}[report["engine"]](report["init_request"])
        else:
            assert group is not None
            for dtype, shape in zip(report["dtypes"], report["shapes"], strict=True):
                tensor = torch.empty(shape, dtype=getattr(torch, dtype))
                broadcast(group, tensor)
                raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
                output.append(base64.b64encode(raw).decode())
        print(json.dumps(output), flush=True)


if __name__ == "__main__":
    main()
