"""A model a second time: equal to the bit where it can be built again, refused with a way out where it cannot."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

import policygrad as pg
from doubles.architectures import CONFIGS
from doubles.batches import float_batch
from doubles.models import Wrapped
from policygrad.errors import ModelError
from policygrad.learners.base import LearnerSpec
from policygrad.learners.config import LearnerConfig
from policygrad.learners.local.learner import LocalLearner
from policygrad.models.loading import disable_dropout, load_model, resolve_model
from policygrad.models.replica import clone_model, copy_weights
from policygrad.models.traits import adapter_configs


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    ids = torch.randint(3, 30, (2, 20), generator=torch.Generator().manual_seed(0))
    result: Tensor = model(input_ids=ids, use_cache=False).logits
    return result


def small(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = tf.AutoModelForCausalLM.from_config(CONFIGS[name]()).to(dtype).eval()
    disable_dropout(model)
    return model


def with_adapters(names: tuple[str, ...] = ("default",)) -> nn.Module:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", lora_dropout=0.1)
    torch.manual_seed(0)
    model = peft.get_peft_model(load_model(resolve_model("tiny")), config)
    for name in names[1:]:
        model.add_adapter(name, config)
    model.base_model.set_adapter(list(names))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    return model.eval()  # type: ignore[no-any-return]


MODELS: dict[str, Callable[[], nn.Module]] = {
    **{name: lambda name=name: small(name) for name in CONFIGS},  # type: ignore[misc]
    "bf16": lambda: small("qwen3", torch.bfloat16),
    "float64": lambda: small("gemma3", torch.float64),
    "lora": with_adapters,
    "two adapters": lambda: with_adapters(("default", "other")),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_replica_equals_deepcopy_shares_frozen_weights_and_uses_no_random_numbers(name: str) -> None:
    model = MODELS[name]()
    truth, random = copy.deepcopy(model), torch.get_rng_state()
    made = clone_model(model)
    assert torch.equal(torch.get_rng_state(), random)
    for ours, theirs in ((made.named_parameters, truth.named_parameters), (made.named_buffers, truth.named_buffers)):
        expected, result = dict(theirs()), dict(ours())  # type: ignore[operator]
        assert result.keys() == expected.keys()  # tied weights once
        for key, tensor in expected.items():
            assert result[key].dtype == tensor.dtype
            assert torch.equal(result[key], tensor)
    base = {p.data_ptr() for p in model.parameters() if not p.requires_grad} if adapter_configs(model) else set()
    assert {p.data_ptr() for p in model.parameters()} & {p.data_ptr() for p in made.parameters()} == base
    assert not any(p.requires_grad for p in made.parameters())
    assert not any(module.training for module in made.modules())
    truth.requires_grad_(
        False
    )  # torch multiplies by a weight that trains in another order of sums, if it is not contiguous
    assert torch.equal(logits(made), logits(truth))


def test_changed_weights_are_copied_again() -> None:
    model = small("qwen3")
    made = clone_model(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)
    assert not torch.equal(logits(made), logits(model))
    copy_weights(model, made)
    assert torch.equal(logits(made), logits(model))


@pytest.mark.full
def test_a_model_without_a_configuration_needs_a_build_function(random_model: Path) -> None:
    """For the reference, π_old and the critic's backbone alike; without `build` the message names it."""
    algorithm = replace(pg.PPO, terms=(pg.KLToReference(0.1), pg.ExactKLToOld(0.1)), shaping=())
    batch = float_batch()

    def learner(build: Callable[[], nn.Module] | None) -> LocalLearner:
        return LocalLearner(
            Wrapped(load_model(str(random_model))), LearnerSpec(algorithm, lr=1e-3, steps=2), build=build
        )

    def again() -> nn.Module:  # other weights, as a constructor would draw them
        model = load_model(str(random_model))
        torch.manual_seed(1)
        nn.init.normal_(model.get_input_embeddings().weight)  # type: ignore[operator]
        return Wrapped(model)

    with pytest.raises(ModelError, match=r"Wrapped has no configuration.*pass build="):
        learner(None)
    made = learner(again)
    scored = made.evaluate(batch, algorithm.needs | {"logp_old", "logp_ref"})
    assert torch.equal(scored.logp_old, scored.logp_ref)  # type: ignore[arg-type]
    scored = algorithm.add_critic_targets(scored)
    metrics = made.update(scored, algorithm.compute_advantages(scored), algorithm)
    assert "kl_old" in metrics
    same = load_model(str(random_model))
    assert made.networks.old is not None
    assert all(torch.equal(a, b) for a, b in zip(made.networks.old.model.parameters(), same.parameters(), strict=True))


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: MODEL, "the model's own parameters"),
        (lambda: small("gpt2"), r"build\(\) has different parameters"),
        (lambda: small("qwen3", torch.bfloat16), r"float32 in the model and torch.bfloat16 in its copy"),
    ],
)
def test_a_model_that_cannot_be_copied_is_refused(build: Callable[[], nn.Module], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        clone_model(MODEL, build)


MODEL = small("qwen3")


def test_merged_adapters_are_refused() -> None:
    model = with_adapters()
    model.merge_adapter()  # type: ignore[operator]
    with pytest.raises(ModelError, match="unmerge_adapter"):
        clone_model(model)


def test_a_critics_backbone_recomputes_activations_like_the_policy(random_model: Path) -> None:
    algorithm, batch = replace(pg.PPO, shaping=()), float_batch()
    calls = {}
    for recompute in (False, True):
        config = LearnerConfig(gradient_checkpointing=recompute)
        learner = LocalLearner(load_model(str(random_model)), LearnerSpec(algorithm, lr=0.0, steps=1, config=config))
        scored = algorithm.add_critic_targets(learner.evaluate(batch, algorithm.needs))
        assert learner.critic is not None
        seen: list[bool] = []
        attention = learner.critic.network.backbone.layers[0].self_attn  # type: ignore[union-attr, index]
        attention.register_forward_hook(lambda *_, seen=seen: seen.append(True))  # type: ignore[union-attr, operator]
        assert algorithm.critic is not None
        learner.critic.accumulate(scored, algorithm.critic)
        calls[recompute] = len(seen)
    assert calls[True] == 2 * calls[False]
