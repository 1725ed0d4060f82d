"""A mixture of experts: the choices of the sampler are told, and replayed when log-probabilities and gradients are taken."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

import policygrad as pg
from doubles.architectures import BASE, families
from doubles.batches import make_batch, naive_logp
from doubles.experts import EXPERTS, LAYERS, MODELS, built, drawn, shaken
from policygrad.learners.base import LearnerSpec
from policygrad.learners.config import LearnerConfig
from policygrad.learners.local.learner import LocalLearner
from policygrad.models.moe_routing import Routing, find_routing
from policygrad.samplers.base import Request, SamplingParams
from policygrad.samplers.local.sampler import LocalSampler

REPLAY = LearnerConfig(micro_tokens=60, routing_replay=True)


@pytest.mark.parametrize("name", MODELS)
def test_the_sampler_reports_the_experts_of_every_token(name: str) -> None:
    model = built(name).float()
    sampler, sampling = LocalSampler(model, frozenset({1}), 0, Routing.for_model(model)), SamplingParams(max_tokens=7)
    prompts = [torch.tensor([3, 4, 5]), torch.tensor([6, 7, 8, 9, 10])]
    requests = [Request(prompts[i % 2], (i,), sampling, 7 - i) for i in range(4)]
    for request, result in zip(requests, asyncio.run(sampler.generate(requests)), strict=True):
        assert result.routed_experts is not None
        with torch.no_grad(), Routing.for_model(model).recording():
            model(input_ids=torch.cat([request.prompt_ids, result.tokens])[None])
            truth = Routing.for_model(model).pop_recorded()
        assert result.routed_experts.shape == (len(request.prompt_ids) + len(result.tokens), LAYERS[name], 2)
        assert torch.equal(result.routed_experts[:-1].sort(-1).values, truth[:-1].sort(-1).values)
        assert (result.routed_experts[-1] == -1).all()
    assert asyncio.run(LocalSampler(model, frozenset({1}), 0).generate(requests[:1]))[0].routed_experts is None


@contextmanager
def forced(model: nn.Module, routes: Tensor) -> Iterator[None]:
    """Qwen3's router written out with the experts given [n, layers, 2]: softmax, the scores of those, normalised."""
    routers = [m for m in model.modules() if type(m).__name__ == "Qwen3MoeTopKRouter"]

    def choose(router: Any, experts: Tensor) -> Any:
        def forward(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            logits = x.reshape(-1, router.hidden_dim) @ router.weight.T
            scores = logits.float().softmax(-1).gather(-1, experts)
            if router.norm_topk_prob:
                scores = scores / scores.sum(-1, keepdim=True)
            return logits, scores.to(logits.dtype), experts

        return forward

    for layer, router in enumerate(routers):
        router.forward = choose(router, routes[:, layer].long())  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        for router in routers:
            del router.forward


def by_definition(model: nn.Module, batch: pg.Batch) -> Tensor:
    """log π [B, T], one completion at a time, each under its own experts."""
    assert batch.routed_experts is not None
    rows = []
    for row, group in enumerate(batch.group.tolist()):
        with forced(model, torch.cat([batch.prompt_routed_experts[group], batch.routed_experts[row]])):
            rows.append(naive_logp(model, replace(batch.select(torch.tensor([row])), routed_experts=None), 1.0))
    return torch.cat(rows)


def test_only_the_choice_of_experts_is_replayed() -> None:
    """The log-probabilities and the gradient of a policy that has moved, on the experts that sampled."""
    model = built("qwen3")
    batch = drawn(model, make_batch(3))
    shaken(model)
    learner = LocalLearner(model, LearnerSpec(pg.DR_GRPO.with_max_tokens(6), lr=0.0, steps=1, config=REPLAY))
    result = learner.evaluate(batch, frozenset({"logp_old"})).logp_old
    expected, live = by_definition(model, batch), naive_logp(model, batch, 1.0)
    where = batch.mask
    assert float((result - expected)[where].abs().max()) < 1e-6  # type: ignore[operator]
    assert float((live - expected)[where].abs().max()) > 1e-3  # or replaying would be nothing
    algorithm = pg.DR_GRPO.with_max_tokens(6)
    psi = algorithm.compute_advantages(batch)
    metrics = learner.build_problem(batch, psi, algorithm).accumulate()
    learner.evaluator.release()
    assert 0.01 < metrics["routing/changed"].value < 0.9
    got = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    pg.surrogate(torch.where(where, expected, 0), batch, psi, algorithm).backward()
    largest = max(float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None)
    for n, p in model.named_parameters():
        assert p.grad is None or float((got[n] - p.grad).abs().max()) <= 1e-6 * largest, n


@pytest.mark.parametrize("name", MODELS)
def test_recomputed_activations_use_the_same_experts(name: str) -> None:
    algorithm = pg.DR_GRPO.with_max_tokens(6)
    gradients = []
    for recompute in (False, True):
        model = built(name)
        batch = drawn(model, make_batch(3))
        shaken(model)
        config = replace(REPLAY, gradient_checkpointing=recompute)
        learner = LocalLearner(model, LearnerSpec(algorithm, lr=0.0, steps=1, config=config))
        learner.build_problem(batch, algorithm.compute_advantages(batch), algorithm).accumulate()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-12)
    assert gradients[0].abs().max() > 1e-4


@pytest.mark.full
def test_a_run_with_routing_replay(tmp_path: Path) -> None:
    """The whole path on a small real mixture: after two updates of a rollout some choices would have changed, and are replayed."""
    torch.manual_seed(0)
    tokenizer = pg.Run().model
    config = tf.Qwen3MoeConfig(**(BASE | {"vocab_size": 512}), **EXPERTS, num_experts=8, head_dim=8)
    model = tf.AutoModelForCausalLM.from_config(config)
    run = pg.Run(
        model=model,
        tokenizer=tokenizer,
        algorithm=replace(pg.DR_GRPO, update_rule=pg.GradientSteps(minibatches=2)),
        steps=2,
        prompts_per_step=2,
        samples_per_prompt=4,
        lr=1e-2,
        sampling=SamplingParams(max_tokens=6),
        learner=LearnerConfig(routing_replay=True),
        evaluation=replace(pg.Run().evaluation, problems=0),
        reward=(length,),
        rewards=pg.RewardConfig(num_workers=1),
        output=str(tmp_path / "run"),
    )
    pg.train(run, display=False)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert "routing/changed" in lines


def length(prompts: Any, completions: list[str], **columns: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def test_refusals(tmp_path: Path) -> None:
    dense = tf.AutoModelForCausalLM.from_config(tf.LlamaConfig(**BASE))
    with pytest.raises(pg.ModelError, match="LlamaForCausalLM has no experts"):
        LocalLearner(dense, LearnerSpec(pg.GRPO, lr=0.0, steps=1, config=REPLAY))
    model = built("mixtral")
    with pytest.raises(pg.ConfigError, match=r"TrustRegion evaluates the policy without.*routing_replay=false"):
        LocalLearner(model, LearnerSpec(pg.TRPO, lr=None, steps=1, config=REPLAY))
    learner, batch = LocalLearner(model, LearnerSpec(pg.DR_GRPO, lr=0.0, steps=1, config=REPLAY)), make_batch(3)
    with pytest.raises(pg.EngineError, match=r"this sampler does not report them \(Generation.routed_experts\)"):
        learner.update(batch, pg.DR_GRPO.compute_advantages(batch), pg.DR_GRPO)
    Routing.for_model(model).replay(torch.zeros(3, 2, 2))
    with pytest.raises(pg.ModelError, match="experts of 3 tokens, and the router MixtralTopKRouter is called with 4"):
        model(input_ids=torch.zeros(1, 4, dtype=torch.int64))


@pytest.mark.parametrize("kind", ["glm_moe_dsa", "deepseek_v32", "deepseek_v4"])
def test_an_indexer_is_no_router(kind: str) -> None:
    """Sparse attention chooses tokens or blocks by `topk` too."""
    model = tf.AutoModelForCausalLM.from_config(next(f for f in families() if f.type == kind).config()).eval()
    routers = Routing.for_model(model).routers
    assert routers
    assert not [r for r in routers if "Router" not in type(r.module).__name__]


def group_after(prompt: Tensor, tokens: Tensor, lengths: tuple[int, ...]) -> pg.Batch:
    """Four completions of these lengths after one prompt."""
    mask = torch.arange(tokens.shape[1]) < torch.tensor(lengths)[:, None]
    reward = torch.tensor([1.0, 0.0, 0.0, 1.0])
    return pg.Batch(
        mask=mask, group=torch.zeros(4, dtype=torch.int64), reward=reward, tokens=tokens * mask, prompts=(prompt,)
    )


ROUTED = {
    f.type: f for f in families() if "experts" in f.layers and f.type != "phimoe"
}  # which does not choose by `topk`


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=() if k in ("gpt_oss", "glm4_moe") else pytest.mark.full) for k in ROUTED]
)
def test_changed_counts_every_token_once_and_no_padding(kind: str) -> None:
    """On policy nothing changes, in texts that are read one by one (a window of 9) and along a tree."""
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(ROUTED[kind].config()).eval()
    routing, lengths, prompt = Routing.for_model(model), (12, 2, 3, 1), torch.arange(5) + 3
    tokens = torch.randint(3, 40, (4, 12), generator=torch.Generator().manual_seed(0))
    read = list[Tensor]()
    for row, n in enumerate(lengths):
        with torch.no_grad(), routing.recording():
            model(input_ids=torch.cat([prompt, tokens[row, :n]])[None], use_cache=False)
            read.append(routing.pop_recorded())
    batch = replace(
        group_after(prompt, tokens, lengths),
        routed_experts=nn.utils.rnn.pad_sequence([r[5:] for r in read], batch_first=True, padding_value=-1),
        prompt_routed_experts=(read[0][:5],),
        logp_sampler=torch.zeros(4, 12),
    )
    learner = LocalLearner(model, LearnerSpec(pg.GRPO, lr=0.0, steps=1, config=LearnerConfig(routing_replay=True)))
    learner.evaluate(batch, frozenset({"logp_old"}))
    changed = routing.pop_metrics()["routing/changed"]
    assert changed.total == 0
    assert changed.count == (5 + 11 + 1 + 2) * len(routing.routers)  # the last token of a text is not read


@pytest.mark.parametrize(
    ("kind", "budget"), [("qwen3_moe", 1000), ("qwen3_moe", 15), ("gpt_oss", 1000), ("qwen3_5_moe", 1000)]
)
def test_loads_count_every_token_of_an_update_once(kind: str, budget: int) -> None:
    """Along a tree, in segments, in texts that are read one by one (a window of 9), and through the model's own cache."""
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(next(f for f in families() if f.type == kind).config()).eval()
    prompt, lengths = torch.arange(40) % 37 + 3, (12, 2, 12, 1)
    tokens = torch.randint(3, 40, (4, 12), generator=torch.Generator().manual_seed(0))
    tokens[2, :6] = tokens[0, :6]  # two that begin alike
    batch = group_after(prompt, tokens, lengths)
    routing = find_routing(model)
    expected = torch.zeros(len(routing.routers), routing.routers[0].experts, dtype=torch.float64)
    seen = set[tuple[int, ...]]()
    for row, n in enumerate(lengths):
        text = torch.cat([prompt, tokens[row, : n - 1]])  # the last token of a text is not read
        with torch.no_grad(), routing.recording():
            model(input_ids=text[None], use_cache=False)
            routes = routing.pop_recorded().long()
        for position in range(len(text)):
            beginning = tuple(text[: position + 1].tolist())
            if beginning not in seen:
                seen.add(beginning)
                expected.scatter_add_(1, routes[position], torch.ones_like(routes[position], dtype=torch.float64))
    algorithm = pg.DR_GRPO.with_max_tokens(12)
    config = LearnerConfig(gradient_checkpointing=kind == "qwen3_moe", micro_tokens=budget)
    learner = LocalLearner(model, LearnerSpec(algorithm, lr=0.0, steps=1, config=config))
    metrics = learner.build_problem(batch, algorithm.compute_advantages(batch), algorithm).accumulate()
    rel = 1e-6 if budget == 1000 else 0.02  # what several passes read again counts again: here the prompt's last token
    busiest = float((expected.max(1).values / expected.mean(1)).mean())
    assert metrics["routing/busiest"].value == pytest.approx(busiest, rel=rel)
    assert metrics["routing/unused"].value == pytest.approx(float((expected == 0).double().mean()))
    assert expected.sum() == len(seen) * len(routing.routers) * routing.routers[0].k
