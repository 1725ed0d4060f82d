"""The shipped vision-language model: its files, the classes that load them, and what it can do before and after a look."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor, Idefics3ForConditionalGeneration

from make_shapes_model import DEFAULT_OUTPUT, IMAGE_TOKENS, measure_replies, normalise_pixels, prompt_text, read_problem
from policygrad.tasks import load_task
from policygrad.tasks.shapes import KINDS

pytestmark = pytest.mark.usefixtures("offline")


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail at every connection."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr("socket.socket.connect", refuse)


@pytest.fixture(scope="module")
def model() -> Idefics3ForConditionalGeneration:
    return AutoModelForImageTextToText.from_pretrained(DEFAULT_OUTPUT, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def processor() -> Any:
    return AutoProcessor.from_pretrained(DEFAULT_OUTPUT)


def test_the_files_are_small_and_complete(model: Idefics3ForConditionalGeneration) -> None:
    files = {path.name: path.stat().st_size for path in DEFAULT_OUTPUT.iterdir()}
    assert sum(files.values()) <= 3_000_000
    assert files.keys() == {
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "processor_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert type(model) is Idefics3ForConditionalGeneration
    assert model.num_parameters() < 1_400_000
    assert json.loads((DEFAULT_OUTPUT / "config.json").read_text())["dtype"] == "bfloat16"


def test_the_processor_makes_the_prompt_that_the_model_was_trained_on(processor: Any) -> None:
    examples = load_task("shapes").eval_examples(8)
    messages = [list(example.prompt) for example in examples]
    problems = [read_problem(example) for example in examples]
    texts = [processor.apply_chat_template(each, add_generation_prompt=True) for each in messages]
    assert texts[0] == f"<image>{problems[0].question}\n"
    images = [[each[0]["content"][0]["image"].decode()] for each in messages]
    inputs = processor(text=texts, images=images, return_tensors="pt", padding=True)
    prompts = [prompt_text(problem) for problem in problems]
    assert processor.batch_decode(inputs["input_ids"]) == [
        processor.tokenizer.pad_token * int((mask == 0).sum()) + prompt
        for mask, prompt in zip(inputs["attention_mask"], prompts, strict=True)
    ]
    assert ((inputs["input_ids"] == processor.image_token_id).sum(1) == IMAGE_TOKENS).all()
    assert torch.equal(inputs["pixel_values"], normalise_pixels(problems))
    content = [{"type": "image", "image": images[0][0]}, {"type": "text", "text": problems[0].question}]
    once = processor.apply_chat_template(
        [{"role": "user", "content": content}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
    assert once["input_ids"].tolist() == processor.tokenizer([prompts[0]])["input_ids"]
    assert torch.equal(once["pixel_values"], inputs["pixel_values"][:1])


def test_the_chat_template_renders_text_and_replies(processor: Any) -> None:
    messages = [
        {"role": "user", "content": "How many circles are there?"},
        {"role": "assistant", "content": [{"type": "text", "text": "It is 2."}]},
        {"role": "user", "content": [{"type": "text", "text": "And here? "}, {"type": "image"}]},
    ]
    expected = "How many circles are there?\nIt is 2.<end_of_utterance>And here? <image>\n"
    assert processor.apply_chat_template(messages, add_generation_prompt=True) == expected


def test_larger_pictures_are_resized(processor: Any) -> None:
    (message,) = load_task("shapes").train_example(0).prompt
    picture = message["content"][0]["image"].decode().resize((300, 200))
    inputs = processor(text=["<image>\n"], images=[[picture]], return_tensors="pt")
    assert inputs["pixel_values"].shape == (1, 1, 3, 32, 32)
    assert int((inputs["input_ids"] == processor.image_token_id).sum()) == IMAGE_TOKENS


@pytest.mark.full
def test_it_usually_guesses_but_is_right_when_it_looks(model: Any, processor: Any) -> None:
    problems = [read_problem(example) for example in load_task("shapes").eval_examples(96)]
    torch.manual_seed(0)
    sampled = measure_replies(model, processor, problems, samples=4)
    assert 0.15 <= sampled["total"] <= 0.36
    assert sampled["max_tokens"] <= 32
    looking = measure_replies(model, processor, problems, opener="I see ")
    assert looking["total"] >= 0.9
    assert all(looking[kind] >= 0.8 for kind in KINDS)
