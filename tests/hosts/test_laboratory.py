"""The laboratory of hosts: addresses, links that fail and heal, and that nothing outlives its owner. `make test-hosts`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import hosts
from hosts import Laboratory, Link

pytestmark = pytest.mark.hosts
SCRIPTS = Path(hosts.__file__).parent
ECHO = """
import socket
with socket.create_server(("0.0.0.0", 7)) as listening:
    print("listens", flush=True)
    while True:
        with listening.accept()[0] as connection:
            while content := connection.recv(65536):
                connection.sendall(content)
"""
ASK = """
import socket, sys, time
host, size, wait = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
began = time.monotonic()
with socket.create_connection((host, 7), wait) as connection:
    connection.sendall(bytes(size))
    left = size
    while left:
        left -= len(connection.recv(65536))
print(time.monotonic() - began)
"""


@pytest.fixture(scope="module")
def lab() -> Iterator[Laboratory]:
    """Three hosts; each answers at port 7."""
    with Laboratory(3) as made:
        for host in made.hosts:
            echo = host.start([sys.executable, "-c", ECHO], stdout=subprocess.PIPE)
            assert echo.stdout is not None
            assert echo.stdout.readline() == "listens\n"
        yield made


@pytest.fixture(autouse=True)
def _healed(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "lab" in request.fixturenames:
        request.getfixturevalue("lab").heal()


def ask(lab: Laboratory, source: int, target: int, size: int = 1, wait: float = 1.0) -> float | None:
    """Seconds that an echo takes; None if there is none."""
    done = lab.hosts[source].run([sys.executable, "-c", ASK, f"host{target}", str(size), str(wait)])
    return None if done.returncode else float(done.stdout)


def test_hosts_have_names_addresses_and_processes_of_their_own(lab: Laboratory) -> None:
    said = [
        host.run(["sh", "-c", "hostname; ip -brief -4 address show eth0; echo $$; ls /proc | grep -c '^[0-9]'"])
        for host in lab.hosts
    ]
    words = [done.stdout.split() for done in said]
    assert [w[0] for w in words] == ["host0", "host1", "host2"]
    assert [w[3] for w in words] == ["10.77.0.1/24", "10.77.0.2/24", "10.77.0.3/24"]
    assert all(int(w[-1]) < 10 for w in words)  # not the processes of this machine
    assert all(ask(lab, a, b) is not None for a in range(3) for b in range(3))


def test_a_partition_parts_two_groups_and_heals(lab: Laboratory) -> None:
    lab.cut([0], [1, 2])
    assert (ask(lab, 0, 1), ask(lab, 2, 0)) == (None, None)
    assert ask(lab, 1, 2) is not None
    lab.heal()
    assert ask(lab, 0, 1) is not None


def test_one_direction_can_be_cut(lab: Laboratory) -> None:
    listen = [
        sys.executable,
        "-c",
        "import socket; s = socket.socket(2, 2); s.bind(('', 9)); s.settimeout(1); print(s.recv(9))",
    ]
    send = [sys.executable, "-c", "import socket, sys; socket.socket(2, 2).sendto(b'here', (sys.argv[1], 9))"]
    heard = {}
    ask(lab, 0, 1)  # both know each other's hardware address
    lab.cut([0], [1], one_way=True)
    for source, target in ((0, 1), (1, 0)):
        listener = lab.hosts[target].start(listen, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        while "0.0.0.0:9 " not in lab.hosts[target].run(["ss", "-Hlun"]).stdout:
            pass
        lab.hosts[source].run([*send, lab.hosts[target].address], check=True)
        heard[source, target] = "here" in listener.communicate()[0]
    assert heard == {(0, 1): False, (1, 0): True}


def test_delay_and_rate_are_those_that_were_asked_for(lab: Laboratory) -> None:
    lab.set_link(Link(delay=0.1))
    delayed = ask(lab, 0, 1, wait=10)
    assert delayed is not None
    assert delayed >= 0.4  # a connection and an echo: there and back twice
    lab.set_link(Link(rate=1e6))
    slow = ask(lab, 0, 1, size=50_000, wait=10)
    assert slow is not None
    assert slow >= 0.4  # 400,000 bits


def test_what_is_lost_is_sent_again_by_tcp(lab: Laboratory) -> None:
    lab.set_link(Link(loss=0.05))
    assert ask(lab, 0, 1, size=100_000, wait=60) is not None


CONNECT = (
    "import socket, time; c = socket.create_connection(('host0', 7)); print('connected', flush=True); time.sleep(9)"
)
ACCEPT = """
import socket
with socket.create_server(("", 7)) as listening:
    print("listens", flush=True)
    connection = listening.accept()[0]
connection.settimeout(1)
connection.recv(1)
"""


def test_a_host_whose_power_is_cut_is_silent() -> None:
    with Laboratory(2) as lab:
        server = lab.hosts[0].start([sys.executable, "-c", ACCEPT], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert server.stdout is not None
        server.stdout.readline()
        client = lab.hosts[1].start([sys.executable, "-c", CONNECT], stdout=subprocess.PIPE)
        assert client.stdout is not None
        client.stdout.readline()
        lab.power_off(1)
        assert "TimeoutError" in server.communicate()[1]  # neither an end nor a reset
        assert client.wait() != 0


def test_names_and_addresses_change(lab: Laboratory) -> None:
    named = {f"host{i}": hosts.address_of(i) for i in range(3)}
    lab.name_hosts({})
    assert ask(lab, 0, 1) is None
    lab.name_hosts(named)
    lab.hosts[1].connect("10.77.0.50")
    assert ask(lab, 0, 1) is None
    lab.name_hosts(named | {"host1": "10.77.0.50"})
    assert ask(lab, 0, 1) is not None
    lab.hosts[1].connect(hosts.address_of(1))
    lab.name_hosts(named)
    assert ask(lab, 0, 1) is not None


def test_a_disk_of_its_own_can_be_full() -> None:
    with Laboratory(1, disk="1m") as lab:
        done = lab.hosts[0].run(["dd", "if=/dev/zero", "of=/tmp/large", "bs=1M", "count=2"])
        assert "No space left" in done.stderr
    assert not Path("/tmp/large").exists()


OWNER = """
import sys, time
sys.path.insert(0, sys.argv[1])
from hosts import Laboratory
with Laboratory(2) as lab:
    lab.hosts[1].start(["setsid", "sleep", sys.argv[2]])
    print(lab.folder, *(host.pid for host in lab.hosts), lab._switch._process.pid, flush=True)
    time.sleep(600)
"""


def processes_with(word: str) -> set[int]:
    """Processes that have this word in their command."""
    found = set()
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if word.encode() in file.read_bytes().split(b"\0"):
                found.add(int(file.parent.name))
        except OSError:
            pass
    return found


def test_nothing_is_left_after_sigkill_but_a_folder_that_the_next_one_removes() -> None:
    word = f"60{os.getpid()}"
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(SCRIPTS), word], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    folder, *pids = owner.stdout.readline().split()
    with Laboratory(1):  # one whose owner runs is left alone
        assert Path(folder).exists()
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    deadline = time.monotonic() + 60
    while any(Path("/proc", pid).exists() for pid in pids) or processes_with(word):
        assert time.monotonic() < deadline
    assert Path(folder).exists()
    with Laboratory(1):
        assert not Path(folder).exists()
    assert interfaces() == INTERFACES


def interfaces() -> str:
    """Names of this machine's own interfaces and named namespaces."""
    return "".join(
        subprocess.run(["ip", "-brief", what, "show"], capture_output=True, text=True).stdout
        for what in ("link", "netns")
    )


INTERFACES = interfaces()


def test_the_command_runs_a_command_on_every_host() -> None:
    argv = [sys.executable, str(SCRIPTS / "hosts.py"), "--hosts", "3", "--", "sh", "-c", "hostname; exit $HOST_INDEX"]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert sorted(done.stdout.splitlines()) == ["host0: host0", "host1: host1", "host2: host2"]
    assert done.returncode == 2


def test_where_namespaces_are_not_allowed_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(RuntimeError, match="no laboratory of hosts: network namespaces need root"), Laboratory(1):
        pass
