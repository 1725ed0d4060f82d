"""A signal or a time limit in any phase of a run: it ends resumably, and goes on to the weights and files of an unbroken one."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import policygrad as pg
from doubles.files import rows, same, untimed, weights, write_rows
from doubles.folder_engine import SilentEngine
from doubles.forked import Forked
from doubles.stops import AtDecoding, AtPhase, AtUpdate, learner_that_sends, send
from doubles.trackers import Record
from policygrad import cli
from policygrad.checkpoint.format import newest_step
from policygrad.commands import STOPPED
from policygrad.samplers.engines import probe, registry
from policygrad.trackers.console import PlainTracker
from policygrad.training.config.serialization import dump_config
from policygrad.training.interrupts import StopController, StopRequested, parse_duration
from policygrad.utils import signals

ALL = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


@pytest.fixture(scope="module")
def run(small: pg.Run) -> pg.Run:
    return replace(
        small,
        reward=(small.reward[0].replace(":starts_with_a_digit", ":letters"),),
        steps=4,
        prompts_per_step=3,
        samples_per_prompt=4,
        evaluation=pg.EvaluationConfig(problems=3, samples_per_prompt=2, every=2),
        checkpoint=pg.CheckpointConfig(every=100),
    )


@pytest.fixture(scope="module")
def uninterrupted(run: pg.Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pg.train(replace(run, output=str(tmp_path_factory.mktemp("whole") / "run")), display=False).output


def loading(number: signal.Signals) -> dict[str, Any]:
    def sampler(model: Any, tokenizer: Any) -> pg.LocalSampler:
        send(number)
        return pg.LocalSampler.from_tokenizer(model, tokenizer)

    return {"sampler": sampler}


def decoding(number: signal.Signals, at: int) -> dict[str, Any]:
    return {"sampler": lambda model, tokenizer: AtDecoding(model, tokenizer, at, number)}


def learning(number: signal.Signals, where: str, at: int) -> dict[str, Any]:
    return {"learner": lambda model, run: learner_that_sends(model, run, where, at, number)}


PHASES: dict[str, tuple[Callable[[signal.Signals], dict[str, Any]], int]] = {
    "loading": (loading, 0),
    "measuring before": (lambda s: {"display": AtPhase("evaluating before training", s)}, 0),
    "sampling the first step": (lambda s: decoding(s, 2), 0),  # the first call is the evaluation's
    "sampling": (lambda s: decoding(s, 3), 1),
    "updating": (lambda s: learning(s, "update", 2), 2),
    "evaluating": (lambda s: {"display": AtPhase("evaluating at step 2", s)}, 2),
    "measuring after": (lambda s: {"display": AtPhase("evaluating after training", s)}, 4),
}
"""What to give to a run, and the steps that are then saved."""


FEW = ("loading", "sampling", "updating")
"""The others are `make test-full`."""
CASES = [
    *(
        (phase, ALL[i % 3]) if phase in FEW else pytest.param(phase, ALL[i % 3], marks=pytest.mark.full)
        for i, phase in enumerate(PHASES)
    ),
    *(pytest.param("loading", number, marks=pytest.mark.full) for number in ALL[1:]),
]


@pytest.mark.parametrize(("phase", "number"), CASES)
def test_a_signal_in_any_phase_is_resumable(
    run: pg.Run, uninterrupted: Path, tmp_path: Path, phase: str, number: signal.Signals
) -> None:
    make, done = PHASES[phase]
    record = Record()
    given = {"display": record} | make(number)
    folder = tmp_path / "run"
    handlers = [signal.getsignal(s) for s in ALL]
    result = pg.train(replace(run, output=str(folder)), **given)
    assert [signal.getsignal(s) for s in ALL] == handlers
    assert (result.steps, result.model, result.interrupted) == (done, None, True)
    message = given["display"]
    assert "resume with" in message.summary or "resume with: " in message.said
    assert (folder / "run.toml").exists()
    assert newest_step(folder / "checkpoints") == done  # else it would begin anew, and come to the same later
    rerun = pg.train(run, resume=folder, display=False)
    assert (rerun.steps, rerun.interrupted) == (4, False)
    assert same(weights(uninterrupted), weights(folder))
    assert untimed(uninterrupted / "metrics.jsonl") == untimed(folder / "metrics.jsonl")
    assert rows(uninterrupted / "completions.jsonl") == rows(folder / "completions.jsonl")


def test_a_signal_while_saving_finishes_the_checkpoint(run: pg.Run, uninterrupted: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    every = replace(run, output=str(folder), checkpoint=pg.CheckpointConfig(every=1))
    result = pg.train(every, display=False, **learning(signal.SIGTERM, "state", 2))
    assert result.interrupted
    assert result.steps == 1  # the second time it is packed: for its first checkpoint
    pg.train(run, resume=folder, display=False)
    assert same(weights(uninterrupted), weights(folder))


@pytest.mark.full
def test_a_silent_engine_does_not_delay_a_stop(run: pg.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step whose weights it was to load is complete, and a resumed run ends as one that never stopped."""
    monkeypatch.setitem(registry.ENGINES, "silent", "doubles.folder_engine:SilentEngine")
    monkeypatch.setattr(
        probe, "NUM_PROMPTS", 1
    )  # what is asked of an engine after each of its loads, which is most of the run
    folders = {name: tmp_path / name for name in ("stopped", "whole")}
    sampler = pg.SamplerConfig(engine="silent", urls=("http://silent",))
    served = replace(run, sampler=sampler, steps=3, prompts_per_step=2, samples_per_prompt=2)
    served = replace(served, evaluation=pg.EvaluationConfig(problems=0))
    monkeypatch.setattr(SilentEngine, "loads", 0)
    stopped = pg.train(replace(served, output=str(folders["stopped"])), display=False)
    assert (stopped.steps, stopped.interrupted) == (2, True)
    assert newest_step(folders["stopped"] / "checkpoints") == 2
    for name, options in (("stopped", {"resume": folders["stopped"]}), ("whole", {})):
        monkeypatch.setattr(SilentEngine, "loads", 100)  # from here on it answers
        result = pg.train(replace(served, output=str(folders[name])), display=False, **options)
        assert (result.steps, result.interrupted) == (3, False)
    assert same(weights(folders["whole"]), weights(folders["stopped"]))
    assert rows(folders["whole"] / "completions.jsonl") == rows(folders["stopped"] / "completions.jsonl")


class Here:
    """A reward that no process can be sent, so that it runs in this one; it sends a signal at its `at`-th call."""

    def __init__(self, at: int = 0) -> None:
        self.lock, self.left = threading.Lock(), at
        self.__name__ = "here"

    def __call__(self, prompts: Any, completions: Any, **columns: Any) -> list[float]:
        self.left -= 1
        if self.left == 0:
            send(signal.SIGINT)
        return [sum(map(ord, text)) % 7 / 7 for text in completions]


@pytest.mark.filterwarnings("ignore:reward 'here' cannot be sent")
def test_a_signal_while_rewards_are_computed(run: pg.Run, tmp_path: Path) -> None:
    run = replace(run, evaluation=pg.EvaluationConfig(problems=0), steps=3)
    alone = Here()
    uninterrupted = pg.train(replace(run, reward=(alone,), output=str(tmp_path / "whole")), display=False).output
    each, folder = -alone.left // 3, tmp_path / "run"
    assert each >= 1
    stopped = pg.train(replace(run, reward=(Here(each + 1),), output=str(folder)), display=False)
    assert (stopped.steps, stopped.model, stopped.interrupted) == (1, None, True)
    pg.train(replace(run, reward=(Here(),)), resume=folder, display=False)
    assert same(weights(uninterrupted), weights(folder))
    assert untimed(uninterrupted / "metrics.jsonl") == untimed(folder / "metrics.jsonl")


def test_sampling_stops_between_two_tokens(run: pg.Run, tmp_path: Path) -> None:
    made: list[AtDecoding] = []

    def sampler(model: Any, tokenizer: Any) -> AtDecoding:
        made.append(AtDecoding(model, tokenizer, 2, signal.SIGTERM))
        return made[0]

    long = replace(run, sampling=pg.SamplingParams(max_tokens=40), output=str(tmp_path / "run"))
    assert pg.train(long, sampler=sampler, display=False).interrupted
    assert made[0].passes == 2


@pytest.mark.full
def test_an_evaluation_that_parts_need_is_finished(run: pg.Run, tmp_path: Path) -> None:
    """A reference that waits for better scores counts evaluations: that one is finished first."""
    algorithm = replace(pg.PRORL, filters=(), shaping=(), reference=pg.Reference(refresh_after_stall=1))
    run = replace(run, algorithm=algorithm)
    uninterrupted = pg.train(replace(run, output=str(tmp_path / "whole")), display=False).output
    folder = tmp_path / "run"
    stopped = pg.train(replace(run, output=str(folder)), display=AtPhase("evaluating at step 2", signal.SIGTERM))
    assert (stopped.steps, stopped.interrupted) == (2, True)
    assert [m["step"] for m in rows(folder / "metrics.jsonl") if "eval/reward" in m] == [0, 2]
    pg.train(resume=folder, display=False)
    assert same(weights(uninterrupted), weights(folder))
    assert untimed(uninterrupted / "metrics.jsonl") == untimed(folder / "metrics.jsonl")


def test_a_time_limit_stops_a_run_in_time(run: pg.Run, tmp_path: Path) -> None:
    record = Record()
    stopped = pg.train(replace(run, output=str(tmp_path / "run")), time_limit="0.001s", display=record)
    assert stopped.interrupted
    assert pg.train(run, resume=tmp_path / "run", time_limit="2h", display=False).steps == 4


def test_a_time_limit_interrupts_waiting() -> None:
    """An engine's answer, a reward: it is not waited for until it comes."""
    began = time.monotonic()
    with StopController(0.02) as stopping, pytest.raises(StopRequested), stopping.interruptible():
        threading.Event().wait(60)
    assert time.monotonic() - began < 50  # it was not waited to its end


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_no_step_starts_that_would_exceed_the_limit() -> None:
    clock = Clock()
    stopping = StopController(100.0, clock)
    clock.now = 20.0  # loading
    stopping.training_started()
    for now, asked in ((30.0, False), (60.0, False), (69.0, False), (71.0, True)):  # the longest took 30 seconds
        clock.now = now
        stopping.step_done()
        assert stopping.requested is asked


@pytest.mark.parametrize(
    ("text", "value"),
    [("23h50m", 85800.0), ("90s", 90.0), ("1d12h", 129600.0), ("45m", 2700.0), ("1h0.5s", 3600.5)],
)
def test_durations(text: str, value: float) -> None:
    assert parse_duration(text, "--time-limit") == value


@pytest.mark.parametrize("text", ["", "3600", "23:50:00", "h", "-5m", "5m3h", "soon"])
def test_invalid_durations_are_refused(text: str) -> None:
    with pytest.raises(pg.ConfigError, match="--time-limit must be a time such as 23h50m"):
        parse_duration(text, "--time-limit")


@contextmanager
def signalled() -> Iterator[StopController]:
    with StopController() as stopping:
        send(signal.SIGTERM)
        assert stopping.requested
        yield stopping


def test_simultaneous_signals_are_one_and_a_later_one_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from policygrad.training import interrupts as module

    with signalled():
        send(signal.SIGTERM)  # the group's, or the shell's
    monkeypatch.setattr(module, "DUPLICATE_WINDOW_SECONDS", 0.0)
    with signalled():
        send(signal.SIGHUP)  # a terminal that has gone says so more than once
        with pytest.raises(KeyboardInterrupt) as caught:
            send(signal.SIGINT)
        assert not isinstance(caught.value, StopRequested)


def test_an_earlier_request_stops_interruptible_work_at_once() -> None:
    with signalled() as stopping, pytest.raises(StopRequested), stopping.interruptible():
        raise AssertionError("was begun")


def stops(does: Callable[[StopController], object]) -> bool:
    """Whether this ends as a run does that was stopped."""
    try:
        with StopController() as stopping, stopping.interruptible():
            does(stopping)
    except StopRequested:
        return True
    return False


SENDS = """
import os, signal

class Sends:
    def __set_name__(self, owner, name):  # what is raised here, Python 3.11 makes a RuntimeError
        os.kill(os.getpid(), signal.SIGTERM)
        self.name = [name for _ in range(1000)][-1]

class Whole:
    part = Sends()
"""


def test_a_signal_waits_for_the_import_that_it_lands_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sends_while_imported.py").write_text(SENDS)
    monkeypatch.syspath_prepend(tmp_path)
    seen: list[str] = []

    def load(stopping: StopController) -> None:
        seen.append(import_module("sends_while_imported").Whole.part.name)
        threading.Event().wait(60)  # which the signal ends

    assert stops(load)
    assert seen == ["part"]


def test_a_second_signal_does_not_wait_for_an_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "never_imported.py").write_text(
        "import os, signal\nfor _ in range(1000000):\n    os.kill(os.getpid(), signal.SIGTERM)\nraise SystemExit\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(signals, "DUPLICATE_WINDOW_SECONDS", 0.001)
    assert stops(lambda _: import_module("never_imported"))


def test_an_imported_program_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = """
import os, signal
from policygrad.training.interrupts import StopController, StopRequested

try:
    with StopController() as stopping, stopping.interruptible():
        os.kill(os.getpid(), signal.SIGTERM)
        stopped = False
except StopRequested:
    stopped = True
"""
    (tmp_path / "stopped_while_imported.py").write_text(program)
    monkeypatch.syspath_prepend(tmp_path)
    assert import_module("stopped_while_imported").stopped


class Finalised:
    """Python drops what is raised in here."""

    def __del__(self) -> None:
        send(signal.SIGTERM)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_stop_dropped_by_a_finaliser_still_stops() -> None:
    done: list[bool] = []

    def finalise(stopping: StopController) -> None:
        Finalised()
        done.append(stopping.requested)

    assert stops(finalise)
    assert done == [True]


def test_a_stop_turned_into_another_error_still_stops() -> None:
    def load(stopping: StopController) -> None:
        try:
            send(signal.SIGTERM)
        except BaseException as error:
            raise ModuleNotFoundError("Could not import module 'LlamaConfig'") from error

    assert stops(load)


def test_other_errors_are_unchanged() -> None:
    with StopController() as stopping, pytest.raises(pg.ConfigError, match="wrong"), stopping.interruptible():
        raise pg.ConfigError("wrong")


class Interrupted(io.StringIO):
    """A stream that a signal comes upon in the midst of every write; it is no more reentrant than Python's own."""

    def __init__(self) -> None:
        super().__init__()
        self.busy, self.sent = False, 0

    def write(self, text: str) -> int:
        if self.busy:
            raise RuntimeError("reentrant call")
        self.busy = True
        if text.startswith("step ") and not self.sent:
            self.sent += 1
            send(signal.SIGTERM)
        written = super().write(text)
        self.busy = False
        return written


def test_a_signal_during_print_is_safe(run: pg.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Interrupted()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    result = pg.train(replace(run, output=str(tmp_path / "run")), display=PlainTracker(stream))
    assert stream.sent == 1
    assert (result.steps, result.interrupted) == (1, True)
    assert "resume with" in stream.getvalue()


def test_nohup_is_respected() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopController() as stopping:
            send(signal.SIGHUP)
            assert not stopping.requested
    finally:
        signal.signal(signal.SIGHUP, before)


# --- the command


@pytest.fixture
def argv(run: pg.Run, tmp_path: Path) -> list[str]:
    """The arguments that train in tmp_path/run."""
    config = replace(run, output=str(tmp_path / "run"), steps=3, evaluation=pg.EvaluationConfig(problems=0))
    (tmp_path / "config.toml").write_text(dump_config(config))
    return ["train", "--config", str(tmp_path / "config.toml"), "--allow-code", "/", "--plain"]


@pytest.mark.parametrize(
    ("options", "number"),
    [((), signal.SIGHUP), pytest.param(("--max-staleness", "2"), signal.SIGINT, marks=pytest.mark.full)],
)
def test_the_command_exits_with_75_and_prints_the_resume_command(
    argv: list[str], forked: Forked, options: tuple[str, ...], number: signal.Signals
) -> None:
    reader, writer = os.pipe()
    child = forked.start(cli.main, [*argv, "--steps", "100000", *options], stdout=writer)
    os.close(writer)
    with os.fdopen(reader) as said:
        assert any(line.startswith("step ") for line in said)
        os.kill(child.pid, number)
        message = said.read()
    child.join()
    assert child.exitcode == STOPPED == 75
    assert "resume with    policygrad train --resume" in message


@pytest.mark.full
def test_the_command_in_a_process_of_its_own_exits_with_75(argv: list[str]) -> None:
    child = subprocess.Popen(
        [sys.executable, "-m", "policygrad", *argv, "--steps", "100000"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        preexec_fn=partial(signal.signal, signal.SIGHUP, signal.SIG_DFL),  # also where these tests run below nohup
    )
    assert child.stdout is not None
    assert any(line.startswith(b"step ") for line in child.stdout)
    child.send_signal(signal.SIGHUP)
    message, _ = child.communicate()
    assert child.returncode == STOPPED
    assert b"resume with    policygrad train --resume" in message


def test_a_closed_pipe_does_not_end_the_run(argv: list[str], forked: Forked, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    assert forked.exit_code(cli.main, argv, stdout=writer) == 0
    os.close(writer)
    assert (tmp_path / "run" / "result.json").exists()


@pytest.mark.full
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_standard_output_does_not_end_the_run(argv: list[str], forked: Forked, tmp_path: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        assert forked.exit_code(cli.main, argv, stdout=full.fileno()) == 0
    assert (tmp_path / "run" / "result.json").exists()


def test_a_closed_terminal_does_not_end_the_run() -> None:
    """rich's own console ends the program."""
    from policygrad.trackers import CompositeTracker, RunInfo
    from policygrad.trackers.rich_display import TerminalTracker

    reader, writer = os.pipe()
    os.close(reader)
    stream = os.fdopen(writer, "w")
    record = Record()
    with pytest.warns(UserWarning, match="TerminalTracker"):
        CompositeTracker([TerminalTracker.for_stream(stream), record]).start(RunInfo("a run"))
    assert "TerminalTracker.start failed" in record.said
    with pytest.raises(BrokenPipeError):
        stream.close()


SUPERVISED = {"evaluating before training": 0, "updating": 2, "evaluating after training": 3}
"""Phases, and the steps that are then saved."""


@pytest.mark.parametrize(
    ("kind", "number", "phase"),
    [
        ("reward-model", signal.SIGINT, "evaluating before training"),
        ("sft", signal.SIGHUP, "updating"),
        ("sft", signal.SIGTERM, "evaluating after training"),
        pytest.param("sft", signal.SIGINT, "evaluating before training", marks=pytest.mark.full),
        pytest.param("reward-model", signal.SIGHUP, "updating", marks=pytest.mark.full),
        pytest.param("reward-model", signal.SIGTERM, "evaluating after training", marks=pytest.mark.full),
    ],
)
def test_fine_tuning_and_reward_models_stop_resumably(
    random_model: Path, tmp_path: Path, kind: str, number: signal.Signals, phase: str
) -> None:
    rows = [{"prompt": f"{i} =\n", "completion": str(i), "chosen": str(i), "rejected": "no"} for i in range(6)]
    held = [{"prompt": f"{i} + 1 =\n", "completion": str(i), "chosen": str(i), "rejected": "no"} for i in range(2)]
    how: dict[str, Any] = {"data": write_rows(tmp_path / "rows.jsonl", rows), "model": str(random_model)}
    how |= {"eval_data": write_rows(tmp_path / "held.jsonl", held), "batch_size": 2, "output": str(tmp_path / "run")}
    config = pg.SFTConfig(**how) if kind == "sft" else pg.RewardModelConfig(**how)
    train: Any = pg.train_sft if kind == "sft" else pg.train_reward_model
    given: dict[str, Any] = {"callbacks": [AtUpdate(2, number)]} if phase == "updating" else {}
    stopped = train(config, display=AtPhase(phase, number), **given)
    assert (stopped.steps, stopped.model, stopped.interrupted) == (SUPERVISED[phase], None, True)
    train(resume=tmp_path / "run", display=False)
    uninterrupted = train(replace(config, output=str(tmp_path / "whole")), display=False)
    assert same(weights(uninterrupted.output), weights(tmp_path / "run"))


def test_a_signal_while_the_model_is_saved_is_ignored(
    run: pg.Run, uninterrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is done, and says so."""
    from policygrad.training import base_trainer

    def save(*args: Any) -> Path:
        send(signal.SIGTERM)
        return original(*args)

    original = base_trainer.save_model
    monkeypatch.setattr(base_trainer, "save_model", save)
    result = pg.train(replace(run, output=str(tmp_path / "run")), display=False)
    assert (result.steps, result.interrupted) == (4, False)
    assert same(weights(uninterrupted), weights(tmp_path / "run"))
