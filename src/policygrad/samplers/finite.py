"""Whether a distribution can be drawn from, before it is: on a GPU a token that does not exist ends the process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from policygrad.errors import NumericsError
from policygrad.models.precision import at_least_float32
from policygrad.samplers.base import Sampling


def check_drawable(logits: Tensor, sampling: Sampling, model: nn.Module, text: Callable[[int], Tensor]) -> None:
    """Refuses logits [N, V] that are no distribution: NaN or +∞ among them, or nothing but −∞.

    A row's largest logit tells: NaN and +∞ come through the maximum, and where it is finite a softmax is one. text: the ids [n]
    that a row's logits are of; the model reads them once more to find where the first bad number appears.

    Raises:
        NumericsError: with the weight or the layer, or the temperature that is too small for the logits.
    """
    best = at_least_float32(logits.amax(-1))
    scaled = best / sampling.temperature if sampling.temperature else best
    if bool(scaled.isfinite().all()):
        return
    if bool(best.isfinite().all()):
        raise NumericsError(
            f"temperature {sampling.temperature:g} divides logits of up to {float(best.abs().max()):.3g} beyond what {best.dtype} "
            "can hold: raise --temperature; 0 is greedy, where that is allowed"
        )
    row = int((~best.isfinite()).nonzero()[0])
    raise NumericsError(
        f"the model's logits are not finite ({kind(logits[row])}), so nothing can be sampled: {origin(model, text(row))}"
    )


def origin(model: nn.Module, ids: Tensor) -> str:
    """In words, where the first number that is not finite appears: in a weight, or in the output of a module that reads ids [n]."""
    for name, weight in [*model.named_parameters(), *model.named_buffers()]:
        if _bad(weight):
            count = int((~weight.isfinite()).sum())
            return (
                f"the weight {name} has {kind(weight)} in {count} of its {weight.numel()} numbers: take another model, or an "
                "earlier checkpoint with a lower --lr"
            )
    device = next(model.parameters()).device
    with torch.no_grad(), watching(model) as found:
        model(input_ids=ids[None].to(device), use_cache=False)
    where = (
        f"{found[0]} is the first layer whose output is not"
        if found
        else "reading the text once more all layers' outputs are"
    )
    return f"the weights are finite, and {where}: learner.dtype fp32 has room for larger numbers"


@contextmanager
def watching(model: nn.Module) -> Iterator[list[str]]:
    """Gathers the modules whose outputs are not finite, in the order in which they end: the first has finite inputs from inside."""
    found: list[str] = []

    def hook(name: str, module: nn.Module) -> Callable[..., None]:
        def look(_: nn.Module, inputs: object, output: object) -> None:
            outputs = output if isinstance(output, tuple | list) else [output]
            if any(isinstance(one, Tensor) and _bad(one) for one in outputs):
                found.append(f"{name or 'the model'} ({type(module).__name__})")

        return look

    handles = [module.register_forward_hook(hook(name, module)) for name, module in model.named_modules()]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def kind(values: Tensor) -> str:
    """NaN, or which infinity."""
    return "NaN" if bool(values.isnan().any()) else "+inf" if bool(values.isposinf().any()) else "-inf"


def _bad(values: Tensor) -> bool:
    """Masks are −∞ on purpose; what is computed has no infinity."""
    return values.is_floating_point() and bool(values.isnan().any() or values.isposinf().any())
