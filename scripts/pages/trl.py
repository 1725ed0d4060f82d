"""What docs/from-other-libraries.md shows of `policygrad.trl`: its fields, TRL's own tests, and comparisons with TRL."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from pages.markdown import load
from pages.tables import table
from policygrad.trl.fields import load_table


def trl_fields_block() -> str:
    """Write the tables of fields: honoured, refused, without effect."""
    fields = load_table()
    honoured = [(kind, ", ".join(f"`{name}`" for name in names.split())) for kind, names in fields["honoured"].items()]
    refused = [(f"`{name}`", reason) for name, reason in fields["refused"].items()]
    idle = dict[str, list[str]]()
    for name, reason in fields["idle"].items():
        idle.setdefault(reason, []).append(f"`{name}`")
    rows = [(", ".join(names), reason) for reason, names in idle.items()]
    tables = [
        table(("honoured", "fields"), honoured),
        table(("refused, unless it has its default", "why"), refused),
        table(("accepted, and named in a note", "why it has no effect"), rows),
    ]
    return "\n\n".join(tables)


def trl_tests_block() -> str:
    """Write how many of TRL's test functions pass, and why each of the others does not."""
    found = load("trl-tests")
    if not found:
        return "Not measured yet."
    functions: Sequence[Mapping[str, Any]] = found["functions"]
    files = dict.fromkeys(function["file"] for function in functions)
    counts = {file: Counter(f["outcome"] for f in functions if f["file"] == file) for file in files}
    rows = [
        (f"`{file}`", str(sum(c.values())), str(c["passed"]), str(sum(c.values()) - c["passed"]))
        for file, c in counts.items()
    ]
    why = dict[str, list[str]]()
    for function in functions:
        if function["outcome"] != "passed":
            reasons = dict.fromkeys(function["reasons"].values())
            why.setdefault("; ".join(reasons), []).append(f"`{function['name'].rpartition('.')[2]}`")
    others = [(reason, ", ".join(names)) for reason, names in why.items()]
    summary = (
        f"`make test-trl TRL=CHECKOUT` runs the tests of TRL {found['version']} on models and data sets that are made from "
        f"configurations, with these classes in TRL's place ({found['date']}):"
    )
    head = table(("file", "test functions", "pass", "do not"), rows)
    return f"{summary}\n\n{head}\n\n{table(('why not', 'tests'), others)}"


def trl_numbers_block() -> str:
    """Write how the weights after the same completions compare, and a script that was run with both."""
    found = load("trl")
    if not found:
        return "Not measured yet."
    return f"{_describe_numbers(found)}\n\n{_describe_script(found)}"


def _describe_numbers(found: Mapping[str, Any]) -> str:
    cases: Mapping[str, Any] = found["numbers"]
    plain = [name for name in cases if "LoRA" not in name]
    groups = {
        "each loss type, both levels": [n for n in plain if ", " in n and not n.startswith("RLOO")],
        "what else changes the loss": [n for n in plain if ", " not in n and not n.startswith("RLOO")],
        "RLOO": [n for n in plain if n.startswith("RLOO")],
        "with adapters": [n for n in cases if n not in plain],
    }
    rows = list[tuple[str, ...]]()
    for name, members in groups.items():
        cells = [name, str(len(members))]
        for optimizer, field in (("sgd", "gradients"), ("sgd", "weights"), ("adamw", "weights")):
            shares = sorted(cases[member][optimizer][field] for member in members)
            cells.append(f"{statistics.median(shares):.0e} ({shares[-1]:.0e})")
        rows.append(tuple(cells))
    text = (
        f"`scripts/measure_trl.py` trains with TRL {found['trl']} and with these trainers, from the same weights on the same "
        "completions, two optimizer steps on one generation, in float32 on one thread. Gradients (of both steps, as a share of the "
        "largest one) and weights (as a share of the largest change of one) differ by rounding: a weight near 1 is rounded to "
        "6e-8, and AdamW's step is g/(|g| + 1e-8) at first, so that a weight with a gradient of about 1e-8 moves by what was "
        "rounded. "
        "Median of the configurations, and the largest:"
    )
    columns = ("", "configurations", "gradients", "weights, plain gradient steps", "weights, AdamW")
    return f"{text}\n\n{table(columns, rows)}"


def _describe_script(found: Mapping[str, Any]) -> str:
    script: Mapping[str, Any] = found["script"]

    def describe(name: str, field: str) -> str:
        values = [run[field] for run in script[name]]
        deviation = f" ± {statistics.stdev(values):.3g}" if len(values) > 1 else ""
        return f"{statistics.fmean(values):.3g}{deviation}"

    fields = {
        "CPU seconds of `train()`": "cpu_seconds",
        "peak memory, MiB": "peak_mib",
        "held-out reward before": "before",
        "after": "after",
    }
    rows = [(label, describe("trl", name), describe("policygrad", name)) for label, name in fields.items()]
    text = (
        f"A script (`benchmarks/trl_script.py`: {script['steps']} optimizer steps of 128 completions, 0.7M parameters, "
        f"{len(script['trl'])} seeds; mean ± standard deviation) with both:"
    )
    return f"{text}\n\n{table(('', 'TRL', '`policygrad.trl`'), rows)}"
