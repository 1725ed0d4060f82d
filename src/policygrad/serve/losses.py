"""Loss functions by name: those of the Tinker API, and every algorithm that needs no second model.

All are the equation of `core.objective` with coefficients that are fixed over the whole request, so that it does not matter how the
request is divided into micro-batches. The API's losses are sums over tokens: every coefficient is 1. A loss of a client's own is
computed by the SDK on the client, which sends its gradient in log π as the weights of `cross_entropy`: nothing of it runs here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from policygrad.algorithms import ALGORITHMS
from policygrad.core.algorithm import Algorithm
from policygrad.core.base import State, Term
from policygrad.core.batch import Batch, Coefficients, Forward
from policygrad.core.gates import Clip, ClippedImportance, Importance, OnPolicy, UnitWeight
from policygrad.core.media import TextMedia, distinguish_media
from policygrad.core.objective import objective, surrogate, with_selected_tokens
from policygrad.core.ratios import Sequence as SequenceRatio
from policygrad.core.ratios import Token
from policygrad.core.terms import KLToOld
from policygrad.errors import ConfigError
from policygrad.serve.model_input import ModelInputParts
from policygrad.training.config.serialization import from_dict

LossConfig = Mapping[str, float | str]
TARGETS, LOGPROBS, ADVANTAGES, WEIGHTS, RATIO_MASK = (
    "target_tokens",
    "logprobs",
    "advantages",
    "weights",
    "sequence_ratio_mask",
)
UNAVAILABLE = {
    "stable_reinforce": "its definition is not public: use importance_sampling, or an algorithm whose ratio accounts for a stale "
    "sampler, such as cispo",
    "custom": "the server runs no functions of clients: give yours to forward_backward_custom, which computes it on the client",
}
"""Losses of the hosted service that are not available here, and why."""


@dataclass(frozen=True, eq=False)
class Datum:
    """One text and what its loss reads."""

    tokens: Tensor
    """[T] int64; what the model reads. Of a picture, its placeholder tokens."""
    inputs: Mapping[str, Tensor]
    """`target_tokens` [T] or [T, K] int64, which position t predicts, and the fields of the loss."""
    media: TextMedia = ()
    """The pictures among the tokens."""
    parts: ModelInputParts | None = None
    """Chunks with pictures that are not read yet: `tokens` is empty until `ServedNetwork.read_datum` has read them."""

    @property
    def targets(self) -> Tensor:
        """Return `target_tokens`, or raise ConfigError."""
        targets = self.inputs.get(TARGETS)
        if targets is None or targets.ndim not in (1, 2) or len(targets) != len(self.tokens):
            shape = "missing" if targets is None else f"of shape {list(targets.shape)}"
            raise ConfigError(
                f"loss_fn_inputs[{TARGETS!r}] is {shape}, and the model reads {len(self.tokens)} tokens: give one target, or K, "
                "for each position"
            )
        return targets


def target_rows(data: Sequence[Datum]) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Return the texts [T] and the targets [T] of all rows, and the datum [rows] of each."""
    texts, targets, owner = list[Tensor](), list[Tensor](), list[int]()
    for i, datum in enumerate(data):
        columns = [datum.targets] if datum.targets.ndim == 1 else list(datum.targets.unbind(1))
        texts += [datum.tokens] * len(columns)
        targets += columns
        owner += [i] * len(columns)
    return texts, targets, torch.tensor(owner)


def prepare_loss(
    name: str,
    config: LossConfig,
    data: Sequence[Datum],
    *,
    dtype: torch.dtype = torch.float32,
    states: Mapping[str, State] | None = None,
) -> EquationLoss:
    """Return the loss called `name` over the data of a request.

    Args:
        config: The loss's settings, such as clip_high_threshold; an algorithm's by their dotted names, such as gate.high.
        dtype: Of the loss's numbers: the model's, at least float32.
        states: What stateful algorithms remember of earlier requests, by name.

    Raises:
        ConfigError: No such loss; a field that is missing or has another shape; a setting that the loss does not have.
    """
    if not data:
        raise ConfigError("the request has no data")
    _check_finite(data)
    if name in UNAVAILABLE:
        raise ConfigError(f"loss_fn={name!r} is not available here: {UNAVAILABLE[name]}")
    has_rewards = "reward" in data[0].inputs  # what an algorithm reads, and no loss of the API does
    if name in API_LOSSES and not (has_rewards and name in ALGORITHMS):
        return API_LOSSES[name](dict(config), data, dtype)
    if name in ALGORITHMS:
        return _prepare_algorithm(ALGORITHMS[name], config, data, dtype, (states or {}).get(name))
    names = [*API_LOSSES, *(n for n in ALGORITHMS if n not in API_LOSSES)]
    raise ConfigError(f"there is no loss_fn {name!r}: it is one of {', '.join(names)}")


def _check_finite(data: Sequence[Datum]) -> None:
    """Raise ConfigError for a number that is none, of which one makes the whole gradient none."""
    for i, datum in enumerate(data):
        for name, value in datum.inputs.items():
            if value.is_floating_point() and not bool(torch.isfinite(value).all()):
                place = (~torch.isfinite(value)).nonzero()[0].tolist()
                raise ConfigError(
                    f"datum {i}: loss_fn_inputs[{name!r}] is {float(value[tuple(place)])} at {place}: give finite numbers, 0 "
                    "where a position does not count"
                )


# The equation.


@dataclass(frozen=True, eq=False)
class EquationLoss:
    """−Σ (c·w·Ψ + Σ c^m·k^m)·log π over the data of one request, by `core.objective.surrogate`.

    Rows are those of `target_rows`: a datum with K targets per position is K rows.
    """

    algorithm: Algorithm
    batch: Batch
    psi: Tensor
    coefficients: Coefficients
    is_likelihood: bool = False
    """The reported value is −Σ w·Ψ·log π, as the API defines it where no ratio is in the objective; else minus the objective."""
    state: State | None = None
    """State of the algorithm after this request."""

    @property
    def forward_needs(self) -> frozenset[str]:
        """Statistics of a forward pass that it reads beside log π."""
        return self.algorithm.forward_needs

    @property
    def selection_needs(self) -> frozenset[str] | None:
        """What it reads, beside log π, of a forward pass over all rows before any other; None = it needs no such pass."""
        return None if self.algorithm.token_selector is None else self.algorithm.selection_needs

    @property
    def keep_together(self) -> Tensor | None:
        """Rows with equal numbers [rows] int64 must be in one micro-batch; None = no row needs another."""
        return self.batch.group if self.algorithm.gate.requires_full_groups else None

    def select_tokens(self, out: Forward) -> EquationLoss:
        """Fix what depends on a forward pass over all rows, given without graph."""
        batch = with_selected_tokens(out, self.batch, self.psi, self.algorithm)
        return replace(self, batch=batch, coefficients=self.algorithm.all_coefficients(batch))

    def _share(self, rows: Tensor, device: torch.device) -> tuple[Batch, Tensor, Algorithm, Coefficients]:
        c = tuple(x[rows].to(device) for x in self.coefficients)
        return self.batch.select(rows).to(device), self.psi[rows].to(device), self.algorithm, c

    def __call__(self, out: Forward, rows: Tensor) -> Tensor:
        """Return a scalar [] for these rows, whose gradient is the loss's. All rows' scalars add up."""
        return surrogate(out, *self._share(rows, out.logp.device))

    @torch.no_grad()
    def value(self, out: Forward, rows: Tensor) -> dict[str, float]:
        """Return metrics of these rows, `name:sum` or `name:mean`."""
        batch, psi, algorithm, c = self._share(rows, out.logp.device)
        if self.is_likelihood:
            loss = surrogate(out, batch, psi, replace(algorithm, terms=()), c[0])
            for term, weights in zip(algorithm.terms, c[1:], strict=True):
                assert isinstance(term, Term)
                loss = loss - (weights * term.value(out, batch, psi))[batch.mask].sum()
        else:
            loss = -objective(out, batch, psi, algorithm, c)
        return {"loss:sum": float(loss)}


def _columns(name: str, data: Sequence[Datum], dtype: torch.dtype) -> Tensor:
    """Return a field of all rows, [rows, T], padded with 0. Raises ConfigError if it is missing, or unlike the targets."""
    rows = list[Tensor]()
    for i, datum in enumerate(data):
        if name not in datum.inputs:
            raise ConfigError(f"datum {i} has no loss_fn_inputs[{name!r}], which this loss reads")
        value = datum.inputs[name]
        if value.shape != datum.targets.shape:
            raise ConfigError(
                f"datum {i}: loss_fn_inputs[{name!r}] has shape {list(value.shape)}, expected {list(datum.targets.shape)} as in "
                f"{TARGETS!r}"
            )
        rows += [value] if value.ndim == 1 else list(value.unbind(1))
    return torch.nn.utils.rnn.pad_sequence([row.to(dtype) for row in rows], batch_first=True)


def _values(name: str, data: Sequence[Datum], dtype: torch.dtype) -> Tensor:
    """Return a field with one number per datum, [rows]."""
    for i, datum in enumerate(data):
        if name not in datum.inputs or datum.inputs[name].numel() != 1:
            raise ConfigError(f"datum {i} needs one number as loss_fn_inputs[{name!r}]")
    return torch.stack([datum.inputs[name].flatten()[0] for datum in data]).to(dtype)


def _reject_unread(name: str, data: Sequence[Datum], fields: Sequence[str], config: Mapping[str, Any]) -> None:
    """Raise ConfigError for a field or a setting that the loss would silently ignore."""
    if config:
        raise ConfigError(f"loss_fn={name!r} has no setting {min(config)!r}")
    for i, datum in enumerate(data):
        if unread := sorted(datum.inputs.keys() - {TARGETS, *fields}):
            raise ConfigError(
                f"datum {i}: loss_fn={name!r} does not read loss_fn_inputs[{unread[0]!r}]: leave it out. It reads "
                f"{', '.join((TARGETS, *fields))}"
            )


def _one_target(name: str, data: Sequence[Datum]) -> None:
    for i, datum in enumerate(data):
        if datum.targets.ndim != 1:
            raise ConfigError(
                f"datum {i}: loss_fn={name!r} takes one target for each position, not {datum.targets.shape[1]}"
            )


def _number(config: dict[str, Any], name: str, default: float) -> float:
    value = config.pop(name, default)
    if isinstance(value, str) or not math.isfinite(value):
        raise ConfigError(f"loss_fn_config[{name!r}] must be a finite number, not {value!r}")
    return float(value)


def _sum_loss(
    algorithm: Algorithm, mask: Tensor, psi: Tensor, *, logp_old: Tensor | None = None, is_likelihood: bool = False
) -> EquationLoss:
    """Return the loss whose coefficients are all 1. Ψ off the mask is an error of the client's."""
    if bool((psi[~mask] != 0).any()):
        raise ConfigError(f"advantages must be 0 where {RATIO_MASK} is 0")
    batch = Batch(mask=mask, group=torch.arange(len(mask)), reward=psi.new_zeros(len(mask)), logp_old=logp_old)
    ones = mask.to(psi.dtype)
    return EquationLoss(algorithm, batch, psi, (ones,) * (1 + len(algorithm.terms)), is_likelihood)


def _valid(data: Sequence[Datum]) -> Tensor:
    """Return [rows, T] bool, True where a row has a target."""
    _, targets, _ = target_rows(data)
    return torch.nn.utils.rnn.pad_sequence([torch.ones_like(t, dtype=torch.bool) for t in targets], batch_first=True)


def _cross_entropy(config: dict[str, Any], data: Sequence[Datum], dtype: torch.dtype) -> EquationLoss:
    """−Σ weight·log π(target)."""
    _reject_unread("cross_entropy", data, (WEIGHTS,), config)
    algorithm = Algorithm("cross_entropy", gate=OnPolicy())
    return _sum_loss(algorithm, _valid(data), _columns(WEIGHTS, data, dtype), is_likelihood=True)


def _policy_loss(
    name: str,
    build: Callable[[dict[str, Any]], Algorithm],
    config: dict[str, Any],
    data: Sequence[Datum],
    dtype: torch.dtype,
    *,
    is_likelihood: bool = False,
) -> EquationLoss:
    """A sum over tokens, with q = exp(logprobs) for the sampler's probabilities and A for the advantages."""
    algorithm = build(config)
    has_sequence_ratio = isinstance(algorithm.ratio, SequenceRatio)
    fields = (LOGPROBS, ADVANTAGES, *((RATIO_MASK,) if has_sequence_ratio else ()))
    _reject_unread(name, data, fields, config)
    _one_target(name, data)
    mask = _valid(data)
    if has_sequence_ratio:
        mask = mask & (_columns(RATIO_MASK, data, dtype) != 0)
    columns = partial(_columns, data=data, dtype=dtype)
    return _sum_loss(algorithm, mask, columns(ADVANTAGES), logp_old=columns(LOGPROBS), is_likelihood=is_likelihood)


def _clip(config: dict[str, Any], low: float, high: float) -> Clip:
    """Return the gate between two absolute thresholds, which a client gives as clip_low_threshold and clip_high_threshold."""
    low, high = _number(config, "clip_low_threshold", low), _number(config, "clip_high_threshold", high)
    return Clip(1 - low, high - 1)


API_LOSSES: Mapping[str, Callable[[dict[str, Any], Sequence[Datum], torch.dtype], EquationLoss]] = {
    "cross_entropy": _cross_entropy,
    # −Σ (π/q)·A
    "importance_sampling": partial(
        _policy_loss, "importance_sampling", lambda config: Algorithm("is", ratio=Token(), gate=Importance())
    ),
    # −Σ min((π/q)·A, clip(π/q)·A)
    "ppo": partial(_policy_loss, "ppo", lambda config: Algorithm("ppo", ratio=Token(), gate=_clip(config, 0.8, 1.2))),
    # −Σ sg[clip(π/q)]·A·log π
    "cispo": partial(
        _policy_loss,
        "cispo",
        lambda config: Algorithm(
            "cispo",
            ratio=Token(),
            gate=ClippedImportance(
                _number(config, "clip_low_threshold", 0.0), _number(config, "clip_high_threshold", 4.0)
            ),
        ),
        is_likelihood=True,
    ),
    # −Σ min(s·A, clip(s)·A) with s the geometric mean of π/q over the tokens of sequence_ratio_mask, whose gradient each token has
    # alone; the thresholds without a setting are the paper's (Zheng et al. 2025, sec. 5.1)
    "gspo": partial(
        _policy_loss,
        "gspo",
        lambda config: Algorithm("gspo", ratio=SequenceRatio(), gate=_clip(config, 1 - 3e-4, 1 + 4e-4)),
    ),
    # −Σ (A·log π − β/2·(log π/q)²)
    "dro": partial(
        _policy_loss,
        "dro",
        lambda config: Algorithm(
            "dro", ratio=Token(), gate=UnitWeight(), terms=(KLToOld(_number(config, "beta", 0.05), "k2"),)
        ),
        is_likelihood=True,
    ),
}
"""The API's losses, as its documentation defines them (tinker-docs.thinkingmachines.ai/tinker/losses)."""


# The library's algorithms.

_PER_TOKEN = {
    LOGPROBS: "logp_sampler",
    "ref_logprobs": "logp_ref",
    "token_rewards": "token_reward",
    "step_end": "step_end",
}
_PER_COMPLETION = {"truncated": "truncated", "baseline": "baseline", "demonstration": "demonstration"}
_COMPLETION_IDS = {"example_id": "example_id", "role": "role", "peers": "peers"}
_BOOLEAN = ("step_end", "truncated", "demonstration")


def _prepare_algorithm(
    algorithm: Algorithm, config: LossConfig, data: Sequence[Datum], dtype: torch.dtype, state: State | None
) -> EquationLoss:
    """Advantages from the rewards of groups, coefficients and all, over the request.

    Fields: mask [T], 1 for sampled tokens; reward [1]; logprobs [T], which are π_old; group [1], or equal prompts; and what the
    algorithm reads: ref_logprobs, token_rewards, step_end, truncated, baseline, demonstration, example_id, role, peers.
    """
    name = algorithm.name
    algorithm = _with_settings(algorithm, config)
    optional = {*_PER_TOKEN, *_PER_COMPLETION, *_COMPLETION_IDS, "group"}
    _reject_unread(name, data, ("mask", "reward", *sorted(optional)), {})
    _one_target(name, data)
    given = {field for field in optional if any(field in datum.inputs for datum in data)}
    mask = _valid(data) & (_columns("mask", data, dtype) != 0)
    fields: dict[str, Tensor] = {}
    for wire, target in _PER_TOKEN.items():
        if wire in given:
            value = _columns(wire, data, dtype)
            fields[target] = value != 0 if target in _BOOLEAN else value
    for wire, target in _PER_COMPLETION.items():
        if wire in given:
            value = _values(wire, data, dtype)
            fields[target] = value != 0 if target in _BOOLEAN else value
    for wire, target in _COMPLETION_IDS.items():
        if wire in given:
            fields[target] = _values(wire, data, torch.int64)
    roles: tuple[str, ...] = ()
    if "role" in fields:
        roles = tuple(str(number) for number in range(int(fields["role"].max()) + 1))
    if algorithm.ratio is not None or algorithm.old_policy == "sampler" or "logp_old" in algorithm.all_needs:
        if "logp_sampler" not in fields:
            raise ConfigError(f"loss_fn={name!r} reads log π_old: give loss_fn_inputs[{LOGPROBS!r}], the sampler's")
        fields["logp_old"] = fields["logp_sampler"]
    group = _values("group", data, torch.int64) if "group" in given else _group_by_prompt(data, mask)
    reward = _values("reward", data, dtype)
    batch = Batch(mask=mask, group=group, reward=reward, role_names=roles, **fields)  # type: ignore[arg-type]
    if not algorithm.update_rule.uses_lr:
        raise ConfigError(f"loss_fn={name!r} takes steps of its own (a trust region), not those of optim_step")
    _check_fields(algorithm, batch, name)
    state = algorithm.init_state() if state is None else state
    algorithm = algorithm.with_state(state)
    try:
        batch = algorithm.apply_filters(batch)
        shaped = algorithm.shape_rewards(batch)
        psi = algorithm.compute_advantages(batch, shaped).to(dtype)
        state = algorithm.update_state(state, batch, {}, shaped)
    except ConfigError as error:
        raise ConfigError(f"loss_fn={name!r}: {error}") from error
    # those of an algorithm that selects tokens depend on a forward pass
    coefficients = algorithm.all_coefficients(batch) if algorithm.token_selector is None else ()
    return EquationLoss(algorithm, batch, psi, coefficients, state=state)


def _with_settings(algorithm: Algorithm, config: LossConfig) -> Algorithm:
    """Change an algorithm's settings by dotted names, such as gate.high=0.28; samples_per_prompt and the like by theirs."""
    nested: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, str):
            raise ConfigError(f"loss_fn_config[{key!r}] must be a number, not {value!r}")
        *path, last = key.split(".")
        table = nested
        for part in path:
            table = table.setdefault(part, {})
        table[last] = int(value) if float(value).is_integer() else value
    return from_dict(nested, algorithm, "loss_fn_config")


def _check_fields(algorithm: Algorithm, batch: Batch, name: str) -> None:
    """Raise ConfigError if a part reads what neither the client gives nor this server computes."""
    missing = {n for n in algorithm.all_needs - {"selected"} if getattr(batch, n) is None}
    wires = {v: k for k, v in {**_PER_TOKEN, **_PER_COMPLETION, **_COMPLETION_IDS}.items()}
    if second := missing - wires.keys() - {"logp_old"}:
        what = {
            "values": "a critic",
            "implicit_reward": "a reward model",
            "sum_pi_squared": "Σ π² over the vocabulary",
            "observation": "the environment's tokens",
        }.get(min(second), f"Batch.{min(second)}")
        raise ConfigError(
            f"loss_fn={name!r} needs {what}, which this server does not have: use `policygrad train {name}`"
        )
    if missing - {"logp_old"}:
        wire = wires[min(missing - {"logp_old"})]
        raise ConfigError(f"loss_fn={name!r} reads loss_fn_inputs[{wire!r}]: give it for every datum")
    if unknown := algorithm.forward_needs - {"entropy"}:
        raise ConfigError(
            f"loss_fn={name!r} compares whole distributions ({min(unknown)}), which needs a second model here"
        )


def _group_by_prompt(data: Sequence[Datum], mask: Tensor) -> Tensor:
    """Return [rows] int64: data with equal tokens and pictures up to the first sampled token have equal numbers."""
    numbers: dict[tuple[int, ...], int] = {}
    texts = (distinguish_media(datum.tokens, datum.media) for datum in data)
    prompts = (text[: int(row.int().argmax()) + 1] for text, row in zip(texts, mask, strict=True))
    return torch.tensor([numbers.setdefault(tuple(prompt.tolist()), len(numbers)) for prompt in prompts])
