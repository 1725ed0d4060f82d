"""What an algorithm makes of a rollout that has more than rewards: what it takes of it, and what it refuses to be."""

from __future__ import annotations

from collections.abc import Iterator

from policygrad.core.aggregates import SequenceMean
from policygrad.core.batch import Batch
from policygrad.core.composition import Composition
from policygrad.core.curriculum import Curriculum
from policygrad.core.filters import Downsample, MaskTruncated
from policygrad.core.mixing import rest
from policygrad.core.success import OverGroupMean
from policygrad.core.trust_region import TrustRegion
from policygrad.core.turn_values import per_turn
from policygrad.core.vine import SelfNormalisation, SelfNormalised, Vine
from policygrad.errors import ConfigError


def data_problems(algorithm: Composition) -> Iterator[str]:
    """What is wrong, and the way out."""
    declared = algorithm.declared
    if "demonstration" in declared:
        yield from _demonstrations(algorithm)
        for part in (part for part in algorithm.filters if part.refill):
            yield (
                f"{type(part).__name__} samples other prompts for groups without spread before a demonstration joins them, so that "
                "those it would teach most are thrown away: set DropNoSpread(mode='drop'), or leave it out"
            )
    if rest(algorithm.terms) < 0:
        names = " and ".join(f"{type(term).__name__} {term.mixture:g}" for term in algorithm.terms if term.mixture)
        yield f"the terms' shares of the objective are {names}, more than the whole: let them add up to at most 1"
    if "rewards" in declared and algorithm.shaping:
        names = " and ".join(type(part).__name__ for part in algorithm.shaping)
        yield (
            f"the advantage reads each reward function's own number, which {names} would not change: set shaping=(), or make it "
            "a reward function, or put KLToReference() into terms"
        )
    if algorithm.shaping and any(isinstance(link, OverGroupMean) for link in algorithm.psi):
        names = " and ".join(type(part).__name__ for part in algorithm.shaping)
        yield (
            f"OverGroupMean follows the likelihood of success, and {names} would lower rewards below 0: set shaping=(), and put "
            "KLToReference() into terms, or replace OverGroupMean by GroupStd()"
        )
    resting = [part for part in algorithm.filters if isinstance(part, Curriculum)]
    if resting and any(part.refill for part in algorithm.filters):
        yield (
            f"{type(resting[0]).__name__} learns from a step's groups how well prompts are solved, and a filter that refills sets "
            "those aside before: set DropNoSpread(mode='drop'), or drop one of the two"
        )
    compares = any(link.group_statistic and "anchor" in link.needs for link in algorithm.psi)
    if compares and any(isinstance(part, MaskTruncated) and part.keep_in_statistics for part in algorithm.filters):
        yield (
            "the advantage compares turns, and a masked completion has none left: set MaskTruncated(keep_in_statistics=False)"
        )
    for link in algorithm.psi:
        gamma, critic = per_turn(link), algorithm.critic
        if critic is not None and gamma is not None and gamma != critic.turn_gamma:
            yield (
                f"{type(link).__name__} discounts by {gamma:g} per turn and the critic's targets by {critic.turn_gamma:g}, so that "
                f"rewards and values would be of different things: set turn_gamma={gamma:g} of the critic"
            )
    yield from _vine(algorithm)


_OF_ANSWERS = frozenset(
    (
        "values",
        "bootstrap",
        "baseline",
        "step_end",
        "token_reward",
        "implicit_reward",
        "anchor",
        "rewards",
        "demonstration",
    )
)
"""What is said of whole completions, which a vine's rows are not."""


def _vine(algorithm: Composition) -> Iterator[str]:
    if any(isinstance(link, Vine) for link in algorithm.psi):
        for part in (*algorithm.filters, *algorithm.shaping):
            yield (
                f"Vine trains on single tokens tried in the midst of answers, and {type(part).__name__} looks at whole ones: set "
                f"{'filters' if part in algorithm.filters else 'shaping'}=()"
            )
        for field in sorted(algorithm.declared & _OF_ANSWERS):
            yield f"a part reads Batch.{field} of whole answers, and Vine trains on single tokens in the midst of them: drop it"
    gate, term = isinstance(algorithm.gate, SelfNormalised), _normalises(algorithm)
    if gate and not term:
        yield (
            "SelfNormalised divides by a sum over the group that moves with the policy, and nothing differentiates it: set "
            "terms=(SelfNormalisation(),)"
        )
    if term and not gate:
        yield "SelfNormalisation differentiates the normaliser of SelfNormalised, which is not there: set gate=SelfNormalised()"
    if gate and algorithm.corrections:
        yield (
            f"{type(algorithm.corrections[0]).__name__} would weigh the tokens of a group in SelfNormalised's numerator alone: set "
            "corrections=(); behaviour='sampler' takes account of who sampled, also of older weights"
        )
    if gate and isinstance(algorithm.aggregate, SequenceMean):
        yield "SelfNormalised weighs a group's tokens by itself, and SequenceMean by length: set aggregate=GroupTokenMean()"


def _normalises(algorithm: Composition) -> bool:
    return any(isinstance(term, SelfNormalisation) for term in algorithm.terms)


def _demonstrations(algorithm: Composition) -> Iterator[str]:
    gate = "demonstration" in algorithm.gate.needs
    if not gate and not any("demonstration" in term.needs for term in algorithm.terms):
        yield (
            "a part asks for demonstrations and nothing learns from them: set gate=PolicyShaping(), add DemonstrationNLL() to "
            "terms, or drop it"
        )
    if algorithm.critic is not None:
        yield (
            "a critic is fitted to what the policy's own samples return, and a demonstration is none: set critic=None and a group "
            "baseline such as GroupMean(), or drop the demonstrations"
        )
    if isinstance(algorithm.step, TrustRegion):
        yield (
            "TrustRegion measures curvature and KL on the policy's own samples, and a demonstration is none: set "
            "step=FirstOrder(), or drop the demonstrations"
        )
    if any(isinstance(part, Downsample) for part in algorithm.filters):
        yield (
            "Downsample chooses among all completions of a prompt, and might leave out the demonstration: drop it, or the "
            "demonstrations"
        )
    if "step_end" in algorithm.declared:
        yield (
            "an advantage along the steps of an answer needs every completion's steps, and a demonstration has none: take a group "
            "baseline such as GroupMean(), or drop the demonstrations"
        )


def check_demonstrations(algorithm: Composition, batch: Batch) -> None:
    """Raises ConfigError for demonstrations that no part takes: they would count as the policy's own samples."""
    if batch.demonstration is None or "demonstration" in algorithm.declared:
        return
    rows = (batch.demonstration & batch.mask.any(1)).nonzero().flatten().tolist()
    if rows:
        raise ConfigError(
            f"row {rows[0]} is a demonstration (Batch.demonstration), which {algorithm.name} would take for a sample of its own "
            "policy: leave it out, set gate=PolicyShaping(), or add DemonstrationNLL() to terms"
        )
