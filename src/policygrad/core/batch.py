"""The data of the equation: a batch of completions, and the output of one forward pass over it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from policygrad.core import masked
from policygrad.core.media import TextMedia, shift_media
from policygrad.core.precision import move
from policygrad.errors import ConfigError

_SHAPES = {
    "[B, T]": "mask tokens positions logp_old logp_ref logp_sampler logp_learner values returns token_reward step_end "
    "implicit_reward weight version entropy sum_pi_squared turn_state selected observation sampling_mask_counts "
    "reference_spans",
    "[B]": "group reward outcome bootstrap truncated in_statistics grad_logp_sq_norm example_id level levels baseline "
    "demonstration role peers teacher has_reference",
}
PER_TOKEN, PER_COMPLETION = (tuple(names.split()) for names in _SHAPES.values())
_DTYPES = (
    (
        "step_end selected observation truncated in_statistics demonstration has_reference",
        torch.bool,
        "bool() converts 0/1",
    ),
    (
        "positions version turn_state example_id level levels role peers teacher reference_spans",
        torch.int64,
        "long() converts it",
    ),
)


@dataclass(frozen=True, eq=False)
class SamplingMask:
    """The tokens that top-k and top-p left to sample from, for each of n tokens. The others had probability 0.

    A policy is compared with the one that sampled under the same mask: its distribution over the tokens that were left, made to
    sum to 1. Source: DeepSeek-AI 2025 (DeepSeek-V3.2), arXiv:2512.02556, "keep sampling mask".
    """

    ids: Tensor
    """[m] int32; the tokens left for the first token, for the second, and so on."""
    counts: Tensor
    """[n] int32; how many they are. 0 = the whole vocabulary."""

    @classmethod
    def of(cls, left: Tensor) -> SamplingMask:
        """Return the mask of n tokens from left [n, V] bool, True for the tokens that may be sampled."""
        return cls(left.nonzero()[:, 1].to(torch.int32), left.sum(1, dtype=torch.int32))

    @classmethod
    def concat(cls, parts: Sequence[SamplingMask]) -> SamplingMask:
        """Join the masks of consecutive tokens."""
        return cls(torch.cat([part.ids for part in parts]), torch.cat([part.counts for part in parts]))

    def select(self, tokens: Tensor) -> SamplingMask:
        """Return the mask of some of the tokens: [n] bool."""
        return SamplingMask(self.ids[tokens.repeat_interleave(self.counts)], self.counts[tokens])

    def apply_(self, logits: Tensor, start: int = 0) -> Tensor:
        """Set logits [k, V] to −∞ in place, except those of the tokens left; row 0 belongs to token `start`."""
        counts = self.counts[start : start + len(logits)]
        first = int(self.counts[:start].sum())
        ids = self.ids[first : first + int(counts.sum())]
        rows = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
        left = (counts == 0)[:, None].expand(logits.shape).clone()
        left[rows, ids.long()] = True
        return logits.masked_fill_(~left, -torch.inf)


@dataclass(frozen=True, eq=False)
class TopTokens:
    """The k likeliest tokens of π_ref before each of n tokens, as a server tells them (`ExactKLToReference.top_k`)."""

    ids: Tensor
    """[n, k] int32."""
    logp: Tensor
    """[n, k] float32 nats."""

    def select(self, tokens: Tensor) -> TopTokens:
        """Return those before some of the tokens: [n] bool."""
        return TopTokens(self.ids[tokens], self.logp[tokens])


class _Tensors:
    """Base of records of tensors, most of them optional."""

    _source: ClassVar[str]  # where a missing tensor comes from, for the message

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that are set, by field."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def require(self, name: str, part: object) -> Tensor:
        """Return the tensor in a field, or raise ConfigError naming the part that needs it."""
        value: Tensor | None = getattr(self, name)
        if value is None:
            raise ConfigError(
                f"{type(part).__name__} needs {type(self).__name__}.{name}, which is None: {self._source}, or remove the part"
            )
        return value


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch(_Tensors):
    """Completions of a rollout, or one update's share of them; right-padded.

    Shapes: B completions, T token positions. A position counts where `mask` is True; values elsewhere, NaN included, are never
    read. A completion whose mask is all False (it failed, or was masked as overlong) leaves the group statistics and every
    denominator.

    Raises:
        ConfigError: a field with a wrong shape or dtype; the message names it.
    """

    mask: Tensor
    """[B, T] bool; True for tokens that the policy sampled (False for tool output and padding)."""
    group: Tensor
    """[B] int64; the prompt that a completion answers (an index into `prompts`)."""
    reward: Tensor
    """[B] floating; terminal reward of the completion (float64 stays float64)."""
    outcome: Tensor | None = None
    """[B] the task's reward of the whole completion, before any shaping, with the rewards of its turns: what thresholds read.
    None: `reward` plus the token rewards."""
    tokens: Tensor | None = None
    """[B, T] int64; token ids of the completion."""
    prompts: tuple[Tensor, ...] | None = None
    """One row of token ids per group. A learner needs these and `tokens`."""
    positions: Tensor | None = None
    """[B, T] int64; position of each token in the text it was read in, prompt included. None: each row continues its prompt.
    Where the position decreases, a chat template rewrote the conversation: the token follows the last earlier token whose
    position is one less, and the tokens in between are not visible to it. The row still counts as one completion."""
    logp_old: Tensor | None = None
    """[B, T] nats, log π_old; None means π_old is the policy itself, so every ratio is 1."""
    logp_ref: Tensor | None = None
    """[B, T] nats, log π_ref."""
    logp_sampler: Tensor | None = None
    """[B, T] nats, log μ, as reported by the engine that sampled."""
    logp_learner: Tensor | None = None
    """[B, T] nats, log π under the weights and the arithmetic that `sum_pi_squared` is of. None: `logp_old` is it. With
    old_policy='sampler' `logp_old` is μ's."""
    values: Tensor | None = None
    """[B, T] the critic's value before each token."""
    returns: Tensor | None = None
    """[B, T] targets of the critic."""
    bootstrap: Tensor | None = None
    """[B] value after the last token of a truncated episode."""
    token_reward: Tensor | None = None
    """[B, T] per-token rewards; a completion's total is `reward` plus their sum."""
    step_end: Tensor | None = None
    """[B, T] bool; the tokens that carry process rewards."""
    implicit_reward: Tensor | None = None
    """[B, T] nats·β; r_φ(o_t) = β·log(π_φ/π_ref) of a reward model trained beside the policy."""
    weight: Tensor | None = None
    """[B, T] factor on the aggregation coefficients: γ^t, reweighting."""
    version: Tensor | None = None
    """[B, T] int64; version of the weights that sampled each token; None: the current ones."""
    truncated: Tensor | None = None
    """[B] bool; ended by the token budget, not by the policy."""
    in_statistics: Tensor | None = None
    """[B] bool; counts in group statistics. None: the completions whose mask has a True."""
    grad_logp_sq_norm: Tensor | None = None
    """[B] ‖∇_θ log π_θ(o)‖²; 0 where the mask is all False."""
    entropy: Tensor | None = None
    """[B, T] nats; entropy of π_old before each token, exact over the vocabulary."""
    sum_pi_squared: Tensor | None = None
    """[B, T] Σ_a π_old(a)² before each token, exact over the vocabulary: the probability that two samples are equal."""
    selected: Tensor | None = None
    """[B, T] bool; tokens that a part chose among all of an update (`Part.select_tokens`)."""
    observation: Tensor | None = None
    """[B, T] bool; tokens between sampled ones that a tool or the environment wrote, without the chat template's own. Parts with
    `observation` in `needs` learn to predict them; no other part reads anything there."""
    turn_state: Tensor | None = None
    """[B, T] int64; id of the state in which the token's turn began. Equal ids within a group mean the same state."""
    example_id: Tensor | None = None
    """[B] int64; index of the task's example that the completion answers, the same in every epoch."""
    level: Tensor | None = None
    """[B] int64; difficulty of the prompt, counted from 0 (`Filter.task_level`)."""
    levels: Tensor | None = None
    """[B] int64; number of the task's levels."""
    teacher: Tensor | None = None
    """[B] int64; which of `Reference.teachers` scores the completion, counted from 0."""
    baseline: Tensor | None = None
    """[B] reward of the greedy completion of the same prompt."""
    demonstration: Tensor | None = None
    """[B] bool; True for completions that the policy did not sample in this run. Their `logp_sampler` is the author's
    log-probability, or 0 if unknown. None: all are samples of the policy."""
    role: Tensor | None = None
    """[B] int64; the role that the policy played in a game of several players, an index into `role_names`."""
    role_names: tuple[str, ...] = ()
    """Names of the roles, with `role`."""
    peers: Tensor | None = None
    """[B] int64; the completions of a group that can be compared with each other have equal numbers, such as those of one role."""
    has_reference: Tensor | None = None
    """[B] bool; completions that π_ref has read, whose `logp_ref` counts (`Reference.templates`). None: all."""
    top_ids_ref: Tensor | None = None
    """[B, T, k] int32; `TopTokens.ids` before each token, of a π_ref behind a server. None: a learner evaluates π_ref."""
    top_logp_ref: Tensor | None = None
    """[B, T, k] nats; `TopTokens.logp`, with `top_ids_ref`."""
    reference_prompts: tuple[Tensor, ...] = ()
    """Token ids of the prompt after which π_ref reads each completion; () = the policy's own prompt."""
    reference_tokens: tuple[Tensor, ...] = ()
    """[U] int64; token ids of each completion's text in the tokens of π_ref (`Reference.tokenizer`); () = the policy's are its own.
    π_ref and the policy are then compared over spans of text, and `logp_ref` of a span stands at its last token."""
    reference_places: tuple[Tensor, ...] = ()
    """[U] int64; where in the completion the span of each of the `reference_tokens` ends; -1 = it is in no span."""
    reference_spans: Tensor | None = None
    """[B, T] int64; the last token of each token's span, by its place in the completion; -1 = it is in no span. None: every token
    is one."""
    routed_experts: Tensor | None = None
    """[B, T, layers, k] integers; experts that a mixture-of-experts sampler routed each token to, -1 where not recorded."""
    prompt_routed_experts: tuple[Tensor, ...] = ()
    """[P, layers, k] for each group's prompt, with `routed_experts`."""
    sampling_mask_counts: Tensor | None = None
    """[B, T] int32; `SamplingMask.counts` of each token; 0 where nothing was sampled. None = every token was possible."""
    sampling_mask_ids: tuple[Tensor, ...] = ()
    """`SamplingMask.ids` of each completion, with `sampling_mask_counts`."""
    prompt_media: tuple[TextMedia, ...] = ()
    """The pictures of each group's prompt; () = no prompt has any."""
    completion_media: tuple[TextMedia, ...] = ()
    """The pictures of each completion, at positions in `tokens`: what tools and the environment showed. () = none has any."""
    rewards: Tensor | None = None
    """[B, K] unweighted result of each reward function; `reward` is their weighted sum."""
    reward_names: tuple[str, ...] = ()
    """K names of `rewards`."""
    reward_weights: tuple[float, ...] = ()
    """K weights of `rewards`."""
    _source = "fill it (a learner's `evaluate` does)"

    def __post_init__(self) -> None:
        if self.mask.ndim != 2 or self.mask.dtype != torch.bool:
            raise ConfigError(
                f"Batch.mask must be a bool tensor [B, T], not {self.mask.dtype} {list(self.mask.shape)}: "
                "True where the policy sampled the token (mask.bool() converts 0/1)"
            )
        for letters, names in _SHAPES.items():
            shape = self.mask.shape if letters == "[B, T]" else self.mask.shape[:1]
            for name in names.split():
                value = getattr(self, name)
                if value is not None and value.shape != shape:
                    raise ConfigError(
                        f"Batch.{name} has shape {list(value.shape)}, expected {letters} = {list(shape)} as in Batch.mask"
                    )
        for names, dtype, hint in _DTYPES:
            for name in names.split():
                value = getattr(self, name)
                if value is not None and value.dtype != dtype:
                    dtype_name = str(dtype).removeprefix("torch.")
                    raise ConfigError(f"Batch.{name} must be {dtype_name}, not {value.dtype}: {name}.{hint}")
        if not self.reward.is_floating_point():
            raise ConfigError(f"Batch.reward must be floating, not {self.reward.dtype}: reward.float() converts it")
        if self.group.is_floating_point() or self.group.dtype == torch.bool:
            raise ConfigError(f"Batch.group must hold integers (prompt indices), not {self.group.dtype}")
        if self.routed_experts is not None and self.routed_experts.shape[:2] != self.mask.shape:
            raise ConfigError(
                f"Batch.routed_experts has shape {list(self.routed_experts.shape)}, expected [B, T, layers, k] with "
                f"[B, T] = {list(self.mask.shape)}"
            )
        if self.top_ids_ref is not None or self.top_logp_ref is not None:
            shapes = [None if x is None else x.shape for x in (self.top_ids_ref, self.top_logp_ref)]
            if shapes[0] != shapes[1] or shapes[0] is None or shapes[0][:2] != self.mask.shape:
                raise ConfigError(
                    f"Batch.top_ids_ref and top_logp_ref have shapes {[None if x is None else list(x) for x in shapes]}, expected "
                    f"[B, T, k] of both with [B, T] = {list(self.mask.shape)}"
                )
        if self.sampling_mask_counts is not None and len(self.sampling_mask_ids) != len(self.mask):
            raise ConfigError(
                f"Batch.sampling_mask_ids has {len(self.sampling_mask_ids)} entries, expected one for each of the "
                f"{len(self.mask)} completions"
            )
        if self.role is not None and len(self.role) and int(self.role.max()) >= len(self.role_names):
            raise ConfigError(
                f"Batch.role has the number {int(self.role.max())}, and Batch.role_names has {len(self.role_names)} names: name "
                "every role"
            )
        if self.reference_prompts and len(self.reference_prompts) != len(self.mask):
            raise ConfigError(
                f"Batch.reference_prompts has {len(self.reference_prompts)} entries, expected one for each of the "
                f"{len(self.mask)} completions"
            )
        if any(len(x) != len(self.reference_prompts) for x in (self.reference_tokens, self.reference_places) if x):
            raise ConfigError(
                "Batch.reference_tokens and reference_places need one entry for each completion, as in reference_prompts: fill all "
                "three"
            )
        if self.rewards is not None:
            num_names, num_weights = len(self.reward_names), len(self.reward_weights)
            if self.rewards.shape != (len(self.mask), num_names) or num_weights != num_names:
                raise ConfigError(
                    f"Batch.rewards has shape {list(self.rewards.shape)}, expected [B, K] with B = {len(self.mask)} and K the "
                    f"number of reward_names ({num_names}) and of reward_weights ({num_weights})"
                )

    @property
    def counted(self) -> Tensor:
        """Completions that count in group statistics, [B] bool."""
        return self.mask.any(1) if self.in_statistics is None else self.in_statistics

    @property
    def outcomes(self) -> Tensor:
        """`outcome`, or what it is where it is None, [B]."""
        if self.outcome is not None:
            return self.outcome
        if self.token_reward is None:
            return self.reward
        return self.reward + torch.where(self.mask, self.token_reward, 0).sum(1)

    @property
    def policy_tokens(self) -> Tensor:
        """Tokens sampled by the policy, [B, T] bool: the mask without demonstrations."""
        return self.mask if self.demonstration is None else self.mask & ~self.demonstration[:, None]

    @property
    def compared_tokens(self) -> Tensor:
        """Tokens sampled by the policy that π_ref has read, [B, T] bool."""
        tokens = self.policy_tokens
        return tokens if self.has_reference is None else tokens & self.has_reference[:, None]

    @property
    def observed_tokens(self) -> Tensor:
        """Tokens that the environment wrote in completions with a sampled token, [B, T] bool; none where `observation` is None."""
        if self.observation is None:
            return torch.zeros_like(self.mask)
        return self.observation & ~self.mask & self.mask.any(1, keepdim=True)

    @property
    def lengths(self) -> Tensor:
        """Sampled tokens per completion, [B] int64."""
        return self.mask.sum(1)

    def select(self, rows: Tensor) -> Batch:
        """Return the completions at `rows` (indices or a bool mask [B]), with all `prompts`, since `group` indexes them."""
        chosen: dict[str, Any] = {name: value[rows] for name, value in self.tensors().items()}
        for name in (
            "sampling_mask_ids",
            "completion_media",
            "reference_prompts",
            "reference_tokens",
            "reference_places",
        ):
            if values := getattr(self, name):
                chosen[name] = tuple(values[i] for i in torch.arange(len(self.mask))[rows].tolist())
        return replace(self, **chosen)

    def without_texts(self) -> Batch:
        """Return a copy without what only a model reads: token ids, pictures, experts, sampling masks."""
        texts: dict[str, Any] = dict.fromkeys(
            ("prompts", "tokens", "routed_experts", "sampling_mask_counts", "top_ids_ref", "top_logp_ref")
        )
        for name in (
            "prompt_media",
            "completion_media",
            "prompt_routed_experts",
            "sampling_mask_ids",
            "reference_prompts",
            "reference_tokens",
            "reference_places",
        ):
            texts[name] = ()
        return replace(self, **texts)

    def as_reference_reads(self) -> Batch:
        """Return the completions after the prompts that π_ref reads, each a group of its own."""
        if not self.reference_prompts:
            return self
        if self.positions is not None:
            raise ConfigError(
                "Batch.positions counts tokens after the policy's prompt, and π_ref reads another (Batch.reference_prompts): a "
                "conversation that was rewritten on the way has no such text; set Reference.templates=()"
            )
        if self.reference_tokens:
            tokens, places = _pad(self.reference_tokens, 0), _pad(self.reference_places, -1)
            mask = (places >= 0) & self.mask.any(1, keepdim=True)
            return Batch(
                mask=mask,
                group=torch.arange(len(mask)),
                reward=self.reward,
                tokens=tokens,
                prompts=self.reference_prompts,
            )
        return replace(
            self,
            prompts=self.reference_prompts,
            group=torch.arange(len(self.mask)),
            reference_prompts=(),
            routed_experts=None,
            prompt_routed_experts=(),
        )

    def fold_reference(self, logp: Tensor) -> Tensor:
        """Return what π_ref says of `as_reference_reads` [B, U] as `logp_ref` [B, T]: where its tokens are its own, a span's sum
        stands at the span's last token."""
        if not self.reference_tokens:
            return logp
        places = _pad(self.reference_places, -1)
        folded = torch.zeros(self.mask.shape, dtype=logp.dtype)
        return folded.scatter_add(1, places.clamp(min=0), masked.apply_mask(logp, places >= 0))

    def compare_with_reference(self, logp: Tensor, part: object) -> tuple[Tensor, Tensor]:
        """Return log(π_ref/π) [B, T] for log π [B, T], and the tokens [B, T] bool that π_ref has read; 0 where it has not. Where
        spans are compared, the ratio of a span stands at its last token.

        part: What compares them, for the message if `logp_ref` is None.
        """
        read = self.mask if self.has_reference is None else self.mask & self.has_reference[:, None]
        if self.reference_spans is not None:
            read = read & (self.reference_spans >= 0)
        ratio = masked.apply_mask(self.require("logp_ref", part), read) - masked.apply_mask(logp, read)
        return (ratio if self.reference_spans is None else masked.sum_spans(ratio, self.reference_spans)), read

    @property
    def has_media(self) -> bool:
        """True if a text has a picture."""
        return bool(self.prompt_media or self.completion_media)

    def media_of(self, row: int) -> TextMedia:
        """Return the pictures of a completion's prompt and of the completion, at positions in both together."""
        group = int(self.group[row])
        prompt = self.prompt_media[group] if self.prompt_media else ()
        if not self.completion_media or self.prompts is None:
            return prompt
        return (*prompt, *shift_media(self.completion_media[row], len(self.prompts[group])))

    def sampling_mask(self, rows: Tensor) -> SamplingMask | None:
        """Return the mask of the sampled tokens of the completions `rows` (indices), in their order; None if there is none."""
        if self.sampling_mask_counts is None:
            return None
        ids = torch.cat([self.sampling_mask_ids[i] for i in rows.tolist()])
        return SamplingMask(ids, self.sampling_mask_counts[rows].flatten()).select(self.mask[rows].flatten())

    def top_tokens(self, rows: Tensor) -> TopTokens | None:
        """Return π_ref's likeliest tokens before the sampled tokens of the completions `rows` (indices), in their order; None if
        no server has told them."""
        if self.top_ids_ref is None or self.top_logp_ref is None:
            return None
        mask = self.mask[rows]
        return TopTokens(self.top_ids_ref[rows][mask], self.top_logp_ref[rows][mask])

    def to(self, device: torch.device | str) -> Batch:
        """Return a copy on another device."""
        prompts = None if self.prompts is None else tuple(row.to(device) for row in self.prompts)
        moved: dict[str, Any] = {name: move(value, device) for name, value in self.tensors().items()}
        for name in ("reference_prompts", "reference_tokens", "reference_places"):
            moved[name] = tuple(row.to(device) for row in getattr(self, name))
        return replace(self, prompts=prompts, **moved)


def _pad(rows: Sequence[Tensor], value: int) -> Tensor:
    """Return rows of different lengths as one tensor, at least one wide, filled up with `value`."""
    longest = max(1, *map(len, rows))
    return torch.stack([torch.nn.functional.pad(row, (0, longest - len(row)), value=value) for row in rows])


@dataclass(frozen=True, eq=False)
class Forward(_Tensors):
    """Output of one forward pass, for the objective. A plain `logp` tensor is accepted in its place."""

    logp: Tensor
    """[B, T] nats, log π_θ of the batch's sampled tokens, with graph, and of its observed ones if a term needs `observation`."""
    entropy: Tensor | None = None
    """[B, T] nats, exact over the vocabulary; only if a term needs it."""
    sum_pi_squared: Tensor | None = None
    """[B, T] Σ_a π_θ(a)² over the vocabulary, without graph."""
    values: Tensor | None = None
    """[B, T] the critic's values, with graph."""
    kl_old: Tensor | None = None
    """[B, T] nats, exact KL(π_old‖π_θ) over the vocabulary."""
    kl_ref: Tensor | None = None
    """[B, T] nats, exact divergence from π_ref over the vocabulary (`ExactKLToReference.alpha`), with graph."""

    _source = "give `surrogate` a Forward that has it, with graph"


Coefficients = tuple[Tensor, ...]  # c [B, T] of the policy term, then of each other term
