"""Starts agents' programs and functions, each in processes of its own; run as a script, with nothing but the standard library.

    python agent_host.py FOLDER [FILE.py:NAME | MODULE:NAME]

Any Python from 3.10 on runs it. It reads jobs as lines of JSON (`main`), and forks a keeper for each (`Keeper`), which starts the
program, watches its limits, and ends everything that the program started. The file of a function is imported once, before any fork,
so that an episode starts in milliseconds. When its input ends, because the run has ended in whatever way, the host ends all that it
has started and deletes FOLDER, in which the episodes have theirs.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib
import importlib.util
import inspect
import json
import os
import select
import signal
import stat
import sys
import time
import traceback
from collections.abc import Collection, Sequence
from typing import Any

NAMESPACES, LANDLOCK, NO_ISOLATION = "namespaces", "landlock", "none"
"""How episodes are kept from each other: each sees its own processes and folder alone; none can trace another or read its
variables; not at all."""
SANDBOX = "sandbox"
"""The isolation of a program that bubblewrap hides from others, except for their abstract sockets."""
LOG_TAIL = 400
"""Characters of a program's output that a message shows."""
EXIT_SECONDS = 10.0  # for the keepers to end when the run has ended
POLL_SECONDS = 0.2  # between counts of a program's processes
DISK_SECONDS = 2.0  # between measurements of what it has written
MAX_LOAD = 0.05  # share of a processor that measuring may take
THREADS_PER_PROCESS = 16  # the kernel's own limit counts threads

_UTILS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "utils")
_SANDBOX = os.path.join(os.path.dirname(_UTILS), "sandbox")
_CLONE_NEWNS, _CLONE_NEWUSER, _CLONE_NEWPID = 0x20000, 0x10000000, 0x20000000
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 8, 0x1000, 0x4000, 0x40000


def main() -> None:
    """Serve jobs until the input ends.

    A job {"id", "argv" or null, "env", "folder", "limits", "isolation" or null} is answered by {"id", "pid"}, and at its end by
    {"id", "code", "output", "exceeded"}: the end of what it has printed, and the limit that it was ended for or "".
    {"close": FOLDER, "id"} ends a job and deletes its folder.
    """
    jobs, reports = os.dup(0), os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what the file prints while it is imported
    processes = load_file("processes", _UTILS)  # before an agent's folder can bring in a shutil.py of its own
    load_file("landlock", _SANDBOX)
    try:
        function = load_function(sys.argv[2]) if len(sys.argv) > 2 else None
    except BaseException as error:
        lines = traceback.format_exception_only(type(error), error)
        send(reports, {"error": "".join(lines).strip()})
        return
    processes.adopt_orphans()  # for what a keeper leaves that somebody has killed
    own = set(processes.list_descendants(os.getpid()))  # what the file has started at its import
    isolation = find_isolation()
    send(reports, {"ready": True, "isolation": isolation})
    wake, wakes = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(wakes, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes)
    keepers, folders, unread = dict[int, Keeper](), dict[int, str](), b""  # by process; by job
    try:
        while True:
            readable, _, _ = select.select([jobs, wake], [], [])
            if wake in readable:
                with contextlib.suppress(BlockingIOError):
                    os.read(wake, 4096)
                for pid, _ in iter_ended():
                    own.discard(pid)
                    keeper = keepers.pop(pid, None)
                    if keeper is None:
                        continue
                    values = keeper.finish()
                    if values is None:
                        end_strays(own | keepers.keys())
                        values = {"code": -int(signal.SIGKILL), "output": "its keeper was killed", "exceeded": ""}
                    send(reports, {"id": keeper.id, **values})
                    if (folder := folders.pop(keeper.id, None)) is not None:
                        own.add(remove_in_fork(folder))
            if jobs in readable:
                piece = os.read(jobs, 1 << 16)
                if not piece:
                    return
                *complete, unread = (unread + piece).split(b"\n")
                for line in complete:
                    job = json.loads(line)
                    if "close" in job:
                        running = [keeper for keeper in keepers.values() if keeper.id == job["id"]]
                        for keeper in running:
                            folders[keeper.id] = job["close"]
                            keeper.ask_to_end()
                        if not running:
                            own.add(remove_in_fork(job["close"]))
                        continue
                    others = [fd for keeper in keepers.values() for fd in keeper.descriptors]
                    keeper = Keeper(job, function, isolation, [jobs, reports.fileno(), wake, wakes, *others])
                    keepers[keeper.pid] = keeper
                    send(reports, {"id": keeper.id, "pid": keeper.pid})
    finally:
        for keeper in keepers.values():
            keeper.ask_to_end()
        deadline = time.monotonic() + EXIT_SECONDS
        while keepers and time.monotonic() < deadline:
            for pid, _ in iter_ended():
                keepers.pop(pid, None)
            select.select([wake], [], [], 0.05)
        end_strays(())
        remove_tree(sys.argv[1])


def send(stream: Any, values: dict[str, Any]) -> None:
    stream.write(json.dumps(values) + "\n")
    stream.flush()


def iter_ended() -> Any:
    """Yield (process, exit code) of the children that have ended; −n for signal n."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        yield pid, os.waitstatus_to_exitcode(status)


def end_strays(others: Collection[int]) -> None:
    """Kill what keepers have left that were killed: all below this process but the others. Only Linux knows them."""
    if sys.platform.startswith("linux"):
        load_file("processes", _UTILS).kill_descendants(except_for=others)


def remove_in_fork(folder: str) -> int:
    """Delete a folder, however large, while others are served. Return the process that does."""
    pid = os.fork()
    if not pid:
        try:
            remove_tree(folder)
        finally:
            os._exit(0)
    return pid


def load_file(name: str, folder: str) -> Any:
    """Import a module of policygrad that needs the standard library alone; policygrad itself may not be installed here."""
    key = f"_policygrad_{name}"
    if key not in sys.modules:
        spec = importlib.util.spec_from_file_location(key, os.path.join(folder, f"{name}.py"))
        assert spec is not None
        assert spec.loader is not None
        sys.modules[key] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[key])
    return sys.modules[key]


def load_function(name: str) -> Any:
    """Import FILE.py:NAME or MODULE:NAME."""
    place, _, attribute = name.rpartition(":")
    # in place of this script's folder, whose gymnasium.py is not the package that an agent imports
    sys.path[0] = os.getcwd()
    if place.endswith(".py"):
        sys.path.insert(0, os.path.dirname(os.path.abspath(place)))
        spec = importlib.util.spec_from_file_location(os.path.basename(place)[:-3], place)
        if spec is None or spec.loader is None or not os.path.exists(place):
            raise FileNotFoundError(f"there is no file {place}")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(place)
    function = getattr(module, attribute)
    if not callable(function):
        raise TypeError(f"{name} is no function")
    return function


class Keeper:
    """A fork that stands between the host and one program: it adopts whatever the program starts, and ends all of it.

    Args:
        private: The host's descriptors, which it closes.
    """

    def __init__(self, job: dict[str, Any], function: Any, isolation: str, private: Sequence[int]) -> None:
        self.id: int = job["id"]
        self._report, report = os.pipe()
        alive, self._alive = os.pipe()
        host = os.getpid()
        self.pid = os.fork()
        if self.pid:
            os.close(report)
            os.close(alive)
            return
        try:
            for descriptor in (*private, self._report, self._alive):
                os.close(descriptor)
            values = keep(job, function, job["isolation"] or isolation, alive, report)
            os.write(report, json.dumps(values).encode())
            if os.getppid() != host:
                remove_tree(job["folder"])
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)

    @property
    def descriptors(self) -> tuple[int, ...]:
        """What the host holds of it."""
        return (self._report,) if self._alive < 0 else (self._report, self._alive)

    def ask_to_end(self) -> None:
        """Let it end its program."""
        if self._alive >= 0:
            os.close(self._alive)
            self._alive = -1

    def finish(self) -> dict[str, Any] | None:
        """Return what the ended keeper has reported; None = it was killed before."""
        os.set_blocking(self._report, False)
        try:
            data = os.read(self._report, 1 << 16)
        except BlockingIOError:
            data = b""
        self.ask_to_end()
        os.close(self._report)
        values: dict[str, Any] | None = json.loads(data) if data else None
        return values


def keep(job: dict[str, Any], function: Any, isolation: str, alive: int, report: int) -> dict[str, Any]:
    """In a keeper: run the program until it ends, exceeds a limit, or `alive` is closed, and then end all that is left of it."""
    processes, limits = load_file("processes", _UTILS), job["limits"]
    os.setsid()  # a signal to the host's group is none for the program
    wake, wakes = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes)
    processes.adopt_orphans()
    has_namespaces = isolation == NAMESPACES
    if has_namespaces:
        enter_namespaces()
    log, printed = os.pipe()
    status, ended = os.pipe()
    main_process = os.fork()
    if not main_process:
        for descriptor in (alive, report, wake, wakes, log, status):
            os.close(descriptor)
        start(job, function, isolation, printed, ended)
    os.close(printed)
    os.close(ended)
    os.set_blocking(log, False)
    output, exceeded, code, is_unwanted = processes.Tail(4 * LOG_TAIL), "", None, False
    written_before = measure_disk(job["folder"], ())
    next_count, next_measurement = 0.0, time.monotonic() + DISK_SECONDS
    watched = [log, alive, wake]
    while code is None and not exceeded and not is_unwanted:
        readable, _, _ = select.select(watched, [], [], POLL_SECONDS)
        if log in readable:
            piece = read_available(log)
            if not piece:
                watched.remove(log)
            output.add(piece)
            exceeded = "output" if output.length > limits["output"] else exceeded
        if wake in readable:
            read_available(wake)
            for pid, value in iter_ended():
                code = value if pid == main_process else code
        is_unwanted = alive in readable
        now = time.monotonic()
        if now >= next_count and not exceeded:
            running = processes.list_descendants(os.getpid())
            if len(running) - has_namespaces > limits["processes"]:
                exceeded = "processes"
            if now >= next_measurement and not exceeded:
                if measure_disk(job["folder"], running) - written_before > limits["disk"]:
                    exceeded = "disk"
                next_measurement = time.monotonic() + max(DISK_SECONDS, (time.monotonic() - now) / MAX_LOAD)
            next_count = time.monotonic() + max(POLL_SECONDS, (time.monotonic() - now) / MAX_LOAD)
    if code is None:
        os.kill(main_process, signal.SIGKILL)  # with namespaces the kernel then kills all others
    if has_namespaces:
        code = int(read_available(status) or 0) if code == 0 else code
    else:
        processes.kill_group(main_process)  # its session; elsewhere than on Linux no others are known
    processes.kill_descendants()
    if code is not None and measure_disk(job["folder"], ()) - written_before > limits["disk"]:
        exceeded = exceeded or "disk"
    if code == -getattr(signal, "SIGXFSZ", 0):  # one file alone was too large
        exceeded = exceeded or "disk"
    with contextlib.suppress(BlockingIOError):
        while log in watched and (piece := os.read(log, 1 << 16)):
            output.add(piece)
    if output.length > limits["output"]:
        exceeded = exceeded or "output"
    text = " ".join(output.data.decode("utf-8", "replace").split())[-LOG_TAIL:]
    return {"code": -int(signal.SIGKILL) if code is None else code, "output": text, "exceeded": exceeded}


def read_available(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 1 << 16)
    except BlockingIOError:
        return b""


def start(job: dict[str, Any], function: Any, isolation: str, log: int, ended: int) -> None:
    """In the keeper's child: become the program or call the function; does not return.

    With namespaces this child is their first process, which waits for all others, and its child becomes the program.
    """
    code = 127
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        load_file("processes", _UTILS).die_with_parent()
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        if isolation == NAMESPACES:
            hide_others(job["folder"], os.path.dirname(job["folder"]))
            program = os.fork()
            if program:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                os.dup2(1, 2)
                while True:
                    pid, status = os.wait()
                    if pid == program:
                        os.write(ended, str(os.waitstatus_to_exitcode(status)).encode())
                        os._exit(0)
        os.close(ended)
        os.setsid()
        limit(job["limits"], has_own_users=isolation == NAMESPACES and os.geteuid() != 0)
        if isolation != NO_ISOLATION:
            landlock = load_file("landlock", _SANDBOX)
            if isolation != SANDBOX:  # bubblewrap needs some to start, and drops all before the program
                landlock.drop_capabilities(landlock.SYSTEM_CAPABILITIES)
            if isolation == LANDLOCK or landlock.get_abi_version() >= landlock.SCOPES_SINCE:
                landlock.keep_from_others(sockets=isolation == SANDBOX)
        os.chdir(os.path.join(job["folder"], "work"))
        os.environ.clear()
        os.environ.update(job["env"])
        if job["argv"] is None:
            call(function)
            code = 0
        else:
            os.execvpe(job["argv"][0], job["argv"], job["env"])
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        code = 1
        with contextlib.suppress(BaseException):  # it may have closed its standard error
            traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code & 0xFF)


def limit(limits: dict[str, int], *, has_own_users: bool) -> None:
    """Apply the limits that the kernel keeps itself, beside those that the keeper watches."""
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    size = limits["disk"] if hard == resource.RLIM_INFINITY else min(hard, limits["disk"])
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    if has_own_users and tuple(map(int, os.uname().release.split(".")[:2])) >= (5, 14):  # it counts in each namespace
        count = THREADS_PER_PROCESS * limits["processes"]
        hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
        count = count if hard == resource.RLIM_INFINITY else min(hard, count)
        resource.setrlimit(resource.RLIMIT_NPROC, (count, count))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")  # where memory runs out, the program is killed and not the run


def call(function: Any) -> None:
    """Call an agent's function with its example, and write down what it returns."""
    with open(os.environ["POLICYGRAD_EXAMPLE"], encoding="utf-8") as file:
        example = json.load(file)
    value = function(example)
    if inspect.isawaitable(value):

        async def wait() -> Any:
            return await value

        value = asyncio.run(wait())
    if value is None:
        return
    if isinstance(value, str):
        value = {"answer": value}
    elif not isinstance(value, dict):
        value = {"reward": float(value)}
    with open(os.environ["POLICYGRAD_RESULT"], "w", encoding="utf-8") as file:
        json.dump(value, file)


# Isolation of episodes.


def find_isolation() -> str:
    """Return the best isolation of episodes that works here, after trying it in a fork."""
    if not sys.platform.startswith("linux"):
        return NO_ISOLATION
    pid = os.fork()
    if not pid:
        try:
            enter_namespaces()
            first = os.fork()
            if not first:
                hide_others()
                os._exit(0 if os.readlink("/proc/self") == "1" else 1)
            os._exit(os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]) & 0xFF)
        except BaseException:
            os._exit(1)
    if os.waitpid(pid, 0)[1] == 0:
        return NAMESPACES
    landlock = load_file("landlock", _SANDBOX)
    return LANDLOCK if landlock.get_abi_version() >= landlock.REFER_SINCE else NO_ISOLATION


def enter_namespaces() -> None:
    """Make the next child the first process of a namespace of its own; of users too, unless root needs none. Raises OSError."""
    user, group = os.geteuid(), os.getegid()
    check(ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWPID | (_CLONE_NEWUSER if user else 0)))
    if user:
        for name, line in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
                file.write(line)


def hide_others(folder: str = "", parent: str = "") -> None:
    """In the first process: show the processes of this namespace alone, and of the parent folder this one. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    check(libc.unshare(_CLONE_NEWNS))
    check(libc.mount(None, b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None))
    if folder:
        own = os.open(folder, os.O_RDONLY)
        flags = ctypes.c_ulong(_MS_NOSUID | _MS_NODEV)
        check(libc.mount(b"tmpfs", os.fsencode(parent), b"tmpfs", flags, b"size=64k,mode=0700"))
        os.mkdir(folder, 0o700)
        check(libc.mount(f"/proc/self/fd/{own}".encode(), os.fsencode(folder), None, ctypes.c_ulong(_MS_BIND), None))
        os.close(own)
    flags = ctypes.c_ulong(_MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    check(libc.mount(b"proc", b"/proc", b"proc", flags, None))


def check(result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


# Folders that a program has written.


def measure_disk(folder: str, processes: Sequence[int]) -> int:
    """Return the bytes on the disk of a folder's files, and of those that processes have deleted and still hold."""
    total, pending = 0, [folder]
    while pending:
        with contextlib.suppress(OSError), os.scandir(pending.pop()) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    total += status.st_blocks * 512
                    if stat.S_ISDIR(status.st_mode):
                        pending.append(entry.path)
    deleted = dict[tuple[int, int], int]()
    for process in processes:
        with contextlib.suppress(OSError):
            for name in os.listdir(f"/proc/{process}/fd"):
                with contextlib.suppress(OSError):
                    status = os.stat(f"/proc/{process}/fd/{name}")
                    if stat.S_ISREG(status.st_mode) and not status.st_nlink:
                        deleted[status.st_dev, status.st_ino] = status.st_blocks * 512
    return total + sum(deleted.values())


def remove_tree(folder: str) -> None:
    """Delete a folder, whatever a program has made of it: folders without permissions, or nested deeper than a path can name.

    It is entered by one descriptor, which goes down and up. What cannot be deleted is left.
    """
    try:
        if stat.S_ISLNK(os.lstat(folder).st_mode):
            return
        os.chmod(folder, 0o700)
        current = os.open(folder, _FOLDER)
    except OSError:
        return
    entered = [("", empty_folder(current), identify(current))]  # name, folders that are left in it, what it is
    while True:
        name, left, _ = entered[-1]
        if left:
            child = left.pop()
            with contextlib.suppress(OSError):
                os.chmod(child, 0o700, dir_fd=current)
                below = os.open(child, _FOLDER, dir_fd=current)
                os.close(current)
                current = below
                entered.append((child, empty_folder(current), identify(current)))
            continue
        entered.pop()
        if not entered:
            break
        above = os.open("..", _FOLDER, dir_fd=current)
        os.close(current)
        current = above
        if identify(current) != entered[-1][2]:  # somebody has moved it meanwhile
            break
        with contextlib.suppress(OSError):
            os.rmdir(name, dir_fd=current)
    os.close(current)
    with contextlib.suppress(OSError):
        os.rmdir(folder)


_FOLDER = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0)


def identify(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def empty_folder(descriptor: int) -> list[str]:
    """Delete the files of an open folder. Return the names of the folders in it."""
    folders = list[str]()
    with contextlib.suppress(OSError), os.scandir(descriptor) as entries:
        for entry in list(entries):
            with contextlib.suppress(OSError):
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.name)
                else:
                    os.unlink(entry.name, dir_fd=descriptor)
    return folders


if __name__ == "__main__":
    main()
