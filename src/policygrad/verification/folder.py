"""Checks of a run's files against each other, without loading its model."""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from policygrad.checkpoint.format import Checkpoint, list_checkpoints, load_checkpoint, open_tensors
from policygrad.errors import CheckpointError, RunError
from policygrad.findings import Finding, differs, holds, not_checked
from policygrad.learners.local.optimizer import MOMENT_PREFIXES
from policygrad.trackers.jsonl import COMPLETIONS, METRICS, NOTES, RunNote, read_rows, summarise_notes
from policygrad.training.config.run import Run
from policygrad.training.step_records import BEFORE, FOLDER
from policygrad.utils.filesystem import read_json

MIN_SURPRISE = 30.0
"""Nats. A step's completions repeat those of another by chance with a probability below e to the minus this."""


@dataclass(frozen=True, eq=False)
class RunFiles:
    """The contents of a run's folder."""

    folder: Path
    run: Run
    metrics: Mapping[int, Mapping[str, float]]
    """Step → its metrics; evaluations are merged into the step they follow."""
    repeated_steps: Mapping[int, int]
    """Steps with more than one line of training metrics, and how many they have."""
    completions: Mapping[int, Sequence[Mapping[str, Any]]]
    """Step → its rows."""
    checkpoints: Sequence[Checkpoint]
    """Those that are intact, newest first; of their tensors only AdamW's counters are read, for the others may be large."""
    states_before: Sequence[Checkpoint]
    """States before recorded steps, likewise."""
    damaged: Sequence[str]
    """A sentence about each of these that is damaged."""
    unreadable: int
    """Lines of the logs that are no rows."""
    notes: tuple[RunNote, ...] = ()
    """What the run noted, the most frequent first."""

    @property
    def steps(self) -> int:
        """Number of the last step."""
        return max((step for step, row in self.metrics.items() if "tokens/sampled" in row), default=0)


def read_files(folder: Path, run: Run) -> RunFiles:
    """Read a run's logs and checkpoints.

    Raises:
        RunError: The run has no log.
    """
    metrics: dict[int, dict[str, float]] = defaultdict(dict)
    trained, unreadable = Counter[int](), 0
    completions: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    try:
        for _, row in read_rows(folder / METRICS):
            if row is None:
                unreadable += 1
                continue
            trained[row["step"]] += "tokens/sampled" in row
            metrics[row["step"]] |= {name: x for name, x in row.items() if isinstance(x, int | float)}
        for _, row in read_rows(folder / COMPLETIONS):
            if row is None:
                unreadable += 1
            else:
                completions[row["step"]].append(row)
        noted = [row for _, row in read_rows(folder / NOTES) if row] if (folder / NOTES).exists() else []
    except OSError as error:
        raise RunError(
            f"{error.filename} cannot be read: {error.strerror}. A run that took no step has none"
        ) from error
    damaged = list[str]()

    def load_all(place: Path) -> Iterator[Checkpoint]:
        for path in list_checkpoints(place):
            try:
                yield load_checkpoint(path, keep_on_meta=lambda name: not name.endswith("/step"))
            except CheckpointError as error:
                damaged.append(str(error))

    checkpoints, before = [*load_all(folder / "checkpoints")], [*load_all(folder / FOLDER / BEFORE)]
    repeated = {step: count for step, count in trained.items() if count > 1}
    notes = summarise_notes(noted)
    return RunFiles(folder, run, metrics, repeated, completions, checkpoints, before, damaged, unreadable, notes)


def check_files(files: RunFiles) -> Iterator[Finding]:
    """Check everything that a run's files say about each other."""
    yield _check_steps(files)
    yield from _check_groups(files)
    yield _check_sums(files)
    yield _check_repetitions(files)
    yield from _check_checkpoints(files)
    yield _check_model(files)
    yield _check_result(files)
    yield _check_probes(files)


def _check_steps(files: RunFiles) -> Finding:
    steps = sorted(step for step, row in files.metrics.items() if "tokens/sampled" in row)
    missing = sorted(set(range(1, files.steps + 1)) - set(steps))
    without_rows = [step for step in steps if not files.completions.get(step)]
    if files.unreadable:
        return differs("log", f"{files.unreadable} lines of {METRICS} or {COMPLETIONS} are unreadable")
    if files.repeated_steps:
        step, count = next(iter(files.repeated_steps.items()))
        return differs("log", f"step {step} is logged {count} times")
    if not files.steps:
        return not_checked("log", "no step was finished")
    if missing:
        return differs("log", f"{_list_steps(missing)} missing in {METRICS}")
    if without_rows:
        return differs("log", f"{_list_steps(without_rows)} missing in {COMPLETIONS}")
    return holds("log", f"steps 1 to {files.steps} are logged once each, with their completions")


def _list_steps(steps: Sequence[int]) -> str:
    verb = "is" if len(steps) == 1 else "are"
    named = ", ".join(map(str, steps[:5])) + (" and more" if len(steps) > 5 else "")
    return f"step{'s' * (len(steps) > 1)} {named} {verb}"


def _check_groups(files: RunFiles) -> Iterator[Finding]:
    """Check that every step has all its groups, each with all its completions."""
    run = files.run
    if run.algorithm.replaces_rows:
        yield not_checked("groups", "a vine's groups have any number of completions")
        return
    if not files.completions:
        yield not_checked("groups", "no completion was logged")
        return
    for step, rows in files.completions.items():
        sizes = Counter(row["group"] for row in rows if "group" in row)
        names = sorted(sizes)
        if names != list(range(len(names))):
            gap = next(i for i, name in enumerate([*names, -1]) if name != i)
            yield differs("groups", f"group {gap} is missing in {COMPLETIONS}", step)
            return
        if len(names) != run.prompts_per_step:
            text = f"{len(names)} groups are logged, and the run has {run.prompts_per_step} prompts per step"
            yield differs("groups", text, step)
            return
        usual = Counter(sizes.values()).most_common(1)[0][0]
        smaller = [name for name in names if sizes[name] != usual]
        if smaller:
            text = f"group {smaller[0]} has {sizes[smaller[0]]} completions, and most groups have {usual}"
            yield differs("groups", text, step)
            return
    number = sum(len({row.get("group") for row in rows}) for rows in files.completions.values())
    yield holds("groups", f"{number:,} groups are complete: {run.prompts_per_step} per step")


def _check_sums(files: RunFiles) -> Finding:
    """Check that a step's metrics are those of its completions, where everything sampled was trained on, and nothing else."""
    compared, has_extra_samples = 0, any(part.extra_samples for part in files.run.algorithm.parts())
    for step, rows in files.completions.items():
        logged = files.metrics.get(step, {})
        has_earlier = logged.get("dynamic/leftover") or logged.get("replay/used")
        complete = logged.get("completions/sampled") == len(rows) and not has_earlier
        if not complete or any(row.get("demonstration") for row in rows):
            continue
        lengths = [row["tokens"] for row in rows]
        rewards = [row["reward"] for row in rows if row.get("reward") is not None]
        expected = {
            "tokens/sampled": float(sum(lengths)),
            "completions/max_length": float(max(lengths)),
            "completions/mean_length": sum(lengths) / len(lengths),
            "completions/truncated_ratio": sum(map(bool, (row["truncated"] for row in rows))) / len(rows),
        }
        if rewards and "reward" in logged:
            expected["reward"] = sum(rewards) / len(rewards)
        for name, value in expected.items():
            if name == "tokens/sampled" and has_extra_samples:
                continue
            if name in logged and abs(logged[name] - value) > 1e-5 * max(1.0, abs(value)):
                return differs("sums", f"{name} is {logged[name]:.7g}, and its completions give {value:.7g}", step)
        compared += 1
    if not compared:
        return not_checked("sums", "every step sampled more completions than it trained on")
    return holds("sums", f"tokens, lengths and rewards of {compared} steps are those of their completions")


def _check_repetitions(files: RunFiles) -> Finding:
    """Check that no rollout was trained on in two steps."""
    seen = dict[str, int]()
    unclear = 0
    for step, rows in sorted(files.completions.items()):
        sampled = sum(row["tokens"] for row in rows)
        if files.metrics.get(step, {}).get("entropy", 0.0) * sampled < MIN_SURPRISE:
            unclear += 1
            continue
        text = json.dumps([(row.get("prompt"), row.get("completion")) for row in rows], default=str)
        digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
        if digest in seen:
            return differs(
                "repetitions", f"its completions are those of step {seen[digest]}: they were trained twice", step
            )
        seen[digest] = step
    if not seen:
        return not_checked("repetitions", "the policy is so certain that equal completions prove nothing")
    more = f" ({unclear} with too certain a policy to tell)" if unclear else ""
    return holds("repetitions", f"no two of {len(seen)} steps trained on the same completions{more}")


def _check_checkpoints(files: RunFiles) -> Iterator[Finding]:
    for text in files.damaged:
        yield differs("checkpoints", text)
    if not files.checkpoints:
        if not files.damaged:
            yield not_checked("checkpoints", "the run has none")
        return
    for saved in (*files.checkpoints, *files.states_before):
        counted = [row.get("tokens/sampled", 0.0) for step, row in files.metrics.items() if 0 < step <= saved.step]
        if len(counted) == saved.step and int(sum(counted)) != saved.state.get("tokens"):
            name = f"{saved.path.parent.name}/{saved.path.name}"
            text = f"{name} counts {saved.state.get('tokens'):,} tokens and the log {int(sum(counted)):,}"
            yield differs("checkpoints", text)
            return
        if text := _describe_optimizer(files, saved):
            yield differs("checkpoints", text)
            return
    names = ", ".join(saved.path.name for saved in files.checkpoints)
    yield holds("checkpoints", f"{names}: every file has its sha256; tokens and updates are those of the log")


def _describe_optimizer(files: RunFiles, saved: Checkpoint) -> str:
    """Return what is wrong with the optimizer's counters, or ""."""
    learner = saved.state.get("learner")
    if not isinstance(learner, Mapping) or not isinstance(learner.get("optimizer"), Mapping):
        return ""
    rows = [row for step, row in files.metrics.items() if 0 < step <= saved.step and "tokens/sampled" in row]
    logged = sum(row.get("updates/taken", 0.0) for row in rows)
    is_plain = not any(
        "guard/undone" in row or row.get("guard/alarms") or row.get("reference/refreshed") for row in rows
    )
    counters = [int(x) for n, x in saved.tensors.items() if n.startswith(MOMENT_PREFIXES) and n.endswith("/step")]
    if not is_plain or len(rows) != saved.step or not counters:
        return ""
    if max(counters) != int(logged):
        what = "its moments were reset" if max(counters) < logged else "more updates were made than logged"
        name = f"{saved.path.parent.name}/{saved.path.name}"
        return f"{name}: the optimizer counted {max(counters)} updates and the log {int(logged)}: {what}"
    return ""


def _check_model(files: RunFiles) -> Finding:
    """Check that the model that was written at the end is the last checkpoint's policy."""
    path = files.folder / "model" / "model.safetensors"
    if not path.is_file():
        return not_checked("model", "the run has not written one, or in several files, or as an adapter")
    if not files.checkpoints:
        return not_checked("model", "there is no checkpoint to compare it with")
    last, compared = files.checkpoints[0], 0
    try:
        with safe_open(path, framework="pt") as stored, open_tensors(last.path) as saved:
            names = set(stored.keys())
            for key in saved.names:
                name = key.removeprefix("weights/")
                if key.startswith("weights/") and name in names:
                    written, weight = stored.get_tensor(name), saved.read(key)
                    if not bool((written == weight.to(written.dtype)).all()):
                        return differs("model", f"{name} of {path.parent.name} is not that of {last.path.name}")
                    compared += 1
    except (OSError, SafetensorError) as error:
        return differs("model", f"{path} cannot be read: {error}")
    if not compared:
        return not_checked("model", "its tensors have other names than the checkpoint's")
    return holds("model", f"{compared} tensors of {path.parent.name} are those of {last.path.name}")


def _check_result(files: RunFiles) -> Finding:
    path = files.folder / "result.json"
    if not path.is_file():
        return not_checked("result", "the run is not finished")
    try:
        result = read_json(path)
        steps, tokens = result["steps"], result["tokens"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return differs("result", f"{path.name} cannot be read: {error!r}")
    counted = int(sum(row.get("tokens/sampled", 0.0) for row in files.metrics.values()))
    if steps != files.steps or tokens != counted:
        text = f"{path.name} has {steps} steps and {tokens:,} tokens, the log {files.steps} and {counted:,}"
        return differs("result", text)
    return holds("result", f"{steps} steps and {tokens:,} tokens, as in the log")


def _check_probes(files: RunFiles) -> Finding:
    """Check that an engine was probed after every publication of weights."""
    engine = files.run.sampler.engine
    probes = {
        step: row["publication/probe_max"] for step, row in files.metrics.items() if "publication/probe_max" in row
    }
    if not probes:
        return not_checked("probes", f"the sampler is {engine}, which has no weights of its own to probe")
    steps = {step for step, row in files.metrics.items() if "tokens/sampled" in row}
    if missing := sorted(steps - probes.keys()):
        return differs("probes", f"no probe followed the publication after {_list_steps(missing)}")
    step = max(probes, key=lambda step: probes[step])
    return holds("probes", f"one after every publication; the worst, of step {step}, {probes[step]:.2g} nats")
