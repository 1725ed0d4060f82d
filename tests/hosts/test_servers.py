"""Servers on hosts of their own: an engine that is told of new weights over HTTP and reads them from a folder, and an
environment's tools. `make test-hosts`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from measure_hosts import BIN, PATHS, POLICYGRAD, ROOT, Program, always, digest, prepare, sockets, start
from test_torchrun import succeeded

from hosts import Laboratory, address_of

pytestmark = pytest.mark.hosts
TOOLS = """
from mcp.server import MCPServer
from mcp.server.transport_security import TransportSecuritySettings

server = MCPServer("tools")


@server.tool()
def add(a: int, b: int) -> int:
    '''Adds.'''
    return a + b


app = server.streamable_http_app(transport_security=TransportSecuritySettings(enable_dns_rebinding_protection=False))
"""


def serve(lab: Laboratory, folder: Path, engine: int, tools: int) -> tuple[Program, Program]:
    """Start a stand-in for vLLM and a server of tools on these hosts; return them once they listen."""
    (folder / "tools.py").write_text(TOOLS)
    words = [sys.executable, "-P", str(ROOT / "scripts" / "stand_in_servers.py"), "vllm"]
    at = ["--host", address_of(engine), "--port", "8000"]
    samples = start(lab.hosts[engine], [*words, *at], folder)
    at = ["--host", address_of(tools), "--port", "9000", "--app-dir", str(folder)]
    offers = start(lab.hosts[tools], [str(BIN / "uvicorn"), "tools:app", *at], folder, PATHS)
    for program, port in ((samples, 8000), (offers, 9000)):
        program.wait_for(lambda p=program, n=port: n in {at for _, at in sockets(p.host)}, "socket")  # type: ignore[misc]
    return samples, offers


def train(folder: Path, words: Sequence[str], count: int) -> tuple[str, str]:
    """Train with the two servers on so many hosts; return the run's digest, and what the server of tools said."""
    engine, tools = (1, 2) if count == 3 else (0, 0)
    run = folder / f"on-{count}"
    with Laboratory(count) as lab:
        lab.name_hosts({"engine": address_of(engine), "tools": address_of(tools)})
        _, offers = serve(lab, folder, engine, tools)
        urls = {"engine": "http://engine:8000", "tools": "mcp:http://tools:9000/mcp"}
        options = ["--sampler.engine", "vllm", "--sampler.urls", urls["engine"], "--sampler.max-concurrency", "1"]
        options += ["--environment", urls["tools"], "--sampler.folder", str(folder / f"weights-{count}")]
        learner = start(lab.hosts[0], [*POLICYGRAD, *words, *always(folder), *options, "--output", str(run)], folder)
        succeeded([learner])
        return digest(run), offers.said


def test_an_engine_and_tools_on_hosts_of_their_own_make_the_run_of_one_host(tmp_path: Path) -> None:
    """Weights go to the engine by a folder that both see, and the word that they are there by HTTP; both cross the network."""
    words = prepare(tmp_path, context=1024)
    expected, _ = train(tmp_path, words, 1)
    seen, said = train(tmp_path, words, 3)
    assert seen == expected
    assert f"{address_of(0)}:" in said
    assert "POST /mcp" in said
