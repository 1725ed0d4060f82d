"""Try every extra alone: without it its feature is refused with the command that installs it; with it the feature works.

    python scripts/check_extras.py [--only lora data …] [--folder DIR]

One virtual environment holds policygrad and nothing else, at the versions of constraints.txt. Each extra gets an empty environment
that also sees policygrad's through a .pth file, so that torch is installed once and nothing else is visible. An extra may bring
another version of one of policygrad's dependencies, as it would in a single environment. Extras that the tests run with (`dev`
lists them) take the versions of constraints.txt, the others only those in PINNED.

`dev` is left out: it is the other extras and this repository's tools, which `make test` tries. Needs a package index; all servers
run on this machine. What an earlier call left in the folder is replaced. Writes docs/results/extras.json, from which `make docs`
makes the table in docs/extras.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
import venv
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from policygrad.errors import install_command

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results" / "extras.json"
BASE = "policygrad"
"""The environment without any extra."""
PINNED = ("torch", "transformers", "tokenizers", "safetensors", "reasoning_gym")
"""Packages that keep their version where an extra chooses its own."""
TIMEOUT = 600
"""Seconds that a command may take."""
TAIL = 1500
"""Characters of a command's output that an error quotes."""


@dataclass(frozen=True)
class Case:
    """One feature of an extra, tried as a user would: a command that is refused without the extra and works with it."""

    extra: str
    feature: str
    """As the table names it."""
    argv: tuple[str, ...]
    """For an environment's Python, in an empty folder. `{url}` is the server's address, `{root}` this repository."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Contents of the folder, by path."""
    setup: str = ""
    """Python that makes more files and needs the extra too."""
    server: str = ""
    """The server of stand_in_servers.py that the command talks to; the environment under test runs it."""
    creates: tuple[str, ...] = ()
    """Patterns of files that must exist afterwards."""
    check: str = ""
    """Python that reads the result and fails if it is wrong."""
    refusal: str = ""
    """Text of the error without the extra; empty = the command that installs the extra."""
    exit_code: int = 2
    """Of that error."""


SUMS = "".join(
    json.dumps({"prompt": f"{a} + {b} =\n", "answer": str(a + b)}) + "\n" for a in range(8) for b in range(8)
)
TRAIN = (
    *("-m", "policygrad", "train", "grpo", "--steps", "2", "--prompts-per-step", "2", "--samples-per-prompt", "4"),
    *("--evaluation.problems", "0", "--plain", "--max-tokens", "12", "--output", "run"),
)
TASKSET = """
import verifiers.v1 as vf

__all__ = ["Words"]


class Data(vf.TaskData):
    answer: str


class Spell(vf.Task[Data, vf.State, vf.TaskConfig]):
    @vf.reward(weight=1.0)
    async def right(self, task, trace) -> float:
        return float(trace.last_reply == task.answer)


class Words(vf.Taskset[Spell, vf.TasksetConfig]):
    def load(self):
        for word in ("one", "two", "three", "four") * 10:
            yield Spell(Data(prompt=f"Say {word}", answer=word), self.config.task)
"""
TABLES = """
import datasets, pyarrow as pa, pyarrow.parquet
rows = [{"prompt": f"{a} + {b} =\\n", "answer": str(a + b)} for a in range(8) for b in range(8)]
pyarrow.parquet.write_table(pa.Table.from_pylist(rows), "rows.parquet")
datasets.Dataset.from_list(rows).save_to_disk("saved")
"""
BOARD = """
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
board = EventAccumulator("run/tensorboard")
board.Reload()
assert [e.step for e in board.Scalars("reward")] == [1, 2]
"""
MLFLOW = """
import json, mlflow
run_id = json.load(open("run/tracked.json"))["mlflow"]
assert [m.step for m in mlflow.MlflowClient().get_metric_history(run_id, "reward")] == [1, 2]
"""
TRACKIO = """
from trackio.sqlite_storage import SQLiteStorage
(name,) = SQLiteStorage.get_runs("policygrad")
assert [row["step"] for row in SQLiteStorage.get_logs("policygrad", name) if "reward" in row] == [1, 2]
"""
GRADED = """
from policygrad.rewards import resolve
scores = resolve("math").function(["?"] * 2, ["The answer is $\\\\frac{2}{4}$.", "The answer is $0.6$."], answer=["0.5", "0.5"])
assert scores == [1.0, 0.0], scores
"""


EXPORTED = """
import os, sys, threading
from http.server import BaseHTTPRequestHandler, HTTPServer
sizes = []

class Collector(BaseHTTPRequestHandler):
    def do_POST(self):
        sizes.append(len(self.rfile.read(int(self.headers["content-length"]))))
        self.send_response(200)
        self.end_headers()

server = HTTPServer(("127.0.0.1", 0), Collector)
threading.Thread(target=server.serve_forever, daemon=True).start()
os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://127.0.0.1:{server.server_port}"
from policygrad.cli import main
code = main(sys.argv[1:])
assert code or sum(sizes) > 1000, sizes
sys.exit(code)
"""


def _tracked(name: str, creates: tuple[str, ...], check: str = "") -> Case:
    return Case(name, f"`train --track {name}`", (*TRAIN, "--track", name), creates=creates, check=check)


SERVE = """
import re, subprocess, sys
command = [sys.executable, "-m", "policygrad", "serve", "--plain", "--port", "0"]
with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
    line = server.stdout.readline()
    if not line:
        print(server.stderr.read(), file=sys.stderr)
        sys.exit(server.wait())
    import tinker
    client = tinker.ServiceClient(base_url=re.search("http://[^ ]+", line).group().strip(), api_key="tml-local")
    training = client.create_lora_training_client("tiny", rank=2).result()
    datum = tinker.Datum(
        model_input=tinker.ModelInput.from_ints([5, 6]), loss_fn_inputs={"target_tokens": [6, 7], "weights": [1.0, 1.0]}
    )
    print(training.forward_backward([datum], "cross_entropy").result().metrics)
    server.terminate()
"""

MCP_SERVER = """
from mcp.server import MCPServer

server = MCPServer("arithmetic")


@server.tool()
def double(number: int) -> int:
    return 2 * number


server.run()
"""
MCP_TOOLS = """
import sys

import policygrad as pg

TOOLS = pg.ToolUse((pg.McpTools([sys.executable, "server.py"]),), lambda answer, example: float(len(answer)))
"""

AGENT = """
import json, os, urllib.request


def main(example):
    body = json.dumps({"prompt": example["prompt"], "max_tokens": 8}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/completions", body, headers)
    return float(len(json.load(urllib.request.urlopen(request))["choices"][0]["text"]) % 2)
"""

TRL_SCRIPT = """
from trl import GRPOConfig, GRPOTrainer

args = GRPOConfig("run", num_generations=2, per_device_train_batch_size=2, max_completion_length=4, max_steps=1, report_to="none")
from datasets import Dataset

rows = Dataset.from_dict({"prompt": ["1+1=", "1+2="]})
GRPOTrainer("tiny", lambda completions, **_: [float(len(text)) for text in completions], args, rows).train()
"""

CASES = (
    Case(
        "math",
        "`train --reward math`, which grades a fraction",
        (*TRAIN, "--task", "sums.jsonl", "--reward", "math"),
        files={"sums.jsonl": SUMS},
        check=GRADED,
    ),
    Case(
        "lora",
        "`train --learner.lora`",
        (*TRAIN, "--learner.lora", "rank=4"),
        creates=("run/model/adapter_model.safetensors",),
    ),
    Case(
        "qlora",
        "`train --learner.lora rank=4,bits=4`, on the CPU",
        (*TRAIN, "--learner.lora", "rank=4,bits=4"),
        creates=("run/model/adapter_model.safetensors",),
    ),
    Case(
        "control",
        "`lab control`",
        ("-m", "policygrad", "lab", "control", "--steps", "2000", "--episodes", "2", "--output", "result.json"),
        creates=("result.json",),
    ),
    Case("control", "`train --environment gymnasium:…`", (*TRAIN, "--environment", "gymnasium:FrozenLake-v1")),
    Case(
        "trl",
        "`python -m policygrad.trl script.py`",
        ("-m", "policygrad.trl", "script.py"),
        files={"script.py": TRL_SCRIPT},
        creates=("run/checkpoint-1/model.safetensors",),
    ),
    Case(
        "mcp",
        "`train --environment tools.py:TOOLS`, the tools of an MCP server",
        (*TRAIN, "--environment", "tools.py:TOOLS"),
        files={"server.py": MCP_SERVER, "tools.py": MCP_TOOLS},
    ),
    Case(
        "proxy",
        "`train --environment agent:…`",
        (*TRAIN, "--environment", "agent:agent.py:main"),
        files={"agent.py": AGENT},
    ),
    Case(
        "openenv",
        "`train --environment openenv:…`, with a stand-in server",
        (*TRAIN, "--environment", "openenv:{url}"),
        server="openenv",
    ),
    Case("textarena", "`train --environment textarena:…`", (*TRAIN, "--environment", "textarena:GuessTheNumber-v0")),
    Case(
        "verifiers",
        "`train --task verifiers:… --environment verifiers:…`",
        (*TRAIN, "--task", "verifiers:words", "--environment", "verifiers:words"),
        files={"words.py": TASKSET},
    ),
    Case(
        "data",
        "`train --task` of a Parquet file",
        (*TRAIN, "--task", "rows.parquet", "--reward", "exact_match"),
        setup=TABLES,
    ),
    Case(
        "data",
        "`train --task` of a folder of `datasets`",
        (*TRAIN, "--task", "saved", "--reward", "exact_match"),
        files={"saved/dataset_info.json": "{}"},
        setup=TABLES,
    ),
    Case(
        "benchmarks",
        "`eval --benchmark ifeval` of a local file",
        ("-m", "policygrad", "eval", "tiny", "--benchmark", "ifeval", "--benchmark-data", "data", "--max-tokens", "8"),
        files={
            "data/ifeval.jsonl": json.dumps(
                {
                    "prompt": "Say hi.",
                    "instruction_id_list": ["language:response_language"],
                    "kwargs": [{"language": "en"}],
                }
            )
            + "\n"
        },
    ),
    Case(
        "serve",
        "`serve`, its SDK's first calls",
        ("serve_once.py",),
        files={"serve_once.py": SERVE},
    ),
    Case(
        "engines",
        "`train --sampler.engine vllm`, with a stand-in server",
        (*TRAIN, "--sampler.engine", "vllm", "--sampler.urls", "{url}", "--sampler.max-concurrency", "4"),
        server="vllm",
    ),
    Case(
        "judge",
        "`train --reward judge:…`, with a stand-in server",
        (*TRAIN, "--task", "sums.jsonl", "--reward", "judge:good.md,model=m,url={url}/v1,scale=0..1,cache=judged"),
        files={"sums.jsonl": SUMS, "good.md": "Good is what is right.\n"},
        server="judge",
        creates=("judged/scores.sqlite",),
    ),
    Case(
        "llama-cpp",
        "`train --sampler.engine llama_cpp`, its own server",
        (*TRAIN, "--sampler.engine", "llama_cpp"),
        creates=("run/model/config.json",),
    ),
    Case(
        "llama-cpp",
        "`export --format gguf`",
        ("-m", "policygrad", "export", "tiny", "--format", "gguf", "--output", "model.gguf"),
        creates=("model.gguf",),
    ),
    _tracked("wandb", ("run/wandb/offline-run-*/*.wandb",)),
    _tracked("tensorboard", ("run/tensorboard/events*",), BOARD),
    _tracked("trackio", (), TRACKIO),
    _tracked("mlflow", ("run/tracked.json",), MLFLOW),
    Case(
        "trace",
        "`train --track otel`, with a stand-in collector",
        ("export.py", *TRAIN[2:], "--track", "otel"),
        files={"export.py": EXPORTED},
    ),
    Case(
        "prometheus",
        "`train --metrics-port`",
        (*TRAIN, "--metrics-port", "0"),
        creates=("run/model/config.json",),
    ),
    Case(
        "ray",
        "`train --cluster local`",
        (*TRAIN, "--cluster", "local"),
        creates=("run/model/model.safetensors",),
    ),
    Case(
        "docs",
        "`make site`",
        ("{root}/scripts/make_site.py", "site"),
        creates=("site/index.html",),
        refusal="pip install -e '.[docs]'",
        exit_code=1,
    ),
)


class Environment:
    """A virtual environment.

    Args:
        folder: Where it is.
        base: Another one, whose packages it sees behind its own.
        reuse: Keep what is in the folder instead of making it anew.
    """

    def __init__(self, folder: Path, base: Environment | None = None, *, reuse: bool = False) -> None:
        if not reuse:
            shutil.rmtree(folder, ignore_errors=True)
            venv.create(folder, with_pip=True, symlinks=os.name != "nt")
        self.python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
        printed = self.run("-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).stdout
        self.packages = Path(printed.strip())
        if base is not None:
            for path in self.packages.glob("setuptools*"):  # torch needs the base's version
                shutil.rmtree(path)
            (self.packages / "base.pth").write_text(f"{base.packages}\n", encoding="utf-8")
        self._initial_size = folder_size(self.packages)

    def run(self, *argv: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
        """Run its Python with these arguments and with the folder as home directory."""
        return self._run(argv, cwd, command_environment(cwd))

    def install(self, requirement: str | Path, constraints: Path) -> float:
        """Install with pip and return the seconds; SystemExit with pip's message if that fails."""
        start = time.perf_counter()
        argv = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", constraints, requirement)
        result = self._run(argv, self.packages, _without_python_variables())
        if result.returncode:
            raise SystemExit(f"pip install {Path(requirement).name}: {result.stderr[-TAIL:]}")
        return time.perf_counter() - start

    def _run(self, argv: Sequence[str | Path], cwd: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
        command = [str(self.python), *map(str, argv)]
        return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=TIMEOUT)

    @property
    def added_bytes(self) -> int:
        """Bytes installed since it was made."""
        return folder_size(self.packages) - self._initial_size

    def versions(self, names: Sequence[str]) -> dict[str, str]:
        """The versions of those of the packages that are visible."""
        program = (
            "import json\nfrom importlib.metadata import distributions\n"
            "print(json.dumps({d.name.lower().replace('_', '-'): d.version for d in [*distributions()][::-1]}))"
        )
        installed = json.loads(self.run("-c", program, cwd=self.packages).stdout)
        return {name: installed[key] for name in names if (key := name.lower().replace("_", "-")) in installed}


def command_environment(home: Path) -> dict[str, str]:
    """The variables for a command: nothing that shows another environment or sends anything anywhere; its own home."""
    kept = {n: v for n, v in _without_python_variables().items() if not n.startswith(("WANDB", "MLFLOW", "TRACKIO"))}
    kept |= {name: str(home) for name in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME")}
    offline = {"HF_HUB_OFFLINE": "1", "MLFLOW_DISABLE_TELEMETRY": "true", "TRACKIO_DIR": str(home / "trackio")}
    return kept | offline | {"OMP_NUM_THREADS": "1", "PYTHONNOUSERSITE": "1"}


def _without_python_variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def folder_size(folder: Path) -> int:
    """Bytes of the files in a folder, without compiled Python."""
    files = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return sum(path.stat().st_size for path in files)


def read_extras() -> tuple[dict[str, list[str]], frozenset[str]]:
    """Return (the requirements of every extra, the extras that `dev` includes), from pyproject.toml."""
    data = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras: dict[str, list[str]] = data["project"]["optional-dependencies"]
    included = next(text for text in extras["dev"] if text.startswith("policygrad["))
    return extras, frozenset(included.partition("[")[2].rstrip("]").split(","))


def packages_of(extra: str, extras: dict[str, list[str]]) -> list[str]:
    """Return the names of the packages that an extra requires, directly or through other extras."""
    names: list[str] = []
    for text in extras[extra]:
        if text.startswith("policygrad["):
            names += [n for other in re.findall(r"[\w-]+", text.partition("[")[2]) for n in packages_of(other, extras)]
        else:
            names.append(re.split(r"[<>=!~; \[]", text, maxsplit=1)[0])
    return names


@contextmanager
def serving(case: Case, python: Path, folder: Path) -> Iterator[str]:
    """Run the case's server and yield its address; "" if it has none."""
    if not case.server:
        yield ""
        return
    argv = [str(python), "-P", str(Path(__file__).with_name("stand_in_servers.py")), case.server]
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen(
            argv, stdout=subprocess.PIPE, stderr=log, text=True, env=command_environment(folder), cwd=folder
        )
    try:
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        if not address:
            raise SystemExit(f"the server {case.server} did not start: {(folder / 'server.log').read_text()[-TAIL:]}")
        yield address
    finally:
        server.terminate()
        server.wait()


def prepare_folder(case: Case, folder: Path) -> Path:
    """Empty the folder and write the case's files into it."""
    shutil.rmtree(folder, ignore_errors=True)
    for name, text in case.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def build_argv(case: Case, url: str) -> list[str]:
    """The case's command line for this server."""
    return [word.replace("{url}", url).replace("{root}", str(ROOT)) for word in case.argv]


def try_without(case: Case, base: Environment, folder: Path) -> str:
    """Run the command without the extra: "refused" if the error names what is missing, otherwise what happened."""
    result = base.run(*build_argv(case, "http://127.0.0.1:9"), cwd=prepare_folder(case, folder))
    message = " ".join(result.stderr.split())
    expected = case.refusal or install_command(case.extra)
    if result.returncode == case.exit_code and expected in message and "Traceback" not in message:
        return "refused"
    return f"exit code {result.returncode}: {message[-TAIL:] or 'no message'}"


def try_with(case: Case, environment: Environment, folder: Path) -> str:
    """Run the command with the extra: "works", or what is wrong."""
    prepare_folder(case, folder)
    if case.setup and (setup := environment.run("-c", case.setup, cwd=folder)).returncode:
        return f"setup: {setup.stderr[-TAIL:]}"
    with serving(case, environment.python, folder) as url:
        result = environment.run(*build_argv(case, url), cwd=folder)
    if result.returncode:
        return f"exit code {result.returncode}: {result.stderr[-TAIL:]}"
    if missing := [pattern for pattern in case.creates if not any(folder.glob(pattern))]:
        return f"did not create {', '.join(missing)}: {result.stderr[-TAIL:]}"
    if case.check and (check := environment.run("-c", case.check, cwd=folder)).returncode:
        return f"check: {check.stderr[-TAIL:]}"
    return "works"


def check_extra(extra: str, base: Environment, folder: Path, constraints: Path) -> dict[str, Any]:
    """Try one extra in a new environment and return its row of the results."""
    cases = [case for case in CASES if case.extra == extra]
    names = packages_of(extra, read_extras()[0])
    if set(base.versions(names)) == set(names):
        without = ["already installed"] * len(cases)
    else:
        without = [try_without(case, base, folder / "work") for case in cases]
    environment = Environment(folder / extra, base)
    seconds = environment.install(f"policygrad[{extra}]", constraints)
    return {
        "features": [case.feature for case in cases],
        "with": [try_with(case, environment, folder / "work") for case in cases],
        "without": without,
        "mib": environment.added_bytes / 2**20,
        "seconds": seconds,
        "versions": environment.versions(names),
    }


def install_base(folder: Path) -> tuple[Environment, dict[str, Any]]:
    """Install policygrad alone, from a copy because setuptools leaves `build/` behind."""
    source = folder / "source"
    shutil.rmtree(source, ignore_errors=True)
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    base = Environment(folder / BASE)
    seconds = base.install(source, ROOT / "constraints.txt")
    return base, {
        "mib": base.added_bytes / 2**20,
        "seconds": seconds,
        "versions": base.versions(["policygrad", "torch", "transformers"]),
        "python": ".".join(map(str, sys.version_info[:2])),
    }


def main() -> int:
    """Try the extras, write the results after each, and return 1 if one of them failed."""
    extras, pinned = read_extras()
    names = [name for name in extras if name != "dev"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=names, help="these; the others keep their results")
    parser.add_argument("--reuse", action="store_true", help="reuse the environment of policygrad in the folder")
    parser.add_argument("--folder", type=Path, default=ROOT / ".extras", help="for the environments (.extras)")
    args = parser.parse_args()
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}
    if args.reuse and BASE in results:
        base = Environment(folder / BASE, reuse=True)
    else:
        base, results[BASE] = install_base(folder)
    some_pinned = folder / "constraints.txt"
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    some_pinned.write_text("\n".join(line for line in lines if line.partition("==")[0] in PINNED) + "\n")
    failed = []
    for extra in args.only or names:
        constraints = ROOT / "constraints.txt" if extra in pinned else some_pinned
        results[extra] = row = check_extra(extra, base, folder, constraints)
        ordered = {name: results[name] for name in (BASE, *names) if name in results}
        RESULTS.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
        shutil.rmtree(folder / extra)  # some take a gigabyte
        for feature, without, with_ in zip(row["features"], row["without"], row["with"], strict=True):
            print(f"{extra:<12} {row['mib']:.0f} MiB, {row['seconds']:.0f} s  {feature}")
            print(f"    without: {without}\n    with: {with_}", flush=True)
            if without not in ("refused", "already installed") or with_ != "works":
                failed.append(extra)
    if failed:
        print(f"failed: {', '.join(dict.fromkeys(failed))}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
