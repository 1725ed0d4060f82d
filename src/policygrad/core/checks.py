"""What an algorithm refuses to be: parts of the wrong kind, and parts that contradict each other, each with the way out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from policygrad.core import ragged
from policygrad.core.dual_descent import DualDescent
from policygrad.core.filters import DropNoSpread, MaskTruncated
from policygrad.core.process import PrefixValue, ProcessReward
from policygrad.core.shaping import KLInReward
from policygrad.core.steps import FirstOrder
from policygrad.core.trust_region import TrustRegion
from policygrad.core.types import Batch
from policygrad.errors import ConfigError

if TYPE_CHECKING:
    from policygrad.core.algorithm import Algorithm

_TUPLES = ("psi", "terms", "shaping", "filters", "corrections")
_REQUIRED = {"gate": "OnPolicy()", "aggregate": "SequenceSum()", "step": "FirstOrder()"}
_METHODS = {"gate": ("weight", "value"), "critic": ("targets", "loss"), "reference": ("due",)}
"""What a part must have; the parts of every other field are called."""


def check(algorithm: Algorithm) -> None:
    """Raises ConfigError for the first thing that is wrong."""
    for checks in (_kinds, _ratio, _values, _order, _steps, _reference, _penalty, _trust_region):
        for problem in checks(algorithm):
            raise ConfigError(problem)


def check_rollout(algorithm: Algorithm) -> None:
    """Raises ConfigError for a penalty that does nothing where a rollout feeds one gradient step and is the policy's own: in a
    run. In a loop of one's own the samples may be older than the policy."""
    for term in algorithm.terms:
        single = isinstance(algorithm.step, FirstOrder) and algorithm.step.updates == 1
        if single and getattr(term, "constrains", None) == "kl_old":
            raise ConfigError(
                f"{type(term).__name__} holds π_θ near π_old, and they are one at the only gradient step of a rollout: set "
                "step=FirstOrder(epochs=4), or drop it"
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


def _kinds(algorithm: Algorithm) -> Iterator[str]:
    for name in _TUPLES:
        value = getattr(algorithm, name)
        if not isinstance(value, tuple):
            given = getattr(value, "__name__", type(value).__name__)
            yield f"{name} is a tuple of parts, not {given}: write {name}=({given}(),), with the comma"
            return
    for name, default in _REQUIRED.items():
        if getattr(algorithm, name) is None:
            yield f"an algorithm needs a part as its {name}; it is None. On-policy: {default}"
            return
    for name, part in algorithm.parts():
        yield from _kind(name, part)


def _kind(name: str, part: Any) -> Iterator[str]:
    if isinstance(part, type):
        yield f"{name} holds the class {part.__name__}, not a part: write {part.__name__}()"
    elif name == "terms":
        if not (hasattr(part, "score") or hasattr(part, "objective")):
            yield f"{part!r} is not a term: it needs score(out, batch) and value(out, batch), or objective(out, batch)"
    elif name in _METHODS:
        missing = [method for method in _METHODS[name] if not callable(getattr(part, method, None))]
        if missing:
            yield f"{part!r} is not a {name}: it has no {' or '.join(missing)}(); `policygrad show` lists the parts"
    elif not callable(part):
        yield f"{part!r} is not a part that {name} can hold: a part is called. `policygrad show` lists the parts"


def _ratio(algorithm: Algorithm) -> Iterator[str]:
    gate, ratio, updates = algorithm.gate, algorithm.ratio, algorithm.step.updates
    name, on_policy = type(gate).__name__, getattr(gate, "on_policy", False)
    if on_policy and updates > 1:
        yield (
            f"{name} takes one optimiser step per rollout, not {updates}: from the second on, the samples are another "
            "policy's. Set step to FirstOrder(1, 1), or a ratio and a gate such as Clip()"
        )
    if on_policy and ratio is not None:
        yield (
            f"{name} ignores the ratio, and ratio is {type(ratio).__name__}: set ratio=None, or a gate such as "
            "Importance() or Clip()"
        )
    if not on_policy and ratio is None:
        yield f"{name} gates a ratio, and ratio is None: set ratio=Token() or Sequence()"


def _values(algorithm: Algorithm) -> Iterator[str]:
    read = "values" in algorithm.declared
    if algorithm.critic is not None and any(isinstance(link, PrefixValue) for link in algorithm.psi):
        yield "PrefixValue takes its values from fresh samples and would leave a critic unread: set critic=None, or use GAE()"
        return
    if algorithm.critic is None and read:
        yield (
            "an advantage from values without a critic: set critic=Critic(), or use a group baseline such as LeaveOneOut()"
        )
    if algorithm.critic is not None and not read:
        yield "a critic that no advantage reads: put GAE() or NStep() first in psi, or set critic=None"


def _order(algorithm: Algorithm) -> Iterator[str]:
    if any(isinstance(part, DropNoSpread) for part in algorithm.filters[1:]):
        yield "DropNoSpread looks at the task's score of whole groups: put it first in filters"
    late = [type(link).__name__ for link in algorithm.psi[1:] if getattr(link, "starts", False)]
    if late:
        yield f"{late[0]} starts from the rewards and would ignore what stands before it: put it first in psi"


def _steps(algorithm: Algorithm) -> Iterator[str]:
    if not any(isinstance(link, ProcessReward) for link in algorithm.psi):
        return
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


def _reference(algorithm: Algorithm) -> Iterator[str]:
    read = "logp_ref" in algorithm.declared
    if algorithm.reference is not None and (algorithm.reference.every or algorithm.reference.stall) and not read:
        yield "a reference that is refreshed and that no part reads: add KLToReference(), or set every=None and stall=None"
    if algorithm.reference is None and read:
        yield "a KL term without a reference: set reference=Reference(), or drop the KL from `terms` and `shaping`"


def _penalty(algorithm: Algorithm) -> Iterator[str]:
    step, terms = algorithm.step, algorithm.terms
    targets = [
        term for term in terms if getattr(term, "constrains", None) and getattr(term, "target", None) is not None
    ]
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


def _trust_region(algorithm: Algorithm) -> Iterator[str]:
    step = algorithm.step
    if not isinstance(step, TrustRegion):
        return
    if step.line_search and algorithm.ratio is None:
        yield (
            "TrustRegion's line search compares the surrogate at several policies, and without a ratio it is the same at all: "
            "set ratio=Token() and gate=Importance(), or line_search=False"
        )
    if step.value_steps is not None and algorithm.critic is None:
        yield "TrustRegion.value_steps are the critic's, and there is none: leave them open, or set critic=Critic()"
    if algorithm.reference is not None and algorithm.reference.reset:
        yield "Reference(reset=True) forgets AdamW's moments, and TrustRegion has none: set reset=False"
