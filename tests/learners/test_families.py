"""Every family of architectures in tests/architectures.toml samples and learns, in full and with LoRA, or is refused by name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from packaging.version import Version
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import policygrad as pg
from doubles.architectures import Family, families
from doubles.drawing import Context, sample
from policygrad.errors import ConfigError, ModelError
from policygrad.learners.base import LearnerSpec
from policygrad.learners.local.learner import LocalLearner
from policygrad.models.adapters import add_adapters, iter_merged_tensors
from policygrad.models.loading import load_model
from policygrad.models.lora_config import Lora
from policygrad.samplers.base import SamplingParams
from policygrad.samplers.local.sampler import LocalSampler

LENGTHS = (2, 75)
"""Of the prompts: padded on the left where they are read together, the longer one beyond every limit of the configurations
(windows, chunks, top-k, compressed blocks), and of the delta rule's blocks of 64."""
ADAPTED = ("qwen3-", "qwen3_moe-", "jamba-", "deepseek_v3-")  # attention, experts, a state space, latent attention
FAMILIES = [pytest.param(f, id=f.name, marks=() if f.short else pytest.mark.full) for f in families()]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {}


def folder_of(family: Family, saved: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    """The family's small random model on the disk, written once."""
    if family.name not in saved:
        torch.manual_seed(0)
        saved[family.name] = tmp_path_factory.mktemp("family")
        model = tf.AutoModelForCausalLM.from_config(family.config())
        with torch.no_grad():  # 0 there would be a key of 0, and an indexer's top-k of equal scores is arbitrary
            model.get_input_embeddings().weight[0] = torch.randn(model.get_input_embeddings().weight.shape[1])
        model.save_pretrained(saved[family.name])
    return str(saved[family.name])


@dataclass
class Trained:
    """What two steps did."""

    gap: float
    """Nats between sampler and learner, at most."""
    truth: float
    """Nats between the learner and transformers' own model with the same weights, text by text, at most."""
    longest: int
    """Tokens of the longest text."""
    moved: bool
    """Whether every step changed weights."""
    sampling: str
    learning: str


def two_steps(path: str, lora: Lora | None) -> Trained:
    """GRPO with completions of the model's own and made-up rewards; sampler and learner in this process, as a run has them."""
    model, algorithm = load_model(path, lora=lora), pg.GRPO
    sampler = LocalSampler(model, frozenset({1}), 0)
    learner, gap, moved = LocalLearner(model, LearnerSpec(algorithm, lr=1e-2, steps=2)), 0.0, True
    plain, truth, longest = tf.AutoModelForCausalLM.from_pretrained(path).eval(), 0.0, 0
    trained = [p for p in model.parameters() if p.requires_grad]
    for step in range(2):
        prompts = [Context(torch.arange(n) * 7 % 37 + 3, (step, i)) for i, n in enumerate(LENGTHS)]
        drawn = [c for group in sample(sampler, prompts, 2, SamplingParams(max_tokens=6)) for c in group]
        mask = pad_sequence([torch.ones(len(c.tokens), dtype=torch.bool) for c in drawn], batch_first=True)
        batch = pg.Batch(
            mask=mask,
            group=torch.arange(2).repeat_interleave(2),
            reward=torch.arange(4.0) % 2,
            tokens=pad_sequence([c.tokens for c in drawn], batch_first=True),
            prompts=tuple(p.tokens for p in prompts),
            logp_sampler=pad_sequence([c.logp for c in drawn], batch_first=True),
        )
        scored = learner.evaluate(batch, algorithm.needs | {"logp_old"})
        assert isinstance(scored.logp_old, Tensor)
        assert isinstance(batch.logp_sampler, Tensor)
        gap = max(gap, float((scored.logp_old - batch.logp_sampler)[mask].abs().max()))
        plain.load_state_dict(dict(iter_merged_tensors(model)) if lora else model.state_dict(), strict=lora is None)
        learned = [row[kept] for row, kept in zip(scored.logp_old, mask, strict=True)]
        for completion, group, logp in zip(drawn, batch.group.tolist(), learned, strict=True):
            text = torch.cat([prompts[group].tokens, completion.tokens])
            with torch.no_grad():
                logits = plain(input_ids=text[None], use_cache=False).logits[0, -len(logp) - 1 : -1]
            expected = logits.log_softmax(-1).gather(1, completion.tokens[:, None])[:, 0]
            truth, longest = max(truth, float((logp - expected).abs().max())), max(longest, len(text))
        before = [p.detach().clone() for p in trained]
        learner.update(scored, algorithm.compute_advantages(scored), algorithm)
        moved = moved and any(not torch.equal(old, new) for old, new in zip(before, trained, strict=True))
    network = learner.evaluator.network
    learning = "tree" if network.use_tree else "cache" if network.reads_prefixes else "texts"
    return Trained(gap, truth, longest, moved, "once" if sampler._shares_prefixes else "rows", learning)


FORMS = [
    pytest.param(
        f,
        form,
        id=f"{f.name}-{form}",
        marks=() if f.short and (form == "full" or f.name.startswith(ADAPTED)) else pytest.mark.full,
    )
    for f in families()
    for form in ("full", "lora")
]


@pytest.mark.parametrize(("family", "form"), FORMS)
def test_sampler_and_learner_agree_for_every_family(
    family: Family, form: str, saved: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    if form == "lora":
        pytest.importorskip("peft")
    if family.type == "deepseek_v4" and Version(tf.__version__) < Version("5.23"):
        pytest.skip("its cache cannot be reordered by transformers 5.17, which the sampler says")
    path, lora = folder_of(family, saved, tmp_path_factory), Lora(rank=2) if form == "lora" else None
    if family.refused:
        with pytest.raises(ModelError, match=family.refused) as caught:
            two_steps(path, lora)
        assert "ForCausalLM" in str(caught.value)
        return
    result = two_steps(path, lora)
    assert result.gap < (0.1 if family.has_ties else 1e-5)  # equal scores are chosen among in each batch anew
    assert result.truth < (5e-5 if lora else 1e-5)  # merged weights are rounded
    assert result.longest > max(limits_of(family.config().get_text_config().to_dict()), default=0)
    assert result.moved
    assert (result.sampling, result.learning) == (family.sampling, family.learning)


def limits_of(settings: Any) -> Iterator[int]:
    """Every number of tokens in a configuration beyond which a layer computes otherwise, by their names."""
    for key, value in settings.items():
        if re.search(r"(window|window_size|chunk_size|block_size|index_topk|compress_rates)$", key):
            yield from (x for x in (value.values() if isinstance(value, dict) else [value]) if isinstance(x, int))


@pytest.mark.parametrize("family", [p for p in FAMILIES if p.values[0].left_out])  # type: ignore[attr-defined]
def test_lora_skips_exactly_the_layers_without_an_adapter_and_refuses_them_by_name(family: Family) -> None:
    peft = pytest.importorskip("peft")
    model = tf.AutoModelForCausalLM.from_config(family.config())
    linear = {n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and m is not model.lm_head}
    add_adapters(model, Lora(rank=2))
    adapted = {n for n, m in model.named_modules() if isinstance(m, peft.tuners.tuners_utils.BaseTunerLayer)}
    assert {n.rpartition(".")[2] for n in linear - adapted} == {*family.left_out}
    other = tf.AutoModelForCausalLM.from_config(family.config())
    with pytest.raises(
        ConfigError, match=f"the layer '{family.left_out[0]}' of {type(other).__name__} .* does not support an adapter"
    ):
        add_adapters(other, Lora(rank=2, targets=family.left_out[0]))
