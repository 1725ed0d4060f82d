"""Make the shipped vision-language model: text, tokenizer, processor and weights, from nothing.

It is made as the embedded text model is (scripts/make_base_model.py). A document is a picture of the task `shapes`, a
question about it and somebody's reply: one that names everything in the picture before it answers, one with a slip, a
guess, a right answer without the tags, or chatter. In the textbook nearly all replies look at the picture; on the web only
some do. A model of both can read the pictures, but usually guesses, which is the room that reinforcement learning fills.

Run from the repository root: make shapes-model
"""

import argparse
import json
import random
import shutil
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    GenerationConfig,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3Processor,
    LlamaConfig,
    PreTrainedTokenizerFast,
)
from transformers.models.idefics3.configuration_idefics3 import Idefics3VisionConfig
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from make_base_model import IGNORE_INDEX, PAD, train_model
from policygrad.rewards.builtin import extract_final_answer
from policygrad.tasks.base import Example
from policygrad.tasks.reasoning_gym import MAX_NEW_TOKENS
from policygrad.tasks.shapes import COLOURS, FORMS, KINDS, SIDE, ShapesTask, find_subject, list_names

DEFAULT_OUTPUT = Path(__file__).resolve().parents[1] / "src" / "policygrad" / "models" / "shapes"
MAX_VOCAB = 512

# Idefics3's names. Its end of a turn is the end token.
EOS, IMAGE, IMAGE_EDGE, GLOBAL_IMAGE = "<end_of_utterance>", "<image>", "<fake_token_around_image>", "<global-img>"
PATCH, SCALE_FACTOR = 4, 2
IMAGE_TOKENS = (SIDE // PATCH // SCALE_FACTOR) ** 2
IMAGE_TEXT = IMAGE_EDGE + GLOBAL_IMAGE + IMAGE * IMAGE_TOKENS + IMAGE_EDGE  # what the processor makes of one <image>

# Shares of the styles in the tokenizer's text and in the two texts of the model, and how often a guess happens to be right.
SAMPLE = {"worked": 0.19, "slip": 0.02, "guess": 0.52, "untagged": 0.14, "chatter": 0.13}
TEXTBOOK = {"worked": 0.91, "slip": 0.01, "guess": 0.04, "untagged": 0.02, "chatter": 0.02}
WEB = {"worked": 0.12, "slip": 0.02, "guess": 0.58, "untagged": 0.15, "chatter": 0.13}
LUCKY_GUESS = 0.10
SHARES = {"count_form": 0.22, "count_colour": 0.22, "largest": 0.22, "digits": 0.34}  # digits are learnt last

LOOK = "I see "  # a worked-out reply's first token
GUESS_OPENERS = ("I guess ", "Probably ", "Without looking, ")
UNTAGGED_OPENERS = ("The answer is ", "It is ")
CHATTER = (
    "I cannot see much without my glasses.",
    "Nice picture, who drew it?",
)

# A user turn is its pictures and text in order and a newline, a reply is its text and the end token.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['content'] is string -%}{{ message['content'] }}"
    "{%- else -%}{%- for part in message['content'] -%}"
    "{%- if part['type'] == 'image' -%}{{ '<image>' }}{%- elif part['type'] == 'text' -%}{{ part['text'] }}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}"
    "{{ '<end_of_utterance>' if message['role'] == 'assistant' else '\\n' }}"
    "{%- endfor -%}"
)


@dataclass(frozen=True)
class Problem:
    """A picture's pixels, (SIDE, SIDE, 3), with the question and what is needed for replies."""

    kind: str
    question: str
    answer: str
    worked: str
    pixels: NDArray[np.uint8]


def read_problem(example: Example) -> Problem:
    """Return an example of the task as a problem."""
    (message,) = example.prompt
    picture, question = message["content"]
    columns = example.columns
    return Problem(
        columns["kind"],
        question["text"],
        columns["answer"],
        columns["demonstration"],
        np.asarray(picture["image"].decode()),
    )


# --- The text --------------------------------------------------------------


def guess_answer(kind: str, answer: str, rng: random.Random) -> str:
    """Return an answer of the right form that is wrong."""
    while True:
        if kind == "digits":
            guess = "".join(rng.choices("0123456789", k=len(answer)))
        elif kind == "largest":
            guess = f"{rng.choice(list(COLOURS))} {rng.choice(FORMS)}"
        else:
            guess = str(rng.randrange(5))
        if guess != answer:
            return guess


def misread(problem: Problem, rng: random.Random) -> str:
    """Return the worked-out reply of somebody who takes one thing in the picture for another."""
    names = problem.worked.removeprefix(LOOK).partition(". ")[0].split(", ")
    if problem.kind != "digits":
        names = [" ".join(name.split()[:2]) for name in names]  # without the count
    index = rng.randrange(len(names))
    right = names[index]
    options = "0123456789" if problem.kind == "digits" else [f"{colour} {form}" for colour in COLOURS for form in FORMS]
    names[index] = rng.choice([option for option in options if option != right])
    if problem.kind == "digits":
        answer = "".join(names)
    elif problem.kind == "largest":
        answer = names[index] if right == problem.answer else problem.answer
    else:
        answer = str(sum(find_subject(problem.question) in name.split() for name in names))
    return f"{LOOK}{list_names(names, problem.question)}. <answer>{answer}</answer>"


def reply(problem: Problem, style: str, rng: random.Random) -> str:
    """Somebody's reply to the problem, in one of the styles."""
    if style == "chatter":
        return rng.choice(CHATTER)
    if style == "untagged":
        return f"{rng.choice(UNTAGGED_OPENERS)}{problem.answer}."
    if style == "guess":
        lucky = rng.random() < LUCKY_GUESS
        text = problem.answer if lucky else guess_answer(problem.kind, problem.answer, rng)
        return f"{rng.choice(GUESS_OPENERS)}<answer>{text}</answer>"
    if style == "slip":
        return misread(problem, rng)
    return problem.worked


def generate_documents(problems: list[Problem], styles: dict[str, float], seed: int) -> Iterator[tuple[Problem, str]]:
    """Endless (problem, reply) pairs: a kind by its share, a problem, a style."""
    rng = random.Random(seed)
    by_kind = [[problem for problem in problems if problem.kind == kind] for kind in SHARES]
    while True:
        problem = rng.choice(rng.choices(by_kind, list(SHARES.values()))[0])
        yield problem, reply(problem, rng.choices(list(styles), list(styles.values()))[0], rng)


# --- Tokenizer and processor -----------------------------------------------


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE whose merges may cross spaces, so fixed phrases become few tokens.

    Digits, newlines and the separators of a list stay alone, so that a named shape is the same token wherever it stands.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d|\n|, |\. |I see |</?answer>"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tags = [AddedToken(tag, normalized=False, special=False) for tag in ("<answer>", "</answer>")]
    trainer = trainers.BpeTrainer(
        vocab_size=MAX_VOCAB - len(tags),
        min_frequency=len(texts) // 100,
        special_tokens=[PAD, EOS, IMAGE, IMAGE_EDGE, GLOBAL_IMAGE],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens(tags)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        additional_special_tokens=[IMAGE_EDGE, IMAGE, GLOBAL_IMAGE],
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )


def make_processor(tokenizer: PreTrainedTokenizerFast) -> Idefics3Processor:
    """Return the processor that leaves pictures of the task as they are, and resizes others to them."""
    side = {"longest_edge": SIDE}
    image_processor = Idefics3ImageProcessorPil(do_image_splitting=False, size=side, max_image_size=side)
    return Idefics3Processor(image_processor, tokenizer, image_seq_len=IMAGE_TOKENS, chat_template=CHAT_TEMPLATE)


def normalise_pixels(problems: list[Problem]) -> torch.Tensor:
    """Return what the image processor returns, (problems, 1, 3, SIDE, SIDE), much faster: a test compares the two."""
    pixels = torch.from_numpy(np.stack([problem.pixels for problem in problems]))
    return (pixels.permute(0, 3, 1, 2).float() / 255 - 0.5)[:, None] / 0.5


# --- Training --------------------------------------------------------------


def make_model(tokenizer: PreTrainedTokenizerFast, args: argparse.Namespace) -> Idefics3ForConditionalGeneration:
    """A small Idefics3 with tied embeddings and randomly initialised weights."""
    text = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=args.hidden_size,
        intermediate_size=3 * args.hidden_size,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.heads,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    vision = Idefics3VisionConfig(
        hidden_size=args.vision_size,
        intermediate_size=3 * args.vision_size,
        num_hidden_layers=args.vision_layers,
        num_attention_heads=args.vision_heads,
        image_size=SIDE,
        patch_size=PATCH,
    )
    config = Idefics3Config(
        text_config=text,
        vision_config=vision,
        scale_factor=SCALE_FACTOR,
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Idefics3ForConditionalGeneration(config)


def prompt_text(problem: Problem) -> str:
    """Return what the chat template and the processor make of the task's prompt; a test compares them."""
    return f"{IMAGE_TEXT}{problem.question}\n"


def make_batches(
    documents: Iterator[tuple[Problem, str]], tokenizer: PreTrainedTokenizerFast, batch_size: int, rng: random.Random
) -> Iterator[dict[str, torch.Tensor]]:
    """Endless batches of documents of similar length, one per row. Only replies carry a loss."""
    while True:
        problems, replies = zip(*(next(documents) for _ in range(16 * batch_size)), strict=True)
        prompt_ids = tokenizer([prompt_text(problem) for problem in problems])["input_ids"]
        reply_ids = tokenizer([text + EOS for text in replies])["input_ids"]
        rows = sorted(zip(prompt_ids, reply_ids, problems, strict=True), key=lambda row: len(row[0]) + len(row[1]))
        groups = [rows[at : at + batch_size] for at in range(0, len(rows), batch_size)]
        rng.shuffle(groups)
        for group in groups:
            width = max(len(prompt) + len(answer) for prompt, answer, _ in group)
            input_ids = torch.full((len(group), width), tokenizer.pad_token_id)
            labels = torch.full((len(group), width), IGNORE_INDEX)
            for index, (prompt, answer, _) in enumerate(group):
                end = len(prompt) + len(answer)
                input_ids[index, :end] = torch.tensor(prompt + answer)
                labels[index, len(prompt) : end] = torch.tensor(answer)
            pixel_values = normalise_pixels([problem for _, _, problem in group])
            yield {"input_ids": input_ids, "labels": labels, "pixel_values": pixel_values}


class Muon(torch.optim.Optimizer):
    """Muon in float32: momentum whose singular values are all brought near 1, scaled as `torch.optim.Muon` scales it.

    That one computes in bfloat16, which takes longer than everything else on a processor without bfloat16 arithmetic. Here
    matrices of one shape are also computed together.
    """

    def __init__(self, matrices: list[torch.Tensor], lr: float, momentum: float = 0.95) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:
        (group,) = self.param_groups
        by_shape = defaultdict(list)
        for matrix in group["params"]:
            by_shape[matrix.shape].append(matrix)
        for (rows, columns), matrices in by_shape.items():
            updates = []
            for matrix in matrices:
                buffer = self.state[matrix].setdefault("momentum", torch.zeros_like(matrix))
                buffer.lerp_(matrix.grad, 1 - group["momentum"])
                updates.append(matrix.grad.lerp(buffer, group["momentum"]))
            scale = group["lr"] * max(1, rows / columns) ** 0.5
            for matrix, update in zip(matrices, orthogonalise(torch.stack(updates)), strict=True):
                matrix.sub_(update, alpha=scale)


def orthogonalise(matrices: torch.Tensor) -> torch.Tensor:
    """Bring the singular values of each matrix near 1, by five Newton-Schulz iterations with Muon's coefficients."""
    if matrices.shape[-2] > matrices.shape[-1]:
        return orthogonalise(matrices.mT).mT
    x = matrices / matrices.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


def make_optimizers(model: Idefics3ForConditionalGeneration, args: argparse.Namespace) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for the rest, as for the text model."""
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim == 2 and "embed" not in name
        (matrices if is_matrix else others).append(parameter)
    return [
        Muon(matrices, lr=args.muon_learning_rate),
        torch.optim.AdamW(others, lr=args.learning_rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def save(model: Idefics3ForConditionalGeneration, processor: Idefics3Processor, output: Path) -> None:
    """Write weights as bfloat16 safetensors, and the processor with its tokenizer, into a fresh folder."""
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    model.generation_config = GenerationConfig(
        eos_token_id=processor.tokenizer.eos_token_id,
        pad_token_id=processor.tokenizer.pad_token_id,
        max_new_tokens=MAX_NEW_TOKENS,
        do_sample=True,
        temperature=1.0,
        top_k=0,
    )
    model.to(torch.bfloat16).save_pretrained(output)
    processor.save_pretrained(output)
    settings = output / "tokenizer_config.json"
    fields = json.loads(settings.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}  # older releases too
    settings.write_text(json.dumps(fields, indent=2) + "\n")
    for file in output.iterdir():
        file.chmod(0o644)  # safetensors writes it for its owner alone


# --- Measurement -----------------------------------------------------------


def sample_replies(
    model: Idefics3ForConditionalGeneration, processor: Idefics3Processor, problems: list[Problem], opener: str = ""
) -> list[str]:
    """One reply per problem, at temperature 1 from the whole distribution, or the most probable one after an opener."""
    replies: list[str] = []
    for at in range(0, len(problems), 512):
        batch = problems[at : at + 512]
        inputs = processor.tokenizer([prompt_text(p) + opener for p in batch], return_tensors="pt", padding=True)
        output = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            pixel_values=normalise_pixels(batch),
            do_sample=not opener,
        )
        completions = output[:, inputs["input_ids"].shape[1] :]
        replies += processor.tokenizer.batch_decode(completions, skip_special_tokens=True)
    return [opener + text for text in replies]


def measure_replies(
    model: Idefics3ForConditionalGeneration,
    processor: Idefics3Processor,
    problems: list[Problem],
    samples: int = 1,
    opener: str = "",
) -> dict[str, float]:
    """Return the accuracy in total and per kind of question, and the replies' lengths in tokens."""
    chosen = problems * samples
    replies = sample_replies(model, processor, chosen, opener)
    hits = [extract_final_answer(text) == problem.answer for problem, text in zip(chosen, replies, strict=True)]
    groups = {kind: [hit for p, hit in zip(chosen, hits, strict=True) if p.kind == kind] for kind in KINDS}
    lengths = [len(ids) + 1 for ids in processor.tokenizer(replies)["input_ids"]]  # the end token is one more
    return {
        **{name: round(float(np.mean(group)), 3) for name, group in (groups | {"total": hits}).items()},
        "mean_tokens": round(float(np.mean(lengths)), 1),
        "max_tokens": max(lengths),
    }


def measure(output: Path, count: int, samples: int, seed: int) -> dict[str, dict[str, float]]:
    """Return the held-out accuracy of the saved files: sampled, and of the most probable reply that begins with a look."""
    model = AutoModelForImageTextToText.from_pretrained(output, dtype=torch.float32).eval()
    processor = AutoProcessor.from_pretrained(output)
    torch.manual_seed(seed)
    problems = [read_problem(example) for example in ShapesTask().eval_examples(count)]
    return {
        "sampled": measure_replies(model, processor, problems, samples),
        "looking": measure_replies(model, processor, problems, opener=LOOK),
    }


def parse_args() -> argparse.Namespace:
    """Command line; the defaults are those of the model in the repository."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT)
    parser.add_argument("--steps", type=int, default=1800)
    parser.add_argument("--textbook-share", type=float, default=0.9, help="of the steps")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--muon-learning-rate", type=float, default=0.02)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--vision-layers", type=int, default=2)
    parser.add_argument("--vision-size", type=int, default=96)
    parser.add_argument("--vision-heads", type=int, default=3)
    parser.add_argument("--pictures", type=int, default=60_000)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def main() -> None:
    """Generate pictures and text, train tokenizer and model, save both, measure the saved files."""
    args = parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    started = time.monotonic()
    task = ShapesTask(1_000_000 + args.seed)
    problems = [read_problem(task.train_example(index)) for index in range(args.pictures)]
    textbook = generate_documents(problems, TEXTBOOK, args.seed)
    web = generate_documents(problems, WEB, args.seed + 2)
    sample = generate_documents(problems, SAMPLE, args.seed + 1)
    texts = [f"{problem.question}\n{text}" for problem, text in islice(sample, 20_000)]
    processor = make_processor(train_tokenizer(texts))
    model = make_model(processor.tokenizer, args)
    print(f"{model.num_parameters():,} parameters, {len(processor.tokenizer)} tokens", flush=True)
    rng = random.Random(args.seed)
    batches = chain(
        islice(
            make_batches(textbook, processor.tokenizer, args.batch_size, rng), round(args.steps * args.textbook_share)
        ),
        make_batches(web, processor.tokenizer, args.batch_size, rng),
    )
    loss = train_model(model, batches, make_optimizers(model, args), args)
    save(model, processor, args.output)
    report = {
        "parameters": model.num_parameters(),
        "vocabulary": len(processor.tokenizer),
        "loss": round(loss, 4),
        "seconds": round(time.monotonic() - started),
        "held_out_accuracy": measure(args.output, 512, 8, args.seed),
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
