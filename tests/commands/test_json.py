"""--json: standard output is JSON that fits the documented schema, errors included, and nothing waits for an answer."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest

import policygrad as pg
from doubles.files import write_rows
from policygrad import cli
from policygrad.commands import COMMANDS, doctor
from policygrad.commands import engine as engine_command
from policygrad.commands.json_output import print_json, requests_json, reserve_stdout
from policygrad.commands.json_schemas import build_schema, load_outputs
from policygrad.samplers.engines.probe import ProbeResult

SOURCE = Path(pg.__file__).parent
SHORT = ("--steps", "1", "--prompts-per-step", "2", "--samples-per-prompt", "2", "--max-tokens", "6")
SHORT += ("--task", "sums.jsonl", "--reward", "exact_match", "--rewards.num-workers", "1")
EVALUATED = ("--evaluation.problems", "2", "--evaluation.samples-per-prompt", "1")
Command = Callable[..., tuple[int, str, str]]


class NoInput(io.StringIO):
    """A standard input that must not be read."""

    def read(self, *args: Any) -> str:
        raise AssertionError("standard input was read")

    readline = __next__ = read


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The current folder, with the task of `SHORT`; reasoning-gym's takes seconds to import."""
    write_rows(tmp_path / "sums.jsonl", [{"prompt": f"{i} + {i} =\n", "answer": str(2 * i)} for i in range(20)])
    monkeypatch.setattr(sys, "stdin", NoInput())
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def read_json(run_command: Command, here: Path) -> Callable[..., list[Any]]:
    """`read_json(0, "show", "grpo")` -> the lines that the command printed, which fit its schema; 0 is its exit code."""

    def call(expected: int, *args: str) -> list[Any]:
        code, out, err = run_command(*args, "--json")
        assert code == expected, err
        values = [json.loads(line) for line in out.splitlines()]
        for value in values:
            jsonschema.validate(value, build_schema(args[0]))
        return values

    return call


def test_every_command_has_a_schema_but_the_one_that_prints_a_script(run_command: Command) -> None:
    assert [name for name in COMMANDS if not load_outputs(name)] == ["completion"]
    for command in COMMANDS.keys() - {"completion"}:
        code, out, _ = run_command(command, "--json-schema")
        assert code == 0
        jsonschema.Draft202012Validator.check_schema(json.loads(out))
    code, _, err = run_command("completion", "--json-schema")
    assert code == 2
    assert "completion has no --json: its output is a script" in err


def test_a_schema_refuses_other_values() -> None:
    for value in (
        {},
        {"event": "step", "step": "1", "metrics": {}},
        {"event": "step", "metrics": {}},
        {"error": "x"},
        [],
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(value, build_schema("train"))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"findings": [{"status": "fine"}]}, build_schema("doctor"))


def test_a_run_from_training_to_its_report(read_json: Callable[..., list[Any]], run_command: Command) -> None:
    [planned] = read_json(0, "train", "grpo", *SHORT, *EVALUATED, "--dry-run")
    assert 'name = "grpo"' in planned["toml"]
    events = read_json(0, "train", "grpo", *SHORT, *EVALUATED, "--output", "run")
    kinds = [event["event"] for event in events if event["event"] not in ("note", "phase")]
    assert kinds == ["started", "evaluation", "step", "evaluation", "finished"]
    assert events[-1]["result"] == json.loads(Path("run/result.json").read_text())
    assert Path(events[-1]["model"]).is_dir()
    assert events[-1]["next"]["look at it"] == "policygrad report run"
    [row] = read_json(0, "eval", "run", "--problems", "2", "--samples", "2")
    assert row["pass"].keys() == {"1", "2"}
    [models] = read_json(0, "eval", "run", "tiny", "--problems", "2", "--samples", "2")
    assert models["differences"][0]["less"] == "tiny"
    [verified] = read_json(0, "verify", "run")
    assert verified["status"] == "holds"
    [page] = read_json(0, "report", "run")
    assert page == {"page": "run/report.html", "url": None, "runs": ["run"], "export": None}
    [error] = read_json(2, "export", "run")
    assert "the trained model is already in run/model" in error["error"]["message"]


@pytest.mark.full
def test_a_stopped_run_says_how_it_continues(
    read_json: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    *_, last = read_json(0, "train", "grpo", *SHORT, "--steps", "2", *EVALUATED, "--output", "run", "--stop-after", "1")
    assert last["event"] == "stopped"
    assert last["resume"] == ["policygrad", "train", "--resume", "run"]
    [exported] = read_json(0, "export", "run")
    assert Path(exported["path"]).is_dir()
    *_, last = read_json(0, *last["resume"][1:])
    assert (last["event"], last["steps"]) == ("finished", 2)


@pytest.mark.full
def test_fine_tuning_and_reward_models(read_json: Callable[..., list[Any]], tmp_path: Path) -> None:
    pairs = [{"prompt": f"{i} + 1 =\n", "completion": str(i + 1)} for i in range(8)]
    events = read_json(
        0, "sft", "--data", write_rows(tmp_path / "sft.jsonl", pairs), "--output", "tuned", "--epochs", "1"
    )
    assert events[-1]["event"] == "finished"
    pairs = [{"prompt": f"{i} + 1 =\n", "chosen": str(i + 1), "rejected": "x"} for i in range(8)]
    data = write_rows(tmp_path / "preferences.jsonl", pairs)
    events = read_json(0, "reward-model", "--data", data, "--output", "rewards", "--epochs", "1")
    assert events[-1]["event"] == "finished"


def test_explanations(read_json: Callable[..., list[Any]]) -> None:
    [example] = read_json(0, "init", "grpo")
    [converted] = read_json(0, "convert", "algorithm.adv_estimator=grpo", "data.train_files=a.parquet", "mine.x=1")
    assert (converted["library"], converted["options"], converted["unknown"]) == ("verl", 3, ["mine.x=1"])
    assert 'task = "a.parquet"  # data.train_files=a.parquet' in converted["toml"]
    assert 'name = "grpo"' in example["toml"]
    [matrix] = read_json(0, "algorithms")
    assert matrix["grpo"]["gate"]["part"] == "Clip"
    assert read_json(0, "show")[0]["parts"]["gate"]
    assert read_json(0, "show", "judge")[0]["needs_options"]
    [algorithm] = read_json(0, "show", "grpo")
    assert algorithm["parts"] == {k: v for k, v in matrix["grpo"].items() if k != "departs"}
    [part] = read_json(0, "show", "Clip")
    assert part["places"] == ["gate"]
    assert "grpo" in part["used_by"]
    [metric] = read_json(0, "show", "rewards/mine")
    assert (metric["kind"], metric["name"]) == ("metric", "rewards/mine")


def test_plans(read_json: Callable[..., list[Any]]) -> None:
    [plan] = read_json(0, "plan", "grpo", "--model", "Qwen3-8B", "--gpus", "H100:8")
    assert plan["plan"]["fits"] in (True, False)
    [commands] = read_json(0, "compare", "grpo", "dapo", "--seeds", "2", "--lr-grid", "1e-3,3e-3", "--dry-run")
    reported = [run for run in commands["commands"] if run["best_of"]]
    assert len(commands["commands"]) == 2 * 2 * 2 + len(reported) == 12
    assert reported[0]["best_of"] == [1e-3, 3e-3]


def test_the_machine(read_json: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "examine_hub", lambda environment: ())
    [result] = read_json(0, "doctor")
    assert {check["group"] for check in result["findings"]} >= {"Machine", "Learner", "Sampler"}


@pytest.mark.full
def test_the_lab(read_json: Callable[..., list[Any]]) -> None:
    [experiments] = read_json(0, "lab", "--list-experiments")
    name = next(iter(experiments["experiments"]))
    [measured] = read_json(0, "lab", "--algorithm", "dr_grpo", "--experiment", name)
    assert [row["name"] for row in measured["algorithms"]] == ["dr_grpo"]
    assert [finding["name"] for finding in measured["findings"]] == [name]
    if find_spec("gymnasium"):
        [control] = read_json(0, "lab", "control", "--algorithm", "reinforce", "--steps", "64", "--episodes", "1")
        assert control["curve"]


def test_engines(read_json: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    [command] = read_json(0, "engine", "vllm", "--print")
    assert command["argv"]

    async def answer(*args: Any) -> Any:
        return ProbeResult(tokens=7, difference=1e-6)

    sampler = SimpleNamespace(name="vLLM", handshake=answer, probe=answer, close=answer)
    monkeypatch.setattr(engine_command, "detect_engine", answer)
    monkeypatch.setattr(engine_command, "SamplerConfig", lambda **options: None)
    monkeypatch.setattr(engine_command, "build_engine_sampler", lambda *args: sampler)
    [checked] = read_json(0, "engine", "check", "http://127.0.0.1:1")
    assert (checked["tokens"], checked["difference"]) == (7, 1e-6)
    monkeypatch.setattr(engine_command, "install", lambda *args: SimpleNamespace(version="1.2"))
    [installed] = read_json(0, "engine", "install", "vllm", "--into", "venv")
    assert installed["train"][-2:] == ["--sampler.python", "venv"]


def enter(argv: list[str], output: int) -> int:
    """Be the command in a fork of this process: its outputs are `output` and nothing, and it hears Ctrl-C."""
    os.dup2(output, 1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return cli.main(argv)


@pytest.mark.full
@pytest.mark.parametrize("command", ["serve", "proxy", "report"])
def test_servers_print_their_address_and_end(command: str, here: Path) -> None:
    if command == "serve":
        for name in ("tinker", "starlette", "uvicorn"):
            pytest.importorskip(name)
        argv = ["serve", "--model", "tiny", "--port", "0", "--folder", "served"]
    elif command == "proxy":
        argv = ["proxy", "--model", "tiny"]
    else:
        assert cli.main(["train", "grpo", *SHORT, "--evaluation.problems", "0", "--output", "run"]) == 0
        argv = ["report", "run", "--watch"]
    child = subprocess.Popen([sys.executable, "-m", "policygrad", *argv, "--json"], stdout=subprocess.PIPE, text=True)
    with child, child.stdout as stdout:  # type: ignore[union-attr]
        lines = [stdout.readline()]
        with contextlib.suppress(urllib.error.HTTPError):  # it answers, so it is past its start
            urllib.request.urlopen(json.loads(lines[0])["url"]).read()
        child.send_signal(signal.SIGINT)
        lines += stdout.readlines()
    assert child.returncode == 0
    values = [json.loads(line) for line in lines]
    for value in values:
        jsonschema.validate(value, build_schema(command))
    assert values[0]["url"].startswith("http://127.0.0.1:")
    assert [value["event"] for value in values[1:]] == ([] if command == "report" else ["stopped"])


def test_an_error_is_an_object_beside_the_sentence(run_command: Command) -> None:
    code, out, err = run_command("train", "grppo", "--json")
    error = json.loads(out)["error"]
    assert (code, error["kind"], error["exit_code"]) == (2, "ConfigError", 2)
    assert err == f"error: {error['message']}\n"
    code, out, err = run_command("grppo", "--json")
    assert "unknown command" in json.loads(out)["error"]["message"]


def test_an_option_that_cannot_be_parsed_is_an_error_too(run_command: Command) -> None:
    code, out, err = run_command("eval", "tiny", "--problems", "many", "--json")
    error = json.loads(out)["error"]
    assert (code, error["kind"]) == (2, "UsageError")
    assert "--problems" in error["message"]
    assert not re.search("[│─╭]", error["message"])
    assert "--problems" in err


def test_a_bug_and_an_interrupt_are_reported(
    run_command: Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(args: list[str]) -> int:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("policygrad.commands.show.show", fail)
    with pytest.raises(ZeroDivisionError):
        cli.main(["show", "--json"])
    assert json.loads(capsys.readouterr().out)["error"] == {
        "kind": "ZeroDivisionError",
        "message": "a bug",
        "exit_code": 1,
    }

    def interrupt(args: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("policygrad.commands.show.show", interrupt)
    code, out, _ = run_command("show", "--json")
    assert (code, json.loads(out)["error"]["exit_code"]) == (130, 130)


def test_help_stays_text_and_options_of_runs_are_not_meant(run_command: Command) -> None:
    code, out, _ = run_command("show", "--json", "--help")
    assert code == 0
    assert "usage: policygrad show" in out
    assert requests_json(["compare", "--json", "--", "--steps", "1"])
    assert not requests_json(["compare", "--", "--json"])


NOISY = """
import os, sys
from policygrad.cli import main
from policygrad.commands import show

def noisy(args):
    print("from Python")
    os.write(1, b"from a library\\n")
    os.system("echo from a child")
    return original(args)

original, show.show = show.show, noisy
sys.exit(main(["show", "kl", "--json"]))
"""


def test_what_else_is_printed_goes_to_standard_error(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", NOISY], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["name"] == "kl"
    assert {"from Python", "from a library", "from a child"} <= {*done.stderr.splitlines()}


def test_values_that_json_has_not(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": float("nan"), "b": [float("inf"), 1.5], "c": Path("x"), 1: ("Ψ",)})
    assert json.loads(capsys.readouterr().out) == {"a": None, "b": [None, 1.5], "c": "x", "1": ["Ψ"]}
    with reserve_stdout():
        print("text")
        print_json("json")
    message = capsys.readouterr()
    assert (message.out, message.err) == ('"json"\n', "text\n")


def test_a_text_that_is_no_unicode_is_still_json() -> None:
    code = "from policygrad.commands.json_output import *\nwith reserve_stdout(): print_json('Ψ\\udc80')"
    environment = {"PATH": "", "PYTHONPATH": str(SOURCE.parent), "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, env=environment)
    assert json.loads(done.stdout.decode()) == "Ψ\udc80"


def test_nothing_in_the_source_asks() -> None:
    """No call of input(), and no getpass: programs and schedulers run every command. `chat` asks in a terminal alone."""
    for path in {*SOURCE.rglob("*.py")} - {SOURCE / "commands" / "chat.py"}:
        text = path.read_text(encoding="utf-8")
        if not re.search(r"\binput\s*\(|getpass", text):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id != "input", path
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            assert "getpass" not in names, path


def test_without_arguments_a_command_does_not_wait(run_command: Command, here: Path) -> None:
    """Those that would begin work or serve are only asked for their options."""
    for command in COMMANDS:
        code, out, err = run_command(command, *["--help"] * (command in ("train", "serve", "proxy", "lab", "doctor")))
        assert code in (0, 2), (command, err)
        assert "Traceback" not in err, command
        assert out or err, command
