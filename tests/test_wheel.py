"""The wheel as others install it: complete, and it trains without the repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "policygrad"
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")


def run(*words: str | Path, cwd: Path) -> str:
    """A command's output; the repository's own `src` is not on its path."""
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env = outside | {"PYTHONNOUSERSITE": "1", "HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run([str(w) for w in words], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def can_build() -> bool:
    """Whether this environment has the setuptools that pyproject.toml asks for, so that nothing need be fetched."""
    try:
        return int(version("setuptools").split(".")[0]) >= 77
    except PackageNotFoundError:
        return False


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, since setuptools leaves `build/` behind and puts what it finds there into the next wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    if can_build():
        run(
            sys.executable,
            "-c",
            f"from setuptools import build_meta; build_meta.build_wheel({str(folder)!r})",
            cwd=source,
        )
    else:
        run(*PIP, "wheel", "--no-deps", "--wheel-dir", folder, source, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def binaries(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of an environment that has the wheel, and everything else from this one."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, symlinks=True)
    programs = folder / ("Scripts" if os.name == "nt" else "bin")
    python = programs / "python"
    run(*PIP[:3], "--python", python, *PIP[3:], "install", "--no-deps", "--no-index", wheel, cwd=folder)
    own = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip())
    here = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (own / "other_packages.pth").write_text(
        "\n".join(here) + "\n"
    )  # their own .pth files, an editable install, are not read
    result = run(python, "-c", "import policygrad; print(policygrad.__file__)", cwd=folder).strip()
    assert Path(result).is_relative_to(own)
    return programs


def test_everything_is_in_the_wheel(wheel: Path) -> None:
    """Every file of the package: a module, the embedded models, the page's template, py.typed."""
    here = {path.relative_to(PACKAGE.parent).as_posix() for path in PACKAGE.rglob("*") if path.is_file()}
    here = {name for name in here if "__pycache__" not in name}
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert packed == here
    data = {name for name in packed if not name.endswith(".py")}
    assert "policygrad/py.typed" in data
    assert {Path(name).parent.name for name in data if "/skills/" not in name} == {
        "commands",
        "compare",
        "converters",
        "policygrad",
        "shapes",
        "planning",
        "tasks",
        "tiny",
        "formats",
        "trackers",
        "training",
        "trl",
        "web",
    }


@pytest.mark.full
def test_the_installed_command_trains(binaries: Path, tmp_path: Path) -> None:
    small = "--steps 2 --prompts-per-step 4 --evaluation.problems 0 --plain"
    message = run(binaries / "policygrad", "train", *small.split(), cwd=tmp_path)
    assert "step 2/2" in message
    assert (tmp_path / "runs" / "dapo-1" / "model" / "model.safetensors").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
