"""What people are told of a run before its first step."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from policygrad.learners.base import Learner
from policygrad.learners.local.learner import LocalLearner
from policygrad.models.adapters import words as adapters_words
from policygrad.samplers.config import LOCAL
from policygrad.training.config.run import Run
from policygrad.training.resources import Resources


def facts(run: Run, resources: Resources, learner: Learner, folder: Path, measured: bool) -> dict[str, str]:
    """Name and value: the model, the batch, what answers are worth, where files go. measured: whether on held-out problems."""
    batch = f"{run.prompts_per_step} prompts × {run.group_size} samples, {run.steps} steps"
    budget = "" if run.tokens is None else f" or {run.tokens:,} tokens, whichever is first"
    ahead = f", sampled {run.staleness} ahead of the weights" if run.staleness else ""
    adapters = adapters_words(resources.model)
    told = {
        "model": described(run.named("model"), resources.model, run.learner.dtype),
        **({"adapters": adapters} if adapters else {}),
        "batch": batch + budget + ahead,
        "reward": ", ".join(resources.rewards),
        "run": str(folder),
    }
    if run.learner.ranks > 1:
        shared = f", every {run.learner.tensor} of which share each layer" if run.learner.tensor > 1 else ""
        told["learner"] = f"{run.learner.ranks} processes{shared}"
    if run.sampler.engine != LOCAL:
        told["sampler"] = f"{run.sampler.engine} at {', '.join(run.sampler.urls) or 'a server started here'}"
    if isinstance(learner, LocalLearner) and run.algorithm.reference and run.algorithm.reference.model:
        told["reference"] = f"{run.algorithm.reference.model} ({learner.reference_parameters / 1e6:.2f}M parameters)"
    if not resources.scored:
        told["held out"] = (
            "not measured: the task has no reward, and the algorithm needs none (--reward NAME gives one)"
        )
    if measured and resources.task.held_out_is_train:
        told["held out"] = "too few prompts to hold any out: measured on the training prompts"
    return told


def described(name: str, model: nn.Module, dtype: str) -> str:
    """A model's name, size and precision, and the device it is on."""
    parameters = list(model.parameters())
    return f"{name} ({sum(p.numel() for p in parameters) / 1e6:.2f}M parameters, {dtype} on {parameters[0].device})"
