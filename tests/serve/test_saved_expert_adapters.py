"""Adapters of mixtures of experts: other programs read what the server saves as what it samples from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from serve.conftest import trained_adapter
from torch import Tensor, nn

from doubles.architectures import families
from policygrad.learners.config import LearnerConfig
from policygrad.models.adapters import EXPERT_NAMES
from policygrad.models.loading import load_model, resolve_model
from policygrad.samplers.base import SamplingParams
from policygrad.serve.adapters import write_adapter
from policygrad.serve.models import load_network
from policygrad.serve.sampling import LocalAnswers, SampleQuery
from policygrad.training.export import export_merged

peft = pytest.importorskip("peft")

IDS = torch.randint(3, 400, (30,), generator=torch.Generator().manual_seed(0))
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "experts alone": ("qwen3_moe", {}),
    "a dense layer": ("qwen3_moe", {"mlp_only_layers": [0]}),
    "shared experts": ("glm4_moe", {}),
    "experts that PEFT does not adapt": ("llama4", {}),
}


def write_base(folder: Path, kind: str, changes: dict[str, Any]) -> Path:
    """Write a small random mixture of experts with the embedded model's tokenizer."""
    tokenizer = tf.AutoTokenizer.from_pretrained(resolve_model("tiny"))
    config = next(family.config() for family in families() if family.type == kind)
    for name, value in {**changes, "vocab_size": len(tokenizer)}.items():
        setattr(config.get_text_config(), name, value)
    torch.manual_seed(0)
    tf.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@torch.no_grad()
def logprobs(model: nn.Module) -> Tensor:
    table = model(input_ids=IDS[None], use_cache=False).logits[0, :-1].log_softmax(-1)
    found: Tensor = table.gather(1, IDS[1:, None]).squeeze(1)
    return found


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
@pytest.mark.parametrize("mixture", MIXTURES)
def test_a_saved_adapter_is_read_as_what_was_sampled_from(mixture: str, tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", *MIXTURES[mixture])
    network = load_network("experts", str(base), LearnerConfig(), adaptable=True)
    adapter = trained_adapter(network).adapter
    assert adapter is not None
    query = SampleQuery(IDS, 1, SamplingParams(), 1, (0,), prompt_logprobs=True)
    adapted, plain = (
        answer.prompt_logprobs for answer in LocalAnswers(network).answer([(query, adapter), (query, None)])
    )
    assert adapted is not None
    assert plain is not None
    assert float((adapted[1:] - plain[1:]).abs().max()) > 0.1

    write_adapter(tmp_path / "adapter", adapter, network.model, str(base))
    folder = str(tmp_path / "adapter")
    by_peft = peft.PeftModel.from_pretrained(load_model(str(base)), folder)
    network.tokenizer.save_pretrained(tmp_path / "adapter")
    merged = load_model(str(export_merged(folder, str(tmp_path / "merged"))))
    for model in (by_peft, load_model(folder), merged):
        assert torch.allclose(logprobs(model), adapted[1:], atol=1e-4)


def test_all_names_of_experts_in_pefts_table_are_known() -> None:
    from peft.utils.transformers_weight_conversion import _MOE_TARGET_MODULE_MAPPING as table

    assert {name for names in table.values() for name in names} <= EXPERT_NAMES
