"""Hostile programs in every sandbox that works here: they cost only themselves, and the parent sees what they did."""

import os
import socket
import threading

import pytest

from policygrad.errors import ConfigError
from policygrad.sandbox import (
    BACKENDS,
    FunctionTests,
    Limits,
    SandboxError,
    StdioTests,
    backends,
    find_backend,
    run_function_tests,
    run_program,
    run_stdio_tests,
)
from policygrad.sandbox.process import SandboxedProcess, wait_for_exit


def stands(name):
    try:
        find_backend(name)
    except ConfigError:
        return False
    return True


STANDING = [name for name in BACKENDS if stands(name)]
behind = pytest.mark.parametrize("wall", STANDING)
behind_one = pytest.mark.parametrize(  # the tests' process judges alike whatever the wall is
    "wall", [name if name == STANDING[-1] else pytest.param(name, marks=pytest.mark.full) for name in STANDING]
)
SHORT = Limits(timeout=2.0)
EACH = """
import os, sys
def attempt(name, what):
    try:
        print(name, "done", what(), flush=True)
    except BaseException as error:
        print(name, type(error).__name__, flush=True)
"""


def attempts(wall, source, limits=None):
    """Return the outcome of each `attempt`, by name."""
    outcome = run_program(EACH + source, limits=limits, backend=wall)
    assert outcome.succeeded, outcome
    return dict(line.split(" ", 1) for line in outcome.stdout.splitlines())


def test_a_sandbox_works_here():
    if not STANDING:
        pytest.skip("no sandbox works on this machine")


@behind
def test_a_program_runs_and_sees_its_input(wall):
    outcome = run_program(
        "import sys\nprint(input()[::-1])\nprint('x', file=sys.stderr)\nsys.exit(3)", "abc\n", backend=wall
    )
    assert (outcome.stop_reason, outcome.code, outcome.stdout, outcome.stderr) == ("by itself", 3, "cba\n", "x\n")
    assert not outcome.succeeded


@behind
def test_fork_bombs_and_daemons_start_nothing(wall):
    """Try every way, threads too: a program is one process with one thread."""
    done = attempts(
        wall,
        """
import ctypes, subprocess, threading, multiprocessing
libc = ctypes.CDLL(None, use_errno=True)
def bomb():
    while True:
        os.fork()
def daemon():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            while True: pass
def raw(*numbers):
    return [libc.syscall(*call, 0, 0, 0, 0) for call in numbers]
attempt("bomb", bomb)
attempt("daemon", daemon)
attempt("popen", lambda: subprocess.Popen(["/bin/true"]))
attempt("spawn", lambda: os.posix_spawn("/bin/true", ["true"], {}))
attempt("thread", threading.Thread(target=print).start)
attempt("raw", lambda: raw((56, 17), (57,), (58,), (435, 0), (220, 17)) if os.uname().machine == "x86_64" else [-1] * 5)
""",
    )
    assert {done[name] for name in ("bomb", "daemon", "popen")} == {"PermissionError"}
    assert not done["spawn"].startswith("done")
    assert done["thread"] == "RuntimeError"
    assert done["raw"].startswith("done [-1, -1, -1, -1,")


@behind
def test_a_killed_program_leaves_nothing_behind(wall, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with SandboxedProcess(
        find_backend(wall), SHORT, {"role": "program", "source": "open('f', 'w')\nwhile True: pass", "show": False}, {}
    ) as process:
        pid = process.process.pid
        assert wait_for_exit([process], 0.3) == "time"
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert list(tmp_path.iterdir()) == []


@behind
def test_memory_hogs_are_refused_memory(wall):
    done = attempts(
        wall,
        """
import mmap
def heap():
    kept = []
    while True:
        kept.append(bytearray(64 << 20))
attempt("heap", heap)
attempt("shared", lambda: [mmap.mmap(-1, 128 << 20) for _ in range(10)])
attempt("file", lambda: os.memfd_create("x"))
""",
        Limits(memory=256 << 20),
    )
    assert done == {"heap": "MemoryError", "shared": "OSError", "file": "PermissionError"}


@behind
@pytest.mark.parametrize(
    "source",
    [
        "f = open('f', 'wb')\nwhile True: f.write(bytes(1 << 20))",
        "import itertools\nfor i in itertools.count(): open(str(i), 'wb').write(bytes(1 << 20))",
    ],
    ids=["one file", "many"],
)
def test_disk_fillers_are_limited(wall, source, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    outcome = run_program(source, limits=Limits(files=8 << 20), backend=wall)
    assert not outcome.succeeded
    assert outcome.stop_reason == "files" or outcome.stderr.strip().endswith(
        ("No space left on device", "File too large")
    )
    assert list(tmp_path.iterdir()) == []


HOLDS = """
import mmap, os, time
kept = []
for number in range(10):
    file = open(str(number), "w+b")
    file.write(bytes(4 << 20))
    file.flush()
    HOLD
    os.remove(str(number))
    kept.append(held)
print("held", flush=True)
time.sleep(60)
"""


@behind
@pytest.mark.parametrize(
    "hold", ["held = file", "held = mmap.mmap(file.fileno(), 4096); file.close()"], ids=["open", "mapped"]
)
def test_deleted_open_files_count_as_written(wall, hold):
    """They are in no folder, but on disk."""
    outcome = run_program(HOLDS.replace("HOLD", hold), limits=Limits(files=16 << 20), backend=wall)
    assert outcome.stop_reason == "files" or outcome.stderr.strip().endswith("No space left on device")


@behind
def test_a_few_deleted_open_files_are_allowed(wall):
    source = "import tempfile, sys\nf = tempfile.TemporaryFile()\nf.write(bytes(1 << 20))\nf.flush()\nprint(len(sys.stdin.read()))"
    outcome = run_program(source + "\nimport time\ntime.sleep(0.2)", "x" * (3 << 20), Limits(files=2 << 20), wall)
    assert (outcome.succeeded, outcome.stdout) == (True, f"{3 << 20}\n")


def test_a_process_that_hides_its_files_is_killed():
    """An unprivileged parent cannot inspect a child that is not dumpable; a privileged one can."""
    if "landlock" not in STANDING:
        pytest.skip("Landlock does not stand here")
    source = "import ctypes\nctypes.CDLL(None).prctl(4, 0, 0, 0, 0)\n" + HOLDS.replace("HOLD", "held = file")
    assert run_program(source, limits=Limits(files=16 << 20), backend="landlock").stop_reason == "files"


@behind
def test_file_notifications_and_files_in_messages_are_denied(wall):
    """inotify reports the names of files created in a folder that cannot be listed; a file in a message is not counted."""
    done = attempts(
        wall,
        """
import ctypes, ctypes.util, socket
libc = ctypes.CDLL(None, use_errno=True)
def checked(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), "no")
    return result
attempt("inotify", lambda: checked(libc.inotify_init1(0)))
attempt("old_inotify", lambda: checked(libc.inotify_init()))
attempt("watch", lambda: checked(libc.inotify_add_watch(0, b"/", 0x100)))
attempt("fanotify", lambda: checked(libc.fanotify_init(0, 0)))
attempt("mark", lambda: checked(libc.fanotify_mark(0, 1, 0x100, 0, b"/")))
def message():
    a, b = socket.socketpair()
    socket.send_fds(a, [b"x"], [1])
attempt("message", message)
def told():
    a, b = socket.socketpair()
    a.send(b"x")
    return b.recv(1)
attempt("bytes", told)
""",
    )
    assert done.pop("bytes") == "done b'x'"
    assert done == dict.fromkeys(("inotify", "old_inotify", "watch", "fanotify", "mark", "message"), "PermissionError")


@behind
def test_endless_loops_and_prints_are_limited(wall):
    assert run_program("while True: pass", limits=Limits(timeout=0.5), backend=wall).stop_reason == "time"
    assert (
        run_program(
            (
                "import signal, time\n"
                "for s in range(1, 65):\n"
                " try: signal.signal(s, signal.SIG_IGN)\n"
                " except Exception: pass\n"
                "time.sleep(99)"
            ),
            limits=Limits(timeout=0.5),
            backend=wall,
        ).stop_reason
        == "time"
    )
    outcome = run_program("while True: print('x' * 1000)", limits=Limits(output=10_000), backend=wall)
    assert (outcome.stop_reason, len(outcome.stdout)) == ("output", 10_000)


@behind
def test_there_is_no_network(wall, tmp_path):
    place = str(tmp_path / "socket")
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX) as local,
        socket.socket(socket.AF_UNIX) as abstract,
    ):
        local.bind(place)
        local.listen()
        abstract.bind(f"\0{place}")
        abstract.listen()
        done = attempts(
            wall,
            f"""
import socket
attempt("tcp", lambda: socket.create_connection(("127.0.0.1", {server.getsockname()[1]})))
attempt("udp", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", 53)))
attempt("local", lambda: socket.socket(socket.AF_UNIX).connect({place!r}))
attempt("abstract", lambda: socket.socket(socket.AF_UNIX).connect("\\0" + {place!r}))
attempt("netlink", lambda: socket.socket(socket.AF_NETLINK))
attempt("name", lambda: socket.getaddrinfo("example.org", 80))
""",
        )
    assert not any(said.startswith("done") for said in done.values())
    assert {done[name] for name in ("tcp", "udp", "local", "abstract", "netlink")} == {"PermissionError"}


@behind
def test_environment_variables_are_hidden(wall, monkeypatch):
    monkeypatch.setenv("POLICYGRAD_TEST_SECRET", "hunter2")
    outcome = run_program(
        """
import glob, os
for path in glob.glob("/proc/[0-9]*/environ") + ["/proc/self/environ", "/proc/1/environ"]:
    try:
        print(open(path, "rb").read())
    except OSError:
        pass
print(dict(os.environ))
""",
        backend=wall,
    )
    assert outcome.succeeded
    assert "hunter2" not in outcome.stdout
    assert "POLICYGRAD_TEST_SECRET" not in outcome.stdout


@behind
def test_the_parents_files_and_processes_are_out_of_reach(wall, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("hunter2")
    secret.chmod(0o666)
    done = attempts(
        wall,
        f"""
import signal, resource
path, parent = {str(secret)!r}, {os.getpid()}
attempt("read", lambda: open(path).read())
attempt("list", lambda: os.listdir({str(tmp_path)!r}))
attempt("write", lambda: open(path, "a"))
attempt("truncate", lambda: os.truncate(path, 0))
attempt("remove", lambda: os.remove(path))
attempt("rename", lambda: os.rename(path, path + "x"))
attempt("link", lambda: os.link(path, "mine"))
attempt("chmod", lambda: os.chmod(path, 0))
attempt("times", lambda: os.utime(path, (0, 0)))
attempt("shadow", lambda: open("/etc/shadow").read())
attempt("memory", lambda: open(f"/proc/{{parent}}/mem", "rb"))
attempt("open", lambda: os.listdir(f"/proc/{{parent}}/fd"))
attempt("system", lambda: open("/usr/policygrad-test", "w"))
attempt("package", lambda: open({backends.__file__!r}, "a"))
attempt("signal", lambda: os.kill(parent, signal.SIGTERM))
attempt("everybody", lambda: os.kill(-1, signal.SIGTERM))
attempt("above", lambda: os.kill(os.getppid(), signal.SIGTERM))
attempt("limit", lambda: resource.prlimit(parent, resource.RLIMIT_NOFILE, (4, 4)))
""",
    )
    assert {name: said for name, said in done.items() if said.startswith("done")} == {}
    assert secret.read_text() == "hunter2"
    assert secret.stat().st_mode & 0o777 == 0o666


@behind
def test_privileges_are_dropped(wall):
    done = attempts(
        wall,
        """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
attempt("root", lambda: os.chroot("/"))
attempt("namespace", lambda: 1 / (libc.unshare(0x10000000) + 1))
attempt("mount", lambda: 1 / (libc.mount(b"x", b"/tmp", b"tmpfs", 0, None) + 1))
attempt("trace", lambda: 1 / (libc.ptrace(16, os.getppid(), 0, 0) + 1))
attempt("owner", lambda: os.setuid(12345))
attempt("nice", lambda: os.nice(-5))
""",
    )
    assert not any(said.startswith("done") for said in done.values()), done


TESTS = FunctionTests(
    (
        "assert double(2) == 4",
        "assert double([1]) == [1, 1]",
        "assert len(double('ab')) == 4",
        "assert double(0.5) == 1.0",
    )
)
FORGED = {
    "exits": "import os\nos._exit(0)",
    "exits when called": "def double(x):\n    import os\n    os._exit(0)",
    "raises SystemExit": "def double(x):\n    raise SystemExit(0)",
    "equals everything": (
        "class Yes:\n"
        "    def __eq__(self, other): return True\n"
        "    def __len__(self): return 4\n"
        "def double(x): return Yes()"
    ),
    "subclasses": "class Yes(int):\n    def __eq__(self, other): return True\ndef double(x): return Yes(7)",
    "writes everywhere": (
        "import os\n"
        "def double(x):\n"
        "    for fd in range(3, 64):\n"
        "        try: os.write(fd, b'[[1,1,1,1],\"\"]')\n"
        "        except OSError: pass"
    ),
    "prints": "print('[[1, 1, 1, 1], \"\"]')\nprint('OK: all tests passed')\ndef double(x): return None",
    "patches built-ins": (
        "import builtins\n"
        "builtins.len = lambda x: 4\n"
        "len = builtins.len\n"
        "AssertionError = None\n"
        "def double(x): return None"
    ),
    "looks into frames": (
        "import sys\n"
        "def double(x):\n"
        "    f = sys._getframe()\n"
        "    while f: f.f_globals.update(points=[1, 1, 1, 1]); f = f.f_back"
    ),
    "looks for the tests": (
        "import gc\n"
        "double = next((o['double'] for o in gc.get_objects() if isinstance(o, dict) and 'tests' in o), None)"
    ),
    "writes a verdict in the right form, as its exit handlers do": (
        "import atexit, os, sys\n"
        "def forge(*x):\n"
        "    for fd in range(64):\n"
        '        try: os.write(fd, b\'[[1, 1, 1, 1], "", ""]\')\n'
        "        except OSError: pass\n"
        "    os._exit(0)\n"
        "class Last:\n"
        "    __del__ = forge\n"
        "last = sys.last = Last()\n"
        "atexit.register(forge)\n"
        "sys.excepthook = sys.unraisablehook = forge\n"
        "def double(x):\n"
        "    global last\n"
        "    del last, sys.last\n"
        "    sys.exit(0)"
    ),
    "reads memory, files and descriptors, its own and the examiner's": (
        "import glob, os, re\n"
        "found = False\n"
        "def look(path):\n"
        "    global found\n"
        "    try:\n"
        "        with open(path, 'rb', 0) as file: found |= bool(re.search(rb'len.double..a[b]', file.read(1 << 20)))\n"
        "    except (OSError, MemoryError): pass\n"
        "for fd in range(3, 64):\n"
        "    try:\n"
        "        os.set_blocking(fd, False)\n"
        "        found |= bool(re.search(rb'len.double..a[b]', os.pread(fd, 1 << 20, 0)))\n"
        "    except OSError: pass\n"
        "    try: os.set_blocking(fd, True)\n"
        "    except OSError: pass\n"
        "for path in glob.glob('/proc/[0-9]*/cmdline') + glob.glob('/proc/[0-9]*/environ') + glob.glob('/proc/[0-9]*/fd/*'):\n"
        "    if not path.startswith('/proc/self') and f'/{os.getpid()}/' not in path: look(path)\n"
        "for maps in glob.glob('/proc/[0-9]*/maps'):\n"
        "    try:\n"
        "        areas = [line.split()[0].split('-') for line in open(maps) if ' rw-p ' in line]\n"
        "        with open(maps[:-4] + 'mem', 'rb', 0) as memory:\n"
        "            for start, end in areas:\n"
        "                memory.seek(int(start, 16))\n"
        "                found |= bool(re.search(rb'len.double..a[b]', memory.read(int(end, 16) - int(start, 16))))\n"
        "    except (OSError, ValueError, OverflowError, MemoryError): pass\n"
        "def double(x): return x + x if found else None"
    ),
    "calls the tests' process by guessed numbers": (
        "import gc\n"
        "def double(x):\n"
        "    connection = next(o for o in gc.get_objects() if type(o).__name__ == '_Candidate')\n"
        "    for what in (*range(-9, 0), ['builtins', 'exec'], {'classes': [['builtins', 'SystemExit']]}, {'function': -1}):\n"
        "        connection.send('call', what, ['points[:] = [1] * 4'], {'builtins.dict': [[]]})\n"
        "        connection.receive()"
    ),
    "sends more answers than are asked for": (
        "import gc\n"
        "def double(x):\n"
        "    connection = next(o for o in gc.get_objects() if type(o).__name__ == '_Candidate')\n"
        "    for value in (None, True, {'object': 99}): connection.send('value', value)"
    ),
    "returns itself": "def double(x):\n    a = []\n    a.append(a)\n    return a",
    "defines nothing": "x = 1",
    "is no program": "def double(:",
}


@behind_one
@pytest.mark.parametrize("name", FORGED)
def test_verdicts_cannot_be_forged(wall, name):
    assert run_function_tests(FORGED[name], TESTS, SHORT, wall).points == (0.0,) * 4


CRAFTED = (  # what a program that writes its messages itself sends as the value that it returns
    '{"object": 50}',
    '{"object": true}',
    '{"object": {"classes": [["builtins", "StopIteration"], ["builtins", "Exception"]]}}',
    '{"object": {"classes": [["policygrad.sandbox.function_tests", "UnfitTestError"]]}}',
    '{"namedtuple": ["Yes", ["__eq__", "__class__", "x"], [true, true, true]]}',
    '{"builtins.slice": [{"object": 50}, {"object": 51}, {"object": 52}]}',
    '[{"builtins.tuple": [[NaN]]}]',
)


@behind_one
def test_crafted_messages_build_only_plain_data(wall):
    """Each arrives as data or as an object that equals only itself, and none makes the row unfit."""
    source = f"""
import gc, json
crafted = iter({CRAFTED!r})
def f(x):
    connection = next(o for o in gc.get_objects() if type(o).__name__ == "_Candidate")
    def send_crafted(value):
        del connection.encode
        return json.loads(next(crafted, "4"))
    connection.encode = send_crafted
def g(x): return x
"""
    tests = ("y = f(1)\nassert y == 4 or g([y]) == [4] or 4 == y or not y",) * len(CRAFTED)
    verdict = run_function_tests(source, FunctionTests((*tests, "assert f(1) == 4")), SHORT, wall)
    assert (verdict.points, verdict.unfit) == ((*(0.0,) * len(CRAFTED), 1.0), "")


@behind_one
def test_a_program_cannot_mark_its_row_unfit_by_what_it_returns(wall):
    """An unfit row has no reward, which is more than 0."""
    source = """
import collections, json, math, sys
class Own(Exception): pass
class Odd(collections.deque): pass
kinds = [object(), Own, Own("x"), int, json, len, Odd(), collections.defaultdict(lambda: 1), (x for x in "ab"),
         collections.namedtuple("P", "x y")(1, object()), lambda: 1, math.nan, KeyboardInterrupt, sys.stdout, [{}], None]
def f(x):
    if not kinds: raise ModuleNotFoundError("no", name="numpy")
    return kinds.pop()
def g(x): return x
"""
    verdict = run_function_tests(source, FunctionTests(("assert g([f(1)]) == 2",) * 17), SHORT, wall)
    assert (verdict.points, verdict.unfit) == ((0.0,) * 17, "")


@behind_one
def test_names_that_tests_assign_are_theirs(wall):
    """A program that guesses the name and its first value cannot give it another one between two tests."""
    source = "passed = False\ndef f(x):\n    global passed\n    passed = True\n    return 5"
    tests = ("passed = False", "if f(2) == 4:\n    passed = True", "assert passed")
    assert run_function_tests(source, FunctionTests(tests), SHORT, wall).points == (1.0, 1.0, 0.0)


@behind_one
def test_arrays_cannot_lie(wall):
    pytest.importorskip("numpy")
    source = """
import numpy as np
class Yes(np.ndarray):
    def __eq__(self, other): return np.array([True])
    def all(self): return True
class Odd:
    __array_priority__, shape, dtype = 1e9, (1,), np.dtype(float)
    def __array__(self, *x, **y): return np.array([2.0])
    def __array_ufunc__(self, *x, **y): return np.array([True])
    def __array_function__(self, *x, **y): return True
    def __eq__(self, other): return np.array([True])
    __float__ = __index__ = __len__ = lambda self: 2
def f(x): return np.array([7.0]).view(Yes) if x else Odd()
"""
    tests = []
    for x in (0, 1):
        tests += [
            f"import numpy as np\nassert (f({x}) == np.array([2.0])).all()",
            f"assert (np.array([2.0]) == f({x})).all()",
            f"assert np.allclose(f({x}), [2.0])",
            f"assert np.array_equal(f({x}), [2.0])",
            f"np.testing.assert_array_equal(f({x}), [2.0])",
        ]
    assert run_function_tests(source, FunctionTests(tuple(tests)), Limits(), wall).points == (0.0,) * 10


STOPS = {
    "StopIteration": "def f(x): raise StopIteration",
    "a class of its own": "class Stop(StopIteration): pass\ndef f(x): raise Stop",
    "a class that looks like Python's": (
        "class Stop(Exception): pass\nStop.__module__, Stop.__name__ = 'builtins', 'StopIteration'\ndef f(x): raise Stop"
    ),
    "StopAsyncIteration": "def f(x): raise StopAsyncIteration",
    "GeneratorExit": "def f(x): raise GeneratorExit",
    "SystemExit": "def f(x): raise SystemExit(0)",
    "KeyboardInterrupt": "def f(x): raise KeyboardInterrupt",
    "SkipTest": "import unittest\ndef f(x): raise unittest.SkipTest('not today')",
    "from its own generator": "def f(x): return next(iter([]))",
    "through the test's function": (
        "def f(x):\n    def stop(): raise StopIteration\n    return x if callable(x) and x(stop) else stop()"
    ),
}
STOPPED = FunctionTests(
    (
        "assert all(map(lambda x: f(x) == x + 1, [1, 2, 3]))",
        "assert not any(map(lambda x: f(x) != x + 1, [1, 2, 3]))",
        "assert [] == [y for y in map(f, [1, 2])]",
        "for y in map(f, [1, 2]):\n    assert y == 2",
        "assert next(map(f, [1]), 2) == 2",
        "assert all(map(lambda x: f(lambda stop: stop()) == 2, [1]))",
        "import unittest\nclass T(unittest.TestCase):\n    def test_f(self): self.assertEqual(f(1), 2)\n"
        "found = unittest.TestResult()\nT('test_f').run(found)\nassert found.wasSuccessful()",
    )
)


@behind_one
@pytest.mark.parametrize("name", STOPS)
def test_exceptions_of_a_program_end_only_its_call(name, wall):
    """A StopIteration that got into a test's `map` would end it as if every call had been right."""
    assert run_function_tests(STOPS[name], STOPPED, SHORT, wall).points == (0.0,) * len(STOPPED.tests)


@behind_one
def test_values_from_tests_run_no_program_code_in_the_examiner(wall):
    """`eval` is each process's own; of a function of the tests' nothing can be had but what it returns."""
    source = """
import sys
def use(g): return g("'solution' in __import__('sys').modules")
def made(): return eval
def asked(g):
    try:
        return [name for name in ("__globals__", "__closure__", "__code__") if "points" in str(getattr(g, name, ""))]
    except Exception:
        return []
"""
    tests = FunctionTests(
        (
            "assert use(eval) is True",
            "assert made()(\"'solution' in __import__('sys').modules\") is True",
            "points = [0]\nassert asked(lambda: points) == []",
        )
    )
    assert run_function_tests(source, tests, SHORT, wall).points == (1.0, 1.0, 1.0)


@behind
def test_a_program_that_hangs_fails_all_its_tests(wall):
    verdict = run_function_tests("def double(x):\n    while True: pass", TESTS, Limits(timeout=0.5), wall)
    assert verdict.points == (0.0,) * 4
    assert verdict.message == "exceeded the time limit"


@behind
def test_an_exited_program_passes_nothing(wall):
    tests = FunctionTests(("try:\n    double(1)\nexcept Exception:\n    pass", "pass"))
    assert run_function_tests("def double(x):\n    import os\n    os._exit(0)", tests, SHORT, wall).points == (0.0, 0.0)


@behind
def test_a_right_program_passes(wall):
    assert run_function_tests("def double(x): return x + x", TESTS, backend=wall).points == (1.0,) * 4
    assert run_stdio_tests(
        "print(int(input()) * 2)", StdioTests((("1\n", "2\n"), ("2", "4"), ("3", "5"))), backend=wall
    ).points == (1.0, 1.0, 0.0)


@behind
def test_two_sandboxes_at_once(wall):
    results = []
    threads = [
        threading.Thread(target=lambda i=i: results.append(run_program(f"print({i})", backend=wall).stdout))
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [f"{i}\n" for i in range(4)]


def test_nothing_runs_without_a_sandbox(monkeypatch):
    monkeypatch.setattr("policygrad.sandbox.backends.find_bwrap", lambda: None)
    monkeypatch.setattr("policygrad.sandbox.landlock.get_abi_version", lambda: 0)
    find_backend.cache_clear()
    try:
        with pytest.raises(
            ConfigError, match=r"bubblewrap: bwrap is not installed; landlock: the kernel has none\. Install"
        ):
            run_program("print(1)")
        with pytest.raises(ConfigError, match=r"landlock: the kernel has none\. Install"):
            find_backend("landlock")
    finally:
        find_backend.cache_clear()
    with pytest.raises(ConfigError, match="choose auto, bubblewrap, landlock"):
        find_backend("paper")


def test_a_broken_sandbox_is_an_error(monkeypatch, tmp_path):
    """A failing bwrap is detected when it is tried, and reported."""
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr("policygrad.sandbox.backends.find_bwrap", lambda: str(broken))
    with pytest.raises(SandboxError, match="No permissions to create new namespace"):
        run_program("print(1)", backend=BACKENDS["bubblewrap"])
    find_backend.cache_clear()
    try:
        with pytest.raises(ConfigError, match="bubblewrap: bwrap: No permissions to create new namespace"):
            find_backend("bubblewrap")
    finally:
        find_backend.cache_clear()


@pytest.mark.parametrize("wrong", [{"timeout": 0.0}, {"timeout": float("inf")}, {"memory": 1}, {"output": 0}])
def test_invalid_limits(wrong):
    with pytest.raises(ConfigError, match="a sandbox's"):
        Limits(**wrong)
