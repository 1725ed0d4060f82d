"""`compare --vary`: a row for each combination of values, named by what differs, and impossible values before any run."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from policygrad.compare.variations import parse_variation, vary_row
from policygrad.errors import ConfigError

Command = Callable[..., tuple[int, str, str]]


def test_each_combination_is_a_row_named_by_what_differs() -> None:
    rows = vary_row(("grpo", "--lr", "1"), ["lr=1e-6,1e-5", "algorithm.gate.high=0.2,0.28"], ())
    assert [row.label for row in rows] == [
        "lr-1e-6+high-0.2",
        "lr-1e-6+high-0.28",
        "lr-1e-5+high-0.2",
        "lr-1e-5+high-0.28",
    ]
    assert rows[1].argv == ("grpo", "--lr", "1e-6", "--algorithm.gate.high", "0.28")


def test_names_are_as_short_as_they_can_be_and_differ() -> None:
    rows = vary_row(("ppo",), ["algorithm.critic.clip=1,2", "optimizer.clip=1,2"], ())
    assert rows[0].label == "critic.clip-1+optimizer.clip-1"
    rows = vary_row(("grpo",), ["algorithm.gate=Clip(low=0.1, high=0.2),Clip[low=0.1 high=0.2]"], ())
    assert [row.label for row in rows] == ["gate-Clip-low-0.1-high-0.2", "gate-Clip-low-0.1-high-0.2.2"]
    assert rows[0].argv[-1] == "Clip(low=0.1, high=0.2)"


def test_switches_are_on_or_off() -> None:
    rows = vary_row(("grpo",), ["learner.compile=true,false"], {"--learner.compile"})
    assert [row.argv[1:] for row in rows] == [("--learner.compile",), ()]


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        (["lr"], "write an option of train and its values"),
        (["lr="], "two values or more"),
        (["lr=1"], "two values or more"),
        (["lr=1,,2"], "two values or more"),
        (["lr=1,1"], "give each value once"),
        (["lr=1,2", "lr=3,4"], "is there twice"),
        (["learner.compile=1,2"], "its values are true and false"),
        (["lr=" + ",".join(map(str, range(101)))], "makes 101 rows"),
    ],
)
def test_what_is_no_grid_is_refused(texts: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        vary_row(("grpo",), texts, {"--learner.compile"})


def test_an_option_is_written_with_dashes_or_without() -> None:
    assert parse_variation("max_tokens=8,16") == parse_variation("--max-tokens=8,16")


def test_a_comparison_of_a_grid(run_command: Command, tmp_path: Path) -> None:
    size = ("--seeds", "4", "--tokens", "1000", "--dry-run", "--json")
    grid = ("--vary", "lr=1e-4,1e-3", "--vary", "algorithm.gate.high=0.2,0.28")
    code, out, err = run_command("compare", "grpo", *grid, *size)
    assert code == 0
    commands = json.loads(out)["commands"]
    assert len(commands) == 16
    assert {c["row"] for c in commands} == {
        f"lr-{lr}+high-{high}" for lr in ("1e-4", "1e-3") for high in ("0.2", "0.28")
    }
    assert "--lr 1e-4 --algorithm.gate.high 0.28" in shlex.join(commands[1]["argv"])
    assert "note: lr-1e-4+high-0.28, lr-1e-3+high-0.28: Clip.high = 0.28 of the gate has no effect" in err
    assert run_command("compare", "mine=grpo --lr 1", *grid, *size)[1].count('"mine+lr-1e-4+high-0.2"') == 4


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("grpo dapo --vary lr=1,2", "--vary changes options of one row, and there are 2"),
        ("--ladder dapo --vary lr=1,2", "give only one of them"),
        ("grpo --vary lr=1,2 --lr-grid 1,2", "leaves nothing for --lr-grid"),
        ("grpo --vary samples-per-prompt=1,2", "the row samples-per-prompt-1: the advantage GroupMean compares"),
        ("grpo --vary temperature=0,1", "the row temperature-0: the advantage GroupMean compares"),
        ("grpo --vary lr=1,x", "the row lr-x: train does not take these options"),
        ("grpo --vary seed=1,2", "use --seeds"),
        ("grpo --vary group-size=2,4", "here it is --samples-per-prompt 2"),
    ],
)
def test_impossible_values_are_refused_before_any_run(run_command: Command, argv: str, says: str) -> None:
    code, _, err = run_command("compare", *argv.split())
    assert code == 2
    assert says in err
