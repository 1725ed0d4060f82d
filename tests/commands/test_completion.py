"""Tab completion: what bash and fish offer."""

from __future__ import annotations

import functools
import shutil
import subprocess
from pathlib import Path

import pytest

from policygrad.algorithms import get_algorithm
from policygrad.commands.completion import generate_script
from policygrad.commands.options import build_option_type, list_part_flags
from policygrad.commands.train import list_train_flags


@functools.cache
def bash_script() -> str:
    return generate_script("bash")


def complete(*words: str) -> list[str]:
    """What bash offers for the last word."""
    command = f'{bash_script()}\nCOMP_WORDS=(policygrad "$@")\nCOMP_CWORD=$#\n_policygrad\nprintf \'%s\\n\' "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", command, "bash", *words], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_completion() -> None:
    assert complete("tr") == ["train"]
    assert complete("train", "da") == ["dapo"]
    assert complete("show", "Impo") == ["Importance"]
    assert {"--algorithm.gate", "--algorithm.gate.high", "--algorithm.gate.tau-pos"} <= set(
        complete("train", "--algorithm.g")
    )
    assert complete("train", "dapo", "--algorithm.gate", "Clipped") == ["ClippedImportance"]
    assert complete("train", "dapo", "--algorithm.gate", "n") == []  # an algorithm has one
    assert (
        complete("train", "dapo", "--algorithm.critic", "n")
        == complete("train", "--algorithm.advantage", "n")
        == ["none"]
    )
    assert complete("train", "vineppo", "--task", "embedded_") == ["embedded_steps"]
    assert complete("train", "grpo_process", "--reward", "w") == ["worked_steps"]
    assert complete("train", "--config", "") == complete("train", "--directory", "") == []  # the shell's own: files
    assert "--threshold" in complete("eval", "--json", "--th")  # which is a switch everywhere
    assert "--threshold" in complete("eval", "--th")
    assert complete("lab", "--experiment", "z_") == ["z_score"]
    assert complete("lab", "con") == ["control"]
    assert {"--output", "--part", "--json"} <= set(complete("lab", "--"))
    assert complete("compare", "dr") == ["dr_grpo", "dro"]
    assert "--lr-grid" in complete("compare", "grpo", "--lr")
    assert complete("compare", "--ladder", "d") == ["dapo"]
    assert complete("train", "--cluster", "") == ["auto", "local", "ray://"]
    assert complete("plan", "--gpus", "H2") == ["H200"]
    assert {"--calibrate", "--calibration"} <= set(complete("plan", "--cal"))
    assert "bashcompinit" in generate_script("zsh")


@pytest.mark.skipif(shutil.which("fish") is None, reason="there is no fish here")
def test_fish_completion_offers_the_same(tmp_path: Path) -> None:
    file = tmp_path / "policygrad.fish"
    file.write_text(generate_script("fish"))
    (tmp_path / "run.toml").write_text("")

    def fish(line: str) -> list[str]:
        command = f"source {file}; complete -C 'policygrad {line}'"
        done = subprocess.run(["fish", "-c", command], capture_output=True, text=True, check=True, cwd=tmp_path)
        return done.stdout.split()

    lines = (
        "tr",
        "train da",
        "show Impo",
        "train --algorithm.g",
        "train dapo --algorithm.gate Clipped",
        "train dapo --algorithm.critic n",
    )
    more = ("lab con", "compare dr", "eval --th", "sft --da", "train --track w", "completion f", "algorithms --w")
    for line in (*lines, *more, "plan --cal"):
        assert sorted(fish(line)) == sorted({*complete(*line.split(" "))}) != [], line
    assert fish("train --config run") == ["run.toml"]


def test_completion_offers_options_that_exist_and_nothing_else() -> None:
    offered = list_train_flags("grpo")
    assert "--steps" in offered
    assert "--algorithm.gate.low" in offered
    assert all(flag[2].isalpha() and flag[-1].isalnum() for flag in offered)
    assert "--algorithm" not in offered  # from the help text's `--algorithm.FIELD`


@pytest.mark.parametrize("name", ["grpo", "trpo", "dapo", "ppo_penalty", "passk", "chord"])
def test_options_of_parts_equal_those_of_help(name: str) -> None:
    listed = {flag for flag in list_train_flags(name) if flag.count(".") > 1 and flag.startswith("--algorithm.")}
    assert set(list_part_flags(build_option_type(get_algorithm(name)))) == listed
