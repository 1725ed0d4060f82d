"""Teachers with a tokenizer of their own: the spans of text that end with a token of both models, and what the teacher reads."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from policygrad.core.auxiliary import Reference
from policygrad.core.batch import Batch
from policygrad.core.metrics import Mean, Metrics, Sum
from policygrad.errors import ConfigError
from policygrad.models.chat.control_tokens import list_special_tokens
from policygrad.models.chat.rendering import render_ids
from policygrad.models.loading import load_error, resolve_model
from policygrad.models.token_offsets import find_offsets
from policygrad.models.tokenizer import Tokenizer, load_tokenizer
from policygrad.rollout.providers import Collected, FieldProvider, ProviderContext, Stage
from policygrad.rollout.scoring import ScoringResult
from policygrad.rollout.trajectory import EpisodeGroup
from policygrad.samplers.base import SamplingParams
from policygrad.utils.message_parts import list_pictures

_ALONE = r"\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # kana, Chinese: no blanks between words
_WORD = re.compile(rf" ?[^\W\d_{_ALONE}]+| ?[{_ALONE}]| ?\d| ?[^\w\s{_ALONE}]+|_+|\s+")
"""Letters, a Chinese character or kana, a digit, or signs, with the blank before them."""
_REPLACED = "\N{REPLACEMENT CHARACTER}"  # what invalid bytes decode to


@dataclass(frozen=True)
class AlignedTexts(FieldProvider):
    """Fills `reference_prompts`, `reference_tokens`, `reference_places` and `reference_spans`."""

    part: Reference
    stage: ClassVar[Stage] = Stage.READINGS
    single_answers: ClassVar[tuple[str, str]] = (
        "Reference.tokenizer aligns the text of a complete answer",
        "a teacher with the policy's tokenizer",
    )

    def provide(self, collected: Collected, context: ProviderContext) -> Collected:
        assert self.part.tokenizer is not None
        teacher = load_reference_tokenizer(self.part.tokenizer, context.sampling)
        batch, metrics = add_aligned_texts(collected.batch, collected.groups, context.tokenizer, teacher, self.part.cut)
        return collected.with_result(batch, ScoringResult(metrics))


def add_aligned_texts(
    batch: Batch, groups: Sequence[EpisodeGroup], policy: Tokenizer, teacher: Tokenizer, cut: str = "words"
) -> tuple[Batch, Metrics]:
    """Fill what the teacher reads of single-turn completions, and their spans.

    It reads the same prompt, rendered by its own chat template if it is a conversation, and the completion's text in its tokens.
    The metrics are teacher/unaligned, the share of sampled tokens of which it says nothing, teacher/span_length, the policy's
    tokens in a span, and reference/too_long, the number of completions that its context has no room for.

    Raises:
        ConfigError: A prompt with pictures.
    """
    policy_texts, teacher_texts = TokenTexts(policy), TokenTexts(teacher)
    prompts, texts, num_long = list[Tensor](), list[AlignedText](), 0
    aligned_by_ids = dict[tuple[bool, tuple[int, ...]], AlignedText]()
    ends = cache(partial(find_end_token, policy, teacher))
    for group in groups:
        prompt = encode_prompt(group, teacher)
        is_chat = not isinstance(group.spec.example.prompt, str)
        for trajectory in group.trajectories:
            ids = tuple(trajectory.tokens.tolist())
            if (is_chat, ids) not in aligned_by_ids:
                end = ends(ids[-1], is_chat) if ids and ids[-1] in policy.end_ids else None
                aligned_by_ids[is_chat, ids] = align_texts(policy_texts, teacher_texts, ids, end, cut)
            text = aligned_by_ids[is_chat, ids]
            limit = teacher.context_length
            is_too_long = limit is not None and len(prompt) + len(text.tokens) > limit
            num_long += is_too_long
            if is_too_long or trajectory.demonstration:
                text = AlignedText((), (), (-1,) * len(ids))
            prompts.append(prompt)
            texts.append(text)
    spans = pad_sequence([torch.tensor(t.spans, dtype=torch.int64) for t in texts], batch_first=True, padding_value=-1)
    filled = replace(
        batch,
        reference_prompts=tuple(prompts),
        reference_tokens=tuple(torch.tensor(t.tokens, dtype=torch.int64) for t in texts),
        reference_places=tuple(torch.tensor(t.places, dtype=torch.int64) for t in texts),
        reference_spans=spans,
    )
    sampled = batch.policy_tokens
    aligned = sampled & (spans >= 0)
    number, tokens = int(aligned.sum()), int(sampled.sum())
    num_spans = int((aligned & (spans == torch.arange(spans.shape[1]))).sum())
    metrics: Metrics = {
        "teacher/unaligned": Mean(float(tokens - number), float(tokens)),
        "teacher/span_length": Mean(float(number), float(num_spans)),
    }
    return filled, metrics | ({"reference/too_long": Sum(float(num_long))} if num_long else {})


@dataclass(frozen=True)
class AlignedText:
    """A completion in the tokens of both models."""

    tokens: tuple[int, ...]
    """The teacher's."""
    places: tuple[int, ...]
    """For each of them, the index of the policy's token with which its span ends; -1 = it is in no span."""
    spans: tuple[int, ...]
    """The same for each of the policy's tokens."""


class TokenTexts:
    """What tokens of one tokenizer stand for in a text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        hf = tokenizer.hf
        self.hf, self.special_ids, self._pieces = hf, frozenset(list_special_tokens(hf)), dict[int, str]()
        self.decode: Callable[[Sequence[int]], str] = partial(
            hf.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def find_ends(self, ids: Sequence[int], text: str) -> tuple[int, ...]:
        """Return the characters of the text of `ids` up to each token's end. A token that begins a character and does not complete
        it ends where the one before it does."""
        for token in set(ids) - self._pieces.keys():
            self._pieces[token] = self.decode([token])
        pieces = [self._pieces[token] for token in ids]
        if _REPLACED not in text and "".join(pieces) == text:
            ends, at = list[int](), 0
            for piece in pieces:
                at += len(piece)
                ends.append(at)
            return tuple(ends)
        return (*find_offsets(self.decode, ids)[1:], len(text)) if ids else ()


def align_texts(
    policy_texts: TokenTexts, teacher_texts: TokenTexts, ids: Sequence[int], end: int | None, cut: str = "words"
) -> AlignedText:
    """Encode the text of a completion with the teacher's tokenizer, and find the smallest spans that end as `cut` says.

    A span with invalid bytes or a control token is none, and neither is what the teacher's tokenizer writes in other characters.

    Args:
        ids: The policy's tokens.
        end: The teacher's end token if the last of them ends the completion: the two are a span.
        cut: `Reference.cut`; in words, how the teacher cuts a text does not depend on the next one.
    """
    body = ids if end is None else ids[:-1]
    text = policy_texts.decode(body)
    tokens = list[int](teacher_texts.hf(text, add_special_tokens=False, verbose=False)["input_ids"]) if text else []
    read = teacher_texts.decode(tokens)
    same = _count_equal(text, read)
    num_equal_at_end = _count_equal(text[same:][::-1], read[same:][::-1])
    our_ends, shift = policy_texts.find_ends(body, text), len(text) - len(read)
    their_ends = [
        end if end <= same else end + shift if end >= len(read) - num_equal_at_end else -1
        for end in teacher_texts.find_ends(tokens, read)
    ]
    spans, places = [-1] * len(ids), [-1] * len(tokens)
    at, first, their_first = 0, 0, 0
    word_ends = {match.end() for match in _WORD.finditer(text)} if cut == "words" else set(our_ends)
    for i, j in find_shared_ends(our_ends, their_ends):
        if our_ends[i] not in word_ends:
            continue
        span_text, our_ids, their_ids = text[at : our_ends[i]], body[first : i + 1], tokens[their_first : j + 1]
        is_plain = policy_texts.special_ids.isdisjoint(our_ids) and teacher_texts.special_ids.isdisjoint(their_ids)
        is_same = text == read or not at <= same < our_ends[i]
        if is_plain and is_same and _REPLACED not in span_text:
            # equal tokens are spans of their own, also within a character
            pieces = policy_texts.hf.convert_ids_to_tokens(our_ids)
            is_equal = pieces == teacher_texts.hf.convert_ids_to_tokens(their_ids)
            spans[first : i + 1] = range(first, i + 1) if is_equal else [i] * len(our_ids)
            places[their_first : j + 1] = range(first, i + 1) if is_equal else [i] * len(their_ids)
        at, first, their_first = our_ends[i], i + 1, j + 1
    if end is not None:
        spans[-1] = len(ids) - 1
        tokens, places = [*tokens, end], [*places, len(ids) - 1]
    return AlignedText(tuple(tokens), tuple(places), tuple(spans))


def find_shared_ends(ours: Sequence[int], theirs: Sequence[int]) -> list[tuple[int, int]]:
    """Return the pairs of tokens (i, j), in order, after which the decoded texts are equal (Niu et al. 2026, sec. 4).

    ours, theirs: Characters up to each token's end, of the two tokenizers.
    """
    first, their_first = (_first_tokens(ends) for ends in (ours, theirs))
    return [(first[at], their_first[at]) for at in sorted(first.keys() & their_first.keys()) if at > 0]


def _first_tokens(ends: Sequence[int]) -> dict[int, int]:
    """Return the first token that ends at each number of characters: those after it have begun another character."""
    first = dict[int, int]()
    for i, end in enumerate(ends):
        first.setdefault(end, i)
    return first


def _count_equal(a: str, b: str) -> int:
    """Return how many characters both texts begin with."""
    shorter = min(len(a), len(b))
    return shorter if a[:shorter] == b[:shorter] else next(i for i in range(shorter) if a[i] != b[i])


def encode_prompt(group: EpisodeGroup, teacher: Tokenizer) -> Tensor:
    """Return the prompt's ids [P] as the teacher reads it. Raises ConfigError if it has pictures."""
    spec = group.spec
    if not isinstance(spec.example.prompt, str) and any(list_pictures(spec.example.prompt)):
        raise ConfigError(
            f"{spec.location} has pictures, and Reference.tokenizer aligns text alone: use a teacher with the policy's tokenizer, "
            "or a task without pictures"
        )
    unlimited = replace(teacher, context_length=None)
    return unlimited.encode(spec.example.prompt, 0, spec.location, spec.example.tools).ids


def find_end_token(policy: Tokenizer, teacher: Tokenizer, end: int, is_chat: bool) -> int:
    """Return the token by which the teacher ends what the policy ends with `end`: the same one, if it has it, else what its chat
    template closes a turn with, or its end of a text."""
    same = teacher.hf.get_vocab().get(policy.hf.convert_ids_to_tokens(end))
    if same in teacher.end_ids:
        return int(same)
    if is_chat:
        messages = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})
        ids = render_ids(teacher, messages, generation_prompt=False)
        if closing := [token for token in ids if token in teacher.end_ids]:
            return closing[-1]
    eos = teacher.hf.eos_token_id
    return int(eos) if eos in teacher.end_ids else min(teacher.end_ids)


def load_reference_tokenizer(name: str, sampling: SamplingParams) -> Tokenizer:
    """Load the tokenizer of a teacher, without the teacher.

    Raises:
        ModelError: No such tokenizer, or no end token.
        ConfigError: Completions are sampled by top-p or top-k.
    """
    if sampling.is_truncated:
        raise ConfigError(
            "top_p and top_k: a teacher with a tokenizer of its own (Reference.tokenizer) has log-probabilities over its full "
            "vocabulary, and they must be over the tokens that top_p and top_k leave. Leave top_p = 1 and top_k = 0, or use a "
            "teacher with the policy's tokenizer"
        )
    return _load_tokenizer(name)


@cache
def _load_tokenizer(name: str) -> Tokenizer:
    from transformers import AutoConfig, PretrainedConfig

    path = Path(resolve_model(name))
    config = PretrainedConfig()
    if not path.is_dir() or (path / "config.json").is_file():
        try:
            config = AutoConfig.from_pretrained(str(path))
        except Exception as error:  # the class depends on what is wrong with it
            raise load_error(f"the configuration of {name!r}", error, "config.json", str(path)) from error
    return load_tokenizer(name, _Described(config))


class _Described(nn.Module):
    """What a configuration says of a model that is not in memory."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
