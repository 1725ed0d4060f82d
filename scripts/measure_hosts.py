"""Faults between hosts, and what listens where: namespaces of this machine (scripts/hosts.py); docs/results/hosts.json.

    sudo python scripts/measure_hosts.py [--only listening|ranks|engine|ray|ray-head …] [--faults NAME …] [--folder DIR]

Hosts train together. `ranks`: torchrun with a process on each of two. `engine`: the learner on host0, a server of llama.cpp that
samples on host1. `ray`: a Ray cluster of three, if Ray is installed (`make .environments/ray/.installed`). At its third step the
run has a fault. It must go on, or end within the stated time with a message that names the other host, and go on where `--resume`
is called. Either way it has the completions and the weights of a run without a fault, to the bit: nothing was lost, and nothing
sampled or trained with other weights. `listening`: every program that listens, with its sockets as `ss` lists them, each tried
from another host that has no key.

What is measured replaces its part of the file; the rest stays. Exit code 1: a promise does not hold; the results name it.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hosts import Host, Laboratory, Link, address_of, why_not

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results" / "hosts.json"
PYTHON = sys.executable
BIN = Path(PYTHON).parent
PATIENCE = 300.0
"""Seconds that anything may take here: a machine with two cores starts four interpreters that import torch."""
KEY = {"POLICYGRAD_KEY": "a key of this laboratory alone"}
SAMPLER_KEY = {"SAMPLER_API_KEY": KEY["POLICYGRAD_KEY"]}
PATHS = {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))}
POLICYGRAD = [PYTHON, "-m", "policygrad"]


# --- programs on hosts, each with a deadline


@dataclass
class Program:
    """A command that runs on a host, and what it has said, which is in a file."""

    host: Host
    process: subprocess.Popen[str]
    file: Path

    @property
    def said(self) -> str:
        return self.file.read_text(encoding="utf-8", errors="replace")

    @property
    def name(self) -> str:
        return f"{self.host.name}: {shlex.join(map(str, self.process.args[-6:]))}"  # type: ignore[index]

    def wait(self, seconds: float = PATIENCE) -> int:
        """Return the exit code. Raises RuntimeError, which names the host, if it does not end in time."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise RuntimeError(
                f"{self.name} has not ended after {seconds:g} s; it said:\n{self.said[-3000:]}"
            ) from None

    def wait_for(self, found: Callable[[], Any], what: str, seconds: float = PATIENCE) -> Any:
        """Return the first true answer. Raises RuntimeError if the program ends before, or it takes too long."""
        deadline = time.monotonic() + seconds
        while not (answer := found()):
            if self.process.poll() is not None or time.monotonic() > deadline:
                ended = "runs" if self.process.poll() is None else f"has ended ({self.process.returncode})"
                raise RuntimeError(f"{self.name}: no {what}; it {ended} and said:\n{self.said[-3000:]}")
            time.sleep(0.05)
        return answer


def start(host: Host, argv: Sequence[str], folder: Path, env: Mapping[str, str] | None = None) -> Program:
    """Start a command on a host in a folder."""
    number = len(list(folder.glob(f"{host.name}-*.txt")))
    file = folder / f"{host.name}-{number}.txt"
    with file.open("w") as output:
        options = {"stdout": output, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
        process = host.start(argv, cwd=folder, env=PATHS | dict(env or {}), **options)
    return Program(host, process, file)


def torchrun_words(hosts: int, rank: int) -> list[str]:
    """Return the words of docs/scaling.md that start torchrun on one of several machines, up to the program."""
    text = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    (line,) = [line.strip() for line in text.splitlines() if line.strip().startswith("torchrun --nnodes")]
    words = shlex.split(line.partition(" -m policygrad")[0])
    changes = {"--nnodes": str(hosts), "--nproc-per-node": "1", "--node-rank": str(rank)}
    pairs = zip(["", *words], words, strict=False)
    return [str(BIN / words[0]), *[changes.get(before, word) for before, word in pairs][1:]]


def start_everywhere(lab: Laboratory, argv: Sequence[str], folder: Path, **env: str) -> list[Program]:
    """Start torchrun with this program on every host, by the documented words."""
    count = len(lab.hosts)
    return [start(host, [*torchrun_words(count, host.index), *argv], folder, KEY | env) for host in lab.hosts]


# --- the run


REWARD = """
import os
import time

def letters(prompts, completions, **columns):
    '''Another for every other text, so that each step moves the weights; slow, so that a fault strikes between two.'''
    time.sleep(8 if os.path.exists("slow") else 0.3)
    return [sum(map(ord, c)) % 7 / 7 for c in completions]
"""
STEPS = 5


def prepare(folder: Path, context: int = 256) -> list[str]:
    """Write a model of 30k parameters, a task and a reward; return the words of the command that trains it."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from policygrad.models.loading import resolve_model

    tokenizer = AutoTokenizer.from_pretrained(resolve_model("tiny"))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "policy")
    tokenizer.save_pretrained(folder / "policy")
    rows = [{"prompt": f"{i} + {j} =\n", "answer": str(i + j)} for i in range(6) for j in range(8)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "mine.py").write_text(REWARD)
    words = f"--model {folder / 'policy'} --task {folder / 'sums.jsonl'} --reward {folder / 'mine.py'}:letters"
    words += (
        f" --steps {STEPS} --prompts-per-step 2 --samples-per-prompt 4 --max-tokens 8 --lr 3e-3 --rewards.num-workers 1"
    )
    return [
        "train",
        "grpo",
        *words.split(),
        *["--evaluation.problems", "0", "--checkpoint.every", "1", "--checkpoint.keep", "3"],
    ]


def always(folder: Path) -> list[str]:
    return ["--plain", "--allow-code", str(folder / "mine.py")]


def count_steps(run: Path) -> int:
    """Return how many updates the metrics of a run have."""
    try:
        lines = (run / "metrics.jsonl").read_text().splitlines()
    except OSError:
        return 0
    with contextlib.suppress(ValueError):
        return max((json.loads(line).get("step", 0) for line in lines), default=0)
    return 0


def digest(run: Path) -> str:
    """Return a number for the completions that a run has trained on, in order, and its weights: to the bit."""
    found = hashlib.sha256()
    for line in (run / "completions.jsonl").read_text().splitlines():
        row = json.loads(line)
        found.update(json.dumps([row.get("step"), row["completion"]]).encode())
    found.update((run / "model" / "model.safetensors").read_bytes())
    return found.hexdigest()[:16]


# --- two kinds of run on two hosts


class Ranks:
    """torchrun with one process on each of two hosts."""

    name, other = "ranks", "host1"
    what = "between two ranks (torchrun)"
    hosts, disk = 2, None

    def __init__(self, folder: Path, begin: Sequence[str], more: Sequence[str] = ()) -> None:
        self.folder, self.begin, self.more = folder, begin, more

    def start(self, lab: Laboratory, run: Path, env: Mapping[int, Mapping[str, str]]) -> list[Program]:
        """Begin the run, or go on with it; return the programs, that of host0 first."""
        words = ["train", "--resume", str(run)] if run.exists() else [*self.begin, *self.more, "--output", str(run)]
        argv = ["-m", "policygrad", *words, *always(self.folder)]
        return [
            start(host, [*torchrun_words(2, host.index), *argv], self.folder, {**KEY, **env.get(host.index, {})})
            for host in lab.hosts[:2]
        ]


class Engine:
    """A learner on host0, a server on host1 that samples for it."""

    name, other = "engine", "host1:8000"
    what = "between learner and engine (HTTP)"
    hosts, disk = 2, None

    def __init__(self, folder: Path, begin: Sequence[str], more: Sequence[str] = ()) -> None:
        self.folder, self.begin, self.more = folder, begin, more

    def start(self, lab: Laboratory, run: Path, env: Mapping[int, Mapping[str, str]]) -> list[Program]:
        """Start the server, and begin the run or go on with it; return the programs, the learner first."""
        serving, more = self.serve(lab, self.weights(run), env.get(1, {})), [*self.options(run), *self.more]
        begin = ["train", "--resume", str(run)] if run.exists() else [*self.begin, *more, "--output", str(run)]
        allow = [*always(self.folder), "--allow-code", "http://host1:8000", "--allow-code", self.weights(run)]
        return [
            start(lab.hosts[0], [*POLICYGRAD, *begin, *allow], self.folder, SAMPLER_KEY | dict(env.get(0, {}))),
            serving,
        ]

    def weights(self, run: Path) -> str:
        """Return where they are published, which both hosts see also where the run's own folder is on a disk of one."""
        return str(self.folder / f"{run.name}-weights")

    def options(self, run: Path) -> list[str]:
        """Return what a run is told about the server, which answers one request at a time: what else it computes may change results
        by rounding."""
        words = f"--sampler.engine llama_cpp --sampler.urls http://host1:8000 --sampler.folder {self.weights(run)}"
        return [
            *words.split(),
            *["--sampler.max-concurrency", "1", "--sampler.timeout", "20", "--sampler.heartbeat", "5"],
        ]

    def serve(self, lab: Laboratory, weights: str, env: Mapping[str, str], host: int = 1) -> Program:
        """Start what `policygrad engine llama_cpp` starts, at every address: its own may change."""
        words = [PYTHON, "-P", str(ROOT / "src" / "policygrad" / "samplers" / "engines" / "llama_server.py"), "watch"]
        options = f"--folder={weights} --host=0.0.0.0 --port=8000 --max-concurrency=1 --context-length=256 --threads=1"
        return start(lab.hosts[host], [*words, *options.split()], self.folder, SAMPLER_KEY | dict(env))


RAY = ROOT / ".environments" / "ray" / "bin"
RAY_TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "7" * 64}
RAY_HOST = {"RAY_worker_niceness": "0", **SAMPLER_KEY}  # actors have the variables of `ray start`


class Ray:
    """Real Ray on three hosts: the command and the learner on host0, Ray's head on host1, a sampler on host2."""

    name, other = "ray", "host2"
    what = "between the hosts of a Ray cluster: command and learner on host0, Ray's head on host1, a sampler on host2"
    hosts, disk, command = 3, "1g", 0
    room = False  # whether host2 has room for another learner

    def __init__(self, folder: Path, begin: Sequence[str], more: Sequence[str] = ()) -> None:
        self.folder, self.begin, self.more = folder, begin, more

    def start(self, lab: Laboratory, run: Path, env: Mapping[int, Mapping[str, str]]) -> list[Program]:
        """Start Ray, and begin the run or go on with it; return the programs, the command first."""
        words = ["train", "--resume", str(run)] if run.exists() else [*self.begin, "--output", str(run)]
        cluster = f"--cluster {address_of(1)}:6379 --cluster.cpus 1 --cluster.rewards 0".split()
        if "--cluster.timeout" not in self.more:
            cluster += ["--cluster.timeout", "120"]
        argv = [str(RAY / "python"), "-m", "policygrad", *words, *always(self.folder), *cluster, *self.more]
        nodes = [start_ray(lab, 1, self.folder, 1, cpus=0), start_ray(lab, 0, self.folder, 1, cpus=1)]
        command = start(lab.hosts[self.command], argv, self.folder, RAY_HOST | RAY_TOKEN)
        # the learner has taken the only CPU, so that the sampler's will be that of the next host
        command.wait_for(lambda: "waiting " in command.said, "wait for a CPU")
        return [command, *nodes, start_ray(lab, 2, self.folder, 1, cpus=2 if self.room else 1)]


class RayFromHead(Ray):
    """The same, with the command on the host of Ray's head."""

    name, command = "ray-head", 1
    what = "between the hosts of a Ray cluster, with the command beside Ray's head"


def start_ray(
    lab: Laboratory,
    host: int,
    folder: Path,
    head: int = 0,
    cpus: int = 2,
    dashboard: bool = False,
    token: Mapping[str, str] = RAY_TOKEN,
) -> Program:
    """Start Ray on a host, as a cluster's head or as a member of it, and wait until it is there."""
    first = ["--head", "--port=6379", f"--include-dashboard={str(dashboard).lower()}"]
    place = first if host == head else [f"--address={address_of(head)}:6379"]
    common = [f"--num-cpus={cpus}", "--block", "--object-store-memory=100000000", "--disable-usage-stats"]
    argv = [str(RAY / "ray"), "start", *place, f"--node-ip-address={address_of(host)}", *common]
    program = start(lab.hosts[host], argv, folder, {"RAY_AUTH_MODE": "disabled", **RAY_HOST, **token})
    program.wait_for(lambda: "Ray runtime started" in program.said, "Ray")
    return program


# --- faults


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong at the third step.

    Args:
        strike: Called then, with the laboratory, the kind of run and its programs.
        heal: Called `seconds` later.
        goes_on: Whether the run must go on.
        ends_in: Seconds in which it must end if it does not go on.
        names: What the message with which it then ends must have, an expression; empty = the other host's name.
        more: Options of the run, by its kind.
        env: Variables of a host from the start.
        prepare: Called on the laboratory before the programs start.
        own_disk: The run's folder is on a disk that ends with the laboratory.
        room: Another machine of the cluster has room for the learner.
        only: The kinds of run that can have it.
    """

    what: str
    strike: Callable[[Laboratory, Any, list[Program]], None] = lambda lab, kind, programs: None
    heal: Callable[[Laboratory, Any, list[Program]], None] = lambda lab, kind, programs: lab.heal()
    seconds: float = 0.0
    goes_on: Mapping[str, bool] = field(default_factory=dict)
    ends_in: float = 90.0
    names: str = ""
    more: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    env: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    prepare: Callable[[Laboratory, Path], object] = lambda lab, folder: None
    own_disk: bool = False
    room: bool = False
    only: tuple[str, ...] = ("ranks", "engine")


SHORT = {"ranks": ("--learner.hang-timeout", "20"), "engine": ("--sampler.recovery-timeout", "20")}
"""Both are options with larger defaults (45 and 120 seconds), which take longer to measure."""
BOTH = {"ranks": True, "engine": True}
NEITHER = {"ranks": False, "engine": False}
NAMES = {f"host{i}": f"10.77.0.{i + 1}" for i in range(3)}
MOVED = "10.77.0.50"


def cut(lab: Laboratory, kind: Any, programs: list[Program]) -> None:
    lab.cut([0], [1])


def part(one: int, *others: int) -> Callable[[Laboratory, Any, list[Program]], None]:
    return lambda lab, kind, programs: lab.cut([one], others)


def cut_slow(lab: Laboratory, kind: Any, programs: list[Program]) -> None:
    (kind.folder / "slow").touch()  # so that the run does not end before the silence is noticed
    lab.cut([0], [1])


def slow(link: Link) -> Callable[[Laboratory, Any, list[Program]], None]:
    return lambda lab, kind, programs: lab.set_link(link)


def move(lab: Laboratory, kind: Any, programs: list[Program]) -> None:
    """Give host1 another address, which its name has from now on."""
    lab.hosts[1].connect(MOVED)
    lab.name_hosts(NAMES | {"host1": MOVED})


def small_disk(lab: Laboratory, folder: Path) -> None:
    """Mount a disk of host0 where the run's folder will be; the other hosts see it as a network file system."""
    where = folder / "runs"
    where.mkdir(exist_ok=True)
    lab.hosts[0].run(["mount", "-t", "tmpfs", "-o", "size=24m", "none", str(where)], check=True)
    for host in lab.hosts[1:]:
        share = [PYTHON, "-S", "-c", SHARE, str(lab.hosts[0].pid), str(host.pid), str(where)]
        subprocess.run(share, check=True)


SHARE = """
import ctypes, os, sys

def call(number, *arguments):
    result = ctypes.CDLL(None, use_errno=True).syscall(number, *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result

source, target = (os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY) for pid in sys.argv[1:3])
where = sys.argv[3].encode()
call(308, source, 0x20000)  # setns
tree = call(428, -100, where, 0x1 | 0x80000)  # open_tree: a copy of the mount
call(308, target, 0x20000)
call(429, tree, b"", -100, where, 0x4)  # move_mount
"""


FAULTS = {
    "host dies": Fault(
        "the other host loses its power", lambda lab, kind, programs: lab.power_off(1), goes_on=NEITHER, more=SHORT
    ),
    "first host dies": Fault(
        "rank 0's host loses its power",
        lambda lab, kind, programs: lab.power_off(0),
        goes_on=NEITHER,
        names="rank 0",
        more=SHORT,
        only=("ranks",),
    ),
    "cut 5 s": Fault("the two are cut off from each other for 5 s", cut, seconds=5, goes_on=BOTH),
    "cut 60 s": Fault(
        "the two are cut off from each other for 60 s", cut, seconds=60, goes_on={"ranks": False, "engine": True}
    ),
    "cut": Fault("the two are cut off from each other for ever", cut, goes_on=NEITHER, more=SHORT),
    "cut one way": Fault(
        "cut off one way, for ever: nothing of the other host arrives",
        lambda lab, kind, programs: lab.cut([1], [0], one_way=True),
        goes_on=NEITHER,
        more=SHORT,
    ),
    "cut other way": Fault(
        "cut off the other way, for ever: nothing arrives there",
        lambda lab, kind, programs: lab.cut([0], [1], one_way=True),
        goes_on=NEITHER,
        more=SHORT,
    ),
    "delay": Fault("200 ms of delay each way", slow(Link(delay=0.2)), goes_on=BOTH),
    "loss": Fault("5 % of the packets are lost", slow(Link(loss=0.05)), goes_on=BOTH),
    "rate": Fault("1 Mbit/s, also while weights are sent", slow(Link(rate=1e6)), goes_on=BOTH),
    "clock": Fault("the other host's clock is ten minutes ahead", goes_on=BOTH),
    "clock jumps": Fault("rank 0's or the learner's clock jumps ten minutes back", goes_on=BOTH),
    "dns": Fault(
        "names are resolved no more, for 10 s",
        lambda lab, kind, programs: lab.name_hosts({}),
        lambda lab, kind, programs: lab.name_hosts(NAMES),
        seconds=10,
        goes_on=BOTH,
    ),
    "dns for ever": Fault(
        "names are resolved no more",
        lambda lab, kind, programs: lab.name_hosts({}),
        goes_on={"ranks": True, "engine": False},
        more=SHORT,
    ),
    "address": Fault("the other host has another address", move, goes_on={"ranks": False, "engine": True}, more=SHORT),
    "disk": Fault(
        "the disk of the run's folder is full",
        lambda lab, kind, programs: fill(lab.hosts[0], kind.folder / "runs"),
        goes_on=NEITHER,
        names="No space left|the disk is full",
        prepare=small_disk,
        own_disk=True,
    ),
    "temporary disk": Fault(
        "the other host's /tmp is full",
        lambda lab, kind, programs: fill(lab.hosts[1], Path("/tmp")),
        goes_on=BOTH,
        prepare=lambda lab, folder: lab.hosts[1].run(
            ["mount", "-t", "tmpfs", "-o", "size=64m", "none", "/tmp"], check=True
        ),
    ),
    "head cut 5 s": Fault(
        "host0 and Ray's head are cut off from each other for 5 s",
        part(0, 1),
        seconds=5,
        goes_on={"ray": True},
        only=("ray",),
    ),
    "head cut 60 s": Fault(
        "host0 and Ray's head are cut off from each other for 60 s",
        part(0, 1),
        seconds=60,
        goes_on={"ray": True},
        more={"ray": ("--cluster.timeout", "90")},
        only=("ray",),
    ),
    "head cut": Fault(
        "host0 and Ray's head are cut off from each other for ever, in steps of 9 s",
        cut_slow,
        goes_on={"ray": False},
        names=f"Ray's head at {address_of(1)}:6379 has not answered for 10 s",
        more={"ray": ("--cluster.timeout", "10")},
        only=("ray",),
    ),
    "head dies": Fault(
        "the host of Ray's head loses its power, and the run's last step is done before that is noticed",
        lambda lab, kind, programs: lab.power_off(1),
        goes_on={"ray": True},
        more={"ray": ("--cluster.timeout", "20")},
        only=("ray",),
    ),
    "sampler cut 5 s": Fault(
        "learner and sampler are cut off from each other for 5 s",
        part(0, 2),
        seconds=5,
        goes_on={"ray": True},
        only=("ray",),
    ),
    "sampler cut 60 s": Fault(
        "learner and sampler are cut off from each other for 60 s",
        part(0, 2),
        seconds=60,
        goes_on={"ray": True},
        more={"ray": ("--cluster.timeout", "90")},
        only=("ray",),
    ),
    "sampler cut": Fault(
        "learner and sampler are cut off from each other for ever",
        part(0, 2),
        goes_on={"ray": False},
        names=address_of(2),
        more={"ray": ("--cluster.timeout", "20")},
        only=("ray",),
    ),
    "sampler dies": Fault(
        "the sampler's host loses its power",
        lambda lab, kind, programs: lab.power_off(2),
        goes_on={"ray": False},
        names=address_of(2),
        more={"ray": ("--cluster.timeout", "20")},
        only=("ray",),
    ),
    "ray delay": Fault("200 ms of delay each way", slow(Link(delay=0.2)), goes_on={"ray": True}, only=("ray",)),
    "ray loss": Fault("5 % of the packets are lost", slow(Link(loss=0.05)), goes_on={"ray": True}, only=("ray",)),
    "ray rate": Fault(
        "1 Mbit/s, also while weights are sent", slow(Link(rate=1e6)), goes_on={"ray": True}, only=("ray",)
    ),
    "learner cut": Fault(
        "the learner's host is cut off from the others for ever",
        part(0, 1, 2),
        goes_on={"ray-head": False},
        ends_in=180.0,
        names=f"the machine of learner 0, {address_of(0)}, is gone",
        more={"ray-head": ("--cluster.timeout", "20")},
        only=("ray-head",),
    ),
    "learner cut, with room": Fault(
        "the learner's host is cut off from the others for ever, and host2 has room for the learner",
        part(0, 1, 2),
        goes_on={"ray-head": True},
        more={"ray-head": ("--cluster.timeout", "20")},
        only=("ray-head",),
        room=True,
    ),
    "learner dies": Fault(
        "the learner's host loses its power",
        lambda lab, kind, programs: lab.power_off(0),
        goes_on={"ray-head": False},
        ends_in=180.0,
        names=f"the machine of learner 0, {address_of(0)}, is gone",
        more={"ray-head": ("--cluster.timeout", "20")},
        only=("ray-head",),
    ),
}


def fill(host: Host, folder: Path) -> None:
    host.run(["dd", "if=/dev/zero", f"of={folder / 'filler'}", "bs=1M"])


# --- one fault


CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
#include <stdlib.h>

static long shift(void) { /* seconds; with CLOCK_FILE only once that file is there */
    const char *file = getenv("CLOCK_FILE"), *seconds = getenv("CLOCK_SECONDS");
    return seconds && (!file || access(file, F_OK) == 0) ? atol(seconds) : 0;
}
int clock_gettime(clockid_t which, struct timespec *at) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(which, at);
    if (which == CLOCK_REALTIME || which == CLOCK_REALTIME_COARSE) at->tv_sec += shift();
    return code;
}
int gettimeofday(struct timeval *restrict at, void *restrict zone) {
    struct timespec now;
    int code = clock_gettime(CLOCK_REALTIME, &now);
    at->tv_sec = now.tv_sec; at->tv_usec = now.tv_nsec / 1000;
    return code;
}
time_t time(time_t *to) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (to) *to = now.tv_sec;
    return now.tv_sec;
}
"""
"""What shifts a process's clock: there is no namespace for the time of day."""


def build_clock(folder: Path) -> Path:
    """Compile the shifted clock, for LD_PRELOAD."""
    (folder / "clock.c").write_text(CLOCK)
    words = ["cc", "-shared", "-fPIC", "-O2", "-o", str(folder / "clock.so"), str(folder / "clock.c"), "-ldl"]
    subprocess.run(words, check=True)
    return folder / "clock.so"


@dataclass
class Outcome:
    """What a run did with a fault.

    Args:
        went_on: It reached its last step without being started again.
        seconds: From the fault to the end of the last program that was not on the dead host, or to the run's last step.
        said: The line with which it ended.
        broken: Promises that do not hold.
    """

    kind: str
    what: str
    fault: str
    options: str
    went_on: bool
    seconds: float
    said: str
    broken: list[str]


def undisturbed(kind: Any) -> str:
    """Return the digest of a run without a fault, which is measured once."""
    run = kind.folder / f"without-{kind.name}"
    if not run.exists():
        with Laboratory(kind.hosts, disk=kind.disk) as lab:
            first, *_ = programs = kind.start(lab, run, {})
            if first.wait():
                raise RuntimeError("\n".join(one.said for one in programs))
    return digest(run)


def measure(kind: Any, name: str) -> Outcome:
    """Have a run meet a fault, let it go on or go on with it, and compare it with one that met none."""
    fault = FAULTS[name]
    expected = undisturbed(kind)
    run = kind.folder / "runs" / f"{kind.name}-{name.replace(' ', '-')}"
    run.parent.mkdir(exist_ok=True)
    kind.more, kind.room = fault.more.get(kind.name, ()), fault.room
    goes_on, broken = fault.goes_on[kind.name], list[str]()
    with Laboratory(kind.hosts, disk=kind.disk) as lab:
        fault.prepare(lab, kind.folder)
        programs = kind.start(lab, run, fault.env)
        first = programs[0]
        first.wait_for(lambda: seen_steps(lab, run) >= 2, "second step")
        struck = time.monotonic()
        fault.strike(lab, kind, programs)
        alive = [one for one in programs if one.host.pid]
        if fault.seconds:
            with contextlib.suppress(subprocess.TimeoutExpired):
                first.process.wait(fault.seconds)
            fault.heal(lab, kind, programs)
        # a server that samples stays; learners end
        ending = alive if kind.name == "ranks" else [first]
        codes = []
        for one in ending:
            try:
                codes.append(one.wait(PATIENCE if goes_on else max(1.0, fault.ends_in - (time.monotonic() - struck))))
            except RuntimeError as error:
                codes.append(-1)
                broken.append(str(error).partition(" and said")[0].partition("; it said")[0])
        seconds = time.monotonic() - struck
        said = "".join(one.said for one in ending)
        if fault.own_disk:
            lab.hosts[0].run(["rm", "-f", str(run.parent / "filler")])
            lab.hosts[0].run(["cp", "-r", str(run), str(kind.folder / "saved")], check=True)
    if fault.own_disk:
        shutil.move(kind.folder / "saved", run)
    went_on = codes[0] == 0
    words = fault.names or kind.other
    # the learner's own words, unless it is the one that is gone: the others notice it too, in any order
    lines = [last_words(one.said, words) for one in ending]
    line = "" if went_on else next(filter(None, lines), "").replace(f"{kind.folder}/", "")
    if went_on is not goes_on:
        broken.append(f"it {'went on' if went_on else 'ended'} (exit codes {codes})")
    (kind.folder / "slow").unlink(missing_ok=True)
    if not went_on:
        if not re.search(words, said):
            broken.append(f"no message names {words}")
        kind.more = ()
        with Laboratory(kind.hosts, disk=kind.disk) as lab:
            again, *_ = programs = kind.start(lab, run, {})
            if again.wait():
                broken.append(f"it cannot be resumed: {again.said[-300:]}")
    try:
        if (seen := digest(run)) != expected:
            broken.append(f"completions or weights are others than those of a run without a fault ({seen}, {expected})")
    except OSError as error:
        broken.append(f"completions or weights cannot be read ({error})")
    options = " ".join(fault.more.get(kind.name, ()))
    return Outcome(kind.name, kind.what, fault.what, options, went_on, round(seconds, 1), line, broken)


def seen_steps(lab: Laboratory, run: Path) -> int:
    """Count a run's updates as host0 sees its folder, which may be on a disk of its own."""
    return count_steps(Path(f"/proc/{lab.hosts[0].pid}/root{run}")) if lab.hosts[0].pid else 0


def last_words(said: str, words: str) -> str:
    """Return the last line that matches, but for those of torchrun's own summary."""
    lines = [
        line.strip() for line in said.splitlines() if re.search(words, line) and not line.strip().startswith("host ")
    ]
    return lines[-1][:400] if lines else ""


KINDS: Mapping[str, type[Any]] = {one.name: one for one in (Ranks, Engine, Ray, RayFromHead)}


def measure_faults(kind: str, names: Sequence[str], folder: Path) -> Iterator[Outcome]:
    """Measure these faults of a kind of run, one after another."""
    made = KINDS[kind](folder, prepare(folder))
    clock = {"LD_PRELOAD": str(build_clock(folder)), "CLOCK_SECONDS": "600"}
    jump = clock | {"CLOCK_SECONDS": "-600", "CLOCK_FILE": str(folder / "jumped")}
    FAULTS["clock"] = replace(FAULTS["clock"], env={1: clock})
    FAULTS["clock jumps"] = replace(
        FAULTS["clock jumps"], env={0: jump}, strike=lambda lab, kind, programs: (folder / "jumped").touch()
    )
    for name in names:
        if kind in FAULTS[name].only:
            (folder / "jumped").unlink(missing_ok=True)
            yield measure(made, name)


# --- what listens where


@dataclass(frozen=True)
class Listener:
    """A program that listens.

    Args:
        program: What a reader calls it.
        argv: Its command; "{address}" and "{folder}" are filled in.
        ready: What it says when it listens.
        named: It was told to listen at the host's address.
        torchrun: It is started by torchrun on two hosts; what the second one listens at is a row of its own.
        allowed: What a stranger may be answered beside "refused", by the first word of what is said.
    """

    program: str
    argv: tuple[str, ...]
    ready: str
    named: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    requests: tuple[str, ...] = ("GET / HTTP/1.0",)
    allowed: tuple[str, ...] = ("401", "403")


KEYS = "tml-a-key-of-this-laboratory"
CHAT = "POST /v1/chat/completions HTTP/1.0"
LISTENERS = (
    Listener("serve", (*POLICYGRAD, "serve", "--folder", "{folder}/serve"), "serving "),
    Listener(
        "serve --host",
        (
            *POLICYGRAD,
            "serve",
            "--folder",
            "{folder}/serve-named",
            "--host",
            "{address}",
            "--api-keys",
            "{folder}/keys",
        ),
        "serving ",
        named=True,
        requests=(
            "GET / HTTP/1.0",
            "POST /api/v1/create_session HTTP/1.0",
            "GET /api/v1/get_server_capabilities HTTP/1.0",
        ),
    ),
    Listener("proxy", (*POLICYGRAD, "proxy"), "serving "),
    Listener(
        "proxy --host",
        (*POLICYGRAD, "proxy", "--host", "{address}"),
        "serving ",
        named=True,
        requests=(CHAT, "POST /v1/messages HTTP/1.0", "GET /v1/models HTTP/1.0"),
        allowed=("401", "200 models"),  # the name of the model
    ),
    Listener("report --watch", (*POLICYGRAD, "report", "{folder}/run", "--watch"), "http://"),
    Listener(
        "report --watch --host",
        (*POLICYGRAD, "report", "{folder}/run", "--watch", "--host", "{address}"),
        "http://",
        named=True,
    ),
    Listener("chat --page", (*POLICYGRAD, "chat", "tiny", "--page"), "http://"),
    Listener(
        "chat --page --host", (*POLICYGRAD, "chat", "tiny", "--page", "--host", "{address}"), "http://", named=True
    ),
    Listener("engine llama_cpp", (*POLICYGRAD, "engine", "llama_cpp", "--folder", "{folder}/weights"), " serves "),
    Listener(
        "engine llama_cpp --host",
        (*POLICYGRAD, "engine", "llama_cpp", "--folder", "{folder}/weights", "--host", "{address}"),
        " serves ",
        named=True,
        env=SAMPLER_KEY,
        requests=("POST /completion HTTP/1.0", "GET /slots HTTP/1.0", "POST /props HTTP/1.0", "GET /health HTTP/1.0"),
        allowed=("401", "403", "200 health"),
    ),
    Listener(
        "train, with two processes, an engine of its own and --metrics-port",
        ("{train}", "--learner.world-size", "2", "--sampler.engine", "llama_cpp", "--metrics-port", "9100"),
        "/1000  reward ",
    ),
    Listener(
        "train --metrics-port ADDRESS:9100",
        ("{train}", "--metrics-port", "{address}:9100"),
        "/1000  reward ",
        named=True,
        requests=("GET /metrics HTTP/1.0", "POST /metrics HTTP/1.0"),
        allowed=("200 metrics", "404", "405", "501"),
    ),
)
TORCHRUN = "train, started by torchrun on two machines"
STORE, STORE_PORT = "torchrun's own store (--master-port)", 29500
STRANGER = """
import json, os, signal, socket, sys, threading, time
from datetime import timedelta
from torch._C._distributed_c10d import TCPStore

def writes(address, port):
    '''Whether it is a store that lets a stranger write; in a process of its own, since one that is none may never answer.'''
    child = os.fork()
    if not child:
        try:
            store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=3), wait_for_workers=False)
            for key in ("exit 0", "exit 1", "heartbeat 1", "out of memory", "rank 1 is ready"):
                store.set(key, "written by a stranger")
            os._exit(0)
        except BaseException:
            os._exit(1)
    for _ in range(50):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status == 0
        time.sleep(0.1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False

def try_port(address, port, requests):
    said = answers.setdefault(f"{address}:{port}", [])
    for request in requests:
        try:
            with socket.create_connection((address, port), 5) as connection:
                host = f"{address}:{port}"
                connection.sendall(f"{request}\\r\\nHost: {host}\\r\\nContent-Length: 2\\r\\n\\r\\n{{}}".encode())
                connection.settimeout(3)
                first = connection.recv(4096).decode(errors="replace").split("\\r\\n")[0]
                status = first.split(" ")[1] if first.startswith("HTTP/") else ""
                path = request.split(" ")[1].strip("/").split("/")[-1]
                said.append(f"{status} {path or '/'}" if status == "200" else status or "closed")
        except ConnectionRefusedError:
            said.append("refused")
        except TimeoutError:
            said.append("silent")
        except OSError as error:
            said.append("closed")
    if said[-1] not in ("refused",) and not any(x[:1].isdigit() for x in said):
        if writes(address, port):
            said.append("store")

answers = {}
print("ready", flush=True)
threads = [threading.Thread(target=try_port, args=one) for one in json.loads(sys.stdin.readline())]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(json.dumps(answers))
"""


@dataclass
class Socket:
    """A socket that listens, and what a third host without a key was answered."""

    program: str
    command: str
    listens: str
    answers: str
    broken: list[str]


def sockets(host: Host) -> list[tuple[str, int]]:
    """Return the addresses and ports at which a host listens, as ss lists them; of a port also outside loopback, only there."""
    said = host.run(["ss", "-Hltn"], check=True).stdout
    places = [line.split()[3].rpartition(":") for line in said.splitlines()]
    found = {(at.strip("[]").partition("%")[0], int(port)) for at, _, port in places}
    outside = {port for at, port in found if not is_loopback(at)}
    return sorted((at, port) for at, port in found if not is_loopback(at) or port not in outside)


def is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


class Stranger:
    """A host without a key that tries every port at which another one listens."""

    def __init__(self, host: Host) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self._process = host.start([PYTHON, "-c", STRANGER], **pipes)
        assert self._process.stdout is not None
        self._process.stdout.readline()  # it takes longest to import torch

    def ask(self, *asked: tuple[Host, Sequence[str]]) -> list[tuple[Host, str, int, list[str]]]:
        """Return what it was answered, once: (host, address, port, answers) for each socket of each host."""
        there = {host.address: sockets(host) for host, _ in asked}
        tries = [
            (host.address, port, list(words)) for host, words in asked for port in {p for _, p in there[host.address]}
        ]
        answers = json.loads(self._process.communicate(json.dumps(tries) + "\n", PATIENCE)[0])
        return [
            (host, at, port, answers[f"{host.address}:{port}"]) for host, _ in asked for at, port in there[host.address]
        ]


def judge(listener: Listener, host: Host, at: str, answers: Sequence[str]) -> Socket:
    """Say what a socket is, and whether it may be like that."""
    local = is_loopback(at)
    where = name_address(host, at)
    broken = []
    if not local and not (listener.named and at == host.address):
        broken.append(f"it listens at {at}")
    if local and set(answers) != {"refused"}:
        broken.append(f"another host is answered {answers}")
    broken += [f"a stranger is answered {one}" for one in answers if not local and not one.startswith(listener.allowed)]
    command = shlex.join(word for word in listener.argv if word not in POLICYGRAD[:2])
    return Socket(listener.program, command, where, ", ".join(dict.fromkeys(answers)), broken)


def measure_listening(folder: Path, names: Sequence[str] | None = None) -> list[Socket]:
    """Start every program that listens on a host of its own, and have another host try its ports."""
    words = [*POLICYGRAD, *prepare(folder), *always(folder)]
    listeners = [one for one in LISTENERS if names is None or one.program in names]
    (folder / "keys").write_text(KEYS + "\n")
    (folder / "keys").chmod(0o600)
    made = [*words, "--output", str(folder / "run"), "--steps", "1"]
    subprocess.run(made, env=os.environ | PATHS, cwd=folder, stdout=subprocess.DEVNULL, check=True)
    publish(folder)
    rows = list[Socket]()
    if names is None or TORCHRUN in names:
        rows += measure_torchrun(folder, words)
    for name, token in ((RAY_OPEN, {}), (RAY_CLOSED, RAY_TOKEN)):
        if (RAY / "ray").exists() and (names is None or name in names):
            rows += measure_ray(token)
    for listener in listeners:
        with Laboratory(2) as lab:
            host, stranger = lab.hosts
            argv = [x.format(address=host.address, folder=folder, train="") for x in listener.argv if x != "{train}"]
            if "{train}" in listener.argv:
                argv = [*words, "--steps", "1000", "--output", str(folder / f"run-{len(rows)}"), *argv]
            program = start(host, argv, folder, listener.env)
            program.wait_for(partial(listens, listener, program), listener.ready)
            for _, at, _, answers in Stranger(stranger).ask((host, listener.requests)):
                rows.append(judge(listener, host, at, answers))
    return merge(rows)


def measure_torchrun(folder: Path, words: Sequence[str]) -> list[Socket]:
    """Have a third host try every port of two that train together, and write into every store; the run goes on as it would."""
    listener = Listener(TORCHRUN, tuple(torchrun_words(2, 0)), "", named=True, allowed=("closed", "silent", "store"))
    kind = Ranks(folder, words[3 : -len(always(folder))], ["--steps", "20"])
    expected, run = undisturbed(kind), folder / "tried"
    with Laboratory(3) as lab:
        programs, stranger = kind.start(lab, run, {}), Stranger(lab.hosts[2])
        programs[0].wait_for(lambda: count_steps(run) >= 2, "second step")
        rows = []
        for host, at, port, answers in stranger.ask(*((host, listener.requests) for host in lab.hosts[:2])):
            row = judge(listener, host, at, answers)
            if at in ("*", "0.0.0.0", "::") and port == STORE_PORT:
                row = replace(row, program=STORE, broken=[])  # torch's own, which binds to every address
            rows.append(row)
        codes = [one.wait() for one in programs]
    seen = "" if any(codes) else digest(run)
    broken = [] if seen == expected else [f"the run is another one after that (exit codes {codes})"]
    return [replace(row, command="torchrun …", broken=[*row.broken, *broken]) for row in merge(rows)]


RAY_OPEN, RAY_CLOSED = "ray start, without a token", "ray start, with RAY_AUTH_MODE=token"
INTRUDER = """
import socket, ray
ray.init("ray://HOST:10001", logging_level="error")
print("executed on", ray.get(ray.remote(lambda: socket.gethostname()).remote()))
"""


def measure_ray(token: Mapping[str, str]) -> list[Socket]:
    """Have a third host, which has no token, try every port of a Ray cluster of two, and send it a function to execute."""
    program, command = (RAY_CLOSED if token else RAY_OPEN), "ray start --head; ray start --address HOST:6379"
    with tempfile.TemporaryDirectory(dir="/var/tmp") as made, Laboratory(3, disk="1g") as lab:
        folder = Path(made)  # not below /tmp, of which each host has its own
        for index in (0, 1):
            start_ray(lab, index, folder, dashboard=True, token=token)
        found = Stranger(lab.hosts[2]).ask(*((host, ("GET / HTTP/1.0",)) for host in lab.hosts[:2]))
        code = INTRUDER.replace("HOST", lab.hosts[0].address)
        intruder = start(
            lab.hosts[2], [str(RAY / "python"), "-c", code], folder, {"RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN": ""}
        )
        intruder.wait()
        entered = "executed on host" in intruder.said
    rows = []
    for where in ("every address", "the named address", "loopback"):
        answers = sorted({answer for host, at, _, said in found for answer in said if name_address(host, at) == where})
        wrong = where == "loopback" and answers != ["refused"]
        rows.append(
            Socket(program, command, where, ", ".join(answers), [f"another host is answered {answers}"] * wrong)
        )
    wrong = bool(entered and token)
    answer = "it is executed" if entered else "refused"
    rows.append(Socket(program, command, "ray://, to which a function is sent", answer, ["it is executed"] * wrong))
    return rows


def name_address(host: Host, address: str) -> str:
    return "loopback" if is_loopback(address) else "the named address" if address == host.address else "every address"


def merge(rows: Sequence[Socket]) -> list[Socket]:
    """Return sockets that are alike once."""
    alike: dict[tuple[str, str, str, str], Socket] = {}
    for row in rows:
        alike.setdefault((row.program, row.listens, row.answers, str(row.broken)), row)
    return list(alike.values())


def listens(listener: Listener, program: Program) -> bool:
    return listener.ready in program.said and bool(sockets(program.host))


def publish(folder: Path) -> None:
    """Write a model for llama.cpp as a run publishes one."""
    from policygrad.models.loading import load_model
    from policygrad.models.tokenizer import load_tokenizer
    from policygrad.weight_sync.base import PublishedWeights
    from policygrad.weight_sync.folder import VersionFolder
    from policygrad.weight_sync.gguf import make_gguf_writer

    model = load_model(str(folder / "policy"), dtype="fp32")
    writer = make_gguf_writer(model, load_tokenizer(str(folder / "policy"), model).end_ids)
    VersionFolder(folder / "weights", writer).publish(PublishedWeights(0, dict(model.state_dict())))


# --- the command


def write(part: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Replace rows of the results: those of the same kind and fault. One process at a time."""
    with Path(__file__).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _write(part, rows)


def _write(part: str, rows: Sequence[Mapping[str, Any]]) -> None:
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results |= {
        "made_by": "python scripts/measure_hosts.py",
        "versions": {"python": platform.python_version(), "torch": version("torch")},
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
    }
    keys = ("kind", "fault") if part == "faults" else ("program", "listens")
    old = [row for row in results.get(part, []) if all(any(row[k] != new[k] for k in keys) for new in rows)]
    results[part] = [*old, *rows]
    if part == "faults":
        kinds, order = list(KINDS), [fault.what for fault in FAULTS.values()]
        results[part].sort(key=lambda row: (kinds.index(row["kind"]), order.index(row["fault"])))
    RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description="Faults between hosts, and what listens where.")
    known = ["listening", *KINDS]
    parser.add_argument("--only", nargs="*", default=known, choices=known)
    parser.add_argument("--faults", nargs="*", default=list(FAULTS), choices=list(FAULTS))
    parser.add_argument("--folder", type=Path, help="keep files here; default: a temporary folder")
    parser.add_argument(
        "--jobs", type=int, default=1, help="how many of --only are measured at a time, each by a process"
    )
    options = parser.parse_args()
    if options.jobs > 1:
        more = ["--faults", *options.faults, *(["--folder", str(options.folder)] if options.folder else [])]
        argv = [[PYTHON, __file__, "--only", part, *more] for part in options.only]
        with ThreadPoolExecutor(options.jobs) as pool:
            return max(pool.map(subprocess.call, argv))
    if reason := why_not():
        print(f"error: {reason}", file=sys.stderr)
        return 2
    wrong = 0
    with contextlib.ExitStack() as stack:
        # not below /tmp, of which hosts with Ray or a full disk have their own
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/var/tmp")))
        if "listening" in options.only:
            (folder / "listening").mkdir(parents=True, exist_ok=True)
            rows = [asdict(row) for row in measure_listening(folder / "listening")]
            for row in rows:
                print(json.dumps(row, ensure_ascii=False), flush=True)
            write("listening", rows)
            wrong += sum(bool(row["broken"]) for row in rows)
        for kind in [name for name in KINDS if name in options.only]:
            if issubclass(KINDS[kind], Ray) and not (RAY / "ray").exists():
                print(f"{kind}: left out: no Ray; make .environments/ray/.installed", file=sys.stderr)
                continue
            (folder / kind).mkdir(parents=True, exist_ok=True)
            for outcome in measure_faults(kind, options.faults, folder / kind):
                print(json.dumps(asdict(outcome), ensure_ascii=False), flush=True)
                write("faults", [asdict(outcome)])
                wrong += bool(outcome.broken)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
