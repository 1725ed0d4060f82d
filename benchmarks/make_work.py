"""Makes the folder of a work that both sides read: work.json, prompts.jsonl and the model with its tokenizer.

    python benchmarks/make_work.py NAME FOLDER [--quick] [--data ../shared/data]

Prompts are GSM8K's questions where they are at hand (`--data`), else random words of about 100 tokens; the tokenizer is trained on
them, so that one machine always makes the same bytes of the same data.
"""

from __future__ import annotations

import argparse
import json
import random
import string
from pathlib import Path
from typing import Any

from bench.models import untrained
from bench.works import GSM8K, WORKS, Shape, Work, quick

END, PAD = "<|end|>", "<|pad|>"
WORDS = 8192
"""Tokens of the tokenizer; a larger vocabulary is the model's alone."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=[work.name for work in WORKS])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    args = parser.parse_args()
    work = next(work for work in WORKS if work.name == args.name)
    work = quick(work) if args.quick else work
    args.folder.mkdir(parents=True, exist_ok=True)
    made = embedded(args.folder, work) if work.shape is None else shaped(args.folder, work, work.shape, args.data)
    (args.folder / "work.json").write_text(json.dumps({**work.as_dict(), **made}, indent=1) + "\n", encoding="utf-8")


def embedded(folder: Path, work: Work) -> dict[str, str]:
    """The base model inside the package, in float32, and its own task's questions with their answers."""
    from policygrad.models.loading import load_model
    from policygrad.models.tokenizer import load_tokenizer
    from policygrad.tasks import load_task

    model, task = load_model("tiny"), load_task("embedded")
    model.save_pretrained(folder / "model")  # type: ignore[operator]
    load_tokenizer("tiny", model).hf.save_pretrained(folder / "model")
    examples = [task.train_example(i) for i in range(work.prompts * (work.steps + 1))]
    write(folder, [(str(e.prompt), str(e.columns["answer"])) for e in examples])
    return {"reward": "exact", "data": "the embedded task", "observation": ""}


def shaped(folder: Path, work: Work, shape: Shape, data: Path) -> dict[str, str]:
    """A model of random weights, and questions of a fitting vocabulary."""
    texts, answers, source = questions(data)
    tokenizer = trained([*texts, *answers], min(WORDS, shape.vocabulary))
    end, pad = tokenizer.convert_tokens_to_ids([END, PAD])
    untrained(shape, end=end, pad=pad).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    needed = work.prompts * (work.steps + 1)
    prompts = [texts[i % len(texts)] + "\n" for i in range(needed)]
    if work.prompt_tokens:
        prompts = [joined(texts, 50 * i, work.prompt_tokens, tokenizer) for i in range(needed)]
    write(folder, [(prompt, "") for prompt in prompts])
    observation = said(texts, work.observation_tokens, tokenizer) if work.observation_tokens else ""
    return {"reward": "spread", "data": source, "observation": observation}


def joined(texts: list[str], first: int, tokens: int, tokenizer: Any) -> str:
    """Questions one after another from `first` on, cut to so many tokens."""
    text = ""
    while len(ids := tokenizer(text)["input_ids"]) < tokens:
        text, first = text + texts[first % len(texts)] + "\n", first + 1
    return str(tokenizer.decode(ids[:tokens]))


def said(texts: list[str], tokens: int, tokenizer: Any) -> str:
    """A text that has exactly so many tokens, also when it is read again."""
    cut = (joined(texts, first, tokens, tokenizer) for first in range(len(texts)))
    return next(text for text in cut if len(tokenizer(text)["input_ids"]) == tokens)


def questions(data: Path) -> tuple[list[str], list[str], str]:
    """(questions, answers, where they are from)."""
    file = data / GSM8K
    if file.is_file():
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        return [row["question"] for row in rows], [row["answer"] for row in rows], "GSM8K, test split"
    draw = random.Random(0)
    words = ["".join(draw.choices(string.ascii_lowercase, k=draw.randint(2, 9))) for _ in range(4000)]
    print(f"{file} is not there: prompts of 100 random words")
    return [" ".join(draw.choices(words, k=100)) for _ in range(1319)], [], "random words"


def trained(texts: list[str], vocabulary: int) -> Any:
    """A byte-pair tokenizer of these texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[PAD, END], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(texts, trainer)
    wrapped: Any = PreTrainedTokenizerFast
    return wrapped(tokenizer_object=made, eos_token=END, pad_token=PAD)


def write(folder: Path, rows: list[tuple[str, str]]) -> None:
    """prompts.jsonl."""
    lines = (json.dumps({"prompt": prompt, "answer": answer}, ensure_ascii=False) for prompt, answer in rows)
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
