"""The papers' objectives that look at an answer's steps, literally: lists of steps, each with its reward or its value."""

from __future__ import annotations

import torch
from torch import Tensor

from doubles.transcriptions.critic import rewards
from doubles.transcriptions.objectives import Completion, Prompts, clip, count, count_tokens, mean, std, zero


def steps_of(o: Completion) -> list[list[int]]:
    """The tokens of each step; what follows the last end is a step too."""
    steps: list[list[int]] = [[]]
    for t in range(len(o)):
        steps[-1].append(t)
        if bool(o.step_end[t]) and t + 1 < len(o):
            steps.append([])
    return steps


def grpo_process(prompts: Prompts, width: int, outcome: bool = True) -> Tensor:
    """DeepSeekMath's process supervision: R = {r_1^{index(1)}, …}, r̃ = (r − mean(R))/std(R), Â_t = Σ_{index(j) ≥ t} r̃.

    outcome: the answer's reward is added to its last step's; without it sec. 4.1.3 as it stands.
    """
    J = zero(prompts)
    for outputs in prompts:
        ends = {id(o): [t for t in range(len(o)) if bool(o.step_end[t])] for o in outputs}
        R = {
            id(o): [o.token_reward[t] + (o.reward if outcome and t == ends[id(o)][-1] else 0) for t in ends[id(o)]]
            for o in outputs
        }
        every = [r for row in R.values() for r in row]
        flat = max(every) == min(every) or len(outputs) == 1
        for o in outputs:
            scaled = [r * 0 if flat else (r - mean(every)) / (std(every) + 1e-4) for r in R[id(o)]]
            for t in range(len(o)):
                A = sum((x for x, end in zip(scaled, ends[id(o)], strict=True) if end >= t), o.reward * 0)
                kl = 0.04 * (torch.exp(-o.u(t)) + o.u(t) - 1)
                J = J + (torch.minimum(o.r(t) * A, clip(o.r(t), 0.8, 1.2) * A) - kl) / len(o)
    return J / max(1, count(prompts))


def vineppo(prompts: Prompts, width: int) -> Tensor:
    """VinePPO: Â of a step's tokens = its rewards + V(s_{k+1}) − V(s_k), clipped as in PPO, KL in the reward."""
    J = zero(prompts)
    for o in (o for outputs in prompts for o in outputs):
        r, steps = rewards(o, 0.05), steps_of(o)
        for k, step in enumerate(steps):
            after = o.value[steps[k + 1][0]] if k + 1 < len(steps) else 0
            A = sum(r[t] for t in step) + after - o.value[step[0]]
            for t in step:
                J = J + torch.minimum(o.r(t) * A, clip(o.r(t), 0.8, 1.2) * A)
    return J / max(1, count_tokens(prompts))


def process_alone(prompts: Prompts, width: int) -> Tensor:
    """Sec. 4.1.3 with the process reward model's scores and nothing else."""
    return grpo_process(prompts, width, outcome=False)


STEPS = {"grpo_process": grpo_process, "vineppo": vineppo}
