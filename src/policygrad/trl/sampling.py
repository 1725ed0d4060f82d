"""Completions for the rows of a generation: single answers, conversations with tools, and what a `rollout_func` samples."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from policygrad.core.batch import Batch
from policygrad.environments.tools import Tool
from policygrad.models.tokenizer import Tokenizer
from policygrad.rollout.batching import batch_groups
from policygrad.rollout.environment import Action, Environment, Observation, SingleTurn, Step
from policygrad.rollout.episodes import run_episodes
from policygrad.rollout.trajectory import TRAIN, EpisodeGroup, EpisodeSpec, Segment, Trajectory
from policygrad.samplers.base import Sampler, SamplingParams
from policygrad.tasks.base import Example
from policygrad.trl.data import Row, add_images, is_conversation
from policygrad.trl.environments import Environments
from policygrad.trl.generate import GenerateSampler
from policygrad.utils.pictures import to_parts


@dataclass(frozen=True, eq=False)
class SampledRows:
    """The completions of a generation's rows, in their order."""

    rows: list[Row]
    """With the fields that `rollout_func` added."""
    prompts: list[Any]
    completions: list[Any]
    """Texts, or for prompts of messages the messages of the episode."""
    completion_ids: list[list[int]]
    """All tokens after the prompt, those of tools included."""
    prompt_lengths: list[int]
    batch: Batch
    """Without rewards. `group` says which rows share a prompt's tokens, not which are compared."""
    num_calls: int = 0
    num_failed_calls: int = 0
    images: list[Any] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class RowSampler:
    """Samples completions of rows.

    Args:
        run_async: Runs a coroutine to its end.
        tools: Functions that every conversation may call.
        max_turns: Turns that may call tools; None = any number.
    """

    tokenizer: Tokenizer
    sampling: SamplingParams
    run_async: Callable[..., Any]
    tools: Sequence[Callable[..., Any]] = ()
    environments: Environments | None = None
    max_turns: int | None = None

    def sample(self, rows: list[Row], samples: int, sampler: Sampler, key: tuple[int, int, int]) -> SampledRows:
        """Sample a completion for each row; `samples` rows in a row are the same.

        Args:
            key: (seed, stream, number of the generation), for the random numbers.
        """
        prompts, images = self._open(rows)
        conversations = list[ToolConversation]()
        uses_tools = bool(self.tools or self.environments)
        # the completions of a prompt are sampled from one reading of it, unless environments begin otherwise in each
        shared = len(rows) % samples == 0 and all(prompts[i] == prompts[i - i % samples] for i in range(len(rows)))

        def begin(example: Example) -> Environment:
            if not uses_tools:
                return SingleTurn(example)
            row = len(conversations)
            functions = [*self.tools, *(self.environments.methods(row) if self.environments else ())]
            conversations.append(ToolConversation(example, functions, self.max_turns))
            return conversations[-1]

        begin.capabilities = SingleTurn.capabilities if not uses_tools else ToolConversation.capabilities  # type: ignore[attr-defined]
        per_spec = samples if shared else 1
        specs = [
            EpisodeSpec(self._example(prompts[i]), (*key, i // per_spec), self.sampling.max_tokens)
            for i in range(0, len(rows), per_spec)
        ]
        # `generate` is told of top-k and top-p by itself, and reports no masks
        sampling = replace(self.sampling, top_p=1.0, top_k=0) if isinstance(sampler, GenerateSampler) else self.sampling
        groups = self.run_async(
            run_episodes(specs, per_spec, sampling, sampler=sampler, encoder=self.tokenizer, environment=begin)
        )
        sampled = self._collect(rows, prompts, groups)
        if uses_tools:
            calls = sum(conversation.num_calls for conversation in conversations)
            failed = sum(conversation.num_failed for conversation in conversations)
            completions: list[Any] = [conversation.messages for conversation in conversations]
            return replace(sampled, completions=completions, num_calls=calls, num_failed_calls=failed, images=images)
        return replace(sampled, images=images)

    def _open(self, rows: Sequence[Row]) -> tuple[list[Any], list[Any]]:
        """Return the rows' prompts, with their pictures and what environments say first, and the pictures."""
        empty = [{"role": "user", "content": ""}]
        prompts: list[Any] = [row.get("prompt", empty) if self.environments else row["prompt"] for row in rows]
        if self.environments:
            prompts = self.environments.reset(rows, prompts)
        images = [row.get("images") or ([row["image"]] if row.get("image") is not None else []) for row in rows]
        if not any(images):
            return prompts, []
        if not is_conversation(prompts[0]):
            raise ValueError(
                "Multimodal training requires conversational prompts: give `prompt` as messages, and leave the chat template to "
                "the trainer"
            )
        return [add_images(prompt, list(each)) for prompt, each in zip(prompts, images, strict=True)], images

    def _example(self, prompt: Any) -> Example:
        if not is_conversation(prompt):
            return Example(prompt)
        return Example(tuple(_with_pictures(message) for message in prompt))

    def _collect(self, rows: list[Row], prompts: list[Any], groups: Sequence[EpisodeGroup]) -> SampledRows:
        episodes = [(group, t) for group in groups for t in group.trajectories]
        ids = [t.tokens.tolist() for _, t in episodes]
        hf = self.tokenizer.hf
        texts: list[Any] = hf.batch_decode(ids, skip_special_tokens=True)
        if is_conversation(prompts[0]):
            texts = [[{"role": "assistant", "content": text}] for text in texts]
        scored = [replace(group, trajectories=tuple(map(_prepare, group.trajectories))) for group in groups]
        lengths = [len(group.prompt_ids) for group, _ in episodes]
        return SampledRows(rows, prompts, texts, ids, lengths, batch_groups(scored))

    def from_rollout(self, rows: list[Row], output: Mapping[str, Any]) -> SampledRows:
        """Return what a `rollout_func` has sampled: ids of prompts and completions, and their log-probabilities.

        Raises:
            ValueError: A field is missing.
        """
        required = {"prompt_ids", "completion_ids", "logprobs"}
        if missing := sorted(required - output.keys()):
            raise ValueError(f"rollout_func must return keys {missing} in its output dict.")
        masks = output.get("env_mask") or [[1] * len(ids) for ids in output["completion_ids"]]
        groups = list[EpisodeGroup]()
        for i, (prompt, ids, logps, mask) in enumerate(
            zip(output["prompt_ids"], output["completion_ids"], output["logprobs"], masks, strict=True)
        ):
            truncated = not ids or ids[-1] not in self.tokenizer.end_ids
            spec = EpisodeSpec(self._example(rows[i].get("prompt", "")), (0, TRAIN, 0, i), self.sampling.max_tokens)
            trajectory = Trajectory(tuple(_split_segments(ids, logps, mask)), "", truncated)
            groups.append(EpisodeGroup(spec, torch.tensor(prompt, dtype=torch.int64), (trajectory,)))
        fields = {name: values for name, values in output.items() if name not in (*required, "env_mask")}
        for i, row in enumerate(rows):
            row |= {name: values[i] if isinstance(values, list) else values for name, values in fields.items()}
        return self._collect(rows, [row["prompt"] for row in rows], groups)


def _prepare(trajectory: Trajectory) -> Trajectory:
    """Return an episode that counts as scored, and whose tokens are compared over the whole vocabulary, as TRL does also where
    top-k and top-p left a part of it."""
    segments = tuple(replace(segment, sampling_mask=None) for segment in trajectory.segments)
    return replace(trajectory, segments=segments, reward=0.0)


def _split_segments(ids: Sequence[int], logps: Sequence[float], mask: Sequence[int]) -> list[Segment]:
    """Return runs of tokens with one origin: the policy (1), or an environment (0)."""
    segments, first = list[Segment](), 0
    for end in range(1, len(ids) + 1):
        if end == len(ids) or mask[end] != mask[first]:
            tokens = torch.tensor(ids[first:end], dtype=torch.int64)
            logp = torch.tensor([0.0 if x is None else float(x) for x in logps[first:end]]) if mask[first] else None
            segments.append(Segment(tokens, logp))
            first = end
    return segments


def _with_pictures(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message whose pictures are those of policygrad."""
    content = message.get("content")
    if isinstance(content, list | tuple):
        parts = tuple(
            to_parts(part["image"])[0] if part.get("type") == "image" else dict(part)  # type: ignore[index]
            for part in content
        )
        return {**message, "content": parts}
    return dict(message)


class ToolConversation:
    """A conversation in which the policy may call functions of this process: TRL's tools and environments."""

    waits: ClassVar[bool] = True

    def __init__(self, example: Example, functions: Sequence[Callable[..., Any]], max_turns: int | None) -> None:
        self.example, self.max_turns, self.turns = example, max_turns, 0
        self.functions = {function.__name__: function for function in functions}
        self.schemas = tuple(Tool.from_function(function).schema for function in functions)
        self.messages = list[dict[str, Any]]()
        """What followed the prompt, as reward functions are given it."""
        self.num_calls = self.num_failed = 0

    async def reset(self) -> Observation:
        return Observation(self.example.prompt, self.schemas)

    async def step(self, action: Action) -> Step:
        calls = [call for call in action.message.calls if not call.error and call.name]
        message: dict[str, Any] = {"role": "assistant", "content": action.message.content}
        if calls:
            message["tool_calls"] = [
                {"type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
                for call in calls
            ]
        if action.message.reasoning:
            message["reasoning_content"] = action.message.reasoning
        self.messages.append(message)
        if not calls or (self.max_turns is not None and self.turns >= self.max_turns):
            return Step()
        self.turns += 1
        replies = [await self._call(call.name, call.arguments) for call in calls]
        self.messages += replies
        return Step(Observation(tuple(_with_pictures(reply) for reply in replies)))

    async def _call(self, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the message with a call's result; what fails is told to the policy."""
        self.num_calls += 1
        try:
            if name not in self.functions:
                raise ValueError(f"Tool {name} not found.")
            result = self.functions[name](**arguments)
            result = await result if inspect.isawaitable(result) else result
        except Exception as error:  # a tool is a user's
            self.num_failed += 1
            result = {"error": str(error)}
        content = result if isinstance(result, list) else str(result)
        return {"role": "tool", "name": name, "content": content}


ToolConversation.capabilities = replace(SingleTurn.capabilities, is_single_answer=False)  # type: ignore[attr-defined]
