"""Runs whose adapters alone train: resumed, sampled ahead, taken up by name, merged, and counted before they begin."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from packaging.version import Version
from safetensors.torch import load_file
from torch import Tensor, nn

import policygrad as pg
from doubles.algorithms import runnable
from doubles.architectures import CONFIGS
from doubles.files import rows, same, weights, write_rows
from doubles.resuming import check_resume
from doubles.trackers import Record
from policygrad.checkpoint import format as checkpoint
from policygrad.errors import ConfigError, ModelError, RunError
from policygrad.learners.local import activation_memory
from policygrad.learners.local.forward import build_evaluator
from policygrad.models.adapters import add_adapters, reload_saved_precision
from policygrad.models.classifier import load_classifier, score
from policygrad.models.loading import load_model
from policygrad.models.lora_config import Lora
from policygrad.models.replica import clone_model, unshared_parameters
from policygrad.training.config.supervised import RewardModelConfig, SFTConfig
from policygrad.training.cost_estimate import estimate_memory
from policygrad.training.export import export_merged

peft = pytest.importorskip("peft")
LORA = pg.LearnerConfig(lora="rank=4,alpha=8")
IDS = torch.arange(4, 14)[None]


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    result: Tensor = model(input_ids=IDS).logits
    return result


@pytest.fixture(scope="module")
def run(small: pg.Run) -> pg.Run:
    sizes: dict[str, Any] = {"steps": 2, "prompts_per_step": 3, "sampling": pg.SamplingParams(max_tokens=6)}
    return replace(small, learner=LORA, lr=1e-2, **sizes)


@pytest.fixture(scope="module")
def trained(run: pg.Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has moved its adapters."""
    return pg.train(replace(run, output=str(tmp_path_factory.mktemp("lora") / "run")), display=False).output


def resumed(run: pg.Run, folder: Path) -> Path:
    """The folder of the run, which equals, to the bit, the one that is killed after its first step; checkpoints have only
    adapters."""
    full = check_resume(run, folder)
    saved = checkpoint.load_checkpoint(full / "checkpoints" / f"step-{run.steps:06d}").tensors
    assert all("lora_" in name or not name.startswith(("weights/", "adam/")) for name in saved)
    return full


def test_resume_is_bitwise_and_sampler_agrees_with_learner(run: pg.Run, tmp_path: Path) -> None:
    """PPO: a critic of its own, a reference, several updates, log-probabilities evaluated beside those of the sampler."""
    folder = resumed(replace(run, algorithm=pg.PPO), tmp_path)
    gaps = [row["mismatch/logp_max"] for row in rows(folder / "metrics.jsonl")]
    assert len(gaps) == run.steps
    assert max(gaps) < 1e-4
    assert all(bool(t.any()) for name, t in weights(folder).items() if "lora_B" in name)
    names = {path.name for path in (folder / "model").iterdir()}
    assert "adapter_model.safetensors" in names
    assert not names & {"model.safetensors", "config.json"}


OTHERS = ("prime", "trpo", "vapo", "distill", "dual")


@pytest.mark.parametrize("name", ["iterative_grpo", *(pytest.param(n, marks=pytest.mark.full) for n in OTHERS)])
def test_resume_is_bitwise_with_other_models(run: pg.Run, tmp_path: Path, name: str) -> None:
    algorithm = pg.PPO_PENALTY if name == "dual" else runnable(name)
    if name == "iterative_grpo":
        algorithm = replace(algorithm, reference=pg.Reference(refresh_every=1))
    lr = run.lr if algorithm.update_rule.uses_lr else None
    resumed(replace(run, algorithm=algorithm, lr=lr), tmp_path)


def test_sampling_ahead_uses_separate_adapters(run: pg.Run, trained: Path, tmp_path: Path) -> None:
    folder = pg.train(replace(run, max_staleness=1, output=str(tmp_path / "run")), display=False).output
    assert [row["staleness/max"] for row in rows(folder / "metrics.jsonl")] == [0, 1]
    assert not same(weights(folder), weights(trained))


@pytest.mark.full
def test_resume_is_bitwise_when_sampling_ahead(run: pg.Run, tmp_path: Path) -> None:
    resumed(replace(run, max_staleness=1), tmp_path)


def test_display_and_default_lr_are_for_adapters(run: pg.Run, tmp_path: Path) -> None:
    record = Record()
    pg.train(replace(run, steps=1, output=str(tmp_path / "run")), display=record)
    assert record.info.facts["adapters"] == "rank 4, alpha 8: 4,096 parameters train"
    assert replace(run, lr=None).resolve().lr == pytest.approx(1e-5)
    assert replace(run, lr=None, learner=pg.LearnerConfig()).resolve().lr == pytest.approx(1e-6)
    assert replace(run, lr=None, model="tiny").resolve().lr == pytest.approx(1e-3)


def test_an_adapters_folder_is_trained_further(run: pg.Run, trained: Path, tmp_path: Path) -> None:
    """Under its own name or its run's; the reference is what it is when training begins."""
    policy = load_model(str(trained))
    assert {n for n, p in policy.named_parameters() if p.requires_grad} == {
        n for n, _ in policy.named_parameters() if "lora_" in n
    }
    second = replace(
        run, model=str(trained), learner=pg.LearnerConfig(), algorithm=pg.GRPO, output=str(tmp_path / "on")
    )
    result = pg.train(second, display=False).output
    assert rows(result / "metrics.jsonl")[0]["kl"] == pytest.approx(0, abs=1e-9)
    assert rows(result / "metrics.jsonl")[-1]["kl"] > 0
    assert weights(result).keys() == weights(trained).keys()
    assert not same(weights(result), weights(trained))
    config = json.loads((result / "model" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(Path(run.model).resolve())
    with pytest.raises(ConfigError, match=r"rank=16, but .* is an adapter with rank=4.*export .* --merge"):
        load_model(str(trained), lora=Lora(rank=16))
    load_model(str(trained), lora=Lora(rank=4, targets="all-linear"))


def test_peft_and_the_merged_model_agree(trained: Path, run: pg.Run, tmp_path: Path) -> None:
    ours = logits(load_model(str(trained)))
    base = load_model(str(run.model))
    assert not torch.allclose(ours, logits(base), atol=1e-3)
    assert torch.equal(logits(peft.PeftModel.from_pretrained(base, trained / "model").eval()), ours)
    merged = export_merged(str(trained), str(tmp_path / "merged"))
    full = tf.AutoModelForCausalLM.from_pretrained(merged)
    assert torch.allclose(logits(full), ours, atol=1e-4)
    assert not any("lora" in name for name in load_file(merged / "model.safetensors"))
    assert torch.equal(logits(load_model(str(merged))), logits(full.eval()))


def test_the_export_command_merges(
    trained: Path, tmp_path: Path, run_command: Callable[..., tuple[int, str, str]]
) -> None:
    code, out, _ = run_command("export", str(trained), "--merge", "--dtype", "bf16", "--output", str(tmp_path / "half"))
    assert (code, out.strip()) == (0, str(tmp_path / "half"))
    assert {t.dtype for t in load_file(tmp_path / "half" / "model.safetensors").values()} == {torch.bfloat16}
    for args, says in (
        ((str(trained),), "--merge writes a model"),
        ((str(trained), "--merge", "--output", str(tmp_path / "half")), "is not empty"),
        ((str(tmp_path / "half"), "--merge"), "is a complete model"),
        ((str(trained), "--merge", "--dtype", "fp8"), "fp32 or bf16"),
    ):
        code, _, err = run_command("export", *args)
        assert code == 2
        assert says in err
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "run.toml").touch()
    assert "has no model yet" in run_command("export", str(tmp_path / "begun"), "--merge")[2]
    options = (
        "--task",
        "embedded",
        "--reward",
        "exact_match",
        "--problems",
        "2",
        "--samples",
        "1",
        "--max-tokens",
        "4",
    )
    assert run_command("eval", str(trained), *options)[0] == 0


def test_an_adapter_without_its_base_is_refused(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "adapter"
    shutil.copytree(trained / "model", folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    sizes = pg.EvaluationConfig(problems=2, samples_per_prompt=1)
    reward = {"reward": ("exact_match",), "rewards": pg.RewardConfig(num_workers=1)}
    options = pg.RunOptions(model=str(folder), evaluation=sizes, sampling=pg.SamplingParams(max_tokens=4), **reward)  # type: ignore[arg-type]
    result = pg.evaluate(options)  # with its base's tokenizer
    assert result.num_tokens > 0
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(
        json.dumps(config | {"base_model_name_or_path": str(tmp_path / "gone")})
    )
    with pytest.raises(
        ModelError, match=r"is an adapter of .*gone', and there is no such folder: write its present location"
    ):
        load_model(str(folder))
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="names no base model"):
        load_model(str(folder))
    monkeypatch.setattr("policygrad.models.adapters.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"which is an adapter, needs peft"):
        load_model(str(trained))


def test_other_adapters_than_the_checkpoints_are_refused(run: pg.Run, tmp_path: Path) -> None:
    begun = replace(run, output=str(tmp_path / "run"))
    pg.train(begun, stop_after=1, display=False)
    for lora in ("rank=2", "targets=q_proj", ""):
        with pytest.raises((RunError, pg.CheckpointError)):
            pg.train(replace(begun, learner=pg.LearnerConfig(lora=lora)), resume=begun.output, display=False)


def test_a_bf16_model_keeps_the_adapters_precision(trained: Path) -> None:
    model = load_model(str(trained), dtype="bf16")
    held = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert {p.dtype for p in held.values()} == {torch.float32}
    file = load_file(trained / "model" / "adapter_model.safetensors")
    assert all(
        torch.equal(held[n.removeprefix("base_model.model.").replace(".weight", ".default.weight")], t)
        for n, t in file.items()
    )
    reload_saved_precision(model, "nowhere")


def test_fine_tuning_trains_adapters_and_resumes(run: pg.Run, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "d.jsonl", [{"prompt": f"{a} + 1 =", "completion": str(a + 1)} for a in range(24)])
    config = SFTConfig(
        data=data, model=str(run.model), learner=LORA, batch_size=8, lr=1e-2, output=str(tmp_path / "whole")
    )
    full = pg.train_sft(config, display=False)
    assert full.after["eval/loss"] < full.before["eval/loss"]  # type: ignore[index]
    pieces = tmp_path / "pieces"
    pg.train_sft(replace(config, output=str(pieces)), stop_after=2, display=False)
    pg.train_sft(resume=pieces, display=False)
    assert same(weights(full.output), weights(pieces))
    assert all("lora_" in name for name in weights(pieces))
    assert replace(config, lr=None).resolve().lr == pytest.approx(1e-4)


@pytest.mark.skipif(
    Version(tf.__version__) < Version("5.23"),
    reason="transformers 5.17 loads adapters without a head beside them: refused",
)
@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=pytest.mark.full)])
def test_a_reward_model_trains_adapters_and_its_head(run: pg.Run, tmp_path: Path, dtype: str) -> None:
    pairs = [{"prompt": f"{a} =", "chosen": str(a), "rejected": f"{a}!"} for a in range(16)]
    data = write_rows(tmp_path / "p.jsonl", pairs)
    learner = replace(LORA, dtype=dtype)
    config = RewardModelConfig(
        data=data, model=str(run.model), learner=learner, batch_size=8, lr=1e-2, output=str(tmp_path / "rm")
    )
    record = Record()
    result = pg.train_reward_model(config, display=record)
    file = weights(result.output)
    assert {name.rpartition("model.")[2] for name in file if "lora_" not in name} == {"score.weight"}
    texts = [[5, 6, 7, 8], [9, 4]]
    model = load_classifier(str(result.output / "model"))
    merged = load_classifier(str(export_merged(str(result.output))))
    assert torch.allclose(score(model, texts), score(merged, texts), atol=1e-4 if dtype == "fp32" else 0.05)
    assert model.config.pad_token_id == merged.config.pad_token_id
    if dtype == "bf16":  # in the full tier alone, for the worker imports torch
        pg.train(replace(run, reward=(f"model:{result.output}",), steps=1, output=str(tmp_path / "rl")), display=False)
    second = pg.train_reward_model(
        replace(config, model=str(result.output), output=str(tmp_path / "on")), display=False
    )
    assert weights(second.output).keys() == file.keys()


def test_a_new_head_needs_a_complete_model(run: pg.Run, trained: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "p.jsonl", [{"prompt": "1 =", "chosen": "1", "rejected": "2"}])
    config = RewardModelConfig(data=data, model=str(trained), output=str(tmp_path / "rm"))
    with pytest.raises(ModelError, match=r"adapter of a language model.*export .* --merge"):
        pg.train_reward_model(config, display=False)
    with pytest.raises(ConfigError, match="cannot be trained in four bits"):
        pg.train_reward_model(replace(config, model="tiny", learner=pg.LearnerConfig(lora="bits=4")), display=False)


def test_four_bits_have_right_gradients_and_resume(run: pg.Run, tmp_path: Path) -> None:
    """Against a difference of the loss: bitsandbytes' packed weights give others, in silence."""
    pytest.importorskip("bitsandbytes")
    lora = Lora(rank=4, bits=4)
    model = load_model("tiny", lora=lora)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert type(model.model.layers[0].self_attn.q_proj.base_layer).__name__ == "Linear4bit"  # type: ignore[union-attr, index]
    generator = torch.Generator().manual_seed(0)
    for name, parameter in trained.items():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1, generator=generator)

    def loss() -> Tensor:
        result: Tensor = model(input_ids=IDS).logits.logsumexp(-1).sum()
        return result

    result = torch.autograd.grad(loss(), list(trained.values()))
    along = [torch.randn(p.shape, generator=generator) for p in trained.values()]
    sides = []
    for step in (1e-3, -2e-3):
        with torch.no_grad():
            for parameter, x in zip(trained.values(), along, strict=True):
                parameter.add_(step * x)
            sides.append(float(loss()))
    expected = (sides[0] - sides[1]) / 2e-3
    assert float(sum((g * x).sum() for g, x in zip(result, along, strict=True))) == pytest.approx(expected, rel=0.01)
    made = clone_model(model)
    assert unshared_parameters(made, model).keys() == trained.keys()
    assert torch.equal(logits(made), logits(model))
    resumed(replace(run, algorithm=pg.PPO, model="tiny", learner=pg.LearnerConfig(lora="rank=4,bits=4")), tmp_path)


@pytest.mark.parametrize("name", ["qwen3", "gpt-neox"])
def test_saved_activations_under_adapters_are_counted(name: str) -> None:
    config, lora = CONFIGS[name](), Lora(rank=4)
    model = add_adapters(tf.AutoModelForCausalLM.from_config(config), lora)
    evaluator = build_evaluator(model, 1.0)
    part, held = activation_memory.make_synthetic_pack(140, 12, 3, 4), dict[int, int]()
    with activation_memory.count_saved_tensors(held, model):
        states = evaluator.network.hidden(part)
    result = activation_memory.saved_activation_bytes(config, torch.float32, 140, 12, 3, 4, lora)
    assert result == pytest.approx(sum(held.values()), rel=0.02)
    assert states.requires_grad


@pytest.mark.full
def test_the_memory_estimate_counts_one_base_and_all_adapters(trained: Path, run: pg.Run) -> None:
    def static(name: str, learner: pg.LearnerConfig = LORA, **options: object) -> dict[str, int]:
        return estimate_memory(
            replace(
                run, algorithm=pg.get_algorithm(name), learner=replace(learner, micro_tokens=64), **options
            ).resolve()
        ).fixed  # type: ignore[arg-type]

    plain, full = static("dr_grpo"), static("dr_grpo", pg.LearnerConfig())
    count = sum(t.numel() for t in weights(trained).values())
    assert plain["weights"] == full["weights"]
    assert plain["adapters"] == plain["gradients"] == count * 4
    assert plain["optimizer"] == count * 8
    assert static("grpo")["other models"] == count * 4
    ppo = static("ppo")
    assert (ppo["weights"], ppo["adapters"]) == (plain["weights"], 2 * count * 4)
    assert static("dr_grpo", pg.LearnerConfig(lora="rank=4,bits=4"))["weights"] < plain["weights"] / 4
    assert static("dr_grpo", pg.LearnerConfig(), model=str(trained))["adapters"] == count * 4
