"""The policy-gradient family for language models in one file: torch and the standard library, nothing else.

    python examples/one_file.py [algorithm] [steps]          reinforce rloo grpo dr_grpo dapo gspo cispo sapo

A language model is a policy π_θ: the state is the text so far, an action is the next token. For each prompt we sample a
group of completions o_1 … o_G, a verifier gives each a reward R_i, and we follow the gradient of the expected reward.
Every algorithm here is that one gradient with other parts put in:

    ∇J = Σ_{i,t} c_{i,t} · ( w_{i,t} · Ψ_{i,t} + k_{i,t} ) · ∇log π_θ(o_{i,t})

    Ψ   the advantage: how much better than expected the completion was          (lever 1)
    w   the gate: how far the policy may move away from the one that sampled     (lever 2)
    k   a pull back towards a reference policy (KL), if any                      (lever 2)
    c   how tokens are averaged

c, w, Ψ and k are numbers, not functions of θ: so the loss is −Σ c (w Ψ + k) log π_θ, a weighted cross-entropy. Read from
top to bottom: the data, lever 1, lever 2, the averages, the equation, the table of algorithms, a task, the training loop.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

# ── The data: B completions of at most T tokens, several per prompt ────────────────────────────────────────────────────
Gate = Callable[[Tensor, Tensor], Tensor]  # (r, Ψ) -> w


@dataclass(frozen=True)
class Rollout:
    mask: Tensor  # [B, T] True where the policy sampled a token
    group: Tensor  # [B] which prompt
    reward: Tensor  # [B] the verifier's R
    old: Tensor  # [B, T] log π_old, of the policy that sampled
    ref: Tensor  # [B, T] log π_ref, of the policy the run started from
    truncated: Tensor  # [B] True where the token budget ended the completion
    baseline: float = 0.0  # mean reward of earlier batches


def only(x: Tensor, mask: Tensor) -> Tensor:
    """x on the mask, 0 elsewhere, whatever stands there (NaN included)."""
    return torch.where(mask, x, 0.0)


def siblings(roll: Rollout) -> Tensor:
    """[B, B] 1.0 where completion j answers the same prompt as i (i itself included) and has at least one token."""
    return ((roll.group[:, None] == roll.group) & roll.mask.any(1)).to(roll.reward.dtype)


def spread(R: Tensor, S: Tensor) -> Tensor:
    """[B] True where the group has a best and a worst completion; without them there is nothing to learn from it."""
    return torch.where(S > 0, R, -torch.inf).amax(1) > torch.where(S > 0, R, torch.inf).amin(1)


# ── Lever 1, the advantage: Ψ = (reward to go − baseline) / scale, a scale of ∞ meaning "this group teaches nothing" ───
def running_mean(R: Tensor, S: Tensor, roll: Rollout) -> tuple[Tensor, Tensor]:
    """REINFORCE: the baseline is what earlier batches earned."""
    return torch.full_like(R, roll.baseline), torch.ones_like(R)


def group_mean(R: Tensor, S: Tensor, roll: Rollout) -> tuple[Tensor, Tensor]:
    """Dr. GRPO: the mean of the group."""
    return S @ R / S.sum(1).clamp(min=1), torch.where(spread(R, S), 1.0, torch.inf)


def leave_one_out(R: Tensor, S: Tensor, roll: Rollout) -> tuple[Tensor, Tensor]:
    """RLOO: the mean of the *other* completions, which does not depend on this one: unbiased."""
    return (S @ R - R) / (S.sum(1) - 1).clamp(min=1), torch.where(spread(R, S), 1.0, torch.inf)


def z_score(R: Tensor, S: Tensor, roll: Rollout) -> tuple[Tensor, Tensor]:
    """GRPO: the mean of the group, divided by its standard deviation."""
    mean, scale = group_mean(R, S, roll)
    variance = (S * (R[None, :] - mean[:, None]) ** 2).sum(1) / (S.sum(1) - 1).clamp(min=1)
    return mean, scale * (variance.sqrt() + 1e-4)


# ── Lever 2, the ratio r = π_θ/π_old and the gate w(r, Ψ): what the ratio lets through ─────────────────────────────────
RATIOS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "token": lambda log_r, mask: log_r.exp(),  # PPO, GRPO; below: GSPO, one per completion, the geometric mean
    "sequence": lambda log_r, mask: (log_r.sum(1, True) / mask.sum(1, True).clamp(min=1)).exp().expand_as(log_r),
}
on_policy: Gate = lambda r, psi: torch.ones_like(r)  # noqa: E731  right as long as each rollout is used for one step


def clip(low: float, high: float) -> Gate:
    """w = r, or 0 once r has left [1 − low, 1 + high] in the direction Ψ pushes: the gradient of min(rΨ, clip(r)Ψ)."""
    return lambda r, psi: torch.where((psi > 0) & (r > 1 + high) | (psi < 0) & (r < 1 - low), 0.0, r)


def cap(high: float) -> Gate:
    """w = min(r, high): no token loses its gradient (CISPO)."""
    return lambda r, psi: r.clamp(max=high)


def soft(tau_pos: float, tau_neg: float) -> Gate:
    """w = 4p(1 − p)r with p = σ(τ(r − 1)), and 4p(1 − p) = 1/cosh²(τ(r − 1)/2): the clip's cliff as a slope (SAPO)."""
    return lambda r, psi: r / torch.where(psi > 0, tau_pos * (r - 1) / 2, tau_neg * (r - 1) / 2).cosh() ** 2


# ── The averages c [B, T]: who counts alike? ───────────────────────────────────────────────────────────────────────────
B = lambda mask: mask.any(1).sum().clamp(min=1)  # noqa: E731  how many completions count
AVERAGES: dict[str, Callable[[Tensor], Tensor]] = {
    "sequence sum": lambda mask: mask.double() / B(mask),  # a completion is one action
    "sequence mean": lambda mask: mask.double() / (B(mask) * mask.sum(1, keepdim=True).clamp(min=1)),  # completions
    "token mean": lambda mask: mask.double() / mask.sum().clamp(min=1),  # tokens, of long and short completions
    "fixed length": lambda mask: mask.double() / (B(mask) * max(1, mask.shape[1])),  # no length that the policy chose
}


# ── What DAPO and CISPO do before: filters and a length penalty ────────────────────────────────────────────────────────────────
def drop_no_spread(roll: Rollout) -> Rollout:
    """Dynamic sampling: groups all right or all wrong leave the batch (DAPO then samples new ones)."""
    return replace(roll, mask=roll.mask & spread(roll.reward, siblings(roll))[:, None])


def mask_truncated(roll: Rollout) -> Rollout:
    """A completion cut off by the budget was not finished, so it is not judged."""
    return replace(roll, mask=roll.mask & ~roll.truncated[:, None])


def soft_overlong(roll: Rollout) -> Rollout:
    """Down from 0 to −1 over the last fifth of the budget, which a truncated completion has used up."""
    budget = roll.mask.shape[1]
    length = torch.where(roll.truncated, float(budget), roll.mask.sum(1).to(roll.reward))
    penalty = ((budget - length) / (0.2 * budget) - 1).clamp(-1, 0)
    return replace(roll, reward=roll.reward + penalty)


# ── The equation ───────────────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True)
class Algorithm:
    psi: Callable[[Tensor, Tensor, Rollout], tuple[Tensor, Tensor]]
    w: Gate
    c: str
    ratio: str = "token"
    kl_loss: float = 0.0  # β of the k3 term
    kl_reward: float = 0.0  # β of the completion's log(π_old/π_ref) in its reward
    before: tuple[Callable[[Rollout], Rollout], ...] = ()
    epochs: int = 2  # updates per rollout


def advantages(roll: Rollout, algorithm: Algorithm) -> Tensor:
    """Ψ [B, T]: the completion's reward, less its KL penalty, less the baseline: the same at each of its tokens."""
    kl = only(roll.old - roll.ref, roll.mask).sum(1)
    R = only(roll.reward - algorithm.kl_reward * kl, roll.mask.any(1))
    baseline, scale = algorithm.psi(R, siblings(roll), roll)
    return only(((R - baseline) / scale)[:, None].expand(roll.mask.shape), roll.mask)


def surrogate(logp: Tensor, roll: Rollout, algorithm: Algorithm) -> Tensor:
    """The loss whose gradient is the equation: logp = log π_θ [B, T] carries the graph, everything else is a number."""
    for transform in algorithm.before:
        roll = transform(roll)
    with torch.no_grad():
        psi = advantages(roll, algorithm)
        r = RATIOS[algorithm.ratio](only(logp - roll.old, roll.mask), roll.mask)
        u = only(logp - roll.ref, roll.mask)
        k = -algorithm.kl_loss * (1 - (-u).exp())  # the derivative of k3 = e^{−u} + u − 1, times −β
        score = AVERAGES[algorithm.c](roll.mask) * (algorithm.w(r, psi) * psi + k)
    return -(score * only(logp, roll.mask)).sum()


# ── The table: an algorithm is a choice of parts ───────────────────────────────────────────────────────────────────────
ALGORITHMS = {
    "reinforce": Algorithm(running_mean, on_policy, "sequence sum", epochs=1),
    "rloo": Algorithm(leave_one_out, on_policy, "sequence sum", kl_reward=0.05, epochs=1),
    "grpo": Algorithm(z_score, clip(0.2, 0.2), "sequence mean", kl_loss=0.04),
    "dr_grpo": Algorithm(group_mean, clip(0.2, 0.2), "fixed length"),
    "dapo": Algorithm(z_score, clip(0.2, 0.28), "token mean", before=(drop_no_spread, mask_truncated, soft_overlong)),
    "gspo": Algorithm(z_score, clip(3e-4, 4e-4), "sequence mean", ratio="sequence"),
    "cispo": Algorithm(z_score, cap(5.0), "token mean", before=(drop_no_spread, soft_overlong)),
    "sapo": Algorithm(z_score, soft(1.0, 1.05), "sequence mean"),
}

# ── A task: sort three digits. A completion is right when it is the sorted digits, then EOS. ───────────────────────────
DIGITS, EOS, START, LENGTH, BUDGET = 5, 5, 6, 3, 6


class Policy(nn.Module):
    """A GRU that reads the prompt, then writes."""

    def __init__(self, hidden: int = 48) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(START + 1, hidden), nn.Linear(hidden, EOS + 1)
        self.rnn = nn.GRU(hidden, hidden, batch_first=True)

    def forward(self, tokens: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """[B, N] -> log π(next token | all before) [B, N, V], and the state to go on from."""
        out, state = self.rnn(self.embed(tokens), state)
        return torch.log_softmax(self.head(out), -1), state

    def logp(self, prompts: Tensor, tokens: Tensor) -> Tensor:
        """log π of the tokens taken [B, T]."""
        everything, _ = self(torch.cat([prompts, tokens[:, :-1]], 1))
        return everything[:, prompts.shape[1] - 1 :].gather(-1, tokens[..., None]).squeeze(-1)


@torch.no_grad()
def sample(policy: Policy, reference: Policy, groups: int, size: int) -> tuple[Rollout, Tensor, Tensor]:
    """(rollout, prompts, tokens): `size` completions for each of `groups` prompts."""
    digits = torch.randint(DIGITS, (groups, LENGTH)).repeat_interleave(size, 0)
    prompts = torch.nn.functional.pad(digits, (0, 1), value=START)
    logp, state = policy(prompts)
    tokens = torch.empty(len(prompts), 0, dtype=torch.int64)
    for _ in range(BUDGET):
        tokens = torch.cat([tokens, torch.multinomial(logp[:, -1].exp(), 1)], 1)
        logp, state = policy(tokens[:, -1:], state)
    ended = (tokens == EOS).cumsum(1) > (tokens == EOS).long()  # before this token
    target = torch.nn.functional.pad(digits.sort(1).values, (0, 1), value=EOS)
    right = (tokens[:, : LENGTH + 1] == target) & ~ended[:, : LENGTH + 1]
    group, reward = torch.arange(groups).repeat_interleave(size), right.float().mean(1)
    old, ref = policy.logp(prompts, tokens), reference.logp(prompts, tokens)
    roll = Rollout(~ended, group, reward, old, ref, truncated=~(tokens == EOS).any(1))
    return roll, prompts, tokens


def train(name: str, steps: int = 250, groups: int = 16, size: int = 8, seed: int = 0) -> list[float]:
    """Trains a fresh policy; returns the mean reward of every step."""
    torch.manual_seed(seed)
    algorithm, policy = ALGORITHMS[name], Policy()
    reference = copy.deepcopy(policy)
    optimiser = torch.optim.Adam(policy.parameters(), lr=3e-3)
    rewards: list[float] = []
    for step in range(steps):
        roll, prompts, tokens = sample(policy, reference, groups, size)
        roll = replace(roll, baseline=sum(rewards[-10:]) / max(1, len(rewards[-10:])))
        for _ in range(algorithm.epochs):
            optimiser.zero_grad()
            surrogate(policy.logp(prompts, tokens), roll, algorithm).backward()
            optimiser.step()
        rewards.append(float(roll.reward.mean()))
        if step % 10 == 0 or step == steps - 1:
            solved = float((roll.reward == 1).double().mean())
            print(f"{name} {step:4d}  reward {rewards[-1]:.2f}  sorted {solved:4.0%}  " + "█" * round(40 * solved))
    return rewards


if __name__ == "__main__":
    torch.set_num_threads(1)  # tensors this small are faster on one core
    chosen = sys.argv[1] if len(sys.argv) > 1 else "grpo"
    if chosen not in ALGORITHMS:
        sys.exit(f"unknown algorithm {chosen!r}; known: {', '.join(ALGORITHMS)}")
    train(chosen, int(sys.argv[2]) if len(sys.argv) > 2 else 250)
