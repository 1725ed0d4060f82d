"""What is said to an option of another library, and what several of them are told alike."""

from __future__ import annotations

from typing import NamedTuple


class Ours(NamedTuple):
    """What is said instead; no flag where there is nothing of the kind."""

    flag: str
    note: str = ""


BOTH_CLIPS = Ours("--algorithm.gate.low and --algorithm.gate.high", "the two sides are two options here")
HIGH = Ours("--algorithm.gate.high", "an offset from 1 with Clip; with WeightCap (cispo) the bound itself")
KL_IN_REWARD = Ours(
    "--algorithm.shaping.kl-in-reward.beta", "--algorithm.shaping KLInReward puts the penalty in where there is none"
)
TARGET_KL = Ours(
    "--algorithm.shaping.kl-in-reward.target",
    "nats a token, over all tokens; at most 2 % a rollout, as with a horizon of ten rollouts' samples",
)
KL_IN_LOSS = Ours(
    "--algorithm.terms.kl-to-reference.beta", "--algorithm.terms KLToReference puts the term in where there is none"
)
KL_FORM = Ours(
    "--algorithm.terms.kl-to-reference.form", "k2 or k3; k1 belongs into the reward, --algorithm.shaping KLInReward"
)
ENTROPY = Ours(
    "--algorithm.terms.entropy.eta",
    "--algorithm.terms Entropy puts the term in where there is none; it is an estimate from the sampled tokens, and "
    "--algorithm.terms ExactEntropy the sum over the vocabulary",
)
DUAL_CLIP = Ours(
    "--algorithm.gate DualClip --algorithm.gate.c", "it bounds r where Ψ < 0; where Ψ > 0 the clip does already"
)
MICRO = Ours(
    "--learner.micro-tokens",
    "tokens per forward and backward pass; it changes memory, never the gradient",
)
RATIO_WARMUP = Ours("--optimizer.warmup", "counted in optimiser steps, not as a share of the run")
WARMUP = Ours("--optimizer.warmup", "in optimiser steps, of which a rollout may have several")
SCHEDULE = Ours("--optimizer.schedule", "constant, linear or cosine, down to 0")
STEPS = Ours("--steps", "a step here is a rollout with all of its updates, not an optimiser step")
EPOCHS_OF_DATA = Ours("--steps", "a run is counted in rollouts, or by --tokens, not in passes over the prompts")
PROMPT_LENGTH = Ours("", "prompts are never cut: one that leaves no room for --max-tokens is refused by name")
DEVICES = Ours(
    "--learner.ranks", "processes that learn together, a GPU each; on more than one machine torchrun starts them"
)
ENGINE = Ours("--sampler.engine", "vllm or sglang, servers that you start and name, --sampler.urls; or llama_cpp")
SERVERS = Ours("--sampler.urls", "the address of each server; --sampler.engine says what they are")
TRACKER = Ours("--track", "wandb, tensorboard, mlflow, trackio; every run writes metrics.jsonl too")
LORA = Ours("--learner.lora rank=16,alpha=32,targets=all-linear", "one option, of which any part may be left out")
REWARD_MODEL = Ours("--reward model:DIR", "a reward model that `policygrad reward-model` trained")
METHOD = Ours(
    "ALGORITHM, the first word after `train`", "`policygrad algorithms` lists them; --algorithm.FIELD changes a part"
)
RESUME = Ours("--resume RUN")
CORRECTION = Ours("--algorithm.corrections", "TruncatedIS or MaskedIS")
