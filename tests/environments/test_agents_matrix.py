"""Each agent of tests/agents.toml reads, edits and looks again, in an environment of its own: make test-agents."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agents_matrix import Agent, describe, list_agents, list_cases

HOME = os.environ.get("POLICYGRAD_AGENTS", "")
FOLDER = Path(HOME).resolve()
CASES = [(agent, template, way) for agent in list_agents() for template, way in list_cases(agent)]


@pytest.mark.agents
@pytest.mark.skipif(not HOME, reason="agents have environments of their own: make test-agents")
@pytest.mark.parametrize(("agent", "template", "way"), CASES, ids=[f"{a.id} {t} {w}".strip() for a, t, w in CASES])
def test_an_agent_does_its_task_and_each_context_is_the_template_s(agent: Agent, template: str, way: str) -> None:
    episode = describe(agent, template, way, FOLDER)
    assert episode.works, episode
