"""What is never computed does not change the gradient: trees of texts, skipped completions."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import policygrad as pg
from doubles.batches import VOCABULARY, branching, make_batch, naive_entropy, naive_logp
from doubles.data_fields import by_tokens
from doubles.models import Wrapped
from doubles.selecting import Loudest, OfTheGroup
from policygrad.algorithms import ALGORITHMS
from policygrad.core.batch import PER_COMPLETION, PER_TOKEN
from policygrad.learners.base import LearnerSpec
from policygrad.learners.config import LearnerConfig
from policygrad.learners.local.forward import Evaluator, Network, build_evaluator
from policygrad.learners.local.learner import LocalLearner
from policygrad.learners.local.packing import micro_batch_tokens, pack_micro_batches
from policygrad.learners.local.tree_attention import enable_tree_attention
from policygrad.models.loading import load_model


def texts(batch: pg.Batch, rows: Tensor) -> list[tuple[int, ...]]:
    """What a model reads for each of these completions."""
    assert batch.tokens is not None
    assert batch.prompts is not None
    result = []
    for row in rows.tolist():
        last = int(batch.mask[row].nonzero().max())
        result.append((*batch.prompts[int(batch.group[row])].tolist(), *batch.tokens[row, :last].tolist()))
    return result


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.integers(1, 60), st.booleans(), st.booleans())
def test_every_completion_once_and_within_budget(seed: int, budget: int, full: bool, short: bool) -> None:
    """Whatever the budget, a group that must be whole is; completions of one token read their prompt alone, once."""
    batch = make_batch(seed)
    batch = replace(batch, mask=batch.mask & (torch.arange(batch.mask.shape[1]) == 0)) if short else batch
    rows = batch.mask.any(1).nonzero().squeeze(1)
    packs = list(pack_micro_batches(batch, rows, budget, keep_groups=full))
    assert sorted(int(r) for p in packs for r in p.rows) == rows.tolist()
    groups = [set(batch.group[p.rows].tolist()) for p in packs]
    assert not full or sum(map(len, groups)) == len(set.union(set(), *groups))
    for p, held in zip(packs, groups, strict=True):
        alone = [len(next(pack_micro_batches(batch, r[None], 0)).ids) for r in p.rows]
        assert len(p.ids) <= max(budget, 1.5 * max(alone)) or (full and len(held) == 1)
        assert batch.tokens is not None
        assert torch.equal(p.tokens, torch.where(batch.mask[p.rows], batch.tokens[p.rows], 0))
        assert not short or len(p.paths) <= len(held)


def test_a_long_prompt_is_not_read_anew_for_every_completion() -> None:
    """One completion alone is over the budget: others of its group may add half as much, those of another group nothing."""
    batch = pg.Batch(
        mask=torch.ones(12, 5, dtype=torch.bool),
        group=torch.arange(2).repeat_interleave(6),
        reward=torch.zeros(12),
        tokens=torch.arange(60).view(12, 5),
        prompts=(torch.arange(100, 140), torch.arange(200, 240)),
    )
    packs = list(pack_micro_batches(batch, torch.arange(12), 20))
    assert [(len(p.rows), len(p.ids)) for p in packs] == [(6, 64), (6, 64)]
    apart = replace(batch, prompts=(torch.arange(100, 103), torch.arange(200, 203)))
    assert [len(p.ids) for p in pack_micro_batches(apart, torch.arange(12), 8)] == [7] * 12  # most tokens are new
    generous = [len(p.ids) for p in pack_micro_batches(batch, torch.arange(12), 1000)]
    assert generous == [128]


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.integers(1, 60), st.booleans())
def test_a_tree_has_one_node_per_distinct_prefix(seed: int, budget: int, full: bool) -> None:
    """Its paths spell the texts; its nodes are as many as the texts have different beginnings, its group's alone where it is
    whole, and what predicts a token is the node of all that stands before it."""
    batch = make_batch(seed)
    for p in pack_micro_batches(batch, batch.mask.any(1).nonzero().squeeze(1), budget, keep_groups=full):
        read = texts(batch, p.rows)
        spelt = {tuple(p.ids[path].tolist()) for path in p.paths}
        assert {text + (text[-1],) * (p.paths.shape[1] - len(text)) for text in read} == spelt
        assert torch.equal(p.positions[p.paths].diff(dim=1).clamp(0, 1), p.positions[p.paths].diff(dim=1))
        keyed = zip(read, batch.group[p.rows].tolist() if full else [0] * len(read), strict=True)
        beginnings = {(group, text[: i + 1]) for text, group in keyed for i in range(len(text))}
        assert len(p.ids) == len(beginnings) or (full and len(p.ids) < len(beginnings))
        before = {int(path[i]): tuple(p.ids[path[: i + 1]].tolist()) for path in p.paths for i in range(len(path))}
        for row, text in enumerate(read):
            size = len(batch.prompts[int(batch.group[p.rows[row]])])  # type: ignore[index]
            for t in p.mask[row].nonzero().flatten().tolist():
                node = int(p.predicting_nodes[p.predictor[row, t]])
                assert before[node][: size + t] == text[: size + t]
                assert int(p.positions[node]) == size + t - 1
        assert torch.equal(p.paths.flatten()[p.predicting_positions], p.predicting_nodes)


@pytest.fixture(scope="module")
def model(random_model: Path) -> nn.Module:
    return load_model(str(random_model)).double()


@dataclass
class Definition:
    """`naive_logp` and `naive_entropy` of batches, with their graphs, once for all tests whose batches have the same texts."""

    model: nn.Module
    """A copy that nobody trains, since a graph is invalid once a weight is written to."""
    known: list[tuple[pg.Batch, tuple[Tensor, Tensor]]] = field(default_factory=list)

    def read(self, batch: pg.Batch) -> tuple[Tensor, Tensor]:
        for other, result in self.known:
            if _reads_the_same(batch, other):
                return result
        self.known.append((batch, (naive_logp(self.model, batch, 1.0), naive_entropy(self.model, batch, 1.0))))
        return self.known[-1][1]

    def differentiate(self, loss: Tensor) -> tuple[Tensor | None, ...]:
        return torch.autograd.grad(loss, list(self.model.parameters()), allow_unused=True, retain_graph=True)


@pytest.fixture(scope="module")
def definition(model: nn.Module) -> Definition:
    return Definition(copy.deepcopy(model))


def _reads_the_same(batch: pg.Batch, other: pg.Batch) -> bool:
    """Whether two batches have the same tokens after the same prompts; which of them are counted does not matter."""
    assert batch.tokens is not None
    assert other.tokens is not None
    assert batch.prompts is not None
    assert other.prompts is not None
    return (
        batch.tokens.equal(other.tokens)
        and batch.group.equal(other.group)
        and all(map(torch.equal, batch.prompts, other.prompts))
        and (batch.positions is None) == (other.positions is None)
        and (batch.positions is None or other.positions is None or batch.positions.equal(other.positions))
    )


@pytest.mark.parametrize("branches", [False, True])
@pytest.mark.parametrize("split", [False, True])
def test_log_probabilities_equal_the_definition(model: nn.Module, branches: bool, split: bool) -> None:
    """In micro-batches of any size, with whole groups or not, also of completions of one token."""
    ragged = make_batch(5)
    short = replace(ragged, mask=ragged.mask & (torch.arange(ragged.mask.shape[1]) == 0))
    assert enable_tree_attention(model)
    with torch.no_grad():
        defined = naive_logp(model, ragged, 0.8)
        for batch, budget, full in product((ragged, short), (1, 40, 10_000), (False, True)):
            truth = torch.where(batch.mask, defined, 0)
            got = torch.zeros_like(truth)
            for p in pack_micro_batches(batch, torch.arange(len(got)), budget, keep_groups=full):
                got[p.rows] = Evaluator(Network(model, split, branches), 0.8)(p)
            assert torch.allclose(got, truth, atol=1e-10), (batch is short, budget, full)


def test_texts_longer_than_a_window_are_not_packed_as_trees(model: nn.Module) -> None:
    """There the model's own masks know what its local attention leaves out."""
    batch = make_batch(5)
    (full,) = pack_micro_batches(batch, torch.arange(len(batch.mask)), 10_000)
    length = full.paths.shape[1]
    for window, branches in ((length, True), (length - 1, False), (None, True)):
        evaluator = Evaluator(Network(model, True, use_tree=True), 1.0, window)
        assert evaluator.network_for(full).use_tree is branches


@pytest.mark.parametrize("branches", [False, True])
def test_a_surrogate_over_full_groups_equals_the_updates(model: nn.Module, branches: bool) -> None:
    """Gradient and line search of the vine, with a budget that would split every group, against the definition."""
    algorithm, batch = ALGORITHMS["trpo_vine"], make_batch(11)
    with torch.no_grad():
        logp = naive_logp(model, batch, 1.0)
    noise = torch.randn(batch.mask.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    batch = replace(batch, logp_old=logp + 0.3 * noise, weight=noise.exp())
    psi = algorithm.compute_advantages(batch)
    learner = LocalLearner(model, LearnerSpec(algorithm, lr=None, steps=1, config=LearnerConfig(micro_tokens=1)))
    network = replace(learner.evaluator.network, use_tree=branches)
    learner.networks = replace(learner.networks, policy=replace(learner.evaluator, network=network))
    assert learner.curvature is not None
    learner.curvature = replace(learner.curvature, networks=learner.networks)
    problem = learner.build_problem(batch, psi, algorithm)
    gradient, _ = problem.gradient()
    out = torch.where(batch.mask, naive_logp(model, batch, 1.0), 0)
    expected = torch.autograd.grad(pg.surrogate(out, batch, psi, algorithm), list(model.parameters()))
    flat = torch.cat([g.reshape(-1) for g in expected])
    assert float((gradient + flat).abs().max()) <= 1e-6 * float(flat.abs().max())
    value, _ = problem.evaluate(torch.zeros_like(gradient))
    assert value == pytest.approx(float(pg.objective(out.detach(), batch, psi, algorithm)), abs=1e-6)
    assert abs(value) > 1e-3


def test_the_probe_detects_when_a_shortcut_does_not_hold(model: nn.Module) -> None:
    result = build_evaluator(model, 1.0)
    assert result.network.split_head
    assert result.network.use_tree

    class Scaled(Wrapped):
        """A model whose logits are not its head's, and that keeps trees from its attention."""

        def forward(self, input_ids: Tensor, attention_mask: Tensor | None, **rest: object) -> object:
            mask = None if attention_mask is None or attention_mask.ndim == 4 else attention_mask
            rest.pop("tree", None)
            out = self.inner(input_ids=input_ids, attention_mask=mask, **rest)
            out.logits = out.logits / 2
            return out

    refused = build_evaluator(Scaled(model), 1.0)
    assert not refused.network.split_head
    assert not refused.network.use_tree


@dataclass(frozen=True)
class Weighed(pg.Term):
    """A user's term: k = one of the batch's fields, whichever it is called."""

    field: str
    aggregation: pg.SequenceSum = field(default_factory=pg.SequenceSum)

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        asked = {
            "logp_sampler",
            "version",
            "entropy",
            "sum_pi_squared",
            "turn_state",
            "example_id",
            "level",
            "levels",
            "baseline",
            "demonstration",
        }
        return frozenset({self.field} & asked)  # the others tell completions apart unasked

    def score(self, out: pg.Forward, batch: pg.Batch, psi: Tensor) -> Tensor:
        value = getattr(batch, self.field).double()
        return (value if value.ndim == 2 else value[:, None]).expand(batch.mask.shape)

    def value(self, out: pg.Forward, batch: pg.Batch, psi: Tensor) -> Tensor:
        return self.score(out, batch, psi) * out.logp.detach()


@pytest.mark.parametrize(
    "name",
    sorted(
        {*PER_TOKEN, *PER_COMPLETION}
        - {"mask", "group", "tokens", "positions", "sampling_mask_counts", "has_reference"}  # a term reads it as a mask
    ),
)
def test_equal_completions_are_computed_once_and_counted_twice(
    model: nn.Module, definition: Definition, name: str
) -> None:
    """Completions 0 and 1 have the same tokens and Ψ, and differ in one field, which a user's term reads."""
    batch = make_batch(5, groups=2, holes=False)
    batch = replace(batch, mask=torch.ones_like(batch.mask))
    full = batch.mask if name in PER_TOKEN else batch.mask[:, 0]
    bools = ("step_end", "truncated", "in_statistics", "selected", "demonstration", "observation")
    whole_numbers = ("version", "turn_state", "example_id", "level", "levels", "role", "peers", "teacher")
    whole_numbers += ("reference_spans",)
    kind = torch.bool if name in bools else torch.int64 if name in whole_numbers else torch.float64
    other = torch.zeros(full.shape, dtype=kind)
    other[1] = 1
    batch = replace(batch, role_names=("first", "second"), **{name: other})
    psi = torch.zeros(batch.mask.shape, dtype=torch.float64)
    algorithm = pg.Algorithm(terms=(Weighed(name),))
    learner = LocalLearner(model, LearnerSpec(algorithm, lr=0.0, steps=1))
    learner.optimizer.clear_gradients()
    learner.build_problem(batch, psi, algorithm).accumulate()
    got = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    loss = pg.surrogate(definition.read(batch)[0], batch, psi, algorithm)
    expected = definition.differentiate(loss)
    largest = max(float(e.abs().max()) for e in expected if e is not None)
    assert largest > 1e-4
    for g, e in zip(got, expected, strict=True):
        assert e is None or float((g - e).abs().max()) <= 1e-6 * largest


def test_entropy_and_sum_of_squares_are_over_the_full_vocabulary(model: nn.Module) -> None:
    batch = make_batch(5)
    learner = LocalLearner(
        model, LearnerSpec(pg.GRPO, lr=0.0, steps=1, temperature=0.7, config=LearnerConfig(micro_tokens=30))
    )
    result = learner.evaluate(batch, frozenset({"entropy", "sum_pi_squared"}))
    assert result.logp_old is None  # nobody has asked for it
    assert result.entropy is not None
    assert result.sum_pi_squared is not None
    only = learner.evaluate(batch, frozenset({"sum_pi_squared"}))
    assert only.entropy is None
    assert torch.equal(only.sum_pi_squared, result.sum_pi_squared)  # type: ignore[arg-type]
    reported = replace(batch, logp_old=torch.zeros(batch.mask.shape))  # a sampler's
    both = learner.evaluate(reported, replace(pg.OTB, old_policy="sampler").needs)
    assert torch.equal(both.logp_learner, learner.evaluate(batch, frozenset({"logp_old"})).logp_old)  # type: ignore[arg-type]
    assert both.logp_old is reported.logp_old
    for row in batch.mask.any(1).nonzero().flatten().tolist():
        prompt = batch.prompts[int(batch.group[row])]
        logits = model(input_ids=torch.cat([prompt, batch.tokens[row]])[None]).logits[0, len(prompt) - 1 : -1] / 0.7
        entropy = torch.distributions.Categorical(logits=logits).entropy()
        torch.testing.assert_close(
            result.entropy[row], torch.where(batch.mask[row], entropy, 0.0), rtol=1e-4, atol=1e-5
        )
        squares = torch.where(batch.mask[row], logits.softmax(-1).square().sum(-1), 0)
        torch.testing.assert_close(result.sum_pi_squared[row], squares, rtol=1e-4, atol=1e-7)


def test_tool_output_distinguishes_completions(model: nn.Module) -> None:
    """Sampled alike after different tool output: the tokens behind it have other log-probabilities."""
    batch = make_batch(5, holes=False)
    mask, tokens = torch.ones_like(batch.mask), batch.tokens.clone()
    mask[:2, 2] = False
    tokens[1] = tokens[0]
    tokens[1, 2] = (tokens[0, 2] + 1) % VOCABULARY
    batch = replace(batch, mask=mask, tokens=tokens)
    learner = LocalLearner(model, LearnerSpec(pg.PPO, lr=0.0, steps=1))
    got = learner.evaluate(batch, frozenset({"logp_old"})).logp_old
    with torch.no_grad():
        expected = naive_logp(model, batch, 1.0)
    assert got is not None
    assert float((got - expected)[mask].abs().max()) < 1e-5
    assert float((expected[0, 3:] - expected[1, 3:]).abs().max()) > 1e-4


def test_a_gate_over_full_groups_sees_completions_without_gradient(model: nn.Module) -> None:
    """Ψ = 0 skips a completion only where its whole group goes with it."""
    algorithm = pg.Algorithm("of the group", (pg.RejectionSampling(),), pg.Token(), OfTheGroup(), pg.TokenMean())
    batch = make_batch(11)
    with torch.no_grad():
        logp = naive_logp(model, batch, 1.0)
    generator = torch.Generator().manual_seed(0)
    old = logp + 0.3 * torch.randn(batch.mask.shape, generator=generator, dtype=torch.float64)
    right = torch.arange(len(batch.mask)) % 3 == 0
    batch = replace(batch, logp_old=old, reward=right.double())
    psi = algorithm.compute_advantages(batch)
    assert bool(((psi == 0).all(1) & batch.mask.any(1)).any())
    learner = LocalLearner(model, LearnerSpec(algorithm, lr=0.0, steps=1, config=LearnerConfig(micro_tokens=30)))
    learner.optimizer.clear_gradients()
    learner.build_problem(batch, psi, algorithm).accumulate()
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


OVER_VOCABULARY = ("sdft", "opsd")  # compared with their definition in test_reference_prompts.py
CHOOSING = {"selecting": replace(pg.GRPO, name="selecting", corrections=(Loudest(),))}


KINDS = ("grpo", "gspo", "ppo", "trpo", "prime", "selecting")
"""An algorithm with a reference, one of whole sequences, with a critic, without a learning rate, with steps, with an entropy."""


@pytest.mark.parametrize("several", [False, True], ids=["one text", "several texts"])
@pytest.mark.parametrize("name", KINDS)
def test_gradient_equals_the_definition(model: nn.Module, definition: Definition, name: str, several: bool) -> None:
    check_gradient(model, definition, name, several)


@pytest.mark.full
@pytest.mark.parametrize("several", [False, True], ids=["one text", "several texts"])
@pytest.mark.parametrize("name", [n for n in (*ALGORITHMS, *CHOOSING) if n not in (*OVER_VOCABULARY, *KINDS)])
def test_gradient_of_every_other_algorithm_equals_the_definition(
    model: nn.Module, definition: Definition, name: str, several: bool
) -> None:
    check_gradient(model, definition, name, several)


def check_gradient(model: nn.Module, definition: Definition, name: str, several: bool) -> None:
    """The learner's gradient, with every saving on, against autograd through the definition with none. several: completions fall
    back to an earlier token and go on from there; the definition reads each of their texts alone, the algorithm one row."""
    algorithm = (ALGORITHMS | CHOOSING)[name].with_max_tokens(6)
    batch = branching(make_batch(11)) if several else make_batch(11)
    logp, _ = definition.read(batch)
    with torch.no_grad():
        noise = torch.randn(batch.mask.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        near = logp + 0.3 * noise
        for row in range(0, 11, 4):
            near[row + 1] = near[row]
    batch = replace(batch, logp_old=near, logp_ref=near.flip(1), values=near / 9, implicit_reward=near / 7)
    batch = replace(batch, logp_sampler=near + 0.6)  # some completions are far from it
    batch = replace(batch, example_id=7 + batch.group, baseline=batch.group / 3)  # of a prompt, as a rollout fills them
    if "step_end" in algorithm.needs:  # a step per token; equal completions have equal steps
        batch = replace(batch, step_end=batch.mask, token_reward=(batch.tokens % 3).double() * batch.mask)
    batch = algorithm.apply_filters(by_tokens(batch, algorithm.all_needs))
    psi, batch = algorithm.compute_advantages(batch), algorithm.add_critic_targets(batch)
    if algorithm.critic is not None:  # a policy that moves, also where its critic is fitted first
        algorithm = replace(algorithm, critic=replace(algorithm.critic, pretrain=0))
    learner = LocalLearner(model, LearnerSpec(algorithm, lr=0.0, steps=1, config=LearnerConfig(micro_tokens=30)))
    learner.optimizer.clear_gradients()
    metrics = learner.build_problem(batch, psi, algorithm).accumulate()
    got = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    logp, entropy = definition.read(batch)
    read = algorithm.read_tokens(batch)
    if algorithm.selection_needs:
        entropy = entropy.detach()
    out = pg.Forward(
        torch.where(read, logp, 0), entropy=entropy if algorithm.forward_needs or algorithm.selection_needs else None
    )
    loss = pg.surrogate(out, batch, psi, algorithm)
    expected = definition.differentiate(loss)
    largest = max(float(e.abs().max()) for e in expected if e is not None)
    assert largest > 1e-4
    for g, e in zip(got, expected, strict=True):
        assert e is None or float((g - e).abs().max()) <= 1e-6 * largest  # the model normalises in float32
    plain = replace(learner.build_problem(batch, psi, algorithm), skip_inactive=False)  # what a benchmark compares with
    computed = plain.accumulate()["completions/computed"]
    for p, g in zip(model.parameters(), got, strict=True):
        assert p.grad is None or float((p.grad - g).abs().max()) <= 1e-6 * largest
    assert several or computed.value < metrics["completions/offered"].value  # equal ones once
    value = pg.objective(out, batch, psi, algorithm)
    assert metrics["objective"].value == pytest.approx(float(value), abs=1e-6)
    assert metrics["completions/computed"].value <= computed.value


def test_micro_batch_size_depends_on_device_and_model() -> None:
    model = torch.nn.Linear(10, 10)
    assert micro_batch_tokens(LearnerConfig(), model) == 2048
    assert micro_batch_tokens(LearnerConfig(micro_tokens=7), model) == 7
    with torch.device("meta"):
        large = torch.nn.Linear(5000, 1000)
    assert LearnerConfig().resolve_micro_tokens("cpu", sum(p.numel() for p in large.parameters())) == 1024
    assert LearnerConfig(dtype="bf16").resolve_micro_tokens("cpu", sum(p.numel() for p in large.parameters())) == 2048
    assert micro_batch_tokens(LearnerConfig(), large) == 16384  # no CPU
