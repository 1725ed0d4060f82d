"""The table and the figure of docs/memory.md, measured by scripts/measure_lengths.py."""

from __future__ import annotations

from collections.abc import Iterator

from measure_lengths import COMMON, GROUP, GROUP_WAYS, MICRO_TOKENS, SHAPES, TRL, WAYS

from pages.markdown import Data, load, table
from policygrad.pages.charts import chart

LARGE, SMALL = SHAPES
KIB = 1024


def lengths_block(report: Data | None = None) -> str:
    """Write memory and CPU seconds by length and way, and those of the group."""
    report = load("lengths") if report is None else report
    if report is None:
        return "Not measured yet: `python scripts/measure_lengths.py` runs it, and `make docs` writes this."
    rows = {(row["way"], row["shape"], row["length"]): row for row in report["rows"]}
    lengths = sorted({length for _, shape, length in rows if shape == LARGE and length})
    ways = [way for way in (*WAYS, TRL) if any((way, LARGE, length) in rows for length in lengths)]
    cells = ([way, *(_cell(rows.get((way, LARGE, length))) for length in lengths)] for way in ways)
    parts = [
        f"One update on one text, {LARGE}, vocabulary {COMMON['vocab_size']:,}, float32, AdamW, one thread; in segments of "
        f"{MICRO_TOKENS:,} tokens (`--learner.micro-tokens`). The most memory that the process held, and CPU seconds:",
        table(("tokens", *(f"{length:,}" for length in lengths)), cells),
        _describe_growth(rows, lengths),
        f"![Memory over length, in segments and otherwise]({FIGURE})",
    ]
    group = [(way, rows[way, LARGE, 0]) for way in GROUP_WAYS if (way, LARGE, 0) in rows]
    if group:
        parts += [
            f"A group of {GROUP['samples']} completions of {GROUP['completion']} tokens after a prompt of {GROUP['prompt']:,}:",
            table(("read", "memory and CPU seconds"), ((way, _cell(row)) for way, row in group)),
        ]
    small = [(way, length, row) for (way, shape, length), row in rows.items() if shape == SMALL]
    if small:
        cells = ((f"{way}, {length:,} tokens", _cell(row)) for way, length, row in small)
        parts += [f"{SMALL.capitalize()}:", table(("read", "memory and CPU seconds"), cells)]
    versions = report["versions"]
    beside = f", TRL {versions['trl']} on its defaults" if "trl" in versions else ""
    parts.append(
        f"`python scripts/measure_lengths.py` (torch {versions['torch']}, transformers {versions['transformers']}{beside}), on a "
        "shared machine: seconds of single runs. Memory holds Python and its libraries, about 250 MiB, and what the C library's "
        "allocator keeps. *Recomputed* is gradient checkpointing; transformers computes all logits of a text at once, ours some "
        "at a time."
    )
    return "\n\n".join(parts)


FIGURE = "memory.svg"


def lengths_figure(report: Data | None = None) -> str | None:
    """Draw memory over length; None if nothing was measured."""
    report = load("lengths") if report is None else report
    if report is None:
        return None
    rows = {(row["way"], row["length"]): row for row in report["rows"] if row["shape"] == LARGE and row["length"]}
    lengths = sorted({length for _, length in rows})
    ways = [way for way in (*WAYS, TRL) if any((way, length) in rows for length in lengths)]
    lines = [
        {"series": i, "values": [_gib(rows.get((way, length))) for length in lengths]} for i, way in enumerate(ways)
    ]
    x = {
        "label": "tokens of the text, in thousands",
        "values": [n / 1000 for n in lengths],
        "log": False,
        "low": 0.0,
        "high": None,
    }
    panel = {"label": "GiB of the process", "log": False, "low": 0.0, "high": None, "lines": lines}
    return chart(
        "Memory of one update over the length of its text", {"x": x, "series": ways, "panels": [panel]}, width=640
    )


def _cell(row: Data | None) -> str:
    if row is None:
        return ""
    if "failed" in row:
        return "failed"
    return f"{row['MiB'] / KIB:.2f} GiB, {row['seconds']:.0f} s"


def _gib(row: Data | None) -> float | None:
    return row["MiB"] / KIB if row is not None and "MiB" in row else None


def _describe_growth(rows: Data, lengths: list[int]) -> str:
    """Say how tensors grow with length in segments."""
    counted = [
        (n, rows["segments", LARGE, n]["tensors"]) for n in lengths if "tensors" in rows.get(("segments", LARGE, n), {})
    ]
    if len(counted) < 2:
        return ""
    listed = ", ".join(f"{tensors / KIB:.2f} GiB for {n:,}" for n, tensors in counted)
    (short, less), (long, more) = [pair for pair in counted if pair[0] > MICRO_TOKENS][:1] + counted[-1:]
    kept = ", ".join(_kept_bytes())
    return (
        f"Tensors alive at a time in segments: {listed}; from {short:,} to {long:,} tokens "
        f"{(more - less) * KIB / (long - short):.1f} KiB for each ({kept})."
    )


def _kept_bytes() -> Iterator[str]:
    """What a further token keeps in float32."""
    layers, width = SHAPES[LARGE]["num_hidden_layers"], COMMON["num_key_value_heads"] * COMMON["head_dim"]
    yield f"keys, values and their gradients {layers * 2 * width * 4 * 2 // KIB}"
    yield f"states and theirs {SHAPES[LARGE]['hidden_size'] * 4 * 2 // KIB}"
