"""The documentation: generated pages are up to date, code in pages runs and prints what stands there, links lead somewhere."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from functools import cache, partial
from pathlib import Path

import pytest

import make_docs
import policygrad as pg
from doubles.small_task import write_task
from pages import algorithms as algorithm_pages
from pages import architecture, markdown, tables
from pages import architecture as picture
from pages import tables as probe
from policygrad.algorithms import ALGORITHMS
from policygrad.catalog import CATALOG, DEFAULT_SOURCES
from policygrad.commands.render import NO_DEVIATIONS, describe_algorithm, diff_algorithms, list_settings
from policygrad.commands.styled import wrap_rows
from policygrad.training.config.serialization import list_parts

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [
    *(ROOT / name for name in ("README.md", "AGENTS.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted(DOCS.rglob("*.md")),
]
OWN = (DOCS / "extending.md").read_text(encoding="utf-8")


@pytest.mark.full
def test_generated_files_are_up_to_date() -> None:
    """All of them, as `make lint` does."""
    assert make_docs.find_outdated(make_docs.generate_files()) == []


def test_generated_pages_are_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that take no seconds each, and of the algorithms' pages two."""
    slow = {
        "help_file": make_docs.HELP_FILE,
        "show_file": make_docs.SHOWN_FILE,
        "embedded_memory_file": make_docs.STORED_FILE,
        "reliability_page": DOCS / "reference" / "reliability.md",
    }
    for name, path in slow.items():
        monkeypatch.setattr(make_docs, name, partial(path.read_text, encoding="utf-8"))
    reference = {path.name: path.read_text(encoding="utf-8") for path in (DOCS / "reference").glob("*.md")}
    monkeypatch.setattr(make_docs, "reference_pages", lambda: reference)  # test_public_reference.py
    shown, drawn = make_docs.algorithm_page, make_docs.gate_figure
    place = DOCS / "algorithms"
    monkeypatch.setattr(
        make_docs,
        "algorithm_page",
        lambda a: shown(a) if a in ("grpo", "vapo") else (place / f"{a}.md").read_text("utf-8"),
    )
    monkeypatch.setattr(
        make_docs,
        "gate_figure",
        lambda a: drawn(a) if a == "grpo" else (place / "gates" / f"{a}.svg").read_text("utf-8"),
    )
    files = make_docs.generate_files()
    assert make_docs.find_outdated(files) == []


def test_a_page_that_is_out_of_date_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right, wrong, missing, old = (
        tmp_path / "algorithms" / f"{name}.md" for name in ("right", "wrong", "missing", "old")
    )
    right.parent.mkdir()
    for path in (right, wrong, old):
        path.write_text("text")
    monkeypatch.setattr(make_docs, "DOCS", tmp_path)
    assert make_docs.find_outdated({right: "text", wrong: "other", missing: "text"}) == [wrong, missing, old]


def test_every_module_has_a_docstring_every_room_a_row_and_a_place_in_the_picture() -> None:
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    modules = list(architecture.PACKAGE.rglob("*.py"))
    assert len(modules) > 150
    for path in modules:
        assert path.name == "__main__.py" or architecture.said(path), path
        if path.name == "__init__.py" and path.parent != architecture.PACKAGE:
            assert f"(../{path.parent.relative_to(ROOT).as_posix()})" in page, path
    shown = set(re.findall(r">([a-z_]+)/", picture.picture()))
    rooms = {name for names in architecture.layers() for name in names if (architecture.PACKAGE / name).is_dir()}
    assert shown <= rooms
    assert rooms - shown <= {
        "audit",
        "commands",
        "models",
        "lab",
        "compare",
        "cluster",
        "report",
        "pages",
        "papers",
        "planning",
        "proxy",
        "sandbox",
        "serve",
        "trl",
        "utils",
        "verification",
    }  # data does not pass through these


@cache
def anchors(page: Path) -> set[str]:
    """What a page's headings are called in links to them."""
    text = page.read_text(encoding="utf-8")
    heads = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


def list_dead_links(path: Path) -> list[str]:
    """Return each link of a page that leads to no file, or to no heading of a page."""
    dead = []
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?[^)]*\)", path.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        page = path.parent / target if target else path
        if not page.exists() or (anchor and page.suffix == ".md" and anchor not in anchors(page)):
            dead.append(f"{path.relative_to(ROOT)}: {target}#{anchor}")
    return dead


def test_links_lead_somewhere() -> None:
    assert [link for path in PAGES for link in list_dead_links(path)] == []


def test_a_dead_link_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    page = tmp_path / "a.md"
    page.write_text("# Here it is\n[a](#here-it-is) [b](#there) [c](a.md) [d](b.md) [e](https://example.org/#x)\n")
    assert list_dead_links(page) == ["a.md: #there", "a.md: b.md#"]


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=pytest.mark.full if path.stem == "where-sources-disagree" else ())
        for path in make_docs.CHECKED
    ],
)
def test_pages_print_what_they_say(path: Path) -> None:
    """Every ```python block that a ```text block follows; the figures in the page are this code's."""
    text = path.read_text(encoding="utf-8")
    assert len(markdown.CODE_AND_OUTPUT.findall(text)) == text.count("```text") > 0, (
        "a ```text block without code before it"
    )
    assert markdown.run_code_blocks(text, path.name) == text


def test_a_changed_figure_is_found() -> None:
    text = "```python\nprint(1 + 1)\n```\n\n```text\n3\n```\n"
    assert markdown.run_code_blocks(text) == text.replace("3", "2")


# --- what the pages say of every algorithm


def test_every_algorithm_is_described() -> None:
    for name, algorithm in ALGORITHMS.items():
        paper = CATALOG[name]
        assert all((paper.title, paper.source, paper.addresses, paper.failure_modes, paper.objective.strip())), name
        assert paper.parent is None or paper.parent in ALGORITHMS, name
        lines = wrap_rows(describe_algorithm(algorithm), 2000)
        shown = " ".join("".join(text for text, _ in line) for line in lines)
        assert all(line in shown for line in paper.objective.split("\n")), name
        assert f"Departs  {paper.deviations or 'nowhere that we know'}" in shown
        written = (DOCS / "algorithms" / f"{name}.md").read_text(encoding="utf-8")
        assert f"differs from it:** {paper.deviations or NO_DEVIATIONS}." in written, name
        assert "\n" not in paper.deviations, name
        held = {f"{type(p).__name__}.{setting}" for p in algorithm.parts() for setting, _ in list_settings(p)}
        unknown = set(paper.defaults) - held - {"samples_per_prompt"}
        assert not unknown, f"{name}: a source for a default that the algorithm does not have"


def test_no_text_is_left_over() -> None:
    assert set(CATALOG) == set(ALGORITHMS)
    parts = [getattr(pg, name) for name in list_parts()]
    known = {f"{kind.__name__}.{f.name}" for kind in parts for f in fields(kind)}
    assert set(DEFAULT_SOURCES) <= known


def test_origins_are_inherited_only_with_the_value() -> None:
    clip = pg.DAPO.gate
    assert algorithm_pages.origin(pg.DAPO, clip, "high", 0.28) == "0.28, sec. 4.1"
    assert algorithm_pages.origin(pg.DR_GRPO, pg.DR_GRPO.gate, "high", 0.2) == "as [`grpo`](grpo.md)"
    for (
        name,
        a,
    ) in ALGORITHMS.items():  # how often a rollout is used is each paper's own, also where the number is a parent's
        for setting in ("epochs", "minibatches") if isinstance(a.update_rule, pg.GradientSteps) else ():
            results = algorithm_pages.origin(a, a.update_rule, setting, getattr(a.update_rule, setting))
            assert not results.startswith("as ["), (name, setting, results)
            assert a.update_rule.updates == 1 or results != algorithm_pages.OURS, (name, setting)
    assert algorithm_pages.origin(pg.MAGISTRAL, pg.MAGISTRAL.advantage[1], "ddof", 1) == algorithm_pages.OURS
    assert algorithm_pages.origin(pg.PRORL, pg.PRORL.terms[0], "beta", 1e-4) == algorithm_pages.OURS


def test_differences_from_the_parent() -> None:
    assert diff_algorithms(pg.GRPO, pg.DAPO) == {
        "filters": ("–", "DropZeroVariance MaskTruncated(False)"),
        "shaping": ("–", "SoftOverlong(0.2, 1)"),
        "gate": ("Clip(high=0.2)", "Clip(high=0.28)"),
        "aggregation": ("SequenceMean", "TokenMean"),
        "terms": ("KLToReference(0.04, k3, token)", "–"),
        "update_rule": ("GradientSteps(minibatches=1)", "GradientSteps(minibatches=16)"),
        "reference": ("Reference", "–"),
    }
    assert diff_algorithms(pg.GRPO, pg.ITERATIVE_GRPO) == {
        "update_rule": ("GradientSteps(epochs=1)", "GradientSteps(epochs=2)"),
        "reference": ("Reference(refresh_every=None)", "Reference(refresh_every=100)"),
    }
    assert diff_algorithms(pg.RLOO, replace(pg.RLOO, samples_per_prompt=5)) == {"samples": ("4", "5")}
    assert diff_algorithms(pg.GSPO, pg.GSPO_TOKEN) == {}


def test_pseudo_code() -> None:
    lines = algorithm_pages.pseudo_code(pg.ITERATIVE_GRPO)
    order = [
        "R",
        "keep log π_old",
        "keep log π_ref",
        "Ψ ← R_i − mean_g",
        "Ψ ← Ψ/(std_g",
        "repeat 2 times",
        "r_t ←",
        "w ←",
        "k ←",
    ]
    order += ["c ←", "g ← Σ ( c w Ψ + c_k k )", "θ ← AdamW", "π_ref ←"]
    at = [next(i for i, line in enumerate(lines) if piece in line) for piece in order]
    assert at == sorted(at)


def test_the_papers_own_updates_per_rollout() -> None:
    """K = epochs × minibatches of each paper; the gate acts from a rollout's second update on."""
    own = {
        "dapo": 16,
        "vapo": 16,
        "cispo": 16,
        "gspo": 4,
        "gspo_token": 4,
        "sapo": 4,
        "prorl": 4,
        "vineppo": 16,
        "ppo": 4,
    }
    once = ("reinforce", "rloo", "opo", "a2c", "grpo", "grpo_process", "dr_grpo", "magistral")
    assert {name: ALGORITHMS[name].update_rule.updates for name in own} == own
    assert all(ALGORITHMS[name].update_rule.updates == 1 for name in once)
    lines = algorithm_pages.pseudo_code(pg.DAPO)
    assert any("for each of 16 shares of whole groups:" in line for line in lines)
    assert pg.DAPO.equation()["step"] == "16 minibatches"


def test_every_row_that_departs_says_so() -> None:
    """One line each, a phrase that a full stop can follow, naming what the spec page knows to be other than published."""
    for name in ALGORITHMS:
        assert not CATALOG[name].deviations.endswith("."), name
    for name, argv in {
        "dapo": "doubles",
        "magistral": "format",
        "rloo": "0.03",
        "prorl": "200",
        "dr_grpo": "8",
    }.items():
        assert argv in CATALOG[name].deviations


@pytest.mark.parametrize(
    ("name", "unit", "ratio", "length"),
    [
        ("reinforce", "completion", "none, r = 1", "a token × 1, the completion × 2"),
        ("rloo", "completion", "none, r = 1", "a token × 1, the completion × 2"),  # its KL is the completion's
        ("ppo", "token", "token", "a token × 1, the completion × 2"),
        ("grpo", "completion", "token", "a token × 0.5, the completion × 1"),
        ("gspo", "completion", "completion, geometric mean", "a token × 0.5, the completion × 1"),
    ],
)
def test_units_and_lengths(name: str, unit: str, ratio: str, length: str) -> None:
    a = pg.get_algorithm(name)
    assert (probe.advantage_unit(a), probe.ratio_unit(a)) == (unit, ratio)
    assert probe.length_handling(a) == f"twice as long: {length}"
    assert probe.ratio_unit(replace(pg.GSPO, ratio=pg.SequenceProduct())) == "completion, product"


def test_gates_in_numbers() -> None:
    assert probe.gate_weights(pg.GRPO, 1.0) == [0.5, 0.9, 1.0, 1.1, 0.0]
    assert probe.gate_weights(pg.GRPO, -1.0) == [0.0, 0.9, 1.0, 1.1, 1.5]
    assert probe.describe_far_outside(pg.GRPO) == "Ψ>0: w = 0 above, r below; Ψ<0: w = r above, 0 below"
    assert probe.describe_far_outside(pg.CISPO) == "w = 5 above, r below"
    assert probe.describe_far_outside(pg.REINFORCE) == "w = 1"
    assert probe.describe_far_outside(pg.SAPO) == "w → 0"


def test_the_classic_comparison_of_memory() -> None:
    """PPO holds four models, GRPO three, with a verifier two, without KL one."""
    assert [row[-2:] for row in tables.compare_memory()] == [("4", "10 P"), ("3", "6 P"), ("2", "5 P"), ("1", "4 P")]


# --- an algorithm of one's own


def own_blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", OWN, re.DOTALL | re.MULTILINE)


def write_own(folder: Path) -> None:
    """The page's modules, as it tells to save them."""
    (folder / "tent.py").write_text(own_blocks()[0], encoding="utf-8")
    (folder / "best.py").write_text(own_blocks()[2], encoding="utf-8")


def test_own_algorithm_in_15_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules are as short as the page says, and the examples print what the page shows."""
    for module in (own_blocks()[0], own_blocks()[2]):
        assert len([line for line in module.splitlines() if line]) <= 15
    write_own(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert OWN.count("```text") == len(markdown.CODE_AND_OUTPUT.findall(OWN)) == 2
    assert markdown.run_code_blocks(OWN) == OWN


@pytest.mark.full
def test_own_algorithm_trains(small: pg.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's gate and its advantage, trained from Python as the page does, at a small size."""
    write_own(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    train, done = pg.train, []
    monkeypatch.setattr(pg, "train", lambda run: done.append(train(replace(small, algorithm=run.algorithm, steps=2))))
    exec(own_blocks()[1], {"__name__": "page"})
    import best

    pg.train(pg.Run(algorithm=best.BEST))
    assert [result.steps for result in done] == [2, 2]
    assert "tent:Tent" in (done[0].output / "run.toml").read_text()
    rows = [json.loads(line) for line in (done[1].output / "completions.jsonl").read_text().splitlines()]
    assert {row["advantage"] for row in rows} <= {0.0, -1.0}
    assert all(row["advantage"] == 0 for row in rows if row["reward"] == 1)


def test_own_gate_on_the_command_line(
    random_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    run_command: Callable[..., tuple[int, str, str]],
) -> None:
    write_own(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "tent", raising=False)
    (command,) = re.findall(r"^policygrad (train .* tent:Tent .*)$", OWN, re.MULTILINE)
    small = "--steps 1 --prompts-per-step 4 --samples-per-prompt 4 --evaluation.problems 0 --output run"
    code, _, err = run_command(*command.split(), *small.split(), *write_task(tmp_path), "--model", str(random_model))
    assert code == 0, err
    text = (tmp_path / "run" / "run.toml").read_text()
    assert 'part = "tent:Tent"\nwidth = 0.3' in text
