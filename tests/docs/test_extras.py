"""Every extra has a case in `make test-extras`, and docs/extras.md reports the results."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from pathlib import Path

import pytest

from check_extras import (
    CASES,
    RESULTS,
    Case,
    Environment,
    build_argv,
    command_environment,
    folder_size,
    packages_of,
    prepare_folder,
    read_extras,
    serving,
)
from pages.blocks import extras_block

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
BASE = {"mib": 1500.4, "seconds": 60.2, "versions": {"policygrad": "0.1.0"}, "python": "3.11"}


def test_every_extra_is_tried() -> None:
    assert {case.extra for case in CASES} == set(EXTRAS) - {"dev"}


def test_packages_of_an_extra_include_those_of_other_extras() -> None:
    extras, pinned = read_extras()
    assert packages_of("qlora", extras) == ["peft", "bitsandbytes"]
    assert packages_of("llama-cpp", extras) == ["httpx", "gguf", "xllamacpp"]
    assert "lora" in pinned
    assert not {"qlora", "trackio", "verifiers", "textarena", "dev"} & pinned


def test_the_code_refuses_every_missing_extra() -> None:
    """By its name, or by a variable where one message serves several extras."""
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    named = set(re.findall(r"install_command\((?:['\"]([\w-]+)['\"]|\w+)\)", source)) - {""}
    named |= set(re.findall(r"import_optional\([^)]*['\"]([\w-]+)['\"]\)", source))
    by_name = {"wandb", "tensorboard", "trackio", "mlflow", "lora", "qlora"}  # install_command(name), (extra)
    assert {case.extra for case in CASES} - {"docs"} <= named | by_name
    assert named <= set(EXTRAS)


def test_documented_installs_name_no_package_on_an_index() -> None:
    """Every documented `pip install` names a clone or a wheel file, and an extra that exists."""
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


def test_the_table_shows_results_and_what_was_not_tried() -> None:
    good = {"mib": 12.3, "seconds": 4.5, "features": ["`a`", "`b`"], "versions": {"peft": "1"}}
    results = {
        "policygrad": BASE,
        "lora": good | {"without": ["refused", "refused"], "with": ["works", "works"]},
        "data": good | {"without": ["already installed"] * 2, "with": ["works", "exit code 2: no"]},
    }
    text = extras_block(results)
    assert "| `lora` | `a`; `b` | peft 1 | 12 | 4 | refused | works |" in text
    assert "| `data` | `a`; `b` | peft 1 | 12 | 4 | already installed | works, **failed** |" in text
    assert "Not tried yet: `math`, `qlora`, `control`," in text
    assert "1,500 MiB and 60 s to install, on Python 3.11 (policygrad 0.1.0)" in text
    assert "Not tried yet" in extras_block({})


def test_no_extra_failed_in_the_committed_results() -> None:
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert set(results) - {"policygrad"} <= set(EXTRAS) - {"dev"}
    for name, row in results.items():
        if name != "policygrad":
            assert set(row["without"]) <= {"refused", "already installed"}, name
            assert set(row["with"]) == {"works"}, name


def test_an_environment_sees_its_base_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr("venv.EnvBuilder._setup_pip", lambda self, context: None)  # which takes seconds
    base = Environment(tmp_path / "base")
    (base.packages / "of_the_base.py").write_text("")
    more = Environment(tmp_path / "more", base)
    assert more.added_bytes == 0
    (more.packages / "of_its_own.py").write_text("x = 1\n")
    assert more.added_bytes == 6
    assert more.run("-c", "import of_the_base, of_its_own", cwd=tmp_path).returncode == 0
    for word in ("torch", "pytest"):
        assert "ModuleNotFoundError" in more.run("-c", f"import {word}", cwd=tmp_path).stderr
    assert "ModuleNotFoundError" in base.run("-c", "import of_its_own", cwd=tmp_path).stderr
    assert folder_size(tmp_path / "nowhere") == 0
    assert command_environment(tmp_path)["HOME"] == str(tmp_path)
    assert not [name for name in command_environment(tmp_path) if name.startswith("PYTHONPATH")]


def test_a_case_gets_its_files_and_its_server(tmp_path: Path) -> None:
    case = Case("judge", "", ("{root}", "a={url}/v1"), files={"in/good.md": "x"}, server="judge")
    folder = prepare_folder(case, tmp_path / "work")
    assert (folder / "in" / "good.md").read_text() == "x"
    with serving(case, Path(sys.executable), folder) as url:
        assert build_argv(case, url) == [str(ROOT), f"a={url}/v1"]
        assert url.startswith("http://127.0.0.1:")
    with serving(Case("x", "", ()), Path(sys.executable), folder) as url:
        assert url == ""
