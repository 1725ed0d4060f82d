"""Faults of engines at random moments of a run: two real llama.cpp servers, the embedded model; docs/results/engine-faults.json.

python scripts/stress_engines.py [--repeats 30] [--kinds killed hangs …] [--max-staleness K] [--folder DIR]

Each kind of fault has a run of grpo with two servers, each behind a small proxy. At random moments (during a rollout, an update, a
publication) one of them has the fault for a random time, again and again. `gone` makes both unavailable for longer than the run
waits: it must end, and resume from what it has saved. The script counts groups that were lost or trained on twice, by their keys,
and completions that were not sampled with the version they claim: each is compared with the learner's own log-probabilities.

Kinds whose results are in the folder are skipped. Exit code 1: a promise does not hold; the results name it. Linux only.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import policygrad as pg
from policygrad.core.metrics import Metrics
from policygrad.errors import EngineError
from policygrad.rollout.trajectory import TRAIN
from policygrad.samplers.base import Generation, Request
from policygrad.samplers.config import SamplerConfig
from policygrad.samplers.engines import llama_server, probe
from policygrad.samplers.engines.base import LaunchOptions
from policygrad.samplers.engines.llama_cpp import LlamaCppSampler
from policygrad.samplers.engines.server_process import ServerProcess, find_free_port
from policygrad.training.base_trainer import Callback
from policygrad.training.loop import StepResult
from policygrad.weight_sync.base import PublishedWeights

PARALLEL, CONTEXT = 4, 256
GARBAGE = (
    b"<html>502 Bad Gateway</html>",
    b'{"tokens": [1, 2',
    b"[]",
    b"null",
    b'{"tokens": [99999999], "completion_probabilities": [{"id": 99999999, "prob": 0.5}]}',
    b'{"tokens": [7, 1], "completion_probabilities": [{"id": 7, "prob": 0.5}]}',
    b'{"tokens": [7, 1], "completion_probabilities": [{"id": 7, "prob": 1.5}, {"id": 1, "prob": 0.5}]}',
    b'{"tokens": ["x"], "completion_probabilities": [{"id": "x", "prob": "y"}]}',
)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore connections that the client has closed."""


class Proxy:
    """A proxy before a server; `fault` is the kind of fault that it has, or empty."""

    def __init__(self, upstream: int, draw: random.Random) -> None:
        self.server_port = self.upstream = upstream
        """Ports: of its own server, and of the server that it forwards to."""
        self.fault, self.draw = "", draw
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: Any) -> None: ...

            def do_GET(self) -> None:
                proxy.answer(self)

            do_POST = do_GET

        self.server = _Server(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        """Forward a request and the reply, with the fault."""
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        status, reply, request.close_connection = 500, b"a fault", True
        if self.fault == "garbage":
            status, reply = 200, self.draw.choice(GARBAGE)
        elif self.fault == "gone":
            return
        elif self.fault != "errors":
            connection = HTTPConnection("127.0.0.1", self.upstream, timeout=60)
            try:
                connection.request(request.command, request.path, body or None, {"Content-Type": "application/json"})
                response = connection.getresponse()
                status, reply = response.status, response.read()
            except (OSError, HTTPException):  # unavailable: the client sees a broken connection
                return
            finally:
                connection.close()
            request.close_connection = self.fault == "drops"
        with contextlib.suppress(OSError):  # the client is gone
            request.send_response(status)
            request.send_header("Content-Length", str(len(reply)))
            request.end_headers()
            request.wfile.write(reply[: len(reply) // 2] if self.fault == "drops" else reply)

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@dataclass(frozen=True)
class Engine:
    """A real server that follows a folder, and its proxy."""

    process: ServerProcess
    proxy: Proxy

    def native(self) -> int | None:
        """Return the process that serves, the child of the one that watches; None = it is not running."""
        assert self.process.guard is not None
        pid: int | None = self.process.guard.pid
        for _ in range(2):  # the guard's child watches the folder, and its child serves
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            pid = int(children[0]) if children else None
            if pid is None:
                break
        return pid

    def alive(self) -> int:
        """Wait for the process that serves, and return it."""
        while (pid := self.native()) is None:
            time.sleep(0.005)
        return pid

    @contextlib.contextmanager
    def faulty(self, kind: str, old: int) -> Iterator[None]:
        """Cause a fault during the context. old: the port of a server with old weights."""
        stopped = 0
        if kind in ("killed", "hangs"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(stopped := self.alive(), signal.SIGKILL if kind == "killed" else signal.SIGSTOP)
        elif kind == "old":
            self.proxy.upstream = old
        else:
            self.proxy.fault = kind
        try:
            yield
        finally:
            self.proxy.fault, self.proxy.upstream = "", self.proxy.server_port
            if kind == "hangs":
                with contextlib.suppress(ProcessLookupError):  # it has been replaced
                    os.kill(stopped, signal.SIGCONT)


@contextlib.contextmanager
def two_engines(folder: Path, draw: random.Random) -> Iterator[list[Engine]]:
    """Start two servers that follow the folder."""
    with contextlib.ExitStack() as stack:
        engines = []
        for _ in range(2):
            port = find_free_port()
            options = LaunchOptions("", str(folder), "127.0.0.1", port, "float32", CONTEXT, PARALLEL, threads=1)
            environment, argv = LlamaCppSampler.launch_command(options)
            command = environment, [sys.executable, *argv[1:]]
            process = ServerProcess(
                folder / f"server-{port}.log", partial(tuple[Any, ...], command), LlamaCppSampler.variables
            )
            process.ensure_running()
            stack.callback(process.stop)
            proxy = Proxy(port, draw)
            stack.callback(proxy.close)
            engines.append(Engine(process, proxy))
        yield engines


@contextlib.contextmanager
def keeping(weights: Path, folder: Path) -> Iterator[int]:
    """Start a server that keeps the first published weights, and yield its port. folder: for its copy."""
    port = find_free_port()
    shutil.rmtree(folder, ignore_errors=True)
    children: list[subprocess.Popen[bytes]] = []

    def serve() -> None:
        while not (name := llama_server.read_current_name(weights)):
            time.sleep(0.005)
        shutil.copytree(weights / name, folder / name)
        argv = [f"--file={folder / name / llama_server.MODEL_FILE}", f"--name={name}", f"--port={port}", "--threads=1"]
        argv += [f"--max-concurrency={PARALLEL}", f"--context-length={CONTEXT}", f"--parent={os.getpid()}"]
        with (folder / "log").open("wb") as log:
            command = [sys.executable, "-P", llama_server.__file__, "serve", *argv]
            children.append(subprocess.Popen(command, stdout=log, stderr=log))

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield port
    finally:
        for child in children:
            child.kill()
            child.wait()


ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results" / "engine-faults.json"
KINDS = {
    "killed": "its process is killed, and restarted by the watching process",
    "hangs": "its process is stopped, and continues later",
    "garbage": "it replies 200 with no JSON, incomplete JSON, unknown ids, too few probabilities, or some above 1",
    "errors": "it replies 500",
    "drops": "it closes the connection in the middle of a reply",
    "old": "it comes back with the run's first weights, and later with the current ones",
    "gone": "both are unavailable for longer than `--sampler.recovery-timeout`: the run ends, and continues with `--resume`",
}
LONGEST = 1.0
"""Maximum seconds of a fault."""
TIMEOUT, PATIENCE, SHORT = 1.5, 60.0, 1.0
"""Seconds: `sampler.timeout`, `sampler.recovery_timeout`, and the latter if both servers are gone."""
LASTS = {"hangs": 2 * TIMEOUT, "gone": 2.0}
"""Maximum seconds of other faults; of `gone` in addition to three times `SHORT`."""
WARM = 2
"""Steps without a fault, to measure their time."""


class Checked(LlamaCppSampler):
    """Compares every completion with the learner's own log-probabilities under the version that it claims."""

    doing = "learning"
    drawn = wrong = 0
    seconds = 0.0
    """Shortest time of a rollout."""

    async def generate(self, requests: Sequence[Request]) -> list[Generation]:
        self.doing, started = "rollout", time.monotonic()
        try:
            generations = await super().generate(requests)
        finally:
            self.doing = "learning"
        seconds = time.monotonic() - started
        self.seconds = min(self.seconds or seconds, seconds)
        assert self.published is not None
        logp, _, _ = probe.score_tokens(self.model, requests, generations)
        near = (torch.cat([g.logp for g in generations]).double() - logp).abs() <= self.logprob_tolerance
        correct = [bool(row.all()) for row in near.split([len(g.tokens) for g in generations])]
        self.drawn += len(generations)
        self.wrong += sum(
            not (ok and g.version == self.published.version) for ok, g in zip(correct, generations, strict=True)
        )
        return generations

    async def update(self, weights: PublishedWeights) -> Metrics:
        self.doing = "publication"
        try:
            return await super().update(weights)
        finally:
            self.doing = "learning"


class Counted(pg.Trainer):
    """Records the keys of the groups that each step is trained on."""

    def __init__(self, *args: Any, trained: list[tuple[int, ...]], **more: Any) -> None:
        super().__init__(*args, **more)
        self.trained = trained

    def on_step(self, done: StepResult) -> Metrics:
        self.trained += [group.spec.key for group in done.rollout.groups]
        return super().on_step(done)


@dataclass
class Injecting(Callback):
    """Causes one fault after another, each at a random moment of a step."""

    kind: str
    repeats: int
    engines: Sequence[Engine]
    draw: random.Random
    old: int = 0
    sampler: Checked | None = None
    phases: Counter[str] = field(default_factory=Counter)
    paces: list[float] = field(default_factory=list)
    """Seconds per step without a fault."""
    asked_again: float = 0.0

    def __post_init__(self) -> None:
        self.started, self.busy, self.woken = time.monotonic(), False, threading.Event()
        self.over = False
        threading.Thread(target=self._inject, daemon=True).start()

    def start(self, trainer: Any) -> None:
        self.started = time.monotonic()

    def step(self, trainer: Any, step: int, metrics: Any) -> None:
        now = time.monotonic()
        if len(self.paces) < WARM:
            self.paces.append(now - self.started)
        else:
            self.woken.set()
        self.started = now
        self.asked_again += metrics["publication/retries"]
        if self.over:
            trainer.stop()

    def _inject(self) -> None:
        for _ in range(self.repeats):
            self.woken.clear()
            self.woken.wait()
            assert self.sampler is not None
            share = self.draw.random()
            if self.draw.random() < 0.5:  # rollouts are short compared with publications
                while self.sampler.doing != "rollout":
                    time.sleep(0.001)
                time.sleep(share * self.sampler.seconds)
            else:
                time.sleep(share * self.paces[-1])
            self.phases[self.sampler.doing] += 1
            seconds = self.draw.uniform(0.05, LASTS.get(self.kind, LONGEST))
            with contextlib.ExitStack() as stack:
                chosen = self.engines if self.kind == "gone" else [self.draw.choice(self.engines)]
                if self.kind == "gone":
                    self.sampler.servers.recovery_timeout = SHORT  # not from the start: a server takes longer to start
                for engine in chosen:
                    stack.enter_context(engine.faulty(self.kind, self.old))
                time.sleep(3 * SHORT + seconds if self.kind == "gone" else seconds)
            self.sampler.servers.recovery_timeout = PATIENCE
        self.over = True


class Faults:
    """Runs each kind of fault in a folder."""

    def __init__(self, folder: Path, repeats: int, seed: int, staleness: int) -> None:
        self.folder, self.repeats, self.seed, self.staleness = folder, repeats, seed, staleness

    def run(self, kind: str) -> pg.Run:
        """Return a run that is long enough for any number of repeats; it is stopped after the last."""
        return pg.Run(
            algorithm=pg.get_algorithm("grpo"),
            steps=100_000,
            prompts_per_step=8,
            samples_per_prompt=4,
            seed=self.seed,
            max_staleness=self.staleness,
            evaluation=pg.EvaluationConfig(problems=0),
            checkpoint=pg.CheckpointConfig(every=50, keep=1),
            output=str(self.folder / kind),
        )

    def run_kind(self, kind: str) -> dict[str, Any]:
        """Run with these faults and return the counts."""
        started, draw = time.monotonic(), random.Random(f"{self.seed} {kind}")
        trained: list[tuple[int, ...]] = []
        made: list[Checked] = []
        run, weights = self.run(kind), self.folder / f"{kind}-weights"
        for path in (weights, self.folder / kind):
            shutil.rmtree(path, ignore_errors=True)
        ended = 0
        keeps = keeping(weights, self.folder / "kept") if kind == "old" else contextlib.nullcontext(0)
        with two_engines(weights, draw) as engines, keeps as old:
            injecting = Injecting(kind, self.repeats, engines, draw, old)
            config = SamplerConfig(
                engine="llama_cpp",
                urls=tuple(engine.proxy.url for engine in engines),
                max_concurrency=PARALLEL,
                timeout=TIMEOUT,
                recovery_timeout=PATIENCE,
            )

            def sampler(model: Any, tokenizer: Any) -> Checked:
                made.append(Checked(model, tokenizer, config, weights))
                injecting.sampler = made[-1]
                return made[-1]

            resume = None
            while True:
                trainer = Counted(run, sampler=sampler, display=False, callbacks=[injecting], trained=trained)
                try:
                    steps = trainer.train(resume=resume).steps
                    break
                except EngineError as error:
                    if kind != "gone":
                        return {"repeats": sum(injecting.phases.values()), "ended_by": str(error)}
                    ended, resume = ended + 1, run.output
                    while any(engine.proxy.fault for engine in engines):
                        time.sleep(0.01)
        expected = {(self.seed, TRAIN, 1 + i // 8, i) for i in range(8 * steps)}
        times = Counter(trained)
        return {
            "repeats": sum(injecting.phases.values()),
            "moments": dict(injecting.phases.most_common()),
            "steps": steps,
            "groups": len(expected),
            "lost": len(expected - times.keys()),
            "twice": sum(n - 1 for n in times.values()),
            "unknown": len(times.keys() - expected),
            "completions": sum(sampler.drawn for sampler in made),
            "of_another_version": sum(sampler.wrong for sampler in made),
            "asked_again": round(injecting.asked_again),
            "ended_and_resumed": ended,
            "timeout": TIMEOUT,
            "seconds": round(time.monotonic() - started, 1),
        }

    def report(self, kinds: Sequence[str]) -> dict[str, Any]:
        """Run all kinds and return the results."""
        results = {}
        for kind in kinds:
            file = self.folder / f"{kind}-{self.repeats}-{self.staleness}-{self.seed}.json"
            if not file.exists():
                file.write_text(json.dumps(self.run_kind(kind)) + "\n")
            results[kind] = json.loads(file.read_text())
            print(kind, json.dumps(results[kind]), flush=True)
        return {
            "made_by": shlex.join(["python", "scripts/stress_engines.py", *sys.argv[1:]]),
            "versions": {"python": platform.python_version()}
            | {name: version(name) for name in ("policygrad", "torch", "xllamacpp", "httpx")},
            "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
            "repeats": self.repeats,
            "staleness": self.staleness,
            "kinds": results,
            "broken": list_broken_promises(results),
        }


def list_broken_promises(results: dict[str, dict[str, Any]]) -> list[str]:
    """Return the promises that do not hold, as sentences."""
    broken = []
    for kind, seen in results.items():
        if "ended_by" in seen:
            broken.append(f"{kind}: the run ended: {seen['ended_by']}")
            continue
        for name in ("lost", "twice", "unknown"):
            if seen[name]:
                broken.append(f"{kind}: {seen[name]} groups {name}")
        if seen["of_another_version"]:
            broken.append(f"{kind}: {seen['of_another_version']} completions are not of the version that they claim")
        if kind == "gone" and not seen["ended_and_resumed"]:
            broken.append(f"gone: {seen['repeats']} times without a server, and the run has never ended")
    return broken


def main(argv: Sequence[str] | None = None) -> int:
    """Run all kinds and write the results; return 1 if a promise does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=30, help="faults of each kind")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--max-staleness", type=int, default=0, help="of the runs")
    parser.add_argument("--seed", type=int, default=0, help="of the runs and the moments")
    parser.add_argument("--folder", type=Path, help="for the runs (default: a temporary one)")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        results = Faults(folder, args.repeats, args.seed, args.max_staleness).report(args.kinds)
    args.results.parent.mkdir(parents=True, exist_ok=True)
    args.results.write_text(json.dumps(results, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    print("\n".join(results["broken"]) or "all promises hold")
    return 1 if results["broken"] else 0


if __name__ == "__main__":
    sys.exit(main())
