"""Measure engines: learning compared with local sampling, agreement after every publication, throughput; docs/results/engines.json.

python scripts/measure_engines.py [--engines local llama_cpp vllm] [--vllm VENV] [--seeds 0 1 2] [--folder DIR]
python scripts/measure_engines.py --throughput --vllm VENV

Each engine has one run of grpo per seed with the default options, whose evaluation accuracy is compared with that of runs without
an engine; and one of a hundred short steps, after each of which the weights are published, loaded by the server and probed. The
runs start their servers.
--throughput samples the same number of tokens from a vLLM server as its own benchmark, `vllm bench serve`, in turns.

VENV is a virtual environment with vLLM 0.32. Runs that are complete in the folder are skipped.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from measure_algorithms import RESULTS, WORK
from policygrad.commands.engine import EngineOptions, build_launch_command
from policygrad.models.loading import load_model
from policygrad.models.tokenizer import load_tokenizer
from policygrad.samplers.base import Request, SamplingParams
from policygrad.samplers.config import SamplerConfig
from policygrad.samplers.engines.http import HttpClient
from policygrad.samplers.engines.vllm import VllmSampler
from policygrad.weight_sync.base import PublishedWeights

START = 300.0
"""Maximum seconds for a server to start."""


@contextmanager
def serving(
    venv: str,
    folder: Path,
    without: tuple[str, ...] = (),
    max_concurrency: int = 16,
    weight_transport: str = "folder",
    lora: str = "",
) -> Iterator[str]:
    """Serve the embedded model during the context and yield the server's address. VLLM_ARGS in the environment are further options.

    Args:
        venv: A virtual environment with bin/vllm.
        folder: For its log.
        without: Options to leave out, with their values.
        lora: The adapters that it is sent; "" = full weights.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = EngineOptions(
        "vllm",
        model="tiny",
        port=port,
        context_length=512,
        max_concurrency=max_concurrency,
        weight_transport=weight_transport,
        lora=lora,
    )
    environment, argv = build_launch_command(options)
    for option in without:
        at = argv.index(option)
        argv = [*argv[:at], *argv[at + 2 :]]
    argv = [f"{venv}/bin/{argv[0]}", *argv[1:], "--enforce-eager", *shlex.split(os.environ.get("VLLM_ARGS", ""))]
    quiet = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with (folder / "vllm.log").open("wb") as log:
        process = subprocess.Popen(argv, env=clean | quiet | environment, stdout=log, stderr=log)
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait()


ENGINES = ("local", "llama_cpp", "vllm")
LONG = ("--steps", "100", "--prompts-per-step", "8", "--evaluation.problems", "0")
"""Options of the run whose publications are measured."""
PROMPT, ANSWER, PROMPTS, PARALLEL, TURNS = 64, 64, 256, 16, 7
"""Throughput: tokens of prompt and completion, prompts, concurrent requests, and measurements of each side."""
HOT = 2.0
"""Temperature of the throughput measurement, the highest that vLLM accepts."""


def train(argv: Sequence[str], output: Path) -> None:
    """Run `policygrad train grpo`, unless it is complete; resume a run that was stopped."""
    if (output / "result.json").exists():
        return
    rerun = ["--resume", str(output)] if (output / "run.toml").exists() else ["grpo", *argv, "--output", str(output)]
    subprocess.run([sys.executable, "-m", "policygrad", "train", *rerun], check=True)


def rows(folder: Path) -> list[dict[str, Any]]:
    """Return the steps of a run's log."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [row for row in map(json.loads, lines) if row["step"]]


def accuracy(folder: Path) -> dict[str, float]:
    """Return a run's accuracy before and after, and its largest probe difference."""
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    found = {name: result[name] for name in ("eval_reward_before", "eval_reward_after", "steps", "seconds")}
    probes = [row["publication/probe_max"] for row in rows(folder) if "publication/probe_max" in row]
    return found | ({"probe_max": max(probes), "publications": len(probes)} if probes else {})


def publications(folder: Path) -> dict[str, float]:
    """Return the number, largest probe difference and cost of the long run's publications."""
    steps = rows(folder)
    return {
        "publications": len([row for row in steps if "publication/probe_max" in row]),
        "probe_max": max(row["publication/probe_max"] for row in steps),
        "probe_median": statistics.median(row["publication/probe_max"] for row in steps),
        "seconds": statistics.median(row["publication/seconds"] for row in steps),
        "mib": statistics.median(row["publication/bytes"] for row in steps) / 2**20,
    }


def measure(engine: str, seeds: Sequence[int], venv: str | None, folder: Path) -> dict[str, Any]:
    """Run and measure one engine."""
    place = folder / engine
    argv = [] if engine == "local" else ["--sampler.engine", engine]
    if engine == "vllm":
        argv += ["--sampler.python", str(venv)]
    for seed in seeds:
        train([*argv, "--seed", str(seed)], place / f"seed-{seed}")
    if engine != "local":
        train([*argv, *LONG], place / "long")
    found: dict[str, Any] = {"seeds": {str(seed): accuracy(place / f"seed-{seed}") for seed in seeds}}
    return found | ({"long": publications(place / "long")} if engine != "local" else {})


class Endless(HttpClient):
    """Requests completions of the maximum length, as vLLM's benchmark does, and counts their tokens."""

    tokens = 0

    async def post(self, url: str, body: dict[str, Any] | None = None, timeout: float | None = None) -> Any:
        if body is None or not url.endswith("/v1/completions"):
            return await super().post(url, body, timeout)
        answer = await super().post(url, body | {"ignore_eos": True, "stop_token_ids": []}, timeout)
        self.tokens += len(answer["choices"][0]["token_ids"])
        return answer


def theirs(venv: str, url: str, tokenizer: Path, seed: int, folder: Path) -> tuple[int, float]:
    """Run vLLM's own benchmark and return (tokens, seconds)."""
    argv = [f"{venv}/bin/vllm", "bench", "serve", "--backend", "openai", "--base-url", url]
    argv += ["--endpoint", "/v1/completions", "--model", "policy", "--tokenizer", str(tokenizer)]
    argv += ["--dataset-name", "random", "--random-input-len", str(PROMPT), "--random-output-len", str(ANSWER)]
    argv += ["--num-prompts", str(PROMPTS), "--max-concurrency", str(PARALLEL), "--seed", str(seed)]
    argv += ["--temperature", str(HOT), "--logprobs", "0", "--save-result", "--result-dir", str(folder)]
    argv += ["--result-filename", "bench.json", "--disable-tqdm"]
    subprocess.run(argv, check=True, capture_output=True)
    result = json.loads((folder / "bench.json").read_text(encoding="utf-8"))
    if result["completed"] != PROMPTS:
        raise SystemExit(f"vllm bench serve has completed {result['completed']} of {PROMPTS} requests")
    return int(result["total_output_tokens"]), float(result["duration"])


def throughput(venv: str, folder: Path) -> dict[str, Any]:
    """Measure tokens per second of this client and of vLLM's own, in turns on one server."""
    folder.mkdir(parents=True, exist_ok=True)
    model = load_model("tiny", dtype="fp32", device="cpu")
    tokenizer = load_tokenizer("tiny", model)
    tokenizer.hf.save_pretrained(folder / "tokenizer")
    found: dict[str, list[float]] = {"policygrad": [], "vllm bench serve": []}
    with serving(venv, folder, max_concurrency=PARALLEL) as url, asyncio.Runner() as runner:
        config = SamplerConfig(engine="vllm", urls=(url,), recovery_timeout=START, max_concurrency=PARALLEL)
        sampler = VllmSampler(model, tokenizer, config, folder / "weights")
        sampler.http = http = Endless(config.timeout)
        runner.run(sampler.update(PublishedWeights(0, dict(model.named_parameters()))))
        generator, sampling = torch.Generator().manual_seed(0), SamplingParams(temperature=HOT, max_tokens=ANSWER)
        for turn in range(TURNS + 1):  # the first turn warms up the server
            prompts = torch.randint(3, len(tokenizer.hf), (PROMPTS, PROMPT), generator=generator)
            requests = [Request(prompt_ids, (turn, i), sampling, ANSWER) for i, prompt_ids in enumerate(prompts)]
            before, started = http.tokens, time.perf_counter()
            runner.run(sampler.generate(requests))
            ours = (http.tokens - before, time.perf_counter() - started)
            for name, (tokens, seconds) in {
                "policygrad": ours,
                "vllm bench serve": theirs(venv, url, folder / "tokenizer", turn, folder),
            }.items():
                print(f"{name}: {tokens} tokens in {seconds:.1f} s", flush=True)
                found[name] += [tokens / seconds] * (turn > 0)
        runner.run(sampler.close())
    return {"tokens_per_second": found, "share": _share(found)}


def _share(found: dict[str, list[float]]) -> float:
    return statistics.median(found["policygrad"]) / statistics.median(found["vllm bench serve"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=None, help="default: all that are available")
    parser.add_argument("--vllm", metavar="VENV", help="virtual environment with bin/vllm")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--throughput", action="store_true", help="only vLLM, compared with its own benchmark")
    parser.add_argument("--folder", type=Path, default=WORK / "engines", help="of the runs (comparisons/engines)")
    args = parser.parse_args()
    if args.throughput and args.engines:
        parser.error("--throughput measures vLLM only: leave --engines out")
    engines = args.engines or [name for name in ENGINES if name != "vllm" or args.vllm]
    if args.vllm is None and (args.throughput or "vllm" in engines):
        parser.error("--vllm VENV: a virtual environment with vLLM 0.32")
    file = RESULTS / "engines.json"
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    places = {args.vllm: "VENV", str(args.folder): "DIR"}
    argv = [places.get(word, word) for word in sys.argv[1:]]
    called = shlex.join(["python", "scripts/measure_engines.py", *argv])
    about = {"machine": f"{platform.system()} {platform.machine()}", "torch": version("torch"), "command": called}
    if args.throughput:
        with tempfile.TemporaryDirectory() as folder:
            found["throughput"] = throughput(args.vllm, Path(folder)) | about
    for engine in () if args.throughput else engines:
        found[engine] = measure(engine, args.seeds, args.vllm, args.folder) | about
    file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
