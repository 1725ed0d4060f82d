"""Runs that learn from a teacher with a tokenizer of its own: in memory and behind a server, recorded, resumed and refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import policygrad as pg
from doubles.byte_level import tokenizer
from doubles.files import rows
from doubles.teacher_forms import TeacherForm, serving
from doubles.trackers import Record
from policygrad.errors import EngineError
from policygrad.models.loading import load_model
from policygrad.training.config.run import Run
from policygrad.training.config.serialization import load_config
from policygrad.training.trainer import train
from policygrad.verification.verify import verify_run

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a random model with 900 tokens of its own."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder, own = tmp_path_factory.mktemp("other"), tokenizer("gpt-2")
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=len(own.hf),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=256,
        eos_token_id=own.hf.eos_token_id,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    own.hf.save_pretrained(folder)
    return str(folder)


def taught(small: Run, output: Path, model: str, name: str, **options: Any) -> Run:
    algorithm = replace(pg.DISTILL, reference=pg.Reference(model=model, tokenizer=name))
    run = replace(small, steps=2, prompts_per_step=2, samples_per_prompt=4, verify=2, reward=())
    return replace(run, algorithm=algorithm, output=str(output), **options)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model" / "model.safetensors")


def test_a_run_learns_from_a_teacher_with_its_own_tokenizer(small: Run, tmp_path: Path, other: str) -> None:
    """In memory, and the same behind a server, which is sent the teacher's ids."""
    near, far = Record(), Record()
    result = train(taught(small, tmp_path / "near", other, other), display=near)
    loaded = load_config(result.output / "run.toml", Run())
    assert loaded.algorithm.reference == pg.Reference(model=other, tokenizer=other)
    verification = verify_run(result.output, loaded)
    assert not verification.failures
    held = {finding.subject for finding in verification.findings if finding.status == "holds"}
    assert held >= {"spans", "advantages", "gradient", "weights"}
    model = load_model(other)
    with serving(TeacherForm(model, tokenizer("gpt-2").hf, context_length=256)) as form:
        train(taught(small, tmp_path / "far", form.url, other), display=far)
        assert form.scored
    assert not verify_run(
        tmp_path / "far", load_config(tmp_path / "far" / "run.toml", Run())
    ).failures  # without the server
    for (_, a), (_, b) in zip(near.steps, far.steps, strict=True):
        assert a["teacher/kl"] > 0.1
        assert "kl" not in a
        assert 0 <= a["teacher/unaligned"] < 0.9
        assert a["teacher/span_length"] >= 1
        for name in ("teacher/kl", "teacher/unaligned", "teacher/span_length"):
            assert b[name] == pytest.approx(a[name], abs=1e-5)
    for name, tensor in weights(tmp_path / "near").items():
        assert torch.allclose(tensor, weights(tmp_path / "far")[name], atol=3e-4)


@pytest.mark.full
def test_a_run_resumes_with_aligned_rollouts(small: Run, tmp_path: Path, other: str) -> None:
    """Sampled one step ahead: what the teacher reads of the queued rollout is in the checkpoint."""
    run = taught(small, tmp_path / "straight", other, other, max_staleness=1, steps=3)
    train(run, display=False)
    train(replace(run, output=str(tmp_path / "stopped")), stop_after=2, display=False)
    train(resume=tmp_path / "stopped", display=False)
    for name, tensor in weights(tmp_path / "straight").items():
        assert torch.equal(tensor, weights(tmp_path / "stopped")[name])


@pytest.mark.full
def test_a_bonus_and_a_penalty_of_the_reward(small: Run, tmp_path: Path, other: str) -> None:
    run = taught(small, tmp_path / "run", other, other)
    chain = (pg.GroupMean(), pg.GroupStd(), pg.TeacherBonus(0.2, clip=2.0))
    reference = pg.Reference(model=other, tokenizer=other, cut="tokens")
    algorithm = replace(pg.GRPO, terms=(), shaping=(pg.KLInReward(0.05),), advantage=chain, reference=reference)
    train(replace(run, algorithm=algorithm, reward=small.reward), display=False)
    assert all("teacher/kl" in row for row in rows(tmp_path / "run" / "metrics.jsonl") if "objective" in row)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"sampling": pg.SamplingParams(max_tokens=8, top_k=5)},
            r"top_p and top_k: a teacher with a tokenizer of its own",
        ),
        ({"tokenizer": "tiny"}, r"reads the token ids of 'tiny', but its vocabulary differs"),
    ],
    ids=["truncated", "not its own"],
)
def test_what_a_teacher_cannot_say_is_refused_at_the_start(
    small: Run, tmp_path: Path, other: str, options: dict[str, Any], says: str
) -> None:
    run = taught(small, tmp_path / "run", other, options.pop("tokenizer", other))
    with pytest.raises(pg.PolicygradError, match=says):
        train(replace(run, **options), display=False)
    assert not (tmp_path / "run").exists()


def test_a_server_with_a_third_tokenizer_is_refused(small: Run, tmp_path: Path, other: str) -> None:
    model = load_model(other)
    with serving(TeacherForm(model, tokenizer("llama-bpe").hf, context_length=256)) as form:
        says = r"another tokenizer than .*other.*--algorithm\.reference\.tokenizer"
        with pytest.raises(EngineError, match=says):
            train(taught(small, tmp_path / "run", form.url, other), display=False)
