"""Servers that other people wrote, in a virtual environment of their own: make test-environments."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import policygrad as pg
from policygrad.environments.registry import resolve_environment

SCRIPTS = Path(sys.executable).parent
if not (SCRIPTS / "mcp-server-time").exists():
    pytest.skip("MCP servers have an environment of their own: make test-environments", allow_module_level=True)

pytestmark = pytest.mark.environments


def play(name: str, *calls: tuple[str, dict[str, Any]]) -> tuple[list[str], list[tuple[str, float]]]:
    """Return the names of the tools, and for each call what the policy reads, and whether it failed."""

    async def run(factory: Any) -> tuple[list[str], list[tuple[str, float]]]:
        episode = factory(pg.Example("?"))
        try:
            names = [tool["function"]["name"] for tool in (await episode.reset()).tools]
            results = []
            for tool, arguments in calls:
                text = f"<tool_call>{json.dumps({'name': tool, 'arguments': arguments})}</tool_call>"
                step = await episode.step(pg.Action(text))
                failed = sum(value for key, value in step.metrics.items() if key != "calls")
                results.append((step.observation.content, failed))
            return names, results
        finally:
            await episode.close()

    with resolve_environment(name) as factory:  # type: ignore[union-attr]
        return asyncio.run(run(factory))


def test_the_time_of_another_place() -> None:
    arguments = {"source_timezone": "UTC", "time": "12:30", "target_timezone": "Asia/Tokyo"}
    names, results = play(
        f"mcp:{SCRIPTS / 'mcp-server-time'} --local-timezone UTC",
        ("convert_time", arguments),
        ("convert_time", {**arguments, "target_timezone": "Nowhere"}),
        ("convert_time", {"time": "12:30"}),
    )
    assert names == ["get_current_time", "convert_time"]
    assert "T21:30:00+09:00" in results[0][0]
    assert [failed for _, failed in results] == [0.0, 1.0, 1.0]
    assert "Invalid timezone" in results[1][0]
    assert "missing a required argument" in results[2][0]


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_a_repository_is_read_and_written(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    for key, value in (("user.name", "a"), ("user.email", "a@example.org")):
        subprocess.run(["git", "-C", str(tmp_path), "config", key, value], check=True)
    (tmp_path / "file.txt").write_text("text")
    where = {"repo_path": str(tmp_path)}
    _, results = play(
        f"mcp:{SCRIPTS / 'mcp-server-git'} --repository {tmp_path}",
        ("git_add", {**where, "files": ["file.txt"]}),
        ("git_commit", {**where, "message": "the first"}),
        ("git_log", where),
        ("git_log", {"repo_path": str(tmp_path.parent)}),
    )
    assert [failed for _, failed in results] == [0.0, 0.0, 0.0, 1.0]
    assert "the first" in results[2][0]
