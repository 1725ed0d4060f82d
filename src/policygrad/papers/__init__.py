"""What the papers say: each named algorithm's objective as published, and where its defaults come from."""

from __future__ import annotations

from policygrad.papers.data import DATA
from policygrad.papers.groups import GROUPS
from policygrad.papers.outcomes import OUTCOMES
from policygrad.papers.paper import Paper
from policygrad.papers.trust import TRUST
from policygrad.papers.usual import RECIPE, USUAL
from policygrad.papers.values import VALUES

__all__ = ["PAPERS", "RECIPE", "USUAL", "Paper"]

PAPERS: dict[str, Paper] = {**VALUES, **GROUPS, **OUTCOMES, **TRUST, **DATA}
