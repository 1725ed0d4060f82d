"""The table in docs/extras.md: what scripts/check_extras.py has found."""

from __future__ import annotations

from typing import Any

from check_extras import project
from pages.markdown import table
from pages.reports import Data, load

HEAD = ("extra", "tried", "packages", "adds, MiB", "s to install", "without it", "with it")
WITHOUT = {"named": "refused by its name", "policygrad brings it along": "policygrad brings it along"}


def extras_block(found: Data | None = None) -> str:
    """The block. found: another report than the committed one."""
    found = load("extras") if found is None else found
    if not found:
        return "Not tried yet: `python scripts/check_extras.py` does it, and `make docs` writes this."
    base, (extras, _) = found["policygrad"], project()
    left = [name for name in extras if name not in {*found, "dev"}]
    versions = ", ".join(f"{name} {number}" for name, number in base["versions"].items())
    return "\n\n".join(
        (
            f"policygrad alone takes {base['mib']:,.0f} MiB and {base['seconds']:.0f} s to install, on Python {base['python']} "
            f"({versions}). Bytes are those of the installed files; seconds are of one machine and its package index.",
            table(HEAD, [_row(name, extra) for name, extra in found.items() if name != "policygrad"]),
            "By `python scripts/check_extras.py`."
            + (f" Not tried by it yet: {', '.join(f'`{name}`' for name in left)}." if left else ""),
        )
    )


def _row(name: str, extra: dict[str, Any]) -> tuple[str, ...]:
    packages = ", ".join(f"{package} {number}" for package, number in extra["versions"].items())
    refused = dict.fromkeys(WITHOUT.get(said, "**not as it should be**") for said in extra["without"])
    works = dict.fromkeys(said if said == "works" else "**not as it should be**" for said in extra["with"])
    size = f"{extra['mib']:,.0f}" if "mib" in extra else ""  # of some it was not taken
    seconds, shown = f"{extra['seconds']:.0f}", "; ".join(extra["shows"])
    return f"`{name}`", shown, packages, size, seconds, ", ".join(refused), ", ".join(works)
