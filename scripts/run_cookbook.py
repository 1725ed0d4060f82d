"""Run recipes of tinker-cookbook against `policygrad serve`, unchanged but for address, model and data.

    .environments/tinker/bin/python scripts/run_cookbook.py recipes [--model FOLDER] [--gsm8k FILE] [--only rl_loop …]
    .environments/tinker/bin/python scripts/run_cookbook.py embedded [--steps 40] [--seeds 0 1 2] [--results FILE]

`make test-tinker` makes the environment. No hub is asked: the recipes' default model, Qwen/Qwen3.5-9B-Base, and their data sets
are folders of those names in the working directory, where transformers and `datasets` look first. The model is `--model`, by
default the embedded one; a recipe with tools needs a tokenizer with ChatML's tokens, such as SmolLM2's.

recipes: rl_loop, sl_loop, rl_basic and rl_numerics_check for a few steps each; prints what they print last.

embedded: rl_loop trains the embedded task, by a renderer whose prompt is the task's and which puts the answer where the recipe
looks for it. `policygrad train` takes as many updates with the same objective, batch, learning rate and AdamW, for each seed. Both
train all weights; held-out accuracy of both is by `policygrad eval`. What differs: which prompts are sampled in which order, and
the random numbers.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from policygrad.models.loading import resolve_model
from policygrad.tasks import load_task
from stress_serve import Server, report_result

ROOT = Path(__file__).resolve().parents[1]
MODEL = "Qwen/Qwen3.5-9B-Base"
"""The recipes' default, for which they choose a renderer without special tokens."""
RECIPES = {
    "rl_loop": "loss_fn=importance_sampling batch_size=8 group_size=4 max_tokens=32 max_steps=3 lora_rank=8 save_every=2",
    "sl_loop": "batch_size=8 max_length=512 max_steps=3 lora_rank=8 save_every=2",
    "rl_basic": "max_tokens=32 max_steps=2 lora_rank=8",
    "rl_numerics_check.train": "renderer_name=qwen3_instruct group_size=2 groups_per_batch=2 max_tokens=48 max_steps=2 lora_rank=8 "
    "max_trajectory_tokens=3000 task.num_pages_min=2 task.num_pages_max=3 task.page_chars=600",
}
LR, BETAS, EPS = 1e-3, (0.9, 0.95), 1e-8


def write_data_set(folder: Path, splits: dict[str, list[dict[str, Any]]], config: str = "default") -> None:
    """Write JSON lines that `datasets.load_dataset(folder, config)` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for split, rows in splits.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        files.append(f"  - split: {split}\n    path: {split}.jsonl\n")
    card = f"---\nconfigs:\n- config_name: {config}\n  data_files:\n{''.join(files)}---\n"
    (folder / "README.md").write_text(card, encoding="utf-8")


def prepare(folder: Path, model: str, gsm8k: Sequence[dict[str, Any]]) -> None:
    """Write the model and the data sets that the recipes name."""
    shutil.copytree(resolve_model(model), folder / MODEL)
    write_data_set(folder / "openai/gsm8k", {"train": list(gsm8k), "test": list(gsm8k)[:16]}, "main")
    talks = [
        {"prompt": r["question"], "prompt_id": str(i), "category": "math", "messages": talk(r["question"], r["answer"])}
        for i, r in enumerate(gsm8k)
    ]
    write_data_set(folder / "HuggingFaceH4/no_robots", {"train": talks, "test": talks[:16]})
    pages = sorted((ROOT / "docs").glob("*.md"))
    lines = [{"text": line} for page in pages for line in page.read_text(encoding="utf-8").splitlines()]
    write_data_set(folder / "Salesforce/wikitext", {"train": lines}, "wikitext-103-raw-v1")


def talk(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


@contextmanager
def served(folder: Path) -> Iterator[Server]:
    """Serve the model in the folder, from there."""
    before = Path.cwd()
    os.chdir(folder)
    server = Server(folder / "served", ("--model", MODEL), threads=None)
    try:
        yield server
    finally:
        server.stop()
        os.chdir(before)


def client_environment(server: Server) -> dict[str, str]:
    own = {
        "TINKER_BASE_URL": server.url,
        "TINKER_API_KEY": "tml-local",
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "disabled",
    }
    return {**os.environ, **own, "HF_DATASETS_CACHE": str(server.folder.parent / "cache")}


def run_recipes(options: argparse.Namespace) -> None:
    rows = [json.loads(line) for line in options.gsm8k.read_text(encoding="utf-8").splitlines()][:256]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        prepare(folder, options.model, [{"question": r["question"], "answer": r["answer"]} for r in rows])
        with served(folder) as server:
            for name in options.only or RECIPES:
                key = next(k for k in RECIPES if k.startswith(name))
                argv = [f"tinker_cookbook.recipes.{key}", f"log_path={folder / 'logs' / key}", f"model_name={MODEL}"]
                print(f"\n$ python -m {' '.join([*argv, RECIPES[key]])}", flush=True)
                command = [sys.executable, "-m", *argv, *RECIPES[key].split()]
                found = subprocess.run(
                    command, cwd=folder, env=client_environment(server), capture_output=True, text=True, timeout=1200
                )
                print("\n".join((found.stdout + found.stderr).splitlines()[-options.lines :]))
                print(f"exit code {found.returncode}", flush=True)
                metrics = folder / "logs" / key / "metrics.jsonl"
                if metrics.is_file():
                    print(metrics.read_text(encoding="utf-8"))


# The embedded task by rl_loop.

DRIVER = r'''
import sys
import tinker
from tinker_cookbook import renderers
from tinker_cookbook.renderers.base import ParseTermination
from tinker_cookbook.renderers.role_colon import RoleColonRenderer
from tinker_cookbook.recipes import rl_loop

SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."


class EmbeddedTask(RoleColonRenderer):
    """The last question alone is the prompt, as the task has it; its answer is between tags."""

    def build_generation_prompt(self, messages, *args, **kwargs):
        question = messages[-1]["content"].removesuffix(SUFFIX)
        return tinker.ModelInput.from_ints(self.tokenizer.encode(question + "\n"))

    def get_stop_sequences(self):
        return [self.tokenizer.eos_token_id]

    def parse_response(self, response):
        text = self.tokenizer.decode(response)
        answer = text.partition("<answer>")[2].partition("</answer>")[0].strip()
        return {"role": "assistant", "content": "\\boxed{" + answer + "}"}, ParseTermination.EOS


renderers.register_renderer("role_colon", lambda tokenizer, processor: EmbeddedTask(tokenizer))
rl_loop.main(
    rl_loop.Config(
        log_path=sys.argv[1], model_name=sys.argv[2], batch_size=64, group_size=8, learning_rate=float(sys.argv[3]), lora_rank=0,
        save_every=0, max_tokens=32, loss_fn="importance_sampling", max_steps=int(sys.argv[4]),
    )
)
import json
path = [json.loads(line) for line in open(sys.argv[1] + "/checkpoints.jsonl")][-1]["state_path"]
client = tinker.ServiceClient().create_training_client_from_state(path).result()
client.save_weights_external("trained").result()
print("MODEL", client.model_id)
'''


def train_served(folder: Path, seed: int, steps: int) -> float:
    """Train by rl_loop, and return the held-out accuracy."""
    task = load_task("embedded", seed=seed)
    examples = [task.train_example(i) for i in range(64 * steps)]
    rows = [{"question": str(e.prompt).rstrip("\n"), "answer": f"#### {e.columns['answer']}"} for e in examples]
    prepare(folder, "tiny", rows)
    with served(folder) as server:
        argv = [sys.executable, "-c", DRIVER, str(folder / "log"), MODEL, str(LR), str(steps)]
        found = subprocess.run(argv, cwd=folder, env=client_environment(server), capture_output=True, text=True)
        if found.returncode:
            raise RuntimeError(found.stderr[-3000:])
        model_id = re.findall(r"MODEL (\S+)", found.stdout)[-1]
        session, _, number = model_id.split(":")
        return evaluate(server.folder / session / "train" / number / "external_weights" / "trained")


def train_here(folder: Path, seed: int, steps: int) -> float:
    """Train by `policygrad train`, and return the held-out accuracy."""
    options = f"dr_grpo --algorithm.gate Importance --lr {LR} --steps {steps} --seed {seed}"
    batch = "--prompts-per-step 64 --samples-per-prompt 8 --evaluation.problems 0"
    adam = f"--optimizer.betas {BETAS[0]} {BETAS[1]} --optimizer.eps {EPS} --optimizer.clip 0"
    argv = [*options.split(), *batch.split(), *adam.split(), "--plain", "--output", str(folder / "run")]
    subprocess.run([sys.executable, "-m", "policygrad", "train", *argv], check=True, capture_output=True)
    return evaluate(folder / "run")


def evaluate(model: Path) -> float:
    """Return the accuracy on 256 held-out problems, with 8 samples each."""
    argv = ["eval", str(model), "--task", "embedded", "--problems", "256", "--samples", "8", "--json"]
    found = subprocess.run([sys.executable, "-m", "policygrad", *argv], check=True, capture_output=True, text=True)
    return float(json.loads(found.stdout)["mean"])


def compare_embedded(options: argparse.Namespace) -> None:
    found: dict[str, list[float]] = {"served": [], "train": []}
    for seed in options.seeds:
        for name, run in (("served", train_served), ("train", train_here)):
            with tempfile.TemporaryDirectory() as temporary:
                found[name].append(round(run(Path(temporary), seed, options.steps), 4))
                print(f"seed {seed}, {name}: {found[name][-1]}", flush=True)
    result = {
        "steps": options.steps,
        "seeds": options.seeds,
        **found,
        **{f"{name}_mean": round(statistics.mean(x), 4) for name, x in found.items()},
    }
    report_result("embedded task", result, options.results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recipes = commands.add_parser("recipes")
    recipes.add_argument("--model", default="tiny")
    recipes.add_argument("--gsm8k", type=Path, default=ROOT.parent / "shared" / "data" / "gsm8k" / "test.jsonl")
    recipes.add_argument("--only", nargs="*")
    recipes.add_argument("--lines", type=int, default=12)
    embedded = commands.add_parser("embedded")
    embedded.add_argument("--steps", type=int, default=40)
    embedded.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    embedded.add_argument("--results", type=Path)
    options = parser.parse_args()
    (run_recipes if options.command == "recipes" else compare_embedded)(options)


if __name__ == "__main__":
    main()
