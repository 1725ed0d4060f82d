"""What once ended in a traceback, in silence, or in another run than was asked for: each is one message with the way out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from transformers.utils import hub

import policygrad as pg
from doubles.files import read_examples, write_rows
from doubles.models import changed_copy
from policygrad.errors import ConfigError, DataError, ModelError, RunError
from policygrad.learners.config import OptimizerConfig
from policygrad.models.classifier import load_classifier
from policygrad.models.loading import load_model
from policygrad.models.tokenizer import load_tokenizer
from policygrad.rewards.base import Reward
from policygrad.rewards.config import RewardConfig
from policygrad.rewards.resolve import resolve_reward
from policygrad.tasks import sources
from policygrad.utils.devices import pick_device
from policygrad.utils.user_code import load_object

Command = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("--rewards.timeout", "inf"), "rewards.timeout above 0 and finite"),
        (("--rewards.timeout", "nan"), "rewards.timeout above 0 and finite"),
        (("--optimizer.betas", ".9", "2"), "optimizer.betas must be two numbers, at least 0 and below 1"),
        (("--prompts-per-step", "1000000000000"), "at most 16,777,216 completions: lower one of them"),
        (("--samples-per-prompt", "1000000000000"), "at most 16,777,216 completions"),
        (
            ("--evaluation.problems", "1000000000000"),
            "evaluation.problems 1000000000000 times evaluation.samples_per_prompt 8",
        ),
        (("--lr", "1e300"), "lr must be at most 1e+06, not 1e+300"),
        (("--optimizer.eps", "inf"), "optimizer.eps must be finite"),
        (("--seed", str(2**63)), "seed must be at least 0 and below 2**63"),
        (
            ("--algorithm.advantage", "GroupMean,GroupStd", "--algorithm.advantage.group-std.eps=-1"),
            "GroupStd.eps must be at least 0",
        ),
        (("--reward",), "--reward needs at least one value"),
        (("--reward", "--steps", "3"), "--reward needs at least one value"),
        (("--reward=",), "--reward needs at least one value"),
        (("--reward", ""), "--reward needs at least one value"),
        (("--allow-code",), "--allow-code needs at least one value"),
    ],
)
def test_invalid_words_are_refused(run_command: Command, argv: tuple[str, ...], says: str) -> None:
    code, _, err = run_command("train", *argv, "--dry-run")
    assert code == 2
    assert says in " ".join(err.replace("│", "").split())  # which the parser may have put into a box


def test_other_commands_refuse_invalid_words(run_command: Command) -> None:
    for argv in (
        ("--reward",),
        ("--budget", "inf"),
        ("--seed", str(2**63)),
        ("--threshold", "nan"),
        ("--problems", "1000000000000"),
    ):
        code, _, err = run_command("eval", "tiny", *argv)
        assert code == 2
        assert err.strip()
    assert run_command("sft", "--data", "x", "--seed", str(2**63), "--dry-run")[0] == 2
    with pytest.raises(ConfigError, match="positive and finite"):
        Reward("f", len, timeout=float("inf"))  # type: ignore[arg-type]
    assert RewardConfig(timeout=1e9).timeout == 1e9
    assert OptimizerConfig(betas=(0.0, 0.999)).betas == (0.0, 0.999)


def test_the_meta_device_is_refused() -> None:
    with pytest.raises(RunError, match=r"learner\.device='meta' cannot be used here"):
        pick_device("meta")
    assert pick_device("cpu") == "cpu"


def test_an_invalid_seed_is_refused_in_python() -> None:
    assert pg.Run(seed=2**63 - 1).seed == 2**63 - 1
    with pytest.raises(ConfigError, match="seed"):
        pg.Run(seed=2**64)


@pytest.mark.full
@pytest.mark.parametrize("name", ["x" * 300, "a/" + "b" * 300])
def test_a_name_that_is_too_long_is_refused(
    run_command: Command, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for argv in (("--model", name), ("--reward", f"model:{name}")):
        code, _, err = run_command("train", *argv)
        assert code == 2
        assert "a name has at most 255 bytes" in err
    assert run_command("train", "--output", name)[0] == 2
    assert run_command("train", "--task", f"{name}.jsonl")[0] == 2


@pytest.mark.parametrize(
    "argv", [("train",), ("sft", "--data", "x"), ("reward-model", "--data", "x"), ("compare", "grpo")]
)
def test_an_empty_output_is_refused(
    run_command: Command, argv: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = run_command(*argv, "--output", "")
    assert (code, list(tmp_path.iterdir())) == (2, [])
    assert "output must name a folder, not ''" in err


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (
            ("plan", "--gpus", "cpu:1", "--model", "tiny", "--output", "x" * 300),
            "File name too long; choose another name",
        ),
        (("plan", "--gpus", "cpu:1", "--model", "x" * 300), "neither a folder with a config.json nor a known name"),
        (("plan", "--gpus", "cpu:1", "--model", "tiny", "--samples-per-prompt", "1" + "0" * 30), "at most 16,777,216"),
        (("engine", "vllm", "--print", "--model", "."), "cannot load the model '.', whose folder needs config.json"),
    ],
)
def test_options_of_other_commands_are_checked(
    run_command: Command, argv: tuple[str, ...], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = run_command(*argv)
    assert code == 2
    assert says in err


@pytest.mark.parametrize("name", ["a\0b", "a\ud800"])
@pytest.mark.parametrize("option", ["output", "directory"])
@pytest.mark.parametrize("config", [pg.Run, pg.SFTConfig])
def test_invalid_file_names_are_refused(config: Callable[..., object], option: str, name: str) -> None:
    with pytest.raises(ConfigError, match=f"{option} must name a folder"):
        config(**{option: name})


def test_the_embedded_model_as_a_reward_is_refused_with_a_hint() -> None:
    with pytest.raises(ModelError, match=r"not a reward model: `policygrad reward-model --data pairs\.jsonl`"):
        resolve_reward("model:tiny")


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"generation_config.json": "{"}, r"generation_config\.json is not JSON"),
        ({"generation_config.json": "[]"}, r"generation_config\.json is not a JSON object"),
        ({"generation_config.json": '{"eos_token_id": "x"}'}, "an end token of .* is 'x', not a token id"),
        ({"tokenizer_config.json": "[]"}, r"tokenizer_config\.json is not a JSON object"),
        ({"hidden_size": 97}, "hidden size .*97.* is not a multiple of"),
        ({"hidden_size": "x"}, "'hidden_size' expected int"),
        ({"num_attention_heads": 0}, "cannot load the model"),
        ({"vocab_size": 10}, "another shape than config.json for 1 tensor"),
        ({"model_type": "bart", "is_encoder_decoder": True}, "is an encoder-decoder"),
    ],
)
def test_inconsistent_models_are_refused(random_model: Path, tmp_path: Path, files: dict[str, Any], says: str) -> None:
    texts = {name: text for name, text in files.items() if name.endswith(".json")}
    changes: Any = {} if texts else {"config": files}
    folder = changed_copy(random_model, tmp_path / "model", **changes)
    for name, text in texts.items():
        (folder / name).write_text(text)
    with pytest.raises(ModelError, match=says):
        load_tokenizer(str(folder), load_model(str(folder)))


def test_a_model_smaller_than_its_vocabulary_is_refused(random_model: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(random_model)
    network.resize_token_embeddings(10)
    folder = changed_copy(random_model, tmp_path / "model")
    network.save_pretrained(folder)
    says = "tokens and the model has embeddings for 10: give the tokenizer"
    with pytest.raises(ModelError, match=says):
        pg.train(pg.Run(model=str(folder), output=str(tmp_path / "run"), steps=1), display=False)
    rows = [{"prompt": f"{i} =\n", "completion": "1", "chosen": "1", "rejected": "2"} for i in range(4)]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    for train, config in ((pg.train_sft, pg.SFTConfig), (pg.train_reward_model, pg.RewardModelConfig)):
        with pytest.raises(ModelError, match=says):
            train(config(data=data, model=str(folder), output=str(tmp_path / "run")), display=False)  # type: ignore[operator]


def test_an_encoder_decoder_reward_model_is_refused(tmp_path: Path) -> None:
    from transformers import BartConfig, BartForSequenceClassification

    sizes = {"d_model": 8, "vocab_size": 30, "max_position_embeddings": 32}
    sizes |= {f"{side}_{what}": 1 for side in ("encoder", "decoder") for what in ("layers", "attention_heads")}
    sizes |= {"encoder_ffn_dim": 8, "decoder_ffn_dim": 8}
    BartForSequenceClassification(BartConfig(**sizes, num_labels=1)).save_pretrained(tmp_path)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=r"\(bart\) is an encoder-decoder"):
        load_classifier(str(tmp_path))


def test_an_encoder_decoder_on_the_hub_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which transformers would load the decoder as a causal model."""
    (tmp_path / "config.json").write_text('{"model_type": "bart", "is_encoder_decoder": true}')
    report = SimpleNamespace(siblings=[])
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **options: report)
    monkeypatch.setattr(hub, "cached_file", lambda path, name, **options: str(tmp_path / name))
    with pytest.raises(ModelError, match=r"'org/bart' \(bart\) is an encoder-decoder"):
        load_model("org/bart")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"prompt": "1", "x": NaN}', "NaN is not JSON; write null"),
        ('{"prompt": "1", "x": -Infinity}', "-Infinity is not JSON"),
        ('{"prompt": "1", "prompt": "2"}', "the key 'prompt' is there twice"),
        ('{"prompt": "1", "x": {"a": 1, "b": 2, "a": 3}}', "the key 'a' is there twice"),
    ],
)
def test_invalid_json_is_refused(tmp_path: Path, line: str, says: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "0", "x": 1}\n' + line + "\n")
    with pytest.raises(DataError, match=rf"rows\.jsonl:2: .*{says}"):
        read_examples(str(file))


def test_an_overlong_line_is_refused_before_parsing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'{"prompt": "' + b"x" * sources.MAX_LINE_BYTES + b'"}\n')
    monkeypatch.setattr(json, "loads", lambda *_, **__: pytest.fail("parsed"))
    with pytest.raises(DataError, match=r"rows\.jsonl:1: a line of 16 MiB, more than 16 MiB"):
        read_examples(str(file))


def test_custom_code_that_exits_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "exits_at_once.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for reward in (f"{tmp_path / 'exits_at_once.py'}:f", "exits_at_once.f"):
        with pytest.raises(ConfigError, match="raised SystemExit: 0"):
            resolve_reward(reward)
    for part in ("exits_at_once:F", "exits_at_once.py:F"):
        with pytest.raises(ConfigError, match="raised SystemExit: 0"):
            load_object(part, "a part")
