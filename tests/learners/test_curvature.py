"""TRPO on language models: Fisher products against the matrix, the KL against its definition, δ kept, runs that resume."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

import policygrad as pg
from doubles.cases import keep_fast
from doubles.files import same, weights
from doubles.tabular_learner import TabularLearner, TabularProblem
from doubles.trackers import Record
from policygrad.learners.base import LearnerSpec
from policygrad.learners.config import LearnerConfig
from policygrad.learners.local import curvature
from policygrad.learners.local.learner import LocalLearner
from policygrad.learners.local.updates import LocalProblem
from policygrad.models.loading import load_model, resolve_model
from policygrad.training.config.run import Run
from policygrad.training.trainer import train

VOCABULARY, TEMPERATURE = 11, 0.7
PLAIN = {"vocab_size": VOCABULARY, "hidden_size": 8, "eos_token_id": 1, "pad_token_id": 0, "initializer_range": 0.5}
LLAMA = PLAIN | {"intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16, "initializer_range": 0.5}
MODELS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: tf.GPT2Config(**GPT2, eos_token_id=1, bos_token_id=1),
    "llama, tied head": lambda: tf.LlamaConfig(**LLAMA | {"num_hidden_layers": 2}, tie_word_embeddings=True),
    "llama, head of its own": lambda: tf.LlamaConfig(**LLAMA, tie_word_embeddings=False),
    "granite, scaled logits": lambda: tf.GraniteConfig(**LLAMA, logits_scaling=2.0),
    "bloom, no forward mode": lambda: tf.BloomConfig(**PLAIN, n_layer=1, n_head=2),
}
TRPO = replace(pg.TRPO, advantage=(pg.GroupMean(),), critic=None)
CHEAP = replace(TRPO, update_rule=pg.TrustRegion(cg_iters=3))


def small_model(name: str = "llama, tied head", dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = tf.AutoModelForCausalLM.from_config(MODELS[name](), attn_implementation=None).to(dtype).eval()
    return model


def make_batch(vocabulary: int = VOCABULARY, dtype: torch.dtype = torch.float64) -> pg.Batch:
    """Two prompts, ragged completions with tool tokens in their midst, equal ones, a group without spread, an empty one."""
    g = torch.Generator().manual_seed(3)
    mask = torch.arange(4) < torch.tensor([4, 4, 2, 3, 1, 0])[:, None]
    tokens = torch.randint(vocabulary, (6, 4), generator=g)
    tokens[1] = tokens[0]
    mask[3, 1] = False
    return pg.Batch(
        mask=mask,
        group=torch.tensor([0, 0, 0, 1, 1, 1]),
        reward=torch.tensor([1.0, 1.0, 0.0, 0.5, 0.5, 0.5], dtype=dtype),
        tokens=tokens,
        prompts=(torch.randint(vocabulary, (2,), generator=g), torch.randint(vocabulary, (3,), generator=g)),
    )


def learner_for(model: nn.Module, algorithm: pg.Algorithm = TRPO, **config: Any) -> LocalLearner:
    return LocalLearner(
        model, LearnerSpec(algorithm, lr=None, steps=4, temperature=TEMPERATURE, config=LearnerConfig(**config))
    )


def problem_for(learner: LocalLearner, batch: pg.Batch, algorithm: pg.Algorithm = TRPO) -> LocalProblem:
    batch = learner.evaluate(batch, algorithm.needs)
    return learner.build_problem(batch, algorithm.compute_advantages(batch), algorithm)


def logits_of(model: nn.Module, batch: pg.Batch) -> tuple[Tensor, Tensor]:
    """[n, V] logits of the sampled tokens' states at the sampling temperature, and the tokens [n]: one completion at a time."""
    assert batch.tokens is not None
    assert batch.prompts is not None
    results, taken = [], []
    for row, group, mask in zip(batch.tokens, batch.group.tolist(), batch.mask, strict=True):
        prompt = batch.prompts[group]
        all_ = model(input_ids=torch.cat([prompt, row])[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
        results.append(all_[mask] / TEMPERATURE)
        taken.append(row[mask])
    return torch.cat(results), torch.cat(taken)


def fisher_matrix(model: nn.Module, batch: pg.Batch, sampled: bool) -> Tensor:
    """[P, P] mean over the sampled tokens of Jᵀ(diag p − ppᵀ)J, or of ssᵀ, from gradients taken one by one."""
    logits, tokens = logits_of(model, batch)
    parameters = [p for p in model.parameters() if p.requires_grad]

    def row(y: Tensor) -> Tensor:
        grads = torch.autograd.grad(y, parameters, retain_graph=True, materialize_grads=True)
        return torch.cat([g.flatten() for g in grads])

    left, right = [], []  # F is their product: one for all states
    for z, a in zip(logits, tokens, strict=True):
        if sampled:
            left.append(row(z.log_softmax(-1)[a])[None])
            right.append(left[-1])
        else:
            J, p = torch.stack([row(y) for y in z]), z.detach().softmax(-1)
            left.append(J)
            right.append((torch.diag(p) - torch.outer(p, p)) @ J)
    return torch.cat(left).T @ torch.cat(right) / len(logits)


def directions(size: int, n: int = 3) -> list[Tensor]:
    g = torch.Generator().manual_seed(5)
    return [torch.randn(size, generator=g, dtype=torch.float64) for _ in range(n)]


@pytest.mark.parametrize("name", keep_fast(MODELS, "llama, tied head"))
def test_fisher_products_are_those_of_the_matrix(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one micro-batch or several, the head at once or two tokens at a time, with shared prompts and merged duplicates."""
    model, batch = small_model(name), make_batch()
    matrices = {sampled: fisher_matrix(model, batch, sampled) for sampled in (False, True)}
    (v,) = directions(len(matrices[False]), 1)
    for micro_tokens, chunk in ((8192, 2**26), (1, 2 * VOCABULARY)):
        monkeypatch.setattr(curvature, "MAX_LOGITS", chunk)
        problem = problem_for(learner_for(model, micro_tokens=micro_tokens), batch)
        for sampled, F in matrices.items():
            error = float((problem.fisher(v, sampled) - F @ v).norm() / (F @ v).norm())
            tolerance = 1e-12 if name == "gpt2" else 1e-6  # the others' norms and positions are float32 in any model
            assert error < tolerance, (micro_tokens, sampled)
    assert all(p.grad is None for p in model.parameters())


def test_a_padding_token_inside_a_text_counts_like_any_other() -> None:
    """Where it is also an end token it stands in chat prompts. An embedding's `padding_idx` takes its gradient away in reverse
    mode alone: the product was then neither that of the matrix nor symmetric."""
    model, batch = small_model(), make_batch()
    assert model.get_input_embeddings().padding_idx == PLAIN["pad_token_id"] == 0  # type: ignore[operator, union-attr]
    batch = replace(
        batch, prompts=tuple(torch.cat([row, torch.zeros(1, dtype=torch.int64)]) for row in batch.prompts or ())
    )
    problem = problem_for(learner_for(model), batch)
    F = fisher_matrix(model, batch, sampled=False)
    a, b = directions(len(F), 2)
    Fa, Fb = problem.fisher(a, False), problem.fisher(b, False)
    assert float((Fa - F @ a).norm() / (F @ a).norm()) < 1e-6
    assert float(a @ Fb) == pytest.approx(float(b @ Fa), rel=1e-6)
    gradient, _ = problem.gradient()
    assert float((gradient[:8]).norm()) > 0  # the padding token's row of the embeddings, the first parameter


def curvature_of(user: LocalLearner | LocalProblem) -> curvature.Curvature:
    assert user.curvature is not None
    return user.curvature


def test_the_models_take_different_curvature_paths() -> None:
    """Or the test above would compare one path with itself."""
    assert learner_for(small_model()).evaluator.network.split_head
    assert learner_for(small_model()).evaluator.network.use_tree
    assert not learner_for(small_model("granite, scaled logits")).evaluator.network.split_head
    bloom = learner_for(small_model("bloom, no forward mode"))
    around = curvature_of(bloom)
    part, _ = next(around._micro_batches(make_batch()))
    tangents = {n: p.detach() for n, p in bloom.optimizer.parameters.items()}
    with pytest.raises(NotImplementedError):
        around._jvp(tangents, around._states, part)


class Unmoved(torch.autograd.Function):
    """x, whose forward mode says that it never changes."""

    generate_vmap_rule = False

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        return None

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return torch.zeros_like(tangent)


def test_a_forward_mode_that_contradicts_reverse_mode_is_not_used() -> None:
    model, batch = small_model("gpt2"), make_batch()
    assert curvature_of(learner_for(model)).forward_mode
    model.get_input_embeddings().register_forward_hook(lambda module, args, out: Unmoved.apply(out))  # type: ignore[operator]
    problem = problem_for(learner_for(model), batch)
    assert not curvature_of(problem).forward_mode
    F = fisher_matrix(model, batch, sampled=False)
    v = directions(len(F), 1)[0]
    assert float((problem.fisher(v, False) - F @ v).norm() / (F @ v).norm()) < 1e-12


def test_forward_mode_equals_double_backward() -> None:
    learner = learner_for(small_model())
    around = curvature_of(learner)
    part, _ = next(around._micro_batches(make_batch()))
    tangents = {n: torch.randn_like(p) for n, p in learner.optimizer.parameters.items()}
    states, change = around._jvp_states(part, tangents)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        rerun, other = around._jvp_by_reverse(tangents, part)
    assert torch.allclose(states, rerun, atol=1e-12)
    assert torch.allclose(change, other, atol=1e-12)


@pytest.mark.parametrize("name", ["llama, tied head", "granite, scaled logits"])
def test_kl_and_surrogate_equal_their_definitions_without_side_effects(name: str) -> None:
    model, batch = small_model(name), make_batch()
    learner = learner_for(model, micro_tokens=1)
    problem = problem_for(learner, batch)
    before = [p.detach().clone() for p in model.parameters()]
    delta = 0.02 * directions(sum(p.numel() for p in model.parameters()), 1)[0]
    value, kl = problem.evaluate(delta)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    with torch.no_grad():
        old, tokens = logits_of(model, batch)
        problem.commit(delta)
        new, _ = logits_of(model, batch)
        old, new = old.log_softmax(-1), new.log_softmax(-1)
        ratio = (new - old).gather(1, tokens[:, None]).squeeze(1).exp()
    assert learner.version == 1
    assert kl == pytest.approx(float((old.exp() * (old - new)).sum() / len(old)), rel=1e-7)
    assert kl > 0.005
    expected = float((ratio * problem.psi[batch.mask]).mean())
    assert value == pytest.approx(expected, rel=1e-7)


def test_gradient_fisher_and_evaluate_use_the_same_coordinates() -> None:
    """Along any direction the surrogate's slope is gᵀv and the KL's curvature vᵀFv; at θ_old the KL is 0."""
    learner = learner_for(small_model("gpt2"))
    problem = problem_for(learner, make_batch())
    g, _ = problem.gradient()
    here, zero = problem.evaluate(torch.zeros_like(g))
    assert zero == 0
    e = 1e-5
    for v in (g / g.norm(), *directions(len(g))):
        (up, kl), (down, other) = problem.evaluate(e * v), problem.evaluate(-e * v)
        assert (up - down) / (2 * e) == pytest.approx(float(g @ v), rel=1e-4, abs=1e-6)
        assert (kl + other) / e**2 == pytest.approx(float(v @ problem.fisher(v, False)), rel=1e-4)
        assert abs(up - here) < 1


def test_the_sampled_fisher_is_the_exact_one_on_average() -> None:
    """E_{a∼p}[(e_a − p)(e_a − p)ᵀ] = diag p − ppᵀ, by enumeration."""
    g = torch.Generator().manual_seed(0)
    logits, change = torch.randn(2, 1, 5, generator=g, dtype=torch.float64)
    p = logits.softmax(-1).squeeze(0)
    none, one = torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.float64)
    each = [curvature.output_hessian_product(logits, change, none, torch.tensor([a]), one, True) for a in range(5)]
    mean = sum((p[a] * x for a, x in enumerate(each)), torch.zeros(1, 5, dtype=torch.float64))
    assert torch.allclose(mean, curvature.output_hessian_product(logits, change, none, none, one, False), atol=1e-14)


@pytest.mark.parametrize("sampled", [False, True])
def test_a_state_followed_by_several_tokens_counts_for_each(sampled: bool) -> None:
    """One call for all pairs of a state and a token is the sum of a call for each."""
    g = torch.Generator().manual_seed(0)
    logits, change = torch.randn(2, 3, 5, generator=g, dtype=torch.float64)
    index, tokens = torch.tensor([0, 0, 0, 2, 2]), torch.tensor([1, 1, 4, 0, 3])
    weight = torch.rand(5, generator=g, dtype=torch.float64)
    none, one = torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.float64)
    expected = torch.zeros(3, 5, dtype=torch.float64)
    for i, a, w in zip(index.tolist(), tokens.tolist(), weight, strict=True):
        at = slice(i, i + 1)
        expected[at] += w * curvature.output_hessian_product(
            logits[at], change[at], none, torch.tensor([a]), one, sampled
        )
    results = curvature.output_hessian_product(logits, change, index, tokens, weight, sampled)
    assert torch.allclose(results, expected, atol=1e-14)


def test_a_table_of_logits_is_a_valid_problem() -> None:
    """Its Fisher products are those of the Hessian of the mean KL, by autograd; its steps keep to δ and climb."""
    learner = TabularLearner(2, 4, VOCABULARY)
    with torch.no_grad():
        learner.table += torch.randn(
            learner.table.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
        )
    batch = replace(make_batch(), prompts=(torch.tensor([0]), torch.tensor([1])))
    batch = learner.evaluate(batch, TRPO.needs)
    psi = TRPO.compute_advantages(batch)
    old = learner.scores(learner.table.detach(), batch)[batch.mask]

    def kl(flat: Tensor) -> Tensor:
        new = learner.scores(flat.view_as(learner.table), batch)[batch.mask]
        return (old.exp() * (old - new)).sum() / len(old)

    problem = TabularProblem(learner, batch, psi, TRPO)
    H = torch.autograd.functional.hessian(kl, learner.table.detach().flatten())
    for v in directions(len(H)):
        assert torch.allclose(problem.fisher(v, False), H @ v, atol=1e-12)
    metrics = learner.update(batch, psi, TRPO)
    assert metrics["updates/taken"].value == 1
    assert float(kl(learner.table.detach().flatten())) == pytest.approx(metrics["trust_region/kl"].value, rel=1e-9)
    assert 0.002 < metrics["trust_region/kl"].value <= 0.01
    assert metrics["trust_region/improvement"].value > 0


def move(learner: LocalLearner, batch: pg.Batch, algorithm: pg.Algorithm = CHEAP) -> dict[str, float]:
    scored = learner.evaluate(batch, algorithm.needs)
    return {k: m.value for k, m in learner.update(scored, algorithm.compute_advantages(scored), algorithm).items()}


@pytest.mark.parametrize(
    "options", [{}, {"gradient_checkpointing": True}, {"micro_tokens": 20}, {"dtype": "bf16"}], ids=str
)
def test_every_accepted_step_respects_delta(options: dict[str, Any], random_model: Path) -> None:
    """On the embedded model, and on a smaller one with options."""
    path = str(random_model) if options else resolve_model("tiny")
    model = load_model(path, dtype=options.get("dtype", "fp32"))
    learner = learner_for(model, CHEAP, **options)
    for step in range(2):
        metrics = move(learner, make_batch(40, torch.float32))
        assert metrics["updates/taken"] == 1
        assert 0 < metrics["trust_region/kl"] <= 0.01
        assert metrics["trust_region/improvement"] > 0
        assert learner.version == step + 1
    assert all(p.grad is None for p in model.parameters())
    for name, parameter in model.named_parameters():  # what is published is what was measured
        assert torch.equal(parameter, learner.optimizer.masters[name].to(parameter.dtype))


def test_fitting_the_critic_leaves_the_policy_unchanged() -> None:
    algorithm = replace(
        pg.TRPO, critic=pg.Critic(lr=1e-2, pretrain=1), update_rule=pg.TrustRegion(cg_iters=2, critic_steps=3)
    )
    model = small_model(dtype=torch.float32)
    learner = learner_for(model, algorithm)
    batch = make_batch(dtype=torch.float32)
    assert learner.critic is not None
    for phase in ("pretraining", "training"):
        before = [p.detach().clone() for p in model.parameters()]
        taken = learner.critic.optimizer.num_updates
        scored = algorithm.add_critic_targets(learner.evaluate(batch, algorithm.needs))
        metrics = learner.update(scored, algorithm.compute_advantages(scored), algorithm)
        still = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        assert still is (phase == "pretraining")
        assert ("value_pretraining" in metrics) is (phase == "pretraining")
        assert learner.critic.optimizer.num_updates >= taken + 3
        assert "value_loss" in metrics
        algorithm = replace(algorithm, critic=pg.Critic(lr=1e-2))


def test_training_a_subset_leaves_other_parameters_unchanged() -> None:
    model = small_model(dtype=torch.float32)
    learner = learner_for(model, CHEAP, trainable=r"layers\.1\..*proj")
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    metrics = move(learner, make_batch(dtype=torch.float32))
    assert metrics["updates/taken"] == 1
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert moved == {n for n in before if "layers.1." in n and n.endswith("proj.weight")}
    assert set(learner.publish().tensors) == set(before)
    rerun = learner_for(small_model(dtype=torch.float32), CHEAP, trainable=r"layers\.1\..*proj")
    rerun.restore(*learner.state())
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), rerun.model.parameters(), strict=True))
    other = learner_for(small_model(dtype=torch.float32), CHEAP)
    with pytest.raises(RuntimeError, match="different trainable parameters"):
        other.restore(*learner.state())


def test_training_only_the_head() -> None:
    model = small_model("llama, head of its own")
    learner = learner_for(model, trainable="lm_head")
    problem = problem_for(learner, make_batch())
    F = fisher_matrix(model, make_batch(), False)
    (v,) = directions(len(F), 1)
    assert torch.allclose(problem.fisher(v, False), F @ v, rtol=1e-8, atol=1e-12)


def test_trainable_is_refused_where_it_has_no_effect() -> None:
    with pytest.raises(ValueError, match=r"'layers.7' .*embed_tokens"):
        learner_for(small_model(), trainable="layers.7")
    with pytest.raises(ValueError, match="not a regular expression"):
        LearnerConfig(trainable="(")


def test_lora_adapters_take_a_step_and_the_base_does_not() -> None:
    peft = pytest.importorskip("peft")
    base = load_model(resolve_model("tiny"))
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", lora_dropout=0.0)
    model = peft.get_peft_model(base, config).eval()
    learner = learner_for(model, CHEAP)
    assert learner.evaluator.network.split_head
    assert learner.evaluator.network.use_tree
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    for _ in range(2):  # B starts at 0: A has a gradient from the second step on
        metrics = move(learner, make_batch(40, torch.float32))
        assert metrics["updates/taken"] == 1
        assert 0 < metrics["trust_region/kl"] <= 0.01
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert moved == {n for n in before if "lora_" in n} == set(learner.optimizer.masters)


@dataclass(frozen=True)
class NotANumber(pg.Importance):
    """A gate that is NaN."""

    def weight(self, ratio: Tensor, psi: Tensor, batch: pg.Batch) -> Tensor:
        return super().weight(ratio, psi, batch) * float("nan")


def test_nonfinite_values_skip_the_step_and_the_run_continues(small: Run, tmp_path: Path) -> None:
    record = Record()
    algorithm = replace(CHEAP, name="broken", gate=NotANumber())
    run = replace(small, algorithm=algorithm, lr=None, steps=2, output=str(tmp_path / "run"))
    result = train(run, display=record)
    assert result.steps == 2
    assert [n.partition(":")[0] for n in record.notes if "not finite" in n] == ["step 1"]
    assert not any("nothing was learned" in n for n in record.notes)
    before = load_model(small.model)
    assert same(weights(result.output), {n: p for n, p in before.named_parameters() if n in weights(result.output)})


def test_a_failed_line_search_says_why_nothing_was_learned(small: Run, tmp_path: Path) -> None:
    """A step so short that float32 cannot tell the surrogate's rise."""
    record = Record()
    algorithm = replace(CHEAP, update_rule=pg.TrustRegion(delta=1e-30, cg_iters=1, backtrack_iters=1))
    train(replace(small, algorithm=algorithm, lr=None, steps=1, output=str(tmp_path / "run")), display=record)
    assert [n for n in record.notes if "nothing was learned" in n and "no candidate of the line search" in n]
    assert record.steps[0][1]["updates/skipped"] == 1


def test_an_unused_learning_rate_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"TrustRegion has no learning rate.*algorithm\.update_rule\.delta.*algorithm\.critic\.lr"
    ):
        Run(algorithm=pg.TRPO, lr=1e-3)
    with pytest.raises(ValueError, match=r"optimizer\.\* sets the optimizer"):
        Run(algorithm=TRPO, optimizer=pg.OptimizerConfig(clip=0.5))
    assert Run(algorithm=pg.TRPO, optimizer=pg.OptimizerConfig(clip=0.5)).resolve().lr is None
    assert Run(algorithm=pg.GRPO).resolve().lr is not None
    with pytest.raises(ValueError, match="GradientSteps needs a learning rate"):
        LocalLearner(small_model(), LearnerSpec(pg.DR_GRPO, lr=None, steps=1))


@pytest.mark.full
@pytest.mark.parametrize("name", ["trpo", "natural"])
def test_runs_respect_delta(small: Run, tmp_path: Path, name: str) -> None:
    algorithm = replace(pg.get_algorithm(name), critic=pg.Critic(lr=1e-3))
    assert isinstance(algorithm.update_rule, pg.TrustRegion)
    algorithm = replace(algorithm, update_rule=replace(algorithm.update_rule, cg_iters=3))
    record = Record()
    train(replace(small, algorithm=algorithm, lr=None, steps=2, output=str(tmp_path / "run")), display=record)
    assert len(record.steps) == 2
    for _, metrics in record.steps:
        assert metrics["updates/taken"] == 1
        assert metrics["trust_region/kl"] > 0
        assert metrics["trust_region/kl"] <= 0.01 or name == "natural"


def test_the_subset_of_groups_is_reproducible() -> None:
    """And its Fisher matrix that of those completions alone."""
    model, batch = small_model("gpt2"), make_batch()
    problem = problem_for(learner_for(model), batch)
    some = problem.subsample(0.5)
    assert torch.equal(some.batch.group, problem.subsample(0.5).batch.group)
    assert 0 < len(some.batch.group.unique()) < len(batch.group.unique())
    assert torch.equal(some.psi, problem.psi[torch.isin(batch.group, some.batch.group)])
    F = fisher_matrix(model, some.batch, sampled=False)
    v = directions(len(F), 1)[0]
    assert float((some.fisher(v, False) - F @ v).norm() / (F @ v).norm()) < 1e-12
    assert len(problem.subsample(1e-9).batch.group.unique()) == 1
    for seed in range(8):  # a group that takes no part (its rewards failed, say) has no curvature to show
        empty = replace(problem, seed=seed, batch=replace(batch, mask=batch.mask & (batch.group == 1)[:, None]))
        assert empty.subsample(0.5).batch.group.unique().tolist() == [1]
