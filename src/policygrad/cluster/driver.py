"""`policygrad train --cluster`: connects, finds room, starts rank 0's actor and waits for what it comes to."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from policygrad.cluster.config import ClusterConfig
from policygrad.cluster.connection import connected, placed
from policygrad.cluster.crew import Site, own
from policygrad.cluster.leader import Leader, Work, versions
from policygrad.cluster.needs import LEARNERS, Role, roles
from policygrad.errors import RunError
from policygrad.training.config.run import Run
from policygrad.training.result import Result


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
    with connected(config) as ray:
        crew = roles(run, config, float(ray.cluster_resources().get("GPU", 0.0)))
        with placed(ray, crew, config, note) as groups, ended() as asked:
            work = Work(run, os.getcwd(), resume, **how)
            return _trained(ray, work, config, crew, groups, asked)


def _trained(
    ray: Any, work: Work, config: ClusterConfig, crew: tuple[Role, ...], groups: dict[str, Any], asked: list[int]
) -> Result[float | None]:
    from ray.exceptions import RayActorError, RayTaskError, TaskCancelledError

    gpus = {role.name: role.gpus for role in crew}
    leader = Site(_name(work), groups, config, gpus).actor(
        Leader, LEARNERS, 0, max_restarts=config.restarts, max_task_retries=config.restarts
    )
    try:
        check_versions(ray.get(leader.versions.remote()))
        work = ray.get(leader.folder.remote(work))
        site = Site(Path(work.run.output or _name(work)).name, groups, config, gpus)
        done = leader.train.remote(work, site, crew)
        told = False
        while not ray.wait([done], timeout=1.0)[0]:
            if asked and not told:
                ray.cancel(done, recursive=False)
                told = True
        return ray.get(done)  # type: ignore[no-any-return]
    except TaskCancelledError:
        return Result(Path(work.run.output or "."), 0, None, None, None, interrupted=True)
    except RayTaskError as error:
        raise own(error) from error
    except RayActorError as error:
        where = (
            f": policygrad train --resume {work.run.output} --cluster {config.address} goes on"
            if work.run.output
            else ""
        )
        raise RunError(
            f"the actor of rank 0 has died, and was started again {config.restarts} times (--cluster.restarts){where}; "
            f"{' '.join(str(error).split())[:300]}"
        ) from error
    finally:
        ray.kill(leader)


def check_versions(theirs: dict[str, str]) -> None:
    """Raises RunError where an actor's are not this process's: what is sent would be read as something else."""
    ours = versions()
    for name, version in ours.items():
        if theirs.get(name) != version:
            raise RunError(
                f"the cluster has {name} {theirs.get(name, 'none')}, and this is {name} {version}: install the same on every "
                "machine"
            )


@contextmanager
def ended() -> Iterator[list[int]]:
    """Inside, Ctrl-C and SIGTERM (`ray job stop`) are noted: the run ends after its step. A second one ends this at once."""
    came: list[int] = []

    def hold(number: int, frame: object) -> None:
        if came:
            raise KeyboardInterrupt
        came.append(number)

    before = {number: signal.signal(number, hold) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _name(work: Work) -> str:
    return re.sub(r"[^\w.+-]", "_", Path(work.resume or work.run.output or work.run.algorithm.name).name)
