"""The gradient of every loss of TRL's, transcribed literally, is that of the parts it is translated to."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from policygrad.core.batch import Batch, Forward
from policygrad.core.objective import surrogate, with_selected_tokens
from policygrad.trl.config import LOSS_TYPES, GRPOConfig, RLOOConfig
from policygrad.trl.translate import translate_algorithm, with_micro_batches

ROWS, COUNT, LENGTH, BUDGET = 3, 2, 5, 7


def make_config(kind: type = GRPOConfig, **options: Any) -> Any:
    usual = {"per_device_train_batch_size": ROWS, "gradient_accumulation_steps": COUNT, "num_generations": 2}
    usual |= {"steps_per_generation": 4, "max_completion_length": BUDGET, "report_to": "none", "use_cpu": True}
    return kind("unused", bf16=False, **(usual | options))


def make_data(seed: int = 0) -> dict[str, Tensor]:
    """An optimizer step's completions: two micro-batches of three, one completion without a token that learns."""
    g = torch.Generator().manual_seed(seed)
    size = (ROWS * COUNT, LENGTH)
    lengths = torch.tensor([5, 2, 4, 1, 3, 0])
    old = -2 * torch.rand(size, generator=g, dtype=torch.float64)
    return {
        "mask": torch.arange(LENGTH) < lengths[:, None],
        "logp": old + torch.randn(size, generator=g, dtype=torch.float64) / 3,
        "old": old,
        "ref": old + torch.randn(size, generator=g, dtype=torch.float64) / 2,
        "entropy": torch.rand(size, generator=g, dtype=torch.float64),
        "advantage": torch.randn(ROWS * COUNT, generator=g, dtype=torch.float64),
    }


def compute_trl_loss(args: Any, data: dict[str, Tensor], logp: Tensor, items: float) -> Tensor:
    """TRL 1.16's `_compute_loss`, the sum over the micro-batches of an optimizer step."""
    total = logp.new_zeros(())
    for first in range(0, ROWS * COUNT, ROWS):
        rows = slice(first, first + ROWS)
        total = total + compute_micro_batch(args, {k: v[rows] for k, v in data.items()}, logp[rows], items)
    return total


def compute_micro_batch(args: Any, data: dict[str, Tensor], logp: Tensor, items: float) -> Tensor:
    mask, advantages, old = data["mask"].double(), data["advantage"][:, None], data["old"]
    entropy_mask = None
    if args.top_entropy_quantile < 1:
        threshold = torch.quantile(data["entropy"][data["mask"]], 1 - args.top_entropy_quantile)
        entropy_mask = ((data["entropy"] >= threshold) & data["mask"]).double()
    log_ratio = logp - old
    if args.importance_sampling_level == "token":
        weights = log_ratio
    else:
        weights = ((log_ratio * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).unsqueeze(-1)
    coef_1 = torch.exp(weights)
    kl = torch.exp(data["ref"] - logp) - (data["ref"] - logp) - 1
    if args.use_bias_correction_kl:
        kl = kl * coef_1
    high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    if args.loss_type == "cispo":
        loss = -torch.clamp(coef_1, max=high).detach() * advantages * logp
    elif args.loss_type == "sapo":
        positive, negative = map(advantages.new_tensor, (args.sapo_temperature_pos, args.sapo_temperature_neg))
        t = torch.where(advantages > 0, positive, negative)
        loss = -torch.sigmoid(t * (coef_1 - 1)) * 4 / t * advantages
    elif args.loss_type == "vespo":
        loss = -compute_phi(args, advantages, log_ratio.detach(), mask) * advantages * logp
    else:
        coef_2 = torch.clamp(coef_1, 1 - args.epsilon, 1 + high)
        if args.delta is not None:
            coef_1 = torch.clamp(coef_1, max=args.delta)
        loss = -torch.min(coef_1 * advantages, coef_2 * advantages)
    if args.off_policy_mask_threshold is not None:
        gap = ((old - logp.detach()) * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1.0)
        loss = loss * ((advantages >= 0) | (gap <= args.off_policy_mask_threshold)).double()
    if entropy_mask is not None:
        loss = loss * entropy_mask
    loss = loss + args.beta * kl
    if args.loss_type in ("grpo", "sapo"):
        value = ((loss * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean() / COUNT
    elif args.loss_type == "bnpo":
        value = (loss * mask).sum() / mask.sum().clamp(min=1.0) / COUNT
    elif args.loss_type == "dr_grpo":
        value = (loss * mask).sum() / (loss.size(0) * args.max_completion_length) / COUNT
    elif args.loss_type == "luspo":
        value = (loss * mask).sum(-1).mean() / COUNT
    else:
        value = (loss * mask).sum() / (items * COUNT / args.steps_per_generation)
    return value


def compute_phi(args: Any, advantages: Tensor, log_ratio: Tensor, mask: Tensor) -> Tensor:
    log_w = torch.clamp((torch.clamp(log_ratio, -20.0, 20.0) * mask).sum(-1, keepdim=True), math.log(1e-8), 20.0)
    k = torch.where(advantages >= 0, args.vespo_k_pos, args.vespo_k_neg)
    lam = torch.where(advantages >= 0, args.vespo_lambda_pos, args.vespo_lambda_neg)
    return torch.exp(lam + k * log_w - lam * log_w.exp())


def compute_our_gradient(args: Any, data: dict[str, Tensor], items: float) -> Tensor:
    share = items * COUNT / args.steps_per_generation
    algorithm = with_micro_batches(translate_algorithm(args), args, rows=ROWS, count=COUNT, num_tokens=share)
    batch = Batch(
        mask=data["mask"],
        group=torch.arange(ROWS * COUNT) // 2,
        reward=data["advantage"],
        logp_old=data["old"],
        logp_ref=data["ref"],
        logp_sampler=data["old"],
    )
    psi = torch.where(data["mask"], data["advantage"][:, None], 0.0)
    logp = data["logp"].clone().requires_grad_()
    out = Forward(logp, entropy=data["entropy"])
    batch = with_selected_tokens(out, batch, psi, algorithm)
    return torch.autograd.grad(surrogate(out, batch, psi, algorithm), logp)[0]


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "beta": {"beta": 0.1},
    "beta without the ratio": {"beta": 0.1, "use_bias_correction_kl": False},
    "high entropy": {"top_entropy_quantile": 0.4},
    "off-policy mask": {"off_policy_mask_threshold": 0.02},
    "wide": {"epsilon": 0.1, "epsilon_high": 3.0},
    "delta": {"delta": 1.4},
    "delta below the clip": {"delta": 1.1, "epsilon_high": 0.4},
}


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_the_gradient_of_each_loss_is_trls(loss_type: str, level: str) -> None:
    for name, options in OPTIONS.items():
        args = make_config(loss_type=loss_type, importance_sampling_level=level, **options)
        for seed in range(3):
            data = make_data(seed)
            logp = data["logp"].clone().requires_grad_()
            items = 1.7 * float(data["mask"].sum())
            loss = compute_trl_loss(args, data, logp, items)
            (expected,) = torch.autograd.grad(loss, logp)
            found = compute_our_gradient(args, data, items)
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12, msg=f"{name}, seed {seed}: differs")


def test_rloos_gradient_is_trls() -> None:
    args, data = make_config(RLOOConfig, beta=0.05), make_data(4)
    mask, logp = data["mask"].double(), data["logp"].clone().requires_grad_()
    ratio = torch.exp(((logp - data["old"]) * mask).sum(1))
    clipped = ratio.clamp(1 - args.epsilon, 1 + args.epsilon)
    loss = -torch.min(ratio * data["advantage"], clipped * data["advantage"]).view(COUNT, ROWS).mean(1).sum() / COUNT
    (expected,) = torch.autograd.grad(loss, logp)
    found = compute_our_gradient(args, data, float(mask.sum()))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_the_entropy_bonus_is_a_mean_per_micro_batch() -> None:
    """Of the chosen tokens alone, where only those of high entropy learn."""
    for quantile in (1.0, 0.5):
        args = make_config(entropy_coef=0.3, top_entropy_quantile=quantile, loss_type="dapo")
        algorithm = with_micro_batches(
            translate_algorithm(args), args, rows=ROWS, count=COUNT, num_tokens=9.0, entropy_coef=0.3
        )
        data = make_data(1)
        entropy = data["entropy"].clone().requires_grad_()
        batch = Batch(mask=data["mask"], group=torch.arange(6) // 2, reward=data["advantage"], logp_old=data["old"])
        psi, out = torch.zeros_like(data["old"]), Forward(data["logp"], entropy=entropy)
        loss = surrogate(out, with_selected_tokens(out, batch, psi, algorithm), psi, algorithm)
        (found,) = torch.autograd.grad(loss, entropy)
        expected = torch.zeros_like(found)
        for rows in (slice(0, 3), slice(3, 6)):
            mask = data["mask"][rows]
            if quantile < 1:
                mask = mask & (data["entropy"][rows] >= torch.quantile(data["entropy"][rows][mask], 1 - quantile))
            expected[rows] = -0.3 * mask / mask.sum() / COUNT
        torch.testing.assert_close(found, expected)


def compute_advantages(args: Any, rewards: Tensor, weights: list[float]) -> Tensor:
    """[B]; groups of two."""
    scored = ~rewards.isnan().all(1)
    total = (rewards * torch.tensor(weights)).nansum(1)
    mask = torch.ones(len(rewards), 2, dtype=torch.bool)
    batch = Batch(
        mask=mask,
        group=torch.arange(len(rewards)) // 2,
        reward=total.double(),
        rewards=rewards.double(),
        reward_names=("a", "b"),
        reward_weights=tuple(weights),
        in_statistics=scored,
    )
    psi = translate_algorithm(args).compute_advantages(batch)[:, 0]
    return torch.where(scored, psi, 0.0)


@pytest.mark.parametrize("how", ["group", "batch", "none", "normalize_then_sum"])
def test_advantages_are_trls(how: str) -> None:
    """By the formulas of TRL 1.16's `_generate_and_score_completions`; a completion that nothing scored has 0."""
    rewards = torch.tensor([[1.0, 0.5], [0.0, 2.0], [3.0, 3.0], [1.0, torch.nan], [0.5, 0.5], [torch.nan, torch.nan]])
    weights = [0.7, 0.3]
    options = {"multi_objective_aggregation": how} if how == "normalize_then_sum" else {"scale_rewards": how}
    found = compute_advantages(make_config(**options), rewards, weights)
    unscored = rewards.isnan().all(1)

    def nanstd(x: Tensor, dim: int) -> Tensor:
        count = (~x.isnan()).sum(dim, keepdim=True)
        squares = (x - torch.nanmean(x, dim, keepdim=True)).square().nansum(dim, keepdim=True)
        return (squares / (count - 1).clamp(min=1)).sqrt()

    if how == "normalize_then_sum":
        grouped = rewards.double().view(3, 2, 2)
        z = (grouped - torch.nanmean(grouped, 1, keepdim=True)) / (nanstd(grouped, 1) + 1e-4)
        total = (z.view(-1, 2) * torch.tensor(weights)).nansum(1)
        total[unscored] = torch.nan
        expected = (total - torch.nanmean(total)) / (nanstd(total, 0) + 1e-4)
    else:
        total = (rewards.double() * torch.tensor(weights)).nansum(1)
        total[unscored] = torch.nan
        grouped = total.view(3, 2)
        expected = (grouped - torch.nanmean(grouped, 1, keepdim=True)).view(-1)
        if how == "group":
            expected = expected / (nanstd(grouped, 1).expand(3, 2).reshape(-1) + 1e-4)
        if how == "batch":
            expected = expected / (nanstd(total, 0) + 1e-4)
    torch.testing.assert_close(found, torch.nan_to_num(expected, nan=0.0).to(found), rtol=1e-6, atol=1e-8)


def test_normalized_advantages_of_rloo_are_trls() -> None:
    rewards = torch.tensor([[1.0, 0.0], [0.0, 0.0], [3.0, 0.0], [1.0, 0.0]])
    found = compute_advantages(make_config(RLOOConfig, beta=0.0, normalize_advantages=True), rewards, [1.0, 0.0])
    leave_one_out = torch.tensor([1.0, -1.0, 2.0, -2.0])
    torch.testing.assert_close(found, (leave_one_out / (leave_one_out.std() + 1e-4)).to(found))
