"""Writes the generated parts of README.md: the matrix. `--check` only says whether they are up to date.

python scripts/make_docs.py [--check]
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from policygrad.algorithms import ALGORITHMS
from policygrad.commands.describe import matrix_row

README = Path(__file__).resolve().parents[1] / "README.md"


def matrix() -> str:
    """The matrix as a Markdown table."""
    rows = {name: matrix_row(algorithm) for name, algorithm in ALGORITHMS.items()}
    head = ["algorithm", *next(iter(rows.values()))]
    lines = [" | ".join(head), " | ".join("---" for _ in head)]
    lines += [
        " | ".join([f"`{name}`", *(" ".join(parts) or "–" for parts in row.values())]) for name, row in rows.items()
    ]
    return "\n".join(f"| {line} |" for line in lines)


def filled(text: str) -> str:
    """README with what stands between the marks replaced."""
    block = f"<!-- matrix: begin -->\n{matrix()}\n<!-- matrix: end -->"
    new, found = re.subn(r"<!-- matrix: begin -->.*?<!-- matrix: end -->", lambda _: block, text, flags=re.DOTALL)
    if found != 1:
        raise SystemExit(f"{README}: there must be one pair of marks <!-- matrix: begin --> and <!-- matrix: end -->")
    return new


def main() -> None:
    """Writes, or checks."""
    text = README.read_text(encoding="utf-8")
    new = filled(text)
    if "--check" in sys.argv[1:]:
        sys.exit(0 if new == text else f"{README} is out of date: make docs")
    README.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
