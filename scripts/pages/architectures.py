"""The table in docs/architectures.md: every row of tests/architectures.toml is trained by a test, or seen refused."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pages.markdown import table

FAMILIES = Path(__file__).parents[2] / "tests" / "architectures.toml"
HEAD = ("`model_type`", "layers", "trains", "prompt sampled once", "LoRA leaves out", "tested by")


def architectures_block() -> str:
    """The table of families, in the order of the file."""
    families = tomllib.loads(FAMILIES.read_text(encoding="utf-8"))["family"]
    return table(HEAD, [_row(family) for family in families])


def _row(family: Mapping[str, Any]) -> tuple[str, ...]:
    refused = family.get("refused")
    return (
        f"`{family['type']}`",
        family["layers"],
        f"no: {refused}" if refused else "in full, with LoRA",
        "yes" if family.get("shares") else "no",
        ", ".join(f"`{name}`" for name in family.get("left_out", ())),
        "`make test`" if family.get("short") else "`make test-long`",
    )
