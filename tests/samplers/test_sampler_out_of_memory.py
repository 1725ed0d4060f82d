"""Running out of memory while sampling costs a retry with fewer rows at a time, and the completions are the same."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from doubles.drawing import Context
from doubles.short_memory import ON_CPU, ON_GPU, short_of_memory
from policygrad.errors import OutOfMemoryError
from policygrad.models.loading import load_model
from policygrad.models.tokenizer import load_tokenizer
from policygrad.samplers.base import Generation, Request, SamplingParams
from policygrad.samplers.local.sampler import LocalSampler

TEXTS = ("What is 7 + 8?\n", "Sort: 3 1 2\n", "7\n")


@pytest.fixture(scope="module")
def sampler(random_model: Path) -> LocalSampler:
    model = load_model(str(random_model))
    made = LocalSampler.from_tokenizer(model, load_tokenizer(str(random_model), model))
    asyncio.run(made.generate([Request(torch.tensor([3, 4]), (0,), SamplingParams(max_tokens=1), 1)]))
    return made  # which has found out what the model supports


@pytest.fixture(scope="module")
def requests(random_model: Path) -> list[Request]:
    """Four completions of each prompt, of ragged lengths."""
    tokenizer = load_tokenizer(str(random_model), load_model(str(random_model)))
    sampling, made = SamplingParams(temperature=1.3, max_tokens=7, decode_rows=6), list[Request]()
    for i, text in enumerate(TEXTS):
        prompt = Context(tokenizer.encode(text, 8).ids, (3, 0, 1, i))
        made += [Request(prompt.tokens, (*prompt.key, k), sampling, 3 + (i + 2 * k) % 5) for k in range(4)]
    return made


def draw(sampler: LocalSampler, requests: Sequence[Request]) -> tuple[list[Generation], list[int]]:
    """The generations, and how often each request was reported as finished."""
    reported = [0] * len(requests)

    def count(finished: Sequence[tuple[Request, Tensor]]) -> None:
        for request, _ in finished:
            reported[next(i for i, r in enumerate(requests) if r is request)] += 1

    with sampler.on_completion(count):
        return asyncio.run(sampler.generate(requests)), reported


def test_running_out_in_any_pass_leaves_the_completions_and_reports_each_once(
    sampler: LocalSampler, requests: list[Request]
) -> None:
    with short_of_memory() as passes:
        expected, _ = draw(sampler, requests)
    assert passes.count >= 10
    for at in range(1, passes.count + 1):
        sampler.memory.limit = None
        with (
            warnings.catch_warnings(record=True) as said,
            short_of_memory(*([1, 3] if at == 1 else [at]), error=ON_GPU if at % 2 else ON_CPU),
        ):
            warnings.simplefilter("always")
            got, reported = draw(sampler, requests)
        assert reported == [1] * len(requests), at
        assert sampler.memory.limit in (1, 2, 3), at
        assert "--decode-rows" in str(said[0].message)
        for one, other in zip(got, expected, strict=True):
            assert torch.equal(one.tokens, other.tokens), at
            assert torch.allclose(one.logp, other.logp, atol=1e-5), at
            assert one.finish_reason == other.finish_reason
    sampler.memory.limit = None


def test_from_then_on_no_more_rows_are_decoded_than_fitted(sampler: LocalSampler, requests: list[Request]) -> None:
    """Also where one prompt has more completions than that: it is read once more for the rest."""
    sampler.memory.limit = 2
    widths = list[int]()

    def before(module: torch.nn.Module, args: object, kwargs: dict[str, Tensor]) -> None:
        widths.append(len(kwargs["input_ids"]))

    handle = sampler.model.register_forward_pre_hook(before, with_kwargs=True)
    try:
        draw(sampler, requests)
    finally:
        handle.remove()
        sampler.memory.limit = None
    assert max(widths) == 2


def test_a_single_completion_that_does_not_fit_is_an_error(sampler: LocalSampler, requests: list[Request]) -> None:
    with (
        warnings.catch_warnings(action="ignore"),
        short_of_memory(always_from=1),
        pytest.raises(OutOfMemoryError, match="1 completions at a time, which cannot be fewer") as ended,
    ):
        draw(sampler, requests)
    sampler.memory.limit = None
    assert ended.value.flag == "--decode-rows"
