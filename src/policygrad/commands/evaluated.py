"""What `policygrad eval` has measured: as one JSON object, as a table, and every completion as a line of a file."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

from policygrad.compare.statistics import LEVEL, Estimate, paired_difference
from policygrad.errors import ConfigError
from policygrad.rollout.evaluation import EvaluationResult
from policygrad.trackers.jsonl import writing
from policygrad.trackers.words import number, one_line

SAMPLES, REPORT = "samples.jsonl", "eval.json"
_KS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
Found = Mapping[str, EvaluationResult]
"""By the model's name, in the order of the command; all of the same problems."""


def report(task: str, held_out: str | None, samples: int, threshold: float, found: Found) -> dict[str, Any]:
    """What --json prints: of one model its numbers; of several a list of those, and the first model less each other.

    held_out: the file whose problems were measured; None = a part of the task itself."""
    data = {"task": task, "held_out": held_out}
    rows = [_row(model, data, samples, threshold, outcome) for model, outcome in found.items()]
    if note := _unreachable_threshold(threshold, found):
        rows[0]["notes"].append(note)
    if len(rows) == 1:
        return rows[0]
    first, *others = found
    differences = [_difference(first, other, samples, threshold, found) for other in others]
    return {"models": rows, "differences": differences, "level": LEVEL}


def _row(
    model: str, data: Mapping[str, str | None], samples: int, threshold: float, outcome: EvaluationResult
) -> dict[str, Any]:
    return {
        "model": model,
        **data,
        "problems": len(outcome.problems),
        "samples": samples,
        "mean": outcome.mean,
        "stderr": outcome.standard_error(),
        "pass": {str(k): outcome.pass_at(k, threshold) for k in _ks(samples)},
        "majority": outcome.majority,
        "failed": outcome.failed,
        "truncated": outcome.truncated,
        "tokens": outcome.tokens,
        "notes": list(outcome.messages),
    }


def _unreachable_threshold(threshold: float, found: Found) -> str:
    """A note where scores are positive but none reaches the threshold, as with a reward whose maximum lies below it; else ""."""
    scores = [
        s.score for outcome in found.values() for problem in outcome.problems for s in problem if s.score is not None
    ]
    highest = max(scores, default=0.0)
    if not 0 < highest < threshold:
        return ""
    return (
        f"pass@k counts scores of at least {number(threshold)}, and the highest score was {number(highest)}: if the reward "
        "cannot give more, pass@k is always 0. Set --threshold to the lowest score that counts as correct"
    )


def _difference(first: str, other: str, samples: int, threshold: float, found: Found) -> dict[str, Any]:
    a, b = found[first], found[other]
    passes = {str(k): _plain(paired_difference(a.passes(k, threshold), b.passes(k, threshold))) for k in _ks(samples)}
    mean, majority = paired_difference(a.means, b.means), paired_difference(a.majorities, b.majorities)
    return {"model": first, "less": other, "mean": _plain(mean), "pass": passes, "majority": _plain(majority)}


def _plain(found: Estimate) -> dict[str, float]:
    return {"value": found.value, "low": found.low, "high": found.high}


def _ks(samples: int) -> list[int]:
    return [k for k in _KS if k < samples] + [samples]


def print_table(told: Mapping[str, Any], found: Found, show: int, *, as_json: bool) -> None:
    """The report on standard output, and what went wrong with rewards on standard error."""
    if as_json:
        print(json.dumps(told, ensure_ascii=False))
        return
    rows = told.get("models", [told])
    first = rows[0]
    names = ", ".join(row["model"] for row in rows)
    data = first["held_out"] or first["task"]
    print(f"{names} on {data}: {first['problems']} problems × {first['samples']} samples\n")
    if len(rows) == 1:
        _print_one(first, found[first["model"]], show)
    else:
        _print_several(told, found, show)
    for message in dict.fromkeys(note for row in rows for note in row["notes"]):
        print(f"note: {message}", file=sys.stderr)


def _print_one(row: Mapping[str, Any], outcome: EvaluationResult, show: int) -> None:
    print(f"  mean@{row['samples']:<4} {row['mean']:.4f} ± {row['stderr']:.4f} (standard error over problems)")
    for k, value in row["pass"].items():
        print(f"  pass@{k:<4} {value:.4f}")
    print(f"  maj@{row['samples']:<5} {row['majority']:.4f}")
    print(f"  {_lost(row)}")
    if show > 0:
        print()
    for problem in outcome.problems[: max(0, show)]:
        print(f"  {number(problem[0].score):>5}  {one_line(problem[0].text, 70)}")


def _print_several(told: Mapping[str, Any], found: Found, show: int) -> None:
    rows, differences = told["models"], told["differences"]
    k, ks = rows[0]["samples"], list(rows[0]["pass"])
    lines = [["", f"mean@{k}", *(f"pass@{each}" for each in ks), f"maj@{k}"]]
    lines += [
        [row["model"], *(f"{x:.4f}" for x in (row["mean"], *row["pass"].values(), row["majority"]))] for row in rows
    ]
    _print_columns(lines)
    for said in differences:
        print(f"\n{said['model']} − {said['less']}, {told['level']:.0%} bootstrap intervals over the same problems:")
        named = {
            f"mean@{k}": said["mean"],
            **{f"pass@{each}": said["pass"][each] for each in ks},
            f"maj@{k}": said["majority"],
        }
        for name, x in named.items():
            apart = "" if x["low"] <= 0 <= x["high"] else "  apart from 0"
            print(f"  {name:<9} {x['value']:+.4f} [{x['low']:+.4f}, {x['high']:+.4f}]{apart}")
    print()
    for row in rows:
        print(f"  {row['model']}: {_lost(row)}")
    for i in range(max(0, show)):
        for model, outcome in found.items():
            for sample in outcome.problems[i][:1] if i < len(outcome.problems) else ():
                print(f"  {number(sample.score):>5}  {one_line(model, 24)}: {one_line(sample.text, 60)}")


def _print_columns(lines: list[list[str]]) -> None:
    widths = [max(map(len, column)) for column in zip_longest(*lines, fillvalue="")]
    for line in lines:
        name, *cells = (
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        print("  " + "  ".join([name, *cells]).rstrip())


def _lost(row: Mapping[str, Any]) -> str:
    total = row["problems"] * row["samples"]
    return f"cut off by the budget {row['truncated']}, without a reward {row['failed']}, of {total} completions"


def writable_folder(output: str) -> Path:
    """The folder, made now so that it is said before the work and not after it. Raises ConfigError for one with files in it."""
    folder = Path(output)
    with writing(folder, folder):
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigError(f"{folder} is not empty: choose another --output")
    return folder


def save(folder: Path, told: Mapping[str, Any], found: Found) -> None:
    """The report, and one JSON line for every completion: model, problem, prompt, what it was worth by which reward.

    Raises:
        RunError: what cannot be written.
    """
    with writing(folder / REPORT, folder):
        (folder / REPORT).write_text(json.dumps(told, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        with (folder / SAMPLES).open("w", encoding="utf-8", errors="backslashreplace") as file:
            for model, outcome in found.items():
                file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in _lines(model, outcome))


def _lines(model: str, outcome: EvaluationResult) -> list[dict[str, Any]]:
    return [
        {
            "model": model,
            "problem": i,
            "sample": j,
            "prompt": prompt,
            "completion": sample.text,
            "reward": sample.reward,
            "rewards": dict(sample.rewards),
            "answer": sample.answer,
            "tokens": sample.tokens,
            "truncated": sample.truncated,
        }
        for i, (prompt, row) in enumerate(zip(outcome.prompts, outcome.problems, strict=True))
        for j, sample in enumerate(row)
    ]
