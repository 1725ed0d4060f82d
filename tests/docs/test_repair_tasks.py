"""examples/repair: every bug fails the tests, its repair passes them, and what is measured with was never trained on."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from doubles.files import rows

EXAMPLE = Path(__file__).parents[2] / "examples" / "repair"


def load(name: str) -> ModuleType:
    """Import a file of the example."""
    spec = importlib.util.spec_from_file_location(f"repair_{name}", EXAMPLE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the script writes, with few demonstrations."""
    tasks = load("make_tasks")
    tasks.DEMONSTRATIONS = 200
    written = tmp_path_factory.mktemp("repair")
    tasks.main(written)
    return written


def run_tests(repository: Path) -> tuple[int, str]:
    """Run the repository's tests; return the exit code and what they print."""
    done = subprocess.run([sys.executable, "-I", "-S", "tests/run.py"], cwd=repository, capture_output=True, text=True)
    assert done.stderr == ""
    return done.returncode, done.stdout.strip()


def below_name(text: str) -> str:
    """Return what makes a function another one than those of other names."""
    return text.partition("\n")[2]


LOOK = """
import json, sys
from pathlib import Path
sys.path.insert(0, "tests")
from run import find_failure
for row in json.load(sys.stdin):
    file = Path(row["file"])
    right = file.read_text()
    file.write_text(row["text"])
    print(find_failure(Path(".").resolve()))
    file.write_text(right)
"""
"""Puts bugs in, one after the other, and prints what fails: in one small process, whose forks are cheap."""


def test_each_bug_fails_the_tests_and_its_repair_passes_them(folder: Path, tmp_path: Path) -> None:
    repository = shutil.copytree(folder / "repository", tmp_path / "repository")
    assert run_tests(repository) == (0, "all tests pass")
    bugs = rows(folder / "train.jsonl") + rows(folder / "held-out.jsonl")
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", LOOK], cwd=repository, input=json.dumps(bugs), capture_output=True, text=True
    )
    for row, failure in zip(bugs, done.stdout.splitlines(), strict=True):
        lines, right = row["prompt"].splitlines(), (repository / row["file"]).read_text()
        assert failure == lines[-1] != ""
        assert [line.partition(" ")[2] for line in lines[:-1]] == row["text"].splitlines()
        assert sum(a != b for a, b in zip(right.splitlines(), row["text"].splitlines(), strict=True)) == 1
    assert run_tests(repository) == (0, "all tests pass")  # each was repaired
    (repository / row["file"]).write_text(row["text"])
    assert run_tests(repository) == (1, failure)


def test_sets_have_forty_bugs_each_in_functions_that_no_other_set_and_no_demonstration_has(folder: Path) -> None:
    right = {path.name: below_name(path.read_text()) for path in (folder / "repository").glob("*.py")}
    train, held_out = ([row["file"] for row in rows(folder / f"{name}.jsonl")] for name in ("train", "held-out"))
    assert len(set(train)) == len(set(held_out)) == 40
    assert len({right[file] for file in train + held_out}) == 80
    kinds = [{row["kind"] for row in rows(folder / f"{name}.jsonl")} for name in ("train", "held-out")]
    assert kinds[0] == kinds[1] == {"operator", "number", "name", "order", "function", "missing return"}
    comments = {text.partition("\n")[0].strip() for text in right.values()}
    shown = {re.search(r"# .*", row["messages"][1]["content"])[0] for row in rows(folder / "demonstrations.jsonl")}
    assert shown
    assert not shown & comments


def test_tasks_are_the_same_each_time(folder: Path, tmp_path: Path) -> None:
    tasks = load("make_tasks")
    tasks.DEMONSTRATIONS = 200
    tasks.main(tmp_path)
    for path in folder.rglob("*"):
        if path.is_file():
            assert (tmp_path / path.relative_to(folder)).read_bytes() == path.read_bytes()


def test_a_demonstrated_command_does_what_it_says_and_a_quarter_of_demonstrations_succeed(
    folder: Path, tmp_path: Path
) -> None:
    """The commands are run in a shell; what the demonstrator reads is what they print."""
    repository = shutil.copytree(folder / "repository", tmp_path / "repository")
    names, ended_right = {path.name for path in repository.iterdir()}, 0
    demonstrations = [row["messages"] for row in rows(folder / "demonstrations.jsonl")]
    for messages in demonstrations[:12]:
        *lines, _ = messages[1]["content"].splitlines()
        assert messages[-1]["content"] == "./submit"
        for command, answer in zip(messages[2::2], messages[3::2], strict=False):
            if command["content"].startswith("sed"):
                file = command["content"].rpartition(" ")[2]
                (repository / file).write_text("".join(f"{line.partition(' ')[2]}\n" for line in lines))
                done = subprocess.run(["sh", "-c", command["content"]], cwd=repository, capture_output=True, text=True)
                assert (done.returncode, done.stdout, answer["content"]) == (0, "", "done")
                line = int(command["content"][len("sed -i '")]) - 1
                assert (repository / file).read_text().splitlines()[line] in command["content"]
    assert names <= {path.name for path in repository.iterdir()}
    for messages in demonstrations:
        ended_right += messages[-2]["content"] == "all tests pass"
    assert 0 < ended_right < 0.3 * len(demonstrations)


def test_a_function_that_ends_the_tests_early_has_failed_them(folder: Path, tmp_path: Path) -> None:
    repository = shutil.copytree(folder / "repository", tmp_path / "repository")
    name = next(iter(json.loads((repository / "tests" / "cases.json").read_text())))
    (repository / f"{name}.py").write_text("import os\nos._exit(0)\n")
    code, text = run_tests(repository)
    assert code == 1
    assert text.startswith(f"{name}(")
    assert "gives nothing" in text
    assert os.access(repository / "check", os.X_OK)
