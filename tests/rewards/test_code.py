"""The reward `code`: test formats of data sets, extraction of programs, options, and runs in reward workers."""

import base64
import functools
import json
import pickle
import zlib

import pytest

from policygrad.errors import ConfigError, DataError
from policygrad.rewards.code import Code, build_tests, complete_program, extract_program, extract_prompt_code
from policygrad.rewards.resolve import find_code, resolve_reward
from policygrad.rewards.workers.pool import RewardPool
from policygrad.sandbox import FunctionTests, StdioTests, find_backend, run_function_tests, run_stdio_tests

ADD = 'def add(a: int, b: int) -> int:\n    """Add.\n    >>> add(1, 2)\n    3\n    """\n'
CHECK = (
    "\n\nMETADATA = {}\n\n\ndef check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(-1, 2) == 1\n"
)
HUMANEVAL = {"test": CHECK, "entry_point": "add"}
CASE = {"input": "1", "output": "2", "testtype": "stdin"}


def packed(cases, by=pickle.dumps):
    """Pack tests as LiveCodeBench packs its private ones."""
    return base64.b64encode(zlib.compress(by(json.dumps(cases)))).decode()


def pickle_of_more(text):
    """A pickle that would call something if it were unpickled."""
    return pickle.dumps(functools.partial(text.encode))


def stands():
    try:
        find_backend()
    except ConfigError:
        return False
    return True


needs_wall = pytest.mark.skipif(not stands(), reason="no sandbox works on this machine")


FUNCTION = "def f(x):\n    return x\n"
EXTRACTED = {
    "the last block of Python": ("Here:\n```python\nx = 1\n```\nand\n```py\nx = 2\n```\n", "x = 2\n"),
    "a block without a label": ("```\nx = 1\n```", "x = 1\n"),
    "another language behind it": ("```python\nx = 1\n```\n```bash\nls\n```", "x = 1\n"),
    "an answer": ("so <answer>x = 1</answer>", "x = 1"),
    "nothing around it": ("x = 1", "x = 1"),
    "an answer that is not closed": ("<answer>x = 1", "<answer>x = 1"),
    "a fence that is not closed": (f"So:\n```python\n{FUNCTION}", FUNCTION + "\n"),
    "not closed and without a label": (f"So:\n```\n{FUNCTION}", FUNCTION + "\n"),
    "not closed, and another block": ("```python\nx = 1\n\nBetter:\n```python\nx = 2\n```", "x = 2\n"),
    "a second fence that holds nothing": ("```python\nx = 1\n```\n```python", "x = 1\n"),
    "closed on the last line": ("```python\ndef f(x):\n    return x```\nThat is it.", FUNCTION),
    "indented in a list": ("1. First:\n\n   ```python\n   def f(x):\n       return x\n   ```\n2. Then", FUNCTION),
    "behind an item's mark": ("- ```python\n  def f(x):\n      return x\n  ```", FUNCTION),
    "indented by tabs": ("\t```python\n\tdef f(x):\n\t    return x\n\t```", FUNCTION),
    "in an answer": (f"<answer>\n```python\n{FUNCTION}```\n</answer>", FUNCTION),
    "in an answer, on its line": (f"<answer>```python\n{FUNCTION}```</answer>", FUNCTION),
    "in an answer, not closed": (f"<answer>```python\n{FUNCTION}</answer>", FUNCTION + "\n"),
    "in an answer that is not closed": (f"<answer>```python\n{FUNCTION}```\n", FUNCTION),
    "in an answer, before a block that is none": (
        f"<answer>```python\n{FUNCTION}```</answer>\n```python\nf(1)\n```",
        FUNCTION,
    ),
    "an output without a label behind it": (f"```python\n{FUNCTION}```\nOutput:\n```\n3\n```", FUNCTION),
    "all without a label": (f"```\n{FUNCTION}```\nOutput:\n```\n[1, 2]\n```", FUNCTION),
    "an output that is no Python": (f"```\n{FUNCTION}```\nOutput:\n```\n1 2 3\n```", FUNCTION),
    "the end of a block that the prompt began": ("    return x\n```\nThis returns x.", "    return x\n"),
    "labels with more than a name": ("``` Python title=f.py\nx = 1\n```", "x = 1\n"),
    "pandoc's labels": ("```{.python}\nx = 1\n```", "x = 1\n"),
    "tildes": ("~~~python\nx = 1\n~~~", "x = 1\n"),
    "four backticks around three": ('````python\nx = """\n```\n"""\n````', 'x = """\n```\n"""\n'),
    "lines as Windows ends them": ("```python\r\nx = 1\r\ny = 2\r\n```\r\n", "x = 1\ny = 2\n"),
    "an indented fence keeps what is deeper": ("  ```python\n  if x:\n      y = 1\n  ```", "if x:\n    y = 1\n"),
}


@pytest.mark.parametrize("name", EXTRACTED)
def test_extract_program(name):
    completion, program = EXTRACTED[name]
    assert extract_program(completion) == program


@pytest.mark.parametrize(
    ("row", "tests"),
    [
        (
            {"test_list": ["assert f(1)"], "test_setup_code": "x = 1", "test_imports": ["import math"]},
            FunctionTests(("assert f(1)",), "import math\nx = 1"),
        ),
        ({"test_list": ["assert f(1)"]}, FunctionTests(("assert f(1)",), "")),
        ({"tests": ["assert f(1)", "assert f(2)"]}, FunctionTests(("assert f(1)", "assert f(2)"))),
        ({"tests": "assert f(1)\nassert f(2)"}, FunctionTests(("assert f(1)\nassert f(2)",))),
        ({"tests": [{"input": "1", "output": "2"}]}, StdioTests((("1", "2"),))),
        ({"inputs": ["1"], "outputs": ["2"]}, StdioTests((("1", "2"),))),
        ({"tests": '[{"input": "1", "output": "2"}]'}, StdioTests((("1", "2"),))),
        ({"input_output": json.dumps({"inputs": ["1"], "outputs": ["2"]})}, StdioTests((("1", "2"),), imports=True)),
        ({"input_output": {"inputs": [["1", "2"]], "outputs": [["3"]]}}, StdioTests((("1\n2", "3"),), imports=True)),
        ({"public_test_cases": json.dumps([CASE]), "metadata": "{}"}, StdioTests((("1", "2"),), imports=True)),
        (
            {"public_test_cases": [CASE], "private_test_cases": packed([CASE])},
            StdioTests((("1", "2"),) * 2, imports=True),
        ),
        ({"tests": None}, None),
        ({"test_list": []}, None),
        ({"input_output": None, "inputs": None}, None),
        ({"public_test_cases": "[]", "private_test_cases": None}, None),
    ],
)
def test_tests_are_built_from_dataset_rows(row, tests):
    assert build_tests("", row) == tests


def test_humaneval_prompt_is_setup_that_programs_cannot_replace():
    tests = build_tests(ADD, HUMANEVAL)
    assert tests == FunctionTests((f"{CHECK}\n\ncheck(add)",), setup=ADD, entry="add")
    assert complete_program(ADD, "    return a + b\n", tests) == ADD + "    return a + b\n"
    assert (
        complete_program(ADD, "```python\ndef add(a, b):\n    return a + b\n```", tests)
        == f"{ADD}\ndef add(a, b):\n    return a + b\n"  # whose imports and helpers it may use
    )
    chat = [{"role": "user", "content": f"Complete this:\n```python\n{ADD}```\n"}]
    assert extract_prompt_code(chat) == ADD
    assert extract_prompt_code([{"role": "user", "content": "Write a function that adds."}]) == ""


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"answer": "5"}, "needs tests in the task's rows: .*they have answer"),
        ({"tests": [{"input": "1"}]}, "a test without 'output'"),
        ({"inputs": ["1"], "outputs": []}, "1 inputs and 0 outputs"),
        ({"input_output": "{"}, "is not JSON"),
        ({"input_output": {"inputs": [[1]], "outputs": [], "fn_name": "f"}}, "one output for each input"),
        ({"input_output": {"inputs": [[1]], "outputs": [1], "fn_name": "f("}}, "which is not the name of a function"),
        ({"input_output": {"inputs": ["x"], "outputs": ["1"], "fn_name": "f"}}, "a row's test of f is not JSON"),
        ({"public_test_cases": [{**CASE, "testtype": "functional"}]}, "need `metadata` with 'func_name'"),
        ({"private_test_cases": "!"}, "neither JSON nor packed as LiveCodeBench does"),
        ({"private_test_cases": packed([CASE], by=pickle_of_more)}, "its pickle is more than one text"),
        ({"test": "def test_f(): pass", "entry_point": "f"}, r"defines no check\(candidate\)"),
        ({"tests": [1]}, "must be a list of texts"),
    ],
)
def test_unknown_row_formats_are_rejected(row, said):
    with pytest.raises(DataError, match=said):
        build_tests("", row)


def test_options():
    assert Code.from_options("timeout=20,memory=2GiB,share=yes") == Code(20.0, "2GiB", True)
    assert find_code("code:timeout=20") == ()
    for wrong, said in (
        ("time=1", "has no option 'time'; write code:timeout=…,memory=…,share=…,sandbox=…"),
        ("timeout=x", "timeout is a number"),
        ("timeout=0", "timeout must be above 0"),
        ("memory=none", "has to be limited"),
        ("share=maybe", "share is yes or no"),
    ):
        with pytest.raises(ConfigError, match=said):
            Code.from_options(wrong)


def test_refused_without_a_working_sandbox(monkeypatch):
    monkeypatch.setattr("policygrad.sandbox.backends.find_bwrap", lambda: None)
    monkeypatch.setattr("policygrad.sandbox.landlock.get_abi_version", lambda: 0)
    find_backend.cache_clear()
    try:
        for name in ("code", "code:timeout=3"):
            with pytest.raises(ConfigError, match="no sandbox works on this machine"):
                resolve_reward(name)
        with pytest.raises(ConfigError, match="no sandbox works on this machine"):
            RewardPool(["exact_match"], sandbox="auto")
    finally:
        find_backend.cache_clear()


HELPED = (
    "from typing import List\n\n\ndef encode(s: str) -> str:\n    return s[::-1]\n\n\n"
    'def decode(s: str) -> str:\n    """Undoes encode."""\n'
)
CYCLIC = "def check(candidate):\n    for s in ('ab', 'abc'):\n        assert candidate(encode(s)) == s\n"
LEETCODE = {"metadata": json.dumps({"func_name": "pairs"})}
TREE = "root = Node(1)\nroot.left = Node(2)\nroot.left.left = Node(3)"
DEPTH = "def depth(n):\n    return 0 if n is None else 1 + depth(n.left)\n"
NODE = "class Node:\n    def __init__(self, v):\n        self.v = v\n        self.left = self.right = None\n\n"
METHOD = "class Solution:\n    def pairs(self, nums: List[int], k: int) -> List[List[int]]:\n        "
FORMS = {  # of data sets: prompt, columns, a right program and a wrong one
    "HumanEval, a helper": (
        HELPED,
        {"test": CYCLIC, "entry_point": "decode"},
        "```python\ndef decode(s: str) -> str:\n    return encode(s)  # its own inverse\n```",
        "```python\ndef decode(s: List[str]) -> str:\n    return s\n```",
    ),
    "HumanEval, a body": (HELPED, {"test": CYCLIC, "entry_point": "decode"}, "return s[::-1]", "    return s"),
    "HumanEval, what comes from the future": (
        HELPED,
        {"test": CYCLIC, "entry_point": "decode"},
        "from __future__ import annotations\n\ndef decode(s: Unknown) -> str:\n    return s[::-1]\n",
        "from __future__ import annotations\n\ndef decode(s):\n    raise StopIteration\n",
    ),
    "MBPP, a setup with the program's class": (
        "Write a function to find the depth of a tree.",
        {"test_list": ["assert depth(root) == 3", "assert depth(root.left) == 2"], "test_setup_code": TREE},
        NODE + DEPTH,
        NODE + "def depth(n):\n    return 3\n",
    ),
    "APPS, standard input": (
        "Sum.",
        {"input_output": json.dumps({"inputs": [["1", "2"], "3\n4\n"], "outputs": [["3.0"], "7\n"]})},
        "print(sum(map(int, sys.stdin.read().split())))",
        "print(3)",
    ),
    "APPS, a function": (
        "Pairs.",
        {"input_output": {"fn_name": "pairs", "inputs": [[[1, 2], 1], [[], 0]], "outputs": [[[[1, 2]]], [[]]]}},
        "def pairs(nums, k):\n    return [(a, b) for a, b in combinations(nums, 2)]\n",
        "def pairs(nums, k):\n    return []\n",
    ),
    "APPS, keys that were numbers": (
        "Count.",
        {"input_output": {"fn_name": "swap", "inputs": [[{"1": 2}]], "outputs": [{"2": 1}]}},
        "def swap(d):\n    return {v: k for k, v in d.items()}\n",
        "def swap(d):\n    return d\n",
    ),
    "LiveCodeBench, standard input": (
        "Double.",
        {
            "public_test_cases": [CASE],
            "private_test_cases": packed([{"input": "2\n", "output": "4\n", "testtype": "stdin"}]),
        },
        "print(int(input()) * 2)",
        "print(2)",
    ),
    "LiveCodeBench, a method": (
        "Pairs.",
        LEETCODE | {"public_test_cases": [{"input": "[1, 2]\n1", "output": "[[1, 2]]", "testtype": "functional"}]},
        f"```python\n{METHOD}return [(a, b) for a, b in combinations(nums, 2) if b - a == k]\n```",
        f"```python\n{METHOD}return [1, 2]\n```",
    ),
}


@needs_wall
@pytest.mark.parametrize("name", FORMS)
def test_programs_are_scored_in_every_dataset_format(name):
    prompt, row, right, wrong = FORMS[name]
    assert [Code().score(prompt, program, row) for program in (right, wrong)] == [1.0, 0.0]


@needs_wall
@pytest.mark.parametrize(
    ("row", "said"),
    [
        (
            {"task_id": 7, "tests": ["import nothing_like_it\nassert f(1)"]},
            "row task_id=7: no .* cannot import nothing_like_it",
        ),
        ({"tests": ["assert f(1"]}, "the row with the prompt 'Write f.': no program .* setup raised SyntaxError"),
        (
            {"tests": ["class Own: pass\nassert f(Own())"]},
            "tests can pass plain data and functions to a program, not Own",
        ),
        ({"test_list": ["assert f(1)"], "test_setup_code": "1 / 0"}, "the tests' setup raised ZeroDivisionError"),
    ],
)
def test_a_row_that_no_program_can_pass_is_named(row, said):
    with pytest.raises(DataError, match=said):
        Code().score("Write f.", "def f(x): return x", row)


@needs_wall
@pytest.mark.parametrize(
    "program",
    [
        "def f(x): raise ImportError('nothing')",
        "f = 5",
        "def g(x): return x",
        "def f(g):\n    import os\n    return g(os)",
        "def f(g): return g(eval)",
    ],
)
def test_a_wrong_program_does_not_mark_its_row_unfit(program):
    row = {"tests": ["assert f(lambda x: x) == 1"]}
    assert Code().score("Write f.", program, row) == 0.0


@needs_wall
def test_unfit_rows_are_counted_and_named_once():
    rows = {"tests": [["assert f(1"], ["assert f(1"], ["assert f(2"], ["assert f(1) == 1"]], "id": [1, 1, 2, 3]}
    with RewardPool(["code"], num_workers=1) as pool:
        scores = pool.score([""] * 4, [FUNCTION] * 4, rows)
    assert scores.total == [None, None, None, 1.0]
    assert scores.failures == {"row": 3}
    assert [message.partition(": ")[2][:8] for message in scores.messages] == ["row id=1", "row id=2"]


@needs_wall
def test_without_share_tests_stop_at_the_first_failure(monkeypatch):
    dialogue = StdioTests((("1", "1"), ("2", "4"), ("3", "3")))
    assert run_stdio_tests("print(input())", dialogue).points == (1.0, 0.0, 1.0)
    assert run_stdio_tests("print(input())", dialogue, to_end=False).points == (1.0, 0.0, 0.0)
    tests = FunctionTests(("assert f(1) == 1", "assert f(2) == 4", "assert f(3) == 3"))
    assert run_function_tests(FUNCTION, tests).points == (1.0, 0.0, 1.0)
    assert run_function_tests(FUNCTION, tests, to_end=False).points == (1.0, 0.0, 0.0)


@needs_wall
def test_programs_run_in_reward_workers():
    """HumanEval's form, MBPP's and pairs; a row without tests has no reward, and no forged one is paid."""
    completions = ["    return a + b\n", "    return 3\n", "    import os\n    os._exit(0)\n", "    return a + b\n"]
    with RewardPool(["code"], num_workers=2) as pool:
        rows = {"test": [CHECK, CHECK, CHECK, None], "entry_point": ["add"] * 4}
        assert pool.score([ADD] * 4, completions, rows).total == [1.0, 0.0, 0.0, None]
        doubles = ["print(int(input()) * 2)", "print(2)", "print('2', end='')\nimport os\nos._exit(1)"]
        rows = {"inputs": [["1", "2"]] * 3, "outputs": [["2", "4"]] * 3}
        assert pool.score([""] * 3, doubles, rows).total == [1.0, 0.0, 0.0]
    with RewardPool(["code:share=yes"], num_workers=1) as pool:
        rows = {"test_list": [["assert f(2) == 4", "assert f(3) == 5"]]}
        assert pool.score([""], ["def f(x):\n    return x + x"], rows).total == [0.5]
