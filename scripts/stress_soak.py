"""The soak: one long run that is never killed and is watched, one that is killed again and again; docs/results/soak.json.

python scripts/stress_soak.py [--steps 2000] [--kills 200] [--minutes N] [--only RUN] [--folder DIR] [-- TRAIN_OPTIONS]

1. `policygrad train` as it is, never killed. Every few steps: resident memory of trainer and reward workers, open descriptors,
   threads, processes, files. After a warm-up they have to stay as they are, memory within 2 %.
2. The same with SIGKILL at random moments: while it starts, loads, measures, samples, judges, learns, saves; of many kills some
   must have fallen into each. Each time it is taken up again by --resume. No process may stay behind, no more steps be lost than
   there are between two checkpoints, and the newest checkpoint has to be whole, not one that is passed over in silence.
3. At the end weights and optimiser are bit for bit those of the first run; metrics (times aside) and completions are equal,
   every step is there once, and there are the same files. Neither run has printed a traceback.

In parts: what the folder holds already is not done again, so the script may be stopped and started at will, and --minutes stops it
by itself with exit code 75. The first run is one process, which is what it is for: it is done in one go, or begins anew. With
--only watched in one terminal and --only killed in another both go on at once, and the command without it compares them. Parts have
to be of the same options and the same code. What did not hold once is not forgotten by going on. Exit code 1: something that is
promised does not hold, and the file says what. On Linux.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import platform
import random
import shlex
import shutil
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import policygrad
from policygrad.checkpoint.format import load_latest
from policygrad.errors import CheckpointError
from stress_processes import Watched, adopt, held, left_behind

GROWTH = 0.02
"""By how much memory may change, as a share."""
PARTS = 5
"""Of the watched run, whose medians are compared."""
ENOUGH = 10
"""Looks in each part; of fewer a median says nothing, and nothing is judged."""
PHASES = ("starting", "loading", "evaluating", "sampling", "updating", "saving")
"""In which a run is long enough for kills to fall there."""
MANY = 100
"""Kills, of which some must have fallen into each of those."""


def rows(path: Path) -> list[dict[str, Any]]:
    """JSON Lines; the last line may be torn."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def logged(folder: Path) -> int:
    """The last step in a run's log; 0 without one. It reads the file's end only, as it is asked many times a second."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return 0
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 2**16))
        lines = file.read().split(b"\n")[:-1]
    return int(json.loads(lines[-1])["step"]) if lines else 0


def saved(folder: Path) -> int:
    """The step of the newest checkpoint; 0 without one."""
    return max((int(path.name[5:]) for path in folder.glob("checkpoints/step-*") if path.name[5:].isdigit()), default=0)


def unfinished(run: Path) -> set[tuple[str, int]]:
    """What is being written in a run's folder, or was when it was killed."""
    found = set()
    for path in (*run.glob(".tmp-*"), *run.glob("checkpoints/.tmp-*")):
        with contextlib.suppress(OSError):  # it is whole, and has its name
            found.add((path.name, path.stat().st_ino))
    return found


def untimed(found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Metrics without what a clock decides."""
    return [{k: v for k, v in row.items() if "time" not in k and "per_second" not in k} for row in found]


def files(folder: Path) -> set[str]:
    """Of a run, by their names in its folder."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def same_bits(a: Path, b: Path) -> bool:
    """Whether two safetensors files hold the same names, and the same bits under them."""
    one, other = load_file(a), load_file(b)
    return one.keys() == other.keys() and all(
        (one[k].dtype, one[k].shape) == (other[k].dtype, other[k].shape)
        and torch.equal(one[k].contiguous().view(torch.uint8), other[k].contiguous().view(torch.uint8))
        if one[k].dim()
        else torch.equal(one[k], other[k])
        for k in one
    )


def differences(full: Path, pieces: Path, steps: int) -> list[str]:
    """In what a run that was killed again and again is another than the one that never was; empty: in nothing."""
    found = []
    if odd := files(full) ^ files(pieces):
        return [f"files that only one of the runs has: {', '.join(sorted(odd)[:5])}"]
    for name in ("model/model.safetensors", f"checkpoints/step-{steps:06d}/tensors.safetensors"):
        if not same_bits(full / name, pieces / name):
            found.append(f"{name} differs")
    for name in ("metrics.jsonl", "completions.jsonl"):
        one, other = untimed(rows(full / name)), untimed(rows(pieces / name))
        if one != other:
            line = next((i for i, (a, b) in enumerate(zip(one, other, strict=False), 1) if a != b), "the last")
            found.append(f"{name} differs from line {line} on ({len(one)} and {len(other)} lines)")
    done = [row["step"] for row in rows(pieces / "metrics.jsonl") if "reward" in row]
    if done != list(range(1, steps + 1)):
        found.append(f"not every step is logged once: {len(done)} lines, {len({*done})} steps")
    ends = [json.loads((folder / "result.json").read_text()) for folder in (full, pieces)]
    odd = {k for k in ends[0] if k not in ("seconds", "peak_memory_mib") and ends[0][k] != ends[1].get(k)}
    return found + [f"result.json differs in {k}" for k in sorted(odd)]


def course(values: Sequence[float]) -> dict[str, float]:
    """What a quantity did after the warm-up, a tenth of the run: medians of its fifths, how far they are apart as a share of the
    least, how much the last is above the first."""
    after = values[max(1, len(values) // 10) :]
    size = len(after) / PARTS
    medians = [statistics.median_low(after[round(i * size) : round((i + 1) * size)]) for i in range(PARTS)]
    apart = (max(medians) - min(medians)) / max(min(medians), 1e-9)
    return {
        "first": medians[0],
        "last": medians[-1],
        "least": min(after),
        "largest": max(after),
        "apart": apart,
        "growth": medians[-1] / max(medians[0], 1e-9) - 1,
    }


def unsteady(courses: Mapping[str, Mapping[str, float]]) -> list[str]:
    """What did not stay as it was: memory by more than 2 %, numbers of things at all."""
    found = []
    for name, seen in courses.items():
        if seen["apart"] > (GROWTH if name.endswith("_mib") else 0.0):
            found.append(f"{name} is not constant: {seen['first']:.1f} at first, {seen['last']:.1f} at last")
    return found


def damaged(run: Path) -> list[str]:
    """What is said of a run's checkpoints by whoever would go on with it; empty: the newest is whole, or there is none yet."""
    record = list[str]()
    try:
        load_latest(run / "checkpoints", warn=record.append)
    except CheckpointError as error:
        record.append(str(error))
    return record


def wrong(
    line: Mapping[str, Any], before: Sequence[Mapping[str, Any]], every: int, record: Sequence[str]
) -> str | None:
    """What a kill has cost that it may not have. every: steps between checkpoints. said: of the checkpoints, as `damaged` does."""
    which = f"kill {line['kill']} ({line['phase']})"
    if line["step"] - line["saved"] > every:
        return f"{which} lost {line['step'] - line['saved']} steps"
    if before and line["saved"] < before[-1]["saved"]:
        return f"{which}: checkpoints went back from {before[-1]['saved']} to {line['saved']}"
    return f"{which} left a checkpoint that is not whole: {record[0]}" if record else None


def missed(phases: Iterable[str], kills: int) -> list[str]:
    """The phases into which none of many kills has fallen, so that nothing is known of them."""
    return [f"no kill fell into: {name}" for name in PHASES if name not in set(phases)] if kills >= MANY else []


def code() -> str:
    """Of the package as it is: what is gone on with in parts has to be the same in all of them."""
    files = sorted(Path(policygrad.__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()[:12]


ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results" / "soak.json"
LEAVES = 20.0
"""Seconds after which what a killed run has started must have ended."""
SAVE = 0.02
"""Seconds of a save within which those kills fall that are meant for it; it takes some 10 to 50 ms."""
STUCK = 1800.0
"""Seconds without a step after which a run counts as hanging."""


PAUSED = 75
"""Exit code of a part that is over, and not the last."""
PACED = 20
"""Steps of the short run that says how long a start, a step and an end take, for the moments of the kills."""
AIMED = 0.04
"""The share of kills that are aimed at a held-out evaluation, which few steps have."""


class Broken(Exception):
    """A promise that does not hold, so that nothing further can be seen."""


class Paused(Exception):
    """The time of this part is up."""


@dataclass(frozen=True)
class Pace:
    """Of a short run that is never killed, in seconds: until its first step is logged, per step, from the last step to the end."""

    start: float
    step: float
    end: float


@dataclass(frozen=True)
class Moment:
    """When to kill: so many seconds after that step is in the log; step None: after the process began. saving: after it has then
    begun to write a checkpoint, or the model."""

    step: int | None
    seconds: float
    saving: bool = False


def moment(draw: random.Random, at: int, steps: int, kills_left: int, pace: Pace, evaluated: int) -> Moment:
    """A moment to kill a run that goes on from step `at`: within what it starts with, within a step, or after the last one; a
    fifth of them while it saves, which takes so little of a step that few would fall there, and some while it evaluates, every
    `evaluated` steps. The steps that are left are spread over the kills that are left, so that the kills cover the whole run."""
    ahead, share, saving = draw.randint(0, 2 * (steps - at) // max(kills_left, 1)), draw.random(), draw.random() < 0.2
    if draw.random() < AIMED and at < steps:
        return Moment(min(steps, (at // evaluated + 1) * evaluated), share * min(pace.step, pace.end))
    if saving:
        return Moment(min(at + ahead, steps) if ahead else None, share * SAVE, saving)
    if at >= steps:
        return Moment(None, share * (pace.start + pace.end))
    if ahead == 0:
        return Moment(None, share * (pace.start + pace.step))
    if at + ahead >= steps:
        return Moment(steps, share * pace.end)
    return Moment(at + ahead, share * pace.step)


class Soak:
    """Two runs in a folder, and what is known of them."""

    def __init__(
        self,
        folder: Path,
        steps: int,
        kills: int,
        seed: int,
        every: int,
        watch: int,
        options: Sequence[str],
        minutes: float | None = None,
    ):
        """every: steps between checkpoints. watch: steps between two looks at the first run. options: further ones of train.
        minutes: after which no further kill is begun."""
        self.folder, self.steps, self.kills, self.seed, self.every, self.watch = (
            folder,
            steps,
            kills,
            seed,
            every,
            watch,
        )
        self.evaluated = max(1, steps // 20)
        given = [
            "--steps",
            steps,
            "--seed",
            seed,
            "--checkpoint.every",
            every,
            "--evaluation.every",
            self.evaluated,
        ]
        self.words = [*map(str, given), *options]
        self.whole, self.pieces = folder / "whole", folder / "pieces"
        self.began = time.monotonic()
        self.over = None if minutes is None else self.began + 60 * minutes

    def launch(self, run: Path, *more: str) -> Watched:
        """The command in this folder: anew, or on with what is there. more: options of a run that is anew."""
        temporary = self.folder / "tmp" / run.name
        temporary.mkdir(parents=True, exist_ok=True)
        begun = (run / "run.toml").exists()
        words = ["--resume", str(run)] if begun else [*self.words, *more, "--output", str(run)]
        with (self.folder / f"{run.name}.log").open("a") as log:
            environment = {**os.environ, "TMPDIR": str(temporary)}
            return Watched(["train", *words, "--plain"], self.folder / f"told-{run.name}", log, environment)

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.began:7.0f}s  {text}", flush=True)

    def until(self, process: Watched, run: Path, step: int, look: Any = lambda at: None) -> bool:
        """Waits until the step is in the log; False when the process has ended before. look: is called with every new step."""
        at, moved = -1, time.monotonic()
        while process.code is None:
            if (now := logged(run)) != at:
                at, moved = now, time.monotonic()
                look(at)
            if at >= step:
                return True
            if time.monotonic() - moved > STUCK:
                process.kill()
                raise Broken(f"{run.name} has hung for {STUCK:.0f} s after step {at}")
            time.sleep(0.005)
        return False

    def ended(self, process: Watched, run: Path) -> None:
        """Waits for the end of a run that is not killed."""
        deadline = time.monotonic() + STUCK
        while process.code is None and time.monotonic() < deadline:
            time.sleep(0.005)
        if process.code != 0:
            tail = (self.folder / f"{run.name}.log").read_text(errors="replace").splitlines()[-3:]
            raise Broken(f"{run.name} ended with exit code {process.code}: {' / '.join(tail)}")
        if there := left_behind(LEAVES):
            raise Broken(f"{run.name} has ended and left processes: {'; '.join(there)}")

    def pace(self) -> Pace:
        """Of a short run, which is deleted."""
        kept, run = self.folder / "pace.json", self.folder / "short"
        if kept.exists():
            return Pace(**json.loads(kept.read_text()))
        shutil.rmtree(run, ignore_errors=True)
        steps, times = min(PACED, self.steps), dict[int, float]()
        process = self.launch(run, "--steps", str(steps))
        try:
            self.until(process, run, steps, lambda at: times.setdefault(at, time.monotonic() - process.began))
            self.ended(process, run)
        finally:
            process.process.kill()
        end = time.monotonic() - process.began
        last = times.get(steps, end)
        first = times.get(1, last)
        pace = Pace(first, (last - first) / max(steps - 1, 1), end - last)
        shutil.rmtree(run)
        kept.write_text(json.dumps(asdict(pace)) + "\n")
        self.say(f"a start takes {pace.start:.1f} s, a step {pace.step:.2f}, an end {pace.end:.1f}")
        return pace

    def watched(self) -> dict[str, Any]:
        """The run that is never killed: what it held, look by look."""
        kept = self.folder / "whole.json"
        if kept.exists():
            return dict(json.loads(kept.read_text()))
        shutil.rmtree(self.whole, ignore_errors=True)
        seen = list[dict[str, float]]()
        process = self.launch(self.whole)

        def look(at: int) -> None:
            if at and at % self.watch == 0:
                temporary = sum(path.is_file() for path in (self.folder / "tmp" / "whole").rglob("*"))
                seen.append({"step": at, **held(process.process.pid, self.whole), "temporary": temporary})
            if at and at % max(1, self.steps // 20) == 0:
                reported = "".join(f"  {k} {v:.0f}" for k, v in seen[-1].items() if k != "step") if seen else ""
                self.say(f"never killed: step {at}/{self.steps}{reported}")

        try:
            self.until(process, self.whole, self.steps, look)
            self.ended(process, self.whole)
        finally:
            process.process.kill()
        found = {"seconds": time.monotonic() - process.began, "seen": seen}
        kept.write_text(json.dumps(found) + "\n")
        return found

    def killed(self) -> list[dict[str, Any]]:
        """The run that is killed again and again, and at last ends; a line per kill."""
        kept, lives, pace = self.folder / "kills.jsonl", 0, self.pace()
        found = rows(kept)
        while len(found) < self.kills:
            if self.over is not None and time.monotonic() > self.over:
                raise Paused(f"{len(found)} of {self.kills} kills are done; the same command goes on")
            lives += 1
            if lives > 3 * self.kills + 10:
                raise Broken(f"{len(found)} kills in {lives} attempts: the run ends before it is killed")
            line = self._life(len(found) + 1, pace, found)
            if line is not None:
                found.append(line)
                with kept.open("a") as file:
                    file.write(json.dumps(line) + "\n")
                self._progress(line, found, pace)
        process = self.launch(self.pieces)
        try:
            self.ended(process, self.pieces)
        finally:
            process.process.kill()
        return found

    def _life(self, number: int, pace: Pace, before: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
        """From a start to a kill; None when it ended by itself before that."""
        at = max(logged(self.pieces), saved(self.pieces))
        draw = random.Random(f"{self.seed} {number} {at}")
        when = moment(draw, at, self.steps, self.kills - number + 1, pace, self.evaluated)
        old = unfinished(self.pieces)
        process = self.launch(self.pieces)
        try:
            if when.step is not None:
                self.until(process, self.pieces, when.step)
            while when.saving and process.code is None and unfinished(self.pieces) <= old:
                time.sleep(0.001)
            deadline = time.monotonic() + when.seconds
            while process.code is None and time.monotonic() < deadline:
                time.sleep(0.001)
            if process.code is not None:
                self.ended(process, self.pieces)
                return None
        finally:
            phase = process.kill() if process.code is None else "ended"
        if unfinished(self.pieces) - old:
            phase = "saving"
        clock = time.monotonic()
        if there := left_behind(LEAVES):
            raise Broken(f"kill {number} ({phase}) left processes: {'; '.join(there)}")
        line = {"kill": number, "phase": phase, "step": logged(self.pieces), "saved": saved(self.pieces)}
        gone = round(time.monotonic() - clock, 3)
        if text := wrong(line, before, self.every, damaged(self.pieces)):
            raise Broken(text)
        return line | {"gone_after": gone}

    def _progress(self, line: Mapping[str, Any], found: Sequence[Any], pace: Pace) -> None:
        left = (self.steps - line["saved"]) * pace.step + (self.kills - len(found)) * (pace.start + pace.step)
        reported = f"kill {len(found)}/{self.kills}  {line['phase']:13}  step {line['step']}/{self.steps}"
        self.say(f"{reported}  saved {line['saved']}  left about {left / 60:.0f} min")

    def part(self, name: str) -> None:
        """One of both runs. Raises Paused when it is done, as what it is compared with may not be."""
        try:
            {"watched": self.watched, "killed": self.killed}[name]()
        except Broken as error:
            self._ever([str(error)])
            raise Paused(f"the run that is {name}: {error}") from error
        raise Paused(f"the run that is {name} has ended: without --only both are compared")

    def report(self) -> dict[str, Any]:
        """All of it. What does not hold is in `broken`, and the rest is what was seen until then."""
        record: dict[str, Any] = {
            "made_by": "python scripts/stress_soak.py",
            "command": shlex.join(["policygrad", "train", *self.words]),
            "versions": {"python": platform.python_version()}
            | {name: version(name) for name in ("policygrad", "torch", "transformers", "safetensors")},
            "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
            "steps": self.steps,
            "checkpoint_every": self.every,
            "looks_every": self.watch,
            "code": code(),
        }
        try:
            found = self.watched()
            seen = found["seen"]
            courses = (
                {k: course([look[k] for look in seen]) for k in seen[0] if k != "step"}
                if len(seen) >= 2 * PARTS
                else {}
            )
            judged = len(seen) * 0.9 >= PARTS * ENOUGH
            record |= {"seconds": round(found["seconds"]), "looks": len(seen), "judged": judged, "held": courses}
            kills = self.killed()
            gone = max((line["gone_after"] for line in kills), default=0.0)
            phases = dict(Counter(line["phase"] for line in kills).most_common())
            record |= {"kills": len(kills), "phases": phases, "slowest_to_be_gone": gone}
            broken = (unsteady(courses) if judged else []) + differences(self.whole, self.pieces, self.steps)
            broken += missed(phases, len(kills))
            for run in (self.whole, self.pieces):
                if "Traceback" in (self.folder / f"{run.name}.log").read_text(errors="replace"):
                    broken.append(f"{run.name} has printed a traceback, see {run.name}.log")
            left = [
                {path.name for path in (self.folder / "tmp" / run.name).iterdir()} for run in (self.whole, self.pieces)
            ]
            if odd := left[1] - left[0]:
                broken.append(f"temporary files stayed: {', '.join(sorted(odd)[:5])}")
        except Broken as error:
            broken = [str(error)]
        return record | {"broken": self._ever(broken)}

    def _ever(self, broken: Sequence[str]) -> list[str]:
        """With what did not hold in a part before."""
        kept = self.folder / "broken.json"
        before = json.loads(kept.read_text()) if kept.exists() else []
        found = [*before, *(text for text in broken if text not in before)]
        kept.write_text(json.dumps(found))
        return found


def main(words: Sequence[str] | None = None) -> int:
    """Both runs, then the file; 1 where something promised does not hold."""
    given = list(sys.argv[1:] if words is None else words)
    cut = given.index("--") if "--" in given else len(given)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the run, and of the moments of the kills")
    parser.add_argument("--every", type=int, default=2, help="steps between checkpoints")
    parser.add_argument("--watch", type=int, default=10, help="steps between two looks at the run that is never killed")
    parser.add_argument(
        "--minutes", type=float, help="begin no further kill after so many, and say so with exit code 75"
    )
    parser.add_argument("--only", choices=("watched", "killed"), help="this run alone, so that both may go on at once")
    parser.add_argument("--folder", type=Path, default=Path("runs/soak"), help="where both runs go")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args(given[:cut])
    adopt()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped; the same command goes on"))  # and its run ends with it
    soak = Soak(args.folder, args.steps, args.kills, args.seed, args.every, args.watch, given[cut + 1 :], args.minutes)
    asked, known = json.dumps([soak.words, code()]), args.folder / "asked.json"
    args.folder.mkdir(parents=True, exist_ok=True)
    if known.exists() and known.read_text() != asked:
        sys.exit(f"{args.folder} holds a soak with other options or of other code: another --folder, or delete it")
    known.write_text(asked)
    try:
        if args.only:
            soak.part(args.only)
        record = soak.report()
    except Paused as pause:
        print(f"{pause}", flush=True)
        return PAUSED
    args.results.parent.mkdir(parents=True, exist_ok=True)
    args.results.write_text(json.dumps(record, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({k: v for k, v in record.items() if k != "versions"}, indent=1))
    return 1 if record["broken"] else 0


if __name__ == "__main__":
    sys.exit(main())
