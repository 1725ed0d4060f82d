"""`policygrad engine`: what a server is started with so that it takes adapters alone."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from policygrad.commands import engine as engine_command
from policygrad.commands.engine import EngineOptions, build_launch_command
from policygrad.errors import ConfigError
from policygrad.models.loading import resolve_model

LORA = "rank=12,alpha=24,targets=q_proj+v_proj"


def after(argv: list[str], option: str) -> str:
    return argv[argv.index(option) + 1]


def test_vllm_command_for_adapters() -> None:
    environment, argv = build_launch_command(EngineOptions("vllm", lora=LORA))
    assert environment == {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
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
    assert build_launch_command(EngineOptions("vllm"))[0] == {"VLLM_SERVER_DEV_MODE": "1"}


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


def test_printed_command_is_shell_syntax(run_command: Callable[..., tuple[int, str, str]]) -> None:
    code, output, _ = run_command("engine", "vllm", "--lora", "rank=8", "--print")
    assert code == 0
    assert output.startswith("VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve ")
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


def test_server_does_not_import_from_the_current_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m` would put it first on the import path, and so would the processes that a server starts."""
    monkeypatch.setenv("PYTHONSAFEPATH", "")
    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "")
    started: list[tuple[str, str]] = []
    monkeypatch.setattr("os.execvp", lambda name, argv: started.append((name, os.environ["PYTHONSAFEPATH"])))
    engine_command.engine(["sglang"])
    assert started == [("python", "1")]
