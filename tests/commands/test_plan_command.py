"""`policygrad plan` end to end: tables, JSON, the page, what is refused, and that it starts without what it does not need."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import policygrad as pg
from policygrad.algorithms import ALGORITHMS
from policygrad.commands.train import parse_run
from policygrad.planning.model_shapes import KNOWN_SHAPES
from policygrad.training.cost_estimate import compute_algorithm_cost, compute_plannable_cost

MODEST = ("--model", "Qwen3-1.7B", "--gpus", "H100:8", "--learner.gradient-checkpointing")


def loaded(code: str) -> set[str]:
    """Modules that a program has loaded at its end."""
    program = f"{code}\nimport sys; print('\\n' + '\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(done.stdout.split("\n"))


def test_plan_prints_time_and_memory(run_command: Any) -> None:
    code, out, err = run_command("plan", *MODEST, "--algorithm", "grpo", "--price", "2.5")
    assert (code, err) == (0, "")
    for text in (
        "Qwen3-1.7B with grpo on 8 × H100",
        "It fits",
        "Memory of one device, GiB",
        "full policy",
        "keys and values, while sampling",
        "sampling completions",
        "Other numbers of devices",
        "cost",
        "1,720,574,976 parameters (config.json of Qwen/Qwen3-1.7B)",
        "NVIDIA H100 datasheet",
    ):
        assert text in out
    *lines, command = out.splitlines()
    assert max(map(len, lines)) <= 120
    assert parse_run(shlex.split(command)[2:])[0].learner.world_size == 8


def test_plan_as_json(run_command: Any) -> None:
    code, out, _ = run_command("plan", *MODEST, "--json", "--steps", "10", "--price", "2")
    told = json.loads(out)
    assert code == 0
    plan = told["plan"]
    assert plan["fits"]
    assert told["changes"] == []
    assert plan["seconds"]["step"] == pytest.approx(sum(v for name, v in plan["seconds"].items() if name != "step"))
    assert plan["cost"] == pytest.approx(2 * plan["gpu_hours"])
    assert plan["gpu_hours"] == pytest.approx(8 * 10 * plan["seconds"]["step"] / 3600)
    assert [other["gpus"] for other in told["gpus"]] == [1, 2, 4, 8, 16, 32]
    assert plan in told["gpus"]
    assert told["algorithm"]["scoring_passes"] == 1  # π_ref


def test_the_algorithm_is_the_first_argument(run_command: Any) -> None:
    first = json.loads(run_command("plan", "ppo", *MODEST, "--json")[1])
    named = json.loads(run_command("plan", *MODEST, "--algorithm", "ppo", "--json")[1])
    assert first == named
    assert first["algorithm"]["name"] == "ppo"


def test_published_setups_can_be_planned_with_an_engine(run_command: Any) -> None:
    """Set-ups of docs/planning.md; micro-batches of 16,384 tokens fit where activations are recomputed."""
    for model, gpus, tensor, completion in (
        ("Llama-3.1-8B", 8, 1, 795),
        ("Llama-3.1-70B", 64, 4, 398),
        ("Llama-3.1-8B", 16, 1, 1060),
    ):
        argv = (
            "plan",
            "grpo",
            "--model",
            model,
            "--gpus",
            f"H100:{gpus}",
            "--tensor-parallel",
            str(tensor),
            "--prompt",
            "132",
        )
        argv += (
            "--samples-per-prompt",
            "32",
            "--completion",
            str(completion),
            "--learner.gradient-checkpointing",
            "--sampler.engine",
            "vllm",
        )
        result = json.loads(run_command(*argv, "--json")[1])["plan"]
        assert result["fits"], model
        assert "full policy" not in result["memory"]["learner"]["static"]
    out = run_command(*argv)[1]
    assert "this library's engines read them from files" in " ".join(out.lower().split())
    assert not json.loads(run_command(*argv[:-2], "--json")[1])["plan"]["fits"]


def test_samplers_on_separate_devices(run_command: Any) -> None:
    told = json.loads(run_command("plan", *MODEST, "--max-staleness", "1", "--json")[1])["plan"]
    assert 0 < told["layout"]["samplers"] < 8
    assert told["idle"]["learner"] < 1
    assert told["memory"]["sampler"]["peak"] <= told["memory"]["usable"]
    fixed = json.loads(run_command("plan", *MODEST, "--max-staleness", "1", "--samplers", "2", "--json")[1])["plan"]
    assert fixed["layout"]["samplers"] == 2
    assert fixed["seconds"]["step"] >= told["seconds"]["step"]
    sent = run_command("plan", *MODEST, "--max-staleness", "1", "--engine", "--weight-transport", "nccl")[1]
    assert "--sampler.weight-transport nccl" in sent.splitlines()[-1]
    assert "by NCCL, to each sampler by itself" in " ".join(sent.split())
    out = run_command("plan", *MODEST, "--max-staleness", "1")[1]
    assert "devices sample" in out
    assert "learners wait" in out


def test_a_plan_that_does_not_fit_suggests_changes(run_command: Any) -> None:
    code, out, _ = run_command("plan", "--model", "Qwen3-8B", "--gpus", "H100:8")
    assert code == 0
    assert "It does not fit" in out
    assert "What to change" in out
    assert "--learner.gradient-checkpointing" in out
    changes = json.loads(run_command("plan", "--model", "Qwen3-8B", "--gpus", "H100:8", "--json")[1])["changes"]
    assert changes[-1]["fits"]


def test_the_last_line_is_a_command_of_train(run_command: Any) -> None:
    """Also of what fits only with the changes, and with samplers on devices of their own."""
    sizes = ("--model", "Qwen3-8B", "--gpus", "H100:8", "--max-tokens", "1000", "--prompt", "24")
    for options in ((), ("--max-staleness", "1", "--learner.gradient-checkpointing"), ("--learner.lora", "rank=8")):
        told = json.loads(run_command("plan", "grpo", *sizes, *options, "--json")[1])
        run = parse_run(shlex.split(told["command"])[2:])[0]
        assert run.sampling.max_tokens == 1000
        assert (run.sampler.engine == "vllm") is ("--max-staleness" in options)
        assert (run.learner.lora == "rank=8") is ("--learner.lora" in options)
    out = run_command("plan", "grpo", *sizes)[1]
    assert out.rstrip().endswith("  # with the changes above")


def test_names_of_train_and_short_ones_are_the_same_options(run_command: Any) -> None:
    short = (
        "--lora",
        "rank=8",
        "--optimizer",
        "muon",
        "--offload",
        "always",
        "--micro-tokens",
        "999",
        "--context",
        "1256",
    )
    names = (
        "--learner.lora",
        "rank=8",
        "--optimizer.name",
        "muon",
        "--optimizer.offload",
        "--learner.micro-tokens",
        "999",
    )
    size = ("--model", "Qwen3-1.7B", "--gpus", "H100:1", "--json")
    first = run_command("plan", *size, *short)[1]
    assert json.loads(first) == json.loads(run_command("plan", *size, *names, "--max-tokens", "1000")[1])
    code, _, err = run_command("plan", "--context", "900", "--max-tokens", "3")
    assert code == 2
    assert "give one of --context and --max-tokens" in err


def test_suggested_options_are_accepted(run_command: Any) -> None:
    """What was said to fit does, when it is asked for."""
    argv = ["plan", "--model", "Qwen3-8B", "--gpus", "H100:8", "--json"]
    changes = [c for c in json.loads(run_command(*argv)[1])["changes"] if not c["option"].startswith("--gpus")]
    more = [word for change in changes for word in change["option"].split()]
    told = json.loads(run_command(*argv, *more)[1])["plan"]
    assert told["fits"]
    assert told["memory"]["peak"] == changes[-1]["memory"]["peak"]


def test_plan_writes_a_page_with_plots(run_command: Any, tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    code, _, err = run_command("plan", *MODEST, "--output", str(page))
    assert code == 0
    assert str(page) in err
    text = page.read_text(encoding="utf-8")
    assert "<h1>Qwen3-1.7B with grpo on 8 × H100</h1>" in text
    data = json.loads(text.split('id="data">')[1].split("</script>")[0])
    for plot in data["plots"].values():
        assert plot["x"]["values"] == [1, 2, 4, 8, 16, 32]
        for panel in plot["panels"]:
            assert all(len(line["values"]) == 6 for line in panel["lines"])
    assert "://" not in text.replace("http://www.w3.org", "")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--model", "Qwen3-9B"), "did you mean 'Qwen3.5-9B'"),
        (("--gpus", "T4", "--learner.dtype", "bf16"), "the T4 has no bfloat16"),
        (("--learner.lora", "rank=0"), "rank must be at least 1"),
        (("--fit", "--samplers", "2"), "Leave out --samplers"),
        (("--gpus", "H20:8"), "did you mean H200"),
        (("--sampler.weight-transport", "http"), "must be one of folder,"),
        (("--engine", "--weight-transport", "nccl"), "add --sampler.engine vllm and --samplers"),
        (("--max-staleness", "1", "--weight-transport", "nccl"), "add --sampler.engine vllm and --samplers"),
        (("--algorithm", "gpro"), "grpo"),
        (("--algorithm", "trpo"), "counts gradient steps"),
        (("--context", "256"), "no room for a completion"),
        (("--completion", "9000"), "more than the maximum of 3840"),
        (("grpo", "--algorithm", "ppo"), "given twice"),
        (("gpro",), "grpo"),
        (("--samplers", "8"), "leaves none to learn"),
        (("--tensor-parallel", "2"), "Add --samplers, --max-staleness"),
        (("--max-staleness", "1", "--samplers", "0"), "Omit one of them"),
        (("--gpus", "H100", "--max-staleness", "1"), "at least 2 devices"),
        (("--calibration", "nowhere.json"), "--calibrate` writes one"),
        (("--output", "nowhere/plan.html"), "there is no folder"),
        (("--price", "-1"), "--price must be at least 0"),
        (("--learner.dtype", "fp8"), "one of bf16, fp32"),
        (("--prompts-per-step", "0"), "prompts must be at least 1"),
    ],
)
def test_what_cannot_be_planned_is_refused_with_a_remedy(run_command: Any, argv: tuple[str, ...], message: str) -> None:
    code, out, err = run_command("plan", *argv)
    assert (code, out) == (2, "")
    assert message in err


def test_the_arithmetic_needs_no_torch() -> None:
    result = loaded("import policygrad.planning.render, policygrad.planning.planner")
    assert "policygrad.planning.planner" in result
    assert not {"torch", "tyro", "transformers", "numpy", "jinja2", "policygrad.core"} & result


# --- what an algorithm asks


def test_models_and_passes_of_the_matrix() -> None:
    def told(name: str) -> tuple[int, int, int, int, int]:
        result = compute_algorithm_cost(ALGORITHMS[name])
        return result.trained_models, result.frozen_models, result.scoring_passes, result.epochs, result.updates

    assert told("dr_grpo") == (1, 0, 0, 1, 1)
    assert told("grpo") == (1, 1, 1, 1, 1)  # π_ref
    assert told("dapo") == (1, 0, 1, 1, 16)  # π_old, as a rollout feeds several updates
    assert told("ppo") == (2, 1, 3, 4, 4)  # π_old, π_ref and values, and a critic of its own
    assert told("iterative_grpo") == (1, 1, 2, 2, 2)
    assert compute_algorithm_cost(pg.DR_GRPO).stale_scoring_passes == 1
    assert compute_algorithm_cost(pg.DAPO).stale_scoring_passes == 0  # it is read anyway
    assert not compute_algorithm_cost(pg.DR_GRPO).recomputes_head
    assert compute_algorithm_cost(pg.GRPO).recomputes_head  # its KL's gradient is not known beforehand


def test_every_algorithm_is_planned_or_refused_with_a_reason() -> None:
    for name, algorithm in ALGORITHMS.items():
        if type(algorithm.update_rule) is not pg.GradientSteps:
            with pytest.raises(pg.ConfigError, match="counts gradient steps"):
                compute_plannable_cost(algorithm)
            continue
        result = compute_plannable_cost(algorithm)
        assert result.name == name
        assert result.samples_per_prompt == algorithm.samples_per_prompt, name
        assert result.updates % result.epochs == 0, name


def test_extra_samples_are_named() -> None:
    assert any("in place of those" in text for text in compute_algorithm_cost(pg.DAPO).uncounted)
    assert any("greedy" in text for text in compute_algorithm_cost(pg.REMAX).uncounted)
    assert any("from within others" in text for text in compute_algorithm_cost(pg.VINEPPO).uncounted)
    assert compute_algorithm_cost(pg.GRPO).uncounted == ()


def test_minibatches_are_at_most_as_many_as_prompts(run_command: Any) -> None:
    argv = (
        "plan",
        "--model",
        KNOWN_SHAPES["Qwen3-0.6B"].name,
        "--algorithm",
        "dapo",
        "--prompts-per-step",
        "4",
        "--json",
    )
    assert json.loads(run_command(*argv)[1])["algorithm"]["updates"] == 4
