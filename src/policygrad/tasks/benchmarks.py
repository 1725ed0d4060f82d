"""Known benchmarks by name: where their data is, and how a row becomes a prompt. benchmarks.toml has the choices and their sources.

`gsm8k` names one; `livecodebench:v5:2024-08-01..2025-01-31` a release of one that has releases, and the days of its problems, both
included. Either may be left out, and so may either end of the days.
"""

from __future__ import annotations

import datetime
import difflib
import importlib.util
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from importlib.resources import files
from pathlib import Path
from random import Random
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from policygrad.errors import ConfigError, DataError, install_command
from policygrad.tasks.base import Example, hash_int
from policygrad.tasks.files import TABLE_SUFFIXES
from policygrad.tasks.sources import HUB_PREFIX, Row, open_dataset, open_source

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
LOCAL_SUFFIXES = (".jsonl", ".jsonl.gz", *TABLE_SUFFIXES, "")
"""Of a benchmark's file in a folder; without one it is a folder that `datasets` saved."""
_DATE = r"\d{4}-\d{2}-\d{2}"
_DAYS = re.compile(rf"({_DATE})?\.\.({_DATE})?")


@dataclass(frozen=True)
class BenchmarkSampling:
    """How a benchmark's completions are sampled."""

    temperature: float
    top_p: float
    max_tokens: int
    samples: int  # completions of each problem, k

    def list_differences(self, settings: Mapping[str, float]) -> list[str]:
        """Describe what differs from other settings, as `temperature 0 instead of 0.6`."""
        texts = {"max_tokens": "max tokens", "top_p": "top-p", "samples": "samples per problem"}
        return [
            f"{texts.get(name, name)} {getattr(self, name):g} instead of {value:g}"
            for name, value in settings.items()
            if getattr(self, name) != value
        ]


@dataclass(frozen=True)
class Shots:
    """Rows of another split that a prompt shows as examples."""

    split: str
    count: int
    same: str = ""  # the column that an example shares with the problem
    column: str = ""  # the column whose value is one of `ids`; "" = the first rows
    ids: tuple[Any, ...] = ()


@dataclass(frozen=True)
class ExtraMetric:
    """A figure of a benchmark beside its score: the mean of another reward."""

    name: str
    reward: str
    per: str = ""  # a column with a list, whose length weighs a problem


@dataclass(frozen=True)
class Reported:
    """A value that a model's card reports."""

    model: str
    benchmark: str
    value: float
    source: str
    settings: Mapping[str, float] = field(default_factory=dict)  # of BenchmarkSampling, where the card states them
    note: str = ""


@dataclass(frozen=True)
class Benchmark:
    """One benchmark; benchmarks.toml explains the fields."""

    name: str
    title: str
    problems: int
    repository: str
    config: str
    split: str
    revision: str
    licence: str
    columns: tuple[str, ...]
    prompt: str
    reward: str
    sampling: BenchmarkSampling
    sources: Mapping[str, str]
    answer: str = ""
    grading: tuple[str, ...] = ()
    options: str | tuple[str, ...] = ()
    shuffle: bool = False
    gated: bool = False
    shots: Shots | None = None
    metrics: tuple[ExtraMetric, ...] = ()
    releases: tuple[str, ...] = ()  # files, each of which the later releases have too
    date: str = ""  # the column with a problem's day
    differs: str = ""
    # a choice of the command line
    release: int = 0  # 1 = the first; 0 = the last
    days: tuple[str, str] = ("", "")  # the first and last day, "" = open

    @property
    def key(self) -> str:
        """The name by which it was chosen, with release and days."""
        parts = [self.name, f"v{self.release}" if self.release else "", ".." if any(self.days) else ""]
        return ":".join(filter(None, parts)).replace("..", "..".join(self.days))

    @property
    def rewards(self) -> tuple[str, ...]:
        """The reward that is its score, and those of its other figures, with weight 0."""
        return (self.reward, *(f"0*{metric.reward}" for metric in self.metrics))

    @property
    def metric_name(self) -> str:
        """Its name in metrics, without colons."""
        return self.key.replace(":", "-")

    @cached_property
    def _template(self) -> jinja2.Template:
        environment = ImmutableSandboxedEnvironment(
            undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
        )
        environment.filters["zip"] = zip
        return environment.from_string(self.prompt)

    def select(self, rows: Iterable[Row]) -> list[Row]:
        """Return the rows of the chosen days."""
        first, last = self.days
        if not any(self.days):
            return list(rows)
        rows = list(rows)
        if missing := next((where for where, columns in rows if self.date not in columns), None):
            raise DataError(f"{missing}: no column {self.date!r}, by which the problems of {self.key} are chosen")
        return [row for row in rows if (first or "0") <= str(row[1][self.date])[:10] <= (last or "9")]

    def make_example(self, row: Row, shots: Sequence[Mapping[str, Any]] = (), *, chat: bool = True) -> Example:
        """Return a row's prompt, one message of a chat or plain text, with what its reward reads.

        Raises:
            DataError: A column is missing.
        """
        where, columns = row
        if missing := [name for name in self.columns if name not in columns]:
            raise DataError(
                f"{where}: no column {missing[0]!r}, which {self.name} needs; it has {', '.join(columns)}. The columns are those "
                f"of {self.repository}: {', '.join(self.columns)}"
            )
        graded = {name: columns.get(name) for name in self.grading}
        answer, values = columns.get(self.answer), dict(columns)
        if isinstance(self.options, str):
            values["options"] = columns[self.options]
        elif self.options:
            options = [str(columns[name]) for name in self.options]
            order = list(range(len(options)))
            if self.shuffle:  # by a hash of the question, so that it is the same for every model
                Random(hash_int("\0".join(options), 1 << 64)).shuffle(order)
            values["options"], answer = [options[i] for i in order], LETTERS[order.index(0)]
        if self.answer or self.options:
            graded["answer"] = answer
        text = self._template.render(**values, letters=LETTERS, shots=self._choose_shots(columns, shots))
        return Example(({"role": "user", "content": text},) if chat else text, graded, where)

    def _choose_shots(self, row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        if self.shots is None:
            return []
        same, column, ids = self.shots.same, self.shots.column, self.shots.ids
        chosen = [
            other
            for other in rows
            if (not same or other.get(same) == row.get(same)) and (not ids or other.get(column) in ids)
        ]
        return chosen[: self.shots.count]


@cache
def load_benchmarks() -> dict[str, Benchmark]:
    """Return all benchmarks by name."""
    return {name: _parse(name, table) for name, table in _read_table().items() if name != "reported"}


@cache
def load_reported() -> tuple[Reported, ...]:
    """Return what model cards report."""
    return tuple(
        Reported(model, entry["benchmark"], value, entry["source"], entry["settings"], entry.get("note", ""))
        for entry in _read_table()["reported"]
        for model, value in entry["models"].items()
    )


def find_reported(model: str, benchmark: Benchmark) -> tuple[Reported, ...]:
    """Return what the card of a model, named by its id on the hub, reports of a benchmark as a whole."""
    if benchmark.days != ("", "") or benchmark.release:
        return ()
    return tuple(each for each in load_reported() if (each.model, each.benchmark) == (model, benchmark.name))


def parse_benchmarks(names: Iterable[str]) -> tuple[Benchmark, ...]:
    """Return the named benchmarks; one text may have several, separated by commas.

    Raises:
        ConfigError: An unknown name, with similar ones; a release or days that it does not have; one that is named twice.
    """
    chosen = [_choose(name.strip()) for text in names for name in text.split(",") if name.strip()]
    keys = [benchmark.key for benchmark in chosen]
    if twice := [key for key in keys if keys.count(key) > 1]:
        raise ConfigError(f"the benchmark {twice[0]} is named twice: leave one out")
    return tuple(chosen)


def _choose(name: str) -> Benchmark:
    base, *settings = name.split(":")
    known = load_benchmarks()
    if base not in known:
        near = difflib.get_close_matches(base.lower().replace("-", ""), known, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(known)}."
        raise ConfigError(f"unknown benchmark {base!r}: {hint} policygrad eval --benchmark list shows them")
    benchmark = known[base]
    for text in settings:
        if re.fullmatch(r"v\d+", text) and benchmark.releases:
            if not 1 <= int(text[1:]) <= len(benchmark.releases):
                raise ConfigError(f"benchmark {name!r}: {base} has the releases v1 to v{len(benchmark.releases)}")
            benchmark = replace(benchmark, release=int(text[1:]))
        elif (days := _DAYS.fullmatch(text)) and benchmark.date and any(days.groups()):
            first, last = (_check_day(day, name) for day in days.groups())
            if first and last and first > last:
                raise ConfigError(f"benchmark {name!r}: {first} is after {last}: write the earlier day first")
            benchmark = replace(benchmark, days=(first, last))
        else:
            form = " or ".join(
                [f"{base}:v1 to {base}:v{len(benchmark.releases)}"] * bool(benchmark.releases)
                + [f"{base}:2024-08-01..2025-01-31"] * bool(benchmark.date)
            )
            raise ConfigError(f"benchmark {name!r}: {text!r} cannot be chosen; write {form or base}")
    return benchmark


def _check_day(day: str | None, name: str) -> str:
    try:
        return datetime.date.fromisoformat(day).isoformat() if day else ""
    except ValueError:
        raise ConfigError(f"benchmark {name!r}: {day} is no day; days are written 2024-08-01") from None


@dataclass(frozen=True)
class BenchmarkData:
    """A benchmark's rows, read but not yet prompts."""

    benchmark: Benchmark
    rows: Sequence[Row]
    shots: Sequence[Mapping[str, Any]] = ()

    def make_examples(self, *, chat: bool) -> list[Example]:
        """Return the problems, in the order of the data.

        Args:
            chat: Prompts are messages of a chat; otherwise plain text, for a model without a chat template.
        """
        return [self.benchmark.make_example(row, self.shots, chat=chat) for row in self.rows]


def load_benchmark_data(benchmark: Benchmark, folder: str | None = None, count: int = 0) -> BenchmarkData:
    """Read a benchmark's rows, and check their columns.

    Args:
        folder: Folder with its data, NAME.jsonl (.jsonl.gz, .parquet, .arrow, or a folder of `datasets`) and NAME-SPLIT.jsonl for
            the examples that its prompts show; None = the hub, or its cache.
        count: Number of problems, spread over the data; 0 = all.

    Raises:
        ConfigError: `datasets` is not installed, or the folder does not exist.
        DataError: The data is not there, has other columns, or has no problem of the chosen days.
    """
    check_benchmark_data(benchmark, folder)
    rows = benchmark.select(_open(benchmark, folder))
    if not rows:
        raise DataError(f"benchmark {benchmark.key}: no problem is of these days; choose others")
    if 0 < count < len(rows):  # spread, since some data is sorted by subject
        rows = [rows[i * len(rows) // count] for i in range(count)]
    shots = [row for _, row in _open(benchmark, folder, benchmark.shots.split)] if benchmark.shots else []
    data = BenchmarkData(benchmark, rows, shots)
    data.make_examples(chat=True)
    return data


def check_benchmark_data(benchmark: Benchmark, folder: str | None) -> None:
    """Raise an error, before anything is loaded, if a benchmark's data or the library that reads it is missing.

    Raises:
        ConfigError: `datasets` is not installed, or the folder does not exist.
        DataError: The folder has no such file.
    """
    if folder is not None:
        if not Path(folder).is_dir():
            raise ConfigError(f"--benchmark-data {folder} is no folder; make one with {benchmark.name}.jsonl in it")
        for split in ("", benchmark.shots.split if benchmark.shots else ""):
            _find_file(benchmark, folder, split)
    elif importlib.util.find_spec("datasets") is None:
        raise ConfigError(
            f"benchmark {benchmark.key}: its data, {benchmark.repository}, is read by datasets, which is not installed: "
            f"{install_command('benchmarks')}. {_describe_local(benchmark)}"
        )


def _open(benchmark: Benchmark, folder: str | None, split: str = "") -> list[Row]:
    """Return the rows of a benchmark's own split, or of another."""
    if folder is not None:
        source = open_source(_find_file(benchmark, folder, split), "{" + ", ".join(benchmark.columns) + "}")
        return [source[i] for i in range(len(source))]
    place = f"{HUB_PREFIX}{benchmark.repository}@{benchmark.revision}"
    try:
        if benchmark.releases:
            source = open_dataset(_load_files(benchmark), place)
        else:
            source = open_source(f"{place}:{benchmark.config}:{split or benchmark.split}", "")
        return [source[i] for i in range(len(source))]
    except DataError as error:
        access = f" Ask for access at https://huggingface.co/datasets/{benchmark.repository}, then `hf auth login`."
        raise DataError(
            f"benchmark {benchmark.key}: {error}.{access * benchmark.gated} {_describe_local(benchmark)}"
        ) from error


def _load_files(benchmark: Benchmark) -> Any:
    """Load the files of a release. Their repository has a loading script, which `datasets` does not run any more."""
    import datasets

    root = f"hf://datasets/{benchmark.repository}@{benchmark.revision}"
    names = benchmark.releases[: benchmark.release or len(benchmark.releases)]
    try:
        return datasets.load_dataset("json", data_files=[f"{root}/{name}" for name in names], split="train")
    except Exception as error:  # the class depends on what is wrong: the network, a name, a file
        message = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(f"{root}: cannot be loaded: {message}") from error


def _find_file(benchmark: Benchmark, folder: str, split: str) -> str:
    saved = Path(folder) / benchmark.name
    if (saved / "dataset_dict.json").is_file():  # all splits, as `datasets` saves them
        return f"{saved}:{split or benchmark.split}"
    stem = Path(folder) / (f"{benchmark.name}-{split}" if split else benchmark.name)
    for suffix in LOCAL_SUFFIXES:
        if (path := Path(f"{stem}{suffix}")).exists():
            return str(path)
    raise DataError(f"benchmark {benchmark.key}: {stem}.jsonl is not there. {_describe_local(benchmark)}")


def _describe_local(benchmark: Benchmark) -> str:
    """Say how the data is placed in a folder."""
    split = f"{benchmark.config or 'default'}, split {benchmark.split}"
    shots = benchmark.shots
    also = f", and those of its split {shots.split} as {benchmark.name}-{shots.split}.jsonl" if shots else ""
    return (
        f"Without network: write the rows of {benchmark.repository} ({split}; columns {', '.join(benchmark.columns)}) to "
        f"FOLDER/{benchmark.name}.jsonl or .parquet{also}, and give --benchmark-data FOLDER"
    )


def _read_table() -> dict[str, Any]:
    return tomllib.loads((files("policygrad.tasks") / "benchmarks.toml").read_text(encoding="utf-8"))


def _parse(name: str, table: Mapping[str, Any]) -> Benchmark:
    values: dict[str, Any] = _make_tuples(table)
    values["sampling"] = BenchmarkSampling(**values["sampling"])
    if "shots" in values:
        values["shots"] = Shots(**_make_tuples(values["shots"]))
    values["metrics"] = tuple(ExtraMetric(**metric) for metric in values.get("metrics", ()))
    return Benchmark(name, **values)


def _make_tuples(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}
