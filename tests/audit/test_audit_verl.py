"""verl's own functions, by data that they computed (scripts/make_audit_fixtures.py), and the recorder on verl's registry."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import policygrad as pg
from policygrad.audit.findings import audit
from policygrad.errors import ConfigError

DATA = json.loads((Path(__file__).parent / "verl.json").read_text(encoding="utf-8"))
BATCH = DATA["batch"]
ROWS = len(BATCH["reward"])
COMMON = {
    "response_mask": BATCH["response_mask"],
    "old_log_probs": BATCH["old_log_prob"],
    "log_prob": BATCH["log_prob"],
    "reward": BATCH["reward"],
    "group": [i // 4 for i in range(ROWS)],
}
ADVANTAGES = {
    "grpo": "GroupMean, GroupStd(ddof=1, eps=1e-06)",
    "dr_grpo": "GroupMean, to",
    "rloo": "LeaveOneOut",
    "reinforce_plus_plus": "Whiten(eps=1e-08)",
    "reinforce_plus_plus_baseline": "GroupMean, Whiten(eps=1e-08)",
    "opo": "OptimalBaseline(norm=length, leave_one_out=False)",
}
LOSSES = {
    ("vanilla", "token-mean", ROWS): ("Clip(low=0.2, high=0.28), ratio per token", "TokenMean"),
    ("vanilla", "token-mean", 3): (
        "Clip(low=0.2, high=0.28), ratio per token",
        "the token mean is taken over each micro-batch of 3",
    ),
    ("vanilla", "seq-mean-token-mean", ROWS): ("Clip(low=0.2, high=0.28), ratio per token", "SequenceMean"),
    ("vanilla", "seq-mean-token-sum", ROWS): ("Clip(low=0.2, high=0.28), ratio per token", "SequenceSum"),
    ("vanilla", "seq-mean-token-sum-norm", ROWS): (
        "Clip(low=0.2, high=0.28), ratio per token",
        "FixedLength(length=10)",
    ),
    ("gspo", "seq-mean-token-mean", ROWS): ("Clip(low=0.04, high=0.06), ratio per completion", "SequenceMean"),
    ("gpg", "token-mean", ROWS): ("OnPolicy", "TokenMean"),
    ("cispo", "token-mean", ROWS): ("ClippedImportance(low=0.8, high=1.28), ratio per token", "TokenMean"),
    ("sapo", "seq-mean-token-mean", ROWS): ("SigmoidGate(tau_pos=1, tau_neg=1.05)", "SequenceMean"),
    ("geo_mean", "token-mean", ROWS): ("GeometricMean(low=0.2, high=0.28)", "SequenceMean"),
    ("dppo_tv", "token-mean", ROWS): ("DivergenceClip(measure=tv, delta=0.15)", "TokenMean"),
}


def test_every_case_of_the_file_is_tested() -> None:
    assert DATA["versions"]["verl"] == "0.9.1"
    assert set(DATA["advantages"]) == set(ADVANTAGES)
    assert {(case["loss_mode"], case["loss_agg_mode"], case["micro"]) for case in DATA["losses"]} == set(LOSSES)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantages_of_verl(name: str) -> None:
    update = {"mask": BATCH["response_mask"], "group": COMMON["group"], "advantages": DATA["advantages"][name]}
    finding = audit(update | {"reward": BATCH["reward"]}).findings[0]
    assert finding.status == "holds"
    assert ADVANTAGES[name] in finding.message


@pytest.mark.parametrize(
    "case", DATA["losses"], ids=lambda case: f"{case['loss_mode']}-{case['loss_agg_mode']}-{case['micro']}"
)
def test_losses_of_verl(case: dict[str, Any]) -> None:
    gate, average = LOSSES[case["loss_mode"], case["loss_agg_mode"], case["micro"]]
    tensors = {"advantages": DATA["advantages"]["grpo"], "loss": case["loss"], "gradient": case["gradient"]}
    micro = [i // case["micro"] for i in range(ROWS)]
    result = audit(COMMON | tensors | {"micro_batch": micro, "settings": case["settings"]})
    messages = {finding.subject: finding.message for finding in result.findings}
    assert messages["ratio and gate"].startswith(gate)
    assert messages["aggregation"].startswith(average)
    assert result.agrees == (case["micro"] == ROWS)
    if case["loss_mode"] != "geo_mean":  # its value is of a completion, not of a token
        assert next(f for f in result.findings if f.subject == "loss").status == "holds"


def stand_in(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A module with verl's registry and a loss with the signature of its functions."""

    def vanilla(
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str,
        config: Any,
        **_: Any,
    ) -> tuple[Tensor, dict[str, Any]]:
        r = (log_prob - old_log_prob).exp()
        clipped = r.clamp(1 - config.clip_ratio, 1 + config.clip_ratio)
        loss = -torch.minimum(r * advantages, clipped * advantages)
        return (loss * response_mask).sum() / response_mask.sum(), {}

    registry: dict[str, Any] = {"vanilla": vanilla}
    module = ModuleType("verl.trainer.ppo.core_algos")
    module.POLICY_LOSS_REGISTRY = registry  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return registry


def test_the_recorder_wraps_verl_s_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = stand_in(monkeypatch)
    plain, config = registry["vanilla"], SimpleNamespace(clip_ratio=0.2)
    tensors = {
        name: torch.tensor(BATCH[name], dtype=torch.float64) for name in ("response_mask", "log_prob", "old_log_prob")
    }
    psi = torch.tensor(DATA["advantages"]["grpo"], dtype=torch.float64)
    with pg.audit.verl(tmp_path / "update.safetensors") as recorder:
        for start in range(0, ROWS, 3):
            rows = slice(start, start + 3)
            logp = tensors["log_prob"][rows].clone().requires_grad_()
            arguments = (
                tensors["old_log_prob"][rows],
                logp,
                psi[rows],
                tensors["response_mask"][rows],
                "token-mean",
                config,
            )
            loss, _ = registry["vanilla"](*arguments)
            (loss / (ROWS // 3)).backward()  # as the actor does with its number of micro-batches
    assert registry["vanilla"] is plain
    result = audit(recorder.path)
    findings = {finding.subject: finding for finding in result.findings}
    assert findings["ratio and gate"].message.startswith("Clip(low=0.2, high=0.2)")
    assert "each micro-batch of 3" in findings["aggregation"].message
    assert "loss" not in findings  # the function's values are not yet scaled, as the gradient is


def test_a_loss_that_verl_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)
    with pytest.raises(ConfigError, match="loss='ppo' is not in verl's registry; it has vanilla"):
        pg.audit.verl(loss="ppo")


def test_without_verl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verl.trainer.ppo.core_algos", None)
    with pytest.raises(ConfigError, match="needs verl, which cannot be imported"):
        pg.audit.verl()


def test_a_trainer_that_is_no_grpo_trainer() -> None:
    with pytest.raises(ConfigError, match=r"has no _compute_loss, .*use policygrad\.audit\.record"):
        pg.audit.trl(SimpleNamespace())
