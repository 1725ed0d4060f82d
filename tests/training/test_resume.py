"""A run that was stopped, killed or failed is taken up again and ends bit for bit as one that never was."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import policygrad as pg
from doubles.failing import FailingSampler, learner_cut_short, learner_with_a_bad_gradient
from doubles.files import rows, same, untimed, weights
from doubles.forked import Forked
from doubles.resuming import check_resume
from doubles.trackers import Record
from policygrad.checkpoint import format as checkpoint
from policygrad.errors import RunError
from policygrad.samplers.base import SamplingParams
from policygrad.training.config.checkpoint import CheckpointConfig
from policygrad.training.config.evaluation import EvaluationConfig
from policygrad.training.config.run import Run
from policygrad.training.config.serialization import load_config
from policygrad.training.trainer import Trainer, train


@pytest.fixture(scope="module")
def small(small: Run) -> Run:
    """A still smaller run, whose every step moves the weights."""
    reward = (small.reward[0].replace(":starts_with_a_digit", ":letters"),)
    return replace(
        small, reward=reward, steps=4, prompts_per_step=2, samples_per_prompt=4, sampling=SamplingParams(max_tokens=6)
    )


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """All runs compute with one thread, as forks of this process must: sums of two threads differ in their last bit."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def uninterrupted(small: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing stopped."""
    output = str(tmp_path_factory.mktemp("uninterrupted") / "run")
    return train(replace(small, checkpoint=CheckpointConfig(every=100), output=output), display=False).output


def test_resume_at_every_step_is_bitwise(small: Run, tmp_path: Path) -> None:
    """Stopped after every step and taken up again, the weights and the files are those of a run never stopped.

    GRPO needs its reference again, and takes several updates a step. (test_every_algorithm_resumes.py has the others.)
    """
    small = replace(small, steps=2)
    algorithm = replace(pg.GRPO, update_rule=pg.GradientSteps(epochs=2, minibatches=2))
    full = train(replace(small, algorithm=algorithm, output=str(tmp_path / "whole")))
    pieces = tmp_path / "pieces"
    result = train(replace(small, algorithm=algorithm, output=str(pieces)), stop_after=1)
    while result.steps < small.steps:
        assert result.model is None
        result = train(resume=pieces, stop_after=1)
    assert result.steps == small.steps
    assert same(weights(full.output), weights(pieces))
    assert untimed(full.output / "metrics.jsonl") == untimed(pieces / "metrics.jsonl")
    assert rows(full.output / "completions.jsonl") == rows(pieces / "completions.jsonl")


@pytest.mark.full
def test_resume_is_bitwise_while_only_the_critic_is_fitted(small: Run, tmp_path: Path) -> None:
    """Killed in that phase, which ends within the run."""
    algorithm = replace(pg.PPO, critic=pg.Critic(pretrain=2, pretrain_until=1.0))
    check_resume(replace(small, algorithm=algorithm, steps=3), tmp_path)


@pytest.mark.full
def test_resume_is_bitwise_with_a_reference_that_has_moved(small: Run, tmp_path: Path) -> None:
    reference = pg.Reference(refresh_every=2, reset_optimizer=True)
    algorithm = replace(pg.PRORL, filters=(), shaping=(), reference=reference)
    check_resume(replace(small, algorithm=algorithm, steps=3), tmp_path, killed_after=2)


def resume_and_die_while_saving(folder: Path, moment: int) -> None:
    """Resume, and be killed at the call of the file system with this number, counted from 1, that a save makes."""
    calls = 0

    def count_calls(inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            return inner(*args, **kwargs)

        return call

    save = checkpoint.save_checkpoint

    def save_counted(*args: Any, **kwargs: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            for name in ("fsync", "replace", "rename", "open", "write"):
                patch.setattr(os, name, count_calls(getattr(os, name)))
            return save(*args, **kwargs)

    checkpoint.save_checkpoint = save_counted
    train(resume=folder, allow_code=("/",), display=False)


def test_resume_is_bitwise_after_sigkill_while_saving(
    small: Run, uninterrupted: Path, tmp_path: Path, forked: Forked
) -> None:
    """A run killed inside `save_checkpoint` of its third step goes on and ends with the weights of one never killed.

    (test_interrupted_save.py kills a save at 20 random moments; here the whole run is taken up again.)
    """
    killed = tmp_path / "killed"
    train(replace(small, output=str(killed)), stop_after=2)
    moments = random.Random(0).sample(range(1, 12), 2)
    for moment in moments:
        assert forked.exit_code(resume_and_die_while_saving, killed, moment) == -signal.SIGKILL
        assert not (killed / "model").exists()
    train(resume=killed)
    assert same(weights(uninterrupted), weights(killed))
    assert untimed(uninterrupted / "metrics.jsonl") == untimed(killed / "metrics.jsonl")


def failing(where: str, at: int) -> dict[str, Any]:
    """What makes a run fail: its `at`-th update finds a gradient of NaN, or is cut short; or a rollout fails."""
    if where in ("rollout", "interrupt"):
        error = KeyboardInterrupt() if where == "interrupt" else OSError("no workers")
        return {"sampler": lambda model, tokenizer: FailingSampler(model, tokenizer, at, error)}
    broken = learner_cut_short if where == "midst" else learner_with_a_bad_gradient
    return {"learner": lambda model, run: broken(model, run, at)}


@pytest.mark.parametrize(
    ("where", "error"), [("gradient", FloatingPointError), pytest.param("rollout", OSError, marks=pytest.mark.full)]
)
def test_a_failed_step_leaves_the_checkpoint_before_it(
    small: Run, uninterrupted: Path, tmp_path: Path, where: str, error: type[Exception]
) -> None:
    """The run that goes on from there ends with the weights and the files of one that never failed."""
    run = replace(small, checkpoint=CheckpointConfig(every=100), output=str(tmp_path / "run"))
    record = Record()
    with pytest.raises(error) as caught:
        train(run, display=record, **failing(where, 3))
    (message,) = [note for note in record.notes if "failed" in note]
    assert message.startswith("step 3 failed")
    assert f"resume={str(tmp_path / 'run')!r}) resumes from step 2" in message
    assert ("lower --lr or change --seed" in message) is (where == "gradient")
    assert caught.value.__notes__ == [message]
    train(resume=tmp_path / "run")
    assert same(weights(uninterrupted), weights(tmp_path / "run"))
    assert untimed(uninterrupted / "metrics.jsonl") == untimed(tmp_path / "run" / "metrics.jsonl")


@pytest.mark.full
def test_a_failure_between_updates_reports_the_saved_step(small: Run, tmp_path: Path) -> None:
    algorithm = replace(pg.DR_GRPO, update_rule=pg.GradientSteps(epochs=2, minibatches=2))
    run = replace(
        small,
        algorithm=algorithm,
        steps=3,
        checkpoint=CheckpointConfig(every=100, keep=1),
        output=str(tmp_path / "run"),
    )
    train(run, stop_after=1)
    record = Record()
    with pytest.raises(FloatingPointError):
        train(resume=tmp_path / "run", display=record, **failing("gradient", 4 + 2))  # the second of step 3's four
    (message,) = [note for note in record.notes if "step 3 failed" in note]
    assert "step 2 is saved: " in message
    assert "resume=" in message
    assert [p.name for p in sorted((tmp_path / "run" / "checkpoints").iterdir())] == ["step-000001", "step-000002"]
    saved = checkpoint.load_latest(tmp_path / "run" / "checkpoints", warn=pytest.fail)
    assert saved is not None
    assert saved.state["learner"]["optimizer"]["taken"] == 2 * 4
    assert all(tensor.isfinite().all() for name, tensor in saved.tensors.items() if name.startswith("weights/"))
    assert train(resume=tmp_path / "run").steps == 3
    full = train(replace(run, output=str(tmp_path / "whole")))
    assert same(weights(full.output), weights(tmp_path / "run"))


def test_an_interrupted_update_leaves_the_step_before_it(small: Run, uninterrupted: Path, tmp_path: Path) -> None:
    """It has moved some weights and not others: a copy of how they were is what is saved."""
    record = Record()
    run = replace(small, checkpoint=CheckpointConfig(every=100), output=str(tmp_path / "run"))
    with pytest.raises(RuntimeError):
        train(run, display=record, **failing("midst", 3))
    (message,) = [note for note in record.notes if "failed" in note]
    assert message.startswith("step 3 failed; step 2 is saved: ")
    train(resume=tmp_path / "run")
    assert same(weights(uninterrupted), weights(tmp_path / "run"))
    assert untimed(uninterrupted / "metrics.jsonl") == untimed(tmp_path / "run" / "metrics.jsonl")


def test_a_partial_step_is_not_saved(small: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the state is too large for a copy."""
    monkeypatch.setattr(Trainer, "max_snapshot_bytes", 100)
    record = Record()
    run = replace(small, checkpoint=CheckpointConfig(every=100), output=str(tmp_path / "run"))
    with pytest.raises(RuntimeError):
        train(run, display=record, **failing("midst", 2))
    assert not list((tmp_path / "run").glob("checkpoints/step-*"))
    (message,) = [note for note in record.notes if "failed" in note]
    assert "step 1 could not be saved (the weights have changed since" in message
    assert message.endswith("resumes from step 0")


def test_a_second_ctrl_c_ends_at_once(small: Run, tmp_path: Path) -> None:
    run = replace(small, checkpoint=CheckpointConfig(every=100), output=str(tmp_path / "run"))
    with pytest.raises(KeyboardInterrupt):
        train(run, display=False, **failing("interrupt", 2))
    assert not list((tmp_path / "run").glob("checkpoints/step-*"))


def test_a_token_budget_ends_the_run_also_across_resumes(small: Run, tmp_path: Path) -> None:
    run = replace(small, steps=50, tokens=60, evaluation=EvaluationConfig(problems=2, samples_per_prompt=2))
    record = Record()
    full = train(replace(run, output=str(tmp_path / "whole")), display=record)
    sampled = [m["tokens/sampled"] for m in rows(full.output / "metrics.jsonl") if "reward" in m]
    assert 1 < full.steps == len(sampled) < 50
    assert sum(sampled[:-1]) < 60 <= sum(sampled)
    assert full.model is not None
    numbers = json.loads((full.output / "result.json").read_text())
    assert numbers["tokens"] == sum(sampled)
    assert numbers["eval_reward_after"] == full.after is not None
    assert 50 < numbers["peak_memory_mib"] < 50_000
    clocks = [m["time/rollout"] + m["time/update"] for m in rows(full.output / "metrics.jsonl") if "reward" in m]
    assert numbers["seconds"] == pytest.approx(sum(clocks))

    pieces = tmp_path / "pieces"
    result = train(replace(run, output=str(pieces)), stop_after=1)
    while result.model is None:
        result = train(resume=pieces, stop_after=1)
    assert result.steps == full.steps
    assert same(weights(full.output), weights(pieces))
    rerun = json.loads((pieces / "result.json").read_text())
    clocks = [m["time/rollout"] + m["time/update"] for m in rows(pieces / "metrics.jsonl") if "reward" in m]
    assert rerun["tokens"] == numbers["tokens"]
    assert rerun["seconds"] == pytest.approx(sum(clocks))

    more = train(
        replace(load_config(pieces / "run.toml", Run()), tokens=int(sum(sampled)) + 1), resume=pieces
    )  # a larger budget goes on
    assert more.steps == full.steps + 1


@pytest.mark.full
def test_resume_is_bitwise_with_refresh_after_stall(small: Run, tmp_path: Path) -> None:
    """Held-out problems that nothing can solve: best after step 1, no better after 2 and 3, so anew with the 4th rollout."""
    folder = Path(small.task).parent
    (folder / "stalls.py").write_text(
        "def digits(prompts, completions, **columns):\n"
        "    return [0.0 if a == 'none' else float(c[:1].isdigit()) for c, a in zip(completions, columns['answer'])]\n"
    )
    (folder / "held.jsonl").write_text('{"prompt": "9 + 9 =\\n", "answer": "none"}\n')
    run = replace(
        small,
        algorithm=replace(
            pg.PRORL, filters=(), shaping=(), reference=pg.Reference(refresh_after_stall=2, reset_optimizer=True)
        ),
        reward=(f"{folder / 'stalls.py'}:digits",),
        eval_data=str(folder / "held.jsonl"),
        evaluation=EvaluationConfig(problems=1, samples_per_prompt=2, every=1),
        steps=5,
    )
    full = check_resume(run, tmp_path, killed_after=2)
    metrics = rows(full / "metrics.jsonl")
    assert [m["step"] for m in metrics if m.get("reference/refreshed")] == [4]


def test_fewer_steps_than_completed_are_refused(small: Run, tmp_path: Path) -> None:
    run = replace(small, steps=3, output=str(tmp_path / "run"))
    train(run, stop_after=2)
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file() and p.name != "lock"}
    with pytest.raises(RunError, match="has completed 2 steps, more than steps=1"):
        train(replace(run, steps=1), resume=tmp_path / "run")
    assert {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file() and p.name != "lock"} == before
    assert train(replace(run, steps=2), resume=tmp_path / "run").model is not None  # where it is, it may end


def test_resuming_with_an_algorithm_without_state_is_refused(small: Run, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(replace(small, algorithm=pg.REINFORCE, steps=2, output=str(folder)), stop_after=1)
    with pytest.raises(RunError, match=r"'critic.*', which a2c needs: .* --model"):
        train(replace(small, algorithm=pg.A2C, steps=2), resume=folder)


def test_resume_deletes_what_a_killed_save_left(small: Run, tmp_path: Path) -> None:
    run = replace(small, steps=3, checkpoint=CheckpointConfig(every=1, keep=3), output=str(tmp_path / "run"))
    train(run, display=False)
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 3
    train(replace(run, checkpoint=CheckpointConfig(every=1, keep=1)), resume=tmp_path / "run", display=False)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000003"]


@pytest.mark.parametrize(
    ("every", "keep", "stops"),
    [
        (25, 2, (1, 2)),
        pytest.param(3, 1, (2,), marks=pytest.mark.full),
        pytest.param(2, 2, (3,), marks=pytest.mark.full),
        pytest.param(1, 3, (1,), marks=pytest.mark.full),
    ],
)
def test_a_stopped_run_keeps_the_same_checkpoints(
    small: Run, tmp_path: Path, every: int, keep: int, stops: tuple[int, ...]
) -> None:
    """What a stop leaves between those of every so many steps takes nobody's place, and is gone in the end."""
    run = replace(small, steps=4, checkpoint=CheckpointConfig(every, keep), evaluation=EvaluationConfig(problems=0))

    def kept(name: str) -> list[str]:
        return sorted(path.name for path in (tmp_path / name / "checkpoints").iterdir())

    train(replace(run, output=str(tmp_path / "whole")), display=False)
    stopped = replace(run, output=str(tmp_path / "stopped"))
    for done, step in enumerate(stops):
        before = stops[done - 1] if done else 0
        train(stopped, resume=stopped.output if done else None, stop_after=step - before, display=False)
        assert kept("stopped")[-1] == f"step-{step:06d}"
        assert len(kept("stopped")) <= keep
    train(stopped, resume=stopped.output, display=False)
    assert kept("stopped") == kept("whole")
