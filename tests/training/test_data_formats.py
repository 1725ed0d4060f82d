"""Runs on data of other kinds: from the command line, resumed, and refused where the data is another."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import policygrad as pg
from doubles.files import rows, same, untimed, weights, write_rows
from doubles.resuming import rewind
from doubles.trackers import Record
from policygrad.errors import ConfigError, RunError
from policygrad.training.config.supervised import SFTConfig
from policygrad.training.config.trust import find_code_references

pa = pytest.importorskip("pyarrow")
datasets = pytest.importorskip("datasets")
import pyarrow.parquet as pq  # noqa: E402

VERL = [
    {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": f"{i} + 1"}],
        "reward_model": {"style": "rule", "ground_truth": str(i + 1)},
        "extra_info": {"index": i},
    }
    for i in range(40)
]
MAP = """
def shorter(row):
    if row["extra_info"]["index"] % 2:
        return None
    return {**row, "prompt": row["prompt"][0]["content"] + " =\\n"}
"""


@pytest.fixture
def run(small: pg.Run, tmp_path: Path) -> pg.Run:
    """On verl's Parquet, through a map of one's own."""
    (tmp_path / "mapping.py").write_text(MAP)
    pq.write_table(pa.Table.from_pylist(VERL), tmp_path / "train.parquet")
    return replace(
        small,
        task=str(tmp_path / "train.parquet"),
        row_map=f"{tmp_path / 'mapping.py'}:shorter",
        reward=("exact_match",),
        steps=3,
        prompts_per_step=2,
        samples_per_prompt=3,
        sampling=pg.SamplingParams(max_tokens=4),
    )


@pytest.mark.full
def test_a_run_on_parquet_resumes_bit_for_bit_and_refuses_another_file(run: pg.Run, tmp_path: Path) -> None:
    full = pg.train(replace(run, output=str(tmp_path / "whole")), display=False).output
    message = {row["prompt"] for row in rows(full / "completions.jsonl")}
    assert len(message) > 4
    assert all(prompt.endswith(" + 1 =\n") and int(prompt.split()[0]) % 2 == 0 for prompt in message)
    pieces, second = (rewind(full, tmp_path / name, 1) for name in ("pieces", "other"))
    record = Record()
    (tmp_path / "mapping.py").write_text(MAP + "\n# edited\n")
    pg.train(resume=pieces, allow_code=("/",), display=record)
    assert "mapping.py changed since the checkpoint" in record.said
    assert same(weights(full), weights(pieces))
    assert untimed(full / "metrics.jsonl") == untimed(pieces / "metrics.jsonl")
    pq.write_table(pa.Table.from_pylist(VERL[1:]), tmp_path / "train.parquet")
    with pytest.raises(RunError, match=r"train\.parquet is not what the run in .* started with"):
        pg.train(resume=second, allow_code=("/",), display=False)


def test_the_command_applies_a_row_map_and_skips_bad_rows(
    run: pg.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_command: Callable[..., tuple[int, str, str]]
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({**row, "question": "?"}) for row in VERL]
    Path("some.jsonl").write_text("\n".join([*lines[:3], "{", *lines[3:]]))
    argv = ("train", "dr_grpo", "--model", str(run.model), "--task", "some.jsonl", "--row-map", "mapping.py:shorter")
    argv += (
        "--reward",
        "exact_match",
        "--steps",
        "1",
        "--prompts-per-step",
        "2",
        "--max-tokens",
        "4",
        "--output",
        "out",
    )
    argv += ("--evaluation.problems", "0")
    code, _, err = run_command(*argv)
    assert (code, "some.jsonl:4: not JSON" in err) == (2, True)
    code, _, err = run_command(*argv, "--task.skip-bad-rows")
    assert code == 0
    assert "1 of 41 rows skipped, the first: some.jsonl:4" in err
    report = (Path("out") / "run.toml").read_text()
    assert 'map = "mapping.py:shorter"' in report
    assert "skip_bad_rows = true" in report
    code, _, err = run_command("train", "--resume", "out", "--row-map", "other.py:f")
    assert code == 2
    assert "with another --row-map would make evaluations before and after incomparable" in err
    for flag, argv in (("--task.decontaminate", ("8",)), ("--no-task.skip-bad-rows", ())):
        code, _, err = run_command("train", "--resume", "out", flag, *argv)
        assert (
            code,
            f"another {flag.replace('--no-', '--')} would make evaluations before and after incomparable" in err,
        ) == (2, True), err
    argv = "--row-map mapping.py:shorter --reward exact_match --problems 2 --samples 1 --max-tokens 4"
    assert run_command("eval", str(run.model), "--task", str(run.task), *argv.split())[0] == 0


def test_an_invalid_row_map_is_refused(run: pg.Run, tmp_path: Path) -> None:
    for given, says in ((f"{tmp_path / 'mapping.py'}:longer", "there is no 'longer'"), (7, "is no function")):
        with pytest.raises(ConfigError, match=says):
            pg.train(replace(run, row_map=given, output=str(tmp_path / "run")), display=False)
    assert list(find_code_references({"row_map": "/elsewhere/mine.py:f"})) == [
        "/elsewhere/mine.py"
    ]  # so that a file of options needs leave for it


def test_python_takes_a_dataset_and_a_function(run: pg.Run, tmp_path: Path) -> None:
    def text(row: dict[str, Any]) -> dict[str, Any]:
        return {"prompt": row["prompt"][0]["content"], "answer": row["answer"]}

    plain = [{"prompt": row["prompt"], "answer": row["reward_model"]["ground_truth"]} for row in VERL]  # type: ignore[index]
    record = Record()
    data = datasets.Dataset.from_list(plain)
    given = replace(run, task=data, row_map=text, steps=1, output=str(tmp_path / "run"))
    result = pg.train(given, display=record).output
    assert "task and row_map given as objects" in record.said
    assert rows(result / "completions.jsonl")[0]["prompt"].endswith(" + 1")
    with pytest.raises(ConfigError, match=r"'(task|map)' was a .* object given in Python"):
        pg.train(resume=result, allow_code=("/",), display=False)


def test_fine_tuning_on_parquet_refuses_another_file(run: pg.Run, tmp_path: Path) -> None:
    def write(shown: list[dict[str, str]]) -> str:
        pq.write_table(pa.Table.from_pylist(shown), tmp_path / "d.parquet")
        return str(tmp_path / "d.parquet")

    shown = [{"prompt": f"{i} =", "completion": str(i)} for i in range(40)]
    config = SFTConfig(data=write(shown), model=str(run.model), batch_size=8, output=str(tmp_path / "sft"))
    pg.train_sft(config, stop_after=1, display=False)
    pg.train_sft(config, resume=config.output, stop_after=1, display=False)
    write(shown[1:])
    with pytest.raises(RunError, match=r"d\.parquet \(or the evaluation data\) is not what"):
        pg.train_sft(config, resume=config.output, display=False)
    broken = write_rows(tmp_path / "d.jsonl", [*shown, {"prompt": "1 ="}])
    with pytest.warns(UserWarning, match="1 of 41 rows skipped"):
        pg.train_sft(replace(config, data=broken, skip_bad_rows=True, output=str(tmp_path / "skipped")), display=False)
