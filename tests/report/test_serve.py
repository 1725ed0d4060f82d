"""--watch by real requests: only with the token, only on this machine, and the page follows the run."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

from doubles.forked import Forked
from doubles.runs import row, run_folder
from policygrad import cli
from policygrad.errors import ConfigError, RunError
from policygrad.report.server import ReportServer, create_server
from policygrad.trackers import JsonlTracker

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@contextmanager
def serving(*folders: Path) -> Iterator[ReportServer]:
    with create_server(folders) as result:
        thread = Thread(target=result.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield result
        finally:
            result.shutdown()
            thread.join()


def ask(result: ReportServer, path: str) -> tuple[int, str]:
    host, port = result.server_address[:2]
    line = HTTPConnection(str(host), int(port), timeout=600)
    line.request("GET", path)
    answer = line.getresponse()
    text = answer.read().decode()
    line.close()
    return answer.status, text


def test_requests_without_the_token_are_refused(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "a", [(1, {"reward": 0.5})])
    with serving(folder) as result:
        assert result.server_address[0] == "127.0.0.1"
        assert len(result.token) >= 32
        for path in (
            "/",
            "/stamp",
            "/?token=",
            f"/?token={result.token[:-1]}",
            "/?token=%F0%9F%94%91",
            f"/{result.token}",
        ):
            status, text = ask(result, path)
            assert status == 403
            assert result.token not in text
            assert "dapo" not in text
        assert ask(result, f"/run.toml?token={result.token}")[0] == 404
        assert ask(result, f"/../run.toml?token={result.token}")[0] == 404
        status, text = ask(result, f"/?token={result.token}")
        assert status == 200
        assert "<h1>dapo on embedded</h1>" in text
        assert "connect-src 'self'" in text
        assert result.token not in text


def test_the_page_is_rebuilt_only_when_the_run_changes(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "a", [])  # not a step is done
    with serving(folder) as result:
        stamp, before = ask(result, f"/stamp?token={result.token}")[1], result.text()
        assert "0 of 8 steps" in before
        assert result.text() is before
        assert ask(result, f"/stamp?token={result.token}")[1] == stamp
        with JsonlTracker(folder) as files:
            files.log(1, {"reward": 0.5}, [row("1+1=", "2", 1.0)])
        assert ask(result, f"/stamp?token={result.token}")[1] != stamp
        assert "1 of 8 steps" in ask(result, f"/?token={result.token}")[1]
        (folder / "run.toml").unlink()
        status, text = ask(result, f"/?token={result.token}")
        assert (status, "holds no run" in text) == (503, True)


def test_a_report_that_cannot_be_served_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="holds no run"):
        create_server([tmp_path])
    folder = run_folder(tmp_path / "a", [])
    with create_server([folder]) as result, pytest.raises(ConfigError, match="choose another --port"):
        create_server([folder], port=int(result.server_address[1]))


def test_the_command_prints_its_address_and_ctrl_c_ends_it(tmp_path: Path, forked: Forked) -> None:
    folder = run_folder(tmp_path / "a", [(1, {"reward": 0.5})])
    output, stdout = os.pipe()
    process = forked.start(cli.main, ["report", str(folder), "--watch"], stdout=stdout)
    os.close(stdout)
    with open(output, encoding="utf-8") as lines:
        url = urlsplit(lines.readline().strip())
        assert re.fullmatch(r"127\.0\.0\.1:\d+", url.netloc)
        line = HTTPConnection(url.netloc, timeout=600)
        line.request("GET", f"/?{url.query}")
        assert line.getresponse().status == 200
        line.close()
        os.kill(process.pid, signal.SIGINT)
        process.join()
    assert process.exitcode == 0


@pytest.mark.full
def test_a_browser_shows_new_steps_and_keeps_its_filters(tmp_path: Path, chromium: Browser) -> None:
    folder = run_folder(tmp_path / "a", [])
    with serving(folder) as result:
        tab = chromium.new_page()
        wrong: list[str] = []
        tab.on("pageerror", lambda error: wrong.append(str(error)))
        tab.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
        with tab.expect_response(re.compile("stamp")):
            tab.goto(result.url)
        assert "No step is done yet" in tab.locator("#first").inner_text()
        with JsonlTracker(folder) as files:
            for step in (1, 2):
                files.log(step, {"reward": 0.5 * step}, [row("1+1=", "one", 0.0), row("1+1=", "two", 1.0)])
                tab.evaluate("follow()")  # sooner than by the clock
                tab.wait_for_function("step => DATA.metrics.reward?.x.at(-1) === step", arg=step)
                tab.fill("#text", "two")
                assert tab.locator("#found").inner_text() == f"{step} of {2 * step} match."
        assert tab.locator('#first [data-metric="reward"] .curve').count() == 1
        assert "2 of 8 steps" in tab.locator("[data-live=answers]").inner_text()
        assert "step 3 of 8 in progress" in tab.locator("#now").inner_text()
        assert tab.input_value("#text") == "two"
        assert wrong == []
