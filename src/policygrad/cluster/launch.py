"""`policygrad train --cluster`: connects to Ray, reserves resources, starts rank 0's actor and waits for its result."""

from __future__ import annotations

import math
import os
import platform
import re
import signal
import socket
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from policygrad import __version__
from policygrad.checkpoint.format import newest_step
from policygrad.cluster.actors import ActorFactory, LearnerActors, NamedActor, make_placement, unwrap_error
from policygrad.cluster.config import (
    AUTO,
    CLIENT,
    LEARNERS,
    SHORTAGE_HINT,
    ActorGroup,
    ClusterConfig,
    describe_shortage,
    parse_address,
    plan_actor_groups,
)
from policygrad.cluster.watch import HeadWatch
from policygrad.errors import HangError, PolicygradError, RunError, install_command
from policygrad.trackers import Tracker, default_tracker
from policygrad.training.base_trainer import TrainingResult
from policygrad.training.config.run import Run
from policygrad.training.config.run_name import name_run
from policygrad.training.interrupts import STOP_MESSAGE, StopController
from policygrad.training.run_folder import create_next_free, resolve_resume_folder
from policygrad.training.trainer import Trainer

ADDRESS_VARIABLE = "RAY_ADDRESS"  # the environment variable that Ray reads for auto
CONNECT_TIMEOUT = 5.0  # seconds to connect
NOTE_AFTER_SECONDS = 2.0  # seconds of waiting for resources before a note is shown
POLL_SECONDS = 0.25  # seconds between checks on the run

Outcome = tuple[TrainingResult[float | None], str]  # (the result, the command that resumes the run)


def train_on_cluster(
    run: Run, config: ClusterConfig, *, resume: str | None = None, note: Callable[[str], None] = print, **options: Any
) -> TrainingResult[float | None]:
    """Train on a cluster, as `policygrad.train` does on this machine.

    Ctrl-C, SIGTERM (`ray job stop`) and SIGHUP stop the run, resumably, or end the command at once if no run has started yet.

    Args:
        options: The other fields of `TrainJob`.

    Raises:
        PolicygradError: Ray or the cluster is missing or has too few resources, or the training raises it.
        HangError: Ray's head, or learner 0's machine, is gone. Without its head Ray cannot end: the process then ends by os._exit.
    """
    if run.object_options:
        raise RunError(
            f"{' and '.join(run.object_options)} given as Python objects: a run on a cluster needs names, as in run.toml"
        )
    job = TrainJob(run, os.getcwd(), resume, **options)
    head = HeadWatch(config)
    with connect_ray(config, head) as ray, StopController() as stopping, ExitStack() as stack:
        from ray.exceptions import RayActorError, RayTaskError

        try:
            with stopping.interruptible():
                groups = plan_actor_groups(run, config, float(ray.cluster_resources().get("GPU", 0.0)))
                name, gpus = _run_name(job), {group.name: group.gpus for group in groups}
                reserved = stack.enter_context(reserve_actor_groups(ray, groups, config, name, note, head))
                actors = ActorFactory(name, reserved, config, gpus)
                restarts = {"max_restarts": config.restarts, "max_task_retries": config.restarts}
                trainer = actors.create(TrainerActor, LEARNERS, 0, **restarts)
                stack.callback(head.call, ray.kill, trainer)
                check_versions(ray.get(trainer.versions.remote()))
                job = ray.get(trainer.resolve_folders.remote(job))
                head.start(reserved[LEARNERS], ray.get(trainer.place.remote())[0])
                actors = replace(actors, run=Path(job.run.output or name).name)
            done = trainer.train.remote(job, actors, groups)
            outcome = _await_outcome(ray, trainer, done, job, head, config, stopping, note)
            head.exit_code = HangError.code if outcome[0].model is None else 0
        except RayTaskError as error:
            raise unwrap_error(error) from error
        except RayActorError as error:
            hint = f": resume with {_resume_command(job, config)}" if job.run.output else ""
            raise RunError(
                f"the actor of rank 0 has died after {config.restarts} restarts (--cluster.restarts){hint}; "
                f"{' '.join(str(error).split())[:300]}"
            ) from error
    result: TrainingResult[float | None]
    result, resume_command = outcome
    # rank 0 shows this too, but its output may arrive after a driver has left the cluster
    if result.model is None:
        note(f"stopped; resume with: {resume_command}")
    else:
        scores = (result.before, result.after)
        reward = "" if None in scores else f", eval/reward {scores[0]:.2f} -> {scores[1]:.2f}"
        note(f"done at step {result.steps}{reward}; model: {result.model}")
    return result


def _await_outcome(
    ray: Any,
    trainer: Any,
    done: Any,
    job: TrainJob,
    head: HeadWatch,
    config: ClusterConfig,
    stopping: StopController,
    note: Callable[[str], None],
) -> Outcome:
    """Wait for the run's end, and pass on a request to stop. Raises HangError if Ray's head or learner 0's machine is gone."""
    from ray.exceptions import GetTimeoutError, TaskCancelledError

    cancelled, lost, deadline = False, "", math.inf
    while not ray.wait([done], timeout=POLL_SECONDS)[0]:
        if not lost and (lost := head.describe_loss()):
            lost = f"{lost}: resume with {_resume_command(job, config)}"
            deadline = time.monotonic() + (config.timeout if head.is_silent else 0.0)
            if head.is_silent:
                note(f"{lost}. Learner 0 has {config.timeout:g} s to end its step and save it")
        if time.monotonic() >= deadline:
            raise HangError(lost)
        if (stopping.requested or lost) and not cancelled:
            if not stopping.announced and not lost:
                note(STOP_MESSAGE)
            ray.cancel(done, recursive=False)
            cancelled = True
    try:
        outcome: Outcome = ray.get(done)
        return outcome
    except TaskCancelledError:  # the run may also have finished meanwhile, or failed
        try:
            told = ray.get(trainer.outcome.remote(), timeout=config.timeout if lost else None)
        except GetTimeoutError:
            raise HangError(lost) from None
        if isinstance(told, BaseException):
            raise told from None
        if told is None:  # it had not begun, or its actor has died since
            nothing = TrainingResult(Path(job.run.output or "."), 0, None, None, None, interrupted=True)
            told = nothing, _resume_command(job, config)
        ended: Outcome = told
        return ended


@dataclass(frozen=True, eq=False)
class TrainJob:
    """A training to run on the cluster."""

    run: Run  # `output` is its folder
    directory: str  # working directory of the command
    resume: str | None = None
    stop_after: int | None = None
    time_limit: str | None = None
    overwrite: bool = False


# The actor of rank 0, which runs the training. It makes the run's other actors, which end with it.


class CancellationTracker(Tracker):
    """Stops the run, as a signal does, when the driver cancels it.

    It checks whenever the run reports something, since Ray tells only the actor's own thread.
    """

    _stopping = False

    def log(self, step: int, metrics: Mapping[str, float], completions: Sequence[Mapping[str, Any]] = ()) -> None:
        self._check()

    def phase(self, text: str, done: int = 0, total: int = 0) -> None:
        self._check()

    def _check(self) -> None:
        import ray

        if not self._stopping and ray.get_runtime_context().is_canceled():
            self._stopping = True
            signal.raise_signal(signal.SIGTERM)  # Ray keeps SIGINT from its processes


class TrainerActor(NamedActor):
    """The actor. If it dies, Ray restarts it with the same call, and it resumes from the newest checkpoint."""

    _outcome: Outcome | PolicygradError | None = None

    def versions(self) -> dict[str, str]:
        return installed_versions()

    def resolve_folders(self, job: TrainJob) -> TrainJob:
        """Return the job with the names of folders on this machine.

        Raises:
            RunError: This machine does not see the command's working directory.
        """
        _change_directory(job.directory)
        run = job.run
        resume = resolve_resume_folder(job.resume, "train", run)
        if resume is None and run.output is None and not job.overwrite:
            folder, _ = create_next_free(name_run(run.resolve().algorithm, run.sampling.max_tokens).name)
            run = replace(run, output=str(folder))
        return replace(job, run=run if resume is None else replace(run, output=resume), resume=resume)

    def train(self, job: TrainJob, actors: ActorFactory, groups: tuple[ActorGroup, ...]) -> Outcome:
        """Train from the beginning, or from where a predecessor of this actor was."""
        import ray

        folder, learners = Path(job.run.output or "."), LearnerActors(actors)
        resume, stop_after = job.resume, job.stop_after
        try:
            _change_directory(job.directory)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Ray warns about how it finds this out
                was_restarted = bool(ray.get_runtime_context().was_current_actor_reconstructed)
            if was_restarted and (folder / "run.toml").is_file():
                resume = str(folder)
                if stop_after is not None and job.resume is None:  # a resumed run's first step is not known here
                    stop_after = max(1, stop_after - newest_step(folder / "checkpoints"))
                print(f"restarted after the actor died: resuming {folder}", flush=True)
            trainer = Trainer(
                job.run,
                display=default_tracker(plain=True),
                trackers=[CancellationTracker()],
                placement=make_placement(actors, groups, job.run, learners),
            )
            overwrite = job.overwrite and resume is None
            result = trainer.train(resume=resume, stop_after=stop_after, time_limit=job.time_limit, overwrite=overwrite)
            outcome = self._outcome = result, trainer.resume_command
            return outcome
        except PolicygradError as error:
            if isinstance(error, RunError) and (learners.lost or isinstance(error, HangError)):
                print(f"{error}: restarting all learners", flush=True)
                os._exit(1)  # Ray restarts this actor, which starts the others
            self._outcome = error
            if not isinstance(error, RunError):
                with suppress(OSError):  # a folder made for a run that never began
                    folder.rmdir()
            raise

    def outcome(self) -> Outcome | PolicygradError | None:
        """Return the result of `train`, which Ray does not return after a cancellation."""
        return self._outcome


def _change_directory(directory: str) -> None:
    try:
        os.chdir(directory)
    except OSError as error:
        raise RunError(
            f"the machine {platform.node()} of the cluster does not see the working directory {directory} ({error.strerror}): "
            "use a folder that all machines see, or send it with `ray job submit --working-dir .`"
        ) from error


# The driver: connects to the cluster, reserves resources and watches rank 0's actor.


@contextmanager
def connect_ray(config: ClusterConfig, head: HeadWatch | None = None) -> Iterator[Any]:
    """Yield the package `ray`, connected.

    Args:
        head: Watches its head, without which Ray would not disconnect either.

    Raises:
        RunError: Ray is not installed, no cluster answers at the address, or its version of Ray or Python differs.
    """
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # an actor without GPUs keeps its environment
    try:
        ray = import_module("ray")
    except ImportError as error:
        raise RunError(
            f"--cluster needs Ray: {install_command('ray')}, here and on every machine of the cluster"
        ) from error
    check_reachable(config)
    try:
        ray.init(address=config.address, log_to_driver=True, logging_level="warning")
    except ConnectionError as error:
        hint = (
            "start one with `ray start --head`, or with --cluster local for as long as the run lasts"
            if config.address == AUTO
            else "ray:// takes the port of the head's Ray Client server (10001), a plain address that of its GCS (6379); a cluster "
            "with a token needs RAY_AUTH_MODE=token and RAY_AUTH_TOKEN here too"
        )
        raise RunError(f"--cluster {config.address}: no Ray cluster answers ({_first_line(error)}): {hint}") from error
    except (RuntimeError, ValueError) as error:  # other versions, another server's port, a client inside a driver
        raise RunError(
            f"--cluster {config.address}: Ray {ray.__version__} cannot use this cluster: {_first_line(error)}"
        ) from error
    try:
        yield ray
    finally:
        if head is None:
            ray.shutdown()
        else:
            head.disconnect(ray)


def check_reachable(config: ClusterConfig) -> None:
    """Raise RunError if nothing listens at the address; Ray itself would try for half a minute, or minutes with auto."""
    address = config.address
    if address == AUTO:  # as Ray resolves it: RAY_ADDRESS, or this machine's cluster, running or last started
        address = os.environ.get(ADDRESS_VARIABLE, "")
        if not address:
            # no cluster, or another version of Ray: let it try by itself
            with suppress(ConnectionError, ImportError, AttributeError, TypeError):
                services = import_module("ray._private.services")
                address = str(services.get_ray_address_from_environment(AUTO, None) or "")
    if (endpoint := parse_address(address)) is None:
        return
    host, port = endpoint
    try:
        socket.create_connection((host, port), CONNECT_TIMEOUT).close()
    except OSError as error:
        if config.address == AUTO:
            variable = os.environ.get(ADDRESS_VARIABLE)
            source = f"RAY_ADDRESS={variable}" if variable else "Ray's file ray_current_cluster"
            raise RunError(
                f"--cluster {AUTO}: {source} names a cluster at {host}:{port}, where nothing listens ({error}): start one with "
                "`ray start --head`, name another with --cluster HOST:PORT, or use --cluster local"
            ) from error
        server = "Ray Client server (ray start --head listens at 10001)" if CLIENT in config.address else "GCS (6379)"
        raise RunError(
            f"--cluster {config.address}: nothing listens at {host}:{port} ({error}): start a cluster with `ray start --head`, or "
            f"give the port of its {server}"
        ) from error


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


@contextmanager
def reserve_actor_groups(
    ray: Any,
    groups: tuple[ActorGroup, ...],
    config: ClusterConfig,
    run: str,
    note: Callable[[str], None],
    head: HeadWatch,
) -> Iterator[dict[str, Any]]:
    """Yield a placement group for each actor group, once all have their resources.

    Args:
        run: Its name, for the dashboard.
        note: Shows what is waited for.

    Raises:
        RunError: There are too few resources.
    """
    from ray.util import placement_group, remove_placement_group

    placement_groups: dict[str, Any] = {}
    try:
        free = dict(ray.available_resources())
        for group in groups:
            strategy = "SPREAD" if group.spread else "PACK"
            placement_groups[group.name] = placement_group(group.bundles, strategy=strategy, name=f"{run} {group.name}")
        deadline, noted = time.monotonic() + config.timeout, False
        for group in groups:
            while not placement_groups[group.name].wait(NOTE_AFTER_SECONDS):
                shortage = describe_shortage(groups, ray.cluster_resources(), free) or (
                    f"no machine has room for a {group.name} actor ({config.cpus:g} CPUs, {group.gpus} GPUs)"
                )
                left = deadline - time.monotonic()
                if left <= 0:
                    raise RunError(f"--cluster {config.address}: {shortage}. Remedy: {SHORTAGE_HINT}")
                if not noted:
                    note(f"{shortage}: waiting {left:.0f} s more (--cluster.timeout)")
                noted = True
        yield placement_groups
    finally:
        for reserved in placement_groups.values():
            head.call(remove_placement_group, reserved)


def _resume_command(job: TrainJob, config: ClusterConfig) -> str:
    return f"policygrad train --resume {job.run.output} {config.cli_flags}"


def installed_versions() -> dict[str, str]:
    """Return the versions that driver and actors must agree on."""
    from importlib.metadata import version

    python = platform.python_version().rpartition(".")[0]
    return {"policygrad": __version__, "Python": python, "torch": version("torch")}


def check_versions(actor_versions: dict[str, str]) -> None:
    """Raise RunError if an actor's versions differ from this process's: they could not read each other's data."""
    for name, version in installed_versions().items():
        if actor_versions.get(name) != version:
            raise RunError(
                f"the cluster has {name} {actor_versions.get(name, 'none')} and this machine {name} {version}: install the same "
                "version everywhere"
            )


def _run_name(job: TrainJob) -> str:
    return re.sub(r"[^\w.+-]", "_", Path(job.resume or job.run.output or job.run.algorithm.name).name)
