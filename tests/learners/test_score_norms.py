"""Exact score norms: against one completion's gradient at a time, nothing shared, on the models people train."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

import policygrad as pg
from doubles.architectures import CONFIGS, PLAIN, long_batch
from doubles.batches import make_batch, naive_logp
from doubles.cases import keep_fast
from policygrad.learners.base import LearnerSpec
from policygrad.learners.config import LearnerConfig
from policygrad.learners.local.forward import build_evaluator
from policygrad.learners.local.learner import LocalLearner
from policygrad.learners.local.packing import pack_micro_batches
from policygrad.learners.local.score_norms import ScoreNorms, select_parameters
from policygrad.models.loading import load_model

RLOO = replace(pg.RLOO, advantage=(pg.OptimalBaseline(),), shaping=())


def naive_norms(model: nn.Module, batch: pg.Batch, temperature: float = 1.0, part: str = "") -> Tensor:
    """The definition: ∇ Σ_t log π(o_t) of each completion alone, squared and summed over the parameters named."""
    theta = [p for n, p in model.named_parameters() if part in n]
    total = torch.where(batch.mask, naive_logp(model, batch, temperature), 0).sum(1)
    out = torch.zeros(len(total), dtype=torch.float64)
    for i in range(len(total)):
        score = torch.autograd.grad(total[i], theta, retain_graph=True, allow_unused=True)
        out[i] = sum(float(g.square().sum()) for g in score if g is not None)
    return out


def norms_of(model: nn.Module, temperature: float = 1.0, **config: Any) -> ScoreNorms:
    return ScoreNorms.of(build_evaluator(model, temperature), LearnerConfig(**config))


def scored(norms: ScoreNorms, batch: pg.Batch) -> Tensor:
    result = norms.evaluate(batch).grad_logp_sq_norm
    assert result is not None
    return result


@pytest.fixture(scope="module")
def llama(random_model: Path) -> nn.Module:
    return load_model(str(random_model)).double()


@pytest.fixture(scope="module")
def gpt2() -> nn.Module:
    torch.manual_seed(0)
    config = tf.GPT2Config(**PLAIN, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=2)
    for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
        setattr(config, name, 0.0)
    return tf.AutoModelForCausalLM.from_config(config).double().eval()


def ways(norms: ScoreNorms) -> Iterator[ScoreNorms]:
    """Together in micro-batches of several sizes, and one by one."""
    assert norms.batched
    for micro_tokens in (1, 40, 10_000):
        yield replace(norms, micro_tokens=micro_tokens)
    yield replace(norms, batched=False)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_score_norms_equal_the_definition(name: str, request: pytest.FixtureRequest) -> None:
    """Prompts and completions of several lengths, tool tokens, equal completions, an empty one, not at temperature 1."""
    model, batch = request.getfixturevalue(name), make_batch(5, groups=2)
    truth = naive_norms(model, batch, 0.8)
    assert truth[-1] == 0
    assert truth[:-1].min() > 1e-3
    assert truth.max() > 2 * truth[:-1].min()
    tolerance = 1e-6 if name == "llama" else 1e-10  # Llama normalises in float32
    for norms in ways(norms_of(model, 0.8)):
        torch.testing.assert_close(scored(norms, batch), truth, rtol=tolerance, atol=0)


def test_score_norms_with_memory_for_few_gradients(gpt2: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory for three completions' gradients, then for one: then there is nothing to do together."""
    batch, norms, calls = make_batch(6), norms_of(gpt2), []
    truth, size = scored(norms, batch), sum(p.numel() for p in gpt2.parameters())
    singly = "policygrad.learners.local.score_norms.pack_micro_batches"
    monkeypatch.setattr(singly, lambda *a: calls.append(1) or pack_micro_batches(*a))
    for at_once in (3, 1):
        monkeypatch.setattr("policygrad.learners.local.score_norms.MAX_LOGITS", at_once * size)
        torch.testing.assert_close(scored(norms, batch), truth, rtol=1e-10, atol=0)
    assert len(calls) == 1


def test_completions_with_equal_prefixes_have_their_own_norms(gpt2: nn.Module) -> None:
    """A prompt of one token and answers of one: nothing but the prompt is read."""
    batch = pg.Batch(
        mask=torch.ones(3, 1, dtype=torch.bool),
        group=torch.zeros(3, dtype=torch.int64),
        reward=torch.zeros(3, dtype=torch.float64),
        tokens=torch.tensor([[3], [5], [7]]),
        prompts=(torch.tensor([2]),),
    )
    truth = naive_norms(gpt2, batch)
    for norms in ways(norms_of(gpt2)):
        torch.testing.assert_close(scored(norms, batch), truth, rtol=1e-10, atol=0)


@pytest.mark.parametrize("part", ["layers.1", "embed_tokens", "norm"])
def test_score_norms_of_a_subset_of_parameters(llama: nn.Module, part: str) -> None:
    """The embeddings are tied to the head: one gradient, from both places."""
    batch = make_batch(7, groups=2)
    truth = naive_norms(llama, batch, part=part)
    for norms in [*ways(norms_of(llama, score_parameters=part))][1::2]:  # together and one by one
        torch.testing.assert_close(scored(norms, batch), truth, rtol=1e-6, atol=0)
    assert (truth < naive_norms(llama, batch))[:-1].all()


def test_frozen_parameters_are_not_counted(random_model: Path) -> None:
    model, batch = load_model(str(random_model)).double(), make_batch(7, groups=2)
    truth = naive_norms(model, batch, part="mlp")
    for name, p in model.named_parameters():
        p.requires_grad_("mlp" in name)
    for norms in [*ways(norms_of(model))][1::2]:
        torch.testing.assert_close(scored(norms, batch), truth, rtol=1e-6, atol=0)


def test_a_pattern_without_matches_is_refused_with_names(llama: nn.Module) -> None:
    for pattern in ("lm_head", "layer[9]"):
        with pytest.raises(ValueError, match=r"no trained parameter.*embed_tokens\.weight.*tied") as error:
            select_parameters(llama, pattern)
        assert repr(pattern) in str(error.value)
    with pytest.raises(ValueError, match=r"score_parameters='\(' is not a regular expression"):
        LearnerConfig(score_parameters="(")
    with pytest.raises(ValueError, match="no part of grpo reads score norms"):
        pg.Run(algorithm=pg.GRPO, learner=LearnerConfig(score_parameters="mlp"))


def test_padding_and_other_fields_do_not_matter(gpt2: nn.Module) -> None:
    """Padding is NaN or any token; what the batch holds besides is not part of a score, and comes back as it was."""
    batch, norms = make_batch(8, holes=False), norms_of(gpt2)
    assert batch.tokens is not None
    truth = scored(norms, batch)
    nan = torch.where(batch.mask, -1.0, torch.nan)
    other = replace(
        batch, tokens=torch.where(batch.mask, batch.tokens, 1), logp_ref=nan, reward=batch.reward + torch.nan
    )
    filled = norms.evaluate(other)
    assert torch.equal(filled.grad_logp_sq_norm, truth)  # type: ignore[arg-type]
    assert filled.logp_ref is nan


def test_equal_completions_of_one_prompt_are_computed_once(gpt2: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, seen = make_batch(9), []
    norms = norms_of(gpt2)
    original = ScoreNorms._norms
    monkeypatch.setattr(ScoreNorms, "_norms", lambda self, b, rows: seen.append(len(rows)) or original(self, b, rows))
    result = scored(norms, replace(batch, reward=torch.arange(12.0)))  # rewards may differ: they are no part of a score
    assert seen == [8]
    assert torch.equal(result[0], result[1])
    torch.testing.assert_close(result, naive_norms(gpt2, batch), rtol=1e-10, atol=0)


@pytest.mark.parametrize("name", keep_fast(CONFIGS, "gpt2", "gemma3", "mamba"))
def test_score_norms_for_every_architecture(name: str, tmp_path: Path) -> None:
    """Local attention, parallel blocks, untied heads, ALiBi, convolutions, state spaces; all but one take several at once."""
    torch.manual_seed(0)
    tf.AutoModelForCausalLM.from_config(CONFIGS[name]()).save_pretrained(tmp_path)
    model, batch = load_model(str(tmp_path)), long_batch()
    norms = norms_of(model)
    assert norms.batched == (name != "bloom")  # its activation is an autograd.Function that vmap does not take
    torch.testing.assert_close(scored(norms, batch), naive_norms(model, batch), rtol=1e-4, atol=0)


def test_the_learner_computes_score_norms_when_needed(random_model: Path) -> None:
    batch = make_batch(4, groups=2, holes=False)
    for config in (LearnerConfig(), LearnerConfig(gradient_checkpointing=True)):
        learner = LocalLearner(load_model(str(random_model)), LearnerSpec(RLOO, lr=1e-3, steps=1, config=config))
        assert learner.norms is not None
        assert learner.norms.batched != config.gradient_checkpointing
        filled = learner.evaluate(batch, RLOO.needs)
        truth = naive_norms(learner.model, batch)
        torch.testing.assert_close(filled.grad_logp_sq_norm, truth, rtol=1e-3, atol=0)
        assert all(p.grad is None for p in learner.model.parameters())
        assert not learner.model.training
    assert learner.evaluate(batch, frozenset()).grad_logp_sq_norm is None
    assert LocalLearner(load_model(str(random_model)), LearnerSpec(pg.DR_GRPO, lr=1e-3, steps=1)).norms is None


@pytest.mark.full
def test_a_run_with_exact_norms_resumes_bit_for_bit(random_model: Path, tmp_path: Path) -> None:
    """From the command line's parts to the weights; another run with the siblings' plain mean ends elsewhere."""
    (tmp_path / "mine.py").write_text(
        "def ones(prompts, completions, **_):\n    return [c.count('1') * 1.0 for c in completions]\n"
    )
    base = pg.Run(
        algorithm=RLOO,
        model=str(random_model),
        reward=(f"{tmp_path / 'mine.py'}:ones",),
        steps=2,
        prompts_per_step=2,
        samples_per_prompt=6,
        lr=3e-3,
        sampling=pg.SamplingParams(max_tokens=6),
        learner=LearnerConfig(score_parameters="mlp"),
        rewards=pg.RewardConfig(num_workers=1),
        evaluation=pg.EvaluationConfig(problems=0),
    )
    plain = replace(base, algorithm=replace(pg.RLOO, shaping=()), learner=LearnerConfig())
    ends = []
    for name, run in {"whole": base, "halved": base, "plain": plain}.items():
        folder = tmp_path / name
        pg.train(replace(run, output=str(folder)), stop_after=1 if name == "halved" else None)
        if name == "halved":
            pg.train(resume=folder)
        ends.append((folder / "model" / "model.safetensors").read_bytes())
    assert ends[0] == ends[1]
    assert ends[0] != ends[2]


def test_score_norms_of_a_bf16_model_are_close(random_model: Path) -> None:
    batch = make_batch(4)
    model = load_model(str(random_model))
    truth = scored(norms_of(model), batch)
    halved = scored(norms_of(load_model(str(random_model), dtype="bf16")), batch)
    torch.testing.assert_close(halved, truth, rtol=0.1, atol=0)
