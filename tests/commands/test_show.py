"""`policygrad algorithms` and `policygrad show`: the matrix at every width, and a page for every part."""

from __future__ import annotations

import json
import sys
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import policygrad as pg
from doubles.own_file import TEXT
from policygrad.algorithms import ALGORITHMS
from policygrad.commands.describe import FAMILIES, classify_family, group_by_family
from policygrad.commands.docstrings import read_field_docs
from policygrad.commands.render import build_matrix_row
from policygrad.commands.show import format_matrix
from policygrad.core.validation import ROLES
from policygrad.rewards.resolve import list_rewards
from policygrad.training.config.serialization import list_parts


def plain(width: int | None) -> list[str]:
    return ["".join(text for text, _ in line).rstrip() for line in format_matrix(width)]


def test_a_class_without_a_file_has_no_field_docs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that is typed at a prompt or in a notebook: its module has no file."""
    module = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    exec("class Typed:\n    lam: float = 1.0", vars(module))
    assert read_field_docs(module.Typed) == {}


@pytest.mark.parametrize("width", [50, 72, 80, 100, 120, 200, 300, None])
def test_the_matrix_fits_the_terminal(width: int | None) -> None:
    lines = plain(width)
    assert width is None or max(map(len, lines)) <= width
    for name, a in ALGORITHMS.items():
        at = next(i for i, line in enumerate(lines) if line.split() and line.split()[0] == name)
        assert type(a.advantage[0]).__name__ in " ".join(lines[at : at + 3])
    text = " ".join(" ".join(lines).split())
    for place, part in (pair for a in ALGORITHMS.values() for pair in a.named_parts()):
        usual = place == "update_rule" and part == pg.Algorithm().update_rule
        assert usual or place == "reference" or type(part).__name__ in text
    assert "Clip(3e-4, 4e-4)" in text  # what is not the default always stands there


@pytest.mark.parametrize("width", [60, 80, 110, 250])
def test_no_word_is_cut_and_families_are_grouped(width: int) -> None:
    """Every word of the narrow form is one of the wide form; the rows are in the order of their families."""
    rows = [build_matrix_row(a, changed=changed) for a in ALGORITHMS.values() for changed in (True, False)]
    cells = [text for row in rows for column, parts in row.items() for text in (column, *parts)]
    full = {word.rstrip(",") for text in (*cells, *FAMILIES, *ALGORITHMS) for word in text.split()} | {"–"}
    lines = plain(width)
    assert {word.rstrip(",") for line in lines for word in line.split()} <= full
    named = [line.split()[0] for line in lines if line.split() and line.split()[0] in ALGORITHMS]
    assert named == [name for members in group_by_family().values() for name in members]
    assert sorted(named) == sorted(ALGORITHMS)
    for name in group_by_family():
        assert name in " ".join(lines)
    if width >= 80:
        assert all(line.count("(") == line.count(")") for line in lines)  # nor is a part's list of settings


def test_algorithms_are_classified_into_families() -> None:
    single, values, group, clipped, gated, completion = FAMILIES
    result = {
        a.name: classify_family(a) for a in (pg.REINFORCE, pg.PPO, pg.VINEPPO, pg.RLOO, pg.GRPO, pg.SAPO, pg.GSPO)
    }
    assert list(result.values()) == [single, values, values, group, clipped, gated, completion]


def test_the_column_also_names_what_no_other_column_shows(run_command: Any) -> None:
    """What no other column says: the step, the reference, the group."""
    for width in ("80", "400"):
        text = run_command("algorithms", "--width", width)[1]
        assert "also" in text
        for output in ("TrustRegion(line_search=False)", "Reference(refresh_every=100)", "G = 4"):
            assert output in " ".join(text.split())
    rows = run_command("algorithms")[1].splitlines()
    assert len(rows) == 1 + len(ALGORITHMS)
    assert rows[0].rstrip().endswith("also")
    assert next(row for row in rows if row.startswith("rloo ")).endswith("G = 4")
    assert list(json.loads(run_command("algorithms", "--json")[1])) == list(ALGORITHMS)


def test_show_explains_every_part(run_command: Any) -> None:
    for name in list_parts():
        code, out, _ = run_command("show", name)
        kind = getattr(pg, name)
        assert code == 0, name
        assert out.startswith(name)
        words = ("Used by", "Equation", *(f"  {f.name} " for f in fields(kind)), *("Settings",) * bool(fields(kind)))
        for word in words:
            assert word in out, name
        place = next(place for place, role in ROLES.items() if issubclass(kind, role.bases))
        assert f"--algorithm.{place} {name}" in out
        file, _, line = next(row for row in out.splitlines() if ".py:" in row).strip().rpartition(":")
        assert Path(file).read_text().splitlines()[int(line) - 1].startswith(f"class {name}")


def test_show_describes_a_custom_part(run_command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_file.py").write_text(TEXT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # a file's folder joins it
    code, out, err = run_command("show", "own_file.py:Tent")
    assert code == 0, err
    rows = [" ".join(row.split()) for row in out.splitlines()]
    for row in (
        "Tent(width=0.5, sharp=False)",
        "own_file.py:10",
        "width float = 0.5 Where nothing is left.",
        "sharp bool = False",
        "w = max(0, 1 − |r − 1|/0.5)",
        "w falls along a line to 0 at r = 1 ± width.",
    ):
        assert row in rows
    out = run_command("show", "own_file.py:Needy")[1]
    assert "factor  float" in out  # it cannot be built without, and is shown all the same
    out = run_command("show", "own_file.py:NAMELESS")[1]
    assert out.startswith("NAMELESS")
    assert "Ψ = Asym(R_i − mean_{j≠i} R_j)" in out
    assert "own_file.py:47" in out
    assert run_command("show", "own_file.py:LIKE_GRPO")[1].startswith("grpo+Tent\n  grpo (Shao et al.")


def test_show_explains_every_reward_and_a_part_with_settings(run_command: Any) -> None:
    for name in list_rewards():
        code, out, _ = run_command("show", name)
        assert code == 0, name
        assert f"--reward {name}" in out or f"--reward '{name.rstrip(':')}:" in out
    code, out, _ = run_command("show", "Clip(low=0.1)")
    assert out.startswith("Clip(low=0.1, high=0.2)")
    assert "did you mean 'math'" in run_command("show", "mtah")[2]
    _, out, _ = run_command("show", "gsm8k")  # a benchmark, and the reward that grades it
    assert "a benchmark" in out
    assert "--reward gsm8k" in out


def test_show_alone_lists_everything(run_command: Any) -> None:
    code, out, _ = run_command("show")
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    argv = set(out.replace(",", " ").split())
    assert set(ALGORITHMS) | set(list_parts()) | set(ROLES) <= argv


def test_field_docs_come_from_the_declaring_class() -> None:
    docs = read_field_docs(pg.Clip)
    assert set(docs) >= {"low", "high", "c"}
    assert read_field_docs(pg.Critic)["lam"] == (
        "λ of the targets; 1 gives Monte-Carlo returns. It may differ from the advantage's, as in VAPO."
    )


def test_help_has_no_list_of_all_names(run_command: Any) -> None:
    out = " ".join(run_command("train", "--help")[1].split())
    assert sum(f" {name}," in out for name in ALGORITHMS) < 4
    assert "`policygrad algorithms` lists" in out
