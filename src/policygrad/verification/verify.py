"""Verify a run: check its files, then repeat steps of it and compare every stage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from policygrad.checkpoint.format import Checkpoint, list_checkpoints, load_checkpoint, parse_step
from policygrad.core.metrics import Mean, Metrics
from policygrad.errors import CheckpointError, ConfigError, PolicygradError
from policygrad.findings import Finding, Status, differs, holds, not_checked
from policygrad.samplers.config import LOCAL
from policygrad.trackers.jsonl import RunNote
from policygrad.training.config.run import Run
from policygrad.training.loop import StepResult
from policygrad.training.memory_limits import MEMORY_FILE
from policygrad.training.provenance import NON_LEARNING_PREFIXES, fingerprint_run, list_changed_options
from policygrad.training.step_log import build_completion_rows
from policygrad.training.step_records import BEFORE, FOLDER, MAX_STATE_BYTES, list_records, read_record, state_before
from policygrad.utils.progress import ProgressCallback, ignore_progress
from policygrad.verification.folder import RunFiles, check_files, read_files
from policygrad.verification.replay import (
    LoggedSteps,
    Replay,
    StepReplayer,
    check_aligned_texts,
    check_batch,
    check_reference_prompts,
    check_step,
    check_token_versions,
    compare_rows,
    has_served_teacher,
)


@dataclass(frozen=True)
class Verification:
    """The result of verifying a run."""

    folder: Path
    findings: tuple[Finding, ...]
    notes: tuple[RunNote, ...] = ()
    """What the run noted while it trained, the most frequent first."""

    @property
    def status(self) -> Status:
        """`differs` if a finding does; `holds` if at least one holds and none differs."""
        statuses = {finding.status for finding in self.findings}
        return "differs" if "differs" in statuses else "holds" if "holds" in statuses else "not checked"

    @property
    def failures(self) -> tuple[Finding, ...]:
        """The findings that differ."""
        return tuple(finding for finding in self.findings if finding.status == "differs")

    @property
    def summary(self) -> str:
        """The outcome as a sentence."""
        number = Counter(finding.status for finding in self.findings)
        steps = sorted({f.step for f in self.findings if f.step is not None and f.status != "not checked"})
        repeated = f", step{'s' * (len(steps) > 1)} {', '.join(map(str, steps))} repeated" if steps else ""
        if not self.failures:
            return f"All {number['holds']} checks hold{repeated}; {number['not checked']} could not be made."
        first = min(self.failures, key=lambda finding: finding.step or 0)
        where = f" in step {first.step}" if first.step else ""
        return (
            f"{number['differs']} of {number['differs'] + number['holds']} checks fail{repeated}. The first{where}, "
            f"{first.subject}: {first.message}."
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the report for JSON; see docs/trust.md."""
        findings = [finding.as_dict() for finding in self.findings]
        notes = [asdict(note) for note in self.notes]
        return {
            "run": str(self.folder),
            "status": self.status,
            "summary": self.summary,
            "notes": notes,
            "findings": findings,
        }


def verify_run(
    folder: Path, run: Run, steps: Sequence[int] | None = None, progress: ProgressCallback = ignore_progress
) -> Verification:
    """Check the files of a run, and repeat some of its steps.

    Args:
        run: Its configuration, as in its run.toml.
        steps: The steps to repeat; None = those of which the run has a record, or else those that follow a kept checkpoint.
            A step without a record is repeated from the last kept state before it, with all steps in between.

    Raises:
        ConfigError: A step that the run does not have.
        RunError: The run has no log.
    """
    files = read_files(folder, run)
    if wrong := [step for step in steps or () if not 1 <= step <= files.steps]:
        raise ConfigError(f"--steps {wrong[0]}: the run in {folder} has the steps 1 to {files.steps}")
    findings = [*check_files(files), *_Verifier(files, run, progress).check_steps(steps)]
    return Verification(folder, tuple(findings), files.notes)


UNUSABLE_CONTENT = (CheckpointError, AttributeError, LookupError, TypeError, ValueError, RuntimeError)
"""What reading and repeating a step raises if a file's values have other types, names or shapes; RuntimeError is torch's."""


class _Verifier:
    """Repeats steps of one run."""

    def __init__(self, files: RunFiles, run: Run, progress: ProgressCallback) -> None:
        self.files, self.run, self.progress = files, run, progress
        self.folder = files.folder

    def check_steps(self, steps: Sequence[int] | None) -> Iterator[Finding]:
        recorded = list_records(self.folder)
        if steps is None:
            after_checkpoints = [1, *(saved.step + 1 for saved in self.files.checkpoints)]
            steps = recorded or sorted({step for step in after_checkpoints if step <= self.files.steps})
        if objects := _describe_objects(self.run.object_options):
            yield not_checked("steps", objects)
            return
        with ExitStack() as stack:
            self.progress("loading the model", 0, 0)
            try:
                self.replayer = StepReplayer.load(self.run, self.folder, stack)
            except PolicygradError as error:
                yield differs("steps", f"the run cannot be loaded again: {error}")
                return
            for number, step in enumerate(steps):
                self.progress("repeating steps", number, len(steps))
                yield from self._check_step(step, is_recorded=step in recorded)
        self.progress("", 0, 0)

    def _check_step(self, step: int, *, is_recorded: bool) -> Iterator[Finding]:
        """Repeat one step. Whoever changes a file and seals its folder again can put anything into it."""
        try:
            yield from self._check_recorded(step) if is_recorded else self._check_logged(step)
        except UNUSABLE_CONTENT as error:
            subject = "record" if is_recorded else "steps"
            text = (
                f"the files of this step hold what no run has written ({type(error).__name__}: {str(error)[:200]}): they were "
                "changed after they were written, or another version wrote them"
            )
            yield differs(subject, text, step)

    def _check_recorded(self, step: int) -> Iterator[Finding]:
        try:
            record = read_record(self.folder, step, self.replayer.resources.task.train_example)
        except CheckpointError as error:
            yield differs("record", str(error), step)
            return
        algorithm = self.replayer.config.algorithm
        yield check_batch(record, algorithm.all_needs)
        yield check_token_versions(record)
        if algorithm.reference is not None and algorithm.reference.templates:
            yield check_reference_prompts(record, algorithm.reference, self.replayer.resources.tokenizer)
        if algorithm.reference is not None and algorithm.reference.tokenizer is not None:
            sampling = self.replayer.config.sampling
            yield check_aligned_texts(record, algorithm.reference, sampling, self.replayer.resources.tokenizer)
        replayer, rollout = self.replayer, record.rollout
        result = StepResult(step, algorithm, rollout, record.batch, record.psi, {})
        rows = build_completion_rows(result, replayer.resources.tokenizer.decode, replayer.resources.has_rewards)
        yield compare_rows(step, rows, self.files.completions.get(step, ()))
        if len(rollout.groups) != self.run.prompts_per_step and not algorithm.replaces_rows:
            prompts, number = self.run.prompts_per_step, len(rollout.groups)
            text = f"it trained on {number} groups, and the run has {prompts} prompts per step"
            yield differs("groups", text, step)
        inputs = [*self._check_inputs(record.fingerprint, step)]
        yield from inputs
        if any(finding.subject == "settings" for finding in inputs):
            return
        if objects := _describe_objects(record.values_after.get("python_arguments", ())):
            yield not_checked("steps", objects, step)
            return
        saved, reason = self._load_state(step)
        if saved is None:
            yield not_checked("steps", reason, step)
            return
        evaluated = self.files.metrics.get(step, {}).get("eval/reward")
        metrics: Metrics = {} if evaluated is None else {"eval/reward": Mean(evaluated)}
        is_alike = not self._changed_versions(record.fingerprint) and self.run.learner.world_size == 1
        # where memory ran out, the sizes of passes changed within the run, and with them rounding
        is_exact = is_alike and not (self.folder / MEMORY_FILE).exists()
        replay = Replay(self.replayer, record, saved, is_exact, metrics, self._list_earlier(step))
        yield from check_step(replay)

    def _check_inputs(self, before: Mapping[str, Any], step: int) -> Iterator[Finding]:
        """Compare data, code and settings with those of the step."""
        current, honest = self.replayer.fingerprint, self._recorded_changes
        for kind, subject in (("files", "data"), ("code", "code")):
            changed = [name for name, sha in before[kind].items() if current[kind].get(name) != sha]
            if changed:
                text = f"{', '.join(changed)} changed since the step: another sha256"
                yield differs(subject, text, step)
            elif before[kind]:
                yield holds(subject, f"{', '.join(before[kind])}: the same sha256 as in the step", step)
        changes = list_changed_options(
            {**before, "versions": {}}, {**current, "versions": {}, "settings": self._current_settings}
        )
        changes = [text for text in changes if not text.startswith(NON_LEARNING_PREFIXES)]
        unexplained = [text for text in changes if text.partition(" ")[0] not in honest]
        if unexplained:
            yield differs("settings", f"run.toml is not what the step was trained with: {', '.join(unexplained)}", step)
        elif changes:
            text = f"a later resume changed the run's options: {', '.join(changes)}"
            yield not_checked("settings", text, step)

    @cached_property
    def _current_settings(self) -> Mapping[str, Any]:
        """The settings of run.toml, the sampler's among them, which the replayer leaves out."""
        return fingerprint_run(self.run.resolve(), "")["settings"]

    @cached_property
    def _recorded_changes(self) -> frozenset[str]:
        """Names of the options that a resume changed, as the newest checkpoint has them."""
        changes = self.files.checkpoints[0].state.get("option_changes", ()) if self.files.checkpoints else ()
        return frozenset(text.partition(" ")[0] for change in changes for text in change["options"])

    def _changed_versions(self, before: Mapping[str, Any]) -> bool:
        versions = self.replayer.fingerprint["versions"]
        return any(versions.get(name) != value for name, value in before["versions"].items())

    def _load_state(self, step: int) -> tuple[Checkpoint | None, str]:
        """Return the state that a step starts from; or None, and why there is none."""
        if step == 1:
            return self.replayer.initial, ""
        path = state_before(self.folder, step)
        if path is None:
            place = f"{FOLDER}/{BEFORE}"
            where = (
                f"neither as a checkpoint nor below {place}, which has states of at most {MAX_STATE_BYTES >> 20} MiB"
            )
            return (
                None,
                f"the state after step {step - 1} is not kept: {where} (--checkpoint.every 1 --checkpoint.keep keeps more)",
            )
        try:
            return load_checkpoint(path), ""
        except CheckpointError as error:
            return None, str(error)

    def _list_earlier(self, step: int) -> list[Path]:
        """Return kept states of steps before the one that `step` starts from, newest first."""
        places = [*list_checkpoints(self.folder / "checkpoints"), *list_checkpoints(self.folder / FOLDER / BEFORE)]
        earlier = [path for path in places if (parse_step(path) or 0) < step - 1]
        return sorted(earlier, key=lambda path: parse_step(path) or 0, reverse=True)

    def _check_logged(self, step: int) -> Iterator[Finding]:
        """Repeat the steps from the last state before `step`, and compare them with the log."""
        if self._changed_versions(self._last_fingerprint):
            yield not_checked("steps", "rounding differs on this machine, so other tokens may be sampled", step)
            return
        if self.run.learner.world_size > 1:
            yield not_checked(
                "steps", "several learners round otherwise than one, so other tokens may be sampled", step
            )
            return
        if has_served_teacher(self.run.algorithm):
            yield not_checked("steps", "a teacher is behind a server, which is not called again", step)
            return
        if self.run.sampler.engine != LOCAL:
            yield not_checked("steps", f"{self.run.sampler.engine} does not return the same tokens again", step)
            return
        inputs = [*self._check_inputs(self._last_fingerprint, step)]
        yield from inputs
        if any(finding.subject == "settings" for finding in inputs):
            return
        state = self.files.checkpoints[0].state if self.files.checkpoints else {}
        if objects := _describe_objects(state.get("python_arguments", ())):
            yield not_checked("steps", objects, step)
            return
        states = {saved.step: saved.path for saved in (*self.files.states_before, *self.files.checkpoints)}
        first = max((number for number in states if number < step), default=0)
        logged = LoggedSteps(self.replayer, step, self.files.completions, self.files.metrics, states)
        yield from logged.run(load_checkpoint(states[first]) if first else self.replayer.initial)

    @property
    def _last_fingerprint(self) -> Mapping[str, Any]:
        if self.files.checkpoints:
            fingerprint: Mapping[str, Any] = self.files.checkpoints[0].state["fingerprint"]
            return fingerprint
        return self.replayer.fingerprint


def _describe_objects(names: Sequence[str]) -> str:
    """Say which of these options a file cannot hold; "" = none that the repetition of a step depends on."""
    given = [name for name in names if name != "sampler"]
    return (
        f"{' and '.join(given)} was given to the run as an object in Python, and a file cannot hold it" if given else ""
    )
