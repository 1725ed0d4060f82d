"""`policygrad train --cluster`: connects, finds room, starts rank 0's actor and waits for what it comes to."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from policygrad.cluster.config import ClusterConfig
from policygrad.cluster.connection import connected, placed
from policygrad.cluster.crew import Site, own
from policygrad.cluster.ending import Ending
from policygrad.cluster.leader import Leader, Outcome, Work, versions
from policygrad.cluster.needs import LEARNERS, Role, roles
from policygrad.errors import RunError
from policygrad.training.config.run import Run
from policygrad.training.result import Result
from policygrad.training.stopping import WORDS

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
