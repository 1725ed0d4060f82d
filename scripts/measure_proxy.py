"""Measure what stands between a program and a model: the proxy, the local sampler's reading of prompts, and an engine behind it.

    python scripts/measure_proxy.py [--before FOLDER] [--parts clients,prompts,engine] [--vllm VENV] [--results FILE]

clients: `policygrad proxy` with 1, 8 and 64 clients, each of which sends one request after another, every other one of 8 tokens and
of up to 160: tokens per second, and mean seconds to an answer. prompts: agents with 12,000 tokens of instructions, two turns each,
two agents in a batch: tokens that the model reads, and seconds. engine: 64 clients at a vLLM server, directly and as the programs
of 64 episodes: tokens per second. `--before`: a checkout of the source that is compared, in turns. The machine is shared with
whatever else runs on it: only the sides of one row are compared.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results" / "proxy.json"
CLIENTS = (1, 8, 64)
LONG, SHORT, HEAT = 160, 8, 100.0
"""Tokens of requests; a temperature at which the embedded model seldom ends a text early."""
INSTRUCTIONS, QUESTION, EPISODES, TOGETHER = 12_000, 40, 8, 2
CALLS, TOKENS = 4, 256
"""Requests of each of the 64 clients of an engine, and the most tokens of each."""


class Connection:
    """A connection that is kept, with as little in between as there can be."""

    def __init__(self, url: str) -> None:
        self.host, _, port = url.removeprefix("http://").partition(":")
        self.port = int(port)

    async def __aenter__(self) -> Connection:
        self.reader, self.writer = await asyncio.open_connection(self.host, self.port)
        return self

    async def __aexit__(self, *error: object) -> None:
        self.writer.close()

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Send a request; return its reply."""
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\nContent-Type: application/json\r\n"
        self.writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().lower().splitlines()
        size = next(int(line.split(":")[1]) for line in lines if line.startswith("content-length"))
        reply: dict[str, Any] = json.loads(await self.reader.readexactly(size))
        if " 200 " not in lines[0]:
            raise RuntimeError(f"{path} answers {lines[0]}: {reply}")
        return reply


async def send_all(url: str, clients: int, bodies: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], int, float]]:
    """Let each client send these requests one after another; return each with its tokens and its seconds."""

    async def client(number: int) -> list[tuple[dict[str, Any], int, float]]:
        results = []
        async with Connection(url) as connection:
            for i in range(len(bodies)):
                body = bodies[(i + number) % len(bodies)]  # not all clients the long ones at the same time
                start = time.perf_counter()
                reply = await connection.post("/v1/completions", body)
                results.append((body, reply["usage"]["completion_tokens"], time.perf_counter() - start))
        return results

    return [one for each in await asyncio.gather(*map(client, range(clients))) for one in each]


@contextmanager
def serving_proxy(source: Path) -> Iterator[str]:
    """Serve the embedded model by a source's `policygrad proxy`; yield its address."""
    argv = [sys.executable, "-m", "policygrad", "proxy", "--model", "tiny", "--max-tokens", str(LONG), "--json"]
    environment = os.environ | {"PYTHONPATH": str(source / "src"), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, env=environment, cwd=source)
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["url"]
    finally:
        process.terminate()
        process.wait()


def measure_clients(sources: dict[str, Path], rounds: int) -> list[dict[str, Any]]:
    bodies = [
        {"model": "policy", "prompt": f"{17 + i} + {i} =", "max_tokens": LONG if i % 2 else SHORT, "temperature": HEAT}
        for i in range(4)
    ]
    samples = dict[tuple[str, int], list[tuple[float, float, float]]]()
    for number in range(rounds):
        for name, source in list(sources.items())[:: 1 if number % 2 else -1]:
            with serving_proxy(source) as url:
                asyncio.run(send_all(url, 2, bodies))  # what is only slow once
                for clients in CLIENTS:
                    start = time.perf_counter()
                    results = asyncio.run(send_all(url, clients, bodies * (4 if clients < 64 else 1)))
                    seconds = time.perf_counter() - start
                    tokens = sum(n for _, n, _ in results)
                    short = [each for body, _, each in results if body["max_tokens"] == SHORT]
                    row = tokens / seconds, statistics.mean(t for *_, t in results), statistics.mean(short)
                    samples.setdefault((name, clients), []).append(row)
                    print(number, name, clients, *(f"{x:.3g}" for x in row), flush=True)
    rows = []
    for (name, clients), values in samples.items():
        rate, answer, short_answer = (statistics.median(column) for column in zip(*values, strict=True))
        numbers = {"tokens_per_second": rate, "seconds": answer, "seconds_of_short": short_answer}
        rows.append({"source": name, "clients": clients, **numbers})
    return rows


def measure_prompts(sources: dict[str, Path]) -> list[dict[str, Any]]:
    rows = []
    for name, source in sources.items():
        environment = os.environ | {"PYTHONPATH": str(source / "src"), "OMP_NUM_THREADS": "1"}
        argv = [sys.executable, __file__, "--in-process"]
        output = subprocess.run(argv, env=environment, cwd=source, stdout=subprocess.PIPE, check=True).stdout
        rows.append({"source": name, **json.loads(output.splitlines()[-1])})
        print(rows[-1], flush=True)
    return rows


def read_prompts() -> dict[str, float]:
    """Sample two turns of a few agents that begin with the same instructions; return what the model read, and how long it took."""
    import torch
    import transformers

    from policygrad.models.loading import load_model
    from policygrad.samplers.base import Request, SamplingParams
    from policygrad.samplers.local.sampler import LocalSampler

    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = transformers.Qwen3Config(
        vocab_size=1000,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=16_384,
    )
    model: Any = load_model(transformers.AutoModelForCausalLM.from_config(config).eval())
    sampler, read = LocalSampler(model, frozenset(), 0), [0]
    asyncio.run(sampler.generate([Request(torch.tensor([1, 2]), (9,), SamplingParams(), 2, continues=True)]))

    def count(module: object, inputs: tuple[torch.Tensor, ...], output: object) -> None:
        read[0] += inputs[0].numel() if inputs[0].shape[1] > 1 else 0

    model.get_input_embeddings().register_forward_hook(count)
    instructions = torch.randint(1000, (INSTRUCTIONS,))
    contexts = [torch.cat([instructions, torch.randint(1000, (QUESTION,))]) for _ in range(EPISODES)]
    sampling, needed, start = SamplingParams(max_tokens=16), 0, time.perf_counter()
    for turn in range(2):
        for first in range(0, EPISODES, TOGETHER):
            chosen = range(first, first + TOGETHER)
            requests = [Request(contexts[i], (turn, i), sampling, 16, continues=True) for i in chosen]
            needed += sum(len(contexts[i]) for i in chosen)
            for i, generation in zip(chosen, asyncio.run(sampler.generate(requests)), strict=True):
                contexts[i] = torch.cat([contexts[i], generation.tokens, torch.randint(1000, (QUESTION,))])
    return {"prompt_tokens": needed, "tokens_read": read[0], "seconds": time.perf_counter() - start}


AGENT = """
import http.client, json, os, urllib.parse

def main(example):
    url = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"])
    connection = http.client.HTTPConnection(url.hostname, url.port)
    headers = {{"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}}
    for body in {bodies!r}:
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        reply = connection.getresponse()
        data = json.loads(reply.read())
        assert reply.status == 200, data
    return 1.0
"""


def measure_engine(venv: str, rounds: int, folder: Path) -> dict[str, Any]:
    """Compare a vLLM server with 64 clients and with the programs of 64 episodes, which send the same requests."""
    from measure_engines import serving
    from policygrad import AgentProgram
    from policygrad.environments.agent_episodes import run_agent_episodes
    from policygrad.models.loading import load_model
    from policygrad.models.tokenizer import load_tokenizer
    from policygrad.rollout.trajectory import TRAIN, EpisodeSpec
    from policygrad.samplers.base import SamplingParams
    from policygrad.samplers.config import SamplerConfig
    from policygrad.samplers.engines.vllm import VllmSampler
    from policygrad.tasks.base import Example
    from policygrad.utils.async_runner import AsyncRunner
    from policygrad.weight_sync.base import PublishedWeights

    clients = CLIENTS[-1]
    model: Any = load_model("tiny", dtype="fp32", device="cpu")
    model.model.norm.weight.data.zero_()  # all tokens are equally probable, so that texts are long
    encoder = load_tokenizer("tiny", model)
    prompts = [encoder.hf.encode(f"{17 + i} + {i} =") for i in range(CALLS)]
    sampling = SamplingParams(max_tokens=TOKENS * CALLS)
    asked = [{"model": "policy", "prompt": ids, "max_tokens": TOKENS, "temperature": 1.0} for ids in prompts]
    (folder / "agent.py").write_text(AGENT.format(bodies=asked))
    program = AgentProgram(function=f"{folder / 'agent.py'}:main", max_calls=CALLS, concurrency=clients)
    rates: dict[str, list[float]] = {"alone": [], "through": []}
    with serving(venv, folder, max_concurrency=clients) as url, AsyncRunner() as wait:
        config = SamplerConfig(engine="vllm", urls=(url,), recovery_timeout=600.0, max_concurrency=clients)
        engine = VllmSampler(model, encoder, config, folder / "weights")
        wait(engine.update(PublishedWeights(1, dict(model.named_parameters()))))
        name = next(iter(engine.model_names.values()))
        # what the run asks the server for, so that it does the same work
        options = {"min_p": 0.0, "stop_token_ids": sorted(encoder.end_ids), "logprobs": 0, "return_token_ids": True}
        direct = [{**body, "model": name, **options, "add_special_tokens": False} for body in asked]
        wait(send_all(url, 8, direct[:2]))
        for number in range(rounds):
            start = time.perf_counter()
            tokens = sum(n for _, n, _ in wait(send_all(url, clients, direct)))
            rates["alone"].append(tokens / (time.perf_counter() - start))
            specs = [EpisodeSpec(Example("", {}), (0, TRAIN, number, i), sampling.max_tokens) for i in range(clients)]
            start = time.perf_counter()
            groups = wait(run_agent_episodes(specs, 1, sampling, sampler=engine, encoder=encoder, program=program))
            seconds = time.perf_counter() - start
            trajectories = [trajectory for group in groups for trajectory in group.trajectories]
            assert not any(trajectory.failure for trajectory in trajectories)
            tokens = sum(len(s.tokens) for t in trajectories for s in t.segments if s.logp is not None)
            rates["through"].append(tokens / seconds)
            print(number, {side: round(values[-1]) for side, values in rates.items()}, flush=True)
        wait(engine.close())
    alone, through = (statistics.median(rates[side]) for side in ("alone", "through"))
    return {"clients": clients, "calls": CALLS, "tokens": TOKENS, "alone": alone, "through": through, "rounds": rates}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--parts", default="clients,prompts,engine")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vllm", default="")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--in-process", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.in_process:
        print(json.dumps(read_prompts()))
        return
    sources = {"before": options.before.resolve()} if options.before else {}
    sources["now"] = ROOT
    result = json.loads(options.results.read_text()) if options.results.is_file() else {}
    parts = options.parts.split(",")
    if "clients" in parts:
        result["clients"] = measure_clients(sources, options.rounds)
    if "prompts" in parts:
        result["prompts"] = measure_prompts(sources)
    if "engine" in parts and options.vllm:
        with tempfile.TemporaryDirectory() as folder:
            result["engine"] = measure_engine(options.vllm, options.rounds, Path(folder))
    options.results.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
