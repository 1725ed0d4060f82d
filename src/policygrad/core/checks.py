"""What an algorithm refuses to be: parts of the wrong kind, and parts that contradict each other, each with the way out."""

from __future__ import annotations

from collections.abc import Iterator

from policygrad.core.composition import Composition
from policygrad.core.controllers import penalties
from policygrad.core.data_checks import data_problems
from policygrad.core.dual_descent import DualDescent
from policygrad.core.filters import Downsample, DropNoSpread, MaskTruncated
from policygrad.core.process import ProcessReward
from policygrad.core.ratios import Token
from policygrad.core.roles import check_kinds
from policygrad.core.shaping import KLInReward
from policygrad.core.trust_region import TrustRegion
from policygrad.core.update_rules import FirstOrder
from policygrad.errors import ConfigError

BEHAVIOURS = ("recomputed", "sampler")


def check(algorithm: Composition) -> None:
    """Raises ConfigError for the first thing that is wrong."""
    for checks in (
        check_kinds,
        _spread,
        _ratio,
        _selection,
        _behaviour,
        _values,
        _order,
        _steps,
        _reference,
        _reward_model,
        _penalty,
        _trust_region,
        data_problems,
    ):
        for problem in checks(algorithm):
            raise ConfigError(problem)


def _spread(algorithm: Composition) -> Iterator[str]:
    """What is added to a standard deviation before something is divided by it, in whichever part."""
    for _, part in algorithm.parts():
        eps = getattr(part, "eps", 0.0)
        if not 0 <= eps < float("inf"):
            yield f"{type(part).__name__}.eps must be at least 0 and finite, not {eps}"


def _ratio(algorithm: Composition) -> Iterator[str]:
    gate, ratio, updates = algorithm.gate, algorithm.ratio, algorithm.step.updates
    name, on_policy = type(gate).__name__, gate.on_policy
    if on_policy and updates > 1:
        yield (
            f"{name} takes one update per rollout, not {updates}: from the second on, the samples are another "
            "policy's. Set step to FirstOrder(1, 1), or a ratio and a gate such as Clip()"
        )
    if on_policy and ratio is not None:
        yield (
            f"{name} ignores the ratio, and ratio is {type(ratio).__name__}: set ratio=None, or a gate such as "
            "Importance() or Clip()"
        )
    if not on_policy and ratio is None:
        yield f"{name} gates a ratio, and ratio is None: set ratio=Token() or Sequence()"
    if gate.token_ratio and not isinstance(ratio, Token):
        yield f"{name} reads the tokens' own ratios, and ratio is {type(ratio).__name__}: set ratio=Token()"


def _selection(algorithm: Composition) -> Iterator[str]:
    names = [type(part).__name__ for _, part in algorithm.parts() if "selected" in part.needs]
    if len(names) > 1:
        yield f"{' and '.join(names)} would each choose tokens of an update, and Batch.selected holds one choice: leave one out"
    if names and isinstance(algorithm.step, TrustRegion):
        yield (
            f"{names[0]} chooses among the tokens of one gradient step, and TrustRegion looks at several policies: set "
            "step=FirstOrder(), or drop it"
        )


def _behaviour(algorithm: Composition) -> Iterator[str]:
    if algorithm.behaviour not in BEHAVIOURS:
        yield f"behaviour must be {' or '.join(map(repr, BEHAVIOURS))}, not {algorithm.behaviour!r}"
    if algorithm.behaviour != "sampler":
        return
    if algorithm.gate.on_policy:
        yield (
            f"behaviour='sampler' puts the sampler into the ratio, which {type(algorithm.gate).__name__} ignores: leave "
            "'recomputed', which weighs old samples by TruncatedIS(), or set ratio=Token() and gate=Importance()"
        )
    for part in (part for part in algorithm.corrections if part.weighs_sampler):
        yield (
            f"{type(part).__name__} corrects for π_old/μ, which is 1 with behaviour='sampler': set "
            "corrections=(), or leave 'recomputed'"
        )


def _values(algorithm: Composition) -> Iterator[str]:
    read = "values" in algorithm.declared
    if algorithm.critic is not None and (sampled := [link for link in algorithm.psi if link.samples_values]):
        name = type(sampled[0]).__name__
        yield f"{name} takes its values from fresh samples and would leave a critic unread: set critic=None, or use GAE()"
        return
    if "bootstrap" in algorithm.declared and any(isinstance(part, MaskTruncated) for part in algorithm.filters):
        yield (
            "an advantage with bootstrap=True goes on after what was cut off, and MaskTruncated leaves those answers out: drop it, "
            "or set bootstrap=False"
        )
    if algorithm.critic is None and read:
        yield (
            "an advantage from values without a critic: set critic=Critic(), or use a group baseline such as LeaveOneOut()"
        )
    if algorithm.critic is not None and not read:
        yield "a critic that no advantage reads: put GAE() or NStep() first in psi, or set critic=None"


def _order(algorithm: Composition) -> Iterator[str]:
    for i, part in enumerate(algorithm.filters):
        if part.group_statistic and not all(before.group_statistic for before in algorithm.filters[:i]):
            yield f"{type(part).__name__} looks at the task's score of whole groups: put it first in filters"
        elif part.refill and i:
            yield f"{type(part).__name__} decides which groups are sampled again: put it first in filters, alone of its kind"
        elif isinstance(part, Downsample) and part is not algorithm.filters[-1]:
            yield "Downsample chooses among the completions that the other filters leave: put it last in filters"
    late = [type(link).__name__ for link in algorithm.psi[1:] if link.starts]
    if late:
        yield f"{late[0]} starts from the rewards and would ignore what stands before it: put it first in psi"


def _steps(algorithm: Composition) -> Iterator[str]:
    links = [link for link in algorithm.psi if isinstance(link, ProcessReward)]
    if not links:
        return
    if not all(link.outcome for link in links):
        yield from _no_outcome(algorithm)
    if any(isinstance(part, KLInReward) for part in algorithm.shaping):
        yield (
            "ProcessReward reads rewards where steps end, and KLInReward puts one at every token: drop it, and put "
            "KLToReference() into terms"
        )
    if any(isinstance(part, MaskTruncated) and part.keep_in_statistics for part in algorithm.filters):
        yield (
            "ProcessReward's statistics are over steps, and a masked completion has none left: set "
            "MaskTruncated(keep_in_statistics=False)"
        )


def _no_outcome(algorithm: Composition) -> Iterator[str]:
    """Parts that look at the outcome's reward, where it does not enter Ψ."""
    by_outcome = [
        f for f in algorithm.filters if isinstance(f, DropNoSpread) or (isinstance(f, Downsample) and f.by == "spread")
    ]
    for part in (*by_outcome, *algorithm.shaping):
        does = "shapes" if part in algorithm.shaping else "chooses by"
        yield (
            f"{type(part).__name__} {does} the outcome's reward, which ProcessReward(outcome=False) does not read: drop it, or set "
            "outcome=True"
        )


def _reference(algorithm: Composition) -> Iterator[str]:
    read = "logp_ref" in algorithm.declared
    if algorithm.reference is not None and (algorithm.reference.every or algorithm.reference.stall) and not read:
        yield "a reference that is refreshed and that no part reads: add KLToReference(), or set every=None and stall=None"
    if algorithm.reference is None and read:
        yield "a KL term without a reference: set reference=Reference(), or drop the KL from `terms` and `shaping`"
    if algorithm.reference is not None and algorithm.reference.model is not None and not read:
        yield (
            f"reference.model is {algorithm.reference.model!r}, and no part of {algorithm.name} reads a reference: take distill to "
            "learn from it, add KLToReference() to stay near it, or leave it out"
        )


def _reward_model(algorithm: Composition) -> Iterator[str]:
    read, model, reference = "implicit_reward" in algorithm.declared, algorithm.reward_model, algorithm.reference
    if model is None and read:
        yield (
            "an advantage from process rewards that nobody learns: set reward_model=ImplicitReward(), or drop ImplicitProcess()"
        )
    if model is not None and not read:
        yield "a reward model that no advantage reads: put ImplicitProcess() after LeaveOneOut() in psi, or set reward_model=None"
    if model is not None and reference is not None and (reference.every or reference.stall):
        yield (
            "ImplicitReward is measured against the reference, and a refreshed one would change what its rewards mean: set "
            "every=None and stall=None"
        )
    if model is not None and isinstance(algorithm.step, TrustRegion):
        yield (
            "TrustRegion moves the policy alone, and ImplicitReward learns in gradient steps beside it: set step=FirstOrder(), or "
            "reward_model=None"
        )


def _penalty(algorithm: Composition) -> Iterator[str]:
    step, targets = algorithm.step, penalties(algorithm)
    if isinstance(step, DualDescent) and not targets:
        yield (
            "DualDescent goes on until the KL to the old policy is near a target, and no term has one: add "
            "KLToOld(target=0.01) or ExactKLToOld(target=0.01) (algorithm ppo_penalty has one), or use FirstOrder()"
        )
    if targets and isinstance(step, FirstOrder) and step.updates == 1:
        name = type(targets[0]).__name__
        yield (
            f"{name}.target adapts β by a KL that is measured before each gradient step, and before the only one it is 0: set "
            "step=FirstOrder(epochs=4), or leave target open"
        )


def _trust_region(algorithm: Composition) -> Iterator[str]:
    step = algorithm.step
    if not isinstance(step, TrustRegion):
        return
    if "kl_ref" in {name for term in algorithm.terms for name in term.forward_needs}:
        yield (
            "TrustRegion looks ahead at other weights without asking the reference there: put KLToReference(form='r*k1') in the "
            "place of ExactKLToReference()"
        )
    if step.line_search and algorithm.ratio is None:
        yield (
            "TrustRegion's line search compares the surrogate at several policies, and without a ratio it is the same at all: "
            "set ratio=Token() and gate=Importance(), or line_search=False"
        )
    if step.value_steps is not None and algorithm.critic is None:
        yield "TrustRegion.value_steps are the critic's, and there is none: leave them open, or set critic=Critic()"
    if algorithm.reference is not None and algorithm.reference.reset:
        yield "Reference(reset=True) forgets AdamW's moments, and TrustRegion has none: set reset=False"
