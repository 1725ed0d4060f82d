"""`learner.compile`: the same gradients, and nothing compiled anew for another length."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from inspect import currentframe
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.exc import InductorError

import policygrad as pg
from doubles.architectures import PLAIN
from doubles.batches import float_batch
from policygrad.errors import OutOfMemoryError
from policygrad.learners.local import compilation
from policygrad.learners.local.forward import Network
from policygrad.learners.local.learner import LocalLearner
from policygrad.models.loading import load_model
from policygrad.samplers.base import Request, SamplingParams
from policygrad.samplers.local.sampler import LocalSampler


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with one block, which is what is compiled."""
    result = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = tf.LlamaConfig(**PLAIN, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    tf.LlamaForCausalLM(config).save_pretrained(result)
    return result


def learner_for(folder: Path, dtype: str = "fp32", **config: object) -> LocalLearner:
    settings = pg.LearnerConfig(dtype=dtype, **config)  # type: ignore[arg-type]
    optimizer = pg.OptimizerConfig(eps=1.0)  # a step about linear in the gradient does not amplify rounding
    return LocalLearner(load_model(str(folder)), pg.LearnerSpec(pg.GRPO, 1e-3, 9, 1.0, settings, optimizer))


def check(folder: Path, **config: object) -> None:
    """Take steps on batches of several shapes, with and without."""
    torch._dynamo.reset()
    plain, compiled = learner_for(folder), learner_for(folder, compile=True, **config)
    sampler = LocalSampler(compiled.model, frozenset({-1}), 0)
    request = Request(torch.tensor([3, 4, 5]), (0, 0), SamplingParams(max_tokens=6), 6)
    graphs = []
    for seed in (0, 1, 2, 3):
        batch = float_batch(seed)
        batch = replace(batch, logp_sampler=torch.zeros(batch.mask.shape))
        for learner in (plain, compiled):
            filled = learner.evaluate(batch, pg.GRPO.needs)
            metrics = learner.update(filled, pg.GRPO.compute_advantages(filled), pg.GRPO)
        graphs.append(metrics["compiled_graphs"].value)
        asyncio.run(sampler.generate([request]))  # the model's own blocks, which know caches
    assert graphs[0] > 0
    assert graphs[2:] == [0, 0]
    for name, weight in plain.optimizer.masters.items():
        assert torch.allclose(weight, compiled.optimizer.masters[name], atol=1e-6), name


@pytest.mark.full
@pytest.mark.parametrize("recompute", [False, True])
def test_compiled_blocks_take_the_same_steps(folder: Path, recompute: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    check(folder, gradient_checkpointing=recompute)


@pytest.mark.full
def test_compiled_blocks_take_the_same_steps_by_inductor(folder: Path) -> None:
    check(folder)


def test_a_machine_without_a_compiler_and_a_model_without_blocks_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilation, "get_backbone", lambda _: torch.nn.Linear(1, 1))
    with pytest.raises(pg.ConfigError, match=r"LlamaForCausalLM has no list of `layers`"):
        learner_for(folder, compile=True)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(pg.ConfigError, match=r"needs a C\+\+ compiler.*apt install g\+\+"):
        learner_for(folder, compile=True)


def update(learner: LocalLearner, batch: pg.Batch) -> pg.Metrics:
    filled = learner.evaluate(batch, pg.GRPO.needs)
    return learner.update(filled, pg.GRPO.compute_advantages(filled), pg.GRPO)


def scored_batch(seed: int = 0) -> pg.Batch:
    batch = float_batch(seed)
    return replace(batch, logp_sampler=torch.zeros(batch.mask.shape))


def check_fallback(plain: LocalLearner, compiled: LocalLearner) -> None:
    """Take two updates, the first with a single warning, and compare the weights."""
    torch._dynamo.reset()
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        for seed in (0, 1):
            metrics = [update(learner, scored_batch(seed)) for learner in (plain, compiled)]
            assert metrics[0]["completions/computed"] == metrics[1]["completions/computed"]
    (note,) = (text for w in notes if "cannot be compiled" in (text := str(w.message)))
    assert "the blocks of LlamaForCausalLM cannot be compiled here (RuntimeError: no such kernel)" in note
    assert all(torch.equal(w, compiled.optimizer.masters[n]) for n, w in plain.optimizer.masters.items())


def test_blocks_that_cannot_be_compiled_run_as_they_are(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compile(call: object, **options: object) -> object:
        def fail(*args: object, **kwargs: object) -> None:
            raise torch._dynamo.exc.BackendCompilerFailed(lambda: None, RuntimeError("no such kernel"), None)

        return fail

    monkeypatch.setattr(torch, "compile", compile)
    check_fallback(learner_for(folder), learner_for(folder, compile=True))


def fail_backward(after: int, error: Exception) -> Callable[..., Any]:
    """Return a backend of torch.compile whose backward passes fail from the call number `after` on."""
    calls = count()

    def compile_backward(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            if next(calls) >= after:
                raise error
            return graph(*args)

        return make_boxed_func(run)

    return aot_autograd(fw_compiler=lambda graph, inputs: make_boxed_func(graph), bw_compiler=compile_backward)


@pytest.mark.full
@pytest.mark.parametrize(("dtype", "recompute"), [pytest.param("fp32", False, marks=pytest.mark.full), ("bf16", True)])
def test_an_update_whose_backward_pass_cannot_be_compiled_starts_anew_without_the_compiler(
    folder: Path, dtype: str, recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = InductorError(RuntimeError("no such kernel"), currentframe())
    backend = fail_backward(3, error)  # in a later micro-batch than the first
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    monkeypatch.setattr(Network, "reads_segments", False)  # compiled blocks never do, and passes are compared
    config = {"dtype": dtype, "gradient_checkpointing": recompute, "micro_tokens": 1}
    check_fallback(learner_for(folder, **config), learner_for(folder, compile=True, **config))


class OutOfMemory(torch.autograd.Function):
    """x, whose backward pass runs out of memory."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("2 GiB")


def test_running_out_of_memory_in_a_compiled_backward_pass_ends_the_update(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compile(call: Callable[..., Any], **options: object) -> Callable[..., Any]:
        return lambda *args, **kwargs: OutOfMemory.apply(call(*args, **kwargs))

    monkeypatch.setattr(torch, "compile", compile)
    with pytest.raises(OutOfMemoryError, match="2 GiB"):  # however small the micro-batches become
        update(learner_for(folder, compile=True), scored_batch())


def test_a_models_own_error_is_not_taken_for_the_compilers() -> None:
    assert not compilation.is_compiler_error(ValueError("a shape"))


def test_compiling_is_for_one_process() -> None:
    with pytest.raises(pg.ConfigError, match=r"learner\.compile is for a learner in one process, and .* is 2"):
        pg.LearnerConfig(compile=True, world_size=2)
