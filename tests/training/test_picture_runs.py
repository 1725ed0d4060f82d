"""Runs of a model that sees: every algorithm, resumed, in two processes, with adapters, frozen towers, pictures from data."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import policygrad as pg
from doubles.algorithms import SINGLE_TURN, runnable
from doubles.files import rows, untimed, weights, write_rows
from doubles.resuming import check_resume
from doubles.vision_models import make_family, make_picture, save_family
from policygrad.core.trust_region import TrustRegion


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Idefics3, SmolVLM's architecture, in a folder."""
    return save_family("idefics3", tmp_path_factory.mktemp("idefics3"))


@pytest.fixture(scope="module")
def run(small: pg.Run, model: Path, tmp_path_factory: pytest.TempPathFactory) -> pg.Run:
    """With all that some algorithm asks for: demonstrations, scores of steps, places where steps end."""
    folder = tmp_path_factory.mktemp("pictures")
    for i in range(8):
        (folder / f"{i}.png").write_bytes(make_picture(32 + 8 * (i % 2), 24, i).data)
    task = [
        {"prompt": [{"role": "user", "content": "<image>how many?"}], "images": [f"{i}.png"], "demonstration": f"{i}!"}
        for i in range(8)
    ]
    digits = small.reward[0].replace(":starts_with_a_digit", ":digits")
    return replace(
        small,
        model=str(model),
        task=write_rows(folder / "rows.jsonl", task),
        reward=(*small.reward, digits),
        steps=3,
        prompts_per_step=3,
        samples_per_prompt=4,
        sampling=pg.SamplingParams(max_tokens=5),
    )


def adapt(run: pg.Run, name: str, model: Path) -> pg.Run:
    """The run with an algorithm, and what that needs."""
    algorithm = runnable(name)
    if isinstance(algorithm.update_rule, TrustRegion):
        algorithm = replace(algorithm, update_rule=replace(algorithm.update_rule, cg_iters=2))
    if name == "distill":  # its teacher has this model's tokenizer
        teacher = save_family("idefics3", model.with_name("teacher"), seed=1)
        algorithm = replace(algorithm, reference=replace(algorithm.reference, model=str(teacher)))
    run = replace(run, algorithm=algorithm, lr=run.lr if algorithm.update_rule.uses_lr else None)
    if name in ("vineppo", "trpo_vine", "gdpo"):  # which refuse scores of steps
        run = replace(run, reward=run.reward[:1], step_end="[a-z ]" if name == "vineppo" else None)
    return run


@pytest.fixture(scope="module")
def trained(run: pg.Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step."""
    output = tmp_path_factory.mktemp("trained") / "run"
    return pg.train(replace(run, steps=1, output=str(output)), display=False).output


STILL = ("vapo", "dapo", "fipo", "prorl", "high_entropy")
"""Those whose policy need not move in two steps: a critic is trained alone at first, or completions that the limit ended are left
out, and here it ends nearly all."""
READS_TEXT = ("sdpo", "sdft", "opsd")
"""Those whose reference reads other prompts, which a picture is no part of."""
RESUMED = ("grpo", "ppo", "trpo_vine")
FEW = ("a2c", "grpo", "vineppo")
"""A kind each of what reads pictures: a critic, a reference (with rollouts drawn ahead, resumed), a trust region, branches. The
others are `make test-full`."""


def test_a_reference_that_reads_other_prompts_refuses_pictures(run: pg.Run, model: Path, tmp_path: Path) -> None:
    template = ("{answer} {prompt}",)
    algorithm = replace(pg.OPSD, reference=pg.Reference(templates=template))
    task = [row | {"answer": "a"} for row in rows(Path(str(run.task)))]
    run = replace(
        run,
        algorithm=algorithm,
        task=write_rows(Path(str(run.task)).with_name("answers.jsonl"), task),
        output=str(tmp_path / "run"),
    )
    with pytest.raises(pg.ConfigError, match=r"has pictures, and Reference\.templates replaces text alone"):
        pg.train(run, display=False)


@pytest.mark.parametrize(
    "name",
    [
        name if name in FEW else pytest.param(name, marks=pytest.mark.full)
        for name in SINGLE_TURN
        if name not in READS_TEXT
    ],
)
def test_every_algorithm_learns_from_pictures(run: pg.Run, model: Path, tmp_path: Path, name: str) -> None:
    run = adapt(run, name, model)
    if name in RESUMED:
        folder = check_resume(replace(run, max_staleness=int(name in ("grpo", "ppo"))), tmp_path)
    else:
        folder = pg.train(replace(run, steps=2, output=str(tmp_path / "run")), display=False).output
    metrics = untimed(folder / "metrics.jsonl")
    assert metrics
    assert all(math.isfinite(value) for row in metrics for value in row.values())
    before, after = load_file(model / "model.safetensors"), weights(folder)
    if name not in STILL:
        assert any(not torch.equal(before[key], after[key]) for key in after)


@pytest.mark.parametrize("vision", ["trained", "projector", "frozen"])
def test_what_trains_beside_the_language_model(run: pg.Run, model: Path, tmp_path: Path, vision: str) -> None:
    learner = replace(run.learner, vision=vision)
    run = replace(
        run, learner=learner, algorithm=pg.REINFORCE, steps=1, samples_per_prompt=8, output=str(tmp_path / "run")
    )
    before, after = load_file(model / "model.safetensors"), weights(pg.train(run, display=False).output)
    changed = {key.split(".")[1] for key in after if not torch.equal(before[key], after[key])}
    expected = {"trained": {"vision_model", "connector"}, "projector": {"connector"}, "frozen": set()}
    assert changed - {"text_model", "weight"} == expected[vision]
    assert "text_model" in changed


def test_adapters_are_on_the_language_model(run: pg.Run, tmp_path: Path) -> None:
    learner = replace(run.learner, lora="rank=4")
    folder = pg.train(replace(run, learner=learner, steps=1, output=str(tmp_path / "run")), display=False).output
    config = json.loads((folder / "model" / "adapter_config.json").read_text())
    assert config["target_modules"]
    assert all("text_model.layers" in name for name in config["target_modules"])


def test_a_model_that_does_not_see_has_no_vision_to_freeze(small: pg.Run, tmp_path: Path) -> None:
    run = replace(small, learner=replace(small.learner, vision="frozen"), output=str(tmp_path / "run"))
    with pytest.raises(pg.ConfigError, match=r"learner.vision=frozen is for models that see, .* leave it out"):
        pg.train(run, display=False)


@pytest.mark.full
@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("context_parallel", [1, 2])
def test_two_processes_learn_what_one_learns(context_parallel: int, run: pg.Run, tmp_path: Path) -> None:
    """Two that divide texts read those with pictures whole, and count them once."""
    run = replace(run, algorithm=pg.GRPO, steps=1, learner=replace(run.learner, micro_tokens=64))
    one = pg.train(replace(run, output=str(tmp_path / "one")), display=False).output
    learner = replace(run.learner, world_size=2, context_parallel=context_parallel)
    two = pg.train(replace(run, learner=learner, output=str(tmp_path / "two")), display=False).output
    assert [row["completion"] for row in rows(one / "completions.jsonl")] == [
        row["completion"] for row in rows(two / "completions.jsonl")
    ]
    expected, results = weights(one), weights(two)
    assert all(torch.allclose(expected[name], results[name], atol=2e-4) for name in expected)


def test_a_trained_model_is_loaded_with_its_processor(trained: Path) -> None:
    from transformers import AutoModelForImageTextToText, AutoProcessor

    folder = trained / "model"
    processor = AutoProcessor.from_pretrained(folder)
    picture = make_picture(32, 24, 3).decode()
    inputs = processor(text="<image>how many?", images=[picture], return_tensors="pt")
    loaded = AutoModelForImageTextToText.from_pretrained(folder)
    with torch.no_grad():
        assert loaded(**inputs).logits.isfinite().all()
    again, _ = make_family("idefics3")
    assert type(loaded) is type(again)


def test_logs_name_pictures_by_their_digest(trained: Path) -> None:
    content = rows(trained / "completions.jsonl")[0]["prompt"][0]["content"]
    assert set(content[0]) == {"type", "sha256"}
    assert content[1] == {"type": "text", "text": "how many?"}


def test_demonstrations_with_pictures_are_learned(model: Path, tmp_path: Path) -> None:
    """The held-out loss before training is transformers' own, and training lowers it."""
    from transformers import AutoModelForImageTextToText

    from policygrad.models.loading import load_model
    from policygrad.models.tokenizer import load_tokenizer

    data = []
    for i in range(4):
        (tmp_path / f"{i}.png").write_bytes(make_picture(32, 24, i).data)
        more = [{"role": "user", "content": "<image>and now?"}, {"role": "assistant", "content": "b"}] if i == 0 else []
        first = [{"role": "user", "content": "<image>how many?"}, {"role": "assistant", "content": str(i)}]
        images = [f"{i}.png", f"{(i + 1) % 4}.png"] if more else [f"{i}.png"]
        data.append({"messages": [*first, *more], "images": images})
    other = [{**row, "messages": [{"role": "system", "content": "s"}, *row["messages"]]} for row in data]
    config = pg.SFTConfig(
        data=write_rows(tmp_path / "train.jsonl", other),
        eval_data=write_rows(tmp_path / "rows.jsonl", data),
        model=str(model),
        epochs=8,
        batch_size=4,
        lr=3e-3,
        output=str(tmp_path / "run"),
    )
    result = pg.train_sft(config, display=False)
    assert result.before is not None
    assert result.after is not None
    assert result.after["eval/loss"] < result.before["eval/loss"]
    plain, tokenizer = (
        AutoModelForImageTextToText.from_pretrained(model),
        load_tokenizer(str(model), load_model(str(model))),
    )
    total, count = 0.0, 0
    for row in data:
        pictures = [make_picture(32, 24, int(name[0])).decode() for name in row["images"]]
        text, end = "", tokenizer.hf.eos_token
        assert tokenizer.pictures is not None
        spans = []
        for message in row["messages"]:
            start = len(text)
            text += message["content"] + (end if message["role"] == "assistant" else "\n")
            spans += [(start, len(text))] if message["role"] == "assistant" else []
        inputs = tokenizer.pictures.hf(text=[text], images=[pictures], return_tensors="pt")
        with torch.no_grad():
            logp = plain(**inputs).logits[0, :-1].log_softmax(-1)
        ids = inputs["input_ids"][0]
        picked = logp.gather(-1, ids[1:, None])[:, 0]
        letters = [i for i, id_ in enumerate(ids.tolist()) if id_ == tokenizer.hf.eos_token_id]
        for i in letters:  # each answer is one letter and the end token
            total, count = total - float(picked[i - 2] + picked[i - 1]), count + 2
    assert result.before["eval/loss"] == pytest.approx(total / count, rel=1e-5)


def test_evaluation_reads_pictures(run: pg.Run, trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from policygrad.cli import main

    task, reward = str(run.task), run.reward[0]
    command = [
        "eval",
        str(trained),
        "--task",
        task,
        "--reward",
        reward,
        "--problems",
        "4",
        "--samples",
        "2",
        "--allow-code",
        "/",
    ]
    assert main(command) == 0
    assert "4 problems" in capsys.readouterr().out
