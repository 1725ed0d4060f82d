"""What learns in a run, and how it goes on from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from policygrad.checkpoint.format import Checkpoint
from policygrad.errors import ConfigError, RunError
from policygrad.learners.base import Learner
from policygrad.learners.fsdp.torchrun import check_alone
from policygrad.learners.local.learner import LocalLearner
from policygrad.models.adapters import adapt, adapters_of
from policygrad.models.reference import load_reference
from policygrad.samplers.config import LOCAL
from policygrad.training.config.run import Run
from policygrad.training.hosts import HERE, Hosts
from policygrad.training.resources import made, policy_tokenizer

LearnerFactory = Callable[[nn.Module, Run], Learner]
"""From the run's model and its configuration to what learns: `local_learner`, or a wrapper around it."""


def local_learner(model: nn.Module, run: Run, hosts: Hosts = HERE) -> Learner:
    """The learner of a run: in this process, and in `learner.ranks` − 1 others. hosts: where those are, and who draws.

    Raises:
        ModelError: a reference that is named and cannot be read, or has not the policy's tokenizer.
        ConfigError: a process of torchrun's that would learn for itself.
    """
    check_alone(run.learner.ranks)
    named = run.algorithm.reference.model if run.algorithm.reference is not None else None
    reference: nn.Module | None = None
    if named is not None:
        tokenizer = policy_tokenizer(run.model, run.tokenizer, model, run.trust_remote_code)
        device = str(next(model.parameters()).device)
        reference = load_reference(
            named, tokenizer, dtype=run.learner.dtype, device=device, trust_remote_code=run.trust_remote_code
        )
        if run.learner.adapters is not None and run.algorithm.reward_model is not None and not adapters_of(reference):
            reference = adapt(reference, run.learner.adapters, seed=run.seed).requires_grad_(
                False
            )  # what learns begins as it
    make: Callable[..., Learner] = LocalLearner
    if run.learner.ranks > 1:  # torch.distributed takes a while to import
        from policygrad.learners.fsdp.leader import ranked_learner

        samples = run.sampler.engine == LOCAL and not run.staleness and hosts.sampler is None
        folder = Path(run.output) if run.output else None
        make = partial(ranked_learner, samples=samples, streams=run.streams, folder=folder, places=hosts.places)
    return make(
        model,
        run.algorithm,
        lr=run.lr,
        steps=run.steps,
        temperature=run.sampling.temperature,
        config=run.learner,
        optimizer=run.optimizer,
        reference=reference,
    )


def learner_of(given: Learner | LearnerFactory, model: nn.Module, run: Run) -> Learner:
    """What was given, or what it makes of model and run.

    Raises:
        ConfigError: neither is a learner.
    """
    learner = made(given, Learner, model, run)
    if not isinstance(learner, Learner):
        raise ConfigError(
            f"learner is {learner!r}: give a function of (model, run) that returns what policygrad.Learner describes "
            "(evaluate, update, publish, version, state, restore), such as pg.local_learner"
        )
    return learner


def put_back(
    restore: Callable[[Mapping[str, Tensor], Mapping[str, Any]], None],
    saved: Checkpoint,
    tensors: Mapping[str, Tensor],
    run: Run,
    folder: Path,
) -> None:
    """The learner as it was at the checkpoint, whose own tensors these are. restore: the learner's.

    Raises:
        RunError: a checkpoint of another algorithm, or of another model.
    """
    try:
        restore(tensors, saved.state["learner"])
    except KeyError as error:
        raise RunError(
            f"{saved.path} has no {error}, which {run.algorithm.name} needs: go on with the algorithm that the run began with, "
            f"or train anew from its model, --model {folder}"
        ) from error
    except RuntimeError as error:
        raise RunError(f"{saved.path} does not fit the model {run.named('model')!r}: {error}") from error
