"""What the named algorithms need to be on classic control: data, with the reasons.

Of all: no reference model, so no KL to one; values are in the reward's own units, so the critic's error is not clipped;
γ = 0.99 where there is a critic, so that values stay finite however long an episode is; the critic learns at 5e-3, because it
has far to go: at a reward of 1 a step V is about 100, and at 1e-3 it gets there so late that cut-off episodes look as bad as
lost ones. `reinforce` has none and takes
γ = 1: what is left of an episode's return, undiscounted, is an unbiased weight of ∇log π as it is (no γ^t belongs before it).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from policygrad.algorithms import A2C, NATURAL, PPO, PPO_PENALTY, REINFORCE, TRPO
from policygrad.core.aggregates import TokenMean
from policygrad.core.algorithm import Algorithm
from policygrad.core.critic import Critic
from policygrad.core.loss_terms import ExactEntropy
from policygrad.core.ratios import Token
from policygrad.core.run_checks import check_sampling
from policygrad.core.trust_region import TrustRegion
from policygrad.core.update_rules import FirstOrder
from policygrad.core.values import GAE, NStep, Whiten
from policygrad.core.vine import Vine
from policygrad.errors import ConfigError

GAMMA = 0.99


@dataclass(frozen=True)
class Settings:
    """What is no part of the equation."""

    environments: int = 8
    """N, environments stepped together."""
    rollout: int = 128
    """Steps of each of them per rollout."""
    lr: float | None = 1e-3
    """Adam's learning rate for the policy, to begin with; it falls to 0 along a line. None: the algorithm has no use for one."""
    clip: float = 0.5
    """Of the norm of either network's gradient."""
    hidden: tuple[int, ...] = (64, 64)
    """Widths of the hidden layers, policy and critic alike."""
    normalise: bool = False
    """Whether observations are normalised by what was seen so far."""

    def __post_init__(self) -> None:
        for name in ("environments", "rollout"):
            if getattr(self, name) < 1:
                raise ConfigError(f"Settings.{name} must be at least 1, not {getattr(self, name)}")
        if self.lr is not None and not self.lr > 0:
            raise ConfigError(f"Settings.lr must be above 0, not {self.lr}")
        if not self.clip > 0:
            raise ConfigError(f"Settings.clip must be above 0, not {self.clip}")


@dataclass(frozen=True)
class Preset:
    """An algorithm as it is run here."""

    algorithm: Algorithm
    settings: Settings
    reason: str
    """Why it is not the named one as it stands."""


_critic = Critic(lr=5e-3, lam=0.95, gamma=GAMMA, clip=0.0)
_trust = Settings(lr=None)

PRESETS: dict[str, Preset] = {
    p.algorithm.name: p
    for p in (
        Preset(
            replace(
                PPO,
                psi=(GAE(GAMMA, 0.95), Whiten()),
                shaping=(),
                step=FirstOrder(epochs=10, minibatches=4),
                critic=_critic,
            ),
            Settings(lr=1e-3),
            "Ten epochs of four minibatches of single steps: a network of 64 units is far from where a rollout's data would "
            "be used up after four passes.",
        ),
        Preset(
            replace(
                PPO_PENALTY,
                psi=(GAE(GAMMA, 0.95), Whiten()),
                step=FirstOrder(epochs=10, minibatches=4),
                critic=_critic,
            ),
            Settings(lr=1e-3),
            "As ppo.",
        ),
        Preset(
            replace(TRPO, psi=(GAE(GAMMA, 0.95),), step=TrustRegion(0.01, value_steps=30), critic=_critic),
            _trust,
            "A critic that starts from nothing needs more than five steps a rollout.",
        ),
        Preset(
            replace(
                NATURAL,
                psi=(GAE(GAMMA, 0.95),),
                step=TrustRegion(0.01, line_search=False, value_steps=30),
                critic=_critic,
            ),
            _trust,
            "As trpo.",
        ),
        Preset(
            replace(
                A2C,
                psi=(NStep(5, GAMMA),),
                terms=(ExactEntropy(0.01),),  # a term with a graph of its own
                critic=_critic,
            ),
            Settings(rollout=16, lr=1e-3),
            "One update per rollout, so rollouts are short; the entropy of a few actions is exact at no cost.",
        ),
        Preset(
            REINFORCE,
            Settings(rollout=64, lr=5e-3),
            "The named one itself, on whole episodes.",
        ),
    )
}


def preset(name: str) -> Preset:
    """The named algorithm as it is run here.

    Raises:
        ConfigError: an algorithm that is not one of those here, with the nearest.
    """
    key = name.strip().lower().replace("-", "_")
    if key not in PRESETS:
        near = difflib.get_close_matches(key, PRESETS, n=1, cutoff=0.6)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(f"no algorithm {name!r} on classic control: {hint}there are {', '.join(PRESETS)}")
    return PRESETS[key]


def with_gamma(algorithm: Algorithm, gamma: float) -> Algorithm:
    """The same with another γ in its advantages and in its critic's targets.

    Raises:
        ConfigError: no part of it discounts.
    """

    def changed(part: Any) -> Any:
        return replace(part, gamma=gamma) if hasattr(part, "gamma") else part

    found = replace(algorithm, psi=tuple(map(changed, algorithm.psi)), critic=changed(algorithm.critic))
    if found == algorithm and not any(hasattr(part, "gamma") for _, part in algorithm.parts()):
        raise ConfigError(f"{algorithm.name} does not discount: leave gamma out, or take ppo, trpo or a2c")
    return found


FILLED = frozenset({"logp_old", "values", "returns", "truncated", "token_reward"})
"""The Batch fields that a rollout and the learner here can give."""


def check(algorithm: Algorithm) -> None:
    """Raises ConfigError for what classic control cannot give an algorithm, with the reason and the way out."""
    check_sampling(algorithm, 1, 1.0)
    for problem in _problems(algorithm):
        raise ConfigError(f"{algorithm.name}: {problem}")


def _problems(algorithm: Algorithm) -> Iterator[str]:
    if missing := sorted(algorithm.needs - FILLED):
        yield f"a part reads Batch.{missing[0]}, which episodes of an environment do not have: leave it out (shaping=(), terms=())"
    if algorithm.behaviour == "sampler":
        yield "behaviour='sampler' reads what an engine says of its tokens, and here the policy itself acts: leave 'recomputed'"
    if any(isinstance(link, Vine) for link in algorithm.psi) or algorithm.gate.whole_groups:
        yield (
            "a vine tries several actions in one state, and these environments cannot be set back to one: take trpo, the single "
            "path"
        )
    if algorithm.filters:
        yield "filters look at the scores of a prompt's completions, and an environment has no prompts: set filters=()"
    critic = algorithm.critic
    if critic is not None and (critic.pretrain or critic.features != "own"):
        yield (
            "the critic is a network of its own and learns beside the policy: leave pretrain and features as they are in Critic()"
        )
    if algorithm.step.minibatches > 1 and not (
        isinstance(algorithm.ratio, Token) and isinstance(algorithm.aggregate, TokenMean)
    ):
        yield (
            "minibatches hold single steps of episodes, for which a ratio or a mean over whole ones has no meaning: set "
            "ratio=Token() and aggregate=TokenMean(), or minibatches=1"
        )
