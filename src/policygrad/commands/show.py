"""`policygrad algorithms` and `policygrad show`: what there is, and what each of it is."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass, is_dataclass
from typing import Annotated

import tyro

from policygrad.algorithms import ALGORITHMS, algorithm
from policygrad.commands import describe as words
from policygrad.commands.describe import HEAD, NAME, QUIET, Line
from policygrad.commands.matrix import matrix
from policygrad.commands.part_page import describe_part, index
from policygrad.core.algorithm import Algorithm
from policygrad.core.roles import not_frozen
from policygrad.errors import ConfigError
from policygrad.papers import PAPERS
from policygrad.trackers.glossary import Meaning, meaning
from policygrad.training.config.own import assigned, is_own, load_own
from policygrad.training.config.parts import find_algorithm, nearest, part_class, part_names
from policygrad.training.config.run import optional
from policygrad.training.config.toml import algorithm_to_dict


@dataclass(frozen=True)
class MatrixOptions:
    """The matrix: one row per named algorithm, one column per part of the equation."""

    json: bool = False
    """One JSON object, every part with its fields."""
    width: Annotated[int | None, optional("COLUMNS", "the terminal's; in a pipe one line each")] = None
    """Columns to fit in, such as 80."""

    def __post_init__(self) -> None:
        if self.width is not None and self.width < 40:
            raise ConfigError(f"--width must be at least 40, not {self.width}")


def algorithms(args: list[str]) -> int:
    """`policygrad algorithms [--json]`."""
    options = tyro.cli(MatrixOptions, args=args, prog="policygrad algorithms", config=(tyro.conf.FlagCreatePairsOff,))
    if options.json:
        rows = {
            name: {**algorithm_to_dict(a), "departs": PAPERS[name].departs if name in PAPERS else ""}
            for name, a in ALGORITHMS.items()
        }
        print(json.dumps(rows, indent=1, ensure_ascii=False))
        return 0
    width = options.width or (shutil.get_terminal_size((80, 24)).columns if sys.stdout.isatty() else None)
    if width is None:
        words.emit(matrix(None))
    else:
        more = (("policygrad show NAME", NAME), (" explains one; what a cell leaves out is the default", QUIET))
        words.emit([((words.EQUATION, HEAD),), (), *matrix(width), (), more])
    return 0


@dataclass(frozen=True)
class ShowOptions:
    """An algorithm's equation, parts, defaults with sources, what it fixes and how it fails; or one part, such as Clip: its
    settings, equation, text and place in the code; or a metric, such as kl. Without a name: what there is."""

    name: Annotated[tyro.conf.Positional[str | None], optional("NAME", "lists all")] = None
    """One of `policygrad algorithms`, or a part's class, or your own: mine.py:NAME, mine:NAME, or a metric."""


def show(args: list[str]) -> int:
    """`policygrad show [NAME]`."""
    name = tyro.cli(ShowOptions, args=args, prog="policygrad show", description=words.about_command(ShowOptions)).name
    width = words.page_width()
    if name is None:
        words.emit(index(width))
    elif is_own(name):
        words.emit(_own(name, width))
    elif name in part_names():
        words.emit(describe_part(part_class(name, "show", "part"), width))
    elif name.lower().replace("-", "_") in ALGORITHMS:
        words.emit(words.describe(algorithm(name), width))
    elif (metric := meaning(name)) is not None:
        words.emit(_metric(name, metric, width))
    else:
        hint = nearest(name, [*ALGORITHMS, *part_names()])
        hint = hint if hint.startswith("did") else "`policygrad show` lists them; your own is mine.py:NAME"
        raise ConfigError(f"no algorithm, part or metric is called {name!r}: {hint}")
    return 0


def _metric(name: str, metric: Meaning, width: int) -> list[Line]:
    """What stands under this name in metrics.jsonl."""
    lines: list[Line] = [((name, NAME), (f"  a metric: {metric.unit}", QUIET)), ()]
    lines += words.wrapped((("Is     ", HEAD),), metric.text, width)
    return [*lines, *(words.wrapped((("Moves  ", HEAD),), metric.moves, width) if metric.moves else ())]


def _own(name: str, width: int) -> list[Line]:
    """An algorithm or a part of a module or a file."""
    found = load_own(name, f"show {name}", (Algorithm, type))
    if isinstance(found, Algorithm):
        return [*words.describe(find_algorithm(name), width), (), (("Code  ", HEAD), (assigned(name), QUIET))]
    if not (isinstance(found, type) or is_dataclass(found)):
        raise ConfigError(
            f"show {name}: {type(found).__name__} is neither an algorithm nor a part, which is a dataclass: "
            "policygrad.Algorithm(…), or @dataclass(frozen=True) above the class"
        )
    if problem := not_frozen(found if isinstance(found, type) else type(found)):
        raise ConfigError(f"show {name}: {problem}")
    return describe_part(found, width)
