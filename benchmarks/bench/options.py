"""What both benchmarks can be told, so that `make bench ARGS=…` can tell both the same."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.works import SIDES, WORKS

COMPONENTS = (
    "head",
    "attention",
    "packing",
    "savings",
    "rollout",
    "decoding",
    "precision",
    "drafts",
    "overlap",
    "matmul",
    "compile",
    "profile",
)
EVERYTHING = ("linear", *(work.name for work in WORKS), *COMPONENTS)


@dataclass(frozen=True)
class Options:
    """As they were given."""

    only: tuple[str, ...]
    threads: tuple[int, ...]
    repeats: int
    sides: tuple[str, ...]
    data: Path
    quick: bool
    page: bool

    def folder(self, root: Path) -> Path:
        """Where works and results are kept."""
        return root / ".bench" / "quick" if self.quick else root / ".bench"

    def published(self, root: Path) -> Path | None:
        """What is committed of the results."""
        return None if self.quick else root / "docs" / "results" / "bench.json"

    def wants(self, name: str) -> bool:
        """Whether this component is to be measured."""
        return not self.only or name in self.only


def parse(about: str, arguments: Sequence[str] | None = None) -> Options:
    """Raises SystemExit, with the words to be read, for what is not understood."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=EVERYTHING, default=(), metavar="NAME", help=", ".join(EVERYTHING))
    parser.add_argument("--threads", nargs="+", type=int, default=(1,), help="threads a process, one table each (1)")
    parser.add_argument("--repeats", type=int, default=None, help="processes per side (3; with --quick 1)")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=(), help="these, in the place of every work's own")
    parser.add_argument(
        "--data",
        type=Path,
        default=Path("../shared/data"),
        help="folder that has gsm8k/test.jsonl, from the repository's own (../shared/data)",
    )
    parser.add_argument("--quick", action="store_true", help="everything small: to see that it works")
    parser.add_argument("--page", action="store_true", help="only write the page anew from what has been measured")
    args = parser.parse_args(arguments)
    repeats = (1 if args.quick else 3) if args.repeats is None else args.repeats
    if repeats < 1 or min(args.threads) < 1:
        parser.error("--repeats and --threads are at least 1")
    sides, only = tuple(args.sides), tuple(args.only)
    return Options(only, tuple(args.threads), repeats, sides, args.data, args.quick, args.page)
