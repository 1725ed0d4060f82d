"""What docs/agents.md shows of agents that others wrote: how each is started, and what was seen of its episodes."""

from __future__ import annotations

import textwrap
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pages.markdown import load, table

AGENTS = Path(__file__).parents[2] / "tests" / "agents.toml"
HEAD = ("agent", "started by", "API", "calls", "texts")
LIMITED = "limited"


def agents_block() -> str:
    """Write the table: of each agent its version, its file, and how many calls and texts an episode had."""
    wanted, found = tomllib.loads(AGENTS.read_text(encoding="utf-8")), load("agents")
    if not found:
        return "Not run yet."
    seen: Mapping[str, Mapping[str, Any]] = {row["name"]: row for row in found["agents"]}
    rows = [_describe(row, seen[row["name"]]["episodes"]) for row in wanted["agent"] if row["name"] in seen]
    notes = [f"- {row['name']}: {row['note']}" for row in wanted["agent"] if row.get("note")]
    notes += [f"- {name}: **{text}**" for name, row in seen.items() if (text := _find_fault(row["episodes"]))]
    return "\n\n".join((table(HEAD, rows), textwrap.fill(_summarize(wanted, seen), 132), "\n".join(notes))).strip()


def _summarize(wanted: Mapping[str, Any], seen: Mapping[str, Mapping[str, Any]]) -> str:
    first, *others = wanted["formats"]
    with_all = ", ".join(row["name"] for row in wanted["agent"] if row.get("formats"))
    episodes = [episode for row in seen.values() for episode in row["episodes"]]
    equal, contexts = (sum(episode[name] for episode in episodes) for name in ("equal", "contexts"))
    return (
        f"With the chat template of {first}; {with_all} also with those of {', '.join(others)}. Of {contexts:,} contexts in "
        f"{len(episodes)} episodes {equal:,} were, id by id, what the template makes of the request "
        f"({max(row['date'] for row in seen.values())})."
    )


def _describe(row: Mapping[str, Any], episodes: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    package = (row.get("npm") or row.get("pip"))[0]
    version = package.rpartition("==")[2] if row.get("pip") else package.rpartition("@")[2]
    file = next(word for word in row["start"].split() if word.startswith("examples/")).partition(":")[0]
    streams, requests = sum(e["streams"] for e in episodes), sum(e["contexts"] for e in episodes)
    way = "" if not streams else ", streamed" if streams == requests else ", also streamed"
    whole = [e for e in episodes if e["way"] != LIMITED]
    return (
        f"{row['name']} {version}",
        f"[{Path(file).name}](../{file})",
        f"`{row['api']}`{way}",
        _range(e["calls"] for e in whole),
        _range(e["branches"] for e in whole),
    )


def _range(values: Iterable[int]) -> str:
    least, *_, most = sorted([*values] * 2)
    return str(least) if least == most else f"{least} to {most}"


def _find_fault(episodes: Sequence[Mapping[str, Any]]) -> str:
    """Return why an agent does not work with some format; "" = it does."""
    for e in episodes:
        if e["failure"] or e["reward"] != 1 or e["equal"] != e["contexts"]:
            told = e["failure"] or f"reward {e['reward']}, {e['equal']} of {e['contexts']} contexts are the template's"
            return f"{e['format']}: {told}"
    return ""
