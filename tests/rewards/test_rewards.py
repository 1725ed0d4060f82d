"""Built-in rewards on hand-made cases and on real solutions, and how names become rewards."""

import re
import subprocess
import sys
from importlib.util import find_spec

import pytest

from policygrad.errors import ConfigError, DataError
from policygrad.rewards.base import Reward, reward
from policygrad.rewards.builtin import Format, exact_match, extract_final_answer, reasoning_gym, reasoning_gym_partial
from policygrad.rewards.math import math
from policygrad.rewards.resolve import list_rewards, resolve_reward
from policygrad.rewards.workers.messages import to_number
from policygrad.rewards.workers.signature import Signature
from policygrad.rewards.workers.worker import RewardCaller


def one(function, completion, **columns):
    (score,) = function([""], [completion], **{name: [value] for name, value in columns.items()})
    return score


@pytest.mark.parametrize(
    ("completion", "answer", "score"),
    [
        ("42", "42", 1.0),
        ("  42\n", " 42 ", 1.0),
        ("the answer is 42", "42", 0.0),
        ("thinking... <answer> 42 </answer> done", "42", 1.0),
        ("<answer>41</answer> no, <answer>42</answer>", "42", 1.0),
        ("<answer>42</answer> no, <answer>41</answer>", "42", 0.0),
        ("<answer>4\n2</answer>", "4\n2", 1.0),
        ("42 <answer>", "42", 0.0),
        ("42", 42, 1.0),
        ("", "", 1.0),
        ("x", None, None),
    ],
)
def test_exact_match(completion, answer, score):
    assert one(exact_match, completion, answer=answer) == score


def test_final_answer_of_an_unclosed_tag_is_the_whole_completion():
    assert extract_final_answer(" <answer>4 ") == "<answer>4"


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ("<answer>4</answer>", 1.0),
        ("think\n<answer>\n4\n</answer>\n", 1.0),
        ("4", 0.0),
        ("<answer>4</answer><answer>4</answer>", 0.0),
        ("<answer>4", 0.0),
        ("</answer>4<answer>", 0.0),
        ("<answer><answer>4</answer>", 0.0),
    ],
)
def test_default_format_is_exactly_one_answer(completion, score):
    assert one(resolve_reward("format").function, completion) == score


def test_format_searches_across_lines():
    assert one(Format(r"a.b"), "xx a\nb yy") == 1.0
    assert one(Format(r"\Aa.b\Z"), "xx a\nb yy") == 0.0
    with pytest.raises(ConfigError, match=r"'\(' is not a regular expression"):
        resolve_reward("format:(")


@pytest.mark.parametrize(
    ("completion", "answer", "score"),
    [
        ("So the total is 72.", "Natalia sold 48/2 = 24.\n48+24 = 72\n#### 72", 1.0),
        ("So the total is 71.", "Natalia sold 48/2 = 24.\n48+24 = 72\n#### 72", 0.0),
        ("He pays $1,234.00", "#### 1,234", 1.0),
        ("steps\n#### 1234", "#### 1,234", 1.0),
        (r"Hence $\boxed{\frac{1}{2}}$ and not 3", r"\frac12", 1.0),
        (r"\frac{1}{2}", "0.5", 1.0),
        (r"<answer>\frac{1}{2}</answer>", r"\frac{1}{2}", 1.0),
        (r"I say 7. <answer>\sqrt{2}</answer>", "7", 0.0),
        (r"The answer is $\left(3, \frac{\pi}{2}\right)$.", r"\left( 3, \frac{\pi}{2} \right)", 1.0),
        ("<answer>q - p</answer>", "p - q", 0.0),
        ("<answer>-q + p</answer>", "p - q", 1.0),
        ("no idea", "5", 0.0),
        ("", "5", 0.0),
        (r"$\boxed{\frac{1}{$", "5", 0.0),
        ("5", None, None),
        ("5", "", None),
        ("5", 5, 1.0),
    ],
)
def test_math(completion, answer, score):
    assert one(math, completion, answer=answer) == score


def test_reasoning_gym_strict_and_partial():
    from reasoning_gym import create_dataset

    entry = create_dataset("countdown", seed=1, size=1)[0]
    columns = {"dataset": "countdown", "entry": entry}
    for text in (entry["answer"], f"so <answer> {entry['answer']} </answer>!"):
        assert one(reasoning_gym, text, **columns) == 1.0
        assert one(reasoning_gym_partial, text, **columns) == 1.0
    assert one(reasoning_gym, "1 + 1", **columns) == 0.0
    assert 0.0 < one(reasoning_gym_partial, "1 + 1", **columns) < 1.0


def test_an_answer_that_reasoning_gym_cannot_read_scores_zero():
    from reasoning_gym import create_dataset

    entry = create_dataset("prime_factorization", seed=1, size=1)[0]
    assert one(reasoning_gym, "zzz", dataset="prime_factorization", entry=entry) == 0.0
    exploding = {"question": "?", "answer": "zzz", "metadata": {}}
    with pytest.raises((ValueError, KeyError)):
        one(reasoning_gym, "zzz", dataset="prime_factorization", entry=exploding)
    with pytest.raises(DataError, match="'nope', which is not a reasoning-gym dataset"):
        one(reasoning_gym, "1", dataset="nope", entry=entry)


def test_built_in_rewards_resolve():
    assert list_rewards() == [
        "choice",
        "code",
        "exact_match",
        "format",
        "gsm8k",
        "ifeval",
        "judge:",
        "length_penalty:",
        "math",
        "model:",
        "openrlhf:",
        "reasoning_gym",
        "reasoning_gym_partial",
        "repetition_penalty",
        "trl:",
        "verl:",
        "worked_steps",
    ]
    for name in (name for name in list_rewards() if not name.endswith(":")):
        if name == "ifeval" and find_spec("langdetect") is None:  # which it needs: see test_instructions.py
            continue
        assert resolve_reward(name).name == name
        assert resolve_reward(name).weight == 1.0


def test_an_unknown_reward_is_answered_with_a_similar_one_of_any_kind():
    near = {
        "juge:rubric.md,model=m": "judge:",
        "model-1": "model:",
        "verll:mine.py": "verl:",
        "verll:mine.py:f": "verl:",
    }
    for name, meant in (near | {"mth": "math", "mathh:boxed": "math", "openrlhff:a.py": "openrlhf:"}).items():
        with pytest.raises(ConfigError, match=f"unknown reward '{re.escape(name)}': did you mean '{meant}'"):
            resolve_reward(name)
    for name in (name for name in list_rewards() if name.endswith(":")):
        for written in (name, name[:-1]):
            with pytest.raises(ConfigError, match=f"reward '{name[:-1]}"):
                resolve_reward(written)


@pytest.mark.parametrize(
    ("text", "name", "weight"),
    [
        ("math*0.5", "math", 0.5),
        ("0.5*math", "math", 0.5),
        (" math * -2 ", "math", -2.0),
        ("math*1e-3", "math", 1e-3),
        (r"format:\d*2", r"format:\d", 2.0),
        (r"0.25*format:a*", "format:a*", 0.25),
    ],
)
def test_weights_in_names(text, name, weight):
    assert (resolve_reward(text).name, resolve_reward(text).weight) == (name, weight)


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("exact_mach", ConfigError, "did you mean 'exact_match'.*file.py:function"),
        ("zzzzz", ConfigError, "the built-in ones are choice, code, exact_match"),
        ("no_such_package.f", ConfigError, "no module 'no_such_package'"),
        ("json.no_such_module.f", ConfigError, "no module 'json.no_such_module'"),
        ("json.dump_s", ConfigError, "no function 'dump_s' in json; did you mean 'dumps'"),
        ("json.decoder.NaN", ConfigError, "'NaN' in json.decoder is float, not a function"),
        ("no/such/file.py:f", ConfigError, "no file .*no/such/file.py"),
        (3, ConfigError, "a name or a function, got int"),
    ],
)
def test_bad_names_suggest_a_remedy(name, error, message):
    with pytest.raises(error, match=message):
        resolve_reward(name)


def test_dotted_path_and_function_and_reward_are_accepted():
    assert resolve_reward("policygrad.rewards.builtin.exact_match*2").function is exact_match
    assert resolve_reward(exact_match).name == "exact_match"
    mine = Reward("mine", exact_match, 3.0)
    assert resolve_reward(mine) is mine


def test_functions_of_a_file_and_of_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "beside_me.py").write_text("VALUE = 0.25\n")
    (tmp_path / "my_rewards.py").write_text(
        "from beside_me import VALUE\n"
        "from policygrad.rewards.base import reward\n"
        "@reward(batch=True, timeout=7)\n"
        "def mine(prompts, completions, **_):\n    return [VALUE for _ in completions]\n"
    )
    (tmp_path / "exploding.py").write_text("1 / 0\n")
    (tmp_path / "needs.py").write_text("import a_missing_dependency\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    result = resolve_reward(f"{tmp_path}/my_rewards.py:mine*2")
    assert (result.weight, result.batched, result.timeout) == (2.0, True, 7)
    assert result.function(["a"], ["b"]) == [0.25]
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p != str(tmp_path)])
    monkeypatch.chdir(tmp_path)
    assert resolve_reward("my_rewards.mine").function(["a"], ["b"]) == [0.25]
    with pytest.raises(ConfigError, match=r"exploding\.py raised ZeroDivisionError"):
        resolve_reward("exploding.py:f")
    with pytest.raises(ConfigError, match=r"importing .*exploding.py raised ZeroDivisionError"):
        resolve_reward("exploding.f")
    with pytest.raises(ConfigError, match="needs needs the module 'a_missing_dependency'"):
        resolve_reward("needs.f")
    with pytest.raises(ConfigError, match=r"no function 'mine2' in .*my_rewards.py; did you mean 'mine'"):
        resolve_reward("my_rewards.py:mine2")


def test_decorator_options_reach_the_reward():
    @reward(batch=True, timeout=2.5)
    def mine(prompts, completions, **_):
        return [0.0] * len(completions)

    assert (resolve_reward(mine).batched, resolve_reward(mine).timeout) == (True, 2.5)


@pytest.mark.parametrize(
    "options", [{"weight": float("nan")}, {"weight": float("inf")}, {"timeout": 0.0}, {"timeout": -1}]
)
def test_invalid_rewards_are_rejected(options):
    with pytest.raises(ConfigError, match="reward 'mine'"):
        Reward("mine", exact_match, **options)


def test_to_number():
    import numpy as np

    class Tensorish:
        def item(self):
            return 0.5

    good = [True, 1, 0.5, np.float32(0.5), np.int64(2), np.bool_(True), np.array(0.5), np.array([0.5]), Tensorish()]
    assert [to_number(v) for v in good] == [(float(x), None) for x in (1, 1, 0.5, 0.5, 2, 1, 0.5, 0.5, 0.5)]
    bad = {"nan": [float("nan"), np.float64("nan")], "inf": [float("-inf"), 10**400], "type": ["1", b"1", 1j, [1], {}]}
    for reason, values in bad.items():
        assert [to_number(v) for v in values] == [(None, reason)] * len(values)
    assert to_number(np.zeros(3)) == (None, "type")
    assert to_number(None) == (None, None)


def test_functions_get_only_the_columns_they_name():
    columns = {"answer": ["a"], "level": [3]}
    seen = []
    functions = [
        lambda prompts, completions, **rest: seen.append((prompts, completions, rest)),
        lambda p, c, **rest: seen.append((p, c, rest)),
        lambda completions, **rest: seen.append((rest.pop("prompts"), completions, rest)),
        lambda **everything: seen.append((everything.pop("prompts"), everything.pop("completions"), everything)),
    ]
    for function in functions:
        Signature.from_function(function).call(function, (["p"], ["c"], columns))
    assert seen == [(["p"], ["c"], columns)] * 4
    seen.clear()
    for function in (lambda completions, answer: seen.append(answer), lambda p, c, answer: seen.append(answer)):
        assert Signature.from_function(function).required == {"answer"}
        Signature.from_function(function).call(function, (["p"], ["c"], columns))
    assert seen == [["a"], ["a"]]


def test_async_functions_work_inside_a_running_loop():
    import asyncio

    async def judge(prompts, completions, **_):
        await asyncio.sleep(0)
        return [1.0]

    async def notebook_cell():
        return RewardCaller("judge", judge)(["p"], ["c"], {})

    (outcome,) = asyncio.run(notebook_cell())
    assert outcome.value == 1.0


def test_importing_rewards_and_tasks_stays_light():
    code = (
        "import sys, policygrad.rewards.workers.worker; assert 'tyro' not in sys.modules; "
        "import policygrad.rewards, policygrad.tasks; "
        "print(sorted({'torch', 'transformers', 'numpy', 'sympy', 'math_verify', 'reasoning_gym'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
