"""The parts of a sandbox: the filter instruction by instruction, values there and back, names, lines, the tool."""

import contextlib
import platform
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policygrad.errors import ConfigError
from policygrad.sandbox import WALLS, Examination, PythonTool, examine, landlock, seccomp, standing
from policygrad.sandbox.examination import same_lines
from policygrad.sandbox.values import Gone, exception_of, pack, unpack

PAGE = Path(__file__).parents[2] / "docs" / "sandbox.md"
X86, ARM = 0xC000003E, 0xC00000B7
ALLOW, KILL, EPERM, ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026


def stands():
    try:
        standing()
    except ConfigError:
        return False
    return True


needs_wall = pytest.mark.skipif(not stands(), reason="no wall stands on this machine")


def decide(code, machine, number, first=0):
    """What the kernel would answer: classic BPF, the four instructions that the filter has."""
    data = struct.pack("=iIQQ", number, machine, 0, first) + bytes(40)
    lines = [struct.unpack_from("HBBI", code, place) for place in range(0, len(code), 8)]
    place, value = 0, 0
    for _ in range(len(lines) + 1):
        what, yes, no, operand = lines[place]
        if what == 0x06:
            return operand
        if what == 0x20:
            (value,) = struct.unpack_from("=I", data, operand)
            place += 1
        else:
            holds = value == operand if what == 0x15 else value >= operand
            assert what in (0x15, 0x35)
            place += 1 + (yes if holds else no)
    raise AssertionError("the filter has no end")


@pytest.mark.parametrize(("machine", "audit", "other"), [("x86_64", X86, ARM), ("aarch64", ARM, X86)])
def test_the_filter_by_its_instructions(machine, audit, other):
    which = 0 if machine == "x86_64" else 1
    alone = seccomp.program(machine, 77, alone=True, attributes=True)
    worker = seccomp.program(machine, 77, alone=False, attributes=False)
    read, clone, socket, socketpair, chmod = [(0, 63), (56, 220), (41, 198), (53, 199), (268, 53)]
    for code in (alone, worker):
        assert decide(code, other, read[which]) == KILL
        assert decide(code, audit, read[which]) == ALLOW
        assert decide(code, audit, socket[which]) == EPERM
        assert decide(code, audit, socketpair[which]) == ALLOW
        assert decide(code, audit, 435) == ENOSYS
        assert decide(code, audit, 425) == EPERM
        assert decide(code, audit, 0x40000000 + read[which]) == ENOSYS
        assert decide(code, audit, 9999) == ENOSYS
        assert [decide(code, audit, (302, 261)[which], pid) for pid in (0, 77, 1)] == [ALLOW, ALLOW, EPERM]
    assert (decide(alone, audit, clone[which]), decide(worker, audit, clone[which])) == (EPERM, ALLOW)
    assert (decide(alone, audit, chmod[which]), decide(worker, audit, chmod[which])) == (EPERM, ALLOW)
    kill = (62, 129)[which]
    assert [decide(alone, audit, kill, pid) for pid in (77, 1, 0, 0xFFFFFFFF)] == [ALLOW, EPERM, EPERM, EPERM]
    assert decide(worker, audit, kill, 1) == ALLOW


def test_the_filter_knows_this_machine_or_says_so():
    assert seccomp.known() == (platform.machine() in ("x86_64", "aarch64"))


DATA = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=4)
    ),
    max_leaves=20,
)


def nothing(value):
    raise AssertionError(f"{value!r} is plain data")


@given(DATA)
def test_plain_data_comes_back_as_it_was(value):
    back = unpack(pack(value, nothing), nothing)
    assert back == value
    assert repr(back) == repr(value)


def test_sets_arrays_and_objects():
    numpy = pytest.importorskip("numpy")
    assert unpack(pack({1, 2}, nothing), nothing) == {1, 2}
    assert unpack(pack(frozenset({1}), nothing), nothing) == frozenset({1})
    assert unpack(pack(numpy.array([[1, 2]]), nothing), nothing) == [[1, 2]]
    assert unpack(pack(numpy.float64(0.5), nothing), nothing) == 0.5
    kept = []
    packed = pack([object], lambda value: kept.append(value) or 7)
    assert (packed, kept) == (["l", [["r", 7]]], [object])


@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=3), lambda inner: st.lists(inner, max_size=4), max_leaves=10
    )
)
def test_what_nobody_packed_is_refused_or_data(packed):
    with contextlib.suppress(Gone):
        unpack(packed, lambda number: number)


def test_unhashable_keys_and_bad_numbers_are_refused():
    for packed in (["d", [[["l", []], ["=", 1]]]], ["i", "zz"], ["f", "x"], ["b", "0"], ["s", [["d", []]]], ["x"], []):
        with pytest.raises(Gone):
            unpack(packed, nothing)


def test_exceptions_by_name():
    assert type(exception_of("ValueError", "x")) is ValueError
    assert type(exception_of("UnicodeDecodeError", "x")) is RuntimeError
    assert type(exception_of("SystemExit", "0")) is RuntimeError
    assert str(exception_of("Mine", "x")) == "Mine: x"


def test_lines_are_compared_without_blanks_at_their_ends():
    assert same_lines("1 \n2\r\n\n", "1\n2")
    assert not same_lines("1\n\n2", "1\n2")
    assert not same_lines(" 1", "1")


@needs_wall
@pytest.mark.parametrize(
    ("source", "tests", "points"),
    [
        ("def sum(a, b): return 6", Examination(("assert sum(10, 15) == 6",)), (1.0,)),  # MBPP has tasks like this
        ("def largest(x): return x[-1]", Examination(("assert largest([1, 2]) == max([1, 2])",)), (1.0,)),
        (
            "def max(x): return 9\ndef largest(x): return 9",
            Examination(("assert largest([1, 2]) == max([1, 2])",)),
            (0.0,),
        ),
        ("math = None\ndef half(x): return x / 2", Examination(("assert math.isclose(half(1), 0.5)",)), (1.0,)),
        (
            "class Pair:\n    def __init__(self, a, b): self.a, self.b = a, b\ndef first(pairs): return pairs[0].a",
            Examination(
                (
                    "assert first([Pair(5, 24), Pair(1, 2)]) == 5",
                    "assert Pair(1, 2).b == 2",
                    "assert Pair(1, 2) == Pair(1, 2)",
                )
            ),
            (1.0, 1.0, 0.0),
        ),
        ("def count(n):\n    yield from range(n)", Examination(("assert list(count(3)) == [0, 1, 2]",)), (1.0,)),
        (
            "def root(x):\n    if x < 0: raise ValueError('negative')\n    return x ** 0.5",
            Examination(
                ("try:\n    root(-1)\n    assert 0\nexcept ValueError as error:\n    assert str(error) == 'negative'",)
            ),
            (1.0,),
        ),
        (
            "def encode(x): return x\ndef decode(x): return x",
            Examination(
                ("def check(f):\n    assert f(encode('ab')) == 'ab'\ncheck(decode)",),
                setup="def encode(x): return x[::-1]",
                entry="decode",
            ),
            (0.0,),  # the setup's encode, not the program's
        ),
    ],
)
def test_names_and_objects_between_tests_and_program(source, tests, points):
    assert examine(source, tests).points == points


CONFINED = """
import os, sys
from policygrad.sandbox import landlock, privileges, seccomp
landlock.version = lambda: int(sys.argv[1])
privileges.drop()
landlock.restrict(["/usr", sys.prefix, sys.base_prefix], [sys.argv[2]])
seccomp.install(alone=True, attributes=True)
with open(os.path.join(sys.argv[2], "mine"), "w") as file:
    file.write("x")
for attempt in (
    lambda: open(sys.argv[3]),
    lambda: open(sys.argv[3], "w"),
    lambda: os.truncate(sys.argv[3], 0),
    lambda: os.rename(sys.argv[3], os.path.join(sys.argv[2], "theirs")),
    lambda: os.mkdir(os.path.join(sys.argv[2], "folder")),
    lambda: os.kill(os.getppid(), 0),
):
    try:
        attempt()
        print("done")
    except PermissionError:
        print("refused")
    except OSError as error:
        print("refused" if error.errno == 18 else error)  # EXDEV: before version 2 nothing is moved between folders
"""


@pytest.mark.skipif(not landlock.version(), reason="the kernel has no Landlock")
@pytest.mark.parametrize("version", range(1, 8))
def test_every_version_of_landlock_holds(version, tmp_path):
    """As an older kernel would be asked, with seccomp for what it does not see: truncation before version 3, signals before 6."""
    if version > landlock.version():
        pytest.skip(f"this kernel has version {landlock.version()}")
    secret, folder = tmp_path / "secret", tmp_path / "folder"
    secret.write_text("hunter2")
    folder.mkdir()
    words = [sys.executable, "-c", CONFINED, str(version), str(folder), str(secret)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["refused"] * 6
    assert (secret.read_text(), (folder / "mine").read_text()) == ("hunter2", "x")


@needs_wall
def test_python_as_a_tool():
    tool = PythonTool(longest=60)
    assert tool("print('a')\n2 ** 10") == "a\n1024\n"
    assert tool("x = 1") == ""
    failed = PythonTool()("print(1)\n1 / 0")
    assert failed.startswith("1\nTraceback")
    assert failed.endswith('File "program.py", line 2, in <module>\nZeroDivisionError: division by zero')
    assert "inside.py" not in failed
    assert len(tool("'x' * 1000")) < 100
    assert "characters …" in tool("'x' * 1000")
    assert PythonTool()("def f(:").endswith("SyntaxError: invalid syntax")


@needs_wall
@pytest.mark.parametrize(
    ("code", "shown"),
    [
        ("def f(x):\n    return 1 / x\nf(0)", ["line 3, in <module>", "line 2, in f", "ZeroDivisionError"]),
        ("x = (", ["line 1", "x = (", "SyntaxError: '(' was never closed"]),
        (
            "try:\n    1 / 0\nexcept Exception as error:\n    raise ValueError('b') from error",
            ["line 2, in <module>", "ZeroDivisionError", "direct cause", "line 4, in <module>", "ValueError: b"],
        ),
        ("\0", ["SyntaxError: source code string cannot contain null bytes"]),
    ],
)
def test_a_traceback_of_the_python_tool_has_no_frame_of_ours(code: str, shown: list[str]) -> None:
    said = PythonTool()(code)
    places = [said.index(word) for word in shown]
    assert places == sorted(places)
    assert said.startswith("Traceback (most recent call last):\n")
    for ours in ("sandbox", "_become", "<string>", "ast.py", "^^^^^^^^^^^^^"):
        assert ours not in said


@needs_wall
def test_the_page_prints_what_it_says():
    """Every line of the page's Python that ends in a comment is worth what the comment says."""
    block = PAGE.read_text(encoding="utf-8").partition("```python\n")[2].partition("```")[0]
    space = {}
    checked = 0
    for line in block.splitlines():
        code, _, said = line.partition("  # ")
        if said:
            assert eval(code, space) == eval(said), line
            checked += 1
        else:
            exec(line, space)
    assert checked == 4


def test_every_wall_has_its_name():
    assert {name: wall.name for name, wall in WALLS.items()} == {name: name for name in WALLS}
