"""Measure the memory and the CPU seconds of one update on long texts, ours in segments and whole, beside transformers and TRL.

    python scripts/measure_lengths.py                      docs/results/lengths.json, about an hour
    python scripts/measure_lengths.py --trl VENV/bin/python   TRL's SFTTrainer too, in an environment that has TRL
    python scripts/measure_lengths.py --only "segments" --lengths 4096 16384

Every figure is a process of its own with one thread: the most memory that it ever held (weights, gradients, AdamW's moments, Python
and its libraries included), and the CPU seconds of the update after a first one on a short text. In segments, another process
adds up the tensors that are alive at a time: the rest is Python, libraries and what the C library's allocator keeps. Every way
computes the gradient of the same number: the mean log-probability of the text's tokens but the first 64, or of the completions;
ours weighs them by advantages of 1.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "docs" / "results" / "lengths.json"
LENGTHS, SMALL_LENGTHS = (1024, 4096, 16384, 32768), (65536,)
MICRO_TOKENS, PROMPT = 1024, 64
GROUP = {"prompt": 4096, "samples": 16, "completion": 512}
SHAPES = {
    "8 layers of 512": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8},
    "4 layers of 256": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4},
}
COMMON = {
    "vocab_size": 32000,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}
WAYS = ("segments", "whole texts", "whole texts, recomputed", "transformers", "transformers, recomputed")
TRL = "TRL's SFTTrainer, recomputed"
GROUP_WAYS = ("segments", "a prompt for each micro-batch", "transformers, text by text")
LIMIT = 16  # GiB of address space in use beyond which a way is not tried at twice the length


def build_model(shape: str) -> Any:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    torch.set_num_threads(1)
    return Qwen3ForCausalLM(Qwen3Config(**COMMON, **SHAPES[shape]))


def measure(way: str, shape: str, length: int, count: bool) -> dict[str, float]:
    """Update once on a short text, then on the text of `length` tokens; 0 = the group. `count`: the tensors instead."""
    update = (_build_trl if way == TRL else _build_plain if way.startswith("transformers") else _build_ours)(way, shape)
    update(256)
    if count:
        from measure_plan_memory import LiveTensors

        with LiveTensors() as live:
            update(length)
        return {"tensors": live.peak / 2**20}
    before = time.process_time()
    update(length)
    seconds = time.process_time() - before
    return {"MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, "seconds": seconds}


def _draw(length: int) -> tuple[Any, Any]:
    """Return a prompt [P] and completions [n, T] of random tokens; of the group where the length is 0."""
    import torch

    g = torch.Generator().manual_seed(length)
    prompt, samples, tokens = (PROMPT, 1, length - PROMPT) if length else tuple(GROUP.values())
    return torch.randint(2, 32000, (prompt,), generator=g), torch.randint(2, 32000, (samples, tokens), generator=g)


def _build_ours(way: str, shape: str) -> Callable[[int], None]:
    import torch

    import policygrad as pg
    from policygrad.learners.base import LearnerSpec
    from policygrad.learners.config import LearnerConfig
    from policygrad.learners.local.forward import Network
    from policygrad.learners.local.learner import LocalLearner
    from policygrad.models.loading import load_model

    whole = way.startswith("whole")
    config = LearnerConfig(micro_tokens=10**6 if whole else MICRO_TOKENS, gradient_checkpointing="recomputed" in way)
    if way == "a prompt for each micro-batch":
        Network.reads_segments = property(lambda network: False)  # type: ignore[assignment,method-assign]
    learner = LocalLearner(load_model(build_model(shape)), LearnerSpec(pg.DR_GRPO, 1e-4, 9, 1.0, config))

    def update(length: int) -> None:
        prompt, tokens = _draw(length)
        mask, zeros = torch.ones(tokens.shape, dtype=torch.bool), torch.zeros(tokens.shape)
        batch = pg.Batch(
            mask=mask, group=torch.zeros(len(tokens), dtype=torch.int64), reward=torch.ones(len(tokens)), tokens=tokens,
            prompts=(prompt,), logp_sampler=zeros,
        )  # fmt: skip
        algorithm = replace(pg.DR_GRPO, aggregation=pg.TokenMean())
        learner.update(batch, torch.ones(tokens.shape), algorithm)

    return update


def _build_plain(way: str, shape: str) -> Callable[[int], None]:
    import torch

    model = build_model(shape).train()
    if "recomputed" in way:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def update(length: int) -> None:
        prompt, completions = _draw(length)
        for tokens in completions:
            states = model.model(input_ids=torch.cat([prompt, tokens])[None], use_cache=False).last_hidden_state[0]
            logits = model.lm_head(states[len(prompt) - 1 : -1]).float()
            torch.nn.functional.cross_entropy(logits, tokens, reduction="sum").div(completions.numel()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return update


def _build_trl(way: str, shape: str) -> Callable[[int], None]:
    import torch
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({str(i): i for i in range(32000)}, unk_token="0")),
        pad_token="0", eos_token="1",
    )  # fmt: skip
    model = build_model(shape)

    def update(length: int) -> None:
        prompt, completions = _draw(length)
        ids = torch.cat([prompt, completions[0]]).tolist()
        labels = [-100] * len(prompt) + completions[0].tolist()
        with tempfile.TemporaryDirectory() as folder:
            config = SFTConfig(
                output_dir=folder, max_steps=1, per_device_train_batch_size=1, gradient_checkpointing=True,
                max_length=None, report_to="none", use_cpu=True, save_strategy="no", disable_tqdm=True, bf16=False,
                dataset_kwargs={"skip_prepare_dataset": True}, remove_unused_columns=False,
            )  # fmt: skip
            data = Dataset.from_list([{"input_ids": ids, "labels": labels}])
            SFTTrainer(model=model, args=config, train_dataset=data, processing_class=tokenizer).train()

    return update


def measure_all(ways: list[str], lengths: list[int], trl: str | None) -> Iterator[dict[str, Any]]:
    """Measure every way at growing lengths, each until it needs too much memory for twice the length."""
    for shape, asked in (("8 layers of 512", lengths), ("4 layers of 256", [n for n in SMALL_LENGTHS if not ways])):
        for way in [*WAYS, *([TRL] if trl else [])]:
            for length in asked if not ways or way in ways else []:
                row = run_apart(way, shape, length, trl if way == TRL else None)
                if way == "segments":
                    row |= run_apart(way, shape, length, None, "--count")
                yield row
                if row.get("MiB", 1e9) > LIMIT * 1024 / 2:
                    break
    for way in GROUP_WAYS:
        if not ways or way in ways:
            yield run_apart(way, "8 layers of 512", 0)


def run_apart(way: str, shape: str, length: int, python: str | None = None, *options: str) -> dict[str, Any]:
    """Measure in a process of its own."""
    command = [python or sys.executable, __file__, "--one", way, "--shape", shape, "--length", str(length), *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    row: dict[str, Any] = {"way": way, "shape": shape, "length": length}
    if done.returncode:
        return row | {"failed": (done.stderr.strip().splitlines() or [f"signal {-done.returncode}"])[-1]}
    return row | json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--only", nargs="*", default=[], help="the ways to measure; what else is in the file is kept")
    parser.add_argument("--lengths", nargs="*", type=int, default=list(LENGTHS))
    parser.add_argument("--trl", help="a Python that has TRL")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--shape", help=argparse.SUPPRESS)
    parser.add_argument("--length", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--count", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one, args.shape, args.length, args.count)))
        return
    rows = json.loads(args.output.read_text())["rows"] if args.output.exists() else []
    for row in measure_all(args.only, args.lengths, args.trl):
        print(json.dumps(row), flush=True)
        key = ("way", "shape", "length")
        rows = [old for old in rows if [old[k] for k in key] != [row[k] for k in key]] + [row]
        import torch
        import transformers

        versions = {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        }
        if args.trl:
            command = [args.trl, "-c", "import trl; print(trl.__version__)"]
            versions["trl"] = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        args.output.write_text(json.dumps({"versions": versions, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
