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

from policygrad.checkpoint.format import newest
from policygrad.cluster.actors import Followers, RayEnvironments, RayRewards, RaySampler, Site, own
from policygrad.cluster.config import (
    AUTO,
    CLIENT,
    ENVIRONMENTS,
    LEARNERS,
    REWARDS,
    SAMPLERS,
    WAY_OUT,
    ClusterConfig,
    Role,
    place_of,
    roles,
    short,
)
from policygrad.errors import HangError, PolicygradError, RunError, install_command
from policygrad.trackers import Tracker, default_tracker
from policygrad.training.base_trainer import Result
from policygrad.training.config.run import Run
from policygrad.training.config.run_name import composed
from policygrad.training.interrupts import WORDS
from policygrad.training.run_folder import going_on, next_free
from policygrad.training.setup import Hosts
from policygrad.training.trainer import Trainer
from policygrad.utils.signals import AGAIN, Handling

# The actor that runs a training: rank 0 of those that learn. It makes the run's other actors, which end with it.


@dataclass(frozen=True, eq=False)
class Work:
    """What is to be trained."""

    run: Run
    """`output` names its folder."""
    directory: str
    """Where the command was given."""
    resume: str | None = None
    stop_after: int | None = None
    stop_before: str | None = None
    overwrite: bool = False


Outcome = tuple[Result[float | None], str]
"""(what a training leaves, the command that goes on with it)."""


class _Canceled(Tracker):
    """Ends the run as a signal does, where whoever has begun it wants that. It looks whenever something is told: other threads
    than this one cannot."""

    def __init__(self) -> None:
        self._asked = False

    def log(self, step: int, metrics: Mapping[str, float], completions: Sequence[Mapping[str, Any]] = ()) -> None:
        self._look()

    def phase(self, text: str, done: int = 0, total: int = 0) -> None:
        self._look()

    def _look(self) -> None:
        import ray

        if not self._asked and ray.get_runtime_context().is_canceled():
            self._asked = True
            signal.raise_signal(signal.SIGTERM)  # Ray keeps SIGINT from its processes


def versions() -> dict[str, str]:
    """What driver and actors have to agree on."""
    from importlib.metadata import version

    return {
        "policygrad": version("policygrad"),
        "Python": platform.python_version().rpartition(".")[0],
        "torch": version("torch"),
    }


class Leader:
    """The actor. Where it dies Ray starts it again, with what it was asked: it goes on from the newest checkpoint."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._outcome: Outcome | PolicygradError | None = None

    def __repr__(self) -> str:
        return self._name

    def versions(self) -> dict[str, str]:
        """As `versions`."""
        return versions()

    def folder(self, work: Work) -> Work:
        """With the names of folders as they are here.

        Raises:
            RunError: this machine does not see the folder in which the command was given.
        """
        _enter(work.directory)
        run = work.run
        resume = going_on(work.resume, "train", run)
        if resume is None and run.output is None and not work.overwrite:
            made, _ = next_free(composed(run.resolved().algorithm, run.sampling.max_tokens).name)
            run = replace(run, output=str(made))
        return replace(work, run=run if resume is None else replace(run, output=resume), resume=resume)

    def train(self, work: Work, site: Site, roles: tuple[Role, ...]) -> Outcome:
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

    def _train(self, work: Work, site: Site, roles: tuple[Role, ...]) -> Outcome:
        _enter(work.directory)
        folder = Path(work.run.output or ".")
        resume, left = work.resume, work.stop_after
        if _again() and (folder / "run.toml").is_file():
            resume = str(folder)
            left = _left(work, folder)
            print(f"started again after its end: going on with {folder}", flush=True)
        followers = Followers(site)
        trainer = Trainer(
            work.run,
            display=default_tracker(plain=True),
            trackers=[_Canceled()],
            hosts=hosts(site, roles, work.run, followers),
        )
        try:
            result = trainer.train(
                resume=resume,
                stop_after=left,
                stop_before=work.stop_before,
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
        return result, trainer.resume_words


def hosts(site: Site, roles: tuple[Role, ...], run: Run, followers: Followers) -> Hosts:
    """The actors that do the run's work."""
    counts = {role.name: role.count for role in roles}
    samplers, rewards, worlds = (counts.get(name, 0) for name in (SAMPLERS, REWARDS, ENVIRONMENTS))
    return Hosts(
        sampler=(lambda model, tokenizer: RaySampler(site, samplers, model, tokenizer, run.learner.routing_replay))
        if samplers
        else None,
        pool=(lambda chosen, how, tell: RayRewards(site, rewards, chosen, how, tell)) if rewards else None,
        environment=(lambda factory: RayEnvironments(site, worlds, factory)) if worlds else None,
        places=followers.places if run.learner.ranks > 1 else None,
        words=site.config.words,
    )


def _again() -> bool:
    import ray

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own, of how it finds that out
        return bool(ray.get_runtime_context().was_current_actor_reconstructed)


def _left(work: Work, folder: Path) -> int | None:
    """Of `stop_after`, at least one step: those that a predecessor has done are known where the run began here."""
    if work.stop_after is None or work.resume is not None:
        return work.stop_after
    return max(1, work.stop_after - newest(folder / "checkpoints"))


def _enter(directory: str) -> None:
    try:
        os.chdir(directory)
    except OSError as error:
        raise RunError(
            f"the machine {platform.node()} of the cluster does not see {directory} ({error.strerror}), where the command was "
            "given: give it in a folder that all machines see, or let `ray job submit --working-dir .` send it along"
        ) from error


# To a cluster and back: Ray is found, reached, and has room.

ADDRESS = "RAY_ADDRESS"
"""The variable that Ray takes for auto."""
REACHED = 5.0
"""Seconds for a connection."""
SAID = 2.0
"""Seconds of waiting for room before it is said."""


def imported() -> Any:
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
def connected(config: ClusterConfig) -> Iterator[Any]:
    """The package `ray`, connected as long as the context lasts.

    Raises:
        RunError: nobody answers at the address, or with another version of Ray or Python.
    """
    ray = imported()
    check_reached(config)
    try:
        ray.init(address=config.address, log_to_driver=True, logging_level="warning")
    except ConnectionError as error:
        how = (
            "`ray start --head` starts one here, --cluster local too for as long as the run lasts"
            if config.address == AUTO
            else "is it a Ray cluster's? ray:// takes the port of the head's Ray Client server (10001), a plain address that of "
            "its GCS (6379); one that asks for a token wants RAY_AUTH_MODE=token and RAY_AUTH_TOKEN here too"
        )
        raise RunError(f"--cluster {config.address}: no Ray cluster is there ({_line(error)}): {how}") from error
    except (RuntimeError, ValueError) as error:  # versions that differ, a port that is another's, a client in a driver
        raise RunError(
            f"--cluster {config.address}: Ray {ray.__version__} cannot use this cluster: {_line(error)}"
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def check_reached(config: ClusterConfig) -> None:
    """Raises RunError where nobody listens there: Ray itself would try for half a minute, and for minutes with auto."""
    place = place_of(_resolve_auto()) if config.address == AUTO else config.place
    if place is None:
        return
    host, port = place
    try:
        socket.create_connection((host, port), REACHED).close()
    except OSError as error:
        if config.address == AUTO:
            named = (
                f"RAY_ADDRESS={os.environ[ADDRESS]}" if os.environ.get(ADDRESS) else "Ray's file ray_current_cluster"
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
    if address := os.environ.get(ADDRESS, ""):
        return address
    try:
        services = import_module("ray._private.services")
        return str(services.get_ray_address_from_environment(AUTO, None) or "")
    except ConnectionError:
        return ""
    except (ImportError, AttributeError, TypeError):  # another Ray, whose insides differ: it is left to its own tries
        return ""


def _line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


@contextmanager
def placed(
    ray: Any, roles: tuple[Role, ...], config: ClusterConfig, run: str, note: Callable[[str], None]
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
        began, told = time.monotonic(), False
        for role in roles:
            while not groups[role.name].wait(SAID):
                missing = short(roles, ray.cluster_resources(), before) or (
                    f"no machine has room for a {role.name} actor ({config.cpus:g} CPUs, {role.gpus} GPUs)"
                )
                left = config.patience - (time.monotonic() - began)
                if left <= 0:
                    raise RunError(f"--cluster {config.address}: {missing}. {WAY_OUT[0].upper()}{WAY_OUT[1:]}")
                if not told:
                    note(f"{missing}: waiting for it, {left:.0f} s more (--cluster.patience)")
                told = True
        yield groups
    finally:
        for group in groups.values():
            remove_placement_group(group)


# What asks a run on a cluster to end, at the command that has begun it.


class Ending:
    """A context in which Ctrl-C, SIGTERM (`ray job stop`) and SIGHUP set `asked`; a second Ctrl-C or SIGTERM ends the command at
    once, and so does the first as long as nothing has `begun`. Signals within half a second are one, as they are to a run on one
    machine. A SIGHUP that is ignored (nohup) stays ignored, and outside of the main thread nothing changes."""

    def __init__(self) -> None:
        self.asked, self.begun = False, False
        self._first = 0.0
        self._signals = Handling(self._come)

    def __enter__(self) -> Self:
        self._signals.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._signals.__exit__(kind, error, at)

    def _come(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.asked and (number == getattr(signal, "SIGHUP", None) or now - self._first < AGAIN):
            return
        if self.asked or not self.begun:
            raise KeyboardInterrupt
        self.asked, self._first = True, now


LOOK = 0.25
"""Seconds from one look at the run to the next."""


def train(
    run: Run,
    config: ClusterConfig,
    *,
    resume: str | None = None,
    note: Callable[[str], None] = print,
    **how: Any,
) -> Result[float | None]:
    """As `policygrad.train`, on a cluster.

    Raises:
        PolicygradError: Ray or the cluster is not there, or has no room; and what the training itself raises.
    """
    if run.objects:
        raise RunError(
            f"{' and '.join(run.objects)} given as objects: a run on a cluster is made of names, as run.toml has them"
        )
    with connected(config) as ray, Ending() as ending:
        crew = roles(run, config, float(ray.cluster_resources().get("GPU", 0.0)))
        work = Work(run, os.getcwd(), resume, **how)
        with placed(ray, crew, config, _name(work), note) as groups:
            result, words = _trained(ray, work, config, crew, groups, ending, note)
    note(
        _last_words(result, words)
    )  # as rank 0 has said it, whose own may come too late for whoever leaves the cluster
    return result


def _last_words(result: Result[float | None], words: str) -> str:
    if result.model is None:
        return f"stopped; go on with: {words}"
    score = (
        "" if result.before is None or result.after is None else f", held-out {result.before:.2f} -> {result.after:.2f}"
    )
    return f"done at step {result.steps}{score}; model: {result.model}"


def _trained(
    ray: Any,
    work: Work,
    config: ClusterConfig,
    crew: tuple[Role, ...],
    groups: dict[str, Any],
    ending: Ending,
    note: Callable[[str], None],
) -> Outcome:
    from ray.exceptions import RayActorError, RayTaskError, TaskCancelledError

    gpus = {role.name: role.gpus for role in crew}
    leader = Site(_name(work), groups, config, gpus).actor(
        Leader, LEARNERS, 0, max_restarts=config.restarts, max_task_retries=config.restarts
    )
    try:
        check_versions(ray.get(leader.versions.remote()))
        work = ray.get(leader.folder.remote(work))
        site = Site(Path(work.run.output or _name(work)).name, groups, config, gpus)
        ending.begun = True
        done = leader.train.remote(work, site, crew)
        told = False
        while not ray.wait([done], timeout=LOOK)[0]:
            if ending.asked and not told:
                note(WORDS)
                ray.cancel(done, recursive=False)
                told = True
        try:
            return ray.get(done)  # type: ignore[no-any-return]
        except TaskCancelledError:  # whatever it came to
            return _outcome(ray, leader, work, config)
    except RayTaskError as error:
        raise own(error) from error
    except RayActorError as error:
        where = f": {_words(work, config)} goes on" if work.run.output else ""
        raise RunError(
            f"the actor of rank 0 has died, and was started again {config.restarts} times (--cluster.restarts){where}; "
            f"{' '.join(str(error).split())[:300]}"
        ) from error
    finally:
        ray.kill(leader)


def _outcome(ray: Any, leader: Any, work: Work, config: ClusterConfig) -> Outcome:
    """What a run that was asked to end came to; it may have come to its last step meanwhile, or to an error."""
    found = ray.get(leader.outcome.remote())
    if isinstance(found, BaseException):
        raise found
    if found is None:  # it had not begun, or its actor has died since
        return Result(Path(work.run.output or "."), 0, None, None, None, interrupted=True), _words(work, config)
    return found  # type: ignore[no-any-return]


def _words(work: Work, config: ClusterConfig) -> str:
    return f"policygrad train --resume {work.run.output} {config.words}"


def check_versions(theirs: dict[str, str]) -> None:
    """Raises RunError where an actor's are not this process's: what is sent would be read as something else."""
    ours = versions()
    for name, version in ours.items():
        if theirs.get(name) != version:
            raise RunError(
                f"the cluster has {name} {theirs.get(name, 'none')}, and this is {name} {version}: install the same on every "
                "machine"
            )


def _name(work: Work) -> str:
    return re.sub(r"[^\w.+-]", "_", Path(work.resume or work.run.output or work.run.algorithm.name).name)
