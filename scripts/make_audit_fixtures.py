"""Make tests/audit/verl.json: inputs and outputs of verl's own loss and advantage functions, for the tests of `policygrad audit`.

Run in an environment with verl (0.9.1) and policygrad's source on PYTHONPATH, from the repository root:

    python scripts/make_audit_fixtures.py
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

TARGET = Path(__file__).resolve().parents[1] / "tests" / "audit" / "verl.json"
ROWS, WIDTH, SIZE, MICRO = 12, 10, 4, 3
BOUNDS = {
    "dppo_tv": {"clip_ratio_low": 0.15, "clip_ratio_high": 0.15},
    "gspo": {"clip_ratio_low": 0.04, "clip_ratio_high": 0.06},
}
"""Bounds that cut some tokens of this batch."""


def make_batch(seed: int) -> dict[str, Tensor]:
    """A batch in float64: prompts in order, completions of random lengths, ratios around 1."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    lengths = torch.randint(3, WIDTH + 1, (ROWS,), generator=generator)
    logp = -normal(ROWS, WIDTH).abs()
    return {
        "response_mask": (torch.arange(WIDTH) < lengths[:, None]).double(),
        "log_prob": logp,
        "old_log_prob": logp + 0.3 * normal(ROWS, WIDTH),
        "ref_log_prob": logp + 0.2 * normal(ROWS, WIDTH),
        "reward": normal(ROWS),
    }


def advantages(algos: Any, name: str, batch: dict[str, Tensor]) -> Tensor:
    """Call one of verl's estimators."""
    import numpy as np

    mask = batch["response_mask"]
    last = mask.cumsum(1) == mask.sum(1, keepdim=True)
    scores = torch.where(last & (mask > 0), batch["reward"][:, None], 0.0)
    index = np.array([i // SIZE for i in range(ROWS)])
    config = SimpleNamespace(gamma=1.0)
    options: dict[str, Any] = {"token_level_rewards": scores, "response_mask": mask, "config": config}
    if name != "reinforce_plus_plus":
        options["index"] = index
    if name == "dr_grpo":
        return algos.get_adv_estimator_fn("grpo")(**options, norm_adv_by_std_in_grpo=False)[0]  # type: ignore[no-any-return]
    return algos.get_adv_estimator_fn(name)(**options)[0]  # type: ignore[no-any-return]


def make_config(**settings: Any) -> Any:
    """An actor's configuration of verl."""
    from verl.workers.config import ActorConfig

    config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=MICRO, ppo_mini_batch_size=ROWS)
    for name, value in settings.items():
        object.__setattr__(config, name, value)
    return config


def compute_loss(
    function: Callable[..., Any], batch: dict[str, Tensor], mode: str, config: Any, psi: Tensor, micro: int
) -> tuple[Tensor, Tensor]:
    """Sum an update's micro-batches as verl's actor does without a global token count: each divided by their number."""
    logp = batch["log_prob"].clone().requires_grad_()
    total, count = torch.zeros((), dtype=torch.float64), ROWS // micro
    for start in range(0, ROWS, micro):
        rows = slice(start, start + micro)
        mask = batch["response_mask"][rows]
        loss = function(batch["old_log_prob"][rows], logp[rows], psi[rows], mask, mode, config)[0]
        total = total + loss / count
    return total.detach(), torch.autograd.grad(total, logp)[0]


def main() -> None:
    from verl.trainer.ppo import core_algos

    batch = make_batch(0)
    lists = {name: value.tolist() for name, value in batch.items()}
    record: dict[str, Any] = {"versions": {name: version(name) for name in ("verl", "torch")}, "batch": lists}
    record["advantages"] = {
        name: advantages(core_algos, name, batch).tolist()
        for name in ("grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "opo")
    }
    psi = advantages(core_algos, "grpo", batch)
    clip = {
        "clip_ratio": 0.2,
        "clip_ratio_low": 0.2,
        "clip_ratio_high": 0.28,
        "clip_ratio_c": 3.0,
        "tau_pos": 1.0,
        "tau_neg": 1.05,
    }
    cases = [
        ("vanilla", "token-mean", ROWS),
        ("vanilla", "token-mean", MICRO),
        ("vanilla", "seq-mean-token-mean", ROWS),
        ("vanilla", "seq-mean-token-sum", ROWS),
        ("vanilla", "seq-mean-token-sum-norm", ROWS),
        ("gspo", "seq-mean-token-mean", ROWS),
        ("gpg", "token-mean", ROWS),
        ("cispo", "token-mean", ROWS),
        ("sapo", "seq-mean-token-mean", ROWS),
        ("geo_mean", "token-mean", ROWS),
        ("dppo_tv", "token-mean", ROWS),
    ]
    record["losses"] = []
    for name, mode, micro in cases:
        settings = clip | BOUNDS.get(name, {})
        config = make_config(**settings)
        loss, gradient = compute_loss(core_algos.get_policy_loss_fn(name), batch, mode, config, psi, micro)
        case = {"loss_mode": name, "loss_agg_mode": mode, "micro": micro, "settings": settings}
        case |= {"loss": float(loss), "gradient": gradient.tolist()}
        record["losses"].append(case)
    TARGET.write_text(json.dumps(record), encoding="utf-8")
    print(f"{TARGET}: {len(record['losses'])} losses, {len(record['advantages'])} advantages of verl {version('verl')}")


if __name__ == "__main__":
    main()
