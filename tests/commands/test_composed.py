"""What a run is called: a changed part is in the name, a changed setting beside it, and neither under another's citation."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import policygrad as pg
from doubles.own_file import TEXT
from policygrad.algorithms import ALGORITHMS
from policygrad.commands.render import describe_algorithm
from policygrad.commands.styled import wrap_rows
from policygrad.training.config.run_name import name_run
from policygrad.training.run_folder import create_run_folder


@pytest.mark.parametrize(
    ("changed", "name", "title"),
    [
        (pg.GRPO, "grpo", "grpo"),
        (replace(pg.GRPO, gate=pg.ClippedImportance()), "grpo+ClippedImportance", "grpo+ClippedImportance"),
        (replace(pg.GRPO, terms=()), "grpo-KLToReference", "grpo-KLToReference"),
        (replace(pg.GRPO, advantage=(pg.GroupMean(),)), "grpo-GroupStd", "grpo-GroupStd"),
        (replace(pg.GRPO, advantage=(pg.LeaveOneOut(),)), "grpo+LeaveOneOut-GroupStd", "grpo+LeaveOneOut-GroupStd"),
        (replace(pg.ASYMRE, advantage=pg.ASYMRE.advantage[::-1]), "asymre+reordered", "asymre+reordered"),
        (replace(pg.GRPO, gate=pg.Clip(0.2, 0.3)), "grpo", "grpo (Clip.high = 0.3)"),
        (replace(pg.GRPO, gate=pg.Clip(0.1, 0.3)), "grpo", "grpo (Clip.low = 0.1, Clip.high = 0.3)"),
        (replace(pg.DAPO, terms=(pg.KLToReference(),)), "dapo+KLToReference", "dapo+KLToReference"),
        (replace(pg.GRPO, samples_per_prompt=3), "grpo", "grpo"),
        (replace(pg.GRPO, old_policy="sampler"), "grpo", "grpo (old_policy = sampler)"),
        (replace(pg.PPO, critic=replace(pg.PPO.critic, lr=1e-3)), "ppo", "ppo"),
        (replace(pg.DR_GRPO, aggregation=pg.FixedLength(55)), "dr_grpo", "dr_grpo (FixedLength.length = 55)"),
        (replace(pg.GRPO, name="mine", terms=()), "mine", "mine"),
    ],
)  # fmt: skip
def test_composed_algorithms_are_named_by_their_parts(changed: pg.Algorithm, name: str, title: str) -> None:
    assert (name_run(changed, 32).name, name_run(changed, 32).title) == (name, title)


def test_a_resolved_row_keeps_its_name() -> None:
    """The budget, the group and the learning rates that a run fills in change no name; nor does an open length elsewhere."""
    for name, row in ALGORITHMS.items():
        title = name
        if not (row.reads_reward or row.reference.templates):  # type: ignore[union-attr]  # which a run must name, and which is told
            row, title = replace(row, reference=pg.Reference(model="teacher")), f"{name} (Reference.model = teacher)"
        run = pg.Run(algorithm=row).resolve()
        assert name_run(run.algorithm, run.sampling.max_tokens).title == title
        assert name_run(run.algorithm).title == title
        assert name_run(run.algorithm).name == name


PARTS = {
    "gate": [pg.Clip(), pg.ClippedImportance(), pg.SigmoidGate()],
    "aggregation": [pg.TokenMean(), pg.SequenceMean()],
    "advantage": [pg.GRPO.advantage, (pg.LeaveOneOut(),)],
    "terms": [pg.GRPO.terms, (pg.Entropy(),)],
}


@given(st.fixed_dictionaries({name: st.sampled_from(values) for name, values in PARTS.items()}))
def test_a_composition_never_has_a_rows_name(parts: dict[str, Any]) -> None:
    a = replace(pg.GRPO, **parts)
    same = all(
        [type(p) for key, p in a.named_parts() if key.partition(".")[0] == name]
        == [type(p) for key, p in pg.GRPO.named_parts() if key.partition(".")[0] == name]
        for name in parts
    )
    assert (name_run(a).name == "grpo") == same


def test_long_names_are_valid_folder_names() -> None:
    a = replace(
        pg.DAPO,
        filters=(),
        shaping=(),
        ratio=pg.Sequence(),
        gate=pg.Clip(c=3.0),
        advantage=(pg.LeaveOneOut(), pg.BatchStd()),
    )
    assert len(name_run(a).name) <= 70
    assert name_run(a).name.endswith("more")


def shown(a: pg.Algorithm, budget: int | None = None) -> str:
    lines = wrap_rows(describe_algorithm(a, budget), 80)
    return " ".join(" ".join("".join(text for text, _ in line) for line in lines).split())


def test_a_changed_part_is_cited() -> None:
    text = shown(replace(pg.GRPO, gate=pg.ClippedImportance(0.0, 4.0), terms=()))
    assert text.startswith(
        "grpo+ClippedImportance-KLToReference grpo (Shao et al. 2024 (DeepSeekMath), arXiv:2402.03300, eq. 3 and 4) with gate = "
        "ClippedImportance(low=0, high=4) (MiniMax-M1 2025 (CISPO), eq. 4 and 5) without terms KLToReference"
    )
    assert "grpo as published J = " in text
    assert "Differs from grpo gate Clip(0.2, 0.2) → ClippedImportance(0, 4)" in text
    assert "Fixes (grpo)" in text


def test_a_changed_setting_is_noted() -> None:
    text = shown(replace(pg.GRPO, terms=(pg.KLToReference(0.1),)))
    assert text.startswith("grpo Group relative policy optimisation Shao et al.")
    assert "with KLToReference.beta = 0.1 instead of 0.04" in text
    assert "Differs from grpo terms KLToReference(beta=0.04) → KLToReference(beta=0.1)" in text
    resolved = pg.Run(algorithm=pg.DR_GRPO).resolve()
    assert "instead of" not in shown(resolved.algorithm, resolved.sampling.max_tokens)


def test_dry_run_notes_the_composition(run_command: Any) -> None:
    _, out, _ = run_command("train", "grpo", "--algorithm.gate", "ClippedImportance", "--dry-run")
    assert out.startswith("# grpo+ClippedImportance\n#   grpo (Shao et al. 2024")
    assert 'name = "grpo"' in out  # what --config and --resume begin with
    _, out, _ = run_command("train", "dr_grpo", "--dry-run")
    assert out.startswith("# dr_grpo  GRPO done right")


def test_run_folders_are_named_after_the_composition(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # a file's folder joins it
    for name, folder in (
        ("grpo+ClippedImportance", "runs/grpo+ClippedImportance-1"),
        ("my/own: π", "runs/my_own__π-1"),
        ("../..", "runs/_..-1"),
        ("", "runs/run-1"),
    ):
        with create_run_folder(None, name, "run.toml", print) as held:
            assert str(held.path) == folder
        assert not (tmp_path / "runs").exists()  # nothing came of it


def test_a_custom_part_is_cited_by_its_file(run_command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_file.py").write_text(TEXT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # a file's folder joins it
    argv = ("--algorithm.gate", "own_file.py:Tent", "--algorithm.advantage", "GroupMean,own_file.py:Asym", "--dry-run")
    code, out, err = run_command("train", "dr_grpo", *argv)
    assert code == 0, err
    assert "# dr_grpo+Asym+Tent\n" in out
    assert "with gate = Tent(width=0.5, sharp=False) (user-defined, own_file.py:10)" in out
    assert "with advantage = Asym (nobody 2020, eq. 3)" in out
