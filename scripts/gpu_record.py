"""What scripts/measure_gpu.py writes: the outcome of each part with its date, card, versions, commit and the digest of its code.

The digest is of the source files that a part measures. Where it is not that of the files as they are now, the row of docs/gpu.md
says that the code has changed since. It needs no git, which a machine with a GPU may not have.
"""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
from collections.abc import Iterator
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path("src/policygrad")
NOT_RUN = "no time was left for it"
"""The error of a part that was never started: it replaces no earlier outcome."""

LEARNER = ("core", "learners/base.py", "learners/config.py", "learners/optimizers.py", "learners/local", "models/*.py")
SAMPLER = ("samplers/base.py", "samplers/local", "models/*.py")
CODE: dict[str, tuple[str, ...]] = {
    "device": ("training/calibration.py",),
    "algorithms": ("algorithms.py", *LEARNER),
    "resume": ("checkpoint", *LEARNER),
    "packing": LEARNER,
    "head": ("learners/local/logprobs.py",),
    "learner": LEARNER,
    "segments": LEARNER,
    "longest": LEARNER,
    "decoding": SAMPLER,
    "conversations": SAMPLER,
    "default run": ("training", "rollout", *LEARNER, *SAMPLER),
    "real model": ("training", "rollout", "rewards", *LEARNER, *SAMPLER),
    "two processes": ("learners/fsdp", *LEARNER),
    "offload": ("learners/local", "samplers/engines"),
    "colocation": ("learners/local", "samplers/engines"),
}
"""How a part's name begins -> files of the package and folders, whole; the longest that fits. Others: learner and sampler."""


def find_code(part: str, root: Path = ROOT) -> Iterator[Path]:
    """Yield the source files that a part measures, in order."""
    fitting = [name for name in CODE if part.startswith(name)]
    patterns = CODE[max(fitting, key=len)] if fitting else (*LEARNER, *SAMPLER)
    package = root / PACKAGE
    for pattern in dict.fromkeys(patterns):
        folder = package / pattern
        yield from sorted(folder.rglob("*.py") if folder.is_dir() else package.glob(pattern))


def digest_code(part: str, root: Path = ROOT) -> str:
    """Return a digest of the names and contents of the files that a part measures."""
    digest = sha256()
    for path in find_code(part, root):
        digest.update(f"{path.relative_to(root).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def stamp(part: str, device: str) -> dict[str, Any]:
    """Return when, on what and of which code a part is being measured."""
    versions = {name: version(name) for name in ("torch", "transformers")} | {"python": sys.version.split()[0]}
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {
        "date": today,
        "device": device,
        "versions": versions,
        "commit": find_commit(),
        "code": digest_code(part),
    }


def find_commit(root: Path = ROOT) -> str:
    """Return the commit of the checkout, with a + where source files differ from it; empty where no git says so."""
    words = (["rev-parse", "--short=8", "HEAD"], ["status", "--porcelain", "src", "scripts"])
    try:
        done = [subprocess.run(["git", "-C", str(root), *w], capture_output=True, text=True, check=True) for w in words]
    except (OSError, subprocess.CalledProcessError):
        return ""
    commit, changes = (x.stdout.strip() for x in done)
    return commit + ("+" if changes else "")


def read_parts(path: Path) -> dict[str, Any]:
    """Return the outcomes in a file of results; none if it is not there."""
    parts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["parts"] if path.is_file() else {}
    return parts


def write_part(path: Path, name: str, outcome: dict[str, Any]) -> None:
    """Add an outcome to a file of results, in place of an earlier one of that part."""
    parts = read_parts(path)
    if outcome.get("error") == NOT_RUN and name in parts:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"parts": parts | {name: outcome}}, indent=1) + "\n", encoding="utf-8")


def merge_results(new: Path, into: Path) -> list[str]:
    """Add what another machine has written, and return the names of its parts."""
    parts = read_parts(new)
    for name, outcome in parts.items():
        write_part(into, name, outcome)
    return list(parts)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: gpu_record.py NEW.json docs/results/gpu.json   adds the parts of the first file to the second")
    print("\n".join(merge_results(*map(Path, sys.argv[1:]))))
