"""Every extra alone: without it its feature is refused and the refusal names it; with it the feature works.

    python scripts/check_extras.py [--only lora data …] [--folder DIR]

One virtual environment has policygrad and nothing else, at the versions of constraints.txt. Every extra has an empty one of its
own, which sees that of policygrad through a .pth file and no other: what is visible there is policygrad, what it depends on, and
what `pip install '.[EXTRA]'` adds, and torch is installed once. An extra may put another version of what policygrad
depends on before the one that is there, as pip would in one environment. Extras that the tests run with (`dev` lists them) take
the versions of constraints.txt, the others only those of torch, transformers and what belongs to them.

`dev` is no feature: it is the other extras and the tools of this repository, which `make test` tries. This needs a package index;
every server that is asked besides is on this machine. What an earlier call has left in the folder is made anew. Writes
docs/results/extras.json, of which `make docs` makes the table in docs/extras.md.
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from extras.cases import CASES, Case

LIMIT = 600
"""Seconds for a command."""
SHOWN = 1500
"""Characters of what a command has said last."""
_LISTED = (
    "import json\nfrom importlib.metadata import distributions\n"
    "print(json.dumps({d.name.lower().replace('_', '-'): d.version for d in [*distributions()][::-1]}))"
)


class Environment:
    """A virtual environment with a Python of its own."""

    def __init__(self, folder: Path, sees: Environment | None = None, *, there: bool = False) -> None:
        """sees: another one, whose packages it has too, behind its own. there: it is as it was left; otherwise it is made anew."""
        if not there:
            shutil.rmtree(folder, ignore_errors=True)
            venv.create(folder, with_pip=True, symlinks=os.name != "nt")
        self.python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
        told = self.run("-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).stdout
        self.packages = Path(told.strip())
        if sees is not None:
            for path in self.packages.glob("setuptools*"):  # that of the other is torch's choice
                shutil.rmtree(path)
            (self.packages / "seen.pth").write_text(f"{sees.packages}\n", encoding="utf-8")
        self.empty = size(self.packages)

    def run(self, *words: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
        """A command of its Python, which has the folder for its home."""
        return self._run(words, cwd, variables(cwd))

    def install(self, what: str | Path, constraints: Path) -> float:
        """Seconds. Raises SystemExit with what pip says."""
        began = time.perf_counter()
        words = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", constraints, what)
        done = self._run(words, self.packages, kept())
        if done.returncode:
            raise SystemExit(f"pip install {Path(what).name}: {done.stderr[-SHOWN:]}")
        return time.perf_counter() - began

    def _run(self, words: Sequence[str | Path], cwd: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
        called = [str(self.python), *map(str, words)]
        return subprocess.run(called, cwd=cwd, env=env, capture_output=True, text=True, timeout=LIMIT)

    @property
    def added(self) -> int:
        """Bytes that were installed into it."""
        return size(self.packages) - self.empty

    def versions(self, names: Sequence[str]) -> dict[str, str]:
        """Of packages, those that are installed."""
        known = json.loads(self.run("-c", _LISTED, cwd=self.packages).stdout)
        return {name: known[low] for name in names if (low := name.lower().replace("_", "-")) in known}


def kept() -> dict[str, str]:
    """This process's variables without what would show another environment."""
    return {name: text for name, text in os.environ.items() if not name.startswith("PYTHON")}


def variables(home: Path) -> dict[str, str]:
    """Those, without what would send anything anywhere; home is a folder of its own."""
    ours = {name: text for name, text in kept().items() if not name.startswith(("WANDB", "MLFLOW", "TRACKIO"))}
    ours |= {name: str(home) for name in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME")}
    offline = {"HF_HUB_OFFLINE": "1", "MLFLOW_DISABLE_TELEMETRY": "true", "TRACKIO_DIR": str(home / "trackio")}
    return ours | offline | {"OMP_NUM_THREADS": "1", "PYTHONNOUSERSITE": "1"}


def size(folder: Path) -> int:
    """Bytes of the files in a folder, without what Python compiles."""
    files = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return sum(path.stat().st_size for path in files)


ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results" / "extras.json"
BASE = "policygrad"
"""The environment without any extra."""
PINNED = ("torch", "transformers", "tokenizers", "safetensors", "reasoning_gym")
"""What stays as it is where an extra chooses its own versions."""


def project() -> tuple[dict[str, list[str]], frozenset[str]]:
    """(what every extra asks for, the extras that `dev` has)."""
    data = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras: dict[str, list[str]] = data["project"]["optional-dependencies"]
    ours = next(text for text in extras["dev"] if text.startswith("policygrad["))
    return extras, frozenset(ours.partition("[")[2].rstrip("]").split(","))


def packages_of(extra: str, extras: dict[str, list[str]]) -> list[str]:
    """The packages that it asks for by name, other extras' among them."""
    found = []
    for text in extras[extra]:
        if text.startswith("policygrad["):
            found += [n for other in re.findall(r"[\w-]+", text.partition("[")[2]) for n in packages_of(other, extras)]
        else:
            found.append(re.split(r"[<>=!~; \[]", text, maxsplit=1)[0])
    return found


# --- one feature


@contextmanager
def serving(case: Case, python: Path, folder: Path) -> Iterator[str]:
    """The address of the server that the case asks; "" where it asks none."""
    if not case.server:
        yield ""
        return
    script = Path(__file__).parent / "extras" / case.server
    with (folder / "server.log").open("w") as log:
        words = [str(python), "-P", str(script)]
        server = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=log, text=True, env=variables(folder), cwd=folder
        )
    try:
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        if not address:
            raise SystemExit(f"{case.server} did not start: {(folder / 'server.log').read_text()[-SHOWN:]}")
        yield address
    finally:
        server.terminate()
        server.wait()


def prepared(case: Case, folder: Path) -> Path:
    """An empty folder with the case's files."""
    shutil.rmtree(folder, ignore_errors=True)
    for name, text in case.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def asked(case: Case, url: str) -> list[str]:
    return [word.replace("{url}", url).replace("{root}", str(ROOT)) for word in case.words]


def without(case: Case, base: Environment, folder: Path, brought: bool) -> str:
    """What the command says where the extra is missing: "named", or what is wrong. brought: policygrad brings its packages."""
    if brought:
        return "policygrad brings it along"
    done = base.run(*asked(case, "http://127.0.0.1:9"), cwd=prepared(case, folder))
    said = " ".join(done.stderr.split())
    if done.returncode == case.code and case.named in said and "Traceback" not in said:
        return "named"
    return f"exit code {done.returncode}: {said[-SHOWN:] or 'nothing'}"


def works(case: Case, environment: Environment, folder: Path) -> str:
    """What the command does with the extra: "works", or what is wrong."""
    prepared(case, folder)
    if case.before and (made := environment.run("-c", case.before, cwd=folder)).returncode:
        return f"preparing: {made.stderr[-SHOWN:]}"
    with serving(case, environment.python, folder) as url:
        done = environment.run(*asked(case, url), cwd=folder)
    if done.returncode:
        return f"exit code {done.returncode}: {done.stderr[-SHOWN:]}"
    if missing := [pattern for pattern in case.leaves if not any(folder.glob(pattern))]:
        return f"it leaves no {', '.join(missing)}: {done.stderr[-SHOWN:]}"
    if case.after and (read := environment.run("-c", case.after, cwd=folder)).returncode:
        return f"afterwards: {read.stderr[-SHOWN:]}"
    return "works"


# --- all


def checked(extra: str, base: Environment, folder: Path, constraints: Path) -> dict[str, Any]:
    """One extra, from an empty environment."""
    extras, _ = project()
    cases = [case for case in CASES if case.extra == extra]
    names = packages_of(extra, extras)
    brought = set(base.versions(names)) == set(names)
    refused = [without(case, base, folder / "work", brought) for case in cases]
    environment = Environment(folder / extra, base)
    seconds = environment.install(f"policygrad[{extra}]", constraints)
    done = [works(case, environment, folder / "work") for case in cases]
    return {
        "shows": [case.shows for case in cases],
        "mib": environment.added / 2**20,
        "seconds": seconds,
        "without": refused,
        "with": done,
        "versions": environment.versions(names),
    }


def constraints(folder: Path) -> tuple[Path, Path]:
    """(all that is pinned, only what stays as it is)."""
    few = folder / "constraints.txt"
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    few.write_text("\n".join(line for line in lines if line.partition("==")[0] in PINNED) + "\n", encoding="utf-8")
    return ROOT / "constraints.txt", few


def bare(folder: Path) -> tuple[Environment, dict[str, Any]]:
    """The environment of policygrad alone, from a copy: setuptools leaves `build/` behind."""
    source = folder / "source"
    shutil.rmtree(source, ignore_errors=True)
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    base = Environment(folder / BASE)
    seconds = base.install(source, ROOT / "constraints.txt")
    return base, {
        "mib": base.added / 2**20,
        "seconds": seconds,
        "versions": base.versions(["policygrad", "torch", "transformers"]),
        "python": ".".join(map(str, sys.version_info[:2])),
    }


def main() -> int:
    """1 where an extra does not do what it is for."""
    extras, pinned = project()
    known = [name for name in extras if name != "dev"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=known, help="these; the others' results stay")
    parser.add_argument("--go-on", action="store_true", help="take the environment of policygrad that is there")
    parser.add_argument("--folder", type=Path, default=ROOT / ".extras", help="of the environments (.extras)")
    args = parser.parse_args()
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}
    if args.go_on and BASE in found:
        base = Environment(folder / BASE, there=True)
    else:
        base, found[BASE] = bare(folder)
    every, few = constraints(folder)
    wrong = []
    for extra in args.only or known:
        found[extra] = row = checked(extra, base, folder, every if extra in pinned else few)
        RESULTS.write_text(
            json.dumps({n: found[n] for n in (BASE, *known) if n in found}, indent=1) + "\n", encoding="utf-8"
        )
        shutil.rmtree(folder / extra)  # some take a gigabyte
        for shown, before, after in zip(row["shows"], row["without"], row["with"], strict=True):
            size_ = f"{row['mib']:.0f} MiB, {row['seconds']:.0f} s"
            print(f"{extra:<12} {size_:<16} {shown}\n    without: {before}\n    with: {after}", flush=True)
            wrong += [extra] * (before not in ("named", "policygrad brings it along") or after != "works")
    if wrong:
        print(f"not as they should be: {', '.join(dict.fromkeys(wrong))}", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
