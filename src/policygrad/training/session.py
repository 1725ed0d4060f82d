"""A run from beginning to end: set up, measure, train with checkpoints, measure again, save a model that others load."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from policygrad.core.metrics import Mean, Metrics
from policygrad.errors import RunError
from policygrad.learners.local.learner import LocalLearner
from policygrad.trackers import Display, Outline, RunFiles, Silent, change
from policygrad.training.config.run import Run
from policygrad.training.config.toml import dumps, load
from policygrad.training.evaluate import evaluate
from policygrad.training.folder import new_folder
from policygrad.training.keeping import Keeper
from policygrad.training.loop import Done, Progress, loop
from policygrad.training.memory import peak_memory
from policygrad.training.record import Recorder
from policygrad.training.saving import restore_progress, save_model, write_atomically
from policygrad.training.setup import prepare
from policygrad.training.stopping import Stopping


@dataclass(frozen=True)
class Result:
    """What a run leaves."""

    output: Path
    steps: int
    before: float | None
    """Held-out score before training; None without evaluation, or where every reward failed. Likewise `after`."""
    after: float | None
    model: Path | None
    """None when the run was stopped before its last step; it can be resumed."""


def train(
    run: Run | None = None,
    *,
    resume: str | Path | None = None,
    stop_after: int | None = None,
    display: Display | None = None,
) -> Result:
    """Trains as `run` says, or goes on with the run in the folder `resume`.

    stop_after: stop, resumably, after so many steps of this call.

    Raises:
        RunError, ModelError, ValueError: what cannot be trained, with the way out.
    """
    if resume is not None:
        folder = Path(resume)
        if not (folder / "run.toml").is_file():
            raise RunError(f"{folder} is not a run's folder: it has no run.toml")
        run = (run or load(folder / "run.toml")).resolved()
    else:
        run = (run or Run()).resolved()
        folder = new_folder(run.output, run.algorithm.name)
    run = replace(run, output=str(folder))
    with ExitStack() as stack:
        shown = stack.enter_context(display or Silent())
        return Session(run, folder, shown, stack).go(resumed=resume is not None, stop_after=stop_after)


class Session:
    """One process's share of a run."""

    def __init__(self, run: Run, folder: Path, display: Display, stack: ExitStack) -> None:
        self.run, self.folder, self.display = run, folder, display
        display.phase("loading the model")
        torch.manual_seed(run.seed)  # what a model or a reward may draw here; completions have generators of their own
        self.ground = prepare(
            stack,
            model=run.model,
            task=run.task,
            reward=run.reward,
            needs=run.algorithm.declared,
            step_end=run.step_end,
            held_out=run.held_out,
            seed=run.seed,
            dtype=run.learner.dtype,
            device=run.learner.device,
            workers=run.rewards.workers,
            budget=run.rewards.budget,
            max_tokens=run.sampling.max_tokens,
        )
        self.learner = LocalLearner(
            self.ground.model,
            run.algorithm,
            lr=run.lr,
            steps=run.steps,
            temperature=run.sampling.temperature,
            config=run.learner,
            optimizer=run.optimizer,
        )
        self.held_out = self.ground.task.held_out(run.evaluation.problems) if run.evaluation.problems else []
        for example in self.held_out:  # before there is a folder: a prompt that leaves no room for the completion
            self.ground.tokenizer.encode(example.prompt, run.sampling.max_tokens, example.source or "a held-out prompt")
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "run.toml").exists():  # first of all, so that a folder with anything in it can be resumed
            write_atomically(folder / "run.toml", dumps(run))
        self.recorder = Recorder(stack.enter_context(RunFiles(folder)), display)
        self.stopping = Stopping(display.note)
        self.before: float | None = None
        self.measured = False  # `before`
        self.binary = True
        self.until = run.steps

    def go(self, *, resumed: bool, stop_after: int | None) -> Result:
        """The whole run, from the newest checkpoint when there is one."""
        run, files = self.run, self.recorder.files
        saved = restore_progress(self.folder, run, self.learner, self.display.note) if resumed else None
        progress, extra = saved or (Progress(run.algorithm), {})
        self.before, self.binary = extra.get("before"), extra.get("binary", True)
        self.measured = extra.get("measured", self.before is not None)
        files.truncate_after(progress.step if saved else -1)
        write_atomically(self.folder / "run.toml", dumps(run))
        title = f"policygrad · {run.algorithm.name} on {run.task}"
        self.display.start(
            Outline(
                title,
                self._facts(),
                run.steps,
                first_step=progress.step + 1,
                history=files.history("reward"),
                tokens=run.tokens,
                sampled=progress.tokens,
            )
        )
        if self.held_out and not self.measured:
            self.before, self.measured = self._evaluate("evaluating before training", progress.step), True
        self.until = run.steps if stop_after is None else min(run.steps, progress.step + stop_after)
        self.keeper = Keeper(self.folder, run, self.learner, files, progress, self._extra, self.display.note)
        source, sampler = self.ground.source, self.ground.sampler
        with self.stopping, self.keeper.rescuing():
            progress = loop(run, source, sampler, self.learner, progress, until=self.until, watcher=self)
        if progress.over(run):
            return self._finish(progress)
        stopped, resume = f"step {progress.step} of {run.steps}", f"policygrad train --resume {self.folder}"
        self.display.finish({"stopped after": stopped, "go on with": resume})
        return Result(self.folder, progress.step, self.before, None, None)

    def _finish(self, progress: Progress) -> Result:
        after = self._evaluate("evaluating after training", progress.step) if self.held_out else None
        model = save_model(self.folder, self.ground.model, self.ground.tokenizer)
        numbers = {
            "steps": progress.step,
            "tokens": progress.tokens,
            "seconds": progress.seconds,
            **peak_memory(),
            "held_out_before": self.before,
            "held_out_after": after,
        }
        write_atomically(self.folder / "result.json", json.dumps(numbers, indent=1) + "\n")
        self.display.finish({**self._gain(after), "model": str(model), "run": str(self.folder)})
        return Result(self.folder, progress.step, self.before, after, model)

    def _gain(self, after: float | None) -> dict[str, str]:
        if not self.held_out:
            return {}
        if self.before is None and after is None:
            return {"held-out": "nothing could be scored, before or after: see the notes about the reward functions"}
        name = f"held-out {'accuracy' if self.binary else 'reward'}"
        if self.before is None or after is None:
            before, now = ("not scored" if score is None else f"{score:.2f}" for score in (self.before, after))
            return {name: f"{before} -> {now}"}
        return {name: change(self.before, after)}

    def _facts(self) -> dict[str, str]:
        run = self.run
        facts = {
            "model": f"{run.model} ({sum(p.numel() for p in self.ground.model.parameters()) / 1e6:.2f}M parameters)",
            "batch": f"{run.prompts_per_step} prompts × {run.group_size} samples, {run.steps} steps"
            + ("" if run.tokens is None else f" or {run.tokens:,} tokens, whichever is first"),
            "reward": ", ".join(self.ground.rewards),
            "run": str(self.folder),
        }
        if self.held_out and self.ground.task.held_out_is_train:
            facts["held out"] = "too few prompts to hold any out: measured on the training prompts"
        return facts

    def _evaluate(self, phase: str, step: int) -> float | None:
        """Held-out mean at this step, None when every reward failed; what the files already hold (a run killed after measuring)
        is not measured again."""
        run, files = self.run, self.recorder.files
        known = dict(files.history("held_out"))
        if step in known:
            return known[step]
        self.display.phase(phase)
        source, sampler = self.ground.source, self.ground.sampler
        outcome = evaluate(
            source, sampler, self.held_out, run.evaluation.samples, run.sampling, self.display.phase_progress
        )
        for message in outcome.messages:
            self.recorder.note(message)
        if outcome.failed:
            total = len(self.held_out) * run.evaluation.samples
            failed = f"{outcome.failed} of {total} held-out completions have no reward and count as 0"
            self.recorder.note(failed, "held-out completions without a reward")
        self.display.phase("")
        if not outcome.scored:
            return None
        self.binary = self.binary and outcome.binary
        files.metrics(step, {"held_out": outcome.mean, "held_out_stderr": outcome.standard_error()})
        return outcome.mean

    def record(self, done: Done) -> Metrics:
        """After every step: its lines in the files, its picture on the display, and perhaps an evaluation."""
        evaluation, step = self.run.evaluation, done.step
        self.recorder.step(done)
        if evaluation.every and step % evaluation.every == 0 and step < self.run.steps and self.held_out:
            score = self._evaluate(f"evaluating at step {step}", step)
            return {} if score is None else {"held_out": Mean(score)}
        return {}

    def save(self, progress: Progress) -> bool:
        """After every step: perhaps a checkpoint; whether to go on."""
        going = progress.step < self.until and not progress.over(self.run) and not self.stopping.asked
        self.keeper.keep(progress, final=not going)
        return going

    def _extra(self) -> dict[str, Any]:
        return {"before": self.before, "measured": self.measured, "binary": self.binary}
