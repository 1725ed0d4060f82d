"""Every loss of the server: its value and gradient against the definition, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from serve.conftest import completions, policy_data, trained_adapter
from torch import Tensor

import policygrad as pg
from policygrad.algorithms import ALGORITHMS
from policygrad.core.batch import Batch, Forward
from policygrad.errors import ConfigError
from policygrad.serve.losses import API_LOSSES, Datum, prepare_loss
from policygrad.serve.models import ClientModel, PassResult, ServedNetwork

REFUSED = {
    "a2c": "a critic",
    "trpo": "steps of its own",
    "natural": "steps of its own",
    "ppo_penalty": "a critic",
    "pf_ppo": "a critic",
    "vapo": "a critic",
    "prime": "a reward model",
    "trpo_vine": "steps of its own",
    "gdpo": "Batch.rewards",
    "gigpo": "Batch.turn_state",
    "vineppo": "Batch.values",
    "otb": "over the vocabulary",
    "echo": "the environment's tokens",
    "sdft": "kl_ref",
    "opsd": "kl_ref",
}
"""Algorithms that need a second model, or what no request can say, and a word of the reason."""


def literal(name: str, logp: Tensor, q: Tensor, a: Tensor, mask: Tensor) -> Tensor:
    """The API's losses as its documentation writes them, for one text."""
    ratio = torch.exp(logp - q)
    if name == "importance_sampling":
        return -(ratio * a).sum()
    if name == "ppo":
        return -torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a).sum()
    if name == "cispo":
        return -(ratio.clamp(0.0, 4.0).detach() * logp * a).sum()
    if name == "dro":
        return -(logp * a - 0.5 * 0.05 * (logp - q) ** 2).sum()
    if name == "gspo":
        mean = (logp.detach() - q)[mask].mean()
        s = torch.exp(mean + logp - logp.detach())
        return -torch.minimum(s * a, s.clamp(1 - 3e-4, 1 + 4e-4) * a).sum()
    return -(logp * a).sum()


@pytest.mark.parametrize("name", API_LOSSES)
def test_the_apis_losses_are_their_definitions(name: str) -> None:
    """On random log-probabilities, in float64 to 1e-12, value and gradient."""
    data = policy_data()
    masks = [d.inputs["advantages"] != 0 for d in data]
    if name == "cross_entropy":
        data = [Datum(d.tokens, {"target_tokens": d.targets, "weights": d.inputs["advantages"]}) for d in data]
    if name == "gspo":
        extra = [{"sequence_ratio_mask": m.float()} for m in masks]
        data = [Datum(d.tokens, {**d.inputs, **more}) for d, more in zip(data, extra, strict=True)]
    loss = prepare_loss(name, {}, data, dtype=torch.float64)
    width = max(len(d.tokens) for d in data)
    generator = torch.Generator().manual_seed(3)
    logp = (-6 * torch.rand(len(data), width, generator=generator, dtype=torch.float64)).requires_grad_()
    rows = torch.arange(len(data))
    (gradient,) = torch.autograd.grad(loss(Forward(logp), rows), logp)
    total = logp.new_zeros(())
    for i, (datum, mask) in enumerate(zip(data, masks, strict=True)):
        n = len(datum.tokens)
        q = datum.inputs.get("logprobs", torch.zeros(n)).double()
        a = datum.inputs.get("advantages", datum.inputs.get("weights", torch.zeros(n))).double()
        total = total + literal(name, logp[i, :n], q, a, mask)
    (expected,) = torch.autograd.grad(total, logp)
    scale = float(expected.abs().max())
    assert float((gradient - expected).abs().max()) <= 1e-12 * scale
    assert loss.value(Forward(logp.detach()), rows)["loss:sum"] == pytest.approx(float(total.detach()), rel=1e-12)


def algorithm_data(name: str, generator: torch.Generator) -> list[Datum]:
    """Data with rewards and whatever else the algorithm reads."""
    needs = ALGORITHMS[name].all_needs
    data = []
    for i, (ids, prompt, group) in enumerate(completions(seed=5, groups=3, size=4)):
        length = len(ids) - 1
        mask = (torch.arange(length) >= prompt - 1).float()
        inputs = {
            "target_tokens": torch.where(mask > 0, ids[1:], 0),
            "mask": mask,
            "reward": torch.tensor([float((i + int(group)) % 2)]),
            "logprobs": (-8 - 4 * torch.rand(length, generator=generator)) * mask,
        }
        if "logp_ref" in needs:
            inputs["ref_logprobs"] = (-8 - 4 * torch.rand(length, generator=generator)) * mask
        if "token_reward" in needs:
            inputs["token_rewards"] = torch.rand(length, generator=generator) * (torch.arange(length) == length - 1)
        if "step_end" in needs:
            inputs["step_end"] = mask * (torch.arange(length) == length - 1)
        if "baseline" in needs:
            inputs["baseline"] = torch.tensor([0.25])
        if "demonstration" in needs:
            inputs["demonstration"] = torch.tensor([float(i % 4 == 0)])
        if "example_id" in needs:
            inputs["example_id"] = group.clone()
        for field in ("role", "peers"):
            if field in needs:
                inputs[field] = torch.tensor([float(i % 2)])
        if "truncated" in needs:
            inputs["truncated"] = torch.tensor([0.0])
        data.append(Datum(ids[:-1], inputs))
    return data


def batch_of(data: list[Datum], dtype: torch.dtype) -> Batch:
    """The same numbers as a batch of the library."""

    def pad(name: str, kind: torch.dtype = dtype) -> Tensor | None:
        if name not in data[0].inputs:
            return None
        return torch.nn.utils.rnn.pad_sequence([d.inputs[name].to(kind) for d in data], batch_first=True)

    def one(name: str, kind: torch.dtype) -> Tensor | None:
        return None if name not in data[0].inputs else torch.cat([d.inputs[name] for d in data]).to(kind)

    mask = pad("mask")
    assert mask is not None
    group = torch.tensor([int(x) for *_, x in completions(seed=5, groups=3, size=4)])
    step_end = pad("step_end")
    return Batch(
        mask=mask != 0,
        group=group,
        reward=one("reward", dtype),  # type: ignore[arg-type]
        logp_sampler=pad("logprobs"),
        logp_ref=pad("ref_logprobs"),
        token_reward=pad("token_rewards"),
        step_end=None if step_end is None else step_end != 0,
        baseline=one("baseline", dtype),
        demonstration=one("demonstration", torch.bool),
        truncated=one("truncated", torch.bool),
        example_id=one("example_id", torch.int64),
        role=(roles := one("role", torch.int64)),
        role_names=() if roles is None else ("0", "1"),
        peers=one("peers", torch.int64),
    )


def plain_logp(model: ClientModel, data: list[Datum], entropy: bool = False) -> Forward:
    """Log-probabilities by the model's own forward pass, one text at a time, with graph."""
    assert model.adapter is not None
    logps, entropies = [], []
    with model.network.using(model.adapter):
        for datum in data:
            logits = model.network.model(input_ids=datum.tokens[None]).logits[0].log_softmax(-1)
            logps.append(logits.gather(1, datum.targets[:, None]).squeeze(1))
            entropies.append(-(logits.exp() * logits).sum(-1))
    pad = torch.nn.utils.rnn.pad_sequence
    return Forward(pad(logps, batch_first=True), pad(entropies, batch_first=True) if entropy else None)


@dataclass(frozen=True)
class Reading:
    """The data of `algorithm_data`, whose tokens are the same for every algorithm, read by `plain_logp` once."""

    model: ClientModel
    out: Forward

    @classmethod
    def of_network(cls, network: ServedNetwork) -> Reading:
        model = trained_adapter(network)
        data = algorithm_data("grpo", torch.Generator().manual_seed(7))
        return cls(model, plain_logp(model, data, entropy=True))

    @property
    def parameters(self) -> list[Tensor]:
        assert self.model.adapter is not None
        return [p for pair in self.model.adapter.pairs.values() for p in pair]


@pytest.fixture(scope="module")
def reading(network: ServedNetwork) -> Reading:
    return Reading.of_network(network)


@pytest.fixture(scope="module")
def exact_reading(exact_network: ServedNetwork) -> Reading:
    return Reading.of_network(exact_network)


def make_sampled_nearby(logp: Tensor, data: list[Datum]) -> list[Datum]:
    """Return the data as if a policy near the model's, whose log-probabilities are given, had sampled it: ratios are around 1."""
    logp, generator = logp.detach().float(), torch.Generator().manual_seed(11)
    found = []
    for i, datum in enumerate(data):
        n = len(datum.tokens)
        noise = 0.3 * torch.randn(n, generator=generator)
        mask = datum.inputs["target_tokens"] != 0
        found.append(Datum(datum.tokens, {**datum.inputs, "logprobs": (logp[i, :n] + noise) * mask}))
    return found


def gradients(model: ClientModel) -> list[Tensor]:
    assert model.adapter is not None
    return [torch.zeros_like(p) if p.grad is None else p.grad for pair in model.adapter.pairs.values() for p in pair]


def run(model: ClientModel, data: list[Datum], name: str, **config: float) -> PassResult:
    return model.run(data, name, config, backward=True)


SERVED = [n for n in ALGORITHMS if n not in REFUSED and n != "ppo"]


def library_loss(name: str, data: list[Datum], out: Forward) -> Tensor:
    """`pg.surrogate` of the algorithm on the data's numbers and these log-probabilities."""
    batch = batch_of(data, out.logp.dtype)
    algorithm = ALGORITHMS[name].with_state(ALGORITHMS[name].init_state())
    if algorithm.ratio is not None or algorithm.old_policy == "sampler" or "logp_old" in algorithm.all_needs:
        batch = replace(batch, logp_old=batch.logp_sampler)
    batch = algorithm.apply_filters(batch)
    return pg.surrogate(out, batch, algorithm.compute_advantages(batch).to(out.logp.dtype), algorithm)


def measure_gradient_error(name: str, reading: Reading) -> float:
    """Return how far the gradient after forward_backward is from the library's by the model's own forward pass, over its norm."""
    data = make_sampled_nearby(reading.out.logp, algorithm_data(name, torch.Generator().manual_seed(7)))
    model = trained_adapter(reading.model.network)
    run(model, data, name)
    loss = library_loss(name, data, reading.out)
    expected = torch.autograd.grad(loss, reading.parameters, retain_graph=True)
    found, wanted = (torch.cat([x.flatten() for x in xs]).double() for xs in (gradients(model), expected))
    assert float(wanted.norm()) > 0
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("name", SERVED)
def test_gradients_of_algorithms_are_the_librarys(name: str, exact_reading: Reading) -> None:
    """To 1e-12 in float64, with trees, adapters and micro-batches in between."""
    assert measure_gradient_error(name, exact_reading) <= 1e-12


@pytest.mark.parametrize("name", ["dr_grpo", "gspo", "kl_cov"])
def test_gradients_in_float32_are_the_librarys(name: str, reading: Reading) -> None:
    """To the rounding of two ways to read a text, which is a few 1e-6."""
    assert measure_gradient_error(name, reading) <= 2e-5


@pytest.mark.parametrize("name", SERVED)
def test_gradients_in_log_probabilities_are_the_librarys_in_float32(name: str, reading: Reading) -> None:
    """On the same tensors, to 1e-6 of the largest."""
    data = make_sampled_nearby(reading.out.logp, algorithm_data(name, torch.Generator().manual_seed(7)))
    leaf = reading.out.logp.detach().requires_grad_()
    entropy = reading.out.entropy
    assert entropy is not None
    given = replace(reading.out, logp=leaf, entropy=entropy.detach())
    loss = prepare_loss(name, {}, data)
    if loss.selection_needs is not None:
        loss = loss.select_tokens(replace(given, logp=leaf.detach()))
    (found,) = torch.autograd.grad(loss(given, torch.arange(len(data))), leaf)
    (wanted,) = torch.autograd.grad(library_loss(name, data, given), leaf)
    assert float((found - wanted).abs().max()) <= 1e-6 * float(wanted.abs().max())


@pytest.mark.parametrize("name", REFUSED)
def test_algorithms_that_need_more_than_a_request_are_refused(name: str, network: ServedNetwork) -> None:
    data = algorithm_data(name, torch.Generator().manual_seed(7))
    with pytest.raises(ConfigError, match=REFUSED[name]):
        prepare_loss(name, {}, data)


def test_every_algorithm_is_served_or_refused_with_its_reason() -> None:
    """`ppo` is the API's loss of that name; the algorithm needs a critic."""
    assert REFUSED.keys() < ALGORITHMS.keys()
    data = algorithm_data("ppo", torch.Generator().manual_seed(7))
    with pytest.raises(ConfigError, match="a critic"):
        prepare_loss("ppo", {}, data)


def test_several_passes_add_up(exact_network: ServedNetwork) -> None:
    """The gradient of two requests is the sum of the gradients of each."""
    data = policy_data()
    whole, parts = trained_adapter(exact_network), trained_adapter(exact_network)
    run(whole, data, "importance_sampling")
    run(parts, data[:4], "importance_sampling")
    run(parts, data[4:], "importance_sampling")
    assert parts.pending == 2
    for a, b in zip(gradients(whole), gradients(parts), strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-12 * float(a.abs().max().clamp(min=1)))


def test_micro_batches_change_nothing(exact_network: ServedNetwork) -> None:
    """Also for an algorithm that chooses among all tokens, or needs a group at once."""
    config = replace(exact_network.config, micro_tokens=8)
    small = replace(exact_network, config=config)
    for name in ("dapo", "kl_cov", "clip_cov", "m2po", "cispo"):
        data = algorithm_data(name, torch.Generator().manual_seed(7))
        one, many = trained_adapter(exact_network), trained_adapter(small)
        first, second = run(one, data, name), run(many, data, name)
        assert first.metrics["loss:sum"] == pytest.approx(second.metrics["loss:sum"], rel=1e-10)
        for a, b in zip(gradients(one), gradients(many), strict=True):
            assert torch.allclose(a, b, rtol=0, atol=1e-10 * float(a.abs().max().clamp(min=1e-3)))


def test_settings_change_a_loss(reading: Reading) -> None:
    network, data = reading.model.network, policy_data()
    data = make_sampled_nearby(plain_logp(reading.model, data).logp, data)
    values = [run(trained_adapter(network), data, "ppo", clip_high_threshold=h).metrics["loss:sum"] for h in (1.2, 1.5)]
    assert values[0] != values[1]
    rewards = make_sampled_nearby(reading.out.logp, algorithm_data("dapo", torch.Generator().manual_seed(7)))
    wide = run(trained_adapter(network), rewards, "dapo", **{"gate.high": 1e6, "gate.low": 1.0}).metrics["loss:sum"]
    assert wide != run(trained_adapter(network), rewards, "dapo").metrics["loss:sum"]


def test_several_targets_per_position(exact_network: ServedNetwork) -> None:
    """A distillation: K targets with weights, against the plain forward pass."""
    model, generator = trained_adapter(exact_network), torch.Generator().manual_seed(0)
    data = []
    for ids, *_ in completions(seed=9):
        length = len(ids)
        targets = torch.randint(0, 400, (length, 3), generator=generator)
        weights = torch.rand(length, 3, generator=generator)
        data.append(Datum(ids, {"target_tokens": targets, "weights": weights}))
    result = run(model, data, "cross_entropy")
    loss, parameters = torch.zeros((), dtype=torch.float64), [p for x in model.adapter.pairs.values() for p in x]  # type: ignore[union-attr]
    with exact_network.using(model.adapter):
        for datum, found in zip(data, result.logprobs, strict=True):
            logp = exact_network.model(input_ids=datum.tokens[None]).logits[0].log_softmax(-1).gather(1, datum.targets)
            assert torch.allclose(found, logp, rtol=0, atol=1e-12)
            loss = loss - (logp * datum.inputs["weights"].double()).sum()
    expected = torch.autograd.grad(loss, parameters)
    for a, b in zip(gradients(model), expected, strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-11 * float(b.abs().max().clamp(min=1)))


WRONG: list[tuple[str, Callable[[list[Datum]], list[Datum]], dict[str, float | str], str]] = [
    ("nonsense", lambda data: data, {}, "there is no loss_fn 'nonsense'"),
    ("stable_reinforce", lambda data: data, {}, "its definition is not public"),
    ("ppo", lambda data: data, {"clip_hgh": 1.0}, "has no setting 'clip_hgh'"),
    ("ppo", lambda data: data, {"clip_low_threshold": float("nan")}, "must be a finite number"),
    ("gspo", lambda data: data, {}, "sequence_ratio_mask"),
    ("dro", lambda data: data, {"beta": "much"}, "must be a finite number"),
    ("cross_entropy", lambda data: data, {}, "does not read loss_fn_inputs\\['advantages'\\]"),
    (
        "ppo",
        lambda data: [Datum(d.tokens[:-1], d.inputs) for d in data],
        {},
        "give one target, or K, for each position",
    ),
    (
        "ppo",
        lambda data: [Datum(d.tokens, {k: v for k, v in d.inputs.items() if k != "logprobs"}) for d in data],
        {},
        "has no",
    ),
    ("ppo", lambda data: [Datum(d.tokens, {**d.inputs, "logprobs": torch.zeros(1)}) for d in data], {}, "expected \\["),
    ("ppo", lambda data: [], {}, "has no data"),
    ("dapo", lambda data: data, {}, "does not read loss_fn_inputs\\['advantages'\\]"),
    ("custom", lambda data: data, {"loss_id": "x"}, "runs no functions of clients.* forward_backward_custom"),
]


@pytest.mark.parametrize(("name", "change", "config", "message"), WRONG)
def test_bad_requests_are_refused_by_name(
    name: str, change: Callable[[list[Datum]], list[Datum]], config: dict[str, float | str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare_loss(name, config, change(policy_data()))
