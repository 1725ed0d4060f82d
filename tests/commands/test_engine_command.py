"""`policygrad engine`: what a server is started with so that it takes adapters alone."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from doubles.engine_environment import make_environment
from policygrad.commands import engine as engine_command
from policygrad.commands.engine import EngineOptions, build_launch_command
from policygrad.errors import ConfigError
from policygrad.models.loading import resolve_model
from policygrad.samplers.engines import installation
from policygrad.samplers.engines.llama_cpp import LlamaCppSampler
from policygrad.samplers.engines.vllm import VllmSampler

LORA = "rank=12,alpha=24,targets=q_proj+v_proj"


RunCommand = Callable[..., tuple[int, str, str]]
BACKEND = """
import zipfile

def build_wheel(folder, config_settings=None, metadata_directory=None):
    name = "vllm-1.2-py3-none-any.whl"
    with zipfile.ZipFile(f"{folder}/{name}", "w") as wheel:
        wheel.write("vllm.py")
        wheel.writestr("vllm-1.2.dist-info/METADATA", "Metadata-Version: 2.1\\nName: vllm\\nVersion: 1.2\\n")
        tags = "Wheel-Version: 1.0\\nGenerator: test\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"
        wheel.writestr("vllm-1.2.dist-info/WHEEL", tags)
        wheel.writestr("vllm-1.2.dist-info/RECORD", "")
    return name
"""  # builds the wheel of a package that has nothing in it, without a network


def after(argv: list[str], option: str) -> str:
    return argv[argv.index(option) + 1]


def test_vllm_command_for_adapters() -> None:
    environment, argv = build_launch_command(EngineOptions("vllm", lora=LORA))
    assert environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    assert "VLLM_SERVER_DEV_MODE" not in environment
    assert "--enable-lora" in argv
    assert after(argv, "--max-lora-rank") == "16"  # it knows some ranks only
    assert after(argv, "--max-loras") == "1"
    assert after(argv, "--logprobs-mode") == "processed_logprobs"
    assert argv[2] == resolve_model("tiny")
    exact = build_launch_command(EngineOptions("vllm", lora="rank=320"))[1]
    assert after(exact, "--max-lora-rank") == "320"


def test_commands_without_adapter_have_no_lora_option() -> None:
    for engine in ("vllm", "sglang"):
        environment, argv = build_launch_command(EngineOptions(engine))  # type: ignore[arg-type]
        assert not [word for word in (*environment, *argv) if "LORA" in word or ("--" in word and "lora" in word)]
    assert build_launch_command(EngineOptions("vllm"))[0]["VLLM_SERVER_DEV_MODE"] == "1"


def test_sglang_command_for_adapters() -> None:
    _, argv = build_launch_command(EngineOptions("sglang", lora=LORA))
    assert "--enable-lora" in argv
    assert after(argv, "--max-lora-rank") == "12"
    at = argv.index("--lora-target-modules")
    assert argv[at + 1 :] == ["q_proj", "v_proj"]
    assert after(build_launch_command(EngineOptions("sglang", lora="rank=4"))[1], "--lora-target-modules") == "all"


def test_server_for_an_adapter_folder_starts_with_its_base(tmp_path: Path) -> None:
    output = {"base_model_name_or_path": resolve_model("tiny"), "r": 40, "lora_alpha": 80, "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(output))
    _, argv = build_launch_command(EngineOptions("vllm", model=str(tmp_path)))
    assert argv[2] == resolve_model("tiny")
    assert after(argv, "--max-lora-rank") == "64"


def test_printed_command_is_shell_syntax(run_command: RunCommand) -> None:
    code, output, _ = run_command("engine", "vllm", "--lora", "rank=8", "--print")
    assert code == 0
    assert output.startswith("VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 ")
    assert " vllm serve " in output
    assert "--max-lora-rank 8 --enable-lora" in output


@pytest.mark.parametrize(
    ("engine", "lora", "argv"),
    [
        ("vllm", "rank=600", "up to rank 512. Send all weights: --sampler.lora-sync merged"),
        ("vllm", "rank=8,bits=4", "Leave bits out"),
        ("llama_cpp", "rank=8", "--lora is for servers of vllm and sglang"),
        ("vllm", "rank", "'rank' is not a setting: give rank, alpha, targets, bits"),
    ],
)
def test_invalid_lora_options_are_refused(engine: str, lora: str, argv: str) -> None:
    with pytest.raises(ConfigError, match=argv):
        build_launch_command(EngineOptions(engine, lora=lora, folder="."))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("engine", "option", "message"),
    [
        ("llama_cpp", "routing_replay", "--routing-replay is for servers of vllm and sglang"),
        ("sglang", "sampling_mask", "--sampling-mask is for servers of vllm"),
    ],
)
def test_what_an_engine_cannot_return_is_refused(engine: str, option: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineOptions(engine, folder=".", **{option: True})  # type: ignore[arg-type]


def test_server_does_not_import_from_the_current_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m` would put it first on the import path, and so would the processes that a server starts."""
    monkeypatch.setenv("PYTHONSAFEPATH", "")
    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "")
    started: list[tuple[str, str]] = []
    monkeypatch.setattr("os.execvpe", lambda name, argv, env: started.append((name, env["PYTHONSAFEPATH"])))
    monkeypatch.setattr(installation, "find_version", lambda python, package: "0.5")
    engine_command.engine(["sglang"])
    assert started == [(sys.executable, "1")]


def test_engine_is_found_in_the_environment_that_is_named(tmp_path: Path, run_command: RunCommand) -> None:
    python = make_environment(tmp_path / "venv") / "bin" / "python"
    for named in (tmp_path / "venv", python):
        code, output, _ = run_command("engine", "vllm", "--python", str(named), "--print")
        assert code == 0
        assert f" {tmp_path}/venv/bin/vllm serve " in output
    code, output, _ = run_command("engine", "sglang", "--python", str(python))
    assert code == 2


def test_missing_engine_is_named_with_what_installs_it(tmp_path: Path, run_command: RunCommand) -> None:
    make_environment(tmp_path / "venv")
    code, _, message = run_command("engine", "sglang", "--python", str(tmp_path / "venv"))
    assert code == 2
    assert f"SGLang is not in {tmp_path}/venv. `policygrad engine install sglang --into DIR` makes" in message
    code, _, message = run_command("engine", "vllm", "--python", str(tmp_path / "nowhere"), "--print")
    assert code == 2
    assert "nowhere' is no Python: name a virtual environment" in message


def test_engine_is_found_beside_a_program_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = make_environment(tmp_path / "venv") / "bin" / "python"
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "vllm").symlink_to(python.with_name("vllm"))
    monkeypatch.setenv("PATH", f"{tmp_path}/links:{os.environ['PATH']}")
    found = installation.find_installation(VllmSampler, "vllm", None)
    assert found == installation.Installation(str(python), "1.2")


def test_install_has_pip_put_the_engine_into_a_new_environment(
    tmp_path: Path, run_command: RunCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The programs that do it stand still here; the next test runs them."""
    started: list[list[str]] = []

    def run(argv: list[str], failure: str) -> None:
        started.append(argv)
        if "venv" in argv:
            make_environment(tmp_path / "new")

    monkeypatch.setattr(installation, "_run", run)
    code, output, _ = run_command(
        "engine", "install", "vllm", "--into", str(tmp_path / "new"), "--requirements", "x==1"
    )
    assert code == 0
    assert output.startswith(f"vLLM 1.2 is in {tmp_path}/new. A run starts its server:\n")
    assert f"--sampler.engine vllm --sampler.python {tmp_path}/new" in output
    (made, installed) = started
    assert made[1:] == ["-P", "-m", "venv", str(tmp_path / "new")]
    assert installed[0].startswith(f"{tmp_path}/new/bin/python")
    assert installed[1:3] == ["-m", "pip"]
    assert installed[-1] == "x==1"


@pytest.mark.full
def test_install_makes_an_environment(tmp_path: Path, run_command: RunCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "vllm.py").write_text("")
    (tmp_path / "vllm" / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        '[project]\nname = "vllm"\nversion = "1.2"\n'
    )
    (tmp_path / "vllm" / "backend.py").write_text(BACKEND)
    where = ("--into", str(tmp_path / "new"), "--requirements", str(tmp_path / "vllm"))
    code, output, _ = run_command("engine", "install", "vllm", *where)
    assert code == 0
    assert output.startswith(f"vLLM 1.2 is in {tmp_path}/new. A run starts its server:\n")
    assert f"--sampler.engine vllm --sampler.python {tmp_path}/new" in output


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["install", "vllm"], "a folder for its virtual environment"),
        (["install", "other", "--into", "x"], "install takes one of llama_cpp, vllm, sglang"),
        (["vllm", "--into", "x"], "--into and --requirements are for install"),
        (["vllm", "http://a:1"], "nothing else takes a second word"),
        (["install", "vllm", "--into", "."], "exists and is no virtual environment"),
    ],
)
def test_invalid_installs_are_refused(
    argv: list[str], message: str, tmp_path: Path, run_command: RunCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    code, _, output = run_command("engine", *argv)
    assert code == 2
    assert message in output


def test_a_server_that_other_machines_reach_needs_a_key_which_a_run_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SAMPLER_API_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"--host 10\.0\.0\.1 can be reached .* SAMPLER_API_KEY is not set"):
        EngineOptions("llama_cpp", folder="weights", host="10.0.0.1")
    EngineOptions("llama_cpp", folder="weights", host="10.0.0.1", print=True)
    EngineOptions("llama_cpp", folder="weights")
    monkeypatch.setenv("SAMPLER_API_KEY", "a secret")
    EngineOptions("llama_cpp", folder="weights", host="10.0.0.1")
    assert "SAMPLER_API_KEY" in LlamaCppSampler.variables  # which a server that a run starts is given
    assert not VllmSampler.asks_for_key  # its routes for weights do not ask
