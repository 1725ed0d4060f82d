"""A training loop of your own around policygrad.core, which needs torch alone; the model and `generate` are transformers'.

python examples/core_alone.py [algorithm] [steps]    any algorithm by name; one that needs more than this loop has says what
"""

import copy
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from policygrad.algorithms import get_algorithm
from policygrad.core.batch import Batch, Forward
from policygrad.core.objective import objective, surrogate
from policygrad.core.updates import GradientSteps

PAD, EOS, VOCAB = 0, 1, 16
PROMPTS, SAMPLES, PROMPT_LENGTH, LENGTH = 8, 8, 3, 8
SIZE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


def read(model: LlamaForCausalLM, ids: torch.Tensor) -> Forward:
    """Compute the log-probability of each sampled token and the entropy before it, both [B, T]."""
    logp = model(ids).logits[:, PROMPT_LENGTH - 1 : -1].log_softmax(-1)
    return Forward(logp.gather(-1, ids[:, PROMPT_LENGTH:, None])[..., 0], entropy=-(logp.exp() * logp).sum(-1))


def train(name: str = "grpo", steps: int = 20) -> list[float]:
    """Train a small random model to write even tokens; return the mean reward of each step."""
    algorithm = get_algorithm(name).with_max_tokens(LENGTH)
    if not isinstance(algorithm.update_rule, GradientSteps):
        raise SystemExit(f"{name} moves the weights by {type(algorithm.update_rule).__name__}, not by an optimizer")
    torch.manual_seed(0)
    policy = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, pad_token_id=PAD, eos_token_id=EOS, **SIZE))
    reference, optimizer = copy.deepcopy(policy), torch.optim.AdamW(policy.parameters(), 3e-3)
    state, rewards = algorithm.init_state(), list[float]()
    for step in range(1, steps + 1):
        prompts = torch.randint(2, VOCAB, (PROMPTS, PROMPT_LENGTH)).repeat_interleave(SAMPLES, 0)
        ids = policy.generate(prompts, do_sample=True, top_k=0, max_new_tokens=LENGTH)
        tokens = ids[:, PROMPT_LENGTH:]
        mask = (tokens == EOS).cumsum(1) - (tokens == EOS).long() == 0  # up to the first EOS, which was sampled too
        reward = ((tokens % 2 == 0) & mask).sum(1) / mask.sum(1)
        with torch.no_grad():
            old, ref = read(policy, ids).logp, read(reference, ids).logp
        group = torch.arange(PROMPTS).repeat_interleave(SAMPLES)
        batch = Batch(mask=mask, group=group, reward=reward, logp_old=old, logp_sampler=old, logp_ref=ref)
        now = algorithm.with_state(state)
        psi = now.compute_advantages(batch := now.apply_filters(batch))
        for _ in range(now.update_rule.updates):  # each on the whole rollout
            surrogate(out := read(policy, ids), batch, psi, now).backward()
            optimizer.step()
            optimizer.zero_grad()
        state, rewards = algorithm.update_state(state, batch), [*rewards, float(reward.mean())]
        print(f"step {step:2}  reward {rewards[-1]:.2f}  objective {float(objective(out, batch, psi, now)):+.3f}")
    return rewards


if __name__ == "__main__":
    train(*sys.argv[1:2], *map(int, sys.argv[2:3]))
