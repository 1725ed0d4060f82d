"""What a run will take is what it takes."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

import policygrad as pg
from doubles.architectures import CONFIGS
from policygrad.commands.train import train
from policygrad.learners.local import activation_memory
from policygrad.learners.local.forward import build_evaluator
from policygrad.models.loading import load_model, resolve_model
from policygrad.planning.model_sizes import EMBEDDED_MODEL
from policygrad.training.cost_estimate import MemoryEstimate, estimate_memory
from policygrad.training.memory_probe import LIBRARY_BYTES, count_model, load_stored_facts


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "gpt-neox", "phi"])
@pytest.mark.parametrize("completion", [3, 40])
def test_saved_activations_are_counted_without_weights(name: str, completion: int) -> None:
    """As many bytes as the same pass of a real model keeps."""
    config = CONFIGS[name]()
    model = tf.AutoModelForCausalLM.from_config(config).eval()
    evaluator = build_evaluator(model, 1.0)
    assert evaluator.network.use_tree
    part, held = activation_memory.make_synthetic_pack(140, 12, completion, 4), dict[int, int]()
    with activation_memory.count_saved_tensors(held, model):
        states = evaluator.network.hidden(part)
    results = activation_memory.saved_activation_bytes(config, torch.float32, 140, 12, completion, 4)
    assert results == pytest.approx(sum(held.values()), rel=0.02)
    assert 100 < len(part.ids) < 200
    assert states.requires_grad


def test_the_dry_run_prints_the_estimate(capsys: pytest.CaptureFixture[str]) -> None:
    assert train(["ppo", "--dry-run"]) == 0
    message = capsys.readouterr().out
    assert "# memory: about" in message
    assert "2,048 tokens" in message.replace("\n# ", " ")
    assert train(["grpo", "--dry-run", "--task", "nowhere.jsonl"]) == 0
    assert "# memory: unknown, nowhere.jsonl" in capsys.readouterr().out


def test_every_model_of_a_run_is_counted() -> None:
    results = {
        name: estimate_memory(pg.Run(algorithm=pg.get_algorithm(name)).resolve())
        for name in ("dr_grpo", "grpo", "ppo", "trpo")
    }
    plain = results["dr_grpo"].fixed
    assert results["grpo"].fixed["other models"] == plain["weights"]  # its reference
    assert results["ppo"].fixed["weights"] == 2 * plain["weights"]  # its critic
    assert results["ppo"].fixed["optimizer"] == 2 * plain["optimizer"]
    assert results["trpo"].fixed["optimizer"] > plain["optimizer"]
    half = estimate_memory(pg.Run(algorithm=pg.DR_GRPO, learner=pg.LearnerConfig(dtype="bf16")).resolve())
    assert half.fixed["weights"] == plain["weights"] * 3 // 2  # and their masters
    assert (
        half.fixed["copy of the state"] == plain["copy of the state"] == 3 * plain["weights"]
    )  # masters and two moments
    assert half.training < results["dr_grpo"].training


def test_what_an_optimizer_keeps_is_counted() -> None:
    run = pg.Run(algorithm=pg.DR_GRPO, lr=0.1, learner=pg.LearnerConfig(dtype="bf16")).resolve()

    def estimate(**options: Any) -> dict[str, int]:
        fixed = estimate_memory(replace(run, optimizer=pg.OptimizerConfig(**options))).fixed
        return {name: size for name, size in fixed.items() if name != "libraries"}  # of this process, which change

    parameters, outer = 702_208, 62_336
    plain = estimate()
    assert estimate(clip=0.0) == plain
    for name, moments in (
        ("adamw8bit", 2.03125 * parameters),
        ("muon", 4 * (parameters - outer) + 8 * outer),
        ("sgd", 4 * parameters),
    ):
        fixed = estimate(name=name)
        assert fixed["optimizer"] == pytest.approx(moments, abs=1), name
        assert fixed["weights"] == plain["weights"] == 6 * parameters
        assert fixed["copy of the state"] == pytest.approx(4 * parameters + moments, abs=1)
    assert estimate(name="sgd", momentum=0.0)["optimizer"] == 0
    bare = estimate(masters="none")
    assert bare["weights"] == 2 * parameters
    assert bare["copy of the state"] == 10 * parameters
    away = estimate(offload=True)
    assert away["weights"] == 2 * parameters
    assert away["optimizer"] == 0
    counted = count_model(replace(run, learner=pg.LearnerConfig(dtype="fp32")), "cpu")
    assert (counted.parameters, counted.outer_parameters) == (parameters, outer)


def test_an_evaluation_with_more_rows_than_a_step_is_counted() -> None:
    """The default measurement draws 256 × 8 completions, of which decode_rows decode at once; this step draws 4 × 8."""
    run = pg.Run(algorithm=pg.DR_GRPO, prompts_per_step=4, samples_per_prompt=8).resolve()
    without = estimate_memory(replace(run, evaluation=pg.EvaluationConfig(problems=0)))
    few = estimate_memory(replace(run, evaluation=pg.EvaluationConfig(problems=2, samples_per_prompt=1)))
    most = estimate_memory(replace(run, evaluation=pg.EvaluationConfig(problems=10**4)))
    step = run.prompts_per_step * run.effective_samples_per_prompt
    assert step < run.sampling.decode_rows
    assert few.sampling == without.sampling
    assert estimate_memory(run).sampling == most.sampling
    assert most.sampling * step == without.sampling * run.sampling.decode_rows


def test_the_peak_is_the_larger_of_training_and_sampling() -> None:
    assert MemoryEstimate({"weights": 2**30}, training=2**20, sampling=2**30, micro_tokens=1).peak == 2**31
    assert "about 2 GiB" in str(MemoryEstimate({"weights": 2**30}, training=2**20, sampling=2**30, micro_tokens=1))


def test_the_upper_bound_counts_unreleased_memory() -> None:
    results = MemoryEstimate({"weights": 2**30}, training=2**30, sampling=2**29, micro_tokens=1)
    assert results.upper_bound > results.peak + results.sampling  # sampling's memory stays beside learning's
    assert "at most 3." in str(results)
    on_gpu = replace(results, releases_memory=True)
    assert on_gpu.upper_bound == on_gpu.peak
    assert "at most" not in str(on_gpu)


@pytest.mark.full
@pytest.mark.parametrize("tokens", [1024, 4096])
def test_the_estimate_is_within_a_fifth_of_the_measured_memory(tmp_path: Path, tokens: int) -> None:
    """A model of 7M parameters, four groups of eight answers of 128 tokens; the estimate is of a process of its own as well."""
    config = tf.Qwen3Config(
        vocab_size=8192,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        tie_word_embeddings=True,
    )
    tf.Qwen3ForCausalLM(config).save_pretrained(tmp_path / "model")
    tf.AutoTokenizer.from_pretrained(load_model("tiny").config._name_or_path).save_pretrained(tmp_path / "model")
    options = ["grpo", "--model", str(tmp_path / "model"), "--prompts-per-step", "4", "--samples-per-prompt", "8"]
    options += ["--steps", "1", "--max-tokens", "128", "--learner.micro-tokens", str(tokens)]
    options += ["--evaluation.problems", "0", "--reward", "format:a", "--lr", "1e-5"]
    command = [sys.executable, "-m", "policygrad", "train", *options]
    subprocess.run([*command, "--output", str(tmp_path / "run"), "--plain"], check=True, capture_output=True)
    taken = json.loads((tmp_path / "run" / "result.json").read_text())["peak_memory_mib"] * 2**20
    program = (
        "import sys; from policygrad.commands.train import parse_run; "
        "from policygrad.training.cost_estimate import estimate_memory; "
        "found = estimate_memory(parse_run(sys.argv[1:])[0].resolve()); print(found.peak, found.upper_bound)"
    )
    message = subprocess.run([sys.executable, "-c", program, *options], check=True, capture_output=True, text=True)
    about, most = map(int, message.stdout.split())
    assert about == pytest.approx(taken, rel=0.2)
    assert taken <= most


def test_the_stored_numbers_of_the_embedded_model_are_those_that_are_counted() -> None:
    for run in (pg.Run(algorithm=pg.GRPO), pg.Run(algorithm=pg.RLOO, task="embedded_steps")):
        run = run.resolve()
        stored = load_stored_facts(run, "cpu")
        assert stored is not None
        assert replace(stored, libraries=0) == replace(count_model(run, "cpu"), libraries=0)


def test_what_changes_the_numbers_is_counted() -> None:
    adapters, length = pg.LearnerConfig(lora="rank=4"), pg.SamplingParams(max_tokens=48)
    for run in (
        pg.Run(learner=adapters),
        pg.Run(sampling=length),
        pg.Run(task="gcd"),
        pg.Run(tokenizer="tiny"),
        pg.Run(model="shapes", task="shapes"),
    ):
        assert load_stored_facts(run.resolve(), "cpu") is None


def test_the_memory_of_libraries_that_are_not_loaded_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    run = pg.Run(algorithm=pg.GRPO).resolve()
    assert "transformers.modeling_utils" in sys.modules
    loaded = load_stored_facts(run, "cpu")
    monkeypatch.delitem(sys.modules, "transformers.modeling_utils")
    missing = load_stored_facts(run, "cpu")
    assert loaded is not None
    assert missing is not None
    assert missing.libraries - loaded.libraries == pytest.approx(LIBRARY_BYTES, rel=0.1)


@pytest.mark.full
def test_the_memory_of_libraries_equals_what_they_take_when_they_are_loaded() -> None:
    program = (
        "import policygrad as pg; from policygrad.training.memory_probe import count_model, load_stored_facts\n"
        "run = pg.Run(algorithm=pg.GRPO).resolve()\n"
        "print(load_stored_facts(run, 'cpu').libraries, count_model(run, 'cpu').libraries)"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    before, after = map(int, done.stdout.split())
    assert before == pytest.approx(after, rel=0.1)


def test_a_text_in_segments_needs_a_pass_and_what_its_segments_leave() -> None:
    """Of each further token keys, values and states with their gradients; a model that is compiled reads texts whole."""
    learner = pg.LearnerConfig(dtype="fp32", micro_tokens=128)
    runs = [pg.Run(sampling=pg.SamplingParams(max_tokens=n), learner=learner) for n in (400, 401)]
    less, more = (count_model(run, "cpu") for run in runs)
    config = tf.AutoConfig.from_pretrained(resolve_model(EMBEDDED_MODEL))
    assert more.saved_bytes - less.saved_bytes == less.cache_numbers * (4 + 4) + config.hidden_size * (2 * 4 + 4)
    whole = replace(runs[0], learner=replace(learner, compile=True))
    assert count_model(whole, "cpu").saved_bytes > 2 * less.saved_bytes
