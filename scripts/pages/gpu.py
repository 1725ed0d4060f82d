"""The tables of docs/gpu.md, made from docs/results/gpu.json: each row with the date and the card."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from gpu_record import digest_code

from pages.markdown import load, table

LEARNERS = {
    "learner 16k": ("0.6B, texts of 16,384", "–"),
    "learner 16k compiled": ("0.6B, texts of 16,384", "compile"),
    "learner 16k recomputed": ("0.6B, texts of 16,384", "gradient-checkpointing"),
    "learner 16k recomputed, compiled": ("0.6B, texts of 16,384", "gradient-checkpointing, compile"),
    "learner 64k recomputed": ("0.6B, texts of 65,536", "gradient-checkpointing"),
    "learner groups, sdpa": ("0.6B, 4 groups of 8: 2,048 tokens shared, 1,024 each", "attention sdpa"),
    "learner groups": ("0.6B, 4 groups of 8: 2,048 tokens shared, 1,024 each", "–"),
    "learner groups, compiled": ("0.6B, 4 groups of 8: 2,048 tokens shared, 1,024 each", "compile"),
    "learner 4B LoRA 16k recomputed": ("4B, texts of 16,384", "gradient-checkpointing, lora rank=16"),
    "learner 4B LoRA 16k recomputed, compiled": (
        "4B, texts of 16,384",
        "gradient-checkpointing, compile, lora rank=16",
    ),
}
LONGEST_CELL = 600
"""Characters of a part's result on the page."""
Describe = Callable[[dict[str, Any]], str]
CHECKS: list[tuple[str, str, str, Describe]] = [
    ("algorithms", "one update of each algorithm, weights and moments, in float64", "the CPU in float64",
     lambda r: f"{r['algorithms']} algorithms, {r['cuda float64']['error']:.1e} of the largest number"),
    ("algorithms", "the same in float32", "the CPU in float64",
     lambda r: f"{r['cuda float32']['error']:.1e} ({r['cuda float32']['algorithm']})"),
    *(
        ("packing", f"gradient of texts that share prefixes, {dtype}, {name}", "float64, text by text, on the CPU",
         lambda r, key=f"{dtype} {kernel}": f"{r[key]['gradient']:.1e} of its norm")
        for dtype in ("fp32", "bf16")
        for kernel, name in (("flex", "FlexAttention"), ("sdpa", "sdpa"), ("texts", "text by text"))
    ),
    ("head", "log π and entropy of 151,936 tokens without a table, bf16", "the table in float64",
     lambda r: f"{r['bfloat16']['logp']:.1e}, {r['bfloat16']['entropy']:.1e} of their norms"),
    ("sampler", "32 completions of the embedded model, fp32", "the CPU's", lambda r: _sampled(r["cuda fp32"])),
    ("sampler", "the same in bf16", "the CPU's in fp32", lambda r: _sampled(r["cuda bf16"])),
    ("decoding ahead", "completions by CUDA graphs", "without", lambda r: f"{r['same completions']} equal"),
    ("conversations", "turns that read only what is new", "turns that read everything", lambda r: f"{r['same turns']} equal"),
    ("resume", "the update after a checkpoint (grpo, ppo), fp32", "without the interruption", lambda r: r["grpo"]),
]  # fmt: skip
"""Part, what is compared, with what, and the difference in words."""


def seen_block() -> str:
    """Write all tables. Parts that no table has are rows of the last one."""
    import measure_gpu

    parts = load("gpu")["parts"]
    shown = {"device", "decoding", "decoding without graphs", "default run", *LEARNERS, *(row[0] for row in CHECKS)}
    checks = [(what, other, _tell(parts, part, text), _when(parts, part)) for part, what, other, text in CHECKS]
    learners = [
        (*words, *(_tell(parts, name, text) for text in (_rate, _mfu, _peak)), _when(parts, name))
        for name, words in LEARNERS.items()
    ]
    others = [
        (name, _shorten(_tell(parts, name, lambda r: measure_gpu.describe({"result": r}))), _when(parts, name))
        for name in measure_gpu.PARTS
        if name not in shown
    ]
    return "\n\n".join(
        [
            f"Device: {_tell(parts, 'device', _device)} ({_when(parts, 'device')}).",
            "## Equality",
            table(("what", "compared with", "largest difference", "measured"), checks),
            "## Learning",
            "One update (forward, backward, AdamW) in bf16. MFU is by 6 · (parameters + layers · heads · width · length) "
            "operations per token over the published rate of the device, whatever is recomputed or frozen.",
            table(("texts", "`--learner.` options", "tokens/s", "MFU", "peak GiB", "measured"), learners),
            "prime-rl reports 11,900 tokens/s (11.1 %, 12.5 GiB) for the 0.6B at 16,384 tokens and 10,150 (26.8 %, 19.6 GiB) at "
            "65,536, on one H100 with recomputation and FlashAttention 3, the writing of weights for an engine included "
            "([sources](large-runs.md#sources)). The H200 has the H100's arithmetic and 1.4 times its memory bandwidth; "
            "precision of the optimizer, data and loss differ too.",
            "## Sampling in this process",
            "0.6B in bf16, prompts of 256 tokens for 8 completions each, 256 tokens drawn:",
            table(
                ("completions at once", "tokens/s", "without CUDA graphs", "ms a token", "measured"), _decoding(parts)
            ),
            "## The default run",
            f"`policygrad train`: {_tell(parts, 'default run', _default)} ({_when(parts, 'default run')}).",
            "## Other parts",
            "By the names of `--parts`; whole results are in docs/results/gpu.json.",
            table(("part", "result", "measured"), others),
        ]
    )


def _tell(parts: dict[str, Any], name: str, text: Describe) -> str:
    """Return a result in words; why there is none where it failed, a dash where it was not run."""
    outcome = parts.get(name)
    if outcome is None:
        return "–"
    if "result" not in outcome:
        return f"failed: {_in_cell(outcome['error'])[:160]}"
    result = outcome["result"]
    return _in_cell(f"left out: {result['left out']}" if "left out" in result else text(result))


def _shorten(text: str) -> str:
    return text if len(text) <= LONGEST_CELL else f"{text[:LONGEST_CELL].rpartition(';')[0]}; …"


def _in_cell(text: str) -> str:
    """Return text that ends no cell of a table."""
    return re.sub(r"[|`\s]+", " ", text)


def _when(parts: dict[str, Any], name: str) -> str:
    """Return the date and the card of a part, and whether its code has changed since."""
    outcome = parts.get(name)
    if outcome is None:
        return "not run yet"
    changed = "" if outcome["code"] == digest_code(name) else "; code changed since"
    return f"{outcome['date']}, {outcome['device'].removeprefix('NVIDIA ')}{changed}"


def _decoding(parts: dict[str, Any]) -> list[tuple[str, ...]]:
    graphs, plain = (parts.get(name, {}).get("result", {}) for name in ("decoding", "decoding without graphs"))
    return [
        (
            rows.removesuffix(" rows"),
            f"{found['tokens/s']:,.0f}",
            f"{plain[rows]['tokens/s']:,.0f}" if rows in plain else "–",
            f"{found['ms per token']:.1f}",
            _when(parts, "decoding"),
        )
        for rows, found in graphs.items()
    ] or [("–", "–", "–", "–", _when(parts, "decoding"))]


def _sampled(result: dict[str, Any]) -> str:
    return f"{result['completions as on the CPU']} equal; {result['nats from the learner']:.1e} nats from the learner"


def _rate(result: dict[str, Any]) -> str:
    return f"{result['text tokens/s']:,.0f}"


def _mfu(result: dict[str, Any]) -> str:
    return f"{result['MFU']:.0%}" if "MFU" in result else "–"


def _peak(result: dict[str, Any]) -> str:
    return f"{result['peak GiB']:.1f}" if "peak GiB" in result else "–"


def _device(result: dict[str, Any]) -> str:
    return f"{result['bf16 Tflop/s']:.0f} Tflop/s of a bare bf16 matrix product, {result['GB/s']:,.0f} GB/s of a copy"


def _default(result: dict[str, Any]) -> str:
    return (
        f"{result['seconds of training']:.0f} s of training, {result['seconds of the command']:.0f} s for the command; held out "
        f"{result['held out before']:.2f} → {result['held out after']:.2f}. The embedded model is too small to gain from a GPU"
    )
