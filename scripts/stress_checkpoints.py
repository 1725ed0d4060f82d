"""Faults by the hundred on checkpoints of real runs, counted; docs/results/faults.json.

python scripts/stress_checkpoints.py [--only kills errors flips supervised] [--times 4] [--flips 2000] [--kills 20]

kills: a save of a run's checkpoint is killed before and after each of its calls to the file system, --times over.
errors: each of those calls fails, with each error that a disk has.
flips: one bit of a checkpoint is turned, anywhere in its files.
supervised: SIGKILL at random moments of `policygrad sft` and `policygrad reward-model`, half of the kills each, and each time they
are resumed; what they leave at last is compared, bit for bit, with runs that nobody killed.

scripts/stress_soak.py kills `policygrad train`. Exit code 1: something does not hold, and the file says what. On Linux.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import platform
import random
import re
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import policygrad as pg
import stress_soak as soaked
from policygrad.checkpoint import format as checkpoint
from policygrad.errors import CheckpointError
from stress_processes import Watched, adopt, left_behind

CALLS = ("fsync", "replace", "unlink", "rmdir", "mkdir")
"""By which a save changes the disk, next to safetensors' own writing."""
ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EACCES)
Content = tuple[dict[str, torch.Tensor], dict[str, Any]]


def calls_of_a_save(hook: Callable[[], None]) -> dict[str, Any]:
    """Calls `hook` before and after each call by which a save changes the disk; the functions as they were, to put back."""

    def around(function: Any) -> Any:
        def wrapped(*args: object, **kwargs: object) -> object:
            hook()
            result = function(*args, **kwargs)
            hook()
            return result

        return wrapped

    before = {name: getattr(os, name) for name in CALLS} | {"save_file": checkpoint.save_file}
    put({name: around(function) for name, function in before.items()})
    return before


def put(functions: Mapping[str, Any]) -> None:
    for name, function in functions.items():
        setattr(checkpoint if name == "save_file" else os, name, function)


def at_call(number: int, act: Callable[[], None]) -> Callable[[], None]:
    """A hook that acts at the n-th of its calls."""
    count = 0

    def hook() -> None:
        nonlocal count
        count += 1
        if count == number:
            act()

    return hook


def made(folder: Path) -> Content:
    """What a checkpoint of the embedded model's run holds: tensors and state."""
    run = pg.Run(
        algorithm=pg.PPO,
        steps=1,
        prompts_per_step=2,
        samples_per_prompt=2,
        evaluation=pg.EvaluationConfig(problems=0),
        checkpoint=pg.CheckpointConfig(every=1),
        output=str(folder / "run"),
    )
    pg.train(run, display=False)
    found = checkpoint.load_latest(folder / "run" / "checkpoints", warn=fail_on)
    assert found is not None
    return found.tensors, found.state


def fail_on(message: str) -> None:
    raise AssertionError(message)


def same(found: checkpoint.Checkpoint, content: Content, mark: int) -> bool:
    """Whether it is what the save of that mark was given."""
    tensors, state = content
    return found.state == state | {"mark": mark} and all(
        torch.equal(found.tensors[name], tensor) for name, tensor in tensors.items()
    )


def wrong_after(directory: Path, content: Content) -> str:
    """What does not hold in a folder whose first save was whole and whose second was cut short; empty when all does."""
    try:
        found = checkpoint.load_latest(directory, warn=fail_on)
    except (AssertionError, CheckpointError) as error:
        return f"the newest checkpoint is not whole: {error}"
    if found is None or not any(same(found, content, mark) for mark in (1, 2)):
        return "the newest checkpoint is neither the one before nor this one"
    save(directory, 3, content, 3)
    names = sorted(path.name for path in directory.iterdir())
    last = checkpoint.load_checkpoint(directory / "step-000003")
    if names != ["step-000003"] or not same(last, content, 3):
        return f"the next save leaves {', '.join(names)}"
    return ""


def save(directory: Path, step: int, content: Content, mark: int) -> None:
    checkpoint.save_checkpoint(directory, step, content[0], content[1] | {"mark": mark}, keep=1)


def killed_save(directory: Path, step: int, content: Content, at: int) -> bool:
    """In a process of its own; whether it was killed."""
    if (pid := os.fork()) == 0:
        torch.set_num_threads(1)
        calls_of_a_save(at_call(at, lambda: os.kill(os.getpid(), signal.SIGKILL)))
        try:
            save(directory, step, content, 2)
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])


def failed_save(directory: Path, step: int, content: Content, at: int, number: int) -> tuple[bool, str]:
    """(whether the save came to that call, what does not hold)."""
    struck = False

    def fail() -> None:
        nonlocal struck
        struck = True
        raise OSError(number, os.strerror(number))

    before, said = calls_of_a_save(at_call(at, fail)), ""
    try:
        save(directory, step, content, 2)
    except CheckpointError as error:
        if not re.search(r"step-00000[12](\.old)?, is intact", str(error)):
            said = f"the error does not say what is left: {error}"
    except OSError as error:
        said = f"no CheckpointError, but {error!r}"
    finally:
        put(before)
    return struck, said


def kills(content: Content, folder: Path, times: int) -> dict[str, Any]:
    """Before and after every call, of a save under the next name and of one under the same."""
    count, wrong = 0, list[str]()
    for turn in range(times):
        for step in (2, 1):
            at, alive = 0, False
            while not alive:
                at += 1
                directory = folder / f"kill-{turn}-{step}-{at}"
                save(directory, 1, content, 1)
                alive = not killed_save(directory, step, content, at)
                count += not alive
                if said := wrong_after(directory, content):
                    wrong.append(f"killed at call {at} of a save: {said}")
                shutil.rmtree(directory)
    return {"count": count, "wrong": wrong}


def errors(content: Content, folder: Path) -> dict[str, Any]:
    """Every error at every call, before and after it, likewise."""
    count, wrong = 0, list[str]()
    for number in ERRORS:
        for step in (2, 1):
            at, struck = 0, True
            while struck:
                at += 1
                directory = folder / f"error-{number}-{step}-{at}"
                save(directory, 1, content, 1)
                struck, said = failed_save(directory, step, content, at, number)
                count += struck
                if said := said or wrong_after(directory, content):
                    wrong.append(f"{errno.errorcode[number]} at call {at} of a save: {said}")
                shutil.rmtree(directory)
    return {"count": count, "kinds": [errno.errorcode[number] for number in ERRORS], "wrong": wrong}


def flips(content: Content, folder: Path, number: int) -> dict[str, Any]:
    """Anywhere in the files of a checkpoint, a third of them in each."""
    draw, wrong = random.Random(0), list[str]()
    save(folder / "flips", 1, content, 1)
    path = folder / "flips" / "step-000001"
    files = sorted(path.iterdir())
    for turn in range(number):
        file = files[turn % len(files)]
        at, bit = draw.randrange(file.stat().st_size), 1 << draw.randrange(8)
        turned(file, at, bit)
        try:
            checkpoint.load_checkpoint(path)
            wrong.append(f"bit {bit} of byte {at} of {file.name} was not noticed")
        except CheckpointError as error:
            if str(path) not in str(error):
                wrong.append(f"bit {bit} of byte {at} of {file.name}: the error names no file: {error}")
        turned(file, at, bit)
    if not same(checkpoint.load_checkpoint(path), content, 1):
        wrong.append("turned back, it is not what it was")
    return {"count": number, "files": [file.name for file in files], "wrong": wrong}


def turned(file: Path, at: int, bit: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(at)
        value = opened.read(1)[0]
        opened.seek(at)
        opened.write(bytes([value ^ bit]))


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


def differing(full: Path, pieces: Path) -> list[str]:
    """What of a run that was killed is not as of one that was not."""
    if odd := soaked.files(full) ^ soaked.files(pieces):
        return [f"{pieces.name}: files that only one of the runs has: {', '.join(sorted(odd)[:5])}"]
    tensors = sorted(path.relative_to(full) for path in full.rglob("*.safetensors"))
    found = [f"{pieces.name}: {name} differs" for name in tensors if not soaked.same_bits(full / name, pieces / name)]
    one, other = (soaked.untimed(soaked.rows(run / "metrics.jsonl")) for run in (full, pieces))
    return found + [f"{pieces.name}: metrics.jsonl differs"] * (one != other)


def supervised(folder: Path, kills: int) -> dict[str, Any]:
    """Runs of `sft` and `reward-model` that are killed until there are enough kills, each then against one that never was."""
    phases, wrong, draw = Counter[str](), list[str](), random.Random(0)
    for number, kind in enumerate(("sft", "reward-model"), 1):
        words = [kind, "--data", str(written(kind, folder)), "--batch-size", "4", "--epochs", "2"]
        words += ["--checkpoint.every", "3"]
        full, pieces = folder / f"{kind}-whole", folder / f"{kind}-pieces"
        lasted, _ = lived(words, full, None)
        while phases.total() < number * kills // 2:
            seconds, phase = lived(words, pieces, draw.random() * lasted)
            if phase is None:  # it was done before: compared, and begun anew
                wrong += differing(full, pieces)
                shutil.rmtree(pieces)
                continue
            phases[phase] += 1
            print(f"{kind}: kill {phases.total()}/{kills}, {phase}, after {seconds:.1f} s", flush=True)
            if there := left_behind(LEAVES):
                wrong.append(f"a killed {kind} has left processes: {'; '.join(there)}")
        lived(words, pieces, None)
        wrong += differing(full, pieces)
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
        "made_by": shlex.join(["python", "scripts/stress_checkpoints.py", *(sys.argv[1:] if words is None else words)]),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
        **{name: version(name) for name in ("policygrad", "torch")},
    }
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        content = made(folder) if {*args.only} - {"supervised"} else ({}, {})
        jobs: dict[str, Callable[[], dict[str, Any]]] = {
            "kills": lambda: kills(content, folder, args.times),
            "errors": lambda: errors(content, folder),
            "flips": lambda: flips(content, folder, args.flips),
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
