"""Prompts with more in them than the policy's, after which π_ref reads the same completions (`Reference.templates`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from policygrad.core.auxiliary import FEEDBACK, PROMPT, SUCCESS, Reference, fill_template, template_names
from policygrad.core.batch import Batch
from policygrad.core.metrics import Metrics, Sum, list_means
from policygrad.errors import ConfigError, DataError
from policygrad.models.tokenizer import Tokenizer
from policygrad.rollout.demonstrations import DEMONSTRATION_COLUMN, parse_demonstration
from policygrad.rollout.providers import Collected, FieldProvider, ProviderContext, Stage
from policygrad.rollout.scoring import ScoringResult
from policygrad.rollout.trajectory import EpisodeGroup, Trajectory
from policygrad.tasks.base import Example, Prompt
from policygrad.utils.message_parts import content_text, list_pictures


@dataclass(frozen=True)
class ReferencePrompts(FieldProvider):
    """Fills `reference_prompts` and `has_reference`."""

    part: Reference
    stage: ClassVar[Stage] = Stage.READINGS
    single_answers: ClassVar[tuple[str, str]] = (
        "Reference.templates replaces the prompt of a complete answer",
        "a reference with templates=()",
    )

    def provide(self, collected: Collected, context: ProviderContext) -> Collected:
        batch, metrics = add_reference_prompts(collected.batch, collected.groups, self.part, context.tokenizer)
        return collected.with_result(batch, ScoringResult(metrics))


def add_reference_prompts(
    batch: Batch, groups: Sequence[EpisodeGroup], reference: Reference, encoder: Tokenizer
) -> tuple[Batch, Metrics]:
    """Fill `reference_prompts` and `has_reference`, for single-turn completions.

    A completion uses the first template whose placeholders all have a value and whose text leaves it room in the context. The
    metrics are reference/prompted, the share of completions that have one, reference/prompt_length in tokens, and
    reference/too_long, the number of completions for which a text was too long.

    Raises:
        DataError: No example of the step has what any template needs; a column that is no text.
        ConfigError: A prompt with pictures.
    """
    prompts, sampled, num_long = list[Tensor | None](), list[bool](), 0
    for group in groups:
        writer = _PromptWriter(group, reference, encoder)
        for trajectory in group.trajectories:
            ids, is_too_long = (None, False) if trajectory.demonstration else writer.write(trajectory)
            prompts.append(ids)
            sampled.append(not trajectory.demonstration)
            num_long += is_too_long
    if not reference.reads_reward and all(ids is None for ids in prompts) and not num_long:
        check_template_columns([group.spec.example for group in groups], reference)
    policy_prompts = [group.prompt_ids for group in groups for _ in group.trajectories]
    filled = replace(
        batch,
        reference_prompts=tuple(
            given if ids is None else ids for ids, given in zip(prompts, policy_prompts, strict=True)
        ),
        has_reference=torch.tensor([ids is not None for ids in prompts], dtype=torch.bool),
    )
    metrics = list_means(
        {
            "reference/prompted": [ids is not None for ids, is_ours in zip(prompts, sampled, strict=True) if is_ours],
            "reference/prompt_length": [len(ids) for ids in prompts if ids is not None],
        }
    )
    return filled, metrics | ({"reference/too_long": Sum(float(num_long))} if num_long else {})


def check_template_columns(examples: Sequence[Example], reference: Reference) -> None:
    """Raise DataError if no example has the columns of any template, so that π_ref could not read a single completion."""
    if not reference.templates or any(_has_columns(x, template) for x in examples for template in reference.templates):
        return
    names = dict.fromkeys(name for template in reference.templates for name in _column_names(template))
    columns = " or ".join(f"{name!r}" for name in names)
    example = next(iter(examples))
    raise DataError(
        f"{example.source or 'the task'} and the other examples have no column {columns}, and π_ref reads one of them "
        "(Reference.templates): add one to the data, or name another column in --algorithm.reference.templates; there are "
        f"{', '.join(sorted(example.columns)) or 'none'}"
    )


def _column_names(template: str) -> Iterator[str]:
    return (name for name in template_names(template) if name not in (PROMPT, SUCCESS, FEEDBACK))


def _has_columns(example: Example, template: str) -> bool:
    return all(example.columns.get(name) is not None for name in _column_names(template))


@dataclass(frozen=True, eq=False)
class _PromptWriter:
    """Writes what π_ref reads before the completions of one group."""

    group: EpisodeGroup
    reference: Reference
    encoder: Tokenizer

    def write(self, trajectory: Trajectory) -> tuple[Tensor | None, bool]:
        """Return the prompt's token ids [P] int64, None without a template that applies; and True if a text was too long."""
        values, is_too_long = self._values(trajectory), False
        limit = self.encoder.context_length
        for template in self.reference.templates:
            text = fill_template(template, values)
            if text is None:
                continue
            ids = self._encode(text)
            if limit is None or len(ids) + len(trajectory.tokens) <= limit:
                return ids, is_too_long
            is_too_long = True
        return None, is_too_long

    def _encode(self, text: str) -> Tensor:
        spec = self.group.spec
        prompt = replace_prompt_text(spec.example.prompt, text, spec.location)
        return replace(self.encoder, context_length=None).encode(prompt, 0, spec.location, spec.example.tools).ids

    def _values(self, trajectory: Trajectory) -> Mapping[str, str]:
        spec = self.group.spec
        values = {PROMPT: read_prompt_text(spec.example.prompt)}
        for name in {name for template in self.reference.templates for name in _column_names(template)}:
            if (value := self._column(name)) is not None:
                values[name] = value
        if trajectory.feedback and trajectory.reward is not None and trajectory.reward < self.reference.success_reward:
            values[FEEDBACK] = trajectory.feedback
        for other in self.group.trajectories:
            if other is trajectory or other.demonstration or other.reward is None:
                continue
            if other.reward >= self.reference.success_reward:
                values[SUCCESS] = other.text
                break
        return values

    def _column(self, name: str) -> str | None:
        spec = self.group.spec
        where, value = f"{spec.location}: column {name!r}", spec.example.columns.get(name)
        if name == DEMONSTRATION_COLUMN and not isinstance(value, str):
            shown = parse_demonstration(spec.example, where)
            if shown is None:
                return None
            return shown.text if shown.text is not None else self.encoder.decode(torch.tensor(shown.tokens))
        if isinstance(value, (list, tuple)) and value:  # several accepted answers
            value = value[0]
        return None if value is None else _as_text(value, where)


def _as_text(value: Any, where: str) -> str:
    if isinstance(value, (str, int, float)):
        return str(value)
    raise DataError(
        f"{where} is read by Reference.templates and must hold text or a number, got {type(value).__name__}"
    )


def read_prompt_text(prompt: Prompt) -> str:
    """Return what {prompt} stands for: the text, or the last user message's."""
    return (
        prompt if isinstance(prompt, str) else content_text(prompt[_last_user_message(prompt, "a prompt")]["content"])
    )


def replace_prompt_text(prompt: Prompt, text: str, source: str) -> Prompt:
    """Return a prompt with another text in place of its own, or of its last user message's.

    Raises:
        DataError: Messages without one of the user.
        ConfigError: Messages with pictures.
    """
    if isinstance(prompt, str):
        return text
    if any(list_pictures(prompt)):
        raise ConfigError(
            f"{source} has pictures, and Reference.templates replaces text alone: set templates=(), or use a task without pictures"
        )
    at = _last_user_message(prompt, source)
    return (*prompt[:at], {**prompt[at], "content": text}, *prompt[at + 1 :])


def _last_user_message(messages: Sequence[Mapping[str, Any]], source: str) -> int:
    at = next((i for i in reversed(range(len(messages))) if messages[i]["role"] == "user"), None)
    if at is None:
        raise DataError(f"{source} has no message of the user, which Reference.templates replaces: add one")
    return at
