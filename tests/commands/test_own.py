"""Algorithms and parts of a user's own, from a module or a file: on the command line, in TOML, and after a resume."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import policygrad as pg
from doubles.own_file import TEXT
from policygrad.errors import ConfigError
from policygrad.training.config.run import Run
from policygrad.training.config.serialization import load_algorithm, load_config, load_part_class
from policygrad.utils.user_code import load_object


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with own_file.py and own_file_too/own_file.py in it."""
    (tmp_path / "own_file.py").write_text(TEXT)
    (tmp_path / "apart").mkdir()
    (tmp_path / "apart" / "own_file.py").write_text(TEXT.replace("0.3", "0.4"))
    (tmp_path / "broken.py").write_text("import policygrad as pg\n\nA = pg.Algorithm(gate=pg.Clip())\n")
    (tmp_path / "typo.py").write_text("x = 1\ndef f(:\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("own_file", "broken", "typo", "colorsys"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def dry(run_command: Any, *args: str) -> dict[str, Any]:
    code, out, err = run_command("train", *args, "--dry-run")
    assert code == 0, err
    return tomllib.loads(out)


@pytest.mark.parametrize(
    "argv",
    [
        ("own_file:LIKE_GRPO",),
        ("own_file.py:LIKE_GRPO",),
        ("./own_file.py:LIKE_GRPO", "--steps", "3"),
        ("--steps", "3", "own_file.py:LIKE_GRPO"),
        ("--algorithm", "own_file.py:LIKE_GRPO"),
        ("--dry-run", "own_file:LIKE_GRPO", "--reward", "exact_match"),
    ],
)
def test_a_custom_algorithm_is_named_like_any_other(run_command: Any, here: Path, argv: tuple[str, ...]) -> None:
    made = dry(run_command, *argv)["algorithm"]
    in_file = any(".py:" in word for word in argv)
    assert made["gate"]["part"] == (f"{here / 'own_file.py'}:Tent" if in_file else "own_file:Tent")
    assert made["gate"]["width"] == 0.3
    assert [term["part"] for term in made["terms"]] == ["KLToReference"]


def test_a_reward_file_is_not_mistaken_for_the_algorithm(run_command: Any, here: Path) -> None:
    made = dry(run_command, "--reward", "exact_match", "own_file.py:f")
    assert made["reward"] == ["exact_match", "own_file.py:f"]
    assert made["algorithm"]["name"] == "dapo"


def test_an_unnamed_algorithm_gets_its_variables_name(here: Path) -> None:
    assert load_algorithm("own_file.py:NAMELESS").name == "NAMELESS"
    assert load_algorithm("own_file.py:TENTED").name == "tented"


@pytest.mark.full
def test_a_changed_custom_algorithm_gets_another_name(run_command: Any, here: Path) -> None:
    """No row of the matrix would tell later that a part is not what its name stands for."""
    assert dry(run_command, "own_file.py:TENTED")["algorithm"]["name"] == "tented"
    assert dry(run_command, "own_file.py:TENTED", "--lr", "1", "--max-tokens", "9")["algorithm"]["name"] == "tented"
    made = dry(run_command, "own_file.py:TENTED", "--algorithm.gate", "ClippedImportance")["algorithm"]
    assert made["name"] == "tented+ClippedImportance"
    made = dry(run_command, "own_file.py:LIKE_GRPO", "--algorithm.gate", "ClippedImportance")["algorithm"]
    assert made["name"] == "grpo"  # compared with the row when it is told


def test_custom_parts_round_trip_through_toml(run_command: Any, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """run.toml is read again from any folder: its parts carry the file's whole path."""
    (here / "c.toml").write_text('algorithm = "own_file.py:TENTED"\nsteps = 2\n')
    _, out, _ = run_command("train", "--config", "c.toml", "--algorithm.gate.width", "0.7", "--dry-run")
    (here / "run.toml").write_text(out, encoding="utf-8")
    monkeypatch.chdir("/")
    read = load_config(here / "run.toml", Run())
    assert read.algorithm.gate == load_part_class(f"{here / 'own_file.py'}:Tent", "", "gate")(0.7)
    assert [type(link).__name__ for link in read.algorithm.advantage] == ["LeaveOneOut", "Asym"]
    assert read.steps == 2


def test_files_with_the_same_name_are_two_modules(run_command: Any, here: Path) -> None:
    made = dry(run_command, "own_file.py:LIKE_GRPO", "--algorithm.gate", "apart/own_file.py:Tent")["algorithm"]
    assert made["gate"]["part"] == f"{here / 'apart' / 'own_file.py'}:Tent"
    assert load_object("own_file.py:LIKE_GRPO", "").gate.width == 0.3
    assert load_object("apart/own_file.py:LIKE_GRPO", "").gate.width == 0.4
    assert load_object("own_file.py:Tent", "") is not load_object("apart/own_file.py:Tent", "")


def test_sibling_modules_with_the_same_name_are_kept_separate(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "own_helper", raising=False)
    for folder, value in ((here, 0.1), (here / "apart", 0.2)):
        (folder / "own_helper.py").write_text(f"WIDTH = {value}\n")
        (folder / "uses.py").write_text(
            "import policygrad as pg\nfrom own_helper import WIDTH\nA = pg.Algorithm(advantage=(pg.RunningMean(WIDTH),))\n"
        )
    assert load_algorithm("uses.py:A").advantage == (pg.RunningMean(0.1),)
    with pytest.raises(
        ConfigError, match=r"imports 'own_helper', and in this process 'own_helper' is .*own_helper\.py"
    ):
        load_algorithm("apart/uses.py:A")
    assert load_algorithm("uses.py:A").advantage == (pg.RunningMean(0.1),)


def test_a_hidden_module_is_refused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_algorithm("own_file:TENTED").name == "tented"
    monkeypatch.chdir(here / "apart")
    with pytest.raises(ConfigError, match=r"which has the same name: write the file, own_file\.py:NAME"):
        load_algorithm("own_file:TENTED")
    (here / "apart" / "colorsys.py").write_text("A = 1\n")  # the standard library's comes first
    with pytest.raises(ConfigError, match=r"colorsys\.py:NAME"):
        load_algorithm("colorsys:A")


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("train own_file.py:LIKE_GRP", "own_file.py: did you mean 'LIKE_GRPO'?"),
        ("train own_file:LIKE_GRP", "own_file.py: did you mean 'LIKE_GRPO'?"),
        ("train own_file.py", "write own_file.py:NAME; it has LIKE_GRPO, NAMELESS, TENTED"),
        ("train own_fil.py:X", "own_fil.py: did you mean 'own_file.py'?"),
        ("train own_fil:X", "no module 'own_fil': did you mean 'own_file'?"),
        ("train own_file.py:Tent", "own_file.py:10 is a part, not an algorithm"),
        ("train own_file.py:Tent", "--algorithm.gate own_file.py:Tent"),
        ("train own_file.py:NUMBER", "(own_file.py:49) is int, not a policygrad.Algorithm"),
        ("train broken.py:A", "broken.py raised ConfigError: the gate Clip needs a ratio"),
        ("train broken.py:A", "(line 3); fix that first"),
        ("train broken:A", "(line 3); fix that first"),
        ("train typo.py:A", "typo.py raised SyntaxError: invalid syntax (line 2)"),
        ("train grpo --algorithm.gate own_file.py:Tnt", "did you mean 'Tent'?"),
        ("train grpo --algorithm.gate own_file.py:TENTED", "is an algorithm, not a part: use --algorithm own_file.py:TENTED"),
        ("train --config bad.toml", "bad.toml: algorithm: algorithm 'own_file.py:TENTD'"),
        ("show own_file.py:Tnt", "did you mean 'Tent'?"),
        ("show own_file.py:NUMBER", "int is neither an algorithm nor a part"),
        ("lab --algorithm own_file.py:TENTD", "did you mean 'TENTED'?"),
    ],
)  # fmt: skip
def test_errors_name_file_line_and_similar_names(run_command: Any, here: Path, command: str, says: str) -> None:
    (here / "bad.toml").write_text('algorithm = "own_file.py:TENTD"\n')
    code, out, err = run_command(*command.split())
    assert code == 2
    assert says in err
    assert "Traceback" not in out + err


@pytest.mark.full
def test_a_run_with_a_custom_file_resumes_from_another_folder(
    run_command: Any, here: Path, small: pg.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trained, stopped, resumed elsewhere: the same parts, the run's folder and headline named after them."""
    argv = f"--model {small.model} --task {small.task} --reward {small.reward[0]} --steps 2 --prompts-per-step 2"
    more = "--samples-per-prompt 2 --max-tokens 4 --evaluation.problems 0 --learner.device cpu --plain"
    code, out, err = run_command("train", "own_file.py:LIKE_GRPO", *argv.split(), *more.split(), "--stop-after", "1")
    assert code == 0, err
    assert "policygrad · grpo+Tent on " in out
    folder = here / "runs" / "grpo+Tent-1"
    assert f'part = "{here / "own_file.py"}:Tent"' in (folder / "run.toml").read_text(encoding="utf-8")
    monkeypatch.chdir("/")
    code, out, err = run_command("train", "--resume", str(folder), "--plain")
    assert code == 0, err
    assert "policygrad · grpo+Tent on " in out
    assert "step 2/2" in out
    assert "without their state" not in out


def test_a_part_that_is_not_a_frozen_dataclass_is_refused_with_a_remedy(run_command: Any, here: Path) -> None:
    body = "    def weight(self, ratio, psi, batch): return ratio\n    def value(self, ratio, psi, batch): return ratio * psi\n"
    (here / "loose.py").write_text(
        "from dataclasses import dataclass\nimport policygrad as pg\n\n"
        f"class Plain(pg.Gate):\n{body}\n@dataclass\nclass Loose(pg.Gate):\n    width: float = 0.2\n{body}"
    )
    for name, is_what in (("Plain", "no dataclass"), ("Loose", "a dataclass that is not frozen")):
        for command in (f"train grpo --algorithm.gate loose.py:{name}", f"show loose.py:{name}"):
            code, out, err = run_command(*command.split())
            assert code == 2
            assert f"{name} is {is_what}" in err
            assert f"write @dataclass(frozen=True) above class {name}" in " ".join(err.split())
            assert "Traceback" not in out + err


def test_a_part_whose_setting_has_no_default_is_read_from_a_file(here: Path) -> None:
    """It was built without its settings first, which it cannot be."""
    (here / "needing.py").write_text(
        "from dataclasses import dataclass\nimport policygrad as pg\n\n"
        "@dataclass(frozen=True)\nclass Share(pg.Gate):\n    width: float\n"
        "    def weight(self, ratio, psi, batch): return ratio * self.width\n"
        "    def value(self, ratio, psi, batch): return ratio * psi\n"
    )
    (here / "needing.toml").write_text(
        'algorithm = { name = "dr_grpo", gate = { part = "needing.py:Share", width = 2 } }\n'
    )
    assert load_config(here / "needing.toml", Run()).algorithm.gate.width == 2.0  # type: ignore[attr-defined]
