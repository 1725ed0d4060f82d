"""The papers' objectives by algorithm, evaluated on a batch, and whether an algorithm is the one that is written out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from policygrad.algorithms import ALGORITHMS
from policygrad.core.advantages import FrozenRunningMean, RunningMean
from policygrad.core.algorithm import Algorithm
from policygrad.core.base import Part
from policygrad.core.batch import Batch
from policygrad.core.filters import Curriculum, Downsample, DropZeroVariance, FrozenDownsample
from policygrad.core.terms import KLToOld
from policygrad.errors import ConfigError
from policygrad.papers import critics, grpo, reinforce, signals, trust_regions
from policygrad.papers.completions import Prompts, read_batch

Objective = Callable[[Prompts, int], Tensor]

PAPER_OBJECTIVES: Mapping[str, Objective] = {
    "reinforce": reinforce.reinforce,
    "rloo": reinforce.rloo,
    "opo": reinforce.opo,
    "a2c": critics.a2c,
    "trpo": critics.trpo,
    "natural": critics.trpo,
    "ppo": critics.ppo,
    "ppo_penalty": critics.ppo_penalty,
    "vapo": critics.vapo,
    "pf_ppo": critics.pf_ppo,
    "vineppo": critics.vineppo,
    "grpo": grpo.grpo,
    "grpo_process": signals.grpo_process,
    "iterative_grpo": grpo.grpo,
    "dr_grpo": grpo.dr_grpo,
    "dapo": grpo.dapo,
    "prorl": grpo.prorl,
    "magistral": grpo.magistral,
    "gspo": grpo.gspo,
    "gspo_token": grpo.gspo,
    "cispo": grpo.cispo,
    "sapo": grpo.sapo,
    "remax": reinforce.remax,
    "astar_po": reinforce.astar_po,
    "reinforce_pp": reinforce.reinforce_pp,
    "reinforce_pp_baseline": reinforce.reinforce_pp_baseline,
    "online_dpo": reinforce.online_dpo,
    "otb": reinforce.otb,
    "gpg": reinforce.gpg,
    "raft": reinforce.raft,
    "raft_pp": reinforce.raft_pp,
    "maxrl": grpo.maxrl,
    "passk": grpo.passk,
    "topr": reinforce.topr,
    "asymre": reinforce.asymre,
    "dro": reinforce.dro,
    "scale_rl": grpo.scale_rl,
    "lite_ppo": grpo.lite_ppo,
    "gfpo": grpo.gfpo,
    "gmpo": trust_regions.gmpo,
    "dppo": trust_regions.dppo,
    "prime_rl": trust_regions.prime_rl,
    "deepseek_v32": grpo.deepseek_v32,
    "m2po": trust_regions.m2po,
    "luspo": trust_regions.luspo,
    "vespo": trust_regions.vespo,
    "cpgd": trust_regions.cpgd,
    "clip_cov": trust_regions.clip_cov,
    "kl_cov": trust_regions.kl_cov,
    "ce_gppo": trust_regions.ce_gppo,
    "aspo": trust_regions.aspo,
    "real": trust_regions.real,
    "fipo": trust_regions.fipo,
    "skywork_or1": grpo.skywork_or1,
    "high_entropy": trust_regions.high_entropy,
    "gdpo": signals.gdpo,
    "gigpo": signals.gigpo,
    "luffy": signals.luffy,
    "chord": signals.chord,
    "echo": grpo.echo,
    "spiral": reinforce.spiral,
    "distill": signals.distill,
    "sdpo": signals.sdpo,
    "sdft": signals.sdft,
    "opsd": signals.opsd,
    "prime": signals.prime,
    "trpo_vine": critics.trpo_vine,
}
"""Algorithm -> its objective J, a function of the prompts that take part in one update and of the generation budget in tokens (the
length of Dr. GRPO's denominator and of overlong penalties). J is in float64, with the graph of log π_θ."""

READ_TOKEN_REWARDS = frozenset(
    {
        "reinforce",
        "otb",
        "a2c",
        "trpo",
        "natural",
        "ppo",
        "ppo_penalty",
        "pf_ppo",
        "vapo",
        "vineppo",
        "grpo_process",
        "gigpo",
    }
)
READ_WEIGHTS = frozenset(
    {
        "dapo",
        "ce_gppo",
        "fipo",
        "prorl",
        "magistral",
        "cispo",
        "clip_cov",
        "kl_cov",
        "high_entropy",
        "prime",
        "gpg",
        "trpo_vine",
    }
)


def paper_objective(
    algorithm: Algorithm,
    batch: Batch,
    logp: Tensor,
    max_tokens: int,
    distributions: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Compute the paper's objective of an algorithm on a batch, in float64, token by token.

    Its gradient is that of one update on the full rollout, the negative of that of `surrogate(logp, batch, psi, algorithm)`.
    A minibatch is not enough, since many statistics (whitening, standard deviations of a batch) are over the rollout.

    Args:
        algorithm: under its state (`Algorithm.with_state`): a running mean and an adaptive β have their current values.
        batch: one full rollout after `apply_filters` and `resolve_old_policy`, before reward shaping, with the fields that the
            algorithm's parts need, as a learner's `evaluate` fills them. logp_old None: π_old is the current policy. `selected` is
            filled (`with_selected_tokens`) for clip_cov and kl_cov; `entropy`, of the current policy, for high_entropy.
        logp: log π_θ [B, T], with graph; values off the mask are not read.
        max_tokens: the generation budget.
        distributions: log π_θ(·), with graph, and log π_ref(·) over the vocabulary, each [B, T, V]; for sdft and opsd.

    Returns:
        J [] float64 on the CPU, with the graph of `logp`.

    Raises:
        ConfigError: the algorithm is not one that is written out (`describe_departure` says why), or the batch lacks a field, has
            token rewards or weights that the paper does not have, or selected tokens that it would not select.
    """
    if reason := describe_departure(algorithm, max_tokens):
        raise ConfigError(f"the paper's objective of {algorithm.name} does not apply: {reason}")
    _check_batch(algorithm, batch)
    graph = logp[batch.mask].sum().double().cpu() * 0  # also where J is a constant
    if "kl_ref" in algorithm.forward_needs and distributions is None:
        raise ConfigError(f"the paper's objective of {algorithm.name} is over the vocabulary: give `distributions`")
    prompts, name = read_batch(batch, logp, distributions), algorithm.name
    if name == "reinforce":
        return graph + reinforce.reinforce(
            prompts, max_tokens, baseline=_find(algorithm.advantage, RunningMean).baseline
        )
    if name == "spiral":
        link = _find(algorithm.advantage, RunningMean)
        return graph + reinforce.spiral(prompts, max_tokens, dict(link.means), link.decay)
    if name == "ppo_penalty":
        return graph + critics.ppo_penalty(prompts, max_tokens, beta=_find(algorithm.terms, KLToOld).beta)
    return graph + PAPER_OBJECTIVES[name](prompts, max_tokens)


def _find(parts: tuple[Part, ...], kind: type[Any]) -> Any:
    return next(part for part in parts if isinstance(part, kind))


def _check_batch(algorithm: Algorithm, batch: Batch) -> None:
    name, mask = algorithm.name, batch.mask
    for part in algorithm.parts():
        for field in sorted(part.needs):
            batch.require(field, part)
    for field in sorted(algorithm.selection_needs):
        batch.require(field, algorithm.token_selector)
    if (
        name not in READ_TOKEN_REWARDS
        and batch.token_reward is not None
        and bool((batch.token_reward[mask] != 0).any())
    ):
        raise ConfigError(f"Batch.token_reward is not 0, and the paper's objective of {name} has no token rewards")
    if name not in READ_WEIGHTS and batch.weight is not None and bool((batch.weight[mask] != 1).any()):
        raise ConfigError(f"Batch.weight is not 1, and the paper's objective of {name} has no weights")


# How an algorithm departs from the one that is written out. The update rule, the critic, the reward model, the reference, the head
# and the group size change which numbers a formula is given, but not the formula; neither do these settings.

FORMULA_FIELDS = (
    "advantage",
    "ratio",
    "gate",
    "aggregation",
    "terms",
    "shaping",
    "filters",
    "corrections",
    "old_policy",
)
WITHOUT_EFFECT: Mapping[type[Part], frozenset[str]] = {
    RunningMean: frozenset({"decay", "baseline", "means"}),  # the objective reads the current mean
    DropZeroVariance: frozenset({"max_rounds", "keep_leftovers"}),
    Downsample: frozenset({"seed", "rollout"}),
}
UNDER_A_STATE: Mapping[type[Any], type[Any]] = {FrozenRunningMean: RunningMean, FrozenDownsample: Downsample}
ADAPTIVE = frozenset({"beta", "target", "rule"})  # of `KLToOld` in ppo_penalty: the objective reads the current β


def describe_departure(algorithm: Algorithm, max_tokens: int | None = None) -> str:
    """Return how an algorithm departs from the paper's objective of its name, or "" if it is exactly that.

    The algorithm may be a run's: with its state, with its budget in the parts' lengths, and with any group size, update rule,
    critic and reference. Curricula, a replay buffer and the limits of dynamic sampling do not matter either.

    Args:
        max_tokens: the generation budget that lengths must equal; None: any, but one for all parts.
    """
    name = algorithm.name
    if name not in PAPER_OBJECTIVES:
        return f"no paper's objective is written out for an algorithm named {name!r}"
    if max_tokens is None:
        max_tokens = next((part.length for part in algorithm.parts() if part.length), 1)
    algorithm, row = algorithm.with_max_tokens(max_tokens), ALGORITHMS[name].with_max_tokens(max_tokens)
    for field in FORMULA_FIELDS:
        actual, expected = _formula_parts(algorithm, field), _formula_parts(row, field)
        if actual != expected:
            return f"{field} differs from {name}'s: {_format(actual)} instead of {_format(expected)}"
    return ""


Described = list[tuple[object, dict[str, object]]]  # parts as (class, settings that change the formula)


def _formula_parts(algorithm: Algorithm, field: str) -> Described:
    value = getattr(algorithm, field)
    parts = value if isinstance(value, tuple) else (value,)
    chosen = [part for part in parts if not isinstance(part, Curriculum) and not getattr(part, "replays", False)]
    return [_describe(part, algorithm.name) for part in chosen]


def _describe(part: object, name: str) -> tuple[object, dict[str, object]]:
    if not is_dataclass(part):
        return part, {}
    kind: type[Any] = UNDER_A_STATE.get(type(part), type(part))
    left_out = ADAPTIVE if name == "ppo_penalty" and kind is KLToOld else WITHOUT_EFFECT.get(kind, frozenset())
    return kind, {f.name: getattr(part, f.name) for f in fields(part) if f.name not in left_out}


def _format(described: Described) -> str:
    def one(part: object, settings: dict[str, object]) -> str:
        values = ", ".join(f"{name}={value!r}" for name, value in settings.items())
        return f"{part.__name__}({values})" if isinstance(part, type) else repr(part)

    return ", ".join(one(part, settings) for part, settings in described) or "none"
