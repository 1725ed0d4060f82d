"""What the optimizer keeps is on the host while completions are sampled: the same numbers to the bit, and no memory beside them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import policygrad as pg
from doubles.batches import float_batch
from policygrad.errors import ConfigError
from policygrad.learners.base import LearnerSpec
from policygrad.learners.config import LearnerConfig
from policygrad.learners.local.host_memory import HostMemory
from policygrad.learners.local.learner import LocalLearner
from policygrad.learners.local.optimizer import Optimizer
from policygrad.models.loading import load_model
from policygrad.training.engine_setup import compute_resident_bytes

ALGORITHMS = {
    "dr_grpo": pg.DR_GRPO,
    "ppo": replace(pg.PPO, shaping=()),  # with a critic that is a second network
    "prime": replace(pg.PRIME, filters=()),  # with a reward model
    "average": replace(pg.GRPO, reference=pg.Reference(ema=0.5)),  # of the masters, read between updates
}


def test_tensors_that_are_away_hold_no_memory_and_come_back_the_same() -> None:
    host, first, second = HostMemory(), torch.randn(3, 5), torch.randn(7)
    values = first.clone(), second.clone()
    for _ in range(2):
        host.move_out([first, second])
        host.move_out([second])  # it is away already
        assert first.untyped_storage().nbytes() == second.untyped_storage().nbytes() == 0
        assert torch.equal(host.find(first), values[0])
        host.find(second).mul_(2)  # comes back with it
        host.move_back()
        assert torch.equal(first, values[0])
        assert host.find(first) is first
    assert torch.equal(second, 4 * values[1])


def test_part_of_a_tensor_is_not_moved() -> None:
    whole = torch.randn(4, 4)
    with pytest.raises(ValueError, match="shares its memory"):
        HostMemory().move_out([whole[0]])
    assert whole.untyped_storage().nbytes() == 64


def make_learner(folder: Path, algorithm: pg.Algorithm, dtype: str, *, offload: bool) -> LocalLearner:
    config = LearnerConfig(dtype=dtype, offload=offload)
    return LocalLearner(load_model(str(folder), dtype=dtype), LearnerSpec(algorithm, lr=1e-2, steps=8, config=config))


def update(learner: LocalLearner, algorithm: pg.Algorithm) -> pg.Metrics:
    batch = learner.evaluate(float_batch(), algorithm.needs)
    psi = algorithm.compute_advantages(batch)
    return learner.update(algorithm.add_critic_targets(batch), psi, algorithm)


def list_optimizers(learner: LocalLearner) -> list[Optimizer]:
    networks = (learner.critic, learner.reward_model)
    return [learner.optimizer, *(network.optimizer for network in networks if network is not None)]


def resident_bytes(optimizer: Optimizer) -> int:
    """Bytes of its moments, and of masters that are not the model's own parameters."""
    own = [m for n, m in optimizer.masters.items() if m is not optimizer.parameters[n]]
    moments = [x for state in optimizer.rules[0].state.values() for x in state.values() if x.ndim]
    return sum(x.untyped_storage().nbytes() for x in (*own, *moments))


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


@pytest.mark.parametrize(
    ("name", "dtype"), [("dr_grpo", "fp32"), ("ppo", "bf16"), ("prime", "bf16"), ("average", "bf16")]
)
def test_updates_are_equal_to_the_bit_and_nothing_stays_between_them(name: str, dtype: str, random_model: Path) -> None:
    algorithm = ALGORITHMS[name]
    plain, lent = (make_learner(random_model, algorithm, dtype, offload=offload) for offload in (False, True))
    for _ in range(2):
        assert all(resident_bytes(optimizer) == 0 for optimizer in list_optimizers(lent))
        metrics = update(plain, algorithm), update(lent, algorithm)
        assert metrics[1]["time/offload"].value > 0
        assert "time/offload" not in metrics[0]
    assert all(resident_bytes(optimizer) == 0 for optimizer in list_optimizers(lent))
    assert all(resident_bytes(optimizer) > 0 for optimizer in list_optimizers(plain))
    assert_same(plain.state()[0], lent.state()[0])
    assert_same(dict(plain.model.named_parameters()), dict(lent.model.named_parameters()))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp32", marks=pytest.mark.full)])
def test_rollbacks_and_resumed_runs_go_on_as_without(dtype: str, random_model: Path) -> None:
    algorithm = ALGORITHMS["ppo"]
    plain, lent = (make_learner(random_model, algorithm, dtype, offload=offload) for offload in (False, True))
    for learner in (plain, lent):
        update(learner, algorithm)
    tensors, values = lent.state()
    saved = {name: tensor.clone() for name, tensor in tensors.items()}
    update(lent, algorithm)
    lent.restore(saved, values)
    assert all(resident_bytes(optimizer) == 0 for optimizer in list_optimizers(lent))
    resumed = make_learner(random_model, algorithm, dtype, offload=True)
    resumed.restore(saved, values)
    for learner in (plain, lent, resumed):
        update(learner, algorithm)
    assert_same(plain.state()[0], lent.state()[0])
    assert_same(plain.state()[0], resumed.state()[0])


def test_an_update_that_fails_leaves_nothing_on_the_device(random_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = make_learner(random_model, pg.DR_GRPO, "bf16", offload=True)
    batch = float_batch()
    with pytest.raises(pg.NumericsError):
        learner.update(batch, torch.full(batch.mask.shape, float("nan")), pg.DR_GRPO)
    assert resident_bytes(learner.optimizer) == 0


def test_a_server_gets_what_offloading_frees() -> None:
    run = pg.Run(learner=LearnerConfig(dtype="bf16", offload=True), algorithm=pg.get_algorithm("grpo"))
    assert compute_resident_bytes(run, run.algorithm, 10**9) == 4e9  # weights and reference, in bf16


def test_offloading_without_a_gpu_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"learner.offload moves .* learner's device is cpu"):
        pg.train(pg.Run(learner=LearnerConfig(device="cpu", offload=True), output=str(tmp_path / "run")), display=False)
    with pytest.raises(ConfigError, match=r"learner.offload is for a learner in one process"):
        LearnerConfig(offload=True, world_size=2)
