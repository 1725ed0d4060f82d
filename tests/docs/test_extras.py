"""Every extra is tried by `make test-extras`, and its page says what came of it."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from pathlib import Path

import pytest

from check_extras import RESULTS, Environment, asked, packages_of, prepared, project, serving, size, variables
from extras.cases import CASES, Case
from pages.blocks import extras_block

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
BASE = {"mib": 1500.4, "seconds": 60.2, "versions": {"policygrad": "0.1.0"}, "python": "3.11"}


def test_every_extra_is_tried() -> None:
    assert {case.extra for case in CASES} == set(EXTRAS) - {"dev"}


def test_what_an_extra_asks_for_is_read_through_other_extras() -> None:
    extras, pinned = project()
    assert packages_of("qlora", extras) == ["peft", "bitsandbytes"]
    assert packages_of("llama-cpp", extras) == ["httpx", "gguf", "xllamacpp"]
    assert "lora" in pinned
    assert not {"qlora", "trackio", "verifiers", "textarena", "dev"} & pinned


def test_every_refusal_stands_in_the_code() -> None:
    """With the name of the extra, or with the word that stands for it where one message is for several."""
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    said = set(re.findall(r"install_command\((?:['\"]([\w-]+)['\"]|\w+)\)", source)) - {""}
    by_name = {"wandb", "tensorboard", "trackio", "mlflow", "lora", "qlora"}  # install_command(name), (extra)
    assert {case.extra for case in CASES} - {"docs"} <= said | by_name
    assert said <= set(EXTRAS)


def test_documented_installs_name_no_package_on_an_index() -> None:
    """The package is on no index: every `pip install` of it names a clone or a wheel's file, and an extra that there is."""
    files = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "pyproject.toml", ROOT / "constraints.txt"]
    for folder, kinds in {
        "docs": (".md",),
        "notebooks": (".ipynb", ".md"),
        "cluster": (".yaml", ".md"),
        "examples": (".py", ".md"),
        "scripts": (".py",),
        "src": (".py", ".html", ".js"),
    }.items():
        files += [path for path in (ROOT / folder).rglob("*") if path.suffix in kinds]
    for path in files:
        text = path.read_text(encoding="utf-8")
        for command in re.findall(r"pip install[^\n`]*", text):
            assert not re.search(r"install (-\S+ )*['\"]?policygrad\b(?!-\d)", command), f"{path.name}: {command}"
        for extras in re.findall(r"pip install[^\n`]*['\"](?:\.|[^'\"\n]*\.whl)\[([\w,-]+)\]", text):
            assert path.name == "check_extras.py" or set(extras.split(",")) <= set(EXTRAS), f"{path.name}: {extras}"


def test_make_train_installs_no_extra_and_is_not_quiet() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    rules = dict(re.findall(r"^(\S[^:=\n]*):[^=\n]*\n((?:\t.*\n)+)", text, re.MULTILINE))
    needs = dict(re.findall(r"^(\S[^:=\n]*): ?([^=\n]*)$", text, re.MULTILINE))
    assert needs["train"] == "$(TRAINS)"
    assert "$(PIP) -e .\n" in rules["$(TRAINS)"]
    assert needs["$(STAMP)"] == "$(TRAINS)"
    assert "'.[dev]'" in rules["$(STAMP)"]
    assert "--quiet" not in text.split("# Others' packages")[0]


def test_the_table() -> None:
    good = {"mib": 12.3, "seconds": 4.5, "shows": ["`a`", "`b`"], "versions": {"peft": "1"}}
    found = {
        "policygrad": BASE,
        "lora": good | {"without": ["named", "named"], "with": ["works", "works"]},
        "data": good | {"without": ["policygrad brings it along"] * 2, "with": ["works", "exit code 2: no"]},
    }
    text = extras_block(found)
    assert "| `lora` | `a`; `b` | peft 1 | 12 | 4 | refused by its name | works |" in text
    assert (
        "| `data` | `a`; `b` | peft 1 | 12 | 4 | policygrad brings it along | works, **not as it should be** |" in text
    )
    assert "Not tried by it yet: `math`, `qlora`, `control`," in text
    assert "1,500 MiB and 60 s to install, on Python 3.11 (policygrad 0.1.0)" in text
    assert "Not tried yet" in extras_block({})


def test_what_is_committed_is_as_it_should_be() -> None:
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert set(found) - {"policygrad"} <= set(EXTRAS) - {"dev"}
    for name, row in found.items():
        if name != "policygrad":
            assert set(row["without"]) <= {"named", "policygrad brings it along"}, name
            assert set(row["with"]) == {"works"}, name


def test_an_environment_sees_the_other_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr("venv.EnvBuilder._setup_pip", lambda self, context: None)  # which takes seconds
    base = Environment(tmp_path / "base")
    (base.packages / "of_the_base.py").write_text("")
    more = Environment(tmp_path / "more", base)
    assert more.added == 0
    (more.packages / "of_its_own.py").write_text("x = 1\n")
    assert more.added == 6
    assert more.run("-c", "import of_the_base, of_its_own", cwd=tmp_path).returncode == 0
    for word in ("torch", "pytest"):
        assert "ModuleNotFoundError" in more.run("-c", f"import {word}", cwd=tmp_path).stderr
    assert "ModuleNotFoundError" in base.run("-c", "import of_its_own", cwd=tmp_path).stderr
    assert size(tmp_path / "nowhere") == 0
    assert variables(tmp_path)["HOME"] == str(tmp_path)
    assert not [name for name in variables(tmp_path) if name.startswith("PYTHONPATH")]


def test_a_case_has_its_files_and_its_server(tmp_path: Path) -> None:
    case = Case("judge", "", ("{root}", "a={url}/v1"), files={"in/good.md": "x"}, server="judge_stand_in.py")
    folder = prepared(case, tmp_path / "work")
    assert (folder / "in" / "good.md").read_text() == "x"
    with serving(case, Path(sys.executable), folder) as url:
        assert asked(case, url) == [str(ROOT), f"a={url}/v1"]
        assert url.startswith("http://127.0.0.1:")
    with serving(Case("x", "", ()), Path(sys.executable), folder) as url:
        assert url == ""
