"""`policygrad lab`: the table, JSON, a part of one's own, and what is refused."""

from __future__ import annotations

import functools
import json
import re
import sys
from typing import Any

import pytest
import torch

from policygrad.algorithms import ALGORITHMS
from policygrad.lab.report import EXPERIMENTS
from policygrad.pages.render import render_math

OWN = """
from dataclasses import dataclass, field, replace

import torch

import policygrad as pg


@dataclass(frozen=True)
class HalfGate(pg.Gate):
    def weight(self, ratio, psi, batch):
        return ratio / 2

    def value(self, ratio, psi, batch):
        return ratio * psi / 2


@dataclass(frozen=True)
class Negated(pg.Advantage):
    def __call__(self, psi, batch):
        return -pg.LeaveOneOut()(psi, batch)


@dataclass(frozen=True)
class Half(pg.Advantage):
    factor: float

    def __call__(self, psi, batch):
        return psi * self.factor


@dataclass(frozen=True)
class Nothing(pg.Part):
    x: int = 0


@dataclass(frozen=True)
class Broken(pg.Advantage):
    def __call__(self, psi, batch):
        return psi + {}["nothing"]


@dataclass(frozen=True)
class OwnRefusal(pg.Advantage):
    def __call__(self, psi, batch):
        raise ValueError("not today")


@dataclass(frozen=True)
class NotFinite(pg.Advantage):
    def __call__(self, psi, batch):
        return psi * float("nan")


@dataclass(frozen=True)
class Unhashed(pg.Gate):
    shares: list = field(default_factory=lambda: [2])

    def weight(self, ratio, psi, batch):
        return ratio / 2

    def value(self, ratio, psi, batch):
        return ratio * psi / 2


@dataclass(frozen=True)
class Doubled(pg.Advantage):
    def __call__(self, psi, batch):
        return 2 * psi


MINE = replace(pg.DR_GRPO, gate=HalfGate())


@dataclass(frozen=True)
class Everything(pg.Aggregation):
    def __call__(self, mask, group):
        return mask.double()
"""


@pytest.fixture
def run(run_command: Any, tmp_path, monkeypatch) -> Any:
    """`run(*words)` -> (exit code, standard output, standard error), in a folder that holds own_part.py."""
    (tmp_path / "own_part.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_part", raising=False)

    return functools.partial(run_command, "lab")


def test_the_table_of_chosen_algorithms(run, monkeypatch) -> None:
    for columns in ("80", "160"):
        monkeypatch.setenv("COLUMNS", columns)
        code, out, err = run("--algorithm", "rloo", "grpo", "--group-size", "2", "--experiment", "occupancy_sum")
        assert code == 0, err
        assert max(map(len, out.splitlines())) <= int(columns)
        rows = [line.split() for line in out.splitlines() if line.startswith("rloo")]
        assert len(rows) == (3 if columns == "80" else 2)  # on-policy, off-policy, details
        assert rows[0][1:5] == ["1.000", "exact", "0", "1.000"]
        assert "off-policy, 0.05 nats away" in out
        assert "✓ The unnormalised discounted occupancy sums to 1/(1−γ)." in out
        assert "dapo" not in out


def test_no_column_of_the_details_is_left_out_in_a_narrow_terminal(run, monkeypatch) -> None:
    heads = []
    for columns in ("80", "200"):
        monkeypatch.setenv("COLUMNS", columns)
        _, out, _ = run("--algorithm", "iterative_grpo", "--group-size", "2", "--experiment", "none")
        assert max(map(len, out.splitlines())) <= int(columns)
        details = out.split("By difficulty and length, on-policy\n")[1].split("  p=…")[0]
        heads.append([w for line in details.splitlines() if line.startswith(" ") for w in line.split()])
        assert details.count("iterative_grpo") == (2 if columns == "80" else 1)
    assert heads[0] == heads[1]
    assert heads[0][-2:] == ["wrong", "3"]


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A matrix of three algorithms, and two that the lab omits."""
    names = ("rloo", "grpo", "dapo", "passk", "trpo_vine")
    monkeypatch.setattr("policygrad.commands.lab.ALGORITHMS", {name: ALGORITHMS[name] for name in names})


@pytest.mark.usefixtures("few")
def test_json_holds_everything(run) -> None:
    report = check_json(run, ["rloo", "grpo", "dapo"])
    assert json.loads(run("--json", "--group-size", "2", "--experiment", "none")[1]) == report  # and the same twice


@pytest.mark.full
def test_json_holds_every_algorithm(run) -> None:
    omitted = ("pf_ppo", "passk", "gfpo", "spiral", "sdpo", "sdft", "opsd", "trpo_vine")
    check_json(run, [name for name in ALGORITHMS if name not in omitted])


def check_json(run, names: list[str]) -> Any:
    """The report, which has these rows, each in full."""
    code, out, err = run("--json", "--group-size", "2", "--experiment", "none")
    assert code == 0, err
    report = json.loads(out)
    assert [row["name"] for row in report["algorithms"]] == names
    assert re.search(r"omitted, as the lab's worlds lack what they need: [\w, ]*passk, ", err)
    assert "PassAtK(k=2) compares 2-subsets" in run("--algorithm", "passk", "--group-size", "2")[2]
    assert "trpo_vine trains on single tokens" in run("--algorithm", "trpo_vine", "--group-size", "2")[2]
    assert report["findings"] == []
    for row in report["algorithms"]:
        for side in ("on_policy", "off_policy"):
            assert row[side]["exact"] is True
            assert set(row[side]["figures"]) == {"scale", "bias", "cosine", "variance", "mse", "snr", "best_mse"}
            assert len(row[side]["difficulty"]) == 3
    return report


def test_a_page_is_written_beside_the_json(run, tmp_path) -> None:
    argv = ("--algorithm", "rloo", "grpo", "--group-size", "2", "--experiment", "brevity")
    code, out, err = run(*argv, "--output", "lab.html", "--json")
    assert code == 0, err
    text = (tmp_path / "lab.html").read_text(encoding="utf-8")
    assert str(render_math(json.loads(out)["findings"][0]["sentence"])) in text
    assert err == "lab.html\n"
    assert run(*argv, "--output", "again.html")[1] == "again.html\n"
    again = (tmp_path / "again.html").read_text(encoding="utf-8")
    assert again.replace("--output again.html", "--output lab.html --json") == text  # the command that made it
    code, out, err = run(*argv, "--output", "absent/lab.html")
    assert code == 2
    assert "absent/lab.html" in err


def test_control_is_a_command_of_its_own(run) -> None:
    code, out, _ = run("control", "--help")
    assert code == 0
    assert "--env" in out


def test_steps_are_sampled_when_there_are_too_many(run) -> None:
    code, out, _ = run("--algorithm", "rloo", "--group-size", "12", "--experiment", "none", "--json")
    side = json.loads(out)["algorithms"][0]["on_policy"]
    assert code == 0
    assert side["exact"] is False
    assert side["steps"] == 4096
    assert 0 < side["errors"]["variance"] < side["figures"]["variance"]
    assert abs(side["figures"]["scale"] - 1) < 4 * side["errors"]["scale"]
    assert side["figures"]["bias"] < 1e-9 < 0.01 < side["errors"]["bias"]  # cut off at 0, and not known to be
    code, out, _ = run("--algorithm", "rloo", "--group-size", "12", "--experiment", "none")
    assert "exact" not in out
    assert "~ sampled" in out


def test_custom_parts_are_listed_with_the_others(run) -> None:
    parts = ("own_part:HalfGate", "own_part:Negated", "aggregation=own_part:Everything")
    code, out, err = run(
        "--part", *parts, "--algorithm", "dr_grpo", "--group-size", "2", "--experiment", "none", "--json"
    )
    assert code == 0, err
    rows = {row["name"]: row["on_policy"]["figures"] for row in json.loads(out)["algorithms"]}
    assert list(rows) == ["dr_grpo", "HalfGate", "Negated", "Everything"]
    base = rows["dr_grpo"]["scale"]
    assert rows["HalfGate"]["scale"] == pytest.approx(base / 2)
    assert rows["Negated"]["scale"] == pytest.approx(-2 * base)  # leave-one-out is twice the group mean at G = 2
    assert rows["Everything"]["scale"] == pytest.approx(8 * base)  # 1 for 1/(B·L), B = 2, L = 4


def test_a_chain_of_parts_and_options_given_again(run) -> None:
    """`--part advantage=A,B` is one row; `--part` again is another; ours and one's own, from a module or a file, mix."""
    argv = ("--part", "advantage=GroupMean,own_part:Doubled", "--part=own_part.py:HalfGate", "--part", "GroupMean")
    small = ("--group-size", "2", "--experiment", "none", "--json")
    code, out, err = run("--algorithm", "dr_grpo", *argv, "--algorithm", "own_part.py:MINE", *small)
    assert code == 0, err
    rows = {row["name"]: row["on_policy"]["figures"]["scale"] for row in json.loads(out)["algorithms"]}
    assert list(rows) == ["dr_grpo", "dr_grpo+HalfGate", "GroupMean+Doubled", "HalfGate", "GroupMean"]
    base = rows["dr_grpo"]
    assert rows["GroupMean"] == pytest.approx(base)
    assert rows["GroupMean+Doubled"] == pytest.approx(2 * base)
    assert rows["HalfGate"] == rows["dr_grpo+HalfGate"] == pytest.approx(base / 2)


def test_a_part_in_a_custom_algorithm(run) -> None:
    small = ("--algorithm", "dr_grpo", "--group-size", "2", "--experiment", "none", "--json")
    code, out, err = run("--part", "advantage=GroupMean,own_part:Doubled", "--base", "own_part:MINE", *small)
    assert code == 0, err
    result = {row["name"]: row["on_policy"]["figures"]["scale"] for row in json.loads(out)["algorithms"]}
    assert result["GroupMean+Doubled"] == pytest.approx(result["dr_grpo"])  # half the gate, twice the advantage


def test_a_part_is_compared_with_its_base(run) -> None:
    """Two rows, no experiment, and which algorithm it is in; all the others on demand."""
    code, out, err = run("--part", "own_part:HalfGate", "--group-size", "2")
    assert (code, err) == (0, "")
    rows = [line.split()[0] for line in out.splitlines() if line.startswith(("dr_grpo ", "HalfGate "))]
    assert rows in (["dr_grpo", "HalfGate"] * 2, ["dr_grpo", "HalfGate"])  # one below the other, or side by side
    text = " ".join(out.split())
    assert "HalfGate is dr_grpo with gate = HalfGate, in place of Clip (--base NAME takes another algorithm)" in text
    assert "Where HalfGate differs from dr_grpo w " in text
    assert "→ HalfGate on-policy scale 0.125 → 0.063, " in text
    assert len(out.splitlines()) < 40
    assert "Findings" not in out
    report = json.loads(run("--part", "own_part:HalfGate", "--group-size", "2", "--json")[1])
    assert report["parts"] == ["HalfGate is dr_grpo with gate = HalfGate, in place of Clip"]
    assert report["findings"] == []


@pytest.mark.usefixtures("few")
def test_all_measures_every_algorithm_with_a_part(run) -> None:
    argv = ("--part", "own_part:HalfGate", "--all", "--group-size", "2", "--experiment", "none", "--json")
    rows = [row["name"] for row in json.loads(run(*argv)[1])["algorithms"]]
    assert rows[-1] == "HalfGate"
    assert {"grpo", "rloo", "dapo"} <= set(rows)


def test_a_part_that_changes_nothing_differs_nowhere(run) -> None:
    _, out, _ = run("--part", "GroupMean", "--group-size", "2")
    after = out.split("Where GroupMean differs from dr_grpo\n")[1]
    assert after.count("nowhere, in the decimals shown") == 2


def test_the_settings_of_a_part_are_read(run) -> None:
    parts = (
        "advantage=GroupMean,own_part:Half(factor=3)",
        "advantage=GroupMean, own_part.py:Half(2)",
        "GroupStd(eps=0.1, ddof=0)",
    )
    code, out, err = run("--part", *parts, "--group-size", "2", "--json")
    assert code == 0, err
    rows = {row["name"]: row["on_policy"]["figures"]["scale"] for row in json.loads(out)["algorithms"]}
    assert list(rows) == [
        "dr_grpo",
        "GroupMean+Half(factor=3)",
        "GroupMean+Half(factor=2)",
        "GroupStd(eps=0.1, ddof=0)",
    ]
    assert list(rows.values())[1:3] == pytest.approx([3 * rows["dr_grpo"], 2 * rows["dr_grpo"]])


def test_experiments_are_listed(run) -> None:
    code, out, _ = run("--list-experiments")
    assert code == 0
    assert {line.split()[0] for line in out.splitlines() if not line.startswith(" ")} == set(EXPERIMENTS)
    assert "gate_weights" in out
    assert "w(r, sign Ψ) of every gate" in out


def test_a_gate_without_a_hash_is_plotted(run, tmp_path) -> None:
    argv = (
        "--part",
        "own_part:Unhashed",
        "--algorithm",
        "dr_grpo",
        "--group-size",
        "2",
        "--experiment",
        "gate_weights",
    )
    code, _, err = run(*argv, "--output", "lab.html")
    assert code == 0, err
    assert '"label":"Unhashed"' in (tmp_path / "lab.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("args", "argv"),
    [
        (("--algorithm", "grop"), "did you mean 'grpo'"),
        (("--experiment", "adamm"), "did you mean 'adam'"),
        (("--group-size", "0"), "at least 1, not 0"),
        (("--group-size", "1"), "one per prompt"),
        (("--kl", "0"), "above 0 nats"),
        (("--base", "grpo"), "needs a part to insert"),
        (("--group-size", "5000", "--algorithm", "rloo", "--experiment", "none"), "20480000, and at most 1000000"),
        (("--output", "absent/lab.html"), "absent/lab.html: there is no folder absent"),
        (("--output", "."), "--output . is a folder"),
        (("control", "--output", "absent/run.json"), "absent/run.json: there is no folder absent"),
        (("--part", "colonless"), "a custom one is module:Class"),
        (("--part", "own_part:Broken"), "--part own_part:Broken: KeyError: 'nothing' ("),
        (("--part", "own_part:Broken"), "own_part.py, line "),
        (("--part", "own_part:OwnRefusal"), "ValueError: not today ("),
        (("--part", "own_part:NotFinite"), "NotFinite in advantage.0 returned NaN or infinite numbers"),
        (("--part", "own_part:Half"), "needs factor"),
        (("--part", "own_part:Half(factor=open('x'))"), "settings that are not literals"),
        (("--part", "own_part:Half(**{'factor': 1})"), "settings that are not literals"),
        (("--part", "own_part:Half(factor='much')"), "'algorithm.advantage.factor' must be a number, not 'much'"),
        (("--part", "own_part:Half(facto=1)"), "needs factor"),
        (("--part", "own_part:Half(1, 2)"), "Half takes 1 settings, not 2"),
        (("--part", "own_part:Half(1, factor=2)"), "Half has factor twice"),
        (("--part", "Clip(lo=0.1)"), "did you mean 'low'?"),
        (("--part", "Clip,"), "is invalid. Write [FIELD=]PART"),
        (("--all", "--algorithm", "grpo"), "--all measures every algorithm"),
        (("--part", "own_part:Nothing"), "FIELD=own_part:Nothing"),
        (("--part", "own_part:Absent"), "cannot import"),
        (("--part", "gate=Clip,ClippedImportance"), "gate holds one part, not 2"),
        (("--part", "gate=GroupMean"), "GroupMean goes into 'advantage'"),
        (("--part", "advantage=GroupMean,own_part:Broken"), "own_part.py, line "),
        (("--algorithm", "own_part.py:MINN"), "did you mean 'MINE'?"),
        (("--part", "colour=own_part:Negated"), "no field 'colour'"),
    ],
)
def test_invalid_worlds_are_refused(run, args: tuple[str, ...], argv: str) -> None:
    code, _, err = run(*args)
    assert code == 2
    assert argv in err


def test_the_lab_leaves_the_threads_alone(run) -> None:
    before = torch.get_num_threads()
    assert run("--algorithm", "reinforce", "--group-size", "2", "--experiment", "none")[0] == 0
    assert torch.get_num_threads() == before
