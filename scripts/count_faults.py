"""Faults by the hundred on checkpoints of real runs, counted; docs/results/faults.json.

python scripts/count_faults.py [--only kills errors flips supervised] [--times 4] [--flips 2000] [--kills 20]

kills: a save of a run's checkpoint is killed before and after each of its calls to the file system, --times over.
errors: each of those calls fails, with each error that a disk has.
flips: one bit of a checkpoint is turned, anywhere in its files.
supervised: SIGKILL at random moments of `policygrad sft` and `policygrad reward-model`, half of the kills each, and each time they
are resumed; what they leave at last is compared, bit for bit, with runs that nobody killed.

scripts/soak.py kills `policygrad train`. Exit code 1: something does not hold, and the file says what. On Linux.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shlex
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import disk_faults
import soaked
from watched import Watched, adopt, left_behind

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results" / "faults.json"
KINDS = ("kills", "errors", "flips", "supervised")
LEAVES = 20.0
"""Seconds after which what a killed run has started must have ended."""
HANGS = 600.0
"""Seconds after which a short run counts as hanging."""


def written(kind: str, folder: Path) -> Path:
    """The data of a short run."""
    answers = (lambda n: {"completion": n}) if kind == "sft" else (lambda n: {"chosen": n, "rejected": "no"})
    rows = [{"prompt": f"{i} + {i} =\n"} | answers(str(2 * i)) for i in range(500)]
    file = folder / f"{kind}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def lived(words: Sequence[str], run: Path, seconds: float | None) -> tuple[float, str | None]:
    """(how long it ran, what it was at when it was killed; None when it ended by itself). It goes on with what is there.

    Raises:
        SystemExit: it ended with an error, or hangs.
    """
    begun = (run / f"{words[0]}.toml").exists()
    called = [words[0], "--resume", str(run)] if begun else [*words, "--output", str(run)]
    with run.with_suffix(".log").open("a") as log:
        process = Watched([*called, "--plain"], run.with_suffix(".told"), log, os.environ | {"OMP_NUM_THREADS": "1"})
        try:
            while process.code is None and (seconds is None or time.monotonic() < process.began + seconds):
                if time.monotonic() > process.began + HANGS:
                    raise SystemExit(f"{shlex.join(called)} hangs")
                time.sleep(0.005)
        finally:
            lasted, phase = time.monotonic() - process.began, process.kill() if process.code is None else None
    if phase is None and process.code:
        raise SystemExit(f"{shlex.join(called)} ended with exit code {process.code}: see {run.with_suffix('.log')}")
    return lasted, phase


def differing(whole: Path, pieces: Path) -> list[str]:
    """What of a run that was killed is not as of one that was not."""
    if odd := soaked.files(whole) ^ soaked.files(pieces):
        return [f"{pieces.name}: files that only one of the runs has: {', '.join(sorted(odd)[:5])}"]
    tensors = sorted(path.relative_to(whole) for path in whole.rglob("*.safetensors"))
    found = [f"{pieces.name}: {name} differs" for name in tensors if not soaked.same_bits(whole / name, pieces / name)]
    one, other = (soaked.untimed(soaked.rows(run / "metrics.jsonl")) for run in (whole, pieces))
    return found + [f"{pieces.name}: metrics.jsonl differs"] * (one != other)


def supervised(folder: Path, kills: int) -> dict[str, Any]:
    """Runs of `sft` and `reward-model` that are killed until there are enough kills, each then against one that never was."""
    phases, wrong, draw = Counter[str](), list[str](), random.Random(0)
    for number, kind in enumerate(("sft", "reward-model"), 1):
        words = [kind, "--data", str(written(kind, folder)), "--batch-size", "4", "--epochs", "2"]
        words += ["--checkpoint.every", "3"]
        whole, pieces = folder / f"{kind}-whole", folder / f"{kind}-pieces"
        lasted, _ = lived(words, whole, None)
        while phases.total() < number * kills // 2:
            seconds, phase = lived(words, pieces, draw.random() * lasted)
            if phase is None:  # it was done before: compared, and begun anew
                wrong += differing(whole, pieces)
                shutil.rmtree(pieces)
                continue
            phases[phase] += 1
            print(f"{kind}: kill {phases.total()}/{kills}, {phase}, after {seconds:.1f} s", flush=True)
            if there := left_behind(LEAVES):
                wrong.append(f"a killed {kind} has left processes: {'; '.join(there)}")
        lived(words, pieces, None)
        wrong += differing(whole, pieces)
    return {"count": phases.total(), "phases": dict(phases.most_common()), "wrong": wrong}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS, help="these; the others' counts stay")
    parser.add_argument("--times", type=int, default=4, help="that a save is killed at each of its calls")
    parser.add_argument("--flips", type=int, default=2000)
    parser.add_argument("--kills", type=int, default=20, help="of sft and reward models together")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args(words)
    adopt()
    found = json.loads(args.results.read_text(encoding="utf-8")) if args.results.is_file() else {}
    about = {
        "made_by": shlex.join(["python", "scripts/count_faults.py", *(sys.argv[1:] if words is None else words)]),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
        **{name: version(name) for name in ("policygrad", "torch")},
    }
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        content = disk_faults.made(folder) if {*args.only} - {"supervised"} else ({}, {})
        jobs: dict[str, Callable[[], dict[str, Any]]] = {
            "kills": lambda: disk_faults.kills(content, folder, args.times),
            "errors": lambda: disk_faults.errors(content, folder),
            "flips": lambda: disk_faults.flips(content, folder, args.flips),
            "supervised": lambda: supervised(folder, args.kills),
        }
        for kind in args.only:
            began = time.monotonic()
            found[kind] = jobs[kind]() | about
            print(f"{kind}: {found[kind]['count']} in {time.monotonic() - began:.0f} s", flush=True)
    args.results.parent.mkdir(parents=True, exist_ok=True)
    args.results.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    wrong = [text for kind in KINDS for text in found.get(kind, {}).get("wrong", ())]
    print("\n".join(wrong) or "all of it holds", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
