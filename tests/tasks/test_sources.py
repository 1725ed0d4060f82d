"""Data sources: every format gives the same rows, invalid rows are reported with their location, large data is read lazily."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import policygrad as pg
from doubles.files import read_examples, write_rows
from policygrad.errors import ConfigError, DataError
from policygrad.tasks import load_task, sources
from policygrad.tasks.preferences import read_demonstrations, read_preferences
from policygrad.tasks.rows import LazyRows, RowOptions
from policygrad.tasks.sources import TableSource, digest_data, open_source

pa = pytest.importorskip("pyarrow")
datasets = pytest.importorskip("datasets")
import pyarrow.parquet as pq  # noqa: E402

ROWS: list[dict[str, Any]] = [{"prompt": f"{i} + 1 =\n", "answer": str(i + 1), "level": i} for i in range(200)]
VERL = [
    {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "system", "content": "Add.", "name": "calc"}, {"role": "user", "content": f"{i} + 1"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(i + 1)},
        "extra_info": {"split": "train", "index": i},
    }
    for i in range(3)
]


def parquet(path: Path, rows: list[dict[str, Any]]) -> str:
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=64)
    return str(path)


def arrow(path: Path, rows: list[dict[str, Any]], write: Callable[..., Any]) -> str:
    table = pa.Table.from_pylist(rows)
    with write(str(path), table.schema) as out:
        out.write_table(table, max_chunksize=50)
    return str(path)


def packed(path: Path, rows: list[dict[str, Any]]) -> str:
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def saved(path: Path, rows: list[dict[str, Any]]) -> str:
    datasets.Dataset.from_list(rows).save_to_disk(path)
    return str(path)


KINDS: dict[str, Callable[[Path, list[dict[str, Any]]], str]] = {
    "rows.jsonl.gz": packed,
    "rows.parquet": parquet,
    "file.arrow": lambda path, rows: arrow(path, rows, pa.ipc.new_file),
    "stream.arrow": lambda path, rows: arrow(path, rows, pa.ipc.new_stream),
    "rows.feather": lambda path, rows: arrow(path, rows, pa.ipc.new_file),
    "folder": saved,
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_format_gives_the_same_task_as_jsonl(tmp_path: Path, kind: str) -> None:
    """The same order, evaluation rows and later epochs."""
    name = KINDS[kind](tmp_path / kind, ROWS)
    lines, task = load_task(write_rows(tmp_path / "lines.jsonl", ROWS), seed=3), load_task(name, seed=3)
    assert [task.train_example(i) for i in range(500)] == [lines.train_example(i) for i in range(500)]
    assert task.eval_examples(100) == lines.eval_examples(100)
    assert 0 < len(task.eval_examples(100)) < 50
    assert len(task.rows) == 200
    assert task.rows[7:9] == lines.rows[7:9]
    assert name in task.rows[0].source
    before = digest_data(name)
    assert before is not None
    assert before == digest_data(name)
    other = tmp_path / "other"
    other.mkdir()
    assert digest_data(KINDS[kind](other / kind, ROWS[1:])) != before


def test_rows_of_large_data_are_read_lazily(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = write_rows(tmp_path / "lines.jsonl", ROWS)
    cached = load_task(name)
    monkeypatch.setattr(sources, "MAX_CACHED_BYTES", 100)
    rows = read_examples(name)
    assert isinstance(rows, LazyRows)
    assert rows[5] is not rows[5]
    assert rows[5].columns["level"] == 5
    task = load_task(name)
    assert [task.train_example(i) for i in range(300)] == [cached.train_example(i) for i in range(300)]
    read: list[int] = []
    read_row = sources.JsonLines.__getitem__
    monkeypatch.setattr(sources.JsonLines, "__getitem__", lambda *args: (read.append(1), read_row(*args))[1])
    task.train_example(400)
    assert len(read) == 1


def test_a_table_is_read_in_blocks() -> None:
    requested: list[tuple[int, int]] = []

    def read(start: int, end: int) -> list[dict[str, Any]]:
        requested.append((start, end))
        return [{"prompt": str(i)} for i in range(start, end)]

    table = TableSource("t", 150, read)
    assert [table[i][1]["prompt"] for i in range(150)] == [str(i) for i in range(150)]
    assert requested == [(0, 64), (64, 128), (128, 150)]
    assert table[149][0] == "t, row 150"


def test_verl_s_columns_are_read(tmp_path: Path) -> None:
    """Messages lose the keys that a table adds; the ground truth becomes the answer."""
    for example, row in zip(read_examples(parquet(tmp_path / "train.parquet", VERL)), VERL, strict=True):
        assert list(example.prompt) == row["prompt"]
        assert example.columns["answer"] == row["reward_model"]["ground_truth"]
        assert {k: v for k, v in example.columns.items() if k != "answer"} == {
            k: v for k, v in row.items() if k != "prompt"
        }
    own = read_examples(write_rows(tmp_path / "own.jsonl", [{**VERL[0], "answer": "mine"}]))
    assert own[0].columns["answer"] == "mine"


def test_a_row_map_converts_rows_and_leaves_some_out(tmp_path: Path) -> None:
    def even(row: dict[str, Any]) -> dict[str, Any] | None:
        return {"prompt": f"Q: {row['prompt']}", "answer": row["answer"]} if row["level"] % 2 == 0 else None

    for name in (write_rows(tmp_path / "a.jsonl", ROWS), parquet(tmp_path / "a.parquet", ROWS)):
        rows = read_examples(name, RowOptions(even))
        assert len(rows) == 100
        assert rows[1].prompt == "Q: 2 + 1 =\n"
        assert rows[1].columns == {"answer": "3"}
        assert rows[1].source.endswith(("a.jsonl:3", "a.parquet, row 3"))
    task = load_task(ROWS, row_options=RowOptions(even), eval_data=[{**ROWS[0], "prompt": "new"}])
    assert task.eval_examples(9)[0].prompt == "Q: new"
    with pytest.raises(DataError, match=r"a\.jsonl:1: the row map raised KeyError: 'nothing'"):
        read_examples(str(tmp_path / "a.jsonl"), RowOptions(lambda row: row["nothing"]))
    with pytest.raises(DataError, match=r"row 1: the row map returned str: return a dict"):
        read_examples(str(tmp_path / "a.parquet"), RowOptions(lambda row: "text"))  # type: ignore[arg-type, return-value]
    with pytest.raises(DataError, match=r"no row is left of 200: the row map left out 200"):
        read_examples(str(tmp_path / "a.jsonl"), RowOptions(lambda row: None))
    results = iter([*[{"prompt": "a"}] * 200, None])
    fickle = read_examples(str(tmp_path / "a.parquet"), RowOptions(lambda row: next(results)))
    with pytest.raises(DataError, match="make it deterministic"):
        fickle[0]


def test_invalid_rows_are_refused_with_location_or_skipped_and_counted(tmp_path: Path) -> None:
    lines = [json.dumps(row) for row in ROWS[:4]]
    text = "\n".join([lines[0], "{broken", lines[1], json.dumps({"question": "x"}), '"text"', lines[2], lines[3]])
    file = tmp_path / "some.jsonl"
    file.write_text(text)
    with pytest.raises(DataError, match=r"some\.jsonl:2: not JSON"):
        load_task(str(file))
    with pytest.warns(UserWarning, match=r"3 of 7 rows skipped, the first: .*some\.jsonl:2: not JSON"):
        task = load_task(str(file), row_options=RowOptions(skip_bad_rows=True))
    assert [row.prompt for row in task.rows] == [row["prompt"] for row in ROWS[:4]]
    odd = parquet(tmp_path / "some.parquet", [*ROWS[:2], {"prompt": None, "answer": "1", "level": 1}])
    with pytest.raises(DataError, match=r"some\.parquet, row 3: 'prompt' must be text"):
        load_task(odd)
    with pytest.warns(UserWarning, match="1 of 3 rows skipped"):
        assert len(load_task(odd, row_options=RowOptions(skip_bad_rows=True)).rows) == 2
    with pytest.raises(DataError, match="no row is left of 1: the row map left out 0, and 1 are invalid"):
        load_task(write_rows(tmp_path / "bad.jsonl", [{"x": 1}]), row_options=RowOptions(skip_bad_rows=True))


def test_unreadable_data_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def check_refused(name: str, content: bytes, message: str) -> None:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=message):
            load_task(str(tmp_path / name))

    check_refused("a.parquet", b"PAR1 nothing", r"a\.parquet: cannot be read as Parquet")
    check_refused("a.arrow", b"nothing", r"a\.arrow: cannot be read as Arrow")
    check_refused("a.jsonl.gz", b"nothing", r"a\.jsonl\.gz: cannot be read")
    check_refused("cut.jsonl.gz", gzip.compress(b'{"prompt": "a"}\n' * 99)[:-12], r"cut\.jsonl\.gz: cannot be read")
    check_refused("a.csv", b"prompt,prompt\n", r"a\.csv:1: the first line names the columns.*the column 'prompt' twice")
    check_refused("b.csv", b"prompt,answer\n", r"b\.csv: no rows")
    check_refused("c.csv", b'prompt,answer\n"1+1=,2\n', r"c\.csv:2: cannot be read as CSV: unexpected end of data")
    check_refused("d.csv", b"prompt,answer\n\xff,1", r"d\.csv: byte 15 is not UTF-8")
    check_refused("e.csv", b"prompt,\n", r"e\.csv:1: the first line names the columns.*a column without a name")
    check_refused("a.json", b'[{"prompt": "a"}', r"a\.json: not JSON at line 1, column 17: .*is the file cut off")
    check_refused("b.json", b"[]", r"b\.json: no rows")
    with pytest.raises(DataError, match=r"gone\.tsv: no such file"):
        read_preferences("gone.tsv")
    with pytest.raises(DataError, match=r"gone\.parquet: no such file"):
        load_task(str(tmp_path / "gone.parquet"))
    with pytest.raises(DataError, match=r"empty\.parquet: no rows"):
        load_task(parquet_of_nothing(tmp_path / "empty.parquet"))
    with pytest.raises(DataError, match="this task generates its examples"):
        load_task("embedded", row_options=RowOptions(skip_bad_rows=True))
    with pytest.raises(DataError, match="is not data: give rows or a file"):
        load_task(ROWS, eval_data="embedded")
    monkeypatch.setattr("policygrad.tasks.sources.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs pyarrow.*pip install '\.\[data\]' in a clone"):
        load_task(str(tmp_path / "a.parquet"))


def parquet_of_nothing(path: Path) -> str:
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), path)
    return str(path)


def test_a_folder_of_splits(tmp_path: Path) -> None:
    both = {"train": datasets.Dataset.from_list(ROWS[:9]), "test": datasets.Dataset.from_list(ROWS[9:12])}
    datasets.DatasetDict(both).save_to_disk(tmp_path / "splits")
    task = load_task(str(tmp_path / "splits"), eval_data=f"{tmp_path / 'splits'}:test")
    assert [row.prompt for row in task.rows] == [row["prompt"] for row in ROWS[:12]]
    assert {row.prompt for row in task.eval_examples(9)} == {row["prompt"] for row in ROWS[9:12]}
    with pytest.raises(DataError, match=r"no split 'validation'; it has train, test"):
        load_task(f"{tmp_path / 'splits'}:validation")
    saved(tmp_path / "one", ROWS[:3])
    with pytest.raises(DataError, match="it has no splits: leave 'test' out"):
        load_task(f"{tmp_path / 'one'}:test")


def test_hub_datasets_by_repository_configuration_and_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses the real library, with local files in place of the hub."""
    for split, rows in (("train", ROWS[:40]), ("test", ROWS[40:50])):
        write_rows(tmp_path / f"{split}.jsonl", rows)
    requested: list[tuple[str, str | None]] = []
    real = datasets.load_dataset

    def from_files(repository: str, config: str | None = None) -> Any:
        requested.append((repository, config))
        if repository != "openai/gsm8k":
            raise ConnectionError(f"Couldn't reach {repository!r} on the Hub")
        files = {split: str(tmp_path / f"{split}.jsonl") for split in ("train", "test")}
        return real("json", data_files=files, cache_dir=str(tmp_path / "cache"))

    monkeypatch.setattr(datasets, "load_dataset", from_files)
    sources.load_dataset.cache_clear()
    task = load_task("hf:openai/gsm8k:main", eval_data="hf:openai/gsm8k:main:test")
    assert requested == [("openai/gsm8k", "main")] * 2
    assert [dict(row.columns) for row in task.rows] == [
        {k: v for k, v in row.items() if k != "prompt"} for row in ROWS[:50]
    ]
    assert task.rows[0].source == "hf:openai/gsm8k:main, row 1"
    assert digest_data("hf:openai/gsm8k:main") == digest_data("hf:openai/gsm8k:main")
    assert digest_data("hf:openai/gsm8k:main") != digest_data("hf:openai/gsm8k:main:test")
    with pytest.raises(DataError, match=r"hf:nobody/nothing: cannot be loaded: Couldn't reach 'nobody/nothing'"):
        load_task("hf:nobody/nothing")
    with pytest.raises(DataError, match="is hf:REPOSITORY"):
        load_task("hf:a:b:c:d")
    sources.load_dataset.cache_clear()
    monkeypatch.setattr(sources, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs datasets.*pip install '\.\[data\]' in a clone"):
        load_task("hf:openai/gsm8k:main")


def test_dataset_objects_are_rows(tmp_path: Path) -> None:
    task = load_task(datasets.Dataset.from_list(ROWS[:9]), eval_data=datasets.Dataset.from_list(ROWS[9:12]))
    assert [row.prompt for row in task.rows] == [row["prompt"] for row in ROWS[:12]]
    assert task.rows[0].source == "row, row 1"


def test_demonstrations_and_preferences_use_the_same_sources(tmp_path: Path) -> None:
    shown = [
        {"messages": [{"role": "user", "content": str(i)}, {"role": "assistant", "content": "!"}]} for i in range(3)
    ]
    assert len(read_demonstrations(parquet(tmp_path / "d.parquet", shown))) == 3
    pairs = [{"prompt": str(i), "chosen": "a", "rejected": "b"} for i in range(3)]
    assert len(read_preferences(packed(tmp_path / "p.jsonl.gz", pairs))) == 3
    worse = write_rows(tmp_path / "p.jsonl", [*pairs, {"prompt": "x", "chosen": "a", "rejected": "a"}])
    with pytest.warns(UserWarning, match="1 of 4 rows skipped"):
        assert len(read_preferences(worse, RowOptions(skip_bad_rows=True))) == 3
    assert open_source(worse, "").fits_in_memory


def test_json_arrays_and_csv_are_read_with_locations(tmp_path: Path) -> None:
    """Values of CSV are text; a value may span lines."""
    (tmp_path / "a.json").write_text(json.dumps(ROWS[:3], indent=1))
    assert [row.columns for row in read_examples(str(tmp_path / "a.json"))] == [
        {"answer": row["answer"], "level": row["level"]} for row in ROWS[:3]
    ]
    assert read_examples(str(tmp_path / "a.json"))[1].source.endswith("a.json, row 2")
    write_rows(tmp_path / "lines.json", ROWS[:3])
    assert read_examples(str(tmp_path / "lines.json")) == read_examples(str(tmp_path / "a.json"))
    (tmp_path / "a.csv").write_text('\ufeffprompt,answer\n"1,\n2 ""+""",3\n\n4,\n')
    first, second = read_examples(str(tmp_path / "a.csv"))
    assert (first.prompt, first.columns, second.columns) == ('1,\n2 "+"', {"answer": "3"}, {"answer": ""})
    assert [row.source.rpartition(":")[2] for row in (first, second)] == ["2", "5"]
    (tmp_path / "b.tsv").write_text("prompt\tanswer\na\t1\nb\nc\t3\n")
    with pytest.raises(DataError, match=r"b\.tsv:3: 1 values for 2 columns"):
        load_task(str(tmp_path / "b.tsv"))
    with pytest.warns(UserWarning, match=r"1 of 3 rows skipped, the first: .*b\.tsv:3"):
        assert len(load_task(str(tmp_path / "b.tsv"), row_options=RowOptions(skip_bad_rows=True)).rows) == 2
    (tmp_path / "b.json").write_text('[{"prompt": "a"}, 3]')
    with pytest.raises(DataError, match=r"b\.json, row 2: every row must be a JSON object, got a int"):
        load_task(str(tmp_path / "b.json"))


@pytest.mark.parametrize("write", [parquet, write_rows])
def test_a_folder_or_pattern_of_shards_is_one_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path, list[dict[str, Any]]], str]
) -> None:
    """Each row counts once, however the shards are cut; what lies beside them does not."""
    kind = ".parquet" if write is parquet else ".jsonl"
    whole = write(tmp_path / f"whole{kind}", ROWS)
    (tmp_path / "shards" / "deeper").mkdir(parents=True)
    for number, (start, end) in enumerate(((0, 7), (7, 150), (150, 200))):
        write(tmp_path / "shards" / f"part-{number}{kind}", ROWS[start:end])
    (tmp_path / "shards" / "README.md").write_text("shards")
    (tmp_path / "shards" / f"_other{kind}").write_text("not one")
    monkeypatch.chdir(tmp_path)
    alone = load_task(whole)
    for name in ("shards", "./shards/", "shards/p*" + kind, "**/part-?" + kind):
        task = load_task(name)
        assert list(task.rows) == list(alone.rows)
        assert [task.train_example(i) for i in range(99)] == [alone.train_example(i) for i in range(99)]
    eighth = next(row for row in load_task("shards").rows if row.prompt == ROWS[8]["prompt"])
    assert eighth.source.endswith((f"part-1{kind}, row 2", f"part-1{kind}:2"))
    assert digest_data("shards") == digest_data(f"shards/part-*{kind}") != digest_data(f"shards/part-1{kind}")
    write(tmp_path / "other.jsonl" if kind == ".jsonl" else tmp_path / "other.parquet", ROWS)
    mixed = load_task(f"0.5*shards/part-*{kind}+0.5*other{kind}", row_options=RowOptions())
    assert len(mixed.rows) == 400
    assert mixed.shares == f"part-*{kind} 50.0% (192 rows), other{kind} 50.0% (192 rows)"  # type: ignore[attr-defined]
    assert alone.shares == ""  # type: ignore[attr-defined]
    with pytest.raises(DataError, match=r"none/\*\.jsonl: no file matches"):
        load_task("none/*.jsonl")


def test_a_folder_that_is_not_clear_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for names, says in (
        (("train-0.jsonl", "test-0.jsonl"), r"several splits \(test, train\): choose by a pattern, '\./data/\*test\*'"),
        (("a.jsonl", "a.csv"), r"several kinds \(\.csv, \.jsonl\): choose by a pattern, '\./data/\*\.csv'"),
        (("a.txt",), r"a folder without data files.*it holds a\.txt"),
    ):
        (tmp_path / "data").mkdir()
        for name in names:
            (tmp_path / "data" / name).write_text('{"prompt": "a"}\n')
        with pytest.raises(DataError, match=says):
            load_task("./data")
        shutil.rmtree(tmp_path / "data")
    (tmp_path / "gcd").mkdir()  # a folder does not take a task's name from it
    write_rows(tmp_path / "gcd" / "a.jsonl", ROWS)
    assert load_task("gcd").rows == ()
    assert load_task("2*gcd+chain_sum").rows == ()
    assert len(load_task("./gcd").rows) == len(ROWS)


def test_tables_from_python_are_rows_and_other_data_is_told_the_way(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    rows = [{**row, "hint": None if row["level"] % 2 else "even"} for row in ROWS]
    expected = load_task(rows)
    for table in (pandas.DataFrame(rows), pa.Table.from_pylist(rows)):
        for task in (load_task(table), load_task(pg.Run(task=table, reward=("exact_match",)).task)):
            assert list(task.rows) == list(expected.rows)
        assert len(load_task([{**rows[0], "prompt": "new"}], eval_data=table).eval_examples(999)) == 200
    data = datasets.Dataset.from_list(rows)
    for given, says in (
        (datasets.DatasetDict({"train": data}), r"DatasetDict has splits: give one, data\['train'\]"),
        (data.to_iterable_dataset(), r"IterableDataset is read once: give list\(data\.take\(10_000\)\)"),
        (iter(rows), r"is read once: give list\(data\)"),
        ({"prompt": ["a"]}, "give a list with a dict for each row"),
    ):
        with pytest.raises(DataError, match=says):
            load_task(given)  # type: ignore[arg-type]
        with pytest.raises(DataError, match=says):
            load_task(rows, eval_data=given)  # type: ignore[arg-type]


def test_columns_that_no_function_can_be_given_are_refused() -> None:
    for name, says in (("self", "rename the column 'self'"), (3, "must be text, as a reward's argument has; rename 3")):
        with pytest.raises(DataError, match=says):
            load_task([{"prompt": "a", name: 1}])
