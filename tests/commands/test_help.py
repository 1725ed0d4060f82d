"""Help: the main options of a command on a page, every other in its section, and nothing imported to print it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from doubles.own_file import TEXT
from pages.commands import read_command_page
from policygrad.algorithms import ALGORITHMS
from policygrad.commands import COMMANDS
from policygrad.commands.help import list_flags, load_page
from policygrad.commands.parsing import list_help_flags
from policygrad.commands.train import parse_run

HEAVY = ("torch", "transformers", "numpy", "reasoning_gym", "policygrad.algorithms", "policygrad.training")
RUNNING = (
    *(
        "transformers",
        "reasoning_gym",
        "policygrad.training.trainer",
        "policygrad.training.setup",
        "policygrad.rollout.rollouter",
    ),
    *("policygrad.samplers.local", "policygrad.samplers.engines.vllm", "policygrad.learners.local.learner"),
    *("policygrad.serve", "policygrad.cluster.launch", "policygrad.lab", "policygrad.report"),
)
"""What a run of the embedded model, or another command, imports, and its dry run does not."""


def list_imports(*command_lines: tuple[str, ...]) -> dict[str, set[str]]:
    """Run the commands one after the other in one process, and return what has been imported after each."""
    code = (
        "import contextlib, io, json, sys; from policygrad.cli import main; result = {}\n"
        "for argv in json.loads(sys.argv[1]):\n"
        "    with contextlib.redirect_stdout(io.StringIO()): assert main(argv) == 0, argv\n"
        "    result[' '.join(argv)] = list(sys.modules)\n"
        "print(json.dumps(result))"
    )
    program = [sys.executable, "-c", code, json.dumps(command_lines)]
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    return {name: set(modules) for name, modules in json.loads(done.stdout).items()}


def test_help_imports_no_parser_and_show_no_torch() -> None:
    pages = [(name, "--help") for name in COMMANDS]
    pages += [("lab", "control", "--help"), ("engine", "check", "--help"), ("train", "grpo", "--help", "sampler")]
    shown = [("show",), ("show", "grpo"), ("show", "Clip", "--json"), ("show", "kl"), ("algorithms",)]
    imports = list_imports(*pages, *shown, ("algorithms", "--json"))
    assert not {*HEAVY, "tyro", "rich"} & imports[" ".join(pages[-1])]
    for name, modules in imports.items():
        assert not {*HEAVY} & modules, name


@pytest.mark.full
def test_plans_and_a_dry_run_import_nothing_that_runs() -> None:
    """One after the other in one process. Only the dry run of a run counts on the architecture what it would take."""
    plan = ("plan", "--model", "Qwen3-1.7B", "--gpus", "H100:8", "--gradient-checkpointing")
    compare = ("compare", "grpo", "dapo", "--tokens", "1000", "--dry-run")
    *planned, dry_run = list_imports(plan, compare, ("train", "grpo", "--dry-run")).values()
    for modules in planned:
        assert not {"transformers", "safetensors", "reasoning_gym"} & modules
    assert not [name for name in dry_run if name.startswith(RUNNING)]


@pytest.mark.parametrize("row", ["dapo", "trpo", "passk", "chord"])
def test_the_stored_help_of_an_algorithm_is_its_parsers(row: str) -> None:
    """The stored pages of commands are compared with their parsers by `make_docs.py --check`."""
    assert load_page("train", row) == read_command_page("train", row)


def test_the_page_of_train_shows_what_people_set(run_command: Any) -> None:
    code, out, _ = run_command("train", "--help")
    assert code == 0
    for flag in ("model", "task", "reward", "environment", "steps", "max-tokens", "lr", "sampler.engine", "output"):
        assert f"  --{flag} " in out
    for flag in ("checkpoint.every", "evaluation.every", "track"):
        assert f"  --{flag} " in out
    assert "--sampler.heartbeat" not in out
    assert "train --help SECTION" in out
    assert "--algorithm.gate.high" in run_command("train", "grpo", "--help", "algorithm")[1]


def test_no_page_is_long_and_all_shows_every_option(run_command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for name in COMMANDS:
        assert len(run_command(name, "--help")[1].splitlines()) <= 120, name
        words = {word.rstrip(",") for word in run_command(name, "--help", "all")[1].split()}
        page = load_page(name)
        assert page is not None
        assert {*list_flags(page)} <= words, name


def test_every_section_has_a_page_and_an_unknown_one_is_answered_with_their_names(run_command: Any) -> None:
    page = load_page("train", "vapo")
    assert page is not None
    for section in page.sections:
        out = run_command("train", "vapo", "--help", section.name)[1]
        assert all(flag in out for option in section.options for flag in option.flags)
        assert out.startswith(section.name)
    code, _, err = run_command("train", "--help", "samplers")
    assert code == 2
    assert "no section 'samplers': give one of general, " in err
    assert ", sampler, " in err
    assert "write policygrad train grpo --help" in run_command("train", "--help", "grpo")[2]
    assert "no section 'kl': leave it out" in run_command("show", "--help", "kl")[2]


def test_help_shows_the_defaults_of_the_row_of_a_file_and_of_ones_own(
    run_command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_file.py").write_text(TEXT)
    (tmp_path / "run.toml").write_text("steps = 7\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # a file's folder joins it
    assert "(default: 0.28)" in run_command("train", "dapo", "--help", "algorithm.gate")[1]
    assert "(default: 0.2)" in run_command("train", "GRPO", "--help", "algorithm.gate")[1]
    assert "(default: 7)" in run_command("train", "--config", "run.toml", "--help")[1]
    assert "--algorithm.gate.sharp" in run_command("train", "own_file.py:LIKE_GRPO", "--help", "algorithm")[1]


def test_the_flags_of_help_are_all_flags() -> None:
    stored = load_page("train", "ppo")
    assert stored is not None
    assert list_flags(stored) == list_help_flags(lambda: parse_run(["ppo", "--help"]))
    assert {"--algorithm.critic.lam", "--sampler.heartbeat", "--resume"} <= {*list_flags(stored)}


def test_every_algorithm_has_a_page() -> None:
    assert all(load_page("train", name) is not None for name in ALGORITHMS)
    assert load_page("train", "no_such_row") is None
