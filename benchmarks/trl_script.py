"""A script for TRL: GRPO on problems of arithmetic, measured on held-out ones. scripts/measure_trl.py runs it with both trainers.

python benchmarks/trl_script.py MODEL TRAIN.jsonl TEST.jsonl STEPS SEED
python -m policygrad.trl benchmarks/trl_script.py MODEL TRAIN.jsonl TEST.jsonl STEPS SEED
"""

import json
import re
import resource
import sys
import tempfile
import time

import torch
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer


def is_right(completions, answer, **_):
    found = [re.search(r"<answer>(.*?)</answer>", text, re.DOTALL) for text in completions]
    return [float(match is not None and match[1].strip() == str(a)) for match, a in zip(found, answer, strict=True)]


def main():
    model, train, test, steps, seed = sys.argv[1:]
    torch.set_num_threads(1)
    args = GRPOConfig(
        tempfile.mkdtemp(),
        per_device_train_batch_size=64,
        gradient_accumulation_steps=2,
        num_generations=8,
        num_generations_eval=4,
        per_device_eval_batch_size=128,
        max_completion_length=24,
        learning_rate=5e-4,
        max_steps=int(steps),
        seed=int(seed),
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=1000,
    )
    data = {
        name: load_dataset("json", data_files=file, split="train") for name, file in (("train", train), ("test", test))
    }
    trainer = GRPOTrainer(model, is_right, args, data["train"], data["test"])
    before = trainer.evaluate()["eval_reward"]
    started = time.process_time()
    trainer.train()
    seconds = time.process_time() - started
    after = trainer.evaluate()["eval_reward"]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print("RESULT " + json.dumps({"before": before, "after": after, "cpu_seconds": seconds, "peak_mib": peak}))


if __name__ == "__main__":
    main()
