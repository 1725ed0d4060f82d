"""To a cluster and back: Ray is found, reached, and has room."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from policygrad.cluster.config import AUTO, CLIENT, ClusterConfig, place_of
from policygrad.cluster.needs import WAY_OUT, Role, short
from policygrad.errors import RunError, install_command

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
