"""Validation of an algorithm: part types, and combinations of parts that contradict each other. Each message gives a remedy."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from policygrad.core import masked
from policygrad.core.advantages import (
    ClassLabels,
    DivideByGroupMean,
    GreedyBaseline,
    OptimalValue,
    PassAtK,
    TeacherLogRatio,
)
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
from policygrad.core.gates import ClassificationWeight
from policygrad.core.kl_controllers import find_kl_penalties
from policygrad.core.masked import Groups
from policygrad.core.process import ProcessReward
from policygrad.core.ratios import Sequence, Token
from policygrad.core.shaping import KLInReward
from policygrad.core.terms import DemonstrationNLL, ExactKLToReference, policy_share
from policygrad.core.trust_region import TrustRegion
from policygrad.core.updates import DualDescent, GradientSteps
from policygrad.core.vine import SelfNormalisation, SelfNormalised, Vine
from policygrad.errors import ConfigError

if TYPE_CHECKING:
    from policygrad.core.algorithm import Algorithm


OLD_POLICIES = ("learner", "sampler")
HEADS = ("model", "fp32")


def validate_algorithm(algorithm: Algorithm) -> None:
    """Raise ConfigError for the first problem of an algorithm."""
    for check in (
        check_part_types,
        _find_gate_conflicts,
        _find_advantage_conflicts,
        _find_model_conflicts,
        find_data_conflicts,
        _find_part_conflicts,
    ):
        for problem in check(algorithm):
            raise ConfigError(problem)


# The roles: which parts each field of an algorithm takes.


class PartRole(NamedTuple):
    """One field of an algorithm, and the parts it holds."""

    noun: str
    bases: tuple[type[Part], ...]
    is_tuple: bool = False


ROLES = {  # in the order in which data passes through them
    "filters": PartRole("a filter", (Filter,), is_tuple=True),
    "shaping": PartRole("reward shaping", (Shaping,), is_tuple=True),
    "advantage": PartRole("an advantage", (Advantage,), is_tuple=True),
    "ratio": PartRole("a ratio", (Ratio,)),
    "gate": PartRole("a gate", (Gate,)),
    "corrections": PartRole("a correction", (Correction,), is_tuple=True),
    "aggregation": PartRole("an aggregation", (Aggregation,)),
    "terms": PartRole("a term", (Term, LossTerm), is_tuple=True),
    "update_rule": PartRole("an update rule", (UpdateRule,)),
    "critic": PartRole("a critic", (Critic,)),
    "reward_model": PartRole("a reward model", (ImplicitReward,)),
    "reference": PartRole("a reference", (Reference,)),
}
_REQUIRED = {"gate": "OnPolicy()", "aggregation": "SequenceSum()", "update_rule": "GradientSteps()"}


def check_part_types(algorithm: Algorithm) -> Iterator[str]:
    """Yield what is wrong with the types of an algorithm's parts."""
    for name, role in ROLES.items():
        value: Any = getattr(algorithm, name)
        if role.is_tuple and not isinstance(value, tuple):
            given = getattr(value, "__name__", type(value).__name__)
            yield f"{name} is a tuple of parts, not {given}: write {name}=({given}(),), with the comma"
        elif value is None and name in _REQUIRED:
            yield f"{name} is None, and an algorithm needs one: on-policy it is {name}={_REQUIRED[name]}"
        else:
            for part in value if role.is_tuple else () if value is None else (value,):
                yield from _check_part(name, role, part)


def _check_part(name: str, role: PartRole, part: Any) -> Iterator[str]:
    if isinstance(part, type):
        yield f"{name} holds the class {part.__name__}, not a part: write {part.__name__}()"
        return
    if is_dataclass(part) and (problem := frozen_problem(type(part), name)):
        yield problem
        return
    base = next((base for base in role.bases if isinstance(part, base)), None)
    if base is None:
        other = next((field for field, other in ROLES.items() if isinstance(part, other.bases)), None)
        if other is not None:
            yield f"{part!r} is not {role.noun} but {ROLES[other].noun}: put it into {other}"
        else:
            bases = " or ".join(f"policygrad.{base.__name__}" for base in role.bases)
            yield f"{part!r} is not {role.noun}: a part in {name} inherits {bases}; `policygrad show` lists the parts"
        return
    abstract = _abstract_methods(base)
    if missing := [name for name in abstract if name in _abstract_methods(type(part))]:
        methods = ", ".join(f"{name}()" for name in missing)
        yield f"{type(part).__name__} is {role.noun} without {methods}: implement it as in policygrad.core.base.{base.__name__}"
        return
    for method in (method for method in abstract if callable(getattr(part, method))):
        arguments = list(inspect.signature(getattr(base, method)).parameters)[1:]
        try:
            signature = inspect.signature(getattr(part, method))
            signature.bind(*arguments)
        except TypeError:
            call = type(part).__name__ + ("" if method == "__call__" else f".{method}")
            yield f"{call} takes ({', '.join(signature.parameters)}), and {role.noun} is called with ({', '.join(arguments)})"
        except ValueError:  # a callable without a signature
            continue
    yield from _check_field_names(part, "needs", Batch)
    yield from _check_field_names(part, "forward_needs", Forward)


def _abstract_methods(kind: type) -> list[str]:
    return [name for name in dir(kind) if getattr(getattr(kind, name), "__isabstractmethod__", False)]


def frozen_problem(kind: type, field: str = "") -> str:
    """Describe why a class is not a frozen dataclass; "" if it is. field: the algorithm's field, for the message."""
    if is_dataclass(kind) and kind.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        return ""
    place = f" in {field}" if field else ""
    actual = "a dataclass that is not frozen" if is_dataclass(kind) else "no dataclass"
    return (
        f"{kind.__name__}{place} is {actual}, but a part's settings are constant data that run.toml holds: write "
        f"@dataclass(frozen=True) above class {kind.__name__}"
    )


def _check_field_names(part: Any, attribute: str, kind: type) -> Iterator[str]:
    """A part that reads a field which does not exist would never receive it."""
    fields_, names = [f.name for f in fields(kind)], getattr(part, attribute)
    where = f"{type(part).__name__}.{attribute}"
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        yield f"{where} must be a set of names, such as frozenset({{{fields_[-1]!r}}}), not {names!r}"
        return
    for name in sorted(set(names) - set(fields_)):
        near = difflib.get_close_matches(name, fields_, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"the fields are {', '.join(fields_)}"
        yield f"{where} contains {name!r}, which is not a field of {kind.__name__}: {hint}"


# Contradictions between parts. Each check yields problems with their remedies.

PartT = TypeVar("PartT", bound=Part)


def _instances(kind: type[PartT], parts: Iterable[Part]) -> list[PartT]:
    return [part for part in parts if isinstance(part, kind)]


def _find_part_conflicts(algorithm: Algorithm) -> Iterator[str]:
    """Yield what the parts themselves object to."""
    for part in algorithm.parts():
        yield from part.find_conflicts(algorithm)


def _find_gate_conflicts(algorithm: Algorithm) -> Iterator[str]:
    """Yield conflicts between gate, ratio, corrections and the choice of old policy."""
    gate, ratio, updates = algorithm.gate, algorithm.ratio, algorithm.update_rule.updates
    name = type(gate).__name__
    if gate.on_policy and updates > 1:
        yield (
            f"{name} allows one update per rollout, not {updates}: after the first, the samples are off-policy. Set "
            "update_rule=GradientSteps(1, 1), or a ratio and a gate such as Clip()"
        )
    if gate.on_policy and ratio is not None:
        yield f"{name} ignores the ratio, and ratio is {type(ratio).__name__}: set ratio=None, or a gate such as Importance()"
    if not gate.on_policy and ratio is None:
        yield f"{name} needs a ratio, and ratio is None: set ratio=Token() or Sequence()"
    if gate.requires_token_ratio and not isinstance(ratio, Token):
        yield f"{name} needs per-token ratios, and ratio is {type(ratio).__name__}: set ratio=Token()"
    names = [type(part).__name__ for part in algorithm.parts() if "selected" in part.needs]
    if len(names) > 1:
        yield f"{' and '.join(names)} each select tokens of an update, and Batch.selected holds one selection: remove one"
    if names and isinstance(algorithm.update_rule, TrustRegion):
        yield f"{names[0]} selects tokens of one gradient step, and TrustRegion tries several: use GradientSteps(), or remove it"
    if algorithm.old_policy not in OLD_POLICIES:
        yield f"old_policy must be {' or '.join(map(repr, OLD_POLICIES))}, not {algorithm.old_policy!r}"
    if algorithm.head not in HEADS:
        yield f"head must be {' or '.join(map(repr, HEADS))}, not {algorithm.head!r}"
    if algorithm.old_policy == "sampler" and gate.on_policy:
        yield (
            f"old_policy='sampler' puts the sampler into the ratio, which {name} ignores: use "
            "'learner', which corrects stale samples by TruncatedIS(), or set ratio=Token() and gate=Importance()"
        )
    correcting = [type(part).__name__ for part in algorithm.corrections if part.corrects_sampler]
    if algorithm.old_policy == "sampler" and correcting:
        yield f"{correcting[0]} corrects for π_old/μ, which old_policy='sampler' makes 1: set corrections=(), or use 'learner'"
    if isinstance(gate, ClassificationWeight):
        labels = _instances(ClassLabels, algorithm.advantage)
        if len(labels) != len(algorithm.advantage) or not labels:
            chain = ", ".join(type(link).__name__ for link in algorithm.advantage) or "empty"
            yield f"ClassificationWeight classifies samples by a label, and advantage is {chain}: set advantage=(ClassLabels(),)"
        if ratio is not None and not isinstance(ratio, Sequence):
            name = type(ratio).__name__
            yield f"ClassificationWeight takes a completion's mean log-ratio, and ratio is {name}: set ratio=Sequence()"
    normalised, derivatives = isinstance(gate, SelfNormalised), _instances(SelfNormalisation, algorithm.terms)
    if normalised and not derivatives:
        yield "SelfNormalised divides by a sum over the group, and no term has its derivative: set terms=(SelfNormalisation(),)"
    if derivatives and not normalised:
        yield "SelfNormalisation is the derivative of SelfNormalised's normaliser, which is missing: set gate=SelfNormalised()"
    if normalised and algorithm.corrections:
        yield (
            f"{type(algorithm.corrections[0]).__name__} would weight the tokens of a group only in SelfNormalised's numerator: set "
            "corrections=(); old_policy='sampler' accounts for the sampler, also with stale weights"
        )
    if normalised and isinstance(algorithm.aggregation, SequenceMean):
        yield "SelfNormalised weights a group's tokens itself, and SequenceMean by length: set aggregation=GroupTokenMean()"


def _find_advantage_conflicts(algorithm: Algorithm) -> Iterator[str]:
    """Yield conflicts among filters, shaping, advantages and the critic."""
    reads_values = "values" in algorithm.all_needs
    if algorithm.critic is not None and (sampled := [link for link in algorithm.advantage if link.samples_values]):
        name = type(sampled[0]).__name__
        yield f"{name} estimates values from fresh samples and would not use the critic: set critic=None, or use GAE()"
    masks = _instances(MaskTruncated, algorithm.filters)
    if "bootstrap" in algorithm.all_needs and masks:
        yield "bootstrap=True needs truncated completions, and MaskTruncated masks them: remove it, or set bootstrap=False"
    if algorithm.critic is None and reads_values:
        yield "an advantage needs values, and critic is None: set critic=Critic(), or use a group baseline such as LeaveOneOut()"
    if algorithm.critic is not None and not reads_values:
        yield "no advantage uses the critic: put GAE() or NStep() first in advantage, or set critic=None"
    for i, part in enumerate(algorithm.filters):
        if part.uses_group_statistics and not all(before.uses_group_statistics for before in algorithm.filters[:i]):
            yield f"{type(part).__name__} needs the task's scores of full groups: put it first in filters"
        elif part.refills and i:
            yield f"{type(part).__name__} decides which groups are resampled: put it first in filters, the only one that does"
        elif isinstance(part, Downsample) and part is not algorithm.filters[-1]:
            yield "Downsample chooses among the completions that the other filters keep: put it last in filters"
    late = [type(link).__name__ for link in algorithm.advantage[1:] if link.starts_chain]
    if late:
        yield f"{late[0]} starts from the rewards and would ignore the links before it: put it first in advantage"

    curricula = _instances(Curriculum, algorithm.filters)
    if curricula and any(part.refills for part in algorithm.filters):
        yield (
            f"{type(curricula[0]).__name__} learns pass rates from a step's groups, and a filter that refills removes some of them "
            "first: set DropZeroVariance(mode='drop'), or remove one of the two"
        )
    compares_turns = any(link.uses_group_statistics and "turn_state" in link.needs for link in algorithm.advantage)
    links = _instances(ProcessReward, algorithm.advantage)
    if (compares_turns or links) and any(part.keep_in_statistics for part in masks):
        what = "turns" if compares_turns else "steps"
        yield f"the advantage compares {what}, and a masked completion has none: set MaskTruncated(keep_in_statistics=False)"
    if not all(link.outcome for link in links):  # the outcome does not enter Ψ, so nothing may read it
        for reader in (*algorithm.filters, *algorithm.shaping):
            by_variance = isinstance(reader, Downsample) and reader.by == "max_variance"
            if isinstance(reader, (Shaping, DropZeroVariance)) or by_variance:
                does = "shapes" if isinstance(reader, Shaping) else "filters by"
                yield (
                    f"{type(reader).__name__} {does} the outcome's reward, which ProcessReward(outcome=False) does not use: remove "
                    "it, or set outcome=True"
                )
    if _instances(OptimalValue, algorithm.advantage):
        if len(_instances(OptimalValue, algorithm.advantage) + _instances(GreedyBaseline, algorithm.advantage)) > 1:
            yield "advantage has two baselines of the prompt (OptimalValue, GreedyBaseline): keep one"
        if levels := [type(part).__name__ for part in algorithm.filters if "level" in part.needs]:
            yield f"OptimalValue is estimated for the prompts of one level, and {levels[0]} moves to others: remove one of the two"
        if refilling := [type(part).__name__ for part in algorithm.filters if part.refills]:
            yield (
                f"OptimalValue is estimated for a fixed set of prompts, and {refilling[0]} replaces some by further ones: set "
                "DropZeroVariance(mode='drop'), or remove one of the two"
            )
    if _instances(KLInReward, algorithm.shaping) and links:
        yield "ProcessReward reads rewards at step ends, and KLInReward puts one at every token: use KLToReference() in terms"


def _find_model_conflicts(algorithm: Algorithm) -> Iterator[str]:
    """Yield conflicts about the reference, the reward model and the update rule."""
    rule, reference, reads_reference = algorithm.update_rule, algorithm.reference, "logp_ref" in algorithm.all_needs
    trust_region = isinstance(rule, TrustRegion)
    if reference is None and reads_reference:
        yield "a part needs a reference, and reference is None: set reference=Reference(), or remove the KL from terms and shaping"
    refreshed = reference is not None and reference.refreshes
    if refreshed and not reads_reference:
        yield "the reference is refreshed, but no part uses it: add KLToReference(), or set refresh_every=refresh_after_stall=None"
    yield from _find_reference_conflicts(algorithm, reads_reference)
    if reference is not None and reference.models and not reads_reference:
        option = f"model is {reference.model!r}" if reference.model is not None else f"teachers is {reference.teachers}"
        yield (
            f"reference.{option}, but no part of {algorithm.name} uses a reference: use distill to learn from "
            "it, add KLToReference() to stay near it, or unset it"
        )
    if reference is not None:
        yield from _find_teacher_conflicts(algorithm, reference)
    has_model, reads_rewards = algorithm.reward_model is not None, "implicit_reward" in algorithm.all_needs
    if reads_rewards and not has_model:
        yield "ImplicitProcess() needs a reward model: set reward_model=ImplicitReward(), or remove it"
    if has_model and not reads_rewards:
        yield "no advantage uses the reward model: put ImplicitProcess() after LeaveOneOut() in advantage, or set reward_model=None"
    if has_model and refreshed:
        yield (
            "ImplicitReward is relative to the reference, and a refresh would change the meaning of its rewards: set "
            "refresh_every=None and refresh_after_stall=None"
        )
    if has_model and trust_region:
        yield "TrustRegion updates only the policy, not ImplicitReward: set update_rule=GradientSteps(), or reward_model=None"
    targets = find_kl_penalties(algorithm)
    if isinstance(rule, DualDescent) and not targets:
        yield (
            "DualDescent continues until the KL to the old policy is near a target, and no term has one: add "
            "KLToOld(target=0.01) or ExactKLToOld(target=0.01) (algorithm ppo_penalty has one), or use GradientSteps()"
        )
    if targets and isinstance(rule, GradientSteps) and rule.updates == 1:
        name = type(targets[0]).__name__
        yield (
            f"{name}.target adapts β to a KL measured before each gradient step, which is 0 before the only one: set "
            "update_rule=GradientSteps(epochs=4), or unset target"
        )
    if trust_region and any("kl_ref" in term.forward_needs for term in algorithm.terms):
        yield (
            "TrustRegion evaluates candidate weights without evaluating the reference there: replace ExactKLToReference() by "
            "KLToReference(form='r*k1')"
        )
    if isinstance(rule, TrustRegion) and rule.line_search and algorithm.ratio is None:
        yield (
            "TrustRegion's line search compares the surrogate of several policies, which without a ratio is constant: "
            "set ratio=Token() and gate=Importance(), or line_search=False"
        )
    if isinstance(rule, TrustRegion) and rule.critic_steps is not None and algorithm.critic is None:
        yield "TrustRegion.critic_steps needs a critic: unset it, or set critic=Critic()"
    if trust_region and reference is not None and reference.reset_optimizer:
        yield "Reference(reset_optimizer=True) resets AdamW's moments, and TrustRegion has none: set reset_optimizer=False"


def _find_teacher_conflicts(algorithm: Algorithm, reference: Reference) -> Iterator[str]:
    """Yield parts that need more of a reference than the log-probabilities of the sampled tokens."""
    servers = reference.servers
    which = f"the server {servers[0]}" if servers else "one of several teachers"
    if not servers and not reference.teachers:
        return
    if any("kl_ref" in term.forward_needs for term in algorithm.terms):
        reason = (
            "tells the log-probabilities of the sampled tokens alone" if servers else "scores the sampled tokens alone"
        )
        yield (
            f"ExactKLToReference() compares with the reference over the full vocabulary, and {which} {reason}: use "
            "TeacherLogRatio() or KLToReference(), or a single model in a folder"
        )
    if algorithm.reward_model is not None:
        yield f"ImplicitReward() starts as a copy of the reference, and {which} cannot be copied: use a single model in a folder"


def _find_reference_conflicts(algorithm: Algorithm, reads_reference: bool) -> Iterator[str]:
    """Yield conflicts about a reference whose weights follow the policy's, or that reads other prompts."""
    reference = algorithm.reference
    if reference is None:
        return
    moves = f"ema={reference.ema:g}" if reference.ema is not None else "live=True" if reference.live else ""
    used = moves or ("templates" if reference.templates else "")
    if used and not reads_reference:
        yield (
            f"Reference has {used}, but no part of {algorithm.name} uses a reference: add KLToReference() or ExactKLToReference() "
            "to terms, or unset it"
        )
    if used and algorithm.reward_model is not None:
        yield (
            f"ImplicitReward is relative to the initial model under the policy's own prompt, and Reference has {used}: unset it, "
            "or set reward_model=None"
        )
    if _instances(OptimalValue, algorithm.advantage) and reads_reference:
        differs = moves or used or ("refresh_every or refresh_after_stall" if reference.refreshes else "")
        if differs or reference.models:
            yield (
                "OptimalValue is estimated with the initial policy, which π_ref must then be, and Reference has "
                f"{differs or 'another model'}: unset it, or use GreedyBaseline() or LeaveOneOut()"
            )
    if reference.templates:
        if _instances(KLInReward, algorithm.shaping):
            yield (
                "KLInReward charges every completion, and π_ref with Reference.templates may not have read some: use "
                "KLToReference() in terms, or set templates=()"
            )
        if _instances(Vine, algorithm.advantage):
            yield "Vine trains on single tokens, and Reference.templates are for full completions: set templates=()"
    if len({term.alpha for term in _instances(ExactKLToReference, algorithm.terms)}) > 1:
        yield "several ExactKLToReference have different alphas, and a pass computes one divergence: give all the same alpha"


# Batch fields of full completions, which a vine's rows are not.
_COMPLETION_LEVEL = frozenset(
    [
        "values",
        "bootstrap",
        "baseline",
        "step_end",
        "token_reward",
        "implicit_reward",
        "turn_state",
        "rewards",
        "demonstration",
        "observation",
    ]
)


def find_data_conflicts(algorithm: Algorithm) -> Iterator[str]:
    """Yield conflicts about batches with more than one reward per completion: demonstrations, turns, several rewards, vines."""
    needs, gate, terms = algorithm.all_needs, algorithm.gate, algorithm.terms
    if "demonstration" in needs:
        if "demonstration" not in gate.needs and not any("demonstration" in term.needs for term in terms):
            yield "a part needs demonstrations, but none learns from them: set gate=PolicyShaping() or terms=(DemonstrationNLL(),)"
        if algorithm.critic is not None:
            yield (
                "a critic is fitted to the returns of the policy's samples, which demonstrations are not: set critic=None and a "
                "group baseline such as GroupMean(), or remove the demonstrations"
            )
        if isinstance(algorithm.update_rule, TrustRegion):
            yield "TrustRegion measures the policy's samples, not demonstrations: set update_rule=GradientSteps(), or remove them"
        if _instances(Downsample, algorithm.filters):
            yield "Downsample chooses among all completions of a prompt and could drop the demonstration: remove one of the two"
        if "step_end" in needs:
            yield "an advantage along steps reads them, and a demonstration has none: use GroupMean(), or remove the demonstrations"
        for part in (part for part in algorithm.filters if part.refills):
            yield (
                f"{type(part).__name__} replaces groups of equal rewards before a demonstration joins them, which discards those "
                "it would teach most: set DropZeroVariance(mode='drop'), or remove it"
            )
    if algorithm.reads_observations and isinstance(algorithm.update_rule, TrustRegion):
        yield "TrustRegion measures the policy's samples: set update_rule=GradientSteps(), or remove ObservationNLL()"
    decayed = [  # with the shares that they end with
        term.with_state({"rollouts": term.decay_rollouts})
        if isinstance(term, DemonstrationNLL) and term.final_mu is not None
        else term
        for term in terms
    ]
    for shares in (terms, decayed):
        if policy_share(shares) < 0:
            names = " and ".join(
                f"{type(term).__name__} {term.mixture_weight:g}" for term in shares if term.mixture_weight
            )
            yield f"the terms' shares of the objective add up to more than 1 ({names}): reduce them"
    shaping = " and ".join(type(part).__name__ for part in algorithm.shaping)
    if shaping and "rewards" in needs:
        yield (
            f"the advantage reads the reward functions' separate rewards, which {shaping} would not change: set shaping=(), make "
            "it a reward function, or add KLToReference() to terms"
        )
    if shaping and _instances(DivideByGroupMean, algorithm.advantage):
        yield (
            f"DivideByGroupMean maximises the likelihood of success, and {shaping} would make rewards negative: set shaping=() and "
            "add KLToReference() to terms, or replace DivideByGroupMean by GroupStd()"
        )
    if _instances(Vine, algorithm.advantage):
        for field in ("filters", "shaping"):
            for part in getattr(algorithm, field):
                yield f"Vine trains on single tokens, and {type(part).__name__} reads full completions: set {field}=()"
        for field in sorted(needs & _COMPLETION_LEVEL):
            yield f"a part reads Batch.{field} of full completions, and Vine trains on single tokens within completions: remove it"


# Checks that need more than the algorithm: the run's settings, or a batch.


def check_rollout(algorithm: Algorithm) -> None:
    """Check an algorithm for use in a run.

    Raises:
        ConfigError: no teacher for a distillation, neither another model nor another prompt; a penalty near π_old although each
            rollout feeds a single gradient step (in a custom loop the samples may be older than the policy, so this is no error of
            the algorithm itself).
    """
    reference = algorithm.reference
    has_teacher = reference is not None and bool(reference.models or reference.templates)
    if _instances(TeacherLogRatio, algorithm.advantage) and not has_teacher:
        raise ConfigError(
            f"{algorithm.name} learns from a teacher: set --teacher to a folder, a hub id, a run folder or a server (from Python "
            "reference=Reference(model=…)), with the policy's tokenizer. The initial policy would teach it nothing, unless it "
            "reads more than the policy (Reference.templates; algorithm sdft)"
        )
    rule = algorithm.update_rule
    is_old_at_update = algorithm.old_policy == "learner" and isinstance(rule, GradientSteps) and rule.updates == 1
    for term in algorithm.terms:
        if term.constrained_kl == "kl_old" and is_old_at_update:
            raise ConfigError(
                f"{type(term).__name__} keeps π_θ near π_old, and they are equal at a rollout's only gradient step: set "
                "update_rule=GradientSteps(epochs=4), old_policy='sampler' if samples may be stale, or remove it"
            )


def check_sampling(algorithm: Algorithm, samples_per_prompt: int, temperature: float) -> None:
    """Raise ConfigError if too few samples per prompt, or equal ones, are sampled for the algorithm's parts."""
    for part in _instances(Downsample, algorithm.filters):
        if part.keep > samples_per_prompt:
            raise ConfigError(
                f"Downsample trains on {part.keep} samples per prompt, and there are {samples_per_prompt}: set "
                f"samples_per_prompt to {part.keep} or more, or Downsample.keep to {samples_per_prompt} or less"
            )
    for name in (type(part).__name__ for part in algorithm.parts() if part.uses_group_statistics):
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
                "Vine compares several tokens of one state, and at temperature 0 only one is ever sampled: set "
                "sampling.temperature above 0"
            )
        if isinstance(link, PassAtK) and samples_per_prompt <= link.k:
            raise ConfigError(
                f"PassAtK(k={link.k}) compares {link.k}-subsets of a prompt's samples, and {samples_per_prompt} samples have at "
                f"most one: set samples_per_prompt to {link.k + 1} or more, or a smaller k"
            )


def find_mixed_roles(algorithm: Algorithm) -> str:
    """Return why an algorithm does not fit batches of several roles, with a remedy; "" if it does."""
    names = [
        type(part).__name__
        for part in algorithm.parts()
        if ("baseline" in part.needs or part.uses_group_statistics) and "peers" not in part.needs
    ]
    if not names:
        return ""
    return (
        f"{' and '.join(names)} of {algorithm.name} would compare all players of a prompt's games with each other, and the rewards "
        "of a zero-sum game add up to 0 whatever the policy does: use algorithm spiral, which compares each role with its own "
        "past, or compare players of one role, --algorithm.advantage GroupMean --algorithm.advantage.group-mean.within peers "
        "(LeaveOneOut and GroupStd have it too; --algorithm.filters none removes filters)"
    )


def reject_mixed_roles(algorithm: Algorithm, batch: Batch) -> None:
    """Raise ConfigError for a part that compares the completions of a group, where these are of several roles."""
    if batch.role is None or len(batch.role_names) < 2:
        return
    roles = Groups(batch.group, batch.counted)
    if bool((~roles.is_constant(batch.role.to(batch.reward.dtype)) & batch.counted).any()) and (
        reason := find_mixed_roles(algorithm)
    ):
        raise ConfigError(reason)


def reject_unread_demonstrations(algorithm: Algorithm, batch: Batch) -> None:
    """Raise ConfigError for demonstrations that no part reads, which would count as the policy's samples."""
    if batch.demonstration is None or "demonstration" in algorithm.all_needs:
        return
    rows = (batch.demonstration & batch.mask.any(1)).nonzero().flatten().tolist()
    if rows:
        raise ConfigError(
            f"row {rows[0]} is a demonstration (Batch.demonstration), which {algorithm.name} would treat as a sample of the "
            "policy: remove it, set gate=PolicyShaping(), or add DemonstrationNLL() to terms"
        )


def check_rewards(batch: Batch) -> None:
    """Raise ConfigError for non-finite rewards of completions that count or are trained on."""
    total = batch.reward
    if batch.token_reward is not None:
        total = total + masked.apply_mask(batch.token_reward, batch.mask).sum(1)
    bad = ~total.isfinite() & (batch.mask.any(1) | batch.counted)
    if bool(bad.any()):
        rows = bad.nonzero().squeeze(1).tolist()
        listed = ", ".join(map(str, rows[:8])) + (", …" if len(rows) > 8 else "")
        raise ConfigError(
            f"Batch.reward or token_reward is NaN or infinite in row{'s' * (len(rows) > 1)} {listed}: set a number, or exclude "
            "the completion (mask all False), since a NaN would spread to the advantages of its group"
        )
