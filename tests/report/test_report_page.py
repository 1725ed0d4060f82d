"""The report's page: it asks for nothing, says what ran, escapes what models write, and works in a browser, wide and narrow."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from doubles.comparison import plan
from doubles.comparison import row as comparison_row
from doubles.runs import row, run_folder
from policygrad.cli import main
from policygrad.commands.report import find_runs
from policygrad.compare.plan import FIRST_TUNING_SEED, Job, open_comparison
from policygrad.report.data import read_run
from policygrad.report.page import render_report

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NASTY = "</script><img src=x onerror=alert(1)>"


def metrics(step: int, high: float) -> dict[str, float]:
    result = {
        "reward": high * step / 8,
        "entropy": 1.0 / step,
        "grad_norm": 1.0,
        "time/rollout": 1.0,
        "time/update": 2.0,
    }
    return result | {"completions/truncated_ratio": 0.0, "mine/own": float(step), "tokens/sampled": 100.0}


def answers(step: int) -> list[dict[str, Any]]:
    chat = [{"role": "user", "content": "What is 1 + 1?"}]
    rows = [
        row(chat, f"It is {step}.", float(step == 2), group=0, rewards={"right": 1.0, "short": 0.5}) for _ in range(2)
    ]
    turns = [["policy", "look around"], ["environment", "a door"]]
    return [*rows, row(NASTY, NASTY, None, group=1), row("Go", "look around a door", 0.25, group=2, turns=turns)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    place = tmp_path_factory.mktemp("runs")
    steps = range(1, 9)

    def made(name: str, algorithm: str, seed: int, high: float, completions: bool) -> Path:
        texts = [(s, answers(s)) for s in steps] if completions else []
        held = [(0, {"eval/reward": 0.1}), (8, {"eval/reward": high})]
        lines = [held[0], *((s, metrics(s, high)) for s in steps), held[1]]
        return run_folder(place / name, lines, texts, name=algorithm, seed=seed)

    return [made("a", "dapo", 0, 0.8, True), made("b", "dapo", 1, 1.0, False), made("c", "gspo", 0, 0.4, False)]


@pytest.fixture(scope="module")
def text(folders: list[Path]) -> str:
    return render_report([read_run(folder) for folder in folders])


def embedded(text: str) -> Any:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1])


def test_the_page_requests_nothing_and_escapes_completions(text: str) -> None:
    assert not re.findall(r'(?:src|href)="(?!#|data:)', text)
    assert "default-src 'none'" in text
    assert "connect-src" not in text
    assert NASTY not in text
    assert embedded(text)["completions"]["rows"][2]["c"] == NASTY


def test_the_page_names_algorithms_settings_seeds_and_scores(text: str) -> None:
    assert "<h1>dapo and gspo</h1>" in text
    assert "<dt>gate w</dt><dd><code>Clip(low=0.2)</code></dd>" in text
    assert "<dt>seeds</dt><dd>0, 1</dd>" in text
    said = re.sub(r"\s+", " ", text)
    assert '0.100 → <b>0.900</b> <span class="change">+0.800 (+0.700 to +0.900 over 2 runs)</span>' in said
    assert "dapo on embedded, model tiny, 8 steps in 24s, 2 runs" in said
    assert "3 runs are not over yet" in text


def test_runs_of_different_lengths_state_the_range_of_steps(tmp_path: Path) -> None:
    runs = [
        read_run(run_folder(tmp_path / name, [(s, {"reward": 0.5}) for s in range(1, last + 1)], name=name))
        for name, last in (("dapo", 16), ("gspo", 12))
    ]
    runs += [replace(runs[0], folder=tmp_path / "later", metrics={"reward": runs[0].metrics["reward"][:12]})]
    assert "12 to 16 of 8 steps" in render_report([runs[0], runs[2]])
    assert "16 of 8 steps" in render_report(runs[:1])


def test_a_unit_that_repeats_the_name_is_omitted(text: str) -> None:
    """It was headed "reward, reward"."""
    data = embedded(text)["metrics"]
    assert "unit" not in data["reward"]
    assert data["eval/reward"]["unit"] == "reward"


def test_every_metric_has_its_explanation(text: str) -> None:
    data = embedded(text)
    assert data["first"] == ["reward", "eval/reward", "entropy", "grad_norm"]  # nothing was cut off
    assert data["metrics"]["entropy"]["unit"] == "nats per token"
    assert "exploration has ended" in data["metrics"]["entropy"]["interpretation"]
    assert data["chapters"]["Others"] == ["mine/own"]
    assert sorted(n for names in data["chapters"].values() for n in names) == sorted(data["metrics"])
    assert data["metrics"]["eval/reward"]["lines"][0] == {"value": [0.1, 0.9], "low": [0.1, 0.8], "high": [0.1, 1.0]}


def test_omitted_completions_are_stated(folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("policygrad.report.page.MAX_PAGE_CHARS", 1500)
    result = render_report([read_run(folders[0])])
    data = embedded(result)["completions"]["rows"]
    assert 8 <= len(data) < 32
    said = re.sub(r"\s+", " ", result)
    assert f"{len(data)} completions from all 8 steps, which are not all that the runs have logged" in said


def test_omitted_steps_are_counted(folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("policygrad.report.page.MAX_PAGE_CHARS", 1500)
    monkeypatch.setattr("policygrad.report.completions.SAMPLED_STEPS", 4)
    result = re.sub(r"\s+", " ", render_report([read_run(folders[0])]))
    assert "completions from 4 of the 8 steps, which are not all" in result


def test_folders_of_a_glob_that_are_not_runs_are_skipped_with_a_note(
    folders: list[Path], tmp_path: Path, capsys: Any
) -> None:
    """A shell gives every name there is for runs/*: files, other folders, a run that has just begun."""
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "plots").mkdir()
    begun = run_folder(tmp_path / "begun", [])
    file = tmp_path / "out.html"
    argv = [str(path) for path in (*folders, begun, tmp_path / "notes.txt", tmp_path / "plots")]
    assert main(["report", *argv, "--output", str(file)]) == 0
    assert capsys.readouterr().err == f"skipped, not runs: {tmp_path / 'notes.txt'}, {tmp_path / 'plots'}\n"
    assert "<h1>dapo and gspo</h1>" in file.read_text(encoding="utf-8")


def test_a_comparison_folder_stands_for_its_runs(tmp_path: Path, capsys: Any) -> None:
    made = plan(comparison_row("first"), comparison_row("second"), seeds=2)
    folder = tmp_path / "compared"
    open_comparison(folder, made)
    assert main(["report", str(folder)]) == 2
    assert "is a comparison without runs so far" in capsys.readouterr().err
    for name, algorithm in (("first", "dapo"), ("second", "gspo")):
        for seed in (0, 1, FIRST_TUNING_SEED):
            place = folder / Job(name, None, seed).folder
            run_folder(place, [(s, metrics(s, 0.8)) for s in (1, 2)], name=algorithm, seed=seed)
    assert main(["report", str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder / 'report.html'}\n"
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert "<h1>dapo and gspo</h1>" in text
    assert find_runs([folder]) == tuple(folder / Job(n, None, s).folder for n in ("first", "second") for s in (0, 1))


def test_the_command_writes_the_page_and_errors_have_a_remedy(folders: list[Path], tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "out.html"
    assert main(["report", *map(str, folders), "--output", str(file)]) == 0
    assert capsys.readouterr().out == f"{file}\n"
    assert "<h1>dapo and gspo</h1>" in file.read_text(encoding="utf-8")
    assert main(["report", str(folders[0])]) == 0
    assert (folders[0] / "report.html").is_file()
    empty = run_folder(tmp_path / "empty", [])
    for argv, said in (
        ([], "name the folder of a run"),
        ([str(tmp_path)], "holds no run: give the --output folder"),
        ([str(tmp_path / "no")], "is not a folder"),
        ([str(empty)], "has no metrics yet: wait for the run's first step, or use --watch"),
        ([str(empty), str(tmp_path / "no")], "is not a folder"),
        ([str(empty), str(empty / "run.toml")], "has no metrics yet"),
        ([str(tmp_path), str(file)], "is a run. Give the folder"),
        ([str(folders[0]), "--port", "1"], "add --watch"),
        ([str(folders[0]), "--watch", "--output", "x.html"], "give only one of them"),
        ([str(folders[0]), "--output", str(tmp_path / "no" / "x.html")], "create it first"),
    ):
        assert main(["report", *argv]) == 2
        assert said in capsys.readouterr().err


# ---- in a browser


@pytest.fixture(scope="module")
def file(text: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("page") / "report.html"
    place.write_text(text, encoding="utf-8")
    return place


def opened(chromium: Browser, file: Path, width: int = 1280, scheme: str = "light") -> tuple[Page, list[str]]:
    """(the page, what went wrong on it so far and from now on)."""
    tab = chromium.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme, reduced_motion="reduce")
    wrong: list[str] = []
    tab.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    tab.on("pageerror", lambda error: wrong.append(str(error)))
    tab.on("request", lambda r: None if r.url.startswith(("file:", "data:")) else wrong.append(r.url))
    tab.goto(file.as_uri())
    tab.wait_for_selector("#first .curve")
    return tab, wrong


@pytest.mark.parametrize(
    ("width", "scheme"),
    [
        (1280, "light"),
        *(pytest.param(*case, marks=pytest.mark.full) for case in ((390, "light"), (1280, "dark"), (390, "dark"))),
    ],
)
def test_the_page_loads_without_errors_and_fits_the_window(
    chromium: Browser, file: Path, width: int, scheme: str
) -> None:
    tab, wrong = opened(chromium, file, width, scheme)
    assert tab.evaluate("document.documentElement.scrollWidth") == width
    paper = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, paper[4:-1].split(","))) > 600) == (scheme == "light")
    assert tab.locator("#first figure").count() == 4
    assert tab.locator("#timeline rect[fill]").count() == 16
    tab.close()
    assert wrong == []


@pytest.mark.full
def test_curves_have_bands_a_legend_hides_and_the_picker_explains(chromium: Browser, file: Path) -> None:
    tab, wrong = opened(chromium, file)
    reward = tab.locator('#first [data-metric="reward"]')
    assert reward.locator(".curve").count() == 2
    assert reward.locator(".band").count() == 1
    tab.locator("#legend").get_by_role("button", name="dapo").click()
    assert reward.locator(".curve").count() == 1
    assert tab.locator("#picked .curve").count() == 1
    tab.select_option("#picker", "mine/own")
    assert "the run's own" in tab.locator("#meaning").inner_text()
    tab.locator("#first").get_by_role("button", name="entropy").click()
    assert "exploration has ended" in tab.locator("#meaning").inner_text()
    tab.locator("#picked svg[role=img]").focus()
    tab.keyboard.press("End")
    assert "step: 8" in tab.locator("#tip").inner_text()
    tab.close()
    assert wrong == []


@pytest.mark.full
def test_every_plot_can_be_downloaded(chromium: Browser, file: Path, tmp_path: Path) -> None:
    tab, wrong = opened(chromium, file)
    assert tab.locator(".take").count() == tab.locator(".panel svg[role=img]").count() == 6
    figure = tab.locator('#first [data-metric="eval/reward"]')
    for kind in ("SVG", "PNG", "CSV"):
        with tab.expect_download() as download:
            figure.get_by_role("button", name=kind).click()
        download.value.save_as(tmp_path / kind)
        assert download.value.suggested_filename == f"eval-reward.{kind.lower()}"
    svg = ElementTree.parse(tmp_path / "SVG").getroot()
    words = "".join(svg.itertext())
    assert "held-out reward" in words
    assert "gspo" in words  # the legend
    assert "var(--" not in (tmp_path / "SVG").read_text()
    assert (tmp_path / "PNG").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "CSV").read_text().splitlines()[:2] == [
        'step,dapo,"dapo, low","dapo, high",gspo',
        "0,0.1,0.1,0.1,0.1",
    ]
    tab.close()
    assert wrong == []


@pytest.mark.full
def test_completions_can_be_searched_and_compared(chromium: Browser, file: Path) -> None:
    tab, wrong = opened(chromium, file)
    tab.fill("#text", "it is 2")
    assert tab.locator("#found").inner_text() == "2 of 32 match."
    assert tab.locator("#list .item").count() == 1  # one group
    assert tab.locator("#list mark").all_inner_texts() == ["It is 2"] * 2
    assert "short 0.5" in tab.locator("#list .facts").nth(1).inner_text()
    tab.locator("#list .others").first.get_by_role("button", name="8", exact=True).click()
    assert tab.locator("#pair del").all_inner_texts() == ["2"]
    assert tab.locator("#pair ins").all_inner_texts() == ["8"]
    tab.fill("#text", "")
    tab.fill("#low", "0.2")
    tab.fill("#high", "0.3")
    tab.select_option("#step", "5")
    assert tab.locator("#list .bubble").all_inner_texts() == ["Go", "policy\nlook around", "environment\na door"]
    tab.fill("#low", "")
    tab.fill("#high", "")
    tab.select_option("#order", "best")
    assert tab.locator("#list .reward").all_inner_texts() == ["reward 0.25", "reward 0", "reward 0", "no reward"]
    tab.close()
    assert wrong == []
