"""Say beside a group of completions how its advantages came about, by the algorithm's own parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from policygrad.core.base import Advantage, Explanation
from policygrad.errors import PolicygradError

TOLERANCE = 2e-3
"""Largest difference between an explained advantage and the logged one, relative to the larger of it and 1."""


def load_chain(config: Mapping[str, Any]) -> tuple[Advantage, ...]:
    """Return the advantage's links of a run's configuration; none where they are not policygrad's own or cannot be read."""
    from policygrad import parts
    from policygrad.training.config.serialization import parse_part

    links = config.get("algorithm", {}).get("advantage", ())
    tables = links if isinstance(links, list) else []
    names = [str(table.get("part", "")) if isinstance(table, Mapping) else "" for table in tables]
    if not all(
        isinstance(getattr(parts, name, None), type) for name in names
    ):  # code of the user's is not imported for a page
        return ()
    try:
        chain = tuple(parse_part(None, table, "run.toml", "algorithm.advantage") for table in tables)
    except PolicygradError:
        return ()
    return chain if all(isinstance(link, Advantage) for link in chain) else ()


def explain_group(chain: Sequence[Advantage], rows: Sequence[Mapping[str, Any]]) -> Explanation | None:
    """Return how the advantages of a group came about; None where a link cannot say it, or the log has other values, as after
    shaping."""
    rewards, logged = [row.get("reward") for row in rows], [row.get("advantage") for row in rows]
    if not chain or not all(isinstance(x, int | float) for x in (*rewards, *logged)):
        return None
    explanation: Explanation | None = Explanation.of_rewards([float(x) for x in rewards if x is not None])
    for link in chain:
        if explanation is not None:
            explanation = link.explain(explanation, [float(x) for x in rewards if x is not None])
    if explanation is None:
        return None
    pairs = zip(explanation.values, [float(x) for x in logged if x is not None], strict=True)
    return explanation if all(abs(a - b) <= TOLERANCE * max(1.0, abs(b)) for a, b in pairs) else None
