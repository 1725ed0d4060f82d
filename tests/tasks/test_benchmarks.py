"""Known benchmarks: the table, names, data in a folder, prompts and answers of invented rows with each benchmark's columns."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import datasets
import pytest

from doubles.files import write_rows
from policygrad.errors import ConfigError, DataError
from policygrad.rewards.builtin import Choice
from policygrad.rewards.code import build_tests
from policygrad.rewards.resolve import parse_reward, resolve_reward
from policygrad.sandbox import FunctionTests, StdioTests
from policygrad.tasks import sources
from policygrad.tasks.base import Example
from policygrad.tasks.benchmarks import (
    Benchmark,
    find_reported,
    load_benchmark_data,
    load_benchmarks,
    load_reported,
    parse_benchmarks,
)
from policygrad.utils.message_parts import content_text

KNOWN = load_benchmarks()
CASES = [{"input": "2\n", "output": "4\n", "testtype": "stdin"}]
CALLS = [{"input": "[1, 2]", "output": "3", "testtype": "functional"}]
# invented problems, each with the columns of its data set
ROWS: dict[str, list[dict[str, Any]]] = {
    "gsm8k": [{"question": "Ann has 2 pens and buys 3. How many?", "answer": "2 + 3 = 5\n#### 5"}],
    "math500": [
        {"problem": "Halve $\\frac12$.", "answer": "\\frac{1}{4}", "solution": "s", "subject": "x", "level": 1}
    ],
    "aime24": [{"ID": "1", "Problem": "How much is $6\\cdot7$?", "Answer": 42, "Solution": "s"}],
    "aime25": [{"problem": "How much is $6\\cdot8$?", "answer": "48", "id": "0"}],
    "amc23": [{"id": 0, "question": "How much is $3\\cdot9$?", "answer": 27.0, "url": "u"}],
    "olympiadbench": [{"question": "Solve $x+1=3$.", "final_answer": ["2"], "is_multiple_answer": False}],
    "gpqa_diamond": [
        {"Question": f"Colour {i}?", "Correct Answer": f"red {i}"}
        | {f"Incorrect Answer {j}": f"wrong {i} {j}" for j in (1, 2, 3)}
        for i in range(12)
    ],
    "mmlu_pro": [
        {"question": "2 + 2?", "options": ["3", "4", "5"], "answer": "B", "category": "math", "cot_content": ""},
        {"question": "Sky?", "options": ["red", "blue"], "answer": "B", "category": "physics", "cot_content": ""},
    ],
    "ifeval": [
        {
            "key": 1,
            "prompt": "No commas.",
            "instruction_id_list": ["punctuation:no_comma"],
            "kwargs": [{"num_words": None}],
        }
    ],
    "humaneval": [
        {
            "task_id": "T/0",
            "prompt": 'def twice(x):\n    """Return twice x."""\n',
            "test": "def check(candidate):\n    assert candidate(2) == 4\n",
            "entry_point": "twice",
            "canonical_solution": "    return 2 * x\n",
        }
    ],
    "mbpp": [
        {"task_id": 11, "text": "Add one.", "code": "def f(x):\r\n  return x + 1", "test_list": ["assert f(1) == 2"]}
        | {"test_setup_code": "", "challenge_test_list": []}
    ],
    "livecodebench": [
        {
            "question_id": name,
            "question_content": f"Problem {name}",
            "starter_code": code,
            "contest_date": f"{day}T00:00:00",
        }
        | {
            "public_test_cases": json.dumps(tests),
            "private_test_cases": "[]",
            "metadata": json.dumps({"func_name": "add"}),
        }
        for name, code, day, tests in (
            ("a", "", "2024-03-01", CASES),
            ("b", "class Solution:\n    def add(self, x, y):", "2024-09-30", CALLS),
            ("c", "", "2025-02-01", CASES),
        )
    ],
}
SHOTS = {
    "mmlu_pro": [
        {"question": f"Example {i} of {name}", "options": ["1", "2"], "category": name}
        | {"answer": "A", "cot_content": "A: Let's think step by step. So. The answer is (A)."}
        for name in ("math", "physics")
        for i in range(7)
    ],
    "mbpp": [
        {
            "task_id": i,
            "text": f"Task {i}.",
            "code": f"def g{i}():\r\n  return {i}",
            "test_list": [f"assert g{i}() == {i}"],
        }
        for i in range(1, 6)
    ],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """All benchmarks' data, as a user places it."""
    folder = tmp_path_factory.mktemp("benchmarks")
    for name, rows in ROWS.items():
        write_rows(folder / f"{name}.jsonl", rows)
    for name, rows in SHOTS.items():
        split = KNOWN[name].shots
        assert split is not None
        write_rows(folder / f"{name}-{split.split}.jsonl", rows)
    return str(folder)


def load(name: str, folder: str) -> list[Example]:
    [benchmark] = parse_benchmarks([name])
    return load_benchmark_data(benchmark, folder).make_examples(chat=True)


def get_text(example: Example) -> str:
    assert not isinstance(example.prompt, str)
    [message] = example.prompt
    assert message["role"] == "user"
    return content_text(message["content"])


def score(benchmark: Benchmark, example: Example, completion: str) -> float | None:
    columns: Mapping[str, Any] = {name: [value] for name, value in example.columns.items()}
    prompt = [dict(message) for message in example.prompt if not isinstance(message, str)]
    [value] = resolve_reward(benchmark.reward).function([prompt], [completion], **columns)  # type: ignore[misc]
    return value  # type: ignore[return-value]


# --- the table


def test_every_benchmark_names_the_source_of_its_choices() -> None:
    assert set(KNOWN) == set(ROWS)
    for benchmark in KNOWN.values():
        assert {"data", "prompt", "sampling", "grader"} <= set(benchmark.sources), benchmark.name
        assert (benchmark.revision == "main") is ("revision" not in benchmark.sources), benchmark.name
        assert benchmark.revision == "main" or re.fullmatch(r"[0-9a-f]{40}", benchmark.revision), benchmark.name
        assert all("http" in benchmark.sources[name] for name in ("data", "prompt", "sampling", "grader"))
        assert benchmark.licence
        assert benchmark.differs
        assert not benchmark.shuffle or "shuffle" in benchmark.sources
        for name in benchmark.rewards:
            parse_reward(name)


def test_reported_values_belong_to_known_benchmarks_and_have_a_source() -> None:
    for each in load_reported():
        assert each.benchmark in KNOWN
        assert 0 < each.value < 1
        assert each.source.startswith("https://")
    [reported] = find_reported("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", KNOWN["aime24"])
    assert reported.value == 0.555
    assert KNOWN["aime24"].sampling.list_differences(reported.settings) == []
    assert KNOWN["math500"].sampling.list_differences(reported.settings) == ["samples per problem 4 instead of 64"]
    assert find_reported("somebody/DeepSeek-R1-Distill-Qwen-7B", KNOWN["aime24"]) == ()


# --- names


def test_names_may_be_joined_by_commas_and_choose_a_release_and_days() -> None:
    chosen = parse_benchmarks(["gsm8k, math500", "livecodebench:v5:2024-08-01..2025-01-31"])
    assert [each.key for each in chosen] == ["gsm8k", "math500", "livecodebench:v5:2024-08-01..2025-01-31"]
    assert (chosen[2].release, chosen[2].days) == (5, ("2024-08-01", "2025-01-31"))
    assert chosen[2].metric_name == "livecodebench-v5-2024-08-01..2025-01-31"
    assert parse_benchmarks(["livecodebench:..2024-12-31"])[0].days == ("", "2024-12-31")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gsm8", "unknown benchmark 'gsm8': did you mean gsm8k?"),
        ("math-500", "did you mean math500?"),
        ("qqq", "there are gsm8k, math500"),
        ("gsm8k,gsm8k", "named twice"),
        ("gsm8k:v1", "'v1' cannot be chosen; write gsm8k"),
        ("livecodebench:v7", "releases v1 to v6"),
        ("livecodebench:2024", r"write livecodebench:v1 to livecodebench:v6 or livecodebench:2024-08-01\.\.2025-01-31"),
        ("livecodebench:2024-02-30..", "2024-02-30 is no day"),
        ("livecodebench:2025-01-01..2024-01-01", "write the earlier day first"),
    ],
)
def test_a_wrong_name_is_refused_with_what_there_is(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_benchmarks([name])


# --- prompts and answers

RIGHT = {
    "gsm8k": "So \\boxed{5}.",
    "math500": "It is $\\boxed{0.25}$",
    "aime24": "\\boxed{42}",
    "aime25": "The answer is 48.",
    "amc23": "\\boxed{27}",
    "olympiadbench": "\\boxed{x=2}",
    "mmlu_pro": "2 + 2 is 4. The answer is (B).",
    "humaneval": "```python\ndef twice(x):\n    return x + x\n```",
    "mbpp": "```python\ndef f(x):\n    return 1 + x\n```",
    "livecodebench": "```python\nprint(2 * int(input()))\n```",
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_answer_scores_1_and_another_0(name: str, folder: str) -> None:
    example = load(name, folder)[0]
    assert score(KNOWN[name], example, RIGHT[name]) == 1.0
    wrong = (
        "```python\ndef twice(x):\n    return 5\ndef f(x):\n    return 5\nprint(5)\n```"
        if "```" in RIGHT[name]
        else "\\boxed{7}"
    )
    assert score(KNOWN[name], example, wrong) == 0.0


@pytest.mark.parametrize("name", ROWS)
def test_a_prompt_has_the_problem_and_ends_where_the_answer_begins(name: str, folder: str) -> None:
    example, row = load(name, folder)[0], ROWS[name][0]
    text = get_text(example)
    key = next(key for key in row if key.lower() in ("question", "problem", "prompt", "text", "question_content"))
    assert row[key].strip() in text
    assert "{{" not in text
    assert "{%" not in text
    assert text[:1].strip()  # no empty line before the first


def test_options_are_shuffled_the_same_for_every_model(folder: str) -> None:
    first, second = load("gpqa_diamond", folder), load("gpqa_diamond", folder)
    assert first == second
    assert {example.columns["answer"] for example in first} == set("ABCD")
    for i, example in enumerate(first):
        letter = example.columns["answer"]
        assert f"\n{letter}) red {i}\n" in get_text(example) + "\n"


def test_examples_are_those_of_the_category_or_the_chosen_tasks(folder: str) -> None:
    sums, sky = load("mmlu_pro", folder)
    assert re.findall(r"Example (\d) of (\w+)", get_text(sums)) == [(str(i), "math") for i in range(5)]
    assert "Example 4 of physics" in get_text(sky)
    assert "Answer: Let's think step by step. So. The answer is (A).\n\nQuestion:\n" in get_text(sums)
    assert get_text(sums).endswith("Options:\nA. 3\nB. 4\nC. 5\nAnswer: Let's think step by step.")
    text = get_text(load("mbpp", folder)[0])
    assert re.findall(r"Task (\d)", text) == ["2", "3", "4"]
    assert "```python\ndef g2():\n  return 2\n```" in text


def test_programs_read_input_or_are_called(folder: str) -> None:
    kinds = [type(build_tests("", example.columns)) for example in load("livecodebench", folder)]
    assert kinds == [StdioTests, FunctionTests, StdioTests]
    called = load("livecodebench", folder)[1]
    answer = "```python\nclass Solution:\n    def add(self, x, y):\n        return x + y\n```"
    called = load("livecodebench", folder)[1]
    tests = {"public_test_cases": json.dumps([{"input": "1\n2", "output": "3", "testtype": "functional"}])}
    assert score(KNOWN["livecodebench"], Example(called.prompt, {**called.columns, **tests}), answer) == 1.0
    assert "class Solution" in get_text(called)
    assert "# YOUR CODE HERE" in get_text(load("livecodebench", folder)[0])


def test_days_choose_problems_with_both_ends_included(folder: str) -> None:
    def ids(name: str) -> list[str]:
        return [example.columns["question_id"] for example in load(name, folder)]

    assert ids("livecodebench:2024-03-01..2024-09-30") == ["a", "b"]
    assert ids("livecodebench:2024-09-30..") == ["b", "c"]
    assert ids("livecodebench:..2024-03-01") == ["a"]
    with pytest.raises(DataError, match="no problem is of these days"):
        ids("livecodebench:2026-01-01..")


def test_a_model_without_a_chat_template_gets_plain_text(folder: str) -> None:
    data = load_benchmark_data(KNOWN["gsm8k"], folder)
    [plain], [chat] = data.make_examples(chat=False), data.make_examples(chat=True)
    assert plain.prompt == get_text(chat)


# --- data


def test_fewer_problems_are_spread_over_the_data(folder: str) -> None:
    rows = load_benchmark_data(KNOWN["gpqa_diamond"], folder, 4).rows
    assert [row["Question"] for _, row in rows] == ["Colour 0?", "Colour 3?", "Colour 6?", "Colour 9?"]
    assert len(load_benchmark_data(KNOWN["gpqa_diamond"], folder, 99).rows) == 12


def test_data_may_be_a_table_or_a_folder_of_datasets(tmp_path: Path) -> None:
    data = datasets.Dataset.from_list(ROWS["mbpp"])
    data.to_parquet(tmp_path / "mbpp.parquet")
    datasets.Dataset.from_list(SHOTS["mbpp"]).save_to_disk(tmp_path / "mbpp-prompt")
    from_table = load("mbpp", str(tmp_path))
    saved = tmp_path / "all"
    splits = {"test": data, "prompt": datasets.Dataset.from_list(SHOTS["mbpp"])}
    datasets.DatasetDict(splits).save_to_disk(saved / "mbpp")
    assert [get_text(x) for x in load("mbpp", str(saved))] == [get_text(x) for x in from_table]


def test_missing_data_is_named_with_how_to_place_it(tmp_path: Path, folder: str) -> None:
    with pytest.raises(ConfigError, match=r"is no folder; make one with gsm8k\.jsonl in it"):
        load("gsm8k", str(tmp_path / "none"))
    with pytest.raises(DataError, match=r"mbpp.jsonl is not there.*google-research-datasets/mbpp.*mbpp-prompt.jsonl"):
        load("mbpp", str(tmp_path))
    write_rows(tmp_path / "gsm8k.jsonl", [{"prompt": "x", "answer": "1"}])
    with pytest.raises(
        DataError, match=r"gsm8k.jsonl:1: no column 'question', which gsm8k needs; it has prompt, answer"
    ):
        load("gsm8k", str(tmp_path))


def test_the_hub_is_asked_for_the_pinned_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses the real library, with local files in place of the hub."""
    requests: list[Any] = []
    real = datasets.load_dataset
    write_rows(tmp_path / "rows.jsonl", ROWS["gsm8k"])
    write_rows(tmp_path / "code.jsonl", ROWS["livecodebench"])

    def answer(repository: str, config: str | None = None, **options: Any) -> Any:
        requests.append((repository, config, options))
        if repository == "Idavidrein/gpqa":
            raise ConnectionError("Couldn't reach it")
        code = repository == "json"
        file = str(tmp_path / ("code.jsonl" if code else "rows.jsonl"))
        split = "train" if code else "test"
        data = real("json", data_files={split: file}, cache_dir=str(tmp_path / "cache"))
        return data["train"] if code else data

    monkeypatch.setattr(datasets, "load_dataset", answer)
    sources.load_dataset.cache_clear()
    assert len(load_benchmark_data(KNOWN["gsm8k"]).rows) == 1
    assert requests == [("openai/gsm8k", "main", {"revision": KNOWN["gsm8k"].revision})]
    [chosen] = parse_benchmarks(["livecodebench:v2"])
    assert len(load_benchmark_data(chosen).rows) == 3
    root = f"hf://datasets/livecodebench/code_generation_lite@{chosen.revision}"
    files = [f"{root}/test.jsonl", f"{root}/test2.jsonl"]
    assert requests[1] == ("json", None, {"data_files": files, "split": "train"})
    with pytest.raises(
        DataError, match=r"gpqa_diamond: .*Couldn't reach it.*Ask for access.*Without network.*--benchmark-data"
    ):
        load_benchmark_data(KNOWN["gpqa_diamond"])
    sources.load_dataset.cache_clear()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"openai/gsm8k, is read by datasets.*pip install '\.\[benchmarks\]'"):
        load_benchmark_data(KNOWN["gsm8k"])


# --- letters


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("Answer: C", "C"),
        ("**Answer:** D", "D"),
        ("Answer: $E$", "E"),
        ("the answer is (B).", "B"),
        ("the answer is **(C)**", "C"),
        ("The answer is A. No, the answer is B", "B"),
        ("so \\boxed{\\text{B}}", "B"),
        ("<answer>d</answer>", "D"),
        ("(a)", "A"),
        ("Answer: B because it is", "B"),
        ("The answer is A good one", None),
        ("Answer: I think so", None),
        ("The answer is a number", None),
        ("Because", None),
    ],
)
def test_the_letter_of_an_answer(text: str, letter: str | None) -> None:
    assert Choice().extract_answer(text) == letter
    assert Choice()([], [text, text], [letter or "A", None]) == [float(letter is not None), None]
