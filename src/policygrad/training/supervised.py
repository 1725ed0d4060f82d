"""THE OTHER LOOP: rows with their answers → loss → update → checkpoint; what SFT and reward models share."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Protocol, TypeVar

import torch
from torch import nn

from policygrad.checkpoint import format as checkpoint
from policygrad.errors import CheckpointError, RunError
from policygrad.learners.local.optimizer import Optimizer, train_only
from policygrad.models.tokenizer import Tokenizer
from policygrad.trackers import Display, Outline, RunFiles, Silent
from policygrad.training.config.supervised import Supervised
from policygrad.training.config.toml import dumps
from policygrad.training.folder import check_resumable, new_folder
from policygrad.training.saving import save_model, write_atomically
from policygrad.training.stopping import Stopping

AnyConfig = TypeVar("AnyConfig", bound=Supervised)
Numbers = Mapping[str, float]


class Objective(Protocol):
    """What is learned: a model, its rows, and a loss."""

    model: nn.Module
    tokenizer: Tokenizer
    units: list[tuple[int, ...]]
    """The training rows, by number; those of one unit stay in one optimiser step."""
    facts: dict[str, str]
    """What the display shows of the data."""

    def accumulate(self, rows: Sequence[int], collect: Callable[[], None]) -> dict[str, float]:
        """Adds the gradient of the loss over one optimiser step's rows, and calls `collect` after every backward pass."""
        ...

    def measure(self, progress: Callable[[int, int], None]) -> dict[str, float]:
        """Held-out metrics, named `held_out/…`."""
        ...

    def summary(self, before: Numbers, after: Numbers) -> dict[str, str]:
        """The two measurements, for people."""
        ...


@dataclass(frozen=True)
class SupervisedResult:
    """What `sft` or `train_reward_model` leaves."""

    output: Path
    steps: int
    before: Numbers
    """Held-out metrics before training: `held_out/loss` and others."""
    after: Numbers | None
    """None when the run was stopped before its last step; likewise `model`."""
    model: Path | None


def plan(units: Sequence[tuple[int, ...]], epochs: int, batch_size: int, seed: int) -> list[list[int]]:
    """The rows of every optimiser step: the units shuffled by (seed, epoch), at most `batch_size` rows or one unit per step."""
    steps: list[list[int]] = []
    for epoch in range(epochs):
        order = list(range(len(units)))
        Random(f"{seed}/{epoch}").shuffle(order)
        rows: list[int] = []
        for unit in order:
            if rows and len(rows) + len(units[unit]) > batch_size:
                steps.append(rows)
                rows = []
            rows = [*rows, *units[unit]]
        steps.append(rows)
    return steps


def supervise(
    build: Callable[[AnyConfig], Objective],
    config: AnyConfig,
    *,
    resume: str | Path | None,
    stop_after: int | None,
    display: Display | None,
) -> SupervisedResult:
    """Trains what `build` makes of the configuration, or goes on with the run in the folder `resume`.

    Raises:
        RunError, ModelError, ValueError: what cannot be trained, with the way out.
    """
    if stop_after is not None and stop_after < 1:
        raise ValueError(f"stop_after must be at least 1, not {stop_after}")
    if resume is not None:
        folder = Path(resume)
        check_resumable(folder, config.kind)
    else:
        folder = new_folder(config.output, config.kind)
    config = replace(config.resolved(), output=str(folder))
    with ExitStack() as stack:
        shown = stack.enter_context(display or Silent())
        shown.phase("loading the model")
        torch.manual_seed(config.seed)  # of a new head
        session = SupervisedSession(config, build(config), folder, shown)
        return session.go(stack, resumed=resume is not None, stop_after=stop_after)


class SupervisedSession:
    """One run: measure, train with checkpoints, measure again, save a model that others load."""

    def __init__(self, config: Supervised, objective: Objective, folder: Path, display: Display) -> None:
        assert config.lr is not None  # `resolved` has filled it in
        self.config, self.objective, self.folder, self.display = config, objective, folder, display
        self.steps = plan(objective.units, config.epochs, config.batch_size, config.seed)
        train_only(objective.model, config.learner.trainable)
        self.optimizer = Optimizer(objective.model, config.optimizer, config.lr, len(self.steps))
        self.stopping = Stopping(display.note)
        self.before: Numbers = {}
        self.digest = _digest(config)

    def go(self, stack: ExitStack, *, resumed: bool, stop_after: int | None) -> SupervisedResult:
        """The whole run, from the newest checkpoint when there is one."""
        self.folder.mkdir(parents=True, exist_ok=True)
        done = self._restore() if resumed else 0
        files = stack.enter_context(RunFiles(self.folder))
        files.truncate_after(done if self.before else -1)
        write_atomically(self.folder / f"{self.config.kind}.toml", dumps(self.config))  # type: ignore[arg-type]
        title = f"policygrad · {self.config.kind} on {self.config.data}"
        self.display.start(Outline(title, self._facts(), len(self.steps), done + 1))
        if not self.before:
            self.before = self._measure(files, "measuring before training", done)
        until = len(self.steps) if stop_after is None else min(len(self.steps), done + stop_after)
        with self.stopping:
            going = done < until
            while going:
                done = self._step(files, done + 1)
                going = done < until and not self.stopping.asked  # asked once a step: what ends here has a checkpoint
                if not going or done % self.config.checkpoint.every == 0:
                    self._save(files, done, final=not going)
        if done == len(self.steps):
            return self._finish(files, done)
        resume = f"policygrad {self.config.kind} --resume {self.folder}"
        self.display.finish({"stopped after": f"step {done} of {len(self.steps)}", "go on with": resume})
        return SupervisedResult(self.folder, done, self.before, None, None)

    def _step(self, files: RunFiles, step: int) -> int:
        began = time.perf_counter()
        values = self.objective.accumulate(self.steps[step - 1], self.optimizer.collect)
        norm, lr = self.optimizer.step()
        seconds = time.perf_counter() - began
        values |= {"lr": lr, "epoch": step * self.config.epochs / len(self.steps), "time/step": seconds}
        values |= {} if norm is None else {"grad_norm": norm}
        values["tokens_per_second"] = values["tokens"] / seconds
        files.metrics(step, values)
        self.display.step(step, values)
        return step

    def _measure(self, files: RunFiles, phase: str, step: int) -> Numbers:
        self.display.phase(phase)
        values = self.objective.measure(self.display.phase_progress)
        if step not in dict(files.history("held_out/loss")):  # a finished run that is resumed says nothing twice
            files.metrics(step, values)
        self.display.phase("")
        return values

    def _finish(self, files: RunFiles, step: int) -> SupervisedResult:
        after = self._measure(files, "measuring after training", step)
        resume = f"policygrad {self.config.kind}"
        model = save_model(self.folder, self.objective.model, self.objective.tokenizer, resume)
        numbers = {"steps": step, "before": dict(self.before), "after": dict(after)}
        write_atomically(self.folder / "result.json", json.dumps(numbers, indent=1) + "\n")
        summary = self.objective.summary(self.before, after)
        self.display.finish({**summary, "model": str(model), "run": str(self.folder)})
        return SupervisedResult(self.folder, step, self.before, after, model)

    def _facts(self) -> dict[str, str]:
        count = sum(p.numel() for p in self.objective.model.parameters())
        rows, epochs = sum(map(len, self.objective.units)), self.config.epochs
        return {
            "model": f"{self.config.model} ({count / 1e6:.2f}M parameters)",
            "data": f"{rows} rows, {epochs} epoch{'s' * (epochs > 1)} of {len(self.steps) // epochs} steps",
            **self.objective.facts,
            "run": str(self.folder),
        }

    def _save(self, files: RunFiles, step: int, *, final: bool) -> None:
        files.sync()
        tensors, values = self.optimizer.state()
        tensors["rng/torch"] = torch.get_rng_state()
        state = {"optimizer": values, "before": dict(self.before), "data": self.digest}
        try:
            checkpoint.save(self.folder / "checkpoints", step, tensors, state, keep=self.config.checkpoint.keep)
        except CheckpointError as error:
            if final:
                raise
            every = self.config.checkpoint.every
            self.display.note(f"{error}; training goes on, the next try is in {every} steps")

    def _restore(self) -> int:
        """Steps done, after the newest intact checkpoint is put back; 0 without one."""
        saved = checkpoint.load_latest(self.folder / "checkpoints", warn=self.display.note)
        if saved is None:
            return 0
        if saved.state["data"] != self.digest:
            raise RunError(
                f"{self.config.data} (or the held-out file) is not what the run in {self.folder} began with: put the old file "
                "back, or train anew with another --output"
            )
        tensors = dict(saved.tensors)
        torch.set_rng_state(tensors.pop("rng/torch"))
        trained = {name.removeprefix("weights/") for name in tensors if name.startswith("weights/")}
        if trained != set(self.optimizer.masters):
            odd = min(trained ^ set(self.optimizer.masters))
            raise RunError(
                f"{saved.path} was made with other trainable parameters ({odd}, say): leave learner.trainable as it was"
            )
        try:
            self.optimizer.restore(tensors, saved.state["optimizer"])
        except (KeyError, RuntimeError) as error:
            raise RunError(f"{saved.path} does not fit the model {self.config.model!r}: {error}") from error
        self.before = saved.state["before"]
        return saved.step


def _digest(config: Supervised) -> list[str]:
    """sha256 of the data, so that a resumed run sees the same rows in the same order."""
    files = [config.data] + ([config.held_out] if config.held_out else [])
    return [hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in files]
