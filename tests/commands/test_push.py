"""`policygrad export --push`, by the hub's own client, to a hub on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from doubles.hub import Hub, gone, hub

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


IMPATIENT = "import sys, time; time.sleep = lambda seconds: None; from policygrad.cli import main; sys.exit(main())"
"""The command line, whose client does not wait between its attempts."""


def pushed(there: Hub, *argv: str, token: str | None) -> tuple[int, str, str]:
    """The client reads its hub when it is imported, so each command is a process of its own."""
    own = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
    own |= {"HF_ENDPOINT": there.url, "HF_HOME": "/nonexistent"} | ({} if token is None else {"HF_TOKEN": token})
    argv = (sys.executable, "-c", IMPATIENT, "export", *argv)
    done = subprocess.run(argv, capture_output=True, text=True, env=own, timeout=120, check=False)
    return done.returncode, done.stdout, done.stderr


def test_only_the_model_and_its_card_are_pushed(run: Path) -> None:
    with hub() as there:
        code, out, err = pushed(there, str(run), "--push", "me/it", token="hf_right")
        assert (code, out) == (0, f"{there.url}/me/it\n"), err
        assert there.files == FILES
        assert there.created[0]["name"] == "it"
        assert there.created[0].get("private") is True or there.created[0].get("visibility") == "private"


def test_a_refusal_of_the_hub_has_a_remedy(run: Path) -> None:
    with hub() as there:
        for token, output in ((None, "hf auth login"), ("hf_wrong", "check the name, and the token's permission")):
            code, _, err = pushed(there, str(run), "--push", "me/it", token=token)
            assert (code, output in err) == (2, True), err
        assert there.files == {}


def test_an_unreachable_hub_leaves_the_local_model(run: Path) -> None:
    with gone() as there:
        code, _, err = pushed(there, str(run), "--push", "me/it", token="hf_right")
        assert (code, f"the model stays in {run / 'model'}, push it later" in " ".join(err.split())) == (2, True), err
    with hub() as there:
        there.leaves = "/commit/"
        code, _, err = pushed(there, str(run), "--push", "me/it", token="hf_right")
        assert (code, "cannot be reached" in err) == (2, True), err
        assert (len(there.created), there.files) == (1, {})
        there.leaves = ""
        code, out, err = pushed(there, str(run), "--push", "me/it", token="hf_right")
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
