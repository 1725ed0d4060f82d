"""What an algorithm refuses to be: parts of the wrong kind, and parts that contradict each other, each with the way out."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from policygrad.core import masked
from policygrad.core.advantages import DivideByGroupMean, PassAtK, TeacherLogRatio
from policygrad.core.aggregation import SequenceMean
from policygrad.core.auxiliary import Critic, ImplicitReward, Reference
from policygrad.core.base import (
    Advantage,
    Aggregation,
    Correction,
    Filter,
    Gate,
    LossTerm,
    Part,
    Ratio,
    Shaping,
    Term,
    UpdateRule,
)
from policygrad.core.batch import Batch, Forward
from policygrad.core.filters import Curriculum, Downsample, DropZeroVariance, MaskTruncated
from policygrad.core.kl_controllers import find_kl_penalties
from policygrad.core.process import ProcessReward
from policygrad.core.ratios import Token
from policygrad.core.shaping import KLInReward
from policygrad.core.terms import policy_share
from policygrad.core.trust_region import TrustRegion
from policygrad.core.turns import turn_discount
from policygrad.core.updates import DualDescent, GradientSteps
from policygrad.core.vine import SelfNormalisation, SelfNormalised, Vine
from policygrad.errors import ConfigError

if TYPE_CHECKING:
    from policygrad.core.algorithm import Algorithm

# What an algorithm makes of a rollout that has more than rewards: what it takes of it, and what it refuses to be.


def find_data_conflicts(algorithm: Algorithm) -> Iterator[str]:
    """What is wrong, and the way out."""
    declared = algorithm.all_needs
    if "demonstration" in declared:
        yield from _demonstrations(algorithm)
        for part in (part for part in algorithm.filters if part.refills):
            yield (
                f"{type(part).__name__} samples other prompts for groups without spread before a demonstration joins them, so that "
                "those it would teach most are thrown away: set DropZeroVariance(mode='drop'), or leave it out"
            )
    if policy_share(algorithm.terms) < 0:
        names = " and ".join(
            f"{type(term).__name__} {term.mixture_weight:g}" for term in algorithm.terms if term.mixture_weight
        )
        yield f"the terms' shares of the objective are {names}, more than the whole: let them add up to at most 1"
    if "rewards" in declared and algorithm.shaping:
        names = " and ".join(type(part).__name__ for part in algorithm.shaping)
        yield (
            f"the advantage reads each reward function's own number, which {names} would not change: set shaping=(), or make it "
            "a reward function, or put KLToReference() into terms"
        )
    if algorithm.shaping and any(isinstance(link, DivideByGroupMean) for link in algorithm.advantage):
        names = " and ".join(type(part).__name__ for part in algorithm.shaping)
        yield (
            f"DivideByGroupMean follows the likelihood of success, and {names} would lower rewards below 0: set shaping=(), and put "
            "KLToReference() into terms, or replace DivideByGroupMean by GroupStd()"
        )
    resting = [part for part in algorithm.filters if isinstance(part, Curriculum)]
    if resting and any(part.refills for part in algorithm.filters):
        yield (
            f"{type(resting[0]).__name__} learns from a step's groups how well prompts are solved, and a filter that refills sets "
            "those aside before: set DropZeroVariance(mode='drop'), or drop one of the two"
        )
    compares = any(link.uses_group_statistics and "turn_state" in link.needs for link in algorithm.advantage)
    if compares and any(isinstance(part, MaskTruncated) and part.keep_in_statistics for part in algorithm.filters):
        yield (
            "the advantage compares turns, and a masked completion has none left: set MaskTruncated(keep_in_statistics=False)"
        )
    for link in algorithm.advantage:
        gamma, critic = turn_discount(link), algorithm.critic
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
        "turn_state",
        "rewards",
        "demonstration",
    )
)
"""What is said of whole completions, which a vine's rows are not."""


def _vine(algorithm: Algorithm) -> Iterator[str]:
    if any(isinstance(link, Vine) for link in algorithm.advantage):
        for part in (*algorithm.filters, *algorithm.shaping):
            yield (
                f"Vine trains on single tokens tried in the midst of answers, and {type(part).__name__} looks at whole ones: set "
                f"{'filters' if part in algorithm.filters else 'shaping'}=()"
            )
        for field in sorted(algorithm.all_needs & _OF_ANSWERS):
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
            "corrections=(); old_policy='sampler' takes account of who sampled, also of older weights"
        )
    if gate and isinstance(algorithm.aggregation, SequenceMean):
        yield "SelfNormalised weighs a group's tokens by itself, and SequenceMean by length: set aggregation=GroupTokenMean()"


def _normalises(algorithm: Algorithm) -> bool:
    return any(isinstance(term, SelfNormalisation) for term in algorithm.terms)


def _demonstrations(algorithm: Algorithm) -> Iterator[str]:
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
    if isinstance(algorithm.update_rule, TrustRegion):
        yield (
            "TrustRegion measures curvature and KL on the policy's own samples, and a demonstration is none: set "
            "update_rule=GradientSteps(), or drop the demonstrations"
        )
    if any(isinstance(part, Downsample) for part in algorithm.filters):
        yield (
            "Downsample chooses among all completions of a prompt, and might leave out the demonstration: drop it, or the "
            "demonstrations"
        )
    if "step_end" in algorithm.all_needs:
        yield (
            "an advantage along the steps of an answer needs every completion's steps, and a demonstration has none: take a group "
            "baseline such as GroupMean(), or drop the demonstrations"
        )


def check_demonstrations(algorithm: Algorithm, batch: Batch) -> None:
    """Raises ConfigError for demonstrations that no part takes: they would count as the policy's own samples."""
    if batch.demonstration is None or "demonstration" in algorithm.all_needs:
        return
    rows = (batch.demonstration & batch.mask.any(1)).nonzero().flatten().tolist()
    if rows:
        raise ConfigError(
            f"row {rows[0]} is a demonstration (Batch.demonstration), which {algorithm.name} would take for a sample of its own "
            "policy: leave it out, set gate=PolicyShaping(), or add DemonstrationNLL() to terms"
        )


# Which part may stand in which field of an algorithm: an instance of its role's base, or anything that declares all of it.


class PartRole(NamedTuple):
    """One field of an algorithm, and what it holds."""

    noun: str
    bases: tuple[type[Part], ...]
    methods: str = "a part is called"
    is_tuple: bool = False


ROLES = {  # in the order of the data's way
    "filters": PartRole("a filter", (Filter,), is_tuple=True),
    "shaping": PartRole("reward shaping", (Shaping,), is_tuple=True),
    "advantage": PartRole("an advantage", (Advantage,), is_tuple=True),
    "ratio": PartRole("a ratio", (Ratio,)),
    "gate": PartRole("a gate", (Gate,), "it has no weight or value()"),
    "corrections": PartRole("a correction", (Correction,), is_tuple=True),
    "aggregation": PartRole("an aggregation", (Aggregation,)),
    "terms": PartRole(
        "a term",
        (Term, LossTerm),
        "it needs score(out, batch, psi) and value(out, batch, psi), or objective(out, batch, psi)",
        True,
    ),
    "update_rule": PartRole("an update rule", (UpdateRule,)),
    "critic": PartRole("a critic", (Critic,), "it has no targets or loss()"),
    "reward_model": PartRole("a reward model", (ImplicitReward,), "it has no rewards or loss()"),
    "reference": PartRole("a reference", (Reference,), "it has no due()"),
}
_REQUIRED = {"gate": "OnPolicy()", "aggregation": "SequenceSum()", "update_rule": "GradientSteps()"}
_MEANS = {
    "needs": "the Batch fields it reads",
    "group_statistic": "whether it compares the samples of one prompt",
    "select_needs": "the Forward fields that select reads, {'logp'} or none",
    "select": "the tokens it chooses among all of an update, where needs name 'selected'",
    "weighs_sampler": "whether it accounts for a sampler that is not π_old",
    "length": "a number of tokens, None where a run sets its budget, 0 where there is none",
    "formula": "what it puts into the equation",
    "init": "its memory before the first rollout, or None",
    "update": "its memory after a rollout",
    "at": "the part with its memory put in",
    "report": "its metrics of a rollout",
    "starts": "whether it ignores the Ψ it is given and must come first",
    "reads_reward": "whether it reads rewards",
    "samples_values": "whether a rollout samples values for it",
    "samples": "how many completions a sampled value takes",
    "joint": "whether r is of the whole completion",
    "on_policy": "whether it takes no ratio",
    "token_ratio": "whether it reads the tokens' own ratios",
    "whole_groups": "whether a token's weight depends on its group's other tokens",
    "clipped": "where it cuts, or None",
    "forward_needs": "the Forward fields it reads",
    "constrains": "'kl_old' for a penalty on it, or None",
    "aggregation": "how its tokens are averaged, None as the policy's",
    "mixture": "what it takes from the policy's term, 0 where it comes on top",
    "where": "the tokens that count in it, or None for all",
    "rounds": "rounds of sampling that a step may take",
    "carry": "whether groups that a step has no room for begin the next one",
    "resting": "the prompts that a rollout passes over, by number",
    "level": "how difficult a rollout's prompts shall be, or None",
    "refill": "whether other prompts are sampled for what it drops",
    "dropped": "the completions it takes out",
    "uses_lr": "whether the learning rate means anything",
    "minibatches": "shares that a rollout is split into",
    "updates": "updates of the policy per rollout",
    "value_updates": "updates of the critic per rollout",
}
"""What an attribute that a part must declare says, for whoever has left it out."""


def check_part_types(algorithm: Any) -> Iterator[str]:
    """What is wrong with the kinds of an algorithm's parts, in words, one by one."""
    for name, role in ROLES.items():
        value = getattr(algorithm, name)
        if role.is_tuple and not isinstance(value, tuple):
            given = getattr(value, "__name__", type(value).__name__)
            yield f"{name} is a tuple of parts, not {given}: write {name}=({given}(),), with the comma"
        elif value is None and name in _REQUIRED:
            yield f"an algorithm needs a part as its {name}; it is None. On-policy: {_REQUIRED[name]}"
        else:
            for part in value if role.is_tuple else () if value is None else (value,):
                yield from _kind(name, role, part)


def _kind(name: str, role: PartRole, part: Any) -> Iterator[str]:
    if isinstance(part, type):
        yield f"{name} holds the class {part.__name__}, not a part: write {part.__name__}()"
        return
    if is_dataclass(part) and (problem := frozen_problem(type(part), name)):
        yield problem
        return
    base = next((base for base in role.bases if isinstance(part, base)), None)
    others = [(field, other) for field, other in ROLES.items() if isinstance(part, other.bases)]
    if base is None and others:
        field, other = others[0]
        yield f"{part!r} is not {role.noun}: {role.methods}. It is {other.noun}: put it into {field}"
    elif base is None and (missing := _missing(role, part)):
        yield missing
    elif base is not None and (unwritten := [n for n in dir(base) if _abstract(type(part), n)]):
        named = ", ".join(f"{n}()" for n in unwritten)
        yield f"{type(part).__name__} is {role.noun} without {named}: write it, as in policygrad.core.base.{base.__name__}"
    else:
        yield from _arguments(part, role)
        yield from _reads(part, "needs", Batch)
        if name == "terms":
            yield from _reads(part, "forward_needs", Forward)


def frozen_problem(kind: type, place: str = "") -> str:
    """Say what is wrong with the class of a part that is no frozen dataclass; "" for one that is. place: the algorithm's field."""
    if is_dataclass(kind) and kind.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        return ""
    where, what = (
        f" in {place}" * bool(place),
        "a dataclass that is not frozen" if is_dataclass(kind) else "no dataclass",
    )
    return (
        f"{kind.__name__}{where} is {what}, and a part's settings are data that run.toml holds and nothing changes: write "
        f"@dataclass(frozen=True) above class {kind.__name__}"
    )


def _arguments(part: Any, role: PartRole) -> Iterator[str]:
    """A method that takes other arguments than its role's would fail at the first rollout."""
    for base in (base for base in role.bases if isinstance(part, base) or len(role.bases) == 1):
        for name in (n for n in dir(base) if _abstract(base, n) and callable(getattr(part, n, None))):
            asked = list(inspect.signature(getattr(base, name)).parameters)[1:]
            try:
                inspect.signature(getattr(part, name)).bind(*asked)
            except TypeError:
                method = type(part).__name__ + ("" if name == "__call__" else f".{name}")
                given, called = ", ".join(inspect.signature(getattr(part, name)).parameters), ", ".join(asked)
                yield f"{method} takes ({given}), and {role.noun} is called with ({called}): write it so"
            except ValueError:  # a callable without a signature
                continue


def _abstract(kind: type, name: str) -> bool:
    return getattr(getattr(kind, name), "__isabstractmethod__", False)


def _missing(role: PartRole, part: Any) -> str:
    """What a part that inherits no base lacks of its role's, or nothing."""
    base, name = role.bases[0], type(part).__name__
    calls = (
        [n for n in dir(base) if _abstract(base, n)]
        + ["targets", "loss"] * (base is Critic)
        + ["rewards", "loss", "rate"] * (base is ImplicitReward)
        + ["due"] * (base is Reference)
    )
    if not all(hasattr(part, n) for n in calls if n != "updates"):
        word, holds = role.noun, f"is not a part that {next(f for f, r in ROLES.items() if r is role)} can hold"
        called = role.methods == "a part is called"
        said = f"{holds}: {role.methods}" if called else f"is not {word}: {role.methods}"
        return f"{part!r} {said}. Inherit policygrad.{base.__name__}; `policygrad show` lists the parts"
    for attribute in (n for n in dir(base) if not n.startswith("_")):
        if not hasattr(part, attribute):
            return (
                f"{name}, as {role.noun}, does not say {attribute} ({_MEANS.get(attribute, 'which is read')}): inherit its "
                f"default, class {name}(policygrad.{base.__name__}), or declare it"
            )
    return ""


def _reads(part: Any, attribute: str, kind: type) -> Iterator[str]:
    """A part that reads a field which does not exist would never be given it."""
    known, names = [f.name for f in fields(kind)], getattr(part, attribute)
    what = f"{type(part).__name__}.{attribute}"
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        yield f"{what} is a set of names, such as frozenset({{{known[-1]!r}}}), not {names!r}"
        return
    for name in sorted(set(names) - set(known)):
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known)}"
        yield f"{what} names {name!r}, which is no field of {kind.__name__}: {hint}"


OLD_POLICIES = ("learner", "sampler")


def validate_algorithm(algorithm: Algorithm) -> None:
    """Raises ConfigError for the first thing that is wrong."""
    for checks in (
        check_part_types,
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
        find_data_conflicts,
    ):
        for problem in checks(algorithm):
            raise ConfigError(problem)


def _spread(algorithm: Algorithm) -> Iterator[str]:
    """What is added to a standard deviation before something is divided by it, in whichever part."""
    for _, part in algorithm.parts():
        eps = getattr(part, "eps", 0.0)
        if not 0 <= eps < float("inf"):
            yield f"{type(part).__name__}.eps must be at least 0 and finite, not {eps}"


def _ratio(algorithm: Algorithm) -> Iterator[str]:
    gate, ratio, updates = algorithm.gate, algorithm.ratio, algorithm.update_rule.updates
    name, on_policy = type(gate).__name__, gate.on_policy
    if on_policy and updates > 1:
        yield (
            f"{name} takes one update per rollout, not {updates}: from the second on, the samples are another "
            "policy's. Set step to GradientSteps(1, 1), or a ratio and a gate such as Clip()"
        )
    if on_policy and ratio is not None:
        yield (
            f"{name} ignores the ratio, and ratio is {type(ratio).__name__}: set ratio=None, or a gate such as "
            "Importance() or Clip()"
        )
    if not on_policy and ratio is None:
        yield f"{name} gates a ratio, and ratio is None: set ratio=Token() or Sequence()"
    if gate.requires_token_ratio and not isinstance(ratio, Token):
        yield f"{name} reads the tokens' own ratios, and ratio is {type(ratio).__name__}: set ratio=Token()"


def _selection(algorithm: Algorithm) -> Iterator[str]:
    names = [type(part).__name__ for _, part in algorithm.parts() if "selected" in part.needs]
    if len(names) > 1:
        yield f"{' and '.join(names)} would each choose tokens of an update, and Batch.selected holds one choice: leave one out"
    if names and isinstance(algorithm.update_rule, TrustRegion):
        yield (
            f"{names[0]} chooses among the tokens of one gradient step, and TrustRegion looks at several policies: set "
            "update_rule=GradientSteps(), or drop it"
        )


def _behaviour(algorithm: Algorithm) -> Iterator[str]:
    if algorithm.old_policy not in OLD_POLICIES:
        yield f"old_policy must be {' or '.join(map(repr, OLD_POLICIES))}, not {algorithm.old_policy!r}"
    if algorithm.old_policy != "sampler":
        return
    if algorithm.gate.on_policy:
        yield (
            f"old_policy='sampler' puts the sampler into the ratio, which {type(algorithm.gate).__name__} ignores: leave "
            "'learner', which weighs old samples by TruncatedIS(), or set ratio=Token() and gate=Importance()"
        )
    for part in (part for part in algorithm.corrections if part.corrects_sampler):
        yield (
            f"{type(part).__name__} corrects for π_old/μ, which is 1 with old_policy='sampler': set "
            "corrections=(), or leave 'learner'"
        )


def _values(algorithm: Algorithm) -> Iterator[str]:
    read = "values" in algorithm.all_needs
    if algorithm.critic is not None and (sampled := [link for link in algorithm.advantage if link.samples_values]):
        name = type(sampled[0]).__name__
        yield f"{name} takes its values from fresh samples and would leave a critic unread: set critic=None, or use GAE()"
        return
    if "bootstrap" in algorithm.all_needs and any(isinstance(part, MaskTruncated) for part in algorithm.filters):
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


def _order(algorithm: Algorithm) -> Iterator[str]:
    for i, part in enumerate(algorithm.filters):
        if part.uses_group_statistics and not all(before.uses_group_statistics for before in algorithm.filters[:i]):
            yield f"{type(part).__name__} looks at the task's score of whole groups: put it first in filters"
        elif part.refills and i:
            yield f"{type(part).__name__} decides which groups are sampled again: put it first in filters, alone of its kind"
        elif isinstance(part, Downsample) and part is not algorithm.filters[-1]:
            yield "Downsample chooses among the completions that the other filters leave: put it last in filters"
    late = [type(link).__name__ for link in algorithm.advantage[1:] if link.starts_chain]
    if late:
        yield f"{late[0]} starts from the rewards and would ignore what stands before it: put it first in psi"


def _steps(algorithm: Algorithm) -> Iterator[str]:
    links = [link for link in algorithm.advantage if isinstance(link, ProcessReward)]
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


def _no_outcome(algorithm: Algorithm) -> Iterator[str]:
    """Parts that look at the outcome's reward, where it does not enter Ψ."""
    by_outcome = [
        f
        for f in algorithm.filters
        if isinstance(f, DropZeroVariance) or (isinstance(f, Downsample) and f.by == "max_variance")
    ]
    for part in (*by_outcome, *algorithm.shaping):
        does = "shapes" if part in algorithm.shaping else "chooses by"
        yield (
            f"{type(part).__name__} {does} the outcome's reward, which ProcessReward(outcome=False) does not read: drop it, or set "
            "outcome=True"
        )


def _reference(algorithm: Algorithm) -> Iterator[str]:
    read = "logp_ref" in algorithm.all_needs
    if (
        algorithm.reference is not None
        and (algorithm.reference.refresh_every or algorithm.reference.refresh_after_stall)
        and not read
    ):
        yield "a reference that is refreshed and that no part reads: add KLToReference(), or set every=None and stall=None"
    if algorithm.reference is None and read:
        yield "a KL term without a reference: set reference=Reference(), or drop the KL from `terms` and `shaping`"
    if algorithm.reference is not None and algorithm.reference.model is not None and not read:
        yield (
            f"reference.model is {algorithm.reference.model!r}, and no part of {algorithm.name} reads a reference: take distill to "
            "learn from it, add KLToReference() to stay near it, or leave it out"
        )


def _reward_model(algorithm: Algorithm) -> Iterator[str]:
    read, model, reference = "implicit_reward" in algorithm.all_needs, algorithm.reward_model, algorithm.reference
    if model is None and read:
        yield (
            "an advantage from process rewards that nobody learns: set reward_model=ImplicitReward(), or drop ImplicitProcess()"
        )
    if model is not None and not read:
        yield "a reward model that no advantage reads: put ImplicitProcess() after LeaveOneOut() in psi, or set reward_model=None"
    if model is not None and reference is not None and (reference.refresh_every or reference.refresh_after_stall):
        yield (
            "ImplicitReward is measured against the reference, and a refreshed one would change what its rewards mean: set "
            "every=None and stall=None"
        )
    if model is not None and isinstance(algorithm.update_rule, TrustRegion):
        yield (
            "TrustRegion moves the policy alone, and ImplicitReward learns in gradient steps beside it: set update_rule=GradientSteps(), or "
            "reward_model=None"
        )


def _penalty(algorithm: Algorithm) -> Iterator[str]:
    step, targets = algorithm.update_rule, find_kl_penalties(algorithm)
    if isinstance(step, DualDescent) and not targets:
        yield (
            "DualDescent goes on until the KL to the old policy is near a target, and no term has one: add "
            "KLToOld(target=0.01) or ExactKLToOld(target=0.01) (algorithm ppo_penalty has one), or use GradientSteps()"
        )
    if targets and isinstance(step, GradientSteps) and step.updates == 1:
        name = type(targets[0]).__name__
        yield (
            f"{name}.target adapts β by a KL that is measured before each gradient step, and before the only one it is 0: set "
            "update_rule=GradientSteps(epochs=4), or leave target open"
        )


def _trust_region(algorithm: Algorithm) -> Iterator[str]:
    step = algorithm.update_rule
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
    if step.critic_steps is not None and algorithm.critic is None:
        yield "TrustRegion.critic_steps are the critic's, and there is none: leave them open, or set critic=Critic()"
    if algorithm.reference is not None and algorithm.reference.reset_optimizer:
        yield "Reference(reset=True) forgets AdamW's moments, and TrustRegion has none: set reset=False"


# What a run refuses of an algorithm that is sound in itself: its sampling, its rewards, what would do nothing in it.


def check_rollout(algorithm: Algorithm) -> None:
    """Raises ConfigError for a teacher that is missing, and for a penalty that does nothing where a rollout feeds one gradient
    step and is the policy's own: in a run. In a loop of one's own the samples may be older than the policy."""
    if any(isinstance(link, TeacherLogRatio) for link in algorithm.advantage) and (
        algorithm.reference is None or algorithm.reference.model is None
    ):
        raise ConfigError(
            f"{algorithm.name} learns from a teacher, and none is named: give --teacher, a folder, a hub id or a run's folder "
            "(from Python reference=Reference(model=…)), with the policy's tokenizer. Its own first weights would teach it nothing"
        )
    for term in algorithm.terms:
        single = isinstance(algorithm.update_rule, GradientSteps) and algorithm.update_rule.updates == 1
        if single and term.constrained_kl == "kl_old":
            raise ConfigError(
                f"{type(term).__name__} holds π_θ near π_old, and they are one at the only gradient step of a rollout: set "
                "update_rule=GradientSteps(epochs=4), or drop it"
            )


def check_sampling(algorithm: Algorithm, samples_per_prompt: int, temperature: float) -> None:
    """Raises ConfigError for one sample per prompt, or equal ones, where a part compares a prompt's samples, and for fewer than
    are to be trained on."""
    for part in (part for part in algorithm.filters if isinstance(part, Downsample)):
        if part.keep > samples_per_prompt:
            raise ConfigError(
                f"Downsample trains on {part.keep} of a prompt's samples, and there are {samples_per_prompt}: set "
                f"samples_per_prompt to {part.keep} or more, or Downsample.keep to {samples_per_prompt} or less"
            )
    for name in (type(part).__name__ for _, part in algorithm.parts() if part.uses_group_statistics):
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
    for link in algorithm.advantage:
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
        total = total + masked.apply_mask(batch.token_reward, batch.mask).sum(1)
    bad = ~total.isfinite() & (batch.mask.any(1) | batch.counted)
    if bool(bad.any()):
        rows = bad.nonzero().squeeze(1).tolist()
        named = ", ".join(map(str, rows[:8])) + (", …" if len(rows) > 8 else "")
        raise ConfigError(
            f"Batch.reward or token_reward is NaN or infinite in row{'s' * (len(rows) > 1)} {named}: give a number, or leave "
            "the completion out (its mask all False): a NaN would be the advantage of its whole group"
        )
