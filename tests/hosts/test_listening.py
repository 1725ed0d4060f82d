"""What listens where, as `ss` lists it in each host, and what another host without a key can do there. `make test-hosts`."""

from __future__ import annotations

from pathlib import Path

import measure_hosts
import pytest
from measure_hosts import LISTENERS, RAY, RAY_CLOSED, RAY_OPEN, STORE, TORCHRUN

pytestmark = pytest.mark.hosts


def test_every_program_listens_on_loopback_or_the_named_address_and_a_stranger_gets_nowhere(tmp_path: Path) -> None:
    found = measure_hosts.measure_listening(tmp_path)
    assert not [row for row in found if row.broken]
    rows = [row for row in found if row.program not in (RAY_OPEN, RAY_CLOSED)]
    assert {row.program for row in rows} == {one.program for one in LISTENERS} | {TORCHRUN, STORE}
    named = {row.program for row in rows if row.listens == "the named address"}
    assert named == {one.program for one in LISTENERS if one.named} | {TORCHRUN}
    assert {row.program for row in rows if row.listens == "every address"} == {STORE}  # torch offers no other
    ray = {row.program: row.answers for row in found if row.listens.startswith("ray://")}
    assert ray == ({RAY_OPEN: "it is executed", RAY_CLOSED: "refused"} if (RAY / "ray").exists() else {})


def test_a_socket_that_is_open_to_strangers_is_named(tmp_path: Path) -> None:
    """The measure itself can fail."""
    from hosts import Laboratory

    with Laboratory(2) as lab:
        host, stranger = lab.hosts
        server = measure_hosts.start(host, [measure_hosts.PYTHON, "-m", "http.server", "80"], tmp_path)
        server.wait_for(lambda: measure_hosts.sockets(host), "socket")
        listener = measure_hosts.Listener("http.server", (), "")
        ((_, at, _, answers),) = measure_hosts.Stranger(stranger).ask((host, listener.requests))
        row = measure_hosts.judge(listener, host, at, answers)
    assert (row.listens, row.broken[0]) == ("every address", "it listens at 0.0.0.0")
    assert row.broken[1].startswith("a stranger is answered 200")
