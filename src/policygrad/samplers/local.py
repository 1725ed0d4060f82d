"""A sampler in this process, for any `AutoModelForCausalLM`: prompts are read once per group, finished rows leave the batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from policygrad.samplers.base import Completion, Group, Prompt, Sampling
from policygrad.samplers.draw import draw, uniforms
from policygrad.weight_sync.base import Published


class LocalSampler:
    """Decodes with the model it is given; when that is the learner's own model, `load` moves nothing."""

    def __init__(self, model: nn.Module, end: frozenset[int], pad: int) -> None:
        self.model, self.pad, self.version = model, pad, 0
        self.device = next(model.parameters()).device
        self.end = torch.tensor(sorted(end), device=self.device)

    def load(self, weights: Published) -> None:
        """Copies the weights, except where they already are this model's own memory."""
        own = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, tensor in weights.tensors.items():
                if own[name].data_ptr() != tensor.data_ptr():
                    own[name].copy_(tensor)
        self.version = weights.version

    @torch.no_grad()
    def sample(self, prompts: Sequence[Prompt], n: int, sampling: Sampling) -> list[Group]:
        """n completions of each prompt. A prompt's samples depend on its key and the weights, not on its neighbours
        (up to the rounding of a differently shaped matrix product)."""
        groups: dict[int, Group] = {}
        for chunk in _chunks(prompts, max(1, sampling.decode_rows // n)):
            rows = self._decode([prompts[i] for i in chunk], n, sampling)
            for place, i in enumerate(chunk):
                groups[i] = Group(prompts[i], tuple(rows[place * n : (place + 1) * n]), self.version)
        return [groups[i] for i in range(len(prompts))]

    def _prefill(self, prompts: Sequence[Prompt], n: int, room: int) -> tuple[Tensor, dict[str, Any], Tensor]:
        """Reads each prompt once; logits [P·n, V], cache and attention mask [P·n, L + room] are then one row per completion.

        The cache stands under the name that the model's forward pass takes it by.
        """
        from policygrad.samplers.cache import cache_of, expand

        width = max(len(p.tokens) for p in prompts)
        ids = torch.full((len(prompts), width), self.pad)
        attention = torch.zeros(len(prompts), width + room, dtype=torch.int64)
        for i, prompt in enumerate(prompts):
            ids[i, width - len(prompt.tokens) :] = prompt.tokens
            attention[i, width - len(prompt.tokens) :] = 1
        ids, attention = ids.to(self.device), attention.to(self.device)
        seen = attention[:, :width]
        positions = (seen.cumsum(1) - 1).clamp(min=0)
        out = self.model(
            input_ids=ids,
            attention_mask=seen,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            return_dict=True,
        )
        name, cache = cache_of(out)
        expand(cache, len(prompts), n, room)
        return out.logits[:, -1].repeat_interleave(n, 0), {name: cache}, attention.repeat_interleave(n, 0)

    def _decode(self, prompts: Sequence[Prompt], n: int, sampling: Sampling) -> list[Completion]:
        from policygrad.samplers.cache import select

        limit = torch.tensor([p.budget(sampling) for p in prompts], device=self.device).repeat_interleave(n)
        budget, rows = int(limit.max()), len(prompts) * n
        logits, cache, attention = self._prefill(prompts, n, budget)
        width = attention.shape[1] - budget
        position = torch.tensor([len(p.tokens) for p in prompts], device=self.device).repeat_interleave(n)
        u = uniforms([(*p.key, j) for p in prompts for j in range(n)], budget).to(self.device)
        tokens = torch.full((rows, budget), self.pad, device=self.device)
        logps = torch.zeros(rows, budget, device=self.device)
        length = limit.clone()
        ended = torch.zeros(rows, dtype=torch.bool, device=self.device)
        over = ended  # ended, or at its limit
        alive = torch.arange(rows, device=self.device)  # row of the decoding batch -> completion
        for t in range(budget):
            token, logp = draw(logits, u[alive, t], sampling)
            fresh = ~over[alive]  # a row that is over may wait here until the batch is next compacted
            tokens[alive[fresh], t], logps[alive[fresh], t] = token[fresh], logp[fresh]
            stops = fresh & torch.isin(token, self.end)
            length[alive[stops]], ended[alive[stops]] = t + 1, True
            over = ended | (limit <= t + 1)
            going = ~over[alive]
            left = int(going.sum())
            if left == 0 or t + 1 == budget:
                break
            if left < 0.8 * len(alive):
                keep = going.nonzero().squeeze(1)
                for held in cache.values():
                    select(held, keep)
                alive, token, position, attention = alive[keep], token[keep], position[keep], attention[keep]
            out = self.model(
                input_ids=token[:, None],
                attention_mask=attention[:, : width + t + 1] if "past_key_values" in cache else None,
                position_ids=position[:, None],
                **cache,
                use_cache=True,
                return_dict=True,
            )
            logits, position = (
                out.logits[:, -1],
                position + ~over[alive],
            )  # which waits stays within the model's context
        return [
            Completion(row[:size], p[:size], not done)
            for row, p, size, done in zip(tokens.cpu(), logps.cpu(), length.tolist(), ended.tolist(), strict=True)
        ]


def _chunks(prompts: Sequence[Prompt], size: int) -> Iterator[list[int]]:
    """At most `size` prompts at a time, those of similar length together."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i].tokens))
    for start in range(0, len(order), size):
        yield order[start : start + size]
