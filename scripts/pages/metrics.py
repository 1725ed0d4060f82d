"""docs/metrics.md: what every number of a run is, from the glossary in the package."""

from __future__ import annotations

from pages.markdown import page, table
from policygrad.trackers.glossary import MetricSection, load_glossary

ABOUT = (
    "Each step's line in `metrics.jsonl` holds these, as do the services of `--track`; `policygrad show NAME` says one of them. "
    "`*` stands for what a run names: a reward function, a part. A number that does not apply to a run is absent. Numbers of a "
    "step with several updates are means over what the updates saw, unless they say otherwise."
)


def metrics_page() -> str:
    """The page."""
    return page("# Metrics", ABOUT, *(_chapter(chapter) for chapter in load_glossary()))


def _chapter(chapter: MetricSection) -> str:
    rows = [(f"`{m.name}`", m.unit, m.text, m.interpretation or "–") for m in chapter.metrics]
    return f"## {chapter.title}\n\n{table(('metric', 'unit', 'what it is', 'when it moves'), rows)}"
