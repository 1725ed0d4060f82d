"""Attention by its name in transformers: what a model computes under another one, fused attention with sinks, and short windows.

A sink is a learned score of each head that takes a share of the softmax and gives nothing (gpt-oss, MiMo, Granite SWA).
transformers computes it with all scores written out; here it is one more key for scaled-dot-product attention.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from policygrad.models.loading import at_least_float32

SINKS_NAME = "policygrad_sinks"  # name in transformers' registry
FUSED_NAMES = ("sdpa", SINKS_NAME)
_ALIGNMENT = 8  # by which the width of keys grows for a sink: kernels want multiples of it
_SHORT = 3  # tokens of a window that a test's texts are longer than


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Apply transformers' scaled-dot-product attention, also with sinks.

    Args:
        query, key, value: [B, heads, L, width], of keys and values also fewer heads.
        s_aux: [heads] the sinks, by the name that transformers has for them.
    """
    if (handle := _KEYS.get()) is not None:
        key, value = handle(module, key, value)
    if s_aux is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    scale = options.get("scaling") or query.shape[-1] ** -0.5
    return attend_with_sinks(query, key, value, attention_mask, s_aux, scale).transpose(1, 2).contiguous(), None


KeyHandler = Callable[[nn.Module, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Takes a layer with the keys and values that it has computed; returns those that it attends to."""
_KEYS: ContextVar[KeyHandler | None] = ContextVar("keys", default=None)


@contextmanager
def handling_keys(handle: KeyHandler) -> Iterator[None]:
    """Let a function see and replace the keys and values of every layer that uses `attend`, in this thread."""
    token = _KEYS.set(handle)
    try:
        yield
    finally:
        _KEYS.reset(token)


def attend_with_sinks(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, sinks: Tensor, scale: float
) -> Tensor:
    """Return [B, H, Q, D] the values weighted by a softmax over the scores and the head's sink, whose share gives nothing.

    Args:
        mask: [B, 1, Q, K] True = visible, or numbers that are added; None = causal, with as many queries as keys.
        sinks: [H]
    """
    if has_torch_function((query, key, value)):
        return handle_torch_function(attend_with_sinks, (query, key, value), query, key, value, mask, sinks, scale)
    if query.shape[2] == 1:
        return _attend_once(query, key, value, mask, sinks, scale)
    rows, heads, length, width = query.shape
    # One more feature, which is 1 in the key of the sink and 0 in others: a query's value of it is what the sink scores.
    sink_scores = (sinks.to(query.dtype) / scale)[None, :, None, None].expand(rows, heads, length, 1)
    queries = torch.cat([query, sink_scores, query.new_zeros(rows, heads, length, _ALIGNMENT - 1)], -1)
    sink = F.pad(key.new_ones(1, 1, 1, 1), (width, _ALIGNMENT - 1)).expand(rows, key.shape[1], 1, -1)
    keys = torch.cat([sink, F.pad(key, (0, _ALIGNMENT))], 2)
    values = F.pad(value, (0, _ALIGNMENT, 1, 0))
    if mask is None:  # a first query for the sink keeps the others in their places
        queries = F.pad(queries, (0, 0, 1, 0))
    else:
        mask = F.pad(mask, (1, 0), value=mask.dtype == torch.bool)
    keys, values = (_repeat_heads(x, heads) for x in (keys, values))
    out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, is_causal=mask is None, scale=scale)
    return out[:, :, -length:, : value.shape[-1]]


def _attend_once(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, sinks: Tensor, scale: float) -> Tensor:
    """Compute the same for one query a row, without a copy of the keys."""
    rows, heads = query.shape[:2]
    grouped = (query * scale).view(rows, key.shape[1], -1, query.shape[-1])
    scores = at_least_float32(grouped @ key.transpose(2, 3))
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    p = softmax_with_sinks(scores, sinks.view(1, key.shape[1], -1, 1)).to(value.dtype)
    return (p @ value).view(rows, heads, 1, -1)


def softmax_with_sinks(scores: Tensor, sinks: Tensor) -> Tensor:
    """Return the softmax over scores [..., K] and a sink [..., 1], without the sink's share."""
    return torch.cat([scores, sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)], -1).softmax(-1)[..., :-1]


def _repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Give every query head a head of keys or values [B, H, K, D] of its own."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


@torch.no_grad()
def use_fused_attention(model: Any) -> None:
    """Let a model that transformers gives eager attention because of its sinks use `attend`, if that computes the same."""
    config = getattr(model, "config", None)
    can_set = getattr(model, "_can_set_attn_implementation", None)
    if config is None or config.get_text_config()._attn_implementation != "eager" or can_set is None or not can_set():
        return
    has_sinks = any("sink" in name for name, _ in model.named_parameters())
    if not has_sinks or getattr(model, "_supports_sdpa", True) or any(p.is_meta for p in model.parameters()):
        return  # eager by choice, or nothing to compute with
    register_attention(SINKS_NAME, attend)
    device, size = next(model.parameters()).device, model.get_input_embeddings().weight.shape[0]
    ids = (torch.arange(16, device=device).view(2, 8) * 5) % min(size, 11)
    with short_windows(model):
        plain = model(input_ids=ids, use_cache=False).logits.float()
        if depends_on_attention_name(model, SINKS_NAME):
            return
        set_attention(model, SINKS_NAME)
        try:
            gap = float((model(input_ids=ids, use_cache=False).logits.float() - plain).abs().max())
        except Exception:  # an architecture may raise anything for a call that it does not support
            gap = torch.inf
    tolerance = 0.05 if model.dtype in (torch.bfloat16, torch.float16) else 1e-4
    if not gap <= tolerance * float((plain[0] - plain[1]).abs().max()):
        set_attention(model, "eager")


def switch_to_own_attention(model: Any) -> str:
    """Let a model with transformers' scaled-dot-product attention use `attend`, if it computes the same under another name; return
    the name before."""
    before = str(model.config.get_text_config()._attn_implementation)
    if before == "sdpa" and model._can_set_attn_implementation():
        register_attention(SINKS_NAME, attend)
        if not depends_on_attention_name(model, SINKS_NAME):
            set_attention(model, SINKS_NAME)
    return before


def restore_fused_attention(model: Any) -> None:
    """Give a model, which may come from another process, the scaled-dot-product attention that `load_model` gave it."""
    register_attention(SINKS_NAME, attend)
    set_attention(model, "sdpa" if getattr(model, "_supports_sdpa", True) else SINKS_NAME)


def register_attention(name: str, attention: Any) -> None:
    """Make an attention known to transformers, with the masks of its scaled-dot-product attention."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, sdpa_mask)


def set_attention(model: Any, name: str) -> None:
    """Set the attention of the text part: a vision tower's stays as it is."""
    config = model.config
    parts = [key for key in config.sub_configs if getattr(config, key, None) is config.get_text_config()]
    model.set_attn_implementation({parts[0]: name} if parts else name)


@contextmanager
def short_windows(model: Any) -> Iterator[bool]:
    """Make the sliding windows of a model's layers a few tokens long, so that a short text shows what they do.

    Yields:
        True if there are some.
    """
    config = getattr(model, "config", None)
    text = [] if config is None else [config.get_text_config()]
    owners = [*text, *(module for module in model.modules() if "sliding_window" in vars(module))]
    values = [getattr(owner, "sliding_window", None) for owner in owners]
    has_window = [isinstance(value, int) and value > 0 for value in values]
    for owner, has in zip(owners, has_window, strict=True):
        if has:
            owner.sliding_window = _SHORT
    try:
        yield any(has_window)
    finally:
        for owner, value, has in zip(owners, values, has_window, strict=True):
            if has:
                owner.sliding_window = value


class _AttentionName(str):
    """A name of the attention that counts how often code of the model's own looks whether it is the one before."""

    before: str
    modules: frozenset[str]  # of the model's classes; transformers' registry compares names too
    num_looks: int

    def _observe(self, other: object) -> None:
        if other == self.before and sys._getframe(2).f_globals.get("__name__") in self.modules:
            self.num_looks += 1

    def __eq__(self, other: object) -> bool:
        self._observe(other)
        return str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        self._observe(other)
        return str.__ne__(self, other)

    def __hash__(self) -> int:  # a set or dict of names
        self._observe(self.before)
        return str.__hash__(self)


@torch.no_grad()
def depends_on_attention_name(model: Any, name: str) -> bool:
    """Return True if the model computes something else where its attention has another name, which must be registered.

    Sparse attention does: GLM 5 and DeepSeek V3.2 apply the mask of their indexer under the names that they know, so under
    another one they attend to everything, which shows in texts longer than the indexer's top-k alone.
    """
    import transformers

    before = model.config.get_text_config()._attn_implementation
    configs = {
        id(config): config
        for module in model.modules()
        if isinstance(config := getattr(module, "config", None), transformers.PreTrainedConfig)
        and config._attn_implementation == before
    }
    observer = _AttentionName(name)
    observer.before, observer.num_looks = before, 0
    observer.modules = frozenset(type(module).__module__ for module in model.modules())
    ids = torch.zeros(1, 8, dtype=torch.int64, device=next(model.parameters()).device)
    for config in configs.values():
        config._attn_implementation_internal = observer
    try:
        model(input_ids=ids, use_cache=False)
    except Exception:  # architectures raise all kinds of errors under a name that they do not know
        return True
    finally:
        for config in configs.values():
            config._attn_implementation_internal = before
    return observer.num_looks > 0
