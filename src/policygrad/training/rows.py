"""What learns from rows with their answers: a model and its optimiser, in this process or spread over several.

What is computed of the rows is a function of a `Share` and of data: one process calls it, and several call it at once, each with
its share of the model and of the micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from policygrad.core.algorithm import Algorithm
from policygrad.learners.config import LearnerConfig
from policygrad.learners.fsdp.torchrun import check_alone
from policygrad.learners.local.division import Division
from policygrad.learners.local.forward import Evaluator, probe
from policygrad.learners.local.network import Network
from policygrad.learners.local.optimizer import Optimizer
from policygrad.learners.local.recompute import recompute_activations
from policygrad.training.config.supervised import Supervised

if TYPE_CHECKING:  # torch.distributed takes a while to import
    from policygrad.learners.fsdp.leader import RankedLearner

T = TypeVar("T")
Saved = tuple[dict[str, Tensor], dict[str, Any]]
PLAIN = Algorithm(name="rows")
"""A learner in several processes is made for an algorithm: one update a step, and nothing else that learns."""


class Share(Protocol):
    """What one process computes with: the whole, or its part."""

    model: nn.Module
    evaluator: Evaluator
    config: LearnerConfig
    optimizer: Optimizer
    division: Division


class Learner(Protocol):
    """What learns, of which an objective knows no more."""

    def do(self, function: Callable[..., T], *args: Any) -> T:
        """A function of each process's share and of these arguments, in all of them; what it returns in this one."""
        ...


class Alone:
    """This process, with the whole model. `do` is as `RankedLearner.do`."""

    division = Division()

    def __init__(self, model: nn.Module, config: Supervised, steps: int, causal: bool = True) -> None:
        """steps: updates of the run, for the schedule. causal: it is a language model, whose log-probabilities are asked for."""
        if config.learner.gradient_checkpointing:
            recompute_activations(model)
        self.model, self.config = model, config.learner
        self.evaluator = probe(model, 1.0) if causal else Evaluator(Network(model), 1.0)
        assert config.lr is not None  # `Supervised.resolved` has filled it in
        self.optimizer = Optimizer(model, config.optimizer, config.lr, steps)

    def do(self, function: Callable[..., T], *args: Any) -> T:
        """A function of this share and of these arguments."""
        return function(self, *args)

    @property
    def version(self) -> int:
        """How many updates made the weights."""
        return self.optimizer.taken

    @property
    def lr(self) -> float:
        """The peak learning rate."""
        return self.optimizer.lr

    @lr.setter
    def lr(self, value: float) -> None:
        self.optimizer.lr = value

    def state(self) -> Saved:
        """What a checkpoint holds."""
        tensors, values = self.optimizer.state()
        return tensors, {"optimizer": values}

    def restore(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """The state of a checkpoint."""
        self.optimizer.restore(tensors, values["optimizer"])


def learner_of(model: nn.Module, config: Supervised, steps: int, causal: bool) -> Alone | RankedLearner:
    """What learns: here, or in `learner.ranks` processes, which `close` ends.

    Raises:
        ConfigError: what several processes cannot share; a process of torchrun's that would learn for itself.
    """
    check_alone(config.learner.ranks)
    if config.learner.ranks == 1:
        return Alone(model, config, steps, causal)
    from policygrad.learners.fsdp.blueprint import Blueprint
    from policygrad.learners.fsdp.leader import ranked_learner

    return ranked_learner(
        model,
        PLAIN,
        config=config.learner,
        lr=config.lr,
        steps=steps,
        optimizer=config.optimizer,
        blueprint=None if causal else Blueprint.plain(model),
        folder=Path(config.output) if config.output else None,
    )


def descend(share: Share) -> tuple[float | None, float]:
    """(gradient norm before clipping, learning rate): the update, once its gradient is there.

    Raises:
        NumericsError: a gradient that is not finite; the weights are as they were.
    """
    return share.optimizer.step()


def device_of(share: Share) -> torch.device:
    """Where it computes."""
    return next(share.model.parameters()).device
