"""A package outside the source adds an algorithm with a part of its own, an environment, an engine, an optimizer and a tracker."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import policygrad as pg
from doubles.files import write_rows
from policygrad import cli
from policygrad.commands.doctor import examine_packages
from policygrad.environments.registry import resolve_environment
from policygrad.training.config.serialization import load_algorithm
from policygrad.training.config.trust import CodePermissions, missing_permissions
from policygrad.utils.plugins import find_plugin, list_plugins

PACKAGE = Path(__file__).parent / "package"


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package, as `pip install` would leave it."""
    list_plugins.cache_clear()
    monkeypatch.syspath_prepend(str(PACKAGE))
    yield
    list_plugins.cache_clear()


def test_a_run_uses_everything_that_a_package_adds(random_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    names = (
        "--environment corridor:6 --track corridor_log --sampler.engine corridor_engine --sampler.urls http://corridor"
        " --optimizer.name corridor_signs"
    )
    sizes = "--steps 2 --prompts-per-step 2 --samples-per-prompt 4 --max-tokens 12 --evaluation.problems 0 --seed 1"
    task = write_rows(tmp_path / "rows.jsonl", [{"prompt": f"{i} =\n", "answer": str(i)} for i in range(8)])
    argv = ["train", "corridor_reinforce", *names.split(), *sizes.split(), "--model", str(random_model), "--plain"]
    argv += ["--task", task]  # reasoning-gym's takes seconds to import
    assert cli.main([*argv, "--output", str(folder)]) == 0
    log = [line.split() for line in (folder / "corridor.log").read_text().splitlines()]
    assert [step for step, _, _ in log] == ["1", "2"]
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rewards = [row["reward"] for row in steps if "reward" in row]
    assert [f"{reward:.4f}" for reward in rewards] == [reward for _, _, reward in log]
    assert all(0 < reward <= 1 for reward in rewards)
    assert 'name = "corridor_reinforce"' in (folder / "run.toml").read_text()


def test_the_part_says_what_it_does_not_fit() -> None:
    algorithm = load_algorithm("corridor_reinforce")
    with pytest.raises(pg.ConfigError, match="LengthBaseline is a baseline, and so is the critic's: set critic=None"):
        replace(algorithm, critic=pg.Critic(), advantage=(pg.GAE(), *algorithm.advantage))


def test_its_episodes_stay_where_they_say() -> None:
    corridor = resolve_environment("corridor:8")
    assert corridor is not None
    assert corridor.capabilities.stays_because == "the corridor is in the trainer's room"  # type: ignore[union-attr]
    assert corridor.length == 8  # type: ignore[union-attr]


def test_a_file_that_names_it_needs_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for options, module in (
        ({"environment": "corridor:3"}, "corridor.environment"),
        ({"track": ["corridor_log"]}, "corridor.tracker"),
        ({"algorithm": "corridor_reinforce"}, "corridor.advantage"),
        ({"sampler": {"engine": "corridor_engine"}}, "corridor.engine"),
        ({"optimizer": {"name": "corridor_signs"}}, "corridor.optimizer"),
    ):
        file = tmp_path / "elsewhere" / "run.toml"
        assert missing_permissions(options, file, new_process=True) == [module]
        assert missing_permissions(options, file, CodePermissions((module,)), new_process=True) == []


def test_doctor_lists_it_without_importing_it() -> None:
    found = [(check.name, check.value) for check in examine_packages() if check.group == "Plugins"]
    assert ("environment corridor", "corridor.environment:make_corridor of corridor-rl 1.0") in found
    assert [name for name, _ in found] == [
        "algorithm corridor_reinforce",
        "engine corridor_engine",
        "environment corridor",
        "optimizer corridor_signs",
        "tracker corridor_log",
    ]


def test_show_lists_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["show"]) == 0
    assert "algorithm  corridor_reinforce" in capsys.readouterr().out
    assert cli.main(["show", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plugins"]["tracker"] == ["corridor_log"]
    assert cli.main(["show", "corridor_reinforce", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["name"] == "corridor_reinforce"


def test_a_name_of_two_packages_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    second = tmp_path / "other_corridor-2.0.dist-info"
    second.mkdir()
    (second / "METADATA").write_text("Metadata-Version: 2.1\nName: other-corridor\nVersion: 2.0\n")
    (second / "entry_points.txt").write_text("[policygrad.plugins]\nenvironment.corridor = other:thing\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(
        pg.ConfigError, match=r"added by two installed packages, corridor-rl 1\.0 and other-corridor 2\.0"
    ):
        find_plugin("environment", "corridor")
