"""Count the layers of any causal language model of transformers: built without memory, run on tensors without values.

Parameters are those of the model itself. Operations, saved activations and cached numbers are counted while a text passes through
one layer of each kind, at two lengths, which tells what grows with tokens from what grows with pairs of them. Attention is counted
as a fused kernel does it, which saves queries, keys, values and its output.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from policygrad.errors import ConfigError, PolicygradError
from policygrad.models.adapters import add_adapters, find_stacked_experts
from policygrad.models.attention import SINKS_NAME, attend, attend_with_sinks, register_attention, set_attention
from policygrad.models.lora_config import DEFAULT_RANK, Lora
from policygrad.planning.shapes import CountedShape, LayerShape
from policygrad.samplers.local.kv_cache import CountingCache, get_cache

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
EXPERTS_PRODUCT = "transformers.grouped_mm_fallback"
"""transformers' product of tokens with their experts, of which tensors without values know the shape."""
MOVES_PER_SAVED = 2
"""Numbers that a forward pass reads and writes outside of matrix products, for each that it saves: 1.8 to 2.1 by the formula for
dense models."""
MAX_CHUNK = 256  # tokens: a longer chunk of a recurrent layer takes too long to pass through
SINK_FEATURES = 8  # by which `attend_with_sinks` widens heads
_LEAST_TOKENS = 64
_SEQUENTIAL_TOKENS = 16  # where each token is a step of its own
_POSITION_NAMES = ("layer_idx", "layer_id", "layer_index", "layer_number", "block_idx", "training")


def count_shape(config: Mapping[str, Any], name: str, source: str, lora: Lora | None = None) -> CountedShape:
    """Count the language model of a config.json.

    Args:
        lora: Adapters other than those of rank 1 on every linear layer, which are always counted.

    Raises:
        ConfigError: transformers does not have the architecture as a causal language model, or its layers cannot be counted.
    """
    from transformers import AutoConfig

    kind = str(config.get("model_type"))
    values = {key: value for key, value in config.items() if key not in ("model_type", "quantization_config")}
    try:
        text = AutoConfig.for_model(kind, **values).get_text_config(decoder=True)
    except Exception as error:  # the class depends on which value is wrong
        raise ConfigError(
            f"--model {name}: transformers does not read its configuration as {kind!r} ({_first_line(error)}). Update "
            "transformers, or correct the file."
        ) from error
    try:
        with _silent(), _experts_of_known_shape():
            return _count(text, name, source, lora)
    except ConfigError:
        raise
    except Exception as error:  # an architecture may fail in any way on tensors without values
        raise ConfigError(
            f"--model {name}: the layers of {kind!r} cannot be counted ({type(error).__name__}: {_first_line(error)}). Plan with "
            "a model of another family and the same size."
        ) from error


def count_total(config: Mapping[str, Any]) -> int:
    """Return the parameters of the language model of a config.json, built on the meta device."""
    from transformers import AutoConfig

    values = dict(config)
    text = AutoConfig.for_model(values.pop("model_type"), **values).get_text_config(decoder=True)
    with _silent():
        return sum(p.numel() for p in _build(text, torch.bfloat16).parameters())


def _count(text: Any, name: str, source: str, lora: Lora | None) -> CountedShape:
    model = _build(text, torch.bfloat16)
    layers, head = find_layers(model, text), model.get_output_embeddings()
    names = {id(p): p.numel() for p in model.parameters()}
    seen, owned = set[int](), list[int]()
    for layer in layers:  # what several layers share belongs to the first
        own = [id(p) for p in layer.parameters() if id(p) not in seen]
        seen.update(own)
        owned.append(sum(names[key] for key in own))
    windows = [find_window(layer, text, i) for i, layer in enumerate(layers)]
    experts = [
        [p.numel() for module in find_stacked_experts(layer) for p in module.parameters() if p.dim() == 3]
        for layer in layers
    ]
    linear = [[m.weight.numel() for m in layer.modules() if type(m) is nn.Linear] for layer in layers]
    tied = head.weight is model.get_input_embeddings().weight
    # Passes are of a model without windows, whose caches would hide how they grow with the text.
    model = _build(_without_windows(text), torch.bfloat16)
    full = {key: _measure(model, text, dtype) for key, dtype in DTYPES.items()}
    rank = min(DEFAULT_RANK, max((min(p.shape) for p in model.parameters() if p.dim() > 1), default=1))
    model = add_adapters(model, lora or Lora(rank=rank))
    adapters = [sum(p.numel() for p in layer.parameters() if p.requires_grad) for layer in find_layers(model, text)]
    adapted = {key: _measure(model, text, dtype) for key, dtype in DTYPES.items()}
    groups = Counter[LayerShape]()
    for i, layer in enumerate(layers):
        counts = [one.layers[i] for one in full["bf16"].by_length]
        tokens, more = full["bf16"].lengths
        routed = sum(experts[i])
        cache = (counts[1].cached - counts[0].cached) / (more - tokens)
        state = max(0, round(counts[0].cached - cache * tokens))
        linear_cost, pair_cost = _split([c.operations for c in counts], tokens, more, has_pairs=not counts[0].attention)
        pair_cost += counts[0].attention / tokens**2
        saved, adapted_saved = (
            tuple(
                (
                    key,
                    *_split(
                        [one.layers[i].saved for one in pair.by_length],
                        *pair.lengths,
                        has_pairs=pair_cost > 0 and not counts[0].attention,
                    ),
                )
                for key, pair in passes.items()
            )
            for passes in (full, adapted)
        )
        is_latent = getattr(text, "kv_lora_rank", None) is not None and getattr(text, "index_topk", None) is None
        moved = next(token for key, token, _ in saved if key == "fp32") / 4 * MOVES_PER_SAVED
        shape = LayerShape(
            kind=_name_kind(layer, text, windows[i], bool(routed), bool(cache), bool(state)),
            count=1,
            parameters=owned[i],
            matmul_weights=round(linear_cost / 2),
            pair_width=round(pair_cost / 4),
            saved=saved,
            moved_numbers=round(moved),
            window=windows[i] if cache else None,
            cache_numbers=round(cache),
            attended_numbers=round(counts[0].attended / tokens if is_latent and cache else cache),
            state_numbers=state,
            routed_parameters=routed,
            routed_fraction=round(min(1.0, counts[0].experts / 2 / tokens / routed), 6) if routed else 1.0,
            linear_parameters=sum(linear[i]),
            largest_linear=max(linear[i], default=0),
            adapters=adapters[i] if lora is not None else adapters[i] // rank,
            adapted_saved=adapted_saved,
        )
        groups[shape] += 1
    return CountedShape(
        name=name,
        hidden=int(head.weight.shape[1]),
        vocabulary=int(head.weight.shape[0]),
        tied=bool(tied),
        source=source,
        total=sum(names.values()),
        kinds=tuple(replace(shape, count=count) for shape, count in groups.items()),
        model_type=str(text.model_type),
        context_length=getattr(text, "max_position_embeddings", None),
        adapter_rank=1 if lora is None else 0,
    )


def _split(amounts: Sequence[float], tokens: int, more: int, *, has_pairs: bool) -> tuple[float, float]:
    """Split an amount, counted at two lengths, into what grows with tokens and, if there is any, what grows with pairs of them."""
    first, second = amounts
    square = (second / more - first / tokens) / (more - tokens) if has_pairs else 0.0
    if square * more <= 0.01 * second / more:
        return max(0.0, round((second - first) / (more - tokens), 3)), 0.0
    return max(0.0, round(first / tokens - square * tokens, 3)), round(square, 6)


def _without_windows(text: Any) -> Any:
    import copy

    text = copy.deepcopy(text)
    for name in ("sliding_window", "attention_chunk_size"):
        if isinstance(getattr(text, name, None), int):
            setattr(text, name, 2**20)
    return text


def find_layers(model: nn.Module, text: Any) -> list[nn.Module]:
    """Return the blocks of a model: the first list of modules as long as the model is deep, or the longest of modules."""
    depth, lists, queue = getattr(text, "num_hidden_layers", None), list[list[nn.Module]](), [model]
    while queue:
        for child in queue.pop(0).children():
            if isinstance(child, nn.ModuleList):
                lists.append(list(child))
            queue.append(child)
    for blocks in lists:
        if len(blocks) == depth:
            return blocks
    for blocks in lists:
        if len(blocks) > 1 or len(lists) == 1:
            return blocks
    raise PolicygradError(f"{type(model).__name__} has no list of layers")


def find_window(layer: nn.Module, text: Any, i: int) -> int | None:
    """Return how many tokens a layer attends to, itself included; None = all before it."""
    types = getattr(text, "layer_types", None) or ()
    kind = types[i] if i < len(types) else ""
    if kind == "chunked_attention":
        return int(text.attention_chunk_size)
    if kind == "full_attention":
        return None
    for module in layer.modules():
        if isinstance(size := vars(module).get("sliding_window"), int) and size > 0:
            return size
    return int(text.sliding_window) if kind == "sliding_attention" and text.sliding_window else None


def _name_kind(layer: nn.Module, text: Any, window: int | None, routes: bool, has_keys: bool, has_state: bool) -> str:
    """Name a kind of layer: latent attention, experts."""
    mixer = []
    if has_state:
        names = " ".join(type(module).__name__ for module in layer.modules()).lower()
        words = {"mamba": "Mamba", "deltanet": "delta rule", "delta": "delta rule", "conv": "convolution"}
        words |= {"lightning": "Lightning attention", "compress": "compressed keys"}
        mixer.append(next((text for word, text in words.items() if word in names), "recurrent"))
    if has_keys:
        latent = "latent " if getattr(text, "kv_lora_rank", None) is not None else ""
        mixer.append(f"{latent}attention" + (f" in windows of {window:,}" if window else ""))
    parts = [" beside ".join(mixer)] if mixer else []
    return ", ".join([*parts, *(["experts"] if routes else [])]) or "MLP"


# One pass of a text through one layer of each kind.


@dataclass
class _LayerCounts:
    operations: int = 0  # of matrix products, experts included
    attention: int = 0  # of fused attention
    experts: int = 0  # of the experts' products alone
    saved: int = 0  # bytes for the backward pass
    cached: int = 0  # numbers after the text
    attended: int = 0  # numbers of keys and values that attention reads


@dataclass
class _Counts:
    layers: list[_LayerCounts]


@dataclass(frozen=True)
class _Passes:
    """Counts of a text at two lengths."""

    lengths: tuple[int, int]
    by_length: tuple[_Counts, _Counts]


def _measure(model: Any, text: Any, dtype: torch.dtype) -> _Passes:
    """Send texts through a model in a precision; its parameters have no memory before and after."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    chunk = max((int(getattr(text, key, 0) or 0) for key in ("chunk_size", "mamba_chunk_size")), default=0)
    is_sequential = not chunk and any(hasattr(text, key) for key in ("time_step_rank", "mamba_dt_rank"))
    tokens = _SEQUENTIAL_TOKENS if is_sequential else max(_LEAST_TOKENS, min(chunk, MAX_CHUNK))
    with FakeTensorMode():
        before = _materialise(model, lambda p: dtype if p.dtype == torch.bfloat16 else p.dtype)
        _use_fused_attention(model)
        model.eval()
        counts = _pass(model, text, tokens), _pass(model, text, 2 * tokens)
    with torch.device("meta"):
        _materialise(model, lambda p: before[p])
    return _Passes((tokens, 2 * tokens), counts)


def _pass(model: Any, text: Any, length: int) -> _Counts:
    """Send a text through the model, whose layers of one kind after the first return what that returned."""
    layers = find_layers(model, text)
    first = dict[object, int]()
    representative = [first.setdefault(_signature(layer), i) for i, layer in enumerate(layers)]
    counts = _Counts([_LayerCounts() for _ in layers])
    outputs = dict[int, Any]()
    meter = _Meter(counts)
    ids = torch.zeros(1, length, dtype=torch.int64)
    parameters = {p.untyped_storage()._cdata for p in model.parameters()}

    def record(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage._cdata not in parameters and storage._cdata not in meter.seen:
            meter.seen.add(storage._cdata)
            meter.kept.append(x)
            if meter.layer >= 0:
                counts.layers[meter.layer].saved += storage.nbytes()
        return x

    with ExitStack() as stack:
        for i, layer in enumerate(layers):
            forward = meter.around(i, representative[i], layer.forward, outputs)
            stack.enter_context(_replaced(layer, "forward", forward))
        with _FusedAttention(meter), meter, torch.autograd.graph.saved_tensors_hooks(record, lambda x: x):
            out = model.base_model(input_ids=ids, use_cache=False)
        del out
        outputs.clear()
        # The cache of one layer of each kind: the others add nothing to it.
        meter.is_counting = False
        from transformers import DynamicCache
        from transformers.cache_utils import CacheLayerMixin

        made = DynamicCache(config=text).layers
        has_keys = not made or any(isinstance(x, CacheLayerMixin) for x in made)
        given = {} if has_keys else {"past_key_values": CountingCache(text)}
        with torch.no_grad():
            out = model.base_model(input_ids=ids, use_cache=True, **given)
        outputs.clear()
    cache = get_cache(out, model)[1]
    states = [value for key, value in vars(cache).items() if isinstance(value, list) and key != "layers"]
    for i, counted in enumerate(counts.layers):
        if i < len(cache.layers):
            counted.cached = sum(x.numel() for x in _tensors(vars(cache.layers[i]).values()))
        for values in states:  # MiniMax keeps the states of its layers beside their caches
            counted.cached += sum(x.numel() for x in _tensors(values[i : i + 1]))
    counts.layers = [counts.layers[i] for i in representative]
    return counts


class _Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own __init_subclass__
    """Adds up operations, by the layer that is active."""

    def __init__(self, counts: _Counts) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts, self.layer, self.is_counting = counts, -1, True
        self.seen, self.kept = (
            set[int](),
            list[Tensor](),
        )  # storages that were counted, kept so that no number is given twice

    def around(self, i: int, representative: int, forward: Any, outputs: dict[int, Any]) -> Any:
        """Return a layer's forward pass that is counted, or that repeats what the first layer of its kind returned."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            if representative != i:
                return outputs[representative]
            before, self.layer = self.layer, i
            try:
                outputs[i] = forward(*args, **kwargs)
            finally:
                self.layer = before
            return outputs[i]

        return counted

    def add(self, operations: int, *, experts: bool = False) -> None:
        if self.layer >= 0 and self.is_counting:
            self.counts.layers[self.layer].operations += operations
            self.counts.layers[self.layer].experts += operations if experts else 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        if str(packet) == EXPERTS_PRODUCT:
            tokens, weight = args[:2]
            self.add(2 * tokens.shape[0] * weight.shape[1] * weight.shape[2], experts=True)
        elif packet in flop_registry:
            self.add(flop_registry[packet](*args, **(kwargs or {}), out_val=out))
        return out


class _Attend(torch.autograd.Function):
    """Attention that computes nothing and saves what a fused kernel saves."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = query.new_empty(*query.shape[:-1], value.shape[-1])
        ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return out


class _FusedAttention(TorchFunctionMode):
    """Replaces scaled-dot-product attention, whose kernel on a CPU differs from those on GPUs."""

    def __init__(self, meter: _Meter) -> None:
        super().__init__()
        self.meter = meter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (F.scaled_dot_product_attention, attend_with_sinks):
            return func(*args, **(kwargs or {}))
        given = dict(zip(("query", "key", "value"), args, strict=False)) | (kwargs or {})
        query, key, value = given["query"], given["key"], given["value"]
        pairs = query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2]
        if self.meter.layer >= 0 and self.meter.is_counting:
            counts = self.meter.counts.layers[self.meter.layer]
            counts.attention += 2 * pairs * (query.shape[3] + value.shape[3])
            counts.attended += key.numel() + value.numel()
        if func is attend_with_sinks:  # which repeats keys for every head, with a feature for the sink
            width, heads = value.shape[-1], query.shape[1]
            query, key, value = (F.pad(x, (0, SINK_FEATURES)) for x in (query, key, value))
            key, value = (x.repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
            return cast(Any, _Attend.apply)(query, key, value)[..., :width]
        return cast(Any, _Attend.apply)(query, key, value)


def _signature(layer: nn.Module) -> object:
    """Return what layers of one kind have in common: classes, shapes of weights and settings, but not their place."""
    shapes = tuple((name, tuple(p.shape), p.requires_grad) for name, p in layer.named_parameters())
    settings = tuple(
        (type(module).__name__, key, value)
        for module in layer.modules()
        for key, value in vars(module).items()
        if isinstance(value, int | float | str | None) and key not in _POSITION_NAMES
    )
    return shapes, settings


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            if value.is_floating_point():
                yield value
        elif isinstance(value, Mapping):
            yield from _tensors(value.values())
        elif isinstance(value, Sequence) and not isinstance(value, str):
            yield from _tensors(value)


# The model on which is counted.


def _build(text: Any, dtype: torch.dtype) -> Any:
    """Build a model on the meta device, with fused attention where it has that."""
    import copy

    from transformers import AutoModelForCausalLM

    causal: Any = AutoModelForCausalLM
    with torch.device("meta"):
        try:
            return causal.from_config(copy.deepcopy(text), dtype=dtype, attn_implementation="sdpa")
        except ValueError as error:
            if "attention implementation" not in str(error):
                raise
            return causal.from_config(copy.deepcopy(text), dtype=dtype)


def _materialise(model: nn.Module, choose_dtype: Callable[[Tensor], torch.dtype]) -> dict[Tensor, torch.dtype]:
    """Give a model new tensors, on the device or in the mode that is active; return the parameters' precisions before."""
    before = dict[Tensor, torch.dtype]()

    def make(p: Tensor) -> Tensor:
        new = nn.Parameter(torch.empty(p.shape, dtype=choose_dtype(p)), p.requires_grad)
        before[new] = p.dtype
        return new

    created = dict[Tensor, nn.Parameter]()
    for module in model.modules():
        for key, p in module._parameters.items():
            if p is not None:
                if p not in created:
                    created[p] = cast(nn.Parameter, make(p))
                module._parameters[key] = created[p]
        for name, x in module._buffers.items():
            module._buffers[name] = None if x is None else torch.empty(x.shape, dtype=x.dtype)
    return before


def _use_fused_attention(model: Any) -> None:
    """Let a model with attention sinks use this library's attention, as `load_model` does."""
    has_sinks = any("sink" in name for name, _ in model.named_parameters())
    if has_sinks and model.config.get_text_config()._attn_implementation == "eager" and not model._supports_sdpa:
        register_attention(SINKS_NAME, attend)
        set_attention(model, SINKS_NAME)


@contextmanager
def _experts_of_known_shape() -> Iterator[None]:
    """Let experts use a product that tensors without values have, in every precision."""
    from transformers.integrations import moe

    with _replaced(moe, "_can_use_grouped_mm", lambda *args, **kwargs: False):
        yield


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of a module for a while."""
    is_own, before = name in vars(owner), getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


@contextmanager
def _silent() -> Iterator[None]:
    """Hide transformers' remarks on configurations."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0][:200]
