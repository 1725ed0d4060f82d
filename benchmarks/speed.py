"""What each saving is worth: rollout against `generate`, and the learner with its savings switched off one by one.

    python benchmarks/speed.py [--model tiny] [--prompts 64] [--samples 8] [--repeats 5]

Prints medians over the repeats, tokens per second of sampled tokens. The learner's gradient is compared with the plain one.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

import policygrad as pg
from policygrad.learners.local.learner import LocalLearner
from policygrad.models.loading import load_model
from policygrad.models.tokenizer import load_tokenizer, padding_id
from policygrad.rewards import RewardPool
from policygrad.rollout.rollouter import Rollouter
from policygrad.rollout.trajectory import TRAIN, Start
from policygrad.samplers.base import Sampling
from policygrad.samplers.local import LocalSampler
from policygrad.tasks import load_task


def median_seconds(work: Callable[[], object], repeats: int) -> float:
    """Median wall time of `work`, after one call that is not counted."""
    work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    """Prints the two tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--task", default="embedded")
    for name, default in (("prompts", 64), ("samples", 8), ("max-tokens", 32), ("repeats", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    model = load_model(args.model)
    tokenizer = load_tokenizer(args.model, model)
    sampler = LocalSampler(model, tokenizer.end, padding_id(tokenizer))
    task = load_task(args.task)
    sampling = Sampling(max_tokens=args.max_tokens)
    with RewardPool(task.rewards) as pool:
        rollouter = Rollouter(task.train, tokenizer, sampler, pool.score)
        rollout = rollouter.collect(pg.DR_GRPO, sampling, prompts=args.prompts, samples=args.samples)
    tokens = int(rollout.batch.mask.sum())
    print(f"{args.prompts} prompts × {args.samples} samples, {tokens} sampled tokens, torch {torch.__version__}")
    _rollout(args, model, tokenizer, rollouter, sampling, tokens)
    _learner(model, rollout.batch, args.repeats, tokens)


def _rollout(args, model, tokenizer, rollouter, sampling, tokens) -> None:  # type: ignore[no-untyped-def]
    starts = [Start(rollouter.examples(i), (0, TRAIN, 1, i), sampling.max_tokens) for i in range(args.prompts)]
    prompts = [tokenizer.encode(start.example.prompt, sampling.max_tokens) for start in starts]
    width = max(map(len, prompts))
    ids = torch.full((args.prompts, width), padding_id(tokenizer))
    for i, prompt in enumerate(prompts):
        ids[i, width - len(prompt) :] = prompt
    ids = ids.repeat_interleave(args.samples, 0)
    made: list[int] = []

    def generate() -> None:
        out = model.generate(
            input_ids=ids,
            attention_mask=(ids != padding_id(tokenizer)).long(),
            do_sample=True,
            top_k=0,
            max_new_tokens=sampling.max_tokens,
            pad_token_id=padding_id(tokenizer),
        )
        made.append(int((out[:, width:] != padding_id(tokenizer)).sum()))

    ours = median_seconds(lambda: rollouter.play(starts, args.samples, sampling), args.repeats)
    theirs = median_seconds(generate, args.repeats)
    rate, reference = tokens / ours, statistics.median(made) / theirs
    print(f"rollout   policygrad {ours:6.3f} s  {rate:8.0f} tokens/s")
    print(f"rollout   generate   {theirs:6.3f} s  {reference:8.0f} tokens/s   policygrad is {rate / reference:.1f}x")


def _learner(model, batch, repeats, tokens) -> None:  # type: ignore[no-untyped-def]
    algorithm = pg.DR_GRPO.with_budget(32)
    learner = LocalLearner(model, algorithm, lr=0.0, steps=1)
    psi = algorithm.advantages(batch)
    every = learner.problem(batch, psi, algorithm)
    network = replace(learner.evaluator.network, branches=False)
    alone = replace(every.networks, policy=replace(learner.evaluator, network=network))
    variants = {
        "every saving": every,
        "no skipping": replace(every, skip=False),
        "no trees": replace(every, networks=alone),
        "none of them": replace(every, networks=alone, skip=False),
    }

    def gradient(problem) -> list[torch.Tensor]:  # type: ignore[no-untyped-def]
        problem.accumulate()
        found = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        return found

    seconds = {name: median_seconds(partial(gradient, problem), repeats) for name, problem in variants.items()}
    gradients = {name: gradient(problem) for name, problem in variants.items()}
    largest = max(float(g.abs().max()) for g in gradients["none of them"])
    for name, time_ in seconds.items():
        off = max(float((a - b).abs().max()) for a, b in zip(gradients[name], gradients["none of them"], strict=True))
        print(
            f"learner   {name:<18} {time_:6.3f} s  {tokens / time_:8.0f} tokens/s   {seconds['none of them'] / time_:4.1f}x"
            f"   gradient off by {off / largest:.1e}"
        )


if __name__ == "__main__":
    main()
