"""`policygrad chat`: two models answer the same questions, each in its own conversation; in a terminal and on a page."""

from __future__ import annotations

import io
import json
import shutil
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from policygrad.commands.chat import ChatOptions, Speaker, find_models
from policygrad.commands.chat_page import create_chat_server, parse_request
from policygrad.errors import ConfigError, DataError
from policygrad.utils.page_server import MAX_BODY, PageServer

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="module")
def run(random_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder with a model that differs from the embedded one."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "run.toml").write_text('model = "tiny"\n')
    shutil.copytree(random_model, folder / "model")
    return folder


def test_a_run_has_a_model_before_and_after(run: Path, tmp_path: Path) -> None:
    assert find_models(ChatOptions((str(run),))) == [("before, tiny", "tiny"), (f"after, {run}", str(run))]
    assert find_models(ChatOptions((str(run),), alone=True)) == [(str(run), str(run))]
    assert find_models(ChatOptions((str(run), "tiny"))) == find_models(ChatOptions((str(run),)))
    (tmp_path / "run.toml").write_text('model = "tiny"\n')
    with pytest.raises(ConfigError, match=r"has no model so far\. Finish it with policygrad train --resume"):
        find_models(ChatOptions((str(tmp_path),)))
    with pytest.raises(ConfigError, match="name a run or a model"):
        find_models(ChatOptions())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--host", "0.0.0.0"), "add --page"),
        (("--page", "--port", "70000"), "--port must be from 0 to 65535"),
        (("--alone",), "no run is named: leave it out"),
        (("--temperature", "-1"), "--temperature must be 0 or more"),
        (("--max-tokens", "0"), "max-tokens"),
    ],
)
def test_what_cannot_be_is_refused(run_command: Any, options: tuple[str, ...], says: str) -> None:
    code, _, err = run_command("chat", "tiny", *options)
    assert code == 2
    assert says in " ".join(err.split())


def test_each_line_is_answered_by_each_model(run: Path, run_command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["/again", "3 + 4 =", "", "/again", "/new", "and 5 more?"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
    code, out, err = run_command("chat", str(run), "--json", "--max-tokens", "12")
    assert code == 0
    assert "there is no question yet" in err
    answers = [json.loads(line) for line in out.splitlines()]
    assert [x["question"] for x in answers] == ["3 + 4 ="] * 4 + ["and 5 more?"] * 2
    assert [x["model"] for x in answers] == ["before, tiny", f"after, {run}"] * 3
    assert answers[0]["answer"] != answers[2]["answer"]  # another sample
    assert all(0 < x["tokens"] <= 12 for x in answers)
    assert {x["finish_reason"] for x in answers} <= {"stop", "length"}


def test_a_conversation_goes_on_with_the_models_own_words() -> None:
    speaker = Speaker.load("tiny", "tiny", ChatOptions(("tiny",), system="Be brief.", max_tokens=8))
    first = speaker.answer("3 + 4 =")["answer"]
    assert [m["role"] for m in speaker.messages] == ["system", "user", "assistant"]
    assert speaker.messages[-1]["content"] == first
    speaker.answer("and now?")
    assert len(speaker.messages) == 5
    speaker.answer_again()
    assert len(speaker.messages) == 5
    speaker.start_anew()
    assert speaker.messages == [{"role": "system", "content": "Be brief."}]


@pytest.fixture
def server(run: Path) -> Iterator[PageServer]:
    options = ChatOptions((str(run),), max_tokens=12)
    speakers = [Speaker.load(label, name, options) for label, name in find_models(options)]
    with create_chat_server(speakers, "127.0.0.1", 0) as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        yield serving
        serving.shutdown()


def send(url: str, body: bytes | None = None, **headers: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_only_who_has_the_key_is_answered(server: PageServer) -> None:
    page, _, query = server.url.partition("?")
    request = json.dumps(
        {"model": 1, "temperature": 1.0, "messages": [{"role": "user", "content": "3 + 4 ="}]}
    ).encode()
    code, text = send(f"{page}reply?{query}", request)
    assert (code, set(json.loads(text))) == (200, {"answer", "reasoning", "text", "tokens", "finish_reason"})
    assert "<title>policygrad chat</title>" in send(server.url)[1]
    for url in (page, f"{page}?token=", f"{page}?token=x{query}"):
        assert send(url) == (403, "the token is missing or wrong: open the printed address")
    assert send(f"{page}reply?token=x", request)[0] == 403
    assert send(f"{page}other?{query}")[0] == 404
    assert send(f"{page}?{query}", b"{}")[0] == 404
    assert send(f"{page}reply?{query}", b"x", **{"Content-Length": str(MAX_BODY + 1)})[0] == 413
    code, text = send(f"{page}reply?{query}", b'{"model": 0}')
    assert (code, "a request is JSON with model, messages and temperature" in json.loads(text)["error"]) == (400, True)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model": 2}, "model is 2, and there are 2"),
        ({"temperature": 9}, "temperature is 9.0; it is from 0 to 5"),
        ({"messages": []}, "the last message must be the user's"),
        ({"messages": [{"role": "assistant", "content": ""}]}, "the last message must be the user's"),
        ({"messages": 3}, "a request is JSON"),
    ],
)
def test_requests_that_make_no_sense_are_refused(change: dict[str, Any], says: str) -> None:
    good = {"model": 0, "temperature": 1, "messages": [{"role": "user", "content": "x"}]}
    assert parse_request(json.dumps(good).encode(), 2) == (0, good["messages"], 1.0)
    with pytest.raises(DataError, match=says):
        parse_request(json.dumps(good | change).encode(), 2)


def test_the_page_shows_both_answers_side_by_side(server: PageServer, chromium: Browser) -> None:
    page, errors = chromium.new_page(viewport={"width": 1280, "height": 800}), list[str]()
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(server.url)
    for question in ("3 + 4 =", "5 * 6 ="):
        page.fill("#question", question)
        page.press("#question", "Enter")
        page.wait_for_selector(
            f"p.question:text-is('{question}') + .columns .answer:last-child .size:has-text('token')"
        )
        page.wait_for_selector("#send:not([disabled])")
    assert page.locator(".answer").count() == 4
    before, after = (page.locator(".answer").nth(i).bounding_box() for i in (0, 1))
    assert before is not None
    assert after is not None
    assert before["y"] == after["y"]
    assert before["x"] < after["x"]
    page.click("#again")
    page.wait_for_selector("#send:not([disabled])")
    assert page.locator(".answer").count() == 4
    page.click("#new")
    assert page.locator(".answer").count() == 0
    assert not errors
