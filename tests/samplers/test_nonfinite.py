"""Non-finite logits and gradients are reported with their origin."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import policygrad as pg
from doubles.trackers import Record
from policygrad.errors import NumericsError
from policygrad.learners.config import OptimizerConfig
from policygrad.learners.local.optimizer import Optimizer
from policygrad.models.loading import load_model
from policygrad.samplers.base import SamplingParams
from policygrad.samplers.local.sampling import check_finite_logits

NAN, INF = math.nan, math.inf


def untouched(row: int) -> Tensor:
    raise AssertionError(f"row {row} was read again")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_masked_logits_are_accepted(dtype: torch.dtype, temperature: float) -> None:
    logits = torch.tensor([[-INF, 1.0, -INF], [3e38, -3e38, 0.0]], dtype=dtype)
    if temperature != 0.5:
        check_finite_logits(logits, SamplingParams(temperature=temperature), nn.Identity(), untouched)
    check_finite_logits(logits[:1], SamplingParams(temperature=temperature), nn.Identity(), untouched)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("row", "says"), [([NAN, 0.0], "NaN"), ([INF, 0.0], r"\+inf"), ([-INF, -INF], "-inf")])
def test_nonfinite_logits_are_refused_with_their_row(
    random_model: Path, row: list[float], says: str, temperature: float
) -> None:
    logits, requests = torch.tensor([[0.0, 1.0], row]), list[int]()

    def text(place: int) -> Tensor:
        requests.append(place)
        return torch.tensor([1, 2, 3])

    with pytest.raises(NumericsError, match=rf"logits are not finite \({says}\).*all layers' outputs are"):
        check_finite_logits(logits, SamplingParams(temperature=temperature), load_model(str(random_model)), text)
    assert requests == [1]


@pytest.fixture
def go(small: pg.Run, random_model: Path, tmp_path: Path) -> Callable[..., str]:
    """Return a function that changes the random model, trains it, and returns the error message."""

    def run(change: Callable[[nn.Module], object] = lambda model: None, **changes: object) -> str:
        model = load_model(str(random_model))
        change(model)
        with pytest.raises(NumericsError) as caught:
            pg.train(
                replace(small, model=model, tokenizer=str(random_model), output=str(tmp_path / "run"), **changes),  # type: ignore[arg-type]
                display=False,
            )
        return str(caught.value)

    return run


def test_nan_weight_is_named(go: Callable[..., str]) -> None:
    def spoil(model: nn.Module) -> None:
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight[3, 4] = NAN  # type: ignore[union-attr, index]

    assert "the weight model.layers.1.mlp.up_proj.weight has NaN in 1 of its" in go(spoil)


def test_first_layer_with_nan_output_is_named(go: Callable[..., str]) -> None:
    def spoil(model: nn.Module) -> None:
        for layer in (0, 1):
            part = model.model.layers[layer].mlp.act_fn  # type: ignore[union-attr, index]
            part.register_forward_hook(lambda module, inputs, output: output * NAN)

    assert "the weights are finite, and model.layers.0.mlp.act_fn (SiLU" in go(spoil)


@pytest.mark.parametrize("temperature", [1e-300, 1e-44])
def test_too_small_temperature_is_named(go: Callable[..., str], temperature: float) -> None:
    message = go(sampling=pg.SamplingParams(max_tokens=4, temperature=temperature))
    assert f"temperature {temperature:g} divides logits" in message
    assert "--temperature" in message


def stepped(gradients: dict[str, float], weight: float = 1.0) -> str:
    """Take a step with one number of these gradients changed; return the error message."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    nn.init.constant_(model[1].bias, weight)
    before = [p.clone() for p in model.parameters()]
    optimizer = Optimizer(model, OptimizerConfig(), 0.1, 1)
    for name, parameter in model.named_parameters():
        parameter.grad = torch.ones_like(parameter)
        parameter.grad.view(-1)[0] = gradients.get(name, 1.0)
    with pytest.raises(NumericsError) as caught:
        optimizer.step()
    assert all(torch.equal(a, b) or b.isnan().any() for a, b in zip(before, model.parameters(), strict=True))
    return str(caught.value)


def test_first_parameter_with_nonfinite_gradient_is_named() -> None:
    message = stepped({"0.bias": NAN, "1.weight": INF})
    assert "norm is nan at update 1, first in 0.bias (1 of 2 numbers are not finite)" in message
    assert "norm is inf at update 1, first in 1.weight (1 of 4 numbers are not finite)" in stepped({"1.weight": INF})
    assert "the weight itself is not finite" in stepped({"1.bias": NAN}, weight=NAN)
    assert "every number in it is finite: their squares are not" in stepped({"1.weight": 3e38, "0.weight": 3e38})


def test_trust_region_names_the_nonfinite_gradient(small: pg.Run, random_model: Path, tmp_path: Path) -> None:
    model, name, record = load_model(str(random_model)), "model.layers.1.mlp.up_proj.weight", Record()
    model.get_parameter(name).register_hook(lambda gradient: gradient.index_fill(0, torch.tensor([2, 3]), NAN))
    run = replace(small, model=model, tokenizer=str(random_model), algorithm=pg.get_algorithm("trpo"), lr=None, steps=1)
    pg.train(replace(run, output=str(tmp_path / "run")), display=record)
    where = f"not finite, first in {name} (64 of 2048 numbers are not finite) and left the weights unchanged"
    assert f"step 1: the trust region met values that are {where}" in record.said


def test_trust_region_names_a_nonfinite_fisher_product(small: pg.Run, random_model: Path, tmp_path: Path) -> None:
    """The gradient is finite; the first product is not, or the third."""
    name = "model.layers.1.mlp.up_proj.weight"
    for good, retained in ((1, "left the weights unchanged"), (3, "took a shorter step")):
        model, record, seen = load_model(str(random_model)), Record(), count()

        def spoiled(gradient: Tensor, seen: Iterator[int] = seen, good: int = good) -> Tensor:
            return gradient if next(seen) != good else gradient.index_fill(0, torch.tensor([2, 3]), NAN)

        model.get_parameter(name).register_hook(spoiled)
        run = replace(
            small, model=model, tokenizer=str(random_model), algorithm=pg.get_algorithm("trpo"), lr=None, steps=1
        )
        run = replace(run, learner=replace(run.learner, micro_tokens=10**6))
        pg.train(replace(run, output=str(tmp_path / str(good))), display=record)
        where = (
            f"in a product with the Fisher matrix, first in {name} (64 of 2048 numbers are not finite) and {retained}"
        )
        assert f"step 1: the trust region met values that are not finite, {where}" in record.said


def test_clipping_equals_torch_bitwise() -> None:
    torch.manual_seed(0)
    model, twin = nn.Linear(7, 5), nn.Linear(7, 5)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        b.data.copy_(a.data)
        a.grad = torch.randn_like(a)
        b.grad = a.grad.clone()
    norm, _ = Optimizer(model, OptimizerConfig(clip=0.5), 0.1, 1).step()
    assert norm == float(nn.utils.clip_grad_norm_(twin.parameters(), 0.5))
    torch.optim.AdamW(twin.parameters(), lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0).step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
