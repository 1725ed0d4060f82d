"""Files of runs, comparisons and models that somebody has damaged: one refusal that names file, value and remedy, and at once."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import policygrad as pg
from doubles.comparison import plan, row, write_run
from doubles.files import write_rows
from doubles.runs import row as completion
from doubles.runs import run_folder
from policygrad.compare import runner
from policygrad.compare.plan import open_comparison
from policygrad.errors import ConfigError, DataError, ModelError, RunError
from policygrad.models.loading import resolve_model
from policygrad.planning.hardware import MAX_DEVICES
from policygrad.trackers import JsonlTracker
from policygrad.training.supervised import BatchSchedule
from policygrad.utils.filesystem import MAX_DEPTH, MAX_LINE_BYTES, UnusableDataError, parse_json, read_json, read_toml

Command = Callable[..., tuple[int, str, str]]
DEEP = "[" * 100_000
HUGE = "1" + "0" * 400
pipes = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
endless = pytest.mark.skipif(not Path("/dev/zero").exists(), reason="this system has no /dev/zero")


def refused(results: tuple[int, str, str], *said: str) -> None:
    """The command ended with one message that has all of these words."""
    code, _, err = results
    assert code == 2, err
    text = " ".join(err.split())
    assert "Traceback" not in text
    for words in said:
        assert words in text


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run of two steps, with a completion."""
    steps = [(1, {"reward": 0.5, "time/step": 1.0}), (2, {"reward": 0.6, "time/step": 1.0})]
    return run_folder(tmp_path / "run", steps, [(1, [completion("1+1=", "2", 1.0)])])


def append(file: Path, text: str) -> None:
    with file.open("a", encoding="utf-8") as there:
        there.write(text + "\n")


# ---- what is read


@pytest.mark.parametrize(
    "text",
    [
        DEEP,
        "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1),
        '{"a":' * 50_000,
        "NaN",
        "[-Infinity]",
        "1e999",
        HUGE,
        f"-{HUGE}",
        "9" * 99 + "e250",
    ],
)
def test_json_beyond_depth_and_range_is_unusable(text: str) -> None:
    with pytest.raises(UnusableDataError):
        parse_json(text)
    with pytest.raises(UnusableDataError):
        parse_json(text.encode())


def test_json_inside_depth_and_range_is_what_json_gives() -> None:
    deepest = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    texts = [
        deepest,
        f'"{"[" * 1000} {HUGE} 1e999"',
        "1e308",
        "9" * 150,
        f"0.{'0' * 400}1",
        '"\\ud800"',
        '{"a": [1, 2.5, null]}',
    ]
    for text in texts:
        assert parse_json(text) == parse_json(text.encode()) == json.loads(text)


def test_toml_of_dotted_names_is_refused_beyond_the_depth(tmp_path: Path) -> None:
    """Which the parser reads without going deep itself."""
    file = tmp_path / "a.toml"
    file.write_text(".".join("a" * (MAX_DEPTH + 1)) + " = 1")
    with pytest.raises(UnusableDataError, match="deeper than 100"):
        read_toml(file)


# ---- report


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"step": 3, "reward": NaN}', "NaN is not a finite number"),
        ('{"step": 3, "reward": 1e999}', "1e999 is not a finite number"),
        (f'{{"step": 3, "reward": {HUGE}}}', "(401 digits) is not a finite number"),
        (f'{{"step": 3, "reward": {DEEP}', "brackets nested deeper"),
    ],
)
def test_report_refuses_metrics_that_no_reader_holds(run: Path, line: str, said: str, run_command: Command) -> None:
    append(run / "metrics.jsonl", line)
    refused(run_command("report", str(run)), "metrics.jsonl, line 3", said, "delete the line")


def test_report_of_large_numbers_has_finite_sums(run: Path, run_command: Command) -> None:
    for step in (3, 4, 5):
        append(
            run / "metrics.jsonl",
            json.dumps({"step": step, "reward": 1.7e308, "time/step": 1.7e308, "tokens": 1.7e308}),
        )
    assert run_command("report", str(run))[0] == 0


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"turns": [None]}, "turns is [None]"),
        ({"turns": 3}, "turns is 3"),
        ({"rewards": [1.0]}, "rewards is [1.0]"),
        ({"reward": "good"}, "reward is 'good'"),
        ({"reward": float("nan")}, "NaN is not a finite number"),
        ({"rewards": {"a": float("inf")}}, "Infinity is not a finite number"),
        ({"advantage": 10**400}, "(401 digits)"),
    ],
)
@pytest.mark.parametrize("large", [False, True])
def test_report_refuses_completions_that_no_run_writes(
    run: Path, more: dict[str, Any], said: str, large: bool, run_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    if large:  # only a part of the file is read then
        monkeypatch.setattr("policygrad.report.page.MAX_PAGE_CHARS", 1)
    append(run / "completions.jsonl", json.dumps({"step": 2} | completion("1+1=", "2", 1.0) | more))
    refused(run_command("report", str(run)), "completions.jsonl", said, "delete the line")


def test_report_shows_half_a_surrogate_pair_as_it_is_written(run: Path, run_command: Command) -> None:
    """A model may write one, and the run's own file holds it."""
    with JsonlTracker(run) as files:
        files.append_completions(2, [completion("1+1=\ud800", "\udfff2", 1.0)])
    assert run_command("report", str(run))[0] == 0
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "1+1=\\ud800" in page
    assert "\\udfff2" in page


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('algorithm = ["grpo"]', "algorithm is ['grpo'], but should be a table"),
        ('algorithm = "grpo"', "algorithm is 'grpo', but should be a table"),
        ("a = " + DEEP, "nested deeper"),
        (".".join("a" * 5000) + " = 1", "deeper than 100"),
    ],
)
def test_report_refuses_a_configuration_of_another_kind(run: Path, text: str, said: str, run_command: Command) -> None:
    (run / "run.toml").write_text(text, encoding="utf-8")
    refused(run_command("report", str(run)), "run.toml", said, "from a copy")


@pytest.mark.parametrize(
    ("text", "said"),
    [("a = " + DEEP, "nested deeper"), ("a = ", "not valid TOML"), ("seed = 1", "has no table `learner`")],
)
def test_export_refuses_a_configuration_that_no_run_writes(
    run: Path, text: str, said: str, run_command: Command
) -> None:
    (run / "run.toml").write_text(text, encoding="utf-8")
    refused(run_command("export", str(run)), "run.toml", said)


@pytest.mark.parametrize("name", ["metrics.jsonl", "completions.jsonl", "run.toml", "result.json"])
@pytest.mark.parametrize("kind", ["pipe", "endless"])
@pipes
@endless
def test_report_waits_for_no_pipe_and_reads_no_device(run: Path, name: str, kind: str, run_command: Command) -> None:
    """A result that cannot be read is no result, and completions that are no file are none."""
    (run / name).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(run / name)
    else:
        (run / name).symlink_to("/dev/zero")
    results = run_command("report", str(run))
    if name == "metrics.jsonl":
        refused(results, "metrics.jsonl cannot be read: it is not a regular file")
    elif name == "run.toml":
        refused(results, "holds no run")
    else:
        assert results[0] == 0


def test_report_refuses_a_line_without_an_end(run: Path, run_command: Command) -> None:
    with (run / "metrics.jsonl").open("r+b") as file:
        file.truncate(100 * MAX_LINE_BYTES)  # a hole: nothing of it is on the disk
    refused(run_command("report", str(run)), "metrics.jsonl cannot be read: it has a line longer than 64 MiB")


def test_report_of_versions_of_another_kind_has_none(run: Path, run_command: Command) -> None:
    folder = run / "checkpoints" / "step-000001"
    folder.mkdir(parents=True)
    for text in (
        '{"state": [1]}',
        '{"state": {"fingerprint": 3}}',
        '{"state": {"fingerprint": {"versions": "x"}}}',
        DEEP,
        "NaN",
    ):
        (folder / "state.json").write_text(text)
        assert run_command("report", str(run))[0] == 0


@pytest.mark.parametrize("host", ["a\0b", "a" * 64 + ".example", "\udcff"])
def test_report_refuses_what_is_no_host(run: Path, host: str, run_command: Command) -> None:
    refused(run_command("report", str(run), "--watch", "--host", host), repr(host)[1:-1])


@pytest.mark.parametrize(
    "name", ["run.toml", "metrics.jsonl", "completions.jsonl", "result.json", "model/config.json", "../run/run.toml"]
)
@pytest.mark.parametrize("command", ["report", "plan", "lab"])
def test_output_refuses_every_file_of_a_run(run: Path, name: str, command: str, run_command: Command) -> None:
    (run / "model").mkdir()
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    first = {"report": [str(run)], "plan": ["--model", "tiny"], "lab": ["--algorithm", "grpo"]}[command]
    refused(
        run_command(command, *first, "--output", str(run / name)),
        "--output",
        "is a file of the run",
        "use another name",
    )
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_output_beside_a_runs_files_is_written(run: Path, run_command: Command) -> None:
    for name in ("report.html", "other.html"):
        assert run_command("report", str(run), "--output", str(run / name))[0] == 0
    (run / "link.html").symlink_to(run / "run.toml")
    refused(run_command("report", str(run), "--output", str(run / "link.html")), "is a file of the run")


# ---- compare


def test_compare_refuses_a_row_with_an_open_quote(run_command: Command) -> None:
    said = ("No closing quotation", "Close the quotation")
    refused(run_command("compare", "a=grpo --task 'x", "--dry-run"), "the row", *said)
    refused(run_command("compare", "grpo", "--options", "grpo=--task 'x", "--dry-run"), "--options", *said)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("result.json", "[1]"),
        ("result.json", '"done"'),
        ("result.json", DEEP),
        ("metrics.jsonl", "[1]\n"),
        ("metrics.jsonl", '{"step": 0, "eval/reward": NaN}\n'),
        ("metrics.jsonl", f'{{"step": 0, "eval/reward": {HUGE}}}\n'),
        ("metrics.jsonl", '{"step": 0, "eval/reward": "x"}\n{"step": 12, "eval/reward": 1, "tokens/sampled": 2}\n'),
        ("metrics.jsonl", '{"step": 12, "tokens/sampled": "many", "eval/reward": 1}\n'),
    ],
)
def test_compare_names_a_run_that_is_damaged(tmp_path: Path, name: str, text: str) -> None:
    folder = tmp_path / "runs" / "a"
    write_run(folder, 0.8, None, 0)
    (folder / name).write_text(text)
    with pytest.raises(RunError, match="runs/a"):
        runner.read_outcome(folder)


@pipes
def test_compare_waits_for_no_pipe(tmp_path: Path, run_command: Command) -> None:
    folder = tmp_path / "runs" / "a"
    write_run(folder, 0.8, None, 0)
    (folder / "metrics.jsonl").unlink()
    os.mkfifo(folder / "metrics.jsonl")
    with pytest.raises(RunError, match="it is not a regular file"):
        runner.read_outcome(folder)
    os.mkfifo(tmp_path / "plan.json")
    refused(run_command("compare", "--resume", str(tmp_path)), "plan.json", "a pipe without a writer")


@pytest.mark.parametrize("text", [DEEP, "[1]", '{"rows": 3}', '{"rows": [3]}', '{"rows": [[]]}', '"x"'])
def test_compare_refuses_a_plan_of_another_kind(tmp_path: Path, text: str, run_command: Command) -> None:
    (tmp_path / "plan.json").write_text(text)
    refused(run_command("compare", "--resume", str(tmp_path)), "plan.json is not a plan of a comparison")


@pytest.mark.parametrize("kind", ["folder", "pipe"])
@pipes
def test_compare_refuses_a_lock_that_is_no_file(tmp_path: Path, kind: str, run_command: Command) -> None:
    folder = tmp_path / "comparison"
    open_comparison(folder, plan(row("grpo")))
    (folder / "lock").mkdir() if kind == "folder" else os.mkfifo(folder / "lock")
    refused(run_command("compare", "--resume", str(folder)), "lock is not a regular file", "delete it")


@pytest.mark.parametrize("text", ["[1]", '{"cpu_seconds": "x"}', DEEP])
def test_compare_refuses_costs_of_another_kind(tmp_path: Path, text: str) -> None:
    folder = tmp_path / "runs" / "a"
    write_run(folder, 0.8, None, 0)
    folder.with_name("a.cost.json").write_text(text)
    with pytest.raises(RunError, match=r"a\.cost\.json cannot be read.*delete it"):
        runner.read_outcome(folder)


# ---- plan and models

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 1024,
    "num_attention_heads": 8,
    "intermediate_size": 4096,
    "num_hidden_layers": 4,
    "vocab_size": 1000,
}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", "wide"),
        ("hidden_size", -1024),
        ("hidden_size", 1024.5),
        ("hidden_size", None),
        ("hidden_size", [1024]),
        ("hidden_size", True),
        ("hidden_size", 2**60),
        ("num_attention_heads", 0),
        ("num_attention_heads", 7),
        ("num_key_value_heads", 0),
        ("num_key_value_heads", 3),
        ("head_dim", -1),
        ("intermediate_size", 0),
        ("num_hidden_layers", 10**9),
        ("vocab_size", {}),
    ],
)
def test_plan_refuses_shapes_that_no_model_has(tmp_path: Path, key: str, value: object, run_command: Command) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA | {key: value}))
    refused(run_command("plan", "--model", str(file)), "config.json", key, json.dumps(value)[:10])


@pytest.mark.parametrize("text", ["NaN", "1e999", HUGE, DEEP])
def test_plan_refuses_a_configuration_that_no_reader_holds(tmp_path: Path, text: str, run_command: Command) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA).replace("1024", text))
    refused(run_command("plan", "--model", str(file)), "config.json cannot be read as a configuration")


@pytest.mark.parametrize("count", [MAX_DEVICES + 1, 99999999999999999999, int("9" * 4000)])
def test_plan_refuses_more_devices_than_there_are(count: int, run_command: Command) -> None:
    refused(run_command("plan", "--gpus", f"H100:{count}"), "--gpus", f"from 1 to {MAX_DEVICES:,}")


def test_plan_of_the_most_devices_comes_to_an_end(run_command: Command) -> None:
    assert run_command("plan", "--model", "tiny", "--gpus", f"H100:{MAX_DEVICES}", "--max-staleness", "1")[0] == 0


def test_a_model_of_a_billion_layers_is_refused_before_it_is_built(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in Path(resolve_model("tiny")).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 10**9}))
    from policygrad.models.classifier import load_classifier
    from policygrad.models.loading import load_model

    for load in (load_model, load_classifier):
        with pytest.raises(ModelError, match="num_hidden_layers must be at most 1,000, not 1000000000"):
            load(str(folder))


def test_adapters_of_a_rank_beyond_every_matrix_are_refused() -> None:
    pytest.importorskip("peft")
    from policygrad.models.loading import load_model
    from policygrad.models.lora_config import Lora

    with pytest.raises(
        ConfigError, match="rank must be at most 128, the highest rank of the model's matrices, not 1,000,000"
    ):
        load_model("tiny", lora=Lora(rank=10**6))


# ---- numbers without an end


def test_epochs_without_an_end_are_refused(run_command: Command) -> None:
    most = "at most"
    refused(run_command("sft", "--data", "a.jsonl", "--epochs", "1000000000000000", "--dry-run"), "epochs", most)
    words = ("train", "ppo", "--dry-run", "--algorithm.update-rule.epochs", "1000000000000000")
    refused(run_command(*words), "GradientSteps.epochs", most)


def test_steps_of_many_epochs_are_made_when_they_are_asked_for() -> None:
    units = [(i,) for i in range(10)]
    many, few = BatchSchedule(units, 10**9, 4, seed=3), BatchSchedule(units, 5, 4, seed=3)
    assert len(many) == 3 * 10**9
    assert [many[i] for i in range(len(few))] == list(few)
    assert sorted(row for i in (3, 2, 1) for row in many[len(many) - i]) == list(range(10))
    assert many[14] == few[14]  # epoch after epoch, whichever was asked for before
    with pytest.raises(IndexError):
        many[len(many)]


def test_steps_of_uneven_units_are_counted_or_refused() -> None:
    uneven = [(0, 1, 2), (3,), (4, 5), (6,)]
    steps = BatchSchedule(uneven, 50, 3, seed=0)
    assert sum(len(step) for step in steps) == 50 * 7
    assert len(list(steps)) == len(steps)
    with pytest.raises(ConfigError, match="epochs must be at most 2,500,000 for these 4 prompts"):
        BatchSchedule(uneven, 10**9, 3, seed=0)


@pytest.mark.full
def test_sft_of_ten_million_epochs_begins_at_once(tmp_path: Path, run_command: Command) -> None:
    rows = write_rows(tmp_path / "a.jsonl", [{"prompt": f"{i}+1=", "completion": str(i + 1)} for i in range(16)])
    out = tmp_path / "run"
    words = ("sft", "--data", rows, "--epochs", "10000000", "--output", str(out), "--stop-after", "1", "--plain")
    code, _, err = run_command(*words)
    assert code in (0, 75), err
    assert len((out / "metrics.jsonl").read_text().splitlines()) >= 1


@pytest.mark.parametrize("command", [("lab",), ("lab", "control")])
def test_lab_refuses_a_seed_below_0(command: tuple[str, ...], run_command: Command) -> None:
    refused(run_command(*command, "--seed", "-1"), "seed must be at least 0 and below 2**63, not -1")


# ---- names and resumed runs


@pytest.mark.parametrize(
    "argv",
    [
        ("report", "RUN", "--output", "a\0b.html"),
        ("lab", "--output", "a\0b.html"),
        ("plan", "--output", "a\0b.html"),
        ("sft", "--data", "a\0b.jsonl"),
        ("sft", "--data", "a\0b"),
        ("train", "grpo", "--task", "a\0b.jsonl"),
        ("report", "RUN", "--watch", "--host", "a\0b"),
    ],
)
def test_commands_refuse_a_nul(run: Path, argv: tuple[str, ...], run_command: Command) -> None:
    refused(run_command(*(word.replace("RUN", str(run)) for word in argv)), "a\\x00b", "NUL character")


def test_data_whose_name_holds_a_nul_is_refused(tmp_path: Path) -> None:
    for name in ("a\0b.jsonl", "a\0b.jsonl.gz", "a\0b.parquet", "a\0b"):
        with pytest.raises(DataError):
            pg.train_sft(pg.SFTConfig(data=name, output=str(tmp_path / "run")))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (f'{{"step": 1, "reward": {DEEP}', "brackets nested deeper"),
        (f'{{"step": 1, "reward": {HUGE}}}', "(401 digits)"),
    ],
)
@pytest.mark.parametrize("last", [True, False])
def test_a_runs_metrics_that_no_reader_holds_are_refused_when_it_goes_on(
    tmp_path: Path, line: str, said: str, last: bool
) -> None:
    (tmp_path / "metrics.jsonl").write_text(line + "\n" + ("" if last else '{"step": 2}\n'))

    def go_on() -> None:
        with JsonlTracker(tmp_path) as files:
            files.truncate_after(2)
            files.history("reward")

    with pytest.raises(RunError, match=r"metrics\.jsonl.*delete the line") as error:
        go_on()
    assert said in str(error.value)


@pipes
def test_json_of_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.json")
    with pytest.raises(OSError, match="a pipe without a writer"):
        read_json(tmp_path / "a.json")


# ---- names and files that a command is given


@pytest.mark.parametrize(
    "argv",
    [
        ("train", "--environment", "a" * 5000),
        ("skills", "--into", "a" * 300),
        ("verify", "a" * 300),
        ("export", "a" * 300),
        ("report", "a" * 300),
        ("audit", "a" * 300),
        ("doctor", "--python", "a" * 300),
    ],
)
def test_a_name_that_no_file_can_have_is_refused(argv: tuple[str, ...], run_command: Command) -> None:
    refused(run_command(*argv), "too long" if argv[0] != "train" else "--environment")


def test_skills_do_not_replace_a_file_that_is_not_text(tmp_path: Path, run_command: Command) -> None:
    guide = tmp_path / "policygrad-debug-run" / "SKILL.md"
    guide.parent.mkdir()
    guide.write_bytes(b"\xff\xfe")
    refused(run_command("skills", "--into", str(tmp_path)), "would be replaced")
    if hasattr(os, "mkfifo"):
        guide.unlink()
        os.mkfifo(guide)
        refused(run_command("skills", "--into", str(tmp_path)), "would be replaced")
    assert [path.name for path in tmp_path.iterdir()] == ["policygrad-debug-run"]


@pipes
@pytest.mark.parametrize(
    "name",
    [
        *("config.json", "model.safetensors"),
        *(pytest.param(name, marks=pytest.mark.full) for name in ("tokenizer.json", "chat_template.jinja")),
    ],
)
def test_a_pipe_in_a_model_folder_is_refused(
    tmp_path: Path, random_model: Path, run_command: Command, name: str
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for file in random_model.iterdir():
        (model / file.name).symlink_to(file)
    (model / name).unlink(missing_ok=True)
    os.mkfifo(model / name)
    results = run_command("train", "--model", str(model), "--output", str(tmp_path / "run"))
    refused(results, name, "not a regular file" if name != "config.json" else "pipe", "restore")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", [("engine", "llama_cpp", "--print"), ("export",), ("train", "--output")])
def test_a_deep_configuration_of_a_model_is_refused(
    tmp_path: Path, run_command: Command, command: tuple[str, ...]
) -> None:
    (tmp_path / "config.json").write_text('{"a":' * 50_000)
    (tmp_path / "model.safetensors").touch()
    if command == ("export",):
        results = run_command("export", str(tmp_path), "--merge", "--output", str(tmp_path / "merged"))
    else:
        argv = (*command, str(tmp_path / "run")) if command[0] == "train" else command
        results = run_command(*argv, "--model", str(tmp_path))
    refused(results)


def test_a_folder_of_a_server_that_is_a_file_is_refused(tmp_path: Path, run_command: Command) -> None:
    (tmp_path / "file").touch()
    refused(run_command("serve", "--folder", str(tmp_path / "file"), "--port", "0"), "--folder", "choose another")


@endless
def test_keys_of_a_server_are_read_from_a_file_that_ends(tmp_path: Path, run_command: Command) -> None:
    refused(
        run_command("serve", "--folder", str(tmp_path), "--api-keys", "/dev/zero", "--port", "0"),
        "--api-keys",
        "larger than",
    )


@pipes
def test_files_that_nobody_reads_are_not_written(tmp_path: Path, run_command: Command) -> None:
    os.mkfifo(tmp_path / "pipe")
    refused(run_command("plan", "grpo", "--output", str(tmp_path / "pipe")), "--output", "choose another")
    refused(run_command("proxy", "--record", str(tmp_path / "pipe")), "--record", "choose another")


def test_proxy_refuses_completions_of_less_than_a_token(run_command: Command) -> None:
    refused(run_command("proxy", "--max-tokens", "-1"), "--max-tokens must be at least 1")


def test_a_trace_of_deep_brackets_is_passed_over(run: Path, run_command: Command) -> None:
    (run / "trace.json").write_text(f'[\n{{"ph":"X","pid":1,"name":"step","ts":0,"dur":5000000,"args":{DEEP}\n')
    code, _, err = run_command("report", str(run))
    assert (code, "Traceback" in err) == (0, False)
