"""policygrad against TRL, side by side: CPU seconds, wall seconds and memory of one optimiser step.

    python benchmarks/versus_trl.py [--only 7m geometric] [--threads 1 2] [--repeats 3] [--quick]

Every measurement is a process of its own, the sides take turns, and what is finished is kept in .bench/bench.json: a run that was
stopped goes on, and a fresh clone goes on from what is committed, as far as code, machine and libraries are the same. At the end,
or with --page, docs/results/bench.json and docs/benchmarks.md are written from that; --quick has everything small, says nothing of
speed and writes below .bench/quick alone.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from bench.clock import heard, problems
from bench.machine import alike, describe, when
from bench.options import Options, parse
from bench.page import publish
from bench.store import Record, Store, Task, fingerprint, in_words, remaining
from bench.trl_environment import TRL, python
from bench.works import GSM8K, SIDES, Work, chosen, part_of, quick
from policygrad.models.loading import has_bf16_products

ROOT = Path(__file__).resolve().parents[1]
HERE = Path("benchmarks")  # processes run in ROOT, so that their commands can be typed there
COMMON = [
    ROOT / HERE / name
    for name in ("make_work.py", "bench/models.py", "bench/rewards.py", "bench/clock.py", "bench/keeping.py")
]
OURS = [*(ROOT / "src" / "policygrad").rglob("*.py"), ROOT / HERE / "ours.py", *COMMON]
THEIRS = [ROOT / HERE / "theirs.py", ROOT / HERE / "bench" / "lengths.py", *COMMON]
SHELL = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}


class Versus:
    """Where things are, and what has been measured."""

    def __init__(self, options: Options) -> None:
        self.options, self.folder, self.machine = options, options.folder(ROOT), alike()
        self.sources: dict[str, str] = {}  # of a work's prompts
        self.store = Store(self.folder / "bench.json", options.published(ROOT))
        self.own = (
            Path(os.path.relpath(sys.executable, ROOT)) if ROOT in Path(sys.executable).parents else sys.executable
        )

    @cached_property
    def trl(self) -> Path:
        """The Python of an environment that has TRL."""
        return python(ROOT / ".bench" / "trl", ROOT / "constraints.txt").relative_to(ROOT)

    def make(self, work: Work) -> None:
        """The work's folder, where it is not there as it should be.

        Raises:
            SystemExit: it cannot be made.
        """
        folder, data = self.folder / work.name, ROOT / self.options.data
        told = {"work": work.as_dict(), "data": (data / GSM8K).is_file()}
        wanted, made = fingerprint(told, COMMON), folder / "made.txt"
        if not made.is_file() or made.read_text(encoding="utf-8") != wanted:
            command = [str(self.own), str(HERE / "make_work.py"), work.name, str(folder.relative_to(ROOT))]
            command += ["--data", str(data), *["--quick"] * self.options.quick]
            done = subprocess.run(command, cwd=ROOT, env=os.environ | SHELL, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(f"{' '.join(command)}\nfailed ({done.returncode}):\n{done.stderr[-4000:]}")
            print(done.stdout, end="", flush=True)
            made.write_text(wanted, encoding="utf-8")
        self.sources[work.name] = json.loads((folder / "work.json").read_text(encoding="utf-8"))["data"]

    def task(self, work: Work, side: str, threads: int, repeat: int | str, micro: int, part: bool = False) -> Task:
        """A process that measures one side."""
        library, dtype = side.split("-")
        folder, ours = str(self.folder.relative_to(ROOT) / work.name), library == "policygrad"
        words = [str(self.own), str(HERE / "ours.py"), folder] if ours else [
            str(self.trl), str(HERE / "theirs.py"), folder, "--micro", str(micro), *["--part"] * part]  # fmt: skip
        code = fingerprint(
            {"work": work.as_dict(), "data": self.sources[work.name], "trl": "" if ours else TRL},
            OURS if ours else THEIRS,
        )
        environment = (("OMP_NUM_THREADS", str(threads)), ("MKL_NUM_THREADS", str(threads)))
        command = (*words, *(["--dtype", dtype] if dtype != "fp32" else []))
        if ours and dtype == "bf16" and work.shape is not None:  # its best micro-batch, as TRL has its own
            command = (*command, "--compile", "--micro-tokens", "8192")
        if work.keep and not part:  # repeats of what is learned differ by more than the clock
            command = (
                *command,
                "--seed",
                str(repeat),
                "--keep",
                str(self.folder.relative_to(ROOT) / work.name / "kept"),
            )
        named = f"{code}{'' if ours else f'-{micro}'} on {self.machine}"
        return Task(f"{work.name}/{side}/{threads}/{repeat}", named, command, environment)

    def measured(self, section: str, task: Task, work: Work) -> Record:
        """The record of a task, done now if it is not known.

        Raises:
            SystemExit: a process that fails, or that has not done the work.
        """
        found = self.store.known(section, task)
        if found is not None:
            return found
        kept = Path(task.command[-1]) if "--keep" in task.command else None
        if kept is not None:
            shutil.rmtree(ROOT / kept, ignore_errors=True)
        began = time.perf_counter()
        environment = os.environ | SHELL | dict(task.environment)
        done = subprocess.run(task.command, cwd=ROOT, env=environment, capture_output=True, text=True)
        result = heard(done.stdout)
        if done.returncode or result is None:
            raise SystemExit(f"{task.shell}\nfailed ({done.returncode}):\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        wrong = problems(result["facts"], work.steps + 1, work.completions, work.tokens())
        if result["versions"]["threads"] != dict(task.environment)["OMP_NUM_THREADS"]:
            wrong.append(f"it had {result['versions']['threads']} threads")
        if wrong:
            raise SystemExit(f"{task.shell}\nhas not done the work: {'; '.join(wrong)}")
        if kept is not None:
            result |= self.learned(kept)
        taken = time.perf_counter() - began
        command = task.shell.replace(sys.executable, "python")  # no folder of the machine, where it is not one of ours
        record = {"fingerprint": task.fingerprint, "command": command, "taken": when(), "seconds": taken, **result}
        self.store.put(section, task.key, record)
        return record

    def learned(self, kept: Path) -> Record:
        """`curve`: [step, held-out accuracy] of the weights that a run has kept, which are then removed.

        Raises:
            SystemExit: they cannot be measured.
        """
        command = [str(self.own), str(HERE / "held_out.py"), str(kept), *["--problems", "4"] * self.options.quick]
        done = subprocess.run(command, cwd=ROOT, env=os.environ | SHELL, capture_output=True, text=True)
        found = heard(done.stdout)
        if done.returncode or found is None:
            raise SystemExit(f"{' '.join(command)}\nfailed ({done.returncode}):\n{done.stderr[-4000:]}")
        shutil.rmtree(ROOT / kept)
        return found

    def micro(self, work: Work, side: str, threads: int) -> int:
        """TRL's best micro-batch for this work, by CPU seconds of a step on a quarter of the prompts."""
        took: dict[int, float] = {}
        for micro in (m for m in work.grid if m <= part_of(work).completions):
            task = self.task(work, side, threads, micro, micro, part=True)
            record = self.measured("grid", task, part_of(work))
            took[micro] = statistics.median(step["cpu"] for step in record["steps"][1:])
            print(f"  {side} {work.name}, micro-batch {micro}: {took[micro]:.2f} CPU s a step", flush=True)
        return min(took, key=lambda micro: took[micro])

    def plan(self, works: list[Work]) -> Iterator[tuple[Work, Task]]:
        """Every process, the sides in turn: in every other repeat the other one is first."""
        best: dict[tuple[str, str, int], int] = {}
        for repeat in range(self.options.repeats):
            for work in works:
                sides = [side for side in SIDES if side in (self.options.sides or work.sides)]
                sides = [side for side in sides if has_bf16_products() or not side.endswith("bf16")]
                for threads in self.options.threads:
                    for side in sides if repeat % 2 == 0 else sides[::-1]:
                        place, micro = (work.name, side, threads), 0
                        if side.startswith("trl"):
                            micro = best[place] = best.get(place) or self.micro(work, side, threads)
                        yield work, self.task(work, side, threads, repeat, micro)

    def run(self, works: list[Work]) -> None:
        """All of the plan, with what is still to come."""
        for work in works:
            self.make(work)
        plan = list(self.plan(works))
        self.store.forget("measurements", {task.kind: task.fingerprint for _, task in plan})
        waiting = [(work, task) for work, task in plan if self.store.known("measurements", task) is None]
        print(f"{len(plan)} measurements, {len(waiting)} to be taken", flush=True)
        known = self.store.section("measurements")
        for i, (work, task) in enumerate(waiting):
            record = self.measured("measurements", task, work)
            seconds: dict[str, list[float]] = {}
            for key, value in known.items():
                seconds.setdefault(key.rpartition("/")[0], []).append(value["seconds"])
            left, guessed = remaining([t for _, t in waiting[i + 1 :]], seconds)
            cpu = statistics.median(step["cpu"] for step in record["steps"][1:])
            eta = f"{'about ' * guessed}{in_words(left)} to go"
            print(
                f"[{i + 1}/{len(waiting)}] {task.key}: {cpu:.2f} CPU s, {record['peak_mib']:.0f} MiB; {eta}", flush=True
            )


def main() -> None:
    options = parse(__doc__ or "")
    versus = Versus(options)
    works = [quick(work) if options.quick else work for work in chosen(list(options.only))]
    if not options.page:
        versus.store.put("about", "machine", describe())
        versus.run(works)
    print(publish(versus.store, ROOT, options.quick))


if __name__ == "__main__":
    main()
