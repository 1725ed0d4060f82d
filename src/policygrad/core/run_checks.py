"""What a run refuses of an algorithm that is sound in itself: its sampling, its rewards, what would do nothing in it."""

from __future__ import annotations

from policygrad.core import ragged
from policygrad.core.batch import Batch
from policygrad.core.composition import Composition
from policygrad.core.distillation import TeacherLogRatio
from policygrad.core.filters import Downsample
from policygrad.core.success import PassAtK
from policygrad.core.update_rules import FirstOrder
from policygrad.core.vine import Vine
from policygrad.errors import ConfigError


def check_rollout(algorithm: Composition) -> None:
    """Raises ConfigError for a teacher that is missing, and for a penalty that does nothing where a rollout feeds one gradient
    step and is the policy's own: in a run. In a loop of one's own the samples may be older than the policy."""
    if any(isinstance(link, TeacherLogRatio) for link in algorithm.psi) and (
        algorithm.reference is None or algorithm.reference.model is None
    ):
        raise ConfigError(
            f"{algorithm.name} learns from a teacher, and none is named: give --teacher, a folder, a hub id or a run's folder "
            "(from Python reference=Reference(model=…)), with the policy's tokenizer. Its own first weights would teach it nothing"
        )
    for term in algorithm.terms:
        single = isinstance(algorithm.step, FirstOrder) and algorithm.step.updates == 1
        if single and term.constrains == "kl_old":
            raise ConfigError(
                f"{type(term).__name__} holds π_θ near π_old, and they are one at the only gradient step of a rollout: set "
                "step=FirstOrder(epochs=4), or drop it"
            )


def check_sampling(algorithm: Composition, samples_per_prompt: int, temperature: float) -> None:
    """Raises ConfigError for one sample per prompt, or equal ones, where a part compares a prompt's samples, and for fewer than
    are to be trained on."""
    for part in (part for part in algorithm.filters if isinstance(part, Downsample)):
        if part.keep > samples_per_prompt:
            raise ConfigError(
                f"Downsample trains on {part.keep} of a prompt's samples, and there are {samples_per_prompt}: set "
                f"samples_per_prompt to {part.keep} or more, or Downsample.keep to {samples_per_prompt} or less"
            )
    for name in (type(part).__name__ for _, part in algorithm.parts() if part.group_statistic):
        if samples_per_prompt < 2:
            raise ConfigError(
                f"{name} compares the samples of one prompt, and there is one per prompt: set samples_per_prompt to 2 or "
                "more, or use RunningMean() (algorithm reinforce)"
            )
        if temperature == 0:
            raise ConfigError(
                f"{name} compares the samples of one prompt, and at temperature 0 they are all equal: set "
                "sampling.temperature above 0"
            )
    for link in algorithm.psi:
        if isinstance(link, Vine) and temperature == 0:
            raise ConfigError(
                "Vine compares several tokens of one state, and at temperature 0 only one is ever drawn: set "
                "sampling.temperature above 0"
            )
        if isinstance(link, PassAtK) and samples_per_prompt <= link.k:
            raise ConfigError(
                f"PassAtK(k={link.k}) compares {link.k}-subsets of a prompt's samples, and of {samples_per_prompt} there is at "
                f"most one: set samples_per_prompt to {link.k + 1} or more, or a smaller k"
            )


def check_rewards(batch: Batch) -> None:
    """Raises ConfigError for a reward that is not finite and is read: that of a completion that is counted or trained on."""
    total = batch.reward
    if batch.token_reward is not None:
        total = total + ragged.masked(batch.token_reward, batch.mask).sum(1)
    bad = ~total.isfinite() & (batch.mask.any(1) | batch.counted)
    if bool(bad.any()):
        rows = bad.nonzero().squeeze(1).tolist()
        named = ", ".join(map(str, rows[:8])) + (", …" if len(rows) > 8 else "")
        raise ConfigError(
            f"Batch.reward or token_reward is NaN or infinite in row{'s' * (len(rows) > 1)} {named}: give a number, or leave "
            "the completion out (its mask all False): a NaN would be the advantage of its whole group"
        )
