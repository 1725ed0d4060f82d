"""What is never computed does not change the gradient: packing, shared prompts, merged duplicates, skipped completions."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import policygrad as pg
from doubles.batches import VOCABULARY, make_batch, naive_entropy, naive_logp
from doubles.data_fields import by_tokens
from doubles.models import Wrapped
from doubles.selecting import Loudest, OfTheGroup
from policygrad.algorithms import ALGORITHMS
from policygrad.core.batch import PER_COMPLETION, PER_TOKEN
from policygrad.learners.config import LearnerConfig
from policygrad.learners.local.forward import Evaluator, probe
from policygrad.learners.local.learner import LocalLearner
from policygrad.learners.local.network import Network
from policygrad.learners.local.packing import merge_equal, pack
from policygrad.models.loading import load_model


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 60), st.booleans(), st.integers(1, 30))
def test_every_completion_once_and_within_budget(seed: int, budget: int, share: bool, cap: int) -> None:
    batch = make_batch(seed)
    rows = batch.mask.any(1).nonzero().squeeze(1)
    packs = list(pack(batch, rows, budget, share=share, cap=cap))
    assert sorted(int(r) for p in packs for r in p.rows) == rows.tolist()
    for p in packs:
        height, width = p.input_ids.shape
        assert height * width <= budget or height == 1
        assert batch.tokens is not None
        assert torch.equal(p.tokens, torch.where(batch.mask[p.rows], batch.tokens[p.rows], 0))
        if not share:
            assert p.attention.ndim == 2


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 60), st.booleans(), st.integers(1, 30), st.booleans())
def test_whole_groups_are_never_split(seed: int, budget: int, share: bool, cap: int, short: bool) -> None:
    """Whatever the budget; completions of one token read their prompt alone, once, with or without a mask for sharing."""
    batch = make_batch(seed)
    batch = replace(batch, mask=batch.mask & (torch.arange(batch.mask.shape[1]) == 0)) if short else batch
    rows = batch.mask.any(1).nonzero().squeeze(1)
    packs = list(pack(batch, rows, budget, share=share, cap=cap, whole=True))
    assert sorted(int(r) for p in packs for r in p.rows) == rows.tolist()
    groups = [set(batch.group[p.rows].tolist()) for p in packs]
    assert sum(map(len, groups)) == len(set.union(set(), *groups))
    for p, held in zip(packs, groups, strict=True):
        height, width = p.input_ids.shape
        assert height * width <= budget or len(held) == 1
        assert p.attention.ndim == 2 or (share and width <= cap)
        if short:
            assert height == len(held)
            assert p.attention.ndim == 2


def test_rows_over_the_cap_stand_apart_and_padding_stays_small() -> None:
    """A row over the cap keeps the plain mask, which a model may narrow to its window; uneven rows do not wait for the budget."""
    batch = make_batch(5)
    packs = list(pack(batch, batch.mask.any(1).nonzero().squeeze(1), 10_000, cap=8))
    lengths = [(p.positions + 1).amax(1) for p in packs]
    assert {p.attention.ndim for p in packs} == {2, 4}
    assert all(p.input_ids.shape[1] <= 8 for p in packs if p.attention.ndim == 4)
    assert all(int(n.min()) > 8 for p, n in zip(packs, lengths, strict=True) if p.input_ids.shape[1] > 8)
    prompts = tuple(torch.zeros(n, dtype=torch.int64) for n in (100, 40, 38))
    uneven = replace(make_batch(5), prompts=prompts)
    rows = uneven.mask.any(1).nonzero().squeeze(1)
    assert [p.input_ids.shape[0] for p in pack(uneven, rows, 600)] == [1, 2]
    assert [p.input_ids.shape[0] for p in pack(uneven, rows, 10_000)] == [3]


@pytest.fixture(scope="module")
def model(random_model: Path) -> nn.Module:
    return load_model(str(random_model)).double()


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("budget", [1, 40, 10_000])
def test_log_probabilities_equal_the_definition(model: nn.Module, share: bool, split: bool, budget: int) -> None:
    batch = make_batch(5)
    truth = torch.where(batch.mask, naive_logp(model, batch, 0.8), 0)
    got = torch.zeros_like(truth)
    for p in pack(batch, batch.mask.any(1).nonzero().squeeze(1), budget, share=share):
        got[p.rows] = Evaluator(Network(model, split), 0.8, share)(p)
    assert torch.allclose(got, truth, atol=1e-10)


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("cap", [1, 7, 1024])
@pytest.mark.parametrize("short", [False, True])
def test_log_probabilities_of_whole_groups_equal_the_definition(
    model: nn.Module, share: bool, cap: int, short: bool
) -> None:
    batch = make_batch(5)
    batch = replace(batch, mask=batch.mask & (torch.arange(batch.mask.shape[1]) == 0)) if short else batch
    truth = torch.where(batch.mask, naive_logp(model, batch, 0.8), 0)
    got = torch.zeros_like(truth)
    for p in pack(batch, batch.mask.any(1).nonzero().squeeze(1), 40, share=share, cap=cap, whole=True):
        got[p.rows] = Evaluator(Network(model, True), 0.8, share)(p)
    assert torch.allclose(got, truth, atol=1e-10)


@pytest.mark.parametrize("share", [False, True])
def test_a_surrogate_of_whole_groups_is_that_of_the_update(model: nn.Module, share: bool) -> None:
    """Gradient and line search of the vine, with a budget that would split every group, against the definition."""
    algorithm, batch = ALGORITHMS["trpo_vine"], make_batch(11)
    with torch.no_grad():
        logp = naive_logp(model, batch, 1.0)
    noise = torch.randn(batch.mask.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    batch = replace(batch, logp_old=logp + 0.3 * noise, weight=noise.exp())
    psi = algorithm.advantages(batch)
    learner = LocalLearner(model, algorithm, lr=None, steps=1, config=LearnerConfig(micro_tokens=1))
    learner.networks = replace(learner.networks, policy=replace(learner.evaluator, share_prompts=share))
    learner.curvature = replace(learner.curvature, networks=learner.networks)
    problem = learner.problem(batch, psi, algorithm)
    gradient, _ = problem.gradient()
    out = torch.where(batch.mask, naive_logp(model, batch, 1.0), 0)
    expected = torch.autograd.grad(pg.surrogate(out, batch, psi, algorithm), list(model.parameters()))
    flat = torch.cat([g.reshape(-1) for g in expected])
    assert float((gradient + flat).abs().max()) <= 1e-6 * float(flat.abs().max())
    value, _ = problem.evaluate(torch.zeros_like(gradient))
    assert value == pytest.approx(float(pg.objective(out.detach(), batch, psi, algorithm)), abs=1e-6)
    assert abs(value) > 1e-3


def test_chunked_head_is_the_same(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch(6)
    evaluator = Evaluator(Network(model, split_head=True), 1.0, share_prompts=True)
    (whole,) = pack(batch, torch.arange(5), 10_000)
    expected = torch.autograd.grad(evaluator(whole).sum(), list(model.parameters()))
    monkeypatch.setattr("policygrad.learners.local.forward.CHUNK", 3 * len(model.get_output_embeddings().weight))  # type: ignore[operator]
    got = torch.autograd.grad(evaluator(whole).sum(), list(model.parameters()))
    assert all(torch.allclose(a, b, atol=1e-10) for a, b in zip(got, expected, strict=True))


def test_probe_finds_both_short_cuts_and_notices_when_they_do_not_hold(model: nn.Module) -> None:
    found = probe(model, 1.0)
    assert found.network.split_head
    assert found.share_prompts

    class Scaled(Wrapped):
        """A model whose logits are not its head's, and that ignores 4D masks."""

        def forward(self, input_ids: Tensor, attention_mask: Tensor | None, **rest: object) -> object:
            mask = None if attention_mask is None or attention_mask.ndim == 4 else attention_mask
            out = self.inner(input_ids=input_ids, attention_mask=mask, **rest)
            out.logits = out.logits / 2
            return out

    refused = probe(Scaled(model), 1.0)
    assert not refused.network.split_head
    assert not refused.share_prompts


def test_merges_only_what_is_equal() -> None:
    batch = make_batch(1, holes=False)
    psi = torch.ones(batch.mask.shape, dtype=torch.float64)
    rows = torch.arange(12)
    unique, index = merge_equal(batch, psi, rows)
    assert index[0] == index[1]
    assert index[4] == index[5]
    other = psi.clone()
    other[1] = 2.0
    assert len(merge_equal(batch, other, rows)[0]) == len(unique) + 1
    assert len(merge_equal(replace(batch, group=torch.arange(12)), psi, rows)[0]) == 12


@dataclass(frozen=True)
class Weighed(pg.Term):
    """A user's term: k = one of the batch's fields, whichever it is called."""

    field: str
    aggregate: pg.SequenceSum = field(default_factory=pg.SequenceSum)

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        asked = {"logp_sampler", "version", "entropy", "anchor", "example", "baseline", "demonstration"}
        return frozenset({self.field} & asked)  # the others tell completions apart unasked

    def score(self, out: pg.Forward, batch: pg.Batch, psi: Tensor) -> Tensor:
        value = getattr(batch, self.field).double()
        return (value if value.ndim == 2 else value[:, None]).expand(batch.mask.shape)

    def value(self, out: pg.Forward, batch: pg.Batch, psi: Tensor) -> Tensor:
        return self.score(out, batch, psi) * out.logp.detach()


@pytest.mark.parametrize("name", sorted({*PER_TOKEN, *PER_COMPLETION} - {"mask", "group", "tokens"}))
def test_equal_tokens_are_not_merged_where_a_part_could_tell_them_apart(model: nn.Module, name: str) -> None:
    """Completions 0 and 1 have the same tokens and Ψ, and differ in one field, which a user's term reads."""
    batch = make_batch(5, holes=False)
    batch = replace(batch, mask=torch.ones_like(batch.mask))
    whole = batch.mask if name in PER_TOKEN else batch.mask[:, 0]
    bools = ("step_end", "truncated", "in_statistics", "selected", "demonstration")
    whole_numbers = ("version", "anchor", "example")
    kind = torch.bool if name in bools else torch.int64 if name in whole_numbers else torch.float64
    other = torch.zeros(whole.shape, dtype=kind)
    other[1] = 1
    batch, psi = replace(batch, **{name: other}), torch.zeros(batch.mask.shape, dtype=torch.float64)
    algorithm = pg.Algorithm(terms=(Weighed(name),))
    learner = LocalLearner(model, algorithm, lr=0.0, steps=1)
    learner.optimizer.adam.zero_grad()
    learner.problem(batch, psi, algorithm).accumulate()
    got = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    loss = pg.surrogate(naive_logp(model, batch, 1.0), batch, psi, algorithm)
    expected = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    largest = max(float(e.abs().max()) for e in expected if e is not None)
    assert largest > 1e-4
    for g, e in zip(got, expected, strict=True):
        assert e is None or float((g - e).abs().max()) <= 1e-6 * largest


def test_entropy_is_that_of_the_whole_distribution(model: nn.Module) -> None:
    batch = make_batch(5)
    learner = LocalLearner(model, pg.GRPO, lr=0.0, steps=1, temperature=0.7, config=LearnerConfig(micro_tokens=30))
    found = learner.evaluate(batch, frozenset({"entropy"}))
    assert found.logp_old is None  # nobody has asked for it
    assert found.entropy is not None
    for row in batch.mask.any(1).nonzero().flatten().tolist():
        prompt = batch.prompts[int(batch.group[row])]
        logits = model(input_ids=torch.cat([prompt, batch.tokens[row]])[None]).logits[0, len(prompt) - 1 : -1] / 0.7
        entropy = torch.distributions.Categorical(logits=logits).entropy()
        torch.testing.assert_close(found.entropy[row], torch.where(batch.mask[row], entropy, 0.0), rtol=1e-4, atol=1e-5)


def test_what_a_tool_said_in_between_tells_completions_apart(model: nn.Module) -> None:
    """Sampled alike after different tool output: the tokens behind it have other log-probabilities."""
    batch = make_batch(5, holes=False)
    mask, tokens = torch.ones_like(batch.mask), batch.tokens.clone()
    mask[:2, 2] = False
    tokens[1] = tokens[0]
    tokens[1, 2] = (tokens[0, 2] + 1) % VOCABULARY
    batch = replace(batch, mask=mask, tokens=tokens)
    learner = LocalLearner(model, pg.PPO, lr=0.0, steps=1)
    got = learner.evaluate(batch, frozenset({"logp_old"})).logp_old
    with torch.no_grad():
        expected = naive_logp(model, batch, 1.0)
    assert got is not None
    assert float((got - expected)[mask].abs().max()) < 1e-5
    assert float((expected[0, 3:] - expected[1, 3:]).abs().max()) > 1e-4


def test_a_gate_that_needs_its_whole_group_has_those_that_teach_nothing_too(model: nn.Module) -> None:
    """Ψ = 0 skips a completion only where its whole group goes with it."""
    algorithm = pg.Algorithm("of the group", (pg.Accepted(),), pg.Token(), OfTheGroup(), pg.TokenMean())
    batch = make_batch(11)
    with torch.no_grad():
        logp = naive_logp(model, batch, 1.0)
    generator = torch.Generator().manual_seed(0)
    old = logp + 0.3 * torch.randn(batch.mask.shape, generator=generator, dtype=torch.float64)
    right = torch.arange(len(batch.mask)) % 3 == 0
    batch = replace(batch, logp_old=old, reward=right.double())
    psi = algorithm.advantages(batch)
    assert bool(((psi == 0).all(1) & batch.mask.any(1)).any())
    learner = LocalLearner(model, algorithm, lr=0.0, steps=1, config=LearnerConfig(micro_tokens=30))
    learner.optimizer.adam.zero_grad()
    learner.problem(batch, psi, algorithm).accumulate()
    got = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    out = pg.Forward(torch.where(batch.mask, naive_logp(model, batch, 1.0), 0))
    expected = torch.autograd.grad(
        pg.surrogate(out, batch, psi, algorithm), list(model.parameters()), allow_unused=True
    )
    largest = max(float(e.abs().max()) for e in expected if e is not None)
    assert largest > 1e-4
    for g, e in zip(got, expected, strict=True):
        assert e is None or float((g - e).abs().max()) <= 1e-6 * largest


CHOOSING = {"selecting": replace(pg.GRPO, name="selecting", corrections=(Loudest(),))}


@pytest.mark.parametrize("name", [*ALGORITHMS, *CHOOSING])
def test_gradient_is_that_of_the_plain_definition(model: nn.Module, name: str) -> None:
    """The learner's gradient, with every saving on, against autograd through the definition with none."""
    algorithm = (ALGORITHMS | CHOOSING)[name].with_budget(6)
    batch = make_batch(11)
    with torch.no_grad():
        noise = torch.randn(batch.mask.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        logp = naive_logp(model, batch, 1.0)
        near = logp + 0.3 * noise
        for row in range(0, 11, 4):
            near[row + 1] = near[row]
    batch = replace(batch, logp_old=near, logp_ref=near.flip(1), values=near / 9, implicit_reward=near / 7)
    batch = replace(batch, example=7 + batch.group, baseline=batch.group / 3)  # of a prompt, as a rollout fills them
    if "step_end" in algorithm.needs:  # a step per token; equal completions have equal steps
        batch = replace(batch, step_end=batch.mask, token_reward=(batch.tokens % 3).double() * batch.mask)
    batch = algorithm.filtered(by_tokens(batch, algorithm.declared))
    psi, batch = algorithm.advantages(batch), algorithm.with_targets(batch)
    if algorithm.critic is not None:  # a policy that moves, also where its critic is fitted first
        algorithm = replace(algorithm, critic=replace(algorithm.critic, pretrain=0))
    learner = LocalLearner(model, algorithm, lr=0.0, steps=1, config=LearnerConfig(micro_tokens=30))
    learner.optimizer.adam.zero_grad()
    metrics = learner.problem(batch, psi, algorithm).accumulate()
    got = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    entropy = naive_entropy(model, batch, 1.0).detach() if algorithm.select_needs else None
    out = pg.Forward(torch.where(batch.mask, naive_logp(model, batch, 1.0), 0), entropy=entropy)
    loss = pg.surrogate(out, batch, psi, algorithm)
    expected = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    largest = max(float(e.abs().max()) for e in expected if e is not None)
    assert largest > 1e-4
    for g, e in zip(got, expected, strict=True):
        assert e is None or float((g - e).abs().max()) <= 1e-6 * largest  # the model normalises in float32
    plain = replace(learner.problem(batch, psi, algorithm), skip=False, merge=False)  # what a benchmark compares with
    offered = plain.accumulate()["completions/computed"]
    for p, g in zip(model.parameters(), got, strict=True):
        assert p.grad is None or float((p.grad - g).abs().max()) <= 1e-6 * largest
    assert offered.value == metrics["completions/offered"].value
    value = pg.objective(out, batch, psi, algorithm)
    assert metrics["objective"].value == pytest.approx(float(value), abs=1e-6)
    merges = not algorithm.gate.whole_groups
    assert (metrics["completions/computed"].value < metrics["completions/offered"].value) is merges
