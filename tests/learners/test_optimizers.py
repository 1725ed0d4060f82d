"""Each optimizer takes the steps it is named after, goes on to the bit from its checkpoint, and refuses what does not act."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import policygrad as pg
from doubles.batches import float_batch
from doubles.experts import built
from policygrad.errors import CheckpointError, ConfigError
from policygrad.learners.base import LearnerSpec
from policygrad.learners.config import LearnerConfig, OptimizerConfig
from policygrad.learners.local import adamw_8bit, muon, stochastic_rounding
from policygrad.learners.local.learner import LocalLearner
from policygrad.learners.local.optimizer import Optimizer
from policygrad.learners.optimizers import OPTIMIZERS
from policygrad.models.loading import load_model
from policygrad.training.config.supervised import SFTConfig

CPU = torch.device("cpu")
SETTINGS = {
    "adamw8bit": {"name": "adamw8bit"},
    "muon": {"name": "muon"},
    "sgd": {"name": "sgd"},
    "no masters": {"masters": "none"},
    "no masters, 8 bits": {"name": "adamw8bit", "masters": "none"},
    "offload": {"offload": True},
    "offload, muon": {"name": "muon", "offload": True},
    "offload, no masters": {"masters": "none", "offload": True},
}
"""Every optimizer, and every way to keep its state, in bf16."""


def make_gradients(shape: tuple[int, ...], steps: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator, dtype=dtype) for _ in range(steps)]


def train_layer(config: OptimizerConfig, gradients: list[Tensor], lr: float = 0.1) -> Tensor:
    """Return the weight of a linear layer, 1 in the beginning, after these gradients."""
    layer = nn.Linear(gradients[0].shape[1], gradients[0].shape[0], bias=False, dtype=gradients[0].dtype)
    nn.init.ones_(layer.weight)
    optimizer = Optimizer(layer, replace(config, clip=0.0), lr, len(gradients))
    for gradient in gradients:
        layer.weight.grad = gradient.clone()
        optimizer.step()
    return layer.weight.detach()


def adamw(gradients: list[Tensor], lr: float, beta1: float, beta2: float, eps: float, decay: float) -> Tensor:
    """Loshchilov and Hutter 2019, algorithm 2, from weights of 1."""
    w, m, v = torch.ones_like(gradients[0]), torch.zeros_like(gradients[0]), torch.zeros_like(gradients[0])
    for t, g in enumerate(gradients, 1):
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g**2
        w = w - lr * decay * w - lr * (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + eps)
    return w


# Steps


def test_sgd_is_gradient_descent_with_momentum() -> None:
    gradients = make_gradients((3, 5), 4)
    w, b = torch.ones(3, 5, dtype=torch.float64), torch.zeros(3, 5, dtype=torch.float64)
    for t, g in enumerate(gradients):
        g = g + 0.3 * w
        b = 0.8 * b + g if t else g
        w = w - 0.1 * b
    found = train_layer(OptimizerConfig(name="sgd", momentum=0.8, weight_decay=0.3), gradients)
    torch.testing.assert_close(found, w, rtol=1e-12, atol=1e-12)


def test_adamw_8bit_is_adamw_up_to_what_8_bits_hold() -> None:
    """The first step has no stored moments. Later ones differ by percents of a step; small gradients in a block do not vanish."""
    options: dict[str, Any] = {"betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
    config = OptimizerConfig(name="adamw8bit", **options)
    sizes = torch.logspace(-3, 0, 300, dtype=torch.float64)[torch.randperm(300, generator=torch.manual_seed(0))]
    gradients = [g * sizes for g in make_gradients((20, 300), 30)]
    for steps, bound in ((1, 1e-6), (30, 0.2)):
        expected = adamw(gradients[:steps], 0.1, 0.9, 0.99, 1e-8, 0.1)
        distance = (train_layer(config, gradients[:steps]) - expected).square().mean().sqrt()
        moved = (expected - 0.99**steps).square().mean().sqrt()
        assert float(distance / moved) <= bound, steps
    assert torch.equal(  # fewer numbers than 8 bits are worth
        train_layer(config, make_gradients((3, 5), 4)),
        train_layer(replace(config, name="adamw"), make_gradients((3, 5), 4)),
    )


def test_muon_is_torchs_to_the_bit_and_takes_stacks_of_experts() -> None:
    for shape in ((12, 48), (48, 12), (16, 16)):
        gradients = make_gradients(shape, 3, torch.float32)
        ours, theirs = nn.Parameter(torch.ones(shape)), nn.Parameter(torch.ones(shape))
        rules = (
            muon.Muon([ours], 0.1, 0.9, 0.2),
            torch.optim.Muon([theirs], lr=0.1, momentum=0.9, weight_decay=0.2, adjust_lr_fn="match_rms_adamw"),
        )
        for gradient in gradients:
            ours.grad, theirs.grad = gradient.clone(), gradient.clone()
            for rule in rules:
                rule.step()
        assert torch.equal(ours, theirs), shape
    stack = torch.randn(3, 12, 20, dtype=torch.float64)
    each = torch.stack([muon.orthogonalise(x) for x in stack])
    torch.testing.assert_close(muon.orthogonalise(stack), each, rtol=1e-12, atol=1e-12)


def test_muon_keeps_singular_vectors_and_brings_singular_values_near_1() -> None:
    """The iteration's polynomial, on the singular values (Jordan et al. 2024)."""
    x = make_gradients((9, 14), 1)[0]
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    s = s / x.norm()
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    torch.testing.assert_close(muon.orthogonalise(x), u @ torch.diag(s) @ vh, rtol=1e-9, atol=1e-9)
    assert 0.6 < float(s.min()) < float(s.max()) < 1.25
    step = (train_layer(OptimizerConfig(name="muon"), [x]) - 1) / 0.1  # as long as AdamW's: 0.2 per weight
    assert float(step.square().mean().sqrt()) == pytest.approx(0.2, rel=0.3)


def test_muon_has_hidden_matrices_alone() -> None:
    model: Any = built("qwen3")
    optimizer = Optimizer(model, OptimizerConfig(name="muon"), 1e-3, 1)
    owners = {name: type(optimizer.rule_of[master]).__name__ for name, master in optimizer.masters.items()}
    hidden = {name for name, owner in owners.items() if owner == "Muon"}
    assert any(optimizer.masters[name].ndim == 3 and "experts" in name for name in hidden)
    assert any("q_proj" in name for name in hidden)
    assert not any(word in name for name in hidden for word in ("embed", "lm_head", "norm", "bias"))
    assert {owners[name] for name in owners.keys() - hidden} == {"AdamW"}
    convolution = nn.Sequential(nn.Conv1d(4, 4, 3), nn.Linear(4, 1), nn.Linear(4, 4))
    assert muon.find_hidden_matrices(convolution, dict(convolution.named_parameters())) == {"2.weight"}


# Moments in 8 bits


def test_each_number_becomes_the_nearest_value_of_its_block() -> None:
    x = make_gradients((3, 700), 1, torch.float32)[0] * torch.logspace(-6, 3, 700)
    code = adamw_8bit.signed_code(CPU)
    codes, scales = adamw_8bit.quantise(x, code)
    assert codes.dtype == torch.uint8
    assert scales.shape == (3, 3)
    restored = adamw_8bit.dequantise((codes, scales), code, torch.float32)
    for at in range(0, 700, 256):
        block = x[:, at : at + 256]
        nearest = (block[:, :, None] - code * block.abs().amax(1)[:, None, None]).abs().amin(2)
        torch.testing.assert_close((restored[:, at : at + 256] - block).abs(), nearest, rtol=1e-5, atol=1e-9)


def test_codes_are_256_values_that_reach_far_below_1() -> None:
    signed, unsigned = adamw_8bit.signed_code(CPU), adamw_8bit.unsigned_code(CPU)
    for code, lowest in ((signed, -0.993), (unsigned, 0.0)):
        assert len(code) == len(code.unique()) == 256
        assert float(code.max()) == 1
        assert float(code.min()) == pytest.approx(lowest, abs=1e-3)
        assert 0 < float(code[code > 0].min()) < 1e-6
        assert 0 in code
    positive = signed[(signed > 0) & (signed < 1)]
    assert torch.equal(positive.flip(0), -signed[signed < 0])


def test_a_root_of_a_second_moment_does_not_vanish() -> None:
    x = torch.cat([torch.ones(1), torch.full((100,), 1e-9), torch.zeros(99)])[None]
    restored = adamw_8bit.dequantise(adamw_8bit.quantise_root(x), adamw_8bit.unsigned_code(CPU), torch.float32)
    assert bool((restored[x > 0] > 0).all())
    assert bool((restored[x == 0] == 0).all())


# Weights without masters


def test_rounding_is_right_on_average_and_repeats_for_a_key() -> None:
    x = torch.tensor([1.0, 1.0 + 1 / 512, -1.0 - 1 / 1024, 3e-5]).repeat(100_000, 1)
    box = (0, 0), tuple(x.shape)
    noise = stochastic_rounding.make_noise("a", x.shape, box, x.device)
    rounded = stochastic_rounding.round_stochastically(x, noise)
    assert rounded.dtype == torch.bfloat16
    assert torch.equal(noise, stochastic_rounding.make_noise("a", x.shape, box, x.device))
    assert not torch.equal(noise, stochastic_rounding.make_noise("b", x.shape, box, x.device))
    steps = torch.tensor([1 / 128, 1 / 128, 1 / 128, 3e-5 / 128])  # at least as large as the distance of two neighbours
    assert bool(((rounded.float() - x).abs() < steps).all())
    assert bool((rounded[:, 0] == 1).all())
    standard_error = steps / math.sqrt(len(x))
    assert bool(((rounded.double().mean(0) - x[0].double()).abs() < 3 * standard_error).all())


def test_a_part_of_a_weight_is_rounded_as_the_whole_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever rows and columns it has, and however many keys the noise of the whole has."""
    device = torch.device("cpu")
    for block in (2**22, 12):
        monkeypatch.setattr(stochastic_rounding, "_NOISE_BLOCK", block)
        whole = stochastic_rounding.make_noise("a", (7, 4, 2), ((0, 0, 0), (7, 4, 2)), device)
        assert len(whole.unique()) > 50
        for first, count, column, width in ((0, 3, 0, 4), (3, 4, 0, 4), (2, 3, 1, 2), (7, 0, 0, 4)):
            box = (first, column, 0), (count, width, 2)
            part = stochastic_rounding.make_noise("a", (7, 4, 2), box, device)
            assert torch.equal(part, whole[first : first + count, column : column + width])
    assert stochastic_rounding.make_noise("a", (), ((), ()), device).shape == ()


def test_steps_below_a_weights_resolution_add_up_without_masters() -> None:
    """A hundred steps of 1e-4 on weights of 1, of which the nearest below is 1/256 away."""
    layer = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
    nn.init.ones_(layer.weight)
    optimizer = Optimizer(layer, OptimizerConfig(clip=0, masters="none"), lr=1e-4, total=100)
    for _ in range(100):
        layer.weight.grad = torch.ones_like(layer.weight)
        optimizer.accumulate_master_grads()
        optimizer.step()
        assert optimizer.masters["weight"].untyped_storage().nbytes() == 0
    assert float(layer.weight.detach().float().mean()) == pytest.approx(0.99, abs=5e-4)


# Runs


def make_learner(folder: Path, options: Mapping[str, Any], algorithm: pg.Algorithm = pg.DR_GRPO) -> LocalLearner:
    spec = LearnerSpec(algorithm, 1e-2, 8, config=LearnerConfig(dtype="bf16"), optimizer=OptimizerConfig(**options))
    torch.manual_seed(0)
    return LocalLearner(load_model(str(folder), dtype="bf16"), spec)


def update(learner: LocalLearner, algorithm: pg.Algorithm = pg.DR_GRPO) -> None:
    batch = learner.evaluate(float_batch(), algorithm.needs)
    psi = algorithm.compute_advantages(batch)
    learner.update(algorithm.add_critic_targets(batch), psi, algorithm)


def assert_same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


@pytest.mark.filterwarnings("ignore:this processor has no instructions")
def test_resume_is_bitwise_with_each_optimizer(random_model: Path) -> None:
    for name, options in SETTINGS.items():
        first = make_learner(random_model, options)
        before = {n: x.clone() for n, x in first.model.named_parameters()}
        update(first)
        tensors, values = first.state()
        saved = {n: x.clone() for n, x in tensors.items()}
        resumed = make_learner(random_model, options)
        resumed.check_state(saved, values)
        resumed.restore(saved, values)
        for learner in (first, resumed):
            update(learner)
        assert_same(first.state()[0], resumed.state()[0])
        assert_same(dict(first.model.named_parameters()), dict(resumed.model.named_parameters()))
        assert any(not torch.equal(x, before[n]) for n, x in first.model.named_parameters()), name


@pytest.mark.filterwarnings("ignore:this processor has no instructions")
def test_state_on_the_host_changes_no_number_and_leaves_nothing_on_the_device(random_model: Path) -> None:
    algorithm = replace(pg.PPO, shaping=())  # with a critic
    for options in ({}, {"name": "adamw8bit"}, {"name": "muon"}, {"masters": "none"}):
        plain, away = (make_learner(random_model, {**options, "offload": off}, algorithm) for off in (False, True))
        for _ in range(2):
            update(plain, algorithm)
            update(away, algorithm)
        assert away.critic is not None
        for optimizer in (away.optimizer, away.critic.optimizer):
            states = [x for rule in optimizer.rules for state in rule.state.values() for x in state.values() if x.ndim]
            copies = [m for n, m in optimizer.masters.items() if m is not optimizer.parameters[n]]
            assert len(states) > 0
            assert sum(x.untyped_storage().nbytes() for x in (*states, *copies)) == 0
        assert_same(plain.state()[0], away.state()[0])
        assert_same(dict(plain.model.named_parameters()), dict(away.model.named_parameters()))


@pytest.mark.filterwarnings("ignore:this processor has no instructions")
def test_a_checkpoint_of_another_optimizer_is_refused(random_model: Path) -> None:
    first = make_learner(random_model, {"name": "sgd"})
    update(first)
    with pytest.raises(CheckpointError, match=r"saved with optimizer.name=sgd, and this run has adamw: restore"):
        make_learner(random_model, {}).restore(*first.state())
    plain = make_learner(random_model, {})
    update(plain)
    with pytest.raises(CheckpointError, match=r"saved with optimizer.masters=fp32, and this run has none"):
        make_learner(random_model, {"masters": "none"}).restore(*plain.state())
    small = make_learner(random_model, {"name": "adamw8bit"})
    update(small)
    tensors, values = small.state()
    name = next(name for name in tensors if name.endswith("/exp_avg_scale"))
    with pytest.raises(CheckpointError, match=r"exp_avg_scale is \[1\]"):
        small.restore({**tensors, name: torch.zeros(1)}, values)
    with pytest.raises(CheckpointError, match=r"holds .* moments"):
        small.check_state({n: x for n, x in tensors.items() if n != name}, values)


# What is refused


def test_options_that_do_not_act_are_refused() -> None:
    refused: dict[str, dict[str, Any]] = {
        "optimizer.name must be one of adamw, adamw8bit, muon, sgd, not 'lion'": {"name": "lion"},
        "optimizer.momentum=0.5 does not act in optimizer.name=adamw: leave it out": {"momentum": 0.5},
        "optimizer.betas=(0.9, 0.95) does not act in optimizer.name=sgd": {"name": "sgd", "betas": (0.9, 0.95)},
        "optimizer.eps=1e-06 does not act in optimizer.name=sgd": {"name": "sgd", "eps": 1e-6},
        "optimizer.momentum must be at least 0 and below 1, not 1.0": {"name": "sgd", "momentum": 1.0},
        "optimizer.masters must be fp32 or none, not 'bf16'": {"masters": "bf16"},
    }
    for text, options in refused.items():
        with pytest.raises(ConfigError) as error:
            OptimizerConfig(**options)
        assert text in str(error.value)


def test_options_that_contradict_the_learner_or_the_algorithm_are_refused() -> None:
    cases: dict[str, tuple[OptimizerConfig, dict[str, Any]]] = {
        "optimizer.name=sgd needs --lr": (OptimizerConfig(name="sgd"), {}),
        "learner.dtype is fp32": (OptimizerConfig(masters="none"), {"learner": LearnerConfig(dtype="fp32")}),
        "learner.lora trains adapters in fp32": (
            OptimizerConfig(masters="none"),
            {"learner": LearnerConfig(lora="rank=2", dtype="bf16")},
        ),
        "leave one of them out": (OptimizerConfig(offload=True), {"learner": LearnerConfig(offload=True)}),
        "trains a critic too: leave it out, or": (
            OptimizerConfig(masters="none"),
            {"algorithm": pg.PPO, "learner": LearnerConfig(world_size=2, dtype="bf16")},
        ),
        "optimizer.name=muon needs rows of matrices in one piece": (
            OptimizerConfig(name="muon"),
            {"learner": LearnerConfig(world_size=2, tensor_parallel=2)},
        ),
        "optimizer.* sets the optimizer, which TrustRegion does not use": (
            OptimizerConfig(name="muon"),
            {"algorithm": replace(pg.TRPO, critic=None, advantage=(pg.GroupMean(),))},
        ),
        "optimizer.masters=none is for gradient steps": (OptimizerConfig(masters="none"), {"algorithm": pg.TRPO}),
    }
    for text, (optimizer, options) in cases.items():
        with pytest.raises(ConfigError) as error:
            pg.Run(optimizer=optimizer, **options)
        assert text in str(error.value)
    assert pg.Run(optimizer=OptimizerConfig(name="sgd"), lr=0.1).resolve().lr == 0.1
    for allowed in (OptimizerConfig(masters="none"), OptimizerConfig(offload=True)):
        pg.Run(optimizer=allowed, learner=LearnerConfig(world_size=2, dtype="bf16"))
    with pytest.raises(ConfigError, match=r"optimizer.name=sgd needs --lr"):
        SFTConfig(data="rows.jsonl", optimizer=OptimizerConfig(name="sgd"))
    with pytest.raises(ConfigError, match=r"learner.dtype is fp32"):
        SFTConfig(data="rows.jsonl", optimizer=OptimizerConfig(masters="none")).resolve()


def test_weights_without_masters_are_bf16(random_model: Path) -> None:
    spec = LearnerSpec(pg.DR_GRPO, 1e-2, 8, optimizer=OptimizerConfig(masters="none"))
    with pytest.raises(ConfigError, match=r"all weights that train are fp32: leave it out, or load the model with"):
        LocalLearner(load_model(str(random_model), dtype="fp32"), spec)


def test_state_on_the_host_is_refused_without_a_gpu(tmp_path: Path) -> None:
    run = pg.Run(
        optimizer=OptimizerConfig(offload=True), learner=LearnerConfig(device="cpu"), output=str(tmp_path / "run")
    )
    with pytest.raises(ConfigError, match=r"optimizer.offload moves .* learner's device is cpu"):
        pg.train(run, display=False)


# Memory


def test_bytes_of_moments_are_those_that_an_optimizer_keeps() -> None:
    layer = nn.Linear(1024, 16, bias=False)
    for name, row in OPTIMIZERS.items():
        optimizer = Optimizer(layer, OptimizerConfig(name=name), 0.1, 1)
        layer.weight.grad = torch.ones_like(layer.weight)
        optimizer.step()
        kept = sum(
            x.nbytes for rule in optimizer.rules for state in rule.state.values() for x in state.values() if x.ndim
        )
        assert kept == row.count_moment_bytes(0.95) * layer.weight.numel(), name
    assert OPTIMIZERS["sgd"].count_moment_bytes(0.0) == 0
    assert OPTIMIZERS["muon"].count_moment_bytes(0.95, hidden=False) == 8
