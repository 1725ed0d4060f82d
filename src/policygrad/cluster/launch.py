"""`policygrad train --cluster`: connects, finds room, starts rank 0's actor and waits for what it comes to."""

from __future__ import annotations

import os
import platform
import re
import signal
import socket
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from policygrad.checkpoint.format import newest_step
from policygrad.cluster.actors import (
    ActorFactory,
    LearnerActors,
    RayEnvironmentFactory,
    RayRewardPool,
    RaySampler,
    unwrap_error,
)
from policygrad.cluster.config import (
    AUTO,
    CLIENT,
    ENVIRONMENTS,
    LEARNERS,
    REWARDS,
    SAMPLERS,
    SHORTAGE_HINT,
    ActorGroup,
    ClusterConfig,
    describe_shortage,
    parse_address,
    plan_actor_groups,
)
from policygrad.errors import HangError, PolicygradError, RunError, install_command
from policygrad.trackers import Tracker, default_tracker
from policygrad.training.base_trainer import TrainingResult
from policygrad.training.config.run import Run
from policygrad.training.config.run_name import name_run
from policygrad.training.interrupts import STOP_MESSAGE
from policygrad.training.run_folder import create_next_free, resolve_resume_folder
from policygrad.training.setup import Placement
from policygrad.training.trainer import Trainer
from policygrad.utils.signals import DUPLICATE_WINDOW_SECONDS, SignalHandlers

# The actor that runs a training: rank 0 of those that learn. It makes the run's other actors, which end with it.


@dataclass(frozen=True, eq=False)
class TrainJob:
    """What is to be trained."""

    run: Run
    """`output` names its folder."""
    directory: str
    """Where the command was given."""
    resume: str | None = None
    stop_after: int | None = None
    stop_before: str | None = None
    overwrite: bool = False


Outcome = tuple[TrainingResult[float | None], str]
"""(what a training leaves, the command that goes on with it)."""


class CancellationTracker(Tracker):
    """Ends the run as a signal does, where whoever has begun it wants that. It looks whenever something is told: other threads
    than this one cannot."""

    def __init__(self) -> None:
        self._stopping = False

    def log(self, step: int, metrics: Mapping[str, float], completions: Sequence[Mapping[str, Any]] = ()) -> None:
        self._check()

    def phase(self, text: str, done: int = 0, total: int = 0) -> None:
        self._check()

    def _check(self) -> None:
        import ray

        if not self._stopping and ray.get_runtime_context().is_canceled():
            self._stopping = True
            signal.raise_signal(signal.SIGTERM)  # Ray keeps SIGINT from its processes


def installed_versions() -> dict[str, str]:
    """What driver and actors have to agree on."""
    from importlib.metadata import version

    return {
        "policygrad": version("policygrad"),
        "Python": platform.python_version().rpartition(".")[0],
        "torch": version("torch"),
    }


class TrainerActor:
    """The actor. Where it dies Ray starts it again, with what it was asked: it goes on from the newest checkpoint."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._outcome: Outcome | PolicygradError | None = None

    def __repr__(self) -> str:
        return self._name

    def versions(self) -> dict[str, str]:
        """As `versions`."""
        return installed_versions()

    def folder(self, work: TrainJob) -> TrainJob:
        """With the names of folders as they are here.

        Raises:
            RunError: this machine does not see the folder in which the command was given.
        """
        _change_directory(work.directory)
        run = work.run
        resume = resolve_resume_folder(work.resume, "train", run)
        if resume is None and run.output is None and not work.overwrite:
            made, _ = create_next_free(name_run(run.resolve().algorithm, run.sampling.max_tokens).name)
            run = replace(run, output=str(made))
        return replace(work, run=run if resume is None else replace(run, output=resume), resume=resume)

    def train(self, work: TrainJob, site: ActorFactory, roles: tuple[ActorGroup, ...]) -> Outcome:
        """The training, from its beginning or from where this actor's predecessor was."""
        try:
            self._outcome = self._train(work, site, roles)
        except PolicygradError as error:
            self._outcome = error
            raise
        return self._outcome

    def outcome(self) -> Outcome | PolicygradError | None:
        """What `train` came to. Of one that was cancelled Ray says only that."""
        return self._outcome

    def _train(self, work: TrainJob, site: ActorFactory, roles: tuple[ActorGroup, ...]) -> Outcome:
        _change_directory(work.directory)
        folder = Path(work.run.output or ".")
        resume, left = work.resume, work.stop_after
        if _was_restarted() and (folder / "run.toml").is_file():
            resume = str(folder)
            left = _remaining_steps(work, folder)
            print(f"started again after its end: going on with {folder}", flush=True)
        followers = LearnerActors(site)
        trainer = Trainer(
            work.run,
            display=default_tracker(plain=True),
            trackers=[CancellationTracker()],
            placement=make_placement(site, roles, work.run, followers),
        )
        try:
            result = trainer.train(
                resume=resume,
                stop_after=left,
                time_limit=work.stop_before,
                overwrite=work.overwrite and resume is None,
            )
        except RunError as error:
            if followers.lost or isinstance(error, HangError):
                print(f"{error}: starting all that learn again", flush=True)
                os._exit(1)  # they are one: Ray starts this one again
            raise
        except PolicygradError:
            with suppress(OSError):  # a folder that was made for a run which never began
                folder.rmdir()
            raise
        return result, trainer.resume_command


def make_placement(site: ActorFactory, roles: tuple[ActorGroup, ...], run: Run, followers: LearnerActors) -> Placement:
    """The actors that do the run's work."""
    counts = {role.name: role.count for role in roles}
    samplers, rewards, worlds = (counts.get(name, 0) for name in (SAMPLERS, REWARDS, ENVIRONMENTS))
    return Placement(
        sampler=(lambda model, tokenizer: RaySampler(site, samplers, model, tokenizer, run.learner.routing_replay))
        if samplers
        else None,
        reward_pool=(lambda chosen, how, tell: RayRewardPool(site, rewards, chosen, how, tell)) if rewards else None,
        environment=(lambda factory: RayEnvironmentFactory(site, worlds, factory)) if worlds else None,
        learner_processes=followers.launcher if run.learner.world_size > 1 else None,
        cli_flags=site.config.cli_flags,
    )


def _was_restarted() -> bool:
    import ray

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own, of how it finds that out
        return bool(ray.get_runtime_context().was_current_actor_reconstructed)


def _remaining_steps(work: TrainJob, folder: Path) -> int | None:
    """Of `stop_after`, at least one step: those that a predecessor has done are known where the run began here."""
    if work.stop_after is None or work.resume is not None:
        return work.stop_after
    return max(1, work.stop_after - newest_step(folder / "checkpoints"))


def _change_directory(directory: str) -> None:
    try:
        os.chdir(directory)
    except OSError as error:
        raise RunError(
            f"the machine {platform.node()} of the cluster does not see {directory} ({error.strerror}), where the command was "
            "given: give it in a folder that all machines see, or let `ray job submit --working-dir .` send it along"
        ) from error


# To a cluster and back: Ray is found, reached, and has room.

ADDRESS_VARIABLE = "RAY_ADDRESS"
"""The variable that Ray takes for auto."""
CONNECT_TIMEOUT = 5.0
"""Seconds for a connection."""
NOTE_AFTER_SECONDS = 2.0
"""Seconds of waiting for room before it is said."""


def import_ray() -> Any:
    """The package.

    Raises:
        RunError: it is not installed.
    """
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # an actor without GPUs keeps its environment
    try:
        return import_module("ray")
    except ImportError as error:
        raise RunError(
            f"--cluster is done by Ray: {install_command('ray')}, here and on every machine of the cluster"
        ) from error


@contextmanager
def connect_ray(config: ClusterConfig) -> Iterator[Any]:
    """The package `ray`, connected as long as the context lasts.

    Raises:
        RunError: nobody answers at the address, or with another version of Ray or Python.
    """
    ray = import_ray()
    check_reachable(config)
    try:
        ray.init(address=config.address, log_to_driver=True, logging_level="warning")
    except ConnectionError as error:
        how = (
            "`ray start --head` starts one here, --cluster local too for as long as the run lasts"
            if config.address == AUTO
            else "is it a Ray cluster's? ray:// takes the port of the head's Ray Client server (10001), a plain address that of "
            "its GCS (6379); one that asks for a token wants RAY_AUTH_MODE=token and RAY_AUTH_TOKEN here too"
        )
        raise RunError(f"--cluster {config.address}: no Ray cluster is there ({_first_line(error)}): {how}") from error
    except (RuntimeError, ValueError) as error:  # versions that differ, a port that is another's, a client in a driver
        raise RunError(
            f"--cluster {config.address}: Ray {ray.__version__} cannot use this cluster: {_first_line(error)}"
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def check_reachable(config: ClusterConfig) -> None:
    """Raises RunError where nobody listens there: Ray itself would try for half a minute, and for minutes with auto."""
    place = parse_address(_resolve_auto()) if config.address == AUTO else config.endpoint
    if place is None:
        return
    host, port = place
    try:
        socket.create_connection((host, port), CONNECT_TIMEOUT).close()
    except OSError as error:
        if config.address == AUTO:
            named = (
                f"RAY_ADDRESS={os.environ[ADDRESS_VARIABLE]}"
                if os.environ.get(ADDRESS_VARIABLE)
                else "Ray's file ray_current_cluster"
            )
            raise RunError(
                f"--cluster {AUTO}: {named} names a cluster at {host}:{port}, and nobody answers there ({error}): start one with "
                "`ray start --head`, name another, --cluster HOST:PORT, or take --cluster local"
            ) from error
        server = "Ray Client server (ray start --head listens at 10001)" if CLIENT in config.address else "GCS (6379)"
        raise RunError(
            f"--cluster {config.address}: nobody answers at {host}:{port} ({error}): start a cluster with `ray start --head`, or "
            f"name the port of its {server}"
        ) from error


def _resolve_auto() -> str:
    """The address that Ray would take for auto: RAY_ADDRESS, or else that of this machine's cluster, running or last started; empty
    where it has none, which Ray itself says at once."""
    if address := os.environ.get(ADDRESS_VARIABLE, ""):
        return address
    try:
        services = import_module("ray._private.services")
        return str(services.get_ray_address_from_environment(AUTO, None) or "")
    except ConnectionError:
        return ""
    except (ImportError, AttributeError, TypeError):  # another Ray, whose insides differ: it is left to its own tries
        return ""


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


@contextmanager
def reserve_actor_groups(
    ray: Any, roles: tuple[ActorGroup, ...], config: ClusterConfig, run: str, note: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """Placement groups by role, each of which has its room. run: its name, for the dashboard. note: hears what is waited for.

    Raises:
        RunError: there is not enough room, in words.
    """
    from ray.util import placement_group, remove_placement_group

    groups: dict[str, Any] = {}
    try:
        before = dict(ray.available_resources())
        for role in roles:
            strategy = "SPREAD" if role.spread else "PACK"
            groups[role.name] = placement_group(role.bundles, strategy=strategy, name=f"{run} {role.name}")
        start_time, noted = time.monotonic(), False
        for role in roles:
            while not groups[role.name].wait(NOTE_AFTER_SECONDS):
                missing = describe_shortage(roles, ray.cluster_resources(), before) or (
                    f"no machine has room for a {role.name} actor ({config.cpus:g} CPUs, {role.gpus} GPUs)"
                )
                left = config.timeout - (time.monotonic() - start_time)
                if left <= 0:
                    raise RunError(
                        f"--cluster {config.address}: {missing}. {SHORTAGE_HINT[0].upper()}{SHORTAGE_HINT[1:]}"
                    )
                if not noted:
                    note(f"{missing}: waiting for it, {left:.0f} s more (--cluster.timeout)")
                noted = True
        yield groups
    finally:
        for group in groups.values():
            remove_placement_group(group)


# What asks a run on a cluster to end, at the command that has begun it.


class DriverSignals:
    """A context in which Ctrl-C, SIGTERM (`ray job stop`) and SIGHUP set `asked`; a second Ctrl-C or SIGTERM ends the command at
    once, and so does the first as long as nothing has `begun`. Signals within half a second are one, as they are to a run on one
    machine. A SIGHUP that is ignored (nohup) stays ignored, and outside of the main thread nothing changes."""

    def __init__(self) -> None:
        self.stop_requested, self.started = False, False
        self._first = 0.0
        self._signals = SignalHandlers(self._on_signal)

    def __enter__(self) -> Self:
        self._signals.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._signals.__exit__(kind, error, at)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.stop_requested and (
            number == getattr(signal, "SIGHUP", None) or now - self._first < DUPLICATE_WINDOW_SECONDS
        ):
            return
        if self.stop_requested or not self.started:
            raise KeyboardInterrupt
        self.stop_requested, self._first = True, now


POLL_SECONDS = 0.25
"""Seconds from one look at the run to the next."""


def train_on_cluster(
    run: Run,
    config: ClusterConfig,
    *,
    resume: str | None = None,
    note: Callable[[str], None] = print,
    **how: Any,
) -> TrainingResult[float | None]:
    """As `policygrad.train`, on a cluster.

    Raises:
        PolicygradError: Ray or the cluster is not there, or has no room; and what the training itself raises.
    """
    if run.object_options:
        raise RunError(
            f"{' and '.join(run.object_options)} given as objects: a run on a cluster is made of names, as run.toml has them"
        )
    with connect_ray(config) as ray, DriverSignals() as ending:
        groups_needed = plan_actor_groups(run, config, float(ray.cluster_resources().get("GPU", 0.0)))
        work = TrainJob(run, os.getcwd(), resume, **how)
        with reserve_actor_groups(ray, groups_needed, config, _run_name(work), note) as groups:
            result, resume_command = _run_training(ray, work, config, groups_needed, groups, ending, note)
    note(
        _final_message(result, resume_command)
    )  # as rank 0 has said it, whose own may come too late for whoever leaves the cluster
    return result


def _final_message(result: TrainingResult[float | None], resume_command: str) -> str:
    if result.model is None:
        return f"stopped; go on with: {resume_command}"
    score = (
        "" if result.before is None or result.after is None else f", held-out {result.before:.2f} -> {result.after:.2f}"
    )
    return f"done at step {result.steps}{score}; model: {result.model}"


def _run_training(
    ray: Any,
    work: TrainJob,
    config: ClusterConfig,
    groups_needed: tuple[ActorGroup, ...],
    groups: dict[str, Any],
    ending: DriverSignals,
    note: Callable[[str], None],
) -> Outcome:
    from ray.exceptions import RayActorError, RayTaskError, TaskCancelledError

    gpus = {role.name: role.gpus for role in groups_needed}
    leader = ActorFactory(_run_name(work), groups, config, gpus).create(
        TrainerActor, LEARNERS, 0, max_restarts=config.restarts, max_task_retries=config.restarts
    )
    try:
        check_versions(ray.get(leader.versions.remote()))
        work = ray.get(leader.folder.remote(work))
        site = ActorFactory(Path(work.run.output or _run_name(work)).name, groups, config, gpus)
        ending.started = True
        done = leader.train.remote(work, site, groups_needed)
        cancelled = False
        while not ray.wait([done], timeout=POLL_SECONDS)[0]:
            if ending.stop_requested and not cancelled:
                note(STOP_MESSAGE)
                ray.cancel(done, recursive=False)
                cancelled = True
        try:
            return ray.get(done)  # type: ignore[no-any-return]
        except TaskCancelledError:  # whatever it came to
            return _fetch_outcome(ray, leader, work, config)
    except RayTaskError as error:
        raise unwrap_error(error) from error
    except RayActorError as error:
        where = f": {_resume_command(work, config)} goes on" if work.run.output else ""
        raise RunError(
            f"the actor of rank 0 has died, and was started again {config.restarts} times (--cluster.restarts){where}; "
            f"{' '.join(str(error).split())[:300]}"
        ) from error
    finally:
        ray.kill(leader)


def _fetch_outcome(ray: Any, leader: Any, work: TrainJob, config: ClusterConfig) -> Outcome:
    """What a run that was asked to end came to; it may have come to its last step meanwhile, or to an error."""
    outcome = ray.get(leader.outcome.remote())
    if isinstance(outcome, BaseException):
        raise outcome
    if outcome is None:  # it had not begun, or its actor has died since
        return TrainingResult(Path(work.run.output or "."), 0, None, None, None, interrupted=True), _resume_command(
            work, config
        )
    return outcome  # type: ignore[no-any-return]


def _resume_command(work: TrainJob, config: ClusterConfig) -> str:
    return f"policygrad train --resume {work.run.output} {config.cli_flags}"


def check_versions(actor_versions: dict[str, str]) -> None:
    """Raises RunError where an actor's are not this process's: what is sent would be read as something else."""
    ours = installed_versions()
    for name, version in ours.items():
        if actor_versions.get(name) != version:
            raise RunError(
                f"the cluster has {name} {actor_versions.get(name, 'none')}, and this is {name} {version}: install the same on every "
                "machine"
            )


def _run_name(work: TrainJob) -> str:
    return re.sub(r"[^\w.+-]", "_", Path(work.resume or work.run.output or work.run.algorithm.name).name)
