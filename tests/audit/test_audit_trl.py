"""TRL's own trainer, recorded while it trains: every loss type of release 1.16.0, and a release with huggingface/trl#6024.

Runs in TRL's environments: make test-audit.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch

pytest.importorskip("trl", reason="TRL is in environments of its own: make test-audit")
pytestmark = pytest.mark.audit

from trl import GRPOConfig  # type: ignore[import-not-found]  # noqa: E402

from doubles.trl_runs import train  # noqa: E402
from policygrad.audit.findings import Audit, audit  # noqa: E402
from policygrad.audit.recording import read  # noqa: E402
from policygrad.findings import Finding  # noqa: E402

VERSION = tuple(int(part) for part in version("trl").split(".")[:3])
FIXED = VERSION >= (1, 9, 1)
newest = pytest.mark.skipif(VERSION < (1, 16), reason="for TRL 1.16.0")

CLIP, SEQUENCE_CLIP = "Clip(low=0.2, high=0.2), ratio per token", "Clip(low=0.2, high=0.2), ratio per completion"
LOSS_TYPES: dict[str, tuple[dict[str, Any], str, str]] = {
    "grpo": ({}, CLIP, "SequenceMean"),
    "bnpo": ({}, CLIP, "the token mean is taken over each micro-batch of 4"),
    "dr_grpo": ({}, CLIP, "FixedLength(length=12)"),
    "dapo": ({}, CLIP, "TokenMean"),
    "cispo": ({"epsilon_high": 1.5}, "ClippedImportance(low=0, high=1.5), ratio per token", "TokenMean"),
    "sapo": ({}, "SigmoidGate(tau_pos=1, tau_neg=1.05), ratio per token", "SequenceMean"),
    "vespo": ({}, "GammaKernel(k_pos=2, lambda_pos=3, k_neg=3, lambda_neg=2)", "TokenMean"),
    "luspo": ({"importance_sampling_level": "sequence"}, SEQUENCE_CLIP, "SequenceSum"),
}
"""Settings, and the gate and the average that the numbers must show."""


def finding(result: Audit, subject: str) -> Finding:
    return next(finding for finding in result.findings if finding.subject == subject)


@newest
def test_every_loss_type_is_tested() -> None:
    """The release documents its loss types in the help of the option."""
    field = GRPOConfig.__dataclass_fields__["loss_type"]
    text = field.metadata["help"]
    assert get_type_hints(GRPOConfig)["loss_type"] is str or get_args(get_type_hints(GRPOConfig)["loss_type"])
    assert all(f"'{name}'" in text for name in LOSS_TYPES), text


@newest
@pytest.mark.parametrize("name", LOSS_TYPES)
def test_a_loss_type_is_named(name: str, tmp_path: Path) -> None:
    settings, gate, average = LOSS_TYPES[name]
    path = train(tmp_path, 2, loss_type=name, **settings)
    result = audit(path)
    assert finding(result, "ratio and gate").message.startswith(gate), str(result)
    assert finding(result, "aggregation").message.startswith(average), str(result)
    assert finding(result, "advantages").message.startswith("GroupMean, GroupStd(ddof=1, eps=0.0001)")
    assert finding(result, "loss").status == "holds"
    assert result.agrees == (name != "bnpo"), str(result)
    assert all(f.error is None or f.error < 1e-6 for f in result.findings)
    batch = read(path)
    assert len(torch.unique(batch.micro_batch)) == 2  # type: ignore[arg-type]


@newest
@pytest.mark.parametrize(
    ("scale", "name", "corrected", "form"),
    [
        ("batch", "GroupMean, BatchStd(of=rewards, ddof=1, eps=0.0001)", True, "r*k3"),
        ("none", "GroupMean, to", False, "k3"),
    ],
)
def test_scale_rewards_and_beta(scale: str, name: str, corrected: bool, form: str, tmp_path: Path) -> None:
    """The KL is multiplied by the ratio unless that is switched off; the numbers tell the two apart."""
    result = audit(train(tmp_path, 2, scale_rewards=scale, beta=0.05, use_bias_correction_kl=corrected))
    assert finding(result, "advantages").message.startswith(name)
    assert f"KLToReference(beta=0.05, form='{form}')" in finding(result, "KL").message
    assert result.agrees, str(result)


@newest
def test_cispo_with_its_default_bound(tmp_path: Path) -> None:
    """Without epsilon_high TRL caps the weight at epsilon, 0.2, which cuts every token's weight to a fifth."""
    result = finding(audit(train(tmp_path, 2, loss_type="cispo")), "ratio and gate")
    assert result.status == "differs"
    assert "bound 0.2 of the importance weight is below 1" in result.message


@pytest.mark.parametrize(("accumulated", "steps"), [(2, 4), (4, 2)])
def test_steps_per_generation(accumulated: int, steps: int, tmp_path: Path) -> None:
    """trl#6024: the loss is divided by the tokens of the rollout, not of the update.

    Since 1.9.1 the rollout's tokens are scaled to the number that an update is expected to have, not to the number that it has.
    """
    settings = {"gradient_accumulation_steps": accumulated, "steps_per_generation": steps, "num_iterations": 1}
    result = audit(train(tmp_path, 1, loss_type="dapo", **settings), expect="dapo")
    average = finding(result, "aggregation")
    assert average.status == "differs"
    assert average.factor is not None
    if FIXED:
        assert f"{accumulated}/{steps} of the rollout's tokens" in average.message
        assert average.factor == pytest.approx(1, abs=0.1)
    else:
        assert "tokens of the whole rollout" in average.message
        assert "trl#6024" in average.message
        assert average.factor == pytest.approx(accumulated / steps, rel=0.1)
    assert finding(result, "expected: dapo, c").factor == pytest.approx(average.factor, rel=1e-5)
