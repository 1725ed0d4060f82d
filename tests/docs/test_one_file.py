"""The one-file example is the library in miniature: the same gradients, and it learns."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

import policygrad as pg

NAMES = ["reinforce", "rloo", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "sapo"]
PATH = Path(__file__).parents[2] / "examples" / "one_file.py"


@pytest.fixture(scope="module")
def one_file() -> ModuleType:
    spec = importlib.util.spec_from_file_location("one_file", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["one_file"] = module  # its dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_it_imports_torch_and_the_standard_library_only() -> None:
    tree = ast.parse(PATH.read_text(encoding="utf-8"))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in imported} - {"torch"} <= sys.stdlib_module_names
    assert len(PATH.read_text(encoding="utf-8").splitlines()) <= 250


def test_its_table_is_part_of_the_matrix(one_file: ModuleType) -> None:
    """The rows that need no critic and no second look at the reference, in the matrix' order."""
    assert list(one_file.ALGORITHMS) == NAMES == [name for name in pg.ALGORITHMS if name in NAMES]


@pytest.mark.parametrize("name", NAMES)
def test_its_gradients_are_the_librarys(one_file: ModuleType, name: str) -> None:
    for seed, off_policy in enumerate((0.0, 3e-4, 0.15, 1.5)):
        check_gradient(one_file, name, seed, off_policy)


def check_gradient(one_file: ModuleType, name: str, seed: int, off_policy: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    B, T = 20, 6

    def normal() -> torch.Tensor:
        return torch.randn(B, T, generator=generator, dtype=torch.float64)

    def chance(p: float, *shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator) < p

    mask = (torch.arange(T) < torch.randint(T + 1, (B, 1), generator=generator)) & ~chance(0.2, B, T)
    logp = torch.where(mask, -normal().exp(), float("nan")).requires_grad_()
    old, ref = logp.detach() + off_policy * normal(), logp.detach() + 0.3 * normal()
    reward = torch.where(mask.any(1), torch.randint(2, (B,), generator=generator).double(), float("nan"))
    group, truncated = torch.randint(4, (B,), generator=generator), chance(0.2, B)

    roll = one_file.Rollout(mask, group, reward, old, ref, truncated)
    (mine,) = torch.autograd.grad(one_file.surrogate(logp, roll, one_file.ALGORITHMS[name]), logp)

    algorithm = pg.get_algorithm(name)
    batch = pg.Batch(mask=mask, group=group, reward=reward, logp_old=old, logp_ref=ref, truncated=truncated)
    batch = algorithm.apply_filters(batch)
    (theirs,) = torch.autograd.grad(pg.surrogate(logp, batch, algorithm.compute_advantages(batch), algorithm), logp)
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12 * float(theirs.abs().max()))
    assert theirs.abs().max() > 0


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tensors this small are faster on one core."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "grpo" else pytest.mark.full) for name in NAMES]
)
def test_it_learns(one_file: ModuleType, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    rewards = one_file.train(name, steps=50, seed=0)
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.1
    assert f"{name}    0  reward" in capsys.readouterr().out
