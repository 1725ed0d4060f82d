"""docs/serve.md: its loop runs as it stands, against the command that it names, and its tables are complete."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tinker", reason="the extra `serve`")

from serve.running import running

from pages.blocks import serve_block
from pages.markdown import load
from policygrad.serve.losses import API_LOSSES, UNAVAILABLE

PAGE = (Path(__file__).parents[2] / "docs" / "serve.md").read_text(encoding="utf-8")


@pytest.mark.full
def test_the_loop_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    [program] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert 25 <= len([line for line in program.splitlines() if line.strip()]) <= 40
    with running(tmp_path / "served") as server:
        monkeypatch.setenv("TINKER_BASE_URL", server.url)
        names: dict[str, Any] = {"__name__": "page"}
        exec(compile(program, "page", "exec", dont_inherit=True), names)
        with names["service"]:  # closes it
            pass
    rewards = [float(x) for x in re.findall(r"reward ([\d.]+)", capsys.readouterr().out)]
    assert len(rewards) == 12
    assert rewards[-1] > rewards[0] + 0.2


def test_every_loss_has_its_row() -> None:
    table = PAGE.partition("| loss_fn |")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == {*API_LOSSES}
    assert all(f"`{name}`" in PAGE for name in UNAVAILABLE)


def test_settings_have_the_defaults_that_the_page_names() -> None:
    """A request without settings is one with the page's."""
    import torch

    from policygrad.core.batch import Forward
    from policygrad.serve.losses import Datum, prepare_loss

    named = {
        "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
        "cispo": {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
        "gspo": {"clip_low_threshold": 1 - 3e-4, "clip_high_threshold": 1 + 4e-4},
        "dro": {"beta": 0.05},
    }
    for name, config in named.items():
        inputs = {
            "target_tokens": torch.arange(6),
            "logprobs": torch.linspace(-3, 0, 6),
            "advantages": torch.linspace(-1, 1, 6),
        }
        if name == "gspo":
            inputs["sequence_ratio_mask"] = torch.ones(6)
        data, logp = [Datum(torch.arange(6), inputs)], Forward(torch.linspace(-1, -2, 6)[None])
        values = [prepare_loss(name, c, data).value(logp, torch.arange(1)) for c in ({}, config)]
        assert values[0] == values[1]


def test_what_was_measured() -> None:
    """The committed figures; that of the tiny model's overhead is on the page as it is."""
    results = load("serve")
    assert results is not None
    assert results["kills"]["kills"] == 200
    assert results["kills"]["updates"] // 3 == results["kills"]["checkpoints"]
    embedded = results["embedded task"]
    assert embedded["seeds"] == [0, 1, 2]
    assert abs(embedded["served_mean"] - embedded["train_mean"]) < 0.02
    assert all(x["overhead"] < 0.15 for name, x in results.items() if name.startswith("step of SmolLM2"))
    text = serve_block(results)
    assert f"{results['step of tiny']['overhead']:+.0%}" in text
    assert "Not run yet" in serve_block({})
