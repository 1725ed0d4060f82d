"""The state of a run between two steps: to and from checkpoints, and from the learner to the sampler."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from policygrad.checkpoint.format import Checkpoint
from policygrad.checkpoint.manager import SavedState
from policygrad.core.algorithm import Algorithm
from policygrad.errors import RunError
from policygrad.learners.base import Learner
from policygrad.rollout import serialization
from policygrad.training.config.run import Run
from policygrad.training.config.serialization import algorithm_to_dict
from policygrad.training.loop import Progress
from policygrad.training.setup import Resources
from policygrad.weight_sync.base import LazyStateDict, copy_weights_


def pack_progress(
    progress: Progress, algorithm: Algorithm, tensors: Mapping[str, Tensor], values: Mapping[str, Any]
) -> SavedState:
    """Return what a checkpoint holds of a run's progress, with the learner's tensors and values."""
    rollout_tensors, rollouts = serialization.pack_rollouts(progress.leftover_groups, progress.queued_rollouts)
    return {**tensors, **rollout_tensors}, {
        "learner": values,
        "parts": progress.state,
        "algorithm": algorithm_to_dict(algorithm),
        "position": progress.position,
        "tokens": progress.tokens,
        "seconds": progress.seconds,
        **rollouts,
    }


def restore_progress(
    saved: Checkpoint,
    run: Run,
    resources: Resources,
    learner: Learner,
    restore: Callable[[Mapping[str, Tensor], Mapping[str, Any]], None],
    note: Callable[[str], None],
) -> Progress:
    """Put learner and sampler into the state of a checkpoint, and return its progress.

    Args:
        restore: Gives the learner the tensors and values.

    Raises:
        RunError: The state is not one of this model and algorithm.
    """
    state = saved.state
    rollout_tensors, tensors = serialization.split_tensors(saved.tensors)
    try:
        restore(tensors, state["learner"])
    except KeyError as error:
        raise RunError(
            f"{saved.path} has no {error}, which {run.algorithm.name} needs: resume with the algorithm that the run started with, "
            f"or start a new run from its model, --model {run.output}"
        ) from error
    except RuntimeError as error:
        raise RunError(f"{saved.path} does not fit the model {run.describe_option('model')!r}: {error}") from error
    parts = state["parts"]
    groups, rollouts = serialization.unpack_rollouts(rollout_tensors, state, resources.task.train_example)
    if state["algorithm"] != algorithm_to_dict(run.algorithm):
        note("the algorithm differs from the checkpoint's: its parts start without their state")
        parts, groups, rollouts = run.algorithm.init_state(), (), ()
    publish_weights(learner, resources)
    return Progress(parts, saved.step, state["position"], state["tokens"], state["seconds"], groups, rollouts)


def publish_weights(learner: Learner, resources: Resources) -> None:
    """Publish the learner's weights to the sampler and to the saved model, of which a custom learner may have a copy."""
    published = learner.publish()
    resources.rollouter.update_weights(published)
    if not isinstance(published.tensors, LazyStateDict):
        copy_weights_(published.tensors, resources.model)
