"""Recordings in four formats, other frameworks' names, the command, and errors that name file, field, reason and remedy."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import policygrad as pg
from doubles.audit_peers import clip_loss, make_update
from policygrad.audit.recording import FIELDS, FORMATS, KNOWN_NAMES, join_ranks, make_batch, read
from policygrad.cli import main
from policygrad.errors import ConfigError, DataError, PolicygradError


@pytest.fixture(scope="module")
def update() -> dict[str, Any]:
    return clip_loss(make_update(), "sequences")


@pytest.mark.parametrize("ending", FORMATS)
def test_a_recording_survives_its_file(ending: str, update: dict[str, Any], tmp_path: Path) -> None:
    path = pg.audit.record(tmp_path / f"update{ending}", {"epsilon": 0.2, "trainer": "mine"}, **update)
    batch = read(path)
    for name, value in make_batch(update).tensors().items():
        torch.testing.assert_close(getattr(batch, name), value, rtol=0, atol=0)
    assert batch.settings["epsilon"] == 0.2
    assert batch.settings["trainer"] == "mine"
    assert batch.precision == torch.finfo(torch.float64).eps
    assert pg.audit.audit(path).agrees


def test_precision_decides_the_tolerance(update: dict[str, Any], tmp_path: Path) -> None:
    single = {name: x.float() if torch.is_floating_point(x) else x for name, x in update.items()}
    tolerances = [make_batch(x).tolerance for x in (update, single)]
    assert tolerances[0] < 1e-7 < tolerances[1] < 1e-4
    decimals = read(pg.audit.record(tmp_path / "single.json", **single))  # JSON has no types: the numbers tell
    assert decimals.tolerance == tolerances[1]
    assert pg.audit.audit(decimals).agrees


def test_names_of_other_frameworks(update: dict[str, Any]) -> None:
    theirs = {KNOWN_NAMES[name].split()[0] if name in KNOWN_NAMES else name: value for name, value in update.items()}
    assert set(theirs) != set(update)
    assert set(make_batch(theirs).tensors()) == set(update)
    assert set(KNOWN_NAMES) <= set(FIELDS)


def test_the_command(update: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "update.npz"
    names = {"mask": "keep", "logp": "lp"}
    np.savez(path, **{names.get(name, name): value.numpy() for name, value in update.items()}, step=np.array(3.0))
    assert main(["audit", str(path), "--map", "keep=mask", "lp=logp", "step="]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("aggregation") and "SequenceMean" in line for line in lines)
    assert main(["audit", str(path), "--map", "keep=mask", "lp=logp", "step=", "--expect", "dapo", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["agrees"] is False
    assert {"subject", "status", "message", "step", "error", "factor"} == set(report["findings"][0])
    assert main(["audit", str(path), "--map", "keep=mask", "lp=logp", "step=", "--markdown"]) == 0
    assert capsys.readouterr().out.startswith("| subject | status | message |")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["audit"], ["name the file", "docs/trust.md"]),
        (["audit", "none.json"], ["none.json: no such file"]),
        (["audit", "update.json", "--map", "keep"], ["--map keep", "THEIRS=OURS"]),
        (["audit", "update.json", "--map", "keep=mask"], ["--map keep=mask", "has no keep", "logp"]),
        (["audit", "update.json", "--map", "logp=log"], ["log is no field", "mask"]),
        (["audit", "update.json", "--expect", "gppo"], ["gppo"]),
        (["audit", "update.json", "--json", "--markdown"], ["--json and --markdown"]),
    ],
)
def test_errors_of_the_command(
    arguments: list[str],
    words: list[str],
    update: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    pg.audit.record("update.json", **update)
    assert main(arguments) == 2
    message = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert "error" in message
    assert all(word in message for word in words), message


def wrong(update: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {name: value for name, value in (update | changes).items() if value is not None}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mask": None}, ["mask is missing", "--map THEIRS=mask"]),
        ({"mask": torch.full((16, 12), 0.5)}, ["mask", "of 0 and 1"]),
        ({"mask": torch.zeros(16, 12)}, ["mask is 0 everywhere"]),
        ({"logp": torch.zeros(16, 13)}, ["logp has shape [16, 13]", "[16, 12]", "pad"]),
        ({"advantage": torch.zeros(4)}, ["advantage has shape [4]", "[16]"]),
        ({"group": torch.linspace(0, 1, 16)}, ["group must hold integers"]),
        ({"logp": torch.full((16, 12), torch.nan)}, ["logp is nan at row 0, column 0", "set mask to 0"]),
        ({"policy_logits": torch.zeros(2)}, ["policy_logits is no field", "--map policy_logits="]),
        ({"log_prob": torch.zeros(16, 12)}, ["both mean logp", "--map"]),
        ({"reward": [[1.0], [1.0, 2.0]]}, ["reward is not an array of numbers", "pad"]),
        ({"rollout_reward": torch.zeros(3), "rollout_group": torch.zeros(4)}, ["rollout_reward", "must agree"]),
    ],
)
def test_a_bad_field_is_named(changes: dict[str, Any], words: list[str], update: dict[str, Any]) -> None:
    with pytest.raises(DataError) as error:
        make_batch(wrong(update, **changes), source="update.pt")
    assert str(error.value).startswith("update.pt: ")
    assert all(word in str(error.value) for word in words), error.value


class Evil:
    """Something that a pickle could run."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("ran"),)


@pytest.mark.parametrize("ending", [".pt", ".npz", ".safetensors", ".json"])
def test_files_that_are_no_recordings(ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither garbage nor code in a file gets further than a message."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / f"update{ending}"
    for content in (b"", b"\x00garbage", pickle.dumps(Evil()), b"[1, 2]"):
        path.write_bytes(content)
        with pytest.raises(DataError) as error:
            read(path)
        assert str(path) in str(error.value)
    if ending == ".pt":
        torch.save({"mask": Evil()}, path)
    elif ending == ".npz":
        np.savez(path, mask=np.array([Evil()], dtype=object))
    with pytest.raises(DataError):
        read(path)
    assert not Path("ran").exists()


def test_other_endings_are_refused(update: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "update.csv").write_text("mask")
    with pytest.raises(DataError, match=r"\.csv is not known: use one of \.safetensors"):
        read(tmp_path / "update.csv")
    with pytest.raises(ConfigError, match="must end in"):
        pg.audit.record(tmp_path / "update.csv", **update)


def test_the_files_of_several_ranks_are_one_update(update: dict[str, Any], tmp_path: Path) -> None:
    """Each rank averages its own tokens; averaged over ranks that is not the update's token mean."""
    names = []
    for rank in range(2):
        rows = slice(8 * rank, 8 * rank + 8)
        own = {name: value[rows] for name, value in make_update().items()}
        logp = own["logp"].clone().requires_grad_()
        r, psi = (logp - own["logp_old"]).exp(), own["advantage"][:, None]
        loss = -(torch.minimum(r * psi, r.clamp(0.8, 1.2) * psi) * own["mask"]).sum() / own["mask"].sum()
        [gradient] = torch.autograd.grad(loss, logp)
        own["micro_batch"] = torch.zeros(8, dtype=torch.int64)
        names.append(
            pg.audit.record(tmp_path / f"rank-{rank}.safetensors", **own, loss=loss.detach(), gradient=gradient)
        )
    result = pg.audit.audit(join_ranks([read(name) for name in names]))
    [average] = [finding for finding in result.findings if finding.subject == "aggregation"]
    assert average.status == "differs"
    assert "rank" in average.message
    [loss] = [finding for finding in result.findings if finding.subject == "loss"]
    assert loss.status == "holds"


def test_the_package_stays_light() -> None:
    """`import policygrad` does not import the audit, and its errors are policygrad's."""
    assert pg.audit.compare is pg.audit.findings.compare
    assert issubclass(DataError, PolicygradError)
    with pytest.raises(AttributeError, match=r"policygrad\.audit"):
        pg.audit.nothing  # noqa: B018
