"""Virtual environments: one of packages alone, and others that see it and have one thing more."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
import venv
from collections.abc import Sequence
from pathlib import Path

LIMIT = 600
"""Seconds for a command."""
SHOWN = 1500
"""Characters of what a command has said last."""
_LISTED = (
    "import json\nfrom importlib.metadata import distributions\n"
    "print(json.dumps({d.name.lower().replace('_', '-'): d.version for d in [*distributions()][::-1]}))"
)


class Environment:
    """A virtual environment with a Python of its own."""

    def __init__(self, folder: Path, sees: Environment | None = None, *, there: bool = False) -> None:
        """sees: another one, whose packages it has too, behind its own. there: it is as it was left; otherwise it is made anew."""
        if not there:
            shutil.rmtree(folder, ignore_errors=True)
            venv.create(folder, with_pip=True, symlinks=os.name != "nt")
        self.python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
        told = self.run("-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).stdout
        self.packages = Path(told.strip())
        if sees is not None:
            for path in self.packages.glob("setuptools*"):  # that of the other is torch's choice
                shutil.rmtree(path)
            (self.packages / "seen.pth").write_text(f"{sees.packages}\n", encoding="utf-8")
        self.empty = size(self.packages)

    def run(self, *words: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
        """A command of its Python, which has the folder for its home."""
        return self._run(words, cwd, variables(cwd))

    def install(self, what: str | Path, constraints: Path) -> float:
        """Seconds. Raises SystemExit with what pip says."""
        began = time.perf_counter()
        words = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", constraints, what)
        done = self._run(words, self.packages, kept())
        if done.returncode:
            raise SystemExit(f"pip install {Path(what).name}: {done.stderr[-SHOWN:]}")
        return time.perf_counter() - began

    def _run(self, words: Sequence[str | Path], cwd: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
        called = [str(self.python), *map(str, words)]
        return subprocess.run(called, cwd=cwd, env=env, capture_output=True, text=True, timeout=LIMIT)

    @property
    def added(self) -> int:
        """Bytes that were installed into it."""
        return size(self.packages) - self.empty

    def versions(self, names: Sequence[str]) -> dict[str, str]:
        """Of packages, those that are installed."""
        known = json.loads(self.run("-c", _LISTED, cwd=self.packages).stdout)
        return {name: known[low] for name in names if (low := name.lower().replace("_", "-")) in known}


def kept() -> dict[str, str]:
    """This process's variables without what would show another environment."""
    return {name: text for name, text in os.environ.items() if not name.startswith("PYTHON")}


def variables(home: Path) -> dict[str, str]:
    """Those, without what would send anything anywhere; home is a folder of its own."""
    ours = {name: text for name, text in kept().items() if not name.startswith(("WANDB", "MLFLOW", "TRACKIO"))}
    ours |= {name: str(home) for name in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME")}
    offline = {"HF_HUB_OFFLINE": "1", "MLFLOW_DISABLE_TELEMETRY": "true", "TRACKIO_DIR": str(home / "trackio")}
    return ours | offline | {"OMP_NUM_THREADS": "1", "PYTHONNOUSERSITE": "1"}


def size(folder: Path) -> int:
    """Bytes of the files in a folder, without what Python compiles."""
    files = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return sum(path.stat().st_size for path in files)
