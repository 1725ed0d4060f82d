"""THE OTHER LOOP: rows with their answers → loss → update; what fine-tuning and reward models share."""

from __future__ import annotations

import sys
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, Unpack, overload

import torch
from torch import Tensor, nn

from policygrad.checkpoint.format import Checkpoint
from policygrad.checkpoint.shards import Saved, Spread
from policygrad.core.algorithm import Algorithm
from policygrad.errors import CheckpointError, ConfigError, RunError
from policygrad.learners.config import LearnerConfig
from policygrad.learners.fsdp.torchrun import check_alone
from policygrad.learners.local.forward import Evaluator, Network, probe, recompute_activations
from policygrad.learners.local.optimizer import Optimizer, check_moments, train_only
from policygrad.learners.local.packing import Division
from policygrad.models.adapters import words
from policygrad.models.tokenizer import Tokenizer
from policygrad.tasks.sources import digest
from policygrad.trackers import RunInfo
from policygrad.training.base_trainer import Followers, Lifecycle, Result
from policygrad.training.config.paths import located
from policygrad.training.config.serialization import load
from policygrad.training.config.supervised import Supervised
from policygrad.training.config.trust import named
from policygrad.training.divergence_guard import Guarding
from policygrad.training.provenance import began
from policygrad.training.run_folder import check_resumable
from policygrad.training.trainer import described, few_threads
from policygrad.weight_sync.base import put_weights

if TYPE_CHECKING:
    from policygrad.learners.fsdp.controller import RankedLearner
    from policygrad.training.distributed import Shares


# What learns from rows with their answers: a model and its optimiser, in this process or spread over several.
#
# What is computed of the rows is a function of a `Share` and of data: one process calls it, and several call it at once, each with
# its share of the model and of the micro-batches.

T = TypeVar("T")
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
    from policygrad.learners.fsdp.controller import ranked_learner
    from policygrad.learners.fsdp.sharding import Blueprint

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


AnyConfig = TypeVar("AnyConfig", bound=Supervised)
Numbers = Mapping[str, float]
COUNTED = 10**7
"""Units that are shuffled to count the steps of all epochs, at most: some ten seconds."""


class Objective(Protocol):
    """What is learned: a model, its rows, and a loss."""

    model: nn.Module
    causal: bool
    """Whether it is a language model, whose log-probabilities the loss is made of."""
    tokenizer: Tokenizer
    units: list[tuple[int, ...]]
    """The training rows, by number; those of one unit stay in one update."""
    facts: dict[str, str]
    """What people are shown of the data."""

    def accumulate(self, learner: Learner, rows: Sequence[int]) -> dict[str, float]:
        """Adds the gradient of the loss over one update's rows."""
        ...

    def measure(self, learner: Learner, progress: Callable[[int, int], None]) -> dict[str, float]:
        """Held-out metrics, named `held_out/…`."""
        ...

    def summary(self, before: Numbers, after: Numbers) -> dict[str, str]:
        """The two measurements, for people."""
        ...


@dataclass(frozen=True)
class RowsDone:
    """What outlives a step, besides the weights: the order of the rows is the seed's."""

    step: int = 0
    """Steps done."""


class Steps(Sequence[list[int]]):
    """The rows of every update: the units shuffled by (seed, epoch), at most `batch_size` rows or one unit per step.

    An epoch is shuffled when a step of it is asked for. Where units differ in their rows, so may epochs in their steps, which are
    counted first.

    Raises:
        ConfigError: more epochs of such units than can be counted.
    """

    def __init__(self, units: Sequence[tuple[int, ...]], epochs: int, batch_size: int, seed: int) -> None:
        self._units, self._batch_size, self._seed = units, batch_size, seed
        self._epoch: tuple[int, list[list[int]]] = (0, self._shuffled(0))
        if len({len(unit) for unit in units}) == 1:
            self._ends: Sequence[int] = range(
                len(self._epoch[1]), epochs * len(self._epoch[1]) + 1, len(self._epoch[1])
            )
        elif epochs * len(units) > COUNTED:
            raise ConfigError(
                f"epochs must be at most {COUNTED // len(units):,} for these {len(units):,} prompts, not {epochs:,}"
            )
        else:
            self._ends = list(accumulate(len(self._shuffled(epoch)) for epoch in range(epochs)))

    def __len__(self) -> int:
        return self._ends[-1]

    @overload
    def __getitem__(self, index: int) -> list[int]: ...
    @overload
    def __getitem__(self, index: slice) -> list[list[int]]: ...
    def __getitem__(self, index: int | slice) -> list[int] | list[list[int]]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        epoch = bisect_right(self._ends, index)
        if epoch != self._epoch[0]:
            self._epoch = (epoch, self._shuffled(epoch))
        return self._epoch[1][index - (self._ends[epoch - 1] if epoch else 0)]

    def _shuffled(self, epoch: int) -> list[list[int]]:
        steps: list[list[int]] = []
        order = list(range(len(self._units)))
        Random(f"{self._seed}/{epoch}").shuffle(order)
        rows: list[int] = []
        for unit in order:
            if rows and len(rows) + len(self._units[unit]) > self._batch_size:
                steps.append(rows)
                rows = []
            rows = [*rows, *self._units[unit]]
        steps.append(rows)
        return steps


def supervise(
    objective: Callable[[Any], Objective],
    kind: type[AnyConfig],
    config: AnyConfig | None,
    *,
    resume: str | Path | None,
    stop_after: int | None,
    stop_before: str | None,
    overwrite: bool,
    **followers: Unpack[Followers],
) -> Result[Numbers | None]:
    """Trains what `objective` makes of the configuration, or goes on with the run in the folder `resume`.

    Raises:
        PolicygradError: what cannot be trained, with the way out.
    """
    if config is None and resume is not None:
        config = load(check_resumable(Path(resume), kind.kind) / f"{kind.kind}.toml", kind())
    chosen = config or kind()
    return SupervisedTrainer(chosen, objective, **followers).train(
        resume=resume, stop_after=stop_after, stop_before=stop_before, overwrite=overwrite
    )


class SupervisedTrainer(Lifecycle[Supervised, RowsDone, Numbers]):
    """A training on rows with their answers. `trainer.learner.lr` is its learning rate."""

    learner: Alone | RankedLearner

    def __init__(
        self, config: Supervised, objective: Callable[[Any], Objective], **followers: Unpack[Followers]
    ) -> None:
        super().__init__(config.resolved(), **followers)
        self.kind, self.file = config.kind, f"{config.kind}.toml"  # type: ignore[misc]  # of each instance here
        self._objective = objective
        self._shares: Shares | None = None  # of a learner in several processes
        self._guarding = Guarding(config.guard, lambda text, kind: self.trackers.note(text))

    def build(self, stack: ExitStack) -> None:
        config = located(self.config)
        self.objective = self._objective(config)
        self.model, self.tokenizer = self.objective.model, self.objective.tokenizer
        self.plan = Steps(self.objective.units, config.epochs, config.batch_size, config.seed)
        stack.enter_context(few_threads(self.model))
        train_only(self.model, config.learner.trainable)
        self.learner = learner_of(self.model, config, len(self.plan), self.objective.causal)
        if not isinstance(self.learner, Alone):
            from policygrad.training.distributed import Shares

            stack.callback(self.learner.close)
            self._shares = Shares(self.learner)
        self.digest = _digest(config)
        device = next(self.model.parameters()).device.type
        code = zip(named({"map": self.config.map}), named({"map": config.map}), strict=True)
        self.began = began(replace(config, held_out=None), device, dict(code))

    @property
    def version(self) -> int:
        return self.learner.version

    @property
    def optimizer(self) -> Optimizer:
        """Of one process, which learns alone."""
        assert isinstance(self.learner, Alone)
        return self.learner.optimizer

    @property
    def steps(self) -> int:
        return len(self.plan)

    def pack(self, progress: RowsDone) -> Saved:
        tensors, values = self.learner.state()
        return tensors, self._values(values)

    @property
    def spread(self) -> Spread[RowsDone] | None:
        shares = self._shares
        if shares is None:
            return None
        return Spread(lambda progress: ({}, self._values(shares.values)), shares.begin, shares.leaves)

    def _values(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """What a checkpoint holds beside tensors; those of what learns are given."""
        return {
            "optimizer": values["optimizer"],
            "before": dict(self.before or {}),
            "data": self.digest,
            "began": self.began,
            "changes": self.changes,
            "guard": self._guarding.watched.to_dict(),
        }

    def check_saved(self, saved: Checkpoint) -> None:
        if lacking := {"optimizer", "before", "data"} - saved.state.keys():
            raise CheckpointError(f"it has no {min(lacking)!r}")
        check_moments(saved.tensors, saved.state["optimizer"])

    def start(self, saved: Checkpoint | None) -> RowsDone:
        if saved is None:
            return RowsDone()
        if saved.state["data"] != self.digest:
            raise RunError(
                f"{self.config.data} (or the held-out file) is not what the run in {self.folder} began with: put the old file "
                "back, or train anew with another --output"
            )
        self.notice(saved, self.began, self.config)
        trained = {name.removeprefix("weights/") for name in saved.tensors if name.startswith("weights/")}
        mine = {name for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        if trained != mine:
            odd = min(trained ^ mine)
            raise RunError(
                f"{saved.path} was made with other trainable parameters ({odd}, say): leave learner.trainable as it was"
            )
        try:
            if self._shares is None:
                self._put_back(saved.tensors, saved.state)
            else:
                self._shares.restore(saved.path, self._own(saved.tensors), _whole(saved.state))
        except (KeyError, RuntimeError) as error:
            raise RunError(f"{saved.path} does not fit the model {self.config.model!r}: {error}") from error
        self._guarding.restore(saved.state.get("guard"), self.learner)
        self._publish()
        self.before, self.measured = saved.state["before"], True
        return RowsDone(saved.step)

    @property
    def keeps(self) -> int:
        if self.config.guard.action != "warn":
            return sys.maxsize  # to undo steps of whatever size
        return super().keeps if self._shares is None else 0  # which no process has as a whole

    def info(self, progress: RowsDone) -> RunInfo:
        config = self.config
        rows, epochs = sum(map(len, self.objective.units)), config.epochs
        facts = {
            "model": described(config.model, self.model, config.learner.dtype),
            "data": f"{rows} rows, {epochs} epoch{'s' * (epochs > 1)} of {self.steps // epochs} steps",
            **({"adapters": adapters} if (adapters := words(self.model)) else {}),
            **({"learner": f"{config.learner.ranks} processes"} if config.learner.ranks > 1 else {}),
            **self.objective.facts,
            "run": str(self.folder),
        }
        title = f"policygrad · {config.kind} on {config.data}"
        first = progress.step + 1
        return RunInfo(
            title,
            facts,
            self.steps,
            first_step=first,
            config=asdict(replace(config, directory=None)),
            folder=self.folder,
        )

    def run(self, progress: RowsDone) -> RowsDone:
        going = True
        while going:
            step, began = progress.step + 1, time.perf_counter()
            values = self.objective.accumulate(self.learner, self.plan[step - 1])
            norm, lr = self.learner.do(descend)
            seconds = time.perf_counter() - began
            values |= {"lr": lr, "epoch": step * self.config.epochs / self.steps, "time/step": seconds}
            values |= {} if norm is None else {"grad_norm": norm}
            values |= {"tokens_per_second": values["tokens"] / seconds}
            self.log(step, values | self._guarding.judge(step, values))
            self._guarding.act(step, self.learner, self._put_back, self.checkpointer)
            if self._guarding.gave_up:
                self.stop()
            progress = replace(progress, step=step)
            going = self.keep_going(progress)
        self._publish()
        return progress

    def _put_back(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Weights and optimiser as a checkpoint has them."""
        self.learner.restore(self._own(tensors), _whole(state))

    @staticmethod
    def _own(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Those of what learns."""
        return {name: x for name, x in tensors.items() if name.startswith(("weights/", "adam/"))}

    def _publish(self) -> None:
        """The weights into the model that is saved, where they are spread."""
        if not isinstance(self.learner, Alone):
            put_weights(self.learner.publish().tensors, self.model)

    def check_end(self) -> None:
        self._guarding.check(self.progress.step, self.resume_words)

    @property
    def measures(self) -> bool:
        return True

    def phase(self, when: str) -> str:
        return f"measuring {when}"

    def known(self, step: int) -> Numbers | None:
        return None

    def measure(self, progress: Callable[[int, int], None]) -> tuple[Numbers, Numbers]:
        values = self.objective.measure(self.learner, progress)
        step = self.progress.step
        said = step in dict(self.files.history("held_out/loss"))  # a finished run that is resumed says nothing twice
        return values, {} if said else values

    def summary(self, after: Numbers | None) -> Mapping[str, str]:
        return self.objective.summary(self.before or {}, after or {})

    def numbers(self, progress: RowsDone, after: Numbers | None) -> dict[str, Any]:
        return {"steps": progress.step, "before": dict(self.before or {}), "after": dict(after or {})}


def _whole(state: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint's values, as a learner of several processes has them."""
    return {"optimizer": state["optimizer"], "rollouts": 0, "refreshed": False}


def _digest(config: Supervised) -> list[str | None]:
    """sha256 of the data, so that a resumed run sees the same rows in the same order."""
    files = [config.data] + ([config.held_out] if config.held_out else [])
    return [digest(file, config.directory) for file in files]
