"""A model's folder is read, and nothing in it is run: no code, no pickle, no question on the terminal."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file

import policygrad as pg
from doubles.files import write_rows
from doubles.models import OUT, changed_copy
from policygrad.errors import ModelError
from policygrad.models.classifier import load_classifier, read_num_labels
from policygrad.models.loading import load_model, reject_pickle_files
from policygrad.models.lora_config import Lora
from policygrad.models.tokenizer import load_tokenizer
from policygrad.training.cost_estimate import estimate_memory

CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
Path({ran!r}).write_text("ran")
class OwnConfig(LlamaConfig):
    model_type = "own-llama"
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def with_code(random_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model of an architecture that only the Python in its folder knows; running that leaves the file `ran` beside it."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked on the terminal"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    names = {"AutoConfig": "own_code.OwnConfig", "AutoModelForCausalLM": "own_code.OwnModel"}
    folder = changed_copy(random_model, tmp_path / "own", config={"model_type": "own-llama", "auto_map": names})
    (folder / "own_code.py").write_text(CODE.format(ran=str(tmp_path / "ran")))
    return folder


def test_code_in_a_model_s_folder_runs_only_when_it_is_trusted(with_code: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"includes its own code.* give --trust-remote-code"):
        load_model(str(with_code))
    with pytest.raises(ModelError, match="--trust-remote-code"):
        read_num_labels(str(with_code))
    with pytest.raises(ModelError, match="--trust-remote-code"):
        load_classifier(str(with_code))
    with pytest.raises((ModelError, ValueError)):
        estimate_memory(pg.Run(model=str(with_code)).resolve())
    assert not (tmp_path / "ran").exists()
    loaded = load_model(str(with_code), trust_remote_code=True)
    assert (tmp_path / "ran").exists()
    assert type(loaded).__name__ == "OwnModel"
    assert load_tokenizer(str(with_code), loaded, trust_remote_code=True).end_ids


def test_code_of_a_tokenizer_is_refused_too(random_model: Path, tmp_path: Path, with_code: Path) -> None:
    (with_code / "own_tokenizer.py").write_text(CODE.format(ran=str(tmp_path / "ran")) + "\nclass Own: pass\n")
    changed = {"auto_map": {"AutoTokenizer": ["own_tokenizer.Own", None]}, "tokenizer_class": "Own"}
    changed_copy(with_code, tmp_path / "tokenizer", tokenizer_config=changed)
    with pytest.raises(ModelError, match=r"the tokenizer of .* includes its own code"):
        load_tokenizer(str(tmp_path / "tokenizer"), load_model(str(random_model)))
    assert not (tmp_path / "ran").exists()


def test_the_option_reaches_every_command(
    run_command: Callable[..., tuple[int, str, str]], with_code: Path, small: pg.Run, tmp_path: Path
) -> None:
    argv = (
        "--task",
        str(small.task),
        "--problems",
        "2",
        "--samples",
        "1",
        "--reward",
        "exact_match",
        "--max-tokens",
        "2",
    )
    code, _, err = run_command("eval", str(with_code), *argv)
    assert code == 2
    assert "--trust-remote-code" in err
    code, _, err = run_command("eval", str(with_code), *argv, "--trust-remote-code")
    assert code == 0, err
    run = replace(small, model=str(with_code), output=str(tmp_path / "run"), steps=1)
    with pytest.raises(ModelError, match="--trust-remote-code"):
        pg.train(run, display=False)
    assert pg.train(replace(run, trust_remote_code=True), display=False).steps == 1


@pytest.mark.parametrize(
    ("command", "row"),
    [
        ("sft", {"prompt": "1 =\n", "completion": "1"}),
        ("reward-model", {"prompt": "1 =\n", "chosen": "1", "rejected": "2"}),
    ],
)
def test_sft_and_reward_models_need_trust_too(
    run_command: Callable[..., tuple[int, str, str]], with_code: Path, tmp_path: Path, command: str, row: dict[str, str]
) -> None:
    data = write_rows(tmp_path / "rows.jsonl", [row | {"prompt": f"{i} =\n"} for i in range(4)])
    argv = (command, "--data", data, "--model", str(with_code), "--output", str(tmp_path / "run"), "--stop-after", "1")
    code, _, err = run_command(*argv)
    assert code == 2
    assert "--trust-remote-code" in err
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "run").exists()
    run_command(*argv, "--trust-remote-code")  # what becomes of it is another matter: its code has run
    assert (tmp_path / "ran").exists()


class Program:
    """What unpickling runs."""

    def __init__(self, ran: Path) -> None:
        self.ran = ran

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.ran),)


def test_pickled_weights_are_refused_with_a_remedy(random_model: Path, tmp_path: Path) -> None:
    folder = changed_copy(random_model, tmp_path / "pickled")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Program(tmp_path / "ran")))
    for load in (load_model, load_classifier):
        with pytest.raises(ModelError, match=r"pytorch_model\.bin, a pickle.*save_pretrained"):
            load(str(folder))
    assert not (tmp_path / "ran").exists()
    torch.save(tensors, folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="a pickle") as caught:
        load_model(str(folder))
    way_out = str(caught.value).partition('python -c "')[2].rpartition('"')[0]
    exec(way_out, {})
    assert torch.equal(load_model(str(folder)).get_input_embeddings().weight, tensors["model.embed_tokens.weight"])  # type: ignore[operator]


def test_a_pickled_adapter_is_always_refused(random_model: Path, tmp_path: Path) -> None:
    folder = changed_copy(random_model, tmp_path / "adapter", adapter_config={"peft_type": "LORA"})
    (folder / "adapter_model.bin").write_bytes(b"")
    for load in (load_model, load_classifier):
        with pytest.raises(ModelError, match=r"adapter_model\.bin, a pickle"):
            load(str(folder))


def test_the_conversion_command_runs_no_code(random_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    model = load_model(str(random_model), lora=Lora(rank=2))
    model.save_pretrained(folder)  # type: ignore[operator]
    tensors = load_file(folder / "adapter_model.safetensors")
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.bin").write_bytes(pickle.dumps(Program(tmp_path / "ran")))
    with pytest.raises(ModelError, match="a pickle") as caught:
        load_model(str(folder))
    way_out = str(caught.value).partition('python -c "')[2].rpartition('"')[0]
    with pytest.raises(pickle.UnpicklingError):
        exec(way_out, {})
    assert not (tmp_path / "ran").exists()
    torch.save(tensors, folder / "adapter_model.bin")
    exec(way_out, {})
    loaded = dict(load_model(str(folder)).named_parameters())
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in model.named_parameters() if tensor.requires_grad)


@pytest.mark.parametrize("cached", [False, True])
def test_an_adapter_on_the_hub_that_has_only_a_pickle_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cached: bool
) -> None:
    """Nothing of it is fetched; without a network, what the cache has of it is looked at."""
    there = ["adapter_config.json", "adapter_model.bin"]

    def told(*_: Any, **options: Any) -> Any:
        if cached:
            raise ConnectionRefusedError("no network")
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in there])

    def in_cache(repository: str, name: str) -> str | None:
        return str(tmp_path / name) if name == "adapter_config.json" else None

    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "org/base"}')
    (tmp_path / "adapter_model.bin").write_bytes(b"")
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", told)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", in_cache)
    for load in (load_model, load_classifier):
        with pytest.raises(ModelError, match=r"adapter_model\.bin, a pickle.*weights_only=True") as caught:
            load(f"org/pickled-{cached}")
        if not cached:
            assert "`hf download org/pickled-False --local-dir pickled-False`" in str(caught.value)
            assert str(caught.value).endswith("and give pickled-False")


def test_a_hub_adapter_with_safetensors_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["adapter_model.bin", "adapter_model.safetensors", "pytorch_model.bin"]
    told = SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in names])
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **options: told)
    reject_pickle_files("org/both", "the model")


def test_an_architecture_of_transformers_needs_no_code_of_the_folder(random_model: Path, tmp_path: Path) -> None:
    """Many folders bring code along that transformers has meanwhile: its own is taken."""
    names = {"AutoModelForCausalLM": "own_code.OwnModel"}
    folder = changed_copy(random_model, tmp_path / "known", config={"auto_map": names, "dtype": OUT})
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"
    assert type(load_model(str(folder))).__name__ == "LlamaForCausalLM"
