"""Running out of memory costs the learner a retry with smaller micro-batches, whichever pass of an update it is in."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import policygrad as pg
from doubles.batches import make_batch
from doubles.ranked import learned, make_spec, model
from doubles.short_memory import ON_CPU, ON_GPU, short_of_memory
from policygrad.errors import OutOfMemoryError
from policygrad.learners.local.learner import LocalLearner

BATCH = make_batch(5, groups=5)
TWICE = pg.GradientSteps(epochs=2, minibatches=2)
ALGORITHMS = {
    "grpo": replace(pg.GRPO, update_rule=TWICE, terms=(pg.KLToReference(0.1),)),
    "ppo": replace(pg.PPO, update_rule=TWICE),
    "trpo": replace(pg.TRPO, update_rule=pg.TrustRegion(cg_iters=1, backtrack_iters=2)),
    "prime": pg.PRIME,
}
ROUNDING = {"trpo": 1e-7}
"""Relative, of float64; conjugate gradients enlarge it. Else 1e-9, as values and metrics of a critic are float32: 1e-6."""


def make_learner(name: str, **config: Any) -> LocalLearner:
    torch.manual_seed(1)  # for a critic's head
    config = {"micro_tokens": 60} | config
    return LocalLearner(model(), make_spec(ALGORITHMS[name], config=pg.LearnerConfig(**config)), reference=None)


def weights(learner: LocalLearner) -> dict[str, torch.Tensor]:
    return {name: x.clone() for name, x in learner.state()[0].items()}


def close(name: str, actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    bounds = {key: 1e-6 if key.startswith("critic/") else ROUNDING.get(name, 1e-9) for key in expected}
    errors = {key: float((actual[key] - x).abs().max() / x.abs().max().clamp(min=1e-30)) for key, x in expected.items()}
    return actual.keys() == expected.keys() and all(errors[key] <= bounds[key] for key in expected)


@contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "out of memory")
        yield


@pytest.mark.parametrize(
    "name", ["grpo", *(pytest.param(n, marks=pytest.mark.full) for n in ALGORITHMS if n != "grpo")]
)
def test_running_out_in_any_pass_leaves_the_weights_of_an_undisturbed_update(name: str) -> None:
    algorithm = ALGORITHMS[name]
    learner = make_learner(name)
    initial = (weights(learner), learner.state()[1])
    with short_of_memory() as passes:
        learned(learner, algorithm, BATCH)
    expected, updates = weights(learner), learner.version
    assert passes.count >= 8
    for at in range(1, passes.count + 1):
        learner.restore(*initial)
        learner.memory.limit = None
        with quiet(), short_of_memory(at, error=ON_GPU if at % 2 else ON_CPU) as disturbed:
            learned(learner, algorithm, BATCH)
        assert disturbed.count > passes.count, at
        assert learner.memory.limit in (3, 7, 15, 30), at
        assert learner.version == updates, at  # no update twice
        assert close(name, weights(learner), expected), at


def test_from_the_first_pass_on_an_update_is_to_the_bit_that_of_half_the_tokens() -> None:
    disturbed, small = make_learner("grpo"), make_learner("grpo", micro_tokens=30)
    with quiet(), short_of_memory(1):
        learned(disturbed, ALGORITHMS["grpo"], BATCH)
    learned(small, ALGORITHMS["grpo"], BATCH)
    assert disturbed.memory.limit == 30
    actual, expected = weights(disturbed), weights(small)
    assert all(torch.equal(actual[name], x) for name, x in expected.items())


def test_one_line_names_the_option_that_avoids_it_and_what_fitted_is_kept() -> None:
    learner = make_learner("grpo")
    with short_of_memory(2, 3), pytest.warns(UserWarning, match="out of memory") as said:
        learned(learner, ALGORITHMS["grpo"], BATCH)
    first, second = (str(w.message) for w in said)
    assert first.startswith("out of memory at ")
    assert first.endswith("going on with at most 30; --learner.micro-tokens 30 would have avoided it")
    assert "(2.00 GiB more were wanted)" in first
    assert "\n" not in first
    assert "--learner.micro-tokens 15 " in second
    with short_of_memory() as before:
        learned(learner, ALGORITHMS["grpo"], BATCH)  # and says nothing more
    assert learner.memory.limit == 15
    assert before.count > 8


def test_a_single_completion_that_does_not_fit_ends_the_update_and_leaves_no_gradient() -> None:
    learner = make_learner("grpo")
    before = weights(learner)
    with (
        quiet(),
        short_of_memory(always_from=1),
        pytest.raises(OutOfMemoryError, match="which cannot be fewer") as ended,
    ):
        learned(learner, ALGORITHMS["grpo"], BATCH)
    assert ended.value.flag == "--learner.micro-tokens"
    assert ended.value.__context__ is None  # whose frames would keep the pass's tensors
    learner.evaluate(BATCH, frozenset({"logp_old"}))
    assert all(p.grad is None for p in learner.model.parameters())
    assert all(torch.equal(x, before[name]) for name, x in weights(learner).items())


def test_a_gradient_that_was_there_before_the_pass_stays() -> None:
    """A rule of one's own may accumulate twice before a step."""
    learner, plain = make_learner("grpo"), make_learner("grpo")
    results = []
    for each, at in ((plain, ()), (learner, (2,))):
        batch = each.evaluate(BATCH, ALGORITHMS["grpo"].needs)
        problem = each.build_problem(batch, torch.ones(BATCH.mask.shape), ALGORITHMS["grpo"])
        problem.accumulate()
        with quiet(), short_of_memory(*at) as passes:
            problem.accumulate()
        assert passes.count >= 2
        results.append({name: p.grad for name, p in each.model.named_parameters() if p.grad is not None})
    assert all(torch.allclose(results[1][name], x, rtol=1e-9, atol=1e-12) for name, x in results[0].items())


def test_another_error_is_none_of_its_business() -> None:
    learner = make_learner("grpo")
    with short_of_memory(1, error=RuntimeError("shapes differ")), pytest.raises(RuntimeError, match="shapes differ"):
        learned(learner, ALGORITHMS["grpo"], BATCH)
    assert learner.memory.limit is None


def test_tensors_of_a_failed_pass_are_gone_when_it_is_repeated() -> None:
    """On a GPU what the frames of an error keep alive would fill the memory of the next attempt."""
    from policygrad.utils.out_of_memory import MemoryBudget

    class Big:
        alive = 0

        def __init__(self) -> None:
            Big.alive += 1

        def __del__(self) -> None:
            Big.alive -= 1

    budget, seen = MemoryBudget("--x", "tokens"), list[int]()

    def work(depth: int = 3) -> None:
        if depth == 3:
            seen.append(Big.alive)
            budget.begin(budget.cap(8), 8)
        big = Big()
        if depth:
            return work(depth - 1)
        if len(seen) < 3:
            raise torch.OutOfMemoryError("no")
        del big
        return None

    with quiet():
        budget.run(partial(work))
    assert seen == [0, 0, 0]
    assert budget.limit == 2
