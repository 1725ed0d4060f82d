"""Shapes of language models: layers of a few kinds, each with its weights, its attention, what it caches and what it saves."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

Saved = tuple[tuple[str, float, float], ...]
"""What a layer saves for its backward pass: (precision, bytes per token, bytes per pair of a token and one of its text)."""


@dataclass(frozen=True)
class LayerShape:
    """Equal layers of a model; all numbers are of one of them."""

    kind: str  # in words: attention in windows of 512, experts
    count: int
    parameters: int
    matmul_weights: int  # weights that each token is multiplied with: of experts, those that it is sent to
    pair_width: int  # width of a token's heads, for operations per pair of attending tokens
    saved: Saved
    moved_numbers: int  # numbers read and written per token outside of matrix products
    window: int | None = None  # tokens that a token attends to, itself included; None = all before it
    cache_numbers: int = 0  # numbers per token in the cache
    attended_numbers: int = 0  # numbers per token of keys and values, more than cached with latent attention
    state_numbers: int = 0  # numbers per text, however long it is
    routed_parameters: int = 0  # parameters of experts, of which a token uses some
    routed_fraction: float = 1.0  # the fraction that it uses
    linear_parameters: int = 0  # parameters that four-bit weights replace
    largest_linear: int = 0  # those of the largest matrix of them
    adapters: int = 0  # parameters of adapters on every linear layer, of rank 1 (`ModelShape.adapter_rank`)
    adapted_saved: Saved = ()  # `saved` where only adapters are trained

    @property
    def active_parameters(self) -> int:
        """Parameters that a token passes through."""
        return self.parameters - round(self.routed_parameters * (1 - self.routed_fraction))

    def read_weights(self, rows: int) -> float:
        """Weights of matrix products that one token for each of `rows` completions reads: of experts, those that some row is sent
        to, each row by itself."""
        if not self.routed_parameters:
            return self.matmul_weights
        dense = self.matmul_weights - self.routed_parameters * self.routed_fraction
        return dense + self.routed_parameters * (1 - (1 - self.routed_fraction) ** rows)

    def saved_bytes(self, dtype: str, tokens: float, longest: float, *, only_adapters: bool = False) -> float:
        """Return the bytes that a micro-batch saves, whose longest text has `longest` tokens."""
        table = self.adapted_saved if only_adapters else self.saved
        per_token, per_pair = next((token, pair) for name, token, pair in table if name == dtype)
        return per_token * tokens + (per_pair * tokens * longest if per_pair else 0)

    def cached_numbers(self, length: float, *, attended: bool, bounded: bool) -> float:
        """Return the numbers that a text of this length caches.

        Args:
            attended: Keys and values are cached as layers attend to them.
            bounded: Layers with a window cache that alone.
        """
        tokens = min(length, self.window) if bounded and self.window else length
        return tokens * (self.attended_numbers if attended else self.cache_numbers) + self.state_numbers


class ModelShape:
    """A causal language model: its layers, and the embeddings and the head around them."""

    name: str
    hidden: int
    vocabulary: int
    tied: bool  # the output head shares the embeddings' weights
    source: str  # origin of the figures
    context_length: int | None  # tokens of the longest text that its positions reach
    hub: str  # its id on the hub, if known
    adapter_rank: int
    """Rank of the adapters whose parameters `LayerShape.adapters` counts, and which grow with the rank; 0 = counted for given
    adapters."""

    @property
    def layer_shapes(self) -> tuple[LayerShape, ...]:
        raise NotImplementedError

    @property
    def parameters(self) -> int:
        """All parameters; tied ones count once."""
        raise NotImplementedError

    @property
    def around_parameters(self) -> int:
        """Parameters of embeddings and head, which are gathered beside the layers."""
        raise NotImplementedError

    @property
    def num_layers(self) -> int:
        return sum(layer.count for layer in self.layer_shapes)

    @property
    def head_weights(self) -> int:
        """Weights of the output head."""
        return self.vocabulary * self.hidden

    @property
    def active_parameters(self) -> int:
        """Parameters that a token passes through, embeddings included."""
        return self.parameters - sum(x.count * (x.parameters - x.active_parameters) for x in self.layer_shapes)

    @property
    def largest_layer(self) -> int:
        """Parameters of the largest layer."""
        return max(layer.parameters for layer in self.layer_shapes)

    @property
    def routed_parameters(self) -> int:
        """Parameters of experts, of which a token uses some."""
        return sum(layer.count * layer.routed_parameters for layer in self.layer_shapes)

    @property
    def linear_parameters(self) -> int:
        """Parameters that four-bit weights replace."""
        return sum(layer.count * layer.linear_parameters for layer in self.layer_shapes)

    @property
    def largest_linear(self) -> int:
        """Parameters of the largest matrix that four-bit weights replace, which is unpacked for its product."""
        return max(layer.largest_linear for layer in self.layer_shapes)

    @property
    def has_states(self) -> bool:
        """True if some layer keeps a state of constant size for every text."""
        return any(layer.state_numbers for layer in self.layer_shapes)

    @property
    def windows(self) -> tuple[int, ...]:
        return tuple({layer.window for layer in self.layer_shapes if layer.window})

    def count_adapters(self, rank: int) -> int:
        """Return the parameters of adapters of this rank; of those that were given, whatever the rank."""
        return sum(layer.count * layer.adapters for layer in self.layer_shapes) * (rank if self.adapter_rank else 1)

    def cached_numbers(self, length: float, *, engine: bool) -> float:
        """Return the numbers that a text of this length caches.

        An engine keeps what latent attention compresses, and of a window what it sees. This library's sampler keeps the keys and
        values of all tokens, unless a layer has a state: then it uses transformers' cache.
        """
        compact = engine or self.has_states
        return sum(
            layer.count * layer.cached_numbers(length, attended=not compact, bounded=compact)
            for layer in self.layer_shapes
        )

    def to_dict(self) -> dict[str, Any]:
        """Return its figures for JSON."""
        raise NotImplementedError

    def describe(self) -> str:
        """Describe the size: 8.19B parameters; 35.1B parameters, of which 3.3B are active."""
        active = self.active_parameters
        text = f"{self.parameters:,} parameters"
        return text if active == self.parameters else f"{text}, of which {active:,} are active"


@dataclass(frozen=True)
class DenseShape(ModelShape):
    """A decoder of the Llama family: grouped-query attention, a gated MLP, RMS norms. Its layers follow from its sizes."""

    name: str
    hidden: int
    intermediate: int  # MLP width
    layers: int
    heads: int
    kv_heads: int  # key and value heads
    head_dim: int
    vocabulary: int
    tied: bool = False
    qk_norm: bool = False  # queries and keys are normalised (Qwen3)
    layer_biases: int = 0  # bias parameters per layer
    source: str = ""
    context_length: int | None = None
    hub: str = ""

    adapter_rank = 1

    @property
    def qkv_width(self) -> int:
        """Width of a token's queries, keys and values together."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def layer_matmul_weights(self) -> int:
        """Weights of one layer's matrix products."""
        attention = self.hidden * (self.qkv_width + self.heads * self.head_dim)
        return attention + 3 * self.hidden * self.intermediate

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer."""
        return (
            self.layer_matmul_weights + 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0) + self.layer_biases
        )

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embeddings, and likewise of the output head."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + self.around_parameters + self.hidden

    @property
    def around_parameters(self) -> int:
        return self.embedding_parameters * (1 if self.tied else 2)

    @property
    def cache_numbers_per_token(self) -> int:
        """Numbers per token in the key-value cache."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    @property
    def layer_shapes(self) -> tuple[LayerShape, ...]:
        """One kind. For the backward pass, in transformers' own implementation, a layer keeps a norm's input in float32 and its
        output twice; queries, keys and values (the last two repeated for every head); the attention's output, and that in the order
        of tokens; and the MLP's four intermediates. Queries and keys after a norm are kept by the attention."""
        width = self.heads * self.head_dim
        saved, adapted = list[tuple[str, float, float]](), list[tuple[str, float, float]]()
        for dtype, number in (("bf16", 2), ("fp32", 4)):
            norms = 2 * (4 + 2 * number) * self.hidden
            normed = (4 + number) * (self.heads + self.kv_heads) * self.head_dim if self.qk_norm else 0
            attended = 5 * width * number
            saved.append((dtype, norms + normed + attended + 4 * self.intermediate * number, 0))
            adapted.append((dtype, self._adapted_bytes(number), 0))
        cached = 2 * self.kv_heads * self.head_dim
        layer = LayerShape(
            kind="attention",
            count=self.layers,
            parameters=self.layer_parameters,
            matmul_weights=self.layer_matmul_weights,
            pair_width=width,
            saved=tuple(saved),
            moved_numbers=20 * self.hidden + 8 * self.qkv_width + 5 * self.intermediate,
            cache_numbers=cached,
            attended_numbers=cached,
            linear_parameters=self.layer_matmul_weights,
            largest_linear=self.hidden * max(self.intermediate, width),
            adapters=7 * self.hidden + 2 * width + cached + 3 * self.intermediate,  # the widths of its linear layers
            adapted_saved=tuple(adapted),
        )
        return (layer,)

    def _adapted_bytes(self, number: int) -> int:
        """Return the bytes per token that a layer with adapters of rank 16 saves: no input of a frozen product, but that of each
        adapter, in float32. Fitted to what `saved_activation_bytes` counts on Llama and Qwen3, which it equals."""
        width, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        per_hidden, per_mlp = (28, 10) if number == 2 else (16, 16)
        normed = 4 * (width + keys + self.heads + self.kv_heads) if self.qk_norm else 0
        attention = 4 * (number // 2 + 1) * width + 2 * number * width + 4 * self.heads
        return per_hidden * self.hidden + per_mlp * self.intermediate + attention + normed + 7 * 4 * 16 + 8

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class CountedShape(ModelShape):
    """Any causal language model, whose layers were counted (`policygrad.training.shape_counting`)."""

    name: str
    hidden: int
    vocabulary: int
    tied: bool
    total: int  # parameters
    kinds: tuple[LayerShape, ...]
    model_type: str
    source: str = ""
    context_length: int | None = None
    hub: str = ""
    adapter_rank: int = 1

    @property
    def layer_shapes(self) -> tuple[LayerShape, ...]:
        return self.kinds

    @property
    def parameters(self) -> int:
        return self.total

    @property
    def around_parameters(self) -> int:
        return self.parameters - sum(layer.count * layer.parameters for layer in self.layer_shapes)

    def to_dict(self) -> dict[str, Any]:
        values = asdict(self)
        del values["total"]
        return values | {"layers": self.num_layers}
