"""The longest text and the largest group: they fit, one more does not, and the command that is printed is one of train."""

from __future__ import annotations

import json
import shlex
import tomllib
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
        "--gradient-checkpointing --lora rank=16",
        "--gradient-checkpointing --lora rank=16,bits=4",
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


def test_a_text_is_no_longer_than_the_models_positions() -> None:
    (first, *_) = find_fits(plan("SmolLM2-135M", "H200", ParallelLayout(1)), 4096)
    assert first.context == KNOWN_SHAPES["SmolLM2-135M"].context_length == 8192


def test_four_bits_are_for_one_learner_and_no_apple_gpu() -> None:
    for device, gpus in (("RTX-4090", 4), ("M4-Max", 1)):
        layout = ParallelLayout(gpus, dtype=DEVICES[device].dtype)
        fits = find_fits(plan("Qwen3-4B", device, layout), 2048)
        assert fits
        assert not any("bits" in fit.option for fit in fits)


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
