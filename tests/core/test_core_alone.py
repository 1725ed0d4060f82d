"""policygrad.core in a training loop of somebody else's: with torch and nothing more, as docs/extending.md says."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import policygrad as pg
from policygrad.algorithms import ALGORITHMS

EXAMPLE = Path(__file__).parents[2] / "examples" / "core_alone.py"
STEP = """
import json, pkgutil, sys
import torch

before = set(sys.modules)
import policygrad.core

for module in pkgutil.iter_modules(policygrad.core.__path__):
    __import__(f"policygrad.core.{module.name}")
core = sorted(set(sys.modules) - before)

from policygrad.algorithms import GRPO
from policygrad.core.batch import Batch
from policygrad.core.objective import objective, surrogate

logp = torch.full((2, 3), -1.0, requires_grad=True)
batch = Batch(mask=torch.ones(2, 3, dtype=torch.bool), group=torch.zeros(2, dtype=torch.long), reward=torch.tensor([1.0, 0.0]),
              logp_old=logp.detach(), logp_ref=logp.detach())
psi = GRPO.compute_advantages(batch)
surrogate(logp, batch, psi, GRPO).backward()
objective(logp, batch, psi, GRPO)
assert logp.grad[0, 0] < 0 < logp.grad[1, 0]
print(json.dumps([core, sorted(set(sys.modules) - before)]))
"""


@pytest.fixture
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("core_alone", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_core_imports_torch_and_the_standard_library_alone() -> None:
    done = subprocess.run([sys.executable, "-c", STEP], capture_output=True, text=True, check=True)
    core, after_a_step = json.loads(done.stdout)
    outside = {name for name in core if not name.startswith("policygrad.core")}
    assert {name for name in outside if name.startswith("policygrad")} == {"policygrad", "policygrad.errors"}
    packages = {name.partition(".")[0] for name in after_a_step} - {"policygrad", "torch"}
    assert packages <= sys.stdlib_module_names
    rooms = {name.split(".")[1] for name in after_a_step if name.startswith("policygrad.")}
    assert rooms == {"core", "errors", "algorithms"}


@pytest.mark.full
def test_the_example_learns_in_sixty_lines(example: ModuleType) -> None:
    rewards = example.train("grpo", 20)
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.2
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) <= 60


@pytest.mark.full
def test_the_example_takes_every_row_whose_fields_it_fills_and_the_others_name_what_is_missing(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(example, "PROMPTS", 2)
    monkeypatch.setattr(example, "LENGTH", 3)
    for name, algorithm in ALGORITHMS.items():
        missing = algorithm.all_needs - {"logp_old", "logp_sampler", "logp_ref", "selected"}
        missing |= algorithm.forward_needs - {"entropy"}
        if not isinstance(algorithm.update_rule, pg.GradientSteps):
            with pytest.raises(SystemExit, match=f"{name} moves the weights by TrustRegion"):
                example.train(name, 1)
        elif missing:
            with pytest.raises(pg.ConfigError, match=r"needs (Batch|Forward)\.\w+, which is None: "):
                example.train(name, 1)
        else:
            assert 0 <= example.train(name, 1)[0] <= 1
