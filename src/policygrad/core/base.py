"""Base classes of an algorithm's parts: the call of each role, and every attribute a part may set, with its default.

A custom part inherits the base of its role (`class Tent(pg.Gate)`) and overrides what differs. `Algorithm` checks its parts
when it is built (`validation.py`).

Stateful parts keep their state apart from their settings, as a plain dict that JSON can hold. `init_state` creates it,
`update_state` advances it after each rollout, and `with_state` returns the part to use for the next rollout.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

from torch import Tensor

from policygrad.core.batch import Batch, Forward
from policygrad.core.chains import ANY, Stage
from policygrad.core.divergences import REVERSE_KL, Divergence
from policygrad.core.metrics import Metric, Metrics
from policygrad.core.settings import check_settings, find_settings_without_effect

if TYPE_CHECKING:
    from policygrad.core.algorithm import Algorithm

State = dict[str, Any]


class RunLength(NamedTuple):
    """What says which schedules of a part act in a run."""

    steps: int
    """Rollouts, each with its updates."""
    evaluation_every: int = 0
    """Steps between evaluations; 0 = none during training."""


def format_steps(n: int) -> str:
    """Return "1 step", "2 steps"."""
    return f"{n} step{'s' * (n != 1)}"


class Part:
    """Attributes and methods shared by all roles."""

    needs: ClassVar[frozenset[str]] = frozenset()
    """Fields of `Batch` that the part reads beyond mask, group and reward. A learner or a rollout fills them."""
    forward_needs: ClassVar[frozenset[str]] = frozenset()
    """Fields of `Forward` that the part reads. A term reads them in the training pass, which always has `logp`; a part with
    `select_tokens` reads them in an extra pass over the update, which is made only where this is not empty."""
    providers: ClassVar[tuple[str | type, ...]] = ()
    """What fills fields of `Batch` for this part alone during a rollout: a class (`policygrad.rollout.providers.FieldProvider`), or
    its module:class, which is imported when it is needed."""
    uses_group_statistics: ClassVar[bool] = False
    """True if the part compares the samples of one prompt, so a run needs several of them at a temperature above 0."""
    compares_spans: ClassVar[bool] = False
    """True if the part compares the policy with a π_ref of another tokenizer (`Batch.reference_spans`)."""
    multipliers: ClassVar[tuple[str, ...]] = ()
    """Settings that multiply all that the part adds to the objective: where all are 0 or None, no other acts."""
    length: int | None = 0
    """Tokens. None is filled with the run's generation budget (`Algorithm.with_max_tokens`); 0 means the part has no length."""

    def __post_init__(self) -> None:
        """Check the settings; a part that checks more calls this first."""
        check_settings(self)

    @property
    def formula(self) -> str:
        """One line for the printed equation."""
        return type(self).__name__

    @property
    def is_zero(self) -> bool:
        """True if what the part adds to the objective is 0 for every batch."""
        return bool(self.multipliers) and not any(getattr(self, name) for name in self.multipliers)

    @property
    def extra_samples(self) -> str:
        """What a run samples for the part beside the completions that it trains on, in words; empty for nothing."""
        return "a greedy completion of every prompt" if "baseline" in self.needs else ""

    @property
    def reference_penalty(self) -> float:
        """β, if a term or an advantage adds −β·KL(π_θ‖π_ref) to the objective, estimated or exact."""
        return 0.0

    def find_conflicts(self, algorithm: Algorithm) -> Iterator[str]:
        """Yield why the part does not fit the other parts, each with a remedy. `Algorithm` asks when it is built.

        The rules of a part's base classes hold too, without a call of super(): `validation.ask_parts` asks every class.
        """
        return iter(())

    def find_run_conflicts(self, algorithm: Algorithm) -> Iterator[str]:
        """Yield why no run can train with the part, where a custom loop still could. Asked like `find_conflicts`."""
        return iter(())

    def find_sampling_conflicts(self, samples_per_prompt: int, temperature: float) -> Iterator[str]:
        """Yield why the part learns nothing from samples like these. Asked like `find_conflicts`, before a run samples."""
        name = type(self).__name__
        if self.uses_group_statistics and samples_per_prompt < 2:
            yield (
                f"{name} compares the samples of one prompt, and there is one per prompt: set samples_per_prompt to 2 or "
                "more, or use RunningMean() (algorithm reinforce)"
            )
        if self.uses_group_statistics and temperature == 0:
            yield (
                f"{name} compares the samples of one prompt, and at temperature 0 they are all equal: set "
                "sampling.temperature above 0"
            )

    def find_idle_settings(self, algorithm: Algorithm) -> Mapping[str, str]:
        """Return setting -> why it cannot act beside the part's other settings and the other parts, with a remedy; "" stands for
        the choice of this part instead of another of its kind. A run says so of what was changed in it. What fields declare
        (`acts_with`) and the answers of a part's base classes count too, without a call of super(): `validation.list_idle` asks
        every class."""
        idle = dict(find_settings_without_effect(self))
        if self.is_zero:
            zero = self.multipliers[0]
            reason = f"{zero} is 0, so that {type(self).__name__} adds nothing. Set {zero}, or leave it out"
            idle |= {f.name: reason for f in fields(self) if f.name not in self.multipliers}  # type: ignore[arg-type]
        return idle

    def find_idle_schedules(self, length: RunLength) -> Iterator[str]:
        """Yield which schedules of the part never take effect in a run of this length, each with a remedy."""
        return iter(())

    def init_state(self) -> State | None:
        """Return the state before the first rollout, or None for a stateless part."""
        return None

    def update_state(self, state: State, batch: Batch, metrics: Mapping[str, Metric]) -> State:
        """Return the state after a rollout. `batch` is shaped; `metrics` come from its updates."""
        return state

    def with_state(self, state: State) -> Self:
        """Return the part as it acts under this state."""
        return self

    def report(self, batch: Batch) -> Metrics:
        """Return additional metrics of a rollout."""
        return {}

    def select_tokens(self, out: Forward | None, batch: Batch, psi: Tensor) -> Tensor:
        """Choose among all tokens of one update; for a part whose `needs` include `selected`.

        Called once per update, before it is split, so that every micro-batch and rank sees the same choice.

        Args:
            out: the current policy's output without graph; None where `forward_needs` is empty.

        Returns:
            [B, T] bool, which becomes `Batch.selected`.
        """
        raise NotImplementedError(
            f"{type(self).__name__} needs Batch.selected but has no select_tokens(out, batch, psi)"
        )


@dataclass(frozen=True)
class Explanation:
    """How the advantages of one group came about: the arithmetic of a chain's links so far, with this group's numbers."""

    values: tuple[float, ...]
    """Ψ of each completion."""
    expressions: tuple[str, ...]
    """The arithmetic that gives it: `(1 − 0.375)/0.518`."""
    facts: tuple[tuple[str, float], ...] = ()
    """What the links computed for the group, by name: `mean` 0.375."""

    @classmethod
    def of_rewards(cls, rewards: Sequence[float]) -> Explanation:
        """Return the start of every chain."""
        return cls(tuple(rewards), tuple(map(format_term, rewards)))

    def subtract(self, baselines: Sequence[float], *facts: tuple[str, float]) -> Explanation:
        """Return Ψ − b, b one for each completion."""
        values = tuple(x - b for x, b in zip(self.values, baselines, strict=True))
        signs = [f"− {format_term(b)}" if b >= 0 else f"+ {format_term(-b)}" for b in baselines]
        expressions = tuple(f"({text} {sign})" for text, sign in zip(self.expressions, signs, strict=True))
        return Explanation(values, expressions, (*self.facts, *facts))

    def divide(self, scale: float, *facts: tuple[str, float]) -> Explanation:
        """Return Ψ/scale."""
        values = tuple(x / scale for x in self.values)
        return Explanation(
            values, tuple(f"{text}/{format_term(scale)}" for text in self.expressions), (*self.facts, *facts)
        )


def format_term(x: float) -> str:
    """Format a number for an expression: 1, 0.375, −0.5."""
    return f"{x:.3g}".replace("-", "−")


class Advantage(Part):
    """One link of the chain that computes Ψ. The first link receives the reward to go."""

    starts_chain: ClassVar[bool] = False
    """True if the link starts from the rewards and ignores the Ψ it is given, so that it must come first."""
    takes: ClassVar[frozenset[Stage]] = ANY
    """What Ψ may be before the link (`core.chains`)."""
    gives: ClassVar[Stage | None] = None
    """What Ψ is after it; None: what it was before."""
    reads_reward: ClassVar[bool] = True
    """True if the link reads rewards. A run whose links read none needs no reward function."""
    samples_values: ClassVar[bool] = False
    """True if the rollout must estimate `Batch.values` from `samples` fresh completions of each step's prefix."""
    samples: int = 0
    replaces_rows: ClassVar[bool] = False
    """True if a provider puts other rows in place of the completions, such as single tokens tried in one state."""

    @property
    def extra_samples(self) -> str:
        if self.samples_values or self.replaces_rows:
            return "completions sampled from within others, to estimate values"
        return super().extra_samples

    def value_prompts(self, logp_ref: Tensor, reward: Tensor) -> Tensor | None:
        """Return the exact `Batch.baseline` of prompts whose completions are all known; None for the greedy completion's reward.

        Args:
            logp_ref: [P, N] log-probabilities of all completions under π_ref.
            reward: [P, N].

        Returns:
            [P].
        """
        return None

    def explain(self, before: Explanation, rewards: Sequence[float]) -> Explanation | None:
        """Say what the link does with one group, in numbers; None where these rewards do not tell it, as for a mean over the batch.

        Args:
            before: what the links before it have made of the rewards.
            rewards: those of the group's completions, which all count.
        """
        return None

    def find_conflicts(self, algorithm: Algorithm) -> Iterator[str]:
        if self.samples_values and algorithm.critic is not None:
            name = type(self).__name__
            yield f"{name} estimates values from fresh samples and would not use the critic: set critic=None, or use GAE()"

    @abstractmethod
    def __call__(self, psi: Tensor, batch: Batch) -> Tensor:
        """[B, T] -> [B, T]."""


def list_idle_without_advantage(part: Part, algorithm: Algorithm) -> Mapping[str, str]:
    """Return what of a gate or ratio has no effect where Ψ is always 0: all of it."""
    if not algorithm.has_zero_advantage:
        return {}
    reason = f"the advantage of {algorithm.name} is always 0, and the policy learns from terms alone. Leave it out"
    return dict.fromkeys(("", *(f.name for f in fields(part))), reason)  # type: ignore[arg-type]


class Ratio(Part):
    """Turns per-token log-ratios into the importance ratio r."""

    joint: ClassVar[bool] = False
    """True if r is the ratio of the completion's joint probability; each token then holds 1/|o| of the objective's value."""
    per_token: ClassVar[bool] = False
    """True if r at a token depends on that token alone, as gates with `requires_token_ratio` need it."""

    def find_idle_settings(self, algorithm: Algorithm) -> Mapping[str, str]:
        if not algorithm.gate.reads_ratio:
            gate = type(algorithm.gate).__name__
            return {"": f"the gate {gate} does not read the ratio. Set another gate, or leave it out"}
        return list_idle_without_advantage(self, algorithm)

    @abstractmethod
    def __call__(self, log_ratio: Tensor, mask: Tensor) -> Tensor:
        """log(π_θ/π_old) [B, T] -> r [B, T]."""


class Gate(Part):
    """Lever 2: the weight w of a token's gradient as a function of the ratio."""

    on_policy: ClassVar[bool] = False
    """True if the gate takes no ratio, which is correct only while π_θ = π_old."""
    requires_token_ratio: ClassVar[bool] = False
    """True if the gate reads per-token ratios, so that only a ratio that is `per_token` fits."""
    reads_ratio: ClassVar[bool] = True
    """True if w depends on the ratio."""
    requires_full_groups: ClassVar[bool] = False
    """True if a token's weight depends on the other tokens of its group, so that no micro-batch may split a group."""

    def find_idle_settings(self, algorithm: Algorithm) -> Mapping[str, str]:
        return list_idle_without_advantage(self, algorithm)

    def find_conflicts(self, algorithm: Algorithm) -> Iterator[str]:
        name, ratio, updates = type(self).__name__, algorithm.ratio, algorithm.update_rule.updates
        if self.on_policy and updates > 1:
            yield (
                f"{name} allows one update per rollout, not {updates}: after the first, the samples are off-policy. Set "
                "update_rule=GradientSteps(1, 1), or a ratio and a gate such as Clip()"
            )
        if self.on_policy and ratio is not None:
            yield (
                f"{name} ignores the ratio, and ratio is {type(ratio).__name__}: set ratio=None, or a gate such as Importance()"
            )
        if not self.on_policy and ratio is None:
            yield f"{name} needs a ratio, and ratio is None: set ratio=Token() or Sequence()"
        if self.requires_token_ratio and not (ratio is not None and ratio.per_token):
            yield f"{name} needs per-token ratios, and ratio is {type(ratio).__name__}: set ratio=Token()"
        if self.on_policy and algorithm.old_policy == "sampler":
            yield (
                f"old_policy='sampler' puts the sampler into the ratio, which {name} ignores: use "
                "'learner', which corrects stale samples by TruncatedIS(), or set ratio=Token() and gate=Importance()"
            )

    @abstractmethod
    def weight(self, ratio: Tensor, psi: Tensor, batch: Batch) -> Tensor:
        """w [B, T]: the derivative of `value` in log π_θ, divided by Ψ."""

    @abstractmethod
    def value(self, ratio: Tensor, psi: Tensor, batch: Batch) -> Tensor:
        """[B, T]; the paper's objective per token."""

    def clipped(self, ratio: Tensor, psi: Tensor, batch: Batch) -> tuple[Tensor, Tensor] | None:
        """Return the clipped or dropped tokens as (below, above) r = 1, both [B, T] bool; None if there are never any."""
        return None


class Correction(Part):
    """A factor on w: importance weights for a sampler μ that is not π_old, or a mask on tokens.

    It also multiplies the terms that the policy learns from (`Algorithm.corrects`).
    """

    corrects_sampler: ClassVar[bool] = True
    """True if the factor accounts for μ ≠ π_old, so that stale samples need no other correction. False for a mask."""
    reweights: ClassVar[bool] = False
    """True if the factor is ρ = π_old/μ itself, bounded or not, of which an update takes one. False for a mask."""
    reads_psi: ClassVar[bool] = False
    """True if the factor depends on Ψ, so that it does nothing where Ψ is always 0."""

    def find_conflicts(self, algorithm: Algorithm) -> Iterator[str]:
        name = type(self).__name__
        if self.corrects_sampler and algorithm.old_policy == "sampler":
            yield f"{name} corrects for π_old/μ, which old_policy='sampler' makes 1: set corrections=(), or use 'learner'"
        if self.reads_psi and algorithm.has_zero_advantage:
            yield f"{name} reads Ψ, which {algorithm.name} has at 0 everywhere: remove it, or use TruncatedIS() or MaskedIS()"

    def counted_tokens(self, batch: Batch) -> Tensor | None:
        """Return the tokens that averages over the update count, [B, T] bool; None for all. Asked once, of a full update."""
        return None

    def normaliser(self, batch: Batch) -> Tensor | None:
        """Return what the factor is divided by, [], computed over a full update; None for 1."""
        return None

    @abstractmethod
    def __call__(self, out: Forward, batch: Batch, psi: Tensor) -> Tensor:
        """[B, T]."""


class Aggregation(Part):
    """The averaging of tokens over a full update."""

    @abstractmethod
    def __call__(self, mask: Tensor, group: Tensor) -> Tensor:
        """c [B, T] before `Batch.weight` is applied; zero where the mask is False."""


class ObjectiveTerm(Part):
    """The common base of `Term` and `LossTerm`: which tokens a term averages over, and with which coefficients."""

    constrained_kl: ClassVar[str | None] = None
    """'kl_old' for a penalty that keeps π_θ near π_old."""
    aggregation: Aggregation | None = None
    """None: aggregated like the policy's tokens."""
    learns_from_samples: bool = False
    """True for a term that the policy learns from, as it does from Ψ: corrections multiply it too (`Algorithm.corrects`). False for
    a penalty."""
    mixture_weight: float = 0.0
    """μ in a mixture (1 − μ)·J + μ·term; the policy term keeps 1 minus the sum of these. 0: the term is simply added."""

    @property
    def divergence(self) -> Divergence:
        """Which divergence from π_ref `Forward.kl_ref` holds, for a term that reads it."""
        return REVERSE_KL

    @property
    def final_mixture_weight(self) -> float:
        """μ at the end of its schedule, for a term that has one."""
        return self.mixture_weight

    def token_mask(self, batch: Batch) -> Tensor | None:
        """Return the tokens that the term and its denominators count, [B, T] or [B, 1] bool; None for all."""
        return None

    @property
    def reads_observations(self) -> bool:
        """True for a term over the environment's tokens (`Batch.observed_tokens`) instead of the policy's."""
        return "observation" in self.needs

    def scored_tokens(self, batch: Batch) -> Tensor:
        """Return the tokens at which the term may act, [B, T] bool."""
        return batch.observed_tokens if self.reads_observations else batch.mask


class Term(ObjectiveTerm):
    """An additive score term k, under stop-gradient."""

    @abstractmethod
    def score(self, out: Forward, batch: Batch, psi: Tensor) -> Tensor:
        """k [B, T]; the factor of ∇log π_θ."""

    @abstractmethod
    def value(self, out: Forward, batch: Batch, psi: Tensor) -> Tensor:
        """[B, T]; the term's share of the paper's objective."""


class LossTerm(ObjectiveTerm):
    """An additive term with its own graph, for what is no multiple of ∇log π_θ (such as the exact entropy)."""

    @abstractmethod
    def objective(self, out: Forward, batch: Batch, psi: Tensor) -> Tensor:
        """[B, T] with graph; maximised, and aggregated like a term."""


class Shaping(Part):
    """Turns the task's score into the reward."""

    def find_conflicts(self, algorithm: Algorithm) -> Iterator[str]:
        if "rewards" in algorithm.all_needs:
            shaping = " and ".join(type(part).__name__ for part in algorithm.shaping)
            yield (
                f"the advantage reads the reward functions' separate rewards, which {shaping} would not change: set shaping=(), "
                "make it a reward function, or add KLToReference() to terms"
            )

    @abstractmethod
    def __call__(self, batch: Batch) -> Batch:
        """Return the batch with a new `reward` or `token_reward`."""


class Filter(Part):
    """Decides from the task's score which completions take part."""

    sampling_rounds: int = 1
    """Maximum sampling rounds per step, each of the step's number of prompts."""
    keep_leftovers: bool = False
    """True if groups that do not fit into a full step start the next one."""
    refills: bool = False
    """True if another prompt is sampled for each group whose completions are all dropped. The filter is then not called, and
    dropped groups that could not be replaced get weight 0."""
    replays: ClassVar[bool] = False
    """True for a `core.replay.ReplayBuffer`: groups of earlier steps take the place of those whose completions are all dropped."""
    chooses_by_reward: ClassVar[bool] = False
    """True if the task's score decides which completions of a prompt the filter keeps."""

    excluded_examples: frozenset[int] = frozenset()
    """Prompts, by `Batch.example_id`, that a rollout must skip."""
    task_level: int | None = None
    """Difficulty of a rollout's prompts, counted from 0, for a task that has levels; None leaves it to the task."""

    @property
    def replaces_groups(self) -> bool:
        """True if other groups take the place of those whose completions are all dropped: further ones, or earlier ones."""
        return self.refills or self.replays

    def find_conflicts(self, algorithm: Algorithm) -> Iterator[str]:
        if self.replaces_groups and "demonstration" in algorithm.all_needs:
            yield (
                f"{type(self).__name__} replaces groups of equal rewards before a demonstration joins them, which discards those "
                "it would teach most: set DropZeroVariance(mode='drop'), or remove it"
            )

    @abstractmethod
    def __call__(self, batch: Batch) -> Batch:
        """Return the batch with a new `mask`, `in_statistics` or `weight`."""

    def find_dropped(self, batch: Batch) -> Tensor:
        """Return the completions that the filter removes, [B] bool."""
        return batch.mask.any(1) & ~self(batch).mask.any(1)


class UpdateRule(Part):
    """The way the parameters move, given a learner's problem."""

    uses_lr: ClassVar[bool] = True
    """True if the policy's learning rate has an effect."""
    step_size: ClassVar[tuple[str, str] | None] = None
    """The setting that sets the size of the steps without a learning rate, and its unit."""
    minibatches: int = 1
    """Number of minibatches, each of full groups, that a rollout is split into."""

    @property
    @abstractmethod
    def updates(self) -> int:
        """Maximum policy updates per rollout."""

    @property
    def has_unit_ratios(self) -> bool:
        """True if π_θ is π_old wherever the rule takes a gradient or a value, so that every ratio of the two is 1."""
        return False

    @property
    def critic_updates(self) -> int:
        """Critic optimizer steps per rollout, if there is a critic; by default one with each policy update."""
        return self.updates

    @abstractmethod
    def __call__(self, problem: object) -> Metrics:
        """Make one rollout's updates. `updates.require_problem` checks that the problem has the methods the rule needs."""
