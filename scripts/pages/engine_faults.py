"""The table of faults in docs/engines.md: what scripts/engine_faults.py has measured."""

from __future__ import annotations

from typing import Any

from engine_faults import KINDS

from pages.markdown import table
from pages.reports import load

HEAD = (
    "fault",
    "times, while …",
    "groups",
    "lost",
    "trained on twice",
    "completions",
    "of another version",
    "asked again",
    "ended and resumed",
)
_COUNTS = ("groups", "lost", "twice", "completions", "of_another_version", "asked_again", "ended_and_resumed")


def faults_block(found: dict[str, Any] | None = None) -> str:
    """The block. found: another report than the committed one."""
    found = load("engine-faults") if found is None else found
    if found is None:
        return "Not measured yet: `python scripts/engine_faults.py` runs it, and `make docs` writes this table."
    rows = [_row(kind, seen) for kind, seen in found["kinds"].items() if "steps" in seen]
    versions = ", ".join(f"{name} {found['versions'][name]}" for name in ("xllamacpp", "torch"))
    intro = (
        f"`{found['made_by']}`: two real llama.cpp servers, the embedded model, `--max-staleness {found['staleness']}`, each fault at "
        f"random moments, for a random while ({versions}; {found['machine']}). {found.get('note', '')}".rstrip()
    )
    wrong = "\n".join(f"- **It does not hold:** {text}." for text in found["broken"])
    return "\n\n".join(part for part in (intro, table(HEAD, rows) if rows else "", wrong) if part)


def _row(kind: str, seen: dict[str, Any]) -> tuple[str, ...]:
    moments = ", ".join(f"{name} {count}" for name, count in sorted(seen["moments"].items()))
    return (KINDS[kind], f"{seen['repeats']}: {moments}", *(f"{seen[name]:,}" for name in _COUNTS))
