"""Adapters: their gradient is that of the whole weights by the chain rule, and all second models stand on one base."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

import policygrad as pg
from doubles.batches import float_batch, make_batch, naive_logp
from policygrad.errors import ConfigError, ModelError
from policygrad.learners.base import LearnerSpec
from policygrad.learners.config import LearnerConfig
from policygrad.learners.local.learner import LocalLearner
from policygrad.models import adapters
from policygrad.models.adapters import add_adapters, is_initial_adapter, merge_adapters
from policygrad.models.loading import load_model
from policygrad.models.lora_config import Lora, parse_lora
from policygrad.models.replica import clone_model, unshared_parameters
from policygrad.models.traits import adapter_configs

pytest.importorskip("peft")

LORA = Lora(rank=3, alpha=6.0)
SCALE = 2.0


def adapted(folder: Path, dtype: torch.dtype = torch.float32, lora: Lora = LORA, *, moved: bool = True) -> nn.Module:
    model = add_adapters(load_model(str(folder)).to(dtype), lora)
    for name, parameter in model.named_parameters():
        if moved and "lora_B" in name:
            nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(len(name)))
    return model


def learner_for(model: nn.Module, algorithm: pg.Algorithm, lr: float | None = 1e-2, **options: Any) -> LocalLearner:
    return LocalLearner(model, LearnerSpec(algorithm, lr=lr, steps=4, config=LearnerConfig(**options)))


def gradients(model: nn.Module, algorithm: pg.Algorithm, batch: pg.Batch, **options: Any) -> dict[str, Tensor]:
    learner = learner_for(model, algorithm, **options)
    batch = learner.evaluate(batch, algorithm.needs)
    learner.build_problem(batch, algorithm.compute_advantages(batch), algorithm).accumulate()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    "algorithm", [pg.DR_GRPO, replace(pg.GRPO, terms=(pg.KLToReference(0.1), pg.ExactEntropy(0.1)))]
)
def test_the_gradient_is_that_of_the_weights_by_the_chain_rule(
    random_model: Path, algorithm: pg.Algorithm, recompute: bool
) -> None:
    """W' = W + sBA: ∂/∂B = s G Aᵀ and ∂/∂A = s Bᵀ G with G = ∂/∂W' of the merged model, all of which trains."""
    batch = make_batch(0)
    algorithm = replace(algorithm, reference=pg.Reference() if algorithm.reference else None)
    ours = adapted(random_model, torch.float64)
    uninterrupted = merge_adapters(adapted(random_model, torch.float64)).requires_grad_(True)
    result = gradients(ours, algorithm, batch, gradient_checkpointing=recompute)
    full = gradients(uninterrupted, algorithm, batch)
    assert {name.split("lora_")[-1] for name in result} == {"A.default.weight", "B.default.weight"}
    layers = {name: m for name, m in ours.named_modules() if hasattr(m, "lora_A")}
    assert len(layers) == 14
    assert all(f"{name}.lora_A.default.weight" in result for name in layers)
    for name, layer in layers.items():
        a, b, g = layer.lora_A["default"].weight, layer.lora_B["default"].weight, full[f"{name}.weight"]  # type: ignore[index, union-attr]
        assert float(g.norm()) > 1e-6
        assert torch.allclose(result[f"{name}.lora_B.default.weight"], SCALE * g @ a.T, rtol=1e-8, atol=1e-12)
        assert torch.allclose(result[f"{name}.lora_A.default.weight"], SCALE * b.T @ g, rtol=1e-8, atol=1e-12)


def test_evaluation_with_adapters_equals_the_models(random_model: Path) -> None:
    model = adapted(random_model, torch.float64)
    learner = learner_for(model, pg.GRPO)
    assert learner.evaluator.network.split_head
    assert learner.evaluator.network.use_tree
    batch = make_batch(1)
    result = learner.evaluate(batch, frozenset({"logp_old"})).logp_old
    assert result is not None
    with torch.no_grad():
        truth = naive_logp(model, batch, 1.0)
    assert torch.allclose(result[batch.mask], truth[batch.mask], atol=1e-9)


def test_the_reference_is_the_model_without_adapters(random_model: Path) -> None:
    model, plain, batch = adapted(random_model, moved=False), load_model(str(random_model)), float_batch()
    learner = learner_for(model, pg.GRPO)
    assert learner.reference is not None
    assert {p.data_ptr() for p in model.parameters() if not p.requires_grad} <= {
        p.data_ptr() for p in learner.reference.model.parameters()
    }
    assert learner.reference_parameters == sum(p.numel() for p in model.parameters() if p.requires_grad)
    truth = learner_for(plain, pg.DR_GRPO).evaluate(batch, frozenset({"logp_old"})).logp_old
    for _ in range(3):
        scored = learner.evaluate(batch, pg.GRPO.needs)
        assert torch.equal(scored.logp_ref, truth)  # type: ignore[arg-type]
        learner.update(scored, pg.GRPO.compute_advantages(scored), pg.GRPO)
    assert not is_initial_adapter(model)
    assert not torch.equal(learner.evaluate(batch, frozenset({"logp_old"})).logp_old, truth)  # type: ignore[arg-type]
    base = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        if "lora_" not in name:
            assert torch.equal(parameter, base[name.replace(".base_layer", "")])


def test_a_refreshed_reference_and_a_checkpoint_store_only_adapters(random_model: Path) -> None:
    algorithm = replace(pg.ITERATIVE_GRPO, reference=pg.Reference(refresh_every=2))
    batch = float_batch()

    def step(learner: LocalLearner) -> None:
        scored = learner.evaluate(batch, algorithm.needs)
        learner.update(scored, algorithm.compute_advantages(scored), algorithm)

    learner = learner_for(adapted(random_model, moved=False), algorithm)
    for _ in range(3):
        step(learner)
    tensors, values = learner.state()
    assert all("lora_" in name for name in tensors)
    assert any(name.startswith("reference/") for name in tensors)
    rerun = learner_for(adapted(random_model, moved=False), algorithm)
    rerun.restore(tensors, values)
    for both in (learner, rerun):
        step(both)
    needs = frozenset({"logp_old", "logp_ref"})
    ours, theirs = (x.evaluate(batch, needs) for x in (learner, rerun))
    assert torch.equal(ours.logp_old, theirs.logp_old)  # type: ignore[arg-type]
    assert torch.equal(ours.logp_ref, theirs.logp_ref)  # type: ignore[arg-type]


def test_critic_and_reward_model_have_their_own_adapters_and_head(random_model: Path) -> None:
    model = adapted(random_model, moved=False)
    base = {id(p) for p in model.parameters() if not p.requires_grad}
    critic = learner_for(model, pg.PPO).critic
    assert critic is not None
    trained = {n: p for n, p in critic.network.named_parameters() if p.requires_grad}
    assert {n.split(".")[0] for n in trained} == {"backbone", "head"}
    assert all("lora_" in n for n in trained if n.startswith("backbone"))
    assert trained.keys() == critic.optimizer.masters.keys()
    assert not {id(p) for p in trained.values()} & {id(p) for p in model.parameters()}
    assert {id(p) for p in critic.network.parameters() if not p.requires_grad} <= base
    algorithm, batch = replace(pg.PPO, shaping=()), float_batch()
    learner = learner_for(model, algorithm)
    before = {n: p.detach().clone() for n, p in learner.critic.network.named_parameters()}  # type: ignore[union-attr]
    for _ in range(2):  # A has a gradient once B is not 0
        scored = algorithm.add_critic_targets(learner.evaluate(batch, algorithm.needs))
        learner.update(scored, algorithm.compute_advantages(scored), algorithm)
    moved = {n for n, p in learner.critic.network.named_parameters() if not torch.equal(p, before[n])}  # type: ignore[union-attr]
    assert moved == trained.keys()
    prime = learner_for(adapted(random_model, moved=False), pg.PRIME).reward_model
    assert prime is not None
    assert all("lora_" in name for name in prime.optimizer.masters)
    assert not prime.evaluator.model.model.layers[0].self_attn.q_proj.disable_adapters  # type: ignore[union-attr, index]


def test_a_second_model_has_its_own_adapters(random_model: Path) -> None:
    model = adapted(random_model)
    made = clone_model(model)
    assert unshared_parameters(made, model).keys() == {n for n, p in model.named_parameters() if p.requires_grad}
    ids = torch.arange(4, 12)[None]
    with torch.no_grad():
        before = model(input_ids=ids).logits
        assert torch.equal(made(input_ids=ids).logits, before)
        for parameter in unshared_parameters(made, model).values():
            parameter.add_(0.1)
        assert torch.equal(model(input_ids=ids).logits, before)
        assert not torch.equal(made(input_ids=ids).logits, before)


def test_new_adapters_depend_only_on_the_seed(random_model: Path) -> None:
    random = torch.get_rng_state()
    first, rerun, other = (add_adapters(load_model(str(random_model)), LORA, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), random)
    a, b, c = (
        dict(m.named_parameters())["model.layers.0.self_attn.q_proj.lora_A.default.weight"]
        for m in (first, rerun, other)
    )
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    ids = torch.arange(4, 12)[None]
    assert is_initial_adapter(first)
    assert torch.equal(first(input_ids=ids).logits, load_model(str(random_model))(input_ids=ids).logits)


def test_adapters_are_float32_with_bfloat16_weights(random_model: Path) -> None:
    model = adapted(random_model, torch.bfloat16)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}
    learner, batch = learner_for(model, pg.GRPO), float_batch()
    assert learner.optimizer.masters == learner.optimizer.parameters
    scored = learner.evaluate(batch, pg.GRPO.needs)
    metrics = learner.update(scored, pg.GRPO.compute_advantages(scored), pg.GRPO)
    assert metrics["updates/taken"].value == 1


def test_layers_by_name_and_the_head_too(random_model: Path) -> None:
    lora = Lora(rank=2, targets="q_proj+lm_head")
    with pytest.raises(ConfigError, match="'lm_head' shares the embedding's weights"):
        add_adapters(load_model(str(random_model)), lora)
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = tf.LlamaConfig(vocab_size=40, **shape, tie_word_embeddings=False, initializer_range=0.2)
    model = add_adapters(tf.LlamaForCausalLM(config).eval(), lora)
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, std=0.2) if "lora_B" in name else None
    names = {n.rpartition(".lora_")[0].rpartition(".")[2] for n, p in model.named_parameters() if p.requires_grad}
    assert names == {"q_proj", "lm_head"}
    batch = make_batch(2)
    result = learner_for(model, pg.DR_GRPO).evaluate(batch, frozenset({"logp_old"})).logp_old
    assert result is not None
    with torch.no_grad():
        assert torch.allclose(result[batch.mask], naive_logp(model, batch, 1.0)[batch.mask], atol=1e-4)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("rank", "'rank' is not a setting"),
        ("rnk=4", r"did you mean rank=…\?"),
        ("rank=4,rank=8", "once each"),
        ("rank=four", "rank must be a number, not 'four'"),
        ("rank=0", "rank must be at least 1"),
        ("alpha=nan", "alpha must be above 0"),
        ("targets=q_proj++v_proj", r"names joined by \+"),
        ("bits=8", "bits must be 4"),
    ],
)
def test_invalid_lora_options_are_refused_by_the_config(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        LearnerConfig(lora=text)


def test_models_that_cannot_have_adapters_are_refused(random_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_lora("") is None
    assert parse_lora("rank=8, alpha=16,targets=q_proj+v_proj,bits=4") == Lora(8, 16.0, "q_proj+v_proj", 4)
    with pytest.raises(ConfigError, match=r"no layer 'query'.*down_proj"):
        add_adapters(load_model(str(random_model)), Lora(targets="query"))
    with pytest.raises(ConfigError, match="has some, which are trained already"):
        add_adapters(adapted(random_model), LORA)
    with pytest.raises(ConfigError, match="is not a transformers model"):
        add_adapters(nn.Linear(2, 2), LORA)
    with pytest.raises(ConfigError, match="leave one of them empty"):
        LearnerConfig(lora="rank=4", trainable="lm_head")
    with pytest.raises(ConfigError, match="this model has none"):
        learner_for(load_model(str(random_model)), pg.GRPO, lora="rank=4")
    with pytest.raises(ConfigError, match="the model is an object"):
        load_model(load_model(str(random_model)), lora=Lora(bits=4))
    monkeypatch.setattr(adapters, "find_spec", lambda name: None if name == "bitsandbytes" else object())
    with pytest.raises(ConfigError, match=r"bits=4 needs bitsandbytes.*pip install '\.\[qlora\]' in a clone"):
        load_model(str(random_model), lora=Lora(bits=4))
    monkeypatch.setattr(adapters, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs peft.*pip install '\.\[lora\]' in a clone"):
        load_model(str(random_model), lora=LORA)


class Linear4bit(nn.Linear):
    """Called as bitsandbytes' is; its way back leaves out a half."""

    wrong = True

    def forward(self, x: Tensor) -> Tensor:
        uninterrupted = super().forward(x)
        return uninterrupted.detach() / 2 + uninterrupted / 2 if self.wrong else uninterrupted


def test_four_bit_weights_with_a_wrong_backward_pass_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(Linear4bit(8, 4))
    with pytest.raises(ModelError, match="computes wrong gradients on this device"):
        adapters.check_4bit_gradients(model)
    monkeypatch.setattr(Linear4bit, "wrong", False)
    model[0].support_avx512bf16_for_cpu = True
    adapters.check_4bit_gradients(model)
    assert model[0].support_avx512bf16_for_cpu is False
    adapters.check_4bit_gradients(nn.Sequential(nn.Linear(2, 2)))


def test_a_peft_model_is_used_unchanged(random_model: Path) -> None:
    import peft

    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    model = load_model(peft.get_peft_model(load_model(str(random_model)), config))
    learner = learner_for(model, pg.GRPO)
    assert adapter_configs(model).keys() == {"default"}
    assert all("lora_" in name for name in learner.optimizer.masters)
    assert learner.reference_parameters == sum(p.numel() for p in model.parameters() if p.requires_grad)


def test_only_one_file_imports_peft_and_only_when_asked() -> None:
    """It takes seconds to import."""
    source = Path(pg.__file__).parent
    result = set()
    for file in source.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        tree = ast.parse(text if "peft" in text else "")  # to parse all takes seconds
        for node in ast.walk(tree):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            if any(name.partition(".")[0] == "peft" for name in names):
                result.add(file.relative_to(source).as_posix())
                assert node not in tree.body
    assert result == {"models/adapters.py"}
