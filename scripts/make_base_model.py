"""Make the embedded base model: text, tokenizer and weights, from nothing.

The text imitates web pages of mixed quality. Each document is a question of
the embedded task mix, a newline, and somebody's reply: a worked-out answer, a
worked-out answer with a slip, a guess, a right answer without the tags, or
chatter. Before these pages come those of a textbook, nearly all worked out. A
model of both knows how to work a problem out, but on an ordinary page it does so
only some of the time, which is the room that reinforcement learning fills.

Run from the repository root: make base-model
"""

import argparse
import json
import random
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import reasoning_gym
import torch
from reasoning_gym.utils import extract_answer
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from policygrad.tasks.base import is_eval_prompt
from policygrad.tasks.reasoning_gym import EMBEDDED_MIX, MAX_NEW_TOKENS, Component, prompt_text

DEFAULT_OUTPUT = Path(__file__).resolve().parents[1] / "src" / "policygrad" / "models" / "tiny"
PAD, EOS = "<pad>", "<eos>"
MAX_VOCAB = 512
IGNORE_INDEX = -100

# Shares of the styles in the two texts, and how often a guess happens to be right.
TEXTBOOK = {"worked": 0.91, "slip": 0.01, "guess": 0.04, "untagged": 0.02, "chatter": 0.02}
WEB = {"worked": 0.34, "slip": 0.04, "guess": 0.38, "untagged": 0.13, "chatter": 0.11}
LUCKY_GUESS = 0.15

WORKED_OPENERS = ("Step by step: ", "Let me work it out: ")
GUESS_OPENERS = ("I guess ", "Probably ", "Without thinking, ")
UNTAGGED_OPENERS = ("The answer is ", "It is ")
CHATTER = (
    "I was never good at these.",
    "Good question, ask my sister.",
)

# A user turn is its text and a newline, a reply is its text and the end token.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'assistant' -%}{{ message['content'] + eos_token }}"
    "{%- else -%}{{ message['content'] + '\\n' }}{%- endif -%}"
    "{%- endfor -%}"
)


@dataclass(frozen=True)
class Problem:
    """A question with its right answer and the dataset row it came from."""

    task: str
    question: str
    answer: str
    metadata: dict[str, Any]


# --- Working a problem out, rightly or with a slip -------------------------


def scramble(word: str, rng: random.Random) -> str:
    """The word with two letters swapped, or one dropped when a swap changes nothing."""
    at = rng.randrange(len(word) - 1)
    swapped = word[:at] + word[at + 1] + word[at] + word[at + 2 :]
    return swapped if swapped != word else word[:at] + word[at + 1 :]


def work_chain_sum(problem: Problem, slip: bool, rng: random.Random) -> tuple[str, str]:
    """Tens and ones apart: ``90 + 30 = 120, 8 + 5 = 13``, so each sum is an easy one."""
    first, *rest = problem.metadata["expression"].split()
    terms = [(1, int(first))]
    terms += [(1 if sign == "+" else -1, int(n)) for sign, n in zip(rest[::2], rest[1::2], strict=True)]
    parts, total = [], 0
    wrong_part = rng.randrange(2) if slip else None
    for index, digits in enumerate((lambda n: n - n % 10, lambda n: n % 10)):
        pieces = [(sign, digits(n)) for sign, n in terms]
        value = sum(sign * n for sign, n in pieces)
        if index == wrong_part:
            value += rng.choice((-10, 10)) if index == 0 else rng.choice((-2, -1, 1, 2))
        tail = "".join(f" {'+' if sign > 0 else '-'} {n}" for sign, n in pieces[1:])
        parts.append(f"{pieces[0][1]}{tail} = {value}")
        total += value
    return ", ".join(parts), str(total)


def work_simple_equation(problem: Problem, slip: bool, rng: random.Random) -> tuple[str, str]:
    """Isolate the variable's term, then divide: ``8*e = 56, e = 7``."""
    variable, solution = problem.metadata["variable"], int(problem.answer)
    results = re.search(rf"(?:(\d+)\*)?{variable}\b", problem.metadata["equation"])
    factor = int(results.group(1) or 1)
    term = factor * solution
    if slip:
        solution = max(0, solution + rng.choice((-2, -1, 1, 2)))
    last = f"{variable} = {solution}"
    text = last if factor == 1 else f"{factor}*{variable} = {term}, {last}"
    return text, str(solution)


def work_spell_backward(problem: Problem, slip: bool, rng: random.Random) -> tuple[str, str]:
    """Say the letters one by one from the end: ``t-a-l-p-s``."""
    word = scramble(problem.answer, rng) if slip else problem.answer
    return "-".join(word), word


def guess_number(problem: Problem, rng: random.Random) -> str:
    """A number of about the right size that is not the answer."""
    value = int(problem.answer)
    reach = 6 if problem.task == "simple_equations" else 30
    return str(value + rng.choice([d for d in range(-reach, reach + 1) if d]))


def guess_word(problem: Problem, rng: random.Random) -> str:
    """The word's letters in an order that somebody in a hurry might give."""
    return scramble(scramble(problem.answer, rng) + problem.answer[-1], rng)[: len(problem.answer)]


WORK: dict[str, Callable[[Problem, bool, random.Random], tuple[str, str]]] = {
    "chain_sum": work_chain_sum,
    "simple_equations": work_simple_equation,
    "spell_backward": work_spell_backward,
}
GUESS: dict[str, Callable[[Problem, random.Random], str]] = {
    "chain_sum": guess_number,
    "simple_equations": guess_number,
    "spell_backward": guess_word,
}


# --- The text --------------------------------------------------------------


def reply(problem: Problem, style: str, rng: random.Random) -> str:
    """Somebody's reply to the problem, in one of the styles."""
    if style == "chatter":
        return rng.choice(CHATTER)
    if style == "untagged":
        return f"{rng.choice(UNTAGGED_OPENERS)}{problem.answer}."
    if style == "guess":
        lucky = rng.random() < LUCKY_GUESS
        text = problem.answer if lucky else GUESS[problem.task](problem, rng)
        return f"{rng.choice(GUESS_OPENERS)}<answer>{text}</answer>"
    working, result = WORK[problem.task](problem, style == "slip", rng)
    return f"{rng.choice(WORKED_OPENERS)}{working}. <answer>{result}</answer>"


def generate_problems(component: Component, size: int, seed: int, held_out: bool) -> list[Problem]:
    """Problems of one component, from one side of the split only."""
    dataset = reasoning_gym.create_dataset(component.name, size=size, seed=seed, **component.config)
    return [
        Problem(component.name, row["question"], row["answer"], row["metadata"])
        for row in dataset
        if is_eval_prompt(row["question"]) == held_out
    ]


def generate_documents(problems: list[list[Problem]], styles: dict[str, float], seed: int) -> Iterator[tuple[str, str]]:
    """Endless (prompt, reply) pairs: a component by weight, a problem, a style."""
    rng = random.Random(seed)
    weights = [component.weight for component in EMBEDDED_MIX]
    while True:
        problem = rng.choice(rng.choices(problems, weights)[0])
        style = rng.choices(list(styles), list(styles.values()))[0]
        yield prompt_text(problem.question), reply(problem, style, rng)


# --- Tokenizer -------------------------------------------------------------


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE whose merges may cross spaces, so fixed phrases become few tokens.

    Digits, newlines and the hyphens of spelled words stay alone, the answer tags
    are single tokens, and the full byte alphabet makes any text encodable. Rare
    merges are not made, so that letters keep the same tokens wherever they stand.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d|\n|(?<=\p{L})-|</?answer>"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tags = [AddedToken(tag, normalized=False, special=False) for tag in ("<answer>", "</answer>")]
    trainer = trainers.BpeTrainer(
        vocab_size=MAX_VOCAB - len(tags),
        min_frequency=len(texts) // 25,
        special_tokens=[PAD, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens(tags)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )


# --- Training --------------------------------------------------------------


def make_model(tokenizer: PreTrainedTokenizerFast, args: argparse.Namespace) -> LlamaForCausalLM:
    """A small Llama with tied embeddings and randomly initialised weights."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=args.hidden_size,
        intermediate_size=3 * args.hidden_size,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.heads,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        initializer_range=0.02,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def make_batches(
    documents: Iterator[tuple[str, str]],
    tokenizer: PreTrainedTokenizerFast,
    batch_size: int,
    rng: random.Random,
) -> Iterator[dict[str, torch.Tensor]]:
    """Endless batches (input_ids, labels) of documents of similar length, one per row.

    Only replies carry a loss: the numbers and words of a question are drawn at
    random, so nothing but noise can be learnt from predicting them.
    """
    while True:
        prompts, replies = zip(*(next(documents) for _ in range(32 * batch_size)), strict=True)
        prompt_ids = tokenizer(list(prompts))["input_ids"]
        reply_ids = tokenizer([text + EOS for text in replies])["input_ids"]
        rows = sorted(zip(prompt_ids, reply_ids, strict=True), key=lambda row: len(row[0]) + len(row[1]))
        groups = [rows[at : at + batch_size] for at in range(0, len(rows), batch_size)]
        rng.shuffle(groups)
        for group in groups:
            width = max(len(prompt) + len(answer) for prompt, answer in group)
            input_ids = torch.full((len(group), width), tokenizer.pad_token_id)
            labels = torch.full((len(group), width), IGNORE_INDEX)
            for index, (prompt, answer) in enumerate(group):
                end = len(prompt) + len(answer)
                input_ids[index, :end] = torch.tensor(prompt + answer)
                labels[index, len(prompt) : end] = torch.tensor(answer)
            yield {"input_ids": input_ids, "labels": labels}


def make_optimizers(model: LlamaForCausalLM, args: argparse.Namespace) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for the rest.

    In two minutes of the textbook, AdamW alone hardly learnt to add; Muon did.
    """
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim == 2 and "embed_tokens" not in name
        (matrices if is_matrix else others).append(parameter)
    return [
        torch.optim.Muon(matrices, lr=args.muon_learning_rate, weight_decay=0.0),
        torch.optim.AdamW(others, lr=args.learning_rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def train_model(
    model: PreTrainedModel,
    batches: Iterator[dict[str, torch.Tensor]],
    optimizers: list[torch.optim.Optimizer],
    args: argparse.Namespace,
) -> float:
    """Train with a learning rate that falls linearly; return the mean of the last losses."""
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 50) * (1.0 - step / args.steps))
        for optimizer in optimizers
    ]
    losses: list[float] = []
    started = time.monotonic()
    for step, batch in enumerate(islice(batches, args.steps), start=1):
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        losses = [*losses[-99:], loss.item()]
        if step % 100 == 0:
            mean, seconds = sum(losses) / len(losses), time.monotonic() - started
            print(f"step {step}/{args.steps} loss {mean:.4f} {seconds:.0f} s", flush=True)
    return sum(losses) / len(losses)


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, output: Path) -> None:
    """Write weights as bfloat16 safetensors, and the tokenizer, into a fresh folder."""
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        max_new_tokens=MAX_NEW_TOKENS,
        do_sample=True,
        temperature=1.0,
        top_k=0,
    )
    model.to(torch.bfloat16).save_pretrained(output)
    tokenizer.save_pretrained(output)
    settings = output / "tokenizer_config.json"
    fields = json.loads(settings.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}  # older releases too
    settings.write_text(json.dumps(fields, indent=2) + "\n")


# --- Measurement -----------------------------------------------------------


def sample_replies(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, prompts: list[str]) -> list[str]:
    """One reply per prompt at temperature 1, from the model's whole distribution."""
    replies: list[str] = []
    for at in range(0, len(prompts), 512):
        batch = tokenizer(prompts[at : at + 512], return_tensors="pt", padding=True, padding_side="left")
        output = model.generate(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        completions = output[:, batch["input_ids"].shape[1] :]
        replies += tokenizer.batch_decode(completions, skip_special_tokens=True)
    return replies


def measure(output: Path, problems_count: int, samples: int, seed: int) -> dict[str, float]:
    """Held-out accuracy of the saved files, in total and per task."""
    model = AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(output)
    torch.manual_seed(seed)
    result: dict[str, float] = {}
    hits_total, count_total = 0, 0
    for index, component in enumerate(EMBEDDED_MIX):
        share = round(problems_count * (index + 1) / len(EMBEDDED_MIX)) - round(
            problems_count * index / len(EMBEDDED_MIX)
        )
        problems = generate_problems(component, 40 * share, 90_000_000 + seed, held_out=True)
        scorer = reasoning_gym.create_dataset(component.name, size=1, seed=0, **component.config)
        chosen = [problem for problem in problems[:share] for _ in range(samples)]
        replies = sample_replies(model, tokenizer, [prompt_text(p.question) for p in chosen])
        hits = 0
        for problem, text in zip(chosen, replies, strict=True):
            entry = {"answer": problem.answer, "metadata": problem.metadata}
            hits += scorer.score_answer(extract_answer(text), entry) >= 1.0
        result[component.name] = hits / len(chosen)
        hits_total, count_total = hits_total + hits, count_total + len(chosen)
    result["total"] = hits_total / count_total
    return result


def parse_args() -> argparse.Namespace:
    """Command line; the defaults are those of the model in the repository."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT)
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--textbook-share", type=float, default=0.88, help="of the steps")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--muon-learning-rate", type=float, default=0.02)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--questions", type=int, default=60_000, help="questions per task")
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def main() -> None:
    """Generate the text, train tokenizer and model, save both, measure the saved files."""
    args = parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    started = time.monotonic()
    problems = [
        generate_problems(component, args.questions, 1_000_000 * (args.seed + 1), held_out=False)
        for component in EMBEDDED_MIX
    ]
    textbook = generate_documents(problems, TEXTBOOK, args.seed)
    web = generate_documents(problems, WEB, args.seed + 1)
    tokenizer = train_tokenizer(["".join(next(web)) for _ in range(20_000)])
    model = make_model(tokenizer, args)
    rng = random.Random(args.seed)
    textbook_steps = round(args.steps * args.textbook_share)
    batches = chain(
        islice(make_batches(textbook, tokenizer, args.batch_size, rng), textbook_steps),
        make_batches(web, tokenizer, args.batch_size, rng),
    )
    loss = train_model(model, batches, make_optimizers(model, args), args)
    save(model, tokenizer, args.output)
    report = {
        "parameters": model.num_parameters(),
        "vocabulary": len(tokenizer),
        "loss": round(loss, 4),
        "seconds": round(time.monotonic() - started),
        "held_out_accuracy": measure(args.output, 256, 8, args.seed),
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
