"""Weights gathered one by one: they are written correctly, and only one bucket is in memory at a time."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import policygrad as pg
from policygrad.learners.fsdp.sharding import move_to_meta
from policygrad.models.adapters import add_adapters, iter_merged_tensors
from policygrad.models.loading import load_model
from policygrad.models.lora_config import Lora
from policygrad.models.tokenizer import load_tokenizer
from policygrad.models.traits import adapter_configs
from policygrad.weight_sync.base import (
    LazyStateDict,
    copy_weights_,
    iter_buckets,
    split_by_bytes,
    with_alias,
)
from policygrad.weight_sync.folder import (
    INDEX,
    make_adapter_writer,
    make_safetensors_writer,
    merge_adapters_lazily,
    save_lazy_model,
    write_safetensors,
)


class Source:
    """Tensors as if from other processes: each access makes a new one and counts those still alive."""

    def __init__(self, make: Callable[[str], Tensor], likes: dict[str, Tensor]) -> None:
        self.asked: list[str] = []
        self.most = 0
        made: list[tuple[weakref.ref[Tensor], int]] = []

        def gather(name: str) -> Tensor:
            self.asked.append(name)
            results = make(name)
            made.append((weakref.ref(results), results.nbytes))
            self.most = max(self.most, sum(size for tensor, size in made if tensor() is not None))
            return results

        self.tensors = LazyStateDict(likes, gather)


SIZES = {"a": 300, "b": 200, "c": 700, "d": 100, "e": 2000, "f": 400}


def source() -> Source:
    likes = {name: torch.empty(size, device="meta") for name, size in SIZES.items()}
    return Source(lambda name: torch.full((SIZES[name],), float(ord(name))), likes)


def test_lazy_state_dict_knows_specs_without_gathering() -> None:
    result = source()
    assert list(result.tensors) == list(SIZES)
    assert split_by_bytes(result.tensors, 4000) == [["a", "b"], ["c", "d"], ["e"], ["f"]]
    assert "a" in result.tensors or not result.asked
    with pytest.raises(KeyError):
        result.tensors["z"]


def test_only_one_bucket_is_in_memory() -> None:
    """4000 bytes, or a single larger tensor of 8000."""
    result, names = source(), list[str]()
    for bucket in iter_buckets(result.tensors, 4000):
        names += bucket.names
        del bucket
    assert names == result.asked == list(SIZES)
    assert result.most == 8000


def test_only_one_file_is_in_memory_while_writing(tmp_path: Path) -> None:
    """One gathered tensor at a time; copies of the file's tensors."""
    result = source()
    write_safetensors(result.tensors, tmp_path, 4000)
    assert result.asked == list(SIZES)
    assert result.most == 8000
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == [*(f"model-{i:05}-of-00004.safetensors" for i in range(1, 5)), INDEX]
    batched = {name: x for file in files[:-1] for name, x in load_file(tmp_path / file).items()}
    assert {name: (len(x), float(x[0])) for name, x in batched.items()} == {n: (s, ord(n)) for n, s in SIZES.items()}


def test_alias_is_gathered() -> None:
    result = source()
    two = with_alias(result.tensors, "head", "b")
    assert [*two] == [*SIZES, "head"]
    assert torch.equal(two["head"], two["b"])
    assert with_alias(two, "head", "c") is two
    plain = {"b": torch.zeros(2)}
    assert with_alias(plain, "head", "b")["head"] is plain["b"]


def gathered(model: nn.Module) -> LazyStateDict:
    """Return a model's tensors as if from other processes; the model keeps none."""
    cached = {name: p.detach().clone() for name, p in model.named_parameters()}
    move_to_meta(model)
    assert all(p.is_meta for p in model.parameters())
    return LazyStateDict({name: p.detach() for name, p in model.named_parameters()}, lambda name: cached[name].clone())


def test_sharded_safetensors_load(random_model: Path, tmp_path: Path) -> None:
    expected, model = load_model(str(random_model)), load_model(str(random_model))
    tensors = gathered(model)
    make_safetensors_writer(model, load_tokenizer(str(random_model), model).hf)(tensors, tmp_path)
    saved = tmp_path / "several"
    save_lazy_model(model, tensors, saved)
    (saved / "model.safetensors").unlink()
    write_safetensors(tensors, saved, 50_000)
    assert (saved / INDEX).is_file()
    for folder in (tmp_path, saved):
        loaded = AutoModelForCausalLM.from_pretrained(folder)
        for name, parameter in expected.named_parameters():
            assert torch.equal(loaded.get_parameter(name), parameter)


def test_lazy_adapters_are_merged_and_written_alone(random_model: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")

    def adapted() -> nn.Module:
        made = add_adapters(load_model(str(random_model)), Lora(rank=3, alpha=6.0))
        for name, p in made.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(p, std=0.2, generator=torch.Generator().manual_seed(len(name)))
        return made

    full, model = adapted(), adapted()
    expected = dict(iter_merged_tensors(full))
    tensors = gathered(model)
    result = merge_adapters_lazily(model, tensors)
    assert result.keys() == expected.keys()
    assert all(result.specs[name].shape == x.shape for name, x in expected.items())
    assert all(torch.equal(result[name], x) for name, x in expected.items())
    for one, given in ((full, dict(full.named_parameters())), (model, tensors)):
        folder = tmp_path / str(one is full)
        folder.mkdir()
        make_adapter_writer(one)(given, folder)
    baseline = [load_file(tmp_path / str(which) / "adapter_model.safetensors") for which in (True, False)]
    assert baseline[0].keys() == baseline[1].keys()
    assert all(torch.equal(baseline[0][name], baseline[1][name]) for name in baseline[0])
    assert adapter_configs(model)


def test_meta_model_refuses_weights() -> None:
    layer = nn.Linear(2, 2)
    tensors = dict(nn.Linear(2, 2).named_parameters())
    move_to_meta(layer)
    with pytest.raises(pg.EngineError, match=r"weight is sharded over the learner's processes.*one by one"):
        copy_weights_(tensors, layer)
