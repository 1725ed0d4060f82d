"""Completions that are several texts: a token counts where it was sampled, behind what was read there, an episode counts once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import policygrad as pg
from doubles.batches import branching, make_batch, naive_logp, written
from policygrad.learners.base import LearnerSpec
from policygrad.learners.config import LearnerConfig
from policygrad.learners.local.forward import Evaluator, Network, build_evaluator
from policygrad.learners.local.learner import LocalLearner
from policygrad.learners.local.packing import Pack, pack_micro_batches
from policygrad.learners.local.score_norms import ScoreNorms
from policygrad.learners.local.tree_attention import enable_tree_attention
from policygrad.models.loading import load_model


@pytest.fixture(scope="module")
def model(random_model: Path) -> nn.Module:
    return load_model(str(random_model)).double()


def before(batch: pg.Batch, row: int, token: int) -> tuple[int, ...]:
    """What is read before a token."""
    for first, end, ids in written(batch, row):
        if first <= token < end:
            return tuple(ids[: len(ids) - (end - token)].tolist())
    raise AssertionError(token)


def read(batch: pg.Batch, row: int) -> set[tuple[int, ...]]:
    """The texts of a completion, each up to the last token that is predicted there."""
    result = set()
    for first, end, _ in written(batch, row):
        if batch.mask[row, first:end].any():
            result.add(before(batch, row, first + int(batch.mask[row, first:end].nonzero().max())))
    return result


def spelt(part: Pack) -> dict[int, tuple[int, ...]]:
    """Each node, and the tokens up to it; behind a text its last one is repeated."""
    result: dict[int, tuple[int, ...]] = {}
    for path in part.paths:
        for i, node in enumerate(path.tolist()):
            result.setdefault(node, tuple(part.ids[path[: i + 1]].tolist()))
    return result


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.integers(1, 60), st.booleans())
def test_completions_are_not_split_and_prefixes_are_read_once(seed: int, budget: int, full: bool) -> None:
    batch = branching(make_batch(seed), seed)
    rows = batch.mask.any(1).nonzero().squeeze(1)
    packs = list(pack_micro_batches(batch, rows, budget, keep_groups=full))
    assert sorted(int(r) for p in packs for r in p.rows) == rows.tolist()
    for p in packs:
        assert torch.equal(p.mask, batch.mask[p.rows])
        held = set(batch.group[p.rows].tolist())
        alone = [len(next(pack_micro_batches(batch, r[None], 0)).ids) for r in p.rows]
        assert len(p.ids) <= max(budget, 1.5 * max(alone)) or (full and len(held) == 1)
        texts = set.union(*(read(batch, int(row)) for row in p.rows))
        assert len(p.ids) == len({text[: i + 1] for text in texts for i in range(len(text))})
        known = spelt(p)
        assert texts <= set(known.values())
        for i, row in enumerate(p.rows.tolist()):
            for t in p.mask[i].nonzero().flatten().tolist():
                node, text = int(p.predicting_nodes[p.predictor[i, t]]), before(batch, row, t)
                assert known[node] == text
                assert int(p.positions[node]) == len(text) - 1
                assert int(p.tokens[i, t]) == int(batch.tokens[row, t])  # type: ignore[index]
        assert torch.equal(p.paths.flatten()[p.predicting_positions], p.predicting_nodes)
        assert p.completions <= len(p.rows)


def test_given_positions_of_unbranched_texts_change_nothing() -> None:
    batch = make_batch(5)
    sizes = torch.tensor([len(p) for p in batch.prompts or ()])[batch.group]
    output = replace(batch, positions=sizes[:, None] + torch.arange(batch.mask.shape[1]))
    for one, other in zip(
        pack_micro_batches(batch, torch.arange(12), 30), pack_micro_batches(output, torch.arange(12), 30), strict=True
    ):
        names = (
            "rows",
            "ids",
            "positions",
            "paths",
            "predicting_nodes",
            "predicting_positions",
            "predictor",
            "tokens",
            "mask",
        )
        for name in names:
            assert torch.equal(getattr(one, name), getattr(other, name)), name


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("split", [False, True])
def test_log_probabilities_equal_the_definition(model: nn.Module, tree: bool, split: bool) -> None:
    """In micro-batches of any size."""
    batch = branching(make_batch(5))
    assert any(len(read(batch, row)) > 1 for row in range(12))
    assert enable_tree_attention(model)
    with torch.no_grad():
        truth = torch.where(batch.mask, naive_logp(model, batch, 0.8), 0)
        for budget in (1, 40, 10_000):
            got = torch.zeros_like(truth)
            for p in pack_micro_batches(batch, torch.arange(len(got)), budget):
                got[p.rows] = Evaluator(Network(model, split, tree), 0.8)(p)
            assert torch.allclose(got, truth, atol=1e-10), budget


def test_a_node_has_the_experts_of_its_token() -> None:
    """Told by the token's own id, so that a wrong place shows."""
    batch = branching(make_batch(7))
    assert batch.tokens is not None
    assert batch.prompts is not None
    batch = replace(
        batch,
        routed_experts=batch.tokens[:, :, None, None],
        prompt_routed_experts=tuple(p[:, None, None] for p in batch.prompts),
    )
    for p in pack_micro_batches(batch, torch.arange(len(batch.mask)), 50):
        assert p.routes is not None
        assert torch.equal(p.routes[:, 0, 0], p.ids)


def test_a_score_norm_covers_all_texts_of_an_episode(model: nn.Module) -> None:
    """Whether completions are taken one by one or together."""
    batch = branching(make_batch(5, groups=2))
    norms = ScoreNorms.of(build_evaluator(model, 1.0), LearnerConfig())
    total = torch.where(batch.mask, naive_logp(model, batch, 1.0), 0).sum(1)
    expected = torch.zeros(len(total), dtype=torch.float64)
    for i in batch.mask.any(1).nonzero().flatten().tolist():
        score = torch.autograd.grad(total[i], list(model.parameters()), retain_graph=True)
        expected[i] = sum(float(g.square().sum()) for g in score)
    for together in (False, True):
        result = replace(norms, batched=together).evaluate(batch).grad_logp_sq_norm
        torch.testing.assert_close(result, expected, rtol=1e-6, atol=0)  # the model normalises in float32


@pytest.mark.parametrize("backbone", ["separate", "policy"])
def test_a_truncated_episode_bootstraps_from_its_last_text(random_model: Path, backbone: str) -> None:
    critic = pg.Critic(backbone=backbone)  # type: ignore[arg-type]
    algorithm = replace(pg.PPO, shaping=(), critic=critic, advantage=(pg.GAE(bootstrap=True),))
    network = load_model(str(random_model))
    learner = LocalLearner(
        network, LearnerSpec(algorithm, lr=0.0, steps=1, config=LearnerConfig(dtype="fp32", micro_tokens=16))
    )
    assert learner.critic is not None
    head = learner.critic.network.head
    nn.init.normal_(head.weight, generator=torch.Generator().manual_seed(0))  # type: ignore[arg-type, union-attr]
    batch = branching(make_batch(4))
    batch = replace(batch, truncated=torch.ones(len(batch.mask), dtype=torch.bool), reward=batch.reward.float())
    result = learner.evaluate(batch, algorithm.needs).bootstrap
    assert result is not None
    trunk = learner.critic.network.backbone if backbone == "separate" else network.get_decoder()
    for row in range(len(batch.mask)):
        expected = torch.zeros(())
        if batch.mask[row].any():
            last = int(batch.mask[row].nonzero().max())
            ids = torch.tensor([*before(batch, row, last), int(batch.tokens[row, last])])  # type: ignore[index]
            with torch.no_grad():
                expected = head(trunk(input_ids=ids[None]).last_hidden_state[0, -1]).squeeze()
        torch.testing.assert_close(result[row], expected, rtol=1e-4, atol=1e-5)


TWO = pg.Batch(
    mask=torch.tensor([[1, 1, 0, 0, 1, 1], [1, 1, 1, 0, 0, 0]]).bool(),
    group=torch.zeros(2, dtype=torch.int64),
    reward=torch.tensor([0.0, 1.0], dtype=torch.float64),
    tokens=torch.tensor([[3, 4, 5, 6, 7, 8], [9, 10, 11, 0, 0, 0]]),
    prompts=(torch.tensor([1, 2]),),
    positions=torch.tensor([[2, 3, 2, 3, 4, 5], [2, 3, 4, 0, 0, 0]]),
)
"""Prompt 1 2. The first episode says 3 4; that turn is then written as 5, it is told 6, and says 7 8. The second says 9 10 11."""
BY_HAND = {
    "SequenceMean": lambda a, b: (-1 * a.mean() + 2 * b.mean()) / 2,
    "SequenceSum": lambda a, b: (-1 * a.sum() + 2 * b.sum()) / 2,
    "TokenMean": lambda a, b: (-1 * a.sum() + 2 * b.sum()) / 7,
    "FixedLength": lambda a, b: (-1 * a.sum() + 2 * b.sum()) / (2 * 20),
    "Sequence": lambda a, b: (-1 * a.log().mean().exp() + 2 * b.log().mean().exp()) / 2,
}
"""The objective of Ψ = −1 and 2, of the four ratios of the first episode and the three of the second."""


@pytest.mark.parametrize("name", BY_HAND)
def test_an_episode_of_two_texts_by_hand(model: nn.Module, name: str) -> None:
    ratio = pg.Sequence() if name == "Sequence" else pg.Token()
    parts = {"SequenceSum": pg.SequenceSum(), "TokenMean": pg.TokenMean(), "FixedLength": pg.FixedLength(20)}
    algorithm = pg.Algorithm("by hand", (pg.GroupMean(),), ratio, pg.Importance(), parts.get(name, pg.SequenceMean()))

    def logp(*ids: int, last: int) -> Tensor:
        result = model(input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        return result.gather(1, torch.tensor(ids)[1:, None])[-last:, 0]

    first = torch.cat([logp(1, 2, 3, 4, last=2), logp(1, 2, 5, 6, 7, 8, last=2)])
    second = logp(1, 2, 9, 10, 11, last=3)
    old = torch.zeros(2, 6, dtype=torch.float64)
    old[0, [0, 1, 4, 5]] = first.detach() + 0.2 * torch.arange(4)
    old[1, :3] = second.detach() - 0.3 * torch.arange(3)
    psi = torch.tensor([[-1.0], [2.0]], dtype=torch.float64) * TWO.mask
    learner = LocalLearner(model, LearnerSpec(algorithm, lr=0.0, steps=1, config=LearnerConfig(micro_tokens=3)))
    learner.optimizer.clear_gradients()
    learner.build_problem(replace(TWO, logp_old=old), psi, algorithm).accumulate()
    got = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
    ratios = (first - old[0, [0, 1, 4, 5]]).exp(), (second - old[1, :3]).exp()
    expected = torch.autograd.grad(-BY_HAND[name](*ratios), list(model.parameters()))
    largest = max(float(e.abs().max()) for e in expected)
    assert largest > 1e-4
    assert all(float((g - e).abs().max()) <= 1e-6 * largest for g, e in zip(got, expected, strict=True))


@pytest.mark.parametrize("algorithm", [pg.GRPO, pg.DR_GRPO, pg.MAXRL], ids=lambda a: a.name)
def test_groups_count_episodes_not_texts(algorithm: pg.Algorithm) -> None:
    plain = replace(TWO, mask=TWO.mask[:, :1], tokens=None, prompts=None, positions=None)
    psi = algorithm.compute_advantages(TWO)
    assert torch.equal(psi[TWO.mask], algorithm.compute_advantages(plain)[:, 0].repeat_interleave(TWO.lengths))
