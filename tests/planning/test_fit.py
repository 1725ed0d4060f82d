"""The longest text and the largest group: they fit, one more does not, and the command that is printed is one of train."""

from __future__ import annotations

import json
import shlex
import tomllib
from dataclasses import replace
from typing import Any

import pytest

from policygrad.planning import fit as fit_module
from policygrad.planning.cost_model import AlgorithmCost, ParallelLayout, Workload
from policygrad.planning.fit import STEP, choose_fit, find_fits
from policygrad.planning.hardware import DEVICES, Efficiency
from policygrad.planning.model_shapes import KNOWN_SHAPES
from policygrad.planning.planner import CapacityPlan, PlanRequest


def plan(model: str, device: str, layout: ParallelLayout) -> CapacityPlan:
    work = Workload(16, 8, 256, 1000, 3840)
    request = PlanRequest(KNOWN_SHAPES[model], DEVICES[device], work, AlgorithmCost("grpo"), Efficiency())
    return CapacityPlan(request, layout)


def test_what_is_found_fits_and_more_does_not() -> None:
    fits = find_fits(plan("Qwen3-8B", "RTX-4090", ParallelLayout(1)), 4096)
    assert [fit.option for fit in fits] == [
        "--learner.gradient-checkpointing --learner.micro-tokens 4096 --learner.lora rank=16",
        "--learner.gradient-checkpointing --learner.micro-tokens 4096 --learner.lora rank=16,bits=4",
    ]
    for fit in fits:
        assert fit.plan.fits
        assert (fit.plan.request.workload.max_tokens, fit.plan.request.workload.samples_per_prompt) == (
            fit.context,
            fit.group,
        )
        assert not fit_module._with_texts(fit.plan, fit.context + STEP, 8).fits
        assert not fit_module._with_texts(fit.plan, fit.context, fit.group + 1).fits
    assert fits[0].context < 4096 <= fits[1].context
    assert fits[1].group_at_context > fits[1].group
    assert choose_fit(fits, 4096) == fits[1]
    assert choose_fit(fits, 2**20) == fits[1]  # the longest
    assert choose_fit([], 1) is None


def test_segments_hold_longer_texts_and_smaller_optimizers_larger_groups() -> None:
    """On a model whose whole state fits."""
    of = replace(KNOWN_SHAPES["Qwen3-0.6B"], context_length=None)
    request = replace(plan("Qwen3-0.6B", "RTX-3090", ParallelLayout(1)).request, shape=of)
    fits = {fit.description: fit for fit in find_fits(CapacityPlan(request, ParallelLayout(1)), 4096)}
    whole, cut, small = (fits[key] for key in ("as it is", "read longer texts in segments", "moments in 8 bits"))
    assert whole.context < cut.context < small.context
    assert whole.group_at_context <= cut.group_at_context < small.group_at_context
    assert cut.plan.layout.micro_tokens == 4096 < cut.context
    assert small.option.endswith("--optimizer.name adamw8bit --optimizer.masters none")
    away = fits["what is left of the optimizer's state in the host's memory"]
    assert small.context < away.context
    assert fits["train adapters"].plan.layout.optimizer == ParallelLayout(1).optimizer
    short = find_fits(CapacityPlan(request, ParallelLayout(1)), 4096, micro_tokens=1024)
    assert all(fit.plan.layout.micro_tokens == 1024 for fit in short)
    assert short[0].context > fits["as it is"].context


def test_several_devices_divide_a_text_or_read_it_in_segments() -> None:
    """Of a single completion, since what is sampled at once would limit it."""
    of = replace(KNOWN_SHAPES["Qwen3-0.6B"], context_length=None)
    request = plan("Qwen3-0.6B", "H200", ParallelLayout(1)).request
    request = replace(request, shape=of, workload=replace(request.workload, samples_per_prompt=1))
    fits = {fit.description: fit for fit in find_fits(CapacityPlan(request, ParallelLayout(12)), 4096)}
    recomputed, divided, cut = (
        fits[key]
        for key in ("recompute activations", "divide each text between 6 devices", "read longer texts in segments")
    )
    assert divided.option == "--learner.gradient-checkpointing --learner.context-parallel 6"
    assert divided.plan.layout.context_parallel == 6
    assert "context" not in cut.option
    assert cut.context < recomputed.context < divided.context  # a text's keys and values have gradients in float32
    assert fits["train adapters"].option == "--learner.gradient-checkpointing --learner.lora rank=16"
    given = find_fits(CapacityPlan(request, ParallelLayout(12, context_parallel=2)), 4096)
    assert not any(
        "--learner.context-parallel" in fit.option or "--learner.micro-tokens" in fit.option for fit in given
    )
    assert not any("divide" in fit.description for fit in find_fits(CapacityPlan(request, ParallelLayout(1)), 4096))


def test_the_command_divides_texts_as_the_plan_does(run_command: Any) -> None:
    argv = ("plan", "grpo", "--model", "Qwen3-8B", "--gpus", "A100-80:8", "--fit", "--context", "32768", "--json")
    told = json.loads(run_command(*argv)[1])
    (command,) = [fit["command"] for fit in told["fits"] if "--learner.context-parallel" in fit["option"]]
    options = shlex.split(command)[2:]
    code, out, err = run_command("train", *options, "--learner.device", "cuda", "--dry-run")
    assert code == 0, err
    learner = tomllib.loads(out)["learner"]
    assert (learner["world_size"], learner["context_parallel"]) == (8, 8)


def test_a_text_is_no_longer_than_the_models_positions() -> None:
    (first, *_) = find_fits(plan("SmolLM2-135M", "H200", ParallelLayout(1)), 4096)
    assert first.context == KNOWN_SHAPES["SmolLM2-135M"].context_length == 8192


def test_four_bits_are_for_no_apple_gpu() -> None:
    for device, gpus, has_bits in (("RTX-4090", 4, True), ("M4-Max", 1, False)):
        layout = ParallelLayout(gpus, dtype=DEVICES[device].dtype)
        fits = find_fits(plan("Qwen3-4B", device, layout), 2048)
        assert fits
        assert any("bits" in fit.option for fit in fits) == has_bits


def test_the_command_is_one_of_train(run_command: Any) -> None:
    argv = ("plan", "grpo", "--model", "Qwen3-8B", "--gpus", "RTX-4090", "--fit", "--prompts-per-step", "16")
    told = json.loads(run_command(*argv, "--json")[1])
    assert told["command"] == told["fits"][-1]["command"]
    assert told["fits"][-1]["fits"]
    program, command, *options = shlex.split(told["command"])
    assert (program, command) == ("policygrad", "train")
    code, out, err = run_command("train", *options, "--dry-run")
    assert (code, err) == (0, "") or "memory" in err
    settings = tomllib.loads(out)
    assert settings["model"] == "Qwen/Qwen3-8B"
    assert settings["prompts_per_step"] == 16
    out = run_command(*argv)[1]
    assert told["command"] in out
    assert "What fits: Qwen3-8B with grpo on 1 × RTX-4090" in out


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            ["--optimizer.name", "adamw8bit", "--optimizer.masters", "none", "--offload", "always"],
            ["optimizer.name", "optimizer.masters"],
        ),
        (
            ["--sampler.engine", "vllm", "--offload", "sampling"],
            ["sampler.colocate", "learner.offload", "sampler.max-concurrency"],
        ),
        (["--sampler.engine", "vllm", "--beside", "--learner.lora", "rank=8"], ["sampler.gpu-memory", "learner.lora"]),
    ],
)
def test_the_command_has_every_option_that_the_plan_was_made_with(
    run_command: Any, options: list[str], expected: list[str]
) -> None:
    argv = ("plan", "grpo", "--model", "Qwen3-0.6B", "--gpus", "H200", "--fit", *options)
    told = json.loads(run_command(*argv, "--json")[1])
    program, command, *rest = shlex.split(told["command"])
    assert (program, command) == ("policygrad", "train")
    assert {f"--{name}" for name in expected} <= set(rest)
    code, out, err = run_command("train", *rest, "--learner.device", "cuda", "--dry-run")
    assert code == 0, err
    assert tomllib.loads(out)["model"] == "Qwen/Qwen3-0.6B"


def test_where_memory_is_shared_nothing_is_moved(run_command: Any) -> None:
    code, _, err = run_command("plan", "--model", "Qwen3-0.6B", "--gpus", "cpu", "--offload", "always")
    assert code == 2
    assert "has no memory of its own" in err
    assert "says where an engine keeps" in " ".join(run_command("plan", "--beside")[2].split())


def test_what_never_fits_is_said(run_command: Any) -> None:
    argv = ("plan", "--model", "Llama-3.1-70B", "--gpus", "T4", "--fit")
    assert "Nothing fits" in run_command(*argv)[1]
    told = json.loads(run_command(*argv, "--json")[1])
    assert (told["command"], told["fits"]) == (None, [])


@pytest.mark.parametrize("rank", [8, 32])
def test_adapters_that_are_given_are_kept(rank: int) -> None:
    layout = ParallelLayout(1, adapter_rank=rank)
    fits = find_fits(plan("Qwen3-1.7B", "RTX-3090", layout), 1024)
    assert all(fit.plan.layout.adapter_rank == rank for fit in fits)
