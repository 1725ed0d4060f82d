"""The works that both sides do: which model, how many prompts and completions, how long these are."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

OURS, THEIRS = "policygrad", "trl"
GSM8K = "gsm8k/test.jsonl"
"""In the folder of data."""
SIDES = ("trl-fp32", "policygrad-fp32", "trl-bf16", "policygrad-bf16")
"""Library and number format."""


@dataclass(frozen=True)
class Shape:
    """A Qwen3 of random weights, embeddings tied."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int


SEVEN = Shape(256, 768, 6, 4, 2, 64, 8192)
TWENTY_FIVE = Shape(384, 1152, 8, 6, 2, 64, 32768)
SMALL = Shape(64, 128, 2, 2, 1, 32, 512)
"""For `--quick`."""


@dataclass(frozen=True)
class Work:
    """One optimiser step after another on fresh rollouts, Dr. GRPO without KL."""

    name: str
    title: str
    shape: Shape | None
    """None = the base model inside the package, on its own task."""
    prompts: int
    """Per step."""
    samples: int
    """G, completions per prompt."""
    max_tokens: int
    """Of a completion, and of each turn of a conversation."""
    lengths: tuple[int, ...] | None = None
    """Tokens of the completions, in turn and from the beginning again, whatever is sampled; None = the model ends them."""
    lr: float = 1e-5
    steps: int = 2
    """Measured ones; one more goes before."""
    sides: tuple[str, ...] = ("trl-fp32", "policygrad-fp32")
    grid: tuple[int, ...] = ()
    """Micro-batches among which TRL's best is looked for, in completions."""
    keep: int = 0
    """Steps between the weights that are kept, to be measured on held-out problems afterwards; 0 = none are."""
    prompt_tokens: int = 0
    """Tokens of each prompt, questions one after another; 0 = one question each."""
    turns: int = 1
    """Of a conversation; the policy samples in each."""
    observation_tokens: int = 0
    """What a conversation's environment answers after every turn but the last."""
    scale: int = 0
    """How many times the smallest of its series, for the works that show how time grows; 0 = no such work."""

    @property
    def completions(self) -> int:
        """Per step."""
        return self.prompts * self.samples

    def tokens(self) -> int | None:
        """Sampled per step, where that is known beforehand."""
        if self.lengths is None:
            return None
        return self.turns * sum(self.lengths[i % len(self.lengths)] for i in range(self.completions))

    @property
    def observed(self) -> int:
        """Tokens of all of a conversation's observations."""
        return (self.turns - 1) * self.observation_tokens

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def from_dict(values: dict[str, Any]) -> Work:
    """The work of `Work.as_dict`, also after a journey through JSON."""
    lists = {name: tuple(values[name]) for name in ("sides", "grid")}
    lengths = None if values["lengths"] is None else tuple(values["lengths"])
    shape = None if values["shape"] is None else Shape(**values["shape"])
    return Work(**{**values, **lists, "lengths": lengths, "shape": shape})


def geometric(first: int, last: int, count: int) -> tuple[int, ...]:
    """`count` lengths in equal ratios from first to last, in an order in which short and long ones alternate."""
    lengths = [round(first * (last / first) ** (i / (count - 1))) for i in range(count)]
    stride = next(s for s in range(round(count * 0.618), count + 2) if math.gcd(s, count) == 1)
    return tuple(lengths[i * stride % count] for i in range(count))


def _shaped(name: str, shape: Shape, prompts: int, length: int, **more: Any) -> Work:
    """Eight completions a prompt, all of one length."""
    vocabulary, size = f"{shape.vocabulary:,}", name.upper()
    return Work(
        name,
        f"{size} parameters, vocabulary {vocabulary}, {length} tokens",
        shape,
        prompts,
        8,
        length,
        (length,),
        **more,
    )


def _linear(scale: int) -> Work:
    """One of the series that shows how time grows with the tokens of a step."""
    title = f"{2 * scale} × 8 completions of 252 tokens"
    return Work(
        f"linear-{scale}", title, SEVEN, 2 * scale, 8, 252, (252,), sides=("policygrad-fp32",), grid=_GRID, scale=scale
    )


_BOTH = ("trl-fp32", "policygrad-fp32", "policygrad-bf16")
_GRID = (4, 8, 16, 32)
WORKS = (
    Work(
        "embedded", "the embedded task, at most 32 tokens", None, 64, 8, 32, lr=1e-3, steps=5, grid=(64, 128, 256, 512)
    ),
    _shaped("7m", SEVEN, 16, 252, sides=_BOTH, grid=_GRID),
    _shaped("25m", TWENTY_FIVE, 8, 252, sides=_BOTH, grid=_GRID),
    Work(
        "geometric",
        "7M parameters, 16 to 1,024 tokens",
        SEVEN,
        16,
        8,
        1024,
        geometric(16, 1024, 128),
        steps=1,
        grid=_GRID,
    ),
    Work(
        "long-prompt",
        "7M parameters, groups of 8 over a prompt of 2,000 tokens, 128 tokens each",
        SEVEN,
        4,
        8,
        128,
        (128,),
        prompt_tokens=2_000,
        grid=(2, 4, 8),
    ),
    Work(
        "conversations",
        "7M parameters, conversations of eight turns",
        SEVEN,
        4,
        8,
        32,
        (32,),
        turns=8,
        observation_tokens=64,
        grid=(8, 16),
    ),
    Work(
        "learning",
        "learning the embedded task",
        None,
        64,
        8,
        32,
        lr=1e-3,
        steps=47,
        keep=4,
        sides=_BOTH,
        grid=(64, 128, 256, 512),
    ),
    *map(_linear, (1, 2, 4, 8, 16)),
)


def quick(work: Work) -> Work:
    """The same in small, to see that everything works: its figures say nothing."""
    lengths = None if work.lengths is None else tuple(max(2, n // 16) for n in work.lengths)
    prompts, samples = max(1, work.prompts // 4), 4
    return replace(
        work,
        shape=None if work.shape is None else replace(SMALL, vocabulary=min(work.shape.vocabulary, 1024)),
        prompts=prompts,
        samples=samples,
        max_tokens=work.max_tokens if lengths is None else max(lengths),
        lengths=lengths,
        prompt_tokens=work.prompt_tokens // 16,
        turns=min(work.turns, 3),
        observation_tokens=work.observation_tokens // 16,
        steps=1,
        keep=min(work.keep, 1),
        grid=(samples, prompts * samples) if work.grid else (),
    )


def part_of(work: Work) -> Work:
    """A quarter of its prompts, on which micro-batches are compared: each is as large as it would be, there are only fewer."""
    least = max(work.grid) // work.samples
    return replace(work, prompts=min(work.prompts, max(work.prompts // 4, least)), steps=1, keep=0)


def chosen(only: list[str]) -> tuple[Work, ...]:
    """The works that are named, in their order; all where none is."""
    return tuple(w for w in WORKS if not only or w.name in only or (w.scale and "linear" in only))
