"""The reward `code`: rows as data sets have them, the program in a completion, options, and the way through the workers."""

import json

import pytest

from policygrad.errors import ConfigError, DataError
from policygrad.rewards import RewardPool, resolve
from policygrad.rewards.code import Code
from policygrad.rewards.code_rows import code_in, exam_of, program_in, whole_program
from policygrad.rewards.resolve import codes_of
from policygrad.sandbox import Dialogue, Examination, standing

ADD = 'def add(a: int, b: int) -> int:\n    """Add.\n    >>> add(1, 2)\n    3\n    """\n'
CHECK = (
    "\n\nMETADATA = {}\n\n\ndef check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(-1, 2) == 1\n"
)
HUMANEVAL = {"test": CHECK, "entry_point": "add"}


def stands():
    try:
        standing()
    except ConfigError:
        return False
    return True


needs_wall = pytest.mark.skipif(not stands(), reason="no wall stands on this machine")


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        ("Here:\n```python\nx = 1\n```\nand\n```py\nx = 2\n```\n", "x = 2\n"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("```python\nx = 1\n```\n```bash\nls\n```", "x = 1\n"),
        ("so <answer>x = 1</answer>", "x = 1"),
        ("x = 1", "x = 1"),
        ("<answer>x = 1", "<answer>x = 1"),
    ],
)
def test_the_program_in_a_completion(completion, program):
    assert program_in(completion) == program


@pytest.mark.parametrize(
    ("row", "tests"),
    [
        (
            {"test_list": ["assert f(1)"], "test_setup_code": "x = 1", "test_imports": ["import math"]},
            Examination(("assert f(1)",), "import math\nx = 1"),
        ),
        ({"test_list": ["assert f(1)"]}, Examination(("assert f(1)",), "")),
        ({"tests": ["assert f(1)", "assert f(2)"]}, Examination(("assert f(1)", "assert f(2)"))),
        ({"tests": "assert f(1)\nassert f(2)"}, Examination(("assert f(1)\nassert f(2)",))),
        ({"tests": [{"input": "1", "output": "2"}]}, Dialogue((("1", "2"),))),
        ({"inputs": ["1"], "outputs": ["2"]}, Dialogue((("1", "2"),))),
        ({"input_output": json.dumps({"inputs": ["1"], "outputs": ["2"]})}, Dialogue((("1", "2"),))),
        ({"tests": None}, None),
        ({"test_list": []}, None),
        ({"input_output": None, "inputs": None}, None),
    ],
)
def test_rows_of_data_sets(row, tests):
    assert exam_of("", row) == tests


def test_a_row_of_humaneval_has_its_prompt_as_what_a_program_cannot_replace():
    tests = exam_of(ADD, HUMANEVAL)
    assert tests == Examination((f"{CHECK}\n\ncheck(add)",), setup=ADD, entry="add")
    assert whole_program(ADD, "    return a + b\n", tests) == ADD + "    return a + b\n"
    assert (
        whole_program(ADD, "```python\ndef add(a, b):\n    return a + b\n```", tests)
        == "def add(a, b):\n    return a + b\n"
    )
    chat = [{"role": "user", "content": f"Complete this:\n```python\n{ADD}```\n"}]
    assert code_in(chat) == ADD
    assert code_in([{"role": "user", "content": "Write a function that adds."}]) == ""


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"answer": "5"}, "needs tests in the task's rows: .*they have answer"),
        ({"tests": [{"input": "1"}]}, "a test without 'output'"),
        ({"inputs": ["1"], "outputs": []}, "1 inputs and 0 outputs"),
        ({"input_output": "{"}, "is no JSON"),
        ({"input_output": {"inputs": [], "outputs": [], "fn_name": "f"}}, "fn_name is not known"),
        ({"tests": [1]}, "are a list of texts"),
    ],
)
def test_rows_of_no_known_form(row, said):
    with pytest.raises(DataError, match=said):
        exam_of("", row)


def test_options_by_name():
    assert Code.of("seconds=20,memory=2GiB,share=yes") == Code(20.0, "2GiB", True)
    assert codes_of("code:seconds=20") == ()
    for wrong, said in (
        ("time=1", "there is no option 'time'; write code:seconds=…,memory=…,share=…,wall=…"),
        ("seconds=x", "seconds is a number"),
        ("seconds=0", "seconds must be above 0"),
        ("memory=none", "has to be limited"),
        ("share=maybe", "share is yes or no"),
    ):
        with pytest.raises(ConfigError, match=said):
            Code.of(wrong)


def test_it_is_refused_where_no_wall_stands(monkeypatch):
    monkeypatch.setattr("policygrad.sandbox.bubblewrap.program", lambda: None)
    monkeypatch.setattr("policygrad.sandbox.landlock.version", lambda: 0)
    standing.cache_clear()
    try:
        for name in ("code", "code:seconds=3"):
            with pytest.raises(ConfigError, match="cannot be kept apart from this machine"):
                resolve(name)
        with pytest.raises(ConfigError, match="cannot be kept apart from this machine"):
            RewardPool(["exact_match"], sandbox="auto")
    finally:
        standing.cache_clear()


@needs_wall
def test_programs_through_the_workers():
    """HumanEval's form, MBPP's and pairs; a row without tests has no reward, and no forged one is paid."""
    completions = ["    return a + b\n", "    return 3\n", "    import os\n    os._exit(0)\n", "    return a + b\n"]
    with RewardPool(["code"], workers=2) as pool:
        rows = {"test": [CHECK, CHECK, CHECK, None], "entry_point": ["add"] * 4}
        assert pool.score([ADD] * 4, completions, rows).total == [1.0, 0.0, 0.0, None]
        doubles = ["print(int(input()) * 2)", "print(2)", "print('2', end='')\nimport os\nos._exit(1)"]
        rows = {"inputs": [["1", "2"]] * 3, "outputs": [["2", "4"]] * 3}
        assert pool.score([""] * 3, doubles, rows).total == [1.0, 0.0, 0.0]
    with RewardPool(["code:share=yes"], workers=1) as pool:
        rows = {"test_list": [["assert f(2) == 4", "assert f(3) == 5"]]}
        assert pool.score([""], ["def f(x):\n    return x + x"], rows).total == [0.5]
