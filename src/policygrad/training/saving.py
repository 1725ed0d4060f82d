"""What a run puts on disk besides its logs: checkpoints of its progress, the trained model, small files, each atomically."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from policygrad.checkpoint import format as checkpoint
from policygrad.checkpoint.manifest import sync
from policygrad.errors import RunError
from policygrad.learners.local.learner import Learner
from policygrad.models.tokenizer import Tokenizer
from policygrad.training.config.run import Run
from policygrad.training.config.toml import algorithm_from_dict, algorithm_to_dict
from policygrad.training.loop import Progress


def save_progress(folder: Path, run: Run, learner: Learner, progress: Progress, extra: dict[str, Any]) -> None:
    """A checkpoint of everything a resumed run needs: weights, optimiser, schedule, random numbers, place in the task."""
    tensors, values = learner.state()
    tensors["rng/torch"] = torch.get_rng_state()
    state = {
        "learner": values,
        "algorithm": algorithm_to_dict(progress.algorithm),
        "configured": algorithm_to_dict(run.algorithm),
        "position": progress.position,
        "tokens": progress.tokens,
        "seconds": progress.seconds,
        "extra": extra,
    }
    checkpoint.save(folder / "checkpoints", progress.step, tensors, state, keep=run.checkpoint.keep)


def restore_progress(
    folder: Path, run: Run, learner: Learner, note: Callable[[str], None]
) -> tuple[Progress, dict[str, Any]] | None:
    """The newest intact checkpoint, put into the learner; None when there is none.

    Raises:
        RunError: a checkpoint of another model.
        CheckpointError: checkpoints, and none of them intact.
    """
    saved = checkpoint.load_latest(folder / "checkpoints", warn=note)
    if saved is None:
        return None
    tensors = dict(saved.tensors)
    torch.set_rng_state(tensors.pop("rng/torch"))
    try:
        learner.restore(tensors, saved.state["learner"])
    except KeyError as error:
        raise RunError(
            f"{saved.path} has no {error}, which {run.algorithm.name} needs: go on with the algorithm that the run began with, or "
            f"train anew from its model, --model {folder}"
        ) from error
    except RuntimeError as error:
        raise RunError(f"{saved.path} does not fit the model {run.model!r}: {error}") from error
    algorithm = algorithm_from_dict(saved.state["algorithm"], str(saved.path))
    if saved.state["configured"] != algorithm_to_dict(run.algorithm):
        note("the algorithm is not the one the checkpoint was made with: its parts start without their state")
        algorithm = run.algorithm
    state = saved.state
    done = Progress(algorithm, saved.step, state["position"], state.get("tokens", 0), state.get("seconds", 0.0))
    return done, state["extra"]


def save_model(folder: Path, model: nn.Module, tokenizer: Tokenizer, command: str = "policygrad train") -> Path:
    """`folder/model`, which the AutoModel class it came from and AutoTokenizer load; whole and on the disk, or as it was before.

    command: what goes on with the run, for the message.

    Raises:
        RunError: a full disk, say; the checkpoint of the last step still holds the weights.
    """
    final, temporary = folder / "model", folder / ".tmp-model"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        model.save_pretrained(temporary)  # type: ignore[operator]
        tokenizer.hf.save_pretrained(temporary)
        for path in (*temporary.rglob("*"), temporary):
            sync(path)
        old = checkpoint.install(temporary, final)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        full = checkpoint.is_full(error)
        reason, first = ("the disk is full", "free some space") if full else (str(error), "see to the cause")
        raise RunError(
            f"{final} was not written: {reason}; the trained weights are in the last checkpoint: {first}, then "
            f"{command} --resume {folder}"
        ) from error
    shutil.rmtree(old, ignore_errors=True)
    return final


def write_atomically(path: Path, text: str) -> None:
    """The file whole, or as it was. Raises OSError with the file's name."""
    temporary = path.with_name(f".tmp-{path.name}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error
