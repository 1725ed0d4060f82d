"""TRL in a virtual environment of its own, with the torch and the transformers that policygrad is measured with."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

TRL = "1.16.0"


def python(folder: Path, constraints: Path) -> Path:
    """The environment's interpreter; the environment is made where there is none of these versions.

    torch is asked for in the very build that is installed here (2.13.0+cpu, say), so that both sides compute with the same
    library, and no other one is ever fetched: where there is none to be had, pip says so.
    """
    wanted = [f"trl=={TRL}", f"torch=={version('torch')}", "psutil"]
    done, found = folder / "installed.txt", folder / "bin" / "python"
    said = "\n".join([*wanted, constraints.read_text(encoding="utf-8")])
    if done.is_file() and done.read_text(encoding="utf-8") == said:
        return found
    print(f"making TRL's environment in {folder}: {', '.join(wanted)}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    pip = [str(found), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", str(constraints)]
    subprocess.run([*pip, *wanted], check=True)
    done.write_text(said, encoding="utf-8")
    return found
