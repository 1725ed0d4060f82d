"""Records of single steps, from which `policygrad verify` repeats and checks them: the rollout, the batch that was trained on, the
advantages, and the state before and after.

A run's folder has them below `verification/`, each in the format of a checkpoint: `steps/step-000008` is the record of step 8, and
`before/step-000007` the state it started from, unless that is large. The state after a step is stored as a digest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from policygrad.checkpoint.format import (
    list_checkpoints,
    load_checkpoint,
    parse_step,
    remove_checkpoint,
    save_checkpoint,
)
from policygrad.checkpoint.manager import SavedState
from policygrad.core.batch import Batch
from policygrad.errors import CheckpointError
from policygrad.rollout.rollouter import Rollout
from policygrad.rollout.serialization import pack_rollouts, unpack_rollouts
from policygrad.tasks.base import Example
from policygrad.training.loop import Progress, StepResult

FOLDER = "verification"
STEPS, BEFORE = "steps", "before"
MAX_STATE_BYTES = 2**28  # a larger state before a step is not stored; a checkpoint may have it all the same
MAX_RECORD_BYTES = 2**28
MAX_DIGESTED_BYTES = 2**32  # hashing takes about a second per GiB
SAMPLED_ELEMENTS = 16  # per tensor, for a comparison where results are not bit-identical
TRAINED_PREFIX, PSI = "trained/", "psi"
UNTRAINED_STATE = ("leftover_groups", "queued_rollouts", "fingerprint", "guard", "seconds", "option_changes")
"""Values of a checkpoint that are no result of the step's update, or are stored elsewhere."""


@dataclass(frozen=True)
class TensorDigest:
    """A tensor's contents in short."""

    sha256: str
    norm: float  # Euclidean
    elements: tuple[float, ...]
    """Up to `SAMPLED_ELEMENTS` elements, evenly spaced."""


@dataclass(frozen=True, eq=False)
class StepRecord:
    """A recorded step."""

    step: int
    rollout: Rollout
    batch: Batch
    """The batch that was trained on, with the fields that the learner filled."""
    psi: Tensor
    """[B, T] advantages."""
    metrics: Mapping[str, float]
    """As logged."""
    version_before: int
    """Version of the weights at the beginning of the step."""
    weights_before: str
    """sha256 of the policy's trained weights at the beginning of the step; "" = not computed."""
    after: Mapping[str, TensorDigest] | None
    """The learner's tensors after the step; None = not stored, for the reason `omitted`."""
    values_after: Mapping[str, Any]
    """The other values of the state after the step."""
    fingerprint: Mapping[str, Any]
    undone: bool
    """The guard took the step's update back."""
    omitted: tuple[str, ...]
    """Sentences about what was not stored."""


def choose_steps(steps: int, count: int) -> frozenset[int]:
    """Return `count` of the steps 1 to `steps`, evenly spread, the first and the last among them; the first alone for 1."""
    if count <= 1:
        return frozenset({1} if count else ())
    count = min(count, steps)
    return frozenset(1 + round(i * (steps - 1) / max(1, count - 1)) for i in range(count))


class StepRecorder:
    """Writes the records of some of a run's steps. A failure to write one is a note; training continues."""

    def __init__(
        self, folder: Path, steps: frozenset[int], fingerprint: Mapping[str, Any], note: Callable[[str], None]
    ) -> None:
        self._folder, self._steps, self._fingerprint, self._note = folder / FOLDER, steps, fingerprint, note
        self._result: StepResult | None = None
        self._metrics: Mapping[str, float] = {}
        self._undone, self._version, self._weights = False, 0, ""

    def start(self, step: int) -> None:
        """Start after `step` steps: delete what an earlier process recorded of later ones."""
        for path in (*list_checkpoints(self._folder / STEPS), *list_checkpoints(self._folder / BEFORE)):
            if (parse_step(path) or 0) > step:
                remove_checkpoint(path)

    def is_due(self, step: int) -> bool:
        """Return whether the state after `step` steps is stored or digested."""
        return step + 1 in self._steps or self._result is not None

    def on_step(self, result: StepResult, metrics: Mapping[str, float], version_before: int, *, undone: bool) -> None:
        """Remember a step that was just taken, if it is one to record."""
        if result.step in self._steps:
            self._result, self._metrics, self._undone, self._version = result, metrics, undone, version_before

    def after_step(self, progress: Progress, state: SavedState | None) -> None:
        """Write the record of the step that led to `progress`, and the state if the next step is one to record.

        Args:
            state: The complete state; None = it is spread over several processes.
        """
        result, self._result = self._result, None
        try:
            if result is not None:
                self._write_record(result, state)
            if progress.step + 1 in self._steps and state is not None:
                tensors, values = state
                size = sum(t.nbytes for t in tensors.values())
                self._weights = digest_weights(tensors) if size <= MAX_DIGESTED_BYTES else ""
                if progress.step and size <= MAX_STATE_BYTES:  # step 1 starts from what the run's settings give
                    tensors = tensors | {"rng/torch": torch.get_rng_state()}
                    save_checkpoint(self._folder / BEFORE, progress.step, tensors, values, keep=10**9)
        except CheckpointError as error:
            self._note(f"a record for `policygrad verify` was not written: {error}. Training continues without it")

    def _write_record(self, result: StepResult, state: SavedState | None) -> None:
        tensors, values = pack_rollouts((), (result.rollout,))
        initial = result.rollout.batch.tensors()
        trained = {name: x for name, x in result.batch.tensors().items() if x is not initial.get(name)}
        tensors = tensors | {TRAINED_PREFIX + name: x for name, x in trained.items()} | {PSI: result.psi}
        omitted = []
        digests, values_after = None, dict[str, Any]()
        if state is None:
            omitted.append("the state after the step is spread over several processes")
        else:
            learned = {name: x for name, x in state[0].items() if not name.startswith(("leftover/", "queued/"))}
            values_after = {name: x for name, x in state[1].items() if name not in UNTRAINED_STATE}
            size = sum(x.nbytes for x in learned.values())
            if size > MAX_DIGESTED_BYTES:
                omitted.append(f"the state after the step, {size / 2**30:.1f} GiB, is too large to be hashed")
            else:
                digests = {name: vars(digest_tensor(x)) for name, x in learned.items()}
        size = sum(x.nbytes for x in tensors.values())
        if size > MAX_RECORD_BYTES:
            raise CheckpointError(f"the batch of step {result.step} has {size / 2**20:.0f} MiB, the most is 256")
        record = {
            "rollout": values,
            "after": digests,
            "values_after": values_after,
            "metrics": dict(self._metrics),
            "fingerprint": self._fingerprint,
            "undone": self._undone,
            "version_before": self._version,
            "weights_before": self._weights,
            "omitted": tuple(omitted),
        }
        save_checkpoint(self._folder / STEPS, result.step, tensors, record, keep=10**9)


def digest_tensor(tensor: Tensor) -> TensorDigest:
    """Return a tensor's sha256, norm and some of its elements."""
    plain = tensor.detach().cpu().contiguous()
    flat = plain.flatten()
    # in float64: in float32 the last place of an embedding of 28,311,552 numbers is rounded to one beyond its end
    last = max(0, flat.numel() - 1)
    places = torch.linspace(0, last, min(SAMPLED_ELEMENTS, flat.numel()), dtype=torch.float64).long()
    return TensorDigest(
        hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest(),
        float(flat.double().norm()),
        tuple(flat[places].double().tolist()),
    )


def digest_weights(tensors: Mapping[str, Tensor]) -> str:
    """Return the sha256 of the policy's trained weights in a learner's state."""
    total = hashlib.sha256()
    for name in sorted(name for name in tensors if name.startswith("weights/")):
        total.update(name.encode() + digest_tensor(tensors[name]).sha256.encode())
    return total.hexdigest()


def list_records(folder: Path) -> list[int]:
    """Return the recorded steps of the run in `folder`, ascending."""
    return sorted({parse_step(path) or 0 for path in list_checkpoints(folder / FOLDER / STEPS)})


def read_record(folder: Path, step: int, example: Callable[[int], Example]) -> StepRecord:
    """Read and verify the record of a step.

    Args:
        example: Returns the task's i-th training example.

    Raises:
        CheckpointError: It is damaged or missing.
    """
    saved = load_checkpoint(folder / FOLDER / STEPS / f"step-{step:06d}")
    state = saved.state
    try:
        _, (rollout,) = unpack_rollouts(saved.tensors, state["rollout"], example)
        names = {field.name for field in fields(Batch)}
        filled: dict[str, Any] = {
            n.removeprefix(TRAINED_PREFIX): x for n, x in saved.tensors.items() if n.startswith(TRAINED_PREFIX)
        }
        batch = replace(rollout.batch, **{name: x for name, x in filled.items() if name in names})
        after = state["after"]
        digests = None if after is None else {name: TensorDigest(**value) for name, value in after.items()}
        return StepRecord(
            step,
            rollout,
            batch,
            saved.tensors[PSI],
            state["metrics"],
            state["version_before"],
            state["weights_before"],
            digests,
            state["values_after"],
            state["fingerprint"],
            state["undone"],
            state["omitted"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{saved.path} lacks a part of the record: {error!r}") from error


def state_before(folder: Path, step: int) -> Path | None:
    """Return the checkpoint that `step` starts from, of those that the run keeps; None if there is none."""
    name = f"step-{step - 1:06d}"
    places = (folder / "checkpoints" / name, folder / FOLDER / BEFORE / name)
    return next((place for place in places if place.is_dir()), None)
