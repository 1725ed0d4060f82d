"""Parts of the sandbox: the seccomp filter, encoded values, names, compared output, Landlock, the Python tool."""

import contextlib
import io
import json
import platform
import struct
import subprocess
import sys
import unittest
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policygrad.errors import ConfigError
from policygrad.sandbox import BACKENDS, FunctionTests, PythonTool, find_backend, landlock, run_function_tests, seccomp
from policygrad.sandbox.function_tests import (
    Connection,
    PeerClosedError,
    decode_value,
    encode_value,
    find_builtin_entry,
)
from policygrad.sandbox.program_tests import compare_output

PAGE = Path(__file__).parents[2] / "docs" / "isolation.md"
X86, ARM = 0xC000003E, 0xC00000B7
ALLOW, KILL, EPERM, ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026


def stands():
    try:
        find_backend()
    except ConfigError:
        return False
    return True


needs_wall = pytest.mark.skipif(not stands(), reason="no sandbox works on this machine")


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
def test_seccomp_filter_decisions(machine, audit, other):
    which = 0 if machine == "x86_64" else 1
    alone = seccomp.build_filter(machine, 77, alone=True, attributes=True)
    worker = seccomp.build_filter(machine, 77, alone=False, attributes=False)
    read, clone, socket, socketpair, chmod = [(0, 63), (56, 220), (41, 198), (53, 199), (268, 53)]
    for code in (alone, worker):
        assert decide(code, other, read[which]) == KILL
        assert decide(code, audit, read[which]) == ALLOW
        assert decide(code, audit, socket[which]) == EPERM
        assert decide(code, audit, socketpair[which]) == ALLOW
        assert {decide(code, audit, numbers[which]) for numbers in ((294, 26), (254, 27), (301, 263))} == {
            EPERM
        }  # inotify
        assert decide(code, audit, 435) == ENOSYS
        assert decide(code, audit, 425) == EPERM
        assert decide(code, audit, 0x40000000 + read[which]) == ENOSYS
        assert decide(code, audit, 9999) == ENOSYS
        assert [decide(code, audit, (302, 261)[which], pid) for pid in (0, 77, 1)] == [ALLOW, ALLOW, EPERM]
    assert (decide(alone, audit, clone[which]), decide(worker, audit, clone[which])) == (EPERM, ALLOW)
    assert (decide(alone, audit, chmod[which]), decide(worker, audit, chmod[which])) == (EPERM, ALLOW)
    sendmsg = (46, 211)[which]
    assert (decide(alone, audit, sendmsg), decide(worker, audit, sendmsg)) == (EPERM, ALLOW)
    kill = (62, 129)[which]
    assert [decide(alone, audit, kill, pid) for pid in (77, 1, 0, 0xFFFFFFFF)] == [ALLOW, EPERM, EPERM, EPERM]
    assert decide(worker, audit, kill, 1) == ALLOW


def test_seccomp_is_supported():
    assert seccomp.is_supported() == (platform.machine() in ("x86_64", "aarch64"))


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
def test_plain_data_round_trips(value):
    back = decode_value(encode_value(value, nothing), nothing)
    assert back == value
    assert repr(back) == repr(value)


def test_sets_arrays_and_objects():
    numpy = pytest.importorskip("numpy")
    assert decode_value(encode_value({1, 2}, nothing), nothing) == {1, 2}
    assert decode_value(encode_value(frozenset({1}), nothing), nothing) == frozenset({1})
    assert decode_value(encode_value(numpy.array([[1, 2]]), nothing), nothing) == [[1, 2]]
    assert decode_value(encode_value(numpy.float64(0.5), nothing), nothing) == 0.5
    kept = []
    packed = encode_value([object], lambda value: kept.append(value) or 7)
    assert (packed, kept) == ([{"object": 7}], [object])


FORMS = ["object", "type", "namedtuple", "array", "builtins.set", "builtins.dict", "collections.deque", "os.system"]


@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=3),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(FORMS), inner, max_size=2),
        max_leaves=10,
    )
)
def test_arbitrary_json_is_decoded_or_rejected(packed):
    with contextlib.suppress(PeerClosedError):
        decode_value(packed, lambda number: number)


def test_malformed_values_and_unknown_classes_are_rejected():
    for packed in (
        {"builtins.dict": [[[[], 1]]]},
        {"builtins.int": ["zz", 16]},
        {"builtins.bytes": ["€", "latin-1"]},
        {"builtins.set": [[{"builtins.dict": [[]]}]]},
        {"builtins.int": ["4", 10], "builtins.eval": ["4"]},
        {"builtins.tuple": 5},
        {"builtins.eval": ["4"]},
        {"os.system": ["true"]},
        {"policygrad.sandbox.function_tests._RemoteObject": [None]},
        {"type": "eval"},
        {"x": []},
        {},
    ):
        with pytest.raises(PeerClosedError):
            decode_value(packed, nothing)


@pytest.mark.parametrize(
    "value",
    [
        deque([1, 2], 3),
        Counter("aab"),
        OrderedDict(b=1, a=2),
        defaultdict(list, a=[1]),
        Fraction(1, 3),
        Decimal("0.10"),
        date(2024, 2, 29),
        datetime(2024, 2, 29, 1, 2, 3, 4, timezone(timedelta(hours=5))),
        timedelta(days=-1, microseconds=1),
        range(1, 10, 2),
        [str, type(None)],
        {Fraction(1, 2): (deque(),)},
    ],
    ids=repr,
)
def test_standard_library_data_round_trips(value):
    back = decode_value(encode_value(value, nothing), nothing)
    assert (back, type(back), repr(back)) == (value, type(value), repr(value))


def test_named_tuples_keep_their_names():
    point = namedtuple("point", "x y")
    back = decode_value(encode_value(point(1, [2]), nothing), nothing)
    assert (back, back.y, type(back).__name__) == ((1, [2]), [2], "point")
    with pytest.raises(PeerClosedError):
        decode_value({"namedtuple": ["print(1)", ["x"], [1]]}, nothing)


def test_arrays_round_trip_on_request():
    numpy = pytest.importorskip("numpy")
    for value in (numpy.arange(6).reshape(2, 3), numpy.float32(0.5), numpy.array(["ab"]), numpy.array([], bool)):
        back = decode_value(encode_value(value, nothing, arrays=True), nothing)
        assert (type(back), back.dtype, back.tolist()) == (type(value), value.dtype, value.tolist())
    assert decode_value(encode_value(numpy.array([1, None]), nothing, arrays=True), nothing) == [
        1,
        None,
    ]  # objects: no data of their own
    with pytest.raises(PeerClosedError):
        decode_value({"array": ["|O8", [1], "00" * 8]}, nothing)


def there_and_back(error):
    """An exception as the other side has it, when it is thrown and when it is caught by its class."""
    program, tests = (Connection(io.BytesIO(), io.BytesIO(), numbers) for numbers in (count(), count(-1, -1)))
    packed = program.encode_error(error)
    assert type(tests.decode_error(packed)) is type(tests.decode_error(packed))
    return tests.decode_error(packed)


class Short(ValueError):
    def __init__(self, need, have):
        super().__init__(need, have)
        self.need = need

    def __str__(self):
        return f"{self.need} are needed"


class Stops(StopIteration):
    pass


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (ValueError("x"), ValueError, "x"),
        (KeyError("x"), KeyError, "'x'"),
        (
            UnicodeDecodeError("utf-8", b"x", 0, 1, "why"),
            UnicodeDecodeError,
            "can't decode byte 0x78 in position 0: why",
        ),
        (json.JSONDecodeError("no", "x", 0), json.JSONDecodeError, "no: line 1 column 1"),
        (Short(3, 1), ValueError, "3 are needed"),
        (StopIteration(1), RuntimeError, "StopIteration: 1"),
        (StopAsyncIteration(), RuntimeError, "StopAsyncIteration: "),
        (Stops(), RuntimeError, ""),
        (GeneratorExit(), RuntimeError, "GeneratorExit: "),
        (SystemExit(0), RuntimeError, "SystemExit: 0"),
        (KeyboardInterrupt(), RuntimeError, "KeyboardInterrupt: "),
        (unittest.SkipTest("x"), RuntimeError, "SkipTest: x"),
    ],
    ids=repr,
)
def test_exceptions_keep_their_class_or_become_runtime_errors(error, kind, text):
    result = there_and_back(error)
    assert isinstance(result, kind)
    assert text in str(result)
    assert not isinstance(result, (StopIteration, StopAsyncIteration, unittest.SkipTest))
    assert type(result).__name__ == (
        type(error).__name__ if kind is not RuntimeError or isinstance(error, Stops) else "RuntimeError"
    )


def test_custom_exceptions_keep_their_attributes():
    result = there_and_back(Short(3, 1))
    assert (type(result).__name__, result.args, result.need) == ("Short", (3, 1), 3)


@pytest.mark.parametrize(
    "reference",
    [0, -1, "f", None, ["builtins", "eval"], {"function": -1, "name": "f"}, {"classes": [[]]}, {"classes": [1]}],
    ids=repr,
)
def test_references_to_what_was_never_sent_are_rejected(reference):
    with pytest.raises(PeerClosedError):
        Connection(io.BytesIO(), io.BytesIO(), count()).decode({"object": reference})


def test_compare_output_ignores_trailing_blanks():
    assert compare_output("1 \n2\r\n\n", "1\n2")
    assert not compare_output("1\n\n2", "1\n2")
    assert not compare_output(" 1", "1")


def test_compare_output_compares_numbers_exactly():
    assert compare_output("2.50 1e2\nx\n", "2.5 100\nx")
    assert not compare_output("50000000000000000", "50000000000000001")
    assert not compare_output("1  2", "1 2")
    assert not compare_output("x 2.50", "x 2.5")
    assert not compare_output("sNaN", "1")
    assert not compare_output("1", "sNaN")
    assert compare_output("nan 1", "nan 1")


@needs_wall
@pytest.mark.parametrize(
    ("source", "tests", "points"),
    [
        ("def sum(a, b): return 6", FunctionTests(("assert sum(10, 15) == 6",)), (1.0,)),  # MBPP has tasks like this
        ("def largest(x): return x[-1]", FunctionTests(("assert largest([1, 2]) == max([1, 2])",)), (1.0,)),
        (
            "def max(x): return 9\ndef largest(x): return 9",
            FunctionTests(("assert largest([1, 2]) == max([1, 2])",)),
            (0.0,),
        ),
        ("math = None\ndef half(x): return x / 2", FunctionTests(("assert math.isclose(half(1), 0.5)",)), (1.0,)),
        (
            "class Pair:\n    def __init__(self, a, b): self.a, self.b = a, b\ndef first(pairs): return pairs[0].a",
            FunctionTests(
                (
                    "assert first([Pair(5, 24), Pair(1, 2)]) == 5",
                    "assert Pair(1, 2).b == 2",
                    "assert Pair(1, 2) == Pair(1, 2)",
                )
            ),
            (1.0, 1.0, 0.0),
        ),
        ("def count(n):\n    yield from range(n)", FunctionTests(("assert list(count(3)) == [0, 1, 2]",)), (1.0,)),
        (
            "def root(x):\n    if x < 0: raise ValueError('negative')\n    return x ** 0.5",
            FunctionTests(
                ("try:\n    root(-1)\n    assert 0\nexcept ValueError as error:\n    assert str(error) == 'negative'",)
            ),
            (1.0,),
        ),
        (
            "def encode(x): return x\ndef decode(x): return x",
            FunctionTests(
                ("def check(f):\n    assert f(encode('ab')) == 'ab'\ncheck(decode)",),
                setup="def encode(x): return x[::-1]",
                entry="decode",
            ),
            (0.0,),  # the setup's encode, not the program's
        ),
    ],
)
def test_names_and_objects_between_tests_and_program(source, tests, points):
    assert run_function_tests(source, tests).points == points


@pytest.mark.parametrize(
    ("tests", "entry"),
    [
        (("assert sum(10, 15) == 6",), "sum"),
        (("assert abs(sum(1, 2) - 3) < 1e-6",), "sum"),
        (("assert set(sorted([2, 1])) == set([1, 2])",), "sorted"),
        (("assert all(sum(x) == y for x, y in [((1, 2), 3)])",), "sum"),
        (("assert isinstance(max([1]), int)", "assert len([max([2])]) == 1"), "max"),
        (("x = list(zip([1], [2]))\nassert x == [(1, 2)]",), "zip"),
        (("assert list(set([1])) == [1]",), "set"),
        (("assert all(is_even(x) for x in [2])",), None),
        (("from math import sqrt\nassert round(sqrt(4)) == 2",), "round"),
        (("assert True",), None),
        ((), None),
    ],
)
def test_the_tests_alone_decide_which_builtin_they_are_about(tests, entry):
    assert find_builtin_entry("import math", tests) == entry


@needs_wall
@pytest.mark.parametrize(
    ("source", "test", "point"),
    [
        ("def all(x): return True", "assert all(is_even(x) for x in [2, 4])", 0.0),
        ("def abs(x): return 0\ndef sum(*x): return 7", "assert abs(sum(1, 2) - 3) < 1e-6", 0.0),
        ("def abs(x): return 0", "assert abs(sum([1, 2]) - 4) < 1e-6", 0.0),
        ("def set(x): return 1\ndef sorted(x): return 2", "assert set(sorted([2, 1])) == set([1, 2])", 0.0),
        ("x = 1", "assert sorted([2, 1]) == [1, 2]", 0.0),  # Python's own function is no solution
        ("def abs(x): return 0\ndef sum(*x): return 3", "assert abs(sum(1, 2) - 3) < 1e-6", 1.0),
        ("def sorted(x): return [1, 2]", "assert set(sorted([2, 1])) == set([1, 2])", 1.0),
    ],
)
def test_a_program_replaces_no_builtin_that_tests_compare_by(source, test, point):
    assert run_function_tests(source, FunctionTests((test,))).points == (point,)


SPOKEN = {  # a program, and tests that it passes
    "deque": (
        "from collections import deque\ndef f(x):\n    x.rotate(1)\n    return x",
        "from collections import deque\nassert f(deque([1, 2])) == deque([2, 1])",
        "assert f(deque([1, 2], 5)).maxlen == 5",
    ),
    "Fraction and Decimal": (
        "from fractions import Fraction\ndef half(x): return x / 2",
        "from fractions import Fraction\nassert half(Fraction(2, 3)).denominator == 3",
        "from decimal import Decimal\nassert half(Decimal('0.1')) == Decimal('0.05')",
    ),
    "dates": (
        "import datetime\ndef after(d): return d + datetime.timedelta(days=1)",
        "from datetime import date\nassert after(date(2024, 2, 28)) == date(2024, 2, 29)",
        "import datetime as dt\nassert after(dt.datetime(2024, 12, 31, 1)).isoformat() == '2025-01-01T01:00:00'",
    ),
    "lambdas": (
        "def each(g, x): return [g(v) for v in x]",
        "assert each(lambda v: v * 2, [1, 2]) == [2, 4]",
        "assert each(str.upper, ['a']) == ['A'] and each(len, ['ab']) == [2]",
        "import operator\nassert each(operator.itemgetter(1), ['ab']) == ['b']",
        "seen = []\neach(seen.append, [1, 2])\nassert seen == [1, 2]",
        "def g(n): return n if n == 0 else each(g, [n - 1])[0] + 1\nassert each(g, [20]) == [20]",
    ),
    "a lambda that raises": (
        "class Own(Exception): pass\ndef f(g):\n    try: return g()\n    except (Own, ZeroDivisionError) as e: return str(e)",
        "assert f(lambda: 1 / 0) == 'division by zero'",
        "def g(): raise Own('mine')\nassert f(g) == 'mine'",
    ),
    "functions that return functions": (
        "def compose(*gs):\n    def go(x):\n        for g in gs: x = g(x)\n        return x\n    return go",
        "assert compose(lambda x: x + 1, lambda x: x * 2)(3) == 8",
    ),
    "generators, without end too": (
        "def count(n=0):\n    while True:\n        yield n\n        n += 1\ndef two(i): return [next(i), next(i)]",
        "g = count()\nassert (next(g), next(g)) == (0, 1)\nimport itertools\nassert list(itertools.islice(g, 3)) == [2, 3, 4]",
        "assert [x for x, _ in zip(count(), range(300))] == list(range(300))",
        "import itertools\nassert two(itertools.count()) == two(iter([0, 1])) == two(x for x in range(9)) == [0, 1]",
    ),
    "a generator that ends, and one that raises": (
        "def f(n, e=None):\n    yield from range(n)\n    if e: raise e",
        "g = f(1)\nassert next(g) == 0 and next(g, 'over') == 'over'\ntry: next(g)\nexcept StopIteration: pass",
        "got = []\ntry:\n    for x in f(100, ValueError): got.append(x)\nexcept ValueError: pass\nassert len(got) == 100",
    ),
    "arrays": (
        "import numpy as np\ndef f(x): return np.array(x) * 2",
        "import numpy as np\nassert (f([1, 2]) == np.array([2, 4])).all() and np.allclose(f([0.5]), [1.0])",
        "assert f([[1, 2]]).shape == (1, 2) and f(np.arange(3)).tolist() == [0, 2, 4]",
    ),
    "arrays for tests that know none": (
        "import numpy as np\ndef f(x): return np.array(x) * 2",
        "assert f([1, 2]) == [2, 4]",
    ),
    "constants": (
        "MOST = 5\nSEEN = {'a': 1}\ndef f(): SEEN['b'] = 2",
        "assert MOST + 1 == 6 and SEEN == {'a': 1}",
        "f()",
        "assert SEEN['b'] == 2",
        "MOST = 7\nassert MOST == 7",
        "assert MOST == 7",
    ),
    "exceptions of its own": (
        "class Short(ValueError):\n    def __init__(self, n):\n        super().__init__(f'short of {n}')\n        self.n = n\n"
        "class Long(Exception): pass\ndef f(x): raise Short(x)",
        "try:\n    f(3)\n    assert 0\nexcept Short as e:\n    assert (str(e), e.n) == ('short of 3', 3)",
        "try:\n    f(3)\n    assert 0\nexcept Long:\n    assert 0\nexcept ValueError:\n    pass",
        "import unittest\nwith unittest.TestCase().assertRaisesRegex(Short, 'short'):\n    f(1)",
    ),
    "exceptions of the library": (
        "import json\ndef f(x): return json.loads(x)",
        "try:\n    f('{')\n    assert 0\nexcept ValueError as e:\n    assert 'Expecting' in str(e)",
        "import json\ntry:\n    f('{')\n    assert 0\nexcept json.JSONDecodeError as e:\n    assert e.pos == 1",
    ),
    "what is printed": (
        "import sys\nprint('first')\ndef f(x):\n    print('hi', x)\n    sys.stdout.buffer.write(b'!')",
        "import io, contextlib\nwith contextlib.redirect_stdout(io.StringIO()) as out: f(1)\nassert out.getvalue() == 'hi 1\\n!'",
        "import io\nfrom unittest.mock import patch\nwith patch('sys.stdout', new_callable=io.StringIO) as out:\n    f(2)\n"
        "assert out.getvalue() == 'hi 2\\n!'",
    ),
    "named tuples and enumerations": (
        "from collections import namedtuple\nfrom enum import Enum\n"
        "P = namedtuple('P', 'x y')\nclass C(Enum):\n    R = 1\n    G = 2\n"
        "def f(p): return P(p.x + 1, p.y)\ndef g(x): return C(x)",
        "assert f(P(1, 2)) == (2, 2) and f(P(1, 2)).x == 2",
        "assert g(1) == C.R and g(2) is C.G and g(1) != C.G and g(2).value == 2 and isinstance(g(1), C)",
    ),
    "kinds": ("def f(x): return type(x)", "assert f(1) is int and f('') == str and f(None) is type(None)"),
    "a list to go through again": (
        "class Bag:\n    def __iter__(self): return iter([1, 2])\ndef f(): return Bag()",
        "b = f()\nassert list(b) == list(b) == [1, 2] and 2 in b",
    ),
}


@needs_wall
@pytest.mark.parametrize("name", SPOKEN)
def test_tests_and_programs_exchange_values(name):
    source, *tests = SPOKEN[name]
    verdict = run_function_tests(source, FunctionTests(tuple(tests)))
    assert verdict.points == (1.0,) * len(tests), verdict.message


CONFINED = """
import os, sys
from policygrad.sandbox import landlock, seccomp
landlock.get_abi_version = lambda: int(sys.argv[1])
landlock.drop_capabilities()
landlock.restrict(["/usr", sys.prefix, sys.base_prefix], [sys.argv[2]])
seccomp.install_filter(alone=True, attributes=True)
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


@pytest.mark.skipif(not landlock.get_abi_version(), reason="the kernel has no Landlock")
@pytest.mark.parametrize("version", range(1, 8))
def test_every_landlock_version_restricts(version, tmp_path):
    """As an older kernel would be asked, with seccomp for what it does not see: truncation before version 3, signals before 6."""
    if version > landlock.get_abi_version():
        pytest.skip(f"this kernel has version {landlock.get_abi_version()}")
    secret, folder = tmp_path / "secret", tmp_path / "folder"
    secret.write_text("hunter2")
    folder.mkdir()
    words = [sys.executable, "-c", CONFINED, str(version), str(folder), str(secret)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["refused"] * 6
    assert (secret.read_text(), (folder / "mine").read_text()) == ("hunter2", "x")


@needs_wall
def test_python_tool():
    tool = PythonTool(max_output_chars=60)
    assert tool("print('a')\n2 ** 10") == "a\n1024\n"
    assert tool("x = 1") == ""
    failed = PythonTool()("print(1)\n1 / 0")
    assert failed.startswith("1\nTraceback")
    assert failed.endswith('File "program.py", line 2, in <module>\nZeroDivisionError: division by zero')
    assert "process.py" not in failed
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
def test_tracebacks_omit_sandbox_frames(code: str, shown: list[str]) -> None:
    said = PythonTool()(code)
    places = [said.index(word) for word in shown]
    assert places == sorted(places)
    assert said.startswith("Traceback (most recent call last):\n")
    for ours in ("sandbox", "_become", "<string>", "ast.py", "^^^^^^^^^^^^^"):
        assert ours not in said


@needs_wall
def test_documented_examples():
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


def test_backend_names():
    assert {name: wall.name for name, wall in BACKENDS.items()} == {name: name for name in BACKENDS}
