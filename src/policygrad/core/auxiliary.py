"""Models beside the policy: the critic's targets and loss, the implicit reward model, and the reference. A learner owns the
parameters."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from policygrad.core import masked
from policygrad.core.base import Part, RunLength, State, format_steps
from policygrad.core.batch import Batch
from policygrad.core.divergences import Divergence
from policygrad.core.gae import GAE
from policygrad.core.metrics import Mean, Metric, Metrics, masked_mean
from policygrad.core.settings import ABOVE_0, COUNT, acts_with, choice, setting
from policygrad.core.turns import MultiTurnGAE, token_discount, turn_discount
from policygrad.errors import ConfigError

if TYPE_CHECKING:
    from policygrad.core.algorithm import Algorithm


class TrainedModel(Part):
    """A model that is trained beside the policy, with a learning rate of its own."""

    lr: float | None
    default_lr_ratio: ClassVar[float]
    """Ratio of the learning rate to the policy's, where `lr` is None."""

    def learning_rate(self, policy: float | None) -> float:
        """Return the peak learning rate, given the policy's.

        Raises:
            ConfigError: neither rate is set.
        """
        if self.lr is not None:
            return self.lr
        if policy is None:
            name = type(self).__name__
            raise ConfigError(
                f"{name}.lr is None and the policy has no learning rate to derive it from: set {name}(lr=…), for example 1e-6"
            )
        return self.default_lr_ratio * policy


@dataclass(frozen=True)
class Critic(TrainedModel):
    """V_φ: a value model with separate parameters, fitted to GAE(γ, λ) + V_old, unwhitened.

    backbone='separate' is a copy of the initial model's backbone, trained with the value head. backbone='policy' is a head on the
    policy's last hidden states, under stop-gradient: it needs no second backbone in memory, but its values shift with the
    policy's states and explain less. A `hidden` layer helps.

    Before training, the critic can be fitted to the frozen policy's returns, for at most `pretrain` rollouts or until it explains
    `pretrain_until` of their variance. Sampling dominates the cost of a rollout, so each is used `pretrain_epochs` times, without
    clipping the error.
    """

    lr: float | None = setting(None, "at least 0")
    """Peak learning rate, on the policy's schedule; None: ten times the policy's."""
    lam: float = setting(0.95, "in [0, 1]")
    """λ of the targets; 1 gives Monte-Carlo returns. It may differ from the advantage's, as in VAPO."""
    gamma: float = setting(1.0, "in [0, 1]")
    """Discount per token; must match the advantage's."""
    turn_gamma: float = setting(1.0, "in [0, 1]")
    """Discount per turn, at its last token; must match the advantage's."""
    coefficient: float = setting(0.5, "at least 0")
    """Coefficient of the squared error."""
    clip: float = setting(0.2, "at least 0")
    """Use the error of clip(V, V_old ± clip) where it is larger; 0 disables clipping."""
    pretrain: int = setting(0, "at least 0")
    """Maximum rollouts of value pre-training, during which the policy is not updated."""
    pretrain_until: float = acts_with(setting(0.5, "a finite number"), pretrain=ABOVE_0)
    """Explained variance of fresh returns at which pre-training stops early."""
    pretrain_epochs: int = acts_with(setting(4, COUNT), pretrain=ABOVE_0)
    """Value steps per update of pre-training."""
    backbone: Literal["separate", "policy"] = choice(separate="", policy="")
    """separate: a backbone of its own; policy: the policy's hidden states, under stop-gradient."""
    hidden: int = setting(0, "at least 0")
    """Width of a hidden layer in the head on the policy's states; 0: a linear head."""
    default_lr_ratio: ClassVar[float] = 10.0
    """Above 1, since the value head starts untrained."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden and self.backbone == "separate":
            raise ConfigError(
                "Critic.hidden makes a head on the policy's fixed states non-linear, and backbone='separate' learns its own "
                "states: set backbone='policy', or leave hidden at 0"
            )

    def find_idle_schedules(self, length: RunLength) -> Iterator[str]:
        if self.pretrain >= length.steps:
            yield (
                f"Critic.pretrain = {self.pretrain} may take all {format_steps(length.steps)} of this run: until the values "
                f"explain {self.pretrain_until:.0%} of the returns' variance, the policy is not trained. Set --steps above "
                f"{self.pretrain}, or a smaller --algorithm.critic.pretrain"
            )

    def find_conflicts(self, algorithm: Algorithm) -> Iterator[str]:
        if "values" not in algorithm.all_needs:
            yield "no advantage uses the critic: put GAE() or NStep() first in advantage, or set critic=None"
        if "demonstration" in algorithm.all_needs:
            yield (
                "a critic is fitted to the returns of the policy's samples, which demonstrations are not: set critic=None and a "
                "group baseline such as GroupMean(), or remove the demonstrations"
            )
        # V is the value of rewards that are discounted in one way, and the advantage compares rewards with it.
        for link in algorithm.advantage:
            discounts = (
                ("token", "gamma", token_discount(link), self.gamma),
                ("turn", "turn_gamma", turn_discount(link), self.turn_gamma),
            )
            for unit, setting_name, gamma, own in discounts:
                if gamma is not None and gamma != own:
                    yield (
                        f"{type(link).__name__} discounts by {gamma:g} per {unit} and the critic's targets by {own:g}, so "
                        f"rewards and values do not match: set the critic's {setting_name}={gamma:g} "
                        f"(--algorithm.critic.{setting_name.replace('_', '-')} {gamma:g})"
                    )

    def init_state(self) -> State | None:
        return {"pretrain": self.pretrain} if self.pretrain else None

    def update_state(self, state: State, batch: Batch, metrics: Mapping[str, Metric]) -> State:
        """Count a rollout of pre-training, or end pre-training once the explained variance suffices."""
        explained, remaining = metrics.get("explained_variance"), state["pretrain"]
        if not remaining or explained is None:
            return state
        return {"pretrain": 0 if explained.value >= self.pretrain_until else remaining - 1}

    def with_state(self, state: State) -> Critic:
        """Return the critic with the remaining rollouts of pre-training."""
        return replace(self, pretrain=state["pretrain"])

    @property
    def formula(self) -> str:
        clip = f", clipped at V_old ± {self.clip:g}" if self.clip else ""
        head = ", V on the policy's states" if self.backbone == "policy" else ""
        discount = f", γ = {self.gamma:g}" if self.gamma < 1 else ""
        discount += f", γ = {self.turn_gamma:g} per turn" if self.turn_gamma < 1 else ""
        return f"{self.coefficient:g}·(V − (GAE(λ = {self.lam:g}{discount}) + V_old))²{clip}{head}"

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        """Turn boundaries, if turns discount."""
        return frozenset({"turn_state"} if self.turn_gamma < 1 else ())

    def targets(self, batch: Batch) -> Tensor:
        """Compute GAE(γ, λ) + V_old [B, T], 0 off the mask, from a batch after shaping."""
        by_turn = MultiTurnGAE(self.gamma, self.lam, self.turn_gamma)
        estimate = by_turn if self.turn_gamma < 1 else GAE(self.gamma, self.lam)
        advantage = estimate(torch.zeros_like(batch.mask, dtype=batch.reward.dtype), batch)
        return advantage + masked.apply_mask(batch.require("values", self), batch.mask)

    def loss(self, values: Tensor, batch: Batch, targets: Tensor) -> Tensor:
        """Compute coefficient·max((V − R)², (clip(V, V_old ± ε) − R)²) [B, T], with graph. Source: Schulman et al. 2017 (code)."""
        values = masked.apply_mask(values, batch.mask)
        error = (values - targets) ** 2
        if self.clip and not self.pretrain:
            old = masked.apply_mask(batch.require("values", self), batch.mask)
            near = old + (values - old).clamp(-self.clip, self.clip)
            error = torch.maximum(error, (near - targets) ** 2)
        return self.coefficient * masked.apply_mask(error, batch.mask)


def explained_variance(values: Tensor, targets: Tensor, mask: Tensor) -> float:
    """Compute 1 − Var(R − V)/Var(R) over the sampled tokens; 0 for constant targets."""
    spread = float(masked.std(targets, mask, 0)) ** 2
    if not spread or bool(masked.is_constant(targets, mask)):
        return 0.0
    return 1 - float(masked.std(targets - values, mask, 0)) ** 2 / spread


# A reward model that is trained on outcomes beside the policy and gives each token a reward.


@dataclass(frozen=True)
class ImplicitReward(TrainedModel):
    """r_φ(o_t) = β·log(π_φ/π_ref)(o_t), π_φ a language model that starts as π_ref, so that r_φ = 0 at first.

    It is fitted to outcomes R in [0, 1] only: the cross-entropy of σ(r_φ(o)) with R, r_φ(o) = Σ_t r_φ(o_t), averaged over the
    update's completions. A rollout is rewarded before φ is fitted to it (PRIME's algorithm 1, steps 7 and 8).
    Source: Cui et al. 2025 (PRIME), eq. 3 and algorithm 1.
    """

    beta: float = setting(0.05, "above 0")
    lr: float | None = setting(None, "at least 0")
    """Peak learning rate, on the policy's schedule; None: twice the policy's."""
    needs: ClassVar[frozenset[str]] = frozenset({"logp_ref"})
    default_lr_ratio: ClassVar[float] = 2.0
    """1e-6 / 5e-7 in PRIME, sec. 4.1."""

    def find_conflicts(self, algorithm: Algorithm) -> Iterator[str]:
        if "implicit_reward" not in algorithm.all_needs:
            yield (
                "no advantage uses the reward model: put ImplicitProcess() after LeaveOneOut() in advantage, or set "
                "reward_model=None"
            )
        if (reference := algorithm.reference) is None:
            return
        if reference.refreshes:
            yield (
                "ImplicitReward is relative to the reference, and a refresh would change the meaning of its rewards: set "
                "refresh_every=None and refresh_after_stall=None"
            )
        if reference.deviation:
            yield (
                "ImplicitReward is relative to the initial model under the policy's own prompt, and Reference has "
                f"{reference.deviation}: unset it, or set reward_model=None"
            )
        if limited := reference.limited_model:
            yield (
                f"ImplicitReward() starts as a copy of the reference, and {limited} cannot be copied: use a single model in a "
                "folder"
            )

    @property
    def formula(self) -> str:
        return f"{self.beta:g}·log(π_φ/π_ref), φ by cross-entropy of σ(Σ_t r_φ) with R"

    def rewards(self, logp: Tensor, batch: Batch) -> Tensor:
        """Compute r_φ(o_t) [B, T] from log π_φ [B, T], with graph; 0 off the mask."""
        reference = masked.apply_mask(batch.require("logp_ref", self), batch.mask)
        return self.beta * (masked.apply_mask(logp, batch.mask) - reference)

    def loss(self, logp: Tensor, batch: Batch) -> Tensor:
        """Compute −R·log σ(r_φ(o)) − (1 − R)·log(1 − σ(r_φ(o))) [B] in nats, with graph.

        Raises:
            ConfigError: an outcome outside [0, 1].
        """
        total = self.rewards(logp, batch).sum(1)
        outcome = masked.apply_mask(batch.reward, batch.mask.any(1)).to(total.dtype)
        if bool(((outcome < 0) | (outcome > 1)).any()):
            raise ConfigError(
                f"ImplicitReward is fitted to outcomes in [0, 1], and rewards run from {float(outcome.min()):g} to "
                f"{float(outcome.max()):g}: use a reward function with 0 for incorrect and 1 for correct, or scale it"
            )
        return binary_cross_entropy_with_logits(total, outcome, reduction="none")

    def report(self, batch: Batch) -> Metrics:
        """reward_model/accuracy: how often r_φ(o) is larger for the better of two completions of a prompt, before φ is fitted to
        them (a tie counts ½). reward_model/reward: mean r_φ(o_t)."""
        if batch.implicit_reward is None or not bool(batch.mask.any()):
            return {}
        total, has_tokens = masked.apply_mask(batch.implicit_reward, batch.mask).sum(1).double(), batch.mask.any(1)
        pair = (batch.group[:, None] == batch.group) & has_tokens[:, None] & has_tokens
        better, worse = (pair & (batch.reward[:, None] > batch.reward)).nonzero(as_tuple=True)
        gap = total[better] - total[worse]
        metrics: Metrics = {"reward_model/reward": masked_mean(batch.implicit_reward, batch.mask)}
        if len(gap):
            correct = (gap > 0).double() + 0.5 * (gap == 0).double()
            metrics["reward_model/accuracy"] = Mean(float(correct.sum()), float(len(gap)))
        return metrics


# π_ref: the model that the policy is compared with, and when it is replaced.


@dataclass(frozen=True)
class Reference(Part):
    """π_ref: the run's initial model, another one, or the policy itself. It is in memory only if a part needs `logp_ref`.

    With `templates` it reads each completion after another prompt than the policy's, with more in it: a solution, or a successful
    completion of the same prompt. The policy is then its own teacher (self-distillation). The prompt takes the place of the text of
    the last user message, or of a plain text. Token ids of completions stay as they were sampled.

    placeholder   stands for
    {prompt}      the text that the template replaces; every template has it
    {success}     the first other completion of the same prompt whose reward is at least `success_reward`
    {feedback}    what the reward functions wrote about the completion, such as an error message, if it did not succeed
    {NAME}        the task's column NAME

    With `refresh_after_stall` its state is the best evaluation score and the number of evaluations since it or since the last
    refresh. Source: Liu et al. 2025 (ProRL), sec. 2 and 3; Hübotter et al. 2026 (SDPO), Shenfeld et al. 2026 (SDFT) and Zhao et al.
    2026 (OPSD) for templates.
    """

    refresh_every: int | None = setting(None, "at least 1", "rollout, or None for never")
    """Replace the reference by the current policy every so many rollouts (iterative GRPO); None: never."""
    reset_optimizer: bool = False
    """With each refresh, also reset the optimizer state (ProRL)."""
    refresh_after_stall: int | None = setting(None, "at least 1", "evaluation, or None for never")
    """Replace it after so many consecutive periodic evaluations without a new best score; None: never.
    The replacement follows the next rollout."""
    model: str | None = None
    """Another frozen model, such as a teacher: a folder, hub id, or run folder. None: the run's initial model.
    Its tokenizer has the policy's vocabulary, unless `tokenizer` names another. A server of vLLM or SGLang has it at http://HOST:PORT/v1."""
    teachers: tuple[str, ...] = ()
    """Several such models, each as NAME=MODEL: math=runs/math code=http://HOST:PORT/v1.
    The column `teacher` of an example names the one that scores its completions (MOPD)."""
    ema: float | None = setting(None, "above 0 and at most 1", "or None")
    """π_ref ← (1 − ema)·π_ref + ema·π_θ after each rollout's updates, in float32; None: it stays as it is."""
    live: bool = False
    """π_ref is the policy with its current weights, under `templates`; it takes no memory."""
    templates: tuple[str, ...] = ()
    """Prompts that π_ref reads, in order of preference: the first whose placeholders all have a value is used.
    A completion for which there is none is not compared with π_ref. Empty: the policy's own prompt."""
    success_reward: float = setting(1.0, "a finite number")
    """Reward from which a completion can stand for {success}."""
    tokenizer: str | None = None
    """The tokenizer of `model` where it is not the policy's: a folder or hub id, usually the model's own.
    Policy and teacher are then compared over spans of text that end with a token of both."""
    cut: Literal["words", "tokens"] = choice(
        words="where tokens of both and a word end", tokens="where tokens of both end"
    )
    """words: a span ends after a token of both models with which a word, a digit or a sign ends too.
    A Chinese character or a kana is a word. tokens: after every token of both models. With `tokenizer`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokenizer is not None and (self.teachers or self.templates):
            given = "templates" if self.templates else "teachers"
            raise ConfigError(
                f"Reference.tokenizer={self.tokenizer!r} is that of one other model, which reads the policy's prompts, and "
                f"Reference has {given}: set Reference.model alone (--teacher), or tokenizer=None"
            )
        if self.teachers:
            check_teachers(self)
        if self.reset_optimizer and not self.refreshes:
            raise ConfigError(
                "Reference.reset_optimizer has no effect without refresh_every or refresh_after_stall: set one of them, or "
                "reset_optimizer=False"
            )
        if self.model is not None and self.refreshes:
            raise ConfigError(
                f"Reference.model={self.model!r} is frozen, but refresh_every and refresh_after_stall replace the reference by the "
                "policy: unset either model or those two"
            )
        self._check_moving_weights()
        if self.templates and (self.servers or self.teachers):
            raise ConfigError(
                f"Reference.templates are prompts for a model in memory, and {', '.join(self.models.values())} would read the "
                "policy's prompts: set templates=(), or Reference.model to one folder"
            )
        if isinstance(self.templates, str) or not all(isinstance(template, str) for template in self.templates):
            raise ConfigError(
                f"Reference.templates must be a tuple of texts, not {self.templates!r}: write templates=('…{{prompt}}',), with the "
                "comma"
            )
        for template in self.templates:
            if PROMPT not in template_names(template):
                raise ConfigError(
                    f"Reference.templates has {template[:60]!r}, without {{prompt}}: π_ref would not know the question; put "
                    "{prompt} where it belongs, at the end for prompts of plain text"
                )

    def _check_moving_weights(self) -> None:
        """Raise ConfigError for two ways in which the weights would change."""
        ways = {
            f"model={self.model!r}": self.model is not None,
            "refresh_every or refresh_after_stall": self.refreshes,
            "teachers": bool(self.teachers),
            f"ema={self.ema:g}" if self.ema is not None else "ema": self.ema is not None,
            "live=True": self.live,
        }
        used = [way for way, is_used in ways.items() if is_used]
        if len(used) > 1:
            raise ConfigError(
                f"Reference has {' and '.join(used)}, and π_ref's weights can have only one origin: unset all but one"
            )
        if self.live and not self.templates:
            raise ConfigError(
                "Reference(live=True) without templates compares the policy with itself: set templates=('… {answer} … {prompt}',), "
                "say, or live=False"
            )

    def find_idle_settings(self, algorithm: Algorithm) -> Mapping[str, str]:
        alone = "Reference.tokenizer names no other tokenizer, so that tokens are compared. Name it, or leave this out"
        idle = {} if self.tokenizer is not None else {"cut": alone}
        if any(SUCCESS in template_names(template) for template in self.templates):
            return idle
        reason = (
            "no template of the reference has {success}. Add it to --algorithm.reference.templates, or leave this out"
        )
        return {**idle, "success_reward": reason}

    def find_idle_schedules(self, length: RunLength) -> Iterator[str]:
        steps = length.steps
        if self.refresh_every is not None and self.refresh_every >= steps:
            smaller = f", or --algorithm.reference.refresh-every to {max(1, steps // 4)}, say" if steps > 1 else ""
            yield (
                f"Reference.refresh_every = {self.refresh_every} never takes effect in this run of {format_steps(steps)}: π_ref "
                f"stays the initial policy. Set --steps above {self.refresh_every}{smaller}"
            )
        if self.refresh_after_stall is not None:
            # the best score, `refresh_after_stall` evaluations that do not exceed it, and a rollout
            first = length.evaluation_every * (self.refresh_after_stall + 1) + 1
            if first >= steps:
                smaller = ", or a smaller --evaluation.every" if length.evaluation_every > 1 else ""
                yield (
                    f"Reference.refresh_after_stall = {self.refresh_after_stall} never takes effect in this run of "
                    f"{format_steps(steps)}: with an evaluation every {format_steps(length.evaluation_every)} π_ref is refreshed "
                    f"after step {first} at the earliest. Set --steps above {first}{smaller}"
                )

    def find_conflicts(self, algorithm: Algorithm) -> Iterator[str]:
        if "logp_ref" not in algorithm.all_needs:
            if self.refreshes:
                yield (
                    "the reference is refreshed, but no part uses it: add KLToReference(), or set "
                    "refresh_every=refresh_after_stall=None"
                )
            if self.deviation:
                yield (
                    f"Reference has {self.deviation}, but no part of {algorithm.name} uses a reference: add KLToReference() or "
                    "ExactKLToReference() to terms, or unset it"
                )
            if self.models:
                option = f"model is {self.model!r}" if self.model is not None else f"teachers is {self.teachers}"
                yield (
                    f"reference.{option}, but no part of {algorithm.name} uses a reference: use distill to learn from "
                    "it, add KLToReference() to stay near it, or unset it"
                )
        if self.tokenizer is not None:
            for part in algorithm.parts():
                if "logp_ref" in part.needs and not part.compares_spans:
                    yield (
                        f"{type(part).__name__} compares tokens one by one, and a teacher with a tokenizer of its own "
                        "(Reference.tokenizer) scores spans of text: use TeacherLogRatio(), TeacherBonus() or KLInReward(), or a "
                        "teacher with the policy's tokenizer and tokenizer=None"
                    )
        if self.limited_model:
            yield from self._find_unknown_tokens([x.divergence for x in algorithm.terms if "kl_ref" in x.forward_needs])

    def find_run_conflicts(self, algorithm: Algorithm) -> Iterator[str]:
        if self.tokenizer is not None and self.model is None:
            yield (
                f"Reference.tokenizer={self.tokenizer!r} is that of another model, and Reference has none: set --teacher (from "
                "Python Reference.model), or tokenizer=None"
            )

    def _find_unknown_tokens(self, divergences: Sequence[Divergence]) -> Iterator[str]:
        """Yield what an exact divergence needs of `limited_model` that it does not tell."""
        alternatives = "use TeacherLogRatio() or KLToReference(), or a single model in a folder"
        likeliest = (
            "--algorithm.terms.exact-kl-to-reference.top-k 20 --algorithm.terms.exact-kl-to-reference.top-of reference"
        )
        for divergence in divergences:
            if self.num_in_memory:
                yield (
                    "ExactKLToReference() compares with the reference over the vocabulary, and one of several teachers scores the "
                    f"sampled tokens alone: {alternatives}, or put all teachers behind servers"
                )
            elif not divergence.top_k:
                yield (
                    f"ExactKLToReference() compares with the reference over the full vocabulary, and {self.limited_model} tells "
                    f"its likeliest tokens at most: set {likeliest}, or {alternatives}"
                )
            elif divergence.top_of == "policy":
                yield (
                    f"ExactKLToReference(top_of='policy') needs π_ref at the policy's {divergence.top_k} likeliest tokens, and "
                    f"{self.limited_model} tells its own likeliest and the sampled ones: set {likeliest}, or {alternatives}"
                )

    @property
    def refreshes(self) -> bool:
        """True if π_ref is replaced by the policy from time to time."""
        return bool(self.refresh_every or self.refresh_after_stall)

    @property
    def deviation(self) -> str:
        """The setting by which π_ref follows the policy's weights or reads another prompt; "" if it does neither."""
        if self.ema is not None:
            return f"ema={self.ema:g}"
        return "live=True" if self.live else "templates" if self.templates else ""

    @property
    def is_teacher(self) -> bool:
        """True if π_ref can teach the policy: another model than the initial policy, or one that reads more."""
        return bool(self.models or self.templates)

    @property
    def reads_reward(self) -> bool:
        """True if a template needs what the reward functions return: successes, or their feedback."""
        return any({SUCCESS, FEEDBACK} & {*template_names(template)} for template in self.templates)

    @property
    def formula(self) -> str:
        times = [f"every {self.refresh_every} rollouts"] if self.refresh_every else []
        if self.refresh_after_stall:
            times.append(f"after {self.refresh_after_stall} evaluations without improvement")
        if times:
            weights = f"the policy, refreshed {' and '.join(times)}" + (
                ", with an optimizer reset" * self.reset_optimizer
            )
        elif self.ema is not None:
            weights = f"a moving average of the policy at rate {self.ema:g} per rollout"
        elif self.live:
            weights = "the policy"
        elif self.teachers:
            weights = f"the example's teacher, of {', '.join(self.models)}, frozen"
        else:
            weights = "the initial policy, frozen" if self.model is None else f"the model {self.model}, frozen"
        names = dict.fromkeys(name for template in self.templates for name in template_names(template))
        return weights + (f", reading {' '.join(f'{{{name}}}' for name in names)}" if names else "")

    @property
    def models(self) -> dict[str, str]:
        """The named models, by the name of the teacher; that of `model` has the name ""."""
        if self.teachers:
            return {name: model for name, _, model in (teacher.partition("=") for teacher in self.teachers)}
        return {} if self.model is None else {"": self.model}

    @property
    def servers(self) -> tuple[str, ...]:
        """Addresses of the models that are behind servers."""
        return tuple(model for model in self.models.values() if is_server(model))

    @property
    def limited_model(self) -> str:
        """The model of which only the log-probabilities of sampled tokens are known, for messages; "" for one in memory."""
        if self.servers:
            return f"the server {self.servers[0]}"
        return "one of several teachers" if self.teachers else ""

    @property
    def num_in_memory(self) -> int:
        """Models that the learner keeps in memory if a part needs `logp_ref`: all but those behind servers."""
        return len(self.models) - len(self.servers) if self.models else 1

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        """The teacher of each completion, if there are several."""
        return frozenset({"teacher"} if self.teachers else ())

    @property
    def providers(self) -> tuple[str, ...]:  # type: ignore[override]
        """Of the prompts or tokens that it reads instead of the policy's, and of the teacher of each completion."""
        if self.tokenizer is not None:
            return ("policygrad.rollout.aligned_teachers:AlignedTexts",)
        prompts = ("policygrad.rollout.reference_prompts:ReferencePrompts",) if self.templates else ()
        return (*prompts, "policygrad.rollout.teachers:TeacherPositions") if self.teachers else prompts

    def report(self, batch: Batch) -> Metrics:
        """teacher/kl/NAME: KL(π_old‖π_T) in nats per token on the completions of each teacher, from the samples."""
        if batch.teacher is None or batch.logp_ref is None or batch.logp_old is None:
            return {}
        metrics: Metrics = {}
        for i, name in enumerate(self.models):
            mask = batch.mask & (batch.teacher == i)[:, None]
            if bool(mask.any()):
                metrics[f"teacher/kl/{name}"] = masked_mean(batch.logp_old - batch.logp_ref, mask)
        return metrics

    def should_refresh(self, rollouts: int) -> bool:
        """Check whether the reference is replaced after this many rollouts."""
        return self.refresh_every is not None and rollouts % self.refresh_every == 0

    def init_state(self) -> State | None:
        return {"best": None, "stalled": 0} if self.refresh_after_stall else None

    def update_state(self, state: State, batch: Batch, metrics: Mapping[str, Metric]) -> State:
        """Restart the count after a refresh (`reference/refreshed`) and after a better score (`eval/reward`). The score of the
        policy that just became the reference does not count."""
        refreshed, score, best = "reference/refreshed" in metrics, metrics.get("eval/reward"), state["best"]
        if score is not None and (best is None or score.value > best):
            return {"best": score.value, "stalled": 0}
        return {"best": best, "stalled": 0 if refreshed else state["stalled"] + (score is not None)}

    def with_state(self, state: State) -> StalledReference:
        settings = {f.name: getattr(self, f.name) for f in fields(Reference)}
        return StalledReference(**settings, configured=self, stalled_evaluations=state["stalled"])


PROMPT, SUCCESS, FEEDBACK = "prompt", "success", "feedback"  # placeholders that are no columns
_PLACEHOLDER = re.compile(r"\{([A-Za-z_]\w*)\}")


def template_names(template: str) -> tuple[str, ...]:
    """Return the names of a template's placeholders, in order; other braces are plain text."""
    return tuple(_PLACEHOLDER.findall(template))


def fill_template(template: str, values: Mapping[str, str]) -> str | None:
    """Return the template with its placeholders replaced, once; None if a value is missing."""
    if any(name not in values for name in template_names(template)):
        return None
    return _PLACEHOLDER.sub(lambda match: values[match[1]], template)


@dataclass(frozen=True)
class StalledReference(Reference):
    """A `Reference` under a state."""

    configured: Reference | None = None
    stalled_evaluations: int = 0

    def should_refresh(self, rollouts: int) -> bool:
        stalled = self.refresh_after_stall is not None and self.stalled_evaluations >= self.refresh_after_stall
        return stalled or (self.configured is not None and self.configured.should_refresh(rollouts))


def is_server(model: str) -> bool:
    """Return whether a model is named by the address of a server."""
    return model.startswith(("http://", "https://"))


def check_teachers(reference: Reference) -> None:
    """Raise ConfigError for teachers that are not NAME=MODEL each, have one name, or stand beside another reference."""
    if reference.model is not None:
        raise ConfigError(
            f"Reference.model={reference.model!r} and Reference.teachers both name what the policy is compared with: set one of "
            "them"
        )
    if reference.refresh_every or reference.refresh_after_stall:
        raise ConfigError(
            "Reference.teachers are frozen, but refresh_every and refresh_after_stall replace the reference by the policy: unset "
            "either teachers or those two"
        )
    for teacher in reference.teachers:
        name, _, model = teacher.partition("=")
        if not (name.replace("-", "_").isidentifier() and model):
            raise ConfigError(
                f"Reference.teachers must be NAME=MODEL each, such as math=runs/math, not {teacher!r}: give it a name, or set "
                "Reference.model"
            )
    if len(reference.models) < len(reference.teachers):
        raise ConfigError("Reference.teachers has a name twice, and examples choose by name: give each its name")


def find_missing_models(algorithm: Algorithm) -> Iterator[str]:
    """Yield the models that parts read and an algorithm lacks."""
    needs = algorithm.all_needs
    if algorithm.critic is None and "values" in needs:
        yield "an advantage needs values, and critic is None: set critic=Critic(), or use a group baseline such as LeaveOneOut()"
    if algorithm.reference is None and "logp_ref" in needs:
        yield "a part needs a reference, and reference is None: set reference=Reference(), or remove the KL from terms and shaping"
    if algorithm.reward_model is None and "implicit_reward" in needs:
        yield "ImplicitProcess() needs a reward model: set reward_model=ImplicitReward(), or remove it"
