"""What docs/agents.md shows of agents that others wrote: how each is started, and what was seen of its episodes."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pages.markdown import load, table

AGENTS = Path(__file__).parents[2] / "tests" / "agents.toml"
HEAD = ("agent", "started by", "API", "calls", "texts", "formats")


def agents_block() -> str:
    """Write the table: of each agent its version, its command, and how many calls and texts an episode had."""
    wanted = tomllib.loads(AGENTS.read_text(encoding="utf-8"))
    seen: Mapping[str, Mapping[str, Any]] = {row["name"]: row for row in (load("agents") or {"agents": ()})["agents"]}
    rows = [_describe(row, seen[row["name"]]) for row in wanted["agent"] if row["name"] in seen]
    episodes = [episode for row in seen.values() for episode in row["episodes"]]
    equal, contexts = (sum(episode[name] for episode in episodes) for name in ("equal", "contexts"))
    days = sorted(row["date"] for row in seen.values())
    summary = (
        f"{equal:,} of {contexts:,} contexts of {len(episodes)} episodes were, id by id, what the chat template makes of the "
        f"request's messages and tools ({days[-1] if days else 'not run yet'})."
    )
    notes = [f"- {row['name']}: {row['note']}" for row in wanted["agent"] if row.get("note")]
    return "\n\n".join(filter(None, (table(HEAD, rows), summary, "\n".join(notes))))


def _describe(row: Mapping[str, Any], seen: Mapping[str, Any]) -> tuple[str, ...]:
    episodes: Sequence[Mapping[str, Any]] = seen["episodes"]
    package = (row.get("npm") or row.get("pip"))[0]
    version = package.rpartition("==")[2] if row.get("pip") else package.rpartition("@")[2]
    path = next(word for word in row["start"].split() if word.startswith("examples/"))
    file, _, function = path.partition(":")
    start = f"[{Path(file).name}{f':{function}' if function else ''}](../{file})"
    works = [e["format"] for e in episodes if e["reward"] == 1 and not e["failure"] and e["equal"] == e["contexts"]]
    names = {value: name for name, value in tomllib.loads(AGENTS.read_text(encoding="utf-8"))["formats"].items()}
    streams = {0: "", sum(e["contexts"] for e in episodes): ", streamed"}.get(
        sum(e["streams"] for e in episodes), ", both"
    )
    return (
        f"{row['name']} {version}",
        start,
        f"`{row['api']}`{streams}",
        _range(e["calls"] for e in episodes),
        _range(e["branches"] for e in episodes),
        ", ".join(dict.fromkeys(names[name] for name in works)) or "none",
    )


def _range(values: Iterable[int]) -> str:
    least, *_, most = sorted([*values] * 2)
    return str(least) if least == most else f"{least} to {most}"
