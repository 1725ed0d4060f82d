"""A part with settings, as `show` prints it, is accepted where a part is named, and no code in it escapes the permissions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import policygrad as pg
from policygrad.commands.train import parse_run
from policygrad.training.config.part_text import read_part_call
from policygrad.training.config.run import UncheckedRun
from policygrad.training.config.serialization import load_config
from policygrad.training.config.trust import find_code_references
from policygrad.utils.argv import split_outside_brackets

TENT = """
from dataclasses import dataclass
import policygrad as pg

@dataclass(frozen=True)
class Tent(pg.Gate):
    width: float = 1.0
    label: str = ""

    def weight(self, ratio, psi, batch):
        return ratio
    value = weight
"""


def test_the_command_line_takes_parts_with_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(TENT, encoding="utf-8")
    given = {
        "--algorithm.gate": "Clip(low=0.1, high=0.3)",
        "--algorithm.terms": "KLToReference(beta=1e-3, target=None),Entropy(eta=0.1, aggregation=TokenMean)",
        "--algorithm.advantage": "GroupMean(within=peers),GroupStd",
    }
    algorithm = parse_run(["grpo", *(word for pair in given.items() for word in pair)])[0].algorithm
    assert algorithm.gate == pg.Clip(0.1, 0.3)
    assert algorithm.terms == (pg.KLToReference(1e-3), pg.Entropy(0.1, aggregation=pg.TokenMean()))
    assert algorithm.advantage == (pg.GroupMean(within="peers"), pg.GroupStd())
    mine = parse_run(["grpo", "--algorithm.gate", "mine.py:Tent(width=2, label='a:b')"])[0].algorithm.gate
    assert (type(mine).__name__, mine.width, mine.label) == ("Tent", 2.0, "a:b")  # type: ignore[attr-defined]


def test_a_file_takes_them_too(tmp_path: Path) -> None:
    text = 'algorithm.name = "grpo"\nalgorithm.gate = "Clip(low=0.1)"\nalgorithm.terms = ["Entropy(eta=0.1)"]\n'
    (tmp_path / "run.toml").write_text(text)
    loaded = load_config(tmp_path / "run.toml", UncheckedRun()).algorithm
    assert loaded == replace(pg.GRPO, gate=pg.Clip(0.1), terms=(pg.Entropy(0.1),))


@pytest.mark.parametrize(
    ("part", "says"),
    [
        ("Clip(0.1)", "name each setting, as in 'Clip(low=0.1, high=0.3)'"),
        ("Clip(low=0.1, low=0.2)", "give each setting once"),
        ("Clip(lo=0.1)", "did you mean 'low'"),
        ("Clip(low=os.system)", "os.system is neither a number nor a word"),
        ("Clip(low=1+1)", "1 + 1 is neither a number nor a word"),
        ("Clip(low='x')", "must be a number, not 'x'"),
        ("Clip(part=OnPolicy)", "give each setting once, and no `part`"),
        ("Clip()+Clip()", "is no part with settings"),
        ("Clip(low=-1)", "Clip.low must be at least 0"),
    ],
)
def test_anything_else_is_refused(run_command: Callable[..., tuple[int, str, str]], part: str, says: str) -> None:
    code, _, err = run_command("train", "grpo", "--algorithm.gate", part, "--dry-run")
    assert code == 2
    assert says in err


def test_code_in_a_call_is_found() -> None:
    for part in ("evil.py:Tent(width=2)", "evil.py:Tent(label='a:b')", {"part": "evil.py:Tent(label=':')"}):
        assert [*find_code_references({"algorithm": {"gate": part}})] == ["evil.py"]
    assert [*find_code_references({"algorithm": "a.py:X(l='evil.py:Y')"})] == [
        "a.py:X(l='evil.py"
    ]  # as it would be loaded
    assert [*find_code_references({"algorithm": {"terms": ["Entropy(eta=1)", "evil:Term(x=1)"]}})] == ["evil"]


def test_lists_are_split_at_their_own_commas() -> None:
    assert split_outside_brackets("A(x=1, y=[2, 3]),B, C(t='a,)b')") == ["A(x=1, y=[2, 3])", "B", "C(t='a,)b')"]
    assert read_part_call("A(x=-1, y=[true, None], z=B(t='q'))") == {
        "part": "A",
        "x": -1,
        "y": [True, "none"],
        "z": {"part": "B", "t": "q"},
    }
