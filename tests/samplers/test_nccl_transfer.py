"""Weights sent to servers over groups: requests and their order, and recovery when a server is lost during a transfer.

The servers answer in the form of vLLM 0.32 and SGLang 0.5; the groups are wires of this process (a real group of two processes:
test_nccl_transfer_processes.py; two GPUs: test_nccl_transfer_gpus.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from torch import nn

from doubles.engine import Bigram
from doubles.wires import SglangTaking, Taking, VllmTaking, Wires, with_groups
from policygrad.errors import ConfigError, EngineError
from policygrad.models.loading import load_model
from policygrad.models.tokenizer import Tokenizer, load_tokenizer
from policygrad.samplers.base import Request, SamplingParams
from policygrad.samplers.config import SamplerConfig
from policygrad.samplers.engines import nccl_transfer
from policygrad.samplers.engines.base import EngineSampler
from policygrad.samplers.engines.http import HttpClient, ServerUnavailableError
from policygrad.samplers.engines.sglang import SglangSampler
from policygrad.samplers.engines.vllm import VllmSampler
from policygrad.utils.async_runner import AsyncRunner
from policygrad.weight_sync.base import PublishedWeights

pytestmark = pytest.mark.usefixtures("short_probes")

KINDS: dict[str, tuple[type[EngineSampler], type[Taking]]] = {
    "vllm": (VllmSampler, VllmTaking),
    "sglang": (SglangSampler, SglangTaking),
}
both = pytest.mark.parametrize("name", KINDS)
Made = tuple[EngineSampler, list[Any], Wires]


class Wide(Bigram):
    """Has further weights, of other shapes and another dtype, that it does not use."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__(vocabulary)
        self.scale = nn.Parameter(torch.arange(6.0).view(3, 2))
        self.narrow = nn.Parameter(torch.arange(5.0).to(torch.bfloat16))


@pytest.fixture(scope="module")
def tokenizer(random_model: Path) -> Tokenizer:
    return load_tokenizer(str(random_model), load_model(str(random_model), dtype="fp32", device="cpu"))


@pytest.fixture
def make(tokenizer: Tokenizer, tmp_path: Path) -> Callable[..., Made]:
    def made(name: str, servers: int = 1, recovery_timeout: float = 20.0, bucket: int = 30) -> Made:
        sampler_class, form = KINDS[name]
        wires = Wires()
        wired = with_groups(sampler_class, wires)
        model = Wide(len(tokenizer.hf))
        urls = tuple(f"http://127.0.0.1:{9000 + i}" for i in range(servers))
        config = SamplerConfig(
            engine=name, urls=urls, recovery_timeout=recovery_timeout, weight_transport="nccl", max_concurrency=4
        )
        sampler = wired(model, tokenizer, config, tmp_path / "weights")
        assert sampler.transfer is not None
        sampler.transfer._bucket_bytes = bucket  # each of the model's tensors is a bucket of its own
        there = {url: form(model.table, tokenizer.end_ids, wires) for url in urls}

        async def answer(request: httpx.Request) -> httpx.Response:
            return await there[f"http://{request.url.netloc.decode()}"].answer(request)

        sampler.http = HttpClient(20.0, httpx.MockTransport(answer))
        return sampler, list(there.values()), wires

    return made


@pytest.fixture
def wait() -> Iterator[AsyncRunner]:
    with AsyncRunner() as waiter:
        yield waiter


def publish(sampler: EngineSampler, version: int) -> PublishedWeights:
    """Return weights that the servers do not have."""
    with torch.no_grad():
        sampler.model.table.mul_(0.9)  # type: ignore[union-attr, operator]
    return PublishedWeights(version, dict(sampler.model.named_parameters()))


def bodies(server: Taking, path: str) -> list[Any]:
    return [body for requests, body in server.asked if requests == path]


@both
def test_server_samples_from_the_sent_weights(name: str, make: Callable[..., Made], wait: AsyncRunner) -> None:
    sampler, [server], wires = make(name)
    for version in (4, 5):
        metrics = wait(sampler.update(publish(sampler, version)))
        assert metrics["publication/probe_max"].value < 1e-5
        assert metrics["publication/bytes"].value == sum(p.nbytes for p in sampler.model.parameters())
        assert server.version == sampler.published.name  # type: ignore[union-attr]
        expected = dict(sampler.model.named_parameters())
        assert list(server.got) == list(expected) == ["table", "scale", "narrow"]
        assert all(torch.equal(server.got[n], expected[n]) for n in expected)
    assert len(wires.opened) == 1  # one group for both
    [generation] = wait(sampler.generate([Request(torch.tensor([3, 9]), (1, 2), SamplingParams(max_tokens=4), 4)]))
    assert generation.version == 5
    assert not sampler.versions.root.exists()
    wait(sampler.close())
    assert wires.opened[0].ended
    assert not server.groups


def test_vllm_transfer_requests(make: Callable[..., Made], wait: AsyncRunner) -> None:
    sampler, [server], _ = make("vllm")
    wait(sampler.update(publish(sampler, 0)))
    metrics = ["/start_weight_update", *["/update_weights"] * 3, "/finish_weight_update"]
    joins = ["/get_world_size", "/init_weight_transfer_engine"]
    after = ["/reset_prefix_cache", "/resume", "/update_weight_version"]
    assert server.paths == ["/v1/models", "/weight_info", "/pause?mode=keep", *joins, *metrics, *after]
    size = len(sampler.model.table)  # type: ignore[arg-type]
    assert bodies(server, "/update_weights") == [
        {"update_info": {"names": ["table"], "dtype_names": ["float32"], "shapes": [[size, size]]}},
        {"update_info": {"names": ["scale"], "dtype_names": ["float32"], "shapes": [[3, 2]]}},
        {"update_info": {"names": ["narrow"], "dtype_names": ["bfloat16"], "shapes": [[5]]}},
    ]
    assert bodies(server, "/start_weight_update") == [None]
    assert bodies(server, "/finish_weight_update") == [{"weight_version": sampler.published.name}]  # type: ignore[union-attr]
    assert bodies(server, "/init_weight_transfer_engine")[0]["init_info"]["world_size"] == 2


def test_sglang_transfer_requests(make: Callable[..., Made], wait: AsyncRunner) -> None:
    sampler, [server], wires = make("sglang")
    wait(sampler.update(publish(sampler, 0)))
    metrics = ["/init_weights_update_group", *["/update_weights_from_distributed"] * 3]
    assert server.paths == ["/model_info", "/server_info", *metrics]
    first, second, last = bodies(server, "/update_weights_from_distributed")
    assert (first["names"], first["dtypes"], first["flush_cache"]) == (["table"], ["float32"], False)
    assert (second["names"], second["shapes"]) == (["scale"], [[3, 2]])
    assert "weight_version" not in {*first, *second}
    assert (last["names"], last["flush_cache"], last["abort_all_requests"]) == (["narrow"], True, False)
    assert last["weight_version"] == sampler.published.name  # type: ignore[union-attr]
    assert {body["group_name"] for body in (first, second, last)} == {wires.opened[0].name}


@both
def test_small_weights_are_sent_in_one_request(name: str, make: Callable[..., Made], wait: AsyncRunner) -> None:
    sampler, [server], _ = make(name, bucket=2**29)
    wait(sampler.update(publish(sampler, 0)))
    path = "/update_weights" if name == "vllm" else "/update_weights_from_distributed"
    [body] = bodies(server, path)
    assert (body.get("update_info") or body)["names"] == ["table", "scale", "narrow"]


@both
def test_group_includes_all_processes_of_a_server(name: str, make: Callable[..., Made], wait: AsyncRunner) -> None:
    sampler, [server], wires = make(name)
    server.workers = 4
    wait(sampler.update(publish(sampler, 0)))
    assert wires.opened[0].size == 5


@both
def test_server_lost_during_a_transfer_does_not_block_the_others(
    name: str, make: Callable[..., Made], wait: AsyncRunner
) -> None:
    sampler, [first, second], wires = make(name, servers=2)
    wait(sampler.update(publish(sampler, 0)))
    first.lost = 1  # after the table
    wait(sampler.update(publish(sampler, 1)))
    assert [server.ready for server in sampler.servers.all] == [False, True]
    assert torch.equal(second.table, sampler.model.table)  # type: ignore[arg-type]
    lost = next(wire for wire in wires.opened if wire.name not in second.groups)
    assert lost.ended

    async def back() -> None:
        first.begin()
        server = sampler.servers.all[0]
        if server.task is None or server.task.done():
            sampler.servers._recover(server)
        assert server.task is not None
        await server.task

    wait(back())
    assert [server.ready for server in sampler.servers.all] == [True, True]
    assert torch.equal(first.table, sampler.model.table)  # type: ignore[arg-type]
    assert len({wire.name for wire in wires.opened}) >= 3  # a new one
    wait(sampler.close())


@both
def test_server_that_never_receives_weights_is_given_up(
    name: str, make: Callable[..., Made], wait: AsyncRunner
) -> None:
    sampler, [server], wires = make(name, recovery_timeout=0.2)
    server.hangs = True
    with pytest.raises(EngineError, match=r"no server has answered for 0.2 seconds"):
        wait(sampler.update(publish(sampler, 0)))
    assert all(wire.ended for wire in wires.opened)
    wait(sampler.close())


@both
def test_restarted_server_joins_a_new_group(name: str, make: Callable[..., Made], wait: AsyncRunner) -> None:
    sampler, [server], wires = make(name)
    wait(sampler.update(publish(sampler, 0)))
    server.begin()
    wait(sampler.update(publish(sampler, 1)))
    assert [wire.ended for wire in wires.opened] == [True, False]
    assert list(server.groups) == [wires.opened[1].name]
    assert torch.equal(server.table, sampler.model.table)  # type: ignore[arg-type]


def test_interrupted_update_is_finished_before_joining_again(make: Callable[..., Made], wait: AsyncRunner) -> None:
    sampler, [server], wires = make("vllm")
    wait(sampler.update(publish(sampler, 0)))
    wires.opened[0].abort()  # the learner's side breaks, while the server is in the middle of an update
    metrics = wait(sampler.update(publish(sampler, 1)))
    assert metrics["publication/probe_max"].value < 1e-5
    assert "/shutdown_weight_transfer_engine" in server.paths
    assert len(wires.opened) == 2


@both
def test_cancelled_transfer_is_completed(name: str, make: Callable[..., Made], wait: AsyncRunner) -> None:
    """A server that waits for the rest of a broadcast waits forever."""
    sampler, [server], _ = make(name)
    wait(sampler.update(publish(sampler, 0)))
    weights = publish(sampler, 1)
    assert sampler.transfer is not None
    publication = sampler.transfer.publish(weights)
    started, goes_on = asyncio.Event(), asyncio.Event()
    take = server.take

    async def slow(*args: Any) -> None:
        started.set()
        await goes_on.wait()
        await take(*args)

    async def broken_off() -> None:
        server.take = slow
        sent = asyncio.ensure_future(
            sampler.transfer.send(sampler.http, sampler.config.urls[0], publication, server.version)  # type: ignore[union-attr]
        )
        await started.wait()
        sent.cancel()
        goes_on.set()
        with pytest.raises(asyncio.CancelledError):
            await sent

    server.got.clear()
    wait(broken_off())
    assert torch.equal(server.got["narrow"], sampler.model.narrow)  # type: ignore[arg-type]
    assert torch.equal(server.table, sampler.model.table)  # type: ignore[arg-type]


def test_cancelled_transfer_does_not_wait_for_a_hanging_server(
    make: Callable[..., Made], wait: AsyncRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl_transfer, "CONTROL_TIMEOUT", 0.1)
    sampler, [server], wires = make("sglang")
    server.hangs = True
    publication = sampler.transfer.publish(publish(sampler, 1))  # type: ignore[union-attr]

    async def broken_off() -> None:
        sent = asyncio.ensure_future(
            sampler.transfer.send(sampler.http, sampler.config.urls[0], publication, None)  # type: ignore[union-attr]
        )
        while not bodies(server, "/update_weights_from_distributed"):
            await asyncio.sleep(0)
        sent.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sent

    wait(broken_off())
    assert wires.opened[0].ended


def test_vllm_without_transfer_config_is_refused_with_the_option(make: Callable[..., Made], wait: AsyncRunner) -> None:
    sampler, [server], wires = make("vllm")
    server.configured = False
    with pytest.raises(
        EngineError, match=r"--weight-transfer-config '\{\"backend\":\"nccl\"\}'.*--sampler.weight-transport folder"
    ):
        wait(sampler.update(publish(sampler, 0)))
    assert wires.opened[0].ended


@pytest.mark.parametrize("many", [{"dp_size": 2}, {"pp_size": 4}])
def test_sglang_with_data_or_pipeline_parallelism_is_refused(
    many: dict[str, int], make: Callable[..., Made], wait: AsyncRunner
) -> None:
    sampler, [server], _ = make("sglang")
    server.many = many
    [(kind, count)] = many.items()
    with pytest.raises(EngineError, match=rf"{kind} {count}, with which SGLang loads no weights over NCCL"):
        wait(sampler.update(publish(sampler, 0)))


def test_sglang_dp_attention_counts_as_tensor_parallel(make: Callable[..., Made], wait: AsyncRunner) -> None:
    sampler, [server], wires = make("sglang")
    server.many, server.workers = {"dp_size": 2, "enable_dp_attention": True}, 2
    wait(sampler.update(publish(sampler, 0)))
    assert wires.opened[0].size == 3


def test_transfer_to_another_kind_of_server_is_refused(make: Callable[..., Made], wait: AsyncRunner) -> None:
    sampler, [server], _ = make("vllm")
    server.transferred = _strange
    with pytest.raises(EngineError, match=r"is it a server of vLLM 0.32"):
        wait(sampler.update(publish(sampler, 0)))


async def _strange(path: str, body: Any) -> tuple[int, Any]:
    return 200, {"size": 1} if path == "/get_world_size" else None


def test_tied_head_is_sent_twice_to_vllm(random_model: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = load_model(str(random_model), dtype="fp32", device="cpu")
    expected = dict(model.named_parameters())
    for sampler_class, names in ((VllmSampler, [*expected, "lm_head.weight"]), (SglangSampler, [*expected])):
        wired = with_groups(sampler_class, Wires())
        config = SamplerConfig(
            engine=sampler_class.__name__.lower().removesuffix("sampler"), urls=("http://a:1",), weight_transport="nccl"
        )
        sampler = wired(model, tokenizer, config, tmp_path)
        result = sampler.transfer.publish(PublishedWeights(0, expected))
        sent = sampler.transfer._tensors
        assert list(sent) == names
        assert result.bytes == sum(tensor.nbytes for tensor in sent.values())
        assert all(sent[name].data_ptr() == expected[name].data_ptr() for name in expected)  # not copied
    assert "lm_head.weight" not in expected


def test_nccl_from_a_cpu_is_refused(tokenizer: Tokenizer) -> None:
    for name, (sampler_class, _) in KINDS.items():
        config = SamplerConfig(engine=name, urls=("http://127.0.0.1:1",), weight_transport="nccl")
        with pytest.raises(
            EngineError,
            match=r"the policy is on the cpu. Set --learner.device cuda, or .*--sampler.weight-transport folder",
        ):
            sampler_class(Wide(len(tokenizer.hf)), tokenizer, config, Path("weights"))


def test_adapters_are_not_sent_over_nccl(random_model: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = load_model(str(random_model), dtype="fp32", device="cpu")
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], r=2))
    config = SamplerConfig(engine="vllm", urls=("http://127.0.0.1:1",), weight_transport="nccl")
    with pytest.raises(EngineError, match=r"adapters"):
        VllmSampler(adapted, tokenizer, config, tmp_path)


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ("llama_cpp", r"supported by vllm and sglang, not by llama_cpp.* --sampler.weight-transport folder"),
        ("local", "is local"),
    ],
)
def test_nccl_is_refused_for_other_engines(engine: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"{message}"):
        SamplerConfig(engine=engine, weight_transport="nccl")
    with pytest.raises(ConfigError, match=r"sampler.weight_transport must be folder or nccl, not 'infiniband'"):
        SamplerConfig(weight_transport="infiniband")


def test_broken_group_means_unavailable(make: Callable[..., Made], wait: AsyncRunner) -> None:
    sampler, [server], wires = make("sglang")
    assert sampler.transfer is not None
    publication = sampler.transfer.publish(publish(sampler, 0))

    async def sent() -> None:
        await sampler.transfer.send(sampler.http, sampler.config.urls[0], publication, None)  # type: ignore[union-attr]

    wait(sent())
    server.hangs = True
    wires.opened[0].abort()
    with pytest.raises(ServerUnavailableError, match=r"the process group with it is broken: ended"):
        wait(sent())


def test_printed_command_enables_the_transfer(run_command: Any) -> None:
    code, message, _ = run_command("engine", "vllm", "--weight-transport", "nccl", "--print")
    assert code == 0
    assert """--weight-transfer-config '{"backend":"nccl"}'""" in message
    assert "VLLM_SERVER_DEV_MODE=1" in message
    code, message, _ = run_command("engine", "vllm", "--print")
    assert code == 0
    assert "--weight-transfer-config" not in message
