"""What an algorithm asks of memory and time, read off its parts: for a plan, and for a run's footprint."""

from __future__ import annotations

from policygrad.core.algorithm import Algorithm
from policygrad.core.update_rules import FirstOrder
from policygrad.core.vine import Vine
from policygrad.errors import ConfigError
from policygrad.planning.work import Asks


def asks(algorithm: Algorithm) -> Asks:
    """How many models train and wait, and how often a rollout is read: what `Learner.evaluate` fills and `step` goes over."""
    needs, step = algorithm.needs, algorithm.step
    own_critic = algorithm.critic is not None and algorithm.critic.features == "own"
    rewarded = algorithm.reward_model is not None
    epochs = max(1, step.updates // step.minibatches)
    scores = bool({"logp_old", "entropy"} & needs) + ("logp_ref" in needs or rewarded) + rewarded
    scores += own_critic and "values" in needs
    if algorithm.selecting is not None and algorithm.select_needs:
        scores += epochs  # the choice is made among all of an update's tokens, before it is split
    recomputed = algorithm.behaviour == "recomputed"
    known = recomputed and "logp_old" not in needs and not algorithm.terms and not algorithm.forward_needs
    return Asks(
        name=algorithm.name,
        trained=1 + own_critic + rewarded,
        frozen=("logp_ref" in needs) + ("kl_old" in algorithm.forward_needs),
        scores=scores,
        behind=int(recomputed and "logp_old" not in needs),
        head_twice=not known,
        epochs=epochs,
        updates=step.updates,
        samples=algorithm.samples_per_prompt,
        uncounted=_uncounted(algorithm),
    )


def planned(algorithm: Algorithm) -> Asks:
    """As `asks`, of an algorithm that a plan counts whole.

    Raises:
        ConfigError: it moves the weights in another way than by gradient steps.
    """
    if type(algorithm.step) is not FirstOrder:
        raise ConfigError(
            f"--algorithm {algorithm.name}: its step is {type(algorithm.step).__name__}, and a plan counts gradient steps alone "
            "(FirstOrder): plan with ppo or grpo, and expect more seconds"
        )
    return asks(algorithm)


def _uncounted(algorithm: Algorithm) -> tuple[str, ...]:
    """Completions that are drawn besides."""
    found = list[str]()
    if any(part.refill for part in algorithm.filters):
        found.append("further prompts that are drawn in the place of those that a filter drops")
    if "baseline" in algorithm.needs:
        found.append("a greedy completion of every prompt")
    if any(link.samples_values or isinstance(link, Vine) for link in algorithm.psi):
        found.append("completions that are drawn from within answers, to estimate values")
    if "score_norm" in algorithm.needs:
        found.append("norms of every completion's gradient")
    return tuple(found)
