"""Does distillation from a teacher with another tokenizer learn, and with which `cut`? docs/results/aligned-teachers.json.gz.

python scripts/measure_aligned_teachers.py [-- further options of `policygrad compare`, --jobs 2 say]

1. Teachers of the embedded model's shape, from random weights, by supervised learning from the same worked answers, with three
   tokenizers: the policy's; one whose tokens end where words do; and one whose tokens cross words. Their accuracies are measured.
2. `policygrad compare`: the embedded model learns from each by `distill`, with each `cut`, at the learning rate that is the best of
   `distill` in docs/measured.md.

Teachers and runs lie in comparisons/, and what is finished is not made again.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from measure_algorithms import ROOT, WORK, format_report
from policygrad.commands import STOPPED
from policygrad.commands.compare import compare
from results import RESULTS, write_packed_result

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENS, SEEDS = 60_000, 4
SHAPE = ("--prompts-per-step", "16", "--samples-per-prompt", "8", "--lr", "1e-3")
EXAMPLES, TOKENIZER_EXAMPLES, TASK_SEED, VOCABULARY = 20_000, 3_000, 7, 400
LEARN = ("--epochs", "6", "--lr", "2e-3")
MAX_TOKENS = 96
"""Of a teacher's answer: its tokens may be shorter than the policy's, whose answers have 32."""
OWN, WORDS, ACROSS = "own", "words", "across"
TEACHERS = (OWN, WORDS, ACROSS)
ROWS = {  # row -> teacher, cut
    "own": (OWN, ""),
    "words_tokens": (WORDS, "tokens"),
    "words_words": (WORDS, "words"),
    "across_tokens": (ACROSS, "tokens"),
    "across_words": (ACROSS, "words"),
}
Compare = Callable[[list[str]], int]


@dataclass(frozen=True)
class Teacher:
    """A teacher, and how often it is right."""

    model: str
    """Its folder, relative to where the script is run."""
    accuracy: float
    vocabulary: int
    example: tuple[str, ...]
    """The tokens of an answer."""


def specs(folders: dict[str, str]) -> list[str]:
    """Return the rows, as `policygrad compare` takes them. folders: teacher -> its model."""
    rows = []
    for name, (teacher, cut) in ROWS.items():
        words = ["--teacher", folders[teacher]]
        if cut:
            words += ["--algorithm.reference.tokenizer", folders[teacher], "--algorithm.reference.cut", cut]
        rows.append(f"{name}=distill {shlex.join(words)}")
    return rows


def make_teacher(name: str, folder: Path) -> Teacher:
    """Train a teacher, unless its folder has one, and measure it."""
    about = folder / "teacher.json"
    if not about.exists():
        folder.mkdir(parents=True, exist_ok=True)
        demonstrations = write_demonstrations(folder / "demonstrations.jsonl")
        tokenizer = make_start(name, folder / "start", demonstrations)
        run = folder / "sft"
        if not (run / "result.json").exists():
            data = ["--data", str(folder / "demonstrations.jsonl"), "--model", str(folder / "start")]
            call("sft", *data, *LEARN, "--seed", "0", "--plain", "--overwrite", "--output", str(run))
        measured = call(
            *("eval", str(run / "model"), "--task", "embedded", "--samples", "2", "--json"),
            *("--max-tokens", str(MAX_TOKENS)),
        )
        example = tokenizer.convert_ids_to_tokens(tokenizer(demonstrations[0][1])["input_ids"])
        known = {"accuracy": json.loads(measured)["mean"], "vocabulary": len(tokenizer), "example": example}
        about.write_text(json.dumps({"model": str(run / "model"), **known}, ensure_ascii=False), encoding="utf-8")
    found = json.loads(about.read_text(encoding="utf-8"))
    return Teacher(**found | {"example": tuple(found["example"])})


def write_demonstrations(path: Path) -> list[tuple[str, str]]:
    """Write prompts of the embedded task with worked answers, and return them."""
    from policygrad.tasks import load_task

    task = load_task("embedded", seed=TASK_SEED)
    examples = [task.train_example(i) for i in range(EXAMPLES)]
    pairs = [(example.prompt, example.columns["demonstration"]) for example in examples]
    with path.open("w", encoding="utf-8") as file:
        for prompt, completion in pairs:
            file.write(json.dumps({"prompt": prompt, "completion": completion}) + "\n")
    return pairs


def make_start(name: str, folder: Path, demonstrations: Sequence[tuple[str, str]]) -> PreTrainedTokenizerBase:
    """Save the embedded model's shape with random weights, and a tokenizer; return that."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from policygrad.models.loading import resolve_model

    source = resolve_model("tiny")
    config = AutoConfig.from_pretrained(source)
    if name == OWN:
        tokenizer = AutoTokenizer.from_pretrained(source)
    else:
        tokenizer = train_tokenizer(name, [text for pair in demonstrations[:TOKENIZER_EXAMPLES] for text in pair])
        config.vocab_size, config.bos_token_id = len(tokenizer), None
        config.eos_token_id = config.pad_token_id = tokenizer.eos_token_id
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer


def train_tokenizer(name: str, texts: Sequence[str]) -> PreTrainedTokenizerBase:
    """Train byte-level BPE: of words, with each digit alone, as Qwen's; or of short tokens that may begin and end within words."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=name == WORDS)
    digits = pre_tokenizers.Split(Regex(r"\d"), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, whole]) if name == WORDS else whole
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        **({} if name == WORDS else {"max_token_length": 6}),
    )
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")


def call(*words: str) -> str:
    """Run `policygrad` in a process of its own, with one thread, and return what it prints."""
    command = [sys.executable, "-m", "policygrad", *words]
    done = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    return done.stdout


def main(
    args: Sequence[str],
    compare: Compare = compare,
    results: Path = RESULTS,
    work: Path = WORK,
    make_teacher: Callable[[str, Path], Teacher] = make_teacher,
) -> int:
    """Everything that is missing; compare's exit code. compare, make_teacher: what does it; tests hand in others."""
    at = list(args).index("--") if "--" in args else len(args)
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args(
        args[:at]
    )
    folder = work / "aligned-teachers"
    shown = folder.relative_to(ROOT) if folder.is_relative_to(ROOT) and Path.cwd() == ROOT else folder
    teachers = {name: make_teacher(name, shown / f"teacher-{name}") for name in TEACHERS}
    given = ["--budget-tokens", str(TOKENS), "--seeds", str(SEEDS), "--output", str(shown / "compare")]
    rows = specs({name: teacher.model for name, teacher in teachers.items()})
    code = compare([*rows, *given, *args[at + 1 :], "--", *SHAPE])
    compared = folder / "compare" / "comparison.json"
    if code == STOPPED or not compared.exists():
        return code
    report: dict[str, Any] = json.loads(compared.read_text(encoding="utf-8"))
    report |= {
        "measured_by": shlex.join(["python", "scripts/measure_aligned_teachers.py", *args]),
        "teachers": {name: vars(teacher) for name, teacher in teachers.items()},
    }
    write_packed_result("aligned-teachers.json", format_report(report), results)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
