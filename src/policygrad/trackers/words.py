"""Metrics, numbers, times and samples as short text that is safe to print."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Callable, Mapping


def number(value: float, digits: int = 2) -> str:
    """Short and of steady width: 0.41, 0.003, 2.1e-05, 14.2, 1,024."""
    if not math.isfinite(value):
        return str(float(value))
    size = abs(value)
    if size >= 100:
        return f"{value:,.0f}" if size < 1e7 else f"{value:.1e}"
    if size == 0 or size >= 0.095:
        return f"{value:.{1 if size >= 10 else digits}f}"
    return f"{value:.3f}" if size >= 0.00095 else f"{value:.0e}"


def count(value: float) -> str:
    """812, 2.1k, 21k, 3.4M."""
    if not math.isfinite(value):
        return str(float(value))
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if value >= 0.9995 * size:
            return f"{value / size:.{1 if value < 9.95 * size else 0}f}{unit}"
    return f"{value:.0f}"


def duration(seconds: float) -> str:
    """8s, 1m40s, 2h05m, 3d04h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole // 60 % 60:02}m"
    return f"{whole // 86400}d{whole // 3600 % 24:02}h"


def change(before: float, after: float, digits: int = 2) -> str:
    """`0.31 -> 0.74  (+0.43)`, for a summary."""
    return f"{before:.{digits}f} -> {after:.{digits}f}  ({after - before:+.{digits}f})"


FIELDS: tuple[tuple[str, str, Callable[[float], str]], ...] = (  # metric, label, how it is written
    ("reward", "reward", number),
    ("loss", "loss", lambda x: number(x, 3)),
    ("accuracy", "accuracy", number),
    ("margin", "margin", number),
    ("teacher/kl", "teacher kl", number),
    ("kl", "kl", number),
    ("entropy", "entropy", number),
    ("completions/mean_length", "length", lambda x: number(x, 1)),
    ("tokens_per_second", "tok/s", count),
    ("grad_norm", "grad", number),
    ("completions/truncated_ratio", "cut off", lambda x: f"{x:.0%}"),
    ("frac_reward_zero_std", "no spread", lambda x: f"{x:.0%}"),
    ("clip_ratio/high", "clip high", lambda x: f"{x:.1%}"),
    ("clip_ratio/low", "clip low", lambda x: f"{x:.1%}"),
)


def shown(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """(label, value) of the metrics that are there, the most telling first."""
    return [(label, write(float(metrics[name]))) for name, label, write in FIELDS if metrics.get(name) is not None]


def described(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """(label, words) for a line of text: what was learned and how fast, and how many completions were cut off, if any were."""
    named = dict(shown(metrics))
    if named.get("cut off") == "0%":
        named.pop("cut off", None)
    keys = ("reward", "loss", "accuracy", "margin", "teacher kl", "kl", "entropy", "length", "tok/s", "cut off")
    return [(k, f"{named[k]} {k}" if k in ("tok/s", "cut off") else f"{k} {named[k]}") for k in keys if k in named]


def clean(text: str) -> str:
    """Safe to print and of known width: control characters become visible, so a completion cannot steer the terminal."""
    out = []
    for char in text.replace("\r\n", "\n").replace("\ufe0f", "").expandtabs(4):
        kind = unicodedata.category(char)
        if char == "\n" or kind[0] != "C":
            out.append("\n" if kind in ("Zl", "Zp") else char)
        elif ord(char) < 32:
            out.append(chr(0x2400 + ord(char)))
        elif kind != "Cf":  # formats (those that reverse a line or join emoji, of unknown width) are left out
            out.append("\ufffd")
    return "".join(out)


def one_line(text: str, width: int = 120) -> str:
    """The text on one line, its middle left out when it is longer than `width` characters: the answer is at the end."""
    flat = text.strip().replace("\n", "\\n")
    return flat if len(flat) <= width else f"{flat[: width // 2]} ... {flat[-width // 2 :]}"
