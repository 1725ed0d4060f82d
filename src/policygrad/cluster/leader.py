"""The actor that runs a training: rank 0 of those that learn. It makes the run's other actors, which end with it."""

from __future__ import annotations

import os
import platform
import signal
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from policygrad.checkpoint.format import newest
from policygrad.cluster.crew import Site
from policygrad.cluster.environments import RayEnvironments
from policygrad.cluster.needs import ENVIRONMENTS, REWARDS, SAMPLERS, Role
from policygrad.cluster.ranks import Followers
from policygrad.cluster.rewards import RayRewards
from policygrad.cluster.samplers import RaySampler
from policygrad.errors import HangError, PolicygradError, RunError
from policygrad.trackers import Tracker, default_tracker
from policygrad.training.config.composed import composed
from policygrad.training.config.run import Run
from policygrad.training.copied import going_on
from policygrad.training.folder import next_free
from policygrad.training.hosts import Hosts
from policygrad.training.result import Result
from policygrad.training.trainer import Trainer


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
