"""What TRL's scripts import beside the trainers, and scripts that run as they are."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import policygrad.trl
from policygrad.trl import (
    GRPOConfig,
    ModelConfig,
    ScriptArguments,
    TrlParser,
    get_peft_config,
    get_quantization_config,
    rewards,
)
from policygrad.trl import __main__ as command

QUICK_START = """
from datasets import load_dataset
from trl import GRPOTrainer
from trl.rewards import accuracy_reward

dataset = load_dataset("trl-lib/DeepMath-103K", split="train")

trainer = GRPOTrainer(
    model="Qwen/Qwen2.5-0.5B-Instruct",
    reward_funcs=accuracy_reward,
    train_dataset=dataset,
)
trainer.train()
"""
"""The quick start of TRL's README, 1.16, word for word."""


@pytest.fixture
def as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave neither aliases of TRL nor a command line behind."""
    for name in [name for name in sys.modules if name.split(".")[0] == "trl"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    yield  # type: ignore[misc]
    for name in [name for name in sys.modules if name.split(".")[0] == "trl"]:
        del sys.modules[name]


def run_script(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["policygrad.trl", *arguments])
    command.main()


@pytest.mark.full
def test_the_quick_start_of_trls_readme_trains_on_local_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_before: None
) -> None:
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from policygrad.models.loading import resolve_model

    tokenizer = AutoTokenizer.from_pretrained(resolve_model("tiny"))
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=1024,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    folder = tmp_path / "Qwen" / "Qwen2.5-0.5B-Instruct"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    data = tmp_path / "trl-lib" / "DeepMath-103K" / "train.jsonl"
    data.parent.mkdir(parents=True)
    rows = [
        {"prompt": [{"role": "user", "content": f"What is {i} + {i}?"}], "solution": f"${2 * i}$"} for i in range(2)
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "quick_start.py").write_text(QUICK_START)
    monkeypatch.chdir(tmp_path)
    run_script(monkeypatch, "quick_start.py")
    assert (tmp_path / "Qwen2.5-0.5B-Instruct-GRPO" / "checkpoint-6" / "model.safetensors").is_file()
    metrics = (tmp_path / "Qwen2.5-0.5B-Instruct-GRPO" / "policygrad" / "metrics.jsonl").read_text().splitlines()
    assert len(metrics) == 6  # two prompts, one per generation, three epochs


def test_a_script_finds_trls_names_and_its_own_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], as_before: None
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nfrom trl import GRPOTrainer\nfrom trl.rewards import think_format_reward\n"
        "from trl.trainer.grpo_config import GRPOConfig\nimport helper\n"
        "print(GRPOTrainer.__module__, GRPOConfig.__module__, think_format_reward.__module__, sys.argv[1:], helper.X)\n"
    )
    (tmp_path / "helper.py").write_text("X = 5\n")
    run_script(monkeypatch, str(script), "--lr", "1")
    assert capsys.readouterr().out.split() == [
        *("policygrad.trl.trainer", "policygrad.trl.config", "policygrad.trl.rewards", "['--lr',", "'1']", "5"),
    ]


def test_what_is_not_here_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_before: None) -> None:
    script = tmp_path / "script.py"
    script.write_text("from trl import SFTTrainer\n")
    with pytest.raises(
        ImportError, match=r"trl\.SFTTrainer is not in policygrad\.trl, which has GRPOConfig, .*use TRL"
    ):
        run_script(monkeypatch, str(script))
    with pytest.raises(SystemExit, match=r"there is no file .*absent\.py"):
        run_script(monkeypatch, str(tmp_path / "absent.py"))


def test_the_package_offers_its_names_lazily() -> None:
    assert {"GRPOConfig", "GRPOTrainer", "RLOOConfig", "RLOOTrainer", "TrlParser"} <= set(policygrad.trl.__all__)
    with pytest.raises(AttributeError, match="DPOTrainer"):
        policygrad.trl.DPOTrainer  # noqa: B018


def test_the_parser_reads_a_file_and_the_command_line_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "grpo.yaml"
    file.write_text(
        "dataset_name: rows\nlearning_rate: 1.0e-5\nnum_generations: 4\nuse_peft: true\nlora_r: 8\n"
        "generation_kwargs: {top_k: 5}\nenv: {A_NAME_OF_OURS: 3}\n"
    )
    monkeypatch.delenv("A_NAME_OF_OURS", raising=False)
    parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig))
    arguments = [
        "--config",
        str(file),
        "--learning_rate",
        "2e-5",
        "--output_dir",
        str(tmp_path),
        "--use_cpu",
        "--beta",
        "0.1",
    ]
    script, config, model = parser.parse_args_and_config([*arguments, "--per_device_train_batch_size", "4"])
    assert (script.dataset_name, config.learning_rate, config.num_generations, config.beta) == ("rows", 2e-5, 4, 0.1)
    assert config.generation_kwargs == {"top_k": 5}
    import os

    assert os.environ.pop("A_NAME_OF_OURS") == "3"
    adapters = get_peft_config(model)
    assert (adapters.r, adapters.lora_alpha) == (8, 32)
    assert get_quantization_config(model) is None
    assert get_peft_config(ModelConfig()) is None


def test_the_parser_names_what_no_argument_has(tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text("learning_rat: 1.0e-5\nnum_generation: 4\n")
    parser = TrlParser((ScriptArguments,))
    with pytest.raises(ValueError, match="--learning_rat --num_generation"):
        parser.parse_args_and_config(["--config", str(file)])
    _, left = parser.parse_args_and_config(["--config", str(file)], return_remaining_strings=True)
    assert left == ["--learning_rat", "1e-05", "--num_generation", "4"]
    file.write_text("- a list\n")
    with pytest.raises(ValueError, match="must hold a mapping"):
        parser.parse_args_and_config(["--config", str(file)])
    with pytest.raises(ValueError, match="needs the name of a YAML file"):
        parser.parse_args_and_config(["--config"])


def test_a_model_is_quantised_in_one_way() -> None:
    with pytest.raises(ValueError, match="choose one"):
        ModelConfig(load_in_4bit=True, load_in_8bit=True)


def message(text: str) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": text}]


def test_trls_rewards_by_their_examples() -> None:
    """Of TRL's docstrings."""
    thirds = [message(r"My answer is \boxed{\frac{1}{3}}"), message(r"My answer is \boxed{\frac{1}{2}}")]
    assert rewards.accuracy_reward(thirds, [r"\frac{1}{3}"] * 2) == [1.0, 0.0]
    assert rewards.accuracy_reward(thirds[:1], ["no formula at all"]) == [None]
    reasoned = [
        message(r"<think> a </think> The final answer is \boxed{\frac{1}{3}}"),
        message(r"<think> a </think> The final answer is \boxed{\frac{1}{2}}"),
        message(r"<think> partial \boxed{\frac{1}{3}}"),
    ]
    logged: dict[str, Any] = {}
    found = rewards.reasoning_accuracy_reward(reasoned, [r"\frac{1}{3}"] * 3, log_extra=logged.__setitem__)
    assert found == [1.0, 0.0, 0.0]
    assert logged["answer_parsed"][2] == "[incomplete reasoning]"
    thoughts = [message("<think>\nA\n</think>\nB"), message("<think>\nA\nB"), message("<think> <think> A </think>B")]
    assert rewards.think_format_reward(thoughts) == [1.0, 0.0, 0.0]
    assert rewards.get_soft_overlong_punishment(100, 20)([[1] * 90, [1] * 80, [1] * 101]) == [-0.5, 0.0, -1.0]
    assert rewards.get_repetition_penalty_reward(2)([[1, 2, 3, 4], [5] * 5, [1]]) == [0.0, -0.75, 0.0]
    cosine = rewards.get_cosine_scaled_reward(100)
    assert cosine(thirds, [r"\frac{1}{3}"] * 2, [[1] * 50] * 2) == pytest.approx([0.75, -0.75])
    with pytest.raises(ValueError, match="should not be positive"):
        rewards.get_repetition_penalty_reward(max_penalty=1.0)


def test_without_a_script_the_command_says_how_it_is_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, code in (["--help"], 0), ([], 2):
        with pytest.raises(SystemExit) as end:
            run_script(monkeypatch, *arguments)
        assert end.value.code == code
        assert "usage: python -m policygrad.trl SCRIPT" in capsys.readouterr().out
