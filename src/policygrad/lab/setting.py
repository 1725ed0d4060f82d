"""A setting to measure in: a world, the policy π_θ, the sampling policy π_old, a reference, and a critic of given error."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from policygrad.core.advantages import RunningMean, reward_to_go, total_rewards
from policygrad.core.algorithm import Algorithm
from policygrad.core.batch import Batch, Forward
from policygrad.core.divergences import REVERSE_KL
from policygrad.core.filters import Downsample
from policygrad.core.shaping import KLInReward
from policygrad.core.validation import check_sampling
from policygrad.errors import ConfigError
from policygrad.lab.sequences import World, derivative, sample_normal

STEP_TOKENS = 2  # tokens per step of an answer, for parts that read step ends; the last step may be shorter


def unsupported_reason(algorithm: Algorithm, group_size: int = 1) -> str | None:
    """Return why the lab cannot measure an algorithm with groups of this size; None = it can."""
    if algorithm.replaces_rows:
        return (
            f"{algorithm.name} trains on single tokens sampled within answers (Vine), but the lab's steps are groups of complete "
            "completions: use trpo, its single-path variant"
        )
    if any(part.replays for part in algorithm.filters):
        return (
            f"{algorithm.name} trains on groups of earlier steps, and the lab's steps come one by one: leave out its "
            "replay buffer"
        )
    if any(isinstance(link, RunningMean) and link.per == "sample" for link in algorithm.advantage):
        return (
            f"{algorithm.name} compares a completion with those before it (RunningMean, per='sample'), but the lab's steps have no "
            "order: use per='rollout', as in reinforce"
        )
    if any(isinstance(part, Downsample) for part in algorithm.filters):
        return (
            f"{algorithm.name} leaves to chance which completions it keeps (Downsample), and the lab enumerates completions, not "
            "chances: the experiments kept_answers and filtered_answers sample it"
        )
    if algorithm.reference is not None and algorithm.reference.templates:
        return (
            f"{algorithm.name} has a reference that reads other prompts (Reference.templates), which the lab's worlds do not have: "
            "use distill"
        )
    if any(term.divergence != REVERSE_KL for term in algorithm.terms):
        return f"{algorithm.name} has a divergence that is no expectation of a reward: use ExactKLToReference as it is by default"
    try:
        check_sampling(algorithm, group_size, 1.0)
    except ConfigError as error:
        return str(error) if group_size > 1 else None
    return None


def supported_algorithms(algorithms: Mapping[str, Algorithm], group_size: int = 1) -> dict[str, Algorithm]:
    """Return the algorithms that the lab can measure. At group size 1 none is left out, although most refuse it."""
    return {name: a for name, a in algorithms.items() if unsupported_reason(a, group_size) is None}


@dataclass(frozen=True, eq=False)
class LabSetting:
    """The setting of a measurement."""

    world: World
    theta: Tensor  # [P] of π_θ, at which gradients are measured
    old: Tensor | None = None  # [P] of π_old, which samples; None = π_θ itself, on-policy
    reference: Tensor | None = None  # [P] of π_ref; None = π_θ
    sampler: Tensor | None = None  # [P] of μ, if the sampling engine differs from π_old
    critic_error: float = 0.0
    """The critic returns V(s) + error·z(s), with z standard normal, sampled once for each state."""
    values: Tensor | None = None  # [X·S] the critic's values, in place of V + error
    truncates: bool = False
    """True when completions of maximum length are truncated; otherwise max_tokens is one larger than the length."""
    seed: int = 0  # seed of the critic's errors

    @property
    def old_theta(self) -> Tensor:
        """[P] of π_old."""
        return self.theta if self.old is None else self.old

    @property
    def sampling_theta(self) -> Tensor:
        """[P] of the policy that samples completions."""
        return self.old_theta if self.sampler is None else self.sampler

    def prepare(self, algorithm: Algorithm) -> Algorithm:
        """Return the algorithm with the state of a run in progress: max_tokens is set, and a running mean equals J.

        Raises:
            ConfigError: An algorithm that the lab cannot measure.
        """
        if reason := unsupported_reason(algorithm):
            raise ConfigError(reason)
        zero, mean_reward = torch.zeros(1, 1).double(), self.world.objective(self.sampling_theta.detach())[None]
        batch = Batch(mask=zero == 0, group=torch.zeros(1).long(), reward=mean_reward, logp_old=zero, logp_ref=zero)
        one = torch.zeros(1).long()
        batch = replace(batch, example_id=one, role=one, role_names=("",), peers=one)
        algorithm = algorithm.with_max_tokens(self.world.tree.length + (not self.truncates))
        return algorithm.with_state(algorithm.update_state(algorithm.init_state(), batch))

    def enumerate_batch(self, algorithm: Algorithm) -> Batch:
        """Return all completions of all prompts, [X·N, L], with the fields that the algorithm needs."""
        world, old = self.world, self.old_theta
        from_sampler = algorithm.old_policy == "sampler"  # π_old := μ
        needs = set(algorithm.all_needs) | ({"logp_old"} if self.old is not None or from_sampler else set())
        if any(link.samples_values for link in algorithm.advantage):
            needs.add("values")  # a rollout would sample them
        batch = Batch(
            mask=world.mask,
            group=torch.arange(world.prompts).repeat_interleave(world.tree.size),
            truncated=world.tree.truncated.repeat(world.prompts) if self.truncates else None,
            **self.reward_fields(needs),
        )
        reference = self.theta if self.reference is None else self.reference
        thetas = {
            "logp_old": self.sampling_theta if from_sampler else old,
            "logp_ref": reference,
            "logp_sampler": self.sampling_theta,
            "logp_learner": old,
        }
        needs |= algorithm.needs & {"logp_learner"}
        filled: dict[str, Any] = {n: world.token_logp(t).detach() for n, t in thetas.items() if n in needs}
        if "grad_logp_sq_norm" in needs:
            filled["grad_logp_sq_norm"] = world.scores(old).square().sum(1)
        if "sum_pi_squared" in needs:
            filled["sum_pi_squared"] = (2 * world.conditionals(old)).exp().sum(-1)[world.state]
        if "baseline" in needs:  # the greedy completion's reward, at each completion of its prompt
            baseline = (world.reward * world.greedy(self.sampling_theta)).sum(1)
            for part in algorithm.advantage:
                if (exact := part.value_prompts(world.logp(reference), world.reward)) is not None:
                    baseline = exact
            filled["baseline"] = baseline.repeat_interleave(world.tree.size)
        if "example_id" in needs:
            filled["example_id"] = batch.group
        last = torch.arange(world.tree.length) == batch.lengths[:, None] - 1  # marks the last tokens
        if "step_end" in needs:
            filled["step_end"] = world.mask & (last | ((torch.arange(world.tree.length) + 1) % STEP_TOKENS == 0))
        if algorithm.reward_model is not None:
            # r_φ(o_t) = v(prefix and o_t) − v(prefix) of a reward model that has learned the rewards,
            # v(s) = β·log E_{π_ref}[exp(R/β) | s]. Source: Cui et al. 2025 (PRIME), app. C.1.
            beta, reward = algorithm.reward_model.beta, world.reward.flatten()
            best = reward.max()  # subtracted, so that no exponential overflows
            soft = world.values(reference, ((reward - best) / beta).exp()[:, None].expand(world.mask.shape))
            value = best + beta * soft.log()[world.state]
            after = torch.where(last, reward[:, None], torch.cat([value[:, 1:], value[:, :1]], 1))
            filled["implicit_reward"] = torch.where(world.mask, after - value, 0)
        if "rewards" in needs:  # the world has a single reward
            filled |= {"rewards": batch.reward[:, None], "reward_names": ("reward",), "reward_weights": (1.0,)}
        if "role" in needs:  # there is one
            filled |= {"role": torch.zeros(len(world.mask), dtype=torch.int64), "role_names": ("",)}
        if "peers" in needs:  # all completions of a prompt
            filled["peers"] = torch.zeros(len(world.mask), dtype=torch.int64)
        if "demonstration" in needs:  # there are samples only
            filled["demonstration"] = torch.zeros(len(world.mask), dtype=torch.bool)
        if "observation" in needs:  # and no environment
            filled["observation"] = torch.zeros_like(world.mask)
        batch = replace(batch, **filled)
        if "values" in needs:  # of the shaped rewards under π_old, with the critic's error
            values = self.values
            if values is None:
                values = world.values(old, reward_to_go(algorithm.shape_rewards(batch)))
                values = values + sample_normal(len(values), self.critic_error, self.seed)
            batch = replace(batch, values=values[world.state])
        return batch

    def reward_fields(self, needs: Set[str]) -> dict[str, Any]:
        """Return `reward` [X·N], and `token_reward` and `turn_state` [X·N, L] if needed: here one turn, without turn rewards."""
        zeros = torch.zeros(self.world.mask.shape, dtype=torch.float64)
        token_fields = {"token_reward": zeros, "turn_state": zeros.long()}
        return {"reward": self.world.reward.flatten()} | {name: x for name, x in token_fields.items() if name in needs}

    def true_gradient(self, algorithm: Algorithm, prompt: int | None = None) -> Tensor:
        """[P] ∇J of the algorithm's objective: the expected shaped reward less β·KL(π_θ‖π_ref) of complete completions.

        A KL to the reference in the loss counts as that KL, and so does learning from a teacher, then without a reward. Other terms
        (entropy, self-imitation, the KL to π_old) are not part of J, so their contribution is bias.

        prompt: Only of this prompt; by default J is the mean over prompts.
        """
        algorithm = self.prepare(algorithm)
        # At π_old = π_θ the derivative of the penalty itself has expectation 0, so the penalty may be constant.
        batch = algorithm.shape_rewards(replace(self, old=self.theta, sampler=None).enumerate_batch(algorithm))
        if not algorithm.reads_reward:
            batch = replace(batch, reward=torch.zeros_like(batch.reward), token_reward=None)
        for part in (*algorithm.terms, *algorithm.advantage):
            if part.reference_penalty:
                batch = KLInReward(part.reference_penalty)(batch)
        reward = total_rewards(batch).reshape(self.world.prompts, -1)
        if prompt is None:
            return self.world.gradient(self.theta, reward)
        return derivative(lambda theta: self.world.success(theta, reward)[prompt], self.theta)

    def forward(self, algorithm: Algorithm) -> Forward:
        """[X·N, L] log π_θ, and the exact quantities that loss terms and token selection need, with the graph of `theta`."""
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
