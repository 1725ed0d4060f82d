"""A run from beginning to end: set up, measure, train with checkpoints, measure again, save a model that others load."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from policygrad.rewards import RewardPool
from policygrad.rollout.local import LocalSampler
from policygrad.rollout.model import load_codec, load_model, padding_id
from policygrad.rollout.source import Source
from policygrad.rollout.types import Sampling
from policygrad.tasks import load_task
from policygrad.tasks.types import Task
from policygrad.track import Display, RunFiles, Sample, Silent, change
from policygrad.training import checkpoint
from policygrad.training.config import Run
from policygrad.training.evaluate import Outcome, evaluate
from policygrad.training.learner import LocalLearner
from policygrad.training.loop import Done, Progress, loop
from policygrad.training.toml import algorithm_from_dict, algorithm_to_dict, dumps, load


class RunError(RuntimeError):
    """A run that cannot start or go on, with the way out."""


@dataclass(frozen=True)
class Result:
    """What a run leaves."""

    output: Path
    steps: int
    before: float | None
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
        run = run or load(folder / "run.toml")
    else:
        run = (run or Run()).resolved()
        folder = _new_folder(run)
    run = replace(run, output=str(folder))
    with ExitStack() as stack:
        shown = stack.enter_context(display or Silent())
        session = Session(run, folder, shown, stack)
        return session.go(resumed=resume is not None, stop_after=stop_after)


def _new_folder(run: Run) -> Path:
    if run.output is not None:
        folder = Path(run.output)
        if folder.exists() and not folder.is_dir():
            raise RunError(f"{folder} is a file: choose another --output")
        if folder.exists() and any(folder.iterdir()):
            raise RunError(f"{folder} is not empty: go on with it by --resume {folder}, or choose another --output")
        return folder
    number = 1
    while (folder := Path("runs") / f"{run.algorithm.name}-{number}").exists():
        number += 1
    return folder


def pick_device(name: str) -> str:
    """auto: cuda where there is one.

    Raises:
        RunError: a device this machine does not have.
    """
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError) as error:
        raise RunError(f"learner.device {name!r} cannot be used here: {str(error).splitlines()[0]}") from error
    return name


def reward_names(task: Task, chosen: tuple[str, ...]) -> tuple[str, ...]:
    """The rewards asked for, or the task's own.

    Raises:
        RunError: a task without rewards of its own, and none chosen.
    """
    names = chosen or task.rewards
    if not names:
        raise RunError(
            f"task {task.name!r} has no reward of its own: choose one, e.g. --reward exact_match or --reward math"
        )
    return tuple(names)


def measure_model(
    model: str,
    task: str = "embedded",
    *,
    reward: tuple[str, ...] = (),
    held_out: str | None = None,
    problems: int = 256,
    samples: int = 8,
    sampling: Sampling | None = None,
    seed: int = 0,
    device: str = "auto",
    dtype: str = "fp32",
    budget: float = 10.0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Outcome:
    """Scores of a model on a task's held-out problems. A run's folder stands for the model it trained."""
    questions = load_task(task, seed=seed, held_out=held_out)
    names = reward_names(questions, reward)
    network = load_model(model, dtype=dtype, device=pick_device(device))
    codec = load_codec(model, network)
    sampler = LocalSampler(network, codec.end, padding_id(codec))
    with RewardPool(names, budget=budget) as pool:
        source = Source(questions.train, codec, pool.score, seed)
        return evaluate(source, sampler, questions.held_out(problems), samples, sampling or Sampling(), progress)


class Session:
    """One process's share of a run."""

    def __init__(self, run: Run, folder: Path, display: Display, stack: ExitStack) -> None:
        self.run, self.folder, self.display = run, folder, display
        self.task = load_task(run.task, seed=run.seed, held_out=run.held_out)
        names = reward_names(self.task, run.reward)
        display.phase("loading the model")
        model = load_model(run.model, dtype=run.learner.dtype, device=pick_device(run.learner.device))
        self.codec = load_codec(run.model, model)
        for example in self.task.rows:  # a prompt too long for the model is better found now than in a week
            self.codec.encode(example.prompt, run.sampling.max_tokens, example.source or "a prompt")
        self.pool = stack.enter_context(RewardPool(names, workers=run.rewards.workers, budget=run.rewards.budget))
        self.source = Source(self.task.train, self.codec, self.pool.score, run.seed)
        self.learner = LocalLearner(
            model,
            run.algorithm,
            lr=run.lr,
            steps=run.steps,
            temperature=run.sampling.temperature,
            config=run.learner,
            optimizer=run.optimizer,
        )
        self.sampler = LocalSampler(model, self.codec.end, padding_id(self.codec))
        self.held_out = self.task.held_out(run.evaluation.problems) if run.evaluation.problems else []
        folder.mkdir(parents=True, exist_ok=True)
        self.files = stack.enter_context(RunFiles(folder))
        self.stopping = False
        self.told: set[str] = set()
        self.before: float | None = None
        self.binary = True

    def go(self, *, resumed: bool, stop_after: int | None) -> Result:
        """The whole run, from the newest checkpoint when there is one."""
        run, progress = self.run, Progress(self.run.algorithm)
        saved = checkpoint.load_latest(self.folder / "checkpoints", warn=self.display.note) if resumed else None
        if saved is not None:
            progress = self._restore(saved)
        self.files.truncate_after(progress.step if saved is not None else -1)
        write_atomically(self.folder / "run.toml", dumps(run))
        self.display.start(
            f"policygrad · {run.algorithm.name} on {run.task}",
            self._facts(),
            run.steps,
            progress.step + 1,
            history=self.files.history("reward"),
        )
        if self.held_out and self.before is None:
            self.before = self._evaluate("evaluating before training", progress.step)
        until = run.steps if stop_after is None else min(run.steps, progress.step + stop_after)
        with self._signals():
            progress = loop(
                run,
                self.source,
                self.sampler,
                self.learner,
                progress,
                until=until,
                watch=lambda done: self._watch(done, until),
            )
        if progress.step < run.steps:
            self.display.finish(
                {
                    "stopped after": f"step {progress.step} of {run.steps}",
                    "go on with": f"policygrad train --resume {self.folder}",
                }
            )
            return Result(self.folder, progress.step, self.before, None, None)
        return self._finish(progress)

    def _finish(self, progress: Progress) -> Result:
        after = self._evaluate("evaluating after training", progress.step) if self.held_out else None
        model = self._save_model()
        write_atomically(
            self.folder / "result.json",
            json.dumps({"steps": progress.step, "held_out_before": self.before, "held_out_after": after}, indent=1)
            + "\n",
        )
        summary: dict[str, str] = {}
        if self.before is not None and after is not None:
            summary[f"held-out {'accuracy' if self.binary else 'reward'}"] = change(self.before, after)
        self.display.finish({**summary, "model": str(model), "run": str(self.folder)})
        return Result(self.folder, progress.step, self.before, after, model)

    def _facts(self) -> dict[str, str]:
        run = self.run
        facts = {
            "model": f"{run.model} ({sum(p.numel() for p in self.learner.model.parameters()) / 1e6:.2f}M parameters)",
            "batch": f"{run.prompts_per_step} prompts × {run.group_size} samples, {run.steps} steps",
            "reward": ", ".join(reward_names(self.task, run.reward)),
            "run": str(self.folder),
        }
        if self.held_out and self.task.held_out_is_train:
            facts["held out"] = "too few prompts to hold any out: measured on the training prompts"
        return facts

    def _evaluate(self, phase: str, step: int) -> float:
        """Held-out mean at this step; what the files already hold (a run killed after measuring) is not measured again."""
        known = dict(self.files.history("held_out"))
        if step in known:
            return known[step]
        run = self.run
        self.display.phase(phase)
        outcome = evaluate(
            self.source, self.sampler, self.held_out, run.evaluation.samples, run.sampling, self.display.phase_progress
        )
        for message in outcome.messages:
            self.display.note(message)
        self.binary = self.binary and outcome.binary
        self.files.metrics(step, {"held_out": outcome.mean, "held_out_stderr": outcome.standard_error()})
        self.display.phase("")
        return outcome.mean

    def _watch(self, done: Done, until: int) -> bool:
        run, step = self.run, done.progress.step
        values = {name: metric.value for name, metric in done.metrics.items()}
        elapsed = values["time/rollout"] + values["time/update"]
        values["tokens_per_second"] = values["tokens/sampled"] / elapsed if elapsed else 0.0
        self.files.metrics(step, values)
        rows = _rows(done)
        self.files.completions(step, rows)
        for message in done.rollout.messages:
            kind = message.partition(" (completion ")[0]
            if kind not in self.told:
                self.told.add(kind)
                self.display.note(message)
        self._note_if_nothing_was_learned(step, done, values)
        shown = rows[step % len(rows)] if rows else None
        self.display.step(
            step, values, Sample(str(shown["prompt"]), str(shown["completion"]), shown["reward"]) if shown else None
        )
        if run.evaluation.every and step % run.evaluation.every == 0 and step < run.steps and self.held_out:
            self._evaluate(f"evaluating at step {step}", step)
        going = step < until and not self.stopping
        if not going or step % run.checkpoint.every == 0:
            self._save(done.progress, final=not going)
        return going

    def _note_if_nothing_was_learned(self, step: int, done: Done, values: dict[str, float]) -> None:
        """Says why, once per reason; how often it happened is in the metrics (`updates/skipped`)."""
        if values.get("updates/taken"):
            return
        truncated = done.batch.truncated
        if values.get("completions/failed_ratio") == 1.0:
            why = "no completion has a reward: see the notes about the reward functions"
        elif values.get("frac_reward_zero_std") == 1.0:
            why = "in every group all rewards are equal: the task is too hard, too easy, or the samples too few"
        elif truncated is not None and bool(truncated.all()) and not bool(done.batch.mask.any()):
            why = "every completion was cut off by the token budget, and the overlong mask drops those: raise --max-tokens"
        else:
            why = "the filters left no completion that could move the weights"
        if why not in self.told:
            self.told.add(why)
            self.display.note(f"step {step}: nothing was learned; {why}")

    def _save(self, progress: Progress, *, final: bool) -> None:
        tensors, values = self.learner.state()
        tensors["rng/torch"] = torch.get_rng_state()
        state = {
            "learner": values,
            "algorithm": algorithm_to_dict(progress.algorithm),
            "configured": algorithm_to_dict(self.run.algorithm),
            "position": progress.position,
            "before": self.before,
            "binary": self.binary,
        }
        self.files.sync()
        try:
            checkpoint.save(self.folder / "checkpoints", progress.step, tensors, state, keep=self.run.checkpoint.keep)
        except checkpoint.CheckpointError as error:
            if final:
                raise
            self.display.note(f"{error}; training goes on, the next try is in {self.run.checkpoint.every} steps")

    def _restore(self, saved: checkpoint.Checkpoint) -> Progress:
        tensors = dict(saved.tensors)
        torch.set_rng_state(tensors.pop("rng/torch"))
        try:
            self.learner.restore(tensors, saved.state["learner"])
        except (KeyError, RuntimeError) as error:
            raise RunError(f"{saved.path} does not fit the model {self.run.model!r}: {error}") from error
        self.before, self.binary = saved.state["before"], saved.state["binary"]
        algorithm = algorithm_from_dict(saved.state["algorithm"], str(saved.path))
        if saved.state["configured"] != algorithm_to_dict(self.run.algorithm):
            self.display.note(
                "the algorithm is not the one the checkpoint was made with: its parts start without their state"
            )
            algorithm = self.run.algorithm
        return Progress(algorithm, saved.step, saved.state["position"])

    def _save_model(self) -> Path:
        final, temporary = self.folder / "model", self.folder / ".tmp-model"
        shutil.rmtree(temporary, ignore_errors=True)
        self.learner.model.save_pretrained(temporary)  # type: ignore[operator]
        self.codec.tokenizer.save_pretrained(temporary)
        if final.exists():
            shutil.rmtree(final)
        temporary.rename(final)
        return final

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Ctrl-C and SIGTERM end the run after the step at hand, with a checkpoint; a second Ctrl-C ends it at once."""

        def stop(number: int, frame: FrameType | None) -> None:
            if self.stopping:
                raise KeyboardInterrupt
            self.stopping = True
            self.display.note("stopping after this step, with a checkpoint (again: at once)")

        try:
            before = {s: signal.signal(s, stop) for s in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:  # not the main thread: whoever runs us there keeps their handlers
            before = {}
        try:
            yield
        finally:
            for s, handler in before.items():
                signal.signal(s, handler)


def _rows(done: Done) -> list[dict[str, Any]]:
    """A step's completions, for the log: prompt, completion, reward, advantage (of the first token), truncated, tokens."""
    batch, rollout = done.batch, done.rollout
    counted, rewards = rollout.batch.counted.tolist(), rollout.batch.reward.tolist()
    advantages = done.psi[:, 0].tolist() if done.psi.shape[1] else [0.0] * len(counted)
    truncated = batch.truncated.tolist() if batch.truncated is not None else [False] * len(counted)
    return [
        {
            "prompt": prompt,
            "completion": text,
            "reward": reward if ok else None,
            "advantage": advantage,
            "tokens": tokens,
            "truncated": cut,
        }
        for prompt, text, reward, ok, advantage, tokens, cut in zip(
            rollout.prompts, rollout.texts, rewards, counted, advantages, batch.lengths.tolist(), truncated, strict=True
        )
    ]


def write_atomically(path: Path, text: str) -> None:
    """The file whole, or as it was."""
    temporary = path.with_name(f".tmp-{path.name}")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
