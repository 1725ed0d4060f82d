"""The subcommands: from words to a configuration, and from results to words. tyro is used here and nowhere else but config."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, make_dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from policygrad.algorithms import ABOUT, ALGORITHMS, algorithm
from policygrad.core.algorithm import Algorithm
from policygrad.rollout.types import Sampling
from policygrad.training.config import Options, Run
from policygrad.training.toml import ConfigError, dumps, from_dict, load

Command = Callable[[list[str]], int]
_FLAT = tyro.conf.arg(name="")
TRAIN_HELP = f"""Train a causal language model by policy gradient.

ALGORITHM is one of {", ".join(ALGORITHMS)} (default grpo); every field of its parts is an option below, and
--algorithm.FIELD Part[,Part] puts other parts in their place, e.g. --algorithm.gate WeightCap or --algorithm.psi GroupMean."""
_SINGLE = (tyro.conf.FlagCreatePairsOff, tyro.conf.AvoidSubcommands)


@dataclass(frozen=True)
class TrainOptions:
    """Options of `policygrad train` that are not part of the run itself."""

    config: str | None = None
    """A TOML file of options; flags given here win over it."""
    resume: str | None = None
    """Go on with the run in this folder, from its newest intact checkpoint."""
    stop_after: int | None = None
    """Stop, resumably, after so many steps."""
    dry_run: bool = False
    """Print the resolved configuration and the algorithm's equation; load no model."""
    plain: bool = False
    """Plain lines, also on a terminal."""


def train(args: list[str]) -> int:
    """`policygrad train [ALGORITHM] [options]`."""
    name, args = (args[0], args[1:]) if args and not args[0].startswith("-") else (None, args)
    base = _base(name, args)
    chosen, args = _choose_parts(base.algorithm, args)
    kind = _option_type(chosen)

    shape = make_dataclass(
        "Train",
        [("run", Annotated[Options, _FLAT]), ("command", Annotated[TrainOptions, _FLAT]), ("algorithm", kind)],
        frozen=True,
    )
    defaults = {f.name: getattr(base, f.name) for f in fields(Options)}
    parsed = tyro.cli(
        shape,
        args=args,
        prog="policygrad train [ALGORITHM]",
        description=TRAIN_HELP,
        default=shape(Options(**defaults), TrainOptions(), kind()),
        config=_SINGLE,
    )
    options = {f.name: getattr(parsed.run, f.name) for f in fields(Options)}
    run = Run(**options, algorithm=_from_options(chosen, parsed.algorithm))
    if parsed.command.dry_run:
        print(dumps(run.resolved()).rstrip(), describe(run.resolved().algorithm), sep="\n\n")
        return 0
    from policygrad.track import make_display
    from policygrad.training.session import train as start

    start(
        run,
        resume=parsed.command.resume,
        stop_after=parsed.command.stop_after,
        display=make_display(plain=parsed.command.plain or None),
    )
    return 0


def _flag(args: Sequence[str], name: str) -> str | None:
    """The value of a flag that has to be known before the others can be read."""
    for i, word in enumerate(args):
        if word == name and i + 1 < len(args):
            return args[i + 1]
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
    return None


def _base(name: str | None, args: Sequence[str]) -> Run:
    """Defaults < the run to resume < the TOML file < the algorithm named."""
    run = Run()
    resumed, config = _flag(args, "--resume"), _flag(args, "--config")
    if resumed is not None:
        path = Path(resumed) / "run.toml"
        if not path.is_file():
            raise ConfigError(f"--resume {resumed}: not a run's folder, it has no run.toml")
        run = load(path, run)
    if config is not None:
        run = load(config, run)
    return run if name is None else replace(run, algorithm=algorithm(name))


def _choose_parts(base: Algorithm, args: list[str]) -> tuple[Algorithm, list[str]]:
    """Takes `--algorithm.FIELD Part[,Part…]` out of the arguments: another part in its place, `none` for no part."""
    rest: list[str] = []
    changes: dict[str, Any] = {}
    names = {f.name: getattr(base, f.name) for f in fields(Algorithm) if f.name not in ("name", "samples_per_prompt")}
    words = iter(args)
    for word in words:
        flag, _, value = word.partition("=")
        key = flag.removeprefix("--algorithm.").replace("-", "_")
        if not flag.startswith("--algorithm.") or key not in names:
            rest.append(word)
            continue
        value = value or next(words, "")
        if not value or value.startswith("-"):
            raise ConfigError(f"{flag} needs the name of a part, or 'none'")
        several = isinstance(names[key], tuple)
        parts = [] if several and value == "none" else value.split(",")
        changes[key] = [{"part": p} for p in parts] if several else value
    if changes:
        base = from_dict({"algorithm": changes}, Run(algorithm=base), "command line").algorithm
    return base, rest


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def _part_fields(value: Any) -> bool:
    return value is not None and any(True for _ in fields(value))


def _option_type(chosen: Algorithm) -> type:
    """A dataclass of this algorithm's parts, so that every field of every part is an option with its own type and help."""
    columns: list[tuple[str, Any, Any]] = []
    for f in fields(Algorithm):
        value = getattr(chosen, f.name)
        if f.name in ("name", "samples_per_prompt"):
            continue
        if isinstance(value, tuple):
            members = [(_snake(type(p).__name__), type(p), field(default=p)) for p in value if _part_fields(p)]
            if members:
                kind = make_dataclass(f.name, members, frozen=True)
                columns.append((f.name, kind, field(default_factory=kind)))
        elif _part_fields(value):
            columns.append((f.name, type(value), field(default=value)))
    return make_dataclass("Parts", columns, frozen=True)


def _from_options(chosen: Algorithm, options: Any) -> Algorithm:
    changes: dict[str, Any] = {}
    for f in fields(options):
        there, new = getattr(chosen, f.name), getattr(options, f.name)
        if isinstance(there, tuple):
            changes[f.name] = tuple(getattr(new, _snake(type(p).__name__), p) for p in there)
        else:
            changes[f.name] = new
    return replace(chosen, **changes)


@dataclass(frozen=True)
class EvalOptions:
    """Held-out accuracy of a model: mean@k and the unbiased pass@k."""

    model: tyro.conf.Positional[str]
    """Directory or hub id; tiny = the base model inside the package; a run's folder means its trained model."""
    task: str = "embedded"
    """As in train."""
    reward: tuple[str, ...] = ()
    """As in train; none = the task's own."""
    held_out: str | None = None
    """As in train."""
    problems: int = 256
    """Held-out problems."""
    samples: int = 8
    """k, completions per problem."""
    threshold: float = 1.0
    """A completion with at least this score is correct, for pass@k."""
    sampling: Annotated[Sampling, tyro.conf.arg(name="")] = field(default_factory=Sampling)
    """The distribution completions are drawn from."""
    seed: int = 0
    """Of the samples."""
    device: str = "auto"
    """cpu, cuda, …"""
    dtype: str = "fp32"
    """fp32 or bf16."""
    budget: float = 10.0
    """Seconds per sample for a reward."""
    show: int = 3
    """Problems to print with a completion."""
    json: bool = False
    """Print one JSON object instead."""


def evaluate(args: list[str]) -> int:
    """`policygrad eval MODEL --task …`."""
    options = tyro.cli(EvalOptions, args=args, prog="policygrad eval", config=_SINGLE)
    from policygrad.training.session import measure_model

    names = ("reward", "held_out", "problems", "samples", "sampling", "seed", "device", "dtype", "budget")
    outcome = measure_model(
        options.model, options.task, **{name: getattr(options, name) for name in names}, progress=_count
    )
    ks = [k for k in (1, 2, 4, 8, 16, 32, 64, 128, 256) if k < options.samples] + [options.samples]
    passes = {k: outcome.pass_at(k, options.threshold) for k in ks}
    if options.json:
        row = {
            "model": options.model,
            "task": options.task,
            "problems": len(outcome.scores),
            "samples": options.samples,
        }
        row |= {
            "mean": outcome.mean,
            "stderr": outcome.standard_error(),
            "pass": {str(k): v for k, v in passes.items()},
        }
        print(json.dumps(row | {"failed": outcome.failed, "truncated": outcome.truncated, "tokens": outcome.tokens}))
        return 0
    print(f"{options.model} on {options.task}: {len(outcome.scores)} problems × {options.samples} samples")
    print(
        f"  mean@{options.samples:<4} {outcome.mean:.4f} ± {outcome.standard_error():.4f} (standard error over problems)"
    )
    for k, value in passes.items():
        print(f"  pass@{k:<4} {value:.4f}")
    total = sum(len(row) for row in outcome.scores)
    print(f"  truncated {outcome.truncated}, without a reward {outcome.failed} of {total} completions")
    for message in outcome.messages:
        print(f"note: {message}", file=sys.stderr)
    for texts, scores in list(zip(outcome.texts, outcome.scores, strict=True))[: options.show]:
        print(f"    {scores[0]:g}  {texts[0]!r}")
    return 0


def _count(done: int, total: int) -> None:
    if sys.stderr.isatty():
        print(f"\r  {done}/{total} problems", end="\n" if done == total else "", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class MatrixOptions:
    """The matrix of named algorithms."""

    json: bool = False
    """One JSON object, every part with its fields."""


def algorithms(args: list[str]) -> int:
    """`policygrad algorithms [--json]`."""
    options = tyro.cli(MatrixOptions, args=args, prog="policygrad algorithms", config=_SINGLE)
    if options.json:
        from policygrad.training.toml import algorithm_to_dict

        print(json.dumps({name: algorithm_to_dict(a) for name, a in ALGORITHMS.items()}, indent=1))
        return 0
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    rows = [matrix_row(a) for a in ALGORITHMS.values()]
    for i, column in enumerate(rows[0]):
        table.add_column(column, style="bold cyan" if i == 0 else "", no_wrap=i == 0)
    for row in rows:
        table.add_row(*row.values())
    console = Console(soft_wrap=False)
    console.print(table if console.is_terminal else Table.grid(), end="")
    if not console.is_terminal:
        widths = [max(len(row[c]) for row in [*rows, {k: k for k in rows[0]}]) for c in rows[0]]
        for row in [{k: k for k in rows[0]}, *rows]:
            print("  ".join(v.ljust(w) for v, w in zip(row.values(), widths, strict=True)).rstrip())
    return 0


def part_name(part: Any) -> str:
    """`Clip(0.2, 0.28)`: the class and its fields, without names, without what is open."""
    values = [getattr(part, f.name) for f in fields(part)]
    shown = ", ".join(f"{v:g}" if isinstance(v, float) else str(v) for v in values if v is not None)
    return f"{type(part).__name__}({shown})" if shown else type(part).__name__


def matrix_row(a: Algorithm) -> dict[str, str]:
    """One row of the matrix: the algorithm's parts by column."""
    names = {f: " ".join(part_name(p) for p in getattr(a, f)) for f in ("psi", "terms", "shaping", "filters")}
    return {
        "algorithm": a.name,
        "Ψ": names["psi"] or "R",
        "ratio": "–" if a.ratio is None else part_name(a.ratio),
        "gate": part_name(a.gate),
        "aggregation": part_name(a.aggregate),
        "terms": names["terms"] or "–",
        "shaping": names["shaping"] or "–",
        "filters": names["filters"] or "–",
    }


def show(args: list[str]) -> int:
    """`policygrad show ALGORITHM`."""
    if len(args) != 1 or args[0].startswith("-"):
        print("policygrad show ALGORITHM: its equation, parts, defaults with sources, what it fixes, how it fails")
        print(f"algorithms: {', '.join(ALGORITHMS)}")
        return 0 if args and args[0] in ("-h", "--help") else 2
    print(describe(algorithm(args[0])))
    return 0


def describe(a: Algorithm) -> str:
    """The algorithm's equation, parts and sources, as text."""
    about = ABOUT.get(a.name)
    lines = [f"{a.name}: {about.title}" if about else a.name]
    if about:
        lines += [f"  {about.source}"]
    lines += ["", "  ∇J = Σ_{i,t} ( c · w · Ψ" + (" + k" if a.terms else "") + " ) ∇log π_θ(o_{i,t})", ""]
    equation = a.equation()
    width = max(map(len, equation))
    lines += [f"  {symbol:>{width}} = {text}" for symbol, text in equation.items()]
    lines += ["", "  parts"]
    for name, part in a.parts():
        if name == "reference" and "logp_ref" not in a.needs:
            continue
        summary = " ".join((type(part).__doc__ or "").strip().split())
        lines.append(f"    {name:<10} {part_name(part)}")
        lines.append(f"    {'':<10} {summary}")
    lines.append(f"    {'samples':<10} {a.samples_per_prompt} completions per prompt (G)")
    if about:
        parent = f"  differs from {about.parent} in: {difference(a, ALGORITHMS[about.parent])}" if about.parent else ""
        lines += ["", *([parent] if parent else []), f"  fixes: {about.fixes}", f"  fails: {about.fails}"]
    return "\n".join(lines)


def difference(a: Algorithm, parent: Algorithm) -> str:
    """The columns of the matrix in which two algorithms differ."""
    mine, theirs = matrix_row(a), matrix_row(parent)
    return (
        "; ".join(f"{k} {theirs[k]} → {mine[k]}" for k in mine if k != "algorithm" and mine[k] != theirs[k])
        or "nothing"
    )
