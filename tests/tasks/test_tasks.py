"""Tasks: pure functions of (seed, index), evaluation prompts disjoint from training, and error messages with a location."""

import json
import os
import pickle
import random
import subprocess
import sys

import pytest
import reasoning_gym
from hypothesis import given
from hypothesis import strategies as st

from doubles.files import read_examples, write_rows
from policygrad.errors import DataError
from policygrad.tasks import list_tasks, load_task
from policygrad.tasks.base import Example, is_eval_prompt, prompt_key
from policygrad.tasks.reasoning_gym import PAGE_SIZE, ReasoningGymTask
from policygrad.tasks.sources import parse_components


def question(example):
    return example.columns["entry"]["question"]


@pytest.mark.parametrize(
    "name", ["embedded", "gcd+2*chain_sum:max_digits=2", "list_functions", "gsm_symbolic", "pool_matrix"]
)
def test_training_is_a_pure_function_of_seed_and_index(name):
    first, second, other = load_task(name, seed=3), load_task(name, seed=3), load_task(name, seed=4)
    indices = [*range(12), 100_000]
    forward = {i: first.train_example(i) for i in indices}
    backward = {i: second.train_example(i) for i in reversed(indices)}
    assert forward == backward
    assert [other.train_example(i).prompt for i in indices] != [forward[i].prompt for i in indices]
    assert pickle.loads(pickle.dumps(forward)) == forward


@pytest.mark.parametrize("name", ["chain_sum", "spell_backward", "gsm_symbolic", "manipulate_matrix", "figlet_font"])
def test_a_page_equals_a_dataset_created_with_its_seed(name):
    """Most pages are copies of a template; for some datasets more than the seed attribute depends on the seed."""
    task = ReasoningGymTask(name, parse_components(name))
    copied = task._create_page(0, base=12345, page=3)
    assert (task._templates[0] is None) is (name in ("gsm_symbolic", "manipulate_matrix"))
    made = reasoning_gym.create_dataset(name, seed=12345 + 3 * PAGE_SIZE, size=PAGE_SIZE)
    for place in (0, 7, 700):
        random.seed(0)
        expected = made[place]
        random.seed(0)
        assert copied[place] == expected


@pytest.mark.parametrize("name", ["embedded", "gcd", "basic_arithmetic+spell_backward"])
def test_eval_problems_are_fixed_distinct_and_never_trained_on(name):
    task = load_task(name, seed=1)
    held_out = task.eval_examples(24)
    assert len({question(e) for e in held_out}) == 24
    assert all(is_eval_prompt(question(e)) for e in held_out)
    assert not any(is_eval_prompt(question(task.train_example(i))) for i in range(300))
    assert load_task(name, seed=2).eval_examples(8) == held_out[:8]
    assert not task.eval_on_train


@pytest.mark.full
def test_another_process_generates_the_same_examples():
    code = "from policygrad.tasks import load_task; t = load_task('embedded', seed=5); "
    code += "print([t.train_example(7), t.eval_examples(3)])"
    task = load_task("embedded", seed=5)
    env = {**os.environ, "PYTHONHASHSEED": "12345"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.stdout == f"{[task.train_example(7), task.eval_examples(3)]}\n"
    assert done.stderr == ""


def test_examples_have_the_columns_of_the_reward():
    task = load_task("chain_sum:min_terms=2,max_terms=2")
    example = task.train_example(0)
    assert example.prompt == question(example) + "\n"
    assert set(example.columns) == {"dataset", "entry", "answer", "demonstration"}
    assert example.columns["dataset"] == "chain_sum"
    assert example.columns["answer"] == example.columns["entry"]["answer"]
    assert task.rewards == ("reasoning_gym",)


def test_a_mix_follows_its_weights():
    task = load_task("gcd+3*lcm")
    names = [task.train_example(i).columns["dataset"] for i in range(400)]
    assert 70 <= names.count("gcd") <= 130


def test_the_global_random_state_is_unchanged():
    import numpy as np

    random.seed(1)
    np.random.seed(1)
    before = random.getstate(), np.random.get_state()[1].tolist()
    load_task("pool_matrix+list_functions").train_example(5)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


def test_too_few_problems_are_reported():
    task = load_task("chain_sum:min_terms=2,max_terms=2,min_digits=1,max_digits=1")
    with pytest.raises(DataError, match=r"'chain_sum' .*1000 requested, \d+ found"):
        task.eval_examples(1000)


def test_datasets_that_depend_on_the_hash_seed_warn(monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    load_task("ransom_note")
    monkeypatch.delenv("PYTHONHASHSEED")
    with pytest.warns(UserWarning, match="'ransom_note': .* set PYTHONHASHSEED=0"):
        load_task("ransom_note")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gdc", r"unknown task 'gdc': did you mean gcd.*ending in \.jsonl"),
        ("qqqqqqq", r"unknown task 'qqqqqqq': .*list_tasks\(\)"),
        ("chain_sum:min_term=2", "no setting 'min_term'; did you mean 'min_terms'"),
        ("chain_sum:min_terms=5,max_terms=2", "'chain_sum': bad settings .*max_terms must be >= min_terms"),
        ("chain_sum:min_terms=many", "'chain_sum': bad settings"),
        ("chain_sum:seed=3", "'seed' is not a setting of the task"),
        ("chain_sum:min_terms", "'min_terms' is not key=value"),
        ("gcd+", "a dataset's name is missing"),
        ("", "a dataset's name is missing"),
        ("0*gcd", "the weight 0 must be positive"),
        ("composite", "join datasets with '\\+'"),
        ("embedded+gcd", "'embedded' is a fixed mix"),
    ],
)
def test_invalid_names_are_refused_with_a_hint(name, message):
    with pytest.raises(DataError, match=message):
        load_task(name)


def test_eval_data_needs_a_task_made_of_data():
    with pytest.raises(DataError, match=r"eval_data='x\.jsonl' needs a task made of data"):
        load_task("gcd", eval_data="x.jsonl")


def test_list_tasks():
    names = list_tasks()
    assert {"embedded", "embedded_steps", "gcd", "chain_sum"} <= set(names)
    assert names == sorted(names)
    assert "composite" not in names


def test_parsing_of_a_mix():
    parts = parse_components("a:x=[1, 2],y='p+q,r',z=true + 1.5*b:w=1e+3,v=word+c")
    assert [(c.name, c.weight, c.config) for c in parts] == [
        ("a", 1.0, {"x": [1, 2], "y": "p+q,r", "z": True}),
        ("b", 1.5, {"w": 1000.0, "v": "word"}),
        ("c", 1.0, {}),
    ]


# JSONL


def test_jsonl_epochs_are_permutations_disjoint_from_evaluation(tmp_path):
    rows = [{"prompt": f"question {i}", "answer": i} for i in range(200)]
    path = write_rows(tmp_path / "data.jsonl", rows)
    task, same, other = load_task(path, seed=1), load_task(path, seed=1), load_task(path, seed=2)
    held_out = task.eval_examples(1000)
    size = 200 - len(held_out)
    epochs = [[task.train_example(e * size + i) for i in range(size)] for e in range(3)]
    answers = [[example.columns["answer"] for example in epoch] for epoch in epochs]
    assert answers[0] != answers[1] != answers[2]
    kept = sorted(set(range(200)) - {e.columns["answer"] for e in held_out})
    assert [sorted(a) for a in answers] == [kept] * 3
    assert 0 < len(held_out) < 40
    assert all(is_eval_prompt(e.prompt) for e in held_out)
    assert same.train_example(2 * size + 5) == epochs[2][5]
    assert [other.train_example(i).columns["answer"] for i in range(size)] != answers[0]
    assert other.eval_examples(3) == held_out[:3]
    assert task.rewards == ()
    assert not task.eval_on_train


def test_all_rows_of_a_tiny_file_are_trained_and_evaluated(tmp_path):
    path = write_rows(tmp_path / "tiny.jsonl", [{"prompt": f"q{i}"} for i in range(20)])
    task = load_task(path)
    assert task.eval_on_train
    everything = {f"q{i}" for i in range(20)}
    assert {task.train_example(i).prompt for i in range(20)} == everything
    assert {e.prompt for e in task.eval_examples(100)} == everything
    assert load_task(write_rows(tmp_path / "same.jsonl", [{"prompt": "q"}] * 50)).eval_on_train


def test_eval_data_file(tmp_path):
    train = write_rows(tmp_path / "train.jsonl", [{"prompt": f"q{i}", "answer": i} for i in range(100)])
    clean = write_rows(tmp_path / "clean.jsonl", [{"prompt": f"r{i}", "answer": i} for i in range(5)])
    task = load_task(train, eval_data=clean)
    assert {task.train_example(i).prompt for i in range(100)} == {f"q{i}" for i in range(100)}
    assert {e.prompt for e in task.eval_examples(9)} == {f"r{i}" for i in range(5)}
    leaky = write_rows(tmp_path / "leaky.jsonl", [{"prompt": f"q{i}", "answer": i} for i in range(5)])
    with pytest.warns(UserWarning, match="5 of 100 rows left out of training"):
        task = load_task(train, eval_data=leaky)
    assert {task.train_example(i).prompt for i in range(95)} == {f"q{i}" for i in range(5, 100)}
    with pytest.raises(DataError, match=r"train\.jsonl: all prompts are evaluation prompts"):
        load_task(train, eval_data=train)
    odd = write_rows(tmp_path / "odd.jsonl", [{"prompt": "r", "solution": 1}])
    with pytest.raises(DataError, match=r"columns differ from those of .* in answer, solution"):
        load_task(train, eval_data=odd)


def test_chat_prompts(tmp_path):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
    (row,) = read_examples(write_rows(tmp_path / "chat.jsonl", [{"prompt": messages, "answer": "2"}]))
    assert row.prompt == tuple(messages)
    assert row.columns == {"answer": "2"}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", r":? no rows; write one JSON object per line"),
        (b"\n \n", "no rows"),
        (b'{"prompt": "a"}\n\n{"prompt": "b"\n', r"bad\.jsonl:3: not JSON at column 15: .* is the line cut off"),
        (b'["a"]\n', r"bad\.jsonl:1: every line must be a JSON object, got a list"),
        (b'[\n{"prompt": "a"}\n]\n', r"bad\.jsonl:1: a JSON array, not JSONL; .*jq"),
        (b'{"question": "a"}\n', r"bad\.jsonl:1: no column 'prompt' \(it has 'question'\)"),
        (b'{"prompt": 3}\n', r"bad\.jsonl:1: 'prompt' must be text or a list of chat messages, got int"),
        (b'{"prompt": ""}\n', r"bad\.jsonl:1: 'prompt' is empty"),
        (b'{"prompt": []}\n', r"bad\.jsonl:1: 'prompt' is empty"),
        (b'{"prompt": ["a"]}\n', r"bad\.jsonl:1: message 1 of 'prompt' must be an object"),
        (b'{"prompt": [{"role": "user"}]}\n', r"message 1 of 'prompt' must be an object"),
        (b'{"prompt": [{"role": "user", "content": 1}]}\n', r"message 1 of 'prompt': 'content' must be text, got int"),
        (b'{"prompt": "a"}\n{"prompt": "\xff"}\n', r"bad\.jsonl:2: byte 13 \(0xff\) is not UTF-8"),
        ('{"prompt": "a"}\n'.encode("utf-16"), r"bad\.jsonl:1: this is UTF-16 text; .*iconv"),
        (b'{"prompt": "\\ud800"}\n', r"bad\.jsonl:1: 'prompt' contains half a surrogate pair \(\\ud800\)"),
        (b'{"prompt": "a", "x": 1}\n{"prompt": "b"}\n', r"bad\.jsonl:2: no column 'x', which line 1 has; write null"),
        (b'\n{"prompt": "a"}\n{"prompt": "b", "x": 1}\n', r"bad\.jsonl:3: column 'x' is not in line 2"),
        (b'{"prompt": "a", "completions": 1}\n', r"bad\.jsonl:1: rename the column 'completions'"),
        (b'{"prompt": "a", "x": ' + b"9" * 5000 + b"}\n", r"bad\.jsonl:1: cannot be read as JSON"),
        (b"[" * 100_000 + b"\n", r"bad\.jsonl:1: cannot be read as JSON"),
    ],
)
def test_invalid_files_are_refused_with_location_and_remedy(tmp_path, data, message):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(data)
    with pytest.raises(DataError, match=message):
        load_task(str(path))


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(DataError, match=r"nowhere\.jsonl: no such file"):
        load_task(str(tmp_path / "nowhere.jsonl"))
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(DataError, match=r"folder\.jsonl: a folder without data files"):
        load_task(str(tmp_path / "folder.jsonl"))


def test_byte_order_mark_blank_lines_and_windows_lines_are_accepted(tmp_path):
    path = tmp_path / "data.txt"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n{"prompt": "b"}')
    assert [row.prompt for row in read_examples(str(path))] == ["a", "b"]
    assert load_task(str(path)).eval_on_train


text = st.text(st.characters(exclude_categories=["Cs"]))
message = st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant"]), "content": text})
value = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=5,
)


@given(st.data(), st.sets(text.filter(lambda name: name not in {"prompt", "prompts", "completions"}), max_size=3))
def test_any_rows_are_read_as_they_were_written(tmp_path_factory, data, names):
    prompt = text.filter(bool) | st.lists(message, min_size=1, max_size=3)
    row = st.fixed_dictionaries({"prompt": prompt, **dict.fromkeys(names, value)})
    rows = data.draw(st.lists(row, min_size=1, max_size=5))
    ascii_only = data.draw(st.booleans())
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    lines = [json.dumps(row, ensure_ascii=ascii_only) for row in rows]
    path.write_bytes("\n".join(lines).encode())
    examples = read_examples(str(path))
    assert [
        {"prompt": e.prompt if isinstance(e.prompt, str) else list(e.prompt), **e.columns} for e in examples
    ] == rows
    assert all(isinstance(prompt_key(e.prompt), str) for e in examples)


# Rows and tasks as objects


def test_rows_are_the_same_task_as_their_file(tmp_path):
    rows = [{"prompt": f"{i} + 1 =", "answer": i + 1} for i in range(200)]
    task, file = load_task(rows, seed=3), load_task(write_rows(tmp_path / "sums.jsonl", rows), seed=3)
    assert [task.train_example(i) for i in range(400)] == [file.train_example(i) for i in range(400)]
    assert task.eval_examples(50) == file.eval_examples(50)
    assert task.eval_on_train is file.eval_on_train is False
    assert (task.name, task.rows[0].source) == ("rows", "row 1")
    assert rows[0] == {"prompt": "0 + 1 =", "answer": 1}
    assert list(load_task(file.rows).rows) == list(file.rows)  # Examples keep their location
    assert load_task(file.rows).rows[0].source.endswith("sums.jsonl:1")


def test_eval_data_may_be_rows():
    rows = [{"prompt": str(i)} for i in range(4)]
    with pytest.warns(UserWarning, match="rows: 1 of 4 rows left out of training") as caught:
        task = load_task(rows, eval_data=[{"prompt": "2"}, {"prompt": "9"}])
    assert caught[0].filename == __file__
    assert {row.prompt for row in task.eval_examples(9)} == {"2", "9"}
    assert {task.train_example(i).prompt for i in range(3)} == {"0", "1", "3"}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "no rows: a task needs at least one prompt"),
        ([{"prompt": "a"}, {"promt": "b"}], r"row 2: no column 'prompt' \(it has 'promt'\)"),
        ([{"prompt": "a", "answer": "1"}, {"prompt": "b"}], "row 2: no column 'answer', which row 1 has"),
        ([{"prompt": "a"}, {"prompt": "b", "x": 1}], "row 2: column 'x' is not in row 1"),
        ([{"prompt": "a", "completions": 1}], "row 1: rename the column 'completions'"),
        ([{"prompt": [{"role": "user"}]}], "row 1: message 1 of 'prompt' must be an object"),
        (["a"], "row 1: expected a dict with 'prompt' or an Example, got str"),
        ([Example("a", {"prompt": "b"})], "row 1: an Example has its own prompt: rename the column 'prompt'"),
        (3, "got int, which has no name, rewards"),
    ],
)
def test_invalid_rows_are_reported_by_number(rows, message):
    with pytest.raises(DataError, match=message):
        load_task(rows)


def test_a_task_object_is_used_as_it_is():
    task = load_task([{"prompt": "a"}])
    assert load_task(task) is task
    with pytest.raises(DataError, match="the task 'rows' has its own evaluation examples"):
        load_task(task, eval_data="other.jsonl")


def test_the_message_for_an_unknown_task_is_in_sentences() -> None:
    with pytest.raises(ValueError, match=r"lists the names\. To use"):
        load_task("qqqqqqqq")
