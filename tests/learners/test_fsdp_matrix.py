"""The equality table: every named algorithm, and parts that none of them has, on one to four processes against one without any."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import policygrad as pg
from doubles.algorithms import runnable
from doubles.batches import branching
from doubles.ranked import agree, filled, learned, model, pair, started, values
from policygrad.algorithms import ALGORITHMS
from policygrad.learners.fsdp.processes import WorkerGroup
from policygrad.models.adapters import add_adapters
from policygrad.models.lora_config import Lora

TWICE = pg.GradientSteps(epochs=2, minibatches=2)
PARTS = {
    "vapo, its critic fitted": replace(pg.VAPO, critic=replace(pg.VAPO.critic, pretrain=0)),  # type: ignore[arg-type, type-var]
    "ppo, a head alone": replace(pg.PPO, critic=pg.Critic(backbone="policy", hidden=5)),
    "exact norms": replace(pg.OPO, advantage=(pg.OptimalBaseline(norm="exact"),)),
    "exact KL to the old policy": replace(pg.DR_GRPO, terms=(pg.ExactKLToOld(0.3),), update_rule=TWICE),
    "exact KL to the reference": replace(pg.DR_GRPO, terms=(pg.ExactKLToReference(0.2),)),
    "exact KL to a teacher": replace(
        runnable("distill"), terms=(pg.ExactKLToReference(0.2),), advantage=(pg.TeacherLogRatio(0.0),)
    ),
    "an implicit reward model that starts as another model": replace(pg.PRIME, reference=pg.Reference(model="tiny")),
    "exact entropy": replace(pg.DR_GRPO, terms=(pg.ExactEntropy(0.1),)),
    "a sampled Fisher matrix": replace(pg.TRPO, update_rule=pg.TrustRegion(fisher="sampled", fisher_fraction=0.5)),
    "a reference that is renewed": replace(pg.GRPO, reference=pg.Reference(refresh_every=1, reset_optimizer=True)),
    "a live teacher": replace(pg.SDPO, reference=pg.Reference(live=True, templates=("{answer} {prompt}",))),
    "an average as teacher": replace(pg.OPSD, reference=pg.Reference(ema=0.5, templates=("{answer} {prompt}",))),
}
# The sign of log r is rounding's where r is 1: as after drawing by another policy it is not. Of equal completions in different
# micro-batches rounding decides whose entropy is larger: with this fraction all of them are among the highest, or none.
APART = {
    "kl_cov": replace(pg.KL_COV, old_policy="sampler"),
    "high_entropy": replace(pg.HIGH_ENTROPY, corrections=(pg.HighEntropy(0.4),)),
}
TABLE = {name: runnable(name) for name in ALGORITHMS} | APART | PARTS
COARSE = {name: 1e-10 for name, a in TABLE.items() if not a.update_rule.uses_lr}
COARSE["a sampled Fisher matrix"] = 1e-8
"""Relative: ten steps of a conjugate gradient enlarge rounding, by up to the condition number of the Fisher matrix, which is larger
where fewer samples make it."""


def compared(
    ranks: WorkerGroup,
    algorithm: pg.Algorithm,
    tolerance: float = 1e-12,
    dtype: torch.dtype = torch.float64,
    make: Any = model,
    steps: int = 1,
    several: bool = False,
    **changes: Any,
) -> None:
    """Metrics, and all that a checkpoint holds, after some steps."""
    algorithm = algorithm.with_max_tokens(6).with_state(algorithm.with_max_tokens(6).init_state())
    local, ranked, full = pair(ranks, algorithm, make, **changes)
    batch = branching(filled(algorithm, dtype)) if several else filled(algorithm, dtype)
    for _ in range(steps):
        expected, result = (values(learned(learner, algorithm, batch)) for learner in (local, ranked))
        assert result.pop("completions/computed", 0) >= expected.pop(
            "completions/computed", 0
        )  # by smaller micro-batches
        coarse = max(1e-9, tolerance) if algorithm.critic is None else 1e-6
        assert result == pytest.approx(expected, rel=coarse, abs=max(1e-12, tolerance))
        assert any(result[name] for name in ("updates/taken", "value_pretraining") if name in result)
    agree(local, ranked, tolerance)
    ranked.publish()
    state, _ = ranked.state()
    moved = {n: p for n, p in full.named_parameters() if p.requires_grad}
    assert all(torch.equal(p, state[f"weights/{n}"].to(p.dtype)) for n, p in moved.items())


def failures(cases: dict[str, Any]) -> dict[str, str]:
    """What each case complains of; none hides another."""
    result = {}
    for name, case in cases.items():
        try:
            case()
        except AssertionError as error:
            result[name] = str(error)
    return result


KINDS = ("grpo", "gspo", "ppo", "trpo", "prime", "exact norms", "exact KL to the reference")
"""What a learner does otherwise for one algorithm than for another."""


@pytest.mark.full
@pytest.mark.parametrize(
    ("size", "names"),
    [(2, tuple(TABLE)), (1, KINDS), (3, (*KINDS, "an average as teacher")), (4, KINDS)],
    ids=("2", "1", "3", "4"),
)
def test_several_processes_equal_one(size: int, names: tuple[str, ...]) -> None:
    """Two for every algorithm, other numbers of them for each kind."""
    with started(size) as ranks:
        cases = {name: partial(compared, ranks, TABLE[name], COARSE.get(name, 1e-12)) for name in names}
        assert failures(cases) == {}


@pytest.mark.full
def test_two_processes_equal_one_for_references_that_read_other_prompts() -> None:
    names = ("opsd", "a live teacher", "an average as teacher")  # all others: the table above
    with started(2) as ranks:
        assert failures({name: partial(compared, ranks, TABLE[name], steps=2) for name in names}) == {}
        live = replace(pg.OPSD, reference=TABLE["a live teacher"].reference)
        with pytest.raises(pg.ConfigError, match=r"live=True.*several processes cannot: set ema=1\.0"):
            compared(ranks, live)


@pytest.mark.full
def test_two_processes_equal_one_for_branching_episodes() -> None:
    with started(2) as ranks:
        cases = {n: partial(compared, ranks, TABLE[n], COARSE.get(n, 1e-12), several=True) for n in KINDS}
        assert failures(cases) == {}


@pytest.mark.full
def test_two_processes_equal_one_in_float32_for_some_algorithms() -> None:
    """Not those of many updates, or with a conjugate gradient: in one process, too, they depend on the micro-batches by more."""
    names = ("grpo", "gspo", "prime", "opo")
    with started(2) as ranks:
        cases: dict[str, Any] = {
            name: partial(compared, ranks, runnable(name), 1e-5, torch.float32, partial(model, torch.float32))
            for name in names
        }
        assert failures(cases) == {}


FLOAT32 = {"dapo": 1.5e-6, "prorl": 1.5e-6, "vespo": 1.5e-6}
"""Where float32 in one process is at least 7.4e-7 from float64 already."""


def direction(learner: Any) -> Tensor:
    """[P] AdamW's first moment of all weights: after one update it is the gradient, times 0.1."""
    state, _ = learner.state()
    names = [name for name in state if name.startswith("adam/") and name.endswith("/exp_avg")]
    return torch.cat([state[name].double().flatten() for name in names])


def close(ranks: WorkerGroup, algorithm: pg.Algorithm, tolerance: float) -> None:
    """The gradient of one update in float32, relative to its norm."""
    algorithm = replace(algorithm, update_rule=pg.GradientSteps()).with_max_tokens(6)
    algorithm = algorithm.with_state(algorithm.init_state())
    local, ranked, _ = pair(ranks, algorithm, partial(model, torch.float32))
    for learner in (local, ranked):
        learned(learner, algorithm, filled(algorithm, torch.float32))
    expected, result = direction(local), direction(ranked)
    assert float(expected.norm()) > 0
    assert float((result - expected).norm()) <= tolerance * float(expected.norm())


@pytest.mark.full
def test_every_gradient_in_float32() -> None:
    """Of all that take gradient steps; later ones carry on what was rounded. Not vapo, whose first steps are its critic's (it is
    there with a fitted one), nor ppo_penalty, which wants several updates, nor references that are another model, in float64 here,
    or take the moments with them when they are renewed."""
    named = {
        n: a for n, a in TABLE.items() if a.reference is None or not (a.reference.model or a.reference.reset_optimizer)
    }
    taken = {
        n: a
        for n, a in named.items()
        if isinstance(a.update_rule, pg.GradientSteps) and n not in ("vapo", "ppo_penalty")
    }
    assert len(taken) >= 45
    with started(2) as ranks:
        assert failures({n: partial(close, ranks, a, FLOAT32.get(n, 1e-6)) for n, a in taken.items()}) == {}


def adapted(moved: bool, dtype: torch.dtype = torch.float64) -> nn.Module:
    """With adapters of rank 3 in every linear layer."""
    made = add_adapters(model(dtype), Lora(rank=3, alpha=6.0))
    for name, parameter in made.named_parameters():
        if moved and "lora_B" in name:
            nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(len(name)))
    return made


LORA = {
    "grpo": pg.GRPO,
    "ppo": pg.PPO,
    "trpo": replace(pg.TRPO, advantage=(pg.GroupMean(),), critic=None, update_rule=pg.TrustRegion(cg_iters=3)),
    "prime": pg.PRIME,
    "exact norms": PARTS["exact norms"],
    "exact KL to the reference": PARTS["exact KL to the reference"],
    "exact KL to the old policy": PARTS["exact KL to the old policy"],
    "a reference that is renewed": PARTS["a reference that is renewed"],
    "opsd": pg.OPSD,
    "a live teacher": PARTS["a live teacher"],
    "an average as teacher": PARTS["an average as teacher"],
}


@pytest.mark.full
def test_two_processes_equal_one_with_adapters() -> None:
    """New ones, whose reference is the model without them, and such as have moved."""
    pytest.importorskip("peft")
    with started(2) as ranks:
        cases: dict[str, Any] = {
            f"{name}, {'moved' if moved else 'new'}": partial(
                compared,
                ranks,
                algorithm,
                1e-12 if algorithm.update_rule.uses_lr else 1e-10,
                make=partial(adapted, moved),
                steps=2,
                config=pg.LearnerConfig(micro_tokens=24, lora="rank=3"),
            )
            for name, algorithm in LORA.items()
            for moved in (False, True)
        }
        assert failures(cases) == {}
