"""`policygrad skills`: the guides have the form of the specification, every command in them runs, and no file is lost."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import yaml

from doubles.guides import Command, enter_page, list_blocks
from policygrad.commands.skills import DEFAULT_FOLDER, Skill, load_skills

GUIDES = {guide.name: guide for guide in load_skills()}
FAST = ("policygrad-check-run",)
"""Guides whose commands run in the fast tier; those of the others are `make test-full`."""
DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("guide", GUIDES.values(), ids=GUIDES)
def test_a_guide_has_the_form_of_the_specification(guide: Skill) -> None:
    """https://agentskills.io/specification"""
    front, body = re.fullmatch(r"---\n(.*?)\n---\n(.*)", guide.text, re.DOTALL).groups()  # type: ignore[union-attr]
    assert yaml.safe_load(front) == {"name": guide.name, "description": guide.description}
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", guide.name)
    assert len(guide.name) <= 64
    assert len(guide.description) <= 1024
    assert "Use when" in guide.description or "Use before" in guide.description
    assert len(body.splitlines()) < 500
    assert "## What not to conclude" in body
    assert list_blocks(body)
    for page in re.findall(r"docs/[\w-]+\.md", body):
        assert (DOCS.parent / page).is_file(), page
    for name in re.findall(r"\(policygrad-[\w-]+\)|: (policygrad-[\w-]+)\.", body):
        assert not name or name in GUIDES


@pytest.mark.parametrize(
    "guide",
    [pytest.param(guide, id=name, marks=[pytest.mark.full] * (name not in FAST)) for name, guide in GUIDES.items()],
)
def test_every_command_of_a_guide_runs(
    guide: Skill, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_command: Command
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "tent", raising=False)  # of another page's test
    entered = enter_page(guide.text, run_command)
    assert all(output for line, output in entered if line.startswith("policygrad"))
    for line, output in entered:
        if line.startswith("policygrad train") and "--dry-run" not in line:
            assert output[-1]["event"] == "finished", line
    if guide.name == "policygrad-add-algorithm":
        [measured] = next(output for line, output in entered if line.startswith("policygrad lab"))
        rows = {measurement["name"]: measurement for measurement in measured["algorithms"]}
        assert rows["Tent"]["on_policy"] == rows["dr_grpo"]["on_policy"]
        assert rows["Tent"]["off_policy"] != rows["dr_grpo"]["off_policy"]
    if guide.name == "policygrad-compare-algorithms":
        report = entered[-1][1][0]
        registered = entered[1][1][0]
        assert report["preregistration"] == {
            "sha256": registered["sha256"],
            "date": registered["date"],
            "deviations": [],
        }
        assert not report["claims"][0]["allowed"]  # of one seed


def test_guides_are_listed_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_command: Command) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, _ = run_command("skills")
    assert code == 0
    assert all(name in out for name in GUIDES)
    assert not any(tmp_path.iterdir())
    code, out, _ = run_command("skills", "--into", "--json")
    paths = {entry["name"]: Path(entry["path"]) for entry in json.loads(out)["skills"]}
    assert paths == {name: Path(DEFAULT_FOLDER, name, "SKILL.md") for name in GUIDES}
    assert {name: path.read_text(encoding="utf-8") for name, path in paths.items()} == {
        name: guide.text for name, guide in GUIDES.items()
    }
    assert run_command("skills", "--into", DEFAULT_FOLDER)[0] == 0  # the same files


def test_a_file_that_differs_is_kept(tmp_path: Path, run_command: Command) -> None:
    first, *_ = GUIDES
    (tmp_path / first).mkdir()
    mine = tmp_path / first / "SKILL.md"
    mine.write_text("mine", encoding="utf-8")
    code, _, err = run_command("skills", "--into", str(tmp_path))
    assert code == 2
    assert f"{mine} would be replaced, and nothing was written" in err
    assert [path.name for path in tmp_path.iterdir()] == [first]
    assert run_command("skills", "--into", str(tmp_path), "--overwrite")[0] == 0
    assert mine.read_text(encoding="utf-8") == GUIDES[first].text
