"""`policygrad export --push`, by the hub's own client, to a hub on this machine."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub import constants

from doubles.forked import Forked
from doubles.hub import Hub, gone, hub
from policygrad import cli

FILES = {"config.json": b'{"model_type": "llama"}', "model.safetensors": b"\x00" * 64, "README.md": "# π\n".encode()}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    (folder / "model").mkdir(parents=True)
    (folder / "run.toml").write_text('model = "tiny"\n')
    (folder / "completions.jsonl").write_text('{"secret": true}\n')
    for name, content in FILES.items():
        (folder / "model" / name).write_bytes(content)
    return folder


Push = Callable[..., tuple[int, str, str]]


@pytest.fixture
def push(forked: Forked, tmp_path: Path) -> Push:
    """`push(hub, folder, "me/it", token="hf_right")` -> (exit code, standard output, standard error) of `export --push`.

    The client reads its hub when it is imported, so each command is a process of its own; `imports`: one that imports it anew.
    """

    def call(there: Hub, folder: Path, repo: str, *, token: str | None, imports: bool = False) -> tuple[int, str, str]:
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
        environment |= {"HF_ENDPOINT": there.url, "HF_HOME": "/nonexistent"} | (
            {} if token is None else {"HF_TOKEN": token}
        )
        argv, files = ["export", str(folder), "--push", repo], (tmp_path / "out", tmp_path / "err")
        code = forked.exit_code(enter, argv, environment, imports, *files)
        return code, *(file.read_text(encoding="utf-8") for file in files)

    return call


def enter(argv: list[str], environment: dict[str, str], imports: bool, out: Path, err: Path) -> int:
    """Be the command line in a fork of this process, with a client that does not wait between its attempts."""
    if imports:
        for name in [name for name in sys.modules if name.partition(".")[0] == "huggingface_hub"]:
            del sys.modules[name]
    else:
        constants.ENDPOINT, constants.HF_TOKEN_PATH = environment["HF_ENDPOINT"], "/nonexistent/token"
    os.environ.clear()
    os.environ.update(environment)
    time.sleep = lambda seconds: None
    with out.open("w", encoding="utf-8") as sys.stdout, err.open("w", encoding="utf-8") as sys.stderr:
        return cli.main(argv)


def test_only_the_model_and_its_card_are_pushed(run: Path, push: Push) -> None:
    with hub() as there:
        code, out, err = push(there, run, "me/it", token="hf_right", imports=True)
        assert (code, out) == (0, f"{there.url}/me/it\n"), err
        assert there.files == FILES
        assert there.created[0]["name"] == "it"
        assert there.created[0].get("private") is True or there.created[0].get("visibility") == "private"


def test_a_refusal_of_the_hub_has_a_remedy(run: Path, push: Push) -> None:
    with hub() as there:
        for token, output in ((None, "hf auth login"), ("hf_wrong", "check the name, and the token's permission")):
            code, _, err = push(there, run, "me/it", token=token)
            assert (code, output in err) == (2, True), err
        assert there.files == {}


def test_an_unreachable_hub_leaves_the_local_model(run: Path, push: Push) -> None:
    with gone() as there:
        code, _, err = push(there, run, "me/it", token="hf_right")
        assert (code, f"the model stays in {run / 'model'}, push it later" in " ".join(err.split())) == (2, True), err
    with hub() as there:
        there.leaves = "/commit/"
        code, _, err = push(there, run, "me/it", token="hf_right")
        assert (code, "cannot be reached" in err) == (2, True), err
        assert (len(there.created), there.files) == (1, {})
        there.leaves = ""
        code, out, err = push(there, run, "me/it", token="hf_right")
        assert (code, out) == (0, f"{there.url}/me/it\n"), err
        assert there.files == FILES


def test_an_invalid_repository_or_model_is_refused_at_the_start(
    run: Path, tmp_path: Path, run_command: Callable[..., tuple[int, str, str]]
) -> None:
    for argv, output in (
        ((run, "--push", "it"), "OWNER/NAME"),
        ((tmp_path, "--push", "me/it"), "holds no run and no model"),
        ((run, "--public"), "add --push OWNER/NAME"),
        ((run, "--push", "me/it", "--dtype", "bf16"), "--dtype are for --merge"),
    ):
        code, _, err = run_command("export", *map(str, argv))
        assert (code, output in err) == (2, True), err
