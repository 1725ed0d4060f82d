"""Several hosts on one Linux machine: namespaces with addresses and names of their own, on a network whose links can fail.

    sudo python scripts/hosts.py --hosts 3 --delay 0.2 --loss 0.05 -- ip -brief address

runs a command on every host at once, as `srun` would, and prints each line behind the host's name. Without a command it waits,
and says how to enter a host. In a test:

    with Laboratory(3) as lab:
        lab.hosts[0].run(["ping", "-c", "1", "host1"])
        lab.cut([0], [1, 2])

A host is a process id 1 with namespaces for network, processes, mounts and its name. The network is a switch in user space, a
process that reads each frame from one host's interface (a TAP device) and writes it to another's: so every direction between two
hosts has a delay, a loss, a rate and a cut of its own, and no module of the kernel (bridge, sch_netem) is needed.

Nothing outlives its owner. Process 1 of each host and the switch read a pipe that only the owner holds: when the owner exits, also
by SIGKILL, they end, and the kernel ends whatever else runs in the namespaces and takes away devices, addresses and mounts. What is
left by a SIGKILL is a folder with a few small files; its name says whose it is, and the next laboratory removes it.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import fcntl
import heapq
import json
import os
import random
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import IO, Any

PREFIX = "policygrad-hosts-"
"""Of the folder, which is called PREFIX-PID-START: the owner's process id, and the tick at which it started."""
INTERFACE = "eth0"  # of each host
NETWORK = "10.77.0"  # its first three numbers; the network exists in the namespaces only
PROGRAMS = ("unshare", "nsenter", "setpriv", "ip", "mount")


@dataclass(frozen=True)
class Link:
    """What happens to frames in one direction between two hosts.

    Args:
        delay: Seconds.
        loss: Fraction of the frames that are lost.
        rate: Bits per second; None = as fast as the switch can.
        cut: Nothing passes.
    """

    delay: float = 0.0
    loss: float = 0.0
    rate: float | None = None
    cut: bool = False


def why_not() -> str:
    """Return why there can be no laboratory on this machine; nothing if there can."""
    if sys.platform != "linux":
        return "network namespaces exist on Linux only"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        return f"not installed: {', '.join(missing)} (util-linux, iproute2)"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "no /dev/net/tun"
    tried = subprocess.run(
        [*_UNSHARE, "ip", "tuntap", "add", "dev", INTERFACE, "mode", "tap"], capture_output=True, text=True
    )
    return f"namespaces are not allowed here: {tried.stderr.strip()}" if tried.returncode else ""


class Laboratory:
    """Hosts on one network, for a `with` block.

    Args:
        hosts: How many, at most 200.
        link: Every direction between two hosts at the start.
        disk: Size of each host's own /tmp, for example "64m"; None = this machine's.
    """

    def __init__(self, hosts: int, link: Link | None = None, disk: str | None = None) -> None:
        self._count, self._link, self._disk = hosts, link or Link(), disk
        self.hosts: list[Host] = []

    def __enter__(self) -> Laboratory:
        if reason := why_not():
            raise RuntimeError(f"no laboratory of hosts: {reason}")
        sweep()
        start = _started(os.getpid())
        self.folder = Path(tempfile.gettempdir()) / f"{PREFIX}{os.getpid()}-{start}-{len(_OPEN)}"
        self.folder.mkdir(mode=0o755)
        _OPEN.append(self.folder)
        try:
            self.hosts = [Host(i, self._count, self.folder, self._disk) for i in range(self._count)]
            for host in self.hosts:
                host.wait()
            self._switch = _Switch([host.pid for host in self.hosts], self._link)
            for host in self.hosts:
                host.connect(address_of(host.index))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End every process of the hosts and the switch, and remove the folder."""
        for host in self.hosts:
            host.kill()
        if hasattr(self, "_switch"):
            self._switch.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def set_link(self, link: Link, sources: Iterable[int] | None = None, targets: Iterable[int] | None = None) -> None:
        """Give every direction from one of the sources to one of the targets this link; None = all hosts."""
        everyone = range(self._count)
        pairs = [(a, b) for a in sources or everyone for b in targets or everyone if a != b]
        self._switch.tell({"set": pairs, "link": asdict(link)})

    def cut(self, one: Iterable[int], other: Iterable[int], one_way: bool = False) -> None:
        """Part two groups of hosts; one_way: only what the first sends is lost."""
        one, other = list(one), list(other)
        self._switch.tell({"cut": [(a, b) for a in one for b in other]})
        if not one_way:
            self._switch.tell({"cut": [(b, a) for a in one for b in other]})

    def heal(self) -> None:
        """Give every direction the link of the start again."""
        self.set_link(self._link)

    def power_off(self, index: int) -> None:
        """End a host as a power cut does: the others hear nothing of it any more, not even that its connections close."""
        self._switch.tell({"unplug": index})
        self.hosts[index].kill()

    def name_hosts(self, addresses: Mapping[str, str]) -> None:
        """Let every host resolve these names, and no others: the laboratory has no DNS server."""
        for host in self.hosts:
            host.name_hosts(addresses)


class Host:
    """A host. Its name is `host0`, `host1`, …; commands are run as root."""

    def __init__(self, index: int, count: int, folder: Path, disk: str | None) -> None:
        self.index, self.name, self.address = index, f"host{index}", address_of(index)
        self._names = folder / self.name
        self._names.touch()
        self.name_hosts({f"host{i}": address_of(i) for i in range(count)})
        words = [
            sys.executable,
            "-S",
            str(Path(__file__).resolve()),
            "--process-1",
            self.name,
            str(self._names),
            disk or "",
        ]
        self._unshare = subprocess.Popen([*_UNSHARE, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = 0

    def wait(self) -> None:
        """Return when the host is there."""
        assert self._unshare.stdout is not None
        if self._unshare.stdout.readline() != "there\n":
            raise RuntimeError(f"{self.name} did not start (exit code {self._unshare.wait()})")
        children = Path(f"/proc/{self._unshare.pid}/task/{self._unshare.pid}/children").read_text()
        self.pid = int(children.split()[0])

    def connect(self, address: str) -> None:
        """Give the interface this address, and no other."""
        self.address = address
        self.run(["ip", "address", "flush", "dev", INTERFACE], check=True)
        self.run(["ip", "address", "add", f"{address}/24", "dev", INTERFACE], check=True)
        self.run(["ip", "link", "set", INTERFACE, "up"], check=True)

    def name_hosts(self, addresses: Mapping[str, str]) -> None:
        """Let this host resolve these names, and no others."""
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in addresses.items())]
        self._names.write_text("".join(f"{line}\n" for line in lines))  # in place: the file is mounted

    def enter(self, argv: Sequence[str], folder: str | os.PathLike[str] = ".") -> list[str]:
        """Return the command that runs a command on this host in a folder, and ends with whoever runs it."""
        spaces = ["--net", "--pid", "--mount", "--uts", "--ipc"]
        return [
            "nsenter",
            f"--target={self.pid}",
            *spaces,
            f"--wdns={Path(folder).absolute()}",
            "setpriv",
            "--pdeathsig",
            "KILL",
            *argv,
        ]

    def start(self, argv: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """Start a command here. Its environment says where gloo and NCCL meet the other hosts; `env` adds to this process's."""
        own = {"GLOO_SOCKET_IFNAME": INTERFACE, "NCCL_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1"}
        env = {**os.environ, **own, **options.pop("env", {})}
        return subprocess.Popen(self.enter(argv, options.pop("cwd", ".")), env=env, text=True, **options)

    def run(
        self, argv: Sequence[str], check: bool = False, timeout: float | None = None, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a command here to its end, and return what it said."""
        process = self.start(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise
        if check and process.returncode:
            raise RuntimeError(f"{self.name}: {' '.join(argv)} failed ({process.returncode}): {err.strip()}")
        return subprocess.CompletedProcess(list(argv), process.returncode, out, err)

    def kill(self) -> None:
        """End every process of the host at once."""
        self._unshare.kill()  # before its child, whose end it would report
        with contextlib.suppress(ProcessLookupError):
            if self.pid:
                os.kill(self.pid, signal.SIGKILL)
        self._unshare.communicate()
        self.pid = 0


def address_of(index: int) -> str:
    """Return a host's address at the start."""
    return f"{NETWORK}.{index + 1}"


def sweep() -> list[Path]:
    """Remove the folders of owners that run no more; return them."""
    left = []
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*-*-*"):
        pid, start, *_ = folder.name.removeprefix(PREFIX).split("-")
        if not pid.isdecimal() or _started(int(pid)) != start:
            shutil.rmtree(folder, ignore_errors=True)
            left.append(folder)
    return left


_UNSHARE = ["unshare", "--net", "--pid", "--mount", "--uts", "--ipc", "--fork", "--kill-child", "--mount-proc", "--"]
_OPEN: list[Path] = []  # every folder that this process has made: a second laboratory has another name


def _started(pid: int) -> str:
    """Return the tick at which a process started; nothing if there is none."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return ""


def _be_process_1(name: str, names: str, disk: str) -> None:
    """Set up a host from inside, and stay until the owner's pipe closes."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # orphans leave no zombies
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is the owner's
    socket.sethostname(name)
    # not subprocess, which waits for children that the line above lets vanish
    _mount(names, "/etc/hosts", "", 4096)  # MS_BIND
    silent = Path(names + ".resolv")
    silent.write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")
    _mount(str(silent), "/etc/resolv.conf", "", 4096)
    if disk:
        _mount("none", "/tmp", "tmpfs", 0, f"size={disk}")
    for at in ("all", "default"):  # what listens at :: is listed once, and no frame is sent unasked
        with contextlib.suppress(OSError):
            Path(f"/proc/sys/net/ipv6/conf/{at}/disable_ipv6").write_text("1")
    with socket.socket() as control:
        fcntl.ioctl(control, 0x8914, struct.pack("16sh14x", b"lo", 0x1 | 0x40))  # SIOCSIFFLAGS: up, running
    print("there", flush=True)
    sys.stdin.read()
    os.kill(-1, signal.SIGKILL)


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode()):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), target)


# --- the switch


class _Switch:
    """The process that carries frames between the hosts."""

    def __init__(self, pids: Sequence[int], link: Link) -> None:
        words = ["--switch", json.dumps({"pids": pids, "link": asdict(link)})]
        self._process = subprocess.Popen(
            [sys.executable, "-S", str(Path(__file__).resolve()), *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a terminal's Ctrl-C is the owner's
        )
        self._one_at_a_time = threading.Lock()
        self._read()

    def tell(self, change: Mapping[str, object]) -> None:
        """Change links; the change has been made when this returns."""
        with self._one_at_a_time:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(change) + "\n")
            self._process.stdin.flush()
            self._read()

    def _read(self) -> None:
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "done\n":
            raise RuntimeError(f"the switch between the hosts has ended (exit code {self._process.wait()})")

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


_WAITING = 1000  # frames in one direction; more are lost, as netem's queue loses them


@dataclass
class _Direction:
    link: Link
    free: float = 0.0
    """When the last frame has left the sender, at the link's rate."""
    waiting: deque[float] = field(default_factory=deque)


def _carry(pids: Sequence[int], link: Link) -> None:
    """Carry frames until the owner's pipe closes."""
    ports = [_open_port(pid, i) for i, pid in enumerate(pids)]
    at = {port: i for i, port in enumerate(ports)}
    directions = {(a, b): _Direction(link) for a in range(len(pids)) for b in range(len(pids)) if a != b}
    due: list[tuple[float, int, int, bytes]] = []
    order, draw = 0, random.Random(0)
    selector = selectors.DefaultSelector()
    for port in ports:
        selector.register(port, selectors.EVENT_READ)
    selector.register(0, selectors.EVENT_READ)
    print("done", flush=True)
    while True:
        wait = max(0.0, due[0][0] - time.monotonic()) if due else None
        for key, _ in selector.select(wait):
            if key.fd == 0:
                change = sys.stdin.readline()
                if not change:
                    return
                _change(json.loads(change), directions)
                if "unplug" in (said := json.loads(change)):
                    selector.unregister(ports[said["unplug"]])
                    os.close(ports[said["unplug"]])
                    ports[said["unplug"]] = -1
                print("done", flush=True)
                break  # a port of this list may be closed
            source = at[key.fd]
            for frame in _read_frames(key.fd):
                for target in _targets(frame, source, len(ports)):
                    direction = directions[source, target]
                    moment = _departure(direction, len(frame), draw)
                    if moment is not None:
                        order += 1
                        heapq.heappush(due, (moment, order, target, frame))
        now = time.monotonic()
        while due and due[0][0] <= now:
            _, _, target, frame = heapq.heappop(due)
            if ports[target] >= 0:
                with contextlib.suppress(OSError):  # an interface that is not up yet
                    os.write(ports[target], frame)


def _change(said: Mapping[str, Any], directions: Mapping[tuple[int, int], _Direction]) -> None:
    for a, b in said.get("set", []):
        directions[a, b].link = Link(**said["link"])
    for a, b in said.get("cut", []):
        directions[a, b].link = replace(directions[a, b].link, cut=True)


def _departure(direction: _Direction, size: int, draw: random.Random) -> float | None:
    """Return when a frame of this many bytes arrives; None if it is lost."""
    link, now = direction.link, time.monotonic()
    if link.cut or (link.loss and draw.random() < link.loss):
        return None
    if link.rate is None:
        return now + link.delay
    while direction.waiting and direction.waiting[0] <= now:
        direction.waiting.popleft()
    if len(direction.waiting) >= _WAITING:
        return None
    direction.free = max(now, direction.free) + 8 * size / link.rate
    direction.waiting.append(direction.free)
    return direction.free + link.delay


def _targets(frame: bytes, source: int, count: int) -> list[int]:
    """Return whom a frame is for: everyone, if its address is a group's."""
    if frame[0] & 1:
        return [i for i in range(count) if i != source]
    index = frame[5] - 1
    return [index] if frame[:5] == _HARDWARE and index < count and index != source else []


_HARDWARE = bytes(
    (2, 0, 0, 0, 0)
)  # the first bytes of every interface's hardware address; the last one is 1 + the host's index


def _open_port(pid: int, index: int) -> int:
    """Create the host's interface in its network namespace; return what frames are read from and written to."""
    libc = ctypes.CDLL(None, use_errno=True)
    space = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    if libc.setns(space, 0x40000000):  # CLONE_NEWNET
        raise OSError(ctypes.get_errno(), "setns")
    os.close(space)
    port = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    name = INTERFACE.encode()
    fcntl.ioctl(port, 0x400454CA, struct.pack("16sH22x", name, 0x0002 | 0x1000))  # TUNSETIFF: a TAP without a header
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        hardware = struct.pack("16sH6s16x", name, 1, _HARDWARE + bytes((index + 1,)))
        fcntl.ioctl(control, 0x8924, hardware)  # SIOCSIFHWADDR
    return port


def _read_frames(port: int, most: int = 64) -> list[bytes]:
    frames = []
    for _ in range(most):
        try:
            frames.append(os.read(port, 65536))
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EIO, errno.EBADFD):
                raise
            break
    return frames


# --- the command


def main() -> int:
    """Run a command on every host, or wait."""
    if sys.argv[1:2] == ["--process-1"]:
        _be_process_1(*sys.argv[2:])
        return 0
    if sys.argv[1:2] == ["--switch"]:
        given = json.loads(sys.argv[2])
        _carry(given["pids"], Link(**given["link"]))
        return 0
    parser = argparse.ArgumentParser(
        description="Run a command on several hosts, which are namespaces of this machine."
    )
    parser.add_argument("--hosts", type=int, default=2, help="how many")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds, in each direction")
    parser.add_argument("--loss", type=float, default=0.0, help="fraction of the frames that are lost")
    parser.add_argument("--rate", type=float, default=None, help="bits per second")
    parser.add_argument("--disk", default=None, help="size of each host's own /tmp, for example 64m")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if reason := why_not():
        print(f"error: {reason}", file=sys.stderr)
        return 2
    link = Link(options.delay, options.loss, options.rate)
    with Laboratory(options.hosts, link, options.disk) as lab:
        if not command:
            for host in lab.hosts:
                print(f"{host.name} {host.address}: nsenter --target={host.pid} --net --pid --mount --uts --ipc bash")
            with contextlib.suppress(KeyboardInterrupt):
                signal.pause()
            return 0
        return run_everywhere(lab, command)


def run_everywhere(lab: Laboratory, argv: Sequence[str], to: IO[str] | None = None) -> int:
    """Run a command on every host at once, HOST_INDEX set; print the lines; return the largest exit code."""
    started = [
        host.start(argv, env={"HOST_INDEX": str(host.index)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for host in lab.hosts
    ]

    def print_lines(name: str, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            print(f"{name}: {line}", end="", file=to or sys.stdout, flush=True)

    pairs = zip(lab.hosts, started, strict=True)
    readers = [threading.Thread(target=print_lines, args=(host.name, process)) for host, process in pairs]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    return max(abs(process.wait()) for process in started)


if __name__ == "__main__":
    raise SystemExit(main())
