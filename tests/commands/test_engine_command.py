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


def after(words: list[str], option: str) -> str:
    return words[words.index(option) + 1]


def test_vllm_is_given_room_for_the_rank_and_takes_adapters_while_it_runs() -> None:
    environment, words = build_launch_command(EngineOptions("vllm", lora=LORA))
    assert environment == {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    assert "--enable-lora" in words
    assert after(words, "--max-lora-rank") == "16"  # it knows some ranks only
    assert after(words, "--max-loras") == "1"
    assert after(words, "--logprobs-mode") == "processed_logprobs"
    assert words[2] == resolve_model("tiny")
    exact = build_launch_command(EngineOptions("vllm", lora="rank=320"))[1]
    assert after(exact, "--max-lora-rank") == "320"


def test_without_an_adapter_nothing_of_it_is_said() -> None:
    for engine in ("vllm", "sglang"):
        environment, words = build_launch_command(EngineOptions(engine))  # type: ignore[arg-type]
        assert not [word for word in (*environment, *words) if "LORA" in word or ("--" in word and "lora" in word)]
    assert build_launch_command(EngineOptions("vllm"))[0] == {"VLLM_SERVER_DEV_MODE": "1"}


def test_sglang_is_told_the_rank_and_the_layers() -> None:
    _, words = build_launch_command(EngineOptions("sglang", lora=LORA))
    assert "--enable-lora" in words
    assert after(words, "--max-lora-rank") == "12"
    at = words.index("--lora-target-modules")
    assert words[at + 1 :] == ["q_proj", "v_proj"]
    assert after(build_launch_command(EngineOptions("sglang", lora="rank=4"))[1], "--lora-target-modules") == "all"


def test_of_an_adapters_folder_a_server_begins_with_what_it_adapts(tmp_path: Path) -> None:
    said = {"base_model_name_or_path": resolve_model("tiny"), "r": 40, "lora_alpha": 80, "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(said))
    _, words = build_launch_command(EngineOptions("vllm", model=str(tmp_path)))
    assert words[2] == resolve_model("tiny")
    assert after(words, "--max-lora-rank") == "64"


def test_what_is_printed_can_be_read_by_a_shell(run_command: Callable[..., tuple[int, str, str]]) -> None:
    code, said, _ = run_command("engine", "vllm", "--lora", "rank=8", "--print")
    assert code == 0
    assert said.startswith("VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve ")
    assert "--max-lora-rank 8 --enable-lora" in said


@pytest.mark.parametrize(
    ("engine", "lora", "words"),
    [
        ("vllm", "rank=600", "up to rank 512: --sampler.lora-sync whole"),
        ("vllm", "rank=8,bits=4", "leave bits out"),
        ("llama_cpp", "rank=8", "--lora is for servers of vllm and sglang"),
        ("vllm", "rank", "says nothing"),
    ],
)
def test_what_no_server_can_be_told_is_refused(engine: str, lora: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build_launch_command(EngineOptions(engine, lora=lora, folder="."))  # type: ignore[arg-type]


def test_a_server_and_its_processes_leave_the_current_folder_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m` would put it first on the import path, and so would the processes that a server starts."""
    monkeypatch.setenv("PYTHONSAFEPATH", "")
    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "")
    started: list[tuple[str, str]] = []
    monkeypatch.setattr("os.execvp", lambda name, words: started.append((name, os.environ["PYTHONSAFEPATH"])))
    engine_command.engine(["sglang"])
    assert started == [("python", "1")]
