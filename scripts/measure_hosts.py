"""Faults between hosts, and what listens where: namespaces of this machine (scripts/hosts.py); docs/results/hosts.json.

    sudo python scripts/measure_hosts.py [--only listening|ranks|engine …] [--faults NAME …] [--folder DIR]

Two hosts train together. `ranks`: torchrun with a process on each. `engine`: the learner on host0, a server that samples (a stand-in
for vLLM) on host1. At its third step the run has a fault. It must go on, or end within the stated time with a message that names the
other host, and go on where `--resume` is called. Either way it has the completions and the weights of a run without a fault, to the
bit: nothing was lost, and nothing sampled or trained with other weights. `listening`: every program that listens, with its sockets
as `ss` lists them, each tried from a third host that has no key.

What is measured replaces its part of the file; the rest stays. Exit code 1: a promise does not hold; the results name it.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hosts import Host, Laboratory, Link, why_not

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results" / "hosts.json"
PYTHON = sys.executable
BIN = Path(PYTHON).parent
PATIENCE = 300.0
"""Seconds that anything may take here: a machine with two cores starts four interpreters that import torch."""
KEY = {"POLICYGRAD_KEY": "a key of this laboratory alone"}
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
            raise RuntimeError(f"{self.name} has not ended after {seconds:g} s; it said:\n{self.said[-3000:]}") from None

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
import time

def letters(prompts, completions, **columns):
    '''Another for every other text, so that each step moves the weights; slow, so that a fault strikes between two.'''
    time.sleep(0.3)
    return [sum(map(ord, c)) % 7 / 7 for c in completions]
"""
STEPS = 8


def prepare(folder: Path) -> list[str]:
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
        max_position_embeddings=256,
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
    words += f" --steps {STEPS} --prompts-per-step 2 --samples-per-prompt 4 --max-tokens 8 --lr 3e-3 --rewards.num-workers 1"
    return ["train", "grpo", *words.split(), *"--evaluation.problems 0 --checkpoint.every 1 --checkpoint.keep 3".split()]


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

    def __init__(self, folder: Path, begin: Sequence[str], more: Sequence[str] = ()) -> None:
        self.folder, self.begin, self.more = folder, begin, more

    def start(self, lab: Laboratory, run: Path, env: Mapping[int, Mapping[str, str]]) -> list[Program]:
        """Start the server, and begin the run or go on with it; return the programs, the learner first."""
        serving = self.serve(lab, env.get(1, {}))
        more = ["--sampler.engine", "vllm", "--sampler.urls", "http://host1:8000"]
        more += ["--sampler.folder", f"{run}-weights", "--sampler.timeout", "20", "--sampler.heartbeat", "5", *self.more]
        words = ["train", "--resume", str(run)] if run.exists() else [*self.begin, *more, "--output", str(run)]
        allow = [*always(self.folder), "--allow-code", "http://host1:8000"]
        return [start(lab.hosts[0], [*POLICYGRAD, *words, *allow], self.folder, env.get(0)), serving]

    def serve(self, lab: Laboratory, env: Mapping[str, str]) -> Program:
        words = [PYTHON, str(ROOT / "scripts" / "stand_in_servers.py"), "vllm", "--port", "8000", "--host", "0.0.0.0"]
        server = start(lab.hosts[1], words, self.folder, env)
        server.wait_for(lambda: "http://" in server.said, "address")
        return server


# --- faults


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong at the third step.

    Args:
        strike: Called then, with the laboratory, the kind of run and its programs.
        heal: Called `seconds` later.
        goes_on: Whether the run must go on.
        ends_in: Seconds in which it must end if it does not go on.
        names: A word of the message with which it then ends; empty = the other host's name.
        more: Options of the run, by its kind.
        env: Variables of a host from the start.
        prepare: Called on the laboratory before the programs start.
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
    prepare: Callable[[Laboratory, Path], None] = lambda lab, folder: None
    only: tuple[str, ...] = ("ranks", "engine")


SHORT = {"ranks": ("--learner.hang-timeout", "20"), "engine": ("--sampler.recovery-timeout", "20")}
"""Both are options with larger defaults (45 and 120 seconds), which take longer to measure."""
BOTH = {"ranks": True, "engine": True}
NEITHER = {"ranks": False, "engine": False}
NAMES = {f"host{i}": f"10.77.0.{i + 1}" for i in range(3)}
MOVED = "10.77.0.50"


def cut(lab: Laboratory, kind: Any, programs: list[Program]) -> None:
    lab.cut([0], [1])


def slow(link: Link) -> Callable[[Laboratory, Any, list[Program]], None]:
    return lambda lab, kind, programs: lab.set_link(link)


def move(lab: Laboratory, kind: Any, programs: list[Program]) -> None:
    """Give host1 another address, which its name has from now on."""
    lab.hosts[1].connect(MOVED)
    lab.name_hosts(NAMES | {"host1": MOVED})


def small_disk(lab: Laboratory, folder: Path) -> None:
    """Mount a disk of its own, on host0 alone, where the run's folder will be."""
    (folder / "runs").mkdir(exist_ok=True)
    lab.hosts[0].run(["mount", "-t", "tmpfs", "-o", "size=24m", "none", str(folder / "runs")], check=True)


FAULTS = {
    "host dies": Fault(
        "the other host loses its power", lambda lab, kind, programs: lab.power_off(1), goes_on=NEITHER, more=SHORT
    ),
    "first host dies": Fault(
        "rank 0's host loses its power", lambda lab, kind, programs: lab.power_off(0), goes_on=NEITHER, names="rank 0", more=SHORT, only=("ranks",)
    ),
    "cut 5 s": Fault("the two are cut off from each other for 5 s", cut, seconds=5, goes_on=BOTH),
    "cut 60 s": Fault("for 60 s", cut, seconds=60, goes_on={"ranks": False, "engine": True}),
    "cut": Fault("for ever", cut, goes_on=NEITHER, more=SHORT),
    "cut one way": Fault(
        "for ever, one way: nothing of the other arrives",
        lambda lab, kind, programs: lab.cut([1], [0], one_way=True),
        goes_on=NEITHER,
        more=SHORT,
    ),
    "cut other way": Fault(
        "for ever, the other way: nothing arrives there",
        lambda lab, kind, programs: lab.cut([0], [1], one_way=True),
        goes_on=NEITHER,
        more=SHORT,
    ),
    "delay": Fault("200 ms of delay each way", slow(Link(delay=0.2)), goes_on=BOTH),
    "loss": Fault("5 % of the packets are lost", slow(Link(loss=0.05)), goes_on=BOTH),
    "rate": Fault("1 Mbit/s, also while weights are sent", slow(Link(rate=1e6)), goes_on=BOTH),
    "clock": Fault("the other host's clock is ten minutes ahead", goes_on=BOTH),
    "clock jumps": Fault("rank 0's or the learner's clock jumps ten minutes back", goes_on=BOTH),
    "dns": Fault("names are resolved no more, for 10 s", lambda lab, kind, programs: lab.name_hosts({}), lambda lab, kind, programs: lab.name_hosts(NAMES), seconds=10, goes_on=BOTH),
    "dns for ever": Fault(
        "names are resolved no more", lambda lab, kind, programs: lab.name_hosts({}), goes_on={"ranks": True, "engine": False}, more=SHORT
    ),
    "address": Fault("the other host has another address", move, goes_on={"ranks": False, "engine": True}, more=SHORT),
    "disk": Fault(
        "the disk of the run's folder is full",
        lambda lab, kind, programs: fill(lab, kind.folder),
        goes_on=NEITHER,
        names="No space left",
        prepare=small_disk,
        only=("engine",),
    ),
}


def fill(lab: Laboratory, folder: Path) -> None:
    lab.hosts[0].run(["dd", "if=/dev/zero", f"of={folder / 'runs' / 'filler'}", "bs=1M"])


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
        with Laboratory(2) as lab:
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
    kind.more = fault.more.get(kind.name, ())
    goes_on, broken = fault.goes_on[kind.name], list[str]()
    with Laboratory(2) as lab:
        fault.prepare(lab, kind.folder)
        inside = run if not goes_on and fault.only == ("engine",) else run
        programs = kind.start(lab, run, fault.env)
        first = programs[0]
        first.wait_for(lambda: seen_steps(lab, inside) >= 2, "second step")
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
        if fault.only == ("engine",):  # its disk ends with the host
            lab.hosts[0].run(["rm", "-f", str(run.parent / "filler")])
            lab.hosts[0].run(["cp", "-r", str(run), str(kind.folder / "saved")], check=True)
    if fault.only == ("engine",):
        shutil.move(kind.folder / "saved", run)
    went_on = codes[0] == 0
    words = fault.names or kind.other
    line = last_words(said, words)
    if went_on is not goes_on:
        broken.append(f"it {'went on' if went_on else 'ended'} (exit codes {codes})")
    if not went_on:
        if words not in said:
            broken.append(f"no message names {words}")
        kind.more = ()
        with Laboratory(2) as lab:
            again, *_ = programs = kind.start(lab, run, {})
            if again.wait():
                broken.append(f"it cannot be resumed: {again.said[-300:]}")
    with contextlib.suppress(OSError):
        if (seen := digest(run)) != expected:
            broken.append(f"completions or weights are others than those of a run without a fault ({seen}, {expected})")
    options = " ".join(fault.more.get(kind.name, ()))
    return Outcome(kind.name, kind.what, fault.what, options, went_on, round(seconds, 1), line, broken)


def seen_steps(lab: Laboratory, run: Path) -> int:
    """Count a run's updates as host0 sees its folder, which may be on a disk of its own."""
    return count_steps(Path(f"/proc/{lab.hosts[0].pid}/root{run}")) if lab.hosts[0].pid else 0


def last_words(said: str, word: str) -> str:
    """Return the last line with this word, without what differs between two runs."""
    lines = [line.strip() for line in said.splitlines() if word in line]
    return lines[-1][:400] if lines else ""


KINDS: Mapping[str, type[Any]] = {"ranks": Ranks, "engine": Engine}


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


# --- the command


def write(part: str, rows: Sequence[Mapping[str, Any]], words: Sequence[str]) -> None:
    """Replace rows of the results: those of the same kind and fault."""
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results |= {
        "made_by": "python scripts/measure_hosts.py",
        "versions": {"python": platform.python_version(), "torch": version("torch")},
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
    }
    keys = ("kind", "fault") if part == "faults" else ("program", "listens")
    old = [row for row in results.get(part, []) if all(any(row[k] != new[k] for k in keys) for new in rows)]
    results[part] = [*old, *rows]
    RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description="Faults between hosts, and what listens where.")
    parser.add_argument("--only", nargs="*", default=["listening", *KINDS], choices=["listening", *KINDS])
    parser.add_argument("--faults", nargs="*", default=list(FAULTS), choices=list(FAULTS))
    parser.add_argument("--folder", type=Path, help="keep files here; default: a temporary folder")
    options = parser.parse_args()
    if reason := why_not():
        print(f"error: {reason}", file=sys.stderr)
        return 2
    wrong = 0
    with contextlib.ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for kind in [name for name in KINDS if name in options.only]:
            (folder / kind).mkdir(parents=True, exist_ok=True)
            for outcome in measure_faults(kind, options.faults, folder / kind):
                print(json.dumps(asdict(outcome), ensure_ascii=False), flush=True)
                write("faults", [asdict(outcome)], sys.argv[1:])
                wrong += bool(outcome.broken)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
