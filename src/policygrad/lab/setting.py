"""One situation to measure in: a world, the policy π_θ, the policy π_old that sampled, a reference, a critic of given error."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from policygrad.core.advantages import TeacherLogRatio, reward_to_go, total_rewards
from policygrad.core.algorithm import Algorithm
from policygrad.core.batch import Batch, Forward
from policygrad.core.shaping import KLInReward
from policygrad.core.terms import ExactKLToReference, KLToReference
from policygrad.core.validation import check_sampling
from policygrad.core.vine import Vine
from policygrad.errors import ConfigError
from policygrad.lab.sequences import World, derivative

STEP_TOKENS = 2
"""Tokens of a step of an answer, for the parts that read step ends; the last one may be shorter."""


def unsupported_reason(algorithm: Algorithm, group_size: int = 1) -> str | None:
    """Why the lab has no step of this algorithm in groups of this size; None = it has."""
    if not any(isinstance(link, Vine) for link in algorithm.advantage):
        try:
            check_sampling(algorithm, group_size, 1.0)
        except ConfigError as error:
            return str(error) if group_size > 1 else None
        return None
    return (
        f"{algorithm.name} trains on single tokens that are tried in the midst of answers (Vine), and the lab's steps are groups "
        "of whole completions: take trpo, whose single path is one"
    )


def supported_algorithms(algorithms: Mapping[str, Algorithm], group_size: int = 1) -> dict[str, Algorithm]:
    """Those that the lab has a step of, in groups of this size; of one, nobody is left out, since most rows refuse that."""
    return {name: a for name, a in algorithms.items() if unsupported_reason(a, group_size) is None}


@dataclass(frozen=True, eq=False)
class LabSetting:
    """Where an estimator is measured."""

    world: World
    theta: Tensor
    """[P] of π_θ, whose gradient is asked for."""
    old: Tensor | None = None
    """[P] of π_old, which sampled; None = π_θ itself, on-policy."""
    reference: Tensor | None = None
    """[P] of π_ref; None = π_θ."""
    sampler: Tensor | None = None
    """[P] of μ, where an engine that is not π_old sampled."""
    critic_error: float = 0.0
    """The critic says V(s) + error·z(s), z standard normal, drawn once for each state."""
    values: Tensor | None = None
    """[X·S] what the critic says, in place of V + error."""
    truncates: bool = False
    """Whether a completion of the longest length was cut off by the budget; otherwise the budget is one token longer."""
    seed: int = 0
    """Of the critic's errors."""

    @property
    def old_theta(self) -> Tensor:
        """[P] of π_old."""
        return self.theta if self.old is None else self.old

    @property
    def sampling_theta(self) -> Tensor:
        """[P] of the policy that completions are drawn from."""
        return self.old_theta if self.sampler is None else self.sampler

    @property
    def max_tokens(self) -> int:
        return self.world.tree.length + (not self.truncates)

    def prepare(self, algorithm: Algorithm) -> Algorithm:
        """The algorithm in the midst of a run here: open lengths are the budget, a running mean has seen the mean reward J.

        Raises:
            ConfigError: an algorithm whose steps are no groups of completions.
        """
        if why := unsupported_reason(algorithm):
            raise ConfigError(why)
        zero, seen = torch.zeros(1, 1).double(), self.world.objective(self.sampling_theta.detach())[None]
        batch = Batch(mask=zero == 0, group=torch.zeros(1).long(), reward=seen, logp_old=zero, logp_ref=zero)
        batch = replace(batch, example_id=torch.zeros(1).long())
        algorithm = algorithm.with_max_tokens(self.max_tokens)
        return algorithm.with_state(algorithm.update_state(algorithm.init_state(), batch))

    def enumerate_batch(self, algorithm: Algorithm) -> Batch:
        """Every completion of every prompt once, [X·N, L], with the fields that the algorithm reads."""
        world, old = self.world, self.old_theta
        said = algorithm.old_policy == "sampler"  # π_old := μ
        reads = set(algorithm.all_needs) | ({"logp_old"} if self.old is not None or said else set())
        if any(link.samples_values for link in algorithm.advantage):
            reads.add("values")  # a rollout would sample them
        batch = Batch(
            mask=world.mask,
            group=torch.arange(world.prompts).repeat_interleave(world.tree.size),
            truncated=world.tree.truncated.repeat(world.prompts) if self.truncates else None,
            **self.reward_fields(reads),
        )
        reference = self.theta if self.reference is None else self.reference
        thetas = {
            "logp_old": self.sampling_theta if said else old,
            "logp_ref": reference,
            "logp_sampler": self.sampling_theta,
        }
        filled: dict[str, Any] = {n: world.token_logp(t).detach() for n, t in thetas.items() if n in reads}
        if "grad_logp_sq_norm" in reads:
            filled["grad_logp_sq_norm"] = world.scores(old).square().sum(1)
        if "baseline" in reads:  # the greedy completion's reward, at each completion of its prompt
            best = (world.reward * world.greedy(self.sampling_theta)).sum(1)
            filled["baseline"] = best.repeat_interleave(world.tree.size)
        if "example_id" in reads:
            filled["example_id"] = batch.group
        if "step_end" in reads:
            last = torch.arange(world.tree.length) == batch.lengths[:, None] - 1
            filled["step_end"] = world.mask & (last | ((torch.arange(world.tree.length) + 1) % STEP_TOKENS == 0))
        if algorithm.reward_model is not None:
            filled["implicit_reward"] = self._implicit(algorithm.reward_model.beta, reference)
        if "rewards" in reads:  # the world's reward is all there is
            filled |= {"rewards": batch.reward[:, None], "reward_names": ("reward",), "reward_weights": (1.0,)}
        if "demonstration" in reads:  # steps are of samples alone
            filled["demonstration"] = torch.zeros(len(world.mask), dtype=torch.bool)
        batch = replace(batch, **filled)
        return replace(batch, values=self._values(algorithm, batch, old)) if "values" in reads else batch

    def reward_fields(self, reads: Set[str]) -> dict[str, Any]:
        """`reward` [X·N], and of `token_reward` and `anchor` [X·N, L] what is read: here one turn, all of it the outcome's."""
        nothing = torch.zeros(self.world.mask.shape, dtype=torch.float64)
        of_tokens = {"token_reward": nothing, "turn_state": nothing.long()}
        return {"reward": self.world.reward.flatten()} | {name: x for name, x in of_tokens.items() if name in reads}

    def _implicit(self, beta: float, reference: Tensor) -> Tensor:
        """[X·N, L] r_φ(o_t) of a reward model that has learned the rewards: v(prefix and o_t) − v(prefix), v(s) =
        β·log E_{π_ref}[exp(R/β) | s]. Source: Cui et al. 2025 (PRIME), app. C.1."""
        world, reward = self.world, self.world.reward.flatten()
        best = reward.max()  # taken off, so that no exponential overflows
        soft = world.values(reference, ((reward - best) / beta).exp()[:, None].expand(world.mask.shape))
        value = best + beta * soft.log()[world.state]
        last = torch.arange(world.tree.length) == world.mask.sum(1, keepdim=True) - 1
        after = torch.where(last, reward[:, None], torch.cat([value[:, 1:], value[:, :1]], 1))
        return torch.where(world.mask, after - value, 0)

    def _values(self, algorithm: Algorithm, batch: Batch, old: Tensor) -> Tensor:
        """[X·N, L] of the rewards after shaping, under π_old."""
        values = self.values
        if values is None:
            values = self.world.values(old, reward_to_go(algorithm.shape_rewards(batch)))
            generator = torch.Generator().manual_seed(self.seed)
            values = values + self.critic_error * torch.randn(len(values), generator=generator, dtype=torch.float64)
        return values[self.world.state]

    def true_gradient(self, algorithm: Algorithm) -> Tensor:
        """[P] ∇J of the objective that the algorithm states: E of the shaped reward less β·KL(π_θ‖π_ref) of whole completions.

        A KL to the reference in the loss is read as that KL, and so is learning from a teacher, with no reward beside it. What
        other terms ask for (entropy, self-imitation, the KL to
        π_old) is no part of J, and so is bias.
        """
        return self.world.gradient(self.theta, self._stated(algorithm))

    def true_gradient_at(self, algorithm: Algorithm, prompt: int) -> Tensor:
        """[P] the same for one prompt alone."""
        reward = self._stated(algorithm)
        return derivative(lambda theta: self.world.success(theta, reward)[prompt], self.theta)

    def _stated(self, algorithm: Algorithm) -> Tensor:
        """[X, N] the reward whose expectation the algorithm says it maximises."""
        algorithm = self.prepare(algorithm)
        # At π_old = π_θ the penalty's own derivative has expectation 0, so that it may stand still.
        batch = algorithm.shape_rewards(replace(self, old=self.theta, sampler=None).enumerate_batch(algorithm))
        if not algorithm.reads_reward:
            batch = replace(batch, reward=torch.zeros_like(batch.reward), token_reward=None)
        for part in (*algorithm.terms, *algorithm.advantage):
            if isinstance(part, KLToReference | ExactKLToReference | TeacherLogRatio):
                scale = part.coefficient if isinstance(part, TeacherLogRatio) else part.beta
                batch = KLInReward(scale)(batch)
        return total_rewards(batch).reshape(self.world.prompts, -1)

    def forward(self, algorithm: Algorithm) -> Forward:
        """[X·N, L] log π_θ, and entropy and KL(π_old‖π_θ) where a loss term or a choice reads them, with the graph of `theta`."""
        now = self.world.conditionals(self.theta)
        old = self.world.conditionals(self.old_theta)
        reference = self.world.conditionals(self.theta if self.reference is None else self.reference)
        exact = {
            "entropy": -(now.exp() * now).sum(-1),
            "kl_old": (old.exp() * (old - now)).sum(-1),
            "kl_ref": (now.exp() * (now - reference)).sum(-1),
        }
        extra = {name: exact[name][self.world.state] for name in algorithm.forward_needs | algorithm.selection_needs}
        return Forward(self.world.token_logp(self.theta), **extra)
