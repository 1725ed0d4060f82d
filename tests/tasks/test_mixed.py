"""Mixtures of data: weights, epochs of each part, columns, evaluation rows that no part trains on, and error messages."""

from __future__ import annotations

import itertools
import shutil
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import policygrad as pg
from doubles.files import rows, same, untimed, weights, write_rows
from policygrad.errors import DataError, RunError
from policygrad.rewards.builtin import exact_match
from policygrad.tasks import load_task
from policygrad.tasks.base import Task
from policygrad.tasks.mixtures import BLOCK, shorten_names
from policygrad.tasks.rows import EvalPrompts, RowOptions
from policygrad.tasks.sources import digest_data, parse_data_mixture


def sums(count: int, letter: str = "") -> list[dict[str, Any]]:
    return [{"prompt": f"{letter}{i} + 1 =", "answer": str(i + 1)} for i in range(count)]


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    """Write two hundred sums, and fifty programs with tests in place of an answer."""
    programs = [{"prompt": f"a function that adds {i}", "tests": [f"f(0) == {i}"]} for i in range(50)]
    return write_rows(tmp_path / "sums.jsonl", sums(200)), write_rows(tmp_path / "code.jsonl", programs)


def sampled(task: Task, count: int, part: str) -> list[str]:
    """Return the prompts of a part, in the order in which they are sampled."""
    return [str(e.prompt) for e in map(task.train_example, range(count)) if e.part == part]


def test_parsing_of_mixtures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse_data_mixture("0.7*a.jsonl+0.3*b.parquet") == ((0.7, "a.jsonl"), (0.3, "b.parquet"))
    assert parse_data_mixture("a.jsonl.gz + 2 * hf:x/y:main:test + .5*c.arrow") == (
        (1.0, "a.jsonl.gz"),
        (2.0, "hf:x/y:main:test"),
        (0.5, "c.arrow"),
    )
    assert (
        parse_data_mixture("a.jsonl")
        == parse_data_mixture("gcd+2*chain_sum:min_terms=2")
        == parse_data_mixture("1e+3*gcd")
        == ()
    )
    write_rows(tmp_path / "c++.jsonl", sums(3))
    write_rows(tmp_path / "a+b.jsonl", sums(3))
    assert parse_data_mixture("c++.jsonl") == ()
    assert parse_data_mixture("2*c++.jsonl+d.jsonl+3*a+b.jsonl") == (
        (2.0, "c++.jsonl"),
        (1.0, "d.jsonl"),
        (3.0, "a+b.jsonl"),
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a.jsonl*0.7+b.jsonl*0.3", r"part 'a.jsonl\*0.7' is not data: write the weight first, 0.7\*a.jsonl"),
        ("a.jsonl+gcd", "part 'gcd' is not data: data can be mixed with data only"),
        ("0*a.jsonl+b.jsonl", "the weight 0 must be positive"),
        ("a.jsonl+", "part '' is not data"),
        ("a.jsonl+b.jsonl", r"a.jsonl: no such file"),
    ],
)
def test_an_invalid_mixture_is_refused_with_the_part(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=message):
        load_task(name)


def test_an_invalid_row_is_reported_with_file_and_line(files: tuple[str, str], tmp_path: Path) -> None:
    bad = write_rows(tmp_path / "bad.jsonl", [{"prompt": "a"}, {"question": "b"}])
    with pytest.raises(DataError, match=r"bad\.jsonl:2: no column 'prompt'"):
        load_task(f"{files[0]}+{bad}")
    with pytest.warns(UserWarning, match=r"bad\.jsonl: 1 of 2 rows skipped"):
        load_task(f"{files[0]}+{bad}", row_options=RowOptions(skip_bad_rows=True))


def test_a_training_example_is_a_pure_function_of_seed_and_index(files: tuple[str, str]) -> None:
    name = f"0.8*{files[0]}+0.2*{files[1]}"
    first, second, other = load_task(name, seed=3), load_task(name, seed=3), load_task(name, seed=4)
    indices = [*range(50), BLOCK - 1, BLOCK, 3 * BLOCK + 5, 7 * BLOCK]
    forward = {i: first.train_example(i) for i in indices}
    assert {i: second.train_example(i) for i in reversed(indices)} == forward
    assert [other.train_example(i) for i in indices] != list(forward.values())
    with pytest.raises(IndexError):
        first.train_example(-1)


def test_weights_and_epochs_of_each_part(files: tuple[str, str]) -> None:
    """A part's rows come in the same order as without the other parts."""
    task = load_task(f"0.8*{files[0]}+0.2*{files[1]}", seed=1)
    for part, name, share in zip(("sums.jsonl", "code.jsonl"), files, (0.8, 0.2), strict=True):
        result = sampled(task, 4 * BLOCK, part)
        assert abs(len(result) / (4 * BLOCK) - share) < 0.03  # four standard deviations
        alone = load_task(name, seed=1)
        assert result == [alone.train_example(i).prompt for i in range(len(result))]


def test_rows_have_all_columns_with_none_for_missing_ones(files: tuple[str, str]) -> None:
    task = load_task(f"{files[0]}+{files[1]}")
    for example in map(task.train_example, range(64)):
        assert set(example.columns) == {"answer", "tests"}
        assert (example.columns["answer"] is None) is (example.part == "code.jsonl")
        assert (example.columns["tests"] is None) is (example.part == "sums.jsonl")
        assert Path(example.source.rpartition(":")[0]).name == example.part
    assert exact_match(["a", "b"], ["2", "x"], ["2", None]) == [
        1.0,
        None,
    ]  # a reward applies only to parts that have its column


def test_every_part_is_evaluated_and_no_part_trains_on_evaluation_prompts(files: tuple[str, str]) -> None:
    task, other = load_task(f"3*{files[0]}+{files[1]}"), load_task(f"3*{files[0]}+{files[1]}", seed=9)
    every = task.eval_examples(999)
    assert every == other.eval_examples(999)
    assert task.eval_examples(7) == every[:7]
    assert not task.eval_on_train
    alone = [example.prompt for name in files for example in load_task(name).eval_examples(999)]
    assert Counter(e.prompt for e in every) == Counter(alone)
    assert {e.part for e in every} == {"sums.jsonl", "code.jsonl"}
    assert not {e.prompt for e in every} & {task.train_example(i).prompt for i in range(2000)}
    assert len(task.rows) == 250
    assert {e.part for e in every[:8]} == {"sums.jsonl", "code.jsonl"}  # by the weights from the first one on


def test_no_part_trains_on_an_evaluation_prompt_of_another(files: tuple[str, str], tmp_path: Path) -> None:
    prompts = [e.prompt for e in load_task(files[0]).eval_examples(3)]
    few = write_rows(tmp_path / "few.jsonl", [{"prompt": p, "answer": ""} for p in (*prompts, "another")])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        task = load_task(f"{files[0]}+{few}")
    messages = [str(warning.message) for warning in caught]
    assert any("few.jsonl: 3 of 4 rows left out of training: they are evaluation prompts" in text for text in messages)
    assert any("few.jsonl: too few rows to hold any out" in text for text in messages)
    assert set(sampled(task, 500, "few.jsonl")) == {"another"}
    with (
        pytest.warns(UserWarning, match="too few rows to hold any out"),
        pytest.raises(DataError, match=r"none\.jsonl: all prompts are evaluation prompts"),
    ):
        load_task(f"{files[0]}+{write_rows(tmp_path / 'none.jsonl', [{'prompt': p, 'answer': ''} for p in prompts])}")


def test_decontamination_applies_across_parts(tmp_path: Path) -> None:
    one = write_rows(tmp_path / "one.jsonl", [{"prompt": f"p{i} q{i} r{i} s{i} t{i}"} for i in range(100)])
    evaluated = load_task(one).eval_examples(1)[0].prompt
    two = write_rows(tmp_path / "two.jsonl", [{"prompt": f"so: {evaluated}, is it?"}, {"prompt": "u v w x"}])
    with pytest.warns(UserWarning, match=r"two\.jsonl: 1 of 2 rows left .* or share 4 consecutive words with one"):
        task = load_task(f"{one}+{two}", row_options=RowOptions(decontaminate=4))
    assert {*sampled(task, 200, "two.jsonl")} == {"u v w x"}
    measured = EvalPrompts([e.prompt for e in task.eval_examples(999)], 4)
    assert not any(task.train_example(i).prompt in measured for i in range(300))


def test_evaluation_data_may_be_a_mixture_or_one_file(files: tuple[str, str], tmp_path: Path) -> None:
    a, b = (write_rows(tmp_path / f"{name}.jsonl", sums(40, name)) for name in "ab")
    task = load_task(f"{files[0]}+{files[1]}", eval_data=f"9*{a}+{b}")
    assert Counter(e.part for e in task.eval_examples(40))["a.jsonl"] > 25
    assert Counter(e.part for e in task.eval_examples(999)) == {"a.jsonl": 40, "b.jsonl": 40}
    assert {len(sampled(task, 2000, part)) > 0 for part in ("sums.jsonl", "code.jsonl")} == {True}
    assert {e.part for e in load_task(f"{files[0]}+{files[1]}", eval_data=a).eval_examples(9)} == {"a.jsonl"}
    one = load_task(files[0], eval_data=f"{a}+{b}")
    assert len({e.prompt for e in map(one.train_example, range(200))}) == 200
    with pytest.raises(DataError, match="generates its own evaluation problems"):
        load_task("gcd", eval_data=f"{a}+{b}")


def test_parts_too_small_to_split_are_evaluated_on_their_training_rows(tmp_path: Path) -> None:
    a, b = (write_rows(tmp_path / f"{name}.jsonl", sums(5, name)) for name in "ab")
    task = load_task(f"{a}+{b}")
    assert task.eval_on_train
    assert len(task.eval_examples(99)) == 10
    assert len({e.prompt for e in map(task.train_example, range(200))}) == 10


def test_part_names_are_shortened_while_distinct() -> None:
    assert shorten_names(["/x/a.jsonl", "b/c.parquet"]) == ["a.jsonl", "c.parquet"]
    assert shorten_names(["x/a.jsonl", "y/a.jsonl"]) == ["x/a.jsonl", "y/a.jsonl"]


def test_the_digest_changes_with_a_part(files: tuple[str, str]) -> None:
    name = f"2*{files[0]}+{files[1]}"
    before = digest_data(name)
    assert before == digest_data(name)
    assert before is not None
    write_rows(Path(files[1]), sums(50))
    assert digest_data(name) != before


@pytest.mark.full
def test_a_run_logs_each_part_and_resumes_bitwise(small: pg.Run, tmp_path: Path) -> None:
    a, b = (write_rows(tmp_path / f"{name}.jsonl", sums(40, name)) for name in "cf")
    measured = pg.EvaluationConfig(problems=8, samples_per_prompt=2)
    run = replace(small, task=f"0.6*{a}+0.4*{b}", steps=2, evaluation=measured)
    full = pg.train(replace(run, output=str(tmp_path / "whole")), display=False).output
    pieces = tmp_path / "pieces"
    pg.train(replace(run, output=str(pieces)), stop_after=1, display=False)
    stopped = shutil.copytree(pieces, tmp_path / "stopped")
    pg.train(resume=pieces, allow_code=("/",), display=False)
    assert full is not None
    assert same(weights(full), weights(pieces))
    assert untimed(full / "metrics.jsonl") == untimed(pieces / "metrics.jsonl")
    every = rows(full / "metrics.jsonl")
    before = next(row for row in every if "eval/reward" in row)
    counts = Counter(example.part for example in load_task(run.task).eval_examples(8))
    assert set(counts) == {"c.jsonl", "f.jsonl"}
    whole_mean = sum(before[f"eval/from/{part}"] * count for part, count in counts.items()) / counts.total()
    assert before["eval/reward"] == pytest.approx(whole_mean)
    report = [row for row in every if "reward" in row]
    parts = {name for row in report for name in row if name.startswith("reward/from/")}
    assert parts == {"reward/from/c.jsonl", "reward/from/f.jsonl"}
    both = [row for row in report if parts <= row.keys()]
    assert both
    for row in both:
        assert min(row[name] for name in parts) <= row["reward"] + 1e-9
        assert row["reward"] <= max(row[name] for name in parts) + 1e-9
    write_rows(Path(b), sums(41, "f"))
    with pytest.raises(RunError, match=r"is not what the run in .* started with"):
        pg.train(resume=stopped, allow_code=("/",), display=False)


def test_a_mixture_is_an_option_of_train_and_eval(files: tuple[str, str], random_model: Path, run_command: Any) -> None:
    name = f"0.7*{files[0]}+0.3*{files[1]}"
    code, out, _ = run_command("train", "--task", name, "--reward", "exact_match", "--dry-run")
    assert (code, f'task = "{name}"' in out) == (0, True)
    argv = ("--reward", "exact_match", "--problems", "4", "--samples", "1", "--temperature", "0", "--max-tokens", "4")
    code, _, err = run_command("eval", str(random_model), "--task", name, *argv)
    assert code == 0, err


def test_weights_apply_to_samples_not_to_rows(tmp_path: Path) -> None:
    """A part of one row with weight 3 is sampled three times as often."""
    a, b = write_rows(tmp_path / "a.jsonl", sums(1, "a")), write_rows(tmp_path / "b.jsonl", sums(30, "b"))
    task = load_task(f"3*{a}+{b}")
    result = Counter(e.part for e in itertools.islice(map(task.train_example, itertools.count()), 2000))
    assert 1400 < result["a.jsonl"] < 1600
