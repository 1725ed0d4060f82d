"""docs/evaluation.md: its example runs, its commands parse, and its JSON fields and files are those there are."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from doubles.small_task import write_task
from policygrad.commands.evaluate import parse_options
from policygrad.tasks.benchmarks import load_benchmarks, parse_benchmarks

PAGE = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text(encoding="utf-8")
BLOCKS: dict[str, str] = dict(re.findall(r"```python (\S+)\n(.*?)```", PAGE, re.DOTALL))
SMALL = (
    "--steps",
    "1",
    "--prompts-per-step",
    "2",
    "--samples-per-prompt",
    "2",
    "--evaluation.problems",
    "0",
    "--rewards.num-workers",
    "1",
    "--plain",
)
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    exec(compile(BLOCKS["words"], "words", "exec", dont_inherit=True), {"__name__": "page"})
    return tmp_path


def shown(command: str) -> list[str]:
    [line] = re.findall(rf"^    \$ policygrad ({command} .*)$", PAGE, re.MULTILINE)
    return shlex.split(line)


@pytest.mark.full
def test_the_example_gives_figures_like_those_shown(folder: Path, run_command: Command) -> None:
    pytest.importorskip("langdetect")
    code, _, err = run_command(*shown("train"), *SMALL, *write_task(folder))
    assert code == 0, err
    code, out, err = run_command(*shown("eval words-run"))
    assert code == 0, err
    table = PAGE.split("words-run, tiny on ifeval")[1]
    assert out.startswith("words-run, tiny on ifeval: 16 problems × 4 samples")
    [tiny] = re.findall(r"^ +tiny +[\d. ]+$", table, re.MULTILINE)
    assert re.sub(r" +", " ", tiny) in re.sub(r" +", " ", out)  # the model that was not trained, digit for digit
    assert all(f"words-run: {name} " in out for name in ("mean", "prompt_loose", "instruction_strict"))


def test_what_is_missing_is_said_as_shown(folder: Path, run_command: Command) -> None:
    command = shown("eval tiny --benchmark math500")
    [message] = re.findall(r"^    (error: benchmark math500.*)$", PAGE, re.MULTILINE)
    code, _, err = run_command(*command)
    assert code == 2
    assert message in " ".join(err.split())


def test_every_name_and_option_on_the_page_exists(run_command: Command) -> None:
    for name in re.findall(r"`(livecodebench:[^`]+)`", PAGE):
        parse_benchmarks([name])
    assert parse_options(["tiny", "--benchmark", "gsm8k,math500,aime24"]).benchmark == ("gsm8k,math500,aime24",)
    help_text = run_command("train", "--help", "evaluation")[1]
    for option in ("benchmarks", "benchmark-data", "benchmark-problems", "benchmark-samples", "benchmark-max-tokens"):
        assert f"--evaluation.{option}" in help_text
    assert all(f"`{name}`" in PAGE for name in load_benchmarks())


@pytest.mark.full
def test_the_fields_of_the_json_object_are_those_of_the_page(folder: Path, run_command: Command) -> None:
    rows = [{"question": "1 + 1?", "answer": "#### 2"}]
    Path("benchmarks/gsm8k.jsonl").write_text(json.dumps(rows[0]))
    argv = ("eval", "tiny", "--benchmark-data", "benchmarks", "--max-tokens", "4", "--json")
    [report] = json.loads(run_command(*argv, "--benchmark", "gsm8k")[1])["benchmarks"]
    documented = {
        name
        for row in re.findall(r"^\| (`.*?) \|", PAGE.split("prints `{")[1], re.MULTILINE)
        for name in re.findall(r"`(\w+)`", row)
    }
    task = write_task(folder)[:4]  # the task and its reward
    plain = json.loads(
        run_command("eval", "tiny", *task, "--problems", "1", "--samples", "1", "--max-tokens", "4", "--json")[1]
    )
    assert set(report) == documented | set(plain)


def test_the_files_for_other_harnesses_are_python_and_yaml() -> None:
    yaml = pytest.importorskip("yaml")
    for name in ("pens_inspect.py", "pens_lighteval.py"):
        compile(BLOCKS[name], name, "exec")
    tasks = re.findall(r"```yaml (\w+).yaml\n(.*?)```", PAGE, re.DOTALL)
    assert [yaml.safe_load(task)["task"] for _, task in tasks] == [name for name, _ in tasks] == ["pens", "pens_choice"]
