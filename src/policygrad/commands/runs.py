"""`policygrad runs [FOLDER]`: the runs below a folder, how far each is, and what came out of it."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal, TypedDict

import tyro

from policygrad.commands.json_output import print_json, prints
from policygrad.commands.parsing import parse_arguments
from policygrad.commands.styled import HEAD, NAME, QUIET, StyledLine, print_lines
from policygrad.errors import RunError
from policygrad.trackers.console import format_duration
from policygrad.utils.filesystem import is_locked, iter_lines_backwards, open_regular, parse_json, read_json, read_toml

# report/data.py has the same the other way round, and imports torch, which a list of runs should not wait for.
CONFIG_FILES = {"run.toml": "train", "sft.toml": "sft", "reward-model.toml": "reward-model"}
State = Literal["running", "finished", "stopped", "failed"]
RECENT = 20  # steps of which the median duration says how long the others will take
MAX_DEPTH = 6  # folders below the given one: a comparison's runs are four below its own
_COLOURS = {"running": "green", "failed": "red", "stopped": "yellow", "finished": ""}


@dataclass(frozen=True)
class RunsOptions:
    """List the runs below a folder, the newest first: algorithm, step, result, state, age, and the time that is left. A run is
    running, finished, stopped (its last step is saved: --resume continues there) or failed (it ended without that)."""

    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="[FOLDER]")] = Path("runs")
    """Folder of runs, or of one."""
    json: bool = False
    """Print one JSON object."""


@dataclass(frozen=True)
class RunStatus:
    """A run."""

    name: str
    """Its folder, below the given one."""
    path: str
    kind: str
    """The command that trains it: train, sft or reward-model."""
    algorithm: str
    """Name of the algorithm; of sft and reward-model, the kind."""
    state: State
    step: int
    """Steps done."""
    steps: int | None
    """All steps; null = not known yet."""
    metric: str
    """What `before` and `value` are: eval/reward, or the last step's reward or loss; empty = there is none."""
    before: float | None
    """The metric before training; null = not measured."""
    value: float | None
    """The newest value."""
    age_seconds: float
    """Since the run was started, or last resumed."""
    left_seconds: float | None
    """What the steps that are left will take; null = not running, or not known."""


class RunsOutput(TypedDict):
    """The runs, the newest first."""

    runs: list[RunStatus]


@prints(RunsOutput)
def runs(args: list[str]) -> int:
    """Run `policygrad runs [FOLDER]`."""
    options = parse_arguments(RunsOptions, args, "runs")
    if not options.folder.is_dir():
        raise RunError(
            f"{options.folder} is not a folder: give one that holds runs; train writes them to runs/ALGORITHM-N"
        )
    statuses = sorted(
        (read_status(f, options.folder) for f in find_runs(options.folder)), key=lambda run: run.age_seconds
    )
    if options.json:
        print_json({"runs": [asdict(run) for run in statuses]})
    elif not statuses:
        print(f"no runs in {options.folder}")
    else:
        width = shutil.get_terminal_size((80, 24)).columns if sys.stdout.isatty() else 80
        print_lines(format_runs(statuses, max(60, width)))
    return 0


def find_runs(folder: Path, depth: int = MAX_DEPTH) -> Iterator[Path]:
    """Yield the folders of runs in a folder, itself included; nothing inside a run's own."""
    if any((folder / name).is_file() for name in CONFIG_FILES):
        yield folder
    elif depth:
        with suppress(OSError):  # one that may not be read
            for child in sorted(folder.iterdir()):
                if child.is_dir() and not child.is_symlink() and not child.name.startswith("."):
                    yield from find_runs(child, depth - 1)


def read_status(folder: Path, top: Path) -> RunStatus:
    """Read what a run's folder says of it. A file that is missing or being written counts as empty."""
    file = next(name for name in CONFIG_FILES if (folder / name).is_file())
    kind, config, result = CONFIG_FILES[file], _read(read_toml, folder / file), _read(read_json, folder / "result.json")
    rows = list(read_last_rows(folder / "metrics.jsonl", RECENT))
    step = max((row["step"] for row in rows), default=0)
    steps = config.get("steps") if kind == "train" else _count_steps(config, rows)
    state = find_state(folder, step, bool(result))
    algorithm = config.get("algorithm")
    name = algorithm.get("name") if isinstance(algorithm, Mapping) else algorithm
    metric, before, value = _choose_result(result, rows, kind)
    pace = [sum(_numbers(row, "time/rollout", "time/update", "time/step")) for row in rows]
    pace = [seconds for seconds in pace if seconds]
    left = (steps - step) * median(pace) if state == "running" and isinstance(steps, int) and pace else None
    return RunStatus(
        name=str(folder.relative_to(top)) if folder != top else folder.name,
        path=str(folder),
        kind=kind,
        algorithm=str(name or kind),
        state=state,
        step=step,
        steps=steps if isinstance(steps, int) else None,
        metric=metric,
        before=before,
        value=value,
        age_seconds=max(0.0, time.time() - (folder / file).stat().st_mtime),
        left_seconds=None if left is None else max(0.0, left),
    )


def find_state(folder: Path, step: int, is_finished: bool) -> State:
    """Return whether a process is at work in a run's folder, and otherwise how it ended. step: the last one with metrics."""
    if is_locked(folder / "lock"):
        return "running"
    if is_finished:
        return "finished"
    saved = [
        int(path.name.partition("-")[2]) for path in (folder / "checkpoints").glob("step-*") if path.name[5:].isdigit()
    ]
    return "stopped" if saved and max(saved) >= step else "failed"


def read_last_rows(path: Path, number: int) -> Iterator[dict[str, Any]]:
    """Yield the last lines of a log of metrics that are complete, the last one first."""
    with suppress(OSError), open_regular(path) as file:
        for _, line in iter_lines_backwards(file):
            with suppress(ValueError):
                row = parse_json(line)
                if isinstance(row, dict) and isinstance(row.get("step"), int):
                    yield row
                    number -= 1
            if not number:
                return


def _read(read: Any, path: Path) -> Mapping[str, Any]:
    try:
        value = read(path)
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _count_steps(config: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the steps of all passes over the data, from how far one of them is."""
    epochs = _number(config, "epochs")
    done = next(((row["step"], epoch) for row in rows for epoch in _numbers(row, "epoch") if epoch > 0), None)
    return None if epochs is None or done is None else round(done[0] * epochs / done[1])


def _choose_result(
    result: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], kind: str
) -> tuple[str, float | None, float | None]:
    """Return (metric, its value before training, its newest value)."""
    names = {"train": "eval/reward", "sft": "eval/loss", "reward-model": "eval/accuracy"}
    key = names[kind].replace("/", "_")
    before, after = _number(result, f"{key}_before"), _number(result, f"{key}_after")
    if after is not None:
        return names[kind], before, after
    for name in (names[kind], "reward" if kind == "train" else "loss"):
        if (value := next((row[name] for row in rows if _number(row, name) is not None), None)) is not None:
            return name, before, float(value)
    return "", None, None


def _number(values: Mapping[str, Any], name: str) -> float | None:
    value = values.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _numbers(values: Mapping[str, Any], *names: str) -> list[float]:
    return [number for name in names if (number := _number(values, name)) is not None]


HEADS = ("run", "algorithm", "step", "result", "state", "age", "left")


def format_runs(statuses: Sequence[RunStatus], width: int) -> list[StyledLine]:
    """Format a table within `width`. A name that is too long for its column has a line of its own."""
    rows = [
        (
            run.name,
            run.algorithm,
            str(run.step) if run.steps is None else f"{run.step}/{run.steps}",
            _format_result(run),
            run.state,
            format_duration(run.age_seconds),
            "" if run.left_seconds is None else format_duration(run.left_seconds),
        )
        for run in statuses
    ]
    sizes = [max(map(len, column)) for column in zip(HEADS, *rows, strict=True)]
    sizes[1] = min(sizes[1], max(14, width - 2 * (len(sizes) - 1) - sum(sizes) + sizes[1]))
    space = max(10, width - 2 * (len(sizes) - 1) - sum(sizes[1:]))
    sizes[0] = max([len(HEADS[0]), *(len(run.name) for run in statuses if len(run.name) <= space)])

    def format_row(cells: Sequence[str]) -> list[str]:
        texts = [shorten_middle(cell, size) for cell, size in zip(cells, sizes, strict=True)]
        is_left = (True, True, False, False, True, False, False)
        return [t.ljust(size) if left else t.rjust(size) for t, size, left in zip(texts, sizes, is_left, strict=True)]

    lines: list[StyledLine] = [(("  ".join(format_row(HEADS)).rstrip(), HEAD),)]
    for run, cells in zip(statuses, rows, strict=True):
        if len(run.name) > space:
            lines.append(((shorten_middle(run.name, width), NAME),))
            cells = ("", *cells[1:])
        name, algorithm, step, result, state, age, left = format_row(cells)
        middle = f"  {algorithm}  {step}  {result}  "
        lines.append(((name, NAME), (middle, ""), (state, _COLOURS[run.state]), (f"  {age}  {left}".rstrip(), QUIET)))
    return lines


def _format_result(run: RunStatus) -> str:
    if run.value is None:
        return ""
    name = "" if run.metric == "eval/reward" else f"{run.metric.removeprefix('eval/')} "
    return f"{name}{run.value:.2f}" if run.before is None else f"{name}{run.before:.2f} → {run.value:.2f}"


def shorten_middle(text: str, size: int) -> str:
    """Return the text with … in place of its middle, if it is longer than `size`."""
    if len(text) <= size:
        return text
    end = (size - 1) // 2
    return f"{text[: size - 1 - end]}…{text[len(text) - end :]}"
