"""A run whose files were named from one folder goes on, is measured and exported from any other, and moves with its data."""

from __future__ import annotations

import shutil
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import policygrad as pg
from doubles.files import rows, same, untimed, weights, write_rows
from policygrad.errors import ConfigError, RunError
from policygrad.training.config.paths import (
    relative_to_folder,
    resolve_config_paths,
    resolve_directory,
    resolve_rewards,
    with_full_paths,
)
from policygrad.training.config.run import UncheckedRun
from policygrad.training.config.serialization import load_config

Command = Callable[..., tuple[int, str, str]]
CODE = """
def digit(prompts, completions, **columns):
    return [float(c[:1].isdigit()) for c in completions]

def kept(row):
    return row
"""
SHORT = ("--max-tokens", "8", "--prompts-per-step", "2", "--samples-per-prompt", "4", "--lr", "3e-3", "--plain")
NAMED = ("--model", "models/mine", "--task", "0.5*data/a.jsonl+0.5*data/b.jsonl", "--eval-data", "data/held.jsonl")
OWN = ("--row-map", "mine.py:kept", "--reward", "mine.py:digit", "0.5*exact_match if mine.py:digit")
RUN = ("train", "dr_grpo", *SHORT, *NAMED, *OWN, "--evaluation.problems", "2", "--evaluation.samples-per-prompt", "1")


@pytest.fixture
def project(tmp_path: Path, random_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a model, data and code."""
    folder = tmp_path / "project"
    shutil.copytree(random_model, folder / "models" / "mine")
    (folder / "data").mkdir()
    for name, first in (("a", 0), ("b", 10), ("held", 20)):
        sums = [{"prompt": f"{first + i} + {j} =\n", "answer": str(first + i + j)} for i in range(4) for j in range(4)]
        write_rows(folder / "data" / f"{name}.jsonl", sums)
    pairs = [{"prompt": f"{i} + 1 =", "completion": str(i + 1)} for i in range(40)]
    write_rows(folder / "data" / "pairs.jsonl", pairs)
    (folder / "mine.py").write_text(CODE)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(folder)
    return folder


def done(run_command: Command, *argv: object) -> str:
    """What the command prints."""
    code, out, err = run_command(*map(str, argv))
    assert code == 0, err
    return out


def settings(folder: Path, name: str = "run.toml") -> dict[str, Any]:
    """What the run's file says, without its folder."""
    data = tomllib.loads((folder / name).read_text())
    return {key: value for key, value in data.items() if key != "output"}


@pytest.mark.full
def test_resume_from_another_folder_is_bitwise(
    project: Path, run_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    done(run_command, *RUN, "--steps", "2", "--output", "runs/whole")
    done(run_command, *RUN, "--steps", "2", "--output", "runs/pieces", "--stop-after", "1")
    full, pieces = project / "runs" / "whole", project / "runs" / "pieces"
    monkeypatch.chdir(project.parent / "elsewhere")
    done(run_command, "train", "--resume", "../project/runs/pieces", "--allow-code", project, "--plain")
    assert same(weights(full), weights(pieces))
    assert untimed(full / "metrics.jsonl") == untimed(pieces / "metrics.jsonl")
    assert rows(full / "completions.jsonl") == rows(pieces / "completions.jsonl")
    assert {"mine.py:digit", "exact_match if mine.py:digit"} == set(rows(pieces / "completions.jsonl")[0]["rewards"])
    assert settings(full) == settings(pieces)
    assert settings(pieces)["directory"] == "../.."
    for folder in (full, pieces):
        card = (folder / "model" / "README.md").read_text()
        assert str(project.parent) not in card
        assert "| task | 0.5*data/a.jsonl+0.5*data/b.jsonl |" in card
    report = done(run_command, "eval", pieces, "--samples", "1", "--allow-code", project)
    assert "2 problems × 1 samples" in report
    (project / "runs").rename(project.parent / "kept")  # without its data, so from where that is
    monkeypatch.chdir(project)
    done(run_command, "train", "--resume", project.parent / "kept" / "pieces", "--steps", "3", "--plain")
    assert settings(project.parent / "kept" / "pieces")["directory"] == "../../project"


@pytest.mark.full
def test_a_run_moves_with_its_data(project: Path, run_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its card tells names, not the folder. (That it ends bit for bit alike is the test above.)"""
    done(run_command, *RUN, "--steps", "3", "--output", "runs/pieces", "--stop-after", "1")
    moved = project.parent / "moved"
    monkeypatch.chdir(project.parent)
    project.rename(moved)
    result = pg.train(resume=moved / "runs" / "pieces", allow_code=(str(moved),), display=False, stop_after=1)
    assert result.steps == 2
    model = done(run_command, "export", result.output).strip()
    assert model == str(moved / "runs" / "pieces" / "model-step-2")
    assert str(moved) not in (Path(model) / "README.md").read_text()
    result = pg.train(resume=moved / "runs" / "pieces", allow_code=(str(moved),), display=False)
    assert result.steps == 3


@pytest.mark.parametrize("kind", ["sft", pytest.param("reward-model", marks=pytest.mark.full)])
def test_fine_tuning_and_reward_models_resume_from_another_folder(
    kind: str, project: Path, run_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = [{"prompt": f"{i} + 1 =", "chosen": str(i + 1), "rejected": "no"} for i in range(40)]
    data = "data/pairs.jsonl" if kind == "sft" else "data/preferences.jsonl"
    write_rows(project / "data" / "preferences.jsonl", pairs)
    argv = (
        kind,
        "--data",
        data,
        "--model",
        "models/mine",
        "--row-map",
        "mine.py:kept",
        "--batch-size",
        "8",
        "--plain",
    )
    done(run_command, *argv, "--output", "runs/whole")
    done(run_command, *argv, "--output", "runs/pieces", "--stop-after", "2")
    monkeypatch.chdir(project.parent / "elsewhere")
    pieces = project / "runs" / "pieces"
    there = f"{project / 'mine.py'}:kept"
    done(run_command, kind, "--resume", pieces, "--row-map", there, "--plain")  # named again: leave to import it
    assert same(weights(project / "runs" / "whole"), weights(pieces))
    full = settings(project / "runs" / "whole", f"{kind}.toml")
    assert settings(pieces, f"{kind}.toml") == full | {"row_map": there}


def test_missing_files_are_reported_with_the_directory_option(
    project: Path, run_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    done(run_command, *RUN, "--steps", "2", "--output", "runs/x", "--stop-after", "1")
    there = project.parent / "there"
    monkeypatch.chdir(project.parent / "elsewhere")
    go_on = ("train", "--resume", project / "runs" / "x", "--allow-code", project.parent, "--plain")
    for name, option in (("data/b.jsonl", "task"), ("data/held.jsonl", "eval-data"), ("mine.py", "row-map")):
        (there / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.move(project / name, there / name)
        code, _, err = run_command(*map(str, go_on))
        assert code == 2
        assert f"--{option}: {project / name}, which the run used, does not exist" in err
        assert "--directory DIR says where such files are now" in err
        if name != "mine.py":
            shutil.move(there / name, project / name)
    shutil.copytree(project / "data", there / "data", dirs_exist_ok=True)
    shutil.copytree(project / "models", there / "models")
    done(run_command, *go_on, "--directory", "../there")
    assert settings(project / "runs" / "x")["directory"] == "../../../there"


def test_code_in_another_folder_needs_permission(
    project: Path, run_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run's folder from anybody may name any directory: what is not below the current folder is not imported for that."""
    (project / "strange.py").write_text("raise SystemExit('imported')")
    folder = project / "runs" / "x"
    folder.mkdir(parents=True)
    text = "directory = '../..'\n{}\n"
    monkeypatch.chdir(project.parent / "elsewhere")
    for line in ("reward = ['0.5*strange.py:f']", "row_map = 'strange.py:f'", "environment = 'strange.py:F'"):
        (folder / "run.toml").write_text(text.format(line))
        for argv in (("--resume", folder), ("--config", folder / "run.toml")):
            code, _, err = run_command("train", *map(str, argv), "--dry-run")
            assert code == 2
            assert f"--allow-code {project / 'strange.py'}" in err
    monkeypatch.chdir(project)
    code, _, err = run_command("train", "--resume", "runs/x", "--dry-run")
    assert (code, "--allow-code" in err) == (0, False), err  # one's own, in the current folder


@pytest.mark.full
def test_a_run_can_be_repeated_from_another_folder(
    project: Path, run_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    done(run_command, *RUN, "--steps", "1", "--output", "runs/x", "--stop-after", "1")
    monkeypatch.chdir(project.parent / "elsewhere")
    out = done(run_command, "train", "--config", "../project/runs/x/run.toml", "--allow-code", project, "--dry-run")
    second = tomllib.loads(out)
    assert "output" not in second
    assert (second["directory"], second["task"]) == (str(project), NAMED[3])


@pytest.mark.parametrize(
    ("option", "name", "there"),
    [
        ("model", "models/mine", "{}/models/mine"),
        ("model", "tiny", "tiny"),
        ("model", "org/model", "org/model"),
        ("tokenizer", "models/mine", "{}/models/mine"),
        ("task", "data/a.jsonl", "{}/data/a.jsonl"),
        ("task", "0.5*data/a.jsonl+0.5*data/gone.jsonl", "0.5*{}/data/a.jsonl+0.5*data/gone.jsonl"),
        ("task", "gcd + 2*chain_sum:max_digits=1", "gcd + 2*chain_sum:max_digits=1"),
        ("task", "data", "{}/data"),
        ("task", "data/*.jsonl", "{}/data/*.jsonl"),
        ("task", "0.5*data/?.jsonl+gone*.jsonl", "0.5*{}/data/?.jsonl+gone*.jsonl"),
        ("task", "saved:train", "{}/saved:train"),
        ("task", "hf:org/data:main", "hf:org/data:main"),
        ("eval_data", "data/held.jsonl", "{}/data/held.jsonl"),
        ("row_map", "mine.py:kept", "{}/mine.py:kept"),
        ("row_map", "mine:kept", "mine:kept"),
        ("environment", "calculator", "calculator"),
        ("reward", "mine.py:digit", "{}/mine.py:digit"),
        (
            "reward",
            "0.5*mine.py:digit within 0..1 if mine.py:digit",
            "0.5*{0}/mine.py:digit within 0..1 if {0}/mine.py:digit",
        ),
        ("reward", "mine.py:digit*2", "{}/mine.py:digit*2"),
        ("reward", "verl:mine.py", "verl:{}/mine.py"),
        ("reward", "openrlhf:mine.py:digit", "openrlhf:{}/mine.py:digit"),
        ("reward", "model:models/mine", "model:{}/models/mine"),
        ("reward", "judge:mine.py,model=m", "judge:{}/mine.py,model=m"),
        ("reward", "format:mine.py", "format:mine.py"),
        ("reward", "mine.digit", "mine.digit"),
    ],
)
def test_resolve_each_kind_of_name(
    project: Path, monkeypatch: pytest.MonkeyPatch, option: str, name: str, there: str
) -> None:
    (project / "saved").mkdir()
    (project / "saved" / "dataset_info.json").write_text("{}")
    value: Any = (name,) if option == "reward" else name
    expected: Any = there.format(project)
    config = replace(UncheckedRun(), **{option: value})
    assert resolve_config_paths(config) is config  # of the current folder, as it is typed
    monkeypatch.chdir(project.parent / "elsewhere")
    config = replace(config, directory="../project")
    assert getattr(resolve_config_paths(config), option) == ((expected,) if option == "reward" else expected)
    data = with_full_paths({option: [name] if option == "reward" else name, "directory": str(project)})
    assert data[option] == ([expected] if option == "reward" else expected)


def test_a_teacher_is_resolved_and_rewards_keep_their_names(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project.parent)
    reference = replace(pg.DISTILL.reference or pg.Reference(), model="models/mine")
    draft = UncheckedRun(
        algorithm=replace(pg.DISTILL, reference=reference), directory="project", reward=("2*mine.py:digit",)
    )
    teacher = resolve_config_paths(draft).algorithm.reference
    assert teacher is not None
    assert teacher.model == str(project / "models" / "mine")
    (reward,) = resolve_rewards(draft)
    assert (reward.name, reward.weight, reward.function.path) == ("mine.py:digit", 2.0, str(project / "mine.py"))
    assert resolve_rewards(replace(draft, directory=None)) == draft.reward


def test_directory_is_relative_to_the_configuration_file(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = project / "runs" / "x" / "run.toml"
    file.parent.mkdir(parents=True)
    file.write_text("directory = '../..'\ntask = 'data/a.jsonl'\n")
    assert load_config(file, UncheckedRun()).directory is None  # the current folder: names are as they are
    monkeypatch.chdir(project.parent / "elsewhere")
    draft = load_config(file, UncheckedRun())
    assert draft.directory == str(project)
    assert relative_to_folder(draft, file.parent).directory == "../.."
    assert relative_to_folder(replace(draft, output="../project/runs/x"), file.parent).output == "runs/x"
    assert resolve_directory({"task": "gcd"}, file) == {"task": "gcd"}
    with pytest.raises(ConfigError, match=r"run\.toml: directory .* cannot be a folder's name"):
        resolve_directory({"directory": "a\0b"}, file)
    with pytest.raises(RunError, match=r"--task: .*gone\.jsonl, which the run used, does not exist"):
        pg.train(pg.Run(task="gone.jsonl", directory=str(project), output="new"), display=False)
    assert not Path("new").exists()
