"""`policygrad doctor`: every line is true of the machine, and nothing secret is in it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from doubles.engine_environment import make_environment
from policygrad.commands import doctor
from policygrad.commands.doctor import ABSENT, OK, PROBLEM, MachineCheck, examine_hub, examine_model, find_extras

RunCommand = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "ask_hub", lambda endpoint: "does not answer (ConnectError)")


def find(findings: Any, name: str) -> MachineCheck:
    [found] = [finding for finding in findings if finding.name == name]
    return found


def test_an_address_is_shown_without_its_password() -> None:
    assert doctor.hide_password("https://someone:secret@mirror.example:8443/hf") == "https://mirror.example:8443/hf"
    assert doctor.hide_password("https://huggingface.co") == "https://huggingface.co"


def test_lines_are_printed_by_group_with_remedies(run_command: RunCommand) -> None:
    code, output, _ = run_command("doctor", "--model", "tiny")
    assert code == 0
    groups = [line for line in output.splitlines() if line and not line.startswith(" ")]
    assert groups == ["Machine", "Learner", "Sampler", "Extras", "Hub", "Model"]
    assert f"python                   {sys.version.split()[0]} in " in output
    assert "0.00B parameters in fp32: fits" in output
    assert all(len(line) <= 120 for line in output.splitlines())


def test_json_has_the_same_lines(run_command: RunCommand) -> None:
    code, output, _ = run_command("doctor", "--json")
    assert code == 0
    findings = json.loads(output)["findings"]
    assert {finding["status"] for finding in findings} <= {OK, ABSENT, PROBLEM}
    assert all(finding["remedy"] for finding in findings if finding["status"] == PROBLEM)
    assert {"system", "torch", "C++ compiler", "vllm", "cache"} <= {finding["name"] for finding in findings}


def test_keys_are_named_and_their_values_are_not(monkeypatch: pytest.MonkeyPatch, run_command: RunCommand) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("WANDB_API_KEY", "")
    code, output, _ = run_command("doctor")
    assert code == 0
    assert "HF_TOKEN" in output
    assert "WANDB_API_KEY" not in output
    assert "secret" not in output
    assert find(examine_hub({}), "keys that are set").status == ABSENT


def test_engine_is_found_in_the_environment_that_is_named(tmp_path: Path, run_command: RunCommand) -> None:
    environment = make_environment(tmp_path / "venv")
    findings = list(doctor.examine_engines(str(environment)))
    assert find(findings, "vllm") == MachineCheck("Sampler", "vllm", f"vLLM 1.2 in {environment}")
    assert find(findings, "sglang").remedy.startswith("`policygrad engine install sglang --into DIR`")
    code, _, message = run_command("doctor", "--python", str(tmp_path))
    assert (code, "is no Python" in message) == (2, True)


def test_model_that_does_not_fit_comes_with_what_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "read_meminfo", lambda: {"MemTotal": 2**34, "MemAvailable": 2**34})
    [finding] = examine_model("Qwen3-8B")
    assert finding.status == PROBLEM
    assert "8.19B parameters in fp32: does not fit" in finding.value
    assert "15.2 GiB that can be used" in finding.value
    assert "policygrad plan --model Qwen3-8B" in finding.remedy


def test_missing_extras_are_found_by_their_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "importlib.metadata.requires",
        lambda package: ["torch>=2", 'no-such-thing>=1; extra == "first"', "pytest[x]>=1; extra == 'second'"],
    )
    assert find_extras() == {"first": ["no-such-thing"], "second": []}


def test_kernels_of_recurrent_layers_are_named_where_they_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "RECURRENT_KERNELS", {"some-kernels": "json", "other-kernels": "no_such_module"})
    check = doctor.examine_recurrent_kernels()
    assert (check.status, check.remedy.endswith("pip install other-kernels")) == (ABSENT, True)
    monkeypatch.setattr(doctor, "RECURRENT_KERNELS", {"some-kernels": "json"})
    assert doctor.examine_recurrent_kernels() == MachineCheck("Learner", "recurrent layers", "some-kernels")


def test_little_room_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 2**20})())
    found = find(doctor.examine_machine(), "disk of runs")
    assert (found.status, found.value) == (PROBLEM, "1 MiB free")
    assert "--output DIR" in found.remedy
