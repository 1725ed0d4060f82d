"""One measurement of policygrad: trains on a work's folder, and prints what every step took.

python benchmarks/ours.py FOLDER [--dtype bf16] [--compile] [--micro-tokens 8192] [--seed 0] [--keep FOLDER]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

import policygrad as pg
from bench.clock import Clock, Moved, say, sum_turns
from bench.keeping import Keeping
from bench.works import Work, from_dict
from policygrad.models.tokenizer import Tokenizer, pad_token_id
from policygrad.training.base_trainer import Callback

HERE = Path(__file__).resolve().parent


class InOrder:
    """The prompts one after another, as TRL is given them."""

    name, steps, eval_on_train = "prompts", (), True
    rewards: tuple[str, ...] = ()

    def __init__(self, file: Path) -> None:
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        self.rows = [pg.Example(row["prompt"], {"answer": row["answer"]}) for row in rows]

    def train_example(self, index: int) -> pg.Example:
        return self.rows[index % len(self.rows)]

    def eval_examples(self, count: int) -> list[pg.Example]:
        return self.rows[:count]


class Watched:
    """The local sampler, with what it was asked for; where lengths are given, each completion has its own. `goes_on`: they are
    turns of conversations."""

    def __init__(self, inner: pg.LocalSampler, lengths: Sequence[int] | None, goes_on: bool = False) -> None:
        self.inner, self.lengths, self.goes_on = inner, lengths, goes_on
        self.facts: dict[str, list[int]] = {"completions": [], "prompt_tokens": [], "tokens": []}

    async def update(self, weights: pg.PublishedWeights) -> None:
        await self.inner.update(weights)

    async def generate(self, requests: Sequence[pg.Request]) -> Sequence[pg.Generation]:
        if self.lengths is not None:
            n = len(self.lengths)
            requests = [replace(r, max_tokens=self.lengths[i % n]) for i, r in enumerate(requests)]
        found: Sequence[pg.Generation] = await self.inner.generate(requests)
        if self.goes_on:  # a turn that is cut off would end the episode
            found = [replace(generation, finish_reason="stop") for generation in found]
        for name, value in (
            ("completions", len(requests)),
            ("prompt_tokens", sum(len(r.prompt_ids) for r in requests)),
            ("tokens", sum(len(g.tokens) for g in found)),
        ):
            self.facts[name].append(value)
        return found


class Conversation:
    """An environment that says the same after every turn, until the turns are over."""

    waits = False

    def __init__(self, example: pg.Example, turns: int, observation: str) -> None:
        self.example, self.left, self.observation = example, turns, observation

    async def reset(self) -> pg.Observation:
        return pg.Observation(self.example.prompt)

    async def step(self, action: pg.Action) -> pg.Step:
        self.left -= 1
        return pg.Step(observation=pg.Observation(self.observation) if self.left else None)


class Timer(Callback):
    """Follows the run."""

    def __init__(self, keeping: Keeping) -> None:
        self.keeping = keeping
        self.clock, self.loss, self.grad_norm = Clock(), list[float](), list[float]()
        self.moved, self.updates = 0.0, 0

    def start(self, trainer: Any) -> None:
        self._moved = Moved(trainer.model)
        self.clock.mark()
        self.keeping(0, trainer.model, trainer.tokenizer.hf, self.clock)

    def step(self, trainer: Any, step: int, metrics: Mapping[str, float]) -> None:
        self.clock.mark()
        self.loss.append(-metrics.get("objective", 0.0))  # without any difference of rewards there is nothing to learn
        self.grad_norm.append(metrics.get("grad_norm", 0.0))
        self.moved, self.updates = self._moved(), trainer.learner.version
        self.keeping(step, trainer.model, trainer.tokenizer.hf, self.clock)


def train(
    folder: Path,
    work: Work,
    reward: str,
    observation: str,
    learner: pg.LearnerConfig,
    seed: int,
    keep: Path | None,
) -> tuple[Timer, dict[str, list[int]]]:
    """The run, and what was sampled in it."""
    timer, sampler = Timer(Keeping(keep, work.keep)), list[Watched]()

    def watched(model: nn.Module, tokenizer: Tokenizer) -> Watched:
        end = tokenizer.end_ids if work.lengths is None else frozenset({-1})  # a token that is never drawn
        sampler.append(Watched(pg.LocalSampler(model, end, pad_token_id(tokenizer)), work.lengths, work.turns > 1))
        return sampler[0]

    with tempfile.TemporaryDirectory() as output:
        run = pg.Run(
            algorithm=pg.DR_GRPO,
            model=str(folder / "model"),
            task=InOrder(folder / "prompts.jsonl"),
            reward=(f"{HERE / 'bench' / 'rewards.py'}:{reward}",),
            steps=work.steps + 1,
            prompts_per_step=work.prompts,
            samples_per_prompt=work.samples,
            lr=work.lr,
            seed=seed,
            sampling=pg.SamplingParams(max_tokens=work.turns * work.max_tokens),
            evaluation=pg.EvaluationConfig(problems=0),
            learner=learner,
            output=str(Path(output) / "run"),
        )
        environment = partial(Conversation, turns=work.turns, observation=observation) if work.turns > 1 else None
        pg.train(run, sampler=watched, environment=environment, display=False, callbacks=[timer])
    return timer, sum_turns(sampler[0].facts, work.turns)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--compile", action="store_true", help="as --learner.compile")
    parser.add_argument("--micro-tokens", type=int, default=0, help="as --learner.micro-tokens")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="where weights are kept, for a work that has some kept")
    args = parser.parse_args()
    written = json.loads((args.folder / "work.json").read_text(encoding="utf-8"))
    reward = written.pop("reward")
    source, observation = written.pop("data"), written.pop("observation")
    learner = pg.LearnerConfig(dtype=args.dtype, device="cpu", compile=args.compile, micro_tokens=args.micro_tokens)
    timer, facts = train(args.folder, from_dict(written), reward, observation, learner, args.seed, args.keep)
    learned = {"loss": timer.loss, "grad_norm": timer.grad_norm, "moved": timer.moved, "updates": timer.updates}
    versions = {name: version(name) for name in ("torch", "transformers")} | {"threads": str(torch.get_num_threads())}
    say(timer.clock, source, {**facts, **learned}, versions)


if __name__ == "__main__":
    main()
